"""Damage to a checkpoint's files is found and named, by name and size or by every byte."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import pytest

from finetrainers.rundir.manifest import damage, is_sealed, parse_manifest, read_manifest, total_size, write_manifest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "weights.bin").write_bytes(bytes(range(256)) * 50_000)  # more than one chunk
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "empty").touch()
    write_manifest(tmp_path, facts={"step": 3, "saved_at": 1.5, "packages": {"torch": "2"}, "config": {"lr": 1e-4}})
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


def test_every_flipped_bit_of_the_manifest_is_found(checkpoint: Path) -> None:
    content = (checkpoint / "manifest.json").read_bytes()
    assert parse_manifest(content)["step"] == 3
    unseen = []
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            with contextlib.suppress(ValueError):
                parse_manifest(bytes(changed))
                unseen.append((place, bit))
    assert unseen == []


def test_a_manifest_without_its_own_checksum_is_read(checkpoint: Path) -> None:
    """As earlier versions wrote them; what they only tell is left out where it is damaged."""
    path = checkpoint / "manifest.json"
    sealed = read_manifest(checkpoint)
    assert is_sealed(sealed)
    plain = {name: value for name, value in sealed.items() if name in ("files", "step")}
    path.write_text(json.dumps({**plain, "saved_at": "monday", "packages": [], "config": {"lr": 1}}))
    assert damage(checkpoint, contents=True) is None
    found = read_manifest(checkpoint)
    assert not is_sealed(found)
    assert found == {**plain, "config": {"lr": 1}}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "it does not list state.json"),
        ({"state.json": {"size": 2, "sha256": "x"}, "../a": {"size": 1, "sha256": "x"}},
         "'../a' leads out of the checkpoint"),
        ({"state.json": {"size": 2, "sha256": "x"}, "/etc/a": {"size": 1, "sha256": "x"}},
         "leads out of the checkpoint"),
    ],
)  # fmt: skip
def test_a_manifest_that_vouches_for_nothing_is_damage(checkpoint: Path, files: dict, message: str) -> None:
    (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))
    found = damage(checkpoint, contents=True)
    assert found is not None
    assert message in found


def test_links_pipes_and_devices_are_not_read(checkpoint: Path) -> None:
    """A link to a device without an end would fill the memory."""
    (checkpoint / "empty").unlink()
    (checkpoint / "empty").symlink_to("/dev/zero")
    assert damage(checkpoint, contents=True) == "empty is not a regular file but a link"
    (checkpoint / "empty").unlink()
    os.mkfifo(checkpoint / "empty")
    assert damage(checkpoint, contents=True) == "empty is not a regular file but a named pipe"
    (checkpoint / "empty").unlink()
    (checkpoint / "empty").touch()
    (checkpoint / "inner").rename(checkpoint.with_name("elsewhere"))
    (checkpoint / "inner").symlink_to(checkpoint.with_name("elsewhere"))
    assert damage(checkpoint, contents=True) == "inner is a link"
    (checkpoint / "inner").unlink()
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").symlink_to("/dev/zero")
    assert damage(checkpoint, contents=True) == "manifest.json is not a regular file but a link"
