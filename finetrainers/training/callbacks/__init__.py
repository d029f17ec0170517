"""What watches a run: metrics, validation, evaluation, progress, trackers."""
