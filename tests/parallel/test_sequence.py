"""Sequence parallelism on four gloo processes, in groups of two and four, by both exchanges: as one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_family import CHECKPOINTS
from plain_replay import score_latents, share_nothing
from random_predictions import spec_of
from rank_jobs import Jobs
from refusals import refused_options
from test_two_processes import close, metrics, weights

from finetrainers.config.load import load_config
from finetrainers.runs.training import train
from finetrainers.utils.video import read_mp4

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sequence_rank.py")
#: Of predictions, losses and gradients. Most predictions are equal to the last bit. But a product of matrices may be
#: rounded in another way for the rows of one process than for those of all, and gradients are sums over other parts.
TOLERANCE = 1e-6
LORA = {
    "batch_size": 2, "gradient_accumulation_steps": 2, "train_steps": 2, "eval_num_items": 1, "eval_steps": 2,
    "max_grad_norm": 0.02, "gradient_checkpointing": True, "lora_dropout": 0.2,
}  # fmt: skip
FULL = {"training_type": "full-finetune", "train_steps": 2, "max_grad_norm": 0.02}
SAMPLES = {"validation_prompts": "one@@@9x64x64:::two@@@9x64x64:::three@@@9x64x64", "validation_inference_steps": 2}
PROMPTS = {
    "reward": ["brightness"], "rollout_size": "9x64x64", "num_generations": 4, "sampling_steps": 3,
    "optimizer": "adamw",
}  # fmt: skip
#: By the default, the loss has what is rounded 2000 times as large; a ring rounds in forward, too.
DPO = {**FULL, "method": "dpo", "dpo.beta": 50.0, "fsdp": "hybrid", "fsdp_group_size": 2}
ZERO = {**FULL, "deepspeed": True, "zero_stage": 3}
NFT = {
    **PROMPTS, "method": "nft", "prompts_per_step": 2, "num_generations": 2, "noise_levels": 1,
    "init_same_noise": False,
    "train_steps": 1,
}  # fmt: skip
GRPO = {"method": "grpo", "_scores_latents": True}
#: Options of four processes in groups of two. One process with whole clips has twice the batch.
JOBS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "interrupted": {**LORA, "train_steps": 1},
    "resumed": {**LORA, "resume_from_checkpoint": "latest"},
    "in one group, by a ring": {
        **LORA, "sp_mode": "ring", "sp_size": 4, "batch_size": 4,
        "resume_from_checkpoint": "interrupted/checkpoints/step-1",
    },
    "swapped": {
        "family": "hunyuan_video", "train_steps": 1, "gradient_checkpointing": True, "blocks_to_swap": 4,
        "activation_memory": "offload",
    },
    # Of two heads, which do not divide.
    "ring": {
        "family": "hunyuan_video", "sp_mode": "ring", "sp_size": 4, "batch_size": 2, "train_steps": 1,
        "activation_memory": "keep_attention",
    },
    "ring, grpo": {
        **PROMPTS, **GRPO, "sp_mode": "ring", "fsdp": "full", "prompts_per_step": 2, "num_generations": 2,
        "kl_coef": 0.1, "train_steps": 1,
    },
    "ring, groups": {**DPO, "sp_mode": "ring"},
    "fsdp2": {**SAMPLES, "fsdp": "full", "train_steps": 2, "max_grad_norm": 0.02},
    "zero-3": ZERO,
    "grpo": {
        **PROMPTS, **GRPO, "prompts_per_step": 2, "best_of_n": 2, "batch_size": 2, "kl_coef": 0.1,
        "keep_rollouts_every": 1,
    },
    "nft": NFT,
}  # fmt: skip


def job(root: Path, folder: Path, options: Callable[..., dict], name: str, **changes: Any) -> dict[str, Any]:
    """Options of a job."""
    found = options(folder, **{"sp_size": 2, **JOBS[name], **changes})
    if (checkpoint := found.get("resume_from_checkpoint", "latest")) != "latest":
        found["resume_from_checkpoint"] = str(root / checkpoint)
    if "reward" in found:
        folder.mkdir(parents=True, exist_ok=True)
        prompts = folder.parent / "prompts.txt"
        prompts.write_text("a red ball\na blue cube rolls\na cat\n")
        found = {**found, "prompts": str(prompts)}
        for of_clips in ("data_root", "video_resolution_buckets"):
            del found[of_clips]
    return found


#: Every version of a model, and those whose processes pass keys and values on in a ring.
MODELS = {f"{family} {version}" if version else family: (family, version) for family, version in CHECKPOINTS}
RINGS = ("ltx_video", "hunyuan_video t2v", "cogvideox 1.5", "wan ti2v", "mochi", "ltx2 2.3", "hunyuan_video_15 t2v")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "false", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="module")
def two(do_jobs: Callable[..., Jobs], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Two ranks, which share calls."""
    return do_jobs(tmp_path_factory.mktemp("two"), script=SCRIPT, **ENVIRONMENT)


