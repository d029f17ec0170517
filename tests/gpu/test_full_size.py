"""Every published network at its full size with random weights: two training steps, and their peak against the plan.

With `FINETRAINERS_GPU_RESULTS=file.md`, each measured peak is added to that file as a row of a table. Without a GPU,
the same code runs with the same options on the tiny networks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published_networks import NETWORKS, Network, published_repository
from torch import Tensor, nn

from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.data.inspect.batch_counts import BatchCounts
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.engine.init_distributed import make_strategy
from finetrainers.engine.memory_recorder import MemoryRecorder
from finetrainers.engine.preflight import Preflight
from finetrainers.engine.resume_plan import new_run
from finetrainers.engine.run_dir import RunDirectory
from finetrainers.engine.state import TrainState
from finetrainers.engine.trainable import attach, load_trainable_transformer, trainable_dtype, trainable_parameters
from finetrainers.engine.trainer import Trainer
from finetrainers.engine.watchdog import Watchdog
from finetrainers.memory.estimate import GIB, estimate_for
from finetrainers.methods.base import MethodParts, Step
from finetrainers.methods.sft import SFT
from finetrainers.models import common
from finetrainers.models.registry import get_family
from finetrainers.models.spec import Batch, Conditions, VAEStats, VideoMeta
from finetrainers.optim.factory import create_optimizer
from finetrainers.utils.process_state import free_memory

RESULTS = "FINETRAINERS_GPU_RESULTS"
#: The plan leaves out the CUDA context and fragmentation.
HEADROOM = 1.15
_STEPS = 2  # optimizer state is made by the first step, so the second one has the peak


LORA = {"training_type": "lora", "rank": 64, "optimizer": "adamw"}
FULL = {"training_type": "full-finetune", "optimizer": "adamw"}
#: Two bytes a weight, two a gradient and two of state: the only way for 13 billion weights on one GPU.
FULL_ROUNDED = {
    "training_type": "full-finetune", "optimizer": "adamw-torchao-8bit", "master_weights": "stochastic_rounding",
}  # fmt: skip
RUNS = [
    pytest.param(name, options, id=f"{name}-{options['training_type']}")
    for name in NETWORKS
    for options in (LORA, FULL_ROUNDED if name == "HunyuanVideo" else FULL)
]

TinyRepo = Callable[..., Path]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("name", "options"), RUNS)
def test_full_size(
    name: str, options: dict[str, Any], tiny_repo: TinyRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = NETWORKS[name]
    _skip_without_library(options)
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path / "model", network.config)
    peak, planned = train_random(network, network.text, repo, network.bucket, options, monkeypatch)
    report = f"{name} {options['training_type']}: peak {peak:.1f} GiB, planned {planned:.1f} GiB"
    print(report)
    _append(name, network, options, peak=peak, planned=planned)
    assert planned / 2 < peak < 2 * planned, report


@pytest.mark.parametrize(("name", "options"), RUNS)
def test_same_code_at_tiny_size(
    name: str, options: dict[str, Any], tiny_repo: TinyRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = NETWORKS[name]
    _skip_without_library(options)
    source = tiny_repo(network.family, **network.tiny)
    config = json.loads((source / "transformer" / "config.json").read_text(encoding="utf-8"))
    repo = published_repository(source, tmp_path / "model", config)
    text = {condition: _narrowed(shape, config) for condition, shape in network.text.items()}
    with torch.compiler.set_stance("force_eager"):  # torchao compiles each size of matrix, for minutes on a CPU
        peak, planned = train_random(network, text, repo, (9, 64, 64), options, monkeypatch)
    assert (peak > 0.0) == torch.cuda.is_available()  # without a GPU nothing is measured
    assert planned > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_configs_are_those_of_the_published_networks(name: str, tiny_repo: TinyRepo, tmp_path: Path) -> None:
    network = NETWORKS[name]
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path / "model", network.config)
    transformer = (
        get_family(network.family).load(_config(network, repo, (49, 64, 64), LORA).model).transformer_on_meta()
    )
    assert sum(p.numel() for p in transformer.parameters()) == network.num_parameters
    assert {key: transformer.config[key] for key in network.config} == network.config


# ---- the run that both tests make ------------------------------------------------------------------------------


def train_random(
    network: Network,
    text: dict[str, tuple[int, ...]],
    repo: Path,
    bucket: tuple[int, int, int],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[float, float]:
    """Train randomly initialized weights on random latents; the measured peak (0 without CUDA) and the planned, GiB."""
    config = _config(network, repo, bucket, options)
    family = get_family(network.family)
    geometry = family.facts_of(config.model).geometry
    spec = family.load(config.model)
    parallel = make_strategy(config)
    device = parallel.device
    plan = DatasetPlan((), (), (), (), (), (), (), BatchCounts({}, (), (), False), "")
    checked = Preflight(config, family, geometry, [], plan, new_run(config, plan, initial=None, data_size=1))
    if device.type == "cuda":
        _skip_if_too_large(checked, bucket)
        free_memory()  # of the test before

    monkeypatch.setattr(
        common,
        "load_network",
        lambda cls, model, part, arguments, **_: _random(cls, model, part, arguments["torch_dtype"], device),
    )
    transformer = load_trainable_transformer(checked, spec, trainable_dtype(config))
    planned = estimate_for(config, geometry, transformer, spec=spec, bucket=bucket).total
    scheduler = spec.load_scheduler()
    process = spec.process(scheduler)
    batch = _batch(text, geometry.latent_shape(*bucket), channels=transformer.config.out_channels, device=device)
    method = SFT(
        MethodParts(
            config=config, spec=spec, process=process, scheduler=scheduler, geometry=geometry,
            vae_stats=VAEStats(mean=torch.tensor(0.0), scale=torch.tensor(1.0)), first_frame_p=0.0, source=None,
            parallel=parallel, network=transformer, weights_dtype=trainable_dtype(config),
        )
    )  # fmt: skip
    wrapped, optimizer = parallel.prepare(
        lambda: transformer,
        lambda parameters: create_optimizer(
            parameters,
            config=config.optimizer,
            lr=config.optimizer.lr,
            device_type=device.type,
            stochastic_rounding=config.training.master_weights == "stochastic_rounding",
        ),
    )
    state = TrainState(
        config=config, spec=spec, method=method, parallel=parallel, transformer=wrapped, optimizer=optimizer,
        total_steps=_STEPS, run_dir=RunDirectory(repo, writes=False), checkpoint_fields={},
        watchdog=Watchdog.of_run(config.run, rank=0), memory=MemoryRecorder(device),
    )  # fmt: skip
    trainer = Trainer(state, lr_at=lambda step: config.optimizer.lr)
    wrapped.train()
    # The start of every matrix, since copies of all weights would not fit. A LoRA's A cannot move while B is zero.
    watched = {n: p for n, p in trainable_parameters(transformer).items() if p.ndim > 1 and "lora_A" not in n}
    before = {n: p.detach().flatten()[:4096].clone() for n, p in watched.items()}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(_STEPS):
        metrics = trainer.train_step(Step([batch]))
        assert math.isfinite(metrics["loss"])
        assert 0 < metrics["grad_norm"] < math.inf
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0

    unchanged = [n for n, p in watched.items() if torch.equal(p.detach().flatten()[:4096], before[n])]
    assert not unchanged, f"{len(unchanged)} of {len(watched)} matrices did not change, e.g. {unchanged[:3]}"
    assert all(p.isfinite().all() for p in watched.values())
    parallel.close()
    return peak, planned


def _config(network: Network, repo: Path, bucket: tuple[int, int, int], options: dict[str, Any]) -> TrainConfig:
    return load_config(
        model_name=network.family,
        pretrained_model_name_or_path=str(repo),
        data_root=str(repo),
        video_resolution_buckets=["x".join(map(str, bucket))],
        gradient_checkpointing=True,
        train_steps=_STEPS,
        lr=1e-3,
        **options,
    )


def _random(cls: Any, model: Any, part: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The configured transformer with its class's own initialization, made where and as it is used."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            return cls.from_config(common.load_part(cls.load_config, model, part)).to(dtype)
    finally:
        torch.set_default_dtype(default)


def _batch(
    text: dict[str, tuple[int, ...]], latent: tuple[int, int, int], *, channels: int, device: torch.device
) -> Batch:
    """One clip of random moments, with text of which a third is padding."""
    draw = torch.Generator().manual_seed(1)

    def condition(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("mask"):
            return torch.arange(shape[0])[None] < 2 * shape[0] // 3
        return torch.randn(1, *shape, generator=draw).bfloat16()

    moments = torch.randn(1, 2 * channels, *latent, generator=draw)
    return Batch(
        moments=moments.to(device),
        conditions=Conditions({name: condition(name, shape) for name, shape in text.items()}).to(device),
        meta=VideoMeta(fps=torch.tensor([24.0], device=device)),
        sample_keys=[(0, 0)],
    )


def _narrowed(shape: tuple[int, ...], config: dict[str, Any]) -> tuple[int, ...]:
    """A condition's shape with the widths of a tiny network."""
    width = config.get("text_embed_dim") or config.get("caption_channels")
    return tuple({4096: width, 768: config.get("pooled_projection_dim")}.get(size, size) for size in shape)


