"""What `FINETRAINERS_FAULT` means, and that a specification that means nothing is refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from refusals import refused

from finetrainers.cli.main import main
from finetrainers.utils import faults
from finetrainers.utils.failures import Kind
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
    ("text", "kind", "values"),
    [
        ("kill", "invalid", ("'kill'", "KIND@POINT[:COUNT][:rank=RANK]")),
        ("kill@save:0", "invalid", ("'kill@save:0'", "KIND@POINT")),
        ("kill@save:rank=one", "invalid", ("'kill@save:rank=one'", "KIND@POINT")),
        ("kill@save,", "invalid", ("''", "KIND@POINT")),
        ("kil@save", "unknown", ("'kil'", *faults.KINDS)),
        ("kill@writing", "unknown", ("'writing'", *faults.POINTS)),
        ("nan@save", "unsupported", ("'nan@save'", "loss", "backward", "reward")),
    ],
)
def test_what_means_nothing_is_refused(text: str, kind: Kind, values: tuple[str, ...]) -> None:
    with refused(kind, *values):
        parse_faults(f"hang@data,{text}")


def test_a_command_refuses_it_before_anything_else_happens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(faults.ENVIRONMENT, "kill@writing")
    flags = ["--model_name", "ltx_video", "--pretrained_model_name_or_path", "demo://ltx", "--data_root", str(tmp_path)]
    assert main(["train", *flags, "--output_dir", str(tmp_path / "run")]) == 2
    assert "FINETRAINERS_FAULT: 'kill@writing'" in capsys.readouterr().err


def test_times_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "raise@step:2,raise@data:3+,raise@save:rank=1")
    fault_point("step")
    fault_point("save")
    with pytest.raises(RuntimeError, match="step"):
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
    with pytest.raises(RuntimeError, match="save"):
        fault_point("save")


def test_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "enospc@save,oom@step,nan@loss,nan@backward")
    with pytest.raises(OSError, match=r"\(.* save\)") as full:
        fault_point("save")
    assert full.value.errno == errno.ENOSPC
    with pytest.raises(torch.OutOfMemoryError):
        fault_point("step")
    weight = torch.ones(2, requires_grad=True)
    loss = weight.square().sum()
    fault_point("loss", (loss,))
    assert loss.isnan()
    loss.backward()  # autograd is not disturbed
    with pytest.raises(RuntimeError, match="backward: "):
        fault_point("backward")


def test_every_point_is_in_the_code_once() -> None:
    found = [
        point
        for path in PACKAGE.rglob("*.py")
        for point in faults.POINTS
        if f'fault_point("{point}"' in path.read_text(encoding="utf-8")
    ]
    assert sorted(found) == sorted(faults.POINTS)
