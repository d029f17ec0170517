"""The memory estimate: against hand arithmetic, counted activations, and published measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel, HunyuanVideoTransformer3DModel, LTXVideoTransformer3DModel
from peft import LoraConfig

from finetrainers.config.facts import Activations
from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import MemorySection, ModelSection
from finetrainers.memory.casting import castable_layers
from finetrainers.memory.estimate import GIB, Workload, estimate, estimate_for
from finetrainers.models.registry import get_family
from finetrainers.parallel.sharding import ShardingSpec


def activations(family: str, training_type: str = "lora") -> Activations:
    """What was counted on the family's networks."""
    return get_family(family).load(config_for(model_name=family).model).activations[training_type]


@dataclass(frozen=True)
class Published:
    """One published peak (`max_memory_reserved`, GiB), with what the measured run trained.

    Only runs whose peak lies above the memory reserved before training: of the others, the peak is that of loading.
    Their adapters were bf16: memory grows by 4 bytes per LoRA weight (two bf16 moments) at the first step.
    """

    row: str
    gib: float
    params: int
    family: str
    blocks: tuple[int, ...]
    hidden: int
    tokens: int
    lora: int
    batch_size: int = 1
    checkpointing: bool = True

    def estimate(self) -> float:
        return estimate(
            Workload(
                frozen_bytes=2 * self.params, num_trainable=self.lora, num_blocks=self.blocks, hidden=self.hidden,
                num_tokens=self.tokens, batch_size=self.batch_size, trainable_bytes=2, optimizer_bytes=4,
                stored="checkpoint" if self.checkpointing else "none",
                activations=activations(self.family),
            )
        ).total  # fmt: skip


COG_TOKENS = 13 * 30 * 45  # 49x480x720
COG_2B = {"family": "cogvideox", "params": 1_693_783_872, "blocks": (30,), "hidden": 1920, "tokens": COG_TOKENS}
COG_5B = {"family": "cogvideox", "params": 5_570_283_072, "blocks": (42,), "hidden": 3072, "tokens": COG_TOKENS}
HUNYUAN = {
    "family": "hunyuan_video", "params": 12_821_012_544, "blocks": (20, 40), "hidden": 3072, "tokens": 13 * 32 * 48,
}  # fmt: skip  # 49x512x768


def cog(name: str, model: dict[str, int], rank: int, gib: float, **options: object) -> Published:
    return Published(
        f"{name} LoRA r{rank}", gib, **model, lora=8 * rank * sum(model["blocks"]) * model["hidden"], **options
    )


PUBLISHED = [
    cog("CogVideoX-2b", COG_2B, 16, 43.764, checkpointing=False),
    cog("CogVideoX-2b", COG_2B, 64, 44.314, checkpointing=False),
    cog("CogVideoX-2b", COG_2B, 256, 45.826, checkpointing=False),
    cog("CogVideoX-2b", COG_2B, 16, 21.803, batch_size=4),
    cog("CogVideoX-2b", COG_2B, 64, 22.254, batch_size=4),
    cog("CogVideoX-2b", COG_2B, 256, 22.020, batch_size=4),
    cog("CogVideoX-5b", COG_5B, 64, 20.818),
    cog("CogVideoX-5b", COG_5B, 256, 22.119),
    cog("CogVideoX-5b", COG_5B, 16, 46.492, batch_size=4),
    cog("CogVideoX-5b", COG_5B, 64, 47.805, batch_size=4),
    cog("CogVideoX-5b", COG_5B, 256, 47.268, batch_size=4),
    Published("HunyuanVideo LoRA r128", 42.387, **HUNYUAN, lora=163_577_856),
]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda c: f"{c.row}-b{c.batch_size}-{c.checkpointing}")
def test_published_peaks(case: Published) -> None:
    """Published is what the allocator reserved; the estimate is what is allocated, up to 16 % less."""
    assert -0.16 < case.estimate() / case.gib - 1 < 0.0


LTX = {
    "family": "ltx_video",
    "params": 1_923_385_472,
    "blocks": (28,),
    "hidden": 2048,
    "tokens": 7 * 16 * 24,
}  # 49x512x768
# Shape, LoRA weights at rank 128, weights that upcasting stores in 8 bits.
SIZES = {
    "LTX-Video": (LTX, 117_440_512, 1_892_380_672),
    "CogVideoX-5b": (COG_5B, 132_120_576, 4_757_501_952),
    "HunyuanVideo": (HUNYUAN, 163_577_856, 9_094_047_744),
}


