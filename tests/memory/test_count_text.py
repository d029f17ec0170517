"""What encoding texts takes: a few layers of the published encoders tell what all of them take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from published_networks import NETWORKS, published_model
from refusals import refused_options

from finetrainers.config.sections import ModelSection
from finetrainers.memory.count_text import count_encoder, text_working_bytes
from finetrainers.models.registry import get_family


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("network", "part", "tokens", "keeps_layers"),
    [
        ("LTX-Video", "text_encoder", 128, False),  # T5-XXL
        ("CogVideoX-5b", "text_encoder", 226, False),
        ("HunyuanVideo", "text_encoder", 351, True),  # Llama-8B
        ("HunyuanVideo", "text_encoder_2", 77, False),  # CLIP-L
    ],
)
def test_all_layers_take_what_a_few_tell(
    network: str, part: str, tokens: int, keeps_layers: bool, tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    published = NETWORKS[network]
    repo = published_model(tiny_repo(published.family, **published.tiny), tmp_path / "model", published)
    spec = get_family(published.family).load(
        ModelSection(model_name=published.family, pretrained_model_name_or_path=str(repo))
    )
    settings = spec.configs[part]
    whole = count_encoder(spec.parts[part], settings, tokens, keeps_layers=keeps_layers, batch=2, dtype=torch.bfloat16)
    assert text_working_bytes(spec, part, batch=2) == pytest.approx(whole, rel=0.01)
    assert text_working_bytes(spec, part, batch=8) == pytest.approx(4 * whole, rel=0.1)
    assert text_working_bytes(spec, "tokenizer", batch=8) == 0


def test_an_encoder_that_cannot_run_is_a_problem_of_its_option(tiny_repo: Callable[..., Path]) -> None:
    repo = tiny_repo("hunyuan_video")
    section = ModelSection(model_name="hunyuan_video", pretrained_model_name_or_path=str(repo))
    spec = get_family("hunyuan_video").load(section)
    spec.configs["text_encoder_2"] = {**spec.configs["text_encoder_2"], "eos_token_id": None}
    with refused_options(("--pretrained_model_name_or_path", "invalid")):
        text_working_bytes(spec, "text_encoder_2", batch=1)
