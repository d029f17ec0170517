"""The time from a command to the first optimizer step, and what the imports of a run take.

python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # a checkout need not be installed

from overhead import CASES, Case, machine  # noqa: E402

from finetrainers.models.registry import get_family  # noqa: E402
from finetrainers.utils.logs import configure_logging, quiet_progress_bars  # noqa: E402


def first_step_seconds(case: Case, directory: Path, *, precompute: bool) -> float:
    """Seconds from starting `python train.py ...` until its first optimizer step is logged."""
    flags = {
        "model_name": case.family,
        "pretrained_model_name_or_path": directory / "model",
        "dataset_file": directory / "clips" / "clips.jsonl",
        "video_resolution_buckets": "x".join(map(str, case.bucket)),
        "train_steps": 1,
        "output_dir": directory / "run",
    }
    command = [sys.executable, str(ROOT / "train.py")]
    command += [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    if precompute:
        command += ["--precompute_conditions", "--precompute_dir", str(directory / "cache")]
    shutil.rmtree(directory / "run", ignore_errors=True)
    started = time.time()
    _run(command)
    first = (directory / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0]
    return json.loads(first)["time"] - started


def command_seconds(*arguments: str) -> float:
    """Wall seconds of a Python command."""
    started = time.perf_counter()
    _run([sys.executable, *arguments])
    return time.perf_counter() - started


def import_seconds(statement: str) -> list[tuple[str, float]]:
    """Seconds that the modules of each top-level package take in themselves, most first, for one statement."""
    errors = _run([sys.executable, "-X", "importtime", "-c", statement])
    seconds: Counter[str] = Counter()
    for line in errors.splitlines():
        if line.startswith("import time:") and "self" not in line:
            own, _, name = line.removeprefix("import time:").split("|")
            seconds[name.strip().partition(".")[0]] += int(own) / 1e6  # type: ignore[assignment]
    return seconds.most_common()


def _run(command: list[str]) -> str:
    """Run from the checkout; what it wrote to stderr.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    return result.stderr


def startup_tables(case: Case, *, repeats: int, directory: Path) -> Iterator[str]:
    """Lines of the start-up report."""
    case.build(directory)
    family = get_family(case.family)
    imports = f"import finetrainers.runs.run, {family.spec.partition(':')[0]}"

    def without_cache() -> float:
        shutil.rmtree(directory / "cache", ignore_errors=True)
        return first_step_seconds(case, directory, precompute=True)

    measured = {
        "`train.py --help`": lambda: command_seconds("train.py", "--help"),
        "`import torch`": lambda: command_seconds("-c", "import torch"),
        "`import` of all that a run needs": lambda: command_seconds("-c", imports),
        "first step logged": lambda: first_step_seconds(case, directory, precompute=False),
        "first step logged, precomputing": without_cache,
        "first step logged, precomputed before": lambda: first_step_seconds(case, directory, precompute=True),
    }
    yield from ("| from the command to | median s | min | max |", "|---|---|---|---|")
    for name, measure in measured.items():
        seconds = [measure() for _ in range(repeats)]
        yield f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |"
    packages = import_seconds(imports)
    yield from ("", "| package | own import s |", "|---|---|")
    for package, seconds_ in packages[:12]:
        yield f"| {package} | {seconds_:.2f} |"
    yield f"| all | {sum(s for _, s in packages):.2f} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0], prog="startup.py")
    parser.add_argument("--case", choices=CASES, default="ltx", help="network [ltx]")
    parser.add_argument("--repeats", type=int, default=3, help="how often each start is measured [3]")
    arguments = parser.parse_args(argv)
    configure_logging()
    quiet_progress_bars()
    print(f"{machine()}\n", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for line in startup_tables(CASES[arguments.case], repeats=arguments.repeats, directory=Path(directory)):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
