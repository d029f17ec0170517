"""`finetrainers ckpt`: a list without torch, damage by exit code, differences by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused_command
from safetensors.torch import save_file

from finetrainers.cli.main import main
from finetrainers.rundir.best import mark_best
from finetrainers.rundir.manifest import write_manifest

ROOT = Path(__file__).parents[2]


def make(run: Path, step: int, *, saved_at: float = 0.0, rank: int = 4, lr: float = 1e-3, shift: float = 0.0) -> Path:
    """A checkpoint of two weights and a moving average."""
    directory = run / "checkpoints" / f"step-{step}"
    directory.mkdir(parents=True)
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file({**weights, "a": weights["a"] + shift}, directory / "pytorch_lora_weights.safetensors")
    save_file({"a": weights["a"]}, directory / "ema.safetensors")
    state: dict[str, Any] = {"step": step, "total_steps": 9, "critical": {"rank": rank, "data": "x"}}
    (directory / "state.json").write_text(json.dumps(state))
    facts = {"step": step, "saved_at": saved_at, "config": {"rank": rank, "lr": lr}, "packages": {"torch": "2"}}
    write_manifest(directory, facts=facts)
    return directory


def test_ls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, 5, saved_at=time.time() - 7200)
    (make(tmp_path, 10) / "ema.safetensors").unlink()
    make(tmp_path, 100, saved_at=time.time())
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "size", "age", "state"]
    assert rows[0].split()[0] == "5"
    assert rows[0].endswith("2.0 h  ok")
    assert "ema.safetensors" in rows[1]
    assert rows[2].split()[-3:-1] == ["0", "s"] or rows[2].split()[-3:-1] == ["1", "s"]
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        assert refused_command(["ckpt", "ls", tmp_path / name]) == (2, [("RUN", "not_found")])
        assert str(tmp_path / name) in capsys.readouterr().err
    assert refused_command(["ckpt", "ls", __file__]) == (2, [("RUN", "invalid")])


def test_the_best_one_and_a_copy_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, copy = make(tmp_path, 5), make(tmp_path, 10)
    mark_best(best)
    (copy / "optimizer.pt").write_bytes(b"x")
    (copy / "manifest.json").unlink()
    write_manifest(copy, facts={"step": 10})
    (copy / "optimizer.pt").unlink()
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert rows[0].endswith(" best")
    assert "ok; " in rows[1]
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    assert f"{copy}: ok; " in capsys.readouterr().out.splitlines()[1]
    (copy / "ema.safetensors").write_bytes(b"x")
    assert main(["ckpt", "verify", str(copy)]) == 1


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = make(tmp_path, 5), make(tmp_path, 10)
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    file = bad / "pytorch_lora_weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert main(["ckpt", "verify", str(good)]) == 0
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    *ok, damaged = capsys.readouterr().out.splitlines()
    assert ok == [f"{good}: ok", f"{good}: ok"]
    assert damaged.startswith(f"{bad}: {file.name} ")
    assert "SHA-256" in damaged
    (tmp_path / "empty").mkdir()
    missing = (tmp_path / "none", tmp_path / "empty")
    assert refused_command(["ckpt", "verify", good, *missing]) == (2, [("PATH", "not_found")] * 2)
    said = capsys.readouterr()
    assert said.out == ""
    assert [str(path) in said.err for path in (good, *missing)] == [False, True, True]


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, same = make(tmp_path / "a", 5), make(tmp_path / "same", 5)
    assert main(["ckpt", "diff", str(a), str(same)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step: same", "settings that must not change: same", "other settings: same", "packages: same", "weights: same",
    ]  # fmt: skip
    b = make(tmp_path / "b", 6, rank=8, lr=1e-4, shift=0.25)
    assert main(["ckpt", "diff", str(a), str(b)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "step:", "  step: 5 -> 6",
        "settings that must not change:", "  rank: 4 -> 8",
        "other settings:", "  lr: 0.001 -> 0.0001",
        "packages: same",
        "weights (largest absolute difference):", "  pytorch_lora_weights: a: 0.25",
    ]  # fmt: skip
    (b / "state.json").unlink()
    assert refused_command(["ckpt", "diff", a, b]) == (2, [("B", "unreadable")])
    assert refused_command(["ckpt", "diff", tmp_path / "a", "none"]) == (2, [("A", "invalid"), ("B", "not_found")])


def test_listing_and_verifying_need_no_torch(tmp_path: Path) -> None:
    make(tmp_path, 5)
    code = (
        "import sys\nfrom finetrainers.cli.main import main\n"
        f"assert main(['ckpt', 'ls', {str(tmp_path)!r}]) == main(['ckpt', 'verify', {str(tmp_path)!r}]) == 0\n"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
