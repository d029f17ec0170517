"""Processes and wrapping: the few things a trainer asks of accelerate, whatever engine runs underneath."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.integrations import unset_hf_deepspeed_config

from finetrainers.utils.launch import launched_processes

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Parallel:
    """This process's place among all, and the wrapped network and optimizer.

    Raises:
        RuntimeError: the launcher started several processes that do not see each other.
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None,
        fallback_precision: str,
        accumulation: int,
        batch_size: int,
        max_grad_norm: float,
        timeout_s: int,
    ) -> None:
        """Args:
        mixed_precision: `no`, `fp16`, `bf16`; None leaves it to the launcher, and to the fallback without one.
        fallback_precision: see `mixed_precision`.
        accumulation: micro-batches per optimizer step.
        batch_size: samples per micro-batch, which DeepSpeed wants to know.
        max_grad_norm: gradient norm to clip to; 0 for none.
        timeout_s: seconds until a stuck collective fails.
        """
        on_cpu = not (torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()))
        # These are the launcher's messages to accelerate; with them a CPU run needs gloo spelled out, because
        # accelerate would otherwise leave each process alone in a world of one.
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        group = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
        if on_cpu and deepspeed:
            group = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=timeout_s))
        if mixed_precision is None and "ACCELERATE_MIXED_PRECISION" not in os.environ:
            mixed_precision = fallback_precision
        # Accelerate keeps its state in the process; an earlier run's must not decide over this one.
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(
            mixed_precision=mixed_precision,
            cpu=on_cpu and not deepspeed,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
            kwargs_handlers=[group],
        )
        world_size = launched_processes()
        if self.accelerator.num_processes != world_size:
            raise RuntimeError(
                f"the launcher started {world_size} processes, but this one sees {self.accelerator.num_processes}: "
                "they would train separately. Launch with a file from accelerate_configs/; on CPUs set "
                "ACCELERATE_USE_CPU=true"
            )
        self.accumulation = accumulation
        self.max_grad_norm = max_grad_norm
        self._parameters: list[nn.Parameter] = []
        self._timeout = timedelta(seconds=timeout_s)
        self._host_group: dist.ProcessGroup | None = None
        if self.is_deepspeed:
            self._configure_deepspeed(batch_size)

    # ---- who am I ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Index of this process among all."""
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.accelerator.device

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed runs underneath."""
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP runs underneath."""
        return self.accelerator.distributed_type == DistributedType.FSDP

    @property
    def is_sharded(self) -> bool:
        """Whether a forward pass needs all ranks, because none holds all weights."""
        zero_stage = self.accelerator.deepspeed_plugin.zero_stage if self.is_deepspeed else 0
        return self.is_fsdp or zero_stage == 3

    def compute_dtype(self, weights: torch.dtype) -> torch.dtype:
        """The dtype that a network with weights of this dtype computes in."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, weights)

    def describe(self) -> str:
        """One line on engine, ranks, device and precision."""
        kind = self.accelerator.distributed_type.value.lower()
        engine = f"deepspeed zero-{self.accelerator.deepspeed_plugin.zero_stage}" if self.is_deepspeed else kind
        return (
            f"{self.world_size} process{'es' if self.world_size > 1 else ''} ({engine}), {self.device}, "
            f"mixed precision {self.accelerator.mixed_precision}"
        )

    # ---- wrapping and stepping ---------------------------------------------------------------------------------

    def _configure_deepspeed(self, batch_size: int) -> None:
        """Fill what accelerate would read from a data loader; gradients are averaged by the trainer's weights."""
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = batch_size
        config["gradient_accumulation_steps"] = self.accumulation
        config["train_batch_size"] = batch_size * self.accumulation * self.world_size
        config["gradient_clipping"] = self.max_grad_norm
        # Without it, a run under stage 3 would fail at its first checkpoint.
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        # Accelerate tells transformers of stage 3, which would cut the frozen text encoders into shards that no engine
        # puts together again.
        unset_hf_deepspeed_config()

    def prepare(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        blocks: Sequence[str] = (),
    ) -> tuple[nn.Module, Any]:
        """Wrap a network and the optimizer over its trainable weights; FSDP shards block by block of the named lists."""
        if self.is_fsdp:
            # Left alone, accelerate goes by `_no_split_modules`, which some diffusers networks lack or misname.
            classes = {type(block).__name__ for name in blocks for block in getattr(model, name)}
            self.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(classes)
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        model, prepared = self.accelerator.prepare(model, optimizer)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        return model, prepared

    def begin_step(self, num_micro_batches: int) -> None:
        """Say how many micro-batches the coming optimizer step has.

        Raises:
            ValueError: DeepSpeed was set up for another number, and takes no other.
        """
        if self.is_deepspeed and num_micro_batches != self.accumulation:
            raise ValueError(
                f"DeepSpeed was set up for {self.accumulation} micro-batches a step and got {num_micro_batches}; use DDP or "
                "FSDP for methods whose steps differ"
            )
        self.accumulation = num_micro_batches
        self.accelerator.gradient_accumulation_steps = num_micro_batches
        self.accelerator.step = 0  # counts micro-batches; ranks exchange gradients when it is a multiple

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around one micro-batch: ranks exchange gradients on the last of a step only."""
        return self.accelerator.accumulate(model)

    def backward(self, loss: Tensor) -> None:
        """Backpropagate; losses of a step's micro-batches add up (accelerate's division is undone)."""
        self.accelerator.backward(loss * self.accumulation)

    def gradients(self) -> Iterator[Tensor]:
        """The gradients of the step on this rank, of the weights that have one."""
        return (p.grad for p in self._parameters if p.grad is not None)

    def clip(self) -> Tensor | None:
        """Clip the whole step's gradients, if asked to; their norm before clipping, or None if nothing computed it."""
        if self.is_deepspeed:  # the engine has clipped and stepped within backward
            norm = self.accelerator.deepspeed_engine_wrapped.engine.get_global_grad_norm()
            return None if norm is None else torch.as_tensor(norm, device=self.device)
        if self.max_grad_norm > 0:
            return _whole(self.accelerator.clip_grad_norm_(self._parameters, self.max_grad_norm))
        self.accelerator.unscale_gradients()  # fp16 gradients carry the loss scale until now
        gradients = list(self.gradients())
        return _whole(torch.nn.utils.get_total_norm(gradients)) if gradients else None

    def unwrap(self, model: nn.Module) -> Any:
        """The network itself, below what distributes or compiles it."""
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def full_state(self, model: nn.Module) -> dict[str, Tensor]:
        """All weights by name, gathered over ranks; every rank must call it. Complete on rank 0 only."""
        state = self.accelerator.get_state_dict(model) or {}  # ZeRO-3 gathers none on other ranks
        # A compiled network is a wrapper around the network, and prefixes its names.
        return {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}

    # ---- talking to the other ranks ----------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.accelerator.wait_for_everyone()

    def mean(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Averages over ranks, as numbers: the one place where a step waits for the device."""
        names = sorted(values)
        if not names:
            return {}
        stacked = torch.stack([values[n].detach().float().reshape(()).to(self.device) for n in names])
        return dict(zip(names, self.accelerator.reduce(stacked, reduction="mean").tolist(), strict=True))

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks."""
        return self.accelerator.reduce(value.to(self.device), reduction="sum")

    def max_on_host(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over ranks, between the hosts: no device is waited for. Every rank must call it."""
        if self.world_size == 1:
            return list(values)
        if self._host_group is None:
            self._host_group = dist.new_group(backend="gloo", timeout=self._timeout)
        agreed = torch.tensor(values)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._host_group)
        return agreed.tolist()

    def gather_objects(self, items: list[T]) -> list[T]:
        """All ranks' lists, joined in rank order."""
        return gather_object(items)

    def same_on_all(self, value: T) -> T:
        """Rank 0's value on every rank."""
        return broadcast_object_list([value])[0]

    def raise_if_any_failed(self, error: Exception | None, what: str) -> None:
        """Turn a failure on one rank into a failure on all, so that none waits for ever.

        The error is logged first: where the other ranks wait for something else, nothing would ever show it.

        Raises:
            RuntimeError: naming the ranks and their errors (the local error itself on the rank that has it).
        """
        if error is not None and self.world_size > 1:
            logger.error("%s failed on rank %d", what, self.rank, exc_info=error)
        failures = self.gather_objects([f"rank {self.rank}: {error}"] if error else [])
        if error is not None:
            raise error
        if failures:
            raise RuntimeError(f"{what} failed on another rank: {'; '.join(failures)}")

    def close(self) -> None:
        """Leave the process group."""
        self.accelerator.end_training()


def _whole(norm: Tensor) -> Tensor:
    """A norm over all ranks; that of sharded gradients is still a sum of parts."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
