"""`finetrainers cache`: what lies there, damage by name and exit code, and that nothing in use is removed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import time
from pathlib import Path

import pytest
import torch
from refusals import refused_command

from finetrainers.cli.main import main
from finetrainers.data.cache import store
from finetrainers.data.cache.store import TensorCache
from finetrainers.data.inspect.file_facts import FileFacts


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    """Three captions and two clips, in a run's own cache."""
    made = TensorCache(tmp_path / "precomputed" / "tensors")
    for k in range(3):
        about = {"kind": "text", "of": f"caption {k}", "model": "some text", "identity": "abc"}
        made.put(made.key(text=k), {"x": torch.full((10,), float(k))}, about)
    for k in range(2):
        about = {"kind": "video", "of": f"{k}.mp4", "model": "some VAE", "identity": "def", "bucket": "9x64x64"}
        made.put(made.key(video=k), {"x": torch.full((1000,), float(k))}, about)
    return made


def use(cache: TensorCache, key: str, *, days_ago: float) -> None:
    """As if the entry had been used then for the last time."""
    then = time.time() - days_ago * 86400
    os.utime(cache.path(key), (then, then))


def test_ls(cache: TensorCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use(cache, cache.key(text=0), days_ago=40)
    assert main(["cache", "ls", str(tmp_path)]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["kind", "entries", "size", "last", "read", "model"]
    assert rows[0].split() == ["video", "2", rows[0].split()[2], "KiB", "0", "s", "some", "VAE", "[def]"]
    assert rows[1].startswith("text            3")
    assert "0 s-40 d" in rows[1]
    assert rows[2].startswith("all             5")
    assert " 0 " in rows[3]

    assert main(["cache", "ls", "--json", str(tmp_path / "precomputed")]) == 0
    shown = json.loads(capsys.readouterr().out)
    files = list((tmp_path / "precomputed" / "tensors").glob("??/*.safetensors"))
    assert shown["entries"] == len(files) == 5
    assert shown["size_bytes"] == sum(file.stat().st_size for file in files)
    assert [(g["kind"], g["model"], g["identity"], g["entries"]) for g in shown["groups"]] == [
        ("video", "some VAE", "def", 2), ("text", "some text", "abc", 3),
    ]  # fmt: skip
    assert time.time() - shown["groups"][1]["oldest_use"] > 39 * 86400

    for command in (["ls"], ["verify"], ["prune", "--older_than", "1"]):
        assert refused_command(["cache", *command, tmp_path / "nothing"]) == (2, [("DIR", "not_found")])


def test_verify_names_what_is_damaged_and_repairs(
    cache: TensorCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "5 entries read, 0 damaged\n"
    flipped, cut, gone, poisoned = (cache.key(video=0), cache.key(video=1), cache.key(text=0), cache.key(text=1))
    data = bytearray(cache.path(flipped).read_bytes())
    data[-9] ^= 1
    cache.path(flipped).write_bytes(data)
    cache.path(cut).write_bytes(cache.path(cut).read_bytes()[:100])
    cache.path(gone).unlink()
    cache.put(poisoned, {"x": torch.tensor([1.0, torch.nan])}, {"of": "caption 1"})
    left = cache.path(flipped).with_name(".half.tmp")
    fresh = cache.path(cut).with_name(".being-written.tmp")
    for file in (left, fresh):
        file.write_bytes(b"half an entry")
    os.utime(left, (0, 0))

    assert main(["cache", "verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "4 entries read, 4 damaged"
    for start, reason in (
        (f"{flipped} (0.mp4): ", "checksum"), (f"{poisoned} (caption 1): x ", "NaN"), (f"{gone}: ", "index"), (cut, ""),
    ):  # fmt: skip
        assert [line for line in lines if line.startswith(start) and reason in line], (start, lines)
    assert left.exists()
    by_index = TensorCache(cache.directory, verified_bytes=0)
    assert by_index.missing([flipped, cut, gone, poisoned]) == []

    cache.hold()  # by a run
    assert refused_command(["cache", "verify", "--repair", tmp_path]) == (2, [("--repair", "occupied")])
    cache.release()
    assert main(["cache", "verify", "--repair", str(tmp_path)]) == 1
    assert "removed 4;" in capsys.readouterr().out
    assert not left.exists()
    assert fresh.exists()
    assert sorted(TensorCache(cache.directory).missing([flipped, cut, gone, poisoned, cache.key(text=2)])) == sorted(
        [flipped, cut, gone, poisoned]
    )
    assert main(["cache", "verify", str(tmp_path)]) == 0


def test_prune_removes_what_was_not_used_for_long(
    cache: TensorCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [cache.key(text=0), cache.key(video=0)]
    for key in old:
        use(cache, key, days_ago=31)
    use(cache, cache.key(text=1), days_ago=29)
    directory = str(tmp_path)
    assert refused_command(["cache", "prune", directory]) == (2, [("prune", "required")])
    assert refused_command(["cache", "prune", directory, "--older_than", "-1"]) == (2, [("--older_than", "invalid")])
    capsys.readouterr()
    assert main(["cache", "prune", directory, "--older_than", "30", "--dry_run"]) == 0
    *paths, summary = capsys.readouterr().out.splitlines()
    assert sorted(paths) == sorted(str(cache.path(key)) for key in old)
    assert summary.startswith("2 entries, ")
    assert all(cache.path(key).exists() for key in old)

    user = TensorCache(cache.directory)
    user.hold()
    assert refused_command(["cache", "prune", directory, "--older_than", "30"]) == (2, [("prune", "occupied")])
    user.release()
    # Two more segments, to be merged.
    for k in (5, 6):
        TensorCache(cache.directory).put(cache.key(text=k), {"x": torch.ones(1)})
    assert main(["cache", "prune", directory, "--older_than", "30"]) == 0
    assert "2 entries" in capsys.readouterr().out
    assert not any(cache.path(key).exists() for key in old)
    assert len(list((cache.directory / "index").iterdir())) == 1
    kept = [cache.key(text=k) for k in (1, 2, 5, 6)]
    assert TensorCache(cache.directory).missing([*kept, *old]) == old
    assert cache.missing([*kept, *old]) == [*old] or cache.get(old[0]) is None  # a process that knew them finds out


def test_a_cache_is_in_use_for_as_long_as_any_process_holds_it(cache: TensorCache) -> None:
    first, second = TensorCache(cache.directory), TensorCache(cache.directory)
    first.hold()
    second.hold()
    first.release()
    assert not may_prune(cache)
    copy = pickle.loads(pickle.dumps(second))  # as in a worker: the run itself holds it
    del second
    assert may_prune(copy)
    child = os.fork()
    if child == 0:
        third = TensorCache(cache.directory)
        third.hold()
        os._exit(0 if not may_prune(cache) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert may_prune(cache)  # however a process goes, it holds nothing any more


def may_prune(cache: TensorCache) -> bool:
    return main(["cache", "prune", str(cache.directory.parent), "--older_than", "1000", "--dry_run"]) == 0


@pytest.mark.parametrize("system", ["flock", "SDEWindows"])
def test_without_locks_only_what_was_long_unused_can_go(
    system: str, cache: TensorCache, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if system == "SDEWindows":
        monkeypatch.setattr(store, "fcntl", None)
    else:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    cache.hold()
    use(cache, cache.key(text=0), days_ago=3)
    assert refused_command(["cache", "prune", tmp_path, "--older_than", "1"]) == (2, [("prune", "occupied")])
    assert "--older_than 2 " in capsys.readouterr().err
    assert main(["cache", "prune", str(tmp_path), "--older_than", "2"]) == 0
    assert "1 entry," in capsys.readouterr().out


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["cache", "--help"])
    shown = capsys.readouterr().out
    for word in ("become stale", "--older_than 30", "--repair", "--keep a.toml b.toml", "--precompute_dir"):
        assert word in shown


def test_files_that_are_remembered_are_counted(
    cache: TensorCache, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetrainers.data.inspect.file_facts._SETTLED_S", -1.0)
    FileFacts(tmp_path / "precomputed" / "digests").digest(Path(__file__))
    assert main(["cache", "ls", str(tmp_path)]) == 0
    assert " 1 " in capsys.readouterr().out.splitlines()[-1]
