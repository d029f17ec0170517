"""Start of a run: a checkpoint without the parts that are reset, or initial weights, or neither. Imports no torch.

All decisions, refusals and descriptions here are made before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetrainers.config.root import TrainConfig, by_current_names, critical_options, fields
from finetrainers.data.loading.position import DataPosition
from finetrainers.methods.registry import method_spec
from finetrainers.methods.spec import TrainingSet
from finetrainers.models.files.lora_names import kind_of
from finetrainers.models.registry import (
    get_family,
    noise_process_name,
    other_parts_digest,
    text_encoders_digest,
    transformer_digest,
    vae_digest,
)
from finetrainers.rundir.find import read_state, scan_checkpoints
from finetrainers.rundir.manifest import is_sealed, read_manifest
from finetrainers.rundir.run_dir import package_versions
from finetrainers.utils.failures import InputError
from finetrainers.utils.headers import read_header
from finetrainers.utils.packaged import SCHEME
from finetrainers.utils.text import plural

from .chosen import memory_choices
from .initial_weights import (
    INITIAL_LORA,
    InitialWeights,
    check_lora,
    find_initial_weights,
    read_lora_header,
    stored_lora,
)
from .lineage import began_from, short_digest
from .parts import equal_parts, has_part

#: Learning rates that differ by less than this share count as the same.
_SAME_RATE = 1e-3
#: Facts about the model and the data, which are not options, that must also be the same.
_FACTS: dict[str, str | None] = {
    "base": None, "noise_process": None, "vae": "data", "text_encoders": "data", "other_parts": "data",
    "data": "data",
}  # fmt: skip
#: Facts that are known only if the model's files are on disk, and the message if they differ.
_MODEL_FACTS = {
    "base": "the transformer's weights have changed (--pretrained_model_name_or_path, --init_from, --transformer_id)",
    "noise_process": None,
    "vae": "the VAE has changed (--pretrained_model_name_or_path, --vae_id)",
    "text_encoders": "the text encoders or tokenizers have changed (--pretrained_model_name_or_path, "
    "--text_encoder_id, --tokenizer_id)",
    "other_parts": "an image encoder, the other expert or another frozen component has changed "
    "(--pretrained_model_name_or_path, --part)",
}


@dataclass(frozen=True)
class Start:
    """Start of a run.

    Attributes:
        data_position: the path through the data.
        critical: settings and facts that the next checkpoint stores.
        initial: first weights of a new run, or the base of a continued one, or None if they are the model's.
        origin: path and kind of the weights that the run began with, through all continuations, or None if they are the
            model's. A LoRA that the run has stored also has its `sha256`.
        checkpoint: the one to continue from, or None for a new run.
        initial_lora: file of the LoRA that the reference model begins with, or None if it is the base model.
        resets: parts of the checkpoint that are left out, including implied ones.
        step: optimizer steps that count as taken.
        schedule_start: step at which the learning rate schedule begins.
        rows: `(part, source)`, to be printed; empty for a new run of the model's own weights.
        warnings: messages for the user.
        memory_choices: memory options that the run has chosen by itself, with the same results (`EXACT_CHOICES`).
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
    memory_choices: Mapping[str, Any] = field(default_factory=dict)

    def checkpoint_fields(self, config: TrainConfig) -> dict[str, Any]:
        """Return the entries of this run's checkpoints about its start.

        They include facts that only loading the model has brought onto this disk.
        """
        return {
            "critical": {**self.critical, **_model_facts(config)},
            "schedule_start": self.schedule_start,
            "course": self.data_position.state(),
            "initial": self.origin,
        }


def needs_base(config: TrainConfig) -> bool:
    """Return whether the model's own transformer is part of the trained network or of its reference."""
    return config.training.training_type == "lora" or method_spec(config).uses_reference(config)


