"""Kinds of clean frames that samples are given: their text form, and how they are drawn."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from refusals import refused

from finetrainers.config.frame_conditioning import ALIASES, KINDS, draw_frames, format_kinds, read_frame_conditioning
from finetrainers.config.load import load_config

#: Frames of a latent frame.
TEMPORAL = 8


def sets(text: str, *, latent_frames: int = 9, count: int = 400) -> Counter[tuple[int, ...]]:
    """How often each set of latent frames is drawn."""
    kinds = read_frame_conditioning(text)
    draws = (draw_frames(kinds, latent_frames, TEMPORAL, random.Random(seed)) for seed in range(count))
    return Counter(tuple(sorted(set(one))) for one in draws)


def test_every_kind_gives_what_it_says() -> None:
    rows = tuple(range(9))
    assert set(sets("first=1")) == {(0,)}
    assert set(sets("last=1")) == {(8,)}
    assert set(sets("first+last=1")) == {(0, 8)}
    assert set(sets("prefix:1=1")) == {(0,)}
    assert set(sets("prefix:9=1")) == {(0, 1)}  # one frame, and eight more
    assert set(sets("suffix:8=1")) == {(8,)}
    assert set(sets("suffix:16=1")) == {(7, 8)}
    assert set(sets("prefix=1")) == {(0,), (0, 1)}  # a quarter of nine is two
    assert set(sets("suffix=1")) == {(8,), (7, 8)}
    assert set(sets("prefix+suffix=1")) == {(0, 8), (0, 1, 7, 8)}
    assert set(sets("frame=1")) == {(k,) for k in rows}
    assert set(sets("span=1")) == {(k,) for k in rows} | {(k, k + 1) for k in rows[:-1]}
    assert set(sets("interpolate=1")) == {rows[::2], rows[1::2]}
    drawn = sets("random=1", count=2000)
    assert len(drawn) > 200
    assert {len(one) for one in drawn} == set(range(9))  # never all
    share = sum(len(one) * often for one, often in drawn.items()) / 2000 / 9
    assert share == pytest.approx(0.5, abs=0.03)  # the mean of 0.1 to 0.9
    for name in KINDS:  # an image that is given would be its own answer
        assert set(sets(f"{name}=1", latent_frames=1, count=20)) == {()}


def test_kinds_share_one_draw_in_the_order_in_which_they_are_written() -> None:
    drawn = sets("first=0.1,last=0.3", count=4000)
    assert drawn[0,] == pytest.approx(400, abs=80)
    assert drawn[8,] == pytest.approx(1200, abs=120)
    assert drawn[()] == pytest.approx(2400, abs=130)
    # The number that decides is the one that `--first_frame_conditioning_p` compares with, so samples stay the same.
    for seed in range(200):
        coin = random.Random(seed).random()
        expected = (0,) if coin < 0.1 else (8,) if coin < 0.1 + 0.3 else ()
        kinds = read_frame_conditioning("first=0.1,last=0.3")
        assert tuple(draw_frames(kinds, 9, TEMPORAL, random.Random(seed))) == expected


def test_it_is_written_as_text_as_a_table_and_by_open_soras_names() -> None:
    text = "first=0.1,last=0.05,prefix:9=0.05,interpolate=0.05,random=0.1"
    [config] = [load_config(model_name="m", pretrained_model_name_or_path="r", data_root="x", frame_conditioning=text)]
    assert config.plain()["frame_conditioning"] == text
    table = dict(part.split("=") for part in text.split(","))
    for other in (
        table,
        {name: float(p) for name, p in table.items()},
        f" {text.replace(',', ' , ')} ",
        text.split(","),
    ):
        assert format_kinds(read_frame_conditioning(other)) == text
    theirs = {
        "mask_no": 0.75, "quarter_random": 0.025, "quarter_head": 0.025, "quarter_tail": 0.025,
        "quarter_head_tail": 0.05, "image_random": 0.025, "image_head": 0.025, "image_tail": 0.025,
        "image_head_tail": 0.025, "intepolate": 0.025,
    }  # fmt: skip
    assert format_kinds(read_frame_conditioning(theirs)) == (
        "span=0.025,prefix=0.025,suffix=0.025,prefix+suffix=0.05,frame=0.025,first=0.025,last=0.025,first+last=0.025,"
        "interpolate=0.025"
    )
    assert read_frame_conditioning(str(theirs)) == read_frame_conditioning(theirs)  # pasted from their configuration
    assert set(ALIASES.values()) == set(KINDS) - {"random"} | {"none"}
    assert read_frame_conditioning("") == read_frame_conditioning("first=0") == ()


def test_all_mistakes_are_named_at_once() -> None:
    with refused(
        "unknown",  # the kind of the first
        "'frist'", "'first'?", "'last'", "0 to 1, not '2'; ", "'prefix:x' must be KIND,", "'middle'", "'interpolate'",
        "suffix ", "1.3",
    ):  # fmt: skip
        read_frame_conditioning(
            "frist=0.1,last=2,prefix:x=0.1,middle:9=0.1,interpolate,suffix=0.6,random=0.6,suffix=0.1"
        )
    for text, kind, value in (
        ("last=2", "invalid", "0 to 1, not '2'; "),
        ("suffix=0.1,suffix=0.1", "duplicate", "suffix "),
        ("middle=0.1", "unknown", "'middle'"),
        ("first=0.6,last=0.7", "invalid", "1.3"),
        ("first:9=0.1", "invalid", "'first:9' must be KIND,"),
    ):
        with refused(kind, value):
            read_frame_conditioning(text)


@pytest.mark.parametrize(
    ("text", "frames", "values"),
    [
        ("prefix:8=1", 65, ("prefix:8 ", "1 + a ")),
        ("suffix:9=1", 65, ("suffix:9 ", "multiple of 8 ")),
        ("prefix:9=1", 9, ("prefix:9 ", "9 frames,")),
        ("suffix:16=1", 9, ("suffix:16 ", "9 frames,")),
        ("first+last=1", 9, ("first+last ", "9 frames,")),
        ("prefix+suffix=1", 9, ("prefix+suffix ", "9 frames,")),
        ("prefix:9=1", 17, None), ("first+last=1", 17, None), ("interpolate=1", 9, None), ("random=1", 9, None),
    ],
)  # fmt: skip
def test_something_is_left_to_train(text: str, frames: int, values: tuple[str, ...] | None) -> None:
    [kind] = read_frame_conditioning(text)
    found = kind.problem(frames, TEMPORAL)
    assert found is None if values is None else found is not None and all(value in found for value in values)
    if values is None:
        assert all(len(one) < (frames - 1) // 8 + 1 for one in sets(text, latent_frames=(frames - 1) // 8 + 1))
