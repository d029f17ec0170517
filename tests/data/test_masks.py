"""Masks: found in every source, judged with their clips, cut and pooled like them, cached apart from them."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_of import OneOf
from PIL import Image
from refusals import refused

from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataloaderSection, DataSection, ModelSection
from finetrainers.data.buckets.clip import Clip, Mask
from finetrainers.data.buckets.windows import cut_latents, encoded_clip
from finetrainers.data.cache.keys import CacheKeys, EncoderEntry
from finetrainers.data.cache.store import TensorCache
from finetrainers.data.inspect import masks as judged
from finetrainers.data.inspect.file_facts import FileFacts
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.data.loading.batch_sampler import MicroBatch
from finetrainers.data.loading.encode import Encoder
from finetrainers.data.loading.loader import DecodeFetch
from finetrainers.data.loading.position import DataPosition
from finetrainers.data.loading.precompute import CacheFetch, precompute_masks, precompute_text, precompute_video
from finetrainers.data.loading.text_conditioning import TextCache
from finetrainers.data.loading.training_data import TrainingData
from finetrainers.data.reading.datasets import read_datasets
from finetrainers.data.reading.items import DataError, Reading, read_dataset
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.data.video.decode import load_clip
from finetrainers.data.video.masks import latent_weights, load_mask
from finetrainers.models.registry import get_family
from finetrainers.models.spec import PromptEmbeds

GEOMETRY = Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=8)
MakeFile = Callable[..., Path]


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
        if not Path(name).stem.lower().endswith(".mask") and not name.startswith("m/"):
            (root / name).with_suffix(".txt").write_text("caption")


def masks(reading: Reading) -> dict[str, str]:
    """Names of the masks by those of their items, with the status of those that cannot be used."""
    of = {item.index: item.name for item in reading.items}
    return {
        of[index]: mask.name + (f" {mask.unusable.status}" if mask.unusable else "")
        for index, mask in reading.masks.items()
    }


def survey(root: Path, **options: Any) -> DatasetPlan:
    values = {"data_root": root, "video_resolution_buckets": ["9x32x48"], **options}
    model = ModelSection(model_name="cogvideox", pretrained_model_name_or_path="x")
    return survey_dataset(TrainConfig(model=model, data=DataSection(**values)), GEOMETRY)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_beside_clips(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "a.mask.png", "in/b.mov", "in/b.Mask.MP4", "c.mp4", "d.mask.png", "e.jpg", "e.mask.webp")
    reading = read_dataset(DataSection(data_root=tmp_path), first=5)
    assert [item.name for item in reading.items] == ["a.mp4", "c.mp4", "e.jpg", "in/b.mov"]
    assert masks(reading) == {"a.mp4": "a.mask.png", "e.jpg": "e.mask.webp", "in/b.mov": "in/b.Mask.MP4"}
    assert reading.masks[5].kind == "image"
    [warning] = reading.warnings
    assert warning.startswith("1 ")
    assert warning.endswith(": d.mask.png")
    none = read_dataset(DataSection(data_root=tmp_path, mask_column=""))
    assert len(none.items) == 4
    assert not none.masks
    assert "a.mask.png" in none.warnings[0]
    assert "--mask_column" not in none.warnings[0]
    touch(tmp_path, "a.mask.mp4")
    with refused("duplicate", "a.mask.mp4 and a.mask.png ", error=DataError):
        read_dataset(DataSection(data_root=tmp_path))


@pytest.mark.parametrize("name", ["a.mask.tiff", "a.mask.TIF", "a.mask.png/", "a.mask.d/", "a.mask.npy"])
@pytest.mark.parametrize("column", [None, "m"])
def test_what_is_named_as_a_mask_and_cannot_be_read_is_an_error(name: str, column: str | None, tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4", "c.mask.tiff", "m/c.tiff")
    data = DataSection(data_root=tmp_path, mask_column=column)
    assert not read_dataset(data).masks  # of no clip
    path = tmp_path / (name if column is None else f"m/{name.replace('.mask', '')}")
    if name.endswith("/") and (column is None or name == "a.mask.png/"):
        path.mkdir()
    else:
        path.write_bytes(b"II*")
    with refused("unreadable", path.name, error=DataError):
        read_dataset(data)
    path.rename(path.with_name("z.mask"))
    assert len(read_dataset(data).items) == 2


def test_a_folder_of_masks(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "in/b.mp4", "c.mp4", "m/a.png", "m/in/b.mp4", "m/none.png")
    inside = read_dataset(DataSection(data_root=tmp_path, mask_column="m"))
    assert [item.name for item in inside.items] == ["a.mp4", "c.mp4", "in/b.mp4"]
    assert masks(inside) == {"a.mp4": "a.png", "in/b.mp4": "in/b.mp4"}
    assert inside.masks[0].path == tmp_path / "m" / "a.png"
    assert "none.png" in inside.warnings[0]
    clips = tmp_path / "clips"
    touch(clips, "a.mp4")
    outside = read_dataset(DataSection(data_root=clips, mask_column=str(tmp_path / "m")))
    assert masks(outside) == {"a.mp4": "a.png"}  # a folder that was named is one that may be read
    (tmp_path / "m" / "a.png").unlink()
    (tmp_path / "m" / "a.png").symlink_to(tmp_path / "c.mp4")
    assert masks(read_dataset(DataSection(data_root=clips, mask_column="../m"))) == {"a.mp4": "a.png outside_root"}
    for name, kind in (("gone", "not_found"), ("a.mp4", "invalid")):
        with refused(kind, f"mask_column '{clips / name}' ", error=DataError):  # type: ignore[arg-type]
            read_dataset(DataSection(data_root=clips, mask_column=name))
    toml = tmp_path / "theirs.toml"
    toml.write_text('[[directory]]\npath = "clips"\nmask_path = "m"')
    [theirs] = read_datasets(DataSection(dataset=toml))
    assert theirs.data.mask_column == str(tmp_path / "m")


def test_a_column_of_a_table(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4", "c.mp4", "x.png")
    table = tmp_path / "t.jsonl"
    rows: list[dict[str, Any]] = [
        {"video": "a.mp4", "text": "a", "mask": "x.png", "by": "me"}, {"video": "b.mp4", "text": "b", "mask": None},
        {"video": "c.mp4", "text": "c", "mask": "gone.png"},
    ]  # fmt: skip
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reading = read_dataset(DataSection(dataset_file=table))
    assert masks(reading) == {"a.mp4": "x.png", "c.mp4": "gone.png missing"}
    assert reading.items[0].extra == {"by": "me"}
    none = read_dataset(DataSection(dataset_file=table, mask_column=""))
    assert not none.masks
    assert none.items[0].extra == {"mask": "x.png", "by": "me"}
    with refused("not_found", "t.jsonl: ", "'matte'", "`mask_column`", error=DataError):
        read_dataset(DataSection(dataset_file=table, mask_column="matte"))
    table.write_text(json.dumps({**rows[0], "mask": 3}))
    with refused("invalid", "t.jsonl line 1: ", "'mask'", " 3; ", "`mask_column`", error=DataError):
        read_dataset(DataSection(dataset_file=table))
    sheet = tmp_path / "t.csv"
    sheet.write_text("video,text,matte\na.mp4,one,x.png\nb.mp4,two,\n")
    assert masks(read_dataset(DataSection(dataset_file=sheet, mask_column="matte"))) == {"a.mp4": "x.png"}
    # Masks beside its clips are another way to say it, which a table without the column is not taken for.
    touch(tmp_path, "a.mask.png", "d.mask.png")
    unread = read_dataset(DataSection(dataset_file=sheet))
    assert not unread.masks
    [warning] = unread.warnings
    assert warning.startswith("1 ")
    assert warning.endswith("`mask`: a.mask.png")
    assert read_dataset(DataSection(dataset_file=sheet, mask_column="")).warnings == []


def test_a_list_beside_the_two_text_files_and_members_of_a_tar(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4", "x.png")
    for name, lines in (("v.txt", "a.mp4\nb.mp4\n"), ("c.txt", "one\ntwo\n"), ("m.txt", "x.png\n\n")):
        (tmp_path / name).write_text(lines)
    data = DataSection(data_root=tmp_path, video_column="v.txt", caption_column="c.txt", mask_column="m.txt")
    reading = read_dataset(data)
    assert masks(reading) == {"a.mp4": "x.png"}
    assert reading.warnings == []  # a mask is no clip that somebody forgot to list
    (tmp_path / "m.txt").write_text("x.png\n")
    with refused("mismatch", tmp_path / "m.txt", " 1 ", " 2 ", error=DataError):
        read_dataset(data)

    members = [("0.mp4", b"zero"), ("0.mask.png", b"mask"), ("0.txt", b"a"), ("1.mp4", b"one"), ("1.txt", b"b")]
    members += [("2.mp4", b"two"), ("2.mask.tiff", b"II*"), ("2.txt", b"c")]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    data = DataSection(dataset_file=tmp_path / "a.tar", mask_column="mask", caption_missing="error")
    reading = read_dataset(data, media_dir=tmp_path / "media")
    assert [item.path.read_bytes() for item in reading.items] == [b"zero", b"one", b"two"]
    mask, unreadable = reading.masks.pop(0), reading.masks.pop(2)
    assert (mask.path.read_bytes(), mask.unusable) == (b"mask", None)
    assert "mask.tiff" in unreadable.unusable.reason
    assert not reading.masks
    assert not read_dataset(DataSection(dataset_file=tmp_path / "a.tar"), media_dir=tmp_path / "media").masks


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_masks_are_judged_all_at_once_and_counted(
    tmp_path: Path, make_video: MakeFile, make_image: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("half", "film", "short", "wide", "black", "red", "clear", "junk", "cut", "gone", "none")
    for k, name in enumerate(names):
        make_video(tmp_path / f"{name}.mp4", frames=12, seed=k)
        (tmp_path / f"{name}.txt").write_text(name)
    make_image(tmp_path / "still.png")
    (tmp_path / "still.txt").write_text("a picture")
    half = np.zeros((32, 48), np.uint8)
    half[:, :12] = 255
    Image.fromarray(half).save(tmp_path / "half.mask.png")
    dot = np.zeros((12, 32, 48, 3), np.uint8)
    dot[6:] = 255
    make_video(tmp_path / "film.mask.mp4", frames=12, fps=30, pictures=dot)  # a rate of its own does not matter
    make_video(tmp_path / "short.mask.mp4", frames=11, pictures=dot)
    Image.new("L", (48, 48), 255).save(tmp_path / "wide.mask.png")
    Image.new("L", (48, 32), 3).save(tmp_path / "black.mask.png")
    Image.new("RGB", (48, 32), (200, 0, 0)).save(tmp_path / "red.mask.png")
    Image.new("RGBA", (48, 32), (255, 255, 255, 9)).save(tmp_path / "clear.mask.png")
    (tmp_path / "junk.mask.png").write_text("no picture")
    noise = np.random.default_rng(0).integers(0, 256, (320, 480), np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.mask.jpg")
    (tmp_path / "cut.mask.jpg").write_bytes((tmp_path / "cut.mask.jpg").read_bytes()[:9000])
    (tmp_path / "gone.mask.png").symlink_to(tmp_path / "nowhere.png")
    make_video(tmp_path / "still.mask.mp4", frames=12)

    plan = survey(tmp_path, image_resolution_buckets=["32x48"])
    found = {Path(item.name).stem: (item.status, item.reason or "") for item in plan.items}
    assert found["half"] == found["film"] == found["none"] == ("used", "")
    for name, status, *values in (
        ("short", "mismatch", "short.mask.mp4: 11 ", " 12 "),
        ("wide", "mismatch", "wide.mask.png: 48x48 ", " 48x32 "),
        ("black", "mismatch", "black.mask.png: ", "--unmasked_weight"),
        ("red", "mismatch", "red.mask.png: ", " colors"),
        ("clear", "mismatch", "clear.mask.png: ", " transparency"),
        ("still", "mismatch", "still.mask.mp4: ", " video", " image"),
        ("junk", "unreadable", "junk.mask.png: ", " PIL "),
        ("cut", "damaged", "cut.mask.jpg: "),
        ("gone", "missing", "gone.mask.png: "),
    ):
        assert found[name][0] == status
        assert all(value in found[name][1] for value in values), found[name]
    assert "9 of 12 " in str(plan.problem)
    assert any("2 of 3 " in note and " 38%" in note for note in plan.notes)
    record = next(item.record() for item in plan.items if item.name == "half.mp4")
    assert (record["mask"], record["mask_white"]) == (str(tmp_path / "half.mask.png"), 0.25)
    assert "mask" not in next(item.record() for item in plan.items if item.name == "none.mp4")

    # What masks show is stored with other facts of files; black counts for something where it is told to.
    monkeypatch.setattr(judged, "mask_brightness", lambda *_: pytest.fail("decoded again"))
    lenient = survey(tmp_path, image_resolution_buckets=["32x48"], unmasked_weight=0.5)
    assert {Path(item.name).stem for item in lenient.items if item.status == "used"} == {
        "half",
        "film",
        "none",
        "black",
    }
    assert any("3 of 4 " in note and " 62%" in note for note in lenient.notes)
    assert lenient.fingerprint != plan.fingerprint
    assert survey(tmp_path, image_resolution_buckets=["32x48"], mask_column="").problem is None


# ---- cutting and pooling ---------------------------------------------------------------------------------------------


def pooled_by_force(pixels_THW: np.ndarray, *, temporal: int, spatial: int) -> np.ndarray:
    """The mean over the pixels and frames of every latent, one by one, in float64."""
    frames, height, width = pixels_THW.shape
    latents = np.empty(((frames - 1) // temporal + 1, height // spatial, width // spatial))
    for (k, i, j), _ in np.ndenumerate(latents):
        of_time = slice(0, 1) if k == 0 else slice((k - 1) * temporal + 1, k * temporal + 1)
        cell = pixels_THW[of_time, i * spatial : (i + 1) * spatial, j * spatial : (j + 1) * spatial]
        latents[k, i, j] = cell.astype(np.float64).mean() / 255
    return latents


@pytest.fixture
def grey(tmp_path: Path, make_video: MakeFile) -> Path:
    """20 frames of grey noise in blocks, at 16 fps: as a mask of itself, it shows which of its pixels are taken."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (20, 16, 24, 1), np.uint8).repeat(3, axis=3).repeat(4, axis=1).repeat(4, axis=2)
    make_video(tmp_path / "g.mp4", frames=20, fps=16, height=64, width=96, pictures=blocks)
    (tmp_path / "g.txt").write_text("grey")
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "target_fps": 16, "frame_selection": "random", "video_reshape_mode": "random",
            "video_resolution_buckets": ["9x32x32"],
        },
        {
            "target_fps": 16, "video_reshape_mode": "none", "frame_selection": "uniform",
            "video_resolution_buckets": ["13x48x32"],
        },
        {
            "target_fps": 16, "sliding_window_size": 5, "sliding_window_stride": 4,
            "video_resolution_buckets": ["17x32x48"],
        },
        {"target_fps": 16, "frame_selection": "chunk", "video_resolution_buckets": ["9x32x32"]},
    ],
    ids=["resampled", "random", "uniform", "windows", "chunks"],
)  # fmt: skip
def test_a_mask_is_cut_as_its_clip_is(grey: Path, options: dict[str, Any]) -> None:
    """A clip that is the mask of itself: the pooled mask is that of the pixels that are trained."""
    clips = survey(grey, **options).checked().clips
    for clip in clips:
        own = replace(clip, mask=Mask(clip.path, "video", (4, 8)))
        for seed in range(2):
            pixels = load_clip(clip, generator=torch.Generator().manual_seed(seed))
            ours = load_mask(own, generator=torch.Generator().manual_seed(seed))
            theirs = pooled_by_force(pixels[1].numpy(), temporal=4, spatial=8)
            assert ours.dtype == torch.float32
            np.testing.assert_allclose(ours[0, 0].double().numpy(), theirs, rtol=0, atol=1e-6)
    if "sliding_window_size" in options:  # cut from the latents of the whole clip, or encoded by itself
        sliced = survey(grey, **options, sliding_window_latents="slice").checked().clips
        assert len(sliced) == len(clips) == 4
        whole = load_mask(
            replace(encoded_clip(sliced[0]), mask=Mask(sliced[0].path, "video", (4, 8))), generator=torch.Generator()
        )
        for place, window in enumerate(sliced):
            assert torch.equal(cut_latents(whole, window), whole[:, :, place : place + 2])


