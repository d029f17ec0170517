"""A run with swapped blocks is the run without, to the last bit of every file; what cannot swap is refused."""

from __future__ import annotations

import hashlib
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
from refusals import refused_options
from safetensors.torch import load_file

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import load_config
from finetrainers.memory.automatic import with_blocks_to_swap
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import with_reserve
from finetrainers.parallel.fsdp import FSDP
from finetrainers.parallel.zero import ZeRO
from finetrainers.plan import init_distributed
from finetrainers.plan.automatic import choose_settings
from finetrainers.plan.memory_lines import as_json, memory_lines
from finetrainers.plan.memory_plan import RunMemory, run_memory
from finetrainers.plan.preflight import preflight
from finetrainers.runs.training import train
from finetrainers.utils.gpus import read_gpu

GIVEN = {
    "clips": 3, "batch_size": 1, "gradient_accumulation_steps": 2, "gradient_checkpointing": True, "use_ema": True,
    "train_steps": 2, "checkpointing_steps": 1, "eval_num_items": 1, "eval_steps": 1, "dry_batches": "on",
    "validation_prompts": "one@@@9x64x64", "validation_inference_steps": 2, "validation_guidance_scale": 3.0,
    "validation_steps": 1,
}  # fmt: skip


def digests(directory: Path) -> dict[str, str]:
    """Of every tensor, and every sample, that a run and its checkpoints have."""
    found = {str(path.relative_to(directory)): path.read_bytes() for path in directory.glob("samples/step-*/*.mp4")}
    for path in directory.rglob("*.safetensors"):
        if "precomputed" not in path.parts:
            found |= {
                f"{path.relative_to(directory)} {name}": t.numpy().tobytes() for name, t in load_file(path).items()
            }
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def test_a_run_is_the_same(
    options: Callable[..., dict], run: Callable[..., Any], tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """Steps, held-out loss, guided samples, averages, checkpoints, results; resumed with another number of blocks."""
    model = str(tiny_repo("ltx_video", layers=5))
    plain, swapped, resumed = (str(tmp_path / name) for name in ("plain", "swapped", "resumed"))
    given = options(**GIVEN, pretrained_model_name_or_path=model)
    expected = run(**{**given, "output_dir": plain})
    found = run(**{**given, "output_dir": swapped}, blocks_to_swap=5)
    names = ("loss", "grad_norm")
    assert found.curve(*names) == expected.curve(*names)
    eval_losses = [[r["eval_loss"] for r in one.metrics if "eval_loss" in r] for one in (found, expected)]
    assert eval_losses[0] == eval_losses[1] != []
    assert len(digests(Path(plain))) > 100
    assert digests(Path(swapped)) == digests(Path(plain))
    shutil.copytree(plain, resumed)
    shutil.rmtree(Path(resumed) / "checkpoints" / "step-2")
    more = {"output_dir": resumed, "resume_from_checkpoint": "latest", "blocks_to_swap": 3}
    assert run(**{**given, **more}).steps_done == 1
    assert digests(Path(resumed)) == digests(Path(plain))


@pytest.mark.rotating
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_a_reference_without_the_adapter_and_rollouts(
    method: str, options: Callable[..., dict], make_clips: Callable[..., Path], tmp_path: Path
) -> None:
    """HunyuanVideo: blocks of two kinds are one sequence."""
    if method == "dpo":
        rows = ['{"prompt": "a ball", "chosen": "0.mp4", "rejected": "1.mp4"}']
        (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
        given = options(
            "hunyuan_video", clips=2, method="dpo", dataset_file=str(tmp_path / "pairs.jsonl"), train_steps=2
        )
    else:
        (tmp_path / "prompts.txt").write_text("a red ball\na blue cube\n")
        given = options(
            "hunyuan_video", method="grpo", prompts=str(tmp_path / "prompts.txt"), reward=["brightness"],
            rollout_size="9x64x64", prompts_per_step=1, num_generations=2, sampling_steps=3, updates_per_rollout=1,
            kl_coef=0.1, train_steps=2, batch_size=1,
        )  # fmt: skip
        for name in ("data_root", "video_resolution_buckets"):
            del given[name]
    runs = []
    for number in (0, 4):
        directory = tmp_path / f"swap{number}"
        train(load_config(**{**given, "output_dir": str(directory)}, blocks_to_swap=number))
        runs.append(digests(directory))
    assert runs[0]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"blocks_to_swap": 2}, " 3 or more"),
        ({"blocks_to_swap": "auto", "training_type": "full-finetune"}, "--training_type lora"),
        ({"blocks_to_swap": 3, "deepspeed": True}, "DeepSpeed"),
        ({"blocks_to_swap": 3, "fsdp": "full", "fsdp_cpu_offload": True}, "--fsdp_cpu_offload"),
    ],
)
def test_what_cannot_swap_is_refused(changes: dict[str, Any], expected: str, options: Callable[..., dict]) -> None:
    with pytest.raises(ConfigError, match=f"blocks_to_swap: .*{expected}"):
        preflight(load_config(**options(**changes)))


def test_more_blocks_than_there_are(options: Callable[..., dict]) -> None:
    for more in ({}, {"dry_run": True}):
        with refused_options(("--blocks_to_swap", "too_large")) as caught:
            train(load_config(**options(blocks_to_swap=3, **more)))
        assert "3 of 2 blocks" in str(caught.value)


