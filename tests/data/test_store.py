"""The store of computed tensors: exact, never damaged unnoticed, found again without asking for each file."""

from __future__ import annotations

import errno
import logging
import math
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from finetrainers.data.cache import store as cache_module
from finetrainers.data.cache.maintenance import CacheMaintenance, Damage
from finetrainers.data.cache.model_fingerprint import model_fingerprint
from finetrainers.data.cache.store import CacheError, TensorCache, is_finite, read_about
from finetrainers.data.inspect.file_facts import FileFacts
from finetrainers.utils.append_log import AppendLog


def name(number: int) -> str:
    return sha256(str(number).encode()).hexdigest()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is asked of the file system for entries: headers opened, folders listed."""
    counted: Counter[str] = Counter()

    def counting(module: Any, function: str) -> Callable[..., Any]:
        original = getattr(module, function)

        def call(*arguments: Any, **options: Any) -> Any:
            counted[function] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(module, function, call)
        return call

    counting(cache_module, "open_tensors")
    counting(cache_module.os, "scandir")
    return counted


def test_values_come_back_exactly(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path)
    tensors = {"a": torch.randn(2, 3).to(torch.bfloat16), "b": torch.randn(4, 4).t(), "m": torch.tensor([True, False])}
    key = cache.key(kind="x", bucket=(9, 32, 48))
    assert cache.missing([key])
    assert cache.get(key) is None
    size = cache.put(key, tensors, {"kind": "x", "of": "a thing"})
    assert not cache.missing([key])
    found = cache.get(key)
    assert found is not None
    assert found.keys() == tensors.keys()
    for part, tensor in tensors.items():
        assert found[part].dtype == tensor.dtype
        assert torch.equal(found[part], tensor)
    files = [p for p in tmp_path.rglob("*") if p.is_file() and p.parent.name != "index"]
    assert files == [cache.path(key)]
    assert size == files[0].stat().st_size
    assert read_about(files[0]).items() >= {"kind": "x", "of": "a thing"}.items()


def test_every_part_changes_the_key() -> None:
    base = {"kind": "video", "bucket": (9, 32, 48), "fps": 8.0, "seed": None}
    keys = {TensorCache.key(**base)}
    for change in ({"bucket": (9, 48, 32)}, {"fps": 8.5}, {"seed": 0}, {"kind": "text"}):
        keys.add(TensorCache.key(**{**base, **change}))
    assert len(keys) == 5
    assert TensorCache.key(a=1, b=2) == TensorCache.key(b=2, a=1)


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "text"])
def test_damage_is_detected_logged_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    TensorCache(tmp_path).put(name(1), {"x": torch.randn(100)})
    path = TensorCache(tmp_path).path(name(1))
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    broken = {"cut": bytes(data[:-50]), "empty": b"", "flipped": bytes(data), "text": b"hello"}[damage]
    path.write_bytes(broken)
    reader = TensorCache(tmp_path, verified_bytes=0)
    assert not reader.missing([name(1)])  # the index says so
    with caplog.at_level(logging.WARNING):
        assert reader.get(name(1)) is None
    assert f" {path}: " in caplog.text
    assert not path.exists()
    assert reader.missing([name(1)])
    assert TensorCache(tmp_path).missing([name(1)])  # and others are told

    path.write_bytes(broken)  # doubted once, so what a later start believes is the file, not the index
    headers_only = TensorCache(tmp_path, verified_bytes=0)
    assert bool(headers_only.missing([name(1)])) == (damage != "flipped")
    TensorCache(tmp_path).put(name(1), {"x": torch.ones(1)})
    assert not TensorCache(tmp_path).missing([name(1)])
    path.write_bytes(broken)
    TensorCache(tmp_path).put(name(2), {"x": torch.ones(100)})
    TensorCache(tmp_path).put(name(3), {"x": torch.tensor(math.inf)})
    caplog.clear()
    start = TensorCache(tmp_path, verified_bytes=1)  # reads until the limit: the third is not
    assert start.missing([name(1), name(2), name(3)]) == [name(1)]
    assert str(path) in caplog.text
    assert not path.exists()
    assert TensorCache(tmp_path).missing([name(3)]) == [name(3)]


def test_a_start_opens_no_entry_that_the_index_knows(tmp_path: Path, calls: Counter[str]) -> None:
    writers = [TensorCache(tmp_path), TensorCache(tmp_path)]  # at once, as ranks and runs do
    for number in range(60):
        writers[number % 2].put(name(number), {"x": torch.tensor(number)})
    calls.clear()
    wanted = [name(number) for number in range(60)]
    assert TensorCache(tmp_path, verified_bytes=0).missing(wanted) == []
    assert calls == {"scandir": 1}  # the index's folder

    # A killed writer's last entry: on disk, and not in the index. It is found, once.
    writers[0]._index.add = lambda lines: None  # type: ignore[method-assign]
    writers[0].put(name(60), {"x": torch.tensor(60)})
    calls.clear()
    assert TensorCache(tmp_path, verified_bytes=0).missing([*wanted, name(60), name(61), name(61)]) == [name(61)]
    assert calls == {"scandir": 3 if name(60)[:2] != name(61)[:2] else 2, "open_tensors": 1}
    calls.clear()
    assert TensorCache(tmp_path, verified_bytes=0).missing([*wanted, name(60)]) == []
    assert calls == {"scandir": 1}

    # An entry that somebody removed is found out when it is read, and from then on.
    TensorCache(tmp_path).path(name(3)).unlink()
    late = TensorCache(tmp_path, verified_bytes=0)
    assert late.missing(wanted) == []
    assert pickle.loads(pickle.dumps(late)).get(name(3)) is None
    assert TensorCache(tmp_path, verified_bytes=0).missing(wanted) == [name(3)]


def test_lines_of_killed_and_full_writers_cost_nothing_but_themselves(tmp_path: Path) -> None:
    first, second = AppendLog(tmp_path / "j", length=3), AppendLog(tmp_path / "j", length=3)
    reader = AppendLog(tmp_path / "j", length=3)
    assert list(reader.news()) == []
    first.add(["abc", "def"])
    [file] = (tmp_path / "j").iterdir()
    with open(file, "ab") as torn:
        torn.write(b"gh")  # cut short
    assert sorted(reader.news()) == ["abc", "def"]
    second.add(["xyz"])
    assert list(reader.news()) == ["xyz"]
    first.add(["ijk"])  # joins what was cut: neither counts
    first.add(["lmn"])
    assert list(reader.news()) == ["lmn"]
    threads = [threading.Thread(target=lambda k=k: first.add([f"{k:03}"] * 20)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reader.news()) == sorted(f"{k:03}" for k in range(8) for _ in range(20))
    reader.replace(["new"])
    assert list(AppendLog(tmp_path / "j", length=3).news()) == ["new"]
    assert len(list((tmp_path / "j").iterdir())) == 1


def test_a_fork_writes_a_file_of_its_own(tmp_path: Path) -> None:
    log = AppendLog(tmp_path, length=1)
    log.add("a")
    child = os.fork()
    if child == 0:
        log.add("b")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    log.add("c")
    assert sorted(AppendLog(tmp_path, length=1).news()) == ["a", "b", "c"]
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == ["a\nc\n", "b\n"]


def test_a_damaged_entry_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories of a shared cache may belong to other users."""
    cache = TensorCache(tmp_path / "tensors")
    cache.put(name(1), {"x": torch.ones(2)})
    cache.path(name(1)).write_bytes(b"")
    denied, broken = PermissionError(errno.EACCES, "denied"), OSError(errno.EIO, "broken")
    monkeypatch.setattr(Path, "unlink", mock.Mock(side_effect=denied))
    with pytest.raises(CacheError, match=rf"{cache.path(name(1))} is damaged .*denied.*--repair.*--precompute_dir"):
        cache.missing([name(1)])
    with pytest.raises(CacheError, match="denied"):
        CacheMaintenance(tmp_path).repair([Damage(name(1), "", "")])
    monkeypatch.setattr(Path, "mkdir", mock.Mock(side_effect=denied))
    with pytest.raises(CacheError, match=rf"{cache.path(name(2))} is missing .*denied.*--precompute_dir"):
        cache.put(name(2), {})
    monkeypatch.setattr(Path, "unlink", mock.Mock(side_effect=broken))
    with pytest.raises(OSError, match="broken"):
        TensorCache(tmp_path / "tensors").missing([name(1)])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_to_is_read(tmp_path: Path) -> None:
    TensorCache(tmp_path / "c").put(name(1), {"x": torch.ones(2)})
    folders = [tmp_path / "c", *(p for p in (tmp_path / "c").rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        cache = TensorCache(tmp_path / "c")
        cache.hold()
        assert cache.missing([name(1), name(2)]) == [name(2)]
        assert cache.get(name(1)) is not None
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_use_is_noted_once_a_day(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path)
    cache.put(name(1), {"x": torch.ones(2)})
    path = cache.path(name(1))
    for days, noted in ((0.5, False), (1.5, True)):
        then = path.stat().st_mtime - days * 86400
        os.utime(path, (then, then))
        cache.get(name(1))
        assert (path.stat().st_mtime != then) == noted


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files made just now count as long unchanged."""
    monkeypatch.setattr("finetrainers.data.inspect.file_facts._SETTLED_S", -1.0)


def test_digests_follow_content_and_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.bin", tmp_path / "b.bin"
    first.write_bytes(b"one")
    second.write_bytes(b"one")
    digests = FileFacts(tmp_path / "digests")
    assert digests.digest(first) == digests.digest(second) == sha256(b"one").hexdigest()
    assert len(digests) == 0  # a file that changed just now may change again within the same tick of the clock
    settled(monkeypatch)
    digests.learn([first, second, first])
    assert len(digests) == 2
    before, times = digests.digest(first), first.stat()
    other = FileFacts(tmp_path / "digests")
    assert other.digest(second) == before

    # The same size and the same modification time: the file system's own time of change tells.
    time.sleep(0.02)  # beyond a tick of its clock
    first.write_bytes(b"two")
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert first.stat().st_size == times.st_size
    assert first.stat().st_mtime_ns == times.st_mtime_ns
    assert digests.digest(first) == sha256(b"two").hexdigest()

    monkeypatch.setattr(
        "finetrainers.data.inspect.file_facts.file_sha256", lambda path: pytest.fail("read the file again")
    )
    assert FileFacts(tmp_path / "digests").digest(second) == before
    assert other.digest(first) == digests.digest(first)  # what one process learns, the others know
    assert pickle.loads(pickle.dumps(digests)).digest(first) == digests.digest(first)


def test_what_is_not_finite_is_told_from_a_sum_that_overflows() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        large = torch.full((4000,), torch.finfo(dtype).max, dtype=dtype)
        for values, finite in ((large, True), (large.neg(), True), (torch.ones(3, dtype=dtype), True)):
            assert is_finite(values) == finite
            for spoilt in (torch.nan, torch.inf, -torch.inf):
                values = values.clone()
                values[-1] = spoilt
                assert not is_finite(values)
    assert not is_finite(torch.tensor([torch.inf, -torch.inf]))
    assert is_finite(torch.tensor([2**62, True]))
    assert is_finite(torch.tensor([], dtype=torch.bfloat16))


def test_identity_follows_weights_and_options_not_places() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)).to(torch.bfloat16)
    copy = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)).to(torch.bfloat16)
    assert model_fingerprint({"vae": module}) != model_fingerprint({"vae": copy})
    copy.load_state_dict(module.state_dict())
    assert model_fingerprint({"vae": module}) == model_fingerprint({"vae": copy})
    assert model_fingerprint({"vae": module}, tiling=True) != model_fingerprint({"vae": module}, tiling=False)
    assert model_fingerprint({"vae": module}) != model_fingerprint({"vae": module.float()})


def test_identity_says_whether_prompts_may_be_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        padding_side = "right"

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    vae = nn.Linear(1, 1)
    texts, vaes = [], []
    for installed in (None, object()):
        monkeypatch.setattr("finetrainers.data.cache.model_fingerprint.find_spec", lambda name, value=installed: value)
        texts.append(model_fingerprint({"tokenizer": Tokenizer()}))
        vaes.append(model_fingerprint({"vae": vae}))
    assert texts[0] != texts[1]
    assert vaes[0] == vaes[1]
