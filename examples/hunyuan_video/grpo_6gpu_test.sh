#!/usr/bin/env bash
# A short run of grpo_6gpu.sh, to see that models load, clips are sampled and scored, and checkpoints are written: 10
# rollouts with clips of 49x256x256. It is too short and too small to see rewards rise.
#
# Nothing here has been measured. Estimated, for one H100:
#   memory, LoRA: 39 GiB. Full finetuning: 42 GiB, 49 with 15 % for what is missing. See grpo_6gpu.sh.
#   time: 1 minute per rollout (8 clips x 12 steps of 0.23 s, 6 clips x 5 steps x 4 passes, decoding and scoring); with
#     loading, 15 minutes once the models are downloaded. Disk and host memory: as grpo_6gpu.sh.
# Steps: 20 optimizer steps, 2 per rollout, of 18 clips each.
#
# Run from the root of the repository: bash examples/hunyuan_video/grpo_6gpu_test.sh
# Further arguments go to train.py, for example --dry_run to check everything without training.
set -euo pipefail

export NUM_GPUS="${NUM_GPUS:-6}"
export OUTPUT_DIR="${OUTPUT_DIR:-runs/hunyuan-video-grpo-${NUM_GPUS}gpu-${TRAINING_TYPE:-lora}-test}"

exec bash "$(dirname "$0")/grpo_multi_gpu.sh" \
  --rollout_size 49x256x256 \
  --sampling_steps 12 \
  --num_generations 8 \
  --best_of_n 6 \
  --timestep_fraction 0.5 \
  --train_steps 20 \
  --checkpointing_steps 10 \
  --eval_steps 10 \
  "$@"
