"""The order of batches under every way of making them: bucket sizes, ends of epochs, repeats, chances to stay."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

from finetrainers.config.load import load_config
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.loading.batch_sampler import BatchSampler, sampler_for
from finetrainers.data.loading.position import DataPosition, Segment
from finetrainers.utils.seeding import derive_seed

BUCKETS = [(17, 64, 64), (17, 32, 32), (1, 64, 64)]
Key = tuple[int, int]


@dataclass(frozen=True)
class Group:
    """A dataset: clips of each bucket, and repeats."""

    counts: tuple[int, int, int]
    repeats: float = 1.0


@dataclass(frozen=True)
class Way:
    """A part of a run: how it makes its batches, and for how many steps."""

    batch_size: int
    bucket_sizes: dict
    epoch_end: str
    accumulation: int = 1
    world: int = 1
    steps: int = 0

    def segment(self) -> Segment:
        sizes = tuple(sorted(self.bucket_sizes.items()))
        return Segment(0, self.batch_size, self.accumulation * self.world, sizes, self.epoch_end)


def make_clips(groups: list[Group], *, falling: bool = False) -> list[Clip]:
    clips = []
    for number, group in enumerate(groups):
        for bucket, count in zip(BUCKETS, group.counts, strict=True):
            lower = ((BUCKETS[1], 8.0),) if falling and bucket == BUCKETS[0] else ()
            for _ in range(count):
                index = len(clips)
                clips.append(
                    Clip(
                        index,
                        Path(f"{index}.mp4"),
                        "",
                        "video",
                        bucket,
                        8,
                        20,
                        8,
                        48,
                        32,
                        lower=lower,
                        repeats=group.repeats,
                        dataset=number,
                    )
                )
    return clips


def expected_keys(clips: list[Clip], epochs: int) -> int:
    """How many samples the epochs have, by the definition: floor(epochs * n * r) for each dataset."""
    sizes = Counter((clip.dataset, clip.repeats) for clip in clips)
    return sum(int(epochs * n * Fraction(repeats).limit_denominator(100)) for (_, repeats), n in sizes.items())


def keys_of(batches) -> list[Key]:
    return [(cycle, clip.index) for batch in batches for cycle, clip in zip(batch.cycles, batch.clips, strict=True)]


group = st.builds(
    Group, st.tuples(*[st.integers(0, 7)] * 3).filter(any), st.sampled_from([1.0, 1.0, 2.0, 0.5, 1.5, 1 / 3, 0.29])
)
groups = st.lists(group, min_size=1, max_size=3)
sizes = st.dictionaries(st.sampled_from(BUCKETS), st.integers(1, 5), max_size=3)
way = st.builds(
    Way,
    st.integers(1, 4),
    sizes,
    st.sampled_from(["keep", "pad", "wrap", "drop"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 6),
)
KEEP = {BUCKETS[0]: 0.5, BUCKETS[1]: 0.6}


def open_stream(clips: list[Clip], way: Way, *, keep: dict | None = None) -> BatchSampler | None:
    """None where no epoch has a batch, which is refused."""
    try:
        sampler = BatchSampler(clips, way.segment(), seed=5, keep=keep)
        sampler.batch_at(0)
    except ValueError:
        return None
    return sampler


@settings(max_examples=150, deadline=None)
@given(groups=groups, way=way, falling=st.booleans())
@example(groups=[Group((0, 1, 7), 0.29)], way=Way(3, {}, "pad"), falling=False)
def test_every_clip_comes_as_often_as_it_should_and_nothing_is_lost_unsaid(groups, way, falling) -> None:
    clips = make_clips(groups, falling=falling)
    keep = KEEP if falling else None
    sampler = open_stream(clips, way, keep=keep)
    if sampler is None:
        assert way.epoch_end == "drop"  # any other has batches some time
        return
    epochs = 5
    batches = []
    while (batch := sampler.batch_at(len(batches))).epoch < epochs:
        batches.append(batch)
    found = keys_of(batches)
    real = [key for key in found if key[0] >= 0]
    assert len(set(found)) == len(found)
    total = expected_keys(clips, epochs)
    left_out = sum(sampler.left_out(epoch) for epoch in range(epochs))
    assert bool(left_out) <= falling
    size = {bucket: way.bucket_sizes.get(bucket, way.batch_size) for bucket in BUCKETS}
    for batch in batches:
        [bucket] = {clip.bucket for clip in batch.clips}
        assert len(batch.clips) <= size[bucket]
        assert way.epoch_end == "keep" or len(batch.clips) == size[bucket]
        assert all(bucket in clips[clip.index].buckets for clip in batch.clips)
    if way.epoch_end in ("keep", "pad"):
        assert len(real) == total - left_out
        assert len(found) == len(real) or way.epoch_end == "pad"
        for number, group in enumerate(groups):
            cycles = [cycle for cycle, index in real if clips[index].dataset == number]
            # Shuffles are gone through one after the other: all but the last are complete.
            if not falling and cycles:
                times = Counter(cycles)
                assert set(times) == set(range(max(times) + 1))
                assert all(times[cycle] == sum(group.counts) for cycle in range(max(times)))
    if way.epoch_end == "wrap":
        # What is missing waits for the next epochs, fewer than a batch in each bucket.
        assert 0 <= total - left_out - len(real) <= sum(size[bucket] - 1 for bucket in BUCKETS)
        waiting = open_stream(clips, replace(way, accumulation=1, world=1), keep=keep).rest_at(len(batches))
        assert len(waiting.samples) == total - left_out - len(real) + (
            expected_keys(clips, waiting.epoch + 1)
            - total
            - sum(sampler.left_out(e) for e in range(epochs, waiting.epoch + 1))
        )
        assert not set(real) & set(
            zip(waiting.samples["cycles"].tolist(), waiting.samples["items"].tolist(), strict=True)
        )
    if way.epoch_end == "pad":
        for batch in batches:
            pool = sum(batch.clips[0].bucket in clip.buckets for clip in clips)
            # A clip may come twice in its own right, where it is repeated or an epoch begins a new shuffle.
            own, filled = (
                [key[1] for key in keys_of([batch]) if (key[0] < 0) == is_filled] for is_filled in (False, True)
            )
            twice = len({*filled}) < len(filled) or {*filled} & {*own}
            assert not twice or pool < len(batch.clips)


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(group, min_size=1, max_size=2), way=way)
def test_each_epoch_by_a_plain_walk(groups, way) -> None:
    """The same by hand: dealt clip by clip into open batches, with the library's order."""
    clips = make_clips(groups)
    sampler = open_stream(clips, way)
    if sampler is None:
        return
    expected: list[list[Key]] = []
    open_batches: dict[tuple[int, int, int], list[Key]] = {}
    for epoch in range(3):
        samples = sampler.order.samples(epoch)
        for item, cycle in zip(samples["items"].tolist(), samples["cycles"].tolist(), strict=True):
            bucket = clips[item].bucket
            batch = open_batches.setdefault(bucket, [])
            batch.append((cycle, item))
            if len(batch) == way.bucket_sizes.get(bucket, way.batch_size):
                expected.append(open_batches.pop(bucket))
        if way.epoch_end in ("keep", "pad"):
            expected += open_batches.values()
        if way.epoch_end != "wrap":
            open_batches = {}
    found = [
        [key for key in keys_of([sampler.batch_at(position)]) if key[0] >= 0] for position in range(len(expected))
    ]  # fmt: skip
    assert found == expected