def _skip_without_library(options: dict[str, Any]) -> None:
    """Skip, saying so, where the optimizer's package is not installed."""
    if "torchao" in options["optimizer"]:
        pytest.importorskip("torchao")


def _skip_if_too_large(checked: Preflight, bucket: tuple[int, int, int]) -> None:
    """Skip, saying so, where the plan does not fit the GPU."""
    transformer = checked.family.load(checked.config.model).transformer_on_meta()
    attach(transformer, checked.config.training)
    need = (
        HEADROOM
        * estimate_for(
            checked.config, checked.geometry, transformer, spec=checked.family.load(checked.config.model), bucket=bucket
        ).total
    )
    have = torch.cuda.get_device_properties(0).total_memory / GIB
    if need > have:
        pytest.skip(f"needs about {need:.0f} GiB, {torch.cuda.get_device_name(0)} has {have:.0f} GiB")


def _append(name: str, network: Network, options: dict[str, Any], *, peak: float, planned: float) -> None:
    """Add a row to the results file, if one is asked for."""
    if not os.environ.get(RESULTS):
        return
    path = Path(os.environ[RESULTS])
    new = not path.is_file()
    with path.open("a", encoding="utf-8") as file:
        if new:
            file.write(
                "| network | training | optimizer | size | peak GiB | planned GiB | error | GPU |\n"
                + "|---" * 8
                + "|\n"
            )
        rank = f" r{options['rank']}" if "rank" in options else ""
        weights = ", stochastic rounding" if options.get("master_weights") == "stochastic_rounding" else ""
        file.write(
            f"| {name} | {options['training_type']}{rank}{weights} | {options['optimizer']} "
            f"| {'x'.join(map(str, network.bucket))} | {peak:.1f} | {planned:.1f} | {planned / peak - 1:+.0%} "
            f"| {torch.cuda.get_device_name(0)} |\n"
        )