def test_engines_and_devices_that_cannot_swap(options: Callable[..., dict]) -> None:
    config = load_config(**options(blocks_to_swap=3))
    compiled = SimpleNamespace(state=SimpleNamespace(dynamo_plugin=SimpleNamespace(backend="INDUCTOR")))

    def refusals(**changes: Any) -> list[Problem]:
        strategy = SimpleNamespace(
            **{"why_no_swap": None, "device": torch.device("cpu"), "accelerator": compiled, **changes}
        )
        return list(init_distributed._swap_problems(config, strategy))  # type: ignore[arg-type]

    [compiled_problem] = refusals()
    assert (compiled_problem.where, compiled_problem.kind) == ("--blocks_to_swap", "conflict")
    assert "dynamo_backend" in compiled_problem.message
    [device_problem] = [problem for problem in refusals(device=torch.device("xpu")) if problem != compiled_problem]
    assert device_problem.kind == "unsupported"
    assert "xpu" in device_problem.message
    expected = Problem("--blocks_to_swap", str(ZeRO.why_no_swap), "unsupported")
    assert refusals(why_no_swap=ZeRO.why_no_swap) == [expected, compiled_problem]
    assert FSDP.why_no_swap is None


@pytest.fixture
def published(options: Callable[..., dict], tiny_repo: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    """`published(**options)`: a checked run of the published HunyuanVideo, without its weights."""
    repo = published_repository(tiny_repo("hunyuan_video"), tmp_path / "repo", NETWORKS["HunyuanVideo"].config)

    def check(**changes: Any) -> Any:
        checked: Any = preflight(load_config(**options("hunyuan_video", blocks_to_swap="auto", **changes)))
        model = {"pretrained_model_name_or_path": str(repo), "transformer_dtype": "bf16"}
        section = checked.config.model.model_copy(update=model)
        return replace(checked, config=checked.config.model_copy(update={"model": section}))

    return check


def test_auto_swaps_the_fewest_blocks_that_fit(
    published: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every phase, by the rule of the estimate: a run chooses what the estimate of its GPU says."""
    checked = published(gradient_checkpointing=True)
    memory = run_memory(checked)
    loaded = memory.plan().other_networks
    parallel: Any = SimpleNamespace(
        device=torch.device("cuda"),
        weights_are_movable=True,
        gather_objects=lambda one: [*one, (30 * GIB, 1e12, 1e12, 1e9)],
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: loaded)

    def fewest(gib: float, **memory: Any) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib * GIB - with_reserve(loaded), 80 * GIB))
        section = checked.config.memory.model_copy(update=memory)
        changed = replace(checked, config=checked.config.model_copy(update={"memory": section}))
        found = choose_settings(changed, parallel)[0].memory.blocks_to_swap
        estimated = RunMemory(changed, gpu_gib=memory.get("memory_budget", gib)).choose()
        assert estimated.config.memory.blocks_to_swap == estimated.swapped == found
        return found

    assert fewest(32) == 0
    number = fewest(16)
    assert 3 < number < 60
    peaks = {n: memory.plan(with_blocks_to_swap(checked.config, n)).peak for n in (number - 1, number)}
    assert with_reserve(peaks[number]) <= 16 * GIB < with_reserve(peaks[number - 1])
    assert fewest(32, memory_budget=16.0) == number, "the budget counts as what is free"
    assert "warning" not in capsys.readouterr().out
    assert fewest(2) == 60
    assert re.search(r"^warning: .*GiB.*\n.+", capsys.readouterr().out, re.MULTILINE)
    parallel.device = torch.device("cpu")
    assert choose_settings(checked, parallel)[0].memory.blocks_to_swap == 0

    # Samples count too: what is at rest while they are decoded.
    sampled = published(
        gradient_checkpointing=True, enable_model_cpu_offload=False, validation_prompts="a cat@@@49x512x768"
    )
    memory = RunMemory(sampled, gpu_gib=24)
    found = memory.choose()
    assert found.swapped > RunMemory(checked, gpu_gib=24).choose().swapped
    assert found.plan.peak_phase == "validation"
    assert found.fits


def test_what_the_estimate_says_of_auto(published: Callable[..., Any]) -> None:
    """The number that a run would choose for the GPU that is asked about; without one, that all blocks are counted."""
    checked = published(gradient_checkpointing=True)
    unknown, known = RunMemory(checked), RunMemory(checked, gpu_gib=16)
    counted, found = unknown.choose(), known.choose()
    everything = known.plan(with_blocks_to_swap(checked.config, 60))
    assert counted.plan.peaks == everything.peaks
    assert counted.plan.peak < found.plan.peak <= 16 * GIB / 1.15
    said = "\n".join(memory_lines(unknown, counted))
    assert re.search(r"--blocks_to_swap auto: .*\b60 blocks", said)
    assert f"--blocks_to_swap auto: {found.swapped} of 60 blocks" in memory_lines(known, found)
    assert as_json(known, found, read_gpu("16"), None)["blocks_to_swap"] == {
        "blocks": found.swapped,
        "of": 60,
        "for_gpu": True,
    }
    assert as_json(unknown, counted, None, None)["blocks_to_swap"] == {"blocks": 60, "of": 60, "for_gpu": False}
    assert max(map(len, memory_lines(unknown, counted))) <= 80
