"""Memory of a checked run by phase, for people and programs; the choice of options that fit a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from finetrainers.config.checks.options import check_config
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import is_network
from finetrainers.config.root import TrainConfig
from finetrainers.memory.activation_auto import (
    ASSUMED_FLOPS,
    ASSUMED_LINK,
    HOST_SHARE,
    activation_model,
    with_choice,
)
from finetrainers.memory.activation_plan import Choice, Machine
from finetrainers.memory.advice import OTHER_WAYS, Advice, cheapest
from finetrainers.memory.count_text import text_working_bytes
from finetrainers.memory.estimate import DTYPE_BYTES, GIB
from finetrainers.memory.network_weights import NetworkWeights
from finetrainers.memory.phases import RESERVE, TEXTS_AT_ONCE, RunPlan, Surroundings, plan_run
from finetrainers.memory.quantized_encoders import encoder_bytes_saved, largest_layer_bytes
from finetrainers.methods.registry import method_spec
from finetrainers.models.spec import ModelSpec, frozen_bytes
from finetrainers.optim.rules import optimizer_problems
from finetrainers.parallel.sharding import expected_split, with_launcher
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.host_memory import room
from finetrainers.utils.launch import launched_processes, local_world_size
from finetrainers.utils.phases import TRAINING_STEP, VALIDATION, label
from finetrainers.utils.text import aligned, file_size, plural

from .preflight import Preflight, preflight
from .room import Needs, disk_needs
from .start_report import part_name, print_line
from .trainable import network_without_weights


class RunMemory:
    """The estimate of a run, for its own options and for others."""

    def __init__(
        self, checked: Preflight, transformer: nn.Module | None = None, *, gpu_gib: float | None = None
    ) -> None:
        """Args:
        checked: the run, whose model's configs are on this disk.
        transformer: on the meta device, with its adapter attached.
        gpu_gib: memory that `--activation_memory auto` plans for; default: `memory_budget`, else that of this machine's GPU.
        """
        self.checked = checked
        self.gpu_gib = gpu_gib or checked.config.memory.memory_budget
        self.transformer = network_without_weights(checked) if transformer is None else transformer
        spec = checked.family.load(checked.config.model)
        networks = (*spec.facts.networks[:-1], *filter(is_network, spec.facts.companions))
        parts = {part: frozen_bytes(spec, part) for part in networks}
        bucket, method = checked.plan.heaviest(checked.config)[0], method_spec(checked.config)
        self._peaks: dict[str, Mapping[str, float] | None] = {}  # that were estimated, by configuration
        needs, weights = self.disk(), NetworkWeights(self.transformer, spec)
        self._around = Surroundings(
            bucket=bucket,
            encoded=tuple(checked.plan.buckets) if checked.plan.encodes_clips else (),
            sampled=tuple(prompt.size or checked.plan.size for prompt in checked.sampled),
            parts={part: size for part, size in parts.items() if size is not None},
            rewards=method.reward_bytes(checked.config),
            scoring=method.scoring_bytes(checked.config, _largest_scored(checked, bucket), fps=checked.frame_rate),
            checkpoint_bytes=needs.checkpoint,
            total=weights.total,
            trained=weights.trained,
            weights=weights,
            processes=launched_processes(),
            local_processes=local_world_size(),
        )

    def plan(self, config: TrainConfig | None = None, *, gpu_gib: float | None = None) -> RunPlan:
        """The memory of each phase; `config`: with other options that save memory; `gpu_gib`: for another GPU."""
        config = config or self.checked.config
        spec = self.checked.family.load(config.model)
        parts = {part: size - encoder_bytes_saved(spec, part) for part, size in self._around.parts.items()}
        around = replace(
            self._around,
            parts=parts,
            clips=self.checked.plan.heaviest(config)[1],
            split=expected_split(config.parallel),
            text_bytes=_text_bytes(config, spec),
        )
        chosen = None
        if config.memory.activation_memory == "auto":
            chosen = self._activations(config, spec, around, gpu_gib=gpu_gib or self.gpu_gib or _gpu_gib())
            config = with_choice(config, None if chosen is None else chosen[0])
        plan = plan_run(config, self.checked.geometry, self.transformer, spec=spec, around=around)
        return replace(plan, activations=chosen)

    def _activations(
        self, config: TrainConfig, spec: ModelSpec, around: Surroundings, *, gpu_gib: float | None
    ) -> tuple[Choice, Machine] | None:
        """What `auto` chooses, with assumed speeds; None: there is no GPU to plan for."""
        if gpu_gib is None:
            return None
        bucket, geometry = around.bucket, self.checked.geometry
        model = activation_model(
            config, geometry, self.transformer, spec=spec, bucket=bucket, batch_size=around.clips, split=around.split
        )
        step = plan_run(with_choice(config, None), geometry, self.transformer, spec=spec, around=around)
        others = step.peaks[TRAINING_STEP] - GIB * step.step.total
        machine = Machine(
            GIB * gpu_gib / (1 + RESERVE) - others, HOST_SHARE * room().total / around.local_processes,
            ASSUMED_FLOPS, ASSUMED_LINK,
        )  # fmt: skip
        return model.choose(machine), machine

    def disk(self) -> Needs:
        """What the run writes, without the cache."""
        return disk_needs(self.checked, self.transformer)

    def cache_bytes(self) -> float:
        """Bytes of the cache of encoded clips and texts."""
        config, plan = self.checked.config, self.checked.plan
        spec = self.checked.family.load(config.model)
        found = 0.0
        if config.data.precompute_conditions and plan.encodes_clips:
            channels = 2 * int(self.transformer.config.out_channels)  # type: ignore[union-attr, arg-type]
            media = 1 + len(spec.facts.media)
            for clip in plan.encoded_clips():
                shape = self.checked.geometry.denoised_shape(*clip.bucket)
                found += media * channels * math.prod(shape) * DTYPE_BYTES[config.model.vae_dtype]
        if method_spec(config).caches_texts(config):
            try:
                shapes = spec.text_shapes()
            except NotImplementedError:
                return found
            one = sum(math.prod(shape) * (1 if name.endswith("_mask") else 2) for name, shape in shapes.items())
            found += one * len({"", *plan.all_captions()})
        return found

    def advice(self, budget_gib: float, *, device_type: str = "cuda") -> Advice | None:
        """The cheapest options with which the run fits a GPU; None: there are none."""

        def peaks(config: TrainConfig) -> Mapping[str, float] | None:
            key = f"{budget_gib} {device_type} {config.model_dump_json()}"
            if key not in self._peaks:
                self._peaks[key] = self._peaks_of(config, device_type, budget_gib)
            return self._peaks[key]

        return cheapest(self.checked.config, peaks, budget=GIB * budget_gib / (1 + RESERVE))

    def _peaks_of(self, config: TrainConfig, device_type: str, budget_gib: float) -> Mapping[str, float] | None:
        """Bytes of each phase; None: the run would be refused."""
        rules = check_config(config, facts=self.checked.facts, prompts=self.checked.prompts, scored=self.checked.scored)
        parts = with_launcher(config.parallel).fsdp is not None
        errors, _ = optimizer_problems(
            config, device_type=device_type, num_processes=launched_processes(), updates_parts=parts
        )
        return None if rules.errors or errors else self.plan(config, gpu_gib=budget_gib).peaks


def _largest_scored(checked: Preflight, bucket: tuple[int, int, int]) -> tuple[int, int, int]:
    """The size of the clips that rewards score: those that are trained on, or samples of prompts."""
    if method_spec(checked.config).samples:
        return bucket
    sizes = [prompt.size or checked.plan.size for prompt in checked.scored or checked.prompts]
    return max(sizes, key=math.prod, default=bucket)


def _gpu_gib() -> float | None:
    """Memory of this machine's GPU; None: there is none."""
    if likely_device_type() != "cuda":
        return None
    import torch

    return torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else None


