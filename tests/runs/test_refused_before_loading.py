"""What a run would refuse, a dry run refuses: before anything is loaded, all reasons at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image
from refusals import refused_command, refused_options

from finetrainers import Callback, ConfigError, load_config, train
from finetrainers.cli.main import main
from finetrainers.config.prompts import parse_validation_prompts
from finetrainers.methods import registry as methods
from finetrainers.methods.spec import MethodSpec
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.plan import check_upload, ready
from finetrainers.results import export
from finetrainers.utils import fetch
from finetrainers.utils.failures import Kind

Refused = Callable[..., list[str]]


@pytest.fixture
def refused(options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Return a function that returns the options refused by a dry run, and checks that a run refuses the same ones."""
    from finetrainers.runs import run as runs

    def started(*_: Any) -> None:
        raise AssertionError("loading begins")

    monkeypatch.setattr(runs, "assemble", started)

    def refuse(family: str = "ltx_video", **changes: Any) -> list[str]:
        found = []
        values = {name: value for name, value in options(family, **changes).items() if changes.get(name, 0) is not None}
        for dry_run in (True, False):
            with pytest.raises(ConfigError) as error:
                train(load_config(**values, dry_run=dry_run))
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


def test_what_a_family_has_no_hook_for_is_refused(
    refused: Refused, options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the dry run, the run and the estimate; and by a dry run of a published model whose configs are not here."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64)).save("a.png")
    Path("p.txt").write_text("a\n")
    changes: dict[str, Any] = {
        "method": "refl", "reward": ["brightness"], "prompts": "p.txt", "rollout_size": "9x64x64", "sampling_steps": 3,
        "data_root": None, "video_resolution_buckets": None, "attn_backend": "native", "sp_size": 2,
        "lora_dropout": 0.1, "validation_prompts": "a", "validation_images": "a.png",
    }  # fmt: skip
    values = {n: v for n, v in options(**changes, dry_run=True).items() if changes.get(n, 0) is not None}
    train(load_config(**values))
    hooks = {
        "attention_processor": ["--attn_backend", "--sp_size"], "token_plan": ["--sp_size"], "streams": ["--sp_size"],
        "image_pipeline_class": ["--validation_images"], "sampling_times": ["--method"],
        "recompute_decoder": ["--checkpoint_vae"],
    }  # fmt: skip
    for hook in hooks:
        monkeypatch.setattr(LTXVideoSpec, hook, None)
    places = [option for places in hooks.values() for option in places]
    assert sorted(refused(**changes)) == sorted(places)
    with refused_options(*((option, "unsupported") for option in places)):
        train(load_config(**{**values, "pretrained_model_name_or_path": "Lightricks/LTX-Video"}))
    given = {**values, "reward": "brightness", "num_processes": 2}
    del given["dry_run"]
    code, problems = refused_command(["estimate", *(text for n, v in given.items() for text in (f"--{n}", v))])
    assert (code, sorted(problems)) == (2, sorted((option, "unsupported") for option in places))


def test_files_without_a_layout_of_the_family_are_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LTXVideoSpec, "single_file_layout", None)
    changes = {"training_type": "full-finetune", "export_formats": ["comfyui"]}
    assert refused(**changes) == ["--export_formats"]


class Hub:
    """The parts of `huggingface_hub` that an upload uses: a user with the role `write`, or as a test says."""

    role, away, fails, name = "write", None, False, "me"

    def __init__(self, token: str | None = None) -> None:
        self.token = token

    def whoami(self) -> dict[str, Any]:
        if self.token == "expired":
            raise OSError("Invalid user token")
        return {"name": self.name,
                "orgs": [{"name": "lab", "roleInOrg": "write"}, {"name": "club", "roleInOrg": "read"}],
                "auth": {"accessToken": {"role": self.role}}}  # fmt: skip

    def create_repo(self, name: str, *, exist_ok: bool) -> Any:
        raise OSError("503 Service Unavailable\nfor url ...")


