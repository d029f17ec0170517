"""Attention backends: what is refused before anything is loaded, with the way out."""

from __future__ import annotations

import re

import pytest

from finetrainers.config import attention
from finetrainers.config.attention import BACKENDS, attention_problems


def problems(name: str, *, device_type: str = "cuda", dtype_bytes: int = 2, compiles: bool = False) -> list[str]:
    errors, warnings = attention_problems(name, device_type=device_type, dtype_bytes=dtype_bytes, compiles=compiles)
    assert not warnings
    return [str(error) for error in errors]


@pytest.mark.parametrize("name", ["auto", "native", "_native_flash", "_native_math"])
def test_on_a_cpu_four_work(name: str) -> None:
    assert problems(name, device_type="cpu", dtype_bytes=4, compiles=True) == []


@pytest.mark.parametrize("name", BACKENDS)
def test_all_others_say_so(name: str) -> None:
    if not BACKENDS[name].on_cpu:
        refused = f"--attn_backend: {name} needs a CUDA GPU, and this run trains on the CPU; use native"
        assert problems(name, device_type="cpu")[0] == refused


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems("flash") == [
        "--attn_backend: flash needs flash-attn, which is not installed: pip install flash-attn --no-build-isolation"
    ]
    assert "kernels, which is not installed: pip install 'kernels>=0.12.3'" in problems("flash_4_hub")[0]
    assert "build it from the folder hopper" in problems("_flash_3")[0]
    assert "pip install xformers" in problems("xformers")[0]
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    assert problems("_flash_3") == []  # built from source
    monkeypatch.setattr(attention, "version", lambda name: "2.5.9")
    assert "flash needs flash-attn 2.6.3, got 2.5.9: pip install" in problems("flash")[0]
    monkeypatch.setattr(attention, "version", lambda name: "9.0.post2")
    assert problems("flash") == []
    assert problems("flash", dtype_bytes=4) == [
        "--attn_backend: flash computes in bf16 or fp16, and this run in fp32; add --mixed_precision bf16, or use native"
    ]
    breaks = "reads sequence lengths on the host, which breaks a compiled block"
    assert problems("flash", compiles=True) == []
    assert [re.search(f"{breaks}; use (\\w+),", problems(name, compiles=True)[0])[1] for name in BACKENDS if "varlen" in name] == [  # type: ignore[index]
        "flash", "flash_hub", "_flash_3", "_flash_3_hub",
    ]  # fmt: skip


def test_flex_needs_compiling() -> None:
    assert problems("flex", compiles=True) == []
    assert "unless it is compiled; add --compile regional" in problems("flex")[0]


def test_the_default_of_the_whole_process_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "flash")
    errors, [warning] = attention_problems("auto", device_type="cpu", dtype_bytes=2, compiles=False)
    assert not errors
    assert warning.startswith("DIFFUSERS_ATTN_BACKEND=flash chooses the attention of every network in the process")
    assert attention_problems("native", device_type="cpu", dtype_bytes=2, compiles=False) == ([], [])
