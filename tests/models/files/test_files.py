"""Damaged and foreign model folders: what is said about them, before anything is loaded, by which file and option."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ModelMixin
from every_family import CHECKPOINTS
from refusals import refused_command, refused_options
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5EncoderModel, T5ForConditionalGeneration

from finetrainers.config.errors import Problem
from finetrainers.config.sections import ModelSection
from finetrainers.models.files import files
from finetrainers.models.files.weights import are_mapped, compare
from finetrainers.models.registry import get_family
from finetrainers.utils.failures import Kind
from finetrainers.utils.video import write_mp4

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
ENCODER = "text_encoder/model.safetensors"
MODEL = "--pretrained_model_name_or_path"


@pytest.fixture
def repo(tiny_repo: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny LTX-Video of its own, to be damaged."""
    return Path(shutil.copytree(tiny_repo("ltx_video"), tmp_path / "model"))


def section(path: Path, family: str = "ltx_video", **options: Any) -> ModelSection:
    return ModelSection(model_name=family, pretrained_model_name_or_path=str(path), **options)


def examine(path: Path, family: str = "ltx_video", **options: Any) -> list[Problem]:
    """All problems of a folder: those of its files, else those of its tensors."""
    config = section(path, family, **options)
    return get_family(family).problems(config) or get_family(family).load(config).examine()[0]


def expect_problem(path: Path, kind: Kind, *values: object, where: str = MODEL, **options: Any) -> None:
    """Expect one problem of a folder, with this kind, place and values."""
    [problem] = examine(path, **options)
    assert (problem.where, problem.kind) == (where, kind), problem
    assert [str(value) for value in values if str(value) not in problem.message] == [], problem


