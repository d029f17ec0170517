"""Libraries that are too old or missing are said in one sentence, with the command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from finetrainers.cli.main import main
from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.plan.preflight import preflight
from finetrainers.utils import exit_codes, versions

ROOT = Path(__file__).parents[2]


def test_what_is_too_old_or_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0a0+nv26", "peft": "0.17.0", "diffusers": "0.42.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise versions.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "version", version)
    needed = [
        "torch>=2.13",
        "peft>=0.18",
        "diffusers>=0.40",
        "av>=17.1",
        "tomli>=2; python_version < '3'",
        "rich; extra == 'x'",
    ]
    problem = versions.version_problem(needed)
    assert problem is not None
    assert problem.startswith("peft 0.17.0 is not supported; av is not installed; ")
    assert problem.endswith(": pip install 'peft>=0.18' 'av>=17.1'")
    assert versions.version_problem(["torch>=2.13"]) is None


def test_a_run_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the commands before anything else is imported, and by the library."""
    monkeypatch.setattr(versions, "_own_problem", versions._own_problem.__wrapped__)  # which remembers its answer
    monkeypatch.setattr(versions, "requires", lambda name: ["packaging>=99"])
    config = load_config(model_name="ltx_video", pretrained_model_name_or_path="someone/model", data_root="clips")
    with pytest.raises(ConfigError, match=r"packaging \d.* pip install 'packaging>=99'"):
        preflight(config)
    for command in (["train", "--lr", "1e-4"], ["prepare"], ["quickstart", "nowhere"]):
        assert main(command) == exit_codes.CONFIGURATION
        assert re.search(r"\b1 problem .*:\n  - packaging \d.* pip install 'packaging>=99'", capsys.readouterr().err)


def test_this_environment_has_what_the_package_asks_for() -> None:
    assert {"torch", "peft"} <= {Requirement(text).name for text in versions.requires("finetrainers") or []}
    assert versions.version_problem() is None


def test_the_oldest_libraries_that_are_tried_are_the_bounds() -> None:
    """`.ci/lowest.txt` is what setup.py allows, but for torch, of which there is one build."""
    stated = re.search(r"install_requires=\[(.*?)\n    \]", (ROOT / "setup.py").read_text(), re.DOTALL)
    assert stated is not None
    bounds = {
        r.name: r.specifier for text in re.findall(r'"([^"]+)"', stated[1]) if (r := Requirement(text)).marker is None
    }
    lines = (ROOT / ".ci" / "lowest.txt").read_text().split()
    tried = {r.name: next(iter(r.specifier)).version for r in map(Requirement, lines)}
    assert bounds.keys() == tried.keys()
    for name, version in tried.items():
        [bound] = bounds[name]
        assert bound.operator == ">="
        if name != "torch":
            assert bounds[name].contains(version)
            assert Version(version).release[: len(Version(bound.version).release)] == Version(bound.version).release, (
                name
            )
