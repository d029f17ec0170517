"""tensorboard, wandb and trackio: accelerate's tracker classes, and what they leave out: resuming a run, and media."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from PIL import Image

from finetrainers.utils.video import gif_of

#: Values that trackers take as settings; they get others as texts.
_PLAIN = (int, float, str, bool)
_GIF_WIDTH = 320


@dataclass(frozen=True)
class Place:
    """Where a tracker's run is.

    Attributes:
        project: at the tracker.
        folder: for the tracker's files.
        name: what a new run is called.
        resumed: how the tracker knows the run that is continued; None for a new one.
        step: of the run; what the tracker has of later steps will be redone.
        beside: names a run of another process that belongs to the one of this name; None: it is that one itself.
    """

    project: str
    folder: Path
    name: str
    resumed: str | None
    step: int
    beside: str | None = None


@dataclass(frozen=True)
class Media:
    """A picture or a video of a step.

    Attributes:
        name: the same at every step.
        content: an image, or the path of an mp4 file.
        caption: what it shows.
    """

    name: str
    content: Image.Image | Path
    caption: str = ""


class TrackedRun(ABC):
    """A run at a tracker, new or resumed.

    Attributes:
        takes_back: whether steps that are redone replace those that were sent before.
        name: how the tracker knows the run.
        last_step: of the resumed run, if the tracker says it.
    """

    kind: ClassVar[str]
    takes_back: ClassVar[bool] = False
    name: str | None = None
    last_step: int | None = None

    def __init__(self, place: Place) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        place.folder.mkdir(parents=True, exist_ok=True)
        self.tracker: Any = LOGGER_TYPE_TO_CLASS[self.kind](place.project, **self.arguments(place))
        self.tracker.start()

    @abstractmethod
    def arguments(self, place: Place) -> dict[str, Any]:
        """What accelerate's class takes, or passes to the library."""

    @abstractmethod
    def log_media(self, media: Sequence[Media], *, step: int) -> None:
        """Send pictures and videos of a step."""

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Send the settings of the run."""
        self.tracker.store_init_configuration(plain(settings))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Send numbers of a step."""
        self.tracker.log(dict(values), step=step)

    def finish(self) -> None:
        """Send what is left, and end the run."""
        self.tracker.finish()


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as trackers take them."""
    return {name: value if isinstance(value, _PLAIN) else str(value) for name, value in settings.items()}


class TensorBoard(TrackedRun):
    """Event files in one folder. A resumed run purges the steps that it will redo."""

    kind = "tensorboard"
    takes_back = True

    def __init__(self, place: Place) -> None:
        if place.beside is not None:  # tensorboard reads one growing file in a folder
            place = replace(place, project=f"{place.project}/{place.beside}")
        super().__init__(place)

    def arguments(self, place: Place) -> dict[str, Any]:
        if place.beside is not None:
            return {"logging_dir": str(place.folder)}
        return {"logging_dir": str(place.folder), "purge_step": place.step + 1 if place.step else 0}

    def configure(self, settings: Mapping[str, Any]) -> None:
        # Accelerate's class calls `add_hparams`, which writes them as a run of its own for each start.
        try:
            from torch.utils.tensorboard.summary import hparams
        except ModuleNotFoundError:
            from tensorboardX.summary import hparams  # type: ignore[no-redef]

        for summary in hparams(plain(settings), {}):
            self.tracker.writer.file_writer.add_summary(summary)

    def log_media(self, media: Sequence[Media], *, step: int) -> None:
        # `SummaryWriter.add_video` needs moviepy, and writes the same: the bytes of a GIF as an image.
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
        except ModuleNotFoundError:
            from tensorboardX.proto.summary_pb2 import Summary

        for one in media:
            data, (width, height) = _encoded(one.content)
            image = Summary.Image(encoded_image_string=data, width=width, height=height, colorspace=3)
            summary = Summary(value=[Summary.Value(tag=one.name, image=image)])
            self.tracker.writer.file_writer.add_summary(summary, step)
            if one.caption:
                self.tracker.writer.add_text(f"{one.name}/caption", one.caption, step)
        self.tracker.writer.flush()


def _encoded(content: Image.Image | Path) -> tuple[bytes, tuple[int, int]]:
    """The bytes of an image file, and its width and height."""
    if isinstance(content, Path):
        return gif_of(content, width=_GIF_WIDTH)
    data = io.BytesIO()
    content.save(data, "JPEG", quality=90)
    return data.getvalue(), content.size


class WandB(TrackedRun):
    """A run of Weights & Biases. It takes no step twice: the server ignores steps before its last one."""

    kind = "wandb"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        run = self.tracker.tracker
        self.name = run.id
        self.last_step = run.starting_step - 1 if run.starting_step else None  # 0 too where there is no connection

    def arguments(self, place: Place) -> dict[str, Any]:
        given = {"dir": str(place.folder), "name": place.name}
        if place.beside is not None:
            given = {**given, "name": f"{place.name}-{place.beside}", "group": place.name, "job_type": place.beside}
        if place.resumed is not None:
            given |= {"id": place.resumed, "resume": "allow"}
        # An argument would override the user's variable.
        variables = {"dir": "WANDB_DIR", "name": "WANDB_NAME", "id": "WANDB_RUN_ID", "resume": "WANDB_RESUME"}
        return {name: value for name, value in given.items() if not os.environ.get(variables[name])}

    def log_media(self, media: Sequence[Media], *, step: int) -> None:
        from wandb import Image as Picture
        from wandb import Video

        self.tracker.log(
            {
                one.name: Video(str(one.content), caption=one.caption, format="mp4")
                if isinstance(one.content, Path)
                else Picture(one.content, caption=one.caption, file_type="jpg")
                for one in media
            },
            step=step,
        )


class Trackio(TrackedRun):
    """A run of trackio, which finds a run by its name."""

    kind = "trackio"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        run = self.tracker.tracker
        self.name = run.name
        # It has no public name, and without it what is known is the last step of `metrics.jsonl`, which may not have arrived.
        upcoming = getattr(run, "_next_step", 0) if place.resumed else 0
        self.last_step = upcoming - 1 if upcoming else None

    def arguments(self, place: Place) -> dict[str, Any]:
        if place.resumed is not None:
            return {"name": place.resumed, "resume": "allow"}
        name = place.name if place.beside is None else f"{place.name}-{place.beside}"
        return {"name": f"{name}-{uuid4().hex[:6]}"}  # two runs of one name could not be told apart

    def configure(self, settings: Mapping[str, Any]) -> None:
        # Accelerate's class calls this with an option of wandb, which trackio stores as a setting.
        self.tracker.tracker.config.update(plain(settings))

    def log_media(self, media: Sequence[Media], *, step: int) -> None:
        from trackio import Image as Picture
        from trackio import Video

        self.tracker.log(
            {
                one.name: (Video if isinstance(one.content, Path) else Picture)(one.content, caption=one.caption)
                for one in media
            },
            step=step,
        )


#: By the value of `report_to`.
TRACKERS: Mapping[str, type[TrackedRun]] = {kind.kind: kind for kind in (TensorBoard, WandB, Trackio)}
