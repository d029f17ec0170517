"""Runs with frame conditioning: in training, as the context of windows, in validation and by `finetrainers sample`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused_options

from finetrainers.cli.sample import sample_command
from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.config.prompts import ValidationPrompt
from finetrainers.config.sections import ModelSection
from finetrainers.config.target import TargetDevice
from finetrainers.data.reading.items import DataError
from finetrainers.methods import registry
from finetrainers.methods.sft_spec import SupervisedFinetuning
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.models.registry import get_family
from finetrainers.plan.preflight import option_findings, preflight
from finetrainers.training.sampling import sample_prompts
from finetrainers.utils.video import read_comment, write_mp4


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and a video whose frames get brighter by 10."""
    folder = tmp_path_factory.mktemp("media")
    for name, shade in (("first", 30), ("last", 220)):
        Image.new("RGB", (64, 64), (shade, shade, shade)).save(folder / f"{name}.png")
    frames = np.arange(20, dtype=np.uint8)[:, None, None, None] * np.full((1, 64, 64, 3), 10, dtype=np.uint8)
    write_mp4(folder / "clip.mp4", frames, fps=25)
    return folder


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as error:
        preflight(load_config(**values))
    return str(error.value)


@pytest.mark.rotating
def test_training_and_validation_give_frames_and_a_run_resumes_exactly(
    options: Callable[..., dict], run: Callable[..., Any], make_clips: Callable[..., Path], media: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    prompts = [
        {"prompt": "a", "size": "33x64x64", "video_prefix": f"{media / 'clip.mp4'}:17",
         "last_image": str(media / "last.png")},
        {"prompt": "b", "size": "17x64x64", "image": str(media / "first.png"), "last_image": str(media / "last.png")},
    ]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    given, requests = [], []
    condition = LTXVideoSpec.condition

    def record(spec: Any, batch: Any, x0: Any, frames: Any, stats: Any) -> Any:
        given.extend((index >> 32, tuple(row)) for (_, index), row in zip(batch.sample_keys, frames, strict=True))
        return condition(spec, batch, x0, frames, stats)

    def recorded(spec: Any, parts: Any, wanted: Any) -> Any:
        asked = [*wanted]
        requests.extend(one.request for one in asked)
        return sample_prompts(spec, parts, asked)

    monkeypatch.setattr(LTXVideoSpec, "condition", record)
    monkeypatch.setattr("finetrainers.training.callbacks.validation.sample_prompts", recorded)
    values = options(
        "ltx_video", data_root=str(make_clips(2, frames=33)), video_resolution_buckets=["33x64x64"],
        sliding_window_size=17, sliding_window_stride=8, frame_conditioning="last=0.5,first+last=0.5", window_context=1,
        train_steps=6, batch_size=2, checkpointing_steps=3, validation_frame_rate=25.0,
        validation_prompts=str(tmp_path / "prompts.jsonl"), validation_steps=6, validation_at_start=False,
        validation_inference_steps=2,
    )  # fmt: skip
    whole = run(**values)
    # Of each clip the first window is given what is drawn, and the two others their context.
    assert {frames for number, frames in given if number > 0} == {(0,)}
    drawn = {frames for number, frames in given if number == 0}
    assert drawn
    assert drawn <= {(2,), (0, 2)}
    assert re.search(r"\b4 windows .* 1 frame .*\(--window_context 1\)", capsys.readouterr().out)
    first, second = requests
    shades = (first.prefix.mean((0, 1, 3, 4)) / 2 + 0.5) * 255
    torch.testing.assert_close(shades, 10.0 * torch.arange(3, 20), rtol=0, atol=3.0)  # the last 17 frames
    assert [one.last_image.getpixel((0, 0))[0] for one in requests] == [220, 220]
    assert second.image.getpixel((0, 0))[0] == 30
    videos = sorted((whole.root / "samples" / "step-000006").glob("*.mp4"))
    comments = [read_comment(video).rpartition(" | ")[2] for video in videos]
    assert re.search(r" 17 frames .*clip\.mp4, .*last\.png", comments[0])
    assert re.search(r"first\.png, .*last\.png", comments[1])

    again = {**values, "output_dir": str(tmp_path / "again")}
    run(**{**again, "train_steps": 3, "validation_steps": None})
    resumed = run(**again, resume_from_checkpoint="latest")
    assert resumed.curve("loss", "grad_norm") == whole.curve("loss", "grad_norm")
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in resumed.weights.items())

    # The same frames are given by the command, and a clip with other ones is another clip.
    out, place = tmp_path / "out", str(whole.root)
    assert sample_command([place, "--output_dir", str(out)]) == 0
    other = [
        "--prompts",
        "b",
        "--image",
        str(media / "first.png"),
        "--last_image",
        str(media / "first.png"),
        "--size",
        "17x64x64",
    ]
    assert sample_command([place, *other, "--output_dir", str(out)]) == 0
    assert sample_command([place, *other, "--output_dir", str(out)]) == 0
    ledger = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    assert [len(entry["given"]) for entry in ledger] == [2, 2, 2]
    assert ledger[0]["given"][1].startswith("prefix 17 ")
    assert len({entry["key"] for entry in ledger}) == 3
    assert re.search(r"17 frames of 64 x 64, .*first\.png, .*first\.png", (out / "index.html").read_text())
    given_frames = ValidationPrompt(prompt="a", video_prefix="x/clip.mp4:17", last_image="y/last.png").given
    assert re.search(r" 17 frames of clip\.mp4, .* last\.png$", given_frames)


