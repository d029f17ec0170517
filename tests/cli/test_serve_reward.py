"""`finetrainers serve-reward`: what it serves, and that mistakes end in a sentence."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from real_process import Python
from refusals import refused_options

from finetrainers.cli import serve_reward
from finetrainers.config.arguments import ArgumentParser
from finetrainers.config.errors import ConfigError
from finetrainers.rewards import registry, server
from finetrainers.rewards.pixels import Brightness, Color
from finetrainers.rewards.served import ServedReward
from finetrainers.rewards.weights import torch_device

ROOT = Path(__file__).parents[2]


class Idle:
    """In place of a server: what it is made from, and nothing is answered."""

    made: list[tuple[Any, dict[str, Any]]]

    def __init__(self, reward: Any, **options: Any) -> None:
        self.made.append((reward, options))

    def run(self) -> None:
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    Idle.made = []
    monkeypatch.setattr(server, "RewardServer", Idle)
    return Idle.made


def run(*words: str) -> int:
    parser = ArgumentParser()
    serve_reward.add_serve_reward(parser.add_subparsers(dest="command"))
    arguments = parser.parse_args(["serve-reward", *words], checked=True)
    return arguments.run(arguments)


def test_the_reward_is_made_and_served(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(server.TOKEN_VARIABLE, raising=False)
    limits = ("--max_mib", "3", "--max_clips", "7")
    assert run("color,target=#0000ff,batch_size=2", "--host", "0.0.0.0", "--port", "81", *limits) == 0
    assert run("brightness") == 0
    (reward, options), (other, defaults) = served
    assert isinstance(reward, Color)
    assert reward.target is not None
    assert reward.target.tolist() == [0, 0, 1]
    assert options == {
        "name": "color", "host": "0.0.0.0", "port": 81, "max_bytes": 3 * 2**20, "max_clips": 7, "batch_size": 2,
        "token": None,
    }  # fmt: skip
    assert isinstance(other, Brightness)
    assert defaults == {
        "name": "brightness",
        "host": "127.0.0.1",
        "port": server.PORT,
        "max_bytes": server.MAX_BYTES,
        "max_clips": server.MAX_CLIPS,
        "batch_size": None,
        "token": None,
    }


def test_the_device_is_an_option_of_the_reward(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that trains as well, by itself a server would take the GPU of the first training process."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(registry, "make_reward", lambda name, options: made.append(dict(options)))
    with refused_options(("--device", "unavailable")):
        run("clipscore", "--device", "cuda:99")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert run("clip,frames=2", "--device", "cuda:7") == 0
    assert run("clip,device=cpu", "--device", "cpu") == 0
    assert run("clip") == 0
    assert made == [{"frames": "2", "device": "cuda:7"}, {"device": "cpu"}, {}]
    with refused_options(("--device", "conflict")):
        run("clip,device=cpu", "--device", "cuda:7")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="device"):
        run("brightness", "--device", "cuda:7")  # it runs where the clips are


@pytest.mark.parametrize(("name", "value"), [("gpu7", "cuda:1"), ("cuda:99", "GPU")])
def test_a_device_that_is_not_there_is_said(name: str, value: str) -> None:
    assert torch_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=value) as caught:
        torch_device(name)
    assert repr(name) in str(caught.value)


def test_a_token_comes_from_the_environment_or_a_flag(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(server.TOKEN_VARIABLE, "from-outside")
    run("brightness")
    run("brightness", "--token", "given")
    monkeypatch.setenv(server.TOKEN_VARIABLE, "")
    run("brightness")
    assert [options["token"] for _, options in served] == ["from-outside", "given", None]
    for token in ("", "two words", "l\u00e9on", "a\x1b[31m"):
        with refused_options(("--token", "invalid")) as error:
            run("brightness", f"--token={token}")
        assert not token or token not in str(error.value)  # it is a secret all the same


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("brightnes", ["'brightness'"]),
        ("brightness=0.5", ["weight "]),
        ("brightness,mean=1,every=2", ["every ", "mean "]),
        ("demo.color", ["http://...#color"]),
        ("brightness,color", ["'color'"]),
        ("brightness,batch_size=none", ["batch_size: "]),
        ("color,target=tael", ["'teal'"]),
        ("color,aim=teal", ["aim"]),
        ("nowhere:Reward", ["No module named 'nowhere'"]),
    ],
)
def test_mistakes_are_said(word: str, values: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        run(word, "--port", "0")
    assert [problem.where for problem in caught.value.problems] == ["reward"] * len(values)
    assert [value for value in values if value not in str(caught.value)] == []


@pytest.mark.parametrize("word", ["brightness=0.5", "brightness,mean=1", "demo.color"])
def test_what_belongs_to_training_is_not_served(word: str) -> None:
    with refused_options(("reward", "unsupported")):
        run(word, "--port", "0")


def test_a_taken_port_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with refused_options(("--host, --port", "unavailable")) as caught:
            run("brightness", "--port", port)
        assert f"127.0.0.1:{port}: " in str(caught.value)


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_ports_are_checked(port: str) -> None:
    with refused_options(("--port", "invalid")):
        run("brightness", f"--port={port}")


def test_another_process_scores_until_interrupted(python: Python) -> None:
    process = python("-m", "finetrainers", "serve-reward", "brightness", "--port", "0")
    serving = re.compile(r"serving.*(http://\S+:\d+)")
    process.wait_until(lambda: serving.search(process.stderr) is not None)
    url = serving.search(process.stderr)
    assert url
    videos = torch.randint(256, (2, 3, 3, 8, 8), generator=torch.Generator().manual_seed(0)).float() / 255
    found = ServedReward.at(url[1])().score(videos, ["", ""], fps=8.0)["score"]
    assert found.equal(Brightness().score(videos, ["", ""], fps=8.0)["score"])
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
