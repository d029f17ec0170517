"""Targets: files that this project writes, and commands and functions that read them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from finetrainers.cli.main import main
from finetrainers.data.cache.store import read_about, read_entry
from finetrainers.results.card_facts import figures
from finetrainers.rundir.manifest import write_manifest
from finetrainers.rundir.run_dir import RunDirectory
from finetrainers.sampling.ledger import SampleIndex
from finetrainers.sampling.watch.scores import Scores, recorded_labels
from finetrainers.tools.doctor.hosts import read_hosts
from finetrainers.utils.failures import InputError
from finetrainers.utils.headers import adapter_metadata, read_header

from .damage import Format
from .harness import Case
from .media import media_cases, table_cases

_TESTS = Path(__file__).parents[1]
#: Runs of an earlier version with checkpoints, and records of a later one of the same runs.
_RUNS, _RECORDS = _TESTS / "upgrades" / "ac471eb6", Path(__file__).parent / "seeds"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]")
_MODEL = ("--model_name", "ltx_video", "--pretrained_model_name_or_path", "demo://ltx")
_NEW = ("--output_dir", "new", "--dry_run")
_GRPO = ("train", "--config", "grpo.toml", "--train_steps", "7", *_NEW)
_RESUME = (
    "train", "--config", "sft.toml", "--output_dir", "runs/sft", "--train_steps", "7",
    "--resume_from_checkpoint", "latest", "--dry_run",
)  # fmt: skip
_SAMPLE = ("sample", "runs/sft", "--prompts", "a red ball", "--dry_run")
_DEMO = ("demo://ltx", "--output_dir", "s")
_WATCH = ("watch", "runs/sft", "--prompts", "a red ball", "--once", "--dry_run")


def run_command(*arguments: str) -> None:
    """Run a command in this process.

    Raises:
        InputError: it refuses its arguments or a file.
        AssertionError: its exit code is another one, or its output has control characters.
    """
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(list(arguments))
    text = output.getvalue()
    control = _CONTROL.search(text)
    assert control is None, (
        f"the output has {control[0]!r}: {text[max(0, control.start() - 40) : control.end() + 40]!r}"
    )
    refusals = (1, 2) if arguments[:2] == ("ckpt", "verify") else (2, 65)
    assert code in (0, *refusals), f"exit code {code}: {text[-500:]}"
    if code:
        raise InputError(text)


def _refusing_values(read: Callable[[], Any]) -> Any:
    """Call a function whose refusals are plain ValueErrors."""
    try:
        return read()
    except ValueError as error:
        if type(error) is ValueError:
            raise InputError(str(error)) from None
        raise


def _cases(path: Path, form: Format, commands: dict[str, Sequence[str]], **more: Any) -> list[Case]:
    """Return the cases of a file that several commands read."""
    name = "/".join(path.parts[-2:])
    return [
        Case(f"{name}: {about}", path, partial(run_command, *command), form, **more)
        for about, command in commands.items()
    ]


def _write_runs(directory: Path) -> None:
    shutil.copytree(_RUNS, directory, dirs_exist_ok=True)
    shutil.copytree(_RECORDS, directory / "runs", dirs_exist_ok=True)


# ---- headers ---------------------------------------------------------------------------------------------------------


def header_cases(directory: Path) -> list[Case]:
    """Headers of LoRAs, of a network, of an index of several files, and of entries of the cache."""
    _write_runs(directory)
    lora = directory / "lora.safetensors"
    shutil.copy(directory / "runs/stages/low/pytorch_lora_weights.safetensors", lora)
    commands: dict[str, Sequence[str]] = {
        "init_from": ("train", "--config", "sft.toml", "--init_from", "lora.safetensors", *_NEW),
        "sample": (
            "sample",
            "demo://ltx",
            "lora.safetensors",
            "--prompts",
            "a@@@9x32x64",
            "--output_dir",
            "s",
            "--dry_run",
        ),
    }
    cases = _cases(lora, "safetensors", commands)
    cases.append(Case("lora: header", lora, partial(_read_lora, lora), "safetensors"))
    network = directory / "network.safetensors"
    tensors = {f"transformer_blocks.{k}.attn1.to_{n}.weight": torch.zeros(4, 4) for k in range(2) for n in "qkv"}
    safetensors.torch.save_file(tensors, network, {"format": "pt"})
    cases.append(Case("network: header", network, partial(read_header, network), "safetensors"))
    entry = min((directory / "runs/sft/precomputed/tensors").glob("*/*.safetensors"))
    for name, read in (("entry", read_entry), ("about", read_about)):
        cases.append(Case(f"cache: {name}", entry, partial(_refusing_values, partial(read, entry)), "safetensors"))
    return cases


def _read_lora(path: Path) -> None:
    adapter_metadata(path, read_header(path))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def manifest_cases(directory: Path) -> list[Case]:
    """A checkpoint's manifest, with a checksum that fits by turns, and its state, with a manifest that fits."""
    _write_runs(directory)
    checkpoint = directory / "runs/sft/checkpoints/step-4"
    commands: dict[str, Sequence[str]] = {
        "ls": ("ckpt", "ls", "runs/sft"), "verify": ("ckpt", "verify", "runs/sft"), "resume": _RESUME,
        "sample": _SAMPLE, "report": ("report", "runs/sft"),
    }  # fmt: skip
    manifest, state = checkpoint / "manifest.json", checkpoint / "state.json"
    facts = {
        key: value for key, value in json.loads(manifest.read_text()).items() if key not in ("files", "manifest_sha256")
    }

    def list_again(rng: random.Random) -> None:
        manifest.unlink()  # or it would list itself
        write_manifest(checkpoint, facts=facts)

    return [
        *_cases(manifest, "json", commands, prepare=partial(_seal, manifest)),
        *_cases(state, "json", {name: commands[name] for name in ("resume", "sample", "ls")}, prepare=list_again),
    ]


