"""Other trainers' names of our options: sd-scripts and musubi-tuner, diffusers' scripts, ai-toolkit, Lightricks'
trainers, SimpleTuner, diffusion-pipe, Open-Sora, later releases of these scripts.

A name that means the same is accepted, with a note. One that means something else, or that has no counterpart, is
refused with a replacement. DanceGRPO's names are in `aliases.py`; with `--method grpo` they come first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping
from difflib import get_close_matches

from finetrainers.utils.text import nearest, quoted, shortened

from .attention import backend_name
from .errors import Problem
from .given import RawOptions
from .root import fields, former_names, split_name


def invert_groups(groups: Mapping[str, str]) -> dict[str, str]:
    """Return a table by name from one whose values are lists of names, separated by spaces."""
    return {name: value for value, names in groups.items() for name in names.split()}


#: Our options, and other names for each.
_SAME = {
    "model_name": "model_family arch",
    "pretrained_model_name_or_path": "pretrained_model_path pretrained_model model_id model_path model_source "
    "name_or_path base_model",
    "transformer_id": "transformer_path dit unet dit_model_name_or_path pretrained_transformer_model_name_or_path",
    "vae_id": "vae_path vae vae_model_path pretrained_vae_model_name_or_path",
    "text_encoder_id": "text_encoder_path text_encoder text_encoder1 llm_path t5 t5xxl t5_path",
    "text_encoder_2_id": "text_encoder_2_path text_encoder2 clip_path clip clip_l",
    "enable_slicing": "vae_enable_slicing vae_slicing",
    "enable_tiling": "vae_enable_tiling vae_tiling",
    "data_root": "instance_data_root data_dir dataset_dir dataset_path video_directory video_dir folder_path",
    "hf_dataset": "dataset_name",
    "hf_subset": "dataset_config_name",
    "id_token": "trigger_word trigger",
    "unmasked_weight": "mask_min_value",
    "frame_conditioning": "mask_ratios",
    "prior_preservation_weight": "prior_loss_weight diff_output_preservation_multiplier",
    "caption_dropout_p": "caption_dropout_rate caption_dropout caption_dropout_probability",
    "precompute_conditions": "enable_precomputation",
    "precompute_dir": "precomputation_dir",
    "batch_size": "train_batch_size per_device_train_batch_size micro_batch_size",
    "dataloader_num_workers": "num_workers num_dataloader_workers max_data_loader_n_workers",
    "flow_shift": "discrete_flow_shift flow_schedule_shift",
    "training_type": "training_mode finetuning_type",
    "mixed_precision": "mixed_precision_mode",
    "rank": "lora_rank network_dim network_rank lora_dim lora_r linear",
    "lora_alpha": "network_alpha alpha linear_alpha",
    "lora_dropout": "network_dropout",
    "target_modules": "lora_target_modules",
    "train_steps": "max_train_steps max_steps num_train_steps total_steps num_steps steps max_iterations max_iters",
    "train_epochs": "num_train_epochs max_train_epochs num_epochs epochs",
    "gradient_accumulation_steps": "gradient_accumulation grad_accum grad_accumulation_steps accumulation_steps",
    "compile": "compile_modules torch_compile compile_dit",
    "attn_backend": "attn_provider_training attention_backend attn_implementation",
    "gradient_checkpointing": "enable_gradient_checkpointing use_gradient_checkpointing activation_checkpointing "
    "enable_activation_checkpointing",
    "blocks_to_swap": "block_swap block_to_swap num_blocks_to_swap",
    "checkpointing_steps": "save_every save_every_n_steps save_steps save_interval checkpoint_steps "
    "checkpoint_step_interval",
    "checkpointing_limit": "checkpoints_total_limit save_total_limit keep_last_n max_step_saves_to_keep",
    "resume_from_checkpoint": "resume resume_from load",
    "init_from": "network_weights init_lora init_from_existing lora_weights ckpt_path",
    "use_ema": "ema",
    "optimizer": "optimizer_type optim",
    "use_8bit_bnb": "use_8bit_adam use_8bit",
    "lr": "learning_rate",
    "lr_scheduler": "scheduler_type lr_scheduler_type lr_schedule",
    "lr_warmup_steps": "warmup_steps lr_warmup num_warmup_steps",
    "lr_cooldown_steps": "cooldown_steps",
    "lr_num_cycles": "lr_scheduler_num_cycles",
    "lr_power": "lr_scheduler_power",
    "beta1": "adam_beta1 optimizer_beta1",
    "beta2": "adam_beta2 optimizer_beta2",
    "beta3": "prodigy_beta3",
    "weight_decay": "adam_weight_decay adamw_weight_decay optimizer_weight_decay",
    "epsilon": "adam_epsilon eps",
    "max_grad_norm": "gradient_clipping grad_clip clip_grad_norm gradient_clip_val",
    "validation_prompts": "validation_prompt",
    "validation_separator": "validation_prompt_separator",
    "validation_steps": "sample_every sample_every_n_steps validation_interval validation_step_interval",
    "validation_epochs": "sample_every_n_epochs validation_epoch_interval",
    "validation_at_start": "sample_at_first validation_on_startup",
    "validation_inference_steps": "num_inference_steps inference_steps validation_num_inference_steps "
    "validation_sampling_steps",
    "validation_guidance_scale": "validation_guidance",
    "num_validation_videos": "videos_per_prompt",
    "report_to": "log_with",
    "tracker_name": "tracker_project_name log_tracker_name wandb_project wandb_project_name",
    "hub_model_id": "hf_repo_id huggingface_repo_id hub_repo_id",
    "hub_token": "hf_token huggingface_token",
}
#: Names that mean the same as one of ours, including those of our own earlier versions, to our name.
SAME = invert_groups(_SAME) | former_names()
#: Names whose meaning depends on other options, with advice on each: Open-Sora's, diffusion-pipe's, those of later
#: releases of these scripts, and ours of earlier versions, when DiffusionNFT was `--method grpo --rl_algorithm nft`.
DEPENDENT = {
    "start_from_scratch": "--reset data begins the data again in a run that --resume_from_checkpoint continues",
    "framepack": "cuts clips into sliding windows of --sliding_window_size (--framepack_window_size) frames, each "
    "trained as a separate clip, without FramePack's compression of earlier frames; --sliding_window_stride spaces "
    "them, and --sliding_window_batching clip trains all windows of a clip in one step",
    "rl_algorithm": "algorithms are methods: --method nft",
    "attn_provider_inference": "samples use the attention backend of training, --attn_backend",
    "rollout_gradients": "was removed, as shared starts (--init_same_noise) save more",
}

#: Advice, and the names without an option here that it is for.
_INSTEAD = {
    "sizes are set by --video_resolution_buckets FRAMESxHEIGHTxWIDTH, for example 49x512x768 (one or several)":
        "width height h w t num_frames max_num_frames target_frames frames num_frame video_dims video_size size "
        "image_size video_resolution target_resolution max_resolution",
    "--resolutions 512 sets an area by the side of a square; exact sizes are set by --video_resolution_buckets "
    "FRAMESxHEIGHTxWIDTH, for example 49x512x768 (one or several)": "resolution",
    "clips are resampled to --target_fps; samples have --validation_frame_rate": "fps frame_rate source_fps",
    "captions are .txt files with the names of the clips, or a metadata file (--dataset_file)":
        "caption_ext caption_extension caption_strategy caption_file",
    "every clip has its own caption, and --id_token puts a trigger word before each; captions are .txt files with "
    "the names of the clips, or a metadata file (--dataset_file)": "instance_prompt prompt caption",
    "--data_root is the directory of the clips; repeats in directory names are not read, and captions are .txt files "
    "with the names of the clips, or a metadata file (--dataset_file)": "train_data_dir instance_data_dir image_dir",
    "several datasets, with num_repeats or weight each, are set by --dataset FILE.toml; one is set by --data_root or "
    "--dataset_file":
        "dataset_config data_config data_backend_config datasets num_repeats dataset_repeats repeats",
    "--data_root is the directory of the clips themselves; --precompute_conditions encodes clips and captions once, "
    "before training, and keeps them on disk": "preprocessed_data_root",
    "--precompute_conditions encodes clips and captions once, before training, and keeps them on disk":
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk "
        "cache_text_embeddings cache_text_embeds precompute_latents precompute_text_embeddings load_tensors "
        "dump_tensors",
    "a table or list of clips is set by --dataset_file FILE, and a directory of clips by --data_root DIRECTORY":
        "data_path data_file csv_path csv_file",
    "sizes are set by --video_resolution_buckets FRAMESxHEIGHTxWIDTH, for example 49x512x768, instead of a list for "
    "each side":
        "height_buckets width_buckets",
    "optimizers of torchao are --optimizer adamw-torchao-8bit, adamw-torchao-4bit or adamw-torchao-fp8":
        "use_torchao use_4bit",
    "the cache is in --precompute_dir, with --precompute_conditions": "cache_directory latent_cache_dir",
    "prior preservation uses the base model as the teacher, without clips of the class; use "
    "--prior_preservation_weight 1 and --class_prompt":
        "class_data_dir with_prior_preservation num_class_images reg_data_dir",
    "clips and captions are not augmented; --video_reshape_mode random crops at random":
        "random_flip flip_aug color_aug shuffle_caption shuffle_tokens keep_tokens skip_frames_start skip_frames_end",
    "clips are always sorted into buckets; --resolutions with --num_ar_buckets chooses sizes for you":
        "enable_bucket min_bucket_reso max_bucket_reso bucket_reso_steps bucket_no_upscale",
    "a single file replaces one component of --pretrained_model_name_or_path: set it as --transformer_id, and also "
    "as --vae_id if it holds the VAE": "single_file_path",
    "the family is --model_name; set --training_type lora or full-finetune": "model_type",
    "the family is --model_name, and the checkpoint determines text-to-video or image-to-video":
        "task image_to_video",
    "clips are read from this machine (--data_root, --dataset_file) or from a dataset on the Hub (--hf_dataset)":
        "remote_video",
    "LoRA (--training_type lora, optionally --use_dora, --use_rslora) is the only adapter; set its modules with "
    "--target_modules": "use_lora lora lora_type lycoris_config network_module network_args network_type peft",
    "use --training_type full-finetune": "full_finetune full_finetuning finetune_type",
    "use --training_type full-finetune --master_weights stochastic_rounding": "full_bf16 full_fp16",
    "use --mixed_precision bf16 or fp16": "bf16 fp16",
    "use --transformer_dtype, --vae_dtype and --text_encoder_dtype": "dtype weight_dtype torch_dtype",
    "the transformer is in bf16 unless --transformer_dtype is set; remove it": "cast_dit",
    "PyTorch's own attention is the default; --attn_backend flash, _flash_3_hub or xformers chooses another":
        "xformers sdpa flash_attn flash3 sage_attn split_attn mem_eff_attn attn_mode attention_mechanism "
        "enable_xformers_memory_efficient_attention",
    "--activation_memory offload moves what blocks store to host memory, and recomputes the rest":
        "gradient_checkpointing_cpu_offload",
    "--quantize_frozen int8, fp8 or nf4 stores the frozen weights in 8 or 4 bits":
        "fp8_base fp8_scaled fp8 quantize quantization base_model_precision load_in_8bit load_in_4bit qlora",
    "--quantize_text_encoders int8, fp8 or nf4 stores the text encoders in 8 or 4 bits":
        "fp8_llm quantize_te quantize_text_encoder load_text_encoder_in_8bit",
    "--memory_budget 16GB sets the options that fit a GPU of that size, such as --gradient_checkpointing, "
    "--quantize_frozen and --blocks_to_swap; see docs/how-to/memory.md":
        "vram lowram lowvram low_vram highvram medvram",
    "--compile regional compiles blocks one by one, for each size; the launcher's accelerate_configs/compiled_1.yaml "
    "compiles the whole network":
        "compile_scopes compile_with_inductor dynamo_backend",
    "noise levels are set by --flow_weighting_scheme logit_normal (`sigmoid` elsewhere) or none (`uniform`), and "
    "--flow_shift (`shift`)":
        "timestep_sampling timestep_type timestep_sampling_mode timestep_sample_method weighting_scheme",
    "use --flow_logit_std, with --flow_weighting_scheme logit_normal": "sigmoid_scale logit_std",
    "use --flow_logit_mean; a positive value trains more noise here, and less in diffusers' scripts": "logit_mean",
    "use --flow_mode_scale; diffusers' scripts run it the other way round, from low noise to high": "mode_scale",
    "all noise levels are trained; --flow_weighting_scheme and --flow_logit_mean move them":
        "min_timestep max_timestep timestep_boundaries",
    "the loss is the squared error, weighted by --flow_weighting_scheme; remove it":
        "loss_type huber_c pseudo_huber_c huber_schedule min_snr_gamma snr_gamma noise_offset multires_noise_iterations"
        " ip_noise_gamma",
    "masks are files next to the clips, NAME.mask.png or .mp4, or in the directory or column of --mask_column; the "
    "loss is always the mean over the unmasked part, see docs/how-to/masks.md":
        "masked_loss masked_training alpha_mask mask_path mask_directory conditioning_data_dir "
        "normalize_masked_area_loss",
    "checkpoints are counted in optimizer steps: --checkpointing_steps":
        "save_every_n_epochs save_every_n_minutes checkpoint_epoch_interval",
    "--checkpointing_limit N keeps the newest N checkpoints": "save_last_n_steps save_last_n_epochs",
    "weights are always safetensors, LoRAs in fp32 and networks in --transformer_dtype":
        "save_model_as save_precision save_dtype",
    "every checkpoint holds the complete training state; set its interval with --checkpointing_steps": "save_state",
    "--resume_from_checkpoint continues a run, and --init_from starts from weights alone": "load_checkpoint",
    "files have fixed names in --output_dir; the LoRA is pytorch_lora_weights.safetensors": "output_name",
    "a run is named by its --output_dir": "name training_folder",
    "use --use_ema with --ema_decay and --ema_update_after_step": "ema_start_step ema_beta ema_config",
    "use --kl_coef for the KL penalty of reward finetuning, or beta in the table dpo": "beta",
    "use --beta1, --beta2, --weight_decay and --epsilon": "optimizer_args optimizer_params optimizer_config betas",
    "use --lr_warmup_steps, --lr_num_cycles and --lr_power": "lr_scheduler_args scheduler_params",
    "warm-up is counted in optimizer steps: --lr_warmup_steps": "warmup_ratio",
    "text encoders are not trained; --lr is the only learning rate":
        "unet_lr text_encoder_lr train_text_encoder text_encoder_learning_rate learning_rate_te1",
    "--validation_prompts takes the prompts themselves, joined by `:::`, or a .jsonl or .toml file":
        "sample_prompts validation_prompt_file validation_dataset_file user_prompt_library",
    "denoising steps of a sample are --validation_inference_steps, and the interval is --validation_steps":
        "sample_steps",
    "guidance of samples is --validation_guidance_scale; networks that take guidance are trained at 1":
        "guidance_scale",
    "the negative prompt of samples is --validation_negative_prompt": "negative_prompt neg",
    "--seed also determines the noise of samples": "validation_seed",
    "use --logging_steps, in optimizer steps": "log_every logging_interval steps_per_print log_interval",
    "a run is named by its --output_dir, and its project by --tracker_name": "wandb_run_name",
    "keys are not options; set WANDB_API_KEY in the environment": "wandb_api_key wandb_key",
    "workers always stay for the whole run; remove it": "persistent_data_loader_workers persistent_workers",
    "set it for the launcher: `accelerate launch ... train.py`, or CUDA_VISIBLE_DEVICES in the environment":
        "num_processes num_machines machine_rank main_process_port gpu_ids num_cpu_threads_per_process devices num_gpus"
        " gpus device",
    "several GPUs use DDP unless --fsdp full, --fsdp hybrid with --fsdp_group_size, or --deepspeed is set":
        "parallel_backend dp_degree dp_shards tp_degree cp_degree pp_degree pipeline_stages",
    "use --nccl_timeout, in seconds": "ddp_timeout",
    "use --config FILE.toml for a file of options": "config_file config_path",
    "launchers are given the machines: torchrun, accelerate launch or examples/cluster/hosts.sh with HOSTS=FILE":
        "hostfile host_file",
    "a run is named by its directory: finetrainers watch RUN --presets low4s": "expnums",
    "set FINETRAINERS_LOG_LEVEL=debug in the environment": "debug log_level",
}  # fmt: skip
#: Names without an option here, and advice for each.
INSTEAD = invert_groups(_INSTEAD)
#: Other trainers' names of our values, in lower case, by option.
VALUES = {
    "optimizer": invert_groups({
        "adam-bnb-8bit": "adam8bit",
        "adamw-bnb-8bit": "adamw8bit adamw_8bit adamw8bitkahan",
        "adamw": "adamw_bf16 adamw_torch adamw_torch_fused adamw_optimi",
        "lion-bnb-8bit": "lion8bit",
        "adamw-bnb-paged": "pagedadamw",
        "adamw-bnb-8bit-paged": "pagedadamw8bit paged_adamw_8bit",
        "adamw-torchao-4bit": "adamw4bit",
        "adamw-torchao-fp8": "adamwfp8",
        "prodigy": "prodigyopt",
    }),
    "attn_backend": invert_groups({
        "native": "sdpa torch",
        "flash": "flash_attn flash_attention_2 flash2",
        "_flash_3_hub": "flash3 flash_3 flash_attention_3",
    }),
    "lr_scheduler": invert_groups({"bump": "1cycle one_cycle onecycle"}),
    "training_type": invert_groups({"full-finetune": "full full_finetune"}),
    "mixed_precision": invert_groups({"no": "fp32 none", "bf16": "bfloat16", "fp16": "float16"}),
    **dict.fromkeys(
        ("transformer_dtype", "vae_dtype", "text_encoder_dtype", "text_encoder_2_dtype"),
        invert_groups({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "float8_e4m3fn": "float8"}),
    ),
}  # fmt: skip
#: Similarity (difflib's) above which a name is a typo; at 0.78 `max_steps` is still similar to `max_items`.
_CERTAIN = 0.8


def other_names(option: str) -> list[str]:
    """Return other names under which an option of ours is accepted."""
    return [name for name, option_name in SAME.items() if option_name == option]


def unknown_option(name: str, where: str, *, suggest: bool = True) -> Problem:
    """Return the problem of an unknown name: its replacement, or the nearest option if the name is a typo.

    Args:
        name: without dashes.
        where: place of it; a flag, or `file:line`.
        suggest: whether to search for the nearest option.
    """
    as_flag = where.startswith("--")
    kind = "unknown flag" if as_flag else f"unknown option {shortened(quoted(name))}"
    if name in INSTEAD:
        return Problem(where, f"{kind}; {INSTEAD[name]}", "unknown", about=tuple(re.findall(r"--(\w+)", INSTEAD[name])))
    table, key = split_name(name)
    option = key if table is not None and key in fields() else None
    if option is None and suggest:
        option = suggest_option(name, fields()) or suggest_option(key, fields())
    if option is None:
        return Problem(where, f"{kind}; `finetrainers train --help all` lists all of them", "unknown")
    return Problem(
        where, f"{kind}; did you mean {f'--{option}' if as_flag else repr(option)}?", "unknown", about=(option,)
    )


def unknown_keywords(keywords: Iterable[str], valid: Collection[str]) -> list[Problem]:
    """Return the problem of each keyword of a call in Python that is not valid, with the nearest valid one."""
    unknown = [name for name in keywords if name not in valid]
    return [Problem(name, f"unknown option{nearest(name, valid)}", "unknown") for name in unknown]


def suggest_option(name: str, options: Iterable[str]) -> str | None:
    """Return the option that a name is another trainer's for, or a typo of, or None if that is not certain."""
    option_by_name = {option: option for option in options}
    option_by_name |= {other: option for other, option in SAME.items() if option in option_by_name}
    edited = {option for other, option in option_by_name.items() if len(name) > 1 and _is_one_edit(name, other)}
    if len(edited) == 1:
        return edited.pop()
    close = get_close_matches(name, option_by_name, n=1, cutoff=_CERTAIN)
    return option_by_name[close[0]] if close else None


