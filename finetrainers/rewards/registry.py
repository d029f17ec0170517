"""Registry of rewards, and construction of a reward from its configuration entry. Imports no torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints, overload

from finetrainers.config.errors import value_kind
from finetrainers.config.rewards import RewardEntry
from finetrainers.utils.addresses import resolve
from finetrainers.utils.failures import InputError
from finetrainers.utils.launch import local_world_size
from finetrainers.utils.registry import Registry
from finetrainers.utils.text import nearest

from .functions import SCOPES, Scorer, class_from_function

if TYPE_CHECKING:
    from .base import ImageUse, Reward
    from .calls import Columns


def _problem(name: str, scorer: Any) -> str | None:
    """Return why an object cannot be the reward of a name, or None if it can."""
    if not name or set(name) & set(".:=, "):
        return "must not contain '.', ':', '=', ',' or spaces"
    if not callable(scorer) and not isinstance(scorer, str):
        return f"must be a function or a Reward subclass, got {type(scorer).__name__}"
    return None


#: Rewards by name: `module:attribute`, or an object that was registered from outside.
REWARDS: Registry[Any] = Registry("reward", "rewards", problem=_problem, origins=lambda scorer: (scorer,))


@overload
def register_reward(name: str, factory: None = None) -> Callable[[Scorer], Scorer]: ...


@overload
def register_reward(name: str, factory: Scorer) -> Scorer: ...


def register_reward(name: str, factory: Any = None) -> Any:
    """Make a reward available as `--reward name`; also a decorator.

        @register_reward("red")
        def red(videos, prompts):
            return videos[:, :, 0].mean(dim=(1, 2, 3))

    Register a function `(videos, prompts) -> scores [B]` with videos `[B, T, C, H, W]` in [0, 1], a `Reward` subclass,
    or the address `module:attribute` of either. The function may be async, and may return a list with None for clips
    without a score. Its keyword `fps` is the frame rate, `images` the images that clips start from, `[B, 3, H, W]`;
    others, and `**columns`, are columns of the prompts, lists of one value per clip. With a default they may be left
    out.

    One that is defined in the same module replaces that of a name, as notebook cells are edited and run again.

    Raises:
        ValueError: the name is registered already, or could be an address or a head, or nothing can be called.
    """

    def add(scorer: Any) -> Any:
        REWARDS.add(name, scorer)
        return scorer

    return add if factory is None else add(factory)


#: Rewards by name that `train` was called with, for the time of the call; they precede registered ones.
_python_rewards: ContextVar[Mapping[str, Any]] = ContextVar("rewards from Python", default={})  # noqa: B039


@contextmanager
def python_rewards_set(rewards: Mapping[str, Any]) -> Iterator[None]:
    """Let names mean these rewards in this thread, within the block: functions, modules, instances or classes."""
    token = _python_rewards.set(rewards)
    try:
        yield
    finally:
        _python_rewards.reset(token)


def python_reward_problem(name: Any, scorer: Any) -> InputError | None:
    """Return why `train` cannot be called with a reward of this name, or None if it can (imports torch)."""
    from .base import Reward

    if not isinstance(name, str):
        return InputError(f"the name of a reward must be a string, got {type(name).__name__}")
    if current_name(name, ()) in INCLUDED:
        return InputError(f"{name} is the name of a built-in reward; use another name", "duplicate")
    if isinstance(scorer, str):
        return InputError(f"expected a function, a module or a Reward, got a string; name {scorer} by `reward`")
    is_class = inspect.isclass(scorer)
    if (is_class and not issubclass(scorer, Reward)) or not (callable(scorer) or isinstance(scorer, Reward)):
        description = f"the class {scorer.__name__}; pass an instance" if is_class else type(scorer).__name__
        return InputError(f"expected a function, a module or a Reward, got {description}")
    problem = _problem(name, "")
    return None if problem is None else InputError(f"the name of a reward {problem}")


#: Earlier names of rewards and heads, which older configurations may have.
_OLD_NAMES = {"colour": "color", "taste": "preferred_color", "taste_shown": "preferred_color_shown"}


def current_name(name: str, names: Collection[str]) -> str:
    """Return the current name of a reward or head, which may be given by an earlier one."""
    return name if name in names else _OLD_NAMES.get(name, name)


def reward_names() -> list[str]:
    """Return the names of all rewards, including those of installed packages."""
    return sorted(REWARDS.all())


def resolve_reward(name: str) -> type[Reward]:
    """Return the reward class of a registered name, `module:attribute` or a server's address (imports torch).

    Raises:
        ValueError: nothing has that name, or it is not a reward.
    """
    from .base import Reward

    if name.startswith(("http://", "https://")):
        from .served import ServedReward

        return ServedReward.at(name)
    python_rewards = _python_rewards.get()
    if name in python_rewards:
        scorer = python_rewards[name]
    else:
        scorer = name if ":" in name else REWARDS.get(current_name(name, REWARDS.registered))
    if scorer is None:
        raise InputError(REWARDS.unknown(name, python_rewards), "unknown")
    if isinstance(scorer, str):
        scorer = _import(scorer)
    if inspect.isclass(scorer) and issubclass(scorer, Reward):
        return scorer
    if isinstance(scorer, Reward):
        return _from_instance(scorer)
    if callable(scorer):
        return class_from_function(scorer)
    raise ValueError(f"reward {name!r}: expected a function or a Reward subclass, got {type(scorer).__name__}")


def takes_device(entry: RewardEntry) -> bool:
    """Return whether a reward has an option for its device. A server chooses its own."""
    if entry.reward.startswith(("http://", "https://")):
        return False
    try:
        return "device" in inspect.signature(resolve_reward(entry.reward)).parameters
    except ValueError:  # an unknown reward, reported elsewhere
        return False


def copies_on_gpu(entry: RewardEntry) -> int:
    """Return the maximum number of a reward's copies on one training GPU; 0 if they compute elsewhere.

    By default each process has a copy on its own GPU. A named GPU has the copies of all processes of the machine.
    """
    match = re.fullmatch(r"cuda:(\d+)", entry.options.get("device", "auto"))
    if match is None:
        return 0 if entry.options.get("device") == "cpu" else 1
    processes = local_world_size()
    return processes if int(match[1]) < processes else 0


def columns_taken(entry: RewardEntry) -> Columns:
    """Return the columns of prompts that a reward takes (imports torch); of a server all, until it is contacted."""
    from .calls import Columns

    try:
        return resolve_reward(entry.reward).columns
    except ValueError:  # an unknown reward, reported elsewhere
        return Columns()


def compares_clips(entry: RewardEntry) -> bool:
    """Return whether a reward compares the clips of a prompt. A server reports it only when it is contacted."""
    try:
        return resolve_reward(entry.reward).scope == "group"
    except ValueError:  # an unknown reward, reported elsewhere
        return False


def single_clip_problem(entry: RewardEntry) -> str | None:
    """Return why a reward cannot score a clip by its prompt's text alone, or None if it can."""
    if compares_clips(entry):
        return f"{entry.name} compares the clips of a prompt in rollouts, and here each prompt has one; use another"
    columns = columns_taken(entry)
    if columns.required:
        names = ", ".join(columns.required)
        return (
            f"{entry.name} requires {names} of each prompt, which only prompts of reward finetuning have; use another"
        )
    return None


