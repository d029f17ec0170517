"""Options that must not change what is learnt: how a step is cut up, cached or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES
from torch._dynamo import config as dynamo

from finetrainers.memory.count import cuda_autocast
from finetrainers.models import compiling

#: Adam divides by the gradient's own size, which turns rounding of near-zero gradients into whole steps; this does not.
SMOOTH = {"epsilon": 1e-3, "max_grad_norm": 0.02, "lr": 1e-2}


def compare(runs: list[Any], *, rtol: float = 1e-5) -> None:
    """The curves and the final weights of all runs are equal up to rounding."""
    first, *others = runs
    curve = torch.tensor(first.curve("loss", "grad_norm"))
    weights = first.weights
    for other in others:
        torch.testing.assert_close(torch.tensor(other.curve("loss", "grad_norm")), curve, rtol=rtol, atol=0)
        assert weights.keys() == other.weights.keys()
        for name, value in other.weights.items():
            torch.testing.assert_close(value, weights[name], rtol=rtol, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("clips", "cuts", "training_type"),
    [(4, [(4, 1), (1, 4), (2, 2)], "lora"), (5, [(5, 1), (2, 3)], "full-finetune"), (5, [(5, 1), (2, 3)], "lora")],
)
def test_accumulation_is_a_larger_batch(
    clips: int,
    cuts: list[tuple[int, int]],
    training_type: str,
    options: Callable[..., dict],
    run: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Clipped once, by the norm of the whole step's gradient; in the second case batches are uneven."""
    runs = [
        run(
            **options(
                clips=clips,
                train_steps=2,
                batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                training_type=training_type,
                output_dir=str(tmp_path / f"{batch_size}x{accumulation}"),
                **SMOOTH,
            )
        )
        for batch_size, accumulation in cuts
    ]
    compare(runs)
    norms = [norm for _, norm in runs[0].curve("grad_norm")]
    assert min(norms) > SMOOTH["max_grad_norm"], "clipping must have had an effect"


