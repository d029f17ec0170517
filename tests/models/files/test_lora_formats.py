"""LoRAs in the formats of other programs: their predictions when read back by us, by diffusers and by PEFT."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    Kandinsky5Transformer3DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    MochiTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
)
from diffusers.loaders.lora_conversion_utils import _convert_hunyuan_video_lora_to_diffusers
from every_family import FAMILIES
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from finetrainers.config.sections import ModelSection
from finetrainers.models.files.lora_formats import Factors, Lora, from_stored, lora_from_state, to_stored
from finetrainers.models.files.lora_names import format_problem, kind_of
from finetrainers.models.files.original import known_layouts
from finetrainers.models.lora_files import cast, check_written, lora_metadata, with_averages, write_lora
from finetrainers.models.registry import get_family
from finetrainers.models.spec import ModelSpec
from finetrainers.utils.failures import Kind

FORMATS = ("diffusers", "comfyui", "kohya", "peft")
#: Networks of the published widths, with as few blocks as there are kinds of them.
PUBLISHED = {
    "ltx_video": (LTXVideoTransformer3DModel, {"num_layers": 1}),
    "ltx2": (LTX2VideoTransformer3DModel, {"num_layers": 1, "cross_attn_mod": True, "gated_attn": True}),
    "hunyuan_video": (
        HunyuanVideoTransformer3DModel,
        {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
    ),
    "hunyuan_video_15": (HunyuanVideo15Transformer3DModel, {"num_layers": 1, "num_refiner_layers": 1}),
    "cogvideox": (CogVideoXTransformer3DModel, {"num_layers": 1, "ofs_embed_dim": 512}),
    "kandinsky5": (
        Kandinsky5Transformer3DModel,
        {
            "in_visual_dim": 16,
            "out_visual_dim": 16,
            "model_dim": 1792,
            "ff_dim": 7168,
            "num_text_blocks": 1,
            "num_visual_blocks": 1,
            "visual_cond": True,
        },
    ),
    "mochi": (MochiTransformer3DModel, {"num_layers": 2}),
    "skyreels_v2": (
        SkyReelsV2Transformer3DModel,
        {"num_layers": 1, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 2048, "inject_sample_info": True},
    ),
    "wan": (
        WanTransformer3DModel,
        {"num_layers": 1, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120, "pos_embed_seq_len": 514},
    ),
}


@pytest.fixture
def spec_of(tiny_repo: Callable[..., Path]) -> Callable[[str], ModelSpec]:
    def build(family: str) -> ModelSpec:
        config = ModelSection(model_name=family, pretrained_model_name_or_path=str(tiny_repo(family)))
        return get_family(family).load(config)

    return build


def trained(spec: ModelSpec, **settings: Any) -> nn.Module:
    """The tiny network with a random adapter on all of its linear layers and convolutions."""
    network: Any = spec.load_transformer(torch.float32).requires_grad_(False)
    targets = [n for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d)]
    if settings.get("use_dora"):
        targets = [name for name in targets if "patch" not in name and "x_embedder" not in name]
    network.add_adapter(LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": targets, **settings}))
    for number, (name, parameter) in enumerate(network.named_parameters()):
        if "lora_A" in name or "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        elif "magnitude" in name:
            parameter.data *= 1.25
    return network


def lora_of(network: Any) -> Lora:
    return lora_from_state(get_peft_model_state_dict(network), network.peft_config["default"].to_dict())


@torch.no_grad()
def output(spec: ModelSpec, network: nn.Module) -> Tensor:
    """What a network predicts for the same noise and texts."""
    draw = torch.Generator().manual_seed(1)
    conditions, meta = spec.empty_inputs(1)
    for tensor in conditions.tensors.values():
        tensor.fill_(True) if tensor.dtype == torch.bool else tensor.copy_(torch.randn(tensor.shape, generator=draw))
    channels = spec.latent_channels(network)
    latents = torch.randn(1, channels, 2, 4, 4, generator=draw)
    level = 0.5 if spec.facts.is_flow else 500
    return spec.predict(network, latents, torch.tensor([level]), conditions, meta)


def write(directory: Path, lora: Lora, kind: str, spec: ModelSpec) -> Path:
    network = spec.transformer_on_meta()
    directory.mkdir()
    path = write_lora(directory, "style", lora, kind, spec=spec, network=network, metadata={})
    checked = check_written(path, lora, spec=spec, network=network, kind=kind)
    assert checked.layers == len(lora.layers)
    assert not any(name.startswith("text_transformer_blocks") for name in checked.left_out)  # musubi-tuner reads these
    return path


@pytest.mark.rotating
@pytest.mark.parametrize("family", FAMILIES)
def test_every_format_computes_what_was_trained(family: str, spec_of: Callable[..., ModelSpec], tmp_path: Path) -> None:
    """Rank and alpha differ, also between layers: a network that reads a file predicts what the trained one does."""
    spec = spec_of(family)
    names = [name for name, _ in spec.transformer_on_meta().named_modules() if name.startswith(f"{spec.blocks[0]}.0.")]
    other = next(name for name in names if re.search(r"\.(ff|ffn|feed_forward)\.(net\.2|out_layer)$", name))
    network = trained(spec, rank_pattern={f"^{other}": 2}, alpha_pattern={f"^{other}": 5})
    expected, lora = output(spec, network), lora_of(network)
    base = output(spec, spec.load_transformer(torch.float32))
    assert (expected - base).abs().max() > 1e-2
    assert (lora.layers[other].rank, lora.layers[other].scale) == (2, 2.5)
    for kind in FORMATS:
        path = write(tmp_path / kind, lora, kind, spec)
        again = spec.load_transformer(torch.float32)
        found = spec.lora_of(path)
        assert found.kind == kind
        again.load_lora_adapter(found.state(), prefix=None, metadata=found.complete_settings())
        torch.testing.assert_close(output(spec, again), expected, rtol=1e-4, atol=1e-4)
        assert found.layers.keys() == lora.layers.keys()
        if kind != "comfyui":  # which has the scale in one of the factors
            for name, one in lora.layers.items():
                assert found.layers[name].up.equal(one.up), (kind, name)
                assert found.layers[name].down.equal(one.down), (kind, name)
    stock = PeftModel.from_pretrained(spec.load_transformer(torch.float32), tmp_path / "peft")
    torch.testing.assert_close(output(spec, stock.base_model.model), expected, rtol=1e-4, atol=1e-4)
    pipeline = spec.pipeline(spec.load_transformer(torch.float32), spec.load_vae(), spec.load_scheduler())
    spec.load_into(pipeline, next((tmp_path / "diffusers").glob("*.safetensors")))
    torch.testing.assert_close(output(spec, pipeline.transformer), expected, rtol=1e-4, atol=1e-4)


def test_rank_stabilized_and_decomposed(spec_of: Callable[..., ModelSpec], tmp_path: Path) -> None:
    spec = spec_of("ltx_video")
    for settings, formats in (({"use_rslora": True}, FORMATS), ({"use_dora": True}, ("diffusers", "peft"))):
        network = trained(spec, **settings)
        expected = output(spec, network)
        for kind in formats:
            path = write(tmp_path / f"{kind} {[*settings]}", lora_of(network), kind, spec)
            again = spec.load_transformer(torch.float32)
            found = spec.lora_of(path)
            again.load_lora_adapter(found.state(), prefix=None, metadata=found.complete_settings())
            torch.testing.assert_close(output(spec, again), expected, rtol=1e-4, atol=1e-4)
    assert found.is_dora
    for kind in ("comfyui", "kohya"):
        assert "DoRA" in str(format_problem("ltx_video", kind, is_lora=True, is_dora=True))


def adapter(family: str, *, only: tuple[str, ...] = (), device: str = "cpu") -> tuple[nn.Module, Lora]:
    """A network of a published width on the meta device, and a random LoRA of it, of rank 2."""
    cls, options = PUBLISHED[family]
    with torch.device("meta"):
        network = cls(**options)
    draw, layers = torch.Generator().manual_seed(0), {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d) and (not only or name.endswith(only)):
            outputs, *inputs = module.weight.shape
            shapes = (2, *inputs), (outputs, 2, *[1] * (len(inputs) - 1))
            factors = [
                torch.empty(s, device="meta") if device == "meta" else torch.randn(s, generator=draw) for s in shapes
            ]
            layers[name] = Factors(*factors, 2.0)
    return network, Lora(layers)


def effect(one: Factors) -> Tensor:
    """What a LoRA adds to a layer's output for a fixed random input."""
    inputs = torch.randn(one.down[0].numel(), 2, generator=torch.Generator().manual_seed(1))
    return one.scale * one.up.flatten(1) @ (one.down.flatten(1) @ inputs)


