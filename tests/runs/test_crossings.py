"""What must hold of a run whatever its options, for covering arrays of options, sources, methods and Python objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from crossings import KINDS, options_of, rows, write_data
from safetensors.torch import load_file
from whole_runs import results

from finetrainers import export, load_config, train
from finetrainers.config.given import RawOptions
from finetrainers.config.sample import VALIDATION_NAMES, SampleSection
from finetrainers.config.watch import WatchSection
from finetrainers.methods.registry import load_method
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.sampling.plan import plan_samples
from finetrainers.sampling.watch.plan import plan_watch
from finetrainers.training.callbacks.base import Callback

#: Beginnings of names of numbers that no two runs share.
_TIMES = ("time", "seconds/", "step_s", "tokens_per_s", "memory", "phase_s/", "checkpoint_s")
#: Step after which a run is interrupted.
STOP = 2
#: By value of a factor, options that cut a step into other micro-batches.
OTHER_BATCH = {
    "two": {"batch_size": 1, "gradient_accumulation_steps": 2},
    "accumulated": {"batch_size": 2, "gradient_accumulation_steps": 1},
    "rows": {"batch_size": 2},
}


class Outcome:
    """Numbers of a run and its weights, compared by `==`."""

    def __init__(self, root: Path) -> None:
        self.numbers: dict[int, dict[str, float]] = {}
        for line in (root / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            numbers = {name: value for name, value in record.items() if not name.startswith(_TIMES)}
            self.numbers.setdefault(record["step"], {}).update(numbers)
        self.weights = {name: tensor.double() for name, tensor in results(root).items()}

    def differences(self, other: Outcome, *, rounds: bool = False) -> list[str]:
        """Return the names of what differs.

        Args:
            rounds: whether other roundings are allowed, which Adam turns into other steps: then losses and rewards of
                the first step are equal to 1e-3, and later ones to 2%.
        """
        steps = {step: self.numbers.get(step, {}) for step in sorted({**self.numbers, **other.numbers})}
        if rounds:
            first = min((step for step, numbers in steps.items() if "loss" in numbers), default=0)
            return [
                f"{name} of step {step}: {numbers[name]} and {other.numbers[step].get(name)}"
                for step, numbers in steps.items()
                for name in ("loss", "weighted_reward")
                if name in numbers
                and other.numbers[step].get(name)
                != pytest.approx(numbers[name], rel=1e-3 if step == first else 2e-2, abs=1e-4)
            ]
        names = [
            f"{name} of step {step}: {numbers.get(name)} and {other.numbers.get(step, {}).get(name)}"
            for step, numbers in steps.items()
            for name in {**numbers, **other.numbers.get(step, {})}
            if numbers.get(name) != other.numbers.get(step, {}).get(name)
        ]
        if self.weights.keys() != other.weights.keys():
            return [*names, "names of weights"]
        return [*names, *(name for name, tensor in self.weights.items() if not tensor.equal(other.weights[name]))][:8]


class _InterruptAfter(Callback):
    """Lets the loss of the step after `STOP` raise KeyboardInterrupt, as a second Ctrl-C in a host program does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: type) -> None:
        self._monkeypatch, self._method = monkeypatch, method

    def on_log(self, state: Any, record: Mapping[str, float]) -> None:
        def interrupted(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        if state.step == STOP:
            self._monkeypatch.setattr(self._method, "loss", interrupted)


class Row:
    """A row's runs, in directories of their own below `root`."""

    def __init__(self, kind: str, row: Mapping[str, str], data: Path, root: Path) -> None:
        self._kind, self._row, self._data, self.root = kind, row, data, root
        self.options, _ = options_of(kind, row, data)

    def train(self, name: str, changes: Mapping[str, Any] | None = None, **parts: Any) -> Path:
        """Train with the row's options and `changes`; return the directory of the run."""
        self._start({**self.options, **(changes or {}), "output_dir": self.root / name}, parts)
        return self.root / name

    def repeat(self, config: Path, name: str, **changes: Any) -> Path:
        """Train from a run's config.toml."""
        _, parts = options_of(self._kind, self._row, self._data)
        train(load_config(config, output_dir=self.root / name, **changes), **parts)
        return self.root / name

    def _start(self, options: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        _, own = options_of(self._kind, self._row, self._data)
        callbacks = [*own.pop("callbacks", []), *parts.get("callbacks", [])]
        train(load_config(**options), **{**own, **parts, "callbacks": callbacks})


def flags_ignored(run: Path, *, is_lora: bool) -> list[str]:
    """Return the flags of `sample`, `watch` and `export` that a finished run's own values replace."""
    given = {"num_inference_steps": 3, "guidance_scale": 1.5, "negative_prompt": "gray", "frame_rate": 10.0}
    flags = RawOptions({"vae_dtype": "bf16"}, {"vae_dtype": "--vae_dtype"})
    clip = {"prompts": "a cat", "size": "1x32x32"}
    sampled = plan_samples([str(run)], SampleSection.model_validate({**clip, **given}), flags)
    preset = {
        "preset": ["own=1x32x32,steps=3,guidance=1.5"],
        "prompts": "a cat",
        "no_track": True,
        "reward": ["brightness"],
    }
    watch = {name: given[name] for name in ("negative_prompt", "frame_rate")}
    watched = plan_watch(run, WatchSection.model_validate({**preset, **watch}), flags)
    plans = {"sample": sampled, **{f"watch {name}": plan for name, plan in watched.presets.items()}}
    ignored = [
        f"{command}: {name}"
        for command, plan in plans.items()
        for option, name in VALIDATION_NAMES.items()
        if name in given and plan.config.get(option) != given[name]
    ]
    ignored += [f"{command}: vae_dtype" for command, plan in plans.items() if plan.config.model.vae_dtype != "bf16"]
    [exported, *_] = export(run, "peft" if is_lora else "diffusers", dtype="fp16")
    files = [exported] if exported.is_file() else exported.rglob("*.safetensors")
    dtypes = {tensor.dtype for file in files for tensor in load_file(file).values()}
    return ignored if dtypes == {torch.float16} else [*ignored, f"export: dtype is {dtypes}"]


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("*")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("crossings")
    write_data(root)
    return root


CASES = [(kind, row) for kind in KINDS for row in rows(kind)]


@pytest.mark.rotating
@pytest.mark.parametrize(("kind", "row"), CASES, ids=["-".join((kind, *row.values())) for kind, row in CASES])
def test_crossing(kind: str, row: dict[str, str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    before = snapshot(data)
    runs = Row(kind, row, data, tmp_path)
    whole = runs.train("whole")
    expected = Outcome(whole)
    assert {1, 2, 3, 4} <= expected.numbers.keys()
    wrong: list[str] = []

    def compare(name: str, root: Path, *, rounds: bool = False) -> None:
        wrong.extend(f"{name}: {what}" for what in expected.differences(Outcome(root), rounds=rounds))

    with monkeypatch.context() as patch:
        interrupt = _InterruptAfter(patch, load_method(row["method"]))
        with pytest.raises(KeyboardInterrupt):
            runs.train("resumed", callbacks=[interrupt], handle_signals=False)
    if [found.step for found in scan_checkpoints(tmp_path / "resumed") if found.damage is None][-1:] == [STOP]:
        compare("resumed", runs.train("resumed", {"resume_from_checkpoint": "latest"}))
    else:
        wrong.append("interrupt: the last step is not saved")
    compare("repeated", runs.repeat(whole / "config.toml", "repeated"))

    config = load_config(whole / "config.toml")
    plain, given = config.plain(), load_config(**runs.options).plain()
    wrong += [f"given: {name} is {plain[name]}" for name in runs.options if plain[name] != given[name]]
    if config.chosen:
        compare("chosen values given", runs.train("chosen", {name: plain[name] for name in config.chosen}))
    if kind == "clips" and row["cut"] != "random":  # the cache has one cut of each clip
        compare("cache", runs.train("cache", {"precompute_conditions": row["cache"] == "off"}), rounds=True)
    other = OTHER_BATCH.get(row.get("batch", row["source"]))
    if other is not None and row["weights"] not in ("in_backward", "dropout"):  # masks depend on the batch
        compare("batch", runs.train("batch", other), rounds=True)
    wrong += flags_ignored(whole, is_lora=plain["training_type"] == "lora")
    assert snapshot(data) == before
    assert not list((tmp_path / "cwd").iterdir())
    assert not wrong, wrong
