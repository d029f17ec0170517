#!/usr/bin/env bash
# Reward finetuning of HunyuanVideo (grpo_lora.toml), one process per GPU. Flags override the recipe.
#   NUM_GPUS=2 bash examples/hunyuan_video/grpo.sh --prompts my_prompts.txt --output_dir runs/rewarded
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
exec accelerate launch --config_file "$root/accelerate_configs/ddp.yaml" --num_processes "${NUM_GPUS:-1}" \
  "$root/train.py" --config "$root/examples/hunyuan_video/grpo_lora.toml" "$@"
