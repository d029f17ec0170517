"""The text forms of areas and of what single buckets are given, from flags and from files, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refused_options

from finetrainers.config.flags import parse_flags
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.prompts import parse_eval_prompts, parse_validation_prompts
from finetrainers.config.sample import SampleSection
from finetrainers.config.watch import Preset

COMMON = {"model_name": "m", "pretrained_model_name_or_path": "r"}


def test_flags_files_and_dumps_agree(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model_name = "m"\npretrained_model_name_or_path = "r"\n[data]\nresolutions = [[572, 720], 512, "640x640"]\n'
        'frame_buckets = [1, 33]\nbucket_keep_prob = ["49x512x768=0.5"]\n'
        '[dataloader]\nbucket_batch_sizes = ["512x768=8"]\n'
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
    ("options", "kind", "value"),
    [
        ({"resolutions": ["big"]}, "invalid", "512, or HEIGHTxWIDTH"),
        ({"frame_buckets": [0]}, "invalid", "at least 1,"),
        ({"bucket_keep_prob": ["49x512x768"]}, "invalid", "got '49x512x768'"),
        ({"bucket_keep_prob": ["49x512x768=1.5"]}, "invalid", "at most 1,"),
        ({"bucket_keep_prob": ["49x512x768=0"]}, "invalid", "above 0,"),
        ({"bucket_batch_sizes": ["49x512x768=half"]}, "invalid", "'half'"),
        ({"bucket_batch_sizes": ["49x512x768=0"]}, "invalid", "at least 1,"),
        ({"epoch_end": "dropp"}, "unknown", "'drop'?"),
    ],
)
def test_mistakes(options: dict, kind: str, value: str) -> None:
    with refused_options((next(iter(options)), kind)) as caught:
        load_config(**COMMON, **options)
    assert value in str(caught.value)


@pytest.mark.parametrize("option", ["video_resolution_buckets", "image_resolution_buckets", "resolutions",
    "rollout_size",
    "bucket_keep_prob", "bucket_batch_sizes", "validation_prompts", "eval_prompts", "sample", "preset"])  # fmt: skip
def test_sizes_without_pixels_or_beyond_all_videos_are_refused(option: str, tmp_path: Path) -> None:
    """Zeros in any spelling, negative and astronomic sides are refused, as text and as numbers; valid sizes pass."""

    def read(*size: int | str) -> None:
        text = "x".join(map(str, size))
        if option in ("sample", "preset"):
            section = (SampleSection if option == "sample" else Preset).model_validate({"size": text})
            assert section.size == size
            return
        if option in ("validation_prompts", "eval_prompts"):
            (tmp_path / "p.txt").write_text(f"a cat@@@{text}")
            config = load_config(**COMMON, **{option: str(tmp_path / "p.txt")})
            (parse_eval_prompts if option == "eval_prompts" else parse_validation_prompts)(config.validation)
        elif option == "rollout_size":
            load_config(**COMMON, rollout_size=text)
        elif "bucket_" in option:
            load_config(**COMMON, **{option: [f"{text}=1"]})
        else:
            load_config(**COMMON, **{option: [text]})
            load_config(**COMMON, **{option: [size]})

    frames = () if option in ("image_resolution_buckets", "resolutions") else (9,)
    read(*frames, 64, 96)
    for sides in ((64, 0), (64, "000"), ("00", 96), (64, -96), (64, 10**8), ("9" * 5000, 96)):
        with pytest.raises(ValueError, match=r"height|HEIGHT|BUCKET"):
            read(*frames, *sides)
    if frames:
        for count in ("0", "00", -1, 10**7):
            with pytest.raises(ValueError, match=r"height|HEIGHT|BUCKET"):
                read(count, 64, 96)
