"""Rules between the options of data, for the run and for each of several datasets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial

from ..facts import Facts
from ..root import TrainConfig, fields
from ..sections import DataSection
from .findings import Finding, Findings, check_needs
from .frames import check_frames
from .windows import window_warnings

_TABLES = (".csv", ".json", ".jsonl", ".parquet")


def check_data(config: TrainConfig, facts: Facts) -> Iterator[Finding]:
    """Check the options that only training on clips reads."""
    data = config.data
    yield from _check_dataset(data, [name for name in type(data).model_fields if config.changed(name)])
    yield from window_warnings(config)
    others = [name for name, _ in data.extra_columns if name not in facts.media]
    if others and facts.first_frame != "unknown":
        takes = " and ".join(facts.media) or "only clips"
        yield f"--extra_columns {' '.join(others)} has no effect: this checkpoint takes {takes}"
    yield from _check_precomputation(config)
    yield from _check_batch_sizes(config)
    yield from check_frames(config, facts)
    holds_out = data.eval_num_items or data.eval_dataset_file is not None
    if config.validation.eval_steps and not holds_out and not config.validation.eval_reward:
        yield (
            "eval_steps",
            "the evaluation loss requires held-out items; set --eval_num_items or --eval_dataset_file, or score "
            "samples with --eval_reward",
            "required",
        )
    if data.eval_num_items and data.eval_dataset_file is not None:
        yield "eval_num_items", "cannot be combined with --eval_dataset_file; remove one of them", "conflict"
    if holds_out and not config.validation.eval_steps:
        option = f"--eval_num_items {data.eval_num_items} are" if data.eval_num_items else "--eval_dataset_file is"
        yield f"{option} held out, but evaluated only at the end; set --eval_steps"


def _check_precomputation(config: TrainConfig) -> Iterator[Finding]:
    data = config.data
    if not data.precompute_conditions:
        return
    if config.changed("precompute_batch_size") and config.model.enable_slicing:
        yield "--precompute_batch_size saves little with --enable_slicing: the VAE encodes the clips one by one"
    if data.frame_selection == "random" or data.video_reshape_mode == "random":
        yield "with --precompute_conditions, a random crop or start is drawn once per clip, not per epoch"


def _check_batch_sizes(config: TrainConfig) -> Iterator[Finding]:
    if config.optimizer.scale_lr and config.dataloader.bucket_batch_sizes:
        yield "--scale_lr follows --batch_size alone, not --bucket_batch_sizes"
    for option, entries in (
        ("bucket_batch_sizes", config.dataloader.bucket_batch_sizes),
        ("bucket_keep_prob", config.data.bucket_keep_prob),
    ):
        for bucket, count in sorted(Counter(bucket for bucket, _ in entries).items()):
            if count > 1:
                yield option, f"{'x'.join(map(str, bucket))} is set twice", "duplicate"


def check_dataset(data: DataSection, *, given: Collection[str], found: Findings) -> None:
    """Check the options of a dataset: those of the run if it has one, else its own.

    Args:
        data: the options.
        given: names of those that were given.
        found: gets errors and warnings.
    """
    found.add(_check_dataset(data, given))


def _check_dataset(data: DataSection, names: Collection[str]) -> Iterator[Finding]:
    if data.video_resolution_buckets:
        for name in ("resolutions", "frame_buckets"):
            if name in names:
                message = (
                    "cannot be combined with --video_resolution_buckets, which sets every size and length; "
                    "remove one of them"
                )
                yield name, message, "conflict"
    if data.min_ar > data.max_ar:
        yield "min_ar", f"{data.min_ar:g} is above --max_ar {data.max_ar:g}", "conflict"
    if data.dataset is None:
        yield from _check_source(data, names)
        for option in fields().values():
            if option.scope == "dataset" and option.name in names:
                yield from check_needs(option.name, partial(getattr, data))
        return
    for name in ("data_root", "dataset_file", "hf_dataset"):
        if getattr(data, name) is not None:
            yield (
                name,
                (
                    "cannot be combined with --dataset FILE, which names the datasets; set it in the file, or remove "
                    "--dataset"
                ),
                "conflict",
            )


def _check_source(data: DataSection, names: Collection[str]) -> Iterator[Finding]:
    if not data.is_named:
        yield (
            "data_root",
            "no data: set --data_root (a directory), --dataset_file, --hf_dataset or --dataset",
            "required",
        )
    if data.hf_dataset is not None and data.dataset_file is not None:
        yield (
            "hf_dataset",
            "cannot be combined with --dataset_file, which names another dataset; remove one of them",
            "conflict",
        )
    if data.caption_columns and "caption_column" in names:
        yield "caption_columns", "cannot be combined with --caption_column; remove one of them", "conflict"
    is_table = data.dataset_file is not None and data.dataset_file.suffix.lower() in _TABLES
    if data.caption_lines and (is_table or data.hf_dataset is not None):
        yield "--caption_lines has no effect without .txt files next to the clips; use a list for several captions"
    if data.caption_columns and data.dataset_file is None and data.hf_dataset is None:
        yield "--caption_columns has no effect without columns: use a .csv, .json, .jsonl, .parquet or .tar file"
