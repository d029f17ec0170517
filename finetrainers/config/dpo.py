"""Options of direct preference optimization (`--method dpo`)."""

from __future__ import annotations

from .base import Section
from .option import option


# fmt: off
class DPOSection(Section):
    """Direct preference optimization: train on pairs of a preferred and a rejected clip, from `--dataset_file`."""

    methods = ("dpo",)
    qualified = True

    beta: float = option(2000.0, "Strength beta that holds the model close to the reference model, the one before "
        "training. Published values are 2000 to 5000; lower values allow larger changes.", resume="free", gt=0, le=1e6)
# fmt: on
