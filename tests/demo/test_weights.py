"""The embedded model: small, complete, shipped, and as good as docs/tutorials/demo.md says."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, LTXPipeline

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import ModelSection
from finetrainers.demo.base import measure_vae
from finetrainers.demo.build import build, build_config
from finetrainers.demo.data import held_out_scenes
from finetrainers.demo.measure import MODEL, load_pipeline, measure
from finetrainers.demo.world import caption
from finetrainers.models.registry import get_family
from finetrainers.plan.preflight import preflight
from finetrainers.utils.packaged import model_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def weights() -> Path:
    return Path(model_path(MODEL))


@contextlib.contextmanager
def quick_build() -> Iterator[None]:
    """A build that takes few clips for its steps, evaluations and samples; the rest is the real one."""

    def quick(directory: Path, **arguments: Any) -> TrainConfig:
        usual = build_config(directory, **arguments)
        options = {name: value for name, value in usual.flat().items() if usual.changed(name)}
        few = {"batch_size": 4, "eval_num_items": 4, "validation_prompts": held_out_caption}
        return load_config(**{**options, **few, "validation_inference_steps": 2})

    held_out_caption = caption(held_out_scenes(1)[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finetrainers.demo.build.build_config", quick)
        yield


@dataclass(frozen=True)
class Built:
    """What a build has left in its directory, and what it said."""

    directory: Path
    said: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A build of two steps. Its text encoder and VAE do not depend on them."""
    directory, said = tmp_path_factory.mktemp("built"), io.StringIO()
    with contextlib.redirect_stdout(said), quick_build():
        build(directory, steps=2, clips=20, measured=2)
    return Built(directory, said.getvalue())


def test_the_weights_are_small(weights: Path) -> None:
    assert sum(path.stat().st_size for path in weights.rglob("*") if path.is_file()) < 14e6


def test_every_file_is_packaged(weights: Path) -> None:
    """Against the patterns in setup.py, which setuptools reads relative to the package."""
    calls = ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
    patterns = next(
        ast.literal_eval(keyword.value)
        for node in calls
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "package_data"
    )["finetrainers"]
    packaged = {path for pattern in patterns for path in (ROOT / "finetrainers").glob(pattern) if path.is_file()}
    there = (path for path in (ROOT / "finetrainers").rglob("*") if path.suffix not in (".py", ".pyc"))
    assert packaged == {path for path in there if path.is_file()}
    assert set(weights.rglob("*.safetensors")) <= packaged


def test_it_loads_through_the_familys_own_spec(weights: Path) -> None:
    config = ModelSection(
        model_name="ltx_video", pretrained_model_name_or_path=MODEL, text_encoder_dtype="fp32", vae_dtype="fp32"
    )
    family = get_family("ltx_video")
    spec = family.load(config)
    geometry = family.facts_of(config).geometry
    assert (geometry.temporal, geometry.spatial, geometry.size_multiple) == (4, 8, 32)
    conditions = spec.encode_text(spec.load_text_encoders(), ["a red star"])
    pipeline = LTXPipeline.from_pretrained(weights)  # as the documentation shows it, with no dtype
    assert {
        p.dtype for part in (pipeline.vae, pipeline.transformer, pipeline.text_encoder) for p in part.parameters()
    } == {torch.float32}
    assert pipeline("a red star", num_frames=9, height=32, width=64, num_inference_steps=1).frames
    expected = pipeline.encode_prompt("a red star", do_classifier_free_guidance=False, max_sequence_length=128)[0]
    torch.testing.assert_close(conditions["prompt_embeds"], expected, rtol=1e-3, atol=1e-5)
    loaded = spec.load_transformer(torch.float32).state_dict()
    assert loaded.keys() == pipeline.transformer.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in pipeline.transformer.state_dict().items())


@pytest.mark.rotating("build")
def test_what_is_not_trained_is_what_the_build_makes(weights: Path, built: Built) -> None:
    """The text encoder and the VAE come from code, so the weights in the package can be made again."""
    untrained, shipped = (LTXPipeline.from_pretrained(path) for path in (built.directory / "base", weights))
    assert untrained.tokenizer.get_vocab() == shipped.tokenizer.get_vocab()
    assert dict(untrained.scheduler.config) == dict(shipped.scheduler.config)
    for part in ("text_encoder", "vae"):
        made, given = (getattr(pipeline, part).state_dict() for pipeline in (untrained, shipped))
        assert made.keys() == given.keys()
        for name, tensor in made.items():
            torch.testing.assert_close(given[name], tensor, rtol=1e-2, atol=1e-2)  # shipped in bf16


@pytest.mark.rotating("build")
def test_the_vae_reconstructs_both_worlds(weights: Path, built: Built) -> None:
    shipped, exact_vae = (
        AutoencoderKLLTXVideo.from_pretrained(path, subfolder="vae") for path in (weights, built.directory / "base")
    )
    assert exact_vae.dtype == torch.float32
    found = measure_vae(shipped, clips=8)
    worlds = [value for name, value in found.items() if name.startswith("world")]
    films = [value for name, value in found.items() if name.endswith(".mp4")]
    assert len(worlds) == 2
    assert len(films) == 2
    assert min(worlds) >= 30
    assert min(films) >= 27
    exact = measure_vae(exact_vae, clips=8)
    for name, value in found.items():  # bf16 costs next to nothing
        assert value == pytest.approx(exact[name], abs=0.2)


@pytest.mark.timeout(120)
@pytest.mark.rotating
def test_it_follows_captions_that_it_was_never_trained_on(weights: Path) -> None:
    captions = [caption(scene, phrasing=i) for i, scene in enumerate(held_out_scenes(40))]
    found = measure(load_pipeline(weights), captions, steps=8)  # as many samples are right as with twenty
    # With shares of 0.95, 0.85 and 0.85, forty samples fall below these in one of two hundred runs; the seed is fixed.
    assert found.prompt_adherence["color"] >= 0.85
    assert found.prompt_adherence["motion"] >= 0.7
    assert found.prompt_adherence["shape"] >= 0.7
    assert len({(r.color, r.shape, r.motion) for r in found.readings}) > 20  # not one clip for every caption


def test_the_card_stands_by_itself(weights: Path) -> None:
    card = (weights / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0")
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]+)", card))


@pytest.mark.timeout(180)
@pytest.mark.rotating("build")
def test_a_build_goes_on_where_it_was(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    assert "writing 20 clips" in built.said
    assert "untrained" in built.said
    measured = json.loads((built.directory / "measured.json").read_text())
    assert {"color", "motion", "shape", "all", "seconds_per_clip"} <= measured.keys()
    first = load_pipeline(built.directory / "weights").transformer.state_dict()
    shutil.rmtree(built.directory / "weights")
    with quick_build():
        build(built.directory, steps=2, clips=20, measured=2)
    assert capsys.readouterr().out.count("existing") == 3
    again = load_pipeline(built.directory / "weights").transformer.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_misspelt_name_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    config = load_config(
        model_name="ltx_video", pretrained_model_name_or_path="demo://lxt", data_root=str(tmp_path), output_dir="unused"
    )
    with pytest.raises(ConfigError, match=r"--pretrained_model_name_or_path: .*'demo://ltx'"):
        preflight(config)
