"""Values that a run chooses for options that are left open: the recommended settings of a LoRA, memory options, and,
where a run resumes, what it has chosen before. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetrainers.config.facts import Facts
from finetrainers.config.root import DATA, FAMILY, INITIAL, MEMORY, RUN, TrainConfig, by_current_names, fields, sections
from finetrainers.memory.advice import MEMORY_OPTIONS
from finetrainers.memory.automatic import ACTIVATION_OPTIONS, EXACT_CHOICES
from finetrainers.methods.registry import method_spec
from finetrainers.methods.spec import TrainingSet
from finetrainers.rundir.find import read_state
from finetrainers.rundir.manifest import MANIFEST, read_manifest
from finetrainers.utils.failures import InputError
from finetrainers.utils.launch import launched_processes
from finetrainers.utils.reading import read_jsonl
from finetrainers.utils.text import printable, shortened

from .initial_weights import InitialWeights, read_adapter_options
from .parts import has_part

#: Options of the recommended settings of a LoRA, and the one that stands for steps where these are open.
_RECOMMENDED = ("rank", "lora_alpha", "lr", "train_steps")
_LENGTH = ("train_steps", "train_epochs")
#: Options that have no default of the checkpoint where another one is set.
_INSTEAD = {
    "flow_shift": "flow_resolution_shifting", "flow_resolution_shifting": "flow_shift",
    "validation_guidance_scale_2": "validation_guidance_scale",
}  # fmt: skip
#: Options of sizes that a run may have chosen, and all whose values leave nothing to choose.
SIZES = ("video_resolution_buckets", "image_resolution_buckets", "frame_buckets")
_SIZING = (*SIZES, "sliding_window_size")
#: Memory options that a resumed run takes from its run: those that leave results the same.
_MEMORY_OPTIONS = dict.fromkeys(
    ["fit_gpu", *ACTIVATION_OPTIONS, *(name for option in MEMORY_OPTIONS if option.is_exact for name in option.options)]
)


def is_open(config: TrainConfig, name: str) -> bool:
    """Return whether the run may choose a memory option: neither the user nor the resumed run has set it."""
    return not config.is_given(name) and config.chosen.get(name, MEMORY) == MEMORY


def take_from_run(config: TrainConfig, checkpoint: Path) -> TrainConfig:
    """Return a copy of `config` in which open options have the values of the run that is resumed.

    Raises:
        ValueError: the checkpoint's manifest cannot be read.
    """
    manifest = read_manifest(checkpoint)
    stored, sources = by_current_names(manifest.get("config") or {}), manifest.get("chosen") or {}
    has_length = any(map(config.is_given, _LENGTH))
    defaults = [name for name, source in sources.items() if source in (FAMILY, INITIAL)]
    names = (
        name for name in dict.fromkeys((*_RECOMMENDED, *_LENGTH, *defaults)) if not (has_length and name in _LENGTH)
    )
    values = {name: stored[name] for name in names if name in stored and not config.is_given(name)}
    if "repeat_id_token" not in stored and not config.is_given("repeat_id_token"):  # a run of before did
        values["repeat_id_token"] = bool(config.data.id_token or config.data.dataset)
    chosen = {name: sources.get(name, RUN) for name, value in values.items() if value != fields()[name].default}
    config = config.without_chosen(list(config.chosen)).with_chosen(_validated(values), chosen)
    config = _take_memory_options(config, stored, sources)
    if config.data.dataset is not None:
        buckets = _read_dataset_buckets(checkpoint.resolve().parents[1] / "manifest.jsonl")
        return config.model_copy(update={"data": config.data.with_dataset_buckets(buckets)})
    if any(map(config.changed, _SIZING)):
        return config
    sizes = _read_sizes(checkpoint, has_areas=config.changed("resolutions"))
    return config.with_chosen(sizes, DATA if DATA in sources.values() else RUN)


def _take_memory_options(config: TrainConfig, stored: Mapping[str, Any], sources: Mapping[str, str]) -> TrainConfig:
    """Return a copy of `config` in which open memory options have the values of the resumed run.

    Choices that leave results the same are not among them: they are repeated while they fit (`Start.memory_choices`).
    A run of before chose nothing by itself, and goes on so.
    """
    by_budget = {
        name: stored[name]
        for name, source in sources.items()
        if source == MEMORY
        and name not in EXACT_CHOICES
        and fields()[name].section != "parallel"
        and not config.is_given(name)
    }
    has_activations = any(map(config.is_given, ACTIVATION_OPTIONS))
    names = [
        name
        for name in _MEMORY_OPTIONS
        if sources.get(name) != MEMORY
        and fields()[name].section != "parallel"
        and not config.is_given(name)
        and not (has_activations and name in ACTIVATION_OPTIONS)
    ]
    values = {name: stored[name] for name in names if name in stored}
    if "fit_gpu" in names:
        values.setdefault("fit_gpu", False)
    changed = {name: value for name, value in values.items() if value != fields()[name].default}
    return config.with_chosen(_validated(by_budget), MEMORY).with_chosen(_validated(changed), RUN)


def _validated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a manifest, by flat name, as a configuration has them.

    Raises:
        InputError: a value is not valid: the manifest has been edited, or belongs to another version.
    """
    validated = dict(values)
    for name, value in values.items():
        key = fields()[name].key
        try:
            validated[name] = getattr(sections()[fields()[name].section].model_validate({key: value}), key)
        except ValidationError as error:  # or of required options of the table, which are not here
            problems = [problem["msg"] for problem in error.errors() if problem["loc"][:1] == (key,)]
            if problems:
                text = shortened(printable(repr(value)), 60)
                raise InputError(f"{MANIFEST}: {name} is {text}: {problems[0]}", "unreadable") from None
    return validated


