"""Memory of a checked run by phase, and the choice of options that fit a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from torch import nn

from finetrainers.config.checks.kernels import is_compiled
from finetrainers.config.checks.options import check_block_swap, check_shared_sizes
from finetrainers.config.errors import Problem
from finetrainers.config.facts import is_network
from finetrainers.config.root import MEMORY, TrainConfig
from finetrainers.config.sections import ModelSection
from finetrainers.config.target import TargetDevice, planned_gpu, target_device
from finetrainers.memory.activation_auto import (
    ASSUMED_FLOPS,
    ASSUMED_LINK,
    HOST_SHARE,
    ActivationModel,
    activation_model,
)
from finetrainers.memory.activation_plan import LAUNCH_S, Machine
from finetrainers.memory.advice import MEMORY_OPTIONS, Advice, Outcome, cheapest, other_remedies, sharing_options
from finetrainers.memory.automatic import ACTIVATION_OPTIONS, AutoSettings, Run, choose_automatic, repeat_choices
from finetrainers.memory.count_text import text_working_bytes
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import fits, usable_host, with_reserve, without_reserve
from finetrainers.memory.network_weights import NetworkWeights
from finetrainers.memory.phases import TEXTS_AT_ONCE, RunPlan, RunSizes, plan_run
from finetrainers.memory.quantized_encoders import encoder_bytes_saved, largest_layer_bytes
from finetrainers.methods.registry import method_spec
from finetrainers.models.spec import ModelSpec, encoded_bytes, frozen_bytes
from finetrainers.parallel.sharding import expected_split, with_launcher
from finetrainers.utils.device import likely_device_type
from finetrainers.utils.host_memory import read_host_memory
from finetrainers.utils.launch import launched_processes, local_world_size
from finetrainers.utils.phases import ENCODING_CLIPS, LOADING, label
from finetrainers.utils.text import file_size

from .chosen import is_open
from .preflight import ResolvedRun, option_findings
from .room import Needs, disk_needs
from .start_report import print_line
from .trainable import network_without_weights


class RunMemory:
    """The estimate of a run, for its own options and for others."""

    def __init__(
        self, checked: ResolvedRun, transformer: nn.Module | None = None, *, gpu_gib: float | None = None,
        host_gib: float | None = None,
    ) -> None:  # fmt: skip
        """Prepare the estimate of a run.

        Args:
            checked: the run, whose model's configs are on this disk.
            transformer: on the meta device, with its adapter attached.
            gpu_gib: of the GPU to plan for; default: the stated one, else this machine's, at most `memory_budget`.
            host_gib: of the machine to plan for; default: this one.
        """
        self.checked = checked
        #: Bytes of memory of the machine.
        self.host = float(read_host_memory().total) if host_gib is None else GIB * host_gib
        gpu_gib = gpu_gib or planned_gib(checked.config)
        #: The device that the run trains on.
        self.device = target_device(checked.config)
        #: The machine to plan for, or None if no GPU is known.
        self.machine = None if gpu_gib is None else self.machine_with(gpu_gib)
        self.transformer = network_without_weights(checked) if transformer is None else transformer
        spec = checked.spec
        networks = (*spec.facts.networks[:-1], *filter(is_network, spec.facts.companions))
        parts = {part: frozen_bytes(spec, part) for part in networks}
        bucket = checked.plan.heaviest(checked.config)[0]
        rewards, scoring = self._reward_bytes(checked.config, bucket)
        self._specs: dict[str, ModelSpec] = {}  # by the options of the model
        self._outcomes: dict[str, Outcome | None] = {}  # that were estimated, by configuration
        needs, weights = self.disk(), NetworkWeights(self.transformer, spec)
        self._around = RunSizes(
            bucket=bucket,
            encoded=tuple(checked.plan.buckets) if checked.plan.encodes_clips else (),
            sampled=tuple(prompt.size or checked.plan.size for prompt in checked.sampled),
            parts={part: size for part, size in parts.items() if size is not None},
            experts={part: NetworkWeights(network, spec) for part, network in spec.experts_on_meta().items()},
            rewards=rewards,
            scoring=scoring,
            encodes_text=checked.needs_text,
            checkpoint_bytes=needs.checkpoint,
            total=weights.total,
            trained=weights.trained,
            weights=weights,
            processes=launched_processes(),
            local_processes=local_world_size(),
        )

    def plan(self, config: TrainConfig | None = None) -> RunPlan:
        """Return the memory of each phase, for the run's options or for `config`, which differs in memory options."""
        return self.choose(config).plan

    def choose(
        self, config: TrainConfig | None = None, *, machine: Machine | None = None,
        device: TargetDevice | None = None, batch: tuple[tuple[int, int, int], int] | None = None,
    ) -> AutoSettings:  # fmt: skip
        """Return the settings that a run on this machine chooses for open options, with the memory of each phase.

        Args:
            config: with other options that save memory.
            machine: another machine to choose for.
            device: another device to choose for.
            batch: the bucket and the number of clips of a micro-batch; default: those of the heaviest one.
        """
        machine, device = machine or self.machine, device or self.device
        config = config or self.checked.config
        config = with_open_options(config) if device.type == "cuda" and machine is not None else config
        run = self._run_to_plan(config, self._sizes_of_run(config, device, batch))
        earlier = self.checked.start.memory_choices
        if earlier and machine is not None:
            return repeat_choices(config, run, machine, earlier)
        return choose_automatic(config, run, machine)

    def step_flops(self) -> float:
        """Return the operations of a step with the largest micro-batches: one forward and backward pass of each."""
        config = self.checked.config
        work = activation_model(
            config, self.checked.geometry, self.transformer, spec=self._load_spec(config.model),
            around=self._sizes_of_run(config, self.device, None), others=0.0, waiting=0.0,
        ).work  # fmt: skip
        return config.training.gradient_accumulation_steps * (work.forward + work.backward)

    def _sizes_of_run(
        self, config: TrainConfig, device: TargetDevice, batch: tuple[tuple[int, int, int], int] | None
    ) -> RunSizes:
        """Return the sizes that do not depend on the open options; see `choose`."""
        spec = self._load_spec(config.model)
        bucket, clips = batch or (self._around.bucket, self.checked.plan.heaviest(config)[1])
        # Encoding beforehand takes clips of all buckets; otherwise only those of the micro-batch are encoded.
        only_bucket = batch is not None and self._around.encoded and not config.data.precompute_conditions
        saved = {part: encoder_bytes_saved(spec, part) for part in self._around.parts}
        around = replace(
            self._around,
            bucket=bucket,
            encoded=(bucket,) if only_bucket else self._around.encoded,
            parts={part: size - saved[part] for part, size in self._around.parts.items()},
            clips=clips,
            split=expected_split(config.parallel),
            text_bytes=_text_bytes(config, spec, clips if batch else config.dataloader.batch_size),
            text_saved=sum(saved.values()) if self._around.encodes_text else 0.0,
            on_cuda=device.type == "cuda",
        )
        own = method_spec(config)
        if own.rewards(config) != own.rewards(self.checked.config):  # other options compute them elsewhere
            rewards, scoring = self._reward_bytes(config, around.bucket)
            around = replace(around, rewards=rewards, scoring=scoring)
        return around

    def _run_to_plan(self, config: TrainConfig, around: RunSizes) -> Run:
        """Return the run whose open options are chosen, with estimates for values of them."""
        spec, geometry = self._load_spec(config.model), self.checked.geometry

        def plan(changed: TrainConfig) -> RunPlan:
            return plan_run(changed, geometry, self.transformer, spec=self._load_spec(changed.model), around=around)

        def model(config: TrainConfig) -> ActivationModel:
            planned = plan(config)
            return activation_model(
                config, geometry, self.transformer, spec=spec, around=around, others=planned.other_networks,
                waiting=planned.waiting_networks,
            )  # fmt: skip

        is_unsharded = not (around.split.gathers or around.split.zero_stage)
        return Run(
            plan, model, len(spec.block_modules(self.transformer)),
            may_offload_samples=is_unsharded and bool(around.sampled),
            decodes=method_spec(config).samples,
        )  # fmt: skip

    def _load_spec(self, model: ModelSection) -> ModelSpec:
        """Return the spec of the model with these options, which reads its configs once."""
        key = model.model_dump_json()
        if key not in self._specs:
            self._specs[key] = self.checked.family.load(model)
        return self._specs[key]

    def _reward_bytes(self, config: TrainConfig, bucket: tuple[int, int, int]) -> tuple[float | None, float | None]:
        """Return the bytes on a process's device of reward networks, and of scoring, each None if unknown."""
        checked, method, size = self.checked, method_spec(config), bucket
        if not method_spec(checked.config).samples:  # rewards score samples of prompts, not the clips trained on
            sizes = [prompt.size or checked.plan.size for prompt in checked.scored or checked.prompts]
            size = max(sizes, key=math.prod, default=bucket)
        return method.reward_bytes(config), method.scoring_bytes(config, size, fps=checked.frame_rate)

    def machine_with(self, gpu_gib: float) -> Machine:
        """Return a machine whose memory alone is known; its speeds are assumed."""
        host = HOST_SHARE * self.host / local_world_size()
        return Machine(without_reserve(GIB * gpu_gib), host, ASSUMED_FLOPS, ASSUMED_LINK, LAUNCH_S)

    def fits(self, plan: RunPlan, gpu_gib: float) -> bool:
        """Return whether a plan fits a GPU and the machine."""
        return fits(plan.peak, GIB * gpu_gib) and self.host_problem(plan) is None

    def host_problem(self, plan: RunPlan) -> str | None:
        """Return the reason why the machine has too little host memory for a plan, with remedies, or None if it fits.

        A run on a CPU has in host memory what it would have on a GPU.
        """
        config, needed = self.checked.config, plan.machine_bytes
        if likely_device_type() == "cpu" and planned_gpu(config) is None and not config.model.is_estimated:
            phases = (size + plan.host[phase] for phase, size in plan.peaks.items() if phase != LOADING)
            needed = max(needed, plan.local_processes * max(phases))
        if needed <= usable_host(self.host):
            return None
        decodes = ENCODING_CLIPS in plan.host and (
            not config.data.precompute_conditions or plan.host[ENCODING_CLIPS] == max(plan.host.values())
        )
        remedies = {
            "fewer processes on the machine": plan.local_processes > 1,
            "a smaller --dataloader_num_workers": config.dataloader.dataloader_num_workers > 0 and decodes,
            "a smaller --blocks_to_swap": plan.step.swap.host > 0,
            "--activation_memory checkpoint": plan.step.offloaded > 0,
            "a machine with more memory": True,
        }
        return (
            f"{file_size(needed)} of host memory are planned, more than {file_size(usable_host(self.host))} of the "
            f"machine's {file_size(self.host)}; use {' or '.join(name for name, helps in remedies.items() if helps)}"
        )

    def disk(self) -> Needs:
        """Return the disk space that the run needs, without the cache."""
        return disk_needs(self.checked, self.transformer)

    def cache_bytes(self) -> float:
        """Return the bytes of the tensors in the cache of encoded clips and prompts."""
        config, plan, spec = self.checked.config, self.checked.plan, self.checked.spec
        total = 0.0
        if config.data.precompute_conditions and plan.encodes_clips:
            for clip in plan.encoded_clips():
                clip_shapes = spec.clip_shapes(self.transformer, clip.bucket).values()
                total += sum(encoded_bytes(config.model, part, shape) for part, shape in clip_shapes)
        if method_spec(config).caches_texts(config):
            try:
                shapes = spec.text_shapes()
            except NotImplementedError:
                return total
            encoder = next((part for part in spec.facts.text_parts if is_network(part)), "text_encoder")
            total += len({"", *plan.all_captions()}) * sum(
                math.prod(shape) if name.endswith("_mask") else encoded_bytes(config.model, encoder, shape)
                for name, shape in shapes.items()
            )
        return total

    def advice(
        self, budget_gib: float, *, device: TargetDevice | None = None, config: TrainConfig | None = None
    ) -> Advice | None:
        """Return the cheapest options that make the run fit a GPU and the machine, or None if there are none.

        Args:
            budget_gib: of the GPU.
            device: that options are checked for, or None for a GPU with unknown properties.
            config: with other options that save memory.
        """
        # The advice must work on this machine: missing packages are not excused.
        device = replace(device or TargetDevice("cuda"), is_elsewhere=False)
        machine = self.machine_with(budget_gib)

        def outcome(config: TrainConfig) -> Outcome | None:
            key = f"{budget_gib} {device} {config.model_dump_json()}"
            if key not in self._outcomes:
                self._outcomes[key] = self._outcome(config, machine, device)
            return self._outcomes[key]

        config = config or self.checked.config
        heads = self.checked.facts.heads if self.checked.spec.token_plan else None
        sharing = sharing_options(launched_processes(), heads, config.parallel.sp_mode)
        automatic = with_open_options(config) if device.type == "cuda" else config
        switches = [
            switch
            for switch in MEMORY_OPTIONS
            if not any(name in automatic.chosen and automatic.get(name) == "auto" for name in switch.options)
            and not ("gradient_checkpointing" in switch.options and automatic.memory.activation_memory == "auto")
        ]
        host = usable_host(self.host)
        return cheapest(config, outcome, budget=machine.device, host=host, switches=[*switches, *sharing])

    def other_remedies(self, plan: RunPlan) -> list[str]:
        """Return the remedies for a plan that no set of options makes fit."""
        config, can_share = self.checked.config, self.checked.spec.token_plan is not None
        config = config.model_copy(update={"parallel": with_launcher(config.parallel)})
        sizes = "--rollout_size" if method_spec(config).samples else "--video_resolution_buckets"
        return other_remedies(config, plan.peak_phase, sizes=sizes, can_share=can_share)

    def _outcome(self, config: TrainConfig, machine: Machine, device: TargetDevice) -> Outcome | None:
        """Return memory and time of other options, or None if the run would be refused, or they would do nothing."""
        memory = config.memory
        if (
            device.type == "cpu"
            and memory.memory_budget is None
            and "auto" in (memory.blocks_to_swap, memory.activation_memory)
        ):
            return None
        problems = self._option_problems(config, device)
        if problems:  # a missing compiler, say, refuses the run on this machine with any memory options
            own_problems = self._option_problems(self.checked.config, device)
            if any(problem not in own_problems for problem in problems):
                return None
        settings = self.choose(config, machine=machine, device=device)
        words = {name: text for name, text in settings.words.items() if name != "blocks_to_swap" or settings.swapped}
        plan = settings.plan
        return Outcome(plan.peaks, 100 * settings.slower, chosen=words, host=plan.machine_bytes)

    def _option_problems(self, config: TrainConfig, device: TargetDevice) -> list[Problem]:
        """Return the reasons why a run with these options is refused."""
        checked, parts = self.checked, with_launcher(config.parallel).fsdp is not None
        findings = option_findings(
            config, checked.facts, checked.prompts, checked.scored, device=device, updates_parts=parts
        )
        check_shared_sizes(config, checked.facts, checked.sizes, findings, processes=launched_processes())
        return findings.errors


