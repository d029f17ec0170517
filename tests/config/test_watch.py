"""Presets of `finetrainers watch`: their sizes, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetrainers.config.errors import ConfigError
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
    with pytest.raises(ConfigError, match="--presets: high3600s"):
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
    with pytest.raises(ConfigError) as refused:
        read_presets(section)
    text = str(refused.value)
    for part in (
        "unknown preset 'lwo4s'; did you mean 'low4s'?", "unknown preset 'mid4s'", "low0s: seconds",
        "high99999999999s: seconds",
        "--preset: unknown preset 'x'", "'' is not NAME=", "--preset y: size:",
        "run has a meaning already", "presets.a: steps", "unknown key 'step'; did you mean 'steps'?",
        "presets.b/c: the name",
        "low4s has a meaning already",
    ):  # fmt: skip
        assert part in text, text
    for wrong in ("not toml [", "x = 1"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"presets\.toml"):
            read_presets(WatchSection(presets_file=file))
    with pytest.raises(ConfigError, match="no such file"):
        read_presets(WatchSection(presets_file=tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="names none"):
        read_presets(WatchSection(presets=","))
