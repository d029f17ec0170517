"""Models and batches for your own training loops: each step is that of a run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES
from refusals import refused, refused_options
from safetensors.torch import load_file

from finetrainers import SFT, batches, export, load_config, load_model, sample, train
from finetrainers.methods.grpo.method import GRPO
from finetrainers.methods.grpo.rollout.collect import RolloutBatch, RolloutCollector


class Recording(SFT):
    """SFT that keeps its batches."""

    seen: list[Any] = []  # noqa: RUF012

    def loss(self, transformer: Any, batch: Any) -> Any:
        Recording.seen.append(batch)
        return super().loss(transformer, batch)


def test_batches_and_losses_are_those_of_training(options: Callable[..., dict], tmp_path: Path) -> None:
    values = options(clips=3, train_steps=2, checkpointing_steps=1, caption_dropout_p=0.5, batch_size=2, lr=1e-3)
    Recording.seen.clear()
    result = train(load_config(**values), method=Recording)
    losses = [record["loss"] for record in result.metrics if "loss" in record]

    config = load_config(**values | {"output_dir": str(tmp_path / "own")})
    own = list(batches(config))
    assert len(own) == len(Recording.seen) == 2
    model = load_model(config)
    for raw, batch, expected in zip(batches(config, encoded=False), own, Recording.seen, strict=True):
        encoded = model.encode(raw)
        assert batch.sample_keys == encoded.sample_keys == expected.sample_keys
        for each in (batch, encoded):
            assert torch.equal(each.moments, expected.moments)
            assert torch.equal(each.conditions["prompt_embeds"], expected.conditions["prompt_embeds"])
    [later] = batches(config, encoded=False, start=1)
    assert later.sample_keys == own[1].sample_keys

    # The first loss, and the second one with the weights between them.
    assert model.loss(own[0]).item() == losses[0]
    noisy = model.noise(own[0])
    prediction = model.predict(noisy)
    assert model.mean_loss(model.element_loss(prediction, noisy.target), noisy).item() == losses[0]
    plain = model.predict(noisy.x_t, noisy.frame_t, own[0].conditions, fps=8.0)
    assert torch.equal(plain, prediction)
    assert torch.equal(model.process.add_noise(noisy.x0, noisy.eps, noisy.frame_t), noisy.x_t)
    checkpoint = result.run_dir / "checkpoints" / "step-1"
    trained = load_model(load_config(result.config, init_from=checkpoint))
    assert trained.loss(own[1]).item() == losses[1]
    lora = trained.save(tmp_path / "own")
    assert next(batches(config, encoded=False)).sample_keys == own[0].sample_keys  # beside the file
    [exported] = export(lora, "peft")
    assert load_file(exported).keys()
    assert not sample(lora.parent, prompts="a", num_inference_steps=2, size="9x64x64", dry_run=True).clips
    saved, expected = (
        load_file(lora),
        load_file(checkpoint / "pytorch_lora_weights.safetensors"),
    )
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())

    # Your own frames, as uint8 and as `decode` returns them.
    raw = next(batches(config, encoded=False))
    frames = [pixels.permute(1, 2, 3, 0).numpy() for pixels in raw.pixels]
    captions = [clip.caption for clip in raw.clips]
    plain_batch = model.encode(frames, captions, sample_keys=raw.sample_keys)
    assert torch.equal(plain_batch.moments, own[0].moments)
    assert torch.equal(model.encode_text(captions)["prompt_embeds"], plain_batch.conditions["prompt_embeds"])
    video = model.decode(noisy.x0)
    assert video.shape == (2, 9, 3, 64, 64)
    assert model.encode(video, captions).moments.shape == own[0].moments.shape
    model.free_encoders()
    assert torch.equal(model.decode(noisy.x0), video)
    for bad in ([frames[0][:8]], [frames[0].astype("int64")], [frames[0], frames[1][:1]]):
        with refused("invalid"):
            model.encode(bad, ["a clip"] * len(bad))
    with refused("mismatch"):
        model.encode(frames, ["a clip"])
    with refused("required"):
        model.predict(noisy.x_t)
    assert len(model.trainable_parameters()) == sum(p.requires_grad for p in model.network.parameters()) > 0
    with refused("invalid", "RawBatch"):
        model.noise(raw)
    with refused("invalid", "Batch"):
        model.predict(own[0])  # type: ignore[arg-type]
    with refused("mismatch"):
        model.mean_loss(torch.tensor(0.5), noisy)
    with refused("invalid"):
        model.decode(noisy.x0[0])
    assert torch.equal(
        model.predict(noisy.x_t, 0.5, own[0].conditions, fps=8.0),
        model.predict(noisy.x_t, torch.tensor([0.5, 0.5]), own[0].conditions, fps=8.0),
    )
    with refused_options(("start", "invalid")):
        batches(config, start=-1)
    with refused("required"):
        model.rollout(["a ball"])
    with refused_options(("--resume_from_checkpoint", "unsupported")):
        load_model(load_config(config, resume_from_checkpoint="latest"))


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_loss_of_training(family: str, options: Callable[..., dict]) -> None:
    values = options(family, train_steps=1, checkpointing_steps=0)
    result = train(load_config(**values))
    model, [batch] = load_model(result.config), list(batches(result.config))
    assert model.loss(batch).item() == result.metrics[0]["loss"]
    x0 = model.noise(batch).x0[:, :, -batch.latent_size[0] :]
    assert model.decode(x0).shape[2:] == (3, 64, 64)


class Spied(GRPO):
    """GRPO that keeps its rollouts."""

    rollouts: list[RolloutBatch] = []  # noqa: RUF012

    def rollout(self, transformer: Any, rollout: int) -> RolloutBatch:
        Spied.rollouts.append(super().rollout(transformer, rollout))
        return Spied.rollouts[-1]


@pytest.mark.rotating
@pytest.mark.parametrize(
    "changes", [{}, {"rollout_cfg": 2.0, "init_same_noise": False, "lora_dropout": 0.1, "gradient_checkpointing": True}]
)
def test_rollouts_are_those_of_training(
    changes: dict[str, Any], options: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.txt").write_text("a red ball\na blue cube rolls\n")
    values = options(
        method="grpo", train_steps=1, batch_size=2, prompts=str(tmp_path / "prompts.txt"), reward=["brightness"],
        rollout_size="9x64x64", prompts_per_step=2, num_generations=3, sampling_steps=4, window_size=2, **changes,
    )  # fmt: skip
    del values["data_root"], values["video_resolution_buckets"]
    decode, decoded = RolloutCollector.decode, list[torch.Tensor]()

    def keep(collector: RolloutCollector, latents: torch.Tensor) -> torch.Tensor:
        decoded.append(decode(collector, latents))
        return decoded[-1]

    monkeypatch.setattr(RolloutCollector, "decode", keep)
    Spied.rollouts.clear()
    train(load_config(**values), method=Spied)
    [expected] = Spied.rollouts

    for name in ("prompts", "reward", "train_steps"):  # of a loop, not of a model
        del values[name]
    model = load_model(load_config(**values))
    prompts = [job.prompt.text for job in expected.jobs[::3]]
    rollouts = model.rollout(prompts, n=3)
    assert len(rollouts) == len(expected.replays) == 6
    for clip, replay in expected.replays.items():
        assert torch.equal(rollouts.steps[clip], replay.steps)
        assert torch.equal(rollouts.log_probs[clip], replay.log_old)
        assert torch.equal(rollouts.after[clip], replay.after)
    videos = torch.cat([model.decode(latents) for latents in rollouts.latents.split(2)])
    assert torch.equal(videos, torch.cat(decoded))
    assert not torch.equal(model.rollout(prompts, n=3, number=1).latents, rollouts.latents)

    with refused("invalid", "list of strings"):
        model.rollout("a red ball", n=1)
    assert model.network.training
    for transition in range(2):
        now = model.log_probs(rollouts, transition)
        assert now.tolist() == pytest.approx(rollouts.log_probs[:, transition].tolist(), abs=1e-6)
    now.sum().backward()
    assert any(weight.grad is not None for weight in model.network.parameters())
    assert torch.equal(model.log_probs(rollouts, 1, [4, 5]), now[4:])
    with refused("invalid", "transition"):
        model.log_probs(rollouts, 2)
    assert torch.equal(model.log_probs(rollouts, 0, [-1]), model.log_probs(rollouts, 0, [5]))
    with refused_options(("--method", "unsupported")):
        batches(load_config(**values))
