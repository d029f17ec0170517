#!/usr/bin/env bash
# LoRA of LTX-2.3 on your clips (lora_24gb.toml), one process per GPU. Flags override the recipe.
#   NUM_GPUS=2 bash examples/ltx2/train.sh --data_root my_clips --output_dir runs/first
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
exec accelerate launch --config_file "$root/accelerate_configs/ddp.yaml" --num_processes "${NUM_GPUS:-1}" \
  "$root/train.py" --config "$root/examples/ltx2/lora_24gb.toml" "$@"
