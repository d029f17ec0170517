"""The weights that `--init_from` names: a transformer's, or a LoRA. Reads headers only and imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from finetrainers.config.base import expand_home
from finetrainers.config.errors import ConfigError
from finetrainers.config.facts import Facts
from finetrainers.config.load import load_config
from finetrainers.config.sections import ModelSection, TrainingSection
from finetrainers.config.values import split_part
from finetrainers.models.files.lora_names import PREFIXES, kind_of
from finetrainers.models.registry import named_expert
from finetrainers.rundir.find import checkpoints_dir, find_checkpoint
from finetrainers.rundir.manifest import MANIFEST, damage
from finetrainers.utils.failures import InputError
from finetrainers.utils.files import file_sha256
from finetrainers.utils.headers import adapter_metadata, check_adapter_settings, read_header
from finetrainers.utils.packaged import model_path
from finetrainers.utils.reading import MAX_RECORDS, expect, read_json_object
from finetrainers.utils.text import plural

#: Name under which diffusers looks for a LoRA in a folder.
LORA_FILE = "pytorch_lora_weights.safetensors"
#: Directory of a run with the LoRA that it began with, in diffusers' format.
INITIAL_LORA = "initial_lora"
#: Name of PEFT's settings, next to a LoRA in its format.
PEFT_CONFIG = "adapter_config.json"
_PART = re.compile(r"transformer(_\d+)?\.")
_REGEX_CHARACTERS = re.compile(r"[*+?^$|()\[\]\\]")
_LORA_NAME = re.compile(r"\.lora_?(A|B|down|up)\b|\.lora_magnitude_vector")
_DOWN = re.compile(r"\.lora_?(A|down)\b")
_MODULE = re.compile(r"(?P<module>.+)\.(?:lora_(?:A|B)(?:\.\w+)?\.weight|lora_magnitude_vector(?:\.weight)?)$")


@dataclass(frozen=True)
class InitialWeights:
    """Source of a run's first weights.

    Attributes:
        source: its name, as the user wrote it.
        kind: `full`, a transformer, or `lora`.
        path: its folder, or its single file; the LoRA's file.
        model_name: of the run that made them, or None if it is unknown.
    """

    source: str
    kind: Literal["full", "lora"]
    path: Path
    model_name: str | None = None


def find_initial_weights(source: str) -> InitialWeights:
    """Return the weights that a path holds.

    Raises:
        ValueError: training cannot start from it; the message lists what may be given.
    """
    path = Path(expand_home(model_path(source)))
    if path.is_file():
        return _find_in_file(source, path)
    if not path.is_dir():
        raise InputError(
            f"file or directory not found: {source}; use a checkpoint, a run directory, a diffusers directory, or a "
            "LoRA in safetensors (download a model of the Hub, or set it as --transformer_id)",
            "not_found",
        )
    if (path / MANIFEST).is_file():
        return _find_in_checkpoint(source, path)
    weights = _find_in_folder(source, path)
    if weights is not None:
        return weights
    if checkpoints_dir(path).is_dir():  # an unfinished run
        newest = find_checkpoint("latest", path, weights_only=True)
        assert newest is not None
        return _find_in_checkpoint(source, newest)
    raise InputError(
        f"{source} holds neither a transformer (transformer/ or config.json) nor {LORA_FILE} nor checkpoints/; it "
        f"holds {', '.join(sorted(inner.name for inner in path.iterdir())[:8]) or 'nothing'}",
        "not_found",
    )


def with_other_expert(model: ModelSection, facts: Facts) -> ModelSection:
    """Return the model with the file of the other expert's LoRA, or its transformer among the replaced components.

    Raises:
        ValueError: the weights do not exist, or belong to another family or to the expert that is trained.
    """
    if model.other_expert is None or not facts.experts:
        return model
    weights = find_initial_weights(model.other_expert)
    run = next((folder for folder in weights.path.resolve().parents[:3] if (folder / "config.toml").is_file()), None)
    with suppress(ConfigError):  # of another version, which the weights do not depend on
        made_by = None if run is None else load_config(run / "config.toml").model
        if made_by is not None and made_by.model_name != model.model_name:
            message = f"{run} trained a {made_by.model_name}, and this model is a {model.model_name}"
            raise InputError(message, "mismatch")
        if made_by is not None and made_by.expert == (model.expert or "high"):
            message = f"{run} trained the expert `{made_by.expert}`, like this run; use a run of the other expert"
            raise InputError(message, "mismatch")
    check_expert(weights.path, "high" if model.expert == "low" else "low")
    path = str(weights.path.resolve())
    if weights.kind == "lora":
        return model.model_copy(update={"other_expert": path})
    part = facts.experts[0]
    if any(split_part(text)[0] == part for text in model.part):
        raise InputError(f"would replace the {part} of --part; remove one of them", "conflict")
    return model.model_copy(update={"other_expert": None, "part": [*model.part, f"{part}={path}"]})


def check_expert(path: Path, expert: str | None) -> None:
    """Refuse weights with the name of the other expert, if `expert` is not None.

    Raises:
        ValueError: they are.
    """
    named = named_expert(str(path), read_header(path).metadata if path.is_file() else None)
    if expert is not None and named not in (None, expert):
        message = f"{path} is named for the expert `{named}`, not for `{expert}`; use the other one"
        raise InputError(message, "mismatch")


def stored_lora(checkpoint: Path, output_dir: Path | None, sha256: str) -> Path:
    """Return the path of the LoRA that a checkpoint's run began with, as stored by that run or this one.

    Args:
        checkpoint: the one to continue from.
        output_dir: of this run, or None to look in the checkpoint's run alone.
        sha256: of the file, as the checkpoint has it.

    Raises:
        ValueError: it is missing or damaged.
    """
    roots = [checkpoint.resolve().parents[1], *([] if output_dir is None else [output_dir])]
    paths = [root / INITIAL_LORA / LORA_FILE for root in roots]
    existing = [path for path in paths if path.is_file()]
    for path in existing:
        if file_sha256(path) == sha256:
            return path
    problem = f"{existing[0]} is damaged: it differs from the stored file" if existing else f"{paths[0]} is missing"
    raise InputError(
        f"{problem}; it holds the LoRA that the run started from, which its reference model requires. Restore it "
        "from a copy of the run, or start a new run from the checkpoint's weights with --init_from",
        "unreadable" if existing else "not_found",
    )


def _find_in_checkpoint(source: str, path: Path) -> InitialWeights:
    problem = damage(path, contents=True, weights_only=True)
    if problem is not None:
        raise InputError(f"the checkpoint {path} is damaged: {problem}", "unreadable")
    weights = _find_in_folder(source, path)
    if weights is None:
        raise InputError(f"the checkpoint {path} holds no weights", "not_found")
    state = read_json_object(path / "state.json", limit=MAX_RECORDS)  # in any format: the weights do not depend on it
    critical = expect(state.get("critical", {}), dict, f"{path / 'state.json'}: critical")
    return replace(weights, model_name=critical.get("model_name"))


def _find_in_folder(source: str, path: Path) -> InitialWeights | None:
    """Return the transformer or LoRA of a folder, including a run's results, or None if it has neither."""
    for folder in (*sorted(path.glob("transformer*")), path):
        if (folder / "config.json").is_file():
            if not any(folder.glob("*.safetensors")):
                message = f"{folder} has no safetensors files; pickles (.bin, .pt) are not loaded, convert them first"
                raise InputError(message, "not_found")
            return InitialWeights(source, "full", folder)
    if (path / LORA_FILE).is_file():
        return _find_in_file(source, path / LORA_FILE)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _find_in_file(source, files[0])
    if len(files) > 1 and not checkpoints_dir(path).is_dir():
        raise InputError(f"{path} holds {plural(len(files), 'safetensors file')}; use one of them", "required")
    return None


