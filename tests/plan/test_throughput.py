"""Tokens a second and MFU: what is counted, and the peaks of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from finetrainers.models.flops import FlopMeter, Tokens
from finetrainers.plan.throughput import peak_flops, with_rates


def test_rates_by_hand() -> None:
    record = {"loss": 1.0, "flops": 6e12, "tokens": 300.0, "step_s": 2.0}
    assert with_rates(record, num_ranks=2, peak=1e13) == {"loss": 1.0, "step_s": 2.0, "tokens_per_s": 300.0, "mfu": 0.3}
    assert with_rates(record, num_ranks=1, peak=None) == {"loss": 1.0, "step_s": 2.0, "tokens_per_s": 150.0}
    assert with_rates({"step_s": 2.0}, num_ranks=1, peak=1e13) == {"step_s": 2.0}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H200", 989.4),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX A6000", 154.8), ("NVIDIA A10", 125), ("NVIDIA A10G", None), ("Tesla T4", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)  # fmt: skip
def test_peaks(name: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda")) == (None if tflops is None else tflops * 1e12)
    assert peak_flops(torch.device("cpu")) is None


def test_records_of_a_run(
    options: Callable[..., dict[str, Any]], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 9 frames of 64x64 pixels: 2 x 2 x 2 tokens a clip, and nothing of the samples in between."""
    monkeypatch.setattr("finetrainers.training.trainer.peak_flops", lambda _: 1e9)
    # A given first frame would have a noise level of its own for each token.
    prompt = {
        "first_frame_conditioning_p": 0.0,
        "validation_prompts": "one@@@9x64x64",
        "validation_inference_steps": 2,
        "validation_steps": 1,
    }
    calls: list[tuple[float, Tokens]] = []
    add = FlopMeter.add

    def noted(meter: FlopMeter, arguments: Any, *, trains: bool) -> None:
        if trains:
            tokens = meter._count_tokens(arguments)
            calls.append((meter._flops.of_forward(tokens) + meter._flops.of_backward(tokens), tokens))
        add(meter, arguments, trains=trains)

    monkeypatch.setattr(FlopMeter, "add", noted)
    done = run(
        **options(
            clips=4, train_steps=2, batch_size=2, gradient_accumulation_steps=2, gradient_checkpointing=True, **prompt
        )
    )
    assert [tokens.clips * tokens.video for _, tokens in calls] == [2 * 8] * 4
    for number, record in enumerate(record for record in done.metrics if "step_s" in record):
        assert record["tokens_per_s"] * record["step_s"] == pytest.approx(4 * 8)
        expected = sum(operations for operations, _ in calls[2 * number :][:2])
        assert record["mfu"] * record["step_s"] * 1e9 == pytest.approx(expected, rel=1e-4)
        assert not {"flops", "tokens"} & record.keys()
