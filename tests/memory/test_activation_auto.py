"""The settings that `--activation_memory auto` may choose, and the correction by what was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published_networks import NETWORKS, published_repository

from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.memory.activation_auto import ActivationModel, activation_model, with_choice
from finetrainers.memory.activation_plan import Machine, recomputed
from finetrainers.memory.estimate import GIB, estimate_for
from finetrainers.memory.phases import RunSizes
from finetrainers.models.registry import get_family
from finetrainers.plan.trainable import make_trainable


@pytest.fixture(scope="module")
def planned(
    tiny_repo: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[TrainConfig, ActivationModel, Any]]:
    """`planned(**options)`: HunyuanVideo's configuration, model, and the estimate of a configuration."""

    repo = published_repository(
        tiny_repo("hunyuan_video"), tmp_path_factory.mktemp("published"), NETWORKS["HunyuanVideo"].config
    )
    networks: dict[str, Any] = {}  # no other option changes them, and each takes a second to build

    def build(**options: Any) -> tuple[TrainConfig, ActivationModel, Any]:
        config = load_config(
            model_name="hunyuan_video", pretrained_model_name_or_path=str(repo), data_root=str(repo), rank=64,
            video_resolution_buckets=["49x512x768"], activation_memory="auto", optimizer="adamw", **options,
        )  # fmt: skip
        family = get_family("hunyuan_video")
        geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
        meta = networks.get(config.model.attn_backend)
        if meta is None:
            meta = networks[config.model.attn_backend] = spec.transformer_on_meta()
            make_trainable(meta, config.training)
        case: Any = {"bucket": (49, 512, 768), "batch_size": 1}
        around = RunSizes((49, 512, 768))
        return (
            config, activation_model(config, geometry, meta, spec=spec, around=around),
            lambda one: estimate_for(one, geometry, meta, spec=spec, **case),
        )  # fmt: skip

    return build


def test_what_is_chosen_is_what_the_estimate_says(planned: Callable[..., Any]) -> None:
    config, model, estimate = planned()
    machine = Machine(60 * GIB, 40 * GIB, 100e12, 25e9)
    choice = model.choose(machine)
    assert choice.fits
    assert 0 < choice.number < 60
    plan = estimate(with_choice(config, choice))
    assert plan.total * GIB == pytest.approx(choice.device)
    assert plan.offloaded * GIB == pytest.approx(choice.host)
    fewer = with_choice(config, choice).memory.model_copy(
        update={"selective_checkpointing": (choice.number - 1) / choice.total}
    )
    assert estimate(config.model_copy(update={"memory": fewer})).total * GIB > machine.device
    assert estimate(with_choice(config, None)).total > 100

    # A tenth more activations than planned: what is there between steps was right.
    least = estimate(with_choice(config, choice)).persistent_bytes
    measured = model.with_measured_peak(choice, peak=GIB * (least + 1.1 * (plan.total - least)))
    assert measured.correction == pytest.approx(1.1)
    assert measured.sizes(choice.stored, choice.number)[0] > machine.device
    assert measured.choose(machine).number > choice.number
    repeated = recomputed(model.work, choice.stored, choice.number / 60)
    assert model.operations(choice) == pytest.approx(1 + repeated / (model.work.forward + model.work.backward))


def test_settings_that_go_with_other_options(planned: Callable[..., Any]) -> None:
    assert planned()[1].settings == ("none", "checkpoint", "keep_attention", "offload")
    assert planned(compile="regional")[1].settings == ("none", "checkpoint")
    assert planned(attn_backend="_native_math")[1].settings == ("none", "checkpoint")
    casts = planned(layerwise_upcasting_modules=["transformer"])[1]
    assert casts.settings == ("checkpoint", "keep_attention", "offload")
    assert casts.all_blocks
    assert casts.choose(Machine(60 * GIB, 0, 100e12, 25e9)).number == 60
    swapped = planned(blocks_to_swap=60)[1]
    assert swapped.work.copied > 40 * GIB
    # Swapped blocks and activations share the host's memory.
    room, host = swapped.sizes("offload", 60)[0], swapped.sizes("offload", 60)[1] + swapped.workload.swap.host
    assert swapped.choose(Machine(room, host, 100e12, 25e9)).stored == "offload"
    assert swapped.choose(Machine(room, host - 1, 100e12, 25e9)).stored != "offload"
