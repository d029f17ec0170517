"""`finetrainers sample`: clips of given weights, without training."""
