"""The package is imported, trains and resumes where there is nothing that only POSIX systems have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from real_process import Python

from finetrainers.demo.data import training_scenes, write_clips

_PROGRAM = """
import importlib, os, pkgutil, signal, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "finetrainers"]:
    del sys.modules[name]  # imported by the server of processes, with all that this system has
absent = ("fcntl", "grp", "pwd", "resource", "termios")
for name in (*absent, "deepspeed"):  # which takes seconds
    sys.modules[name] = None
for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2"):
    delattr(signal, name)
for name in ("O_DIRECTORY", "sysconf"):
    delattr(os, name)
import finetrainers
for found in pkgutil.walk_packages(finetrainers.__path__, "finetrainers."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # libraries that need not be there
            if error.name in absent or error.name.startswith("finetrainers"):
                raise
from finetrainers.cli.main import main
steps, *flags = sys.argv[1:]
code = main(["train", *flags, "--train_steps", "1"])
if code == 0:
    code = main(["train", *flags, "--train_steps", steps, "--resume_from_checkpoint", "latest"])
sys.exit(code)
"""


@pytest.mark.rotating
def test_what_only_posix_has_is_not_needed(tiny_repo: Callable[..., Path], python: Python, tmp_path: Path) -> None:
    write_clips(tmp_path / "data", training_scenes(2))
    process = python(
        "-c", _PROGRAM, "2", "--model_name", "ltx_video", "--pretrained_model_name_or_path",
        str(tiny_repo("ltx_video")),
        "--data_root", str(tmp_path / "data"), "--dataset_file", str(tmp_path / "data" / "captions.jsonl"),
        "--video_resolution_buckets", "9x32x64", "--precompute_conditions", "--dataloader_num_workers", "1",
        "--output_dir", str(tmp_path / "run"), cwd=tmp_path,
    )  # fmt: skip
    assert process.wait() == 0, process.stdout + process.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()
