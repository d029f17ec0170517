# shellcheck shell=bash
# Sourced by every recipe, from the root of the repository: makes `launch`, the options of `accelerate launch`.
#
#   NUM_GPUS           of all machines together; 1 by default.
#   ACCELERATE_CONFIG  default: accelerate_configs/single.yaml for one GPU, accelerate_configs/ddp.yaml for several.
#   NUM_MACHINES       1 by default. On several, run the same command on each, with
#   MACHINE_RANK         0 to NUM_MACHINES - 1,
#   MAIN_PROCESS_IP      the address of machine 0, and, if 29500 is taken there,
#   MAIN_PROCESS_PORT    another port. OUTPUT_DIR must be on storage that all machines share.
#   LOG_DIR            if set, what each process of several says is also written below it.

NUM_GPUS="${NUM_GPUS:-1}"
NUM_MACHINES="${NUM_MACHINES:-1}"
if ((NUM_GPUS > 1)); then
  ACCELERATE_CONFIG="${ACCELERATE_CONFIG:-accelerate_configs/ddp.yaml}"
else
  ACCELERATE_CONFIG="${ACCELERATE_CONFIG:-accelerate_configs/single.yaml}"
fi

launch=(
  --config_file "$ACCELERATE_CONFIG"
  --num_processes "$NUM_GPUS"
)
if ((NUM_MACHINES > 1)); then
  launch+=(
    --num_machines "$NUM_MACHINES"
    --machine_rank "${MACHINE_RANK:?set it to 0 on the first machine, to 1 on the second, and so on}"
    --main_process_ip "${MAIN_PROCESS_IP:?set it to the address of the machine with MACHINE_RANK=0}"
    --main_process_port "${MAIN_PROCESS_PORT:-29500}"
  )
  # Otherwise DeepSpeed's launcher would start the other machines itself, over ssh, with pdsh and a host file.
  if grep -q '^distributed_type: DEEPSPEED' "$ACCELERATE_CONFIG"; then
    launch+=(--deepspeed_multinode_launcher standard)
  fi
fi
if [[ -n "${LOG_DIR:-}" ]] && ((NUM_GPUS > 1)); then
  launch+=(--tee 3 --log_dir "$LOG_DIR/machine-${MACHINE_RANK:-0}")
fi
