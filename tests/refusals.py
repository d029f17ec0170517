"""Expectations about errors, by kind and place; tests/test_sentences.py alone compares sentences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest

from finetrainers.config.errors import ConfigError
from finetrainers.utils.failures import Kind, error_kind

E = TypeVar("E", bound=BaseException)


def problems(error: BaseException | None) -> list[tuple[str, Kind]]:
    """Return place and kind of each problem of a ConfigError."""
    assert isinstance(error, ConfigError), repr(error)
    return [(problem.where, problem.kind) for problem in error.problems]


@contextlib.contextmanager
def refused(
    kind: Kind,
    *places: object,
    error: type[E] = ValueError,  # type: ignore[assignment]
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of this class and kind whose message names all places: options, files, rows, values."""
    with pytest.raises(error) as caught:
        yield caught
    assert error_kind(caught.value) == kind, caught.value
    missing = [str(place) for place in places if str(place) not in str(caught.value)]
    assert not missing, f"{missing} in {caught.value}"


@contextlib.contextmanager
def refused_options(*expected: tuple[object, Kind]) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expect a ConfigError with exactly these problems, each by place and kind, in any order."""
    with pytest.raises(ConfigError) as caught:
        yield caught
    assert sorted(problems(caught.value)) == sorted((str(where), kind) for where, kind in expected), caught.value


def refused_command(arguments: Sequence[object]) -> tuple[int, list[tuple[str, Kind]]]:
    """Run a command in this process; return its exit code, and place and kind of the problems that it prints."""
    from finetrainers.cli.main import main

    errors: list[ConfigError] = []
    create = ConfigError.__init__

    def record(self: ConfigError, *values: object, **options: object) -> None:
        create(self, *values, **options)  # type: ignore[arg-type]
        errors.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigError, "__init__", record)
        code = main([str(argument) for argument in arguments])
    # The last one made is printed: a command adds the problems of what is valid by itself.
    return code, problems(errors[-1]) if errors else []
