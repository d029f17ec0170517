"""HTTP server that scores clips for other processes.

It serves a reward on another GPU, or one whose packages clash with the trainer's.

The protocol, version 1. Answers are JSON objects; a server in any language can implement it.

`GET /` describes the server:

    200 {"protocol": 1, "reward": NAME, "max_bytes": N, "max_clips": N, "heads": {HEAD: {"mean": 3.7, "std": 2.2}, ...},
         "images": "none", "scope": "clip", "columns": {"required": [NAME, ...], "optional": [NAME, ...],
         "takes_all": false}}

    `max_bytes` is the largest body it takes, and `max_clips`, which may be missing, the maximum number of clips;
    `(score - mean) / std` brings a head to a common scale. `images`, which may be missing, is the use of the images
    that clips start from: `none`, `optional` or `required`. `scope`, which may be missing, is `group` for a reward that
    compares the clips of a prompt: each request has all clips of one prompt. `columns`, which may be missing, are the
    columns of prompts that it takes.

`POST /score` scores clips. The body, with a `Content-Length`, is a safetensors file with one tensor, `videos`, uint8
`[B, T, H, W, 3]`, and the metadata `prompts`, a JSON list of B strings, and `fps`, a number as text. If the server
takes images and clips start from some, `images`, uint8 `[B, H, W, 3]`, is a second tensor. If it takes columns, the
metadata `columns` is a JSON object of a list of B values for each:

    200 {HEAD: [B numbers], ...}

    These are raw scores, `null` for a missing or non-finite one. Equal requests have equal answers.

Errors are answered with `{"error": MESSAGE}` and one of these: 400 the body is not as above, 401 a missing or wrong
token, 404 no such path, 408 the body came too slowly, 411 no length, 413 too large, 422 the reward refuses these clips
or prompts, 500 the reward failed, 503 busy or not ready yet. Clients repeat a request after a 503, and after a 429, 502
or 504 of a gateway.

A server with a token answers requests with `Authorization: Bearer TOKEN` only. Nothing is encrypted, neither token nor
clips: listen on the loopback address or in a trusted network.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import logging
import math
import re
import socket
import sys
import traceback
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import safetensors.torch
import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from torch import Tensor

from finetrainers.utils.failures import InputError
from finetrainers.utils.reading import expect, parse_json, parse_json_object
from finetrainers.utils.text import printable, shortened

from .base import Head, ImageUse, Reward, Scope
from .calls import Columns, start_calls, to_scores
from .limits import FairQueue, TimedReader
from .retries import Retries, RetriesExhausted

logger = logging.getLogger(__name__)

PORT = 8000
MAX_BYTES = 2**30  # eight clips of 81 frames of 480x832 have 0.8 * 2**30
MAX_CLIPS = 256
#: Environment variable with the token, of the server and its clients.
TOKEN_VARIABLE = "FINETRAINERS_REWARD_TOKEN"
_AT_ONCE = 8  # requests held in memory; the next ones wait before their bodies are read
_PATIENCE = 30.0  # seconds that they wait before a 503
_IDLE = 60.0  # seconds after which an answer that is not read is dropped
_GRACE, _RATE = 10.0, 2**20  # seconds and bytes a second within which a request must arrive, see `TimedReader`
_REMEMBERED = 64  # cached answers
_LONGEST = 500  # characters of an error
_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)


class Description(BaseModel):
    """A server's description of its reward."""

    protocol: Literal[1] = 1
    reward: str
    max_bytes: int
    max_clips: int | None = None
    heads: dict[str, Head] = Field(min_length=1)
    images: ImageUse = "none"
    scope: Scope = "clip"
    columns: Columns = Columns()


