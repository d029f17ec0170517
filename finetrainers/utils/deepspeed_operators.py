"""DeepSpeed's C++ operators, which it compiles on their first use on a machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .launch import launched_rank
from .logs import NOTES


def operators_to_compile(names: Sequence[str]) -> list[str]:
    """Return the named operators that DeepSpeed can compile and has not compiled yet on this machine."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import __compatible_ops__ as compatible_ops
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return [
        name
        for name in names
        if compatible_ops.get(name) and not installed_ops.get(name) and not any(root.glob(f"**/{name}/{name}.so"))
    ]


def note_compiling(names: Sequence[str]) -> None:
    """Log a note with the named operators that DeepSpeed compiles next, since it prints nothing for minutes."""
    if launched_rank() == 0 and (operators := operators_to_compile(names)):
        NOTES.warning(
            "DeepSpeed compiles %s now, once per machine; this takes minutes, without output",
            " and ".join(operators),
        )