@settings(max_examples=80, deadline=None)
@given(groups=groups, way=way, step=st.integers(0, 12), world=st.integers(1, 4), falling=st.booleans())
def test_a_step_is_the_same_at_any_world_size_and_from_anywhere(groups, way, step, world, falling) -> None:
    clips = make_clips(groups, falling=falling)
    keep = KEEP if falling else None
    way = replace(way, world=world)
    sampler = open_stream(clips, way, keep=keep)
    if sampler is None:
        return
    ranks = [sampler.step(step, data_rank=r, data_size=world) for r in range(world)]
    assert {len(batches) for batches in ranks} == {way.accumulation}
    together = [batch for turn in zip(*ranks, strict=True) for batch in turn]
    fresh = open_stream(clips, way, keep=keep)  # asked for the late step at once
    alone = fresh.step(step)
    assert [b.sample_keys for b in together] == [b.sample_keys for b in alone]
    assert [b.clips for b in together] == [b.clips for b in alone]
    assert sum(b.weight for b in together) / world == pytest.approx(1.0)
    last = fresh.batch_at((step + 1) * way.accumulation * world - 1).epoch
    assert fresh.epoch_at(step) == last


def walk(clips: list[Clip], ways: list[Way], *, steps: int, keep: dict | None = None) -> list[list[Key]] | None:
    """The samples of every step of a run that is stopped and continued; the last part goes on to `steps`."""
    made: list[list[Key]] = []
    data_position: DataPosition | None = None
    for number, way in enumerate(ways):
        config = load_config(
            model_name="m",
            pretrained_model_name_or_path="r",
            seed=5,
            batch_size=way.batch_size,
            epoch_end=way.epoch_end,
            bucket_batch_sizes=[f"{'x'.join(map(str, bucket))}={size}" for bucket, size in way.bucket_sizes.items()],
            gradient_accumulation_steps=way.accumulation,
        )
        now = {"data_size": way.world, "step": len(made)}
        data_position = (
            DataPosition.begin(config, **now) if data_position is None else data_position.resume(config, **now)
        )
        data_position = DataPosition.from_state(
            json.loads(json.dumps(data_position.state()))
        )  # as a checkpoint keeps it
        sampler = sampler_for(clips, data_position, keep=keep)
        stop = steps if number == len(ways) - 1 else len(made) + way.steps
        for step in range(len(made), stop):
            ranks = [sampler.step(step, data_rank=r, data_size=way.world) for r in range(way.world)]
            made.append([key for turn in zip(*ranks, strict=True) for batch in turn for key in batch.sample_keys])
    return made


