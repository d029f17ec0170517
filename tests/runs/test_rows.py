"""Rows that only Python has: stored without loss, checked and reported like files, and required again on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused_options

from finetrainers import batches, check, load_config, train
from finetrainers.cli.main import main
from finetrainers.config.sections import DataSection
from finetrainers.data.reading.datasets import media_dir
from finetrainers.data.reading.media import open_image
from finetrainers.data.reading.sources.python_rows import read_rows, store_rows
from finetrainers.data.video.pyav import PyavReader
from finetrainers.utils.reading import read_jsonl


@pytest.fixture
def values(options: Callable[..., dict]) -> dict[str, Any]:
    values = options(train_steps=1, checkpointing_steps=0)
    del values["data_root"], values["lr"]
    return values


def clip(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape or (9, 64, 64, 3), dtype=np.uint8)


class ByItem:
    """Dataset of torch's kind, one of whose items cannot be read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 1:
            raise OSError("disk on fire")
        return {"video": torch.from_numpy(clip(index)), "caption": f"a {index}"}


def test_arrays_are_stored_without_loss(tmp_path: Path) -> None:
    odd, image = clip(0, 5, 33, 47, 3), clip(1, 15, 9, 3)
    floats = torch.from_numpy(clip(2)).permute(0, 3, 1, 2) / 255
    rows = [
        {"video": odd, "caption": "a", "fps": Fraction(25, 2)},
        {"video": torch.from_numpy(odd.copy()), "caption": "b"},
        {"video": floats, "caption": ["c", "d"], "fps": torch.tensor(30)},
        {"image": image, "caption": "e"},
        {"image": torch.from_numpy(image).permute(2, 0, 1) / 255, "caption": "f"},
    ]
    data = DataSection()
    stored = store_rows(iter(rows), data, tmp_path, name="data")
    read = read_rows(stored.path, data)
    files = [row.stored for row in read if row.stored is not None]
    assert [row.rate for row in read] == [12.5, 0.0, 30.0, None, None]
    assert [row.captions for row in read] == [("a",), ("b",), ("c", "d"), ("e",), ("f",)]
    assert files[0] == files[1]  # equal pixels are one file, whatever their rate
    assert files[3] == files[4]
    for path, pixels in ((files[0], odd), (files[2], clip(2))):
        frames = np.stack([frame for _, frame in PyavReader(path).frames(range(len(pixels)))])
        assert np.array_equal(frames, pixels)
    with open_image(files[3]) as opened:
        assert np.array_equal(np.asarray(opened), image)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    assert store_rows(rows, data, tmp_path, name="data") == stored
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == written
    # Files that are not as they were written are made again.
    content = {path: path.read_bytes() for path in (*files, stored.path)}
    files[0].write_bytes(content[files[2]])
    os.truncate(files[3], 20)
    os.truncate(stored.path, 30)
    assert store_rows(rows, data, tmp_path, name="data") == stored
    assert {path: path.read_bytes() for path in content} == content


def test_rows_train_like_files_and_are_required_again(values: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"video": clip(0), "caption": "a"}, {"video": clip(1, 17, 64, 64, 3), "caption": "b", "fps": 50}]
    values |= {"precompute_conditions": True, "precompute_dir": tmp_path / "cache", "eval_steps": 1}

    def generator() -> Iterator[dict[str, Any]]:
        yield from rows
        raise AssertionError("rows after the last one are read")

    result = train(load_config(**values, max_items=2), data=generator(), eval_data=rows[:1])
    assert any("eval_loss" in record for record in result.metrics)
    items = read_jsonl(result.run_dir / "manifest.jsonl")[0]
    assert [(item["name"], item["use"], item["source_fps"]) for item in items] == [
        ("data[0]", "train", 25), ("data[1]", "train", 50), ("eval/eval_data[0]", "eval", 25)
    ]  # fmt: skip

    own = load_config(**{**values, "output_dir": tmp_path / "own", "eval_steps": None})
    [raw] = batches(own, data=rows, encoded=False)
    assert {tuple(pixels.shape) for pixels in raw.pixels} == {(3, 9, 64, 64)}

    # A run that goes on must have equal rows.
    config = load_config(result.run_dir / "config.toml", resume_from_checkpoint="latest", train_steps=2)
    with refused_options(("--parts", "required"), ("--parts", "required")):
        train(config)
    other = [rows[0], {**rows[1], "caption": "c"}]
    with refused_options(("--resume_from_checkpoint", "mismatch")) as refusal:
        train(config, data=other, eval_data=rows[:1])
    assert "--reset data" in str(refusal.value)
    with refused_options(("--resume_from_checkpoint", "mismatch")):  # rows are like files, other parts are not
        train(config, data=other, eval_data=rows[:1], lr_at=lambda step: 1e-4)
    dry_run = load_config(config, reset=["data"], dry_run=True)
    assert train(dry_run, data=other, eval_data=rows[1:]).config.run.parts[0].startswith("data=2 rows")


