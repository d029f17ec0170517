"""The failure file of a run that is out of memory: planned and measured peaks, the phase, and an option to change."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from finetrainers.config.root import TrainConfig
from finetrainers.config.target import TargetDevice
from finetrainers.memory.advice import MEMORY_OPTIONS, Advice, MemoryOption, meets_needs, with_options_set
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import with_reserve
from finetrainers.memory.recorder import MemoryRecorder
from finetrainers.memory.swap_plan import NUM_SLOTS
from finetrainers.methods.registry import method_spec
from finetrainers.plan.memory_lines import advice_lines
from finetrainers.plan.memory_plan import run_memory
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.plan.start_report import memory_table
from finetrainers.utils.host_memory import HostMemory, read_host_memory
from finetrainers.utils.phases import (
    CHECKPOINT,
    ENCODING_CLIPS,
    ENCODING_TEXT,
    LOADING,
    PHASES,
    REWARD,
    ROLLOUT,
    TRAINING_STEP,
    VALIDATION,
    label,
    read_phase,
)  # fmt: skip
from finetrainers.utils.text import aligned

from .guards.memory import ADVICE, OutOfMemory, is_out_of_memory
from .state import TrainState

logger = logging.getLogger(__name__)

#: GiB by phase.
PhaseGib = Mapping[str, float]

#: The suggested option should lower the planned peak to this share.
_TARGET_SHARE = 0.9
#: Options of `MEMORY_OPTIONS` that lower the peak of a phase, the first choice first.
_OPTIONS_BY_PHASE: Mapping[str, tuple[str, ...]] = {
    TRAINING_STEP: ("gradient_checkpointing", "quantize_frozen", "optimizer"),
    ENCODING_CLIPS: ("precompute_batch_size", "enable_slicing", "enable_tiling"),
    ROLLOUT: ("offload_trajectory", "enable_tiling", "quantize_frozen"),
    VALIDATION: ("enable_model_cpu_offload", "enable_tiling"),
    REWARD: ("enable_tiling",),
}
#: Suggestions for a phase if none of `_OPTIONS_BY_PHASE` is applicable.
_FALLBACKS: Mapping[str, str] = {
    LOADING: "--transformer_dtype bf16, if the weights have another dtype; else --fsdp full, which shards them",
    REWARD: "smaller clips to score: --rollout_size",
    ROLLOUT: "smaller or shorter clips: --rollout_size",
    CHECKPOINT: "an optimizer with less state, copied by checkpoints: --optimizer adamw-torchao-8bit",
}


class MemoryFailures:
    """Writer of `failures/rank-N.txt` when a process is out of memory, and in advance when host memory is nearly full.

    The kernel ends a process without a message, so that nothing can be written afterwards.

    Attributes:
        path: of the file.
        state: of the run, or None until it is loaded.
    """

    def __init__(self, checked: ResolvedRun, memory: MemoryRecorder, *, rank: int) -> None:
        """Args:
        checked: the run.
        memory: measures it.
        rank: of this process.
        """
        self.path = checked.config.run.output_dir / "failures" / f"rank-{rank}.txt"
        self.state: TrainState | None = None
        self._checked = checked
        self._memory = memory
        memory.on_low_memory = self._nearly_full

    @contextlib.contextmanager
    def write_on_oom(self) -> Iterator[None]:
        """Write the file if an OOM ends the block, and name it in the error. A run that ends well leaves none.

        Raises:
            OutOfMemory: instead of any other error that an allocator had nothing left.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
                raise
            change = self._out_of_memory(error)
            text = f"{str(error).rstrip('.')}. Change first: {change}. Planned and measured memory: {self.path}"
            raise OutOfMemory(text) from error
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks may still have theirs there
            self.path.parent.rmdir()

    def _out_of_memory(self, error: BaseException) -> str:
        """Write the file, and return the option to change first."""
        phase = read_phase(error)
        while error.__cause__ is not None:
            error = error.__cause__
        message = str(error).split("\n", 1)[0].partition(f". {ADVICE[:16]}")[0] or type(error).__name__
        device = self._memory.device.type
        change = suggest_change(self._config, phase, on_host=device == "cpu" or isinstance(error, MemoryError))
        planned: PhaseGib = {}
        advised: list[str] = []
        with contextlib.suppress(MemoryError, RuntimeError, ValueError, OSError):  # from models that cannot be planned
            planned, advice = planned_memory(self._checked, self._config, phase, device_type=device)
            if advice is not None and advice.switches:
                switch = max(advice.switches, key=lambda step: step.saves).switch
                change = f"{switch.flags} ({switch.cost})"
                advised = advice_lines(advice, "with these options the estimate is")
        title = message if "out of memory" in message else f"out of memory: {message}"
        self._write(title, phase=phase, planned=planned, change=change, advised=advised)
        return change

    @property
    def _config(self) -> TrainConfig:
        """The run's options, with those that it has chosen once it is loaded."""
        return (self._checked if self.state is None else self.state).config

    def _nearly_full(self, left: HostMemory) -> None:
        """Write the file because the host has little memory left; called from another thread."""
        limit = "the container's limit" if left.limited_by == "container" else "this machine"
        message = (
            f"host memory is nearly full: {left.available / GIB:.2f} GiB are left of {limit} "
            f"({left.total / GIB:.1f} GiB)"
        )
        change = suggest_change(self._config, None, on_host=True)
        if self.state is not None:
            self.state.run_dir.event("host_memory_low", step=self.state.step, available_gib=left.available / GIB)
        self._write(
            f"{message}\nwritten in advance: if the process was killed without a message, this is why",
            phase=None, planned={}, change=change, advised=[],
        )  # fmt: skip
        logger.warning("%s; change first: %s; measured memory: %s", message, change, self.path)

    def _write(self, title: str, *, phase: str | None, planned: PhaseGib, change: str, advised: Sequence[str]) -> None:
        step = (
            "before the first step"
            if self.state is None
            else f"after {self.state.step} of {self.state.total_steps} steps"
        )
        lines = [
            f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {step}" + ("" if phase is None else f", phase: {label(phase)}"),
            title,
            f"change first: {change}",
            *advised,
            "",
            *_table(planned, {name: dict(peak) for name, peak in self._memory.peaks.items()}, phase),
            "planned: allocated memory, as estimated; missing numbers are not estimated",
            "",
            *_free_memory_lines(self._memory.device),
        ]
        with contextlib.suppress(OSError):  # it is the error that counts
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def planned_memory(
    checked: ResolvedRun, config: TrainConfig, phase: str | None, *, device_type: str
) -> tuple[dict[str, float], Advice | None]:
    """Return the estimated GiB of each phase and, if `phase` has the peak, the options that lower it, or None.

    Args:
        checked: the run.
        config: its options, with those that it has chosen.
        phase: that ran out of memory.
        device_type: of the device.
    """
    memory, decided = run_memory(checked), config.with_values({"fit_gpu": False})  # its choices did not fit
    plan = memory.plan(decided)
    peaks = {name: size / GIB for name, size in plan.peaks.items()}
    if phase != plan.peak_phase:
        return peaks, None
    target = _TARGET_SHARE * with_reserve(plan.peak) / GIB
    return peaks, memory.advice(target, device=TargetDevice(device_type), config=decided)


