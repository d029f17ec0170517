"""Gradients taken during a rollout are those of replay, for every family; an OOM there names options that need less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES, short_clip
from torch import Tensor

from finetrainers.config.parallel import ParallelSection
from finetrainers.config.root import TrainConfig
from finetrainers.methods.grpo.method import GRPO
from finetrainers.methods.grpo.no_replay.gradient_plan import plan_gradients
from finetrainers.methods.grpo.no_replay.no_replay import NoMemoryForGradients, RolloutGradients
from finetrainers.methods.grpo.objective import by_noise
from finetrainers.methods.grpo.rollout.collect import RolloutCollector
from finetrainers.parallel.strategy import Strategy
from finetrainers.rundir.find import scan_checkpoints


@pytest.fixture
def reward_run(options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`reward_run(family, **changes)`: a rollout of two prompts, and its update."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ball\na blue cube rolls\na cat\n")

    def start(family: str, **changes: Any) -> Any:
        values = options(family, **{
            "method": "grpo", "train_steps": 1, "batch_size": 2, "optimizer": "adamw", "prompts": str(prompts),
            "reward": ["brightness"], "rollout_size": f"{short_clip(family)}x64x64",
            "prompts_per_step": 2, "num_generations": 3, "sampling_steps": 4, "eta": 0.3, **changes,
        })  # fmt: skip
        return run(**{k: v for k, v in values.items() if k not in ("data_root", "video_resolution_buckets")})

    return start


@dataclass
class Compared:
    """The first step's gradient by replay, before it is clipped, and the same rollout's without replay.

    Attributes:
        replayed: by trained weight.
        without: what the rollout has collected, by the way of taking gradients.
        shared: the gradients of these by trained weight.
    """

    replayed: dict[Any, Tensor] = field(default_factory=dict)
    without: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, dict[Any, Tensor]] = field(default_factory=dict)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compared:
    """A run by replay makes its rollout twice more, without replay: all else is loaded, encoded and saved once.

    What is scored of a clip is the brightness of its latents.
    """
    found, steps, clip = Compared(), GRPO.update_steps, Strategy.clip_grad_norm

    def each_way(self: GRPO, transformer: Any, collected: Any, rollout: int) -> Iterator[Any]:
        for how in ("reweight", "retain"):
            section = self.section.model_copy(update={"rollout_gradients": how})
            self.collector._gradients = plan_gradients(TrainConfig.model_construct(
                grpo=section, parallel=ParallelSection(), training=None, memory=None,
            ))  # fmt: skip
            found.without[how] = self.collect(transformer, rollout)
            self.collector._gradients = None
            found.shared[how] = dict(self.shared(found.without[how].gradient).weights)
        yield from steps(self, transformer, collected, rollout)

    def watched(parallel: Any) -> Any:
        found.replayed |= {w: w.grad.clone() for w in parallel._parameters if w.grad is not None}
        return clip(parallel)

    monkeypatch.setattr(RolloutCollector, "decode", lambda _, latents: latents[:, :3].transpose(1, 2).sigmoid())
    monkeypatch.setattr(GRPO, "update_steps", each_way)
    monkeypatch.setattr(Strategy, "clip_grad_norm", watched)
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("training_type", ["lora", "full-finetune"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_replay(
    family: str, training_type: str, reward_run: Callable[..., Any], compared: Compared
) -> None:
    is_lora = training_type == "lora"
    [record] = reward_run(family, training_type=training_type, gradient_checkpointing=is_lora, batch_size=1).metrics
    for how, taken in compared.shared.items():
        assert taken.keys() == compared.replayed.keys()  # weights without a gradient still have none
        error, size = (
            torch.sqrt(sum((one.double() ** 2).sum() for one in parts))
            for parts in ([taken[w] - compared.replayed[w] for w in taken], compared.replayed.values())
        )
        # Steps that are trained are sampled clip by clip. Replay does the same, since products of other sizes round
        # differently.
        assert error <= 5e-6 * size > 0, how
        rollout = compared.without[how]
        norms = by_noise(rollout.gradient.norms, rollout.gradient.levels)
        for name, value in {**rollout.stats, **norms}.items():
            if not name.startswith("seconds/"):
                assert float(value) == pytest.approx(record[name], rel=1e-4), (how, name)


def test_a_resumed_run_is_bit_for_bit_the_one_that_went_on(reward_run: Callable[..., Any], tmp_path: Path) -> None:
    options = {"rollout_gradients": "reweight", "train_steps": 2, "checkpointing_steps": 1, "lr": 1e-2}
    whole = reward_run("ltx_video", output_dir=str(tmp_path / "whole"), **options)
    first = next(one.path for one in scan_checkpoints(tmp_path / "whole") if one.step == 1)
    resumed = reward_run(
        "ltx_video", output_dir=str(tmp_path / "resumed"), resume_from_checkpoint=str(first), **options
    )
    assert resumed.steps_done == 1
    assert whole.weights.keys() == resumed.weights.keys()
    assert all(torch.equal(value, resumed.weights[key]) for key, value in whole.weights.items())


def test_an_oom_says_what_needs_less(reward_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(RolloutGradients, "take", full)
    with pytest.raises(NoMemoryForGradients, match=r"--gradient_checkpointing; .*--rollout_gradients replay"):
        reward_run("ltx_video", rollout_gradients="reweight")


def test_weights_are_updated_as_gradients_arrive(reward_run: Callable[..., Any], tmp_path: Path) -> None:
    """The step has one micro-batch, so `--optimizer_in_backward` may be on."""
    plain, early = (
        reward_run(
            "ltx_video", training_type="full-finetune", rollout_gradients="reweight", max_grad_norm=0.0, lr=1e-4,
            output_dir=str(tmp_path / str(now)), optimizer_in_backward=now,
        ).weights
        for now in (False, True)
    )  # fmt: skip
    for key, value in plain.items():
        torch.testing.assert_close(early[key], value, rtol=1e-6, atol=1e-7)
