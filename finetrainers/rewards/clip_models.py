"""Rewards from CLIP models, or from a few layers on one. They score single frames, so motion does not count.

A clip's score is the mean over `frames` frames spread evenly over it, 1 for the first. One frame is cheap, but trains a
model for that frame alone; PickScore has it as default because published numbers are of the first frame.

Their gradients are computed for one frame of each clip at a time, whose activations are recomputed in the backward
pass. So the memory is that of one frame, at the cost of an additional forward pass.

All take `path`, the Hub id or folder of the weights, and `device`: `auto` for this process's GPU if there is one, or a
torch device. `dtype` is `fp32`, `bf16` or `fp16`. Clips of a group differ by little, and bf16 has two to three digits.
All raise ValueError if the weights do not exist or do not fit.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize, pad
from torch.utils.checkpoint import checkpoint

from finetrainers.utils.failures import InputError

from .base import Head, Reward
from .frames import Frames, normalize_rgb, resize_as_pil, spread_indices, to_bytes
from .weights import (
    DTYPES,
    WIDTHS,
    Device,
    DType,
    WeightsPath,
    build,
    fetch_file,
    load_pretrained,
    load_settings,
    load_tokenizer,
    read_tensors,
    torch_device,
)

_CLIP_L = "openai/clip-vit-large-patch14"
_CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
_FRAME_OF_CLIP_H = 12.5 * 257 * 1280
_GRAPH_OF_CLIP_H = 332.0 * 257 * 1280  # of 32 layers


def cropped(frames: Tensor, size: int) -> Tensor:
    """Preprocess bytes `[N, 3, H, W]` as CLIP's image processor: short side to `size`, center crop, normalized."""
    height, width = frames.shape[-2:]
    short = min(height, width)
    frames = resize_as_pil(frames, (int(size * height / short), int(size * width / short)))
    top, left = (frames.shape[-2] - size) // 2, (frames.shape[-1] - size) // 2
    return normalize_rgb(frames[..., top : top + size, left : left + size])


def padded(frames: Tensor, size: int) -> Tensor:
    """Preprocess bytes `[N, 3, H, W]` as HPSv2: long side to `size` in fp32, padded with black, normalized."""
    longest = max(frames.shape[-2:])
    height, width = (max(1, round(side * size / longest)) for side in frames.shape[-2:])
    frames = interpolate(frames.float(), size=(height, width), mode="bicubic", antialias=True)
    top, left = (size - height) // 2, (size - width) // 2
    return normalize_rgb(pad(frames, (left, size - width - left, top, size - height - top)))


