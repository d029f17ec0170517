"""Sliding windows: which there are, what each is an example of, and what its latents are."""

from __future__ import annotations

import itertools
import pickle
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import av
import pytest
import torch
from every_family import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from one_of import OneOf
from refusals import refused, refused_options

from finetrainers.config.errors import ConfigError
from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataloaderSection, DataSection, ModelSection, RunSection, TrainingSection
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.buckets.windows import (
    cut_latents,
    cut_windows,
    encoded_clip,
    example_index,
    item_index,
    window_starts,
)
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.data.loading.bad_samples import ReplacementClips
from finetrainers.data.loading.position import DataPosition
from finetrainers.data.loading.text_conditioning import TextCache
from finetrainers.data.loading.training_data import TrainingData
from finetrainers.data.reading.items import DataError
from finetrainers.data.video.decode import load_clip
from finetrainers.models.registry import get_family
from finetrainers.utils.failures import Kind

#: 8k+1 frames, like LTX-Video.
GEOMETRY = Geometry(temporal=8, spatial=16, patch=1, patch_t=1, fps=8)


def plan(root: Path, **options: object) -> DatasetPlan:
    model = ModelSection(model_name="ltx_video", pretrained_model_name_or_path="x")
    return survey_dataset(TrainConfig(model=model, data=DataSection(data_root=root, **options)), GEOMETRY).checked()


def a_clip(frames: int, window: int, *, index: int = 0) -> Clip:
    return Clip(index, Path(f"{index}.mp4"), "", "video", (window, 32, 48), 8.0, frames, 8.0, 48, 32)


def starts(made: DatasetPlan, name: str) -> list[int | None]:
    return [clip.start for clip in made.clips if clip.path.name == name]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, make_video, make_image) -> Path:
    """40 frames at 8 per second, 36 at 16, which are 18 at 8, and 9 at 8; and a picture."""
    folder = tmp_path_factory.mktemp("windows")
    for name, frames, fps in (("long", 40, 8), ("fast", 36, 16), ("short", 9, 8)):
        make_video(folder / f"{name}.mp4", frames=frames, fps=fps)
    make_image(folder / "still.png")
    for name in ("long", "fast", "short", "still"):
        (folder / f"{name}.txt").write_text(f"a {name} clip")
    return folder


SIZES = {"video_resolution_buckets": ["1000x32x48"], "image_resolution_buckets": ["16x32"]}


@given(frames=st.integers(1, 60), window=st.integers(1, 60), stride=st.integers(1, 9))
def test_windows_are_all_that_fit(frames: int, window: int, stride: int) -> None:
    fit = [start for start in range(0, 200, stride) if start + window <= frames]
    assert list(window_starts(frames, window, stride=stride)) == fit
    if stride == 1:
        assert len(fit) == max(frames - window + 1, 0)


def test_each_window_is_an_example_and_each_item_has_one_report(root: Path) -> None:
    made = plan(root, **SIZES, sliding_window_size=17, max_bad_samples=1)
    assert starts(made, "long.mp4") == list(range(40 - 17 + 1))
    assert starts(made, "fast.mp4") == [0, 1]  # 18 frames, counted after resampling
    assert starts(made, "still.png") == [None]
    assert {clip.bucket for clip in made.clips} == {(17, 32, 48), (1, 16, 32)}
    assert {(v.name, v.use, v.examples) for v in made.items} == {
        ("long.mp4", "train", 24), ("fast.mp4", "train", 2), ("still.png", "train", 1), ("short.mp4", "rejected", 0),
    }  # fmt: skip
    [reason] = [v.reason for v in made.items if v.reason]
    assert "`sliding_window_size`" in reason
    assert re.findall(r"\d+", reason) == ["9", "8", "17", "9"]
    [note] = made.notes
    assert re.findall(r"\d+", note) == ["26", "17", "1", "2"]  # windows, their frames and distance, and clips
    # Random numbers are derived from it.
    assert len({clip.index for clip in made.clips}) == len(made.clips) == 27
    assert Counter(item_index(clip.index) for clip in made.clips) == {
        v.index: v.examples for v in made.items if v.examples
    }
    assert [clip.index for clip in made.clips if not clip.start] == [v.index for v in made.items if v.examples]
    # Warnings count items, not windows.
    (root / "copy.mp4").write_bytes((root / "long.mp4").read_bytes())
    (root / "copy.txt").write_text("")
    try:
        [blank, left_out] = plan(root, **SIZES, sliding_window_size=17, max_bad_samples=1).warnings
    finally:
        (root / "copy.mp4").unlink()
        (root / "copy.txt").unlink()
    assert (left_out[:2], blank[:2]) == ("1 ", "1 ")
    assert "copy.mp4" in blank


