"""`finetrainers prepare`, killed and restarted, and shared by two processes; training on its cache; `cache prune`."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_process import Python
from refusals import refused_command
from safetensors import safe_open

from finetrainers.cli.main import main
from finetrainers.config.load import dump_toml, load_config
from finetrainers.data.loading import text_conditioning, training_data
from finetrainers.data.loading.precompute import Encoded
from finetrainers.models.ltx_video import LTXVideoSpec
from finetrainers.utils.video import write_mp4

CLIPS = 4
TEXTS = CLIPS + 1  # the empty prompt too


@dataclass(frozen=True)
class Prepared:
    """A folder with clips, a configuration that names them, and room for caches."""

    root: Path
    config: Path

    def entries(self, cache: str) -> set[str]:
        return {path.stem for path in (self.root / cache / "tensors").glob("??/[!.]*.safetensors")}

    def leftovers(self, cache: str) -> int:
        return len(list((self.root / cache / "tensors").glob("??/.*.tmp")))

    def flags(self, cache: str, *more: str) -> list[str]:
        return ["--config", str(self.config), "--precompute_dir", str(self.root / cache), *more]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_repo: Callable[..., Path]) -> Prepared:
    root = tmp_path_factory.mktemp("prepared")
    rng = np.random.default_rng(0)
    for k in range(CLIPS):
        ramp = np.linspace(0, 200, 64)[None, None, :, None] + rng.integers(0, 40, (9, 64, 1, 3))
        write_mp4(root / "clips" / f"{k}.mp4", np.broadcast_to(ramp, (9, 64, 64, 3)).astype(np.uint8), fps=25)
        (root / "clips" / f"{k}.txt").write_text(f"ramp number {k}")
    values: dict[str, Any] = {
        "model_name": "ltx_video", "pretrained_model_name_or_path": str(tiny_repo("ltx_video")),
        "transformer_dtype": "fp32", "vae_dtype": "fp32", "text_encoder_dtype": "fp32",
        "data_root": str(root / "clips"), "video_resolution_buckets": ["9x64x64"], "output_dir": str(root / "run"),
        "rank": 4, "lora_alpha": 8, "train_steps": 1, "precompute_batch_size": 3, "resume_from_checkpoint": "auto",
        "precompute_conditions": True,
    }  # fmt: skip
    config = root / "run.toml"
    config.write_text(dump_toml(load_config(**values)))
    return Prepared(root, config)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Encoded]:
    """What is encoded from now on: captions, clips, captions, ..."""
    seen: list[Encoded] = []
    for module, name in ((text_conditioning, "precompute_text"), (training_data, "precompute_video")):
        original = getattr(module, name)

        def watched(*arguments: Any, original: Callable[..., Encoded] = original, **options: Any) -> Encoded:
            seen.append(original(*arguments, **options))
            return seen[-1]

        monkeypatch.setattr(module, name, watched)
    return seen


def test_a_preparation_that_is_killed_goes_on_and_training_encodes_nothing(
    prepared: Prepared, python: Python, encoded: list[Encoded], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Killed with the second clip's entry written, and not named yet.
    fault = f"kill@precompute:{TEXTS + 2}"
    first = python("-m", "finetrainers", "prepare", *prepared.flags("cache"), FINETRAINERS_FAULT=fault)
    assert first.wait() == -9, first.stderr
    done = prepared.entries("cache")
    assert (len(done), prepared.leftovers("cache")) == (TEXTS + 1, 1)
    for key in done:
        with safe_open(prepared.root / "cache" / "tensors" / key[:2] / f"{key}.safetensors", "pt") as entry:
            assert entry.metadata()["kind"] in ("text", "video")

    # Again, in this process. All captions are there, so the text encoder is not even loaded.
    with monkeypatch.context() as patched:
        patched.setattr(LTXVideoSpec, "load_text_encoders", lambda *_: pytest.fail("loaded the text encoders"))
        patched.setattr(LTXVideoSpec, "load_transformer", lambda *_: pytest.fail("loaded the transformer"))
        assert main(["prepare", *prepared.flags("cache")]) == 0
    shown = capsys.readouterr().out
    assert f"captions: 0 encoded, {TEXTS} already cached; 0 B written" in shown
    assert f"clips: {CLIPS - 1} encoded, 1 already cached; " in shown
    assert f"cache: {prepared.root / 'cache'}; train with --precompute_conditions --precompute_dir" in shown
    assert done < prepared.entries("cache")
    assert len(prepared.entries("cache")) == TEXTS + CLIPS
    assert not (prepared.root / "run").exists()

    # Two processes share the work, and come to the same entries.
    ranks = python.ranks(2, "-m", "finetrainers", "prepare", *prepared.flags("shared"))
    assert [rank.wait(120) for rank in ranks] == [0, 0], ranks[0].stderr
    assert f"captions: {TEXTS} encoded, 0 already cached" in ranks[0].stdout
    assert f"clips: {CLIPS} encoded, 0 already cached" in ranks[0].stdout
    assert "encoded" not in ranks[1].stdout
    assert prepared.entries("shared") == prepared.entries("cache")

    # Training with the same file finds it all, and needs no other process to read it.
    encoded.clear()
    with monkeypatch.context() as patched:
        patched.setattr(LTXVideoSpec, "load_text_encoders", lambda *_: pytest.fail("loaded the text encoders"))
        patched.setattr("finetrainers.data.loading.loader.Workers", lambda *_, **__: pytest.fail("started workers"))
        patched.setattr("finetrainers.data.loading.precompute.Workers", lambda *_, **__: pytest.fail("started workers"))
        flags = prepared.flags("cache", "--precompute_conditions", "--dataloader_num_workers", "2")
        assert main(["train", *flags]) == 0
    assert encoded == [Encoded(found=CLIPS)]  # captions were found without their encoders

    # An edited caption is one encoding, other buckets share the texts, and a run's checkpoints are not in the way.
    (prepared.root / "clips" / "0.txt").write_text("an edited caption")
    # The text encoder is gone before the VAE comes.
    encoded.clear()
    before = prepared.entries("cache")
    loaded: list[weakref.ref[Any]] = []
    load_text, load_vae = LTXVideoSpec.load_text_encoders, LTXVideoSpec.load_vae

    def load_encoders(spec: LTXVideoSpec) -> Any:
        encoders = load_text(spec)
        loaded.append(weakref.ref(encoders.modules["text_encoder"]))
        return encoders

    def load_vae_alone(spec: LTXVideoSpec) -> Any:
        assert loaded[-1]() is None
        vae = load_vae(spec)
        loaded.append(weakref.ref(vae))
        return vae

    with monkeypatch.context() as patched:
        patched.setattr(LTXVideoSpec, "load_text_encoders", load_encoders)
        patched.setattr(LTXVideoSpec, "load_vae", load_vae_alone)
        patched.setattr(LTXVideoSpec, "load_transformer", lambda *_: pytest.fail("loaded the transformer"))
        assert main(["prepare", *prepared.flags("cache")]) == 0
    assert len(loaded) == 2
    assert [counts.encoded for counts in encoded] == [1, 0]
    [edited] = prepared.entries("cache") - before
    encoded.clear()
    assert main(["prepare", *prepared.flags("cache", "--video_resolution_buckets", "1x64x64")]) == 0
    assert [counts.encoded for counts in encoded] == [CLIPS]

    # What the configuration does not need can go: the old caption and the other bucket.
    capsys.readouterr()
    cache = str(prepared.root / "cache")
    assert main(["cache", "prune", cache, "--keep", str(prepared.config), "--dry_run"]) == 0
    assert f"{CLIPS + 1} entries, " in capsys.readouterr().out
    assert len(prepared.entries("cache")) == TEXTS + 2 * CLIPS + 1
    assert main(["cache", "prune", cache, "--keep", str(prepared.config)]) == 0
    assert len(prepared.entries("cache")) == TEXTS + CLIPS
    assert edited in prepared.entries("cache")
    # Text encoders whose files have changed, if only their times, are loaded, and turn out to be the same.
    os.utime(
        Path(load_config(prepared.config).model.pretrained_model_name_or_path) / "tokenizer" / "tokenizer_config.json"
    )
    for expected in ([Encoded(found=TEXTS), Encoded(found=CLIPS)], [Encoded(found=CLIPS)]):
        encoded.clear()
        assert main(["prepare", *prepared.flags("cache")]) == 0
        assert encoded == expected

    capsys.readouterr()
    assert main(["cache", "ls", cache, "--json"]) == 0
    groups = {group["kind"]: group for group in json.loads(capsys.readouterr().out)["groups"]}
    assert {kind: group["entries"] for kind, group in groups.items()} == {"text": TEXTS, "video": CLIPS}
    assert groups["video"]["model"] == "ltx_video VAE of repo, fp32"

    # Of a model that the cache has never seen, nobody knows what is needed: nothing is removed.
    other = prepared.root / "other.toml"
    other.write_text(prepared.config.read_text().replace('vae_dtype = "fp32"', 'vae_dtype = "bf16"'))
    assert refused_command(["cache", "prune", cache, "--keep", other]) == (2, [("--keep", "not_found")])
    assert f"{other}" in capsys.readouterr().err
    assert len(prepared.entries("cache")) == TEXTS + CLIPS


def test_a_dry_run_encodes_nothing_and_mistakes_are_said_as_in_training(
    prepared: Prepared, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["prepare", *prepared.flags("none", "--dry_run")]) == 0
    assert not (prepared.root / "none").exists()
    assert main(["prepare", *prepared.flags("none", "--rank", "0", "--eval_steps", "3")]) == 2
    shown = capsys.readouterr().err
    assert "rank" in shown
    assert "set --eval_num_items" in shown

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("finetrainers.runs.prepare.prepare", interrupted)
        assert main(["prepare", *prepared.flags("none")]) == 130
    assert "entries" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit, match="0"):
        main(["prepare", "--help"])
    shown = capsys.readouterr().out
    assert "--precompute_batch_size" in shown
