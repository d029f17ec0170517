#!/usr/bin/env bash
# Looks at all machines of a cluster at once, and ends what a run has left behind on them.
#
#   HOSTS=nodes.txt bash examples/cluster/hosts.sh gpus                      # one host name a line; over ssh
#   JOB=12345 bash examples/cluster/hosts.sh gpus                            # the nodes of a Slurm job; over srun
#   HOSTS=nodes.txt bash examples/cluster/hosts.sh processes /shared/runs/first
#   HOSTS=nodes.txt bash examples/cluster/hosts.sh kill /shared/runs/first   # at once, without a checkpoint
#
# Processes of a run are known by the variable FINETRAINERS_RUN in their environment, which node.sh sets: never by their
# name, which other people's runs have too. To stop a run with a checkpoint: touch OUTPUT_DIR/control/stop.
set -euo pipefail

# The functions below run on the other machines: they use nothing of this script.

gpus() {
  local columns=index,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu
  nvidia-smi --format=csv,noheader --query-gpu="$columns,ecc.errors.uncorrected.volatile.total"
  nvidia-smi --format=csv,noheader --query-compute-apps=pid,used_memory,name | sed 's/^/process /'
}

pids_of() {
  local directory
  for directory in /proc/[0-9]*; do
    if grep -zqxF "FINETRAINERS_RUN=$1" "$directory/environ"; then
      echo "${directory#/proc/}"
    fi
  done 2>/dev/null # other people's processes, and those that have just gone
}

processes() {
  local pid
  for pid in $(pids_of "$1"); do
    ps -o pid=,ppid=,etime=,stat=,args= -p "$pid" || true
  done
}

kill_all() {
  local pid
  for pid in $(pids_of "$1"); do
    if kill -KILL "$pid" 2>/dev/null; then echo "killed $pid"; fi
  done
}

usage() {
  echo "usage: HOSTS=FILE or JOB=ID, and: hosts.sh gpus | processes OUTPUT_DIR | kill OUTPUT_DIR" >&2
  exit 2
}

run=""
if [[ -n "${2:-}" ]]; then run="$(printf %q "$(realpath -m "$2")")"; fi
case "${1:-}${run:+ RUN}" in
  gpus) call=gpus ;;
  "processes RUN") call="processes $run" ;;
  "kill RUN") call="kill_all $run" ;;
  *) usage ;;
esac
script="$(declare -f gpus pids_of processes kill_all)"$'\n'"$call"

if [[ -n "${JOB:-}" ]]; then
  exec srun --jobid="$JOB" --overlap --ntasks-per-node=1 --label bash -c "$script"
fi
[[ -n "${HOSTS:-}" ]] || usage
on_host() {
  local said code=0
  # A host that does not answer must not hold up the others.
  said="$(ssh -o BatchMode=yes -o ConnectTimeout=5 "$1" bash -s <<<"$script" 2>&1)" || code=$?
  [[ -z "$said" ]] || sed "s/^/$1: /" <<<"$said"
  ((code == 0)) || echo "$1: failed with exit code $code"
  return "$code"
}
waited=()
while read -r host _; do
  [[ -n "$host" && "$host" != \#* ]] || continue
  on_host "$host" </dev/null &
  waited+=("$!")
done <"$HOSTS"
failed=0
for pid in "${waited[@]}"; do
  wait "$pid" || failed=1
done
exit "$failed"