def initial_weights(config: TrainConfig, checkpoint: Path | None) -> InitialWeights | None:
    """Return the weights that a run begins with, or those that a continued run needs beside its checkpoint.

    Raises:
        ValueError: they do not exist, or the checkpoint to continue began with other weights.
    """
    source = config.training.init_from
    if checkpoint is not None:
        record = read_state(checkpoint)["initial"]
        origin = None if record is None else record["given"]
        conflicts = source is not None and _resolve_source(source) != origin and not _is_origin(source, checkpoint)
        if conflicts and config.training.resume_from_checkpoint != "auto":
            raise InputError(
                f"{source} and {checkpoint} both set weights, and the checkpoint's run started from "
                f"{origin or 'the weights of the model'}; remove one, or use --resume_from_checkpoint auto, which "
                "uses a checkpoint if there is one",
                "conflict",
            )
        if record is None or record["kind"] != "full" or not needs_base(config) or config.model.transformer_id:
            return None
        source = source or origin
    if source is None:
        return None
    return find_initial_weights(source)


def _is_origin(source: str, checkpoint: Path) -> bool:
    """Return whether a checkpoint's run began with these weights, by their digest: they and the run may have moved."""
    record = began_from(checkpoint.resolve().parents[1])
    try:
        return record is not None and record.get("digest") == short_digest(find_initial_weights(source).path)
    except ValueError:  # they no longer exist
        return False


def check_fits(initial: InitialWeights, config: TrainConfig) -> None:
    """Refuse weights that do not fit the run, judged by the headers of their files.

    Raises:
        ValueError: with every difference.
    """
    if initial.model_name not in (None, config.model.model_name):
        message = f"{initial.source} is a {initial.model_name}, and this run trains a {config.model.model_name}"
        raise InputError(message, "mismatch")
    if initial.kind == "full":
        transformer = config.model.transformer_id
        if transformer is not None and Path(transformer).resolve() != initial.path.resolve():
            message = f"{initial.path} would replace --transformer_id {transformer}; remove one of them"
            raise InputError(message, "conflict")
    elif config.training.training_type == "lora":
        check_lora(initial.path, *read_lora_header(initial.path), config.training)


def _resolve_source(source: str) -> str:
    """Return an absolute path, which is valid from any working directory."""
    return source if source.startswith(SCHEME) else str(Path(source).expanduser().resolve())


def critical_state(config: TrainConfig, plan: TrainingSet) -> dict[str, Any]:
    """Return settings and facts that must be the same for a run to be continued; unknown facts are None."""
    values, table = config.plain(), plan.table()
    # A continued run may change the number of batches.
    columns = [index for index, heading in enumerate(table[0]) if heading != "batches"]
    return {
        **{name: values[name] for name in (*critical_options(), *plan.critical_options)},
        **_model_facts(config),
        "data": plan.fingerprint,
        "data_table": [[row[index] for index in columns] for row in table],
    }


def _model_facts(config: TrainConfig) -> dict[str, Any]:
    return {
        "base": transformer_digest(config.model) if needs_base(config) else None,
        "noise_process": noise_process_name(config.model),
        "vae": vae_digest(config.model),
        "text_encoders": text_encoders_digest(config.model),
        "other_parts": other_parts_digest(config.model, get_family(config.model.model_name).facts_of(config.model)),
    }


def new_run(config: TrainConfig, plan: TrainingSet, *, initial: InitialWeights | None, data_size: int) -> Start:
    """Return the start of a new run.

    Args:
        config: of the run.
        plan: of the run.
        initial: the weights that it begins with, or None for those of the model.
        data_size: processes that train on separate samples.
    """
    rows = {}
    if initial is not None:
        weights = {
            ("full", "lora"): f"{initial.path}, as the base of a new LoRA",
            ("lora", "full-finetune"): f"the model's own, with the LoRA {initial.path} merged into it",
        }.get((initial.kind, config.training.training_type), str(initial.path))
        if initial.kind == "lora" and (kind := kind_of(read_header(initial.path).shapes)) is not None:
            weights += f", in {kind} format"
        rows = {"weights": weights, "optimizer, schedule, data, step": "new"}
        if config.training.use_ema:
            rows["moving average"] = "new, from these weights"
    stores_lora = initial is not None and initial.kind == "lora" and method_spec(config).reference == "start"
    if stores_lora and method_spec(config).uses_reference(config):
        rows["reference model"] = f"the model with this LoRA, which the run stores in {INITIAL_LORA}/"
    return Start(
        data_position=DataPosition.begin(config, data_size=data_size),
        critical=critical_state(config, plan),
        initial=initial,
        initial_lora=initial.path if initial is not None and stores_lora else None,
        origin=None if initial is None else {"given": _resolve_source(initial.source), "kind": initial.kind},
        rows=list(rows.items()),
    )


