"""Rules between options: combinations that cannot work are errors, options without effect are warnings. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec

from finetrainers.utils.launch import launched_processes
from finetrainers.utils.text import nearest, plural

from ..errors import Problem
from ..facts import Facts, is_network
from ..geometry import Geometry
from ..methods import is_reader, trait
from ..parallel import groups_problem, heads_problem, ring_problem
from ..prompts import MEDIA_OPTIONS, ValidationPrompt
from ..rewards import RewardEntry
from ..root import TrainConfig, fields, readers, reads, sections
from ..sections import MemorySection, ModelSection
from ..values import check_hub_id, split_part
from .data import check_data
from .findings import Finding, Findings, check_needs
from .frames import media_problems, prompt_problems
from .windows import window_problems

_FLOW_OPTIONS = (
    "flow_resolution_shifting", "flow_base_seq_len", "flow_max_seq_len", "flow_base_shift", "flow_max_shift",
    "flow_shift",
)  # fmt: skip


def check_config(
    config: TrainConfig,
    *,
    facts: Facts,
    prompts: list[ValidationPrompt],
    scored: Sequence[ValidationPrompt] = (),
    world_size: int | None = None,
    unread: Mapping[str, str] | None = None,
) -> Findings:
    """Check all rules between options for a given model.

    Args:
        config: the whole run.
        facts: of the model.
        prompts: to be sampled during training.
        scored: further prompts, to be sampled and scored.
        world_size: how many processes train together; default: as launched.
        unread: options that the method does not read, each with its replacement or ''; default: none.
    """
    findings = Findings()
    processes = launched_processes() if world_size is None else world_size
    findings.add(
        _check_sizes(config, facts.geometry, prompts),
        _check_model(config, facts),
        _check_training(config),
        check_block_swap(config),
        _check_parallel(config),
        _check_sequence_parallel(config, facts, processes=processes),
        _check_validation(config, facts, prompts),
        _check_negative_prompt(config, facts),
        _check_scored(config, facts, prompts, scored),
        _check_run(config),
        _check_method(config),
        _check_needs(config, unread or {}),
        _check_media(config, facts),
    )
    if not trait(config.training.method, "samples"):  # methods that sample clips have their own rules
        findings.add(_check_eval_reward(config), _check_diffusion(config, facts), check_data(config, facts))
    return findings


def _check_media(config: TrainConfig, facts: Facts) -> Iterator[Finding]:
    """Refuse options that media of the checkpoint, or text encoders that see the image, leave no choice in."""
    if facts.media and not trait(config.training.method, "takes_media"):
        takes = " and ".join(facts.media)
        yield (
            "method",
            f"this checkpoint takes {takes} with each clip, which is supported only with --method sft",
            "unsupported",
        )
    if not facts.text_sees_image:
        return
    reason = "the text encoder of this checkpoint also encodes the image"
    if config.sft.prior_preservation_weight > 0:
        yield (
            "prior_preservation_weight",
            f"{reason}, and prior prompts are not encoded with an image; set it to 0",
            "unsupported",
        )
    if config.grpo.rollout_cfg != 1.0:
        yield (
            "rollout_cfg",
            f"{reason}, and the empty prompt has none; use --rollout_guidance, or remove it",
            "unsupported",
        )


def check_sampling(config: TrainConfig, *, facts: Facts, prompts: list[ValidationPrompt]) -> Findings:
    """Check the rules between the options that samples depend on; see `check_config`."""
    findings = Findings()
    findings.add(
        _check_prompt_sizes("validation_prompts", facts.geometry, prompts),
        _check_model(config, facts),
        _check_validation(config, facts, prompts),
    )
    return findings


def _check_method(config: TrainConfig) -> Iterator[Finding]:
    """Refuse options of other methods."""
    method = config.training.method
    for table, section in sections().items():
        if not section.methods or is_reader(method, section.methods):
            continue
        flags = [f"--{name}" for name, option in fields().items() if option.section == table and config.changed(name)]
        if flags:
            way_out = f"add --method {readers(flags[0][2:])[0]} or remove them"
            yield "method", f"{method} does not use {', '.join(flags)}; {way_out}", "unsupported"


def _check_needs(config: TrainConfig, unread: Mapping[str, str]) -> Iterator[Finding]:
    """Warn of options that the method does not read, or that lack the option they need."""
    method = config.training.method
    for name, option in fields().items():
        needed = (option.needs or name).partition("=")[0]
        if not config.changed(name):
            continue
        if name in unread:
            hint = f"; {unread[name]}" if unread[name] else ""
            yield f"--{name} has no effect with --method {method}{hint}"
        elif option.scope == "dataset" or needed in unread:
            continue  # `check_data` checks those of datasets; an option whose need is not read needs nothing
        elif not reads(method, name):
            if is_reader(method, sections()[option.section].methods):  # else it is refused
                yield f"--{name} has no effect with --method {method}"
        elif config.data.dataset is None or fields()[needed].scope == "run":  # else each dataset may have its own
            yield from check_needs(name, config.get)


def _check_sizes(config: TrainConfig, geometry: Geometry, prompts: list[ValidationPrompt]) -> Iterator[Finding]:
    windows = config.data.sliding_window_size is not None
    for bucket in config.data.video_resolution_buckets:
        # Windows are cut from clips of any length.
        for problem in geometry.problems(geometry.temporal + 1 if windows else bucket[0], *bucket[1:]):
            yield "video_resolution_buckets", f"{'x'.join(map(str, bucket))}: {problem}"
    for option, problem in window_problems(config.data, geometry):
        yield option, problem, "invalid" if option == "sliding_window_size" else "conflict"
    for image in config.data.image_resolution_buckets:
        for problem in geometry.problems(1, *image):
            yield "image_resolution_buckets", f"{'x'.join(map(str, image))}: {problem}"
    yield from _check_prompt_sizes("validation_prompts", geometry, prompts)


def _check_prompt_sizes(option: str, geometry: Geometry, prompts: Sequence[ValidationPrompt]) -> Iterator[Finding]:
    for number, prompt in enumerate(prompts, start=1):
        for problem in geometry.problems(*prompt.size) if prompt.size else ():
            yield option, f"prompt {number}, {'x'.join(map(str, prompt.size or ()))}: {problem}"


def _check_model(config: TrainConfig, facts: Facts) -> Iterator[Finding]:
    model = config.model
    for option in ("expert", "other_expert") if facts.has_one_network else ():
        if config.get(option) is not None:
            yield option, "this model has one network for all noise levels; remove it", "unsupported"
    if facts.boundary is not None and model.expert is None:
        yield (
            "expert",
            f"required: this model has two networks, `high` for noise levels from {facts.boundary:g} and `low` for "
            "those below; train each in a separate run",
            "required",
        )
    yield from _check_parts(model, facts)
    if model.text_encoder_3_dtype is not None:
        yield (
            "text_encoder_3_dtype",
            "is not supported: no model family has a third text encoder; remove it",
            "unsupported",
        )
    if "text_encoder_2" not in facts.parts:
        for option in ("text_encoder_2_id", "tokenizer_2_id", "text_encoder_2_dtype"):
            if config.changed(option):
                yield option, f"{config.model.model_name} has one text encoder; remove it", "unsupported"
    yield from _check_activation_memory(config.memory)
    if config.memory.layerwise_upcasting_modules and config.training.training_type != "lora":
        yield (
            "layerwise_upcasting_modules",
            "stores frozen weights in 8 bits, so it requires --training_type lora",
            "conflict",
        )
    if model.transformer_dtype.startswith("float8"):
        yield (
            "transformer_dtype",
            f"{model.transformer_dtype} is a storage dtype; use bf16, and --quantize_frozen fp8 or "
            "--layerwise_upcasting_modules transformer to store the frozen weights in 8 bits",
            "unsupported",
        )
    yield from _check_lora_autocast(config)
    yield from _check_quantization(config)


def _check_lora_autocast(config: TrainConfig) -> Iterator[Finding]:
    dtype, precision = config.model.transformer_dtype, config.training.mixed_precision
    if config.memory.lora_autocast:
        launched, default = os.environ.get("ACCELERATE_MIXED_PRECISION"), dtype if dtype in ("bf16", "fp16") else "no"
        if precision is None and launched not in (None, default):
            yield (
                f"mixed precision is {launched}, by ACCELERATE_MIXED_PRECISION of `accelerate launch` or of the "
                f"environment; --mixed_precision {default} sets that of --transformer_dtype"
            )
        return
    if config.training.training_type != "lora":
        message = "full finetuning computes in 16 bits by autocast alone; remove --no-lora_autocast"
    elif precision in ("bf16", "fp16"):
        message = f"--mixed_precision {precision} is the dtype of autocast; remove it or --no-lora_autocast"
    elif dtype == "fp16":
        message = "fp16 requires the loss scaling of autocast; use --transformer_dtype bf16"
    elif config.training.use_dora:
        message = "DoRA computes in the dtype of its fp32 weights; remove --use_dora or --no-lora_autocast"
    else:
        if dtype != "bf16":
            yield f"--no-lora_autocast saves nothing with --transformer_dtype {dtype}; use it with bf16"
        return
    yield "lora_autocast", message, "conflict"


def _check_quantization(config: TrainConfig) -> Iterator[Finding]:
    if config.model.quantize_text_encoders != "none":
        for name in ("text_encoder_dtype", "text_encoder_2_dtype"):
            if str(config.get(name)).startswith("float8"):
                yield (
                    name,
                    "cannot be combined with --quantize_text_encoders, which quantizes the same weights; remove one "
                    "of them",
                    "conflict",
                )
    if config.memory.quantize_frozen == "none":
        return
    if config.training.training_type != "lora":
        yield "quantize_frozen", "quantized weights are not trainable, so it requires --training_type lora", "conflict"
    if config.memory.layerwise_upcasting_modules:
        yield (
            "layerwise_upcasting_modules",
            "cannot be combined with --quantize_frozen, which quantizes the same weights; remove one of them",
            "conflict",
        )
    if config.training.use_dora:
        yield (
            "use_dora",
            "DoRA requires the norms of the frozen weights, which --quantize_frozen rounds; remove one of them",
            "conflict",
        )


def quantization_problems(config: TrainConfig, *, device_type: str) -> Iterator[Problem]:
    """Yield the reasons why this device cannot quantize as the options ask.

    Args:
        config: the run.
        device_type: where it will train: `cpu`, `cuda`, `xpu`.
    """
    for name in ("quantize_frozen", "quantize_text_encoders"):
        if config.get(name) != "nf4":
            continue
        where = f"--{name} nf4"
        if device_type != "cuda":
            yield Problem(
                where,
                f"requires a CUDA device, and this run is on {device_type}; use int8, which works everywhere",
                "unsupported",
            )
        elif find_spec("bitsandbytes") is None:
            yield Problem(
                where,
                "requires the package bitsandbytes, which is not installed; run `pip install bitsandbytes`, or use "
                "int8",
                "not_installed",
                is_local=True,
            )


def _check_activation_memory(memory: MemorySection) -> Iterator[Finding]:
    if memory.activation_memory == "auto" and memory.selective_checkpointing is not None:
        yield (
            "selective_checkpointing",
            "cannot be combined with --activation_memory auto, which chooses the share of the blocks; remove one of "
            "them",
            "conflict",
        )
    share = memory.selective_checkpointing
    if memory.activation_memory not in ("none", "auto") and share is not None and share < 0.5:
        yield (
            f"--selective_checkpointing {share:g} leaves {1 - share:.0%} of the blocks with all their activations: a "
            "smaller share takes more memory, and 1 the least"
        )
    if memory.activation_memory != "none":
        return
    for other in ("gradient_checkpointing", "selective_checkpointing"):
        if getattr(memory, other):
            yield (
                "activation_memory",
                f"none stores all activations, and --{other} recomputes them; remove one of them",
                "conflict",
            )


def _check_parts(model: ModelSection, facts: Facts) -> Iterator[Finding]:
    """Refuse a `--part` that the model does not have, that has separate options, or that is named twice."""
    names = [split_part(text)[0] for text in model.part]
    for name, (_, _, dtype) in zip(names, map(split_part, model.part), strict=True):
        prefix = "transformer" if name == facts.trained else name
        if name not in facts.parts:
            yield "part", f"{model.model_name} has no component {name!r}{nearest(name, facts.parts)}", "unknown"
        elif f"{prefix}_id" in type(model).model_fields:
            yield "part", f"{name} has separate options; use --{prefix}_id and --{prefix}_dtype", "unsupported"
        elif dtype is not None and not is_network(name):
            yield "part", f"{name} has no weights, so no dtype; remove {dtype}"
        elif names.count(name) > 1:
            yield "part", f"{name} is set more than once; set its path and its dtype together", "duplicate"


def _check_diffusion(config: TrainConfig, facts: Facts) -> Iterator[Finding]:
    diffusion = config.diffusion
    if not facts.is_flow:
        for option in _FLOW_OPTIONS:
            if config.changed(option):
                yield (
                    option,
                    f"{config.model.model_name} is not a flow-matching model, so it has no shift; remove it",
                    "unsupported",
                )
        if diffusion.flow_weighting_scheme in ("sigma_sqrt", "cosmap", "shifted_logit_normal"):
            yield (
                "flow_weighting_scheme",
                f"{diffusion.flow_weighting_scheme} is for flow-matching models; {config.model.model_name} predicts "
                "v, use none, logit_normal or mode",
                "unsupported",
            )
        return
    if diffusion.flow_weighting_scheme == "shifted_logit_normal" and facts.boundary is not None:
        yield (
            "flow_weighting_scheme",
            f"{diffusion.flow_weighting_scheme} draws all noise levels, and an expert has some; use logit_normal",
            "unsupported",
        )
    if diffusion.flow_resolution_shifting and diffusion.flow_shift != 1.0:
        yield (
            "flow_shift",
            f"{diffusion.flow_shift} and --flow_resolution_shifting both shift noise levels; remove one of them",
            "conflict",
        )
    base, top = diffusion.flow_base_seq_len, diffusion.flow_max_seq_len
    if base is not None and top is not None and base >= top:
        yield "flow_max_seq_len", f"must be above --flow_base_seq_len {base}, got {top}", "conflict"


def _check_training(config: TrainConfig) -> Iterator[Finding]:
    training = config.training
    if training.lora_dropout and training.use_dora:
        yield "--lora_dropout slows down --use_dora: PEFT then computes the base layer twice"
    if config.changed("train_epochs") and training.train_steps is not None:
        yield f"--train_epochs {training.train_epochs} is overridden by --train_steps"
    if training.reset and training.resume_from_checkpoint is None:
        yield (
            "reset",
            f"{' '.join(training.reset)}: a new run has nothing to reset; add --resume_from_checkpoint",
            "required",
        )
    elif training.reset and training.resume_from_checkpoint == "auto":
        yield (
            "reset",
            "--resume_from_checkpoint auto is for repeated commands, which would repeat the reset; resume once from "
            "`latest`, a step or a directory",
            "conflict",
        )
    profiled = config.run.profile_steps
    if profiled is not None and training.train_steps is not None and profiled[1] > training.train_steps:
        yield "profile_steps", f"must end by --train_steps {training.train_steps}, got {profiled[1]}", "conflict"
    if training.async_checkpointing and training.checkpointing_steps == 0:
        yield "--async_checkpointing has no effect with --checkpointing_steps 0: the run waits for its last checkpoint"
    if training.checkpointing_limit == 1:
        yield "--checkpointing_limit 1 keeps no other checkpoint to resume from if the newest is damaged; use 2"
    if training.on_nonfinite == "rollback":
        every, steps = training.checkpointing_steps, training.train_steps
        if every == 0 or (steps is not None and every >= steps):
            yield (
                "on_nonfinite",
                "rollback requires a checkpoint to roll back to; lower --checkpointing_steps",
                "conflict",
            )


def check_block_swap(config: TrainConfig) -> Iterator[Finding]:
    """Check that the frozen weights of blocks can be swapped."""
    number = config.memory.blocks_to_swap
    if number == 0:
        return
    if config.training.training_type != "lora":
        yield "blocks_to_swap", "keeps frozen weights in host memory, so it requires --training_type lora", "conflict"
    if number in (1, 2):
        yield (
            "blocks_to_swap",
            (f"two swapped blocks are on the GPU at a time, so {number} saves nothing; use 3 or more"),
        )
    if config.parallel.deepspeed:
        yield (
            "blocks_to_swap",
            ("is not supported with DeepSpeed, which moves and broadcasts all weights; use DDP or --fsdp full"),
            "conflict",
        )
    if config.parallel.fsdp_cpu_offload:
        yield (
            "blocks_to_swap",
            "cannot be combined with --fsdp_cpu_offload, which keeps all weights in host memory; remove one of them",
            "conflict",
        )


def _check_parallel(config: TrainConfig) -> Iterator[Finding]:
    """Check the rules that hold under every launcher. The launcher's settings are checked when the processes join."""
    parallel = config.parallel
    if parallel.fsdp and parallel.deepspeed:
        yield "deepspeed", "cannot be combined with --fsdp: both shard the network; remove one of them", "conflict"
    if parallel.deepspeed and find_spec("deepspeed") is None:
        message = "requires the package deepspeed, which is not installed; run `pip install deepspeed`"
        yield Problem("--deepspeed", message, "not_installed", is_local=True)
    if parallel.fsdp != "hybrid" and parallel.fsdp_group_size is not None:
        yield "fsdp_group_size", "requires --fsdp hybrid; add it, or remove this option", "conflict"
    if (
        parallel.sync_each_batch
        and config.training.gradient_accumulation_steps == 1
        and not trait(config.training.method, "samples")
    ):
        yield "--sync_each_batch has no effect without --gradient_accumulation_steps"


