"""Report pages of run directories, for `finetrainers report`."""
