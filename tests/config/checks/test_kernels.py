"""Attention backends and compiled blocks: what is refused before anything is loaded, with the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from finetrainers.config import attention
from finetrainers.config.attention import BACKENDS
from finetrainers.config.checks import kernels
from finetrainers.config.checks.kernels import kernel_problems
from finetrainers.config.errors import Problem
from finetrainers.config.load import load_config

MODEL = {"model_name": "ltx_video", "pretrained_model_name_or_path": "repo", "data_root": "clips"}


def problems(option: str, *, device_type: str = "cuda", dtype_bytes: int = 2, **options: Any) -> list[Problem]:
    """Return the problems of one of the two options."""
    found = kernel_problems(load_config(**MODEL, **options), device_type=device_type, dtype_bytes=dtype_bytes)
    assert not found.warnings or options.get("attn_backend") == "_native_math"
    return [problem for problem in found.errors if problem.where == f"--{option}"]


def of_backend(name: str, **more: Any) -> list[Problem]:
    return problems("attn_backend", attn_backend=name, **more)


def expect(problems: list[Problem], kind: str, *values: str) -> None:
    """Expect one problem of a kind, whose message has these values."""
    [problem] = problems
    assert problem.kind == kind
    assert [value for value in values if value not in problem.message] == []


@pytest.mark.parametrize("name", ["auto", "native", "_native_flash", "_native_math"])
def test_on_a_cpu_four_work(name: str) -> None:
    assert of_backend(name, device_type="cpu", dtype_bytes=4, compile="regional") == []


@pytest.mark.parametrize("name", BACKENDS)
def test_all_others_say_so(name: str) -> None:
    if not BACKENDS[name].on_cpu:
        expect(of_backend(name, device_type="cpu", compile="regional"), "unsupported", f"{name} ", "CPU", "use native")


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expect(of_backend("flash"), "not_installed", "flash-attn,", "pip install flash-attn --no-build-isolation")
    expect(of_backend("flash_4_hub"), "not_installed", "pip install 'kernels>=0.12.3'")
    expect(of_backend("_flash_3"), "not_installed", "Dao-AILab/flash-attention")
    expect(of_backend("xformers"), "not_installed", "pip install xformers")
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    assert of_backend("_flash_3") == []  # built from source
    monkeypatch.setattr(attention, "version", lambda name: "2.5.9")
    expect(of_backend("flash"), "not_installed", "flash-attn 2.6.3, got 2.5.9: pip install")
    monkeypatch.setattr(attention, "version", lambda name: "9.0.post2")
    assert of_backend("flash") == []
    expect(of_backend("flash", dtype_bytes=4), "conflict", "--mixed_precision bf16")
    assert of_backend("flash", compile="regional") == []
    packed = [name for name in BACKENDS if "varlen" in name]
    errors = [of_backend(name, compile="regional")[0] for name in packed]
    assert {error.kind for error in errors} == {"conflict"}
    advised = [re.search(r"use (\w+), or", error.message) for error in errors]
    assert [match and match[1] for match in advised] == ["flash", "flash_hub", "_flash_3", "_flash_3_hub"]


def test_what_a_backend_needs_of_other_options() -> None:
    assert of_backend("flex", compile="regional") == []
    expect(of_backend("flex"), "required", "--compile regional")
    assert of_backend("_native_math") == []
    stored = kernel_problems(load_config(**MODEL, attn_backend="_native_math"), device_type="cuda", dtype_bytes=2)
    assert "--attn_backend _native_math" in stored.warnings[0]
    kept = of_backend("_native_math", activation_memory="keep_attention")
    expect(kept, "conflict", "--activation_memory keep_attention")


def test_the_default_of_the_whole_process_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "flash")
    found = kernel_problems(load_config(**MODEL), device_type="cpu", dtype_bytes=2)
    assert not found.errors
    assert found.warnings[0].startswith("DIFFUSERS_ATTN_BACKEND=flash ")
    assert of_backend("native", device_type="cpu") == []


def test_what_compiling_needs_and_what_it_does_not_go_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiling(device_type: str = "cpu", **options: Any) -> list[Problem]:
        return problems("compile", device_type=device_type, compile="regional", **options)

    monkeypatch.setattr(kernels.shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    assert compiling() == compiling(gradient_checkpointing=True) == compiling(selective_checkpointing=0.5) == []
    expect(compiling(layerwise_upcasting_modules=["transformer"]), "conflict", "--quantize_frozen")
    expect(compiling(activation_memory="keep_attention"), "conflict", "--activation_memory keep_attention")
    expect(compiling(blocks_to_swap=4), "conflict", "--blocks_to_swap")
    expect(compiling("cuda"), "not_installed", "pip install triton")
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    expect(compiling(), "not_installed", "apt-get install g++")
    monkeypatch.setenv("CXX", "/opt/bin/g++-14")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    expect(compiling(), "conflict", "dynamo_config")
    assert problems("compile") == []
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    found = kernel_problems(load_config(**MODEL, compile="regional", use_dora=True), device_type="cpu", dtype_bytes=2)
    assert (found.errors, len(found.warnings)) == ([], 1)
    assert "--use_dora" in found.warnings[0]


@pytest.mark.parametrize(
    ("given", "scope"),
    [("regional", "regional"), (True, "regional"), ("false", "none"), (["transformer"], "regional"), ("none", "none")],
)
def test_compiling_as_other_programs_switch_it_on(given: Any, scope: str) -> None:
    assert load_config(**MODEL, compile=given).memory.compile == scope
