"""The loss of supervised finetuning against a derivation in float64 that shares no code with it but the seeding."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from derived import KEYS, SEED, Setting, derive, make_batch, normalize
from every_family import FAMILIES
from refusals import refused
from torch import Tensor

from finetrainers.config.frame_conditioning import KINDS, draw_frames, read_frame_conditioning
from finetrainers.methods.base import standard_normal
from finetrainers.models.spec import PromptEmbeds
from finetrainers.utils.seeding import derive_seed


def test_the_frame_that_makes_patches_whole_has_noise_of_its_own(tiny_repo: Callable[..., Path]) -> None:
    """CogVideoX 1.5: the clean first frame comes twice, and each of the two is noised and predicted by itself."""
    setting = Setting(tiny_repo("cogvideox", version="1.5"), "cogvideox")
    batch = make_batch(setting)
    loss, _ = setting.method.loss(torch.nn.Identity(), batch)
    ((x, t, *_),) = setting.seen
    assert x.shape[2] == 4
    errors = []
    for row, (epoch, item) in enumerate(batch.sample_keys):
        generator = torch.Generator().manual_seed(derive_seed(SEED, "train", epoch, item))
        mean, logvar = batch.moments[row].double().chunk(2)
        clip = mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=generator).double()
        x0 = setting.vae.config.scaling_factor * torch.cat([clip[:, :1], clip], dim=1)
        eps = torch.randn(x0.shape, generator=generator).double()
        step = torch.tensor([min(int(uniform(generator) * 1000), 999)])
        close(x[row], setting.scheduler.add_noise(x0, eps, step))
        close(t[row], step[0])
        target = setting.scheduler.get_velocity(x0, eps, step)
        errors.append(((answer(row, x0.shape) - target) ** 2).mean())
    close(loss, sum(errors) / 3)


def uniform(generator: torch.Generator) -> float:
    return torch.rand((), generator=generator).double().item()


def answer(row: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(row)).double()


def close(ours: Tensor, theirs: Any) -> None:
    torch.testing.assert_close(ours.detach().double(), torch.as_tensor(theirs).double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss(family: str, tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo(family), family)
    batch = make_batch(setting, weight=0.75)
    loss, metrics = setting.method.loss(torch.nn.Identity(), batch)
    ((x, t, conditions, meta),) = setting.seen
    expected = derive(setting, family, batch, "train", uniform)
    close(t, [e["t"] for e in expected])
    close(x, torch.stack([e["x"] for e in expected]))
    assert conditions is batch.conditions
    assert meta.fps is batch.meta.fps
    errors = [((answer(i, e["x"].shape) - e["target"]) ** 2).mean() for i, e in enumerate(expected)]
    close(loss, 0.75 * sum(errors) / 3)
    close(metrics["loss"], loss.detach())
    assert loss.requires_grad
    assert not metrics["loss"].requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prior_preservation_loss(family: str, tiny_repo: Callable[..., Path]) -> None:
    """Both networks see the clips' noisy latents with the prior prompts; their outputs differ, in float64 here."""
    setting = Setting(tiny_repo(family), family, prior_preservation_weight=3.0)
    batch = replace(make_batch(setting, weight=0.75), prior=PromptEmbeds({"embeds": torch.ones(3, 2, 2)}))
    asked: list[tuple[str, bool]] = []
    student, teacher = torch.nn.Identity(), torch.nn.ReLU()

    def predict(network: Any, x: Tensor, t: Tensor, conditions: PromptEmbeds, meta: Any) -> Tensor:
        asked.append((type(network).__name__, torch.is_grad_enabled()))
        assert torch.equal(conditions["embeds"], torch.ones(len(x), 2, 2))
        seen.append(x.clone())
        return (0.5 * x if network is teacher else x.sin()).requires_grad_(torch.is_grad_enabled())

    seen: list[Tensor] = []
    setting.method.loss(student, batch)
    setting.spec.predict = predict  # type: ignore[method-assign]
    setting.method.reference = lambda _: nullcontext(teacher)
    [prior] = setting.method._priors([batch])
    loss, metrics = prior.own_loss(student, prior)
    assert asked == [("ReLU", False), ("Identity", True)]
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], setting.seen[0][0])  # as the clips' own loss saw them
    expected = [e["x"] for e in derive(setting, family, batch, "train", uniform)]
    difference = sum(((x.sin() - 0.5 * x) ** 2).mean() for x in expected) / 3
    close(loss, 3.0 * 0.75 * difference)
    close(metrics["prior_loss"], 0.75 * difference)
    assert loss.requires_grad
    pieces = prior.split(2)
    close(sum(piece.own_loss(student, piece)[0] for piece in pieces), loss.detach())
    assert [len(piece) for piece in pieces] == [1, 2]
    assert prior.latent_size == batch.latent_size


