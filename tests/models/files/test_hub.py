"""Models from a hub, here a server on loopback: gated, busy, broken off, gone, and not asked at all."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from loopback_hub import REPO, Hub
from refusals import refused_options

from finetrainers.config.sections import ModelSection
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelSpec
from finetrainers.utils.failures import Kind

MODEL = "--pretrained_model_name_or_path"


def spec_in(cache_dir: Path) -> ModelSpec:
    model = ModelSection(
        model_name="ltx_video", pretrained_model_name_or_path=REPO, cache_dir=cache_dir, vae_dtype="fp32"
    )
    return get_family("ltx_video").load(model)


def test_what_broke_off_or_was_refused_is_fetched_and_then_nothing_is_asked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # what is kept of a file that breaks off
    hub.cut, hub.busy_for = True, 3
    vae = spec_in(tmp_path).load_vae()
    assert hub.busy_for == 0
    weights = "vae/diffusion_pytorch_model.safetensors"
    assert weights in hub.broken_off
    assert weights in hub.resumed  # from where it broke off
    section = ModelSection(model_name="ltx_video", pretrained_model_name_or_path=str(hub.folder), vae_dtype="fp32")
    local = get_family("ltx_video").load(section).load_vae()
    assert all(torch.equal(a, b) for a, b in zip(vae.state_dict().values(), local.state_dict().values(), strict=True))

    # A hub that is down, busy or has locked the door since does not matter to what lies on disk.
    hub.mode = "gated"
    spec_in(tmp_path).load_vae()
    hub.mode = "up"
    hub.busy_for = 10**6
    spec_in(tmp_path).load_vae()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    asked = sum(hub.asked.values())
    spec = spec_in(tmp_path)
    spec.load_vae()
    found = get_family("ltx_video").fetch_configs(spec.config.model_copy(update={"transformer_id": str(hub.folder)}))
    assert not found.new
    assert found.missing == ()
    assert found.is_offline_by_choice
    with refused_options((MODEL, "unavailable")) as caught:
        spec.load_text_encoders()
    assert "HF_HUB_OFFLINE" in str(caught.value)
    assert "`hf download someone/model`" in str(caught.value)
    assert sum(hub.asked.values()) == asked


@pytest.mark.parametrize(
    ("mode", "kind", "values"),
    [
        ("gated", "unavailable", r"gated: .*http://\S+/someone/model .*`hf auth login`"),
        ("unknown", "not_found", r" http://\S+/someone/model .*`hf auth login`"),
        ("down", "unavailable", r"`hf download someone/model`"),
    ],
)
def test_what_to_do_is_said(
    hub: Hub, mode: str, kind: Kind, values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.mode = mode
    if mode == "down":
        hub.close()
        monkeypatch.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 1)
    spec = spec_in(tmp_path)
    for load in (spec.load_vae, *(() if mode == "down" else (spec.load_text_encoders, spec.load_scheduler))):
        with refused_options((MODEL, kind)) as caught:
            load()
        assert re.search(values, str(caught.value))


def test_a_hub_that_stays_busy_is_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.busy_for = 10**6
    with refused_options((MODEL, "unavailable")) as caught:
        spec_in(tmp_path).load_vae()
    assert "(429)" in str(caught.value)
    assert len(hub.waited) >= 3  # it was asked again, after a while each time
