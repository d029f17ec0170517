"""`finetrainers search-batch`: what it says of wrong options, and of runs that it cannot measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from finetrainers.cli import search_batch
from finetrainers.cli.main import main
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
    ("flags", "said"),
    [
        ((),
            ["--gpu: there is no GPU on this machine; say the memory to fit, such as 24GB, or measure with "
                "--measure_on_cpu"]),
        (
            ("--gpu", "24GB", "--output", "nowhere/found.json", "--rank", "x"),
            ["2 problems", "--output: no such directory", "--rank: not a whole number"],
        ),
        (
            ("--gpu", "24GB", "--blocks_to_swap", "auto", "--eval_steps", "3"),
            ["2 problems", "--blocks_to_swap auto: is chosen by the batch size", "--eval_num_items"],
        ),
        (("--estimate_only", "--measure_on_cpu"), ["--measure_on_cpu: measures, and --estimate_only does not"]),
        (("--gpu", "24GB", "--memory_budget", "24GB"), ["--memory_budget: chooses other options"]),
        (("--gpu", "24GB", "--num_processes", "3", "--num_machines", "2"), ["do not divide among 2 machines"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_estimated(
    flags: tuple[str, ...], said: list[str], search: Callable[..., tuple[int, str, str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code, out, err = search(*flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert [one for one in said if one not in err] == [], err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--measure_on_cpu",), "the data is not on this machine: nothing was measured"),
        (("--estimate_only", "--gpu", "8GB"), "--estimate_only: nothing was measured"),
        (("--gpu", "8GB"), "there is no GPU on this machine: nothing was measured"),
        (
            ("--gpu", "8GB", "--bucket_batch_sizes", "9x64x64=2"),
            "there is no GPU on this machine: nothing was measured",
        ),
    ],
)
def test_it_stops_at_the_estimate_and_says_why(
    flags: tuple[str, ...], said: str, search: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = search("--max_batch_size", "3", *flags)
    assert code == 0
    assert said in out
    assert "--bucket_batch_sizes 9x64x64=3" in out
    assert 'bucket_batch_sizes = ["9x64x64=3"]' in out
    assert "9x64x64: larger batches than --max_batch_size 3 may fit" in out
    assert ("bucket_batch_sizes of the configuration are not used" in err) == ("--bucket_batch_sizes" in flags)


def test_what_cannot_be_measured_here(
    search: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process is measured, whose weights are whole."""
    write_mp4(tmp_path / "clip.mp4", np.zeros((9, 64, 64, 3), dtype=np.uint8), fps=8)
    (tmp_path / "clip.txt").write_text("a dark room")
    data = ("--data_root", str(tmp_path), "--measure_on_cpu")
    for flags, why in (
        (("--num_processes", "4"), "this is planned for 4 processes, and one can be measured"),
        (("--fsdp", "full"), "a strategy that splits weights cannot go on after an OOM"),
    ):
        code, out, _ = search(*data, *flags)
        assert code == 0
        assert f"{why}: nothing was measured" in out
    monkeypatch.setattr(search_batch, "likely_device_type", lambda: "cuda")
    assert "--measure_on_cpu: this machine has a GPU" in search(*data)[2]
