"""The memory estimate: its error against counting, and what fits which GPU.

    python benchmarks/memory_estimate.py                  # every family, LoRA and full, against the count: minutes
    python benchmarks/memory_estimate.py --zero           # DeepSpeed's stages against its own engine: minutes
    python benchmarks/memory_estimate.py --cards          # model and GPU -> what to set, planned peaks, slowdown
    python benchmarks/memory_estimate.py --recipes        # the planned peak of each command in examples/
    python benchmarks/memory_estimate.py --clusters       # model, clip, GPUs -> strategy, --sp_size, planned peak
    python benchmarks/memory_estimate.py --cards --write  # into docs/reference/memory-by-card.md and README.md
    python benchmarks/memory_estimate.py --clusters --write  # writes that one into docs/how-to/distributed.md
    python benchmarks/memory_estimate.py --sharing --write  # shared clips, into docs/how-to/sequence-parallel.md
    python benchmarks/memory_estimate.py --recipes --write  # writes those peaks into the recipes

Nothing runs on a GPU here: the networks are the published ones without weights. Table and peaks are what
`finetrainers estimate` says.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from count_zero import count_zero  # noqa: E402
from published_networks import NETWORKS  # noqa: E402

from finetrainers.cli.estimate import estimate_command  # noqa: E402
from finetrainers.config.given import RawOptions  # noqa: E402
from finetrainers.config.load import load_config  # noqa: E402
from finetrainers.config.stages import read_stages  # noqa: E402
from finetrainers.memory.advice import Outcome  # noqa: E402
from finetrainers.memory.count import StepShape, count_step  # noqa: E402
from finetrainers.memory.estimate import GIB, estimate_for  # noqa: E402
from finetrainers.memory.fit import fits as fits_gpu  # noqa: E402
from finetrainers.memory.fit import with_reserve  # noqa: E402
from finetrainers.memory.gathered import zero_host_bytes  # noqa: E402
from finetrainers.memory.network_weights import NetworkWeights  # noqa: E402
from finetrainers.models.registry import get_family  # noqa: E402
from finetrainers.parallel.sharding import expected_split  # noqa: E402
from finetrainers.parallel.zero import complete_settings, make_plugin, split_weights  # noqa: E402
from finetrainers.plan.automatic import within_budget  # noqa: E402
from finetrainers.plan.estimate import checked_sizes, planned_for  # noqa: E402
from finetrainers.plan.memory_plan import RunMemory  # noqa: E402
from finetrainers.plan.preflight import preflight  # noqa: E402
from finetrainers.plan.sizes_plan import plan_sizes  # noqa: E402
from finetrainers.plan.trainable import make_trainable  # noqa: E402
from finetrainers.utils.gpus import read_gpu  # noqa: E402
from finetrainers.utils.phases import ENCODING_TEXT, TRAINING_STEP, label  # noqa: E402

HOW_TO, REFERENCE, README = ROOT / "docs" / "how-to", ROOT / "docs" / "reference", ROOT / "README.md"
#: Sizes of cards, in GB as they are sold.
GPUS = (8, 12, 16, 24, 32, 48, 80)
#: Memory of the machine that these GPUs are in.
HOST_GIB = 64
#: Runs of the table of cards: all other options are those that a run chooses.
RUNS = {"LoRA": {}, "full": {"training_type": "full-finetune"}}
KINDS = {"LoRA r128": {"rank": 128, "lora_alpha": 128}, "full": {"training_type": "full-finetune"}}
ABSENT, NOTHING = "does not fit", "nothing"
_SHORT = {"blocks_to_swap": "{} swapped", "enable_model_cpu_offload": "samples with idle components in host memory"}
HEADINGS = ("model", "GPU", "what to set", "planned peak, GPU", "host memory", "the run chooses", "planned slowdown")
SUMMARY_HEADINGS = ("LoRA on a card of", *(f"{gpu} GB" for gpu in GPUS), "full finetuning from")
#: Clips that several GPUs are for: the model's usual size, and its largest.
CLIPS = (
    ("LTX-Video", "49x512x768"), ("LTX-Video", "121x704x1216"), ("CogVideoX-5b", "49x480x720"),
    ("HunyuanVideo", "49x512x768"), ("HunyuanVideo", "129x720x1280"),
)  # fmt: skip
#: Memory of each GPU, how many a machine has, and how many there are in all.
CLUSTER_GPU, PER_MACHINE, COUNTS = 80, 8, (2, 8, 16)
STRATEGIES = {"DDP": (), "FSDP2, hybrid": ("--fsdp", "hybrid"), "FSDP2, full": ("--fsdp", "full")}
#: What of HunyuanVideo is trained, and by which strategy.
SHARING = (("LoRA r128", ()), ("LoRA r128", ("--fsdp", "full")), ("full", ("--fsdp", "full")))
SHARING_HEADINGS = ("`--sp_size`", "LoRA of rank 128, DDP", "the same, `--fsdp full`", "full finetuning, `--fsdp full`")
CLUSTER_HEADINGS = (
    "model",
    "clip",
    "GPUs",
    "strategy",
    "`--sp_size`",
    "clips at once",
    "planned peak",
    "with `--sp_mode ring`",
    "with `--sp_size 1`",
)


@cache
def run_memory(name: str, kind: str) -> RunMemory:
    """The estimate of a run with one validation prompt, with recommended settings and exact choices."""
    config = load_config(
        pretrained_model_name_or_path=NETWORKS[name].hub_id, validation_prompts="a cat", validation_steps=100,
        output_dir="runs/estimate", **RUNS[kind],
    )  # fmt: skip
    run, _ = checked_sizes(planned_for(config, "80GB"))
    return RunMemory(run, host_gib=HOST_GIB)


@cache
def card(name: str, kind: str, gpu: int) -> tuple[str, ...]:
    """A row of the table of cards, as `HEADINGS` say: nothing is set where exact choices are enough."""
    memory, gib, start = run_memory(name, kind), read_gpu(f"{gpu}GB").gib, (name, f"{gpu} GB")
    settings = memory.choose(machine=memory.machine_with(gib))
    if memory.fits(settings.plan, gib):
        plan, flags = settings.plan, NOTHING
        outcome = Outcome(plan.peaks, 100 * settings.slower, settings.words, plan.machine_bytes)
    elif (advice := memory.advice(gib)) is not None:
        outcome, flags = advice.outcome, " ".join(f"`{applied.switch.flags}`" for applied in advice.switches)
    else:
        return (*start, ABSENT, "", "", "", "")
    words = {option: what for option, what in outcome.chosen.items() if what != "none" and what[:2] != "0 "}
    chosen = "; ".join(_SHORT.get(option, "{}").format(what) for option, what in words.items())
    percent = f"{outcome.slower:+.0f}%" if round(outcome.slower) else "none"
    return (*start, flags, _gib(outcome.peak), f"{outcome.host / GIB:.1f} GiB", chosen, percent)


def cards(name: str, kind: str) -> Iterator[tuple[str, ...]]:
    """The rows of a model: of a LoRA all cards, of full finetuning those that it fits."""
    rows = (card(name, kind, gpu) for gpu in GPUS)
    return (row for row in rows if kind == "LoRA" or row[2] != ABSENT)


def summary(name: str, lora: Sequence[Sequence[str]], full: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A row of README, of the rows of a model: a cell for each card, and the smallest card for full finetuning."""
    marks = {NOTHING: "yes", ABSENT: "no"}
    return (name, *(marks.get(row[2], "budget") for row in lora), full[0][1])


