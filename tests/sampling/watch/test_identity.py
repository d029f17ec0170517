"""A watch follows one run: another one in its place, or in the folder of its clips, ends it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused_options

from finetrainers.config.given import RawOptions
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.watch import WatchSection
from finetrainers.rundir.identity import IDENTITY, read_identity, take_identity
from finetrainers.sampling.watch.plan import WATCHED, WatchPlan, plan_watch
from finetrainers.sampling.watch.server import Watch, WatchError, watch


def test_another_run_in_the_place_of_the_watched_one_ends_the_watch(
    options: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "config.toml").write_text(dump_toml(load_config(**options(validation_prompts="a cat"))))

    def plan() -> WatchPlan:
        return plan_watch(root, WatchSection(once=True), RawOptions())

    before = plan()
    watch(before, print)
    assert not (root / "watch" / "run" / WATCHED).exists()  # of a run of before
    take_identity(root)
    following = Watch(before, None, print)  # type: ignore[arg-type] - nothing is sampled
    following.look()
    assert read_identity(root / "watch" / "run") is None
    assert (root / "watch" / "run" / WATCHED).read_bytes() == (root / IDENTITY).read_bytes()
    watch(plan(), print)
    (root / IDENTITY).unlink()
    following.look()  # it is about to arrive
    take_identity(root)
    with pytest.raises(WatchError, match=re.escape(str(root))):
        following.look()
    with refused_options(("--output_dir", "occupied")):
        plan()
    (root / "watch" / "run" / WATCHED).unlink()
    watch(plan(), print)
