"""One run per output directory, as long as its process lives and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from refusals import refused_options

from finetrainers.rundir.lock import exclusive

ROOT = Path(__file__).parents[2]
ALONE = SimpleNamespace(is_main=True, broadcast_object=lambda value: value)
_HOLDING = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from finetrainers.rundir.lock import exclusive
with exclusive(Path(sys.argv[1]), SimpleNamespace(is_main=True, broadcast_object=lambda value: value)):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone_however(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDING, str(tmp_path / "run")], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "ready\n"
        with (
            refused_options(("--output_dir", "occupied")) as refusal,
            exclusive(tmp_path / "run", ALONE),
        ):
            pass
        assert f"(process {holder.pid} on " in str(refusal.value)
        assert (tmp_path / "run" / ".lock-holder.json").is_file()  # the refused one did not clear it away
        # Nor does it help to remove the lock, or to damage what it says.
        (tmp_path / "run" / ".lock").unlink()
        for content in (b"{", b"[]", b"\xff", b'{"pid": 3}'):
            (tmp_path / "run" / ".lock-holder.json").write_bytes(content)
            with (
                refused_options(("--output_dir", "occupied")) as refusal,
                exclusive(tmp_path / "run", ALONE),
            ):
                pass
            assert "(process" not in str(refusal.value)
    finally:
        holder.kill()
        holder.wait()
    with exclusive(tmp_path / "run", ALONE), refused_options(("--output_dir", "occupied")) as refusal:  # noqa: SIM117
        with exclusive(tmp_path / "run", ALONE):
            pass
    assert f"process {os.getpid()}" in str(refusal.value)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
