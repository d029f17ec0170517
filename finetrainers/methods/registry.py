"""The training methods by name. Reading this file imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetrainers.config.base import Section
from finetrainers.config.geometry import Geometry
from finetrainers.config.methods import METHODS, TrainingMethod
from finetrainers.config.root import TrainConfig, fields
from finetrainers.utils.addresses import resolve
from finetrainers.utils.text import nearest

from .spec import MethodSpec, TrainingSet

Planner = Callable[..., TrainingSet | None]


def register_method(
    name: str,
    method: str | type,
    *,
    spec: str | type[MethodSpec] | None = None,
    options: type[Section] | None = None,
) -> None:
    """Make a method available as `--method name`; classes may be given as addresses `module:attribute`.

    Args:
        name: name of the method in options. A class that is defined in the same module replaces that of the name, as
            notebook cells are edited and run again.
        method: the class, which is called with `MethodParts`.
        spec: the subclass of `MethodSpec`, in a module that imports no torch; default: that of training on clips.
        options: its table of options; see `TrainingMethod`.

    Raises:
        ValueError: the name is taken, or an argument is of another type.
    """
    if isinstance(method, type) and issubclass(method, MethodSpec):
        raise ValueError(
            f"method of {name!r}: {method.__name__} is a MethodSpec; give it as spec=, and the method's class"
        )
    if isinstance(spec, type) and not issubclass(spec, MethodSpec):
        raise ValueError(f"spec of {name!r}: {spec.__name__} is not a subclass of MethodSpec")
    METHODS.add(name, TrainingMethod(name, method, spec, options))


def is_method(name: str) -> bool:
    """Return whether a method has this name, here or in an installed package."""
    return METHODS.get(name) is not None


def load_method(name: str) -> Any:
    """Return the class of a method (imports torch)."""
    return _resolve(METHODS[name].method)


def method_class_problem(config: TrainConfig) -> str | None:
    """Return why the classes of the configured method cannot train, or None if they can (imports torch)."""
    name = config.training.method
    try:
        method_class = load_method(name)
        load_source(config)
    except (ImportError, AttributeError) as error:
        return f"{name} cannot be imported: {error}"
    problem = class_problem(method_class)
    return None if problem is None else f"{name}: {problem}"


def class_problem(method_class: Any) -> str | None:
    """Return why an object is not the class of a method, or None if it is (imports torch)."""
    from .base import Method

    if not isinstance(method_class, type):
        return f"expected a class, got a {type(method_class).__name__}"
    needed = [attribute for attribute, value in vars(Method).items() if callable(value) and attribute[:1] != "_"]
    missing = [attribute for attribute in needed if not callable(getattr(method_class, attribute, None))]
    if missing:
        protocol = "see the protocol Method of finetrainers.methods.base"
        return f"{method_class.__name__} has no {', '.join(missing)}; {protocol}"
    own_check = getattr(method_class, "class_problem", None)
    return None if own_check is None else own_check()


def _resolve(value: Any) -> Any:
    return resolve(value) if isinstance(value, str) else value


def spec_problem(name: str) -> str | None:
    """Return why a registered method has no usable `MethodSpec`, or None if it has."""
    try:
        spec_class = _resolve(METHODS[name].spec or MethodSpec)
    except (ImportError, AttributeError) as error:
        return f"the spec of {name} cannot be imported: {error}"
    if not (isinstance(spec_class, type) and issubclass(spec_class, MethodSpec)):
        return f"the spec of {name} must be a subclass of MethodSpec, got {spec_class!r}"
    unknown = [f"{option!r}{nearest(option, fields())}" for option in spec_class.unread if option not in fields()]
    return f"the spec of {name} has unknown options in `unread`: {', '.join(unknown)}" if unknown else None


def load_source(config: TrainConfig) -> Any:
    """Return the class that feeds the configured method (imports torch); see `MethodSpec.source`."""
    return resolve(method_spec(config).source)


def method_spec(config: TrainConfig) -> MethodSpec:
    """Return the `MethodSpec` of the configured method."""
    spec: MethodSpec = _resolve(METHODS[config.training.method].spec or MethodSpec)()
    return spec


def plan_work(config: TrainConfig, geometry: Geometry, *, sizes_are_wrong: bool) -> TrainingSet | None:
    """Return the plan of the data of the configured method; see `MethodSpec.plan`."""
    return method_spec(config).plan(config, geometry, sizes_are_wrong=sizes_are_wrong)


register_method("sft", "finetrainers.methods.sft:SFT", spec="finetrainers.methods.sft_spec:SupervisedFinetuning")
register_method("grpo", "finetrainers.methods.grpo.method:GRPO", spec="finetrainers.methods.grpo.spec:PolicyGradients")
register_method(
    "nft", "finetrainers.methods.grpo.nft:NFT", spec="finetrainers.methods.grpo.forward_spec:ImplicitPolicies"
)
register_method(
    "awm", "finetrainers.methods.grpo.awm:AWM", spec="finetrainers.methods.grpo.forward_spec:AdvantageMatching"
)
register_method(
    "refl", "finetrainers.methods.refl:RewardGradients", spec="finetrainers.methods.refl_spec:DifferentiableRewards"
)
register_method("dpo", "finetrainers.methods.dpo.method:DPO", spec="finetrainers.methods.dpo.spec:PreferencePairs")