def image_use(entry: RewardEntry) -> ImageUse:
    """Return how a reward uses the images that clips start from. A server reports it only when it is contacted."""
    try:
        return resolve_reward(entry.reward).images
    except ValueError:  # an unknown reward, reported elsewhere
        return "none"


def absent_gpu(entry: RewardEntry) -> str | None:
    """Return the GPU of a reward if this machine does not have it, else None (imports torch)."""
    from torch.cuda import device_count

    match = re.fullmatch(r"cuda:?(\d+)?", entry.options.get("device", "auto"))
    return None if match is None or int(match[1] or 0) < device_count() else match[0]


def on_device(entries: Sequence[RewardEntry], device: str | None) -> list[RewardEntry]:
    """Return the entries with `device` set for each reward that takes a device and has none."""
    return [
        entry.model_copy(update={"options": {**entry.options, "device": device}})
        if device is not None and "device" not in entry.options and takes_device(entry)
        else entry
        for entry in entries
    ]


def reward_problems(entry: RewardEntry, parts: Sequence[str] = ()) -> list[ValueError]:
    """Return the problems of an entry: unknown name, head or option. Loads no weights.

    Args:
        entry: the reward.
        parts: option `parts` of the run, whose rewards of Python exist only in a call of `train` with them.
    """
    is_part = any(part.startswith(f"rewards.{entry.reward}=") for part in parts)
    if is_part and entry.reward not in _python_rewards.get():
        message = f"is a reward of a Python program; call train(config, rewards={{{entry.reward!r}: ...}})"
        return [InputError(f"{entry.name} {message}, or use another reward", "required")]
    try:
        cls = resolve_reward(entry.reward)
    except ValueError as error:
        return [error]
    problems: list[ValueError] = [*_class_problems(cls, entry.name)]
    try:
        select_head(entry, cls.heads)
    except ValueError as error:
        problems.append(error)
    return problems + _arguments(cls, entry.name, entry.options)[1]


