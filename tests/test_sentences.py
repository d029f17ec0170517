"""The sentences of messages, all in this table: tests elsewhere compare kind and place (tests/refusals.py), so that a
wording changes in the code and here.

A row is a function that raises an error or returns a message, and the message. It may take a new directory, which the
message names `DIR`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from every_family import FAMILIES

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
    from finetrainers.methods.registry import method_spec

    facts = Facts(Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25), first_frame="tokens", heads=32)
    config = load(**options)
    findings = check_config(config, facts=facts, prompts=[], world_size=1)
    findings.add(method_spec(config).option_rules(config, facts, world_size=1))
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


#: As messages list the families.
SUPPORTED = ", ".join(sorted(FAMILIES))
ONE = "1 problem with this configuration:\n  - "


def read_data(folder: Path, files: dict[str, str], **options: Any) -> Any:
    """Write files to a directory and read the dataset of these options, whose paths are relative to it."""
    from finetrainers.config.sections import DataSection
    from finetrainers.data.reading.datasets import read_all, read_datasets

    for name, text in files.items():
        (folder / name).write_text(text, encoding="latin-1")
    paths = {name: folder / options[name] for name in ("data_root", "dataset_file", "dataset") if name in options}
    return read_all(read_datasets(DataSection(**{**options, **paths})), folder / "media")


def plan_image(folder: Path, **options: Any) -> Any:
    """Plan a dataset of one image, for a model that takes 8k + 1 frames and multiples of 16 pixels."""
    from PIL import Image

    from finetrainers.config.geometry import Geometry
    from finetrainers.data.inspect.survey import survey_dataset

    Image.new("RGB", (48, 32)).save(folder / "a.png")
    (folder / "a.txt").write_text("a picture")
    geometry = Geometry(temporal=8, spatial=16, patch=1, patch_t=1, fps=8)
    config = load(data_root=folder, probe_dir=folder / "probes", **options)
    return survey_dataset(config, geometry).checked()


TWO_FILES = {"data_root": "", "video_column": "videos.txt", "caption_column": "prompts.txt"}

CONFIG: list[Row] = [
    (lambda: load(rnk=8), f"{ONE}rnk: unknown option 'rnk'; did you mean 'rank'?"),
    (
        lambda: load(lr="1e-4x", rank=0, data_root="a\0b", training_type="full"),
        "4 problems with this configuration:\n  - data_root: must not contain a NUL character: 'a\\x00b'\n  - "
        "training_type: unknown value 'full'; did you mean 'full-finetune'? Valid: lora, full-finetune\n  - rank: "
        "must be at least 1, got 0\n  - lr: must be a number, got '1e-4x'",
    ),
    (lambda: parse("--batch_siz", "3"), f"{ONE}--batch_siz: unknown flag; did you mean --batch_size?"),
    (
        lambda: load(lr=1e-4, learning_rate=1e-5),
        f"{ONE}learning_rate: learning_rate and lr (lr) set the same option; remove one of them",
    ),
    (
        lambda: load(width=512),
        f"{ONE}width: unknown option 'width'; sizes are set by --video_resolution_buckets FRAMESxHEIGHTxWIDTH, for "
        "example 49x512x768 (one or several)",
    ),
    (
        lambda: load(video_resolution_buckets=["49x512"]),
        f"{ONE}video_resolution_buckets: expected FRAMESxHEIGHTxWIDTH, for example 49x512x768 (images: 1x512x768), "
        "got '49x512'",
    ),
    (
        lambda: load(frame_conditioning="frist=0.1"),
        f"{ONE}frame_conditioning: unknown frame-conditioning mode 'frist'; did you mean 'first'?; valid: first, "
        "last, first+last, prefix, suffix, prefix+suffix, frame, span, interpolate, random",
    ),
    (
        lambda: load(attn_backend="sage"),
        f"{ONE}attn_backend: sage has no backward pass, so layers before it would not learn; use flash or _flash_3_hub",
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
        f"{ONE}DIR/run.toml: is YAML, and config files are TOML: write `rank = 64`, no colon; see "
        "docs/reference/configuration.md",
    ),
    (lambda folder: parse("--config", f"{folder}/run.toml"), f"{ONE}--config: file not found: DIR/run.toml"),
    (
        lambda: check_rules(data_root=None),
        "--data_root: no data: set --data_root (a directory), --dataset_file, --hf_dataset or --dataset",
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
        "--lora_autocast: --mixed_precision bf16 is the dtype of autocast; remove it or --no-lora_autocast",
    ),
    (
        lambda: check_rules(sp_size=5),
        "--sp_size: must divide the 32 attention heads, got 5; use one of 2, 4, 8, 16, 32, or --sp_mode ring",
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
        "--method: sft does not use --refl_kind, --draft_k; add --method refl or remove them",
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
        "2 problems with this configuration:\n  - --reward: unknown reward 'brightnes'; did you mean "
        "'brightness'?\n  - --reward: videoalign has several scores; use one: videoalign.vq, videoalign.mq, "
        "videoalign.ta",
    ),
    (
        lambda folder: plan_rewarded(folder, reward=["color,tarket=red", "brightness.light"]),
        "2 problems with this configuration:\n  - --reward: color has no option 'tarket'; did you mean 'target'?\n  "
        "- --reward: brightness has no score 'light'; valid: score",
    ),
    (
        lambda folder: plan_rewarded(folder, reward=["clipscore,path=/nowhere,device=gpu"]),
        "2 problems with this configuration:\n  - --reward: clipscore: path='/nowhere': '/nowhere' is not a file or "
        "directory here, or a Hub id (owner/name)\n  - --reward: clipscore: device='gpu': device must be auto, cpu, "
        "cuda, cuda:1, ..., got 'gpu'",
    ),
    (
        lambda folder: plan_rewarded(folder, reward=["color", "motion"], rollout_size="1x64x64"),
        "2 problems with this configuration:\n  - --reward: color: prompts.txt line 1: the prompt 'a cat' names no "
        "CSS color; name one, or set a fixed target=COLOR for the reward\n  - --reward: motion: compares frames: "
        "clips must have at least 2, got 1; sample more frames",
    ),
    (
        lambda folder: plan_rewarded(folder, reward_device="gpu"),
        "1 problem with this configuration:\n  - --reward_device: must be auto, cpu, cuda, cuda:0, cuda:1, ..., got "
        "gpu",
    ),
    (
        lambda folder: plan_rewarded(folder, reward_device="cpu"),
        "1 problem with this configuration:\n  - --reward_device: cpu: this run loads no reward network; remove it",
    ),
    (
        lambda folder: plan_rewarded(folder, method="refl", reward=["compressibility"]),
        "1 problem with this configuration:\n  - --reward: compressibility has no gradient. Use one of aesthetic, "
        "brightness, clipscore, color, contrast, hpsv2, motion, pickscore, preferred_color, saturation, sharpness, "
        "smoothness, steadiness, or a function `module:function` with `function.differentiable = True`. Weight 0 only "
        "logs it; policy gradients support any reward",
    ),
    (
        lambda folder: plan_rewarded(
            folder,
            '{"prompt": "a cat", "text": "a dog"}\n{"prompt": 3}\n{"prompt": "a cat", "image": "no.png"}',
            name="prompts.jsonl",
        ),
        "data: DIR/prompts.jsonl: 3 problems\n  - prompts.jsonl line 1 has both 'prompt' and 'text'; expected one of "
        "prompt, caption, text\n  - prompts.jsonl line 2: 'prompt' must be text, got a number\n  - prompts.jsonl "
        "line 3: cannot decode DIR/no.png: does not exist",
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
        "  - data: prompt file 'DIR/no.txt' does not exist: there is no 'no.txt' in 'DIR'",
    ),
    (
        lambda folder: plan_pairs(folder, caption_column="title", frame_selection="chunk"),
        "3 problems with this configuration:\n  - --caption_column: the columns of pairs are `prompt`, `chosen` and "
        "`rejected`; remove it\n  - --frame_selection chunk: cuts several samples from a clip, but a pair is one "
        "sample; use another selection\n  - data: 1 of 1 pair cannot be used\n      - pairs.jsonl line 1: chosen "
        "a.mp4: does not exist; rejected b.mp4: does not exist",
    ),
    (
        lambda: register("reward", "brightness", max),
        "reward 'brightness' is registered already, as finetrainers.rewards.pixels:Brightness; use another name",
    ),
    (lambda: register("reward", "a.b", max), "reward 'a.b' must not contain '.', ':', '=', ',' or spaces"),
    (
        lambda: register("method", "sft", "collections:Counter"),
        "method 'sft' is registered already, as finetrainers.methods.sft:SFT; use another name",
    ),
    (
        lambda: register("method", "new", 42),
        "method 'new' needs a class or an address as its method, got an object of type int",
    ),
    (lambda: make_reward("nowhere:red"), "reward 'nowhere:red': No module named 'nowhere'"),
    (
        lambda: make_reward("http://"),
        "'http://' is not an address of a reward server, such as http://localhost:8000#head",
    ),
    (
        lambda: make_reward("http://localhost:8000", retries="-1"),
        "timeout=120.0 must be positive, and patience=600.0, retries=-1 and pause=1.0 not negative",
    ),
    (
        lambda: score_clips("brightness", 1, 2, 3, 8, 8, value=1.5),
        "clip 0, prompt 'a red ball': values 1.5 to 1.5 are not in [0, 1]; clamp decoded clips to it",
    ),
    (
        lambda: score_clips("brightness", 1, 3, 2, 8, 8),
        "clips to score must be [B, T, 3, H, W], got [1, 3, 2, 8, 8]; the channels come third",
    ),
    (
        lambda: score_clips("operator:is_", 1, 2, 3, 8, 8),
        "reward operator:is_ returned bool as 'score' of 1 clip; expected one number or None per clip, as a tensor "
        "[1], an array or a list",
    ),
]


DATA: list[Row] = [
    (
        lambda folder: read_data(folder, {"videos.txt": "a.mp4\nb.mp4\n", "prompts.txt": "one\n"}, **TWO_FILES),
        "DIR/videos.txt has 2 lines but DIR/prompts.txt has 1 line; line n of one belongs to line n of the other, and "
        "an empty caption is an empty line",
    ),
    (
        lambda folder: read_data(folder, {"videos.txt": "a.mp4\n", "prompt.txt": "one\n"}, **TWO_FILES),
        "'DIR' holds 'videos.txt' but not 'prompts.txt' (did you mean 'prompt.txt'?) (set by `video_column` and "
        "`caption_column`)",
    ),
    (
        lambda folder: read_data(folder, {"videos.txt": "\nb.mp4\n", "prompts.txt": "one\ntwo\n"}, **TWO_FILES),
        "DIR: 1 problem\n  - videos.txt line 1 is empty, but prompts.txt has a caption there",
    ),
    (
        lambda folder: read_data(folder, {"videos.txt": "a.mp4\n", "prompts.txt": "caf\xe9\n"}, **TWO_FILES),
        "DIR/prompts.txt is not UTF-8 text: byte 3 is 0xe9",
    ),
    (
        lambda folder: read_data(folder, {}, data_root=""),
        "no clips in 'DIR': put videos or images there, each with a caption in a text file of the same name (dog.mp4 "
        "and dog.txt). Or set --dataset_file, a table of paths and captions, or the two text files --video_column "
        "and --caption_column with one line per clip",
    ),
    (
        lambda folder: read_data(folder, {"clips.csv": "video,text\n"}, data_root="clips.csv"),
        "data_root 'DIR/clips.csv' is a file, not a directory; if it lists clips, use --dataset_file 'DIR/clips.csv'",
    ),
    (
        lambda folder: read_data(folder, {"a.mp4": "", "a.mask.png": "", "a.mask.mp4": ""}, data_root=""),
        "DIR: 1 problem\n  - a.mask.mp4 and a.mask.png are masks of the same clip; remove one of them",
    ),
    (
        lambda folder: read_data(folder, {"clips.csv": "video,txet\na.mp4,one\n"}, dataset_file="clips.csv"),
        "clips.csv line 1: no column 'text' (set by `caption_column`); it has: video, txet; use --caption_column txet",
    ),
    (
        lambda folder: read_data(folder, {"clips.csv": "video,text,text\na.mp4,a,b\n"}, dataset_file="clips.csv"),
        "clips.csv line 1: column 'text' occurs twice; rename one",
    ),
    (
        lambda folder: read_data(
            folder, {"c.jsonl": '{"video": 3, "text": ""}\n{"video": "a", "text": NaN}\n[]\n'}, dataset_file="c.jsonl"
        ),
        "DIR/c.jsonl: 3 problems\n  - c.jsonl line 1: column 'video' must be a path, got 3\n  - c.jsonl line 2 is "
        "not JSON: NaN is not a JSON value; write null, or remove the key\n  - c.jsonl line 3: must be an object, "
        "got []",
    ),
    (
        lambda folder: read_data(folder, {"clips.xlsx": ""}, dataset_file="clips.xlsx"),
        "dataset_file 'DIR/clips.xlsx' must end in .csv, .json, .jsonl, .parquet or .tar",
    ),
    (
        lambda folder: read_data(folder, {}, dataset_file="clips-{0..1}.tar"),
        "dataset_file 'DIR/clips-{0..1}.tar': file not found\n  - DIR/clips-0.tar is missing\n  - DIR/clips-1.tar is "
        "missing",
    ),
    (
        lambda folder: read_data(
            folder,
            {"sets.toml": "max_bad_samples = 3\n[[dataset]]\ndata_roots = 'a'\nweight = 0\n[dataset.more]\nx = 1\n"},
            dataset="sets.toml",
        ),
        "DIR/sets.toml: 4 problems\n  - at the top: max_bad_samples: must be the same for all datasets; set it as an "
        "option of the run\n  - [[dataset]] 1: data_roots: is not an option of a dataset; did you mean "
        "'data_root'?\n  - [[dataset]] 1: more: unknown table\n  - [[dataset]] 1: weight: must be above 0, got 0",
    ),
    (
        lambda folder: read_data(
            folder, {"sets.toml": "[[dataset]]\ndata_root = 'a'\n[[directory]]\npath = 'b'\n"}, dataset="sets.toml"
        ),
        "DIR/sets.toml: [[dataset]] and [[directory]] cannot be combined; use one of them",
    ),
    (
        lambda folder: read_data(
            folder, {"sets.toml": "shuffle_tags = true\n[[directory]]\npath = 'a'\n"}, dataset="sets.toml"
        ),
        "DIR/sets.toml: 1 problem\n  - at the top: shuffle_tags: tags are not shuffled; write several captions, one a "
        "line of the .txt file, and set caption_lines",
    ),
    (
        lambda folder: plan_image(folder, video_resolution_buckets=["9x32x48"]),
        "1 of 1 file cannot be used; repair them\n  - a.png: no bucket for images; add one (HxW in "
        "`image_resolution_buckets`), or leave out all buckets, so that sizes are chosen from the clips",
    ),
    (
        lambda folder: plan_image(folder, image_resolution_buckets=["32x40"], video_resolution_buckets=["16x32x48"]),
        "buckets that this model does not support\n  - 16x32x48: 16 frames is not 8*k+1; use 9 or 17\n  - 1x32x40: "
        "width 40 is not a multiple of 16; use 32 or 48",
    ),
    (
        lambda folder: plan_image(folder, image_resolution_buckets=["32x48"], bucket_batch_sizes=["1x32x32=2"]),
        "`bucket_batch_sizes` names unknown buckets\n  - 1x32x32 is not a bucket of this run; the nearest is 1x32x48",
    ),
    (
        lambda folder: plan_image(folder, image_resolution_buckets=["32x48"], eval_num_items=1),
        "`eval_num_items` 1 leaves nothing to train on: there are 1 usable item",
    ),
    (
        lambda folder: plan_image(folder, image_resolution_buckets=["32x48"], epoch_end="drop", batch_size=2),
        "nothing to train on: no bucket has clips for a whole batch; lower --batch_size, or leave out --epoch_end drop",
    ),
]


def optimizer(device: str = "cuda", **options: Any) -> str:
    """Return the errors and the warnings of a configuration's optimizer, one a line."""
    from finetrainers.optim.rules import optimizer_problems

    errors, warnings = optimizer_problems(load(**options), device_type=device)
    return "\n".join(map(str, [*errors, *warnings]))


