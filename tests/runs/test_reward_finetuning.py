"""Reward finetuning through the whole engine, on every family: runs, resumes bit for bit, keeps its records."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from every_family import FAMILIES, short_clip
from published import DANCEGRPO
from refusals import refused_options
from safetensors.torch import load_file

from finetrainers.config.errors import ConfigError
from finetrainers.config.flags import parse_flags
from finetrainers.config.load import load_config
from finetrainers.methods.registry import method_spec
from finetrainers.models.registry import families
from finetrainers.plan.preflight import preflight
from finetrainers.runs.run import run
from finetrainers.runs.training import train
from finetrainers.utils.video import read_mp4

ALGORITHMS: dict[str, dict[str, Any]] = {
    "window": {"best_of_n": 2, "kl_coef": 0.1},
    "whole": {"grpo_preset": "dancegrpo", "best_of_n": 4, "ratio_norm": True},
    # The clips of the first rollout differ by less than the floor, and one of its prompts is skipped in the second.
    "nft": {
        "method": "nft",
        "init_same_noise": False,
        "noise_levels": 2,
        "sampler": None,
        "selective_rollouts": 1e-9,
        "advantage_std_floor": 1e-3,
        "seed": 0,
    },
    "awm": {"method": "awm", "init_same_noise": False, "noise_levels": 2, "sampler": None, "kl_coef": 0.1},
    "refl": {"method": "refl", "draft_k": 2, "kl_coef": 0.1, "updates_per_rollout": 1, "num_generations": 1},
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("a red ball\na blue cube rolls\n\n# not one\na cat\n")
    return path


@pytest.fixture
def options(tiny_repo: Callable[..., Path], prompts: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def build(family: str = "ltx_video", **changes: Any) -> dict[str, Any]:
        values = {
            "method": "grpo",
            "model_name": family,
            "pretrained_model_name_or_path": str(tiny_repo(family)),
            "prompts": str(prompts),
            "reward": ["brightness", "contrast=0"],
            "rollout_size": f"{short_clip(family)}x64x64",
            "prompts_per_step": 2,
            "num_generations": 4,
            "batch_size": 4,
            "sampling_steps": 5,
            "transformer_dtype": "fp32",
            "vae_dtype": "fp32",
            "optimizer": "adamw",
            "lr": 1e-2,
            "rank": 4,
            "lora_alpha": 8,
            "train_steps": 2,
            "updates_per_rollout": 1,
            "output_dir": str(tmp_path / "run"),
            **changes,
        }
        parts = families()[family].facts.parts
        values = {f"{part}_dtype": "fp32" for part in parts if part.startswith("text_encoder")} | values
        if values.get("training_type") == "full-finetune":
            values = {name: value for name, value in values.items() if name not in ("rank", "lora_alpha")}
        return {name: value for name, value in values.items() if value is not None}

    return build


def records(directory: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def curve(directory: str | Path) -> list[dict[str, Any]]:
    """What must be the same of two runs."""
    untimed = [
        {
            k: v
            for k, v in r.items()
            if k not in ("time", "step_s", "checkpoint_s", "tokens_per_s")
            and not k.startswith(("seconds", "memory", "phase_s"))
        }
        for r in records(directory)
    ]
    return [record for record in untimed if len(record) > 1]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("family", "training_type"), [(family, ("lora", "full-finetune")[k % 2]) for k, family in enumerate(FAMILIES)]
)
def test_every_family_trains(family: str, training_type: str, options: Callable[..., dict[str, Any]]) -> None:
    given = options(family, training_type=training_type, lr=1e-3, keep_pairs=family == "ltx_video")
    given |= {"keep_rollouts": 3, "keep_rollouts_every": 2} if family == "ltx_video" else {}
    state = run(preflight(load_config(**given)))
    assert state is not None
    found = records(given["output_dir"])
    assert [r["step"] for r in found] == [1, 2]
    for record in found:
        assert record["ratio_error"] == 0.0  # however the network is wrapped
        assert record["ratio"] == pytest.approx(1.0, abs=1e-6)
        assert 0 < record["reward/brightness"] < 1
        assert record["grad_norm"] > 0
    root = Path(given["output_dir"])
    for name in ("brightness", "contrast"):
        lines = (root / "rewards" / f"{name}.txt").read_text().splitlines()
        assert [float(line) for line in lines] == pytest.approx([r[f"reward/{name}"] for r in found], rel=1e-4)
    assert "for 2 steps on 3 prompts" in (root / "README.md").read_text()
    manifest = [json.loads(line) for line in (root / "manifest.jsonl").read_text().splitlines()]
    assert [entry["prompt"] for entry in manifest] == ["a red ball", "a blue cube rolls", "a cat"]
    shown = {path.relative_to(root / "rollouts").as_posix() for path in root.glob("rollouts/*/*")}
    names = (
        ("best.mp4", "clips.jsonl", "prompt-01-rank-04.mp4", "scores.json", "worst.mp4")
        if family == "ltx_video"
        else ("best.mp4", "worst.mp4")
    )
    assert shown >= {f"step-000001/{name}" for name in names}
    steps = {"step-000001", "step-000002"}  # the first and the last
    assert {name.partition("/")[0] for name in shown} == steps
    kept = root / "pairs" / "pairs.jsonl"
    assert kept.is_file() == (family == "ltx_video")
    for pair in map(json.loads, kept.read_text().splitlines() if kept.is_file() else []):
        assert pair["prompt"] in [entry["prompt"] for entry in manifest]
        light, dark = (read_mp4(root / "pairs" / pair[kind], columns=9)[0].mean() for kind in ("chosen", "rejected"))
        assert light > dark - 1  # the reward is brightness, but for what the video codec changes


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("changes", "factor"), [({"advantage_correction": 1}, (3 / 4) ** 0.5), ({"advantage_std_floor": 1e6}, 0.0)]
)
def test_settings_of_the_advantage_are_used(
    changes: dict[str, Any], factor: float, options: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    given = {"advantage_eps": 1e-8, "train_steps": 1}
    for name, more in (("plain", {}), ("changed", changes)):
        train(load_config(**options(**given, **more, output_dir=str(tmp_path / name))))
    plain, changed = (records(tmp_path / name)[0]["advantage_abs"] for name in ("plain", "changed"))
    assert changed == pytest.approx(factor * plain, rel=1e-5, abs=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize(("given", "expected"), [(None, 6.0), (1.5, 1.5)])
def test_clips_are_sampled_with_the_networks_guidance(
    given: float | None, expected: float, options: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetrainers.models.hunyuan_video import HunyuanVideoSpec

    seen, predict = set(), HunyuanVideoSpec.predict
    monkeypatch.setattr(HunyuanVideoSpec, "predict", lambda self, *a: seen.add(a[-1].guidance) or predict(self, *a))
    train(load_config(**options("hunyuan_video", rollout_guidance=given, train_steps=1)))
    assert seen == {expected}


@contextmanager
def stopping_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    from finetrainers.training.checkpoints import save as saving

    save = saving.save_checkpoint

    def save_and_stop(state: Any, background: Any) -> Path:
        path = save(state, background)
        if state.step == step:
            raise KeyboardInterrupt
        return path

    with monkeypatch.context() as patch:
        patch.setattr("finetrainers.training.trainer.save_checkpoint", save_and_stop)
        yield


@pytest.mark.rotating
@pytest.mark.parametrize("name", ALGORITHMS)
def test_resuming_changes_nothing(
    name: str, options: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eval_prompts = tmp_path / "eval.txt"
    eval_prompts.write_text("a dog\n")
    changes = {"train_steps": 4, "lora_dropout": 0.3, "use_ema": True, "updates_per_rollout": 2, "batch_size": 2,
               "eval_prompts": str(eval_prompts), "eval_steps": 4, **ALGORITHMS[name]}  # fmt: skip
    straight = options(**changes, output_dir=str(tmp_path / "straight"))
    train(load_config(**straight))
    resumed = options(**changes, output_dir=str(tmp_path / "resumed"), checkpointing_steps=2)
    with stopping_after(2, monkeypatch), pytest.raises(KeyboardInterrupt):
        train(load_config(**resumed))
    train(load_config(**resumed, resume_from_checkpoint="latest"))
    assert curve(straight["output_dir"]) == curve(resumed["output_dir"])
    assert [r["step"] for r in records(tmp_path / "straight") if "eval_reward/brightness" in r] == [0, 4]
    a, b = (load_file(tmp_path / run / "pytorch_lora_weights.safetensors") for run in ("straight", "resumed"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    rollouts = 4 // changes["updates_per_rollout"]
    skipped = [r.get("prompts_skipped", 0.0) for r in records(tmp_path / "straight") if "reward/brightness" in r]
    assert skipped == [0.0, 0.0, *[float(name == "nft")] * 2]
    for name in ("straight", "resumed"):
        assert len((tmp_path / name / "rewards" / "brightness.txt").read_text().splitlines()) == rollouts
    assert len(list((tmp_path / "straight" / "samples" / "step-000004").glob("*.mp4"))) == 1


def test_where_no_clip_is_better_nothing_moves(
    options: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by momentum, weight decay or averaging; and a run goes on from there exactly."""
    (tmp_path / "no_cats.py").write_text(
        "def score(videos, prompts):\n"
        "    return videos.mean(dim=(1, 2, 3, 4)) * videos.new_tensor(['cat' not in prompt for prompt in prompts])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"reward": ["no_cats:score"], "prompts_per_step": 1, "train_steps": 4, "use_ema": True, "batch_size": 2,
               "checkpointing_steps": 1}  # fmt: skip
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(load_config(**options(**changes, output_dir=str(straight))))
    found = records(straight)
    skipped = [int(record["step"]) for record in found if record["updates_skipped"]]
    assert len(skipped) == 1
    assert skipped[0] not in (1, 4)  # else there is no momentum yet, or nothing that goes on
    for record in found:
        assert ("loss" in record) == ("grad_norm" in record) == (record["step"] not in skipped)
        assert "reward/no_cats:score" in record

    def saved(step: int, name: str) -> dict[str, torch.Tensor]:
        return load_file(straight / "checkpoints" / f"step-{step}" / name)

    for step in (2, 3, 4):
        for name in ("pytorch_lora_weights.safetensors", "ema.safetensors"):
            before, after = saved(step - 1, name), saved(step, name)
            assert all(torch.equal(before[key], after[key]) for key in after) == (step in skipped)

    with stopping_after(skipped[0], monkeypatch), pytest.raises(KeyboardInterrupt):
        train(load_config(**options(**changes, output_dir=str(resumed))))
    train(load_config(**options(**changes, output_dir=str(resumed)), resume_from_checkpoint="latest"))
    assert curve(straight) == curve(resumed)
    a, b = (load_file(run / "pytorch_lora_weights.safetensors") for run in (straight, resumed))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_checkpoint_of_other_rollouts_is_refused(options: Callable[..., dict[str, Any]], prompts: Path) -> None:
    train(load_config(**options(checkpointing_steps=2)))

    def refusal(**changes: Any) -> str:
        with refused_options(("--resume_from_checkpoint", "mismatch")) as caught:
            preflight(load_config(**options(train_steps=4, resume_from_checkpoint="latest", **changes)))
        return str(caught.value)

    said = refusal(num_generations=8, reward=["brightness=2", "contrast=0"], rollout_size="9x64x96")
    for difference in (
        "num_generations: 4 then, 8 now",
        "reward: ['brightness=1.0', 'contrast=0.0'] then, ['brightness=2.0', 'contrast=0.0'] now",
        "rollout_size: '9x64x64' then, '9x64x96' now",
    ):
        assert difference in said
    assert "data:" not in said
    prompts.write_text("a red ball\n")
    said = refusal()
    assert "data: prompts " in said
    assert "then, " not in said


