"""Checkpoints that resemble those of a family and are not trained, with what to use instead. Imports no torch.

They are recognized by the classes that their configs state, by words of their Hub id or of the names of their files
where their classes are those of a family, and by names that users may give to `--model_name`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from finetrainers.utils.reading import parse_json_object

_IMAGES = "it makes images, and all families here make videos; use a trainer of image models"
_BASE = "training would undo the distillation; train the model that it was distilled from"
#: Reward finetuning trains on clips that the checkpoint samples in its few steps.
_REWARDED = ", or finetune it with rewards, which trains in its few steps"
#: Names of the weights of two experts: `transformer_2` is that for low noise in repositories.
_EXPERT = re.compile(r"(high|low)[ _-]?noise|^transformer_2$", re.IGNORECASE)
#: Keys of titles in the metadata of weight files.
TITLES = ("modelspec.title", "title", "name", "ss_output_name")


@dataclass(frozen=True)
class Lookalike:
    """Checkpoints of one kind.

    Attributes:
        name: what they are, as messages name them.
        use: what to use instead, or why not, as the end of a sentence; may be empty.
        classes: their transformers and pipelines, as configs state them.
        names: expression for the beginning of a name of the model, in plain letters and digits.
        ids: expression searched in their Hub ids and names of files, in plain letters and digits, where classes do not
            tell, and in the names of classes of their pipelines and schedulers that diffusers does not have.
        can_be_rewarded: whether methods that train on a checkpoint's own samples can train it.
    """

    name: str
    use: str
    classes: tuple[str, ...] = ()
    names: str = ""
    ids: str = ""
    can_be_rewarded: bool = False

    @property
    def description(self) -> str:
        """Name, and what to use instead."""
        return f"{self.name}: {self.use}" if self.use else self.name


#: The first one that matches counts.
LOOKALIKES = (
    Lookalike(
        "Wan VACE", "train Wan-AI/Wan2.1-T2V-1.3B-Diffusers or -14B-Diffusers, whose LoRAs VACE takes",
        ("WanVACETransformer3DModel", "WanVACEPipeline"), "wan(21)?vace|vace",
    ),
    Lookalike(
        "Wan Animate", "train an image-to-video checkpoint of wan",
        ("WanAnimateTransformer3DModel", "WanAnimate2Transformer3DModel", "WanAnimatePipeline"), "wan(22)?animate",
    ),
    Lookalike("Wan S2V", "it takes speech; train an image-to-video checkpoint of wan", names="wan(22)?s2v"),
    Lookalike("Wan Fun", "train an image-to-video checkpoint of wan", names="wan(21|22)?fun"),
    Lookalike("Lucy Edit", "train Wan-AI/Wan2.2-TI2V-5B-Diffusers", ("LucyEditPipeline",), "lucy"),
    Lookalike(
        "ChronoEdit", "train an image-to-video checkpoint of wan",
        ("ChronoEditTransformer3DModel", "ChronoEditPipeline"), "chronoedit",
    ),
    Lookalike(
        "AnyFlow", _BASE,
        ("AnyFlowTransformer3DModel", "AnyFlowFARTransformer3DModel", "AnyFlowPipeline", "AnyFlowFARPipeline"),
        "anyflow",
    ),
    Lookalike(
        "HunyuanVideo FramePack", "train an image-to-video checkpoint of hunyuan_video",
        ("HunyuanVideoFramepackTransformer3DModel", "HunyuanVideoFramepackPipeline"), "(hunyuan(video)?)?framepack",
    ),
    Lookalike(
        "HunyuanImage", _IMAGES,
        ("HunyuanImageTransformer2DModel", "HunyuanImagePipeline", "HunyuanImageRefinerPipeline"), "hunyuanimage",
    ),
    Lookalike(
        "HunyuanDiT", _IMAGES, ("HunyuanDiT2DModel", "HunyuanDiTPipeline"), "hunyuandit",
    ),
    Lookalike("LTX-2.5", "train LTX-2 or LTX-2.3; its text encoder and decoder are others", names="ltx(v|video)?25"),
    Lookalike(
        "a distilled LTX-2", "training would undo the distillation; train Lightricks/LTX-2 or "
        f"diffusers/LTX-2.3-Diffusers{_REWARDED}", ids="ltx2.*(?<!un)distilled", can_be_rewarded=True,
    ),
    Lookalike(
        "a distilled LTX-Video", f"training would undo the distillation; train Lightricks/LTX-Video-0.9.7-dev"
        f"{_REWARDED}",
        ids="ltxvideo09.*(?<!un)distilled", can_be_rewarded=True,
    ),
    Lookalike(
        "a causal Wan", "it makes a clip block by block in few steps, which is not supported; train the "
        "model that it was distilled from",
        ids=r"wan.*(causal|causvid|selfforc)|(causal|causvid|selfforc\w*)wan|longlive|kreareal",
    ),
    Lookalike(
        "a distilled Wan", f"{_BASE}{_REWARDED}", can_be_rewarded=True,
        ids=r"(fast|turbo|rcm)wan(2|$)|wan.*((?<!un)distil|lightx2v|22lightning|accvid|fusionx|rcm|dmd|(?<!\d)4steps?(?!\d))"
        r"|accvid\w*wan|wan.*rapidallinone",
    ),
    Lookalike(
        "a distilled HunyuanVideo-1.5", "training would undo the distillation; train "
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v or -480p_i2v",
        ids="(hunyuanvideo|hy)15.*((?<!un)distil|lightx2v)",
    ),
    Lookalike(
        # "cfgdistill" is the published model, whose guidance is an input.
        "a distilled HunyuanVideo", f"training would undo the distillation; train hunyuanvideo-community/HunyuanVideo"
        f"{_REWARDED}", can_be_rewarded=True, ids="fasthunyuan|hunyuan.*((?<!un)(?<!cfg)distil|accvid)|^accvideo",
    ),
    Lookalike(
        "distilled to few steps", f"{_BASE}{_REWARDED}", can_be_rewarded=True,
        ids="^(flowmatch)?(lcm|tcd)scheduler$|^selfforcingflowmatchscheduler$",
    ),
    Lookalike(
        "Kandinsky 5 for images", f"{_IMAGES}, or a checkpoint such as "
        "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
        ("Kandinsky5T2IPipeline", "Kandinsky5I2IPipeline"), "kandinsky5(image|t2i|i2i)", "kandinsky50(t2i|i2i)",
    ),
    Lookalike(
        "a distilled Kandinsky 5", "training would undo the distillation; train "
        "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", ids="kandinsky50?.*((?<!un)distil|nocfg)",
    ),
    Lookalike("a distilled Mochi or SkyReels-V2", _BASE, ids="(mochi|skyreelsv2).*(?<!un)distil|fastmochi"),
    Lookalike(
        "Kandinsky 6", "it makes sound with the video; train kandinsky5",
        ("Kandinsky6Transformer3DModel", "Kandinsky6SRTransformer3DModel", "Kandinsky6TI2VAPipeline"), "kandinsky6",
    ),
    Lookalike("an older Kandinsky", _IMAGES, ("Kandinsky3UNet", "Kandinsky3Pipeline"), "kandinsky(2|3|4|v)"),
    Lookalike(
        "ConsisID", "train an image-to-video checkpoint of cogvideox",
        ("ConsisIDTransformer3DModel", "ConsisIDPipeline"), "consisid",
    ),
    Lookalike(
        "Stable Video Diffusion or AnimateDiff", "it has a U-Net, and all families here have transformers",
        ("UNetSpatioTemporalConditionModel", "UNetMotionModel", "UNet3DConditionModel"), "animatediff|svd",
    ),
    Lookalike(
        "a video model without a family here", "",
        (
            "AllegroTransformer3DModel", "CosmosTransformer3DModel", "Cosmos3OmniTransformer",
            "EasyAnimateTransformer3DModel", "HeliosTransformer3DModel", "LatteTransformer3DModel",
            "MiniMaxH3Transformer3DModel", "MotifVideoTransformer3DModel", "SanaVideoTransformer3DModel",
            "SanaWMTransformer3DModel",
        ),
        "cosmos|opensora|stdit|allegro|sanavideo|stepvideo|magi|easyanimate|latte|helios|minimax|motif",
    ),
    Lookalike(
        "an image model", _IMAGES,
        (
            "ChromaTransformer2DModel", "CogView3PlusTransformer2DModel", "CogView4Transformer2DModel",
            "Flux2Transformer2DModel", "FluxTransformer2DModel", "HiDreamImageTransformer2DModel",
            "Lumina2Transformer2DModel", "PixArtTransformer2DModel", "QwenImageTransformer2DModel",
            "SD3Transformer2DModel", "SanaTransformer2DModel", "UNet2DConditionModel", "ZImageTransformer2DModel",
        ),
        "cogview|flux|sdxl|sd3|sd15|stable|qwen|zimage|pixart|sana|lumina|chroma|krea|hidream",
    ),
)  # fmt: skip


def plain_name(name: str) -> str:
    """Return a name without the characters that are spelled in different ways."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def class_lookalike(*names: object) -> Lookalike | None:
    """Return the first kind with one of these classes, or None."""
    return next((model for model in LOOKALIKES if any(name in model.classes for name in names)), None)


