"""World size and rank from the launcher's environment variables. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .failures import InputError, Kind
from .packaged import find_shared
from .reading import expect, parse_yaml, read_text
from .text import is_encodable, shortened, without_controls

#: Variables with an integer, and its minimum.
_COUNTS = {
    "WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": -1, "LOCAL_WORLD_SIZE": 1, "LOCAL_SIZE": 1, "MASTER_PORT": 1,
    **{f"PARALLELISM_CONFIG_{name}_SIZE": 1 for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")},
}  # fmt: skip
_ZERO_STAGES = ("0", "1", "2", "3")
_PRECISIONS = ("no", "fp16", "bf16")
_FIRST_PRINTS_S = 10.0
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
#: World sizes of mpirun.
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_USE_TORCHRUN = (
    "use `torchrun --nproc_per_node N train.py ...`, or `accelerate launch --config_file accelerate_configs/ddp.yaml "
    "--num_processes N train.py ...`, on CPUs too"
)
#: Reasons for `_lone_process_problems`, by variable.
_SINGLE = {
    "MASTER_PORT": "`accelerate launch` was asked for several processes and started one, as it does with --cpu and "
    "where it finds fewer than two GPUs (or unset MASTER_PORT)",
    **dict.fromkeys(_MPI_SIZES, "mpirun started several processes, and each would train alone"),
}


def launch_problems(
    environment: Mapping[str, str] = os.environ, *, joining: bool = True
) -> list[tuple[str, str, Kind]]:
    """Return problems with a launcher's environment variables, which may be left over: name, message and kind.

    Args:
        environment: the variables.
        joining: whether the processes will join a group, which needs the address.
    """
    problems: list[tuple[str, str, Kind]] = []
    numbers: dict[str, int] = {}
    for name, minimum in _COUNTS.items():
        try:
            numbers[name] = int(environment.get(name) or minimum)
        except ValueError:
            numbers[name] = minimum - 1
        if numbers[name] < minimum:
            message = (
                f"must be a whole number of at least {minimum}, got {environment[name]!r}; unset it, or launch again"
            )
            problems.append((name, message, "invalid"))
    problems += _lone_process_problems(environment) if joining else []
    if not problems:
        if numbers["RANK"] >= numbers["WORLD_SIZE"]:
            message = f"{numbers['RANK']} must be below {numbers['WORLD_SIZE']} (WORLD_SIZE)"
            problems.append(("RANK", message, "conflict"))
        elif joining and (numbers["WORLD_SIZE"] > 1 or numbers["LOCAL_RANK"] >= 0):
            missing = [n for n in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(n)]
            if missing:
                variable = "WORLD_SIZE" if numbers["WORLD_SIZE"] > 1 else "LOCAL_RANK"
                message = (
                    f"is set, so a launcher started this process, but {', '.join(missing)} is not set; start it by "
                    f"`accelerate launch` or `torchrun`, or unset {variable}"
                )
                problems.append((variable, message, "required"))
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage not in _ZERO_STAGES:
        message = f"{_stage_message(stage)}; it is set in the launcher's file"
        problems.append(("ACCELERATE_DEEPSPEED_ZERO_STAGE", message, "unknown"))
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in _PRECISIONS:
        message = f"must be one of {', '.join(_PRECISIONS)}, got {precision!r}; it is set in the launcher's file"
        problems.append(("ACCELERATE_MIXED_PRECISION", message, "unknown"))
    return problems


def _lone_process_problems(environment: Mapping[str, str]) -> list[tuple[str, str, Kind]]:
    """Return a problem if several processes were requested and this one would train alone.

    accelerate starts one process without a message where it would need mpirun or several GPUs, and sets an address.
    """
    if environment.get("WORLD_SIZE"):
        return []
    names = [name for name in _MPI_SIZES if environment.get(name, "1") not in ("", "1")][:1]
    if not names and all(environment.get(name) for name in ("ACCELERATE_MIXED_PRECISION", *_ADDRESS)):
        names = ["MASTER_PORT"]
    return [(name, f"{_SINGLE[name]}; {_USE_TORCHRUN}", "conflict") for name in names]


def _stage_message(stage: str) -> str:
    return f"must be one of {', '.join(_ZERO_STAGES)}, got {stage!r}"


def restart_warning(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why processes that torchrun restarts (`--max-restarts`) will not find each other, or None if they will.

    It is also None if torchrun restarts none. The agents keep one store for all starts, where gloo and NCCL find the
    addresses of processes that have ended.
    """
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts in ("", "0") or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return (
        f"torchrun --max-restarts {restarts}: restarted processes would wait for those of the first start; set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine before launching"
    )