def test_diffusers_converter_reads_the_joined_layers_of_hunyuan_video() -> None:
    """In full width, the only one that it knows. Layers that it does not read have no names, or are its mistakes."""
    network, lora = adapter("hunyuan_video")
    stored = to_stored(lora, network, "comfyui")
    state = _convert_hunyuan_video_lora_to_diffusers(dict(stored))
    left = []
    for name, one in lora.layers.items():
        down, up = (state.get(f"transformer.{name}.lora_{factor}.weight") for factor in "AB")
        fits = down is not None and up is not None and up.shape[1] == len(down)
        if not fits or not torch.allclose(effect(Factors(down, up, 1.0)), effect(one), rtol=1e-4, atol=1e-3):
            left.append(name)
    assert all(name.startswith(("context_embedder.", "time_text_embed.", "norm_out.")) for name in left)
    assert sum("blocks" in name for name in left) == 3  # query, key and value of the text refiner
    assert len(left) == 12
    # Those of musubi-tuner's own conversion: dots for underscores, and the names that contain underscores put right.
    kohya = to_stored(lora, network, "kohya")
    dotted = {}
    for name, tensor in kohya.items():
        layer, _, rest = name.removeprefix("lora_unet_").partition(".")
        plain = (
            layer.replace("_", ".")
            .replace("double.blocks.", "double_blocks.")
            .replace("single.blocks.", "single_blocks.")
        )
        dotted[f"{plain.replace('img.', 'img_').replace('txt.', 'txt_').replace('attn.', 'attn_')}.{rest}"] = tensor
    for name in ("double_blocks.0.img_attn_qkv", "double_blocks.0.txt_mlp.fc1", "single_blocks.0.linear1"):
        assert dotted[f"{name}.alpha"] == 2.0 * len(dotted[f"{name}.lora_down.weight"])
        theirs = Factors(dotted[f"{name}.lora_down.weight"], dotted[f"{name}.lora_up.weight"], 2.0)
        ours = Factors(
            stored[f"diffusion_model.{name}.lora_A.weight"], stored[f"diffusion_model.{name}.lora_B.weight"], 1.0
        )
        torch.testing.assert_close(effect(theirs), effect(ours), rtol=1e-4, atol=1e-3)


