"""What is remembered of files: found again for the same version only, and never a reason to fail."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import av
import pytest

from finetrainers.data.inspect import file_facts
from finetrainers.data.inspect.file_facts import NOTHING, Facts, FileFacts
from finetrainers.data.inspect.probe import Probe
from finetrainers.data.reading.status import InvalidSample
from finetrainers.utils.append_log import AppendLog

PROBE = Probe(frames=17, fps=23.976, width=48, height=32, duration=0.7)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "caf\u00e9 \n.mp4"
    path.write_bytes(b"x" * 10)
    return path


def memory_of(clip: Path) -> FileFacts:
    return FileFacts.for_dataset(clip.parents[1] / "memory", clip.parent)


def segments(clip: Path) -> list[Path]:
    return sorted((clip.parents[1] / "memory").rglob("*.log"))


def test_what_is_learnt_in_parts_is_found_whole_by_another_process(clip: Path) -> None:
    stat = clip.stat()
    memory = memory_of(clip)
    assert memory.lookup(clip, stat) == NOTHING
    memory.store(clip, stat, Facts(header=PROBE))
    other = memory_of(clip)  # while the first is still open, as after a kill
    record = other.lookup(clip, stat)
    assert (record.header, record.full, record.digest) == (PROBE, None, None)
    other.store(clip, stat, Facts(full=("still",)))
    memory.store(clip, stat, Facts(digest="ab" * 32))  # which does not know of the other's record
    record = memory_of(clip).lookup(clip, stat)
    assert (record.header, record.full, record.digest) == (PROBE, ("still",), "ab" * 32)


@pytest.mark.parametrize("answer", [PROBE, InvalidSample("cut_off", 'ends "early"')])
def test_answers_of_every_kind_survive_the_disk(clip: Path, answer: Probe | InvalidSample) -> None:
    full = answer if isinstance(answer, InvalidSample) else ()
    memory_of(clip).store(clip, clip.stat(), Facts(header=answer, full=full))
    record = memory_of(clip).lookup(clip, clip.stat())
    assert (record.header, record.full) == (answer, full)


def test_another_version_of_a_file_is_not_known(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = clip.stat()
    memory_of(clip).store(clip, stat, Facts(header=PROBE))
    os.utime(clip, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert memory_of(clip).lookup(clip, clip.stat()) == NOTHING
    for content in (
        b"y" * 11,
        b"z" * 10,
    ):  # one that is put back with its times, as `cp -p` does, has another time of change
        clip.write_bytes(content)
        os.utime(clip, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert clip.stat().st_mtime_ns == stat.st_mtime_ns
        assert memory_of(clip).lookup(clip, clip.stat()) == NOTHING
    assert memory_of(clip).lookup(clip, stat) != NOTHING
    monkeypatch.setattr(file_facts, "PROBE_VERSION", 99)  # another way of probing
    assert memory_of(clip).lookup(clip, stat) == NOTHING


def test_cut_lines_and_rubbish_are_skipped(clip: Path) -> None:
    stat = clip.stat()
    memory = memory_of(clip)
    memory.store(clip, stat, Facts(header=PROBE))
    [file] = segments(clip)
    line = file.read_text()
    name, version = line.split()[0].encode(), file.name.partition("-")[0] + "-" + file.name.split("-")[1]
    (file.parent / f"{version}-9-x.log").write_bytes(
        b'\xff\n[]\n{"a": 1}\n["x", 1, 2, 3, ["burnt", "no such status"], null, null]\n'
        + name + b' [{"status":"burnt","reason":"no such status"},null,null]\n' + name + b" [null,null,3]\n"
        + name + b' [{"frames":1.5,"fps":2.0,"width":3,"height":4,"duration":5.0,"is_variable":false},null,null]\n'
        + name[:-2] + b" [null,[],null]\n" + line[: len(line) // 2].encode()
    )  # fmt: skip
    record = memory_of(clip).lookup(clip, stat)
    assert record == Facts(header=PROBE)


def test_facts_of_the_version_before_are_read(clip: Path) -> None:
    """0.1 kept probes under names below the dataset's folder, and digests alone, under the name of a version."""
    stat = clip.stat()
    version = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    probe = [17, 23.976, 48, 32, 0.7, False]
    bad = {"fate": "damaged", "reason": "decoding fails"}
    folder = memory_of(clip).directory
    folder.mkdir(parents=True)
    lines = [json.dumps([clip.name, *version, *found]) for found in ((probe, None, None), (probe, bad, "ab" * 20))]
    (folder / f"v{file_facts.PROBE_VERSION}-{av.__version__}-17-ab.jsonl").write_text("\n".join(lines) + "\n")
    assert memory_of(clip).lookup(clip, stat) == Facts(PROBE, InvalidSample("damaged", "decoding fails"))
    refused = json.dumps([clip.name, *version, ["no_video", "reason"], ["still"], None])
    (folder / f"v{file_facts.PROBE_VERSION}-{av.__version__}-18-ab.jsonl").write_text(refused + "\n")
    assert memory_of(clip).lookup(clip, stat) == Facts(InvalidSample("no_video", "reason"), ("still",))

    name = hashlib.sha256(json.dumps([str(clip), *version]).encode()).hexdigest()[:32]
    digests = clip.parents[1] / "digests"
    digests.mkdir()
    (digests / "0123456789abcdef.log").write_text(f"{name} {'cd' * 32}\n")
    assert FileFacts(digests).digest(clip) == "cd" * 32


