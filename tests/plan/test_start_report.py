from __future__ import annotations

from pathlib import Path

import pytest

from finetrainers.plan.start_report import print_results


def test_the_end_of_a_run_says_where_everything_is_and_what_can_be_done_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    (run / "pytorch_lora_weights.safetensors").touch()
    print_results(run, comfyui=True)
    assert capsys.readouterr().out.splitlines() == [
        "done; results:",
        f"  LoRA            {run}/pytorch_lora_weights.safetensors",
        "next:",
        f"  finetrainers sample '{run}' --prompts TEXT --compare base",
        f"  finetrainers export '{run}' --format comfyui",
    ]
    print_results(run, comfyui=False)
    assert "export" not in capsys.readouterr().out