def part(directory: Path, name: str, content: str | bytes | None = None, file: str = "a.safetensors") -> str:
    """Return the problems of a part of a model whose directory, or single file, has this content."""
    from finetrainers.config.sections import ModelSection
    from finetrainers.models.files.files import file_problems

    source = directory / file
    source.parent.mkdir(exist_ok=True)
    if content is not None:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    is_single = source.parent == directory
    model = ModelSection(
        model_name="ltx_video", pretrained_model_name_or_path="someone/model" if is_single else str(directory),
        **({f"{name}_id": str(source)} if is_single else {}),
    )  # fmt: skip
    return "\n".join(map(str, file_problems(model, [name])))


def family(**options: Any) -> Any:
    """Resolve the model family of a configuration."""
    from finetrainers.plan.preflight import resolve_family

    return resolve_family(load(**options))


def hub(error: str) -> str:
    """Return the advice on a model of the Hub after this error of huggingface_hub."""
    import huggingface_hub.constants

    from finetrainers.models.files.hub_help import hub_help

    return str(
        hub_help(getattr(huggingface_hub.errors, error)(error), "someone/model", away="the hub cannot be reached")
    )


def lora(**tensors: tuple[int, int]) -> Any:
    """Read a LoRA of these tensors' shapes; `__` stands for a dot."""
    import torch

    from finetrainers.models.files.lora_formats import lora_from_state

    return lora_from_state({name.replace("__", "."): torch.zeros(shape) for name, shape in tensors.items()}, {})


