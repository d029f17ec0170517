"""Published transformers at their full size, for tests that need no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

from finetrainers.utils.packaged import packaged_configs


@dataclass(frozen=True)
class Network:
    """A published transformer.

    Attributes:
        family: its family.
        hub_id: the repository that it is published in, whose configs are packaged.
        num_parameters: how many weights the published file has.
        bucket: frames, height, width to train at.
        text: shape of each text condition of one clip.
        tiny: option of the family's tiny repository.
        has_frame_times: whether its memory was counted with a time for each latent frame.
    """

    family: str
    hub_id: str
    num_parameters: int
    bucket: tuple[int, int, int]
    text: dict[str, tuple[int, ...]]
    tiny: dict[str, str]
    has_frame_times: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """`transformer/config.json`, without the class."""
        path = _configs(self.hub_id) / "transformer" / "config.json"
        return {name: value for name, value in json.loads(path.read_text()).items() if name != "_class_name"}


def _configs(hub_id: str) -> Path:
    folder = packaged_configs(hub_id, "transformer", estimated=True)
    assert folder is not None
    return folder


NETWORKS = {
    "LTX-Video": Network(
        "ltx_video", "Lightricks/LTX-Video", 1_923_385_472, (49, 512, 768),
        {"prompt_embeds": (128, 4096), "prompt_attention_mask": (128,)}, {},
    ),
    "HunyuanVideo": Network(
        "hunyuan_video", "hunyuanvideo-community/HunyuanVideo", 12_821_012_544, (49, 512, 768),
        {"prompt_embeds": (256, 4096), "prompt_attention_mask": (256,), "pooled_prompt_embeds": (768,)}, {},
    ),
    "HunyuanVideo-1.5": Network(
        "hunyuan_video_15", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", 8_326_608_160,
        (49, 480, 832),
        {"prompt_embeds": (1000, 3584), "prompt_attention_mask": (1000,), "glyph_embeds": (256, 1472),
         "glyph_attention_mask": (256,)}, {},
    ),
    "Kandinsky-5-Lite": Network(
        "kandinsky5", "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", 2_007_702_848, (49, 512, 768),
        {"prompt_embeds": (512, 3584), "prompt_attention_mask": (512,), "pooled_prompt_embeds": (768,)}, {},
    ),
    "CogVideoX-2b": Network(
        "cogvideox", "THUDM/CogVideoX-2b", 1_693_783_872, (49, 480, 720), {"prompt_embeds": (226, 4096)},
        {"version": "2b"},
    ),
    "CogVideoX-5b": Network(
        "cogvideox", "THUDM/CogVideoX-5b", 5_570_283_072, (49, 480, 720), {"prompt_embeds": (226, 4096)},
        {"version": "5b"},
    ),
    "Wan2.1-1.3B": Network(
        "wan", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 1_418_996_800, (49, 480, 832), {"prompt_embeds": (512, 4096)},
        {"version": "t2v"},
    ),
    "Wan2.2-5B": Network(
        "wan", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", 4_999_787_712, (49, 704, 1280), {"prompt_embeds": (512, 4096)},
        {"version": "ti2v"}, has_frame_times=True,
    ),
    "Mochi": Network(
        "mochi", "genmo/mochi-1-preview", 10_027_677_744, (37, 480, 848),
        {"prompt_embeds": (256, 4096), "prompt_attention_mask": (256,)}, {},
    ),
    "LTX-2": Network(
        "ltx2", "Lightricks/LTX-2", 18_876_174_592, (121, 512, 768), {"prompt_embeds": (1024, 3840)},
        {"version": "2.0"}, has_frame_times=True,
    ),
    "LTX-2.3": Network(
        "ltx2", "diffusers/LTX-2.3-Diffusers", 18_988_838_144, (121, 512, 768), {"prompt_embeds": (1024, 4096)},
        {"version": "2.3"}, has_frame_times=True,
    ),
    "Wan2.1-14B": Network(
        "wan", "Wan-AI/Wan2.1-T2V-14B-Diffusers", 14_288_491_584, (49, 480, 832), {"prompt_embeds": (512, 4096)},
        {"version": "t2v"},
    ),
    "SkyReels-V2-DF-1.3B": Network(
        "skyreels_v2", "Skywork/SkyReels-V2-DF-1.3B-540P-Diffusers", 1_435_525_696, (49, 544, 960),
        {"prompt_embeds": (512, 4096)}, {"version": "df"}, has_frame_times=True,
    ),
}  # fmt: skip
#: Networks whose training step alone is compared with a count.
FURTHER = {
    "HunyuanVideo-1.5-I2V": Network(
        "hunyuan_video_15", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v", 8_326_608_160,
        (49, 480, 832), NETWORKS["HunyuanVideo-1.5"].text, {"version": "i2v"},
    ),
    "Kandinsky-5-Pro": Network(
        "kandinsky5", "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers", 19_311_325_248, (49, 512, 768),
        NETWORKS["Kandinsky-5-Lite"].text, {},
    ),
}  # fmt: skip


def published_repository(tiny: Path, directory: Path, transformer: dict[str, Any]) -> Path:
    """Configs without weights: the tiny repository's, which has the published VAE's and scheduler's rules.

    Parts of transformers have none, so that they are not counted.
    """
    index = json.loads((tiny / "model_index.json").read_text())
    libraries = {name: value[0] for name, value in index.items() if isinstance(value, list) and name != "transformer"}
    for part in (name for name, library in libraries.items() if library not in (None, "transformers")):
        copytree(tiny / part, directory / part, ignore=lambda _, names: [n for n in names if not n.endswith(".json")])
    (directory / "transformer").mkdir()
    (directory / "transformer" / "config.json").write_text(json.dumps(transformer), encoding="utf-8")
    return directory


def published_model(tiny: Path, directory: Path, network: Network) -> Path:
    """Configs of all parts of a published checkpoint, without weights: packaged ones, and the tiny repository's."""
    copytree(tiny, directory, ignore=lambda _, names: [n for n in names if n.endswith(".safetensors")])
    copytree(_configs(network.hub_id), directory, dirs_exist_ok=True)
    return directory
