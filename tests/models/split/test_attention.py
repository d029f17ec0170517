"""Attention backends: the families' processors against diffusers' own, and which calls a backend gets."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from every_family import CHECKPOINTS
from random_predictions import predict, spec_of
from refusals import refused_options
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from finetrainers.config.attention import AUTO, BACKENDS, AttnBackendName
from finetrainers.models.split.attention import AttentionFn, check_backend, set_processors
from finetrainers.models.split.sequence import SequenceParallelPlan, split_tokens
from finetrainers.utils.failures import Kind

NAMES = ["-".join(filter(None, one)) for one in CHECKPOINTS]


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "version"), CHECKPOINTS, ids=NAMES)
def test_native_is_the_default_bit_for_bit(family: str, version: str | None, tiny_repo: Callable[..., Path]) -> None:
    """Outputs and every gradient, for one clip and for two, of different weights than at a start."""
    repo, found = tiny_repo(family, version), {}
    for backend in (AUTO, "native", "_native_math"):
        spec = spec_of(repo, family, backend)
        network = spec.load_transformer(torch.float32)
        for batch in (1, 2):
            network.zero_grad()
            out = predict(spec, network, batch=batch)
            out.square().sum().backward()
            gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
            found[backend, batch] = {"out": out.detach(), **gradients}
    for batch in (1, 2):
        auto, native, math = (found[backend, batch] for backend in (AUTO, "native", "_native_math"))
        assert auto.keys() == native.keys() == math.keys()
        assert all(torch.equal(auto[name], native[name]) for name in auto)
        for name in auto:
            torch.testing.assert_close(math[name], auto[name], rtol=1e-3, atol=1e-3)
    assert _AttentionBackendRegistry._active_backend == AttentionBackendName.NATIVE


class Kernels:
    """Stand-ins for the functions of flash-attn, by PyTorch's attention: what they are called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def dense(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        self.calls.append({"dtypes": {q.dtype, k.dtype, v.dtype}, "shape": tuple(q.shape), **settings})
        return F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v))).transpose(1, 2)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **settings: Any):
        ends = [bounds[1:].tolist() for bounds in (cu_seqlens_q, cu_seqlens_k)]
        starts = [bounds[:-1].tolist() for bounds in (cu_seqlens_q, cu_seqlens_k)]
        queries, keys = (
            [slice(*pair) for pair in zip(first, last, strict=True)] for first, last in zip(starts, ends, strict=True)
        )
        rows = [self.dense(q[None, a], k[None, b], v[None, b])[0] for a, b in zip(queries, keys, strict=True)]
        self.calls[-1]["keys"] = [b.stop - b.start for b in keys]
        return torch.cat(rows)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    monkeypatch.setattr(attention_dispatch, "flash_attn_func", found.dense)
    monkeypatch.setattr(attention_dispatch, "flash_attn_varlen_func", found.packed)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    module: Any = sys.modules["flash_attn_interface"]
    module.flash_attn_func = lambda *given: (found.dense(*given), torch.zeros(1))
    return found


@pytest.fixture
def natively(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The mask of every call of PyTorch's attention by diffusers."""
    masks: list[Any] = []
    native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]

    def spy(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **more: Any) -> Tensor:
        masks.append(attn_mask)
        return native(query, key, value, attn_mask, **more)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, AttentionBackendName.NATIVE, spy)
    return masks


#: Calls of a kernel that takes no masks, and of PyTorch's attention with a mask: for one clip, and for two. LTX has
#: self and cross attention in each of two blocks; Hunyuan two double and two single blocks.
SITES = {"ltx_video": ((2, 2), (2, 2)), "hunyuan_video": ((4, 0), (0, 4)), "cogvideox": ((2, 0), (2, 0))}


@pytest.mark.parametrize("backend", ["flash", "_flash_3"])
@pytest.mark.parametrize("family", SITES)
def test_a_call_with_a_mask_keeps_a_backend_that_takes_it(
    family: str, backend: str, kernels: Kernels, natively: list[Any], tiny_repo: Callable[..., Path]
) -> None:
    """Under autocast the kernel gets bf16, although norms of queries and keys give fp32 there."""
    repo = tiny_repo(family)
    network = spec_of(repo, family, backend).load_transformer(torch.float32)
    plain = spec_of(repo, family, AUTO).load_transformer(torch.float32)
    for batch, (unmasked, masked) in zip((1, 2), SITES[family], strict=True):
        kernels.calls.clear()
        natively.clear()
        spec = spec_of(repo, family, backend)
        with torch.autocast("cpu", torch.bfloat16):
            out = predict(spec, network, batch=batch)
            assert len(kernels.calls) == unmasked
            assert all(call["dtypes"] == {torch.bfloat16} for call in kernels.calls)
            assert [mask is not None for mask in natively] == [True] * masked
            torch.testing.assert_close(out, predict(spec, plain, batch=batch), rtol=5e-2, atol=5e-2)


