"""A hub on loopback that serves one model: up, gated, busy, without that model, broken off, or silent."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from finetrainers.models.files import hub as asked_hub

REPO, COMMIT = "someone/model", "a" * 40


class Hub(ThreadingHTTPServer):
    """Serves a folder as a repository of the hub.

    Attributes:
        folder: what is served.
        mode: `up`, `gated`, `unknown`, `broken` (each answer is a 503), or `silent` (none comes).
        busy_for: how many requests are answered with 429 first.
        cut: whether the first download of each file ends in its middle.
        asked: requests for the repository, by method.
        resumed, broken_off: files of which the rest was asked for; that ended early.
        waited: seconds that the client would have slept.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder = folder
        self.mode = "up"
        self.busy_for = 0
        self.cut = False
        self.asked: Counter[str] = Counter()
        self.resumed: list[str] = []
        self.broken_off: set[str] = set()
        self.waited: list[float] = []
        self.closing = threading.Event()

    def close(self) -> None:
        """Be gone: connections are refused from here on."""
        self.closing.set()
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        hub = self.server
        if REPO in self.path:  # threads that a library started in an earlier test may ask for others
            hub.asked[self.command] += 1
        if hub.busy_for > 0:
            hub.busy_for -= 1
            return self._refuse(429, {"Retry-After": "0"})
        if hub.mode == "silent":
            hub.closing.wait(60)
        if hub.mode in ("silent", "broken"):
            return self._refuse(503, {})
        if hub.mode == "gated":
            return self._refuse(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        if hub.mode == "unknown":
            return self._refuse(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        name = self.path.partition(f"/{REPO}/resolve/")[2].partition("/")[2]
        file = hub.folder / name
        if not name or not file.is_file():
            return self._refuse(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        data = file.read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-").partition("=")[2].partition("-")[0])
        if start:
            hub.resumed.append(name)
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if with_body:
            breaks = hub.cut and not start and name not in hub.broken_off and len(data) > 2000
            if breaks:
                hub.broken_off.add(name)
            self.wfile.write(data[start : len(data) // 2 if breaks else None])
            if breaks:
                self.close_connection = True

    def _refuse(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with a tiny model, which huggingface_hub takes for the hub, as it would with HF_ENDPOINT."""
    server = Hub(tiny_repo("ltx_video"))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", server.waited.append)
    huggingface_hub.close_session()  # it knows by now whether it is offline
    asked_hub.ask(())
    yield server
    server.close()
    monkeypatch.undo()
    asked_hub.ask(())
    huggingface_hub.close_session()
