"""Options of reward gradients (`--method refl`), and the denoising steps that they are taken through."""

from __future__ import annotations

from typing import Literal

from .base import Section
from .option import option
from .values import Fractions, range_between


# fmt: off
class ReFLSection(Section):
    """Reward gradients: backpropagate a differentiable reward through the last denoising steps (DRaFT, ReFL)."""

    methods = ("differentiates",)

    refl_kind: Literal["draft", "draft-lv", "refl"] = option("draft", "Steps to backpropagate the reward through: "
        "the last `draft_k` (`draft`), the last one, from several noised copies of the clip (`draft-lv`), or a "
        "random one near the end (`refl`).", resume="free")
    draft_k: int = option(1, "Number of last denoising steps that the reward is backpropagated through (K of "
        "DRaFT-K). More steps reach earlier decisions such as layout and take more time, but not more memory.",
        resume="free", needs="refl_kind=draft", ge=1, le=10_000)
    draft_lv_samples: int = option(2, "Noised copies of each finished clip.", resume="free",
        needs="refl_kind=draft-lv", ge=1, le=1000)
    refl_range: Fractions = option([0.75, 1.0], "Fractions of the schedule that bound the step drawn for each "
        "rollout. The default is the published last quarter.", resume="free", needs="refl_kind=refl", min_length=2,
        max_length=2)
    reward_frames: int | None = option(None, "Number of consecutive latent frames of each clip to decode and score, "
        "drawn for each rollout, to save memory. The default is all.", resume="free", ge=1)
    checkpoint_vae: bool = option(True, "Recompute the VAE's decoder in its backward pass, block by block and tile "
        "by tile, instead of storing its activations. Gradients are the same.", resume="free")
# fmt: on

    def repeats(self) -> int:
        """Return how often a clip goes through the network with a gradient in an optimizer step."""
        return {"draft": self.draft_k, "draft-lv": self.draft_lv_samples, "refl": 1}[self.refl_kind]

    def gradient_steps(self, sampling_steps: int) -> range:
        """Return the sampler's steps that the reward may be backpropagated through."""
        if self.refl_kind == "refl":
            return range_between(self.refl_range, sampling_steps, sampling_steps)
        return range(sampling_steps - (self.draft_k if self.refl_kind == "draft" else 1), sampling_steps)
