"""Two real processes over gloo: the same training as one process with twice the batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import Jobs
from safetensors.torch import load_file

from finetrainers.config.load import load_config
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.runs.training import train

pytestmark = pytest.mark.slow

#: Four of the five clips are trained, one is held out; an odd number of samples.
PLAIN = {
    "eval_num_items": 1, "eval_steps": 1, "validation_steps": 2, "validation_inference_steps": 2,
    "validation_prompts": "one@@@9x64x64:::two@@@9x64x64:::three@@@9x64x64", "max_grad_norm": 0.02,
    "eval_reward": ["brightness=2", "contrast=0.5"],
}  # fmt: skip
FULL = {"training_type": "full-finetune", "max_grad_norm": 0.02}
#: Job -> options of both ranks. Where a single process is compared, it has twice the batch size.
JOBS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "precomputed": {
        **PLAIN, "validation_steps": None, "validation_prompts": None, "eval_reward": [], "precompute_conditions": True,
    },
    "uneven": {"batch_size": 2, "gradient_accumulation_steps": 2, "eval_num_items": 1, "train_steps": 2},
    "straight": {"lora_dropout": 0.5, "use_ema": True, "train_steps": 2},
    "interrupted": {"lora_dropout": 0.5, "use_ema": True, "train_steps": 1, "gradient_checkpointing": True},
    "resumed": {
        "lora_dropout": 0.5, "use_ema": True, "train_steps": 2, "resume_from_checkpoint": "latest",
        "activation_memory": "keep_attention",
    },
    "rounding": {
        "training_type": "full-finetune", "transformer_dtype": "bf16", "optimizer": "adamw",
        "master_weights": "stochastic_rounding", "train_steps": 1,
    },
    "ltx": FULL,
    "hunyuan": {"family": "hunyuan_video", "train_steps": 1, **FULL},
    "cog": {"family": "cogvideox", "train_steps": 1, **FULL},
    "pairs": {
        "method": "dpo", "dpo": {"beta": 50.0}, "eval_num_items": 1, "eval_steps": 2, "train_steps": 2,
        "max_grad_norm": 0.02,
    },
    "prior": {
        "prior_preservation_weight": 5.0, "class_prompt": "a pattern", "gradient_accumulation_steps": 2,
        "eval_num_items": 1, "train_steps": 2,
    },
    "whole": {"family": "hunyuan_video", "gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    "swapped": {
        "family": "hunyuan_video", "gradient_checkpointing": True, "gradient_accumulation_steps": 2,
        "blocks_to_swap": 4, "activation_memory": "offload",
    },
    "in the background": {
        "lora_dropout": 0.5, "use_ema": True, "train_steps": 2, "checkpointing_steps": 1, "async_checkpointing": True,
        "activation_memory": "auto", "memory_budget": 100, "_measured_on": 1,
    },
    "the writer fails": {"train_steps": 4, "checkpointing_steps": 1, "async_checkpointing": True, "_fail_saving_on": 0},
    "quantized": {"quantize_frozen": "fp8", "train_steps": 2},
    "rank 0 fails": {"train_steps": 1, "_fail_saving_on": 0},
    "rank 1 is fine": {"train_steps": 1, "_fail_saving_on": 1},
}  # fmt: skip


NEEDS = {"resumed": ["interrupted"]}
#: Tests that repeat a mechanism of one process, or of the other tests here.
BACKGROUND = pytest.mark.rotating("ddp, in the background")


def one_at_a_time(*names: str) -> list[Any]:
    """Cases of which every run takes one."""
    return [pytest.param(name, marks=pytest.mark.rotating) for name in names]


@pytest.fixture(scope="module")
def ranks(options: Callable[..., dict], do_jobs: Callable[..., Jobs], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    root = tmp_path_factory.mktemp("two")
    jobs = {
        name: options(root / {"resumed": "interrupted"}.get(name, name), **changes) for name, changes in JOBS.items()
    }
    # torchao compiles its step, which takes longer than everything else here.
    launcher = ["torch.distributed.run", "--nproc_per_node", "2"]
    return do_jobs(root, jobs, launcher=launcher, needs=NEEDS, TORCHDYNAMO_DISABLE="1")


def metrics(directory: Path, *names: str) -> torch.Tensor:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([[record[name] for name in names] for record in lines if names[0] in record])


def weights(directory: Path) -> dict[str, torch.Tensor]:
    lora = directory / "pytorch_lora_weights.safetensors"
    return load_file(lora if lora.is_file() else directory / "transformer" / "diffusion_pytorch_model.safetensors")


def close(ours: Path, theirs: Path) -> None:
    torch.testing.assert_close(
        metrics(ours, "loss", "grad_norm"), metrics(theirs, "loss", "grad_norm"), rtol=1e-5, atol=0
    )
    one, other = weights(ours), weights(theirs)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.rotating
def test_swapped_blocks_change_nothing(ranks: Jobs) -> None:
    """DDP broadcasts the weights of a network at the start, but none that wait on each host."""
    for swapped, whole in zip(ranks["swapped"], ranks["whole"], strict=True):
        assert swapped["digest"] == whole["digest"]
        assert swapped["results"] == whole["results"]


@pytest.mark.parametrize("job", ["plain", *one_at_a_time("ltx", "hunyuan", "cog", "pairs", "prior", "quantized")])
def test_two_ranks_are_one_with_twice_the_batch(
    job: str, ranks: Jobs, options: Callable[..., dict], tmp_path: Path
) -> None:
    changes = JOBS[job]
    train(load_config(**options(tmp_path, **{**changes, "batch_size": 2})))
    close(ranks.directory(job), tmp_path)
    assert all("2 processes (DDP)" in rank["kind"] for rank in ranks[job])
    if job == "pairs":
        pairs = ("margin", "gain_chosen", "accuracy")
        torch.testing.assert_close(
            metrics(ranks.directory(job), *pairs), metrics(tmp_path, *pairs), rtol=1e-3, atol=1e-5
        )
    if job == "prior":
        found = [metrics(path, "prior_loss") for path in (ranks.directory(job), tmp_path)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-9)
        assert found[0][-1] > 0
    if job == "plain":  # three samples on two ranks
        names = [f"eval_reward/{name}" for name in ("brightness", "contrast", "weighted_sum")]
        ours, theirs = (metrics(path, *names) for path in (ranks.directory(job), tmp_path))
        assert len(ours) == 3
        assert torch.equal(ours[0], theirs[0])  # of the same weights
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    if "eval_steps" in changes:
        # One held-out clip on two ranks: the second one's share does not count.
        ours, theirs = (metrics(path, "eval_loss", "eval_loss_0.30") for path in (ranks.directory(job), tmp_path))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_uneven_batches_weigh_by_their_clips(ranks: Jobs, options: Callable[..., dict], tmp_path: Path) -> None:
    """Five clips in batches of 2, 2 and 1; steps span epochs."""
    changes = {**JOBS["uneven"], "gradient_accumulation_steps": 4}
    train(load_config(**options(tmp_path, **changes)))
    close(ranks.directory("uneven"), tmp_path)


def test_ranks_share_the_work_of_precomputing(ranks: Jobs) -> None:
    close(ranks.directory("precomputed"), ranks.directory("plain"))


@pytest.mark.rotating
@pytest.mark.parametrize("job", ["plain", "straight", *one_at_a_time("rounding", "ltx", "pairs")])
def test_ranks_draw_different_noise_and_hold_the_same_weights(job: str, ranks: Jobs) -> None:
    one, other = ranks[job]
    assert one["digest"] == other["digest"]
    assert one["inputs"]
    assert len(one["inputs"]) == len(other["inputs"])
    if job not in ("plain", "pairs"):  # where both also evaluate the one held-out clip
        assert not set(one["inputs"]) & set(other["inputs"])


def test_resuming_changes_nothing(ranks: Jobs) -> None:
    """Nor does what blocks store for backward, which is something else in each of these runs."""
    straight, resumed = ranks.directory("straight"), ranks.directory("resumed")
    assert torch.equal(metrics(straight, "loss", "grad_norm", "step"), metrics(resumed, "loss", "grad_norm", "step"))
    assert ranks["straight"][0]["digest"] == ranks["resumed"][0]["digest"]
    ours, theirs = weights(straight), weights(resumed)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_all_samples_of_an_odd_number_are_written(ranks: Jobs) -> None:
    found = sorted(path.name for path in (ranks.directory("plain") / "samples" / "step-000002").glob("*.mp4"))
    assert found == ["00-one-0.mp4", "01-two-0.mp4", "02-three-0.mp4"]


@BACKGROUND
def test_saving_in_the_background_changes_nothing(ranks: Jobs) -> None:
    straight, saved = ranks.directory("straight"), ranks.directory("in the background")
    assert ranks["straight"][0]["digest"] == ranks["in the background"][1]["digest"]
    files = [path / "checkpoints" / "step-2" / "optimizer.pt" for path in (straight, saved)]
    assert files[0].read_bytes() == files[1].read_bytes()
    whole = [found.step for found in scan_checkpoints(saved) if found.damage is None]
    assert whole == [1, 2]


@BACKGROUND
def test_all_ranks_change_what_blocks_store(ranks: Jobs) -> None:
    """Rank 1 alone has measured that it does not fit; the weights are those without (see above)."""
    events = map(json.loads, (ranks.directory("in the background") / "events.jsonl").read_text().splitlines())
    assert [event["setting"] for event in events if event["event"] == "activation_memory"] != []
    one, other = ranks["in the background"]
    assert one["digest"] == other["digest"]


@pytest.mark.parametrize("job", ["rank 0 fails", pytest.param("the writer fails", marks=BACKGROUND)])
def test_a_save_that_fails_on_the_writing_rank_fails_everywhere(job: str, ranks: Jobs) -> None:
    one, other = ranks[job]
    assert one["error"] == "OSError('disk full')"
    assert other["error"].startswith("RemoteRankError(")
    assert " rank 0: disk full" in other["error"]
    assert not list((ranks.directory(job) / "checkpoints").glob("step-*"))
    assert len(ranks.directory(job).joinpath("metrics.jsonl").read_text().splitlines()) < 4
    assert "error" not in ranks["rank 1 is fine"][1], "only rank 0 writes"


def test_records_are_written_once(ranks: Jobs) -> None:
    steps = metrics(ranks.directory("uneven"), "loss", "step")[:, 1].tolist()
    assert steps == [1, 2]
    assert list((ranks.directory("uneven") / "checkpoints").iterdir()) == [
        ranks.directory("uneven") / "checkpoints" / "step-2"
    ]
