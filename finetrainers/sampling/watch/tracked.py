"""Clips and scores of a watch at the tracker of the run, in the training's run if two processes may write to it.

Two processes may write for tensorboard, where a run is a folder of files, for trackio, and for wandb if the training
uses its shared mode. Otherwise a watch has a separate run in the training's group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetrainers.config.root import TrainConfig
from finetrainers.draw.sample_files import video_sheet
from finetrainers.training.callbacks.trackers import TRACKERS, Media, Place, TrackedRun
from finetrainers.utils.files import write_json_atomic
from finetrainers.utils.reading import read_json_object, read_jsonl
from finetrainers.utils.video import read_comment

logger = logging.getLogger(__name__)

#: Record of the first tracker; a further one has `tracker-NAME.json`.
_STATE = "tracker.json"


class WatchTracker:
    """Sender of clips and scores to every tracker of the run, once for each checkpoint."""

    def __init__(self, run: Path, folders: Mapping[str, Path], config: TrainConfig) -> None:
        """Args:
        run: the run directory.
        folders: of the presets, by name; each records the sent checkpoints.
        config: of the run.
        """
        self._all = []
        for index, kind in enumerate(config.run.report_to):
            name = f"tracker-{kind}.json" if index else _STATE
            files = {preset: folder / name for preset, folder in folders.items()}
            self._all.append(_SingleTracker(run, files, config, kind))

    def send(self, preset: str, manifest: str, step: int, means: Mapping[str, float], videos: Sequence[Path]) -> None:
        """Send clips and mean scores of a checkpoint, unless they were sent before."""
        for tracker in self._all:
            tracker.send(preset, manifest, step, means, videos)

    def has(self, preset: str, manifest: str) -> bool:
        """Return whether a checkpoint has been sent to all trackers."""
        return all(tracker.has(preset, manifest) for tracker in self._all)

    def finish(self) -> None:
        """Send pending data."""
        for tracker in self._all:
            tracker.finish()


class _SingleTracker:
    """Sender to one tracker. The first failure ends tracking by it, not the watch."""

    def __init__(self, run: Path, files: Mapping[str, Path], config: TrainConfig, kind: str) -> None:
        self.config, self.section, self.kind = config, config.run, kind
        self._run, self._files, self._presets = run, files, list(files)
        self._tracked: TrackedRun | None = None  # of the whole process: wandb and trackio have one at a time
        self._off = False
        self._own: str | None = None  # the separate run that an earlier watch of these presets has begun
        self._sent = {preset: self._read(file) for preset, file in self._files.items()}  # manifests

    def _read(self, file: Path) -> list[str]:
        state = read_json_object(file) if file.is_file() else {}
        if (state.get("tracker"), state.get("project")) != (self.kind, self.section.tracker_name):
            return []
        if state.get("presets") == self._presets:
            self._own = state.get("own")
        return state["sent"]

    def send(self, preset: str, manifest: str, step: int, means: Mapping[str, float], videos: Sequence[Path]) -> None:
        """Send clips and mean scores of a checkpoint, unless they were sent before."""
        if self.has(preset, manifest):
            return
        self._guard(lambda: self._send(preset, step, means, videos))
        if not self._off:
            self._sent[preset].append(manifest)
            state = {
                "tracker": self.kind, "project": self.section.tracker_name, "presets": self._presets,
                "own": self._own, "sent": self._sent[preset],
            }  # fmt: skip
            write_json_atomic(self._files[preset], state)

    def has(self, preset: str, manifest: str) -> bool:
        """Return whether a checkpoint has been sent, or tracking has ended."""
        return self._off or manifest in self._sent[preset]

    def _send(self, preset: str, step: int, means: Mapping[str, float], videos: Sequence[Path]) -> None:
        if self._tracked is None:
            self._tracked = self._open()
        if means:
            self._tracked.log({f"watch/{preset}/{label}": value for label, value in means.items()}, step=step)
        suffix, prefix = f"_step-{step:06d}", f"watch/{preset}"
        media = [Media(f"{prefix}/{video.stem.replace(suffix, '')}", video, read_comment(video)) for video in videos]
        self._tracked.log_media([*media, Media(f"{prefix}/sheet", video_sheet(list(videos)))], step=step)

    def _open(self) -> TrackedRun:
        joined = training_run(self._run, self.config, self.kind)
        place = Place(
            project=self.section.tracker_name,
            folder=self._run / self.section.logging_dir,
            name=self._run.resolve().name,
            resumed=self._own if joined is None else None,
            step=0,
            beside=f"watch-{'-'.join(self._presets)}",
            joined=joined,
        )
        tracked = TRACKERS[self.kind](place)
        self._own = tracked.name if joined is None else None
        return tracked

    def finish(self) -> None:
        """Send pending data."""
        if self._tracked is not None:
            self._guard(self._tracked.finish)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            # Whatever a tracker raises (network, quota, its own defects) must not cost the samples.
            self._off = True
            logger.warning("tracker %s failed; disabled for the rest of this watch: %r", self.kind, error)


def training_run(run: Path, config: TrainConfig, tracker: str) -> str | None:
    """Return the tracker's name of the training's run, or None without one that a second process may write to."""
    events = run / "events.jsonl"
    fields = {"event": "tracker", "tracker": tracker, "project": config.run.tracker_name}
    records = read_jsonl(events)[0] if events.is_file() else []
    matching: list[dict[str, Any]] = [record for record in records if fields.items() <= record.items()]
    return matching[-1].get("run") if matching and matching[-1].get("shared") else None


def whose_run(run: Path, config: TrainConfig, tracker: str) -> str:
    """Return the tracker run that a watch writes to, as a phrase."""
    if TRACKERS[tracker].is_one_folder or training_run(run, config, tracker) is not None:
        return "into the training's run"
    return "as a separate run next to the training's"