def test_equal_pixels_at_two_rates_have_two_entries_of_the_cache(values: dict[str, Any], tmp_path: Path) -> None:
    pixels = clip(0, 33, 64, 64, 3)
    values |= {"precompute_dir": tmp_path / "cache", "batch_size": 2}

    def moments(precompute: bool, fps: float) -> torch.Tensor:
        rows = [{"video": pixels, "caption": "a", "fps": 25}, {"video": pixels, "caption": "a", "fps": fps}]
        [batch] = batches(load_config(**values, precompute_conditions=precompute), data=rows)
        return batch.moments

    for fps in (50, 100):  # the second is a corrected rate, where the entries of the first are cached
        cached = moments(True, fps)
        torch.testing.assert_close(cached, moments(False, fps))
        assert not torch.equal(cached[0], cached[1])


@pytest.mark.rotating
def test_runs_over_equal_rows_share_files_and_latents(values: dict[str, Any], tmp_path: Path) -> None:
    values |= {"precompute_conditions": True, "precompute_dir": tmp_path / "cache"}
    rows = [{"video": clip(0), "caption": "a"}]

    def cached() -> set[Path]:
        return {path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".mp4", ".safetensors", ".rows")}

    result = train(load_config(**values), data=rows)
    first = cached()
    train(load_config(**{**values, "output_dir": tmp_path / "second"}), data=[dict(row) for row in rows])
    assert cached() == first
    config = load_config(result.run_dir / "config.toml", resume_from_checkpoint="latest", train_steps=2)
    assert train(config, data=iter(rows)).step == 2


def test_bad_rows_are_named_together(values: dict[str, Any], tmp_path: Path) -> None:
    good = {"video": clip(0), "caption": "a"}
    rows: list[Any] = [
        good,
        {"video": clip(0).astype(np.int32), "caption": "a"},
        {"video": clip(0, 64, 64, 3), "caption": "a"},
        {"video": torch.full((9, 3, 64, 64), 2.0), "caption": "a"},
        {"video": clip(0)},
        {"video": str(tmp_path / "missing.mp4"), "caption": "a"},
        {"caption": "a"},
        (clip(0), "a"),
        {**good, "fps": -1},
        {"video": clip(0, 1, 1, 20_000, 3), "caption": "a"},
    ]
    config = load_config(**values)
    with refused_options(("data", "invalid")) as refusal:
        train(config, data=rows)
    assert all(f"data[{index}]" in str(refusal.value) for index in range(1, len(rows)))
    with refused_options(("data", "unreadable")):
        train(config, data=(rows[index] for index in "ab"))  # type: ignore[call-overload]
    others: tuple[Any, ...] = ({"video": []}, "clips", 3)
    for other in others:
        with refused_options(("data", "invalid")):
            train(config, data=other)
    with refused_options(("--data_root", "conflict"), ("--eval_num_items", "conflict")):
        train(load_config(config, data_root=tmp_path, eval_num_items=1), data=[good], eval_data=[good])
    with refused_options(("data", "unsupported")):
        train(load_config(config, method="nft"), data=[good])
    # Nothing is read if other parts are refused, and nothing is written among the files of others.
    unread = iter([good])
    with refused_options(("optimizer", "invalid")):
        train(config, data=unread, optimizer=3)  # type: ignore[arg-type]
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("mine")
    with refused_options(("--output_dir", "occupied")):
        train(load_config(config, output_dir=tmp_path / "others"), data=unread)
    assert [path.name for path in (tmp_path / "others").iterdir()] == ["notes.txt"]
    assert next(unread) is good


