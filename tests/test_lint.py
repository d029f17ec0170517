"""The code passes the tools that pyproject.toml configures; the same ones run before a commit."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", "--follow-imports=skip"],
        ["codespell"],
    ],
    ids=["ruff", "format", "mypy", "codespell"],
)
@pytest.mark.timeout(180)
def test_tool_is_content(command):
    result = subprocess.run(
        [sys.executable, "-m", *_module(command)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _module(command: list[str]) -> list[str]:
    return ["codespell_lib", *command[1:]] if command[0] == "codespell" else command
