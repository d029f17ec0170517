"""`finetrainers estimate`: what it prints, for people and programs, with and without data and processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from finetrainers.cli.main import main
from finetrainers.utils.launch import launcher_environment

ROOT = Path(__file__).parents[2]


@pytest.fixture
def estimate(tiny_repo: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*flags: str, repo: Path | None = None) -> tuple[int, str, str]:
        place = repo or tiny_repo("ltx_video")
        code = main(["estimate", "--pretrained_model_name_or_path", str(place), *flags])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


SIZE = ("--video_resolution_buckets", "49x512x768")


def test_it_fits_or_not(estimate: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = estimate(*SIZE, "--gpu", "24GB")
    assert code == 0
    assert "it fits 24 GB" in out
    assert "the data is not on this machine" in out
    assert max(map(len, out.splitlines())) <= 100, out
    code, out, _ = estimate(*SIZE, "--gpu", "2GB", "--batch_size", "2")
    assert code == 0
    assert "it does not fit 2 GB" in out
    assert "it fits with" in out
    assert "saves" in out
    code, out, _ = estimate(*SIZE, "--gpu", "0.001")
    assert "no set of options makes it fit" in out


def test_json(estimate: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = estimate(*SIZE, "--gpu", "2", "--batch_size", "2", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["fits"] is False
    assert found["peak"]["allocated"] == max(phase["gpu"] for phase in found["phases"].values())
    assert found["advice"]["reserved"] <= 2 * 2**30
    assert all(one["saves"] > 0 or one["planned_slowdown_percent"] < 0 for one in found["advice"]["switches"])


def test_processes_of_a_launcher(estimate: Callable[..., tuple[int, str, str]]) -> None:
    full = (*SIZE, "--training_type", "full-finetune", "--json")
    before = dict(os.environ)
    alone = json.loads(estimate(*full)[1])
    assert alone["processes"] == 1
    file = ROOT / "accelerate_configs" / "fsdp2.yaml"
    shared = json.loads(estimate(*full, "--accelerate_config", str(file), "--num_processes", "4")[1])
    assert shared["processes"] == 4
    weights = [one["phases"]["checkpoint"]["parts"]["trainable weights"] for one in (alone, shared)]
    assert weights[1] == pytest.approx(weights[0] / 4, rel=1e-3)
    assert dict(os.environ) == before
    zero = launcher_environment(ROOT / "accelerate_configs" / "deepspeed_zero3_offload.yaml")
    assert zero["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert zero["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"


def test_errors(estimate: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    for flags, said in (
        ((*SIZE, "--gpu", "much"), "--gpu: expected a memory size"),
        ((*SIZE, "--gpu", "9" * 5000 + "GB"), "--gpu: expected a memory size"),
        ((), "--video_resolution_buckets: memory depends on the size"),
        ((*SIZE, "--num_processes", "3", "--num_machines", "2"), "do not divide among 2 machines"),
        ((*SIZE, "--accelerate_config", str(tmp_path / "absent.yaml")), "cannot be read"),
    ):
        code, out, err = estimate(*flags)
        assert (code, out) == (2, "")
        assert said in err
    code, _, err = estimate(*SIZE, "--model_name", "ltx_video", repo=Path("someone/ltx-model"))
    assert code == 2
    assert "is not on this disk; fetch the config files" in err
