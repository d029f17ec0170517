"""Training over quantized frozen weights, from start to results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused_options
from safetensors.torch import load_file

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.memory.quantization import QuantizedLinear
from finetrainers.plan.dry_run import dry_run_report
from finetrainers.plan.initial_weights import LORA_FILE
from finetrainers.plan.preflight import preflight
from finetrainers.runs.training import TrainResult


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "kind"), [("ltx_video", "int8"), ("hunyuan_video", "fp8")])
def test_a_run_samples_saves_resumes_and_leaves_a_plain_adapter(
    family: str,
    kind: str,
    options: Callable[..., dict],
    run: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = options(
        family, quantize_frozen=kind, transformer_dtype="bf16", use_ema=True, checkpointing_steps=1, train_steps=2,
        validation_prompts="one@@@9x64x64", validation_inference_steps=2,
    )  # fmt: skip
    done = run(**values)
    quantized = [m for m in done.state.network.modules() if isinstance(m, QuantizedLinear)]
    assert quantized
    assert {layer.codes.dtype for layer in quantized} == {torch.int8}
    assert re.search(rf"quantized \d+% .* {kind}: .* \d\.\d\d%", capsys.readouterr().out)
    assert len(list((done.root / "samples").rglob("*.mp4"))) == 1

    first, last = sorted((done.root / "checkpoints").iterdir())
    (resumed := tmp_path / "resumed").mkdir()
    run(**values | {"output_dir": str(resumed), "resume_from_checkpoint": str(first)})
    wanted, found = load_file(last / LORA_FILE), load_file(resumed / LORA_FILE)
    assert wanted.keys() == found.keys()
    assert {tensor.dtype for tensor in wanted.values()} == {torch.float32}
    ours, theirs = done.weights, load_file(resumed / LORA_FILE)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())

    pipeline = TrainResult(done.state.config, step=2).pipeline("cpu")
    loaded = {name: p for name, p in pipeline.transformer.named_parameters() if "lora" in name}
    assert len(loaded) == len(ours) > 0
    assert not any(isinstance(module, QuantizedLinear) for module in pipeline.transformer.modules())


def test_a_dry_run_refuses_what_cannot_be_quantized(
    options: Callable[..., dict], capsys: pytest.CaptureFixture[str]
) -> None:
    def dry_run(**changes: Any) -> str:
        dry_run_report(preflight(load_config(**options(quantize_frozen="int8", **changes))))
        return capsys.readouterr().out

    assert re.search(r"\n  0\.\d+M .* int8\n", dry_run())
    with pytest.raises(ConfigError, match="nf4: requires a CUDA device"):
        preflight(load_config(**options(quantize_frozen="nf4")))
    with refused_options(("--quantize_skip_modules", "invalid")) as caught:
        dry_run(quantize_skip_modules=["."])
    assert ": .;" in str(caught.value)


def test_swapped_blocks_without_autocast_give_the_same(
    tiny_repo: Callable[..., Path], options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """Codes wait in host memory like other frozen weights; autograd asks for them in backward."""
    values = options(
        quantize_frozen="int8", transformer_dtype="bf16", train_steps=2, lora_autocast=False,
        pretrained_model_name_or_path=str(tiny_repo("ltx_video", layers=4)),
    )  # fmt: skip
    runs = [run(**values | {"output_dir": str(tmp_path / f"{number}"), "blocks_to_swap": number}) for number in (0, 4)]
    curves = [one.curve("loss", "grad_norm") for one in runs]
    assert curves[0] == curves[1]
    assert all(torch.equal(tensor, runs[1].weights[name]) for name, tensor in runs[0].weights.items())
