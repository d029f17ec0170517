"""`finetrainers search-batch`: what it says of wrong options, and of runs that it cannot measure."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from refusals import refused_command

from finetrainers.cli import search_batch
from finetrainers.cli.main import main
from finetrainers.utils.failures import Kind
from finetrainers.utils.video import write_mp4


@pytest.fixture
def search(tiny_repo: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*flags: str) -> tuple[int, str, str]:
        model = ("--pretrained_model_name_or_path", str(tiny_repo("ltx_video")))
        capsys.readouterr()  # what libraries print while the model is made, if nothing has imported them yet
        code = main(["search-batch", *model, "--video_resolution_buckets", "9x64x64", *flags])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [("--gpu", "required")]),
        ("--gpu 24GB --output nowhere/found.json", [("--output", "not_found")]),
        ("--gpu 24GB --output .", [("--output", "invalid")]),
        ("--gpu 24GB --output mine.json", [("--output", "occupied")]),
        ("--gpu 24GB --blocks_to_swap auto", [("--blocks_to_swap auto", "conflict")]),
        ("--estimate_only --measure_on_cpu --gpu 24GB", [("--measure_on_cpu", "conflict")]),
        ("--gpu 24GB --memory_budget 24GB", [("--memory_budget", "conflict")]),
        ("--gpu 24GB --dry_run", [("--dry_run", "unsupported")]),
        ("--gpu 24GB --num_processes 3 --num_machines 2", [("--num_processes", "conflict")]),
        ("--list_models", [("--list_models", "unknown")]),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_estimated(
    flags: str, expected: list[tuple[str, Kind]], tiny_repo: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text("mine")
    model = ["--pretrained_model_name_or_path", tiny_repo("ltx_video"), "--video_resolution_buckets", "9x64x64"]
    capsys.readouterr()
    assert refused_command(["search-batch", *model, *flags.split()]) == (2, expected)
    assert capsys.readouterr().out == ""


def test_problems_of_the_command_and_of_the_run_come_together(search: Callable[..., tuple[int, str, str]]) -> None:
    for flags, places in (
        (("--output", "nowhere/found.json", "--rank", "x"), ["--output", "--rank"]),
        (("--blocks_to_swap", "auto", "--eval_steps", "3"), ["--blocks_to_swap auto", "--eval_steps"]),
    ):
        code, out, err = search("--gpu", "24GB", *flags)
        assert (code, out) == (2, "")
        assert sorted(line[4:].partition(":")[0] for line in err.splitlines()[1:]) == places, err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--measure_on_cpu",), r"data .*: nothing "),
        (("--estimate_only", "--gpu", "8GB"), "--estimate_only: nothing "),
        (("--gpu", "8GB"), "no GPU: nothing "),
        (("--gpu", "8GB", "--bucket_batch_sizes", "9x64x64=2"), "no GPU: nothing "),
    ],
)
def test_it_stops_at_the_estimate_and_says_why(
    flags: tuple[str, ...], said: str, search: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = search("--max_batch_size", "3", *flags)
    assert code == 0
    assert re.search(said, out)
    assert "--bucket_batch_sizes 9x64x64=3" in out
    assert 'bucket_batch_sizes = ["9x64x64=3"]' in out
    assert re.search("^9x64x64: .*--max_batch_size 3 ", out, re.MULTILINE)
    assert ("ignoring bucket_batch_sizes " in err) == ("--bucket_batch_sizes" in flags)


def test_what_cannot_be_measured_here(
    search: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process is measured, whose weights are whole."""
    write_mp4(tmp_path / "clip.mp4", np.zeros((9, 64, 64, 3), dtype=np.uint8), fps=8)
    (tmp_path / "clip.txt").write_text("a dark room")
    data = ("--data_root", str(tmp_path), "--measure_on_cpu")
    for flags, why in (
        (("--num_processes", "4"), " 4 processes,"),
        (("--fsdp", "full"), " OOM: "),
    ):
        code, out, _ = search(*data, *flags)
        assert code == 0
        assert why in out
    monkeypatch.setattr(search_batch, "likely_device_type", lambda: "cuda")
    assert refused_command(["search-batch", *data])[1][0] == ("--measure_on_cpu", "unsupported")
