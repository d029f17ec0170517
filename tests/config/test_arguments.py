from __future__ import annotations

import argparse

import pytest

from finetrainers.config.arguments import ArgumentParser, split_unknown
from finetrainers.config.errors import ConfigError, Problem


def positive(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


@pytest.fixture
def parser() -> ArgumentParser:
    parser = ArgumentParser(prog="tool")
    write = parser.add_subparsers(dest="command", required=True).add_parser("write")
    write.add_argument("source", metavar="SOURCE", help="a run")
    write.add_argument("--format", nargs="+", required=True, choices=("comfyui", "kohya"), help="one or several")
    write.add_argument("--scale", type=float, default=1.0)
    write.add_argument("--output_dir", help="a folder")
    write.add_argument("--num", type=positive, default=1)
    write.add_argument("--once", action="store_true")
    write.add_argument("--ema", action=argparse.BooleanOptionalAction, default=True)
    write.set_defaults(check=lambda arguments: [Problem("SOURCE", f"no run, num {arguments.num}")])
    return parser


def told(parser: ArgumentParser, text: str, *, checked: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parser.parse_args(text.split(), checked=checked)
    shown = any(word in str(raised.value) for word in ("unknown", "required", "needs", "not a", "takes", "whole"))
    assert str(raised.value).endswith("--help lists the options") == (shown or "unexpected" in str(raised.value))
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ["command: is required: one of write"]),
        ("writ x", ["command: unknown value 'writ'; did you mean 'write'? Valid: write"]),
        ("write", ["SOURCE: is required: a run", "--format: is required: one or several"]),
        # The flag that was meant is not also missing, and what may be its value is not a stray.
        ("write x --fromat comfyui", ["--fromat: unknown flag; did you mean --format?"]),
        ("write x -format comfyui", ["-format: unknown flag; did you mean --format?"]),
        ("write --fromat=kohya", ["--fromat: unknown flag; did you mean --format?", "SOURCE: is required: a run"]),
        ("write x y --format kohya", ["unexpected 'y'"]),
        ("write x --form kohya", ["--form: unknown flag; did you mean --format?"]),
        (
            "write x --format comfy koyha kohya --scale 1e --num=0.5 --once=yes --ema=no --output_dir",
            [
                "--once: takes no value, got 'yes'",
                "--ema: takes no value, got 'no'; --no-ema turns it off",
                "--format: unknown value 'comfy'; did you mean 'comfyui'? Valid: comfyui, kohya",
                "--format: unknown value 'koyha'; did you mean 'kohya'? Valid: comfyui, kohya",
                "--scale: not a number, got '1e'",
                "--num: must be a whole number, got '0.5'",
                "--output_dir: needs a value: a folder",
            ],
        ),
        ("write x --format", ["--format: needs a value: one or several"]),
    ],
)
def test_all_mistakes_are_collected(parser: ArgumentParser, line: str, expected: list[str]) -> None:
    assert told(parser, line) == expected


def test_a_check_of_the_command_joins_what_is_wrong_with_its_arguments(parser: ArgumentParser) -> None:
    line = "write x --format kohya"
    assert told(parser, f"{line} --num x", checked=True) == [
        "--num: must be a whole number, got 'x'",
        "SOURCE: no run, num 1",
    ]
    assert told(parser, line, checked=True) == ["SOURCE: no run, num 1"]
    for unclear in ("write --format kohya", f"{line} --nmu 3", "write x y --format kohya"):
        assert not any("no run" in one for one in told(parser, unclear, checked=True))


def test_right_arguments_are_read(parser: ArgumentParser) -> None:
    read = parser.parse_args(
        ["write", "--scale", "-1e-4", "x", "--output-dir", "a-b", "--no-ema", "--format", "kohya", "comfyui"]
    )
    assert (read.source, read.scale, read.output_dir, read.ema) == ("x", -1e-4, "a-b", False)
    assert (read.format, read.num, read.once) == (["kohya", "comfyui"], 1, False)
    [action] = parser._subparsers._group_actions  # type: ignore[union-attr]
    assert "--format" in action.choices["write"].format_usage()


def test_what_follows_an_unknown_flag_may_be_its_value() -> None:
    assert split_unknown(["a", "-1", "--x=3", "b", "-y", "--x"]) == (["--x", "-y"], ["a", "-1"])
    assert split_unknown(["-", "--", "a"]) == ([], ["-", "a"])


def test_a_list_that_is_given_twice_is_noted(parser: ArgumentParser, caplog: pytest.LogCaptureFixture) -> None:
    """A number may be given again after a recipe's own; of a list, both may have been meant."""
    line = "write x --num 1 --num 2 --format kohya --format comfyui"
    with caplog.at_level("WARNING"):
        read = parser.parse_args(line.split())
    assert (read.num, read.format) == (2, ["comfyui"])
    assert [message.partition(",")[0] for message in caplog.messages] == ["--format is given twice"]