def test_sizes_are_those_of_the_published_models() -> None:
    """Diffusers' defaults are the published networks but for the options given here."""
    five_b = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
    with torch.device("meta"):
        networks = {
            "LTX-Video": LTXVideoTransformer3DModel(),
            "CogVideoX-5b": CogVideoXTransformer3DModel(**five_b),
            "HunyuanVideo": HunyuanVideoTransformer3DModel(guidance_embeds=True),
        }
    skip = MemorySection.model_fields["layerwise_upcasting_skip_modules_pattern"].default
    for name, network in networks.items():
        shape, lora, castable = SIZES[name]
        assert sum(p.numel() for p in network.parameters()) == shape["params"]
        network.requires_grad_(False)
        layers = castable_layers(network, skip_modules_pattern=skip)
        assert sum(p.numel() for _, layer in layers for p in layer.parameters()) == castable
        targets = ("to_q", "to_k", "to_v", "to_out.0")
        linear = [m for n, m in network.named_modules() if n.endswith(targets) and isinstance(m, torch.nn.Linear)]
        assert sum(128 * (m.in_features + m.out_features) for m in linear) == lora


def test_by_hand() -> None:
    """A thousand-token model whose every number can be done in the head: U = 2 * 1024 * 512 * 2 bytes = 2 MiB."""
    workload = Workload(
        frozen_bytes=3 * GIB, num_trainable=2**27, num_blocks=(256, 256), hidden=512, num_tokens=1024, batch_size=2,
        ema=True,
        activations=Activations(kept=(20.0, 22.0), outside=8.0, checkpointed=1.0, forward=16.0, backward=32.0),
    )  # fmt: skip
    plan = estimate(workload)
    assert (
        plan.parts["frozen weights"],
        plan.parts["trainable weights"],
        plan.parts["gradients"],
        plan.parts["optimizer state"],
        plan.parts["moving average"],
    ) == (3, 0.5, 0.5, 1, 0.5)
    assert (plan.parts["autocast copies"], plan.parts["activations kept"]) == (0.25, 1)
    # 1.25 + 16 U in forward, with the copies that autocast makes; 1 + 32 U in backward.
    assert plan.total == pytest.approx(5 + 1.25 + 16 * 2 / 1024)
    assert plan.parts["one block in backward"] == pytest.approx(32 * 2 / 1024)
    assert estimate(replace(workload, accumulates=True)).total == pytest.approx(plan.total + 0.5)
    few = replace(workload, num_blocks=(2, 2))
    assert estimate(few).total == pytest.approx(5 + 0.5 + 32 * 2 / 1024)  # gradients outweigh activations
    assert estimate(replace(few, accumulates=True)).total == pytest.approx(
        5 + 0.5 + (4 + 32) * 2 / 1024 + 0.22, abs=0.04
    )
    assert estimate(replace(workload, gradients_stay=False)).parts["gradients"] == 0
    assert estimate(replace(workload, trainable_bytes=2)).parts["autocast copies"] == 0

    eager = estimate(replace(workload, stored="none"))
    assert eager.parts["activations kept"] == (20 + 22) / 2
    assert eager.parts["one block in backward"] == pytest.approx(8 * 2 / 1024)
    assert eager.total == pytest.approx(5 + 21 + 0.25 + 8 * 2 / 1024)
    assert [name for name, size in plan.parts.items() if size][:2] == ["frozen weights", "trainable weights"]


def test_known_sizes() -> None:
    """HunyuanVideo: 25.64 GB of bf16 weights; block inputs of 9.9 GB at 49x544x960 and 44.2 GB at 129x720x1280."""
    for frames, height, width, inputs in ((49, 544, 960, 9.9), (129, 720, 1280, 44.2)):
        tokens = Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=24.0).num_tokens(frames, height, width)
        plan = estimate(
            Workload(
                frozen_bytes=2 * HUNYUAN["params"],
                num_trainable=1,
                num_blocks=(20, 40),
                hidden=3072,
                num_tokens=tokens,
                activations=activations("hunyuan_video"),
            )
        )
        assert plan.parts["frozen weights"] * GIB / 1e9 == pytest.approx(25.64, abs=0.01)
        assert plan.parts["activations kept"] * GIB / 1e9 == pytest.approx(inputs, abs=0.06)