def test_an_upload_that_would_fail_is_refused_and_one_that_fails_loses_nothing(
    refused: Refused, options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = [None]
    push = {"push_to_hub": True, "hub_model_id": "me/lora", "hub_token": "good"}

    def refused_upload(where: str, kind: Kind, **changes: Any) -> None:
        assert refused(**{**push, **changes}) == [where]
        given = {name: value for name, value in {**push, **changes}.items() if value is not None}
        with refused_options((where, kind)):
            check_upload.check_upload(load_config(**options(**given)))

    with monkeypatch.context() as patch:
        refused_upload("--push_to_hub", "unavailable")  # HF_HUB_OFFLINE, as always in tests
        patch.setattr(check_upload, "ask", lambda _: asked[0])
        patch.setattr("huggingface_hub.HfApi", Hub)
        patch.setattr("huggingface_hub.get_token", lambda: None)
        refused_upload("--push_to_hub", "required", hub_token=None)
        refused_upload("--hub_token", "unavailable", hub_token="expired")
        for name in ("club/lora", "someone/lora"):
            refused_upload("--hub_model_id", "unavailable", hub_model_id=name)
        for name in ("me/lora", "lab/lora", "lora"):
            train(load_config(**options(**{**push, "hub_model_id": name}, dry_run=True)))
        patch.setattr(Hub, "role", "read")
        refused_upload("--hub_token", "invalid")
    monkeypatch.undo()

    monkeypatch.setattr(check_upload, "check_upload", lambda _: None)
    monkeypatch.setattr(ready, "check_upload", lambda _: None)
    monkeypatch.setattr(export, "HfApi", Hub)
    values = options(**push, train_steps=1)
    root = Path(values["output_dir"])
    with pytest.raises(export.UploadError, match=f"hf upload me/lora {root} . --include"):
        train(load_config(**values))
    events = [json.loads(line)["event"] for line in (root / "events.jsonl").read_text().splitlines()]
    assert "finished" in events
    assert all((root / name).is_file() for name in ("pytorch_lora_weights.safetensors", "README.md", "report.html"))


class Watching(Callback):
    """A callback that fails as told."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails

    def on_step(self, state: Any) -> None:
        if "step" in self.fails:
            raise KeyError("on_step")

    def on_stop(self, state: Any) -> None:
        if "stop" in self.fails:
            raise ValueError("on_stop")


def test_callbacks_of_the_wrong_kind_are_refused_and_the_first_error_is_raised(
    refused: Refused, options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Misspelled(Callback):
        def on_steps(self, state: Any) -> None: ...

    class Narrow(Callback):
        def on_log(self, state: Any) -> None: ...  # type: ignore[override]

    config = load_config(**options(train_steps=1))
    wrong: list[Any] = [Watching, print, object(), Misspelled(), Narrow()]
    with pytest.raises(ConfigError) as error:
        train(config, callbacks=wrong)
    assert [problem.where for problem in error.value.problems] == [f"callbacks[{index}]" for index in range(5)]
    assert "'on_step'" in error.value.problems[3].message
    with pytest.raises(ConfigError):
        train(config, callbacks=iter([Watching()]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        train(config, callbacks=Misspelled())  # without a list
    assert [problem.where for problem in error.value.problems] == ["callbacks[0]"]
    monkeypatch.undo()
    with pytest.raises(KeyError, match="on_step"):
        train(config, callbacks=[Watching("step", "stop"), Watching()])


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
    assert refused(**rewarded, rollout_size="9x64x64", video_resolution_buckets=None) == ["data"]
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
        assert f"--image: {wrong[3]} " in capsys.readouterr().err


class Halfway:
    """Lacks most of what a method needs."""

    def steps(self, start: int, transformer: Any) -> None: ...


class Misspelled(MethodSpec):
    """Declares an option that there is none of."""

    unread: ClassVar = {"flow_shfit": ""}


def test_methods_of_the_wrong_kind_are_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods.METHODS, "registered", dict(methods.METHODS.registered))
    for method in (Halfway, "collections:nothing", "no.such.module:Method", "math:pi"):
        methods.register_method("mine", method)
        assert refused(method="mine") == ["--method"]
        del methods.METHODS.registered["mine"]
    for spec in ("no.such.module:Spec", "collections:OrderedDict", Misspelled):
        methods.register_method("mine", Halfway, spec=spec)
        assert refused(method="mine") == ["--method"]
        del methods.METHODS.registered["mine"]


def test_what_rewards_cannot_score_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a red ball\na thing of no hue\n")
    grpo = {"method": "grpo", "prompts": str(tmp_path / "p.txt"), "data_root": None, "video_resolution_buckets": None}
    size, still = {"rollout_size": "9x64x64"}, {"rollout_size": "1x64x64"}
    assert refused(**grpo, **size, reward=["color,target=octarine"]) == ["--reward"]
    assert refused(**grpo, **size, reward=["color"]) == ["--reward"]
    assert refused(**grpo, **still, reward=["smoothness", "brightness"]) == ["--reward"]
    assert refused(**grpo, **size, reward=["http://127.0.0.1:9"]) == ["--reward"]
    train(load_config(**_without_data(tmp_path, reward=["color"], reward_on_error="mask")))
    for line in ('{"prompt": "a\\u0000b"}', '{"prompt": "\\ud800"}'):
        (tmp_path / "p.jsonl").write_text(line)
        assert refused(**{**grpo, "prompts": str(tmp_path / "p.jsonl")}, **size, reward=["brightness"]) == ["data"]


def _without_data(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Options of a dry run of `grpo` with the demo model."""
    return {
        "pretrained_model_name_or_path": "demo://ltx", "method": "grpo", "prompts": str(tmp_path / "p.txt"),
        "rollout_size": "9x64x64", "train_steps": 1, "output_dir": str(tmp_path / "run"), "dry_run": True, **changes,
    }  # fmt: skip


def test_prompts_that_name_files_are_read_as_files_or_refused(
    refused: Refused, options: Callable[..., dict], tmp_path: Path
) -> None:
    for name in ("prompts.csv", "PROMPTS.TXT", "strange.prompts"):
        (tmp_path / name).write_text("a cat\n")
    for name in ("prompts.csv", "strange.prompts", "nosuch.TXT", "nosuch.csv", "prompt.txt"):
        given = {"validation_prompts": str(tmp_path / name), "validation_inference_steps": 2}
        assert refused(**given) == ["--validation_prompts"], name
    config = load_config(**options(validation_prompts=str(tmp_path / "PROMPTS.TXT")))
    assert [prompt.prompt for prompt in parse_validation_prompts(config.validation)] == ["a cat"]
    for text in ("a cat. A dog", "version 2.5", "look at https://a.b/c"):
        config = load_config(**options(validation_prompts=text))
        assert [prompt.prompt for prompt in parse_validation_prompts(config.validation)] == [text]
    with pytest.raises(ConfigError, match=r"'PROMPTS\.TXT'"):
        parse_validation_prompts(load_config(**options(validation_prompts=str(tmp_path / "prompt.txt"))).validation)


def test_captions_that_are_no_text_and_pairs_without_a_prompt_are_refused(
    options: Callable[..., dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check`, training, its dry run and an estimate agree: 65, since the data alone is wrong."""
    values = options(clips=2)
    clips = Path(values["data_root"])
    rows = [{"prompt": "", "chosen": "0.mp4", "rejected": "1.mp4"}]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "nul.jsonl").write_text(json.dumps({"video": "0.mp4", "caption": "a\0b"}))
    for file, method in (("pairs.jsonl", "dpo"), ("nul.jsonl", "sft")):
        given = {
            "model_name": "ltx_video", "pretrained_model_name_or_path": values["pretrained_model_name_or_path"],
            "data_root": clips, "dataset_file": tmp_path / file, "video_resolution_buckets": "9x64x64",
            "method": method, "train_steps": 1, "output_dir": tmp_path / "run",
        }  # fmt: skip
        flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        for command in (["check"], ["train"], ["train", "--dry_run"], ["estimate"]):
            assert main([*command, *flags]) == 65, command
        assert main(["train", *flags, "--rank", "0"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize("line",
                         ["num_processes: [1]", "num_processes: abc", "num_processes: 1.5", "num_processes: null",
    "num_processes: true", "num_machines: {a: 1}", "distributed_type: FSDP\nfsdp_config: 3",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 9}", "- 1", "mixed_precision: fp8"])  # fmt: skip
def test_launchers_files_have_the_types_of_their_settings(
    line: str, options: Callable[..., dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launch.yaml").write_text(line + "\n")
    given = {**options(), "video_resolution_buckets": "9x64x64"}
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    for command in ("estimate", "search-batch"):
        assert main([command, *flags, "--accelerate_config", str(tmp_path / "launch.yaml")]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_a_launcher_that_asks_for_what_does_not_exist_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ACCELERATE_DEEPSPEED_ZERO_STAGE", "9"), ("LOCAL_SIZE", "abc")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert refused() == [name]


def test_dtypes_of_torch_are_names_of_dtypes() -> None:
    dtypes: dict[str, Any] = {"transformer_dtype": torch.float32, "vae_dtype": torch.bfloat16}
    config = load_config(model_name="ltx_video", pretrained_model_name_or_path="x", data_root="clips", **dtypes)
    assert (config.model.transformer_dtype, config.model.vae_dtype) == ("fp32", "bf16")