class ReadsNone(SupervisedFinetuning):
    """A method that gives no frames, reads no masks, and has noise levels of its own."""

    unread: ClassVar = {
        "frame_conditioning": "", "first_frame_conditioning_p": "", "window_context": "", "mask_column": "",
        "unmasked_weight": "weigh the rewards instead", "flow_shift": "",
    }  # fmt: skip


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the method `mine`, which is that of clips but for what it declares that it does not read."""
    monkeypatch.setattr(registry.METHODS, "registered", dict(registry.METHODS.registered))
    registry.register_method("mine", "finetrainers.methods.sft:SFT", spec=ReadsNone)


@pytest.mark.parametrize(
    "given",
    [
        {"frame_conditioning": "last=0.5"}, {"first_frame_conditioning_p": 0.5}, {"window_context": 1},
        {"mask_column": ""}, {"unmasked_weight": 0.5}, {"flow_shift": 3.0},
        {"method": "grpo", "frame_conditioning": "last=0.5", "window_context": 1, "unmasked_weight": 0.5,
         "flow_weighting_scheme": "mode"},
        {"method": "nft", "init_same_noise": False, "first_frame_conditioning_p": 0.5, "mask_column": "m"},
        {"method": "refl", "num_generations": 1, "caption_dropout_p": 0.5, "loss_weight_max": 2.0},
        {"method": "dpo", "dataset_file": "pairs.csv", "window_context": 1, "sliding_window_batching": "clip"},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_a_method_does_not_read_are_warned_of(unread: None, given: dict[str, Any]) -> None:
    """By the declaration of the method, once each; those that are not set, and those that it reads, are not."""
    facts, method = get_family("ltx_video").facts, given.get("method", "mine")
    model = {"model_name": "ltx_video", "pretrained_model_name_or_path": "demo://ltx"}
    sampled = {"prompts": "p.txt", "reward": ["brightness"], "rollout_size": "17x64x64", "train_steps": 100}
    clips = {"data_root": "clips", "video_resolution_buckets": ["17x64x64"]}
    values = {**model, **(clips if method in ("mine", "dpo") else sampled), "method": method, **given}
    found = option_findings(load_config(**values), facts, [], [], device=TargetDevice("cpu"))
    assert found.errors == []
    warned = [text.split()[0] for text in found.warnings if f"--method {method}" in text]
    options = {f"--{name}" for name in given} & {
        f"--{name}" for name in registry.method_spec(load_config(**values)).unread
    }
    assert options
    assert sorted(warned) == sorted(options)
    assert not [text for text in found.warnings if text.split()[0] in options and "--method" not in text]
    if method == "mine":
        read = option_findings(load_config(**{**values, "method": "sft"}), facts, [], [], device=TargetDevice("cpu"))
        assert not [text for text in read.warnings if "--method" in text]


def test_tables_of_datasets_set_no_option_that_a_method_does_not_read(
    unread: None, make_clips: Callable[..., Path], tmp_path: Path
) -> None:
    clips = make_clips(1)
    sheet = tmp_path / "data.toml"
    table = f'[[dataset]]\ndata_root = "{clips}"\nvideo_resolution_buckets = ["9x64x64"]\n'
    sheet.write_text(f'{table}unmasked_weight = 0.2\n{table}name = "other"\nunmasked_weight = 0.5\n')
    model = {"model_name": "ltx_video", "pretrained_model_name_or_path": "demo://ltx"}
    geometry, refused = get_family("ltx_video").facts.geometry, []
    for method in ("mine", "sft"):
        config = load_config(**model, method=method, dataset=str(sheet), unmasked_weight=0.1, output_dir=str(tmp_path))
        try:
            registry.method_spec(config).survey(config, geometry)
        except DataError as error:
            refused += [method, *(message.partition(":")[0] for message in error.problems)]
    assert refused == ["mine", clips.name, "other"]


@pytest.mark.parametrize("method", ["sft", "mine"])
def test_what_is_not_read_is_not_announced(
    unread: None, method: str, options: Callable[..., dict], run: Callable[..., Any], make_clips: Callable[..., Path],
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    shutil.copytree(make_clips(1, frames=33), tmp_path / "clips")
    [clip] = (tmp_path / "clips").glob("*.mp4")
    Image.new("L", (64, 64), 128).save(clip.with_suffix(".mask.png"))
    run(**options(
        data_root=str(tmp_path / "clips"), video_resolution_buckets=["33x64x64"], sliding_window_size=17,
        sliding_window_stride=16, frame_conditioning="last=0.5", window_context=1, method=method, train_steps=1,
    ))  # fmt: skip
    said = capsys.readouterr().out
    announced = [text in said for text in ("frame-conditioning", "of context", "a mask, which")]
    assert announced == [method == "sft"] * 3


def test_only_windows_are_given_context(
    options: Callable[..., Any],
    run: Callable[..., Any],
    make_clips: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the later chunks of another dataset."""
    given: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    condition = LTXVideoSpec.condition

    def record(spec: Any, batch: Any, x0: Any, frames: Any, stats: Any) -> Any:
        for (_, index), row in zip(batch.sample_keys, frames, strict=True):
            given.setdefault((index & 0xFFFF, index >> 32), set()).add(tuple(row))
        return condition(spec, batch, x0, frames, stats)

    monkeypatch.setattr(LTXVideoSpec, "condition", record)
    clips = make_clips(1, frames=34)
    (tmp_path / "data.toml").write_text(
        f'[[dataset]]\ndata_root = "{clips}"\nsliding_window_size = 17\nsliding_window_stride = 8\n'
        'video_resolution_buckets = ["33x64x64"]\n'
        f'[[dataset]]\ndata_root = "{clips}"\nframe_selection = "chunk"\nvideo_resolution_buckets = ["17x64x64"]\n'
    )
    values = options(
        "ltx_video", dataset=str(tmp_path / "data.toml"), frame_conditioning="", window_context=1,
        train_steps=5,
    )  # fmt: skip
    del values["data_root"], values["video_resolution_buckets"]
    run(**values)
    within = {(0, 1): {(0,)}, (0, 2): {(0,)}}
    assert given == {(0, 0): {()}, **within, (1, 0): {()}, (1, 1): {()}}


