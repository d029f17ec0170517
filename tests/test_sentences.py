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


CONFIG: list[Row] = [
    (lambda: load(rnk=8), "1 problem with this configuration:\n  - rnk: unknown option 'rnk'; did you mean 'rank'?"),
]
DATA: list[Row] = []
REWARDS_AND_METHODS: list[Row] = []


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
        "1 problem with this configuration:\n  - --model_name: unknown model family 'ltx'; did you mean 'ltx_video'?",
    ),
    (
        lambda: family(model_name="mochi"),
        "1 problem with this configuration:\n"
        "  - --model_name: model family 'mochi' is not supported; supported: cogvideox, hunyuan_video, "
        "ltx_video",
    ),
    (
        lambda directory: family(model_name="auto", pretrained_model_name_or_path=str(directory)),
        "1 problem with this configuration:\n"
        "  - --model_name: is not given, and no config of DIR on this disk tells it; supported: "
        "cogvideox, hunyuan_video, ltx_video",
    ),
    (
        lambda directory: part(directory, "vae", file="transformer/config.json"),
        "--pretrained_model_name_or_path: DIR has no folder 'vae', so it is no model in diffusers layout "
        "(it holds: transformer)",
    ),
    (
        lambda directory: part(directory, "vae", "[1]", file="vae/config.json"),
        "--pretrained_model_name_or_path: DIR/vae/config.json must be a JSON object, and it is a list\n"
        "--pretrained_model_name_or_path: DIR/vae has no diffusion_pytorch_model.safetensors; it holds: "
        "config.json",
    ),
    (
        lambda directory: part(directory, "transformer", "version https://git-lfs.github.com/spec/v1"),
        "--transformer_id: DIR/a.safetensors is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`",
    ),
    (
        lambda directory: part(directory, "transformer", b"GGUF", file="a.gguf"),
        "--transformer_id: DIR/a.gguf holds quantized weights (GGUF), and these are not read; give the "
        "unquantized ones, which --quantize_frozen int8, fp8 or nf4 quantizes while they are loaded",
    ),
    (
        lambda directory: part(directory, "vae"),
        "--vae_id: no such file: DIR/a.safetensors",
    ),
    (
        lambda: network_file(proj_in=(4, 3), proj_ou=(2, 4)),
        "FILE lacks 1 tensor: proj_out (it has proj_ou)\n"
        "proj_in in FILE has shape (4, 3), and the config asks for (4, 2)",
    ),
    (
        lambda: hub("OfflineModeIsEnabled"),
        "It is not on this disk, and the hub cannot be reached: download it first where there is a "
        "connection (`hf download someone/model`), into the same cache (HF_HOME, or --cache_dir).",
    ),
    (
        lambda: lora(a__lora_A__weight=(4, 2)),
        "only one of two factors of 1 layer: a",
    ),
    (
        lambda: lora(a__lokr_w1=(4, 2)),
        "1 tensor of no known meaning: a.lokr_w1",
    ),
    (
        lambda: optimizer(optimizer="lion", use_8bit_bnb=True),
        "--use_8bit_bnb: use_8bit_bnb works with optimizer adam or adamw, got 'lion'; drop use_8bit_bnb "
        "or choose one of those",
    ),
    (
        lambda: optimizer(optimizer="muon", training_type="full-finetune", beta3=0.9),
        "--beta3: 0.9 is no parameter of optimizer muon; remove it or use one of prodigy, came\n"
        "--optimizer: muon updates matrices only, and full-finetune also trains biases and norms; use "
        "--training_type lora or another optimizer",
    ),
    (
        lambda: optimizer("cpu", optimizer="came", use_cpu_offload_optimizer=True),
        "--use_cpu_offload_optimizer: needs a CUDA or XPU device, and this run is on cpu; drop it\n"
        "--use_cpu_offload_optimizer: works with plain adam or adamw, got --optimizer came\n"
        "--use_cpu_offload_optimizer: copies gradients to the host as backward makes them, before their "
        "norm is known, so --max_grad_norm 1 cannot clip them; use --max_grad_norm 0",
    ),
    (
        lambda: optimizer(lr=0.02, lr_scheduler="cosine", train_steps=500),
        "--lr 0.02 is far above what finetuning uses, 1e-6 to 1e-3; weights may be ruined within a few "
        "steps\n"
        "--lr_warmup_steps 500 is not below --train_steps 500: the learning rate never reaches --lr",
    ),
    (
        lambda: split(fsdp="full", fsdp_group_size=2),
        "1 problem with this configuration:\n"
        "  - --fsdp_group_size: groups are for --fsdp hybrid; `full` splits over all processes",
    ),
    (
        lambda: launch(deepspeed=True),
        "1 problem with this configuration:\n"
        "  - --deepspeed: needs a launcher, for one process too: deepspeed, torchrun, or accelerate launch",
    ),
    (
        lambda: noise(4.0, 1.0, 0.7, 0.4),
        "sampler 'dance' with eta 4 adds noise of std 2.191 at step 1 of 3 (noise level 1 to 0.7); "
        "latents have a std of about 1, so at most 2 makes sense: use a lower --eta, another --sampler, "
        "or more --sampling_steps",
    ),
    (
        lambda: shifts(flow_base_seq_len=4096),
        "--flow_max_seq_len 4096 must be above --flow_base_seq_len 4096 (what is not given comes from "
        "the checkpoint's scheduler, else 256 and 4096)",
    ),
    (
        checkpointing,
        "Linear does not support gradient checkpointing; use activation_memory none",
    ),
]
PLAN: list[Row] = []
TRAINING: list[Row] = []
RESULTS: list[Row] = []
COMMANDS: list[Row] = []

ALL = [*CONFIG, *DATA, *REWARDS_AND_METHODS, *MODELS, *PLAN, *TRAINING, *RESULTS, *COMMANDS]


@pytest.mark.parametrize("row", ALL, ids=range(len(ALL)))
def test_sentence(row: Row, tmp_path: Path) -> None:
    call, sentence = row
    try:
        message = call(tmp_path) if inspect.signature(call).parameters else call()
    except Exception as error:
        message = str(error)
    assert message.replace(str(tmp_path), "DIR") == sentence