def with_open_options(config: TrainConfig) -> TrainConfig:
    """Return a copy with `auto` for the exact memory options that a run on a GPU chooses, where they are open.

    Nothing is chosen without `fit_gpu`, and nothing of a network that is compiled.
    """
    if not config.memory.fit_gpu or is_compiled(config):
        return config
    if all(is_open(config, name) for name in ACTIVATION_OPTIONS):
        config = config.with_chosen({"activation_memory": "auto"}, MEMORY)
    swapping = config.with_chosen({"blocks_to_swap": "auto"}, MEMORY)
    launched = swapping.model_copy(update={"parallel": with_launcher(config.parallel)})
    return swapping if is_open(config, "blocks_to_swap") and not any(check_block_swap(launched)) else config


def planned_gib(config: TrainConfig) -> float | None:
    """Return the GiB of GPU memory to plan for, or None if there is none.

    They are those of the stated GPU or this machine's, at most the budget.
    """
    budget, stated = config.memory.memory_budget, planned_gpu(config)
    if stated is None:
        return budget or gib_of_this_gpu()
    return stated.gib if budget is None else min(budget, stated.gib)


def gib_of_this_gpu() -> float | None:
    """Return the GiB of this machine's GPU, or None if there is none."""
    if likely_device_type() != "cuda":
        return None
    import torch

    return torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else None


