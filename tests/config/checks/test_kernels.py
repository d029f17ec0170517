"""Attention backends and compiled blocks: what is refused before anything is loaded, with the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from finetrainers.config import attention
from finetrainers.config.attention import BACKENDS
from finetrainers.config.checks import kernels
from finetrainers.config.checks.kernels import kernel_problems
from finetrainers.config.load import load_config

MODEL = {"model_name": "ltx_video", "pretrained_model_name_or_path": "repo", "data_root": "clips"}


def problems(option: str, *, device_type: str = "cuda", dtype_bytes: int = 2, **options: Any) -> list[str]:
    """What is wrong with one of the two options."""
    found = kernel_problems(load_config(**MODEL, **options), device_type=device_type, dtype_bytes=dtype_bytes)
    assert not found.warnings or options.get("attn_backend") == "_native_math"
    return [problem.message for problem in found.errors if problem.where == f"--{option}"]


def of_backend(name: str, **more: Any) -> list[str]:
    return problems("attn_backend", attn_backend=name, **more)


@pytest.mark.parametrize("name", ["auto", "native", "_native_flash", "_native_math"])
def test_on_a_cpu_four_work(name: str) -> None:
    assert of_backend(name, device_type="cpu", dtype_bytes=4, compile="regional") == []


@pytest.mark.parametrize("name", BACKENDS)
def test_all_others_say_so(name: str) -> None:
    if not BACKENDS[name].on_cpu:
        refused = f"{name} needs a CUDA GPU, and this run trains on the CPU; use native"
        assert of_backend(name, device_type="cpu", compile="regional") == [refused]


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_backend("flash") == [
        "flash needs flash-attn, which is not installed: pip install flash-attn --no-build-isolation"
    ]
    assert "kernels, which is not installed: pip install 'kernels>=0.12.3'" in of_backend("flash_4_hub")[0]
    assert "build it from the folder hopper" in of_backend("_flash_3")[0]
    assert "pip install xformers" in of_backend("xformers")[0]
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    assert of_backend("_flash_3") == []  # built from source
    monkeypatch.setattr(attention, "version", lambda name: "2.5.9")
    assert "flash needs flash-attn 2.6.3, got 2.5.9: pip install" in of_backend("flash")[0]
    monkeypatch.setattr(attention, "version", lambda name: "9.0.post2")
    assert of_backend("flash") == []
    assert of_backend("flash", dtype_bytes=4) == [
        "flash computes in bf16 or fp16, and this run in fp32; add --mixed_precision bf16, or use native"
    ]
    assert of_backend("flash", compile="regional") == []
    packed = [name for name in BACKENDS if "varlen" in name]
    advised = [re.search(r"use (\w+), or", of_backend(name, compile="regional")[0]) for name in packed]
    assert [found and found[1] for found in advised] == ["flash", "flash_hub", "_flash_3", "_flash_3_hub"]


def test_what_a_backend_needs_of_other_options() -> None:
    assert of_backend("flex", compile="regional") == []
    assert "unless it is compiled; add --compile regional" in of_backend("flex")[0]
    assert of_backend("_native_math") == []
    stored = kernel_problems(load_config(**MODEL, attn_backend="_native_math"), device_type="cuda", dtype_bytes=2)
    assert "which the memory estimate leaves out" in stored.warnings[0]
    assert "is no single operator" in of_backend("_native_math", activation_memory="keep_attention")[0]


def test_the_default_of_the_whole_process_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "flash")
    found = kernel_problems(load_config(**MODEL), device_type="cpu", dtype_bytes=2)
    assert not found.errors
    assert found.warnings[0].startswith(
        "DIFFUSERS_ATTN_BACKEND=flash chooses the attention of every network in the process"
    )
    assert of_backend("native", device_type="cpu") == []


def test_what_compiling_needs_and_what_it_does_not_go_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiling(device_type: str = "cpu", **options: Any) -> list[str]:
        return problems("compile", device_type=device_type, compile="regional", **options)

    monkeypatch.setattr(kernels.shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    assert compiling() == compiling(gradient_checkpointing=True) == compiling(selective_checkpointing=0.5) == []
    assert "use --quantize_frozen" in compiling(layerwise_upcasting_modules=["transformer"])[0]
    assert "--activation_memory keep_attention, which does not see" in compiling(activation_memory="keep_attention")[0]
    assert "regional does not go with --blocks_to_swap" in compiling(blocks_to_swap=4)[0]
    assert compiling("cuda") == ["regional needs the package triton, which is not installed: pip install triton"]
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert compiling() == ["regional needs a C++ compiler, and there is none: install g++ (apt-get install g++)"]
    monkeypatch.setenv("CXX", "/opt/bin/g++-14")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    assert "the launcher's file compiles, too" in compiling()[0]
    assert problems("compile") == []
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    found = kernel_problems(load_config(**MODEL, compile="regional", use_dora=True), device_type="cpu", dtype_bytes=2)
    assert (found.errors, len(found.warnings)) == ([], 1)
    assert "gains little with --use_dora" in found.warnings[0]


@pytest.mark.parametrize(
    ("given", "scope"),
    [("regional", "regional"), (True, "regional"), ("false", "none"), (["transformer"], "regional"), ("none", "none")],
)
def test_compiling_as_other_programs_switch_it_on(given: Any, scope: str) -> None:
    assert load_config(**MODEL, compile=given).memory.compile == scope
