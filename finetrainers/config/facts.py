"""Facts of a checkpoint from its config files alone, so that wrong options are refused before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .geometry import Geometry

Json = dict[str, Any]
#: The config of every part of a checkpoint that is on this disk, by part; `model_index` is that of its pipeline.
Configs = Mapping[str, Json]
#: Further media that checkpoints of some family take, as `Facts.media` names them.
MEDIA = ("control_video",)


@dataclass(frozen=True)
class Activations:
    """Memory of activations in one kind of training, for the memory estimate, counted with `memory.count.count_step`.

    The unit is U = clips * latent tokens * width * 2 bytes, one bf16 hidden tensor.

    Attributes:
        kept: activations that a block keeps for backward without checkpointing, by list of blocks.
        outside: activations that the network keeps or needs outside of blocks, without checkpointing.
        checkpointed: activations that a checkpointed block keeps.
        forward: peak of further memory in forward, with checkpointing.
        backward: peak of further memory in backward, with checkpointing: one recomputed block and its gradients.
        attention: outputs of a block's attention operators, including log-sum-exp.
    """

    kept: tuple[float, ...]
    outside: float
    checkpointed: float
    forward: float
    backward: float
    attention: float = 1.03


@dataclass(frozen=True)
class LoRASettings:
    """Recommended settings of a LoRA that is trained on clips, and the steps for a number of clips.

    Attributes:
        rank: of the LoRA; its alpha is the same.
        lr: learning rate.
        steps: optimizer steps for few clips.
        options: further options of the recipe, by flat name, which `finetrainers init` writes.
    """

    rank: int
    lr: float
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def steps_for(self, clips: int, clips_per_step: int) -> int:
        """Return the steps that see each clip 40 times: at least `steps`, and at most four times as many."""
        return min(max(self.steps, 40 * clips // clips_per_step), 4 * self.steps)


@dataclass(frozen=True)
class Facts:
    """Facts from the config files of one checkpoint.

    Attributes:
        geometry: size rules.
        text_parts: tokenizers and text encoders, in loading order.
        clip_parts: the VAE, and other parts that encode clips, such as an image encoder with its processor.
        companions: frozen parts that sampling needs, beside the VAE; some of them may be `clip_parts`.
        trained: the part that is trained.
        is_flow: whether it is a flow-matching model, so that the flow options mean something.
        first_frame: how a given first frame reaches the network: "none", as clean "tokens" with noise level 0, on extra
            "channels", or "unknown" where that depends on a config that is not on this disk.
        any_frame: whether any latent frames can be conditioned on, since the network takes a noise level for each, or
            each on channels; where that depends on a config that is not on this disk: whether they can with some.
        first_frame_p: default probability of conditioning on the first frame.
        first_frame_noise: mean and standard deviation of log s, where noise of s was added to the pixels of a first
            frame on channels in training, or None if none was.
        last_frame: whether clips also end with a given image, on channels.
        sees_image: whether an image encoder reads the given images for the network.
        animates: whether every clip starts from an image, where `first_frame` is "tokens".
        image_optional: whether the network was also trained without the image, where `needs_image`.
        text_sees_image: whether the text encoder is given the image that a clip starts from, so that text and image are
            encoded together.
        guidance: default guidance scale of samples, for networks that take guidance as an input, or None for others.
        least_frames: fewest frames of a clip that diffusers' pipeline samples without NaN.
        least_steps: fewest denoising steps that the checkpoint's scheduler can take.
        lora_targets: modules that LoRA targets by default.
        unused: expression searched in names of weights that predictions do not depend on here, such as those of sound:
            they get no LoRA and are not trained.
        boundary: noise-level quantile at and above which one of two experts, `transformer`, denoises; below it
            `transformer_2` does. It is None if one network denoises at all levels.
        noise_range: quantiles that the trained part is for.
        channels: channels of the latents, or None for `out_channels` or `in_channels` of the network's config.
        heads: attention heads of the network, over which processes can share a clip, or None if not known.
        media: further media that the network takes with every clip, one image per frame, such as `control_video`.
        lora: recommended settings of a LoRA, or None if there are none.
        defaults: options that the checkpoint's publishers recommend for training and samples, by flat name; they apply
            unless the user sets them.
        noise_source: source of the defaults for noise levels and latents: the publishers' trainer, if there is one.
        sample_arguments: further arguments of the pipeline's calls, whole numbers, that users may set for samples.
        sample_problem: returns why a sample of a number of frames cannot have such arguments, or None if it can.
        scene: prompt for something that the model can draw, which is unlike most users' clips.
        version: version of the model, which LoRA files state, since weights of another have the same names and shapes;
            or None if there is one.
        notes: notes for users on how the checkpoint is trained and sampled.
        misread: the reason why a program takes a file of all weights for another network, by export format.
        read_notes: notes for users on a file that the program reads, by export format.
    """

    geometry: Geometry
    text_parts: tuple[str, ...] = ("tokenizer", "text_encoder")
    clip_parts: tuple[str, ...] = ("vae",)
    companions: tuple[str, ...] = ()
    trained: str = "transformer"
    is_flow: bool = True
    first_frame: str = "none"
    any_frame: bool = False
    first_frame_p: float = 0.0
    first_frame_noise: tuple[float, float] | None = None
    last_frame: bool = False
    sees_image: bool = False
    animates: bool = False
    image_optional: bool = False
    text_sees_image: bool = False
    guidance: float | None = None
    least_frames: int = 1
    least_steps: int = 1
    lora_targets: tuple[str, ...] = ("to_k", "to_q", "to_v", "to_out.0")
    unused: str | None = None
    boundary: float | None = None
    noise_range: tuple[float, float] = (0.0, 1.0)
    media: tuple[str, ...] = ()
    channels: int | None = None
    heads: int | None = None
    lora: LoRASettings | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    noise_source: str = ""
    sample_arguments: tuple[str, ...] = ()
    sample_problem: Callable[[Mapping[str, int], int], str | None] | None = None
    scene: str = "a boat on a lake"
    version: str | None = None
    notes: tuple[str, ...] = ()
    misread: Mapping[str, str] = field(default_factory=dict, hash=False)
    read_notes: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Give the geometry its fewest frames, which depend on what images do."""
        shortest = 2 if self.images == "left out" else 1
        object.__setattr__(self, "geometry", replace(self.geometry, shortest=shortest))

    def of_expert(self, expert: str | None) -> Facts:
        """Return the facts of a run that trains the `high` (also for None) or the `low` expert, where there are two."""
        if self.boundary is None:
            return self
        trained, other, within = "transformer", "transformer_2", (self.boundary, 1.0)
        if expert == "low":
            trained, other, within = other, trained, (0.0, self.boundary)
        return replace(self, trained=trained, companions=(other, *self.companions), noise_range=within)

    def trains_at(self, quantile: float) -> bool:
        """Return whether the trained part denoises at this quantile."""
        low, high = self.noise_range
        return self.noise_range == (0.0, 1.0) or low <= quantile < high or quantile == high == 1.0

    @property
    def has_one_network(self) -> bool:
        """True if one network denoises at all noise levels, as far as the config is on this disk."""
        return self.boundary is None and self.first_frame != "unknown"

    @property
    def expert(self) -> str | None:
        """Name of the expert that is trained, `high` or `low`, or None if there is one network."""
        return None if self.boundary is None else "low" if self.noise_range == (0.0, self.boundary) else "high"

    @property
    def experts(self) -> tuple[str, ...]:
        """The companions that denoise: the expert that is not trained, or none."""
        return (
            () if self.boundary is None else tuple(part for part in self.companions if part.startswith("transformer"))
        )

    @property
    def needs_image(self) -> bool:
        """True if every clip starts from an image."""
        return self.first_frame == "channels" or self.text_sees_image or self.animates

    @property
    def images(self) -> Literal["trained", "from text", "left out"]:
        """Use of single images in training: as clips, from the prompt without the image that clips start from, or none.

        As the image that they start from, they would be their own answer.
        """
        return "trained" if not self.needs_image else "from text" if self.image_optional else "left out"

    @property
    def parts(self) -> tuple[str, ...]:
        """Everything that a run may load, in loading order."""
        return tuple(dict.fromkeys(("scheduler", *self.text_parts, *self.clip_parts, self.trained, *self.companions)))

    @property
    def networks(self) -> tuple[str, ...]:
        """Parts that are networks and that training needs, the trained one last."""
        return tuple(filter(is_network, (*self.text_parts, *self.clip_parts, self.trained)))


def is_network(part: str) -> bool:
    """Return whether a part has weights; others are schedulers, tokenizers, and processors of images and text."""
    return not part.startswith(("scheduler", "tokenizer")) and not part.endswith(("processor", "extractor"))


#: Reads the configs of a checkpoint; without any, it returns the common facts of the published checkpoints.
#: Raises ValueError, with the checkpoint's kind and the kinds that the family trains, if it does not train this one.
Read = Callable[[Configs], Facts]