def _class_problems(cls: type[Reward], name: str) -> Iterator[InputError]:
    """Yield reasons why a reward's class cannot be made, or its function cannot be called with clips and prompts."""
    if inspect.isabstract(cls):
        yield InputError(f"{name}: {cls.__name__} has no {', '.join(sorted(cls.__abstractmethods__))}", "required")
    if cls.scope not in SCOPES:
        yield InputError(f"{name}: scope must be 'clip' or 'group', got {cls.scope!r}", "unknown")
    if cls.differentiable and (cls.asynchronous or cls.scope == "group"):
        trait = "async" if cls.asynchronous else "of scope 'group'"
        yield InputError(
            f"{name}: a reward that is {trait} has no gradient; remove differentiable = True", "unsupported"
        )
    function = getattr(cls, "called", None)
    if function is not None:
        yield from _signature_problems(function, name, cls.columns, images=None)
    else:
        for method in ("score", "differentiate") if cls.differentiable else ("score",):
            called = partial(getattr(cls, method), None)
            yield from _signature_problems(called, f"{name}: {method}", cls.columns, images=cls.images, fps=8.0)


def _signature_problems(
    function: Callable[..., Any], name: str, columns: Columns, *, images: ImageUse | None, **keywords: float
) -> Iterator[InputError]:
    """Yield a problem if a function cannot be called with clips, prompts, keywords and columns.

    `images` is the declared use of images, or None if the function's keyword decides.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # Python does not know the function's arguments
        return
    names = {"images"} if images != "none" and (images is not None or "images" in signature.parameters) else set()
    names |= {"fps"} & signature.parameters.keys()
    try:
        signature.bind("videos", "prompts", **{**dict.fromkeys([*names, *columns.required]), **keywords})
    except TypeError as error:
        rest = ", fps" if keywords else ""
        message = (
            f"{name} must take (videos, prompts{rest}), and optionally images and columns of the prompts by name: "
            f"{error}"
        )
        yield InputError(message, "mismatch")


def size_problem(entry: RewardEntry, size: tuple[int, int, int]) -> str | None:
    """Return why a reward cannot score clips of a size, or None if it can or is a server."""
    min_frames = resolve_reward(entry.reward).min_frames
    if size[0] >= min_frames:
        return None
    return f"compares frames: clips must have at least {min_frames}, got {size[0]}; sample more frames"


def prompt_problem(entry: RewardEntry, prompt: str) -> str | None:
    """Return why a reward cannot score clips of a prompt, or None if it can."""
    return resolve_reward(entry.reward).prompt_problem(entry.options, prompt)


def server_problem(entry: RewardEntry, columns: Collection[str] = ()) -> ValueError | None:
    """Return why a reward's server cannot score prompts with these columns, or None if it can; contacts the server."""
    try:
        reward = make_reward(entry.reward, {**entry.options, "retries": "0"})
    except ValueError as error:
        return error
    except (OSError, RuntimeError) as error:
        return InputError(str(error), "unavailable")
    missing = [name for name in reward.columns.required if name not in columns]
    if missing:
        message = f"{entry.name} requires the column {missing[0]!r} of the prompts{nearest(missing[0], columns)}"
        return InputError(message, "required")
    return None


