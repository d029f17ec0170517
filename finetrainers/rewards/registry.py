"""The registry of rewards, and the construction of one from its entry in the configuration. Imports no torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from finetrainers.config.rewards import RewardEntry
from finetrainers.utils.addresses import resolve, same_name
from finetrainers.utils.launch import local_world_size
from finetrainers.utils.text import nearest

if TYPE_CHECKING:
    from torch import Tensor

    from .base import ImageUse, Reward

#: Name to `module:attribute`, or to what was registered from outside.
_REWARDS: dict[str, Any] = {}


def register_reward(name: str, factory: Any = None) -> Any:
    """Make a reward available as `--reward name`; also a decorator.

    What is registered is a function `(videos, prompts) -> scores [B]` with videos `[B, T, C, H, W]` in [0, 1], a
    `Reward` subclass, or the address `module:attribute` of either. A function with the keyword `images` is given those that
    clips start from, `[B, 3, H, W]`; with a default it may be left out.

    The same function or class, by module and name, may be registered again, as notebook cells do.

    Raises:
        ValueError: the name is taken, or cannot be told from an address or a head.
    """

    def add(found: Any) -> Any:
        if name in _REWARDS and not same_name(_REWARDS[name], found):
            raise ValueError(f"reward {name!r} is registered already")
        if not name or set(name) & set(".:=, "):
            raise ValueError(f"reward name {name!r} must be without '.', ':', '=', ',' and blanks")
        _REWARDS[name] = found
        return found

    return add if factory is None else add(factory)


#: Earlier names of rewards and heads, which configurations may still hold.
_OLD_NAMES = {"colour": "color", "taste": "preferred_color", "taste_shown": "preferred_color_shown"}


def current_name(name: str, known: Collection[str]) -> str:
    """The name, or if it is not known and an earlier one of a reward or head, today's."""
    return name if name in known else _OLD_NAMES.get(name, name)


def reward_names() -> list[str]:
    """Registered names."""
    return sorted(_REWARDS)


def resolve_reward(name: str) -> type[Reward]:
    """The scorer's class behind a registered name, `module:attribute` or a server's address (imports torch).

    Raises:
        ValueError: nothing has that name, or what has is no reward.
    """
    from .base import Reward

    if name.startswith(("http://", "https://")):
        from .served import ServedReward

        return ServedReward.at(name)
    found = _REWARDS.get(current_name(name, _REWARDS), name)
    if isinstance(found, str):
        if ":" not in found:
            raise ValueError(f"unknown reward {name!r}{nearest(name, _REWARDS)}")
        found = _import(found)
    if inspect.isclass(found) and issubclass(found, Reward):
        return found
    if callable(found):
        return _from_function(found)
    raise ValueError(f"reward {name!r} is a {type(found).__name__}; a function or a subclass of Reward is wanted")


def takes_device(entry: RewardEntry) -> bool:
    """Whether a reward computes on a device that can be chosen. A server chooses its own."""
    if entry.reward.startswith(("http://", "https://")):
        return False
    try:
        return "device" in inspect.signature(resolve_reward(entry.reward)).parameters
    except ValueError:  # it is no reward, which is told elsewhere
        return False


def copies_on_gpu(entry: RewardEntry) -> int:
    """How many copies of a reward compute on one GPU that trains, at most; 0: they compute elsewhere.

    By default each process has one on its own GPU. On a GPU that is named, all processes of the machine have theirs.
    """
    number = re.fullmatch(r"cuda:(\d+)", entry.options.get("device", "auto"))
    if number is None:
        return 0 if entry.options.get("device") == "cpu" else 1
    processes = local_world_size()
    return processes if int(number[1]) < processes else 0


def image_use(entry: RewardEntry) -> ImageUse:
    """What a reward does with the images that clips start from. A server says it only when it is asked."""
    try:
        return resolve_reward(entry.reward).images
    except ValueError:  # it is no reward, which is told elsewhere
        return "none"


def absent_gpu(entry: RewardEntry) -> str | None:
    """The GPU that a reward is to compute on, if this machine does not have it (imports torch)."""
    from torch.cuda import device_count

    number = re.fullmatch(r"cuda:?(\d+)?", entry.options.get("device", "auto"))
    return None if number is None or int(number[1] or 0) < device_count() else number[0]


def on_device(entries: Sequence[RewardEntry], device: str | None) -> list[RewardEntry]:
    """The entries with a device for each that takes one and names none."""
    return [
        entry.model_copy(update={"options": {**entry.options, "device": device}})
        if device is not None and "device" not in entry.options and takes_device(entry)
        else entry
        for entry in entries
    ]


