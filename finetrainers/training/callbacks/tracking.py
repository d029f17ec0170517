"""Experiment tracking: records, samples and rollouts go to a tracker, which can never stop training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.sections import RunSection
from finetrainers.draw.sample_files import SHEET_VIDEOS, video_sheet
from finetrainers.utils.reading import read_jsonl
from finetrainers.utils.video import read_comment

from .base import Callback, Record
from .trackers import PLAIN, TRACKERS, Media, Place, TrackedRun

if TYPE_CHECKING:
    from ..state import TrainState

logger = logging.getLogger(__name__)

#: Directories of the run that have a subdirectory of videos for some steps.
_MEDIA = ("samples", "rollouts")


@dataclass(eq=False)
class Tracker(Callback):
    """Sender of records to tensorboard, wandb or trackio. The first failure ends tracking, not training.

    A resumed run continues its run at the tracker, which the event `tracker` of events.jsonl names. Steps that are
    redone replace their first values where the tracker can do that; elsewhere they are not sent again.

    Attributes:
        run: project and directory.
        kind: of the tracker, a key of `TRACKERS`.
        tracked: the tracker's run, or None before the start and after a failure.
    """

    run: RunSection
    kind: str
    tracked: TrackedRun | None = None
    takes_media = True
    _highest = -1  # step that was sent
    _sent = _sent_media = -1  # numbers and media of steps up to these are not sent again

    def on_start(self, state: TrainState) -> None:
        self._guard(state, lambda: self._open(state))

    def _open(self, state: TrainState) -> None:
        kind, root = TRACKERS[self.kind], state.run_dir.root
        earlier = self._earlier(state)
        tracked = kind(
            Place(
                project=self.run.tracker_name, folder=root / self.run.logging_dir, name=root.resolve().name,
                resumed=earlier.get("run"), step=state.step,
            )
        )  # fmt: skip
        self.tracked = tracked
        if tracked.name is not None:
            state.run_dir.tracker_runs[self.kind] = tracked.name
        if earlier and not kind.takes_back:
            recorded = max(earlier["sent"], state.run_dir.recorded_step)
            self._sent = self._sent_media = recorded if tracked.last_step is None else tracked.last_step
            # A process that was killed may have sent the numbers of its last step, but not its media.
            self._sent_media -= tracked.last_step is not None
        self._highest = self._sent
        state.run_dir.event(
            "tracker",
            tracker=kind.kind,
            project=self.run.tracker_name,
            run=tracked.name,
            sent=self._sent,
            step=state.step,
            shared=tracked.is_shared,
        )
        settings = {name: value for name, value in state.config.flat().items() if name != "hub_token"}
        tracked.configure({name: v if isinstance(v, PLAIN) else str(v) for name, v in settings.items()})

    def _earlier(self, state: TrainState) -> dict[str, Any]:
        """Return the last event that started the tracker's run which this one continues; empty for a new run."""
        events = state.run_dir.events_file
        if not state.step or not events.is_file():
            return {}
        fields = {"event": "tracker", "tracker": self.kind, "project": self.run.tracker_name}
        matching = [event for event in read_jsonl(events)[0] if fields.items() <= event.items()]
        return matching[-1] if matching else {}

    def on_log(self, state: TrainState, record: Record) -> None:
        values = {name: value for name, value in record.items() if name != "step"}
        self.send(state, lambda tracked: tracked.log(values, step=state.step))

    def on_back(self, state: TrainState) -> None:
        tracked = self.tracked
        if tracked is None:
            return
        if not tracked.takes_back:
            self._sent = self._sent_media = self._highest
            return
        self._guard(state, tracked.finish)
        self._guard(state, lambda: self._open(state))

    def on_end(self, state: TrainState) -> None:
        if self.tracked is not None:
            state.watchdog.enter("closing")
            self._guard(state, self.tracked.finish)

    def send(self, state: TrainState, action: Callable[[TrackedRun], None], *, media: bool = False) -> None:
        """Run an action on the tracker, unless it has failed or has this step already."""
        tracked = self.tracked
        if tracked is None or state.step <= (self._sent_media if media else self._sent):
            return
        if media and not self.takes_media:
            return
        self._highest = max(self._highest, state.step)
        self._guard(state, lambda: action(tracked), media=media)

    def _guard(self, state: TrainState, action: Callable[[], None], *, media: bool = False) -> None:
        try:
            action()
        except Exception as error:
            # Whatever a tracker raises (network, quota, its own defects) must not cost a training run.
            if media:
                self.takes_media = False
            else:
                self.tracked = None
            kind = self.kind
            state.run_dir.event("tracker_failed", tracker=kind, error=repr(error), step=state.step, media=media)
            subject = "videos and images for tracker" if media else "tracker"
            logger.warning("%s %s failed; disabled for the rest of this run: %r", subject, kind, error)


@dataclass(eq=False)
class TrackedMedia(Callback):
    """Sender of a step's videos and their contact sheet to a tracker; it follows all callbacks that write videos."""

    tracker: Tracker

    def on_start(self, state: TrainState) -> None:
        if state.step == 0:
            self.on_step(state)

    def on_step(self, state: TrainState) -> None:
        folders = [state.run_dir.root / name / f"step-{state.step:06d}" for name in _MEDIA]
        for folder in folders:
            if folder.is_dir():
                self._send(state, folder)

    def _send(self, state: TrainState, folder: Path) -> None:
        def action(tracked: TrackedRun) -> None:
            videos = sorted(folder.glob("[!.]*.mp4"), key=_importance)
            if videos:
                kind = folder.parent.name
                media = [Media(f"{kind}/{video.stem}", video, read_comment(video)) for video in videos]
                listed = videos[:SHEET_VIDEOS] if kind == "rollouts" else videos
                tracked.log_media([*media, Media(f"{kind}/sheet", video_sheet(listed))], step=state.step)

        self.tracker.send(state, action, media=True)


def _importance(video: Path) -> tuple[int, str]:
    """Return a sort key: a rollout's best and worst clip first, then those by each reward, then the others by name."""
    rank, _, reward = video.stem.partition("-")
    return (2 if rank not in ("best", "worst") else 1 if reward else 0, video.stem)
