"""A step that runs out of memory is made again in smaller micro-batches; dry batches leave nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from finetrainers.config.load import load_config
from finetrainers.config.sections import OptimizerSection
from finetrainers.methods.base import Step
from finetrainers.methods.grpo.method import GRPO
from finetrainers.methods.grpo.rollout.batches import Part
from finetrainers.methods.registry import load_method
from finetrainers.methods.sft import SFT
from finetrainers.optim.schedules import Schedule
from finetrainers.plan.preflight import preflight
from finetrainers.runs.run import run as run_checked
from finetrainers.training import assemble, memory_probe
from finetrainers.training.callbacks.base import Callback
from finetrainers.training.guards.memory import MemoryGuard, OutOfMemory, is_out_of_memory
from finetrainers.training.trainer import Trainer


def short_of_memory(patch: pytest.MonkeyPatch, method: type, *, fits: int, after: int = 0) -> list[int]:
    """The loss of more samples than `fits` fails, but for the first calls; the sizes of all calls."""
    loss, sizes = method.loss, []  # type: ignore[attr-defined]

    def limited(self: Any, transformer: Any, batch: Any) -> Any:
        size = len(batch) if isinstance(self, SFT) else len(batch.share)
        sizes.append(size)
        found = loss(self, transformer, batch)
        if size > fits and len(sizes) > after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return found

    patch.setattr(method, "loss", limited)
    return sizes


def keep_gradients(patch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """The gradients of every update."""
    update, kept = Trainer._update, []

    def keep(trainer: Trainer) -> None:
        kept.append([p.grad.clone() for p in trainer.state.network.parameters() if p.requires_grad])
        update(trainer)

    patch.setattr(Trainer, "_update", keep)
    return kept


def assert_close(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> None:
    """Equal up to rounding, relative to the largest number of the whole gradient."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        scale = max(float(tensor.abs().max()) for tensor in other)
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * scale)


