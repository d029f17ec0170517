"""Export results in the formats of other programs: source, problems, and files that are read back after writing."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetrainers.config.checks.findings import Findings
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Facts
from finetrainers.config.given import RawOptions
from finetrainers.config.load import as_in_toml, build_config
from finetrainers.config.names import unknown_keywords
from finetrainers.config.root import TrainConfig, fields
from finetrainers.config.sections import AUTO
from finetrainers.models.files.lora_names import ARCHITECTURES, FORMATS, format_problem, readers
from finetrainers.models.registry import Family, get_family, with_family
from finetrainers.plan.initial_weights import LORA_FILE, read_lora_header
from finetrainers.plan.lineage import short_digest
from finetrainers.plan.ownership import EXPORTED, export_problem
from finetrainers.plan.preflight import collecting_problems, resolve_other_expert
from finetrainers.rundir.find import step_of
from finetrainers.rundir.identity import Identity, read_identity
from finetrainers.sampling.weights import Weights, find_target, under
from finetrainers.utils.failures import InputError, Kind
from finetrainers.utils.files import (
    folder_problem,
    fsync_dir,
    fsync_tree,
    sweep_unfinished,
    unfinished_path,
    write_json_atomic,
)
from finetrainers.utils.headers import load_tensors, open_tensors
from finetrainers.utils.logs import quiet_libraries
from finetrainers.utils.process_state import environment_restored, restored
from finetrainers.utils.reading import find_json_object
from finetrainers.utils.text import nearest, plural

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from typing_extensions import Unpack

    from finetrainers.config.options import ModelOptions
    from finetrainers.models.lora_files import Checked, Lora
    from finetrainers.models.spec import ModelSpec

#: Folder of a run for its exports.
FOLDER = "export"
#: Dtypes of exported tensors that options may name.
EXPORTED_DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Source:
    """Weights to export, with their model and default names.

    Attributes:
        weights: their kind and path.
        config: of the run that made them, or of the model that they are of.
        name: of the run or file; see `stem`.
        folder: that exports go into unless another is named.
        identity: of the run that made them, if it is known.
    """

    weights: Weights
    config: TrainConfig
    name: str
    folder: Path
    identity: Identity | None = None

    @cached_property
    def family(self) -> Family:
        """Family of the model."""
        return get_family(self.config.model.model_name)

    @cached_property
    def facts(self) -> Facts:
        """Facts of the exported network."""
        return self.family.facts_of(self.config.model)

    @property
    def stem(self) -> str:
        """Name of its files; `_high_noise` or `_low_noise` at the end distinguishes two experts, as in ComfyUI."""
        expert = self.facts.expert
        return self.name if expert is None else f"{self.name}_{expert}_noise"

    @cached_property
    def experts(self) -> list[Source]:
        """This source, and the LoRA of the other expert if it is known; that for high noise levels first."""
        model = self.config.model
        if self.weights.kind != "lora" or model.other_expert is None:
            return [self]
        swapped = {"expert": "high" if model.expert == "low" else "low", "other_expert": None, "transformer_id": None}
        config = self.config.model_copy(update={"model": model.model_copy(update=swapped)})
        other = replace(self, weights=Weights("result", "lora", Path(model.other_expert)), config=config)
        return sorted([self, other], key=lambda source: source.facts.expert or "")

    @cached_property
    def is_dora(self) -> bool:
        """True if the file's header lists DoRA magnitudes."""
        if self.weights.kind != "lora" or self.weights.path is None:
            return False
        return any("magnitude" in name or "dora_scale" in name for name in read_lora_header(self.weights.path)[0])


