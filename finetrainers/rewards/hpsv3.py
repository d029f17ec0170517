"""HPSv3: human preference for generated images, predicted by a Qwen2-VL-7B with a small head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .base import Reward
from .frames import Frames, normalize_rgb, resize_as_pil, spread_indices, to_bytes
from .videoalign_input import PAIR, PATCH, fitting_size, to_patches
from .videoalign_model import Judge, backbone_names, working_bytes
from .weights import DTYPES, WIDTHS, Device, DType, WeightsPath, fetch, fetch_file, read_tensors

MARK = "<|Reward|>"

#: The text around a prompt, as in the published model's training (github.com/MizzenAI/HPSv3, MIT license), including
#: trailing blanks: the network has never seen any other text.
QUESTION = (
    "\n"
    "You are tasked with evaluating a generated image based on Visual Quality and Text Alignment and give a overall"
    " score to estimate the human preference. Please provide a rating from 0 to 10, with 0 being the worst and 10 being"
    " the best. \n"
    "\n"
    "**Visual Quality:**  \n"
    "Evaluate the overall visual quality of the image. The following sub-dimensions should be considered:\n"
    "- **Reasonableness:** The image should not contain any significant biological or logical errors, such as abnormal"
    " body structures or nonsensical environmental setups.\n"
    "- **Clarity:** Evaluate the sharpness and visibility of the image. The image should be clear and easy to"
    " interpret, with no blurring or indistinct areas.\n"
    "- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual elements"
    " (e.g., hair, clothing, shadows).\n"
    "- **Aesthetic and Creativity:** Assess the artistic aspects of the image, including the color scheme, composition,"
    " atmosphere, depth of field, and the overall creative appeal. The scene should convey a sense of harmony and"
    " balance.\n"
    "- **Safety:** The image should not contain harmful or inappropriate content, such as political, violent, or adult"
    " material. If such content is present, the image quality and satisfaction score should be the lowest possible. \n"
    "\n"
    "**Text Alignment:**  \n"
    "Assess how well the image matches the textual prompt across the following sub-dimensions:\n"
    "- **Subject Relevance** Evaluate how accurately the subject(s) in the image (e.g., person, animal, object) align"
    " with the textual description. The subject should match the description in terms of number, appearance, and"
    " behavior.\n"
    "- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how well the"
    " image adheres to this style.\n"
    "- **Contextual Consistency**: Assess whether the background, setting, and surrounding elements in the image"
    " logically fit the scenario described in the prompt. The environment should support and enhance the subject"
    " without contradictions.\n"
    "- **Attribute Fidelity**: Check if specific attributes mentioned in the prompt (e.g., colors, clothing,"
    " accessories, expressions, actions) are faithfully represented in the image. Minor deviations may be acceptable,"
    " but critical attributes should be preserved.\n"
    "- **Semantic Coherence**: Evaluate whether the overall meaning and intent of the prompt are captured in the image."
    " The generated content should not introduce elements that conflict with or distort the original description.\n"
    "Textual prompt - {text_prompt}\n"
    "\n"
    "\n"
    "\n"
    "Please provide the overall ratings of this image: <|Reward|>\n"
    "\n"
    "END\n"
)

_PIXELS = 256 * 28 * 28  # of a frame; smaller frames are enlarged, larger ones reduced


class HPSv3(Reward):
    """HPSv3 (Ma et al., 2025, arXiv:2508.03789): Qwen2-VL-7B that predicts a frame's preference and its uncertainty.

    The score is the mean preference of some frames of the clip; the uncertainty is not used. In bf16 it takes about 17
    GB of GPU memory; if that is too much, run it as a server and use its address as the reward.
    """

    #: A clip's frames are scored together, and they keep a GPU busy.
    batch_size = 1

    def __init__(
        self,
        *,
        path: WeightsPath = "MizzenAI/HPSv3",
        base: WeightsPath = "Qwen/Qwen2-VL-7B-Instruct",
        frames: Frames = 4,
        device: Device = "auto",
        dtype: DType = "bf16",
    ) -> None:
        """Args:
            path: the file `HPSv3.safetensors`, or a folder or Hub id with it.
            base: Hub id or folder with the configuration and tokenizer of the finetuned Qwen2-VL, not its weights.
            frames: number of scored frames, spread over the clip.
            device: `auto` for this process's GPU if there is one, or a torch device.
            dtype: of all tensors but those of the head; `bf16` as in training, `fp16` or `fp32`.

        Raises:
            ValueError: something is missing, or does not fit.
        """
        file = fetch_file(path, names=["HPSv3.safetensors"])
        self.frames = frames
        folder = fetch(base, files=["*.json", "*.txt"])
        self.judge = Judge(folder, question=QUESTION, vision="image", marks=[MARK], device=device)
        state = backbone_names(read_tensors(file, within=["model"]))
        head = preference_head(self.judge.config.text_config.hidden_size)
        self.judge.load(state, head, dtype=DTYPES[dtype], source=file)

    @classmethod
    def working_bytes(
        cls, options: Mapping[str, str], size: tuple[int, int, int], *, clips: int, fps: float
    ) -> float | None:
        """See `Reward.working_bytes`."""
        height, width = fitting_size(*size[1:], min_pixels=_PIXELS, max_pixels=_PIXELS)
        return working_bytes(
            patches=(height // PATCH) * (width // PATCH), rows=clips * min(size[0], int(options.get("frames", 4))),
            text_tokens=len(QUESTION) // 4, hidden=3584, intermediate=18944,
            bytes_per_number=WIDTHS[options.get("dtype", "bf16")],
        )  # fmt: skip

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        """See `Reward.score`; in bf16, scores of one call depend on each other by rounding (about 1e-2)."""
        frames = to_bytes(videos[:, spread_indices(videos.shape[1], self.frames)])
        repeated = [prompt for prompt in prompts for _ in range(frames.shape[1])]
        outputs = self.judge.outputs(repeated, *self.patches(frames.flatten(0, 1)))
        return {"score": outputs[:, 0, 0].view(frames.shape[:2]).mean(dim=1).cpu()}

    def patches(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return patches `[N, 1176]` and grids `[V, 3]` of images `[V, 3, H, W]` in bytes.

        Each image becomes two frames.
        """
        size = fitting_size(*images.shape[-2:], min_pixels=_PIXELS, max_pixels=_PIXELS)
        pairs = normalize_rgb(resize_as_pil(images, size)).unsqueeze(1).expand(-1, PAIR, -1, -1, -1)
        patched = [to_patches(pair) for pair in pairs]
        return torch.cat([patches for patches, _ in patched]), torch.stack([grid for _, grid in patched])


def preference_head(width: int) -> nn.Sequential:
    """Return the head's layers on the meta device, numbered as in the checkpoint.

    They map a hidden state to preference and uncertainty.
    """
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
        )
