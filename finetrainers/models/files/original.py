"""Layouts of networks as first published, and those of ComfyUI, by class of network.

Sources: diffusers' converters (`loaders/single_file_utils.py`, `scripts/convert_*_to_diffusers.py`), whose direction is
the opposite; the sources of Tencent/HunyuanVideo, Lightricks/LTX-Video, THUDM/CogVideo (sat) and ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from finetrainers.utils.failures import InputError

from . import original_mochi
from .layouts import Layout, Rule, build_layout, rename_layout

#: Name of the layout of a network's own names.
DIFFUSERS = "diffusers"
#: Name of the layout of ComfyUI's own modules.
COMFYUI = "ComfyUI's"


@dataclass(frozen=True)
class Original:
    """Layouts of a network by its authors.

    Attributes:
        prefix: prefix of its names in their files.
        layouts: returns the layouts by name, from the names of the network's tensors; the first is the authors' own,
            which is written.
        has_buffers: whether the files hold the buffers that diffusers computes from the config, such as positions.
    """

    prefix: str
    layouts: Callable[[list[str]], dict[str, Layout]]
    has_buffers: bool = False


def known_layouts(class_name: str, names: Iterable[str]) -> dict[str, Layout]:
    """Return all layouts of a network's tensors in files, diffusers' own first."""
    names = [*names]
    own = {DIFFUSERS: build_layout(names, ())}
    return own | (ORIGINALS[class_name].layouts(names) if class_name in ORIGINALS else {})


def original_layout(class_name: str, names: Iterable[str], kind: str | None = None) -> tuple[Layout, str]:
    """Return the layout of the network's authors, or another of the class, and the prefix of its names.

    Raises:
        ValueError: the class has none here.
    """
    if class_name not in ORIGINALS:
        raise InputError(
            f"unknown original layout of a {class_name}; known: {', '.join(sorted(ORIGINALS))}. Diffusers layout "
            "always works",
            "unsupported",
        )
    original = ORIGINALS[class_name]
    layouts = original.layouts([*names])
    return layouts[next(iter(layouts)) if kind is None else kind], original.prefix


# ---- HunyuanVideo --------------------------------------------------------------------------------------------------


def _joined_rules(pattern: str, template: str, parts: Iterable[str]) -> list[Rule]:
    """Return rules of tensors that are stored one after the other in one."""
    return [Rule(pattern.format(part), template, (place,)) for place, part in enumerate(parts)]


def _mlp(pattern: str, template: str) -> list[Rule]:
    """Return rules of the two layers of an embedding of a number."""
    return [Rule(rf"{pattern}\.linear_{n}\.(.*)", rf"{template}.{place}.\1") for n, place in ((1, 0), (2, 2))]


_REFINER = r"context_embedder\.token_refiner\.refiner_blocks\.(\d+)\."
_REFINER_TO = r"txt_in.individual_token_refiner.blocks.\1."
_DOUBLE, _SINGLE = r"transformer_blocks\.(\d+)\.", r"single_transformer_blocks\.(\d+)\."
_DOUBLE_TO, _SINGLE_TO = r"double_blocks.\1.", r"single_blocks.\1."
_W = r"(weight|bias)"

HUNYUAN_TRANSFORMER = (
    Rule(r"x_embedder\.(.*)", r"img_in.\1"),
    *_mlp(r"context_embedder\.time_text_embed\.timestep_embedder", "txt_in.t_embedder.mlp"),
    Rule(r"context_embedder\.time_text_embed\.text_embedder\.(.*)", r"txt_in.c_embedder.\1"),
    Rule(r"context_embedder\.proj_in\.(.*)", r"txt_in.input_embedder.\1"),
    *_joined_rules(_REFINER + r"attn\.to_{}\." + _W, _REFINER_TO + r"self_attn_qkv.\2", "qkv"),
    Rule(_REFINER + r"attn\.to_out\.0\.(.*)", _REFINER_TO + r"self_attn_proj.\2"),
    Rule(_REFINER + r"ff\.net\.0\.proj\.(.*)", _REFINER_TO + r"mlp.fc1.\2"),
    Rule(_REFINER + r"ff\.net\.2\.(.*)", _REFINER_TO + r"mlp.fc2.\2"),
    Rule(_REFINER + r"norm_out\.linear\.(.*)", _REFINER_TO + r"adaLN_modulation.1.\2"),
    Rule(_REFINER + r"(.*)", _REFINER_TO + r"\2"),
    *_mlp(r"time_text_embed\.timestep_embedder", "time_in.mlp"),
    *_mlp(r"time_text_embed\.guidance_embedder", "guidance_in.mlp"),
    Rule(r"time_text_embed\.text_embedder\.linear_1\.(.*)", r"vector_in.in_layer.\1"),
    Rule(r"time_text_embed\.text_embedder\.linear_2\.(.*)", r"vector_in.out_layer.\1"),
    *_joined_rules(_DOUBLE + r"attn\.to_{}\." + _W, _DOUBLE_TO + r"img_attn_qkv.\2", "qkv"),
    *_joined_rules(_DOUBLE + r"attn\.add_{}_proj\." + _W, _DOUBLE_TO + r"txt_attn_qkv.\2", "qkv"),
    Rule(_DOUBLE + r"attn\.norm_([qk])\.(.*)", _DOUBLE_TO + r"img_attn_\2_norm.\3"),
    Rule(_DOUBLE + r"attn\.norm_added_([qk])\.(.*)", _DOUBLE_TO + r"txt_attn_\2_norm.\3"),
    Rule(_DOUBLE + r"attn\.to_out\.0\.(.*)", _DOUBLE_TO + r"img_attn_proj.\2"),
    Rule(_DOUBLE + r"attn\.to_add_out\.(.*)", _DOUBLE_TO + r"txt_attn_proj.\2"),
    Rule(_DOUBLE + r"norm1\.linear\.(.*)", _DOUBLE_TO + r"img_mod.linear.\2"),
    Rule(_DOUBLE + r"norm1_context\.linear\.(.*)", _DOUBLE_TO + r"txt_mod.linear.\2"),
    Rule(_DOUBLE + r"ff\.net\.0\.proj\.(.*)", _DOUBLE_TO + r"img_mlp.fc1.\2"),
    Rule(_DOUBLE + r"ff\.net\.2\.(.*)", _DOUBLE_TO + r"img_mlp.fc2.\2"),
    Rule(_DOUBLE + r"ff_context\.net\.0\.proj\.(.*)", _DOUBLE_TO + r"txt_mlp.fc1.\2"),
    Rule(_DOUBLE + r"ff_context\.net\.2\.(.*)", _DOUBLE_TO + r"txt_mlp.fc2.\2"),
    *_joined_rules(
        _SINGLE + r"{}\." + _W, _SINGLE_TO + r"linear1.\2",
        (r"attn\.to_q", r"attn\.to_k", r"attn\.to_v", "proj_mlp"),
    ),
    Rule(_SINGLE + r"attn\.norm_([qk])\.(.*)", _SINGLE_TO + r"\2_norm.\3"),
    Rule(_SINGLE + r"norm\.linear\.(.*)", _SINGLE_TO + r"modulation.linear.\2"),
    Rule(_SINGLE + r"proj_out\.(.*)", _SINGLE_TO + r"linear2.\2"),
    # There shift comes before scale.
    Rule(r"norm_out\.linear\.(.*)", r"final_layer.adaLN_modulation.1.\1", (1, 0)),
    Rule(r"proj_out\.(.*)", r"final_layer.linear.\1"),
)  # fmt: skip
#: From Tencent's names to those of ComfyUI's modules, which it also saves.
_HUNYUAN_COMFYUI = (
    (r"^txt_in\.t_embedder\.mlp\.0\.", "txt_in.t_embedder.in_layer."),
    (r"^txt_in\.t_embedder\.mlp\.2\.", "txt_in.t_embedder.out_layer."),
    (r"^txt_in\.c_embedder\.linear_1\.", "txt_in.c_embedder.in_layer."),
    (r"^txt_in\.c_embedder\.linear_2\.", "txt_in.c_embedder.out_layer."),
    (r"_mod\.linear\.", "_mod.lin."),
    (r"_attn_qkv\.", "_attn.qkv."),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
    (r"_attn_q_norm\.weight$", "_attn.norm.query_norm.scale"),
    (r"_attn_k_norm\.weight$", "_attn.norm.key_norm.scale"),
    (r"\.q_norm\.weight$", ".norm.query_norm.scale"),
    (r"\.k_norm\.weight$", ".norm.key_norm.scale"),
    (r"_attn_proj\.", "_attn.proj."),
    (r"\.modulation\.linear\.", ".modulation.lin."),
    (r"_in\.mlp\.2\.", "_in.out_layer."),
    (r"_in\.mlp\.0\.", "_in.in_layer."),
)


def _hunyuan_transformer(names: list[str]) -> dict[str, Layout]:
    tencent = build_layout(names, HUNYUAN_TRANSFORMER)
    return {"Tencent's": tencent, COMFYUI: rename_layout(tencent, _HUNYUAN_COMFYUI)}


def _hunyuan_vae(names: list[str]) -> dict[str, Layout]:
    """Return the layouts of the VAE: Tencent's, whose names diffusers kept, and ComfyUI's, from latent diffusion."""
    attention = [Rule(rf"(.*)mid_block\.attentions\.0\.to_{x}\.(.*)", rf"\1mid.attn_1.{x}.\2") for x in "qkv"]
    attention += [
        Rule(r"(.*)mid_block\.attentions\.0\.group_norm\.(.*)", r"\1mid.attn_1.norm.\2"),
        Rule(r"(.*)mid_block\.attentions\.0\.to_out\.0\.(.*)", r"\1mid.attn_1.proj_out.\2"),
    ]
    comfyui = build_layout(
        names, [*attention, *_latent_diffusion(names), Rule(r"(.*)conv_norm_out\.(.*)", r"\1norm_out.\2")]
    )
    return {
        "Tencent's": build_layout(names, ()),
        COMFYUI: rename_layout(comfyui, [(r"\.conv_shortcut\.", ".nin_shortcut.")]),
    }


# ---- HunyuanVideo-1.5 ----------------------------------------------------------------------------------------------

#: The names of HunyuanVideo, and those that are new. Tencent's files have query, key and value apart.
_HUNYUAN_15 = (
    *_mlp(r"time_embed\.timestep_embedder", "time_in.mlp"),
    Rule(r"context_embedder_2\.norm\.(.*)", r"byt5_in.layernorm.\1"),
    Rule(r"context_embedder_2\.linear_(\d)\.(.*)", r"byt5_in.fc\1.\2"),
    *(
        Rule(rf"image_embedder\.{name}\.(.*)", rf"vision_in.proj.{place}.\1")
        for name, place in (("norm_in", 0), ("linear_1", 1), ("linear_2", 3), ("norm_out", 4))
    ),
    Rule(r"cond_type_embed\.(.*)", r"cond_type_embedding.\1"),
    *HUNYUAN_TRANSFORMER,
)
HUNYUAN_15_TRANSFORMER = (
    Rule(_DOUBLE + r"attn\.to_([qkv])\.(.*)", _DOUBLE_TO + r"img_attn_\2.\3"),
    Rule(_DOUBLE + r"attn\.add_([qkv])_proj\.(.*)", _DOUBLE_TO + r"txt_attn_\2.\3"),
    *_HUNYUAN_15,
)


def _hunyuan_15_transformer(names: list[str]) -> dict[str, Layout]:
    """Return ComfyUI's files, which musubi-tuner also reads; Tencent's; and the names of ComfyUI's own modules."""
    joined = build_layout(names, _HUNYUAN_15)
    tencent = build_layout(names, HUNYUAN_15_TRANSFORMER)
    return {"ComfyUI's files": joined, "Tencent's": tencent, COMFYUI: rename_layout(joined, _HUNYUAN_COMFYUI)}


