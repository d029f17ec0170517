"""Single weight files: every layout of every class, written, read back, and compared with diffusers' converters."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_utils
from every_family import CHECKPOINTS, FAMILIES
from published_networks import NETWORKS
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import nn

from finetrainers.config.sections import ModelSection
from finetrainers.models.files.layouts import stored_shapes, stored_tensors
from finetrainers.models.files.lora_formats import save_original
from finetrainers.models.files.original import DIFFUSERS, ORIGINALS, known_layouts, original_layout
from finetrainers.models.files.single_file import (
    BY_DIFFUSERS,
    load_single_file,
    match_network,
    save_single_file,
    tensor_shapes,
)
from finetrainers.models.registry import get_family

GOLDEN = Path(__file__).parents[2] / "golden" / "original_names.json"
#: Configs of published VAEs of LTX-Video whose blocks differ; the rest are the classes' defaults.
LTX_VAES: dict[str, dict[str, Any]] = {
    "0.9.0": {},
    "0.9.1": {
        "decoder_block_out_channels": (256, 512, 1024), "decoder_layers_per_block": (5, 6, 7, 8),
        "decoder_spatio_temporal_scaling": (True,) * 3, "decoder_inject_noise": (True, True, True, False),
        "upsample_residual": (True,) * 3, "upsample_factor": (2, 2, 2), "timestep_conditioning": True,
    },
    "0.9.5": {
        "block_out_channels": (128, 256, 512, 1024, 2048), "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
        "decoder_block_out_channels": (256, 512, 1024), "layers_per_block": (4, 6, 6, 2, 2),
        "decoder_layers_per_block": (5, 5, 5, 5), "spatio_temporal_scaling": (True,) * 4,
        "decoder_spatio_temporal_scaling": (True,) * 3, "decoder_inject_noise": (False,) * 4,
        "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        "upsample_residual": (True,) * 3, "upsample_factor": (2, 2, 2), "timestep_conditioning": True,
        "spatial_compression_ratio": 32, "temporal_compression_ratio": 8,
    },
}  # fmt: skip
#: Networks at their full width, by a name of the golden file: class and what differs from the class's defaults.
FULL: dict[str, tuple[str, dict[str, Any]]] = {
    "HunyuanVideo transformer": ("HunyuanVideoTransformer3DModel", NETWORKS["HunyuanVideo"].config),
    "HunyuanVideo VAE": ("AutoencoderKLHunyuanVideo", {}),
    "HunyuanVideo-1.5 transformer": ("HunyuanVideo15Transformer3DModel", {"num_layers": 2}),
    "HunyuanVideo-1.5 VAE": ("AutoencoderKLHunyuanVideo15", {}),
    "LTX-Video transformer": ("LTXVideoTransformer3DModel", NETWORKS["LTX-Video"].config),
    **{f"LTX-Video VAE {version}": ("AutoencoderKLLTXVideo", config) for version, config in LTX_VAES.items()},
    "CogVideoX-2b transformer": ("CogVideoXTransformer3DModel", {}),
    "CogVideoX-5b-I2V transformer": (
        "CogVideoXTransformer3DModel",
        {"in_channels": 32, "num_layers": 42, "num_attention_heads": 48, "use_rotary_positional_embeddings": True,
         "use_learned_positional_embeddings": True},
    ),
    "CogVideoX1.5-5B-I2V transformer": (
        "CogVideoXTransformer3DModel",
        {"in_channels": 32, "num_layers": 42, "num_attention_heads": 48, "use_rotary_positional_embeddings": True,
         "patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 512, "sample_height": 96, "sample_width": 170},
    ),
    "CogVideoX VAE": ("AutoencoderKLCogVideoX", {}),
    "Wan image-to-video transformer": (
        "WanTransformer3DModel", {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120, "num_layers": 2},
    ),
    "Kandinsky 5 transformer": (
        "Kandinsky5Transformer3DModel", {**NETWORKS["Kandinsky-5-Lite"].config, "num_visual_blocks": 2},
    ),
    "Mochi transformer": ("MochiTransformer3DModel", {}),
    "Mochi VAE": ("AutoencoderKLMochi", {}),
    "Wan 2.1 VAE": ("AutoencoderKLWan", {}),
    "Wan 2.2 VAE": (
        "AutoencoderKLWan",
        {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12,
         "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48,
         "latents_std": [1.0] * 48},
    ),
}  # fmt: skip
CONVERTERS = {
    "HunyuanVideoTransformer3DModel": single_file_utils.convert_hunyuan_video_transformer_to_diffusers,
    "LTXVideoTransformer3DModel": single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers,
    "AutoencoderKLLTXVideo": single_file_utils.convert_ltx_vae_checkpoint_to_diffusers,
    "WanTransformer3DModel": single_file_utils.convert_wan_transformer_to_diffusers,
    "MochiTransformer3DModel": single_file_utils.convert_mochi_transformer_checkpoint_to_diffusers,
    "AutoencoderKLWan": single_file_utils.convert_wan_vae_to_diffusers,
}


def full(name: str) -> nn.Module:
    cls, config = FULL[name]
    with torch.device("meta"):
        network: nn.Module = getattr(diffusers, cls)(**config)
    return network


def one_column(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return a network's tensors at their full length, one number wide: every row of all has a separate number."""
    found, start = {}, 0
    for name, shape in tensor_shapes(network).items():
        length = shape[0] if shape else 1
        numbers = torch.arange(start, start + length, dtype=torch.float64)
        found[name] = numbers.reshape(length, *[1] * (len(shape) - 1)) if shape else numbers[0]
        start += length
    return found


