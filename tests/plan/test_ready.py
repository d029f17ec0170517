"""A run of a model from the hub, before anything is loaded: the hub is asked once, and what it says is said once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback_hub import REPO, Hub
from safetensors.torch import load_file

from finetrainers import ConfigError, load_config, train
from finetrainers.config.root import TrainConfig
from finetrainers.methods.spec import MethodSpec
from finetrainers.models.files import hub as asked_hub
from finetrainers.plan import automatic
from finetrainers.plan.preflight import plan_work_once, preflight


@pytest.fixture
def from_hub(options: Callable[..., dict], tmp_path: Path) -> Callable[..., dict]:
    """`from_hub(**changes)`: options of a run of one step, of a model that is on the hub alone."""

    def build(**changes: Any) -> dict:
        model = {"pretrained_model_name_or_path": REPO, "cache_dir": str(tmp_path / "cache")}
        return options(train_steps=1, **{**model, **changes})

    return build


@pytest.mark.parametrize(
    ("mode", "why"), [("down", "Connection refused"), ("silent", "no answer within 0.5 s"), ("broken", "status 503")]
)
def test_a_hub_that_cannot_be_reached_is_said_once(
    mode: str, why: str, hub: Hub, from_hub: Callable[..., dict], monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.mode = mode
    monkeypatch.setattr(asked_hub, "_DEADLINE_S", 0.5)
    if mode == "down":
        hub.close()
    reason = f"{REPO} is not on this disk, and the hub cannot be reached ({hub.url}: {why})"
    with pytest.raises(ConfigError) as refused:
        train(load_config(**from_hub()))
    [problem] = refused.value.problems
    assert problem.where == "--pretrained_model_name_or_path"
    assert problem.message.startswith(f"{reason}, so the name cannot be checked either; download it first ")
    assert sum(hub.asked.values()) <= 1  # on a busy machine the answer may be given up before the question is there
    assert hub.waited == []
    assert capfd.readouterr() == ("", "")

    train(load_config(**from_hub(dry_run=True)))  # what can be checked without the model is
    printed = capfd.readouterr()
    assert printed.out.splitlines()[-1].startswith(f"model not seen: {reason}; ")
    assert "everything checks out" not in printed.out
    assert "GiB" not in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(("mode", "said"), [("unknown", "There is no http://"), ("gated", "The model is gated: ")])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_hub_that_answers_tells_names_from_outages(
    mode: str, said: str, dry_run: bool, hub: Hub, from_hub: Callable[..., dict]
) -> None:
    hub.mode = mode
    with pytest.raises(ConfigError) as refused:
        train(load_config(**from_hub(dry_run=dry_run)))
    [problem] = refused.value.problems
    assert problem.message.startswith(said)


def test_a_repository_without_the_parts_is_refused(hub: Hub, from_hub: Callable[..., dict], tmp_path: Path) -> None:
    hub.folder = tmp_path / "empty"
    with pytest.raises(ConfigError, match=f"{REPO} on the hub has no vae/config.json") as refused:
        train(load_config(**from_hub()))
    assert len(refused.value.problems) == 2
    with pytest.raises(ConfigError, match=r"--vae_id: .* has no vae/config.json nor config.json"):
        train(load_config(**from_hub(vae_id=REPO)))


def test_what_is_on_this_disk_needs_no_hub(
    hub: Hub, from_hub: Callable[..., dict], monkeypatch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(load_config(**from_hub(dry_run=True)))
    printed = capsys.readouterr().out
    assert "memory of a process, estimated" in printed
    assert printed.splitlines()[-1].endswith("weights not on this disk yet: text encoder, VAE, transformer")
    first = train(load_config(**from_hub()))

    hub.mode = "silent"
    hub.asked.clear()
    monkeypatch.setattr(asked_hub, "_DEADLINE_S", 0.2)
    capsys.readouterr()
    second = train(load_config(**from_hub(output_dir=str(tmp_path / "second"))))
    # Not byte for byte: safetensors writes the entries of its metadata in any order.
    torch.testing.assert_close(load_file(second.weights), load_file(first.weights), rtol=0, atol=0)
    assert sum(hub.asked.values()) <= 1
    printed = capsys.readouterr().out
    assert f"no answer within 0.2 s); {REPO} is used as it is on this disk" in printed

    train(load_config(**from_hub(dry_run=True, output_dir=str(tmp_path / "third"))))
    assert capsys.readouterr().out.splitlines()[-1].startswith("everything checks out, with ")


def test_a_dry_run_finds_weights_of_rewards_that_a_run_would_miss(
    hub: Hub, tiny_repo: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It refuses what the run would refuse; for a GPU of another machine it warns."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a dog\n")

    def dry_run(**more: Any) -> str:
        options = {
            "method": "grpo", "model_name": "ltx_video", "pretrained_model_name_or_path": str(tiny_repo("ltx_video")),
            "prompts": str(prompts), "reward": ["pickscore=1"], "rollout_size": "9x64x64", "num_generations": 2,
            "train_steps": 1, "rank": 4, "output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache"),
        }  # fmt: skip
        capsys.readouterr()
        train(load_config(**options, dry_run=True, **more))
        return capsys.readouterr().out

    assert "weights not on this disk yet: " in dry_run()
    hub.close()
    with pytest.raises(ConfigError) as refused:
        dry_run()
    assert {problem.where for problem in refused.value.problems} == {"--reward"}
    assert "on the machine that trains" in dry_run(gpu="h100")
    assert not (tmp_path / "run").exists()


def test_a_start_reads_its_data_once(hub: Hub, from_hub: Callable[..., dict], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if configs are fetched, options chosen and checkpoints damaged; other batches are planned again."""
    count, plan = 0, MethodSpec.plan

    def checkpointed(config: TrainConfig) -> TrainConfig:
        section = config.memory.model_copy(update={"gradient_checkpointing": True})
        return config.model_copy(update={"memory": section})

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return plan(*arguments, **options)

    monkeypatch.setattr(MethodSpec, "plan", counted)
    monkeypatch.setattr(automatic, "_options_for_budget", lambda checked, budget: checkpointed(checked.config))
    values = from_hub(memory_budget=0.4, checkpointing_steps=1)
    result = train(load_config(**values))
    assert load_config(result.run_dir / "config.toml").memory.gradient_checkpointing
    assert count == 1
    [weights] = (result.run_dir / "checkpoints" / "step-1").glob("*.safetensors")
    weights.write_bytes(b"damaged")
    with pytest.raises(ConfigError):
        train(load_config(**values, resume_from_checkpoint="latest"))
    assert count == 2
    checked = preflight(load_config(**from_hub(output_dir=str(result.run_dir.with_name("other")))))
    other = checked.config.model_copy(
        update={"dataloader": checked.config.dataloader.model_copy(update={"batch_size": 2})}
    )
    preflight(other, planner=plan_work_once(checked))
    assert count == 4
