"""`finetrainers watch`: sample and score each new checkpoint of a run."""
