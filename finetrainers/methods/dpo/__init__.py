"""Direct preference optimization on pairs of a preferred and a rejected clip."""
