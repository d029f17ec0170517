#!/usr/bin/env bash
# Reward finetuning of CogVideoX-2b (grpo_lora_2b.toml), one process per GPU. Flags override the recipe.
#   NUM_GPUS=2 bash examples/cogvideox/grpo.sh --prompts my_prompts.txt --output_dir runs/rewarded
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
exec accelerate launch --config_file "$root/accelerate_configs/ddp.yaml" --num_processes "${NUM_GPUS:-1}" \
  "$root/train.py" --config "$root/examples/cogvideox/grpo_lora_2b.toml" "$@"
