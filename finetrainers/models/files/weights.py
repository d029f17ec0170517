"""Checks of a network's weights against its class: names and shapes before they are loaded, numbers afterwards."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from accelerate import init_empty_weights
from diffusers import ConfigMixin, ModelMixin
from torch import nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import is_network
from finetrainers.config.sections import ModelSection
from finetrainers.utils.device import meta_device
from finetrainers.utils.failures import InputError, Kind
from finetrainers.utils.headers import read_header
from finetrainers.utils.launch import launched_local_rank
from finetrainers.utils.text import plural, printable, shortened

from .files import (
    cast_to_float8,
    component_file,
    folder_on_disk,
    frozen_dtype,
    numbers_in,
    part_config,
    read_config,
    replacement_source,
    single_file,
    source_option,
    stored_header,
    summarize,
)
from .layouts import Match
from .single_file import check_buffers, match_buffers, match_network

Shapes = Mapping[str, tuple[int, ...]]


#: The format's names of the options' dtypes; integers, such as positions, do not count.
_STORED = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
#: Keys of places in a vocabulary or a list, and of exponents: they may be 0 or below, though the default is not.
_SIGNED = re.compile(r".*_(id|ids|index|indexes|layer)|(base|max)_shift")
#: Keys that may be 0, though the default is above 0.
_MAY_BE_ZERO = re.compile(r".*(eps|epsilon|offset|layers|layers_per_block|blocks|groups|window|dropout)")


def are_mapped(config: ModelSection, parts: Iterable[str]) -> bool:
    """Return whether loading these frozen parts maps their files: no process then holds a copy until it is on a GPU.

    It does if they are on this disk in diffusers layout, with a single dtype, which is the one that they are loaded in.
    """
    for part in filter(is_network, parts):
        folder = None if single_file(config, part) is not None else folder_on_disk(config, part)
        if folder is None:
            return False
        header, problems = stored_header(folder, part, None if replacement_source(config, part) else config.variant)
        stored = {dtype for dtype in header.dtypes.values() if not dtype.startswith(("I", "U", "BOOL"))}
        if problems or stored != {_STORED.get(frozen_dtype(config, part))}:
            return False
    return True


def network_problems(config: ModelSection, networks: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
    """Compare the weight files that are on this disk with the networks; reads headers only.

    Args:
        config: names the model.
        networks: class by part.

    Returns:
        Problems that make loading impossible or its result another network; and warnings.
    """
    problems, warnings = [], []
    for part, cls in networks.items():
        single = single_file(config, part)
        if single is not None:
            file_problems, file_warnings = _single_file_problems(config, part, cls, single)
            problems += file_problems
            warnings += file_warnings
            continue
        folder = folder_on_disk(config, part)
        if folder is None:
            continue
        shapes = stored_header(folder, part, None if replacement_source(config, part) else config.variant)[0].shapes
        settings = read_config(folder / "config.json")
        if not shapes or "quantization_config" in settings:  # not downloaded; stored in shapes of the quantizer's
            continue
        where = source_option(config, part)
        try:
            network = network_on_meta(cls, settings, str(folder / "config.json"))
        except InputError as error:
            problems.append(Problem.from_error(where, error))
            continue
        missing, wrong, unused = compare(network, shapes)
        if _are_renamed(network, missing, {name: shapes[name] for name in unused}):
            continue
        if missing:
            problems.append(
                Problem(
                    where,
                    f"the files in {folder} lack {plural(len(missing), 'tensor')}: {summarize(missing)}",
                    "not_found",
                )
            )
        if wrong:
            name = wrong[0]
            expected = tuple(network.state_dict()[name].shape)
            message = f"{name} in {folder} has shape {shapes[name]}, and its config.json requires {expected}"
            problems.append(
                Problem(where, message + (f" ({len(wrong)} such tensors)" if len(wrong) > 1 else ""), "mismatch")
            )
        if unused:
            warnings.append(
                f"{where}: {folder} holds {plural(len(unused), 'tensor')} that a {cls.__name__} does not have: "
                f"{summarize(unused)}"
            )
    return problems, warnings


def _are_renamed(network: nn.Module, missing: Iterable[str], unused: Shapes) -> bool:
    """Return whether transformers renames a file's tensors when loading: each missing one is like an unused one.

    Networks that see images are stored under names of earlier versions. Tensors that are missing nevertheless are
    reported by loading.
    """
    tensors, ties = network.state_dict(), _ties(network)
    missing_shapes = Counter(
        tuple(tensors[min(names)].shape) for names in {frozenset(ties.get(n, {n})) for n in missing}
    )
    return not isinstance(network, ModelMixin) and bool(missing_shapes) and missing_shapes <= Counter(unused.values())


def _single_file_problems(config: ModelSection, part: str, cls: Any, path: Path) -> tuple[list[Problem], list[str]]:
    """Return problems and warnings of a single weight file, in its own names; the config is the base model's."""
    where, settings = source_option(config, part), part_config(config, part)
    if settings is None or not path.is_file():
        return [], []  # already reported, or still to be downloaded
    try:
        network = network_on_meta(cls, settings, f"the config of the {part}")
    except InputError as error:
        return [Problem.from_error(where, error)], []
    match, warnings = match_network(path, network), []
    problems: Sequence[ValueError] = ()
    config_file = str(component_file(config, part, "config.json"))
    unused = match.unused
    if isinstance(network, ModelMixin):  # buffers that it computes, which other programs need in the file
        buffers = match_buffers(match.held, network, cls.__name__)
        unused = [name for name in unused if name not in buffers.needed]
        problems = buffers.shape_problems(str(path), config_file) or _buffer_problems(path, cls, settings, buffers)
    else:  # of tied tensors the file need hold one
        missing, _, odd = compare(network, match.held)
        needed = {n: shape for n, shape in match.needed.items() if n in match.held or n in missing}
        match, unused = replace(match, needed=needed), [name for name in unused if name in odd]
    if unused:
        unused_names = summarize([match.prefix + name for name in unused])
        warnings.append(
            f"{where}: {path} holds {plural(len(unused), 'tensor')} that a {cls.__name__} does not have: {unused_names}"
        )
    cast = cast_to_float8(read_header(path))
    if cast is not None:
        warnings.append(
            f"{where}: {path} holds weights that were cast to 8 bits ({cast}), without scales: they are cast to the "
            f"dtype of the {part}, and the rounding of the first cast remains"
        )
    errors = [*match.problems(str(path), config_file), *problems]
    return [Problem.from_error(where, error) for error in errors], warnings


