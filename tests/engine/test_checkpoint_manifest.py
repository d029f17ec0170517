"""Damage to a checkpoint's files is found and named, by name and size or by every byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from finetrainers.engine.manifest import damage, read_manifest, total_size, write_manifest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "weights.bin").write_bytes(bytes(range(256)) * 50_000)  # more than one chunk
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "empty").touch()
    write_manifest(tmp_path, facts={"step": 3})
    return tmp_path


def test_all_files_are_listed(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    assert manifest["step"] == 3
    assert sorted(manifest["files"]) == ["empty", "inner/weights.bin", "state.json"]
    content = (checkpoint / "inner" / "weights.bin").read_bytes()
    expected = {"size": 12_800_000, "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["files"]["inner/weights.bin"] == expected
    assert total_size(manifest) == 12_800_002
    assert damage(checkpoint, contents=True) is None
    assert sorted(path.name for path in checkpoint.iterdir()) == ["empty", "inner", "manifest.json", "state.json"]


def test_one_flipped_bit_is_found(checkpoint: Path) -> None:
    file = checkpoint / "inner" / "weights.bin"
    content = bytearray(file.read_bytes())
    content[9_000_000] ^= 1
    file.write_bytes(content)
    assert damage(checkpoint, contents=False) is None
    assert damage(checkpoint, contents=True) == "inner/weights.bin is not what was saved: its SHA-256 differs"


def test_missing_and_cut_files_are_found_by_looking(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text("{ }")
    assert damage(checkpoint, contents=False) == "state.json has 3 bytes instead of 2"
    (checkpoint / "inner" / "weights.bin").unlink()
    assert damage(checkpoint, contents=False) == "inner/weights.bin is missing"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"a": {}}}', '{"files": {"a": 1}}', "\x00"])
def test_a_manifest_that_is_none_is_damage(checkpoint: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_text(text)
    found = damage(checkpoint, contents=True)
    assert found is not None
    assert found.startswith("manifest.json cannot be read (")


def test_no_manifest_is_damage(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    assert damage(checkpoint, contents=False) == (
        "manifest.json is missing: not written to the end, or by an earlier version"
    )


def test_the_manifest_is_json_that_others_can_read(checkpoint: Path) -> None:
    assert json.loads((checkpoint / "manifest.json").read_text())["files"]["empty"]["size"] == 0