def test_what_processes_share() -> None:
    """HunyuanVideo's 12.8 billion weights, all trained, on six GPUs."""
    with torch.device("meta"):
        network = HunyuanVideoTransformer3DModel(guidance_embeds=True)
    weights = HUNYUAN["params"] / GIB
    spec = get_family("hunyuan_video").load(config_for().model)
    geometry = Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=24.0)

    def plan(split: ShardingSpec, **options: object):
        config = config_for(
            training_type="full-finetune", optimizer="adamw", mixed_precision="bf16", gradient_checkpointing=True,
            gradient_accumulation_steps=5, **options,
        )  # fmt: skip
        return estimate_for(config, geometry, network, spec=spec, bucket=(49, 384, 384), split=split)

    alone = plan(ShardingSpec())
    names = ("trainable weights", "optimizer state", "gradients", "gathered weights")
    assert [alone.parts[name] for name in names] == [4 * weights, 8 * weights, 4 * weights, 0.0]
    copied = plan(ShardingSpec(copies_gradients=True))
    assert copied.parts["gradient buffers"] == 4 * weights
    assert copied.total == pytest.approx(alone.total + 4 * weights)
    fsdp = ShardingSpec(weights=6, gradients=6, optimizer=6, gathers=True, keeps_gradients=True)
    whole, shared = plan(fsdp), plan(replace(fsdp, keeps_gradients=False))
    for found in (whole, shared):
        assert (found.parts["trainable weights"], found.parts["optimizer state"]) == pytest.approx(
            (4 * weights / 6, 8 * weights / 6)
        )
        assert found.parts["autocast copies"] == 0  # weights arrive in bf16
        assert found.parts["activations kept"] == alone.parts["activations kept"]
        assert found.parts["one block in backward"] == pytest.approx(
            alone.parts["one block in backward"] * 40.0 / 42.6  # weights that compute are bf16
        )
    assert whole.parts["gradients, whole"] == 4 * weights == pytest.approx(47.8, abs=0.1)
    assert shared.parts["gradients"] == pytest.approx(4 * weights / 6)
    # Unsharded gradients need no buffer to be summed in. Otherwise the peak is at the last block but one, with the
    # inputs of 59: half of its gradients are made, and those of the last are summed. Shares of all exist.
    block, outside = 339_831_296 / GIB, 360_714_304 / GIB
    kept = shared.parts["activations kept"] * 59 / 60 + shared.parts["one block in backward"]
    single = 141_576_448 / GIB
    assert shared.total == pytest.approx(16 * weights / 6 + kept + 2 * outside + (4 + 4 + 1) * single, rel=1e-4)
    assert f"{whole.parts['gradients, whole']:.2f}" == "47.76"
    assert f"{shared.parts['gradients']:.2f}" == "7.96"
    # Two of the largest blocks and weights outside of blocks in bf16, gradients of one block in fp32, of half a block
    # in bf16.
    assert shared.parts["gathered weights"] == pytest.approx(2 * outside + (4 + 4 + 1) * block)
    assert whole.parts["gathered weights"] == pytest.approx(2 * outside + 4 * block)
    stays = plan(replace(fsdp, reshards=False))
    assert stays.parts["gathered weights"] == pytest.approx(2 * weights)  # all of them in bf16
    host = plan(replace(fsdp, keeps_gradients=False, weights_on_host=True, optimizer_on_host=True))
    assert (host.parts["trainable weights"], host.parts["optimizer state"], host.parts["gradients"]) == (0, 0, 0)
    assert (
        plan(replace(fsdp, weights_on_host=True, optimizer_on_host=True)).parts["gradients, whole"]
        == whole.parts["gradients, whole"]
    )
    zero = plan(ShardingSpec(gradients=6, optimizer=6, zero_stage=2))
    assert (zero.parts["trainable weights"], zero.parts["optimizer state"], zero.parts["gradients"]) == pytest.approx(
        (2 * weights, 12 * weights / 6, 2 * weights / 6)
    )
    bucket = plan(ShardingSpec(gradients=6, optimizer=6, zero_stage=2, buffer_numbers=500_000_000))
    assert bucket.parts["gathered weights"] == 0
    assert bucket.parts["gradients being averaged"] == pytest.approx((2e9 + 2 * HUNYUAN["params"] / 6) / GIB)  # in bf16
    third = plan(ShardingSpec(
        weights=6, gradients=6, optimizer=6, zero_stage=3, gathers=True, live_weights=10**9, buffer_numbers=500_000_000
    ))  # fmt: skip
    assert third.parts["gathered weights"] == pytest.approx(2e9 / GIB)
    assert (third.parts["gradients"], third.parts["gradient buffers"]) == pytest.approx(
        (0, 1e9 / GIB + 2 * weights / 6)
    )
    # An update takes the averaged gradients twice in bf16 and once in fp32, here of all trained weights.
    alone = plan(ShardingSpec(zero_stage=2, buffer_numbers=500_000_000))
    assert alone.total == pytest.approx(14 * weights + 8 * weights, rel=1e-3)


