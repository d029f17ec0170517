"""Runs whose weights come from single files: the same run as from folders, checked, recorded, and resumed like it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from published_networks import NETWORKS
from refusals import refused_options
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetrainers.config.errors import ConfigError
from finetrainers.config.flags import parse_flags
from finetrainers.config.load import load_config
from finetrainers.config.sections import ModelSection
from finetrainers.data.cache.encoder_index import recall_files, remember_files
from finetrainers.models.files.layouts import stored_tensors
from finetrainers.models.files.original import known_layouts
from finetrainers.models.registry import families, get_family
from finetrainers.models.sizes import num_weights
from finetrainers.plan.preflight import preflight
from finetrainers.plan.ready import examine_weights
from finetrainers.runs.training import train
from finetrainers.utils import packaged

NETWORK = "diffusion_pytorch_model.safetensors"
#: As diffusion-pipe's documents have it, with the least that a small machine needs.
SEED = """
output_dir = '{root}'
dataset = '{root}.toml'

epochs = 1
micro_batch_size_per_gpu = 1
gradient_accumulation_steps = 2

[model]
type = 'hunyuan-video'
framepack = true
framepack_window_size = 33

dtype = 'bfloat16'
transformer_dtype = 'float8'
transformer_path = '{files}/transformer.safetensors'
vae_path = '{files}/vae.safetensors'
llm_path = '{llm}'
clip_path = '{clip}'

[adapter]
type = 'lora'
rank = 4
dtype = 'bfloat16'
"""
DATASET = "frame_buckets = [120]\nresolutions = [[64, 64]]\n\n[[directory]]\npath = '{clips}'\nnum_repeats = 1\n"


def without_weights(repo: Path, to: Path, *, keep: Iterable[str] = ()) -> Path:
    """Make a model's folder as `hf download --include '*.json' '*.model' '*.txt'` does, with weights of some parts."""
    shutil.copytree(repo, to)
    for file in to.glob("*/*.safetensors"):
        if file.parent.name not in keep:
            file.unlink()
    return to


def write(weights: dict[str, Tensor], cls: str, kind: str, prefix: str, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    save_file(stored_tensors(known_layouts(cls, weights)[kind], weights, prefix), path)
    return path


@pytest.fixture
def files(tiny_repo: Callable[..., Path], tmp_path: Path) -> Path:
    """Return the folder of a tiny HunyuanVideo's parts, as ComfyUI's files hold them."""
    repo, to = tiny_repo("hunyuan_video"), tmp_path / "files"
    write(
        load_file(repo / "transformer" / NETWORK),
        "HunyuanVideoTransformer3DModel",
        "ComfyUI's",
        "model.model.",
        to / "transformer.safetensors",
    )
    write(load_file(repo / "vae" / NETWORK), "AutoencoderKLHunyuanVideo", "ComfyUI's", "", to / "vae.safetensors")
    llama = {f"model.{name}": tensor for name, tensor in load_file(repo / "text_encoder" / "model.safetensors").items()}
    clip = load_file(repo / "text_encoder_2" / "model.safetensors")
    clip = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in clip.items()}
    save_file({**llama, "lm_head.weight": torch.zeros(4, 4)}, to / "llava_llama3_fp16.safetensors")
    save_file({**clip, "text_projection.weight": torch.zeros(4, 4)}, to / "clip_l.safetensors")
    return to


