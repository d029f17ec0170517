"""A training run from a checked configuration: the three loading phases, the trainer, the results."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers.training_utils import free_memory
from torch import nn

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.data.source import BatchSource, open_source
from finetrainers.diffusion.timesteps import NoiseLevels
from finetrainers.memory.casting import enable_layerwise_upcasting
from finetrainers.memory.checkpointing import set_gradient_checkpointing
from finetrainers.methods.registry import load_method
from finetrainers.models.spec import DTYPES, Conditions, ModelSpec, TextEncoders
from finetrainers.optim.ema import EMA
from finetrainers.optim.factory import create_optimizer
from finetrainers.optim.rules import optimizer_problems
from finetrainers.optim.schedules import lr_schedule
from finetrainers.parallel.engine import Parallel
from finetrainers.utils.seeding import derive_seed

from .callbacks.base import Callback
from .callbacks.evaluation import EvaluationLoss
from .callbacks.metrics import MetricsFile, ProgressLine, Tracker
from .callbacks.validation import EncodedPrompt, Validation
from .checkpoint import load_checkpoint
from .export import export
from .plan_report import dry_run_report, print_start
from .preflight import Preflight, preflight
from .resume import critical_state
from .run_dir import RunDirectory
from .trainable import attach, load_lora_weights, trainable_parameters
from .trainer import Trainer

logger = logging.getLogger(__name__)


def train(config: TrainConfig) -> Trainer | None:
    """Check a configuration and train; the finished trainer, or None for a dry run.

    Raises:
        ConfigError: the configuration cannot run; all reasons at once.
    """
    return run(preflight(config))


def run(checked: Preflight) -> Trainer | None:
    """Train a checked configuration; the finished trainer, or None for a dry run."""
    config = checked.config
    if config.run.dry_run:
        dry_run_report(checked)
        return None
    parallel = make_parallel(config)
    try:
        trainer = assemble(checked, parallel)
        trainer.run()
        export(trainer, checked)
        trainer.finish()
    finally:
        parallel.close()
    return trainer


def make_parallel(config: TrainConfig) -> Parallel:
    """Join the other processes, and check what depends on the device.

    Raises:
        ConfigError: options that this device cannot serve.
    """
    torch.backends.cuda.matmul.allow_tf32 = config.run.allow_tf32
    torch.backends.cudnn.allow_tf32 = config.run.allow_tf32
    parallel = Parallel(
        mixed_precision=config.training.mixed_precision,
        fallback_precision={"bf16": "bf16", "fp16": "fp16"}.get(config.model.transformer_dtype, "no"),
        accumulation=config.training.gradient_accumulation_steps,
        batch_size=config.dataloader.batch_size,
        max_grad_norm=config.optimizer.max_grad_norm,
        timeout_s=config.run.nccl_timeout,
    )
    errors, _ = optimizer_problems(config, device_type=parallel.device.type)
    if errors:
        raise ConfigError([Problem("optimizer", message) for message in errors])
    return parallel


def assemble(checked: Preflight, parallel: Parallel) -> Trainer:
    """Load everything in three phases and build the trainer, resumed if asked."""
    config, plan = checked.config, checked.plan
    run_dir = RunDirectory(config.run.output_dir, writes=parallel.is_main)
    print_start(checked, parallel)
    spec = checked.family.load(config.model)
    scheduler = spec.load_scheduler()
    process = spec.process(scheduler)

    # Phase 1: text. Phase 2: VAE. With precomputation each is gone before the next is loaded.
    encoders = spec.load_text_encoders().to(parallel.device)
    prompts, negative = encode_prompts(checked, spec, encoders)
    source = open_source(checked.plan, config, spec=spec, parallel=parallel)
    encoders_kept: TextEncoders | None = source.take_text_encoders(encoders)
    del encoders
    free_memory()
    vae = spec.load_vae().to(parallel.device)
    vae_stats = spec.vae_stats(vae)
    vae_kept: nn.Module | None = source.take_vae(vae)
    free_memory()

    # Phase 3: the transformer.
    transformer = load_trainable_transformer(checked, spec, parallel)
    geometry = spec.geometry(vae, transformer)
    del vae, encoders_kept
    check_geometry(config, geometry)
    method = load_method(config.training.method)(
        spec=spec,
        process=process,
        vae_stats=vae_stats,
        noise_levels=NoiseLevels(config.diffusion, is_flow=process.is_flow, scheduler_config=dict(scheduler.config)),
        tokens_per_latent=1 / (geometry.patch_t * geometry.patch**2),
        first_frame_p=first_frame_probability(config, spec),
        seed=config.training.seed,
        batches=source,
        accumulation=config.training.gradient_accumulation_steps,
    )
    lr = learning_rate(config, parallel)
    transformer, optimizer = parallel.prepare(
        transformer,
        lambda parameters: create_optimizer(
            parameters,
            config=config.optimizer,
            lr=lr,
            device_type=parallel.device.type,
            stochastic_rounding=config.training.master_weights == "stochastic_rounding",
        ),
    )
    total_steps = config.training.train_steps or source.steps_for_epochs(config.training.train_epochs)
    trainer = Trainer(
        config=config,
        spec=spec,
        method=method,
        parallel=parallel,
        transformer=transformer,
        optimizer=optimizer,
        lr_at=lr_schedule(config.optimizer, lr=lr, total_steps=total_steps),
        total_steps=total_steps,
        run_dir=run_dir,
        critical=critical_state(config, fingerprint=plan.fingerprint, world_size=parallel.world_size),
        ema=make_ema(config, parallel.unwrap(transformer)),
    )
    trainer.callbacks = make_callbacks(
        checked, trainer, source=source, scheduler=scheduler, prompts=prompts, negative=negative, vae=vae_kept
    )
    if checked.resume_from is not None:
        load_checkpoint(trainer, checked.resume_from)
    run_dir.start(config, resumed_step=trainer.step)
    if parallel.is_main:
        plan.write(run_dir.root / "manifest.jsonl")
    return trainer