def test_a_longer_bucket_bounds_the_clip(root: Path) -> None:
    def found(bucket: str, **options: object) -> list[int | None]:
        made = plan(root, video_resolution_buckets=bucket.split(), sliding_window_size=9, max_bad_samples=1, **options)
        assert {clip.bucket[0] for clip in made.clips} == {9}
        return starts(made, "long.mp4")

    assert found("30x32x48") == list(range(22))  # 30 is no length of the model's, and need not be
    assert found("30x32x48", sliding_window_stride=4) == [0, 4, 8, 12, 16, 20]
    assert found("30x32x48", frame_selection="middle") == list(range(5, 27))
    assert found("9x32x48") == [0]
    assert found("9x32x48 30x32x48") == list(range(22))  # the longest of a size counts
    assert found("1000x32x48 9x64x16") == list(range(32))  # of another size it does not
    made = plan(root, sliding_window_size=9, max_bad_samples=1)  # the size chosen from the clips, all of their frames
    assert starts(made, "long.mp4") == list(range(32))
    assert " 9x32x48 " in made.notes[0]
    # A clip of 120 frames and a window of 33.
    data = DataSection(video_resolution_buckets=["120x32x48"], sliding_window_size=33)
    assert len(cut_windows(a_clip(500, 33), 500, data=data, geometry=GEOMETRY)) == 120 - 33 + 1 == 88


def test_latents_are_cut_where_latent_frames_begin(root: Path) -> None:
    made = plan(
        root, **SIZES, sliding_window_size=17, sliding_window_stride=3, sliding_window_latents="slice",
        max_bad_samples=1,
    )  # fmt: skip
    assert starts(made, "long.mp4") == [0, 8, 16]  # of 33 frames, the most that 8k+1 allows
    assert {clip.latent_segment for clip in made.clips if clip.path.name == "long.mp4"} == {(0, 33)}
    assert re.match(r"--sliding_window_stride 3 \w+ 8: ", made.notes[1])
    whole = encoded_clip(made.clips[2])
    assert (whole.bucket, whole.start, whole.latent_segment) == ((33, 32, 48), 0, None)
    latents = torch.arange(5.0).view(1, 1, 5, 1, 1)  # those of 33 frames
    cut = [cut_latents(latents, clip).flatten().tolist() for clip in made.clips if clip.path.name == "long.mp4"]
    assert cut == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    with refused("mismatch", "long.mp4: ", " 4 latent ", " 33 ", "--sliding_window_latents"):
        cut_latents(latents[:, :, :4], made.clips[1])


def test_whole_items_are_held_out_and_windows_of_them_do_not_overlap(root: Path) -> None:
    options = {**SIZES, "sliding_window_size": 9, "max_bad_samples": 1}
    without = {clip.path.name for clip in plan(root, **options, eval_num_items=2).eval_clips}
    assert len(without) == 2
    for count in (1, 2, 3):
        made = plan(root, **options, eval_num_items=count)
        held_out = {clip.path for clip in made.eval_clips}
        assert len(held_out) == count
        assert held_out.isdisjoint(clip.path for clip in made.clips)
    seen = {c.path.name: [d.start for d in made.eval_clips if d.path == c.path] for c in made.eval_clips}
    expected = {"long.mp4": [0, 9, 18, 27], "fast.mp4": [0, 9], "short.mp4": [0], "still.png": [None]}
    assert seen == {name: expected[name] for name in seen}
    assert {v.name: v.examples for v in made.items if v.use == "eval"} == {n: len(s) for n, s in seen.items()}
    with refused("too_large", "`eval_num_items` 4 ", " 4 usable", error=DataError):
        plan(root, **options, eval_num_items=4)


def test_the_fingerprint_and_the_options_that_a_checkpoint_keeps(root: Path) -> None:
    plans = [
        plan(root, **SIZES, max_bad_samples=2, sliding_window_size=17, **more)
        for more in ({}, {"sliding_window_stride": 2})
    ]
    assert plans[0].fingerprint != plans[1].fingerprint
    names = {"sliding_window_size", "sliding_window_stride", "sliding_window_latents"}
    assert names <= set(plans[0].critical_options)


@pytest.mark.parametrize(
    ("options", "kind", "places"),
    [
        (
            {"sliding_window_size": 33, "video_resolution_buckets": ["17x32x48"]}, "conflict",
            ["video_resolution_buckets: 17x32x48: ", " 33 ", " 17; ", "--sliding_window_size"],
        ),
        ({"sliding_window_size": 18}, "invalid", ["sliding_window_size: 18 ", "8*k+1", " 17 ", " 25"]),
        (
            {"sliding_window_size": 9, "frame_selection": "uniform"}, "conflict",
            ["frame_selection: uniform ", "--sliding_window_size"],
        ),
    ],
)  # fmt: skip
def test_windows_that_cannot_be_cut(root: Path, options: dict, kind: Kind, places: list[str]) -> None:
    with refused(kind, *places, error=DataError):
        plan(root, **options)


