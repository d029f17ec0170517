"""The tiny repositories: they load, are the same in every process, and their text conditioning tells prompts apart."""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, HunyuanVideoPipeline
from every_family import CHECKPOINTS, FAMILIES, sampled_frames
from PIL import Image
from refusals import refused

from finetrainers.config.sections import ModelSection
from finetrainers.models import tiny
from finetrainers.models.registry import families, get_family
from finetrainers.models.tiny_tokenizers import clip_tokenizer, llama_tokenizer, t5_tokenizer

REPOSITORIES = {"-".join(filter(None, one)): one for one in CHECKPOINTS}
ONE_OF_EACH = [*dict(reversed(CHECKPOINTS)).items()]

WRITE_ALL = """
import sys
from pathlib import Path
from finetrainers.models.registry import build_tiny
root = Path(sys.argv[1])
for name, (family, version) in %r.items():
    build_tiny(family, root / name, version=version)
print(hash("a"))
"""


def digest(directory: Path) -> dict[str, str]:
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


@pytest.fixture(params=REPOSITORIES)
def pipeline(request, tiny_repo):
    family, version = REPOSITORIES[request.param]
    return DiffusionPipeline.from_pretrained(tiny_repo(family, version), torch_dtype=torch.float32)


@pytest.fixture
def call(request, tiny_repo):
    """Arguments of a small sampling call."""
    family, version = REPOSITORIES[request.node.callspec.params["pipeline"]]
    section = ModelSection(model_name=family, pretrained_model_name_or_path=str(tiny_repo(family, version)))
    frames = sampled_frames(get_family(family).facts_of(section))
    return {"height": 64, "width": 64, "num_frames": frames, "num_inference_steps": 2, "output_type": "pt"}


def test_every_family_has_a_tiny_repository():
    assert all(family.tiny for family in families().values())


@pytest.mark.rotating
def test_the_stock_pipeline_samples(pipeline, call):
    if "image" in inspect.signature(pipeline.__call__).parameters:
        call["image"] = torch.rand(1, 3, 64, 64)
    if getattr(pipeline.transformer.config, "pos_embed_seq_len", None) is not None:  # of a first and a last image
        call["last_image"] = call["image"]
    if "Control" in type(pipeline).__name__:
        call["control_video"] = torch.rand(1, call.pop("num_frames"), 3, 64, 64)
    size = (64, 64)
    if "height" not in inspect.signature(pipeline.__call__).parameters:  # whose size is that of the image
        size = (48, 32)
        call = {**call, "image": Image.new("RGB", size[::-1])}
        del call["height"], call["width"]
    pipeline.set_progress_bar_config(disable=True)
    length = call.get("num_frames", 9)
    frames = pipeline(prompt="a red ball", generator=torch.Generator().manual_seed(0), **call).frames
    drops_first = getattr(pipeline.transformer.config, "image_condition_type", None) == "latent_concat"
    assert frames.shape == (1, 5 if drops_first else length, 3, *size)
    assert torch.isfinite(frames).all()


@pytest.mark.rotating
def test_prompts_are_told_apart(pipeline):
    images = [torch.rand(1, 3, 64, 64)] if "image" in inspect.signature(pipeline.encode_prompt).parameters else []

    def embed(prompt):
        with torch.no_grad():
            return pipeline.encode_prompt(*images, prompt)[0]

    one, same, other = embed("a red ball moves left"), embed("a red ball moves left"), embed("a red ball moves right")
    assert torch.equal(one, same)
    assert (one - other).abs().max() > 1e-2


def test_same_bytes_in_another_process(tiny_repo, tmp_path, python):
    some = {name: one for name, one in REPOSITORIES.items() if one in ONE_OF_EACH}  # versions differ in numbers
    process = python("-c", WRITE_ALL % some, str(tmp_path))
    assert process.wait() == 0, process.stderr
    assert int(process.stdout.split()[-1]) != hash("a"), "sets have the same order in both"
    for name, (family, version) in some.items():
        here = digest(tiny_repo(family, version))
        assert any(file.endswith(".safetensors") for file in here)
        assert here == digest(tmp_path / name), name


def test_seed_changes_weights_only_and_leaves_the_global_generator_alone(tmp_path, tiny_repo):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    tiny.build_ltx_video(tmp_path / "other", seed=1)
    assert torch.equal(torch.rand(3), expected)
    ours, other = digest(tiny_repo("ltx_video")), digest(tmp_path / "other")
    changed = {name for name in ours if ours[name] != other[name]}
    assert changed
    assert all(name.endswith(".safetensors") for name in changed)


@pytest.mark.parametrize("family", FAMILIES)
def test_compression_is_that_of_the_published_checkpoint(family, tiny_repo):
    config = ModelSection(model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)))
    assert get_family(family).facts_of(config).geometry == get_family(family).facts.geometry


def test_the_prompt_template_is_cut_exactly_before_the_prompt(tiny_repo):
    pipe = HunyuanVideoPipeline.from_pretrained(tiny_repo("hunyuan_video"), torch_dtype=torch.float32)
    prompt = "a dog runs"
    with torch.no_grad():
        embeds, _, mask = pipe.encode_prompt(prompt)
    kept = pipe.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert mask.sum() == len(kept) + 1  # the prompt and <|eot_id|>
    assert mask[0, : len(kept) + 1].all()
    assert embeds.shape[1] == 256


@pytest.mark.parametrize("make", [t5_tokenizer, clip_tokenizer, llama_tokenizer])
def test_tokenizers_survive_saving_and_keep_whole_words(make, tmp_path):
    tokenizer = make()
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    text = "the dog runs, xyzzy 42"
    ids = tokenizer(text, padding="max_length", max_length=40, truncation=True)["input_ids"]
    assert ids == loaded(text, padding="max_length", max_length=40, truncation=True)["input_ids"]
    assert tokenizer("xyzzy")["input_ids"] != tokenizer("xyzzz")["input_ids"]  # unknown words are spelt
    assert sum("dog" in token for token in tokenizer.convert_ids_to_tokens(ids)) == 1


def test_published_scheduler_facts(tiny_repo):
    def scheduler(family, **options):
        path = tiny_repo(family, **options) / "scheduler" / "scheduler_config.json"
        return json.loads(path.read_text())

    assert scheduler("ltx_video")["shift_terminal"] == 0.1
    assert scheduler("hunyuan_video")["shift"] == 7.0
    assert scheduler("cogvideox", version="2b")["snr_shift_scale"] == 3.0
    assert scheduler("cogvideox", version="2b")["_class_name"] == "CogVideoXDDIMScheduler"
    assert scheduler("cogvideox", version="5b")["_class_name"] == "CogVideoXDPMScheduler"


def test_unknown_version_is_refused(tmp_path):
    with refused("unknown", "CogVideoX version '7b'", "2b, 5b, 1.5, i2v"):
        tiny.build_cogvideox(tmp_path, version="7b")