def _hunyuan_15_vae(names: list[str]) -> dict[str, Layout]:
    """Return the layout of the VAE by Tencent and ComfyUI: latent diffusion's, with blocks in the order of decoding."""
    half, number = r"(encoder|decoder)\.", r"(\d+)\."
    rules = [
        Rule(half + r"mid_block\.resnets\.0\.(.*)", r"\1.mid.block_1.\2"),
        Rule(half + r"mid_block\.resnets\.1\.(.*)", r"\1.mid.block_2.\2"),
        Rule(half + r"mid_block\.attentions\.0\.to_([qkv])\.(.*)", r"\1.mid.attn_1.\2.\3"),
        Rule(half + r"mid_block\.attentions\.0\.(.*)", r"\1.mid.attn_1.\2"),
        Rule(half + r"(down|up)_blocks\." + number + r"resnets\.(.*)", r"\1.\2.\3.block.\4"),
        Rule(half + r"(down|up)_blocks\." + number + r"(down|up)samplers\.0\.(.*)", r"\1.\2.\3.\4sample.\5"),
    ]
    return {"Tencent's": build_layout(names, rules)}


# ---- CogVideoX -----------------------------------------------------------------------------------------------------

_COG_TO = r"transformer.layers.\1."
COG_TRANSFORMER = (
    *_joined_rules(_DOUBLE + r"attn1\.to_{}\." + _W, _COG_TO + r"attention.query_key_value.\2", "qkv"),
    Rule(_DOUBLE + r"attn1\.to_out\.0\.(.*)", _COG_TO + r"attention.dense.\2"),
    Rule(_DOUBLE + r"attn1\.norm_q\.(.*)", r"mixins.adaln_layer.query_layernorm_list.\1.\2"),
    Rule(_DOUBLE + r"attn1\.norm_k\.(.*)", r"mixins.adaln_layer.key_layernorm_list.\1.\2"),
    # Twelve vectors: the first three of each half belong to the norm before attention, the others to the one before the
    # MLP.
    Rule(_DOUBLE + r"norm1\.linear\.(.*)", r"mixins.adaln_layer.adaLN_modulations.\1.1.\2", (0, 2)),
    Rule(_DOUBLE + r"norm2\.linear\.(.*)", r"mixins.adaln_layer.adaLN_modulations.\1.1.\2", (1, 3)),
    Rule(_DOUBLE + r"norm1\.norm\.(.*)", _COG_TO + r"input_layernorm.\2"),
    Rule(_DOUBLE + r"norm2\.norm\.(.*)", _COG_TO + r"post_attention_layernorm.\2"),
    Rule(_DOUBLE + r"ff\.net\.0\.proj\.(.*)", _COG_TO + r"mlp.dense_h_to_4h.\2"),
    Rule(_DOUBLE + r"ff\.net\.2\.(.*)", _COG_TO + r"mlp.dense_4h_to_h.\2"),
    Rule(r"norm_final\.(.*)", r"transformer.final_layernorm.\1"),
    *_mlp("time_embedding", "time_embed"),
    *_mlp("ofs_embedding", "ofs_embed"),
    Rule(r"patch_embed\.pos_embedding", r"mixins.pos_embed.pos_embedding"),
    Rule(r"patch_embed\.(.*)", r"mixins.patch_embed.\1"),
    Rule(r"norm_out\.norm\.(.*)", r"mixins.final_layer.norm_final.\1"),
    Rule(r"norm_out\.linear\.(.*)", r"mixins.final_layer.adaLN_modulation.1.\1"),
    Rule(r"proj_out\.(.*)", r"mixins.final_layer.linear.\1"),
)


