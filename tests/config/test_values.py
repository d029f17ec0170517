"""The text forms of areas and of what single buckets are given, from flags and from files, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetrainers.config.errors import ConfigError
from finetrainers.config.flags import parse_flags
from finetrainers.config.load import dump_toml, load_config

COMMON = {"model_name": "m", "pretrained_model_name_or_path": "r"}


def test_flags_files_and_dumps_agree(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model_name = "m"\npretrained_model_name_or_path = "r"\n[data]\nresolutions = [[572, 720], 512, "640x640"]\n'
        'frame_buckets = [1, 33]\nbucket_keep_prob = ["49x512x768=0.5"]\n[dataloader]\nbucket_batch_sizes = ["512x768=8"]\n'
    )
    flags = (
        "--model_name m --pretrained_model_name_or_path r --resolutions 572x720 512 640 --frame_buckets 1 33 "
        "--bucket_keep_prob 49x512x768=0.5 --bucket_batch_sizes 1x512x768=8"
    )
    loaded = load_config(file)
    assert loaded.data.resolutions == [(572, 720), (512, 512), (640, 640)]
    assert loaded.data.bucket_keep_prob == [((49, 512, 768), 0.5)]
    assert loaded.dataloader.bucket_batch_sizes == [((1, 512, 768), 8)]
    assert parse_flags(flags.split())[0] == loaded
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(loaded))
    assert load_config(again) == loaded
    assert 'resolutions = [\n    "572x720",\n    "512",\n' in again.read_text()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"resolutions": ["big"]}, "'big' is neither the side of a square, for example 512, nor HEIGHTxWIDTH"),
        ({"resolutions": ["0x64"]}, "'0x64' is neither"),
        ({"resolutions": [-5]}, "must be at least 1"),
        ({"frame_buckets": [0]}, "must be at least 1"),
        ({"bucket_keep_prob": ["49x512x768"]}, "'49x512x768' is not BUCKET=VALUE, for example 49x512x768=2"),
        ({"bucket_keep_prob": ["49x512x768=1.5"]}, "must be at most 1"),
        ({"bucket_keep_prob": ["49x512x768=0"]}, "must be above 0"),
        ({"bucket_batch_sizes": ["49x512x768=half"]}, "not a whole number"),
        ({"bucket_batch_sizes": ["49x512x768=0"]}, "must be at least 1"),
        ({"epoch_end": "dropp"}, "did you mean 'drop'"),
    ],
)
def test_mistakes(options: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(**COMMON, **options)
    assert expected in str(caught.value)
