"""Qwen2-VL as a reward model: hidden states at marked tokens, and a head that maps them to scores.

Two things differ from Qwen2-VL for chat, because the published reward models were trained this way:

- Positions are plain 0, 1, 2, ..., even within a video. Training ran the language model on embeddings with the frames
  already merged, so it could not know which tokens are frames. Calling the whole model with token ids and grids would
  use positions in time, height and width, and return other scores without a warning.
- Training cast the network to bf16 with its rotary frequencies, and in the vision tower computed angles, cosines and
  sines in bf16 as well. Weights were fitted to the rounded values, so these are kept at every dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen2_vl import modeling_qwen2_vl

from finetrainers.utils.failures import InputError

from .videoalign_input import MERGE, added_tokens, chat, placeholder_id, tokenise
from .weights import build, load_settings, load_tokenizer, read_sharded, torch_device

_EMBEDDINGS = "language_model.embed_tokens.weight"
#: Prefixes of the two towers in checkpoints, saved by transformers before 4.52 and since. The first match counts.
_TOWERS = (
    (re.compile(r"^model\.visual\."), "visual."),
    (re.compile(r"^model\.language_model\."), "language_model."),
    (re.compile(r"^model\."), "language_model."),
)
_ADAPTER = re.compile(r"\.lora_([AB])(?:\.default)?\.weight$")


class RewardNetwork(nn.Module):
    """Qwen2-VL with a head that is always in fp32, so that close scores do not round to the same number."""

    def __init__(self, backbone: modeling_qwen2_vl.Qwen2VLModel, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head.float().eval().requires_grad_(False)
        _round_rotary_frequencies(backbone)

    def forward(
        self, tokens: Tensor, patches: Tensor, grids: Tensor, *, vision_token: int, marks: Sequence[int]
    ) -> Tensor:
        """Return the head's outputs at each mark, `[B, marks, outputs]` fp32.

        Args:
            tokens: ids `[B, L]`, padded on the right; every mark occurs once in a row.
            patches: `[N, 1176]` of all rows, in their order.
            grids: patches along time, height and width of every video or image, `[V, 3]`.
            vision_token: the id that stands for a token of a video or image.
            marks: token ids whose states are read.
        """
        embedded = self.backbone.get_input_embeddings()(tokens)
        vision_states = self.backbone.visual(patches.to(embedded.dtype), grid_thw=grids).pooler_output
        is_vision = (tokens == vision_token).unsqueeze(-1).expand_as(embedded)
        # No mask: a causal network never looks at the padding on the right.
        states = self.backbone.language_model(
            inputs_embeds=embedded.masked_scatter(is_vision, vision_states.to(embedded.dtype)),
            position_ids=torch.arange(tokens.shape[1], device=tokens.device).expand(3, *tokens.shape),
            use_cache=False,
        ).last_hidden_state
        positions = torch.stack([(tokens == mark).int().argmax(dim=1) for mark in marks], dim=1)
        rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        return self.head(states[rows, positions].float())


def working_bytes(
    *, patches: int, rows: int, text_tokens: int, hidden: int, intermediate: int, bytes_per_number: int
) -> float:
    """Return the peak bytes of `RewardNetwork`, excluding its weights: of its vision tower or its language model.

    Counted on the operations of both: a patch takes 17 of the tower's 1280 numbers, its pixels in fp32 and in the dtype
    of computation, and its rotary angles; a token 5 hidden states and 3 of the feed-forward layer.

    Args:
        patches: of each row's videos or images.
        rows: scored at once.
        text_tokens: approximate number in a row's question.
        hidden, intermediate: of the language model.
        bytes_per_number: of the dtype of computation.
    """
    vision_bytes = rows * patches * ((17 * 1280 + 1176) * bytes_per_number + 1176 * 4 + 640)
    language_bytes = rows * (patches / MERGE**2 + text_tokens) * (5 * hidden + 3 * intermediate) * bytes_per_number
    return max(vision_bytes, language_bytes)


class Judge:
    """A reward model that is asked a question about videos or images, and scores them at the marks in it."""

    def __init__(self, base: Path, *, question: str, vision: str, marks: Sequence[str], device: str) -> None:
        """Args:
            base: folder with the configuration and tokenizer of the finetuned Qwen2-VL.
            question: the text of its training, with `{text_prompt}` in place of the prompt.
            vision: the input, `video` or `image`.
            marks: names of the tokens whose states it scores.
            device: see `torch_device`.

        Raises:
            ValueError: something is missing, or does not fit.
        """
        self.base, self.question, self.device = base, question, torch_device(device)
        self.config = base_config(base)
        self.tokenizer = load_tokenizer(base)
        self.marks = added_tokens(self.tokenizer, marks)
        self.placeholder = f"<|{vision}_pad|>"
        expected = getattr(self.config, f"{vision}_token_id")
        self.vision_token = placeholder_id(self.tokenizer, self.placeholder, expected=expected)

    def load(self, state: dict[str, Tensor], head: nn.Module, *, dtype: torch.dtype, source: Path) -> None:
        """Load the network of a checkpoint.

        Args:
            state: tensors with the names of `backbone_names`, adapters merged.
            head: the head on the meta device; the checkpoint has its weights under `rm_head.`.
            dtype: of all tensors but those of the head.
            source: the checkpoint, for messages.

        Raises:
            ValueError: checkpoint, head, base and tokenizer do not fit each other.
        """
        if not hasattr(modeling_qwen2_vl, "Qwen2VLVisionRotaryEmbedding"):
            raise InputError(
                f"transformers {transformers.__version__} builds Qwen2-VL differently from 5.23, the tested version: "
                "pip install -U transformers",
                "not_installed",
            )
        head_state = {
            name.removeprefix("rm_head."): state.pop(name) for name in list(state) if name.startswith("rm_head.")
        }
        try:
            head.load_state_dict(head_state, assign=True)
        except RuntimeError as error:
            raise InputError(f"{source}: {error}", "mismatch") from error
        if _EMBEDDINGS in state:
            # Training cut the embeddings to the tokenizer's length, so the tokens added last have the last rows.
            rows = len(state[_EMBEDDINGS])
            if self.marks != list(range(rows - len(self.marks), rows)):
                raise InputError(
                    f"{source} was trained with tokens numbered to {rows - 1}, but with the tokenizer of {self.base}"
                    f" the reward tokens have the ids {self.marks}: it is not the tokenizer of training",
                    "mismatch",
                )
            self.config.text_config.vocab_size = rows
        backbone = build(modeling_qwen2_vl.Qwen2VLModel, self.config, state, dtype=dtype, source=source)
        self.network = RewardNetwork(backbone, head).to(self.device)

    def tokens(self, prompts: Sequence[str], *, grid: Tensor) -> Tensor:
        """Return token ids `[B, L]` of the question about videos or images with this grid, one prompt each."""
        vision_tokens = int(grid.prod()) // MERGE**2
        texts = [
            chat(self.placeholder, vision_tokens, self.question.replace("{text_prompt}", prompt)) for prompt in prompts
        ]
        return tokenise(
            self.tokenizer, texts, expected={self.vision_token: vision_tokens, **dict.fromkeys(self.marks, 1)}
        )

    @torch.no_grad()
    def outputs(self, prompts: Sequence[str], patches: Tensor, grids: Tensor) -> Tensor:
        """Return the head's outputs at each mark, `[B, marks, outputs]` fp32; see `to_patches` for the patches."""
        inputs = (self.tokens(prompts, grid=grids[0]), patches, grids)
        return self.network(
            *(tensor.to(self.device) for tensor in inputs), vision_token=self.vision_token, marks=self.marks
        )


