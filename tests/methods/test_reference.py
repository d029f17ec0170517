"""The policy before training: the network without its LoRA, or a frozen copy of all weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from one_of import OneOf
from policies import Adapted, Network, network
from torch import nn

from finetrainers.methods.reference import reference_model


def parts(model: nn.Module, training_type: str, **changes: Any) -> Any:
    memory = SimpleNamespace(compile="regional")
    parallel = SimpleNamespace(sp_mode="ring")
    config = SimpleNamespace(training=SimpleNamespace(training_type=training_type), memory=memory, parallel=parallel)
    return SimpleNamespace(config=config, network=model, initial_lora=None, **changes)


def test_a_lora_is_switched_off_meanwhile() -> None:
    model = network(cls=Adapted)
    x = torch.randn(1, 4, 2, 4, 4), torch.ones(1), torch.zeros(1, 8)
    adapted = model(*x)
    with reference_model(parts(model, "lora"))(model) as found:
        assert found is model
        assert not torch.equal(found(*x), adapted)
    assert torch.equal(model(*x), adapted)


def test_the_frozen_copy_is_loaded_as_the_network_was() -> None:
    """It is loaded in the dtype of its weights, and compiled like the network.

    The first weight may have another dtype: some networks keep a few in fp32.
    """
    model: Network = network().bfloat16()
    model.inward.float()
    asked = []

    def load(dtype: torch.dtype) -> nn.Module:
        asked.append(dtype)
        return network().to(dtype)

    class Processes(OneOf):
        def autocast(self) -> torch.autocast:
            return torch.autocast("cpu", enabled=False)

        def prepare_frozen(self, load: Any, *, weights: torch.dtype, blocks: Any) -> nn.Module:
            assert (weights, blocks) == (torch.bfloat16, ("blocks",))
            return load()

    compiled: list[nn.Module] = []
    shared: list[Any] = []
    spec = SimpleNamespace(
        load_transformer=load,
        blocks=("blocks",),
        compile_blocks=compiled.append,
        split_tokens=lambda copy, group, mode: shared.append((copy, group, mode)),
    )
    given = parts(model, "full-finetune", spec=spec, parallel=Processes(), weights_dtype=torch.bfloat16)
    with reference_model(given)(model) as frozen:
        assert frozen is not model
        assert compiled == [frozen]
        assert shared == [(frozen, None, "ring")]
        assert not torch.is_grad_enabled()
    assert asked == [torch.bfloat16]