def test_a_dry_run_tells_of_prompts_and_rollouts(
    options: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "training_type": "full-finetune",
        "kl_coef": 0.1,
        "best_of_n": 2,
        "updates_per_rollout": 2,
        "batch_size": 2,
    }
    assert train(load_config(**options(**changes, dry_run=True))).weights is None
    printed = capsys.readouterr().out
    assert re.search(r"\b2 steps of 2 clips .*\(rollouts of 2 prompts x 4 clips, .*\b2 .*, 2 steps", printed)
    for text in ("copies of the policy", "sampled trajectories", "\n  rollout ", "\n  VAE ", "prompts\n", "trained on"):
        assert text in printed
    assert "data\n" not in printed
    assert not (tmp_path / "run").exists()


def test_dancegrpos_published_command_passes_a_dry_run(
    tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word, on 32 processes; the names of the method and of the family stand in its script's name."""
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "HunyuanVideo").symlink_to(tiny_repo("hunyuan_video"))
    encoded = tmp_path / "data" / "rl_embeddings"
    for folder in ("prompt_embed", "prompt_attention_mask"):
        (encoded / folder).mkdir(parents=True)
        (encoded / folder / "0.pt").touch()
    entry = {"caption": "a cat", "prompt_embed_path": "0.pt", "prompt_attention_mask": "0.pt"}
    (encoded / "videos2caption.json").write_text(json.dumps([entry]))
    config, _ = parse_flags(
        ["--method", "grpo", "--model_name", "hunyuan_video", "--dry_run", "--gpu", "80GB", *DANCEGRPO]
    )
    assert config is not None
    train(config)
    printed = capsys.readouterr().out
    assert re.search(r"404 steps of 128 clips .*\(rollouts of 32 prompts x 24 clips, .*\b8 ", printed)