#: From diffusers' names to those of ComfyUI's own CogVideoX.
COG_COMFYUI = (
    (r"^transformer_blocks\.(\d+)\.", r"blocks.\1."),
    (r"\.attn1\.to_([qkv])\.", r".\1."),
    (r"\.attn1\.to_out\.0\.", ".attn_out."),
    (r"\.attn1\.norm_", ".norm_"),
    (r"\.ff\.net\.0\.proj\.", ".ff_proj."),
    (r"\.ff\.net\.2\.", ".ff_out."),
    (r"^(time|ofs)_embedding\.linear_", r"\1_embedding_linear_"),
)


def _cog_transformer(names: list[str]) -> dict[str, Layout]:
    authors, comfyui = build_layout(names, COG_TRANSFORMER), rename_layout(build_layout(names, ()), COG_COMFYUI)
    return {"SwissArmyTransformer's": authors, COMFYUI: comfyui}


def _latent_diffusion(names: Iterable[str]) -> list[Rule]:
    """Return rules of latent diffusion's autoencoder, which counts the decoder's blocks from the other end."""
    ups = sorted({int(hit[1]) for name in names if (hit := re.match(r"decoder\.up_blocks\.(\d+)\.", name))})
    rules = [
        Rule(r"(encoder|decoder)\.mid_block\.resnets\.0\.(.*)", r"\1.mid.block_1.\2"),
        Rule(r"(encoder|decoder)\.mid_block\.resnets\.1\.(.*)", r"\1.mid.block_2.\2"),
        Rule(r"encoder\.down_blocks\.(\d+)\.resnets\.(.*)", r"encoder.down.\1.block.\2"),
        Rule(r"encoder\.down_blocks\.(\d+)\.downsamplers\.0\.(.*)", r"encoder.down.\1.downsample.\2"),
    ]
    for up in ups:
        rules.append(Rule(rf"decoder\.up_blocks\.{up}\.resnets\.(.*)", rf"decoder.up.{len(ups) - 1 - up}.block.\1"))
        rules.append(
            Rule(rf"decoder\.up_blocks\.{up}\.upsamplers\.0\.(.*)", rf"decoder.up.{len(ups) - 1 - up}.upsample.\1")
        )
    return rules


