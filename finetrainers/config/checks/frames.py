"""Rules of frame conditioning: modes that a model supports, and modes that leave frames to train."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from finetrainers.utils.failures import Kind
from finetrainers.utils.text import nearest

from ..errors import Problem
from ..facts import Facts
from ..frame_conditioning import FrameConditioning, image_mode, select_conditioning_modes
from ..prompts import ValidationPrompt
from ..root import TrainConfig
from ..sections import DataSection
from ..values import ROUNDING
from .findings import Finding

Bucket = tuple[int, int, int]
#: Problem with a medium of prompts: its name, the reason, and the kind.
MediumProblem = tuple[str, str, Kind]


def check_frames(config: TrainConfig, facts: Facts) -> Iterator[Finding]:
    """Check the options of frame conditioning against the model."""
    data, model = config.data, config.model.model_name
    if facts.first_frame in ("none", "tokens") and config.changed("first_frame_noise"):
        yield f"--first_frame_noise has no effect: this {model} does not take a first frame on extra channels"
    if data.frame_conditioning is not None and data.first_frame_conditioning_p is not None:
        yield (
            "frame_conditioning",
            "cannot be combined with --first_frame_conditioning_p; remove one of them",
            "conflict",
        )
    if facts.first_frame == "none" and data.first_frame_conditioning_p:
        yield "first_frame_conditioning_p", f"this {model} does not take a first frame; remove it", "unsupported"
    yield from frame_problems(data, facts, model=model)


def frame_problems(data: DataSection, facts: Facts, *, model: str) -> Iterator[Problem]:
    """Yield a problem for frame conditioning that a model or the windows of a dataset do not support."""
    kinds = data.frame_conditioning or ()
    mode = image_mode(facts)
    others = [kind.label for kind in kinds if kind.name != mode]
    share = data.first_frame_conditioning_p if data.frame_conditioning is None else sum(kind.p for kind in kinds)
    way_out = "--list_models shows which models take any frame"
    if facts.first_frame == "none" and kinds:
        yield Problem(
            "--frame_conditioning", f"this {model} does not support conditioning frames; {way_out}", "unsupported"
        )
    elif others and not facts.any_frame:
        yield Problem(
            "--frame_conditioning",
            f"this {model} supports only {mode}, not {', '.join(others)}; {way_out}",
            "unsupported",
        )
    elif share is not None and share < 1 - ROUNDING and facts.images == "left out" and not facts.any_frame:
        option = "first_frame_conditioning_p" if data.frame_conditioning is None else "frame_conditioning"
        message = (
            f"this checkpoint starts every clip from an image, and was not trained without; use {mode}=1, or remove it"
        )
        yield Problem(f"--{option}", message, "unsupported")
    else:
        for kind in kinds:
            if reason := kind.grid_problem(facts.geometry.temporal):
                yield Problem("--frame_conditioning", reason)
    if data.window_context and not facts.any_frame:
        yield Problem(
            "--window_context",
            f"this {model} does not support context frames before a window; {way_out}",
            "unsupported",
        )
    yield from _slice_problems(data, facts)


def _slice_problems(data: DataSection, facts: Facts) -> Iterator[Problem]:
    """Yield a problem for conditioning that windows cut from the latents of a whole clip cannot have."""
    has_windows = data.sliding_window_size is not None or data.dataset is not None
    if not has_windows or data.sliding_window_latents == "encode":
        return
    if facts.first_frame == "channels":
        yield Problem(
            "--sliding_window_latents",
            "this checkpoint takes each window's first frame, which must be encoded alone; use encode",
            "unsupported",
        )
    elif facts.first_frame == "tokens":
        reason = "a window's first latent stands for several frames, so it cannot be a conditioning frame"
        if data.frame_conditioning is None and data.first_frame_conditioning_p != 0:
            yield Problem(
                "--first_frame_conditioning_p",
                f"with --sliding_window_latents slice, {reason}; set it to 0",
                "conflict",
            )
        for kind in data.frame_conditioning or ():
            if kind.name not in ("last", "suffix"):
                message = f"{kind.label}: with --sliding_window_latents slice, {reason}; remove it"
                yield Problem("--frame_conditioning", message, "conflict")


def media_problems(prompts: Sequence[ValidationPrompt], facts: Facts, *, model: str) -> Iterator[MediumProblem]:
    """Yield media that the prompts lack, and those that the model does not take, without the remedy."""
    valid = [set(facts.media)] + [{""}] * (len(facts.media) == 1)
    if facts.media and any(set(prompt.videos) not in valid for prompt in prompts):
        form = f", as {','.join(f'{name}=PATH' for name in facts.media)}" if len(facts.media) > 1 else ""
        yield "video", f"this checkpoint takes {' and '.join(facts.media)}{form}", "required"
    if not facts.media and any(set(prompt.videos) - {""} for prompt in prompts):
        yield "video", f"this {model} takes no control video by name", "unsupported"
    if facts.needs_image and any(not (prompt.image or prompt.video or prompt.video_prefix) for prompt in prompts):
        yield "image", "this checkpoint animates an image", "required"
    if facts.last_frame and any(not (prompt.last_image or prompt.video) for prompt in prompts):
        yield "last_image", "this checkpoint is also given the last frame", "required"
    if facts.first_frame == "none" and any(prompt.image or (prompt.video and not facts.media) for prompt in prompts):
        yield "image", f"this {model} does not take a first frame", "unsupported"


def prompt_problems(prompts: Sequence[ValidationPrompt], facts: Facts, *, model: str) -> Iterator[MediumProblem]:
    """Yield each conditioning input of the prompts that a model does not support, once."""
    names = ("video_prefix",) if facts.last_frame else ("last_image", "video_prefix")
    media = [name for name in names if any(getattr(prompt, name) for prompt in prompts)]
    if not facts.any_frame:
        for name in media:
            message = f"this {model} supports only the first frame; --list_models shows which models take any frame"
            yield name, message, "unsupported"
    elif any(prompt.video_prefix and (prompt.image or prompt.video) for prompt in prompts):
        message = "a prompt cannot have both this and an image or video to begin with; remove one of them"
        yield "video_prefix", message, "conflict"


def argument_problems(
    arguments: Sequence[tuple[str, int]], facts: Facts, lengths: Iterable[int]
) -> Iterator[tuple[str, Kind]]:
    """Yield message and kind of each problem with arguments of the pipeline's call for samples.

    Args:
        arguments: names and values.
        facts: of the model.
        lengths: frames of the samples.
    """
    names, valid = [name for name, _ in arguments], facts.sample_arguments
    if facts.first_frame == "unknown":
        return
    if arguments and not valid:
        yield "this checkpoint has none; remove it", "unsupported"
        return
    for name in dict.fromkeys(names):
        if name not in valid:
            yield f"unknown argument {name!r}{nearest(name, valid)}", "unknown"
        elif names.count(name) > 1:
            yield f"{name} is set twice; set it once", "duplicate"
    if set(names) <= {*valid} and facts.sample_problem is not None:
        reasons = (facts.sample_problem(dict(arguments), frames) for frames in sorted(set(lengths)))
        if reason := next(filter(None, reasons), None):
            yield reason, "invalid"


def length_problems(
    data: DataSection, facts: Facts, buckets: Iterable[Bucket], windows: Iterable[Bucket]
) -> Iterator[Problem]:
    """Yield a problem for frame-conditioning modes that clips are too short for; images have none.

    Args:
        data: the options.
        facts: of the model.
        buckets: of all clips.
        windows: of those that are windows of longer ones.
    """
    kinds: FrameConditioning = select_conditioning_modes(
        data.frame_conditioning, data.first_frame_conditioning_p, facts
    )
    lengths = sorted({frames for frames, _, _ in buckets if frames > 1})
    for kind in kinds if facts.any_frame else ():
        reasons = [reason for frames in lengths if (reason := kind.problem(frames, facts.geometry.temporal))]
        if reasons:
            yield Problem("--frame_conditioning", reasons[0])
    has_windows = data.sliding_window_size is not None or data.dataset is not None
    shortest = min((facts.geometry.latent_shape(*bucket)[0] for bucket in windows if has_windows), default=math.inf)
    if shortest <= data.window_context:
        yield Problem(
            "--window_context",
            f"leaves nothing to train of windows of {shortest} latent frames; use at most {shortest - 1}",
            "conflict",
        )
