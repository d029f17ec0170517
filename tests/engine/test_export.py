"""What a run leaves: the model card's content, and what is uploaded."""

from types import SimpleNamespace

import av
import pytest
import yaml
from PIL import Image

from finetrainers.config.load import load_config
from finetrainers.config.prompts import ValidationPrompt
from finetrainers.engine import export as module


class LTXVideoTransformer3DModel:
    pass


def finished(tmp_path, **options):
    config = load_config(
        model_name="ltx_video", pretrained_model_name_or_path="owner/base", data_root="/private/clips",
        output_dir=str(tmp_path), hub_token="secret-token", lr=3e-5, rank=8, **options,
    )  # fmt: skip
    trainer = SimpleNamespace(
        config=config,
        step=12,
        transformer=LTXVideoTransformer3DModel(),
        parallel=SimpleNamespace(unwrap=unwrap_plain),
        spec=SimpleNamespace(pipeline_class="LTXPipeline", first_frame="tokens"),
        run_dir=SimpleNamespace(root=tmp_path),
    )
    checked = SimpleNamespace(
        start=SimpleNamespace(origin=None),
        plan=SimpleNamespace(example='MY a fox, "quoted"', size=(9, 64, 96), fps=25.0, count=3, noun="clip"),
        prompts=[ValidationPrompt("a fox: at night"), ValidationPrompt("a dog")],
    )
    return trainer, checked


def unwrap_plain(model):
    return model


def samples(tmp_path):
    for step in ("step-000005", "step-000012"):
        (tmp_path / "samples" / step).mkdir(parents=True)
        (tmp_path / "samples" / step / "00-a-fox-at-night-0.mp4").write_bytes(b"")


def test_card_names_base_model_prompts_samples_and_changed_settings_only(tmp_path):
    samples(tmp_path)
    card = module.model_card(*finished(tmp_path, id_token="MY"))
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "owner/base"
    assert header["widget"][0] == {
        "text": "a fox: at night", "output": {"url": "samples/step-000012/00-a-fox-at-night-0.mp4"}
    }  # fmt: skip
    assert "output" not in header["widget"][1]
    assert "| `rank` | 8 |" in card
    assert "| `lr` | 3e-05 |" in card
    assert "`lora_alpha`" not in card
    assert "12 steps on 3 clips" in card.replace("\n", " ")
    assert "Put `MY` before your prompt" in card
    assert "secret-token" not in card
    assert "/private/clips" not in card


@pytest.mark.parametrize(("training_type", "expected"), [
    ("lora", "load_lora_weights"),
    ("full-finetune", 'subfolder="transformer"'),
])  # fmt: skip
def test_the_cards_code_is_python_and_fits_what_was_trained(tmp_path, training_type, expected):
    card = module.model_card(*finished(tmp_path, training_type=training_type))
    code = card.split("```python")[1].split("```")[0]
    compile(code, "card", "exec")
    assert expected in code


@pytest.mark.parametrize(("family", "version", "training_type"), [
    ("ltx_video", None, "lora"),
    ("hunyuan_video", None, "full-finetune"),
    ("cogvideox", "i2v", "lora"),
])  # fmt: skip
def test_the_cards_code_runs(options, run, tmp_path, monkeypatch, family, version, training_type):
    """As pasted, but for the device: from the weights in the run directory to an mp4 file."""
    done = run(**options(family, version=version, training_type=training_type, train_steps=1))
    code = (done.root / "README.md").read_text().split("```python")[1].split("```")[0]
    assert 'pipe.to("cuda")' in code
    Image.new("RGB", (64, 64), (200, 90, 30)).save(tmp_path / "first_frame.png")
    monkeypatch.chdir(tmp_path)
    exec(code.replace('"cuda"', '"cpu"').replace("width=64,", "width=64, num_inference_steps=2,"), {})
    with av.open(str(tmp_path / "video.mp4")) as video:
        assert len(list(video.decode(video=0))) == 9


def test_push_uploads_results_and_nothing_else(tmp_path, monkeypatch):
    calls = {}

    class Api:
        def __init__(self, token):
            calls["token"] = token

        def create_repo(self, name, *, exist_ok):
            calls["name"] = name
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
            calls.update(repo=repo_id, folder=folder_path, patterns=allow_patterns)

    monkeypatch.setattr(module, "HfApi", Api)
    trainer, _ = finished(tmp_path, push_to_hub=True, hub_model_id="my-lora")
    module.push(trainer)
    assert (calls["token"], calls["name"], calls["repo"]) == ("secret-token", "my-lora", "me/my-lora")
    assert not any("checkpoints" in pattern or "precomputed" in pattern for pattern in calls["patterns"])