def _is_one_edit(name: str, other: str) -> bool:
    """Return whether two names differ by one letter, or by the order of two neighbors.

    In short names that is too little similarity for difflib.
    """
    pairs = enumerate(zip(name, other, strict=False))
    start = next((i for i, (letter, other_letter) in pairs if letter != other_letter), min(len(name), len(other)))
    rest, other_rest = name[start:], other[start:]
    if rest[1:] == other_rest[1:] or rest[1:] == other_rest or rest == other_rest[1:]:
        return True
    return rest[:2] == other_rest[1::-1] and rest[2:] == other_rest[2:]


def translate_names(source: RawOptions, *, others: Container[str]) -> None:
    """Replace other trainers' names, and former ones, by ours, with notes on those accepted.

    Args:
        source: the options of one place.
        others: names that belong to another dialect.
    """
    accepted: dict[bool, list[str]] = {False: [], True: []}  # by whether it is a former name of ours
    for name in [name for name in source.values if name in SAME | INSTEAD and name not in others]:
        place = source.where[name]
        if name in INSTEAD:
            problem = unknown_option(name, place)
            source.refuse(name, problem.message, *problem.about, kind=problem.kind)
        elif source.put(option := SAME[name], source.values[name], name):
            label = name if place == name else f"{name} ({place})"
            phrase = f"{place} as --{option}" if place.startswith("--") else f"{label} as {option}"
            accepted[name in former_names()].append(phrase)
    notes = [f"names of earlier versions are accepted: {', '.join(accepted[True])}"] if accepted[True] else []
    if accepted[False]:
        notes.append(f"names of other trainers are accepted: {', '.join(accepted[False])}")
    alpha_is_default = "network_alpha" not in source.where and source.values.get("lora_alpha") is None
    if notes and "network_dim" in source.where and alpha_is_default:
        notes[-1] += "; with network_dim alone, sd-scripts has an alpha of 1; here it is the default of --lora_alpha"
    source.notes += notes


