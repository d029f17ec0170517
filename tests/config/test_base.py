"""Rules that hold for every option, whatever its section: numbers, text and paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import Field, ValidationError
from refusals import refused_options

from finetrainers.config.base import Section
from finetrainers.config.load import load_config
from finetrainers.config.root import fields
from finetrainers.config.shape import is_list
from finetrainers.data.reading.datasets import read_datasets
from finetrainers.data.reading.items import DataError

BASE = {"model_name": "m", "pretrained_model_name_or_path": "repo", "data_root": "clips"}


def invalid(**options: Any) -> str:
    """Return the message of the one problem, an invalid value, of the last option."""
    with refused_options((list(options)[-1], "invalid")) as error:
        load_config(**{**BASE, **options})
    return error.value.problems[0].message


def kinds(annotation: Any) -> set[Any]:
    """The types that stand anywhere in an annotation."""
    return {annotation}.union(*(kinds(argument) for argument in get_args(annotation)))


NUMBERS = [name for name, o in fields().items() if kinds(o.field.annotation) & {int, float} and not is_list(o.field)]
PATHS = [name for name, option in fields().items() if Path in kinds(option.field.annotation)]


def test_there_are_many_of_each():
    assert len(NUMBERS) > 80
    assert len(PATHS) >= 8


@pytest.mark.parametrize("name", [name for name in NUMBERS if "size" not in name or name.endswith("_size")])
def test_no_number_is_infinite_nan_huge_or_true(name):
    if name == "rollout_size":  # three numbers
        return
    for value in (float("inf"), float("nan"), "inf", 10**19, 1e38, "1" * 30, True):
        # A text that is not a size is the name of a card.
        is_card = name == "memory_budget" and isinstance(value, str)
        with refused_options((name, "unknown" if is_card else "invalid")):
            load_config(**{**BASE, name: value})


def test_numbers_in_lists_follow_the_same_rules():
    assert "at most 1e+12" in invalid(old_policy_decay=[0, 1e13, 0.5])
    assert "got [true, false]" in invalid(window_range=[True, False])
    assert "finite" in invalid(old_policy_decay=["0", "nan", "0.5"])
    assert "finite" in invalid(reward=["brightness=inf"])
    assert "got true" in invalid(reward=[{"name": "brightness", "batch_size": True}])


def test_a_section_may_say_otherwise():
    class Own(Section):
        open: float = Field(1.0, allow_inf_nan=True)
        bound: float = 1.0

    assert Own(open=float("inf")).open == float("inf")
    with pytest.raises(ValidationError):
        Own(bound=float("inf"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lr": "1e-4x"}, "number, got '1e-4x'"),
        ({"lr": 1e3}, "at most 100,"),
        ({"rank": "many"}, "whole number"),
        ({"rank": 10**9}, "at most 16384,"),
        ({"nccl_timeout": 10**15}, "at most 10000000,"),
        ({"step_timeout": 10**15}, "at most 10000000,"),
        ({"num_ar_buckets": 10**8}, "at most 100,"),
        ({"dataloader_num_workers": 10**6}, "at most 1024,"),
        ({"batch_size": True}, "got true"),
        ({"pin_memory": "perhaps"}, "got 'perhaps'"),
        ({"id_token": 5}, "got 5; in"),
        ({"target_modules": "to_q"}, "got 'to_q'; in"),
        ({"rank": "x" * 5000}, "... (5002 characters)"),
        ({"output_dir": "run\0"}, "NUL"),
        ({"target_modules": [r"(\d"]}, r"'(\d' is"),
    ],
)
def test_wrong_values_are_explained(options, expected):
    assert expected in invalid(**options)
    assert len(invalid(**options)) < 400


def test_a_value_is_shown_as_it_was_written():
    with refused_options(("report_to", "unknown")) as error:
        load_config(**BASE, report_to="C:\\new\\run")
    assert r"'C:\new\run';" in str(error.value)


@pytest.mark.parametrize("name", PATHS)
def test_paths_can_exist(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert "NUL" in invalid(**{name: "a\0b"})
    assert "got 256 and 256" in invalid(**{name: "x" * 256})
    assert "got 3 and 4399" in invalid(**{name: "abc/" * 1100})
    assert "UTF-8" in invalid(**{name: "caf\udce9"})
    assert "empty" in invalid(**{name: ""})
    assert " ~nobody-of-this-name " in invalid(**{name: "~nobody-of-this-name/x"})
    assert load_config(**{**BASE, name: "~/x"}).get(name) == Path("/home/somebody/x")


@pytest.mark.parametrize(
    "name", ["pretrained_model_name_or_path", "transformer_id", "init_from", "resume_from_checkpoint"]
)
def test_places_that_may_be_hub_ids_follow_the_rules_of_paths(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert "empty" in invalid(**{name: " "})
    assert "got 256 and 256" in invalid(**{name: "x" * 256})
    assert load_config(**{**BASE, name: "~/x"}).get(name) == "/home/somebody/x"
    assert load_config(**{**BASE, name: "owner/name"}).get(name) == "owner/name"


@pytest.mark.parametrize("option", ["target_modules", "layerwise_upcasting_skip_modules_pattern"])
def test_regular_expressions_are_compiled(option):
    assert "missing )" in invalid(**{option: ["to_(k"]})
    assert "empty" in invalid(**{option: [""]})
    assert load_config(**BASE, **{option: [r"blocks\.\d+\.to_[qk]"]}).get(option) == [r"blocks\.\d+\.to_[qk]"]


def test_something_is_adapted():
    assert "at least 1 item" in invalid(target_modules=[])


@pytest.mark.parametrize("name", ["../../x y", "a/b/c", "-x", "a--b", "x.git", "n" * 97])
def test_hub_repositories_have_names_that_the_hub_takes(name):
    assert "NAMESPACE/NAME" in invalid(hub_model_id=name)
    assert load_config(**BASE, hub_model_id="me/my-lora").run.hub_model_id == "me/my-lora"


def test_data_set_files_follow_the_rules_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    file = tmp_path / "sets.toml"
    file.write_text('[[dataset]]\ndata_root = "~/a"\nmax_items = true\ntarget_fps = inf\n')
    config = load_config(model_name="m", pretrained_model_name_or_path="repo", dataset=file)
    with pytest.raises(DataError) as error:
        read_datasets(config.data)
    items, fps = error.value.problems
    assert ": max_items: " in items
    assert items.endswith("got true")
    assert ": target_fps: " in fps
    assert fps.endswith("got inf")
    file.write_text('[[dataset]]\ndata_root = "~/a"\n')
    assert read_datasets(config.data)[0].data.data_root == Path("/home/somebody/a")
