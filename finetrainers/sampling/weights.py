"""What a run directory, a checkpoint, a LoRA file or a model has to sample with. Reads headers only and imports no torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from finetrainers.config.errors import Problem
from finetrainers.config.given import Given
from finetrainers.config.load import file_source
from finetrainers.config.root import by_current_names
from finetrainers.config.sections import ModelSection
from finetrainers.plan.initial_weights import LORA_FILE, find_initial_weights, read_lora_header
from finetrainers.rundir.find import checkpoints_dir, find_checkpoint, scan_checkpoints, step_of
from finetrainers.rundir.manifest import MANIFEST, read_manifest
from finetrainers.utils.files import file_sha256, not_there
from finetrainers.utils.headers import read_header
from finetrainers.utils.packaged import SCHEME, model_path
from finetrainers.utils.versions import __version__

#: The moving average of the trained weights in a checkpoint.
AVERAGES = "ema.safetensors"
_CONFIG = "config.toml"


@dataclass(frozen=True)
class Weights:
    """Weights to sample with.

    Attributes:
        label: names them in file names and pictures: `step 500`.
        kind: a `lora`, all weights of the network (`full`), or those of the `base` model.
        path: the LoRA's file, or the network's folder.
        averages: file of their moving average, which replaces them.
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
        """The model with these weights as its transformer, where they are a single file, so that its files can be examined."""
        if self.kind != "full" or self.path is None or not self.path.is_file():
            return model
        return model.model_copy(update={"transformer_id": str(self.path)})


#: The model without any LoRA.
BASE = Weights("base", "base")


@dataclass(frozen=True)
class Target:
    """What a user names to sample from.

    Attributes:
        given: the name.
        weights: what it has.
        source: the options of the run that made them, or the model; empty where neither is known.
        home: the run directory; None: there is none.
    """

    given: str
    weights: Weights
    source: Given = field(default_factory=Given)
    home: Path | None = None

    @property
    def origin(self) -> str:
        """The name of the run or file, to tell equal labels of several apart."""
        return (self.home or Path(self.given)).resolve().name


def find_target(given: str, *, use_ema: bool = True) -> Target:
    """What a path, a hub id or `demo://NAME` has to sample with.

    A run has its result, or its newest whole checkpoint, if that is newer. A checkpoint has its moving average, if any.

    Args:
        given: as the user named it.
        use_ema: whether a moving average replaces the trained weights.

    Raises:
        ValueError: nothing to sample with.
        ConfigError: the options of the run cannot be read.
    """
    path = Path(given).expanduser()
    if given.startswith(SCHEME) or not path.exists():
        return _model(given, path)
    if path.is_dir():
        if (path / MANIFEST).is_file() or (path / "state.json").is_file():
            return _checkpoint(given, path, use_ema=use_ema)
        if (path / _CONFIG).is_file() or checkpoints_dir(path).is_dir():
            return _run(given, path, use_ema=use_ema)
        if (path / "model_index.json").is_file():
            return Target(given, BASE, _values(pretrained_model_name_or_path=given))
    found = find_initial_weights(given)
    if found.kind == "full":
        name = found.path.stem if found.path.is_file() else found.path.name
        return Target(given, Weights(name, "full", found.path, digest=_digest(found.path)))
    home = found.path.parent if (found.path.parent / _CONFIG).is_file() else None
    source = run_source(home) if home is not None else _base_of(found.path)
    name = found.path.parent.resolve().name if found.path.name == LORA_FILE else found.path.stem
    return Target(given, Weights(name, "lora", found.path, digest=file_sha256(found.path)), source, home)


def run_source(home: Path) -> Given:
    """The options of a run; if they are not all known here, and another version made it, that is a problem as well.

    Raises:
        ConfigError: `config.toml` cannot be read.
    """
    found = file_source(home / _CONFIG)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # a run need not say its version
        made_by = json.loads((home / "env.json").read_text(encoding="utf-8"))["packages"]["finetrainers"]
        if found.problems and made_by != __version__:
            why = f"the run is of finetrainers {made_by}, and this is {__version__}; install that version, or correct {_CONFIG}"
            found.problems.append(Problem(str(home), why))
    return found


def under(where: str, problems: Iterable[Problem], weights: Weights) -> list[Problem]:
    """What is wrong with a single file of a network, under the argument that named it, `TARGET` or `SOURCE`."""
    path = str(weights.path)
    return [Problem(where, p.message) if p.where == "--transformer_id" and path in p.message else p for p in problems]


def in_order(targets: list[Target]) -> list[Target]:
    """Checkpoints of one run by their steps, since a shell puts step-500 behind step-1000; anything else as it was given."""
    places = [one.weights.path.parent if one.weights.path is not None else Path() for one in targets]
    steps = [step_of(place) or step_of(place.parent) for place in places]
    if len({one.home and one.home.resolve() for one in targets}) > 1 or None in steps:
        return targets
    by_step = sorted(zip(steps, range(len(targets)), strict=True), key=lambda pair: (pair[0] or 0, pair[1]))
    return [targets[place] for _, place in by_step]


