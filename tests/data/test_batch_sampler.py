from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.buckets.windows import example_index, item_index
from finetrainers.data.loading.batch_sampler import BatchSampler, fixed_batches, sampler_for
from finetrainers.data.loading.position import DataPosition, Segment

BUCKETS = [(9, 32, 48), (17, 32, 48), (1, 64, 64)]


def make_clips(counts: list[int]) -> list[Clip]:
    clips = []
    for bucket, count in zip(BUCKETS, counts, strict=False):
        for _ in range(count):
            clips.append(Clip(len(clips), Path(f"{len(clips)}.mp4"), "", "video", bucket, 8, 20, 8, 48, 32))
    return clips


def indices(clips: tuple[Clip, ...]) -> list[int]:
    return [clip.index for clip in clips]


counts = st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(any)


@settings(max_examples=60, deadline=None)
@given(counts=counts, batch_size=st.integers(1, 5), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_an_epoch_has_every_clip_once_in_batches_of_one_bucket(counts, batch_size, seed, epoch) -> None:
    clips = make_clips(counts)
    sampler = BatchSampler(clips, Segment(0, batch_size, 1), seed=seed)
    per_epoch = sum(-(-count // batch_size) for count in counts)
    batches = [sampler.batch_at(epoch * per_epoch + place) for place in range(per_epoch)]
    assert {batch.epoch for batch in batches} == {epoch}
    assert sorted(i for batch in batches for i in indices(batch.clips)) == list(range(len(clips)))
    assert all(1 <= len(batch.clips) <= batch_size for batch in batches)
    assert all(len({clip.bucket for clip in batch.clips}) == 1 for batch in batches)
    assert sampler.batch_at(per_epoch * (epoch + 1)).epoch == epoch + 1


@settings(max_examples=60, deadline=None)
@given(
    counts=counts, batch_size=st.integers(1, 4), accumulation=st.integers(1, 4), world=st.sampled_from([1, 2, 3, 4]),
    step=st.integers(0, 8),
)  # fmt: skip
def test_a_step_is_the_same_at_any_world_size_and_its_weights_give_the_mean(
    counts, batch_size, accumulation, world, step
) -> None:
    sampler = BatchSampler(make_clips(counts), Segment(0, batch_size, accumulation * world), seed=3)
    ranks = [sampler.step(step, data_rank=r, data_size=world) for r in range(world)]
    assert {len(batches) for batches in ranks} == {accumulation}
    alone = sampler.step(step)
    seen = [batch.sample_keys for turn in zip(*ranks, strict=True) for batch in turn]
    assert seen == [batch.sample_keys for batch in alone]

    # The loss of a clip is its index: summed over micro-batches and averaged over ranks it must be the plain mean.
    def weighted(batches):
        return sum(b.weight * sum(indices(b.clips)) / len(b.clips) for b in batches)

    samples = [index for keys in seen for _, index in keys]
    assert sum(map(weighted, ranks)) / world == pytest.approx(sum(samples) / len(samples))
    assert weighted(alone) == pytest.approx(sum(samples) / len(samples))


@dataclass(frozen=True)
class Part:
    """A part of a run: how it makes its steps, and how many."""

    batch_size: int
    accumulation: int
    world: int
    steps: int


def walk(clips: list[Clip], parts: list[Part], *, epochs: int = 0) -> list[list[tuple[int, int]]]:
    """The samples `(epoch, item)` of every step of a run that is stopped and continued as the parts say.

    The last part goes on until every clip has been seen `epochs` times.
    """
    steps: list[list[tuple[int, int]]] = []
    data_position: DataPosition | None = None
    for number, part in enumerate(parts):
        config = load_config(
            model_name="m", pretrained_model_name_or_path="r", seed=3, batch_size=part.batch_size,
            gradient_accumulation_steps=part.accumulation,
        )  # fmt: skip
        now = {"data_size": part.world, "step": len(steps)}
        data_position = (
            DataPosition.begin(config, **now) if data_position is None else data_position.resume(config, **now)
        )
        data_position = DataPosition.from_state(
            json.loads(json.dumps(data_position.state()))
        )  # as a checkpoint keeps it
        sampler = sampler_for(clips, data_position)
        end = len(steps) + part.steps
        if number == len(parts) - 1:
            end = max(len(steps), sampler.steps_for_epochs(epochs))
        for step in range(len(steps), end):
            ranks = [sampler.step(step, data_rank=rank, data_size=part.world) for rank in range(part.world)]
            steps.append([key for turn in zip(*ranks, strict=True) for batch in turn for key in batch.sample_keys])
    return steps


parts = st.lists(
    st.builds(Part, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 7)), min_size=1, max_size=4
)


@settings(max_examples=150, deadline=None)
@given(counts=counts, parts=parts)
def test_every_clip_comes_once_an_epoch_however_a_run_is_continued(counts, parts) -> None:
    clips = make_clips(counts)
    steps = walk(clips, parts, epochs=3)
    samples = [key for step in steps for key in step]
    assert len(set(samples)) == len(samples)
    epochs = [epoch for epoch, _ in samples]
    assert epochs == sorted(epochs)
    for epoch in range(3):
        assert sorted(item for e, item in samples if e == epoch) == list(range(len(clips)))
    # The last step is needed for the third epoch, if the run had not got there before.
    before = sum(part.steps for part in parts[:-1])
    assert len(steps) == before or any(epoch == 2 for epoch, _ in steps[-1])


@settings(max_examples=60, deadline=None)
@given(
    counts=counts, batch_size=st.integers(1, 4),
    ways=st.lists(st.sampled_from([(1, 6), (2, 3), (3, 2), (6, 1)]), min_size=1, max_size=4),
    stops=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)  # fmt: skip
def test_the_same_global_batch_gives_the_same_steps(counts, batch_size, ways, stops) -> None:
    clips = make_clips(counts)
    stopped = [Part(batch_size, a, w, steps) for (a, w), steps in zip(ways, stops, strict=False)]
    straight = [Part(batch_size, 6, 1, 0)]
    found, expected = (walk(clips, way, epochs=4) for way in (stopped, straight))
    assert found[: len(expected)] == expected


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 12), parts=parts)
def test_of_one_bucket_the_order_of_clips_stays_whatever_the_batch(count, parts) -> None:
    clips = make_clips([count])
    ways = (parts, [Part(1, 1, 1, 0)])
    found, straight = ([key for step in walk(clips, way, epochs=3) for key in step] for way in ways)
    assert found[: len(straight)] == straight