@pytest.fixture(scope="module")
def four(options: Callable[..., dict], do_jobs: Callable[..., Jobs], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Four ranks, which share calls or do `JOBS`."""
    root = tmp_path_factory.mktemp("sequence")
    folders = {"resumed": root / "interrupted"}
    jobs = {name: job(root, folders.get(name, root / name), options, name) for name in JOBS}
    needs = {"resumed": ["interrupted"], "in one group, by a ring": ["interrupted"]}
    return do_jobs(root, jobs, script=SCRIPT, processes=4, needs=needs, **ENVIRONMENT)


@pytest.mark.parametrize(
    "model", [next(iter(MODELS)), *(pytest.param(name, marks=pytest.mark.rotating) for name in [*MODELS][1:])]
)
def test_a_shared_call_computes_the_same(
    model: str, two: Jobs, tiny_repo: Callable[..., Path], options: Callable[..., dict], tmp_path: Path
) -> None:
    family, version = MODELS[model]
    repository = tiny_repo(family, version)
    spec = spec_of(repository, family, "auto")
    if spec.token_plan is None:
        changes = {"pretrained_model_name_or_path": str(repository), "sp_size": 2, "dry_run": True}
        with refused_options(("--sp_size", "unsupported")):
            train(load_config(**options(tmp_path, family, **changes)))
        return
    [found, _] = two.do({"_case": "model", "model": model, "repository": str(repository)})
    is_first = next(one for one in CHECKPOINTS if one[0] == family) == (family, version)
    expected = (spec.facts.geometry.sides is None, is_first, is_first and spec.text_varies)
    assert tuple(name in found for name in ("odd", "dropout", "bf16")) == expected
    check_differences(found)


def check_differences(found: dict[str, Any]) -> None:
    for name, different in found.items():
        # In bf16 each process rounds its part of a gradient.
        assert max(different) < (2e-2 if name == "bf16" else TOLERANCE), name


@pytest.mark.rotating
def test_a_shared_call_that_is_compiled_computes_the_same(two: Jobs, tiny_repo: Callable[..., Path]) -> None:
    [found, _] = two.do({"_case": "compiled", "repository": str(tiny_repo("ltx_video"))})
    assert max(found["different"]) < TOLERANCE
    assert found["graph breaks"] == 0


@pytest.mark.rotating
@pytest.mark.parametrize("model", RINGS)
def test_a_ring_computes_the_same(model: str, four: Jobs, tiny_repo: Callable[..., Path]) -> None:
    found, *_ = four.do({"_case": "ring", "model": model, "repository": str(tiny_repo(*MODELS[model]))})
    assert len(found) == 5 + (model == "cogvideox 1.5")
    check_differences(found)


@pytest.mark.parametrize("case", ["exact", pytest.param("exact, compiled", marks=pytest.mark.rotating)])
def test_ring_attention_is_attention_to_all_tokens(case: str, four: Jobs) -> None:
    for rank in four.do({"_case": case}):
        assert max(rank["different"]) < 1e-13


def test_heads_that_do_not_divide_are_refused(four: Jobs, tiny_repo: Callable[..., Path]) -> None:
    for rank in four.do({"_case": "refused", "repository": str(tiny_repo("hunyuan_video", "t2v"))}):
        assert rank["problems"] == [["--sp_size", "invalid"]]
        assert "2 attention heads" in rank["error"]
        assert " got 4;" in rank["error"]


@pytest.mark.rotating
def test_resuming_changes_nothing(four: Jobs) -> None:
    names = ("loss", "grad_norm", "step")
    straight, resumed = four["lora"][0], four["resumed"][0]
    assert torch.equal(metrics(four.directory("lora"), *names), metrics(four.directory("resumed"), *names))
    assert straight["digest"] == resumed["digest"]
    assert straight["kind"].startswith("4 processes (DDP), 2 ")


@pytest.mark.rotating
def test_samples_are_written_once(four: Jobs) -> None:
    names = sorted(path.name for path in (four.directory("fsdp2") / "samples").rglob("*.mp4"))
    assert names == ["00-one-0.mp4", "01-two-0.mp4", "02-three-0.mp4"]


@pytest.fixture(scope="module")
def alone(four: Jobs, options: Callable[..., dict], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What one process with whole clips leaves of a job; the same folder for jobs that differ in `sp_mode` alone."""
    folders: dict[str, Path] = {}

    def train_alone(name: str) -> Path:
        known = json.dumps({key: value for key, value in JOBS[name].items() if key != "sp_mode"})
        if known in folders:
            return folders[known]
        strategy: dict[str, Any] = {"fsdp": None, "fsdp_group_size": None, "deepspeed": False, "blocks_to_swap": 0}
        if "zero_stage" in JOBS[name]:
            strategy["zero_stage"] = 2
        groups = 4 // JOBS[name].get("sp_size", 2)
        # By accumulation where there is dropout, which is drawn for a micro-batch.
        larger = "gradient_accumulation_steps" if "lora_dropout" in JOBS[name] else "batch_size"
        strategy |= {"sp_size": 1, larger: groups * JOBS[name].get(larger, 1)}
        folders[known] = tmp_path_factory.mktemp("alone") / "run"
        values = job(four.root, folders[known], options, name, **strategy)
        with pytest.MonkeyPatch.context() as patch:
            if values.pop("_scores_latents", False):
                share_nothing(patch)
                score_latents(patch)
            train(load_config(**values))
        return folders[known]

    return train_alone


@pytest.mark.rotating
@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("interrupted", "resumed")])
def test_groups_train_as_processes_with_whole_clips(name: str, four: Jobs, alone: Callable[[str], Path]) -> None:
    ranks, directory = four[name], four.directory(name)
    whole = alone(name)
    if "reward" in JOBS[name]:  # advantages and ratios enlarge what is rounded
        found = [metrics(path, "loss", "grad_norm", "reward/brightness") for path in (directory, whole)]
        torch.testing.assert_close(*found, rtol=2e-3, atol=1e-6)
        if "_scores_latents" in JOBS[name]:  # the gradient of plain replay
            assert float(found[0][0, 1]) == pytest.approx(float(found[1][0, 1]), rel=2e-6)
        ours, theirs = weights(directory), weights(whole)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        kept = [sorted(path.name for path in one.glob("rollouts/*/*")) for one in (directory, whole)]
        assert kept[0] == kept[1]
        assert kept[0] != []
    else:
        close(directory, whole)
    assert len({rank["digest"] for rank in ranks}) == 1
    first, second, third, fourth = (rank["inputs"] for rank in ranks)
    assert first == second
    assert third == fourth
    for path in (whole / "samples").rglob("*.mp4"):
        ours, _ = read_mp4(directory / path.relative_to(whole), columns=9)
        theirs, _ = read_mp4(path, columns=9)
        assert np.abs(ours.astype(int) - theirs).mean() < 1
    if name in ("lora", "in one group, by a ring"):
        assert (first == third) == (name != "lora")
