"""Clips that fail while training are replaced, counted and limited; workers that die or hang are started again."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from one_of import OneOf

from finetrainers.config.load import load_config
from finetrainers.config.sections import DataloaderSection, DataSection
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.cache.keys import CacheKeys, EncoderEntry
from finetrainers.data.cache.store import CacheError, TensorCache
from finetrainers.data.inspect.file_facts import FileFacts
from finetrainers.data.loading import workers
from finetrainers.data.loading.bad_samples import (
    BadSample,
    BadSamplesError,
    BadSampleTracker,
    ReplacementClips,
    load_clips,
)
from finetrainers.data.loading.batch_sampler import BatchSampler, MicroBatch
from finetrainers.data.loading.loader import DecodeFetch, RawBatch, StepSampler, iterate_steps
from finetrainers.data.loading.position import DataPosition, Segment
from finetrainers.data.loading.precompute import CacheFetch, precompute_text, precompute_video
from finetrainers.data.loading.training_data import TrainingData
from finetrainers.data.loading.workers import WorkersLost, note_reading
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.models.spec import ModelComponents, PromptEmbeds


def clip(index: int, bucket: tuple[int, int, int] = (9, 32, 48), path: Path | None = None) -> Clip:
    return Clip(index, path or Path(f"{index}.mp4"), f"caption {index}", "video", bucket, 8.0, 20, 8.0, 48, 32)


def test_the_next_of_the_bucket_takes_the_place() -> None:
    clips = [clip(0), clip(1), clip(2, (1, 32, 48)), clip(3), clip(4)]
    broken, calls = {0, 3, 4}, []

    def load(one: Clip, key: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        calls.append(one.index)
        if one.index in broken:
            raise InvalidSampleError(f"cannot decode {one.path}")
        return one.index, key

    batch = MicroBatch(5, (clips[3], clips[1]))
    used, loaded, bad = load_clips(batch, load, substitutes=ReplacementClips(clips))
    assert calls == [3, 3, 4, 4, 0, 0, 1, 1]  # each a second time; another bucket is never taken; round the end
    assert [one.index for one in used] == [1, 1]
    assert loaded == [(1, (5, 3)), (1, (5, 1))]  # with the noise of the clip that was to come
    assert [one.clip.index for one in bad] == [3, 4, 0]
    with pytest.raises(InvalidSampleError, match=r"3\.mp4"):
        load_clips(batch, load, substitutes=None)
    broken.add(1)
    with pytest.raises(InvalidSampleError):
        load_clips(batch, load, substitutes=ReplacementClips(clips))


def test_one_failure_is_no_bad_sample() -> None:
    failures = iter([OSError("stale file handle")])

    def load(one: Clip, key: tuple[int, int]) -> int:
        for failure in failures:
            raise failure
        return one.index

    assert load_clips(MicroBatch(0, (clip(7),)), load, substitutes=ReplacementClips([clip(7), clip(8)]))[1:] == (
        [7],
        (),
    )


def test_the_ledger_counts_each_clip_once_and_has_a_limit() -> None:
    ledger = BadSampleTracker(parallel=OneOf(), share=0.01, num_files=250)
    bad = [BadSample(clip(k), f"cannot decode {k}.mp4") for k in range(3)]
    ledger.agree([], None)
    ledger.agree(bad[:1], None)
    ledger.agree(bad[:2], None)
    assert [event["file"] for event in ledger.events] == ["0.mp4", "1.mp4"]
    with pytest.raises(BadSamplesError, match=r"^3 .* 2 .* --max_bad_share 0\.01 .*0\.mp4.*1\.mp4.*2\.mp4"):
        ledger.agree(bad, None)
    with pytest.raises(KeyError):
        ledger.agree([], KeyError("whatever"))
    assert BadSampleTracker(parallel=OneOf(), share=0.01, num_files=5).allowed == 1
    assert BadSampleTracker(parallel=OneOf(), share=0.0, num_files=500).allowed == 0


def source_of(clips: list[Clip], parallel: Any) -> Any:
    """What a run trains on, without models."""
    plan: Any = type(
        "Plan",
        (),
        {"clips": tuple(clips), "buckets": (), "eval_clips": (), "prior": None, "fetch_with": lambda _, fetch: fetch},
    )()
    config = load_config(model_name="ltx_video", pretrained_model_name_or_path="x", batch_size=2, max_bad_share=0.3)
    spec: Any = SimpleNamespace(
        name="x", facts=SimpleNamespace(first_frame="none", any_frame=False, last_frame=False, media=())
    )
    texts: Any = SimpleNamespace(encode=lambda prompts: None, keys=SimpleNamespace(texts_see_images=False))
    source = TrainingData(
        plan,
        config,
        spec=spec,
        parallel=parallel,
        texts=texts,
        clip_encoders=ModelComponents({"vae": None}),
        data_position=DataPosition.begin(config, data_size=parallel.data_size),  # type: ignore[arg-type]
    )
    source._encoder = lambda raw, dropout=True: raw  # type: ignore[assignment]
    return source


class Neighbors(OneOf):
    """One of two ranks that share their samples; each is a thread."""

    said: ClassVar[list[Any]] = [None, None]
    meeting = Barrier(2, timeout=10)

    def gather_objects(self, items: list[Any]) -> list[Any]:
        self.said[self.rank] = items
        self.meeting.wait()
        found = [*self.said[0], *self.said[1]]
        self.meeting.wait()
        return found

    def max_on_host(self, values: Sequence[int]) -> list[int]:
        return [max(self.gather_objects(list(values)))]


def test_ranks_that_share_samples_replace_what_one_of_them_cannot_read() -> None:
    """Else their parts would be of different clips. It may be readable again later, or not by another rank."""
    clips = [clip(k) for k in range(4)]

    def steps_of(rank: int) -> list[tuple[list[int], list[int]]]:
        source = source_of(clips, Neighbors(rank, 2, sharing=2))

        def load(one: Clip, key: tuple[int, int]) -> torch.Tensor:
            # Rank 1 cannot read clip 2 in the first epoch, nor rank 0 in the second one: it is known by then.
            if one.index == 2 and key[0] == 1 - rank:
                raise InvalidSampleError("cannot decode 2.mp4")
            return torch.full((1,), float(one.index))

        def fetch(batch: MicroBatch) -> RawBatch:
            used, pixels, bad = load_clips(batch, load, substitutes=source._substitutes)
            return RawBatch(used, batch.sample_keys, batch.weight, pixels=tuple(pixels), bad=bad)

        source._fetch = fetch
        batches = [batch for step in itertools.islice(source.steps(0), 4) for batch in step]
        return [([one.index for one in b.clips], [int(p) for p in b.pixels]) for b in batches]

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(steps_of, (0, 1))
    assert one == other
    assert all(clips == pixels for clips, pixels in one)
    used = [index for clips, _ in one for index in clips]
    assert sorted(used) == [0, 0, 1, 1, 3, 3, 3, 3]


def test_a_run_goes_on_without_a_broken_file(make_video: Callable[..., Path], tmp_path: Path) -> None:
    """The same at every world size and number of workers; the metrics and events say so."""
    clips = [clip(k, path=make_video(tmp_path / f"{k}.mp4", frames=20, seed=k)) for k in range(4)]
    clips[2].path.write_bytes(b"overwritten after the check")
    sampler = BatchSampler(clips, Segment(0, 2, 1), seed=7)
    fetch = DecodeFetch(7, ReplacementClips(clips))

    def first_epoch(**arguments: Any) -> list[RawBatch]:
        return list(itertools.chain(*itertools.islice(iterate_steps(StepSampler(sampler), fetch, **arguments), 2)))

    alone = first_epoch()
    shared = BatchSampler(clips, Segment(0, 2, 2), seed=7)
    ranks = [next(iterate_steps(StepSampler(shared, data_rank=rank, data_size=2), fetch)) for rank in (0, 1)]
    for others in (first_epoch(num_workers=1), [batch for rank in ranks for batch in rank]):
        for ours, theirs in zip(alone, others, strict=True):
            assert all(map(torch.equal, ours.pixels, theirs.pixels))
            assert (ours.clips, ours.sample_keys, ours.bad) == (theirs.clips, theirs.sample_keys, theirs.bad)
    [bad] = [one for batch in alone for one in batch.bad]
    assert bad.clip == clips[2]
    captions = [one.caption for batch in alone for one in batch.clips]
    assert sorted(captions) == ["caption 0", "caption 1", "caption 3", "caption 3"]

    source = source_of(clips, OneOf())
    source._fetch = fetch
    steps, seen = source.steps(0), []
    for _ in range(4):
        next(steps)
        seen.append(source.drain_events())
    assert (seen[-1][0]["bad_samples"], seen[-1][1]) == (1.0, [])
    [event] = [event for _, events in seen for event in events]
    assert event["kind"] == "bad_sample"
    assert event["file"].endswith("2.mp4")


def test_a_pipe_in_the_place_of_a_file_hangs_nothing(make_video: Callable[..., Path], tmp_path: Path) -> None:
    """Opening one waits for somebody to write into it, here for ever."""
    clips = [clip(k, path=make_video(tmp_path / f"{k}.mp4", frames=20, width=64)) for k in range(2)]
    clips[1].path.unlink()
    os.mkfifo(clips[1].path)
    has_decord = importlib.util.find_spec("decord") is not None
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(20)
    try:
        for backend in ("pyav", *(["decord"] if has_decord else [])):
            sampler = BatchSampler([replace(one, backend=backend) for one in clips], Segment(0, 2, 1), seed=7)
            [raw] = next(iterate_steps(StepSampler(sampler), DecodeFetch(7, ReplacementClips(sampler.clips))))
            [bad] = raw.bad
            assert f" {clips[1].path}: " in bad.reason
            assert bad.reason.endswith(" pipe")
        with pytest.raises(OSError, match=r" pipe.*1\.mp4"):
            FileFacts(tmp_path / "d").digest(clips[1].path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def test_damaged_and_nan_entries_of_the_cache(make_video: Callable[..., Path], tmp_path: Path) -> None:
    clips = [clip(k, path=make_video(tmp_path / f"{k}.mp4", frames=20, seed=k)) for k in range(3)]
    keys = CacheKeys(
        TensorCache(tmp_path / "t"), FileFacts(tmp_path / "d"), "t", EncoderEntry("v"), DataSection(), seed=7
    )
    encode_text = lambda prompts: PromptEmbeds({"embeds": torch.ones(len(prompts), 3, 2)})  # noqa: E731
    precompute_text((c.caption for c in clips), encode_text, keys, OneOf())
    precompute_video(
        clips,
        lambda video, _: {"moments": video[:, :2, :1, :2, :2]},
        keys,
        OneOf(),
        loading=DataloaderSection(dataloader_num_workers=0),
    )
    whole = CacheFetch(keys)(MicroBatch(0, (clips[2], clips[2])))
    keys.cache.put(keys.video(clips[0]), {"moments": torch.full((1, 2, 1, 2, 2), torch.nan)})
    path = keys.cache.path(keys.video(clips[1]))
    path.write_bytes(path.read_bytes()[:-1])
    for one, is_nan in ((clips[0], True), (clips[1], False)):
        with pytest.raises(CacheError, match=f" {re.escape(str(one.path))} .*--repair") as caught:
            CacheFetch(keys)(MicroBatch(0, (one,)))
        assert ("NaN" in str(caught.value)) == is_nan
    raw = CacheFetch(keys, ReplacementClips(clips))(MicroBatch(0, (clips[0], clips[1])))
    assert [one.clip.index for one in raw.bad] == [0, 1, 1]
    assert raw.clips == (clips[2], clips[2])
    assert torch.equal(raw.cached["moments"], whole.cached["moments"])


@dataclass(frozen=True)
class Disturbed:
    """Gives the clips' numbers; at one of them it does something else once, or always, as long as a file says so."""

    directory: Path
    at: int
    deed: str

    def __call__(self, batch: MicroBatch) -> RawBatch:
        for one in batch.clips:
            note_reading(one)
            once, always = self.directory / "once", self.directory / "always"
            if one.index == self.at and (once.exists() or always.exists()):
                once.unlink(missing_ok=True)
                if self.deed == "crash":
                    os.kill(os.getpid(), signal.SIGSEGV)
                time.sleep(60)
        numbers = torch.tensor([float(one.index) for one in batch.clips])
        return RawBatch(batch.clips, batch.sample_keys, batch.weight, pixels=(numbers,))


