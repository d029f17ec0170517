"""Facts that torch reports about itself and the GPUs.

A separate process asks for them: a broken installation must not end the report on other facts.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from finetrainers.utils.reading import parse_json

_CODE = (
    "import json; from finetrainers.tools.doctor.torch_facts import ask_torch; print('\\n' + json.dumps(ask_torch()))"
)
#: Seconds; the first import from shared storage may take a minute.
_TIMEOUT_S = 120


def ask_torch() -> dict[str, Any]:
    """Return versions of torch, CUDA and NCCL, the GPUs that torch can use, and why it can use none. Imports torch."""
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
    """Return `ask_torch()` from another process, or `torch_error`, the last line that it printed."""
    try:
        completed = subprocess.run(
            [sys.executable, "-c", _CODE], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"torch_error": f"import torch takes longer than {_TIMEOUT_S} s"}
    if completed.returncode:
        lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
        return {"torch_error": lines[-1] if lines else f"import torch ends with exit code {completed.returncode}"}
    facts: dict[str, Any] = parse_json(completed.stdout.splitlines()[-1])
    return facts
