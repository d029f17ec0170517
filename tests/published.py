"""Commands as other programs publish them."""

from __future__ import annotations

_DANCEGRPO = """
--seed 42 --model_type hunyuan_hf --pretrained_model_name_or_path data/HunyuanVideo --vae_model_path data/HunyuanVideo
--cache_dir data/.cache --data_json_path data/rl_embeddings/videos2caption.json
--validation_prompt_dir data/Mochi-Black-Myth/validation --gradient_checkpointing --train_batch_size 1 --sp_size 1
--train_sp_batch_size 1 --dataloader_num_workers 4 --gradient_accumulation_steps 4 --max_train_steps 202
--learning_rate 1e-5 --mixed_precision bf16 --checkpointing_steps 50 --validation_steps 100000000
--validation_sampling_steps 8 --checkpoints_total_limit 3 --allow_tf32 --ema_start_step 0 --cfg 0.0 --ema_decay 0.999
--log_validation --output_dir data/outputs/grpo --tracker_project_name grpo --h 480 --w 480 --t 53 --sampling_steps 16
--eta 0.25 --lr_warmup_steps 0 --fps 8 --sampler_seed 1237 --max_grad_norm 1.0 --weight_decay 0.0001
--num_generations 24 --shift 5 --use_group --use_videoalign --timestep_fraction 0.6 --use_same_noise --bestofn 8
--vq_coef 1.0 --mq_coef 0.0
"""
#: Every flag of DanceGRPO's scripts/finetune/finetune_hunyuan_grpo.sh.
DANCEGRPO = _DANCEGRPO.split()
_DANCEGRPO_6GPUS = """
--seed 42 --model_type hunyuan_hf --pretrained_model_name_or_path data/HunyuanVideo --vae_model_path data/HunyuanVideo
--cache_dir data/.cache --data_json_path data/rl_embeddings/videos2caption.json --gradient_checkpointing
--selective_checkpointing 0.3 --use_cpu_offload --train_batch_size 1 --sp_size 2 --train_sp_batch_size 1
--dataloader_num_workers 2 --gradient_accumulation_steps 8 --max_train_steps 202 --learning_rate 8e-6
--mixed_precision bf16 --checkpointing_steps 50 --validation_steps 100000000 --checkpoints_total_limit 2 --allow_tf32
--cfg 0.0 --output_dir data/outputs/grpo_hunyuan_6gpu --tracker_project_name grpo_hunyuan_6gpu --h 384 --w 384 --t 49
--sampling_steps 12 --eta 0.25 --fps 8 --sampler_seed 1237 --max_grad_norm 1.0 --weight_decay 0.0001
--num_generations 12 --shift 5 --use_group --use_videoalign --timestep_fraction 0.5 --use_same_noise --bestofn 6
--vq_coef 1.0 --mq_coef 0.0
"""
#: Every flag of the guide for six GPUs to DanceGRPO: its finetune_hunyuan_grpo_6gpus.sh.
DANCEGRPO_6GPUS = _DANCEGRPO_6GPUS.split()
_FLAGS = """
model_type data_json_path num_frames dataloader_num_workers train_batch_size group_frame group_resolution
pretrained_model_name_or_path dit_model_name_or_path vae_model_path cache_dir ema_decay ema_start_step cfg
precondition_outputs validation_prompt_dir uncond_prompt_dir validation_sampling_steps validation_guidance_scale
validation_steps log_validation tracker_project_name seed output_dir checkpoints_total_limit checkpointing_steps
resume_from_checkpoint resume_from_lora_checkpoint logging_dir num_train_epochs max_train_steps
gradient_accumulation_steps learning_rate scale_lr lr_warmup_steps max_grad_norm gradient_checkpointing
selective_checkpointing allow_tf32 mixed_precision use_cpu_offload sp_size train_sp_batch_size fsdp_sharding_startegy
lr_scheduler lr_num_cycles lr_power weight_decay master_weight_type h w t sampling_steps eta fps sampler_seed use_group
num_generations use_same_noise use_videoalign timestep_fraction shift bestofn vq_coef mq_coef
"""
#: Every flag that the trainer reads or accepts, in the order of its parser (fastvideo/train_grpo_hunyuan.py).
DANCEGRPO_FLAGS = _FLAGS.split()
_OTHER_FLAGS = """
num_latent_t loss_coef use_hpsv2 use_pickscore ignore_last init_same_noise clip_range adv_clip_max use_ema cfg_infer
use_lora lora_rank lora_alpha reference_model_path weight_path weighting_scheme logit_mean logit_std mode_scale
"""
#: What its trainers for images and for SkyReels-I2V have besides.
DANCEGRPO_OTHER_FLAGS = _OTHER_FLAGS.split()