def test_a_window_of_a_broken_file_is_replaced_by_one_of_another() -> None:
    data = DataSection(sliding_window_size=9)
    clips = [one for k in range(3) for one in cut_windows(a_clip(12, 9, index=k), 12, data=data, geometry=GEOMETRY)]
    assert len(clips) == 12
    others = list(ReplacementClips(clips).after(clips[5]))  # the second window of item 1
    assert {item_index(clip.index) for clip in others} == {0, 2}
    assert others[0].index == example_index(2, 1)


def test_a_million_windows_fit_into_memory() -> None:
    """What a window has of its own is the object, its number and its first frame; the rest is shared."""
    data = DataSection(sliding_window_size=9)
    first, last = cut_windows(a_clip(1000, 9), 1000, data=data, geometry=GEOMETRY)[:: 1000 - 9]
    assert not hasattr(last, "__dict__")
    assert last.path is first.path
    assert last.bucket is first.bucket
    assert pickle.loads(pickle.dumps(last)) == last


def test_the_pixels_are_those_frames(make_video: Callable[..., Path], tmp_path: Path) -> None:
    """A window far into a clip of another rate, against all frames decoded one after the other."""
    path = make_video(tmp_path / "clip.mp4", frames=120, fps=16, options={"g": "12"})
    with av.open(str(path)) as container:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    clip = Clip(0, path, "", "video", (9, 32, 48), 8.0, 120, 16.0, 48, 32, start=40)
    pixels = load_clip(clip, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pixels, torch.stack(frames[80:98:2]).permute(3, 0, 1, 2))
    late = Clip(0, path, "", "video", (9, 32, 48), 8.0, 120, 16.0, 48, 32, start=52)
    with refused("invalid", "9 ", " 52, ", " 60 of 120 "):
        load_clip(late, generator=torch.Generator())


# ---- latents ---------------------------------------------------------------------------------------------------------


def source(family: str, repo: Path, root: Path, output: Path, *, precompute: bool, **data: object) -> TrainingData:
    config = TrainConfig(
        model=ModelSection(
            model_name=family, pretrained_model_name_or_path=str(repo), vae_dtype="fp32", text_encoder_dtype="fp32",
            text_encoder_2_dtype="fp32",
        ),
        data=DataSection(
            data_root=root, video_resolution_buckets=["1000x64x64"], precompute_conditions=precompute, target_fps=8,
            **data,
        ),
        dataloader=DataloaderSection(batch_size=2),
        training=TrainingSection(seed=3),
        run=RunSection(output_dir=output),
    )  # fmt: skip
    found = get_family(family)
    spec = found.load(config.model)
    plan, encoders = survey_dataset(config, found.facts_of(config.model).geometry).checked(), spec.load_text_encoders()
    captions = TextCache(plan.all_captions(), plan.texts, config, spec=spec, parallel=OneOf())  # type: ignore[arg-type]
    texts = captions.encode(encoders) if precompute else captions.encode_on_demand(encoders)
    encoders = spec.load_clip_encoders()
    begin = DataPosition.begin(config, data_size=1)
    return TrainingData(
        plan,
        config,
        spec=spec,
        parallel=OneOf(),
        texts=texts,
        clip_encoders=encoders,
        data_position=begin,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory, make_video) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for k, frames in enumerate((18, 27)):
        make_video(folder / f"{k}.mp4", frames=frames, height=64, width=64, seed=k)
        (folder / f"{k}.txt").write_text(f"clip {k}")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_latents_from_within_a_clip_are_not_those_of_the_window(
    family: str, tiny_repo: Callable[..., Path], clips: Path
) -> None:
    """What a causal VAE says of a segment within a clip, and of the same frames alone."""
    model = ModelSection(model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)), vae_dtype="fp32")
    spec = get_family(family).load(model)
    vae, ratio = spec.load_vae(), get_family(family).facts.geometry.temporal
    length, start = ratio + 1, 2 * ratio
    whole = Clip(0, clips / "1.mp4", "", "video", (3 * ratio + 1, 64, 64), 8.0, 27, 8.0, 64, 64, start=0)
    window = replace(whole, bucket=(length, 64, 64), start=start, latent_segment=(0, 3 * ratio + 1))
    pixels = load_clip(whole, generator=torch.Generator())
    torch.testing.assert_close(load_clip(window, generator=torch.Generator()), pixels[:, start : start + length])

    def encode(video: torch.Tensor) -> torch.Tensor:
        return spec.encode_video(vae, video[None])

    cut, alone = cut_latents(encode(pixels), window), encode(pixels[:, start : start + length])
    assert cut.shape == alone.shape
    # Far beyond rounding, and mostly in the first latent, which stands for one frame in one and for c in the other.
    assert torch.equal(alone, encode(pixels[:, start : start + length]))
    assert (cut - alone)[:, :, 0].abs().mean() > 0.01 * alone[:, :, 0].abs().mean()
    assert (cut - alone)[:, :, 1:].abs().max() > 1e-4
    # The c - 1 frames before the window are part of its first latent in one, and none of the other's business.
    pixels[:, start - ratio + 1 : start] = 127
    assert (cut_latents(encode(pixels), window) - cut)[:, :, 0].abs().mean() > 0.002 * cut[:, :, 0].abs().mean()
    assert torch.equal(encode(pixels[:, start : start + length]), alone)


