"""Measured batch sizes: real steps of a tiny model on the CPU, with memory that runs out where the test says so."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image

from finetrainers.cli.main import main
from finetrainers.config.load import load_config
from finetrainers.methods.sft import SFT
from finetrainers.plan.ready import preflight_by_model
from finetrainers.tools.batch_search.measure import StepTimer, load_timer
from finetrainers.tools.batch_search.request import searched_config
from finetrainers.training import assemble
from finetrainers.utils.faults import ENVIRONMENT

BUCKET = (9, 64, 64)


@contextmanager
def bench(values: dict[str, Any]) -> Iterator[StepTimer]:
    checked = preflight_by_model(searched_config(load_config(**values)), preparing=True)
    with load_timer(checked) as loaded:
        yield loaded


def short_of_memory(monkeypatch: pytest.MonkeyPatch, *, fits: int) -> list[tuple[tuple[int, ...], int]]:
    """Batches of so many latent cells fit; latent size and clips of all that were tried."""
    tried, errors = [], SFT.errors

    def limited(self: SFT, transformer: Any, batch: Any, **how: Any) -> Any:
        tried.append((batch.latent_size, len(batch)))
        if len(batch) * np.prod(batch.latent_size) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return errors(self, transformer, batch, **how)

    monkeypatch.setattr(SFT, "errors", limited)
    return tried


@pytest.fixture
def three_buckets(options: Callable[..., dict], make_clips: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    """A run on seven clips of one size, three longer and smaller ones, and two images."""
    rows = [(str(path), f"clip {path.stem}") for path in sorted(make_clips(7).glob("*.mp4"))]
    rows += [(str(path), f"long {path.stem}") for path in sorted(make_clips(3, frames=17, size=32).glob("*.mp4"))]
    for k in range(2):
        Image.new("RGB", (64, 64), (90, 40 * k, 200)).save(tmp_path / f"{k}.png")
        rows.append((str(tmp_path / f"{k}.png"), f"image {k}"))
    lines = [json.dumps({"video": path, "text": text}) for path, text in rows]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    values = options(
        allow_outside=True, dataset_file=str(tmp_path / "data.jsonl"), image_resolution_buckets=["64x64", "32x32"],
        video_resolution_buckets=["9x64x64", "17x32x32"], epoch_end="drop", batch_size=3,
    )  # fmt: skip
    del values["data_root"]
    return values


def test_a_search_finds_what_fits_in_each_bucket(
    three_buckets: dict[str, Any], run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "run.toml").write_text(tomli_w.dumps(three_buckets))
    tried = short_of_memory(monkeypatch, fits=5 * 2 * 2 * 2)  # five clips of 9x64x64
    output = tmp_path / "found.json"
    asked = [
        "search-batch",
        str(tmp_path / "run.toml"),
        "--measure_on_cpu",
        "--timed_steps",
        "1",
        "--output",
        str(output),
    ]
    assert main(asked) == 0
    printed, found = capsys.readouterr(), json.loads(output.read_text())
    assert not Path(three_buckets["output_dir"]).exists()
    by_name = {one["bucket"]: one for one in found["buckets"]}
    assert [*by_name] == ["9x64x64", "17x32x32", "1x64x64"]  # most pixels first
    assert [one["clips"] for one in by_name.values()] == [7, 3, 2]
    # The estimate knows nothing of the memory that ran out: all seven are tried, and then fewer.
    assert by_name["9x64x64"]["estimated"] == 7
    assert [one["largest"] for one in by_name.values()] == [5, 3, 2]
    trials = {trial["clips"]: trial for trial in by_name["9x64x64"]["trials"]}
    assert trials[7] == {
        "clips": 7,
        "error": trials[7]["error"],
        "seconds": None,
        "peak": None,
        "fits": False,
        "rate": 0.0,
    }
    assert "memory" in trials[7]["error"]
    assert trials[5]["peak"] > 0.1
    assert trials[5]["rate"] == pytest.approx(5 / trials[5]["seconds"])
    assert {clips for size, clips in tried if size == (2, 2, 2)} == set(trials)
    # A step that is not timed, and one that is.
    assert tried.count(((2, 2, 2), 5)) == 2
    assert tried.count(((2, 2, 2), 7)) == 1
    for one in by_name.values():
        fast = max(trial["rate"] for trial in one["trials"] if trial["fits"])
        used = next(trial for trial in one["trials"] if trial["clips"] == one["use"])
        assert used["fits"]
        assert used["rate"] >= 0.98 * fast
    assert f"9x64x64 x 7: {trials[7]['error']}\n" in printed.err
    assert re.search("^no clip .*1x32x32: ", printed.out, re.MULTILINE)
    assert re.search("^17x32x32: all 3 clips ", printed.out, re.MULTILINE)
    assert re.search("CPU: .* GPU ", printed.out)
    flags = " ".join(f"{name}={one['use']}" for name, one in by_name.items())
    assert f"  --bucket_batch_sizes {flags}\n" in printed.out
    assert found["bucket_batch_sizes"] == flags.split()
    # A run with the largest sizes has no OOM, and with one clip more it has.
    largest = {name: one["largest"] for name, one in by_name.items()}
    sizes = [[f"{name}={size}" for name, size in (largest | more).items()] for more in ({}, {"9x64x64": 6})]
    for number, given in enumerate(sizes):
        done = run(**{**three_buckets, "output_dir": str(tmp_path / f"{number}")}, bucket_batch_sizes=given)
        assert bool(number) == any(event["event"] == "out_of_memory" for event in done.events)


def test_steps_are_real_and_leave_the_weights(options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch) -> None:
    values = options(clips=3, gradient_accumulation_steps=5, lora_dropout=0.2, use_ema=True)
    with bench(values) as loaded:
        state = loaded.trainer.state
        before = {name: tensor.clone() for name, tensor in state.network.state_dict().items()}
        batches, learned = [], []
        loss, step = SFT.loss, state.optimizer.step
        monkeypatch.setattr(
            SFT, "loss", lambda self, network, batch: (batches.append(batch), loss(self, network, batch))[1]
        )
        monkeypatch.setattr(
            state.optimizer, "step",
            lambda: (learned.append(max(float(p.grad.abs().max()) for p in state.parallel._parameters)), step())[1],
        )  # fmt: skip
        trial = loaded.measure(BUCKET, 4, steps=2, limit=inf)
        assert trial.fits
        assert trial.seconds is not None
        assert trial.seconds > 0
        # Three steps of two micro-batches: with accumulation, there are gradients when the second one is computed.
        assert [len(batch) for batch in batches] == [4] * 6
        assert len(learned) == 3
        assert min(learned) > 0
        assert len(set(batches[0].sample_keys)) == 4
        assert {tuple(batch.moments.shape) for batch in batches} == {(4, *batches[0].moments.shape[1:])}
        # The clip with the longest caption, encoded anew for each micro-batch.
        assert torch.equal(batches[0].moments[0], batches[0].moments[3])
        assert batches[0].moments.data_ptr() != batches[1].moments.data_ptr()
        assert all(torch.equal(tensor, before[name]) for name, tensor in state.network.state_dict().items())
        assert state.optimizer.state  # its state takes its memory
        over = loaded.measure(BUCKET, 1, steps=1, limit=0.001)
        assert (over.fits, over.error) == (False, "over 0.00 GiB")
        assert over.peak is not None


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("fault", "is_of_vae"),
    [("oom@loss:3", False), ("oom@update:2", False), ("oom@vae:2", True)],
)
def test_memory_that_runs_out_anywhere_is_one_trial(
    fault: str, is_of_vae: bool, options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, fault)
    with bench(options(clips=2)) as loaded:
        spec = loaded.trainer.state.spec
        failed = loaded.measure(BUCKET, 3, steps=2, limit=inf)
        assert failed.error is not None
        assert "memory" in failed.error
        assert ("VAE" in failed.error) == is_of_vae
        assert (failed.seconds is not None) == is_of_vae
        assert not spec.vae_one_by_one
        assert not spec.vae_too_large
        assert all(p.grad is None for p in loaded.trainer.state.parallel._parameters)
        assert loaded.measure(BUCKET, 3, steps=2, limit=inf).fits


def test_other_errors_are_raised(options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "raise@loss")
    with bench(options()) as loaded, pytest.raises(RuntimeError, match="injected"):
        loaded.measure(BUCKET, 1, steps=1, limit=inf)


def test_pairs_and_priors_from_the_cache(
    options: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clip of a bucket is encoded, whatever the number of clips; both methods that have buckets."""
    encoded = []
    load = assemble.load_batch_source
    monkeypatch.setattr(
        assemble, "load_batch_source",
        lambda checked, *rest: (encoded.append(len(checked.plan.encoded_clips())), load(checked, *rest))[1],
    )  # fmt: skip
    rows = [{"prompt": f"pattern {k}", "chosen": f"{k}.mp4", "rejected": f"{k + 1}.mp4"} for k in range(3)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = options(method="dpo", clips=4, dataset_file=str(tmp_path / "pairs.jsonl"), precompute_conditions=True)
    priors = options(clips=4, prior_preservation_weight=1.0, class_prompt="a pattern", precompute_conditions=True)
    for values, clips in ((pairs, 2), (priors, 1)):
        with bench(values) as loaded:
            assert loaded.measure(BUCKET, 3, steps=1, limit=inf).fits
            assert encoded.pop() == clips
            made = loaded.trainer.state.method.benchmark_steps(BUCKET, 3, micro_batches=1)
            assert [len(one) for one in next(made)] == ([3] if clips == 2 else [3, 3])


@pytest.mark.parametrize("precompute", [False, True])
def test_masks_of_a_run_are_in_every_batch(
    precompute: bool, options: Callable[..., dict], make_clips: Callable[..., Path], tmp_path: Path
) -> None:
    """The clip with the longest caption has none, and another one has."""
    folder = shutil.copytree(make_clips(3), tmp_path / "clips")
    Image.new("L", (64, 64), 255).save(folder / "0.mask.png")
    with bench(options(data_root=str(folder), precompute_conditions=precompute)) as loaded:
        [batch] = next(loaded.trainer.state.method.benchmark_steps(BUCKET, 3, micro_batches=1))
        assert batch.mask.shape == (3, 1, *batch.moments.shape[2:])
        assert loaded.measure(BUCKET, 3, steps=1, limit=inf).fits


def test_the_limit_leaves_the_margin_besides_what_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    one = object.__new__(StepTimer)
    one.on_gpu = True
    monkeypatch.setattr(StepTimer, "device", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 6 * gib)
    # 4 of 80 GiB are CUDA's context and other processes; 5 % of 80 stay free.
    assert one.limit(80, margin=0.05) == pytest.approx(80 - 4 - 4)
    assert one.limit(100, margin=0.05) == pytest.approx(80 - 4 - 4)
    assert one.limit(24, margin=0.5) == pytest.approx(12 - 4)
    one.on_gpu = False
    assert one.limit(24, margin=0.25) == 18


def test_a_repeated_batch_has_keys_of_its_own() -> None:
    from finetrainers.data.loading.loader import RawBatch

    raw = RawBatch(
        ("a", "b"), ((0, 7), (0, 7)), 1.0, masks=(None, torch.ones(1)), cached={"x": torch.tensor([[1, 2], [3, 4]])}
    )  # type: ignore[arg-type]
    found = raw.repeated(3, weight=0.5)
    assert found.clips == ("a", "b") * 3
    assert [mask is None for mask in found.masks] == [True, False] * 3
    assert found.sample_keys == ((0, 7), (0, 7), (1, 7), (1, 7), (2, 7), (2, 7))  # a pair has one key
    assert torch.equal(found.cached["x"], torch.tensor([[1, 2], [3, 4]] * 3))
    # What a clip has, each of its copies has: fields that are added later, too.
    per_clip = [one.name for one in fields(RawBatch) if isinstance(one.default, tuple) or "tuple" in str(one.type)]
    assert set(per_clip) - {"bad"} == {"clips", "sample_keys", "pixels", "masks"}
    assert found.weight == 0.5
