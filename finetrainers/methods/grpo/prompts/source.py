"""The prompts, their text conditioning from the cache, and the VAE that decodes latents into clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from finetrainers.config.root import TrainConfig
from finetrainers.data.buckets.clip import ConditioningImage
from finetrainers.data.cache.store import CacheError
from finetrainers.data.loading.position import DataPosition
from finetrainers.data.loading.precompute import Encoded
from finetrainers.data.loading.text_conditioning import TextConditioning
from finetrainers.data.reading.items import DataError
from finetrainers.models.spec import ModelComponents, ModelSpec, PromptEmbeds, VAEStats, decode_gradient
from finetrainers.utils.text import plural

from .images import ImageInputs, RewardImages, encode_images
from .plan import PromptPlan
from .prompts import Prompt, PromptOrder
from .selective_rollouts import SelectiveRollouts

T = TypeVar("T")

_MASK = "prompt_attention_mask"
#: Bytes of text conditioning kept in memory, so that a prompt is not read again for each of its micro-batches.
_MEMORY = 256 * 2**20
#: Images whose latents are stored in memory.
_IMAGES = 64


class PromptSource:
    """The prompts of a run; see `BatchSource`."""

    precomputed: Mapping[str, Encoded] = MappingProxyType({})
    #: Latent frames that a conditioning image provides, so that they are not sampled.
    start_frames = 0

    def __init__(
        self,
        plan: PromptPlan,
        config: TrainConfig,
        *,
        spec: ModelSpec,
        parallel: Any,
        texts: TextConditioning,
        clip_encoders: ModelComponents,
        data_position: DataPosition,
    ) -> None:
        """Args:
        plan: the prompts.
        config: the run.
        spec: the model.
        parallel: the processes of the run.
        texts: the prompt embeddings.
        clip_encoders: models including the VAE, which decodes clips and encodes the prompts' images.
        data_position: position in the prompts where the run starts.
        """
        self.plan = plan
        self.spec = spec
        self.parallel = parallel
        self.vae = clip_encoders["vae"]
        self.updates = config.grpo.updates_per_rollout
        self.first_rollout = data_position.first_step // self.updates  # at which the walk through the prompts began
        self.order = PromptOrder(
            len(plan.prompts), prompts_per_step=config.grpo.prompts_per_step, seed=data_position.seed
        )
        self.selection: SelectiveRollouts | None = None
        if config.grpo.selective_rollouts < 1:
            walk = [plan.fingerprint, data_position.seed, self.first_rollout]
            self.selection = SelectiveRollouts(self.order, probability=config.grpo.selective_rollouts, walk=walk)
        self._guided = config.grpo.rollout_cfg != 1.0
        self._keys = texts.keys
        self._cache = texts.keys.cache
        self._has_empty = plan.needs_empty_text or plan.empty is not None
        self._length = self._find_longest()
        self._image: Callable[[ConditioningImage], ImageInputs] | None = None
        self._reward_images: RewardImages | None = None
        if plan.images:
            self._take_images(config, clip_encoders)
        row = sum(tensor.nbytes for tensor in self._cut_row(self._readable_prompt).tensors.values())
        self._row = lru_cache(maxsize=max(1, _MEMORY // row))(self._cut_row)

    def _take_images(self, config: TrainConfig, clip_encoders: ModelComponents) -> None:
        """Encode the prompts' images."""
        pictures = [
            image for prompt in (*self.plan.prompts, *self.plan.eval_prompts) if (image := self.plan.picture(prompt))
        ]
        images = encode_images(
            pictures, self.plan.size, config,
            spec=self.spec, parallel=self.parallel, keys=self._keys, clip_encoders=clip_encoders,
        )  # fmt: skip
        self._image = lru_cache(maxsize=_IMAGES)(images.network_inputs)
        self._reward_images = RewardImages(self._keys)
        start = self._image(pictures[0])[1]
        self.start_frames = 0 if start is None else start.shape[2]

    @property
    def _readable_prompt(self) -> Prompt | None:
        """A prompt that can be read whatever was encoded; None stands for the empty one."""
        return None if self._has_empty else self.plan.prompts[0]

    def _find_longest(self) -> int | None:
        """Return the tokens of the longest prompt, on all ranks, or None if prompts have no mask.

        One length for all batches makes a clip's numbers independent of the others in its batch. Only masks of the
        prompts are read, not embeddings, which may take hundreds of gigabytes in all; each rank reads its share.
        """
        failure: Exception | None = None
        lengths, damaged = [0], list[str]()
        try:
            if _MASK in self._read(self._readable_prompt).tensors:
                prompts = (*self.plan.prompts, *self.plan.eval_prompts, self._readable_prompt)
                for prompt in prompts[self.parallel.rank :: self.parallel.world_size]:
                    try:
                        lengths.append(self._read_length(prompt))
                    except DataError as error:
                        damaged.append(str(error))
        except Exception as error:
            failure = error
        if damaged:
            failure = DataError(f"{plural(len(damaged), 'encoded prompt')} cannot be read", damaged, "unreadable")
        self.parallel.raise_if_any_failed(failure, "reading the prompts")
        return max(self.parallel.gather_objects([max(lengths)])) or None

    def _read_length(self, prompt: Prompt | None) -> int:
        """Return the tokens of a prompt, rounded up as batches are."""
        prompt = self.plan.empty if prompt is None else prompt
        if prompt is not None and prompt.embedding is not None:
            mask = self._read_files(prompt, mapped=True)[_MASK]  # which also fails for a truncated file of embeddings
        else:
            mask = self._require(prompt, self._cache.peek(self._cache_key(prompt), _MASK))
        return PromptEmbeds({_MASK: mask}).trimmed()[_MASK].shape[1]

    def steps_for_epochs(self, epochs: int) -> int:
        """Return the optimizer steps in which every prompt is sampled at least `epochs` times."""
        rollouts = -(-epochs * self.order.num_prompts // self.order.prompts_per_step)
        return (self.first_rollout + rollouts) * self.updates

    # ---- used by methods ---------------------------------------------------------------------------------------

    def rollout_prompts(self, rollout: int) -> list[Prompt]:
        """Return the prompts of a rollout, in the order of its groups."""
        order = self.order if self.selection is None else self.selection
        return [self.plan.prompts[i] for i in order.prompt_indices(rollout - self.first_rollout)]

    def skipped(self, rollout: int, teaches: Sequence[bool | None]) -> int:
        """Return the number of prompts skipped for a rollout, all of whose clips are scored.

        See `SelectiveRollouts.observe`.
        """
        assert self.selection is not None
        return self.selection.observe(rollout - self.first_rollout, teaches)

    def conditions(self, prompts: Sequence[Prompt]) -> PromptEmbeds:
        """Return text and image conditioning on the device, one row for each prompt.

        With guidance, a row of the empty prompt for each prompt follows, with that prompt's image, as in pipelines.
        """
        rows = [self._with_image(self._row(prompt), prompt) for prompt in prompts]
        empty = [self._with_image(self._row(None), prompt) for prompt in prompts] if self._guided else []
        return PromptEmbeds.cat(rows + empty).to(self.parallel.device)

    def reward_images(self, prompts: Sequence[Prompt]) -> Tensor | None:
        """Return the prompts' images for rewards, `[B, 3, H, W]` in [0, 1] on the CPU, or None if there are none."""
        if self._reward_images is None:
            return None
        return self._reward_images([image for prompt in prompts if (image := self.plan.picture(prompt)) is not None])

    def _with_image(self, row: PromptEmbeds, prompt: Prompt) -> PromptEmbeds:
        image = self.plan.picture(prompt)
        if self._image is None or image is None:
            return row
        extra, start = self._image(image)
        return replace(row, extra=extra, start=start)

    def decode(self, latents: Tensor, vae_stats: VAEStats) -> Tensor:
        """Return clips `[B, T, C, H, W]` in [0, 1] on the CPU, decoded from normalized latents."""
        return decode_clips(self.spec, self.vae, latents, vae_stats, self.plan.size)

    def decode_gradient(
        self, latents: Tensor, vae_stats: VAEStats, score: Callable[[Tensor], tuple[Tensor, T]], *, checkpointing: bool
    ) -> tuple[Tensor, T]:
        """Decode latents, score the clips, and return the gradient and the scores; see `models.decoding`.

        `score` takes clips `[B, T, C, H, W]` in [0, 1] on the device.
        """
        return decode_gradient(
            self.spec,
            self.vae,
            latents,
            vae_stats,
            lambda video: score(video.transpose(1, 2)),
            checkpointing=checkpointing,
        )

    def _cut_row(self, prompt: Prompt | None) -> PromptEmbeds:
        """Return a row as batches hold it; of the empty prompt for None."""
        return self._read(prompt).cut(self._length)

    def _read(self, prompt: Prompt | None) -> PromptEmbeds:
        """Return a row as it is on disk."""
        prompt = self.plan.empty if prompt is None else prompt
        if prompt is not None and prompt.embedding is not None:
            return self._read_files(prompt)
        return PromptEmbeds(self._require(prompt, self._cache.get(self._cache_key(prompt))))

    def _read_files(self, prompt: Prompt, *, mapped: bool = False) -> PromptEmbeds:
        """Return a row read from another tool's files.

        If they are mapped, parts that are not used are not read, and the files must not change meanwhile.
        """
        embedding, mask = (
            _load_tensor(path, prompt.where, mapped=mapped)
            for path in (prompt.embedding, prompt.mask)
            if path is not None
        )
        return self.spec.given_text(embedding, mask)

    def _cache_key(self, prompt: Prompt | None) -> str:
        if prompt is None:
            return self._keys.text("")
        return self._keys.text(prompt.text, self.plan.picture(prompt) if self._keys.texts_see_images else None)

    def _require(self, prompt: Prompt | None, entry: T | None) -> T:
        """Return the cache entry of a prompt.

        Raises:
            CacheError: there is no entry.
        """
        if entry is None:
            name = "the empty prompt" if prompt is None else f"the prompt {prompt.text!r}"
            raise CacheError(
                f"the prompt embeddings of {name} have disappeared from {self._cache.directory}; start the run again"
            )
        return entry


def decode_clips(
    spec: ModelSpec, vae: nn.Module, latents: Tensor, vae_stats: VAEStats, size: tuple[int, int, int]
) -> Tensor:
    """Return clips `[B, T, C, H, W]` in [0, 1] on the CPU, decoded from normalized latents of a size in pixels.

    Where the VAE takes clips one by one, pixels, which are large, are also moved one by one.
    """
    one_by_one, _ = spec.vae_mode(size, batch=len(latents))
    parts = latents.split(1 if one_by_one else len(latents))
    return torch.cat([spec.decode(vae, part, vae_stats).transpose(1, 2).float().cpu() for part in parts])


def _load_tensor(path: Path, where: str, *, mapped: bool) -> Tensor:
    """Load a tensor from another tool's file.

    Raises:
        DataError: the file does not hold a tensor, or is damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and is_zipfile(path))
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises errors of many kinds
        reason = f"is not a tensor file, or is truncated ({_first_sentence(error)})"
        problem = reason if path.stat().st_size else "is empty"
        message = f"{where}: {path} {problem}; encode the prompts again (finetrainers prepare)"
        raise DataError(message, kind="unreadable") from None


def _first_sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0].split(". ")[0]
