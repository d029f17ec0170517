"""Attention of the transformer's blocks by a chosen backend, chosen per call: masks keep a backend that takes them.

diffusers' own `set_attention_backend` is not used. It also changes the default of the whole process, knows no masks,
and has no effect on processors that call PyTorch's function themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from finetrainers.config.attention import AUTO, BACKENDS
from finetrainers.config.errors import ConfigError, Problem

#: diffusers' operator of this name has no backward pass; the package's own function has one.
_FLASH_3 = "_flash_3"
#: Maximum distance of a backend's outputs and gradients from fp32, relative to their norm: bf16 gives about 0.004.
_TOLERANCE = 0.02


@dataclass(frozen=True)
class AttentionFn:
    """Attention over `[B, S, H, D]` by the backend of this name, or by PyTorch's for masks that it does not take."""

    name: str

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, text: tuple[int, int] = (0, 0)
    ) -> Tensor:
        """Compute attention of a clip's tokens to each other: outputs `[B, S, H, D]`.

        Args:
            query: `[B, S, H, D]`.
            key: `[B, keys, H, D]`.
            value: `[B, keys, H, D]`.
            mask: over keys, broadcast to `[B, H, S, keys]`: boolean (True is attended to), or added to the scores.
            text: numbers of text tokens before and after those of the clip; see `sequence.SplitAttend`.
        """
        return self.attend_locally(query, key, value, mask)

    def attend_locally(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute attention without other processes: all keys are on each of them, as a text's are."""
        backend = BACKENDS[self.name]
        if mask is not None and not (backend.masks == "any" or (backend.masks == "bool" and mask.dtype == torch.bool)):
            return _dispatch("native", query, key, value, mask)
        if not backend.casts and torch.is_autocast_enabled(value.device.type):
            # Norms of queries and keys give fp32 under autocast, which knows PyTorch's own attention only.
            dtype = torch.get_autocast_dtype(value.device.type)
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        return _dispatch(self.name, query, key, value, mask)


def _dispatch(name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    if name == _FLASH_3:
        from flash_attn_interface import flash_attn_func

        outputs = flash_attn_func(query, key, value)
        return outputs[0] if isinstance(outputs, tuple) else outputs  # older versions also return the log-sum-exp
    return dispatch_attention_fn(query, key, value, attn_mask=mask, backend=_MEMBERS[name])


#: Backends by name; looked up here, since older versions of torch cannot trace the call of an enumeration.
_MEMBERS = {name: AttentionBackendName(name) for name in BACKENDS}


def set_processors(blocks: Iterable[nn.Module], processor: Any) -> None:
    """Let all attention layers within these blocks run by a processor.

    Raises:
        TypeError: no layer of a block has a processor, so that its attention would stay as it is.
    """
    for block in blocks:
        layers = [module for module in block.modules() if hasattr(module, "processor")]
        if not layers:
            raise TypeError(f"no layer of a {type(block).__name__} has a `processor` to replace")
        for layer in layers:
            if hasattr(layer, "set_processor"):
                layer.set_processor(processor)  # type: ignore[operator]
            else:
                layer.processor = processor


def check_attention(spec: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Implement `ModelSpec.check_attention`."""
    name = spec.config.attn_backend
    if name in (AUTO, "native"):
        return native_kernel(device=device, dtype=dtype, head_dim=spec.head_width)
    check_backend(name, device=device, dtype=dtype, head_dim=spec.head_width)
    return str(name)


def native_kernel(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return the backend whose kernel PyTorch selects for attention that is trained and has no mask."""
    query = torch.empty(1, 2, 192, head_dim, device=device, dtype=dtype, requires_grad=True)
    selected = SDPBackend(torch._fused_sdp_choice(query, query, query)).name.partition("_ATTENTION")[0].lower()
    return f"_native_{selected}"


def check_backend(name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Compare outputs and gradients of a backend with PyTorch's in fp32, on a few tokens; this also fetches its kernel.

    Kernels fail on GPUs that they were not built for, and one without a backward pass may give no gradients silently.

    Raises:
        ConfigError: the backend fails, or its results differ.
    """
    draw = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    inputs = [draw(2, 192, 2, head_dim).to(device, dtype) for _ in range(4)]
    exact = _with_gradients(lambda q, k, v: _reference(q, k, v), [tensor.float() for tensor in inputs])
    try:
        with attention_backend(name):  # fetches the kernel, and checks the package; the default is as before afterwards
            pass
        actual = _with_gradients(AttentionFn(name), inputs)
    except Exception as error:
        message = f"{name} fails on {_device_name(device)}: {type(error).__name__}: {error}"
        raise ConfigError([Problem("--attn_backend", f"{message}; use native", "unsupported")]) from error
    for quantity, tensor, expected in zip(("outputs", "dQ", "dK", "dV"), actual, exact, strict=True):
        difference = float((tensor.float() - expected).norm() / expected.norm())
        if not difference <= _TOLERANCE:
            message = f"{name} computes other {quantity} than PyTorch on {_device_name(device)}, by {difference:.1%}"
            raise ConfigError([Problem("--attn_backend", f"{message}; use native", "mismatch")])


def _reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _with_gradients(attend: Any, inputs: list[Tensor]) -> list[Tensor]:
    query, key, value, upstream = (tensor.detach().requires_grad_() for tensor in inputs)
    out = attend(query, key, value)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), upstream.detach())]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
