# shellcheck shell=bash
# Sourced: tells whether a run was stopped as asked. Launchers turn its exit code 75 into 1, so its records are read.

# Number of lines in the events of the run in directory $1. Take it before the run starts: what an earlier part of the
# run wrote must not count, or one that fails to start again would look as if it had been stopped, for ever.
count_events() {
  if [[ -f "$1/events.jsonl" ]]; then wc -l <"$1/events.jsonl"; else echo 0; fi
}

# Whether the run in directory $1 was stopped as asked since its events had $2 lines.
# (Not `grep -q`, which leaves early: the pipe would count as failed.)
was_stopped() {
  [[ -f "$1/events.jsonl" ]] && tail -n "+$(($2 + 1))" "$1/events.jsonl" | grep '"event": "stopped"' >/dev/null
}
