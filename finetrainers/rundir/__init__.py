"""What a run directory holds: files, identity, lock, checkpoints and records. Imports no torch."""
