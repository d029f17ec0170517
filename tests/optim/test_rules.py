"""Combinations of optimizer options: what is refused, what is only said, and what passes in silence."""

from __future__ import annotations

from typing import get_args

import pytest

from finetrainers.config.load import load_config
from finetrainers.config.sections import OptimizerName
from finetrainers.optim import table
from finetrainers.optim.rules import optimizer_problems

MODEL = {"model_name": "ltx_video", "pretrained_model_name_or_path": "somewhere"}
OFFLOAD = {"optimizer": "adamw", "use_cpu_offload_optimizer": True, "max_grad_norm": 0.0}
ROUNDING = {"optimizer": "adamw", "training_type": "full-finetune", "master_weights": "stochastic_rounding"}


def problems(device_type: str = "cpu", num_processes: int = 1, **options: object) -> tuple[list[str], list[str]]:
    config = load_config(**MODEL, **options)
    errors, warnings = optimizer_problems(config, device_type=device_type, num_processes=num_processes)
    return [str(error) for error in errors], warnings


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_may_run_on_cpu(name: str) -> None:
    """The factory's tests step each of them there."""
    assert problems(optimizer=name, lr=1.0 if name == "prodigy" else 1e-4)[0] == []


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_but_deepspeeds_may_run_on_cuda(name: str) -> None:
    errors, _ = problems("cuda", optimizer=name)
    assert bool(errors) == (name == "adamw-deepspeed-cpu")


@pytest.mark.parametrize(
    ("device", "options", "where", "message"),
    [
        ("cpu", {"optimizer": "lion", "use_8bit_bnb": True}, "--use_8bit_bnb", "adam or adamw, got 'lion'"),
        ("cpu", {"optimizer": "adamw", "beta3": 0.9}, "--beta3", "use one of prodigy, came"),
        ("cpu", {"optimizer": "came", "lr": 0.0}, "--lr", "came refuses 0"),
        ("cpu", {"optimizer": "muon", "training_type": "full-finetune"}, "--optimizer", "biases and norms"),
        ("cpu", {"optimizer": "muon", "use_dora": True}, "--optimizer", "trains vectors"),
        ("cuda", {"optimizer": "adamw-deepspeed-cpu"}, "--optimizer", "deepspeed_zero2_offload.yaml"),
        ("cpu", {**ROUNDING, "optimizer": "adam"}, "--master_weights", "needs one of adamw, adamw-torchao-8bit"),
        ("cpu", {**ROUNDING, "transformer_dtype": "fp32"}, "--master_weights", "use --transformer_dtype bf16"),
        ("cuda", {**ROUNDING, **OFFLOAD}, "--master_weights", "does not go with --use_cpu_offload_optimizer"),
        ("cpu", {"offload_gradients": True}, "--offload_gradients", "needs --use_cpu_offload_optimizer"),
        ("cpu", OFFLOAD, "--use_cpu_offload_optimizer", "needs a CUDA or XPU device, and this run is on cpu"),
        ("cuda", {**OFFLOAD, "optimizer": "came"}, "--use_cpu_offload_optimizer", "got --optimizer came"),
        ("cuda", {**OFFLOAD, "use_8bit_bnb": True}, "--use_cpu_offload_optimizer", "got --use_8bit_bnb"),
        ("cuda", {**OFFLOAD, "max_grad_norm": 1.0}, "--use_cpu_offload_optimizer", "use --max_grad_norm 0"),
        ("cuda", {**OFFLOAD, "mixed_precision": "fp16"}, "--use_cpu_offload_optimizer", "use --mixed_precision bf16"),
        (
            "cuda", {**OFFLOAD, "offload_gradients": True, "gradient_accumulation_steps": 4},
            "--offload_gradients", "--gradient_accumulation_steps 4 cannot add them up",
        ),
    ],
)  # fmt: skip
def test_refused(device: str, options: dict[str, object], where: str, message: str) -> None:
    errors, _ = problems(device, **options)
    assert len(errors) == 1
    assert errors[0].startswith(where + ": ")
    assert message in errors[0]


def test_offload_is_for_one_process() -> None:
    assert problems("cuda", **OFFLOAD) == ([], [])
    assert "it is for one process, got 2" in problems("cuda", 2, **OFFLOAD)[0][0]


def test_stochastic_rounding_passes() -> None:
    assert problems("cuda", **ROUNDING) == ([], [])
    assert problems("cuda", **{**ROUNDING, "optimizer": "adamw-torchao-4bit"}) == ([], [])


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None if name == "came_pytorch" else object())
    assert "pip install came-pytorch" in problems(optimizer="came")[0][0]
    assert problems(optimizer="adamw")[0] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.02}, "--lr 0.02 is far above what finetuning uses"),
        ({"optimizer": "prodigy"}, "--lr 0.0001 multiplies the step size that prodigy finds"),
        ({"optimizer": "adafactor", "beta2": 0.9}, "--beta2 has no effect with --optimizer adafactor"),
        ({"optimizer": "adamw-bnb-paged"}, "it equals adamw-bnb there"),
        ({"lr_warmup_steps": 100}, "--lr_warmup_steps 100 has no effect with --lr_scheduler constant"),
        ({"lr_scheduler": "cosine", "train_steps": 500}, "--lr_warmup_steps 500 is not below --train_steps 500"),
        ({"lr_scheduler": "bump", "train_steps": 500}, "the learning rate never reaches its peak"),
        (
            {"lr_scheduler": "bump", "lr_cooldown_steps": 9, "train_steps": 509},
            "the learning rate never comes down to --lr",
        ),
    ],
)
def test_warned(options: dict[str, object], message: str) -> None:
    errors, warnings = problems(**options)
    assert errors == []
    assert len(warnings) == 1
    assert message in warnings[0]


def test_silent_where_options_mean_something() -> None:
    quiet = [
        {},
        {"optimizer": "prodigy", "lr": 1.0, "beta3": 0.9},
        {"lr_warmup_steps": 0},
        {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 100, "lr_num_cycles": 1, "train_steps": 1000},
        {"lr_scheduler": "cosine_with_restarts", "lr_num_cycles": 3},
        {"lr_scheduler": "polynomial", "lr_power": 2.0},
        {"lr_scheduler": "bump", "lr_warmup_steps": 5, "train_steps": 11},
        {"optimizer": "adamw", "use_8bit_bnb": True, "beta1": 0.8, "epsilon": 1e-6},
    ]
    for options in quiet:
        assert problems(**options) == ([], []), options


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_of_parts_of_weights_only_those_that_were_tried_are_updated(name: str) -> None:
    config = load_config(**MODEL, optimizer=name, lr=1.0)
    errors, _ = optimizer_problems(config, device_type="cpu", num_processes=2, updates_parts=True)
    assert [f"{name} needs whole weights" in error.message for error in errors] == (
        [] if name in ("adam", "adamw") else [True]
    )
