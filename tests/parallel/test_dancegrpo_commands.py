"""DanceGRPO's commands of docs/reference/dancegrpo.md train on two processes, with smaller sizes and counts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel
from published import DANCEGRPO, DANCEGRPO_6GPUS, DANCEGRPO_FLAGS
from real_process import Python
from safetensors.torch import load_file
from snippets import ROOT, blocks, logical_lines
from test_docs import commands
from tiny_videoalign import Published

from finetrainers.config.dialects.aliases import FOREIGN
from finetrainers.config.root import fields

PAGE = ROOT / "docs" / "reference" / "dancegrpo.md"
#: What takes the place of sizes and counts that are too large for a test; one more clip is accumulated than is kept.
SMALLER = {
    "--h": "32", "--w": "32", "--t": "5", "--sampling_steps": "3", "--num_generations": "4", "--max_train_steps": "2",
    "--checkpointing_steps": "1",
}  # fmt: skip
GUIDE = {**SMALLER, "--num_generations": "2", "--bestofn": "2", "--gradient_accumulation_steps": "3"}
SCRIPT = {**SMALLER, "--max_train_steps": "1", "--bestofn": "4", "--gradient_accumulation_steps": "2"}


def page_lines() -> list[str]:
    """The commands of the page."""
    return [line for block in blocks(PAGE, "bash") for line in logical_lines(block.text)]


def shown() -> tuple[list[str], list[str], list[str]]:
    """The words of the page's commands: preparation, the guide's, the published script's."""
    prepare, guide, script = [words for line in page_lines()[:3] for words in commands(line)]
    return prepare[1:], guide[guide.index("train.py") + 1 :], script[script.index("train.py") + 1 :]


def smaller(flags: list[str], values: dict[str, str]) -> list[str]:
    """The same flags with other values."""
    return [values.get(before, word) for before, word in zip(["", *flags], flags, strict=False)]