def _text_bytes(config: TrainConfig, spec: ModelSpec) -> float:
    """Activations of encoding a batch of texts, of the encoder that takes most."""
    batch = TEXTS_AT_ONCE if method_spec(config).caches_texts(config) else config.dataloader.batch_size
    working = (
        text_working_bytes(spec, part, batch=batch) + largest_layer_bytes(spec, part) for part in spec.facts.text_parts
    )
    return max(working, default=0.0)


# ---- for people --------------------------------------------------------------------------------------------------------


def memory_lines(memory: RunMemory, plan: RunPlan) -> list[str]:
    """The estimate as a table of phases, what the peak consists of, host memory and disk."""
    peak = plan.peak_phase
    rows = [["memory of a process, estimated", "GPU", "host", ""]]
    for phase, size in plan.peaks.items():
        mark = "< peak" if phase == peak else ""
        rows.append([f"  {label(phase)}", file_size(size), file_size(plan.host[phase]), mark])
    lines = [*(line.rstrip() for line in aligned(rows)), f"of the peak ({label(peak)}):"]
    parts = sorted(plan.phases[peak].items(), key=lambda part: -part[1])
    lines += aligned([[f"  {part_name(name)}", file_size(size)] for name, size in parts if size >= 0.005 * plan.peak])
    lines.append(
        f"allocated {file_size(plan.peak)}; reserved, with 15 % for CUDA and fragmentation: "
        f"{file_size((1 + RESERVE) * plan.peak)}"
    )
    machine = plural(plan.local_processes, "process", "processes")
    lines.append(f"host memory of a machine, {machine}: {file_size(plan.machine_bytes)}")
    options = with_launcher(memory.checked.config.parallel)
    if launched_processes() == 1 and (options.fsdp is not None or options.deepspeed):
        lines.append("planned for 1 process; finetrainers estimate --num_processes N plans for N")
    lines += _activation_lines(memory, plan)
    lines += plan.step.swap.lines()
    if plan.unknown:
        lines.append(f"not in it, since not on this disk: {', '.join(map(part_name, plan.unknown))}")
    if memory.checked.config.memory.compile != "none":
        lines.append("compiled blocks store less than this; how much is not known without a GPU")
    needs = memory.disk()
    disk = [f"{needs.num_checkpoints} x {file_size(needs.checkpoint)} of checkpoints"] if needs.num_checkpoints else []
    cache = memory.cache_bytes()
    disk += [f"cache {file_size(cache)}"] if cache else []
    return [*lines, f"disk: {', '.join([*disk, f'result {file_size(needs.result)}'])}"]


