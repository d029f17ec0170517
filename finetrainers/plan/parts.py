"""Parts of a run that only Python can give: prompts, rewards, network, optimizer and others. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import REPLACED, load_config
from finetrainers.config.methods import trait
from finetrainers.config.prompts import PYTHON_PROMPTS, prompt_rows, python_prompts_set
from finetrainers.config.root import TrainConfig
from finetrainers.data.reading.sources.python_rows import StoredRows
from finetrainers.parallel.sharding import expected_split
from finetrainers.utils.failures import InputError, Kind
from finetrainers.utils.text import plural

from .digests import EARLIER_DIGITS, Fingerprint, describe

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from finetrainers.methods.base import Method

#: Options that take their values from a LoraConfig, and its attribute for each.
_LORA_OPTIONS = {
    "rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}  # fmt: skip
#: Names of each part in the note on uncompared objects.
_LISTED = 5
#: Initializations of a LoRA that leave the model's own weights as they are.
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal")


@dataclass(frozen=True)
class CustomParts:
    """Python objects that take the place of options; None leaves the options as they are.

    Attributes:
        network: the transformer, trained in a copy.
        lora: settings of the adapter.
        method: class of the method; the options and the data are those of `--method`.
        optimizer: returns the optimizer over a list of trainable parameters.
        lr_at: learning rate of optimizer step n, from 0.
        data, eval_data: rows to train on and to evaluate; the options name their files.
        prompts, eval_prompts: strings, or mappings like the lines of a JSON file of prompts.
        rewards: functions, modules, instances or classes of rewards, by the name that `reward` may have.
    """

    network: nn.Module | None = None
    lora: LoraConfig | None = None
    method: type[Method] | None = None
    optimizer: Callable[[list[Parameter]], Optimizer] | None = None
    lr_at: Callable[[int], float] | None = None
    data: StoredRows | None = None
    eval_data: StoredRows | None = None
    prompts: str | Sequence[str | Mapping[str, Any]] | None = None
    eval_prompts: str | Sequence[str | Mapping[str, Any]] | None = None
    rewards: Mapping[str, Any] | None = None

    @property
    def by_name(self) -> dict[str, Any]:
        """The parts that are not None, by name; each reward for itself."""
        parts = {part.name: value for part in fields(self) if (value := getattr(self, part.name)) is not None}
        if isinstance(self.rewards, Mapping):
            parts |= {f"rewards.{name}": reward for name, reward in parts.pop("rewards").items()}
        return parts

    @cached_property
    def described(self) -> dict[str, Fingerprint]:
        """The descriptions of the parts, by name."""
        return {name: _describe(name, part) for name, part in self.by_name.items()}

    @property
    def uncompared_note(self) -> str | None:
        """A note that names uncompared state and objects within the parts, or None if there are none."""
        texts = []
        for name, (_, uncompared) in self.described.items():
            more = f" and {len(uncompared) - _LISTED} more" if len(uncompared) > _LISTED else ""
            texts += [f"{name} ({', '.join(uncompared[:_LISTED])}{more})"] if uncompared else []
        return f"note: not compared when the run is resumed: {'; '.join(texts)}" if texts else None

    @property
    def prompts_by_option(self) -> dict[str, Any]:
        """The prompts, by the option that they replace."""
        return {name: self.by_name[name] for name in PYTHON_PROMPTS if name in self.by_name}

    @property
    def schedule(self) -> Callable[[int], float] | None:
        """Learning rate of each step by `lr_at`, which raises an InputError for one that is negative or not finite."""
        if (lr_at := self.lr_at) is None:
            return None

        return partial(_rate_at, lr_at)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make prompts and rewards available to this thread, within the block; `applied_to` has checked them."""
        with ExitStack() as stack:
            stack.enter_context(python_prompts_set(self.prompts_by_option))
            if self.rewards:
                from finetrainers.rewards.registry import python_rewards_set

                stack.enter_context(python_rewards_set(self.rewards))
            yield

    def applied_to(self, config: TrainConfig) -> TrainConfig:
        """Return a configuration with fingerprints of the parts, and with options that follow from them.

        Raises:
            ConfigError: a part is of the wrong type, contradicts an option, or is missing from those of an earlier run.
        """
        problems = [
            *missing_part_problems(self, config),
            *(Problem(name, message, kind) for name, (message, kind) in self._type_problems()),
        ]
        if not problems:
            problems += self._conflicts(config)
        if problems:
            raise ConfigError(problems)
        options: dict[str, Any] = {"parts": [f"{name}={part.text}" for name, part in self.described.items()]}
        if self.lora is not None:
            options |= _lora_options(self.lora)
        options |= {name: PYTHON_PROMPTS[name] for name in self.prompts_by_option}
        if self.rewards and not config.get("reward") and trait(config.training.method, "samples"):
            options["reward"] = list(self.rewards)
        config = config if options == {"parts": config.run.parts} else load_config(config, **options)
        if unused := list(self._unused_rewards(config)):
            raise ConfigError(unused)
        return config

    def _unused_rewards(self, config: TrainConfig) -> Iterator[Problem]:
        """Yield the rewards that no option names."""
        names = {entry.reward for option in ("reward", "eval_reward") for entry in config.get(option)}
        for name in self.rewards or ():
            if name not in names:
                message = "neither reward nor eval_reward has its name; add it, or remove this reward"
                yield Problem(f"rewards.{name}", message, "conflict")

    def _type_problems(self) -> Iterator[tuple[str, tuple[str, Kind]]]:
        """Yield the parts that are of the wrong type, each with the message."""
        for name in ("optimizer", "lr_at"):
            if name in self.by_name and not callable(self.by_name[name]):
                argument = "parameters" if name == "optimizer" else "step"
                yield name, (f"expected a function ({argument}), got {type(self.by_name[name]).__name__}", "invalid")
        yield from self._input_problems()
        if self.network is not None:
            from torch.nn import Module

            if not isinstance(self.network, Module):
                yield "network", (f"expected a torch.nn.Module, got {type(self.network).__name__}", "invalid")
        if callable(self.lr_at) and (problem := _rate_problem(self.lr_at)) is not None:
            yield "lr_at", (problem, "invalid")
        if self.method is not None:
            from finetrainers.methods.registry import class_problem

            if (problem := class_problem(self.method)) is not None:
                yield "method", (problem, "invalid")
        if self.lora is not None:
            yield from (("lora", problem) for problem in _lora_problems(self.lora))

    def _input_problems(self) -> Iterator[tuple[str, tuple[str, Kind]]]:
        """Yield the prompts and rewards that cannot be used, each with the message."""
        for name, prompts in self.prompts_by_option.items():
            try:
                prompt_rows(prompts, name)
            except ConfigError as error:
                yield from ((problem.where, (problem.message, problem.kind)) for problem in error.problems)
        if self.rewards is None:
            return
        if not isinstance(self.rewards, Mapping):
            yield "rewards", (f"expected rewards by name, got {type(self.rewards).__name__}", "invalid")
            return
        from finetrainers.rewards.registry import python_reward_problem

        for name, reward in self.rewards.items():
            if (problem := python_reward_problem(name, reward)) is not None:
                yield f"rewards.{name}", (str(problem), problem.kind)

    def _conflicts(self, config: TrainConfig) -> Iterator[Problem]:
        """Yield the options that contradict the parts."""
        for name in self.prompts_by_option:
            if config.get(name) not in (None, PYTHON_PROMPTS[name]):
                message = f"is {config.get(name)}, and train has {name}=; remove one of them"
                yield Problem(f"--{name}", message, "conflict")
        for name in self.by_name.keys() & REPLACED.keys():
            for option in REPLACED[name]:
                # Runs of earlier versions chose the recommended rate beside a part.
                if config.changed(option) and (option != "lr" or config.is_given(option)):
                    yield Problem(f"--{option}", f"cannot be combined with {name}=; remove one of them", "conflict")
        if self.optimizer is not None and config.training.master_weights != "fp32":
            yield Problem("--master_weights", "requires an optimizer of --optimizer; remove one of them", "conflict")
        if self.optimizer is not None and expected_split(config.parallel).zero_stage:
            yield Problem("optimizer", "is not supported with DeepSpeed; use DDP or FSDP2", "unsupported")
        if self.lora is not None:
            yield from _lora_conflicts(self.lora, config)


