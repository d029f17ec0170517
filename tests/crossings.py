"""Crossings: options, sources and Python objects of runs of the demo model, and the covering arrays that pair them.

Every pair of two values of different factors is in one run at least (`rows`). A value is a set of options of
`load_config`, with the keyword arguments of `train` below `PARTS`, or a function of the place of a run that returns
them.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import covertable
import numpy as np
import torch
from PIL import Image
from torch.optim import SGD

from finetrainers import Callback, Reward
from finetrainers.methods.registry import load_method
from finetrainers.utils.video import write_mp4

#: Key of the keyword arguments of `train` among the options of a value.
PARTS = "parts"
STEPS = 4
SIZE = (9, 32, 64)

Value = Mapping[str, Any] | Callable[["Place"], Mapping[str, Any]]


@dataclass(frozen=True)
class Place:
    """Where a run of a row finds its data.

    Attributes:
        root: directory of clips, images, tables and prompts; nothing in it may change.
        method: name of the training method.
    """

    root: Path
    method: str


def pixels(number: int, frames: int = SIZE[0]) -> np.ndarray:
    """Return a moving pattern `T H W 3`, uint8."""
    y, x = np.mgrid[: SIZE[1], : SIZE[2]].astype(np.float64)
    t = np.arange(frames)[:, None, None]
    red, green = np.sin((x + 4 * t) / (6 + number)), np.cos((y + 3 * t) / (5 + 2 * number))
    return (127 + 100 * np.stack([red, green, np.sin(red + green)], axis=-1)).clip(0, 255).astype(np.uint8)


CAPTIONS = ("a red ball moves left", "a blue square", "a green ball moves up", "a white square turns")


def write_data(root: Path) -> None:
    """Write four clips with captions, two of them with a second one, and tables, an archive, pairs and prompts."""
    clips = root / "clips"
    clips.mkdir(parents=True)
    for number, caption in enumerate(CAPTIONS):
        write_mp4(clips / f"{number}.mp4", pixels(number, SIZE[0] + 4 * (number % 2)), fps=8)
        (clips / f"{number}.txt").write_text(caption + "\nseen from above\n" * (number % 2))
    Image.fromarray(pixels(9)[0]).save(root / "image.png")
    (root / "table.jsonl").write_text(
        "".join(
            json.dumps({"video": f"clips/{number}.mp4", "text": caption, "short": caption[:6]}) + "\n"
            for number, caption in enumerate(CAPTIONS)
        )
    )
    (root / "pairs.jsonl").write_text(
        "".join(
            json.dumps({"prompt": CAPTIONS[n], "chosen": f"clips/{n}.mp4", "rejected": f"clips/{n + 1}.mp4"}) + "\n"
            for n in range(3)
        )
    )
    (root / "prompts.txt").write_text("\n".join(CAPTIONS) + "\n")
    (root / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "wanted": 0.1 * n}) + "\n" for n, text in enumerate(CAPTIONS))
    )
    with tarfile.open(root / "clips.tar", "w") as archive:
        for path in sorted(clips.iterdir()):
            content = path.read_bytes()
            member = tarfile.TarInfo(path.name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def table(place: Place) -> Mapping[str, Any]:
    """Return a table of clips with two captions each, or of pairs."""
    name, columns = ("pairs", []) if place.method == "dpo" else ("table", ["text", "short"])
    return {"dataset_file": place.root / f"{name}.jsonl", "data_root": place.root, "caption_columns": columns}


def python_rows(place: Place) -> Mapping[str, Any]:
    """Return rows of arrays, two of which have equal pixels at other rates; pairs of them for methods that compare."""
    if place.method == "dpo":
        pairs = [{"prompt": CAPTIONS[n], "chosen": pixels(n), "rejected": pixels(n + 1)} for n in range(3)]
        return {PARTS: {"data": pairs}}
    rates = (8, 8, 16, 24)
    rows = [{"video": pixels(n // 2, 33), "caption": CAPTIONS[n], "fps": rates[n]} for n in range(4)]
    return {PARTS: {"data": rows}}


class Watching(Callback):
    """Reports a number of its own at every step."""

    def on_step(self, state: Any) -> dict[str, float]:
        return {"twice": 2.0 * state.step}


def sgd(parameters: list[Any]) -> SGD:
    """Return an optimizer with two groups of other rates, momentum and decay."""
    half = len(parameters) // 2
    groups = [{"params": parameters[:half], "lr": 5e-3, "momentum": 0.5}, {"params": parameters[half:]}]
    return SGD(groups, lr=2e-3, momentum=0.9, weight_decay=1e-3)


def lr_at(step: int) -> float:
    """Return a rising learning rate."""
    return 1e-3 * (step + 1)


def halved(place: Place) -> Mapping[str, Any]:
    """Return the method of the run with half of its loss."""
    return {PARTS: {"method": _halved(place.method)}}


@cache
def _halved(name: str) -> type:
    base = load_method(name)

    def loss(self: Any, transformer: Any, batch: Any) -> Any:
        value, metrics = base.loss(self, transformer, batch)
        return value / 2, metrics

    return type(f"Halved_{name}", (base,), {"loss": loss, "__module__": __name__})


def bright(videos: Sequence[torch.Tensor], prompts: Sequence[str]) -> list[float]:
    """Return the mean brightness of clips, plus the length of their prompts in thousands of letters."""
    return [float(video.mean()) + len(prompt) / 1000 for video, prompt in zip(videos, prompts, strict=True)]


async def bright_later(videos: Sequence[torch.Tensor], prompts: Sequence[str]) -> list[float]:
    """Return the scores of `bright`, asynchronously."""
    return bright(videos, prompts)


def near(videos: Sequence[torch.Tensor], prompts: Sequence[str], *, wanted: Sequence[float]) -> list[float]:
    """Return how near a clip's brightness is to a column of its prompt."""
    return [-abs(float(video.mean()) - aim) for video, aim in zip(videos, wanted, strict=True)]


