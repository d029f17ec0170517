"""The sentences of messages, all in this table: tests elsewhere compare kind and place (tests/refusals.py), so that a
wording changes in the code and here.

A row is a function that raises an error or returns a message, and the message. It may take a new directory, which the
message names `DIR`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Row = tuple[Callable[..., Any], str]


def load(**options: Any) -> Any:
    """Load a configuration of the required options and these."""
    from finetrainers.config.load import load_config

    required = {"model_name": "ltx_video", "pretrained_model_name_or_path": "model", "data_root": "data"}
    return load_config(**{"output_dir": "run", **required, **options})


def load_text(folder: Path, text: str) -> Any:
    """Load a configuration from a file with this text."""
    from finetrainers.config.load import load_config

    (folder / "run.toml").write_text(text, encoding="utf-8")
    return load_config(folder / "run.toml", pretrained_model_name_or_path="model", data_root="data")


def check_rules(**options: Any) -> str:
    """Return the first error or warning of the rules between options."""
    from finetrainers.config.checks.options import check_config
    from finetrainers.config.facts import Facts
    from finetrainers.config.geometry import Geometry

    facts = Facts(Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25), first_frame="tokens", heads=32)
    findings = check_config(load(**options), facts=facts, prompts=[], world_size=1)
    return str([*findings.errors, *findings.warnings][0])


def parse(*flags: str) -> Any:
    """Parse the flags of a training command."""
    from finetrainers.config.flags import parse_flags

    return parse_flags(["--pretrained_model_name_or_path", "model", *flags])


def stages(folder: Path, text: str) -> str:
    """Return the first problem of a file of stages with this text."""
    from finetrainers.config.given import RawOptions
    from finetrainers.config.stages import read_stages

    (folder / "stages.toml").write_text(text, encoding="utf-8")
    return str(read_stages(folder / "stages.toml", RawOptions())[0].problems[0])


ONE = "1 problem with this configuration:\n  - "
CONFIG: list[Row] = [
    (lambda: load(rnk=8), f"{ONE}rnk: unknown option 'rnk'; did you mean 'rank'?"),
    (
        lambda: load(lr="1e-4x", rank=0, data_root="a\0b", training_type="full"),
        "4 problems with this configuration:\n"
        "  - data_root: holds a NUL character: 'a\\x00b'\n"
        "  - training_type: unknown value 'full'; did you mean 'full-finetune'? Valid: lora, full-finetune\n"
        "  - rank: must be at least 1, got 0\n"
        "  - lr: not a number, got '1e-4x'",
    ),
    (lambda: parse("--batch_siz", "3"), f"{ONE}--batch_siz: unknown flag; did you mean --batch_size?"),
    (
        lambda: load(lr=1e-4, learning_rate=1e-5),
        f"{ONE}learning_rate: learning_rate and lr (lr) set the same; give one of them",
    ),
    (
        lambda: load(width=512),
        f"{ONE}width: unknown option 'width'; sizes are --video_resolution_buckets FRAMESxHEIGHTxWIDTH, for example "
        "49x512x768, and may be several",
    ),
    (
        lambda: load(video_resolution_buckets=["49x512"]),
        f"{ONE}video_resolution_buckets: '49x512' is not FRAMESxHEIGHTxWIDTH, for example 49x512x768 (images: "
        "1x512x768)",
    ),
    (
        lambda: load(frame_conditioning="frist=0.1"),
        f"{ONE}frame_conditioning: 'frist' is no kind of given frames; did you mean 'first'?; kinds: first, last, "
        "first+last, prefix, suffix, prefix+suffix, frame, span, interpolate, random",
    ),
    (
        lambda: load(attn_backend="sage"),
        f"{ONE}attn_backend: sage has no backward pass, so nothing below it would learn; use flash or _flash_3_hub",
    ),
    (
        lambda folder: load_text(folder, "[training]\nrnk = 8\n\n[data]\nlr = 1e-4\n[optimiser]\nx = 1\n"),
        "3 problems with this configuration:\n"
        "  - DIR/run.toml:2: unknown option 'rnk'; did you mean 'rank'?\n"
        "  - DIR/run.toml:5: 'lr' belongs in [optimizer], not in [data]\n"
        "  - DIR/run.toml:6: unknown table [optimiser]; did you mean 'optimizer'?",
    ),
    (
        lambda folder: load_text(folder, "rank = \n"),
        f"{ONE}DIR/run.toml: not valid TOML: Invalid value (at line 1, column 8)",
    ),
    (
        lambda folder: load_text(folder, "rank: 64\n"),
        f"{ONE}DIR/run.toml: is YAML, and config files are TOML: `rank = 64`, no colon; see "
        "docs/reference/configuration.md",
    ),
    (lambda folder: parse("--config", f"{folder}/run.toml"), f"{ONE}--config: no such file: DIR/run.toml"),
    (
        lambda: check_rules(data_root=None),
        "--data_root: no data: give --data_root (a folder), --dataset_file, --hf_dataset or --dataset",
    ),
    (
        lambda: check_rules(video_resolution_buckets=["48x512x768"]),
        "--video_resolution_buckets: 48x512x768: 48 frames is not 8*k+1; use 41 or 49",
    ),
    (
        lambda: check_rules(video_resolution_buckets=["768x512x49"]),
        "--video_resolution_buckets: 768x512x49: the order is FRAMESxHEIGHTxWIDTH; did you mean 49x512x768?",
    ),
    (
        lambda: check_rules(lora_autocast=False, mixed_precision="bf16"),
        "--lora_autocast: --mixed_precision bf16 is the dtype of autocast; drop it or --no-lora_autocast",
    ),
    (
        lambda: check_rules(sp_size=5),
        "--sp_size: 32 attention heads do not divide by 5 processes; use one of 2, 4, 8, 16, 32, or --sp_mode ring",
    ),
    (
        lambda: check_rules(
            data_root=None,
            method="grpo",
            prompts="p.txt",
            reward=["a"],
            rollout_size="17x64x64",
            train_steps=100,
            window_size=9,
        ),
        "--window_size: a window of 9 does not fit: of 10 --sampling_steps, --window_range 0 0.5 holds 5 steps (0 to "
        "4), and the last step is never trained; use at most 5, or a wider range",
    ),
    (
        lambda: check_rules(draft_k=2, refl_kind="draft-lv"),
        "--method: sft has no use for --refl_kind, --draft_k; add --method refl or remove them",
    ),
    (
        lambda: check_rules(lr_num_cycles=2),
        "--lr_num_cycles has no effect without --lr_scheduler cosine_with_restarts",
    ),
    (
        lambda folder: stages(folder, '[[stage]]\nname = "low"\ninit = { stage = "lo" }\n'),
        "DIR/stages.toml:3: init: no earlier stage 'lo'; it is the first stage",
    ),
]
DATA: list[Row] = []


def plan_method(**options: Any) -> Any:
    """Check a run of the demo model with these options."""
    from finetrainers.plan.preflight import preflight

    return preflight(load(**{"pretrained_model_name_or_path": "demo://ltx", "train_steps": 1, "lr": 1e-4, **options}))


def plan_rewarded(folder: Path, content: str = "a cat", *, name: str = "prompts.txt", **options: Any) -> Any:
    """Check a run of reward finetuning on a file with this content."""
    (folder / name).write_text(content)
    required = {"method": "grpo", "data_root": None, "reward": ["brightness"], "rollout_size": "9x64x64"}
    return plan_method(**{**required, "prompts": str(folder / name), **options})


def plan_pairs(folder: Path, **options: Any) -> Any:
    """Check a run on a pair of clips that do not exist."""
    (folder / "pairs.jsonl").write_text('{"prompt": "a cat", "chosen": "a.mp4", "rejected": "b.mp4"}')
    data = {"data_root": None, "dataset_file": str(folder / "pairs.jsonl"), "video_resolution_buckets": ["9x64x64"]}
    return plan_method(method="dpo", **data, **options)


def make_reward(name: str, **options: str) -> Any:
    """Make a reward with these options."""
    from finetrainers.rewards.registry import make_reward

    return make_reward(name, options)


def score_clips(reward: str, *shape: int, value: float = 0.0) -> Any:
    """Score clips of this shape, all of whose pixels have this value, for one prompt."""
    import torch

    from finetrainers.config.rewards import RewardEntry
    from finetrainers.rewards.reward_set import RewardSet

    return RewardSet([RewardEntry(name=reward)]).score(torch.full(shape, value), ["a red ball"], fps=8.0)


def register(kind: str, name: str, value: Any) -> Any:
    """Register a reward or a method."""
    import finetrainers

    return getattr(finetrainers, f"register_{kind}")(name, value)


REWARDS_AND_METHODS: list[Row] = [
    (
        lambda folder: plan_rewarded(folder, reward=["brightnes", "videoalign=0.5"]),
        "2 problems with this configuration:\n"
        "  - --reward: unknown reward 'brightnes'; did you mean 'brightness'?\n"
        "  - --reward: videoalign gives several numbers; name one: videoalign.vq, videoalign.mq, videoalign.ta",
    ),
    (
        lambda folder: plan_rewarded(folder, reward=["color,tarket=red", "brightness.light"]),
        "2 problems with this configuration:\n"
        "  - --reward: color takes no option 'tarket'; did you mean 'target'?\n"
        "  - --reward: brightness gives no 'light'; valid: score",
    ),
    (
        lambda folder: plan_rewarded(folder, reward=["clipscore,path=/nowhere,device=gpu"]),
        "2 problems with this configuration:\n"
        "  - --reward: clipscore: path='/nowhere': '/nowhere' is no file or folder here, and no hub id (owner/name)\n"
        "  - --reward: clipscore: device='gpu': device 'gpu' is none of torch's: auto, cpu, cuda, cuda:1, ...",
    ),
    (
        lambda folder: plan_rewarded(folder, reward=["color", "motion"], rollout_size="1x64x64"),
        "2 problems with this configuration:\n"
        "  - --reward: color: prompts.txt line 1: the prompt 'a cat' names no CSS color; name one, or give the reward "
        "a fixed target=COLOR\n"
        "  - --reward: motion: compares frames: clips need at least 2, and these have 1; sample more frames",
    ),
    (
        lambda folder: plan_rewarded(folder, reward_device="gpu"),
        "1 problem with this configuration:\n  - --reward_device: gpu is none of auto, cpu, cuda, cuda:0, cuda:1, ...",
    ),
    (
        lambda folder: plan_rewarded(folder, reward_device="cpu"),
        "1 problem with this configuration:\n"
        "  - --reward_device: cpu: no reward is a network that this run loads; remove it",
    ),
    (
        lambda folder: plan_rewarded(folder, method="refl", reward=["compressibility"]),
        "1 problem with this configuration:\n"
        "  - --reward: compressibility gives no gradient. These do: aesthetic, brightness, clipscore, color, contrast, "
        "hpsv2, motion, pickscore, preferred_color, sharpness, smoothness, steadiness; and functions `module:function` "
        "that say so (`function.differentiable = True`). Weight 0 only logs it; policy gradients train on any reward",
    ),
    (
        lambda folder: plan_rewarded(
            folder,
            '{"prompt": "a cat", "text": "a dog"}\n{"prompt": 3}\n{"prompt": "a cat", "image": "no.png"}',
            name="prompts.jsonl",
        ),
        "data: DIR/prompts.jsonl: 3 problems\n"
        "  - prompts.jsonl line 1 has both 'prompt' and 'text'; wanted one of prompt, caption, text\n"
        "  - prompts.jsonl line 2: 'prompt' is a number, not a text\n"
        "  - prompts.jsonl line 3: cannot decode DIR/no.png: does not exist",
    ),
    (
        lambda folder: plan_rewarded(folder, "# cats"),
        "1 problem with this configuration:\n"
        "  - data: DIR/prompts.txt holds no prompts (prompts.txt: left out 1 comment (#) line)",
    ),
    (
        lambda folder: plan_rewarded(folder, name="prompts.md"),
        "1 problem with this configuration:\n"
        "  - data: prompt file 'DIR/prompts.md' must end in .txt, .jsonl, .csv or .json",
    ),
    (
        lambda folder: plan_rewarded(folder, prompts=str(folder / "no.txt")),
        "1 problem with this configuration:\n"
        "  - data: prompt file 'DIR/no.txt' cannot be read: No such file or directory",
    ),
    (
        lambda folder: plan_pairs(folder, caption_column="title", frame_selection="chunk"),
        "3 problems with this configuration:\n"
        "  - --caption_column: the columns of pairs are `prompt`, `chosen` and `rejected`; remove it\n"
        "  - --frame_selection chunk: cuts several samples from a clip, and a pair is one; use another selection\n"
        "  - data: 1 of 1 pair cannot be used\n"
        "      - pairs.jsonl line 1: chosen a.mp4: does not exist; rejected b.mp4: does not exist",
    ),
    (lambda: register("reward", "brightness", max), "reward 'brightness' is registered already"),
    (lambda: register("reward", "a.b", max), "reward name 'a.b' must be without '.', ':', '=', ',' and blanks"),
    (lambda: register("method", "sft", "collections:Counter"), "method 'sft' is registered already"),
    (lambda: register("method", "new", 42), "method of 'new': expected a class or an address, got a int"),
    (lambda: make_reward("nowhere:red"), "reward 'nowhere:red': No module named 'nowhere'"),
    (
        lambda: make_reward("http://"),
        "'http://' is no address of a reward server, such as http://localhost:8000#head",
    ),
    (
        lambda: make_reward("http://localhost:8000", retries="-1"),
        "timeout=120.0 must be positive, and retries=-1 and pause=1.0 not negative",
    ),
    (
        lambda: score_clips("brightness", 1, 2, 3, 8, 8, value=1.5),
        "clip 0, prompt 'a red ball': values 1.5 to 1.5 are not in [0, 1]; clamp decoded clips to it",
    ),
    (
        lambda: score_clips("brightness", 1, 3, 2, 8, 8),
        "clips to be scored must be [B, T, 3, H, W], got [1, 3, 2, 8, 8]; the channels come third",
    ),
    (
        lambda: score_clips("operator:is_", 1, 2, 3, 8, 8),
        "reward operator:is_ gave bool as 'score' of 1 clip; wanted a tensor [1], one number a clip",
    ),
]
MODELS: list[Row] = []
PLAN: list[Row] = []
TRAINING: list[Row] = []
RESULTS: list[Row] = []


def printed(*arguments: object) -> str:
    """Return what a refused command prints."""
    import contextlib
    import io

    from finetrainers.cli.main import main

    with contextlib.redirect_stderr(io.StringIO()) as stream:
        assert main([str(argument) for argument in arguments]) == 2
    return stream.getvalue()


def hosts(folder: Path, text: str) -> Any:
    """Read a hosts file with this text."""
    from finetrainers.tools.doctor.hosts import read_hosts

    (folder / "hosts").write_text(text, encoding="ascii")
    return read_hosts(folder / "hosts")


def sync(run: Path, target: str) -> str:
    """Return the first problem of copying a run to a target."""
    from finetrainers.tools.sync import Sync

    return str(next(Sync(run, target).problems()))


COMMANDS: list[Row] = [
    (lambda: printed("trian"), "error: there is no command 'trian'; did you mean 'train'?\n"),
    (
        lambda: printed("generate"),
        "error: there is no command 'generate'; `sample RUN --prompts PROMPTS` draws clips of a run, a checkpoint, a "
        "LoRA or a model\n",
    ),
    (
        lambda: printed("train"),
        "error: 1 problem with this configuration:\n  - --pretrained_model_name_or_path: is required: Base model in "
        "diffusers layout: a hub id, a local directory, or `demo://NAME` for a packaged one. It has the configs, the "
        "tokenizers and the scheduler of the run, also where single files replace its weights.\n"
        "finetrainers train --help lists the options. New here? finetrainers quickstart needs none.\n",
    ),
    (
        lambda folder: printed("check", "--config", folder / "run.toml", "--json", folder, "--jobs", "0"),
        "error: 3 problems with this configuration:\n  - --jobs: must be a whole number of at least 1, got '0'\n"
        "  - --json: DIR is a folder; give a file in it\n  - --config: no such file: DIR/run.toml\n",
    ),
    (
        lambda folder: printed(
            "estimate", folder / "x.toml", "--gpu", "h1000", "--num_processes", "3", "--num_machines", "2"
        ),
        "error: 3 problems with this configuration:\n  - --gpu: expected a memory size such as 24GB or a card such as "
        "h100, got 'h1000'; did you mean 'h100'?\n  - --num_processes: 3 processes do not divide among 2 machines; use "
        "a multiple\n  - --config: no such file: DIR/x.toml\n",
    ),
    (
        lambda folder: printed("search-batch", folder / "x.toml", "--gpu", "24XB", "--margin", "95", "--estimate_onyl"),
        "error: 4 problems with this configuration:\n  - --gpu: expected a memory size such as 24GB or a card such as "
        "h100, got '24XB'\n  - --margin: must be a number of percent from 0 to 89, got '95'\n  - --estimate_onyl: "
        "unknown flag; did you mean --estimate_only?\n  - --config: no such file: DIR/x.toml\n",
    ),
    (
        lambda: printed("export"),
        "error: 2 problems with this command:\n  - SOURCE: is required: a run's --output_dir, a checkpoint, or a LoRA "
        "in safetensors\n  - --format: is required: one or several of diffusers comfyui kohya peft merged\n"
        "finetrainers export --help lists the options\n",
    ),
    (
        lambda folder: printed("report", folder, "--output", folder / "page.pdf"),
        "error: 2 problems with this command:\n  - RUN: DIR is no run directory: it has none of metrics.jsonl, "
        "events.jsonl, config.toml\n  - --output: DIR/page.pdf would not be opened as what it is, an HTML page; give a "
        "name that ends in .html, or a folder that exists\n",
    ),
    (
        lambda folder: printed("ckpt", "ls", folder / "run"),
        "error: 1 problem with this command:\n  - RUN: DIR/run does not exist: there is no 'run' in 'DIR'\n",
    ),
    (
        lambda folder: printed("ckpt", "ls", folder),
        "error: 1 problem with this command:\n  - RUN: no checkpoint in DIR/checkpoints\n",
    ),
    (
        lambda folder: printed("cache", "prune", folder),
        "error: 2 problems with this command:\n  - prune: say what may go: --keep CONFIG ..., --older_than DAYS, or "
        "both\n  - DIR: DIR holds no cache; give what --precompute_dir was, or a run's --output_dir\n",
    ),
    (
        lambda: printed("doctor", "--python", "python3", "--every", "5", "--disk_mib", "1"),
        "error: 2 problems with this command:\n  - --python: is for --hosts, which is not given\n  - --disk_mib: is "
        "not read with --every, which measures no disk; remove it\n",
    ),
    (
        lambda folder: hosts(folder, "-oProxyCommand=x\na slots=x\nb\nb\n"),
        "3 problems with this configuration:\n  - DIR/hosts:1: '-oProxyCommand=x' is no name of a host\n"
        "  - DIR/hosts:2: not understood: 'a slots=x'; write `host` or `host slots=8`\n"
        "  - DIR/hosts:4: b is there twice",
    ),
    (
        lambda folder: hosts(folder, "# none"),
        "1 problem with this configuration:\n  - --hosts: DIR/hosts names no host; write one a line",
    ),
    (
        lambda folder: sync(folder, "host:x"),
        "RUN: DIR has neither config.toml nor checkpoints/; give a run's --output_dir",
    ),
    (
        lambda: printed("run"),
        "error: 1 problem with this command:\n  - FILE: is required: a TOML file of stages\n"
        "finetrainers run --help shows one\n",
    ),
    (
        lambda: printed("run", Path(__file__).parents[1] / "examples" / "stages.toml", "--from", "hihg"),
        "error: 1 problem with this command:\n  - --from: no stage 'hihg'; did you mean 'high'?\n"
        "finetrainers run --help lists the options\n",
    ),
    (
        lambda: printed("sample"),
        "error: 1 problem with these samples:\n  - TARGET: is required: a run directory, a checkpoint, a LoRA in "
        "safetensors or a model: finetrainers sample runs/mystyle\n",
    ),
    (
        lambda: printed("sample", "--validation_prompts", "x"),
        "error: 1 problem with these samples:\n  - --validation_prompts: unknown flag; here it is --prompts\n",
    ),
    (
        lambda: printed("demo", "measure", "new", "--model", "demo://lxt", "--look", "stripped"),
        "error: 2 problems with this command:\n  - --look: unknown value 'stripped'; did you mean 'striped'?\n"
        "  - --model: no packaged model 'demo://lxt'; did you mean 'demo://ltx'?\n",
    ),
    (
        lambda folder: printed("tiny", "ltx_vido", folder / "tiny"),
        "error: 1 problem with this command:\n  - family: unknown model family 'ltx_vido'; did you mean 'ltx_video'?\n",
    ),
    (
        lambda: printed("serve-reward", "brightness=0.5", "--port", "0"),
        "error: 1 problem with this command:\n  - reward: weight is said where the reward is used, not where it is "
        "served\n",
    ),
    (
        lambda: printed("serve-reward", "brightness,device=cpu", "--device", "cuda:7"),
        "error: 1 problem with this command:\n  - --device: cuda:7, but the reward says device=cpu\n",
    ),
]

ALL = [*CONFIG, *DATA, *REWARDS_AND_METHODS, *MODELS, *PLAN, *TRAINING, *RESULTS, *COMMANDS]


@pytest.mark.parametrize("row", ALL, ids=range(len(ALL)))
def test_sentence(row: Row, tmp_path: Path) -> None:
    call, sentence = row
    try:
        message = call(tmp_path) if inspect.signature(call).parameters else call()
    except Exception as error:
        message = str(error)
    assert message.replace(str(tmp_path), "DIR") == sentence