def find_source(given: str, *, options: Mapping[str, Any], use_ema: bool = True) -> Source:
    """Return the export source at a path: a run, a checkpoint or a LoRA file; reads no weights.

    Args:
        given: the path that the user gave.
        options: of the model, by flat name; they override those of the run.
        use_ema: use a checkpoint's EMA instead of its raw weights.

    Raises:
        ConfigError: there is nothing to export, or its model is unknown.
    """
    try:
        target = find_target(given, use_ema=use_ema)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError([Problem.from_error("SOURCE", error)]) from None
    if target.weights.kind == "base" or target.weights.path is None:
        message = f"{given} is a model without training; use a run, a checkpoint or a LoRA in safetensors"
        raise ConfigError([Problem("SOURCE", message)])
    overrides = RawOptions(dict(options), {name: f"--{name}" for name in options})
    if "pretrained_model_name_or_path" not in {**target.source.values, **options}:
        message = f"is required: the base model of {given} is unknown; set a directory, a Hub id or demo://NAME"
        raise ConfigError([Problem("--pretrained_model_name_or_path", message, "required")])
    config = build_config([target.source, overrides])
    try:
        config = config.model_copy(update={"model": with_family(config.model)})
        family = get_family(config.model.model_name)
    except KeyError as error:
        kind: Kind = "required" if config.model.model_name == AUTO else "unknown"
        raise ConfigError([Problem("--model_name", str(error.args[0]), kind)]) from None
    findings = Findings()
    with collecting_problems(findings.errors, "SOURCE"):
        config = resolve_other_expert(config, family.facts_of(config.model), findings)
        target.check_expert(config.model.expert)
    path, model = target.weights.path, target.weights.on(config.model)
    if not findings.errors and model.expert is None and family.facts_of(model).boundary is not None:
        message = "required: this model has two networks; set the one that the weights are for, `high` or `low`"
        findings.error("expert", message, "required")
    if findings.errors:
        raise ConfigError(findings.errors)
    if (options or path.is_file()) and (problems := family.problems(model, weights=model != config.model)):
        raise ConfigError(under("SOURCE", problems, target.weights))
    home = target.home or (path.parent if path.is_file() else path)
    step = step_of(path.parent) if target.weights.is_checkpoint else None
    named_itself = target.home is None and path.is_file() and path.name != LORA_FILE
    name = re.sub(r"[_-](high|low)_noise$", "", path.stem) if named_itself else _run_name(home, config)
    stem, folder = _to_file_stem(name), home / FOLDER
    if step is not None:
        stem, folder = f"{stem}-step-{step}", folder / f"step-{step}"
    return Source(target.weights, config, stem, folder, read_identity(home))


def _run_name(root: Path, config: TrainConfig) -> str:
    """Return the name of a run's directory, or of the one around it if its own is the expert's, `high` or `low`."""
    root = root.resolve()
    return root.parent.name if root.name == config.model.expert else root.name


