"""Rollouts are decoded one by one, or in tiles, if all would not fit; text encoders are freed while sampling."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from every_family import FAMILIES
from torch import nn

from finetrainers import train
from finetrainers.config.load import load_config
from finetrainers.config.sections import ModelSection
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import with_reserve
from finetrainers.methods.grpo.prompts.source import PromptSource
from finetrainers.methods.grpo.rollout.collect import RolloutCollector
from finetrainers.models import common
from finetrainers.models.registry import get_family
from finetrainers.plan import automatic
from finetrainers.plan.automatic import apply_decoding_settings, choose_settings
from finetrainers.plan.memory_lines import as_json, memory_lines
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.preflight import ResolvedRun, preflight
from finetrainers.utils.phases import ROLLOUT

CLIPS = {
    "method": "grpo", "reward": ["brightness"], "rollout_size": "9x64x64", "prompts_per_step": 2, "num_generations": 4,
    "batch_size": 4, "sampling_steps": 3,
}  # fmt: skip


@pytest.fixture
def rewarded(options: Callable[..., dict[str, Any]], tmp_path: Any) -> Callable[..., dict[str, Any]]:
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")

    def build(family: str = "ltx_video", **changes: Any) -> dict[str, Any]:
        found = options(family, prompts=str(tmp_path / "prompts.txt"), **{**CLIPS, **changes})
        return {name: value for name, value in found.items() if name not in ("data_root", "video_resolution_buckets")}

    return build


def test_what_does_not_fit_is_decoded_one_by_one_and_then_in_tiles(
    rewarded: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the planned peak of rollouts. What the user says counts, a run and the estimate of its GPU say the same."""
    big = {"rollout_size": "49x768x1024", "batch_size": 2, "prompts_per_step": 1}
    values = rewarded(**big)
    checked = preflight(load_config(**values))
    plan = RunMemory(checked).plan()
    assert plan.peak_phase == ROLLOUT
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: plan.other_networks)
    monkeypatch.setattr(automatic, "peak_flops", lambda _: None)
    monkeypatch.setattr(automatic, "link_bandwidth", lambda _: 25e9)
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), weights_are_movable=True, gather_objects=lambda one: one)

    def chosen(size: float, **changes: Any) -> tuple[tuple[str, ...], ResolvedRun, float]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (size - with_reserve(plan.other_networks), size))
        run = preflight(load_config(**{**values, **changes}))
        config, found = choose_settings(run, gpu)
        assert config.model == run.config.model  # latents of a cache are still the same
        assert (found.decoding if found else ()) == RunMemory(run, gpu_gib=size / GIB).choose().decoding
        return found.decoding if found else (), run, found.plan.peaks[ROLLOUT] if found else 0.0

    whole = with_reserve(plan.peaks[ROLLOUT])
    assert chosen(1.01 * whole)[0] == ()
    assert "note" not in capsys.readouterr().out
    sliced, run, peak = chosen(0.99 * whole)
    assert sliced == ("enable_slicing",)
    assert peak < 0.7 * plan.peaks[ROLLOUT]
    assert "(--no-enable_slicing)" in capsys.readouterr().out
    tiled, _, least = chosen(0.99 * with_reserve(peak))
    assert tiled == ("enable_slicing", "enable_tiling")
    assert least < peak
    assert "(--no-enable_tiling)" in capsys.readouterr().out
    assert chosen(0.99 * with_reserve(peak), enable_tiling=False)[0] == ("enable_slicing",)
    assert chosen(0.99 * whole, enable_slicing=False)[0] == ("enable_tiling",)
    assert chosen(0.99 * whole, enable_slicing=True, enable_tiling=False)[0] == ()

    memory = RunMemory(run, gpu_gib=0.99 * whole / GIB)
    found = memory.choose()
    assert found.words["enable_slicing"] in memory_lines(memory, found)
    assert as_json(memory, found, None, None)["decoding"] == ["enable_slicing"]
    spec = run.family.load(run.config.model)
    size = run.plan.size
    apply_decoding_settings(None, spec, size)
    assert spec.vae_mode(size, batch=2) == (False, False)
    apply_decoding_settings(found, spec, size)
    assert spec.vae_mode(size, batch=2) == (True, False)
    assert not spec.vae_mode((9, 64, 64), batch=2)[0]


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_clips_decoded_one_by_one_are_the_same(family: str, tiny_repo: Callable[..., Any]) -> None:
    section = ModelSection(model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)), vae_dtype="fp32")
    source = object.__new__(PromptSource)
    spec: Any = get_family(family).load(section)
    source.spec = spec
    vae = source.vae = spec.load_vae()
    source.plan = SimpleNamespace(size=(9, 64, 64))  # type: ignore[assignment]
    channels = spec.latent_channels(spec.transformer_on_meta())
    shape = spec.facts.geometry.latent_shape(9, 64, 64)
    latents = torch.randn(3, channels, *shape, generator=torch.Generator().manual_seed(0))
    seen: list[int] = []
    decode_latents = spec.decode_latents

    def counted(vae: nn.Module, z: torch.Tensor) -> torch.Tensor:
        seen.append(len(z))
        return decode_latents(vae, z)

    spec.decode_latents = counted
    whole = source.decode(latents, spec.vae_stats(vae))
    spec.vae_one_by_one.add((9, 64, 64))
    one_by_one = source.decode(latents, spec.vae_stats(vae))
    assert seen == [3, 1, 1, 1]
    torch.testing.assert_close(one_by_one, whole, rtol=0, atol=2e-5)  # kernels round by the size of a batch


def test_text_encoders_are_gone_while_clips_are_sampled(
    rewarded: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are encoded beforehand, including those of samples and evaluation: the encoders are freed by then."""
    encoders: list[weakref.ref[nn.Module]] = []
    sampled: list[int] = []
    load, collect = common.load_frozen, RolloutCollector.collect

    def loaded(*args: Any) -> Any:
        found = load(*args)
        encoders.extend(weakref.ref(part) for name, part in found.modules.items() if name.startswith("text_encoder"))
        return found

    def counted(self: RolloutCollector, transformer: nn.Module, rollout: int) -> Any:
        sampled.append(sum(one() is not None for one in encoders))
        return collect(self, transformer, rollout)

    monkeypatch.setattr(common, "load_frozen", loaded)
    monkeypatch.setattr(RolloutCollector, "collect", counted)
    values = rewarded(validation_prompts="a boat", validation_steps=1, validation_inference_steps=2, train_steps=2)
    train(load_config(**values))
    assert encoders
    assert sampled == [0, 0]
