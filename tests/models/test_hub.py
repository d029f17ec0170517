"""Models from a hub, here a server on loopback: gated, busy, broken off, gone, and not asked at all."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from finetrainers.config.errors import ConfigError
from finetrainers.config.sections import ModelSection
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.models.registry import get_family

REPO, COMMIT = "someone/model", "a" * 40


class Hub(ThreadingHTTPServer):
    """Serves a folder as a repository of the hub.

    Attributes:
        folder: what is served.
        mode: `up`, `gated`, `unknown`, or `busy`.
        busy_for: how many requests are answered with 429 first.
        cut: whether the first download of each file ends in its middle.
        asked: requests by method.
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
        hub.asked[self.command] += 1
        if hub.busy_for > 0:
            hub.busy_for -= 1
            return self._refuse(429, {"Retry-After": "0"})
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
    yield server
    server.shutdown()
    server.server_close()
    monkeypatch.undo()
    huggingface_hub.close_session()


def spec_in(cache_dir: Path) -> LTXVideoSpec:
    model = ModelSection(
        model_name="ltx_video", pretrained_model_name_or_path=REPO, cache_dir=cache_dir, vae_dtype="fp32"
    )
    return LTXVideoSpec(model)


def test_what_broke_off_or_was_refused_is_fetched_and_then_nothing_is_asked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # what is kept of a file that breaks off
    hub.cut, hub.busy_for = True, 3
    vae = spec_in(tmp_path).load_vae()
    assert hub.busy_for == 0
    weights = "vae/diffusion_pytorch_model.safetensors"
    assert weights in hub.broken_off
    assert weights in hub.resumed  # from where it broke off
    local = LTXVideoSpec(ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(hub.folder), vae_dtype="fp32")).load_vae()  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(vae.state_dict().values(), local.state_dict().values(), strict=True))

    # A hub that is down, busy or has locked the door since does not matter to what lies on disk.
    hub.mode = "gated"
    spec_in(tmp_path).load_vae()
    hub.mode = "up"
    hub.busy_for = 10**6
    spec_in(tmp_path).load_vae()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    asked = sum(hub.asked.values())
    spec = spec_in(tmp_path)
    spec.load_vae()
    assert not get_family("ltx_video").fetch_configs(spec.config.model_copy(update={"transformer_id": str(hub.folder)}))
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set: download it first .*`hf download someone/model`"):
        spec.load_text_encoders()
    assert sum(hub.asked.values()) == asked


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("gated", r"gated: log in at http://\S+/someone/model and accept its conditions.*`hf auth login`"),
        ("unknown", r"There is no http://\S+/someone/model, or it is private"),
        ("down", r"the hub cannot be reached: download it first"),
    ],
)
def test_what_to_do_is_said(hub: Hub, mode: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.mode = mode
    if mode == "down":
        hub.shutdown()
        hub.server_close()
        monkeypatch.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 1)
    spec = spec_in(tmp_path)
    for load in (spec.load_vae, *(() if mode == "down" else (spec.load_text_encoders, spec.load_scheduler))):
        with pytest.raises(ConfigError, match=said):
            load()


def test_a_hub_that_stays_busy_is_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.busy_for = 10**6
    with pytest.raises(ConfigError, match=r"refuses more requests for now \(429\)"):
        spec_in(tmp_path).load_vae()
    assert len(hub.waited) >= 3  # it was asked again, after a while each time
