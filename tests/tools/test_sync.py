"""Copies by rsync over a loopback sshd: never half a checkpoint, no optimizer state, nothing deleted unasked."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused_command, refused_options

from finetrainers.cli import sync as command
from finetrainers.cli.main import main
from finetrainers.rundir import publish
from finetrainers.rundir.best import mark_best
from finetrainers.rundir.find import find_checkpoint, scan_checkpoints
from finetrainers.rundir.identity import IDENTITY, Identity, read_identity, take_identity
from finetrainers.rundir.lock import exclusive
from finetrainers.rundir.manifest import damage
from finetrainers.tools import sync as syncing
from finetrainers.tools.sync import Sync, TransferError
from finetrainers.utils import faults
from finetrainers.utils.failures import Kind

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


ALONE: Any = SimpleNamespace(is_main=True, broadcast_object=lambda value: value)


def make(run: Path, *steps: int, content: str = "") -> None:
    for step in steps:
        final = run / "checkpoints" / f"step-{step}"
        temporary = publish.reserve(final, needed=0)
        for name in ("state.json", "weights.safetensors", "optimizer.pt"):
            (temporary / name).write_text(json.dumps({"step": step, "content": content or name}))
        publish.publish(temporary, final, facts={"step": step})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "a run"
    make(root, 1, 2)
    (root / "config.toml").write_text("x = 1\n")
    (root / "metrics.jsonl").write_text("{}\n")
    (root / ".lock").touch()
    (root / "weights.safetensors").touch()
    (root / "logs" / "project").mkdir(parents=True)
    (root / "logs" / "project" / "events.out").write_text("x")
    return root


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.rotating
@needs_rsync
def test_a_copy_over_ssh(run: Path, ssh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there" / "copy"
    target = f"{getpass.getuser()}@127.0.0.1:{there}"
    arguments = ["sync", str(run), target, "--once", "--rsh", ssh]
    assert main(arguments) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines()] == ["step-1", "step-2"]
    small = {"config.toml", "metrics.jsonl", "logs/project/events.out"}
    copied = {
        f"checkpoints/step-{step}/{name}"
        for step in (1, 2)
        for name in ("manifest.json", "state.json", "weights.safetensors")
    }
    assert names(there) == small | copied
    assert [one.damage for one in scan_checkpoints(there, weights_only=True)] == [None, None]
    assert damage(there / "checkpoints" / "step-2", contents=True, weights_only=True) is None
    with pytest.raises(ValueError, match=rf"{there}/checkpoints .*optimizer.*--init_from"):
        find_checkpoint("latest", there)

    # Pruned here, and there only if asked; what is best there stays, as does what is none of ours.
    make(run, 3)
    shutil.rmtree(run / "checkpoints" / "step-1")
    shutil.rmtree(run / "checkpoints" / "step-2")
    (there / "checkpoints" / "mine").mkdir()
    mark_best(there / "checkpoints" / "step-2")
    assert main(arguments) == 0
    assert {path.name for path in (there / "checkpoints").iterdir()} == {"best", "mine", "step-1", "step-2", "step-3"}
    assert main([*arguments, "--prune"]) == 0
    assert {path.name for path in (there / "checkpoints").iterdir()} == {"best", "mine", "step-2", "step-3"}
    assert damage(there / "checkpoints" / "step-2", contents=True, weights_only=True) is None
    shutil.rmtree(run / "checkpoints" / "step-3")
    assert main([*arguments, "--prune"]) == 0  # a run without a checkpoint prunes none
    assert (there / "checkpoints" / "step-3").is_dir()


@needs_rsync
def test_the_manifest_comes_last_and_a_replaced_step_waits(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    states: list[list[str | None]] = []

    def look(name: str) -> None:
        assert name == "sync.manifest"
        found = scan_checkpoints(there, weights_only=True)
        states.append([one.damage or damage(one.path, contents=True, weights_only=True) for one in found])

    monkeypatch.setattr(syncing, "fault_point", look)
    sync = Sync(run, str(there))
    assert [one.name for one in sync.transfer()] == ["step-1", "step-2"]
    assert [[one and one.split()[0] for one in state] for state in states] == [
        ["manifest.json"], [None, "manifest.json"],
    ]  # fmt: skip
    assert sync.transfer() == []
    make(run, 2, content="another one")
    states.clear()
    assert [one.name for one in sync.transfer()] == ["step-2"]
    [[_, replaced]] = states
    assert replaced is not None
    assert "bytes" in replaced or "SHA-256" in replaced
    assert damage(there / "checkpoints" / "step-2", contents=True, weights_only=True) is None

    # A checkpoint that is pruned while it is copied costs nothing.
    make(run, 3, 4)
    monkeypatch.setattr(syncing, "fault_point", lambda name: shutil.rmtree(run / "checkpoints" / "step-3", True))
    assert [one.name for one in sync.transfer()] == ["step-4"]


@needs_rsync
def test_a_killed_copy_goes_on(run: Path, tmp_path: Path, python: Any) -> None:
    there = tmp_path / "there"
    killed = python(
        "-m", "finetrainers", "sync", str(run), str(there), "--once", FINETRAINERS_FAULT="kill@sync.manifest:2"
    )
    assert killed.wait() == -9
    states = [one.damage for one in scan_checkpoints(there, weights_only=True)]
    assert states[0] is None
    assert states[1] is not None
    assert len(Sync(run, str(there)).transfer()) == 2
    assert [one.damage for one in scan_checkpoints(there, weights_only=True)] == [None, None]


@needs_rsync
def test_failures_are_retried_with_a_growing_pause(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(command.time, "sleep", pauses.append)
    broken = ["sync", str(run), "nobody@nowhere:x", "--once", "--rsh", "false"]
    assert main(broken) == 1
    assert pauses == [5, 10, 20]
    err = capsys.readouterr().err
    assert err.count("rsync to nobody@nowhere:x ") == 4
    assert " 1 in 5 s" in err
    # Without --once it goes on for ever, here until the connection is there.
    pauses.clear()
    copy = Sync.transfer

    def flaky(self: Sync) -> Any:
        if len(pauses) == 8:
            raise KeyboardInterrupt
        if len(pauses) < 7:
            raise TransferError("no route")
        return copy(self)

    monkeypatch.setattr(Sync, "transfer", flaky)
    assert main(["sync", str(run), str(tmp_path / "there")]) == 130
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 100]


@needs_rsync
def test_a_target_may_lie_above_the_working_directory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["sync", str(run), "../new/copy", "--once"]) == 0
    assert scan_checkpoints(tmp_path / "new" / "copy", weights_only=True)


@needs_rsync
def test_a_target_that_does_not_answer_ends_the_transfer(
    run: Path, ssh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for an answer that nobody gives: not for a machine, a password, or a yes."""
    for option in ("BatchMode=yes", "ConnectTimeout=20"):
        assert f"-o {option} " in syncing.SSH
    with socket.create_server(("127.0.0.1", 0)) as silent:
        quick = syncing.SSH.replace("ConnectTimeout=20", "ConnectTimeout=1")
        monkeypatch.setattr(syncing, "SSH", f"{quick} -p {silent.getsockname()[1]}")
        monkeypatch.delenv("RSYNC_RSH", raising=False)
        with pytest.raises(TransferError, match="timed out"):
            Sync(run, "me@127.0.0.1:x").transfer()
    with pytest.raises(TransferError, match=r"Permission denied \(publickey.*`ssh me@127.0.0.1`.*--rsh"):
        Sync(run, "me@127.0.0.1:x", ssh.replace("/user ", "/host ")).transfer()
    there = tmp_path / "file"
    there.touch()
    # Rsync loses its own message where the target's end closes the connection before it has been read.
    with pytest.raises(TransferError, match=r"Not a directory|\(code 11\)"):
        Sync(run, f"{getpass.getuser()}@127.0.0.1:{there}/x", ssh).transfer()
    assert Sync(run, "rsync://host/x")._connection() == Sync(run, "host::x")._connection() == ["--contimeout=20"]
    monkeypatch.setenv("RSYNC_RSH", "mine")
    assert Sync(run, "me@host:x")._connection() == Sync(run, "folder")._connection() == []


