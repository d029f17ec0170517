"""`finetrainers doctor`: what of the machines of a run is wrong, or differs between them. Imports no torch."""
