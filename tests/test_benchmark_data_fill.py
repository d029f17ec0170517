"""The benchmark of filling the cache runs. No times are checked here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.rotating


def test_both_ways_encode_every_clip(
    benchmark_script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    script = benchmark_script("data_fill")
    pytest.importorskip("decord")
    monkeypatch.setattr(script, "_FRAMES", 26)
    monkeypatch.setattr(script, "_WAYS", {"all": script._WAYS["and --dataloader_num_workers 1"]})
    monkeypatch.setattr(
        script, "_KINDS", [(file, (64, 128), (9, 32, 64 + 32 * k)) for k, (file, *_) in enumerate(script._KINDS)]
    )
    filled = []
    fill = script.fill
    monkeypatch.setattr(script, "fill", lambda *a, **k: filled.append(fill(*a, **k)) or filled[-1])
    rows, share = script.table(tmp_path, clips=2, repeats=1)
    assert filled == [2 + 1 + 2] * 2  # captions, the empty prompt, and clips; the first warms up
    assert [row.split("|")[1].strip() for row in rows] == ["2 clips", "---", "plain loop", "finetrainers prepare, all"]
    assert f"{share:.2f}" == rows[3].split("|")[4].strip() != "1.00"

    for share, code in ((0.3, 0), (0.4, 1)):
        monkeypatch.setattr(script, "table", lambda *_, share=share, **__: (["rows"], share))
        assert script.main([]) == code
    assert re.search(r" 0\.40 .*0\.33", capsys.readouterr().out)
