"""Reward that another process computes: `--reward http://host:8000`, or `http://host:8000#vq` for one of its heads."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

import torch
from pydantic import ValidationError
from torch import Tensor

from finetrainers.utils.failures import InputError
from finetrainers.utils.reading import parse_json
from finetrainers.utils.text import printable

from .base import Reward
from .calls import Columns
from .pixels import to_uint8
from .retries import PATIENCE, TEMPORARY_STATUSES, Retries
from .server import TOKEN_VARIABLE, Description, Request

_CONNECT = 10.0  # seconds to wait for a connection


class ServedReward(Reward):
    """A reward computed by a server; the protocol is in `server.py`.

    A class from `at` contacts no server, so that a configuration can be checked before the server is up. An object
    contacts it when it is made, so that a wrong address or head is found before anything is sampled; from then on its
    `heads` have the server's own scale. It always has one head, `score`; the address selects the server's head. Two
    heads are two rewards; the server caches the scores of a clip for the second.

    The server's token is read from the variable FINETRAINERS_REWARD_TOKEN.

    Clips are sent with eight bits a channel, so scores may differ in the last digits from those of the reward in this
    process. Connections are direct: no proxy is used.
    """

    address: ClassVar[SplitResult]
    columns = Columns(takes_all=True)

    @classmethod
    def at(cls, url: str) -> type[ServedReward]:
        """Return the class for the server at `http://host:port[/path][#head]`, which is not contacted.

        Raises:
            ValueError: it is not such an address.
        """
        split = urlsplit(url)
        try:
            usable = split.scheme in ("http", "https") and split.hostname and (split.port is None or split.port > 0)
        except ValueError:  # an invalid port
            usable = False
        if not usable or split.query or "@" in split.netloc:
            raise ValueError(f"{url!r} is not an address of a reward server, such as http://localhost:8000#head")

        class At(cls):  # type: ignore[valid-type, misc]
            address = split

        At.__name__ = At.__qualname__ = f"{cls.__name__}({url})"
        At.__doc__ = cls.__doc__
        return At

    def __init__(
        self, *, timeout: float = 120.0, patience: float = PATIENCE, retries: int | None = None, pause: float = 1.0
    ) -> None:
        """Ask the server for its description.

        Args:
            timeout: seconds to wait for an answer, including the queue of the server and scoring.
            patience: seconds for which a request is repeated without a connection or an answer in time, or if the
                server is busy. Other errors are final.
            retries: maximum repetitions of a request within this time; by default any number.
            pause: seconds before the first repetition; each next pause is twice as long, up to a minute.

        Raises:
            ValueError: an option is out of range, or the server has another protocol or no such head.
            ConnectionError: there is no server, or it does not answer.
        """
        if not timeout > 0 or not patience >= 0 or (retries or 0) < 0 or not pause >= 0:
            raise ValueError(
                f"timeout={timeout} must be positive, and patience={patience}, retries={retries} and pause={pause} not "
                "negative"
            )
        self.timeout, self.patience = timeout, patience
        self._retries = Retries(f"reward server {self._url}", seconds=patience, number=retries, pause=pause)
        try:
            description = Description.model_validate(self._ask("GET", "/"))
        except ValidationError as error:
            raise InputError(f"{self._url} is not a reward server of protocol 1: {error}", "mismatch") from None
        heads = description.heads
        self._head = self.address.fragment or next(iter(heads))
        if self._head not in heads or (len(heads) > 1 and not self.address.fragment):
            problem = f"has no score {self._head!r}" if self.address.fragment else "has several scores"
            message = f"{self._url} {problem}; use one: {', '.join(f'{self._url}#{head}' for head in heads)}"
            raise InputError(message, "unknown" if self.address.fragment else "required")
        self._max_bytes, self._max_clips, self.images = description.max_bytes, description.max_clips, description.images
        self.scope, self.columns = description.scope, description.columns
        # Only the server knows them, not the class.
        self.heads = {"score": heads[self._head]}  # type: ignore[misc]

    def score(
        self, videos: Tensor, prompts: Sequence[str], *, fps: float, images: Tensor | None = None, **columns: Any
    ) -> Mapping[str, Any]:
        """See `Reward.score`.

        Raises:
            ValueError: the server refuses the clips or prompts, or they are more than it takes at once.
            RuntimeError: the reward failed on the server, or the answer is invalid.
            ConnectionError: the server does not answer, or stays busy.
        """
        if self._max_clips is not None and len(videos) > self._max_clips:
            raise InputError(
                f"{self._url} takes at most {self._max_clips} clips at once, got {len(videos)}; lower this reward's "
                "batch_size or raise the server's limit",
                "too_large",
            )
        image_bytes = None if images is None else to_uint8(images)
        body = Request(to_uint8(videos), tuple(prompts), fps, image_bytes, columns).pack()
        if len(body) > self._max_bytes:
            raise InputError(
                f"{self._url} takes at most {self._max_bytes} bytes at once, got {len(videos)} clips of {len(body)} "
                "bytes; lower this reward's batch_size or raise the server's limit",
                "too_large",
            )
        scores = self._ask("POST", "/score", body)
        values = scores.get(self._head) if isinstance(scores, dict) else None
        if not isinstance(values, list) or len(values) != len(prompts):
            raise RuntimeError(f"{self._url} answered without {len(prompts)} scores for {self._head!r}")
        return {"score": torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float32)}

    @property
    def _url(self) -> str:
        return self.address._replace(fragment="").geturl().rstrip("/")

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        """Return the server's answer, with retries."""
        return self._retries.call(lambda: self._ask_once(method, path, body))

    def _ask_once(self, method: str, path: str, body: bytes | None) -> Any:
        status, answer = self._exchange(method, path, body)
        if status == 200:
            return answer
        message = answer.get("error") if isinstance(answer, dict) else None
        failure = f"{printable(str(message)) if message else 'no reason given'} (status {status})"
        if status in TEMPORARY_STATUSES:
            raise ConnectionError(failure)
        if 400 <= status < 500:
            raise InputError(f"{self._url}: {failure}", "unavailable")
        raise RuntimeError(f"{self._url}: {failure}")

    def _headers(self) -> dict[str, str]:
        """Return the token of the servers, if the environment has one.

        It is never in a configuration, which is written to disk.
        """
        token = os.environ.get(TOKEN_VARIABLE)
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
        """Return status and content of one answer."""
        connection_class = HTTPSConnection if self.address.scheme == "https" else HTTPConnection
        connection = connection_class(self.address.hostname or "", self.address.port, timeout=_CONNECT)
        try:
            try:
                connection.connect()
            except OSError as error:  # including an unknown or unresponsive host
                raise ConnectionError(f"no connection: {error}") from error
            connection.sock.settimeout(self.timeout)
            connection.request(method, self.address.path.rstrip("/") + path, body, self._headers())
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            message = f"no answer in {self.timeout:g} s; if scoring takes longer, set this reward's option timeout"
            raise TimeoutError(message) from None
        except HTTPException as error:
            if isinstance(error, ConnectionError | IncompleteRead):  # the server closed the connection
                raise
            raise RuntimeError(f"{self._url} does not speak HTTP: {error!r}") from error
        finally:
            connection.close()
        try:
            return response.status, parse_json(content)
        except ValueError:
            return response.status, None
