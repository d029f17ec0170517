"""Full-size networks with random weights: the estimate of a training step, its count, and what a GPU measures.

    python benchmarks/memory.py                    # every case that fits the GPU; again: those that are not done
    python benchmarks/memory.py --only cogvideox   # cases with this in their name
    python benchmarks/memory.py --count            # counts on fake tensors too, a minute of CPU more
    python benchmarks/memory.py --tiny             # the same code on tiny networks, without a GPU

Each case is a process of its own, which trains three steps or more on random latents. What it measured is written to a
file (`--results`), from which a later command continues. No new case begins after `--minutes`. Without a GPU nothing is
measured, and the columns stay empty.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from published_networks import NETWORKS, Network, published_repository  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from finetrainers.config.errors import ConfigError  # noqa: E402
from finetrainers.config.load import load_config  # noqa: E402
from finetrainers.config.root import TrainConfig  # noqa: E402
from finetrainers.data.inspect.batch_counts import BatchCounts  # noqa: E402
from finetrainers.data.inspect.plan import DatasetPlan  # noqa: E402
from finetrainers.memory.count import StepShape, count_step  # noqa: E402
from finetrainers.memory.estimate import GIB, estimate_for, optimizer_state_bytes  # noqa: E402
from finetrainers.memory.recorder import MemoryRecorder  # noqa: E402
from finetrainers.methods.base import MethodParts, Step  # noqa: E402
from finetrainers.methods.sft import SFT  # noqa: E402
from finetrainers.models import common  # noqa: E402
from finetrainers.models.registry import build_tiny, get_family  # noqa: E402
from finetrainers.models.spec import Batch, PromptEmbeds, VAEStats, VideoMeta  # noqa: E402
from finetrainers.optim.factory import create_optimizer  # noqa: E402
from finetrainers.optim.schedules import Schedule  # noqa: E402
from finetrainers.plan.block_swap import block_swap  # noqa: E402
from finetrainers.plan.init_distributed import make_strategy  # noqa: E402
from finetrainers.plan.preflight import ResolvedRun  # noqa: E402
from finetrainers.plan.resume_plan import new_run  # noqa: E402
from finetrainers.plan.throughput import attach_flop_meter, peak_flops  # noqa: E402
from finetrainers.plan.trainable import make_trainable, trainable_dtype, trainable_parameters  # noqa: E402
from finetrainers.rundir.run_dir import RunDirectory  # noqa: E402
from finetrainers.training.state import TrainState  # noqa: E402
from finetrainers.training.trained_weights import load_trainable_transformer  # noqa: E402
from finetrainers.training.trainer import Trainer  # noqa: E402
from finetrainers.training.watchdog import Watchdog  # noqa: E402
from finetrainers.utils.logs import quiet_progress_bars  # noqa: E402
from finetrainers.utils.process_state import free_memory  # noqa: E402

#: Least and most steps of a case. Those after the second are timed, until they took enough seconds: the first makes the
#: optimizer's state, and kernels are chosen in both.
STEPS, MOST_STEPS, TIMED_S = 3, 20, 4.0
NO_GPU = "no GPU"
#: Entries of configs with a width of texts; of equal ones the first counts.
_TEXT_WIDTHS = (
    "text_embed_dim", "text_embed_2_dim", "image_embed_dim", "caption_channels", "text_dim", "in_text_dim",
    "in_text_dim2", "pooled_projection_dim", "cross_attention_dim",
)  # fmt: skip
Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A run to measure.

    Attributes:
        network: its name in `NETWORKS`.
        options: of the run, besides gradient checkpointing, which all have unless they say otherwise.
        size: frames, height, width; default: the network's.
        card_gb: memory of the GPU that it is to fit, in GB; 0: any.
        published: peak of the seed's tables, in GiB reserved.
    """

    network: str
    options: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, int, int] | None = None
    card_gb: float = 0.0
    published: float | None = None