def test_packed_sequences_leave_the_padding_out(kernels: Kernels, tiny_repo: Callable[..., Path]) -> None:
    """A joint attention has a boolean mask over video and text, of which the first 20 tokens are no padding."""
    repo = tiny_repo("hunyuan_video")
    found = []
    for backend in ("native", "flash_varlen"):
        spec = spec_of(repo, "hunyuan_video", backend)
        network = spec.load_transformer(torch.float32)
        out = predict(spec, network, batch=2, text=20)
        out.square().sum().backward()
        found.append((out.detach(), network.proj_out.weight.grad, network.x_embedder.proj.weight.grad))
    video = kernels.calls[0]["shape"][1] - 256
    assert len(kernels.calls) == 2 * 4
    assert [call["keys"] for call in kernels.calls if "keys" in call] == [[video + 20] * 2] * 4
    for native, packed in zip(*found, strict=True):
        torch.testing.assert_close(packed, native, rtol=1e-3, atol=1e-3)


def test_every_name_is_diffusers(tiny_repo: Callable[..., Path]) -> None:
    assert {*get_args(AttnBackendName)} == {AUTO, *BACKENDS}
    assert BACKENDS.keys() <= {member.value for member in AttentionBackendName}


# ---- trying a backend ------------------------------------------------------------------------------------------------


def try_out(name: str) -> None:
    check_backend(name, device=torch.device("cpu"), dtype=torch.float32, head_dim=16)
    assert _AttentionBackendRegistry._active_backend == AttentionBackendName.NATIVE


@pytest.mark.parametrize("name", ["_native_math", "_native_flash"])
def test_a_backend_that_works_is_accepted(name: str) -> None:
    try_out(name)


@pytest.mark.parametrize(
    ("kernel", "kind", "value"),
    [
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v).detach(), "unsupported", "RuntimeError: .*grad"),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 1.1, "mismatch", r" outputs .*10\.0%"),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k.detach(), v) + 0 * k, "mismatch", " dK .*100"),
        (lambda q, k, v: 1 / 0, "unsupported", "ZeroDivisionError"),
    ],
)
def test_a_backend_that_cannot_train_is_refused(
    kernel: Any, kind: Kind, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        return kernel(*(one.transpose(1, 2) for one in (query, key, value))).transpose(1, 2)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, AttentionBackendName._NATIVE_MATH, broken)
    with refused_options(("--attn_backend", kind)) as caught:
        try_out("_native_math")
    assert re.search(f"(?s)_native_math .*{value}.*native", str(caught.value))


def test_a_package_that_diffusers_does_not_find_is_reported() -> None:
    with refused_options(("--attn_backend", "unsupported")) as caught:
        try_out("flash")
    assert re.search("flash .*CPU: RuntimeError: .*flash-attn", str(caught.value))


@torch.no_grad()
def test_flex_computes_as_native() -> None:
    """PyTorch has no backward pass of it on a CPU, and compiles it on a GPU (`tests/gpu`)."""
    q, k, v = (torch.randn(1, 24, 2, 16) for _ in range(3))
    torch.testing.assert_close(AttentionFn("flex")(q, k, v), AttentionFn("native")(q, k, v), rtol=1e-4, atol=1e-4)


def test_the_kernel_of_auto_is_named(tiny_repo: Callable[..., Path]) -> None:
    """As PyTorch selects it for the blocks' heads."""
    spec = spec_of(tiny_repo("ltx_video"), "ltx_video", AUTO)
    for backends, expected in (([SDPBackend.MATH], "_native_math"), ([SDPBackend.FLASH_ATTENTION], "_native_flash")):
        with sdpa_kernel(backends):
            assert spec.check_attention(torch.device("cpu"), torch.bfloat16) == expected


class Layer(nn.Module):
    """Attention with a processor that is an attribute alone, as Mochi's."""

    processor: Any = "stock"

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        return hidden_states * temb


def test_processors_are_set_without_a_method_for_it_and_never_nowhere() -> None:
    block = nn.ModuleList([Layer(), nn.Linear(1, 1)])
    set_processors([block], "chosen")
    assert block[0].processor == "chosen"
    with pytest.raises(TypeError, match="ModuleList"):
        set_processors([block, nn.ModuleList([nn.Linear(1, 1)])], "chosen")


def test_the_first_argument_of_a_block_is_split_however_it_is_given() -> None:
    """By the signature of the block, not by the order of the call."""

    class Half:
        tokens, splits_times = 0, False

        def part(self, tensor: Tensor, dim: int, *, text: int = 0) -> Tensor:
            return tensor.narrow(dim, 0, tensor.shape[dim] // 2)

        def join(self, part: Tensor) -> Tensor:
            return part.repeat(1, 2)

    network = nn.Sequential()
    network.block, network.last = Layer(), nn.Identity()
    sequence: Any = Half()
    split_tokens(network, SequenceParallelPlan(inputs={}, outputs={}, entries={"block": 1}, last="last"), sequence)
    hidden, temb = torch.arange(4.0).view(1, 4), torch.full((1, 1), 2.0)
    for args, kwargs in (((hidden, temb), {}), ((), {"temb": temb, "hidden_states": hidden})):
        assert network.block(*args, **kwargs).tolist() == [[0.0, 2.0]]