@pytest.mark.parametrize(
    "name", [name for name, (cls, _) in FULL.items() if cls in CONVERTERS and name != "Wan 2.2 VAE"]
)
def test_original_layouts_are_what_diffusers_converts(name: str) -> None:
    """At full width, since diffusers' converter of HunyuanVideo knows no other."""
    cls, network = FULL[name][0], full(name)
    tensors = one_column(network)
    layout, prefix = original_layout(cls, tensors)
    stored = stored_tensors(layout, tensors, prefix)
    last = f"{prefix}encoder.conv_out.conv.weight"  # by whose width the converter knows the version
    if last in stored:
        stored[last] = stored[last].expand(-1, tensor_shapes(network)["encoder.conv_out.conv.weight"][1], -1, -1, -1)
    found = CONVERTERS[cls](dict(stored))
    assert found.keys() == tensors.keys()
    wrong = [
        key
        for key in tensors
        if key != "encoder.conv_out.conv.weight"
        and not torch.equal(found[key].flatten()[: tensors[key].numel()], tensors[key].flatten())
    ]
    assert wrong == []


def test_cogvideox_has_the_order_of_its_authors() -> None:
    """sat/dit_video_concat.py: `AdaLNMixin` chunks a block's modulation into twelve; the last six are the text's."""
    tensors = one_column(full("CogVideoX-5b-I2V transformer"))
    layout, prefix = original_layout("CogVideoXTransformer3DModel", tensors)
    stored = stored_tensors(layout, tensors, prefix)
    block = f"{prefix}mixins.adaln_layer.adaLN_modulations.7.1.weight"
    twelve = stored[block].chunk(12)
    norm1, norm2 = (tensors[f"transformer_blocks.7.{n}.linear.weight"].chunk(6) for n in ("norm1", "norm2"))
    # shift, scale and gate of attention, then of the MLP; of the video, then of the text.
    expected = [*norm1[:3], *norm2[:3], *norm1[3:], *norm2[3:]]
    assert all(torch.equal(one, other) for one, other in zip(twelve, expected, strict=True))
    joined = stored[f"{prefix}transformer.layers.7.attention.query_key_value.bias"].chunk(3)
    for name, bias in zip("qkv", joined, strict=True):
        assert torch.equal(bias, tensors[f"transformer_blocks.7.attn1.to_{name}.bias"])
    assert torch.equal(
        stored[f"{prefix}mixins.pos_embed.pos_embedding"].flatten(), tensors["patch_embed.pos_embedding"].flatten()
    )


