"""Every published snippet runs: the shell and Python blocks of each page, in order, in a directory that has what the
page names.

What a page runs on a GPU with weights from the hub runs here on a CPU, with a tiny repository of the same classes and
fewer
steps: `INSTEAD` says what is put in for what. `DRY` are commands that end after all their checks, `ELSEWHERE` those
that another test runs with less to do, `FAILS` those that are to fail, and how, `NOT_RUN` what cannot run here. An
entry that no page needs any more is an error.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from real_process import Python
from safetensors.torch import load_file, save_file
from snippets import PAGES, ROOT, Block, Shell, blocks, logical_lines, page_id, substituted, table_commands

from finetrainers.config.load import dump_toml
from finetrainers.demo.rewarded import reward_config
from finetrainers.models import family
from finetrainers.models.files.single_file import save_single_file
from finetrainers.rewards import registry as rewards
from finetrainers.utils.video import write_mp4

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Pages that run every day; each of the others has its turn.
FIRST_READ = ("README.md", "docs/tutorials/quickstart.md", "docs/reference/python.md")
SHELL, PYTHON = ("bash", "sh"), ("python", "py")
TINY = "TINY_LTX_VIDEO"  # becomes the path of the tiny repository

WATCH = "finetrainers watch --prompts boat --preset tiny=9x32x64,steps=2 --presets tiny "

INSTEAD = {
    "--config ltx_video/lora ": "--config examples/ltx_video/lora.toml ",  # a copy of the recipe that is small
    "Lightricks/LTX-Video": TINY,
    '.to("cuda")': '.to("cpu")',
    "49x512x768": "9x32x64",
    "49x768x512": "9x64x32",
    "65x512x768": "25x32x64",
    "num_frames=49, height=512, width=768)": "num_frames=9, height=32, width=64, num_inference_steps=2)",
    "--validation_steps 250": "--validation_steps 250 --validation_inference_steps 2",
    "validation_steps = 250": "validation_steps = 250\nvalidation_inference_steps = 2",
    "--eval_num_items 4 --eval_steps 100": "--eval_num_items 1 --eval_steps 1",
    "num_frames=49, height=512, width=768, generator": "num_frames=9, height=32, width=64, num_inference_steps=2, "
    "generator",
    "finetrainers sample ": "finetrainers sample --num_inference_steps 2 ",
    "finetrainers watch ": WATCH,
    "train_steps = 1500": "train_steps = 2",
    "# encode clips and captions once": "\ntrain_steps = 2",
    'output_dir = "runs/dog"': 'output_dir = "runs/dog"\ntrain_steps = 2',
    'output_dir = "runs/masked"': 'output_dir = "runs/masked"\ntrain_steps = 2',
    'output_dir = "runs/given"': 'output_dir = "runs/given"\ntrain_steps = 2',
    "--first_frame_conditioning_p 0.5 ": "--first_frame_conditioning_p 0.5 --train_steps 2 ",
    "--train_steps 150 ": "--train_steps 2 ",
    "--train_steps 50 ": "--train_steps 1 ",
    "--train_steps 64 ": "--train_steps 1 ",
    "--train_steps 10 ": "--train_steps 1 ",
    "--train_steps 8 ": "--train_steps 1 ",
    "train_steps = 500\nrank = 32": "train_steps = 2\nrank = 4",
    "train_steps=8": "train_steps=1",
    "--checkpointing_steps 10 ": "--checkpointing_steps 1 ",
    "--prompts_per_step 8 --num_generations 8": "--prompts_per_step 2 --num_generations 2",
    "--batch_size 16": "--batch_size 4",
    "--profile_steps 3:5": "--profile_steps 1:2",
    "--look striped --lora": "--items 2 --look striped --lora",
    "step-500": "step-2",
}
DRY = {
    "finetrainers train --config examples/ltx_video/lora.toml --data_root my_clips --framepack": "has many windows",
    "finetrainers train --config examples/ltx_video/grpo_lora.toml": "the reward's weights are on the hub",
}
FAILS = {
    "FINETRAINERS_FAULT=kill": 137,
}
DANCEGRPO = "tests/parallel/test_dancegrpo_commands.py"
ELSEWHERE = {
    "finetrainers prepare --method grpo --pretrained_model_name_or_path data/HunyuanVideo": DANCEGRPO,
    "torchrun --nnodes=": DANCEGRPO,
    "cp data/outputs/grpo_hunyuan_6gpu": DANCEGRPO,
    "finetrainers export data/outputs/grpo_hunyuan_6gpu": DANCEGRPO,
    "finetrainers quickstart": "tests/demo/test_quickstart.py",
    "finetrainers demo reward color": "tests/demo/test_reward_learning.py",
    "finetrainers demo scratch": "tests/demo/test_scratch.py",
    "OMP_NUM_THREADS=1 python benchmarks/checkpoint_kills.py": "tests/test_benchmark_checkpoint_kills.py",
    "finetrainers run ": "tests/cli/test_run.py",
    "finetrainers report runs/look": "tests/cli/test_run.py",
    "CUDA_VISIBLE_DEVICES=0 finetrainers train --config tiger.toml": "tests/runs/test_expert_pairs.py",
    "finetrainers export runs/tiger": "tests/cli/test_export.py",
    "finetrainers sample --num_inference_steps 2 runs/tiger": "tests/sampling/test_families.py",
    "finetrainers sample --num_inference_steps 2 style_low_noise.safetensors": "tests/sampling/test_families.py",
    "accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 6": "tests/docs/test_examples.py",
    "bash examples/legacy/": "tests/docs/test_legacy_commands.py",
    "bash examples/cogvideox/train.sh": "tests/docs/test_examples.py",
    "bash examples/mochi/train.sh": "tests/docs/test_examples.py",
    "deepspeed --num_gpus=1 train.py --deepspeed --config examples/framepack.toml": "tests/runs/test_windows_run.py",
    f"{WATCH}runs/mystyle --presets low4s": "tests/config/test_watch.py",
    "finetrainers sync": "tests/tools/test_sync.py",
    "finetrainers doctor": "tests/cli/test_doctor.py",
    "finetrainers models": "tests/test_installed_packages.py",
    "finetrainers train --config wan/": "tests/docs/test_examples.py",
    "finetrainers tiny skyreels_t2v": "tests/test_installed_packages.py",
    "finetrainers train --pretrained_model_name_or_path tiny-skyreels": "tests/test_installed_packages.py",
    "finetrainers sample --num_inference_steps 2 runs/skyreels": "tests/test_installed_packages.py",
    "finetrainers export runs/skyreels": "tests/test_installed_packages.py",
    "finetrainers search-batch": "tests/tools/batch_search/test_measure.py",
    "ruff check .": "tests/test_lint.py",
}
NOT_RUN = {
    "python3 -m venv": "makes an environment",
    ". .venv/bin/activate": "of that environment",
    "pip install": "needs an index of packages",
    "hf download": "needs the hub",
    "OMP_WAIT_POLICY=PASSIVE pytest": "is the test suite",
    "python -m pytest": "is a part of the test suite",
    "finetrainers serve-reward": "serves until it is stopped, with weights of the hub",
    "sbatch": "needs Slurm",
    "sky ": "needs a cloud",
    "docker": "needs Docker",
    "MACHINE_RANK=0": "waits for another machine",
    "HOSTS=nodes.txt": "needs other machines",
}


def runnable(page: Path) -> list[Block]:
    """What of a page is run, and the files that it shows."""
    fenced = [b for b in blocks(page, *SHELL, *PYTHON, "toml") if b.language != "toml" or file_name(b) is not None]
    return [*fenced, *table_commands(page)]


def file_name(block: Block) -> str | None:
    """The file that a block is, if its first line says so: `# run.toml`."""
    first = block.text.partition("\n")[0].removeprefix("# ")
    return first if first.endswith((".toml", ".py")) and " " not in first else None


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_repo: Callable[..., Path], python_of_module: Python) -> Path:
    """What the pages' commands find: the checkout, clips, pictures, prompts, configurations, and runs that are
    finished."""
    root = tmp_path_factory.mktemp("world")
    repo = tiny_repo("ltx_video")
    for name in ("train.py", "accelerate_configs"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "examples", root / "examples")
    for file in (root / "examples" / "ltx_video").iterdir():
        file.write_text(small(file.read_text(), repo))
    for folder in ("clips", "path/to/clips", "my_clips", "phone clips"):
        write_clips(root / folder)
    for name in ("boat.png", "harbor.png", "street.png"):
        Image.new("RGB", (64, 32), (90, 120, 200)).save(root / name)
    write_mp4(root / "boat.mp4", np.full((20, 32, 64, 3), 90, dtype=np.uint8), fps=8)
    names = ("beach", "market", "garden")
    pairs = [
        {"prompt": a, "chosen": f"my_clips/{a}.mp4", "rejected": f"my_clips/{b}.mp4"} for a, b in permutations(names, 2)
    ]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (root / "my_prompts.txt").write_text("a cat in a boat\na dog on a hill\n" * 8)
    for name in ("run", "other", "stage2"):
        (root / f"{name}.toml").write_text(
            f'model_name = "ltx_video"\npretrained_model_name_or_path = "{repo}"\ndata_root = "clips"\n'
            'id_token = "MYSTYLE"\nvideo_resolution_buckets = ["9x32x64"]\ntrain_steps = 2\nrank = 4\nlora_alpha = 4\n'
            f'checkpointing_steps = 1\noutput_dir = "runs/{name}"\n'
        )
    write_single_file(repo, root / "ltx-video-2b.safetensors")
    done = python_of_module(
        "-m", "finetrainers", "train", "--config", "run.toml", "--output_dir", "runs/mystyle", cwd=root
    )
    assert done.wait() == 0, done.stderr
    for name in ("runs/my-lora", "runs/other", "runs/stage1", "data/outputs/grpo_hunyuan_6gpu"):
        shutil.copytree(root / "runs" / "mystyle", root / name)
    (root / "assets").mkdir()
    (root / "assets" / "video_prompts.txt").write_text("a cat in a boat@@@9x32x64\n")
    (root / "OpenVid-1M.csv").write_text("path,text\nbeach.mp4,a beach\nmarket.mp4,a market\n")
    (root / "color" / "run").mkdir(parents=True)
    rewarded = reward_config(root / "color", steps=1, evaluated=2, prompts_per_step=1, num_generations=2, batch_size=2)
    (root / "color" / "run" / "config.toml").write_text(dump_toml(rewarded))
    return root


def write_single_file(repo: Path, path: Path) -> None:
    """Transformer and VAE in one file, as Lightricks publishes them."""
    found = {}
    for part in ("transformer", "vae"):
        cls = json.loads((repo / part / "config.json").read_text())["_class_name"]
        alone = path.with_name(f"{part}.safetensors")  # loaded tensors stay in their file
        save_single_file(alone, cls, load_file(repo / part / "diffusion_pytorch_model.safetensors"))
        found |= load_file(alone)
    save_file(found, path)


def write_clips(folder: Path) -> None:
    """Clips with a caption beside each, and the two lists that the recipes read."""
    names = ("beach", "market", "garden")
    for k, name in enumerate(names):
        picture = np.random.default_rng(k).integers(0, 255, (64, 96, 3), dtype=np.uint8)
        write_mp4(folder / f"{name}.mp4", np.stack([np.roll(picture, t, axis=1) for t in range(60)]), fps=25)
        (folder / f"{name}.txt").write_text(f"a {name}\n")
    (folder / "videos.txt").write_text("".join(f"{name}.mp4\n" for name in names))
    (folder / "prompts.txt").write_text("".join(f"a {name}\n" for name in names))


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which the test is in."""
    place = tmp_path / "here"
    shutil.copytree(world, place, symlinks=True)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    return place


