"""Block swap on the CPU, where a slot loses its numbers as early, and gets others as late, as a GPU's streams allow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from every_family import FAMILIES, deep_repo
from peft import LoraConfig
from published_networks import NETWORKS, published_repository
from torch import Tensor, nn

from finetrainers.config.load import load_config
from finetrainers.config.sections import ActivationMemory, ModelSection
from finetrainers.memory import block_swap
from finetrainers.memory.block_swap import BlockSwap, swap_blocks
from finetrainers.memory.casting import enable_layerwise_upcasting
from finetrainers.memory.checkpointing import set_activation_memory
from finetrainers.memory.count import StepShape, count_step
from finetrainers.memory.estimate import GIB, estimate_for
from finetrainers.memory.quantization import quantize_frozen
from finetrainers.memory.swap_plan import chosen_blocks, fewest_blocks, swap_sizes
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelSpec, PromptEmbeds, VideoMeta
from finetrainers.plan.trainable import make_trainable

CPU = torch.device("cpu")


def quantized(network: nn.Module) -> None:
    quantize_frozen(network, "int8", skip=["norm", "time_embed", "modulation"])


def upcast(network: nn.Module) -> None:
    """Each layer leaves a copy in 8 bits in memory of its own, which is let go after the block."""
    enable_layerwise_upcasting(
        network, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32, skip_modules_pattern=["norm"]
    )


@pytest.fixture(scope="module")
def spec_of(tiny_repo: Callable[..., Path]) -> Callable[[str], tuple[ModelSpec, PromptEmbeds]]:
    """`spec_of(family)`: a network of four or five blocks, and conditions for it."""
    made: dict[str, tuple[ModelSpec, PromptEmbeds]] = {}

    def build(family: str) -> tuple[ModelSpec, PromptEmbeds]:
        if family not in made:
            options = {f"text_encoder{end}_dtype": "fp32" for end in ("", "_2")}
            repo = str(deep_repo(tiny_repo, family, layers=5 if family == FAMILIES[0] else 4))  # odd and even
            spec = get_family(family).load(
                ModelSection(model_name=family, pretrained_model_name_or_path=repo, **options)
            )
            made[family] = spec, spec.encode_text(spec.load_text_encoders(), ["a red ball", "a dog runs"])
        return made[family]

    return build


def adapted(spec: ModelSpec, stored: ActivationMemory = "checkpoint") -> nn.Module:
    torch.manual_seed(0)
    network: Any = spec.load_transformer(torch.float32)
    network.requires_grad_(False)
    targets = [*spec.facts.lora_targets[:2]]
    network.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    set_activation_memory(network.train(), stored, blocks=spec.block_modules(network))
    return network


def passes(spec: ModelSpec, conditions: PromptEmbeds, network: Any) -> list[Tensor]:
    """All uses of a network in a run: two guidance passes, a reference without adapter, two micro-batches, a sample."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, spec.latent_channels(network), 3, 4, 4, generator=generator)
    t = torch.tensor([0.3, 0.7]) if spec.facts.is_flow else torch.tensor([300, 700])

    def predict() -> Tensor:
        return spec.predict(network, x, t, conditions, VideoMeta(fps=torch.tensor([8.0, 8.0])))

    with torch.no_grad():
        found = [predict(), predict()]
        network.disable_adapters()
        found.append(predict())
        network.enable_adapters()
    for _ in range(2):
        loss = predict().square().mean()
        loss.backward()
        found.append(loss.detach())
    with torch.no_grad():
        found.append(predict())
    return found + [p.grad for p in network.parameters() if p.requires_grad]


