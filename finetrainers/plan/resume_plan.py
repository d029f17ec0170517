"""What a run begins with: a checkpoint, less what is reset, or initial weights, or nothing. Imports no torch.

Everything here is decided, refused and put into words before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetrainers.config.root import TrainConfig, by_current_names, critical_options, fields
from finetrainers.data.loading.position import DataPosition
from finetrainers.methods.registry import method_spec
from finetrainers.methods.spec import WorkPlan
from finetrainers.models.files.lora_names import kind_of
from finetrainers.models.registry import noise_process_of, text_encoders_digest, transformer_digest, vae_digest
from finetrainers.rundir.find import read_state, scan_checkpoints
from finetrainers.rundir.manifest import is_sealed, read_manifest
from finetrainers.rundir.run_dir import package_versions
from finetrainers.utils.headers import read_header
from finetrainers.utils.packaged import SCHEME
from finetrainers.utils.text import plural

from .initial_weights import (
    INITIAL_LORA,
    InitialWeights,
    check_lora,
    find_initial_weights,
    read_lora_header,
    stored_lora,
)
from .lineage import began_from, digest_of

#: Learning rates that differ by less than this share count as the same.
_SAME_RATE = 1e-3
#: What else must be the same: facts about the model and the data, which are not options.
_FACTS: dict[str, str | None] = {
    "base": None, "noise_process": None, "vae": "data", "text_encoders": "data", "data": "data",
}  # fmt: skip
#: Those that are known only where the model's files are on disk, and what to say if they differ.
_MODEL_FACTS = {
    "base": "the transformer's weights are not those of then (--pretrained_model_name_or_path, --init_from, --transformer_id)",
    "noise_process": None,
    "vae": "the VAE is not that of then (--pretrained_model_name_or_path, --vae_id)",
    "text_encoders": "the text encoders or tokenizers are not those of then (--pretrained_model_name_or_path, --text_encoder_id, --tokenizer_id)",
}


@dataclass(frozen=True)
class Start:
    """What a run begins with.

    Attributes:
        data_position: the way through the data.
        critical: settings and facts that the next checkpoint keeps.
        initial: first weights of a new run, or the base of one that is continued; None: those of the model.
        origin: the weights that the run began with, by place and kind, through all continuations; None: the model's. A LoRA
            that the run has stored also has its `sha256`.
        checkpoint: to be continued from; None for a new run.
        initial_lora: file of the LoRA with which the reference model begins, or None if it is the base model.
        resets: parts of the checkpoint that are left out, implied ones included.
        step: optimizer steps that count as taken.
        schedule_start: step at which the learning rate schedule begins.
        rows: `(part, where it comes from)`, to be printed; empty for a new run of the model's own weights.
        warnings: what the user should know.
    """

    data_position: DataPosition
    critical: Mapping[str, Any]
    initial: InitialWeights | None
    origin: Mapping[str, str] | None
    checkpoint: Path | None = None
    initial_lora: Path | None = None
    resets: frozenset[str] = frozenset()
    step: int = 0
    schedule_start: int = 0
    rows: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()

    def checkpoint_fields(self, config: TrainConfig) -> dict[str, Any]:
        """What checkpoints of this run store of how it began, with facts that only loading the model has brought onto this disk."""
        return {
            "critical": {**self.critical, **_model_facts(config)},
            "schedule_start": self.schedule_start,
            "course": self.data_position.state(),
            "initial": self.origin,
        }


def needs_base(config: TrainConfig) -> bool:
    """Whether the model's own transformer is part of what is trained, or of what it is compared with."""
    return config.training.training_type == "lora" or method_spec(config).uses_reference(config)