def in_turn(page: Path) -> Any:
    """Return the page as a parameter that rotates unless it is one of those that most people read first."""
    return page if page_id(page) in FIRST_READ else pytest.param(page, marks=pytest.mark.rotating)


@pytest.mark.parametrize("page", [in_turn(p) for p in PAGES if runnable(p)], ids=page_id)
def test_page_runs(
    page: Path, here: Path, tmp_path: Path, python: Python, tiny_repo: Callable[..., Path], monkeypatch
) -> None:
    monkeypatch.setattr(family.FAMILIES, "registered", family.families())
    monkeypatch.setattr(rewards.REWARDS, "registered", dict(rewards.REWARDS.registered))
    (tmp_path / "scratch").mkdir()
    shell = Shell(python, here, tmp_path / "scratch")
    names: dict[str, object] = {"__name__": "__main__"}
    for block in runnable(page):
        print(f"--- {block.where}")
        text = small(block.text, tiny_repo("ltx_video"))
        if (file := file_name(block)) is not None:
            (here / file).write_text(text)
        if block.language in PYTHON:
            exec(compile(text, block.where, "exec"), names)
        elif block.language in SHELL:
            if "--resume_from_checkpoint" not in text:
                remove_outputs(text)
            print(shell("\n".join(filter(None, map(to_run, logical_lines(text))))))


