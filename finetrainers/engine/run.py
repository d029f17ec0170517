"""A training run from a checked configuration: the three loading phases, the trainer, the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from diffusers.training_utils import free_memory
from diffusers.utils import load_image
from PIL import Image
from torch import nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.geometry import Geometry
from finetrainers.config.prompts import ValidationPrompt
from finetrainers.config.root import TrainConfig
from finetrainers.config.window_checks import window_problems
from finetrainers.data.decode import read_frames
from finetrainers.data.probe import probe
from finetrainers.memory.casting import enable_layerwise_upcasting
from finetrainers.memory.checkpointing import set_gradient_checkpointing
from finetrainers.methods.base import MethodParts
from finetrainers.methods.registry import WorkPlan, load_method, open_work
from finetrainers.models.spec import DTYPES, Conditions, ModelSpec, TextEncoders
from finetrainers.optim.ema import EMA
from finetrainers.optim.factory import create_optimizer
from finetrainers.optim.rules import optimizer_problems
from finetrainers.optim.schedules import lr_from, lr_schedule
from finetrainers.parallel.engine import Parallel
from finetrainers.parallel.launched import open_parallel
from finetrainers.utils.faults import arm_faults, fault_point
from finetrainers.utils.launch import launched_rank

from .callbacks.base import Callback
from .callbacks.evaluation import EvaluationLoss
from .callbacks.metrics import MetricsFile, ProgressLine, Tracker
from .callbacks.rewards import MethodEvaluation, RewardFiles
from .callbacks.validation import EncodedPrompt, Validation
from .export import export
from .guards.memory import refusal
from .lock import exclusive
from .plan_report import dry_run_report, print_line, print_results, print_start, print_stopped
from .preflight import Preflight, preflight
from .restore import check_restorable, restore
from .resume import scan_checkpoints
from .run_dir import RunDirectory
from .trainable import attach, load_lora_weights, start_from_lora, trainable_parameters
from .trainer import Trainer


def train(config: TrainConfig) -> Trainer | None:
    """Check a configuration and train; the finished trainer, or None for a dry run.

    Raises:
        ConfigError: the configuration cannot run; all reasons at once.
    """
    return run(preflight(config))


def run(checked: Preflight, *, handle_signals: bool = False) -> Trainer | None:
    """Train a checked configuration; the trainer, finished or stopped, or None for a dry run.

    Args:
        checked: what to train.
        handle_signals: whether a signal (`stopping.SIGNALS`) stops the run with a checkpoint; only in the main thread.
    """
    config = checked.config
    if config.run.dry_run:
        if launched_rank() == 0:
            dry_run_report(checked)
        return None
    # What a hub model looks like is known for certain only from its own config files.
    if checked.family.fetch_configs(config.model):
        checked = preflight(config)
    parallel = make_parallel(config)
    try:
        with exclusive(config.run.output_dir, parallel):
            arm_faults()
            fault_point("start")
            # Another run may have saved, and ended, between the choice of a checkpoint and the lock.
            if parallel.same_on_all(scan_checkpoints(config.run.output_dir) != checked.found):
                checked = preflight(config)
            trainer = assemble(checked, parallel)
            # Until here a signal ends the process as always: there is nothing to save yet.
            with trainer.requests.signals.listening() if handle_signals else contextlib.nullcontext():
                trainer.run()
                _conclude(trainer, checked)
    finally:
        parallel.close()
    return trainer


def _conclude(trainer: Trainer, checked: Preflight) -> None:
    """Export the results and close the records; of a run that was stopped, the records only."""
    if trainer.stopped_by is None:
        export(trainer, checked)
    else:
        trainer.run_dir.event("stopped", step=trainer.step, by=trainer.stopped_by)
    trainer.finish()
    if trainer.stopped_by is not None:
        # Launchers end all processes once one has gone with a code other than 0, and rank 0 has records to close.
        trainer.parallel.barrier()
    if trainer.parallel.is_main:
        if trainer.stopped_by is None:
            print_results(trainer.run_dir.root)
        else:
            print_stopped(step=trainer.step, by=trainer.stopped_by)


def make_parallel(config: TrainConfig) -> Parallel:
    """Join the other processes, and check what depends on the device.

    Raises:
        ConfigError: options that this device cannot serve.
    """
    torch.backends.cuda.matmul.allow_tf32 = config.run.allow_tf32
    torch.backends.cudnn.allow_tf32 = config.run.allow_tf32
    parallel = open_parallel(
        config.parallel,
        mixed_precision=config.training.mixed_precision,
        fallback_precision=config.model.transformer_dtype
        if config.model.transformer_dtype in ("bf16", "fp16")
        else "no",
        accumulation=config.training.gradient_accumulation_steps,
        batch_size=config.dataloader.batch_size,
        max_grad_norm=config.optimizer.max_grad_norm,
        timeout_s=config.run.nccl_timeout,
    )
    # Preflight guessed the device and knew one process; its warnings have been shown.
    errors, _ = optimizer_problems(
        config, device_type=parallel.device.type, num_processes=parallel.world_size, updates_parts=parallel.is_fsdp
    )
    problems = [Problem("", message) for message in errors]
    if config.training.on_nonfinite == "rollback" and (parallel.is_sharded or parallel.is_deepspeed):
        message = "weights that the engine splits cannot be put back within a run; use DDP, or raise and resume"
        problems.append(Problem("--on_nonfinite rollback", message))
    if config.training.async_checkpointing and parallel.is_deepspeed:
        message = "DeepSpeed writes its own files, while training waits; use DDP or FSDP2, or leave it out"
        problems.append(Problem("--async_checkpointing", message))
    if config.training.dry_batches == "on" and parallel.is_deepspeed:
        message = "DeepSpeed sums gradients in buffers of its own, where those of a trial would stay; leave it out"
        problems.append(Problem("--dry_batches on", message))
    why_not = refusal(config.training.oom_retry, parallel=parallel, full=False)
    if config.training.oom_retry == "on" and why_not is not None:
        problems.append(Problem("--oom_retry on", why_not))
    if config.training.use_ema and parallel.is_sharded:
        message = (
            "averages need whole weights, and this engine splits them; use DDP or DeepSpeed ZeRO-2, or leave it out"
        )
        problems.append(Problem("--use_ema", message))
    if config.training.method == "grpo" and parallel.is_sharded and config.grpo.rl_algorithm == "nft":
        message = "the sampling policy is swapped in as whole weights, and this engine splits them; use DDP"
        problems.append(Problem("--rl_algorithm nft", message))
    if config.model.layerwise_upcasting_modules and parallel.is_sharded:
        message = "8-bit storage changes weights in place, and this engine splits them; use DDP or DeepSpeed ZeRO-2"
        problems.append(Problem("--layerwise_upcasting_modules", message))
    if problems:
        raise ConfigError(problems)
    return parallel


def assemble(checked: Preflight, parallel: Parallel) -> Trainer:
    """Load everything in three phases and build the trainer, resumed if asked."""
    config, plan, start = checked.config, checked.plan, checked.start
    print_start(checked, parallel)
    check_restorable(start, parallel)
    spec = checked.family.load(config.model)
    scheduler = spec.load_scheduler()
    process = spec.process(scheduler)
    weights_dtype = trainable_dtype(config)
    first_frame_p = first_frame_probability(config, spec)
    asked = config.data.first_frame_conditioning_p is not None
    if parallel.is_main and first_frame_p > 0 and not asked and plan.noun == "clip":
        print_line(f"note: {first_frame_p:.0%} of samples see their clean first frame (--first_frame_conditioning_p)")
    compute_dtype = parallel.compute_dtype(
        weights_dtype if config.training.training_type == "full-finetune" else DTYPES[config.model.transformer_dtype]
    )
    source = open_work(plan, config, spec=spec, parallel=parallel, course=start.course)

    # Phase 1: text. With precomputation, each phase's networks are gone before the next phase loads its own.
    prompts: list[EncodedPrompt] = []
    negative = None
    if checked.prompts or not source.recall_texts():
        with parallel.together("loading the text encoders"):
            encoders = spec.load_text_encoders().to(parallel.device)
            prompts, negative = encode_prompts(checked, spec, encoders, compute_dtype)
        source.take_text_encoders(encoders)
        del encoders
        free_memory()

    # Phase 2: the VAE.
    with parallel.together("loading the VAE"):
        vae = spec.load_vae().to(parallel.device)
        vae_stats = spec.vae_stats(vae)
        geometry = spec.geometry(vae, spec.transformer_on_meta())
        check_geometry(plan, config, geometry)
    kept_vae = source.take_vae(vae)
    del vae
    free_memory()

    # Phase 3: the transformer.
    lr = config.optimizer.lr * lr_scale(config, parallel)
    transformer, optimizer = parallel.prepare(
        lambda: load_trainable_transformer(checked, spec, weights_dtype),
        lambda parameters: create_optimizer(
            parameters,
            config=config.optimizer,
            lr=lr,
            device_type=parallel.device.type,
            stochastic_rounding=config.training.master_weights == "stochastic_rounding",
        ),
        blocks=spec.blocks,
    )
    method = load_method(config.training.method).create(
        MethodParts(
            config=config,
            spec=spec,
            process=process,
            scheduler=scheduler,
            geometry=geometry,
            vae_stats=vae_stats,
            first_frame_p=first_frame_p,
            source=source,
            parallel=parallel,
            network=parallel.unwrap(transformer),
        )
    )
    begun = start.schedule_start
    total_steps = config.training.train_steps or source.steps_for_epochs(config.training.train_epochs)
    trainer = Trainer(
        config=config,
        spec=spec,
        method=method,
        parallel=parallel,
        transformer=transformer,
        optimizer=optimizer,
        lr_at=lr_from(lr_schedule(config.optimizer, lr=lr, total_steps=max(1, total_steps - begun)), begun),
        total_steps=total_steps,
        run_dir=RunDirectory(config.run.output_dir, writes=parallel.is_main),
        carried=start.refreshed(config).carried(),
        ema=make_ema(config, parallel.unwrap(transformer)),
    )
    trainer.callbacks = make_callbacks(
        checked, parallel, method=method, source=source, scheduler=scheduler, prompts=prompts, negative=negative,
        load_vae=spec.load_vae if kept_vae is None else lambda: kept_vae,
    )  # fmt: skip
    restore(trainer, start)
    trainer.run_dir.start(config, resumed_step=trainer.step)
    if start.rows:
        trainer.run_dir.event(
            "origin", step=trainer.step, **{part.replace(" ", "_"): text for part, text in start.rows if part != "step"}
        )
    if parallel.is_main:
        plan.write(trainer.run_dir.root / "manifest.jsonl")
    return trainer


def trainable_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype in which the transformer is loaded: frozen weights as asked, trained ones in fp32 unless they round."""
    if config.training.training_type == "lora":
        return DTYPES[config.model.transformer_dtype]
    return torch.float32 if config.training.master_weights == "fp32" else torch.bfloat16


