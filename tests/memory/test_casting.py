"""8-bit storage of a frozen base under a LoRA, on real transformers of every family."""

from __future__ import annotations

import pytest
import torch
from adapted_network import distance, run, transformer
from every_family import FAMILIES
from refusals import refused

from finetrainers.config.sections import MemorySection, ModelSection
from finetrainers.memory.casting import cast_adapter_for_each_use, castable_layers, enable_layerwise_upcasting
from finetrainers.memory.checkpointing import set_activation_memory

SKIP = MemorySection.model_fields["layerwise_upcasting_skip_modules_pattern"].default
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(("storage", "bound"), [(FP8, 0.12), (torch.float8_e5m2, 0.25)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_weights_are_stored_in_8_bits_and_gradients_survive(
    storage: torch.dtype, bound: float, autocast: bool, checkpointing: bool
) -> None:
    wanted_output, wanted = run(transformer(torch.float32), torch.float32)

    network = transformer(torch.bfloat16)
    adapter = {n: p.detach().clone() for n, p in network.named_parameters() if p.requires_grad}
    names = enable_layerwise_upcasting(
        network, storage_dtype=storage, compute_dtype=torch.bfloat16, skip_modules_pattern=SKIP
    )
    set_activation_memory(network, "checkpoint" if checkpointing else "none")
    for _ in range(2):  # the second pass starts from weights that were cast back
        output, gradients = run(network, torch.bfloat16, autocast=autocast)
        assert distance([output], [wanted_output]) < bound
        assert distance(gradients, wanted) < 2 * bound
        for name, parameter in network.named_parameters():
            if name in adapter:
                assert parameter.dtype == torch.float32
                assert torch.equal(parameter, adapter[name])
            else:
                assert parameter.dtype == (storage if name.rpartition(".")[0] in names else torch.bfloat16), name
    assert "transformer_blocks.1.attn1.to_q.base_layer" in names
    assert "transformer_blocks.0.ff.net.2" in names
    assert not any("norm" in n or "lora" in n or n in ("proj_in", "proj_out") for n in names)


def test_upcasting_equals_training_on_rounded_weights() -> None:
    """Storage in 8 bits does what rounding the weights once does, and nothing else: bit for bit."""
    stored, rounded = transformer(torch.bfloat16), transformer(torch.bfloat16)
    names = enable_layerwise_upcasting(
        stored, storage_dtype=FP8, compute_dtype=torch.bfloat16, skip_modules_pattern=SKIP
    )
    for name in names:
        for parameter in rounded.get_submodule(name).parameters():
            parameter.data = parameter.data.to(FP8).to(torch.bfloat16)
    output, gradients = run(stored, torch.bfloat16)
    wanted_output, wanted = run(rounded, torch.bfloat16)
    assert torch.equal(output, wanted_output)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_is_saved_only_with_checkpointing(checkpointing: bool) -> None:
    """Cast weights that autograd still holds after forward."""
    network = transformer(torch.bfloat16)
    enable_layerwise_upcasting(network, storage_dtype=FP8, compute_dtype=torch.bfloat16, skip_modules_pattern=SKIP)
    set_activation_memory(network, "checkpoint" if checkpointing else "none")
    weight = network.transformer_blocks[0].ff.net[2].weight
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if sorted(tensor.shape) == sorted(weight.shape) and tensor.dtype == torch.bfloat16:
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        network(
            hidden_states=torch.randn(1, 12, 8, dtype=torch.bfloat16),
            encoder_hidden_states=torch.randn(1, 5, 16, dtype=torch.bfloat16),
            timestep=torch.tensor([300.0]), encoder_attention_mask=torch.ones(1, 5),
            num_frames=3, height=2, width=2, rope_interpolation_scale=(1 / 3, 32, 32),
        )  # fmt: skip
    assert bool(held) != checkpointing


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_layers_to_cast(family: str, tiny_repo) -> None:
    from finetrainers.models.registry import get_family

    spec = get_family(family).load(
        ModelSection(model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)))
    )
    network = spec.transformer_on_meta().requires_grad_(False)
    names = [name for name, _ in castable_layers(network, skip_modules_pattern=SKIP)]
    assert any(name.startswith(f"{spec.blocks[0]}.0.") for name in names)
    assert not any("norm" in name or name == "proj_out" for name in names)


def test_refuses_when_nothing_can_be_cast() -> None:
    options = {"storage_dtype": FP8, "compute_dtype": torch.bfloat16}
    with refused("invalid", "layerwise_upcasting_skip_modules_pattern", list(SKIP)):
        enable_layerwise_upcasting(transformer(torch.bfloat16, adapter=False), **options, skip_modules_pattern=SKIP)
    with refused("invalid", "layerwise_upcasting_skip_modules_pattern", ["."]):
        enable_layerwise_upcasting(transformer(torch.bfloat16), **options, skip_modules_pattern=["."])


def _with_adapter(dtype: torch.dtype) -> torch.nn.Module:
    network = transformer(dtype)
    cast_adapter_for_each_use(network)
    return network


def test_without_autocast_gradients_are_as_exact_as_under_it() -> None:
    """Against fp32; the adapter's weights and gradients stay fp32."""
    exact_output, exact = run(transformer(torch.float32), torch.float32)
    output, gradients = run(transformer(torch.bfloat16), torch.bfloat16, autocast=True)
    ours, own_gradients = run(_with_adapter(torch.bfloat16), torch.bfloat16)
    assert distance([ours], [exact_output]) < 1.5 * distance([output], [exact_output])
    assert distance(own_gradients, exact) < 1.5 * distance(gradients, exact)
    assert {gradient.dtype for gradient in own_gradients} == {torch.float32}
    in_fp32, fp32_gradients = run(_with_adapter(torch.float32), torch.float32)
    assert torch.equal(in_fp32, exact_output)
    assert all(torch.equal(a, b) for a, b in zip(fp32_gradients, exact, strict=True))
    names = transformer(torch.bfloat16).state_dict().keys()
    assert _with_adapter(torch.bfloat16).state_dict().keys() == names


def test_without_autocast_no_activation_is_stored_in_fp32_for_the_adapter() -> None:
    held: list[torch.Tensor] = []
    layer = _with_adapter(torch.bfloat16).transformer_blocks[0].attn1.to_q
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        assert layer(x).dtype == torch.bfloat16
    assert {tensor.dtype for tensor in held} == {torch.bfloat16}