def resume_run(
    config: TrainConfig, plan: TrainingSet, checkpoint: Path, *, initial: InitialWeights | None, data_size: int
) -> Start:
    """Return the start of a run that continues from a checkpoint.

    Args:
        config: of this run.
        plan: of this run.
        checkpoint: verified to be complete.
        initial: the weights that the run began with, if they are still needed.
        data_size: processes of this run that train on separate samples.

    Raises:
        ValueError: a setting has changed that no reset allows, or a reset has no effect; it lists all of them.
    """
    state, manifest = read_state(checkpoint), read_manifest(checkpoint)
    requested = frozenset(config.training.reset)
    resets = requested | ({"data", "scheduler"} if "step" in requested else frozenset())
    saved, now = state["critical"], critical_state(config, plan)
    differences = changes(saved, now, plan=plan)
    step = 0 if "step" in resets else int(state["step"])
    data_step = step + int(state["guards"]["data_ahead"])  # after a rollback the data is ahead of the step
    data_position = DataPosition.from_state(state["course"])
    if "data" in resets:
        data_position = DataPosition.begin(config, data_size=data_size, step=step)
    elif plan.cut_in_batches:
        data_position = data_position.resume(config, data_size=data_size, step=data_step)
    problems: list[InputError] = []
    initial_lora, origin = None, state["initial"]
    if origin is not None and origin.get("sha256") is not None:
        try:
            initial_lora = stored_lora(checkpoint, config.run.output_dir, origin["sha256"])
        except InputError as error:
            problems.append(error)
    problems += [*_refusals(checkpoint, differences, resets), *_useless_resets(requested, config, differences, saved)]
    if "step" in requested and scan_checkpoints(config.run.output_dir):
        message = (
            f"--reset step counts from 0 again, and {config.run.output_dir} holds checkpoints of the earlier count; "
            "set the checkpoint's directory and a new --output_dir"
        )
        problems.append(InputError(message, "occupied"))
    if problems:
        raise InputError("; also: ".join(map(str, problems)), problems[0].kind)
    start = Start(
        checkpoint=checkpoint,
        initial=initial,
        origin=origin,
        initial_lora=initial_lora,
        step=step,
        schedule_start=step if "scheduler" in resets else int(state["schedule_start"]),
        data_position=data_position,
        resets=resets,
        critical=now,
        memory_choices=memory_choices(manifest),
    )
    warnings = list(_warnings(start, state, config, plan, manifest))
    return replace(start, rows=_rows(start, state, config, manifest), warnings=warnings)


#: Beginnings of `parts` that are the data of a run.
_DATA_PARTS = ("data=", "eval_data=", "prompts=", "eval_prompts=")


@dataclass(frozen=True)
class Change:
    """Setting or fact that differs from the checkpoint, with a description and the reset that allows it."""

    name: str
    text: str
    reset: str | None


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], *, plan: TrainingSet) -> list[Change]:
    """Return all critical differences of a run from the checkpoint."""
    saved, allowed = by_current_names(saved), {**critical_options(), **plan.critical_options, **_FACTS}
    differences = []
    for name, value in now.items():
        # An option that is younger than the checkpoint was at its default; facts and required options have none.
        field = fields()[name].field if name in fields() else None
        default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
        then = saved.get(name, default)
        if name == "parts":  # rows and prompts are compared like those of files, by `data`
            then, value = (
                [part for part in parts or () if not part.startswith(_DATA_PARTS)] for parts in (then, value)
            )
        if name not in allowed or then == value or (name == "parts" and equal_parts(then or (), value)):
            continue
        if name in _MODEL_FACTS and None in (saved.get(name), value):
            continue  # unknown on one of the machines, or younger than the checkpoint
        text = f"{name}: {then!r} then, {value!r} now"
        if message := _MODEL_FACTS.get(name):
            text = f"{name}: {message}"
        elif name == "data":
            text = (
                f"data: {plan.fingerprint_of} have changed{_describe_rows(saved.get('data_table'), now['data_table'])}"
            )
        differences.append(Change(name, text, allowed[name]))
    return differences


