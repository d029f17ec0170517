"""Training from Python: what `train` gives back, what may watch it, and that the process is as it was before."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers import CogVideoXPipeline
from huggingface_hub.utils import are_progress_bars_disabled
from refusals import refused, refused_options
from safetensors.torch import load_file

from finetrainers import Callback, TrainState, load_config, train
from finetrainers.training.control import SIGNALS

ROOT = Path(__file__).parents[2]
#: The method that computes rotary positions.
POSITIONS = "_prepare_rotary_positional_embeddings"


class Watcher(Callback):
    """Notes what it is told, and asks for the end after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.losses: list[float] = []
        self.told: list[str] = []

    def on_start(self, state: TrainState) -> None:
        self.told.append("start")
        # What a run may do to its process, as a callback or a library would.
        os.environ["FINETRAINERS_TEST_LEFT"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)
        torch.backends.cudnn.benchmark = True
        logging.getLogger("finetrainers.test").setLevel(logging.DEBUG)
        np.random.seed(1)
        random.seed(1)

    def on_log(self, state: TrainState, record: dict[str, float]) -> None:
        if "loss" in record:
            self.losses.append(record["loss"])
        if state.step == self.stop_after:
            state.requests.stop = "the watcher"

    def on_end(self, state: TrainState) -> None:
        self.told.append("end")


def process_state() -> dict[str, Any]:
    """What all code of a process shares."""
    logging.getLogger("finetrainers.test")
    names = [n for n, logger in logging.Logger.manager.loggerDict.items() if isinstance(logger, logging.Logger)]
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),
        "python": random.getstate(),
        "precision": [
            cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic,
            torch.get_float32_matmul_precision(),
            *(getattr(place, "fp32_precision", None) for place in (torch.backends, matmul, cudnn)),
        ],
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "environment": dict(os.environ),
        "levels": {name: (logging.getLogger(name).level, logging.getLogger(name).propagate) for name in names},
        "root": (logging.root.level, list(logging.root.handlers)),
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "warnings": list(warnings.filters),
        "bars": [
            diffusers.utils.logging.is_progress_bar_enabled(), transformers.utils.logging.is_progress_bar_enabled(),
            are_progress_bars_disabled(),
        ],
        "directory": Path.cwd(),
    }  # fmt: skip


def test_a_run_gives_back_what_it_left_and_leaves_the_process_as_it_was(
    options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers.utils.logging.enable_progress_bar()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    watcher = Watcher()
    values = options(
        clips=2, train_steps=2, validation_prompts="a cat@@@9x64x64:::b@@@1x64x64", validation_steps=1,
        validation_inference_steps=2,
    )  # fmt: skip
    before = process_state()
    result = train(load_config(**values), callbacks=[watcher])
    after = process_state()
    # Loggers that a library made on its import are its own.
    after["levels"] = {name: after["levels"][name] for name in before["levels"]}
    assert {name for name in before if before[name] != after[name]} == set()
    diffusers.utils.logging.disable_progress_bar()

    assert watcher.told == ["start", "end"]
    assert watcher.losses == [record["loss"] for record in result.metrics if "loss" in record]
    assert len(watcher.losses) == 2
    assert result.step == 2
    assert result.stopped_by is None
    assert result.run_dir == Path(values["output_dir"])
    assert [path.relative_to(result.run_dir / "samples").as_posix() for path in result.samples] == [
        f"step-{step:06d}/0{prompt}" for step in (0, 1, 2) for prompt in ("0-a-cat-0.mp4", "1-b-0.mp4")
    ]
    assert all(path.is_file() for path in result.samples)
    assert result.weights == result.run_dir / "pytorch_lora_weights.safetensors"
    pipeline = result.pipeline("cpu")
    loaded = dict(pipeline.transformer.named_parameters())
    trained = load_file(result.weights)
    name = next(name for name in trained if "lora_B" in name)
    loaded_name = name.removeprefix("transformer.").replace(".weight", ".default_0.weight")
    assert torch.equal(loaded[loaded_name], trained[name])
    assert loaded[loaded_name].abs().max() > 0
    with torch.no_grad():
        video = pipeline("a cat", num_frames=9, height=64, width=64, num_inference_steps=2, output_type="np").frames
    assert video.shape == (1, 9, 64, 64, 3)


def test_a_callback_stops_a_run_and_full_weights_load(options: Callable[..., dict]) -> None:
    values = options(training_type="full-finetune", train_steps=2)
    stopped = train(load_config(**values), callbacks=[Watcher(stop_after=1)])
    assert (stopped.step, stopped.stopped_by, stopped.weights) == (1, "the watcher", None)
    with refused("not_found", stopped.run_dir, "the watcher"):
        stopped.pipeline()
    result = train(load_config(**values, resume_from_checkpoint="latest"))
    assert result.step == 2
    assert [record["step"] for record in result.metrics] == [1, 2]
    assert result.weights == result.run_dir / "transformer"
    trained = load_file(result.weights / "diffusion_pytorch_model.safetensors")
    loaded = result.pipeline("cpu").transformer.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())


