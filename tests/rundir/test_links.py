"""Links to the weights of checkpoints: relative, replaced, removed with the checkpoint, never replacing a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetrainers.rundir.links import link_weights, unlink_weights


def test_links_lead_to_weights_until_these_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = (tmp_path / "run" / "checkpoints" / name / "transformer" for name in ("step-1", "step-2"))
    for weights in (old, new):
        weights.mkdir(parents=True)
        (weights / "config.json").write_text(weights.parent.name)
    link, taken = tmp_path / "run" / "checkpoint-1-0", tmp_path / "run" / "mine"
    taken.write_text("mine")
    link_weights(old, [link])
    (tmp_path / "run").rename(tmp_path / "moved")
    link, taken, new = (tmp_path / "moved" / path.relative_to(tmp_path / "run") for path in (link, taken, new))
    assert (link / "config.json").read_text() == "step-1", "relative, so that the run may move"
    link_weights(new, [link, taken])
    assert (link / "config.json").read_text() == "step-2"
    assert str(taken) in caplog.text
    unlink_weights([link])
    assert link.is_symlink(), "its checkpoint is there"
    (new / "config.json").unlink()
    new.rmdir()
    unlink_weights([link, taken])
    assert not link.is_symlink()
    assert taken.read_text() == "mine"
