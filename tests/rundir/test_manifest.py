"""Damage to a checkpoint's files is found and named, by name and size or by every byte."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

import pytest
from refusals import refused

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
    problem = damage(checkpoint, contents=True)
    assert problem is not None
    assert re.match(r"inner/weights\.bin .*SHA-256", problem)


def test_missing_and_cut_files_are_found_by_looking(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text("{ }")
    problem = damage(checkpoint, contents=False)
    assert problem is not None
    assert re.fullmatch(r"state\.json \D* 3 \D* 2", problem)
    (checkpoint / "inner" / "weights.bin").unlink()
    problem = damage(checkpoint, contents=False)
    assert problem is not None
    assert re.fullmatch(r"inner/weights\.bin [^\d(]*", problem)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"a": {}}}', '{"files": {"a": 1}}', "\x00"])
def test_a_manifest_that_is_none_is_damage(checkpoint: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_text(text)
    with refused("unreadable") as refusal:
        read_manifest(checkpoint)
    assert damage(checkpoint, contents=True) == str(refusal.value)
    assert str(refusal.value).startswith("manifest.json ")


def test_no_manifest_is_damage(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with refused("not_found") as refusal:
        read_manifest(checkpoint)
    assert damage(checkpoint, contents=False) == str(refusal.value)
    assert str(refusal.value).startswith("manifest.json ")


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
    ("files", "name"),
    [
        ({}, "state.json"),
        ({"state.json": {"size": 2, "sha256": "x"}, "../a": {"size": 1, "sha256": "x"}}, "'../a'"),
        ({"state.json": {"size": 2, "sha256": "x"}, "/etc/a": {"size": 1, "sha256": "x"}}, "'/etc/a'"),
        ({"state.json": {"size": 2, "sha256": "x"}, ".": {"size": 1, "sha256": "x"}}, "'.'"),
        ({"state.json": {"size": 2, "sha256": "x"}, "\u202e": {"size": 1, "sha256": "x"}}, r"'\u202e'"),
    ],
)
def test_a_manifest_that_vouches_for_nothing_is_damage(checkpoint: Path, files: dict, name: str) -> None:
    (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))
    with refused("unreadable", "manifest.json", name) as refusal:
        read_manifest(checkpoint)
    assert damage(checkpoint, contents=True) == str(refusal.value)


def test_links_pipes_and_devices_are_not_read(checkpoint: Path) -> None:
    """A link to a device without an end would fill the memory."""

    def check_refused(name: str, file_type: str) -> None:
        problem = damage(checkpoint, contents=True)
        assert problem is not None
        assert (problem.split()[0], problem.split()[-1]) == (name, file_type)

    (checkpoint / "empty").unlink()
    (checkpoint / "empty").symlink_to("/dev/zero")
    check_refused("empty", "link")
    (checkpoint / "empty").unlink()
    os.mkfifo(checkpoint / "empty")
    check_refused("empty", "pipe")
    (checkpoint / "empty").unlink()
    (checkpoint / "empty").touch()
    (checkpoint / "inner").rename(checkpoint.with_name("elsewhere"))
    (checkpoint / "inner").symlink_to(checkpoint.with_name("elsewhere"))
    check_refused("inner", "link")
    (checkpoint / "inner").unlink()
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").symlink_to("/dev/zero")
    check_refused("manifest.json", "link")
    with refused("unreadable", "manifest.json"):
        read_manifest(checkpoint)
