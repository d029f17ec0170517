"""Runs with prior preservation: every family, resumed, encoded beforehand; what it holds back; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES

from finetrainers import SFT, Batch, train
from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.data.reading.prior_prompts import PriorPrompts, without_triggers
from finetrainers.memory.estimate import estimate_for
from finetrainers.models.registry import get_family
from finetrainers.plan.preflight import preflight

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"id_token": "ZORB", "gradient_accumulation_steps": 2, "lora_dropout": 0.2},
    "full": {"training_type": "full-finetune", "class_prompt": "a pattern", "precompute_conditions": True},
}


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "kind"), [*((family, "lora") for family in FAMILIES), ("ltx_video", "full")])
def test_resuming_changes_nothing(
    family: str, kind: str, options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = options(
        family, clips=2, train_steps=2, checkpointing_steps=1, lr=1e-3, prior_preservation_weight=4.0, **KINDS[kind]
    )
    straight = run(**{**values, "output_dir": str(tmp_path / "straight")})
    resumed = run(
        **{**values, "output_dir": str(tmp_path / "resumed")},
        resume_from_checkpoint=str(straight.root / "checkpoints" / "step-1"),
    )
    names = ("loss", "prior_loss", "grad_norm")
    assert resumed.curve(*names) == straight.curve(*names)[1:]
    assert all(torch.equal(weight, straight.weights[key]) for key, weight in resumed.weights.items())
    assert straight.curve("prior_loss")[0][1] == 0.0  # the network is the reference model still
    assert straight.curve("prior_loss")[-1][1] > 0.0


@pytest.mark.rotating
def test_the_prior_is_held_and_the_clips_are_learned(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """The same first step with and without; then less difference from the reference. The cache changes nothing."""
    prompts = tmp_path / "prior.txt"
    prompts.write_text("a cat\na dog\n")
    values = options(clips=2, train_steps=8, lr=5e-3, batch_size=2, prior_prompts=str(prompts))
    weak, strong, cached = (
        run(**{**values, "output_dir": str(tmp_path / name), "prior_preservation_weight": weight, **more})
        for name, weight, more in (
            ("weak", 1e-6, {}), ("strong", 30.0, {}),
            ("cached", 30.0, {"precompute_conditions": True, "train_steps": 2}),
        )
    )  # fmt: skip
    plain = run(**{**values, "output_dir": str(tmp_path / "plain"), "prior_prompts": None, "train_steps": 1})
    assert plain.curve("loss", "grad_norm") == strong.curve("loss", "grad_norm")[:1]
    for ours, theirs in zip(cached.curve("loss", "prior_loss"), strong.curve("loss", "prior_loss"), strict=False):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert strong.curve("prior_loss")[-1][1] < 0.2 * weak.curve("prior_loss")[-1][1]
    assert strong.curve("loss")[-1][1] < 1.1 * strong.curve("loss")[0][1]


def test_prior_prompts_are_captions_without_triggers_or_drawn() -> None:
    assert without_triggers("ZORB, a ball; ZORBs roll by ZORB", ("ZORB",)) == "a ball; ZORBs roll by"
    own = PriorPrompts((), ("ZORB", "<x>"), seed=1)
    assert own.of("<x> a ball", (0, 1)) == "a ball"
    assert own.texts_for(["ZORB a", "<x> a", "b"]) == ["a", "b"]
    drawn = PriorPrompts(("a", "b"), (), seed=1)
    found = [drawn.of("c", (epoch, 3)) for epoch in range(20)]
    assert set(found) == {"a", "b"}
    assert found == [drawn.of("d", (epoch, 3)) for epoch in range(20)]


def test_what_cannot_be_preserved_is_refused(options: Callable[..., dict], tmp_path: Path) -> None:
    for given, pattern in (
        ({}, "--class_prompt TEXT, --prior_prompts FILE"),
        ({"class_prompt": "a dog", "prior_prompts": "p.txt"}, "--class_prompt: .*--prior_prompts"),
        ({"prior_prompts": str(tmp_path / "gone.txt")}, "data: .*gone.txt"),
        ({"class_prompt": "a dog", "method": "dpo"}, "--method: dpo .*--prior_preservation_weight"),
        (
            {"class_prompt": "", "training_type": "full-finetune", "optimizer_in_backward": True},
            "--optimizer_in_backward: .*--gradient_accumulation_steps 1",
        ),
    ):
        with pytest.raises(ConfigError, match=pattern):
            preflight(load_config(**options(prior_preservation_weight=1.0, **given)))
    warnings = preflight(load_config(**options(class_prompt="a"))).warnings
    assert any("--prior_preservation_weight is 0" in warning for warning in warnings)


@pytest.mark.parametrize("training_type", ["lora", "full-finetune"])
def test_the_estimate_counts_a_further_micro_batch_and_the_copy(
    training_type: str, options: Callable[..., dict]
) -> None:
    """As with accumulation, which has the same peak; full finetuning also has the reference model."""

    def parts(**changes: Any) -> dict[str, float]:
        config = load_config(**options(training_type=training_type, **changes))
        family = get_family("ltx_video")
        spec = family.load(config.model)
        network = spec.load_transformer(torch.float32)
        found = estimate_for(config, spec.facts.geometry, network, spec=spec, bucket=(9, 64, 64))
        return {**found.parts, "total": found.total}

    prior = parts(prior_preservation_weight=1.0, class_prompt="a dog")
    accumulated = parts(gradient_accumulation_steps=2)
    copy = prior.pop("copies of the policy") - accumulated.pop("copies of the policy")
    assert (copy > 0) == (training_type == "full-finetune")
    assert prior.pop("total") == pytest.approx(accumulated.pop("total") + copy)
    assert prior == accumulated


class Doubled(SFT):
    """Twice the loss of clips."""

    def loss(self, transformer: Any, batch: Batch) -> Any:
        loss, metrics = super().loss(transformer, batch)
        return 2 * loss, metrics | {"clips": torch.tensor(float(len(batch)))}


def test_the_loss_of_a_subclass_is_given_clips_only(options: Callable[..., dict]) -> None:
    values = options(clips=1, train_steps=2, prior_preservation_weight=4.0, class_prompt="a pattern")
    records = [record for record in train(load_config(**values), method=Doubled).metrics if "loss" in record]
    assert [record["clips"] for record in records] == [1.0, 1.0]
    assert [record["prior_loss"] > 0 for record in records] == [False, True]