def _buffer_problems(path: Path, cls: Any, settings: Any, buffers: Match) -> list[ValueError]:
    """Return a problem if a file has other values of buffers than the network computes."""
    if len(buffers.missing) == len(buffers.needed):
        return []
    with init_empty_weights():  # buffers have values
        network = cls.from_config(dict(settings))
    try:
        check_buffers(path, network, cls.__name__)
    except ValueError as error:
        return [error]
    return []


def compare(network: nn.Module, held: Shapes) -> tuple[list[str], list[str], list[str]]:
    """Return names of tensors that files lack, that have another shape, and that the network does not need.

    The classes of diffusers take exactly their own names. transformers also takes weights that were saved with a head
    or without one, so that a prefix may be there or not, and one name for tensors that are tied; its loader reports the
    rest.
    """
    needed = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    wrong = [name for name, shape in needed.items() if name in held and held[name] != shape]
    absent = [name for name in needed if name not in held]
    unused = _without(held.keys() - needed.keys(), getattr(network, "_keys_to_ignore_on_load_unexpected", None))
    if isinstance(network, ModelMixin):
        return absent, wrong, unused
    ties = _ties(network)
    absent = [name for name in absent if not any(_is_held(alias, held) for alias in ties.get(name, {name}))]
    absent = _without(absent, getattr(network, "_keys_to_ignore_on_load_missing", None))
    return absent, wrong, [name for name in unused if not _is_held(name, needed)]


def check_loaded(network: nn.Module, info: Mapping[str, Any], *, part: str, config: ModelSection) -> None:
    """Refuse a network whose weights were not all in its files, or are not finite.

    Libraries give tensors that files lack random numbers, and go on. One process of each machine checks the numbers,
    since all of them load the same, one after the other.

    Raises:
        ConfigError: with the names of the tensors.
    """
    place = replacement_source(config, part) or config.pretrained_model_name_or_path
    lost = sorted(info["missing_keys"])
    bad = non_finite(network.state_dict()) if not lost and launched_local_rank() == 0 else []
    if lost:
        message = f"lacks {plural(len(lost), 'tensor')}: {summarize(lost)}; download its files again"
        kind: Kind = "not_found"
    elif bad:
        message = (
            f"holds NaN or infinity in {plural(len(bad), 'tensor')}: {summarize(bad)}; the file is damaged, "
            "or its numbers are too large for the dtype that it is loaded in"
        )
        kind = "invalid"
    else:
        return
    raise ConfigError([Problem(source_option(config, part), f"the {part} of {place} {message}", kind)])