def _cog_vae(names: list[str]) -> dict[str, Layout]:
    layout = build_layout(names, _latent_diffusion(names))
    return {"SwissArmyTransformer's": rename_layout(layout, [(r"\.conv_shortcut\.", ".nin_shortcut.")])}


# ---- LTX-Video -----------------------------------------------------------------------------------------------------

_LTX_TRANSFORMER = (
    (r"^proj_in\.", "patchify_proj."),
    (r"^time_embed\.", "adaln_single."),
    (r"\.norm_([qk])\.", r".\1_norm."),
)
#: Parts of each block of the VAE, in the order of the authors' flat list.
_LTX_DOWN = ("resnets", "downsamplers.0", "conv_out")
_LTX_UP = ("conv_in", "upsamplers.0", "resnets")


def _ltx_transformer(names: list[str]) -> dict[str, Layout]:
    return {"Lightricks'": rename_layout(build_layout(names, ()), _LTX_TRANSFORMER)}


def _ltx_vae(names: list[str]) -> dict[str, Layout]:
    """Return the layout of Lightricks' VAE: flat lists, where resampling and changes of width are separate blocks."""
    rules = [
        Rule("latents_mean", "per_channel_statistics.mean-of-means"),
        Rule("latents_std", "per_channel_statistics.std-of-means"),
        Rule(r"decoder\.(time_embedder|scale_shift_table)(.*)", r"decoder.last_\1\2"),
        *_flat("encoder", "down_blocks", _LTX_DOWN, names, first=0),
        *_flat("decoder", "up_blocks", _LTX_UP, names, first=1),
    ]
    last = len({rule.template.split(".")[2] for rule in rules if rule.template.startswith("encoder.down_blocks.")})
    rules += [
        Rule(r"encoder\.mid_block\.(.*)", rf"encoder.down_blocks.{last}.\1"),
        Rule(r"decoder\.mid_block\.(.*)", r"decoder.up_blocks.0.\1"),
    ]
    changes = [
        (r"\.resnets\.", ".res_blocks."),
        (r"conv_shortcut\.conv\.", "conv_shortcut."),
        (r"norm3\.(weight|bias)$", r"norm3.norm.\1"),
    ]
    return {"Lightricks'": rename_layout(build_layout(names, rules), changes)}


