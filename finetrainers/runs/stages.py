"""The stages of a file: their status and origin, and whether they still match their trained runs. Imports no torch.

The run directories hold all state: a file of stages has no records but those of its runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.root import TrainConfig, critical_options, fields
from finetrainers.config.stages import Load, Stage
from finetrainers.plan.initial_weights import find_initial_weights
from finetrainers.plan.lineage import began_from, read_origin
from finetrainers.plan.preflight import with_options
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.rundir.lock import in_use
from finetrainers.rundir.run_records import result_paths, run_status
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.text import listed

#: File in a run directory with the options that the stage was started with.
STAGE_FILE = "stage.toml"
#: Tables whose options do not affect the trained weights.
_NEUTRAL_TABLES = ("run", "validation", "memory", "parallel")
#: Options that a LoRA must share with the LoRA that it begins from; those that are open are taken from it.
_LORA_OPTIONS = ("training_type", "rank", "lora_alpha", "target_modules", "use_rslora", "use_dora")


@dataclass(frozen=True)
class StageStatus:
    """Stage with its progress.

    Attributes:
        stage: as the file has it, with its valid options.
        config: its options at the start: `init` has become `init_from` and `transformer_id`.
        source: the stage that it begins from, if any.
        other: the stage that trains its other expert, if any.
        is_done: whether it is finished, with a result.
        step: of its newest complete checkpoint; 0 if it has none.
        is_again: whether it is to be trained again, regardless of existing results.
    """

    stage: Stage
    config: TrainConfig
    source: StageStatus | None = None
    other: StageStatus | None = None
    is_done: bool = False
    step: int = 0
    is_again: bool = False

    @property
    def name(self) -> str:
        """Name of the stage."""
        return self.stage.name

    @property
    def root(self) -> Path:
        """Run directory of the stage."""
        return self.config.run.output_dir

    @property
    def load(self) -> Load | None:
        """Part of the source that the stage loads."""
        return None if self.stage.init is None else self.stage.init.load

    @property
    def is_promised(self) -> bool:
        """Whether weights that the stage takes do not exist yet: an earlier stage will make them."""
        return any(stage is not None and not stage.is_done for stage in (self.source, self.other))

    @property
    def checkpoint(self) -> Path | None:
        """Checkpoint of the source whose whole training state the stage takes, or None if it does not exist."""
        if self.load != "state" or self.source is None:
            return None
        complete = [checkpoint.path for checkpoint in scan_checkpoints(self.source.root) if checkpoint.damage is None]
        return complete[-1] if complete else None


def look_at(stages: Sequence[Stage], *, again_from: str | None = None) -> list[StageStatus]:
    """Return the status of each stage that has a configuration.

    Args:
        stages: of the file, in its order.
        again_from: the first of the stages that are all to be trained again.
    """
    statuses: dict[str, StageStatus] = {}
    is_again = False
    for stage in stages:
        is_again |= stage.name == again_from
        if stage.config is None:
            continue
        source = None if stage.init is None else statuses.get(stage.init.stage)
        root = stage.config.run.output_dir
        is_done = not is_again and run_status(root) == "finished" and bool(result_paths(root))
        steps = (
            [] if is_again else [checkpoint.step for checkpoint in scan_checkpoints(root) if checkpoint.damage is None]
        )
        config = _with_source(stage, stage.config, source)
        other = statuses.get(stage.other_expert or "")
        if other is not None:
            config = with_options(config, "model", other_expert=str(other.root))
        statuses[stage.name] = StageStatus(stage, config, source, other, is_done, max(steps, default=0), is_again)
    return list(statuses.values())


def _with_source(stage: Stage, config: TrainConfig, source: StageStatus | None) -> TrainConfig:
    """Return a stage's options with its source as `init_from`, and the base of a LoRA as `transformer_id`."""
    if source is None or stage.init is None:
        return config
    if stage.init.load != "state":
        is_merged = stage.init.load == "weights" and source.config.training.training_type == "lora"
        init_from = source.root / "export" / "merged" if is_merged else source.root
        config = with_options(config, "training", init_from=str(init_from))
    if stage.init.load != "weights" and config.model.transformer_id is None:
        config = with_options(config, "model", transformer_id=_find_base(source))
    return config


def _find_base(status: StageStatus) -> str | None:
    """Return the transformer that a stage's LoRA is for, or None if it is the model's own."""
    init_from = status.config.training.init_from
    if status.config.model.transformer_id is not None or init_from is None:
        return status.config.model.transformer_id
    with suppress(ValueError):  # it does not exist yet, or is refused when the stage is checked
        weights = find_initial_weights(init_from)
        return str(weights.path) if weights.kind == "full" else None
    return None


def resolved_config(status: StageStatus) -> TrainConfig:
    """Return the options of a finished stage as its run resolved them, or the stage's own if they cannot be read."""
    try:
        return load_config(status.root / "config.toml")
    except ConfigError:
        return status.config


def incompatibilities(source: TrainConfig, config: TrainConfig, load: Load) -> list[str]:
    """Return why a stage cannot begin from its source, judged by the options of both; empty if it can."""
    if source.model.model_name != config.model.model_name:
        return [f"it trains a {source.model.model_name}, and this stage a {config.model.model_name}"]
    then, now = source.plain(), config.plain()
    if load == "state":
        allowed = ("data", "scheduler", "step")
        names = [name for name, reset in critical_options().items() if reset not in allowed]
    elif load == "lora" and config.training.training_type == "lora":
        names = [name for name in _LORA_OPTIONS if name == "training_type" or config.is_given(name)]
    else:
        return []
    return [f"{name}: {then[name]} there, {now[name]} here" for name in names if then[name] != now[name]]


