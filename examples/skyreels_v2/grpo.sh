#!/usr/bin/env bash
# Reward finetuning of SkyReels-V2 (grpo_t2v_14b.toml), one process per GPU. Flags override the recipe.
#   NUM_GPUS=2 bash examples/skyreels_v2/grpo.sh --prompts my_prompts.txt --output_dir runs/rewarded
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
exec accelerate launch --config_file "$root/accelerate_configs/ddp.yaml" --num_processes "${NUM_GPUS:-1}" \
  "$root/train.py" --config "$root/examples/skyreels_v2/grpo_t2v_14b.toml" "$@"