# ---- LTX-2 ---------------------------------------------------------------------------------------------------------

#: Names of ComfyUI and of Lightricks' own code; those of 2.3 alone come last.
_LTX2_TRANSFORMER = (
    (r"^(audio_)?proj_in\.", r"\1patchify_proj."),
    (r"^(audio_)?time_embed\.", r"\1adaln_single."),
    (r"^av_cross_attn_(video|audio)_scale_shift\.", r"av_ca_\1_scale_shift_adaln_single."),
    (r"^av_cross_attn_video_a2v_gate\.", "av_ca_a2v_gate_adaln_single."),
    (r"^av_cross_attn_audio_v2a_gate\.", "av_ca_v2a_gate_adaln_single."),
    (r"\.(video|audio)_a2v_cross_attn_scale_shift_table$", r".scale_shift_table_a2v_ca_\1"),
    (r"\.norm_([qk])\.", r".\1_norm."),
    (r"^(audio_)?prompt_adaln\.", r"\1prompt_adaln_single."),
)


def _ltx2_transformer(names: list[str]) -> dict[str, Layout]:
    return {"Lightricks'": rename_layout(build_layout(names, ()), _LTX2_TRANSFORMER)}


def _flat(
    half: str, blocks: str, parts: tuple[str, ...], names: Iterable[str], *, first: int, each: bool = False
) -> list[Rule]:
    """Return rules that count the parts of nested blocks as the authors' flat list does, from `first` on.

    The residual blocks of a block are one part, or `each` is.
    """
    names, rules, number = [*names], [], first
    count = len({hit[1] for name in names if (hit := re.match(rf"{half}\.{blocks}\.(\d+)\.", name))})
    for block in range(count):
        place = f"{half}.{blocks}.{block}."
        for part in parts:
            inner = (
                sorted({int(n[len(place) :].split(".")[1]) for n in names if n.startswith(f"{place}{part}.")})
                if (part == "resnets")
                else []
            )
            if not any(name.startswith(f"{place}{part}.") for name in names):
                continue
            if part == "resnets" and each:
                rules += [
                    Rule(re.escape(f"{place}resnets.{n}.") + r"(.*)", rf"{half}.{blocks}.{number + n}.\1")
                    for n in inner
                ]
                number += len(inner)
                continue
            if part == "resnets":  # with the embedding of times, which belongs to the block
                rules.append(
                    Rule(re.escape(place) + r"((?:resnets|time_embedder)\..*)", rf"{half}.{blocks}.{number}.\1")
                )
            else:
                rules.append(Rule(re.escape(f"{place}{part}.") + r"(.*)", rf"{half}.{blocks}.{number}.\1"))
            number += 1
    return rules