def test_what_cannot_be_copied_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing: list[tuple[str, Kind]] = [("rsync", "not_installed"), ("ssh", "not_installed")]

    def kinds(source: Path, target: str) -> list[tuple[str, Kind]]:
        return [(problem.where, problem.kind) for problem in Sync(source, target).problems()]

    assert kinds(tmp_path / "none", "me@host:") == [("RUN", "not_found"), ("TARGET", "required"), *missing]
    assert kinds(run, str(run)) == [("TARGET", "conflict"), *missing[:1]]
    assert kinds(tmp_path, "x") == [("RUN", "not_found"), *missing[:1]]
    assert kinds(Path(__file__), "x") == [("RUN", "invalid"), *missing[:1]]
    code, found = refused_command(["sync", run, __file__, "--every", "0"])
    assert (code, [place for place, _ in found]) == (2, ["--every", "TARGET", "rsync"])
    said = capsys.readouterr().err
    assert "'0'" in said
    assert f"TARGET: {__file__} " in said
    assert "sync.manifest" in faults.POINTS


@pytest.fixture
def rsh(tmp_path: Path) -> str:
    """A connection to this machine, as `host`."""
    script = tmp_path / "rsh"
    script.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    script.chmod(0o755)
    return str(script)


def begin(root: Path, *steps: int, start: int = 0, identity: bool = True) -> Path:
    """A run directory, by what its start and its steps leave."""
    root.mkdir(exist_ok=True)
    (root / "config.toml").write_text(f"x = {start}\n")
    (root / "README.md").write_text(str(start))
    if identity:
        take_identity(root)
    with open(root / "events.jsonl", "a") as events, open(root / "metrics.jsonl", "a") as metrics:
        events.write(json.dumps({"time": start, "event": "start", "step": 0}) + "\n")
        metrics.writelines(json.dumps({"step": step, "loss": start + step}) + "\n" for step in steps)
    make(root, *steps, content=str(start))
    return root


