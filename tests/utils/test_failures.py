"""Failures of connections between processes are said in a sentence; other errors keep their traceback."""

from __future__ import annotations

import pytest

from finetrainers.utils.failures import user_message

_GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
_NCCL = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:328, remote process exited \
or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
"""
_ENDED = "another process of the run has ended: its own output says why"
_SILENT = "another process of the run does not answer: it hangs, or its machine is lost"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            f"{_GLOO}Read error [10.77.0.2]:24789: Connection reset by peer. This is typically caused by a "
            "remote worker hanging or bugs in the application.",
            f"{_ENDED} (Read error [10.77.0.2]:24789: Connection reset by peer).",
        ),
        (
            f"{_GLOO}Connection closed by peer [10.77.0.2]:24789",
            f"{_ENDED} (Connection closed by peer [10.77.0.2]:24789).",
        ),
        (f"{_GLOO}Read error [10.77.0.2]:1: Connection timed out. This is typically", f"{_SILENT} (Read error"),
        (f"{_GLOO}Timed out waiting 20000ms for recv operation to complete", f"{_SILENT} (Timed out waiting 20000ms"),
        (_NCCL, f"{_ENDED} (NCCL error in: "),
    ],
)
def test_lost_connections_say_what_to_do(said: str, expected: str) -> None:
    sentence = user_message(RuntimeError(said))
    assert sentence is not None
    assert sentence.startswith(expected)
    assert sentence.endswith("with --resume_from_checkpoint auto it continues from the newest one")
    assert "\n" not in sentence


def test_other_errors_keep_their_traceback() -> None:
    assert user_message(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert user_message(ValueError(f"{_GLOO}Connection closed by peer")) is None