def _check_sequence_parallel(config: TrainConfig, facts: Facts, *, processes: int) -> Iterator[Finding]:
    """Check the rules of clips that several processes share. One process is not an error: it may only plan."""
    size, mode = config.parallel.sp_size, config.parallel.sp_mode
    if size == 1:
        if mode != "ulysses":
            yield "--sp_mode has no effect while --sp_size is 1"
        return
    if processes > 1 and processes % size:
        yield "sp_size", groups_problem(processes, size), "conflict"
    if mode == "ulysses" and facts.heads is not None and facts.heads % size:
        yield "sp_size", heads_problem(facts.heads, size), "unsupported"
    if mode == "ring" and (problem := ring_problem(config.model.attn_backend)) is not None:
        yield "sp_mode", problem, "conflict"


def check_shared_sizes(
    config: TrainConfig, facts: Facts, sizes: Iterable[tuple[int, int, int]], findings: Findings, *, processes: int
) -> None:
    """Check that clips that processes share have a latent token for each process.

    Args:
        config: the run.
        facts: of the model.
        sizes: of all clips and samples.
        findings: gets the errors.
        processes: of the run.
    """
    sp_size, mode = config.parallel.sp_size, config.parallel.sp_mode
    small = [(tokens, size) for size in sizes if (tokens := facts.geometry.num_tokens(*size)) < sp_size]
    if not small:
        return
    tokens, smallest = min(small)
    fitting = [
        str(n)
        for n in range(1, tokens + 1)
        if (processes == 1 or processes % n == 0) and (mode == "ring" or facts.heads is None or facts.heads % n == 0)
    ]
    findings.error(
        "sp_size",
        f"{sp_size} processes cannot share a clip of {'x'.join(map(str, smallest))}, which has "
        f"{plural(tokens, 'latent token')}; use {' or '.join(fitting)}, or larger clips",
        "too_large",
    )


