"""Memory of a run by phase: on the GPU of each process and on the host. By arithmetic, without torch.

`estimate.py` has the training step. Here are the other contents of a process in each phase: loaded networks, the needs
of the VAE and of sampling. `docs/reference/memory-estimate.md` names the sources of the figures.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetrainers.config.facts import is_network
from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.methods.registry import method_spec
from finetrainers.parallel.sharding import WHOLE, ShardingSpec
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
)  # fmt: skip

from .estimate import (
    DTYPE_BYTES,
    GIB,
    MemoryPlan,
    computed_bytes,
    counted_activations,
    estimate_for,
    frozen_sizes,
    optimizer_state_bytes,
)
from .gathered import zero_host_bytes
from .network_weights import NetworkWeights
from .swap_plan import NO_SWAP, SwapSizes

if TYPE_CHECKING:
    from torch import nn

    from finetrainers.models.spec import ModelSpec

Size = tuple[int, int, int]

#: Resident memory of a process that trains, without weights, on Linux: 0.55 to 0.62 measured with the CPU build of
#: torch 2.13; 1.6 to 2.2 on an H200 with torch 2.11 for CUDA 13, 0.5 of it mapped files.
PROCESS_GIB, CUDA_PROCESS_GIB = 0.6, 2.0
#: Parts of the step that clips leave on the device until they are trained on.
_OF_ROLLOUT = ("sampled trajectories",)
#: Part of the step that a network in host memory frees.
_SLOTS = "slots of swapped blocks"
#: Captions that are encoded at once before training.
TEXTS_AT_ONCE = 8


@dataclass(frozen=True)
class RunSizes:
    """Inputs of the phases beside the configuration and the trained network.

    Attributes:
        bucket, clips: frames, height and width of the largest clips, and their number in a micro-batch.
        encoded: sizes of all clips that the VAE encodes.
        sampled: sizes of all validation samples.
        parts: bytes of each frozen network as it is loaded, by part; unknown ones are left out.
        experts: weights of the experts that are not trained, by part, which are stored like those of the trained one.
        rewards: bytes of the networks of rewards, or None if unknown.
        scoring: further bytes that rewards take while they score, or None if unknown.
        encodes_text: whether text encoders are loaded at all.
        text_bytes: bytes that encoding a batch of captions takes beyond the encoders.
        text_saved: bytes that quantization saves of the text encoders, which are read into host memory before it.
        checkpoint_bytes: of a checkpoint.
        total, trained: parameters of the network, and trainable ones.
        processes, local_processes: on all machines, and on each.
        split: what they share.
        weights: of the network, if they are listed already.
        on_cuda: whether the processes compute on CUDA devices.
    """

    bucket: Size
    clips: int = 1
    encoded: tuple[Size, ...] = ()
    sampled: tuple[Size, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    experts: Mapping[str, NetworkWeights] = field(default_factory=dict)
    rewards: float | None = 0.0
    scoring: float | None = 0.0
    encodes_text: bool = True
    text_bytes: float = 0.0
    text_saved: float = 0.0
    checkpoint_bytes: float = 0.0
    total: int = 0
    trained: int = 0
    processes: int = 1
    local_processes: int = 1
    split: ShardingSpec = WHOLE
    weights: NetworkWeights | None = None
    on_cuda: bool = False


@dataclass(frozen=True)
class RunPlan:
    """Predicted memory of a run.

    Attributes:
        phases: bytes that each process has on its GPU at the peak of each phase of the run, by the name of their use.
        host: bytes that each process has in host memory in each phase.
        step: the training step in detail.
        other_networks: bytes on the GPU in forward and backward beyond those of the trained network.
        waiting_networks: bytes of networks that wait in host memory in some phase, without swapped blocks of the
            trained network.
        local_processes: processes that share the memory of a machine.
        one_by_one: bytes that the processes of a machine load one after another.
        written_alone: bytes of `host` in the phase of checkpoints that only the writing process takes.
        unknown: names of parts that are not in the figures.
    """

    phases: Mapping[str, Mapping[str, float]]
    host: Mapping[str, float]
    step: MemoryPlan
    other_networks: float
    waiting_networks: float = 0.0
    local_processes: int = 1
    one_by_one: float = 0.0
    written_alone: float = 0.0
    unknown: tuple[str, ...] = ()

    @property
    def peaks(self) -> dict[str, float]:
        """Peak bytes on the GPU by phase."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def peak_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def peak(self) -> float:
        """The most bytes on the GPU."""
        return self.peaks[self.peak_phase]

    @property
    def machine_bytes(self) -> float:
        """The bytes of host memory that a machine needs."""
        processes = self.local_processes
        phases = {phase: processes * size for phase, size in self.host.items()}
        phases[LOADING] = processes * min(self.host.values()) + self.one_by_one
        phases[CHECKPOINT] -= (processes - 1) * self.written_alone
        return max(phases.values())


