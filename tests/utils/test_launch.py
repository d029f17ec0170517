"""What launchers say in the environment, and what cannot be right."""

from __future__ import annotations

import pytest
from refusals import refused

from finetrainers.cli.main import main
from finetrainers.utils import exit_codes
from finetrainers.utils.launch import (
    launch_problems,
    launched_processes,
    launched_rank,
    launcher_environment,
    restart_warning,
)

TORCHRUN = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        TORCHRUN,
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": ""},
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        {"LOCAL_RANK": "-1"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "29500"},  # of a cluster's shell
        TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "bf16", "OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_what_launchers_set_is_right(environment, monkeypatch):
    assert launch_problems(environment) == []
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, environment.get(name, ""))
    assert launched_processes() == int(environment.get("WORLD_SIZE") or 1)
    assert launched_rank() == int(environment.get("RANK") or 0)


AGENT = {"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_restarts_that_will_fail_are_said() -> None:
    said = restart_warning(TORCHRUN | AGENT)
    assert said is not None
    assert "--max-restarts 1" in said
    for change in ({"TORCHELASTIC_MAX_RESTARTS": "0"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}):
        assert restart_warning(TORCHRUN | AGENT | change) is None
    assert restart_warning(TORCHRUN) is None


def test_errors_are_wrapped_on_a_terminal_alone(monkeypatch, capsys):
    arguments = ["train", "--video_resolution_buckets", "x" * 90, "--lr", "high", "--width", "512"]
    monkeypatch.setenv("COLUMNS", "60")
    assert main(arguments) == exit_codes.CONFIGURATION
    piped = capsys.readouterr().err.splitlines()
    assert max(map(len, piped)) > 120
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(arguments) == exit_codes.CONFIGURATION
    wrapped = capsys.readouterr().err.splitlines()
    assert [line for line in wrapped if len(line) > 60 and len(line.split()) > 1] == []
    assert " ".join(" ".join(wrapped).split()) == " ".join(" ".join(piped).split())
    indents = {len(line) - len(line.lstrip()) for line in wrapped}
    assert indents == {0, 2, 4}


@pytest.mark.parametrize("command", ["train", "prepare", "sample", "search-batch"])
def test_a_refusal_is_printed_by_the_first_process_and_the_others_wait_for_it(command, monkeypatch, capsys):
    """The launcher ends all processes once one has failed, and the first may be the last to find what is wrong."""
    waits: list[float] = []
    monkeypatch.setattr("finetrainers.utils.launch.time.sleep", waits.append)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert main([command, "--no_such_option", "1"]) == exit_codes.CONFIGURATION
    assert (capsys.readouterr().err, len(waits)) == ("", 1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main([command, "--no_such_option", "1"]) == exit_codes.CONFIGURATION
    assert "no_such_option" in capsys.readouterr().err
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("environment", "name", "kind", "values"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE", "invalid", ("1", "'abc'")),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE", "invalid", ("1", "'0'")),
        (TORCHRUN | {"RANK": "one"}, "RANK", "invalid", ("0", "'one'")),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT", "invalid", ("1", "'http'")),
        ({"RANK": "1"}, "RANK", "conflict", ("1", "WORLD_SIZE")),
        (TORCHRUN | {"RANK": "2"}, "RANK", "conflict", ("2", "WORLD_SIZE")),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK", "required", ("WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT", "torchrun")),
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            "WORLD_SIZE",
            "required",
            ("MASTER_ADDR, MASTER_PORT", "`accelerate launch`"),
        ),
        (
            {"ACCELERATE_MIXED_PRECISION": "bogus"},
            "ACCELERATE_MIXED_PRECISION",
            "unknown",
            ("no, fp16, bf16", "'bogus'"),
        ),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "ACCELERATE_MIXED_PRECISION", "unknown", ("'fp8'",)),
        (  # `accelerate launch --cpu --num_processes 2`
            {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            "MASTER_PORT",
            "conflict",
            ("`accelerate launch`", "--cpu", "torchrun --nproc_per_node"),
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE", "conflict", ("mpirun", "torchrun")),
        ({"LOCAL_SIZE": "abc"}, "LOCAL_SIZE", "invalid", ("1", "'abc'")),
        ({"PARALLELISM_CONFIG_TP_SIZE": "x"}, "PARALLELISM_CONFIG_TP_SIZE", "invalid", ("1", "'x'")),
        (
            {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "9"},
            "ACCELERATE_DEEPSPEED_ZERO_STAGE",
            "unknown",
            ("0, 1, 2, 3", "'9'"),
        ),
    ],
)
def test_what_cannot_be_right_is_named(environment, name, kind, values):
    [(place, message, problem_kind)] = launch_problems(environment)
    assert (place, problem_kind) == (name, kind)
    assert [value for value in values if value not in message] == []


@pytest.mark.parametrize(
    ("content", "kind", "value"),
    [
        (None, "not_found", "gone.yaml"),
        ("a: [", "unreadable", "gone.yaml"),
        ("- a list", "unreadable", "`accelerate launch`"),
        ("num_processes: none", "invalid", "num_processes"),
        ("distributed_type: FSDP\nfsdp_config: 7", "invalid", "fsdp_config"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}", "unknown", "zero_stage"),
    ],
)
def test_files_of_launchers_that_cannot_be_read_are_refused(tmp_path, content, kind, value):
    path = tmp_path / "gone.yaml"
    if content is not None:
        path.write_text(content)
    with refused(kind, value):
        launcher_environment(path)