def test_an_item_that_raises_counts_as_an_unusable_file(values: dict[str, Any]) -> None:
    config = load_config(**values, max_bad_samples=1)
    report = check(config, data=ByItem())
    assert [(item["use"], item["status"]) for item in report["items"]] == [
        ("train", "used"), ("rejected", "unreadable"), ("train", "used")
    ]  # fmt: skip
    assert "disk on fire" in report["items"][1]["reason"]
    assert report["items"][0]["path"].startswith(str(media_dir(config)))
    assert check(load_config(config, max_bad_samples=0), data=ByItem())["problem"]


def test_rows_may_have_other_columns_and_evaluate_what_trains_on_files(
    values: dict[str, Any], make_clips: Callable[..., Path]
) -> None:
    white = np.full((9, 64, 64, 3), 255, np.uint8)
    white[:, :32] = 0
    rows = [{"clip": clip(0), "text": "a", "mask": white}, {"clip": clip(1), "text": "b", "mask": None}]
    report = check(load_config(**values, video_column="clip", mask_column="mask"), data=rows)
    assert [(item["use"], item["caption"], "mask" in item) for item in report["items"]] == [
        ("train", "a", True), ("train", "b", False)
    ]  # fmt: skip
    pairs = [{"prompt": "a", "chosen": clip(0), "rejected": clip(1)}]
    assert train(load_config(**values, method="dpo", dry_run=True), data=pairs).step == 0

    # Clips that are only evaluated get the buckets of those that are trained on.
    longer = [{"video": clip(2, 25, 64, 64, 3), "caption": "c"}]
    values |= {"data_root": make_clips(2), "video_resolution_buckets": [], "frame_buckets": [9]}
    report = check(load_config(**values), eval_data=longer)
    assert [(item["use"], item["bucket"]) for item in report["items"]] == [
        ("train", "9x64x64"), ("train", "9x64x64"), ("eval", "9x64x64")
    ]  # fmt: skip


@pytest.mark.rotating  # importing the library takes seconds
def test_datasets_are_read_by_item(values: dict[str, Any], make_clips: Callable[..., Path], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    Image.fromarray(clip(0, 64, 64, 3)).save(tmp_path / "a.png")
    columns = {"image": [str(tmp_path / "a.png"), {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    table = datasets.Dataset.from_dict({**columns, "text": ["a", "b"]}, features=features)
    values |= {"image_resolution_buckets": ["64x64"], "video_resolution_buckets": []}
    report = check(load_config(**values), data=table)
    assert [(item["use"], item["kind"], item["caption"]) for item in report["items"]] == [
        ("train", "image", "a"), ("train", "image", "b")
    ]  # fmt: skip
    path = next(iter(make_clips(1).glob("*.mp4")))
    report = check(load_config(**{**values, "image_resolution_buckets": []}), data=[{"video": path, "caption": "a"}])
    assert [(item["path"], item["where"]) for item in report["items"]] == [(str(path), "data[0]")]


def test_stored_rows_are_listed_and_pruned_with_the_cache(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    values |= {"precompute_conditions": True, "precompute_dir": cache}
    kept = train(load_config(**values), data=[{"video": clip(0), "caption": "a"}])
    train(load_config(**{**values, "output_dir": tmp_path / "other"}), data=[{"video": clip(1), "caption": "b"}])

    def media() -> dict[str, int]:
        capsys.readouterr()
        assert main(["cache", "ls", str(cache), "--json"]) == 0
        return {group["kind"]: group["entries"] for group in json.loads(capsys.readouterr().out)["groups"]}

    assert media() == {"text": 3, "video": 2, "media": 4}  # two clips and two lists of rows
    prune = ["cache", "prune", str(cache), "--keep", str(kept.run_dir / "config.toml")]
    assert main([*prune, "--dry_run"]) == 0
    assert media()["media"] == 4
    assert main(prune) == 0
    assert media() == {"text": 2, "video": 1, "media": 2}
    assert sorted(path.suffix for path in (cache / "media").glob("*/*")) == [".mp4", ".rows", ".sha256"]
    assert train(load_config(kept.run_dir / "config.toml", output_dir=tmp_path / "again"), data=[
        {"video": clip(0), "caption": "a"}
    ]).metrics[0]["loss"] == kept.metrics[0]["loss"]  # fmt: skip
