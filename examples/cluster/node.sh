#!/usr/bin/env bash
# One machine's part of a training run. Start it once on every machine, from the root of the repository; Slurm, SkyPilot
# and the container do. By hand, on two machines of 8 GPUs with shared storage:
#
#   export NUM_MACHINES=2 MAIN_PROCESS_IP=10.0.0.1 OUTPUT_DIR=/shared/runs/first
#   MACHINE_RANK=0 bash examples/cluster/node.sh --config examples/ltx_video/lora.toml --lr 5e-5     # on 10.0.0.1
#   MACHINE_RANK=1 bash examples/cluster/node.sh --config examples/ltx_video/lora.toml --lr 5e-5     # on the other
#
# Arguments are flags of train.py. The run resumes from the newest whole checkpoint in OUTPUT_DIR, or starts if there is
# none.
#
#   OUTPUT_DIR         the directory of the run, on storage that all machines share
#   NUM_MACHINES       1 by default
#   MACHINE_RANK       0 to NUM_MACHINES - 1; 0 by default
#   MAIN_PROCESS_IP    with several machines: the address of machine 0
#   MAIN_PROCESS_PORT  a free port there; 29500 by default
#   GPUS_PER_MACHINE   by default all that nvidia-smi lists
#   ACCELERATE_CONFIG  accelerate_configs/single.yaml for one GPU, accelerate_configs/ddp.yaml for several by default
#   LOG_DIR            if set, the output of each of several processes is also written below it
#
# SIGTERM, SIGUSR1 and SIGINT to this script ask the run to stop with a checkpoint, with all the time that it needs.
# Exit code: 0 done, 75 stopped as asked, anything else failed (docs/how-to/troubleshooting.md#exit-codes).
set -euo pipefail
cd "$(dirname "$0")/../.."
. examples/cluster/outcome.sh

fail() {
  echo "node.sh: $1" >&2
  exit 2
}

[[ -n "${OUTPUT_DIR:-}" ]] || fail "set OUTPUT_DIR to the directory of the run, on storage that all machines share"
[[ $# -gt 0 && "$1" == --* ]] || fail "give flags of train.py, such as --config examples/ltx_video/lora.toml"
for argument in "$@"; do
  case "$argument" in
    --output_dir | --output_dir=*) fail "set OUTPUT_DIR instead of --output_dir: this script watches that directory" ;;
  esac
done

OUTPUT_DIR="$(realpath -m "$OUTPUT_DIR")"
NUM_MACHINES="${NUM_MACHINES:-1}"
MACHINE_RANK="${MACHINE_RANK:-0}"
GPUS_PER_MACHINE="${GPUS_PER_MACHINE:-$(nvidia-smi -L | wc -l)}"
((GPUS_PER_MACHINE > 0)) || fail "no GPU is visible (nvidia-smi -L); set GPUS_PER_MACHINE"
((NUM_MACHINES == 1)) || [[ -n "${MAIN_PROCESS_IP:-}" ]] ||
  fail "set MAIN_PROCESS_IP to the address of the machine with MACHINE_RANK=0"
NUM_GPUS=$((GPUS_PER_MACHINE * NUM_MACHINES))
export OUTPUT_DIR
# All processes of the run inherit it, and hosts.sh finds them by it.
export FINETRAINERS_RUN="$OUTPUT_DIR"

engine=single
if ((NUM_GPUS > 1)); then engine=ddp; fi
config="${ACCELERATE_CONFIG:-accelerate_configs/$engine.yaml}"
launch=(--config_file "$config" --num_processes "$NUM_GPUS")
if ((NUM_MACHINES > 1)); then
  launch+=(
    --num_machines "$NUM_MACHINES"
    --machine_rank "$MACHINE_RANK"
    --main_process_ip "$MAIN_PROCESS_IP"
    --main_process_port "${MAIN_PROCESS_PORT:-29500}"
  )
  # Otherwise DeepSpeed's launcher would start the other machines itself, over ssh, with pdsh and a host file.
  if grep -q '^distributed_type: DEEPSPEED' "$config"; then
    launch+=(--deepspeed_multinode_launcher standard)
  fi
fi
if [[ -n "${LOG_DIR:-}" ]] && ((NUM_GPUS > 1)); then
  launch+=(--tee 3 --log_dir "$LOG_DIR/machine-$MACHINE_RANK")
fi

# Launchers kill what is left half a minute after a signal; the file waits for the step and the checkpoint. The folder
# is there while the run trains: before that there is nothing to save, and a file would be taken for an old one.
ask_to_stop() {
  until touch "$OUTPUT_DIR/control/stop" 2>/dev/null; do
    kill -0 "$launcher" 2>/dev/null || return 0
    sleep 1
  done
}

events=$(count_events "$OUTPUT_DIR")
set -m # a process group of its own, so that a signal to this script's group does not reach the launcher as well
accelerate launch "${launch[@]}" train.py --output_dir "$OUTPUT_DIR" --resume_from_checkpoint auto "$@" &
launcher=$!
set +m
trap 'ask_to_stop &' TERM USR1 INT

code=0
while kill -0 "$launcher" 2>/dev/null; do
  wait "$launcher" || true # a signal ends the wait, not the launcher
done
wait "$launcher" || code=$?

if ((code != 0)) && was_stopped "$OUTPUT_DIR" "$events"; then
  code=75
fi
exit "$code"
