"""`finetrainers serve-reward`: serve a reward to the training processes of this or another machine."""

from __future__ import annotations

import argparse
import os
from typing import Any

from pydantic import TypeAdapter, ValidationError

from finetrainers.config.errors import ConfigError, Problem, value_kind, value_message
from finetrainers.config.rewards import Reward, RewardEntry
from finetrainers.utils.logs import quiet_progress_bars

from .options import make_number_type, positive_integer

# As in rewards/server.py, which imports torch.
_TOKEN_VARIABLE = "FINETRAINERS_REWARD_TOKEN"


def add_serve_reward(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "serve-reward",
        help="serve a reward over HTTP; use it with --reward http://HOST:PORT",
        epilog="Connections are not encrypted: listen only where all clients are trusted, with or without a token. "
        f"Training processes send the token in {_TOKEN_VARIABLE}.",
    )
    parser.add_argument(
        "reward", metavar="NAME[,option=value...]", help="registered name or module:Class, as in --reward"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all [127.0.0.1]")
    port = make_number_type("must be a whole number from 0 to 65535", 0, 65535)
    parser.add_argument("--port", type=port, default=8000, help="port to listen on; 0 for any free one [%(default)s]")
    parser.add_argument(
        "--device",
        help="device of the reward, such as cuda:7 if training on this machine uses the first GPUs [auto: the first "
        "GPU]",
    )
    parser.add_argument("--max_mib", type=positive_integer, default=1024, help="largest request in MiB [%(default)s]")
    parser.add_argument(
        "--max_clips", type=positive_integer, default=256, help="maximum number of clips per request [%(default)s]"
    )
    parser.add_argument(
        "--token",
        help=f"accept only requests with this token; prefer {_TOKEN_VARIABLE}, since other users can see arguments "
        "of processes [that variable, else none]",
    )
    parser.set_defaults(run=_serve_reward, check=_check)


def _check(arguments: argparse.Namespace) -> list[Problem]:
    """Return the problems that need no reward, and set the reward's options and the token."""
    problems = []
    try:
        arguments.token = _token(arguments.token)
    except ConfigError as error:
        problems += error.problems
    try:
        arguments.reward = _entry(arguments.reward)
    except ConfigError as error:
        return [*problems, *error.problems]
    reward_device = arguments.reward.options.get("device")
    if None not in (arguments.device, reward_device) and reward_device != arguments.device:
        message = f"{arguments.device}, but the reward has device={reward_device}"
        problems.append(Problem("--device", message, "conflict"))
    elif arguments.device is not None:
        arguments.reward.options["device"] = arguments.device
    return problems


def _serve_reward(arguments: argparse.Namespace) -> int:
    entry: RewardEntry = arguments.reward
    from finetrainers.rewards.registry import absent_gpu, make_reward, takes_device
    from finetrainers.rewards.server import RewardServer

    if takes_device(entry) and (device := absent_gpu(entry)) is not None:
        message = f"PyTorch sees no GPU for device {device!r} on this machine; use cpu, or leave it out"
        raise ConfigError([Problem("--device" if arguments.device else "reward", message, "unavailable")])
    quiet_progress_bars()
    try:
        reward = make_reward(entry.reward, dict(entry.options))
    except ValueError as error:
        raise ConfigError([Problem.from_error("reward", error)]) from error
    try:
        server = RewardServer(
            reward,
            name=entry.name,
            host=arguments.host,
            port=arguments.port,
            max_bytes=arguments.max_mib * 2**20,
            max_clips=arguments.max_clips,
            token=arguments.token,
            batch_size=entry.batch_size,
        )
    except OSError as error:
        message = f"cannot listen on {arguments.host}:{arguments.port}: {error}"
        raise ConfigError([Problem("--host, --port", message, "unavailable")]) from error
    server.run()
    return 0


def _entry(text: str) -> RewardEntry:
    """Return the entry to serve, without the fields that belong to the training run."""
    try:
        entry: RewardEntry = TypeAdapter(Reward).validate_python(text)
    except ValidationError as error:
        problems = [
            Problem("reward", ": ".join([*map(str, detail["loc"]), value_message(detail)]), value_kind(detail))
            for detail in error.errors()
        ]
        raise ConfigError(problems) from None
    elsewhere = sorted(entry.model_fields_set & {"weight", "mean", "std", "every"})
    messages = [f"set {name} where the reward is used, not where it is served" for name in elsewhere]
    if entry.head is not None:
        messages.append(f"a server provides all heads of {entry.reward}; use one in training: http://...#{entry.head}")
    if messages:
        raise ConfigError([Problem("reward", message, "unsupported") for message in messages])
    return entry


def _token(token_option: str | None) -> str | None:
    """Return the token that requests must have, or None if they need none.

    Raises:
        ConfigError: it is not valid in a header.
    """
    token = token_option if token_option is not None else os.environ.get(_TOKEN_VARIABLE)
    if token is None or (token_option is None and not token):
        return None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        place = "--token" if token_option is not None else _TOKEN_VARIABLE
        raise ConfigError([Problem(place, "must be ASCII letters, digits and signs, without spaces")])
    return token
