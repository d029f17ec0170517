"""The kernels of ring attention on a GPU: two parts of the keys, merged, as attention to all of them."""

from __future__ import annotations

import pytest
import torch

from finetrainers.models.split import ring

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "masked"), [("bfloat16", False), ("bfloat16", True), ("float32", True)])
def test_parts_of_the_keys_are_merged(dtype: str, masked: bool) -> None:
    """By flash attention, and by memory-efficient attention with a mask or in fp32; 45 and 77 are no multiples of
    anything."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(2, 3, length, 64, generator=generator).cuda().double() for length in (77, 122, 122, 77)]
    mask = torch.ones(2, 1, 1, 45, dtype=torch.bool, device="cuda")
    mask[1, ..., 40:] = not masked
    whole = torch.cat([mask, torch.ones(2, 1, 1, 77, dtype=torch.bool, device="cuda")], dim=-1)
    inputs = [one.clone().requires_grad_() for one in exact[:3]]
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=whole)
    gradients = torch.autograd.grad(expected, inputs, exact[3])

    query, key, value, upstream = (one.to(getattr(torch, dtype)) for one in exact)
    parts = [(slice(0, 45), mask if masked else None), (slice(45, 122), None)]
    (out, lse), (more, more_lse) = (ring._attend(query, key[:, :, at], value[:, :, at], given) for at, given in parts)
    total = torch.logaddexp(lse, more_lse)
    out = out * (lse - total).exp()[..., None] + more * (more_lse - total).exp()[..., None]
    out = out.to(query.dtype)
    found = [ring._gradients(upstream, query, key[:, :, at], value[:, :, at], given, out, total) for at, given in parts]
    both = [found[0][0] + found[1][0], *(torch.cat(pair, dim=2) for pair in list(zip(*found, strict=True))[1:])]
    for one, other in zip((out, *both), (expected, *gradients), strict=True):
        assert (one - other).norm() / other.norm() < (1e-2 if dtype == "bfloat16" else 1e-5)
