"""Memory of a run by phase. Imports no torch."""

from __future__ import annotations

#: The phases of a run, in order, by the names that records and estimates have for them.
PHASES = (
    "loading",
    "encoding_text",
    "encoding_clips",
    "training",
    "validation",
    "rollout",
    "reward",
    "checkpoint",
)