def unguided_reason(config: TrainConfig, facts: Facts) -> str | None:
    """Return why samples have no second prompt, so that a negative one has no effect, or None if they have."""
    scale = config.validation.validation_guidance_scale
    if facts.guidance is not None:
        return "this model takes guidance as an input"
    return f"the guidance scale is {scale:g}" if scale is not None and scale <= 1 else None


def _check_negative_prompt(config: TrainConfig, facts: Facts) -> Iterator[Finding]:
    is_set = config.is_given("validation_negative_prompt") and config.validation.validation_negative_prompt
    if is_set and (reason := unguided_reason(config, facts)) is not None:
        message = f"has no effect: {reason}, so no second prompt is sampled; remove it"
        yield "validation_negative_prompt", message, "conflict" if facts.guidance is None else "unsupported"


def _check_validation(config: TrainConfig, facts: Facts, prompts: list[ValidationPrompt]) -> Iterator[Finding]:
    validation = config.validation
    if (validation.is_scheduled or validation.validation_at_start) and not (prompts or validation.validation_prompts):
        yield (
            "validation_prompts",
            "validation is scheduled, but there are no prompts; set --validation_prompts",
            "required",
        )
    if prompts and validation.validation_inference_steps < facts.least_steps:
        yield (
            "validation_inference_steps",
            f"the scheduler of {config.model.model_name} needs at least {facts.least_steps}, got "
            f"{validation.validation_inference_steps}",
        )
    if validation.validation_guidance_scale_2 is not None and facts.has_one_network:
        message = "this checkpoint has one network for all noise levels; use --validation_guidance_scale"
        yield "validation_guidance_scale_2", message, "unsupported"
    for medium, problem, kind in media_problems(prompts, facts, model=config.model.model_name):
        remedy = "use one for each validation prompt" if kind == "required" else "remove the images and videos"
        yield MEDIA_OPTIONS[medium], f"{problem}; {remedy}", kind
    for medium, problem, kind in prompt_problems(prompts, facts, model=config.model.model_name):
        yield MEDIA_OPTIONS[medium], problem, kind