_LORA = {"training_type": "lora", "rank": 64, "lora_alpha": 64, "optimizer": "adamw"}
_FULL = {"training_type": "full-finetune", "optimizer": "adamw"}
_FULL_8BIT = {**_FULL, "optimizer": "adamw-torchao-8bit", "master_weights": "stochastic_rounding"}
_OFFLOADED = {**_FULL, "use_cpu_offload_optimizer": True, "offload_gradients": True, "max_grad_norm": 0.0}
#: Two bytes a weight, two a gradient and one of state: the only way for 13 billion weights on one GPU of 80 GB.
_FULL_4BIT = {**_FULL, "optimizer": "adamw-torchao-4bit", "master_weights": "stochastic_rounding"}
_PLAIN = {"gradient_checkpointing": False}
CASES: dict[str, Case] = {
    "ltx-lora": Case("LTX-Video", _LORA),
    "ltx-full": Case("LTX-Video", _FULL),
    "cogvideox-2b-lora-plain": Case("CogVideoX-2b", {**_LORA, **_PLAIN}, published=44.314),
    "cogvideox-2b-lora-batch-4": Case("CogVideoX-2b", {**_LORA, "batch_size": 4}, published=22.254),
    "cogvideox-5b-lora": Case("CogVideoX-5b", _LORA, published=20.818),
    "cogvideox-5b-lora-batch-4": Case("CogVideoX-5b", {**_LORA, "batch_size": 4}, published=47.805),
    "cogvideox-2b-full": Case("CogVideoX-2b", {**_FULL, "master_weights": "stochastic_rounding"}, published=33.934),
    "cogvideox-5b-full-8bit": Case("CogVideoX-5b", _FULL_8BIT, card_gb=80, published=52.826),
    "cogvideox-5b-full-offload": Case("CogVideoX-5b", _OFFLOADED, card_gb=80),
    "hunyuan-lora": Case("HunyuanVideo", _LORA),
    "hunyuan-lora-24gb": Case("HunyuanVideo", {**_LORA, "blocks_to_swap": 60}, (49, 544, 960), 24),
    "hunyuan-lora-int8-24gb": Case(
        "HunyuanVideo", {**_LORA, "quantize_frozen": "int8", "blocks_to_swap": 60}, (49, 544, 960), 24
    ),
    "hunyuan-lora-720p-80gb": Case("HunyuanVideo", {**_LORA, "blocks_to_swap": 60}, (129, 720, 1280), 80),
    "hunyuan-full-80gb": Case("HunyuanVideo", _FULL_4BIT, card_gb=80),
}


