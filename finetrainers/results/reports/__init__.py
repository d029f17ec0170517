"""`finetrainers report`: a page about run directories."""
