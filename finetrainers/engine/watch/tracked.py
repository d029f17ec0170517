"""Clips and scores of a watch at the tracker of the run: a run of its own next to the training's, since that one is being written.

tensorboard stops reading a file as soon as another one of its folder grows, and wandb takes one writer unless all are started in
its shared mode. So a preset is `PROJECT/watch-PRESET` in tensorboard, and a run of the same group at wandb and trackio.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from finetrainers.config.root import TrainConfig
from finetrainers.utils.files import write_json_atomic
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
        self.section = config.run
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
        tracked = self._tracked or self._open()
        if means:
            tracked.log({f"watch/{label}": value for label, value in means.items()}, step=step)
        stems = [video.stem.replace(f"_step-{step:06d}", "") for video in videos]
        media = [Media(f"samples/{stem}", video, comment_of(video)) for stem, video in zip(stems, videos, strict=True)]
        tracked.log_media([*media, Media("samples/sheet", sheet_of(list(videos)))], step=step)

    def _open(self) -> TrackedRun:
        run, preset = self._place
        place = Place(
            project=self.section.tracker_name, folder=run / self.section.logging_dir, name=run.resolve().name,
            resumed=self._state.get("run"), step=0, beside=f"watch-{preset}",
        )  # fmt: skip
        self._tracked = TRACKERS[self.section.report_to](place)
        self._state = {
            "tracker": self.section.report_to, "project": self.section.tracker_name, "run": self._tracked.name,
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
