"""Files that are not what they should be: crafted weights, clocks that jump, code from elsewhere."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from peft import get_peft_model_state_dict
from refusals import refused
from safetensors import SafetensorError
from safetensors.torch import save
from torch import nn

import finetrainers
from finetrainers.config.sections import TrainingSection
from finetrainers.plan.initial_weights import LORA_FILE
from finetrainers.plan.trainable import make_trainable
from finetrainers.rundir import publish
from finetrainers.rundir.find import find_checkpoint
from finetrainers.training.trained_weights import load_lora_weights


def crafted(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file of this header, which may lie about its own length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, stop: int, shape: tuple[int, ...] = (4,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.fixture(scope="module")
def adapted(tiny_repo: Callable[..., Path]) -> nn.Module:
    """A network with an adapter that waits for its weights."""
    transformer = LTXVideoTransformer3DModel.from_pretrained(tiny_repo("ltx_video"), subfolder="transformer")
    make_trainable(transformer, TrainingSection(rank=4))
    return transformer


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        crafted({}, length=2**62),
        crafted(b"not json"),
        crafted({"a": entry(0, 16)}),  # without its data
        crafted({"a": entry(0, 16), "b": entry(8, 24)}, b"\x00" * 24),  # two tensors in one place
        crafted({"a": entry(0, 8)}, b"\x00" * 8),  # fewer bytes than its shape
        crafted({"a": entry(0, 16, (-4,))}, b"\x00" * 16),
        crafted({"a": entry(0, 16)}, b"\x00" * 64),  # more data than tensors
        crafted(b'{"a": ' + json.dumps(entry(0, 16)).encode() + b"}}", b"\x00" * 16),
        save({"transformer.unknown.lora_A.weight": torch.zeros(4, 4)}),
    ],
    ids=["empty", "short", "length", "text", "cut", "overlap", "small", "negative", "long", "brace", "names"],
)
def test_crafted_weights_are_refused(content: bytes, adapted: nn.Module, tmp_path: Path) -> None:
    (tmp_path / LORA_FILE).write_bytes(content)
    with pytest.raises((SafetensorError, ValueError)):
        load_lora_weights(tmp_path, adapted)


def test_weights_of_other_shapes_are_refused(adapted: nn.Module, tmp_path: Path) -> None:
    state = {f"transformer.{name}": tensor.clone() for name, tensor in get_peft_model_state_dict(adapted).items()}
    name = next(iter(state))
    cut = state[name][:1].clone()
    (tmp_path / LORA_FILE).write_bytes(save({**state, name: cut}))
    with refused("mismatch", tmp_path / LORA_FILE, name.removeprefix("transformer."), list(cut.shape)):
        load_lora_weights(tmp_path, adapted)
    (tmp_path / LORA_FILE).write_bytes(save(state))
    load_lora_weights(tmp_path, adapted)


def test_the_newest_checkpoint_is_that_of_the_highest_step_whatever_the_clock_says(tmp_path: Path) -> None:
    for step, time in ((9, 3e9), (10, 2e9), (11, 0.0)):
        final = tmp_path / "checkpoints" / f"step-{step}"
        temporary = publish.reserve(final, needed=0)
        (temporary / "state.json").write_text("{}")
        publish.publish(temporary, final, facts={"step": step})
        os.utime(final, (time, time))
    assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoints" / "step-11"
    assert [path.name for path in publish.prune(tmp_path, step=11, limit=2)] == ["step-9"]


def test_no_code_comes_with_a_model() -> None:
    """Repositories may hold Python files; no call here lets a library run them."""
    package = Path(finetrainers.__file__).parent
    said = [
        line for path in package.rglob("*.py") for line in path.read_text().splitlines() if "trust_remote_code" in line
    ]
    assert said, "the loaders of rewards refuse such code by name"
    assert [line for line in said if not re.search(r"trust_remote_code\W*[=:] ?False", line)] == []