@pytest.mark.rotating
@pytest.mark.parametrize("family", ["cogvideox", "hunyuan_video"])
def test_image_to_video_weights_are_given_frames_on_their_channels(
    family: str, options: Callable[..., dict], run: Callable[..., Any], make_clips: Callable[..., Path], media: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    image, last, clip = (str(media / name) for name in ("first.png", "last.png", "clip.mp4"))
    prompts = [
        {"prompt": "a", "size": "9x64x64", "image": image, "last_image": last},
        {"prompt": "b", "size": "9x64x64", "video_prefix": f"{clip}:5"},
        {"prompt": "c", "size": "9x64x64", "image": image},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    cls, told = type(get_family(family).load(ModelSection(model_name=family, pretrained_model_name_or_path="x"))), []
    predict = cls.predict

    def record(self: Any, network: Any, x: Any, t: Any, conditions: Any, meta: Any) -> Any:
        further = meta.extra.get("further_frames")
        frames = [] if further is None else further[0].flatten(2).abs().amax((0, 2)).nonzero().flatten().tolist()
        told.append([0] * bool(meta.extra["first_frame"].any()) + frames)
        return predict(self, network, x, t, conditions, meta)

    monkeypatch.setattr(cls, "predict", record)
    done = run(**options(
        family, version="i2v", data_root=str(make_clips(1, frames=33)), video_resolution_buckets=["33x64x64"],
        sliding_window_size=9, sliding_window_stride=8, frame_conditioning="first+last=1", window_context=2,
        train_steps=4, validation_prompts=str(tmp_path / "prompts.jsonl"), validation_steps=4,
        validation_inference_steps=2, validation_frame_rate=25.0,
    ))  # fmt: skip
    assert sorted(told) == [[0, 1], [0, 1], [0, 1], [0, 2]]  # of four windows the first is given what is drawn
    assert len([*(done.root / "samples" / "step-000004").glob("*.mp4")]) == 3


def test_what_channels_leave_no_choice_in(options: Callable[..., dict], media: Path) -> None:
    last, sampled = str(media / "last.png"), {"validation_prompts": "a@@@9x64x64", "validation_steps": 1}

    def said(family: str = "cogvideox", version: str = "i2v", **values: Any) -> str:
        return refusal(**options(family, version=version, **values))

    assert "--validation_images: " in said(**sampled, validation_last_images=last)
    slices = {"sliding_window_size": 9, "sliding_window_latents": "slice"}
    assert re.search("--sliding_window_latents: .* encode", said(frame_conditioning="last=1", **slices))
    assert re.search("--frame_conditioning: prefix:9 .* 9 frames", said(frame_conditioning="prefix:9=0.1"))
    for family, version, expected in (
        ("hunyuan_video", "latent_concat", "hunyuan_video .*, not last"),
        ("hunyuan_video", "token_replace", "hunyuan_video .*, not last"),
        ("hunyuan_video", "t2v", "hunyuan_video does not support "),
        ("cogvideox", "5b", "cogvideox does not support "),
    ):
        assert re.search(f"--frame_conditioning: .*{expected}", said(family, version, frame_conditioning="last=1"))


def test_what_does_not_fit_is_refused_at_the_start(options: Callable[..., dict], media: Path) -> None:
    clip, last, first = (str(media / name) for name in ("clip.mp4", "last.png", "first.png"))

    def preflight_sampled(size: str = "33x64x64", family: str = "ltx_video", **more: str) -> None:
        sampled = {"validation_prompts": f"a@@@{size}", "validation_steps": 1, "validation_frame_rate": 25.0}
        preflight(load_config(**options(family, **sampled, **more)))

    def said(*values: str, **more: str) -> str:
        with pytest.raises(ConfigError) as caught:
            preflight_sampled(*values, **more)
        return str(caught.value)

    other = said(family="cogvideox", validation_last_images=last, validation_video_prefixes=clip)
    assert re.search("--validation_last_images: .* cogvideox .*--list_models", other)
    assert re.search("--validation_video_prefixes: .* cogvideox .*--list_models", other)
    for medium, place in (("validation_images", first), ("validation_videos", clip)):
        both = said(validation_video_prefixes=clip, **{medium: place})
        assert both.startswith("1 problem ")
        assert "--validation_video_prefixes: " in both
    with refused_options(("--validation_last_images", "not_found"), ("--validation_video_prefixes", "not_found")) as no:
        preflight_sampled(validation_last_images="no.png", validation_video_prefixes="no.mp4:9")
    assert "no.png" in str(no.value)
    assert "no.mp4;" in str(no.value)
    for place, size, expected in (
        (clip, "17x64x64", " 20 frames at 25 fps;.* 17 frames .* 9; .* FILE:9,"),
        (f"{clip}:8", "33x64x64", r" 8 .* 8\*k\+1; .* FILE:1$"),
        (f"{clip}:0", "33x64x64", r" 0 .* 8\*k\+1; .* FILE:1$"),
        (f"{clip}:25", "65x64x64", ", not 25; .* FILE:17, "),
        (f"{clip}:25", "17x64x64", ", not 25; .* FILE:9$"),
        (f"{clip}:50", "65x64x64", r" 50 .* 8\*k\+1; .* FILE:17$"),  # no more than the video has
        (f"{clip}:50", "17x64x64", r" 50 .* 8\*k\+1; .* FILE:9$"),  # or than the sample has room for
        (clip, "1x64x64", " 20 frames at 25 fps, [^0-9]*$"),
    ):
        with refused_options(("--validation_video_prefixes", "mismatch")) as refused:
            preflight_sampled(size, validation_video_prefixes=place)
        assert re.search(expected, str(refused.value))
    ending = said("25x64x64", validation_video_prefixes=f"{clip}:17", validation_last_images=last)
    assert re.search("--validation_video_prefixes: .* 25 frames .* 9; .* FILE:9,", ending)
    with refused_options(("--validation_last_images", "conflict")) as refused:
        preflight_sampled("9x64x64", validation_images=first, validation_last_images=last)
    assert " 9 frames" in str(refused.value)
    scored = media.parent / "scored.jsonl"  # its prompts are named by their own option
    scored.write_text(json.dumps({"prompt": "a", "size": "9x64x64", "image": first, "last_image": last}))
    rewarded = {"eval_prompts": str(scored), "eval_reward": ["brightness"], "eval_steps": 1}
    with refused_options(("--eval_prompts", "conflict")) as refused:
        preflight(load_config(**options("ltx_video", **rewarded)))
    assert " 9 frames" in str(refused.value)
    assert re.search("--eval_prompts: last_image: .* cogvideox ", refusal(**options("cogvideox", **rewarded)))
    colon = media / "clip:5"  # a file of this name is not one of another name with a number of frames
    assert ValidationPrompt(prompt="a", video_prefix=str(colon)).prefix == (media / "clip", 5)
    colon.touch()
    assert ValidationPrompt(prompt="a", video_prefix=str(colon)).prefix == (colon, None)
    # Lengths are compared with the model's latent frames also where the data cannot be read, and named once.
    wrong = {"frame_conditioning": "prefix:8=0.1,suffix:3=0.1"}
    for said_of in (
        refusal(**options("ltx_video", **wrong, data_root="nowhere")),
        refusal(**options("ltx_video", **wrong)),
    ):
        assert len(re.findall(r"prefix:8 .*1 \+ .* 8 frames", said_of)) == 1
        assert len(re.findall("suffix:3 .* 8 frames", said_of)) == 1
    assert re.search("prefix:17 .* 9 frames", refusal(**options("ltx_video", frame_conditioning="prefix:17=0.1")))
