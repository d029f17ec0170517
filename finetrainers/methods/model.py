"""A loaded model for your own training loops: what a run does with its model, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch import Tensor, nn

from finetrainers.config.root import TrainConfig
from finetrainers.data.buckets.clip import Clip
from finetrainers.data.loading.encode import Encoder, clip_encoder, text_encoder
from finetrainers.data.loading.loader import RawBatch
from finetrainers.diffusion.process import Process
from finetrainers.models.spec import Batch, ModelComponents, ModelSpec, PromptEmbeds, VAEStats, VideoMeta
from finetrainers.parallel.ranks import SingleProcess
from finetrainers.utils.failures import InputError
from finetrainers.utils.process_state import free_memory, restored
from finetrainers.utils.text import quoted, shortened

from .base import MethodParts
from .grpo.prompts.source import decode_clips
from .grpo.rollout.policy import RolloutPolicy, Rollouts
from .sft import SFT, NoisyClips


class Model:
    """A model as a run trains it, from `load_model`, for your own training loops.

    Its components are loaded when they are first used. `network` may be replaced by what wraps it, such as the result
    of `accelerator.prepare`. Noise depends on the seed of the configuration and on the keys of samples alone.

        model = load_model(config)
        for batch in batches(config):
            noisy = model.noise(batch)
            loss = model.mean_loss(model.element_loss(model.predict(noisy), noisy.target), noisy)

    Attributes:
        config: the configuration, with defaults of the model.
        spec: description of the model: sizes, names of components, formulas.
        device: device of the components.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        *,
        device: torch.device,
        load_network: Callable[[], nn.Module],
        load_text_encoders: Callable[[], ModelComponents],
    ) -> None:
        self.config, self.spec, self.device = config, spec, device
        self._load_network, self._load_text_encoders = load_network, load_text_encoders

    # ---- components --------------------------------------------------------------------------------------------

    @cached_property
    def network(self) -> nn.Module:
        """The transformer with its adapter, on the device, in training mode; only trained weights need gradients."""
        return self._plain_network

    @cached_property
    def _plain_network(self) -> nn.Module:
        with restored(waits=True):
            return self._load_network().to(self.device).train()

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that a run would train: those of the adapter, or all of the network."""
        return [parameter for parameter in self.network.parameters() if parameter.requires_grad]

    @cached_property
    def scheduler(self) -> Any:
        """The scheduler of the checkpoint, as diffusers loads it."""
        return self.spec.load_scheduler()

    @cached_property
    def process(self) -> Process:
        """The noise process, with `add_noise(x0, eps, t)`, `target(x0, eps, t)`, `x0_from(pred, x_t, t)` and more."""
        return self.spec.process(self.scheduler)

    @cached_property
    def _text_encoders(self) -> ModelComponents:
        with restored(waits=True):
            return self._load_text_encoders().to(self.device)

    @cached_property
    def _clip_encoders(self) -> ModelComponents:
        with restored(waits=True):
            return self.spec.load_clip_encoders().to(self.device)

    @property
    def vae(self) -> nn.Module:
        """The VAE, frozen, on the device."""
        vae: nn.Module = self._clip_encoders["vae"]
        return vae

    @cached_property
    def _vae_stats(self) -> VAEStats:
        if "_clip_encoders" in vars(self):
            return self.spec.vae_stats(self.vae)
        with restored(waits=True):  # not on the device, where the data may have another VAE
            return self.spec.vae_stats(self.spec.load_vae())

    def free_encoders(self) -> None:
        """Free text encoders and VAE; they are loaded again when they are used."""
        for name in ("_text_encoders", "_clip_encoders", "_encoder"):
            vars(self).pop(name, None)
        free_memory()

    # ---- data --------------------------------------------------------------------------------------------------

    def encode_text(self, captions: Sequence[str]) -> PromptEmbeds:
        """Return the text conditioning of captions, on the device, one row each."""
        _refuse_text(captions)
        with restored(waits=True):
            return text_encoder(self.spec, self._text_encoders)(list(captions)).trimmed().to(self.device)

    def encode(
        self,
        videos: Sequence[Any] | RawBatch,
        captions: Sequence[str] | None = None,
        *,
        fps: float | None = None,
        sample_keys: Sequence[tuple[int, int]] | None = None,
    ) -> Batch:
        """Return latents and text conditions of videos, as training makes them.

        Args:
            videos: of one size: frames `[T, H, W, 3]` uint8, or tensors `[T, 3, H, W]` in [0, 1], as `decode` returns
                them; or a batch of `batches(config, encoded=False)`, with captions, and with caption dropout.
            captions: a caption for each video.
            fps: frames per second; default: those of the model.
            sample_keys: `(epoch, item)` of each video, the source of its noise; default: epoch 0, and its index.

        Raises:
            ValueError: the videos, their number or their size do not suit the model.
        """
        if isinstance(videos, RawBatch):
            raw = videos
            if not raw.pixels or captions is not None:
                raise InputError("a raw batch must have pixels, and has its own captions", "conflict")
        else:
            raw = self._as_raw(videos, captions or (), fps, sample_keys)
        encoder = replace(self._encoder, is_masked=any(mask is not None for mask in raw.masks))
        with restored(waits=True):
            return encoder(raw, dropout=raw is videos)

    @cached_property
    def _encoder(self) -> Encoder:
        data = self.config.data
        return Encoder(
            text_encoder(self.spec, self._text_encoders), clip_encoder(self.spec, self._clip_encoders, data), data,
            seed=self.config.training.seed, device=self.device, shows_frames=self.spec.facts.text_sees_image,
        )  # fmt: skip

    def _as_raw(
        self, videos: Sequence[Any], captions: Sequence[str], fps: float | None,
        sample_keys: Sequence[tuple[int, int]] | None,
    ) -> RawBatch:  # fmt: skip
        keys = [(0, item) for item in range(len(videos))] if sample_keys is None else sample_keys
        counts = {"videos": len(videos), "captions": len(captions), "sample_keys": len(keys)}
        if len(set(counts.values())) != 1 or not len(videos):
            raise InputError(f"each video needs a caption and a key, got {counts}", "mismatch")
        if self.spec.facts.media:
            media = ", ".join(self.spec.facts.media)
            raise InputError(f"{self.spec.name} also takes {media}; encode raw batches of `batches`", "unsupported")
        pixels = [_pixels(video) for video in videos]
        sizes = {tuple(video.shape[1:]) for video in pixels}
        geometry, (frames, height, width) = self.spec.facts.geometry, next(iter(sizes))
        if problems := geometry.problems(frames, height, width) if len(sizes) == 1 else [f"of several sizes: {sizes}"]:
            raise InputError(f"videos: {'; '.join(problems)}", "invalid")
        clips = [
            Clip(
                index=item, path=Path("video"), caption=caption, kind="image" if frames == 1 else "video",
                bucket=(frames, height, width), fps=fps or geometry.fps, num_frames=frames,
                source_fps=fps or geometry.fps, width=width, height=height,
            )
            for (_, item), caption in zip(keys, captions, strict=True)
        ]  # fmt: skip
        return RawBatch(tuple(clips), tuple(keys), 1.0, pixels=tuple(pixels), masks=(None,) * len(clips))

    def decode(self, latents: Tensor) -> Tensor:
        """Return videos `[B, T, 3, H, W]` in [0, 1], on the CPU, of clean latents `[B, C, T', H', W']`."""
        if latents.ndim != 5:
            raise InputError(f"latents must be [B, C, T, H, W], got {list(latents.shape)}", "invalid")
        geometry, (frames, height, width) = self.spec.facts.geometry, latents.shape[2:]
        size = ((frames - 1) * geometry.temporal + 1, height * geometry.spatial, width * geometry.spatial)
        with restored(waits=True):
            return decode_clips(self.spec, self.vae, latents.to(self.device), self._vae_stats, size)

    # ---- losses ------------------------------------------------------------------------------------------------

    @cached_property
    def _supervised(self) -> SFT:
        # Prior preservation is a separate micro-batch of a run, with a reference model.
        section = self.config.sft.model_copy(update={"prior_preservation_weight": 0.0})
        return SFT(self._parts(self.config.model_copy(update={"sft": section})))

    def _parts(self, config: TrainConfig) -> MethodParts[Any]:
        network = self._plain_network
        return MethodParts(
            config=config, spec=self.spec, process=self.process, scheduler=self.scheduler,
            geometry=self.spec.facts.geometry, vae_stats=self._vae_stats, source=None,
            parallel=SingleProcess(self.device), network=network, weights_dtype=next(network.parameters()).dtype,
        )  # fmt: skip

    def noise(self, batch: Batch, *, quantile: float | None = None) -> NoisyClips:
        """Return samples at their noise levels, with `x_t`, `target`, `weight` and more; see `SFT.noise_batch`.

        Args:
            batch: samples; equal keys get equal noise.
            quantile: noise level, 1 being the highest, for all samples; default: drawn for each.
        """
        return self._supervised.noise_batch(_encoded(batch), quantile=quantile)

    def predict(
        self,
        latents: NoisyClips | Tensor,
        times: Tensor | float | None = None,
        conditions: PromptEmbeds | None = None,
        *,
        fps: float | None = None,
    ) -> Tensor:
        """Return the network's prediction, like the noisy latents, in fp32.

        Args:
            latents: from `noise`; or noisy latents `[B, C, T, H, W]`, with times and conditions.
            times: process times `[B]`, or one for all: sigma from 0 to 1 for flow matching, else indices of a schedule.
            conditions: from `encode_text`, or those of a batch.
            fps: frames per second; default: those of the model.

        Raises:
            ValueError: latents without times or conditions.
        """
        if isinstance(latents, NoisyClips):
            return self._supervised.predict(self.network, latents)
        if not isinstance(latents, Tensor):
            raise InputError(f"expected the result of `noise`, or a tensor, got {type(latents).__name__}", "invalid")
        if times is None or conditions is None:
            raise InputError("latents also require times and conditions", "required")
        times = torch.as_tensor(times, device=latents.device)
        times = times.expand(len(latents)) if times.ndim == 0 else times
        rate = torch.full((len(latents),), fps or self.spec.facts.geometry.fps, device=latents.device)
        return self.spec.predict(self.network, latents, times, conditions, VideoMeta(rate)).float()

    def element_loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each element, unreduced; see `SFT.element_loss`."""
        return self._supervised.element_loss(prediction, target)

    def mean_loss(self, error: Tensor, noisy: NoisyClips) -> Tensor:
        """Return the mean of a loss by element, with weights and masks, without conditioning frames."""
        return self._supervised.mean_loss(error, noisy)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of supervised finetuning of a micro-batch, times its share of the optimizer step."""
        return self._supervised.loss(self.network, _encoded(batch))[0]

    def save(self, directory: str | Path) -> Path:
        """Write the LoRA, or the fully finetuned network, in the dtype that it has; return the file, or the directory.

        `sample`, `export` and `init_from` take it; the LoRA's file names its base model. In a program of several
        processes, call it in one.
        """
        root, network = Path(directory), self._plain_network
        root.mkdir(parents=True, exist_ok=True)
        if self.config.training.training_type == "lora":
            weights = {name: tensor.detach().cpu() for name, tensor in get_peft_model_state_dict(network).items()}
            adapters: Any = network.peft_config
            base = self.config.model.pretrained_model_name_or_path
            base = str(Path(base).resolve()) if Path(base).exists() else base
            settings = adapters["default"].to_dict() | {"base_model_name_or_path": base}
            [path] = self.spec.save_lora(root, weights, settings)
            return path
        self.spec.save_full(root, network, {name: tensor.cpu() for name, tensor in network.state_dict().items()})
        return root / self.spec.facts.trained

    # ---- rollouts ----------------------------------------------------------------------------------------------

    @cached_property
    def _policy(self) -> RolloutPolicy:
        return RolloutPolicy(self._parts(self.config))

    @torch.no_grad()
    def rollout(self, prompts: Sequence[str], n: int | None = None, *, number: int = 0) -> Rollouts:
        """Sample n clips of each prompt, with log-probabilities, as reward finetuning samples them.

        Args:
            prompts: prompts of one rollout.
            n: clips of each prompt; default: `num_generations`.
            number: number of the rollout, from 0, which decides its noise and its trained steps.

        Raises:
            ValueError: the method of the configuration does not train the steps of rollouts.
        """
        _refuse_text(prompts)
        count = self.config.grpo.num_generations if n is None else n
        if count < 1 or not prompts:
            raise InputError(f"expected prompts, and n from 1, got {len(prompts)} prompts and n={count}", "invalid")
        encoders, policy = self._text_encoders, self._policy
        was_training = self.network.training
        self.network.eval()  # with dropout, log-probabilities would not be those of the policy
        try:
            with self.spec.experts.on(self.device):
                return policy.sample(self.network, encoders, prompts, count=count, rollout=number)
        finally:
            self.network.train(was_training)

    def log_probs(self, rollouts: Rollouts, transition: int, clips: Sequence[int] | None = None) -> Tensor:
        """Return log-probabilities of sampled transitions under the present network `[B]`, with gradients.

        The network stays in eval mode, as in a run: gradient checkpointing calls it again in backward, without dropout.
        Before an update they are `rollouts.log_probs[clips, transition]`, up to rounding where clips share a start.

        Args:
            rollouts: from `rollout`.
            transition: index among the trained transitions, from 0.
            clips: indices of clips; default: all. Activations of all of them are stored for backward.
        """
        chosen = range(len(rollouts)) if clips is None else clips
        self.network.eval()
        return self._policy.log_probs(self.network, rollouts, transition, chosen)


def _encoded(batch: Any) -> Batch:
    """Return a batch; refuse anything else.

    Raises:
        InputError: it is not one.
    """
    if not isinstance(batch, Batch):
        message = "encode it with `encode`" if isinstance(batch, RawBatch) else "see `encode` and `batches`"
        raise InputError(f"expected a Batch, got {type(batch).__name__}; {message}", "invalid")
    return batch


def _refuse_text(texts: Any) -> None:
    """Refuse a single string, which would count as a list of letters."""
    if isinstance(texts, str):
        raise InputError(f"expected a list of strings, got the string {shortened(quoted(texts), 60)}", "invalid")


def _pixels(video: Any) -> Tensor:
    """Return a video `[3, T, H, W]` of 8-bit pixels or in [-1, 1]; see `Model.encode`.

    Raises:
        InputError: it has another shape or dtype.
    """
    frames = torch.as_tensor(video)
    if frames.ndim == 4 and frames.dtype == torch.uint8 and frames.shape[3] == 3:
        return frames.permute(3, 0, 1, 2)
    if frames.ndim == 4 and frames.is_floating_point() and frames.shape[1] == 3:
        return frames.float().permute(1, 0, 2, 3) * 2 - 1
    message = "a video must be [T, H, W, 3] uint8, or [T, 3, H, W] from 0 to 1"
    raise InputError(f"{message}, got {list(frames.shape)} {str(frames.dtype).removeprefix('torch.')}", "invalid")
