"""Further media of items (control videos): read from every source, checked, cut and cached with their clips."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from one_of import OneOf
from refusals import refused

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataloaderSection, DataSection, ModelSection
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.cache.keys import CacheKeys, EncoderEntry
from finetrainers.data.cache.store import TensorCache
from finetrainers.data.inspect.file_facts import FileFacts
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.data.loading.bad_samples import ReplacementClips
from finetrainers.data.loading.batch_sampler import MicroBatch
from finetrainers.data.loading.loader import DecodeFetch
from finetrainers.data.loading.precompute import precompute_video
from finetrainers.data.reading.datasets import read_datasets
from finetrainers.data.reading.items import DataError, read_dataset
from finetrainers.data.video.decode import load_clip
from finetrainers.models.spec import to_unit_range

GEOMETRY = Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=8)
CONTROL = {"extra_columns": ["control_video=pose"]}


def controls(data: DataSection, media: Path | None = None) -> list[tuple[str, str, str | None]]:
    """Name of every clip, of its control video, and why that cannot be used."""
    reading = read_dataset(data, media_dir=media)
    [(name, items)] = reading.further.items()
    assert name == "control_video"
    return [
        (clip.path.name, one.path.name, one.unusable and one.unusable.status)
        for clip, one in zip(reading.items, items, strict=True)
    ]


def survey(root: Path, **options: object) -> DatasetPlan:
    data = DataSection(**{"data_root": root, "video_resolution_buckets": ["9x32x48"], **CONTROL, **options})
    model = ModelSection(model_name="cogvideox", pretrained_model_name_or_path="x")
    return survey_dataset(TrainConfig(model=model, data=data), GEOMETRY)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_column_of_a_table(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4", "pa.mp4"):
        (tmp_path / name).write_bytes(b"x")
    table = tmp_path / "t.jsonl"
    rows = [{"video": f"{k}.mp4", "text": k, "pose": f"p{k}.mp4", "by": "me"} for k in "ab"]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection(dataset_file=table, **CONTROL)
    assert controls(data) == [("a.mp4", "pa.mp4", None), ("b.mp4", "pb.mp4", "missing")]
    assert read_dataset(data).items[0].extra == {"by": "me"}
    with refused("not_found", "t.jsonl: ", "(2 rows)", "'depth'", "`extra_columns`", error=DataError):
        read_dataset(data.model_copy(update={"extra_columns": [("control_video", "depth")]}))
    table.write_text(json.dumps({**rows[0], "pose": None}))
    with refused("invalid", "t.jsonl line 1: ", "'pose'", " None", error=DataError):
        read_dataset(data)


def test_a_list_beside_the_two_text_files(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4", "pa.mp4", "pb.mp4"):
        (tmp_path / name).write_bytes(b"x")
    for name, lines in (("v.txt", "a.mp4\nb.mp4\n"), ("c.txt", "\nsecond\n"), ("pose", "pa.mp4\npb.mp4\n")):
        (tmp_path / name).write_text(lines)
    data = DataSection(data_root=tmp_path, video_column="v.txt", caption_column="c.txt", **CONTROL)
    assert controls(data) == [("a.mp4", "pa.mp4", None), ("b.mp4", "pb.mp4", None)]
    assert read_dataset(data).warnings == []  # control videos are no clips that somebody forgot to list
    (tmp_path / "pose").write_text("\npb.mp4\n")
    with refused("mismatch", "--extra_columns control_video=pose: ", " 'v.txt'; ", " line 1", error=DataError):
        read_dataset(data)
    (tmp_path / "pose").unlink()
    with refused("not_found", "--extra_columns control_video=pose: ", " 'c.txt' ", " 'pose' ", error=DataError):
        read_dataset(data)


def test_a_folder_in_the_folder_of_clips(tmp_path: Path) -> None:
    for name in ("a.mp4", "in/b.mp4", "pose/a.mp4", "pose/in/b.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"x")
    for name in ("a", "in/b"):
        (tmp_path / f"{name}.txt").write_text("caption")
    data = DataSection(data_root=tmp_path, **CONTROL)
    reading = read_dataset(data)
    assert [item.name for item in reading.items] == ["a.mp4", "in/b.mp4"]
    assert [item.name for item in reading.further["control_video"]] == ["pose/a.mp4", "pose/in/b.mp4"]
    (tmp_path / "pose" / "a.mp4").unlink()
    assert controls(data)[0] == ("a.mp4", "a.mp4", "missing")


def test_members_of_a_tar(tmp_path: Path) -> None:
    members = [("0.mp4", b"zero"), ("0.pose.mp4", b"pose"), ("0.txt", b"caption"), ("1.mp4", b"one"), ("1.txt", b"b")]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    reading = read_dataset(DataSection(dataset_file=tmp_path / "a.tar", **CONTROL), media_dir=tmp_path / "media")
    pose, none = reading.further["control_video"]
    assert [item.path.read_bytes() for item in reading.items] == [b"zero", b"one"]
    assert pose.path.read_bytes() == b"pose"
    assert none.unusable is not None
    assert none.unusable.status == "skipped"


def test_a_column_of_parquet_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"video": [b"\0\0\0\0ftypA", b"\0\0\0\0ftypB"], "text": ["a", "b"], "pose": [b"\0\0\0\0ftypP", None]}
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "t.parquet"))
    data = DataSection(dataset_file=tmp_path / "t.parquet", **CONTROL)
    reading = read_dataset(data, media_dir=tmp_path / "media")
    pose, none = reading.further["control_video"]
    assert [item.path.read_bytes()[-1:] for item in (*reading.items, pose)] == [b"A", b"B", b"P"]
    assert none.unusable is not None
    assert none.unusable.status == "skipped"
    assert " 'pose' " in none.unusable.reason
    assert reading.items[0].extra == {}
    # Nor does the journal of the second column hold the clips of the first.
    assert all("ftyp" not in journal.read_text() for journal in (tmp_path / "media" / "journals").glob("*.jsonl"))


def test_each_of_several_datasets_names_its_own_columns(tmp_path: Path) -> None:
    toml = tmp_path / "d.toml"
    toml.write_text(
        '[[dataset]]\ndata_root = "a"\n[[dataset]]\ndata_root = "b"\nextra_columns = ["control_video=p", "mask=m"]'
    )
    run = DataSection(dataset=toml, **CONTROL)
    # What media there are, the run says: the model's.
    assert [one.data.extra_columns for one in read_datasets(run)] == [[("control_video", n)] for n in ("pose", "p")]


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_a_control_video_must_have_a_frame_for_each_of_the_clips(
    tmp_path: Path, make_video: Callable[..., Path], make_image: Callable[..., Path]
) -> None:
    wrong: dict[str, dict[str, int]] = {
        "short": {"frames": 11}, "fast": {"fps": 16}, "tall": {"height": 48, "width": 32}, "none": {}, "text": {},
        "good": {},
    }  # fmt: skip
    for name, options in wrong.items():
        make_video(tmp_path / f"{name}.mp4", frames=12)
        (tmp_path / f"{name}.txt").write_text(name)
        make_video(tmp_path / "pose" / f"{name}.mp4", **{"frames": 12, "height": 16, "width": 24, **options})
    (tmp_path / "pose" / "none.mp4").unlink()
    (tmp_path / "pose" / "text.mp4").write_text("no video")
    make_image(tmp_path / "still.png")
    (tmp_path / "still.txt").write_text("a picture")
    make_image(tmp_path / "pose" / "still.png")

    plan = survey(tmp_path, image_resolution_buckets=["32x48"])
    found = {item.name: (item.status, item.reason) for item in plan.items}
    assert found["good.mp4"] == found["still.png"] == ("used", None)
    for name, status, *values in (
        ("none", "missing"),
        ("text", "unreadable"),
        ("short", "mismatch", " 11 frames at 8 fps, ", " 12 frames at 8 fps; "),
        ("fast", "mismatch", " 12 frames at 16 fps, ", " 12 frames at 8 fps; "),
        ("tall", "mismatch", " 32x48 ", " 48x32 "),
    ):
        assert found[f"{name}.mp4"][0] == status
        assert all(value in found[f"{name}.mp4"][1] for value in (f" control_video pose/{name}.mp4", *values))
    assert "5 of 7 " in str(plan.problem)
    [record] = [item.record() for item in plan.items if item.name == "good.mp4"]
    assert record["further"] == {"control_video": str(tmp_path / "pose" / "good.mp4")}

    make_video(tmp_path / "pose" / "good.mp4", frames=12, seed=5, height=48, width=72)
    assert survey(tmp_path, image_resolution_buckets=["32x48"]).fingerprint != plan.fingerprint


def test_a_column_that_the_model_does_not_take_is_not_read_silently(
    tmp_path: Path, make_video: Callable[..., Path]
) -> None:
    make_video(tmp_path / "a.mp4")
    (tmp_path / "t.jsonl").write_text('{"video": "a.mp4", "text": "a", "control_video": "none.mp4", "by": "me"}')
    plan = survey(tmp_path, dataset_file=tmp_path / "t.jsonl", extra_columns=[])
    assert plan.problem is None
    [note] = plan.notes
    assert " 'control_video' " in note


# ---- decoding and caching --------------------------------------------------------------------------------------------


@pytest.fixture
def clip(tmp_path: Path, make_video: Callable[..., Path]) -> Clip:
    """20 frames of which 9 are trained, in another shape than the bucket; the control video is half as large."""
    rng = np.random.default_rng(0)
    make_video(tmp_path / "a.mp4", frames=20, height=64, width=64)
    pictures = np.repeat(rng.integers(0, 255, (20, 1, 1, 3)), 32, axis=1).repeat(32, axis=2)
    make_video(tmp_path / "pose" / "a.mp4", frames=20, height=32, width=32, pictures=pictures)
    (tmp_path / "a.txt").write_text("caption")
    [found] = survey(tmp_path, frame_selection="random", video_reshape_mode="random").clips
    return found


def test_both_are_cut_alike(clip: Clip) -> None:
    for seed in range(3):
        pixels = load_clip(clip, generator=torch.Generator().manual_seed(seed))
        assert pixels.shape == (6, 9, 32, 48)
        [pose] = clip.further
        for channels, path in ((pixels[:3], clip.path), (pixels[3:], pose.path)):
            alone = replace(clip, path=path, further=())
            assert torch.equal(channels, load_clip(alone, generator=torch.Generator().manual_seed(seed)))


def test_entries_of_the_cache_are_those_of_both_files(clip: Clip, tmp_path: Path) -> None:
    cache, digests = TensorCache(tmp_path / "cache"), FileFacts(tmp_path / "digests")
    keys = CacheKeys(cache, digests, "", EncoderEntry("v"), DataSection(), seed=0)
    [pose] = clip.further
    other = replace(clip, index=1, further=(pose._replace(path=clip.path),))
    assert len({keys.video(one) for one in (clip, other, replace(clip, further=()))}) == 3

    def encode(video: torch.Tensor, _: object) -> dict[str, torch.Tensor]:
        return {"moments": to_unit_range(video).mean((2, 3, 4), keepdim=True)}

    assert precompute_video([clip, other], encode, keys, OneOf(), loading=DataloaderSection()).encoded == 2
    ours, theirs = (keys.cache.get(keys.video(one)) for one in (clip, other))
    assert ours is not None
    assert theirs is not None
    assert torch.equal(theirs["moments"][:, :3], theirs["moments"][:, 3:])
    assert not torch.equal(ours["moments"][:, :3], ours["moments"][:, 3:])


def test_a_control_video_that_breaks_later_is_a_bad_sample(clip: Clip, tmp_path: Path) -> None:
    [pose] = clip.further
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"overwritten after the check")
    bad = replace(clip, index=1, path=tmp_path / "pose" / "a.mp4", further=(pose._replace(path=broken),))
    raw = DecodeFetch(0, ReplacementClips([clip, bad]))(MicroBatch(0, (bad,)))
    assert raw.clips == (clip,)
    assert "broken.mp4" in raw.bad[0].reason