@pytest.mark.rotating
@pytest.mark.parametrize("stored", get_args(ActivationMemory))
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_the_same_bit_for_bit(family: str, stored: ActivationMemory, spec_of: Callable[..., Any]) -> None:
    spec, conditions = spec_of(family)
    expected = passes(spec, conditions, adapted(spec, stored))
    numbers = {3, len(spec.block_modules(spec.transformer_on_meta()))}  # odd and even, some and all
    # Each of them with every family and with every way to store, but not with both.
    for number in numbers if family == FAMILIES[0] else sorted(numbers)[stored in ("none", "offload") :][:1]:
        network = adapted(spec, stored)
        swap_blocks(network, spec.block_modules(network), number, CPU)
        found = passes(spec, conditions, network)
        assert len(found) == len(expected) > 6
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_freed_slots_are_filled_again(spec_of: Callable[..., Any]) -> None:
    """They are freed while the network is not used, with copies on their way, and take no memory until it is."""
    spec, conditions = spec_of("ltx_video")
    network = adapted(spec)
    swap = swap_blocks(network, spec.block_modules(network), 4, CPU)
    expected = passes(spec, conditions, network)
    slots = {w.untyped_storage()._cdata: w.untyped_storage() for w in swap.weights(network).values()}
    assert len(slots) == 2
    network.zero_grad()
    for _ in range(2):
        swap.release()
    assert [slot.size() for slot in slots.values()] == [0, 0]
    again = passes(spec, conditions, network)
    assert sum(slot.size() for slot in slots.values()) == swap.slot_bytes
    assert all(map(torch.equal, again, expected))