def planned(name: str, kind: str, flags: Sequence[str]) -> Any:
    """What the command `estimate` says of a run without validation."""
    size = {"LoRA r128": ["--rank", "128", "--lora_alpha", "128"], "full": ["--training_type", "full-finetune"]}[kind]
    argv = [
        "--json", "--pretrained_model_name_or_path", NETWORKS[name].hub_id, *size, "--data_root", "absent",
        "--output_dir", "runs/estimate", "--optimizer", "adamw", "--mixed_precision", "bf16",
        "--gradient_checkpointing", "--precompute_conditions", "--enable_slicing", "--enable_tiling", *flags,
    ]  # fmt: skip
    return _estimated(argv)


def peak_of(name: str, kind: str, flags: Sequence[str]) -> float:
    """Bytes allocated at the peak of a run."""
    return float(planned(name, kind, flags)["peak"]["allocated"])


def _estimated(argv: list[str]) -> Any:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert estimate_command(argv) == 0, argv
    return json.loads(printed.getvalue())


def clusters(name: str, clip: str, kind: str) -> Iterator[tuple[str, ...]]:
    """Rows of what to launch on several GPUs, as `CLUSTER_HEADINGS` say; what is the same for several counts is one
    row."""
    rows: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for gpus in COUNTS:
        strategy, sp_size, *peaks = _launch(name, clip, kind, gpus)
        clips = str(gpus // sp_size) if sp_size else ""
        rows.setdefault((strategy, str(sp_size or ""), *peaks), []).append((str(gpus), clips))
    for (strategy, shared, *peaks), counts in rows.items():
        gpus_text, clips = (", ".join(column) for column in zip(*counts, strict=True))
        yield (f"{name} {kind}", clip, gpus_text, strategy, shared, clips, *peaks)


def _launch(name: str, clip: str, kind: str, gpus: int) -> tuple[str, int, str, str, str]:
    """Strategy, `sp_size` (0: nothing fits), its peak, that by a ring, and that of whole clips: the first that fits, in
    order.

    Whole clips before shared ones, whole networks before sharded ones, and nothing is sharded across machines if it
    need not.
    """
    machines = max(1, gpus // PER_MACHINE)
    run = ["--video_resolution_buckets", clip, "--num_processes", str(gpus), "--num_machines", str(machines)]
    last = "FSDP2, full"
    within = ["DDP", last if machines == 1 else "FSDP2, hybrid"]
    sizes = [size for size in (1, 2, 4, 8) if size <= gpus]
    ways = [(size, strategy) for size in sizes for strategy in within] + [(size, last) for size in sizes]
    for sp_size, strategy in ways:
        flags = [*run, *STRATEGIES[strategy]]
        peak = peak_of(name, kind, [*flags, "--sp_size", str(sp_size)])
        if fits_gpu(peak, GIB * read_gpu(f"{CLUSTER_GPU}GB").gib):
            if sp_size == 1:
                return strategy, sp_size, _gib(peak), "", ""
            others = ([*flags, "--sp_size", str(sp_size), "--sp_mode", "ring"], flags)
            ring, whole = (_gib(peak_of(name, kind, one)) for one in others)
            return strategy, sp_size, _gib(peak), ring, whole
    return "does not fit", 0, f"{_gib(peak)} with {last}, `--sp_size {sp_size}`", "", ""


def all_clusters() -> Iterator[tuple[str, ...]]:
    """Every row."""
    for name, clip in CLIPS:
        for kind in KINDS:
            yield from clusters(name, clip, kind)


def sharing(size: int) -> tuple[str, ...]:
    """A row of what the training step takes where so many of eight processes share each clip, as `SHARING_HEADINGS`
    say."""
    shared = ["--video_resolution_buckets", "129x720x1280", "--num_processes", "8", "--sp_size", str(size)]
    cells = []
    for kind, strategy in SHARING:
        modes = ("ulysses",) if size == 1 else ("ulysses", "ring")
        found = [planned("HunyuanVideo", kind, [*shared, *strategy, "--sp_mode", mode]) for mode in modes]
        cells.append(" / ".join(f"{one['phases'][TRAINING_STEP]['gpu'] / GIB:.1f}" for one in found))
    return (str(size), *cells)


def _gib(size: float) -> str:
    return f"{with_reserve(size) / GIB:.1f} GiB"


def markdown(rows: Sequence[Sequence[str]], headings: Sequence[str] = HEADINGS) -> str:
    """A table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def write_table(page: Path, name: str, table: str) -> None:
    """Put a table between its marks in a page, or its rows in the place of those of the same names in README."""
    if page == README:
        rows = {row.split(" | ")[0]: row for row in table.splitlines()[2:]}
        lines = page.read_text(encoding="utf-8").splitlines()
        lines = [rows.get(line.removesuffix(" |").split(" | ")[0], line) for line in lines]
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    marks = (f"<!-- {name} -->", f"<!-- end of {name} -->")
    text = page.read_text(encoding="utf-8")
    assert all(mark in text for mark in marks), page
    pattern = re.compile(f"{marks[0]}.*?{marks[1]}", re.DOTALL)
    page.write_text(pattern.sub(lambda _: f"{marks[0]}\n\n{table}\n\n{marks[1]}", text), encoding="utf-8")


def recipes() -> Iterator[Path]:
    """The training files below examples/ that have one command, and the stage files for one GPU; recipes for several
    engines tell their memory in words."""
    for path in sorted((ROOT / "examples").glob("*/*.toml")):
        if len(_commands(path)) == 1:
            yield path
    yield from sorted((ROOT / "examples").glob("*/*/stages.toml"))


def _commands(recipe: Path) -> list[list[str]]:
    """The commands in the head of a recipe, in words."""
    head = recipe.read_text(encoding="ascii").partition("\n\n")[0]
    lines = re.sub(r" \\\n# +", " ", head).splitlines()
    starts = ("#   finetrainers train ", "#   accelerate launch ", "#   NUM_MACHINES=")
    return [shlex.split(line.lstrip("# ")) for line in lines if line.startswith(starts)]


def planned_peak(recipe: Path) -> str:
    """The line of a recipe that says how much memory its command is planned to take, as the command `estimate` says
    it."""
    [words] = _commands(recipe)
    flags = ["--config", str(recipe), "--json", "--host", f"{HOST_GIB}GiB"]
    if "--quantize_text_encoders" in words:  # 4 bits, which a CPU refuses, so that the file has 8
        at, head = words.index("--quantize_text_encoders"), recipe.read_text(encoding="ascii")
        [gpu] = re.findall(r"^# GPU: (\d+) GB", head, flags=re.MULTILINE)
        flags += [*words[at : at + 2], "--gpu", f"{gpu}GB"]
    if "--config_file" in words:
        at = words.index("--config_file")
        flags += ["--accelerate_config", str(ROOT / words[at + 1]), "--num_processes", words[at + 3]]
    found = _estimated(flags)
    phase, more = found["peak"]["phase"], "".join(f" and the {part}" for part in found["unknown"])
    line = f"# Planned peak: {found['peak']['reserved'] / GIB:.1f} GiB{more} in the phase {label(phase)}"
    step = with_reserve(found["phases"][TRAINING_STEP]["gpu"]) / GIB
    rest = f", {step:.1f} in the training step" if phase == ENCODING_TEXT else ""
    return f"{line}{rest} (finetrainers estimate)." if len(line + rest) < 95 else f"{line}{rest}."


def planned_stages(recipe: Path) -> list[str]:
    """A line for each stage with the GPU and host memory that it is planned to take on the machine of the head."""
    head = recipe.read_text(encoding="ascii")
    gpu, host = (float(re.search(r"# GPU: (\d+) GB, and (\d+) GB", head)[n]) for n in (1, 2))
    lines = []
    for stage in read_stages(recipe, RawOptions()):
        run, _ = checked_sizes(planned_for(stage.config, f"{gpu:g}GB"))
        run = within_budget(run, partial(preflight, preparing=True, weights=False, planner=plan_sizes), host_gib=host)
        memory = RunMemory(run, host_gib=host)
        plan = memory.choose().plan
        assert memory.fits(plan, read_gpu(f"{gpu:g}GB").gib), recipe
        lines.append(
            f"# Planned peak of {stage.name}: {with_reserve(plan.peak) / GIB:.1f} GiB in the phase "
            f"{label(plan.peak_phase)}, {plan.machine_bytes / GIB:.1f} GiB of host memory."
        )
    return lines


def with_planned_peak(recipe: Path) -> str:
    """The text of a recipe, with that line before the lines of its command."""
    lines = [line for line in recipe.read_text(encoding="ascii").splitlines() if not line.startswith("# Planned peak")]
    command = next(
        number for number, line in enumerate(lines) if line.startswith(("#   finetrainers", "#   accelerate"))
    )
    planned = planned_stages(recipe) if recipe.name == "stages.toml" else [planned_peak(recipe)]
    return "\n".join([*lines[: command - 1], *planned, *lines[command - 1 :]]) + "\n"


def errors() -> Iterator[str]:
    """Estimate and count of a training step, of every network, kind, way of storing activations, and batch size."""
    yield f"{'network':<14}{'kind':<15}{'checkpointing':<15}{'batch':<7}{'planned':>9}{'counted':>9}{'error':>8}"
    for name, network in NETWORKS.items():
        for training_type in ("lora", "full-finetune"):
            config = load_config(
                pretrained_model_name_or_path=network.hub_id, training_type=training_type, rank=64, optimizer="adamw",
            )  # fmt: skip
            family, section = get_family(network.family), config.model.for_estimate()
            geometry, spec = family.facts_of(section).geometry, family.load(section)
            meta = spec.transformer_on_meta()
            make_trainable(meta, config.training)
            sizes = {
                flag: sum(p.numel() for p in meta.parameters() if p.requires_grad is flag) for flag in (True, False)
            }
            weights = 2 * sizes[False] + 12 * sizes[True]
            for checkpointing in (True, False):
                for batch in (1, 4):
                    latent = (spec.latent_channels(meta), *geometry.denoised_shape(*network.bucket))
                    step = StepShape(
                        latent, batch, "checkpoint" if checkpointing else "none",
                        has_frame_times=network.has_frame_times,
                    )  # fmt: skip
                    found = count_step(spec, meta, step)
                    counted = (weights + max(found.forward, found.backward)) / GIB
                    memory = config.memory.model_copy(update={"gradient_checkpointing": checkpointing})
                    changed = config.model_copy(update={"memory": memory})
                    planned = estimate_for(
                        changed, geometry, meta, spec=spec, bucket=network.bucket, batch_size=batch
                    ).total
                    yield (
                        f"{name:<14}{training_type:<15}{'yes' if checkpointing else 'no':<15}{batch:<7}{planned:9.1f}"
                        f"{counted:9.1f}{100 * (planned / counted - 1):+7.1f} %"
                    )


#: Network, training type, ZeRO stage, whether offloaded, processes, micro-batches of a step.
ZERO = (
    ("LTX-Video", "full-finetune", 1, False, 8, 1), ("LTX-Video", "full-finetune", 2, False, 8, 1),
    ("LTX-Video", "full-finetune", 2, False, 2, 1), ("LTX-Video", "full-finetune", 2, True, 8, 1),
    ("LTX-Video", "lora", 2, False, 8, 1), ("CogVideoX-5b", "lora", 2, False, 2, 1),
    ("LTX-Video", "full-finetune", 3, False, 8, 1), ("LTX-Video", "full-finetune", 3, True, 8, 1),
    ("LTX-Video", "lora", 3, False, 2, 1),
)  # fmt: skip


def zero_errors() -> Iterator[str]:
    """Estimate and count of a training step under DeepSpeed with its own buffers, per process, with checkpointing."""
    yield (
        f"{'network':<14}{'kind':<15}{'ZeRO':<6}{'host':<6}{'processes':<11}"
        f"{'planned':>9}{'counted':>9}{'error':>8}{'host: planned':>15}{'counted':>9}"
    )
    for name, training_type, stage, offload, processes, micro_batches in ZERO:
        network = NETWORKS[name]
        config = load_config(
            pretrained_model_name_or_path=network.hub_id, training_type=training_type,
            rank=64, optimizer="adamw", mixed_precision="bf16", gradient_checkpointing=True, deepspeed=True,
            zero_stage=stage, zero_offload=offload, gradient_accumulation_steps=micro_batches,
        )  # fmt: skip
        family, section = get_family(network.family), config.model.for_estimate()
        geometry, spec = family.facts_of(section).geometry, family.load(section)
        meta = spec.transformer_on_meta()
        make_trainable(meta, config.training)
        weights = NetworkWeights(meta, spec)
        with patch.dict(os.environ, WORLD_SIZE=str(processes)):
            split = expected_split(config.parallel)
        plan = estimate_for(config, geometry, meta, spec=spec, bucket=network.bucket, split=split, weights=weights)
        host = zero_host_bytes(
            split, total=weights.total, trained=weights.trained, largest=weights.largest, width=2, state_bytes=8,
            accumulates=micro_batches > 1,
        )  # fmt: skip
        plugin = make_plugin(config.parallel)
        plugin.set_mixed_precision("bf16")
        complete_settings(
            plugin.deepspeed_config, batch_size=1, accumulation=micro_batches, processes=processes, max_grad_norm=1.0
        )
        shape = StepShape(
            (spec.latent_channels(meta), *geometry.denoised_shape(*network.bucket)),
            trained=torch.bfloat16,
            autocast=None,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints
            found = count_zero(
                spec, meta, shape, plugin.deepspeed_config, processes=processes,
                split=split_weights if stage == 3 else None,
            )  # fmt: skip
        counted = found.step / GIB
        yield (
            f"{name:<14}{training_type:<15}{stage:<6}{'yes' if offload else 'no':<6}{processes:<11}{plan.total:9.1f}"
            f"{counted:9.1f}{100 * (plan.total / counted - 1):+7.1f} %{host / GIB:15.1f}{found.host / GIB:9.1f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Print, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cards", action="store_true", help="print what to set on which GPU instead")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write that table into its page of docs/how-to, or the peaks into the recipes",
    )
    parser.add_argument("--clusters", action="store_true", help="print what to launch on several GPUs instead")
    parser.add_argument("--sharing", action="store_true", help="print what shared clips take instead")
    parser.add_argument("--zero", action="store_true", help="print the error for DeepSpeed's stages instead")
    parser.add_argument("--recipes", action="store_true", help="print the planned peak of each recipe instead")
    own = parser.parse_args(argv)
    if own.recipes:
        for path in recipes():
            text = with_planned_peak(path)
            print(path.relative_to(ROOT), *(line for line in text.splitlines() if "Planned peak" in line), sep="\n  ")
            if own.write:
                path.write_text(text, encoding="ascii")
        return 0
    tables = list(_tables(own))
    for page, name, table in tables:
        print(table)
        if own.write:
            write_table(page, name, table)
    if not tables:
        for line in zero_errors() if own.zero else errors():
            print(line, flush=True)
    return 0


def _tables(own: argparse.Namespace) -> Iterator[tuple[Path, str, str]]:
    """The requested tables, each with its page and its name there."""
    if own.cards:
        for kind in RUNS:
            table = markdown([row for name in NETWORKS for row in cards(name, kind)])
            yield REFERENCE / "memory-by-card.md", f"cards, {kind}", table
        yield (
            README,
            "",
            markdown(
                [summary(name, *(list(cards(name, kind)) for kind in RUNS)) for name in NETWORKS], SUMMARY_HEADINGS
            ),
        )
    if own.clusters:
        yield HOW_TO / "distributed.md", "what to launch", markdown(list(all_clusters()), CLUSTER_HEADINGS)
    if own.sharing:
        table = markdown([sharing(size) for size in (1, 2, 4, 8)], SHARING_HEADINGS)
        yield HOW_TO / "sequence-parallel.md", "what shared clips take", table


if __name__ == "__main__":
    sys.exit(main())
