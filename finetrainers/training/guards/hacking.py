"""Detect reward hacking in the records of a run, by the rules of `rewards.hacking`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from finetrainers.config.hacking import WITNESSED, HackingRule
from finetrainers.rewards.hacking import (
    WITNESS,
    RewardHacking,
    Snapshot,
    WitnessedRollout,
    detect_collapse,
    detect_held_out,
    detect_kl,
    detect_witness,
    mean,
)

#: Name of this guard as the cause of a stop.
HACKING_GUARD = "--hacking_guard"
_PREFIX, _ERROR = "eval_reward/", "eval_reward_error/"
_SPREAD = "witness_std/"


class HackingGuard:
    """Guard that judges the records of a run; checkpoints store its state.

    Attributes:
        rule: settings of the detection.
        snapshots: so far.
        first: the first rollouts, which witnesses are compared with.
        recent: the last rollouts, as many as are compared.
        is_found: whether the last snapshot has shown hacking.
        way_back: the checkpoint to resume from after hacking.
    """

    def __init__(self, rule: HackingRule) -> None:
        self.rule = rule
        self.snapshots: list[Snapshot] = []
        self.first: list[WitnessedRollout] = []
        self.recent: list[WitnessedRollout] = []
        self.is_found = False
        self.way_back = "latest"
        self._step = -1  # of the last record of rollouts
        self._rollout = -1.0  # of the last record with witnesses
        self._rewards: list[float] = []  # since the last snapshot
        self._kls: list[float] = []

    @property
    def last(self) -> int:
        """The step of the last snapshot; -1 before the first."""
        return self.snapshots[-1].step if self.snapshots else -1

    def record(self, record: Mapping[str, Any]) -> bool:
        """Take a record, unless it was taken before; return whether there is something new to judge."""
        step, held_out, last = int(record["step"]), self._held_out(record), self.last
        is_witnessed = False
        if "weighted_reward" in record and step > self._step:
            self._step = step
            self._rewards.append(record["weighted_reward"])
            self._kls.append(record.get("kl", math.nan))
            is_witnessed = self._witness(record)
            if not self.rule.held_out and step // self.rule.every > max(last, 0) // self.rule.every:
                self._add_snapshot(step, mean(self._rewards))
                return True
        if held_out and step > last:
            self._add_snapshot(step, record.get("eval_weighted_reward", mean(self._rewards)), held_out)
            return True
        return is_witnessed

    def _witness(self, record: Mapping[str, Any]) -> bool:
        """Take the witnesses of a record that has new rollouts; return whether it has."""
        scores = {n: [record[WITNESS + n], record[_SPREAD + n]] for n in self.rule.witnesses if WITNESS + n in record}
        if not scores or record.get("rollout") == self._rollout:
            return False
        self._rollout = record.get("rollout", -1.0)
        prompts = self.rule.prompts * max(1, round(record.get("steps", 1) / self.rule.updates))
        error = record.get("weighted_reward_error", math.nan)
        rollout = WitnessedRollout(int(record["step"]), prompts, record["weighted_reward"], scores, error)
        if sum(earlier.prompts for earlier in self.first) < WITNESSED:
            self.first.append(rollout)
        else:
            self.recent.append(rollout)
            self.recent = self.recent[-(-(-WITNESSED // self.rule.prompts) + self.rule.patience - 1) :]
        return True

    def _windows(self) -> list[list[WitnessedRollout]]:
        """Return the last windows of rollouts, as many as must show hacking, or none if there are fewer."""
        size = -(-WITNESSED // self.rule.prompts)
        windows = [self.recent[start : start + size] for start in range(len(self.recent) - size + 1)]
        return windows if len(windows) == self.rule.patience else []

    def _held_out(self, record: Mapping[str, Any]) -> dict[str, list[float]]:
        pairs = {n: (record.get(_PREFIX + n), record.get(_ERROR + n)) for n in self.rule.held_out}
        return {n: [mean, error] for n, (mean, error) in pairs.items() if mean is not None and error is not None}

    def _add_snapshot(self, step: int, trained: float, held_out: Mapping[str, Sequence[float]] | None = None) -> None:
        self.snapshots.append(Snapshot(step, trained, mean(self._kls), held_out or {}))
        self._rewards, self._kls = [], []

    def detect(self) -> RewardHacking | None:
        """Return the hacking that the snapshots so far show, or None."""
        patience, windows = self.rule.patience, self._windows()
        rollouts = [*self.first, *self.recent]
        hackings = [detect_collapse(rollouts, len(self.first))] if rollouts else []
        if self.rule.held_out:
            hackings += [detect_held_out(self.snapshots, label, patience) for label in self.rule.held_out]
        else:
            hackings += [detect_witness(self.first, windows, name) for name in self.rule.witnesses if windows]
            hackings.append(detect_kl(self.snapshots, patience))
        return next((hacking for hacking in hackings if hacking is not None), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshots, and the values since the last one, as JSON values."""
        return {
            "looks": [{name: _json(value) for name, value in asdict(snapshot).items()} for snapshot in self.snapshots],
            "witnessed": {
                name: [{key: _json(value) for key, value in asdict(rollout).items()} for rollout in rollouts]
                for name, rollouts in (("first", self.first), ("recent", self.recent))
            },
            "rollout": self._rollout,
            "step": self._step,
            "rewards": [_json(value) for value in self._rewards],
            "kls": [_json(value) for value in self._kls],
            "is_found": self.is_found,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; a checkpoint of a run without this guard has nothing."""
        self.snapshots = [
            Snapshot(**{name: _number(value) for name, value in snapshot.items()})
            for snapshot in state.get("looks", ())
        ]
        self.first, self.recent = (
            [
                WitnessedRollout(**{key: _number(value) for key, value in rollout.items()})
                for rollout in state.get("witnessed", {}).get(name, ())
            ]
            for name in ("first", "recent")
        )
        self._rollout = state.get("rollout", -1.0)
        self._step = state.get("step", -1)
        self._rewards, self._kls = ([_number(value) for value in state.get(name, ())] for name in ("rewards", "kls"))
        self.is_found = state.get("is_found", False)


def _json(value: Any) -> Any:
    """Return the value, or None for NaN and infinities, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    return math.nan if value is None else value