def _seal(manifest: Path, rng: random.Random) -> None:
    """Renew the checksum of a manifest, or leave it out, so that what is in it is read."""
    content = manifest.read_bytes()
    sealed = re.search(rb'"manifest_sha256": *"([^"]*)"', content)
    if sealed is None or rng.random() < 0.2:
        return
    blank = content.replace(sealed[1], b"0" * 64) if sealed[1] else content
    manifest.write_bytes(blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1))


# ---- what a run directory keeps --------------------------------------------------------------------------------------


def ledger_cases(directory: Path) -> list[Case]:
    """Lists of clips, events, settings, identities and indexes of run directories."""
    _write_runs(directory)
    runs = directory / "runs"
    report, samples = ("report", "runs/sft"), "runs/sft/samples/sample"
    stages = ("run", "stages.toml", "--plan")
    commands: dict[str, tuple[Format, dict[str, Sequence[str]]]] = {
        "sft/manifest.jsonl": ("jsonl", {"report": report, "resume": _RESUME}),
        "sft/events.jsonl": ("jsonl", {"report": report, "resume": _RESUME, "sample": _SAMPLE}),
        "sft/env.json": ("json", {"report": report}),
        "sft/run.json": ("json", {"report": report, "resume": _RESUME, "watch": _WATCH}),
        "sft/config.toml": ("toml", {"report": report, "sample": _SAMPLE, "watch": _WATCH, "resume": _RESUME}),
        "sft/samples/sample/ledger.jsonl": ("jsonl", {"report": report, "sample": _SAMPLE}),
        "sft/watch/run/watched.json": ("json", {"watch": _WATCH, "report": report}),
        "datasets/dataset.toml": ("toml", {"report": ("report", "runs/datasets")}),
        "stages/low/stage.toml": ("toml", {"plan": stages}),
        "stages/low/events.jsonl": ("jsonl", {"plan": stages}),
        "stages/low/config.toml": ("toml", {"plan": stages}),
        "stages/high/events.jsonl": ("jsonl", {"plan": stages, "report": ("report", "runs/stages/high")}),
    }
    cases = [case for name, (form, reads) in commands.items() for case in _cases(runs / name, form, reads)]
    cases.append(
        Case("ledger: index", directory / samples / "ledger.jsonl", partial(SampleIndex, directory / samples), "jsonl")
    )
    cache = runs / "sft/precomputed"
    for path in (*cache.glob("tensors/index/*.log"), *cache.glob("digests/*.log"), *cache.glob("models/**/*.json")):
        reads = {
            "ls": ("cache", "ls", str(cache)),
            "train": ("train", "--config", "sft.toml", "--precompute_dir", str(cache), *_NEW),
        }
        cases += _cases(path, "json" if path.suffix == ".json" else "lines", reads)
    return cases


