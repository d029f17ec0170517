"""Training with images in the text encoder: live or from the cache, each caption with its clip's first frame."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.data.cache.store import TensorCache
from finetrainers.models.hunyuan_video import HunyuanVideoSpec
from finetrainers.models.spec import PromptEmbeds
from finetrainers.plan.preflight import preflight


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.rotating
def test_texts_are_encoded_with_first_frames_live_and_in_the_cache(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses both ways; a second run needs no text encoder; captions that are alike differ by their clips."""
    seen: list[tuple[PromptEmbeds, torch.Tensor]] = []
    predict = HunyuanVideoSpec.predict

    def watched(spec: Any, network: Any, x: Any, t: Any, conditions: PromptEmbeds, meta: Any) -> Any:
        seen.append((conditions, t))
        return predict(spec, network, x, t, conditions, meta)

    monkeypatch.setattr(HunyuanVideoSpec, "predict", watched)
    captions = tmp_path / "captions.jsonl"
    common = options("hunyuan_video", version="token_replace", clips=2, batch_size=2, train_steps=2, logging_steps=1,
                     lr=1e-3, caption_dropout_p=0.5, target_modules=["to_k", "proj_mlp"])  # fmt: skip
    rows = sorted(path.name for path in Path(common["data_root"]).glob("*.mp4"))
    captions.write_text("\n".join(json.dumps({"video": name, "text": "a red ball"}) for name in rows))
    common |= {"dataset_file": str(captions)}
    live = run(**{**common, "output_dir": str(tmp_path / "live")})
    (conditions, t), count = seen[0], len(seen)
    assert (t[:, 0] == 0).all()
    assert (t[:, 1:] > 0).all()
    assert not torch.allclose(conditions["prompt_embeds"][0], conditions["prompt_embeds"][1], atol=1e-4)
    cached = {"precompute_conditions": True, "precompute_dir": str(tmp_path / "cache")}
    run(**{**common, **cached, "output_dir": str(tmp_path / "cached")})
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "live"), abs=1e-6)
    for (one, _), (other, _) in zip(seen[:count], seen[count:], strict=True):
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-5)
    monkeypatch.setattr(HunyuanVideoSpec, "load_text_encoders", lambda spec: pytest.fail("every text is in the cache"))
    monkeypatch.setattr(TensorCache, "put", lambda *entry: pytest.fail("every clip is in the cache"))
    run(**{**common, **cached, "output_dir": str(tmp_path / "again")})
    assert losses(tmp_path / "again") == losses(tmp_path / "cached")
    assert live.state.spec.facts.text_sees_image


def test_all_weights_are_trained_and_samples_start_from_an_image(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    Image.effect_noise((64, 64), 60).convert("RGB").save(tmp_path / "first.png")
    done = run(**options("hunyuan_video", version="latent_concat", train_steps=1, training_type="full-finetune",
                         lr=1e-4, validation_prompts="a red ball@@@9x64x64",
                         validation_images=str(tmp_path / "first.png"),
                         validation_steps=1, validation_inference_steps=2))  # fmt: skip
    assert list((tmp_path / "run" / "samples").rglob("*.mp4"))
    grown = done.state.spec.load_transformer(torch.float32, folder=tmp_path / "run" / "transformer")
    assert grown.config.image_condition_type == "latent_concat"


def test_what_an_image_in_the_text_leaves_no_choice_in(options: Callable[..., dict], tmp_path: Path) -> None:
    def places(**changes: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            preflight(load_config(**options("hunyuan_video", version="token_replace", **changes)))
        return [problem.where for problem in caught.value.problems]

    assert places(first_frame_conditioning_p=0.5) == ["--first_frame_conditioning_p"]
    assert places(prior_preservation_weight=1.0, class_prompt="a ball") == ["--prior_preservation_weight"]
    assert places(validation_prompts="a@@@9x64x64", validation_steps=1) == ["--validation_images"]
    (tmp_path / "prompts.txt").write_text("a cat\n")
    rollouts = places(method="grpo", prompts=str(tmp_path / "prompts.txt"), reward=["brightness"], rollout_cfg=3.0,
                      rollout_size="9x64x64", data_root=None, video_resolution_buckets=None)  # fmt: skip
    assert {"--rollout_cfg", "--prompts"} <= set(rollouts)
