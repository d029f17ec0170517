"""Options of direct preference optimization (`--method dpo`)."""

from __future__ import annotations

from .base import Section
from .option import option


# fmt: off
class DPOSection(Section):
    """Direct preference optimization: train on pairs of clips of which one is preferred, from `--dataset_file`."""

    methods = ("dpo",)
    qualified = True

    beta: float = option(2000.0, "Strength beta with which the loss holds the model close to the reference model, the "
        "one before training. Diffusion-DPO publishes 2000 to 5000. Lower values move it further away.",
        resume="free", gt=0, le=1e6)
# fmt: on
