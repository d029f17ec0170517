"""`finetrainers doctor`: check the machines of a run."""