def _find_in_file(source: str, path: Path) -> InitialWeights:
    """Return a LoRA, or all weights of a transformer; the network is compared once the model's files are here."""
    if path.suffix != ".safetensors":
        if path.suffix in (".bin", ".ckpt", ".pt", ".pth"):
            message = "a pickle, which is never loaded; convert it to safetensors first"
            raise InputError(f"{path} is {message}", "unsupported")
        message = "not a safetensors file; use weights in safetensors, a run directory, a checkpoint or a diffusers"
        raise InputError(f"{path} is {message} directory", "unreadable")
    shapes, _ = read_lora_header(path)
    return InitialWeights(source, "lora" if any(_LORA_NAME.search(name) for name in shapes) else "full", path)


def read_lora_header(path: Path) -> tuple[Mapping[str, tuple[int, ...]], dict[str, Any]]:
    """Return shapes by name, and the PEFT settings of a transformer's adapter if the file has them.

    Raises:
        ValueError: it is not a complete safetensors file.
    """
    header = read_header(path)
    if kind_of(header.shapes) == "peft":
        config = path.with_name(PEFT_CONFIG)
        settings = check_adapter_settings(read_json_object(config), str(config)) if config.is_file() else {}
        return {name.removeprefix(PREFIXES["peft"]): shape for name, shape in header.shapes.items()}, settings
    stored = adapter_metadata(path, header)
    return header.shapes, {strip_component(k): v for k, v in stored.items() if strip_component(k) != k}


