#!/usr/bin/env bash
# What grpo_6gpu.sh, grpo_8gpu.sh, grpo_16gpu.sh and grpo_32gpu.sh have in common. Run one of those: each says what it
# needs, and gives this script its number of GPUs and, as flags, its sizes.
#
# DanceGRPO (arXiv:2505.07818) on HunyuanVideo: for each prompt the model samples a group of clips, VideoAlign scores
# their visual quality, and what led to the best clips becomes likelier, what led to the worst less likely.
#
# TRAINING_TYPE=lora (default) trains a LoRA of rank 128; every GPU holds the whole model in bf16 (DDP).
# TRAINING_TYPE=full-finetune trains every weight, in fp32, split over the GPUs (FSDP2). This has not been run on GPUs.
#
# One machine needs no further settings. What several need is in examples/launch.sh, and how to start them on a cluster
# in examples/cluster/README.md. They exchange encoded prompts in OUTPUT_DIR, so it must be on storage that all share.
set -euo pipefail

NUM_GPUS="${NUM_GPUS:?run grpo_6gpu.sh, grpo_8gpu.sh, grpo_16gpu.sh or grpo_32gpu.sh instead}" # of all machines
TRAINING_TYPE="${TRAINING_TYPE:-lora}"
OUTPUT_DIR="${OUTPUT_DIR:-runs/hunyuan-video-grpo-${NUM_GPUS}gpu-$TRAINING_TYPE}"
# One prompt a line, or DanceGRPO's videos2caption.json. These 32 show that it works; use thousands.
PROMPTS="${PROMPTS:-examples/prompts.txt}"
EVAL_PROMPTS="${EVAL_PROMPTS:-examples/held_out_prompts.txt}"
# Folders or hub ids.
MODEL="${MODEL:-hunyuanvideo-community/HunyuanVideo}"
VIDEOALIGN="${VIDEOALIGN:-KwaiVGI/VideoReward}"
QWEN2_VL="${QWEN2_VL:-Qwen/Qwen2-VL-2B-Instruct}"

engine=()
if [[ $TRAINING_TYPE != lora ]]; then
  ACCELERATE_CONFIG="${ACCELERATE_CONFIG:-accelerate_configs/fsdp2.yaml}"
  # Else every GPU keeps whole gradients between the micro-batches of an update: 48 GiB, in fp32.
  engine=(--sync_each_batch)
fi

model=(
  --model_name hunyuan_video
  --pretrained_model_name_or_path "$MODEL"
  --transformer_dtype bf16
  --enable_slicing
  --enable_tiling
)

# The preset sets what DanceGRPO's code does: its sampler, clip range, optimizer, two updates per rollout, and the
# learning rate, 3e-4 for a LoRA and 1e-5 for all weights. Shift and guidance are what it gives HunyuanVideo. One prompt
# per GPU, as there; every GPU then keeps equally many clips, and none waits for another.
grpo=(
  --method grpo
  --grpo_preset dancegrpo
  --prompts "$PROMPTS"
  --prompts_per_step "$NUM_GPUS"
  --shift 5
  --rollout_guidance 6.018
)

# Visual quality is trained; motion quality and text alignment are only logged (weight 0). Visual quality is judged
# without the prompt: if text alignment falls while it rises, give that a weight too. Scores: OUTPUT_DIR/rewards/.
videoalign="path=$VIDEOALIGN,base=$QWEN2_VL"
rewards=(
  --reward
  "videoalign.vq=1,$videoalign"
  "videoalign.mq=0,$videoalign"
  "videoalign.ta=0,$videoalign"
)

training=(
  --training_type "$TRAINING_TYPE"
  --seed 42
  --mixed_precision bf16
  --gradient_checkpointing
  --checkpointing_limit 2
  --nccl_timeout 3600
)

# Clips of held-out prompts before, during and after training: OUTPUT_DIR/samples/.
evaluation=(
  --eval_prompts "$EVAL_PROMPTS"
)

. examples/launch.sh
accelerate launch "${launch[@]}" train.py \
  --output_dir "$OUTPUT_DIR" \
  "${model[@]}" \
  "${grpo[@]}" \
  "${rewards[@]}" \
  "${training[@]}" \
  ${engine[@]+"${engine[@]}"} \
  "${evaluation[@]}" \
  "$@"