def _check_scored(
    config: TrainConfig,
    facts: Facts,
    prompts: list[ValidationPrompt],
    scored: Sequence[ValidationPrompt],
) -> Iterator[Finding]:
    """Check the prompts of `eval_prompts`, and how they are sampled; where there are none, others are scored."""
    yield from _check_prompt_sizes("eval_prompts", facts.geometry, scored)
    steps = config.validation.validation_inference_steps
    if scored and not prompts and steps < facts.least_steps:
        yield (
            "validation_inference_steps",
            f"the scheduler of {config.model.model_name} needs at least {facts.least_steps}, got {steps}",
        )
    for medium, problem, kind in media_problems(scored, facts, model=config.model.model_name):
        remedy = f"use a .jsonl file with `{medium}` for each prompt"
        yield "eval_prompts", f"{problem}; {remedy if kind == 'required' else 'remove images and videos'}", kind
    for medium, problem, kind in prompt_problems(scored, facts, model=config.model.model_name):
        yield "eval_prompts", f"{medium}: {problem}", kind


def check_rewards(option: str, entries: Sequence[RewardEntry]) -> Iterator[Finding]:
    """Check that no reward is given twice, and that rewards for training have an effect."""
    seen = set()
    for entry in entries:
        key = (entry.name, tuple(sorted(entry.options.items())))
        if key in seen:
            yield option, f"{entry.name} is set twice; set it once, with one weight", "duplicate"
        seen.add(key)
    if option != "reward" or not entries:
        return
    counted = [entry for entry in entries if entry.weight]
    if not counted:
        yield option, "all weights are 0, so nothing is learned; set a weight above 0"
    elif all(entry.every > 1 for entry in counted):
        yield option, "no reward with a weight scores every rollout; remove `every` from one of them"


def _check_eval_reward(config: TrainConfig) -> Iterator[Finding]:
    """Check the rewards of held-out prompts, of methods that do not need rewards."""
    validation = config.validation
    yield from check_rewards("eval_reward", validation.eval_reward)
    if not validation.eval_reward:
        if validation.eval_prompts is not None:
            yield "--eval_prompts has no effect without --eval_reward"
        return
    if validation.eval_prompts is None and validation.validation_prompts is None:
        yield (
            "eval_reward",
            "there are no prompts to sample; set --eval_prompts FILE or --validation_prompts",
            "required",
        )
    if validation.eval_steps is None:
        yield "--eval_reward scores only before and after training; set --eval_steps"


def _check_run(config: TrainConfig) -> Iterator[Finding]:
    run = config.run
    if run.push_to_hub and run.hub_model_id is None:
        try:
            check_hub_id(run.output_dir.resolve().name)
        except ValueError as error:
            yield "hub_model_id", f"the name of --output_dir is not a valid repository name: {error}"