def has_part(config: TrainConfig, name: str) -> bool:
    """Return whether a run has this object of Python."""
    return any(part.partition("=")[0] == name for part in config.run.parts)


def missing_part_problems(parts: CustomParts, config: TrainConfig) -> Iterator[Problem]:
    """Yield the parts that a configuration was trained with, and that are not given."""
    for part in config.run.parts:
        name = part.partition("=")[0]
        if name not in parts.by_name:
            reward = name.removeprefix("rewards.")
            argument = f"{name}=..." if reward == name else f"rewards={{{reward!r}: ...}}"
            message = (
                f"the configuration requires {part}; call train(config, {argument}) in Python, or set `parts = []` to "
                "train without it"
            )
            yield Problem("--parts", message, "required")


def _rate_at(lr_at: Callable[[int], Any], step: int) -> float:
    """Return the learning rate of a step.

    Raises:
        InputError: it is not a finite number from 0.
    """
    value = lr_at(step)
    rate = float(value) if hasattr(value, "__float__") else -1.0
    if not 0 <= rate < float("inf"):
        raise InputError(f"lr_at({step}) must return a finite number from 0, got {value!r}", "invalid")
    return rate


def _rate_problem(lr_at: Callable[[int], float]) -> str | None:
    """Return why a function is not a schedule, by its first value, or None if it may be one."""
    try:
        _rate_at(lr_at, 0)
    except InputError as error:
        return str(error)
    except Exception as error:  # of the user's function
        return f"lr_at(0) must return a number: {type(error).__name__}: {error}"
    return None