def test_the_page_shows_the_commands_and_explains_each_flag() -> None:
    _, guide, script = shown()
    assert sorted(guide) == sorted(DANCEGRPO_6GPUS)
    assert sorted(script) == sorted(DANCEGRPO)
    table = PAGE.read_text(encoding="utf-8").partition("## Flags")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`--.*?) \|", table, re.MULTILINE)
    explained = re.findall(r"--(\w+)", " ".join(cells))
    given = {word.removeprefix("--") for word in (*guide, *script) if word.startswith("--")}
    assert sorted(explained) == sorted(DANCEGRPO_FLAGS)
    assert given <= {*DANCEGRPO_FLAGS} <= {*fields(), *FOREIGN}


@pytest.fixture(scope="module")
def workplace(tiny_repo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the guide has downloaded."""
    root = tmp_path_factory.mktemp("workplace")
    (root / "data").mkdir()
    (root / "data" / "HunyuanVideo").symlink_to(tiny_repo("hunyuan_video"))
    (root / "assets").mkdir()
    (root / "assets" / "video_prompts.txt").write_text("a dog runs\na red ball\na small blue house\n")
    model = Published(tmp_path_factory.mktemp("videoalign"))
    (root / "videoalign_ckpt").symlink_to(model.complete)
    (root / "Qwen").mkdir()
    (root / "Qwen" / "Qwen2-VL-2B-Instruct").symlink_to(model.base)
    return root


def trained(python: Python, workplace: Path, flags: list[str]) -> tuple[Path, str]:
    """Train on two processes; the run directory, and what was said."""
    output = workplace / flags[flags.index("--output_dir") + 1]
    shutil.rmtree(output, ignore_errors=True)
    environment: dict[str, Any] = {"cwd": workplace, "OMP_NUM_THREADS": "1"}
    ranks = python.ranks(2, str(ROOT / "train.py"), *flags, **environment)
    for rank in ranks:
        assert rank.wait(150) == 0, rank.stderr[-4000:]
    return output, ranks[0].stderr


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def check_copies(python: Python, workplace: Path) -> None:
    """The page's two ways to use a checkpoint elsewhere give its weights."""
    copy, export = (line.replace("step-200", "step-2") for line in page_lines()[3:])
    copy = copy.replace("checkpoint-200-0", "checkpoint-2-0")
    own = workplace / "data/outputs/grpo_hunyuan_6gpu/checkpoints/step-2/transformer"
    model = workplace / "data" / "HunyuanVideo"
    (alone := workplace / "data" / "copied").mkdir(exist_ok=True)  # the model is that of other tests, too
    shutil.copytree(model / "transformer", alone, dirs_exist_ok=True)
    copy = copy.replace("data/HunyuanVideo/transformer/", "data/copied/")
    subprocess.run(["bash", "-c", copy], cwd=workplace, check=True)
    trained = load_file(own / "diffusion_pytorch_model.safetensors")
    network = HunyuanVideoTransformer3DModel.from_pretrained(alone, torch_dtype=torch.float32)
    assert all(tensor.equal(trained[name].float()) for name, tensor in network.state_dict().items())
    done = python("-m", *export.split(), cwd=workplace)
    assert done.wait() == 0, done.stderr
    exported = load_file(workplace / "data/checkpoint-200-0/diffusers/transformer/diffusion_pytorch_model.safetensors")
    assert all(tensor.equal(trained[name].bfloat16()) for name, tensor in exported.items())


@pytest.fixture(scope="module")
def prepared(workplace: Path, python_of_module: Python) -> Path:
    """The directory, with the embeddings of its prompts."""
    prepare, *_ = shown()
    done = python_of_module("-m", "finetrainers", *prepare, cwd=workplace)
    assert done.wait() == 0, done.stderr
    assert len(json.loads((workplace / "data/rl_embeddings/videos2caption.json").read_text())) == 3
    return workplace


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_of_the_guide_trains(prepared: Path, python: Python) -> None:
    _, guide, _ = shown()
    run, said = trained(python, prepared, smaller(guide, GUIDE))
    assert re.search("--gradient_accumulation_steps 3 .* 2 clips", said)
    assert re.search("--max_train_steps 2 .*--checkpointing_steps 1 .* 1 optimizer step ", said)
    records = [json.loads(line) for line in lines(run / "metrics.jsonl")]
    steps = [record for record in records if "reward/videoalign.vq" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert [record["clips_trained"] for record in steps] == [6, 6]  # 3 prompts of the pair x 2 clips
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-1", "step-2"]
    links = {path.name: path.readlink() for path in run.glob("*checkpoint-*")}
    assert links == {f"checkpoint-{n}-0": Path(f"checkpoints/step-{n}/transformer") for n in (1, 2)}
    assert load_file(run / "transformer" / "diffusion_pytorch_model.safetensors")
    check_copies(python, prepared)
    for name, head in (("vq_reward", "videoalign.vq"), ("mq_reward", "videoalign.mq")):
        expected = [f"{record[f'reward_normalized/{head}']:.4g}" for record in steps]
        assert [f"{float(line):.4g}" for line in lines(run / f"{name}.txt")] == expected
    assert sorted(path.name for path in (run / "videos").iterdir()) == [f"hunyuan_0_{n}.mp4" for n in range(3)]
    log = (run / "train.log").read_text()
    assert "2 processes (fsdp2, " in log
    assert log.count("vq_reward") == 2
    assert "step 2/2" in log


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_of_the_published_script_trains(prepared: Path, python: Python) -> None:
    _, _, script = shown()
    run, said = trained(python, prepared, smaller(script, SCRIPT))
    assert re.search("--max_train_steps 1 .*--checkpointing_steps 1 .* 2 optimizer steps ", said)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2"]
    assert (run / "checkpoint-1-0").resolve() == (run / "checkpoints/step-2/transformer").resolve(), "of rollout 1"
    assert [len(lines(run / f"{name}_reward.txt")) for name in ("vq", "mq")] == [1, 1]
    assert sorted(path.name for path in (run / "videos").iterdir()) == ["hunyuan_0_0.mp4", "hunyuan_1_0.mp4"]