@dataclass(frozen=True)
class Request:
    """Clips `[B, T, H, W, 3]` uint8, their prompts and frame rate, the images `[B, H, W, 3]` they start from, and the
    columns of their prompts, each a list of B values."""

    videos: Tensor
    prompts: tuple[str, ...]
    fps: float
    images: Tensor | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Return the body of the request."""
        metadata = {"prompts": json.dumps(self.prompts), "fps": repr(float(self.fps))}
        metadata |= {"columns": json.dumps(self.columns)} if self.columns else {}
        tensors = {"videos": self.videos} if self.images is None else {"videos": self.videos, "images": self.images}
        return safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()}, metadata=metadata)

    @classmethod
    def unpack(cls, body: bytes) -> Request:
        """Read the body of a request.

        Raises:
            ValueError: it does not follow the protocol.
        """
        try:
            tensors = safetensors.torch.load(body)
        except SafetensorError as error:
            raise ValueError(f"the body is not a safetensors file: {error}") from None
        # The library has checked the header, but returns metadata only for files on disk.
        header = parse_json_object(body[8 : 8 + int.from_bytes(body[:8], "little")], "the header")
        metadata = expect(header.get("__metadata__") or {}, dict, "the header's __metadata__")
        if not {"videos"} <= tensors.keys() <= {"videos", "images"} or not {"prompts", "fps"} <= metadata.keys():
            raise ValueError("expected: the tensor 'videos', optionally 'images', and the metadata 'prompts' and 'fps'")
        videos, prompts, fps = tensors["videos"], _parse_json(metadata["prompts"]), _parse_number(metadata["fps"])
        if videos.dtype != torch.uint8 or videos.ndim != 5 or videos.shape[-1] != 3 or videos.numel() == 0:
            raise ValueError(f"videos must be uint8 [B, T, H, W, 3], got {videos.dtype} {list(videos.shape)}")
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("prompts must be a JSON list of strings")
        if len(prompts) != len(videos):
            raise ValueError(f"{len(videos)} videos, but {len(prompts)} prompts")
        if not 0 < fps < math.inf:
            raise ValueError(f"fps must be a positive number, got {shortened(metadata['fps'], 20)}")
        images = tensors.get("images")
        if images is not None and (images.dtype != torch.uint8 or images.shape != (len(videos), *videos.shape[2:])):
            raise ValueError(
                f"images must be uint8 [B, H, W, 3], as the videos, got {images.dtype} {list(images.shape)}"
            )
        columns = _parse_json(metadata.get("columns", "{}"))
        rows = list(columns.values()) if isinstance(columns, dict) else [None]
        if not all(isinstance(row, list) and len(row) == len(videos) for row in rows):
            raise ValueError(f"columns must be a JSON object of lists of {len(videos)} values")
        return cls(videos, tuple(prompts), fps, images, columns)

    def rows(self, rows: slice) -> Request:
        """Return the request for some of the clips."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        images = None if self.images is None else self.images[rows]
        return Request(self.videos[rows], self.prompts[rows], self.fps, images, columns)

    def digest(self) -> str:
        """Return the hash of the request, the key of its cached answer."""
        texts = [list(self.videos.shape), self.prompts, self.fps, self.columns]
        sha256 = hashlib.sha256(json.dumps(texts).encode())
        sha256.update(self.videos.contiguous().numpy().data)
        if self.images is not None:
            sha256.update(self.images.contiguous().numpy().data)
        return sha256.hexdigest()


