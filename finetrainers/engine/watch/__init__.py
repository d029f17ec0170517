"""`finetrainers watch`: sample and score the checkpoints of a run as they are published."""
