"""tensorboard, wandb and trackio: accelerate's tracker classes, with two additions: resuming a run, and media."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from PIL import Image

from finetrainers.utils.video import make_gif

#: Types of values that trackers take as settings; they get others as strings.
PLAIN = (int, float, str, bool)
_GIF_WIDTH = 320
#: wandb's mode for several processes that write to a run.
_SHARED = "shared"
#: Name of the value that holds the step, where wandb's own counter cannot.
_STEP = "step"


@dataclass(frozen=True)
class Place:
    """Location of a run at a tracker.

    Attributes:
        project: at the tracker.
        folder: for the tracker's files.
        name: name of a new run.
        resumed: the tracker's identifier of the run that is continued, or None for a new one.
        step: of the run; later steps that the tracker has will be redone.
        beside: name of a second process, which writes while the run is trained, or None for the process that trains.
        joined: the tracker's identifier of the training's run, for a second process that may write to it, or None if
            that process has its own run in the same group.
    """

    project: str
    folder: Path
    name: str
    resumed: str | None
    step: int
    beside: str | None = None
    joined: str | None = None


@dataclass(frozen=True)
class Media:
    """An image or a video of a step.

    Attributes:
        name: the same at every step.
        content: an image, or the path of an mp4 file.
        caption: description of the content.
    """

    name: str
    content: Image.Image | Path
    caption: str = ""


class TrackedRun(ABC):
    """A run at a tracker, new or resumed.

    Attributes:
        takes_back: whether steps that are redone replace those that were sent before.
        is_one_folder: whether a run consists of all files of a directory.
        is_shared: whether a second process may write to the run while this one does.
        name: the tracker's identifier of the run.
        last_step: of the resumed run, or None if the tracker does not report it.
    """

    kind: ClassVar[str]
    takes_back: ClassVar[bool] = False
    is_one_folder: ClassVar[bool] = False
    is_shared: bool = True
    name: str | None = None
    last_step: int | None = None

    def __init__(self, place: Place) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        place.folder.mkdir(parents=True, exist_ok=True)
        self.tracker: Any = LOGGER_TYPE_TO_CLASS[self.kind](place.project, **self.arguments(place))
        self.tracker.start()

    @abstractmethod
    def arguments(self, place: Place) -> dict[str, Any]:
        """Return the arguments of accelerate's class, which passes some to the library."""

    @abstractmethod
    def log_media(self, media: Sequence[Media], *, step: int) -> None:
        """Send images and videos of a step."""

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Send the settings of the run, whose values are of `PLAIN` types."""
        self.tracker.store_init_configuration(settings)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Send numbers of a step."""
        self.tracker.log(dict(values), step=step)

    def finish(self) -> None:
        """Send the remaining data, and end the run."""
        self.tracker.finish()


class TensorBoard(TrackedRun):
    """Event files in one folder. A resumed run purges the steps that it will redo."""

    kind = "tensorboard"
    takes_back = True
    is_one_folder = True

    def arguments(self, place: Place) -> dict[str, Any]:
        if place.beside is not None:  # another file in the same folder is the same run
            return {"logging_dir": str(place.folder)}
        return {"logging_dir": str(place.folder), "purge_step": place.step + 1 if place.step else 0}

    def configure(self, settings: Mapping[str, Any]) -> None:
        # Accelerate's class calls `add_hparams`, which writes them as a separate run for each start.
        try:
            from torch.utils.tensorboard.summary import hparams
        except ModuleNotFoundError:
            from tensorboardX.summary import hparams  # type: ignore[no-redef]

        for summary in hparams(settings, {}):
            self.tracker.writer.file_writer.add_summary(summary)

    def log_media(self, media: Sequence[Media], *, step: int) -> None:
        # `SummaryWriter.add_video` needs moviepy, and writes the same: the bytes of a GIF as an image.
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
        except ModuleNotFoundError:
            from tensorboardX.proto.summary_pb2 import Summary

        for medium in media:
            data, (width, height) = _encoded(medium.content)
            image = Summary.Image(encoded_image_string=data, width=width, height=height, colorspace=3)
            summary = Summary(value=[Summary.Value(tag=medium.name, image=image)])
            self.tracker.writer.file_writer.add_summary(summary, step)
            if medium.caption:
                self.tracker.writer.add_text(f"{medium.name}/caption", medium.caption, step)
        self.tracker.writer.flush()