# ---- records ---------------------------------------------------------------------------------------------------------


def record_cases(directory: Path) -> list[Case]:
    """Metrics, scores, rollouts and health of runs."""
    _write_runs(directory)
    sft, grpo = directory / "runs/sft", directory / "runs/grpo"
    health = [
        {"time": 1.8e9 + k, "host": "a", "gpus": [{"name": "x", "ecc": k, "power_w": 70.5}], "ports": {}}
        for k in range(3)
    ]
    (sft / "health.jsonl").write_text("".join(json.dumps(record) + "\n" for record in health))
    report: dict[str, Sequence[str]] = {"report": ("report", "runs/sft"), "plot": ("plot", "runs/sft")}
    rollouts: dict[str, Sequence[str]] = {"report": ("report", "runs/grpo")}
    step = grpo / "rollouts/step-000001"
    cases = [
        *_cases(
            sft / "metrics.jsonl",
            "jsonl",
            {**report, "resume": _RESUME, "compare": ("report", "runs/sft", "runs/grpo")},
        ),
        *_cases(sft / "health.jsonl", "jsonl", {"report": report["report"]}),
        *_cases(sft / "watch/run/scores.jsonl", "jsonl", {"report": report["report"], "watch": _WATCH}),
        *_cases(grpo / "metrics.jsonl", "jsonl", {**rollouts, "plot": ("plot", "runs/grpo")}),
        *_cases(step / "clips.jsonl", "jsonl", rollouts),
        *_cases(step / "scores.json", "json", rollouts),
    ]
    functions: dict[str, tuple[Path, Callable[[], Any]]] = {
        "card": (sft / "metrics.jsonl", partial(figures, sft)),
        "rewind": (sft / "metrics.jsonl", partial(_rewind, sft / "metrics.jsonl", directory / "rewound")),
        "scores": (sft / "watch/run/scores.jsonl", partial(_read_scores, sft / "watch/run")),
    }
    return [*cases, *(Case(f"{path.name}: {name}", path, read, "jsonl") for name, (path, read) in functions.items())]


def _rewind(metrics: Path, root: Path) -> None:
    """Drop the metrics of later steps in a copy, as a resumed run does."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    shutil.copy(metrics, root / "metrics.jsonl")
    RunDirectory(root, writes=True).rewind(2)


def _read_scores(folder: Path) -> None:
    list(Scores(folder, ["brightness"]).columns())
    recorded_labels(folder.parent)


# ---- configuration ---------------------------------------------------------------------------------------------------

_PROMPTS = '{"prompt": "a red ball", "size": "9x32x64"}\n{"prompt": "a box"}\n'
_TOML_PROMPTS = '[[prompts]]\nprompt = "a red ball"\nsize = "9x32x64"\n\n[[prompts]]\nprompt = "a box"\n'
_ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
_ZERO = """\
distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config:
  zero_stage: 2
  offload_optimizer_device: cpu