def test_what_does_not_change_during_a_run_is_not_asked_again_at_each_step(
    options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which packages are installed, and the positions of clips of the same size."""
    asked: list[str] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            asked.append(function.__name__)
            return function(*values, **named)

        return call

    class AfterTheFirstStep(Callback):
        def on_step(self, state: TrainState) -> None:
            if state.step == 2:
                monkeypatch.undo()
                return
            monkeypatch.setattr(importlib.util, "find_spec", noted(importlib.util.find_spec))
            monkeypatch.setattr(CogVideoXPipeline, POSITIONS, noted(getattr(CogVideoXPipeline, POSITIONS)))

    losses = Watcher()
    train(load_config(**options("cogvideox", version="5b", train_steps=3)), callbacks=[losses, AfterTheFirstStep()])
    assert len(losses.losses) == 3
    assert asked == []


def test_a_dry_run_has_trained_nothing(options: Callable[..., dict], capsys: pytest.CaptureFixture[str]) -> None:
    result = train({**options(), "dry_run": True})
    assert (result.step, result.metrics, result.samples, result.weights) == (0, [], [], None)
    with refused("not_found", result.run_dir, "dry run"):
        result.pipeline()
    with refused_options(("--config", "not_found")):
        train("absent.toml")


#: Libraries that this run does not use, of which diffusers imports some whenever they are installed.
OPTIONAL = ("bitsandbytes", "torchao", "scipy", "deepspeed")
#: What else this run does not use.
UNUSED = (
    "came_pytorch", "datasets", "decord", "matplotlib", "pandas", "prodigyopt", "skvideo", "tensorboard", "torchcodec",
    "trackio", "wandb", "finetrainers.cli", "finetrainers.demo", "finetrainers.methods.dpo.method",
    "finetrainers.methods.grpo.method", "finetrainers.models.cogvideox", "finetrainers.models.hunyuan_video",
    "finetrainers.parallel.fsdp", "finetrainers.parallel.zero", "finetrainers.rewards.registry",
)  # fmt: skip

#: Notes which package first imports each of the modules named in the arguments.
_IMPORTERS = """
import json, sys
importers = {}
def note(event, arguments):
    if event == "import" and arguments[0] in sys.argv[2:] and arguments[0] not in importers:
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename: frame = frame.f_back
        importers[arguments[0]] = frame.f_globals["__name__"].partition(".")[0]
sys.addaudithook(note)
"""
_FRESH = """
from finetrainers import load_config, train
first = []
class Noting:
    def __init__(self, stream): self.stream = stream
    def write(self, text):
        if text.strip() and not first: first.extend([text, "torch" in sys.modules])
        return self.stream.write(text)
    def __getattr__(self, name): return getattr(self.stream, name)
sys.stdout = Noting(sys.stdout)
train(load_config(**json.loads(sys.argv[1])))
sys.stdout = sys.stdout.stream
print(json.dumps([*first, importers, list(sys.modules)]))
"""


def in_fresh_process(program: str, values: str) -> subprocess.CompletedProcess[str]:
    """Run a program that prints what it has imported."""
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_VERBOSITY")}
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTERS + program, values, *OPTIONAL], env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_a_fresh_process_says_first_what_it_will_do_and_libraries_say_nothing(options: Callable[..., dict]) -> None:
    """Libraries talk on their import, so they must not have been imported; those that the run does not use, never."""
    values = json.dumps(options(train_steps=1, validation_prompts="a@@@9x64x64", validation_inference_steps=2))
    done = in_fresh_process(_FRESH, values)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    text, had_torch, importers, loaded = json.loads(lines[-1])
    assert re.match(r"sft lora .* ltx_video \(", text)
    assert not had_torch
    assert re.match(r"to load: text encoder [\d.]+ KiB, VAE [\d.]+ MiB, transformer [\d.]+ KiB$", lines[1])
    for name in ("text encoder", "VAE", "transformer"):
        assert [line for line in lines if re.match(rf"loaded the {name}: [\d.]+ [KM]iB in [\d.]+ s$", line)], name
    assert not [line for line in lines if "WARNING" in line or "Loading" in line]
    assert set(importers.values()) <= {"diffusers"}, importers
    assert {"deepspeed", *UNUSED} & set(loaded) == set()


#: What estimating and a dry run do not use besides: PyTorch's compiler, and diffusers' pipelines.
PLANNING_UNUSED = (
    "diffusers.pipelines.ltx", "torch._inductor.compile_fx", "finetrainers.training.trainer",
    "finetrainers.results.reports.page"
)  # fmt: skip
_PLANNING = """
from finetrainers.cli.main import main
flags = json.loads(sys.argv[1])
loaded = {}
for command in (["estimate"], ["train", "--dry_run"]):
    assert main([*command, *flags]) == 0
    loaded[" ".join(command)] = list(sys.modules)
print(json.dumps([importers, loaded]))
"""


def test_estimates_and_dry_runs_import_only_what_they_use(options: Callable[..., dict]) -> None:
    """Neither of them computes anything, and most of their time is imports."""
    given = options(validation_prompts="a@@@9x64x64", video_resolution_buckets="9x64x64")
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    importers, loaded = json.loads(in_fresh_process(_PLANNING, json.dumps(flags)).stdout.splitlines()[-1])
    assert set(importers.values()) <= {"diffusers", "peft"}, importers
    assert {"deepspeed", *UNUSED, *PLANNING_UNUSED} & set(loaded["estimate"]) <= {"finetrainers.cli"}
    by_train = {"finetrainers.cli", "finetrainers.training.trainer", "finetrainers.results.reports.page"}
    assert {"deepspeed", *UNUSED, *PLANNING_UNUSED} & set(loaded["train --dry_run"]) <= by_train


def test_one_process_without_a_launcher_may_keep_its_weights_in_host_memory(
    options: Callable[..., dict], tmp_path: Path
) -> None:
    """FSDP2 with CPU offload clips, which the offloaded optimizer cannot; the process is left as it was."""
    found = []
    for name, more in {"plain": {}, "offloaded": {"fsdp": "full", "fsdp_cpu_offload": True}}.items():
        config = options(
            training_type="full-finetune", max_grad_norm=0.01, mixed_precision="no", optimizer="adamw",
            checkpointing_steps=0, train_steps=2, output_dir=str(tmp_path / name), **more,
        )  # fmt: skip
        result = train(load_config(**config))
        found.append([(record["loss"], record["grad_norm"]) for record in result.metrics])
        assert not torch.distributed.is_initialized()
    assert found[0] == [pytest.approx(one, rel=1e-5) for one in found[1]]