def plan_run(
    config: TrainConfig, geometry: Geometry, transformer: nn.Module, *, spec: ModelSpec, around: RunSizes
) -> RunPlan:
    """Return the memory of each phase of a run.

    Args:
        config: the run.
        geometry: size rules of the checkpoint.
        transformer: on the meta device, with its adapter attached.
        spec: of the model.
        around: the other inputs.
    """
    step = estimate_for(
        config, geometry, transformer, spec=spec, bucket=around.bucket, batch_size=around.clips,
        split=around.split, weights=around.weights,
    )  # fmt: skip
    maker = _Phases(config, geometry, transformer, spec, around, step)
    on_gpu = maker.on_gpu()
    process = GIB * (CUDA_PROCESS_GIB if around.on_cuda else PROCESS_GIB)
    host = {phase: process + maker.on_host(phase) for phase in on_gpu}
    networks = (*spec.facts.networks[:-1], *spec.facts.companions)
    unknown = [part for part in networks if is_network(part) and part not in around.parts]
    if around.rewards is None:
        unknown.append("networks of rewards")
    if around.scoring is None:
        unknown.append("activations of rewards")
    # DeepSpeed takes the network from host memory on all processes together.
    at_once = around.local_processes if maker.zero else 1
    return RunPlan(
        on_gpu, host, step, sum(maker.learning().values()) - GIB * step.total,
        max(map(maker.waiting, on_gpu)), around.local_processes,
        one_by_one=max(maker.loaded * at_once, maker.on_host(LOADING)), written_alone=maker.saving()[1],
        unknown=tuple(unknown),
    )  # fmt: skip


def vae_working_bytes(spec: ModelSpec, size: Size, **options: Any) -> float:
    """Return the bytes that the VAE takes while it works; see `models.sizes`."""
    from finetrainers.models.spec import vae_working_bytes as working_bytes  # needs torch, as the caller's network does

    return working_bytes(spec, size, **options)


def _largest(*moments: Mapping[str, float]) -> Mapping[str, float]:
    return max(moments, key=lambda parts: sum(parts.values()))


def _loaded_width(config: TrainConfig) -> float:
    """Return the bytes of a number of the network as it is read into host memory."""
    if config.training.training_type == "full-finetune":
        return 4 if config.training.master_weights == "fp32" else 2
    return DTYPE_BYTES[config.model.transformer_dtype]


