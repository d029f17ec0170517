"""Checkpointing changes what is kept, never a gradient."""

from __future__ import annotations

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel, HunyuanVideoTransformer3DModel, LTXVideoTransformer3DModel
from peft import LoraConfig
from torch import nn

from finetrainers.memory.checkpointing import set_gradient_checkpointing

Inputs = dict[str, object]


def ltx() -> tuple[nn.Module, Inputs]:
    network = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=3, caption_channels=16,
    )  # fmt: skip
    return network, {
        "hidden_states": torch.randn(2, 12, 8), "encoder_hidden_states": torch.randn(2, 5, 16),
        "timestep": torch.tensor([300.0, 700.0]), "encoder_attention_mask": torch.ones(2, 5),
        "num_frames": 3, "height": 2, "width": 2, "rope_interpolation_scale": (1 / 3, 32, 32),
    }  # fmt: skip


def hunyuan() -> tuple[nn.Module, Inputs]:
    network = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_single_layers=2, num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return network, {
        "hidden_states": torch.randn(2, 4, 2, 4, 4), "timestep": torch.tensor([300, 700]),
        "encoder_hidden_states": torch.randn(2, 5, 16), "encoder_attention_mask": torch.ones(2, 5),
        "pooled_projections": torch.randn(2, 8), "guidance": torch.tensor([1000.0, 1000.0]),
    }  # fmt: skip


def cogvideox() -> tuple[nn.Module, Inputs]:
    network = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=3, in_channels=4, out_channels=4, text_embed_dim=16,
        time_embed_dim=8, sample_width=4, sample_height=4, sample_frames=9, max_text_seq_length=5,
    )  # fmt: skip
    return network, {
        "hidden_states": torch.randn(2, 3, 4, 4, 4), "encoder_hidden_states": torch.randn(2, 5, 16),
        "timestep": torch.tensor([300, 700]),
    }  # fmt: skip


def passes(build, *, lora: bool, dropout: float, enabled: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients, and how many tensors autograd held between forward and backward."""
    torch.manual_seed(0)
    network, inputs = build()
    if lora:
        network.requires_grad_(False)
        network.add_adapter(
            LoraConfig(
                r=4, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False, lora_dropout=dropout
            )
        )
    network.train()
    set_gradient_checkpointing(network, enabled=enabled)
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.data_ptr())
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = network(**inputs, return_dict=False)[0].square().mean()
    weights = [p for p in network.parameters() if p.requires_grad]
    return [g for g in torch.autograd.grad(loss, weights, allow_unused=True) if g is not None], len(held)


@pytest.mark.parametrize("build", [ltx, hunyuan, cogvideox])
@pytest.mark.parametrize(("lora", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.3)])
def test_gradients_are_the_same(build, lora: bool, dropout: float) -> None:
    plain, held_plain = passes(build, lora=lora, dropout=dropout, enabled=False)
    checkpointed, held = passes(build, lora=lora, dropout=dropout, enabled=True)
    assert held < held_plain / 2
    assert len(plain) == len(checkpointed) > 0
    for a, b in zip(plain, checkpointed, strict=True):
        assert torch.equal(a, b)


def test_off_again() -> None:
    network, _ = ltx()
    set_gradient_checkpointing(network, enabled=True)
    assert network.is_gradient_checkpointing
    set_gradient_checkpointing(network, enabled=False)
    assert not network.is_gradient_checkpointing


def test_unsupported_network() -> None:
    with pytest.raises(ValueError, match="Linear does not support gradient checkpointing"):
        set_gradient_checkpointing(nn.Linear(2, 2), enabled=True)