def encode_prompts(
    checked: Preflight, spec: ModelSpec, encoders: TextEncoders, dtype: torch.dtype
) -> tuple[list[EncodedPrompt], Conditions | None]:
    """Validation prompts as conditions on the CPU, so that sampling needs no text encoder; and the empty prompt's."""
    if not checked.prompts:
        return [], None
    default_size = checked.plan.size
    encoded = [
        EncodedPrompt(
            prompt=prompt,
            conditions=spec.encode_text(encoders, [prompt.prompt]).to("cpu", dtype),
            size=prompt.size or default_size,
            image=_first_frame(prompt),
        )
        for prompt in checked.prompts
    ]
    return encoded, spec.encode_text(encoders, [""]).to("cpu", dtype)


def _first_frame(prompt: ValidationPrompt) -> Any:
    """The image that conditions a validation prompt, or None."""
    if prompt.image is not None:
        return load_image(prompt.image)
    if prompt.video is None:
        return None
    path = Path(prompt.video)
    found = probe(path)
    return Image.fromarray(read_frames(path, [0], height=found.height, width=found.width)[0].numpy())


def check_geometry(plan: WorkPlan, config: TrainConfig, geometry: Geometry) -> None:
    """Sizes against the loaded model, which for hub models is known only now.

    Raises:
        ConfigError: a size does not fit.
    """
    option = "--rollout_size" if config.training.method == "grpo" else "--video_resolution_buckets"
    problems = [
        Problem(option, f"{'x'.join(map(str, size))}: {problem}")
        for size in plan.buckets
        for problem in geometry.problems(*size)
    ]
    problems += [Problem(f"--{option}", problem) for option, problem in window_problems(config.data, geometry)]
    if problems:
        raise ConfigError(problems)


