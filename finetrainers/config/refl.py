"""Options of reward gradients (`--method refl`), and the denoising steps that they are taken through."""

from __future__ import annotations

from typing import Literal

from .base import Section
from .option import option
from .values import Fractions, range_between


# fmt: off
class ReFLSection(Section):
    """Reward gradients: backpropagate a differentiable reward through the last denoising steps (DRaFT, ReFL)."""

    methods = ("refl",)

    refl_kind: Literal["draft", "draft-lv", "refl"] = option("draft", "Which steps the reward is backpropagated "
        "through: the last `draft_k` steps of the sampler (`draft`: DRaFT-K), the last step alone, from several "
        "noised copies of the finished clip, which lowers the variance (`draft-lv`: DRaFT-LV), or one step at a "
        "random place near the end, whose prediction of the clean clip is scored (`refl`: ReFL).", resume="free")
    draft_k: int = option(1, "Number K of last denoising steps that the reward is backpropagated through. More reach "
        "what earlier steps decide, such as layout, and take more time; memory stays that of one step.", resume="free",
        needs="refl_kind=draft", ge=1, le=10_000)
    draft_lv_samples: int = option(2, "Noised copies of each finished clip.", resume="free",
        needs="refl_kind=draft-lv", ge=1, le=1000)
    refl_range: Fractions = option([0.75, 1.0], "Fractions of the "
        "schedule between which the step is drawn for each rollout. The default is the published last quarter.",
        resume="free", needs="refl_kind=refl", min_length=2, max_length=2)
    reward_frames: int | None = option(None, "Decode and score only so many consecutive latent frames of each clip, "
        "drawn for each rollout. It takes less memory. The first of them is decoded as if the clip began there. The "
        "default is all.", resume="free", ge=1)
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
