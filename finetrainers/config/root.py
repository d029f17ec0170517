"""Configuration tree, and all of its options by flat name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr
from pydantic.fields import FieldInfo

from finetrainers.utils.json_objects import PACKAGES

from .base import Section
from .dpo import DPOSection
from .grpo import GRPOSection
from .methods import METHODS, TrainingMethod, is_reader
from .option import Option, read_option
from .parallel import ParallelSection
from .refl import ReFLSection
from .sections import (
    DataloaderSection,
    DataSection,
    DiffusionSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    RunSection,
    TrainingSection,
    ValidationSection,
)
from .sft import SFTSection

#: Sources of values that a run has chosen for open options.
FAMILY, DATA, RUN, MEMORY, INITIAL = "family", "data", "run", "memory", "init_from"


def _table(section: type[Section]) -> Any:
    return Field(default=section(), description=section.__doc__)


class TrainConfig(Section):
    """A whole training run, which `load_config` builds: a section for each subject, such as `config.optimizer.lr`.

    `get("lr")` returns an option by its name, and `load_config(config, lr=1e-5)` a copy with changes.
    """

    model: ModelSection = Field(description=ModelSection.__doc__)
    data: DataSection = _table(DataSection)
    dataloader: DataloaderSection = _table(DataloaderSection)
    diffusion: DiffusionSection = _table(DiffusionSection)
    training: TrainingSection = _table(TrainingSection)
    memory: MemorySection = _table(MemorySection)
    grpo: GRPOSection = _table(GRPOSection)
    refl: ReFLSection = _table(ReFLSection)
    dpo: DPOSection = _table(DPOSection)
    sft: SFTSection = _table(SFTSection)
    optimizer: OptimizerSection = _table(OptimizerSection)
    parallel: ParallelSection = _table(ParallelSection)
    validation: ValidationSection = _table(ValidationSection)
    run: RunSection = _table(RunSection)

    _chosen: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def chosen(self) -> Mapping[str, str]:
        """Source of each value that the run has chosen for an open option, such as `family`, by flat name."""
        return self._chosen

    @property
    def has_chosen_sizes(self) -> bool:
        """True if the run has chosen sizes from its clips."""
        return DATA in self._chosen.values()

    def with_chosen(self, values: Mapping[str, Any], source: str | Mapping[str, str]) -> TrainConfig:
        """Return a copy with these values by flat name, which count as chosen by `source` and not as given."""
        config = self.with_values(values)
        sources = dict.fromkeys(values, source) if isinstance(source, str) else source
        config._chosen = {**self._chosen, **sources}
        return config

    def without_chosen(self, names: Collection[str]) -> TrainConfig:
        """Return a copy in which those of the named options that were chosen are open again, at their defaults."""
        return self.with_defaults({name: fields()[name].default for name in names if name in self._chosen})

    def with_defaults(self, values: Mapping[str, Any]) -> TrainConfig:
        """Return a copy with these values, by flat name, which count as neither given nor chosen."""
        config = self.with_values(values)
        for name in values:
            getattr(config, fields()[name].section).model_fields_set.discard(fields()[name].key)
        return config

    def with_values(self, values: Mapping[str, Any]) -> TrainConfig:
        """Return a copy with these values, by flat name of the option, which count as given."""
        tables: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            tables.setdefault(fields()[name].section, {})[fields()[name].key] = value
        sections = {table: getattr(self, table).model_copy(update=update) for table, update in tables.items()}
        config = self.model_copy(update=sections)
        config._chosen = {name: source for name, source in self._chosen.items() if name not in values}
        return config

    def changed(self, name: str) -> bool:
        """Return whether option `name` differs from its default (giving the default explicitly requests nothing)."""
        option = fields()[name]
        return option.field.is_required() or self.get(name) != option.default

    def is_given(self, name: str) -> bool:
        """Return whether the user, or a preset, has set an option, even to its default."""
        option = fields()[name]
        return name not in self._chosen and option.key in getattr(self, option.section).model_fields_set

    def get(self, name: str) -> Any:
        """Return the value of the option with flat name `name`."""
        option = fields()[name]
        return getattr(getattr(self, option.section), option.key)

    def flat(self) -> dict[str, Any]:
        """Return all options by flat name, in schema order."""
        return {name: self.get(name) for name in fields()}

    def plain(self) -> dict[str, Any]:
        """Return all options that are written to disk, by flat name, as in JSON (`"49x512x768"`, paths as text)."""
        values = self._by_table()
        return {name: values[option.section][option.key] for name, option in fields().items() if option.dumped}

    def _by_table(self) -> dict[str, dict[str, Any]]:
        """Return the tables as in JSON."""
        return {table: getattr(self, table).model_dump(mode="json") for table in sections()}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the defaults of a table that was added after this configuration was made."""
            if name in TrainConfig.model_fields:
                return TrainConfig.model_fields[name].annotation()
            return super().__getattr__(name)

    def __repr_name__(self) -> str:
        return "load_config"

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Return the options that differ from their defaults, as `load_config` takes them; `flat` returns all."""
        arguments: dict[str | None, Any] = {}
        for name, value in changed_options(self).items():
            table, key = split_name(name)
            arguments |= {name: value} if table is None else {table: {**arguments.get(table, {}), key: value}}
        return arguments.items()


def changed_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options that differ from their defaults, by flat name in schema order, as `load_config` takes them.

    Values are as in TOML (`"49x512x768"`, paths as text). Secrets are masked.
    """
    values = config._by_table()
    return {name: values[o.section][o.key] for name, o in fields().items() if config.changed(name)}