"""
_PRESETS = '[presets.wide]\nsize = "9x32x64"\nsteps = 3\nguidance = 2.5\n'


def configuration_cases(directory: Path) -> list[Case]:
    """Configurations, stages, prompts, presets, hosts, launcher files and command lines."""
    _write_runs(directory)
    (directory / "dpo.toml").write_text(
        (directory / "dpo.toml").read_text().replace("runs/sft/checkpoints/step-4", "lora.safetensors")
    )
    shutil.copy(directory / "runs/stages/low/pytorch_lora_weights.safetensors", directory / "lora.safetensors")
    texts = {
        "p.jsonl": _PROMPTS, "p.toml": _TOML_PROMPTS, "p.txt": "a red ball\na box\n", "a.yaml": _ACCELERATE,
        "z.yaml": _ZERO, "presets.toml": _PRESETS, "hosts": "node1 slots=8\nnode2 slots=8  # a comment\n",
    }  # fmt: skip
    for name, text in texts.items():
        (directory / name).write_text(text)
    sft = ("train", "--config", "sft.toml", *_NEW)
    reads: dict[str, tuple[Format, Sequence[str]]] = {
        "sft.toml": ("toml", sft), "dpo.toml": ("toml", ("train", "--config", "dpo.toml", *_NEW)),
        "grpo.toml": ("toml", _GRPO), "two.toml": ("toml", ("train", "--config", "datasets.toml", *_NEW)),
        "stages.toml": ("toml", ("run", "stages.toml", "--plan")), "prompts.txt": ("lines", _GRPO),
        "p.jsonl": ("jsonl", (*sft, "--validation_prompts", "p.jsonl", "--validation_steps", "2")),
        "p.toml": ("toml", (*sft, "--validation_prompts", "p.toml", "--validation_steps", "2")),
        "p.txt": ("lines", ("sample", *_DEMO, "--prompts", "p.txt", "--size", "9x32x64", "--dry_run")),
        "a.yaml": ("yaml", ("estimate", *_MODEL, "--accelerate_config", "a.yaml")),
        "z.yaml": ("yaml", ("estimate", *_MODEL, "--accelerate_config", "z.yaml")),
        "presets.toml": ("toml", (*_WATCH, "--presets_file", "presets.toml", "--presets", "wide")),
    }  # fmt: skip
    cases = [case for name, (form, read) in reads.items() for case in _cases(directory / name, form, {read[0]: read})]
    cases.append(Case("hosts", directory / "hosts", partial(read_hosts, directory / "hosts"), "lines"))
    lines = [
        [*_GRPO[:-1], "--rollout_size", "9x32x64", "--reward", "brightness", "--lr", "1e-4"],
        [
            "train", *_MODEL, "--data_root", "clips", "--video_resolution_buckets", "9x32x64", "--rank", "4", "--lr",
            "1e-4", "--validation_prompts", "a@@@9x32x64:::b", "--validation_steps", "2", "--train_steps", "3",
        ],
        ["sample", "demo://ltx", "--prompts", "a", "--seed", "3", "--size", "9x32x64", "--num_inference_steps", "4"],
        [*_WATCH[:-1], "--presets", "low4s,run", "--preset", "x=9x32x64,steps=3", "--reward", "brightness"],
    ]  # fmt: skip
    for index, arguments in enumerate(lines):
        path = directory / f"command-{index}.json"
        path.write_text(json.dumps(arguments))
        cases.append(Case(f"command line: {arguments[0]}", path, partial(_run_line, path), "arguments"))
    estimate = directory / "estimate.json"
    estimate.write_text(
        json.dumps(["estimate", *_MODEL, "--gpu", "24GB", "--video_resolution_buckets", "9x32x64", "--rank", "8"])
    )
    return [*cases, Case("command line: estimate", estimate, partial(_run_line, estimate), "arguments")]


def _run_line(path: Path) -> None:
    """Run a command of a file, without its work."""
    arguments = json.loads(path.read_text())
    run_command(*arguments, *(["--dry_run"] if arguments[0] != "estimate" else []))


TARGETS: dict[str, Callable[[Path], Sequence[Case]]] = {
    "headers": header_cases, "manifests": manifest_cases, "ledgers": ledger_cases, "records": record_cases,
    "configuration": configuration_cases, "media": media_cases, "tables": table_cases,
}  # fmt: skip