def translate_dependent(options: RawOptions) -> None:
    """Replace the names of `DEPENDENT`, when the options of all places are known."""
    _translate_sampled(options)
    _translate_framepack(options)
    values, where = options.values, options.where
    scratch, method = values.get("start_from_scratch"), values.get("method")
    algorithm, gradients = values.pop("rl_algorithm", None), values.pop("rollout_gradients", None)
    if gradients not in (None, "replay") and values.get("resume_from_checkpoint") is not None:
        options.notes.append(
            f"{where['rollout_gradients']} {gradients} was removed: the run continues with replay, whose updates are "
            "the same up to rounding"
        )
    elif gradients not in (None, "replay"):
        options.refuse(
            "rollout_gradients",
            f"{gradients} was removed, as shared starts (--init_same_noise, the default) save more; remove it. Updates "
            "are the same up to rounding",
            "init_same_noise",
            kind="unsupported",
        )
    if str(scratch).lower() == "true" and values.get("resume_from_checkpoint") is not None:
        options.put("reset", ["data"], "start_from_scratch")
    elif str(scratch).lower() == "true":
        options.refuse(
            "start_from_scratch",
            "resets the data position of a run that --load resumes; set --load, or remove it",
            kind="required",
        )
    elif str(values.pop("start_from_scratch", False)).lower() != "false":
        options.refuse("start_from_scratch", f"must be true or false, got {scratch!r}")
    if algorithm not in (None, "grpo", "nft"):
        options.refuse("rl_algorithm", f"must be grpo or nft, got {algorithm!r}; use --method instead", kind="unknown")
    elif algorithm == "nft" and method == "grpo":
        values["method"] = "nft"
        options.notes.append(f"{where['rl_algorithm']} nft is now --method nft")
    elif algorithm == "nft" and method != "nft":
        options.refuse("rl_algorithm", "nft is a separate method; set --method nft, or remove it", kind="conflict")