@settings(max_examples=60, deadline=None)
@given(
    groups=groups,
    way=way,
    stops=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    falling=st.booleans(),
    turns=st.permutations([(1, 6), (2, 3), (3, 2), (6, 1)]),
)
def test_a_run_that_is_stopped_equals_one_that_is_not(groups, way, stops, falling, turns) -> None:
    """Also on other numbers of processes in between: 2 -> 1 -> 2."""
    clips = make_clips(groups, falling=falling)
    keep = KEEP if falling else None
    if open_stream(clips, way, keep=keep) is None:
        return
    parts = [replace(way, accumulation=a, world=w, steps=s) for (a, w), s in zip(turns, stops, strict=False)]
    parts.append(replace(parts[0], steps=0))
    steps = sum(stops) + 4
    assert walk(clips, parts, steps=steps, keep=keep) == walk(
        clips, [replace(way, accumulation=6, world=1)], steps=steps, keep=keep
    )


@settings(max_examples=100, deadline=None)
@given(groups=groups, ways=st.lists(way, min_size=2, max_size=4), falling=st.booleans())
def test_other_batches_on_the_way_lose_and_repeat_nothing(groups, ways, falling) -> None:
    """Sizes, ends of epochs, accumulation and processes all change; only `drop` may leave samples out."""
    clips = make_clips(groups, falling=falling)
    keep = KEEP if falling else None
    if any(open_stream(clips, way, keep=keep) is None for way in ways):
        return
    steps = sum(way.steps for way in ways[:-1]) + 6
    try:
        made = walk(clips, ways, steps=steps, keep=keep)
    except ValueError as error:  # epochs that differ never come to a whole batch
        if "in a row have no full batch" in str(error) and any(way.epoch_end == "drop" for way in ways):
            return
        raise
    real = [key for step in made for key in step if key[0] >= 0]
    assert len(set(real)) == len(real)
    if falling or any(way.epoch_end == "drop" for way in ways):
        return
    # Of each dataset all shuffles are complete, but for the last batches' worth of samples.
    open_at_most = sum(max(way.bucket_sizes.get(bucket, way.batch_size) for way in ways) for bucket in BUCKETS)
    for number, group in enumerate(groups):
        times = Counter(cycle for cycle, index in real if clips[index].dataset == number)
        size = sum(group.counts)
        late = max((cycle for cycle in times), default=0)
        epoch_span = int(size * group.repeats) + 1  # samples of one epoch may be met in any order
        missing = sum(size - times[cycle] for cycle in range(late + 1)) - size
        assert missing <= open_at_most + epoch_span