# ---- Wan -----------------------------------------------------------------------------------------------------------

_BLOCK, _BLOCK_TO = r"blocks\.(\d+)\.", r"blocks.\1."
WAN_TRANSFORMER = (
    *(
        Rule(rf"condition_embedder\.{name}_embedder\.linear_{n}\.(.*)", rf"{name}_embedding.{place}.\1")
        for name in ("time", "text")
        for n, place in ((1, 0), (2, 2))
    ),
    Rule(r"condition_embedder\.time_proj\.(.*)", r"time_projection.1.\1"),
    Rule(r"condition_embedder\.image_embedder\.norm1\.(.*)", r"img_emb.proj.0.\1"),
    Rule(r"condition_embedder\.image_embedder\.ff\.net\.0\.proj\.(.*)", r"img_emb.proj.1.\1"),
    Rule(r"condition_embedder\.image_embedder\.ff\.net\.2\.(.*)", r"img_emb.proj.3.\1"),
    Rule(r"condition_embedder\.image_embedder\.norm2\.(.*)", r"img_emb.proj.4.\1"),
    Rule(r"condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
    *(
        Rule(_BLOCK + rf"{attention}\.{own}\.(.*)", _BLOCK_TO + rf"{name}.{other}")
        for attention, name in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for own, other in (
            (r"to_([qkv])", r"\2.\3"),
            (r"to_out\.0", r"o.\2"),
            (r"add_([kv])_proj", r"\2_img.\3"),
            ("norm_added_k", r"norm_k_img.\2"),
            (r"norm_([qk])", r"norm_\2.\3"),
        )
    ),
    # The norm before cross-attention, which alone has weights, is the authors' third.
    Rule(_BLOCK + r"norm2\.(.*)", _BLOCK_TO + r"norm3.\2"),
    Rule(_BLOCK + r"ffn\.net\.0\.proj\.(.*)", _BLOCK_TO + r"ffn.0.\2"),
    Rule(_BLOCK + r"ffn\.net\.2\.(.*)", _BLOCK_TO + r"ffn.2.\2"),
    Rule(_BLOCK + "scale_shift_table", _BLOCK_TO + "modulation"),
    Rule("scale_shift_table", "head.modulation"),
    Rule(r"proj_out\.(.*)", r"head.head.\1"),
)  # fmt: skip
#: Layers within each residual block of the VAE, whose authors keep them in one list.
_WAN_RESIDUAL = (
    (r"(?<=\d)\.norm1\.gamma$", ".residual.0.gamma"),
    (r"(?<=\d)\.conv1\.(weight|bias)$", r".residual.2.\1"),
    (r"(?<=\d)\.norm2\.gamma$", ".residual.3.gamma"),
    (r"(?<=\d)\.conv2\.(weight|bias)$", r".residual.6.\1"),
    (r"\.conv_shortcut\.", ".shortcut."),
)


def _wan_transformer(names: list[str]) -> dict[str, Layout]:
    return {"Wan-AI's": build_layout(names, WAN_TRANSFORMER)}


def _skyreels_transformer(names: list[str]) -> dict[str, Layout]:
    """Return the layout of SkyReels-V2's network: Wan's, with the frame rate's projection."""
    rates = [
        Rule(r"fps_projection\.net\.0\.proj\.(.*)", r"fps_projection.0.\1"),
        Rule(r"fps_projection\.net\.2\.(.*)", r"fps_projection.2.\1"),
    ]
    return {"Skywork's": build_layout(names, [*WAN_TRANSFORMER, *rates])}


def _wan_vae(names: list[str]) -> dict[str, Layout]:
    """Return the layout of Wan's VAE: that of 2.1 has flat lists of blocks, that of 2.2 5B lists within a list."""
    number = r"(\d+)\."
    decoder_blocks = {hit[2] for name in names if (hit := re.match(r"decoder\.up_blocks\.0\.(resnets\.(\d+))", name))}
    rules = [
        Rule(r"(encoder|decoder)\.mid_block\.resnets\.0\.(.*)", r"\1.middle.0.\2"),
        Rule(r"(encoder|decoder)\.mid_block\.attentions\.0\.(.*)", r"\1.middle.1.\2"),
        Rule(r"(encoder|decoder)\.mid_block\.resnets\.1\.(.*)", r"\1.middle.2.\2"),
        Rule(r"(encoder|decoder)\.conv_in\.(.*)", r"\1.conv1.\2"),
        Rule(r"(encoder|decoder)\.norm_out\.(.*)", r"\1.head.0.\2"),
        Rule(r"(encoder|decoder)\.conv_out\.(.*)", r"\1.head.2.\2"),
        Rule(r"quant_conv\.(.*)", r"conv1.\1"),
        Rule(r"post_quant_conv\.(.*)", r"conv2.\1"),
    ]
    if any(".downsampler." in name for name in names):
        downs = {hit[1] for name in names if (hit := re.match(r"encoder\.down_blocks\.0\.resnets\.(\d+)", name))}
        rules += [
            Rule(r"encoder\.down_blocks\." + number + r"resnets\.(.*)", r"encoder.downsamples.\1.downsamples.\2"),
            Rule(
                r"encoder\.down_blocks\." + number + r"downsampler\.(.*)",
                rf"encoder.downsamples.\1.downsamples.{len(downs)}.\2",
            ),
            Rule(r"decoder\.up_blocks\." + number + r"resnets\.(.*)", r"decoder.upsamples.\1.upsamples.\2"),
            Rule(
                r"decoder\.up_blocks\." + number + r"upsampler\.(.*)",
                rf"decoder.upsamples.\1.upsamples.{len(decoder_blocks)}.\2",
            ),
        ]
    else:
        rules.append(Rule(r"encoder\.down_blocks\.(.*)", r"encoder.downsamples.\1"))
        rules += _flat("decoder", "up_blocks", ("resnets", "upsamplers.0"), names, first=0, each=True)
    changes = [*_WAN_RESIDUAL, (r"^decoder\.up_blocks\.", "decoder.upsamples.")]
    return {"Wan-AI's": rename_layout(build_layout(names, rules), changes)}


def _kandinsky_transformer(names: list[str]) -> dict[str, Layout]:
    """Return the authors' layout, whose names diffusers and ComfyUI also have."""
    return {"Kandinsky Lab's": build_layout(names, ())}


#: Layouts by name of the network's class.
ORIGINALS: dict[str, Original] = {
    "HunyuanVideoTransformer3DModel": Original("", _hunyuan_transformer),
    "AutoencoderKLHunyuanVideo": Original("", _hunyuan_vae),
    "HunyuanVideo15Transformer3DModel": Original("", _hunyuan_15_transformer),
    "AutoencoderKLHunyuanVideo15": Original("", _hunyuan_15_vae),
    "CogVideoXTransformer3DModel": Original("model.diffusion_model.", _cog_transformer, has_buffers=True),
    "AutoencoderKLCogVideoX": Original("", _cog_vae),
    "LTXVideoTransformer3DModel": Original("model.diffusion_model.", _ltx_transformer),
    "AutoencoderKLLTXVideo": Original("vae.", _ltx_vae),
    "LTX2VideoTransformer3DModel": Original("model.diffusion_model.", _ltx2_transformer),
    "AutoencoderKLLTX2Video": Original("vae.", _ltx_vae),
    "WanTransformer3DModel": Original("model.diffusion_model.", _wan_transformer),
    "AutoencoderKLWan": Original("", _wan_vae),
    "SkyReelsV2Transformer3DModel": Original("model.diffusion_model.", _skyreels_transformer),
    "Kandinsky5Transformer3DModel": Original("", _kandinsky_transformer),
    "MochiTransformer3DModel": Original("", original_mochi.transformer_layouts),
    "AutoencoderKLMochi": Original("", original_mochi.vae_layouts),
}
