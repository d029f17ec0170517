"""Losses and rollouts never wait for a GPU: the host queues work ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from derived import KEYS, Setting
from device_waits import META, devices_of, on_meta, recorded_waits
from every_family import CHECKPOINTS, required_options
from grpo.policies import flow, make_grpo, make_nft, network, vp

from finetrainers.config.sections import ModelSection
from finetrainers.methods.grpo.rollout.batches import Part
from finetrainers.models.registry import get_family
from finetrainers.models.spec import Batch, PromptEmbeds, VideoMeta
from finetrainers.utils.device import to_device


def test_a_wait_is_recorded() -> None:
    """The stand-in itself: each way to wait is one record or an error, and asynchronous copies are none."""
    x, rows = torch.empty(3, 4, device=META), torch.tensor([0, 1])
    for waits_for in (
        lambda: torch.ones(3).to(META), lambda: torch.ones(3).to(META, torch.float64),
        lambda: torch.tensor([1.0], device=META), lambda: x.new_tensor([1.0]), lambda: x[rows], lambda: x[[0, 1]],
        lambda: x[0].copy_(torch.ones(4)), lambda: x.__setitem__(rows, 0.0),
    ):  # fmt: skip
        with recorded_waits() as waits:
            waits_for()
        assert len(waits) == 1, waits
    for reads in (lambda: x.cpu(), lambda: float(x.sum()), lambda: x[x > 0], lambda: x[0].tolist()):
        with pytest.raises((RuntimeError, NotImplementedError)), recorded_waits():
            reads()
    with recorded_waits() as waits:
        x[:, 0] = 1.0
        assert to_device(rows, META).device == META
    assert waits == []


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "version"), CHECKPOINTS)
def test_no_loss_of_a_family_waits(family: str, version: str | None, tiny_repo: Callable[..., Path]) -> None:
    """From the second micro-batch on; the first copies tables. Models that take given frames get some."""
    repo = tiny_repo(family, version)
    facts = get_family(family).facts_of(ModelSection(model_name=family, pretrained_model_name_or_path=str(repo)))
    given = "" if facts.first_frame == "none" else "prefix:9=1" if facts.any_frame else "first=1"
    setting = Setting(repo, family, given=given, **required_options(facts))
    del setting.spec.predict  # its own again
    transformer = setting.spec.load_transformer(torch.float32)
    shapes = setting.spec.clip_shapes(transformer, (17, 64, 64)).items()
    clip = {name: torch.zeros(len(KEYS), *shape, device=META) for name, (_, shape) in shapes}
    conditions, meta = setting.spec.empty_inputs(len(KEYS))
    conditions = PromptEmbeds(on_meta(dict(conditions.tensors)), conditions.lengths)
    batch = Batch(clip["moments"], conditions, VideoMeta(on_meta(meta.fps)), KEYS, clip)
    transformer.to(META)
    with recorded_waits():
        setting.method.loss(transformer, batch)
    with recorded_waits() as waits:
        loss, metrics = setting.method.loss(transformer, batch)
        loss.backward()
    assert waits == []
    assert devices_of([loss, metrics]) == {"meta"}


@pytest.mark.parametrize("is_replayed", [True, False])
@pytest.mark.parametrize("make_process", [flow, vp])
def test_no_rollout_waits(make_process: Any, is_replayed: bool) -> None:
    """Nor do the micro-batches that follow, of a policy gradient or of DiffusionNFT."""
    host = network()
    method: Any = make_grpo(make_process, sampler="ddim", eta=0.5) if is_replayed else make_nft(host, make_process)
    collected = method.rollout(host, 0)
    policy, source = network().to(META), method.collector.source
    encode = source.conditions
    source.conditions = lambda prompts: PromptEmbeds(on_meta(dict(encode(prompts).tensors)))
    method.sampler.device = method.sampler.keep_on = META
    conditions = source.conditions([job.prompt for job in collected.jobs])

    def collect_and_replay() -> Any:
        clips, replays = method.sampler.rollout(policy, collected.jobs, conditions)
        part = Part([0, 1, 3], [0.5, 0.25, 0.25], repeat=0, update=1, is_first=True)
        batch = method.micro_batch(policy, collected, 0, part)
        loss, metrics = method.loss(policy, batch)
        loss.backward()
        return [clips, [replay.before for replay in replays], loss, metrics]

    with recorded_waits():
        collect_and_replay()
    with recorded_waits() as waits:
        results = collect_and_replay()
    assert waits == []
    assert devices_of(results) == {"meta"}