def _encoded(content: Image.Image | Path) -> tuple[bytes, tuple[int, int]]:
    """Return the bytes of an image file, and its width and height."""
    if isinstance(content, Path):
        return make_gif(content, width=_GIF_WIDTH)
    data = io.BytesIO()
    content.save(data, "JPEG", quality=90)
    return data.getvalue(), content.size


class WandB(TrackedRun):
    """A run of Weights & Biases. It takes no step twice: the server ignores steps before its last one.

    If two processes write to a run, the later one overwrites the data of the other, unless both use wandb's shared
    mode, which the user turns on for the training (WANDB_MODE=shared). Values of such a run, and those of a second
    process, come in any order: they have their step as a separate value for the horizontal axis.
    """

    kind = "wandb"

    def __init__(self, place: Place) -> None:
        self.is_shared = os.environ.get("WANDB_MODE") == _SHARED or place.joined is not None
        self._own_axis = self.is_shared or place.beside is not None
        super().__init__(place)
        run = self.tracker.tracker
        self.name = run.id
        self.last_step = run.starting_step - 1 if run.starting_step else None  # 0 too where there is no connection
        if self._own_axis:
            run.define_metric(_STEP, hidden=True)
            run.define_metric("*", step_metric=_STEP)

    def arguments(self, place: Place) -> dict[str, Any]:
        folder = str(place.folder)
        if place.joined is not None:
            import wandb

            settings = wandb.Settings(x_primary=False, x_update_finish_state=False, x_label=place.beside)
            return {"dir": folder, "id": place.joined, "mode": _SHARED, "settings": settings}
        arguments: dict[str, Any] = {"dir": folder, "name": place.name}
        if place.beside is not None:
            arguments |= {"name": f"{place.name}-{place.beside}", "group": place.name, "job_type": place.beside}
        if place.resumed is not None:
            arguments |= {"id": place.resumed, "resume": "allow"}
        # An argument would override the user's variable.
        variables = {"dir": "WANDB_DIR", "name": "WANDB_NAME", "id": "WANDB_RUN_ID", "resume": "WANDB_RESUME"}
        return {name: value for name, value in arguments.items() if not os.environ.get(variables.get(name, ""))}

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        if self._own_axis:
            self.tracker.log({**values, _STEP: step})
        else:
            super().log(values, step=step)

    def log_media(self, media: Sequence[Media], *, step: int) -> None:
        from wandb import Image as WandBImage
        from wandb import Video

        values = {
            medium.name: Video(str(medium.content), caption=medium.caption, format="mp4")
            if isinstance(medium.content, Path)
            else WandBImage(medium.content, caption=medium.caption, file_type="jpg")
            for medium in media
        }
        self.log(values, step=step)


class Trackio(TrackedRun):
    """A run of trackio, which finds a run by its name."""

    kind = "trackio"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        run = self.tracker.tracker
        if place.joined is not None:
            run.config.clear()  # a writer's settings would replace those of the run
        self.name = run.name
        # It has no public name. The last step of `metrics.jsonl`, the alternative, may not have arrived at the tracker.
        upcoming = getattr(run, "_next_step", 0) if place.resumed else 0
        self.last_step = upcoming - 1 if upcoming else None

    def arguments(self, place: Place) -> dict[str, Any]:
        if place.joined is not None:  # this process's figures of the machine would mix with the training's
            return {"name": place.joined, "resume": "allow", "auto_log_gpu": False, "auto_log_cpu": False}
        if place.resumed is not None:
            return {"name": place.resumed, "resume": "allow"}
        name = place.name if place.beside is None else f"{place.name}-{place.beside}"
        return {"name": f"{name}-{uuid4().hex[:6]}"}  # trackio cannot distinguish two runs of one name

    def configure(self, settings: Mapping[str, Any]) -> None:
        # Accelerate's class calls this with an option of wandb, which trackio stores as a setting.
        self.tracker.tracker.config.update(settings)

    def log_media(self, media: Sequence[Media], *, step: int) -> None:
        from trackio import Image as TrackioImage
        from trackio import Video

        values = {
            medium.name: (Video if isinstance(medium.content, Path) else TrackioImage)(
                medium.content, caption=medium.caption
            )
            for medium in media
        }
        self.tracker.log(values, step=step)


#: By the value of `report_to`.
TRACKERS: Mapping[str, type[TrackedRun]] = {kind.kind: kind for kind in (TensorBoard, WandB, Trackio)}