def is_enabled(name: str) -> bool:
    """Return whether a launcher's variable is set, in any way that accelerate reads."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")


def launched_to_split_weights() -> str | None:
    """Return the strategy in the launcher's file if it shards weights, `FSDP2` or `ZeRO-3`, else None."""
    if is_enabled("ACCELERATE_USE_FSDP"):
        return "FSDP2"
    if is_enabled("ACCELERATE_USE_DEEPSPEED") and os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3":
        return "ZeRO-3"
    return None


def launched_processes() -> int:
    """Return the world size: processes that a launcher started on all machines; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def launched_rank() -> int:
    """Return the rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK") or 0)


def print_refusal(text: object) -> None:
    """Print to standard error in the first process, before every process exits with the same problems.

    The others wait for the launcher, which ends all processes as soon as one exits with an error: a quicker one would
    keep the first from printing. On a machine without the first process they exit after 10 s.
    """
    if launched_rank() == 0:
        print_error(text)
    else:
        time.sleep(_FIRST_PRINTS_S)


def print_error(text: object) -> None:
    """Print to standard error after `error: `; on a terminal, lines wrap between words."""
    message = without_controls(f"error: {text}".rstrip("\n"))
    sys.stderr.write(f"{wrap_prose(message, starts=('',)) if sys.stderr.isatty() else message}\n")


def wrap_prose(text: str, *, starts: tuple[str, ...] = ("error:", "warning:", "note:", "chosen (", "  - ")) -> str:
    """Return the text with lines that begin so wrapped between words at the terminal's width, and keep their indent."""
    wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns, break_on_hyphens=False)
    wrapper.break_long_words = wrapper.replace_whitespace = False
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.startswith(starts):
            wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip().removeprefix("- ")))
            lines[number] = wrapper.fill(line)
    return "\n".join(lines)


def local_world_size() -> int:
    """Return the local world size: processes on this machine."""
    # DeepSpeed's launcher sets the first; on CPUs accelerate then sets the second, to 1.
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or launched_processes())


def launched_local_rank() -> int:
    """Return the local rank: index of this process on this machine; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def launcher_environment(path: Path) -> dict[str, str]:
    """Return the variables that `accelerate launch` would set for a configuration file, and `NUM_MACHINES`.

    Raises:
        ValueError: the file cannot be read, or has values of other types.
    """
    settings = _read_settings(path)
    variables = {"WORLD_SIZE": _count(settings, "num_processes"), "NUM_MACHINES": _count(settings, "num_machines")}
    if settings.get("mixed_precision") not in (None, False):
        variables["ACCELERATE_MIXED_PRECISION"] = _text(settings["mixed_precision"])
    for name, value in _table(settings, "parallelism_config").items():
        if (variable := str(name).upper()) in _COUNTS:
            variables[variable] = _text(value)
    kind = expect(settings.get("distributed_type") or "NO", str, "distributed_type")
    if kind == "FSDP":
        variables["ACCELERATE_USE_FSDP"] = "true"
        for name, value in _table(settings, "fsdp_config").items():
            if not re.fullmatch(r"\w+", str(name), re.ASCII):
                raise ValueError(f"fsdp_config: expected names such as fsdp_version, got {shortened(repr(name))}")
            variables[str(name).upper()] = _text(value)
    elif kind == "DEEPSPEED":
        deepspeed = _table(settings, "deepspeed_config")
        stage = _text(deepspeed.get("zero_stage", 2))
        if stage not in _ZERO_STAGES:
            raise InputError(f"zero_stage {_stage_message(stage)}", "unknown")
        variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = stage
        for name in ("offload_optimizer_device", "offload_param_device"):
            variables[f"ACCELERATE_DEEPSPEED_{name.upper()}"] = _text(deepspeed.get(name, "none"))
    return variables


def _read_settings(path: Path) -> dict[str, Any]:
    path = path if path.is_file() else find_shared(path) or path
    if not path.is_file():
        message = f"{path} cannot be read: {('not a file' if path.exists() else 'file not found')}"
        raise InputError(message, "not_found")
    text = read_text(path)
    try:
        settings = parse_yaml(text)
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}", "unreadable") from None
    if not isinstance(settings, dict):
        raise InputError(f"{path} is not a config file of `accelerate launch`", "unreadable")
    return settings


def _count(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name, 1)
    if isinstance(value, bool) or not re.fullmatch(r"[1-9][0-9]{0,5}", str(value)):
        raise ValueError(f"{name} must be a whole number of at least 1, got {shortened(repr(value))}")
    return str(value)


def _table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = settings.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a table of settings, got {shortened(repr(value))}")
    return value


def _text(value: Any) -> str:
    """Return a value as an environment variable has it.

    Raises:
        ValueError: it is a list, a table, or not UTF-8 text, or has a NUL character.
    """
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, (list, dict)) or "\0" in text or not is_encodable(text):
        raise ValueError(f"expected text, a number, true or false, got {shortened(repr(value))}")
    return text
