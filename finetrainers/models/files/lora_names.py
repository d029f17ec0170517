"""Formats of exported weights, the programs that read them, and their recognition by names. Imports no torch.

Sources: `comfy/lora.py` and `comfy/ldm/` of ComfyUI; `convert_lora.py` and `networks/lora.py` of kohya-ss/musubi-tuner;
`videox_fun/utils/lora_utils.py` of aigc-apps/VideoX-Fun; `loaders/lora_pipeline.py` of diffusers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

#: The formats, in the order of the documentation. `merged` is a whole network with a LoRA added.
FORMATS = ("diffusers", "comfyui", "kohya", "peft", "merged")
#: Prefix of every name of a LoRA in each format.
PREFIXES: Mapping[str, str] = {"comfyui": "diffusion_model.", "kohya": "lora_unet_", "peft": "base_model.model."}
#: Programs that read a family's LoRAs, in formats that depend on it.
READERS: Mapping[str, Mapping[str, str]] = {
    "ltx_video": {
        "comfyui": "ComfyUI (models/loras), and diffusers",
        "kohya": "ComfyUI; no trainer of kohya-ss has LTX-Video",
    },
    "ltx2": {
        "comfyui": "ComfyUI (models/loras), diffusers, and Lightricks' ltx-trainer",
        "kohya": "ComfyUI; no trainer of kohya-ss has LTX-2",
    },
    "hunyuan_video": {"comfyui": "ComfyUI (models/loras)", "kohya": "musubi-tuner"},
    "hunyuan_video_15": {
        "diffusers": "diffusers: load_lora_adapter of the transformer",
        "comfyui": "ComfyUI (models/loras)",
        "kohya": "musubi-tuner",
    },
    "wan": {"comfyui": "ComfyUI (models/loras), and diffusers", "kohya": "musubi-tuner"},
    "skyreels_v2": {
        "comfyui": "ComfyUI (models/loras), for its network of Wan 2.1, and diffusers",
        "kohya": "musubi-tuner, for its network of Wan 2.1 (14B)",
    },
    "kandinsky5": {"comfyui": "ComfyUI (models/loras)", "kohya": "musubi-tuner, and ComfyUI"},
    "mochi": {
        "comfyui": "ComfyUI (models/loras)",
        "kohya": "ComfyUI; no trainer of kohya-ss has Mochi",
    },
    "cogvideox": {
        "comfyui": "ComfyUI's own nodes (models/loras); ComfyUI-CogVideoXWrapper reads the format diffusers",
        "kohya": "VideoX-Fun, and ComfyUI-CogVideoXWrapper for models of CogVideoX-Fun",
    },
}
#: Programs that ignore a LoRA outside of a network's blocks, by family and format; and other blocks that they read.
BLOCKS_ALONE: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("hunyuan_video", "kohya"): ("musubi-tuner",),
    ("hunyuan_video_15", "kohya"): ("musubi-tuner",),
    ("kandinsky5", "kohya"): ("musubi-tuner", "text_transformer_blocks."),
    ("wan", "kohya"): ("musubi-tuner",),
    ("skyreels_v2", "kohya"): ("musubi-tuner",),
}
#: Name of a network in a file's metadata (`modelspec.architecture`), and the address of its authors' code.
ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "ltx_video": ("ltx-video", "https://github.com/Lightricks/LTX-Video"),
    "ltx2": ("ltx-2", "https://github.com/Lightricks/LTX-2"),
    "hunyuan_video": ("hunyuan-video", "https://github.com/Tencent/HunyuanVideo"),
    "hunyuan_video_15": ("hunyuan-video-1.5", "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5"),
    "wan": ("wan", "https://github.com/Wan-Video/Wan2.2"),
    "skyreels_v2": ("skyreels-v2", "https://github.com/SkyworkAI/SkyReels-V2"),
    "kandinsky5": ("kandinsky-5", "https://github.com/kandinskylab/kandinsky-5"),
    "mochi": ("mochi", "https://github.com/genmoai/mochi"),
    "cogvideox": ("cogvideox", "https://github.com/zai-org/CogVideo"),
}
_TENCENT = ("transformer.double_blocks.", "transformer.single_blocks.", "transformer.txt_in.")


def kind_of(names: Iterable[str]) -> str | None:
    """Return the format of a LoRA file by its names: `comfyui`, `kohya` or `peft`; or None if diffusers' or unknown."""
    names = [*names]
    for kind, prefix in PREFIXES.items():
        if any(name.startswith(prefix) for name in names):
            return kind
    # diffusion-pipe writes the authors' names behind diffusers' prefix, and ComfyUI reads them like its own.
    return "comfyui" if any(name.startswith(_TENCENT) for name in names) else None


def format_problem(
    family: str, requested: str, *, is_lora: bool, is_dora: bool, misread: Mapping[str, str] = MappingProxyType({})
) -> str | None:
    """Return why the weights of a run cannot be exported in a format, with the remedy, or None if they can.

    Args:
        family: family of the model.
        requested: the format.
        is_lora: whether they are a LoRA, not a whole network.
        is_dora: whether they have DoRA's magnitudes.
        misread: see `Facts`.
    """
    if not is_lora:
        if requested in misread:
            return f"{requested}: {misread[requested]}, so it would compute another network; use diffusers"
        if requested in ("diffusers", "comfyui"):
            return None
        reason = (
            "these are already full weights" if requested == "merged" else "it holds a LoRA, and these are full weights"
        )
        return f"{requested}: {reason}; use diffusers or comfyui"
    if requested not in PREFIXES or requested == "peft":
        return None
    if requested not in READERS.get(family, {}):
        return f"{requested}: no known program reads LoRAs of {family} in this format; use diffusers, peft or merged"
    if is_dora and requested == "comfyui":
        return (
            "comfyui: ComfyUI divides DoRA's magnitudes by the norm of the base weights alone, so it would compute "
            "another network; use merged, diffusers or peft"
        )
    if is_dora:
        return f"{requested}: the format cannot store DoRA's magnitudes; use merged, diffusers or peft"
    return None


def readers(family: str, kind: str, *, is_lora: bool = True) -> str | None:
    """Return the programs that read a format, as text, or None if not known."""
    if not is_lora and kind == "comfyui":
        layout = "" if family == "cogvideox" else ", and programs that read the authors' files"
        return f"ComfyUI (models/diffusion_models){layout}"
    if not is_lora and kind == "diffusers":
        return "diffusers: from_pretrained"
    common = {
        "diffusers": "diffusers: load_lora_weights",
        "peft": "PEFT: PeftModel.from_pretrained",
        "merged": "diffusers: from_pretrained, without a LoRA",
    }
    return READERS.get(family, {}).get(kind) or common.get(kind)
