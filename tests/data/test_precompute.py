"""Encoding beforehand with real models' VAEs: in batches, in tiles, and what the entries say of themselves."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from every_family import FAMILIES
from one_of import OneOf
from refusals import refused
from torch import Tensor

from finetrainers.config.sections import DataloaderSection, DataSection, ModelSection
from finetrainers.data.buckets.clip import Clip, ControlInput, Mask
from finetrainers.data.cache.encoder_index import (
    recall_files,
    recall_models,
    remember_files,
    remember_model,
)
from finetrainers.data.cache.keys import CacheKeys, EncoderEntry, describe_model
from finetrainers.data.cache.store import TensorCache, read_about
from finetrainers.data.inspect.file_facts import FileFacts
from finetrainers.data.loading import precompute
from finetrainers.data.loading.precompute import Encoded, precompute_masks, precompute_text, precompute_video
from finetrainers.data.loading.workers import WorkersLost
from finetrainers.models.registry import get_family
from finetrainers.models.spec import FIRST_FRAME, MOMENTS, PromptEmbeds, to_unit_range
from finetrainers.utils import files
from finetrainers.utils.failures import user_message

HERE, ONE_WORKER = (DataloaderSection(dataloader_num_workers=count) for count in (0, 1))


@pytest.fixture
def clips(tmp_path: Path, make_video) -> list[Clip]:
    """Three clips of one bucket and two of a smaller one, mixed."""
    made = []
    for k, frames in enumerate((9, 17, 9, 9, 17)):
        bucket = (9, 64, 64) if frames == 9 else (17, 32, 32)
        path = make_video(tmp_path / f"{k}.mp4", frames=frames, fps=25, height=64, width=64, seed=k)
        made.append(Clip(k, path, f"caption {k}", "video", bucket, 25.0, frames, 25.0, 64, 64))
    return made


def keys_in(root: Path, *, first_frame: bool = False, batch_size: int = 1) -> CacheKeys:
    cache, digests = TensorCache(root / "tensors"), FileFacts(root / "digests")
    return CacheKeys(
        cache,
        digests,
        "t",
        EncoderEntry("v", first_frame),
        DataSection(precompute_batch_size=batch_size),
        seed=7,
        vae_description="a VAE",
    )


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_give_what_one_at_a_time_gives(
    family: str, clips: list[Clip], tiny_repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelSection(model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)), vae_dtype="fp32")
    spec = get_family(family).load(config)
    spec.facts = replace(spec.facts, first_frame="channels")  # so that there are two tensors of each clip
    encoders, encode_video = spec.load_clip_encoders(), spec.encode_video
    sizes: list[tuple[int, ...]] = []

    def recorded(vae: Any, video: Tensor) -> Tensor:
        sizes.append((len(video), *video.shape[2:]))
        return encode_video(vae, video)

    def encode(video: Tensor, generators: Any) -> dict[str, Tensor]:
        return spec.encode_clip(encoders, video, None)

    spec.encode_video = recorded  # type: ignore[method-assign]

    alone, batched = (
        keys_in(tmp_path / name, first_frame=True, batch_size=size) for name, size in (("alone", 1), ("batched", 2))
    )
    assert precompute_video(clips, encode, alone, OneOf(), loading=HERE).encoded == 5
    sizes.clear()
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(precompute.Meter, "__call__", lambda _, done, total: seen.append((done, total)))
    result = precompute_video(clips, encode, batched, OneOf(), loading=HERE)
    # The largest bucket first; a batch has one bucket, and the given frames of each batch are encoded, too.
    given = {frames: spec.given_pixels(torch.zeros(1, 3, frames, 8, 8)).shape[2] for frames in (9, 17)}
    batches = [(2, 9, 64, 64), (1, 9, 64, 64), (2, 17, 32, 32)]
    assert sizes == [(n, size, *sides) for n, frames, *sides in batches for size in (frames, given[frames])]
    assert seen == [(0, 5), (2, 5), (3, 5), (5, 5)]
    entries = [(alone.cache.get(alone.video(clip)), batched.cache.get(batched.video(clip))) for clip in clips]
    for one, other in entries:
        for part in (MOMENTS, FIRST_FRAME):
            # Not bit for bit: convolutions choose their algorithm by the size of the batch.
            largest = float(other[part].abs().max())
            torch.testing.assert_close(one[part], other[part], rtol=1e-4, atol=1e-5 * largest)
            assert one[part].shape[0] == 1
    assert (entries[0][0][MOMENTS] - entries[2][1][MOMENTS]).abs().max() > 1e-3  # and rows were not mixed up
    files = [batched.cache.path(batched.video(clip)) for clip in clips]
    assert result == Encoded(encoded=5, size_bytes=sum(file.stat().st_size for file in files))
    assert read_about(files[1]).items() >= {
        "kind": "video", "of": "1.mp4", "bucket": "17x32x32", "model": "a VAE", "identity": "v",
    }.items()  # fmt: skip
    assert precompute_video(clips, encode, batched, OneOf(), loading=HERE) == Encoded(found=5)


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_tiling_and_slicing_are_really_on(family: str, tiny_repo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are made of clips larger than a tile; those of the published VAEs are 240 to 512 pixels wide."""
    calls: list[tuple[str, int]] = []
    video = torch.randn(2, 3, 9, 64, 96, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    results = {}
    for tiling, slicing in ((False, False), (True, False), (True, True)):
        config = ModelSection(
            model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)), vae_dtype="fp32",
            enable_tiling=tiling, enable_slicing=slicing,
        )  # fmt: skip
        spec = get_family(family).load(config)
        vae = spec.load_vae()
        assert (vae.use_tiling, vae.use_slicing) == (tiling, slicing)
        for side in ("height", "width"):
            setattr(vae, f"tile_sample_min_{side}", 64)
            if hasattr(vae, f"tile_sample_stride_{side}"):
                setattr(vae, f"tile_sample_stride_{side}", 32)
            if hasattr(vae, f"tile_latent_min_{side}"):
                setattr(vae, f"tile_latent_min_{side}", 64 // spec.facts.geometry.spatial)
        tiled = vae.tiled_encode
        monkeypatch.setattr(
            vae, "tiled_encode", lambda x, *a, tiled=tiled, **k: calls.append(("tiled", len(x))) or tiled(x, *a, **k)
        )
        calls.clear()
        results[tiling, slicing] = spec.encode_video(vae, video)
        expected = {(False, False): [], (True, False): [("tiled", 2)], (True, True): [("tiled", 1)] * 2}
        assert calls == expected[tiling, slicing]
    assert results[True, False].shape == results[False, False].shape
    torch.testing.assert_close(results[True, True], results[True, False], rtol=1e-4, atol=1e-5)
    assert not torch.equal(results[True, False], results[False, False])  # so it is a part of the key


def test_the_file_at_fault_is_named_out_of_a_batch(clips: list[Clip], tmp_path: Path) -> None:
    def encode(video: Tensor, generators: Any) -> dict[str, Tensor]:
        moments = to_unit_range(video).mean(dim=(2, 3, 4), keepdim=True).repeat(1, 2, 1, 1, 1)
        if len(video) == 3:
            moments[1] = torch.nan
        return {"moments": moments}

    keys = keys_in(tmp_path / "cache", batch_size=3)
    with refused("invalid", clips[2].path, " moments ", " NaN ", "--vae_dtype"):
        precompute_video(clips, encode, keys, OneOf(), loading=HERE)
    assert [bool(keys.cache.missing([keys.video(clip)])) for clip in clips] == [False, True, True, True, True]

    clips[0].path.write_bytes(b"overwritten after the check")
    result = precompute_video(clips, encode, keys, OneOf(), loading=HERE, optional={0})
    assert [bad.clip.index for bad in result.bad] == [0]
    assert (result.encoded, result.found) == (4, 0)


def test_what_cannot_be_read_is_left_out_as_in_training(
    clips: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone since the check, gone bad on its disk, or busy once."""
    keys, busy = keys_in(tmp_path / "cache"), {clips[2].path}
    clips[0].path.unlink()
    opening, pixels = files.open_regular, CacheKeys.pixels

    def broken(path: Path) -> io.IOBase:
        file = opening(path)
        if path == clips[1].path:
            file.read = lambda *_: os.read(os.open(tmp_path, os.O_RDONLY), 1)  # an error that names no file
        return file

    def once_busy(self: CacheKeys, clip: Clip) -> Tensor:
        if clip.path in busy:
            busy.remove(clip.path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return pixels(self, clip)

    monkeypatch.setattr(files, "open_regular", broken)
    monkeypatch.setattr(CacheKeys, "pixels", once_busy)
    encode = lambda video, _: {"moments": video[:, :2, :1, :2, :2]}  # noqa: E731
    result = precompute_video(clips, encode, keys, OneOf(), loading=HERE, optional={0, 1})
    assert {bad.clip.index: "No such file" in bad.reason for bad in result.bad} == {0: True, 1: False}
    assert "Is a directory: '" in next(bad.reason for bad in result.bad if bad.clip.index == 1)
    assert str(clips[1].path) in next(bad.reason for bad in result.bad if bad.clip.index == 1)
    assert (result.encoded, len(result.bad), busy) == (3, 2, set())
    with pytest.raises(FileNotFoundError, match=r"0\.mp4"):
        precompute_video(clips, encode, keys, OneOf(), loading=HERE)


def test_a_decoder_that_dies_ends_a_worker_and_at_last_names_the_file(
    clips: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetrainers.data.loading.workers._LOOK_S", 0.1)
    keys, pixels, always = keys_in(tmp_path / "cache"), CacheKeys.pixels, tmp_path / "always"
    once = tmp_path / "once"
    once.touch()

    def crashes(self: CacheKeys, clip: Clip) -> Tensor:
        if clip.index == 4 and (once.exists() or always.exists()):
            once.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        return pixels(self, clip)

    monkeypatch.setattr(CacheKeys, "pixels", crashes)
    encode = lambda video, _: {"moments": video[:, :2, :1, :2, :2]}  # noqa: E731
    assert precompute_video(clips, encode, keys, OneOf(), loading=ONE_WORKER).encoded == 5
    always.touch()
    with pytest.raises(WorkersLost, match=r" 4 .*4\.mp4\).*--dataloader_num_workers"):
        precompute_video(clips, encode, keys_in(tmp_path / "other"), OneOf(), loading=ONE_WORKER)


@pytest.mark.parametrize("loading", [HERE, ONE_WORKER])
def test_the_next_batch_is_decoded_while_one_is_encoded(
    loading: DataloaderSection, clips: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it: else the VAE would wait for the rest of a batch that is larger than what is decoded ahead."""
    decoded, pixels = tmp_path / "decoded", CacheKeys.pixels
    decoded.mkdir()

    def noted(self: CacheKeys, clip: Clip) -> Tensor:
        (decoded / str(clip.index)).touch()
        return pixels(self, clip)

    monkeypatch.setattr(CacheKeys, "pixels", noted)
    many = [replace(clips[0], index=k, start=k, bucket=(1, 32, 32)) for k in range(9)]
    seen: list[int] = []

    def encode(video: Tensor, _: Any) -> dict[str, Tensor]:
        due = min(9, 4 * (len(seen) + 2))  # this batch and the next
        for _ in range(1000):
            if len(list(decoded.iterdir())) >= due:
                break
            time.sleep(0.01)
        seen.append(len(list(decoded.iterdir())))
        return {"moments": video[:, :2, :1, :2, :2]}

    keys = keys_in(tmp_path / "cache", batch_size=4)
    assert precompute_video(many, encode, keys, OneOf(), loading=loading).encoded == 9
    assert seen[0] >= 8
    assert seen == sorted(seen)


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_the_vae_gets_the_memory_that_it_has_freed(clips: list[Clip], tmp_path: Path) -> None:
    """Else each of its large tensors is mapped from the system, page by page: half of the time on a CPU."""
    resource = pytest.importorskip("resource")
    faults: list[int] = []

    def encode(video: Tensor, _: Any) -> dict[str, Tensor]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(3):
            torch.zeros(48 * 2**20, dtype=torch.uint8).add_(1)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return {"moments": video[:, :2, :1, :2, :2]}

    precompute_video(clips, encode, keys_in(tmp_path / "cache"), OneOf(), loading=HERE)
    encode(torch.zeros(1, 3, 1, 2, 2), None)
    assert min(faults[:-1]) < faults[-1] / 3


def test_a_disk_too_small_for_the_cache_is_told_by_its_first_entries(
    clips: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clip of 9x64x64 is encoded; two more of these and two of 17x32x32 are to come: 2.94 times its pixels."""
    keys = keys_in(tmp_path / "cache")
    free = [10**9]
    monkeypatch.setattr(precompute.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    entry = precompute_video(
        clips[:1],
        lambda video, _: {"moments": video.float().mean(dim=(2,), keepdim=True)},
        keys_in(tmp_path / "one"),
        OneOf(),
        loading=HERE,
    ).size_bytes

    free[0] = int(2.9 * entry)
    with pytest.raises(OSError, match=r"clips .*--precompute_dir") as caught:
        precompute_video(
            clips, lambda video, _: {"moments": video.float().mean(dim=(2,), keepdim=True)}, keys, OneOf(), loading=HERE
        )
    assert caught.value.errno == errno.ENOSPC
    assert all(value in str(user_message(caught.value)) for value in (str(tmp_path / "cache"), "--precompute_dir"))
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 1
    free[0] = 3 * entry
    assert (
        precompute_video(
            clips, lambda video, _: {"moments": video.float().mean(dim=(2,), keepdim=True)}, keys, OneOf(), loading=HERE
        ).found
        == 1
    )

    free[0] = 0
    with pytest.raises(OSError, match="captions ") as caught:
        precompute_text("abcdefgh", lambda texts: PromptEmbeds({"text": torch.zeros(len(texts), 4)}), keys, OneOf())
    assert caught.value.errno == errno.ENOSPC


#: Of each field of a clip that changes what is decoded, another value; `source_fps` is that of a row.
CUTS: dict[str, Any] = {
    "path": "other.mp4", "bucket": (9, 32, 32), "fps": 8.0, "source_fps": 32.0, "reshape_mode": "none",
    "frame_selection": "middle", "start": 2, "further": "other.mp4",
}  # fmt: skip
#: Likewise of those that change nothing.
ELSEWHERE: dict[str, Any] = {
    "index": 9, "caption": "b", "captions": ("a", "b"), "lower": (((5, 32, 64), 8.0),), "repeats": 2.0, "dataset": 1,
}  # fmt: skip
#: Those that follow from the content of the file, from others, or that entries do not depend on by another mechanism.
DERIVED = {"kind", "num_frames", "width", "height", "is_variable", "has_row_rate", "latent_segment", "backend", "mask"}


def test_all_that_changes_what_is_decoded_changes_the_key(tmp_path: Path, make_video) -> None:
    assert {*CUTS, *ELSEWHERE, *DERIVED} == {field.name for field in fields(Clip)}
    paths = [
        make_video(tmp_path / name, frames=40, fps=16, height=64, width=96, seed=seed)
        for seed, name in enumerate(("clip.mp4", "pose.mp4", "other.mp4"))
    ]
    base = Clip(
        0, paths[0], "a", "video", (9, 32, 64), 16.0, 40, 16.0, 96, 64, has_row_rate=True,
        further=(ControlInput("pose", paths[1]),), mask=Mask(paths[0], "video", (4, 8)),
    )  # fmt: skip

    def changed(name: str, value: Any) -> Clip:
        values = {"path": paths[2], "further": (ControlInput("pose", paths[2]),)}
        return replace(base, **{name: values.get(name, value)})

    keys = keys_in(tmp_path / "cache")
    others = {name: changed(name, value) for name, value in CUTS.items()}
    for mode in ("reshape_mode", "frame_selection"):
        others[f"random {mode}"] = replace(base, **{mode: "random"})
    pixels, pooled = keys.pixels(base), keys.pooled(base)
    for name, other in others.items():
        assert not torch.equal(pixels, keys.pixels(other)), name
        assert keys.video(other) != keys.video(base), name
        assert keys.mask(other) != keys.mask(base) or torch.equal(pooled, keys.pooled(other)), name
    for name, value in ELSEWHERE.items():
        assert keys.video(changed(name, value)) == keys.video(base)
    unset = replace(base, has_row_rate=False)
    assert keys.video(replace(unset, source_fps=32.0)) == keys.video(unset)  # for files, this follows from the content

    def encode(video: Tensor, _: Any) -> dict[str, Tensor]:
        return {MOMENTS: video.clone()}

    clips = [base, *others.values()]
    assert precompute_video(clips, encode, keys, OneOf(), loading=HERE).encoded == len(clips)
    precompute_masks(clips, keys, OneOf(), threads=1)
    for clip in clips:
        assert torch.equal(keys.cache.get(keys.video(clip))[MOMENTS][0], keys.pixels(clip))
        assert torch.equal(keys.cache.get(keys.mask(clip))["mask"], keys.pooled(clip))


def test_a_clip_with_several_captions_is_encoded_once(clips: list[Clip], tmp_path: Path) -> None:
    keys = keys_in(tmp_path / "cache")
    twins = [*clips, *(replace(clip, index=clip.index + 10, caption="another") for clip in clips)]
    counts = [
        precompute_video(
            twins, lambda video, _: {"moments": video[:, :2, :1, :2, :2]}, keys, OneOf(rank, 2), loading=HERE
        )
        for rank in (0, 1)
    ]
    assert [count.encoded for count in counts] == [3, 2]


def test_models_are_known_by_the_options_that_choose_them(tmp_path: Path) -> None:
    repo = tmp_path / "a-model"
    repo.mkdir()
    model = ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(repo))
    assert recall_models(tmp_path, model, "vae") == []
    for identity in ("one", "two", "one"):
        remember_model(tmp_path, model, "vae", EncoderEntry(identity, with_first_frame=True))
    assert recall_models(tmp_path, model, "vae") == [EncoderEntry("one", True), EncoderEntry("two", True)]
    assert recall_models(tmp_path, model, "text") == []
    for other in ({"enable_tiling": True}, {"vae_dtype": "fp32"}, {"revision": "x"}):
        assert recall_models(tmp_path, model.model_copy(update=other), "vae") == []
    assert len(recall_models(tmp_path, model.model_copy(update={"enable_slicing": True}), "vae")) == 2
    assert describe_model(model, "vae") == "ltx_video VAE of a-model, bf16"  # a folder's name, not its place
    hub = model.model_copy(update={"pretrained_model_name_or_path": "someone/model", "enable_tiling": True})
    assert describe_model(hub, "vae") == "ltx_video VAE of someone/model, bf16, tiled"


def test_text_encoders_are_known_by_their_files_while_these_stay_as_they_are(tmp_path: Path) -> None:
    repo = tmp_path / "a-model"
    for part, name in (
        ("tokenizer", "tokenizer_config.json"),
        ("text_encoder", "config.json"),
        ("vae", "config.json"),
        ("transformer", "config.json"),
    ):
        (repo / part).mkdir(parents=True)
        (repo / part / name).write_text("{}")
    weights = repo / "text_encoder" / "model.safetensors"
    weights.write_bytes(b"one")
    model = ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(repo))
    spec = get_family("ltx_video").load(model)
    assert recall_files(tmp_path, spec) is None

    def after(change: Callable[[], object], *, known: bool) -> None:
        remember_files(tmp_path, spec, "name")
        assert recall_files(tmp_path, spec) == "name"
        change()
        assert (recall_files(tmp_path, spec) == "name") == known

    times = weights.stat()
    after(lambda: (repo / "vae" / "config.json").write_text('{"other": 1}'), known=True)
    after(lambda: weights.write_bytes(b"other"), known=False)
    after(lambda: (repo / "tokenizer" / "vocab.json").write_text("{}"), known=False)
    after(
        lambda: (repo / "transformer" / "config.json").write_text('{"other": 1}'), known=False
    )  # it may say how long texts are
    after(lambda: os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns)), known=False)
    for other in (
        {"text_encoder_dtype": "fp32"},
        {"text_encoder_id": str(repo)},
        {"pretrained_model_name_or_path": "x/y"},
    ):
        assert recall_files(tmp_path, get_family("ltx_video").load(model.model_copy(update=other))) is None
    elsewhere = get_family("ltx_video").load(model.model_copy(update={"pretrained_model_name_or_path": "x/y"}))
    remember_files(tmp_path, elsewhere, "name")  # nothing of it is on this disk
    assert recall_files(tmp_path, elsewhere) is None
