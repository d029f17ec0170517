"""Save checkpoints, also in the background, and restore them."""
