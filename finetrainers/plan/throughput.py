"""Throughput of a run: tokens per second, and model FLOPs utilization (MFU) if the GPU's peak is known."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from finetrainers.memory.activation_auto import ASSUMED_FLOPS, UTILIZATION
from finetrainers.models.spec import FlopMeter, ModelSpec
from finetrainers.utils.gpus import Gpu

#: Peak of dense products of bf16 matrices with fp32 sums, in TFLOPS, as published in the makers' data sheets, by a part
#: of the device's name. The first match counts.
PEAK_TFLOPS: Mapping[str, float] = {
    "B200": 2250, "H200 NVL": 835.5, "H200": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756.5, "H100": 989.4, "H800": 989.4,
    "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A40": 149.7, "A10": 125, "RTX A6000": 154.8,
    "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71, "MI300X": 1307.4,
}  # fmt: skip
#: Words that turn a device's name into that of another chip, or of a part of a chip (MIG).
_OTHER_CHIPS = ("Laptop", "Ti", "D", "SUPER", "MIG")


def peak_flops(device: torch.device) -> float | None:
    """Return a device's peak operations per second, or None if it is unknown, or for a CPU."""
    if device.type != "cuda":
        return None
    device_name = f" {torch.cuda.get_device_name(device)} ".replace("-", " ")
    if any(f" {other} " in device_name for other in _OTHER_CHIPS):
        return None
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if f" {name} " in device_name), None)


def planned_flops(gpu: Gpu | None, device_type: str) -> float:
    """Return the operations per second that steps are planned with: a share of a GPU's published peak, or a CPU's.

    The latter is measured, in a tenth of a second: networks that train on a CPU reach about as much.
    """
    if device_type == "cuda" or gpu is not None:
        peak = next((peak for name, peak in PEAK_TFLOPS.items() if gpu is not None and name in gpu.name), None)
        return ASSUMED_FLOPS if peak is None else UTILIZATION * 1e12 * peak
    size, fastest = 512, float("inf")
    matrix = torch.ones(size, size)
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * size**3 / fastest


def attach_flop_meter(spec: ModelSpec, network: nn.Module, *, sharing: int = 1) -> FlopMeter | None:
    """Meter the calls of the network from here on, or return None if the family does not count its operations.

    Args:
        spec: of the model.
        network: the trained one.
        sharing: processes that share each call.
    """
    flops = spec.flops(network)
    if flops is None:
        return None
    meter = FlopMeter(flops, lambda call: spec.count_tokens(network, call), sharing=sharing)
    names = list(inspect.signature(network.forward).parameters)

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        meter.add({**dict(zip(names, args, strict=False)), **kwargs}, trains=torch.is_grad_enabled())

    network.register_forward_pre_hook(add, with_kwargs=True)
    return meter


def with_rates(record: dict[str, float], *, num_ranks: int, peak: float | None) -> dict[str, float]:
    """Return the record with rates instead of `flops` and `tokens`, which are means per step and rank.

    Args:
        record: of one step or several.
        num_ranks: ranks that have separate samples.
        peak: see `peak_flops`.
    """
    rated = {name: value for name, value in record.items() if name not in ("flops", "tokens")}
    if "tokens" in record:
        rated["tokens_per_s"] = num_ranks * record["tokens"] / record["step_s"]
    if "flops" in record and peak is not None:
        rated["mfu"] = record["flops"] / record["step_s"] / peak
    return rated