class StepTimer:
    """A case made ready: configuration, description of the network, and where its files are."""

    def __init__(self, case: Case, folder: Path, *, tiny: bool) -> None:
        network = NETWORKS[case.network]
        source = folder / "tiny"
        build_tiny(network.family, source, **network.tiny)
        config = network.config
        self.text, self.size = network.text, case.size or network.bucket
        changes = dict(case.options)
        if tiny:
            config = json.loads((source / "transformer" / "config.json").read_text(encoding="utf-8"))
            self.text, self.size = narrowed(network, config), (9, 64, 64)
            if changes.get("blocks_to_swap"):
                changes["blocks_to_swap"] = min(4, config["num_layers"] + config.get("num_single_layers", 0))
        config = _config(network, published_repository(source, folder / "model", config), self.size, changes)
        self.family = get_family(network.family)
        facts, self.spec = self.family.facts_of(config.model), self.family.load(config.model)
        self.geometry, targets = facts.geometry, {"target_modules": [*facts.lora_targets]}
        self.config = config.with_values(targets) if config.training.training_type == "lora" else config

    def on_meta(self) -> nn.Module:
        """The network without weights, with its adapter."""
        transformer = self.spec.transformer_on_meta()
        make_trainable(transformer, self.config.training)
        return transformer

    def planned(self) -> float:
        """The estimate's peak of a step, in GiB."""
        return estimate_for(
            self.config, self.geometry, self.on_meta(), spec=self.spec, bucket=self.size,
            batch_size=self.config.dataloader.batch_size,
        ).total  # fmt: skip

    def counted(self) -> float | None:
        """The peak counted on fake tensors, in GiB; None where weights are quantized, or what is on the host is not
        counted."""
        config, network = self.config, self.on_meta()
        memory, optimizer = config.memory, config.optimizer
        if memory.quantize_frozen != "none" or memory.layerwise_upcasting_modules:
            return None
        rounds = config.training.master_weights == "stochastic_rounding"
        shape = StepShape(
            (network.config.out_channels, *self.geometry.denoised_shape(*self.size)),  # type: ignore[union-attr, arg-type]
            config.dataloader.batch_size, memory.stored, memory.selective_checkpointing,
            trained=torch.bfloat16 if rounds else torch.float32, gradients_stay=not optimizer.offload_gradients,
            blocks_to_swap=memory.blocks_to_swap if isinstance(memory.blocks_to_swap, int) else 0,
        )  # fmt: skip
        found = count_step(self.spec, network, shape)
        trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
        state = 0.0 if optimizer.use_cpu_offload_optimizer else optimizer_state_bytes(config) * trained
        return (found.weights + state + max(found.forward, found.backward)) / GIB

    def measured(self) -> Result:
        """Train some steps; seconds of a step, MFU, and GiB at the peak, allocated and reserved. On a CPU there are
        only the seconds."""
        parallel = make_strategy(self.config)
        device = parallel.device
        plan = DatasetPlan((), (), (), (), (), (), (), BatchCounts({}, (), (), False), "")
        start = new_run(self.config, plan, initial=None, data_size=1)
        checked = ResolvedRun(self.config, self.geometry, [], plan, start)
        with patch.object(common, "load_network", _randomly(device)):
            trainer, batch = self._trainer(checked, parallel)
        try:
            return _train(trainer, batch, device)
        finally:
            parallel.close()

    def _trainer(self, checked: ResolvedRun, parallel: Any) -> tuple[Trainer, Batch]:
        config, spec, dtype = self.config, self.spec, trainable_dtype(self.config)
        wrapped, optimizer = parallel.prepare(
            lambda: load_trainable_transformer(checked, spec, dtype, device=parallel.device),
            lambda parameters: create_optimizer(
                parameters, config=config.optimizer, lr=config.optimizer.lr, device_type=parallel.device.type,
                stochastic_rounding=config.training.master_weights == "stochastic_rounding",
            ),
            blocks=spec.blocks,
            swap=block_swap(config.memory.blocks_to_swap, spec, parallel),
        )  # fmt: skip
        network = parallel.unwrap(wrapped)
        scheduler = spec.load_scheduler()
        method = SFT(
            MethodParts(
                config=config, spec=spec, process=spec.process(scheduler), scheduler=scheduler, geometry=self.geometry,
                vae_stats=VAEStats(mean=torch.tensor(0.0), scale=torch.tensor(1.0)), source=None,
                parallel=parallel, network=network, weights_dtype=dtype,
            )
        )  # fmt: skip
        state = TrainState(
            config=config, spec=spec, method=method, parallel=parallel, transformer=wrapped, optimizer=optimizer,
            total_steps=STEPS, run_dir=RunDirectory(config.run.output_dir, writes=False), checkpoint_fields={},
            watchdog=Watchdog.of_run(config.run, rank=0), memory=MemoryRecorder(parallel.device),
            meter=attach_flop_meter(spec, network),
        )  # fmt: skip
        wrapped.train()
        latent = (2 * spec.latent_channels(network), *self.geometry.latent_shape(*self.size))
        return Trainer(state, Schedule(lambda step: config.optimizer.lr)), _batch(
            self.text, latent, config.dataloader.batch_size, parallel.device
        )


