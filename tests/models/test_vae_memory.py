"""Clips that the VAE works on in tiles, or one at a time, by default: those that would take too much memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES, short_clip
from published_networks import NETWORKS
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from finetrainers.config.sections import ModelSection
from finetrainers.models.decoding import decode_gradient
from finetrainers.models.registry import get_family
from finetrainers.models.spec import VAE_BUDGET, ModelSpec, VAEStats, pixel_size, vae_working_bytes


def load_published(name: str, **options: Any) -> ModelSpec:
    """The spec of a published checkpoint, by its packaged configs."""
    network = NETWORKS[name]
    section = ModelSection(model_name=network.family, pretrained_model_name_or_path=network.hub_id, **options)
    return get_family(network.family).load(section.for_estimate())


def published_vae(spec: ModelSpec) -> Any:
    """Its VAE, without weights."""
    with torch.device("meta"):
        return spec.parts["vae"].from_config(spec.configs["vae"]).to(torch.bfloat16).eval().requires_grad_(False)


def load(family: str, repo: Path, **options: Any) -> ModelSpec:
    section = ModelSection(model_name=family, pretrained_model_name_or_path=str(repo), **options)
    return get_family(family).load(section)


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.most = max(self.most, sum(self.alive.values()))
        return out


def peak(work: Callable[[], Any]) -> int:
    gc.collect()
    with torch.no_grad(), Peak() as counted:
        work()
    return counted.most


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("LTX-Video", (9, 128, 128)), ("HunyuanVideo", (17, 128, 128)), ("HunyuanVideo", (17, 720, 1280)),
        ("HunyuanVideo-1.5", (9, 128, 128)), ("CogVideoX-2b", (17, 128, 128)), ("Wan2.1-1.3B", (17, 128, 128)),
        ("Wan2.2-5B", (17, 128, 128)), ("Mochi", (13, 128, 128)), ("Mochi", (37, 128, 128)),
    ],
)  # fmt: skip
def test_the_estimate_is_what_the_published_networks_take(name: str, size: tuple[int, int, int]) -> None:
    """Nothing is computed."""
    spec = load_published(name)
    vae = published_vae(spec)
    video = torch.empty(1, 3, *size, dtype=torch.bfloat16, device="meta")
    moments = vae.encode(video).latent_dist.parameters
    latents = torch.empty(1, moments.shape[1] // 2, *moments.shape[2:], dtype=torch.bfloat16, device="meta")
    most = max(peak(lambda: vae.encode(video)), peak(lambda: vae.decode(latents)))
    assert most == pytest.approx(spec.vae_bytes(size), rel=0.1)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "size", "large"),
    [
        ("LTX-Video", (9, 64, 64), (161, 1024, 1280)), ("HunyuanVideo", (17, 64, 64), (61, 544, 960)),
        ("HunyuanVideo-1.5", (9, 64, 64), (29, 480, 832)),
        ("CogVideoX-2b", (9, 64, 64), (49, 480, 720)), ("Wan2.1-1.3B", (9, 64, 64), (81, 480, 832)),
        ("Wan2.2-5B", (9, 64, 64), (49, 704, 1280)), ("Mochi", (13, 64, 64), (37, 480, 848)),
    ],
)  # fmt: skip
def test_the_estimate_of_a_decode_with_its_backward(
    name: str, size: tuple[int, int, int], large: tuple[int, int, int]
) -> None:
    spec = load_published(name, vae_dtype="bf16")
    vae = published_vae(spec)
    shape = spec.facts.geometry.latent_shape(*size)
    channels = spec.latent_channels(spec.transformer_on_meta())
    latents = torch.empty(1, channels, *shape, device="meta")
    stats = VAEStats(mean=torch.tensor(0.0), scale=torch.tensor(1.0))

    def differentiate(checkpointing: bool) -> int:
        def score(video: Tensor) -> tuple[Tensor, None]:
            return video.mean(), None

        return peak(lambda: decode_gradient(spec, vae, latents, stats, score, checkpointing=checkpointing))

    assert differentiate(True) == pytest.approx(vae_working_bytes(spec, size, gradient=True), rel=0.15)
    if name in ("LTX-Video", "Wan2.1-1.3B", "Wan2.2-5B"):  # the others take seconds
        assert differentiate(False) == pytest.approx(vae_working_bytes(spec, size, gradient=True, stored=True), rel=0.1)
    assert spec.tiles_by_size(large, gradient=True) > spec.tiles_by_size(large)


@pytest.mark.parametrize(
    ("name", "whole", "tiled"),
    [
        ("LTX-Video", (161, 704, 1216), (257, 1024, 1280)),
        ("HunyuanVideo", (129, 544, 960), (129, 720, 1280)),
        ("CogVideoX-2b", (81, 480, 832), (81, 768, 1360)),
        ("Wan2.1-1.3B", (81, 720, 1280), (81, 1440, 2560)),
        ("Wan2.2-5B", (121, 704, 1280), (121, 1440, 2560)),
        ("Mochi", (37, 480, 848), (61, 480, 848)),
    ],
)
def test_large_clips_are_tiled_and_small_ones_are_not(
    name: str, whole: tuple[int, int, int], tiled: tuple[int, int, int]
) -> None:
    spec = load_published(name)
    assert not spec.tiles_by_size(whole)
    assert spec.tiles_by_size(tiled)
    assert load_published(name, vae_dtype="fp32").vae_bytes(whole) == pytest.approx(2 * spec.vae_bytes(whole), rel=0.3)
    for asked in (True, False):
        assert not load_published(name, enable_tiling=asked).tiles_by_size(tiled)  # it is said, one way or the other


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_the_vae_is_set_before_every_use(
    family: str, tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that is not tiled gives the same after a size that is: bit for bit what a plain VAE gives."""
    dtypes = {"vae_dtype": "fp32"}
    spec = load(family, tiny_repo(family), **dtypes)
    if not spec.vae_pixel_bytes:  # not counted yet, so that only the user turns tiling on
        assert not spec.tiles_by_size((1001, 2160, 3840))
        return
    vae = spec.load_vae()
    stats = spec.vae_stats(vae)
    size = (short_clip(family), 64, 64)
    video = torch.randint(256, (2, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vae.encode(video / 127.5 - 1).latent_dist.parameters
    settings: list[tuple[bool, bool]] = []
    encode, decode = vae.encode, vae.decode
    monkeypatch.setattr(
        vae, "encode", lambda *a, **k: [settings.append((vae.use_slicing, vae.use_tiling)), encode(*a, **k)][1]
    )
    monkeypatch.setattr(
        vae, "decode", lambda *a, **k: [settings.append((vae.use_slicing, vae.use_tiling)), decode(*a, **k)][1]
    )
    latents = spec.latents(expected, None, stats)
    one = spec.vae_bytes(size)

    def run(budget: float, **options: Any) -> Tensor:
        monkeypatch.setattr("finetrainers.models.spec.VAE_BUDGET", budget)
        chosen = load(family, tiny_repo(family), **dtypes, **options)
        moments = chosen.encode_video(vae, video)
        assert chosen.decode(vae, latents, stats).shape == (2, 3, *size)
        return moments

    run(0.5 * one)
    run(1.5 * one)
    assert torch.equal(run(2.5 * one), expected)
    assert torch.equal(spec.encode_video(vae, video / 127.5 - 1), expected)
    settings.pop()
    run(0.5 * one, enable_slicing=False, enable_tiling=False)
    run(2.5 * one, enable_slicing=True, enable_tiling=True)
    # With slicing, a decode may be several calls, as of LTX-Video, whose VAE does not split timesteps.
    assert [setting for setting, _ in groupby(settings)] == [(True, True), (True, False), (False, False), (True, True)]
    assert settings.count((False, False)) == 4


def test_the_size_of_decoded_clips() -> None:
    assert pixel_size(torch.empty(1, 16, 33, 90, 160, device="meta"), temporal=4, spatial=8) == (129, 720, 1280)
    assert VAE_BUDGET == 24 * 2**30
