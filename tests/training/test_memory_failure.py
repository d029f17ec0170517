"""The file that an OOM leaves: the phase, what was planned and measured, and the setting to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetrainers.config.load import load_config
from finetrainers.memory.recorder import MemoryRecorder
from finetrainers.methods.registry import method_spec
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.preflight import ResolvedRun, preflight
from finetrainers.plan.sizes_plan import plan_sizes
from finetrainers.training import memory_failure
from finetrainers.training.guards.memory import OutOfMemory
from finetrainers.training.memory_failure import MemoryFailures, planned_memory, suggest_change
from finetrainers.utils.host_memory import HostMemory
from finetrainers.utils.phases import ENCODING_TEXT, LOADING, PHASES, REWARD, ROLLOUT, TRAINING_STEP, VALIDATION, phase


def first_option(text: str) -> str:
    """The text from its first option on."""
    return text[text.index("--") :]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("fault", "failed", "step", "change"),
    [
        ("oom@loss:2+", "training step", "1 of 2", "--gradient_checkpointing"),
        ("oom@save", "checkpoint", "2 of 2", "--optimizer adamw-torchao-8bit"),
        ("oom@load", "loading", "first", "--transformer_dtype bf16"),
    ],
)
def test_an_oom_leaves_a_file(
    fault: str, failed: str, step: str, change: str, options: Callable[..., dict], run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """It names the phase, the step, measured and planned memory, and what to change; a good run removes it."""
    values = options(train_steps=2, checkpointing_steps=2)
    monkeypatch.setenv("FINETRAINERS_FAULT", fault)
    path = tmp_path / "run" / "failures" / "rank-0.txt"
    with pytest.raises(OutOfMemory) as raised:
        run(**values)
    assert str(raised.value).endswith(f": {path}")
    text = path.read_text()
    first, what, first_change, *rest = text.splitlines()
    assert re.search(rf" {step} .*, phase: {failed}$", first)
    assert fault.partition(":")[0].replace("oom@", " at ") in what
    assert first_option(first_change).startswith(change)
    assert first_change.partition(": ")[2] in str(raised.value)
    rows = {line[:14].strip(): line.split() for line in rest if line}
    assert rows[failed][-3:] == ["out", "of", "memory"]
    assert rows["training step"][2] == "0.00"  # planned, of a tiny network
    assert float(rows[failed][-5]) > 0.1  # measured
    assert "\nplanned: " in text
    assert "GiB available" in text
    assert max(map(len, text.splitlines())) < 140
    monkeypatch.delenv("FINETRAINERS_FAULT")
    run(**values)
    assert not path.parent.exists()


def failures(tmp_path: Path, **changes: Any) -> MemoryFailures:
    config = load_config(
        model_name="ltx_video", pretrained_model_name_or_path="somewhere", output_dir=str(tmp_path), **changes
    )
    checked: Any = SimpleNamespace(config=config)
    return MemoryFailures(checked, MemoryRecorder(torch.device("cpu")), rank=3)


def test_a_host_that_is_nearly_full_is_written_down_in_advance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = failures(tmp_path, dataloader_num_workers=8)
    events: list[dict[str, Any]] = []
    writer.state = SimpleNamespace(  # type: ignore[assignment]
        config=writer._checked.config,
        step=4,
        total_steps=9,
        run_dir=SimpleNamespace(event=lambda kind, **more: events.append({"event": kind, **more})),
    )
    with writer.write_on_oom():
        assert writer._memory.on_low_memory is not None
        writer._memory.on_low_memory(HostMemory(16 * 2**30, 2**29, "container"))
        text = (tmp_path / "failures" / "rank-3.txt").read_text()
    _, title, explanation, change, *_ = text.splitlines()
    assert re.search(r" 0\.50 GiB .*container.* \(16\.0 GiB\)", title)
    assert "killed" in explanation
    assert first_option(change).startswith("--dataloader_num_workers 4")
    assert events == [{"event": "host_memory_low", "step": 4, "available_gib": 0.5}]
    assert "--dataloader_num_workers 4" in caplog.text
    assert not (tmp_path / "failures").exists()  # it ended well


def test_the_phase_is_that_of_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB"

    def fail() -> None:
        try:
            with phase(VALIDATION):
                raise torch.OutOfMemoryError(f"{message}\nmore")
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("out of memory while sampling") from error

    monkeypatch.setattr(memory_failure, "planned_memory", lambda *_, **__: ({VALIDATION: 3.0}, None))
    writer = failures(tmp_path)
    with pytest.raises(OutOfMemory, match=r"--enable_model_cpu_offload"), writer.write_on_oom(), phase(TRAINING_STEP):
        fail()
    text = writer.path.read_text()
    assert f"phase: validation\n{message}\n" in text
    assert "validation           3.00" in text
    with pytest.raises(ValueError, match=r"^other$"), writer.write_on_oom():  # not ours
        raise ValueError("other")


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({}, TRAINING_STEP, "--gradient_checkpointing"),
        ({"batch_size": 4, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}, TRAINING_STEP,
         "--batch_size 1 --gradient_accumulation_steps 8"),
        ({"batch_size": 4, "activation_memory": "keep_attention"}, TRAINING_STEP,
         "--batch_size 1 --gradient_accumulation_steps 4"),
        ({"batch_size": 4}, TRAINING_STEP, "--gradient_checkpointing"),
        ({"text_encoder_dtype": "fp32"}, ENCODING_TEXT, "--text_encoder_dtype bf16"),
        ({}, ENCODING_TEXT, "--quantize_text_encoders int8"),
        ({"quantize_text_encoders": "int8"}, ENCODING_TEXT, "--quantize_text_encoders nf4"),
        ({"quantize_text_encoders": "nf4"}, ENCODING_TEXT, "--precompute_conditions"),
        ({"text_encoder_dtype": "float8_e4m3fn"}, ENCODING_TEXT, "--precompute_conditions"),
        ({"gradient_checkpointing": True}, TRAINING_STEP, "--quantize_frozen int8"),
        ({"activation_memory": "checkpoint"}, TRAINING_STEP, "--quantize_frozen int8"),
        ({"gradient_checkpointing": True, "use_dora": True}, TRAINING_STEP, "--video_resolution_buckets"),
        ({"gradient_checkpointing": True, "training_type": "full-finetune"}, TRAINING_STEP,
         "--optimizer adamw-torchao-8bit"),
        ({"gradient_checkpointing": True, "training_type": "full-finetune", "optimizer": "came"}, TRAINING_STEP,
         "--video_resolution_buckets"),
        ({"precompute_batch_size": 4}, "encoding_clips", "--precompute_batch_size 1"),
        ({}, "encoding_clips", "--enable_tiling"),
        ({"enable_tiling": True}, "encoding_clips", "--video_resolution_buckets"),
        ({}, VALIDATION, "--enable_model_cpu_offload"),
        ({"enable_tiling": True}, REWARD, "--rollout_size"),
        ({}, ROLLOUT, "--offload_trajectory"),
        ({"async_checkpointing": True}, "checkpoint", "--no-async_checkpointing"),
        ({"async_checkpointing": True, "fsdp": "full"}, "checkpoint", "--optimizer adamw-torchao-8bit"),
    ],
)  # fmt: skip
def test_one_setting_to_change(changes: dict[str, Any], name: str, expected: str) -> None:
    config = load_config(model_name="ltx_video", pretrained_model_name_or_path="somewhere", **changes)
    assert first_option(suggest_change(config, name)).startswith(expected)


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"blocks_to_swap": 20}, LOADING, "--blocks_to_swap 10 "),
        ({"blocks_to_swap": 3}, LOADING, "--blocks_to_swap 0 "),
        ({"activation_memory": "offload"}, TRAINING_STEP, "--activation_memory checkpoint"),
    ],
)
def test_memory_of_the_host_has_other_settings(changes: dict[str, Any], name: str, expected: str) -> None:
    """Of what waits there."""
    config = load_config(model_name="ltx_video", pretrained_model_name_or_path="somewhere", **changes)
    assert first_option(suggest_change(config, name, on_host=True)).startswith(expected)
    assert not first_option(suggest_change(config, name)).startswith(expected)


@pytest.mark.parametrize(("method", "helps"), [("sft", True), ("dpo", True), ("grpo", False)])
def test_fewer_workers_are_suggested_where_there_are_any(method: str, helps: bool) -> None:
    """Reward finetuning reads no clips."""
    config = load_config(
        model_name="ltx_video", pretrained_model_name_or_path="somewhere", method=method, dataloader_num_workers=8
    )
    assert ("--dataloader_num_workers" in suggest_change(config, None, on_host=True)) == helps


def test_every_phase_has_a_setting() -> None:
    config = load_config(model_name="ltx_video", pretrained_model_name_or_path="somewhere")
    assert all(suggest_change(config, name, on_host=True).find("--") >= 0 for name in (*PHASES, None))


def test_the_estimates_advice_comes_first(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """In the phase of the planned peak, the option of the advice that lowers it most; in another, none."""

    def checked() -> ResolvedRun:
        config = load_config(
            model_name="ltx_video", pretrained_model_name_or_path=str(tiny_repo("ltx_video")), train_steps=1,
            data_root=str(tmp_path / "absent"), video_resolution_buckets=["49x512x768"], batch_size=8,
            precompute_conditions=True, output_dir=str(tmp_path),
        )  # fmt: skip
        without_data = method_spec(config).without_data(config)
        assert without_data is not None
        return preflight(without_data, preparing=True, weights=False, planner=plan_sizes)

    run = checked()
    plan = RunMemory(run).plan()
    assert plan.peak_phase == "encoding_clips"
    planned, advice = planned_memory(run, run.config, "encoding_clips", device_type="cpu")
    assert planned == {name: size / 2**30 for name, size in plan.peaks.items()}
    assert advice is not None
    assert [applied.switch.flags for applied in advice.switches] == ["--enable_tiling"]
    assert planned_memory(run, run.config, "loading", device_type="cpu") == (planned, None)