def test_rewards_without_a_gradient_are_refused(options: Callable[..., dict[str, Any]]) -> None:
    """Before a model is loaded, with those that have one; of weight 0 they are only logged."""
    given = options(method="refl", num_generations=1, reward=["compressibility", "contrast=0.5", "demo.all=0"])
    with pytest.raises(ConfigError) as caught:
        preflight(load_config(**given))
    assert re.search("--reward: compressibility .* aesthetic, brightness,", str(caught.value))
    assert "demo" not in str(caught.value)


def test_what_is_missing_is_said_at_once(options: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(load_config(**options(reward=["brightnes"], prompts=str(tmp_path / "none.txt"), num_generations=1)))
    said = str(caught.value)
    assert "'brightness'" in said
    assert "none.txt" in said
    assert "num_generations" in said


def needs_answer(videos: torch.Tensor, prompts: list[str], *, answer: list[str]) -> None: ...


def test_columns_that_a_reward_requires_are_checked(
    options: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is loaded; the others are named, and what watches for reward hacking."""
    file = tmp_path / "p.csv"
    file.write_text("prompt,answers,id\na cat,two,1\n")
    rewards = [f"{__name__}:needs_answer", "brightness"]
    values = options(prompts=str(file), reward=rewards, prompts_per_step=2)
    with refused_options(("--reward", "required")) as caught:
        train(load_config(**values))
    assert all(text in str(caught.value) for text in ("'answer'", "'answers'", "p.csv line 2"))
    file.write_text("prompt,answer,id\na cat,two,1\n")
    train(load_config(**values, dry_run=True))
    printed = capsys.readouterr().out
    assert re.search(r"p\.csv: .* id\b", printed)
    assert all(text in printed for text in ("saturation", "--eval_prompts", "--eval_reward"))


def test_prompts_that_come_once_cannot_be_skipped(options: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"--selective_rollouts: .* 2 rollouts of 1 prompt .* 3 "):
        train(load_config(**options(selective_rollouts=0.5, prompts_per_step=1)))


def test_a_checkpoint_with_a_multistep_solver(
    options: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its levels start a little below 1, where the noise of `flow` has no limit; `--shift` is its `flow_shift`."""
    from finetrainers.methods.grpo.rollout.sampler import Sampler
    from finetrainers.models.ltx_video import LTXVideoSpec

    given = options(train_steps=1, shift=5.0, window_size=0)
    repo = shutil.copytree(given["pretrained_model_name_or_path"], tmp_path / "model")
    solvers = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    diffusers.UniPCMultistepScheduler(**solvers).save_pretrained(repo / "scheduler")
    seen, rollout = [], Sampler.rollout
    monkeypatch.setattr(
        Sampler, "rollout", lambda self, *a, **o: seen.append((self.times, rollout(self, *a, **o))) or seen[-1][1]
    )
    train(load_config(**given | {"pretrained_model_name_or_path": str(repo)}))
    times, (clean, _) = seen[0]
    t = torch.linspace(1, 0, 6)[:-1]
    torch.testing.assert_close(times, 5 * t / (1 + 4 * t), rtol=1e-5, atol=0)
    assert clean.std() < 5
    assert records(tmp_path / "run")[0]["grad_norm"] < 1e3

    def load(self: LTXVideoSpec) -> None:
        raise AssertionError("a weight is loaded")

    monkeypatch.setattr(LTXVideoSpec, "load_text_encoders", load)
    diffusers.DPMSolverMultistepScheduler(**solvers).save_pretrained(repo / "scheduler")  # from 0.999 on
    given |= {"pretrained_model_name_or_path": str(repo), "output_dir": str(tmp_path / "no")}
    for dry_run in (False, True):
        with pytest.raises(ConfigError, match=r"--sampler: .* std .*--eta"):
            train(load_config(**given, dry_run=dry_run))


@pytest.mark.rotating
@pytest.mark.parametrize(("limit", "stays"), [(2**28, True), (1, False)])
def test_text_is_read_from_disk_once(
    limit: int, stays: bool, options: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before that for its length and size; where only one row may stay in memory, again and again."""
    from finetrainers.data.cache.store import TensorCache

    reads: Counter[str] = Counter()
    get = TensorCache.get
    monkeypatch.setattr(TensorCache, "get", lambda self, key: reads.update([key]) or get(self, key))
    monkeypatch.setattr("finetrainers.methods.grpo.prompts.source._MEMORY", limit)
    train(load_config(**options(rollout_cfg=2.0, prompts_per_step=3)))
    assert len(reads) == 4  # with that of the empty prompt
    assert (max(reads.values()) <= 3) == stays


def test_text_is_encoded_once(
    options: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"precompute_dir": str(tmp_path / "cache")}
    calls: list[list[str]] = []
    from finetrainers.models.ltx_video import LTXVideoSpec

    encode = LTXVideoSpec.encode_text
    monkeypatch.setattr(LTXVideoSpec, "encode_text", lambda self, *a: calls.append(a[1]) or encode(self, *a))
    train(load_config(**options(**shared)))
    prompts = [text for texts in calls for text in texts if text != "a video"]  # which tells the encoders apart
    assert len(prompts) == len(set(prompts)) >= 3
    calls.clear()
    train(load_config(**options(**shared, output_dir=str(tmp_path / "again"))))
    assert calls == []


@pytest.mark.rotating
def test_rewards_compute_on_the_device_that_is_asked_for(
    options: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they name their own; also those of the evaluation, and in the estimate."""
    (tmp_path / "placed.py").write_text(
        "from finetrainers.rewards.base import Reward\n\nmade = []\n\n\n"
        "class Placed(Reward):\n"
        "    def __init__(self, device: str = 'auto', kind: str = ''):\n"
        "        made.append((kind, device))\n\n"
        "    def score(self, videos, prompts, *, fps):\n"
        "        return {'score': videos.mean(dim=(1, 2, 3, 4))}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("a dog\n")
    given = options(
        reward=["placed:Placed,kind=a", "placed:Placed,kind=b,device=auto", "brightness=0"], train_steps=1,
        eval_prompts=str(held_out), eval_reward=["placed:Placed,kind=c"], reward_device="cpu",
    )  # fmt: skip
    config = load_config(**given)
    train(config)
    overlapped = {**given, "overlap_rewards": True, "batch_size": 2, "output_dir": str(tmp_path / "overlapped")}
    overlapped["reward"] = ["placed:Placed,kind=a,device=auto", "brightness=0"]  # on the device that samples
    placed = importlib.import_module("placed")
    made = list(placed.made)
    train(load_config(**overlapped))
    train(load_config(**{**overlapped, "overlap_rewards": False, "output_dir": str(tmp_path / "in_turn")}))
    assert curve(tmp_path / "overlapped") == curve(tmp_path / "in_turn")
    assert "seconds/reward_overlapped" in records(tmp_path / "overlapped")[1]
    assert made == [("a", "cpu"), ("b", "auto"), ("c", "cpu")]
    assert [entry.options.get("device") for entry in method_spec(config).rewards(config)] == [
        "cpu",
        "auto",
        None,
        "cpu",
    ]
    for changes, pattern in (
        ({"reward": ["brightness"], "eval_reward": None}, "--reward_device: cpu: "),
        ({"reward_device": "gpu"}, "--reward_device: .* auto, cpu, cuda.* gpu"),
    ):
        with pytest.raises(ConfigError, match=pattern):
            preflight(load_config(**{k: v for k, v in {**given, **changes}.items() if v is not None}))