def network_file(**held: tuple[int, ...]) -> str:
    """Return the problems of a file with these tensors, of a network of two layers."""
    from finetrainers.models.files.layouts import build_layout, match_file

    network = {"proj_in": (4, 2), "proj_out": (2, 4)}
    match = match_file(held, network, {"diffusers": build_layout([*network], ())})
    return "\n".join(map(str, match.problems("FILE")))


def split(**options: Any) -> Any:
    """Choose the strategy of a configuration's processes."""
    from finetrainers.parallel.select import planned_strategy

    return planned_strategy(load(**options), device_type="cpu")


def launch(**options: Any) -> Any:
    """Join the processes of a run."""
    from finetrainers.parallel.select import open_strategy

    return open_strategy(load(**options))


def noise(eta: float, *times: float) -> Any:
    """Return the transitions of a sampler."""
    import torch

    from finetrainers.diffusion.policy import levels, transitions
    from finetrainers.diffusion.process import FlowMatching

    return transitions("dance", *levels(FlowMatching(), torch.tensor(times)), eta=eta)


def shifts(**options: Any) -> Any:
    """Return the shifts of a run by the number of tokens."""
    from finetrainers.diffusion.timesteps import resolution_shift

    return resolution_shift(load(**options).diffusion, {})


def checkpointing() -> Any:
    """Checkpoint the activations of a network of another library."""
    from torch import nn

    from finetrainers.memory.checkpointing import set_activation_memory

    return set_activation_memory(nn.Linear(2, 2), "checkpoint")