@pytest.mark.parametrize("stored", ["checkpoint", "none"])
def test_a_block_that_is_not_awaited_is_seen(
    stored: ActivationMemory, spec_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward it computes NaN; in backward, where no code asks for a saved weight's block, gradients are wrong."""
    spec, conditions = spec_of("ltx_video")
    network = adapted(spec, stored)
    swap = swap_blocks(network, spec.block_modules(network), 4, CPU)
    expected = passes(spec, conditions, network)
    require = BlockSwap._require
    if stored == "none":
        with monkeypatch.context() as patch:
            in_backward = block_swap._in_backward
            patch.setattr(BlockSwap, "_require", lambda self, n: None if in_backward() else require(self, n))
            network.zero_grad()
            assert not all(map(torch.equal, passes(spec, conditions, network), expected))
    monkeypatch.setattr(swap._copies, "wait", lambda index: None)
    assert passes(spec, conditions, network)[0].isnan().any()


def test_what_is_copied_and_held(spec_of: Callable[..., Any]) -> None:
    """Host to device only: all swapped blocks but two in forward and in backward, as planned; the slots stay."""
    spec, conditions = spec_of("hunyuan_video")  # two sizes of blocks
    network = adapted(spec)
    blocks = spec.block_modules(network)
    sizes = [float(block_swap._Layout(block).size) for block in blocks]
    swap = swap_blocks(network, blocks, 4, CPU)
    plan = swap_sizes(sizes, 4)
    assert (swap.host_bytes, swap.slot_bytes) == (plan.host, plan.slots)
    assert plan.slots == 2 * sizes[0] > 2 * sizes[-1]
    x, t = torch.randn(1, 16, 3, 4, 4), torch.tensor([0.5])
    for step in range(3):
        before = swap.copied_bytes
        spec.predict(network, x, t, conditions.rows(slice(0, 1)), VideoMeta(fps=torch.tensor([8.0]))).mean().backward()
        if step:  # the first one finds empty slots
            assert swap.copied_bytes - before == plan.copied
    resident = {id(p): p for p in network.parameters()}.values()
    assert {p.untyped_storage().data_ptr() for p in swap.weights(network).values()} == {
        slot.untyped_storage().data_ptr() for slot in swap._slots
    }
    assert not {p.untyped_storage().data_ptr() for p in resident if p.requires_grad} & {
        slot.untyped_storage().data_ptr() for slot in swap._slots
    }


@pytest.mark.parametrize("to_8_bits", [quantized, upcast])
def test_weights_in_8_bits_are_swapped_in_8_bits(
    to_8_bits: Callable[[nn.Module], None], spec_of: Callable[..., Any]
) -> None:
    spec, conditions = spec_of("ltx_video")
    network = adapted(spec)
    to_8_bits(network)
    expected = passes(spec, conditions, network)
    network = adapted(spec)
    to_8_bits(network)
    swap = swap_blocks(network, spec.block_modules(network), 5, CPU)
    for ours, theirs in zip(passes(spec, conditions, network), expected, strict=True):
        assert torch.equal(ours, theirs)
    swapped = swap.weights(network).values()
    assert {1, 4} == {weight.element_size() for weight in swapped}
    slots = {slot.untyped_storage().data_ptr() for slot in swap._slots}
    assert {weight.untyped_storage().data_ptr() for weight in swapped} == slots


class _Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def test_tensors_within_tensors_are_swapped() -> None:
    """Quantized weights of torchao are tensors that hold others."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        network = nn.Sequential(*(_Tanh() for _ in range(4))).requires_grad_(False)
        quantize_(network, Int8WeightOnlyConfig())
        return network

    def gradient(network: nn.Module) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
        out = network(x)
        out.square().sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad

    expected = gradient(build())
    network = build()
    swap = swap_blocks(network, list(network), 4, CPU)
    assert type(network[0].linear.weight) is not nn.Parameter
    assert len(block_swap._leaves(network[0].linear.weight)) > 1
    assert swap.slot_bytes < swap.host_bytes < 4 * 64 * 64 * 4
    for _ in range(2):
        assert all(map(torch.equal, gradient(network), expected))


def test_moving_the_network_leaves_swapped_weights_where_they_are(spec_of: Callable[..., Any]) -> None:
    """A pipeline moves parts between host and device; 24 GiB of masters must not come along."""
    spec, _ = spec_of("ltx_video")
    network = adapted(spec)
    swap = swap_blocks(network, spec.block_modules(network), 4, CPU)
    swapped = swap.weights(network)
    network.to("meta")
    assert swap.weights(network) == swapped
    where = {name: p.device.type for name, p in network.named_parameters()}
    assert {where.pop(name) for name in swapped} == {"cpu"}
    assert set(where.values()) == {"meta"}


@pytest.mark.rotating
def test_the_estimate_agrees_with_counting(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """The published network with three blocks of each kind, which is as many as a second counts."""
    network, number = NETWORKS["HunyuanVideo"], 5
    repo = published_repository(tiny_repo(network.family, **network.tiny), tmp_path, network.config)
    config = load_config(
        model_name=network.family, pretrained_model_name_or_path=str(repo), data_root=str(repo), rank=64,
        video_resolution_buckets=["x".join(map(str, network.bucket))], optimizer="adamw", blocks_to_swap=number,
        gradient_checkpointing=True,
    )  # fmt: skip
    family = get_family(network.family)
    geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
    meta = spec.transformer_on_meta()
    for blocks in spec.blocks:
        setattr(meta, blocks, getattr(meta, blocks)[:3])
    make_trainable(meta, config.training)
    latent = (spec.latent_channels(meta), *geometry.denoised_shape(*network.bucket))
    found = count_step(spec, meta, StepShape(latent, blocks_to_swap=number))
    planned = estimate_for(config, geometry, meta, spec=spec, bucket=network.bucket)
    trained = sum(p.numel() for p in meta.parameters() if p.requires_grad)
    in_slots = (planned.parts["frozen weights"] + planned.parts["slots of swapped blocks"]) * GIB
    assert found.weights - 4 * trained == pytest.approx(in_slots, rel=1e-3)
    counted = (found.weights + 8 * trained + max(found.forward, found.backward)) / GIB
    assert planned.total == pytest.approx(counted, rel=0.05)
    frozen = 2 * sum(p.numel() for p in meta.parameters() if not p.requires_grad)
    assert frozen == pytest.approx(planned.swap.host + planned.parts["frozen weights"] * GIB)
    assert planned.swap.lines()


def test_which_blocks_and_how_many() -> None:
    assert chosen_blocks(60, 20) == list(range(1, 60, 3))
    assert chosen_blocks(5, 5) == [0, 1, 2, 3, 4]
    assert chosen_blocks(5, 3) == [0, 2, 4]
    sizes = swap_sizes([4.0, 4.0, 1.0, 1.0], 4)
    assert (sizes.host, sizes.slots, sizes.copied) == (10.0, 8.0, 2.0 + 8.0)
    assert swap_sizes([4.0], 0).lines() == []
    for least, expected in {0: 0, 1: 3, 3: 3, 5: 5, 10: 10, 11: None}.items():
        assert fewest_blocks(10, lambda n, least=least: n >= least) == expected  # type: ignore[misc]
    uneven = [3.0] * 20 + [1.0] * 40  # two kinds of blocks
    saved = [sizes.host - sizes.slots for sizes in (swap_sizes(uneven, number) for number in range(3, 61))]
    assert saved == sorted(saved)
