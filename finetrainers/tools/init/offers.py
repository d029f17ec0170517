"""Models and machines that a new configuration may be for. Imports no torch."""

from __future__ import annotations

from typing import Any, TypeAlias

from finetrainers.models.registry import families
from finetrainers.utils.packaged import packaged_models

#: Values of `--card`: no GPU, and the GPU of this machine.
CPU, THIS_GPU = "cpu", "this"
#: Name of the dataset without the new concept.
OTHER_CLIPS = "other"
#: Values by question, as far as they are known.
Answers: TypeAlias = dict[str, Any]


def offered_models() -> dict[str, str]:
    """Return the models to begin with, smallest first, each with a description."""
    starters = {name: size for family in families().values() for name, size in family.starters.items()}
    demo = dict.fromkeys(packaged_models(), "colored shapes; a CPU trains clips of 64 pixels in minutes")
    return {**demo, **{name: f"{starters[name]:g}B parameters" for name in sorted(starters, key=starters.__getitem__)}}