def initial_weights(config: TrainConfig, checkpoint: Path | None) -> InitialWeights | None:
    """The weights that a run begins with, or those that one which is continued still needs beside its checkpoint.

    Raises:
        ValueError: there are none, or they do not fit; or a checkpoint is to be continued that has begun otherwise.
    """
    given = config.training.init_from
    if checkpoint is not None:
        recorded = read_state(checkpoint)["initial"]
        began = None if recorded is None else recorded["given"]
        names_others = given is not None and _place(given) != began and not _began_with(given, checkpoint)
        if names_others and config.training.resume_from_checkpoint != "auto":
            raise ValueError(
                f"{given} and {checkpoint} both give weights, and the checkpoint's run began with "
                f"{began or 'the weights of the model'}; leave one out, or use --resume_from_checkpoint auto, which takes a "
                "checkpoint where there is one"
            )
        if recorded is None or recorded["kind"] != "full" or not needs_base(config) or config.model.transformer_id:
            return None
        given = given or began
    if given is None:
        return None
    found = find_initial_weights(given)
    _check_fits(found, config)
    return found


def _began_with(given: str, checkpoint: Path) -> bool:
    """Return whether a checkpoint's run began with these weights, by their digest: they and the run may have moved."""
    record = began_from(checkpoint.resolve().parents[1])
    try:
        return record is not None and record.get("digest") == digest_of(find_initial_weights(given).path)
    except ValueError:  # they are not there any more
        return False


def _check_fits(initial: InitialWeights, config: TrainConfig) -> None:
    """Refuse weights that do not fit the run, as far as files' headers tell."""
    if initial.model_name not in (None, config.model.model_name):
        raise ValueError(f"{initial.given} is a {initial.model_name}, and this run trains a {config.model.model_name}")
    if initial.kind == "full":
        given = config.model.transformer_id
        if given is not None and Path(given).resolve() != initial.path.resolve():
            raise ValueError(f"{initial.path} would take the place of --transformer_id {given}; give one of them")
    elif config.training.training_type == "lora":
        check_lora(initial.path, *read_lora_header(initial.path), config.training)


def _place(given: str) -> str:
    """A path from wherever it is looked at."""
    return given if given.startswith(SCHEME) else str(Path(given).expanduser().resolve())


def critical_state(config: TrainConfig, plan: WorkPlan) -> dict[str, Any]:
    """What must be the same for a run to be continued; facts that are not known here are None."""
    values = config.plain()
    return {
        **{name: values[name] for name in (*critical_options(), *plan.critical_options)},
        **_model_facts(config),
        "data": plan.fingerprint,
        "data_table": _lasting(plan.table()),
    }


