"""Rules of attention backends and compiled blocks (`--attn_backend`, `--compile`) for each device. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from finetrainers.utils.failures import Kind
from finetrainers.utils.gpus import Capability

from ..attention import AUTO, BACKENDS
from ..errors import Problem
from ..root import TrainConfig
from .findings import Finding, Findings

#: Environment variable with diffusers' default attention backend for the whole process.
DEFAULT_BACKEND = "DIFFUSERS_ATTN_BACKEND"
#: Environment variable in which a launcher of accelerate requests compiling the whole network.
COMPILED_BY_LAUNCHER = "ACCELERATE_DYNAMO_BACKEND"
#: inductor builds its CPU kernels with a C++ compiler, and Triton the code that starts its kernels with a C compiler.
_COMPILERS = ("g++", "gcc", "clang++", "clang", "cc")


def kernel_problems(
    config: TrainConfig, *, device_type: str, dtype_bytes: int, capability: Capability | None = None
) -> Findings:
    """Return errors and warnings of `attn_backend` and `compile`.

    Args:
        config: the run.
        device_type: where it will train: `cpu`, `cuda`, `xpu`.
        dtype_bytes: bytes of a number in the dtype that the network computes in.
        capability: compute capability of the GPU, or None if it is not known.
    """
    findings = Findings()
    findings.add(
        _check_attention(config, device_type=device_type, dtype_bytes=dtype_bytes, capability=capability),
        _check_compile(config, device_type) if config.memory.compile != "none" else (),
    )
    return findings


def _check_attention(
    config: TrainConfig, *, device_type: str, dtype_bytes: int, capability: Capability | None
) -> Iterator[Finding]:
    """Refuse an attention backend that the device or the other options do not allow, or that is not installed."""
    name = config.model.attn_backend
    default = os.environ.get(DEFAULT_BACKEND, "native").lower()
    if name == AUTO and default != "native":
        yield f"{DEFAULT_BACKEND}={default} sets the attention of every network in the process; use --attn_backend"
    if name != AUTO:
        backend = BACKENDS[name]
        if device_type != "cpu" and backend.missing is not None:
            yield Problem("--attn_backend", f"{name} {backend.missing}", "not_installed", is_local=True)
        for problem, kind in _attention_problems(config, name, device_type=device_type, dtype_bytes=dtype_bytes):
            yield "attn_backend", f"{name} {problem}", kind
        if capability is not None and capability < backend.capability:
            yield (
                "attn_backend",
                f"{name} requires a GPU of compute capability {_dotted(backend.capability)}, got "
                f"{_dotted(capability)}; use native",
                "unsupported",
            )
    if name == "_native_math":
        yield (
            "--attn_backend _native_math stores the scores of all pairs of tokens in each block, which the memory "
            "estimate leaves out; use it only for comparisons at small sizes"
        )
    if capability is not None and capability < (8, 0) and config.training.mixed_precision == "bf16":
        yield (
            f"--mixed_precision bf16 is emulated on a GPU of compute capability {_dotted(capability)}, and slow; use "
            "fp16"
        )


def _attention_problems(
    config: TrainConfig, name: str, *, device_type: str, dtype_bytes: int
) -> Iterator[tuple[str, Kind]]:
    backend, compiles = BACKENDS[name], config.memory.compile != "none"
    if device_type == "cpu" and not backend.on_cpu:
        yield "requires a CUDA GPU, and this run trains on the CPU; use native", "unsupported"
        return
    if device_type != "cpu" and dtype_bytes > 2 and not backend.any_dtype:
        yield "computes in bf16 or fp16, and this run in fp32; add --mixed_precision bf16, or use native", "conflict"
    if backend.fuses_compiled and not compiles:
        yield "stores the scores of all pairs of tokens unless it is compiled; add --compile regional", "required"
    if compiles and not backend.one_graph:
        fixed = name.replace("_varlen", "")
        yield (
            f"reads sequence lengths on the host, which breaks a compiled block; use {fixed}, or remove --compile",
            "conflict",
        )
    if name == "_native_math" and config.memory.stored == "keep_attention":
        yield (
            "is not a single operator whose result --activation_memory keep_attention could keep; use native",
            "conflict",
        )


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


def is_compiled(config: TrainConfig) -> bool:
    """Return whether the network is compiled, by an option or by the launcher's file."""
    return config.memory.compile != "none" or _is_compiled_by_launcher()


def _is_compiled_by_launcher() -> bool:
    return os.environ.get(COMPILED_BY_LAUNCHER, "no").lower() != "no"


def _check_compile(config: TrainConfig, device_type: str) -> Iterator[Finding]:
    memory = config.memory
    if _is_compiled_by_launcher():
        yield (
            "compile",
            "regional: cannot be combined with the launcher's compilation (dynamo_config); remove one of them",
            "conflict",
        )
    if memory.layerwise_upcasting_modules:
        yield (
            "compile",
            "regional: cannot be combined with --layerwise_upcasting_modules, which replaces weights within a block; "
            "use --quantize_frozen",
            "conflict",
        )
    if memory.blocks_to_swap:
        yield (
            "compile",
            "regional: cannot be combined with --blocks_to_swap, which exchanges the weights of a block; remove one "
            "of them",
            "conflict",
        )
    if memory.stored not in ("none", "checkpoint"):
        yield (
            "compile",
            f"regional: cannot be combined with --activation_memory {memory.stored}, which does not see the "
            "operators of a compiled block; use checkpoint",
            "conflict",
        )
    if not any(map(shutil.which, _COMPILERS)) and not {"CC", "CXX"} & os.environ.keys():
        yield Problem(
            "--compile",
            "regional requires a C++ compiler: install g++ (apt-get install g++)",
            "not_installed",
            is_local=True,
        )
    if device_type == "cuda" and find_spec("triton") is None:
        yield Problem(
            "--compile",
            "regional requires the package triton, which is not installed: pip install triton",
            "not_installed",
            is_local=True,
        )
    if config.training.use_dora:
        yield "--compile regional saves little with --use_dora, whose layers break each block into many graphs"
