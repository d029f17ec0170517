"""The configuration tree and how its flat names map to sections."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from pydantic import Field
from pydantic.fields import FieldInfo

from .base import Section
from .grpo import GRPOSection
from .parallel import ParallelSection
from .sections import (
    DataloaderSection,
    DataSection,
    DiffusionSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    TrainingSection,
    ValidationSection,
)


class TrainConfig(Section):
    """A whole training run. Build one with `load_config` or `TrainConfig.from_flat`."""

    model: ModelSection = Field(description=ModelSection.__doc__)
    data: DataSection = Field(default=DataSection(), description=DataSection.__doc__)
    dataloader: DataloaderSection = Field(default=DataloaderSection(), description=DataloaderSection.__doc__)
    diffusion: DiffusionSection = Field(default=DiffusionSection(), description=DiffusionSection.__doc__)
    training: TrainingSection = Field(default=TrainingSection(), description=TrainingSection.__doc__)
    grpo: GRPOSection = Field(default=GRPOSection(), description=GRPOSection.__doc__)
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description=OptimizerSection.__doc__)
    parallel: ParallelSection = Field(default=ParallelSection(), description=ParallelSection.__doc__)
    validation: ValidationSection = Field(default=ValidationSection(), description=ValidationSection.__doc__)
    run: RunSection = Field(default=RunSection(), description=RunSection.__doc__)

    @classmethod
    def from_flat(cls, **options: Any) -> TrainConfig:
        """Build a configuration from flat option names.

        Raises:
            ConfigError: an unknown name or a value out of bounds; all of them at once.
        """
        from .load import build_config

        return build_config([("from_flat", options)])

    def changed(self, name: str) -> bool:
        """Whether option `name` differs from its default (giving the default explicitly asks for nothing)."""
        field = fields()[name][1]
        return field.is_required() or self.get(name) != field.get_default(call_default_factory=True)

    def get(self, name: str) -> Any:
        """The value of the option with flat name `name`."""
        section, _ = fields()[name]
        return getattr(getattr(self, section), name)

    def flat(self) -> dict[str, Any]:
        """All options by flat name, in schema order."""
        return {name: self.get(name) for name in fields()}

    def __repr_name__(self) -> str:
        return "TrainConfig.from_flat"

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """The options that differ from their defaults, so that the text can be read; `flat` gives all."""
        return changed_options(self).items()


def changed_options(config: TrainConfig) -> dict[str, Any]:
    """The options that differ from their defaults, by flat name in schema order, as plain values.

    Plain means as TOML has them (`"49x512x768"`, paths as text), so `TrainConfig.from_flat` takes them. Secrets are masked.
    """
    plain = config.model_dump(mode="json")
    return {name: plain[section][name] for name, (section, _) in fields().items() if config.changed(name)}


@cache
def fields() -> dict[str, tuple[str, FieldInfo]]:
    """Every option: flat name -> (section, pydantic field). Names are unique over the tree."""
    found: dict[str, tuple[str, FieldInfo]] = {}
    for section, info in TrainConfig.model_fields.items():
        for name, field in info.annotation.model_fields.items():  # type: ignore[union-attr]
            assert name not in found, f"option {name} is defined in two sections"
            found[name] = (section, field)
    return found
