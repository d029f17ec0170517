"""DeepSpeed ZeRO through accelerate: optimizer state, gradients (2) and weights (3) are split.

Accelerate's own stepping is not used. It updates the weights within `backward` of the last micro-batch, so that a step
could not be checked before it happens; and it has DeepSpeed divide by a fixed number of micro-batches.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, patch_environment
from torch import Tensor, nn
from transformers.integrations import unset_hf_deepspeed_config

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.parallel import ParallelSection
from finetrainers.config.root import TrainConfig
from finetrainers.utils.deepspeed_operators import note_compiling
from finetrainers.utils.failures import InputError
from finetrainers.utils.launch import is_enabled

from .sharding import USE_DEEPSPEED
from .strategy import DEEPSPEED_FOLDER, Load, MakeOptimizer, Strategy, Swap, WeightFilter, widen

logger = logging.getLogger(__name__)

_TAG = "state"
_LAYOUT = "DeepSpeed ZeRO-{stage} (processes: {processes})"
#: Optimizers with the two moments of Adam in fp32, which DeepSpeed's converter expects.
_RESHARDED = ("adam", "adamw", "adamw-deepspeed-cpu")


def make_plugin(options: ParallelSection) -> DeepSpeedPlugin:
    """Return the plugin that a file of `accelerate launch` would configure."""
    host = "cpu" if options.zero_offload else "none"
    return DeepSpeedPlugin(
        zero_stage=options.zero_stage,
        offload_optimizer_device=host,
        offload_param_device=host if options.zero_stage == 3 else "none",
        zero3_init_flag=False,
        zero3_save_16bit_model=True,
    )


def complete_settings(
    settings: dict[str, Any], *, batch_size: int, accumulation: int, processes: int, max_grad_norm: float
) -> None:
    """Write the run's own options into the config that DeepSpeed reads."""
    settings |= {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": batch_size * accumulation * processes,
        "gradient_clipping": max_grad_norm,
    }
    # Without it, a run under stage 3 would fail at its first checkpoint.
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


def split_weights(
    network: nn.Module, settings: dict[str, Any], *, device: torch.device, computed: torch.dtype | None
) -> None:
    """Shard a network from host memory, weight by weight (ZeRO-3). DeepSpeed would move all of it to the device first.

    Args:
        network: the network, on the CPU. Its buffers are moved to the device.
        settings: DeepSpeed's config.
        device: device of this process.
        computed: dtype of the mixed precision, which DeepSpeed casts to, or None for no cast.
    """
    from deepspeed import zero

    for parameter in network.parameters():
        if computed is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(computed)
    zero.Init(module=network, config_dict_or_path=settings)
    for buffer in network.buffers():
        buffer.data = buffer.data.to(device)


def whole_weights(network: nn.Module, *, gathers: bool, wanted: WeightFilter) -> dict[str, Tensor]:
    """Return trainable weights and buffers by name, each copied to host memory before the next is gathered.

    Args:
        network: the network, without DeepSpeed's engine.
        gathers: whether weights are sharded (ZeRO-3), so that all processes must call this. Frozen ones are then left
            out.
        wanted: selects tensors for this process by name.
    """
    from deepspeed import zero

    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    weights = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if name in frozen:
            if wanted(name) and not gathers:
                weights[name] = tensor.detach()
            continue
        # Under stages 1 and 2 trainable weights are pieces of one flat tensor, which a file of named tensors cannot
        # hold.
        with zero.GatheredParameters(tensor) if gathers and tensor.requires_grad else nullcontext():
            if wanted(name):
                weights[name] = tensor.detach().to("cpu", copy=True)
    return weights


