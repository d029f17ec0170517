"""The training methods by name. Reading this file imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.utils.addresses import resolve

from .spec import MethodSpec, WorkPlan

Planner = Callable[..., WorkPlan | None]


@dataclass(frozen=True)
class _Entry:
    method: str
    spec: str


_METHODS: dict[str, _Entry] = {}


def register_method(name: str, method: str, *, spec: str = "finetrainers.methods.spec:MethodSpec") -> None:
    """Make a method available as `--method name`; the others are addresses `module:attribute`.

    Args:
        name: what users call it.
        method: the class, which is called with `MethodParts`.
        spec: the subclass of `MethodSpec`, in a module that imports no torch; default: that of training on clips.

    Raises:
        ValueError: the name is taken.
    """
    if name in _METHODS:
        raise ValueError(f"method {name!r} is registered already")
    _METHODS[name] = _Entry(method, spec)


def method_names() -> list[str]:
    """Registered names."""
    return sorted(_METHODS)


def load_method(name: str) -> Any:
    """The class of a method (imports torch)."""
    return resolve(_METHODS[name].method)


def load_source(config: TrainConfig) -> Any:
    """The class of what feeds the configured method (imports torch); see `MethodSpec.source`."""
    return resolve(method_spec(config).source)


def method_spec(config: TrainConfig) -> MethodSpec:
    """What the configured method says of itself before it is loaded."""
    spec: MethodSpec = resolve(_METHODS[config.training.method].spec)()
    return spec


def plan_work(config: TrainConfig, geometry: Geometry, *, sizes_are_wrong: bool) -> WorkPlan | None:
    """What the configured method will work on; see `MethodSpec.plan`."""
    return method_spec(config).plan(config, geometry, sizes_are_wrong=sizes_are_wrong)


_REWARDED = "finetrainers.methods.grpo.spec:RewardFinetuning"

register_method("sft", "finetrainers.methods.sft:SFT", spec="finetrainers.methods.sft_spec:SupervisedFinetuning")
register_method("grpo", "finetrainers.methods.grpo.method:GRPO", spec=_REWARDED)
register_method("nft", "finetrainers.methods.grpo.nft:NFT", spec=_REWARDED)
register_method(
    "refl", "finetrainers.methods.refl:RewardGradients", spec="finetrainers.methods.refl_spec:DifferentiableRewards"
)
register_method("dpo", "finetrainers.methods.dpo.method:DPO", spec="finetrainers.methods.dpo.spec:PreferencePairs")
