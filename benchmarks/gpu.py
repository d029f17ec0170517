"""One GPU in half an hour: its ceilings, a step with each option, whole runs, a profile and the tests on a device.

    python benchmarks/gpu.py                 # all jobs, most telling first; again: those that are not done
    python benchmarks/gpu.py --only ltx      # jobs with this in their name
    python benchmarks/gpu.py --tiny          # a rehearsal: the same code on tiny networks, without a GPU

Each job is a process of its own. What it measured is written to a file (`--results`), from which a later command
continues; jobs that another device or another torch measured are repeated. A job begins only if the time that it should
take is left of `--minutes`. The page of results (`--page`) is written after each job. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from gpu_page import page  # noqa: E402
from gpu_runs import Result, whole_run  # noqa: E402
from memory import CASES, Case, measure_case  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from finetrainers.utils.device import configure_allocator  # noqa: E402
from finetrainers.utils.logs import quiet_progress_bars  # noqa: E402


@dataclass(frozen=True)
class Job:
    """Something to measure.

    Attributes:
        seconds: that it should take on an H100; a job that takes three times as long is ended.
        measure: returns what it measured; called with whether it is a rehearsal.
        kind: section of the page.
        case: the step that it measures, if that is one.
    """

    seconds: int
    measure: Callable[[bool], Result]
    kind: str
    case: Case | None = None


# ---- ceilings --------------------------------------------------------------------------------------------------------

_KERNELS = ("default", "CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
#: Width of a head, heads, tokens: HunyuanVideo at 49x544x960, CogVideoX-5b at 49x480x720, LTX-Video at 49x512x768.
_ATTENTION = ((128, 24, 26776), (64, 48, 17776), (64, 32, 2688))


def measure_ceilings(tiny: bool) -> Result:
    """TFLOP/s of a matrix product and of attention by kernel, forward and backward; GB/s of copies."""
    attention: list[Result] = []
    for head, heads, tokens in _ATTENTION:
        shape = (1, heads, 128 if tiny else tokens, head)
        for kernel in _KERNELS:
            row: Result = {"shape": "x".join(map(str, shape)), "kernel": kernel.partition("_")[0].lower()}
            # Without such a kernel on this device, the rates stay empty.
            with contextlib.suppress(RuntimeError):
                inputs = [_draw(*shape).requires_grad_() for _ in range(3)]
                row["forward"], row["backward"] = attention_rates(kernel, inputs)
            attention.append(row)
    rates = {"matrix product, TFLOP/s": product_rate(*((256, 64) if tiny else (26776, 3072)))}
    return {"ceilings": rates | copy_rates(2**20 if tiny else 2**30), "attention": attention}


def product_rate(rows: int, width: int) -> float:
    """TFLOP/s of `[rows, width] @ [width, 4 * width]`."""
    matrix, weight = _draw(rows, width), _draw(width, 4 * width)
    return 8e-12 * rows * width**2 / seconds_of(lambda: matrix @ weight)


def copy_rates(size: int) -> dict[str, float]:
    """GB/s of copies of `size` bytes between page-locked memory and the device; of one on it, read and written."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    copy = host.to(_device())
    return {
        "copy to the device, GB/s": size / 1e9 / seconds_of(lambda: copy.copy_(host, non_blocking=True)),
        "copy to the host, GB/s": size / 1e9 / seconds_of(lambda: host.copy_(copy, non_blocking=True)),
        "copy on the device, GB/s": 2 * size / 1e9 / seconds_of(lambda: copy.clone()),
    }


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=_device(), dtype=torch.bfloat16)


def attention_rates(kernel: str, inputs: Sequence[Tensor]) -> tuple[float, float]:
    """TFLOP/s of a kernel, forward and backward, which computes 2.5 times as much."""
    _, heads, tokens, head = inputs[0].shape
    flops = 4e-12 * tokens**2 * heads * head
    with contextlib.nullcontext() if kernel == "default" else sdpa_kernel(getattr(SDPBackend, kernel)):
        out = scaled_dot_product_attention(*inputs)
        forward = seconds_of(lambda: scaled_dot_product_attention(*inputs))
        backward = seconds_of(lambda: torch.autograd.grad(out, inputs, out, retain_graph=True))
    return flops / forward, 2.5 * flops / backward


