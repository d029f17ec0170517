"""tensorboard, wandb and trackio: accelerate's tracker classes, and what they leave out: resuming a run, and media."""

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

from finetrainers.utils.video import gif_of

#: Values that trackers take as settings; they get others as texts.
_PLAIN = (int, float, str, bool)
_GIF_WIDTH = 320
#: wandb's mode in which several processes write to a run.
_SHARED = "shared"
#: Value that has the step, where wandb's own counter cannot.
_STEP = "step"


@dataclass(frozen=True)
class Place:
    """Where a tracker's run is.

    Attributes:
        project: at the tracker.
        folder: for the tracker's files.
        name: what a new run is called.
        resumed: how the tracker knows the run that is continued; None for a new one.
        step: of the run; what the tracker has of later steps will be redone.
        beside: what a second process is called, which writes while the run is trained; None: it is the one that trains.
        joined: how the tracker knows the run of the training, for a second process that may write to it; else that has a run
            of its own in the same group.
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
        is_one_folder: whether a run is whatever files a folder has.
        is_shared: whether a second process may write to the run while this one does.
        name: how the tracker knows the run.
        last_step: of the resumed run, if the tracker says it.
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
    is_one_folder = True

    def arguments(self, place: Place) -> dict[str, Any]:
        if place.beside is not None:  # another file in the same folder is the same run
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
    """A run of Weights & Biases. It takes no step twice: the server ignores steps before its last one.

    Of two processes that write to a run, the later one overwrites what the other sends, unless both use wandb's shared mode,
    which the user turns on for the training (WANDB_MODE=shared). Values of such a run, and those of a second process, which come
    in any order, have their step as a value of its own for the horizontal axis.
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
        given: dict[str, Any] = {"dir": str(place.folder), "name": place.name}
        if place.joined is not None:
            import wandb

            settings = wandb.Settings(x_primary=False, x_update_finish_state=False, x_label=place.beside)
            return {"dir": given["dir"], "id": place.joined, "mode": _SHARED, "settings": settings}
        if place.beside is not None:
            given |= {"name": f"{place.name}-{place.beside}", "group": place.name, "job_type": place.beside}
        if place.resumed is not None:
            given |= {"id": place.resumed, "resume": "allow"}
        # An argument would override the user's variable.
        variables = {"dir": "WANDB_DIR", "name": "WANDB_NAME", "id": "WANDB_RUN_ID", "resume": "WANDB_RESUME"}
        return {name: value for name, value in given.items() if not os.environ.get(variables.get(name, ""))}

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        if self._own_axis:
            self.tracker.log({**values, _STEP: step})
        else:
            self.tracker.log(dict(values), step=step)

    def log_media(self, media: Sequence[Media], *, step: int) -> None:
        from wandb import Image as Picture
        from wandb import Video

        values = {
            one.name: Video(str(one.content), caption=one.caption, format="mp4")
            if isinstance(one.content, Path)
            else Picture(one.content, caption=one.caption, file_type="jpg")
            for one in media
        }
        self.log(values, step=step)


class Trackio(TrackedRun):
    """A run of trackio, which finds a run by its name."""

    kind = "trackio"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        run = self.tracker.tracker
        if place.joined is not None:
            run.config.clear()  # what a writer has replaces the settings of the run
        self.name = run.name
        # It has no public name, and without it what is known is the last step of `metrics.jsonl`, which may not have arrived.
        upcoming = getattr(run, "_next_step", 0) if place.resumed else 0
        self.last_step = upcoming - 1 if upcoming else None

    def arguments(self, place: Place) -> dict[str, Any]:
        if place.joined is not None:  # its own figures of the machine would mix with the training's
            return {"name": place.joined, "resume": "allow", "auto_log_gpu": False, "auto_log_cpu": False}
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
