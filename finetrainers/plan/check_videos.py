"""The check of videos that prompts name: they are long enough, and leave frames to sample. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from finetrainers.config.checks.findings import Findings
from finetrainers.config.facts import Facts
from finetrainers.config.prompts import ValidationPrompt
from finetrainers.config.root import TrainConfig
from finetrainers.data.buckets.frames import num_available, playback_fps
from finetrainers.data.inspect.probe import probe
from finetrainers.data.reading.status import InvalidSampleError
from finetrainers.utils.text import plural


def check_prompt_videos(
    config: TrainConfig, facts: Facts, prompts: list[ValidationPrompt], size: tuple[int, int, int], findings: Findings,
    *, option: str | None = None,
) -> None:  # fmt: skip
    """Check that control videos are as long as the sample, and that conditioning frames leave some to sample.

    Args:
        config: the run.
        facts: of the model.
        prompts: to sample.
        size: of prompts without one.
        findings: receives the errors.
        option: that gave the prompts, or None if each medium has its own.
    """
    rate = config.validation.validation_frame_rate or facts.geometry.fps
    for prompt in prompts:
        needed = (prompt.size or size)[0]
        for video in prompt.videos.values() if facts.media else ():
            if (video_frames := _count_frames(Path(video), rate)) and video_frames[0] < needed:
                message = f"{video} has {video_frames[1]}, and {needed} are sampled; use a longer one"
                findings.error(option or "validation_videos", message, "mismatch")
        if facts.any_frame and prompt.prefix and (video_frames := _count_frames(prompt.prefix[0], rate)):
            path, frames = prompt.prefix
            if problem := facts.geometry.prefix_problem(
                frames, video_frames[0], needed, ending=prompt.last_image is not None
            ):
                message = f"{path} has {video_frames[1]}{problem}"
                findings.error(option or "validation_video_prefixes", message, "mismatch")
        num_given = sum(1 for image in (prompt.image or prompt.video, prompt.last_image) if image)
        if prompt.last_image and facts.geometry.latent_shape(needed, 0, 0)[0] <= num_given:
            given_frames = "the first and the last frame are" if num_given > 1 else "the last frame is"
            message = f"{given_frames} all that a sample of {needed} frames has; sample more"
            findings.error(option or "validation_last_images", message, "conflict")


def _count_frames(path: Path, rate: float) -> tuple[int, str] | None:
    """Return the number of frames that a video gives at a frame rate, and a description, or None if it is unreadable.

    Its read error has been reported already.
    """
    if not path.is_file():
        return None
    try:
        video = probe(path)
    except InvalidSampleError:
        return None
    fps = playback_fps(video.fps, rate)
    available = num_available(video.frames, source_fps=video.fps, fps=fps)
    return available, f"{plural(available, 'frame')} at {fps:.4g} fps"