def _describe_rows(saved: Sequence[Sequence[str]] | None, now: Sequence[Sequence[str]]) -> str:
    """Return the rows in which two summaries of the data differ, in parentheses."""

    def rows(table: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> str:
        differing = [zip(table[0], line, strict=True) for line in table[1:] if line not in other]
        texts = (", ".join(f"{heading} {value}" for heading, value in cells) for cells in differing)
        return " and ".join(texts) or "nothing else"

    if saved is None or list(map(list, saved)) == list(map(list, now)):
        return ""
    return f" ({rows(saved, now)} then; {rows(now, saved)} now)"


def _refusals(checkpoint: Path, differences: Sequence[Change], resets: frozenset[str]) -> Iterator[InputError]:
    blocking = [change for change in differences if change.reset not in resets]
    if not blocking:
        return
    parts = [change.text + (f" (--reset {change.reset})" if change.reset else "") for change in blocking]
    allowing = {change.reset for change in blocking if change.reset}
    unresettable, ways = [change.name for change in blocking if not change.reset], []
    if allowing:
        others = "the others" if unresettable else "them"
        ways.append(f"--reset {' '.join(sorted(allowing | resets))} allows {others}")
    if unresettable:
        ways.append(
            f"{', '.join(unresettable)} cannot be changed; a new run can start from the weights alone, if they fit, "
            "with --init_from"
        )
    message = f"cannot continue from {checkpoint}: {'; '.join(parts)}. Restore these settings, or: {'; '.join(ways)}"
    yield InputError(message, "mismatch")


def _useless_resets(
    requested: frozenset[str], config: TrainConfig, differences: Sequence[Change], saved: Mapping[str, Any]
) -> Iterator[InputError]:
    """Yield problems of resets that would do nothing."""
    if "rng" in requested and not any(change.reset == "rng" for change in differences):
        message = (
            f"--reset rng has no effect: the seed is still {config.training.seed}, and noise levels are drawn as "
            "before; set another --seed, or remove it"
        )
        yield InputError(message, "conflict")
    if "ema" in requested and not config.training.use_ema and not saved.get("use_ema"):
        message = "--reset ema has no effect: neither the checkpoint nor this run has an EMA"
        yield InputError(message, "conflict")


def _rows(
    start: Start, state: Mapping[str, Any], config: TrainConfig, manifest: Mapping[str, Any]
) -> list[tuple[str, str]]:
    step, position, initial, resets = int(state["step"]), start.data_position, start.initial, start.resets
    at_step = f"step {step}"
    rows = {"weights": f"{at_step} of {start.checkpoint}"}
    if initial is not None and initial.kind == "full" and config.training.training_type == "lora":
        rows["base of the LoRA"] = str(initial.path)
    if start.initial_lora is not None and method_spec(config).uses_reference(config):
        rows["reference model"] = f"the model with the LoRA {start.initial_lora}"
    rows["optimizer"] = "new, no moments" if "optimizer" in resets else at_step
    schedule_start = int(state["schedule_start"])
    beginning = f", begun at step {schedule_start}" if schedule_start else ""
    rows["learning rate schedule"] = "from its beginning" if "scheduler" in resets else f"{at_step}{beginning}"
    if "data" in resets:
        rows["data"] = "from the beginning"
    else:
        rows["data"] = at_step + (f", begun at step {position.first_step}" if position.first_step else "")
        last = position.segments[-1]
        if last.first_step == step + int(state["guards"]["data_ahead"]) and len(position.segments) > 1:
            rows["data"] += ", in other batches from here on"
    rows["noise"] = f"seed {config.training.seed}{', as set now' if 'rng' in resets else ''}"
    if config.training.use_ema:
        rows["moving average"] = "from the present weights" if "ema" in resets else at_step
    elif "ema" in resets:
        rows["moving average"] = "let go"
    if state["method"]:
        rows[method_spec(config).state_name] = at_step
    rows["step"] = "from 0" if "step" in resets else at_step
    if option_changes := changed_options(manifest.get("config", {}), config):
        rows["changed options"] = ", ".join(option_changes)
    return list(rows.items())


def changed_options(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Return options that differ from those of the checkpoint's run; this run's values apply."""
    then = by_current_names(saved)
    return [
        f"{name} {then[name]} -> {value}"
        for name, value in config.plain().items()
        if then.get(name, value) != value and name not in config.chosen and fields()[name].resume != "unlisted"
    ]


def _warnings(
    start: Start, state: Mapping[str, Any], config: TrainConfig, plan: TrainingSet, manifest: Mapping[str, Any]
) -> Iterator[str]:
    step, resets = int(state["step"]), start.resets
    saved, installed = manifest.get("packages", {}), package_versions()
    changed_packages = [f"{name} {saved[name]} then, {version} now" for name, version in installed.items()
             if name in saved and saved[name] != version]  # fmt: skip
    if changed_packages:
        yield f"the checkpoint was saved with other packages, so numbers may differ: {'; '.join(changed_packages)}"
    if not is_sealed(manifest):
        yield (
            "the checkpoint's manifest has no checksum (it was written by an earlier version), so damage to it would "
            "not be detected"
        )
    method, origin = method_spec(config), start.origin or {}
    yield from method.resume_warnings(config, state["method"])
    if (
        method.uses_reference(config)
        and method.reference == "start"
        and origin.get("kind") == "lora"
        and start.initial_lora is None
    ):
        yield (
            f"the run started from the LoRA {origin['given']} in an earlier version, whose reference model is the "
            "base model without it, and it stays so; a new run with --init_from has the model with the LoRA as its "
            "reference"
        )
    then, now = DataPosition.from_state(state["course"]).segments[-1], start.data_position.segments[-1]
    clips = then.batch_size * then.per_step, now.batch_size * now.per_step
    if plan.cut_in_batches and clips[0] != clips[1] and "data" not in resets:
        world = max(1, now.per_step // config.training.gradient_accumulation_steps)
        yield (
            f"optimizer steps had {plural(clips[0], 'clip')} and have {clips[1]} from here "
            f"on; each clip still comes once an epoch.{_batch_advice(then.batch_size, then.per_step, world)}"
        )
    yield from _rate_change(state, config, manifest, resets)
    if "scheduler" in resets and "step" not in resets and config.optimizer.lr_scheduler == "constant":
        yield "--reset scheduler has no effect with --lr_scheduler constant"
    steps = config.training.train_steps
    if steps is not None and "step" not in resets and steps <= step:
        yield f"nothing is left to train: the checkpoint is of step {step}, and --train_steps is {steps}"


def _rate_change(
    state: Mapping[str, Any], config: TrainConfig, manifest: Mapping[str, Any], resets: frozenset[str]
) -> Iterator[str]:
    """Yield a warning if another number of steps moves the run on its learning rate schedule."""
    then, now = (manifest.get("config") or {}).get("train_steps"), config.training.train_steps
    step, start = state["step"], state["schedule_start"]
    if resets & {"scheduler", "step"} or type(then) is not int or now is None or then == now or now <= step:
        return
    if has_part(config, "lr_at"):
        return
    from finetrainers.optim.schedules import lr_schedule  # needs torch, so only if the steps have changed

    options = config.optimizer
    lr, rate = (1.0, "factor of the learning rate") if has_part(config, "optimizer") else (options.lr, "learning rate")
    schedules = [lr_schedule(options, lr=lr, total_steps=n - start, first_step=start) for n in (then, now)]
    rates = [max(0.0, schedule(step)) for schedule in schedules]
    if abs(rates[0] - rates[1]) > _SAME_RATE * max(rates):
        yield (
            f"--train_steps was {then} and is {now}: on the {options.lr_scheduler} schedule the {rate} of "
            f"step {step + 1} is {rates[1]:.3g} instead of {rates[0]:.3g}; --reset scheduler starts the schedule again"
        )


def _batch_advice(batch_size: int, per_step: int, world: int) -> str:
    """Return options that keep the number of clips of a step with this many processes, as a sentence."""
    if per_step % world == 0:
        return f" To keep the number: --batch_size {batch_size} --gradient_accumulation_steps {per_step // world}"
    if batch_size * per_step % world == 0:
        return f" To keep the number: --batch_size 1 --gradient_accumulation_steps {batch_size * per_step // world}"
    return f" {plural(batch_size * per_step, 'clip')} cannot be distributed evenly to {world} processes"
