"""The sentences of messages, all in this table: tests elsewhere compare kind and place (tests/refusals.py), so that a
wording changes in the code and here.

A row is a function that raises an error or returns a message, and the message. It may take a new directory, which the
message names `DIR`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Row = tuple[Callable[..., Any], str]


def load(**options: Any) -> Any:
    """Load a configuration of the required options and these."""
    from finetrainers.config.load import load_config

    required = {"model_name": "ltx_video", "pretrained_model_name_or_path": "model", "data_root": "data"}
    return load_config(**{"output_dir": "run", **required, **options})


def read_data(folder: Path, files: dict[str, str], **options: Any) -> Any:
    """Write files to a directory and read the dataset of these options, whose paths are relative to it."""
    from finetrainers.config.sections import DataSection
    from finetrainers.data.reading.datasets import read_all, read_datasets

    for name, text in files.items():
        (folder / name).write_text(text, encoding="latin-1")
    paths = {name: folder / options[name] for name in ("data_root", "dataset_file", "dataset") if name in options}
    return read_all(read_datasets(DataSection(**{**options, **paths})), folder / "media")


def plan_image(folder: Path, **options: Any) -> Any:
    """Plan a dataset of one image, for a model that takes 8k + 1 frames and multiples of 16 pixels."""
    from PIL import Image

    from finetrainers.config.geometry import Geometry
    from finetrainers.data.inspect.survey import survey_dataset

    Image.new("RGB", (48, 32)).save(folder / "a.png")
    (folder / "a.txt").write_text("a picture")
    geometry = Geometry(temporal=8, spatial=16, patch=1, patch_t=1, fps=8)
    config = load(data_root=folder, probe_dir=folder / "probes", **options)
    return survey_dataset(config, geometry).checked()


TWO_FILES = {"data_root": "", "video_column": "videos.txt", "caption_column": "prompts.txt"}

CONFIG: list[Row] = [
    (lambda: load(rnk=8), "1 problem with this configuration:\n  - rnk: unknown option 'rnk'; did you mean 'rank'?"),
]
DATA: list[Row] = [
    (
        lambda folder: read_data(folder, {"videos.txt": "a.mp4\nb.mp4\n", "prompts.txt": "one\n"}, **TWO_FILES),
        "DIR/videos.txt has 2 lines but DIR/prompts.txt has 1 line; line n of one belongs to line n of the other, and "
        "an empty caption is an empty line",
    ),
    (
        lambda folder: read_data(folder, {"videos.txt": "a.mp4\n", "prompt.txt": "one\n"}, **TWO_FILES),
        "'DIR' holds 'videos.txt' but not 'prompts.txt' (did you mean 'prompt.txt'?) (set by `video_column` and "
        "`caption_column`)",
    ),
    (
        lambda folder: read_data(folder, {"videos.txt": "\nb.mp4\n", "prompts.txt": "one\ntwo\n"}, **TWO_FILES),
        "DIR: 1 problem\n  - videos.txt line 1 is empty, but prompts.txt has a caption there",
    ),
    (
        lambda folder: read_data(folder, {"videos.txt": "a.mp4\n", "prompts.txt": "caf\xe9\n"}, **TWO_FILES),
        "DIR/prompts.txt is not UTF-8 text: byte 3 is 0xe9",
    ),
    (
        lambda folder: read_data(folder, {}, data_root=""),
        "no clips in 'DIR': put videos or images there, each with a text file of the same name that holds its caption "
        "(dog.mp4 and dog.txt). Or give --dataset_file, a table of paths and captions, or the two text files "
        "--video_column and --caption_column with a line for each clip",
    ),
    (
        lambda folder: read_data(folder, {"clips.csv": "video,text\n"}, data_root="clips.csv"),
        "data_root 'DIR/clips.csv' is not a folder but a file; if it lists clips, give --dataset_file 'DIR/clips.csv'",
    ),
    (
        lambda folder: read_data(folder, {"a.mp4": "", "a.mask.png": "", "a.mask.mp4": ""}, data_root=""),
        "DIR: 1 problem\n  - a.mask.mp4 and a.mask.png are masks of one clip; keep one of them",
    ),
    (
        lambda folder: read_data(folder, {"clips.csv": "video,txet\na.mp4,one\n"}, dataset_file="clips.csv"),
        "clips.csv line 1: no column 'text' (set by `caption_column`); it has: video, txet; did you mean 'txet'?",
    ),
    (
        lambda folder: read_data(folder, {"clips.csv": "video,text,text\na.mp4,a,b\n"}, dataset_file="clips.csv"),
        "clips.csv line 1: column 'text' is there twice; rename one",
    ),
    (
        lambda folder: read_data(
            folder, {"c.jsonl": '{"video": 3, "text": ""}\n{"video": "a", "text": NaN}\n[]\n'}, dataset_file="c.jsonl"
        ),
        "DIR/c.jsonl: 3 problems\n  - c.jsonl line 1: column 'video' must be a path, got 3\n"
        "  - c.jsonl line 2 is not JSON: NaN is no JSON value; write null, or leave the key out\n"
        "  - c.jsonl line 3: must be an object, got []",
    ),
    (
        lambda folder: read_data(folder, {"clips.xlsx": ""}, dataset_file="clips.xlsx"),
        "dataset_file 'DIR/clips.xlsx' must end in .csv, .json, .jsonl, .parquet or .tar",
    ),
    (
        lambda folder: read_data(folder, {}, dataset_file="clips-{0..1}.tar"),
        "dataset_file 'DIR/clips-{0..1}.tar': no such file\n  - DIR/clips-0.tar is not there\n"
        "  - DIR/clips-1.tar is not there",
    ),
    (
        lambda folder: read_data(
            folder,
            {"sets.toml": "max_bad_samples = 3\n[[dataset]]\ndata_roots = 'a'\nweight = 0\n[dataset.more]\nx = 1\n"},
            dataset="sets.toml",
        ),
        "DIR/sets.toml: 4 problems\n"
        "  - at the top: max_bad_samples: is the same for all datasets; make it an option of the run\n"
        "  - [[dataset]] 1: data_roots: is no option of a dataset; did you mean 'data_root'?\n"
        "  - [[dataset]] 1: more: is an unknown table\n  - [[dataset]] 1: weight: must be above 0, got 0",
    ),
    (
        lambda folder: read_data(
            folder, {"sets.toml": "[[dataset]]\ndata_root = 'a'\n[[directory]]\npath = 'b'\n"}, dataset="sets.toml"
        ),
        "DIR/sets.toml: [[dataset]] and [[directory]] are of two kinds of files; use one of them",
    ),
    (
        lambda folder: read_data(
            folder, {"sets.toml": "shuffle_tags = true\n[[directory]]\npath = 'a'\n"}, dataset="sets.toml"
        ),
        "DIR/sets.toml: 1 problem\n  - at the top: shuffle_tags: tags are not shuffled; write several captions, one a "
        "line of the .txt file, and set caption_lines",
    ),
    (
        lambda folder: plan_image(folder, video_resolution_buckets=["9x32x48"]),
        "1 of 1 file cannot be used; repair them\n  - a.png: there is no bucket for images; add one, HxW in "
        "`image_resolution_buckets`",
    ),
    (
        lambda folder: plan_image(folder, image_resolution_buckets=["32x40"], video_resolution_buckets=["16x32x48"]),
        "buckets that this model cannot train on\n  - 16x32x48: 16 frames is not 8*k+1; use 9 or 17\n"
        "  - 1x32x40: width 40 is not a multiple of 16; use 32 or 48",
    ),
    (
        lambda folder: plan_image(folder, image_resolution_buckets=["32x48"], bucket_batch_sizes=["1x32x32=2"]),
        "`bucket_batch_sizes` names buckets that are not there\n  - 1x32x32 is no bucket of this run; the nearest is "
        "1x32x48",
    ),
    (
        lambda folder: plan_image(folder, image_resolution_buckets=["32x48"], eval_num_items=1),
        "`eval_num_items` 1 leaves nothing to train on: there are 1 usable item",
    ),
    (
        lambda folder: plan_image(folder, image_resolution_buckets=["32x48"], epoch_end="drop", batch_size=2),
        "nothing to train on: no bucket has clips for a whole batch; lower --batch_size, or leave out --epoch_end drop",
    ),
]
REWARDS_AND_METHODS: list[Row] = []
MODELS: list[Row] = []
PLAN: list[Row] = []
TRAINING: list[Row] = []
RESULTS: list[Row] = []
COMMANDS: list[Row] = []

ALL = [*CONFIG, *DATA, *REWARDS_AND_METHODS, *MODELS, *PLAN, *TRAINING, *RESULTS, *COMMANDS]


@pytest.mark.parametrize("row", ALL, ids=range(len(ALL)))
def test_sentence(row: Row, tmp_path: Path) -> None:
    call, sentence = row
    try:
        message = call(tmp_path) if inspect.signature(call).parameters else call()
    except Exception as error:
        message = str(error)
    assert message.replace(str(tmp_path), "DIR") == sentence
