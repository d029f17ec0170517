"""What `FINETRAINERS_FAULT` means, and that a specification that means nothing is refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from finetrainers.cli.main import main
from finetrainers.utils import faults
from finetrainers.utils.faults import Fault, fault_point, parse_faults

PACKAGE = Path(faults.__file__).parents[1]


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(faults.ENVIRONMENT, raising=False)
        faults.arm_faults()


def arm(monkeypatch: pytest.MonkeyPatch, text: str, *, rank: int = 0) -> None:
    monkeypatch.setenv(faults.ENVIRONMENT, text)
    monkeypatch.setenv("RANK", str(rank))
    faults.arm_faults()


def test_the_grammar() -> None:
    assert parse_faults(" kill@save.write:2, nan@loss:5+:rank=1,hang@data ") == (
        Fault("kill", "save.write", 2), Fault("nan", "loss", 5, ever=True, rank=1), Fault("hang", "data"),
    )  # fmt: skip
    assert parse_faults("") == parse_faults(" ") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill", r"'kill' is not KIND@POINT\[:COUNT\]\[:rank=RANK\]"),
        ("kill@save:0", "'kill@save:0' is not"),
        ("kill@save:rank=one", "'kill@save:rank=one' is not"),
        ("kill@save,", "'' is not"),
        ("kil@save", "no kind 'kil'; there are kill, term, hang, raise, oom, enospc, nan"),
        ("kill@writing", "no point 'writing'; there are start, load, resume, precompute, data, step, .*export"),
        ("nan@save", "nothing to poison at save; nan goes with loss, backward, reward"),
    ],
)
def test_what_means_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_faults(f"hang@data,{text}")


def test_a_command_refuses_it_before_anything_else_happens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(faults.ENVIRONMENT, "kill@writing")
    flags = ["--model_name", "ltx_video", "--pretrained_model_name_or_path", "demo://ltx", "--data_root", str(tmp_path)]
    assert main(["train", *flags, "--output_dir", str(tmp_path / "run")]) == 2
    assert "FINETRAINERS_FAULT: 'kill@writing': no point 'writing'; there are start, " in capsys.readouterr().err


def test_times_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "raise@step:2,raise@data:3+,raise@save:rank=1")
    fault_point("step")
    fault_point("save")
    with pytest.raises(RuntimeError, match="fault injected at step"):
        fault_point("step")
    fault_point("step")
    hit = []
    for visit in range(1, 6):
        try:
            fault_point("data")
        except RuntimeError:
            hit.append(visit)
    assert hit == [3, 4, 5]
    arm(monkeypatch, "raise@save:rank=1", rank=1)
    with pytest.raises(RuntimeError, match="at save"):
        fault_point("save")


def test_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "enospc@save,oom@step,nan@loss,nan@backward")
    with pytest.raises(OSError, match="No space left on device") as full:
        fault_point("save")
    assert full.value.errno == errno.ENOSPC
    with pytest.raises(torch.OutOfMemoryError):
        fault_point("step")
    weight = torch.ones(2, requires_grad=True)
    loss = weight.square().sum()
    fault_point("loss", (loss,))
    assert loss.isnan()
    loss.backward()  # autograd is not disturbed
    with pytest.raises(RuntimeError, match="nothing to poison here"):
        fault_point("backward")


def test_every_point_is_in_the_code_once() -> None:
    found = [
        point
        for path in PACKAGE.rglob("*.py")
        for point in faults.POINTS
        if f'fault_point("{point}"' in path.read_text(encoding="utf-8")
    ]
    assert sorted(found) == sorted(faults.POINTS)