def comfyui_keys(family: str, network: nn.Module) -> set[str]:
    """Return the names that ComfyUI looks for in LoRA files, as `model_lora_keys_unet` makes them of its own."""
    names = [*network.state_dict()]
    layouts = known_layouts(type(network).__name__, names)
    if family == "cogvideox":
        own = {
            name.replace("transformer_blocks.", "blocks.").replace("attn1.to_out.0", "attn_out")
                .replace("attn1.to_", "").replace("ff.net.0.proj", "ff_proj").replace("ff.net.2", "ff_out")
                .replace("embedding.linear", "embedding_linear")
            for name in names
        }  # fmt: skip
    else:
        own = {*layouts.get("ComfyUI's", next(iter(kept for kind, kept in layouts.items() if kind != "diffusers")))}
    found = set()
    for key in (f"diffusion_model.{name}" for name in own if name.endswith(".weight")):
        plain = key.removesuffix(".weight")
        found |= {plain, "lora_unet_" + plain.removeprefix("diffusion_model.").replace(".", "_")}
        if family.startswith("hunyuan_video"):  # of diffusion-pipe and older files
            old = (
                key.replace("_mod.lin.", "_mod.linear.")
                .replace("_attn.qkv.", "_attn_qkv.")
                .replace("_attn.proj.", "_attn_proj.")
            )
            old = (
                old.replace("mlp.0.", "mlp.fc1.")
                .replace("mlp.2.", "mlp.fc2.")
                .replace(".modulation.lin.", ".modulation.linear.")
            )
            found.add(old.removesuffix(".weight"))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_comfyui_finds_every_layer(family: str) -> None:
    network, lora = adapter(family, device="meta")
    keys = comfyui_keys(family, network)
    for kind in ("comfyui", *(["kohya"] if family in ("ltx_video", "wan", "mochi", "kandinsky5") else [])):
        layers = {re.sub(r"\.(lora_(A|B|down|up)\.weight|alpha)$", "", name) for name in to_stored(lora, network, kind)}
        assert sorted(layers - keys) == []


