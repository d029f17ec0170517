"""Assembly of a trainer from a checked configuration: the three loading phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, takewhile
from typing import Any

import torch
from rich.console import Console
from torch import nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.frame_conditioning import select_conditioning_modes
from finetrainers.config.root import TrainConfig
from finetrainers.draw.notebook import in_notebook
from finetrainers.memory.recorder import MemoryRecorder
from finetrainers.methods.base import MethodParts
from finetrainers.methods.registry import load_method, method_spec
from finetrainers.methods.spec import BatchSource
from finetrainers.models.spec import DTYPES, ModelSpec
from finetrainers.optim.ema import EMA
from finetrainers.optim.factory import create_optimizer, custom_optimizer
from finetrainers.optim.schedules import Schedule, group_rates, lr_schedule
from finetrainers.parallel.strategy import Strategy
from finetrainers.plan.automatic import apply_decoding_settings, choose_settings, record_choices
from finetrainers.plan.block_swap import block_swap
from finetrainers.plan.initial_weights import INITIAL_LORA
from finetrainers.plan.lineage import BEGAN_FROM, find_lineage
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.plan.start_report import print_line, report_loading
from finetrainers.plan.throughput import attach_flop_meter
from finetrainers.plan.trainable import trainable_dtype, trainable_parameters
from finetrainers.rundir.run_dir import RunDirectory
from finetrainers.utils.train_log import PrintedLines

from .activation_memory import activation_planner
from .callbacks.base import Callback
from .callbacks.evaluation import MethodEvaluation
from .callbacks.hacking import HackingWatch
from .callbacks.metrics import MetricsFile, RewardFiles
from .callbacks.profile import StepProfile
from .callbacks.progress import ProgressLine
from .callbacks.scores import SampleScores
from .callbacks.tracking import TrackedMedia, Tracker
from .callbacks.validation import Validation
from .checkpoints.restore import check_restorable, restore
from .checkpoints.save import shares_saving
from .guards.memory import advise_on_oom
from .load_inputs import load_batch_source, load_text_conditioning
from .sampling import EncodedPrompts
from .state import TrainState
from .trained_weights import load_trainable_transformer, mapped_dtype, store_expert, store_initial_lora
from .trainer import Trainer
from .watchdog import Watchdog


@advise_on_oom("loading and encoding")
def assemble(checked: ResolvedRun, parallel: Strategy, watchdog: Watchdog, memory: MemoryRecorder) -> Trainer:
    """Load everything in three phases and build the trainer, resumed if asked."""
    config, plan, start = checked.config, checked.plan, checked.start
    print_line(parallel.describe())
    check_restorable(start, parallel)
    spec = checked.spec
    kernel = spec.check_attention(parallel.device, parallel.compute_dtype(trainable_dtype(config)))
    if kernel != spec.config.attn_backend and parallel.device.type == "cuda":
        print_line(f"attention: --attn_backend {spec.config.attn_backend} uses the kernel of {kernel} without a mask")
    scheduler = spec.load_scheduler()
    _print_notes(checked, spec)

    # Phases 1 and 2: text encoders, then the VAE.
    sampling_dtype = _sampling_dtype(config, parallel)
    texts, encoded = load_text_conditioning(checked, spec, parallel, watchdog, sampling_dtype=sampling_dtype)
    source, vae_stats = load_batch_source(checked, spec, parallel, watchdog, texts)

    # Phase 3: the transformer.
    watchdog.enter("loading")
    global_batch = config.training.gradient_accumulation_steps * config.dataloader.batch_size * parallel.data_size
    lr = config.optimizer.lr * (global_batch if config.optimizer.scale_lr else 1)
    chosen, automatic = choose_settings(checked, parallel)
    apply_decoding_settings(automatic, spec, plan.size)
    activations = activation_planner(checked, automatic, parallel.device)
    resolved, config = replace(checked, config=chosen), record_choices(config, automatic)
    transformer, optimizer = _load_trained(resolved, spec, parallel, lr=lr)
    network = parallel.unwrap(transformer)
    method_class: Any = checked.parts.method or load_method(config.training.method)
    method = method_class(
        MethodParts(
            config=chosen, spec=spec, process=spec.process(scheduler), scheduler=scheduler,
            geometry=spec.facts.geometry, vae_stats=vae_stats, source=source, parallel=parallel, network=network,
            weights_dtype=trainable_dtype(config), initial_lora=start.initial_lora,
        )
    )  # fmt: skip
    fields = parallel.broadcast_object(start.checkpoint_fields(config) if parallel.is_main else {})
    total_steps = config.training.train_steps or source.steps_for_epochs(config.training.train_epochs)
    state = TrainState(
        config=config, spec=spec, method=method, parallel=parallel, transformer=transformer, optimizer=optimizer,
        total_steps=total_steps, run_dir=RunDirectory(config.run.output_dir, writes=parallel.is_main),
        watchdog=watchdog, memory=memory, checkpoint_fields=fields,
        ema=make_ema(config, network), meter=attach_flop_meter(spec, network, sharing=parallel.sharing),
        shares_saving=shares_saving(config, parallel),
    )  # fmt: skip
    if activations is not None:
        state.guards.memory.recompute_more = partial(activations.recompute_more, state)
    callbacks = _make_callbacks(state, resolved, source, scheduler=scheduler, encoded=encoded)
    schedule = _make_schedule(checked, optimizer, lr=lr, total_steps=total_steps)  # restoring loads other rates
    restore(state, start)
    _record_start(state, checked)
    _store_initial_lora(state, checked)
    return Trainer(state, schedule=schedule, callbacks=callbacks, activations=activations)


def _make_schedule(checked: ResolvedRun, optimizer: Any, *, lr: float, total_steps: int) -> Schedule:
    """Return the learning rates: those of the options, or the rates of a user's optimizer or function."""
    parts, first_step = checked.parts, checked.start.schedule_start
    own = [] if parts.optimizer is None else group_rates(optimizer)
    if parts.schedule is None:
        steps = max(1, total_steps - first_step)
        lr_at = lr_schedule(checked.config.optimizer, lr=1.0 if own else lr, total_steps=steps, first_step=first_step)
        return Schedule(lr_at, own)
    if len(set(own)) > 1:
        message = f"sets one rate for all groups of the optimizer, and theirs are {', '.join(map(str, own))}; remove it"
        raise ConfigError([Problem("lr_at", f"{message}, or give the groups one rate", "conflict")])
    return Schedule(parts.schedule)


