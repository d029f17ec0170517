from __future__ import annotations

import argparse

import pytest

from finetrainers.config.arguments import ArgumentParser, split_unknown
from finetrainers.config.errors import ConfigError, Problem


def positive(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


#: The problem that the check of the command reports.
RUN_PROBLEM = Problem("SOURCE", "no run, num 1", "not_found")


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
    write.set_defaults(check=lambda arguments: [Problem("SOURCE", f"no run, num {arguments.num}", "not_found")])
    return parser


def problems(parser: ArgumentParser, text: str, *, checked: bool = False) -> list[Problem]:
    with pytest.raises(ConfigError) as raised:
        parser.parse_args(text.split(), checked=checked)
    is_check = all(problem == RUN_PROBLEM for problem in raised.value.problems)
    assert str(raised.value).endswith(" options") != is_check
    return raised.value.problems


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", [("command", "required", "write")]),
        ("writ x", [("command", "unknown", "'write'? Valid: write")]),
        ("write", [("SOURCE", "required", "a run"), ("--format", "required", "one or")]),
        # The flag that was meant is not also missing, and what may be its value is not a stray.
        ("write x --fromat comfyui", [("--fromat", "unknown", "--format?")]),
        ("write x -format comfyui", [("-format", "unknown", "--format?")]),
        ("write --fromat=kohya", [("--fromat", "unknown", "--format?"), ("SOURCE", "required", "a run")]),
        ("write x y --format kohya", [("", "invalid", "'y'")]),
        ("write x --form kohya", [("--form", "unknown", "--format?")]),
        (
            "write x --format comfy koyha kohya --scale 1e --num=0.5 --once=yes --ema=no --output_dir",
            [
                ("--once", "invalid", "'yes'"),
                ("--ema", "invalid", "'no'; --no-ema "),
                ("--format", "unknown", "'comfyui'? Valid: comfyui, kohya"),
                ("--format", "unknown", "'kohya'? Valid: comfyui, kohya"),
                ("--scale", "invalid", "'1e'"),
                ("--num", "invalid", "'0.5'"),
                ("--output_dir", "required", "a folder"),
            ],
        ),
        ("write x --format", [("--format", "required", "requires a")]),
    ],
)
def test_all_mistakes_are_collected(parser: ArgumentParser, line: str, expected: list[tuple[str, str, str]]) -> None:
    collected = problems(parser, line)
    assert [(problem.where, problem.kind) for problem in collected] == [(where, kind) for where, kind, _ in expected]
    for problem, (_, _, value) in zip(collected, expected, strict=True):
        assert value in problem.message


def test_a_check_of_the_command_joins_what_is_wrong_with_its_arguments(parser: ArgumentParser) -> None:
    line = "write x --format kohya"
    number, source = problems(parser, f"{line} --num x", checked=True)
    assert (number.where, number.kind, source) == ("--num", "invalid", RUN_PROBLEM)
    assert problems(parser, line, checked=True) == [RUN_PROBLEM]
    for unclear in ("write --format kohya", f"{line} --nmu 3", "write x y --format kohya"):
        assert RUN_PROBLEM not in problems(parser, unclear, checked=True)


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
    [message] = caplog.messages
    assert message.startswith("--format ")