def test_layers_that_are_joined_there_and_only_partly_trained() -> None:
    """What has no LoRA gets zeros, and none when it is read."""
    network, lora = adapter("hunyuan_video", only=("attn.to_q", "attn.to_v"))
    assert len(lora.layers) == 6
    stored = to_stored(lora, network, "kohya")
    up = stored["lora_unet_single_blocks_0_linear1.lora_up.weight"]
    assert up.shape == (3072 * 7, 4)
    assert not up[3072:6144].any()
    assert not up[9216:].any()
    found = from_stored(stored, network, "kohya")
    assert found.layers.keys() == lora.layers.keys()
    assert all(found.layers[name].up.equal(one.up) for name, one in lora.layers.items())


def test_one_pair_of_factors_for_a_joined_layer_is_not_taken_apart() -> None:
    """Files that were trained on joined layers, as musubi-tuner does; what is written of them again is the same."""
    network, _ = adapter("hunyuan_video", only=("none",))
    draw = torch.Generator().manual_seed(0)
    name = "lora_unet_double_blocks_0_txt_attn_qkv"
    theirs = {
        f"{name}.lora_down.weight": torch.randn(4, 3072, generator=draw),
        f"{name}.lora_up.weight": torch.randn(3 * 3072, 4, generator=draw),
        f"{name}.alpha": torch.tensor(2.0),
    }
    found = from_stored(theirs, network, "kohya")
    assert sorted(found.layers) == [f"transformer_blocks.0.attn.add_{x}_proj" for x in "kqv"]
    assert {(one.rank, one.scale) for one in found.layers.values()} == {(4, 0.5)}
    assert (found.settings["r"], found.settings["lora_alpha"]) == (4, 2.0)
    again = to_stored(found, network, "kohya")
    assert again.keys() == theirs.keys()
    assert all(again[key].equal(tensor) for key, tensor in theirs.items())


def test_names_that_are_in_use() -> None:
    """Other programs' files: ComfyUI's own names, diffusion-pipe's prefix, factors up and down, named adapters."""
    network, lora = adapter(
        "hunyuan_video", only=("transformer_blocks.0.norm1.linear", "transformer_blocks.0.attn.to_out.0")
    )
    (name, one), *_ = lora.layers.items()
    for key in ("diffusion_model.double_blocks.0.img_mod.lin", "transformer.double_blocks.0.img_mod.linear"):
        for factors in (
            ("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight"),
            ("lora_A.default.weight", "lora_B.default.weight"),
        ):  # fmt: skip
            stored = dict(zip((f"{key}.{factor}" for factor in factors), (one.down, one.up), strict=True))
            assert kind_of(stored) == "comfyui"
            assert from_stored(stored, network, "comfyui").layers[name].up is one.up