def content(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in names(root)}


@pytest.mark.rotating
@needs_rsync
@pytest.mark.parametrize("host", ["", "host:"])
def test_another_run_is_never_overwritten(
    host: str, rsh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.time, "sleep", lambda seconds: pytest.fail("it is no failure that a retry mends"))
    a, before = begin(tmp_path / "a", 1, 2), begin(tmp_path / "before", 1, 2, start=4, identity=False)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("mine")
    targets = [begin(tmp_path / "b", 2, 3, start=5), begin(tmp_path / "c", 2, 3, start=6, identity=False), mine]

    def command_of(source: Path, target: Path) -> list[str]:
        return ["sync", str(source), f"{host}{target}", "--once", "--rsh", rsh]

    def sync(source: Path, target: Path, *more: str) -> int:
        return main([*command_of(source, target), *more])

    for source in (a, before):
        for target in targets:
            theirs = content(target)
            code, [(place, kind)] = refused_command([*command_of(source, target), "--prune"])
            assert (code, place) == (2, "TARGET"), target
            assert kind == ("occupied" if target == mine else "mismatch"), (source, target)
            assert content(target) == theirs
    # A directory that a run trains in, even of this very run.
    with exclusive(targets[0], ALONE):
        theirs = content(targets[0])
        used = command_of(targets[0], targets[0])
        kind = "occupied" if host else "conflict"
        assert refused_command([*used, "--prune"]) == (2, [("TARGET", kind)])
        assert content(targets[0]) == theirs

    # Mirrors are made, and synchronized again: also where the run has lost checkpoints, and was begun again since.
    copies = {source: tmp_path / f"copy of {source.name}" for source in (a, before)}
    for source, copy in copies.items():
        copy.mkdir()
        (copy / ".gitkeep").touch()
        (copy / ".rsync-partial").mkdir()
        assert [sync(source, copy), sync(source, copy)] == [0, 0], capsys.readouterr().err
        for step in (1, 2):
            shutil.rmtree(source / "checkpoints" / f"step-{step}")
        (source / "metrics.jsonl").write_text("")
        begin(source, 2, 3, start=9, identity=False)
        assert sync(source, copy, "--prune") == 0, capsys.readouterr().err
        assert {path.name for path in (copy / "checkpoints").iterdir()} == {"step-2", "step-3"}
        assert (copy / "metrics.jsonl").read_bytes() == (source / "metrics.jsonl").read_bytes()
    assert read_identity(copies[a]) == Identity(read_identity(a).run, is_copy=True)  # type: ignore[union-attr]
    # A run of before has an id from its next start on, and its copies then have, too.
    take_identity(before)
    assert sync(before, copies[before]) == 0
    assert read_identity(copies[before]).run == read_identity(before).run  # type: ignore[union-attr]

    # Not the other way around; nor into a copy that was trained itself.
    ours = content(a)
    assert refused_command([*command_of(copies[a], a), "--prune"]) == (2, [("TARGET", "conflict")])
    assert content(a) == ours
    trained = copies[a]
    take_identity(trained)
    assert sync(a, trained) == 2
    full = shutil.copytree(a, tmp_path / "full copy")
    assert sync(a, full) == 0
    assert read_identity(full) == read_identity(a)
    with open(full / "events.jsonl", "a") as events:
        events.write(json.dumps({"time": 11, "event": "start", "step": 3}) + "\n")
    theirs = content(full)
    assert refused_command([*command_of(a, full), "--prune"]) == (2, [("TARGET", "mismatch")])
    assert content(full) == theirs
    # The run behind the path is another one while it is followed.
    following = Sync(before, f"{host}{copies[before]}", rsh)
    following.transfer()
    shutil.rmtree(before)
    begin(before, 1, start=20)
    theirs = content(copies[before])
    with refused_options(("TARGET", "mismatch")):
        following.transfer()
    assert content(copies[before]) == theirs


