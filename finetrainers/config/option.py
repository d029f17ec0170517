"""Options: pydantic fields with properties for resumed runs, datasets, caches and files.

Code that needs "all options that ..." calls `root.fields()`; there is no list of names anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

#: Effect of another value on a run that resumes from a checkpoint. `same`: it would be another run, so it is refused;
#: `data`, `optimizer`, `rng`, `ema`: refused without that `--reset`; `free`: taken, and listed at the start;
#: `unlisted`: taken.
Resume = Literal["same", "data", "optimizer", "rng", "ema", "free", "unlisted"]


@dataclass(frozen=True)
class Option:
    """Option of a run, with its properties.

    Attributes:
        name: unique, and the flag: the field's name, behind `TABLE.` if the section is qualified.
        section: the table of a file that it is in.
        key: the field's name.
        field: type, bounds, default and help.
        resume: see `Resume`.
        scope: `dataset` if each dataset of a `--dataset` file may have its own.
        dumped: whether it is written to disk; secrets and options of one invocation are not.
        local: whether it describes where a run was rather than the run itself.
        encodes: the cached encodings that depend on which model part it chooses.
        place: `model` for a hub id or directory of model files, `input` for data and prompts that a run reads,
            `folder` for a folder that a run creates.
        readers: the methods that read it, if not all of its section's do: the name of a method, a `TRAIT` that the
            methods' `MethodSpec` declares true, or `TRAIT=VALUE`.
        needs: the option without which it has no effect; with `=VALUE|VALUE`, the values that it needs.
        former_name, former_table: its name and its table in earlier versions; still read.
    """

    name: str
    section: str
    key: str
    field: FieldInfo
    resume: Resume
    scope: Literal["run", "dataset"] = "run"
    dumped: bool = True
    local: bool = False
    encodes: Literal["text", "vae", "both"] | None = None
    place: Literal["model", "input", "folder"] | None = None
    readers: str | None = None
    needs: str | None = None
    former_name: str | None = None
    former_table: str | None = None

    @cached_property
    def default(self) -> Any:
        """Default of the option, made once; `PydanticUndefined` if it must be given."""
        return self.field.get_default(call_default_factory=True)


_PROPERTIES = frozenset(Option.__dataclass_fields__) - {"name", "section", "key", "field"}


def option(default: Any, description: str, *, resume: Resume, **more: Any) -> Any:
    """Define an option as a field of a section.

    Args:
        default: its default; `...` if it must be given.
        description: its help, in sentences.
        resume: see `Resume`.
        more: properties of `Option`, and bounds of `pydantic.Field`.
    """
    properties = {name: more.pop(name) for name in list(more) if name in _PROPERTIES}
    return Field(default, description=description, json_schema_extra={"resume": resume, **properties}, **more)


def read_option(name: str, section: str, key: str, field: FieldInfo) -> Option:
    """Read the properties of an option from its field."""
    properties = field.json_schema_extra
    assert isinstance(properties, Mapping), (
        f"option {name} does not say what a resumed run does with it: define it by option()"
    )
    return Option(name, section, key, field, **properties)  # type: ignore[arg-type]
