#!/usr/bin/env bash
# Reward finetuning of HunyuanVideo-1.5 (grpo_lora.toml), one process per GPU. Flags override the recipe.
#   NUM_GPUS=2 bash examples/hunyuan_video_15/grpo.sh --prompts my_prompts.txt --output_dir runs/rewarded
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
exec accelerate launch --config_file "$root/accelerate_configs/ddp.yaml" --num_processes "${NUM_GPUS:-1}" \
  "$root/train.py" --config "$root/examples/hunyuan_video_15/grpo_lora.toml" "$@"