def load_trainable_transformer(checked: Preflight, spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """The transformer with what is trained attached, resumed or initial weights included, ready to be wrapped.

    Raises:
        ConfigError: a LoRA target matches nothing, or a LoRA to start from does not fit.
    """
    fault_point("load")
    config, checkpoint, initial = checked.config, checked.start.checkpoint, checked.start.initial
    if checkpoint is not None and config.training.training_type == "full-finetune":
        saved = config.model.model_copy(update={"transformer_id": str(checkpoint / "transformer"), "variant": None})
        transformer = checked.family.load(saved).load_transformer(dtype)
    else:
        transformer = spec.load_transformer(dtype)
    try:
        attach(transformer, config.training)
    except ValueError as error:
        raise ConfigError([Problem("", str(error))]) from None
    if checkpoint is not None and config.training.training_type == "lora":
        load_lora_weights(checkpoint, transformer)
    elif checkpoint is None and initial is not None and initial.kind == "lora":
        try:
            start_from_lora(initial.path, transformer, spec=spec, training=config.training)
        except ValueError as error:
            raise ConfigError([Problem("--init_from", str(error))]) from None
    if "transformer" in config.model.layerwise_upcasting_modules:
        enable_layerwise_upcasting(
            transformer,
            storage_dtype=DTYPES[config.model.layerwise_upcasting_storage_dtype],
            compute_dtype=dtype,
            skip_modules_pattern=config.model.layerwise_upcasting_skip_modules_pattern,
        )
    set_gradient_checkpointing(transformer, enabled=config.training.gradient_checkpointing)
    return transformer


def first_frame_probability(config: TrainConfig, spec: ModelSpec) -> float:
    """How often training shows the clean first frame: as asked, else as the model was trained."""
    if spec.first_frame == "none":
        return 0.0
    asked = config.data.first_frame_conditioning_p
    return spec.first_frame_default_p if asked is None else asked


def lr_scale(config: TrainConfig, parallel: Parallel) -> int:
    """Factor of `scale_lr`: the global batch size."""
    if not config.optimizer.scale_lr:
        return 1
    return config.training.gradient_accumulation_steps * config.dataloader.batch_size * parallel.world_size


def make_ema(config: TrainConfig, transformer: nn.Module) -> EMA | None:
    """The moving average of the trained weights, if asked for."""
    if not config.training.use_ema:
        return None
    return EMA(
        trainable_parameters(transformer),
        decay=config.training.ema_decay,
        update_after_step=config.training.ema_update_after_step,
    )


def make_callbacks(
    checked: Preflight,
    parallel: Parallel,
    *,
    method: Any,
    source: Any,
    scheduler: Any,
    prompts: list[EncodedPrompt],
    negative: Conditions | None,
    load_vae: Callable[[], nn.Module],
) -> list[Callback]:
    """What watches the run."""
    config, validation = checked.config, checked.config.validation
    callbacks: list[Callback] = [MetricsFile(), ProgressLine(enabled=parallel.is_main)]
    if config.run.report_to != "none":
        callbacks.append(
            Tracker(
                name=config.run.report_to,
                project=config.run.tracker_name,
                logging_dir=config.run.logging_dir,
                enabled=parallel.is_main,
            )
        )
    due = every_n(validation.eval_steps)
    if config.grpo.reward:
        callbacks += [RewardFiles(), MethodEvaluation(fps=checked.plan.fps, due=due)]
    if checked.plan.eval_clips:
        callbacks.append(
            EvaluationLoss(
                loss=method.eval_loss,
                batches=source.eval_batches,
                num_levels=validation.eval_num_timesteps,
                due=due,
            )
        )
    if prompts and negative is not None:
        callbacks.append(
            Validation(
                prompts=prompts,
                negative=negative,
                section=validation,
                frame_rate=validation.validation_frame_rate or checked.geometry.fps,
                seed=config.training.seed,
                scheduler=scheduler,
                load_vae=load_vae,
                due=validation_schedule(config, source),
            )
        )
    return callbacks


def every_n(steps: int | None) -> Callable[[int], bool]:
    """Whether a step is a multiple; never for None."""
    return lambda step: steps is not None and step % steps == 0


def validation_schedule(config: TrainConfig, source: Any) -> Callable[[int], bool]:
    """Whether to sample after a step: every N steps, at the ends of every N epochs, and after the last step."""
    steps, epochs = config.validation.validation_steps, config.validation.validation_epochs
    total = config.training.train_steps or source.steps_for_epochs(config.training.train_epochs)
    at = {total}
    if steps:
        at |= set(range(steps, total + 1, steps))
    if epochs:
        ends = takewhile(lambda step: step <= total, (source.steps_for_epochs(n) for n in count(epochs, epochs)))
        at |= set(ends)
    return at.__contains__
