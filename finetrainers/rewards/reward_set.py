"""All rewards of a run: raw and normalized scores of every head, or an error with the clip saved."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import av
import numpy as np
import torch
from torch import Tensor

from finetrainers.config.rewards import RewardEntry, labels_for_keys, options_text, reward_labels
from finetrainers.utils.failures import ExpectedError, InputError
from finetrainers.utils.faults import fault_point
from finetrainers.utils.phases import REWARD, phase
from finetrainers.utils.text import plural
from finetrainers.utils.video import slug, write_mp4

from .base import Head, Reward
from .calls import start_calls, to_scores
from .pixels import to_uint8
from .registry import make_reward, select_head
from .retries import Retries, RetriesExhausted

logger = logging.getLogger(__name__)

OnError = Literal["raise", "mask"]

#: Scores that are not usable: squares of their differences, as in deviations, overflow.
_TOO_LARGE = 1e100
#: Failures that concern no clip; trying the clips one by one would only take longer.
_NOT_OF_A_CLIP = (OSError, MemoryError, torch.cuda.OutOfMemoryError)


class RewardError(ExpectedError, RuntimeError):
    """Error of a reward that failed, or returned an invalid score."""

    is_resumable = True


@dataclass(frozen=True)
class HeadScores:
    """Scores of one entry: `[B]` fp64 on the CPU, NaN where it failed and is masked, or has no score.

    Attributes:
        raw: as the reward returns it.
        normalized: `(raw - mean) / std` with the entry's mean and std, else the reward's own.
    """

    raw: Tensor
    normalized: Tensor


@dataclass(frozen=True)
class Scores:
    """Scores of some clips by all rewards.

    Attributes:
        heads: by label, in the order of the entries; those not due in this rollout are absent.
        failed: clips on which a reward with a weight failed, `[B]`, which is masked, or for which none has a score.
    """

    heads: Mapping[str, HeadScores]
    failed: Tensor

    @staticmethod
    def in_order(numbered: Sequence[tuple[int, Scores]]) -> Scores:
        """Return the scores of several batches by the same rewards, sorted by the number of their first clip.

        A batch that several processes have scored counts once.
        """
        parts = [scores for _, scores in sorted(dict(numbered).items(), key=lambda pair: pair[0])]
        heads = {}
        for label in parts[0].heads:
            head_scores = [part.heads[label] for part in parts]
            heads[label] = HeadScores(
                torch.cat([h.raw for h in head_scores]), torch.cat([h.normalized for h in head_scores])
            )
        return Scores(heads, torch.cat([part.failed for part in parts]))

    def rows(self, rows: slice) -> Scores:
        """Return the scores of some of the clips."""
        heads = {label: HeadScores(scores.raw[rows], scores.normalized[rows]) for label, scores in self.heads.items()}
        return Scores(heads, self.failed[rows])


class RewardSet:
    """The rewards of a list of entries.

    A reward is made once for all entries with its name and options, and scores a clip once for all of its heads. An
    entry has a label: its name, or its name with its options where other entries of that name have other options.
    """

    def __init__(
        self, entries: Sequence[RewardEntry], *, on_error: OnError = "raise", failures: Path | None = None
    ) -> None:
        """Make the rewards, which loads their weights.

        Args:
            entries: requested rewards.
            on_error: reaction to an exception or a non-finite score: `raise` a RewardError, or `mask` the clip's score
                with NaN, count it and warn.
            failures: folder for the clip that an error is raised for.

        Raises:
            ValueError: an entry is wrong; see `registry.reward_problems`.
        """
        self.on_error, self.failures = on_error, failures
        self._entries = dict(zip(reward_labels(entries), entries, strict=True))
        labels_by_reward: dict[tuple[str, str], list[str]] = {}
        for label, entry in self._entries.items():
            labels_by_reward.setdefault((entry.reward, options_text(entry)), []).append(label)
        self._scorers = [
            _make_scorer(name, {label: self._entries[label] for label in labels})
            for name, labels in zip(labels_for_keys(list(labels_by_reward)), labels_by_reward.values(), strict=True)
        ]

    @property
    def weights(self) -> dict[str, float]:
        """Shares in the advantage, by label, in the order of the entries."""
        return {label: entry.weight for label, entry in self._entries.items()}

    @property
    def compares_clips(self) -> bool:
        """Whether a reward compares the clips of a prompt, so that `score` needs all of them."""
        return any(scorer.reward.scope == "group" for scorer in self._scorers)

    def due(self, rollout: int) -> list[str]:
        """Return labels of the entries that are scored in a rollout, counted from 0."""
        return [label for label, entry in self._entries.items() if rollout % entry.every == 0]

    @phase(REWARD)
    def score(
        self, videos: Tensor, prompts: Sequence[str], *, fps: float, rollout: int = 0, first_clip: int = 0,
        images: Tensor | None = None, columns: Sequence[Mapping[str, Any]] = (), group: int = 1,
    ) -> Scores:  # fmt: skip
        """Score clips with every reward that is due.

        Args:
            videos: `[B, T, 3, H, W]`, floating point in [0, 1], on any device.
            prompts: one a clip.
            fps: frame rate at which the clips play.
            rollout: number of the rollout, counted from 0.
            first_clip: number of the first of these clips within the rollout, for messages and file names.
            images: that clips start from, `[B, 3, H, W]` in [0, 1], or None for text alone.
            columns: further columns of each clip's prompt, the same for all prompts.
            group: clips of a prompt. They follow each other, and numbers of clips are counted from that of a prompt.

        Raises:
            ValueError: the clips are not such a tensor, or the number of prompts differs.
            RewardError: a reward failed or returned a non-finite score, which is not masked; or it returned something
                other than a score a clip, or requires images and there are none.
        """
        return self.compute(
            videos, prompts, fps=fps, rollout=rollout, first_clip=first_clip, images=images, columns=columns,
            group=group,
        )  # fmt: skip

    def compute(
        self, videos: Tensor, prompts: Sequence[str], *, fps: float, rollout: int = 0, first_clip: int = 0,
        images: Tensor | None = None, columns: Sequence[Mapping[str, Any]] = (), group: int = 1,
    ) -> Scores:  # fmt: skip
        """Score clips as `score` does, but outside of the main thread, where phases cannot be distinguished."""
        pixels = _checked_pixels(videos, prompts, fps, first_clip)
        return self._score(_Clips(pixels, prompts, fps, rollout, first_clip, images, columns, group))[0]

    @phase(REWARD)
    def differentiate(
        self, videos: Tensor, prompts: Sequence[str], *, fps: float, rollout: int = 0, first_clip: int = 0,
        images: Tensor | None = None, columns: Sequence[Mapping[str, Any]] = (), group: int = 1,
    ) -> tuple[Scores, Tensor]:  # fmt: skip
        """Return scores, and the weighted sum of normalized scores with its graph, `[B]` fp64 on the CPU.

        A clip without a score, whose failure is masked, has a sum of 0. Rewards of weight 0 are scored as `score` does.

        Args:
            videos: as in `score`, with a graph.
            prompts, fps, rollout, first_clip, images, columns, group: as in `score`.

        Raises:
            ValueError, RewardError: as in `score`.
        """
        pixels = _checked_pixels(videos, prompts, fps, first_clip)
        return self._score(_Clips(pixels, prompts, fps, rollout, first_clip, images, columns, group, graph=videos))

    def _score(self, clips: _Clips) -> tuple[Scores, Tensor]:
        """Return the scores of all rewards that are due, and their weighted sum.

        The sum has the graph of the clips, if they have one.
        """
        due, prompts = self.due(clips.rollout), clips.prompts
        heads: dict[str, HeadScores] = {}
        total = torch.zeros(len(prompts), dtype=torch.float64)
        failed = torch.zeros(len(prompts), dtype=torch.bool)
        absent = torch.ones(len(prompts), dtype=torch.bool)  # from all rewards with a weight
        started = [self._start(scorer, clips, due) for scorer in self._scorers]  # async rewards work meanwhile
        for batches in filter(None, started):
            rows = torch.cat([self._finish(batches.scorer, batches.heads, *batch) for batch in batches], dim=2)
            for (label, (name, scale)), raw, is_absent in zip(batches.heads.items(), rows[0], rows[1], strict=True):
                without = is_absent.detach().bool()
                is_failed = ~(raw.detach().abs() < _TOO_LARGE) & ~without  # NaN also is
                failed_rows = is_failed.nonzero().flatten().tolist()
                if failed_rows:
                    first = clips.part(failed_rows[0], failed_rows[0] + 1)
                    if self.on_error == "raise":
                        score = float(raw[failed_rows[0]].detach())
                        self._raise(batches.scorer, f"returned {score} as {name!r} of", first)
                    logger.warning(
                        "reward %s: no score for %s of %d in rollout %d; first: %s",
                        label, plural(len(failed_rows), "clip"), len(raw), clips.rollout, first,
                    )  # fmt: skip
                raw_scores = raw.detach().masked_fill(is_failed | without, math.nan)
                heads[label] = HeadScores(raw_scores, scale.normalize(raw_scores))
                if self._entries[label].weight:
                    failed |= is_failed
                    absent &= without
                    total = total + (self._entries[label].weight * scale.normalize(raw)).masked_fill(without, 0.0)
        if any(self._entries[label].weight for label in heads):
            failed |= absent
        return Scores(heads={label: heads[label] for label in due}, failed=failed), total.masked_fill(failed, 0.0)

    def _start(self, scorer: _Scorer, clips: _Clips, due: Sequence[str]) -> _Batches | None:
        """Start scoring clips by a reward, or return None if none of its entries is due."""
        heads = {label: head for label, head in scorer.heads.items() if label in due}
        if not heads:
            return None
        weighted = any(self._entries[label].weight for label in heads)
        parts = scorer.split(clips if weighted else clips.without_graph())
        return _Batches(scorer, heads, parts, scorer.start(parts, [name for name, _ in heads.values()]))

    def _finish(
        self, scorer: _Scorer, heads: Mapping[str, tuple[str, Head]], clips: _Clips, outcome: Tensor | Exception
    ) -> Tensor:
        """Return raw scores of a batch, NaN after a masked exception, and marks of missing ones, `[2, heads, b]`."""
        if isinstance(outcome, Tensor):
            return outcome
        if isinstance(outcome, RewardError) or not isinstance(outcome, Exception):
            raise outcome  # a mistake in the reward, whatever the clip, is not masked
        if len(clips) == 1 or scorer.reward.scope == "group" or isinstance(outcome, _NOT_OF_A_CLIP):
            if self.on_error == "raise":
                self._raise(scorer, "failed on", clips, outcome)
            logger.warning("reward %s failed on %s: %s", scorer.label, clips, _describe(outcome))
            scores = torch.full((2, len(heads), len(clips)), math.nan, dtype=torch.float64)
            scores[1] = 0.0
            return scores
        # A clip's score does not depend on the others of its batch, so trying them one by one finds the failing clip.
        logger.warning(
            "reward %s failed on %s as a batch; scoring them one by one: %s", scorer.label, clips, _describe(outcome)
        )
        parts = clips.split(1)
        outcomes = scorer.start(parts, [name for name, _ in heads.values()])
        return torch.cat([self._finish(scorer, heads, *pair) for pair in zip(parts, outcomes, strict=True)], dim=2)

    def _raise(self, scorer: _Scorer, action: str, clips: _Clips, error: Exception | None = None) -> NoReturn:
        """Raise an error about one clip, which is saved, or about a batch with an unknown failing clip.

        A clip is not blamed for a server that is gone, or a file that cannot be read.
        """
        if isinstance(error, OSError):
            cause = str(error) if isinstance(error, RetriesExhausted) else _describe(error)
            message = f"reward {scorer.label} failed in rollout {clips.rollout}, whatever the clip: {cause}"
            raise RewardError(f"{message}. Clips of this rollout are lost; resume the run when it works") from error
        message = f"reward {scorer.label} {action} {clips}" + (f": {_describe(error)}" if error is not None else "")
        is_found = len(clips) == 1 and not isinstance(error, _NOT_OF_A_CLIP)
        note = clips.save(self.failures, scorer.label) if is_found and self.failures is not None else ""
        raise RewardError(message + note) from error


# ---- scorers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scorer:
    """A reward with its options, and the head and normalization of each entry, by label."""

    label: str
    reward: Reward
    batch_size: int
    heads: Mapping[str, tuple[str, Head]]
    retries: Retries

    def split(self, clips: _Clips) -> list[_Clips]:
        """Return clips in batches; those of a prompt, all of them, for a reward that compares them.

        Raises:
            RewardError: the reward compares clips, and a prompt has one, or not all of them are there.
        """
        if self.reward.scope == "clip":
            return clips.split(self.batch_size)
        if clips.group == 1 or clips.first % clips.group or len(clips) % clips.group:
            raise RewardError(
                f"reward {self.label} compares all clips of a prompt, {clips.group} each; cannot score {clips}"
            )
        return clips.split(clips.group)

    def start(self, parts: Sequence[_Clips], heads: Sequence[str]) -> Iterator[Any]:
        """Return an iterator over the scores and marks of missing ones `[2, heads, b]` fp64 of each part, or its error.

        Scores may not be finite, and have a graph if the clips have one. An error is a RewardError if the reward
        returns something else.
        """
        outcomes = start_calls(
            [partial(self._call, part) for part in parts], asynchronous=self.reward.asynchronous, retries=self.retries
        )

        def read(part: _Clips, outputs: Any) -> Tensor | Exception:
            try:
                return outputs if isinstance(outputs, Exception) else self._read(part, outputs, heads)
            except RewardError as error:
                return error

        return map(read, parts, outcomes)

    def _call(self, clips: _Clips) -> Any:
        """Return the reward's outputs, or an awaitable that returns them.

        The reward gets copies of pixels and columns, so that no change to them reaches other rewards or rollouts.
        """
        images = self._images(clips, clips.tensor.device)
        try:
            columns = deepcopy(self.reward.columns.select(clips.columns))
        except KeyError as error:
            raise RewardError(f"reward {self.label} requires the column {error} of the prompts") from None
        with torch.set_grad_enabled(clips.graph is not None):
            compute = self.reward.score if clips.graph is None else self.reward.differentiate
            return compute(clips.tensor.clone(), list(clips.prompts), fps=clips.fps, **images, **columns)

    def _read(self, clips: _Clips, outputs: Any, heads: Sequence[str]) -> Tensor:
        pairs = [self._row(outputs, head, len(clips)) for head in heads]
        rows = [scores for scores, _ in pairs]
        fault_point("reward", rows)
        return torch.stack([torch.stack(rows), torch.stack([absent for _, absent in pairs]).double()])

    def _images(self, clips: _Clips, device: torch.device) -> dict[str, Tensor | None]:
        """Return the keyword with images for a reward, if it takes them."""
        if self.reward.images == "none":
            return {}
        if self.reward.images == "required" and clips.images is None:
            raise RewardError(
                f"reward {self.label} requires the image that clips start from, and these start from text"
            )
        return {"images": None if clips.images is None else clips.images.to(device, copy=True)}

    def _row(self, outputs: object, head: str, count: int) -> tuple[Tensor, Tensor]:
        values = outputs.get(head) if isinstance(outputs, Mapping) else None
        scores = to_scores(values, count)
        if scores is not None:
            return scores
        if isinstance(outputs, Mapping) and head in outputs:
            description = "a tensor" if isinstance(values, Tensor) else type(values).__name__
            if isinstance(values, Tensor | np.ndarray):
                description += f" {list(values.shape)}"
            elif isinstance(values, list):
                description += f" of {len(values)}"
            action = f"returned {description} as {head!r}"
        else:
            action = (
                f"returned no {head!r} but "
                f"{(list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__)}"
            )
        raise RewardError(
            f"reward {self.label} {action} of {plural(count, 'clip')}; expected one number or None per clip, as a "
            f"tensor [{count}], an array or a list"
        )


@dataclass(frozen=True)
class _Batches:
    """Batches of clips that a reward scores, each with its scores or the error."""

    scorer: _Scorer
    heads: Mapping[str, tuple[str, Head]]
    parts: Sequence[_Clips]
    outcomes: Iterator[Any]

    def __iter__(self) -> Iterator[tuple[_Clips, Any]]:
        return zip(self.parts, self.outcomes, strict=True)


def _make_scorer(name: str, entries: Mapping[str, RewardEntry]) -> _Scorer:
    first = next(iter(entries.values()))
    reward = make_reward(first.reward, first.options)
    heads = {}
    for label, entry in entries.items():
        head = select_head(entry, reward.heads)
        default = reward.heads[head]
        scale = Head(
            default.mean if entry.mean is None else entry.mean, default.std if entry.std is None else entry.std
        )
        heads[label] = (head, scale)
    sizes = [entry.batch_size for entry in entries.values() if entry.batch_size is not None]
    retries = Retries(f"reward {name}", seconds=reward.patience)
    return _Scorer(name, reward, min(sizes, default=reward.batch_size), heads, retries)


@dataclass(frozen=True)
class _Clips:
    """Clips to score, starting at the rollout's clip number `first`; their numbers as a string.

    `graph` are their pixels on the device with a graph, if gradients are needed.
    """

    pixels: Tensor
    prompts: Sequence[str]
    fps: float
    rollout: int
    first: int
    images: Tensor | None = None
    columns: Sequence[Mapping[str, Any]] = ()
    group: int = 1
    graph: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The clips as rewards get them."""
        return self.pixels if self.graph is None else self.graph

    def __len__(self) -> int:
        return len(self.prompts)

    def __str__(self) -> str:
        if len(self) == 1:
            return f"clip {self.first} of rollout {self.rollout}, prompt {self.prompts[0]!r}"
        return f"clips {self.first} to {self.first + len(self) - 1} of rollout {self.rollout}"

    def part(self, start: int, stop: int) -> _Clips:
        """Return some of the clips."""
        graph = None if self.graph is None else self.graph[start:stop]
        return replace(
            self,
            pixels=self.pixels[start:stop],
            prompts=self.prompts[start:stop],
            first=self.first + start,
            images=None if self.images is None else self.images[start:stop],
            columns=self.columns[start:stop],
            graph=graph,
        )

    def without_graph(self) -> _Clips:
        """Return the clips without the graph."""
        return replace(self, graph=None)

    def split(self, size: int) -> list[_Clips]:
        """Return all clips in parts of `size`."""
        return [self.part(start, start + size) for start in range(0, len(self), size)]

    def save(self, folder: Path, label: str) -> str:
        """Save the only clip, and return a phrase about it. A clip that cannot be saved must not hide the error."""
        path = folder / f"rollout-{self.rollout:06d}-clip-{self.first:04d}-{slug(label)}.mp4"
        try:
            write_mp4(path, to_uint8(self.pixels[0]).numpy(), fps=self.fps)
        except (OSError, ValueError, av.FFmpegError) as problem:
            return f" (saving the clip failed: {_describe(problem)})"
        return f" (the clip is {path})"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _checked_pixels(videos: Tensor, prompts: Sequence[str], fps: float, first_clip: int) -> Tensor:
    """Check clips, and convert them to fp32 on the CPU.

    Raises:
        ValueError: they do not fit `RewardSet.score`.
    """
    if videos.ndim != 5 or videos.shape[2] != 3 or 0 in videos.shape:
        hint = "; the channels come third" if videos.ndim == 5 and 3 in (videos.shape[1], videos.shape[4]) else ""
        raise ValueError(f"clips to score must be [B, T, 3, H, W], got {list(videos.shape)}{hint}")
    if not videos.is_floating_point():
        raise ValueError(f"clips to score must be floating point in [0, 1], got {videos.dtype}")
    if isinstance(prompts, str) or len(prompts) != len(videos):
        message = f"{plural(len(videos), 'clip')} to score, but {plural(len(prompts), 'prompt')}"
        raise InputError(message, "mismatch")
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps must be above 0 for clips to score, got {fps}")
    clips = videos.detach().to("cpu", torch.float32)
    low, high = clips.flatten(1).aminmax(dim=1)
    # NaN is neither below 0 nor above 1, but it is not between them either.
    for index in (~((low >= 0) & (high <= 1))).nonzero().flatten().tolist():
        value_range = f"{float(low[index]):.4g} to {float(high[index]):.4g}"
        broken = not (math.isfinite(low[index]) and math.isfinite(high[index]))
        hint = "; the model that generated it has diverged" if broken else "; clamp decoded clips to it"
        raise ValueError(
            f"clip {first_clip + index}, prompt {prompts[index]!r}: values {value_range} are not in [0, 1]{hint}"
        )
    return clips