def cut(path: Path, keep: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
    """Edit the tensors of a file; what the edit gives back."""
    state = load_file(path)
    given_back = edit(state)
    save_file(state, path, metadata={"format": "pt"})
    return given_back


def pickled(path: Path) -> None:
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()


def test_sound_models_pass(tiny_repo: Callable[..., Path]) -> None:
    for name, version in CHECKPOINTS:
        repo = tiny_repo(name, version)
        assert examine(repo, name) == []
        assert get_family(name).load(section(repo, name)).examine() == ([], [])


@pytest.mark.parametrize(
    ("damage", "kind", "values"),
    [
        (lambda r: shutil.rmtree(r / "vae"), "not_found", ["'vae'", "model_index.json"]),
        (lambda r: shutil.rmtree(r / "tokenizer"), "not_found", ["'tokenizer'", "model_index.json"]),
        (lambda r: (r / "tokenizer/tokenizer.json").unlink(), "not_found", ["/tokenizer ", "spiece.model"]),
        (lambda r: (r / "scheduler/scheduler_config.json").unlink(), "not_found", ["scheduler_config.json"]),
        (lambda r: cut(r / "transformer/config.json"), "unreadable", ["transformer/config.json", "JSON"]),
        (lambda r: (r / "vae/config.json").write_text("[1]"), "invalid", ["vae/config.json", "list"]),
        (lambda r: cut(r / "tokenizer/tokenizer.json"), "unreadable", ["tokenizer/tokenizer.json", "JSON"]),
        (lambda r: cut(r / ENCODER), "unreadable", [ENCODER, " KiB "]),
        (lambda r: cut(r / TRANSFORMER, 0.01), "unreadable", [TRANSFORMER]),
        (lambda r: (r / TRANSFORMER).write_bytes(b""), "unreadable", [TRANSFORMER, " safetensors file: "]),
        (
            lambda r: (r / TRANSFORMER).write_text("version https://git-lfs.github.com/spec/v1\n"),
            "unreadable", [TRANSFORMER, "`git lfs pull`"],
        ),
        (lambda r: pickled(r / ENCODER), "unsupported", ["/text_encoder ", "(pytorch_model.bin)", "model.safetensors"]),
        (lambda r: (r / TRANSFORMER).unlink(), "not_found", ["diffusion_pytorch_model.safetensors", ": config.json"]),
        (lambda r: (r / "transformer").rename(r / "unet"), "not_found", ["'transformer'", "unet"]),
    ],
)  # fmt: skip
def test_files_that_cannot_be_loaded(repo: Path, damage: Callable[[Path], Any], kind: Kind, values: list[str]) -> None:
    damage(repo)
    expect_problem(repo, kind, *values)


def test_everything_is_said_at_once(repo: Path) -> None:
    cut(repo / ENCODER)
    shutil.rmtree(repo / "vae")
    (repo / "transformer/config.json").write_text("{")
    assert [problem.kind for problem in examine(repo)] == ["unreadable", "not_found", "unreadable"]


def test_shards_and_their_index(repo: Path) -> None:
    folder = repo / "transformer"
    state = load_file(repo / TRANSFORMER)
    names = sorted(state)
    shards = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for shard, held in shards.items():
        save_file({name: state[name] for name in held}, folder / shard)
    (repo / TRANSFORMER).unlink()
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    places = {name: shard for shard, held in shards.items() for name in held}
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert examine(repo) == []
    cut(folder / "a.safetensors")
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    damaged, missing = examine(repo)
    assert (damaged.kind, missing.kind) == ("unreadable", "not_found")
    assert "a.safetensors" in damaged.message
    assert "b.safetensors" in missing.message
    index.write_text(
        json.dumps({"weight_map": {**dict.fromkeys(names[10:], "c.safetensors"), "foreign": "c.safetensors"}})
    )
    expect_problem(repo, "mismatch", "c.safetensors", "foreign")
    for text in ("{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        expect_problem(repo, "invalid", index, "'weight_map'")


def test_a_variant_that_is_not_there(repo: Path) -> None:
    problems = examine(repo, variant="fp16")
    assert [problem.kind for problem in problems] == ["not_found"] * 3  # the text encoder, the VAE, the transformer
    assert "model.fp16.safetensors;" in problems[0].message
    assert ": config.json, model.safetensors" in problems[0].message


def test_a_replacement_is_named_by_its_option(repo: Path, tiny_repo: Callable[..., Path]) -> None:
    cut(repo / TRANSFORMER)
    for place in (repo, repo / TRANSFORMER):
        expect_problem(
            tiny_repo("ltx_video"),
            "unreadable",
            repo / TRANSFORMER,
            where="--transformer_id",
            transformer_id=str(place),
        )
    problems = examine(repo / TRANSFORMER)
    assert {(problem.where, problem.kind) for problem in problems} == {(MODEL, "invalid")}
    assert all("--transformer_path" in problem.message for problem in problems)


# ---- names and shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [ENCODER, TRANSFORMER, "vae/diffusion_pytorch_model.safetensors"])
def test_tensors_that_are_missing_or_of_another_shape(repo: Path, file: str) -> None:
    def lose(state: dict[str, torch.Tensor]) -> str:
        name = sorted(state)[3]
        del state[name]
        return name

    def widen(state: dict[str, torch.Tensor]) -> str:
        name = sorted(state)[5]
        state[name] = torch.zeros(3, 5)
        return name

    lost = change(repo / file, lose)
    expect_problem(repo, "not_found", (repo / file).parent, f"1 tensor: {lost}")
    widened = change(repo / file, widen)
    [misshapen] = [problem.message for problem in examine(repo) if problem.kind == "mismatch"]
    assert misshapen.startswith(f"{widened} in {(repo / file).parent} ")
    assert "(3, 5)" in misshapen


def test_tensors_that_no_class_has_are_a_warning(repo: Path) -> None:
    def add(state: dict[str, torch.Tensor]) -> str:
        state["foreign.weight"] = torch.zeros(2)
        return ""

    change(repo / TRANSFORMER, add)
    problems, [warning] = get_family("ltx_video").load(section(repo)).examine()
    assert problems == []
    assert warning.startswith(f"{MODEL}: {repo / 'transformer'} ")
    assert "1 tensor that a LTXVideoTransformer3DModel " in warning
    assert warning.endswith(": foreign.weight")


def test_text_encoders_may_have_been_saved_with_a_head() -> None:
    t5 = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    whole = {name: tuple(t.shape) for name, t in T5ForConditionalGeneration(t5).state_dict().items()}
    assert compare(T5EncoderModel(t5), whole)[:2] == ([], [])
    without_copies = {name: shape for name, shape in whole.items() if not name.endswith("embed_tokens.weight")}
    assert compare(T5EncoderModel(t5), without_copies)[:2] == ([], [])
    llama = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    causal = LlamaForCausalLM(llama)
    prefixed = {name: tuple(t.shape) for name, t in causal.state_dict().items()}
    assert compare(causal.model, prefixed)[:2] == ([], [])
    del prefixed["model.norm.weight"]
    assert compare(causal.model, prefixed)[0] == ["norm.weight"]


@pytest.mark.parametrize("file", [ENCODER, TRANSFORMER, "vae/diffusion_pytorch_model.safetensors"])
def test_weights_that_are_no_numbers_are_the_files_fault(repo: Path, file: str) -> None:
    def spoil(state: dict[str, torch.Tensor]) -> str:
        name = sorted(state)[2]
        state[name].view(-1)[-1] = float("nan")
        return name

    name = change(repo / file, spoil)
    assert examine(repo) == []  # headers do not tell
    spec = get_family("ltx_video").load(section(repo))
    load = {
        "text_encoder": spec.load_text_encoders,
        "vae": spec.load_vae,
        "transformer": lambda: spec.load_transformer(torch.bfloat16),
    }
    part = file.partition("/")[0]
    with refused_options((MODEL, "invalid")) as caught:
        load[part]()
    assert f"the {part} of {repo} " in str(caught.value)
    assert f"NaN or infinity in 1 tensor: {name};" in str(caught.value)


def test_the_command_refuses_before_it_loads(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 and the file's name, in a dry run too; weights that are no numbers, when the first part is loaded."""
    write_mp4(tmp_path / "clips" / "a.mp4", np.zeros((9, 64, 64, 3), np.uint8), fps=8)
    (tmp_path / "clips" / "a.txt").write_text("a clip")
    command = [
        "train", "--model_name", "ltx_video", "--pretrained_model_name_or_path", str(repo),
        "--data_root", str(tmp_path / "clips"),
        "--output_dir", str(tmp_path / "run"), "--video_resolution_buckets", "9x64x64", "--train_steps", "1",
    ]  # fmt: skip

    state = load_file(repo / ENCODER)
    change(repo / ENCODER, lambda state: state["encoder.final_layer_norm.weight"].fill_(float("nan")))
    assert refused_command(command) == (2, [(MODEL, "invalid")])
    save_file({name: t for name, t in state.items() if "final" not in name}, repo / ENCODER)
    with monkeypatch.context() as patch:
        patch.setattr(ModelMixin, "from_pretrained", None)
        patch.setattr(T5EncoderModel, "from_pretrained", None)
        for more in ((), ("--dry_run",)):
            assert refused_command([*command, *more]) == (2, [(MODEL, "not_found")])
    pickled(repo / ENCODER)
    assert refused_command([*command, "--dry_run"]) == (2, [(MODEL, "unsupported")])


# ---- kinds of checkpoints --------------------------------------------------------------------------------------------


def test_checkpoints_of_other_pipelines_are_refused(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    repo = Path(shutil.copytree(tiny_repo("cogvideox", version="5b"), tmp_path / "model"))
    index = json.loads((repo / "model_index.json").read_text())
    (repo / "model_index.json").write_text(json.dumps({**index, "_class_name": "CogVideoXInpaintPipeline"}))
    expect_problem(
        repo, "unsupported", "CogVideoXInpaintPipeline,", "CogVideoXPipeline or", "--transformer_id", family="cogvideox"
    )


def test_other_kinds_are_refused(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    def with_config(family: str, part: str, **changes: Any) -> Path:
        folder = tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_repo(family), folder)
        file = folder / part / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return folder

    cogvideox = with_config("cogvideox", "transformer", in_channels=33)
    expect_problem(cogvideox, "unsupported", "33 input channels", "16 latent channels", family="cogvideox")
    concat = with_config("hunyuan_video", "transformer", image_condition_type="latent_concat")
    expect_problem(
        concat, "unsupported", "'latent_concat'", "16 input channels", "16 output channels", family="hunyuan_video"
    )
    expect_problem(
        with_config("hunyuan_video", "transformer", in_channels=33),
        "unsupported",
        "33 input channels",
        family="hunyuan_video",
    )
    foreign = with_config("ltx_video", "vae", _class_name="AutoencoderKLWan")
    expect_problem(foreign, "mismatch", "AutoencoderKLWan", "AutoencoderKLLTXVideo")
    expect_problem(with_config("ltx_video", "vae", latent_channels=16), "conflict", "VAE", "16", "128")
    expect_problem(with_config("wan", "vae", z_dim=48), "conflict", "VAE", "48", "16", family="wan")


@pytest.mark.parametrize("within", ["", "vae"])
def test_a_replacement_of_the_hub_is_found_in_its_cache_whole_or_alone(repo: Path, within: str, tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--someone--vae"
    shutil.copytree(repo / "vae", cached / "snapshots" / "abc" / within)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    config = section(repo, vae_id="someone/vae", cache_dir=tmp_path / "hub")
    assert get_family("ltx_video").configs_not_here(config) == []
    assert get_family("ltx_video").weights_on_disk(config)["vae"]


def test_text_encoders_of_bitsandbytes_need_cuda(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = repo / "text_encoder" / "config.json"
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantized))
    monkeypatch.setattr(files, "likely_device_type", lambda: "cpu")
    expect_problem(
        repo, "unsupported", repo / "text_encoder", "bitsandbytes", "CUDA", "--quantize_text_encoders int8 or fp8 "
    )
    monkeypatch.setattr(files, "likely_device_type", lambda: "cuda")
    assert examine(repo) == []


def test_weights_that_are_quantized_already_are_refused_by_name(repo: Path) -> None:
    config = repo / "transformer" / "config.json"
    plain = config.read_text()
    quantized = {**json.loads(plain), "quantization_config": {"quant_method": "torchao", "quant_type": "int8wo"}}
    config.write_text(json.dumps(quantized))
    expect_problem(repo, "unsupported", "quantization_config", "torchao", "--quantize_frozen int8, fp8 or nf4 ")
    config.write_text(plain)

    def as_comfyui_does(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if name.endswith("to_q.weight")]:
            state[name] = state[name].to(torch.float8_e4m3fn)
            state[name.removesuffix("weight") + "scale_weight"] = torch.ones(1)

    encoder = repo / "text_encoder" / "model.safetensors"
    before = encoder.read_bytes()
    change(encoder, lambda state: state.update({"encoder.scaled_fp8": torch.ones(1)}))
    expect_problem(repo, "unsupported", "ComfyUI", ": encoder.scaled_fp8)", "--quantize_text_encoders int8")
    encoder.write_bytes(before)

    change(repo / TRANSFORMER, as_comfyui_does)
    expect_problem(repo, "unsupported", "ComfyUI", ": transformer_blocks.0.attn1.to_q.scale_weight and")


def test_fp8_weights_without_scales_are_numbers(repo: Path) -> None:
    """A plain cast, which is read as what it says."""
    before = load_file(repo / TRANSFORMER)
    name = "transformer_blocks.0.attn1.to_q.weight"
    change(repo / TRANSFORMER, lambda state: state.update({name: state[name].to(torch.float8_e4m3fn)}))
    assert examine(repo) == []
    network = get_family("ltx_video").load(section(repo)).load_transformer(torch.bfloat16)
    found = network.get_parameter(name)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, before[name].to(torch.float8_e4m3fn).to(torch.bfloat16))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_frozen_parts_of_the_dtype_of_their_files_are_mapped(repo: Path) -> None:
    """Processes that map a file share its pages; what is converted is a copy of each process."""

    def mapped(dtype: str) -> tuple[bool, bool]:
        config = section(repo, text_encoder_dtype=dtype, vae_dtype=dtype)
        spec = get_family("ltx_video").load(config)
        loaded = [*spec.load_text_encoders().modules.values(), spec.load_vae()]
        maps = Path("/proc/self/maps").read_text()
        del loaded
        gc.collect()
        return are_mapped(config, ["tokenizer", "text_encoder", "vae"]), str(repo / ENCODER) in maps

    assert mapped("fp32") == (True, True)
    assert mapped("bf16") == (False, False)
    config = section(repo, text_encoder_dtype="fp32", vae_dtype="bf16")
    assert are_mapped(config, ["text_encoder"])
    assert not are_mapped(config, ["text_encoder", "vae"])
    single = section(repo, vae_dtype="fp32", vae_id=str(repo / "vae" / "diffusion_pytorch_model.safetensors"))
    assert not are_mapped(single, ["vae"])
    (repo / ENCODER).unlink()
    assert not are_mapped(config, ["text_encoder"])