def config_for(**options: object) -> TrainConfig:
    return load_config(**{"model_name": "ltx_video", "pretrained_model_name_or_path": "somewhere", **options})


def test_estimate_for_a_configured_run(tiny_repo) -> None:
    family = get_family("ltx_video")
    config = config_for(batch_size=2, gradient_checkpointing=True, optimizer="adamw", rank=4)
    model = ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(tiny_repo("ltx_video")))
    network = family.load(model).transformer_on_meta().requires_grad_(False)
    network.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    sizes = {flag: sum(p.numel() for p in network.parameters() if p.requires_grad == flag) for flag in (True, False)}
    hidden = network.config.num_attention_heads * network.config.attention_head_dim
    tokens = family.facts.geometry.num_tokens(49, 512, 768)
    assert tokens == 7 * 16 * 24

    plan = estimate_for(config, family.facts.geometry, network, spec=family.load(config.model), bucket=(49, 512, 768))
    assert plan == estimate(
        Workload(
            frozen_bytes=2 * sizes[False], num_trainable=sizes[True], num_blocks=(len(network.transformer_blocks),),
            hidden=hidden, num_tokens=tokens, batch_size=2, activations=activations("ltx_video"),
        )
    )  # fmt: skip

    def changed(**options: object) -> TrainConfig:
        return config_for(batch_size=2, gradient_checkpointing=True, rank=4, **{"optimizer": "adamw", **options})

    def run(**options: object):
        return estimate_for(
            changed(**options), family.facts.geometry, network, spec=family.load(config.model), bucket=(49, 512, 768)
        )

    assert (
        plan.parts["frozen weights"] / 2
        < run(layerwise_upcasting_modules=["transformer"]).parts["frozen weights"]
        < plan.parts["frozen weights"]
    )
    assert run(use_8bit_bnb=True).parts["optimizer state"] == pytest.approx(
        plan.parts["optimizer state"] * (2 + 8 / 256) / 8
    )
    assert run(use_cpu_offload_optimizer=True).parts["optimizer state"] == 0
    assert run(use_cpu_offload_optimizer=True, offload_gradients=True).parts["gradients"] == 0
    assert run(gradient_accumulation_steps=2).total == pytest.approx(plan.total + plan.parts["gradients"])
    assert run(use_ema=True).parts["moving average"] == plan.parts["trainable weights"]

    network.requires_grad_(True)
    full = run(training_type="full-finetune")
    assert full.parts["frozen weights"] == 0
    assert full.parts["one block in backward"] == pytest.approx(
        plan.parts["one block in backward"]
        * activations("ltx_video", "full-finetune").backward
        / activations("ltx_video").backward
    )
    rounded = run(training_type="full-finetune", master_weights="stochastic_rounding")
    assert rounded.parts["trainable weights"] == full.parts["trainable weights"] / 2
    assert rounded.parts["optimizer state"] == full.parts["optimizer state"] / 2
    network.transformer_blocks[0].ff.requires_grad_(False)  # as weights that predictions do not depend on
    left = sum(p.numel() for p in network.parameters() if not p.requires_grad)
    for values, width in (({}, 4), ({"master_weights": "stochastic_rounding"}, 2)):
        frozen = run(training_type="full-finetune", **values).parts["frozen weights"]
        assert frozen == width * left / GIB, "loaded in the dtype of the others"
    network.requires_grad_(True)
    low = run(training_type="full-finetune", master_weights="stochastic_rounding", optimizer="adamw-torchao-4bit")
    assert low.parts["optimizer state"] == pytest.approx(full.parts["optimizer state"] * (1 + 8 / 128) / 8)
