"""The memory of a run by phase: the parts by hand, what options change, the choice for a budget."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from refusals import refused_options

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.config.target import TargetDevice
from finetrainers.memory.estimate import GIB
from finetrainers.memory.fit import RESERVE, with_reserve
from finetrainers.methods.registry import method_spec
from finetrainers.models.sizes import num_weights
from finetrainers.models.spec import ModelSpec, frozen_bytes
from finetrainers.plan import memory_plan
from finetrainers.plan.automatic import within_budget
from finetrainers.plan.memory_lines import as_json, fit_lines, memory_lines
from finetrainers.plan.memory_plan import RunMemory, planned_peaks, print_planned, run_memory
from finetrainers.plan.preflight import ResolvedRun, preflight
from finetrainers.plan.room import disk_needs
from finetrainers.plan.sizes_plan import plan_sizes
from finetrainers.plan.trainable import network_without_weights
from finetrainers.rewards.clip_models import CLIPScore
from finetrainers.utils import device
from finetrainers.utils.gpus import read_gpu

#: Names of parts of a phase.
NETWORKS, SCORING, DECODER = "networks of rewards", "activations of rewards", "the VAE's decoder and its backward"


@pytest.fixture
def checked(tiny_repo: Callable[..., Path], tmp_path: Path) -> Callable[..., ResolvedRun]:
    def make(**options: Any) -> ResolvedRun:
        family, version = options.pop("family", "ltx_video"), options.pop("version", None)
        data = {"video_resolution_buckets": ["49x512x768"], "data_root": str(tmp_path / "absent")}
        layers = {"layers": options.pop("layers")} if "layers" in options else {}
        sizes = {} if options.get("method") in ("grpo", "refl") else data
        config = load_config(
            model_name=family, pretrained_model_name_or_path=str(tiny_repo(family, version, **layers)),
            output_dir=str(tmp_path / "run"), rank=4, optimizer="adamw", train_steps=2, **{**sizes, **options},
        )  # fmt: skip
        without_data = method_spec(config).without_data(config)
        assert without_data is not None
        return preflight(without_data, preparing=True, weights=False, planner=plan_sizes)

    return make


def numbers(memory: RunMemory, part: str) -> int:
    found = num_weights(memory.checked.family.load(memory.checked.config.model), part)
    assert found is not None
    return found


def test_phases_by_hand(checked: Callable[..., ResolvedRun]) -> None:
    """What is loaded when: encoded beforehand, text encoder and VAE are gone while training; else they stay."""
    prompts = {"validation_prompts": "a cat@@@49x512x768", "validation_steps": 1}
    memory = RunMemory(checked(precompute_conditions=True, **prompts))
    text, vae = 2.0 * numbers(memory, "text_encoder"), 2.0 * numbers(memory, "vae")
    plan = memory.plan()
    assert list(plan.phases) == [
        "loading", "encoding_text", "encoding_clips", "training_step", "checkpoint", "validation",
    ]  # fmt: skip
    working = 118 * 49 * 512 * 768
    assert plan.phases["encoding_clips"] == pytest.approx({"vae": vae, "the VAE at work": working})
    assert plan.phases["encoding_text"]["text_encoder"] == text
    assert not plan.phases["training_step"].keys() & {"vae", "text_encoder"}
    assert plan.peaks["training_step"] == pytest.approx(GIB * plan.step.total)
    frozen = plan.phases["training_step"]["frozen weights"]
    validation = plan.phases["validation"]
    assert validation["vae"] == vae
    assert validation["frozen weights"] == frozen
    assert validation["the VAE at work"] == pytest.approx(working)

    live = RunMemory(checked(**prompts)).plan()
    assert live.peaks["training_step"] == pytest.approx(plan.peaks["training_step"] + text + vae)
    assert live.peaks["encoding_clips"] == pytest.approx(text + vae + working + plan.peaks["checkpoint"], rel=1e-6)
    offloaded = RunMemory(checked(precompute_conditions=True, enable_model_cpu_offload=True, **prompts)).plan()
    assert "frozen weights" not in offloaded.phases["validation"]
    assert offloaded.host["validation"] > plan.host["validation"]
    tiled = RunMemory(checked(precompute_conditions=True, enable_tiling=True)).plan()
    assert tiled.peaks["encoding_clips"] == pytest.approx(vae + 118 * 49 * 512 * 512 + 6 * 49 * 512 * 768)
    assert "validation" not in tiled.phases


def test_reward_finetuning_has_rollouts(checked: Callable[..., ResolvedRun]) -> None:
    options: dict[str, Any] = {
        "method": "grpo", "rollout_size": "17x128x128", "reward": ["brightness"], "mixed_precision": "bf16",
    }  # fmt: skip
    plan = RunMemory(checked(family="hunyuan_video", **options)).plan()
    assert {"rollout", "reward"} < plan.phases.keys()
    assert plan.phases["rollout"]["sampled trajectories"] == plan.phases["reward"]["sampled trajectories"] > 0
    assert plan.phases["rollout"]["the VAE at work"] > 0
    assert plan.unknown == ()
    absent = RunMemory(checked(family="hunyuan_video", **{**options, "reward": ["pickscore,path=a/b"]})).plan()
    assert absent.unknown == (NETWORKS,)


def test_companions_count_where_they_are(checked: Callable[..., ResolvedRun], tmp_path: Path) -> None:
    """The other expert: on the GPU in samples and rollouts, otherwise on the host. An image encoder: loaded once."""
    sampled = {"validation_prompts": "a cat@@@49x512x768", "validation_steps": 1}
    pair: dict[str, Any] = {"family": "wan", "version": "a14b", "expert": "low"}
    memory = RunMemory(checked(precompute_conditions=True, **pair, **sampled))
    without, plan = RunMemory(checked(precompute_conditions=True, **pair)).plan(), memory.plan()
    other, vae = 2.0 * numbers(memory, "transformer"), 4.0 * numbers(memory, "vae")
    assert plan.unknown == ()
    assert plan.phases["validation"]["transformer"] == other
    assert "transformer" not in plan.phases["training_step"]
    assert plan.host["training_step"] == pytest.approx(without.host["training_step"] + other)
    assert plan.host["validation"] == pytest.approx(without.host["training_step"])
    # One expert at a time: the other one is as large as all that is trained.
    options = {"precompute_conditions": True, "enable_model_cpu_offload": True, **pair, **sampled}
    offloaded = RunMemory(checked(**options)).plan()
    trained = plan.phases["validation"]["frozen weights"] + plan.phases["validation"]["trainable weights"]
    assert offloaded.host["validation"] == pytest.approx(plan.host["validation"] + other + vae + trained)
    options = {"method": "grpo", "rollout_size": "17x128x128", "reward": ["brightness"], "mixed_precision": "bf16"}
    rollouts = RunMemory(checked(**pair, **options)).plan()
    assert [phase for phase, parts in rollouts.phases.items() if "transformer" in parts] == ["rollout", "reward"]
    assert rollouts.host["rollout"] == pytest.approx(rollouts.host["training_step"] - other)

    # It is stored as the trained one: quantized, and with as many swapped blocks.
    for changes in ({"quantize_frozen": "int8"}, {"blocks_to_swap": 4}):
        stored = RunMemory(checked(precompute_conditions=True, layers=4, **pair, **sampled, **changes)).plan()
        alone = RunMemory(checked(precompute_conditions=True, layers=4, **pair, **changes)).plan()
        on_gpu, swap = stored.phases["validation"], stored.step.swap
        assert on_gpu["transformer"] == pytest.approx(on_gpu["frozen weights"] + swap.slots)
        assert (swap.slots > 0) == ("blocks_to_swap" in changes)
        assert sum(stored.phases["checkpoint"].values()) >= on_gpu["frozen weights"] + swap.slots
        waiting = on_gpu["frozen weights"] + swap.host
        assert stored.host["training_step"] == pytest.approx(alone.host["training_step"] + waiting)
    assert stored.host["validation"] == pytest.approx(alone.host["training_step"] + swap.host)
    whole = RunMemory(checked(precompute_conditions=True, layers=4, **pair)).plan()
    assert waiting == pytest.approx(whole.phases["training_step"]["frozen weights"])

    animated: dict[str, Any] = {"family": "wan", "version": "i2v"}
    Image.new("RGB", (96, 64)).save(tmp_path / "first.png")
    images = {**sampled, "validation_images": str(tmp_path / "first.png")}
    for precomputed in (False, True):
        memory = RunMemory(checked(precompute_conditions=precomputed, **animated))
        encoder = 2.0 * numbers(memory, "image_encoder")
        without, plan = (
            memory.plan(),
            RunMemory(checked(precompute_conditions=precomputed, **animated, **images)).plan(),
        )
        assert plan.phases["validation"]["image_encoder"] == encoder
        assert ("image_encoder" in plan.phases["training_step"]) is not precomputed
        more = plan.host["training_step"] - without.host["training_step"]
        assert more == pytest.approx(encoder if precomputed else 0.0)


def test_processes_share(checked: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = RunMemory(checked(training_type="full-finetune", mixed_precision="bf16")).plan()
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    eight = RunMemory(checked(training_type="full-finetune", mixed_precision="bf16", fsdp="full")).plan()
    assert eight.phases["checkpoint"]["trainable weights"] == pytest.approx(
        alone.phases["checkpoint"]["trainable weights"] / 8
    )
    assert eight.local_processes == 4
    assert eight.machine_bytes == pytest.approx(4 * min(eight.host.values()) + eight.one_by_one, rel=0.2)
    options = {"training_type": "full-finetune", "mixed_precision": "bf16", "fsdp": "full", "fsdp_cpu_offload": True}
    memory = RunMemory(checked(**options))
    found = memory.choose()
    host = found.plan
    assert "planned for 1 process" not in "\n".join(memory_lines(memory, found))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "planned for 1 process" not in "\n".join(memory_lines(memory, found))  # one process can offload so
    alone_on_gpu = RunMemory(checked(**{**options, "fsdp_cpu_offload": False}))
    assert "planned for 1 process" in "\n".join(memory_lines(alone_on_gpu, alone_on_gpu.choose()))
    assert host.host["training_step"] > eight.host["training_step"]
    assert host.peaks["checkpoint"] < eight.peaks["checkpoint"]


def test_page_locked_copies_are_rounded_up(
    checked: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch, in an offloaded optimizer's weights and gradients and in offloaded shards, unless a run limits it."""
    monkeypatch.setattr(device, "PINNED_ROUNDING_MIB", 0)
    memory = RunMemory(checked(training_type="full-finetune", mixed_precision="bf16", precompute_conditions=True))
    sizes = [weight.numel() for weight in memory.transformer.parameters()]

    def host(*, is_limited: bool, **changes: Any) -> float:
        monkeypatch.setattr(device, "knows_allocator_setting", lambda _: is_limited)
        again = RunMemory(memory.checked, memory.transformer)
        return again.plan(memory.checked.config.with_values(changes)).host["training_step"]

    rounding = sum(2 ** math.ceil(math.log2(4 * size)) - 4 * size for size in sizes)
    for changes in ({"use_cpu_offload_optimizer": True}, {"fsdp": "full", "fsdp_cpu_offload": True}):
        assert host(is_limited=False, **changes) - host(is_limited=True, **changes) == 2 * rounding > 0
    assert host(is_limited=False) == host(is_limited=True)