def _table(planned: PhaseGib, measured: Mapping[str, Mapping[str, float]], phase: str | None) -> list[str]:
    """Return the lines of a table of planned and measured peaks by phase, with a mark at the one that failed."""
    names = [name for name in PHASES if name in planned or name in measured]
    headings, *rows = memory_table({name: measured.get(name, {}) for name in names})
    table = [[headings[0], "planned", *headings[1:], ""]]
    for name, (title, *cells) in zip(names, rows, strict=True):
        mark = "< out of memory" if name == phase else ""
        table.append([title, f"{planned[name]:.2f}" if name in planned else "", *cells, mark])
    return aligned(table)


def _free_memory_lines(device: torch.device) -> list[str]:
    """Return lines with the free memory of the host and of the device."""
    left = read_host_memory()
    lines = [f"host: {left.available / GIB:.2f} of {left.total / GIB:.1f} GiB available ({left.limited_by})"]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        lines.append(f"{torch.cuda.get_device_name(device)}: {free / GIB:.2f} of {total / GIB:.1f} GiB free")
    return lines


def suggest_change(config: TrainConfig, phase: str | None, *, on_host: bool = False) -> str:
    """Return the option to change after an OOM, with its cost.

    Args:
        config: the run.
        phase: phase that the run was in, or None if it is unknown.
        on_host: whether the host's memory ran out.
    """
    workers = config.dataloader.dataloader_num_workers
    if on_host and phase is None and workers > 1 and "dataloader_num_workers" not in method_spec(config).unread:
        return f"--dataloader_num_workers {workers // 2} (fewer clips are decoded at once)"
    swapped = config.memory.blocks_to_swap
    if on_host and phase in (LOADING, TRAINING_STEP, None) and isinstance(swapped, int) and swapped:
        return f"--blocks_to_swap {swapped // 2 if swapped >= 2 * NUM_SLOTS else 0} (fewer wait in host memory)"
    if on_host and phase in (TRAINING_STEP, None) and config.memory.stored == "offload":
        return "--activation_memory checkpoint (blocks are recomputed, and nothing waits in host memory)"
    phase = phase or TRAINING_STEP
    if phase == TRAINING_STEP and config.dataloader.batch_size > 1 and config.memory.stored != "none":
        steps = config.training.gradient_accumulation_steps * config.dataloader.batch_size
        return f"--batch_size 1 --gradient_accumulation_steps {steps} (the same gradient in smaller micro-batches)"
    if phase == ENCODING_TEXT:
        return _suggest_for_text_encoders(config, on_host=on_host)
    # FSDP2 gathers into host memory in any case.
    if phase == CHECKPOINT and config.training.async_checkpointing and config.parallel.fsdp is None:
        return "--no-async_checkpointing (training waits for each save, and no second copy is in host memory)"
    for name in _OPTIONS_BY_PHASE.get(phase, ()):
        for switch in MEMORY_OPTIONS:
            if name in switch.options and _is_applicable(switch, config):
                return f"{switch.flags} ({switch.cost})"
    return _FALLBACKS.get(phase, "smaller or shorter clips: --video_resolution_buckets")


