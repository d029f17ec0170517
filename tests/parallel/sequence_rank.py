"""One of two or four ranks: compares networks whose calls are shared by all ranks with whole ones, or trains as
`rank.py` does.

Usage: sequence_rank.py JOBS OUT, as of `rank.py`. A job with `_case`, which names one of `CASES`, has its arguments
instead of a run's options; found are largest differences of predictions, of losses and of gradients (relative to all of
them).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import rank
import torch
import torch.distributed as dist
from every_family import CHECKPOINTS
from peft import LoraConfig
from random_predictions import predict, spec_of
from refusals import problems
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters

from finetrainers.config.errors import ConfigError
from finetrainers.config.parallel import SpMode
from finetrainers.memory.checkpointing import set_activation_memory
from finetrainers.models import compiling
from finetrainers.models.batch import even_bounds
from finetrainers.models.split.ring import ring_attention

Pair = tuple[nn.Module, nn.Module]
#: The versions of the families' tiny models that more is compared of.
FIRST_VERSIONS = {family: (family, version) for family, version in reversed(CHECKPOINTS)}.values()


def differences(spec: Any, pair: Pair, group: Any, *calls: dict[str, Any]) -> tuple[float, float, float]:
    """Of a network that each process calls alone and one whose calls are shared; gradients are means over the group.

    Args:
        spec: of the model.
        pair: both networks.
        group: the processes that share the second one's calls.
        calls: arguments of `predict`; the loss is of all of them together.
    """
    found = []
    for network in pair:
        network.zero_grad()
        torch.manual_seed(0)  # of dropout
        predictions = [predict(spec, network, **call) for call in calls]
        loss = torch.stack([one.square().mean() for one in predictions]).sum()
        loss.backward()
        gradients = torch.cat([_gradient(p) for p in network.parameters() if p.requires_grad])
        if network is pair[1]:
            dist.all_reduce(gradients, group=group)
            gradients /= dist.get_world_size(group)
        found.append((torch.cat([one.detach().flatten() for one in predictions]), loss.detach(), gradients))
    (out, loss, gradients), (other_out, other_loss, others) = found
    relative = (gradients - others).norm() / gradients.norm()
    return (out - other_out).abs().max().item(), (loss - other_loss).abs().item(), relative.item()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten().clone()


def networks(spec: Any, group: Any, *, adapted: str | None = None, mode: SpMode = "ulysses") -> Pair:
    """Return equal networks, the second shared by a group; `adapted`: expression of a LoRA's targets, with dropout."""
    made = []
    for shared in (False, True):
        network = spec.load_transformer(torch.float32)
        if adapted:
            torch.manual_seed(0)  # of weights that are not zero
            lora = LoraConfig(target_modules=adapted, init_lora_weights=False, lora_dropout=0.3)
            network.requires_grad_(False).add_adapter(lora)
            network.train()
        if shared:
            spec.split_tokens(network, group, mode)
        made.append(network)
    return made[0], made[1]


