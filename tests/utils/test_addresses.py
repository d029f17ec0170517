"""Addresses `module:attribute`: also of modules in the working directory, which a console script does not search."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from finetrainers.config.rewards import RewardEntry, parse_reward
from finetrainers.rewards.registry import reward_problems
from finetrainers.utils.addresses import resolve


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules, in which a console script was started."""
    (tmp_path / "my_scores.py").write_text(
        "def redness(videos, prompts):\n    return videos[:, :, 0].mean(dim=(1, 2, 3))\n"
    )
    (tmp_path / "my_broken.py").write_text("import my_missing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    for name in ("my_scores", "my_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def problems_of(reward: str) -> list[str]:
    return [str(error) for error in reward_problems(RewardEntry.model_validate(parse_reward(reward)))]


def test_modules_of_the_working_directory_are_found(working_directory: Path) -> None:
    assert problems_of("my_scores:redness") == []
    assert sys.path[-1] == str(working_directory)  # at the end, where it hides nothing
    assert resolve("my_scores:redness").__name__ == "redness"
    assert sys.path.count(str(working_directory)) == 1


def test_what_is_missing_is_named(working_directory: Path) -> None:
    [problem] = problems_of("my_scroes:redness")
    assert problem.startswith("reward 'my_scroes:redness': ")
    assert problem.endswith(" 'my_scroes'")
    assert str(working_directory) not in sys.path
    [problem] = problems_of("my_broken:redness")
    assert problem.startswith("reward 'my_broken:redness': ")
    assert problem.endswith(" 'my_missing'")
    [problem] = problems_of("my_scores:blueness")
    assert problem.startswith("reward 'my_scores:blueness': ")
    assert problem.endswith(" my_scores has no 'blueness'")
    for address in ("../x.py:f", ".x:f"):
        [problem] = problems_of(address)
        assert problem.startswith(f"reward {address!r}: ")
