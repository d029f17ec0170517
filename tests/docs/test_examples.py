"""Every example: its flags and files are accepted, agree with each other, and pass every check before training."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel
from packaging.requirements import Requirement
from PIL import Image
from real_process import Python

from finetrainers.config.flags import parse_flags
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.demo.data import training_scenes
from finetrainers.demo.world import caption
from finetrainers.memory.estimate import estimate_for
from finetrainers.models.registry import families
from finetrainers.parallel.sharding import ShardingSpec
from finetrainers.plan.dry_run import dry_run_report
from finetrainers.plan.preflight import ResolvedRun, preflight

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TOMLS = sorted(EXAMPLES.glob("*/*.toml"))
#: Launch scripts of each family, by the beginning of its recipe's name.
SCRIPTS = {"train": "lora", "grpo": "grpo"}

#: DanceGRPO on HunyuanVideo: GPUs and machines of each recipe, and clips of an optimizer step.
DANCE = {
    "grpo_6gpu_test": (6, 1, 18),
    "grpo_6gpu": (6, 1, 18),
    "grpo_8gpu": (8, 1, 32),
    "grpo_16gpu": (16, 2, 64),
    "grpo_32gpu": (32, 4, 128),
}
#: What a recipe is trained as, by the name of the launcher's configuration.
ENGINES = {"ddp": "lora", "fsdp2": "full-finetune"}

#: 6.4 s at 25 frames per second: 49 frames and more at every family's rate, 129 at the fastest.
NUM_FRAMES, FPS, NUM_CLIPS = 160, 25, 2


def example_id(path: Path) -> str:
    return path.relative_to(EXAMPLES).as_posix()


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of small clips in the two-file format, with one of images in a subfolder."""
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
    (folder / "images").mkdir()
    for number in range(NUM_CLIPS):
        Image.new("RGB", (96, 64), (40 * number, 90, 120)).save(folder / "images" / f"{number}.png")
        (folder / "images" / f"{number}.txt").write_text(f"a color, {number}\n")
    pairs = [
        {"prompt": f"a clip {n}", "chosen": f"{n % 2}.mp4", "rejected": f"{1 - n % 2}.mp4"}
        for n in range(NUM_CLIPS + 2)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def published_flags(script: Path, bin_dir: Path, *flags: str) -> TrainConfig:
    """The configuration of a script with these flags, by a stand-in for `accelerate` that writes its arguments down."""
    written, stand_in = bin_dir / "argv.json", bin_dir / "accelerate"
    stand_in.write_text(f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open({str(written)!r}, 'w'))\n")
    stand_in.chmod(0o755)
    path = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", str(script), *flags], cwd=ROOT, env={**os.environ, "PATH": path}, check=True)
    return parsed(["accelerate", *json.loads(written.read_text())])


def launch_lines(recipe: Path) -> list[list[str]]:
    """The words of the commands in a recipe's head, each indented, over several lines if they end in a backslash."""
    head = recipe.read_text(encoding="ascii").partition("\n\n")[0].replace("\\\n#", "")
    lines = [line.removeprefix("#   ") for line in head.splitlines() if line.startswith("#   ")]
    starts = ("finetrainers ", "accelerate ", "NUM_MACHINES=")
    return [shlex.split(line) for line in lines if line.startswith(starts)]


def parsed(words: list[str]) -> TrainConfig:
    """The configuration that a launch line gives to training; the launcher's configuration must be one of ours."""
    starts = ("train", "train.py", f"{ROOT}/train.py", "examples/cluster/node.sh")
    start = next(words.index(word) for word in starts if word in words)
    if "--config_file" in words[:start]:
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
    config, _ = parse_flags(words[start + 1 :])
    assert config is not None
    return config


def on_tiny_weights(config: TrainConfig, *, repo: Path, clips: Path, output_dir: Path, **more: object) -> TrainConfig:
    """The same run on a tiny local model, and small clips if it is on clips; prompts are those of the example."""
    options = {name: value for name, value in config.flat().items() if config.changed(name)}
    options.update(pretrained_model_name_or_path=str(repo), output_dir=output_dir, report_to="none")
    if config.grpo.prompts is not None:
        options.update(prompts=ROOT / str(config.grpo.prompts), eval_prompts=ROOT / str(config.validation.eval_prompts))
    else:
        options.update(data_root=clips / "images" if on_images(config) else clips)
    if config.training.method == "dpo":
        options.update(dataset_file=clips / "pairs.jsonl")
    return load_config(**{**options, **more})


def on_images(config: TrainConfig) -> bool:
    """Whether the recipe's sizes are those of images alone."""
    return bool(config.data.image_resolution_buckets) and not config.data.video_resolution_buckets


def warnings_about_options(checked: ResolvedRun) -> list[str]:
    return [warning for warning in checked.warnings if warning not in checked.plan.warnings]


def prompts_in(name: str) -> list[str]:
    lines = (EXAMPLES / name).read_text(encoding="ascii").splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_every_family_has_each_kind_of_recipe() -> None:
    for name in families():
        stems = {path.stem for path in (EXAMPLES / name).glob("*.toml")}
        if not stems:  # its settings are not known yet
            continue
        assert any(stem.startswith("lora") for stem in stems), f"no LoRA example of {name}"
        assert any(stem.startswith("full") for stem in stems), f"no full finetuning example of {name}"
        assert any(stem.startswith("grpo") for stem in stems), f"no reward finetuning example of {name}"


def test_every_example_is_listed() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    listed = [*TOMLS, *(path for name in SCRIPTS for path in EXAMPLES.glob(f"*/{name}.sh"))]
    assert [example_id(path) for path in listed if f"({example_id(path)})" not in text] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_launch_a_recipe_of_their_family(name: str, tmp_path: Path) -> None:
    for family in sorted({path.parent.name for path in TOMLS} & families().keys()):
        script = EXAMPLES / family / f"{name}.sh"
        named = re.findall(r"[(/](\w\S*\.toml)\b", script.read_text(encoding="ascii"))
        [recipe] = {file.rpartition("/")[2] for file in named}
        assert recipe.startswith(SCRIPTS[name]), script
        config = published_flags(script, tmp_path, "--lr", "0.5")
        assert config.flat() == {**load_config(script.with_name(recipe)).flat(), "lr": 0.5}, script
        assert config.model.model_name == family


@pytest.mark.rotating
def test_a_script_trains_on_two_processes(
    clips: Path, tiny_repo: Callable[..., Path], tmp_path: Path, python: Python
) -> None:
    """By the real launcher, from another directory."""
    flags = {
        "data_root": clips, "pretrained_model_name_or_path": tiny_repo("ltx_video"), "output_dir": "run",
        "train_steps": 1, "video_resolution_buckets": "9x32x64", "validation_prompts": "a fox@@@9x32x64",
        "validation_inference_steps": 2,
    }  # fmt: skip
    script = [str(EXAMPLES / "ltx_video" / "train.sh"), *(f"--{name}={value}" for name, value in flags.items())]
    with python.stand_ins("accelerate", "-m", "accelerate.commands.accelerate_cli") as stand_ins:
        env = {**os.environ, **stand_ins, "NUM_GPUS": "2", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", *script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes (DDP)" in done.stdout
    assert (tmp_path / "run" / "pytorch_lora_weights.safetensors").is_file()


@pytest.mark.parametrize("recipe", TOMLS, ids=example_id)
def test_launch_lines_train_the_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one entry point, or a launcher where the recipe needs several GPUs."""
    monkeypatch.chdir(ROOT)
    for words in launch_lines(recipe):
        assert words[words.index("--config") + 1] == recipe.relative_to(ROOT).as_posix()
        plain, given = load_config(recipe).flat(), {word[2:] for word in words if word.startswith("--")}
        differs = {name for name, value in parsed(words).flat().items() if value != plain[name]}
        by_preset = {"lr", "rank", "lora_alpha"} if "training_type" in given else set()
        assert differs <= given | by_preset
        assert words[:2] in (["finetrainers", "train"], ["accelerate", "launch"]) or "examples/cluster/node.sh" in words
    assert launch_lines(recipe)
    assert all(len(line) <= 120 for line in recipe.read_text(encoding="ascii").splitlines())


@pytest.mark.parametrize("path", [*TOMLS, *sorted(EXAMPLES.glob("legacy/*.sh"))], ids=example_id)
def test_dry_run(
    path: Path, clips: Path, tiny_repo: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(path) if path.suffix == ".toml" else published_flags(path, tmp_path)
    repo = tiny_repo(config.model.model_name, **_version(path, config))
    local = on_tiny_weights(config, repo=repo, clips=clips, output_dir=tmp_path / "run")
    checked = preflight(local)
    assert checked.plan.count == (len(prompts_in("prompts.txt")) if config.grpo.prompts is not None else NUM_CLIPS)
    dry_run_report(checked)
    printed = capsys.readouterr().out
    assert f"dry run: {config.training.method} {config.training.training_type} of {config.model.model_name}" in printed
    assert "peak" in printed
    assert not (tmp_path / "run").exists(), "a dry run writes nothing"


def _version(path: Path, config: TrainConfig) -> dict[str, str]:
    """The tiny repository that is built like the recipe's checkpoint, where a family has several."""
    versions = families()[config.model.model_name].tiny_versions
    named = [part for part in path.stem.split("_") if part in versions]
    return {"version": named[-1]} if named else {}


def test_recipes_raise_no_warnings_about_options(clips: Path, tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """What an example sets must have an effect."""
    for path in TOMLS:
        config = load_config(path)
        repo = tiny_repo(config.model.model_name, **_version(path, config))
        checked = preflight(on_tiny_weights(config, repo=repo, clips=clips, output_dir=tmp_path))
        assert warnings_about_options(checked) == [], example_id(path)


@pytest.mark.rotating
@pytest.mark.parametrize("layout", ["texts", "lists", "metadata.csv", "metadata.jsonl"])
def test_recipes_read_every_layout(layout: str, clips: Path, tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """Without any column: those that the pages on data teach, and those of diffusers and of Lightricks' trainer."""
    for path in TOMLS:
        config = load_config(path)
        if config.training.method != "sft":
            continue
        media = sorted(clips.glob("images/*.png" if on_images(config) else "*.mp4"))
        data_root = tmp_path / media[0].suffix[1:]
        if not data_root.exists():
            data_root.mkdir()
            write_layout(layout, data_root, media)
        repo = tiny_repo(config.model.model_name, **_version(path, config))
        table = {"dataset_file": data_root / layout} if layout.startswith("metadata") else {}
        local = on_tiny_weights(
            config, repo=repo, clips=clips, output_dir=tmp_path / "run", data_root=data_root, **table
        )
        assert preflight(local).plan.count == NUM_CLIPS, path


def write_layout(layout: str, folder: Path, media: list[Path]) -> None:
    """Write clips or images with their captions in one of the layouts."""
    for path in media:
        os.link(path, folder / path.name)
    captions = {path.name: f"caption {number}" for number, path in enumerate(media)}
    if layout == "texts":
        for name, caption in captions.items():
            (folder / name).with_suffix(".txt").write_text(caption)
    elif layout == "lists":
        (folder / "videos.txt").write_text("\n".join(captions))
        (folder / "prompts.txt").write_text("\n".join(captions.values()))
    elif layout == "metadata.csv":
        rows = ["file_name,caption", *(f"{name},{caption}" for name, caption in captions.items())]
        (folder / layout).write_text("\n".join(rows))
    else:
        rows = [json.dumps({"media_path": name, "caption": caption}) for name, caption in captions.items()]
        (folder / layout).write_text("\n".join(rows))


def test_prompts_of_examples_are_all_different() -> None:
    train, held_out = prompts_in("prompts.txt"), prompts_in("held_out_prompts.txt")
    assert len(train) == 32
    assert len(held_out) == 12
    assert len({*train, *held_out}) == 44


def test_prompts_of_the_demo_are_captions_of_its_world() -> None:
    """And of combinations that the embedded model was trained on, so that it can learn from its samples."""
    assert prompts_in("demo_prompts.txt") == [caption(scene, phrasing=i) for i, scene in enumerate(training_scenes(64))]


@pytest.mark.rotating
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", DANCE)
def test_dance_recipes(
    name: str, engine: str, clips: Path, tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, machines, clips_a_step = DANCE[name]
    monkeypatch.setenv("WORLD_SIZE", str(gpus))  # as in the processes that will be launched
    monkeypatch.chdir(ROOT)
    recipe = EXAMPLES / "hunyuan_video" / f"{name}.toml"
    words = launch_lines(recipe)[list(ENGINES).index(engine)]
    if machines > 1:
        # node.sh counts the GPUs of a machine, and takes ddp.yaml unless told otherwise.
        assert words[0] == f"NUM_MACHINES={machines}"
        assert ("ACCELERATE_CONFIG=accelerate_configs/fsdp2.yaml" in words) == (engine == "fsdp2")
    else:
        assert words[2:6] == ["--config_file", f"accelerate_configs/{engine}.yaml", "--num_processes", str(gpus)]

    config = parsed([word for word in words if word not in ("--prompts", "my_prompts.txt")])
    grpo = config.grpo
    assert config.training.training_type == ENGINES[engine]
    assert config.parallel.sync_each_batch == (engine == "fsdp2")
    assert config.optimizer.lr == {"ddp": 3e-4, "fsdp2": 1e-5}[engine]
    assert (grpo.sampler, grpo.window_size, grpo.eta) == ("dance", 0, 0.25)
    assert (grpo.shift, grpo.rollout_guidance, grpo.reward_fps) == (5, 6.018, 8)
    assert [(entry.name, entry.weight) for entry in grpo.reward if entry.weight] == [("videoalign.vq", 1)]
    # Every process samples whole groups, and each update has as many of its clips.
    assert grpo.prompts_per_step % gpus == 0
    assert grpo.best_of_n is not None
    assert (
        grpo.prompts_per_step // gpus * grpo.best_of_n % (config.dataloader.batch_size * grpo.updates_per_rollout) == 0
    )
    assert grpo.prompts_per_step * grpo.best_of_n / grpo.updates_per_rollout == clips_a_step
    steps = rf"\b{config.training.train_steps} optimizer steps, 2 per rollout, .* {clips_a_step} clips "
    assert re.search(steps, recipe.read_text(encoding="ascii"))

    if engine == "fsdp2":
        text = " ".join(recipe.read_text(encoding="ascii").replace("\n#", " ").split())
        said = re.search(r"ull finetuning: [^.]*?(\d+) GiB[;,] (?:with 15 % for what is missing, )?(\d+)[ .]", text)
        assert said
        assert (int(said[1]), int(said[2])) == (round(needed(config, gpus)), round(1.15 * needed(config, gpus)))
    local = on_tiny_weights(config, repo=tiny_repo("hunyuan_video"), clips=clips, output_dir=tmp_path / "run")
    checked = preflight(local)
    assert warnings_about_options(checked) == []
    dry_run_report(checked)


def needed(config: TrainConfig, gpus: int) -> float:
    """GiB by the estimate for the published network, with 5 for the VAE and VideoAlign."""
    with torch.device("meta"):
        network = HunyuanVideoTransformer3DModel(guidance_embeds=True)
    size = config.grpo.rollout_size
    assert size is not None
    split = ShardingSpec(gpus, gpus, gpus, gathers=True, keeps_gradients=not config.parallel.sync_each_batch)
    family = families()["hunyuan_video"]
    spec = family.load(config.model)
    return estimate_for(config, family.facts.geometry, network, spec=spec, bucket=size, split=split).total + 5


def test_largest_dance_recipe_is_as_published() -> None:
    grpo = load_config(EXAMPLES / "hunyuan_video" / "grpo_32gpu.toml").grpo
    assert grpo.rollout_size == (53, 480, 480)
    assert (grpo.prompts_per_step, grpo.num_generations, grpo.best_of_n) == (32, 24, 8)
    assert (grpo.sampling_steps, grpo.timestep_fraction, grpo.updates_per_rollout) == (16, 0.6, 2)


def test_published_ltx_command_is_read_as_it_was_meant(tmp_path: Path) -> None:
    config = published_flags(EXAMPLES / "legacy" / "ltx_video.sh", tmp_path)
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
    assert prompts[2].startswith("BW_STYLE A panda,")
    assert config.run.report_to == ["wandb"]
    assert config.run.nccl_timeout == 1800
    requirements = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines()]
    installed = {needed.name: needed.marker for needed in requirements}
    assert set(config.run.report_to) <= installed.keys()
    assert str(installed["decord"]) == 'sys_platform == "linux" and platform_machine == "x86_64"', "has no other wheels"


def test_published_hunyuan_command_is_read_as_it_was_meant(tmp_path: Path) -> None:
    config = published_flags(EXAMPLES / "legacy" / "hunyuan_video.sh", tmp_path)
    assert config.model.revision == "refs/pr/18"
    assert config.data.video_resolution_buckets == [(17, 512, 768), (49, 512, 768), (61, 512, 768), (129, 512, 768)]
    assert config.optimizer.lr_scheduler == "constant_with_warmup"
    assert len((config.validation.validation_prompts or "").split(":::")) == 8
    assert config.training.rank == config.training.lora_alpha == 128