@contextmanager
def compiling_allowed() -> Iterator[None]:
    """Compile within the block, without code generation."""
    patches = (patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"), patch.object(compiling, "BACKEND", "aot_eager"))
    with patches[0], patches[1], dynamo.patch(disable=False):
        yield


@contextmanager
def compiled(spec: Any, network: nn.Module) -> Iterator[None]:
    """Compile the blocks of a network within the block."""
    with compiling_allowed():
        spec.compile_blocks(network)
        yield


def models_cases(model: str, repository: str) -> dict[str, Any]:
    """The cases of one model, shared by exchanges of heads."""
    family, _, version = model.partition(" ")
    spec, group = spec_of(Path(repository), family, "auto"), dist.group.WORLD
    odd, pair = odd_size(spec), networks(spec, group)
    found: dict[str, Any] = {"plain": differences(spec, pair, group, {}, {"batch": 2})}
    if spec.facts.geometry.sides is None:  # else positions are learned for one size
        found["odd"] = differences(spec, pair, group, odd, {"batch": 2, **odd})
    if has_times_per_frame(spec):
        odd = {"batch": 2, "times_per_frame": True, **odd}
        found["noise levels per frame"] = differences(spec, pair, group, odd)
    if (family, version or None) in FIRST_VERSIONS:
        layers = [one for one, module in pair[0].named_modules() if isinstance(module, nn.Linear | nn.Conv3d)]
        layers = [name for name in layers if not re.search(spec.facts.unused or "$^", name)]
        adapted = networks(spec, group, adapted="|".join(layers))
        set_activation_memory(adapted[1], "checkpoint")  # which drops the same places again
        found["dropout"] = differences(spec, adapted, group, {**odd, "batch": 2})
        if spec.text_varies:  # one family is enough
            found |= two_sizes(spec, pair, group, ({}, {"batch": 2, **odd}))
    return found


def has_times_per_frame(spec: Any) -> bool:
    """Whether the network takes a noise level for each latent frame."""
    return spec.facts.first_frame == "tokens" and spec.facts.any_frame


def odd_size(spec: Any) -> dict[str, Any]:
    """A size whose tokens do not divide."""
    side = 3 * spec.facts.geometry.size_multiple
    return {"size": (side, side), "frames": 17}


def compiled_case(repository: str) -> dict[str, Any]:
    spec, group = spec_of(Path(repository), "ltx_video", "auto"), dist.group.WORLD
    pair = networks(spec, group)
    with compiled(spec, pair[1]):
        different = differences(spec, pair, group, {"batch": 2})
    return {"different": different, "graph breaks": len(counters["graph_break"])}


def two_sizes(spec: Any, pair: Pair, group: Any, sizes: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The second size is computed before blocks of the first one are recomputed in backward."""
    found: dict[str, Any] = {}
    for setting in ("checkpoint", "keep_attention", "offload"):
        for network in pair:
            set_activation_memory(network, setting, blocks=spec.block_modules(network))
        found[f"two sizes, {setting}"] = differences(spec, pair, group, *sizes)
    with torch.autocast("cpu", torch.bfloat16):
        found["bf16"] = differences(spec, pair, group, *sizes)
    return found


def refused(repository: str) -> dict[str, Any]:
    """Two heads do not divide by four processes."""
    try:
        networks(spec_of(Path(repository), "hunyuan_video", "auto"), dist.group.WORLD)
    except ConfigError as error:
        return {"error": str(error), "problems": problems(error)}
    return {"error": None}


def ring_cases(model: str, repository: str) -> dict[str, Any]:
    """Of a family's network by ring attention; HunyuanVideo's heads do not divide by four."""
    family, _, version = model.partition(" ")
    spec, group = spec_of(Path(repository), family, "auto"), dist.group.WORLD
    odd = odd_size(spec)
    if has_times_per_frame(spec):
        odd = {"batch": 2, "times_per_frame": True, **odd}  # whose noise levels are split as well
    found, pair = {}, networks(spec, group, mode="ring")
    if version == "1.5":
        found["four processes, no ring"] = differences(spec, networks(spec, group), group, odd)
    for setting in ("none", "checkpoint", "keep_attention", "offload"):
        for network in pair:
            set_activation_memory(network, setting, blocks=spec.block_modules(network))
        found[setting] = differences(spec, pair, group, odd, {**odd, "batch": 2})
    with torch.autocast("cpu", torch.bfloat16):
        found["bf16"] = differences(spec, pair, group, odd)
    return found


def attended(*parts: Tensor, **options: Any) -> Tensor:
    """Ring attention of three heads, side by side as in a block: `[B, S, 30]`."""
    query, key, value = (one.unflatten(2, (3, -1)) for one in parts)
    return ring_attention(query, key, value, **options).flatten(2)


def exact_ring(before: int, tokens: int, after: int, *, masked: bool, compiled: bool = False) -> float:
    """Return the largest difference of ring attention in float64 from attention to all tokens, with gradients.

    Args:
        before: tokens of the text in front of those of the clip.
        tokens: of the clip.
        after: tokens of the text behind it.
        masked: whether some of these are padding.
        compiled: whether the first processes compile it.
    """
    generator, bounds = torch.Generator().manual_seed(0), even_bounds(tokens, dist.get_world_size())
    whole = before + tokens + after
    query, key, value, upstream = torch.randn(4, 2, whole, 3, 10, generator=generator, dtype=torch.float64).unbind()
    mask = torch.ones(2, 1, 1, whole, dtype=torch.bool)
    mask[1, ..., whole - 2 :] = not masked
    start, end = bounds[dist.get_rank()]
    text = [*range(before), *range(before + tokens, whole)]
    own = [*range(before), *range(before + start, before + end), *range(before + tokens, whole)]
    inputs = [one.clone().requires_grad_() for one in (query, key, value)]
    heads_first = (one.transpose(1, 2) for one in inputs)
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)
    gradients = torch.autograd.grad(out, inputs, upstream)
    parts = [one[:, own].flatten(2).requires_grad_() for one in (query, key, value)]
    attend: Any = attended
    if compiled and dist.get_rank() < 2:
        attend = torch.compile(attended, backend="aot_eager", fullgraph=True)
    shares = [last - first for first, last in bounds]
    group = dist.group.WORLD.group_name
    mask_of_part = mask[..., own] if masked else None
    part = attend(*parts, mask=mask_of_part, before=before, shares=shares, rank=dist.get_rank(), group=group)
    part = part.unflatten(2, (3, 10))
    upstream[:, text] /= len(shares)  # every process has these
    different = [part - out[:, own]]
    for one, expected in zip(torch.autograd.grad(part, parts, upstream[:, own]), gradients, strict=True):
        total = torch.zeros_like(expected)
        total[:, own] = one.unflatten(2, (3, 10))
        dist.all_reduce(total)
        different.append(total - expected)
    return max(one.abs().max().item() for one in different)


def exact_rings() -> dict[str, Any]:
    different = [
        exact_ring(5, 9, 0, masked=False),
        exact_ring(0, 14, 7, masked=True),
        exact_ring(0, 4, 0, masked=False),
    ]
    return {"different": different}


def exact_compiled_ring() -> dict[str, Any]:
    with compiling_allowed():
        return {"different": [exact_ring(3, 14, 7, masked=True, compiled=True)]}


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "model": models_cases, "compiled": compiled_case, "refused": refused, "ring": ring_cases, "exact": exact_rings,
    "exact, compiled": exact_compiled_ring,
}  # fmt: skip


def case_or_run(job: dict[str, Any], train: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """A case if the job names one, else a run."""
    return CASES[job.pop("_case")](**job) if "_case" in job else train(job)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank.main(Path(sys.argv[1]), Path(sys.argv[2]), case_or_run)
