"""`finetrainers search-batch`: find the batch size of each bucket."""