def test_several_processes_are_advised_to_share_clips(
    checked: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest number of them that fits; by a ring, where it does not divide the heads, and rings are possible."""
    monkeypatch.setattr(memory_plan, "MEMORY_OPTIONS", ())
    monkeypatch.setenv("WORLD_SIZE", "6")
    options = {"precompute_conditions": True, "batch_size": 800, "precompute_batch_size": 1, "fit_gpu": False}

    def needed(size: int, **changes: Any) -> float:
        return with_reserve(RunMemory(checked(sp_size=size, **{**options, **changes})).plan().peak) / GIB

    memory = RunMemory(checked(**options))
    whole, halves = needed(1), needed(2)
    assert halves < 0.7 * whole
    found = memory.advice(1.01 * halves)
    assert found is not None
    assert [one.switch.flags for one in found.switches] == ["--sp_size 2"]
    assert found.switches[0].saves == pytest.approx(GIB * (whole - halves) / (1 + RESERVE))
    rings = memory.advice(0.9 * halves)  # of four attention heads
    assert rings is not None
    assert [one.switch.flags for one in rings.switches] == ["--sp_size 3 --sp_mode ring"]
    # This backend does not go around a ring, and these clips do not have three tokens.
    other = RunMemory(checked(**options, attn_backend="_native_math"))
    assert other.advice(0.9 * halves) is None
    small = {**options, "batch_size": 100_000, "video_resolution_buckets": ["1x32x64"]}
    memory, halves = RunMemory(checked(**small)), needed(2, **small)
    assert memory.advice(1.01 * halves) is not None
    assert memory.advice(0.9 * halves) is None
    with pytest.raises(ConfigError, match=r"--sp_size: .* 1x32x64,.* 2 .* 1 or 2,"):
        checked(**small, sp_size=3, sp_mode="ring")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert memory.advice(1.01 * halves) is None


def test_what_saving_takes_of_the_host(checked: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 gathers saved weights, on the writing rank or in parts on each; others copy for asynchronous saves."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    full = {"training_type": "full-finetune", "mixed_precision": "bf16"}

    def saving(**options: Any) -> tuple[float, float]:
        """What a process takes, and what of that only the one that writes takes; in checkpoints."""
        memory = RunMemory(checked(precompute_conditions=True, **options))
        plan, checkpoint = memory.plan(), memory.disk().checkpoint
        process = plan.host["checkpoint"] - plan.host["training_step"]
        alone = plan.written_alone
        assert plan.machine_bytes >= 4 * plan.host["training_step"] + 4 * (process - alone) + alone - 1
        return process / checkpoint, alone / checkpoint

    for is_async in (True, False):
        assert saving(fsdp="full", async_checkpointing=is_async) == pytest.approx((1, 1))
        assert saving(fsdp="full", async_checkpointing=is_async, **full) == pytest.approx((1 / 4, 0))
        alone = saving(fsdp="full", async_checkpointing=is_async, sharded_checkpoints=False, **full)
        assert alone == pytest.approx((1, 1))
    assert saving(async_checkpointing=True) == pytest.approx((1, 1))
    assert saving() == pytest.approx((1 / 3, 1 / 3))  # the weights, without two moments
    assert saving(use_ema=True, async_checkpointing=True, deepspeed=True) == pytest.approx((3 / 8, 3 / 8))  # 2 bytes, 4
    # of weights, moments and average, each of four bytes, the average is not divided
    assert saving(fsdp="full", use_ema=True, **full) == pytest.approx((1 / 4 + 3 / 16, 1 / 4))


def test_what_is_said(checked: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RunMemory(checked(precompute_conditions=True))
    monkeypatch.setattr("finetrainers.plan.throughput.planned_flops", lambda *_: memory.step_flops() / 7)
    found = memory.choose()
    plan, lines = found.plan, memory_lines(memory, found)
    assert max(map(len, lines)) <= 80
    assert any(line.endswith("< peak") for line in lines)
    [duration] = [line for line in lines if line.startswith("time, ")]
    assert duration.endswith(" 7 s")
    tokens = memory.checked.plan.heaviest(memory.checked.config)[1] * 2 * 2 * 2  # of 9x64x64
    assert memory.step_flops() > 4 * tokens * sum(p.numel() for p in memory.transformer.parameters()) / 2
    data = json.loads(json.dumps(as_json(memory, found, read_gpu("24GiB"), None)))
    assert data["fits"] is True
    assert data["peak"]["allocated"] == round(plan.peak)
    assert sum(data["phases"][plan.peak_phase]["parts"].values()) == pytest.approx(plan.peak, abs=10)
    assert fit_lines(memory, plan, read_gpu("24GB"), None)[0].startswith("it fits 24 GB (23.5 GiB)")


def test_a_budget_chooses(checked: Callable[..., ResolvedRun], capsys: pytest.CaptureFixture[str]) -> None:
    """The options that are chosen are those of the advice; what cannot fit is refused with ways out."""
    run = checked(precompute_conditions=True, batch_size=4)
    memory = RunMemory(run)
    needed = (1 + RESERVE) * memory.plan().peak / GIB
    assert within_budget(run) is run

    def with_budget(gib: float) -> ResolvedRun:
        section = run.config.memory.model_copy(update={"memory_budget": gib})
        config = run.config.model_copy(update={"memory": section})
        return memory_plan.replace(run, config=config)

    assert within_budget(with_budget(2 * needed)).config.memory.activation_memory is None
    assert f" of {2 * needed:g} GiB " in capsys.readouterr().out
    advice = RunMemory(with_budget(0.8 * needed)).advice(0.8 * needed)
    assert advice is not None
    assert (1 + RESERVE) * advice.outcome.peak <= 0.8 * needed * GIB
    assert RunMemory(run, gpu_gib=0.8 * needed).plan(advice.config).peaks == pytest.approx(dict(advice.outcome.peaks))
    with refused_options(("--memory_budget", "too_large")) as caught:
        within_budget(with_budget(1e-6))
    assert all(remedy in str(caught.value) for remedy in memory.other_remedies(memory.plan()))


def test_remedies_are_those_of_the_run(checked: Callable[..., ResolvedRun]) -> None:
    """What is set already, or cannot apply, is left out; the phase of the peak comes first."""
    memory = RunMemory(checked(precompute_conditions=True, validation_prompts="a cat@@@97x1024x1024",
                               validation_steps=1))  # fmt: skip
    plan = memory.plan()
    assert plan.peak_phase == "validation"
    sampled, *others = memory.other_remedies(plan)
    assert "--validation_prompts" in sampled
    absent = ("--training_type", "--batch_size", "--validation_prompts")
    assert [option for option in absent if option in " ".join(others)] == []
    full = RunMemory(checked(training_type="full-finetune", batch_size=2, fsdp="full", sp_size=1))
    text = " ".join(full.other_remedies(full.plan()))
    assert [option in text for option in (*absent, "--fsdp", "--sp_size")] == [True, True, False, False, True]
    rollouts = RunMemory(
        checked(family="hunyuan_video", method="grpo", rollout_size="17x128x128", reward=["brightness"])
    )
    assert "--rollout_size" in " ".join(rollouts.other_remedies(rollouts.plan()))


def test_advice_that_would_be_refused_is_not_given(checked: Callable[..., ResolvedRun]) -> None:
    """Compiled blocks cannot be swapped, nor this attention kept; on a CPU, nothing is chosen without a budget."""
    run = checked(compile="regional", precompute_conditions=True, batch_size=400, lora_autocast=False)
    memory = RunMemory(run)
    peak = memory.plan().peaks["training_step"]
    assert memory.plan().peak_phase == "training_step"
    chosen = memory.advice(with_reserve(0.99 * peak) / GIB)
    assert chosen is not None
    assert chosen.outcome.chosen["activation_memory"].startswith("checkpoint for ")
    for share in (0.9, 0.6, 0.3, 0.1):
        advice = memory.advice(share * with_reserve(peak) / GIB)
        assert advice is None or advice.config.memory.blocks_to_swap == 0
    plain = RunMemory(checked(precompute_conditions=True, batch_size=400))
    for device_type in ("cuda", "cpu"):
        advice = plain.advice(with_reserve(0.99 * plain.plan().peak) / GIB, device=TargetDevice(device_type))
        assert advice is not None
        assert advice.config.memory.activation_memory is None
        assert ("activation_memory" in advice.outcome.chosen) == (device_type == "cuda")  # by the run itself


def test_host_memory_decides_too(checked: Callable[..., ResolvedRun]) -> None:
    """`--host` says how much there is; where nothing fits, more of it is one of the ways."""
    run = checked(activation_memory="auto")
    large, small = (RunMemory(run, gpu_gib=1, host_gib=gib) for gib in (64, 32))
    assert large.machine is not None
    assert large.machine.host == 0.75 * 64 * GIB
    assert small.machine == replace(large.machine, host=large.machine.host / 2)
    assert "--host 64GB" in "\n".join(fit_lines(large, large.plan(), read_gpu("0.001"), None))


def test_a_run_that_fits_the_gpu_alone_lacks_host_memory(checked: Callable[..., ResolvedRun]) -> None:
    """The advice is about the host, and not about the GPU."""
    memory = RunMemory(checked(precompute_conditions=True, dataloader_num_workers=4), gpu_gib=24, host_gib=0.1)
    fitting, short, way_out = fit_lines(memory, memory.plan(), read_gpu("24GB"), None)
    assert fitting.startswith("it fits 24 GB ")
    assert "host memory" in short
    assert "--host" in way_out
    assert not any(remedy in way_out for remedy in memory.other_remedies(memory.plan()))


@pytest.mark.parametrize(
    ("options", "helps"),
    [
        ({}, True),
        ({"precompute_conditions": True}, True),
        ({"family": "hunyuan_video", "method": "grpo", "rollout_size": "17x128x128", "reward": ["brightness"]}, False),
    ],
)
def test_fewer_workers_are_a_remedy_where_they_decode(
    options: dict[str, Any], helps: bool, checked: Callable[..., ResolvedRun]
) -> None:
    memory = RunMemory(checked(dataloader_num_workers=4, **options), gpu_gib=24, host_gib=0.1)
    assert ("--dataloader_num_workers" in str(memory.host_problem(memory.plan()))) == helps


def test_the_network_is_built_once(
    checked: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start of a run its disk, its memory, and how it samples are planned with one network without weights."""
    run = checked(validation_prompts="a cat@@@9x64x64", validation_steps=1, seed=5)  # no earlier run has built this one
    built, original = [], ModelSpec.transformer_on_meta
    monkeypatch.setattr(ModelSpec, "transformer_on_meta", lambda spec: built.append(1) or original(spec))
    disk_needs(run, network_without_weights(run))
    print_planned(run)
    assert run_memory(run).choose().offloads_samples is None
    assert sum(built) == 1
    assert {p.device.type for p in network_without_weights(run).parameters()} == {"meta"}
    assert "memory, planned" in capsys.readouterr().out


def test_another_expert_is_in_it(checked: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """What only sampling needs is on the GPU while clips are sampled, and on the host otherwise."""
    prompts = {"validation_prompts": "a cat@@@9x64x64", "validation_steps": 1, "precompute_conditions": True}
    run = checked(**prompts)
    plain = RunMemory(run).plan()
    spec = run.family.load(run.config.model)
    facts = replace(spec.facts, companions=("text_encoder",))
    monkeypatch.setattr(ModelSpec, "facts", facts)
    found, size = RunMemory(run).plan(), frozen_bytes(spec, "text_encoder")
    assert found.peaks["validation"] == pytest.approx(plain.peaks["validation"] + size)
    assert found.peaks["training_step"] == plain.peaks["training_step"]
    assert found.host["training_step"] == pytest.approx(plain.host["training_step"] + size)
    assert found.host["validation"] == plain.host["validation"]
    alone = RunMemory(checked(**prompts, enable_model_cpu_offload=True)).plan()
    assert "text_encoder" not in alone.phases["validation"]


def test_rewards_at_work(checked: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"method": "grpo", "rollout_size": "17x128x128", "mixed_precision": "bf16", "reward": ["clipscore=1"]}
    plan = RunMemory(checked(family="hunyuan_video", **options)).plan()
    scoring = plan.phases["reward"][SCORING]
    assert scoring == 8 * 4 * 16.6 * 257 * 1024 * 4
    together = RunMemory(checked(family="hunyuan_video", overlap_rewards=True, **options)).plan()
    assert together.phases["rollout"][SCORING] == scoring
    assert together.peaks["rollout"] == pytest.approx(plan.peaks["rollout"] + scoring)
    small = {**options, "family": "hunyuan_video", "rollout_size": "17x64x64"}  # scoring takes most
    least = with_reserve(RunMemory(checked(reward_device="cpu", **small)).plan().peak) / GIB
    advice = RunMemory(checked(**small)).advice(1.01 * least)
    assert advice is not None
    assert "--reward_device cpu" in [one.switch.flags for one in advice.switches]
    elsewhere = checked(family="hunyuan_video", overlap_rewards=True, reward_device="cuda:1", **options)
    assert SCORING not in RunMemory(elsewhere).plan().phases["rollout"]
    monkeypatch.setattr(CLIPScore, "working_bytes", classmethod(lambda *args, **kwargs: None))
    assert SCORING in RunMemory(checked(family="hunyuan_video", **options)).plan().unknown


def test_reward_gradients_decode_with_a_backward_pass(checked: Callable[..., ResolvedRun]) -> None:
    options: dict[str, Any] = {
        "method": "refl", "rollout_size": "17x128x128", "mixed_precision": "bf16",
        "reward": ["clipscore=1", "brightness=1"],
        "num_generations": 1, "prompts_per_step": 4, "batch_size": 2,
    }  # fmt: skip

    def plan(**changes: Any) -> Any:
        return RunMemory(checked(family="hunyuan_video", **{**options, **changes})).plan()

    pixels, graph = 17 * 128 * 128, 2 * 352.0 * 257 * 1024 * 4  # of a frame of each clip
    scores = graph + 2 * 4 * 3 * pixels * 4.0
    decoder = 2 * (4610 + 36) * pixels
    one_frame = plan(reward_frames=1).phases["reward"]
    assert one_frame[SCORING] == pytest.approx(scores)
    assert DECODER not in one_frame  # its turn is when those are gone
    both = plan(reward_frames=1, reward=["clipscore=1", "aesthetic=1", "brightness=1"]).phases["reward"]
    assert both[SCORING] == pytest.approx(scores)  # one network after the other is recomputed
    alone = plan(reward=["brightness"]).phases["reward"]
    assert alone[DECODER] == pytest.approx(decoder)
    few = plan(reward=["brightness"], reward_frames=2).phases["reward"]
    assert few[DECODER] == pytest.approx(decoder * 5 / 17)
    stored = plan(checkpoint_vae=False).phases["reward"]
    assert stored[DECODER] == pytest.approx(2 * 18100 * pixels)
    assert stored[SCORING] > scores / 2
    latents = 16 * 5 * 16 * 16 * 4.0
    assert alone["sampled trajectories"] == pytest.approx(4 * 2 * latents)
    deep = plan(reward=["brightness"], draft_k=3)
    assert deep.phases["reward"]["sampled trajectories"] == pytest.approx(4 * 6 * latents)
    assert (
        deep.peaks["training_step"] - plan(reward=["brightness"]).peaks["training_step"] < 20 * latents
    )  # one step at a time


def test_compiling_is_left_out_and_said(checked: Callable[..., ResolvedRun]) -> None:
    memory = RunMemory(checked(compile="regional"))
    lines = memory_lines(memory, memory.choose())
    assert any(line.startswith("compiled blocks ") for line in lines)


def test_a_run_records_its_plan(checked: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of what is measured; without a GPU all of it is host memory."""
    run = checked()
    plan = RunMemory(run).plan()
    on_host = planned_peaks(run)
    assert on_host.keys() == plan.peaks.keys()
    size, host = plan.peaks["training_step"], plan.host["training_step"]
    assert on_host["training_step"] == {"host": pytest.approx((size + host) / GIB, abs=1e-4)}
    monkeypatch.setattr(memory_plan, "likely_device_type", lambda: "cuda")
    assert planned_peaks(run)["training_step"] == pytest.approx(
        {"allocated": size / GIB, "reserved": (1 + RESERVE) * size / GIB, "host": host / GIB}, abs=1e-4
    )