def test_smaller_micro_batches_have_the_same_gradient(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    # Four clips of a bucket, and a fifth in a batch of its own; epsilon keeps Adam from magnifying rounding.
    values = options(clips=5, batch_size=4, train_steps=3, gradient_accumulation_steps=1, epsilon=1e-3, max_grad_norm=0)
    with pytest.MonkeyPatch.context() as patch:
        expected = keep_gradients(patch)
        whole = run(**values)
    with pytest.MonkeyPatch.context() as patch:
        kept, sizes = keep_gradients(patch), short_of_memory(patch, SFT, fits=1)
        split = run(**{**values, "output_dir": str(tmp_path / "split")})
    assert_close(kept, expected)
    # 4 does not fit, nor 2; then it is known, and the single clip stays whole.
    assert sizes in ([4, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 4, 2, 1, 1, 1, 1, 1, 1, 1, 1])
    for (_, a), (_, b) in zip(split.curve("loss"), whole.curve("loss"), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    found = [e for e in split.events if e["event"] == "out_of_memory"]
    assert [(e["latent_size"], e["samples"], e["now"]) for e in found] == [("2x2x2", 4, 2), ("2x2x2", 2, 1)]
    state = json.loads((split.root / "checkpoints" / "step-3" / "state.json").read_text())
    assert [size for _, size in state["guards"]["fits"]] == [1]


def test_gradients_from_before_the_failure_are_dropped(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = options(clips=4, batch_size=2, train_steps=1, gradient_accumulation_steps=2, max_grad_norm=0)
    with pytest.MonkeyPatch.context() as patch:
        expected = keep_gradients(patch)
        run(**values)
    with pytest.MonkeyPatch.context() as patch:
        kept, sizes = keep_gradients(patch), short_of_memory(patch, SFT, fits=1, after=1)
        split = run(**{**values, "output_dir": str(tmp_path / "split")})
    assert sizes == [2, 2, 1, 1, 1, 1]
    [record] = (record for record in split.metrics if "step_s" in record)
    assert record["tokens_per_s"] * record["step_s"] == pytest.approx(4 * 8), "what failed is no throughput"
    assert_close(kept, expected)


def test_one_sample_that_does_not_fit_ends_the_run_with_advice(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = short_of_memory(monkeypatch, SFT, fits=0)
    with pytest.raises(OutOfMemory, match=r"one sample.*--gradient_checkpointing"):
        run(**options(clips=2, batch_size=2))
    assert sizes == [2, 1]
    with pytest.raises(OutOfMemory, match="--oom_retry is off"):
        run(**options(clips=2, batch_size=2, oom_retry="off", output_dir=str(tmp_path / "off")))


NCCL = (
    "NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call to CUDA failed.\n"
    "Last error:\nCuda failure 2 'out of memory'"
)


#: Errors of allocators, with the texts of torch and of CUDA's libraries; and errors of others.
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),  # page-locked memory, or a context
    dist.DistBackendError(NCCL),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    MemoryError(),
]
OTHERS = [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_what_counts_as_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_what_does_not_count_as_out_of_memory() -> None:
    assert [is_out_of_memory(error) for error in OTHERS] == [False, False]
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(real.value)


def test_a_communicator_that_ran_out_of_memory_is_not_tried_again() -> None:
    """NCCL has given it up by then: a second try would wait for ever."""
    guard = MemoryGuard(parallel=None, run_dir=None, refusal=None)  # type: ignore[arg-type]
    step = Step([Part([0, 1], [0.5, 0.5], repeat=0, update=0, is_first=True)])
    with pytest.raises(dist.DistBackendError), next(guard.attempts(step)):
        raise dist.DistBackendError(NCCL)


def fail(*_: Any, **__: Any) -> Any:
    raise torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")


def train(trainer: Any) -> None:
    """Begin as `Trainer.run` does."""
    with Trainer._running(trainer):
        Trainer._begin(trainer)


#: Where memory may run out besides forward and backward: what is called, and the parts of the state that it meets.
ELSEWHERE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "exchanging and clipping gradients": (
        lambda trainer: Trainer.train_step(trainer, Step([None])),
        {"guards": None, "step": 0, "optimizer": SimpleNamespace(param_groups=[]),
         "parallel": SimpleNamespace(all_reduce=fail)},
    ),
    "updating the weights": (
        Trainer._update,
        {"config": SimpleNamespace(training=SimpleNamespace(seed=0)), "step": 0,
         "parallel": SimpleNamespace(device=torch.device("cpu")), "optimizer": SimpleNamespace(step=fail),
         "staging": SimpleNamespace(wait=lambda: 0.0)},
    ),
    "saving a checkpoint": (
        Trainer._save_if_due,
        {"requests": SimpleNamespace(save=True), "method": SimpleNamespace(can_stop_after=fail), "step": 0,
         "is_last_step": False, "config": SimpleNamespace(training=SimpleNamespace(checkpointing_steps=0))},
    ),
    "sampling or evaluating": (
        Trainer._sample_if_due,
        {"requests": SimpleNamespace(sample=False), "watchdog": SimpleNamespace(enter=lambda _: None)},
    ),
    "training": (
        train,
        {"requests": SimpleNamespace(watched=nullcontext), "step": 0, "total_steps": 0, "wants_samples": False,
         "watchdog": SimpleNamespace(enter=lambda _: None),
         "memory": SimpleNamespace(begin_training=lambda: None)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("doing", ELSEWHERE)
def test_memory_that_runs_out_elsewhere_is_named_with_advice(doing: str) -> None:
    call, parts = ELSEWHERE[doing]
    advice = "host memory" if "saving" in doing else "--gradient_checkpointing"
    trainer = Trainer.__new__(Trainer)
    vars(trainer).update(
        state=SimpleNamespace(**parts),
        callbacks=[type("Failing", (Callback,), {"on_start": fail, "on_step": fail})()],
        schedule=Schedule(lambda _: 0.0),
        _attempts=lambda _: [],
        _log=None,
        _blocked_s=0.0,
        _hardware=None,
        _call_on_stop=nullcontext,
        _save_on_interrupt=nullcontext,
        saving=SimpleNamespace(running=nullcontext),
    )
    with pytest.raises(OutOfMemory, match=rf" {doing} \(.*{advice}") as refusal:
        call(trainer)
    cause = str(refusal.value.__cause__).splitlines()
    assert f"({cause[0]})" in str(refusal.value)
    assert cause[1] not in str(refusal.value)


def test_room_for_the_optimizer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(
        parallel=SimpleNamespace(optimizer_device=torch.device("cuda"), optimizer_shards=1),
        config=SimpleNamespace(optimizer=OptimizerSection(optimizer="adamw")),
        transformer=torch.nn.Linear(1024, 1024),
        optimizer=None,
    )
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(OutOfMemory, match=r" 0\.01 GiB .*8-bit"):
        memory_probe._reserve_optimizer_memory(state)  # type: ignore[arg-type]


def test_loading_that_runs_out_of_memory_says_so() -> None:
    checked, parallel = (
        SimpleNamespace(config=None, plan=None, start=None),
        SimpleNamespace(is_main=True, describe=fail),
    )
    with pytest.raises(OutOfMemory, match=r"loading .*--enable_tiling"):
        assemble.assemble(checked, parallel, None, None)  # type: ignore[arg-type]


def test_parts_have_all_clips_and_as_many_pieces_as_asked_for() -> None:
    part = Part([5, 6, 7], [0.1, 0.2, 0.3], repeat=0, update=0, is_first=True)
    for pieces in (1, 2, 3, 5):
        found = part.split(pieces)
        assert len(found) == pieces
        assert [piece.is_first for piece in found] == [True] + [False] * (pieces - 1)
        real = [(c, s) for piece in found for c, s in zip(piece.clips, piece.shares, strict=True) if s]
        assert real == [(5, 0.1), (6, 0.2), (7, 0.3)]
        assert all(piece.clips for piece in found)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 2, "on_nonfinite": "skip", "lora_dropout": 0.3}]
)
def test_dry_batches_change_nothing(
    changes: dict[str, Any], options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = options(clips=3, batch_size=2, train_steps=2, **changes)
    plain = run(**values)
    dry = run(**{**values, "output_dir": str(tmp_path / "dry")}, dry_batches="on")
    assert dry.curve("loss", "grad_norm") == plain.curve("loss", "grad_norm")
    assert all(dry.weights[name].equal(tensor) for name, tensor in plain.weights.items())
    found = [(e["size"], e["samples"]) for e in dry.events if e["event"] == "dry_batch"]
    assert found == [("9x64x64", 2)] + ([("9x64x64, accumulated", 2)] if changes else [])
    assert not [e for e in plain.events if e["event"] == "dry_batch"]


def test_what_does_not_fit_is_found_by_a_dry_batch(
    options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = short_of_memory(monkeypatch, SFT, fits=1)
    done = run(**options(clips=2, batch_size=2, train_steps=1, dry_batches="on"))
    assert sizes == [2, 1, 1, 1, 1]
    kinds = [e["event"] for e in done.events]
    assert kinds.index("out_of_memory") < kinds.index("dry_batch") < kinds.index("checkpoint")


@pytest.mark.rotating
@pytest.mark.parametrize(
    "changes",
    [
        {"grpo_preset": "dancegrpo", "best_of_n": 4},
        {"method": "nft", "noise_levels": 2, "init_same_noise": False},
        {"method": "awm", "noise_levels": 2, "init_same_noise": False, "kl_coef": 0.1},
    ],
)
def test_reward_finetuning_in_smaller_micro_batches(
    changes: dict[str, Any], tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ball\na blue cube rolls\n")

    def reward_run(name: str, **more: Any) -> None:
        checked = preflight(
            load_config(
                model_name="ltx_video", pretrained_model_name_or_path=str(tiny_repo("ltx_video")),
                prompts=str(prompts), reward=["brightness"], rollout_size="9x64x64", prompts_per_step=2,
                num_generations=4, batch_size=4, sampling_steps=4, transformer_dtype="fp32", vae_dtype="fp32",
                text_encoder_dtype="fp32", optimizer="adamw", lr=1e-2, rank=4, lora_alpha=8, train_steps=1,
                updates_per_rollout=1, max_grad_norm=0, output_dir=str(tmp_path / name),
                **{"method": "grpo", **changes}, **more,
            )
        )  # fmt: skip
        run_checked(checked)

    method: Any = GRPO
    if "method" in changes:
        method = load_method(changes["method"])
    with pytest.MonkeyPatch.context() as patch:
        expected = keep_gradients(patch)
        reward_run("whole")
    with pytest.MonkeyPatch.context() as patch:
        kept, sizes = keep_gradients(patch), short_of_memory(patch, method, fits=2)
        reward_run("split", dry_batches="on")
    assert_close(kept, expected)
    assert set(sizes) == {4, 2}
    assert sizes.count(4) == 1  # found by the dry batch, remembered
    lines = [json.loads(line) for line in (tmp_path / "split" / "metrics.jsonl").read_text().splitlines()]
    plain = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["reward/brightness"] == plain[0]["reward/brightness"]
    assert lines[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-4, abs=1e-6)
