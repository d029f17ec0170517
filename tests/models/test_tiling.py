"""A VAE that runs out of memory is retried clip by clip, then in tiles, if allowed, and remembers the size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetrainers.config.sections import ModelSection
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelSpec, tiled_for_memory

SIZE = (9, 64, 64)
FAULT = "FINETRAINERS_FAULT"


def load(repo: Path, family: str, **options: Any) -> ModelSpec:
    section = ModelSection(model_name=family, pretrained_model_name_or_path=str(repo), vae_dtype="fp32", **options)
    return get_family(family).load(section)


@pytest.mark.parametrize("family", ["ltx_video", "hunyuan_video", "cogvideox"])
def test_encode_and_decode_are_retried_in_tiles(
    family: str, tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The result is that of tiling; later and larger clips are tiled at once, smaller ones are not."""
    from finetrainers.utils.faults import arm_faults

    spec, asked = load(tiny_repo(family), family), load(tiny_repo(family), family, enable_tiling=True)
    vae, tiled = spec.load_vae(), asked.load_vae()
    if family != "cogvideox":  # whose smallest tiles overlap by parts of a latent
        for one in (vae, tiled):  # so that tiny clips have several tiles
            for name in ("tile_sample_min_height", "tile_sample_min_width", "tile_sample_stride_height"):
                setattr(one, name, 32)
            one.tile_sample_stride_width = 32
    clip = torch.rand(1, 3, *SIZE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    monkeypatch.setenv(FAULT, "oom@vae")
    arm_faults()
    moments = spec.encode_video(vae, clip)
    assert moments.equal(asked.encode_video(tiled, clip))
    assert spec.vae_too_large == {SIZE}
    assert tiled_for_memory(spec, (9, 64, 96))
    assert not tiled_for_memory(spec, (1, 64, 64))
    assert caplog.text.count("a clip of 9x64x64 ") == 1
    assert not {"encode", "decode"} & set(vars(vae))  # the instance is as before
    spec.encode_video(vae, clip[:, :, :1])
    assert not vae.use_tiling
    spec.encode_video(vae, clip)
    assert vae.use_tiling
    spec.vae_too_large.clear()
    monkeypatch.setenv(FAULT, "oom@vae")
    arm_faults()
    stats = spec.vae_stats(vae)
    latents = spec.latents(moments, None, stats)
    assert spec.decode(vae, latents, stats).equal(asked.decode(tiled, latents, stats))
    assert spec.vae_too_large == {SIZE}
    monkeypatch.delenv(FAULT)
    arm_faults()


def test_a_batch_is_retried_clip_by_clip_before_its_clips_are_tiled(
    tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clip by clip, moments are those of each clip alone; entries of a cache do not depend on the GPU then."""
    spec = load(tiny_repo("ltx_video"), "ltx_video")
    vae = spec.load_vae()
    clips = torch.rand(2, 3, *SIZE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    alone = torch.cat([spec.encode_video(vae, clip[None]) for clip in clips])
    encode, limit = vae._encode, 1

    def limited(x: torch.Tensor) -> torch.Tensor:
        if len(x) > limit and not vae.use_tiling:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return encode(x)

    monkeypatch.setattr(vae, "_encode", limited)
    assert spec.encode_video(vae, clips).equal(alone)
    assert (spec.vae_one_by_one, spec.vae_too_large, vae.use_tiling) == ({SIZE}, set(), False)
    assert " 2 clips of 9x64x64 " in caplog.text
    caplog.clear()
    assert spec.encode_video(vae, clips).equal(alone)
    assert not caplog.text  # it is remembered
    assert [spec.vae_mode(size, batch=2) for size in (SIZE, (9, 64, 96), (9, 32, 32))] == [
        (True, False), (True, False), (False, False)
    ]  # fmt: skip

    limit = 0
    spec.vae_one_by_one.clear()
    spec.encode_video(vae, clips)
    assert (spec.vae_one_by_one, spec.vae_too_large, vae.use_tiling) == ({SIZE}, {SIZE}, True)
    told = load(tiny_repo("ltx_video"), "ltx_video", enable_slicing=False, enable_tiling=False)
    told_vae = told.load_vae()
    monkeypatch.setattr(told_vae, "_encode", limited)
    vae.disable_tiling()
    with pytest.raises(RuntimeError, match="Tried to allocate"):
        told.encode_video(told_vae, clips)


def test_an_oom_in_the_middle_of_a_batch_tiles_all_of_it(
    tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clips that were encoded before the OOM, and their other media, are encoded again, with the same noise."""
    from finetrainers.utils.faults import arm_faults

    repo = tiny_repo("ltx_video")
    spec = load(repo, "ltx_video", enable_slicing=True)
    asked = load(repo, "ltx_video", enable_slicing=True, enable_tiling=True)
    encoders = [one.load_clip_encoders() for one in (spec, asked)]
    for one in encoders:
        for name in (f"tile_sample_{kind}_{side}" for kind in ("min", "stride") for side in ("height", "width")):
            setattr(one["vae"], name, 32)
    for one in (spec, asked):
        one.facts = replace(one.facts, first_frame="channels", first_frame_noise=(-3.0, 0.5))
    random = torch.Generator().manual_seed(0)
    clips, control = torch.randint(256, (2, 2, 3, *SIZE), dtype=torch.uint8, generator=random)

    def encode(of: ModelSpec, parts: Any) -> dict[str, torch.Tensor]:
        noise = [torch.Generator().manual_seed(seed) for seed in range(2)]
        return of.encode_clip(parts, clips, noise, {"control_video": control})

    plain, tiled = encode(spec, encoders[0]), encode(asked, encoders[1])
    assert not any(plain[name].equal(tiled[name]) for name in ("moments", "control_video_moments"))
    for call in (2, 5):  # the second clip; the other medium of the first, after both clips and both first frames
        spec.vae_too_large.clear()
        monkeypatch.setenv(FAULT, f"oom@vae:{call}")
        arm_faults()
        found = encode(spec, encoders[0])
        assert all(found[name].equal(tiled[name]) for name in tiled if name != "first_frame_moments"), call
        assert found["first_frame_moments"].equal(plain["first_frame_moments"])
        assert tiled_for_memory(spec, SIZE)
    monkeypatch.delenv(FAULT)
    arm_faults()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"enable_tiling": False}, "oom@vae"),
        ({"enable_tiling": True}, "oom@vae"),
        ({}, "raise@vae"),
        ({}, "oom@vae:1+"),
    ],
)
def test_what_is_not_retried(
    options: dict[str, Any], fault: str, tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiling set by the user, and other errors; tiles that do not fit either are an error at the next clip."""
    from finetrainers.utils.faults import arm_faults

    spec = load(tiny_repo("ltx_video"), "ltx_video", **options)
    vae, clip = spec.load_vae(), torch.zeros(1, 3, *SIZE)
    monkeypatch.setenv(FAULT, fault)
    arm_faults()
    if fault.endswith("+"):
        spec.encode_video(vae, clip)
    with pytest.raises(RuntimeError, match=r"\bvae\b"):
        spec.encode_video(vae, clip)
    monkeypatch.delenv(FAULT)
    arm_faults()