@pytest.mark.rotating
def test_the_seed_trains_from_single_files(
    tiny_repo: Callable[..., Path], make_clips: Callable[..., Path], files: Path, tmp_path: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Folders of encoders whose repository has the rest, such folders alone, and single files for all."""
    configs = without_weights(tiny_repo("hunyuan_video"), tmp_path / "configs" / "hunyuan_video")
    for folder in ("tokenizer", "tokenizer_2"):
        shutil.rmtree(configs / folder)
    index = json.loads((configs / "model_index.json").read_text())
    (configs / "model_index.json").write_text(json.dumps({**index, "_name_or_path": "nobody/of-this-name"}))
    monkeypatch.setattr(packaged, "_CONFIGS", configs.parent)
    for encoder, tokenizer in (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2")):
        for folder in (encoder, tokenizer):
            shutil.copytree(tiny_repo("hunyuan_video") / folder, tmp_path / "alone" / encoder, dirs_exist_ok=True)
    repo = without_weights(tiny_repo("hunyuan_video"), tmp_path / "repo", keep=("text_encoder", "text_encoder_2"))
    bare = without_weights(repo, tmp_path / "bare")
    places = {
        "folders": (tiny_repo("hunyuan_video") / "text_encoder", tiny_repo("hunyuan_video") / "text_encoder_2", ()),
        "encoders": (repo / "text_encoder", repo / "text_encoder_2", ()),
        "alone": (tmp_path / "alone" / "text_encoder", tmp_path / "alone" / "text_encoder_2", ()),
        "files": (files / "llava_llama3_fp16.safetensors", files / "clip_l.safetensors",
                  ("--pretrained_model_name_or_path", str(bare))),
    }  # fmt: skip
    found = {}
    for name, (llm, clip, flags) in places.items():
        text = SEED.format(root=tmp_path / name, files=files, llm=llm, clip=clip)
        if name == "folders":
            for part in ("transformer", "vae"):
                text = text.replace(f"{files}/{part}.safetensors", str(tiny_repo("hunyuan_video") / part))
        (tmp_path / f"{name}.toml").write_text(DATASET.format(clips=make_clips(1, frames=34)))
        (tmp_path / f"main_{name}.toml").write_text(text)
        config, _ = parse_flags(["--config", str(tmp_path / f"main_{name}.toml"), "--target_fps", "8", *flags])
        assert config is not None
        assert train(config).step == 1
        out = capsys.readouterr().out
        told = [line for line in out.splitlines() if line.startswith("from single files: ")]
        assert len(told) == (name != "folders")
        assert all(
            f"VAE {files / 'vae.safetensors'}, transformer {files / 'transformer.safetensors'}" in t for t in told
        )
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found[name] = (
            [record["loss"] for record in map(json.loads, lines) if "loss" in record],
            load_file(tmp_path / name / "pytorch_lora_weights.safetensors"),
        )
    monkeypatch.setattr("finetrainers.models.family.ask", lambda repositories: "offline")
    (tmp_path / "alone" / "text_encoder" / "tokenizer.json").unlink()
    (tmp_path / "alone" / "text_encoder" / "tokenizer_config.json").unlink()
    config, _ = parse_flags(["--config", str(tmp_path / "main_alone.toml"), "--output_dir", str(tmp_path / "again")])
    assert config is not None
    with pytest.raises(ConfigError) as error:
        train(config)
    assert [problem.where for problem in error.value.problems] == ["--tokenizer_id"]
    losses, lora = found["folders"]
    for name in ("encoders", "alone", "files"):
        assert found[name][0] == losses
        assert [key for key in lora if not torch.equal(lora[key], found[name][1][key])] == []
    card = (tmp_path / "files" / "README.md").read_text()
    assert (
        f'load_single_file(HunyuanVideoTransformer3DModel, settings, Path("{files / "transformer.safetensors"}")'
        in card
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_packaged_configs_are_those_of_the_published_repository(name: str, tiny_repo: Callable[..., Path]) -> None:
    """Their networks have its numbers of weights, and the scheduler is the one that the tiny repository has from it."""
    published = NETWORKS[name]
    folder, family = packaged.packaged_configs(published.hub_id, "", estimated=True), get_family(published.family)
    assert folder is not None
    assert set(json.loads((folder / "model_index.json").read_text())["_published"]) <= set(family.published)
    assert packaged.published_base(family.name) in (None, *family.published)

    def config(part: str, root: Path | None = None) -> dict[str, Any]:
        root = root or packaged.packaged_configs(published.hub_id, part, estimated=True)
        assert root is not None
        [path] = (root / part).glob("*config.json")
        return dict(json.loads(path.read_text()))

    assert (config("transformer")["_class_name"], config("vae")["_class_name"]) == (family.transformer, family.vae)
    vae_class = getattr(diffusers, config("vae")["_class_name"])
    with torch.device("meta"):
        network = getattr(diffusers, family.transformer).from_config(config("transformer"))
        vae, default = vae_class.from_config(config("vae")), vae_class()
    assert sum(one.numel() for one in network.parameters()) == published.num_parameters
    found = family.read({part: config(part) for part in ("transformer", "vae", "scheduler")})
    if name != "Wan2.2-5B":  # whose VAE compresses otherwise than that of the family's other checkpoints
        assert found.geometry == family.facts.geometry
    if name not in ("Wan2.2-5B", "LTX-2.3"):  # whose VAEs are not as their class has them by default
        shapes, others = ({n: t.shape for n, t in one.state_dict().items()} for one in (vae, default))
        assert shapes == others
    theirs = config("scheduler", tiny_repo(published.family, **published.tiny))
    assert config("scheduler").items() <= theirs.items()
    if packaged.published_base(family.name) is None:  # their other files are the repository's
        assert packaged.packaged_configs(published.hub_id, "vae") is None


def test_packaged_repositories_are_published_ones() -> None:
    """Their families read facts of each, also where configs are shared."""
    published = {hub_id: family for family in families().values() for hub_id in family.published}
    folders = Path(packaged.__file__).parents[1] / "models" / "configs"
    indices = [json.loads(path.read_text()) for path in folders.glob("*/model_index.json")]
    for hub_id in (hub_id for index in indices for hub_id in index["_published"]):
        section = ModelSection(pretrained_model_name_or_path=hub_id).for_estimate()
        family = published[hub_id]
        assert family.configs_not_here(section) == []
        facts = family.facts_of(section)
        assert (facts.first_frame == "channels" or facts.animates) == bool(re.search("(?i)[-_]i2v|flf2v", hub_id))
        assert family.facts_of(ModelSection(pretrained_model_name_or_path=hub_id)) == family.facts_of(section)


#: Parameters of each network of Wan that denoises, and of the checkpoint in billions, as published.
WAN = {
    "Wan2.1-T2V-1.3B-Diffusers": (1_418_996_800, 1.4), "Wan2.1-T2V-14B-Diffusers": (14_288_491_584, 14),
    "Wan2.1-I2V-14B-480P-Diffusers": (16_394_878_784, 16), "Wan2.1-I2V-14B-720P-Diffusers": (16_394_878_784, 16),
    "Wan2.1-FLF2V-14B-720P-diffusers": (16_395_536_704, 16), "Wan2.2-TI2V-5B-Diffusers": (4_999_787_712, 5),
    "Wan2.2-T2V-A14B-Diffusers": (14_288_491_584, 29), "Wan2.2-I2V-A14B-Diffusers": (14_288_901_184, 29),
}  # fmt: skip


def test_packaged_networks_of_wan_have_the_published_sizes() -> None:
    """Of every published checkpoint: text and image encoders, VAE, and both experts where there are two."""
    family = get_family("wan")
    assert {f"Wan-AI/{name}" for name in WAN} == set(family.published)
    for name, (number, billions) in WAN.items():
        section = ModelSection(model_name="wan", pretrained_model_name_or_path=f"Wan-AI/{name}").for_estimate()
        experts = ("high", "low") if family.facts_of(section).boundary else (None,)
        total = 0
        for expert in experts:
            spec = family.load(section.model_copy(update={"expert": expert}).for_estimate())
            total += sum(p.numel() for p in spec.transformer_on_meta().parameters())
            assert num_weights(spec, "text_encoder") == 5_680_910_336
            assert num_weights(spec, "vae") == (704_688_668 if "5B" in name else 126_892_531)
            sees_image = "-14B" in name and ("-I2V" in name or "FLF2V" in name)
            assert num_weights(spec, "image_encoder") == (630_766_080 if sees_image else None)
        assert total == len(experts) * number
        assert round(total / 1e9, 1 if billions < 2 else None) == billions


def test_what_is_wrong_with_single_files_is_said_at_once(
    options: Callable[..., dict], tiny_repo: Callable[..., Path], files: Path, tmp_path: Path
) -> None:
    """By names and shapes in the file's own words, and by what quantized it; nothing is loaded."""

    def said(**changes: Any) -> list[str]:
        with pytest.raises(ConfigError) as error:
            examine_weights(preflight(load_config(**options("hunyuan_video", **changes))))
        return [str(problem) for problem in error.value.problems]

    path, state = files / "transformer.safetensors", load_file(files / "transformer.safetensors")
    odd, name = {**state}, "model.model.double_blocks.1.img_attn.qkv.weight"
    odd["model.model.double_blocks.1.img_attn.qkw.weight"] = odd.pop(name)
    odd["model.model.single_blocks.0.linear1.bias"] = torch.zeros(5)
    save_file(odd, path)
    vae = load_file(files / "vae.safetensors")
    save_file({n: t for n, t in vae.items() if "mid." not in n}, files / "vae.safetensors")
    problems = said(transformer_id=str(path), vae_id=str(files / "vae.safetensors"), text_encoder_id=str(path))
    assert len(problems) == 4
    assert re.match(rf"--text_encoder_id: {path} .* none ", problems[0])
    assert problems[1].startswith(f"--vae_id: {files / 'vae.safetensors'} lacks 52 tensors: ")
    assert re.match(rf"--transformer_id: {path} .* 1 tensor: {name} \(.* {name.replace('qkv', 'qkw')}\)", problems[2])
    assert problems[3].startswith(f"--transformer_id: model.model.single_blocks.0.linear1.bias in {path} ")
    assert re.search(rf" \(5,\), .*{tiny_repo('hunyuan_video')}/transformer/config.json .*\(224,\)", problems[3])

    def quantized(extra: dict[str, Tensor], *, file: str = "transformer.safetensors") -> str:
        save_file({**state, **extra}, files / file)
        (problem,) = said(transformer_id=str(files / file))
        return problem

    first = "model.model.img_in.proj"
    scaled = quantized(
        {f"{first}.weight": state[f"{first}.weight"].to(torch.float8_e4m3fn), f"{first}.scale_weight": torch.ones(1)}
    )
    assert f"fp8 files: {first}.scale_weight)" in scaled
    state_name = f"{first}.weight.quant_state.bitsandbytes__nf4"
    assert "bitsandbytes: " in quantized({state_name: torch.zeros(3, dtype=torch.uint8)})
    assert "(integers of I8: " in quantized({f"{first}.weight": torch.zeros(4, 4, dtype=torch.int8)})
    (files / "t.gguf").write_bytes(b"GGUF" + bytes(64))
    assert "(GGUF)" in said(transformer_id=str(files / "t.gguf"))[0]
    (files / "t.pt").write_bytes(bytes(64))
    assert "pickle" in said(transformer_id=str(files / "t.pt"))[0]
    (problem,) = said(transformer_id="nowhere/t.safetensors")
    assert re.match("--transformer_id: .* nowhere/t.safetensors$", problem)
    assert said(tokenizer_id=str(path))[0].startswith(f"--tokenizer_id: {path} ")
    bare = without_weights(
        tiny_repo("hunyuan_video"), tmp_path / "bare", keep=("vae", "text_encoder", "text_encoder_2")
    )
    (bare / "transformer" / "config.json").unlink()
    save_file(state, path)
    (problem,) = said(transformer_id=str(path), pretrained_model_name_or_path=str(bare))
    assert f" {bare}/transformer/config.json " in problem


def test_a_cast_to_8_bits_is_read_and_said(options: Callable[..., dict], files: Path) -> None:
    path, state = files / "transformer.safetensors", load_file(files / "transformer.safetensors")
    cast = {name: t.to(torch.float8_e4m3fn) if t.ndim == 2 else t for name, t in state.items()}
    save_file(cast, path)
    checked = preflight(load_config(**options("hunyuan_video", transformer_id=str(path))))
    warnings = examine_weights(checked).warnings
    assert any("8 bits (F8_E4M3)" in text for text in warnings)
    network = checked.family.load(checked.config.model).load_transformer(torch.bfloat16)
    expected = cast["model.model.double_blocks.0.img_attn.proj.weight"].to(torch.bfloat16)
    assert torch.equal(network.transformer_blocks[0].attn.to_out[0].weight, expected)


def test_weights_of_a_single_file_are_part_of_what_is_resumed(
    options: Callable[..., dict], run: Callable[..., Any], files: Path, tiny_repo: Callable[..., Path]
) -> None:
    """A replaced file is another base; a run from folders continues. Names of ComfyUI also start a run."""
    file = str(files / "transformer.safetensors")
    values = options("hunyuan_video", train_steps=1, transformer_path=file)
    first = run(**values)
    assert first.state.step == 1
    more = {**values, "train_steps": 2, "resume_from_checkpoint": "latest"}
    assert run(**more).state.step == 2
    state = load_file(file)
    state = {name: tensor + 1 for name, tensor in state.items()}
    save_file(state, file)
    with refused_options(("--resume_from_checkpoint", "mismatch")) as caught:
        run(**{**more, "train_steps": 3})
    assert ": base: " in str(caught.value)
    other = files / "clip_l.safetensors"
    checked = preflight(
        load_config(**options("hunyuan_video", text_encoder_2_id=str(other), output_dir=str(files / "none")))
    )
    spec, folder = checked.family.load(checked.config.model), files / "cache"
    remember_files(folder, spec, "of then")
    assert recall_files(folder, spec) == "of then"
    save_file(load_file(other), files / "next.safetensors")
    (files / "next.safetensors").replace(other)
    assert recall_files(folder, spec) is None  # encodings of other weights are not taken for theirs
    with pytest.raises(ConfigError, match=rf"--init_from: {other} .* none .* x_embedder"):
        run(**options("hunyuan_video", init_from=str(other), output_dir=str(files / "none")))
    begun = options(
        "hunyuan_video",
        train_steps=1,
        lr=0.0,
        weight_decay=0.0,
        training_type="full-finetune",
        init_from=file,
        output_dir=str(files / "run"),
    )
    written = run(**begun).weights
    expected = load_file(tiny_repo("hunyuan_video") / "transformer" / NETWORK)
    assert [key for key in expected if not torch.equal(expected[key] + 1, written[key])] == []
