"""Files, identity, lock, checkpoints and records of a run directory. Imports no torch."""