def _lora_problems(lora: Any) -> Iterator[tuple[str, Kind]]:
    """Yield why an adapter with these settings cannot be trained, or not be saved as a LoRA file."""
    from peft import LoraConfig

    if not isinstance(lora, LoraConfig):
        yield f"expected a peft.LoraConfig, got {type(lora).__name__}", "invalid"
        return
    if lora.init_lora_weights not in _INITIALIZATIONS:
        message = f"init_lora_weights={lora.init_lora_weights!r} changes the model's weights, which no LoRA file has"
        yield f"{message}; use one of {', '.join(map(repr, _INITIALIZATIONS))}", "unsupported"
    for name, default in (("bias", "none"), ("modules_to_save", None), ("trainable_token_indices", None)):
        if (value := getattr(lora, name, default)) not in (default, [], ()):
            yield f"{name}={value!r} trains weights that a LoRA file does not have; remove it", "unsupported"


def _lora_conflicts(lora: LoraConfig, config: TrainConfig) -> Iterator[Problem]:
    """Yield the options that contradict an adapter's settings."""
    if config.training.training_type != "lora":
        yield Problem("lora", "requires --training_type lora; remove one of them", "conflict")
    for option, value in _lora_options(lora).items():
        if config.is_given(option) and config.get(option) != value:
            message = f"is {config.get(option)!r}, and lora= has {value!r}; set only one of them"
            yield Problem(f"--{option}", message, "conflict")


def _lora_options(lora: LoraConfig) -> dict[str, Any]:
    """Return the options that have the values of an adapter's settings."""
    options = {option: getattr(lora, attribute) for option, attribute in _LORA_OPTIONS.items()}
    if isinstance(lora.target_modules, str):
        options["target_modules"] = [f"(?:{lora.target_modules})"]
    elif lora.target_modules:
        options["target_modules"] = sorted(lora.target_modules)
    return options


def _describe(name: str, part: Any) -> Fingerprint:
    """Return the description of a part, with a digest, for the configuration on disk."""
    if isinstance(part, StoredRows):
        return Fingerprint(part.fingerprint, [])
    if name not in PYTHON_PROMPTS:
        return describe(part)
    digest = hashlib.sha256(json.dumps(prompt_rows(part), sort_keys=True).encode()).hexdigest()[:12]
    return Fingerprint(f"{plural(len(part), 'prompt')} {digest}", [])


def equal_parts(saved: Sequence[str], now: Sequence[str]) -> bool:
    """Return whether the parts of a checkpoint are those of a run; digests of earlier versions are not compared."""
    pairs = list(zip(saved, now, strict=False))
    return len(saved) == len(now) and all(then == part or _is_earlier(then, part) for then, part in pairs)


def _is_earlier(then: str, now: str) -> bool:
    """Return whether two descriptions have one name, and the first one has the shorter digest of earlier versions."""
    (name, _, digest), (name_now, _, digest_now) = then.rpartition(" "), now.rpartition(" ")
    return name == name_now and len(digest) == EARLIER_DIGITS < len(digest_now)
