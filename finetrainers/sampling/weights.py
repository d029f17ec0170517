"""Weights to sample with: of a run, checkpoint, LoRA file or model. Reads headers only and imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from finetrainers.config.base import read_path
from finetrainers.config.errors import Problem
from finetrainers.config.given import RawOptions
from finetrainers.config.load import file_source
from finetrainers.config.root import MEMORY, by_current_names
from finetrainers.config.sections import ModelSection
from finetrainers.memory.automatic import EXACT_CHOICES
from finetrainers.models.registry import is_hub_id
from finetrainers.plan.initial_weights import LORA_FILE, check_expert, find_initial_weights, read_lora_header
from finetrainers.rundir.find import checkpoints_dir, find_checkpoint, scan_checkpoints, step_of
from finetrainers.rundir.manifest import MANIFEST, read_manifest
from finetrainers.utils.failures import InputError
from finetrainers.utils.files import file_sha256, missing_path_problem, names_existing
from finetrainers.utils.headers import read_header
from finetrainers.utils.packaged import SCHEME, model_path
from finetrainers.utils.reading import parse_yaml, read_json_object, read_text
from finetrainers.utils.versions import __version__

#: File of the EMA of the trained weights in a checkpoint.
AVERAGES = "ema.safetensors"
_CONFIG = "config.toml"


@dataclass(frozen=True)
class Weights:
    """Weights to sample with.

    Attributes:
        label: in file names and contact sheets, such as `step 500`.
        kind: a `lora`, all weights of the network (`full`), or those of the `base` model.
        path: the LoRA's file, or the network's folder.
        averages: file of their EMA, which replaces them.
        digest: changes with the weights; empty for the base.
        is_checkpoint: whether they are in the dtype that they were trained in.
    """

    label: str
    kind: Literal["lora", "full", "base"]
    path: Path | None = None
    averages: Path | None = None
    digest: str = ""
    is_checkpoint: bool = False

    def on(self, model: ModelSection) -> ModelSection:
        """Return the model with these weights as its transformer if they are a single file, to examine it."""
        if self.kind != "full" or self.path is None or not self.path.is_file():
            return model
        return model.model_copy(update={"transformer_id": str(self.path)})


#: The model without any LoRA.
BASE = Weights("base", "base")


@dataclass(frozen=True)
class Target:
    """A run, checkpoint, LoRA file or model to sample from.

    Attributes:
        given: as the user named it.
        weights: to sample with.
        source: the options of the run that made them, or the model; empty where neither is known.
        home: the run directory, or None without one.
    """

    given: str
    weights: Weights
    source: RawOptions = field(default_factory=RawOptions)
    home: Path | None = None

    @property
    def origin(self) -> str:
        """Name of the run or file, which distinguishes equal labels."""
        return (self.home or Path(self.given)).resolve().name

    def check_expert(self, expert: str | None) -> None:
        """Refuse a LoRA file that is named for another expert, unless its run is known."""
        if self.weights.kind == "lora" and self.weights.path is not None and self.home is None:
            check_expert(self.weights.path, expert)


def find_target(name_or_path: str, *, use_ema: bool = True) -> Target:
    """Return the weights at a path, a Hub id or `demo://NAME`, with their origin.

    A run has its result, or its newest complete checkpoint, if that is newer. A checkpoint has its EMA, if any.

    Args:
        name_or_path: as the user named it.
        use_ema: replace the trained weights by their EMA.

    Raises:
        ValueError: nothing to sample with.
        ConfigError: the options of the run cannot be read.
    """
    path = Path(name_or_path) if name_or_path.startswith(SCHEME) else read_path(name_or_path)
    if not path.exists():
        return _model(name_or_path, path)
    if path.is_dir():
        if (path / MANIFEST).is_file() or (path / "state.json").is_file():
            return _checkpoint(name_or_path, path, use_ema=use_ema)
        if (path / _CONFIG).is_file() or checkpoints_dir(path).is_dir():
            return _run(name_or_path, path, use_ema=use_ema)
        if (path / "model_index.json").is_file():
            return Target(name_or_path, BASE, _values(pretrained_model_name_or_path=name_or_path))
    initial = find_initial_weights(name_or_path)
    if initial.kind == "full":
        name = initial.path.stem if initial.path.is_file() else initial.path.name
        return Target(name_or_path, Weights(name, "full", initial.path, digest=_digest(initial.path)))
    home = initial.path.parent if (initial.path.parent / _CONFIG).is_file() else None
    source = run_source(home) if home is not None else _find_base(initial.path)
    name = initial.path.parent.resolve().name if initial.path.name == LORA_FILE else initial.path.stem
    return Target(name_or_path, Weights(name, "lora", initial.path, digest=file_sha256(initial.path)), source, home)


def run_source(home: Path) -> RawOptions:
    """Return the options of a run, and a problem if another version made it and not all of them are known here.

    Raises:
        ConfigError: `config.toml` cannot be read.
    """
    source = file_source(home / _CONFIG)
    for name in [name for name in EXACT_CHOICES if source.chosen.get(name) == MEMORY]:  # for the GPU of then
        del source.values[name], source.chosen[name]
    if any(str(part).startswith("network=") for part in source.values.get("parts", ())):
        message = "trained a network that Python gave to `train`; load its results there, into that network"
        source.problems.append(Problem(str(home), message, "unsupported"))
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # the version of a run may be unknown
        made_by = read_json_object(home / "env.json")["packages"]["finetrainers"]
        if source.problems and made_by != __version__:
            message = (
                f"the run was made by finetrainers {made_by}, and this is {__version__}; install that version, or "
                f"correct {_CONFIG}"
            )
            source.problems.append(Problem(str(home), message, "mismatch"))
    return source


def under(where: str, problems: Iterable[Problem], weights: Weights) -> list[Problem]:
    """Return problems of a network's single file under the argument that named it, `TARGET` or `SOURCE`."""
    path = str(weights.path)
    return [replace(p, where=where) if p.where == "--transformer_id" and path in p.message else p for p in problems]


