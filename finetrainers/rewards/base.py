"""Interface of a reward, which scores decoded clips with their prompts."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from .calls import Columns, is_async
from .retries import PATIENCE

#: Use of the images that clips start from.
ImageUse: TypeAlias = Literal["none", "optional", "required"]
#: Clips of a call that a score may depend on: the clip itself, or all clips of its prompt.
Scope: TypeAlias = Literal["clip", "group"]


@dataclass(frozen=True)
class Head:
    """One output of a reward, and its normalization: `(raw - mean) / std`."""

    mean: float = 0.0
    std: float = 1.0

    def normalize(self, raw: Tensor) -> Tensor:
        """Normalize raw scores."""
        return (raw - self.mean) / self.std


class Reward(ABC):  # noqa: B024, abstract at run time
    """A scorer of clips. Its options are the keyword arguments of its `__init__`, all strings or numbers.

    Scores of a clip must not depend on the other clips of the call, unless `scope` is `group`: then a call has all
    clips of one prompt, and no others.

    A method `score` with further keywords gets the columns of these names of the prompts, each a list of one value per
    clip; with `**columns`, all others. It may be `async`.

    A reward that compares a clip with the image that it starts from sets `images`. Then `score` and `differentiate`
    have a further keyword of that name for `[B, 3, H, W]` in [0, 1] in the size of the clips, or None where clips start
    from text, if images are optional.
    """

    #: Outputs by name; a single output is `score`.
    heads: ClassVar[Mapping[str, Head]] = {"score": Head()}
    #: Default batch size: clips scored together.
    batch_size: int = 8
    #: Clips of a call that a score may depend on.
    scope: Scope = "clip"
    #: Columns of prompts that `score` takes; by default, its keywords.
    columns: Columns = Columns()
    #: Whether `score` is async.
    asynchronous: ClassVar[bool] = False
    #: Whether `differentiate` returns scores with a graph for backpropagation.
    differentiable: ClassVar[bool] = False
    #: Use of the images that clips start from.
    images: ImageUse = "none"
    #: Whether `differentiate` stores little, and its backward pass recomputes activations.
    recomputes: ClassVar[bool] = False
    #: Seconds for which a call is repeated that fails for its connection; see `retries.may_pass`.
    patience: float = PATIENCE
    #: Minimum frames of a clip.
    min_frames: ClassVar[int] = 1
    #: Options with paths of weights.
    weights_options: ClassVar[tuple[str, ...]] = ("path",)

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Read the columns off the keywords of `score`, and whether it is async."""
        super().__init_subclass__(**arguments)
        if "score" in vars(cls):
            cls.columns = vars(cls).get("columns") or Columns.from_function(cls.score, skip=3)
            cls.asynchronous = vars(cls).get("asynchronous", is_async(cls.score))

    if TYPE_CHECKING:  # those of subclasses may have keywords for columns and images, and be async

        @abstractmethod
        def score(self, *arguments: Any, **keywords: Any) -> Any: ...

        def differentiate(self, *arguments: Any, **keywords: Any) -> Any: ...

    else:

        @abstractmethod
        def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Any]:
            """Return raw scores `[B]` of every head: a tensor, an array, or a list of numbers and None for no score.

            Args:
                videos: `[B, T, C, H, W]`, fp32 in [0, 1], on the CPU; a copy for this reward.
                prompts: one text a clip.
                fps: frame rate at which the clips play.
            """

        def differentiate(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
            """Return the scores of `score` up to rounding, `[B]` on any device, with a graph that reaches the pixels.

            Args:
                videos: as in `score`, but on the device of the VAE and with a graph; pixels are not rounded to bytes.
                prompts: one text a clip.
                fps: frame rate at which the clips play.
            """
            raise NotImplementedError(f"{type(self).__name__} has no gradients")

    @classmethod
    def prompt_problem(cls, options: Mapping[str, str], prompt: str) -> str | None:
        """Return why clips of a prompt cannot be scored with these options, or None if they can."""
        return None

    @classmethod
    def graph_bytes(
        cls, options: Mapping[str, str], size: tuple[int, int, int], *, clips: int, fps: float
    ) -> float | None:
        """Return the peak bytes of `differentiate` and its backward, or None if unknown; see `working_bytes`."""
        return None

    @classmethod
    def working_bytes(
        cls, options: Mapping[str, str], size: tuple[int, int, int], *, clips: int, fps: float
    ) -> float | None:
        """Return the bytes that scoring takes on its device, excluding the network, or None if unknown.

        By default, they are unknown for a reward with a `path` and 0 for any other.

        Args:
            options: of the configuration.
            size: frames, height and width of a clip.
            clips: scored at once.
            fps: frame rate at which the clips play.
        """
        return None if "path" in inspect.signature(cls).parameters else 0.0
