"""Follow the checkpoints of a run: sample, score, send and compare each one once, in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import av
import numpy as np
import torch

from finetrainers.models.spec import ModelSpec
from finetrainers.parallel.strategy import Strategy
from finetrainers.rewards.reward_set import RewardError, RewardSet
from finetrainers.utils.failures import sentence_of
from finetrainers.utils.faults import fault_point
from finetrainers.utils.files import file_sha256
from finetrainers.utils.text import plural

from ..checkpoints.best import best_checkpoint, mark_best
from ..checkpoints.find import Found, scan_checkpoints
from ..checkpoints.manifest import MANIFEST
from ..init_distributed import join
from ..lock import exclusive
from ..sample.ledger import Ledger
from ..sample.memory import offloads
from ..sample.plan import Sample, SamplePlan
from ..sample.run import Drawn, check_weights, draw_missing, show
from ..sample.sampler import Sampler
from ..sample.weights import find_target
from ..sampling import EncodedPrompts
from .plan import WatchPlan
from .scores import Checkpoint, Scores, variant_of
from .tracked import WatchTracker

logger = logging.getLogger(__name__)

#: The newest checkpoints that sheet and page show, besides the best.
_COLUMNS = 8

Say = Callable[[str], None]


@dataclass
class Watch:
    """A watch at work.

    Attributes:
        plan: what is done with each checkpoint.
        parallel: this process, and its device.
        say: tells the user a line.
        failed: what went wrong, by preset and manifest; not tried again by this process.
    """

    plan: WatchPlan
    parallel: Strategy
    say: Say
    failed: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        self._scores = {name: Scores(one.output_dir, plan.labels) for name, one in plan.presets.items()}
        self._trackers = {
            name: WatchTracker(plan.run, name, one.output_dir, plan.config) for name, one in plan.presets.items()
        } if not plan.options.no_track else {}  # fmt: skip
        self._said: dict[int, str] = {}  # what a checkpoint waits for, by step
        self._sampler: Sampler | None = None
        self._encoded: EncodedPrompts | None = None
        self._rewards: RewardSet | None = None

    def follow(self) -> None:
        """Look for checkpoints until the process is stopped, or once."""
        while True:
            worked = self.look()
            if self.plan.options.once:
                break
            if not worked:
                time.sleep(self.plan.options.poll_seconds)
        self.finish()

    def look(self) -> bool:
        """Serve every checkpoint that is whole, the oldest first; whether there was anything to do."""
        worked = False
        for found in scan_checkpoints(self.plan.run, weights_only=True):
            for name in self.plan.presets:
                checkpoint = self._content(found)
                if checkpoint is not None and not self._is_done(name, checkpoint):
                    worked |= self._serve(name, found, checkpoint)
        if self.plan.options.best_by is not None:
            self._mark_best(self.plan.options.best_by)
        return worked

    def finish(self) -> None:
        """End the runs at trackers."""
        for tracker in self._trackers.values():
            tracker.finish()

    def _content(self, found: Found) -> Checkpoint | None:
        """What a checkpoint has; None for one that has not arrived as a whole, which is told once."""
        if found.path.name.startswith("."):  # it is being replaced
            return None
        if found.damage is not None:
            self._waits(found.step, found.damage)
            return None
        with contextlib.suppress(OSError):
            return Checkpoint(found.step, found.path, file_sha256(found.path / MANIFEST))
        return None

    def _waits(self, step: int, why: str) -> None:
        if self._said.get(step) != why:
            self._said[step] = why
            self.say(f"step {step} is not whole yet: {why}")

    def _is_done(self, name: str, checkpoint: Checkpoint) -> bool:
        plan, tracker = self.plan.presets[name], self._trackers.get(name)
        if (name, checkpoint.manifest) in self.failed:
            return True
        is_scored = self._scores[name].count(checkpoint) >= len(plan.prompts) * len(plan.seeds)
        return is_scored and (tracker is None or tracker.has(checkpoint.manifest))

    def _serve(self, name: str, found: Found, checkpoint: Checkpoint) -> bool:
        """Sample and score a checkpoint; False if it has not arrived as a whole. An error is the checkpoint's own."""
        begun = time.monotonic()
        try:
            target = find_target(str(found.path), use_ema=not self.plan.options.no_ema)  # reads every byte
        except (OSError, ValueError) as error:
            self._waits(found.step, str(error))
            return False
        variant = variant_of(found.step, target.weights)
        plan = replace(self.plan.presets[name], given=[str(self.plan.run)], variants=[variant])
        try:
            drawn = self._draw(plan)
        except Exception as error:
            if self._sampler is not None:
                self._sampler.free()
            self._went_wrong(name, checkpoint, error)
            return True
        if _is_gone(checkpoint) and drawn.new:
            self.say(f"step {found.step} was removed while it was sampled; its clips stay")
        elif _is_other(checkpoint):  # which of the two the clips show, nobody knows
            _forget(plan, drawn)
            return True
        if drawn.problems:
            self.failed[name, checkpoint.manifest] = "; ".join(drawn.problems.values())
        self._score(name, plan, checkpoint, drawn)
        means = self._scores[name].means(checkpoint.manifest)
        self._show(name, drawn)
        told = "".join(f", {label} {value:.4g}" for label, value in means.items())
        self.say(
            f"step {found.step}, {name}: {plural(len(drawn.clips), 'clip')}{told} ({time.monotonic() - begun:.0f} s)"
        )
        for problem in drawn.problems.values():
            self.say(f"not sampled: {problem}")
        return True

    def _went_wrong(self, name: str, checkpoint: Checkpoint, error: Exception) -> None:
        """Tell why a checkpoint could not be sampled.

        Raises:
            Exception: the disk is full, say, which no other checkpoint changes.
        """
        if _is_gone(checkpoint) or _is_other(checkpoint):
            self.say(f"step {checkpoint.step} was removed while it was sampled")
            return
        sentence = sentence_of(error)
        if sentence is not None and isinstance(error, OSError):
            raise error
        said = sentence or f"{type(error).__name__}: {error}"
        self.failed[name, checkpoint.manifest] = said
        self.say(f"step {checkpoint.step}, {name}: not sampled: {said}")
        logger.debug("step %d", checkpoint.step, exc_info=error)

    def _draw(self, plan: SamplePlan) -> Drawn:
        check_weights(plan)
        if all(Ledger(plan.output_dir).find(sample) is not None for sample in plan.samples()):
            return draw_missing(plan, self.parallel)
        if self._sampler is None:
            self._sampler, self._encoded = self._ready()
        return draw_missing(plan, self.parallel, sampler=self._sampler, encoded=self._encoded)

    def _ready(self) -> tuple[Sampler, EncodedPrompts]:
        """The sampler, and the prompts of all presets, which are encoded once."""
        largest = max(self.plan.presets.values(), key=lambda one: max(map(math.prod, one.sizes)))
        spec: ModelSpec = largest.family.load(largest.config.model)
        offload, note = offloads(largest, spec, device=self.parallel.device)
        if note:
            self.say(note)
        sampler = Sampler(self.plan.config, largest.family, self.parallel, offload=offload)
        prompts = list(dict.fromkeys(prompt for one in self.plan.presets.values() for prompt in one.prompts))
        return sampler, sampler.encode(prompts, negative=self.plan.options.negative_prompt)

    def _score(self, name: str, plan: SamplePlan, checkpoint: Checkpoint, drawn: Drawn) -> None:
        """Score the clips that have no scores yet, as their files show them, and record all."""
        fault_point("watch.score")
        scores = self._scores[name]
        done: set[str] = set()
        for sample in plan.samples():
            if sample.key not in drawn.clips or sample.key in done:
                continue
            done.add(sample.key)
            known = scores.of_clip(sample.key)
            found = {label: known[label] for label in scores.labels if label in known}
            if len(found) < len(scores.labels):
                found = self._scores_of(plan, sample, drawn.clips[sample.key])
            scores.add(checkpoint, name, sample, drawn.clips[sample.key], found)

    def _scores_of(self, plan: SamplePlan, sample: Sample, file: Path) -> dict[str, float | None]:
        """The scores of a clip by all rewards; None for those that failed."""
        if self._rewards is None:
            self._rewards = RewardSet(self.plan.rewards, on_error="mask")
        prompt = str(sample.facts["prompt"])
        try:
            heads = self._rewards.score(_pixels(file), [prompt], fps=plan.frame_rate).heads
        except (RewardError, ValueError) as error:
            self.say(f"{file.name} is not scored: {error}")
            return dict.fromkeys(self.plan.labels)
        values = [head.raw.item() for head in heads.values()]
        pairs = zip(self.plan.labels, values, strict=True)
        return {label: value if math.isfinite(value) else None for label, value in pairs}

    def _show(self, name: str, drawn: Drawn) -> None:
        """Write sheet and page of the newest checkpoints, and send those of this one."""
        base, scores = self.plan.presets[name], self._scores[name]
        columns = scores.columns(base)
        best = self._best(self.plan.options.best_by) if self.plan.options.best_by else None
        shown = [s for s in columns if s in list(columns)[-_COLUMNS:] or (best is not None and s == best.step)]
        variants = []
        for step in shown:
            manifest, variant = columns[step]
            is_best = best is not None and manifest == best.manifest
            variants.append(replace(variant, label=f"{variant.label}, best") if is_best else variant)
        plan = replace(base, given=[str(self.plan.run)], variants=variants)
        ledger, told = Ledger(base.output_dir), {}
        clips = {sample.key: file for sample in plan.samples() if (file := ledger.find(sample)) is not None}
        for sample in plan.samples():
            told[sample.key] = {k: "failed" if v is None else f"{v:.4g}" for k, v in scores.of_clip(sample.key).items()}
        facts = [("preset", name)]
        for label in scores.labels:
            means = {step: scores.means(columns[step][0]).get(label) for step in columns}
            line = ", ".join(f"step {step}: {value:.4g}" for step, value in means.items() if value is not None)
            facts.append((f"mean {label}", line))
        show(plan, Drawn(clips, 0, drawn.problems), facts=facts, told=told)
        for step, (manifest, variant) in columns.items():
            tracker = self._trackers.get(name)
            if tracker is not None and not tracker.has(manifest):
                mine = replace(base, variants=[variant]).samples()
                videos = [file for one in mine if (file := ledger.find(one)) is not None]
                tracker.send(manifest, step, scores.means(manifest), list(dict.fromkeys(videos)))

    def _best(self, label: str) -> Checkpoint | None:
        """Of the checkpoints that still exist and have all clips of all presets, the one with the highest mean score."""
        found: list[tuple[float, Checkpoint]] = []
        for one in scan_checkpoints(self.plan.run, weights_only=True):
            checkpoint = self._content(one) if one.damage is None else None
            if checkpoint is None or not all(self._is_whole(name, checkpoint, label) for name in self.plan.presets):
                continue
            values = [v for scores in self._scores.values() for v in scores.values(checkpoint.manifest, label)]
            found.append((sum(values) / len(values), checkpoint))
        return max(found, key=lambda one: one[0], default=(0.0, None))[1]

    def _is_whole(self, name: str, checkpoint: Checkpoint, label: str) -> bool:
        plan = self.plan.presets[name]
        needed = len({(prompt, seed) for prompt in plan.prompts for seed in plan.seeds})
        return len(self._scores[name].values(checkpoint.manifest, label)) == needed

    def _mark_best(self, label: str) -> None:
        best = self._best(label)
        if best is None or best_checkpoint(self.plan.run) == best.path:
            return
        fault_point("watch.best")
        mark_best(best.path)
        means = [scores.means(best.manifest)[label] for scores in self._scores.values()]
        self.say(f"best by {label}: step {best.step} ({', '.join(f'{mean:.4g}' for mean in means)})")


