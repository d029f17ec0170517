"""Sample videos during training, spread over ranks that never wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from finetrainers.config.sections import ValidationSection
from finetrainers.utils.alive import work
from finetrainers.utils.faults import fault_point
from finetrainers.utils.phases import VALIDATION, phase
from finetrainers.utils.process_state import free_memory
from finetrainers.utils.video import slug

from ..sampling import EncodedPrompts, PromptRequest, SamplingParts, SamplingSettings, prompt_request, sample_prompts
from .base import Callback, Record
from .samples import write_sample
from .scores import SampleScores

if TYPE_CHECKING:
    from ..state import TrainState


class Validation(Callback):
    """Samples every prompt when `due(step)`; the same prompt always starts from the same noise.

    The videos of a prompt have the run's seed and those that follow it. With rewards, the samples are scored, and there are
    some of the weights before training.
    """

    samples = True

    def __init__(
        self,
        *,
        encoded: EncodedPrompts,
        size: tuple[int, int, int],
        section: ValidationSection,
        scheduler: Any,
        load_vae: Callable[[], nn.Module],
        due: Callable[[int], bool],
        scores: SampleScores | None = None,
        prefix: str = "",
    ) -> None:
        """Args:
        encoded: what to sample.
        size: frames, height and width of clips whose prompt says nothing else.
        section: number of videos, steps, guidance, offloading, and the frame rate, which is set.
        scheduler: the checkpoint's scheduler.
        load_vae: gives the VAE: the one in use, or a fresh one where latents are precomputed.
        due: whether to sample after this step.
        scores: scores the samples; None: nobody does.
        prefix: of the samples' file names.
        """
        self.encoded = encoded
        self.sizes = [prompt.size or size for prompt in encoded.prompts]
        self.section = section
        assert section.validation_frame_rate is not None, "the model's own rate, if no other was asked for"
        self.settings = SamplingSettings(
            section.validation_frame_rate, section.validation_inference_steps, section.validation_guidance_scale
        )
        self.scheduler = scheduler
        self.load_vae = load_vae
        self.due = due
        self.scores = scores
        self.prefix = prefix

    def on_start(self, state: TrainState) -> Record | None:
        return self._sample_and_score(state) if self.scores is not None and state.step == 0 else None

    def on_step(self, state: TrainState) -> Record | None:
        return self._sample_and_score(state) if state.requests.sample or self.due(state.step) else None

    def _sample_and_score(self, state: TrainState) -> Record | None:
        work("validation")
        samples = self.sample(state)
        # After sampling, so that activations of rewards do not add to those of the pipeline.
        record = None if self.scores is None else self.scores.record(samples, fps=self.settings.frame_rate)
        # Ranks with less to do wait here: in the next step they would wait under its limit, and as if for a slow rank.
        state.parallel.barrier()
        return record

    @phase(VALIDATION)
    def sample(self, state: TrainState) -> list[tuple[int, str, np.ndarray]]:
        """Sample this rank's share of the prompts into `samples/step-N/`; the number, prompt and frames of each.

        The frames are given only if they are to be scored. Of processes that share prompts, each writes and scores some.
        """
        fault_point("sample")
        parallel, samples = state.parallel, state.run_dir.root / "samples"
        jobs = [(i, j) for i in range(len(self.sizes)) for j in range(self.section.num_validation_videos)]
        mine = jobs[parallel.data_rank :: parallel.data_size]
        # Where a forward pass is collective, every rank must make as many as the busiest one.
        padding = -(-len(jobs) // parallel.data_size) - len(mine) if parallel.forward_is_collective else 0
        found: list[tuple[int, str, np.ndarray]] = []
        if not mine and not padding:
            return found

        transformer = state.transformer if parallel.forward_is_collective else state.network
        transformer.eval()
        vae = self.load_vae().to(parallel.device)
        parts = SamplingParts(
            transformer, vae, self.scheduler, parallel.device, offload=bool(self.section.enable_model_cpu_offload)
        )
        seed = state.config.training.seed
        requests = [self._request(prompt, video, state) for prompt, video in [*jobs[:1] * padding, *mine]]
        with state.ema_applied(), parallel.autocast():
            made = islice(enumerate(sample_prompts(state.spec, parts, requests), start=-padding), padding, None)
            for place, frames in parallel.take_turns(made):
                prompt, video = mine[place]
                text = " ".join(self.encoded.prompts[prompt].prompt.split())
                write_sample(
                    samples, f"{self.prefix}{prompt:02d}-{slug(text)}-{video}", frames, step=state.step,
                    fps=self.settings.frame_rate, heading=f"{text}\n{self._settings(prompt, video, seed)}",
                )  # fmt: skip
                if self.scores is not None:
                    found.append((jobs.index(mine[place]), self.encoded.prompts[prompt].prompt, frames))
        transformer.train()
        del vae, parts
        free_memory()
        state.run_dir.event("samples", step=state.step, path=str(samples / f"step-{state.step:06d}"))
        return found

    def _settings(self, prompt: int, video: int, seed: int) -> str:
        """How a sample is drawn, for people."""
        frames, height, width = self.sizes[prompt]
        guidance = self.section.validation_guidance_scale
        parts = [
            f"seed {seed + video}",
            f"{frames} x {height} x {width} at {self.settings.frame_rate:g} fps",
            f"{self.section.validation_inference_steps} denoising steps",
            *([] if guidance is None else [f"guidance {guidance:g}"]),
            *filter(None, [self.encoded.prompts[prompt].given]),
        ]
        return " | ".join(parts)

    def _request(self, prompt: int, video: int, state: TrainState) -> PromptRequest:
        return prompt_request(
            state.spec, self.encoded, prompt, size=self.sizes[prompt], settings=self.settings,
            seed=state.config.training.seed + video,
        )  # fmt: skip
