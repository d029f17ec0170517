"""A program as researchers write it, with annotations: type checkers accept it, but for the lines that say "refused".

`tests/test_types.py` reads it, and nothing runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor, nn

import finetrainers
from finetrainers import (
    SFT,
    Batch,
    Callback,
    ConfigError,
    Facts,
    Family,
    Model,
    NoisyClips,
    RawBatch,
    Reward,
    Rollouts,
    Sample,
    Section,
    TrainConfig,
    TrainingMethod,
    TrainResult,
    TrainState,
    batches,
    check,
    estimate,
    export,
    load_config,
    load_model,
    option,
    register_method,
    register_model,
    register_reward,
    report,
    reward_function,
    sample,
    train,
)
from finetrainers.config.geometry import Geometry
from finetrainers.methods.base import Evaluation, Method, MethodParts, Metrics, Step, Summary
from finetrainers.methods.spec import MethodMemory, MethodSpec

# ---- configurations ------------------------------------------------------------------------------------------------

config = load_config("run.toml", lr=5e-5, output_dir=Path("runs/typed"), transformer_dtype=torch.bfloat16)
config = load_config({"pretrained_model_name_or_path": "demo://ltx"}, dpo={"beta": 500.0}, reward=["motion=1"])
load_config(config, rnk=8)  # refused
load_config(config, rank="eight")  # refused
load_config(config, dpo={"bta": 2.0})  # refused
rank: int = config.training.rank
try:
    problems = check(config)["counts"]
except ConfigError as error:
    print([(problem.where, problem.kind, problem.message) for problem in error.problems])


# ---- parts and callbacks -------------------------------------------------------------------------------------------


class Huber(SFT):
    def element_loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return nn.functional.huber_loss(prediction, target, reduction="none", delta=0.1)


class Charbonnier(SFT):
    headline = ("loss", "distance")

    def loss(self, transformer: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        noisy: NoisyClips = self.noise_batch(batch)
        error = self.element_loss(self.predict(transformer, noisy), noisy.target)
        loss = self.mean_loss((error + 1e-4).sqrt(), noisy) * batch.weight
        return loss, {"loss": loss.detach()}


class OwnMethod:
    headline = ("loss",)
    summaries: Mapping[str, Summary] = {}
    evaluates = False

    def __init__(self, parts: MethodParts[Any]) -> None:
        self.spec, self.batches = parts.spec, parts.source

    def steps(self, start: int, transformer: nn.Module) -> Iterator[Step[Batch]]:
        for step in self.batches.steps(start):
            yield Step(step)

    def dry_steps(self, transformer: nn.Module) -> Iterator[tuple[str, Step[Batch]]]:
        for name, batch in self.batches.dry_batches():
            yield name, Step([batch])

    def can_stop_after(self, step: int) -> bool:
        return True

    def loss(self, transformer: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        loss = self.spec.latents(batch.moments, batch.moments, self.batches.vae_stats).mean()
        return loss, {"loss": loss.detach()}

    def evaluate(self, transformer: nn.Module) -> Evaluation:
        return Evaluation({})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert not state


class Curves(Callback):
    def on_start(self, state: TrainState) -> dict[str, float] | None:
        return {"parameters": float(sum(weight.numel() for weight in state.transformer.parameters()))}

    def on_gradients(self, state: TrainState) -> None:
        nn.utils.clip_grad_value_(state.transformer.parameters(), 1.0)

    def on_log(self, state: TrainState, record: dict[str, float]) -> None:
        if record.get("loss", 1.0) < 0.05:
            state.requests.finish = "a loss below 0.05"
        state.requests.save = state.step % 7 == 0

    def on_samples(self, state: TrainState, samples: Sequence[Sample]) -> dict[str, float]:
        return {"brightness": float(samples[0].frames.mean()), "fps": samples[0].fps}


class Clips(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"video": np.zeros((9, 32, 64, 3), np.uint8), "caption": f"black, {index}", "fps": 25}


def half_each_step(step: int) -> float:
    return 1e-3 * 0.5**step


network: nn.Module = nn.Identity()
result = train(config, method=SFT)
result = train("run.toml", method=Huber, data=Clips(), eval_data=[Clips()[0]], callbacks=Curves())
result = train(
    config,
    method=Charbonnier,
    network=network,
    lora=LoraConfig(r=4, target_modules=["to_q"]),
    optimizer=partial(torch.optim.AdamW, lr=1e-4),
    lr_at=half_each_step,
    callbacks=(Curves(),),
)
train(config, method=OwnMethod, optimizer=lambda weights: torch.optim.SGD(weights, lr=1e-2))
train(config, meth=SFT)  # refused
train(config, method=Curves)  # refused
methods: list[type[Method]] = [SFT, Huber, Charbonnier, OwnMethod]

# ---- rewards -------------------------------------------------------------------------------------------------------


@reward_function(scope="group")
def ranks(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    return videos.mean(dim=(1, 2, 3, 4)).argsort().argsort().float()


@reward_function(differentiable=True)
def warmth(videos: Tensor, prompts: Sequence[str], *, fps: float) -> Tensor:
    return videos[:, :, 0].mean(dim=(1, 2, 3)) - fps


@register_reward("levels")
def near_level(videos: Tensor, prompts: Sequence[str], *, level: Sequence[float | None]) -> list[float | None]:
    brightness = videos.mean(dim=(1, 2, 3, 4)).tolist()
    return [None if target is None else -abs(mean - target) for mean, target in zip(brightness, level, strict=True)]


async def judge(videos: Tensor, prompts: Sequence[str]) -> list[float]:
    return [0.0] * len(prompts)


class Levels(Reward):
    batch_size = 4
    scope = "group"

    def __init__(self, path: str = "weights", *, sharp: bool = False) -> None:
        self.path, self.sharp = path, sharp

    def score(
        self, videos: Tensor, prompts: Sequence[str], *, fps: float, level: Sequence[float]
    ) -> Mapping[str, Sequence[float]]:
        return {"score": [float(value) for value in level]}


class Asked(Reward):
    async def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Sequence[float]]:
        return {"score": [0.0] * len(prompts)}


scores: Tensor = ranks(torch.zeros(2, 9, 3, 32, 64), ["a", "b"])
levels: list[float | None] = near_level(torch.zeros(2, 9, 3, 32, 64), ["a", "b"], level=[0.1, None])
register_reward("warmth", warmth)
register_reward("asked", Asked)
prompts = [{"prompt": "a boat", "level": 0.3}]
train(config, prompts=prompts, eval_prompts=["a cat"], rewards={"ranks": ranks, "levels": Levels(), "asked": Asked})
train(config, rewards={"judge": judge, "network": nn.Linear(3, 1)})
reward_function(scope="prompt")  # refused

# ---- results -------------------------------------------------------------------------------------------------------

weights: Path | None = result.weights
steps: list[float] = [record["loss"] for record in result.metrics if "loss" in record]
[merged] = export(result, ["merged"], dtype="bf16", lora_scale=0.8, pretrained_model_name_or_path="demo://ltx")
exported: list[Path] = export(TrainResult.load("runs/typed"), "kohya", dtype=torch.float16)
export(result, "comfyui", dtyp="bf16")  # refused
drawn = sample(result, "base", prompts=["a boat"], seed=7, size="49x512x768", lora_scale=[0.5, 1.0], num=2)
sheet: Path | None = drawn.sheet
sample(result, prompt=["a boat"])  # refused
memory: bool = estimate(config, gpu="24GB")["fits"]
page: Path = report(result, "runs/other", output="page.html")

# ---- loops ---------------------------------------------------------------------------------------------------------

model: Model = load_model(config, device="cpu")
optimizer = torch.optim.AdamW(model.trainable_parameters(), lr=1e-4)
for batch in batches(config, start=10, data=Clips()):
    noisy = model.noise(batch)
    difference = model.element_loss(model.predict(noisy), noisy.target)
    loss: Tensor = model.mean_loss(difference, noisy) * batch.weight
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
raw: Iterator[RawBatch] = batches(config, encoded=False)
pixels: Sequence[Tensor] = next(raw).pixels
encoded: Batch = model.encode([np.zeros((9, 32, 64, 3), np.uint8)], ["black"], sample_keys=[(0, 7)])
given = model.noise(encoded)
prediction = model.predict(given.x_t, given.t, model.encode_text(["a boat"]))
rollouts: Rollouts = model.rollout(["a boat"], n=4)
gains: Tensor = model.log_probs(rollouts, 0, clips=[0, 1]) - rollouts.log_probs[:2, 0]
saved: Path = model.save("runs/loop")
model.noise(next(raw))  # refused

# ---- methods and models --------------------------------------------------------------------------------------------


class OwnSection(Section):
    """Options of the method."""

    methods = ("own",)
    qualified = True

    strength: float = option(0.1, "Strength.", resume="same", gt=0, le=100)


class OwnSpec(MethodSpec):
    """What the method is."""

    learns_clips = True
    unread = {"frame_conditioning": "", "mask_column": ""}  # noqa: RUF012

    def uses_reference(self, config: TrainConfig) -> bool:
        return True

    def memory(
        self, config: TrainConfig, latent: Any, *, batch_size: int, trained: float, reference: float
    ) -> MethodMemory:
        return MethodMemory(copies=reference, trajectories=0.0, batch_size=batch_size)


METHOD = TrainingMethod(name="own", method=OwnMethod, spec=OwnSpec, options=OwnSection)
register_method("own", OwnMethod, spec=OwnSpec, options=OwnSection)


def read(configs: Mapping[str, Mapping[str, Any]]) -> Facts:
    return Facts(Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=24.0), heads=4)


FAMILY = Family(name="own", spec="own_spec:OwnSpec", read=read, transformer="Own", vae="AutoencoderKLWan")
register_model(FAMILY)
version: str = finetrainers.__version__
