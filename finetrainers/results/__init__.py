"""Results of a run: exported weights and the model card."""
