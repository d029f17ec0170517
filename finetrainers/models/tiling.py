"""VAE slicing and tiling on OOM: an encode or decode that runs out of memory is retried clip by clip, then on tiles."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from finetrainers.config.sections import ModelSection
from finetrainers.utils.failures import is_out_of_memory
from finetrainers.utils.faults import fault_point
from finetrainers.utils.process_state import free_memory

logger = logging.getLogger(__name__)

Size = tuple[int, int, int]
T = TypeVar("T")


class Fits(Protocol):
    """Part of a model's spec that a retry needs."""

    config: ModelSection
    vae_one_by_one: set[Size]
    vae_too_large: set[Size]

    def tiles_by_size(self, size: Size) -> bool: ...

    def fit_vae(self, vae: Any, size: Size, *, batch: int = 1, gradient: bool = False) -> None: ...


def tiled_for_memory(spec: Fits, size: Size) -> bool:
    """Return whether clips of a size are tiled only because this process ran out of memory on them or smaller ones."""
    if spec.config.enable_tiling is not None or spec.tiles_by_size(size):
        return False
    return _as_large_as(spec.vae_too_large, size)


def sliced_for_memory(spec: Fits, size: Size) -> bool:
    """Return whether batches of a size are cut into clips because this process ran out of memory on such or smaller."""
    return tiled_for_memory(spec, size) or _as_large_as(spec.vae_one_by_one, size)


def _as_large_as(sizes: set[Size], size: Size) -> bool:
    return any(math.prod(size) >= math.prod(small) for small in sizes)


def tiled_alike(spec: Fits, size: Size, encode: Callable[[], T]) -> T:
    """Return the result of an encode that is tiled completely or not at all: repeat it if an OOM turned tiling on.

    Otherwise clips that were encoded before the OOM would differ from those after it, under the same description.

    Args:
        spec: remembers the sizes that ran out of memory.
        size: frames, height and width of the largest clips that are encoded.
        encode: encodes all of them, and draws nothing at random.
    """
    before = tiled_for_memory(spec, size)
    result = encode()
    return result if tiled_for_memory(spec, size) == before else encode()


@contextmanager
def retry_vae_on_oom(
    spec: Fits, vae: Any, size: Size, *, batch: int = 1, gradient: bool = False
) -> Iterator[Callable[..., Any]]:
    """Let the VAE encode or decode clips of a size in pixels within the block, on OOM clip by clip, then in tiles.

    It is an error if `enable_slicing` and `enable_tiling` leave nothing to try. After a retry this process slices, or
    tiles, clips of the size and larger ones. Results differ from those of another GPU only with tiles.

    Args:
        spec: remembers the size, and turns tiling on.
        vae: one of diffusers', which encodes and decodes in the block, directly or in a pipeline.
        size, batch: frames, height and width of the clips, and their number.
        gradient: whether decoding has a backward pass. Its whole work is retried: call it through the yielded function.
    """
    spec.fit_vae(vae, size, batch=batch, gradient=gradient)

    def retry(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tried = False
        while True:
            try:
                if not tried:
                    fault_point("vae")
                return call(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                sizes, effect = _smaller_mode(spec, vae, batch)
                if sizes is None or not is_out_of_memory(error):
                    raise
                reason, tried = str(error).split("\n", 1)[0], True
            free_memory()  # not within the handler, whose traceback holds the tensors
            logger.warning(
                "the VAE ran out of memory on %s of %s (%s); clips of this size and larger ones are %s",
                "a clip" if batch == 1 else f"a batch of {batch} clips",
                "x".join(map(str, size)),
                reason,
                effect,
            )
            sizes.add(size)
            spec.fit_vae(vae, size, batch=batch, gradient=gradient)

    if gradient:
        yield retry
        return
    with calls_through(vae, retry):
        yield retry


@contextmanager
def calls_through(vae: Any, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let each call of the VAE's `encode` and `decode` go through `wrapper(method, *args, **kwargs)` in the block."""
    before = {name: vars(vae).get(name) for name in ("encode", "decode")}
    for name in before:
        setattr(vae, name, partial(wrapper, getattr(vae, name)))
    try:
        yield
    finally:
        for name, own in before.items():
            delattr(vae, name) if own is None else setattr(vae, name, own)


def _smaller_mode(spec: Fits, vae: Any, batch: int) -> tuple[set[Size] | None, str]:
    """Return the set of sizes for which the VAE takes less memory from now on, or None if nothing is left; and how."""
    if batch > 1 and not vae.use_slicing and spec.config.enable_slicing is None:
        return spec.vae_one_by_one, "taken one by one from now on (--enable_slicing does so from the start)"
    if vae.use_tiling or spec.config.enable_tiling is not None:
        return None, ""
    return spec.vae_too_large, "tiled from now on, which changes them slightly (--enable_tiling does so from the start)"
