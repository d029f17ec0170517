"""`finetrainers ckpt`: list checkpoints, verify their files, and compare two of them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetrainers.config.arguments import path_argument
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.rundir.best import best_checkpoint
from finetrainers.rundir.find import checkpoints_dir, scan_checkpoints
from finetrainers.rundir.manifest import MANIFEST, damage, is_optimizer_state, is_sealed, lacks_optimizer, read_manifest
from finetrainers.utils.files import missing_path_problem
from finetrainers.utils.headers import open_tensors
from finetrainers.utils.reading import read_json_object
from finetrainers.utils.text import duration, file_size

from .overview import described

#: Note on a checkpoint that `finetrainers sync` has copied.
_COPY = "without optimizer state: can be sampled from, not resumed"


def add_ckpt(commands: Any) -> None:
    """Add the subcommand and its own subcommands to the parser."""
    examples = (
        "ckpt ls runs/first",
        "ckpt verify runs/first",
        "ckpt diff runs/first/checkpoints/step-500 runs/second/checkpoints/step-500",
    )
    ckpt = commands.add_parser("ckpt", **described("list, verify and compare checkpoints", *examples))
    actions = ckpt.add_subparsers(dest="action", metavar="ACTION", required=True)

    ls = actions.add_parser("ls", help="list a run's checkpoints: step, size, age, complete or damaged (by file sizes)")
    ls.add_argument("run_directory", type=path_argument, metavar="RUN", help="a run's --output_dir")
    ls.set_defaults(run=_ls, check=lambda arguments: _path_problems("RUN", [arguments.run_directory]))

    verify = actions.add_parser("verify", help="read every byte; exit code 1 if a file differs from the saved one")
    verify.add_argument(
        "path", type=path_argument, nargs="+", metavar="PATH", help="checkpoints, or runs for all of their checkpoints"
    )
    verify.set_defaults(run=_verify, check=_check_verify)

    diff = actions.add_parser(
        "diff", help="compare settings, versions and weights of two checkpoints; exit code 1 if they differ"
    )
    diff.add_argument("a", type=path_argument, metavar="A", help="a checkpoint")
    diff.add_argument("b", type=path_argument, metavar="B", help="another")
    diff.set_defaults(run=_diff, check=_check_diff)


def _path_problems(where: str, paths: Sequence[Path]) -> Iterator[Problem]:
    """Yield the problems of paths without a directory."""
    for path in paths:
        if not path.is_dir():
            message = f"{path} {missing_path_problem(path, folder=True)}"
            yield Problem(where, message, "invalid" if path.exists() else "not_found")


def _check_verify(arguments: argparse.Namespace) -> Iterator[Problem]:
    yield from _path_problems("PATH", arguments.path)
    for path in arguments.path:
        if path.is_dir() and not _checkpoints(path):
            yield Problem("PATH", f"{path} is not a checkpoint or a run with checkpoints", "not_found")


def _check_diff(arguments: argparse.Namespace) -> Iterator[Problem]:
    for where, path in (("A", arguments.a), ("B", arguments.b)):
        inside = _checkpoints(path)
        if not path.is_dir():
            yield from _path_problems(where, [path])
        elif inside and inside != [path]:
            yield Problem(where, f"{path} is a run; use one of its checkpoints, such as {inside[-1]}")
        elif (reason := damage(path, contents=False)) is not None:
            yield Problem(where, f"{path}: {reason}", "unreadable")


def _ls(arguments: argparse.Namespace) -> int:
    checkpoints = scan_checkpoints(arguments.run_directory)
    copies = {
        checkpoint.step: checkpoint for checkpoint in scan_checkpoints(arguments.run_directory, weights_only=True)
    }
    best = best_checkpoint(arguments.run_directory)
    if not checkpoints:
        message = f"no checkpoint in {checkpoints_dir(arguments.run_directory)}"
        raise ConfigError([Problem("RUN", message, "not_found")])
    print(f"{'step':>8}  {'size':>9}  {'age':>9}  state")
    for checkpoint in checkpoints:
        copied = checkpoint.damage is not None and lacks_optimizer(checkpoint.path)
        if checkpoint.damage is not None and not copied:
            print(f"{checkpoint.step:>8}  {'-':>9}  {'-':>9}  {checkpoint.damage}")
            continue
        source = copies[checkpoint.step] if copied else checkpoint
        notes = (", the best" if best == checkpoint.path else "") + (f"; {_COPY}" if copied else "")
        age = duration(round(time.time() - source.saved_at))
        print(f"{checkpoint.step:>8}  {file_size(source.size):>9}  {age:>9}  ok{notes}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    damaged = False
    for path in (checkpoint for directory in arguments.path for checkpoint in _checkpoints(directory)):
        copied = lacks_optimizer(path)
        problem = damage(path, contents=True, weights_only=copied) or _lora_damage(path)
        damaged |= problem is not None
        print(f"{path}: {problem or _ok(path)}{f'; {_COPY}' if copied and problem is None else ''}")
    return 1 if damaged else 0


def _lora_damage(path: Path) -> str | None:
    """Return the damage to the LoRA that a complete checkpoint's run began with.

    Returns None if it is as stored or there is none.
    """
    from finetrainers.plan.initial_weights import stored_lora

    try:
        sha256 = (read_json_object(path / "state.json").get("initial") or {}).get("sha256")
        if sha256 is not None:
            stored_lora(path, None, sha256)
    except ValueError as error:
        return str(error)
    return None


def _ok(path: Path) -> str:
    if is_sealed(read_manifest(path)):
        return "ok"
    return (
        f"ok, but {MANIFEST} has no checksum (it was written by an earlier version), so damage to it would not be "
        "detected"
    )


def _checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint itself, or all of a run; none if the path is neither."""
    if (path / MANIFEST).is_file() or (path / "state.json").is_file():
        return [path]
    return [checkpoint.path for checkpoint in scan_checkpoints(path)]