class _Phases:
    """The parts of each phase."""

    def __init__(
        self, config: TrainConfig, geometry: Geometry, transformer: nn.Module, spec: ModelSpec, around: RunSizes,
        step: MemoryPlan,
    ) -> None:  # fmt: skip
        self.config, self.geometry, self.spec, self.around = config, geometry, spec, around
        self.method = method = method_spec(config)
        parts, facts = around.parts, spec.facts
        self.samples = method.samples
        self.cached = method.caches_texts(config)
        self.precomputed = config.data.precompute_conditions and bool(around.encoded)
        self.texts = {name: parts[name] for name in facts.text_parts if name in parts and around.encodes_text}
        self.clip_parts = {name: parts[name] for name in facts.clip_parts if name in parts}
        self.vae = {"vae": parts["vae"]} if "vae" in parts else {}
        #: On the GPU while clips are sampled, otherwise in host memory, unless clips are encoded by them.
        self.companions = {name: parts[name] for name in facts.companions if name in parts}
        #: Block swap of those that are experts, which are stored like the trained network.
        self.swaps: dict[str, SwapSizes] = {}
        #: Those that take more memory before they are quantized.
        self.unquantized: dict[str, float] = {}
        for name, weights in around.experts.items():
            width = max(2, round(parts[name] / max(1, weights.total)))
            size, self.swaps[name] = frozen_sizes(config, weights, spec, width=width)
            self.companions[name] = size + self.swaps[name].slots
            if weights.total * width > size + self.swaps[name].host:
                self.unquantized[name] = parts[name]
        #: Those of them that rollouts sample with.
        self.experts = {name: parts[name] for name in facts.experts if name in parts} if self.samples else {}
        #: Networks that stay loaded while training.
        self.stays = {} if self.cached else dict(self.texts)
        if self.samples:
            self.stays |= self.vae
        elif not self.precomputed:
            self.stays |= self.clip_parts
        self.step = {name: GIB * size for name, size in step.parts.items()}
        self.rollout_parts = {name: self.step[name] for name in _OF_ROLLOUT}
        self.total = GIB * step.total
        #: Swapped blocks and offloaded activations.
        self.swapped = step.swap.host + GIB * step.offloaded
        self.weights = {name: self.step[name] for name in ("frozen weights", "trainable weights")}
        rest = (*self.weights, _SLOTS, "optimizer state", "moving average", "gradient buffers", "copies of the policy")
        self.persistent_bytes = {**self.stays, **{name: self.step[name] for name in rest}}
        self.trained = around.trained
        self.network = around.weights or NetworkWeights(transformer, spec)
        self.largest = self.network.largest
        #: Bytes of the network as it is read into host memory.
        self.loaded = around.total * _loaded_width(config)
        self.width = spec.width(transformer)
        self.zero = around.split.zero_stage > 0

    # ---- on the GPU ------------------------------------------------------------------------------------------------

    def on_gpu(self) -> dict[str, Mapping[str, float]]:
        """Return the bytes of each use in each phase that the run has."""
        phases = {LOADING: self._loading(), TRAINING_STEP: self.learning()}
        if self.around.encodes_text:
            before = self.texts if self.cached else self.persistent_bytes
            phases[ENCODING_TEXT] = {**before, "activations of the text encoders": self.around.text_bytes}
        if self.around.encoded:
            phases[ENCODING_CLIPS] = self._encoding_clips()
        if self.samples:
            phases[ROLLOUT] = self._rollout()
        if self.method.rewards(self.config):
            phases[REWARD] = self._reward()
        if self.around.sampled:
            phases[VALIDATION] = self._validation()
        phases[CHECKPOINT] = self._gathering()
        return {
            phase: {name: size for name, size in phases[phase].items() if size} for phase in PHASES if phase in phases
        }

    def _loading(self) -> Mapping[str, float]:
        """Return the largest of: text encoders, VAE, network; each is freed before the next unless it stays."""
        clips = {**({} if self.cached else self.texts), **self.clip_parts}
        network = {**self.stays, **self.weights, _SLOTS: self.step[_SLOTS]}
        return _largest(self.texts, clips, network)

    def _encoding_clips(self) -> Mapping[str, float]:
        batch = self.config.data.precompute_batch_size if self.precomputed else self.around.clips
        before = self.clip_parts if self.precomputed else self.persistent_bytes
        working = max(vae_working_bytes(self.spec, size, batch=batch) for size in self.around.encoded)
        if self.precomputed and not self.cached:
            before = {**self.texts, **before}
        return {**before, "the VAE at work": working}

    def learning(self) -> Mapping[str, float]:
        """Return the bytes of each use in forward and backward passes."""
        fixed = sum(size for name, size in self.persistent_bytes.items() if name not in self.stays)
        moving = self.total - fixed - sum(self.rollout_parts.values())
        return {
            **self.persistent_bytes,
            **self.rollout_parts,
            "activations, gradients and copies": moving,
            **self._rewards(),
        }

    def _rewards(self) -> dict[str, float]:
        """Return the bytes of rewards that stay on the device from the start; 0 without rewards."""
        return {"networks of rewards": self.around.rewards or 0.0}

    def _sampling(self, size: Size, batch: int) -> dict[str, float]:
        """Return the bytes of a forward pass without backward, which stores nothing for it."""
        unit = batch * self.geometry.num_tokens(*size) / self.config.parallel.sp_size * self.width * 2
        split = self.around.split
        activations = counted_activations(self.config, self.spec, split, halved=split.gathers or self.zero)
        parts = {name: self.step[name] for name in ("autocast copies", "gathered weights")}
        return {"activations": activations.forward * unit, **parts}

    def _validation(self) -> Mapping[str, float]:
        """Return the larger of denoising and decoding the largest sample."""
        scale = self.config.validation.validation_guidance_scale
        is_guided = self.spec.facts.guidance is None and (scale is None or scale > 1)
        branches = 2 if is_guided and self.spec.guides_in_one_call else 1
        size = max(self.around.sampled, key=lambda clip_size: self.geometry.num_tokens(*clip_size))
        loaded = {**self.persistent_bytes, **self.vae, **self.companions}
        denoising = {**loaded, **self._sampling(size, branches), **self._rewards()}
        working = max(vae_working_bytes(self.spec, clip_size) for clip_size in self.around.sampled)
        decoding = {**loaded, "the VAE at work": working, **self._rewards()}
        if not self.config.validation.enable_model_cpu_offload:
            return _largest(denoising, decoding)
        # One network at a time is on the GPU: the trained one, another expert, or the VAE.
        others = (*self.vae, *self.companions)
        denoising = {name: size for name, size in denoising.items() if name not in others}
        experts = {name: self.companions[name] for name in self.spec.facts.experts if name in self.companions}
        trained = (*self.weights, _SLOTS)
        by_other = {name: size for name, size in denoising.items() if name not in trained}
        decoding = {name: size for name, size in decoding.items() if name not in (*trained, *self.companions)}
        return _largest(denoising, decoding, *({**by_other, name: size} for name, size in experts.items()))

    def _rollout(self) -> Mapping[str, float]:
        trajectories = {**self.rollout_parts, **self._rewards(), **self.experts}
        if self.method.scores_while_sampling(self.config):
            trajectories["activations of rewards"] = self.around.scoring or 0.0
        batch = self.config.dataloader.batch_size
        branches = self.method.branches(self.config)
        denoising = {**self.persistent_bytes, **trajectories, **self._sampling(self.around.bucket, batch * branches)}
        working = vae_working_bytes(self.spec, self.around.bucket, batch=batch)
        decoding = {**self.persistent_bytes, **trajectories, "the VAE at work": working}
        return _largest(denoising, decoding)

    def _reward(self) -> Mapping[str, float]:
        scoring = {"activations of rewards": self.around.scoring or 0.0}
        decoding = self.method.decode_gradient(self.config, self.around.bucket, self.geometry)
        if decoding is not None:
            size, stored = decoding
            working = vae_working_bytes(
                self.spec, size, batch=self.config.dataloader.batch_size, gradient=True, stored=stored
            )
            parts = {**scoring, "the VAE's decoder and its backward": working}
            # If the decoder is recomputed, that is after the rewards' backward: only one of the two is alive.
            scoring = parts if stored else dict([max(parts.items(), key=lambda part: part[1])])
        return {**self.persistent_bytes, **self.rollout_parts, **self._rewards(), **self.experts, **scoring}

    def _gathering(self) -> Mapping[str, float]:
        """Return the bytes while saving, which gathers sharded weights one at a time and copies them to the host."""
        if not self.around.split.gathers:
            return self.persistent_bytes
        width = computed_bytes(self.config) if self.zero else 4
        return {**self.persistent_bytes, "a gathered weight": float(self.largest * width)}

    # ---- on the host -----------------------------------------------------------------------------------------------

    def on_host(self, phase: str) -> float:
        """Return the host bytes of a process in a phase, without those of Python and the libraries."""
        if phase == LOADING:
            return max(self.loaded, sum(self.texts.values()) + self.around.text_saved, sum(self.clip_parts.values()))
        if phase in (ENCODING_TEXT, ENCODING_CLIPS) and (self.cached or self.precomputed):
            return self._clips() if phase == ENCODING_CLIPS else 0.0
        num_bytes = self._offloaded() + (0.0 if self.precomputed or not self.around.encoded else self._clips())
        if phase == CHECKPOINT:
            num_bytes += sum(self.saving())
        return num_bytes + self.waiting(phase)

    def waiting(self, phase: str) -> float:
        """Return the bytes of networks that wait in host memory in a phase, without the trained one's swapped blocks.

        The other expert is loaded whole before it is quantized.
        """
        offloads = self.config.validation.enable_model_cpu_offload
        companions = {**(self.companions if self.around.sampled else {}), **self.experts}
        if phase == VALIDATION:
            on_gpu: Collection[str] = () if offloads else companions
        else:
            on_gpu = (*self.stays, *(self.experts if phase in (ROLLOUT, REWARD) else ()))
        waiting = 0.0
        for name, size in companions.items():
            swap = self.swaps.get(name, NO_SWAP)
            waiting += swap.host + (0.0 if name in on_gpu else size - swap.slots)
        if phase == VALIDATION and offloads:
            waiting += sum(self.weights.values()) + sum(self.vae.values())
        loaded = sum(size for name, size in self.unquantized.items() if name in companions)
        return max(waiting, loaded) if phase in (ROLLOUT, VALIDATION) else waiting

    def saving(self) -> tuple[float, float]:
        """Return the host bytes that saving takes in every process, and those of the process that writes the rest."""
        training, split, around = self.config.training, self.around.split, self.around
        width = 2.0 if training.master_weights == "stochastic_rounding" else 4.0
        width = float(computed_bytes(self.config)) if self.zero else width
        weights, average = width * self.trained, 4.0 * self.trained if training.use_ema else 0.0
        if split.gathers and not self.zero:
            # FSDP2 gathers the written tensors into host memory. An asynchronous save does not copy them again.
            divides = training.training_type == "full-finetune" and training.sharded_checkpoints
            if divides and around.processes > 1:
                return (around.checkpoint_bytes - average) / around.processes, average
            return 0.0, around.checkpoint_bytes
        if not training.async_checkpointing:  # file by file
            return 0.0, max(weights, average)
        # An asynchronous save copies the tensors it writes. DeepSpeed writes the optimizer's state itself, while
        # training waits.
        return 0.0, weights + average if self.zero else around.checkpoint_bytes

    def _clips(self) -> float:
        """Return the bytes of decoded clips that workers have ready, and of their processes."""
        workers = self.config.dataloader.dataloader_num_workers
        frames, height, width = max(self.around.encoded, key=lambda size: size[0] * size[1] * size[2])
        batch = self.config.data.precompute_batch_size if self.precomputed else self.around.clips
        clip = 3.0 * frames * height * width * batch
        return workers * (PROCESS_GIB * GIB + 2 * clip) + clip

    def _offloaded(self) -> float:
        """Return the bytes that are on the host instead of on the GPU."""
        split, config = self.around.split, self.config
        num_bytes = self.swapped
        if self.zero:
            num_bytes += zero_host_bytes(
                split, total=self.around.total, trained=self.trained, largest=self.largest,
                width=computed_bytes(config), state_bytes=optimizer_state_bytes(config),
                accumulates=self.method.accumulates(config),
            )  # fmt: skip
        else:
            if split.weights_on_host:
                num_bytes += self.network.page_locked_bytes(_loaded_width(config), shards=split.weights)
                num_bytes += self.network.page_locked_bytes(4.0, shards=split.gradients, trained=True)
            if split.optimizer_on_host:
                num_bytes += self.trained * optimizer_state_bytes(config) / split.optimizer
        if config.optimizer.use_cpu_offload_optimizer:
            num_bytes += self.trained * optimizer_state_bytes(config)
            num_bytes += 2 * self.network.page_locked_bytes(4.0, trained=True)  # weights and gradients in fp32
        return num_bytes
