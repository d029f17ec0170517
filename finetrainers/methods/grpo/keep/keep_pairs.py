"""The best and the worst clip of each prompt of a rollout, written as preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetrainers.utils.files import write_json_lines_atomic
from finetrainers.utils.reading import read_jsonl
from finetrainers.utils.video import write_mp4

from ..advantage import Advantages
from ..prompts.prompts import RolloutSample


class PairKeeper:
    """A writer of `rollout-N-SLOT-chosen.mp4` and `-rejected.mp4` of each prompt, listed in `pairs.jsonl`."""

    def __init__(self, folder: Path, parallel: Any, *, fps: float) -> None:
        """Args:
        folder: directory of the clips and the list.
        parallel: the processes of the run.
        fps: frame rate of the clips.
        """
        self.folder = folder
        self.parallel = parallel
        self.fps = fps

    def keep(self, jobs: Sequence[RolloutSample], videos: Mapping[int, Tensor], advantages: Advantages) -> None:
        """Write the pairs of a rollout; all ranks call it. A prompt whose clips scored alike has none.

        Pairs of this rollout and of later ones, from before a resume, are replaced.

        Args:
            jobs: this rank's clips.
            videos: pixels of the clips that this process has decoded, by index, `[T, H, W, C]` uint8 on the host.
            advantages: advantages of all ranks' clips.
        """
        rollout = jobs[0].rollout
        start, error = self.parallel.data_rank * len(jobs), None
        rows: list[dict[str, Any]] = []
        try:
            for kind, values in (
                ("chosen", advantages.values.masked_fill(advantages.failed, -torch.inf)),
                ("rejected", advantages.values.masked_fill(advantages.failed, torch.inf)),
            ):
                picked = values.argmax(1) if kind == "chosen" else values.argmin(1)
                for slot in sorted(set(range(len(values))) - set(advantages.constant)):
                    index = slot * values.shape[1] + int(picked[slot]) - start
                    if index in videos:
                        name = f"rollout-{rollout:06d}-{slot:03d}-{kind}.mp4"
                        write_mp4(self.folder / name, videos[index].numpy(), fps=self.fps)
                        rows.append({"slot": slot, "prompt": jobs[index].prompt.text, kind: name})
        except Exception as caught:
            error = caught
        self.parallel.raise_if_any_failed(error, "writing preference pairs")
        everything = self.parallel.gather_objects(rows)
        if self.parallel.rank == 0:
            self._list(rollout, everything)

    def _list(self, rollout: int, rows: Sequence[dict[str, Any]]) -> None:
        """Join both clips of each prompt, and add them to the file."""
        pairs: dict[int, dict[str, Any]] = {}
        for row in rows:
            slot = row.pop("slot")
            pairs[slot] = {**pairs.get(slot, {}), **row, "rollout": rollout}
        path = self.folder / "pairs.jsonl"
        before = [row for row in read_jsonl(path)[0] if row["rollout"] < rollout] if path.is_file() else []
        if before or pairs:
            write_json_lines_atomic(path, [*before, *(pairs[slot] for slot in sorted(pairs))])
