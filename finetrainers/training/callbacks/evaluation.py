"""Evaluations by the method: held-out clips, or samples of held-out prompts, before, while and after training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from finetrainers.draw.sample_files import write_sample
from finetrainers.methods.registry import method_spec
from finetrainers.utils.alive import begin_work
from finetrainers.utils.phases import VALIDATION, phase
from finetrainers.utils.video import slug

from ..state import Sample
from .base import Callback, Record

if TYPE_CHECKING:
    from ..state import TrainState


@dataclass(eq=False)
class MethodEvaluation(Callback):
    """Evaluation by the method before the first step, every `eval_steps` steps, and at the end; it stores the clips."""

    fps: float
    samples = True

    def on_start(self, state: TrainState) -> Record | None:
        return self.evaluate(state) if state.step == 0 else None

    def on_step(self, state: TrainState) -> Record | None:
        every = state.config.validation.eval_steps
        is_due = state.requests.sample or state.is_last_step or (every and state.step % every == 0)
        return self.evaluate(state) if is_due else None

    @phase(VALIDATION)
    def evaluate(self, state: TrainState) -> Record:
        """Evaluate, with averaged weights if there are any, and write the clips to `samples/`."""
        begin_work("evaluation")
        was_training = state.transformer.training
        state.transformer.eval()
        with state.ema_applied(), torch.no_grad():
            evaluation = state.method.evaluate(state.transformer)
        state.transformer.train(was_training)
        state.samples = [] if state.wants_samples and method_spec(state.config).samples else None
        for number, prompt, video in evaluation.clips:
            frames = (video.permute(0, 2, 3, 1) * 255).round().byte().numpy()
            count, height, width, _ = frames.shape
            seed = state.config.training.seed
            path = write_sample(
                state.run_dir.root / "samples", f"eval-{number:03d}-{slug(prompt)}", frames,
                step=state.step, fps=self.fps,
                heading=f"{' '.join(prompt.split())}\nseed {seed} | {count} x {height} x {width} at {self.fps:g} fps",
            )  # fmt: skip
            if state.samples is not None:
                state.samples.append(Sample(prompt, frames, self.fps, path, number))
        state.parallel.barrier()  # until the clips of all ranks are written
        return dict(evaluation.record)