# ---- what has changed since ------------------------------------------------------------------------------------------


def changed_stages(statuses: Sequence[StageStatus]) -> list[Problem]:
    """Return a problem for each stage that was begun differently from the file, with the stages that began from it."""
    reasons = {status.name: _change_reason(status) for status in statuses}
    return [
        Problem(f"stage {name}", f"{reason}{_followers(name, statuses)}. {_REMEDIES % name}", "mismatch")
        for name, reason in reasons.items()
        if reason is not None
    ]


_REMEDIES = (
    "Restore the options, or run with --from %s, which trains it and every later stage again, or with "
    "--keep_finished, which keeps its result"
)


def _change_reason(status: StageStatus) -> str | None:
    """Return why the directory of a stage does not match the file, or None if it does."""
    if status.is_done and (changed := _changed_options(status)):
        return f"is finished, and its options have changed since: {'; '.join(changed)}"
    if status.source is None or not (status.is_done or status.step):
        return None
    origin = began_from(status.root)
    if origin is None:
        return f"was started without {status.source.name}" if status.is_done else None
    if not status.source.is_done:
        return f"was started from {status.source.name}, which is no longer finished"
    now = _origin_now(status)
    names = ("digest", "checkpoint", "run_id")  # a digest covers the ends of weight files, and all of a checkpoint
    if any(None not in (now.get(name), origin.get(name)) and now[name] != origin[name] for name in names):
        return f"was started from {status.source.name}, whose result has changed since"
    return None


def _origin_now(status: StageStatus) -> Mapping[str, Any]:
    """Return the origin that a stage would record if it began now; empty if the source no longer exists."""
    init_from = status.config.training.init_from
    try:
        source = (
            status.checkpoint if status.load == "state" else find_initial_weights(init_from).path if init_from else None
        )
    except ValueError:
        return {}
    return {} if source is None else read_origin(source)


def _changed_options(status: StageStatus) -> list[str]:
    """Return the options that affect a stage's weights and differ from those of its start."""
    path = status.root / STAGE_FILE
    if not path.is_file():  # trained by other means
        return []
    try:
        then = load_config(path).plain()
    except ConfigError:
        return [f"{path} cannot be read"]
    now = status.config.plain()
    names = [  # of options that affect the trained weights
        name
        for name, option in fields().items()
        if option.dumped
        and option.section not in _NEUTRAL_TABLES
        and option.place != "folder"
        and not (option.local and option.section == "dataloader")
    ]
    return [f"{name} {then[name]} -> {now[name]}" for name in names if then[name] != now[name]]


def _followers(name: str, statuses: Sequence[StageStatus]) -> str:
    """Return a clause that lists the stages that began from a stage, directly or indirectly."""
    followers: list[str] = []
    for status in statuses:
        if status.source and status.source.name in (name, *followers) and (status.is_done or status.step):
            followers.append(status.name)
    return f"; {listed(followers)} started from it" if followers else ""


# ---- starting --------------------------------------------------------------------------------------------------------


def missing_before(statuses: Sequence[StageStatus], first: str) -> list[Problem]:
    """Return problems of unfinished stages before `--from` that later ones begin from."""
    names = [status.name for status in statuses]
    before = names[: names.index(first)]
    later = [status for status in statuses if status.name not in before]
    needed = {stage.name for status in later for stage in (status.source, status.other) if stage is not None}
    return [
        Problem(
            "--from",
            f"stage {status.name}, which a later stage requires, is not finished; use --from {status.name}",
            "required",
        )
        for status in statuses
        if status.name in before and status.name in needed and not status.is_done
    ]


def used_elsewhere(statuses: Sequence[StageStatus]) -> list[Problem]:
    """Return problems of stages that another process trains."""
    return [
        Problem(f"stage {status.name}", f"{status.root} is in use by another run; wait for it, or stop it", "occupied")
        for status in statuses
        if not status.is_done and in_use(status.root)
    ]


def set_aside(statuses: Sequence[StageStatus]) -> list[tuple[Path, Path]]:
    """Rename the directories of stages that are to be trained again; return their old and new paths."""
    stamp, renamed = time.strftime("%Y%m%d-%H%M%S"), []
    for status in statuses:
        if status.is_again and status.root.exists():
            target = status.root.with_name(f"replaced-{stamp}-{status.root.name}")
            renamed.append((status.root, status.root.rename(target)))
    return renamed


def start_flags(status: StageStatus) -> list[str]:
    """Return flags that make `train` start or resume a stage; its options are in a file of its run directory."""
    path = status.root / STAGE_FILE
    write_text_atomic(path, dump_toml(status.config, defaults=False))
    return ["--config", str(path), *(part for flag in resume_flags(status).items() for part in flag)]


def resume_flags(status: StageStatus) -> Mapping[str, Any]:
    """Return flags for the checkpoint to resume from: the stage's newest one, or at first that of another stage."""
    if status.step == 0 and status.checkpoint is not None:
        return {"--resume_from_checkpoint": str(status.checkpoint), "--reset": "step"}
    return {"--resume_from_checkpoint": "auto"}
