"""Sample videos during training, spread over ranks that never wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from finetrainers.config.sections import ValidationSection
from finetrainers.utils.faults import fault_point
from finetrainers.utils.phases import VALIDATION, phase
from finetrainers.utils.process_state import free_memory
from finetrainers.utils.video import slug

from ..sampling import EncodedPrompts, PromptRequest, SamplingParts, SamplingSettings, prompt_request, sample_prompts
from .base import Callback
from .samples import write_sample

if TYPE_CHECKING:
    from finetrainers.engine.state import TrainState


class Validation(Callback):
    """Samples every prompt when `due(step)`; the same prompt always starts from the same noise.

    The videos of a prompt have the run's seed and those that follow it.
    """

    samples = True

    def __init__(
        self,
        *,
        encoded: EncodedPrompts,
        size: tuple[int, int, int],
        section: ValidationSection,
        frame_rate: float,
        scheduler: Any,
        load_vae: Callable[[], nn.Module],
        due: Callable[[int], bool],
    ) -> None:
        """Args:
        encoded: what to sample.
        size: frames, height and width of clips whose prompt says nothing else.
        section: number of videos, steps, guidance, offloading.
        frame_rate: of the samples, frames per second.
        scheduler: the checkpoint's scheduler.
        load_vae: gives the VAE: the one in use, or a fresh one where latents are precomputed.
        due: whether to sample after this step.
        """
        self.encoded = encoded
        self.sizes = [prompt.size or size for prompt in encoded.prompts]
        self.section = section
        self.settings = SamplingSettings(
            frame_rate, section.validation_inference_steps, section.validation_guidance_scale
        )
        self.scheduler = scheduler
        self.load_vae = load_vae
        self.due = due

    def on_step(self, state: TrainState) -> None:
        if state.requests.sample or self.due(state.step):
            self.sample(state)
            # Ranks with less to do wait here: in the next step they would wait under its limit, and as if for a slow rank.
            state.parallel.barrier()

    @phase(VALIDATION)
    def sample(self, state: TrainState) -> list[Path]:
        """Sample this rank's share of the prompts into `samples/step-N/`; the files written."""
        fault_point("sample")
        parallel, samples = state.parallel, state.run_dir.root / "samples"
        jobs = [(i, j) for i in range(len(self.sizes)) for j in range(self.section.num_validation_videos)]
        mine = jobs[parallel.data_rank :: parallel.data_size]
        # Where a forward pass is collective, every rank must make as many as the busiest one.
        padding = -(-len(jobs) // parallel.data_size) - len(mine) if parallel.forward_is_collective else 0
        written: list[Path] = []
        if not mine and not padding:
            return written

        transformer = state.transformer if parallel.forward_is_collective else state.network
        transformer.eval()
        vae = self.load_vae().to(parallel.device)
        parts = SamplingParts(
            transformer, vae, self.scheduler, parallel.device, offload=bool(self.section.enable_model_cpu_offload)
        )
        seed = state.config.training.seed
        requests = [self._request(prompt, video, state) for prompt, video in [*jobs[:1] * padding, *mine]]
        with state.ema_applied(), parallel.autocast():
            for place, frames in enumerate(sample_prompts(state.spec, parts, requests), start=-padding):
                if place < 0:
                    continue
                prompt, video = mine[place]
                text = " ".join(self.encoded.prompts[prompt].prompt.split())
                written.append(
                    write_sample(
                        samples, f"{prompt:02d}-{slug(text)}-{video}", frames, step=state.step, fps=self.settings.frame_rate,
                        heading=f"{text}\n{self._settings(prompt, video, seed)}",
                    )
                )  # fmt: skip
        transformer.train()
        del vae, parts
        free_memory()
        state.run_dir.event("samples", step=state.step, path=str(samples / f"step-{state.step:06d}"))
        return written

    def _settings(self, prompt: int, video: int, seed: int) -> str:
        """How a sample is drawn, for people."""
        frames, height, width = self.sizes[prompt]
        guidance = self.section.validation_guidance_scale
        parts = [
            f"seed {seed + video}",
            f"{frames} x {height} x {width} at {self.settings.frame_rate:g} fps",
            f"{self.section.validation_inference_steps} denoising steps",
            *([] if guidance is None else [f"guidance {guidance:g}"]),
        ]
        return " | ".join(parts)

    def _request(self, prompt: int, video: int, state: TrainState) -> PromptRequest:
        return prompt_request(
            state.spec, self.encoded, prompt, size=self.sizes[prompt], settings=self.settings,
            seed=state.config.training.seed + video,
        )  # fmt: skip