class Spread(Reward):
    """Standard deviation of a clip's pixels, which has a gradient."""

    differentiable = True

    def score(self, videos: torch.Tensor, prompts: Sequence[str], *, fps: float) -> dict[str, torch.Tensor]:
        return {"score": videos.float().flatten(1).std(dim=1)}

    differentiate = score


#: Values that runs on clips and on prompts share.
SHARED: dict[str, dict[str, Value]] = {
    "weights": {
        "lora": {},
        "dropout": {"lora_dropout": 0.3, "use_rslora": True},
        "dora": {"use_dora": True},
        "full": {"training_type": "full-finetune"},
    },
    "optimizer": {
        "adamw": {"lr": 3e-3},
        "cosine": {"beta2": 0.9, "lr_scheduler": "cosine", "lr_warmup_steps": 2},
        "prodigy": {"optimizer": "prodigy", "beta1": 0.8},
        "8bit": {"optimizer": "adamw", "use_8bit_bnb": True},
        "python": {PARTS: {"optimizer": sgd}},
        "lr_at": {"weight_decay": 0.1, PARTS: {"lr_at": lr_at}},
    },
    "memory": {
        "none": {},
        "checkpointing": {"gradient_checkpointing": True},
        "offload": {"activation_memory": "offload"},
        "int8": {"quantize_frozen": "int8"},
        "swap": {"blocks_to_swap": 3},
    },
    "state": {
        "plain": {"checkpointing_steps": 0},
        "ema": {"use_ema": True, "ema_decay": 0.5, "checkpointing_steps": 2},
        "async": {"async_checkpointing": True, "checkpointing_steps": 2, "checkpointing_limit": 1},
    },
    "dtype": {
        "fp32": {"transformer_dtype": "fp32", "vae_dtype": "fp32", "text_encoder_dtype": "fp32"},
        "bf16": {},
        "rounded": {"master_weights": "stochastic_rounding"},
    },
    "object": {
        "none": {},
        "callback": {PARTS: {"callbacks": [Watching()]}},
        "method": halved,
    },
    "samples": {
        "none": {},
        "validation": {
            "validation_prompts": f"{CAPTIONS[0]}@@@1x32x32", "validation_steps": 2, "validation_inference_steps": 2,
        },
    },
    "settings": {"given": {"rank": 4, "lora_alpha": 8}, "chosen": {}},
}  # fmt: skip

CLIPS: dict[str, dict[str, Value]] = {
    "method": {"sft": {}, "dpo": {"dpo.beta": 1.0}},  # by default, it multiplies rounding by 2000
    "source": {
        "directory": lambda place: {"data_root": place.root / "clips"},
        "table": table,
        "archive": lambda place: {"dataset_file": place.root / "clips.tar"},
        "rows": python_rows,
    },
    "batch": {
        "one": {},
        "two": {"batch_size": 2},
        "accumulated": {"gradient_accumulation_steps": 2},
        "workers": {"dataloader_num_workers": 1, "epoch_end": "drop"},
    },
    "cut": {
        "head": {},
        "random": {
            "frame_selection": "random", "video_reshape_mode": "random", "video_resolution_buckets": ["5x32x32"],
        },
        "windows": {"sliding_window_size": 5, "sliding_window_stride": 4},
        "fps": {"target_fps": 8.0},
    },
    "given": {
        "none": {},
        "first": {"first_frame_conditioning_p": 0.5},
        "modes": {"frame_conditioning": ["first=0.4", "image_tail=0.4"]},
    },
    "captions": {
        "plain": {},
        "dropout": {"caption_dropout_p": 0.5},
        "trigger": {"id_token": "ZORB"},
        "lines": {"caption_lines": True},
    },
    "cache": {"off": {}, "on": {"precompute_conditions": True}},
    "noise": {
        "default": {},
        "shifted": {"flow_weighting_scheme": "logit_normal", "flow_resolution_shifting": True},
        "uniform": {"flow_weighting_scheme": "none", "flow_shift": 3.0},
    },
    "evaluation": {"none": {}, "held_out": {"eval_num_items": 1, "eval_steps": 2}},
    **SHARED,
    "weights": {
        **SHARED["weights"],
        "in_backward": {"training_type": "full-finetune", "optimizer_in_backward": True, "max_grad_norm": 0.0},
    },
}  # fmt: skip

