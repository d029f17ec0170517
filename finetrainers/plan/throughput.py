"""Throughput of a run: tokens a second, and model FLOPs utilization (MFU) where the GPU's peak is known."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from finetrainers.models.spec import FlopMeter, ModelSpec

#: Peak of dense products of bf16 matrices with fp32 sums, in TFLOPS, as the makers' data sheets publish it, by what is in the
#: device's name. The first that fits counts.
PEAK_TFLOPS: Mapping[str, float] = {
    "B200": 2250, "H200 NVL": 835.5, "H200": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756.5, "H100": 989.4, "H800": 989.4,
    "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A40": 149.7, "A10": 125, "RTX A6000": 154.8,
    "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71, "MI300X": 1307.4,
}  # fmt: skip
#: What makes of a device's name that of another chip, or of a part of one (MIG).
_OTHER_CHIPS = ("Laptop", "Ti", "D", "SUPER", "MIG")


def peak_flops(device: torch.device) -> float | None:
    """Operations a second at the peak of a device; None: not known, or a CPU."""
    if device.type != "cuda":
        return None
    words = f" {torch.cuda.get_device_name(device)} ".replace("-", " ")
    if any(f" {other} " in words for other in _OTHER_CHIPS):
        return None
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if f" {name} " in words), None)


def measure_calls(spec: ModelSpec, network: nn.Module, *, sharing: int = 1) -> FlopMeter | None:
    """Meter the calls of the network from here on; None: the family does not tell its operations.

    Args:
        spec: of the model.
        network: that is trained.
        sharing: processes that share each call.
    """
    flops = spec.flops(network)
    if flops is None:
        return None
    meter = FlopMeter(flops, lambda call: spec.tokens_of(network, call), sharing=sharing)
    names = list(inspect.signature(network.forward).parameters)

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        meter.add({**dict(zip(names, args, strict=False)), **kwargs}, trains=torch.is_grad_enabled())

    network.register_forward_pre_hook(add, with_kwargs=True)
    return meter


def rates(record: dict[str, float], *, num_ranks: int, peak: float | None) -> dict[str, float]:
    """The record with rates in the place of `flops` and `tokens`, the means of a step and a rank.

    Args:
        record: of one step or several.
        num_ranks: that have samples of their own.
        peak: see `peak_flops`.
    """
    found = {name: value for name, value in record.items() if name not in ("flops", "tokens")}
    if "tokens" in record:
        found["tokens_per_s"] = num_ranks * record["tokens"] / record["step_s"]
    if "flops" in record and peak is not None:
        found["mfu"] = record["flops"] / record["step_s"] / peak
    return found
