"""What scoring takes: the formulas against counting, on the published networks' widths; weights in the hub's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CLIPConfig, CLIPModel, Qwen2VLConfig
from transformers.models.qwen2_vl import modeling_qwen2_vl

from finetrainers.config.rewards import RewardEntry
from finetrainers.memory.count import LiveStorages, StepShape, fake_weights
from finetrainers.rewards.hpsv3 import HPSv3, preference_head
from finetrainers.rewards.registry import graph_bytes, on_device, resolve_reward, reward_bytes, working_bytes
from finetrainers.rewards.videoalign import VideoAlign
from finetrainers.rewards.videoalign_model import RewardNetwork
from finetrainers.rewards.videoalign_model import working_bytes as qwen_bytes

L = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "hidden_act": "quick_gelu"}
H = {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16, "hidden_act": "gelu"}


@pytest.mark.parametrize(("reward", "vision"), [("clipscore", L), ("aesthetic", L), ("pickscore", H), ("hpsv2", H)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_clips(reward: str, vision: dict[str, object], dtype: str) -> None:
    """Of two layers: without backward, a layer leaves nothing."""
    entry = RewardEntry(name=reward, options={"dtype": dtype, "frames": "4"}, batch_size=2)
    config = CLIPConfig(
        text_config={"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 1},
        vision_config={**vision, "num_hidden_layers": 2, "patch_size": 14, "image_size": 224},
    )
    with torch.device("meta"):
        network = CLIPModel(config).eval().requires_grad_(False)
    computes = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake_weights(network, StepShape((1, 1, 1, 1), frozen=computes))
        live = LiveStorages()
        live.add([*network.parameters(), *network.buffers()])
        weights = live.live
        with live:
            ids = torch.ones(2, 77, dtype=torch.long)
            network(input_ids=ids, attention_mask=ids, pixel_values=torch.empty(2 * 4, 3, 224, 224, dtype=computes))
        counted = live.peak - weights
    assert working_bytes(entry, (49, 512, 768), fps=24.0) == pytest.approx(counted, rel=0.05)


@pytest.mark.rotating
@pytest.mark.parametrize(("reward", "vision", "layers"), [("clipscore", L, 24), ("pickscore", H, 32)])
def test_gradients_of_clips(reward: str, vision: dict[str, object], layers: int) -> None:
    """Of all layers of the network at one frame of each clip, each of which keeps what its backward needs."""
    entry = RewardEntry(name=reward, options={"frames": "4"}, batch_size=2)
    config = CLIPConfig(
        text_config={"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 1},
        vision_config={**vision, "num_hidden_layers": layers, "patch_size": 14, "image_size": 224},
    )
    with torch.device("meta"):
        network = CLIPModel(config).eval().requires_grad_(False)
    found = resolve_reward(reward)
    scorer: Any = object.__new__(found)
    scorer.frames, scorer.model, scorer._device = 2, network, torch.device("cpu")
    scorer.text = lambda prompts: torch.ones(len(prompts), config.projection_dim)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_weights(network, StepShape((1, 1, 1, 1), frozen=torch.float32))
        live = LiveStorages()
        videos = torch.empty(2, 2, 3, 224, 224, requires_grad=True)
        live.add([*network.parameters(), *network.buffers(), videos])
        before = live.live
        with live:
            score = scorer.differentiate(videos, ["", ""], fps=24.0)["score"]
            torch.autograd.grad(score.sum(), videos)
    assert graph_bytes(entry, (49, 512, 768), fps=24.0) == pytest.approx(live.peak - before, rel=0.05)


@pytest.mark.parametrize(("hidden", "intermediate", "heads"), [(1536, 8960, 12), (3584, 18944, 28)])
def test_the_language_model(hidden: int, intermediate: int, heads: int) -> None:
    config = qwen(hidden=hidden, intermediate=intermediate, heads=heads, width=1280)
    with torch.device("meta"):
        network = modeling_qwen2_vl.Qwen2VLModel(config).language_model.eval().requires_grad_(False)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake_weights(network, StepShape((1, 1, 1, 1), frozen=torch.bfloat16))
        live = LiveStorages()
        live.add([*network.parameters(), *network.buffers()])
        weights = live.live
        with live:
            embedded = torch.empty(4, 600, hidden, dtype=torch.bfloat16)
            merged = embedded.clone()
            places = torch.arange(600).expand(3, 4, 600)
            network(inputs_embeds=merged, position_ids=places, use_cache=False)
        counted = live.peak - weights
    planned = qwen_bytes(
        patches=0, rows=4, text_tokens=600, hidden=hidden, intermediate=intermediate, bytes_per_number=2
    )
    assert planned == pytest.approx(counted, rel=0.05)


def test_the_vision_tower() -> None:
    """For real, at the published width: its operations depend on numbers of patches, which fake tensors do not have."""
    config = qwen(hidden=64, intermediate=64, heads=4, width=1280)
    network = RewardNetwork(
        modeling_qwen2_vl.Qwen2VLModel(config).bfloat16(), preference_head(64).to_empty(device="cpu")
    )
    network.eval().requires_grad_(False)
    live = LiveStorages()
    live.add([*network.parameters(), *network.buffers()])
    weights = live.live
    with torch.no_grad(), live:
        patches, grids = torch.zeros(2 * 64, 1176), torch.tensor([[1, 8, 8]] * 2)
        tokens = torch.full((2, 20), 5)
        tokens[:, -4:] = 7
        network(tokens, patches, grids, vision_token=5, marks=[7])
    planned = qwen_bytes(patches=64, rows=2, text_tokens=4, hidden=64, intermediate=64, bytes_per_number=2)
    assert planned == pytest.approx(live.peak - weights, rel=0.05)


def qwen(*, hidden: int, intermediate: int, heads: int, width: int) -> Qwen2VLConfig:
    """Qwen2-VL with two layers of each kind."""
    half = hidden // heads // 2
    sections = [half // 4, (half - half // 4) // 2, half - half // 4 - (half - half // 4) // 2]
    return Qwen2VLConfig(
        text_config={
            "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads, "vocab_size": 16,
            "num_key_value_heads": 2, "num_hidden_layers": 2,
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": sections},
        },
        vision_config={
            "depth": 2, "embed_dim": width, "hidden_size": hidden, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14,
            "temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2,
        },
    )  # fmt: skip


def test_published_judges() -> None:
    """VideoAlign reads two frames a second, at least four: 512 tokens of a clip of 49 frames.

    HPSv3 reads four frames of 1024 patches.
    """
    clip = (49, 512, 768)
    align = VideoAlign.working_bytes({}, clip, clips=1, fps=24.0)
    assert align == pytest.approx(qwen_bytes(
        patches=2 * 26 * 38, rows=1, text_tokens=1150, hidden=1536, intermediate=8960, bytes_per_number=2,
    ), rel=0.2)  # fmt: skip
    assert HPSv3.working_bytes({"frames": "2"}, clip, clips=1, fps=24.0) == pytest.approx(
        HPSv3.working_bytes({}, clip, clips=1, fps=24.0) / 2
    )
    assert working_bytes(RewardEntry(name="brightness"), clip, fps=24.0) == 0
    assert working_bytes(RewardEntry(name="hpsv3", options={"device": "cpu"}), clip, fps=24.0) == 0
    assert resolve_reward("aesthetic").weights_options == ("path", "clip")


def test_weights_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id counts with what its cache holds, one format of two; nothing is asked of the hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    entry = RewardEntry(name="clipscore", options={"path": "someone/clip"})
    assert reward_bytes(entry) is None
    folder = tmp_path / "models--someone--clip"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert reward_bytes(entry) is None
    (snapshot / "model.safetensors").write_bytes(bytes(1000))
    (snapshot / "pytorch_model.bin").write_bytes(bytes(1001))
    assert reward_bytes(entry) == 1000
    aesthetic = RewardEntry(name="aesthetic", options={"path": "someone/clip", "clip": "someone/clip"})
    assert reward_bytes(aesthetic) == 2000
    # On a GPU that is named, all processes have their copies; a GPU that no process trains on is none of theirs.
    alone = working_bytes(entry, (9, 64, 64), fps=8.0)
    assert alone
    for device, processes, copies in (
        ("cuda:0", 1, 1),
        ("cuda:1", 1, 0),
        ("cuda:1", 4, 4),
        ("cuda:4", 4, 0),
        ("cpu", 4, 0),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        [placed] = on_device([entry], device)
        assert (reward_bytes(placed), working_bytes(placed, (9, 64, 64), fps=8.0)) == (1000 * copies, alone * copies)