def _lasting(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """A summary of the data without what a continued run may change."""
    columns = [place for place, heading in enumerate(table[0]) if heading != "batches"]
    return [[row[place] for place in columns] for row in table]


def _model_facts(config: TrainConfig) -> dict[str, Any]:
    return {
        "base": transformer_digest(config.model) if needs_base(config) else None,
        "noise_process": noise_process_of(config.model),
        "vae": vae_digest(config.model),
        "text_encoders": text_encoders_digest(config.model),
    }


def new_run(config: TrainConfig, plan: WorkPlan, *, initial: InitialWeights | None, data_size: int) -> Start:
    """The start of a new run, on so many processes."""
    rows = []
    if initial is not None:
        weights = {
            ("full", "lora"): f"{initial.path}, as the base of a new LoRA",
            ("lora", "full-finetune"): f"the model's own, with the LoRA {initial.path} added for good",
        }.get((initial.kind, config.training.training_type), str(initial.path))
        if initial.kind == "lora" and (kind := kind_of(read_header(initial.path).shapes)) is not None:
            weights += f", in {kind} format"
        rows = [("weights", weights), ("optimizer, schedule, data, step", "new")]
        if config.training.use_ema:
            rows.append(("moving average", "new, from these weights"))
    keeps = initial is not None and initial.kind == "lora" and method_spec(config).reference == "start"
    if keeps and method_spec(config).uses_reference(config):
        rows.append(("reference model", f"the model with this LoRA, which the run stores in {INITIAL_LORA}/"))
    return Start(
        data_position=DataPosition.begin(config, data_size=data_size),
        critical=critical_state(config, plan),
        initial=initial,
        initial_lora=initial.path if initial is not None and keeps else None,
        origin=None if initial is None else {"given": _place(initial.given), "kind": initial.kind},
        rows=rows,
    )


def resume_run(
    config: TrainConfig, plan: WorkPlan, checkpoint: Path, *, initial: InitialWeights | None, data_size: int
) -> Start:
    """The start of a run that continues from a checkpoint.

    Args:
        config: of this run.
        plan: of this run.
        checkpoint: whole, as was checked.
        initial: the weights that it began with, if they are still needed.
        data_size: processes of this run that train on samples of their own.

    Raises:
        ValueError: a setting has changed that no reset allows, or a reset has no effect; with all of them.
    """
    state, manifest = read_state(checkpoint), read_manifest(checkpoint)
    asked = frozenset(config.training.reset)
    resets = asked | ({"data", "scheduler"} if "step" in asked else frozenset())
    saved, now = state["critical"], critical_state(config, plan)
    changed = changes(saved, now, plan=plan)
    step = 0 if "step" in resets else int(state["step"])
    place = step + int(state["guards"]["data_ahead"])  # a run that has gone back is further in the data
    data_position = DataPosition.from_state(state["course"])
    if "data" in resets:
        data_position = DataPosition.begin(config, data_size=data_size, step=step)
    elif plan.cut_in_batches:
        data_position = data_position.resume(config, data_size=data_size, step=place)
    initial_lora, lost = _stored_lora(config, checkpoint, state["initial"])
    problems = lost + _refused(checkpoint, changed, resets)
    problems += _useless(asked, config, changed, saved)
    if "step" in asked and scan_checkpoints(config.run.output_dir):
        problems.append(
            f"--reset step counts from 0 again, and {config.run.output_dir} holds checkpoints of the earlier count; name the "
            "checkpoint by its directory and give a new --output_dir"
        )
    if problems:
        raise ValueError("; also: ".join(problems))
    start = Start(
        checkpoint=checkpoint,
        initial=initial,
        origin=state["initial"],
        initial_lora=initial_lora,
        step=step,
        schedule_start=step if "scheduler" in resets else int(state["schedule_start"]),
        data_position=data_position,
        resets=resets,
        critical=now,
    )
    rows, warnings = _rows(start, state, config, manifest), _warnings(start, state, config, plan, manifest)
    return replace(start, rows=rows, warnings=warnings)


def _stored_lora(
    config: TrainConfig, checkpoint: Path, origin: Mapping[str, str] | None
) -> tuple[Path | None, list[str]]:
    """Return the LoRA that the checkpoint's run has stored, or None if it has stored none; and what is wrong with it."""
    sha256 = None if origin is None else origin.get("sha256")
    try:
        return None if sha256 is None else stored_lora(checkpoint, config.run.output_dir, sha256), []
    except ValueError as error:
        return None, [str(error)]


@dataclass(frozen=True)
class Change:
    """A setting or fact that is not what it was, in words, and the reset that allows it."""

    name: str
    text: str
    reset: str | None


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], *, plan: WorkPlan) -> list[Change]:
    """Everything critical in which a run differs from the checkpoint."""
    saved, allowed = by_current_names(saved), {**critical_options(), **plan.critical_options, **_FACTS}
    found = []
    for name, value in now.items():
        # An option that is younger than the checkpoint was at its default.
        then = saved.get(name, _default(name))
        if name not in allowed or then == value:
            continue
        if name in _MODEL_FACTS and None in (saved.get(name), value):
            continue  # not known on one of the machines, or younger than the checkpoint
        text = f"{name}: {then!r} then, {value!r} now"
        if said := _MODEL_FACTS.get(name):
            text = f"{name}: {said}"
        elif name == "data":
            text = f"data: {plan.fingerprint_of} are not those of then{_tables(saved.get('data_table'), now['data_table'])}"
        found.append(Change(name, text, allowed[name]))
    return found


def _default(name: str) -> Any:
    """Of an option; None for facts, and for options that must be given."""
    field = fields()[name].field if name in fields() else None
    return None if field is None or field.is_required() else field.get_default(call_default_factory=True)