def gradient_problem(entry: RewardEntry) -> str | None:
    """Return why no gradient of a reward can be computed, or None if it is differentiable. Loads no weights.

    Raises:
        ValueError: the reward is unknown.
    """
    if resolve_reward(entry.reward).differentiable:
        return None
    names = ", ".join(name for name in reward_names() if resolve_reward(name).differentiable)
    return (
        f"{entry.name} has no gradient. Use one of {names}, or a function `module:function` with "
        "`function.differentiable = True`. Weight 0 only logs it; policy gradients support any reward"
    )


def select_head(entry: RewardEntry, heads: Collection[str]) -> str:
    """Return the head of a reward that an entry names, or its only one.

    Raises:
        ValueError: the head is unknown, or the entry names none of several.
    """
    if entry.head is None and len(heads) == 1:
        (head,) = heads
        return head
    if entry.head is None:
        choices = ", ".join(f"{entry.name}.{head}" for head in heads)
        raise InputError(f"{entry.name} has several scores; use one: {choices}", "required")
    head = current_name(entry.head, heads)
    if head not in heads:
        raise InputError(f"{entry.reward} has no score {entry.head!r}{nearest(entry.head, heads)}", "unknown")
    return head


def reward_bytes(entry: RewardEntry) -> float | None:
    """Return the bytes of a reward's weight files on each GPU, or None if the files are not on this disk.

    It is 0 without a network, or if the reward computes elsewhere.
    """
    copies = copies_on_gpu(entry)
    sizes = [_file_bytes(path) for path in _weights_paths(entry)] if copies else []
    return None if None in sizes else copies * sum((size for size in sizes if size is not None), 0.0)


def missing_repositories(entry: RewardEntry) -> list[str]:
    """Return the Hub repositories of a reward's weights that are not on this disk."""
    from .weights import on_disk

    return [path for path in _weights_paths(entry) if on_disk(path) is None]


def unavailable_weights_problem(repository: str, away: str) -> str:
    """Return the problem that a reward's weights are neither on this disk nor available from the Hub."""
    return (
        f"{repository} is not on this disk, and {away}; download it first with a connection (`hf download "
        f"{repository}`), into the same cache (HF_HOME), or set another path=..."
    )


def _weights_paths(entry: RewardEntry) -> list[str]:
    """Return paths and Hub ids of a reward's weights, or none without a network or on a server."""
    if entry.reward.startswith(("http://", "https://")):
        return []
    cls = resolve_reward(entry.reward)
    parameters = inspect.signature(cls).parameters
    return [entry.options.get(name, parameters[name].default) for name in cls.weights_options if name in parameters]


def _file_bytes(path: str) -> float | None:
    """Return the bytes of the weight files at a path, or of a Hub id in the cache, or None if none are on this disk."""
    from .weights import on_disk

    local_path = on_disk(path)
    if local_path is None or local_path.is_file():
        return None if local_path is None else float(local_path.stat().st_size)
    for patterns in (("*.safetensors",), ("*.pt", "*.pth", "*.bin")):  # of two formats only one is read
        files = [file for pattern in patterns for file in local_path.rglob(pattern)]
        if files:
            return float(sum(file.stat().st_size for file in files))
    return None


def working_bytes(entry: RewardEntry, size: tuple[int, int, int], *, fps: float) -> float | None:
    """Return the bytes that scoring takes on a process's device, excluding the network, or None if unknown."""
    copies = copies_on_gpu(entry)
    if entry.reward.startswith(("http://", "https://")) or not copies:
        return 0.0
    cls = resolve_reward(entry.reward)
    copy_bytes = cls.working_bytes(entry.options, size, clips=entry.batch_size or cls.batch_size, fps=fps)
    return None if copy_bytes is None else copies * copy_bytes


