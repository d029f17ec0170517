"""Make the runs that `test_upgrades.py` continues: small ones of each kind, as this version of the package writes them.

    PYTHONPATH=. python tests/upgrades/make.py tests/upgrades/VERSION

trains the runs of `COMMANDS` on the demo model in an empty directory, each ended by SIGTERM after four of seven steps,
then continues a copy of each for the other three, and writes their metrics to `expected.json`. All paths are relative;
nothing in the result names the machine or a directory of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Metrics that are not the same each time, by the beginning and by the end of their names: durations, speed and memory.
_MEASURED = ("time", "seconds/", "phase_s/"), ("_s", "_gib")
STOPPED_AT, TOTAL = 4, 7
_COMMON = """\
[model]
model_name = "ltx_video"
pretrained_model_name_or_path = "demo://ltx"
transformer_dtype = "fp32"
vae_dtype = "fp32"
text_encoder_dtype = "fp32"

[training]
rank = 2
lora_alpha = 2
target_modules = ["to_q", "to_v"]
seed = 7
checkpointing_steps = 2
checkpointing_limit = 1

[optimizer]
lr = 1e-3
lr_scheduler = "linear"
lr_warmup_steps = 2
"""
FILES = {
    "sft.toml": """\
[data]
data_root = "clips"
video_resolution_buckets = ["9x32x64"]
caption_dropout_p = 0.2
precompute_conditions = true

[dataloader]
batch_size = 2

[training]
use_ema = true
checkpointing_limit = 2
gradient_accumulation_steps = 2
""",
    "grpo.toml": """\
method = "grpo"

[grpo]
prompts = "prompts.txt"
reward = ["demo.shape", "brightness"]
rollout_size = "9x32x64"
sampling_steps = 4
prompts_per_step = 2
num_generations = 2
kl_coef = 0.1
""",
    "dpo.toml": """\
method = "dpo"

[data]
dataset_file = "pairs.jsonl"
video_resolution_buckets = ["9x32x64"]

[training]
init_from = "runs/sft/checkpoints/step-4"
""",
    "stages.toml": """\
output_dir = "runs/stages"

[data]
data_root = "clips"
video_resolution_buckets = ["9x32x64"]

[[stage]]
name = "low"
train_steps = 2

[[stage]]
name = "high"
init = { stage = "low" }
train_steps = 7
""",
    "datasets.toml": """\
[data]
dataset = "two.toml"
""",
    "two.toml": """\
video_resolution_buckets = ["9x32x64"]

[[dataset]]
name = "all"
data_root = "clips"

[[dataset]]
name = "windows"
data_root = "clips"
num_repeats = 2
sliding_window_size = 5
sliding_window_stride = 4
video_resolution_buckets = ["5x32x64"]
""",
    "prompts.txt": "a red ball moving left\na blue box moving up\n",
}
#: How each run was begun; the first argument of the program is the command.
COMMANDS: dict[str, list[str]] = {
    name: ["train", "--config", f"{name}.toml", "--output_dir", f"runs/{name}", "--train_steps", str(TOTAL)]
    for name in ("sft", "grpo", "dpo", "datasets")
} | {"stages/high": ["run", "stages.toml"]}
#: What is added to a command to resume: `auto` takes the run's checkpoint instead of the weights of `init_from`.
RESUME = {
    "sft": ["--resume_from_checkpoint", "latest"],
    "grpo": ["--resume_from_checkpoint", "latest"],
    "dpo": ["--resume_from_checkpoint", "auto"],
    "datasets": ["--resume_from_checkpoint", "latest"],
    "stages/high": [],
}
#: A run records the absolute path of the weights that it began with, so runs are made where no path tells anything.
BUILD = Path("/finetrainers-runs")


def merged(text: str) -> str:
    """Return a configuration file with the common settings; its own tables come first, and settings of both are
    joined."""
    import tomli_w

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    settings, own = tomllib.loads(_COMMON), tomllib.loads(text)
    for key, value in own.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return tomli_w.dumps(dict(sorted(settings.items(), key=lambda item: isinstance(item[1], (dict, list)))))


def machine() -> str:
    """Return a digest of what decides how sums are rounded: the processor, its instructions and the build of torch."""
    import torch

    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model", "flags"))][:3]
    facts = [*model, torch.backends.cpu.get_cpu_capability(), torch.__config__.show()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def metrics(run: Path, *, after: int) -> list[dict[str, Any]]:
    """Return the records of the steps after `after` that are the same each time."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in record.items()
            if not (name.startswith(_MEASURED[0]) or name.endswith(_MEASURED[1]))
        }
        for record in records
        if record["step"] > after and "loss" in record
    ]


def write_data() -> None:
    """Write four clips with captions, pairs of them, prompts and configurations into the current directory."""
    from finetrainers.demo.data import FPS, training_scenes
    from finetrainers.demo.world import caption, render
    from finetrainers.utils.video import write_mp4

    Path("clips").mkdir()
    for index, scene in enumerate(training_scenes(4)):
        write_mp4(Path("clips") / f"{index}.mp4", render(scene, frames=9, height=32), fps=FPS)
        (Path("clips") / f"{index}.txt").write_text(caption(scene, phrasing=index) + "\n")
    pairs = [{"prompt": "a red ball", "chosen": f"clips/{i}.mp4", "rejected": f"clips/{i + 2}.mp4"} for i in (0, 1)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for name, text in FILES.items():
        Path(name).write_text(merged(text) if name.endswith(".toml") and name != "two.toml" else text)


def program(*arguments: str, **environment: str) -> int:
    """Run the package's program on one thread in the current directory; return its exit code."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-m", "finetrainers", *arguments], env=env | environment).returncode


def without_machine(run: Path) -> None:
    """Take what names the machine out of a run: who held the lock is gone already; the program's path and the
    platform."""
    path = run / "env.json"
    facts = json.loads(path.read_text())
    facts["command"][0], facts["platform"] = "finetrainers", "Linux"
    path.write_text(json.dumps(facts, indent=2) + "\n")


def make() -> None:
    """Fill `BUILD`, a new directory."""
    BUILD.mkdir()
    os.chdir(BUILD)
    write_data()
    expected: dict[str, Any] = {"machine": machine(), "commands": COMMANDS, "resume": RESUME, "metrics": {}}
    for name, arguments in COMMANDS.items():
        code = program(*arguments, FINETRAINERS_FAULT=f"term@step:{STOPPED_AT}")
        assert code == 75, f"{name} ended with {code}"
    for run in sorted(path.parent for path in Path("runs").rglob("env.json")):
        without_machine(run)
    with tempfile.TemporaryDirectory() as temporary:
        copy = shutil.copytree(".", Path(temporary) / "copy")
        os.chdir(copy)
        for name, arguments in COMMANDS.items():
            assert program(*arguments, *RESUME[name]) == 0
            expected["metrics"][name] = metrics(Path("runs") / name, after=STOPPED_AT)
        os.chdir(BUILD)
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    make()
    os.chdir(target.parent)
    shutil.move(BUILD, target)