PROMPTS: dict[str, dict[str, Value]] = {
    "method": {"grpo": {}, "nft": {}, "awm": {}, "refl": {}},
    "source": {
        "file": lambda place: {"prompts": place.root / "prompts.txt"},
        "columns": lambda place: {"prompts": place.root / "prompts.jsonl"},
        "rows": {PARTS: {"prompts": [{"prompt": text, "wanted": 0.1 * n} for n, text in enumerate(CAPTIONS)]}},
    },
    "reward": {
        "builtin": {"reward": ["brightness"]},
        "two": {"reward": ["brightness=0.5", "saturation=0.5"]},
        "function": {PARTS: {"rewards": {"bright": bright}}},
        "async": {PARTS: {"rewards": {"bright": bright_later}}},
        "class": {PARTS: {"rewards": {"spread": Spread}}},
        "column": {PARTS: {"rewards": {"near": near}}},
    },
    "updates": {
        "one": {},
        "two": {"updates_per_rollout": 2, "prompts_per_step": 2},
        "selective": {"selective_rollouts": 0.5, "prompts_per_step": 2},
    },
    "keep": {"none": {}, "overlap": {"overlap_rewards": True}, "rollouts": {"keep_rollouts": 2}},
    "evaluation": {
        "none": {},
        "held_out": lambda place: {
            "eval_prompts": place.root / "prompts.txt", "eval_reward": ["sharpness"], "eval_steps": 2,
        },
    },
    **SHARED,
}  # fmt: skip


#: Options that every run has.
BASE = {"pretrained_model_name_or_path": "demo://ltx", "train_steps": STEPS, "seed": 7, "dry_batches": "off"}
ON_CLIPS = {**BASE, "video_resolution_buckets": ["9x32x64"]}
ON_PROMPTS = {
    **BASE, "rollout_size": "1x32x32", "prompts_per_step": 1, "num_generations": 2, "sampling_steps": 4,
}  # fmt: skip
KINDS = {"clips": (CLIPS, ON_CLIPS), "prompts": (PROMPTS, ON_PROMPTS)}


#: Pairs of values that no run has together, since the program refuses them by name.
CONFLICTS = [
    (("method", "dpo"), ("source", "directory")),
    (("method", "dpo"), ("source", "archive")),
    (("method", "dpo"), ("cut", "windows")),
    (("method", "dpo"), ("captions", "lines")),
    (("source", "rows"), ("captions", "lines")),
    (("weights", "in_backward"), ("batch", "accumulated")),
    (("weights", "in_backward"), ("optimizer", "prodigy")),
    (("weights", "in_backward"), ("optimizer", "python")),
    (("weights", "in_backward"), ("memory", "int8")),
    (
        ("weights", "in_backward"),
        ("state", "plain"),
    ),  # weights change within a step, so that an interrupt saves nothing
    (("weights", "in_backward"), ("memory", "swap")),
    (("weights", "full"), ("memory", "int8")),
    (("weights", "full"), ("memory", "swap")),
    (("weights", "dora"), ("memory", "int8")),
    (("dtype", "rounded"), ("optimizer", "prodigy")),
    (("dtype", "rounded"), ("optimizer", "8bit")),
    (("dtype", "rounded"), ("optimizer", "python")),
    (("method", "refl"), ("reward", "function")),
    (("method", "refl"), ("reward", "async")),
    (("method", "refl"), ("reward", "column")),
    (("method", "refl"), ("updates", "two")),
    (("source", "file"), ("reward", "column")),
]


def _allowed(first: tuple[str, str], second: tuple[str, str]) -> dict[str, Any]:
    """Return the constraint that a row does not have both of two values."""
    unequal = [{"operator": "ne", "left": factor, "value": value} for factor, value in (first, second)]
    return {"operator": "or", "conditions": unequal}


def options_of(kind: str, row: Mapping[str, str], root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a row's run, and its keyword arguments of `train`."""
    factors, base = KINDS[kind]
    place = Place(root, row["method"])
    options: dict[str, Any] = {**base, "method": row["method"]}
    parts: dict[str, Any] = {}
    for factor, name in row.items():
        value = factors[factor][name]
        chosen = dict(value(place) if callable(value) else value)
        parts |= chosen.pop(PARTS, {})
        options |= chosen
    return options, parts


def rows(kind: str) -> list[dict[str, str]]:
    """Return the rows of the covering array: a value of each factor, by name."""
    factors, _ = KINDS[kind]
    names = {factor: list(values) for factor, values in factors.items()}
    conflicts = [pair for pair in CONFLICTS if all(value in names.get(factor, ()) for factor, value in pair)]
    made = covertable.make(names, constraints=[_allowed(*pair) for pair in conflicts])
    return [{factor: row[factor] for factor in factors} for row in made]
