"""Comparison of a family with its diffusers pipeline, for the tests of families here and in other packages."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch import Tensor, nn

from finetrainers.models.batch import Batch, PromptEmbeds, SampleRequest, VideoMeta
from finetrainers.models.pixels import MOMENTS
from finetrainers.models.spec import ModelSpec

__all__ = ["forced_arguments", "same_calls"]

_PROMPTS = ("a red ball", "a blue square moves slowly to the left over the dark sea at night")
_STEPS, _GUIDANCE, _SEED = 3, 3.0, 5
#: Difference of a time that a scheduler tells in whole thousandths, and of a step to it.
_FLOORED = 4e-3


def same_calls(spec: ModelSpec, pipeline: Any, *, tolerance: float = 1e-5) -> list[str]:
    """Compare a family with the pipeline of the same checkpoint, in fp32 on the CPU; return the names of what is equal.

    Compared are text conditioning, the times of several steps, the arguments and outputs of the network at them (with
    two experts, of both; from an image, where the checkpoint can start from one), the first step along the prediction
    of a flow-matching model, decoded videos, and complete samples.

    Args:
        spec: the family's spec of the checkpoint, with all dtypes fp32.
        pipeline: the stock pipeline of the checkpoint, loaded in fp32; where there are two, the one without an image.
        tolerance: greatest difference, absolute for numbers around 1 and relative for larger ones.

    Raises:
        AssertionError: something differs; the message names it.
    """
    checkpoint = _Checkpoint(spec, pipeline, tolerance)
    equal = []
    with torch.no_grad():
        if not spec.facts.needs_image:
            equal += checkpoint.compare(with_image=False)
        if spec.image_pipeline_class is not None:
            equal += checkpoint.compare(with_image=True)
    return equal


@dataclass
class _Calls:
    """Calls of a pipeline's networks, and the noise that it began with.

    Attributes:
        arguments: named arguments of each call.
        outputs: prediction of each call.
        noises: tensors that the pipeline has drawn, in its own order of axes.
        times: the scheduler's timestep of each step.
        stepped: sample after each step, in the pipeline's own order of axes.
    """

    arguments: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    noises: list[Tensor] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    stepped: list[Tensor] = field(default_factory=list)


class _Checkpoint:
    """A checkpoint, loaded by its family and by its pipeline, and the inputs of one sample."""

    def __init__(self, spec: ModelSpec, pipeline: Any, tolerance: float) -> None:
        self.spec, self.tolerance, geometry = spec, tolerance, spec.facts.geometry
        self.pipelines = {False: pipeline, True: pipeline}
        image_class = spec.image_pipeline_class
        if image_class is not None and not isinstance(pipeline, image_class):
            self.pipelines[True] = image_class.from_pipe(pipeline)
        frames = 4 * geometry.temporal * geometry.patch_t + 1
        height, width = geometry.sides or (3 * geometry.size_multiple, 2 * geometry.size_multiple)
        self.size = (frames, height, width)
        self.texts, self.encoders = spec.load_text_encoders(), spec.load_clip_encoders()
        self.network = spec.load_transformer(torch.float32)
        pixels = np.random.default_rng(_SEED).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
        self.images = [Image.fromarray(image) for image in pixels]

    def compare(self, *, with_image: bool) -> list[str]:
        """Compare prompt embeddings, calls, decoding and a sample, and return their names."""
        suffix = " from an image" if with_image else ""
        conditions = self._conditions(_PROMPTS, with_image=with_image)
        single = [self._conditions([prompt], with_image=with_image) for prompt in _PROMPTS]
        for name, tensor in conditions.tensors.items():
            self._check(f"{name} of a batch{suffix}", tensor, torch.cat([row[name] for row in single]))
        calls, frames = self._run_pipeline(with_image=with_image)
        x, meta, trained = self._noisy_input(calls.noises[0], with_image=with_image)
        if self.spec.sampling_times is None:
            self._compare_trajectories(suffix, calls, (x, meta, single[0], trained))
            latents = calls.stepped[-1]
        else:
            self._compare_steps(suffix, calls, (x, meta, single[0], trained), with_image=with_image)
            latents = x[:, :, -self.spec.facts.geometry.latent_shape(*self.size)[0] :]
        vae = self.encoders["vae"]
        decoded = self.spec.decode(vae, latents, self.spec.vae_stats(vae))
        self._check(f"decoded video{suffix}", decoded[0].transpose(0, 1), frames)
        own, stock = self._samples(with_image=with_image)
        self._check(f"sample{suffix}", own, stock)
        return [f"{name}{suffix}" for name in ("text", "calls", "decoded video", "sample")]

    def _compare_steps(self, suffix: str, calls: _Calls, inputs: tuple[Any, ...], *, with_image: bool) -> None:
        """Compare the calls at noise that does not change, and the first step of a flow-matching model."""
        x, meta, conditions, trained = inputs
        times = self._process_times(calls.times, with_image=with_image)
        for step, time in enumerate(times):
            prediction = self._compare_call(f"step {step}{suffix}", calls, step, (x, meta, conditions, trained, time))
            if step == 0 and self.spec.facts.is_flow and trained is None:
                # Every solver begins with a straight line. Pipelines that pack latents order them otherwise.
                straight = x + (times[1] - time) * prediction
                ordered = [tensor.float().flatten().sort().values for tensor in (straight, calls.stepped[0])]
                self._check(f"sample after step 0{suffix}", *ordered, tolerance=_FLOORED)

    def _compare_trajectories(self, suffix: str, calls: _Calls, inputs: tuple[Any, ...]) -> None:
        """Compare calls with a time for each latent frame, and the given frames and the first step between them."""
        first, meta, conditions, trained = inputs
        timesteps = self.pipelines[False].scheduler.config.num_train_timesteps
        levels = [call["timestep"] / timesteps for call in calls.arguments]
        for step, (call, t) in enumerate(zip(calls.arguments, levels, strict=True)):
            x = call["hidden_states"]
            if trained is not None:
                conditioned = torch.where(trained[:, None, :, None, None] > 0, x, first)
                self._check(f"given frames of step {step}{suffix}", conditioned, x)
            prediction = self._compare_call(f"step {step}{suffix}", calls, step, (x, meta, conditions, None, t))
            if step == 0:
                straight = x + (levels[1] - t)[:, None, :, None, None] * prediction
                following = calls.arguments[1]["hidden_states"]
                self._check(f"sample after step 0{suffix}", straight, following, tolerance=_FLOORED)

    def _process_times(self, timesteps: Sequence[float], *, with_image: bool) -> list[float]:
        """Return process times of the scheduler's timesteps, after comparing them with `ModelSpec.sampling_times`."""
        spec, scheduler = self.spec, self.pipelines[with_image].scheduler
        tokens = spec.facts.geometry.num_tokens(*self.size)
        own = spec.sampling_times(scheduler, _STEPS, num_tokens=tokens)
        times = torch.tensor(timesteps, dtype=torch.float64)
        if spec.facts.is_flow:
            times = times / scheduler.config.num_train_timesteps
            times = 1 - times if scheduler.config.get("invert_sigmas") else times
        self._check("times of sampling", own.double(), times, tolerance=_FLOORED)
        return times.tolist()

    def _conditions(self, prompts: Sequence[str], *, with_image: bool) -> PromptEmbeds:
        if with_image and self.spec.facts.text_sees_image:
            return self.spec.encode_with_images(self.texts, prompts, [self.images[0]] * len(prompts))
        return self.spec.encode_text(self.texts, prompts)

    def _arguments(self, *, with_image: bool, guidance_scale: float) -> dict[str, Any]:
        """Return arguments of the pipeline's call, after setting a guider's scale where guidance is a component.

        A pipeline without a size takes that of its image.
        """
        frames, height, width = self.size
        names = ("image", "last_image") if self.spec.facts.last_frame else ("image",)
        arguments = {
            "prompt": _PROMPTS[0], "negative_prompt": "", "num_frames": frames, "height": height, "width": width,
            "num_inference_steps": _STEPS, "guidance_scale": guidance_scale,
            "generator": torch.Generator().manual_seed(_SEED), **self.spec.pipeline_arguments,
            **(dict(zip(names, self.images, strict=False)) if with_image else {}),
        }  # fmt: skip
        pipeline = self.pipelines[with_image]
        missing = {"guidance_scale", "height", "width"} - inspect.signature(pipeline.__call__).parameters.keys()
        if "guidance_scale" in missing:
            pipeline.guider = pipeline.guider.new(guidance_scale=guidance_scale)
        return {name: value for name, value in arguments.items() if name not in missing}

    def _run_pipeline(self, *, with_image: bool) -> tuple[_Calls, Tensor]:
        """Run the pipeline over noise that does not change; return its calls, and the frames `[T, 3, H, W]` in [0, 1].

        Its scheduler is made to return each sample as it was given. So the network sees the same noise at every time,
        and however the pipeline packs latents, their values are known.
        """
        pipeline, calls = self.pipelines[with_image], _Calls()
        pipeline.set_progress_bar_config(disable=True)
        stock_step = type(pipeline.scheduler).step

        def keep_sample(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = inspect.signature(stock_step).bind(scheduler, *args, **kwargs).arguments
            if scheduler is not pipeline.scheduler:  # a copy, for another stream
                return stock_step(scheduler, *args, **kwargs)
            calls.times.append(float(arguments["timestep"]))
            outputs = stock_step(scheduler, *args, **kwargs)
            calls.stepped.append(outputs[0])
            return (arguments["sample"], *outputs[1:])

        def keep_latents(_: Any, step: int, t: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            calls.stepped.append(tensors["latents"])
            return {}

        def draw(*args: Any, **kwargs: Any) -> Tensor:
            calls.noises.append(randn_tensor(*args, **kwargs))
            return calls.noises[-1]

        networks = [n for name, n in pipeline.components.items() if name.startswith("transformer") and n is not None]
        with (
            _recorded(networks, calls),
            forced_arguments(networks, self.spec.own_arguments),
            patch.object(type(pipeline.scheduler), "step", keep_sample),
            patch.object(sys.modules[type(pipeline).__module__], "randn_tensor", draw),
            _without_posterior_noise(),
        ):
            arguments = self._arguments(with_image=with_image, guidance_scale=1.0)
            accepted = inspect.signature(pipeline.__call__).parameters
            # Families encode given images as they are.
            arguments |= {name: 0 for name in ("image_crf",) if with_image and name in accepted}
            if "true_cfg_scale" in accepted:
                arguments["true_cfg_scale"] = 1.0  # one call for each step
            if self.spec.sampling_times is None:
                arguments["callback_on_step_end"] = keep_latents
            return calls, pipeline(**arguments, output_type="pt").frames[0]

    def _noisy_input(self, noise: Tensor, *, with_image: bool) -> tuple[Tensor, VideoMeta, Tensor | None]:
        """Return noise `[B, C, T, H, W]` with given frames in their places, the other inputs, and the noisy frames."""
        spec, shape = self.spec, self.spec.facts.geometry.denoised_shape(*self.size)
        axes: list[int] = []
        for length in (1, noise.numel() // math.prod(shape), *shape):
            axes.append(next(axis for axis, n in enumerate(noise.shape) if n == length and axis not in axes))
        x, meta = noise.permute(*axes), VideoMeta(fps=torch.tensor([spec.facts.geometry.fps]))
        if not with_image:
            return x, meta, None
        first, last = (torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in self.images)
        video = first[:, None].repeat(1, self.size[0], 1, 1)
        video[:, -1] = last
        clip, stats = spec.encode_clip(self.encoders, video[None], None), spec.vae_stats(self.encoders["vae"])
        batch = Batch(clip[MOMENTS], PromptEmbeds({}), meta, [(0, 0)], clip)
        x0 = spec.padded(spec.latents(clip[MOMENTS], None, stats))
        meta, trained = spec.condition(batch, x0, [(0,)], stats)
        if trained is not None and spec.encodes_first_frame:
            x0 = torch.cat([meta.extra["first_frame"], x0[:, :, 1:]], dim=2)
        return x if trained is None else torch.where(trained[:, None, :, None, None] > 0, x, x0), meta, trained

    def _compare_call(self, name: str, calls: _Calls, step: int, inputs: tuple[Any, ...]) -> Tensor:
        """Compare arguments and output of the network's call at a step; return the family's prediction."""
        x, meta, conditions, trained, time = inputs
        own = _Calls()
        network = self.spec.network_at(time, self.network) if self.spec.facts.boundary is not None else self.network
        t = time if isinstance(time, Tensor) else torch.tensor([time if self.spec.facts.is_flow else int(time)])
        with _recorded([network], own):
            prediction = self.spec.predict(network, x, t if trained is None else t[:, None] * trained, conditions, meta)
        expected = calls.arguments[step]
        tensors = {n for n, value in {**expected, **own.arguments[0]}.items() if isinstance(value, Tensor)}
        tensors -= self.spec.own_arguments.keys()
        for argument in sorted(tensors):
            self._check(f"{argument} of {name}", own.arguments[0].get(argument), expected.get(argument))
        self._check(f"output of {name}", own.outputs[0], calls.outputs[step])
        assert prediction.shape == x.shape, f"the prediction of {name} has shape {prediction.shape}, not {x.shape}"
        return prediction

    def _samples(self, *, with_image: bool) -> tuple[Tensor, Tensor]:
        """Return the family's sample and the pipeline's, with guidance, `[T, H, W, 3]` each."""
        spec, (frames, height, width) = self.spec, self.size
        stock = self.pipelines[with_image]
        conditions = self._conditions(_PROMPTS[:1], with_image=with_image)
        request = SampleRequest(
            frames, height, width, spec.facts.geometry.fps, _STEPS, _GUIDANCE,
            image=self.images[0] if with_image else None,
            last_image=self.images[1] if with_image and spec.facts.last_frame else None,
        )  # fmt: skip
        arguments = self._arguments(with_image=with_image, guidance_scale=_GUIDANCE)
        if "frame_rate" in inspect.signature(stock.__call__).parameters:
            arguments["frame_rate"] = request.frame_rate
        networks, calls = [n for name, n in stock.components.items() if name.startswith("transformer") and n], _Calls()
        with _recorded(networks, calls), forced_arguments(networks, spec.own_arguments):
            expected = torch.from_numpy(stock(**arguments, output_type="np").frames[0])
        batch = len(calls.arguments[0]["hidden_states"])
        if spec.facts.guidance is None and batch != (2 if spec.guides_in_one_call else 1):
            raise AssertionError(f"guides_in_one_call is {spec.guides_in_one_call}: a guided call has {batch} clips")
        pipeline = spec.pipeline(
            self.network, self.encoders["vae"], stock.scheduler, image_to_video=with_image or spec.facts.needs_image
        )
        pipeline.set_progress_bar_config(disable=True)
        negative, generator = spec.encode_text(self.texts, [""]), torch.Generator().manual_seed(_SEED)
        return torch.from_numpy(np.asarray(spec.sample(pipeline, conditions, negative, request, generator))), expected

    def _check(self, name: str, own: Any, expected: Any, *, tolerance: float | None = None) -> None:
        """Compare two tensors; one may have a value for each row, and the other a value for each element of a row."""
        own, expected = (torch.tensor(value) if isinstance(value, list) else value for value in (own, expected))
        if not (isinstance(own, Tensor) and isinstance(expected, Tensor)):
            raise AssertionError(f"{name}: {_describe(own)} here, {_describe(expected)} in the pipeline")
        own, expected = own.float(), expected.float()
        if own.ndim != expected.ndim:
            own, expected = (
                t.reshape(t.shape + (1,) * (max(own.ndim, expected.ndim) - t.ndim)) for t in (own, expected)
            )
        try:
            own, expected = torch.broadcast_tensors(own, expected)
        except RuntimeError:
            raise AssertionError(f"{name}: shape {[*own.shape]} here, {[*expected.shape]} in the pipeline") from None
        difference = ((own - expected).abs() / expected.abs().clamp(min=1.0)).max()
        if not difference <= (tolerance or self.tolerance):
            raise AssertionError(f"{name}: differs by {difference:.2g} from the pipeline's")


def _describe(value: Any) -> str:
    return f"a tensor {[*value.shape]}" if isinstance(value, Tensor) else repr(value)


@contextmanager
def _recorded(networks: Sequence[nn.Module], calls: _Calls) -> Iterator[None]:
    """Record the calls of networks within the block."""
    hooks = []
    for network in networks:
        record = lambda _, args, kwargs: calls.arguments.append(dict(kwargs))  # noqa: E731
        hooks.append(network.register_forward_pre_hook(record, with_kwargs=True, prepend=True))
        hooks.append(network.register_forward_hook(lambda _, args, output: calls.outputs.append(output[0])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def forced_arguments(networks: Sequence[nn.Module], arguments: Mapping[str, Any]) -> Iterator[None]:
    """Call networks with a family's arguments within the block; None leaves the pipeline's."""
    own = {name: value for name, value in arguments.items() if value is not None}
    hooks = [
        network.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, **own}), with_kwargs=True)
        for network in networks
        if own
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _without_posterior_noise() -> Iterator[None]:
    """Let pipelines take the mean of the VAE's posterior, as samples here do."""
    with patch.object(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode()):
        yield