@dataclass(kw_only=True, eq=False)
class _FrameReward(Reward):
    """A network that scores single frames. The fields are its options; see the module."""

    path: WeightsPath
    frames: Frames = 4
    device: Device = "auto"
    dtype: DType = "fp32"

    #: Factor of the mean of the frames' scores.
    factor: ClassVar[float] = 1.0
    #: Numbers that a frame takes in the published network at its peak, counted on fake tensors: 16.6 times its 257
    #: tokens of 1024 numbers with CLIP-L's activation function, 12.5 times 1280 with that of CLIP-H.
    frame_numbers: ClassVar[float] = 16.6 * 257 * 1024
    differentiable: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    #: Numbers that a frame takes at the peak of `differentiate` and its backward: all 24 layers store activations.
    graph_numbers: ClassVar[float] = 352.0 * 257 * 1024

    def __post_init__(self) -> None:
        self._device = torch_device(self.device)
        self.model = self.load(DTYPES[self.dtype]).to(self._device)

    @abstractmethod
    def load(self, dtype: torch.dtype) -> Any:
        """Load the transformers model."""

    def text(self, prompts: Sequence[str]) -> Tensor | None:
        """Return embeddings to compare frames with, one row for each prompt, or None if prompts do not matter."""
        return None

    @abstractmethod
    def frame_scores(self, pixels: Tensor, text: Tensor | None) -> Tensor:
        """Return scores `[B, F]` of frames `[B, F, 3, size, size]`, preprocessed and on the device."""

    def pixels(self, frames: Tensor, size: int) -> Tensor:
        """Preprocess bytes `[N, 3, H, W]` for the network: `[N, 3, size, size]`."""
        return cropped(frames, size)

    @classmethod
    def working_bytes(
        cls, options: Mapping[str, str], size: tuple[int, int, int], *, clips: int, fps: float
    ) -> float | None:
        """See `Reward.working_bytes`; for the published network."""
        return cls._frame_bytes(options, size[0], clips=clips) * cls.frame_numbers

    @classmethod
    def graph_bytes(
        cls, options: Mapping[str, str], size: tuple[int, int, int], *, clips: int, fps: float
    ) -> float | None:
        """See `Reward.graph_bytes`; for the published network, and one frame of each clip."""
        return cls._frame_bytes(options, 1, clips=clips) * cls.graph_numbers

    @classmethod
    def _frame_bytes(cls, options: Mapping[str, str], total: int, *, clips: int) -> float:
        """Return the bytes of one number for each scored frame."""
        defaults = inspect.signature(cls).parameters
        frames = min(total, int(options.get("frames", defaults["frames"].default)))
        return float(clips * frames * WIDTHS[options.get("dtype", defaults["dtype"].default)])

    @torch.no_grad()
    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        """See `Reward.score`."""
        scores = self._scores(to_bytes(self._select_frames(videos)), self.text(prompts))
        return {"score": self.factor * scores.mean(dim=1).cpu()}

    def differentiate(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        """See `Reward.differentiate`."""
        with torch.no_grad():
            text = self.text(prompts)
        frames = (self._select_frames(videos) * 255).split(1, dim=1)
        scores = [
            checkpoint(self._scores, frame, text, use_reentrant=False, preserve_rng_state=False) for frame in frames
        ]
        return {"score": self.factor * torch.cat(scores, dim=1).mean(dim=1)}

    def _select_frames(self, videos: Tensor) -> Tensor:
        return videos[:, spread_indices(videos.shape[1], self.frames).to(videos.device)]

    def _scores(self, frames: Tensor, text: Tensor | None) -> Tensor:
        """Return scores `[B, F]` of frames `[B, F, 3, H, W]` in [0, 255]."""
        config = self.model.config
        pixels = self.pixels(frames.flatten(0, 1), getattr(config, "vision_config", config).image_size)
        return self.frame_scores(pixels.to(self._device, self.model.dtype).unflatten(0, frames.shape[:2]), text)


class _Similarity(_FrameReward):
    """Cosine similarity of a CLIP's embeddings of frame and prompt."""

    #: Option with the Hub id or folder of the tokenizer.
    tokenizer_option: ClassVar[str] = "path"

    def __post_init__(self) -> None:
        self._tokenizer = load_tokenizer(getattr(self, self.tokenizer_option))
        super().__post_init__()

    def load(self, dtype: torch.dtype) -> Any:
        from transformers import CLIPModel

        return load_pretrained(CLIPModel, self.path, dtype=dtype)

    def text(self, prompts: Sequence[str]) -> Tensor:
        length = self.model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(self._device)
        pooled = self.model.text_model(tokens["input_ids"], attention_mask=tokens["attention_mask"]).pooler_output
        return normalize(self.model.text_projection(pooled).float(), dim=-1)

    def frame_scores(self, pixels: Tensor, text: Tensor | None) -> Tensor:
        assert text is not None
        pooled = self.model.vision_model(pixels.flatten(0, 1)).pooler_output
        images = normalize(self.model.visual_projection(pooled).float(), dim=-1)
        return torch.einsum("bfd,bd->bf", images.unflatten(0, pixels.shape[:2]), text)


@dataclass(kw_only=True, eq=False)
class CLIPScore(_Similarity):
    """Cosine of CLIP's embeddings of frames and prompt, in [-1, 1]; about 0.2 to 0.35 for photos with their captions.

    `path` is that of a CLIP, including its tokenizer.
    """

    path: WeightsPath = _CLIP_L


@dataclass(kw_only=True, eq=False)
class PickScore(_Similarity):
    """PickScore (Kirstain et al., 2023, arXiv:2305.01569): a CLIP-H finetuned on people's choices between images.

    The raw score is the model's logit, its temperature times the cosine: about 16 to 25. Normalized it is divided by
    26, as in other trainers. `tokenizer` is its Hub id or folder, by default that of the finetuned CLIP.
    """

    path: WeightsPath = "yuvalkirstain/PickScore_v1"
    tokenizer: WeightsPath = _CLIP_H
    frames: Frames = 1

    heads: ClassVar[Mapping[str, Head]] = {"score": Head(std=26.0)}
    frame_numbers: ClassVar[float] = _FRAME_OF_CLIP_H
    graph_numbers: ClassVar[float] = _GRAPH_OF_CLIP_H
    tokenizer_option: ClassVar[str] = "tokenizer"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.factor = float(self.model.logit_scale.float().exp())  # type: ignore[misc]


@dataclass(kw_only=True, eq=False)
class HPSv2(_Similarity):
    """HPSv2.1 (Wu et al., 2023, arXiv:2306.09341): open_clip's ViT-H-14 finetuned on people's rankings of images.

    The score is the plain cosine, about 0.2 to 0.35. The published weights have open_clip's names; they are loaded
    into transformers' CLIP, which computes the same.

    Attributes:
        path: the file `HPS_v2.1_compressed.pt`, or a folder or Hub id with it.
        clip: Hub id or folder with the configuration and tokenizer of the finetuned CLIP, not its weights.
    """

    path: WeightsPath = "xswu/HPSv2"
    clip: WeightsPath = _CLIP_H

    frame_numbers: ClassVar[float] = _FRAME_OF_CLIP_H
    graph_numbers: ClassVar[float] = _GRAPH_OF_CLIP_H
    tokenizer_option: ClassVar[str] = "clip"

    def load(self, dtype: torch.dtype) -> Any:
        from transformers import CLIPConfig, CLIPModel

        file = fetch_file(self.path, names=["HPS_v2.1_compressed.pt"])
        state = from_open_clip(read_tensors(file, within=["state_dict"]))
        return build(CLIPModel, load_settings(CLIPConfig, self.clip), state, dtype=dtype, source=file)

    def pixels(self, frames: Tensor, size: int) -> Tensor:
        return padded(frames, size)


@dataclass(kw_only=True, eq=False)
class Aesthetic(_FrameReward):
    """LAION's aesthetic predictor (`sac+logos+ava1-l14-linearMSE`): linear layers on CLIP-L's embedding of a frame.

    It predicts people's ratings of images, from 1 to 10, and ignores prompts. The layers are fp32.

    Attributes:
        path: the file of the layers (`sac+logos+ava1-l14-linearMSE.pth`), or a folder or Hub id with it.
        clip: Hub id or folder of the CLIP.
    """

    path: WeightsPath = "trl-lib/ddpo-aesthetic-predictor"
    clip: WeightsPath = _CLIP_L

    weights_options: ClassVar[tuple[str, ...]] = ("path", "clip")

    def load(self, dtype: torch.dtype) -> Any:
        from transformers import CLIPVisionModelWithProjection

        file = fetch_file(self.path, names=["sac+logos+ava1-l14-linearMSE.pth", "aesthetic-model.pth"])
        model = load_pretrained(CLIPVisionModelWithProjection, self.clip, dtype=dtype)
        layers = aesthetic_layers(model.config.projection_dim)
        state = {name.removeprefix("layers."): tensor for name, tensor in read_tensors(file).items()}
        try:
            layers.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise InputError(f"{file} does not fit {self.clip}: {error}", "mismatch") from error
        self._layers = layers.float().eval().requires_grad_(False).to(self._device)
        return model

    def frame_scores(self, pixels: Tensor, text: Tensor | None) -> Tensor:
        embeddings = self.model(pixel_values=pixels.flatten(0, 1)).image_embeds
        return self._layers(normalize(embeddings.float(), dim=-1)).view(pixels.shape[:2])


def aesthetic_layers(width: int) -> nn.Sequential:
    """Return the predictor's layers on the meta device, numbered as in its file, with the dropout of its training.

    No activation functions are between them.
    """
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )


_TOWERS = {"": "text_model", "visual.": "vision_model"}
_IN_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
_OUTSIDE = {
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
    "logit_scale": "logit_scale",
}
#: open_clip multiplies by these from the right, a linear layer from the left.
_TRANSPOSED = ("text_projection", "visual.proj")


def from_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of open_clip's `CLIP` with the names of transformers' `CLIPModel`; unknown names stay."""
    renamed = {}
    for name, tensor in state.items():
        tower, is_block, rest = name.partition("transformer.resblocks.")
        if is_block and tower in _TOWERS:
            index, _, inside = rest.partition(".")
            layer = f"{_TOWERS[tower]}.encoder.layers.{index}"
            if inside.startswith("attn.in_proj_"):
                kind = inside.removeprefix("attn.in_proj_")
                for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                    renamed[f"{layer}.self_attn.{letter}_proj.{kind}"] = part.contiguous()
            else:
                module, _, kind = inside.rpartition(".")
                renamed[f"{layer}.{_IN_BLOCK.get(module, module)}.{kind}"] = tensor
        elif name in _TRANSPOSED:
            renamed[_OUTSIDE[name]] = tensor.T.contiguous()
        elif name != "attn_mask":  # a constant that older versions saved
            renamed[_OUTSIDE.get(name, name)] = tensor
    return renamed