def test_clipping_bounds_the_step(options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path) -> None:
    free = run(**options(train_steps=2, output_dir=str(tmp_path / "a"), **{**SMOOTH, "max_grad_norm": 0.0}))
    clipped = run(**options(train_steps=2, output_dir=str(tmp_path / "b"), **SMOOTH))
    # The norm that is recorded is the one before clipping, with or without clipping.
    assert free.curve("loss", "grad_norm")[0] == pytest.approx(clipped.curve("loss", "grad_norm")[0])
    assert free.curve("loss")[1] != clipped.curve("loss")[1]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("family", "version", "changes"),
    [
        ("ltx_video", None, {"batch_size": 2, "caption_dropout_p": 0.5, "first_frame_conditioning_p": 0.5}),
        ("hunyuan_video", None, {"caption_dropout_p": 0.5, "caption_dropout_technique": "zero"}),
        # Noise of the first frame is drawn once per clip there, and once per epoch here.
        ("cogvideox", "i2v", {"eval_num_items": 1, "eval_steps": 2, "first_frame_noise": False}),
        ("cogvideox", "control", {"eval_num_items": 1, "eval_steps": 2}),
        # Windows of 5 frames, whose latents and those of their control videos are cut from those of the whole clip.
        ("cogvideox", "control", {"sliding_window_size": 5, "sliding_window_latents": "slice"}),
    ],
)
def test_precomputing(
    family: str,
    version: str | None,
    changes: dict[str, Any],
    options: Callable[..., dict],
    run: Callable[..., Any],
    tmp_path: Path,
) -> None:
    runs = [
        run(
            **options(
                family, version=version, clips=3, precompute_conditions=cached, output_dir=str(tmp_path / str(cached)),
                train_steps=2, **changes, **SMOOTH,
            )
        )
        for cached in (False, True)
    ]  # fmt: skip
    compare(runs, rtol=1e-4)
    if "eval_steps" in changes:
        evaluations = [[r["eval_loss"] for r in done.metrics if "eval_loss" in r] for done in runs]
        assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(
    family: str, options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """Dropout included: what is recomputed is what was computed."""
    compare(
        [
            run(
                **options(
                    family, train_steps=2, lora_dropout=0.5, gradient_checkpointing=on,
                    output_dir=str(tmp_path / str(on)), **SMOOTH,
                )
            )
            for on in (False, True)
        ]
    )  # fmt: skip


def test_loading_workers(options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path) -> None:
    """Worker processes give the same batches, random starts included."""
    runs = [
        run(
            **options(
                clips=3, batch_size=2, dataloader_num_workers=workers, frame_selection="random",
                video_reshape_mode="random", video_resolution_buckets=["1x32x32"],
                output_dir=str(tmp_path / str(workers)),
            )
        )
        for workers in (0, 1)
    ]  # fmt: skip
    assert runs[0].curve("loss", "grad_norm") == runs[1].curve("loss", "grad_norm")


def test_logging_less_often(options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path) -> None:
    every = run(**options(train_steps=5, output_dir=str(tmp_path / "a")))
    some = run(**options(train_steps=5, logging_steps=2, output_dir=str(tmp_path / "b")))
    (_, a), (_, b), (_, c), (_, d), (_, e) = every.curve("loss")
    assert some.curve("loss") == [(2, (a + b) / 2), (4, (c + d) / 2), (5, e)]
    assert all(every.weights[name].equal(tensor) for name, tensor in some.weights.items())


@pytest.mark.rotating
@pytest.mark.parametrize("training_type", ["lora", "full-finetune"])
def test_compiling(
    training_type: str,
    options: Callable[..., dict],
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiled network is a wrapper with prefixed names, which must not reach checkpoints, results or resuming."""
    values = options(training_type=training_type, train_steps=2, checkpointing_steps=1, use_ema=True)
    plain = run(**{**values, "output_dir": str(tmp_path / "plain")})
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")  # traced, not generated: the names are the same
    compiled = run(**{**values, "output_dir": str(tmp_path / "compiled")})
    assert type(compiled.state.transformer).__name__ == "OptimizedModule"
    (tmp_path / "compiled" / "checkpoints" / "step-2").rename(tmp_path / "unused")
    resumed = run(**{**values, "output_dir": str(tmp_path / "compiled"), "resume_from_checkpoint": "latest"})
    for other in (compiled, resumed):
        assert other.weights.keys() == plain.weights.keys()
        for name, tensor in plain.weights.items():
            torch.testing.assert_close(other.weights[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lora_without_autocast(
    family: str, options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """As close to fp32 as under autocast, on a CPU and as on CUDA."""

    kept_in_fp32: list[str] = []

    def curve(name: str, **changes: Any) -> torch.Tensor:
        done = run(**options(family, train_steps=2, output_dir=str(tmp_path / name), **{**SMOOTH, **changes}))
        assert {weight.dtype for weight in done.weights.values()} == {torch.float32}
        kept_in_fp32[:] = done.state.network._keep_in_fp32_modules or []
        return torch.tensor(done.curve("loss", "grad_norm"))

    exact = curve("fp32")
    without = curve("without", transformer_dtype="bf16", lora_autocast=False)
    torch.testing.assert_close(without, exact, rtol=2e-2, atol=0)
    # A CPU's autocast leaves norms in bf16: nothing else differs, but where a network computes them in fp32 by itself.
    # CUDA's computes them in fp32.
    on_cpu = curve("cpu", transformer_dtype="bf16")
    if not kept_in_fp32:
        assert torch.equal(on_cpu, without)
    torch.testing.assert_close(on_cpu, exact, rtol=2e-2, atol=0)
    with cuda_autocast():
        under = curve("cuda", transformer_dtype="bf16")
    assert not torch.equal(under, without)
    torch.testing.assert_close(under, exact, rtol=2e-2, atol=0)


@pytest.mark.rotating
def test_compiled_blocks_and_a_chosen_attention_backend(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, results and samples are those of a plain run, a resumed run takes the same steps, and names stay."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")  # traced, not generated
    values = options(
        train_steps=2, checkpointing_steps=1, gradient_checkpointing=True, validation_prompts="a@@@1x32x32",
        validation_steps=2, validation_inference_steps=2, first_frame_conditioning_p=1.0,
    )  # fmt: skip
    # With a first frame in every step, as compiled blocks are given noise levels per token in every step.
    plain = run(**{**values, "output_dir": str(tmp_path / "plain")})
    values |= {"compile": "regional", "attn_backend": "native", "output_dir": str(tmp_path / "compiled")}
    with dynamo.patch(recompile_limit=8, accumulated_recompile_limit=256, optimize_ddp=True):
        compiled = run(**values)
        (tmp_path / "compiled" / "checkpoints" / "step-2").rename(tmp_path / "unused")
        resumed = run(**{**values, "resume_from_checkpoint": "latest"})
    torch._dynamo.reset()
    blocks = [*compiled.state.network.transformer_blocks]
    assert all(block._compiled_call_impl is not None for block in blocks)
    assert type(blocks[0].attn1.processor).__name__ == "LTXAttnProcessor"
    for other in (compiled, resumed):
        assert other.curve("loss", "grad_norm")[-1] == plain.curve("loss", "grad_norm")[-1]
        assert other.weights.keys() == plain.weights.keys()
        assert all(torch.equal(other.weights[name], tensor) for name, tensor in plain.weights.items())
    samples = [next(one.root.rglob("*.mp4")).read_bytes() for one in (plain, compiled)]
    assert samples[0] == samples[1]
