"""A run of a model from the hub, before anything is loaded: the hub is asked once, and what it says is said once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback_hub import REPO, Hub
from refusals import problems, refused_options
from safetensors.torch import load_file

from finetrainers import ConfigError, load_config, train
from finetrainers.memory.advice import Advice, Chosen, MemoryOption, Outcome
from finetrainers.methods.spec import MethodSpec
from finetrainers.models.files import hub as asked_hub
from finetrainers.plan import automatic
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.preflight import plan_work_once, preflight


@pytest.fixture
def from_hub(options: Callable[..., dict], tmp_path: Path) -> Callable[..., dict]:
    """`from_hub(**changes)`: options of a run of one step, of a model that is on the hub alone."""

    def build(**changes: Any) -> dict:
        model = {"pretrained_model_name_or_path": REPO, "cache_dir": str(tmp_path / "cache")}
        return options(train_steps=1, **{**model, **changes})

    return build


@pytest.mark.rotating
@pytest.mark.parametrize(("mode", "why"), [("down", "Connection refused"), ("silent", "0.5 s"), ("broken", "503")])
def test_a_hub_that_cannot_be_reached_is_said_once(
    mode: str, why: str, hub: Hub, from_hub: Callable[..., dict], monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.mode = mode
    monkeypatch.setattr(asked_hub, "_DEADLINE_S", 0.5)
    if mode == "down":
        hub.close()
    reason = re.compile(rf"{REPO} .*\({hub.url}: .*{why}\)")
    with refused_options(("--pretrained_model_name_or_path", "unavailable")) as refused:
        train(load_config(**from_hub()))
    [problem] = refused.value.problems
    assert reason.match(problem.message)
    assert f"`hf download {REPO}`" in problem.message
    assert sum(hub.asked.values()) <= 1  # on a busy machine the answer may be given up before the question is there
    assert hub.waited == []
    assert capfd.readouterr() == ("", "")

    train(load_config(**from_hub(dry_run=True)))  # what can be checked without the model is
    printed = capfd.readouterr()
    assert reason.search(printed.out.splitlines()[-1])
    assert "checks out" not in printed.out
    assert "GiB" not in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(("mode", "said"), [("unknown", "private"), ("gated", "gated")])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_hub_that_answers_tells_names_from_outages(
    mode: str, said: str, dry_run: bool, hub: Hub, from_hub: Callable[..., dict]
) -> None:
    hub.mode = mode
    with pytest.raises(ConfigError) as refused:
        train(load_config(**from_hub(dry_run=dry_run)))
    [problem] = refused.value.problems
    assert said in problem.message
    assert f"{hub.url}/{REPO}" in problem.message


def test_a_repository_without_the_parts_is_refused(hub: Hub, from_hub: Callable[..., dict], tmp_path: Path) -> None:
    hub.folder = tmp_path / "empty"
    with pytest.raises(ConfigError, match=f"{REPO} .*vae/config.json") as refused:
        train(load_config(**from_hub()))
    assert len(refused.value.problems) == 2
    with pytest.raises(ConfigError, match=r"--vae_id: .* vae/config\.json .*config\.json"):
        train(load_config(**from_hub(vae_id=REPO)))


def test_what_is_on_this_disk_needs_no_hub(
    hub: Hub, from_hub: Callable[..., dict], monkeypatch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(load_config(**from_hub(dry_run=True)))
    printed = capsys.readouterr().out
    assert "< peak" in printed
    assert printed.splitlines()[-1].endswith(": text encoder, VAE, transformer")
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
    assert re.search(rf"warning: .* 0\.2 s\).* {REPO} ", printed)

    train(load_config(**from_hub(dry_run=True, output_dir=str(tmp_path / "third"))))
    assert re.search(r"checks out.* \d warning", capsys.readouterr().out.splitlines()[-1])


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

    assert dry_run().splitlines()[-1].endswith("PickScore_v1")
    hub.close()
    with pytest.raises(ConfigError) as refused:
        dry_run()
    assert set(problems(refused.value)) == {("--reward", "unavailable")}
    assert re.search(r"warning: --reward: .*machine", dry_run(gpu="h100"))
    assert not (tmp_path / "run").exists()


def test_a_start_reads_its_data_once(hub: Hub, from_hub: Callable[..., dict], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if configs are fetched, options chosen and checkpoints damaged; other batches are planned again."""
    count, plan = 0, MethodSpec.plan

    switch = MemoryOption({"gradient_checkpointing": True}, "time", 1)

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return plan(*arguments, **options)

    monkeypatch.setattr(MethodSpec, "plan", counted)
    monkeypatch.setattr(automatic, "fits", lambda *_: False)
    advice = Advice(preflight(load_config(**from_hub())).config, (Chosen(switch, 1.0, 1.0),), Outcome({}), 1.0)
    count = 0
    monkeypatch.setattr(RunMemory, "advice", lambda *_, **__: advice)
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
