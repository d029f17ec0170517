"""A small network with an adapter, and its output and gradients, for tests of how frozen weights are stored."""

from __future__ import annotations

import torch
from diffusers import LTXVideoTransformer3DModel
from peft import LoraConfig
from torch import nn


def transformer(dtype: torch.dtype, *, adapter: bool = True) -> nn.Module:
    torch.manual_seed(0)
    network = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=16,
    ).to(dtype)  # fmt: skip
    if adapter:
        network.requires_grad_(False)
        network.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        for name, parameter in network.named_parameters():
            if "lora_B" in name:  # PEFT starts it at zero, which would leave the other factor without gradient
                nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(1))
    return network


def run(network: nn.Module, dtype: torch.dtype, *, autocast: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and the adapter's gradients."""
    generator = torch.Generator().manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = network(
            hidden_states=torch.randn(2, 12, 8, generator=generator).to(dtype),
            encoder_hidden_states=torch.randn(2, 5, 16, generator=generator).to(dtype),
            timestep=torch.tensor([300.0, 700.0]), encoder_attention_mask=torch.ones(2, 5),
            num_frames=3, height=2, width=2, rope_interpolation_scale=(1 / 3, 32, 32), return_dict=False,
        )[0]  # fmt: skip
    loss = output.float().square().mean()
    return output.detach().float(), list(
        torch.autograd.grad(loss, [p for p in network.parameters() if p.requires_grad])
    )


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    difference = torch.cat([(a - b).flatten().float() for a, b in zip(found, wanted, strict=True)])
    return (difference.norm() / torch.cat([b.flatten().float() for b in wanted]).norm()).item()