class RewardServer(ThreadingHTTPServer):
    """Server of one reward; `serve_forever` until `shutdown`, both of the standard library."""

    request_queue_size = 128  # every rank of a large run may call at once

    def __init__(
        self,
        reward: Reward,
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = PORT,
        max_bytes: int = MAX_BYTES,
        max_clips: int = MAX_CLIPS,
        batch_size: int | None = None,
        token: str | None = None,
    ) -> None:
        """Listen, without answering yet.

        Args:
            reward: to serve; one call at a time.
            name: of the reward in descriptions.
            host: address to listen on; `0.0.0.0` for all.
            port: 0 for any free one.
            max_bytes: larger bodies are refused.
            max_clips: more clips in a request are refused.
            batch_size: clips scored at once; default: the reward's own.
            token: requests without it are refused; by default, no request needs one.

        Raises:
            OSError: the server cannot listen on the address.
        """
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.max_bytes = max_bytes
        self.max_clips = max_clips
        self.token = token
        self.places = FairQueue(_AT_ONCE)
        self.description = Description(
            reward=name, max_bytes=max_bytes, max_clips=max_clips, heads=dict(reward.heads), images=reward.images,
            scope=reward.scope, columns=reward.columns,
        )  # fmt: skip
        self._reward = reward
        self._batch_size = batch_size or reward.batch_size
        self._turn = FairQueue(1)
        self._answers: OrderedDict[str, dict[str, list[float | None]]] = OrderedDict()

    @property
    def url(self) -> str:
        """Address of the server."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if self.address_family == socket.AF_INET6 else f"http://{host!s}:{port}"

    def score(self, request: Request, *, client: str = "") -> dict[str, list[float | None]]:
        """Return the scores of a request, cached for its repetition for another head or after a broken connection."""
        digest = request.digest()
        with self._turn.place(client):
            if digest not in self._answers:
                self._answers[digest] = _score(self._reward, request, batch_size=self._batch_size)
                if len(self._answers) > _REMEMBERED:
                    self._answers.popitem(last=False)
            return self._answers[digest]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection's error, as a line instead of a traceback if the client has left."""
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError | TimeoutError):
            logger.warning("%s disconnected: %s", client_address[0], error)
        else:
            logger.error("request of %s\n%s", client_address[0], _format_traceback())

    def run(self) -> None:
        """Answer requests until interrupted."""
        logger.info(
            "serving %s (%s) at %s; stop with Ctrl-C",
            self.description.reward, ", ".join(self.description.heads), self.url,
        )  # fmt: skip
        with self:
            try:
                self.serve_forever()
            except KeyboardInterrupt:
                logger.info("stopped")