def _is_gone(checkpoint: Checkpoint) -> bool:
    return not (checkpoint.path / MANIFEST).is_file()


def _is_other(checkpoint: Checkpoint) -> bool:
    """Whether the step was saved again since."""
    try:
        return file_sha256(checkpoint.path / MANIFEST) != checkpoint.manifest
    except OSError:
        return False


def _forget(plan: SamplePlan, drawn: Drawn) -> None:
    """Remove clips, which the ledger then counts as missing."""
    for sample in plan.samples():
        if sample.key in drawn.clips:
            drawn.clips[sample.key].unlink(missing_ok=True)


def _pixels(file: Path) -> torch.Tensor:
    """The frames of a clip `[1, T, 3, H, W]` in [0, 1]."""
    with av.open(str(file)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    return torch.from_numpy(frames).permute(0, 3, 1, 2)[None].float() / 255


def watch(plan: WatchPlan, say: Say) -> Sequence[str]:
    """Follow the checkpoints of a run; what went wrong, if it is to end by itself.

    Raises:
        ConfigError: another watch has one of the presets, or marks the best checkpoint.
    """
    with contextlib.ExitStack() as held:
        parallel = held.enter_context(contextlib.closing(join(plan.config)))
        for folder in _folders(plan):
            held.enter_context(exclusive(folder, parallel))
        one = Watch(plan, parallel, say)
        one.follow()
        return list(one.failed.values())


def _folders(plan: WatchPlan) -> Iterator[Path]:
    """What nobody else may use: a second watch may have other presets, but not mark the best checkpoint, too."""
    yield from (one.output_dir for one in plan.presets.values())
    if plan.options.best_by is not None:
        yield plan.output_dir
