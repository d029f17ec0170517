"""The switches that lower memory peaks, what each costs, and the search for the cheapest set that fits a GPU.

A new option that saves memory gets a row in `SWITCHES`. What it saves is not written here: the estimate computes it.
Imports no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetrainers.config.root import TrainConfig, fields

#: Bytes on the GPU in each phase; None: a run with these options would be refused.
Peaks = Callable[[TrainConfig], Mapping[str, float] | None]

_MOST_TRIALS = 120  # sets that are estimated in order of price before the search becomes greedy


@dataclass(frozen=True)
class Switch:
    """Options that lower memory, and what they cost.

    Attributes:
        options: values by flat name of the option.
        cost: in words, for the user: what gets slower, worse or larger.
        price: for the order of the search, which prefers the set of switches with the lowest sum. About the percent of
            a step's time; what changes results costs more than what only takes time.
        slowdown: percent of a step's time, counted or measured; None: it was not measured.
        needs: values of other options without which it saves nothing.
    """

    options: Mapping[str, Any]
    cost: str
    price: float
    slowdown: float | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flags(self) -> str:
        """As on the command line."""
        return " ".join(_flag(name, value) for name, value in self.options.items())


#: In order of price.
SWITCHES: tuple[Switch, ...] = (
    Switch({"enable_slicing": True}, "the VAE takes the clips of a batch one after another", 1, 0),
    Switch({"precompute_batch_size": 1}, "the VAE encodes clips one by one before training", 1, 0),
    Switch({"enable_model_cpu_offload": True}, "slower validation samples: parts travel from host memory", 2, 0),
    Switch({"precompute_conditions": True}, "disk for the cache, and one fixed crop of every clip", 3, 0),
    Switch({"quantize_text_encoders": "int8"}, "text encoders are rounded to int8: prompts are encoded a bit differently", 5, 0),
    Switch({"enable_tiling": True}, "the VAE works in tiles: slower, and latents differ slightly", 4, 0),
    Switch({"offload_trajectory": True}, "sampled latents travel to host memory and back", 4),
    Switch({"lora_autocast": False}, "norms and sums are computed in bf16, as in inference", 6),
    Switch({"sync_each_batch": True}, "gradients are reduced after each micro-batch", 10),
    Switch({"optimizer": "adamw-torchao-8bit"}, "optimizer state is rounded to 8 bits", 12),
    Switch(
        {"gradient_checkpointing": True, "activation_memory": "keep_attention"},
        "one more forward pass, without attention", 20,
    ),
    Switch(
        {"gradient_checkpointing": True, "activation_memory": "offload"},
        "one more forward pass without attention, PCIe traffic, pinned host memory", 34,
    ),
    Switch({"blocks_to_swap": "auto"}, "frozen weights travel over PCIe in forward and in backward; host memory", 20),
    Switch({"gradient_checkpointing": True}, "one more forward pass: a third more computation", 33, 33),
    Switch({"quantize_frozen": "int8"}, "frozen weights are rounded to int8, and dequantized for every use", 34),
    Switch({"quantize_frozen": "nf4"}, "frozen weights are rounded to 4 bits, and dequantized for every use", 60),
    Switch(
        {"layerwise_upcasting_modules": ["transformer"]}, "frozen weights are rounded to 8 bits, a cast per layer", 35,
        needs={"gradient_checkpointing": True},
    ),
    Switch({"master_weights": "stochastic_rounding"}, "noise in the last bit of every update", 40),
    Switch(
        {"use_cpu_offload_optimizer": True, "max_grad_norm": 0.0}, "updates on the CPU, PCIe traffic, no clipping", 100
    ),
    Switch(
        {"use_cpu_offload_optimizer": True, "offload_gradients": True, "max_grad_norm": 0.0},
        "updates on the CPU, PCIe traffic, no clipping", 110,
    ),
    Switch(
        {"optimizer_in_backward": True, "max_grad_norm": 0.0},
        "no clipping; a step with NaN is found after weights have changed", 42,
    ),
    Switch({"zero_offload": True}, "updates on the CPU, PCIe traffic", 100),
    Switch({"fsdp_cpu_offload": True}, "weights travel from host memory for every use, updates on the CPU", 150),
)  # fmt: skip

#: What no switch of a single run does; the user decides.
OTHER_WAYS = (
    "smaller or shorter clips (--video_resolution_buckets), or a smaller --batch_size with more "
    "--gradient_accumulation_steps",
    "several GPUs: --fsdp full shards weights, gradients and optimizer state; --deepspeed --zero_stage 2 or 3 likewise",
    "--training_type lora instead of full finetuning",
)


@dataclass(frozen=True)
class Advice:
    """A set of switches, and what comes of it.

    Attributes:
        config: with the switches on.
        switches: the set, with the bytes that the peak would rise by without each.
        peaks: bytes on the GPU in each phase.
    """

    config: TrainConfig
    switches: tuple[tuple[Switch, float], ...]
    peaks: Mapping[str, float]


def cheapest(
    config: TrainConfig, peaks: Peaks, *, budget: float, switches: Sequence[Switch] = SWITCHES
) -> Advice | None:
    """The set of switches with the lowest price with which no phase exceeds the budget; None: no set does.

    Options that the user has set to other than their defaults stay as they are. Sets are tried in order of price. Where
    there are too many, the switch that lowers the peak most for its price is added until it fits, and then those that
    turn out not to be needed are removed.

    Args:
        config: the run.
        peaks: the estimate.
        budget: bytes that a phase may take.
        switches: to choose from.
    """
    useful = _useful(config, peaks, switches)
    for trials, chosen in enumerate(_by_price(useful), start=1):
        found = _peaks_with(config, chosen, peaks)
        if found is not None and max(found.values(), default=0.0) <= budget:
            return _advice(config, chosen, peaks)
        if trials > _MOST_TRIALS:
            greedy = _greedily(config, useful, peaks, budget)
            return None if greedy is None else _advice(config, greedy, peaks)
    return None


def with_switches(config: TrainConfig, switches: Sequence[Switch]) -> TrainConfig:
    """The configuration with these switches on."""
    for switch in switches:
        for name, value in switch.options.items():
            option = fields()[name]
            section = getattr(config, option.section).model_copy(update={option.key: value})
            config = config.model_copy(update={option.section: section})
    return config


def has_what_it_needs(config: TrainConfig, switch: Switch) -> bool:
    """Whether a switch would save anything: every setting that recomputes all blocks counts as `gradient_checkpointing`."""
    return all(
        config.memory.recomputes_all if name == "gradient_checkpointing" else config.get(name) == value
        for name, value in switch.needs.items()
    )


def _useful(config: TrainConfig, peaks: Peaks, switches: Sequence[Switch]) -> list[Switch]:
    """The switches that may be set, and lower a phase, by themselves or with what they need."""
    found = []
    for switch in switches:
        if any(config.changed(name) for name in switch.options):
            continue
        base = with_switches(config, [Switch(switch.needs, "", 0.0)])
        before, after = peaks(base), peaks(with_switches(base, [switch]))
        if after is not None and (before is None or any(after[phase] < before.get(phase, 0.0) for phase in after)):
            found.append(switch)
    return sorted(found, key=lambda switch: switch.price)


def _by_price(switches: Sequence[Switch]) -> Iterator[list[Switch]]:
    """Every set of switches that go together, the one with the lowest price first."""
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while heap:
        price, chosen = heapq.heappop(heap)
        yield [switches[number] for number in chosen]
        for number in range(chosen[-1] + 1 if chosen else 0, len(switches)):
            if not any(switches[number].options.keys() & switches[other].options.keys() for other in chosen):
                heapq.heappush(heap, (price + switches[number].price, (*chosen, number)))


def _peaks_with(config: TrainConfig, chosen: Sequence[Switch], peaks: Peaks) -> Mapping[str, float] | None:
    """The estimate with a set of switches; None: refused, or one of them lacks what it needs."""
    changed = with_switches(config, chosen)
    if not all(has_what_it_needs(changed, switch) for switch in chosen):
        return None
    return peaks(changed)


def _greedily(config: TrainConfig, useful: Sequence[Switch], peaks: Peaks, budget: float) -> list[Switch] | None:
    """A set that fits, not always the one with the lowest price."""
    chosen: list[Switch] = []

    def worst(switches: Sequence[Switch]) -> float:
        found = _peaks_with(config, switches, peaks)
        return float("inf") if found is None else max(found.values(), default=0.0)

    while (peak := worst(chosen)) > budget:
        gains = []
        for number, switch in enumerate(useful):
            # Of several rows for an option, a later one may take the place of an earlier one.
            rest = [other for other in chosen if not other.options.keys() & switch.options.keys()]
            if switch not in chosen and (gain := peak - worst([*rest, switch])) > 0:
                gains.append((gain / switch.price, number, [*rest, switch]))
        if not gains:
            return None
        chosen = max(gains)[2]
    for switch in sorted(chosen, key=lambda one: -one.price):
        rest = [other for other in chosen if other is not switch]
        if worst(rest) <= budget:
            chosen = rest
    return sorted(chosen, key=lambda one: one.price)


def _advice(config: TrainConfig, chosen: Sequence[Switch], peaks: Peaks) -> Advice:
    found = _peaks_with(config, chosen, peaks)
    assert found is not None, "the set was found by this estimate"
    peak = max(found.values(), default=0.0)
    savings = []
    for switch in chosen:
        # What needs this switch saves nothing without it.
        rest = [o for o in chosen if o is not switch and not o.needs.keys() & switch.options.keys()]
        without = _peaks_with(config, rest, peaks)
        savings.append((switch, 0.0 if without is None else max(without.values(), default=0.0) - peak))
    return Advice(with_switches(config, chosen), tuple(savings), found)


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, list):
        return f"--{name} {' '.join(map(str, value))}"
    return f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