def seconds_of(call: Callable[[], Any], times: int = 5) -> float:
    """Mean seconds of a call, after one that is not timed."""

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    call()
    wait()
    started = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return max(time.perf_counter() - started, 1e-9) / times


# ---- the tests on a device -------------------------------------------------------------------------------------------


#: Tests of times, which run when the others have ended.
_TIMED = ("tests/gpu/test_hardware.py", "tests/gpu/test_block_swap.py::test_copies_overlap_with_computation")


def run_tests(tiny: bool) -> Result:
    """Summaries of the tests on a device, and the names of those that failed."""
    if tiny:
        commands = [["-m", "", "tests/gpu/test_ring.py"]]
    else:
        workers = ["-n", "12"] if find_spec("xdist") is not None else []
        marks = ["-m", "gpu and not slow and not alone"]
        deselected = [argument for test in _TIMED for argument in ("--deselect", test)]
        commands = [[*marks, *workers, *deselected, "tests/gpu"], [*marks, *_TIMED]]
    found: Result = {"summaries": [], "failed": []}
    for arguments in commands:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", *arguments]
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        summary = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|errors?)\b.* in [\d.]+s", line)]
        if not summary:
            raise RuntimeError((lines or done.stderr.splitlines() or ["pytest printed nothing"])[-1])
        found["summaries"].append(summary[-1].strip("= "))
        found["failed"] += [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    return found


# ---- all jobs --------------------------------------------------------------------------------------------------------

_LORA = {"training_type": "lora", "rank": 128, "lora_alpha": 128, "optimizer": "adamw"}
_FULL = {"training_type": "full-finetune", "optimizer": "adamw"}
_NETWORKS = {
    "hunyuan": ("HunyuanVideo", (49, 544, 960)),
    "cogvideox": ("CogVideoX-5b", (49, 480, 720)),
    "ltx": ("LTX-Video", (49, 512, 768)),
}
#: What differs from gradient checkpointing alone.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "checkpoint": {},
    "none": {"gradient_checkpointing": False},
    "keep-attention": {"gradient_checkpointing": False, "activation_memory": "keep_attention"},
    "offload": {"gradient_checkpointing": False, "activation_memory": "offload"},
    "swap": {"blocks_to_swap": 28},
    "swap-60": {"blocks_to_swap": 60},
    "compile": {"compile": "regional"},
    "no-autocast": {"lora_autocast": False},
    "flash": {"attn_backend": "_native_flash"},
    "cudnn": {"attn_backend": "_native_cudnn"},
    "efficient": {"attn_backend": "_native_efficient"},
    "int8": {"quantize_frozen": "int8"},
    "nf4": {"quantize_frozen": "nf4"},
    "fp8-storage": {"layerwise_upcasting_modules": ["transformer"]},
    "window-33": {"sliding_window_size": 33},
}
#: Values in place of those that a CPU refuses, in a rehearsal, and options that it refuses.
_ON_A_CPU = {"nf4": "int8", "_native_cudnn": "native", "_native_efficient": "native"}
_ON_CUDA = ("use_cpu_offload_optimizer", "offload_gradients")


def step_job(case: Case, seconds: int) -> Job:
    """The job of training steps, whose tiny form leaves out what a CPU refuses."""

    def measure(tiny: bool) -> Result:
        if not tiny:
            return measure_case(case, tiny=False)
        options = {
            name: _ON_A_CPU.get(str(value), value) for name, value in case.options.items() if name not in _ON_CUDA
        }
        with torch.compiler.set_stance("force_eager"):  # a CPU would compile for minutes
            return measure_case(replace(case, options=options), tiny=True)

    return Job(seconds, measure, "steps", case)


def _step(name: str, seconds: int) -> tuple[str, Job]:
    """A job by the short names of its network and its option."""
    network, _, option = name.partition("-")
    published, size = _NETWORKS[network]
    options = _OPTIONS[option]
    if "sliding_window_size" in options:
        size = (options["sliding_window_size"], *size[1:])
    return name, step_job(Case(published, {**_LORA, **options}, size), seconds)


