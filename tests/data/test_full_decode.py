"""A file can end the process that decodes it, but not the check."""

from __future__ import annotations

from pathlib import Path

import pytest
from isolated_tasks import misbehave

from finetrainers.data.inspect import full_decode, probe_all
from finetrainers.data.inspect.file_facts import FileFacts
from finetrainers.data.inspect.full_decode import Lost, decode_files, run_isolated
from finetrainers.data.inspect.probe import Probe, probe
from finetrainers.data.inspect.probe_all import ProbeOptions, probe_items
from finetrainers.data.reading.items import Item
from finetrainers.data.reading.status import InvalidSample


@pytest.mark.rotating
def test_crashes_hangs_and_bombs_reject_only_one_call() -> None:
    calls = [("well",), ("crash",), ("hang",), ("end",), ("bomb",), ("well again",)]
    results = dict(run_isolated(misbehave, calls, limits_s=[30, 30, 0.5, 30, 30, 30], jobs=2))
    assert {index: result for index, result in results.items() if isinstance(result, str)} == {
        0: "did well",
        4: "out of memory",
        5: "did well again",
    }
    for index, value in ((1, "(SIGSEGV)"), (2, " 0 s"), (3, " 3)")):
        result = results[index]
        assert isinstance(result, Lost)
        assert result.how.endswith(value)


def test_a_file_whose_decoder_does_not_end_is_named(
    tmp_path: Path, make_video, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make_video(tmp_path / "clip.mp4")
    found = probe(clip)
    monkeypatch.setattr(full_decode, "_PATIENCE_S", -1.0)
    [(path, result)] = decode_files([(clip, "video", found)], jobs=1)
    assert path == clip
    assert isinstance(result, InvalidSample)
    assert result.status == "decoder_failed"
    assert result.reason.endswith(" s")
    monkeypatch.undo()
    assert list(decode_files([(clip, "video", found)], jobs=4)) == [(clip, ())]


def test_a_disk_that_is_away_is_not_remembered(tmp_path: Path, make_video, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = make_video(tmp_path / "clip.mp4")
    items = [Item(0, clip, ("x",), "video", "clip.mp4", state=clip.stat())]
    answers = [
        InvalidSample("unreadable", "cannot be read: Input/output error"),
        InvalidSample("damaged", "decoding fails"),
    ]

    def look(options: ProbeOptions) -> Probe | InvalidSample:
        memory = FileFacts.for_dataset(tmp_path / "memory", tmp_path)
        [found] = probe_items(items, facts=memory, max_pixels=10**9, options=options)
        return found.unusable or found.header

    for answer, remembered in zip(answers, (False, True), strict=True):
        monkeypatch.setattr(probe_all, "decode_files", lambda *_, answer=answer, **__: [(clip, answer)])
        assert look(ProbeOptions(decode=True)) == answer
        assert (look(ProbeOptions()) == answer) is remembered


def test_nothing_to_decode_starts_no_process() -> None:
    assert list(decode_files([])) == []
