"""Objects of this package as JSON text, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config
from finetrainers.data.buckets.clip import Clip, ControlInput
from finetrainers.utils.json_objects import from_json, to_json

CLIP = Clip(
    3,
    Path(b"folder/caf\xe9.mp4".decode(errors="surrogateescape")),
    "a 'caption'\n\u4e2d",
    "video",
    (9, 64, 64),
    8.0,
    9,
    8.0,
    64,
    64,
    lower=(((5, 64, 64), 4.0),),
    further=(ControlInput("control_video", Path("c.mp4")),),
)
FACTS = Facts(Geometry(8, 32, 1, 1, 25.0), first_frame_noise=(-3.0, 0.5))
CONFIG = load_config(
    model_name="ltx_video", pretrained_model_name_or_path="x", data_root="clips", video_resolution_buckets=["9x64x64"],
    reward=["brightness=2", "contrast"], method="grpo", prompts="p.txt", rollout_size="9x64x64", dpo={"beta": 7.0},
    memory_budget=24, hub_token="secret",
)  # fmt: skip


def types_of(value: Any) -> Any:
    """The types within a value, which `==` does not compare."""
    if isinstance(value, (list, tuple)):
        return [type(value), *map(types_of, value)]
    if isinstance(value, dict):
        return [type(value), *map(types_of, value.keys()), *map(types_of, value.values())]
    return [type(value), *map(types_of, vars(value).values())] if hasattr(value, "__dict__") else type(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**70),
        0.1,
        float("inf"),
        "",
        "\ud800",
        [],
        (),
        {},
        [(1, [2.5]), {"a": (None,)}],
        {(9, 64, 64): "3", (5, 64, 64): "~2"},
        frozenset({"data", "step"}),
        {Path("a")},
        SecretStr("s"),
        CLIP,
        FACTS,
        CONFIG,
        {Path("run/step-3"): "damaged"},
    ],
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    text = to_json(value)
    assert text.isascii()
    found = from_json(text.encode())
    assert found == value
    assert types_of(found) == types_of(value)


def test_options_come_back_whole() -> None:
    found = from_json(to_json(CONFIG))
    assert found.plain() == CONFIG.plain()
    assert found.run.hub_token.get_secret_value() == "secret"
    assert [name for name in found.flat() if found.changed(name)] == [n for n in CONFIG.flat() if CONFIG.changed(n)]


def test_what_was_set_and_what_was_chosen_come_back() -> None:
    """Processes of a machine decide by them, and must decide alike."""
    config = CONFIG.with_chosen({"rank": 7, "train_steps": 9}, "family")
    other = from_json(to_json(config))
    assert dict(other.chosen) == dict(config.chosen) == {"rank": "family", "train_steps": "family"}
    names = ("memory_budget", "lr", "rank", "train_steps", "dataset", "reward")
    assert [other.is_given(name) for name in names] == [config.is_given(name) for name in names]
    assert {config.is_given(name) for name in names} == {True, False}


@pytest.mark.parametrize("value", [object(), json, lambda: None, 1j, b"bytes"])
def test_other_objects_are_not_written(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{type(value).__module__}:{type(value).__qualname__} .*finetrainers"):
        to_json([value])


@pytest.mark.parametrize(
    "kind", ["os:system", "builtins:eval", "finetrainers.utils.files:folder_problem", "finetrainers.cli.main:main"]
)
def test_nothing_else_is_called(kind: str) -> None:
    with pytest.raises(TypeError, match=f"{kind} .*finetrainers"):
        from_json(json.dumps([kind, "echo no"]))
