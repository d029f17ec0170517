"""What blocks store is a matter of memory and of computation, never of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES, deep_repo
from peft import LoraConfig
from refusals import refused
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from finetrainers.config.sections import ActivationMemory, ModelSection
from finetrainers.memory import activation_offload, checkpointing
from finetrainers.memory.activation_offload import ActivationOffload
from finetrainers.memory.activation_plan import select_evenly
from finetrainers.memory.checkpointing import is_attention, set_activation_memory
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelSpec, PromptEmbeds, VideoMeta


def conditions_of(spec: ModelSpec) -> PromptEmbeds:
    return spec.encode_text(spec.load_text_encoders(), ["a red ball", "a dog runs"])


class AttentionCalls(TorchDispatchMode):
    """Counts how often attention runs forward."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += is_attention(func)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Passes:
    """Gradients, how many tensors autograd held in between, and how often attention ran in forward and in backward."""

    gradients: list[torch.Tensor]
    held: int
    forward: int
    backward: int


def passes(
    spec: ModelSpec,
    conditions: PromptEmbeds,
    *,
    lora: bool = True,
    dropout: float = 0.0,
    stored: ActivationMemory = "none",
    share: float | None = None,
    again: bool = False,
) -> Passes:
    torch.manual_seed(0)
    network = spec.load_transformer(torch.float32)
    x, t = torch.randn(2, spec.latent_channels(network), 3, 4, 4), torch.tensor([300, 700])
    if spec.facts.is_flow:
        t = t / 1000
    if lora:
        network.requires_grad_(False)
        network.add_adapter(
            LoraConfig(
                r=4,
                lora_alpha=4,
                target_modules=[*spec.facts.lora_targets[:2]],
                init_lora_weights=False,
                lora_dropout=dropout,
            )
        )
    network.train()
    set_activation_memory(network, stored, blocks=select_evenly(spec.block_modules(network), share))
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.data_ptr())
        return tensor

    torch.manual_seed(3)
    for _ in range(2):  # gradients of two micro-batches are added up
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), AttentionCalls() as forward:
            prediction = spec.predict(network, x, t, conditions, VideoMeta(fps=torch.tensor([8.0, 8.0])))
            loss = prediction.square().mean()
        with AttentionCalls() as backward:
            loss.backward(retain_graph=again)
            if again:
                loss.backward()
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    return Passes(gradients, len(held), forward.number, backward.number)


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same(family: str, tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of the arena that are free hold NaN: what was offloaded is there until it is read, and then gone."""
    monkeypatch.setattr(activation_offload, "LAST", 1)
    offloads: list[ActivationOffload] = []
    monkeypatch.setattr(
        checkpointing, "ActivationOffload", lambda *a, **k: offloads.append(ActivationOffload(*a, **k)) or offloads[-1]
    )
    options = {f"text_encoder{end}_dtype": "fp32" for end in ("", "_2")}
    section = ModelSection(
        model_name=family, pretrained_model_name_or_path=str(deep_repo(tiny_repo, family, layers=4)), **options
    )
    spec = get_family(family).load(section)
    conditions = conditions_of(spec)
    for lora, dropout in ((False, 0.0), (True, 0.3)):
        case = {"lora": lora, "dropout": dropout}
        plain = passes(spec, conditions, **case)
        checkpointed = passes(spec, conditions, stored="checkpoint", **case)
        kept = passes(spec, conditions, stored="keep_attention", **case)
        offloaded = passes(spec, conditions, stored="offload", **case)
        half = passes(spec, conditions, stored="keep_attention", share=0.5, **case)
        if lora and not dropout:
            twice = passes(spec, conditions, stored="keep_attention", again=True, **case)
            for one, both in zip(kept.gradients, twice.gradients, strict=True):
                torch.testing.assert_close(both, 2 * one)
        assert checkpointed.held == kept.held < plain.held / 2
        assert kept.held < half.held < plain.held
        assert plain.backward == kept.backward == offloaded.backward == half.backward == 0
        # Attention of blocks runs again, that of a text refiner outside of them does not.
        assert 0 < checkpointed.backward <= checkpointed.forward == kept.forward
        assert len(plain.gradients) > 0
        assert offloads[-1].arena.peak > offloads[-1].arena.used == 0
        for other in (checkpointed, kept, offloaded, half):
            assert len(plain.gradients) == len(other.gradients)
            for a, b in zip(plain.gradients, other.gradients, strict=True):
                assert torch.equal(a, b)


def test_off_again(tiny_repo: Callable[..., Path]) -> None:
    section = ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(tiny_repo("ltx_video")))
    network = get_family("ltx_video").load(section).transformer_on_meta()
    set_activation_memory(network, "checkpoint")
    assert network.is_gradient_checkpointing
    set_activation_memory(network, "none")
    assert not network.is_gradient_checkpointing


def test_what_cannot_work_is_refused(tiny_repo: Callable[..., Path]) -> None:
    with refused("unsupported", "Linear ", "activation_memory none"):
        set_activation_memory(nn.Linear(2, 2), "checkpoint")
    section = ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(tiny_repo("ltx_video")))
    spec = get_family("ltx_video").load(section)
    conditions = conditions_of(spec)
    with (
        sdpa_kernel(SDPBackend.MATH),
        refused("unsupported", "activation_memory keep_attention", "LTXVideoTransformerBlock"),
    ):
        passes(spec, conditions, stored="keep_attention")


class Operator(str):
    """An operator that has a name only."""

    def name(self) -> str:
        return str(self)


def test_attention_operators_of_every_kernel() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::") and "." not in n]
    found = {name for name in names if is_attention(Operator(name))}
    assert {f"aten::_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")} <= found
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in found
    assert not any("backward" in name for name in found)
    assert "aten::scaled_dot_product_attention" not in found  # it runs one of the others
    for name in ("flash_attn::_flash_attn_varlen_forward", "_diffusers_flash_attn_3::_flash_attn_forward"):
        assert is_attention(Operator(name))
