"""Published transformers at their full size, for tests that need no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any


@dataclass(frozen=True)
class Network:
    """A published transformer.

    Attributes:
        family: its family.
        config: `transformer/config.json`.
        num_parameters: how many weights the published file has.
        bucket: frames, height, width to train at.
        text: shape of each text condition of one clip.
        tiny: option of the family's tiny repository.
    """

    family: str
    config: dict[str, Any]
    num_parameters: int
    bucket: tuple[int, int, int]
    text: dict[str, tuple[int, ...]]
    tiny: dict[str, str]


_COGVIDEOX = {
    "activation_fn": "gelu-approximate", "attention_bias": True, "attention_head_dim": 64, "dropout": 0.0,
    "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 16, "max_text_seq_length": 226,
    "norm_elementwise_affine": True, "norm_eps": 1e-05, "out_channels": 16, "patch_size": 2, "sample_frames": 49,
    "sample_height": 60, "sample_width": 90, "spatial_interpolation_scale": 1.875,
    "temporal_compression_ratio": 4, "temporal_interpolation_scale": 1.0, "text_embed_dim": 4096,
    "time_embed_dim": 512, "timestep_activation_fn": "silu", "use_learned_positional_embeddings": False,
}  # fmt: skip
NETWORKS = {
    "LTX-Video": Network(
        "ltx_video",
        {
            "activation_fn": "gelu-approximate", "attention_bias": True, "attention_head_dim": 64,
            "attention_out_bias": True, "caption_channels": 4096, "cross_attention_dim": 2048, "in_channels": 128,
            "norm_elementwise_affine": False, "norm_eps": 1e-06, "num_attention_heads": 32, "num_layers": 28,
            "out_channels": 128, "patch_size": 1, "patch_size_t": 1, "qk_norm": "rms_norm_across_heads",
        },
        1_923_385_472,
        (49, 512, 768),
        {"prompt_embeds": (128, 4096), "prompt_attention_mask": (128,)},
        {},
    ),
    "HunyuanVideo": Network(
        "hunyuan_video",
        {
            "attention_head_dim": 128, "guidance_embeds": True, "in_channels": 16, "mlp_ratio": 4.0,
            "num_attention_heads": 24, "num_layers": 20, "num_refiner_layers": 2, "num_single_layers": 40,
            "out_channels": 16, "patch_size": 2, "patch_size_t": 1, "pooled_projection_dim": 768,
            "qk_norm": "rms_norm", "rope_axes_dim": [16, 56, 56], "rope_theta": 256.0, "text_embed_dim": 4096,
        },
        12_821_012_544,
        (49, 512, 768),
        {"prompt_embeds": (256, 4096), "prompt_attention_mask": (256,), "pooled_prompt_embeds": (768,)},
        {},
    ),
    "CogVideoX-2b": Network(
        "cogvideox",
        {**_COGVIDEOX, "num_attention_heads": 30, "num_layers": 30, "use_rotary_positional_embeddings": False},
        1_693_783_872,
        (49, 480, 720),
        {"prompt_embeds": (226, 4096)},
        {"version": "2b"},
    ),
    "CogVideoX-5b": Network(
        "cogvideox",
        {**_COGVIDEOX, "num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
        5_570_283_072,
        (49, 480, 720),
        {"prompt_embeds": (226, 4096)},
        {"version": "5b"},
    ),
}  # fmt: skip


def published_repository(tiny: Path, directory: Path, transformer: dict[str, Any]) -> Path:
    """Configs without weights: the tiny repository's, which has the published VAE's and scheduler's rules."""
    for part in ("vae", "scheduler"):
        copytree(tiny / part, directory / part, ignore=lambda _, names: [n for n in names if not n.endswith(".json")])
    (directory / "transformer").mkdir()
    (directory / "transformer" / "config.json").write_text(json.dumps(transformer), encoding="utf-8")
    return directory


_T5 = {
    "architectures": ["T5EncoderModel"], "model_type": "t5", "d_model": 4096, "d_ff": 10240, "d_kv": 64,
    "num_heads": 64,
    "num_layers": 24, "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True,
    "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128320, "head_dim": 128,
}  # fmt: skip
_CLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "vocab_size": 49408,
    "max_position_embeddings": 77, "projection_dim": 768,
}  # fmt: skip


def published_model(tiny: Path, directory: Path, network: Network) -> Path:
    """Configs of all parts of a published checkpoint, without weights."""
    import torch

    from finetrainers.config.sections import ModelSection
    from finetrainers.models.registry import get_family

    copytree(tiny, directory, ignore=lambda _, names: [n for n in names if n.endswith(".safetensors")])

    def put(part: str, settings: dict[str, Any], *, whole: bool = False) -> None:
        path = directory / part / "config.json"
        kept = json.loads(path.read_text(encoding="utf-8"))
        name = {"_class_name": kept["_class_name"]} if "_class_name" in kept else {}
        path.write_text(json.dumps({**({} if whole else kept), **name, **settings}), encoding="utf-8")

    put("transformer", network.config, whole=True)
    spec = get_family(network.family).load(ModelSection(pretrained_model_name_or_path=str(tiny)))
    with torch.device("meta"):
        vae = spec.parts["vae"]()  # the classes' defaults are the published VAEs
    put("vae", {n: v for n, v in vae.config.items() if not n.startswith("_")}, whole=True)
    if (directory / "text_encoder_2").exists():
        put("text_encoder", _LLAMA)
        put("text_encoder_2", _CLIP)
    else:
        put("text_encoder", _T5, whole=True)
    return directory