def test_a_memory_that_cannot_be_written_is_said_once(clip: Path, caplog: pytest.LogCaptureFixture) -> None:
    (clip.parents[1] / "memory").write_text("a file where the folder should be")
    memory = memory_of(clip)
    for _ in range(3):
        memory.store(clip, clip.stat(), Facts(header=PROBE))
    assert caplog.text.count(str(memory.directory)) == 1
    assert memory.lookup(clip, clip.stat()) != NOTHING  # still known here


def test_quiet_files_are_put_together_and_old_ones_go(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = clip.stat()
    for k in range(12):
        memory = memory_of(clip)
        memory.store(clip.with_name(f"{k}.mp4"), stat, Facts(header=PROBE))
    assert len(segments(clip)) == 12
    hour_ago = stat.st_mtime - 7200
    for file in segments(clip)[:11]:
        os.utime(file, (hour_ago, hour_ago))
    folder = segments(clip)[0].parent
    old = folder.parent / ("0" * 32)
    foreign = folder.parent / "something else"
    stale = folder / "v0-old-1-x.jsonl"
    for path in (old, foreign):
        path.mkdir()
    stale.write_text("")
    for path in (old, foreign, stale):
        os.utime(path, (1, 1))
    names = [clip.with_name(f"{k}.mp4") for k in range(12)]
    memory_of(clip).tidy()
    assert len(segments(clip)) == 2  # one that is put together, and the one in which another process may be writing
    assert all(memory_of(clip).lookup(name, stat) != NOTHING for name in names)
    assert (old.exists(), foreign.exists(), stale.exists()) == (False, True, False)


def test_starts_forget_no_file_that_they_use(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of more files than the limit, two of one directory in turn; unused facts are removed first."""
    monkeypatch.setattr(file_facts, "_MOST_FACTS", 4)
    stat = clip.stat()

    def start(names: range) -> int:
        """Return how many files are unknown; they are probed, and an hour passes."""
        facts, unknown = memory_of(clip), 0
        for name in (clip.with_name(f"{k}.mp4") for k in names):
            if facts.lookup(name, stat) == NOTHING:
                unknown += 1
                facts.store(name, stat, Facts(header=PROBE))
        facts.tidy()
        for file in segments(clip):
            os.utime(file, (stat.st_mtime - 7200, stat.st_mtime - 7200))
        return unknown

    assert [start(range(10)) for _ in range(4)] == [10, 0, 0, 0]
    assert [start(names) for names in [range(10, 20), range(10)] * 2] == [10, 0, 0, 0]
    assert start(range(30, 39)) == 9
    assert len(memory_of(clip)) == 18  # twice as many as were used
    for _ in range(2):
        start(range(30, 31))
    assert len(memory_of(clip)) == 4  # the newest
    assert start(range(36, 39)) == 0


def test_without_recall_everything_is_new_and_remembered(clip: Path) -> None:
    memory_of(clip).store(clip, clip.stat(), Facts(header=InvalidSample("empty", "once")))
    fresh = FileFacts.for_dataset(clip.parents[1] / "memory", clip.parent, recall=False)
    assert fresh.lookup(clip, clip.stat()) == NOTHING
    fresh.store(clip, clip.stat(), Facts(header=PROBE))
    record = memory_of(clip).lookup(clip, clip.stat())
    assert record.header == PROBE


def test_files_of_other_processes_are_read_once_for_many_clips(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one for every process that has stored facts, so looking there for each clip would grow with both."""
    paths = [clip.with_name(f"{k}.mp4") for k in range(5)]
    for path in paths:
        path.write_bytes(path.name.encode())
    FileFacts(tmp_path / "digests").digest(paths[0])
    facts, read, news = FileFacts(tmp_path / "digests"), [], AppendLog.news
    monkeypatch.setattr(AppendLog, "news", lambda log: read.append(1) or news(log))
    facts.learn(paths)
    assert len(read) == 1
    assert [facts.digest(path) for path in paths] == [hashlib.sha256(path.name.encode()).hexdigest() for path in paths]
