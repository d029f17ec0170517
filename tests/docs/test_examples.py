"""Every example: its flags and files are accepted, agree with each other, and pass every check before training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest

from finetrainers.config.flags import parse_flags
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.engine.plan_report import dry_run_report
from finetrainers.engine.preflight import preflight
from finetrainers.models.registry import families

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*/*.sh"))
TOMLS = sorted(EXAMPLES.glob("*/*.toml"))
RECIPES = sorted(path.with_suffix("") for path in TOMLS)

#: 6.4 s at 25 frames per second: 49 frames and more at every family's rate, 129 at the fastest.
NUM_FRAMES, FPS, NUM_CLIPS = 160, 25, 2


def example_id(path: Path) -> str:
    return path.relative_to(EXAMPLES).as_posix()


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of small clips in the two-file format that the examples use."""
    folder = tmp_path_factory.mktemp("example_clips")
    for number in range(NUM_CLIPS):
        with av.open(str(folder / f"{number}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=FPS)
            stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
            for k in range(NUM_FRAMES):
                picture = np.full((64, 96, 3), (k + 40 * number) % 256, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
    (folder / "videos.txt").write_text("".join(f"{number}.mp4\n" for number in range(NUM_CLIPS)))
    (folder / "prompts.txt").write_text("".join(f"a clip that gets brighter, {n}\n" for n in range(NUM_CLIPS)))
    return folder


def launched(script: Path, bin_dir: Path, *arguments: str, **environment: str) -> list[str]:
    """The arguments that a script gives to `accelerate`, by running it with a stand-in that only writes them down."""
    written = bin_dir / "argv.json"
    stand_in = bin_dir / "accelerate"
    stand_in.write_text(f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open({str(written)!r}, 'w'))\n")
    stand_in.chmod(0o755)
    path = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(script), *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": path, **environment},
        check=True,
        capture_output=True,
    )
    return json.loads(written.read_text())


def train_arguments(argv: list[str]) -> list[str]:
    """What follows `train.py` in a launch; the launcher's configuration must be one of ours."""
    assert argv[:2] == ["launch", "--config_file"]
    assert (ROOT / argv[2]).is_file(), f"no launcher configuration {argv[2]}"
    return argv[argv.index("train.py") + 1 :]


def parsed(script: Path, bin_dir: Path, *arguments: str, **environment: str) -> TrainConfig:
    config, _ = parse_flags(train_arguments(launched(script, bin_dir, *arguments, **environment)))
    assert config is not None
    return config


def on_tiny_weights(config: TrainConfig, *, repo: Path, clips: Path, output_dir: Path) -> TrainConfig:
    """The same run on a tiny local model and small clips."""
    options = {name: value for name, value in config.flat().items() if config.changed(name)}
    options.update(pretrained_model_name_or_path=str(repo), data_root=clips, output_dir=output_dir)
    return TrainConfig.from_flat(**options)


def test_every_family_has_both_recipes() -> None:
    for name in families():
        stems = {path.stem for path in (EXAMPLES / name).glob("*.toml")}
        assert any(stem.startswith("lora") for stem in stems), f"no LoRA example of {name}"
        assert any(stem.startswith("full") for stem in stems), f"no full finetuning example of {name}"


@pytest.mark.parametrize("recipe", RECIPES, ids=example_id)
def test_script_and_file_say_the_same(recipe: Path, tmp_path: Path) -> None:
    assert parsed(recipe.with_suffix(".sh"), tmp_path).flat() == load_config(recipe.with_suffix(".toml")).flat()


def test_scripts_pass_paths_with_blanks_and_further_arguments(tmp_path: Path) -> None:
    config = parsed(
        EXAMPLES / "ltx_video" / "lora.sh",
        tmp_path,
        "--lr",
        "7e-5",
        "--dry_run",
        DATA_ROOT="my clips",
        OUTPUT_DIR="a b",
    )
    assert config.data.data_root == Path("my clips")
    assert config.run.output_dir == Path("a b")
    assert config.optimizer.lr == 7e-5
    assert config.run.dry_run


@pytest.mark.parametrize("path", [*TOMLS, *sorted(EXAMPLES.glob("legacy/*.sh"))], ids=example_id)
def test_dry_run(
    path: Path, clips: Path, tiny_repo: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(path) if path.suffix == ".toml" else parsed(path, tmp_path)
    repo = tiny_repo(config.model.model_name, **_version(path, config))
    local = on_tiny_weights(config, repo=repo, clips=clips, output_dir=tmp_path / "run")
    checked = preflight(local)
    assert len(checked.plan.clips) == NUM_CLIPS
    dry_run_report(checked)
    printed = capsys.readouterr().out
    assert f"dry run of {config.model.model_name} {config.training.training_type}" in printed
    assert "GiB" in printed
    assert not (tmp_path / "run").exists(), "a dry run writes nothing"


def _version(path: Path, config: TrainConfig) -> dict[str, str]:
    """The tiny repository that is built like the recipe's checkpoint, where a family has several."""
    if config.model.model_name != "cogvideox":
        return {}
    return {"version": path.stem.rpartition("_")[2]}


def test_recipes_raise_no_warnings_about_options(clips: Path, tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """What an example sets must have an effect."""
    for path in TOMLS:
        config = load_config(path)
        repo = tiny_repo(config.model.model_name, **_version(path, config))
        checked = preflight(on_tiny_weights(config, repo=repo, clips=clips, output_dir=tmp_path))
        about_options = [warning for warning in checked.warnings if warning not in checked.plan.warnings]
        assert about_options == [], example_id(path)


def test_published_ltx_command_is_read_as_it_was_meant(tmp_path: Path) -> None:
    config = parsed(EXAMPLES / "legacy" / "ltx_video.sh", tmp_path)
    assert config.model.model_name == "ltx_video"
    assert config.data.id_token == "BW_STYLE"
    assert config.data.video_resolution_buckets == [(49, 512, 768)]
    assert config.data.video_column == "videos.txt"
    assert config.training.mixed_precision == "bf16"
    assert config.training.target_modules == ["to_q", "to_k", "to_v", "to_out.0"]
    assert config.training.train_steps == 1200
    assert config.diffusion.flow_resolution_shifting
    assert config.optimizer.epsilon == 1e-8
    prompts = (config.validation.validation_prompts or "").split(":::")
    assert [prompt.rpartition("@@@")[2] for prompt in prompts] == ["49x512x768", "129x512x768", "49x512x768"]
    assert prompts[2].startswith("BW_STYLE A panda, dressed in")
    assert config.run.report_to == "wandb"
    assert config.run.nccl_timeout == 1800


def test_published_hunyuan_command_is_read_as_it_was_meant(tmp_path: Path) -> None:
    config = parsed(EXAMPLES / "legacy" / "hunyuan_video.sh", tmp_path)
    assert config.model.revision == "refs/pr/18"
    assert config.data.video_resolution_buckets == [(17, 512, 768), (49, 512, 768), (61, 512, 768), (129, 512, 768)]
    assert config.optimizer.lr_scheduler == "constant_with_warmup"
    assert len((config.validation.validation_prompts or "").split(":::")) == 8
    assert config.training.rank == config.training.lora_alpha == 128