def in_order(targets: list[Target]) -> list[Target]:
    """Return checkpoints of one run by step, since a shell puts step-500 after step-1000; others keep their order."""
    folders = [target.weights.path.parent if target.weights.path is not None else Path() for target in targets]
    steps = [step_of(folder) or step_of(folder.parent) for folder in folders]
    if len({target.home and target.home.resolve() for target in targets}) > 1 or None in steps:
        return targets
    return [targets[index] for index in sorted(range(len(targets)), key=lambda index: steps[index] or 0)]


def named_apart(targets: list[Target]) -> list[Target]:
    """Return targets with distinct labels.

    Equal labels get the name of their run or file as prefix, or else are replaced by the whole name.
    """
    for name in (lambda target: f"{target.origin} {target.weights.label}", lambda target: target.given):
        labels = [target.weights.label for target in targets]
        targets = [
            target
            if labels.count(target.weights.label) == 1
            else replace(target, weights=replace(target.weights, label=name(target)))
            for target in targets
        ]
    return targets


def _model(name_or_path: str, path: Path) -> Target:
    """Return a demo model, or one on the Hub as far as the name can be a Hub id."""
    if name_or_path.startswith(SCHEME):
        model_path(name_or_path)
    elif (
        name_or_path.startswith((".", "/", "~"))
        or name_or_path.count("/") != 1
        or path.parent.is_dir()
        or path.suffix == ".safetensors"
    ):
        raise InputError(
            f"{missing_path_problem(path)}; use a run directory, a checkpoint, a LoRA in safetensors, or a model (a "
            "directory, a Hub id or demo://NAME)",
            "not_found",
        )
    return Target(name_or_path, BASE, _values(pretrained_model_name_or_path=name_or_path))


def _checkpoint(name_or_path: str, path: Path, *, use_ema: bool) -> Target:
    initial = find_initial_weights(name_or_path)  # reads every byte
    manifest = read_manifest(path)
    averages = path / AVERAGES if use_ema and (path / AVERAGES).is_file() else None
    content = averages or initial.path
    files = [content] if content.is_file() else sorted(content.iterdir())
    names = [file.relative_to(path).as_posix() for file in files]
    if unlisted := [name for name in names if name not in manifest["files"]]:
        raise InputError(f"the checkpoint {path} is damaged: {MANIFEST} does not list {unlisted[0]}", "unreadable")
    digest = " ".join(manifest["files"][name]["sha256"] for name in names)
    step = step_of(path)
    label = path.name if step is None else f"step {step}"
    home, near = path.resolve().parent.parent, path.parent.parent
    home = near if near.resolve() == home else home  # as the user spells it, where both are the same folder
    weights = Weights(label, initial.kind, initial.path, averages, digest, is_checkpoint=True)
    if (home / _CONFIG).is_file():
        return Target(name_or_path, weights, run_source(home), home)
    return Target(name_or_path, weights, _values(**by_current_names(manifest.get("config", {}))), None)


def _run(name_or_path: str, path: Path, *, use_ema: bool) -> Target:
    source = run_source(path) if (path / _CONFIG).is_file() else RawOptions()
    complete = [checkpoint for checkpoint in scan_checkpoints(path, weights_only=True) if checkpoint.damage is None]
    result = None
    with contextlib.suppress(ValueError):
        result = find_initial_weights(name_or_path)
    if result is not None and not result.path.is_relative_to(checkpoints_dir(path)):
        file = result.path if result.path.is_file() else result.path / "config.json"
        # A run that was continued has a checkpoint that is newer than its result, until it ends.
        continued = bool(complete) and complete[-1].saved_at > file.stat().st_mtime + 1
        # The result of a run with an EMA is the EMA.
        if not continued and (use_ema or not source.values.get("use_ema")):
            return Target(
                name_or_path, Weights("result", result.kind, result.path, digest=_digest(result.path)), source, path
            )
    newest = find_checkpoint("latest", path, weights_only=True)
    assert newest is not None
    target = _checkpoint(str(newest), newest, use_ema=use_ema)
    return Target(name_or_path, target.weights, source if source.values else target.source, path)


def _find_base(lora: Path) -> RawOptions:
    """Return the base model of a LoRA file, from its metadata or a model card next to it."""
    _, settings = read_lora_header(lora)
    base = settings.get("base_model_name_or_path") or _exported_from(lora)
    card = lora.parent / "README.md"
    if not base and card.is_file():
        parts = read_text(card, errors="replace").split("---\n")
        with contextlib.suppress(ValueError):
            header = parse_yaml(parts[1]) if len(parts) > 2 and not parts[0].strip() else None
            base = header.get("base_model") if isinstance(header, Mapping) else None
    return _values(pretrained_model_name_or_path=base) if isinstance(base, str) and base else RawOptions()


def _exported_from(lora: Path) -> str | None:
    """Return the base model in an exported file's header, or None if it is neither here nor on the Hub.

    Other programs write file names there.
    """
    base = read_header(lora).metadata.get("ss_sd_model_name", "")
    return base if base.startswith(SCHEME) or is_hub_id(base) or (base and names_existing(base, folder=True)) else None


def _values(**values: Any) -> RawOptions:
    return RawOptions(values, {name: f"--{name}" for name in values})


def _digest(path: Path) -> str:
    """Return the SHA-256 of a weight file, or of those in a folder."""
    return " ".join(file_sha256(file) for file in ([path] if path.is_file() else sorted(path.glob("*.safetensors"))))