def non_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return names of tensors with NaN or infinity, in one pass over each, at the speed of memory."""
    bad = []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
            low, high = torch.aminmax(tensor)
            if not (low.isfinite() and high.isfinite()):
                bad.append(name)
    return bad


def network_on_meta(cls: Any, settings: Mapping[str, Any], name: str) -> nn.Module:
    """Build the network of a config; `name` is that of the config in messages.

    Raises:
        InputError: no network can be built from it.
    """
    check_numbers(cls, settings, name)
    try:
        with meta_device():
            if issubclass(cls, ModelMixin):
                return cls.from_config(dict(settings))
            return cls(cls.config_class.from_dict(dict(settings)))
    except Exception as error:  # of any class, which depends on the value and on the library
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{name} is not a valid {cls.__name__} config: {shortened(reason, 300)}") from None


def check_numbers(cls: Any, settings: Mapping[str, Any], name: str) -> None:
    """Refuse values of a config, called `name` in the message, that only a forward pass would notice.

    These are values of other types where the class takes numbers, and numbers that are not above 0 although the class'
    own default is: sizes, scales, epsilons and bases of frequencies, without a list of their names.

    Args:
        cls: class of a network or a scheduler, of diffusers or transformers.
        settings: the config.
        name: of the config.

    Raises:
        InputError: with the first of these keys and their values.
    """
    if misfits := [*_other_types(cls, settings), *_below_defaults(settings, _positive_defaults(cls))]:
        raise InputError(f"{name} is not a valid {cls.__name__} config: {'; '.join(misfits[:5])}")


def _other_types(cls: Any, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values that are text, lists or tables where a class of diffusers takes numbers."""
    for key, hint in get_type_hints(cls.__init__).items() if issubclass(cls, ModelMixin) else ():
        value = settings.get(key)
        kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
        if kinds <= {int, float, bool, type(None)} and isinstance(value, str | list | dict):
            yield f"{key} must be a number, got {shortened(printable(repr(value)), 40)}"
        elif kinds <= {int, type(None)} and isinstance(value, float):
            yield f"{key} must be a whole number, got {value}"


def _below_defaults(settings: Mapping[str, Any], positive: Container[str]) -> Iterator[str]:
    """Yield the numbers under these keys that are not above 0, including those in lists and tables."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _below_defaults(value, positive)
        elif key in positive:
            bound = "0 or above" if _MAY_BE_ZERO.fullmatch(key) else "above 0"
            if any(number < 0 or (number == 0 and bound == "above 0") for number in numbers_in(value)):
                yield f"{key} must be {bound}, got {shortened(printable(repr(value)), 40)}"


def _positive_defaults(cls: Any) -> set[str]:
    """Return the keys whose defaults are numbers above 0 wherever the class' config has them."""
    defaults: Mapping[str, Any] = {}
    if issubclass(cls, ConfigMixin):
        defaults = {key: value.default for key, value in inspect.signature(cls.__init__).parameters.items()}
    else:
        with contextlib.suppress(Exception):  # of any class: a config that cannot be built of its defaults alone
            defaults = cls.config_class().to_dict()
    signs: dict[str, bool] = {}
    for key, value in _leaves(defaults):
        numbers = list(numbers_in(value))
        if numbers and not _SIGNED.fullmatch(key):
            signs[key] = signs.get(key, True) and min(numbers) > 0
    return {key for key, is_positive in signs.items() if is_positive}


def _leaves(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of a config and of the tables in it."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield key, value


def _without(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in patterns or ()))


def _ties(network: nn.Module) -> dict[str, set[str]]:
    """Return all names of each tensor that has several, by each of them."""
    names: dict[int, set[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    ties = {name: aliases for aliases in names.values() for name in aliases}
    declared = getattr(network, "_tied_weights_keys", None)
    if isinstance(declared, Mapping):
        for target, source in declared.items():
            if target in ties and source in ties:
                ties[target] = ties[source] = ties[target] | ties[source]
    return ties


def _is_held(name: str, held: Iterable[str]) -> bool:
    return any(name == other or name.endswith(f".{other}") or other.endswith(f".{name}") for other in held)
