"""Callbacks that watch a run: metrics, validation, evaluation, progress, trackers."""
