"""Presets of `finetrainers watch`: their sizes, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refused_options

from finetrainers.config.geometry import Geometry
from finetrainers.config.watch import Preset, WatchSection, class_size, read_presets


@pytest.mark.parametrize(
    ("name", "size"),
    [("low4s", (97, 256, 352)), ("high4s", (97, 512, 704)), ("low16s", (385, 256, 352)), ("high1s", (25, 512, 704))],
)
def test_classes_follow_from_the_run_and_the_model(name: str, size: tuple[int, int, int]) -> None:
    geometry = Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=24)
    assert class_size(name, (49, 512, 704), geometry, 24) == size
    assert geometry.problems(*size) == []
    assert class_size("low1s", (9, 32, 40), geometry, 24)[1:] == (32, 32)
    assert class_size("high4s", (49, 512, 704), geometry, 8) == (33, 512, 704)
    with refused_options(("--presets", "too_large")):
        class_size("high3600s", (49, 512, 704), geometry, 1000)


def test_presets_are_read_from_names_flags_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "presets.toml"
    file.write_text('[presets.wide]\nsize = "49x512x1024"\nsteps = 30\n[presets.idle]\nguidance = 3\n')
    section = WatchSection(presets="low4s, wide,run", presets_file=file, preset=["tiny=9x32x64,guidance=5"])
    wide, tiny = Preset(size=(49, 512, 1024), steps=30), Preset(size=(9, 32, 64), guidance=5)
    assert read_presets(section) == {"low4s": None, "wide": wide, "run": Preset(), "tiny": tiny}
    assert list(read_presets(section)) == ["low4s", "wide", "run", "tiny"]
    assert read_presets(WatchSection(preset=["tiny=9x32x64,guidance=5"])) == {"tiny": tiny}
    assert read_presets(WatchSection()) == {"run": Preset()}
    names = WatchSection(presets_file=file, preset=["low4s", "wide, high4s", "tiny=9x32x64,guidance=5"])
    assert read_presets(names) == {"low4s": None, "wide": wide, "high4s": None, "tiny": tiny}
    assert list(read_presets(WatchSection(presets="run,low4s", preset=["high4s"]))) == ["run", "low4s", "high4s"]


def test_all_that_is_wrong_is_told(tmp_path: Path) -> None:
    file = tmp_path / "presets.toml"
    file.write_text('[presets.a]\nsteps = 0\nstep = 1\n[presets."b/c"]\n[presets.low4s]\n')
    section = WatchSection(
        presets="lwo4s,mid4s,low0s,high99999999999s", presets_file=file, preset=["x", "", "y=9x9", "run=9x32x32"]
    )
    expected = [
        (f"{file} presets.a", "invalid", "steps: "),
        (f"{file} presets.a", "unknown", " 'steps'?"),
        (f"{file} presets.b/c", "invalid", "'-'"),
        (f"{file} presets.low4s", "conflict", "low4s "),
        ("--preset", "invalid", "got ''"),
        ("--preset y", "invalid", "size: "),
        ("--preset run", "conflict", "run "),
        ("--presets", "unknown", " 'low4s'?"),
        ("--presets", "unknown", "'mid4s'"),
        ("--presets", "invalid", "low0s: "),
        ("--presets", "invalid", "high99999999999s: "),
        ("--preset", "unknown", "'x'"),
    ]
    with refused_options(*((where, kind) for where, kind, _ in expected)) as refused:
        read_presets(section)
    for where, kind, value in expected:
        assert any(
            (problem.where, problem.kind) == (where, kind) and value in problem.message
            for problem in refused.value.problems
        ), value
    for text, kind in (("not toml [", "unreadable"), ("x = 1", "required")):
        file.write_text(text)
        with refused_options((file, kind)):
            read_presets(WatchSection(presets_file=file))
    with refused_options(("--presets_file", "not_found")) as refused:
        read_presets(WatchSection(presets_file=tmp_path / "none.toml"))
    assert "none.toml" in str(refused.value)
    with refused_options(("--presets", "required")):
        read_presets(WatchSection(presets=","))
