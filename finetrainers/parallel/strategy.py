"""What training asks of a strategy for several processes; the strategies are in `ddp.py`, `fsdp.py` and `zero.py`."""

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
from finetrainers.utils.launch import launched_processes, says_yes
from finetrainers.utils.process_state import process_groups
from finetrainers.utils.text import plural

from .ranks import Ranks

if TYPE_CHECKING:
    from .slices import Slices

logger = logging.getLogger(__name__)

#: Where a checkpoint has DeepSpeed's own files.
DEEPSPEED_FOLDER = "deepspeed"
#: Gives a network, on the CPU.
Load = Callable[[], nn.Module]
#: Builds the optimizer over weights.
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
#: Whether a process wants a weight, by its name.
Wanted = Callable[[str], bool]
#: Takes frozen weights out of the strategy's hands before it moves, broadcasts or splits any: those weights, by name.
Swap = Callable[[nn.Module], Mapping[str, nn.Parameter]]


class Strategy(Ranks):
    """The processes of a run with the wrapped network and optimizer.

    Attributes:
        forward_is_collective: whether a forward pass needs all processes.
        weights_are_whole: whether every process holds all weights.
        weights_are_plain: whether weights are whole tensors that may be moved or overwritten between steps.
        compiles_blocks: whether a block may be compiled as one graph; not so if its weights are gathered within.
        takes_integer_weights: whether frozen weights may be integers, the codes of quantized ones.
        uses_autocast: whether a mixed precision is that of autocast.
        shares_saving: whether each process may write its part of a checkpoint.
        writes_own_files: whether only the strategy can write the optimizer's state, on all processes, while training
            waits.
        updates_shards: whether the optimizer is given parts of weights.
        can_drop_gradients: whether gradients can be dropped without an update, wherever a step has got to.
        why_no_retry: why a step that ran out of memory cannot be retried, as the end of a sentence; None if it can.
        why_no_swap: why blocks cannot be swapped, with the way out; None if they can.
        why_no_local_gradients: why a process cannot have gradients of its own, with the way out; None if it can.
        sequence_group: the processes that share this one's clips (`--sp_size`); None: it has clips of its own.
        optimizer_shards: processes over which the optimizer's state is divided.
        optimizer_layout: names the layout of a saved optimizer state (`reads_optimizer_of`). Checkpoints store it.
    """

    forward_is_collective = False
    weights_are_whole = True
    weights_are_plain = True
    compiles_blocks = True
    takes_integer_weights = True
    uses_autocast = True
    shares_saving = False
    writes_own_files = False
    updates_shards = False
    can_drop_gradients = True
    why_no_retry: str | None = None
    why_no_swap: str | None = None
    why_no_local_gradients: str | None = None
    optimizer_shards = 1
    optimizer_layout = "DDP, FSDP2 or one process"

    def __init__(self, config: TrainConfig, options: ParallelSection) -> None:
        """Join the other processes.

        Args:
            config: of the run.
            options: its own, completed by what the launcher says (`sharding.with_launcher`).
        """
        self.accumulation = config.training.gradient_accumulation_steps
        self.max_grad_norm = config.optimizer.max_grad_norm
        self._options = options
        self._micro_batch = 0  # of the step, from 1
        self._parameters: list[nn.Parameter] = []
        precision = _mixed_precision(config)
        # Accelerate keeps its state in the process; an earlier run's must not decide over this one.
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        timeout = timedelta(seconds=config.run.nccl_timeout)
        host_groups = process_groups()
        if host_groups and launched_processes() > 1 and config.changed("nccl_timeout"):
            logger.warning("--nccl_timeout does not apply to the process group that this program initialized itself")
        accelerator = self._join(precision, on_cpu=trains_on_cpu(), timeout=timeout)
        idle_timeout = timedelta(seconds=config.run.idle_timeout)
        super().__init__(
            accelerator,
            timeout=timeout,
            idle_timeout=idle_timeout,
            sharing=options.sp_size,
            host_groups=host_groups,
        )
        world_size = launched_processes()
        if self.world_size != world_size:
            raise RuntimeError(
                f"the launcher started {world_size} processes, but this one sees {self.world_size}: "
                "they would train separately. Launch with a file from accelerate_configs/; on CPUs set "
                "ACCELERATE_USE_CPU=true"
            )
        self.sequence_group: dist.ProcessGroup | None = None
        if self.world_size % options.sp_size:
            raise ConfigError([Problem("--sp_size", groups_problem(self.world_size, options.sp_size))])
        if options.sp_size > 1:
            # Neighbors, which are on one machine where their number divides its processes.
            shape, names = (self.data_size, options.sp_size), ("data", "sequence")
            self.sequence_group = init_device_mesh(self.device.type, shape, mesh_dim_names=names).get_group("sequence")
        self._apply(config, options)

    @classmethod
    def planned(cls, config: TrainConfig, options: ParallelSection, *, device_type: str) -> Strategy:
        """Return a strategy that has joined no process, to read its attributes; it can do nothing else.

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
        """Join the other processes. On CPUs accelerate must be told, or it leaves each process in a world of one."""
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
        """One line on strategy, ranks, device and precision."""
        kind = self._kind()
        processes = plural(self.world_size, "process", "processes") + (f" ({kind})" if kind else "")
        processes += "" if self.sharing == 1 else f", {self.sharing} share each clip,"
        return f"{processes} on {self.device}, {self.accelerator.mixed_precision} mixed precision"

    @abstractmethod
    def _kind(self) -> str:
        """Return the strategy's name; empty for one process."""

    @property
    def optimizer_device(self) -> torch.device:
        """Where the optimizer's state is kept."""
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
        """Within the block, operations compute in the dtype of the mixed precision."""
        return self.accelerator.autocast()

    # ---- wrapping and stepping ---------------------------------------------------------------------------------

    @abstractmethod
    def prepare(
        self, load: Load, make_optimizer: MakeOptimizer, *, blocks: Sequence[str] = (), swap: Swap | None = None,
        mapped: bool = False, widened: torch.dtype | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        """Load and wrap a network, and the optimizer over its trainable weights. Every rank must call it.

        Where host memory is the limit, the processes of a machine load one after another (`in_turns`), unless what they
        load is mapped from files.

        Args:
            load: gives the network, on the CPU, with what is trained requiring gradients.
            make_optimizer: builds it over weights.
            blocks: attributes of the network that list its repeated blocks.
            swap: places the weights of swapped blocks, where `why_no_swap` is None; the others go to the device.
            mapped: whether the network's weights are mapped from files.
            widened: the dtype that weights are turned into, a part at a time, once they are on the device or in shards.

        Raises:
            RuntimeError: loading failed on another rank.
        """

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """What steps the weights: the optimizer itself, or with a gradient scaler accelerate's wrapper, which steps by that.

        The wrapper looks for optional packages on disk at every step.
        """
        return optimizer if self.scaler is None else self.accelerator.prepare_optimizer(optimizer)

    def prepare_frozen(self, load: Load, *, weights: torch.dtype, blocks: Sequence[str] = ()) -> nn.Module:
        """Load a network that is called besides the trained one and computes as it does. Every rank must call it.

        Args:
            load: gives the network, on the CPU, in the dtype that the trained one was loaded in.
            weights: that dtype.
            blocks: see `prepare`.

        Raises:
            RuntimeError: loading failed on another rank.
        """
        return self.in_turns(
            "loading the frozen copy",
            lambda: self._place_frozen(load().eval().requires_grad_(False), self.compute_dtype(weights), blocks),
        )

    def _place_frozen(self, model: nn.Module, computed: torch.dtype, blocks: Sequence[str]) -> nn.Module:
        """Return a frozen network on the device, whole; `computed` is the dtype that the trained one computes in."""
        return model.to(self.device)

    def begin_step(self, num_micro_batches: int) -> None:
        """Say how many micro-batches the coming optimizer step has."""
        self.accumulation = num_micro_batches
        self._micro_batch = 0

    @abstractmethod
    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around one micro-batch: the exchange of gradients begins in the last of a step only, or not yet."""

    def backward(self, loss: Tensor) -> None:
        """Backpropagate; the losses of a step's micro-batches add up."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def complete_exchange(self) -> None:
        """Send what other ranks wait for, after the micro-batches of a step or an OOM in one of them.

        Nothing that comes back is used before `all_reduce`, and `begin_step` drops it: so ranks can agree to retry.
        """

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Within the block, forward and backward passes leave every process its own gradients; see `local_parameters`."""
        return nullcontext()

    def local_parameters(self, model: nn.Module) -> list[Tensor]:
        """Return the trained weights as they enter this process's forward passes, in order; every rank must call it.

        `torch.autograd.grad` by them gives the gradient of this process alone, where `why_no_local_gradients` is None.
        """
        return list(self._parameters)

    def shared_gradients(self, gradients: Sequence[Tensor | None]) -> list[tuple[nn.Parameter, Tensor]]:
        """Of this process's gradients by `local_parameters`, those to be added to weights' own, with the weight of each.

        Every rank must call it. They are averaged over ranks, unless `all_reduce` will do that, and divided as weights
        are.
        """
        pairs = zip(self._parameters, gradients, strict=True)
        return [(weight, gradient) for weight, gradient in pairs if gradient is not None]

    def all_reduce(self) -> None:
        """Let gradients be the averages over ranks, where the last backward pass has not done it."""

    def drop_gradients(self) -> None:
        """Drop the gradients of a step, whichever of its micro-batches has been reached."""
        for parameter in self._parameters:
            parameter.grad = None

    def gradients(self) -> Iterator[Tensor]:
        """The gradients of the step on this rank, of the weights that have one."""
        return (p.grad for p in self._parameters if p.grad is not None)

    def clip_grad_norm(self) -> Tensor | None:
        """Clip the whole step's gradients, if asked to; their norm before clipping, or None if there are none.

        A strategy may clip within its optimizer's step instead, by the same norm.
        """
        self.accelerator.unscale_gradients()  # fp16 gradients carry the loss scale until now
        if self.max_grad_norm > 0:
            return _whole(torch.nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm))
        gradients = list(self.gradients())
        return _whole(torch.nn.utils.get_total_norm(gradients)) if gradients else None

    # ---- looking inside ----------------------------------------------------------------------------------------

    def unwrap(self, model: nn.Module) -> Any:
        """Return the network itself, below what distributes or compiles it."""
        return unwrap(model)  # accelerate's function imports DeepSpeed to ask whether it is one of its own

    @abstractmethod
    def full_state(self, model: nn.Module, *, wanted: Wanted | None = None) -> dict[str, Tensor]:
        """Trained weights and buffers by name, gathered over ranks one by one; every rank must call it.

        Args:
            model: the wrapped network.
            wanted: which of them this rank is given; None: rank 0 is given all, and what others get has no use.
        """

    def shapes(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole tensors of `full_state`, in its order, on the meta device."""
        raise NotImplementedError("only strategies whose processes share the saving say it")

    @abstractmethod
    def optimizer_state(self, model: nn.Module, optimizer: Any) -> dict[str, Any] | None:
        """Return the optimizer's whole state on rank 0, None where the strategy writes its own; every rank must call it.

        It is what `torch.optim.Optimizer.state_dict` says of whole weights, whatever the strategy and number of ranks.
        """

    @abstractmethod
    def load_optimizer(self, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        """Continue from what `optimizer_state` returned under any strategy; every rank must call it with all of it."""

    def optimizer_slices(self, model: nn.Module, optimizer: Any) -> Slices | None:
        """This rank's slices of the optimizer's state, where ranks can write them; every rank must call it."""
        return None

    def load_optimizer_slices(self, model: nn.Module, optimizer: Any, folder: Path, values: Mapping[str, Any]) -> None:
        """Continue from the slices of any number of ranks; every rank must call it.

        Args:
            model, optimizer: as `prepare` returned them.
            folder: of the slices.
            values: `Slices.values`.
        """
        from .slices import read_whole, renamed, trained_names

        numbers = {name: number for number, name in enumerate(trained_names(self.unwrap(model)))}
        self.load_optimizer(model, optimizer, renamed(read_whole(folder, values), numbers))

    def reads_optimizer_of(self, layout: str) -> bool:
        """Return whether an optimizer state that was saved in a layout can be read."""
        return layout == self.optimizer_layout

    def save_own_files(self, directory: Path) -> None:
        """Write into a checkpoint what the strategy alone can; every rank must call it."""

    def load_own_files(self, directory: Path) -> None:
        """Read what `save_own_files` wrote; every rank must call it.

        Raises:
            ValueError: the checkpoint was saved by a strategy that keeps the optimizer's state in another way.
        """
        if (directory / DEEPSPEED_FOLDER).is_dir():
            raise ValueError(
                f"{directory} was saved under DeepSpeed, and nothing else reads its optimizer state; continue with it"
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
    """Return whether there is no GPU that torch can use, or accelerate is told to leave it alone."""
    has_gpu = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
    return not has_gpu or says_yes("ACCELERATE_USE_CPU")


def _whole(norm: Tensor) -> Tensor:
    """Return a norm over all ranks; that of sharded gradients is still a sum of parts."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def widen(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Turn floating-point weights into a wider dtype, in place and one at a time; None leaves them."""
    for parameter in model.parameters() if dtype is not None else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def below_wrapper(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that `prepare` was given, of what it returned."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
