"""Failures of connections between processes are said in a sentence; other errors keep their traceback."""

from __future__ import annotations

import pickle

import pytest

from finetrainers.data.reading.items import DataError
from finetrainers.utils.failures import InputError, error_kind, user_message

_GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
_NCCL = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:328, remote process exited \
or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
"""
_RESET = "Read error [10.77.0.2]:24789: Connection reset by peer"
_CLOSED = "Connection closed by peer [10.77.0.2]:24789"
_ADVICE = ". This is typically caused by a remote worker hanging or bugs in the application."


@pytest.mark.parametrize(
    ("message", "is_silent", "reason"),
    [
        (
            f"{_GLOO}{_RESET}{_ADVICE}",
            False,
            f"({_RESET}).",
        ),
        (
            f"{_GLOO}{_CLOSED}",
            False,
            f"({_CLOSED}).",
        ),
        (f"{_GLOO}Read error [10.77.0.2]:1: Connection timed out{_ADVICE}", True, "(Read error"),
        (f"{_GLOO}Timed out waiting 20000ms for recv", True, "(Timed out waiting 20000ms"),
        (_NCCL, False, "(NCCL error in: "),
    ],
)
def test_lost_connections_say_what_to_do(message: str, is_silent: bool, reason: str) -> None:
    sentence = user_message(RuntimeError(message))
    assert sentence is not None
    assert reason in sentence
    assert ("hangs" in sentence, "ended" in sentence) == (is_silent, not is_silent)
    assert "--resume_from_checkpoint auto" in sentence
    assert "\n" not in sentence
    assert "typically" not in sentence


def test_other_errors_keep_their_traceback() -> None:
    assert user_message(RuntimeError("mat1 and mat2")) is None
    assert user_message(ValueError(f"{_GLOO}Connection closed")) is None


def test_kinds_pass_between_processes() -> None:
    for error in (InputError("no such file", "not_found"), DataError("no clips", ["a", "b"], "required")):
        copy = pickle.loads(pickle.dumps(error))
        assert (error_kind(copy), str(copy), copy.__dict__) == (error_kind(error), str(error), error.__dict__)
    assert error_kind(ValueError()) == "invalid"
