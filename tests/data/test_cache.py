from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from finetrainers.data.cache import FileDigests, TensorCache
from finetrainers.data.identity import identity


def test_values_come_back_exactly(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path)
    tensors = {"a": torch.randn(2, 3).to(torch.bfloat16), "b": torch.randn(4, 4).t(), "m": torch.tensor([True, False])}
    key = cache.key(kind="x", bucket=(9, 32, 48))
    assert not cache.has(key)
    assert cache.get(key) is None
    cache.put(key, tensors)
    assert cache.has(key)
    found = cache.get(key)
    assert found is not None
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [cache.path(key)]


def test_every_part_changes_the_key() -> None:
    base = {"kind": "video", "bucket": (9, 32, 48), "fps": 8.0, "seed": None}
    keys = {TensorCache.key(**base)}
    for change in ({"bucket": (9, 48, 32)}, {"fps": 8.5}, {"seed": 0}, {"kind": "text"}):
        keys.add(TensorCache.key(**{**base, **change}))
    assert len(keys) == 5
    assert TensorCache.key(a=1, b=2) == TensorCache.key(b=2, a=1)


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "text"])
def test_damage_is_detected_logged_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    cache = TensorCache(tmp_path)
    cache.put("ab12", {"x": torch.randn(100)})
    path = cache.path("ab12")
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes({"cut": bytes(data[:-50]), "empty": b"", "flipped": bytes(data), "text": b"hello"}[damage])
    if damage != "flipped":  # a header is all that `has` reads
        assert not cache.has("ab12")
        path.write_bytes(bytes(data[:-50]) if damage == "cut" else b"")
    with caplog.at_level(logging.WARNING):
        assert cache.get("ab12") is None
    assert "removed the damaged cache entry" in caplog.text
    assert not path.exists()


def test_digests_follow_content_and_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.bin", tmp_path / "b.bin"
    first.write_bytes(b"one")
    second.write_bytes(b"one")
    digests = FileDigests(tmp_path / "digests")
    assert digests.of(first) == digests.of(second)
    before = digests.of(first)
    first.write_bytes(b"two")
    os.utime(first, ns=(1, 1))  # clocks of some file systems are too coarse to see two writes in a row
    assert digests.of(first) != before

    monkeypatch.setattr("finetrainers.data.cache._sha256", lambda path: pytest.fail("read the file again"))
    assert FileDigests(tmp_path / "digests").of(second) == before


def test_identity_follows_weights_and_options_not_places() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)).to(torch.bfloat16)
    copy = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)).to(torch.bfloat16)
    assert identity({"vae": module}) != identity({"vae": copy})
    copy.load_state_dict(module.state_dict())
    assert identity({"vae": module}) == identity({"vae": copy})
    assert identity({"vae": module}, tiling=True) != identity({"vae": module}, tiling=False)
    assert identity({"vae": module}) != identity({"vae": module.float()})