def _activation_lines(memory: RunMemory, plan: RunPlan) -> list[str]:
    """What `--activation_memory auto` chooses."""
    if memory.checked.config.memory.activation_memory != "auto":
        return []
    if plan.activations is None:
        return ["--activation_memory auto: none on a CPU; --gpu 24GB says what it chooses on that GPU"]
    choice, machine = plan.activations
    speed = f"{machine.flops / 1e12:.0f} TFLOP/s, {machine.link / 1e9:.0f} GB/s"
    return [
        f"--activation_memory auto, assuming {speed}, {machine.host / GIB:.1f} GiB of host memory for activations:",
        f"  {choice.what}",
        f"  {choice.why(machine)}",
    ]


def fit_lines(plan: RunPlan, gpu_gib: float, advice: Advice | None) -> list[str]:
    """Whether it fits a GPU, and what makes it fit."""
    needed = (1 + RESERVE) * plan.peak
    if needed <= gpu_gib * GIB:
        return [f"it fits {gpu_gib:g} GB: {file_size(needed)} are needed"]
    lines = [f"it does not fit {gpu_gib:g} GB: {file_size(needed)} are needed"]
    if advice is None:
        lines.append("no set of options makes it fit. What does:")
        return [*lines, *(f"  * {way}" for way in OTHER_WAYS)]
    return [*lines, *advice_lines(advice, "it fits with")]


def advice_lines(advice: Advice, heading: str) -> list[str]:
    """The switches of an advice, each with what it saves and costs."""
    peak = (1 + RESERVE) * max(advice.peaks.values()) / GIB
    lines = [f"{heading} {peak:.1f} GiB:"]
    for switch, saved in advice.switches:
        percent = switch.slowdown
        slower = (
            "slowdown not measured" if percent is None else f"+{percent:g} % time" if percent else "training as fast"
        )
        lines.append(f"  {switch.flags}")
        lines.append(f"      saves {file_size(saved)}; {slower}; {switch.cost}")
    return lines