def remove_outputs(text: str) -> None:
    """Remove the runs that a block starts: pages show several ways to start one, and each is to be the first."""
    directories = re.findall(r"--output_dir (\S+)", text)
    if "run.toml" in text and "--output_dir" not in text:
        directories.append(tomllib.loads(Path("run.toml").read_text())["output_dir"])
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def small(text: str, repo: Path) -> str:
    """A text with every entry of `INSTEAD` put in."""
    return substituted(text, INSTEAD).replace(TINY, str(repo))


def to_run(line: str) -> str:
    """The command that stands for a line: itself, a dry run, or none."""
    for start in (*NOT_RUN, *ELSEWHERE, *DRY):
        if line.startswith(start):
            return f"{line} --dry_run --gpu 24GB" if start in DRY else ""
    for start, code in FAILS.items():
        if line.startswith(start):
            return f"code=0; {line} || code=$?; test $code = {code}"
    return line


def test_every_exception_is_needed() -> None:
    """What is put in, and what is not run, occurs in the pages; the tests that run it instead exist."""
    texts = [b.text for page in PAGES for b in (*blocks(page, *SHELL, *PYTHON, "toml"), *table_commands(page))]
    texts += [path.read_text() for path in (ROOT / "examples" / "ltx_video").iterdir()]
    assert [old for old in INSTEAD if not any(old in text for text in texts)] == []
    lines = [line for text in texts for line in logical_lines(substituted(text, INSTEAD))]
    starts = (*DRY, *FAILS, *ELSEWHERE, *NOT_RUN)
    assert [start for start in starts if not any(line.startswith(start) for line in lines)] == []
    assert [test for test in ELSEWHERE.values() if not (ROOT / test).is_file()] == []
