"""Block swap of a run: how many blocks, chosen by the estimate for `auto`, and the swap itself."""

from __future__ import annotations

import torch
from torch import nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.memory.block_swap import swap_blocks
from finetrainers.memory.estimate import GIB, estimate_for
from finetrainers.memory.swap_plan import fewest_blocks
from finetrainers.models.spec import ModelSpec
from finetrainers.parallel.sharding import expected_split
from finetrainers.parallel.strategy import Strategy, Swap
from finetrainers.utils.process_state import free_memory

from .preflight import Preflight
from .start_report import print_line, print_warnings
from .trainable import network_without_weights

#: The estimate leaves out the CUDA context and fragmentation.
_HEADROOM = 1.15


def check_number_of_blocks(config: TrainConfig, spec: ModelSpec) -> None:
    """Refuse to swap more blocks than the network has.

    Raises:
        ConfigError: it has fewer.
    """
    number = config.memory.blocks_to_swap
    if not isinstance(number, int) or not number:
        return
    total = len(spec.block_modules(spec.transformer_on_meta()))
    if number > total:
        raise ConfigError(
            [Problem("--blocks_to_swap", f"{number} of {total} blocks: the network has no more; lower it")]
        )


def number_to_swap(checked: Preflight, spec: ModelSpec, parallel: Strategy) -> int:
    """How many blocks are swapped, the same on all ranks, which must all call it."""
    asked = checked.config.memory.blocks_to_swap
    return parallel.same_on_all(_fewest(checked, spec, parallel)) if asked == "auto" else asked


def block_swap(number: int, spec: ModelSpec, parallel: Strategy) -> Swap | None:
    """What swaps so many blocks of a network that is to be trained; None where all stay on the device."""
    if not number:
        return None

    def swap(network: nn.Module) -> dict[str, nn.Parameter]:
        blocks = spec.block_modules(network)
        swapped = swap_blocks(network, blocks, number, parallel.device)
        print_line(
            f"block swap: {number} of {len(blocks)} blocks wait in host memory ({swapped.host_bytes / GIB:.2f} GiB for each "
            f"process), and take {swapped.slot_bytes / GIB:.2f} GiB on the device"
            + (", which a CPU gains nothing by" if parallel.device.type == "cpu" else "")
        )
        return swapped.weights(network)

    return swap


def with_blocks_to_swap(config: TrainConfig, number: int) -> TrainConfig:
    """The configuration with so many swapped blocks."""
    return config.model_copy(update={"memory": config.memory.model_copy(update={"blocks_to_swap": number})})


def _fewest(checked: Preflight, spec: ModelSpec, parallel: Strategy) -> int:
    """The fewest blocks with which the estimate fits what is free on the device that has least, and the budget; 0 on a CPU."""
    if parallel.device.type != "cuda":
        return 0
    free_memory()
    free = min(parallel.gather_objects([torch.cuda.mem_get_info(parallel.device)[0] / GIB]))
    free = min(free, checked.config.memory.memory_budget or free)
    network = network_without_weights(checked)
    total = len(spec.block_modules(network))
    number = fewest_blocks(total, lambda n: _HEADROOM * estimated(checked, spec, network, n) <= free)
    if number is None:
        print_warnings(
            [
                f"--blocks_to_swap auto: with all {total} blocks swapped the estimate is "
                f"{estimated(checked, spec, network, total):.1f} GiB, and {free:.1f} GiB are free; see docs/how-to/memory.md"
            ]
        )
    return total if number is None else number


def estimated(checked: Preflight, spec: ModelSpec, network: nn.Module, number: int) -> float:
    """GiB that a process takes on the device with so many swapped blocks."""
    config = with_blocks_to_swap(checked.config, number)
    bucket, clips = checked.plan.heaviest(config)
    return estimate_for(
        config, checked.geometry, network, spec=spec, bucket=bucket, batch_size=clips,
        split=expected_split(config.parallel),
    ).total  # fmt: skip