def as_json(memory: RunMemory, plan: RunPlan, gpu_gib: float | None, advice: Advice | None) -> dict[str, Any]:
    """The estimate for programs; sizes in bytes."""
    needs = memory.disk()
    found: dict[str, Any] = {
        "phases": {
            phase: {"gpu": round(size), "host": round(plan.host[phase]), "parts": {k: round(v) for k, v in parts.items()}}
            for (phase, size), parts in zip(plan.peaks.items(), plan.phases.values(), strict=True)
        },
        "peak": {"phase": plan.peak_phase, "allocated": round(plan.peak), "reserved": round((1 + RESERVE) * plan.peak)},
        "processes": launched_processes(),
        "machine_host": round(plan.machine_bytes),
        "disk": {
            "checkpoint": needs.checkpoint, "num_checkpoints": needs.num_checkpoints, "result": needs.result,
            "samples": needs.samples, "cache": round(memory.cache_bytes()),
        },
        "unknown": list(plan.unknown),
    }  # fmt: skip
    if plan.activations is not None:
        choice, _ = plan.activations
        found["activation_memory"] = {
            "setting": choice.stored, "blocks": choice.number, "of": choice.total, "host": round(choice.host),
            "slowdown_percent": round(100 * choice.slower, 1), "fits": choice.fits,
        }  # fmt: skip
    if gpu_gib is not None:
        found["gpu_gib"] = gpu_gib
        found["fits"] = (1 + RESERVE) * plan.peak <= GIB * gpu_gib
        if not found["fits"]:
            found["advice"] = None if advice is None else {
                "reserved": round((1 + RESERVE) * max(advice.peaks.values())),
                "switches": [
                    {"options": dict(s.options), "saves": round(saved), "slowdown_percent": s.slowdown, "cost": s.cost}
                    for s, saved in advice.switches
                ],
            }  # fmt: skip
    return found


# ---- for runs ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def run_memory(checked: Preflight) -> RunMemory:
    """The estimate of a run, made once: building a large network without weights takes a second."""
    return RunMemory(checked)


def print_planned(checked: Preflight) -> None:
    """One line at the start of a run."""
    if checked.family.configs_not_here(checked.config.model):
        return
    plan = run_memory(checked).plan()
    if likely_device_type() == "cpu":
        print_line(
            f"memory, planned: {file_size(plan.local_processes * plan.peak + plan.machine_bytes)} of host memory (no GPU)"
        )
        return
    print_line(
        f"memory, planned: {file_size(plan.peak)} on the GPU in the phase {label(plan.peak_phase)}, about "
        f"{file_size((1 + RESERVE) * plan.peak)} reserved; {file_size(plan.machine_bytes)} of host memory"
    )


def planned_peaks(checked: Preflight) -> dict[str, dict[str, float]]:
    """GiB that the estimate has for each phase of a process, named as the measured peaks; empty if it cannot be made."""
    if checked.family.configs_not_here(checked.config.model):
        return {}
    plan = run_memory(checked).plan()
    if likely_device_type() == "cpu":
        return {phase: {"host": round((size + plan.host[phase]) / GIB, 4)} for phase, size in plan.peaks.items()}
    return {
        phase: {
            "allocated": round(size / GIB, 4),
            "reserved": round((1 + RESERVE) * size / GIB, 4),
            "host": round(plan.host[phase] / GIB, 4),
        }
        for phase, size in plan.peaks.items()
    }


def within_budget(checked: Preflight) -> Preflight:
    """The run with the cheapest options that fit `memory_budget`, which are printed.

    Raises:
        ConfigError: nothing fits.
    """
    budget = checked.config.memory.memory_budget
    if budget is None:
        return checked
    memory = run_memory(checked)
    plan = memory.plan()
    needed = (1 + RESERVE) * plan.peak / GIB
    if needed <= budget:
        print_line(f"memory budget: {needed:.1f} of {budget:g} GiB are planned; no option is changed")
        return checked
    advice = memory.advice(budget, device_type=likely_device_type())
    if advice is None:
        ways = "".join(f"\n    * {way}" for way in OTHER_WAYS)
        message = (
            f"{needed:.1f} GiB are planned, more than {budget:g}, and no set of options makes it fit. What does:{ways}"
        )
        raise ConfigError([Problem("--memory_budget", message)])
    for line in advice_lines(advice, f"memory budget: {needed:.1f} GiB are planned, more than {budget:g}. Chosen:"):
        print_line(line)
    return replace(preflight(advice.config), unseen=checked.unseen)


def offloads_samples(checked: Preflight, *, gpu_bytes: float | None) -> bool:
    """Whether validation samples with the model's parts in host memory: as asked for, else if it would not fit otherwise.

    Args:
        checked: the run.
        gpu_bytes: memory of the GPU; None: there is none, or the strategy cannot move weights.
    """
    asked = checked.config.validation.enable_model_cpu_offload
    if asked is not None or gpu_bytes is None or not checked.sampled:
        return bool(asked)
    needed = (1 + RESERVE) * run_memory(checked).plan().peaks.get(VALIDATION, 0.0)
    if needed <= gpu_bytes:
        return False
    print_line(
        f"note: samples are drawn with the model's parts in host memory: {needed / GIB:.1f} GiB are planned otherwise, and "
        f"the GPU has {gpu_bytes / GIB:.1f} (--no-enable_model_cpu_offload)"
    )
    return True
