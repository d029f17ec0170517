"""From clips to batches: on the fly and through the cache, in this process and in workers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from one_of import OneOf
from refusals import refused
from torch import Tensor

from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import DataloaderSection, DataSection, ModelSection
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.cache.keys import CacheKeys, EncoderEntry
from finetrainers.data.cache.store import CacheError, TensorCache
from finetrainers.data.inspect.file_facts import FileFacts
from finetrainers.data.loading.batch_sampler import BatchSampler, MicroBatch
from finetrainers.data.loading.encode import Encoder, draw_caption_dropout
from finetrainers.data.loading.loader import DecodeFetch, RawBatch, StepSampler, iterate_steps
from finetrainers.data.loading.position import Segment
from finetrainers.data.loading.precompute import CacheFetch, precompute_text, precompute_video
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.models.batch import noised
from finetrainers.models.spec import Batch, ModelComponents, ModelSpec, PromptEmbeds, to_unit_range
from finetrainers.utils.seeding import derive_seed

#: Decodes in this process.
HERE = DataloaderSection(dataloader_num_workers=0)


class FakeModel:
    """Encoders whose outputs tell their inputs apart, and which count their calls."""

    def __init__(self, *, first_frame: bool = False, noise: tuple[float, float] | None = None) -> None:
        self.prompts: list[str] = []
        self.videos = 0
        self.config = ModelSection(model_name="fake", pretrained_model_name_or_path=".", enable_tiling=False)
        geometry = Geometry(temporal=1, spatial=8, patch=1, patch_t=1, fps=8.0)
        self.facts = Facts(geometry, first_frame="channels" if first_frame else "none", first_frame_noise=noise)

    given_pixels = ModelSpec.given_pixels
    encodes_first_frame = ModelSpec.encodes_first_frame

    def encode_text(self, prompts: Sequence[str]) -> PromptEmbeds:
        self.prompts += prompts
        rows = [torch.tensor([len(p) + 1.0, sum(map(ord, p)) / 100]).repeat(3, 1) for p in prompts]
        mask = torch.tensor([[True, True, False]] * len(prompts))
        return PromptEmbeds({"embeds": torch.stack(rows), "mask": mask})

    def encode_clip(self, video: Tensor, generators: Sequence[torch.Generator]) -> dict[str, Tensor]:
        return ModelSpec.encode_clip(self, ModelComponents({"vae": None}), video, generators)  # type: ignore[arg-type]

    def encode_video(self, vae: None, video: Tensor) -> Tensor:
        self.videos += len(video)
        mean = torch.nn.functional.avg_pool3d(to_unit_range(video), (1, 8, 8))
        return torch.cat([mean, mean - 10], dim=1)


@pytest.fixture
def clips(tmp_path: Path, make_video, make_image) -> list[Clip]:
    """Five clips of one bucket, two of another."""
    made = []
    for k in range(5):
        path = make_video(tmp_path / f"{k}.mp4", frames=20 + k, seed=k)
        made.append(Clip(k, path, f"caption {k}", "video", (9, 32, 48), 8.0, 20 + k, 8.0, 48, 32))
    for k in (5, 6):
        path = make_image(tmp_path / f"{k}.png", value=30 * k)
        made.append(Clip(k, path, f"picture {k}", "image", (1, 32, 48), 8.0, 1, 0.0, 48, 32))
    return made


def keys_for(root: Path, data: DataSection, *, text: str = "t", vae: str = "v", first_frame: bool = False) -> CacheKeys:
    cache, digests = TensorCache(root / "tensors"), FileFacts(root / "digests")
    return CacheKeys(cache, digests, text, EncoderEntry(vae, first_frame), data, seed=7)


def same(a: Batch, b: Batch) -> bool:
    assert a.sample_keys == b.sample_keys
    assert a.weight == b.weight
    assert torch.equal(a.meta.fps, b.meta.fps)
    assert a.conditions.tensors.keys() == b.conditions.tensors.keys()
    assert a.clip.keys() == b.clip.keys()
    assert all(torch.equal(a.clip[name], b.clip[name]) for name in a.clip)
    equal_text = all(torch.equal(a.conditions[name], b.conditions[name]) for name in a.conditions.tensors)
    return torch.equal(a.moments, b.moments) and equal_text


def test_loader_starts_anywhere_and_workers_change_nothing(clips: list[Clip]) -> None:
    clips = [replace(clip, reshape_mode="random", frame_selection="random") for clip in clips]
    sampler = BatchSampler(clips, Segment(0, 2, 2), seed=7)

    def take(count: int, *, start: int = 0, num_workers: int = 0):
        steps = iterate_steps(StepSampler(sampler, start=start), DecodeFetch(7), num_workers=num_workers)
        return list(itertools.islice(steps, count))

    straight = take(4)
    assert [len(step) for step in straight] == [2] * 4
    for other in (take(2, start=2), take(2, start=2, num_workers=2)):
        for left, right in zip(straight[2:], other, strict=True):
            for a, b in zip(left, right, strict=True):
                assert a.sample_keys == b.sample_keys
                assert a.weight == b.weight
                assert all(map(torch.equal, a.pixels, b.pixels))


def test_clips_that_are_tiled_for_their_size_have_entries_of_their_own(clips: list[Clip], tmp_path: Path) -> None:
    """The others keep the names that they have without tiling."""
    plain = keys_for(tmp_path, DataSection())
    by_size = replace(plain, tiled=lambda bucket: bucket[0] > 1)
    assert [by_size.video(clip) == plain.video(clip) for clip in clips] == [False] * 5 + [True] * 2
    assert [by_size.about_video(clip)["model"] for clip in clips] == [", tiled"] * 5 + [""] * 2


def test_random_cuts_differ_by_epoch_and_clip(clips: list[Clip]) -> None:
    fetch = DecodeFetch(7)
    twins = tuple(replace(clips[4], index=index, frame_selection="random") for index in range(6))
    first, second = (torch.stack(fetch(MicroBatch(epoch, twins)).pixels) for epoch in (0, 1))
    assert len(first.float().mean(dim=(1, 2, 3, 4)).unique()) > 1
    assert not torch.equal(first, second)
    assert torch.equal(first[2], fetch(MicroBatch(0, twins[2:3])).pixels[0])


def test_ranks_share_the_steps_of_one_process(clips: list[Clip]) -> None:
    sampler = BatchSampler(clips, Segment(0, 1, 4), seed=7)
    fetch = DecodeFetch(7)
    alone = next(iterate_steps(StepSampler(sampler), fetch))
    ranks = [next(iterate_steps(StepSampler(sampler, data_rank=r, data_size=2), fetch)) for r in (0, 1)]
    together = [batch.sample_keys for turn in zip(*ranks, strict=True) for batch in turn]
    assert together == [batch.sample_keys for batch in alone]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_clip_that_does_not_decode_stops_training_and_is_named(clips: list[Clip], num_workers: int) -> None:
    clips[3].path.write_bytes(b"overwritten after the check")
    steps = iterate_steps(
        StepSampler(BatchSampler(clips, Segment(0, 7, 1), seed=7)), DecodeFetch(7), num_workers=num_workers
    )
    with pytest.raises(InvalidSampleError, match=r"3\.mp4"):
        list(itertools.islice(steps, 2))


@pytest.mark.parametrize("technique", ["empty", "zero"])
@pytest.mark.parametrize("first_frame", [False, True])
def test_cached_batches_equal_fresh_ones(clips: list[Clip], tmp_path: Path, technique: str, first_frame: bool) -> None:
    model = FakeModel(first_frame=first_frame)
    data = DataSection(caption_dropout_p=0.5, caption_dropout_technique=technique)
    sampler = BatchSampler(clips, Segment(0, 2, 1), seed=7)
    fresh = Encoder(model.encode_text, model.encode_clip, data=data, seed=7)
    keys = keys_for(tmp_path / "cache", data, first_frame=first_frame)
    precompute_text((c.caption for c in clips), model.encode_text, keys, OneOf())
    precompute_video(clips, model.encode_clip, keys, OneOf(), loading=HERE)
    model.prompts.clear()
    cached = Encoder(None, None, data=data, seed=7)
    dropped = 0
    for position in range(8):
        at = sampler.batch_at(position)
        batch = MicroBatch(at.epoch, at.clips, 0.5)
        a, b = fresh(DecodeFetch(7)(batch)), cached(CacheFetch(keys)(batch))
        assert same(a, b)
        assert same(fresh(DecodeFetch(7)(batch), dropout=False), cached(CacheFetch(keys)(batch), dropout=False))
        plain = model.encode_text([clip.caption for clip in batch.clips])
        gone = draw_caption_dropout(batch.sample_keys, probability=0.5, seed=7)
        dropped += sum(gone)
        for row, is_gone in enumerate(gone):
            changed = not torch.equal(a.conditions["embeds"][row], plain["embeds"][row])
            assert changed == is_gone
            if is_gone:
                expected = model.encode_text([""])["embeds"][0] if technique == "empty" else torch.zeros(3, 2)
                assert torch.equal(a.conditions["embeds"][row], expected)
            assert torch.equal(a.conditions["mask"][row], plain["mask"][row])
    assert 0 < dropped < 12


def test_the_cache_is_read_ahead_bit_for_bit(clips: list[Clip], tmp_path: Path) -> None:
    keys, model = keys_for(tmp_path / "cache", DataSection()), FakeModel()
    precompute_text((c.caption for c in clips), model.encode_text, keys, OneOf())
    precompute_video(clips, model.encode_clip, keys, OneOf(), loading=HERE)
    sampler, fetch = BatchSampler(clips, Segment(0, 2, 2), seed=7), CacheFetch(keys)

    def take(**how: int) -> list[RawBatch]:
        steps = iterate_steps(StepSampler(sampler, start=1), fetch, **how)
        return list(itertools.chain(*itertools.islice(steps, 6)))

    straight = take()
    for threads in (1, 3):
        for a, b in zip(straight, take(threads=threads), strict=True):
            assert (a.clips, a.sample_keys, a.weight) == (b.clips, b.sample_keys, b.weight)
            assert a.cached
            assert a.cached.keys() == b.cached.keys()
            assert all(torch.equal(a.cached[name], b.cached[name]) for name in a.cached)


def test_first_frame_moments_are_of_the_first_frame_alone(clips: list[Clip]) -> None:
    model = FakeModel(first_frame=True)
    raw = DecodeFetch(7)(MicroBatch(0, (clips[0],)))
    batch = Encoder(model.encode_text, model.encode_clip, data=DataSection(), seed=7)(raw)
    assert torch.equal(
        batch.clip["first_frame_moments"], model.encode_video(None, raw.pixels[0][None, :, :1] / 127.5 - 1)
    )
    assert len(batch) == 1
    assert batch.meta.fps.tolist() == [8.0]


def test_the_noise_of_a_first_frame_belongs_to_the_sample(clips: list[Clip], tmp_path: Path) -> None:
    """Log-normal in its size, new for each clip and epoch; from the cache one draw per clip; the clip stays clean."""
    noise = (-3.0, 0.5)
    model = FakeModel(first_frame=True, noise=noise)
    model.encode_video = lambda vae, video: to_unit_range(video)  # type: ignore[method-assign]
    encode = Encoder(model.encode_text, model.encode_clip, data=DataSection(), seed=7)
    raw = [DecodeFetch(7)(MicroBatch(epoch, tuple(clips[:2]))) for epoch in (0, 1)]
    first, again, second = encode(raw[0]), encode(raw[0]), encode(raw[1])
    clean = torch.stack(raw[0].pixels) / 127.5 - 1
    torch.testing.assert_close(first.moments, clean)
    assert torch.equal(first.clip["first_frame_moments"], again.clip["first_frame_moments"])
    for row, (batch, key) in enumerate(zip((first, first), raw[0].sample_keys, strict=True)):
        drawn = torch.Generator().manual_seed(derive_seed(7, "first frame noise", *key))
        std = math.exp(-3 + 0.5 * torch.randn((), generator=drawn).item())
        expected = clean[row, :, :1] + std * torch.randn(clean[row, :, :1].shape, generator=drawn)
        torch.testing.assert_close(batch.clip["first_frame_moments"][row], expected)
    assert not torch.equal(first.clip["first_frame_moments"], second.clip["first_frame_moments"])
    generators = [torch.Generator().manual_seed(k) for k in range(400)]
    stds = noised(torch.zeros(400, 3, 1, 8, 8), noise, generators).flatten(1).std(dim=1).log()
    assert stds.mean().item() == pytest.approx(-3.0, abs=0.08)
    assert stds.std().item() == pytest.approx(0.5, abs=0.06)

    plain, noisy = (
        replace(keys_for(tmp_path / "cache", DataSection()), vae=EncoderEntry("v", True, n)) for n in (None, noise)
    )
    names = {
        keys.video(clips[0])
        for keys in (plain, noisy, replace(noisy, seed=8), keys_for(tmp_path / "cache", DataSection()))
    }
    assert len(names) == 4
    assert replace(plain, seed=8).video(clips[0]) == plain.video(clips[0])
    quiet = FakeModel(first_frame=True)
    quiet.encode_video = model.encode_video  # type: ignore[method-assign]
    for keys, encoder in ((plain, quiet), (noisy, model)):
        precompute_video(clips[:2], encoder.encode_clip, keys, OneOf(), loading=HERE)
    one, other = (keys.cache.get(keys.video(clips[0])) for keys in (plain, noisy))
    assert torch.equal(one["moments"], other["moments"])
    assert 0.005 < (one["first_frame_moments"] - other["first_frame_moments"]).std() < 0.5


def test_dropout_is_a_coin_per_sample_and_epoch() -> None:
    keys = [(epoch, item) for epoch in range(20) for item in range(50)]
    drop = draw_caption_dropout(keys, probability=0.3, seed=1)
    assert np.mean(drop) == pytest.approx(0.3, abs=0.05)
    assert drop == draw_caption_dropout(keys, probability=0.3, seed=1)
    assert drop != draw_caption_dropout(keys, probability=0.3, seed=2)
    assert drop[:50] != drop[50:100]
    assert not any(draw_caption_dropout(keys, probability=0.0, seed=1))
    assert all(draw_caption_dropout(keys, probability=1.0, seed=1))


def test_precomputing_again_does_nothing_and_an_edit_redoes_only_its_part(
    clips: list[Clip], tmp_path: Path, make_video
) -> None:
    data = DataSection()

    def precompute(items: list[Clip], **identities: str) -> tuple[int, int]:
        keys = keys_for(tmp_path / "cache", data, **identities)
        model = FakeModel()
        counted = (
            precompute_text((c.caption for c in items), model.encode_text, keys, OneOf()).encoded,
            precompute_video(items, model.encode_clip, keys, OneOf(), loading=HERE).encoded,
        )
        assert counted == (len(model.prompts), model.videos)
        return counted

    assert precompute(clips) == (8, 7)  # the empty prompt is always there
    assert precompute(clips) == (0, 0)
    edited = [replace(clips[0], caption="another"), *clips[1:]]
    assert precompute(edited) == (1, 0)
    make_video(clips[1].path, frames=22, seed=99)
    assert precompute(edited) == (0, 1)
    assert precompute([replace(c, bucket=(1, 32, 48)) for c in edited]) == (0, 5)
    assert precompute(edited, vae="another") == (0, 7)
    assert precompute(edited, text="another") == (8, 0)
    moved = clips[2].path.with_name("moved.mp4")
    clips[2].path.rename(moved)
    assert precompute([replace(edited[2], path=moved, index=40)]) == (0, 0)


def test_ranks_share_the_encoding_and_find_each_others(clips: list[Clip], tmp_path: Path) -> None:
    keys = keys_for(tmp_path / "cache", DataSection())
    model = FakeModel()
    shares = [
        (
            precompute_text((c.caption for c in clips), model.encode_text, keys, OneOf(rank, 2)).encoded,
            precompute_video(
                clips, model.encode_clip, keys, OneOf(rank, 2), loading=DataloaderSection(dataloader_num_workers=rank)
            ).encoded,
        )
        for rank in (0, 1)
    ]
    assert shares == [(4, 4), (4, 3)]
    CacheFetch(keys)(MicroBatch(0, tuple(clips[:5])))


def test_a_damaged_entry_is_named_then_computed_again(clips: list[Clip], tmp_path: Path) -> None:
    keys, model = keys_for(tmp_path / "cache", DataSection()), FakeModel()
    precompute_text((c.caption for c in clips), model.encode_text, keys, OneOf())
    precompute_video(clips, model.encode_clip, keys, OneOf(), loading=HERE)
    path = keys.cache.path(keys.video(clips[0]))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CacheError, match=rf" {re.escape(str(clips[0].path))} .*--repair") as caught:
        CacheFetch(keys)(MicroBatch(0, (clips[0],)))
    assert "NaN" not in str(caught.value)
    assert precompute_video(clips, model.encode_clip, keys, OneOf(), loading=HERE).encoded == 1
    CacheFetch(keys)(MicroBatch(0, (clips[0],)))


def test_random_cuts_are_drawn_once_when_precomputed(clips: list[Clip], tmp_path: Path) -> None:
    keys = keys_for(tmp_path / "cache", DataSection())
    drawn = replace(clips[0], frame_selection="random")
    assert keys.video(drawn) != replace(keys, seed=8).video(drawn)
    assert torch.equal(keys.pixels(drawn), keys.pixels(replace(drawn, index=50)))
    assert keys.video(clips[0]) == replace(keys, seed=8).video(clips[0])


def test_non_finite_moments_are_refused(clips: list[Clip], tmp_path: Path) -> None:
    keys = keys_for(tmp_path / "cache", DataSection())
    with refused("invalid", clips[0].path, " moments ", " NaN ", "--vae_dtype"):
        precompute_video(
            clips, lambda video, _: {"moments": torch.full((1, 2, 1, 1, 1), torch.nan)}, keys, OneOf(), loading=HERE
        )
