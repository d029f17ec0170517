"""Whole runs of a published network with random weights on disk: memory by phase, planned and measured, and a profile.

A part of `gpu.py`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import torch
from published_networks import NETWORKS, Network, published_model
from torch import nn

from finetrainers.config.load import load_config
from finetrainers.config.sections import ModelSection
from finetrainers.models.registry import build_tiny, get_family
from finetrainers.plan.ready import get_ready
from finetrainers.runs.run import run
from finetrainers.utils.phases import PHASES
from finetrainers.utils.video import write_mp4

Result = dict[str, Any]
_STEPS = 6
#: Steps of the profile; neither they nor the one before them, in which the profiler starts, are timed.
_PROFILED = (5, 6)
#: Numbers that random weights repeat, since drawing billions takes minutes.
_BLOCK = 2**22


def whole_run(method: str, *, tiny: bool) -> Result:
    """Train LTX-Video by supervised finetuning or on rewards: loading, encoding, steps, samples or rollouts."""
    network = NETWORKS["LTX-Video"]
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        size = "9x64x64" if tiny else "49x512x768"
        options: dict[str, Any] = {
            "model_name": network.family, "pretrained_model_name_or_path": str(random_checkpoint(network, root, tiny)),
            "output_dir": str(root / "run"), "training_type": "lora", "rank": 4 if tiny else 128, "optimizer": "adamw",
            "train_steps": _STEPS, "gradient_checkpointing": True, "validation_frame_rate": 24,
            # A CPU has no 4-bit weights.
            "quantize_text_encoders": "nf4" if on_gpu else "int8", "checkpointing_steps": 0,
        }  # fmt: skip
        options |= _of_rewards(root, size, tiny) if method == "grpo" else _of_clips(root, size, tiny)
        run(get_ready(load_config(**options)))
        return {"size": size, **read_run(root / "run")}


def _of_clips(root: Path, size: str, tiny: bool) -> dict[str, Any]:
    """Two clips to train on, a sample at the end, and a profile of some steps."""
    frames, height, width = map(int, size.split("x"))
    clips = root / "clips"
    clips.mkdir()
    for number in range(2):
        noise = np.random.default_rng(number).integers(0, 255, (frames, height // 8, width // 8, 3), dtype=np.uint8)
        write_mp4(clips / f"{number}.mp4", noise.repeat(8, 1).repeat(8, 2), fps=24)
        (clips / f"{number}.txt").write_text(f"pattern number {number}", encoding="utf-8")
    return {
        "data_root": str(clips), "video_resolution_buckets": [size], "precompute_conditions": True,
        "validation_prompts": f"a pattern@@@{size}", "validation_steps": _STEPS,
        "validation_inference_steps": 2 if tiny else 20, "profile_steps": "{}:{}".format(*_PROFILED),
    }  # fmt: skip


def _of_rewards(root: Path, size: str, tiny: bool) -> dict[str, Any]:
    """Rollouts of four clips, scored by their pixels alone, so that the network and its VAE take the time."""
    (root / "prompts.txt").write_text("a red ball\na blue cube\n", encoding="utf-8")
    return {
        "method": "grpo", "prompts": str(root / "prompts.txt"), "reward": ["brightness"], "rollout_size": size,
        "prompts_per_step": 1, "num_generations": 4, "batch_size": 1, "sampling_steps": 5 if tiny else 8,
        "updates_per_rollout": 1,
    }  # fmt: skip


def random_checkpoint(network: Network, root: Path, tiny: bool) -> Path:
    """Write a checkpoint with random weights: all configs published, or all tiny."""
    source, target = root / "tiny", root / "model"
    build_tiny(network.family, source, **network.tiny)
    if tiny:
        copytree(source, target, ignore=lambda _, names: [name for name in names if name.endswith(".safetensors")])
    else:
        published_model(source, target, network)
    section = ModelSection(model_name=network.family, pretrained_model_name_or_path=str(target))
    for part, part_class in get_family(network.family).load(section).parts.items():
        if issubclass(part_class, nn.Module):
            file = "diffusion_pytorch_model.safetensors" if hasattr(part_class, "load_config") else "model.safetensors"
            write_random_weights(_on_meta(part_class, target / part), target / part / file)
    return target


def _on_meta(part_class: Any, directory: Path) -> nn.Module:
    with torch.device("meta"):
        if hasattr(part_class, "load_config"):  # of diffusers
            return part_class.from_config(part_class.load_config(directory))
        return part_class(part_class.config_class.from_pretrained(directory))


def write_random_weights(network: nn.Module, path: Path) -> None:
    """Write bf16 weights for a network, without having them in memory: random matrices, scales of 1, biases of 0."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in network.state_dict().items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blocks = {"random": 0.02 * torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))}
    blocks |= {"zero": torch.zeros(_BLOCK // 64), "one": torch.ones(_BLOCK // 64)}
    data = {name: block.bfloat16().view(torch.uint8).numpy().tobytes() for name, block in blocks.items()}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in network.state_dict().items():
            is_zero = name.endswith(("bias", "mean"))
            block, left = data["random" if tensor.ndim > 1 else "zero" if is_zero else "one"], 2 * tensor.numel()
            while left > 0:
                file.write(block[:left])
                left -= len(block)


def read_run(directory: Path) -> Result:
    """Seconds of a step, MFU, and the peaks of each phase of a run, from its own records."""
    records, events = (
        [json.loads(line) for line in (directory / name).read_text(encoding="utf-8").splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    timed = [record for record in records if 1 < record["step"] < _PROFILED[0] - 1 and "step_s" in record]
    found: Result = {"phases": {}}
    for name in ("step_s", "mfu", "seconds/rollout", "seconds/decode", "seconds/reward"):
        values = [record[name] for record in timed if name in record]
        if values:
            found[name] = sum(values) / len(values)
    gib_by_event = {event["event"]: event.get("gib", {}) for event in events}
    planned, measured = gib_by_event.get("memory_planned", {}), gib_by_event.get("memory", {})
    for phase in (phase for phase in PHASES if phase in measured or phase in planned):
        found["phases"][phase] = {"planned": planned.get(phase, {}), "measured": measured.get(phase, {})}
    table = next(directory.glob("profile/*.txt"), None)
    if table is not None:
        found["profile"] = table.read_text(encoding="utf-8")
    return found