def test_repeats_take_turns_through_whole_shuffles() -> None:
    """2 repeats are two shuffles an epoch, with different noise; 1/2 is every second epoch. Others are unaffected."""
    clips = make_clips([Group((4, 0, 0), 2.0), Group((3, 0, 0), 0.5), Group((0, 0, 5), 1.0)])
    sampler = BatchSampler(clips, Segment(0, 1, 1), seed=1)
    epochs = [
        [(c, clips[i].dataset, i) for c, i in zip(*(x.tolist() for x in (v["cycles"], v["items"])), strict=True)]
        for v in map(sampler.order.samples, range(4))
    ]
    assert [sorted(c for c, d, _ in epoch if d == 0) for epoch in epochs[:2]] == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]
    assert [len([1 for _, d, _ in epoch if d == 1]) for epoch in epochs] == [1, 2, 1, 2]
    assert sorted(i for epoch in epochs[:2] for _, d, i in epoch if d == 1) == [4, 5, 6]
    assert all(sorted(i for _, d, i in epoch if d == 2) == [7, 8, 9, 10, 11] for epoch in epochs)
    # They come mixed, not one dataset after the other.
    assert [d for _, d, _ in epochs[0]] != sorted(d for _, d, _ in epochs[0])
    # A dataset's own order does not depend on what it is mixed with.
    alone = BatchSampler(clips[:4], Segment(0, 1, 1), seed=1).order.samples(0)
    assert alone["items"].tolist() == [i for _, d, i in epochs[0] if d == 0]


def test_with_one_repeat_the_order_is_the_plain_shuffle_of_the_epoch() -> None:
    samples = BatchSampler(make_clips([Group((3, 4, 5))]), Segment(0, 2, 1), seed=9).order.samples(6)
    expected = list(range(12))
    random.Random(derive_seed(9, "order", 6)).shuffle(expected)
    assert samples["items"].tolist() == expected
    assert set(samples["cycles"].tolist()) == {6}


def test_chances_to_stay() -> None:
    """Half stays, 60 % of the others are kept below, the rest is left out; each clip independently of the others."""
    clips = make_clips([Group((2000, 0, 10))], falling=True)
    sampler = BatchSampler(clips, Segment(0, 1, 1), seed=3, keep=KEEP)
    samples = sampler.order.samples(0)
    counts = Counter(samples["slots"][samples["items"] < 2000].tolist())
    assert [counts[slot] / 2000 for slot in (0, 1, -1)] == pytest.approx([0.5, 0.3, 0.2], abs=0.04)
    assert sampler.left_out(0) == counts[-1]
    assert sorted(samples["slots"][samples["items"] >= 2000].tolist()) == [2] * 10
    few = BatchSampler(clips[:500], Segment(0, 1, 1), seed=3, keep=KEEP).order.samples(0)
    by_item = dict(zip(samples["items"].tolist(), samples["slots"].tolist(), strict=True))
    assert all(by_item[i] == s for i, s in zip(few["items"].tolist(), few["slots"].tolist(), strict=True))
    again = sampler.order.samples(1)
    assert dict(zip(again["items"].tolist(), again["slots"].tolist(), strict=True)) != by_item
    # Windows of a clip have indices far apart.
    apart = [replace(clip, index=clip.index << 32) for clip in clips]
    slots = BatchSampler(apart, Segment(0, 1, 1), seed=3, keep=KEEP).order.samples(0)["slots"].tolist()
    assert Counter(slots)[0] / 2000 == pytest.approx(0.5, abs=0.04)
    # A clip that has fallen comes in its lower bucket, and in no other.
    fallen = next(batch.clips[0] for batch in map(sampler.batch_at, range(100)) if batch.clips[0].bucket == BUCKETS[1])
    assert (fallen.fps, fallen.lower) == (8.0, ())


def test_ends_of_epochs() -> None:
    """Ten clips in batches of four."""
    clips = make_clips([Group((10, 0, 0))])
    samplers = {
        end: BatchSampler(clips, Segment(0, 4, 1, epoch_end=end), seed=0) for end in ("keep", "drop", "pad", "wrap")
    }
    sizes = {end: [len(sampler.batch_at(k).clips) for k in range(6)] for end, sampler in samplers.items()}
    assert sizes["keep"] == [4, 4, 2, 4, 4, 2]
    assert all(set(sizes[end]) == {4} for end in ("drop", "pad", "wrap"))
    epochs = {end: [sampler.batch_at(k).epoch for k in range(6)] for end, sampler in samplers.items()}
    assert epochs == {
        "keep": [0, 0, 0, 1, 1, 1], "pad": [0, 0, 0, 1, 1, 1], "drop": [0, 0, 1, 1, 2, 2], "wrap": [0, 0, 1, 1, 1, 2],
    }  # fmt: skip
    ends = {end: [s.steps_for_epochs(n) for n in (1, 2, 3)] for end, s in samplers.items()}
    assert ends == {"keep": [3, 6, 9], "pad": [3, 6, 9], "drop": [2, 4, 6], "wrap": [2, 5, 7]}
    padded = samplers["pad"].batch_at(2)
    assert sum(cycle < 0 for cycle in padded.cycles) == 2
    assert len({clip.index for clip in padded.clips}) == 4
    assert samplers["pad"].batch_at(5).clips[2:] != padded.clips[2:]  # others the next time
    left = samplers["pad"].rest_at(1).samples  # what has only been filled in is not left
    assert len(left) == 6
    assert set(left["cycles"].tolist()) == {0}
    wrapped = samplers["wrap"].batch_at(2)
    assert wrapped.cycles == (0, 0, 1, 1)