def test_an_image_is_the_mask_of_all_frames_and_of_images(grey: Path) -> None:
    rng = np.random.default_rng(1)
    picture = rng.integers(0, 256, (4, 6), np.uint8).repeat(16, 0).repeat(16, 1)
    Image.fromarray(picture).save(grey / "g.mask.png")
    [clip] = survey(grey, video_resolution_buckets=["9x64x96"]).checked().clips
    assert clip.mask is not None
    assert clip.files == (clip.path,)
    ours = load_mask(clip, generator=torch.Generator())
    theirs = pooled_by_force(np.broadcast_to(picture, (9, 64, 96)), temporal=4, spatial=8)
    np.testing.assert_allclose(ours[0, 0].double().numpy(), theirs, rtol=0, atol=1e-6)
    floor = replace(clip, mask=clip.mask._replace(lowest=0.25))
    torch.testing.assert_close(latent_weights(floor, ours), 0.25 + 0.75 * ours)
    still = replace(clip, kind="image", path=grey / "g.mask.png", bucket=(1, 64, 96), num_frames=1)
    assert torch.equal(load_mask(still, generator=torch.Generator()), ours[:, :, :1])


def test_what_is_never_trained_is_a_bad_sample_and_what_is_not_now_is_not(grey: Path) -> None:
    black = np.zeros((64, 96), np.uint8)
    black[:, :8] = 255  # which the crop leaves out
    Image.fromarray(black).save(grey / "g.mask.png")
    [clip] = survey(grey, video_resolution_buckets=["9x64x64"]).checked().clips
    with pytest.raises(InvalidSampleError, match=r"g\.mask\.png .*g\.mp4,") as caught:
        DecodeFetch(0)(MicroBatch(0, (clip,)))
    assert caught.value.status == "mismatch"
    for one in (replace(clip, start=0), replace(clip, reshape_mode="random", bucket=(9, 64, 64))):
        (mask,) = DecodeFetch(0)(MicroBatch(0, (one,))).masks
        assert mask is not None


