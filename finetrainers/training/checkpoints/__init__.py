"""Saving of checkpoints, optionally in the background, and their restoration."""