def graph_bytes(entry: RewardEntry, size: tuple[int, int, int], *, fps: float) -> float | None:
    """Return the bytes that a reward's gradient takes on its device, excluding the network, or None if unknown."""
    if not copies_on_gpu(entry):
        return 0.0
    cls = resolve_reward(entry.reward)
    return cls.graph_bytes(entry.options, size, clips=entry.batch_size or cls.batch_size, fps=fps)


def make_reward(name: str, options: Mapping[str, str]) -> Reward:
    """Return a reward with its options, converted to the types of their annotations.

    Raises:
        ValueError: an option is unknown, missing, or not of its type.
    """
    cls = resolve_reward(name)
    arguments, problems = _arguments(cls, name, options)
    if problems:
        raise InputError("; ".join(map(str, problems)), problems[0].kind)
    return cls(**arguments)


def _arguments(cls: type[Reward], name: str, options: Mapping[str, str]) -> tuple[dict[str, Any], list[InputError]]:
    """Return options converted to the types of a reward's `__init__`, and their problems."""
    from pydantic import TypeAdapter, ValidationError

    parameters = inspect.signature(cls).parameters
    types = get_type_hints(cls.__init__, include_extras=True)
    arguments, problems = dict[str, Any](), list[InputError]()
    for option, text in options.items():
        if option not in parameters:
            hint = nearest(option, parameters) if parameters else "; it has no options"
            problems.append(InputError(f"{name} has no option {option!r}{hint}", "unknown"))
            continue
        try:
            arguments[option] = TypeAdapter(types.get(option, str)).validate_python(text)
        except ValidationError as error:
            entry = error.errors()[0]
            message = f"{name}: {option}={text!r}: {entry['msg'].removeprefix('Value error, ')}"
            problems.append(InputError(message, value_kind(entry)))
    for option, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            problems.append(InputError(f"{name} requires {option}: --reward {name},{option}=...", "required"))
    return arguments, problems


def _import(address: str) -> Any:
    module, _, attribute = address.partition(":")
    try:
        return resolve(address)
    except ModuleNotFoundError as error:
        raise InputError(f"reward {address!r}: {error}", "not_installed") from error
    except AttributeError:
        raise InputError(f"reward {address!r}: module {module} has no {attribute!r}", "unknown") from None


#: Attributes of rewards that are read before one is made.
_TRAITS = (
    "heads", "batch_size", "scope", "columns", "asynchronous", "differentiable", "images", "recomputes", "patience",
    "min_frames",
)  # fmt: skip


def _from_instance(reward: Reward) -> type[Reward]:
    """Return a class whose only instance is a reward that exists already."""

    class ExistingReward(type(reward)):  # type: ignore[misc]
        def __new__(cls) -> Reward:  # type: ignore[misc]
            return reward

        def __init__(self) -> None: ...

    for name in _TRAITS:  # an instance may set them
        setattr(ExistingReward, name, getattr(reward, name))
    ExistingReward.__name__ = type(reward).__name__
    return ExistingReward


#: Included rewards, by module and class below `finetrainers`; their code loads when they are used.
for _name, _address in {
    "brightness": "rewards.pixels:Brightness",
    "contrast": "rewards.pixels:Contrast",
    "saturation": "rewards.pixels:Saturation",
    "color": "rewards.pixels:Color",
    "sharpness": "rewards.pixels:Sharpness",
    "compressibility": "rewards.pixels:Compressibility",
    "incompressibility": "rewards.pixels:Incompressibility",
    "motion": "rewards.movement:Motion",
    "smoothness": "rewards.movement:Smoothness",
    "steadiness": "rewards.movement:Steadiness",
    "clipscore": "rewards.clip_models:CLIPScore",
    "pickscore": "rewards.clip_models:PickScore",
    "hpsv2": "rewards.clip_models:HPSv2",
    "aesthetic": "rewards.clip_models:Aesthetic",
    "hpsv3": "rewards.hpsv3:HPSv3",
    "videoalign": "rewards.videoalign:VideoAlign",
    "demo": "demo.reward:DemoWorld",
    "preferred_color": "demo.color_preference:similarity",
    "preferred_color_shown": "demo.color_preference:shown",
}.items():
    register_reward(_name, f"finetrainers.{_address}")
#: Names of the included rewards.
INCLUDED = frozenset(REWARDS.registered)
