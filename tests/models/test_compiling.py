"""Compiled blocks: results equal to those of plain ones, one graph for each class and size, and no graph break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES, deep_repo
from random_predictions import predict, spec_of
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from finetrainers.config.load import load_config
from finetrainers.memory.checkpointing import set_activation_memory
from finetrainers.models import compiling
from finetrainers.plan.trainable import make_trainable

pytestmark = pytest.mark.usefixtures("traced")


def calls_of(spec: Any) -> list[dict[str, Any]]:
    """Arguments of predictions of different sizes; from the second length of a text on, one graph takes all."""
    return [{"text": 7}, {"text": 9}, {"text": 12}] if spec.text_varies else [{}, {"batch": 2}]


def inputs_of_blocks(spec: Any, network: Any, calls: list[dict[str, Any]]) -> set[Any]:
    """What distinguishes the inputs of blocks for the compiler: class and weights of block, shapes, gradients.

    The first block is given inputs without a gradient, or of another layout, in some families, and has a graph of its
    own. From the second length of a text on, lengths are symbols, and those of a view are its base's.
    """
    inputs: set[Any] = set()
    length: int | None = None

    def record(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        kind = (type(block), *(name for name, _ in block.named_parameters()))
        is_symbol = [x._is_view() and length in x.shape for x in tensors]
        inputs.add((kind, *((x.shape, x.stride(), x.requires_grad) for x in tensors), *is_symbol))

    handles = [b.register_forward_pre_hook(record, with_kwargs=True) for b in spec.block_modules(network)]
    for number, call in enumerate(calls):
        length = call.get("text") if number else None
        predict(spec, network, **call)
    for handle in handles:
        handle.remove()
    return inputs


def steps(spec: Any, network: Any, calls: list[dict[str, Any]], dtype: torch.dtype | None) -> list[Tensor]:
    """Outputs of the calls, and the sums of their gradients."""
    outputs = []
    for call in calls:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs.append(predict(spec, network, **call))
        outputs[-1].float().square().mean().backward()
    return [*(out.detach() for out in outputs), *(p.grad for p in network.parameters() if p.grad is not None)]


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_one_graph_each_and_compute_the_same(family: str, tiny_repo: Callable[..., Path]) -> None:
    """Full finetuning with gradient checkpointing: outputs and gradients bit for bit."""
    repo, found = deep_repo(tiny_repo, family, layers=4), []
    for compiled in (False, True):
        spec = spec_of(repo, family, "auto")
        calls, network = calls_of(spec), spec.load_transformer(torch.float32).train()
        inputs = inputs_of_blocks(spec, network, calls[:2])
        set_activation_memory(network, "checkpoint")
        if compiled:
            spec.compile_blocks(network, num_sizes=len(calls))
        found.append(steps(spec, network, calls, None))
    assert not any("_orig_mod" in name for name in network.state_dict())
    assert all(torch.equal(plain, compiled) for plain, compiled in zip(*found, strict=True))
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == len(inputs)


@pytest.mark.rotating
def test_the_first_block_of_a_lora_has_a_graph_of_its_own(
    tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input needs no gradient. PEFT's layers and a chosen attention backend are in the graph, and its backward."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    repo, found = tiny_repo("ltx_video"), []
    config = load_config(model_name="ltx_video", pretrained_model_name_or_path=str(repo), data_root=str(repo))
    for compiled in (False, True):
        spec = spec_of(repo, "ltx_video", "native")
        network: Any = spec.load_transformer(torch.float32).train()
        make_trainable(network, config.training)
        if compiled:
            spec.compile_blocks(network)
        found.append(steps(spec, network, [{}], torch.bfloat16))
    assert all(torch.equal(plain, compiled) for plain, compiled in zip(*found, strict=True))
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (2, {})


class Block(nn.Module):
    """Two layers that would be in different buckets of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_every_size_is_compiled_beyond_the_limit_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []
    monkeypatch.setattr(compiling, "BACKEND", lambda graph, _: graphs.append(graph) or graph.forward)
    sizes = range(2, 4 + dynamo.recompile_limit)
    blocks = nn.ModuleList(Block() for _ in range(2))
    compiling.compile_blocks([*blocks], num_sizes=len(sizes))
    for size in sizes:
        for block in blocks:
            block(torch.ones(size, 64))
    assert len(graphs) == len(sizes)  # both blocks share them
