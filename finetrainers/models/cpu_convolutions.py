"""Convolutions over frames on a CPU in fp32: PyTorch has no fast 16-bit kernel for them on most CPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def compute_in_fp32_on_cpu(network: nn.Module) -> None:
    """Let the `Conv3d` modules of a network compute in fp32 where their input is on a CPU.

    On a CPU, a 16-bit convolution over frames, including one by autocast, takes 10 to 100 times longer than in fp32.
    Inputs, weights and outputs keep their dtypes. On other devices nothing changes.

    Args:
        network: a frozen network, such as a VAE; changed in place.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv3d):
            module._conv_forward = _Convolution(module)  # type: ignore[assignment, method-assign]


class _Convolution:
    """The `_conv_forward` of a module."""

    def __init__(self, module: nn.Conv3d) -> None:
        self._module = module

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        compute = type(self._module)._conv_forward
        is_slow = x.dtype in _SIXTEEN_BITS or torch.is_autocast_enabled("cpu")
        if x.device.type != "cpu" or not is_slow:
            return compute(self._module, x, weight, bias)
        with torch.autocast("cpu", enabled=False):
            result = compute(self._module, x.float(), weight.float(), None if bias is None else bias.float())
        # As the convolution would under autocast: what follows may have weights of that dtype only.
        return result.to(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype)
