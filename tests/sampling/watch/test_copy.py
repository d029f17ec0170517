"""A run that is copied by `sync` over a real sshd while its copy is watched."""

from __future__ import annotations

import getpass
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetrainers.cli.main import main
from finetrainers.rundir.best import best_checkpoint

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


@pytest.mark.rotating
@needs_rsync
def test_a_copy_is_watched_while_it_arrives(
    trained: Path, drawn: list[str], ssh: str, python: Any, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    copy = tmp_path / "there" / "copy"
    sync = ["sync", str(trained), f"{getpass.getuser()}@127.0.0.1:{copy}", "--once", "--rsh", ssh]
    watch = ["watch", str(copy), "--once", "--reward", "brightness", "--best_by", "brightness"]
    half = python("-m", "finetrainers", *sync, FINETRAINERS_FAULT="kill@sync.manifest:2")
    assert half.wait() == -9, half.stderr
    assert main(watch) == 0
    out = capsys.readouterr().out
    assert re.search(r"step 2: .*manifest\.json ", out)
    assert "step 1, run: 2 clips" in out
    assert best_checkpoint(copy) == copy / "checkpoints" / "step-1"
    assert best_checkpoint(trained) is None  # of the copy alone

    # The rest arrives, the training deletes what it need not keep, and nothing of the watch is touched.
    assert main(sync) == 0
    shutil.rmtree(trained / "checkpoints" / "step-1")
    assert main([*sync, "--prune"]) == 0
    assert {path.name for path in (copy / "checkpoints").iterdir()} == {"best", "step-1", "step-2"}
    capsys.readouterr()
    assert main(watch) == 0
    out = capsys.readouterr().out
    assert "step 2, run: 2 clips" in out
    assert "manifest.json" not in out
    assert len(drawn) == 4
    events = EventAccumulator(str(copy / "logs" / "finetrainers"))
    events.Reload()
    assert [one.step for one in events.Scalars("watch/run/brightness")] == [1, 2]
    assert [one.step for one in events.Scalars("loss")] == [1, 2]
    page = (copy / "watch" / "run" / "index.html").read_text()
    assert "step 1" in page
    assert "step 2" in page