def _tables(saved: Sequence[Sequence[str]] | None, now: Sequence[Sequence[str]]) -> str:
    """In which rows two summaries of the data differ."""

    def rows(table: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> str:
        headings, *lines = table
        differing = [
            ", ".join(f"{h} {v}" for h, v in zip(headings, line, strict=True)) for line in lines if line not in other
        ]
        return " and ".join(differing) or "nothing else"

    if saved is None or list(map(list, saved)) == list(map(list, now)):
        return ""
    return f" ({rows(saved, now)} then; {rows(now, saved)} now)"


def _refused(checkpoint: Path, changed: Sequence[Change], resets: frozenset[str]) -> list[str]:
    refused = [change for change in changed if change.reset not in resets]
    if not refused:
        return []
    parts = [change.text + (f" (--reset {change.reset})" if change.reset else "") for change in refused]
    allowing = sorted({change.reset for change in refused if change.reset} | resets)
    firm = [change.name for change in refused if not change.reset]
    ways = (
        [f"--reset {' '.join(allowing)} allows {'the others' if firm else 'them'}"] if len(refused) > len(firm) else []
    )
    if firm:
        ways.append(
            f"nothing allows another {', '.join(firm)}; a new run can take the weights alone, where they fit, with --init_from"
        )
    return [f"cannot continue from {checkpoint}: {'; '.join(parts)}. Restore these settings, or: {'; '.join(ways)}"]


def _useless(
    asked: frozenset[str], config: TrainConfig, changed: Sequence[Change], saved: Mapping[str, Any]
) -> list[str]:
    """Resets that would do nothing."""
    found = []
    if "rng" in asked and not any(change.reset == "rng" for change in changed):
        found.append(
            f"--reset rng has no effect: the seed is still {config.training.seed}, and noise levels are drawn as before; give "
            "another --seed, or leave it out"
        )
    if "ema" in asked and not config.training.use_ema and not saved.get("use_ema"):
        found.append("--reset ema has no effect: neither the checkpoint nor this run has a moving average")
    return found


def _rows(
    start: Start, state: Mapping[str, Any], config: TrainConfig, manifest: Mapping[str, Any]
) -> list[tuple[str, str]]:
    step, position, initial, resets = int(state["step"]), start.data_position, start.initial, start.resets
    here = f"step {step}"
    rows = [("weights", f"{here} of {start.checkpoint}")]
    if initial is not None and initial.kind == "full" and config.training.training_type == "lora":
        rows.append(("base of the LoRA", str(initial.path)))
    if start.initial_lora is not None and method_spec(config).uses_reference(config):
        rows.append(("reference model", f"the model with the LoRA {start.initial_lora}"))
    rows.append(("optimizer", "new, no moments" if "optimizer" in resets else here))
    begun = int(state["schedule_start"])
    since = f", begun at step {begun}" if begun else ""
    rows.append(("learning rate schedule", "from its beginning" if "scheduler" in resets else f"{here}{since}"))
    if "data" in resets:
        data = "from the beginning"
    else:
        data = here + (f", begun at step {position.first_step}" if position.first_step else "")
        last = position.segments[-1]
        if last.first_step == step + int(state["guards"]["data_ahead"]) and len(position.segments) > 1:
            data += ", in other batches from here on"
    rows.append(("data", data))
    noise = f"seed {config.training.seed}"
    rows.append(("noise", f"{noise}, as set now" if "rng" in resets else noise))
    if config.training.use_ema:
        rows.append(("moving average", "from the weights of now" if "ema" in resets else here))
    elif "ema" in resets:
        rows.append(("moving average", "let go"))
    if state["method"]:
        rows.append((method_spec(config).state_name, here))
    rows.append(("step", "from 0" if "step" in resets else here))
    changed = changed_options(manifest.get("config", {}), config)
    return rows + ([("changed options", ", ".join(changed))] if changed else [])


def changed_options(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Options that are set otherwise than in the checkpoint's run: this run's count."""
    then = by_current_names(saved)
    return [
        f"{name} {then[name]} -> {value}"
        for name, value in config.plain().items()
        if name in then and then[name] != value and fields()[name].resume != "unlisted"
    ]


def _warnings(
    start: Start, state: Mapping[str, Any], config: TrainConfig, plan: WorkPlan, manifest: Mapping[str, Any]
) -> list[str]:
    found, step, resets = [], int(state["step"]), start.resets
    saved, installed = manifest.get("packages", {}), package_versions()
    other = [f"{name} {saved[name]} then, {version} now" for name, version in installed.items()
             if name in saved and saved[name] != version]  # fmt: skip
    if other:
        found.append(f"the checkpoint was saved with other packages, so numbers may differ: {'; '.join(other)}")
    if not is_sealed(manifest):
        found.append(
            "the checkpoint's manifest has no checksum of its own (it is of an earlier version): damage to it would not be seen"
        )
    method, origin = method_spec(config), start.origin or {}
    if (
        method.uses_reference(config)
        and method.reference == "start"
        and origin.get("kind") == "lora"
        and start.initial_lora is None
    ):
        found.append(
            f"the run began with the LoRA {origin['given']} in an earlier version, whose reference model is the base model without "
            "it, and it stays so; a new run with --init_from has the model with the LoRA as its reference"
        )
    then, now = DataPosition.from_state(state["course"]).segments[-1], start.data_position.segments[-1]
    clips = then.batch_size * then.per_step, now.batch_size * now.per_step
    if plan.cut_in_batches and clips[0] != clips[1] and "data" not in resets:
        world = max(1, now.per_step // config.training.gradient_accumulation_steps)
        found.append(
            f"optimizer steps had {plural(clips[0], 'clip')} and have {clips[1]} from here "
            f"on; each clip still comes once an epoch.{_way_back(then.batch_size, then.per_step, world)}"
        )
    found += _rate_change(state, config, manifest, resets)
    if "scheduler" in resets and "step" not in resets and config.optimizer.lr_scheduler == "constant":
        found.append("--reset scheduler has no effect with --lr_scheduler constant")
    steps = config.training.train_steps
    if steps is not None and "step" not in resets and steps <= step:
        found.append(f"nothing is left to train: the checkpoint is of step {step}, and --train_steps is {steps}")
    return found


def _rate_change(
    state: Mapping[str, Any], config: TrainConfig, manifest: Mapping[str, Any], resets: frozenset[str]
) -> list[str]:
    """Warn if another number of steps moves the run on its learning rate schedule."""
    before = manifest.get("config") or {}
    then, now, step, start = (
        before.get("train_steps"),
        config.training.train_steps,
        state["step"],
        state["schedule_start"],
    )
    if resets & {"scheduler", "step"} or None in (then, now) or then == now or now <= step:
        return []
    from finetrainers.optim.schedules import lr_schedule  # needs torch, so only where the steps have changed

    rates = [
        lr_schedule(config.optimizer, lr=config.optimizer.lr, total_steps=total - start, first_step=start)(step)
        for total in (then, now)
    ]
    rates = [max(0.0, rate) for rate in rates]
    if abs(rates[0] - rates[1]) <= _SAME_RATE * max(rates):
        return []
    return [
        f"--train_steps was {then} and is {now}: on the {config.optimizer.lr_scheduler} schedule the learning rate of step "
        f"{step + 1} is {rates[1]:.3g} instead of {rates[0]:.3g}; --reset scheduler starts the schedule again"
    ]


def _way_back(batch_size: int, per_step: int, world: int) -> str:
    """Options under which a step has as many clips as before, with this many processes."""
    if per_step % world == 0:
        return f" To keep the number: --batch_size {batch_size} --gradient_accumulation_steps {per_step // world}"
    if batch_size * per_step % world == 0:
        return f" To keep the number: --batch_size 1 --gradient_accumulation_steps {batch_size * per_step // world}"
    return f" {plural(batch_size * per_step, 'clip')} cannot be dealt out evenly to {world} processes"