#: Names that ComfyUI's modules have (comfy/ldm/hunyuan_video/model.py, comfy/ldm/flux/layers.py), and of its file of
#: the VAE as users have reported them (kijai/ComfyUI-HunyuanVideoWrapper, issue 248), by the golden file's entries.
COMFYUI = {
    "HunyuanVideo transformer": (
        "img_in.proj.weight", "time_in.in_layer.bias", "guidance_in.out_layer.weight", "vector_in.in_layer.weight",
        "txt_in.input_embedder.weight", "txt_in.t_embedder.in_layer.weight", "txt_in.c_embedder.out_layer.bias",
        "txt_in.individual_token_refiner.blocks.1.self_attn.qkv.weight",
        "txt_in.individual_token_refiner.blocks.0.self_attn.proj.bias",
        "txt_in.individual_token_refiner.blocks.0.mlp.0.weight",
        "txt_in.individual_token_refiner.blocks.0.mlp.2.weight",
        "txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.weight",
        "txt_in.individual_token_refiner.blocks.0.norm2.weight", "double_blocks.19.img_attn.norm.query_norm.scale",
        "double_blocks.0.txt_attn.norm.key_norm.scale", "double_blocks.0.img_attn.qkv.weight",
        "double_blocks.0.txt_attn.proj.bias", "double_blocks.0.img_mod.lin.weight", "double_blocks.0.txt_mlp.0.weight",
        "double_blocks.0.img_mlp.2.bias", "single_blocks.39.linear1.weight", "single_blocks.0.linear2.bias",
        "single_blocks.0.norm.key_norm.scale", "single_blocks.0.modulation.lin.bias", "final_layer.linear.weight",
        "final_layer.adaLN_modulation.1.weight",
    ),
    "HunyuanVideo VAE": (
        "encoder.norm_out.weight", "decoder.mid.attn_1.k.weight", "decoder.mid.attn_1.norm.bias",
        "decoder.mid.attn_1.proj_out.weight", "decoder.mid.block_1.conv1.conv.weight",
        "decoder.mid.block_2.norm2.weight",
        "decoder.up.0.block.0.nin_shortcut.conv.weight", "decoder.up.0.block.0.conv1.conv.bias", "quant_conv.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMFYUI)
def test_comfyui_has_these_names(name: str) -> None:
    found = known_layouts(FULL[name][0], tensor_shapes(full(name)))["ComfyUI's"]
    assert set(COMFYUI[name]) - found.keys() == set()


#: Names of ComfyUI's `WanModel` (comfy/ldm/wan/model.py) for first and last frame, without weight and bias: those of a
#: block, and the others.
COMFYUI_WAN = (
    {
        *(f"{a}_attn.{x}" for a in ("self", "cross") for x in ("q", "k", "v", "o", "norm_q", "norm_k")), "norm3",
        "cross_attn.k_img", "cross_attn.v_img", "cross_attn.norm_k_img", "ffn.0", "ffn.2", "modulation",
    },
    {
        "patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2",
        "time_projection.1", "head.head", "head.modulation", "img_emb.emb_pos",
        *(f"img_emb.proj.{n}" for n in (0, 1, 3, 4)),
    },
)  # fmt: skip


def test_wan_is_written_with_the_names_of_comfyui(tiny_repo: Callable[..., Path], tmp_path: Path) -> None:
    """And no others: musubi-tuner refuses a file with the positions that diffusers computes."""
    network = diffusers.WanTransformer3DModel.from_pretrained(tiny_repo("wan", "flf2v") / "transformer")
    save_original(tmp_path / "a.safetensors", network, network.state_dict())
    bare = {
        re.sub(r"^model\.diffusion_model\.|\.(weight|bias)$", "", name)
        for name in load_file(tmp_path / "a.safetensors")
    }
    block = {name.split(".", 2)[2] for name in bare if name.startswith("blocks.")}
    assert (block, {name for name in bare if not name.startswith("blocks.")}) == COMFYUI_WAN


def summary(names: dict[str, tuple[int, ...]]) -> dict[str, list[Any]]:
    """Names and shapes, with how many blocks have them."""
    counts = Counter((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), shape) for name, shape in names.items())
    return {f"{name} {'x'.join(map(str, shape))}": count for (name, shape), count in sorted(counts.items())}


def test_the_names_of_full_networks_are_those_of_the_golden_file() -> None:
    found = {}
    for name, (cls, _) in FULL.items():
        shapes = tensor_shapes(full(name))
        for kind, layout in known_layouts(cls, shapes).items():
            if kind != DIFFUSERS:
                found[f"{name}, {kind}"] = summary(stored_shapes(layout, shapes))
    if os.environ.get("FINETRAINERS_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text())


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("family", "version", "part"),
    # The names in a HunyuanVideo that starts from an image are those in the other.
    [(*one, "transformer") for one in CHECKPOINTS if one != ("hunyuan_video", "i2v")]
    + [(family, None, "vae") for family in FAMILIES],
)
def test_every_layout_is_read_as_the_folder_is(
    family: str, version: str | None, part: str, tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """All tensors, buffers that are not stored, and dtypes, from every layout with any prefix."""
    folder = tiny_repo(family, **({} if version is None else {"version": version})) / part
    cls: Any = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    expected = cls.from_pretrained(folder, torch_dtype=torch.bfloat16)
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    file = tmp_path / "one.safetensors"
    for kind, layout in known_layouts(cls.__name__, weights).items():
        for prefix in ("", "model.model."):
            stored = stored_tensors(layout, weights, prefix)
            for name in [name for name in stored if ".attn_1." in name and stored[name].ndim == 2]:
                stored[name] = stored[name][..., None, None, None]  # 1x1x1 convolutions there
            save_file(stored, file)
            match = match_network(file, expected)
            assert (match.problems("it"), match.unused, match.prefix) == ([], [], prefix), kind
            assert match.kind == kind or match.layout == layout  # Tencent's VAE has diffusers' names
            network, info = load_single_file(cls, cls.load_config(folder), file, torch.bfloat16)
            assert not info["missing_keys"]
            same(network, expected)
    save_single_file(file, cls.__name__, weights)
    assert match_network(file, expected).prefix == ORIGINALS[cls.__name__].prefix
    same(load_single_file(cls, cls.load_config(folder), file, torch.bfloat16)[0], expected)


def encoder_files(weights: dict[str, torch.Tensor], cls: str) -> list[dict[str, torch.Tensor]]:
    """The ways in which files hold a text encoder, with what else they hold."""
    bare = {name.removeprefix("text_model."): tensor.clone() for name, tensor in weights.items()}
    other = torch.zeros(2, 2)
    if cls == "LlamaModel":
        llava = {f"language_model.model.{name}": tensor for name, tensor in bare.items()}
        return [
            {**{f"model.{name}": tensor for name, tensor in bare.items()}, "lm_head.weight": other},
            {
                **llava,
                "vision_tower.vision_model.pre_layrnorm.weight": other,
                "multi_modal_projector.linear_1.bias": other,
            },
        ]
    if cls == "CLIPTextModel":
        return [
            {**{f"text_model.{n}": t for n, t in bare.items()}, "text_projection.weight": other, "logit_scale": other}
        ]
    if cls == "UMT5EncoderModel":  # ComfyUI's file also holds the tokenizer
        return [bare, {**bare, "spiece_model": torch.zeros(5, dtype=torch.uint8)}]
    return [bare, {**bare, "encoder.embed_tokens.weight": bare["shared.weight"].clone()}]


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("ltx_video", "text_encoder"),
        ("hunyuan_video", "text_encoder"),
        ("hunyuan_video", "text_encoder_2"),
        ("wan", "text_encoder"),
    ],
)
def test_text_encoders_are_read_as_the_folder_is(
    family: str, part: str, tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """Without a word about what belongs to other parts, or is tied; what is missing is said, and misnamed."""
    repo = tiny_repo(family)
    spec = get_family(family).load(ModelSection(model_name=family, pretrained_model_name_or_path=str(repo)))
    cls, file = spec.parts[part], tmp_path / "encoder.safetensors"
    expected = cls.from_pretrained(repo / part, dtype=torch.bfloat16)
    spec = get_family(family).load(spec.config.model_copy(update={f"{part}_id": str(file)}))
    for given in encoder_files(load_file(repo / part / "model.safetensors"), cls.__name__):
        weights = {name: tensor.clone() for name, tensor in given.items()}
        save_file(weights, file)
        assert spec.examine() == ([], [])
        found = spec.load_text_encoders()[part]
        same(found, expected)
        lost = next(name for name in weights if "layer" in name and name.endswith("weight"))
        save_file({name: tensor for name, tensor in weights.items() if name != lost}, file)
        (problem,), _ = spec.examine()
        assert (problem.where, problem.kind) == (f"--{part}_id", "not_found")
        assert problem.message.startswith(f"{file} ")
        assert problem.message.endswith(f" 1 tensor: {lost}")


def test_classes_without_a_table_are_read_by_diffusers(
    tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes of families registered from outside: tensors unknown to the converter are missing, by our names."""
    folder, cls = tiny_repo("ltx_video") / "transformer", diffusers.LTXVideoTransformer3DModel
    expected, file = cls.from_pretrained(folder, torch_dtype=torch.bfloat16), tmp_path / "one.safetensors"
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    save_single_file(file, cls.__name__, weights)
    monkeypatch.delitem(ORIGINALS, cls.__name__)
    assert match_network(file, expected).kind == BY_DIFFUSERS
    same(load_single_file(cls, cls.load_config(folder), file, torch.bfloat16)[0], expected)
    save_file({"something": torch.zeros(2)}, file)
    [error] = match_network(file, expected).problems("it")
    assert error.kind == "mismatch"
    assert "scale_shift_table; " in str(error)
    assert str(error).endswith(": something")
    with refused("unsupported", cls.__name__, "AutoencoderKLHunyuanVideo"):
        save_single_file(file, cls.__name__, weights)


def same(network: nn.Module, expected: nn.Module) -> None:
    ours, theirs = (dict([*n.named_parameters(), *n.named_buffers()]) for n in (network, expected))
    assert ours.keys() == theirs.keys()
    assert [k for k in theirs if ours[k].dtype != theirs[k].dtype or not torch.equal(ours[k], theirs[k])] == []
    assert not network.training
