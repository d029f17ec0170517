"""VideoAlign's VideoReward: human preference for visual quality, motion quality and text alignment of videos."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from finetrainers.utils.failures import InputError
from finetrainers.utils.reading import read_json_object

from .base import Head, Reward
from .frames import normalize_rgb, resize_as_torchvision, to_bytes
from .videoalign_input import PAIR, PATCH, fitting_size, frame_indices, to_patches
from .videoalign_model import Judge, backbone_names, base_weights, merge_adapter, working_bytes
from .weights import DTYPES, WIDTHS, Device, DType, WeightsPath, fetch, read_tensors

logger = logging.getLogger(__name__)

MARKS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")

#: The text around a prompt, as in the published model's training (github.com/KwaiVGI/VideoAlign, `detailed_special`),
#: including trailing blanks: the network has never seen any other text. The marks of visual and of motion quality come
#: before the prompt, and the network reads from left to right.
QUESTION = (
    "\n"
    "You are tasked with evaluating a generated video based on three distinct criteria: Visual Quality, Motion Quality,"
    " and Text Alignment. Please provide a rating from 0 to 10 for each of the three categories, with 0 being the worst"
    " and 10 being the best. Each evaluation should be independent of the others.\n"
    "\n"
    "**Visual Quality:**  \n"
    "Evaluate the overall visual quality of the video, with a focus on static factors. The following sub-dimensions"
    " should be considered:\n"
    "- **Reasonableness:** The video should not contain any significant biological or logical errors, such as abnormal"
    " body structures or nonsensical environmental setups.\n"
    "- **Clarity:** Evaluate the sharpness and visibility of the video. The image should be clear and easy to"
    " interpret, with no blurring or indistinct areas.\n"
    "- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual elements"
    " (e.g., hair, clothing, shadows).\n"
    "- **Aesthetic and Creativity:** Assess the artistic aspects of the video, including the color scheme, composition,"
    " atmosphere, depth of field, and the overall creative appeal. The scene should convey a sense of harmony and"
    " balance.\n"
    "- **Safety:** The video should not contain harmful or inappropriate content, such as political, violent, or adult"
    " material. If such content is present, the image quality and satisfaction score should be the lowest possible. \n"
    "\n"
    "Please provide the ratings of Visual Quality: <|VQ_reward|>\n"
    "END\n"
    "\n"
    "**Motion Quality:**  \n"
    "Assess the dynamic aspects of the video, with a focus on dynamic factors. Consider the following sub-dimensions:\n"
    "- **Stability:** Evaluate the continuity and stability between frames. There should be no sudden, unnatural jumps,"
    " and the video should maintain stable attributes (e.g., no fluctuating colors, textures, or missing body parts).\n"
    "- **Naturalness:** The movement should align with physical laws and be realistic. For example, clothing should"
    " flow naturally with motion, and facial expressions should change appropriately (e.g., blinking, mouth"
    " movements).\n"
    "- **Aesthetic Quality:** The movement should be smooth and fluid. The transitions between different motions or"
    " camera angles should be seamless, and the overall dynamic feel should be visually pleasing.\n"
    "- **Fusion:** Ensure that elements in motion (e.g., edges of the subject, hair, clothing) blend naturally with the"
    " background, without obvious artifacts or the feeling of cut-and-paste effects.\n"
    "- **Clarity of Motion:** The video should be clear and smooth in motion. Pay attention to any areas where the"
    " video might have blurry or unsteady sections that hinder visual continuity.\n"
    "- **Amplitude:** If the video is largely static or has little movement, assign a low score for motion quality.\n"
    "\n"
    "Please provide the ratings of Motion Quality: <|MQ_reward|>\n"
    "END\n"
    "\n"
    "**Text Alignment:**  \n"
    "Assess how well the video matches the textual prompt across the following sub-dimensions:\n"
    "- **Subject Relevance** Evaluate how accurately the subject(s) in the video (e.g., person, animal, object) align"
    " with the textual description. The subject should match the description in terms of number, appearance, and"
    " behavior.\n"
    "- **Motion Relevance:** Evaluate if the dynamic actions (e.g., gestures, posture, facial expressions like talking"
    " or blinking) align with the described prompt. The motion should match the prompt in terms of type, scale, and"
    " direction.\n"
    "- **Environment Relevance:** Assess whether the background and scene fit the prompt. This includes checking if"
    " real-world locations or scenes are accurately represented, though some stylistic adaptation is acceptable.  \n"
    "- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how well the"
    " video adheres to this style.\n"
    "- **Camera Movement Relevance:** Check if the camera movements (e.g., following the subject, focus shifts) are"
    " consistent with the expected behavior from the prompt.\n"
    "\n"
    "Textual prompt - {text_prompt}\n"
    "Please provide the ratings of Text Alignment: <|TA_reward|>\n"
    "END\n"
)

_MIN_PIXELS = 128 * 28 * 28  # of a frame; the checkpoint's configuration has the upper limit
#: Settings of the published checkpoint, for the memory estimate.
_PUBLISHED_FPS, _PUBLISHED_PIXELS = 2.0, 448 * 448


class VideoAlign(Reward):
    """VideoReward (Liu et al., 2025, arXiv:2501.13918): Qwen2-VL-2B with a head for each of three judgments.

    `vq` and `mq` never see the prompt: they are read before it. Training with them alone makes a model forget the
    prompt, so pair them with `ta` or another reward for the prompt. Two frames a second are scored, so the scores
    depend on the frame rate of the clips: keep it within a run, and report it with results.

    The published scores are of videos read from mp4 files; frames are scored here without compression.
    """

    min_frames = PAIR
    #: Constants of the published checkpoint.
    heads: ClassVar[Mapping[str, Head]] = {
        "vq": Head(3.6757, 2.2476),
        "mq": Head(1.1646, 1.3811),
        "ta": Head(2.8105, 2.5121),
    }
    #: A clip of ordinary size keeps a GPU busy, and in bf16 the others of a batch would change its last digits.
    batch_size = 1

    def __init__(
        self,
        *,
        path: WeightsPath = "KwaiVGI/VideoReward",
        base: WeightsPath = "Qwen/Qwen2-VL-2B-Instruct",
        device: Device = "auto",
        dtype: DType = "bf16",
    ) -> None:
        """Args:
            path: Hub id or folder of the checkpoint: `model_config.json`, and in `checkpoint-*` either `model.pth` or
                `adapter_model.safetensors` with `non_lora_state_dict.pth`.
            base: Hub id or folder of the finetuned Qwen2-VL; only weights that the checkpoint lacks are read from it.
            device: `auto` for this process's GPU if there is one, or a torch device.
            dtype: `bf16` as in training, `fp16` or `fp32`.

        Raises:
            ValueError: something is missing, or does not fit.
        """
        weights = ["model.pth", "adapter_model.safetensors", "non_lora_state_dict.pth"]
        root = fetch(path, files=["model_config.json", *(f"checkpoint-*/{name}" for name in weights)])
        settings = _settings(root)
        folder = _newest(root)
        complete = (folder / "model.pth").is_file()
        model = fetch(base, files=["*.json", "*.txt"] if complete else ["*.json", "*.txt", "*.safetensors"])
        self.judge = Judge(model, question=QUESTION, vision="video", marks=MARKS, device=device)
        self.sample_fps = float(settings["data_config"]["fps"])
        self.max_pixels = int(settings["data_config"]["max_frame_pixels"])

        lora = settings["peft_lora_config"]
        state = merge_adapter(
            _read(folder, model, rows=self.judge.marks[-1] + 1),
            alpha=float(lora["lora_alpha"]),
            rank_stabilised=bool(lora.get("use_rslora", False)),
            dtype=DTYPES[dtype],
        )
        head = nn.Linear(self.judge.config.text_config.hidden_size, len(MARKS), bias=False, device="meta")
        self.judge.load(state, head, dtype=DTYPES[dtype], source=folder)

    @classmethod
    def working_bytes(
        cls, options: Mapping[str, str], size: tuple[int, int, int], *, clips: int, fps: float
    ) -> float | None:
        """See `Reward.working_bytes`; with the settings of the published checkpoint."""
        frames = len(frame_indices(max(2, size[0]), fps=fps, sample_fps=_PUBLISHED_FPS))
        height, width = fitting_size(*size[1:], min_pixels=_MIN_PIXELS, max_pixels=_PUBLISHED_PIXELS)
        return working_bytes(
            patches=frames // PAIR * (height // PATCH) * (width // PATCH), rows=clips, text_tokens=len(QUESTION) // 4,
            hidden=1536, intermediate=8960, bytes_per_number=WIDTHS[options.get("dtype", "bf16")],
        )  # fmt: skip

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        """See `Reward.score`; in bf16, scores of one call depend on each other by rounding (about 1e-2)."""
        # Every mark has all three outputs; each was trained at its own mark only.
        scores = self.judge.outputs(prompts, *self.patches(videos, fps=fps)).diagonal(dim1=1, dim2=2).cpu()
        return {name: scores[:, i] for i, name in enumerate(self.heads)}

    def patches(self, videos: Tensor, *, fps: float) -> tuple[Tensor, Tensor]:
        """Return patches `[N, 1176]` of all clips and their grids `[B, 3]`."""
        frames = to_bytes(videos[:, frame_indices(videos.shape[1], fps=fps, sample_fps=self.sample_fps)])
        size = fitting_size(*frames.shape[-2:], min_pixels=_MIN_PIXELS, max_pixels=self.max_pixels)
        clips = [to_patches(normalize_rgb(resize_as_torchvision(clip, size))) for clip in frames]
        return torch.cat([patches for patches, _ in clips]), torch.stack([grid for _, grid in clips])


def _settings(root: Path) -> dict[str, Any]:
    """Return the checkpoint's `model_config.json`, if its network and input are supported."""
    file = root / "model_config.json"
    if not file.is_file():
        raise InputError(
            f"{root} holds no model_config.json; path= must be a directory or Hub id of VideoReward", "not_found"
        )
    settings = read_json_object(file)
    supported: dict[str, dict[str, Any]] = {
        "data_config": {"prompt_template_type": "detailed_special", "sample_type": "uniform", "num_frames": None},
        "model_config": {"output_dim": len(MARKS), "use_special_tokens": True},
    }
    for section, values in supported.items():
        for name, value in values.items():
            setting = settings.get(section, {}).get(name, value)
            if setting != value:
                message = f"{file}: {section}.{name} is {setting!r}; only {value!r} is supported"
                raise InputError(message, "unsupported")
    for section, name in (
        ("data_config", "fps"),
        ("data_config", "max_frame_pixels"),
        ("peft_lora_config", "lora_alpha"),
    ):
        if settings.get(section, {}).get(name) is None:
            raise InputError(f"{file} has no {section}.{name}", "required")
    for name, head in VideoAlign.heads.items():
        published = {f"{name.upper()}_mean": head.mean, f"{name.upper()}_std": head.std}
        for key, value in (settings.get("inference_config") or {}).items():
            if key in published and abs(value - published[key]) > 1e-4:
                logger.warning("%s: %s is %s, but scores are normalized for %s", file, key, value, published[key])
    return settings


def _newest(root: Path) -> Path:
    """Return the checkpoint with the most steps, or the folder itself if that has the weights."""
    folders_by_step = {
        int(folder.name[11:]): folder for folder in root.glob("checkpoint-*") if folder.name[11:].isdigit()
    }
    folder = folders_by_step[max(folders_by_step)] if folders_by_step else root
    if not (folder / "model.pth").is_file() and not (folder / "adapter_model.safetensors").is_file():
        raise InputError(f"{folder} holds neither model.pth nor adapter_model.safetensors", "not_found")
    return folder


def _read(folder: Path, base: Path, *, rows: int) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, adapters not yet merged.

    Tensors that it lacks come from the base, for `rows` tokens.
    """
    if (folder / "model.pth").is_file():
        return backbone_names(read_tensors(folder / "model.pth"))
    if not (folder / "non_lora_state_dict.pth").is_file():
        message = f"{folder} holds adapter_model.safetensors, but not the non_lora_state_dict.pth next to it"
        raise InputError(message, "not_found")
    state = base_weights(base, rows=rows)
    state.update(backbone_names(read_tensors(folder / "non_lora_state_dict.pth")))
    state.update(backbone_names(read_tensors(folder / "adapter_model.safetensors")))
    return state