@pytest.mark.parametrize("family", ["ltx_video", "cogvideox"])
def test_eval_loss_is_per_sample_at_the_given_level(family: str, tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo(family), family, flow_weighting_scheme="cosmap" if family == "ltx_video" else "none")
    batch = make_batch(setting, weight=0.5)
    losses = setting.method.eval_loss(torch.nn.Identity(), batch, 0.3)
    expected = derive(setting, family, batch, "eval", lambda generator: 0.3)
    close(setting.seen[0][0], torch.stack([e["x"] for e in expected]))
    close(losses, [((answer(i, e["x"].shape) - e["target"]) ** 2).mean() for i, e in enumerate(expected)])


@pytest.mark.parametrize(
    ("scheme", "weight"),
    [
        ("sigma_sqrt", lambda s: min(s**-2, 4.0)),
        ("cosmap", lambda s: min(2 / (math.pi * (1 - 2 * s + 2 * s * s)), 4.0)),
        ("uniform", lambda s: 1.0),
    ],
)
def test_weights_multiply_each_sample(
    scheme: str, weight: Callable[[float], float], tiny_repo: Callable[..., Path]
) -> None:
    setting = Setting(
        tiny_repo("hunyuan_video"), "hunyuan_video", flow_weighting_scheme=scheme, loss_weight_max=4.0, flow_shift=3.0
    )

    def shifted(generator: torch.Generator) -> float:
        u = uniform(generator)
        return 3 * u / (1 + 2 * u)

    batch = make_batch(setting)
    loss, _ = setting.method.loss(torch.nn.Identity(), batch)
    expected = derive(setting, "hunyuan_video", batch, "train", shifted)
    close(setting.seen[0][1], [e["t"] for e in expected])
    errors = [((answer(i, e["x"].shape) - e["target"]) ** 2).mean() * weight(e["t"]) for i, e in enumerate(expected)]
    close(loss, sum(errors) / 3)


