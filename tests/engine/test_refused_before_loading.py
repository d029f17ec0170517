"""What a run would refuse, a dry run refuses: before anything is loaded, all reasons at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from finetrainers import ConfigError, load_config, train
from finetrainers.cli.main import main
from finetrainers.utils import fetch

Refused = Callable[..., list[str]]


@pytest.fixture
def refused(options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """`refused(family, version, **changes)`: places of what a dry run of these options refuses, and the same of a run."""
    from finetrainers.engine import run as runs

    def started(*_: Any) -> None:
        raise AssertionError("loading begins")

    monkeypatch.setattr(runs, "assemble", started)

    def refuse(family: str = "ltx_video", **changes: Any) -> list[str]:
        found = []
        for dry_run in (True, False):
            with pytest.raises(ConfigError) as error:
                train(load_config(**options(family, dry_run=dry_run, **changes)))
            found.append([problem.where for problem in error.value.problems])
        assert found[0] == found[1]
        return found[0]

    return refuse


def estimated(values: dict[str, Any], *flags: str) -> int:
    """The exit code of `finetrainers estimate` with these options."""
    given = [text for name, value in values.items() if name != "dry_run" for text in (f"--{name}", str(value))]
    return main(["estimate", *given, *flags])


def test_sizes_without_positions_are_refused_everywhere(
    refused: Refused, options: Callable[..., dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny image-to-video checkpoint has positions for 64x64 alone, as CogVideoX-5b-I2V for 480x720."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "size": "9x64x96", "image": "a.png"}\n')
    i2v: dict[str, Any] = {"family": "cogvideox", "version": "i2v"}
    assert set(refused(**i2v, video_resolution_buckets=["9x64x80"])) == {"--video_resolution_buckets"}
    assert "--image_resolution_buckets" in refused(**i2v, image_resolution_buckets=["64x96"])
    assert "data" in refused(**i2v, video_resolution_buckets=None, resolutions=[96], frame_buckets=[9])
    assert "--validation_prompts" in refused(**i2v, validation_prompts=str(tmp_path / "p.jsonl"))
    rewarded = {"method": "grpo", "prompts": str(tmp_path / "p.jsonl"), "reward": ["brightness"], "data_root": None}
    found = refused(**i2v, **rewarded, video_resolution_buckets=None, rollout_size="9x64x96")
    assert "--rollout_size" in found
    values = {**options("cogvideox", version="i2v"), "video_resolution_buckets": "9x64x80"}
    assert estimated(values) == 2
    values["video_resolution_buckets"] = "9x2416x64"
    values["pretrained_model_name_or_path"] = options("cogvideox", version="1.5")["pretrained_model_name_or_path"]
    assert estimated(values) == 2
    assert "2400x2400" in capsys.readouterr().err


def test_sequence_parallelism_needs_a_plan_of_tokens(refused: Refused, options: Callable[..., dict]) -> None:
    """HunyuanVideo-I2V looks for the image in the first of its tokens, of which each process would have others."""
    changes = {"version": "token_replace", "sp_size": 2}
    assert refused("hunyuan_video", **changes) == ["--sp_size"]
    assert estimated(options("hunyuan_video", **changes), "--num_processes", "2") == 2


class Pictures(ThreadingHTTPServer):
    """Serves `a.png`, which is an image, `text`, which is not, and `slow`, which never ends; `asked` has the paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[str] = []
        content = BytesIO()
        Image.new("RGB", (64, 64), "red").save(content, "PNG")
        self.png, self.closing = content.getvalue(), threading.Event()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Answer(BaseHTTPRequestHandler):
    server: Pictures

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path not in ("/a.png", "/text", "/slow"):
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.png if self.path == "/a.png" else b"no image")
        if self.path == "/slow":
            self.server.closing.wait(20)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pictures() -> Iterator[Pictures]:
    with Pictures() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


def test_images_that_cannot_be_fetched_are_refused_by_name(
    refused: Refused, options: Callable[..., dict], pictures: Pictures, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(fetch, "DEADLINE_S", 1.0)
    wrong = [pictures.url("gone.png"), pictures.url("text"), pictures.url("slow"), "http://127.0.0.1:9/x.png"]
    given = {"validation_inference_steps": 2, "prompts": None}
    for url in wrong:
        assert refused(validation_prompts="a@@@9x64x64", validation_images=url) == ["--validation_images"]
    assert refused(validation_prompts="a@@@9x64x64", validation_last_images=wrong[3]) == ["--validation_last_images"]
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a", "size": "9x64x64", "image": "{wrong[3]}"}}\n')
    scored = {"eval_prompts": str(tmp_path / "p.jsonl"), "eval_reward": ["brightness"], "eval_steps": 1}
    assert refused(**scored) == ["--eval_prompts"]
    rewarded = {"method": "grpo", "prompts": str(tmp_path / "p.jsonl"), "reward": ["brightness"], "data_root": None}
    assert "data" in refused(**rewarded, rollout_size="9x64x64", video_resolution_buckets=None)
    monkeypatch.setattr(fetch, "MAX_BYTES", 10)
    assert refused(validation_prompts="a", validation_images=pictures.url("a.png")) == ["--validation_images"]
    monkeypatch.undo()

    pictures.asked.clear()
    good = options(**given, validation_prompts="a@@@9x64x64", validation_images=pictures.url("a.png"), train_steps=1)
    train(load_config(**good, dry_run=True))
    train(load_config(**good))
    assert pictures.asked == ["/a.png"]
    run = good["output_dir"]
    flags = ["--prompts", "a@@@9x64x64", "--image", wrong[3], "--dry_run"]
    for command in ("sample", "watch"):
        assert main([command, run, *flags]) == 2
        assert f"--image: {wrong[3]} cannot be fetched" in capsys.readouterr().err
