"""Requirements of direct preference optimization that are checked before it is loaded. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from finetrainers.config.errors import Problem
from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig, fields
from finetrainers.methods.spec import MethodMemory, MethodSpec

from .pairs import CHOSEN, PROMPT, REJECTED, PairPlan, column_config, survey_pairs

if TYPE_CHECKING:
    from finetrainers.data.inspect.probe_all import ProbeOptions

_FILE = f"set --dataset_file to a file of pairs with the columns `{PROMPT}`, `{CHOSEN}` and `{REJECTED}`"
#: Dataset options that pairs cannot use, each with the reason and remedy.
_NOT_OF_PAIRS = {
    **dict.fromkeys(("dataset", "hf_dataset"), _FILE),
    **dict.fromkeys(
        ("video_column", "caption_column", "caption_columns", "caption_lines"),
        f"the columns of pairs are `{PROMPT}`, `{CHOSEN}` and `{REJECTED}`; remove it",
    ),
    "eval_dataset_file": "held-out pairs are those of --eval_num_items; remove it",
    **dict.fromkeys(
        ("mask_column", "unmasked_weight"), "pairs are compared as complete clips, so the loss is not masked; remove it"
    ),
    **dict.fromkeys(
        ("bucket_keep_prob", "bucket_fall_shorter", "sliding_window_size"),
        "both clips of a pair are cut to the same bucket and not divided; remove it",
    ),
}


class PreferencePairs(MethodSpec):
    """Direct preference optimization trains on pairs of clips, and compares the network with the reference model."""

    #: Options that need a refused option, since advice to set that would lead to an error.
    media_columns = (CHOSEN, REJECTED)
    unread: Mapping[str, str] = {
        name: ""
        for name, option in fields().items()
        if option.scope == "run" and option.needs in _NOT_OF_PAIRS and name not in _NOT_OF_PAIRS
    }

    def survey(self, config: TrainConfig, geometry: Geometry, options: ProbeOptions | None = None) -> PairPlan:
        return survey_pairs(config, geometry, options)

    def read(self, config: TrainConfig) -> None:
        for column in (CHOSEN, REJECTED):
            super().read(column_config(config, column))

    def problems(self, config: TrainConfig) -> list[Problem]:
        problems = super().problems(config)
        problems += [
            Problem(f"--{name}", reason, "unsupported")
            for name, reason in _NOT_OF_PAIRS.items()
            if config.changed(name)
        ]
        if config.data.frame_selection == "chunk":
            message = "cuts several samples from a clip, but a pair is one sample; use another selection"
            problems.append(Problem("--frame_selection chunk", message, "unsupported"))
        if config.data.dataset_file is None:
            problems.append(Problem("--dataset_file", f"is not set; {_FILE}", "required"))
        return problems

    def uses_reference(self, config: TrainConfig) -> bool:
        return True

    def memory(
        self, config: TrainConfig, latent: Sequence[int], *, batch_size: int, trained: float, reference: float
    ) -> MethodMemory:
        copies = reference if config.training.training_type == "full-finetune" else 0.0
        return MethodMemory(copies=copies, trajectories=0.0, batch_size=2 * batch_size)
