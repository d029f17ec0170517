"""What a run leaves: the model card's content, and what is uploaded."""

import json
import re
import shutil
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
import yaml
from diffusers import LTXPipeline
from PIL import Image
from safetensors.torch import load_file

from finetrainers.cli.main import main
from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.config.prompts import ValidationPrompt
from finetrainers.draw.sample_files import write_sample
from finetrainers.plan.preflight import preflight
from finetrainers.results import export as module
from finetrainers.results.card_facts import write_grid
from finetrainers.results.export_formats import export_formats, find_source
from finetrainers.utils.phases import label
from finetrainers.utils.video import write_mp4


class LTXVideoTransformer3DModel:
    pass


def finished(tmp_path, *, pretrained="owner/base", **options):
    config = load_config(
        model_name="ltx_video", pretrained_model_name_or_path=pretrained, data_root="/private/clips",
        output_dir=str(tmp_path), hub_token="secret-token", lr=3e-5, rank=8, **options,
    )  # fmt: skip
    records = [
        {"step": 0, "eval_loss": 0.5, "eval_loss_0.10": 0.6},
        {"step": 5, "eval_loss": 0.125, "eval_loss_0.10": 0.3},
        {"step": 5, "loss": 1.0, "step_s": 12.0, "steps": 5},
        {"step": 12, "loss": 1.0, "step_s": 10.0, "steps": 7},
        {"step": 12, "eval_loss": 0.25, "eval_loss_0.10": 0.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    state = SimpleNamespace(
        config=config,
        step=12,
        network=LTXVideoTransformer3DModel(),
        parallel=SimpleNamespace(device=torch.device("cpu"), world_size=2),
        spec=SimpleNamespace(
            casts_latents=True,
            strength_call="set_adapters([], 1.0)",
            pipeline_class=LTXPipeline,
            facts=SimpleNamespace(
                needs_image=False, trained="transformer", media=(), misread={}, expert=None, experts=(), least_frames=1
            ),
            load_call=lambda place: f"load_lora_weights({json.dumps(place)})",
        ),
        run_dir=SimpleNamespace(root=tmp_path),
        memory=SimpleNamespace(
            all_peaks={
                "training_step": {"allocated": 12.345, "reserved": 13.5, "host": 3.0},
                "memory_before_training": {"host": 2.0},
            }
        ),
    )
    checked = SimpleNamespace(
        start=SimpleNamespace(origin=None),
        plan=SimpleNamespace(
            example='MY a fox, "quoted"',
            size=(9, 64, 96),
            count=3,
            noun="clip",
            buckets={(9, 64, 96): 3},
            table=lambda: [("bucket", "clips"), ("9x64x96", "3")],
            step_of=lambda config: "2 clips",
        ),
        frame_rate=25.0,
        prompts=[ValidationPrompt(prompt="a fox: at night"), ValidationPrompt(prompt="a dog")],
        config=config,
    )
    return state, checked


def samples(tmp_path):
    for step in ("step-000005", "step-000012"):
        (tmp_path / "samples" / step).mkdir(parents=True)
        (tmp_path / "samples" / step / "00-a-fox-at-night-0.mp4").write_bytes(b"")
    (tmp_path / "samples" / "00-a-fox-at-night-0.png").write_bytes(b"")


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
    assert f"# {tmp_path.name}: a LoRA for base\n" in card
    assert header["pipeline_tag"] == "text-to-video"
    assert header["instance_prompt"] == "MY"
    assert "license" not in header
    assert "<Gallery />" in card
    assert "![a fox: at night](samples/00-a-fox-at-night-0.png)" in card
    assert "| 9x64x96 | 3 |" in card
    assert " took | 2 min on 2 x CPU |" in card
    assert re.search(
        r"\| peak memory .* \| 12\.35 GiB .*, 13\.50 GiB .* GPU; 3\.00 GiB .* host .*, per process \|", card
    )
    assert label("memory_before_training") not in card
    assert re.search(r"\| samples \| 50 .* steps, .* guidance .*, seed 42, 25 fps \|", card)
    assert " clips | step 0 | step 12 | best |\n|---|---|---|---|\n" in card
    assert "|\n| `eval_loss` | 0.5 | 0.25 | 0.125 (step 5) |\n" in card
    assert (
        "\n\n| phase | GPU, allocated | GPU, reserved | host |\n|---|---|---|---|\n"
        "| training step | 12.35 | 13.50 | 3.00 |\n\n</details>" in card
    )
    assert (
        "\n\n| base model | [owner/base](https://huggingface.co/owner/base) |\n|---|---|\n| strength | 1.0 is as"
        in card
    )
    assert " (LoRA of rank 8, alpha 64) |\n| trained at | 9x64x96 (frames x height x width) |\n" in card
    assert re.search(r"\| license .* \| unknown: .* \|\n\n", card)
    assert "finetrainers export . --format comfyui" in card
    assert "finetrainers train --config config.toml --output_dir repeated" in card
    assert "grid.jpg" not in card  # there is none
    assert "12 steps on 3 clips" in card.replace("\n", " ")
    assert " `MY` into your prompt" in card
    assert "secret-token" not in card
    assert "/private/clips" not in card


@pytest.mark.parametrize(("card", "expected"), [
    ("---\nlicense: other\nlicense_name: ltxv\nlicense_link: https://x.y\ntags: [a]\n---\ntext",
     {"license": "other", "license_name": "ltxv", "license_link": "https://x.y"}),
    ("no metadata", {}), ("---\n[: {\n---\n", {}), (None, {}),
])  # fmt: skip
def test_the_license_is_the_base_models(tmp_path, card, expected):
    """The license is that of the model's own card.

    A model in a folder is not a base model on the Hub, and its path stays private.
    """
    base = tmp_path / "private" / "LTX"
    base.mkdir(parents=True)
    if card is not None:
        (base / "README.md").write_text(card)
    state, checked = finished(tmp_path, pretrained=str(base))
    text = module.model_card(state, checked)
    header = yaml.safe_load(text.split("---")[1])
    license_pattern = r"\[ltxv\]\(https://x\.y\)" if expected else "unknown: .*"
    assert re.search(rf"\| license .* \| {license_pattern} \|", text)
    assert {name: header.get(name) for name in header if name.startswith("license")} == expected
    assert "base_model" not in header
    assert header["library_name"] == "diffusers"
    shutil.rmtree(base)  # while the run trained
    text = module.model_card(state, checked)
    assert re.search(r"\| license .* \| unknown: .* \|", text)
    assert f"huggingface.co/{base}" not in text
    assert "base_model" not in yaml.safe_load(text.split("---")[1])


@pytest.mark.parametrize(("training_type", "expected"), [
    ("lora", "load_lora_weights"),
    ("full-finetune", 'subfolder="transformer"'),
])  # fmt: skip
def test_the_cards_code_is_python_and_fits_what_was_trained(tmp_path, training_type, expected):
    card = module.model_card(*finished(tmp_path, training_type=training_type))
    folder = "loras" if training_type == "lora" else "diffusion_models"
    assert f"into `ComfyUI/models/{folder}`" in card
    assert ("| strength |" in card) == (training_type == "lora")
    code = card.split("```python")[1].split("```")[0]
    compile(code, "card", "exec")
    assert expected in code
    assert "num_frames=9," in code
    state, checked = finished(tmp_path, training_type=training_type)
    state.spec.facts.least_frames = 17  # of the pipeline
    assert "num_frames=17," in module.model_card(state, checked)


def shown(path):
    """The frames of a video."""
    with av.open(str(path)) as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]).astype(float)


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "version", "training_type"), [
    ("ltx_video", None, "lora"),
    ("hunyuan_video", None, "full-finetune"),
    ("cogvideox", "i2v", "lora"),
    ("cogvideox", "control", "lora"),
    ("hunyuan_video_15", None, "lora"),
    ("hunyuan_video_15", "i2v", "lora"),
    ("mochi", None, "lora"),
])  # fmt: skip
def test_the_cards_code_runs(options, run, tmp_path, monkeypatch, family, version, training_type):
    """The card's code runs as pasted, but for device and dtype.

    It makes an mp4 file from the weights in the run directory, equal to that of validation.
    """
    prompts = {"validation_prompts": "a cat:::a dog", "validation_steps": 1, "validation_inference_steps": 2}
    done = run(
        **options(family, version=version, training_type=training_type, train_steps=1, **({} if version else prompts))
    )
    card = (done.root / "README.md").read_text()
    code = card.split("```python")[1].split("```")[0]
    assert 'pipe.to("cuda")' in code
    Image.new("RGB", (64, 64), (200, 90, 30)).save(tmp_path / "first_frame.png")
    if version == "control":
        write_mp4(tmp_path / "control_video.mp4", np.full((9, 64, 64, 3), 255, np.uint8), fps=8)
    monkeypatch.chdir(tmp_path)
    assert ('"vae": torch.float32' in code) == (family in ("ltx_video", "hunyuan_video", "hunyuan_video_15"))
    code = code.replace('"cuda"', '"cpu"').replace("bfloat16", "float32")
    exec(code if not version else code.replace("width=64,", "width=64, num_inference_steps=2,"), {})
    frames = shown(tmp_path / "video.mp4")
    assert len(frames) == {"mochi": 7}.get(family, 9)
    if not version:
        first, other = (shown(next((done.root / "samples" / "step-000001").glob(f"{k}-*.mp4"))) for k in ("00", "01"))
        assert abs(frames - first).mean() < 10 < 2 * abs(frames - other).mean()  # both are compressed
    if family == "ltx_video":
        monkeypatch.chdir(done.root)
        [command] = re.findall(r"^finetrainers (export .*)$", card, re.MULTILINE)
        assert main(command.split()) == 0
        assert [path.suffix for path in (done.root / "export" / "comfyui").glob("*.safetensors")] == [".safetensors"]


