"""The switches that lower memory peaks, what each costs, and the search for the cheapest set that fits a GPU.

A new option that saves memory gets a row in `MEMORY_OPTIONS`. What it saves is not written here: the estimate computes
it. Imports no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from typing import Any

from finetrainers.config.parallel import SpMode
from finetrainers.config.root import TrainConfig
from finetrainers.utils.phases import VALIDATION


@dataclass(frozen=True)
class Outcome:
    """Estimated memory and time of a configuration.

    Attributes:
        peaks: bytes on the GPU in each phase.
        slower: planned additional time of a step relative to one that recomputes and copies nothing, in percent.
        chosen: description of the choice for each option with the value `auto`, by name.
        host: bytes of host memory that a machine needs.
    """

    peaks: Mapping[str, float]
    slower: float = 0.0
    chosen: Mapping[str, str] = field(default_factory=dict)
    host: float = 0.0

    @property
    def peak(self) -> float:
        """The most bytes on the GPU."""
        return max(self.peaks.values(), default=0.0)


#: Function that returns the outcome of a configuration, or None if a run with these options would be refused.
Outcomes = Callable[[TrainConfig], Outcome | None]


@dataclass(frozen=True)
class MemoryOption:
    """Options that lower memory, and their cost.

    Attributes:
        options: values by flat name of the option.
        cost: description for the user of what gets slower, worse or larger.
        price: for the order of the search, which prefers the set of switches with the lowest sum, including
            `Outcome.slower`. About the percent of a step's time; switches that change results cost more than those that
            only take time.
        slowdown: percent of a step's time beyond `Outcome.slower`, or None if it was not measured.
        needs: values of other options without which it saves nothing.
        is_exact: whether results stay the same up to the order of floating-point sums.
    """

    options: Mapping[str, Any]
    cost: str
    price: float
    slowdown: float | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)
    is_exact: bool = False

    @property
    def flags(self) -> str:
        """The options as on the command line."""
        return " ".join(_flag(name, value) for name, value in self.options.items())


#: In order of price.
MEMORY_OPTIONS: tuple[MemoryOption, ...] = (
    MemoryOption({"enable_slicing": True}, "the VAE takes the clips of a batch one after another", 1, 0, is_exact=True),
    MemoryOption({"precompute_batch_size": 1}, "the VAE encodes clips one by one before training", 1, 0, is_exact=True),
    MemoryOption(
        {"enable_model_cpu_offload": True}, "slower validation samples: parts travel from host memory", 2, 0,
        is_exact=True,
    ),
    MemoryOption({"precompute_conditions": True}, "disk for the cache, and one fixed crop of every clip", 3, 0),
    MemoryOption(
        {"quantize_text_encoders": "int8"}, "text encoders are rounded to int8: prompts are encoded a bit differently",
        5, 0,
    ),
    MemoryOption({"enable_tiling": True}, "the VAE works in tiles: slower, and latents differ slightly", 4, 0),
    MemoryOption(
        {"quantize_text_encoders": "nf4"}, "text encoders are rounded to 4 bits: prompts are encoded a bit differently",
        10, 0,
    ),
    MemoryOption({"gradient_checkpointing": True}, "one more forward pass", 1, 0, is_exact=True),
    MemoryOption(
        {"activation_memory": "auto"}, "blocks compute some activations again, or move them to host memory", 2, 0,
        is_exact=True,
    ),
    MemoryOption(
        {"offload_trajectory": True}, "sampled latents travel to host memory and back", 4, is_exact=True
    ),
    MemoryOption(
        {"overlap_gradient_exchange": False}, "gradients are averaged after the backward pass, not during it", 8,
        is_exact=True,
    ),
    MemoryOption({"sync_each_batch": True}, "gradients are reduced after each micro-batch", 10, is_exact=True),
    MemoryOption({"optimizer": "adamw-torchao-8bit"}, "optimizer state is rounded to 8 bits", 12),
    MemoryOption(
        {"blocks_to_swap": "auto"}, "frozen weights travel over PCIe in forward and in backward; host memory", 20,
        is_exact=True,
    ),
    MemoryOption({"quantize_frozen": "int8"}, "frozen weights are rounded to int8, and dequantized for every use", 34),
    # It changes results, so it costs more than recomputing all blocks, which takes up to a third of a step.
    MemoryOption({"lora_autocast": False}, "norms and sums are computed in bf16, as in inference", 36),
    MemoryOption({"quantize_frozen": "nf4"}, "frozen weights are rounded to 4 bits, and dequantized for every use", 60),
    MemoryOption(
        {"layerwise_upcasting_modules": ["transformer"]}, "frozen weights are rounded to 8 bits, a cast per layer", 35,
        needs={"gradient_checkpointing": True},
    ),
    MemoryOption({"master_weights": "stochastic_rounding"}, "noise in the last bit of every update", 40),
    MemoryOption(
        {"use_cpu_offload_optimizer": True, "max_grad_norm": 0.0}, "updates on the CPU, PCIe traffic, no clipping", 100
    ),
    MemoryOption(
        {"use_cpu_offload_optimizer": True, "offload_gradients": True, "max_grad_norm": 0.0},
        "updates on the CPU, PCIe traffic, no clipping", 110,
    ),
    MemoryOption(
        {"optimizer_in_backward": True, "max_grad_norm": 0.0},
        "no clipping; a step with NaN is found after weights have changed", 42,
    ),
    MemoryOption({"zero_offload": True}, "updates on the CPU, PCIe traffic", 100, is_exact=True),
    MemoryOption(
        {"reward_device": "cpu"},
        "rewards compute on the CPU, which is slow; a GPU of their own (cuda:1) or a server (serve-reward) is not", 120,
    ),
    MemoryOption(
        {"fsdp_cpu_offload": True}, "weights travel from host memory for every use, updates on the CPU", 150,
        is_exact=True,
    ),
)  # fmt: skip


def sharing_options(processes: int, heads: int | None, mode: SpMode = "ulysses") -> list[MemoryOption]:
    """Return a switch for each number of processes that may share clips, which is a divisor of `processes`.

    They use ring attention if the number does not divide the heads.

    Args:
        processes: of the run.
        heads: attention heads of the network, or None if its clips cannot be shared.
        mode: exchange between processes that share clips, as the user has set it.
    """
    if heads is None:
        return []
    switches = []
    for size in (size for size in range(2, processes + 1) if processes % size == 0):
        by_ring = mode == "ulysses" and heads % size > 0
        options = {"sp_size": size, **({"sp_mode": "ring"} if by_ring else {})}
        exchange = "pass keys and values around" if by_ring else "communicate"
        cost = (
            f"{size} processes share each clip, and {exchange} in every block; to keep the global batch, multiply "
            f"--gradient_accumulation_steps by {size}"
        )
        switches.append(MemoryOption(options, cost, 15 + size + by_ring))
    return switches


def other_remedies(config: TrainConfig, peak_phase: str, *, sizes: str, can_share: bool = True) -> list[str]:
    """Return the remedies that no switch of a single run applies, those for the phase of the peak first.

    Args:
        config: the run.
        peak_phase: the phase that needs most memory.
        sizes: option that sets the sizes of clips.
        can_share: whether processes can share the clips of the model.
    """
    parallel, shares = config.parallel, []
    if not (parallel.fsdp or parallel.deepspeed):
        weights = "frozen weights" if config.training.training_type == "lora" else "weights, gradients"
        shares.append(f"--fsdp full shards {weights} and optimizer state; --deepspeed --zero_stage 2 or 3 likewise")
    if parallel.sp_size == 1 and can_share:
        shares.append("--sp_size 2 splits the activations of each clip")
    batches = ", or a smaller --batch_size with more --gradient_accumulation_steps"
    remedies = {
        "samples need most memory: remove --validation_prompts, or end each prompt with a smaller size, such as "
        "`@@@17x256x256` (frames, height, width)": peak_phase == VALIDATION,
        f"smaller or shorter clips ({sizes}){batches if config.dataloader.batch_size > 1 else ''}": True,
        f"several GPUs: {'; '.join(shares)}": bool(shares),
        "--training_type lora instead of full finetuning": config.training.training_type == "full-finetune",
        "more host memory, in which blocks and activations may wait (estimate --host 64GB plans for it)": True,
    }
    return [remedy for remedy, applies in remedies.items() if applies]


@dataclass(frozen=True)
class Chosen:
    """A switch of a set.

    Attributes:
        switch: the switch, which is on.
        saves: bytes that the peak would rise by without it.
        saves_host: bytes of host memory that the machine would need more without it.
        slower: percent of a step's time that it is planned to take.
    """

    switch: MemoryOption
    saves: float
    slower: float
    saves_host: float = 0.0


@dataclass(frozen=True)
class Advice:
    """A set of switches, and its outcome.

    Attributes:
        config: with the switches on.
        switches: the set.
        outcome: estimated memory and time of `config`.
        slower: percent of a step's time that the set is planned to take.
    """

    config: TrainConfig
    switches: tuple[Chosen, ...]
    outcome: Outcome
    slower: float

    @property
    def slowdown(self) -> str:
        """Description of how much longer a step takes, as far as it was measured."""
        percent = self.slower + sum(chosen.switch.slowdown or 0.0 for chosen in self.switches)
        phrases = [f"{percent:+.0f} %"] if round(percent) else []
        if any(chosen.switch.slowdown is None for chosen in self.switches):
            phrases.append("rest not measured" if phrases else "not measured")
        return ", ".join(phrases) or "none"


def cheapest(
    config: TrainConfig, outcomes: Outcomes, *, budget: float, host: float = inf,
    switches: Sequence[MemoryOption] = MEMORY_OPTIONS,
) -> Advice | None:  # fmt: skip
    """Return the set of switches with the lowest price that fits the GPU and the machine, or None if no set does.

    Options that the user has set to other than their defaults stay as they are, except for switches that take them
    back.

    Args:
        config: the run.
        outcomes: the estimate.
        budget: bytes that a phase may take on the GPU.
        host: bytes that the run may take of a machine's memory.
        switches: to choose from.
    """
    return _Search(config, outcomes, budget, host, switches).cheapest()


def with_options_set(config: TrainConfig, switches: Sequence[MemoryOption]) -> TrainConfig:
    """Return a copy of `config` with these switches on."""
    for switch in switches:
        config = config.with_values(switch.options)
    return config


def meets_needs(config: TrainConfig, switch: MemoryOption) -> bool:
    """Return whether a switch has the options that it needs to save anything.

    Every setting that recomputes all blocks counts as `gradient_checkpointing`.
    """
    recomputes = config.memory.recomputes_all or config.memory.activation_memory == "auto"
    return all(
        recomputes if name == "gradient_checkpointing" else config.get(name) == value
        for name, value in switch.needs.items()
    )


class _Search:
    """Best-first search over the sets of switches, with bounds.

    If a set contains another, the larger one is taken to need no more memory on the GPU and to recompute no more. So no
    subset of a set that does not fit fits, and the time of the larger set bounds the price of all its subsets. Switches
    that need more host memory by themselves are left out of that larger set where host memory is bounded.
    """

    def __init__(
        self, config: TrainConfig, outcomes: Outcomes, budget: float, host: float, switches: Sequence[MemoryOption]
    ) -> None:
        self._config, self._outcomes, self._budget, self._host = config, outcomes, budget, host
        self._useful = sorted(filter(self._is_useful, switches), key=lambda switch: switch.price)
        self._conflicts = [pair for pair in combinations(self._useful, 2) if self._conflict(*pair)]

    def cheapest(self) -> Advice | None:
        """Return the set with the lowest price that fits, or None."""
        heap: list[tuple[float, tuple[int, ...], bool]] = []

        def push(price: float, chosen: tuple[int, ...]) -> None:
            """Push all sets that begin with these switches, at the lowest price that any of them may have."""
            slower = self._least_slower(chosen)
            if slower is not None:
                heapq.heappush(heap, (price + slower, chosen, False))

        push(0.0, ())
        while heap:
            _, chosen, is_set = heapq.heappop(heap)
            switches = [self._useful[number] for number in chosen]
            if is_set:
                return self._advice(switches)
            price, outcome = sum(switch.price for switch in switches), self._outcome(switches)
            if outcome is not None and outcome.peak <= self._budget and outcome.host <= self._host:
                heapq.heappush(heap, (price + outcome.slower, chosen, True))
            for number in range(chosen[-1] + 1 if chosen else 0, len(self._useful)):
                added = self._useful[number]
                if self._are_compatible([*switches, added]):
                    push(price + added.price, (*chosen, number))
        return None

    def _least_slower(self, chosen: tuple[int, ...]) -> float | None:
        """Return a lower bound of the planned time of the sets that begin with these switches, or None if none fits."""
        switches = [self._useful[number] for number in chosen]
        later = self._useful[chosen[-1] + 1 if chosen else 0 :]
        compatible = [switch for switch in later if self._are_compatible([*switches, switch])]
        fitting = [outcome for outcome in self._largest(switches, compatible) if outcome.peak <= self._budget]
        if fitting and min(outcome.host for outcome in fitting) > self._host:
            frugal = [switch for switch in compatible if not self._takes_host(switch)]
            if all(outcome.host > self._host for outcome in self._largest(switches, frugal)):
                return None
        return min((outcome.slower for outcome in fitting), default=None)

    def _largest(self, switches: list[MemoryOption], added: list[MemoryOption]) -> list[Outcome]:
        """Return the outcomes of the largest sets of these switches and of those that may be added."""
        sets = (self._with_needs([*switches, *largest]) for largest in self._largest_sets(added))
        outcomes = map(self._outcome, sets)
        return [outcome for outcome in outcomes if outcome is not None]

    def _takes_host(self, switch: MemoryOption) -> bool:
        """Return whether a switch needs more host memory by itself, or with the options that it needs."""
        base = self._config.with_values(switch.needs)
        before, after = self._outcomes(base), self._outcomes(with_options_set(base, [switch]))
        return before is not None and after is not None and after.host > before.host

    def _largest_sets(self, switches: list[MemoryOption]) -> list[list[MemoryOption]]:
        """Return the largest sets of these switches without a conflict."""
        for pair in self._conflicts:
            if pair[0] in switches and pair[1] in switches:
                first, second = (
                    self._largest_sets([switch for switch in switches if switch is not left]) for left in pair
                )
                return [*first, *(switch_set for switch_set in second if switch_set not in first)]
        return [switches]

    def _with_needs(self, switches: list[MemoryOption]) -> list[MemoryOption]:
        """Return the switches whose needs are met by the others or by the run."""
        config = with_options_set(self._config, switches)
        return [switch for switch in switches if meets_needs(config, switch)]

    def _are_compatible(self, switches: Sequence[MemoryOption]) -> bool:
        return not any(first in switches and second in switches for first, second in self._conflicts)

    def _conflict(self, first: MemoryOption, second: MemoryOption) -> bool:
        """Return whether two switches set the same option, or a run with both would be refused."""
        if first.options.keys() & second.options.keys():
            return True
        config = self._config.with_values({**first.needs, **second.needs})
        return self._outcomes(with_options_set(config, [first, second])) is None

    def _advice(self, switches: Sequence[MemoryOption]) -> Advice:
        """Return the advice to use a set, with the effect of each switch in it."""
        outcome, base = self._outcome(switches), self._outcomes(self._config)
        assert outcome is not None, "the set was found by this estimate"
        chosen = []
        for switch in switches:
            # Switches that need this one save nothing without it.
            rest = [other for other in switches if other is not switch and not self._needs(other, switch)]
            without = self._outcome(rest)
            if without is None:
                chosen.append(Chosen(switch, 0.0, 0.0))
                continue
            slower = outcome.slower - without.slower
            # Without it, what a run chooses by itself may have to save more, and take longer.
            slower = max(0.0, slower) if outcome.chosen else slower
            chosen.append(Chosen(switch, without.peak - outcome.peak, slower, without.host - outcome.host))
        base_slower = 0.0 if base is None or base.chosen else base.slower
        return Advice(with_options_set(self._config, switches), tuple(chosen), outcome, outcome.slower - base_slower)

    def _is_useful(self, switch: MemoryOption) -> bool:
        """Return whether a switch may be set, and lowers a phase, by itself or with the options that it needs."""
        if any(self._config.changed(name) for name in switch.options):
            return False
        base = self._config.with_values(switch.needs)
        before, after = self._outcomes(base), self._outcomes(with_options_set(base, [switch]))
        if after is None or before is None:
            return after is not None
        return any(size < before.peaks.get(phase, 0.0) for phase, size in after.peaks.items())

    def _needs(self, switch: MemoryOption, other: MemoryOption) -> bool:
        """Return whether a switch saves nothing without the other."""
        return not meets_needs(self._config, switch) and meets_needs(with_options_set(self._config, [other]), switch)

    def _outcome(self, chosen: Sequence[MemoryOption]) -> Outcome | None:
        """Return the outcome of a set of switches, or None if it is refused or lacks an option that a switch needs."""
        changed = with_options_set(self._config, chosen)
        if not all(meets_needs(changed, switch) for switch in chosen):
            return None
        return self._outcomes(changed)


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, list):
        return f"--{name} {' '.join(map(str, value))}"
    return f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
