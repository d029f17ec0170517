"""What a run leaves: exported weights and the model card."""
