"""Trackers: a resumed run continues its tracker run, videos are sent, and no failure of a tracker stops training."""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorboard
from accelerate import PartialState
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.draw.sample_files import write_sample
from finetrainers.plan import preflight
from finetrainers.rundir.run_dir import RunDirectory
from finetrainers.runs.training import train
from finetrainers.sampling.watch.tracked import WatchTracker, whose_run
from finetrainers.training.callbacks import tracking
from finetrainers.training.callbacks.trackers import Media
from finetrainers.training.callbacks.tracking import TrackedMedia, Tracker
from finetrainers.utils.video import make_gif, read_comment, write_mp4


def events_of(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    found.Reload()
    return found


@pytest.mark.rotating
def test_a_resumed_run_continues_its_tensorboard_curves(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = options(train_steps=4, checkpointing_steps=2, eval_num_items=1, clips=2, eval_steps=1)
    values |= {
        "report_to": "tensorboard",
        "hub_token": "secret-token",
        "validation_prompts": "a@@@9x64x64:::b@@@1x32x32",
    }
    values |= {"validation_steps": 1, "validation_inference_steps": 2}
    monkeypatch.setenv("FINETRAINERS_FAULT", "raise@step:4")
    with pytest.raises(RuntimeError, match="step"):
        run(**values)
    monkeypatch.delenv("FINETRAINERS_FAULT")
    root = Path(values["output_dir"])
    assert [e.step for e in events_of(root / "logs" / "finetrainers").Scalars("loss")] == [1, 2, 3]
    done = run(**values, resume_from_checkpoint="latest")

    [folder] = (root / "logs").iterdir()  # one run, which has its settings too
    found = events_of(folder)
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [
        (step, pytest.approx(value)) for step, value in done.curve("loss")
    ]
    assert [e.step for e in found.Scalars("eval_loss")] == [0, 1, 2, 3, 4]
    assert "_hparams_/session_start_info" in found.summary_metadata
    assert {"step_s", "memory/training_step/host_gib", "memory/validation/host_gib"} <= set(found.Tags()["scalars"])
    images = {tag: found.Images(tag) for tag in found.Tags()["images"]}
    assert list(images) == ["samples/00-a-0", "samples/01-b-0", "samples/sheet"]
    assert all([image.step for image in some] == [0, 1, 2, 3, 4] for some in images.values())
    assert images["samples/00-a-0"][0].encoded_image_string.startswith(b"GIF89a")
    [caption] = found.Tensors("samples/00-a-0/caption/text_summary")[-1].tensor_proto.string_val
    assert caption.decode().startswith("a\nseed 42 | 9 x 64 x 64 at ")
    assert not [path for path in root.rglob("*") if path.is_file() and b"secret-token" in path.read_bytes()]


def test_gifs_have_the_size_and_the_speed_of_the_video(tmp_path: Path) -> None:
    clip = np.random.default_rng(0).integers(0, 255, (12, 32, 64, 3), dtype=np.uint8)
    for fps, expected in ((10, (12, 100)), (100, (6, 20))):
        write_mp4(tmp_path / "a.mp4", clip, fps=fps, comment="one\ntwo")
        assert read_comment(tmp_path / "a.mp4") == "one\ntwo"
        data, size = make_gif(tmp_path / "a.mp4", width=48)
        (tmp_path / "a.gif").write_bytes(data)
        gif = Image.open(tmp_path / "a.gif")
        assert gif.size == size == (48, 24)
        assert (gif.n_frames, gif.info["duration"]) == expected  # type: ignore[attr-defined]


# ---- wandb and trackio, with the signatures of wandb 0.31 and trackio 0.43 ------------------------------------------


class FakeRun:
    """A run of either library, which remembers what it was given."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.id = arguments.get("id") or "made-up-id"
        self.name = arguments.get("name")
        self.starting_step = 0
        self.finished = False

        self.axes: dict[str, str | None] = {}

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool = False) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        own = data.pop(self.axes["*"]) if self.axes else None  # the axis of its own
        assert (step is None) is bool(self.axes)
        self.sent.append((own if step is None else step, data))

    def finish(self) -> None:
        self.finished = True


class FakeMedia:
    def __init__(self, content: Any, caption: str | None = None, format: str | None = None) -> None:  # noqa: A002
        self.content, self.caption = content, caption


class FakePicture:
    def __init__(self, content: Any, caption: str | None = None, file_type: str | None = None) -> None:
        self.content = content


class Library(ModuleType):
    """Stands for `wandb` or `trackio`."""

    Video, Image = FakeMedia, FakePicture

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.runs: list[FakeRun] = []
        self.settings: dict[str, Any] = {}
        self.config = SimpleNamespace(update=lambda values, allow_val_change: self.settings.update(values))  # of wandb
        self.Settings = dict
        self.starting_step = 0

    def init(self, **arguments: Any) -> FakeRun:
        run = FakeRun(arguments)
        # What the server has, which trackio keeps under another name.
        run.starting_step = run._next_step = self.starting_step  # type: ignore[attr-defined]
        is_shared = len(self.runs) == 0 or self.__name__ == "wandb"
        run.config = self.settings if is_shared else {"of": "this process"}  # type: ignore[attr-defined]
        self.runs.append(run)
        return run


@pytest.fixture(params=["wandb", "trackio"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library(request.param)
    monkeypatch.setitem(sys.modules, request.param, found)
    for name in ("WANDB_DIR", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return found


def start(kind: ModuleType, root: Path, *, step: int = 0) -> tuple[Any, Tracker, TrackedMedia]:
    """A run that is started or resumed, without anything to train."""
    PartialState()  # as every run makes one
    config = load_config(
        model_name="ltx_video", pretrained_model_name_or_path="x", report_to=kind.__name__, output_dir=str(root),
        hub_token="secret", video_resolution_buckets=["9x64x64"], data_root=".", train_steps=9,
    )  # fmt: skip
    run_dir = RunDirectory(root, writes=True)
    run_dir.start(config, resumed_step=step)
    state = SimpleNamespace(
        config=config, run_dir=run_dir, step=step, watchdog=SimpleNamespace(enter=lambda section: None)
    )
    tracker = Tracker(config.run, kind.__name__)
    media = TrackedMedia(tracker)
    tracker.on_start(state)  # type: ignore[arg-type]
    media.on_start(state)  # type: ignore[arg-type]
    return state, tracker, media


def steps(state: Any, tracker: Tracker, media: TrackedMedia, *, to: int) -> None:
    """Steps up to this one, each with a record, and every second one with a sample."""
    while state.step < to:
        state.step += 1
        record = {"step": state.step, "loss": 1.0 / state.step}
        state.run_dir.metrics(record)
        tracker.on_log(state, record)
        if state.step % 2 == 0:
            clip = np.zeros((9, 32, 32, 3), np.uint8)
            write_sample(state.run_dir.root / "samples", "00-a", clip, step=state.step, fps=8, heading="a fox\nseed 42")
        media.on_step(state)


def test_a_resumed_run_continues_its_run_and_sends_no_step_twice(library: Library, tmp_path: Path) -> None:
    root = tmp_path / "mystyle"
    steps(*start(library, root), to=5)  # and is killed
    state, tracker, media = start(library, root, step=2)
    steps(state, tracker, media, to=4)  # and is killed once more, before what had been sent
    state, tracker, media = start(library, root, step=2)
    steps(state, tracker, media, to=7)
    tracker.on_back(state)  # a rollback
    state.step = 6
    steps(state, tracker, media, to=9)
    tracker.on_end(state)

    first, *resumed = library.runs
    known = first.id if library.__name__ == "wandb" else first.name
    assert first.arguments["project"] == "finetrainers"
    assert "resume" not in first.arguments
    assert first.arguments["name"].startswith("mystyle")
    for run in resumed:
        assert run.arguments["resume"] == "allow"
        assert run.arguments["id" if library.__name__ == "wandb" else "name"] == known
    assert state.run_dir.tracker_run == known
    assert library.runs[-1].finished
    sent = [(step, values) for run in library.runs for step, values in run.sent]
    assert [step for step, values in sent if "loss" in values] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    shown = {step: values for step, values in sent if "samples/00-a" in values}
    assert list(shown) == [2, 4, 6, 8]
    assert shown[8]["samples/00-a"].content in (path := root / "samples" / "step-000008" / "00-a.mp4", str(path))
    assert shown[8]["samples/00-a"].caption == "a fox\nseed 42"
    assert shown[8]["samples/sheet"].content.width > 8 * 32
    assert library.settings["train_steps"] == 9
    assert not {"hub_token", "allow_val_change"} & set(library.settings)


def test_tensorboard_forgets_what_a_rollback_undoes(tmp_path: Path) -> None:
    state, tracker, media = start(tensorboard, tmp_path)
    steps(state, tracker, media, to=5)
    state.step = 3
    state.run_dir.rewind(3)
    tracker.on_back(state)
    steps(state, tracker, media, to=6)
    tracker.on_end(state)
    found = events_of(tmp_path / "logs" / "finetrainers")
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [image.step for image in found.Images("samples/00-a")] == [2, 4, 6]


def test_what_has_not_arrived_is_sent(library: Library, tmp_path: Path) -> None:
    """After a kill, a server may have less than metrics.jsonl; where it says so, it is believed."""
    steps(*start(library, tmp_path), to=5)
    library.starting_step = 5  # it has up to 4, of which the video may be missing
    state, tracker, media = start(library, tmp_path, step=2)
    steps(state, tracker, media, to=6)
    assert [step for step, values in library.runs[-1].sent if "loss" in values] == [5, 6]
    assert [step for step, values in library.runs[-1].sent if "samples/00-a" in values] == [4, 6]


def test_a_new_run_in_the_same_place_is_a_new_run_at_the_tracker(library: Library, tmp_path: Path) -> None:
    steps(*start(library, tmp_path), to=3)
    steps(*start(library, tmp_path), to=3)
    first, second = library.runs
    assert "resume" not in second.arguments
    assert library.__name__ == "wandb" or first.name != second.name
    assert [step for step, values in second.sent if "loss" in values] == [1, 2, 3]


@pytest.mark.parametrize("shared", [False, True])
def test_a_second_process_writes_to_the_run_where_two_may(
    shared: bool, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb: only in the mode for it; else it has a run of its own, which its next start continues."""
    root, is_wandb = tmp_path / "mystyle", library.__name__ == "wandb"
    if shared and not is_wandb:
        pytest.skip("a mode of wandb")
    if shared:
        monkeypatch.setenv("WANDB_MODE", "shared")
    state, tracker, media = start(library, root)
    steps(state, tracker, media, to=4)
    monkeypatch.delenv("WANDB_MODE", raising=False)  # which the second process need not have
    [video] = (root / "samples" / "step-000002").glob("*.mp4")

    def watch(*manifests: str) -> None:
        one = WatchTracker(root, folders, state.config)
        for number, manifest in enumerate(manifests):
            for preset in folders:
                one.send(preset, manifest, 2 - number, {"brightness": 0.5}, [video])  # in any order
                assert one.has(preset, manifest)
        one.finish()

    folders = {preset: root / "watch" / preset for preset in ("run", "low4s")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    joins = shared or not is_wandb
    assert whose_run(root, state.config, library.__name__).split()[0] == ("into" if joins else "as")
    watch("a", "b")
    watch("a", "b", "c")
    watch("c")  # has nothing to send
    training, first, second = library.runs  # one for each process, whatever it has presets
    for run, sent in ((first, [2, 2, 2, 2, 1, 1, 1, 1]), (second, [0, 0, 0, 0])):
        assert [step for step, _ in run.sent] == sent
        assert run.finished
        assert {name for _, values in run.sent for name in values} == {
            f"watch/{preset}/{name}" for preset in folders for name in ("brightness", "sheet", video.stem)
        }
        assert run.axes.get("*") == ("step" if is_wandb else None)
    if not is_wandb:
        for run in (first, second):
            given = {"name": training.name, "resume": "allow", "auto_log_gpu": False, "auto_log_cpu": False}
            assert run.arguments == {"project": "finetrainers", **given}
            assert run.config == {}  # type: ignore[attr-defined]  # which leaves the training's as they are
    elif shared:
        for run in (first, second):
            assert (run.arguments["id"], run.arguments["mode"]) == (training.id, "shared")
            assert run.arguments["settings"]["x_update_finish_state"] is False
        assert training.axes["*"] == "step"
        assert [step for step, values in training.sent if "loss" in values] == [1, 2, 3, 4]
    else:
        assert first.arguments["name"] == "mystyle-watch-run-low4s"
        assert first.arguments["group"] == training.arguments["name"]
        assert "id" not in first.arguments
        assert (second.arguments["id"], second.arguments["resume"]) == (first.id, "allow")
    # Other presets together are another writer.
    del folders["run"]
    watch("d")
    assert is_wandb is False or shared or "id" not in library.runs[-1].arguments


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_two_processes_with_the_library_itself(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    installed = pytest.importorskip(kind)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    root = tmp_path / "mystyle"
    state, tracker, media = start(installed, root)
    steps(state, tracker, media, to=2)
    tracker.on_end(state)  # of two processes, one at a time is in this one
    [video] = (root / "samples" / "step-000002").glob("*.mp4")
    (root / "watch").mkdir()
    watch = WatchTracker(root, {"run": root / "watch"}, state.config)
    watch.send("run", "a", 1, {"brightness": 0.25}, [video])
    assert watch.has("run", "a")
    assert not watch._all[0]._off
    watch.finish()
    if kind == "wandb":  # whose own process writes the files
        deadline = time.monotonic() + 20
        wanted = (b"watch/run/brightness", b"mystyle-watch-run")
        while time.monotonic() < deadline:
            files = [file.read_bytes() for file in (root / "logs" / "wandb").glob("offline-run-*/*.wandb")]
            found = [sum(text in file for file in files) for text in wanted]
            if found == [1, 1]:
                break
            time.sleep(0.1)
        assert (len(files), found) == (2, [1, 1])


def test_variables_of_the_user_win(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_NAME", "own")
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    start(library, tmp_path)
    if library.__name__ == "wandb":
        assert library.runs[0].arguments == {"project": "finetrainers"}


@pytest.mark.parametrize("fails_in", ["init", "log", "finish", "Video"])
def test_a_failure_is_told_once_and_stops_nothing(
    fails_in: str, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no-route")

    monkeypatch.setattr(FakeRun if fails_in in ("log", "finish") else Library, fails_in, fail)
    state, tracker, media = start(library, tmp_path)
    steps(state, tracker, media, to=4)
    tracker.on_end(state)
    events = map(json.loads, state.run_dir.events_file.read_text().splitlines())
    [failure] = [event for event in events if event["event"] == "tracker_failed"]
    assert failure["tracker"] == library.__name__
    assert "no-route" in failure["error"]
    assert failure["step"] == {"init": 0, "log": 1, "finish": 4, "Video": 2}[fails_in]
    if fails_in == "Video":  # numbers are still sent
        assert [step for step, _ in library.runs[0].sent] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_libraries_take_what_they_are_given(name: str) -> None:
    library = pytest.importorskip(name)
    for called, arguments in (
        (library.init, ("project", "name", "resume", *(["id", "dir"] if name == "wandb" else []))),
        (library.Video, ("caption", "format")),
        (library.Image, ("caption", *(["file_type"] if name == "wandb" else []))),
        (library.Run.log, ("step",)),
    ):
        assert set(arguments) <= set(inspect.signature(called).parameters)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "tensorboard"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_loaded(
    tracker: str, dry_run: bool, options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder of that name on the import path, as wandb writes one, is no package."""
    (tmp_path / tracker).mkdir()
    found = PathFinder.find_spec(tracker, [str(tmp_path)])
    assert found is not None
    monkeypatch.setattr(preflight, "find_spec", lambda name: found if name == tracker else None)
    with pytest.raises(ConfigError) as refused:
        train(load_config(**options(report_to=tracker, dry_run=dry_run)))
    [problem] = refused.value.problems
    assert problem.where == "--report_to"
    assert problem.message.endswith(f"pip install {tracker}")


def test_several_trackers_are_named_in_any_way_and_all_that_miss_are_told(
    options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in ("wandb,trackio", ["wandb", "trackio"], ["wandb, trackio", "wandb"]):
        assert load_config(**options(report_to=given)).run.report_to == ["wandb", "trackio"]
    for given in ("none", [], ""):
        assert load_config(**options(report_to=given)).run.report_to == []
    with pytest.raises(ConfigError, match="report_to"):
        load_config(**options(report_to="wandb,tensorbord"))
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        train(load_config(**options(report_to=["wandb", "trackio"])))
    [problem] = refused.value.problems
    assert problem.where == "--report_to"
    assert problem.message.endswith(f"pip install {' '.join(['wandb', 'trackio'])}")


def test_several_trackers_get_the_same_and_fail_each_for_itself(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library, other = Library("wandb"), Library("trackio")
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setitem(sys.modules, "trackio", other)
    monkeypatch.setattr(preflight, "find_spec", lambda name: SimpleNamespace(origin="x"))
    monkeypatch.setattr(other, "init", lambda **arguments: 1 / 0)
    values = options(train_steps=2, validation_prompts="a", validation_steps=2, validation_inference_steps=2, clips=2)
    done = run(**values, report_to=["tensorboard", "wandb", "trackio"])
    found = events_of(done.root / "logs" / "finetrainers")
    losses = [event.value for event in found.Scalars("loss")]
    sent = library.runs[0].sent
    assert [values["loss"] for _, values in sent if "loss" in values] == [pytest.approx(loss) for loss in losses]
    assert len(losses) == 2
    assert [event.step for event in found.Images("samples/sheet")] == [0, 2]
    assert [step for step, values in sent if "samples/sheet" in values] == [0, 2]
    events = [json.loads(line) for line in (done.root / "events.jsonl").read_text().splitlines()]
    assert [event["tracker"] for event in events if event["event"] == "tracker"] == ["tensorboard", "wandb"]
    assert [event["tracker"] for event in events if event["event"] == "tracker_failed"] == ["trackio"]

    folder = done.root / "watch" / "run"
    folder.mkdir(parents=True)
    [video] = (done.root / "samples" / "step-000002").glob("*.mp4")
    config = load_config(done.root / "config.toml", output_dir=str(done.root))
    for expected in (1, 0):  # a second watch has nothing to send
        before = len(library.runs)
        watch = WatchTracker(done.root, {"run": folder}, config)
        watch.send("run", "a", 2, {"brightness": 0.5}, [video])
        watch.finish()
        assert watch.has("run", "a")
        assert len(library.runs) == before + expected
    assert {"tracker.json", "tracker-wandb.json"} == {path.name for path in folder.iterdir()}
    assert (2, {"watch/run/brightness": 0.5}) in library.runs[-1].sent


def test_the_sheet_of_a_rollout_begins_with_the_best_and_the_worst_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many clips, it shows these and the first of the others; samples are spaced evenly."""
    ranked = [f"prompt-{slot:02d}-rank-{rank:02d}" for slot in range(4) for rank in range(1, 5)]
    names = {
        "rollouts": ["best", "worst", "best-color", "worst-color", *ranked],
        "samples": [f"{n:02d}-a" for n in range(20)],
    }
    shown: list[list[str]] = []
    monkeypatch.setattr(tracking, "video_sheet", lambda videos: shown.append([video.stem for video in videos]))
    monkeypatch.setattr(tracking, "read_comment", lambda video: "")
    sent: list[Media] = []
    tracked: Any = SimpleNamespace(log_media=lambda media, *, step: sent.extend(media))
    tracker: Any = SimpleNamespace(send=lambda state, action, *, media: action(tracked))
    state: Any = SimpleNamespace(run_dir=SimpleNamespace(root=tmp_path), step=1)
    for kind, stems in names.items():
        folder = tmp_path / kind / "step-000001"
        folder.mkdir(parents=True)
        for stem in stems:
            (folder / f"{stem}.mp4").touch()
    TrackedMedia(tracker).on_step(state)
    assert shown == [names["samples"], names["rollouts"][:12]]
    assert len(sent) == 20 + 20 + 2
