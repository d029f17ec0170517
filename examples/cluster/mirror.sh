#!/usr/bin/env bash
# Keeps a copy of a run directory in a mounted bucket, and brings it back on a new machine.
#
#   bash examples/cluster/mirror.sh restore BUCKET_DIR OUTPUT_DIR   # once, before the run; nothing if there is no copy
#   bash examples/cluster/mirror.sh follow OUTPUT_DIR BUCKET_DIR    # next to the run, until it is ended by SIGTERM
#
# A run directory cannot be in the mount itself: a checkpoint is published by renaming a directory, and records grow by
# appending, which mounts of object stores do not do, or not reliably. Here only whole checkpoints are copied, each
# with its manifest last, so a copy that was cut off counts as damaged and the one before it is continued from.
#
# Setting: MIRROR_SECONDS, whole seconds between two rounds of copies (60).
set -euo pipefail
shopt -s nullglob

usage="usage: mirror.sh restore BUCKET_DIR OUTPUT_DIR | follow OUTPUT_DIR BUCKET_DIR"
action="${1:?$usage}" from="${2:?$usage}" to="${3:?$usage}"

copy_checkpoint() { # FROM TO
  mkdir -p "$2"
  for entry in "$1"/*; do
    [[ "${entry##*/}" == manifest.json ]] || cp -r "$entry" "$2/" || return
  done
  cp "$1/manifest.json" "$2/manifest.json"
}

copy_run() {
  for checkpoint in "$from"/checkpoints/step-*; do
    name="checkpoints/${checkpoint##*/}"
    [[ -f "$checkpoint/manifest.json" ]] || continue # a copy that was cut off
    if ! cmp -s "$checkpoint/manifest.json" "$to/$name/manifest.json"; then
      rm -rf "${to:?}/$name"
      # One that the run has pruned meanwhile is not missed; anything else is tried again in the next round.
      copy_checkpoint "$checkpoint" "$to/$name" || echo "mirror.sh: $checkpoint is not copied yet" >&2
    fi
  done
  # All but checkpoints, caches and locks: records, samples, results.
  for entry in "$from"/*; do
    case "${entry##*/}" in
      checkpoints | precomputed | control) ;;
      *) cp -ru "$entry" "$to/" || echo "mirror.sh: $entry is not copied yet" >&2 ;;
    esac
  done
}

prune_copies() {
  local kept=("$from"/checkpoints/step-*)
  ((${#kept[@]})) || return 0
  for checkpoint in "${kept[@]}"; do # never fewer whole ones than before
    cmp -s "$checkpoint/manifest.json" "$to/checkpoints/${checkpoint##*/}/manifest.json" || return 0
  done
  for copy in "$to"/checkpoints/step-*; do
    [[ -d "$from/checkpoints/${copy##*/}" ]] || rm -rf "$copy"
  done
}

case "$action" in
  restore)
    if [[ -d "$from" ]]; then
      mkdir -p "$to"
      copy_run
    fi
    ;;
  follow)
    going=1
    trap 'going=0' TERM
    mkdir -p "$to"
    while ((going)); do
      copy_run
      prune_copies
      # In short sleeps: a signal during the copies, or just before a long wait, would only be seen after the wait.
      next=$((SECONDS + ${MIRROR_SECONDS:-60}))
      while ((going && SECONDS < next)); do
        sleep 0.5 || true
      done
    done
    copy_run # what the run wrote at its end
    prune_copies
    ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
