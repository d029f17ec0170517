"""FSDP2: PyTorch's `fully_shard`, block by block, the same on GPUs and on CPUs.

Accelerate's own FSDP exists on GPUs only and is silently left out on CPUs, where it could therefore not be tested; its
launcher's settings are read (`sharding.py`), and everything else is done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, patch_environment
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.parallel import ParallelSection
from finetrainers.config.root import TrainConfig
from finetrainers.models.spec import fix_input_dtype
from finetrainers.utils.failures import InputError

from .sharding import USE_FSDP
from .slices import Slices, build_slices, read_into, rename_weights, trained_names
from .strategy import Load, MakeOptimizer, Strategy, Swap, WeightFilter, below_wrapper, widen


def _backend(device: torch.device) -> str:
    """Return the backends of a group whose tensors are on a device, and with CPU offload also in host memory."""
    return {"cuda": "cuda:nccl,cpu:gloo", "xpu": "xpu:xccl,cpu:gloo"}.get(device.type, "gloo")


class FSDP(Strategy):
    """Processes that each keep a part of all weights, gradients and optimizer state."""

    forward_is_collective = True
    weights_are_whole = False
    weights_are_movable = False
    updates_shards = True
    shares_saving = True
    why_no_retry = (
        "with sharded weights the other ranks wait within the step: halve --batch_size and double "
        "--gradient_accumulation_steps"
    )
    _made_group = False  # of this process alone

    def __init__(self, config: TrainConfig, options: ParallelSection) -> None:
        """See `Strategy`.

        Raises:
            ConfigError: the groups do not divide the processes, or no launcher started them.
        """
        super().__init__(config, options)
        if not dist.is_initialized():
            if not options.fsdp_cpu_offload:
                message = (
                    "shards over processes, and no launcher started any; use torchrun or accelerate launch, or "
                    "remove it"
                )
                raise ConfigError([Problem("FSDP2", message, "required")])
            # One process has nothing to split, and may still keep its weights in host memory.
            dist.init_process_group(_backend(self.device), store=dist.HashStore(), rank=0, world_size=1)
            self._made_group = True
        size = self.optimizer_shards
        first = 1 if options.fsdp_group_size is None else 0  # one dimension, or copies x shards
        shape, names = (self.world_size // size, size)[first:], ("copy", "shard")[first:]
        self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def _apply(self, config: TrainConfig, options: ParallelSection) -> None:
        super()._apply(config, options)
        size, processes = options.fsdp_group_size or self.world_size, self.world_size
        if processes % size and processes > 1:  # one process may only plan
            message = f"must divide the {processes} processes, got {size}; use a divisor"
            raise ConfigError([Problem("--fsdp_group_size", message)])
        self.optimizer_shards = size
        if options.fsdp_cpu_offload:
            self.why_no_swap = (
                "cannot be combined with --fsdp_cpu_offload, which keeps all weights in host memory; remove one of them"
            )

    def _join(self, mixed_precision: str | None, *, on_cpu: bool, **group: Any) -> Accelerator:
        if self._options.fsdp_cpu_offload and not on_cpu:
            # Norms of gradients in host memory are summed up there, which NCCL cannot.
            group["backend"] = _backend(torch.device("cuda" if torch.cuda.is_available() else "xpu"))
        with patch_environment(**{USE_FSDP: "false"}):  # on GPUs accelerate would also wrap the network
            return super()._join(mixed_precision, on_cpu=on_cpu, **group)

    def close(self) -> None:
        super().close()
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()

    def _kind(self) -> str:
        size = self._options.fsdp_group_size
        kind = "fsdp2" if size is None else f"fsdp2 in groups of {size}"
        return kind + (", on the host" if self._options.fsdp_cpu_offload else "")

    @property
    def optimizer_device(self) -> torch.device:
        return torch.device("cpu") if self._options.fsdp_cpu_offload else self.device

    # ---- wrapping ----------------------------------------------------------------------------------------------

    def prepare(
        self, load: Load, make_optimizer: MakeOptimizer, *, blocks: Sequence[str] = (), swap: Swap | None = None,
        mapped: bool = False, widened: torch.dtype | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        model = self.one_at_a_time(
            "loading the network", lambda: self._split_trained(load(), blocks, swap, widened), together=mapped
        )
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        with self.raise_on_all_ranks("making the optimizer"):
            optimizer = make_optimizer(self._parameters)
        return model, self._prepare_optimizer(optimizer)

    def _split_trained(
        self, model: nn.Module, blocks: Sequence[str], swap: Swap | None, widened: torch.dtype | None
    ) -> nn.Module:
        """Split a network, except swapped weights: every process copies whole ones to the device, none are gathered."""
        if swap is None:
            return self._split(model, blocks, widened=widened)
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                # The dtype that they would be gathered in.
                parameter.data = parameter.data.to(self.compute_dtype(parameter.dtype))
        return self._split(model, blocks, ignored=set(swap(model).values()))

    def _place_frozen(self, model: nn.Module, computed: torch.dtype, blocks: Sequence[str]) -> nn.Module:
        for parameter in model.parameters():  # kept in the dtype that weights are gathered in
            parameter.data = parameter.data.to(computed)
        return self._split(model, blocks)

    def _split(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        *,
        ignored: Set[nn.Parameter] = frozenset(),
        widened: torch.dtype | None = None,
    ) -> nn.Module:
        """Split the network in place, block by block, and return it; nothing here waits for another rank.

        A block is recomputed (gradient checkpointing, set before), compiled, and split, from the inside out: compiled
        code never gathers weights. A frozen network has no backward pass until which weights might stay gathered.
        `ignored` weights are not touched.
        """
        layers = [layer for name in blocks for layer in getattr(model, name)]
        dynamo = self.accelerator.state.dynamo_plugin
        if dynamo.backend != DynamoBackend.NO:  # all blocks share the compiled code
            for layer in layers:
                layer.compile(**dynamo.to_kwargs())
        computed = self.compute_dtype(torch.float32)
        pinned = self.device.type != "cpu"
        shard(
            model, layers, mesh=self._mesh, computed=computed, ignored=ignored, widened=widened,
            reshard=self._options.fsdp_reshard_after_forward,
            offload=CPUOffloadPolicy(pin_memory=pinned) if self._options.fsdp_cpu_offload else OffloadPolicy(),
        )  # fmt: skip
        if computed != torch.float32:
            model.forward = self.accelerator.autocast()(model.forward)  # type: ignore[method-assign]
        return model

    # ---- stepping ----------------------------------------------------------------------------------------------

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        self._micro_batch += 1
        is_last = self._micro_batch == self.accumulation
        model.set_requires_gradient_sync(is_last or self._options.sync_each_batch)  # type: ignore[operator]
        return nullcontext()

    @contextmanager
    def without_exchange(self, model: nn.Module) -> Iterator[None]:
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)  # type: ignore[operator]

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def full_state(self, model: nn.Module, *, wanted: WeightFilter | None = None) -> dict[str, Tensor]:
        weights = {}
        for name, tensor in self._weights(model).items():
            # Gathered on the device, including parts in host memory.
            on_device = tensor.to(self.device)
            gathered = on_device.full_tensor() if isinstance(on_device, DTensor) else tensor
            if self.is_main if wanted is None else wanted(name):
                weights[name] = _without_padding(gathered.cpu())
        return weights

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        options = StateDictOptions(ignore_frozen_params=True)
        return dict(get_model_state_dict(model, options=options))  # type: ignore[arg-type]

    def optimizer_state(self, model: nn.Module, optimizer: Any) -> dict[str, Any] | None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_optimizer_state_dict(model, below_wrapper(optimizer), options=options)
        if not state:
            return {}  # not rank 0
        indexes = {name: index for index, name in enumerate(trained_names(model))}
        return tree_map(_without_padding, rename_weights(state, indexes))

    def load_optimizer(self, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        named = rename_weights(state, dict(enumerate(trained_names(model))))
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(model, below_wrapper(optimizer), named, options=options)

    def optimizer_slices(self, model: nn.Module, optimizer: Any) -> Slices | None:
        state = get_optimizer_state_dict(model, below_wrapper(optimizer))
        return build_slices(state, rank=self.rank, size=self.world_size)

    def load_optimizer_slices(self, model: nn.Module, optimizer: Any, folder: Path, values: Mapping[str, Any]) -> None:
        # A state of zeros, in its final memory.
        state: dict[str, Any] = get_optimizer_state_dict(model, below_wrapper(optimizer))
        read_into(state, folder, group=self._idle_group)
        for key, number in values["numbers"].items():
            weight, _, name = key.rpartition("/")
            state["state"][weight][name] = number
        set_optimizer_state_dict(model, below_wrapper(optimizer), {**state, "param_groups": values["param_groups"]})


def shard(
    model: nn.Module,
    layers: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    computed: torch.dtype,
    reshard: bool = True,
    offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    ignored: Iterable[nn.Parameter] = (),
    widened: torch.dtype | None = None,
) -> None:
    """Split a network in place by `fully_shard`, layer by layer.

    Args:
        model: the network.
        layers: its repeated blocks, each of them gathered by itself.
        mesh: processes, as copies x shards, or shards alone.
        computed: dtype that weights are gathered in.
        reshard: whether the gathered weights of a layer are freed after its forward pass.
        offload: location of the shards.
        ignored: weights that are not touched.
        widened: see `Strategy.prepare`; host memory then never holds more than a layer of the network in this dtype.
    """
    frozen = not any(parameter.requires_grad for parameter in model.parameters())  # without a backward pass
    arguments: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "ignored_params": set(ignored)}
    for module in modules_of_another_dtype(model) if widened is None else ():
        fully_shard(module, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **arguments)
    for layer in layers:
        widen(layer, widened)
        fully_shard(layer, mp_policy=_precision_policy(computed), reshard_after_forward=frozen or reshard, **arguments)
    widen(model, widened)  # weights outside of layers; a shard already has the dtype
    # As under DDP, autocast chooses each operation's dtype and the output is fp32. Inputs keep theirs: bf16 would round
    # timesteps and positions.
    fully_shard(
        model,
        mp_policy=_precision_policy(computed, output_dtype=torch.float32),
        reshard_after_forward=True if frozen else None,
        **arguments,
    )
    # Weights outside of layers stay gathered between a forward pass and its backward pass, and after one without.
    fix_input_dtype(model)


def _precision_policy(computed: torch.dtype, *, output_dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """Return the policy: weights are gathered in the computing dtype, kept in theirs, gradients summed in fp32."""
    if computed == torch.float32:
        return MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=computed, reduce_dtype=torch.float32, output_dtype=output_dtype, cast_forward_inputs=False
    )


def modules_of_another_dtype(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules whose trainable weights all have another dtype than the largest part of the network.

    FSDP2 gathers weights of one dtype at a time. A few networks keep norms and the like in fp32 among bf16 weights.

    Raises:
        ValueError: weights of two dtypes belong to one module.
    """
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    if len(sizes) < 2:
        return []
    usual = max(sizes, key=lambda dtype: sizes[dtype])

    def odd(module: nn.Module, name: str) -> Iterator[nn.Module]:
        trained = [p for p in module.parameters() if p.requires_grad]
        if trained and all(p.dtype != usual for p in trained):
            yield module
            return
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.dtype != usual:
                raise InputError(
                    f"FSDP2 cannot shard {name}{own}, which is {parameter.dtype} next to {usual} weights of the same "
                    "module; use --master_weights fp32",
                    "unsupported",
                )
        for child_name, child in module.named_children():
            yield from odd(child, f"{name}{child_name}.")

    return list(odd(model, ""))


def _without_padding(value: Any) -> Any:
    """Return a gathered tensor without padding: it is a view of padded memory if sizes do not divide by the processes.

    Files cannot hold views, and pickles would hold the padding.
    """
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() != value.nbytes:
        return value.clone()
    return value
