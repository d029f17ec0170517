"""Options of `finetrainers sample`, and the options of a run that it also takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from .base import Section
from .errors import Problem, value_kind, value_message
from .keywords import FUNCTION_ARGUMENTS
from .root import fields
from .values import PipelineArgument, VideoBucket

S = TypeVar("S", bound=Section)
#: Options of a run's validation, and the options here that mean the same.
VALIDATION_NAMES = {
    "validation_prompts": "prompts",
    "validation_images": "image",
    "validation_videos": "video",
    "validation_last_images": "last_image",
    "validation_video_prefixes": "video_prefix",
    "num_validation_videos": "num",
    "validation_inference_steps": "num_inference_steps",
    "validation_guidance_scale": "guidance_scale",
    "validation_guidance_scale_2": "guidance_scale_2",
    "validation_negative_prompt": "negative_prompt",
    "validation_frame_rate": "frame_rate",
    "validation_pipeline_arguments": "pipeline_arguments",
}
#: Options of a run outside the section `model` that samples depend on.
_RUN_OPTIONS = (
    "layerwise_upcasting_modules", "layerwise_upcasting_storage_dtype", "layerwise_upcasting_skip_modules_pattern",
    "quantize_frozen", "quantize_skip_modules", "lora_autocast", "mixed_precision", "enable_model_cpu_offload",
    "allow_tf32", "verbose",
)  # fmt: skip


class SampleSection(Section):
    """Options of sampling."""

    prompts: str | None = Field(
        None,
        description="PROMPT@@@FxHxW:::PROMPT..., or a .txt file with a prompt in each "
        "line, or a .jsonl or .toml file [the run's validation prompts]",
    )
    image: str | None = Field(
        None,
        description="first frame, a path or URL (image-to-video): one for all prompts, or one for each, joined by :::",
    )
    video: str | None = Field(None, description="likewise, a video whose first frame is used, or the control video")
    last_image: str | None = Field(
        None, description="last frame, likewise, for models that support any conditioning frame"
    )
    video_prefix: str | None = Field(
        None, description="likewise, a video that the sample continues: all of it, or the last F frames of FILE:F"
    )
    negative_prompt: str | None = Field(
        None, description="negative prompt, for classifier-free guidance [the run's, or the model's, or an empty one]"
    )
    seed: int | None = Field(None, ge=0, description="first seed [the run's]")
    num: int = Field(1, ge=1, le=1000, description="seeds for each prompt, from the first one on [1]")
    lora_scale: list[Annotated[float, Field(ge=-10, le=10)]] = Field(
        [], description="scales of the LoRA; each is a column [1]"
    )
    compare: Literal["base"] | None = Field(None, description="add a column for the model without the LoRA")
    size: VideoBucket | None = Field(
        None, description="frames x height x width, 49x512x768, of prompts without a size [the run's]"
    )
    num_inference_steps: int | None = Field(
        None, ge=1, le=10_000, description="denoising steps [the run's, or the model's, or 50]"
    )
    guidance_scale: float | None = Field(
        None, ge=0, le=1000, description="guidance scale [the run's, or the model's, or the pipeline's own]"
    )
    guidance_scale_2: float | None = Field(
        None, ge=0, le=1000, description="guidance scale of the low-noise expert, where there are two [likewise]"
    )
    frame_rate: float | None = Field(None, gt=0, le=1000, description="frames per second [the run's, or the model's]")
    pipeline_arguments: list[PipelineArgument] = Field(
        [], description="further arguments of the pipeline's call, NAME=NUMBER [the run's]"
    )
    no_ema: bool = Field(False, description="sample a checkpoint's raw weights instead of its EMA")
    output_dir: Path | None = Field(
        None, description="directory of the samples; existing ones are continued [samples/sample in the run directory]"
    )
    dry_run: bool = Field(False, description="check everything, print what would be sampled, and exit")


FUNCTION_ARGUMENTS.update({name: field.annotation for name, field in SampleSection.model_fields.items()})


def read_options(section: type[S], values: dict[str, Any]) -> tuple[S, list[Problem]]:
    """Validate the options of a command; invalid ones have their defaults, and are returned as problems."""
    try:
        return section.model_validate(values), []
    except ValidationError as error:
        problems_by_option = {
            str(detail["loc"][0]): Problem(f"--{detail['loc'][0]}", value_message(detail), value_kind(detail))
            for detail in error.errors()
        }
        valid_values = {name: value for name, value in values.items() if name not in problems_by_option}
        return section.model_validate(valid_values), list(problems_by_option.values())


def options_of_runs() -> tuple[str, ...]:
    """Return the names of the options of a run that `finetrainers sample` takes: model, and how it computes."""
    return (*(name for name, option in fields().items() if option.section == "model"), *_RUN_OPTIONS)