#: Tables that are listed above; the methods of other packages add theirs.
OWN_TABLES = frozenset(TrainConfig.model_fields)


def _add_table(name: str, method: TrainingMethod) -> str | None:
    """Add the table of options of a method that this module does not list; return why it cannot be, or None if it is.

    Classes of the method's packages may be sent to other processes of a run from then on.
    """
    addresses = (method.method, method.spec, method.options)
    modules = [a.partition(":")[0] if isinstance(a, str) else a.__module__ for a in addresses if a is not None]
    PACKAGES.update(module.partition(".")[0] for module in modules)
    if method.options is None:
        return None
    if name in OWN_TABLES:
        return f"has options, and [{name}] is another table; rename the method"
    field = FieldInfo.from_annotated_attribute(method.options, _table(method.options))
    TrainConfig.model_fields[name] = field
    TrainConfig.model_rebuild(force=True)
    fields.cache_clear()
    return None


METHODS.added = _add_table


def has_table(name: str) -> bool:
    """Return whether there is a table of options of this name, here or with the method of an installed package."""
    return name in OWN_TABLES or (METHODS.get(name) is not None and name in sections())


def sections() -> dict[str, type[Section]]:
    """Return the tables of a file: name -> class."""
    return {name: info.annotation for name, info in TrainConfig.model_fields.items()}  # type: ignore[misc]


@cache
def fields() -> dict[str, Option]:
    """Return every option by flat name, in schema order."""
    options: dict[str, Option] = {}
    for table, section in sections().items():
        for key, field in section.model_fields.items():
            name = flat_name(key, table)
            assert name not in options, f"option {name} is defined in two sections"
            options[name] = read_option(name, table, key, field)
    return options


def reads(method: str, name: str) -> bool:
    """Return whether a method reads an option, by what both declare."""
    option = fields()[name]
    table = sections()[option.section].methods
    return (not table or is_reader(method, table)) and (option.readers is None or is_reader(method, [option.readers]))


def readers(name: str) -> list[str]:
    """Return the methods that read an option. Installed packages are searched unless the option names its methods."""
    option = fields()[name]
    declared = [option.readers] if option.readers else sections()[option.section].methods
    methods = METHODS.all() if not declared or None in map(METHODS.get, declared) else declared
    return [method for method in methods if reads(method, name)]


def flat_name(key: str, table: str | None) -> str:
    """Return the flat name of a key of a table."""
    return f"{table}.{key}" if table is not None and sections()[table].qualified else key


def split_name(name: str) -> tuple[str | None, str]:
    """Return table and key of `TABLE.KEY`, or None and the name for any other name."""
    table, dot, key = name.partition(".")
    return (table, key) if dot and has_table(table) else (None, name)


def belongs(name: str, table: str | None) -> bool:
    """Return whether an option may be in a table: in its own, in its table of earlier versions, or at the top level."""
    option = fields()[name]
    return table in (None, option.section, option.former_table)


@cache
def former_names() -> dict[str, str]:
    """Return the names of options in earlier versions, with the current name of each."""
    return {option.former_name: name for name, option in fields().items() if option.former_name is not None}


def by_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename options that an earlier version wrote to disk, which called the method nft an algorithm of grpo."""
    renamed = {former_names().get(name, name): value for name, value in values.items()}
    return {**renamed, "method": "nft"} if values.get("rl_algorithm") == "nft" else renamed


def critical_options(*tables: str) -> dict[str, str | None]:
    """Return the options whose value a resumed run must share with its checkpoint, and the `--reset` of each, if any.

    Args:
        tables: sections to consider; default: all but those whose options the plan of a method's work lists.
    """
    selected_tables = tables or tuple(name for name, section in sections().items() if not section.in_plan)
    return {
        name: None if option.resume == "same" else option.resume
        for name, option in fields().items()
        if option.section in selected_tables and option.resume not in ("free", "unlisted")
    }
