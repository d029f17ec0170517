"""A rollout that takes gradients, or keeps graphs, counted on fake tensors, against the arithmetic of the estimate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_of import OneOf
from published_networks import NETWORKS, published_repository
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.memory.checkpointing import set_activation_memory
from finetrainers.memory.count import LiveStorages, StepShape, cuda_autocast, fake_weights
from finetrainers.memory.estimate import GIB, estimate_for
from finetrainers.methods.grpo.no_replay.gradient_plan import plan_gradients
from finetrainers.methods.grpo.no_replay.no_replay import RolloutGradients
from finetrainers.methods.grpo.rollout.collect import RolloutCollector
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelSpec
from finetrainers.plan.trainable import make_trainable
from finetrainers.rewards.reward_set import HeadScores, Scores

#: Of each clip of two prompts.
SCORES = [0.3, 0.1, 0.9, 0.5, 0.2, 0.4, 0.8, 0.7]
NO_JOB: Any = None
RETAIN, REWEIGHT = {"rollout_gradients": "retain"}, {"rollout_gradients": "reweight"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("lora", {**RETAIN, "best_of_n": 2, "gradient_checkpointing": True, "prompts_per_step": 2, "window_size": 1}),
    ("full-finetune", {**RETAIN, "best_of_n": 2, "window_size": 1}),
    ("full-finetune", {**RETAIN, "best_of_n": 2, "gradient_checkpointing": True, "window_size": 1}),
    ("full-finetune", {**REWEIGHT, "batch_size": 2, "gradient_checkpointing": True, "window_size": 1}),
]


@pytest.mark.rotating
def test_the_estimate_agrees_with_counting(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """Within 5 %, on a network of few blocks: what waits takes several times what one pass does."""
    network = NETWORKS["LTX-Video"]
    tiny, family = tiny_repo(network.family, **network.tiny), get_family(network.family)
    for number, (training_type, options) in enumerate(CASES):
        few = {
            **network.config,
            "num_layers": 4 if "activation_memory" in options else 2,
        }  # the last blocks do not offload
        repo = published_repository(tiny, tmp_path / str(number), few)
        config = load_config(
            model_name=network.family, pretrained_model_name_or_path=str(repo), prompts="p.txt", reward=["brightness"],
            rollout_size="x".join(map(str, network.bucket)), num_generations=4, method="grpo", train_steps=1,
            training_type=training_type, optimizer="adamw", rank=64,
            **{"prompts_per_step": 1, "batch_size": 1, **options},
        )  # fmt: skip
        geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
        meta = spec.transformer_on_meta()
        make_trainable(meta, config.training)
        latent = (few["out_channels"], *geometry.denoised_shape(*network.bucket))
        weights = sum((12 if p.requires_grad else 2) * p.numel() for p in meta.parameters())
        planned = estimate_for(config, geometry, meta, spec=spec, bucket=network.bucket)
        counted = count_rollout(spec, meta, config, latent)
        assert planned.total == pytest.approx((weights + counted) / GIB, rel=0.05), (training_type, options)


def count_rollout(spec: ModelSpec, network: nn.Module, config: TrainConfig, latent: tuple[int, ...]) -> float:
    """Bytes that a rollout takes at most beyond the weights."""
    section, batch, clips = config.grpo, config.dataloader.batch_size, 4 * config.grpo.prompts_per_step
    fake, live = FakeTensorMode(allow_non_fake_inputs=True), LiveStorages()
    like: Any = SimpleNamespace(section=section, panel=SimpleNamespace(weights={"r": 1.0}))

    def compare(scores: Scores) -> Any:
        found = RolloutCollector.compare(like, scores)
        return found, RolloutCollector._mask_trained(like, found)

    with fake:
        fake_weights(network, StepShape((1, 1, 1, 1)))
        set_activation_memory(network.train(), config.memory.stored)
        live.add([*network.parameters(), *network.buffers()])
    weights = live.live
    taking = RolloutGradients(
        plan_gradients(config), section, jobs=[NO_JOB] * clips, parallel=OneOf(), compare=compare, weights={"r": 1.0},
        repeats=section.window_size,
    )  # fmt: skip

    def transition(row: int) -> None:
        conditions, meta = spec.empty_inputs(1)
        x, after = torch.empty(1, *latent), torch.empty(1, *latent)
        t = torch.zeros(1, dtype=torch.float32 if spec.facts.is_flow else torch.long)
        with torch.autocast("cpu", torch.bfloat16):
            prediction = spec.predict(network, x, t, conditions, meta).float()
        log = -(prediction - after).square().flatten(1).mean(1)
        taking.take(network, row, log, prediction, weight=1.0, level=torch.zeros(1))

    known: list[Scores] = []
    with cuda_autocast():
        for first in range(0, clips, batch):
            with fake, live:
                for row in [row for _ in range(section.window_size) for row in range(batch)]:
                    transition(row)
            with live:
                known.append(scores(SCORES[first : first + batch]))
                taking.scored(known[-1])
        with live:
            taking.finish(*compare(Scores.in_order(list(enumerate(known)))))
    return live.peak - weights


def scores(values: list[float]) -> Scores:
    found = torch.tensor(values, dtype=torch.float64)
    return Scores({"r": HeadScores(found, found)}, torch.zeros(len(values), dtype=torch.bool))
