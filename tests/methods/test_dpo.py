"""The loss of preference pairs against a derivation in float64; how pairs are split, fetched and planned."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from derived import Setting, derive, make_batch
from every_family import FAMILIES
from refusals import problems, refused_options
from torch import Tensor, nn

from finetrainers.cli.main import main
from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.data.loading.bad_samples import BadSample
from finetrainers.data.loading.batch_sampler import MicroBatch
from finetrainers.data.loading.loader import RawBatch
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.methods.dpo.method import DPO, Pairs
from finetrainers.methods.dpo.pairs import PairFetch
from finetrainers.models.spec import Batch
from finetrainers.plan.preflight import preflight
from finetrainers.utils import exit_codes
from finetrainers.utils.video import write_mp4

#: Rows 0 and 1 are a pair, and rows 2 and 3.
KEYS = ((0, 3), (0, 3), (2, 1), (2, 1))
NETWORK, REFERENCE = nn.Identity(), nn.Identity()
BETA = 30.0


class PairSetting(Setting):
    """The trained network and the reference model give fixed answers, which differ."""

    def _predict(self, transformer: Any, x: Tensor, t: Tensor, conditions: Any, meta: Any) -> Tensor:
        answers = super()._predict(transformer, x, t, conditions, meta)
        return (0.7 * answers + 0.1 * x).detach() if transformer is REFERENCE else answers

    @contextlib.contextmanager
    def reference(self, transformer: nn.Module) -> Iterator[nn.Module]:
        assert transformer is NETWORK
        yield REFERENCE

    def dpo(self) -> DPO:
        method = DPO(self.parts)
        method.reference, method.beta = self.reference, BETA
        return method


def pairs_batch(setting: Setting, **changes: Any) -> Batch:
    """Two pairs; each clip is another, each pair has one key."""
    return replace(make_batch(setting, keys=((0, 3), (0, 4), (2, 1), (2, 5))), sample_keys=KEYS, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_against_float64(family: str, tiny_repo: Callable[..., Path]) -> None:
    """Flow matching and v-prediction; with a loss weight where there is one, which multiplies beta."""
    setting = PairSetting(tiny_repo(family), family)
    if flow := setting.process.is_flow:
        setting = PairSetting(tiny_repo(family), family, flow_weighting_scheme="sigma_sqrt")
    batch = pairs_batch(setting, weight=0.5)
    loss, metrics = setting.dpo().loss(NETWORK, Pairs(batch))
    (_, t, _, _), _ = setting.seen
    assert torch.equal(t[0::2], t[1::2])
    assert not torch.equal(t[0], t[2])
    found = derive(setting, family, batch, "train", lambda generator: float(torch.rand((), generator=generator)))
    gains, weights = [], []
    for row, sample in enumerate(found):
        torch.testing.assert_close(setting.seen[0][0][row].double(), sample["x"], rtol=1e-5, atol=1e-5)
        answer = torch.randn(sample["x"].shape, generator=torch.Generator().manual_seed(row)).double()
        reference = 0.7 * answer + 0.1 * sample["x"]
        gains.append(float(((reference - sample["target"]) ** 2).mean() - ((answer - sample["target"]) ** 2).mean()))
        weights.append(min(1 / float(sample["t"]) ** 2, 10.0) if flow else 1.0)
    margins = [BETA / 2 * weights[k] * (gains[k] - gains[k + 1]) for k in (0, 2)]
    expected = 0.5 * sum(math.log1p(math.exp(-margin)) for margin in margins) / 2
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert float(metrics["accuracy"]) == 0.5 * sum(margin > 0 for margin in margins) / 2
    assert float(metrics["margin"]) == pytest.approx(0.5 * sum(margins) / 2, rel=1e-4)
    assert float(metrics["gain_rejected"]) == pytest.approx(0.5 * (gains[1] + gains[3]) / 2, rel=1e-4)
    loss.backward()


@pytest.mark.parametrize("family", ["ltx_video", "cogvideox"])
def test_predictions_that_hardly_differ_keep_their_digits(family: str, tiny_repo: Callable[..., Path]) -> None:
    """Errors near 1 that differ by 1e-4 decide over the loss: its value and its gradient, against float64."""
    setting = PairSetting(tiny_repo(family), family)
    difference = torch.randn(64, generator=torch.Generator().manual_seed(0))

    def predict(transformer: Any, x: Tensor, t: Tensor, conditions: Any, meta: Any) -> Tensor:
        answers = Setting._predict(setting, transformer, x, t, conditions, meta)
        rows = torch.arange(4.0).view(-1, 1, 1, 1, 1)
        return (
            (answers + 3e-5 * (1 + rows) * difference[: x.shape[-1]]).detach() if transformer is REFERENCE else answers
        )

    setting.spec.predict = predict  # type: ignore[method-assign]
    method = setting.dpo()
    method.beta = 5000.0
    batch = pairs_batch(setting)
    loss, _ = method.loss(NETWORK, Pairs(batch))
    loss.backward()
    (answers, *_), samples = (
        setting.answers,
        derive(setting, family, batch, "train", lambda g: float(torch.rand((), generator=g))),
    )
    target = torch.stack([sample["target"] for sample in samples])
    rows = torch.arange(4.0).view(-1, 1, 1, 1, 1)
    reference = (answers + 3e-5 * (1 + rows) * difference[: answers.shape[-1]]).detach().double()
    prediction = answers.detach().double().requires_grad_()
    gains = ((reference - target) ** 2 - (prediction - target) ** 2).flatten(1).mean(1)
    expected = -torch.nn.functional.logsigmoid(2500.0 * (gains[0::2] - gains[1::2])).mean()
    expected.backward()
    assert answers.grad is not None
    assert prediction.grad is not None
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float((answers.grad - prediction.grad).norm()) <= 2e-6 * float(prediction.grad.norm())


def test_a_network_like_the_reference_model_prefers_nothing(tiny_repo: Callable[..., Path]) -> None:
    setting = PairSetting(tiny_repo("ltx_video"), "ltx_video")
    method = setting.dpo()
    method.reference = contextlib.nullcontext
    loss, metrics = method.loss(NETWORK, Pairs(pairs_batch(setting)))
    assert float(loss.detach()) == pytest.approx(math.log(2))
    assert (float(metrics["margin"]), float(metrics["accuracy"])) == (0.0, 0.5)


def test_pairs_stay_together_in_smaller_micro_batches(tiny_repo: Callable[..., Path]) -> None:
    batch = pairs_batch(PairSetting(tiny_repo("ltx_video"), "ltx_video"), weight=0.5)
    assert len(Pairs(batch)) == 2
    for pieces, weights in ((2, [0.25, 0.25]), (3, [0.25, 0.25, 0.0])):
        split = Pairs(batch).split(pieces)
        assert [(len(piece), piece.clips.weight) for piece in split] == [(1, weight) for weight in weights]
        assert torch.equal(torch.cat([piece.clips.moments for piece in split[:2]]), batch.moments)
        assert [piece.clips.sample_keys for piece in split[:2]] == [KEYS[:2], KEYS[2:]]


# ---- pairs of files ------------------------------------------------------------------------------------------------


def configured(folder: Path, rows: list[dict[str, str]], **changes: Any) -> Any:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config(
        method="dpo", model_name="ltx_video", pretrained_model_name_or_path="demo://ltx", dataset_file=str(path),
        video_resolution_buckets=["9x64x64", "17x64x64"], train_steps=1, lr=1e-4, output_dir=str(folder / "run"),
        **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    for name, frames in (("a", 20), ("b", 20), ("c", 20), ("short", 12)):
        pictures = np.random.default_rng(len(name)).integers(0, 255, (frames, 64, 64, 3), dtype=np.uint8)
        write_mp4(folder / f"{name}.mp4", pictures, fps=25)
    (folder / "damaged.mp4").write_bytes(b"no video")
    return folder


def test_bad_pairs_are_refused_together_before_anything_is_loaded(folder: Path) -> None:
    rows = [
        {"prompt": "fine", "chosen": "a.mp4", "rejected": "b.mp4"},
        {"prompt": "gone", "chosen": "a.mp4", "rejected": "gone.mp4"},
        {"prompt": "damaged", "chosen": "damaged.mp4", "rejected": "b.mp4"},
        {"prompt": "lengths", "chosen": "a.mp4", "rejected": "short.mp4"},
        {"prompt": "twice", "chosen": "c.mp4", "rejected": "c.mp4"},
    ]
    with refused_options(("data", "invalid")) as caught:
        preflight(configured(folder, rows))
    text = str(caught.value)
    assert "4 of 5 pairs" in text
    assert "--max_bad_samples 4" in text
    for line, reason in (
        (2, "rejected gone.mp4: "), (3, "chosen damaged.mp4: "),
        (4, "a.mp4 and short.mp4 .*17x64x64 and 9x64x64"), (5, "chosen and rejected .*c.mp4"),
    ):  # fmt: skip
        assert re.search(f"pairs.jsonl line {line}: {reason}", text)
    plan: Any = preflight(configured(folder, rows, max_bad_samples=4)).plan
    assert (plan.count, list(plan.rejected), [clip.path.name for clip in plan.encoded_clips()]) == (
        1, [0], ["a.mp4", "b.mp4"],
    )  # fmt: skip
    assert plan.warnings[0].startswith("4 pairs ")
    assert ": pairs.jsonl line 2: " in plan.warnings[0]
    uses = ["train", "skipped", "rejected", "skipped", "skipped"]
    assert [item.use for item in plan.items] == [*uses, "train", "rejected", "skipped", "skipped", "skipped"]
    with pytest.raises(ConfigError) as caught:
        preflight(configured(folder, [{"prompt": "x", "chosen": "a.mp4"}, {"chosen": "a.mp4", "rejected": "b.mp4"}]))
    [problem] = caught.value.problems
    assert problem.where == "data"
    for line, column in ((1, "rejected"), (2, "prompt")):
        assert re.search(f"line {line}: .*'{column}'", problem.message)


def test_a_check_counts_pairs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": "one", "chosen": "a.mp4", "rejected": "b.mp4"},
        {"prompt": "two", "chosen": "b.mp4", "rejected": "a.mp4"},
        {"prompt": "gone", "chosen": "a.mp4", "rejected": "gone.mp4"},
    ]
    configured(folder, rows)
    command = "check --method dpo --model_name ltx_video --pretrained_model_name_or_path demo://ltx --max_bad_samples 1"
    page, sizes = folder / "check.html", ["--video_resolution_buckets", "17x64x64", "--eval_num_items", "1"]
    arguments = [*command.split(), "--dataset_file", str(folder / "pairs.jsonl"), "--html", str(page), *sizes]
    assert main(arguments) == exit_codes.DONE
    out = capsys.readouterr().out
    assert re.search(r"^3 pairs: 1 [^,\d]*, 1 [^,\d]*, 1 ", out, re.MULTILINE)
    assert out.split()[:2] == ["bucket", "pairs"]
    assert ">pairs<" in page.read_text()


def test_options_that_pairs_have_no_use_for(folder: Path) -> None:
    row = {"prompt": "fine", "chosen": "a.mp4", "rejected": "b.mp4"}
    given: dict[str, Any] = {
        "video_column": "clip", "sliding_window_size": 3, "frame_selection": "chunk", "unmasked_weight": 0.5,
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        preflight(configured(folder, [row], **given))
    names = ("--video_column", "--sliding_window_size", "--frame_selection chunk", "--unmasked_weight")
    assert {(name, "unsupported") for name in names} <= set(problems(caught.value))
    plan: Any = preflight(configured(folder, [{**row, "mask": "a.png"}])).plan
    assert sum("'mask'" in note for note in plan.notes) == 1
    assert all(clip.mask is None for clip in plan.encoded_clips())
    with pytest.raises(ConfigError, match=r"sft .*--dpo\.beta.*--method dpo"):
        preflight(load_config(model_name="ltx_video", pretrained_model_name_or_path="demo://ltx", dpo={"beta": 3.0}))


def test_a_pair_that_cannot_be_read_is_substituted_as_a_whole(folder: Path) -> None:
    """Whichever of its clips it is; random numbers stay those of the pair that was wanted."""
    rows = [
        {"prompt": str(k), "chosen": one, "rejected": other}
        for k, (one, other) in enumerate([("a.mp4", "b.mp4"), ("b.mp4", "c.mp4"), ("c.mp4", "a.mp4")])
    ]
    plan: Any = preflight(configured(folder, rows)).plan
    lost = set()

    def fetch(batch: MicroBatch) -> RawBatch:
        used, bad = [], []
        for clip in batch.clips:
            broken = (clip.index, clip == plan.rejected[clip.index]) in lost
            used.append(plan.clips[(clip.index + 1) % 3] if broken else clip)
            bad += [BadSample(clip, "damaged")] if broken else []
        return RawBatch(tuple(used), batch.sample_keys, batch.weight, bad=tuple(bad))

    pairs = PairFetch(fetch, plan.rejected)
    for broken, expected in ((set(), [0, 1]), ({(0, True)}, [1, 1]), ({(0, False), (1, True)}, [2, 2])):
        lost = broken
        raw = pairs(MicroBatch(4, plan.clips[:2]))
        assert [(clip.index, clip in plan.clips) for clip in raw.clips] == [
            (index, first) for index in expected for first in (True, False)
        ]
        assert raw.sample_keys == ((4, 0), (4, 0), (4, 1), (4, 1))
        assert {(one.clip.index, one.clip not in plan.clips) for one in raw.bad} == broken
    lost = {(k, True) for k in range(3)}
    with pytest.raises(InvalidSampleError, match=": damaged") as unread:
        pairs(MicroBatch(4, plan.clips[:1]))
    assert unread.value.status == "damaged"
