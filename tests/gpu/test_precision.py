"""Ways of computing a step: 8-bit storage, fp16 with loss scaling, compiled; each close to the plain one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES
from on_devices import Run, cases, devices

from finetrainers.config.attention import BACKENDS
from finetrainers.memory.quantization import QuantizedLinear
from finetrainers.methods.sft import SFT
from finetrainers.models.split.attention import check_backend
from finetrainers.training.trainer import Trainer

Start = Callable[..., Run]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("device", "family"), cases(*FAMILIES, on_cpu=0))
def test_storage_in_eight_bits(device: str, family: str, start: Start, plain: Start) -> None:
    run = start(device, family, layerwise_upcasting_modules=["transformer"], gradient_checkpointing=True)
    assert run.curve() == pytest.approx(plain(device, family).curve(), rel=0.1)
    assert any(weight.dtype == torch.float8_e4m3fn for weight in run.network.parameters())
    assert all(weight.isfinite().all() for weight in run.trained.values())


@pytest.mark.parametrize(
    ("device", "family", "kind"),
    cases(*((family, kind) for family in FAMILIES for kind in ("int8", "fp8", "nf4")), on_cpu=0),
)
def test_quantized_frozen_weights(device: str, family: str, kind: str, start: Start, plain: Start) -> None:
    if kind == "nf4" and device == "cpu":
        pytest.skip("is refused on CPUs")
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    run = start(device, family, quantize_frozen=kind)
    rel = 0.3 if kind == "nf4" else 0.1
    assert run.curve() == pytest.approx(plain(device, family).curve(), rel=rel)
    layers = [module for module in run.network.modules() if isinstance(module, QuantizedLinear)]
    assert layers
    assert all(not layer.codes.is_floating_point() and layer.codes.device.type == device for layer in layers)
    assert all(weight.isfinite().all() for weight in run.trained.values())


@pytest.mark.parametrize(("device", "family"), cases(*FAMILIES, on_cpu=0))
def test_a_lora_without_autocast(device: str, family: str, start: Start, plain: Start) -> None:
    run = start(device, family, lora_autocast=False)
    assert run.curve() == pytest.approx(plain(device, family).curve(), rel=0.1)
    assert all(weight.dtype == torch.float32 for weight in run.trained.values())


@pytest.mark.gpu
def test_fp16_with_a_gradient_scaler(start: Start, plain: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose gradients overflow changes neither weights nor averages, and halves the scale."""
    loss, update, calls, seen = SFT.loss, Trainer._update, [], []

    def overflowing(self: SFT, transformer: Any, batch: Any) -> Any:
        calls.append(batch)
        value, metrics = loss(self, transformer, batch)
        return (value * torch.inf if len(calls) == 2 else value), metrics

    def watched(trainer: Trainer) -> None:
        network, averages = trainer.state.network, trainer.state.ema
        assert averages is not None
        before = {n: p.detach().clone() for n, p in network.named_parameters() if p.requires_grad}
        average = {n: t.clone() for n, t in averages.weights.items()}
        update(trainer)
        after = {n: p for n, p in network.named_parameters() if p.requires_grad}
        seen.append(
            (
                before,
                {n: p.detach().clone() for n, p in after.items()},
                average,
                {n: t.clone() for n, t in averages.weights.items()},
            )
        )

    monkeypatch.setattr(SFT, "loss", overflowing)
    monkeypatch.setattr(Trainer, "_update", watched)
    run = start(
        "cuda", mixed_precision="fp16", transformer_dtype="fp16", use_ema=True, train_steps=3, dry_batches="off",
        on_nonfinite="skip",
    )  # fmt: skip
    assert run.state.parallel.accelerator.scaler is not None
    assert len(calls) == 3
    assert run.curve()[0] == pytest.approx(plain("cuda").curve()[0], rel=2e-2)
    assert all(math.isfinite(value) for value in run.curve())
    same = [all(torch.equal(before[n], p) for n, p in after.items()) for before, after, _, _ in seen]
    assert same[1]
    assert not all(same)
    for skipped, (_, _, before, after) in zip(same, seen, strict=True):
        assert skipped == all(torch.equal(before[n], t) for n, t in after.items())


@pytest.mark.slow
@pytest.mark.parametrize("device", devices(cpu=False))
def test_compiled_as_eager(device: str, start: Start, plain: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch --config_file accelerate_configs/compiled_1.yaml` says it; on the CPU traced, not
    compiled."""
    lines = (ROOT / "accelerate_configs" / "compiled_1.yaml").read_text().splitlines()
    settings = dict(line.strip().split(": ") for line in lines if line.startswith("  dynamo_"))
    assert settings["dynamo_backend"] == "INDUCTOR"
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR" if device == "cuda" else "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", settings["dynamo_mode"])
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", settings["dynamo_use_dynamic"])
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", settings["dynamo_use_fullgraph"])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    run = start(device)
    assert hasattr(run.state.transformer, "_orig_mod")
    assert run.curve()[0] == pytest.approx(plain(device).curve()[0], rel=1e-2)
    assert run.curve() == pytest.approx(plain(device).curve(), rel=5e-2)


@pytest.mark.parametrize(("device", "family"), cases(*FAMILIES, on_cpu=0))
def test_compiled_blocks(device: str, family: str, start: Start, plain: Start) -> None:
    """By inductor, one after another (`--compile regional`), with gradient checkpointing."""
    run = start(device, family, compile="regional", gradient_checkpointing=True)
    assert all(block._compiled_call_impl is not None for block in run.state.spec.block_modules(run.network))
    assert run.curve()[0] == pytest.approx(plain(device, family).curve()[0], rel=1e-2)
    assert run.curve() == pytest.approx(plain(device, family).curve(), rel=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "native"])
def test_an_attention_backend_computes_as_pytorch_does(name: str) -> None:
    """Outputs and gradients in bf16, of those that are installed; `flex` without being compiled."""
    if BACKENDS[name].missing is not None:
        pytest.skip(BACKENDS[name].missing)
    check_backend(name, device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=64)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["_native_cudnn", "_native_efficient", "flash", "flex"])
def test_training_with_an_attention_backend(family: str, name: str, start: Start, plain: Start) -> None:
    if BACKENDS[name].missing is not None:
        pytest.skip(BACKENDS[name].missing)
    more = {"compile": "regional"} if BACKENDS[name].fuses_compiled else {}
    run = start("cuda", family, attn_backend=name, **more)
    assert run.curve()[0] == pytest.approx(plain("cuda", family).curve()[0], rel=1e-2)
    assert run.curve() == pytest.approx(plain("cuda", family).curve(), rel=5e-2)