def _text_bytes(config: TrainConfig, spec: ModelSpec, clips: int) -> float:
    """Return bytes of activations of encoding the prompts of `clips` clips, for the encoder that needs most."""
    batch = TEXTS_AT_ONCE if method_spec(config).caches_texts(config) else clips
    batch = int(min(batch, spec.texts_at_once))
    working = (
        text_working_bytes(spec, part, batch=batch) + largest_layer_bytes(spec, part) for part in spec.facts.text_parts
    )
    return max(working, default=0.0)


# ---- for runs --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def run_memory(checked: ResolvedRun, host_gib: float | None = None) -> RunMemory:
    """Return the estimate of a run, made once: building a large network without weights takes a second."""
    return RunMemory(checked, host_gib=host_gib)


def print_planned(checked: ResolvedRun) -> None:
    """Print the planned memory, as one line at the start of a run, and a warning if the machine has less."""
    if checked.family.configs_not_here(checked.config.model):
        return
    memory = run_memory(checked)
    plan = memory.plan()
    if (problem := memory.host_problem(plan)) is not None:
        print_line(f"warning: {problem}")
    if likely_device_type() == "cpu":
        print_line(
            f"memory, planned: {file_size(plan.local_processes * plan.peak + plan.machine_bytes)} of host memory (no "
            "GPU)"
        )
        return
    print_line(
        f"memory, planned: {file_size(plan.peak)} on the GPU in the phase {label(plan.peak_phase)}, about "
        f"{file_size(with_reserve(plan.peak))} reserved; {file_size(plan.machine_bytes)} of host memory"
    )


def planned_peaks(checked: ResolvedRun) -> dict[str, dict[str, float]]:
    """Return the planned GiB of each phase of a process, named as measured peaks; empty if they cannot be planned."""
    if checked.family.configs_not_here(checked.config.model):
        return {}
    plan, on_cpu, peaks = run_memory(checked).plan(), likely_device_type() == "cpu", {}
    for phase, size in plan.peaks.items():
        host = plan.host[phase]
        sizes = {"host": size + host} if on_cpu else {"allocated": size, "reserved": with_reserve(size), "host": host}
        peaks[phase] = {name: round(value / GIB, 4) for name, value in sizes.items()}
    return peaks
