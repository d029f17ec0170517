"""Tools around runs: search-batch, doctor, sync."""
