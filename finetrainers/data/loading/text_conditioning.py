"""Text conditioning of captions or prompts, from the cache or from the text encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from finetrainers.config.root import TrainConfig
from finetrainers.models.spec import ModelComponents, ModelSpec
from finetrainers.parallel.ranks import DistributedContext

from ..buckets.clip import TextImageSource
from ..cache.encoder_index import recall_files, remember_files, remember_model
from ..cache.keys import CacheKeys, EncoderEntry
from ..cache.model_fingerprint import model_fingerprint
from .encode import EncodeText, text_encoder
from .precompute import Encoded, precompute_text, precompute_with_images


@dataclass(frozen=True)
class TextConditioning:
    """The text conditioning of a run.

    Attributes:
        keys: names of cache entries; that of the VAE is not known yet.
        encode: the text encoders where they stay loaded, or None if every text is in the cache.
        encoded: counts of encoding beforehand, on all ranks together.
    """

    keys: CacheKeys
    encode: EncodeText | None
    encoded: Encoded


class TextCache:
    """Prompts of a run, which are encoded once and kept on disk."""

    def __init__(
        self, texts: Sequence[str], noun: str, config: TrainConfig, *, spec: ModelSpec, parallel: DistributedContext,
        shown: Sequence[tuple[str, TextImageSource]] | None = None, needs_empty: bool = True,
    ) -> None:  # fmt: skip
        """Args:
        texts: all prompts.
        noun: their name in messages.
        config: the run.
        spec: of the model.
        parallel: the processes of the run, which share the work.
        shown: the prompts and the image that each is encoded with, or None if text encoders do not see images.
        needs_empty: whether the empty prompt is also needed.
        """
        self.texts = texts if shown is None else ()
        self.texts_with_images = set(shown or ())
        drops_captions = config.data.caption_dropout_p > 0 and config.data.caption_dropout_technique == "empty"
        if self.texts_with_images and drops_captions:
            self.texts_with_images |= {("", image) for _, image in self.texts_with_images}
        self.empty = ("",) if needs_empty else ()
        self.noun = noun
        self.config = config
        self.spec = spec
        self.parallel = parallel
        self._directory = cache_directory(config)
        self._keys = replace(CacheKeys.of(self._directory, config), texts_see_images=shown is not None)

    def find_cached(self) -> TextConditioning | None:
        """Return all prompt embeddings if the cache has them on all ranks, or None if the text encoders must be loaded.

        The encoders are identified by their files, until these change after they were loaded for this cache.
        """
        self._keys.cache.hold()
        inputs: set[tuple[str, TextImageSource | None]] = {(text, None) for text in (*self.empty, *self.texts)}
        inputs |= self.texts_with_images
        if not inputs:  # every text came encoded
            return TextConditioning(self._keys, None, Encoded())
        identity = recall_files(self._directory, self.spec)
        keys = replace(self._keys, text_identity=identity or "")
        with self.parallel.raise_on_all_ranks("reading the cache"):
            if identity is not None:
                keys.digests.learn({image.path for _, image in self.texts_with_images})
                if keys.cache.missing(keys.text(*encoder_input) for encoder_input in inputs):
                    identity = None
        if set(self.parallel.gather_objects([identity])) != {identity} or identity is None:
            return None
        return TextConditioning(keys, None, Encoded(found=len(inputs)))

    def encode(self, encoders: ModelComponents) -> TextConditioning:
        """Encode the prompts that the cache does not have, a share on each rank, and return all embeddings."""
        self._keys.cache.hold()
        # The shapes depend on prompt lengths and templates, which the fingerprint of the encoders does not cover.
        shapes = {name: list(t.shape) for name, t in self.spec.encode_text(encoders, ["a video"]).tensors.items()}
        named = {} if self.spec.text_version is None else {"text": self.spec.text_version}
        identity = model_fingerprint(encoders.modules, family=self.spec.name, shapes=shapes, **named)
        keys = replace(self._keys, text_identity=identity)

        encoded = precompute_text(
            self.texts, partial(self.spec.encode_text, encoders), keys, self.parallel, noun=self.noun
        )
        if self.texts_with_images:
            encoded += precompute_with_images(
                self.texts_with_images, partial(self.spec.encode_with_images, encoders), keys, self.parallel,
                optional=bool(self.config.data.max_bad_share),
            )  # fmt: skip
        if self.parallel.rank == 0:
            remember_model(self._directory, self.config.model, "text", EncoderEntry(keys.text_identity))
            remember_files(self._directory, self.spec, keys.text_identity)
        return TextConditioning(keys, None, encoded)

    def encode_on_demand(self, encoders: ModelComponents) -> TextConditioning:
        """Return conditioning by encoders that stay loaded; nothing is encoded beforehand."""
        return TextConditioning(self._keys, text_encoder(self.spec, encoders), Encoded())


def cache_directory(config: TrainConfig) -> Path:
    """Return the directory of the cache: prompt embeddings, latents, and the index of encoders."""
    return config.data.precompute_dir or config.run.output_dir / "precomputed"