def test_going_back_forgets_what_came_after() -> None:
    """And as long as batches are made as before, there is nothing to keep."""

    def config(batch_size: int) -> TrainConfig:
        return load_config(model_name="m", pretrained_model_name_or_path="r", batch_size=batch_size)

    data_position = DataPosition.begin(config(2), data_size=2)
    assert data_position.resume(config(2), data_size=2, step=5) == data_position
    changed = data_position.resume(config(1), data_size=2, step=5).resume(config(2), data_size=2, step=9)
    assert [segment.first_step for segment in changed.segments] == [0, 5, 9]
    assert [s.first_step for s in changed.resume(config(3), data_size=2, step=9).segments] == [0, 5, 9]
    assert changed.resume(config(2), data_size=2, step=4) == data_position


def test_with_one_bucket_the_order_does_not_depend_on_the_batch_size() -> None:
    clips = make_clips([10])
    by_four, by_one = (BatchSampler(clips, Segment(0, size, 1), seed=5) for size in (4, 1))
    for epoch in range(3):
        joined = [i for k in range(3) for i in indices(by_four.batch_at(epoch * 3 + k).clips)]
        assert joined == [i for k in range(10) for i in indices(by_one.batch_at(epoch * 10 + k).clips)]


def test_order_differs_by_epoch_and_seed_and_is_reproducible() -> None:
    clips = make_clips([12])

    def order(seed: int, epoch: int) -> list[int]:
        sampler = BatchSampler(clips, Segment(0, 12, 1), seed=seed)
        return indices(sampler.batch_at(epoch).clips)

    orders = [tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert order(1, 1) == order(1, 1)
    # Pinned: changing the order would break resuming from existing checkpoints.
    assert order(42, 0) == [10, 11, 4, 5, 0, 9, 7, 2, 8, 3, 1, 6]


def test_leftovers_come_last_in_order_of_their_first_clip() -> None:
    sampler = BatchSampler(make_clips([5, 3]), Segment(0, 4, 1), seed=0)
    order = [
        i for k in range(8) for i in indices(BatchSampler(sampler.clips, Segment(0, 1, 1), seed=0).batch_at(k).clips)
    ]
    batches = [indices(sampler.batch_at(k).clips) for k in range(3)]
    assert [len(batch) for batch in batches] == [4, *(len(batch) for batch in batches[1:])]
    assert sorted(map(len, batches[1:])) == [1, 3]
    firsts = [order.index(batch[0]) for batch in batches[1:]]
    assert firsts == sorted(firsts)


def test_a_rank_makes_its_own_batches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step on 64 ranks, which spans several epochs: a rank's time does not grow with their number."""
    sampler = BatchSampler(make_clips([11, 9]), Segment(0, 2, 128, epoch_end="keep"), seed=3)
    made: list[int] = []
    batch_at = sampler.batch_at
    monkeypatch.setattr(sampler, "batch_at", lambda position: made.append(position) or batch_at(position))
    found = [batch for rank in range(64) for batch in sampler.step(5, data_rank=rank, data_size=64)]
    assert len(found) == len(made) == 128
    assert sum(batch.weight for batch in found) == pytest.approx(64)


def test_steps_for_epochs() -> None:
    one, four = (BatchSampler(make_clips([5, 3]), Segment(0, 2, per_step), seed=0) for per_step in (1, 4))
    assert [one.steps_for_epochs(epochs) for epochs in (1, 2)] == [5, 10]
    assert four.steps_for_epochs(2) == 3


def test_fixed_batches_keep_every_clip_once() -> None:
    batches = fixed_batches(make_clips([3, 2]), Segment(0, 2, 1))
    assert [indices(batch.clips) for batch in batches] == [[0, 1], [2], [3, 4]]
    assert Counter(batch.weight for batch in batches) == {1.0: 3}


def test_no_clips_is_an_error() -> None:
    with refused("invalid", "clips"):
        BatchSampler([], Segment(0, 1, 1), seed=0)


@settings(max_examples=40, deadline=None)
@given(
    windows=st.lists(st.integers(1, 5), min_size=1, max_size=5), batch_size=st.integers(1, 3),
    accumulation=st.integers(1, 2), world=st.integers(1, 3),
    end=st.sampled_from(["keep", "pad", "wrap"]),
)  # fmt: skip
def test_all_windows_of_a_clip_come_in_one_step(windows, batch_size, accumulation, world, end) -> None:
    """Micro-batches have up to `batch_size` windows, ranks equally many, and the step is the mean over all windows."""
    items = make_clips([-(-len(windows) // 2), len(windows) // 2])  # of two buckets
    clips = [
        replace(item, index=example_index(item.index, k), start=k)
        for item, number in zip(items, windows, strict=True)
        for k in range(number)
    ]
    sampler = BatchSampler(clips, Segment(0, batch_size, accumulation * world, epoch_end=end), seed=5, by_item=True)
    alike = BatchSampler(items, Segment(0, batch_size, accumulation * world, epoch_end=end), seed=5)
    assert sampler.steps_for_epochs(8) == alike.steps_for_epochs(8)  # of clips, whatever number of windows they have
    for step in range(5):
        ranks = [sampler.step(step, data_rank=rank, data_size=world) for rank in range(world)]
        number = sampler.num_micro_batches(step, data_size=world)
        assert [len(batches) for batches in ranks] == [number] * world
        in_turn = [batch for turn in zip(*ranks, strict=True) for batch in turn]
        trained = [batch for batch in in_turn if batch.weight]
        assert [batch.sample_keys for batch in trained] == [batch.sample_keys for batch in sampler.step(step)]
        assert all(len(batch.clips) == 1 for batch in in_turn if not batch.weight)
        assert all(len(batch.clips) <= batch_size for batch in trained)
        assert all(len({clip.bucket for clip in batch.clips}) == 1 for batch in in_turn)
        seen = Counter(key for batch in trained for key in batch.sample_keys)
        expected = Counter(
            (cycle, example_index(item, k))
            for batch in alike.step(step)
            for cycle, item in batch.sample_keys
            for k in range(windows[item])
        )
        assert seen == expected
        shares = [batch.weight / len(batch.clips) / world for batch in trained]
        assert shares == pytest.approx([1 / seen.total()] * len(trained))


def test_windows_of_a_clip_stay_together_when_a_run_resumes_in_other_batches() -> None:
    clips = [replace(item, index=example_index(item.index, k), start=k) for item in make_clips([7]) for k in range(3)]
    config = {"model_name": "m", "pretrained_model_name_or_path": "r", "seed": 3}
    position = DataPosition.begin(load_config(**config, batch_size=2), data_size=1)
    first = sampler_for(clips, position, by_item=True)
    position = position.resume(load_config(**config, batch_size=1, gradient_accumulation_steps=3), data_size=1, step=2)
    then = sampler_for(clips, DataPosition.from_state(position.state()), by_item=True)
    done = [{item_index(i) for b in first.step(step) for i in indices(b.clips)} for step in range(2)]
    left = [key for b in then.step(2, data_size=1) for key in b.sample_keys]
    assert {item_index(index) for _, index in left} == set(range(7)) - set.union(*done)
    assert len(left) == 3 * 3
    chunks = [replace(clip, frame_selection="chunk") for clip in clips]  # of another dataset: clips by themselves
    assert len(sampler_for(chunks, position, by_item=True).step(2)) == 3 * 1
    again = sampler_for(clips, position, by_item=True)  # whatever was asked before
    assert [again.step(step) for step in (9, 4)] == [then.step(step) for step in (9, 4)]