def test_resolution_shift_counts_tokens(tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(
        tiny_repo("hunyuan_video"), "hunyuan_video", flow_resolution_shifting=True, flow_base_seq_len=4,
        flow_max_seq_len=20, flow_base_shift=0.5, flow_max_shift=2.5,
    )  # fmt: skip
    batch = make_batch(setting)
    setting.method.loss(torch.nn.Identity(), batch)
    tokens = 3 * 4 * 4 / 4  # 12: half way
    shift = math.exp(0.5 + (tokens - 4) / 16 * 2.0)

    def shifted(generator: torch.Generator) -> float:
        u = uniform(generator)
        return shift * u / (1 + (shift - 1) * u)

    close(setting.seen[0][1], [e["t"] for e in derive(setting, "hunyuan_video", batch, "train", shifted)])


def test_a_first_frame_given_as_tokens_is_clean_and_leaves_the_loss(tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo("ltx_video"), "ltx_video", given="first=0.5")
    keys = [(0, item) for item in range(6)]
    batch = make_batch(setting, keys=keys)
    loss, _ = setting.method.loss(torch.nn.Identity(), batch)
    ((x, t, _, meta),) = setting.seen
    given = [random.Random(derive_seed(SEED, "train", "first_frame", *key)).random() < 0.5 for key in keys]
    assert 0 < sum(given) < 6
    assert not meta.extra
    assert t.shape == (6, 3)
    errors = []
    for row, expected in enumerate(derive(setting, "ltx_video", batch, "train", uniform)):
        noisy, error = expected["x"].clone(), (answer(row, expected["x"].shape) - expected["target"]) ** 2
        times = [expected["t"]] * 3
        if given[row]:
            noisy[:, 0] = expected["x0"][:, 0]
            times[0] = 0.0
            error = error[:, 1:]
        close(x[row], noisy)
        close(t[row], times)
        errors.append(error.mean())
    close(loss, sum(errors) / 6)


#: Latent frames that each kind gives of five; the others draw theirs.
GIVEN = {
    "first": {0}, "last": {4}, "first+last": {0, 4}, "prefix:5": {0, 1, 2}, "suffix:4": {3, 4}, "prefix": {0},
    "suffix": {4}, "prefix+suffix": {0, 4}, "frame": None, "span": None, "interpolate": None, "random": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", GIVEN)
def test_frames_of_every_kind_are_clean_and_leave_the_loss(kind: str, tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo("ltx_video"), "ltx_video", given=f"{kind}=1", window_context=2, window=9)
    assert set(GIVEN) == set(KINDS) - {"prefix", "suffix"} | {"prefix", "prefix:5", "suffix", "suffix:4"}
    setting.method.frames_per_latent = 2
    within = (1, 4 + (3 << 32))  # the fourth window of item 4
    batch = make_batch(setting, frames=5, keys=[(0, 0), (0, 1), (0, 2), (3, 0), within], within=[within])
    loss, _ = setting.method.loss(torch.nn.Identity(), batch)
    loss.backward()
    ((x, t, _, meta),), (answers,) = setting.seen, setting.answers
    assert not meta.extra
    assert t.shape == (5, 5)
    errors = []
    for row, expected in enumerate(derive(setting, "ltx_video", batch, "train", uniform)):
        given = {frame for frame in range(5) if t[row, frame] == 0.0}
        if batch.sample_keys[row] == within:
            assert given == {0, 1}  # its context, whatever else is drawn
        elif GIVEN[kind] is not None:
            assert given == GIVEN[kind]
        else:
            rng = random.Random(derive_seed(SEED, "train", "first_frame", *batch.sample_keys[row]))
            assert given == set(draw_frames(setting.method.conditioning_modes, 5, 2, rng))
        rest = [frame for frame in range(5) if frame not in given]
        for frame in range(5):
            close(x[row, :, frame], expected["x0" if frame in given else "x"][:, frame])
            assert bool(answers.grad[row, :, frame].any()) == (frame in rest)
        close(t[row, rest], [expected["t"]] * len(rest))
        errors.append(((answer(row, expected["x"].shape) - expected["target"]) ** 2)[:, rest].mean())
    close(loss, sum(errors) / 5)


def test_chunks_have_no_context_and_evaluation_draws_frames_of_its_own(tiny_repo: Callable[..., Path]) -> None:
    keys = [(0, item + (1 << 32)) for item in range(12)]
    setting = Setting(tiny_repo("ltx_video"), "ltx_video", given="first=0.5", window_context=2)
    batch = make_batch(setting, frames=5, keys=keys)
    setting.method.loss(torch.nn.Identity(), batch)
    setting.method.eval_loss(torch.nn.Identity(), batch, 0.5)
    for (_, t, _, _), purpose in zip(setting.seen, ("train", "eval"), strict=True):
        coins = [random.Random(derive_seed(SEED, purpose, "first_frame", *key)).random() for key in keys]
        assert ((t == 0).nonzero() == torch.tensor([[k, 0] for k, coin in enumerate(coins) if coin < 0.5])).all()


def test_an_image_has_no_first_frame_to_give(tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo("ltx_video"), "ltx_video", given="first=1")
    batch = make_batch(setting, frames=1)
    loss, _ = setting.method.loss(torch.nn.Identity(), batch)
    expected = derive(setting, "ltx_video", batch, "train", uniform)
    close(setting.seen[0][1], [e["t"] for e in expected])
    close(loss, sum(((answer(i, e["x"].shape) - e["target"]) ** 2).mean() for i, e in enumerate(expected)) / 3)


@pytest.mark.parametrize(("family", "first_frame_p"), [("ltx_video", 1.0), ("ltx_video", 0.0), ("cogvideox", 0.0)])
def test_every_latent_frame_has_a_noise_level_of_its_own(
    family: str, first_frame_p: float, tiny_repo: Callable[..., Path]
) -> None:
    """Diffusion forcing: each frame is noised, weighted and averaged by itself, except a clean conditioning frame."""
    scheme = "cosmap" if family == "ltx_video" else "none"
    setting = Setting(tiny_repo(family), family, given=f"first={first_frame_p}", flow_weighting_scheme=scheme)
    setting.spec.noise_per = "frame"
    batch = make_batch(setting)
    loss, _ = setting.method.loss(torch.nn.Identity(), batch)
    levels = setting.method.eval_loss(torch.nn.Identity(), batch, 0.3)
    (x, t, *_), (_, evaluated, *_) = setting.seen
    assert t.shape == evaluated.shape == (3, 3)
    first = int(first_frame_p)
    drawn: list[list[float]] = []

    def quantiles(generator: torch.Generator) -> float:
        drawn.append([uniform(generator) for _ in range(3)])
        return 0.0

    errors, at_level = [], []
    for row, clean in enumerate(derive(setting, family, batch, "train", quantiles)):
        times = torch.tensor([min(int(u * 1000), 999) if family == "cogvideox" else u for u in drawn[row]]).double()
        alpha, sigma = 1 - times, times
        if family == "cogvideox":
            alpha_bar = setting.scheduler.alphas_cumprod.double()[times.long()]
            alpha, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
        # At its lowest level the derivation has x = x0 for flow matching, from which the noise follows by the target.
        low = setting.scheduler.alphas_cumprod.double()[0] if family == "cogvideox" else torch.tensor(1.0).double()
        eps = clean["target"] + clean["x0"] if family == "ltx_video" else (
            clean["x"] - low.sqrt() * clean["x0"]) / (1 - low).sqrt()  # fmt: skip
        a, s = alpha.view(1, 3, 1, 1), sigma.view(1, 3, 1, 1)
        noisy = a * clean["x0"] + s * eps
        noisy[:, :first] = clean["x0"][:, :first]
        close(x[row], noisy)
        close(t[row, first:], times[first:])
        close(t[row, :first], times[:first] * 0)
        target = eps - clean["x0"] if family == "ltx_video" else a * eps - s * clean["x0"]
        error = ((answer(row, target.shape) - target) ** 2).mean(dim=(0, 2, 3))
        weight = 2 / (math.pi * (1 - 2 * times + 2 * times**2)) if scheme == "cosmap" else torch.ones(3)
        errors.append((error * weight)[first:].mean())
        at_level.append(0.3 * 1000 if family == "cogvideox" else 0.3)
    close(loss, sum(errors) / 3)
    close(evaluated[:, first:], torch.tensor(at_level)[:, None].expand(3, 3)[:, first:])
    assert levels.shape == (3,)


def test_a_section_of_the_clip_is_predicted_and_the_rest_given(tiny_repo: Callable[..., Path]) -> None:
    """Its noise, its tokens and its loss are those of the section; both are drawn from the clip's own generator."""
    setting = Setting(
        tiny_repo("ltx_video"), "ltx_video", flow_resolution_shifting=True, flow_base_seq_len=4, flow_max_seq_len=12,
        flow_base_shift=0.5, flow_max_shift=2.5,
    )  # fmt: skip
    starts: list[int] = []

    def section(latents: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, dict[str, Tensor]]:
        starts[:] = [int(torch.randint(2, (), generator=generator)) for generator in generators]
        x0 = torch.stack([clip[:, start : start + 2] for clip, start in zip(latents, starts, strict=True)])
        return x0, {"history": latents[:, :, :1]}

    setting.spec.section = section  # type: ignore[method-assign]
    batch = make_batch(setting)
    loss, _ = setting.method.loss(torch.nn.Identity(), batch)
    ((x, t, _, meta),) = setting.seen
    assert x.shape[2] == 2
    tokens = 2 * 4 * 4 / 4  # 8: half way
    shift = math.exp(0.5 + (tokens - 4) / 8 * 2.0)
    errors = []
    for row, (epoch, item) in enumerate(batch.sample_keys):
        generator = torch.Generator().manual_seed(derive_seed(SEED, "train", epoch, item))
        mean, logvar = batch.moments[row].double().chunk(2)
        clip = mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=generator).double()
        clip = normalize("ltx_video", setting.vae, clip)
        start = int(torch.randint(2, (), generator=generator))
        x0, eps = clip[:, start : start + 2], torch.randn(x[row].shape, generator=generator).double()
        u = uniform(generator)
        u = shift * u / (1 + (shift - 1) * u)
        close(t[row], u)
        close(x[row], (1 - u) * x0 + u * eps)
        close(meta.extra["history"][row], clip[:, :1])
        errors.append(((answer(row, x0.shape) - (eps - x0)) ** 2).mean())
        assert start == starts[row]
    close(loss, sum(errors) / 3)


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_a_first_frame_given_as_channels_is_clean_or_zero(probability: float, tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo("cogvideox", version="i2v"), "cogvideox", given=f"first={probability}")
    keys = [(1, item) for item in range(6)]
    batch = make_batch(setting, keys=keys)
    loss, _ = setting.method.loss(torch.nn.Identity(), batch)
    ((_, t, _, meta),) = setting.seen
    given = [random.Random(derive_seed(SEED, "train", "first_frame", *key)).random() < probability for key in keys]
    mean = batch.clip["first_frame_moments"].double().chunk(2, dim=1)[0] * setting.vae.config.scaling_factor
    close(
        meta.extra["first_frame"],
        torch.stack([m if g else torch.zeros_like(m) for m, g in zip(mean, given, strict=True)]),
    )
    # The clip itself is noised and predicted whole.
    expected = derive(setting, "cogvideox", batch, "train", uniform)
    close(t, [e["t"] for e in expected])
    close(loss, sum(((answer(i, e["x"].shape) - e["target"]) ** 2).mean() for i, e in enumerate(expected)) / 6)


@pytest.mark.parametrize("family", ["cogvideox", "hunyuan_video"])
def test_frames_of_every_kind_are_told_on_channels_and_stay_in_the_loss(
    family: str, tiny_repo: Callable[..., Path]
) -> None:
    """The first frame as it was encoded alone, every other one as the mean of the clip's moments."""
    repository, within = tiny_repo(family, version="i2v"), (1, 4 + (3 << 32))  # the fourth window of item 4
    keys = [(0, 0), (0, 1), (2, 3), within]
    for kind, known in GIVEN.items():
        setting = Setting(repository, family, given=f"{kind}=1", window_context=2, window=9)
        setting.method.frames_per_latent = 2
        batch = make_batch(setting, frames=5, keys=keys, within=[within])
        loss, _ = setting.method.loss(torch.nn.Identity(), batch)
        ((x, t, _, meta),) = setting.seen
        errors = []
        for row, expected in enumerate(derive(setting, family, batch, "train", uniform)):
            rng = random.Random(derive_seed(SEED, "train", "first_frame", *keys[row]))
            drawn = set(draw_frames(setting.method.conditioning_modes, 5, 2, rng)) if known is None else known
            given = {0, 1} if keys[row] == within else drawn
            mean, alone = (m[row].double().chunk(2)[0] for m in (batch.moments, batch.clip["first_frame_moments"]))
            shown = [frame in given and frame > 0 for frame in range(5)]
            further = setting.vae.config.scaling_factor * mean * torch.tensor(shown)[:, None, None]
            close(meta.extra["further_frames"][row], further)
            close(meta.extra["first_frame"][row], setting.vae.config.scaling_factor * alone * (0 in given))
            close(x[row], expected["x"])
            close(t[row], expected["t"])
            errors.append(((answer(row, expected["x"].shape) - expected["target"]) ** 2).mean())
        close(loss, sum(errors) / 4)


def test_frames_that_make_patches_whole_are_not_given(tiny_repo: Callable[..., Path]) -> None:
    """CogVideoX 1.5 denoises a frame before the three of these clips: the last one is the third all the same."""
    setting, seen = Setting(tiny_repo("cogvideox", version="1.5"), "cogvideox"), []
    setting.method.conditioning_modes = read_frame_conditioning("last=1")
    setting.spec.condition = (  # type: ignore[method-assign]
        lambda batch, x0, given, _: seen.append((x0.shape[2], given)) or (batch.meta, None)
    )
    setting.method.loss(torch.nn.Identity(), make_batch(setting))
    [(denoised, given)] = seen
    assert denoised == 4
    assert [tuple(frames) for frames in given] == [(2,)] * 3


def test_randomness_belongs_to_the_sample_not_to_its_place(tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo("ltx_video"), "ltx_video")
    setting.method.loss(torch.nn.Identity(), make_batch(setting))
    setting.method.loss(torch.nn.Identity(), make_batch(setting, keys=KEYS[::-1]))
    setting.method.loss(torch.nn.Identity(), make_batch(setting, keys=KEYS[1:2]))
    setting.method.eval_loss(torch.nn.Identity(), make_batch(setting), 0.5)
    (together, t, *_), (reversed_, *_), (alone, *_), (evaluated, *_) = setting.seen
    assert torch.equal(together, reversed_.flip(0))
    assert torch.equal(together[1:2], alone)
    assert len(set(t.tolist())) == 3  # (0, 3) and (2, 3) are the same clip in two epochs
    assert not torch.equal(together, evaluated)


def test_inputs_are_not_changed(tiny_repo: Callable[..., Path]) -> None:
    setting = Setting(tiny_repo("ltx_video"), "ltx_video", given="first=1")
    batch = make_batch(setting)
    copy = replace(batch, moments=batch.moments.clone())
    setting.method.loss(torch.nn.Identity(), batch)
    assert torch.equal(batch.moments, copy.moments)


def test_noise_rows_are_independent() -> None:
    noise = standard_normal([torch.Generator().manual_seed(s) for s in (1, 2, 1)], (3, 5))
    assert noise.shape == (3, 3, 5)
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])


def test_noise_is_drawn_on_the_host_whatever_the_device() -> None:
    """So it is the same on a CPU and on any GPU, and a run continues on another kind of device with the same noise."""
    assert standard_normal([torch.Generator()], (3, 5), device="meta").is_meta  # no generator of its own there


def test_there_is_no_state(tiny_repo: Callable[..., Path]) -> None:
    method = Setting(tiny_repo("ltx_video"), "ltx_video").method
    assert method.state_dict() == {}
    method.load_state_dict({})
    with refused("mismatch", ["x"]):
        method.load_state_dict({"x": 1})