def read_adapter_options(path: Path, targets: Sequence[str]) -> dict[str, Any]:
    """Return the options of the adapter in a LoRA file as far as its header shows them, in the format of any program.

    Args:
        path: the file.
        targets: default LoRA targets; others are returned only if these do not name the file's modules.

    Raises:
        ValueError: it is not a complete safetensors file.
    """
    shapes, settings = read_lora_header(path)
    ranks = {shape[0] for name, shape in shapes.items() if _DOWN.search(name) and shape}
    if not ranks:
        return {}
    options: dict[str, Any] = {"rank": min(ranks)}  # joined layers of other programs have several times the rank
    if kind_of(shapes) is not None:
        stored = read_header(path).metadata.get("ss_network_alpha", "")
        alpha = stored if any(name.endswith(".alpha") for name in shapes) else options["rank"]
        with suppress(ValueError):  # it differs between layers, or is only in the data
            options["lora_alpha"] = float(alpha)
        return options
    modules = _lora_modules(shapes)
    options |= _adapter_settings(shapes, settings, options["rank"])
    own = settings.get("target_modules") or []
    for names in (targets, [own] if isinstance(own, str) else own, modules):
        if not any(_target_differences(modules, names)):
            return options if names == targets else {**options, "target_modules": list(names)}
    return options


def _lora_modules(shapes: Iterable[str]) -> list[str]:
    """Return the modules that a LoRA file by diffusers' or PEFT's names adapts."""
    return sorted({match["module"] for name in shapes if (match := _MODULE.match(strip_component(name)))})


def _adapter_settings(shapes: Iterable[str], settings: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the options of an adapter beside its rank and targets; alpha is the rank if none is stored."""
    return {
        "lora_alpha": float(settings["lora_alpha"]) if settings.get("lora_alpha") is not None else float(rank),
        "use_rslora": bool(settings.get("use_rslora")),
        "use_dora": any("lora_magnitude_vector" in name for name in shapes),
    }


def check_lora(
    path: Path, shapes: Mapping[str, Sequence[int]], settings: Mapping[str, Any], training: TrainingSection
) -> None:
    """Refuse a LoRA that cannot become the adapter that the options describe; other programs' names are not checked.

    Args:
        path: its file.
        shapes: of its weights by name, with or without `transformer.` before it.
        settings: PEFT's, if the file has them.
        training: the options.

    Raises:
        ValueError: with every difference.
    """
    modules = _lora_modules(shapes)
    ranks = sorted({shape[0] for name, shape in shapes.items() if ".lora_A" in name})
    if kind_of(shapes) is not None or not modules or not ranks:
        return
    differences = []
    if ranks != [training.rank]:
        differences.append(f"rank: {', '.join(map(str, ranks))} in the file, {training.rank} in this run")
    note = "" if settings.get("lora_alpha") is not None else ", which stores none, so it is the rank"
    for option, value in _adapter_settings(shapes, settings, ranks[-1]).items():
        is_alpha, own = option == "lora_alpha", getattr(training, option)
        if not math.isclose(value, own):
            stored = f"{value:g} in the file{note}, {own:g}" if is_alpha else f"{value} in the file, {own}"
            differences.append(f"{option}: {stored} in this run")
    differences += [
        f"{pattern}: {settings[pattern]} in the file; here all modules have the same"
        for pattern in ("rank_pattern", "alpha_pattern")
        if settings.get(pattern)
    ]
    differences += _target_differences(modules, training.target_modules)
    if differences:
        message = f"{path} does not fit this run's adapter: {'; '.join(differences)}. Set the options as in the file"
        raise InputError(message, "mismatch")


def _target_differences(modules: Sequence[str], targets: Sequence[str]) -> Iterator[str]:
    def matches(target: str, module: str) -> bool:
        return re.fullmatch(target, module) is not None if is_expression(targets) else is_target(module, target)

    unmatched = [module for module in modules if not any(matches(target, module) for target in targets)]
    if unmatched:
        yield (
            f"target_modules: the file adapts {plural(len(unmatched), 'module')} that {' '.join(targets)} does not "
            f"name, e.g. {unmatched[0]}{'; it may belong to another model' if unmatched == modules else ''}"
        )
    unused = [target for target in targets if not any(matches(target, module) for module in modules)]
    if unused:
        yield f"target_modules: {' '.join(unused)} in this run, which the file does not adapt"


def is_expression(targets: Sequence[str]) -> bool:
    """Return whether LoRA targets are one regular expression over full names, rather than suffixes."""
    return len(targets) == 1 and _REGEX_CHARACTERS.search(targets[0]) is not None


def strip_component(name: str) -> str:
    """Return a name in a LoRA file without the prefix of its network: `transformer.`, `transformer_2.`"""
    return _PART.sub("", name, count=1) if _PART.match(name) else name


def is_target(module: str, target: str) -> bool:
    """Return whether a suffix names a module."""
    return module == target or module.endswith("." + target)
