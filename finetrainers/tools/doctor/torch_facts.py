"""What torch says of itself and of the GPUs, asked in a process of its own: a broken installation must not end the others' report."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_CODE = (
    "import json; from finetrainers.tools.doctor.torch_facts import ask_torch; print('\\n' + json.dumps(ask_torch()))"
)
#: Seconds; the first import from shared storage may take a minute.
_TIMEOUT_S = 120


def ask_torch() -> dict[str, Any]:
    """Versions of torch, CUDA and NCCL, GPUs that torch can use, and why it can use none. Imports torch."""
    import torch

    from finetrainers.utils.device import device_problem

    nccl = None
    if torch.version.cuda and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "torch_gpus": torch.cuda.device_count(),
        "torch_problem": device_problem(),
    }


def torch_facts() -> dict[str, Any]:
    """`ask_torch` in another process; or `torch_error`, the last line that it has printed."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"torch_error": f"import torch takes longer than {_TIMEOUT_S} s"}
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return {"torch_error": lines[-1] if lines else f"import torch ends with exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
