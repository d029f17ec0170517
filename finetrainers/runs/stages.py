"""The stages of a file: what is done of each, what it begins from, and whether that still is what was trained.

Imports no torch. The run directories hold all state: there is no record of a file of stages but what its runs have left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.option import Option
from finetrainers.config.root import TrainConfig, critical_options, fields
from finetrainers.config.stages import Load, Stage
from finetrainers.plan.initial_weights import find_initial_weights
from finetrainers.plan.lineage import began_from, read_origin
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.rundir.lock import in_use
from finetrainers.rundir.run_records import result_paths, run_status
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.text import listed

#: What a stage was started with, in its run directory.
STAGE_FILE = "stage.toml"
#: Tables whose options do not decide what is trained.
_ASIDE = ("run", "validation", "memory", "parallel")
#: Options that a LoRA must share with the one that it begins from.
_OF_LORA = ("training_type", "rank", "lora_alpha", "target_modules", "use_rslora", "use_dora")


@dataclass(frozen=True)
class Standing:
    """A stage and how far it is.

    Attributes:
        stage: as the file has it, with the options that are right.
        config: what it is started with: `init` has become `init_from` and `transformer_id`.
        source: the stage that it begins from, if any.
        is_done: whether it has come to its end, with a result.
        step: of its newest whole checkpoint; 0: none.
        is_again: whether it is to be trained again, whatever is there.
    """

    stage: Stage
    config: TrainConfig
    source: Standing | None = None
    is_done: bool = False
    step: int = 0
    is_again: bool = False

    @property
    def name(self) -> str:
        """The stage's."""
        return self.stage.name

    @property
    def root(self) -> Path:
        """Its run directory."""
        return self.config.run.output_dir

    @property
    def load(self) -> Load | None:
        """What it takes of its source."""
        return None if self.stage.init is None else self.stage.init.load

    @property
    def is_promised(self) -> bool:
        """Whether what it begins from is not there yet: an earlier stage will make it."""
        return self.source is not None and not self.source.is_done

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint of its source with which a stage begins that takes the whole training state; None: it is not there."""
        if self.load != "state" or self.source is None:
            return None
        whole = [one.path for one in scan_checkpoints(self.source.root) if one.damage is None]
        return whole[-1] if whole else None


def look_at(stages: Sequence[Stage], *, again_from: str | None = None) -> list[Standing]:
    """How far the stages are that have a configuration.

    Args:
        stages: of the file, in its order.
        again_from: the stage from which on all are to be trained again.
    """
    found: dict[str, Standing] = {}
    again = False
    for stage in stages:
        again |= stage.name == again_from
        if stage.config is None:
            continue
        source = None if stage.init is None else found.get(stage.init.stage)
        root = stage.config.run.output_dir
        is_done = not again and run_status(root) == "finished" and bool(result_paths(root))
        steps = [] if again else [one.step for one in scan_checkpoints(root) if one.damage is None]
        config = _with_source(stage, stage.config, source)
        found[stage.name] = Standing(stage, config, source, is_done, max(steps, default=0), again)
    return list(found.values())


def _with_source(stage: Stage, config: TrainConfig, source: Standing | None) -> TrainConfig:
    """The options of a stage with what it begins from as `init_from`, and the base of a LoRA as `transformer_id`."""
    if source is None or stage.init is None:
        return config
    if stage.init.load != "state":
        is_merged = stage.init.load == "weights" and source.config.training.training_type == "lora"
        place = source.root / "export" / "merged" if is_merged else source.root
        training = config.training.model_copy(update={"init_from": str(place)})
        config = config.model_copy(update={"training": training})
    if stage.init.load != "weights" and config.model.transformer_id is None:
        model = config.model.model_copy(update={"transformer_id": _base_of(source)})
        config = config.model_copy(update={"model": model})
    return config


def _base_of(standing: Standing) -> str | None:
    """The transformer that the LoRA of a stage is for, if it is not the model's own."""
    given = standing.config.training.init_from
    if standing.config.model.transformer_id is not None or given is None:
        return standing.config.model.transformer_id
    try:
        found = find_initial_weights(given)
    except ValueError:  # it is not there yet, or is refused when the stage is checked
        return None
    return str(found.path) if found.kind == "full" else None


def resolved(standing: Standing) -> TrainConfig:
    """The options of a finished stage as its run resolved them, as far as that can be read."""
    try:
        return load_config(standing.root / "config.toml")
    except ConfigError:
        return standing.config


def unfit(source: TrainConfig, config: TrainConfig, load: Load) -> list[str]:
    """Why a stage cannot begin from another one, by the options of both; empty if it can, as far as these tell."""
    if source.model.model_name != config.model.model_name:
        return [f"it trains a {source.model.model_name}, and this stage a {config.model.model_name}"]
    then, now = source.plain(), config.plain()
    if load == "state":
        allowed = ("data", "scheduler", "step")
        names = [name for name, reset in critical_options().items() if reset not in allowed]
    elif load == "lora" and config.training.training_type == "lora":
        names = list(_OF_LORA)
    else:
        return []
    return [f"{name}: {then[name]} there, {now[name]} here" for name in names if then[name] != now[name]]