@needs_rsync
def test_a_copy_of_an_earlier_version_is_known_by_its_checkpoints_or_its_metrics(tmp_path: Path) -> None:
    source = begin(tmp_path / "run", 1, 2, 3)
    (source / "events.jsonl").unlink()  # of a version that wrote none
    for name, kept in {"both": [1, 2], "checkpoints": [2], "metrics": []}.items():
        copy = shutil.copytree(source, tmp_path / name)
        (copy / IDENTITY).unlink()
        (copy / ".lock").touch()
        for step in {1, 2, 3} - set(kept):
            shutil.rmtree(copy / "checkpoints" / f"step-{step}")
        if name == "checkpoints":
            (copy / "metrics.jsonl").write_text('{"step": 1, "loss": 17}\n')
        Sync(source, str(copy)).transfer()
        assert content(copy).keys() >= content(source).keys() - {
            f"checkpoints/step-{n}/optimizer.pt" for n in (1, 2, 3)
        }
    for step, metrics in ((2, ""), (9, '{"step": 1, "loss": 17}\n')):
        other = begin(tmp_path / f"other {step}", step, start=30, identity=False)
        (other / "events.jsonl").unlink()
        (other / "metrics.jsonl").write_text(metrics)
        with refused_options(("TARGET", "occupied")):
            Sync(source, str(other)).transfer()


@needs_rsync
def test_targets_that_no_transfer_can_reach_are_not_tried_again(
    run: Path, rsh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.time, "sleep", lambda seconds: pytest.fail("a retry"))
    before = content(run)
    (tmp_path / "link").symlink_to(run)
    for target in (run, run / "sub", tmp_path / "link" / "checkpoints" / "x"):
        assert refused_command(["sync", run, target, "--once"]) == (2, [("TARGET", "conflict")])
    assert refused_command(["sync", run, "--once", "--", "-e x:y"]) == (2, [("TARGET", "invalid")])
    assert "./-e x:y" in capsys.readouterr().err
    assert content(run) == before
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "rsync").write_text("#!/bin/sh\necho 'rsync: --mkpath: unknown option' >&2\nexit 1\n")
    (tmp_path / "rsync").chmod(0o755)
    assert refused_command(["sync", run, "host:x", "--once", "--rsh", rsh]) == (2, [("TARGET", "unsupported")])
    assert "--mkpath" in capsys.readouterr().err
