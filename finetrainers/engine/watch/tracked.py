"""Clips and scores of a watch at the tracker of the run: in the training's own run, where two processes may write to one.

That is so for tensorboard, whose run is a folder of files, for trackio, and for wandb where the training uses its shared mode.
Elsewhere a preset has a run of its own in the training's group.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetrainers.config.root import TrainConfig
from finetrainers.utils.files import read_jsonl, write_json_atomic
from finetrainers.utils.video import comment_of

from ..callbacks.samples import sheet_of
from ..callbacks.trackers import TRACKERS, Media, Place, TrackedRun

logger = logging.getLogger(__name__)

_STATE = "tracker.json"


class WatchTracker:
    """Sends what a preset makes of a checkpoint, once. The first failure ends tracking, not the watch."""

    def __init__(self, run: Path, preset: str, folder: Path, config: TrainConfig) -> None:
        """Args:
        run: the run directory.
        preset: its name.
        folder: of the preset, which remembers what was sent.
        config: of the run.
        """
        self.config, self.section = config, config.run
        self._place = (run, preset)
        self._file = folder / _STATE
        self._tracked: TrackedRun | None = None
        self._off = self.section.report_to == "none"
        self._state: dict[str, str | None] = {}
        self._sent: list[str] = []  # manifests
        if self._file.is_file():
            known = json.loads(self._file.read_text(encoding="utf-8"))
            if (known.get("tracker"), known.get("project")) == (self.section.report_to, self.section.tracker_name):
                self._sent, self._state = known.pop("sent"), known

    def send(self, manifest: str, step: int, means: Mapping[str, float], videos: Sequence[Path]) -> None:
        """Send clips and mean scores of a checkpoint, unless they were sent before."""
        if self.has(manifest):
            return
        self._guard(lambda: self._send(step, means, videos))
        if not self._off:
            self._sent.append(manifest)
            write_json_atomic(self._file, {**self._state, "sent": self._sent})

    def has(self, manifest: str) -> bool:
        """Whether nothing of a checkpoint is left to be sent."""
        return self._off or manifest in self._sent

    def _send(self, step: int, means: Mapping[str, float], videos: Sequence[Path]) -> None:
        tracked, preset = self._tracked or self._open(), self._place[1]
        if means:
            tracked.log({f"watch/{preset}/{label}": value for label, value in means.items()}, step=step)
        names = [f"watch/{preset}/{video.stem.replace(f'_step-{step:06d}', '')}" for video in videos]
        media = [Media(name, video, comment_of(video)) for name, video in zip(names, videos, strict=True)]
        tracked.log_media([*media, Media(f"watch/{preset}/sheet", sheet_of(list(videos)))], step=step)

    def _open(self) -> TrackedRun:
        run, preset = self._place
        joined = training_run(run, self.config)
        # A run of its own that an earlier watch has begun.
        own = self._state.get("run") if joined is None and not self._state.get("joined") else None
        place = Place(
            project=self.section.tracker_name, folder=run / self.section.logging_dir, name=run.resolve().name,
            resumed=own, step=0, beside=f"watch-{preset}", joined=joined,
        )  # fmt: skip
        self._tracked = TRACKERS[self.section.report_to](place)
        self._state = {
            "tracker": self.section.report_to, "project": self.section.tracker_name, "run": self._tracked.name,
            "joined": joined,
        }  # fmt: skip
        return self._tracked

    def finish(self) -> None:
        """Send what is left."""
        if self._tracked is not None:
            self._guard(self._tracked.finish)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            # Whatever a tracker raises (network, quota, its own defects) must not cost the samples.
            self._off = True
            logger.warning("tracker %s failed and is off from here on: %r", self.section.report_to, error)


def training_run(run: Path, config: TrainConfig) -> str | None:
    """How the tracker knows the run of the training, if a second process may write to it; None: it may not, or there is none."""
    events = run / "events.jsonl"
    wanted = {"event": "tracker", "tracker": config.run.report_to, "project": config.run.tracker_name}
    records = read_jsonl(events)[0] if events.is_file() else []
    found: list[dict[str, Any]] = [one for one in records if wanted.items() <= one.items()]
    return found[-1].get("run") if found and found[-1].get("shared") else None


def whose_run(run: Path, config: TrainConfig) -> str:
    """Which run at the tracker a watch writes to, in words."""
    kind = TRACKERS[config.run.report_to]
    if kind.is_one_folder or training_run(run, config) is not None:
        return "into the run of the training"
    return "as a run of its own next to the training's"
