"""Options that require a hook of the model family, refused where the family does not have it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetrainers.config.errors import Problem
from finetrainers.config.facts import Facts
from finetrainers.config.prompts import MEDIA_OPTIONS, ValidationPrompt
from finetrainers.config.sections import AUTO, ModelSection
from finetrainers.methods.registry import method_spec

if TYPE_CHECKING:
    from .preflight import ResolvedRun


@dataclass(frozen=True)
class Need:
    """An option of a run that requires a hook of the model family.

    Attributes:
        option: the option, as errors name it.
        hook: attribute of `ModelSpec`, which is None or empty if the family does not support the feature.
        feature: what the option asks for, as the object of "does not support".
        remedy: an imperative.
    """

    option: str
    hook: str
    feature: str
    remedy: str = "remove it"


def sample_needs(model: ModelSection, facts: Facts, prompts: Iterable[ValidationPrompt]) -> Iterator[Need]:
    """Yield the hooks that samples of prompts require."""
    if model.attn_backend != AUTO:
        yield Need("--attn_backend", "attention_processor", f"the attention backend {model.attn_backend}")
    for name in ("image", "video", "video_prefix"):
        is_frame = name != "video" or not facts.media
        if is_frame and any(getattr(prompt, name) for prompt in prompts):
            option = f"--{MEDIA_OPTIONS[name]}"
            yield Need(option, "image_pipeline_class", "samples that start from an image or a video")


def run_needs(checked: ResolvedRun) -> Iterator[Need]:
    """Yield the hooks that a run requires, those of its samples included."""
    config, method = checked.config, method_spec(checked.config)
    yield from sample_needs(config.model, checked.facts, checked.sampled)
    if config.parallel.sp_size > 1:
        yield Need("--sp_size", "token_plan", "sequence parallelism")
        yield Need("--sp_size", "attention_processor", "sequence parallelism in its attention")
        if config.training.training_type == "lora" and config.training.lora_dropout > 0:
            yield Need("--sp_size", "streams", "dropout with sequence parallelism", "remove --lora_dropout")
    if method.samples:
        name = config.training.method
        remedy = "use a method that trains on clips: a rollout has one noise level for all frames"
        yield Need("--method", "sampling_times", f"--method {name}", remedy)
    decoded = method.decode_gradient(config, checked.plan.size, checked.geometry)
    if decoded is not None and not decoded[1]:
        yield Need("--checkpoint_vae", "recompute_decoder", "recomputing its VAE's decoder", "use --no-checkpoint_vae")
    if config.training.training_type == "full-finetune" and "comfyui" in config.run.export_formats:
        yield Need("--export_formats", "single_file_layout", "comfyui files of all weights", "use diffusers")


def capability_problems(needs: Iterable[Need], spec: Any, *, name: str) -> list[Problem]:
    """Return a problem for each required hook that a family does not have.

    Args:
        needs: the required hooks.
        spec: the family's spec; or its class where the checkpoint is unknown, which has the hooks that some checkpoint
            of the family has.
        name: name of the family.
    """
    missing = [need for need in needs if not getattr(spec, need.hook)]
    return [
        Problem(n.option, f"{name} does not support {n.feature} (`ModelSpec.{n.hook}`); {n.remedy}", "unsupported")
        for n in missing
    ]
