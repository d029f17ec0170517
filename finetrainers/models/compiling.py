"""Regional compilation: torch.compile of each repeated block, in place.

All blocks of a class share a graph for each size; the first of a list may need another, since it is given views, and in
LoRA training inputs without a gradient.

diffusers' `compile_repeated_blocks` is not used: CogVideoX names no blocks for it, and HunyuanVideo the text refiner as
well, whose text has another length with every prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

#: Compiler of the graphs.
BACKEND = "inductor"
#: Graphs of equal blocks at one size: training, evaluation, sampling, the reference of a LoRA. The first block may need
#: another of each.
_GRAPHS_PER_SIZE = 4


def compile_blocks(blocks: Sequence[nn.Module], *, num_sizes: int = 1, text_varies: bool = False) -> None:
    """Compile blocks in place, at their first call with each size; names of weights stay as they are.

    Within gradient checkpointing, a block's compiled forward pass runs again in backward.

    Args:
        blocks: blocks of the network, in any number of classes.
        num_sizes: number of clip sizes that they will see; beyond torch's limit for them, blocks would run uncompiled.
        text_varies: whether the length of the text is the prompt's. From the second length on, one graph takes all.
    """
    from torch._dynamo import config

    # Blocks of one class may differ, as the last one of Mochi, which does not update the text.
    structures = {(type(block), *(name for name, _ in block.named_parameters())) for block in blocks}
    kinds = max(Counter(structure[0] for structure in structures).values(), default=1)
    limit = _GRAPHS_PER_SIZE * (kinds + 1) * max(1, num_sizes)
    config.recompile_limit = max(config.recompile_limit, limit)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit * len({*map(type, blocks)}))
    for block in blocks:
        block.compile(backend=BACKEND, dynamic=None if text_varies else False)


def unwrap(module: nn.Module) -> Any:
    """Return the network below DDP, DeepSpeed or compile wrappers, for reading its config."""
    while True:
        if "_orig_mod" in module._modules:  # `hasattr` takes long on diffusers' networks, which forward attributes
            module = module._orig_mod  # type: ignore[assignment]
        elif (not hasattr(module, "config") and hasattr(module, "module")) or type(module).__name__ in (
            "DistributedDataParallel",
            "DeepSpeedEngine",
        ):
            module = module.module  # type: ignore[assignment]
        else:
            return module
