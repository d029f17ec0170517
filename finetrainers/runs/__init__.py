"""Runs from start to results: `finetrainers.train`, `prepare`, and files of stages."""
