"""Memory options that a run chooses by itself: the same results bit for bit, recorded, repeated, and made again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published_networks import NETWORKS, published_repository
from safetensors.torch import load_file

from finetrainers.config.load import load_config
from finetrainers.config.root import MEMORY, TrainConfig
from finetrainers.memory import activation_auto
from finetrainers.memory.activation_plan import Machine
from finetrainers.memory.automatic import EXACT_CHOICES
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import with_reserve, without_reserve
from finetrainers.plan import automatic
from finetrainers.plan.automatic import choose_settings, record_choices
from finetrainers.plan.dry_run import dry_run_report
from finetrainers.plan.memory_plan import RunMemory, with_open_options
from finetrainers.plan.preflight import ResolvedRun, preflight, with_options
from finetrainers.plan.ready import get_ready
from finetrainers.rundir.run_records import read_run
from finetrainers.sampling.weights import run_source
from finetrainers.training.callbacks import validation
from finetrainers.utils.phases import TRAINING_STEP

STEPS = {"train_steps": 2, "checkpointing_steps": 1}
SAMPLES = {
    "validation_prompts": "one@@@9x64x64", "validation_steps": 1, "validation_inference_steps": 2,
    "validation_guidance_scale": 1.0,
}  # fmt: skip


class Accelerator(str):
    """The CPU as a device that networks are moved to."""

    type = "cuda"


def contents(directory: Path) -> dict[str, bytes]:
    """Return every tensor and sample of a run and its checkpoints."""
    files = {path.name: path.read_bytes() for path in directory.rglob("*.mp4")}
    for path in directory.rglob("*.safetensors"):
        if "precomputed" not in path.parts:
            files |= {f"{path.relative_to(directory)} {n}": t.numpy().tobytes() for n, t in load_file(path).items()}
    return files


def chosen(config: TrainConfig) -> dict[str, Any]:
    """Return the memory options that were chosen."""
    return {name: config.get(name) for name, source in config.chosen.items() if source == MEMORY}


def use_machine(monkeypatch: pytest.MonkeyPatch, machine: Machine | None) -> None:
    """Let runs choose as on a GPU with this memory, or as on a CPU."""
    monkeypatch.setattr(automatic, "chooses_on", lambda device: machine is not None)
    monkeypatch.setattr(automatic, "_machine", lambda *_: machine)


def step_bytes(checked: ResolvedRun, **options: Any) -> float:
    """Return hardly more than the planned bytes of a training step with memory options."""
    return 1.0001 * RunMemory(checked).plan(checked.config.with_values(options)).peaks[TRAINING_STEP]


def test_chosen_options_change_no_bit_and_are_repeated(
    options: Callable[..., dict], run: Callable[..., Any], tiny_repo: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Swapped blocks with checkpointing; on a smaller GPU, activations in host memory."""
    model = str(tiny_repo("ltx_video", layers=6))
    values = options(**STEPS, precompute_conditions=True, pretrained_model_name_or_path=model)
    plain = run(**{**values, "output_dir": str(tmp_path / "plain")})
    assert not chosen(plain.state.config)
    expected = contents(tmp_path / "plain")
    checked = preflight(load_config(**{**values, "output_dir": str(tmp_path / "new")}))
    choices = {"activation_memory": "checkpoint", "selective_checkpointing": 4 / 6, "blocks_to_swap": 4}
    limit = step_bytes(checked, activation_memory="checkpoint", blocks_to_swap=4)
    large = Machine(limit, 0.0, 1e15, 1e6)  # no host memory for activations, and copies take long
    use_machine(monkeypatch, replace(large, host=2.0**40))
    first = run(**{**values, "output_dir": str(tmp_path / "chosen")})
    assert chosen(first.state.config) == choices
    assert contents(first.root) == expected
    assert first.curve("loss", "grad_norm") == plain.curve("loss", "grad_norm")
    manifest = json.loads((first.root / "checkpoints" / "step-2" / "manifest.json").read_text())
    assert {manifest["chosen"][name] for name in choices} == {MEMORY}
    assert "[chosen.memory]" in (first.root / "config.toml").read_text()
    assert read_run(first.root).options["blocks_to_swap"] == 4
    assert re.search(r"^chosen \(.*\): .*blocks_to_swap 4", capsys.readouterr().out, re.MULTILINE)

    copy = load_config(first.root / "config.toml", output_dir=str(tmp_path / "new"))
    assert chosen(copy).keys() <= choices.keys()
    assert not chosen(preflight(copy).config), "a new run chooses for its own GPU"
    assert "blocks_to_swap" not in run_source(first.root).values, "and so do samples"

    def resume(name: str, machine: Machine | None) -> dict[str, Any]:
        directory = tmp_path / name
        shutil.copytree(first.root, directory)
        shutil.rmtree(directory / "checkpoints" / "step-2")
        use_machine(monkeypatch, machine)
        resumed = run(**{**values, "output_dir": str(directory)}, resume_from_checkpoint="latest")
        assert contents(directory) == expected
        return chosen(resumed.state.config)

    larger = Machine(2 * limit, 2.0**40, 1e12, 1e6)
    assert resume("larger", larger) == choices, "what fits stays"
    assert "chosen again" not in capsys.readouterr().out
    least = step_bytes(checked, activation_memory="offload", blocks_to_swap=6)
    monkeypatch.setattr(activation_auto, "SETTINGS", ("offload",))
    other = resume("smaller", Machine(least, 2.0**40, 1e3, 1e12))
    assert (other["activation_memory"], other["blocks_to_swap"]) == ("offload", 6)
    assert "chosen again" in capsys.readouterr().out
    assert resume("cpu", None) == {}