def _to_file_stem(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "lora"


def result_source(config: TrainConfig, root: Path) -> Source:
    """Return the source for the result of a run that has just written it."""
    if config.training.training_type == "lora":
        weights = Weights("result", "lora", root / LORA_FILE)
    else:
        weights = Weights("result", "full", root / get_family(config.model.model_name).facts_of(config.model).trained)
    return Source(weights, config, _to_file_stem(_run_name(root, config)), root / FOLDER, read_identity(root))


def setting_problems(
    formats: Sequence[str], *, dtype: str | None, lora_scale: float | None, one_file: bool
) -> Iterator[Problem]:
    """Yield the problems of an export's options that no source decides."""
    if dtype not in (None, *EXPORTED_DTYPES):
        yield Problem("--dtype", f"unknown value {dtype!r}{nearest(str(dtype), EXPORTED_DTYPES)}", "unknown")
    if lora_scale is not None and not math.isfinite(lora_scale):
        yield Problem("--lora_scale", f"must be a finite number, got {lora_scale}")
    if lora_scale is not None and formats and "merged" not in formats:
        message = "requires --format merged; with other formats, set the scale in the program that loads the LoRA"
        yield Problem("--lora_scale", message, "unsupported")
    if one_file and formats and not {"diffusers", "merged"} & {*formats}:
        message = (
            "requires --format diffusers or merged, with networks in diffusers layout; the other formats are one file"
        )
        yield Problem("--one_file", message, "unsupported")


def source_problems(source: Source, formats: Sequence[str], folder: Path, *, overwrite: bool) -> list[Problem]:
    """Return the reasons why an export is impossible, as far as file headers show."""
    problems, is_lora = [], source.weights.kind == "lora"
    is_dora = any(expert.is_dora for expert in source.experts)
    for weights_format in formats:
        final = folder / weights_format
        problem = format_problem(
            source.family.name, weights_format, is_lora=is_lora, is_dora=is_dora, misread=source.facts.misread
        )
        if problem is not None:
            problems.append(Problem("--format", problem, "unsupported"))
        elif final.exists() and not overwrite:
            problems.append(Problem("--format", f"{final} exists; --overwrite replaces it", "occupied"))
        elif (other := _other_files(source, final)) is not None:
            problems.append(Problem("--overwrite", other, "occupied"))
    return problems


def unwritten_formats(source: Source, formats: Sequence[str], folder: Path, **settings: Any) -> list[str]:
    """Return the formats that an export with the same weights and settings left to do, or all if it left none.

    Args:
        source: weights to export.
        formats: of this export.
        folder: output directory.
        settings: `dtype`, `lora_scale` and `one_file`, as of `export_formats`.
    """
    made = _settings(source, **settings)
    records = {name: find_json_object(folder / name / EXPORTED) for name in formats}
    return [name for name in formats if records[name].get("made") != made] or list(formats)


def _settings(source: Source, *, dtype: str | None, lora_scale: float, one_file: bool) -> dict[str, Any]:
    """Return what an export depends on, as JSON."""
    weights = [short_digest(expert.weights.path) for expert in source.experts if expert.weights.path is not None]
    averages = None if source.weights.averages is None else str(source.weights.averages)
    made = {"weights": weights, "averages": averages, "name": source.stem, "model": source.config.model.model_name}
    return {**made, "dtype": dtype, "lora_scale": lora_scale, "one_file": one_file}


def _other_files(source: Source, folder: Path) -> str | None:
    return export_problem(folder, trained=source.family.facts.trained, identity=source.identity)


def rename_foreign_exports(source: Source, formats: Sequence[str]) -> Iterator[Path]:
    """Rename format folders that are not an earlier export of this run, and yield the new paths."""
    for folder in (source.folder / weights_format for weights_format in formats):
        if _other_files(source, folder) is not None:
            name = f"replaced-{time.strftime('%Y%m%d-%H%M%S')}-{folder.name}"
            yield folder.rename(folder.parent.with_name(name))  # not in export/, which may be uploaded


@dataclass(frozen=True)
class Exported:
    """A written format.

    Attributes:
        kind: the format.
        path: its file or folder.
        checked: differences found when it was read back, or None if every tensor is equal.
    """

    kind: str
    path: Path
    checked: Checked | None


def export(
    source: str | PathLike[str], formats: str | Sequence[str], *,
    output_dir: str | Path | None = None, use_ema: bool = True,
    dtype: Literal["bf16", "fp16", "fp32"] | torch.dtype | None = None, lora_scale: float | None = None,
    one_file: bool = False, overwrite: bool = False, **model: Unpack[ModelOptions],
) -> list[Path]:  # fmt: skip
    """Export a LoRA or a network for other programs; each file is read back and compared. Return the paths.

        [file] = export("runs/mystyle", ["comfyui"], dtype="bf16")

    Args:
        source: a run directory or result, a checkpoint, or a LoRA in safetensors.
        formats: one or several of `diffusers`, `comfyui`, `kohya`, `peft` and `merged`.
        output_dir: has one subdirectory for each format; default: export/ in the run directory.
        use_ema: export a checkpoint's EMA, if it has one.
        dtype: of the written tensors; default: the training dtype, and bf16 for merged weights.
        lora_scale: scale at which `merged` adds the LoRA; default: 1.
        one_file, overwrite: see `export_formats`.
        model: options of the base model, such as `pretrained_model_name_or_path`; default: those of the run.

    Raises:
        ConfigError: there is nothing to export, or a format is unknown, does not fit or exists.
    """
    formats = list(dict.fromkeys([formats] if isinstance(formats, str) else formats))
    settings: dict[str, Any] = {"dtype": as_in_toml(dtype), "lora_scale": lora_scale, "one_file": one_file}
    own = [name for name in inspect.signature(export).parameters if name not in ("source", "model")]
    valid = [name for name, option in fields().items() if option.section == "model"]
    problems = unknown_keywords(set(model) - set(valid), [*own, *valid])
    problems += setting_problems(formats, **settings)
    if unknown := [str(name) for name in formats if name not in FORMATS]:
        problems.append(Problem("formats", f"unknown {', '.join(unknown)}; valid: {', '.join(FORMATS)}", "unknown"))
    if not formats:
        problems.append(Problem("formats", f"is an empty list; valid: {', '.join(FORMATS)}", "required"))
    if problems:
        raise ConfigError(problems, of="this export")
    weights = find_source(fspath(source), options=as_in_toml(dict(model)), use_ema=use_ema)
    settings["lora_scale"] = 1.0 if lora_scale is None else lora_scale
    folder = weights.folder if output_dir is None else Path(output_dir)
    if (problem := folder_problem(folder)) is not None:
        raise ConfigError([Problem("--output_dir", problem)], of="this export")
    with environment_restored(), restored(), quiet_libraries():
        return [exported.path for exported in export_formats(weights, formats, folder, overwrite=overwrite, **settings)]


def export_formats(
    source: Source,
    formats: Sequence[str],
    folder: Path,
    *,
    dtype: str | None = None,
    lora_scale: float = 1.0,
    one_file: bool = False,
    overwrite: bool = False,
) -> Iterator[Exported]:
    """Write formats one after the other, each complete or not at all.

    Each file is read back before it gets its final name.

    Args:
        source: weights to export.
        formats: see `lora_names`.
        folder: output directory, with one subdirectory for each format.
        dtype: of the written tensors, or None for the training dtype, and bf16 for merged weights.
        lora_scale: scale at which `merged` adds the LoRA.
        one_file: write a network in diffusers layout as one file, not as several of at most 10 GB.
        overwrite: replace earlier exports.

    Raises:
        ConfigError: the export is impossible.
        ValueError: written tensors differ from the trained ones; the files are removed.
    """
    problems = source_problems(source, formats, folder, overwrite=overwrite)
    if problems:
        raise ConfigError(problems)
    sweep_unfinished(folder)
    made = _settings(source, dtype=dtype, lora_scale=lora_scale, one_file=one_file)
    from finetrainers.models.spec import DTYPES

    torch_dtype = None if dtype is None else DTYPES[dtype]
    if source.weights.kind == "full":
        spec = source.family.load(source.config.model)
        yield from _export_full(source, spec, formats, folder, torch_dtype, one_file=one_file, made=made)
        return
    loras = [_load(expert) for expert in source.experts]
    for weights_format in formats:
        final, exports = folder / weights_format, []
        with _publish(final, source, made) as temporary:
            for lora in loras:
                if weights_format == "merged":
                    merge_dtype = torch_dtype or DTYPES["bf16"]
                    _merge(lora.spec, lora.weights, temporary, merge_dtype, lora_scale, one_file=one_file)
                    exports.append(Exported(weights_format, final / lora.spec.facts.trained, None))
                    continue
                path, checked = _write(lora, weights_format, temporary, torch_dtype)
                exports.append(Exported(weights_format, final / path.relative_to(temporary), checked))
        yield from exports


@dataclass(frozen=True)
class _LoadedLora:
    """LoRA of a source with its model; the network is on the meta device."""

    source: Source
    spec: ModelSpec
    network: nn.Module
    weights: Lora


def _load(source: Source) -> _LoadedLora:
    spec = source.family.load(source.config.model)
    network = spec.transformer_on_meta()
    return _LoadedLora(source, spec, network, _read(source, spec, network))


def _write(lora: _LoadedLora, weights_format: str, folder: Path, dtype: torch.dtype | None) -> tuple[Path, Checked]:
    """Write a LoRA in a format, and read it back; PEFT's file names are fixed, so each expert has a directory."""
    from finetrainers.models.lora_files import VERSION_KEY, cast, check_written, lora_metadata, write_lora

    source, spec, network = lora.source, lora.spec, lora.network
    if weights_format == "peft" and (expert := source.facts.expert) is not None:
        folder = folder / f"{expert}_noise"
        folder.mkdir()
    weights = cast(lora.weights, dtype)
    architecture = ARCHITECTURES.get(source.family.name, (source.family.name, ""))
    metadata = lora_metadata(lora.weights, architecture=architecture, facts=_facts(source))
    if source.facts.version is not None:
        metadata = {**metadata, VERSION_KEY: source.facts.version}
    path = write_lora(
        folder, source.stem, weights, weights_format, spec=spec, network=network, metadata=metadata
    )  # fmt: skip
    return path, check_written(path, weights, spec=spec, network=network, kind=weights_format)


def _read(source: Source, spec: ModelSpec, network: nn.Module) -> Lora:
    """Load the LoRA and check that it fits the model.

    Raises:
        ConfigError: it does not fit.
    """

    from finetrainers.models.lora_files import check_outputs, with_averages
    from finetrainers.plan.trainable import check_lora_modules

    assert source.weights.path is not None
    try:
        lora = spec.lora_of(source.weights.path)
        check_lora_modules(source.weights.path, lora.state(), network)
        check_outputs(lora, network)
    except ValueError as error:
        raise ConfigError([Problem.from_error("SOURCE", error)]) from None
    averages = source.weights.averages
    return lora if averages is None else with_averages(lora, load_tensors(averages))


def _facts(source: Source) -> dict[str, Any]:
    """Return the facts of the run for a file's metadata."""
    from finetrainers.utils.versions import __version__

    from .card_facts import read_license

    config, path = source.config, source.weights.path
    assert path is not None
    license_facts = read_license(config)
    return {
        "name": source.stem,
        "base": config.model.pretrained_model_name_or_path,
        "trigger": config.data.id_token,
        "license": license_facts.get("license_name") or license_facts.get("license"),
        "steps": step_of(path.parent) if source.weights.is_checkpoint else None,
        "comment": f"trained with finetrainers {__version__}",
    }


def _merge(spec: ModelSpec, lora: Lora, folder: Path, dtype: torch.dtype, lora_scale: float, *, one_file: bool) -> None:
    """Write the model's transformer with a LoRA merged in fp32, layer by layer."""
    from peft import set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    network: Any = spec.load_transformer(dtype)
    settings = lora.complete_settings()
    network.load_lora_adapter(lora.state(), adapter_name="default", prefix=None, metadata=settings)
    for name, parameter in network.named_parameters():  # they took the dtype of the network
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    set_peft_model_state_dict(network, lora.state())
    for module in network.modules():
        if isinstance(module, BaseTunerLayer):
            original_dtype = module.get_base_layer().weight.dtype
            module.float()
            module.scale_layer(lora_scale)  # type: ignore[operator]
            module.merge()
            module.to(original_dtype)
    network.unload_lora()
    _write_network(folder, spec, network, network.state_dict(), one_file=one_file)


def _write_network(
    folder: Path, spec: ModelSpec, network: nn.Module, state: Mapping[str, Tensor], *, one_file: bool
) -> None:
    """Write a network in diffusers layout, and read it back."""
    from finetrainers.models.spec import weight_files

    spec.save_full(folder, network, state, weight_files(state, one_file=True) if one_file else None)
    _check_network(folder / spec.facts.trained, state)


def _export_full(
    source: Source,
    spec: ModelSpec,
    formats: Sequence[str],
    folder: Path,
    dtype: torch.dtype | None,
    *,
    one_file: bool,
    made: Mapping[str, Any],
) -> Iterator[Exported]:
    """Write all weights in diffusers layout, or in one file with the names of the network's authors and ComfyUI."""
    from finetrainers.models.lora_files import save_original
    from finetrainers.models.spec import DTYPES
    from finetrainers.training.trained_weights import load_ema_weights

    assert source.weights.path is not None
    if source.weights.path.is_file():
        spec = source.family.load(source.weights.on(source.config.model))
        if problems := spec.examine()[0]:
            raise ConfigError(under("SOURCE", problems, source.weights), of="this command")
    network = spec.load_transformer(dtype or DTYPES["bf16"], folder=source.weights.path)
    if source.weights.averages is not None:
        load_ema_weights(source.weights.averages, network)
    state = network.state_dict()
    for weights_format in formats:
        with _publish(folder / weights_format, source, made) as temporary:
            if weights_format == "diffusers":
                _write_network(temporary, spec, network, state, one_file=one_file)
                written = spec.facts.trained
            else:
                written = f"{source.stem}.safetensors"
                save_original(temporary / written, network, state)
        yield Exported(weights_format, folder / weights_format / written, None)


def _check_network(folder: Path, expected: Mapping[str, Tensor]) -> None:
    """Compare a written network with the expected weights, bit for bit.

    Raises:
        ValueError: tensors are missing or differ.
    """

    seen = set()
    for path in sorted(folder.glob("*.safetensors")):
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                seen.add(name)
                if name not in expected or not file.get_tensor(name).equal(expected[name].cpu()):
                    raise InputError(f"{path} was read back with another {name}", "mismatch")
    if lost := sorted(expected.keys() - seen):
        message = f"{folder} was read back without {plural(len(lost), 'tensor')}, e.g. {lost[0]}"
        raise InputError(message, "not_found")


@contextlib.contextmanager
def _publish(final: Path, source: Source, made: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a temporary folder that replaces `final` when the block ends; on an error it is removed."""
    temporary = unfinished_path(final)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        files = sorted(path.name for path in temporary.iterdir())
        run = source.identity and source.identity.run
        write_json_atomic(temporary / EXPORTED, {"run": run, "files": files, "made": made})
        fsync_tree(temporary)
        replaced = unfinished_path(final, "replaced")
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        fsync_dir(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def print_exported(exported: Exported, source: Source, *, say: Callable[[str], None]) -> None:
    """Print a format's path, the programs that read it, and the differences found when it was read back."""
    say(f"{exported.kind}: {exported.path}")
    is_lora = source.weights.kind == "lora"
    if (reader := readers(source.family.name, exported.kind, is_lora=is_lora)) is not None:
        say(f"  for {reader}")
    if not is_lora and (note := source.facts.read_notes.get(exported.kind)):
        say(f"  {note}")
    checked = exported.checked
    if checked is None:
        say("  read back: every tensor is equal")
        return
    layer_count = f"{plural(checked.layers, 'layer')} as trained"
    say(f"  read back: {layer_count}, relative error of their outputs at most {checked.error:.1e}")
    if checked.by_diffusers is not None:
        say(f"  read by diffusers' converter: {checked.by_diffusers} of {checked.layers} the same")
    if checked.left_out:
        more = f" and {len(checked.left_out) - 3} more" if len(checked.left_out) > 3 else ""
        say(f"  {checked.left_out_by} does not read: {', '.join(checked.left_out[:3])}{more}")