def backbone_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the names of `Qwen2VLModel`, the head's under `rm_head.`, without the output layer."""
    renamed = {}
    for name, tensor in state.items():
        name = name.removeprefix("base_model.model.")
        for pattern, tower in _TOWERS:
            name, match_count = pattern.subn(tower, name)
            if match_count:
                break
        if not name.startswith("lm_head."):
            renamed[name] = tensor
    return renamed


def merge_adapter(
    state: Mapping[str, Tensor], *, alpha: float, rank_stabilised: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return weights with their LoRA matrices added in fp32, the sums then in `dtype`.

    `W + alpha / r B A` of LoRA (Hu et al., 2021), or `W + alpha / sqrt(r) B A` of its rank-stabilised form.

    Raises:
        ValueError: a matrix lacks its partner or the weight that it changes.
    """
    merged: dict[str, Tensor] = {}
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        match = _ADAPTER.search(name)
        if match:
            matrices.setdefault(f"{name[: match.start()]}.weight", {})[match[1]] = tensor
        else:
            merged[name.replace(".base_layer.", ".")] = tensor
    for name, pair in matrices.items():
        if name not in merged or len(pair) != 2:
            raise InputError(
                f"the checkpoint's LoRA of {name} lacks its other matrix or the weight itself", "not_found"
            )
        rank = len(pair["A"])
        scale = alpha / (rank**0.5 if rank_stabilised else rank)
        merged[name] = (merged[name].float() + scale * (pair["B"].float() @ pair["A"].float())).to(dtype)
    return merged


def base_config(base: Path) -> Any:
    """Load the configuration of the Qwen2-VL in a folder.

    Raises:
        ValueError: there is none, or it belongs to another model.
    """
    if not (base / "config.json").is_file():
        raise InputError(f"{base} holds no config.json; base= must be a directory or Hub id of Qwen2-VL", "not_found")
    config = load_settings(transformers.AutoConfig, base)
    if config.model_type != "qwen2_vl":
        raise InputError(f"{base} is a {config.model_type}; base= must be a Qwen2-VL", "mismatch")
    return config


def base_weights(base: Path, *, rows: int) -> dict[str, Tensor]:
    """Load the weights of the Qwen2-VL in a folder, with the names of `backbone_names`.

    The embeddings are cut to `rows` tokens.
    """
    state = backbone_names(read_sharded(base))
    if _EMBEDDINGS in state:
        state[_EMBEDDINGS] = state[_EMBEDDINGS][:rows]
    return state


class _VisionRotary(nn.Module):
    """The vision tower's rotary embedding with the roundings of bf16."""

    frequencies: Tensor

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies.bfloat16(), persistent=False)

    def forward(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[N, head size]` of rows and columns `position_ids [N, 2]`."""
        angles = (position_ids[:, :, None].bfloat16() * self.frequencies.bfloat16()).flatten(1)
        angles = torch.cat([angles, angles], dim=1)
        return angles.cos().float(), angles.sin().float()


def _round_rotary_frequencies(backbone: modeling_qwen2_vl.Qwen2VLModel) -> None:
    text = backbone.language_model.rotary_emb
    text.inv_freq = text.inv_freq.bfloat16().float()
    backbone.visual.rotary_pos_emb = _VisionRotary(backbone.visual.rotary_pos_emb.inv_freq)
