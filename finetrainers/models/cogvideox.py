"""CogVideoX 1.0 and 1.5, text or image to video, and CogVideoX-Fun with a control video: v-prediction models.

They predict v over the checkpoint's own noise schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar

import diffusers
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn
from transformers import T5EncoderModel, T5Tokenizer

from finetrainers.config.facts import Activations
from finetrainers.diffusion.process import Process, VariancePreserving
from finetrainers.utils.failures import InputError

from . import common
from .batch import ModelComponents, PromptEmbeds, SampleRequest, VAEStats, VideoMeta
from .common import input_dtype
from .compiling import unwrap
from .flops import AttentionSpec
from .spec import ModelSpec
from .split.attention import AttentionFn
from .split.sequence import SequenceParallelPlan

logger = logging.getLogger(__name__)

#: Value that the pipelines pass to checkpoints with an `ofs` embedding (1.5 image to video).
OFS = 2.0


class CogVideoXAttnProcessor(CogVideoXAttnProcessor2_0):
    """diffusers' attention, which calls PyTorch's own function, by a chosen backend."""

    def __init__(self, attend: AttentionFn) -> None:
        super().__init__()
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert attention_mask is None, "the network gives none"
        text = encoder_hidden_states.shape[1]
        joint = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        query, key, value = (
            project(joint).unflatten(2, (attn.heads, -1)).transpose(1, 2)
            for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        if image_rotary_emb is not None:
            query[:, :, text:] = apply_rotary_emb(query[:, :, text:], image_rotary_emb)
            key[:, :, text:] = apply_rotary_emb(key[:, :, text:], image_rotary_emb)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        outputs = self.attend(query, key, value, text=(text, 0)).flatten(2, 3)
        outputs = attn.to_out[1](attn.to_out[0](outputs))
        return outputs[:, text:], outputs[:, :text]


class CogVideoXSpec(ModelSpec):
    """CogVideoX as its pipelines run it. Conditions: `prompt_embeds`, without a mask (padding is attended to).

    A checkpoint with twice as many input as output channels is an image-to-video one (`first_frame` is "channels"), or
    takes a control video (`media`).
    """

    parts: ClassVar = {
        "tokenizer": T5Tokenizer,
        "text_encoder": T5EncoderModel,
        "vae": AutoencoderKLCogVideoX,
        "transformer": CogVideoXTransformer3DModel,
    }
    activations: ClassVar = {
        "lora": Activations(
            kept=(20.5,), outside=8.6, checkpointed=1.01, forward=17.5, backward=31.1, attention=1.05, between=4.1
        ),
        "lora without autocast": Activations(
            kept=(14.4,), outside=8.6, checkpointed=1.01, forward=11.3, backward=22.8, attention=1.05, between=2.1
        ),
        "full-finetune without autocast": Activations(
            kept=(23.4,), outside=6.0, checkpointed=1.01, forward=12.3, backward=27.5, attention=1.05, between=4.2
        ),
        "full-finetune": Activations(
            kept=(31.6,), outside=10.5, checkpointed=1.01, forward=17.0, backward=40.0, attention=1.05, between=6.9
        ),
    }
    unquantized = ("^patch_embed", "^time_embedding", "^ofs_embedding", "norm", "^proj_out$")
    streams: ClassVar = {
        "time_|ofs_|norm": "time", "text_proj": "prompt", "^transformer_blocks": "joint", "": "video",
    }  # fmt: skip
    attentions = (AttentionSpec("transformer_blocks", "joint", "joint"),)
    vae_pixel_bytes, vae_frames_at_once, vae_tile = 3830, 12, (240, 360)
    vae_graph_bytes = (4720, 1740, 22700)
    _last_positions: tuple[Any, tuple[Tensor, Tensor] | None] | None = None
    attention_processor = CogVideoXAttnProcessor
    token_plan = SequenceParallelPlan(
        inputs={"image_rotary_emb": 0}, outputs={"patch_embed": 1}, text_first=("patch_embed",)
    )
    casts_latents = False

    @property
    def image_pipeline_class(self) -> Any:  # type: ignore[override]
        """Separate pipeline of image-to-video checkpoints, or None for others."""
        return diffusers.CogVideoXImageToVideoPipeline if self.facts.first_frame == "channels" else None

    @property
    def pipeline_class(self) -> Any:  # type: ignore[override]
        """Pipeline of the checkpoint: image-to-video ones have only that, those with a control video a separate one."""
        return self.image_pipeline_class or (
            diffusers.CogVideoXFunControlPipeline if self.facts.media else diffusers.CogVideoXPipeline
        )

    def load_scheduler(self) -> Any:
        """Load the checkpoint's scheduler; with a control video, one of equal schedule that its pipeline can step."""
        scheduler = super().load_scheduler()
        if self.facts.media and isinstance(scheduler, diffusers.CogVideoXDPMScheduler):
            return diffusers.CogVideoXDDIMScheduler.from_config(scheduler.config)
        return scheduler

    def pipeline_call(self, conditions: PromptEmbeds, negative: PromptEmbeds, request: SampleRequest) -> dict[str, Any]:
        """Add control videos, frames in [0, 1], to `ModelSpec.pipeline_call`; they set the number of frames."""
        call = super().pipeline_call(conditions, negative, request)
        if self.facts.media:
            del call["num_frames"]
        return call | {name: video_BCTHW.transpose(1, 2) / 2 + 0.5 for name, video_BCTHW in request.media.items()}

    def process(self, scheduler: Any) -> Process:
        """Return v-prediction over the scheduler's alpha-bar, including its SNR shift and zero-SNR rescaling.

        Raises:
            ValueError: the scheduler does not predict v.
        """
        if scheduler.config.prediction_type != "v_prediction":
            raise InputError(
                f"the checkpoint's scheduler predicts {scheduler.config.prediction_type!r}; cogvideox trains "
                '"v_prediction" checkpoints, as all published ones are',
                "unsupported",
            )
        return VariancePreserving(scheduler.alphas_cumprod.float().cpu())

    @torch.no_grad()
    def encode_text(self, encoders: ModelComponents, prompts: Sequence[str]) -> PromptEmbeds:
        """Encode prompts as the pipeline does: T5 states, padded to the transformer's text length, `[B, 226, D]`."""
        embeds, _ = common.build_pipeline(diffusers.CogVideoXPipeline, encoders.modules).encode_prompt(
            prompt=list(prompts),
            do_classifier_free_guidance=False,
            max_sequence_length=self.configs["transformer"].get("max_text_seq_length", 226),
            device=common.encoder_device(encoders),
        )
        return PromptEmbeds({"prompt_embeds": embeds})

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.configs["transformer"]
        return {"prompt_embeds": (config.get("max_text_seq_length", 226), config.get("text_embed_dim", 4096))}

    def padded(self, latents_BCTHW: Tensor) -> Tensor:
        """Add a copy of the first latent frame in front of an odd number: 1.5 sees patches of two.

        CogVideo's trainer does so before noise is added (finetune/models/cogvideox_t2v/lora_trainer.py), so that the
        copy has separate noise. The pipelines denoise such a frame along, and drop it.
        """
        front = -latents_BCTHW.shape[2] % (self.configs["transformer"].get("patch_size_t") or 1)
        if not front:
            return latents_BCTHW
        return torch.cat([latents_BCTHW[:, :, :1].expand(-1, -1, front, -1, -1), latents_BCTHW], dim=2)

    def vae_stats(self, vae: nn.Module) -> VAEStats:
        """Return the VAE's scaling factor, as pipelines decode; `invert_scale_latents` concerns images only."""
        scale = torch.tensor(vae.config.scaling_factor, dtype=torch.float32)  # type: ignore[union-attr]
        return VAEStats(mean=torch.tensor(0.0), scale=scale)

    def predict(
        self,
        transformer: nn.Module,
        x_BCTHW: Tensor,
        t: Tensor,
        conditions: PromptEmbeds,
        meta: VideoMeta,
    ) -> Tensor:
        """Implement `ModelSpec.predict`.

        Raises:
            ValueError: the checkpoint has no positions for this size, takes no first frame, or needs `padded` latents.
        """
        network = unwrap(transformer)
        config = network.config
        self._check_positions(config, *x_BCTHW.shape[2:])

        dtype = input_dtype(network)
        x_BTCHW = x_BCTHW.to(dtype).transpose(1, 2)
        if x_BTCHW.shape[1] % (config.patch_size_t or 1):
            raise ValueError(
                f"{x_BTCHW.shape[1]} latent frames are not whole patches of {config.patch_size_t}: they need `padded`"
            )
        hidden_states = x_BTCHW
        first_frame = meta.extra.get("first_frame")
        if self.facts.first_frame == "channels":
            channels = self._image_channels(x_BTCHW, first_frame, meta.extra.get("further_frames"))
            hidden_states = torch.cat([x_BTCHW, channels], dim=2)
        elif first_frame is not None:
            raise InputError(
                "this is a text-to-video checkpoint of cogvideox, which does not take a first frame", "unsupported"
            )
        for name in self.facts.media:
            hidden_states = torch.cat([hidden_states, meta.extra[name].to(dtype).transpose(1, 2)], dim=2)

        prediction_BTCHW = transformer(
            hidden_states=hidden_states,
            encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
            timestep=t,
            ofs=None if config.ofs_embed_dim is None else x_BTCHW.new_full((1,), OFS),
            image_rotary_emb=self._positions(config, x_BTCHW),
            return_dict=False,
        )[0]
        return prediction_BTCHW.transpose(1, 2)

    def _check_positions(self, config: Any, frames: int, height: int, width: int) -> None:
        """Refuse latent sizes that the network has no positions for; warn of lengths without learned ones."""
        geometry = self.facts.geometry
        if problems := geometry.problems(1, height * geometry.spatial, width * geometry.spatial):
            raise ValueError(f"a clip of {height * geometry.spatial}x{width * geometry.spatial}: {problems[0]}")
        if not config.use_learned_positional_embeddings:
            return
        if frames != (config.sample_frames - 1) // config.temporal_compression_ratio + 1:
            _warn_once(
                f"this checkpoint's positions are learned for {config.sample_frames} frames; clips of another length "
                "get untrained sinusoidal positions, as in the pipeline"
            )

    def _positions(self, config: Any, x_BTCHW: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return `_rotary`, computed once for successive clips of one size, since it takes 0.1 ms and more."""
        if type(x_BTCHW) is not Tensor:  # a tensor without values (`memory/count.py`), which must not remain here
            return _rotary(config, x_BTCHW)
        key = (config, x_BTCHW.shape[1:], x_BTCHW.device)
        if self._last_positions is None or self._last_positions[0] != key:
            self._last_positions = (key, _rotary(config, x_BTCHW))
        return self._last_positions[1]

    def as_channels(self, latents_BCTHW: Tensor) -> Tensor:
        """Convert normalized latents of images to those of the pipeline, `[B, T, C, H, W]` in fp32."""
        latents_BTCHW, vae = latents_BCTHW.transpose(1, 2).float(), self.configs["vae"]
        if vae.get("invert_scale_latents", False):
            # Such checkpoints were trained with images divided by the scaling factor; normalizing multiplied by it.
            return latents_BTCHW / vae["scaling_factor"] ** 2
        return latents_BTCHW

    def _image_channels(self, x_BTCHW: Tensor, first_BC1HW: Tensor | None, further_BCTHW: Tensor | None) -> Tensor:
        """Return the channels of the given frames: the first at time 0, others in their places, zeros elsewhere."""
        if first_BC1HW is None:
            return torch.zeros_like(x_BTCHW)
        first = self.as_channels(first_BC1HW).to(x_BTCHW.dtype)
        channels = torch.cat([first, torch.zeros_like(x_BTCHW[:, 1:])], dim=1)
        return channels if further_BCTHW is None else channels + self.as_channels(further_BCTHW).to(x_BTCHW.dtype)


@lru_cache(maxsize=8)
def _warn_once(message: str) -> None:
    logger.warning(message)


def _rotary(config: Any, x_BTCHW: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the pipeline's rotary positions of (padded) latents, or None if the checkpoint has another kind."""
    if not config.use_rotary_positional_embeddings:
        return None
    _, frames, _, height, width = x_BTCHW.shape
    # The method reads two attributes of its pipeline. Sizes are in latents here, hence a VAE factor of 1.
    stand_in = SimpleNamespace(vae_scale_factor_spatial=1, transformer=SimpleNamespace(config=config))
    return diffusers.CogVideoXPipeline._prepare_rotary_positional_embeddings(
        stand_in, height, width, frames, x_BTCHW.device
    )