# ---- what has changed since -------------------------------------------------------------------------------------------------


def outdated(standings: Sequence[Standing]) -> list[Problem]:
    """The stages that have been trained, or begun, otherwise than the file says now, and those that have begun from them."""
    whys: dict[str, str] = {}
    for one in standings:
        why = _why_outdated(one)
        if why is not None:
            whys[one.name] = why
    return [
        Problem(f"stage {name}", f"{why}{_followers(name, standings)}. {_WAYS % name}") for name, why in whys.items()
    ]


_WAYS = (
    "Restore what it was, or run with --from %s, which trains it and every later stage again, or with --keep_finished, "
    "which takes what is there as it is"
)


def _why_outdated(one: Standing) -> str | None:
    """Why what is there of a stage is not what the file says now."""
    if one.is_done and (changed := _changed(one)):
        return f"is finished, and its options have changed since: {'; '.join(changed)}"
    if one.source is None or not (one.is_done or one.step):
        return None
    origin = began_from(one.root)
    if origin is None:
        return f"has begun without {one.source.name}" if one.is_done else None
    if one.is_promised:
        return f"has begun from {one.source.name}, which is not finished now"
    now = _origin_now(one)
    names = ("digest", "checkpoint", "run_id")  # weight files are told by their ends, a checkpoint by all of its bytes
    if any(None not in (now.get(name), origin.get(name)) and now[name] != origin[name] for name in names):
        return f"has begun from {one.source.name}, whose result is another one now"
    return None


def _origin_now(one: Standing) -> Mapping[str, Any]:
    """What the records of a stage would say of its origin if it began now; nothing where that is not there any more."""
    given = one.config.training.init_from
    try:
        place = one.checkpoint if one.load == "state" else find_initial_weights(given).path if given else None
    except ValueError:
        return {}
    return {} if place is None else read_origin(place)


def _changed(one: Standing) -> list[str]:
    """The options that decide what a stage trains and are not those that it was started with."""
    path = one.root / STAGE_FILE
    if not path.is_file():  # trained by other means
        return []
    try:
        then = load_config(path).plain()
    except ConfigError:
        return [f"{path} cannot be read"]
    now = one.config.plain()
    names = [name for name, option in fields().items() if option.dumped and _decides(option)]
    return [f"{name} {then[name]} -> {now[name]}" for name in names if then[name] != now[name]]


def _decides(option: Option) -> bool:
    """Whether an option decides what is trained."""
    only_how = option.section in _ASIDE or option.place == "folder"
    return not only_how and not (option.local and option.section == "dataloader")


def _followers(name: str, standings: Sequence[Standing]) -> str:
    """The stages that have begun from a stage, or from one of these, in words."""
    found = [name]
    for one in standings:
        if one.source is not None and one.source.name in found and (one.is_done or one.step):
            found.append(one.name)
    return f"; {listed(found[1:])} began from it" if found[1:] else ""


# ---- starting ------------------------------------------------------------------------------------------------------------------


def missing_before(standings: Sequence[Standing], first: str) -> list[Problem]:
    """Stages before `--from` that are not finished, and that later ones begin from."""
    names = [one.name for one in standings]
    before = names[: names.index(first)]
    needed = {one.source.name for one in standings if one.name not in before and one.source is not None}
    return [
        Problem("--from", f"stage {one.name}, from which a later one begins, is not finished; give --from {one.name}")
        for one in standings
        if one.name in before and one.name in needed and not one.is_done
    ]


def used_elsewhere(standings: Sequence[Standing]) -> list[Problem]:
    """Stages that another process trains."""
    busy = [one for one in standings if not one.is_done and in_use(one.root)]
    return [
        Problem(f"stage {one.name}", f"{one.root} is in use by another run; wait for it, or stop it") for one in busy
    ]


def set_aside(standings: Sequence[Standing]) -> list[tuple[Path, Path]]:
    """Rename the directories of the stages that are to be trained again: what they were, and what they are."""
    stamp, found = time.strftime("%Y%m%d-%H%M%S"), []
    for one in standings:
        if one.is_again and one.root.exists():
            found.append((one.root, one.root.rename(one.root.with_name(f"replaced-{stamp}-{one.root.name}"))))
    return found


def start_flags(one: Standing) -> list[str]:
    """The flags with which `train` starts a stage or resumes it, with its options in a file of its run directory."""
    path = one.root / STAGE_FILE
    write_text_atomic(path, dump_toml(one.config))
    return ["--config", str(path), *(part for flag in resume_flags(one).items() for part in flag)]


def resume_flags(one: Standing) -> Mapping[str, Any]:
    """The flags that say what a stage resumes from: its own newest checkpoint, or at first that of another stage."""
    if one.step == 0 and one.checkpoint is not None:
        return {"--resume_from_checkpoint": str(one.checkpoint), "--reset": "step"}
    return {"--resume_from_checkpoint": "auto"}