def test_what_cannot_be_is_refused() -> None:
    clips = make_clips([Group((3, 0, 0))])
    with refused("conflict", "epoch_end"):
        BatchSampler(clips, Segment(0, 4, 1, epoch_end="drop"), seed=0)
    rare = make_clips([Group((3, 0, 0), 0.5)])
    with refused("conflict", "1000 epochs "):
        BatchSampler(rare, Segment(0, 4, 1, epoch_end="drop"), seed=0).batch_at(0)
    with refused("conflict", "1 epochs "):
        BatchSampler(rare[:1], Segment(0, 1, 1), seed=0).steps_for_epochs(1)
    with refused("conflict", "dataset 0 "):
        BatchSampler([clips[0], rare[1]], Segment(0, 1, 1), seed=0)
    with refused("invalid", "dataset 0 ", " 0.0 "):
        BatchSampler(make_clips([Group((1, 0, 0), 0.0)]), Segment(0, 1, 1), seed=0)


def test_late_positions_are_found_at_once() -> None:
    sampler = BatchSampler(make_clips([Group((5, 3, 2))]), Segment(0, 2, 4, epoch_end="wrap"), seed=0)
    assert sampler.batch_at(10**12).epoch == pytest.approx(10**12 / 5, rel=1e-9)
    assert sampler.steps_for_epochs(10**9) == 5 * 10**9 // 4


def test_a_data_position_keeps_what_makes_batches_and_reads_older_ones() -> None:
    old = {"seed": 3, "stretches": [[0, 2, 1], [7, 2, 2]]}
    data_position = DataPosition.from_state(old)
    assert data_position.segments == (Segment(0, 2, 1), Segment(7, 2, 2))
    assert data_position.state() == old
    common = {
        "model_name": "m",
        "pretrained_model_name_or_path": "r",
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
    }
    same = load_config(**common)
    assert data_position.resume(same, data_size=1, step=9) == data_position
    for option in ({"bucket_batch_sizes": ["17x64x64=1", "64x64=3"]}, {"epoch_end": "wrap"}):
        other = data_position.resume(load_config(**common, **option), data_size=1, step=9)
        assert [segment.first_step for segment in other.segments] == [0, 7, 9]
        assert DataPosition.from_state(json.loads(json.dumps(other.state()))) == other
        assert other.resume(same, data_size=1, step=12).segments[-1] == Segment(12, 2, 2)
    sized = data_position.resume(
        load_config(**common, bucket_batch_sizes=["64x64=3", "17x64x64=1"]), data_size=1, step=9
    )
    assert sized.segments[-1].bucket_sizes == (((1, 64, 64), 3), ((17, 64, 64), 1))


def test_bucket_sizes_of_single_buckets() -> None:
    clips = make_clips([Group((4, 3, 9))])
    sampler = BatchSampler(clips, Segment(0, 2, 2, bucket_sizes=((BUCKETS[0], 1), (BUCKETS[2], 4))), seed=0)
    sizes = Counter((batch.clips[0].bucket, len(batch.clips)) for batch in islice(map(sampler.batch_at, range(100)), 9))
    assert sizes == {(BUCKETS[0], 1): 4, (BUCKETS[1], 2): 1, (BUCKETS[1], 1): 1, (BUCKETS[2], 4): 2, (BUCKETS[2], 1): 1}
    # Every clip counts the same, in whatever batch.
    [one, two] = sampler.step(0)
    assert one.weight / len(one.clips) == two.weight / len(two.clips)
