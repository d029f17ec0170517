"""A reward over HTTP: both ends for real on the loopback address, and ends that flicker, stall and talk nonsense."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
import safetensors.torch
import torch
from refusals import refused
from torch import Tensor

from finetrainers.config.rewards import RewardEntry
from finetrainers.rewards.base import Head, Reward
from finetrainers.rewards.pixels import Brightness
from finetrainers.rewards.registry import image_use, resolve_reward, server_problem
from finetrainers.rewards.reward_set import RewardError, RewardSet
from finetrainers.rewards.served import ServedReward
from finetrainers.rewards.server import PORT, TOKEN_VARIABLE, Request, RewardServer
from finetrainers.utils.failures import error_kind


class Talkative(Reward):
    """Two heads that say what arrived: the mean brightness over the frame rate, and the length of the prompt."""

    heads: ClassVar[Mapping[str, Head]] = {"light": Head(mean=1.5, std=0.5), "length": Head()}
    batch_size = 2

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.shapes: set[tuple[int, ...]] = set()

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        assert not torch.is_grad_enabled()
        self.sizes.append(len(videos))
        self.shapes.add(tuple(videos.shape[1:]))
        if "forbidden" in prompts:
            raise ValueError("the prompt 'forbidden' is refused")
        if "broken" in prompts:
            raise KeyError("nothing here")
        light = videos.mean((1, 2, 3, 4)) / fps
        light[[prompt == "nothing" for prompt in prompts]] = math.nan
        return {"light": light, "length": torch.tensor([float(len(p)) for p in prompts])}


class Lame(Reward):
    """Gives something else than one number a clip."""

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        return {"score": torch.zeros(len(prompts) + 1)}


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """The address of a server that answers from another thread."""
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving(reward: Reward, **options: Any) -> Iterator[str]:
    with running(RewardServer(reward, name="test", port=0, **options)) as url:
        yield url


@contextmanager
def acting(act: Callable[[BaseHTTPRequestHandler, int], None]) -> Iterator[tuple[str, list[float]]]:
    """A server whose n-th request is answered by `act(handler, n)`, and when the requests came."""
    times: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            times.append(time.monotonic())
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            act(self, len(times))

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url, times


def answer(handler: BaseHTTPRequestHandler, status: int, content: Any) -> None:
    handler.send_response(status)
    handler.end_headers()
    handler.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())


DESCRIPTION = {"protocol": 1, "reward": "x", "max_bytes": 10**9, "heads": {"score": {"mean": 0, "std": 1}}}


def clips(count: int = 3) -> Tensor:
    """Whole grey levels, so that eight bits lose nothing."""
    return torch.randint(256, (count, 2, 3, 4, 6), generator=torch.Generator().manual_seed(0)).float() / 255


def post(url: str, body: bytes, *, path: str = "/score", headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Status and error of a request made by hand."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.putrequest("POST", path)
    for name, value in (headers if headers is not None else {"Content-Length": str(len(body))}).items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(body)
    response = connection.getresponse()
    assert response.getheader("Content-Type") == "application/json"
    content = json.loads(response.read())
    connection.close()
    return response.status, content.get("error", "")


# ---- both ends -----------------------------------------------------------------------------------------------------


def near(videos: Tensor, prompts: Sequence[str], *, images: Tensor) -> Tensor:
    return -(videos[:, 0] - images).abs().mean((1, 2, 3))


def test_images_that_clips_start_from_reach_rewards_that_ask() -> None:
    """Scores of a clip and image are equal in this process and over HTTP.

    A reward that requires images reports that they are missing.
    """
    videos, entry = clips(), RewardEntry(name=f"{__name__}:near")
    images = videos[:, 1].flip(0)
    wanted = near(videos, [""] * 3, images=images).double()
    with serving(resolve_reward(entry.reward)(), batch_size=2) as url:
        for name in (entry.reward, url):
            panel = RewardSet([RewardEntry(name=name, batch_size=2)])
            found = panel.score(videos, [""] * 3, fps=8, images=images).heads[name].raw
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
            with pytest.raises(RewardError, match="image"):
                panel.score(videos, [""] * 3, fps=8)
        status, error = post(url, Request(*_bytes(videos), images=images).pack())
        assert (status, "images" in error, "torch.float32 [3, 3, 4, 6]" in error) == (400, True, True)
        status, error = post(url, Request(*_bytes(videos)).pack())
        assert (status, "images" in error) == (422, True)
    plain = RewardSet([RewardEntry(name="brightness")])
    assert plain.score(videos, [""] * 3, fps=8, images=images).heads["brightness"].raw.isfinite().all()
    assert [image_use(RewardEntry(name=name)) for name in (entry.reward, "brightness", "nobody")] == [
        "required", "none", "none"
    ]  # fmt: skip


async def counted(videos: Tensor, prompts: Sequence[str], *, answer: list[int], hint: Any = None) -> list[float]:
    """Compare the clips of a prompt: the answer, and how many clips there are."""
    return [number + 0.25 * len(videos) for number in answer]


counted.scope = "group"  # type: ignore[attr-defined]


def test_columns_and_clips_of_a_prompt_reach_a_server() -> None:
    """Whatever the size of batches at both ends, by a function that is async."""
    videos, rows = clips(6), [{"answer": number, "other": [1]} for number in range(6)]
    with serving(resolve_reward(f"{__name__}:counted")(), batch_size=2) as url:
        panel = RewardSet([RewardEntry(name=url, batch_size=1)])
        assert panel.compares_clips
        scores = panel.score(videos, ["a"] * 3 + ["b"] * 3, fps=8, columns=rows, group=3).heads[url].raw
        assert scores.tolist() == [0.75, 1.75, 2.75, 3.75, 4.75, 5.75]
        assert error_kind(server_problem(RewardEntry(name=url), ["answers"])) == "required"
        assert "'answers'" in str(server_problem(RewardEntry(name=url), ["answers"]))
        assert server_problem(RewardEntry(name=url), ["answer"]) is None
        with pytest.raises(RewardError, match="'answer'"):
            panel.score(videos, ["a"] * 6, fps=8, group=3)
        status, error = post(url, Request(*_bytes(videos)).pack())
        assert (status, "answer" in error) == (422, True)
        status, error = post(url, Request(*_bytes(videos), columns={"answer": [1]}).pack())
        assert (status, "columns" in error) == (400, True)


def _bytes(videos: Tensor) -> tuple[Tensor, tuple[str, ...], float]:
    return (videos * 255).round().byte().movedim(2, -1), ("",) * len(videos), 8.0


def test_served_scores_are_the_rewards_own() -> None:
    videos, prompts = clips(), ["one", "two", "three"]
    with serving(Brightness()) as url:
        served = ServedReward.at(url)().score(videos, prompts, fps=8.0)
    own = Brightness().score(videos, prompts, fps=8.0)
    assert list(served) == ["score"]
    assert served["score"].dtype == torch.float32
    assert served["score"].equal(own["score"])


def test_heads_prompts_and_frame_rate_arrive() -> None:
    videos, prompts, reward = clips(5), ["", "e", "zwei", 'drei "3"', "v\u00fcnf, \U0001f3ac"], Talkative()
    with serving(reward) as url:
        light, length = ServedReward.at(f"{url}#light")(), ServedReward.at(f"{url}/#length")()
        found = light.score(videos, prompts, fps=12.5)["score"]
        assert length.score(videos, prompts, fps=12.5)["score"].tolist() == [0, 1, 4, 8, 7]
    torch.testing.assert_close(found, videos.mean((1, 2, 3, 4)) / 12.5)
    assert light.heads == {"score": Head(mean=1.5, std=0.5)}
    assert length.heads == {"score": Head()}
    # In the reward's own batches, and once for both heads.
    assert reward.sizes == [2, 2, 1]
    assert reward.shapes == {(2, 3, 4, 6)}


def test_only_the_same_request_is_answered_from_memory() -> None:
    videos, reward = clips(2), Talkative()
    same_bytes = videos.permute(0, 1, 3, 4, 2).reshape(2, 2, 6, 4, 3).permute(0, 1, 4, 2, 3)
    with serving(reward, batch_size=8) as url:
        served = ServedReward.at(f"{url}#light")()
        calls = [
            (videos, ["a", "b"], 8.0),
            (videos, ["a", "b"], 8.0),
            (videos, ["b", "a"], 8.0),
            (videos, ["a", "b"], 9.0),
            (videos.flip(0), ["a", "b"], 8.0),
            (same_bytes, ["a", "b"], 8.0),
        ]
        results = [served.score(v, p, fps=f)["score"].tolist() for v, p, f in calls]
    assert reward.sizes == [2] * 5
    assert results[0] == results[1] == results[4][::-1] != results[3]


def test_what_is_not_finite_stays_visible() -> None:
    with serving(Talkative()) as url:
        found = ServedReward.at(f"{url}#light")().score(clips(2), ["nothing", "something"], fps=8.0)["score"]
    assert found.isnan().tolist() == [True, False]


def test_values_are_rounded_to_eight_bits() -> None:
    with serving(Brightness()) as url:
        dim = torch.full((1, 1, 3, 2, 2), 0.6 / 255)
        assert float(ServedReward.at(url)().score(dim, [""], fps=8.0)["score"]) == pytest.approx(1 / 255)


def test_many_ask_at_once() -> None:
    videos, found = clips(12), {}
    with serving(Talkative()) as url:
        served = ServedReward.at(f"{url}#length")()

        def ask(i: int) -> None:
            found[i] = float(served.score(videos[i : i + 1], ["x" * i], fps=8.0)["score"])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {i: float(i) for i in range(12)}


# ---- addresses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "https://a.b/rewards/x#vq", "http://[::1]:8000"])
def test_an_address_alone_contacts_nobody(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("contacted the server"))
    cls = resolve_reward(url)
    assert issubclass(cls, ServedReward)
    assert cls.heads == {"score": Head()}
    assert url in cls.__name__


@pytest.mark.parametrize(
    "url", ["http://", "http://:80", "http://a:b", "http://a:99999", "http://a/?x=1", "http://u:p@a", "ftp://a", "a:80"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with refused("invalid", repr(url)):
        ServedReward.at(url)


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"retries": -1}, {"pause": -1.0}, {"patience": -1.0}, {"timeout": math.nan}]
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with refused("invalid", *(f"{name}={value}" for name, value in options.items())):
        ServedReward.at("http://127.0.0.1:9")(**options)


def test_one_of_several_heads_must_be_named() -> None:
    with serving(Talkative()) as url:
        with refused("required", f"{url}#light, {url}#length"):
            ServedReward.at(url)()
        with refused("unknown", "'width'", f"{url}#light, {url}#length"):
            ServedReward.at(f"{url}#width")()


def test_a_path_goes_before_the_protocols() -> None:
    seen = []

    def act(handler: BaseHTTPRequestHandler, number: int) -> None:
        seen.append(handler.path)
        answer(handler, 200, DESCRIPTION if number == 1 else {"score": [1.0]})

    with acting(act) as (url, _):
        ServedReward.at(f"{url}/a/b/")().score(clips(1), [""], fps=8.0)
    assert seen == ["/a/b/", "/a/b/score"]


# ---- errors of the reward and of requests --------------------------------------------------------------------------


def test_the_clients_error_is_the_servers_message() -> None:
    reward = Talkative()
    with serving(reward) as url:
        served = ServedReward.at(f"{url}#light")(retries=5, pause=0.0)
        with refused("unavailable", url, "'forbidden'", 422):
            served.score(clips(1), ["forbidden"], fps=8.0)
        with pytest.raises(RuntimeError, match=r"KeyError: 'nothing here' .*500"):
            served.score(clips(1), ["broken"], fps=8.0)
        with refused("unavailable", "2 videos", "1 prompt", 400):
            served.score(clips(2), ["one"], fps=8.0)
        assert float(served.score(clips(1), ["fine"], fps=8.0)["score"]) > 0
    assert reward.sizes == [1, 1, 1]  # not tried again, and the server goes on
    with serving(Lame()) as url, pytest.raises(RuntimeError, match=r"'score' .*\[1\]"):
        ServedReward.at(url)().score(clips(1), [""], fps=8.0)


def request(videos: Tensor | None = None, **metadata: str) -> bytes:
    videos = torch.zeros(1, 2, 4, 4, 3, dtype=torch.uint8) if videos is None else videos
    return safetensors.torch.save({"videos": videos}, metadata={"prompts": '["a"]', "fps": "8.0", **metadata})


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"", "safetensors"),
        (b"\xff" * 64, "safetensors"),
        (request()[:-1], "safetensors"),
        (safetensors.torch.save({"videos": torch.zeros(1)}), "'prompts'"),
        (safetensors.torch.save({"clips": torch.zeros(1)}, metadata={"prompts": "[]", "fps": "8"}), "'videos'"),
        (request(torch.zeros(1, 2, 4, 4, 3)), r"torch.float32 [1, 2, 4, 4, 3]"),
        (request(torch.zeros(1, 2, 3, 4, 4, dtype=torch.uint8)), "[1, 2, 3, 4, 4]"),
        (request(torch.zeros(0, 2, 4, 4, 3, dtype=torch.uint8), prompts="[]"), "[0, 2, 4, 4, 3]"),
        (request(prompts="a"), "JSON"),
        (request(prompts="[1]"), "JSON"),
        (request(prompts="[]"), "1 videos, but 0 prompts"),
        (request(fps="0"), "got 0"),
        (request(fps="NaN"), "got NaN"),
        (request(fps="fast"), "got fast"),
        (request(fps="9" * 400), " 99999999999999999999... (400 characters)"),
        (request(fps="9" * 5000), " 9999"),
        (request(fps="true"), "got true"),
        (request(prompts="[" * 100_000), "JSON"),
        (request(prompts='["' + "[" * 100_000 + '"]', fps="{" * 100_000), " {{{"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_malformed_bodies_are_refused(body: bytes, value: str) -> None:
    with serving(Brightness()) as url:
        status, error = post(url, body)
    assert status == 400
    assert value in error


def test_other_requests_are_refused_in_json() -> None:
    with serving(Brightness()) as url:
        assert post(url, b"", headers={})[0] == 411
        assert post(url, b"", headers={"Content-Length": "-1"})[0] == 411
        status, error = post(url, b"xx", path="/other")
        assert (status, "/other" in error, "/score" in error) == (404, True, True)
        connection = HTTPConnection(urlsplit(url).netloc, timeout=10)
        for method, path, status in (("GET", "/score", 404), ("PUT", "/score", 501), ("DELETE", "/", 501)):
            connection.request(method, path)
            response = connection.getresponse()
            assert response.status == status
            assert json.loads(response.read())["error"]


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 19, "\u00b2", "1e3", "+5", "0x10"])
def test_odd_lengths_are_refused(length: str) -> None:
    with serving(Brightness()) as url:
        status, error = post(url, b"", headers={"Content-Length": length.encode("latin-1")})
    if status != 411:
        assert (status, f" {len(length)} digits" in error, "1073741824" in error) == (413, True, True)


def test_more_clips_than_allowed_are_refused_by_both_ends() -> None:
    """Half a million clips of a pixel are small, and would take a minute."""
    reward = Talkative()
    with serving(reward, max_clips=3) as url:
        served = ServedReward.at(f"{url}#light")()
        with refused("too_large", "got 4", url, " 3 ", "batch_size"):
            served.score(torch.zeros(4, 1, 3, 1, 1), [""] * 4, fps=8.0)
        body = request(torch.zeros(4, 1, 1, 1, 3, dtype=torch.uint8), prompts='["", "", "", ""]')
        status, error = post(url, body)
        assert (status, "4 clips" in error, " 3;" in error) == (413, True, True)
        assert served.score(torch.zeros(3, 1, 3, 1, 1), [""] * 3, fps=8.0)["score"].shape == (3,)
    assert reward.sizes == [2, 1]


def test_a_token_is_wanted_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with serving(Brightness(), token="s3cret") as url:
        with refused("unavailable", url, TOKEN_VARIABLE, 401) as missing:
            ServedReward.at(url)()
        assert post(url, request())[0] == 401
        assert post(url, request(), headers={"Authorization": "Bearer S3CRET"})[0] == 401
        monkeypatch.setenv(TOKEN_VARIABLE, "other")
        with refused("unavailable", url, TOKEN_VARIABLE, 401) as wrong:
            ServedReward.at(url)()
        assert str(wrong.value) != str(missing.value)
        monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
        assert float(ServedReward.at(url)().score(clips(1), [""], fps=8.0)["score"]) > 0


def received(connection: socket.socket) -> bytes:
    """All that the server has sent before it closed the connection."""
    parts = []
    with suppress(ConnectionResetError):  # bytes that came after it had closed
        while part := connection.recv(1000):
            parts.append(part)
    return b"".join(parts)


def test_connections_that_trickle_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of them take every place, each with a byte now and then; headers and bodies have a deadline as a whole."""
    monkeypatch.setattr("finetrainers.rewards.server._GRACE", 0.4)
    with serving(Brightness()) as url, ExitStack() as open_ones:
        port, slow = urlsplit(url).port, []
        for number in range(9):
            raw = open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            raw.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 900000\r\n" + (b"\r\nabc" if number else b""))
            slow.append(raw)
        stop = threading.Event()

        def trickle() -> None:
            while not stop.wait(0.05):
                for raw in slow:
                    with suppress(OSError):
                        raw.send(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            served = ServedReward.at(url)(timeout=10, retries=0)
            assert float(served.score(clips(1), [""], fps=8.0)["score"]) > 0
            assert all(b" 408 " in received(raw) for raw in slow[1:])
            assert received(slow[0]) == b""  # not even its headers ended
        finally:
            stop.set()
            thread.join()


def test_a_slow_sender_that_keeps_the_rate_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetrainers.rewards.server._GRACE", 0.3)
    monkeypatch.setattr("finetrainers.rewards.server._RATE", 1000)
    body = request(torch.zeros(1, 1, 16, 16, 3, dtype=torch.uint8))
    with serving(Brightness()) as url, socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=10) as raw:
        raw.sendall(f"POST /score HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        for start in range(0, len(body), 200):  # 200 bytes every 0.1 s
            time.sleep(0.1)
            raw.sendall(body[start : start + 200])
        assert b"200 OK" in raw.makefile("rb").read()


class Quoting(Reward):
    """Fails with what it was asked."""

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        raise (ValueError if "refused" in prompts[0] else KeyError)(prompts[0])


def test_nothing_of_a_request_reaches_the_terminal_raw(caplog: pytest.LogCaptureFixture) -> None:
    """An escape could rewrite what the person before the terminal sees."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\nWARNING all is well"
    with caplog.at_level("DEBUG", logger="finetrainers"), serving(Quoting()) as url:
        for prompt in (evil, f"refused {evil}"):
            assert post(url, request(prompts=json.dumps([prompt])))[0] in (422, 500)
        post(url, request(fps=evil))
        post(url, request(prompts=evil))
        with socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=10) as raw:
            raw.sendall(b"POST /\x1b[31m HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
            assert b"/\\\\x1b[31m " in raw.makefile("rb").read()
        with socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=10) as raw:
            raw.sendall(b"\x1b[31m nonsense\r\n\r\n")
            raw.makefile("rb").read()
    assert "\\x1b]0;owned" in caplog.text
    assert "in score" in caplog.text  # the traceback of the reward
    assert not [c for c in caplog.text if not c.isprintable() and c != "\n"]
    assert not any(line.startswith("WARNING all is well") for line in caplog.text.splitlines())


def test_a_body_that_ends_early_is_refused() -> None:
    with serving(Brightness()) as url, socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=10) as raw:
        raw.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 100\r\n\r\nabc")
        raw.shutdown(socket.SHUT_WR)
        answered = raw.makefile("rb").read()
        assert b" 400 " in answered
        assert b" 3 of 100 " in answered


def test_too_large_requests_are_refused_by_both_ends() -> None:
    reward = Talkative()
    with serving(reward, max_bytes=1000) as url:
        with refused("too_large", "3 clips", " bytes", url, " 1000 ", "batch_size"):
            ServedReward.at(f"{url}#light")().score(torch.zeros(3, 9, 3, 8, 8), [""] * 3, fps=8.0)
        assert post(url, b"\0" * 1000)[0] == 400
    # More than the network buffers: it must be read for the answer to arrive.
    with serving(reward, max_bytes=2**22) as url:
        status, error = post(url, b"\0" * 2**24)
    assert (status, "16777216" in error, "4194304" in error) == (413, True, True)
    assert reward.sizes == []


# ---- the client before bad servers ---------------------------------------------------------------------------------


def test_lost_connections_and_busy_servers_are_tried_again_at_growing_intervals() -> None:
    def act(handler: BaseHTTPRequestHandler, number: int) -> None:
        if number == 1:
            answer(handler, 200, DESCRIPTION)
        elif number == 2:
            answer(handler, 503, {"error": "busy"})
        elif number == 3:
            handler.connection.shutdown(socket.SHUT_RDWR)  # not a word
        elif number == 4:
            handler.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n{")  # half an answer
        else:
            answer(handler, 200, {"score": [0.25]})

    with acting(act) as (url, times):
        served = ServedReward.at(url)(retries=3, pause=0.05)
        assert served.score(clips(1), [""], fps=8.0)["score"].tolist() == [0.25]
    pauses = [after - before for before, after in pairwise(times[1:])]
    assert len(times) == 5
    assert pauses[0] >= 0.05
    assert pauses[1] >= 0.1
    assert pauses[2] >= 0.2


def test_there_is_an_end_to_retries() -> None:
    def busy(handler: BaseHTTPRequestHandler, number: int) -> None:
        answer(handler, 503, {"error": "loading"})

    with acting(busy) as (url, times):
        with pytest.raises(ConnectionError, match=r"loading .*503.* 3 attempts"):
            ServedReward.at(url)(retries=2, pause=0.0)
        assert len(times) == 3
    for options in ({"retries": 0}, {"patience": 0.0}):
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1"):
            ServedReward.at(url)(**options)


def test_a_server_that_comes_up_late_and_restarts_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    found: list[Tensor] = []
    asked_again = threading.Event()

    def ask() -> None:
        served = ServedReward.at(f"http://127.0.0.1:{port}")(pause=0.02)
        for _ in range(2):
            found.append(served.score(clips(1), [""], fps=8.0)["score"])
            asked_again.wait(20)

    thread = threading.Thread(target=ask)
    with caplog.at_level("INFO", logger="finetrainers"):
        thread.start()
        for number in range(2):
            time.sleep(0.1)
            with running(RewardServer(Brightness(), name="late", port=port)):
                deadline = time.monotonic() + 20
                while len(found) <= number and time.monotonic() < deadline:
                    time.sleep(0.01)
            asked_again.set()
        thread.join(timeout=20)
    assert [scores.tolist() for scores in found] == [Brightness().score(clips(1), [""], fps=8.0)["score"].tolist()] * 2
    assert caplog.text.count(" works again ") == 2


@pytest.mark.parametrize("status", [400, 404, 422, 500])
def test_other_errors_are_final(status: int) -> None:
    def act(handler: BaseHTTPRequestHandler, number: int) -> None:
        answer(handler, 200 if number == 1 else status, DESCRIPTION if number == 1 else {"error": "no and no"})

    with acting(act) as (url, times):
        served = ServedReward.at(url)(pause=0.0)
        with pytest.raises(ValueError if status < 500 else RuntimeError, match=rf"and no .*{status}"):
            served.score(clips(1), [""], fps=8.0)
    assert len(times) == 2


def test_gateways_and_slow_answers_are_asked_again() -> None:
    done = threading.Event()

    def act(handler: BaseHTTPRequestHandler, number: int) -> None:
        if number == 1:
            answer(handler, 200, DESCRIPTION)
        elif number <= 5:
            answer(handler, (429, 502, 503, 504)[number - 2], b"<html>")
        elif number == 6:
            done.wait(10)
        else:
            answer(handler, 200, {"score": [0.5]})

    with acting(act) as (url, times):
        served = ServedReward.at(url)(timeout=0.2, pause=0.0)
        assert served.score(clips(1), [""], fps=8.0)["score"].tolist() == [0.5]
        done.set()
    assert len(times) == 7


def test_a_server_that_never_answers_in_time_is_given_up() -> None:
    done = threading.Event()

    def act(handler: BaseHTTPRequestHandler, number: int) -> None:
        answer(handler, 200, DESCRIPTION) if number == 1 else done.wait(10)

    with acting(act) as (url, times):
        served = ServedReward.at(url)(timeout=0.1, patience=0.15, pause=0.0)
        with pytest.raises(ConnectionError, match=r" 0\.1 s; .*timeout"):
            served.score(clips(1), [""], fps=8.0)
        done.set()
    assert 3 <= len(times) <= 4


class Unreachable(Reward):
    """Depends on a service that is down."""

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        raise ConnectionRefusedError("judge-down")


def test_a_servers_own_service_that_is_down_is_waited_for_by_the_client() -> None:
    with serving(Unreachable()) as url:
        status, error = post(url, request())
    assert (status, "judge-down" in error) == (503, True)


@pytest.mark.parametrize("content", [b"<html>", [1], {**DESCRIPTION, "protocol": 2}, {**DESCRIPTION, "heads": {}}])
def test_other_servers_are_told_apart(content: Any) -> None:
    with (
        acting(lambda handler, number: answer(handler, 200, content)) as (url, _),
        refused("mismatch", url, "protocol 1"),
    ):
        ServedReward.at(url)()


def test_what_does_not_speak_http_is_told_apart() -> None:
    with (
        acting(lambda handler, number: handler.wfile.write(b"SSH-2.0-x\r\n") and None) as (url, _),
        pytest.raises(RuntimeError, match="HTTP: BadStatusLine"),
    ):
        ServedReward.at(url)()


@pytest.mark.parametrize("scores", [[1.0], {"score": [1.0]}, {"score": 1.0}, {"other": [1.0, 2.0]}, None])
def test_answers_without_the_scores_are_refused(scores: Any) -> None:
    def act(handler: BaseHTTPRequestHandler, number: int) -> None:
        answer(handler, 200, DESCRIPTION if number == 1 else scores)

    with acting(act) as (url, _), pytest.raises(RuntimeError, match=f"{url} .*2 scores .*'score'"):
        ServedReward.at(url)().score(clips(2), ["", ""], fps=8.0)


# ---- the server ----------------------------------------------------------------------------------------------------


def test_the_server_describes_itself() -> None:
    with serving(Talkative(), max_bytes=12345) as url:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request("GET", "/")
        assert json.loads(connection.getresponse().read()) == {
            "protocol": 1,
            "reward": "test",
            "max_bytes": 12345,
            "max_clips": 256,
            "heads": {"light": {"mean": 1.5, "std": 0.5}, "length": {"mean": 0.0, "std": 1.0}},
            "images": "none",
            "scope": "clip",
            "columns": {"required": [], "optional": [], "takes_all": False},
        }


def test_requests_survive_packing() -> None:
    videos = torch.randint(256, (2, 3, 4, 5, 3), dtype=torch.uint8)
    sent = Request(videos, ("a", 'b "\u00fc"'), 23.976, columns={"answer": ["\u00fc", None]})
    received = Request.unpack(sent.pack())
    assert received.columns == sent.columns
    assert received.videos.equal(videos)
    assert (received.prompts, received.fps) == (sent.prompts, sent.fps)
    assert received.digest() == sent.digest()


def test_too_many_requests_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetrainers.rewards.server._PATIENCE", 0.05)
    server = RewardServer(Brightness(), name="busy", port=0)
    with running(server) as url:
        served = ServedReward.at(url)(retries=0)
        with ExitStack() as taken:
            for _ in range(8):
                taken.enter_context(server.places.place("another"))
            with pytest.raises(ConnectionError, match=r"busy .*503"):
                served.score(clips(1), [""], fps=8.0)
        assert float(served.score(clips(1), [""], fps=8.0)["score"]) > 0


def test_serve_says_where_and_stops_at_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(self: RewardServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RewardServer, "serve_forever", interrupted)
    with caplog.at_level("INFO", logger="finetrainers"):
        RewardServer(Talkative(), name="talkative", port=0).run()
    assert "serving talkative (light, length) at http://127.0.0.1:" in caplog.text
    assert "stopped" in caplog.text
    assert PORT == 8000
