"""`finetrainers sample`: sample clips from runs, checkpoints, LoRAs and models."""