@pytest.mark.rotating
@pytest.mark.parametrize("deed", ["crash", "hang"])
def test_lost_workers_are_started_again_at_the_same_batch(
    deed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_LOOK_S", 0.1)
    sampler = BatchSampler([clip(k) for k in range(4)], Segment(0, 1, 2), seed=7)
    (tmp_path / "once").touch()
    # On a busy machine a new worker may need longer than this for its first batch, and then counts as hanging, too.
    timeout_s = 0.5 if deed == "hang" else 0.0
    fetch, said = Disturbed(tmp_path, at=2, deed=deed), []

    def take(count: int) -> list[float]:
        steps = iterate_steps(
            StepSampler(sampler, start=1),
            fetch,
            num_workers=1,
            timeout_s=timeout_s,
            on_restart=said.append,
        )
        return [raw.pixels[0].item() for step in itertools.islice(steps, count) for raw in step]

    handler = signal.getsignal(signal.SIGCHLD)
    disturbed = take(3)
    assert signal.getsignal(signal.SIGCHLD) is handler  # a worker's end must not break into a step
    assert any(reason.endswith(" 2.mp4") for reason in said)
    assert disturbed == take(3)
    if deed == "hang":
        return
    assert len(said) == 1
    # Always, not a number of times: a dying worker may lose the previous batch too, whose count then starts again.
    (tmp_path / "always").touch()
    with pytest.raises(WorkersLost, match=r" 4 .* 2\.mp4\).*--dataloader_num_workers"):
        take(3)


@pytest.mark.rotating
def test_the_start_of_workers_is_no_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is not forked imports torch first."""
    begin = workers._begin

    def slowly(worker: int) -> None:
        time.sleep(1.5)
        begin(worker)

    monkeypatch.setattr(workers, "_LOOK_S", 0.1)
    monkeypatch.setattr(workers, "_begin", slowly)
    sampler, said = BatchSampler([clip(k) for k in range(4)], Segment(0, 1, 1), seed=7), []

    def first() -> RawBatch:
        fetch = Disturbed(tmp_path, at=-1, deed="none")
        return next(iterate_steps(StepSampler(sampler), fetch, num_workers=1, timeout_s=0.5, on_restart=said.append))[0]

    assert first().pixels
    assert said == []
    monkeypatch.setattr(workers, "_STARTING_S", 0.3)
    monkeypatch.setattr(workers, "RESTARTS", 0)
    with pytest.raises(WorkersLost, match=" 1 s; ") as caught:
        first()
    assert ".mp4" not in str(caught.value)


FAILS_WITH_WORKERS = """
from pathlib import Path
import torch
from finetrainers.data.loading.loader import RawBatch, StepSampler, iterate_steps
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.loading.batch_sampler import BatchSampler
from finetrainers.data.loading.position import Segment

def fetch(batch):
    return RawBatch(batch.clips, batch.sample_keys, batch.weight, pixels=(torch.zeros(1),))

def main():
    clips = [Clip(0, Path("0"), "", "video", (9, 32, 48), 8.0, 20, 8.0, 48, 32)]
    steps = iterate_steps(StepSampler(BatchSampler(clips, Segment(0, 1, 1), seed=7)), fetch, num_workers=1)
    next(steps)
    raise ValueError("a step")

main()
"""


@pytest.mark.rotating
def test_a_process_that_fails_does_not_wait_for_its_workers() -> None:
    """They leave signals to the trainer, and the traceback keeps the loader until the very end."""
    done = subprocess.run(
        [sys.executable, "-c", FAILS_WITH_WORKERS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: a step\n")