def _print_notes(checked: ResolvedRun, spec: ModelSpec) -> None:
    """Print the settings that the model's own files have decided, and the conditioning frames of samples."""
    data = checked.config.data
    kinds = select_conditioning_modes(data.frame_conditioning, data.first_frame_conditioning_p, spec.facts)
    chosen_by = "first_frame_conditioning_p" if data.frame_conditioning is None else "frame_conditioning"
    if kinds and checked.plan.encodes_clips and chosen_by not in method_spec(checked.config).unread:
        if data.frame_conditioning is not None:
            shares = ", ".join(f"{kind.label} {kind.p:.3g}" for kind in kinds)
            print_line(f"note: frame-conditioning probabilities: {shares}")
        elif data.first_frame_conditioning_p is None:
            frames = "first and last frame" if spec.facts.last_frame else "first frame"
            has_images = spec.facts.images == "from text" and any(size[0] == 1 for size in checked.plan.buckets)
            print_line(
                f"note: {kinds[0].p:.0%} of samples are conditioned on their {frames} (--first_frame_conditioning_p)"
                f"{', images on the prompt alone' if has_images else ''}"
            )
    tiled = dict.fromkeys("x".join(map(str, size)) for size in checked.sizes if spec.tiles_by_size(size))
    if tiled:
        print_line(f"note: VAE tiling of {', '.join(tiled)} keeps it below 24 GiB (--no-enable_tiling disables it)")


def _sampling_dtype(config: TrainConfig, parallel: Strategy) -> torch.dtype:
    """Return the dtype of the text conditions that validation samples are drawn with."""
    is_full = config.training.training_type == "full-finetune"
    return parallel.compute_dtype(trainable_dtype(config) if is_full else DTYPES[config.model.transformer_dtype])


def _load_trained(checked: ResolvedRun, spec: ModelSpec, parallel: Strategy, *, lr: float) -> tuple[nn.Module, Any]:
    """Return the transformer, with its adapter attached, and its optimizer, as the strategy has prepared them."""
    config, swapped = checked.config, checked.config.memory.blocks_to_swap
    assert swapped != "auto", "it was chosen"
    spec.store_expert = partial(store_expert, config=config, spec=spec, device=parallel.device, swapped=swapped)
    dtype, mapped = trainable_dtype(config), mapped_dtype(checked, spec)
    with report_loading(checked, "transformer"):
        return parallel.prepare(
            lambda: load_trainable_transformer(
                checked, spec, mapped or dtype, device=parallel.device, sequence_group=parallel.sequence_group
            ),
            lambda parameters: (
                create_optimizer(
                    parameters,
                    config=config.optimizer,
                    lr=lr,
                    device_type=parallel.device.type,
                    stochastic_rounding=config.training.master_weights == "stochastic_rounding",
                )
                if checked.parts.optimizer is None
                else custom_optimizer(checked.parts.optimizer, parameters)
            ),
            blocks=spec.blocks,
            swap=block_swap(swapped, spec, parallel),
            mapped=mapped is not None,
            widened=None if mapped in (None, dtype) else dtype,
        )


