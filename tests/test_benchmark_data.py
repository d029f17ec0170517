"""The benchmarks of data run, and say whether an aim was missed. No times are checked here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytestmark = pytest.mark.rotating


def test_memory_is_watched_at_the_end_of_every_epoch(
    benchmark_script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    script = benchmark_script("data_memory")
    script.write_clips(tmp_path / "clips", script.training_scenes(3, seed=0, look="plain", motions=None))
    held = iter(range(100, 200))
    monkeypatch.setattr(script, "held_mib", lambda: float(next(held)))
    found = script.memory_by_epoch(
        tmp_path, epochs=3, clips=3, batch_size=2, output_dir=str(tmp_path / "run"), precompute_conditions=True
    )
    assert found == [100, 101, 102]
    capsys.readouterr()

    monkeypatch.setattr(script, "write_clips", lambda *_: None)
    for last, code in ((20.0, 0), (20.1, 1)):
        monkeypatch.setattr(script, "memory_by_epoch", lambda *_, last=last, **__: [9.0, 1.0, 4.0, last])
        assert script.main(["--epochs", "4"]) == code
    assert " epoch 3 on: 16.1 MiB (limit: 16)" in capsys.readouterr().out


def test_one_command_has_all_parts(
    benchmark_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = benchmark_script("data")
    asked = []

    def load(name: str) -> SimpleNamespace:
        def main(arguments: list[str]) -> int:
            asked.append((name, *arguments))
            return int(arguments == ["--startup"])

        return SimpleNamespace(main=main)

    monkeypatch.setattr(script.importlib, "import_module", load)
    with pytest.raises(SystemExit) as ended:
        script.main(["--memory", "--check", "--wait"])
    assert ended.value.code == 0
    assert asked == [("data_check",), ("data_cache", "--wait"), ("data_memory",)]
    with pytest.raises(SystemExit) as ended:
        script.main(["--startup"])
    assert ended.value.code == 1
