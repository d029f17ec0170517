#!/usr/bin/env bash
# LoRA of SkyReels-V2 on your clips (lora_df_12gb.toml), one process per GPU. Flags override the recipe.
#   NUM_GPUS=2 bash examples/skyreels_v2/train.sh --data_root my_clips --output_dir runs/first
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
exec accelerate launch --config_file "$root/accelerate_configs/ddp.yaml" --num_processes "${NUM_GPUS:-1}" \
  "$root/train.py" --config "$root/examples/skyreels_v2/lora_df_12gb.toml" "$@"
