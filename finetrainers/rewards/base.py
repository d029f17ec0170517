"""The interface of a reward: it scores decoded clips with their prompts."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from torch import Tensor

#: What a reward does with the images that clips start from.
ImageUse: TypeAlias = Literal["none", "optional", "required"]


@dataclass(frozen=True)
class Head:
    """One output of a reward, and its normalization: `(raw - mean) / std`."""

    mean: float = 0.0
    std: float = 1.0

    def normalize(self, raw: Tensor) -> Tensor:
        """Normalize raw scores."""
        return (raw - self.mean) / self.std


class Reward(ABC):
    """A scorer of clips. Its options are the keyword arguments of its `__init__`, all strings or numbers.

    Scores of a clip must not depend on the other clips of the call.

    One that compares a clip with the image that it starts from says so by `images`. Then `score` and `differentiate` have a
    further keyword of that name, which is given `[B, 3, H, W]` in [0, 1] in the size of the clips; None where clips start
    from text, if that is optional.
    """

    #: The numbers it gives, by name; a reward with one number calls it `score`.
    heads: ClassVar[Mapping[str, Head]] = {"score": Head()}
    #: Default batch size: clips scored together.
    batch_size: int = 8
    #: Whether `differentiate` gives its scores with a graph, so that they can be backpropagated.
    differentiable: ClassVar[bool] = False
    #: Whether it is given the images that clips start from.
    images: ImageUse = "none"
    #: Whether `differentiate` stores little, and its backward pass recomputes what it needs.
    recomputes: ClassVar[bool] = False
    #: The fewest frames of a clip that it scores.
    min_frames: ClassVar[int] = 1
    #: The options that name its weights.
    weights_options: ClassVar[tuple[str, ...]] = ("path",)

    @abstractmethod
    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        """Raw scores `[B]`, fp32 on the CPU, of every head.

        Args:
            videos: `[B, T, C, H, W]`, fp32 in [0, 1], on the CPU; not to be changed.
            prompts: one text a clip.
            fps: frame rate at which the clips play.
        """

    @classmethod
    def prompt_problem(cls, options: Mapping[str, str], prompt: str) -> str | None:
        """Return why clips of a prompt cannot be scored with these options, or None if they can."""
        return None

    def differentiate(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        """The scores of `score` up to rounding, `[B]` on any device, with a graph that reaches the pixels.

        Args:
            videos: as in `score`, but on the device of the VAE and with a graph; pixels are not rounded to bytes.
            prompts: one text a clip.
            fps: frame rate at which the clips play.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no gradients")

    @classmethod
    def graph_bytes(
        cls, options: Mapping[str, str], size: tuple[int, int, int], *, clips: int, fps: float
    ) -> float | None:
        """Bytes that `differentiate` and its backward take at their peak, besides the network; see `working_bytes`."""
        return None

    @classmethod
    def working_bytes(
        cls, options: Mapping[str, str], size: tuple[int, int, int], *, clips: int, fps: float
    ) -> float | None:
        """Bytes that scoring takes on its device, besides the network; None: not known, of a network of somebody's own.

        Args:
            options: of the configuration.
            size: frames, height and width of a clip.
            clips: scored at once.
            fps: frame rate at which the clips play.
        """
        return None if "path" in inspect.signature(cls).parameters else 0.0
