"""Which checkpoint to continue from, and whether the run may. Imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from finetrainers.config.root import TrainConfig, fields
from finetrainers.methods.registry import WorkPlan

#: Layout of checkpoint directories.
FORMAT = 1
_STEP_DIR = re.compile(r"^step-(\d+)$")
#: Options that define what is being continued; changing one would silently make it another run.
CRITICAL_OPTIONS = (
    "model_name", "training_type", "method", "seed", "batch_size", "gradient_accumulation_steps", "optimizer",
    "use_8bit_bnb", "use_cpu_offload_optimizer", "rank", "lora_alpha", "target_modules", "use_rslora", "use_dora",
    "master_weights", "use_ema",
)  # fmt: skip


def checkpoints_dir(output_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return output_dir / "checkpoints"


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints of a run, `(step, path)`, oldest first. Half-written ones have another name."""
    root = checkpoints_dir(output_dir)
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if (m := _STEP_DIR.match(p.name)) and (p / "state.json").is_file()]
    return sorted(found)


def find_checkpoint(wanted: str | None, output_dir: Path) -> Path | None:
    """The checkpoint that `latest`, a step number or a directory names; None when none is wanted.

    Raises:
        ValueError: it does not exist; the message lists those that do.
    """
    if wanted is None:
        return None
    available = list_checkpoints(output_dir)
    names = ", ".join(str(step) for step, _ in available) or "none"
    if wanted == "latest":
        if not available:
            raise ValueError(f"no checkpoint in {checkpoints_dir(output_dir)}; leave the option out to start a new run")
        return available[-1][1]
    if wanted.isdigit():
        for step, path in available:
            if step == int(wanted):
                return path
        raise ValueError(f"no checkpoint of step {wanted} in {checkpoints_dir(output_dir)}; there are: {names}")
    path = Path(wanted)
    if not (path / "state.json").is_file():
        raise ValueError(
            f"{wanted} is not a checkpoint (no state.json); give `latest`, a step ({names}) or a directory"
        )
    return path


def critical_state(config: TrainConfig, plan: WorkPlan, *, world_size: int) -> dict[str, Any]:
    """What must be the same for a run to be continued."""
    written = config.model_dump(mode="json")
    values = {name: written[fields()[name][0]][name] for name in (*CRITICAL_OPTIONS, *plan.critical_options)}
    return {**values, "data": plan.fingerprint, "processes": world_size}


def check_resumable(checkpoint: Path, now: dict[str, Any], *, data: str) -> None:
    """Refuse to continue a run whose defining settings (`critical_state`) changed.

    Args:
        checkpoint: to be continued from.
        now: the settings of this run.
        data: what the fingerprint is of, in words.

    Raises:
        ValueError: with every difference; or the checkpoint is of another version.
    """
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise ValueError(f"{checkpoint} has checkpoint format {state['format']}; this version reads {FORMAT}")
    saved = state["critical"]
    changed = [f"{name}: {saved.get(name)!r} then, {now[name]!r} now" for name in now if saved.get(name) != now[name]]
    if saved["data"] != now["data"]:
        changed = [difference for difference in changed if not difference.startswith("data: ")]
        changed.append(f"data: {data} are not those of then")
    if changed:
        raise ValueError(
            f"cannot continue from {checkpoint}: {'; '.join(changed)}. Restore these settings, or start a new run "
            "without --resume_from_checkpoint"
        )
