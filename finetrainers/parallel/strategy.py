"""Interface of a strategy for several processes; the strategies are in `ddp.py`, `fsdp.py` and `zero.py`."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, DynamoBackend, GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.parallel import ParallelSection, groups_problem
from finetrainers.config.root import TrainConfig
from finetrainers.models.spec import unwrap
from finetrainers.utils.failures import InputError
from finetrainers.utils.launch import is_enabled, launched_processes
from finetrainers.utils.process_state import process_groups
from finetrainers.utils.text import plural

from .ranks import DistributedContext

if TYPE_CHECKING:
    from .slices import Slices

logger = logging.getLogger(__name__)

#: Folder of DeepSpeed's own files in a checkpoint.
DEEPSPEED_FOLDER = "deepspeed"
#: Returns a network, on the CPU.
Load = Callable[[], nn.Module]
#: Builds the optimizer over weights.
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
#: Returns whether a process needs a weight, by its name.
WeightFilter = Callable[[str], bool]
#: Removes frozen weights from the strategy before it moves, broadcasts or splits any; returns them by name.
Swap = Callable[[nn.Module], Mapping[str, nn.Parameter]]


class Strategy(DistributedContext):
    """The processes of a run with the wrapped network and optimizer.

    Attributes:
        forward_is_collective: whether a forward pass needs all processes.
        weights_are_whole: whether every process holds all weights.
        weights_are_movable: whether weights are whole tensors that may be moved or overwritten between steps.
        compiles_blocks: whether a block may be compiled as one graph; False if its weights are gathered within.
        takes_integer_weights: whether frozen weights may be integers, the codes of quantized ones.
        uses_autocast: whether mixed precision is by autocast.
        shares_saving: whether each process may write its part of a checkpoint.
        saves_optimizer_itself: whether only the strategy can write the optimizer's state, on all processes, while
            training waits.
        updates_shards: whether the optimizer is given parts of weights.
        can_drop_gradients: whether gradients can be dropped without an update at any point of a step.
        why_no_retry: why a step that ran out of memory cannot be retried, as the end of a sentence, or None if it can.
        why_no_swap: why blocks cannot be swapped, with the remedy, or None if they can.
        sequence_group: the processes that share this one's clips (`--sp_size`), or None if its clips are not shared.
        optimizer_shards: number of processes that the optimizer's state is divided over.
        optimizer_layout: name of the layout of a saved optimizer state (`reads_optimizer_of`). Checkpoints store it.
    """

    forward_is_collective = False
    weights_are_whole = True
    weights_are_movable = True
    compiles_blocks = True
    takes_integer_weights = True
    uses_autocast = True
    shares_saving = False
    saves_optimizer_itself = False
    updates_shards = False
    can_drop_gradients = True
    why_no_retry: str | None = None
    why_no_swap: str | None = None
    optimizer_shards = 1
    optimizer_layout = "DDP, FSDP2 or one process"

    def __init__(self, config: TrainConfig, options: ParallelSection) -> None:
        """Join the other processes.

        Args:
            config: config of the run.
            options: its parallel options, completed by the launcher's (`sharding.with_launcher`).
        """
        self.accumulation = config.training.gradient_accumulation_steps
        self.max_grad_norm = config.optimizer.max_grad_norm
        self._options = options
        self._micro_batch = 0  # of the step, from 1
        self._parameters: list[nn.Parameter] = []
        precision = _mixed_precision(config)
        # Accelerate keeps its state in the process; an earlier run's must not affect this one.
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        timeout = timedelta(seconds=config.run.nccl_timeout)
        host_groups = process_groups()
        if host_groups and launched_processes() > 1 and config.changed("nccl_timeout"):
            logger.warning("--nccl_timeout does not apply to the process group that this program initialized itself")
        accelerator = self._join(precision, on_cpu=trains_on_cpu(), timeout=timeout)
        super().__init__(
            accelerator,
            timeout=timeout,
            idle_timeout=timedelta(seconds=config.run.idle_timeout),
            sharing=options.sp_size,
            host_groups=host_groups,
        )
        world_size = launched_processes()
        if self.world_size != world_size:
            raise RuntimeError(
                f"the launcher started {world_size} processes, but this one sees {self.world_size}: they would train "
                "separately. Launch with a file from accelerate_configs/; on CPUs set ACCELERATE_USE_CPU=true"
            )
        self.sequence_group: dist.ProcessGroup | None = None
        if self.world_size % options.sp_size:
            raise ConfigError([Problem("--sp_size", groups_problem(self.world_size, options.sp_size))])
        if options.sp_size > 1:
            # Groups are neighbors, which are on one machine if their number divides its processes.
            shape, names = (self.data_size, options.sp_size), ("data", "sequence")
            self.sequence_group = init_device_mesh(self.device.type, shape, mesh_dim_names=names).get_group("sequence")
        self._apply(config, options)

    @classmethod
    def planned(cls, config: TrainConfig, options: ParallelSection, *, device_type: str) -> Strategy:
        """Return a strategy that has joined no process, only to read its attributes.

        Args:
            config, options: see `__init__`.
            device_type: where it would train.

        Raises:
            ConfigError: see `__init__`.
        """
        strategy = cls.__new__(cls)
        strategy._options = options
        backend = DynamoBackend(os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").upper())
        strategy.accelerator = SimpleNamespace(  # type: ignore[assignment]
            device=torch.device(device_type),
            num_processes=launched_processes(),
            mixed_precision=_mixed_precision(config) or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
            state=SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=backend)),
        )
        strategy._apply(config, options)
        return strategy

    def _apply(self, config: TrainConfig, options: ParallelSection) -> None:
        """Set the attributes that depend on options and on the number of processes."""
        if options.sp_size > 1:
            self.why_no_retry = (
                "processes that share a clip (--sp_size) wait for each other within the step: halve --batch_size and "
                "double --gradient_accumulation_steps"
            )

    def _join(
        self,
        mixed_precision: str | None,
        *,
        on_cpu: bool,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        **group: Any,
    ) -> Accelerator:
        """Join the other processes. On CPUs accelerate needs `cpu`, or it leaves each process in a world of one."""
        return Accelerator(
            mixed_precision=mixed_precision,
            cpu=on_cpu,
            deepspeed_plugin=deepspeed_plugin,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=self.accumulation, sync_with_dataloader=False
            ),
            kwargs_handlers=[InitProcessGroupKwargs(**group)],
        )

    def compute_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the dtype that a network with weights of this dtype computes in."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, weights)

    def describe(self) -> str:
        """Return one line on strategy, ranks, device and precision."""
        kind = self._kind()
        processes = plural(self.world_size, "process", "processes") + (f" ({kind})" if kind else "")
        processes += "" if self.sharing == 1 else f", {self.sharing} share each clip,"
        return f"{processes} on {self.device}, {self.accelerator.mixed_precision} mixed precision"

    @abstractmethod
    def _kind(self) -> str:
        """Return the strategy's name, empty for one process."""

    @property
    def optimizer_device(self) -> torch.device:
        """Device of the optimizer's state."""
        return self.device

    @property
    def scaler(self) -> Any:
        """The fp16 gradient scaler, or None."""
        return self.accelerator.scaler

    @property
    def scales_loss(self) -> bool:
        """True if losses are scaled for fp16, so that gradients overflow now and then."""
        return self.accelerator.mixed_precision == "fp16"

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute operations in the dtype of the mixed precision within the block."""
        return self.accelerator.autocast()

    # ---- wrapping and stepping ---------------------------------------------------------------------------------

    @abstractmethod
    def prepare(
        self, load: Load, make_optimizer: MakeOptimizer, *, blocks: Sequence[str] = (), swap: Swap | None = None,
        mapped: bool = False, widened: torch.dtype | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        """Load and wrap a network, and the optimizer over its trainable weights. Every rank must call it.

        The processes of a machine load one after another to save host memory (`one_at_a_time`), unless they map files.

        Args:
            load: returns the network, on the CPU; trainable weights require gradients.
            make_optimizer: builds the optimizer over weights.
            blocks: attributes of the network that list its repeated blocks.
            swap: places the weights of swapped blocks, where `why_no_swap` is None; the others go to the device.
            mapped: whether the network's weights are mapped from files.
            widened: the dtype that weights are converted to, a part at a time, once they are on the device or in
                shards.

        Raises:
            RuntimeError: loading failed on another rank.
        """

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer that steps the weights: with a gradient scaler accelerate's wrapper, otherwise itself.

        The wrapper looks for optional packages on disk at every step.
        """
        return optimizer if self.scaler is None else self.accelerator.prepare_optimizer(optimizer)

    def prepare_frozen(self, load: Load, *, weights: torch.dtype, blocks: Sequence[str] = ()) -> nn.Module:
        """Load a frozen network that computes as the trained one does. Every rank must call it.

        Args:
            load: returns the network, on the CPU, in the dtype that the trained one was loaded in.
            weights: that dtype.
            blocks: see `prepare`.

        Raises:
            RuntimeError: loading failed on another rank.
        """
        return self.one_at_a_time(
            "loading the frozen copy",
            lambda: self._place_frozen(load().eval().requires_grad_(False), self.compute_dtype(weights), blocks),
        )

    def _place_frozen(self, model: nn.Module, computed: torch.dtype, blocks: Sequence[str]) -> nn.Module:
        """Move a frozen network to the device, whole; `computed` is the dtype that the trained one computes in."""
        return model.to(self.device)

    def begin_step(self, num_micro_batches: int) -> None:
        """Set the number of micro-batches of the coming optimizer step."""
        self.accumulation = num_micro_batches
        self._micro_batch = 0

    @abstractmethod
    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch: gradients are exchanged in the last of a step only, or not yet."""

    def backward(self, loss: Tensor) -> None:
        """Backpropagate; the losses of a step's micro-batches add up."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def complete_exchange(self) -> None:
        """Send the gradients that other ranks wait for, after the micro-batches of a step or an OOM in one of them.

        No average is used before `all_reduce`, and `begin_step` drops them: so ranks can agree to retry.
        """

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Leave every process its own gradients of passes within the block."""
        return nullcontext()

    def all_reduce(self) -> None:
        """Replace gradients by their averages over ranks, unless the last backward pass has done so."""

    def drop_gradients(self) -> None:
        """Drop the gradients of a step, after any of its micro-batches."""
        for parameter in self._parameters:
            parameter.grad = None

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradients of the step on this rank, of the weights that have one."""
        return (p.grad for p in self._parameters if p.grad is not None)

    def unscale_gradients(self) -> None:
        """Divide gradients by the loss scale of fp16, once a step."""
        self.accelerator.unscale_gradients()

    def clip_grad_norm(self) -> Tensor | None:
        """Clip the whole step's gradients, if configured; return their norm before clipping, or None if there are none.

        A strategy may clip within its optimizer's step instead, by the same norm.
        """
        if self.max_grad_norm > 0:
            return _full_norm(torch.nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm))
        gradients = list(self.gradients())
        return _full_norm(torch.nn.utils.get_total_norm(gradients)) if gradients else None

    # ---- looking inside ----------------------------------------------------------------------------------------

    def unwrap(self, model: nn.Module) -> Any:
        """Return the network itself, without wrappers that distribute or compile it."""
        return unwrap(model)  # accelerate's function imports DeepSpeed to check for its engine

    @abstractmethod
    def full_state(self, model: nn.Module, *, wanted: WeightFilter | None = None) -> dict[str, Tensor]:
        """Return trainable weights and buffers by name, gathered over ranks one by one; every rank must call it.

        Args:
            model: the wrapped network.
            wanted: selects tensors for this rank by name, or None if rank 0 is given all; others' are then unusable.
        """

    def shapes(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole tensors of `full_state`, in its order, on the meta device."""
        return {
            # DeepSpeed keeps the shape of a weight that it has sharded.
            name: torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
            for name, tensor in self._weights(model).items()
        }

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return weights and buffers by name, as this process has them; frozen weights may be left out."""
        return self.unwrap(model).state_dict(keep_vars=True)

    @abstractmethod
    def optimizer_state(self, model: nn.Module, optimizer: Any) -> dict[str, Any] | None:
        """Return the optimizer's whole state on rank 0, or None if the strategy writes it; every rank must call this.

        It is `torch.optim.Optimizer.state_dict` of whole weights, for any strategy and number of ranks.
        """

    @abstractmethod
    def load_optimizer(self, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        """Load all that `optimizer_state` returned under any strategy; every rank must call it."""

    def optimizer_slices(self, model: nn.Module, optimizer: Any) -> Slices | None:
        """Return this rank's slices of the optimizer's state, or None if not supported; every rank must call it."""
        return None

    def load_optimizer_slices(self, model: nn.Module, optimizer: Any, folder: Path, values: Mapping[str, Any]) -> None:
        """Load the slices of any number of ranks; every rank must call it.

        Args:
            model, optimizer: as `prepare` returned them.
            folder: folder of the slices.
            values: `Slices.values`.
        """
        from .slices import read_whole, rename_weights, trained_names

        indexes = {name: index for index, name in enumerate(trained_names(self.unwrap(model)))}
        self.load_optimizer(model, optimizer, rename_weights(read_whole(folder, values), indexes))

    def reads_optimizer_of(self, layout: str) -> bool:
        """Return whether an optimizer state that was saved in a layout can be read."""
        return layout == self.optimizer_layout

    def save_own_files(self, directory: Path) -> None:
        """Write files that only the strategy can write into a checkpoint; every rank must call it."""

    def load_own_files(self, directory: Path) -> None:
        """Read the files of `save_own_files`; every rank must call it.

        Raises:
            ValueError: the checkpoint was saved by a strategy that keeps the optimizer's state in another way.
        """
        if (directory / DEEPSPEED_FOLDER).is_dir():
            raise InputError(
                f"{directory} was saved under DeepSpeed, whose optimizer state only DeepSpeed reads; continue with it",
                "mismatch",
            )


def _mixed_precision(config: TrainConfig) -> str | None:
    """Return the mixed precision of a run, or None if accelerate's launcher sets it."""
    precision, dtype = config.training.mixed_precision, config.model.transformer_dtype
    if not config.memory.lora_autocast:
        return "no"
    if precision is None and "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return dtype if dtype in ("bf16", "fp16") else "no"
    return precision


def trains_on_cpu() -> bool:
    """Return whether torch can use no GPU, or accelerate is set to use the CPU."""
    has_gpu = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
    return not has_gpu or is_enabled("ACCELERATE_USE_CPU")


def _full_norm(norm: Tensor) -> Tensor:
    """Return a norm over all ranks; that of sharded gradients is still a sum of parts."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def widen(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Convert floating-point weights to a wider dtype, in place and one at a time; None leaves them."""
    for parameter in model.parameters() if dtype is not None else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def below_wrapper(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer itself, without accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
