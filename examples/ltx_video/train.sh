#!/usr/bin/env bash
# LoRA of LTX-Video on your clips (lora.toml), one process per GPU. Flags override the recipe.
#   NUM_GPUS=2 bash examples/ltx_video/train.sh --data_root my_clips --output_dir runs/first
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
exec accelerate launch --config_file "$root/accelerate_configs/ddp.yaml" --num_processes "${NUM_GPUS:-1}" \
  "$root/train.py" --config "$root/examples/ltx_video/lora.toml" "$@"
