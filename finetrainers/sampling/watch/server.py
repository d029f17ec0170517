"""Follow the checkpoints of a run in a separate process: sample, score, send and compare each one once."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import av
import numpy as np
import torch

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.config.prompts import ValidationPrompt
from finetrainers.parallel.strategy import Strategy
from finetrainers.plan.init_distributed import join
from finetrainers.rewards.reward_set import RewardError, RewardSet
from finetrainers.rundir.best import best_checkpoint, mark_best
from finetrainers.rundir.find import CheckpointInfo, scan_checkpoints
from finetrainers.rundir.identity import are_different, read_identity
from finetrainers.rundir.lock import exclusive
from finetrainers.rundir.manifest import MANIFEST, read_manifest
from finetrainers.training.sampling import EncodedPrompts
from finetrainers.utils.failures import ExpectedError, user_message
from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import file_sha256
from finetrainers.utils.process_state import free_memory
from finetrainers.utils.text import duration, plural, shortened

from ..ledger import SampleIndex
from ..memory import offloads
from ..plan import Sample, SamplePlan, Variant
from ..run import SampleResult, check_weights, generate_missing
from ..sampler import Sampler
from ..weights import AVERAGES, find_target
from .page import Column, write_page
from .plan import WATCHED, WatchPlan
from .scores import TRIGGER_GAP, Checkpoint, Scores, checkpoint_variant, trigger_pairs
from .tracked import WatchTracker
from .waiting import training_state

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


class WatchError(ExpectedError):
    """Error of a watch that can sample nothing."""


@dataclass
class Watch:
    """A running watch.

    Attributes:
        plan: for each checkpoint.
        parallel: this process, and its device.
        say: prints a line for the user.
        failed: errors by preset and manifest; this process does not retry these checkpoints.
        left_out: prompts that cannot be encoded, with reasons.
    """

    plan: WatchPlan
    parallel: Strategy
    say: Say
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        folders = {name: preset.output_dir for name, preset in plan.presets.items()}
        self._scores = {name: Scores(folder, plan.labels) for name, folder in folders.items()}
        self._tracker = None if plan.options.no_track else WatchTracker(plan.run, folders, plan.config)
        self._identity = plan.identity
        self._total_steps = plan.config.training.train_steps
        self._reported_steps: set[int] = set()  # incomplete steps that have been reported
        self._waiting = ""
        self._best_on_page: dict[str, Checkpoint | str | None] = dict.fromkeys(plan.presets, "")  # by preset
        self._problems: dict[str, dict[str, str]] = {name: {} for name in plan.presets}  # by key of the clip
        self._clips: dict[tuple[str, str], list[Sample]] = {}  # by preset and digest of the weights
        self._sampler: Sampler | None = None
        self._encoded: EncodedPrompts | None = None
        self._rewards: RewardSet | None = None

    def follow(self) -> None:
        """Look for checkpoints until the process is stopped, or once."""
        try:
            while True:
                worked = self.look()
                if self.plan.options.once:
                    break
                if not worked:
                    self._wait()
        finally:
            if self._tracker is not None:
                self._tracker.finish()

    def look(self) -> bool:
        """Serve every complete checkpoint, the oldest first, and return whether there was anything to do."""
        worked = False
        self._check_run()
        for listed in scan_checkpoints(self.plan.run, weights_only=True):
            self._check_run()
            for name in self.plan.presets:
                checkpoint = self._read_checkpoint(listed)
                if checkpoint is not None and not self._is_done(name, checkpoint):
                    worked |= self._serve(name, listed, checkpoint)
        best = self._mark_best()
        for name, best_on_page in self._best_on_page.items():
            if best_on_page != best:
                self._update_page(name, best)
        return worked

    def _check_run(self) -> None:
        """Check that the directory still belongs to the run that the watch has begun with.

        Raises:
            WatchError: it belongs to another run, with other prompts, sizes and scores.
        """
        current = read_identity(self.plan.run)
        if are_different(self._identity, current):
            raise WatchError(f"{self.plan.run} is now the directory of another run; start the watch again")
        if current is not None and self._identity is None:
            for preset in self.plan.presets.values():
                current.write(preset.output_dir / WATCHED)
        self._identity = current or self._identity

    def _wait(self) -> None:
        """Pause, and print the reason once for each state of the run.

        Models are freed where no checkpoint is expected.
        """
        poll_seconds = self.plan.options.poll_seconds
        with contextlib.suppress(ConfigError):  # a resumed run may have another length
            self._total_steps = load_config(self.plan.run / "config.toml").training.train_steps
        training = training_state(self.plan.run, total_steps=self._total_steps)
        state = training.sentence.partition(", step")[0]
        if state != self._waiting:
            self._waiting = state
            self.say(f"waiting for checkpoints: {training.sentence} (checking every {poll_seconds:g} s; Ctrl-C stops)")
        if not training.may_go_on:
            if self._sampler is not None:
                self._sampler.free()
            if self._rewards is not None:
                self._rewards = None
                free_memory()
        time.sleep(poll_seconds)

    def _read_checkpoint(self, listed: CheckpointInfo) -> Checkpoint | None:
        """Return a listed checkpoint with its content, or None if it is incomplete, which is reported once."""
        if listed.path.name.startswith("."):  # it is being replaced
            return None
        if listed.damage is not None:
            self._report_incomplete(listed.step, listed.damage)
            return None
        with contextlib.suppress(OSError, ValueError):
            averages = read_manifest(listed.path)["files"].get(AVERAGES, {}).get("sha256")
            return Checkpoint(listed.step, listed.path, file_sha256(listed.path / MANIFEST), averages)
        return None

    def _report_incomplete(self, step: int, reason: str) -> None:
        if step not in self._reported_steps:
            self._reported_steps.add(step)
            self.say(f"step {step}: checkpoint incomplete, waiting: {reason}")

    def _samples(self, name: str, variant: Variant) -> list[Sample]:
        """Return the clips of a preset with some weights; a prompt that is listed twice has one clip."""
        key = name, variant.weights.digest
        if key not in self._clips:
            samples = self._column_plan(name, variant).samples()
            self._clips[key] = list({sample.key: sample for sample in samples}.values())
        return self._clips[key]

    def _recorded_samples(self, name: str, checkpoint: Checkpoint) -> list[Sample]:
        """Return the clips of a checkpoint if any of them is recorded; its weights are not read."""
        ema_digest = None if self.plan.options.no_ema else checkpoint.averages
        for digest, variant in self._scores[name].variants(checkpoint.manifest).items():
            if digest == ema_digest or (ema_digest is None and digest != checkpoint.averages):
                return self._samples(name, variant)
        return []

    def _is_done(self, name: str, checkpoint: Checkpoint) -> bool:
        tracker, scores = self._tracker, self._scores[name]
        if (name, checkpoint.manifest) in self.failed:
            return True
        samples = self._recorded_samples(name, checkpoint)
        is_scored = bool(samples) and all(scores.has(checkpoint.manifest, sample.key) for sample in samples)
        return is_scored and (tracker is None or tracker.has(name, checkpoint.manifest))

    def _serve(self, name: str, listed: CheckpointInfo, checkpoint: Checkpoint) -> bool:
        """Sample and score a checkpoint, and return False if it is incomplete. Its errors concern it alone."""
        started = time.monotonic()
        try:
            target = find_target(str(listed.path), use_ema=not self.plan.options.no_ema)  # reads every byte
        except (OSError, ValueError) as error:
            self._report_incomplete(listed.step, str(error))
            return False
        self._reported_steps.discard(listed.step)
        variant = checkpoint_variant(listed.step, target.weights)
        try:
            drawn = self._draw(name, variant)
        except (WatchError, KeyboardInterrupt):
            raise
        except Exception as error:
            if self._sampler is not None:
                self._sampler.free()
            self._report_failure(name, checkpoint, error)
            return True
        samples = self._samples(name, variant)
        if _is_gone(checkpoint) and drawn.new:
            self.say(f"step {listed.step} was removed while it was sampled; its clips stay")
        elif _is_other(checkpoint):  # the clips may show either of the two
            for file in drawn.clips.values():  # so that the ledger counts them as missing
                file.unlink(missing_ok=True)
            return True
        if drawn.problems:
            self.failed[name, checkpoint.manifest] = "; ".join(drawn.problems.values())
        self._score(name, samples, checkpoint, drawn)
        means = self._means(name, samples)
        self._problems[name] |= drawn.problems
        self._update_page(name, self._best())
        scores_text = "".join(f", {label} {value:.4g}" for label, value in means.items())
        took = duration(time.monotonic() - started)
        self.say(f"step {listed.step}, {name}: {plural(len(drawn.clips), 'clip')}{scores_text} ({took})")
        for problem in drawn.problems.values():
            self.say(f"not sampled: {problem}")
        return True

    def _report_failure(self, name: str, checkpoint: Checkpoint, error: Exception) -> None:
        """Report why a checkpoint could not be sampled.

        Raises:
            Exception: an error that other checkpoints would meet as well, such as a full disk.
        """
        if _is_gone(checkpoint) or _is_other(checkpoint):
            self.say(f"step {checkpoint.step} was removed while it was sampled")
            return
        sentence = user_message(error)
        if sentence is not None and isinstance(error, OSError):
            raise error
        reason = sentence or (str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}")
        self.failed[name, checkpoint.manifest] = reason
        self.say(f"step {checkpoint.step}, {name}: not sampled: {reason}")
        logger.debug("step %d", checkpoint.step, exc_info=error)

    def _draw(self, name: str, variant: Variant) -> SampleResult:
        plan = self._column_plan(name, variant)
        check_weights(plan)
        ledger = SampleIndex(plan.output_dir)
        if self._sampler is None and any(ledger.find(sample) is None for sample in plan.samples()):
            self._sampler, self._encoded = self._load_models()
            plan = self._column_plan(name, variant)  # without the prompts that cannot be encoded
        return generate_missing(plan, self.parallel, sampler=self._sampler, encoded=self._encoded)

    def _column_plan(self, name: str, variant: Variant) -> SamplePlan:
        return replace(self.plan.presets[name], variants=[variant])

    def _load_models(self) -> tuple[Sampler, EncodedPrompts]:
        """Return a sampler and the encoded prompts of all presets, and load the rewards."""
        largest = max(self.plan.presets.values(), key=lambda preset: max(map(math.prod, preset.sizes)))
        offload, note = offloads(largest, largest.family.load(largest.config.model), device=self.parallel.device)
        if note:
            self.say(note)
        sampler = Sampler(self.plan.config, largest.family, self.parallel, offload=offload)
        prompts = list(dict.fromkeys(prompt for preset in self.plan.presets.values() for prompt in preset.prompts))
        failed: dict[int, Exception] = {}
        encoded = sampler.encode(prompts, negative=largest.negative, failed=failed)
        for error in failed.values():
            if isinstance(error, MemoryError | torch.OutOfMemoryError):  # no prompt caused it
                raise error
        self._leave_out({prompts[index]: error for index, error in failed.items()})
        self._load_rewards()  # before sampling, so that a reward that cannot be loaded wastes no sample
        return sampler, encoded

    def _leave_out(self, failed: Mapping[ValidationPrompt, Exception]) -> None:
        """Sample only the prompts that can be encoded, and report the others once.

        Raises:
            WatchError: no prompt can be encoded.
        """
        for prompt, error in failed.items():
            reason = user_message(error) or f"{type(error).__name__}: {error}"
            text = shortened(" ".join(prompt.prompt.split()), 60)
            self.left_out.append(f"prompt {text!r} cannot be encoded, and is skipped for all checkpoints: {reason}")
            self.say(self.left_out[-1])
        presets = {
            name: replace(plan, prompts=[prompt for prompt in plan.prompts if prompt not in failed])
            for name, plan in self.plan.presets.items()
        }
        if not all(plan.prompts for plan in presets.values()):
            raise WatchError("no prompt can be encoded, so nothing can be sampled; the reasons are above")
        self.plan = replace(self.plan, presets=presets)
        self._clips.clear()

    def _score(self, name: str, samples: Sequence[Sample], checkpoint: Checkpoint, drawn: SampleResult) -> None:
        """Score the clips without scores, read from their files, and record all."""
        fault_point("watch.score")
        scores = self._scores[name]
        for sample in samples:
            file = drawn.clips.get(sample.key)
            if file is None or scores.has(checkpoint.manifest, sample.key):
                continue
            recorded = scores.of_clip(sample.key)
            clip_scores = {label: recorded[label] for label in scores.labels if label in recorded}
            if len(clip_scores) < len(scores.labels):
                clip_scores = self._score_clip(self.plan.presets[name].frame_rate, sample, file)
            scores.add(checkpoint, name, sample, file, clip_scores)

    def _means(self, name: str, samples: Sequence[Sample]) -> dict[str, float]:
        """Return mean scores of clips of a preset."""
        return self._scores[name].means(
            samples, trigger_pairs(self.plan.presets[name].prompts, self.plan.trigger_words)
        )

    def _load_rewards(self) -> RewardSet:
        if self._rewards is None:
            self._rewards = RewardSet(self.plan.rewards, on_error="mask")
        return self._rewards

    def _score_clip(self, fps: float, sample: Sample, file: Path) -> dict[str, float | None]:
        """Return the scores of a clip by all rewards, None for failed ones."""
        try:
            heads = self._load_rewards().score(_pixels(file), [str(sample.facts["prompt"])], fps=fps).heads
        except (RewardError, ValueError) as error:
            self.say(f"{file.name} is not scored: {error}")
            return dict.fromkeys(self.plan.labels)
        pairs = zip(self.plan.labels, (head.raw.item() for head in heads.values()), strict=True)
        return {label: value if math.isfinite(value) else None for label, value in pairs}

    def _update_page(self, name: str, best: Checkpoint | None) -> None:
        """Write sheet and page of the newest checkpoints and the best, and send those that the tracker lacks."""
        plan, scores, tracker = self.plan.presets[name], self._scores[name], self._tracker
        ledger, columns = SampleIndex(plan.output_dir), []
        for step, manifest, variant in scores.columns():
            samples = self._samples(name, variant)
            clips = {sample.key: file for sample in samples if (file := ledger.find(sample)) is not None}
            if not clips:  # it was sampled with other prompts
                continue
            means, is_best = self._means(name, samples), best is not None and manifest == best.manifest
            columns.append(Column(step, variant, clips, means, is_best))
            if tracker is not None:
                tracker.send(name, manifest, step, means, list(clips.values()))
        self._best_on_page[name] = best
        if columns:
            write_page(plan, name, columns, scores, self._problems[name], by=self.plan.options.best_by)

    def _best(self) -> Checkpoint | None:
        """Return the checkpoint with the highest mean score by `best_by`, or None without any.

        Only existing checkpoints that have all clips of all presets count.
        """
        label = self.plan.options.best_by
        if label is None:
            return None
        candidates: list[tuple[float, Checkpoint]] = []
        for listed in scan_checkpoints(self.plan.run, weights_only=True):
            checkpoint = self._read_checkpoint(listed) if listed.damage is None else None
            if checkpoint is not None and (values := self._values(checkpoint, label)):
                candidates.append((sum(values) / len(values), checkpoint))
        return max(candidates, key=lambda candidate: candidate[0], default=(0.0, None))[1]

    def _values(self, checkpoint: Checkpoint, label: str) -> list[float]:
        """Return the scores of all clips of a checkpoint, or none unless all clips of all presets have one."""
        all_values: list[float] = []
        for name, scores in self._scores.items():
            samples = self._recorded_samples(name, checkpoint)
            values = scores.values(samples, label)
            if label.endswith(TRIGGER_GAP):
                means = self._means(name, samples)
                values = [means[label]] * len(samples) if label in means else []
            if not samples or len(values) < len(samples):
                return []
            all_values += values
        return all_values

    def _mark_best(self) -> Checkpoint | None:
        """Point the link to the best checkpoint, and return it."""
        label, best = self.plan.options.best_by, self._best()
        if label is None or best is None or best_checkpoint(self.plan.run) == best.path:
            return best
        fault_point("watch.best")
        mark_best(best.path)
        means = [f"{name} {self._means(name, self._recorded_samples(name, best))[label]:.4g}" for name in self._scores]
        self.say(f"best by {label}: step {best.step} ({', '.join(means)})")
        return best


def _is_gone(checkpoint: Checkpoint) -> bool:
    return not (checkpoint.path / MANIFEST).is_file()


def _is_other(checkpoint: Checkpoint) -> bool:
    """Return whether the step was saved again since."""
    try:
        return file_sha256(checkpoint.path / MANIFEST) != checkpoint.manifest
    except OSError:
        return False


def _pixels(file: Path) -> torch.Tensor:
    """Return the frames of a clip `[1, T, 3, H, W]` in [0, 1]."""
    with av.open(str(file)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    return torch.from_numpy(frames).permute(0, 3, 1, 2)[None].float() / 255


def watch(plan: WatchPlan, say: Say) -> Sequence[str]:
    """Follow the checkpoints of a run, and return the problems when it ends by itself.

    Raises:
        ConfigError: another watch has one of the presets, or marks the best checkpoint.
    """
    with contextlib.ExitStack() as stack:
        parallel = stack.enter_context(contextlib.closing(join(plan.config)))
        for name, preset in plan.presets.items():
            otherwise = "set --output_dir" if len(plan.presets) == 1 else f"remove {name}"
            stack.enter_context(
                exclusive(preset.output_dir, parallel, where="--presets", holder="watch", otherwise=otherwise)
            )
            if plan.identity is not None:
                plan.identity.write(preset.output_dir / WATCHED)
        if plan.options.best_by is not None:  # a run has one link to its best checkpoint, wherever clips are written
            stack.enter_context(
                exclusive(
                    plan.run / "watch", parallel, where="--best_by", holder="watch with --best_by",
                    otherwise="remove --best_by here",
                )
            )  # fmt: skip
        server = Watch(plan, parallel, say)
        server.follow()
        return [*server.left_out, *server.failed.values()]
