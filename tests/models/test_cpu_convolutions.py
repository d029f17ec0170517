"""On a CPU, a VAE's convolutions over frames are computed in fp32, whatever its dtype and autocast ask for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from every_family import FAMILIES
from torch import Tensor, nn

from finetrainers.config.sections import ModelSection
from finetrainers.models.registry import families


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "scope"),
    [
        ("bf16", nullcontext()),
        ("fp32", torch.autocast("cpu", torch.bfloat16)),
        ("bf16", torch.autocast("cpu", torch.bfloat16)),
    ],
    ids=["bf16", "autocast", "bf16-autocast"],
)
def test_16_bit_convolutions_compute_in_fp32(
    family: str, dtype: str, scope: AbstractContextManager[object], tiny_repo: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = ModelSection(
        model_name=family,
        pretrained_model_name_or_path=str(tiny_repo(family)),
        vae_dtype=dtype,  # type: ignore[arg-type]
    )
    vae = copy.deepcopy(families()[family].load(model).load_vae())
    computed: set[torch.dtype] = set()
    conv3d = nn.functional.conv3d

    def noted(x: Tensor, weight: Tensor, *rest: object, **named: object) -> Tensor:
        result = conv3d(x, weight, *rest, **named)
        computed.update((x.dtype, weight.dtype, result.dtype))
        return result

    monkeypatch.setattr(nn.functional, "conv3d", noted)
    given = vae.dtype if isinstance(scope, nullcontext) else torch.float32
    pixels = torch.rand(1, 3, 1, 32, 32).to(given)  # autocast takes fp32 with weights in 16 bits, too
    with torch.no_grad(), scope:
        vae.encode(pixels)
    assert computed == {torch.float32}
    convolution = next(module for module in vae.modules() if isinstance(module, nn.Conv3d))
    x = torch.rand(1, convolution.in_channels, 3, 8, 8).to(given)
    with torch.no_grad(), scope:
        fast = nn.Conv3d.forward(convolution, x)  # without the padding of a causal one
        slow = type(convolution)._conv_forward(convolution, x, convolution.weight, convolution.bias)
    assert fast.dtype == slow.dtype
    assert torch.allclose(fast.float(), slow.float(), rtol=2e-2, atol=2e-2)
