"""Facts about LTX-Video checkpoints, read from their config files. Imports no torch."""

from __future__ import annotations

from finetrainers.config.facts import Configs, Facts, LoRASettings
from finetrainers.config.geometry import Geometry

from ..family import Family

_LINEAR = {"lr_scheduler": "linear", "lr_warmup_steps": 0}
_LORA = LoRASettings(32, 2e-4, 1500, _LINEAR)
_DEMO_LORA = LoRASettings(16, 2e-3, 600, _LINEAR)


def read(configs: Configs) -> Facts:
    """Read the facts about an LTX-Video checkpoint.

    Each scaling stage halves space and time, on top of the VAE's patch, unless the config states the compression: that
    is `AutoencoderKLLTXVideo.__init__`; from version 0.9.5 on stages differ and the config has the ratios. The pipeline
    refuses sizes that are not multiples of 32, whatever its VAE.
    """
    vae, transformer = configs.get("vae", {}), configs.get("transformer", {})
    is_small = transformer.get("num_layers", 28) < 8  # the demo model, a thousandth of the published ones
    stages = sum(bool(s) for s in vae.get("spatio_temporal_scaling", (True, True, True, False)))
    return Facts(
        Geometry(
            temporal=vae.get("temporal_compression_ratio") or vae.get("patch_size_t", 1) * 2**stages,
            spatial=vae.get("spatial_compression_ratio") or vae.get("patch_size", 4) * 2**stages,
            patch=transformer.get("patch_size", 1),
            patch_t=transformer.get("patch_size_t", 1),
            fps=25.0,
            pixels=32,
        ),
        first_frame="tokens",
        any_frame=True,
        first_frame_p=0.1,
        heads=transformer.get("num_attention_heads", 32),
        lora=_DEMO_LORA if is_small else _LORA,
        # `ShiftedLogitNormalTimestepSampler` and `encode_video` of the trainer. The demo model was trained otherwise.
        defaults={}
        if is_small
        else {"flow_weighting_scheme": "logit_normal", "flow_resolution_shifting": True, "sample_posterior": True},
        noise_source="" if is_small else "Lightricks' LTX-Video-Trainer",
        scene="a red circle moving right on a grey background" if is_small else Facts.scene,
        least_steps=2,  # its schedule is stretched to end at its own level, which one step leaves undefined
    )


FAMILY = Family(
    name="ltx_video", spec="finetrainers.models.ltx_video:LTXVideoSpec", read=read,
    transformer="LTXVideoTransformer3DModel", vae="AutoencoderKLLTXVideo",
    pipelines=("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"),
    published=(
        "Lightricks/LTX-Video", "Lightricks/LTX-Video-0.9.7-dev", "Lightricks/LTX-Video-0.9.7-distilled",
        "Lightricks/LTX-Video-0.9.8-13B-distilled",
    ),
    starters={"Lightricks/LTX-Video": 2},
    tiny="finetrainers.models.tiny:build_ltx_video",
)  # fmt: skip
