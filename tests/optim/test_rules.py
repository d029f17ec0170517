"""Combinations of optimizer options: what is refused, what is only said, and what passes in silence."""

from __future__ import annotations

from typing import get_args

import pytest

from finetrainers.config.errors import Problem
from finetrainers.config.load import load_config
from finetrainers.config.sections import OptimizerName
from finetrainers.optim import table
from finetrainers.optim.rules import optimizer_problems
from finetrainers.utils.failures import Kind

MODEL = {"model_name": "ltx_video", "pretrained_model_name_or_path": "somewhere"}
OFFLOAD = {"optimizer": "adamw", "use_cpu_offload_optimizer": True, "max_grad_norm": 0.0}
ROUNDING = {"optimizer": "adamw", "training_type": "full-finetune", "master_weights": "stochastic_rounding"}


def problems(device_type: str = "cpu", num_processes: int = 1, **options: object) -> tuple[list[Problem], list[str]]:
    config = load_config(**MODEL, **options)
    return optimizer_problems(config, device_type=device_type, num_processes=num_processes)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_may_run_on_cpu(name: str) -> None:
    """The factory's tests step each of them there."""
    assert problems(optimizer=name, lr=1.0 if name == "prodigy" else 1e-4)[0] == []


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_but_deepspeeds_may_run_on_cuda(name: str) -> None:
    errors, _ = problems("cuda", optimizer=name)
    assert bool(errors) == (name == "adamw-deepspeed-cpu")


@pytest.mark.parametrize(
    ("device", "options", "where", "kind", "value"),
    [
        ("cpu", {"optimizer": "lion", "use_8bit_bnb": True}, "--use_8bit_bnb", "unsupported", "'lion'"),
        ("cpu", {"optimizer": "adamw", "beta3": 0.9}, "--beta3", "unsupported", " prodigy, came"),
        ("cpu", {"optimizer": "came", "lr": 0.0}, "--lr", "invalid", "came"),
        ("cpu", {"optimizer": "muon", "training_type": "full-finetune"}, "--optimizer", "unsupported", "lora"),
        ("cpu", {"optimizer": "muon", "use_dora": True}, "--optimizer", "conflict", "--use_dora"),
        ("cuda", {"optimizer": "adamw-deepspeed-cpu"}, "--optimizer", "unsupported", "deepspeed_zero2_offload.yaml"),
        ("cpu", {**ROUNDING, "optimizer": "adam"}, "--master_weights", "unsupported", " adamw, adamw-torchao-8bit"),
        ("cpu", {**ROUNDING, "transformer_dtype": "fp32"}, "--master_weights", "conflict", "--transformer_dtype bf16"),
        ("cuda", {**ROUNDING, **OFFLOAD}, "--master_weights", "conflict", "--use_cpu_offload_optimizer"),
        ("cpu", {"offload_gradients": True}, "--offload_gradients", "required", "--use_cpu_offload_optimizer"),
        ("cpu", OFFLOAD, "--use_cpu_offload_optimizer", "unsupported", " cpu;"),
        ("cuda", {**OFFLOAD, "optimizer": "came"}, "--use_cpu_offload_optimizer", "unsupported", "--optimizer came"),
        ("cuda", {**OFFLOAD, "use_8bit_bnb": True}, "--use_cpu_offload_optimizer", "unsupported", "--use_8bit_bnb"),
        ("cuda", {**OFFLOAD, "max_grad_norm": 1.0}, "--use_cpu_offload_optimizer", "conflict", "--max_grad_norm 0"),
        (
            "cuda", {**OFFLOAD, "mixed_precision": "fp16"},
            "--use_cpu_offload_optimizer", "conflict", "--mixed_precision bf16",
        ),
        (
            "cuda", {**OFFLOAD, "offload_gradients": True, "gradient_accumulation_steps": 4},
            "--offload_gradients", "conflict", "--gradient_accumulation_steps 4:",
        ),
    ],
)  # fmt: skip
def test_refused(device: str, options: dict[str, object], where: str, kind: Kind, value: str) -> None:
    [error], _ = problems(device, **options)
    assert (error.where, error.kind) == (where, kind)
    assert value in error.message


def test_offload_is_for_one_process() -> None:
    assert problems("cuda", **OFFLOAD) == ([], [])
    [error], _ = problems("cuda", 2, **OFFLOAD)
    assert (error.where, error.kind) == ("--use_cpu_offload_optimizer", "conflict")
    assert " 2; " in error.message


def test_stochastic_rounding_passes() -> None:
    assert problems("cuda", **ROUNDING) == ([], [])
    assert problems("cuda", **{**ROUNDING, "optimizer": "adamw-torchao-4bit"}) == ([], [])


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None if name == "came_pytorch" else object())
    [error], _ = problems(optimizer="came")
    assert (error.where, error.kind, error.is_local) == ("--optimizer", "not_installed", True)
    assert "`pip install came-pytorch`" in error.message
    assert problems(optimizer="adamw")[0] == []


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"lr": 0.02}, ["--lr 0.02 ", "1e-6"]),
        ({"optimizer": "prodigy"}, ["--lr 0.0001 ", "prodigy"]),
        ({"optimizer": "adafactor", "beta2": 0.9}, ["--beta2 ", "--optimizer adafactor"]),
        ({"optimizer": "adamw-bnb-paged"}, ["--optimizer adamw-bnb-paged ", "adamw-bnb there"]),
        ({"lr_warmup_steps": 100}, ["--lr_warmup_steps 100 ", "--lr_scheduler constant"]),
        ({"lr_scheduler": "cosine", "train_steps": 500}, ["--lr_warmup_steps 500 ", "--train_steps 500: ", " --lr"]),
        ({"lr_scheduler": "bump", "train_steps": 500}, ["--lr_warmup_steps 500 ", "--train_steps 500: ", "peak"]),
        (
            {"lr_scheduler": "bump", "lr_cooldown_steps": 9, "train_steps": 509},
            ["--lr_warmup_steps 500 ", " 9 ", "--lr_cooldown_steps", "--train_steps 509: "],
        ),
    ],
)
def test_warned(options: dict[str, object], values: list[str]) -> None:
    errors, [warning] = problems(**options)
    assert errors == []
    assert [value for value in values if value not in warning] == [], warning


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
    assert [(error.where, error.kind, name in error.message, "FSDP2" in error.message) for error in errors] == (
        [] if name in ("adam", "adamw") else [("--optimizer", "unsupported", True, True)]
    )