def _diff(arguments: argparse.Namespace) -> int:
    paths = (arguments.a, arguments.b)
    facts = [_facts(path) for path in paths]
    differ = False
    for title in facts[0]:
        lines = list(_changes(facts[0][title], facts[1][title]))
        differ |= bool(lines)
        print(f"{title}: {'same' if not lines else ''}".rstrip())
        for line in lines:
            print(f"  {line}")
    weights = list(_weight_changes(*paths))
    print("weights: same" if not weights else "weights (largest absolute difference):")
    for line in weights:
        print(f"  {line}")
    return 1 if differ or weights else 0


def _facts(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return a checkpoint's recorded facts, by title."""
    manifest = read_manifest(path)
    state = read_json_object(path / "state.json")
    return {
        "step": {"step": state["step"], "total_steps": state["total_steps"]},
        "settings that must not change": state["critical"],
        "other settings": {k: v for k, v in manifest.get("config", {}).items() if k not in state["critical"]},
        "packages": manifest.get("packages", {}),
    }


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            yield f"{name}: {a.get(name)!r} -> {b.get(name)!r}"


def _weight_changes(a: Path, b: Path) -> Iterator[str]:
    """Yield a line for each tensor that differs; one pair is in memory at a time."""

    places = [_tensor_places(path) for path in (a, b)]
    for name in dict.fromkeys([*places[0], *places[1]]):
        if name not in places[0] or name not in places[1]:
            yield f"{name}: only in {a if name in places[0] else b}"
            continue
        with open_tensors(places[0][name]) as first, open_tensors(places[1][name]) as second:
            x, y = (file.get_tensor(name.partition(": ")[2]) for file in (first, second))
        if x.shape != y.shape or x.dtype != y.dtype:
            yield f"{name}: {x.dtype} {list(x.shape)} -> {y.dtype} {list(y.shape)}"
        elif not x.equal(y):
            yield f"{name}: {(x.double() - y.double()).abs().max().item():.3g}"


def _tensor_places(path: Path) -> dict[str, Path]:
    """Return the file of every tensor but the optimizer's, by `kind: name`; shards of a network count as one file."""

    places = {}
    for file in sorted(path.rglob("*.safetensors")):
        relative = file.relative_to(path)
        if is_optimizer_state(relative.as_posix()):
            continue
        kind = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        with open_tensors(file) as opened:
            places.update({f"{kind}: {name}": file for name in opened.keys()})  # noqa: SIM118 - no mapping
    return places
