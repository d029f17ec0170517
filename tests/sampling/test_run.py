"""Samples of runs: as validation drew them, whatever else is drawn.

Existing samples are not drawn again, and one clip's failure leaves the others alone.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import av
import numpy as np
import pytest
from PIL import Image

from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.sampling.ledger import SampleIndex
from finetrainers.sampling.weights import find_target
from finetrainers.training.callbacks import validation

PROMPTS = ("a red ball", "a blue ball on a hill")


@pytest.fixture
def validated(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Path, dict[tuple[int, int, int], np.ndarray]]]:
    """`validated(**options)`: a run of two steps, and the frames of its validation by step, prompt and video."""

    def start(**more: Any) -> tuple[Path, dict[tuple[int, int, int], np.ndarray]]:
        found: dict[tuple[int, int, int], np.ndarray] = {}
        write = validation.write_sample

        def keep(samples: Path, name: str, clip: np.ndarray, *, step: int, **named: Any) -> Path:
            found[step, int(name[:2]), int(name[-1])] = clip
            return write(samples, name, clip, step=step, **named)

        monkeypatch.setattr(validation, "write_sample", keep)
        done = run(
            **options(
                train_steps=2, checkpointing_steps=1, validation_steps=1, validation_prompts=":::".join(PROMPTS),
                num_validation_videos=2, validation_inference_steps=2, seed=5, **more,
            )
        )  # fmt: skip
        return done.root, found

    return start


#: Options that decide over the numbers of samples, spread over the kinds of weights.
KINDS = {
    "lora": {"transformer_dtype": "bf16", "quantize_frozen": "int8", "quantize_skip_modules": ["^proj_out$"]},
    "ema": {"use_ema": True, "ema_decay": 0.5, "use_rslora": True, "use_dora": True, "vae_dtype": "bf16"},
    "full-finetune": {"training_type": "full-finetune", "mixed_precision": "bf16"},
}


@pytest.mark.rotating
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_sampled_as_it_was_validated(
    kind: str, validated: Callable[..., Any], sample: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    root, frames = validated(**KINDS[kind])
    assert not np.array_equal(frames[1, 0, 0], frames[2, 0, 0])
    steps = [root / "checkpoints" / f"step-{step}" for step in (1, 2)]
    code, found = sample(*reversed(steps), "--seed", 6, "--prompts", PROMPTS[1], "--output_dir", root.parent / "steps")
    assert code == 0
    assert dict.fromkeys(found, 0) == {
        f"a-blue-ball-on-a-hill_step-{step}{'' if kind == 'full-finetune' else '_scale-1'}_seed-6.mp4": 0
        for step in (1, 2)
    }
    for (_, clip), step in zip(sorted(found.items()), (1, 2), strict=True):
        assert np.array_equal(clip, frames[step, 1, 1])
    assert find_target(os.path.relpath(steps[0])).home == Path(os.path.relpath(root))  # as it was spelled
    assert "columns: step 1 | step 2" in capsys.readouterr().out

    code, found = sample(root, "--num", 2)
    assert code == 0
    expected = [frames[2, 0, 0], frames[2, 0, 1], frames[2, 1, 0], frames[2, 1, 1]]
    assert "4 clips of" in capsys.readouterr().out
    drawn = [np.array_equal(clip, other) for clip, other in zip(found.values(), expected, strict=True)]
    assert drawn == [True] * 4

    if kind == "ema":
        for raw in (steps[1], root):  # the newest checkpoint has the weights that the result's average is of
            code, found = sample(raw, "--no_ema", "--prompts", PROMPTS[0], "--output_dir", root / "raw" / raw.name)
            assert not np.array_equal(next(iter(found.values())), frames[2, 0, 0])
    if kind == "lora":
        # At the frame rate of the clips, which is an input of this model, and so does who follows the card.
        with av.open(str(next((root / "samples" / "sample").glob("*.mp4")))) as container:
            assert container.streams.video[0].average_rate == 8
        with av.open(str(next((root / "samples" / "step-000002").glob("*.mp4")))) as container:
            assert container.streams.video[0].average_rate == 8
        card = (root / "README.md").read_text()
        assert ("frame_rate=8," in card, "fps=8, output_path" in card, "seed 5, 8 fps" in card) == (True, True, True)
        # A checkpoint that was copied elsewhere brings its options; a run without a result has its newest checkpoint.
        shutil.copytree(steps[1], root.parent / "copied")
        (root / "pytorch_lora_weights.safetensors").unlink()
        for place in (root.parent / "copied", root):
            code, found = sample(place, "--output_dir", root.parent / f"of-{place.name}")
            assert [np.array_equal(*pair) for pair in zip(found.values(), expected[::2], strict=True)] == [True, True]


def test_what_is_there_is_not_drawn_again(
    validated: Callable[..., Any], sample: Callable[..., Any], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    root, frames = validated()
    folder = root / "samples" / "sample"
    code, found = sample(root)
    assert (code, len(found)) == (0, 2)
    code, found = sample(root, "--num", 2)
    assert (code, len(found)) == (0, 2)
    assert all("seed-6" in name for name in found)
    capsys.readouterr()
    cut = next(folder.glob("a-red*seed-5.mp4"))
    cut.write_bytes(cut.read_bytes()[:100])
    with open(folder / "ledger.jsonl", "a") as file:
        file.write('{"key": "tru')
    code, found = sample(root, "--num", 2, "--enable_tiling")  # other frames, under other names
    assert (code, len(found), len(list(folder.glob("*.mp4")))) == (0, 4, 8)
    assert all(name.endswith("-2.mp4") for name in found if not name.endswith("seed-5.mp4"))
    with monkeypatch.context() as patch:  # a process that is killed between a clip and its line
        patch.setattr(SampleIndex, "add", mock.Mock(side_effect=KeyboardInterrupt))
        sample(root, "--num", 2, "--num_inference_steps", 3)
    assert len(list(folder.glob("*.mp4"))) == 9
    code, found = sample(root, "--num", 2, "--num_inference_steps", 3)
    assert (code, len(found), len(list(folder.glob("*.mp4")))) == (0, 4, 12)
    code, found = sample(root, "--num", 2)
    assert len(found) == 1
    assert np.array_equal(next(iter(found.values())), frames[2, 0, 0])
    assert re.search(r"\b1 clip sampled, 3 ", capsys.readouterr().out)

    picture = Image.open(folder / "sheet.png")
    assert picture.width >= 900
    page = (folder / "index.html").read_text()
    videos = re.findall(r'src="data:video/mp4;base64,([^"]+)"', page)
    assert len(videos) == 4
    for video in videos:
        with av.open(io.BytesIO(base64.b64decode(video))) as container:
            assert len(list(container.decode(video=0))) == 9
    assert not re.search(r'(src|href)="(?!data:)|https?://|@import', page)
    assert [text in page for text in (*PROMPTS, "seed 5", "seed 6")] == [True] * 4
    generators = {
        record["seed"]: record["generator_seed"] for record in map(json.loads, _whole(folder / "ledger.jsonl"))
    }
    assert f"manual_seed({generators[5]})" in page


def _whole(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.endswith("}")]


def test_one_clip_fails_alone(
    validated: Callable[..., Any], sample: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    root, frames = validated()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(tmp_path / "image.png")
    lines = [
        {"prompt": PROMPTS[0]},
        {"prompt": "spoilt"},
        {"prompt": "<b>third</b>"},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw = LTXVideoSpec.sample
    calls = []

    def fail(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) in (2, 3, 4):  # one of the first prompt's clips, both of the second's
            raise RuntimeError("no luck")
        return draw(self, *arguments)

    monkeypatch.setattr(LTXVideoSpec, "sample", fail)
    arguments = (root, "--prompts", tmp_path / "prompts.jsonl", "--num", 2)
    code, found = sample(*arguments)
    assert (code, len(found), len(calls)) == (1, 3, 6)
    assert np.array_equal(found["a-red-ball_result_scale-1_seed-5.mp4"], frames[2, 0, 0])
    err = capsys.readouterr().err
    assert err.count("not sampled: ") == 3
    assert f"seed 6, {PROMPTS[0]!r}: RuntimeError: no luck" in err
    page = (root / "samples" / "sample" / "index.html").read_text()
    assert "no luck" in page
    assert "<b>third" not in page
    lines[1]["image"] = str(tmp_path / "image.png")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, found = sample(*arguments)
    assert (code, len(found)) == (0, 3)


@pytest.mark.rotating
def test_processes_share_the_clips(validated: Callable[..., Any], python: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = validated()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713", "ACCELERATE_USE_CPU": "true"}
    ranks = [
        python(
            "-m",
            "finetrainers",
            "sample",
            str(root),
            "--num",
            "2",
            cwd=root,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            **shared,
        )
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    folder = root / "samples" / "sample"
    lines = [len(_whole(folder / name)) for name in ("ledger.jsonl", "ledger.rank-1.jsonl")]
    assert lines == [2, 2]
    written = {path.name: path.read_bytes() for path in folder.glob("*.mp4")}
    assert len(written) == 4
    assert "4 clips sampled" in ranks[0].stdout
    assert ranks[1].stdout == ""
    # The same clips as in validation, whichever process drew them.
    for seed, video in ((5, 0), (6, 1)):
        theirs = root / "samples" / "step-000002" / f"01-a-blue-ball-on-a-hill-{video}.mp4"
        with (
            av.open(str(theirs)) as a,
            av.open(str(folder / f"a-blue-ball-on-a-hill_result_scale-1_seed-{seed}.mp4")) as b,
        ):
            pairs = zip(a.decode(video=0), b.decode(video=0), strict=True)
            assert all(np.array_equal(x.to_ndarray(), y.to_ndarray()) for x, y in pairs)
