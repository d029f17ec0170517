"""Sample videos during training, spread over ranks that never wait for each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn

from finetrainers.config.sections import ValidationSection
from finetrainers.draw.sample_files import write_sample
from finetrainers.utils.alive import begin_work
from finetrainers.utils.faults import fault_point
from finetrainers.utils.phases import VALIDATION, phase
from finetrainers.utils.process_state import free_memory
from finetrainers.utils.video import slug

from ..sampling import (
    EncodedPrompts,
    PromptRequest,
    SamplingComponents,
    SamplingSettings,
    after_denoising_steps,
    prompt_request,
    sample_prompts,
)
from ..state import Sample
from .base import Callback, Record
from .scores import SampleScores

if TYPE_CHECKING:
    from ..state import TrainState


logger = logging.getLogger(__name__)


class _StoppedError(Exception):
    """Interrupt of sampling by a signal that stops the run."""


@dataclass(eq=False, kw_only=True)
class Validation(Callback):
    """Sampler of every prompt when `due(step)`; the same prompt always starts from the same noise.

    The videos of a prompt have the run's seed and those that follow it. With rewards, the samples are scored.

    Attributes:
        encoded: the prompts to sample.
        size: frames, height and width of clips whose prompt sets no other.
        section: number of videos, steps, guidance, offloading, and the frame rate, which is set.
        scheduler: the checkpoint's scheduler.
        load_vae: returns the VAE: the one in use, or a fresh one where latents are precomputed.
        due: whether to sample after this step, unless it is the last one.
        at_start: whether to sample before the first step.
        scores: scores the samples, or None if they are not scored.
        prefix: of the samples' file names.
    """

    encoded: EncodedPrompts
    size: tuple[int, int, int]
    section: ValidationSection
    scheduler: Any
    load_vae: Callable[[], nn.Module]
    due: Callable[[int], bool]
    at_start: bool
    scores: SampleScores | None = None
    prefix: str = ""
    samples = True
    _clip: str = field(init=False, default="")
    _denoised: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        section = self.section
        self.sizes = [prompt.size or self.size for prompt in self.encoded.prompts]
        assert section.validation_frame_rate is not None, "the model's own rate, unless another was set"
        self.settings = SamplingSettings(
            section.validation_frame_rate, section.validation_inference_steps, section.validation_guidance_scale,
            section.validation_guidance_scale_2, dict(section.validation_pipeline_arguments),
        )  # fmt: skip

    def on_start(self, state: TrainState) -> Record | None:
        return self._sample_and_score(state) if self.at_start and state.step == 0 else None

    def on_step(self, state: TrainState) -> Record | None:
        is_due = state.requests.sample or state.is_last_step or self.due(state.step)
        return self._sample_and_score(state) if is_due else None

    def _sample_and_score(self, state: TrainState) -> Record | None:
        begin_work("validation")
        samples = self.sample(state)
        record, state.doing = None, ""
        if samples is None:
            logger.warning("the samples of step %d are incomplete: the run is to stop", state.step)
            return None
        state.samples = samples if state.wants_samples else None
        if self.scores is not None:  # after sampling, so that activations of rewards do not add to the pipeline's
            clips = [(sample.number, sample.prompt, sample.frames) for sample in samples]
            record = self.scores.record(clips, fps=self.settings.frame_rate)
        # Ranks with less to do wait here: in the next step they would wait under its limit, and as if for a slow rank.
        state.parallel.barrier()
        return record

    @phase(VALIDATION)
    def sample(self, state: TrainState) -> list[Sample] | None:
        """Sample this rank's share of the prompts into `samples/step-N/`; return the samples, or None if interrupted.

        The list is empty unless they are to be scored, or a callback uses them. If processes share prompts, each writes
        and scores some.
        """
        fault_point("sample")
        parallel, samples = state.parallel, state.run_dir.root / "samples"
        jobs = [(i, j) for i in range(len(self.sizes)) for j in range(self.section.num_validation_videos)]
        local_jobs = jobs[parallel.data_rank :: parallel.data_size]
        # Where a forward pass is collective, every rank must make as many as the busiest one.
        padding = -(-len(jobs) // parallel.data_size) - len(local_jobs) if parallel.forward_is_collective else 0
        returned: list[Sample] = []
        if not local_jobs and not padding:
            return returned

        transformer = state.transformer if parallel.forward_is_collective else state.network
        transformer.eval()
        vae = self.load_vae().to(parallel.device)
        parts = SamplingComponents(
            transformer, vae, self.scheduler, parallel.device, offload=bool(self.section.enable_model_cpu_offload)
        )
        seed, clips = state.config.training.seed, [*jobs[:1] * padding, *local_jobs]
        counting = after_denoising_steps(state.spec, self.scheduler, partial(self._count_step, state))
        with state.ema_applied(), parallel.autocast(), counting as extra, suppress(_StoppedError):
            requests = self._requests(state, clips, replace(self.settings, extra={**self.settings.extra, **extra}))
            sampled = islice(enumerate(sample_prompts(state.spec, parts, requests), start=-padding), padding, None)
            for index, frames in parallel.take_turns(sampled):
                prompt, video = local_jobs[index]
                text = " ".join(self.encoded.prompts[prompt].prompt.split())
                path = write_sample(
                    samples, f"{self.prefix}{prompt:02d}-{slug(text)}-{video}", frames, step=state.step,
                    fps=self.settings.frame_rate, heading=f"{text}\n{self._settings(prompt, video, seed)}",
                )  # fmt: skip
                if self.scores is not None or state.wants_samples:
                    number = jobs.index(local_jobs[index])
                    prompt_text = self.encoded.prompts[prompt].prompt
                    returned.append(Sample(prompt_text, frames, self.settings.frame_rate, path, number))
            state.doing = ""
        transformer.train()
        del vae, parts
        free_memory()
        if state.doing:
            return None
        state.run_dir.event("samples", step=state.step, path=str(samples / f"step-{state.step:06d}"))
        return returned

    def _requests(
        self, state: TrainState, clips: Sequence[tuple[int, int]], settings: SamplingSettings
    ) -> Iterator[PromptRequest]:
        """Yield the requests for clips, each of a prompt and the number of its video, and count them for the user."""
        seed = state.config.training.seed
        for number, (prompt, video) in enumerate(clips, start=1):
            self._denoised, self._clip = 0, f"sampling clip {number}/{len(clips)}"
            state.doing = self._clip
            yield prompt_request(
                state.spec, self.encoded, prompt, size=self.sizes[prompt], settings=settings, seed=seed + video
            )

    def _count_step(self, state: TrainState) -> None:
        """Count a denoising step for the user; a single process is interrupted here, where others would wait for it.

        Raises:
            _StoppedError: the run is to stop.
        """
        if state.parallel.world_size == 1 and state.requests.signals.received is not None:
            raise _StoppedError
        total, self._denoised = self.section.validation_inference_steps, self._denoised + 1
        state.doing = f"{self._clip}, step {min(self._denoised, total)}/{total}"

    def _settings(self, prompt: int, video: int, seed: int) -> str:
        """Return a readable description of how a sample is drawn."""
        frames, height, width = self.sizes[prompt]
        parts = [
            f"seed {seed + video}",
            f"{frames} x {height} x {width} at {self.settings.frame_rate:g} fps",
            f"{self.section.validation_inference_steps} denoising steps",
            *filter(None, [self.section.guidance_text, self.encoded.prompts[prompt].given]),
        ]
        return " | ".join(parts)