def convert(saved: Path, converted: Path) -> None:
    """Convert DeepSpeed's own files to its universal format, by its own converter."""
    from deepspeed.checkpoint.ds_to_universal import main

    logger.info("converting DeepSpeed's state for another number of processes")
    options = Namespace(
        input_folder=str(saved), output_folder=str(converted), num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=True, inject_missing_state=False,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # bars and titles
        main(options)


def _check_environment() -> None:
    """Refuse a variable that turns DeepSpeed off.

    Raises:
        ConfigError: it is set.
    """
    if is_enabled("ACCELERATE_USE_CPU"):
        message = (
            "accelerate leaves DeepSpeed out when it is set; unset it: DeepSpeed detects by itself that there is no GPU"
        )
        raise ConfigError([Problem("ACCELERATE_USE_CPU", message, "conflict")])


class ZeRO(Strategy):
    """Processes among which DeepSpeed divides optimizer state, gradients and weights."""

    weights_are_movable = False
    uses_autocast = False
    shares_saving = True
    saves_optimizer_itself = True
    can_drop_gradients = False
    why_no_swap = "is not supported with DeepSpeed, which moves and broadcasts all weights; use DDP or --fsdp full"
    why_no_retry = (
        "DeepSpeed sums gradients in its own buffers during the backward pass: halve --batch_size and double "
        "--gradient_accumulation_steps"
    )

    def __init__(self, config: TrainConfig, options: ParallelSection) -> None:
        """See `Strategy`.

        Raises:
            ConfigError: DeepSpeed is to split nothing, or no launcher started the processes.
        """
        if "LOCAL_RANK" not in os.environ:
            message = "requires a launcher, even for one process: deepspeed, torchrun, or accelerate launch"
            raise ConfigError([Problem("--deepspeed", message, "required")])
        _check_environment()
        shared_memory = [] if torch.cuda.is_available() else ["deepspeed_shm_comm"]
        note_compiling([*shared_memory, *(["cpu_adam"] if options.zero_offload else [])])
        super().__init__(config, options)
        complete_settings(
            self._plugin.deepspeed_config, batch_size=config.dataloader.batch_size, accumulation=self.accumulation,
            processes=self.world_size, max_grad_norm=self.max_grad_norm,
        )  # fmt: skip
        # Accelerate passes stage 3 to transformers, which would cut the frozen text encoders into shards that are never
        # joined again.
        unset_hf_deepspeed_config()

    @classmethod
    def planned(cls, config: TrainConfig, options: ParallelSection, *, device_type: str) -> Strategy:
        _check_environment()
        return super().planned(config, options, device_type=device_type)

    def _apply(self, config: TrainConfig, options: ParallelSection) -> None:
        super()._apply(config, options)
        # A launcher's file may name a file of DeepSpeed, which accelerate has read.
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        stage = options.zero_stage if plugin is None else plugin.zero_stage
        if not stage:
            message = "ZeRO stage 0 shards nothing; use stage 1 to 3, or accelerate_configs/ddp.yaml"
            raise ConfigError([Problem("DeepSpeed", message)])
        self.optimizer_shards = self.world_size
        # Each process has a separate part.
        self.optimizer_layout = _LAYOUT.format(stage=stage, processes=self.world_size)
        self._reshards = config.optimizer.optimizer in _RESHARDED and not config.optimizer.use_8bit_bnb
        self._splits_weights = stage == 3
        self.forward_is_collective = self._splits_weights
        self.weights_are_whole = self.takes_integer_weights = self.compiles_blocks = not self._splits_weights

    def _join(self, mixed_precision: str | None, *, on_cpu: bool, **group: Any) -> Accelerator:
        # On CPUs `cpu=True`, which other strategies need, would turn DeepSpeed off.
        if on_cpu:
            group["backend"] = "gloo"
        plugin = None if is_enabled(USE_DEEPSPEED) else make_plugin(self._options)
        # Accelerate also reads this variable; a later run of this process may use another strategy.
        with patch_environment(**{USE_DEEPSPEED: "true"}):
            return super()._join(mixed_precision, on_cpu=False, deepspeed_plugin=plugin, **group)

    @property
    def _plugin(self) -> Any:
        return self.accelerator.state.deepspeed_plugin

    def _kind(self) -> str:
        return f"deepspeed zero-{self._plugin.zero_stage}"

    # ---- stepping ----------------------------------------------------------------------------------------------

    def prepare(
        self, load: Load, make_optimizer: MakeOptimizer, *, blocks: Sequence[str] = (), swap: Swap | None = None,
        mapped: bool = False, widened: torch.dtype | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        assert swap is None, "DeepSpeed cannot leave weights alone"
        with self.raise_on_all_ranks("loading the network"):
            model = widen(load(), widened)  # DeepSpeed takes it from host memory, on all ranks together
        with self.raise_on_all_ranks("making the optimizer"):
            optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        if self._splits_weights:
            computed = None if self.accelerator.mixed_precision == "no" else self.compute_dtype(torch.float32)
            split_weights(model, self._plugin.deepspeed_config, device=self.device, computed=computed)
        self._engine, _ = self.accelerator.prepare(model, optimizer)
        self._parameters = [p for p in self._engine.parameters() if p.requires_grad]
        return self._engine, DeepSpeedOptimizer(self._engine)

    def _place_frozen(self, model: nn.Module, computed: torch.dtype, blocks: Sequence[str]) -> nn.Module:
        return model.to(self.device, computed)  # the dtype that DeepSpeed converts the trained network to

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        self._micro_batch += 1
        self._engine.set_gradient_accumulation_boundary(self._micro_batch == self.accumulation)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def clip_grad_norm(self) -> Tensor | None:
        """Return the norm of the step's gradients, infinite if one is not finite; DeepSpeed clips in its step."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        optimizer = self._engine.optimizer
        # Its `step` will compute the same norm: `get_global_grad_norm` returns that of the step before. There is no
        # public name under stage 3.
        norm = (
            combine_grad_norm_groups(optimizer._get_norm_groups())
            if self._splits_weights
            else optimizer.scaled_global_norm()
        )
        return norm / optimizer.loss_scale

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def full_state(self, model: nn.Module, *, wanted: WeightFilter | None = None) -> dict[str, Tensor]:
        wanted = wanted or (lambda _: self.is_main)
        return whole_weights(self.unwrap(model), gathers=self._splits_weights, wanted=wanted)

    def optimizer_state(self, model: nn.Module, optimizer: Any) -> dict[str, Any] | None:
        return None

    def load_optimizer(self, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        raise NotImplementedError("DeepSpeed reads its own files alone")

    def save_own_files(self, directory: Path) -> None:
        from deepspeed.checkpoint.constants import (
            UNIVERSAL_CHECKPOINT_INFO,
            UNIVERSAL_CHECKPOINT_VERSION_KEY,
            UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        )

        # DeepSpeed's converter to its format for any number of processes looks for this, and for no other own entry.
        version = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
        self._engine.save_checkpoint(
            str(directory / DEEPSPEED_FOLDER),
            tag=_TAG,
            client_state={UNIVERSAL_CHECKPOINT_INFO: version},
            exclude_frozen_parameters=True,
        )

    def reads_optimizer_of(self, layout: str) -> bool:
        """Return whether a layout is this one, or for Adam and AdamW, that of other processes under this stage."""
        own, _, _ = self.optimizer_layout.partition(" (")
        return layout == self.optimizer_layout or (self._reshards and layout.startswith(f"{own} ("))

    def load_own_files(self, directory: Path) -> None:
        saved = directory / DEEPSPEED_FOLDER
        if not saved.is_dir():  # DeepSpeed would warn, and start its optimizer from scratch
            raise InputError(
                f"{directory} was saved without DeepSpeed, which reads only its own optimizer state; continue with "
                "DDP or FSDP2",
                "mismatch",
            )
        if len(list((saved / _TAG).glob("*optim_states.pt"))) == self.world_size:
            self._engine.load_checkpoint(str(saved), tag=_TAG, load_module_strict=False)
            return
        with self._convert_layout(directory) as converted:
            self._engine._config.load_universal_checkpoint = True  # it has no other switch after the start
            try:
                self._engine.load_checkpoint(str(converted), tag=_TAG, load_module_strict=False)
            finally:
                self._engine._config.load_universal_checkpoint = False

    @contextmanager
    def _convert_layout(self, directory: Path) -> Iterator[Path]:
        """Convert DeepSpeed's state of a checkpoint to its universal format, for any number of processes, in a folder.

        Rank 0 converts it on disk, next to the checkpoint, where all ranks see it; this takes twice the state's space.
        """
        folder: Path | None = None
        try:
            with self.raise_on_all_ranks("converting DeepSpeed's state for this number of processes"):
                if self.is_main:
                    # Removed with the leftovers of killed saves.
                    temporary = tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".tmp", dir=directory.parent)
                    folder = Path(temporary)
                    convert(directory / DEEPSPEED_FOLDER / _TAG, folder / _TAG)
            yield Path(self.broadcast_object(str(folder)))
            self.barrier()
        finally:
            if folder is not None:
                shutil.rmtree(folder)


class DeepSpeedOptimizer:
    """Optimizer whose update is DeepSpeed's: clip, step, distribute the new weights, forget the gradients."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of DeepSpeed's optimizer."""
        return self._engine.optimizer.param_groups

    @property
    def step_was_skipped(self) -> bool:
        """True if DeepSpeed found that the last step's gradients were not finite."""
        return bool(getattr(self._engine.optimizer, "overflow", False))

    def step(self) -> None:
        """Update the weights."""
        self._engine.step()

    def zero_grad(self) -> None:
        """Forget accumulated gradients, as DeepSpeed's own step does when they are not finite."""
        optimizer = self._engine.optimizer
        if hasattr(optimizer, "_overflow_clean_up"):  # stage 3
            optimizer._pre_step()
            optimizer._overflow_clean_up(optimizer.loss_scale)
            return
        optimizer.micro_step_id = -1
        optimizer.zero_grad(set_to_none=True)
        if optimizer.cpu_offload:
            optimizer._offload_accumulated_param_ids = set()
            optimizer.reset_cpu_buffers()
            return
        for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for group in gradients:
                gradients[group] = None
