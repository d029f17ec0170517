"""Attention backends by name, with the requirements and abilities of each. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from packaging.version import Version

from finetrainers.utils.failures import InputError
from finetrainers.utils.gpus import Capability

AttnBackendName = Literal[
    "auto", "native", "_native_flash", "_native_efficient", "_native_cudnn", "_native_math",
    "flash", "flash_hub", "flash_varlen", "flash_varlen_hub",
    "_flash_3", "_flash_3_hub", "_flash_varlen_3", "_flash_3_varlen_hub", "flash_4_hub",
    "flex", "xformers",
]  # fmt: skip
#: The value that leaves the network as diffusers builds it.
AUTO = "auto"


@dataclass(frozen=True)
class Backend:
    """Requirements and abilities of an attention backend.

    Attributes:
        module: the package that must be installed, or None if it is a part of PyTorch.
        distribution: its name, and the oldest version.
        install: how to install it.
        on_cpu: whether it also runs on a CPU.
        any_dtype: whether it takes other inputs than bf16 and fp16.
        masks: which it takes: none, boolean ones over keys, or any.
        casts: whether autocast casts its inputs, as it does those of PyTorch's own function.
        one_graph: whether torch.compile traces it without a graph break.
        fuses_compiled: whether it stores the scores of all pairs of tokens unless it is compiled.
        capability: least compute capability of a GPU.
    """

    module: str | None = None
    distribution: tuple[str, str] = ("", "0")
    install: str = ""
    on_cpu: bool = False
    any_dtype: bool = False
    masks: Literal["none", "bool", "any"] = "none"
    casts: bool = False
    one_graph: bool = True
    fuses_compiled: bool = False
    capability: Capability = (0, 0)

    @property
    def missing(self) -> str | None:
        """Package that is not installed or too old, with how to install it, or None if nothing is missing."""
        if self.module is None:
            return None
        name, oldest = self.distribution
        if find_spec(self.module) is None:
            return f"requires {name}, which is not installed: {self.install}"
        try:
            installed = version(name)
        except PackageNotFoundError:  # built from source under another name
            return None
        return (
            None
            if Version(installed) >= Version(oldest)
            else f"requires {name} {oldest}, got {installed}: {self.install}"
        )


#: The least that FlashAttention 2 and 3, and PyTorch's own copy of it, run on; FlashAttention 4 needs Hopper.
_AMPERE, _HOPPER = (8, 0), (9, 0)


_torch = partial(Backend, casts=True)
_flash_2 = partial(
    Backend,
    "flash_attn",
    ("flash-attn", "2.6.3"),
    "pip install flash-attn --no-build-isolation",
    capability=_AMPERE,
)
_flash_3 = partial(
    Backend,
    "flash_attn_interface",
    ("flash_attn_3", "3.0.0b1"),
    "build it from the folder hopper of Dao-AILab/flash-attention, or use _flash_3_hub",
    capability=_AMPERE,
)


def _hub(oldest: str = "0.12", capability: Capability = _AMPERE, **more: object) -> Backend:
    install = f"pip install 'kernels>={oldest}'"
    return Backend("kernels", ("kernels", oldest), install, capability=capability, **more)  # type: ignore[arg-type]


#: Backends that training can use, by diffusers' names.
BACKENDS: dict[str, Backend] = {
    "native": _torch(on_cpu=True, any_dtype=True, masks="any"),
    "_native_flash": _torch(on_cpu=True, capability=_AMPERE),
    "_native_efficient": _torch(any_dtype=True, masks="any"),
    "_native_cudnn": _torch(capability=_AMPERE),
    "_native_math": _torch(on_cpu=True, any_dtype=True, masks="any"),
    "flash": _flash_2(),
    "flash_hub": _hub(),
    # They pack the sequences of a batch, for which they read its lengths on the host.
    "flash_varlen": _flash_2(masks="bool", one_graph=False),
    "flash_varlen_hub": _hub(masks="bool", one_graph=False),
    "_flash_3": _flash_3(),
    "_flash_3_hub": _hub(),
    "_flash_varlen_3": _flash_3(masks="bool", one_graph=False),
    "_flash_3_varlen_hub": _hub(masks="bool", one_graph=False),
    "flash_4_hub": _hub("0.12.3", _HOPPER),
    "flex": Backend(any_dtype=True, fuses_compiled=True),
    "xformers": Backend("xformers", ("xformers", "0.0.29"), "pip install xformers", any_dtype=True),
}


def backend_name(backend: object) -> object:
    """Return a name as `attn_backend` takes it, from one as diffusers or finetrainers' later releases write it.

    These choose by part, as `transformer:flash`, or as a list of such choices.

    Raises:
        ValueError: another part's attention, or a backend that cannot train.
    """
    if isinstance(backend, (list, tuple)) and len(backend) == 1:
        backend = backend[0]
    if not isinstance(backend, str):
        return backend
    part, colon, name = backend.rpartition(":")
    if colon and part != "transformer":
        message = f"{backend!r}: the backend of a single component is not supported; set the backend name alone"
        raise InputError(message, "unsupported")
    name = name.lower()
    if name.lstrip("_").startswith(("sage", "aiter")):
        message = f"{name} has no backward pass, so layers before it would not learn; use flash or _flash_3_hub"
        raise InputError(message, "unsupported")
    if name in ("_native_npu", "_native_xla"):
        raise InputError(f"{name} is for a device that is not supported here; use native", "unsupported")
    return name