MODELS: list[Row] = [
    (
        lambda: family(model_name="ltx"),
        "1 problem with this configuration:\n  - --model_name: unknown model family 'ltx'; did you mean "
        "'ltx_video' or 'ltx2'?",
    ),
    (
        lambda: family(model_name="allegro"),
        "1 problem with this configuration:\n"
        "  - --model_name: model family 'allegro' is not supported; supported: "
        f"{SUPPORTED}",
    ),
    (
        lambda directory: family(model_name="auto", pretrained_model_name_or_path=str(directory)),
        "1 problem with this configuration:\n  - --model_name: is required: it cannot be detected from a config of "
        f"DIR on this disk; supported: {SUPPORTED}",
    ),
    (
        lambda directory: part(directory, "vae", file="transformer/config.json"),
        "--pretrained_model_name_or_path: DIR has no directory 'vae', so it is not a model in diffusers layout (it "
        "holds: transformer)",
    ),
    (
        lambda directory: part(directory, "vae", "[1]", file="vae/config.json"),
        "--pretrained_model_name_or_path: DIR/vae/config.json must be a JSON object, got "
        "list\n--pretrained_model_name_or_path: DIR/vae has no diffusion_pytorch_model.safetensors; it holds: "
        "config.json",
    ),
    (
        lambda directory: part(directory, "transformer", "version https://git-lfs.github.com/spec/v1"),
        "--transformer_id: DIR/a.safetensors is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`",
    ),
    (
        lambda directory: part(directory, "transformer", b"GGUF", file="a.gguf"),
        "--transformer_id: DIR/a.gguf holds quantized weights (GGUF), which are not supported; use the unquantized "
        "ones, which --quantize_frozen int8, fp8 or nf4 quantizes while they are loaded",
    ),
    (
        lambda directory: part(directory, "vae"),
        "--vae_id: file not found: DIR/a.safetensors",
    ),
    (
        lambda: network_file(proj_in=(4, 3), proj_ou=(2, 4)),
        "FILE lacks 1 tensor: proj_out (it has proj_ou)\nproj_in in FILE has shape (4, 3), and the config requires "
        "(4, 2)",
    ),
    (
        lambda: hub("OfflineModeIsEnabled"),
        "It is not on this disk, and the hub cannot be reached: download it first with a connection (`hf download "
        "someone/model`), into the same cache (HF_HOME, or --cache_dir).",
    ),
    (
        lambda: lora(a__lora_A__weight=(4, 2)),
        "only one of two factors of 1 layer: a",
    ),
    (
        lambda: lora(a__lokr_w1=(4, 2)),
        "1 tensor with unknown names: a.lokr_w1",
    ),
    (
        lambda: optimizer(optimizer="lion", use_8bit_bnb=True),
        "--use_8bit_bnb: use_8bit_bnb requires optimizer adam or adamw, got 'lion'; remove use_8bit_bnb or use one "
        "of those",
    ),
    (
        lambda: optimizer(optimizer="muon", training_type="full-finetune", beta3=0.9),
        "--beta3: 0.9 is not a parameter of optimizer muon; remove it or use one of prodigy, came\n--optimizer: muon "
        "supports only matrices, and full-finetune also trains biases and norms; use --training_type lora or another "
        "optimizer",
    ),
    (
        lambda: optimizer("cpu", optimizer="came", use_cpu_offload_optimizer=True),
        "--use_cpu_offload_optimizer: requires a CUDA or XPU device, and this run is on cpu; remove "
        "it\n--use_cpu_offload_optimizer: requires plain adam or adamw, got --optimizer "
        "came\n--use_cpu_offload_optimizer: cannot be combined with --max_grad_norm 1: it copies gradients to the "
        "host before their norm is known; use --max_grad_norm 0",
    ),
    (
        lambda: optimizer(lr=0.02, lr_scheduler="cosine", train_steps=500),
        "--lr 0.02 is far above the usual range for finetuning, 1e-6 to 1e-3; it may ruin the weights within a few "
        "steps\n--lr_warmup_steps 500 is not below --train_steps 500: the learning rate never reaches --lr",
    ),
    (
        lambda: split(fsdp="full", fsdp_group_size=2),
        "1 problem with this configuration:\n  - --fsdp_group_size: requires --fsdp hybrid; `full` shards over all "
        "processes",
    ),
    (
        lambda: launch(deepspeed=True),
        "1 problem with this configuration:\n  - --deepspeed: requires a launcher, even for one process: deepspeed, "
        "torchrun, or accelerate launch",
    ),
    (
        lambda: noise(4.0, 1.0, 0.7, 0.4),
        "sampler 'dance' with eta 4 adds noise of std 2.191 at step 1 of 3 (noise level 1 to 0.7); "
        "latents have a std of about 1, so at most 2 makes sense: use a lower --eta, another --sampler, "
        "or more --sampling_steps",
    ),
    (
        lambda: shifts(flow_base_seq_len=4096),
        "--flow_max_seq_len 4096 must be above --flow_base_seq_len 4096 (the default is that of the checkpoint's "
        "scheduler, else 256 and 4096)",
    ),
    (
        checkpointing,
        "Linear does not support gradient checkpointing; use activation_memory none",
    ),
]


#: The only process of a run.
PROCESS: Any = SimpleNamespace(is_main=True, broadcast_object=lambda value: value)


def train_with(callbacks: Any) -> Any:
    """Train with callbacks, which are checked first."""
    from finetrainers.runs.training import train

    return train(load(), callbacks=callbacks)


def watch_with(**hooks: Any) -> Any:
    """Return a class of callbacks with these methods."""
    from finetrainers import Callback

    return type("Watch", (Callback,), hooks)


def resume(directory: Path, checkpoint: str, *, cut: str = "", missing: str = "") -> Any:
    """Find a checkpoint in a run with steps 2 and 4, each with a file that is empty or missing."""
    from finetrainers.rundir.find import find_checkpoint
    from finetrainers.rundir.publish import publish, reserve

    for step in (2, 4):
        final = directory / "checkpoints" / f"step-{step}"
        temporary = reserve(final, needed=0)
        for name in ("state.json", "optimizer.pt"):
            (temporary / name).write_text("{}")
        publish(temporary, final, facts={"step": step})
        if cut:
            (final / cut).write_text("")
        if missing:
            (final / missing).unlink()
    return find_checkpoint(checkpoint, directory)


def read_other_format(directory: Path) -> Any:
    """Read a checkpoint of a later version."""
    from finetrainers.rundir.find import read_state

    (directory / "state.json").write_text('{"format": 99}')
    return read_state(directory)


def use_twice(directory: Path) -> None:
    """Start a second run in a directory; the file that names the first one is gone."""
    from finetrainers.rundir.lock import HOLDER, exclusive

    with exclusive(directory, PROCESS):
        (directory / HOLDER).write_text("")
        with exclusive(directory, PROCESS):
            pass


def save_on_full_disk(directory: Path) -> Any:
    """Reserve 12 GiB for a checkpoint where 1 GiB is free."""
    from finetrainers.rundir.publish import reserve

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**30))
        return reserve(directory / "step-3", needed=12 * 2**30)


def take_nan_step(policy: str, *, limit: int, step: int = 3) -> Any:
    """Judge a step whose loss is NaN."""
    from finetrainers.training.guards.nonfinite import NonFiniteGuard

    run_dir: Any = SimpleNamespace(event=lambda *values, **fields: None)
    guard = NonFiniteGuard(policy=policy, limit=limit, loss_scaling=False, run_dir=run_dir)
    return guard.choose_action(step, {"loss": float("nan"), "grad_norm": 1.0})


def roll_back_at_once(directory: Path) -> None:
    """Roll back a run that has no checkpoint."""
    from finetrainers.training.rollback import roll_back

    guards = SimpleNamespace(memory=SimpleNamespace(fitting_samples={}))
    run_dir = SimpleNamespace(root=directory)
    state: Any = SimpleNamespace(step=3, data_ahead=0, guards=guards, parallel=PROCESS, run_dir=run_dir)
    roll_back(state)


def run_out_of_memory() -> None:
    """Run out of memory on a GPU."""
    import torch

    from finetrainers.training.guards.memory import advise_on_oom

    with advise_on_oom("training"):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")


def describe_hacking(judge: str, checkpoint: str | None, collapsed: tuple[str, ...] = ()) -> str:
    """Return the description of reward hacking that this metric shows."""
    from finetrainers.rewards.hacking import RewardHacking, hacking_text

    hacking = RewardHacking(judge, 24, 0.625, 0.25, trained_before=0.5, trained_now=0.9, collapsed=collapsed)
    return hacking_text(hacking, checkpoint)


def suggest(phase: str, **options: Any) -> str:
    """Return the option to change after a phase ran out of memory."""
    from finetrainers.training.memory_failure import suggest_change

    return suggest_change(load(**options), phase)


def load_other_averages(directory: Path) -> None:
    """Load the moving average of another network."""
    import torch
    from safetensors.torch import save_file

    from finetrainers.training.trained_weights import load_ema_weights

    save_file({"bias": torch.zeros(2), "other": torch.zeros(2)}, directory / "ema.safetensors")
    load_ema_weights(directory / "ema.safetensors", torch.nn.Linear(2, 2))


