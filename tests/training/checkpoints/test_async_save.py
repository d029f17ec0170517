"""Checkpoints written in the background equal those written at once, and no error of them is lost."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from finetrainers.config.load import load_config
from finetrainers.optim.ema import EMA
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.rundir.manifest import damage, read_manifest
from finetrainers.runs.training import train
from finetrainers.training.checkpoints import save as saving
from finetrainers.training.checkpoints.async_save import BackgroundSave
from finetrainers.training.staging import Staging, _PinnedCopier, plain_tensors, tensors_in
from finetrainers.training.state import TrainState
from finetrainers.training.trainer import Trainer

BNB = {"optimizer": "adamw-bnb-8bit", "transformer_dtype": "bf16", "text_encoder_dtype": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "lora": {"use_dora": True, "lora_dropout": 0.3},
    "full": {"training_type": "full-finetune", "use_ema": True},
    "8-bit": {"training_type": "full-finetune", **BNB},
    "nft": {
        "method": "nft", "init_same_noise": False, "noise_levels": 2, "sampler": None,
        "reward": ["brightness"], "rollout_size": "9x64x64", "prompts_per_step": 1, "num_generations": 4,
        "batch_size": 4, "sampling_steps": 3, "updates_per_rollout": 1, "data_root": None,
        "video_resolution_buckets": None, "optimizer": "adamw",
    },
}  # fmt: skip


@pytest.fixture
def options(options: Callable[..., dict], tmp_path: Path) -> Callable[..., dict]:
    """The run of a case, saved after its second step of four."""

    def build(name: str, **changes: Any) -> dict:
        values = options(train_steps=4, checkpointing_steps=2) | CASES[name] | changes
        if name == "nft":
            (tmp_path / "prompts.txt").write_text("a red ball\na cat\n")
            values["prompts"] = str(tmp_path / "prompts.txt")
        if values.get("training_type") == "full-finetune":
            values = {option: value for option, value in values.items() if option not in ("rank", "lora_alpha")}
        return {option: value for option, value in values.items() if value is not None}

    return build


@contextmanager
def writer_held_until(step: int) -> Iterator[list[int]]:
    """Within the block, the thread copies after the next update was due, and writes after a later optimizer step.

    The list gets what waited.
    """
    due, reached, held = threading.Event(), threading.Event(), []
    look, log, update, fill = saving.Snapshot.check_finite, Trainer._log, Trainer._update, Staging._fill

    def wait_and_fill(staging: Staging, copies: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert due.wait(60)
            time.sleep(0.1)
        fill(staging, copies)

    def tell_and_update(trainer: Trainer) -> None:
        if trainer.saving.in_flight:
            due.set()
        update(trainer)

    def wait_and_look(snapshot: saving.Snapshot) -> None:
        if threading.current_thread() is not threading.main_thread():
            held.append(snapshot.state["step"])
            assert reached.wait(60)
        look(snapshot)

    def log_and_tell(trainer: Trainer, record: dict[str, float] | None) -> None:
        log(trainer, record)
        if trainer.state.step == step:
            reached.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.Snapshot, "check_finite", wait_and_look)
        patch.setattr(Trainer, "_log", log_and_tell)
        patch.setattr(Trainer, "_update", tell_and_update)
        patch.setattr(Staging, "_fill", wait_and_fill)
        yield held


def saved(root: Path, step: int) -> dict[str, Any]:
    """What is in every file of a whole checkpoint: its bytes.

    safetensors writes a header's metadata in random order, so headers are compared as what they say.
    """
    directory = root / "checkpoints" / f"step-{step}"
    assert damage(directory, contents=True) is None
    found: dict[str, Any] = {}
    for name in read_manifest(directory)["files"]:
        content = (directory / name).read_bytes()
        if name.endswith(".safetensors"):
            end = 8 + struct.unpack("<Q", content[:8])[0]
            found[name + " header"], content = json.loads(content[8:end]), content[end:]
        found[name] = hashlib.sha256(content).hexdigest()
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_the_same(
    name: str, options: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though training has gone on meanwhile as far as it may; and a run continues from it exactly.

    The thread has got the memory since the first step, so that the first save waits no longer than later ones.
    """
    begin, missing = Staging.begin_copy, []

    def noted(staging: Staging, *arguments: Any, **named: Any) -> Any:
        staging._reserved.wait()
        ready = Counter(storage.nbytes() for storage in staging._storages)
        begun = begin(staging, *arguments, **named)
        missing.append(Counter(storage.nbytes() for storage in staging._storages) - ready)
        return begun

    monkeypatch.setattr(Staging, "begin_copy", noted)
    at_once, later = tmp_path / "at once", tmp_path / "later"
    train(load_config(**options(name, output_dir=str(at_once))))
    values = options(name, output_dir=str(later), async_checkpointing=True)
    with writer_held_until(3) as held:
        train(load_config(**values))
    assert held == [2]  # the last one is not written in the background
    assert missing == [Counter()]
    expected = {step: saved(at_once, step) for step in (2, 4)}
    assert {"state.json", "optimizer.pt"} < expected[2].keys()
    assert ("ema.safetensors" in expected[2]) == (name == "full")
    assert ("method.safetensors" in expected[2]) == (name == "nft")
    assert expected[2]["optimizer.pt"] != expected[4]["optimizer.pt"]
    assert {step: saved(later, step) for step in (2, 4)} == expected
    train(load_config(**values, resume_from_checkpoint="2"))
    resumed = saved(later, 4)
    if "transformer/config.json" in resumed:  # diffusers notes the folder that the network came from
        del resumed["transformer/config.json"], expected[4]["transformer/config.json"]
    assert resumed == expected[4]