def _suggest_for_text_encoders(config: TrainConfig, *, on_host: bool) -> str:
    """Return the option that makes text encoders smaller than those in use."""
    dtypes = {name: config.get(name) for name in ("text_encoder_dtype", "text_encoder_2_dtype")}
    wide = " ".join(f"--{name} bf16" for name, dtype in dtypes.items() if dtype == "fp32")
    quantization = config.model.quantize_text_encoders
    is_cast = dtypes["text_encoder_dtype"] not in ("fp32", "bf16", "fp16")
    if wide:
        return f"{wide} (half as large)"
    if quantization == "none" and not is_cast:
        return "--quantize_text_encoders int8 (text encoders are rounded: prompt embeddings change slightly)"
    if quantization in ("int8", "fp8") and not on_host:
        return "--quantize_text_encoders nf4 (text encoders are rounded to 4 bits)"
    return "--precompute_conditions, with a cache that was filled on a machine with more memory"


def _is_applicable(switch: MemoryOption, config: TrainConfig) -> bool:
    """Return whether a switch is off, may be on in this run, and was not decided otherwise by the user."""
    is_lora = config.training.training_type == "lora"
    fits = {
        "gradient_checkpointing": config.memory.activation_memory is None and config.memory.stored == "none",
        "quantize_frozen": is_lora and not (config.training.use_dora or config.memory.layerwise_upcasting_modules),
        "optimizer": not is_lora,
        "precompute_batch_size": config.data.precompute_batch_size > 1,
        "enable_slicing": config.dataloader.batch_size > 1 or config.data.precompute_batch_size > 1,
    }
    changed = any(config.changed(name) for name in switch.options if name != "precompute_batch_size")
    is_on = with_options_set(config, [switch]) == config
    return (
        not changed
        and meets_needs(config, switch)
        and not is_on
        and all(fits.get(name, True) for name in switch.options)
    )