@pytest.mark.rotating
def test_samples_from_host_memory_are_the_same(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = options(**{**STEPS, "train_steps": 1}, **SAMPLES)
    run(**{**values, "output_dir": str(tmp_path / "plain")})
    components, offloads = validation.SamplingComponents, []

    def on_accelerator(*arguments: Any, offload: bool) -> Any:
        offloads.append(offload)
        return replace(components(*arguments, offload=offload), device=Accelerator("cpu"))

    monkeypatch.setattr(validation, "SamplingComponents", on_accelerator)
    use_machine(monkeypatch, Machine(1.0, 2.0**40, 1e12, 1e9))
    moved = run(**{**values, "output_dir": str(tmp_path / "moved")})
    assert moved.state.config.validation.enable_model_cpu_offload
    assert chosen(moved.state.config)["enable_model_cpu_offload"]
    assert offloads == [True, True]  # of the base model, and after training
    assert any(name.endswith(".mp4") for name in contents(tmp_path / "plain"))
    assert contents(tmp_path / "moved") == contents(tmp_path / "plain")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`gpu(gib, *others)`: a process with so much free GPU memory, joined with others that have theirs."""
    monkeypatch.setattr(automatic, "peak_flops", lambda _: None)
    monkeypatch.setattr(automatic, "link_bandwidth", lambda _: 25e9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)

    def strategy(gib: float, *others: float) -> Any:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gib * GIB, 80 * GIB))
        shares = [(without_reserve(other * GIB), 2.0**40, 1e15, 1e12) for other in others]
        return SimpleNamespace(
            device=torch.device("cuda"), weights_are_movable=True, gather_objects=lambda own: [*own, *shares]
        )

    return strategy


@pytest.fixture
def published(options: Callable[..., dict], tiny_repo: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    """`published(**options)`: a checked run of the published LTX-Video, without its weights."""
    repo = published_repository(tiny_repo("ltx_video"), tmp_path / "repo", NETWORKS["LTX-Video"].config)

    def check(**changes: Any) -> ResolvedRun:
        checked = preflight(load_config(**options(**changes)))
        model = {"pretrained_model_name_or_path": str(repo), "transformer_dtype": "bf16"}
        return replace(checked, config=with_options(checked.config, "model", **model))

    return check


def test_ranks_choose_what_fits_the_least_of_them(published: Callable[..., Any], gpu: Callable[..., Any]) -> None:
    checked = published()
    assert chosen(record(checked, gpu(80))) == {
        "activation_memory": "none", "selective_checkpointing": None, "blocks_to_swap": 0,
    }  # fmt: skip
    first, second = record(checked, gpu(80, 2.5)), record(checked, gpu(2.5, 80))
    assert chosen(first) == chosen(second) == chosen(record(checked, gpu(2.5)))
    assert first.memory.blocks_to_swap > 0


def record(checked: ResolvedRun, parallel: Any) -> TrainConfig:
    """Return the options of a run with its recorded choices."""
    checked = replace(checked)  # each is another run, whose estimate is another one
    return record_choices(checked.config, choose_settings(checked, parallel)[1])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, {"activation_memory", "blocks_to_swap"}),
        ({"fit_gpu": False}, set()),
        ({"activation_memory": "none"}, {"blocks_to_swap"}),
        ({"gradient_checkpointing": False}, {"blocks_to_swap"}),
        ({"blocks_to_swap": 0}, {"activation_memory"}),
        ({"training_type": "full-finetune"}, {"activation_memory"}),
        ({"deepspeed": True}, {"activation_memory"}),
        ({"compile": "regional"}, set()),
    ],
)
def test_what_is_left_open(changes: dict[str, Any], names: set[str], options: Callable[..., dict]) -> None:
    """Options that are given stay, to their defaults too; nothing of a compiled network is chosen."""
    opened = with_open_options(load_config(**options(**changes)))
    assert chosen(opened) == dict.fromkeys(names, "auto")
    assert not {"activation_memory", "gradient_checkpointing", "blocks_to_swap"} & chosen(opened).keys() - names


def test_a_network_that_the_launcher_compiles_is_left_alone(
    options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    assert not chosen(with_open_options(load_config(**options())))


def test_what_only_other_options_make_fit_is_proposed(
    published: Callable[..., Any], gpu: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on; what changes results is not chosen."""
    config = record(published(), gpu(0.2))
    assert config.memory.quantize_frozen == "none"
    assert not config.changed("optimizer")
    assert not config.data.precompute_conditions
    printed = capsys.readouterr().out
    assert re.search(r"^warning: .* training step", printed, re.MULTILINE)
    assert "--quantize_frozen" in printed or "--video_resolution_buckets" in printed


def test_a_dry_run_prints_what_a_run_on_that_gpu_chooses(
    options: Callable[..., dict], capsys: pytest.CaptureFixture[str]
) -> None:
    checked = get_ready(load_config(**options(), dry_run=True, verbose=True, gpu="0.02"))
    dry_run_report(checked)
    printed = capsys.readouterr().out
    planned = RunMemory(checked).choose()
    assert planned.exact_choices["activation_memory"] in ("none", "checkpoint", "keep_attention", "offload")
    assert f"activation_memory {planned.exact_choices['activation_memory']}" in printed
    assert "[chosen.memory]" in printed
    assert "[chosen.memory]" not in printed.partition("[chosen.memory]")[2]
    dry_run_report(get_ready(load_config(**options(), dry_run=True, verbose=True)))
    assert "[chosen.memory]" not in capsys.readouterr().out, "nothing is chosen on a CPU"


def test_a_run_of_before_keeps_its_memory_options(options: Callable[..., dict], run: Callable[..., Any]) -> None:
    values = options(**{**STEPS, "train_steps": 1})
    trained = run(**values, gradient_checkpointing=True)
    [path] = (trained.root / "checkpoints").glob("step-1/manifest.json")

    def resumed(**changes: Any) -> TrainConfig:
        return preflight(load_config(**values, resume_from_checkpoint="latest", **changes)).config

    assert chosen(with_open_options(resumed())) == {"blocks_to_swap": "auto"}, "checkpointing was set, and stays"
    manifest = json.loads(path.read_text())
    for name in ("manifest_sha256", "chosen", "run"):
        del manifest[name]
    del manifest["config"]["fit_gpu"]
    path.write_text(json.dumps(manifest))
    old = resumed()
    assert (old.memory.gradient_checkpointing, old.memory.fit_gpu) == (True, False)
    assert old.chosen["gradient_checkpointing"] == old.chosen["fit_gpu"] == "run"
    assert chosen(with_open_options(old)) == {}
    given = resumed(activation_memory="none", fit_gpu=True)
    assert not given.memory.gradient_checkpointing
    assert chosen(with_open_options(given)) == {"blocks_to_swap": "auto"}


def test_options_for_a_budget_are_recorded_and_taken(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """What changes results stays with the run; what does not is chosen again."""
    values = options(clips=2, batch_size=2, **{**STEPS, "train_steps": 1})
    checked = preflight(load_config(**values))
    whole = with_reserve(RunMemory(checked).plan().peak) / GIB
    trained = run(**values, memory_budget=0.6 * whole)
    by_budget = chosen(trained.state.config)
    assert by_budget.keys() & {"precompute_conditions", "enable_tiling"}
    assert f"[chosen.{MEMORY}]" in (trained.root / "config.toml").read_text()
    resumed = preflight(load_config(**values, resume_from_checkpoint="latest")).config
    kept = {name: value for name, value in by_budget.items() if name not in EXACT_CHOICES}
    assert chosen(resumed) == kept
    assert not chosen(preflight(load_config(trained.root / "config.toml", output_dir=str(tmp_path / "new"))).config)
