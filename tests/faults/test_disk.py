"""Disks that are full, folders that cannot be written or are gone: the run ends with exit code 1 or 2, and goes on
afterwards."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
from real_process import Python

from finetrainers.utils import exit_codes

#: The command, with files of this size at most: what a quota or a full disk does to a write, though by another error.
_SMALL_FILES = """
import resource, signal, sys
from finetrainers.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_that_is_full_costs_the_checkpoint_alone(train: Callable[..., Any], files: Any, straight: Any) -> None:
    failed = train("enospc@save.write:3")
    assert failed.wait() == exit_codes.FAILED
    assert f"error: {os.strerror(errno.ENOSPC)}" in failed.stderr
    assert "--resume_from_checkpoint latest\n(traceback: " in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "OSError: [Errno 28]" in (files.root / "traceback.txt").read_text()
    assert files.checkpoints == [1, 2]
    assert sorted(path.name for path in (files.root / "checkpoints").iterdir()) == ["step-1", "step-2"]
    # What was being recorded meanwhile is cut off, too.
    with (files.root / "metrics.jsonl").open("a") as file:
        file.write('{"time": 1.5, "step": 3, "lo')
    # There is room again, but not for the results.
    failed = train("enospc@export", resume=True)
    assert failed.wait() == exit_codes.FAILED
    assert files.checkpoints == [7, 8]
    assert not (files.root / "pytorch_lora_weights.safetensors").exists()
    done = train(resume=True)
    assert done.wait() == 0, done.stderr
    assert files.same_as(straight)
    assert files.events.count("checkpoint") == 8, "no step was trained twice"


@pytest.mark.rotating
def test_a_write_that_is_cut_short_publishes_nothing(
    python: Python, flags: Callable[..., list[str]], files: Any
) -> None:
    failed = python("-c", _SMALL_FILES, *flags(files.root))
    assert failed.wait() == exit_codes.FAILED
    assert os.strerror(errno.EFBIG) in failed.stderr
    assert list((files.root / "checkpoints").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(
    python: Python, flags: Callable[..., list[str]], files: Any
) -> None:
    file = files.root.parent / "file"
    file.touch()
    for place, named in {"/proc/run": "/proc; ", file / "run": f"{file} "}.items():
        refused = python("-m", "finetrainers", *flags(place))
        assert refused.wait() == exit_codes.CONFIGURATION, refused.stderr
        assert re.search(rf"--output_dir: .*{re.escape(named)}", refused.stderr)


def test_a_folder_that_is_gone_ends_the_run(train: Callable[..., Any], files: Any) -> None:
    process = train()
    process.wait_until(lambda: (files.root / "checkpoints" / "step-1").exists())
    process.send_signal(signal.SIGSTOP)
    shutil.rmtree(files.root)
    process.send_signal(signal.SIGCONT)
    assert process.wait() == exit_codes.FAILED
    assert os.strerror(errno.ENOENT) in process.stderr