def _translate_framepack(options: RawOptions) -> None:
    """Require the size of the windows that `framepack` turns on, or none where it turns them off."""
    value, size = options.values.pop("framepack", None), options.values.get("sliding_window_size")
    is_on = str(value).lower()
    if is_on not in ("none", "true", "false"):
        options.refuse("framepack", f"must be true or false, got {value!r}")
    elif is_on == "true" and size is None:
        message = "requires the frames of a window: set --sliding_window_size (--framepack_window_size), for example 33"
        options.refuse("framepack", message, "sliding_window_size", kind="required")
    elif is_on == "true":
        place = options.where["framepack"]
        label = place if place.lstrip("-") == "framepack" else f"{place}: framepack"
        options.notes.append(f"{label} {DEPENDENT['framepack']}")
    elif is_on == "false" and size is not None:
        message = f"is false, but {options.where['sliding_window_size']} cuts windows; remove one of them"
        options.refuse("framepack", message, kind="conflict")


def _translate_sampled(options: RawOptions) -> None:
    """Accept an attention backend of samples that equals that of training; a separate one is not supported."""
    name, values = "attn_provider_inference", options.values
    if name not in values:
        return
    trained = values.get("attn_backend") or "auto"
    try:
        is_same = backend_name(values[name]) == backend_name(trained)
    except ValueError:
        is_same = False
    if is_same:
        del values[name]
        return
    options.refuse(
        name,
        f"samples use the attention backend of training, --attn_backend, which is {trained}; remove it",
        kind="unsupported",
    )