def _train(trainer: Trainer, batch: Batch, device: torch.device) -> Result:
    on_gpu = device.type == "cuda"
    network = trainer.state.network
    # The start of every matrix, since copies of all weights would not fit. A LoRA's A cannot move while B is zero.
    watched = {n: p for n, p in trainable_parameters(network).items() if p.ndim > 1 and "lora_A" not in n}
    before = {n: p.detach().flatten()[:4096].clone() for n, p in watched.items()}
    # The last block of some networks computes tokens of the text that nothing reads.
    with_gradient: set[str] = set()
    hooks = [p.register_post_accumulate_grad_hook(lambda _, n=n: with_gradient.add(n)) for n, p in watched.items()]
    free_memory()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    flops = 0.0
    while len(seconds) < STEPS or (on_gpu and len(seconds) < MOST_STEPS and sum(seconds[2:]) < TIMED_S):
        started = time.perf_counter()
        record = trainer.train_step(Step([batch]))
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        assert record is not None, "a rollback needs checkpoints"
        assert math.isfinite(record["loss"]), record
        assert 0 < record["grad_norm"] < math.inf, record
        flops = record.get("flops", 0.0)
    for hook in hooks:
        hook.remove()
    assert len(with_gradient) > 0.9 * len(watched), f"{len(with_gradient)} of {len(watched)} matrices have gradients"
    unchanged = [n for n in with_gradient if torch.equal(watched[n].detach().flatten()[:4096], before[n])]
    assert not unchanged, f"{len(unchanged)} of {len(watched)} matrices did not change, e.g. {unchanged[:3]}"
    step_s, peak = median(seconds[2:]), peak_flops(device)
    if not on_gpu:
        return {"step_s": step_s}
    return {
        "gpu": torch.cuda.get_device_name(device),
        "allocated": torch.cuda.max_memory_allocated(device) / GIB,
        "reserved": torch.cuda.max_memory_reserved(device) / GIB,
        "step_s": step_s,
        "launch_us": launch_us(device),
        "mfu": flops / step_s / peak if flops and peak else None,
    }


def launch_us(device: torch.device, launches: int = 2000) -> float:
    """Microseconds that the host takes to launch a kernel: short steps take as long as their launches."""
    tensor = torch.zeros(8, device=device)
    for _ in range(2):  # the first time is not counted
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(launches):
            tensor.add_(1)
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started) / launches


def _config(network: Network, repo: Path, size: tuple[int, int, int], options: Mapping[str, Any]) -> TrainConfig:
    values: dict[str, Any] = {
        "model_name": network.family, "pretrained_model_name_or_path": str(repo), "data_root": str(repo),
        "output_dir": str(repo / "run"), "video_resolution_buckets": ["x".join(map(str, size))],
        "gradient_checkpointing": True, "train_steps": STEPS, "lr": 1e-3, "frame_conditioning": "",
    }  # fmt: skip
    return load_config(**values | dict(options))


def _randomly(device: torch.device) -> Any:
    """What stands for `load_network`: the network with its class's own initialization, on the device if it fits
    there."""

    def load(cls: Any, model: Any, part: str, arguments: Mapping[str, Any], **_: Any) -> nn.Module:
        dtype, config = arguments["torch_dtype"], common.load_part(cls.load_config, model, part)
        with torch.device("meta"):
            size = dtype.itemsize * sum(p.numel() for p in cls.from_config(config).parameters())
        room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device if size < 0.9 * room else "cpu"):
                torch.manual_seed(0)
                network = cls.from_config(config)
                for weight in network.parameters():
                    if weight.ndim > 1 and not weight.detach().flatten()[:4096].any():  # a gate that lets nothing pass
                        nn.init.normal_(weight, std=0.02)
                return network.to("cpu", dtype)
        finally:
            torch.set_default_dtype(default)

    return load