def test_one_at_a_time_and_all_before_a_stop(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Saved after each step, by a writer slower than the steps; pruned, measured; stopped with the last one whole."""
    publish, wait = saving.publish, BackgroundSave.wait
    writing, waited_for, writers = threading.Semaphore(1), threading.Event(), []

    def slow(*arguments: Any, **named: Any) -> None:
        assert writing.acquire(blocking=False), "two saves at once"
        writers.append(threading.current_thread().name)
        if writers[-1] != "MainThread":
            assert waited_for.wait(60)
            waited_for.clear()
            time.sleep(0.2)
        publish(*arguments, **named)
        writing.release()

    def wait_and_tell(saving: BackgroundSave) -> bool:
        if saving.in_flight:
            waited_for.set()
        return wait(saving)

    monkeypatch.setattr(saving, "publish", slow)
    monkeypatch.setattr(BackgroundSave, "wait", wait_and_tell)
    log = Trainer._log

    def log_and_ask(trainer: Trainer, record: dict[str, float] | None) -> None:
        log(trainer, record)
        if trainer.state.step == 3:
            (tmp_path / "run" / "control" / "stop").touch()

    monkeypatch.setattr(Trainer, "_log", log_and_ask)
    values = options("lora", checkpointing_steps=1, checkpointing_limit=2, async_checkpointing=True, train_steps=9)
    done = run(**values)
    assert done.state.stopped_by == "control/stop"
    assert [found.step for found in scan_checkpoints(done.root) if found.damage is None] == [2, 3]
    assert writers == ["checkpoint_0", "checkpoint_0", "MainThread"]
    events = {kind: [e for e in done.events if e["event"] == kind] for kind in ("checkpoint", "checkpoint_waited")}
    assert [e["step"] for e in events["checkpoint"]] == [1, 2, 3]
    assert [e["step"] for e in events["checkpoint_waited"]] == [2, 3]
    assert all(e["write_s"] >= 0.2 for e in events["checkpoint"][:2])
    blocked = [e["blocked_s"] for e in events["checkpoint"]]
    assert min(blocked[1:]) >= 0.2  # both waited for the one before
    # Records come before the step's own save: each has what the one before it held up.
    records = [record.get("checkpoint_s") for record in done.metrics if "loss" in record]
    assert records[0] is None
    assert all(record + 1e-3 >= seconds for record, seconds in zip(records[1:], blocked, strict=False))


@pytest.mark.parametrize("fault", ["disk", "nan"])
def test_an_error_of_the_writer_ends_the_run(
    fault: str, options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_weights, snapshot = saving.save_weights, saving.take_snapshot

    def fail_at_two(directory: Path, **arguments: Any) -> Any:
        written = save_weights(directory, **arguments)
        if fault == "disk" and directory.name == ".step-2.tmp":
            raise OSError("no space left on device")
        return written

    def poison(state: Any) -> Any:
        taken = snapshot(state)
        if fault == "nan" and state.step == 2:
            next(iter(taken.trained.values())).view(-1)[0] = float("nan")
        return taken

    monkeypatch.setattr(saving, "save_weights", fail_at_two)
    monkeypatch.setattr(saving, "take_snapshot", poison)
    values = options(
        "lora", checkpointing_steps=1, checkpointing_limit=2, async_checkpointing=True, on_nonfinite="skip"
    )
    expected = {"disk": (OSError, "no space left"), "nan": (FloatingPointError, r"holds NaN or Inf at step 2")}[fault]
    with pytest.raises(expected[0], match=expected[1]):
        run(**values)
    root = Path(values["output_dir"])
    # Not only at the end, and nothing is published, pruned, or left lying about.
    assert len((root / "metrics.jsonl").read_text().splitlines()) in (2, 3)
    assert [path.name for path in (root / "checkpoints").iterdir()] == ["step-1"]
    saved(root, 1)


@pytest.mark.rotating
@pytest.mark.parametrize("writer_fails", [False, True])
def test_a_run_that_breaks_off_lets_the_writer_finish(
    writer_fails: bool,
    options: Callable[..., dict],
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save, publish = saving.save_checkpoint, saving.publish

    def save_and_stop(*arguments: Any) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    def slow(*arguments: Any, **named: Any) -> None:
        time.sleep(0.3)
        if writer_fails:
            raise OSError("disk gone")
        publish(*arguments, **named)

    monkeypatch.setattr("finetrainers.training.trainer.save_checkpoint", save_and_stop)
    monkeypatch.setattr(saving, "publish", slow)
    values = options("lora", async_checkpointing=True)
    with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
        run(**values)
    root = Path(values["output_dir"])
    assert [path.name for path in (root / "checkpoints").iterdir()] == ([] if writer_fails else ["step-2"])
    failures = [record for record in caplog.records if "step-2 failed" in record.getMessage()]
    assert len(failures) == writer_fails
    if writer_fails:
        assert "disk gone" in str(failures[0].exc_info)


def test_room_is_looked_for_before_anything_is_copied(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([2**40, 1000])  # at the start, and before the checkpoint
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free)))
    monkeypatch.setattr(saving.Snapshot, "on_host", lambda self: pytest.fail("copied"))
    with pytest.raises(OSError, match="checkpoints") as refusal:
        run(**options("lora", async_checkpointing=True))
    assert refusal.value.errno == errno.ENOSPC


# ---- copies -------------------------------------------------------------------------------------------------------


def pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def low_bit_states() -> dict[str, Tensor]:
    """The states of torchao's optimizers, with something in them."""
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    values = torch.linspace(-1, 1, 1024).view(32, 32)
    states = {
        "4": OptimState4bit.zeros((32, 32), signed=True, block_size=128),
        "8": OptimState8bit.zeros((32, 32), signed=True, block_size=256),
        "fp8": OptimStateFp8.zeros((32, 32), block_size=256),
    }
    for state in states.values():
        state.copy_(values)
    return states


def test_copies_go_through_two_buffers_of_a_fixed_size() -> None:
    """As from a GPU: larger and smaller than a buffer, many in one, and none."""
    staging = _PinnedCopier(torch.device("cpu"), buffer_bytes=16)
    sources = [torch.randint(256, (n,), dtype=torch.uint8) for n in (3, 0, 13, 16, 1, 40, 15, 2, 2, 2, 33)]
    targets = [torch.zeros_like(source) for source in sources]
    for source, target in zip(sources, targets, strict=True):
        staging.copy(source, target)
    staging.finish()
    assert all(map(torch.equal, targets, sources))


def test_copies_are_written_as_their_originals_are() -> None:
    base = torch.arange(24.0).view(4, 6)
    table = torch.randn(16)
    paged = torch.ones(3)
    paged.is_paged = True  # type: ignore[attr-defined]
    value = {
        "turned": base.t(), "row": base[1], "step": torch.tensor(3.0), "empty": torch.empty(0), "low": low_bit_states(),
        "shared": [table, {"again": table, "view": table.view(4, 4)}], "paged": paged, "betas": (0.9, 0.99),
        "none": None,
        "bf16": torch.ones(2, dtype=torch.bfloat16), "nested": {0: {"lr": 1e-3, "params": [0, 1]}},
    }  # fmt: skip
    before = pickled(value)
    staging = Staging()
    copied, fill = staging.begin_copy(value)
    fill()
    assert pickled(copied) == before
    # A change of any original shows in the original only.
    for tensor in tensors_in(value):
        for part in plain_tensors(tensor):
            part.copy_(torch.zeros_like(part))
    value["betas"] = (0, 0)
    assert pickled(value) != before
    assert pickled(copied) == before
    assert copied["shared"][0] is copied["shared"][1]["again"]
    assert type(copied["low"]["4"]) is type(value["low"]["4"])  # type: ignore[index]
    # The next copy is in the same memory, and one of other sizes is made, too.
    places = {part.untyped_storage().data_ptr() for tensor in tensors_in(copied) for part in plain_tensors(tensor)}
    now = pickled(value)
    again, fill = staging.begin_copy(value)
    fill()
    assert pickled(again) == now
    assert {p.untyped_storage().data_ptr() for t in tensors_in(again) for p in plain_tensors(t)} == places
    other, fill = staging.begin_copy({"one": torch.arange(100.0), "table": torch.arange(16.0)})
    fill()
    assert other["one"].tolist() == list(range(100))
    assert other["table"].tolist() == list(range(16))


def test_memory_of_the_first_copy_is_got_before_it() -> None:
    table = torch.arange(1000.0)
    value = {"table": table, "view": table[:10], "one": torch.ones(3)}
    staging = Staging()
    get = staging.reserve(value)
    thread = threading.Timer(0.2, get)
    thread.start()
    copied, fill = staging.begin_copy(value)  # waits
    assert not thread.is_alive() or staging._reserved.is_set()
    fill()
    assert pickled(copied) == pickled(value)
    staging = Staging()
    staging.reserve(value)()
    places = {storage.data_ptr() for storage in staging._storages}
    copied, fill = staging.begin_copy(value)
    fill()
    assert {tensor.untyped_storage().data_ptr() for tensor in copied.values()} == places
    assert len(places) == 2


def test_what_was_gathered_is_not_copied_again() -> None:
    """Of one process's own tensors, as in groups of one, there is a copy all the same."""
    own, moment = torch.ones(3), torch.ones(3)
    trained = {"gathered": torch.zeros(4), "own": own, "view": own[:2]}
    optimizer = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": moment}}, "param_groups": [{"params": [0]}]}
    snapshot = saving.Snapshot({}, trained, dict, {"ema.safetensors": {"a": torch.ones(2)}}, optimizer, {})
    spare = saving.gathered(snapshot, [{"a.weight": own}, {"state": {7: {"exp_avg": moment}}}])
    copied, fill = snapshot.on_host(Staging(), unshared=spare)
    fill()
    assert copied.optimizer is not None
    state = copied.optimizer["state"][0]
    assert copied.trained["gathered"] is trained["gathered"]
    assert state["step"] is optimizer["state"][0]["step"]  # type: ignore[index]
    own.zero_()
    moment.zero_()
    snapshot.files["ema.safetensors"]["a"].zero_()
    assert copied.trained["own"].tolist() == [1, 1, 1]
    assert copied.trained["view"].tolist() == [1, 1]
    assert state["exp_avg"].tolist() == [1, 1, 1]
    assert copied.files["ema.safetensors"]["a"].tolist() == [1, 1]


def test_what_changes_weights_waits_for_the_copy() -> None:
    weight = torch.zeros(3)
    staging, averages = Staging(), EMA({"weight": torch.nn.Parameter(weight)}, decay=0.9)
    averages.weights["weight"].fill_(2)
    copied, fill = staging.begin_copy(
        {"weight": weight, "old": averages.weights["weight"]}, copied_first=averages.weights["weight"]
    )
    assert copied["old"].tolist() == [2, 2, 2]  # already
    state = SimpleNamespace(staging=staging, ema=averages)
    thread = threading.Timer(0.2, fill)
    thread.start()
    with TrainState.ema_applied(state):  # type: ignore[arg-type]
        assert weight.tolist() == [2, 2, 2]
    thread.join()
    assert copied["weight"].tolist() == [0, 0, 0]
    assert staging.waited_s > 0.05
    assert staging.wait() == 0


def test_an_error_of_the_copy_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging()
    _, fill = staging.begin_copy([torch.zeros(3)])
    monkeypatch.setattr(np, "copyto", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fill()
    assert staging.wait() == 0