def _make_callbacks(
    state: TrainState, checked: ResolvedRun, source: BatchSource, *, scheduler: Any, encoded: EncodedPrompts | None
) -> list[Callback]:
    """Return the callbacks of the run; rank 0 shows and records it."""
    config, headline = state.config, state.method.headline
    # First, so that it ends before samples are drawn.
    callbacks: list[Callback] = [] if config.run.profile_steps is None else [StepProfile(config.run.profile_steps)]
    trackers = [Tracker(config.run, kind) for kind in config.run.report_to] if state.parallel.is_main else []
    if state.parallel.is_main:
        callbacks += [MetricsFile(), ProgressLine(headline=headline, notebook=in_notebook())]
        if config.run.train_log:
            callbacks.append(
                ProgressLine(
                    headline=headline, console=Console(file=PrintedLines(), force_jupyter=False, force_terminal=False)
                )
            )
        callbacks += trackers
        callbacks += [RewardFiles()] if "reward/" in headline else []
    if state.guards.hacking is not None:
        callbacks.append(HackingWatch(state.guards.hacking))  # before the evaluation, whose record it judges
    if state.method.evaluates:
        callbacks.append(MethodEvaluation(fps=checked.geometry.fps))
    if encoded is not None:
        callbacks += _make_validations(state, checked, source, scheduler=scheduler, encoded=encoded)
    return [*callbacks, *map(TrackedMedia, trackers)]


def _make_validations(
    state: TrainState, checked: ResolvedRun, source: BatchSource, *, scheduler: Any, encoded: EncodedPrompts
) -> Iterator[Validation]:
    """Yield the sampler of the validation prompts, and that of scored prompts unless they are the same."""
    config, scores = state.config.validation, None
    section = checked.config.validation.model_copy(update={"validation_frame_rate": checked.frame_rate})
    due = _schedule(state, source, config.validation_steps, config.validation_epochs)
    due_scores = _schedule(state, source, config.eval_steps)
    if config.eval_reward and not method_spec(state.config).samples:
        scores = SampleScores(config.eval_reward, state.parallel)
    validation = partial(
        Validation,
        size=checked.plan.size,
        scheduler=scheduler,
        load_vae=lambda: state.spec.load_vae() if source.vae is None else source.vae,
    )
    # Scores without those before training would not show what training changes.
    scores_at_start = config.validation_at_start is not False
    count = len(checked.prompts)
    if scores is not None and checked.scored:
        held_out = encoded.select(count, len(encoded.prompts))
        one_video = section.model_copy(update={"num_validation_videos": 1})
        yield validation(
            encoded=held_out, section=one_video, due=due_scores, at_start=scores_at_start, scores=scores, prefix="eval-"
        )
        scores = None
    if checked.prompts:
        both = due if scores is None else lambda step: due(step) or due_scores(step)
        at_start = config.samples_at_start if scores is None else scores_at_start
        yield validation(encoded=encoded.select(0, count), section=section, due=both, at_start=at_start, scores=scores)


def _schedule(
    state: TrainState, source: BatchSource, steps: int | None, epochs: int | None = None
) -> Callable[[int], bool]:
    """Return a test of whether to sample after a step: every N steps, and after every N epochs."""
    total = state.total_steps
    due = range(steps, total, steps) if steps else ()
    ends = (source.steps_for_epochs(n) for n in count(epochs, epochs)) if epochs else ()
    epoch_ends = set(takewhile(lambda step: step <= total, ends))
    return lambda step: step in due or step in epoch_ends


def _record_start(state: TrainState, checked: ResolvedRun) -> None:
    """Write what the run is and where it starts from into the run directory."""
    state.run_dir.start(state.config, resumed_step=state.step)
    root, start = state.run_dir.root, checked.start
    origin = find_lineage(root, checkpoint=start.checkpoint, initial=start.initial) if state.parallel.is_main else None
    if origin is not None:
        state.run_dir.event(BEGAN_FROM, **origin)
    if rows := start.rows:
        parts = {part.replace(" ", "_"): text for part, text in rows if part != "step"}
        state.run_dir.event("origin", step=state.step, **parts)
    if state.parallel.is_main:
        checked.plan.write(root / "manifest.jsonl")


def _store_initial_lora(state: TrainState, checked: ResolvedRun) -> None:
    """Store the LoRA of the reference model with the run, and its digest in checkpoints; every rank must call it."""
    parallel, origin = state.parallel, checked.start.origin
    with parallel.raise_on_all_ranks(f"storing {state.run_dir.root / INITIAL_LORA}"):
        sha256 = store_initial_lora(checked, state.spec) if parallel.is_main else None
    sha256 = parallel.broadcast_object(sha256)
    if sha256 is not None:
        state.checkpoint_fields = {**state.checkpoint_fields, "initial": {**(origin or {}), "sha256": sha256}}


def make_ema(config: TrainConfig, transformer: nn.Module) -> EMA | None:
    """Return the moving average of the trainable weights, or None without `--use_ema`."""
    if not config.training.use_ema:
        return None
    return EMA(
        trainable_parameters(transformer),
        decay=config.training.ema_decay,
        update_after_step=config.training.ema_update_after_step,
    )