@pytest.mark.rotating
def test_windows_are_encoded_by_themselves_or_cut(tiny_repo: Callable[..., Path], clips: Path, tmp_path: Path) -> None:
    """With and without a cache, which then holds each clip once."""
    repo = tiny_repo("cogvideox")
    for latents in ("encode", "slice"):
        seen: list[dict[int, torch.Tensor]] = []
        for precompute in (True, False):
            ours = source(
                "cogvideox", repo, clips, tmp_path / latents, precompute=precompute, sliding_window_size=9,
                sliding_window_stride=8, sliding_window_latents=latents,
            )  # fmt: skip
            seen.append({})
            for [batch] in itertools.islice(ours.steps(0), ours.steps_for_epochs(1)):
                seen[-1].update((index, batch.moments[row]) for row, (_, index) in enumerate(batch.sample_keys))
        kept = {clip.index: clip for clip in ours.plan.clips}
        assert sorted((clip.path.name, clip.start) for clip in kept.values()) == [
            ("0.mp4", 0), ("0.mp4", 8), ("1.mp4", 0), ("1.mp4", 8), ("1.mp4", 16),
        ]  # fmt: skip
        vae = ours.spec.load_vae()
        for index, clip in kept.items():
            pixels = load_clip(encoded_clip(clip), generator=torch.Generator())
            expected = cut_latents(ours.spec.encode_video(vae, pixels[None]), clip)[0]
            assert expected.shape[1] == 3
            for found in seen:
                torch.testing.assert_close(found[index], expected)
        # The captions, the empty prompt, and the windows or the clips.
        entries = list((tmp_path / latents / "precomputed" / "tensors").rglob("*.safetensors"))
        assert len(entries) == 3 + {"encode": 5, "slice": 2}[latents]


def test_latents_are_not_cut_for_models_that_need_the_first_frame(
    tiny_repo: Callable[..., Path], clips: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        source(
            "ltx_video", tiny_repo("ltx_video"), clips, tmp_path, precompute=True, sliding_window_size=9,
            sliding_window_latents="slice",
        )  # fmt: skip
    assert [problem.where for problem in caught.value.problems] == ["--first_frame_conditioning_p"]
    with refused_options(("--frame_conditioning", "invalid")) as caught:
        source(
            "ltx_video", tiny_repo("ltx_video"), clips, tmp_path, precompute=True, sliding_window_size=9,
            frame_conditioning="prefix:9=1",
        )  # fmt: skip
    assert "prefix:9 " in str(caught.value)


def test_a_broken_file_counts_once_whatever_its_windows(
    make_video: Callable[..., Path], tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """Overwritten after the check: its windows are replaced by those of another file, and one bad file is allowed."""
    folder = tmp_path / "clips"
    for k in range(2):
        make_video(folder / f"{k}.mp4", frames=14, height=64, width=64, seed=k)
        (folder / f"{k}.txt").write_text(f"clip {k}")
    ours = source(
        "cogvideox", tiny_repo("cogvideox"), folder, tmp_path / "run", precompute=False, sliding_window_size=9
    )  # fmt: skip
    (folder / "1.mp4").write_bytes(b"not a video any more")
    batches = [batch for [batch] in itertools.islice(ours.steps(0), ours.steps_for_epochs(1))]
    assert sum(len(batch) for batch in batches) == 12
    numbers, events = ours.drain_events()
    assert numbers["bad_samples"] == 1.0
    assert 0 < numbers["seconds/data"] < 60  # for the clips of the last step
    assert [Path(event["file"]).name for event in events] == ["1.mp4"]
