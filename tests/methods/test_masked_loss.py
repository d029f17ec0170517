"""The masked loss of supervised finetuning against a float64 derivation, and that masked latents have no gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from derived import SEED, Setting, derive, make_batch
from every_family import FAMILIES
from torch import Tensor

from finetrainers.models.spec import Batch, PromptEmbeds, VideoMeta
from finetrainers.utils.packaged import model_path
from finetrainers.utils.seeding import derive_seed


def uniform(generator: torch.Generator) -> float:
    return torch.rand((), generator=generator).double().item()


def answer(row: int, shape: torch.Size) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(row)).double()


def masked(batch: Batch) -> Batch:
    """With grey masks, of which one is 1 everywhere, and one has black frames."""
    mask = torch.rand(len(batch), 1, *batch.latent_size, generator=torch.Generator().manual_seed(5))
    mask[0] = 1.0
    mask[1, :, 1:] *= torch.rand(batch.latent_size[1:], generator=torch.Generator().manual_seed(6)) > 0.5
    mask[-1, :, -1] = 0.0
    return replace(batch, mask=mask)


def close(ours: Tensor, theirs: Any) -> None:
    torch.testing.assert_close(ours.detach().double(), torch.as_tensor(theirs).double(), rtol=2e-5, atol=2e-5)


def weighted(error: Tensor, mask: Tensor) -> Tensor:
    """sum(w e) / sum(w), over channels too."""
    weight = mask.double().expand(error.shape)
    return (weight * error).sum() / weight.sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_weighted_mean_over_latents(family: str, tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo(family), family)
    batch = masked(make_batch(setting, weight=0.75))
    assert batch.mask is not None
    loss, metrics = setting.method.loss(torch.nn.Identity(), batch)
    per_sample = setting.method.eval_loss(torch.nn.Identity(), batch, 0.3)
    for purpose, quantile, ours in (("train", uniform, None), ("eval", lambda generator: 0.3, per_sample)):
        expected = derive(setting, family, batch, purpose, quantile)
        errors = [weighted((answer(i, e["x"].shape) - e["target"]) ** 2, batch.mask[i]) for i, e in enumerate(expected)]
        close(loss if ours is None else ours, 0.75 * sum(errors) / 3 if ours is None else errors)
    assert metrics["masked_out"] == 0
    unmasked, without = setting.method.loss(torch.nn.Identity(), replace(batch, mask=None))
    white, _ = setting.method.loss(torch.nn.Identity(), replace(batch, mask=torch.ones_like(batch.mask)))
    close(white, unmasked.detach())
    assert "masked_out" not in without
    first, _ = batch.split(2)  # each with its own rows of the mask
    half, _ = setting.method.loss(torch.nn.Identity(), first)
    error = derive(setting, family, first, "train", uniform)[0]
    close(half, 0.25 * weighted((answer(0, error["x"].shape) - error["target"]) ** 2, batch.mask[0]))


def test_given_frames_and_masks_leave_the_loss_and_an_empty_rest_is_zero(
    tiny_repo: Callable[..., Path],
) -> None:
    setting = Setting(tiny_repo("ltx_video"), "ltx_video", given="first=0.5")
    keys = [(0, item) for item in range(6)]
    batch = masked(make_batch(setting, keys=keys, weight=0.5))
    assert batch.mask is not None
    given = [random.Random(derive_seed(SEED, "train", "first_frame", *key)).random() < 0.5 for key in keys]
    only_first, none = given.index(True), given.index(False)
    batch.mask[only_first, :, 1:] = 0.0  # the frame that it leaves is the given one
    batch.mask[none] = 0.0
    loss, metrics = setting.method.loss(torch.nn.Identity(), batch)
    errors = []
    for row, e in enumerate(derive(setting, "ltx_video", batch, "train", uniform)):
        error, first = (answer(row, e["x"].shape) - e["target"]) ** 2, int(given[row])
        empty = row in (only_first, none)
        errors.append(torch.tensor(0.0).double() if empty else weighted(error[:, first:], batch.mask[row, :, first:]))
    close(loss, 0.5 * sum(errors) / 6)
    close(metrics["masked_out"], 0.5 * 2 / 6)


def test_masks_weigh_frames_that_have_noise_levels_of_their_own(tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo("ltx_video"), "ltx_video")
    setting.spec.noise_per = "frame"
    batch = masked(make_batch(setting))
    assert batch.mask is not None
    levels = setting.method.eval_loss(torch.nn.Identity(), batch, 0.3)
    expected = derive(setting, "ltx_video", batch, "eval", lambda generator: 0.3)
    (x, *_) = setting.seen[0]
    for row, e in enumerate(expected):
        noise = e["target"] + e["x0"]
        # Each frame has drawn nothing: the level is the same for all, and so is the target.
        close(x[row], 0.7 * e["x0"] + 0.3 * noise)
        close(levels[row], weighted((answer(row, e["x"].shape) - e["target"]) ** 2, batch.mask[row]))


def test_a_frame_that_makes_patches_whole_has_the_mask_of_its_copy(tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo("cogvideox", version="1.5"), "cogvideox")
    batch = make_batch(setting)
    mask = torch.zeros(len(batch), 1, *batch.latent_size)
    mask[:, :, 0] = 1.0
    loss, _ = setting.method.loss(torch.nn.Identity(), replace(batch, mask=mask))
    ((x, *_),) = setting.seen
    assert x.shape[2] == batch.latent_size[0] + 1
    loss.backward()  # through the recorded answers: only frames 0 and 1 have a gradient
    other, _ = setting.method.loss(torch.nn.Identity(), replace(batch, mask=setting.spec.padded(mask)[:, :, 1:]))
    assert torch.equal(loss, other)


def test_masked_latents_do_not_influence_the_gradient(tiny_repo: Callable[..., Path]) -> None:
    """If a clip changes where its mask is black, no gradient of a network that sees each latent by itself changes."""
    setting = Setting(tiny_repo("ltx_video"), "ltx_video")
    batch = make_batch(setting)
    mask = torch.ones(len(batch), 1, *batch.latent_size)
    mask[..., : batch.latent_size[2] // 2] = 0.0
    mask[:, :, -1] = 0.0
    batch = replace(batch, mask=mask)
    channels = batch.moments.shape[1] // 2
    network = torch.nn.Conv3d(channels, channels, 1)

    def predict(transformer: Any, x: Tensor, t: Tensor, conditions: PromptEmbeds, meta: Any) -> Tensor:
        return transformer(x) * (1 + t.view(-1, 1, 1, 1, 1))

    setting.spec.predict = predict  # type: ignore[method-assign]

    def gradient(batch: Batch) -> Tensor:
        network.zero_grad()
        setting.method.loss(network, batch)[0].backward()
        assert network.weight.grad is not None
        return network.weight.grad.clone()

    hidden = (mask == 0).expand_as(batch.moments)
    elsewhere = batch.moments.clone()
    elsewhere[hidden] = 10 * torch.randn(int(hidden.sum()))
    ours = gradient(batch)
    assert ours.abs().max() > 0
    assert torch.equal(gradient(replace(batch, moments=elsewhere)), ours)
    shown = batch.moments.clone()
    shown[~hidden] += 0.1
    assert not torch.equal(gradient(replace(batch, moments=shown)), ours)
    assert not torch.equal(gradient(replace(batch, moments=elsewhere, mask=None)), ours)


def test_prior_preservation_is_not_masked(tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo("ltx_video"), "ltx_video", prior_preservation_weight=1.0)
    batch = replace(make_batch(setting), prior=PromptEmbeds({"embeds": torch.zeros(3, 2, 2)}))
    setting.method.reference = lambda _: nullcontext("a")  # type: ignore[assignment, return-value]
    setting.spec.predict = (  # type: ignore[method-assign]
        lambda network, x, *_: (x if network == "a" else x.sin()).requires_grad_()  # type: ignore[assignment]
    )
    [whole], [half] = (setting.method._priors([one]) for one in (batch, masked(batch)))
    assert half.clips.mask is not None
    loss, ours = (one.own_loss("b", one)[0] for one in (whole, half))  # type: ignore[arg-type]
    assert loss > 0
    assert torch.equal(ours, loss)


@pytest.mark.rotating
def test_what_a_mask_hides_is_not_learned() -> None:
    """The embedded model on a split screen, red beside blue: with a mask of the red half, it learns that half alone."""
    setting = Setting(Path(model_path("demo://ltx")), "ltx_video")
    del setting.spec.predict  # its own again
    spec = setting.spec
    screen = torch.full((1, 3, 1, 48, 64), -1.0)
    screen[:, 0, ..., :32] = screen[:, 2, ..., 32:] = 1.0
    with torch.no_grad():
        text = spec.encode_text(spec.load_text_encoders(), ["a split screen"]).cut(16)
        moments = spec.encode_video(setting.vae, screen)
    red = torch.zeros(1, 1, *moments.shape[2:])
    red[..., : red.shape[-1] // 2] = 1.0

    def batch(epoch: int, mask: Tensor | None) -> Batch:
        keys = [(epoch, item) for item in range(4)]
        rows = [0] * len(keys)
        fps = torch.full((len(keys),), 24.0)
        return Batch(moments[rows], text.rows(rows), VideoMeta(fps), keys, mask=None if mask is None else mask[rows])

    def trained(mask: Tensor | None) -> list[float]:
        """What is left of the loss of each half, at noise that is not trained on."""
        torch.manual_seed(0)
        network = spec.load_transformer(torch.float32)
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4)

        def losses() -> Tensor:
            with torch.no_grad():
                halves = (setting.method.eval_loss(network, batch(99, half), 0.7).mean() for half in (red, 1 - red))
                return torch.stack(list(halves))

        before = losses()
        for step in range(15):
            optimizer.zero_grad()
            setting.method.loss(network, batch(step, mask))[0].backward()
            optimizer.step()
        return (losses() / before).tolist()

    whole_red, whole_blue = trained(None)
    masked_red, masked_blue = trained(red)
    assert max(whole_red, whole_blue, masked_red) < 0.3, (whole_red, whole_blue, masked_red)
    assert masked_blue > 0.7, masked_blue