def load_other_lora(directory: Path, **shapes: tuple[int, int]) -> None:
    """Load a LoRA of a layer with these shapes into an adapter of rank 4 and width 8."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors.torch import save_file

    from finetrainers.plan.initial_weights import LORA_FILE
    from finetrainers.training.trained_weights import load_lora_weights

    layers = torch.nn.Sequential(torch.nn.Linear(8, 8))
    network = inject_adapter_in_model(LoraConfig(r=4, target_modules=["0"]), layers)
    weights = {f"transformer.0.lora_{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(weights, directory / LORA_FILE)
    load_lora_weights(directory, network)


TRAINING: list[Row] = [
    (
        lambda: train_with(3),
        "1 problem with this configuration:\n  - callbacks: expected a list of callbacks, got an int",
    ),
    (
        lambda: train_with([watch_with(on_stepp=lambda self, state: None)(), watch_with(), 3]),
        "3 problems with this configuration:\n"
        "  - callbacks[0]: a Watch has no hook on_stepp; did you mean 'on_step'?; rename methods that are not hooks\n"
        "  - callbacks[1]: expected an instance, got the class Watch; write Watch(...)\n"
        "  - callbacks[2]: expected an instance of finetrainers.Callback, got an int; derive its class from Callback",
    ),
    (
        lambda: train_with([watch_with(on_log=lambda self, state: None)()]),
        "1 problem with this configuration:\n"
        "  - callbacks[0]: a Watch.on_log must take (state, record): too many positional arguments",
    ),
    (
        lambda directory: resume(directory, "3"),
        "no checkpoint of step 3 in DIR/checkpoints; valid: 2, 4",
    ),
    (
        lambda directory: resume(directory, "step-4"),
        "step-4 is not a checkpoint (no state.json); use `auto`, `latest`, a step (2, 4) or a directory",
    ),
    (
        lambda directory: resume(directory, "4", cut="state.json"),
        "DIR/checkpoints/step-4 is damaged: state.json has 0 bytes instead of 2; `latest` uses the newest complete "
        "one (by file sizes: none)",
    ),
    (
        lambda directory: resume(directory, "4", missing="manifest.json"),
        "DIR/checkpoints/step-4 is damaged: manifest.json is missing: the checkpoint is incomplete, or was saved by "
        "an earlier version; `latest` uses the newest complete one (by file sizes: none)",
    ),
    (
        lambda directory: resume(directory, "latest", missing="state.json"),
        "every checkpoint in DIR/checkpoints is damaged (step-4: state.json is missing; step-2: state.json is missing)",
    ),
    (
        lambda directory: resume(directory, "4", missing="optimizer.pt"),
        "DIR/checkpoints/step-4 has no optimizer state: it is a copy for sampling. Resume where it was trained, or "
        "start a new run from its weights with --init_from",
    ),
    (
        read_other_format,
        "DIR has checkpoint format 99; this version reads 3 and 4",
    ),
    (
        use_twice,
        "1 problem with this configuration:\n  - --output_dir: DIR is in use by another run; wait for it, stop it, "
        "or use another directory",
    ),
    (
        save_on_full_disk,
        "[Errno 28] a checkpoint needs about 12 GiB and DIR has 1 GiB free; nothing was written, earlier checkpoints "
        "are intact. Free up space (--checkpointing_limit bounds the number of checkpoints) and continue with "
        "--resume_from_checkpoint latest",
    ),
    (
        lambda: take_nan_step("raise", limit=9),
        "step 3: loss nan. No weights were changed. Continue from an earlier checkpoint with a lower --lr, longer "
        "--lr_warmup_steps or other data, or skip such steps with --on_nonfinite skip",
    ),
    (
        lambda: take_nan_step("raise", limit=9, step=1),
        "step 1: loss nan. The weights are still as loaded, so --lr is not the cause. Check the numbers in the model's "
        "config files, use bf16 or fp32 instead of fp16, or use other data, or skip such steps with --on_nonfinite "
        "skip",
    ),
    (
        lambda: take_nan_step("skip", limit=0),
        "step 3: loss nan; 1 steps were not finite, more than --max_nonfinite_steps 0. No weights were changed. "
        "Continue from an earlier checkpoint with a lower --lr, longer --lr_warmup_steps or other data",
    ),
    (
        roll_back_at_once,
        "step 4 was not finite, and there is no checkpoint to roll back to: no checkpoint in DIR/checkpoints; remove "
        "the option to start a new run. Lower --lr, or save more often with --checkpointing_steps",
    ),
    (
        run_out_of_memory,
        "out of memory while training (CUDA out of memory). What needs less: --gradient_checkpointing; smaller or "
        "shorter --video_resolution_buckets (reward finetuning: --rollout_size); --training_type lora; "
        "--quantize_frozen int8; an 8-bit or offloaded optimizer; --precompute_conditions; where clips are encoded or "
        "decoded, --enable_tiling and --enable_slicing. --dry_run prints an estimate of what takes how much",
    ),
    (
        lambda: describe_hacking("shape", "run/checkpoints/step-20"),
        "the held-out reward shape has fallen from 0.625 around step 24 to 0.25, while the trained reward has risen "
        "from 0.5 to 0.9. Resume from run/checkpoints/step-20, the nearest checkpoint from before, with a lower --lr "
        "or a larger KL penalty, or also train on shape (--reward)",
    ),
    (
        lambda: describe_hacking("witness/motion", None),
        "motion of the rollouts has changed from 0.625 at the start to 0.25, while the trained reward has risen from "
        "0.5 to 0.9. There is no checkpoint from before: start again with a smaller --checkpointing_steps, and with "
        "a lower --lr or a larger KL penalty, or add a held-out reward (--eval_prompts, --eval_reward). If the "
        "trained reward should change motion, set --hacking_guard off",
    ),
    (
        lambda: describe_hacking("witness/motion", None, ("motion", "saturation")),
        "clips of the rollouts have collapsed in motion, saturation: motion has changed from 0.625 at "
        "the start to 0.25, the trained reward from 0.5 to 0.9. There is no checkpoint from before: start again with "
        "a smaller --checkpointing_steps, and with a lower --lr or a larger KL penalty, or add a held-out reward "
        "(--eval_prompts, --eval_reward)",
    ),
    (
        lambda: describe_hacking("kl", None),
        "the KL has grown from 0.625 at step 24 to 0.25, while the trained reward has hardly gained: 0.5, now 0.9. "
        "There is no checkpoint from before: start again with a smaller --checkpointing_steps, and with a lower --lr "
        "or a larger KL penalty, or measure a reward that is not trained (--eval_reward)",
    ),
    (
        lambda: suggest("training_step", batch_size=4, gradient_checkpointing=True),
        "--batch_size 1 --gradient_accumulation_steps 4 (the same gradient in smaller micro-batches)",
    ),
    (
        lambda: suggest("reward", enable_tiling=True),
        "smaller clips to score: --rollout_size",
    ),
    (
        load_other_averages,
        "DIR/ema.safetensors holds averages of other weights: 1 names are not in the network, e.g. other",
    ),
    (
        lambda directory: load_other_lora(directory, A=(4, 8)),
        "DIR/pytorch_lora_weights.safetensors does not fit this adapter: 1 names differ, e.g. 0.lora_B.weight",
    ),
    (
        lambda directory: load_other_lora(directory, A=(2, 8), B=(8, 2)),
        "DIR/pytorch_lora_weights.safetensors does not fit this adapter: 0.lora_A.weight is [2, 8] in the file, [4, 8] "
        "here; is it a LoRA of this model?",
    ),
]


def plan_demo_run(directory: Path, **options: Any) -> Any:
    """Check a run of the demo model on one image in `data`, beside it another folder."""
    from PIL import Image

    from finetrainers.plan.preflight import preflight

    for name in ("data", "pickled"):
        (directory / name).mkdir()
    Image.new("RGB", (64, 64)).save(directory / "data" / "a.png")
    (directory / "data" / "a.txt").write_text("a")
    for name in ("config.json", "w.bin"):
        (directory / "pickled" / name).touch()
    model = {"pretrained_model_name_or_path": "demo://ltx", "image_resolution_buckets": ["64x64"], "train_steps": 1}
    paths = {name: str(directory / options[name]) for name in ("init_from", "output_dir") if name in options}
    data = {"data_root": str(directory / "data"), "output_dir": str(directory / "run")}
    return preflight(load(**{**model, **data, **options, **paths}))


def find_lora_target(target: str) -> Any:
    """Look for a LoRA target in a network of one layer."""
    from torch import nn

    from finetrainers.plan.trainable import lora_targets

    return lora_targets(nn.ModuleDict({"to_q": nn.Linear(1, 1)}), [target])


def start_from_lora(**options: Any) -> Any:
    """Compare options with a LoRA file of rank 4."""
    from finetrainers.plan.initial_weights import check_lora

    shapes = {f"transformer.blocks.0.to_{name}.lora_A.weight": (4, 32) for name in "qk"}
    return check_lora(Path("a.safetensors"), shapes, {"lora_alpha": 8}, load(**options).training)


def resume_with_changes(*differences: tuple[str, str | None]) -> str:
    """Return the refusal to continue a run with these differences, each with the reset that allows it."""
    from finetrainers.plan.resume_plan import Change, _refusals

    changes = [Change(name, f"{name}: 1 then, 2 now", reset) for name, reset in differences]
    [error] = _refusals(Path("run/checkpoints/step-2"), changes, frozenset())
    return str(error)


def load_trained_pipeline(**options: Any) -> Any:
    """Load the pipeline of a run without weights."""
    from finetrainers.runs.training import TrainResult

    config = load(**options)
    return TrainResult(config, step=0, stopped_by=None if config.run.dry_run else "SIGINT").pipeline()


def swap_blocks_of_two(number: int) -> Any:
    """Swap blocks of a network that has two."""
    from finetrainers.plan.block_swap import check_number_of_blocks

    spec: Any = SimpleNamespace(block_modules=lambda _: [0, 0], transformer_on_meta=lambda: None)
    return check_number_of_blocks(load(blocks_to_swap=number), spec)


def check_offline_upload() -> Any:
    """Check the upload of a run, offline as in all tests."""
    from finetrainers.plan.check_upload import check_upload

    return check_upload(load(push_to_hub=True))


def train_second_stage() -> str:
    """Train from the second of two stages, which begins from the first, unfinished one."""
    from finetrainers.runs.stages import missing_before

    low: Any = SimpleNamespace(name="low", source=None, other=None, is_done=False)
    [problem] = missing_before([low, SimpleNamespace(name="mid", source=low, other=None, is_done=False)], "mid")
    return str(problem)


def overwrite_page(directory: Path) -> Any:
    """Write an HTML page over another file."""
    from finetrainers.plan.ownership import page_problem

    (directory / "a.html").write_text("mine")
    return page_problem(directory / "a.html")


def overwrite_export(directory: Path) -> Any:
    """Export a run into a folder that holds another file."""
    from finetrainers.plan.ownership import export_problem

    (directory / "mine.txt").touch()
    return export_problem(directory, trained="transformer", identity=None)


PLAN: list[Row] = [
    (
        lambda d: plan_demo_run(d, model_name="ltx_vide"),
        "1 problem with this configuration:\n  - --model_name: unknown model family 'ltx_vide'; did you mean "
        "'ltx_video'?",
    ),
    (
        lambda d: plan_demo_run(d, model_name="auto", pretrained_model_name_or_path="a/b"),
        "1 problem with this configuration:\n  - --model_name: is required: it cannot be detected from a config of "
        f"a/b on this disk; supported: {SUPPORTED}",
    ),
    (
        lambda d: plan_demo_run(d, method="stf"),
        "1 problem with this configuration:\n  - --method: unknown method 'stf'; did you mean 'sft'?",
    ),
    (
        lambda d: plan_demo_run(d, vae_id="./nowhere"),
        "1 problem with this configuration:\n  - --vae_id: directory not found: ./nowhere",
    ),
    (
        lambda d: plan_demo_run(d, output_dir="data"),
        "1 problem with this configuration:\n  - --output_dir: DIR/data is not the directory of a run: it holds "
        "a.png and a.txt; use a new or empty directory",
    ),
    (
        lambda d: plan_demo_run(d, validation_prompts="a", validation_images="b.png", init_from="no"),
        "2 problems with this configuration:\n  - --init_from: file or directory not found: DIR/no; use a "
        "checkpoint, a run directory, a diffusers directory, or a LoRA in safetensors (download a model of the Hub, "
        "or set it as --transformer_id)\n  - --validation_images: file not found: b.png",
    ),
    (
        lambda d: plan_demo_run(d, validation_prompts="a@@@1x64x64", validation_last_images=str(d / "data" / "a.png")),
        "1 problem with this configuration:\n  - --validation_last_images: the last frame is all that a sample of "
        "1 frames has; sample more",
    ),
    (
        lambda d: plan_demo_run(d, init_from="data"),
        "1 problem with this configuration:\n  - --init_from: DIR/data holds neither a transformer (transformer/ "
        "or config.json) nor pytorch_lora_weights.safetensors nor checkpoints/; it holds a.png, a.txt",
    ),
    (
        lambda d: plan_demo_run(d, init_from="pickled"),
        "1 problem with this configuration:\n  - --init_from: DIR/pickled has no safetensors files; pickles (.bin, "
        ".pt) are not loaded, convert them first",
    ),
    (
        lambda d: plan_demo_run(d, init_from="pickled/w.bin"),
        "1 problem with this configuration:\n  - --init_from: DIR/pickled/w.bin is a pickle, which is never "
        "loaded; convert it to safetensors first",
    ),
    (
        lambda d: plan_demo_run(d, init_from="data/a.txt"),
        "1 problem with this configuration:\n  - --init_from: DIR/data/a.txt is not a safetensors file; use weights "
        "in safetensors, a run directory, a checkpoint or a diffusers directory",
    ),
    (
        lambda: start_from_lora(rank=8, lora_alpha=8, target_modules=["to_q", "to_v"]),
        "a.safetensors does not fit this run's adapter: rank: 4 in the file, 8 in this run; target_modules: the "
        "file adapts 1 module that to_q to_v does not name, e.g. blocks.0.to_k; target_modules: to_v in this run, "
        "which the file does not adapt. Set the options as in the file",
    ),
    (
        lambda: resume_with_changes(("seed", "rng")),
        "cannot continue from run/checkpoints/step-2: seed: 1 then, 2 now (--reset rng). Restore these settings, "
        "or: --reset rng allows them",
    ),
    (
        lambda: resume_with_changes(("rank", None), ("optimizer", "optimizer"), ("seed", "rng")),
        "cannot continue from run/checkpoints/step-2: rank: 1 then, 2 now; optimizer: 1 then, 2 now (--reset "
        "optimizer); seed: 1 then, 2 now (--reset rng). Restore these settings, or: --reset optimizer rng allows the "
        "others; rank cannot be changed; a new run can start from the weights alone, if they fit, with --init_from",
    ),
    (
        lambda: find_lora_target("to_qq"),
        "1 problem with this configuration:\n  - --target_modules: 'to_qq' matches no layer; did you mean 'to_q'?",
    ),
    (
        lambda: find_lora_target("to_.*v"),
        "1 problem with this configuration:\n  - --target_modules: the expression 'to_.*v' matches no layer in "
        "full; names look like ['to_q']",
    ),
    (
        lambda: swap_blocks_of_two(3),
        "1 problem with this configuration:\n  - --blocks_to_swap: 3 of 2 blocks: must be at most 2; lower it",
    ),
    (
        check_offline_upload,
        "1 problem with this configuration:\n  - --push_to_hub: HF_HUB_OFFLINE is set; unset it, or remove it, and "
        "upload the results later with `hf upload`",
    ),
    (
        train_second_stage,
        "--from: stage low, which a later stage requires, is not finished; use --from low",
    ),
    (
        overwrite_page,
        "DIR/a.html exists, and was not written by this command; use another file, or remove it",
    ),
    (
        overwrite_export,
        "DIR also holds mine.txt, which would be lost; move it away, or set another --output_dir",
    ),
    (
        lambda: load_trained_pipeline(dry_run=True),
        "there are no trained weights in run: a dry run does not train",
    ),
    (
        lambda: load_trained_pipeline(),
        "there are no trained weights in run: stopped by SIGINT; resume it",
    ),
]


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
    (lambda: printed("trian"), "error: unknown command 'trian'; did you mean 'train'?\n"),
    (
        lambda: printed("generate"),
        "error: unknown command 'generate'; `sample RUN --prompts PROMPTS` generates clips with a run, a checkpoint, "
        "a LoRA or a model\n",
    ),
    (
        lambda: printed("train"),
        "error: 1 problem with this configuration:\n  - --pretrained_model_name_or_path: is required: Base model in "
        "diffusers layout: a Hub id, a local directory, or `demo://NAME`, a demo model. It provides configs, "
        "tokenizers and scheduler even if single files replace its weights.\nfinetrainers train --help lists the "
        "options. New here? finetrainers quickstart needs none.\n",
    ),
    (
        lambda folder: printed("check", "--config", folder / "run.toml", "--json", folder, "--jobs", "0"),
        "error: 3 problems with this configuration:\n  - --jobs: must be a whole number of at least 1, got '0'\n  - "
        "--json: DIR is a directory; give a file in it\n  - --config: file not found: DIR/run.toml\n",
    ),
    (
        lambda folder: printed(
            "estimate", folder / "x.toml", "--gpu", "h1000", "--num_processes", "3", "--num_machines", "2"
        ),
        "error: 3 problems with this configuration:\n  - --gpu: expected a memory size such as 24GB or a card such "
        "as h100, got 'h1000'; did you mean 'h100'?\n  - --num_processes: 3 processes do not divide among 2 "
        "machines; use a multiple\n  - --config: file not found: DIR/x.toml\n",
    ),
    (
        lambda folder: printed("search-batch", folder / "x.toml", "--gpu", "24XB", "--margin", "95", "--estimate_onyl"),
        "error: 4 problems with this configuration:\n  - --gpu: expected a memory size such as 24GB or a card such "
        "as h100, got '24XB'\n  - --margin: must be a percentage from 0 to 89, got '95'\n  - --estimate_onyl: "
        "unknown flag; did you mean --estimate_only?\n  - --config: file not found: DIR/x.toml\n",
    ),
    (
        lambda: printed("export"),
        "error: 2 problems with this command:\n  - SOURCE: is required: a run's --output_dir, a checkpoint, or a "
        "LoRA in safetensors\n  - --format: is required: one or more of diffusers comfyui kohya peft "
        "merged\nfinetrainers export --help lists the options\n",
    ),
    (
        lambda folder: printed("report", folder, "--output", folder / "page.pdf"),
        "error: 2 problems with this command:\n  - RUN: DIR is not a run directory: it has none of metrics.jsonl, "
        "events.jsonl, config.toml\n  - --output: DIR/page.pdf is not the name of an HTML page; use a name that ends "
        "in .html, or an existing directory\n",
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
        "error: 2 problems with this command:\n  - prune: requires --keep CONFIG ..., --older_than DAYS, or both\n  "
        "- DIR: DIR holds no cache; use the --precompute_dir or the --output_dir of a run\n",
    ),
    (
        lambda: printed("doctor", "--python", "python3", "--every", "5", "--disk_mib", "1"),
        "error: 2 problems with this command:\n  - --python: requires --hosts\n  - --disk_mib: cannot be combined "
        "with --every, which does not measure the disk; remove it\n",
    ),
    (
        lambda folder: hosts(folder, "-oProxyCommand=x\na slots=x\nb\nb\n"),
        "3 problems with this configuration:\n  - DIR/hosts:1: '-oProxyCommand=x' is not a host name\n  - "
        "DIR/hosts:2: cannot parse 'a slots=x'; write `host` or `host slots=8`\n  - DIR/hosts:4: duplicate host b",
    ),
    (
        lambda folder: hosts(folder, "# none"),
        "1 problem with this configuration:\n  - --hosts: DIR/hosts names no host; write one per line",
    ),
    (
        lambda folder: sync(folder, "host:x"),
        "RUN: DIR has neither config.toml nor checkpoints/; use a run's --output_dir",
    ),
    (
        lambda: printed("run"),
        "error: 1 problem with this command:\n  - FILE: is required: a TOML file of stages\nfinetrainers run --help "
        "shows an example\n",
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
        "error: 2 problems with this command:\n  - --look: unknown value 'stripped'; did you mean 'striped'?\n  - "
        "--model: unknown demo model 'demo://lxt'; did you mean 'demo://ltx'?\n",
    ),
    (
        lambda folder: printed("tiny", "ltx_vido", folder / "tiny"),
        "error: 1 problem with this command:\n  - family: unknown model family 'ltx_vido'; did you mean 'ltx_video'?\n",
    ),
    (
        lambda: printed("serve-reward", "brightness=0.5", "--port", "0"),
        "error: 1 problem with this command:\n  - reward: set weight where the reward is used, not where it is "
        "served\n",
    ),
    (
        lambda: printed("serve-reward", "brightness,device=cpu", "--device", "cuda:7"),
        "error: 1 problem with this command:\n  - --device: cuda:7, but the reward has device=cpu\n",
    ),
]


def plan_clips(*names: str, **options: Any) -> Any:
    """Plan the samples of models with these options of the command."""
    from finetrainers.config.given import RawOptions
    from finetrainers.config.sample import SampleSection
    from finetrainers.sampling.plan import plan_samples

    return plan_samples(names, SampleSection.model_validate(options), RawOptions())


def find_weights(given: str | Path) -> Any:
    """Find the weights to export at a path."""
    from finetrainers.results.export_formats import find_source

    return find_source(str(given), options={})


def export_problems(folder: Path, weights_format: str) -> str:
    """Return the problem with an export of the result of full finetuning."""
    from finetrainers.results.export_formats import result_source, source_problems

    (folder / "diffusers").mkdir()
    source = result_source(load(training_type="full-finetune"), folder)
    return "\n".join(map(str, source_problems(source, [weights_format], folder, overwrite=False)))


def watch_run(run: Path) -> Any:
    """Plan a watch of a run."""
    from finetrainers.config.given import RawOptions
    from finetrainers.config.watch import WatchSection
    from finetrainers.sampling.watch.plan import plan_watch

    return plan_watch(run, WatchSection(), RawOptions())


def watch_on_device(device: str) -> None:
    """Choose the device of a watch."""
    from finetrainers.sampling.watch.plan import use_device

    use_device(device)


def plot_curves(run: Path, records: str | None = None) -> Any:
    """Plot the curves of a run with these records."""
    from finetrainers.draw.curves import plot_run

    if records is not None:
        (run / "metrics.jsonl").write_text(records)
    return plot_run(run)


def plan_for_gpu(text: str) -> Any:
    """Read the GPU to plan for."""
    from finetrainers.utils.gpus import read_gpu

    return read_gpu(text)


def launch_with(**environment: str) -> str:
    """Return the problems with the environment variables of a launcher."""
    from finetrainers.utils.launch import launch_problems

    return "\n".join(f"{name} {message}" for name, message, _ in launch_problems(environment))


def read_launcher_file(folder: Path, content: str) -> Any:
    """Read a configuration file of `accelerate launch`."""
    from finetrainers.utils.launch import launcher_environment

    (folder / "launch.yaml").write_text(content)
    return launcher_environment(folder / "launch.yaml")


def inject_fault(text: str) -> Any:
    """Read the faults to inject."""
    from finetrainers.utils.faults import parse_faults

    return parse_faults(text)


def read_tensors(folder: Path, content: bytes) -> Any:
    """Read the header of a safetensors file."""
    from finetrainers.utils.headers import read_header

    (folder / "lora.safetensors").write_bytes(content)
    return read_header(folder / "lora.safetensors")


def describe_failure(error: Exception) -> str | None:
    """Return what a command prints for an error."""
    from finetrainers.utils.failures import user_message

    return user_message(error)


def require_library(requirement: str) -> str | None:
    """Return the problem with the version of an installed library."""
    from finetrainers.utils.versions import version_problem

    return version_problem([requirement])


RESULTS: list[Row] = [
    (
        lambda: plan_clips("demo://ltx"),
        "1 problem with this configuration:\n  - --prompts: no prompts are set, and no run with validation prompts; "
        "set --prompts FILE or TEXT",
    ),
    (
        lambda: plan_clips("demo://ltx", prompts="a cat"),
        "1 problem with this configuration:\n  - --size: is unknown; set it as FRAMESxHEIGHTxWIDTH, for example "
        "49x512x768",
    ),
    (
        lambda: plan_clips(
            "demo://ltx",
            prompts="a cat@@@9x64x64",
            lora_scale=[0.5],
            compare="base",
            negative_prompt="a dog",
            guidance_scale=1.0,
        ),
        "3 problems with this configuration:\n  - --negative_prompt: has no effect: the guidance scale is 1, so no "
        "second prompt is sampled; remove it\n  - --lora_scale: has no effect without a LoRA; remove it\n  - "
        "--compare: is already sampled; remove it",
    ),
    (
        lambda: plan_clips("demo://ltxx"),
        "1 problem with this configuration:\n  - TARGET: unknown demo model 'demo://ltxx'; did you mean 'demo://ltx'?",
    ),
    (
        lambda folder: find_weights(folder / "runs"),
        "1 problem with this configuration:\n  - SOURCE: does not exist: there is no 'runs' in 'DIR'; use a run "
        "directory, a checkpoint, a LoRA in safetensors, or a model (a directory, a Hub id or demo://NAME)",
    ),
    (
        lambda: find_weights("demo://ltx"),
        "1 problem with this configuration:\n  - SOURCE: demo://ltx is a model without training; use a run, a "
        "checkpoint or a LoRA in safetensors",
    ),
    (
        lambda folder: export_problems(folder, "peft"),
        "--format: peft: it holds a LoRA, and these are full weights; use diffusers or comfyui",
    ),
    (lambda folder: export_problems(folder, "diffusers"), "--format: DIR/diffusers exists; --overwrite replaces it"),
    (watch_run, "1 problem with this configuration:\n  - RUN: DIR has no config.toml; use a run's --output_dir"),
    (
        lambda: watch_on_device("gpu"),
        "1 problem with this configuration:\n  - --device: must be cpu or cuda:N, got 'gpu'",
    ),
    (plot_curves, "DIR is not a run directory: it holds no metrics.jsonl"),
    (lambda folder: plot_curves(folder, ""), "DIR/metrics.jsonl has no records to draw yet"),
    (
        lambda: plan_for_gpu("h1000"),
        "expected a memory size such as 24GB or a card such as h100, got 'h1000'; did you mean 'h100'?",
    ),
    (lambda: plan_for_gpu("a100"), "'a100' is sold in several sizes; use a100-40gb or a100-80gb"),
    (
        lambda: launch_with(WORLD_SIZE="0"),
        "WORLD_SIZE must be a whole number of at least 1, got '0'; unset it, or launch again",
    ),
    (lambda: launch_with(RANK="1"), "RANK 1 must be below 1 (WORLD_SIZE)"),
    (
        lambda: launch_with(LOCAL_RANK="0", ACCELERATE_MIXED_PRECISION="fp8"),
        "LOCAL_RANK is set, so a launcher started this process, but WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT is "
        "not set; start it by `accelerate launch` or `torchrun`, or unset LOCAL_RANK\nACCELERATE_MIXED_PRECISION "
        "must be one of no, fp16, bf16, got 'fp8'; it is set in the launcher's file",
    ),
    (
        lambda folder: read_launcher_file(folder, "- a list"),
        "DIR/launch.yaml is not a config file of `accelerate launch`",
    ),
    (
        lambda folder: read_launcher_file(folder, "num_processes: no"),
        "num_processes must be a whole number of at least 1, got False",
    ),
    (
        lambda: inject_fault("nan@save"),
        "'nan@save': no value to replace by NaN at save; nan requires loss, backward, reward",
    ),
    (
        lambda folder: read_tensors(folder, b"version https://git-lfs"),
        "DIR/lora.safetensors is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`",
    ),
    (
        lambda folder: read_tensors(folder, (100).to_bytes(8, "little") + b"{"),
        "DIR/lora.safetensors is truncated: at least 99 B are missing; copy or download it again",
    ),
    (
        lambda: describe_failure(OSError(28, "No space left on device", "clip.mp4")),
        "No space left on device: clip.mp4. Earlier checkpoints are intact: free up space, and continue with "
        "--resume_from_checkpoint latest",
    ),
    (
        lambda: describe_failure(
            RuntimeError("[/a/gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.77.0.2]:24")
        ),
        "another process of the run has ended: see its own output for the reason (Connection closed by peer "
        "[10.77.0.2]:24). Checkpoints are intact: start the command on all machines again, and with "
        "--resume_from_checkpoint auto it continues from the newest one",
    ),
    (
        lambda: require_library("no-such-library>=2"),
        "no-such-library is not installed; run: pip install 'no-such-library>=2'",
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