#: Layers of a block that musubi-tuner's `lora_wan` trains in an image-to-video model, as it names them.
MUSUBI_WAN = {
    *(f"{a}_attn_{x}" for a in ("self", "cross") for x in "qkvo"), "cross_attn_k_img", "cross_attn_v_img",
    "ffn_0", "ffn_2",
}  # fmt: skip


def test_wan_has_the_names_of_musubi_tuner() -> None:
    network, lora = adapter("wan", device="meta")
    blocks = {name: one for name, one in lora.layers.items() if name.startswith("blocks.0.")}
    stored = to_stored(Lora(blocks), network, "kohya")
    assert {re.sub(r"^lora_unet_blocks_0_|\..*$", "", name) for name in stored} == MUSUBI_WAN


def test_files_of_wan_that_are_in_use() -> None:
    """VideoX-Fun's prefix, lightx2v's factors up and down; and its changes of biases, which no LoRA has."""
    network, lora = adapter("wan", only=("blocks.0.attn1.to_q",))
    (name, one), *_ = lora.layers.items()
    factors = {"lora_down.weight": one.down, "lora_up.weight": one.up}
    for key, kind in (
        ("diffusion_model.blocks.0.self_attn.q", "comfyui"), ("lora_unet__blocks_0_self_attn_q", "kohya"),
        ("lora_unet_blocks_0_self_attn_q", "kohya"),
    ):  # fmt: skip
        stored = {f"{key}.{factor}": tensor for factor, tensor in factors.items()}
        assert kind_of(stored) == kind
        read = from_stored(stored, network, kind)
        assert read.layers[name].up is one.up
        assert [*read.layers] == [name]
    for change in ("blocks.0.self_attn.q.diff_b", "blocks.0.norm3.diff"):
        stored = {f"diffusion_model.blocks.0.self_attn.q.{factor}": tensor for factor, tensor in factors.items()}
        with refused("unsupported", change, "--transformer_id"):
            from_stored({**stored, f"diffusion_model.{change}": torch.zeros(5120)}, network, "comfyui")


def test_what_does_not_fit_is_named(spec_of: Callable[..., ModelSpec], tmp_path: Path) -> None:
    spec = spec_of("ltx_video")
    good = to_stored(lora_of(trained(spec)), spec.transformer_on_meta(), "kohya")
    key = "lora_unet_transformer_blocks_0_attn1_to_q"

    def refuse(kind: Kind, *values: str, **changes: Any) -> None:
        found = {name: tensor for name, tensor in good.items() if changes.get(name, True) is not None} | changes
        save_file({name: tensor for name, tensor in found.items() if tensor is not None}, tmp_path / "a.safetensors")
        with refused(kind, tmp_path / "a.safetensors", "ltx_video transformer", "kohya", *values):
            spec.lora_of(tmp_path / "a.safetensors")

    zeros = torch.zeros(4, 4)
    unknown = {f"lora_unet_blocks_0_q.lora_{x}.weight": zeros.clone() for x in ("up", "down")}
    layer = "transformer_blocks_0_attn1_to_q"
    refuse("mismatch", "1 layer ", ": blocks_0_q", **unknown)
    refuse("not_found", f"1 layer: {layer}", **{f"{key}.lora_up.weight": None})
    refuse("mismatch", layer, "4 outputs", " 32", **{f"{key}.lora_up.weight": zeros})
    refuse("unknown", "1 tensor ", f": {key}.lokr_w1", **{f"{key}.lokr_w1": zeros})
    refuse("unsupported", f"DoRA magnitudes ({key}.dora_scale)", **{f"{key}.dora_scale": zeros})
    save_file(
        {**good, f"{key}.lora_up.weight": good[f"{key}.lora_up.weight"] * float("nan")}, tmp_path / "a.safetensors"
    )
    nan = "NaN or infinity in 1 tensor: transformer_blocks.0.attn1.to_q.lora_B.weight"
    with refused("invalid", tmp_path / "a.safetensors", nan):
        spec.lora_of(tmp_path / "a.safetensors")