def id_lookalike(*sources: object) -> Lookalike | None:
    """Return the kind that a name in Hub ids or paths shows, whose classes are those of a family, or None."""
    names = [plain_name(name) for source in sources if isinstance(source, str) for name in source.split("/")]
    return next((m for m in LOOKALIKES if m.ids and any(re.search(m.ids, name) for name in names)), None)


def file_lookalike(metadata: Mapping[str, str]) -> Lookalike | None:
    """Return the kind that the metadata of a weight file shows, by their titles or the steps that Lightricks states."""
    if (model := id_lookalike(*map(metadata.get, TITLES))) is not None:
        return model
    with contextlib.suppress(ValueError):
        if parse_json_object(metadata.get("config", "{}"), "config").get("allowed_inference_steps"):
            return Lookalike("distilled to few steps", _BASE + _REWARDED, can_be_rewarded=True)
    return None


def named_expert(source: str, metadata: Mapping[str, str] | None = None) -> str | None:
    """Return the one of two experts, `high` or `low`, that names say which weights are, or None.

    Args:
        source: Hub id or path; its last two names count, the last one first.
        metadata: of their file, whose titles count after them.
    """
    titles = [(metadata or {}).get(key, "") for key in TITLES]
    matches = (_EXPERT.search(name) for name in (*reversed(source.split("/")[-2:]), *titles))
    match = next(filter(None, matches), None)
    return None if match is None else (match[1] or "low").lower()


def name_lookalike(name: str) -> tuple[Lookalike, str] | None:
    """Return the kind that a name of a family begins with, and that beginning in plain letters, or None."""
    plain = plain_name(name)
    matches = ((model, re.match(model.names, plain)) for model in LOOKALIKES if model.names)
    return next(((model, match[0]) for model, match in matches if match), None)
