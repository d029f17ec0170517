"""Block swap of a run: how many blocks, chosen by the estimate for `auto`, and the swap itself."""

from __future__ import annotations

from torch import nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.memory.block_swap import swap_blocks
from finetrainers.memory.estimate import GIB
from finetrainers.models.spec import ModelSpec
from finetrainers.parallel.strategy import Strategy, Swap

from .start_report import print_line


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
        message = f"{number} of {total} blocks: must be at most {total}; lower it"
        raise ConfigError([Problem("--blocks_to_swap", message, "too_large")])


def block_swap(number: int, spec: ModelSpec, parallel: Strategy) -> Swap | None:
    """Return a function that swaps `number` blocks of a network to be trained, or None if all stay on the device."""
    if not number:
        return None
    remark = ", which saves nothing on a CPU" if parallel.device.type == "cpu" else ""

    def swap(network: nn.Module) -> dict[str, nn.Parameter]:
        blocks = spec.block_modules(network)
        swapped = swap_blocks(network, blocks, number, parallel.device)
        print_line(
            f"block swap: {number} of {len(blocks)} blocks are in host memory ({swapped.host_bytes / GIB:.2f} GiB "
            f"for each process), and take {swapped.slot_bytes / GIB:.2f} GiB on the device{remark}"
        )
        return swapped.weights(network)

    return swap