def reward_problems(entry: RewardEntry) -> list[str]:
    """Problems of an entry: unknown name, head or option. Loads no weights."""
    try:
        cls = resolve_reward(entry.reward)
    except ValueError as error:
        return [str(error)]
    problems = list(_class_problems(cls, entry.name))
    try:
        head_of(entry, cls.heads)
    except ValueError as error:
        problems.append(str(error))
    return problems + _arguments(cls, entry.name, entry.options)[1]


def _class_problems(cls: type[Reward], name: str) -> Iterator[str]:
    """Yield why a reward's class cannot be made, or its function cannot be called with clips and prompts."""
    if inspect.isabstract(cls):
        yield f"{name}: {cls.__name__} has no {', '.join(sorted(cls.__abstractmethods__))}"
    function = getattr(cls, "called", None)
    if function is None:
        return
    if inspect.iscoroutinefunction(function):
        yield f"{name}: an async function; use one that returns scores, a tensor [B]"
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function whose arguments Python does not know
        return
    given = {"images": None} if "images" in signature.parameters else {}
    try:
        signature.bind("videos", "prompts", **given)
    except TypeError as error:
        yield f"{name}: must take (videos, prompts), and images by name if it wants them: {error}"


def size_problem(entry: RewardEntry, size: tuple[int, int, int]) -> str | None:
    """Return why clips of a size cannot be scored by a reward, or None if they can. A server does not say."""
    least = resolve_reward(entry.reward).min_frames
    if size[0] >= least:
        return None
    return f"compares frames: clips need at least {least}, and these have {size[0]}; sample more frames"


def prompt_problem(entry: RewardEntry, prompt: str) -> str | None:
    """Return why clips of a prompt cannot be scored by a reward, or None if they can."""
    return resolve_reward(entry.reward).prompt_problem(entry.options, prompt)


def server_problem(entry: RewardEntry) -> str | None:
    """Return why a reward's server cannot score, or None if it can; it is asked what it gives."""
    try:
        make_reward(entry.reward, {**entry.options, "retries": "0"})
    except (ValueError, OSError, RuntimeError) as error:
        return str(error)
    return None


def gradient_problem(entry: RewardEntry) -> str | None:
    """Why no gradient of a reward can be taken; None: it is differentiable. Loads no weights.

    Raises:
        ValueError: there is no such reward.
    """
    if resolve_reward(entry.reward).differentiable:
        return None
    known = ", ".join(name for name in reward_names() if resolve_reward(name).differentiable)
    return (
        f"{entry.name} gives no gradient. These do: {known}; and functions `module:function` that say so "
        "(`function.differentiable = True`). Weight 0 only logs it; policy gradients train on any reward"
    )


def head_of(entry: RewardEntry, heads: Collection[str]) -> str:
    """The head of a reward that an entry names, or its only one.

    Raises:
        ValueError: it has no such head, or several and none is named.
    """
    if entry.head is None and len(heads) == 1:
        (head,) = heads
        return head
    if entry.head is None:
        choices = ", ".join(f"{entry.name}.{head}" for head in heads)
        raise ValueError(f"{entry.name} gives several numbers; name one: {choices}")
    head = current_name(entry.head, heads)
    if head not in heads:
        raise ValueError(f"{entry.reward} gives no {entry.head!r}{nearest(entry.head, heads)}")
    return head


def reward_bytes(entry: RewardEntry) -> float | None:
    """Bytes of a reward's weight files, which a process loads to its device; 0: it is no network, or computes elsewhere.

    None: the files are not on this disk.
    """
    copies = copies_on_gpu(entry)
    sizes = [_file_bytes(place) for place in _weights_places(entry)] if copies else []
    return None if None in sizes else copies * sum((size for size in sizes if size is not None), 0.0)


def weights_not_here(entry: RewardEntry) -> list[str]:
    """Repositories of the hub that a reward's weights come from, and of which nothing is on this disk."""
    from .weights import on_disk

    return [place for place in _weights_places(entry) if on_disk(place) is None]


def not_to_be_had(repository: str, away: str) -> str:
    """What is wrong if a reward's weights are not on this disk, and the hub does not answer."""
    return (
        f"{repository} is not on this disk, and {away}; download it first where there is a connection "
        f"(`hf download {repository}`), into the same cache (HF_HOME), or give another path=..."
    )


