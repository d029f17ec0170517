"""Text conditioning of captions or prompts, from the cache or from the text encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from finetrainers.config.root import TrainConfig
from finetrainers.models.spec import Conditions, ModelSpec, Parts
from finetrainers.parallel.ranks import Ranks
from finetrainers.utils.phases import ENCODING_TEXT, phase

from ..buckets.clip import Shown
from ..cache.encoder_index import recall_files, remember_files, remember_model
from ..cache.keys import CacheKeys, EncoderEntry
from ..cache.model_fingerprint import model_fingerprint
from .encode import EncodeText
from .precompute import Encoded, precompute_shown, precompute_text


@dataclass(frozen=True)
class TextConditioning:
    """The text conditioning of a run.

    Attributes:
        keys: names of cache entries; that of the VAE is not known yet.
        encode: the text encoders, where they stay loaded; None: every text is in the cache.
        encoded: what came of encoding beforehand, on all ranks together.
    """

    keys: CacheKeys
    encode: EncodeText | None
    encoded: Encoded


class TextCache:
    """Texts of a run that are encoded once and kept on disk."""

    def __init__(
        self, texts: Sequence[str], noun: str, config: TrainConfig, *, spec: ModelSpec, parallel: Ranks,
        shown: Sequence[tuple[str, Shown]] | None = None, needs_empty: bool = True,
    ) -> None:  # fmt: skip
        """Args:
        texts: all texts.
        noun: what they are, in words.
        config: the run.
        spec: of the model.
        parallel: the processes of the run, which share the work.
        shown: the texts with what each is encoded with, where text encoders see images; else None.
        needs_empty: whether the empty prompt is needed besides.
        """
        self.texts = texts if shown is None else ()
        self.shown = set(shown or ())
        if self.shown and config.data.caption_dropout_p > 0 and config.data.caption_dropout_technique == "empty":
            self.shown |= {("", one) for _, one in self.shown}
        self.empty = ("",) if needs_empty else ()
        self.noun = noun
        self.config = config
        self.spec = spec
        self.parallel = parallel
        self._directory = cache_directory(config)
        self._keys = replace(CacheKeys.of(self._directory, config), texts_see_images=shown is not None)

    def recall(self) -> TextConditioning | None:
        """All texts, if the cache has them on all ranks; None if the text encoders must be loaded.

        The encoders are known by their files, as long as these are as they were when they were loaded for this cache.
        """
        self._keys.cache.hold()
        wanted: set[tuple[str, Shown | None]] = {(text, None) for text in (*self.empty, *self.texts)} | self.shown
        if not wanted:  # every text came encoded
            return TextConditioning(self._keys, None, Encoded())
        found = recall_files(self._directory, self.spec)
        keys = replace(self._keys, text_identity=found or "")
        if found is not None:
            keys.digests.learn({one.path for _, one in self.shown})
            if keys.cache.missing(keys.text(*one) for one in wanted):
                found = None
        if set(self.parallel.gather_objects([found])) != {found} or found is None:
            return None
        return TextConditioning(keys, None, Encoded(found=len(wanted)))

    def encode(self, encoders: Parts) -> TextConditioning:
        """All texts; those that the cache does not have are encoded, by each rank a share."""
        self._keys.cache.hold()
        # The shapes tell of prompt lengths and templates, which are not the encoders' own.
        shapes = {name: list(t.shape) for name, t in self.spec.encode_text(encoders, ["a video"]).tensors.items()}
        keys = replace(
            self._keys, text_identity=model_fingerprint(encoders.modules, family=self.spec.name, shapes=shapes)
        )

        encoded = precompute_text(
            self.texts, partial(self.spec.encode_text, encoders), keys, self.parallel, what=self.noun
        )
        if self.shown:
            encoded += precompute_shown(
                self.shown, partial(self.spec.encode_with_images, encoders), keys, self.parallel,
                optional=bool(self.config.data.max_bad_share),
            )  # fmt: skip
        if self.parallel.rank == 0:
            remember_model(self._directory, self.config.model, "text", EncoderEntry(keys.text_identity))
            remember_files(self._directory, self.spec, keys.text_identity)
        return TextConditioning(keys, None, encoded)

    def live(self, encoders: Parts) -> TextConditioning:
        """Nothing is encoded beforehand: the encoders stay loaded."""

        def encode(captions: Sequence[str], images: Sequence[Tensor] | None = None) -> Conditions:
            if images is None:
                return self.spec.encode_text(encoders, captions)
            return self.spec.encode_with_images(encoders, captions, images)

        return TextConditioning(self._keys, phase(ENCODING_TEXT)(encode), Encoded())


def cache_directory(config: TrainConfig) -> Path:
    """The directory of the cache: encoded texts and clips, and what is known of the encoders."""
    return config.data.precompute_dir or config.run.output_dir / "precomputed"
