#!/usr/bin/env bash
# LoRA of Wan 2.1 on your clips (lora_1.3b_12gb.toml), one process per GPU. Flags override the recipe.
#   NUM_GPUS=2 bash examples/wan/train.sh --data_root my_clips --output_dir runs/first
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
exec accelerate launch --config_file "$root/accelerate_configs/ddp.yaml" --num_processes "${NUM_GPUS:-1}" \
  "$root/train.py" --config "$root/examples/wan/lora_1.3b_12gb.toml" "$@"
