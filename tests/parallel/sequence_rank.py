"""One of four ranks: compares networks whose calls are shared by groups with whole ones, then trains as `rank.py` does.

Usage: sequence_rank.py REPOSITORIES jobs.json OUT, with the folders of tiny models by family and version. Rank 0 writes
`cases.json`: of each case the largest difference of predictions, of losses and of gradients (relative to all of them).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import rank
import torch
import torch.distributed as dist
from peft import LoraConfig
from random_predictions import predict, spec_of
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


def cases(repositories: dict[str, str], group: Any) -> dict[str, Any]:
    """Compute `cases.json`: each group of two computes half of the models' cases, and all four processes the others."""
    found: dict[str, Any] = {}
    for number, (name, repository) in enumerate(repositories.items()):
        family, _, version = name.partition(" ")
        spec = spec_of(Path(repository), family, "auto")
        odd: dict[str, Any] = {"size": (96, 96) if family == "ltx_video" else (48, 80), "frames": 17}
        if number % 2 == dist.get_rank() // 2:
            found |= group_cases(name, spec, odd, group)
        if family == "ltx_video":
            odd = {"batch": 2, "times_per_frame": True, **odd}  # whose noise levels are split as well
        if version == "1.5":
            found["four processes"] = differences(spec, networks(spec, dist.group.WORLD), dist.group.WORLD, odd)
        if version in ("", "t2v", "1.5"):
            found |= {f"{name}, {case}": one for case, one in ring_cases(spec, odd).items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return {**every[2], **every[0]}


def group_cases(name: str, spec: Any, odd: dict[str, Any], group: Any) -> dict[str, Any]:
    """The cases of one model by a group of two, by exchanges of heads; `odd`: a size that does not divide."""
    family, _, version = name.partition(" ")
    pair = networks(spec, group)
    found: dict[str, Any] = {name: differences(spec, pair, group, {}, {"batch": 2})}
    if name != "cogvideox i2v":  # whose positions are learned for one size
        found[f"{name}, odd"] = differences(spec, pair, group, odd, {"batch": 2, **odd})
    if family == "ltx_video":
        odd = {"batch": 2, "times_per_frame": True, **odd}
        found["noise levels per frame"] = differences(spec, pair, group, odd)
    if version in ("", "t2v", "1.5"):
        layers = [one for one, module in pair[0].named_modules() if isinstance(module, nn.Linear | nn.Conv3d)]
        adapted = networks(spec, group, adapted="|".join(layers))
        set_activation_memory(adapted[1], "checkpoint")  # which drops the same places again
        found[f"{name}, dropout of a LoRA of every layer"] = differences(spec, adapted, group, {**odd, "batch": 2})
    if family == "ltx_video":
        with compiled(spec, pair[1]):
            found["compiled"] = differences(spec, pair, group, {"batch": 2})
            found["graph breaks"] = (float(len(counters["graph_break"])),)
    if version == "t2v":
        found |= t2v_cases(spec, pair, group, ({}, {"batch": 2, **odd}))
    return found


def t2v_cases(spec: Any, pair: Pair, group: Any, sizes: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The second size is computed before blocks of the first one are recomputed in backward."""
    found: dict[str, Any] = {}
    for setting in ("checkpoint", "keep_attention", "offload"):
        for network in pair:
            set_activation_memory(network, setting, blocks=spec.block_modules(network))
        found[f"two sizes, {setting}"] = differences(spec, pair, group, *sizes)
    with torch.autocast("cpu", torch.bfloat16):
        found["bf16"] = differences(spec, pair, group, *sizes)
    try:
        networks(spec, dist.group.WORLD)
    except ConfigError as error:
        found["refused"] = str(error)
    return found


def ring_cases(spec: Any, odd: dict[str, Any]) -> dict[str, Any]:
    """Of a family's network by ring attention, on four processes; HunyuanVideo's heads do not divide by four."""
    found, pair = {}, networks(spec, dist.group.WORLD, mode="ring")
    for setting in ("none", "checkpoint", "keep_attention", "offload"):
        for network in pair:
            set_activation_memory(network, setting, blocks=spec.block_modules(network))
        found[f"ring, {setting}"] = differences(spec, pair, dist.group.WORLD, odd, {**odd, "batch": 2})
    with torch.autocast("cpu", torch.bfloat16):
        found["ring, bf16"] = differences(spec, pair, dist.group.WORLD, odd)
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    repositories, jobs, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    found = cases(json.loads(repositories), dist.new_subgroups(2)[0])
    found["float64"] = [
        exact_ring(5, 9, 0, masked=False),
        exact_ring(0, 14, 7, masked=True),
        exact_ring(0, 4, 0, masked=False),
    ]
    with compiling_allowed():
        found["float64"].append(exact_ring(3, 14, 7, masked=True, compiled=True))
    if dist.get_rank() == 0:
        (out / "cases.json").write_text(json.dumps(found))
    rank.main(jobs, out)
