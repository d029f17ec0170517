"""The training loop: state, loading, steps, guards, callbacks, saving and restoring."""