# ---- batches and the cache -------------------------------------------------------------------------------------------


def encode_clip(video: torch.Tensor, _: object) -> dict[str, torch.Tensor]:
    _, _, frames, height, width = video.shape
    return {"moments": torch.zeros(len(video), 4, (frames - 1) // 4 + 1, height // 8, width // 8)}


def encode_text(texts: list[str]) -> PromptEmbeds:
    return PromptEmbeds({"embeds": torch.zeros(len(texts), 2, 2)})


@pytest.mark.parametrize("options", [{}, {"sliding_window_size": 5, "sliding_window_latents": "slice"}])
def test_cached_masks_equal_fresh_ones_and_moments_do_not_depend_on_them(
    grey: Path, make_video: MakeFile, tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    make_video(grey / "plain.mp4", frames=20, fps=16, height=64, width=96)
    (grey / "plain.txt").write_text("plain")
    plan = survey(grey, target_fps=16, video_resolution_buckets=["17x32x48"], **options).checked()
    found = [replace(clip, mask=Mask(clip.path, "video", (4, 8), 0.5)) for clip in plan.clips if clip.path.stem == "g"]
    clips = [*found, *(clip for clip in plan.clips if clip.path.stem == "plain")]
    data = DataSection()
    keys = CacheKeys(TensorCache(tmp_path / "c"), FileFacts(tmp_path / "d"), "t", EncoderEntry("v"), data, seed=0)
    encoded = list({repr(one): one for one in map(encoded_clip, clips)}.values())
    assert len(encoded) == 2
    one, plain = encoded
    assert keys.video(one) == keys.video(replace(one, mask=None))
    precompute_text((clip.caption for clip in clips), encode_text, keys, OneOf())
    precompute_video(encoded, encode_clip, keys, OneOf(), loading=DataloaderSection())
    counts = precompute_masks(encoded, keys, OneOf(), threads=1)
    assert (counts.encoded, counts.found) == (1, 0)
    assert precompute_masks(encoded, keys, OneOf(), threads=1).found == 1
    assert precompute_masks([plain], keys, OneOf(), threads=1).found == 0
    # Another floor reads the same entry; another file, crop or grid has one of its own.
    assert one.mask is not None
    others = (replace(one, reshape_mode="none"), replace(one, mask=one.mask._replace(grid=(4, 16))),
              replace(one, mask=one.mask._replace(path=plain.path)))  # fmt: skip
    assert len({keys.mask(other) for other in (one, *others)}) == 4
    assert keys.mask(replace(one, mask=one.mask._replace(lowest=0.0))) == keys.mask(one)

    fresh = Encoder(encode_text, encode_clip, data=data, seed=0, is_masked=True)
    for batch in (MicroBatch(0, (clips[0], clips[-1])), MicroBatch(1, tuple(clips[-1:]))):
        ours, theirs = fresh(DecodeFetch(0)(batch)), fresh(CacheFetch(keys)(batch))
        assert ours.mask is not None
        assert theirs.mask is not None
        assert torch.equal(ours.mask, theirs.mask)
        assert ours.mask.shape == (len(batch.clips), 1, *ours.latent_size)
        assert torch.equal(ours.mask[-1], torch.ones(1, *ours.latent_size))  # of a clip without one
    assert ours.mask is not None
    entry = keys.cache.path(keys.mask(one))
    entry.write_bytes(entry.read_bytes()[:-1])
    caplog.clear()
    batch = MicroBatch(0, tuple(clips[:1]))
    ours, theirs = fresh(DecodeFetch(0)(batch)), fresh(CacheFetch(keys)(batch))  # a damaged entry is made again
    assert ours.mask is not None
    assert theirs.mask is not None
    assert torch.equal(ours.mask, theirs.mask)
    assert keys.cache.get(keys.mask(one)) is not None
    assert [str(entry) in line.getMessage() for line in caplog.records] == [True, True]  # removed, made again
    assert Encoder(encode_text, encode_clip, data=data, seed=0)(DecodeFetch(0)(batch)).mask is None


def test_a_mask_that_breaks_before_it_is_cached_is_a_bad_sample(grey: Path, tmp_path: Path) -> None:
    [clip] = survey(grey, video_resolution_buckets=["9x64x96"]).checked().clips
    (tmp_path / "broken.png").write_bytes(b"overwritten after the check")
    bad: Clip = replace(clip, mask=Mask(tmp_path / "broken.png", "image", (4, 8)))
    keys = CacheKeys(
        TensorCache(tmp_path / "c"), FileFacts(tmp_path / "d"), "t", EncoderEntry("v"), DataSection(), seed=0
    )
    [found] = precompute_masks([bad], keys, OneOf(), threads=1, optional={bad.index}).bad
    assert "broken.png" in found.reason
    with pytest.raises(InvalidSampleError, match=r"broken\.png"):
        precompute_masks([bad], keys, OneOf(), threads=1)


def test_training_has_masks_on_the_fly_and_from_the_cache(grey: Path, tmp_path: Path, tiny_repo: MakeFile) -> None:
    """A run in which one of two clips has a mask: all its batches have weights, the same both ways."""
    shutil.copy(grey / "g.mp4", grey / "plain.mp4")
    (grey / "plain.txt").write_text("plain")
    half = np.zeros((64, 96), np.uint8)
    half[:, 48:] = 255
    Image.fromarray(half).save(grey / "g.mask.png")
    weights: list[dict[int, torch.Tensor]] = []
    for precompute in (False, True):
        config = load_config(
            model_name="ltx_video", pretrained_model_name_or_path=str(tiny_repo("ltx_video")), data_root=str(grey),
            video_resolution_buckets=["9x64x96"], precompute_conditions=precompute, target_fps=8, batch_size=2,
            output_dir=str(tmp_path / "run"), vae_dtype="fp32", text_encoder_dtype="fp32", seed=3, unmasked_weight=0.25,
        )  # fmt: skip
        family = get_family("ltx_video")
        spec = family.load(config.model)
        plan = survey_dataset(config, family.facts_of(config.model).geometry).checked()
        assert [clip.mask is not None for clip in plan.clips] == [True, False]
        parallel: Any = OneOf()
        texts = TextCache(plan.all_captions(), plan.texts, config, spec=spec, parallel=parallel)
        encoders = spec.load_text_encoders()
        data = TrainingData(
            plan, config, spec=spec, parallel=parallel,
            texts=texts.encode(encoders) if precompute else texts.encode_on_demand(encoders),
            clip_encoders=spec.load_clip_encoders(), data_position=DataPosition.begin(config, data_size=1),
        )  # fmt: skip
        [batch] = next(data.steps(0))
        assert batch.mask is not None
        weights.append({item: row for (_, item), row in zip(batch.sample_keys, batch.mask, strict=True)})
        assert (data.precomputed["masks"].encoded if precompute else 1) == 1
    masked, plain = weights[0][0], weights[0][1]
    assert torch.equal(
        masked, torch.tensor([0.25, 0.625, 1.0]).expand_as(masked)
    )  # the edge is within the second column
    assert torch.equal(plain, torch.ones_like(plain))
    assert all(torch.equal(weights[1][item], weights[0][item]) for item in (0, 1))