def memory_choices(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the memory options that the run of a checkpoint has chosen by itself, with the same results."""
    stored, sources = manifest.get("config") or {}, manifest.get("chosen") or {}
    return _validated({name: stored[name] for name in EXACT_CHOICES if sources.get(name) == MEMORY and name in stored})


def _read_sizes(checkpoint: Path, *, has_areas: bool) -> dict[str, Any]:
    """Return the options that list the sizes which a run has chosen, read from the table of its data.

    They are the buckets, or with `--resolutions` the lengths.
    """
    critical = read_state(checkpoint)["critical"]
    try:
        headings, *rows = critical.get("data_table") or [[]]
        if headings[:1] != ["bucket"] or any(critical.get(name) for name in _SIZING):
            return {}
        buckets = [tuple(map(int, row[0].split("x"))) for row in rows]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise InputError(f"{checkpoint}: its table of buckets cannot be read: {error}", "unreadable") from None
    videos = [bucket for bucket in buckets if bucket[0] > 1]
    images = [bucket[1:] for bucket in buckets if bucket[0] == 1]
    if has_areas:  # images have every area by themselves
        return {"frame_buckets": sorted({bucket[0] for bucket in videos}, reverse=True)} if videos else {}
    return {name: sizes for name, sizes in zip(SIZES, (videos, images), strict=False) if sizes}


def _read_dataset_buckets(manifest: Path) -> dict[str, list[tuple[int, int, int]]]:
    """Return the buckets of each dataset's clips by the manifest of a run's data, largest first.

    Datasets whose videos have a single frame are left out: a list of buckets would not give them that of images.
    """
    buckets: dict[str, set[tuple[int, int, int]]] = {}
    inexpressible = set()
    for item in read_jsonl(manifest)[0] if manifest.is_file() else ():
        name, text = item.get("dataset"), item.get("bucket")
        if not name or not text:
            continue
        frames, height, width = map(int, text.split("x"))
        buckets.setdefault(name, set()).add((frames, height, width))
        if item.get("kind") == "video" and frames == 1:
            inexpressible.add(name)
    return {name: sorted(sizes, reverse=True) for name, sizes in buckets.items() if name not in inexpressible}


def choose_defaults(config: TrainConfig, facts: Facts, *, unread: Collection[str] = ()) -> TrainConfig:
    """Return a copy of `config` with the checkpoint's own defaults where options are open.

    Args:
        config: the options.
        facts: of the checkpoint.
        unread: options that the method does not read, which stay at the program's defaults.
    """
    predating = {name for name in facts.defaults if _predates(config, name)}
    config = config.without_chosen([n for n, s in config.chosen.items() if s == FAMILY and n not in _RECOMMENDED])
    open_options = {name: value for name, value in facts.defaults.items() if not config.is_given(name)}
    replaced = {name for name, other in _INSTEAD.items() if config.is_given(other) and config.changed(other)}
    names = open_options.keys() - replaced - predating - set(unread)
    return config.with_chosen({name: value for name, value in open_options.items() if name in names}, FAMILY)


def _predates(config: TrainConfig, name: str) -> bool:
    """Return whether the configuration is a run's whole file from before an option, which was then at its default."""
    section, states = fields()[name].section, {*config.chosen, *filter(config.is_given, fields())}
    stated = {n for n, option in fields().items() if option.section == section and option.default is not None}
    return stated - states == {name}


def choose_adapter(
    config: TrainConfig, initial: InitialWeights | None, targets: Sequence[str], *, resumes: bool
) -> TrainConfig:
    """Return a copy of `config` with the adapter of the LoRA that the run begins with, where options are open.

    Args:
        config: the options.
        initial: the weights that the run begins with.
        targets: LoRA targets of the family, which are the default.
        resumes: whether the run resumes, with the adapter that it has.
    """
    if not resumes:
        config = config.without_chosen([name for name, source in config.chosen.items() if source == INITIAL])
    if config.training.training_type != "lora":
        return config
    if not config.is_given("target_modules") and "target_modules" not in config.chosen:
        config = config.with_defaults({"target_modules": list(targets)})
    if initial is None or initial.kind != "lora":
        return config
    options = read_adapter_options(initial.path, config.training.target_modules)
    return config.with_chosen({n: value for n, value in options.items() if not config.is_given(n)}, INITIAL)


def choose_recommended(config: TrainConfig, facts: Facts) -> TrainConfig:
    """Return a copy of `config` with the family's recommended settings where a new LoRA on clips leaves them open.

    The length is open if neither steps nor epochs are given. Steps are those for few clips, until `choose_by_data`.
    """
    steps = config.training.train_steps if "train_steps" in config.chosen else None
    by_memory = [name for name, source in config.chosen.items() if source == MEMORY]
    recommended = [name for name in _RECOMMENDED if config.chosen.get(name) != INITIAL]
    config = config.without_chosen((*recommended, *SIZES, *by_memory))
    if facts.lora is None or not _is_lora_on_clips(config):
        return config
    is_set = {*config.chosen, *filter(config.is_given, _RECOMMENDED)}
    if has_part(config, "optimizer") or has_part(config, "lr_at"):
        is_set.add("lr")
    rank = config.training.rank if "rank" in is_set else facts.lora.rank
    values = {"rank": rank, "lora_alpha": float(rank), "lr": facts.lora.lr}
    if not any(map(config.is_given, _LENGTH)):
        values["train_steps"] = steps or facts.lora.steps
    return config.with_chosen({name: value for name, value in values.items() if name not in is_set}, FAMILY)


def _is_lora_on_clips(config: TrainConfig) -> bool:
    return config.training.training_type == "lora" and method_spec(config).learns_clips


def choose_by_data(config: TrainConfig, facts: Facts, plan: TrainingSet, *, resumes: bool) -> TrainConfig:
    """Return a copy of `config` with the buckets of the plan, if they were chosen, and the steps for its clips.

    A resumed run has those of its run already.
    """
    if resumes:
        return config
    config = config.with_chosen(getattr(plan, "chosen", {}), DATA)
    if config.chosen.get("train_steps") != FAMILY or facts.lora is None:
        return config
    per_step = config.dataloader.batch_size * config.training.gradient_accumulation_steps
    steps = facts.lora.steps_for(plan.count, per_step * config.parallel.data_size(launched_processes()))
    return config.with_chosen({"train_steps": steps}, FAMILY)
