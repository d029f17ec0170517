"""Base class of all sections: rules that hold for every option, so that none has to state them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from finetrainers.utils.text import is_encodable, shortened

#: Largest number of any option that has no smaller bound; sizes computed from it still fit into 64 bits.
LARGEST = 1e12
#: Limits of common file systems, in bytes.
_NAME_BYTES, _PATH_BYTES = 255, 4096


class Section(BaseModel):
    """A group of options. Unknown keys are errors, and values never change after loading.

    Numbers are finite and at most `LARGEST` in magnitude, and `true` is not one. Text can be encoded as UTF-8. Paths
    can exist, and `~` in them is the home directory. A field may ask for more, or say `allow_inf_nan=True`.

    Attributes:
        methods: the methods that read these options, each a name or a trait as in `Option.readers`; empty if all do.
            With another method they are an error.
        in_plan: whether the plan of the method's work lists which of these options a resumed run must keep.
        qualified: whether flags have the table's name in front, as `--dpo.beta`; then names need not be unique.
    """

    methods: ClassVar[tuple[str, ...]] = ()
    in_plan: ClassVar[bool] = False
    qualified: ClassVar[bool] = False

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _every_option(cls, raw_value: Any, handler: ModelWrapValidatorHandler[Any], info: ValidationInfo) -> Any:
        value = handler(raw_value)
        numbers = [item for item in _flat(value) if isinstance(item, (int, float)) and not isinstance(item, bool)]
        if numbers and any(isinstance(item, bool) for item in _flat(raw_value)):
            raise ValueError(f"must be a number, got {str(raw_value).lower()}")
        for number in numbers:
            if abs(number) > LARGEST and number not in (float("inf"), float("-inf")):
                raise ValueError(f"must be at most {LARGEST:g}, got {shortened(str(number), 40)}")
        for text in _flat(value):
            if isinstance(text, (str, Path)):
                check_text(str(text))
        if isinstance(value, Path):
            if not str(raw_value).strip():
                raise ValueError("must not be empty; set a path, or remove the option")
            return Path(expand_home(str(value)))
        return value


def _flat(value: Any) -> Iterator[Any]:
    """Yield the value itself, or the items of a list or tuple, at any depth."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def check_text(text: str) -> None:
    """Check that text can be written to a file.

    Raises:
        ValueError: it cannot.
    """
    if "\0" in text:
        raise ValueError(f"must not contain a NUL character: {text[:80]!r}")
    if not is_encodable(text):
        raise ValueError(f"must be UTF-8 text: {text[:80]!r}")


def expand_home(path: str) -> str:
    """Return the path with `~` expanded.

    Raises:
        ValueError: no file can have this path.
    """
    if path.startswith("~"):
        try:
            path = str(Path(path).expanduser())
        except RuntimeError:
            raise ValueError(f"home directory of {path.partition('/')[0]} not found; use a full path") from None
    check_text(path)
    longest = max((len(part.encode("utf-8")) for part in path.split("/")), default=0)
    if longest > _NAME_BYTES or len(path.encode("utf-8")) > _PATH_BYTES:
        raise ValueError(
            f"is too long for a path: at most {_NAME_BYTES} bytes per name and {_PATH_BYTES} in all, got {longest} "
            f"and {len(path.encode('utf-8'))}"
        )
    try:
        Path(path).stat()
    except OSError as error:  # most do not exist yet
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link that leads back to itself; remove it") from None
    return path


def read_path(text: str) -> Path:
    """Return the path of an argument, with `~` expanded.

    Raises:
        ValueError: it is empty, or no file can have this path.
    """
    if not text.strip():
        raise ValueError("must not be empty; use . for the working directory")
    return Path(expand_home(text))