def named_apart(targets: list[Target]) -> list[Target]:
    """Targets whose labels differ: equal ones get the names of their runs or files in front, or the whole name."""
    for name in (lambda one: f"{one.origin} {one.weights.label}", lambda one: one.given):
        labels = [one.weights.label for one in targets]
        targets = [
            one if labels.count(one.weights.label) == 1 else replace(one, weights=replace(one.weights, label=name(one)))
            for one in targets
        ]
    return targets


def _model(given: str, path: Path) -> Target:
    """A packaged model, or one on the hub, as far as the name may be one."""
    if given.startswith(SCHEME):
        model_path(given)
    elif (
        given.startswith((".", "/", "~"))
        or given.count("/") != 1
        or path.parent.is_dir()
        or path.suffix == ".safetensors"
    ):
        raise ValueError(
            f"{not_there(path)}; give a run directory, a checkpoint, a LoRA in safetensors, or a model (a folder, a hub id or "
            "demo://NAME)"
        )
    return Target(given, BASE, _values(pretrained_model_name_or_path=given))


def _checkpoint(given: str, path: Path, *, use_ema: bool) -> Target:
    found = find_initial_weights(given)  # reads every byte
    manifest = read_manifest(path)
    averages = path / AVERAGES if use_ema and (path / AVERAGES).is_file() else None
    of = [averages] if averages is not None else [found.path] if found.path.is_file() else sorted(found.path.iterdir())
    digest = " ".join(manifest["files"][file.relative_to(path).as_posix()]["sha256"] for file in of)
    step = step_of(path)
    label = path.name if step is None else f"step {step}"
    home, near = path.resolve().parent.parent, path.parent.parent
    home = near if near.resolve() == home else home  # as the user spells it, where that is the same
    weights = Weights(label, found.kind, found.path, averages, digest, is_checkpoint=True)
    if (home / _CONFIG).is_file():
        return Target(given, weights, run_source(home), home)
    return Target(given, weights, _values(**by_current_names(manifest.get("config", {}))), None)


def _run(given: str, path: Path, *, use_ema: bool) -> Target:
    source = run_source(path) if (path / _CONFIG).is_file() else Given()
    whole = [one for one in scan_checkpoints(path, weights_only=True) if one.damage is None]
    result = None
    with contextlib.suppress(ValueError):
        result = find_initial_weights(given)
    if result is not None and not result.path.is_relative_to(checkpoints_dir(path)):
        file = result.path if result.path.is_file() else result.path / "config.json"
        # A run that was continued has a checkpoint that is newer than its result, until it ends.
        continued = bool(whole) and whole[-1].saved_at > file.stat().st_mtime + 1
        # The result of a run with a moving average is that average.
        if not continued and (use_ema or not source.values.get("use_ema")):
            return Target(given, Weights("result", result.kind, result.path, digest=_digest(result.path)), source, path)
    newest = find_checkpoint("latest", path, weights_only=True)
    assert newest is not None
    found = _checkpoint(str(newest), newest, use_ema=use_ema)
    return Target(given, found.weights, source if source.values else found.source, path)


def _base_of(lora: Path) -> Given:
    """The base model of a LoRA file, as its metadata or a model card next to it tells."""
    _, settings = read_lora_header(lora)
    base = settings.get("base_model_name_or_path") or _exported_from(lora)
    card = lora.parent / "README.md"
    if not base and card.is_file():
        import yaml

        parts = card.read_text(encoding="utf-8", errors="replace").split("---\n")
        with contextlib.suppress(yaml.YAMLError):
            header = yaml.safe_load(parts[1]) if len(parts) > 2 and not parts[0].strip() else None
            base = header.get("base_model") if isinstance(header, Mapping) else None
    return _values(pretrained_model_name_or_path=base) if isinstance(base, str) and base else Given()


def _exported_from(lora: Path) -> str | None:
    """The base model that an exported file's header names, if it can be found here or on the hub; others write file names."""
    named = read_header(lora).metadata.get("ss_sd_model_name", "")
    on_hub = (
        named.count("/") == 1
        and not named.startswith((".", "/", "~"))
        and not named.endswith((".safetensors", ".ckpt", ".pt"))
    )
    return named if named.startswith(SCHEME) or on_hub or (named and Path(named).is_dir()) else None


def _values(**values: Any) -> Given:
    return Given(values, {name: f"--{name}" for name in values})


def _digest(path: Path) -> str:
    """Of a weight file, or of those in a folder, every byte."""
    return " ".join(file_sha256(file) for file in ([path] if path.is_file() else sorted(path.glob("*.safetensors"))))
