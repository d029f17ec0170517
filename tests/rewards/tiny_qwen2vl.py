"""A tiny Qwen2-VL in the layout of the hub's repositories, and the network once more, in float64 and by hand.

The second one shares no code with the first: it is written from what the published reward models compute (convolved
patches in raster order, attention within a pair of frames, plain positions, LoRA beside the weights).
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLModel

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CONFIG = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 32,
        "in_chans": 3,
        "mlp_ratio": 4,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}


def tokenizer_of(text: str) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer to which the words of a text, after a blank, are single tokens."""
    merges: dict[tuple[str, str], None] = {}
    for word in dict.fromkeys(re.findall(r"(?<= )[A-Za-z]+", text)):
        current = "\u0120"  # a blank
        for letter in word:
            merges.setdefault((current, letter))
            current += letter
    tokens = dict.fromkeys([*sorted(ByteLevel.alphabet()), *(a + b for a, b in merges)])
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges), extra_special_tokens=list(SPECIAL)
    )


def write_base(folder: Path, text: str, *, generator: torch.Generator, marks: int) -> dict[str, Tensor]:
    """Write the repository, its weights named as on the hub; give them named as transformers' `Qwen2VLModel` does.

    The embeddings have rows for so many marks, and a few that nobody uses, as the real ones have.
    """
    tokenizer = tokenizer_of(text)
    tokenizer.save_pretrained(folder)
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    config = {
        **CONFIG,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vocab_size": len(tokenizer) + marks + 5,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Qwen2VLModel(Qwen2VLConfig(**config)).state_dict().items()}
    state = {name: random_weight(shape, generator) for name, shape in shapes.items()}
    save_file({hub_name(name): tensor for name, tensor in state.items()}, folder / "model.safetensors")
    return state


def random_weight(shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Matrices that keep the size of what goes through them; vectors around 1."""
    if len(shape) == 1:
        return 1 + 0.3 * torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) * 1.5 / math.sqrt(math.prod(shape[1:]))


def hub_name(name: str) -> str:
    """`Qwen2VLModel`'s name of a tensor, as transformers before 4.52 called it in the model with an output layer."""
    return f"model.{name.removeprefix('language_model.')}" if name.startswith("language_model.") else name


class Reference:
    """The network in float64."""

    def __init__(self, state: dict[str, Tensor], lora: dict[str, tuple[Tensor, Tensor, float]] | None = None) -> None:
        self.state = {name: tensor.double() for name, tensor in state.items()}
        self.lora = lora or {}

    def states(self, ids: list[int], vision_token: int, frames: Tensor) -> Tensor:
        """Return the last states `[L, 32]` of one row of tokens; normalized frames `[T, 3, H, W]` replace theirs."""
        x = self.state["language_model.embed_tokens.weight"][ids]
        x[torch.tensor(ids) == vision_token] = self.vision(frames.double())
        length, heads, groups = len(ids), 4, 2
        size = x.shape[1] // heads
        frequencies = 1 / 1000000 ** (torch.arange(0, size, 2).float() / size)
        angles = torch.arange(length).float()[:, None] * frequencies.bfloat16().float()  # trained in bf16
        cos, sin = angles.double().cos(), angles.double().sin()
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        for i in range(CONFIG["num_hidden_layers"]):
            layer = f"language_model.layers.{i}"
            y = self.rms(x, f"{layer}.input_layernorm")
            q, k, v = (self.linear(y, f"{layer}.self_attn.{n}_proj").view(length, -1, size) for n in "qkv")
            attended = []
            for head in range(heads):
                shared = head // (heads // groups)
                logits = turn(q[:, head], cos, sin) @ turn(k[:, shared], cos, sin).T / math.sqrt(size)
                attended.append(logits.masked_fill(hidden, -math.inf).softmax(dim=1) @ v[:, shared])
            x = x + self.linear(torch.cat(attended, dim=1), f"{layer}.self_attn.o_proj")
            y = self.rms(x, f"{layer}.post_attention_layernorm")
            gate = F.silu(self.linear(y, f"{layer}.mlp.gate_proj")) * self.linear(y, f"{layer}.mlp.up_proj")
            x = x + self.linear(gate, f"{layer}.mlp.down_proj")
        return self.rms(x, "language_model.norm")

    def vision(self, frames: Tensor) -> Tensor:
        """Tokens `[N, 32]` of a clip: pair by pair of frames, within one row by row."""
        tokens = []
        for pair in frames.split(2):
            weight = self.state["visual.patch_embed.proj.weight"]
            patches = F.conv3d(pair.transpose(0, 1)[None], weight, stride=(2, 14, 14))[0, :, 0]
            width, rows, columns = patches.shape
            x = patches.flatten(1).T
            cos, sin = vision_rotary(rows, columns, width // 2)
            for i in range(CONFIG["vision_config"]["depth"]):
                block = f"visual.blocks.{i}"
                y = self.linear(self.layer_norm(x, f"{block}.norm1"), f"{block}.attn.qkv").view(len(x), 3, 2, -1)
                attended = []
                for head in range(2):
                    q, k, v = y[:, 0, head], y[:, 1, head], y[:, 2, head]
                    logits = turn(q, cos, sin) @ turn(k, cos, sin).T / math.sqrt(q.shape[1])
                    attended.append(logits.softmax(dim=1) @ v)
                x = x + self.linear(torch.cat(attended, dim=1), f"{block}.attn.proj")
                y = self.linear(self.layer_norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")
                x = x + self.linear(y * torch.sigmoid(1.702 * y), f"{block}.mlp.fc2")
            x = self.layer_norm(x, "visual.merger.ln_q").view(rows, columns, width)
            four = torch.cat([x[0::2, 0::2], x[0::2, 1::2], x[1::2, 0::2], x[1::2, 1::2]], dim=2).flatten(0, 1)
            y = F.gelu(self.linear(four, "visual.merger.mlp.0"))
            tokens.append(self.linear(y, "visual.merger.mlp.2"))
        return torch.cat(tokens)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """The layer of this name, with its LoRA beside it."""
        y = F.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))
        if name in self.lora:
            a, b, scale = self.lora[name]
            y = y + scale * (x @ a.double().T) @ b.double().T
        return y

    def rms(self, x: Tensor, name: str) -> Tensor:
        """Root mean square norm."""
        return x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * self.state[f"{name}.weight"]

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        """Layer norm."""
        return F.layer_norm(x, x.shape[1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], 1e-6)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: number i of the first half and number i of the second are a point that is turned."""
    a, b = x.chunk(2, dim=1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=1)


def vision_rotary(rows: int, columns: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[rows * columns, size / 2]`: half of the numbers turn with the row, half with the column."""
    frequencies = (1 / 10000 ** (torch.arange(0, size // 2, 2).float() / (size // 2))).bfloat16()
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    angles = torch.cat([places[:, :1].bfloat16() * frequencies, places[:, 1:].bfloat16() * frequencies], dim=1)
    return angles.double().cos().bfloat16().double(), angles.double().sin().bfloat16().double()