def test_the_card_shows_the_newest_samples_on_one_picture(tmp_path):
    state, checked = finished(tmp_path)
    for step in (5, 12):
        for name in ("00-a-fox", "01-a-dog"):
            clip = np.full((9, 32, 64, 3), 20 * step, np.uint8)
            write_sample(tmp_path / "samples", name, clip, step=step, fps=8, heading=name)
    write_grid(tmp_path)
    grid = np.asarray(Image.open(tmp_path / "samples" / "grid.jpg"))
    assert (abs(grid.astype(int) - 240) < 4).mean() > 0.5  # step 12, twice
    assert not (abs(grid.astype(int) - 100) < 4).mean() > 0.1
    assert "![Samples after step 12](samples/grid.jpg)" in module.model_card(state, checked)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"pretrained": "demo://ltx"}])
def test_comfyui_is_named_only_where_it_reads_the_result(tmp_path, options):
    card = module.model_card(*finished(tmp_path, **options))
    assert "ComfyUI" not in card
    assert "DoRA of rank 8" in card or "LoRA of rank 8" in card


def test_a_checkpoint_of_full_finetuning_is_exported_as_its_average(options, run, tmp_path):
    root = run(
        **options(training_type="full-finetune", use_ema=True, ema_decay=0.5, train_steps=2, checkpointing_steps=2)
    ).root
    checkpoint = root / "checkpoints" / "step-2"
    averages = load_file(checkpoint / "ema.safetensors")
    for use_ema in (True, False):
        source = find_source(str(checkpoint), options={}, use_ema=use_ema)
        [exported] = export_formats(source, ["diffusers"], tmp_path / str(use_ema), dtype="fp32")
        [file] = exported.path.glob("*.safetensors")
        written = load_file(file)
        assert all(torch.equal(written[name], average) for name, average in averages.items()) == use_ema


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
    state, _ = finished(tmp_path, push_to_hub=True, hub_model_id="my-lora")
    module.push(state.config)
    assert (calls["token"], calls["name"], calls["repo"]) == ("secret-token", "my-lora", "me/my-lora")
    assert not any("checkpoints" in pattern or "precomputed" in pattern for pattern in calls["patterns"])


def test_formats_that_cannot_be_written_are_refused_before_training(options):
    def refusal(**changes):
        with pytest.raises(ConfigError) as caught:
            preflight(load_config(**options(**changes)))
        return str(caught.value)

    assert re.search("--export_formats: comfyui: .* DoRA", refusal(use_dora=True, export_formats=["comfyui"]))
    message = refusal(training_type="full-finetune", export_formats=["peft", "diffusers"])
    assert re.search("--export_formats: peft: .* LoRA.* weights; .* comfyui$", message)
