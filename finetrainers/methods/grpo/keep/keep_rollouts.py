"""The best and the worst clips of some rollouts with their scores, for users, for trackers, and as preference pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetrainers.config.root import TrainConfig
from finetrainers.rewards.reward_set import Scores
from finetrainers.utils.files import write_json_atomic, write_json_lines_atomic
from finetrainers.utils.reading import read_jsonl
from finetrainers.utils.video import slug, write_mp4

from ..advantage import Advantages
from ..prompts.plan import image_record
from ..prompts.prompts import RolloutSample

_EVERY = 10  # every tenth rollout and the last one, by default
_ROLLOUTS = 32  # most of these, but for the last one
#: Bytes of the best and the worst clips of a rollout, where no further clips of it are requested.
MAX_BYTES = 4 * 2**20
_CLIPS = "clips.jsonl"


class RolloutKeeper:
    """A writer of some rollouts' clips to `step-N/`, N being a rollout's first optimizer step.

    The first prompt gets `best.mp4` and `worst.mp4`, with several rewards also `best-REWARD.mp4` and
    `worst-REWARD.mp4`, unless that clip has been written; `scores.json` lists these. With `keep_rollouts`, further
    clips of all prompts are written as `prompt-P-rank-R.mp4`, 1 being the greatest advantage. `clips.jsonl` has a line
    for every clip, and `pairs.jsonl` above all directories lists the preference pairs among them.

    Clips are compared with those of their prompt alone: they often start from equal noise, and so do advantages. The
    only clip of a prompt is its best one, and has no advantage.
    """

    def __init__(self, config: TrainConfig, parallel: Any, *, fps: float) -> None:
        """Args:
        config: the run, with the number of clips and how often they are written.
        parallel: the processes of the run.
        fps: frame rate of the clips.
        """
        section = config.grpo
        interval, self.count = section.keep_rollouts_every, section.keep_rollouts
        self.folder = config.run.output_dir / "rollouts"
        self.updates = section.updates_per_rollout
        rollouts = -(-(config.training.train_steps or 0) // self.updates)
        self.every = max(_EVERY, -(-rollouts // _ROLLOUTS)) if interval is None else interval
        self._last = rollouts - 1
        self.same_noise = section.init_same_noise
        self.seed = config.training.seed
        self.parallel = parallel
        self.fps = fps
        self._lists_pairs = self.every > 0  # again after a resume: clips of later steps have been set aside

    def wants(self, job: RolloutSample) -> bool:
        """Return whether a clip may be written."""
        return self._is_due(job.rollout) and (job.slot == 0 or self.count > 0)

    def _is_due(self, rollout: int) -> bool:
        """Return whether clips of a rollout are written."""
        return self.every > 0 and (rollout % self.every == 0 or rollout == self._last)

    def keep(
        self, jobs: Sequence[RolloutSample], videos: Mapping[int, Tensor], scores: Scores, advantages: Advantages
    ) -> None:
        """Write the clips of a rollout, if it is due; all ranks call it.

        Args:
            jobs: this rank's clips.
            videos: pixels by index of clips that may be written and that this process has decoded, `[T, H, W, C]` uint8
                on the host.
            scores: scores of all ranks' clips.
            advantages: advantages of all ranks' clips.
        """
        rollout = jobs[0].rollout
        is_due = self._is_due(rollout)
        if not is_due and not self._lists_pairs:
            return
        error: Exception | None = None
        rows: list[dict[str, Any]] = []
        step = rollout * self.updates + 1
        folder = self.folder / f"step-{step:06d}"
        try:
            if is_due:
                rows = self._write(folder, jobs, videos, scores, advantages)
        except Exception as caught:
            error = caught
        self.parallel.raise_if_any_failed(error, "writing clips of a rollout")
        everything = sorted(self.parallel.gather_objects(rows), key=lambda row: (row["slot"], row["clip"]))
        if self.parallel.rank == 0:
            if is_due:
                write_json_lines_atomic(folder / _CLIPS, everything)
            self._list_pairs(step)
        self._lists_pairs = False

    def _write(
        self,
        folder: Path,
        jobs: Sequence[RolloutSample],
        videos: Mapping[int, Tensor],
        scores: Scores,
        advantages: Advantages,
    ) -> list[dict[str, Any]]:
        """Write this rank's clips, and on rank 0 `scores.json`; return a row of `clips.jsonl` for each clip."""
        start, size = self.parallel.data_rank * len(jobs), advantages.values.shape[1]
        names, details = _name_first_prompt_clips(scores, advantages)
        named = {place for _, place in names}
        for slot, ranking in enumerate(map(_ranked, advantages.values, advantages.failed)):
            for rank in _select_ranks(len(ranking), self.count):
                place = slot * size + ranking[rank]
                if place not in named:
                    names["", place] = f"prompt-{slot:02d}-rank-{rank + 1:02d}.mp4"
        rows: dict[int, dict[str, Any]] = {}
        for (kind, place), name in names.items():
            index = place - start
            if index not in videos:
                continue
            job, numbers = jobs[index], _numbers(place, scores, advantages)
            comment = _comment(job, kind, name, numbers, size)
            limit = None if self.count else MAX_BYTES // len(names)  # pairs of requested clips are trained on
            write_mp4(folder / name, videos[index].numpy(), fps=self.fps, comment=comment, max_bytes=limit)
            rows.setdefault(place, self._row(job, numbers, name))
        if self.parallel.rank == 0:
            overview = {
                "rollout": jobs[0].rollout,
                "prompt": jobs[0].prompt.text,
                **image_record(jobs[0].prompt),
                **details.pop(""),
            }
            write_json_atomic(folder / "scores.json", {**overview, "heads": details} if details else overview)
        return [rows[place] for place in sorted(rows)]

    def _row(self, job: RolloutSample, numbers: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {
            "rollout": job.rollout,
            "step": job.rollout * self.updates + 1,
            "slot": job.slot,
            "prompt": job.prompt.text,
            **image_record(job.prompt),
            "clip": job.generation,
            "seed": job.noise_seed(self.seed, "start", per_group=self.same_noise),
            **{key: numbers[key] for key in ("reward", "advantage") if key in numbers},
            "video": name,
        }

    def _list_pairs(self, step: int) -> None:
        """Write `pairs.jsonl` of all rollouts up to a step.

        It pairs each prompt's best clip with its worst, the second best with the second worst, and so on. Directories
        of later steps are of an earlier run in this directory.
        """
        pairs = []
        paths = sorted(self.folder.glob(f"step-*/{_CLIPS}"))
        for path in (path for path in paths if int(path.parent.name.removeprefix("step-")) <= step):
            groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
            for row in read_jsonl(path)[0]:
                groups[row["slot"]].append(row)
            pairs += [pair for _, rows in sorted(groups.items()) for pair in _pairs(rows, path.parent.name)]
        if pairs or (self.folder / "pairs.jsonl").is_file():
            write_json_lines_atomic(self.folder / "pairs.jsonl", pairs)


def _pairs(rows: Sequence[Mapping[str, Any]], folder: str) -> Iterator[dict[str, Any]]:
    """Yield the preference pairs among the clips of a prompt; equally good clips form none."""
    if len(rows) == 1:
        return
    ordered = sorted(rows, key=lambda row: -row["advantage"])
    for chosen, rejected in zip(ordered[: len(ordered) // 2], reversed(ordered), strict=False):
        if chosen["advantage"] > rejected["advantage"]:
            names = {kind: f"{folder}/{row['video']}" for kind, row in (("chosen", chosen), ("rejected", rejected))}
            yield {"prompt": chosen["prompt"], **names, "rollout": chosen["rollout"]}


def _name_first_prompt_clips(
    scores: Scores, advantages: Advantages
) -> tuple[dict[tuple[str, int], str], dict[str, dict[str, dict[str, Any]]]]:
    """Return the files of the best and the worst clip by kind and place, and the facts of these clips.

    The facts are by reward, and under ``""`` by advantage.
    """
    size = advantages.values.shape[1]
    by_head = {name: head.raw[:size] for name, head in scores.heads.items()} if len(scores.heads) > 1 else {}
    chosen = {"": _extremes(advantages.values[0], advantages.failed[0])}
    chosen |= {name: _extremes(raw, advantages.failed[0] | ~raw.isfinite()) for name, raw in by_head.items()}
    names: dict[tuple[str, int], str] = {}
    details: dict[str, dict[str, dict[str, Any]]] = {}
    for head, places in chosen.items():
        for kind, place in places.items():
            name = names.setdefault((kind, place), f"{kind}{head and f'-{slug(head)}'}.mp4")
            details.setdefault(head, {})[kind] = {**_numbers(place, scores, advantages), "video": name}
    return names, details


def _ranked(values: Tensor, failed: Tensor) -> list[int]:
    """Return the clips of a prompt that have scores, by falling advantage."""
    order = values.argsort(descending=True, stable=True).tolist()
    return [clip for clip in order if not failed[clip]]


def _select_ranks(available: int, count: int) -> list[int]:
    """Return `count` ranks, half of them the first and half the last; an odd number has one more of the first."""
    best, worst = (count + 1) // 2, count // 2
    return sorted({*range(min(best, available)), *range(max(0, available - worst), available)})


def _extremes(values: Tensor, failed: Tensor) -> dict[str, int]:
    """Return the clips with the greatest and the least value; for one clip only the best."""
    best = int(values.masked_fill(failed, -torch.inf).argmax())
    worst = int(values.masked_fill(failed, torch.inf).argmin())
    return {"best": best, "worst": worst} if len(values) > 1 else {"best": best}


def _numbers(place: int, scores: Scores, advantages: Advantages) -> dict[str, Any]:
    """Return the number, advantage and scores of a clip; places count over all prompts."""
    slot, clip = divmod(place, advantages.values.shape[1])
    raw = {name: float(head.raw[place]) for name, head in scores.heads.items() if head.raw[place].isfinite()}
    compared = {"advantage": float(advantages.values[slot][clip])} if advantages.values.shape[1] > 1 else {}
    return {"clip": clip, **compared, "reward": raw}


def _comment(job: RolloutSample, kind: str, name: str, numbers: Mapping[str, Any], count: int) -> str:
    """Return the prompt and the scores of a clip as the comment of its file."""
    scores = ", ".join(f"{head} {score:.4g}" for head, score in numbers["reward"].items())
    by = "" if not kind or name == f"{kind}.mp4" else f" by {name.removesuffix('.mp4').partition('-')[2]}"
    which = f"{kind} of {count}{by}" if kind else f"{int(name.removesuffix('.mp4').rpartition('-')[2])}. of {count}"
    compared = [which, f"advantage {numbers['advantage']:+.2f}"] if "advantage" in numbers else []
    details = " | ".join([f"rollout {job.rollout}", *compared, scores])
    return f"{' '.join(job.prompt.text.split())}\n{details}"
