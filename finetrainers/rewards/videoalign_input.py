"""Inputs of Qwen2-VL reward models: frames as patches, and the chat text of their training.

The arithmetic (frame counts, sizes, order of patches) is that of qwen-vl-utils and of Qwen2-VL's processor. Everything
is computed here from frames in memory: transformers' own video processor needs torchvision and a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from finetrainers.utils.failures import InputError

PATCH = 14
#: Patches of two frames and 2 x 2 positions become one token, so sizes are multiples of 28 and frame counts even.
PAIR = 2
MERGE = 2
FACTOR = PATCH * MERGE

_MIN_FRAMES = 4
_MAX_FRAMES = 768
_MAX_RATIO = 200


def frame_indices(total: int, *, fps: float, sample_fps: float) -> Tensor:
    """Return indices of the scored frames: an even number, at least 4 if there are, spread over the whole clip.

    Args:
        total: frames of the clip.
        fps: rate at which it plays: at a lower rate, the clip lasts longer, and more of its frames are scored.
        sample_fps: scored frames per second.

    Raises:
        ValueError: the clip has a single frame.
    """
    if total < PAIR:
        raise ValueError(f"a clip of {total} frame is not a video; at least {PAIR} frames are required")
    max_frames = min(_MAX_FRAMES, total) // PAIR * PAIR
    count = min(max(total / fps * sample_fps, _MIN_FRAMES), max_frames)
    # Python's round, to even at halves, as in training.
    return torch.linspace(0, total - 1, round(count / PAIR) * PAIR).round().long()


def fitting_size(height: int, width: int, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return multiples of 28 near a frame's size, with about its shape, and a number of pixels within limits.

    Raises:
        ValueError: the frame is more than 200 times as long as wide.
    """
    if max(height, width) > _MAX_RATIO * min(height, width):
        raise ValueError(f"frames of {height}x{width} are too long: at most {_MAX_RATIO} times as long as wide")
    high = max(FACTOR, round(height / FACTOR) * FACTOR)
    wide = max(FACTOR, round(width / FACTOR) * FACTOR)
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        high = max(FACTOR, math.floor(height / shrink / FACTOR) * FACTOR)
        wide = max(FACTOR, math.floor(width / shrink / FACTOR) * FACTOR)
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high = math.ceil(height * grow / FACTOR) * FACTOR
        wide = math.ceil(width * grow / FACTOR) * FACTOR
    return high, wide


def to_patches(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Return a normalized clip as Qwen2-VL's patches.

    Patches come in blocks of 2 x 2, which become one token. Within a patch the order is channel, frame, row, column.

    Args:
        frames: `[T, 3, H, W]`, T even, H and W multiples of 28.

    Returns:
        Patches `[N, 1176]` and their counts along time, height and width, `[3]`.
    """
    pairs, high, wide = len(frames) // PAIR, frames.shape[2] // FACTOR, frames.shape[3] // FACTOR
    split = frames.reshape(pairs, PAIR, 3, high, MERGE, PATCH, wide, MERGE, PATCH)
    ordered = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    grid = torch.tensor([pairs, high * MERGE, wide * MERGE])
    return ordered.reshape(int(grid.prod()), -1), grid


def chat(vision: str, tokens: int, text: str) -> str:
    """Return one user's message in Qwen2-VL's chat format, open for the answer: a video or image before a text.

    Args:
        vision: name of the token that stands for a token of the video or image.
        tokens: their number.
        text: after the video or image.
    """
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n<|vision_start|>{vision * tokens}<|vision_end|>{text}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def tokenise(tokenizer: Any, texts: Sequence[str], *, expected: dict[int, int]) -> Tensor:
    """Return token ids `[B, L]` of prompts in chat format, padded on the right.

    Args:
        tokenizer: a transformers tokenizer.
        texts: to tokenize.
        expected: required count of each of these token ids in every text.

    Raises:
        ValueError: a count differs: a prompt spells a token out, or the tokenizer does not know it.
    """
    rows = [torch.tensor(ids) for ids in tokenizer(list(texts))["input_ids"]]
    for row in rows:
        for token, expected_count in expected.items():
            count = int((row == token).sum())
            if count != expected_count:
                name = tokenizer.convert_ids_to_tokens(token)
                raise ValueError(
                    f"{name} occurs {count} times instead of {expected_count}; a prompt must not contain it"
                )
    return pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id or 0)


def added_tokens(tokenizer: Any, names: Sequence[str]) -> list[int]:
    """Add special tokens to the tokenizer, and return their ids.

    Raises:
        ValueError: two tokens share an id.
    """
    tokenizer.add_tokens(list(names), special_tokens=True)
    ids = [int(i) for i in tokenizer.convert_tokens_to_ids(list(names))]
    if len(set(ids)) != len(ids) or tokenizer.convert_ids_to_tokens(ids) != list(names):
        raise InputError(
            f"the tokenizer gives {', '.join(names)} the ids {ids}; each must have its own id", "duplicate"
        )
    return ids


def placeholder_id(tokenizer: Any, name: str, *, expected: int) -> int:
    """Return the id of the token that stands for a token of a video or image.

    Raises:
        ValueError: it differs from the model's configuration.
    """
    token_id = tokenizer.convert_tokens_to_ids(name)
    if token_id != expected:
        raise InputError(
            f"the tokenizer gives {name} the id {token_id}, the model's config.json {expected}", "mismatch"
        )
    return expected