#: Most telling first.
JOBS: dict[str, Job] = dict(
    [
        ("ceilings", Job(45, measure_ceilings, "ceilings")),
        _step("ltx-checkpoint", 30),
        _step("hunyuan-swap-60", 90),
        ("run-ltx", Job(80, lambda tiny: whole_run("sft", tiny=tiny), "runs")),
        _step("hunyuan-checkpoint", 80),
        ("tests", Job(220, run_tests, "tests")),
        _step("cogvideox-checkpoint", 40),
        _step("ltx-compile", 60),
        ("run-ltx-grpo", Job(80, lambda tiny: whole_run("grpo", tiny=tiny), "runs")),
        _step("hunyuan-keep-attention", 80),
        *(
            _step(f"ltx-{option}", 25)
            for option in ("none", "keep-attention", "offload", "swap", "no-autocast", "flash", "cudnn", "efficient")
        ),
        *(_step(f"ltx-{option}", 25) for option in ("int8", "nf4", "fp8-storage", "window-33")),
        (
            "ltx-full-offload",
            step_job(replace(CASES["ltx-full"], options=CASES["cogvideox-5b-full-offload"].options), 50),
        ),
        _step("hunyuan-offload", 80),
        ("cogvideox-5b-full-8bit", step_job(CASES["cogvideox-5b-full-8bit"], 60)),
        _step("hunyuan-nf4", 80),
        _step("hunyuan-compile", 120),
    ]
)


def machine() -> dict[str, str]:
    """The device and the versions that results depend on."""
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU: rehearsal at toy size",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
    }


def measure(name: str, *, tiny: bool) -> Result:
    """Run a job here; a failure is a note."""
    try:
        return JOBS[name].measure(tiny)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        is_memory = "out of memory" in str(error).lower()
        note = "out of memory" if is_memory else f"{type(error).__name__}: {lines[0] if lines else ''}"
        return {"note": f"failed: {note[:160]}"}


def measure_alone(name: str, *, limit_s: float) -> Result | None:
    """`measure` in a process of its own, or None if the time of this command ended it."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        command = [sys.executable, __file__, "--job", name, "--results", str(out)]
        own_limit_s = 3 * JOBS[name].seconds
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=min(limit_s, own_limit_s)
            )
        except subprocess.TimeoutExpired:
            return {"note": f"failed: took more than {own_limit_s} s"} if own_limit_s <= limit_s else None
        if out.is_file():
            return json.loads(out.read_text(encoding="utf-8"))[name]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {"note": f"failed: {(lines or [f'exit code {done.returncode}'])[-1][:160]}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs that are not in the file of results yet, and write the page of all that are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("gpu_results.json"), help="what is done")
    parser.add_argument("--page", type=Path, help="Markdown of the results; default: benchmarks/results/gpu.md")
    parser.add_argument("--only", default="", help="jobs with this in their name")
    parser.add_argument("--minutes", type=float, default=9, help="time of this command")
    parser.add_argument("--tiny", action="store_true", help="tiny networks in this process")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    configure_allocator()
    quiet_progress_bars()
    started, path = time.monotonic(), arguments.results
    if arguments.job is not None:
        path.write_text(json.dumps({arguments.job: measure(arguments.job, tiny=False)}), encoding="utf-8")
        return 0
    if not arguments.tiny and _device() == "cpu":
        print("no GPU: use --tiny for a rehearsal", file=sys.stderr)
        return 2
    here = machine()
    results: dict[str, Result] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    results = {name: found for name, found in results.items() if name in JOBS and found.get("machine") == here}
    target = arguments.page or (path.with_suffix(".md") if arguments.tiny else ROOT / "benchmarks/results/gpu.md")
    waiting = [name for name in JOBS if arguments.only in name and name not in results]
    for name in list(waiting):
        left_s = 60 * arguments.minutes - (time.monotonic() - started)
        if left_s < (0 if arguments.tiny else JOBS[name].seconds):
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        begun = time.monotonic()
        found = measure(name, tiny=True) if arguments.tiny else measure_alone(name, limit_s=left_s)
        if found is None:
            break
        results[name] = {**found, "machine": here, "took_s": time.monotonic() - begun}
        waiting.remove(name)
        path.write_text(json.dumps(results, indent=1), encoding="utf-8")
        ordered = {job: (JOBS[job], results[job]) for job in JOBS if job in results}
        target.write_text(page(here, ordered), encoding="utf-8")
    if waiting:
        print(f"not done within {arguments.minutes:g} minutes: {', '.join(waiting)}; repeat the command")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
