#!/usr/bin/env bash
# LoRA of Kandinsky 5 Lite on your clips (lora_24gb.toml), one process per GPU. Flags override the recipe.
#   NUM_GPUS=2 bash examples/kandinsky5/train.sh --data_root my_clips --output_dir runs/first
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
exec accelerate launch --config_file "$root/accelerate_configs/ddp.yaml" --num_processes "${NUM_GPUS:-1}" \
  "$root/train.py" --config "$root/examples/kandinsky5/lora_24gb.toml" "$@"