class _RequestError(Exception):
    """Error that is answered to a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """Handler of the requests of one connection."""

    server: RewardServer
    timeout = _IDLE  # of the socket, by socketserver

    def setup(self) -> None:
        """Read with a deadline, including headers."""
        super().setup()
        self.rfile.close()
        self._reader = TimedReader(self.connection, grace=_GRACE, rate=_RATE)
        self.rfile = io.BufferedReader(self._reader)

    def do_GET(self) -> None:
        try:
            self._check_token()
            if self.path != "/":
                message = f"{self.path} not found; GET / describes the server, POST /score scores clips"
                raise _RequestError(404, message)
        except _RequestError as error:
            self.send_error(error.status, str(error))
        else:
            self._answer(200, self.server.description.model_dump(exclude={"columns": {"excluded", "prompts"}}))

    def do_POST(self) -> None:
        client = self.client_address[0]
        try:
            self._check_token()
            length = self._length()
            try:
                with self.server.places.place(client, patience=_PATIENCE):
                    scores = self._scores(length)
            except TimeoutError:
                raise _RequestError(503, "busy with other requests; try again") from None
        except _RequestError as error:
            self.send_error(error.status, str(error))
        else:
            self._answer(200, scores)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with an error as JSON instead of the library's HTML, including errors that the library finds."""
        # The message may quote the request, and the log is read in terminals.
        text = shortened(printable(message or self.responses[code][0]), _LONGEST)
        logger.warning("%s: %s %s", self.client_address[0], code, text)
        self._answer(code, {"error": text})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Log as the rest of the package does."""
        logger.debug("%s: %s", self.client_address[0], printable(format % args))

    def _check_token(self) -> None:
        """Refuse a request without the server's token, without reading its body."""
        token = self.server.token
        header = self.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(header.encode(), f"Bearer {token}".encode()):
            problem = "the token is wrong" if header else "this server requires a token"
            raise _RequestError(401, f"{problem}; set {TOKEN_VARIABLE}")

    def _length(self) -> int:
        """Return the length of the body, if it is acceptable."""
        text = self.headers.get("Content-Length", "")
        limit = self.server.max_bytes
        if not text.isascii() or not text.isdecimal():
            raise _RequestError(411, "the request must have the length of its body")
        if not _LENGTH.fullmatch(text):
            raise _RequestError(413, f"the body has a length of {len(text)} digits, the limit is {limit} bytes")
        length = int(text)
        if self.path != "/score":
            self._discard(length)
            raise _RequestError(404, f"{self.path} not found; POST clips to /score")
        if length > limit:
            self._discard(length)
            raise _RequestError(413, f"the body has {length} bytes, the limit is {limit}; send fewer clips at once")
        return length

    def _discard(self, length: int) -> None:
        """Read and drop a body; otherwise its sender sees a broken connection instead of the answer."""
        remaining = min(length, 4 * self.server.max_bytes)
        self._reader.begin()
        try:
            while remaining > 0 and (part := self.rfile.read(min(remaining, 2**20))):
                remaining -= len(part)
        except TimeoutError:
            return

    def _scores(self, length: int) -> dict[str, list[float | None]]:
        self._reader.begin()
        try:
            body = self.rfile.read(length)
        except TimeoutError:
            message = f"the body arrived too slowly: after {_GRACE:g} s, at least {_RATE / 2**20:g} MiB/s are required"
            raise _RequestError(408, message) from None
        if len(body) < length:
            raise _RequestError(400, f"the body ends after {len(body)} of {length} bytes")
        try:
            request = Request.unpack(body)
        except ValueError as error:
            raise _RequestError(400, str(error)) from None
        del body  # as large as the videos
        if len(request.prompts) > self.server.max_clips:
            message = f"{len(request.prompts)} clips, the limit is {self.server.max_clips}; send fewer at once"
            raise _RequestError(413, message)
        try:
            return self.server.score(request, client=self.client_address[0])
        except ValueError as error:
            raise _RequestError(422, str(error)) from None
        except RetriesExhausted as error:  # the client repeats the request
            raise _RequestError(503, str(error)) from None
        except Exception as error:  # any error of the reward concerns only this request
            logger.error("the reward failed\n%s", _format_traceback())
            raise _RequestError(500, f"{type(error).__name__}: {error}") from None

    def _answer(self, status: int, content: Mapping[str, Any]) -> None:
        body = json.dumps(content, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _score(reward: Reward, request: Request, *, batch_size: int) -> dict[str, list[float | None]]:
    """Return raw scores of all heads, computed in batches; clips of a prompt that are compared are one batch."""
    scores_by_head: dict[str, list[float | None]] = {head: [] for head in reward.heads}
    if reward.images == "required" and request.images is None:
        raise InputError("this reward requires the images that clips start from", "required")
    missing = [name for name in reward.columns.required if name not in request.columns]
    if missing:
        raise InputError(f"this reward requires the column {missing[0]} of the prompts", "required")
    count = len(request.prompts)
    size = count if reward.scope == "group" else batch_size
    parts = [request.rows(slice(start, start + size)) for start in range(0, count, size)]
    calls, retries = [partial(_call, reward, part) for part in parts], Retries("the reward", seconds=0.0)
    outcomes = start_calls(calls, asynchronous=reward.asynchronous, retries=retries)
    for part, outputs in zip(parts, outcomes, strict=True):
        if isinstance(outputs, Exception):
            raise outputs
        for head, values in scores_by_head.items():
            scores = to_scores(outputs.get(head) if isinstance(outputs, Mapping) else None, len(part.prompts))
            if scores is None:
                raise RuntimeError(f"the reward returned no {head!r} of shape [{len(part.prompts)}]")
            values += [value if math.isfinite(value) else None for value in scores[0].tolist()]
    return scores_by_head


@torch.no_grad()
def _call(reward: Reward, part: Request) -> Any:
    images = None if part.images is None else part.images.movedim(-1, -3).float() / 255
    keywords: dict[str, Any] = {} if reward.images == "none" else {"images": images}
    keywords |= {name: values for name, values in part.columns.items() if reward.columns.takes(name)}
    return reward.score(part.videos.movedim(-1, -3).float() / 255, part.prompts, fps=part.fps, **keywords)


def _parse_json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _parse_number(text: str) -> float:
    """Return a JSON number, or NaN for anything else, including numbers beyond a float."""
    value = _parse_json(text)
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _format_traceback() -> str:
    """Return the traceback of the handled exception, without terminal escapes that its message may quote."""
    return "\n".join(map(printable, traceback.format_exc().rstrip().split("\n")))