def _batch(text: Mapping[str, tuple[int, ...]], moments: tuple[int, ...], clips: int, device: torch.device) -> Batch:
    """Random moments of some clips, with text of which a third is padding."""
    draw = torch.Generator().manual_seed(1)

    def condition(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("mask"):
            return (torch.arange(shape[0]) < 2 * shape[0] // 3).repeat(clips, 1)
        return torch.randn(clips, *shape, generator=draw).bfloat16()

    return Batch(
        moments=torch.randn(clips, *moments, generator=draw).to(device),
        conditions=PromptEmbeds({name: condition(name, shape) for name, shape in text.items()}).to(device),
        meta=VideoMeta(fps=torch.full((clips,), 24.0, device=device)),
        sample_keys=[(0, index) for index in range(clips)],
    )


def narrowed(network: Network, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a network's text conditions with the widths of a tiny one."""
    published = network.config
    widths = {published[name]: config[name] for name in reversed(_TEXT_WIDTHS) if name in published and name in config}
    return {name: (*shape[:-1], widths.get(shape[-1], shape[-1])) for name, shape in network.text.items()}


# ---- all cases -----------------------------------------------------------------------------------------------------


def run_case(name: str, *, tiny: bool, count: bool) -> Result:
    """`measure_case` of a case by its name; without a GPU nothing is measured."""
    found = measure_case(CASES[name], tiny=tiny, count=count)
    if not torch.cuda.is_available():
        found.pop("step_s", None)
    return found


def measure_case(case: Case, *, tiny: bool, count: bool = False) -> Result:
    """All that is known of a case; `note` says why it was not measured."""
    with tempfile.TemporaryDirectory() as folder:
        bench = StepTimer(case, Path(folder), tiny=tiny)
        found: Result = {"planned": bench.planned(), "size": "x".join(map(str, bench.size))}
        if count:
            found["counted"] = bench.counted()
        if torch.cuda.is_available():
            have = torch.cuda.mem_get_info()[0] / GIB
            if found["planned"] > have:
                return {**found, "note": f"needs {found['planned']:.0f} GiB and more, {have:.0f} are free"}
        elif not tiny:
            return {**found, "note": NO_GPU}
        try:
            return {**found, **bench.measured(), **({} if torch.cuda.is_available() else {"note": NO_GPU})}
        except ConfigError as error:
            return {**found, "note": error.problems[0].message}


def in_process(name: str, *, count: bool) -> Result:
    """`run_case` in a process of its own: what fails there leaves nothing on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--case", name, "--results", str(out), *(["--count"] if count else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return json.loads(out.read_text(encoding="utf-8"))[name]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    ran_out = any("out of memory" in line.lower() for line in lines)
    return {"note": "out of memory" if ran_out else f"failed: {lines[-1] if lines else done.returncode}"}


HEADINGS = (
    "case", "size", "plan", "counted", "measured", "reserved", "plan / measured", "s/step", "MFU", "published", "for",
    "note",
)  # fmt: skip


def rows(results: Mapping[str, Result]) -> Iterator[list[str]]:
    """The cells of each case; what was not measured is empty."""
    for name, found in results.items():
        case = CASES[name]
        measured, planned = found.get("allocated"), found.get("planned")
        yield [
            name, found.get("size", ""), _number(planned, 1), _number(found.get("counted"), 1), _number(measured, 1),
            _number(found.get("reserved"), 1), _number(planned / measured if planned and measured else None, 2),
            _number(found.get("step_s"), 2), _number(found.get("mfu"), 2), _number(case.published, 1),
            f"{case.card_gb:g} GB" if case.card_gb else "", found.get("note", ""),
        ]  # fmt: skip


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def table(results: Mapping[str, Result]) -> str:
    """In Markdown; memory in GiB."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows(results)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that are not in the file of results yet, and print the table of all that are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=Path("memory_results.json"), help="what is done, and is not repeated"
    )
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--minutes", type=float, default=10, help="after these no further case begins")
    parser.add_argument("--count", action="store_true", help="count on fake tensors too")
    parser.add_argument("--tiny", action="store_true", help="tiny networks in this process")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    quiet_progress_bars()
    path: Path = arguments.results
    results: dict[str, Result] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    again = torch.cuda.is_available()  # what another machine could not measure
    todo = [
        name
        for name in CASES
        if arguments.only in name and (name not in results or (again and results[name].get("note") == NO_GPU))
    ]
    if arguments.case is not None:
        todo = [arguments.case]
    started = time.monotonic()
    for number, name in enumerate(todo):
        if time.monotonic() - started > 60 * arguments.minutes:
            print(f"not begun after {arguments.minutes:g} minutes: {', '.join(todo[number:])}; repeat the command")
            break
        alone = not arguments.tiny and arguments.case is None
        print(f"{name} ...", file=sys.stderr)
        results[name] = (
            in_process(name, count=arguments.count)
            if alone
            else run_case(name, tiny=arguments.tiny, count=arguments.count)
        )
        path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    gpus = {found["gpu"] for found in results.values() if "gpu" in found}
    print(f"torch {torch.__version__}, {', '.join(sorted(gpus)) or 'no GPU: nothing was measured'}; memory in GiB\n")
    print(table({name: results[name] for name in CASES if name in results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
