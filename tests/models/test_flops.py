"""The formulas of operations against PyTorch's own counter, on published networks without weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published_networks import NETWORKS, published_repository
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from finetrainers.config.load import load_config
from finetrainers.models.flops import FlopMeter, Flops, Tokens
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelSpec
from finetrainers.plan.trainable import make_trainable

aten = torch.ops.aten
MEMORY_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "memory-estimate.md"


def _forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _backward(gradient: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, q, k, v)


#: PyTorch's counter does not know the CPU's attention.
CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def counted(spec: ModelSpec, network: nn.Module, latent: tuple[int, ...], clips: int) -> tuple[float, float]:
    """Operations of forward and of backward, by PyTorch."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in network.modules():
            for name, tensor in list(module._parameters.items()):
                if tensor is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(tensor.shape), tensor.requires_grad)
            for name, tensor in list(module._buffers.items()):
                if tensor is not None:
                    module._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        conditions, meta = spec.empty_inputs(clips)
        tensors = {n: t if t.dtype == torch.bool else t.float() for n, t in conditions.tensors.items()}
        conditions = type(conditions)(tensors, conditions.lengths)
        x = torch.empty(clips, *latent)
        t = torch.zeros(clips, dtype=torch.float32 if spec.facts.is_flow else torch.long)
        with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as forward:
            prediction = spec.predict(network, x, t, conditions, meta)
        with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as backward:
            prediction.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


#: The two of CogVideoX differ in their sizes alone.
CASES = [
    (name, training_type)
    for name in NETWORKS
    for training_type in ("lora", "full-finetune")
    if (name, training_type) not in (("CogVideoX-2b", "full-finetune"), ("CogVideoX-5b", "lora"))
]


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "training_type"), CASES)
def test_formula_agrees_with_the_counter(
    name: str, training_type: str, tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """Forward exactly. Backward of one more block exactly, of all within 1 %: first inputs may need none."""
    published = NETWORKS[name]
    repo = published_repository(tiny_repo(published.family, **published.tiny), tmp_path, published.config)
    config = load_config(
        model_name=published.family, pretrained_model_name_or_path=str(repo), data_root=str(repo), rank=64,
        training_type=training_type, target_modules=[*get_family(published.family).facts.lora_targets],
    )  # fmt: skip
    family = get_family(published.family)
    geometry, spec = family.facts_of(config.model).geometry, family.load(config.model)
    latent, found = geometry.denoised_shape(*published.bucket), {}
    for depth in (2, 3):
        network = spec.transformer_on_meta()
        for blocks in spec.blocks:
            setattr(network, blocks, getattr(network, blocks)[:depth])
        make_trainable(network, config.training)
        flops = spec.flops(network)
        assert flops is not None
        calls: list[Tokens] = []

        def note(module: Any, args: Any, kwargs: Any, calls: list[Tokens] = calls) -> None:
            calls.append(spec.count_tokens(module, kwargs))

        network.register_forward_pre_hook(note, with_kwargs=True)
        found[depth] = counted(spec, network, (spec.latent_channels(network), *latent), clips=2)
        [tokens] = calls
        times = 1 if spec.noise_per == "clip" else latent[0]
        assert (tokens.clips, tokens.video, tokens.times) == (2, geometry.num_tokens(*published.bucket), times)
        found[depth] = (*found[depth], flops.of_forward(tokens), flops.of_backward(tokens))
    forward, backward, our_forward, our_backward = found[3]
    assert our_forward == forward
    assert our_backward - found[2][3] == backward - found[2][1]
    depth = max(len(getattr(spec.transformer_on_meta(), blocks)) for blocks in spec.blocks)
    whole = backward + (depth - 3) * (backward - found[2][1])
    assert our_backward - backward == pytest.approx(0, abs=0.01 * whole)


@pytest.mark.rotating
def test_what_recomputing_costs_is_documented(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    found = re.findall(r"^\| (\S+) \| (\S+) \| (\d+)% \| (\d+)% \| (\d+)% \|$", MEMORY_PAGE.read_text("utf-8"), re.M)
    sizes = ((49, 512, 768), (49, 480, 720), (129, 720, 1280), (121, 704, 1216))
    cases = [
        ("LTX-Video", sizes[0]),
        ("LTX-Video", sizes[3]),
        ("CogVideoX-5b", sizes[1]),
        ("HunyuanVideo", sizes[0]),
        ("HunyuanVideo", sizes[2]),
    ]
    expected = []
    for name, size in cases:
        published = NETWORKS[name]
        repo = published_repository(
            tiny_repo(published.family, **published.tiny), tmp_path / str(len(expected)), published.config
        )
        config = load_config(
            model_name=published.family, pretrained_model_name_or_path=str(repo), data_root=str(repo), rank=128
        )
        family = get_family(published.family)
        spec, network = family.load(config.model), family.load(config.model).transformer_on_meta()
        make_trainable(network, config.training)
        flops = spec.flops(network)
        assert flops is not None
        tokens = Tokens(1, family.facts_of(config.model).geometry.num_tokens(*size), published.text["prompt_embeds"][0])
        attention, forward = flops.of_attention(tokens), flops.of_forward(tokens)
        step = forward + flops.of_backward(tokens)
        shares = (attention / forward, forward / step, (forward - attention) / step)
        expected.append((name, "x".join(map(str, size)), *(f"{100 * share:.0f}" for share in shares)))
    assert found == expected


def test_meter_by_hand() -> None:
    flops = Flops({"video": 2.0, "prompt": 3.0}, {"video": 4.0}, [("video", "prompt", 5)], [("video", "prompt", 5)])
    meter = FlopMeter(flops, lambda call: Tokens(clips=call["clips"], video=10, text=3))
    forward = 10 * 2 + 3 * 3 + 4 * 10 * 3 * 5
    backward = 10 * 4 + 2.5 * 4 * 10 * 3 * 5
    meter.add({"clips": 2}, trains=False)
    assert meter.take() == {"flops": 2 * forward, "tokens": 0}
    meter.add({"clips": 2}, trains=True)
    meter.add({"clips": 1}, trains=True)
    assert meter.take() == {"flops": 3 * (forward + backward), "tokens": 30}
    assert meter.take() == {"flops": 0, "tokens": 0}
