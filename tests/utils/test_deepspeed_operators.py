"""Operators that DeepSpeed compiles at first use are named before, and not once they are compiled."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from finetrainers.utils.deepspeed_operators import note_compiling, operators_to_compile

pytest.importorskip("deepspeed")


def test_what_is_not_compiled_yet_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["cpu_adam", "cpu_lion", "no_such_operator"]
    monkeypatch.setattr("deepspeed.ops.__compatible_ops__", {"cpu_adam": True, "cpu_lion": True})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert operators_to_compile(names) == ["cpu_adam", "cpu_lion"]
    library = tmp_path / "py311_cpu" / "cpu_adam" / "cpu_adam.so"
    library.parent.mkdir(parents=True)
    library.touch()
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        note_compiling(["cpu_adam"])
        assert caplog.messages == []
        monkeypatch.setenv("RANK", "1")
        note_compiling(names)
        assert caplog.messages == []
        monkeypatch.setenv("RANK", "0")
        note_compiling(names)
    [message] = caplog.messages
    assert "cpu_lion" in message
    assert "cpu_adam" not in message