def test_a_file_that_is_wrong_is_found_by_reading_it_back(spec_of: Callable[..., ModelSpec], tmp_path: Path) -> None:
    spec = spec_of("ltx_video")
    lora = lora_of(trained(spec))
    path = write(tmp_path / "a", lora, "comfyui", spec)
    for change, layers in (("drop", "without 1 layer: "), ("scale", "with 1 layer "), ("swap", "with 2 layers ")):
        state = load_file(path)
        names = [f"diffusion_model.transformer_blocks.{n}.attn1.to_k.lora_" for n in (0, 1)]
        if change == "drop":
            del state[f"{names[0]}A.weight"], state[f"{names[0]}B.weight"]
        elif change == "scale":
            state[f"{names[0]}B.weight"] *= 1.01
        else:
            for x in ("A.weight", "B.weight"):
                state[names[0] + x], state[names[1] + x] = state[names[1] + x], state[names[0] + x]
        save_file(state, tmp_path / "wrong.safetensors")
        with refused("mismatch", tmp_path / "wrong.safetensors", layers, "transformer_blocks.0.attn1.to_k"):
            check_written(
                tmp_path / "wrong.safetensors", lora, spec=spec, network=spec.transformer_on_meta(), kind="comfyui"
            )


def test_dtypes_averages_and_metadata(spec_of: Callable[..., ModelSpec], tmp_path: Path) -> None:
    spec = spec_of("ltx_video")
    lora = lora_of(trained(spec))
    for dtype in (torch.bfloat16, torch.float16):
        path = write(tmp_path / str(dtype), cast(lora, dtype), "comfyui", spec)
        assert {tensor.dtype for tensor in load_file(path).values()} == {dtype}
    name, one = next(iter(lora.layers.items()))
    huge = Lora({name: Factors(one.down, one.up * 1e6, 1.0)})
    with refused("invalid", "1 tensor ", "torch.float16", f"{name}.lora_B.weight", "bf16"):
        cast(huge, torch.float16)
    averaged = with_averages(lora, {f"{name}.lora_B.default.weight": torch.ones_like(one.up)})
    assert averaged.layers[name].up.equal(torch.ones_like(one.up))
    assert averaged.layers[name].scale == one.scale
    found = lora_metadata(
        lora, architecture=("net", "https://x"), facts={"name": "a", "base": "b", "trigger": "MY", "license": None}
    )
    assert found["ss_network_dim"] == "4"
    assert found["ss_network_alpha"] == "6"
    assert found["modelspec.architecture"] == "net/lora"
    assert found["modelspec.trigger_phrase"] == "MY"
    assert "modelspec.license" not in found


GOLDEN = Path(__file__).parents[2] / "golden" / "lora_names.json"


def test_names_are_those_of_the_golden_list() -> None:
    """Names in full width, with numbers of blocks left out, their shapes at rank 2, and how many there are."""
    import os

    found: dict[str, dict[str, list[Any]]] = {}
    for family in FAMILIES:
        network, lora = adapter(family, device="meta")
        for kind in ("comfyui", "kohya"):
            stored = to_stored(lora, network, kind)
            names = Counter(re.sub(r"(?<=blocks[._])\d+", "*", name) for name in stored)
            shapes = {
                re.sub(r"(?<=blocks[._])\d+", "*", name): "x".join(map(str, t.shape)) for name, t in stored.items()
            }
            found[f"{family} {kind}"] = [f"{name} {shapes[name]} {count}" for name, count in sorted(names.items())]
    if os.environ.get("FINETRAINERS_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text())
