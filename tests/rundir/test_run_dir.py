"""The run directory: no secrets, no doubled steps, and what a new continuation replaces is set aside."""

import json
import re
import shutil
import stat
from types import SimpleNamespace

import pytest

from finetrainers.config.load import load_config
from finetrainers.rundir import publish
from finetrainers.rundir.find import find_checkpoint
from finetrainers.rundir.manifest import write_manifest
from finetrainers.rundir.run_dir import RunDirectory, without_secrets
from finetrainers.training.callbacks.metrics import RewardFiles
from finetrainers.utils.files import not_a_file


def test_the_hub_token_is_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--hub_token", "SECRET", "--lr", "1", "--hub_token=SECRET"])
    config = load_config(model_name="m", pretrained_model_name_or_path="x", data_root="d", hub_token="SECRET")
    RunDirectory(tmp_path, writes=True).start(config, resumed_step=0)
    assert (tmp_path / "env.json").is_file()
    assert not any("SECRET" in path.read_text() for path in tmp_path.iterdir())
    assert without_secrets(["a", "--hub_token", "S", "b"]) == ["a", "--hub_token", "***", "b"]


def test_later_checkpoints_and_samples_are_set_aside_when_an_older_step_is_continued(tmp_path):
    for step in (3, 6, 12):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step}" / "state.json").write_text("{}")
        write_manifest(tmp_path / "checkpoints" / f"step-{step}", facts={})
        (tmp_path / "samples" / f"step-{step:06d}").mkdir(parents=True)
    records = [{"step": step, "loss": 1.0} for step in range(1, 13)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    config = load_config(model_name="m", pretrained_model_name_or_path="x", data_root="d")
    RunDirectory(tmp_path, writes=True).start(config, resumed_step=6)

    assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoints" / "step-6"
    aside = [p for p in (tmp_path / "checkpoints").iterdir() if p.name.endswith("step-12")]
    assert len(aside) == 1
    assert (aside[0] / "state.json").is_file()
    assert sorted(p.name for p in (tmp_path / "samples").glob("step-*")) == ["step-000003", "step-000006"]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


@pytest.mark.parametrize(
    "damaged",
    [b'{"time": 1.5, "step": 3, "lo', b'{"step": 1, "loss": \xff}', b"[1, 2]", b"17", b'{"loss": 1.0}',
     b'{"step": "a"}',
     b"[" * 100_000, b"\x00\x00"],
)  # fmt: skip
def test_damaged_records_never_stop_a_resume(damaged, tmp_path, caplog):
    """They are put aside, wherever they stand; what comes after them is a line of its own."""
    whole = [json.dumps({"step": step, "loss": 1.0}).encode() for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([whole[0], damaged, *whole[1:], damaged]))
    (tmp_path / "events.jsonl").write_bytes(damaged)
    (tmp_path / "rewards").mkdir()
    config = load_config(model_name="m", pretrained_model_name_or_path="x", data_root="d")
    run_dir = RunDirectory(tmp_path, writes=True)
    run_dir.start(config, resumed_step=3)
    run_dir.metrics({"step": 4, "loss": 2.0})
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines() == [*whole[:3], b'{"step": 4, "loss": 2.0}']
    aside = (tmp_path / "metrics.jsonl.damaged").read_bytes().splitlines()
    assert [line.replace(b" ", b"") for line in aside] == 2 * [damaged.replace(b" ", b"")]
    assert re.search(r" 2 .*metrics\.jsonl .*metrics\.jsonl\.damaged", caplog.text)
    *_, event = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assert json.loads(event)["event"] == "start"
    RewardFiles().on_start(SimpleNamespace(run_dir=run_dir))


def test_records_that_cannot_be_written_never_stop_a_run(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").mkdir()
    config = load_config(model_name="m", pretrained_model_name_or_path="x", data_root="d")
    run_dir = RunDirectory(tmp_path, writes=True)
    run_dir.start(config, resumed_step=3)
    for step in (4, 5):
        run_dir.metrics({"step": step})
    assert re.findall(r"(\S+\.jsonl) .*\((.*)\)", caplog.text) == [
        (str(tmp_path / "metrics.jsonl"), not_a_file(stat.S_IFDIR))
    ]
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        run_dir.metrics({"step": 6})


def test_an_abandoned_branch_does_not_come_back(tmp_path):
    """A process that died while it replaced step 12 left it under another name; then step 6 was continued."""
    for step in (6, 12):
        folder = publish.reserve(tmp_path / "checkpoints" / f"step-{step}", needed=0)
        (folder / "state.json").write_text("{}")
        publish.publish(folder, tmp_path / "checkpoints" / f"step-{step}", facts={"step": step})
    abandoned = tmp_path / "checkpoints" / ".step-12.replaced"
    (tmp_path / "checkpoints" / "step-12").rename(abandoned)
    assert find_checkpoint("latest", tmp_path) == abandoned
    config = load_config(model_name="m", pretrained_model_name_or_path="x", data_root="d")
    RunDirectory(tmp_path, writes=True).start(config, resumed_step=6)
    assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoints" / "step-6"
    publish.reserve(tmp_path / "checkpoints" / "step-8", needed=0)  # which clears up
    assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoints" / "step-6"
    aside = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("replaced-")]
    assert len(aside) == 1


def test_step_time_is_that_of_steps_alone(options, run, monkeypatch):
    import time
    from types import SimpleNamespace

    from finetrainers.training import trainer as module

    save, saving_s = module.save_checkpoint, 0

    def slow_save(*arguments):
        nonlocal saving_s
        saving_s += 1000
        return save(*arguments)

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + saving_s))

    monkeypatch.setattr(module, "save_checkpoint", slow_save)
    done = run(**options("ltx_video", train_steps=4, checkpointing_steps=1, logging_steps=2))
    seconds = [record["step_s"] for record in done.metrics if "step_s" in record]
    assert len(seconds) == 2
    assert saving_s == 4000
    assert all(0 < step_s < 500 for step_s in seconds)