def _weights_places(entry: RewardEntry) -> list[str]:
    """Paths and hub ids of a reward's weights; none of one that is no network, or computes elsewhere."""
    if entry.reward.startswith(("http://", "https://")):
        return []
    cls = resolve_reward(entry.reward)
    parameters = inspect.signature(cls).parameters
    return [entry.options.get(name, parameters[name].default) for name in cls.weights_options if name in parameters]


def _file_bytes(place: str) -> float | None:
    """Bytes of the weight files at a path, or of a hub id in the hub's cache; None: none are on this disk."""
    from .weights import on_disk

    found = on_disk(place)
    if found is None or found.is_file():
        return None if found is None else float(found.stat().st_size)
    for patterns in (("*.safetensors",), ("*.pt", "*.pth", "*.bin")):  # of two formats only one is read
        files = [file for pattern in patterns for file in found.rglob(pattern)]
        if files:
            return float(sum(file.stat().st_size for file in files))
    return None


def working_bytes(entry: RewardEntry, size: tuple[int, int, int], *, fps: float) -> float | None:
    """Bytes that scoring clips of a size takes on a process's device besides the network; None: not known."""
    copies = copies_on_gpu(entry)
    if entry.reward.startswith(("http://", "https://")) or not copies:
        return 0.0
    cls = resolve_reward(entry.reward)
    found = cls.working_bytes(entry.options, size, clips=entry.batch_size or cls.batch_size, fps=fps)
    return None if found is None else copies * found


def graph_bytes(entry: RewardEntry, size: tuple[int, int, int], *, fps: float) -> float | None:
    """Bytes that the gradient of a reward takes on a process's device besides the network; None: not known."""
    if not copies_on_gpu(entry):
        return 0.0
    cls = resolve_reward(entry.reward)
    return cls.graph_bytes(entry.options, size, clips=entry.batch_size or cls.batch_size, fps=fps)


def make_reward(name: str, options: Mapping[str, str]) -> Reward:
    """A scorer with its options, turned into the types of their annotations.

    Raises:
        ValueError: an option that it does not take or lacks, or a text that is none of its type.
    """
    cls = resolve_reward(name)
    arguments, problems = _arguments(cls, name, options)
    if problems:
        raise ValueError("; ".join(problems))
    return cls(**arguments)


def _arguments(cls: type[Reward], name: str, options: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Convert options to the types of a scorer's `__init__`; also their problems."""
    from pydantic import TypeAdapter, ValidationError

    parameters = inspect.signature(cls).parameters
    types = get_type_hints(cls.__init__, include_extras=True)
    arguments, problems = {}, []
    for option, text in options.items():
        if option not in parameters:
            hint = nearest(option, parameters) if parameters else "; it has none"
            problems.append(f"{name} takes no option {option!r}{hint}")
            continue
        try:
            arguments[option] = TypeAdapter(types.get(option, str)).validate_python(text)
        except ValidationError as error:
            problems.append(f"{name}: {option}={text!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
    for option, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            problems.append(f"{name} needs {option}: --reward {name},{option}=...")
    return arguments, problems


def _import(address: str) -> Any:
    module, _, attribute = address.partition(":")
    try:
        return resolve(address)
    except ModuleNotFoundError as error:
        raise ValueError(f"reward {address!r}: {error}") from error
    except AttributeError:
        raise ValueError(f"reward {address!r}: module {module} has no {attribute!r}") from None


def _from_function(function: Callable[..., Tensor]) -> type[Reward]:
    from .base import Reward

    class FunctionReward(Reward):
        __doc__ = function.__doc__
        called = staticmethod(function)
        differentiable = getattr(function, "differentiable", False)
        images = _image_use_of(function)

        def score(
            self, videos: Tensor, prompts: Sequence[str], *, fps: float, **images: Tensor | None
        ) -> Mapping[str, Tensor]:
            return {"score": function(videos, prompts, **images)}

        differentiate = score

    return FunctionReward


def _image_use_of(function: Callable[..., Any]) -> ImageUse:
    """By its keyword `images`; of a function whose arguments Python does not know, none."""
    try:
        keyword = inspect.signature(function).parameters.get("images")
    except ValueError:
        return "none"
    if keyword is None:
        return "none"
    return "required" if keyword.default is inspect.Parameter.empty else "optional"


#: Ours, by module and class below `finetrainers`; their code loads when they are used.
for _name, _address in {
    "brightness": "rewards.pixels:Brightness",
    "contrast": "rewards.pixels:Contrast",
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
