"""Losses and gradient norms of the first steps of every family and method, pinned: a change of numbers must be meant.

FINETRAINERS_UPDATE_GOLDEN=1 writes the numbers of now; after a change that is meant, their diff goes into the commit.
On the machine that wrote them, no diff at all shows that a refactoring is exact bit for bit; other machines round
differently.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES
from torch.overrides import TorchFunctionMode

from finetrainers.training import trainer
from finetrainers.utils.files import write_json_atomic

#: What gives a Python number, or an array, of a tensor.
_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"}
GOLDEN = Path(__file__).parents[1] / "golden"
UPDATE = os.environ.get("FINETRAINERS_UPDATE_GOLDEN") == "1"

#: Noise levels and latents of the runs on clips, where they are not those of plain runs of the family.
NOISE: dict[str, dict[str, Any]] = {
    "ltx2": {"flow_resolution_shifting": False},
    "hunyuan_video": {"flow_shift": 1.0},
}
for name in FAMILIES:
    NOISE[name] = {"flow_weighting_scheme": "none", "sample_posterior": True, **NOISE.get(name, {})}
#: Two updates of reward gradients, the second of what the first has made.
GRADIENTS = {"method": "refl", "updates_per_rollout": 1, "num_generations": 1, "train_steps": 2}
#: Each on another family with a LoRA than with full finetuning, so that few runs meet every pair of the three.
REWARDED: dict[str, dict[str, Any]] = {
    "grpo": {"best_of_n": 2, "kl_coef": 0.1, "advantage": "global_std"},
    "dancegrpo": {"grpo_preset": "dancegrpo", "best_of_n": 4, "ratio_norm": True},
    "nft": {"method": "nft", "init_same_noise": False, "noise_levels": 2},
    "awm": {"method": "awm", "init_same_noise": False, "noise_levels": 2, "kl_coef": 0.1},
    "draft": {**GRADIENTS, "draft_k": 2, "kl_coef": 0.1},
    "draft-lv": {**GRADIENTS, "refl_kind": "draft-lv"},
    "refl": {**GRADIENTS, "refl_kind": "refl", "refl_range": [0.4, 1.0]},
}
RUNS = [
    ("grpo", "ltx_video", "lora"),
    ("grpo", "cogvideox", "full-finetune"),
    ("dancegrpo", "hunyuan_video", "lora"),
    ("dancegrpo", "ltx_video", "full-finetune"),
    ("nft", "cogvideox", "lora"),
    ("nft", "hunyuan_video", "full-finetune"),
    ("awm", "ltx_video", "lora"),
    ("draft", "ltx_video", "lora"),
    ("draft-lv", "cogvideox", "lora"),
    ("refl", "hunyuan_video", "full-finetune"),
]


class HostReads(TorchFunctionMode):
    """Notes where code asks the host for a number of a tensor, which on a GPU waits for everything that was begun."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and isinstance(args[0], torch.Tensor):
            *_, caller = (f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename)
            self.places.append(f"{Path(caller.filename).name}:{caller.lineno} {caller.line}")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No loss of any method on any family reads from the device, while it makes the graph or goes back through it."""
    reads, accumulate = HostReads(), trainer.accumulate_gradients

    def watched(state: Any, micro_batches: Any) -> Any:
        loss = state.method.loss

        def watched_loss(*arguments: Any) -> Any:
            with reads:
                return loss(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state.method, "loss", watched_loss)
            return accumulate(state, micro_batches)

    monkeypatch.setattr(trainer, "accumulate_gradients", watched)
    yield
    assert reads.places == []


def picture(clip: Any, **_: Any) -> torch.Tensor:
    """Pixels `[3, T, H, W]` that depend on no video codec."""
    frames, height, width = clip.bucket
    t, y, x = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    phase = torch.stack([x + t, y - t, x + y]) / (5.0 + clip.index)
    return torch.sin(phase)


def compare(file: str, name: str, found: Any, check: Callable[[Any], None]) -> None:
    """Call `check` with the numbers on record, or record those that were found."""
    path = GOLDEN / file
    golden = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if UPDATE:
        write_json_atomic(path, {**golden, name: found})
    else:
        assert name in golden, "no number of it is on record: run this with FINETRAINERS_UPDATE_GOLDEN=1"
        check(golden[name])


@pytest.mark.parametrize("training_type", ["lora", "full-finetune"])
@pytest.mark.parametrize("family", FAMILIES)
def test_first_step(
    family: str,
    training_type: str,
    options: Callable[..., dict],
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("finetrainers.data.loading.loader.load_clip", picture)
    done = run(**options(family, clips=2, batch_size=2, training_type=training_type, train_steps=1, **NOISE[family]))
    ((_, loss, grad_norm),) = done.curve("loss", "grad_norm")
    found = {"loss": loss, "grad_norm": grad_norm}

    def check(golden: dict[str, float]) -> None:
        assert found == pytest.approx(golden, rel=1e-4)

    compare("one_step.json", f"{family} {training_type}", found, check)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("family", "training_type"), [("ltx_video", "lora"), ("hunyuan_video", "lora"), ("cogvideox", "full-finetune")]
)
def test_steps_on_preference_pairs(
    family: str,
    training_type: str,
    options: Callable[..., dict],
    run: Callable[..., Any],
    make_clips: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second step's loss is the first that depends on the network; each pair's clips are of other latents."""

    def other(clip: Any, **_: Any) -> torch.Tensor:
        return picture(clip) if clip.path.stem == "0" else picture(clip).flip(1)

    monkeypatch.setattr("finetrainers.data.loading.loader.load_clip", other)
    rows = [{"prompt": f"pattern {k}", "chosen": "0.mp4", "rejected": "1.mp4"} for k in range(2)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = options(
        family, clips=2, method="dpo", dataset_file=str(pairs), batch_size=2, training_type=training_type,
        train_steps=2, lr=3e-3 if training_type == "lora" else 1e-4, optimizer="adamw", **NOISE[family],
    )  # fmt: skip
    names = ("loss", "margin", "grad_norm")
    found = [dict(zip(names, numbers, strict=True)) for _, *numbers in run(**values).curve(*names)]

    def check(golden: list[dict[str, float]]) -> None:
        for now, then in zip(found, golden, strict=True):
            assert now == pytest.approx(then, rel=1e-3, abs=1e-4)

    compare("preference_steps.json", f"{family} {training_type}", found, check)


@pytest.mark.parametrize(("method", "family", "training_type"), RUNS)
def test_steps_of_reward_finetuning(
    method: str,
    family: str,
    training_type: str,
    options: Callable[..., dict],
    run: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Two updates of a rollout, and two of a rollout of the policy that they made."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ball\na blue cube rolls\na cat\n")
    values = options(
        family, training_type=training_type, lr=1e-3, batch_size=2, optimizer="adamw",
        prompts=str(prompts), reward=["brightness", "contrast=0.5"], rollout_size="9x64x64",
        prompts_per_step=2, sampling_steps=5,
        **({"method": "grpo", "updates_per_rollout": 2, "num_generations": 4, "train_steps": 4} | REWARDED[method]),
    )  # fmt: skip
    values = {name: value for name, value in values.items() if name not in ("data_root", "video_resolution_buckets")}
    names = ("reward/brightness", "loss", "grad_norm")
    found = [dict(zip(names, numbers, strict=True)) for _, *numbers in run(**values).curve(*names)]
    assert len(found) == values["train_steps"]

    def check(golden: list[dict[str, float]]) -> None:
        for now, then in zip(found, golden, strict=True):
            # The loss of a policy gradient is a difference of clips and nearly zero. The clips' scores are divided by
            # their small deviation, which amplifies the rounding of another processor (1.1 % of a loss was seen on an
            # EPYC).
            for name, value in now.items():
                rel = 2e-2 if name == "loss" else 1e-3
                assert value == pytest.approx(then[name], rel=rel, abs=1e-3 * min(1.0, then["grad_norm"])), name

    compare("reward_steps.json", f"{method} {family} {training_type}", found, check)
