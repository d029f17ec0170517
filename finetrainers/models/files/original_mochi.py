"""Layouts of Mochi's networks by their authors, which ComfyUI reads as well; see `original`.

Sources: genmoai/mochi (`dit/joint_model`, `vae/models.py`), `comfy/ldm/genmo` of ComfyUI, and diffusers'
`convert_mochi_to_diffusers.py`. The authors keep the VAE's encoder and decoder in two files; ComfyUI's single file has
both, with prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .layouts import Layout, Rule, build_layout, rename_layout

_BLOCK, _BLOCK_TO = r"transformer_blocks\.(\d+)\.", r"blocks.\1."


def _joined(pattern: str, template: str) -> list[Rule]:
    """Return rules of query, key and value, which are one after the other in one layer."""
    return [Rule(pattern.format(part), template, (place,)) for place, part in enumerate("qkv")]


TRANSFORMER = (
    Rule(r"patch_embed\.(.*)", r"x_embedder.\1"),
    Rule(r"time_embed\.timestep_embedder\.linear_1\.(.*)", r"t_embedder.mlp.0.\1"),
    Rule(r"time_embed\.timestep_embedder\.linear_2\.(.*)", r"t_embedder.mlp.2.\1"),
    Rule(r"time_embed\.pooler\.(.*)", r"t5_y_embedder.\1"),
    Rule(r"time_embed\.caption_proj\.(.*)", r"t5_yproj.\1"),
    Rule(_BLOCK + r"norm1\.linear\.(.*)", _BLOCK_TO + r"mod_x.\2"),
    Rule(_BLOCK + r"norm1_context\.linear(?:_1)?\.(.*)", _BLOCK_TO + r"mod_y.\2"),  # the last block has `linear_1`
    *_joined(_BLOCK + r"attn1\.to_{}\.(.*)", _BLOCK_TO + r"attn.qkv_x.\2"),
    *_joined(_BLOCK + r"attn1\.add_{}_proj\.(.*)", _BLOCK_TO + r"attn.qkv_y.\2"),
    Rule(_BLOCK + r"attn1\.norm_([qk])\.(.*)", _BLOCK_TO + r"attn.\2_norm_x.\3"),
    Rule(_BLOCK + r"attn1\.norm_added_([qk])\.(.*)", _BLOCK_TO + r"attn.\2_norm_y.\3"),
    Rule(_BLOCK + r"attn1\.to_out\.0\.(.*)", _BLOCK_TO + r"attn.proj_x.\2"),
    Rule(_BLOCK + r"attn1\.to_add_out\.(.*)", _BLOCK_TO + r"attn.proj_y.\2"),
    # There the half that goes through the nonlinearity comes first, and shift comes before scale.
    Rule(_BLOCK + r"ff\.net\.0\.proj\.(.*)", _BLOCK_TO + r"mlp_x.w1.\2", (1, 0)),
    Rule(_BLOCK + r"ff\.net\.2\.(.*)", _BLOCK_TO + r"mlp_x.w2.\2"),
    Rule(_BLOCK + r"ff_context\.net\.0\.proj\.(.*)", _BLOCK_TO + r"mlp_y.w1.\2", (1, 0)),
    Rule(_BLOCK + r"ff_context\.net\.2\.(.*)", _BLOCK_TO + r"mlp_y.w2.\2"),
    Rule(r"norm_out\.linear\.(.*)", r"final_layer.mod.\1", (1, 0)),
    Rule(r"proj_out\.(.*)", r"final_layer.linear.\1"),
)
#: Layers within each residual block of the VAE, whose authors keep them in one list.
_RESIDUAL = (
    (r"\.norm1\.norm_layer\.", ".stack.0."),
    (r"\.conv1\.conv\.", ".stack.2."),
    (r"\.norm2\.norm_layer\.", ".stack.3."),
    (r"\.conv2\.conv\.", ".stack.5."),
)


def transformer_layouts(names: list[str]) -> dict[str, Layout]:
    """Return the layout of the transformer."""
    return {"Genmo's": build_layout(names, TRANSFORMER)}


def vae_layouts(names: list[str]) -> dict[str, Layout]:
    """Return the layout of the VAE: flat lists of layers, with attention as a part of residual blocks."""
    downs, ups = _count(names, "encoder.down_blocks"), _count(names, "decoder.up_blocks")
    first_down = 1 + _count(names, "encoder.block_in.resnets")
    rules = [
        Rule(r"encoder\.proj_in\.(.*)", r"encoder.layers.0.\1"),
        *_residual_blocks(names, "encoder.block_in", "encoder.layers", first=1),
        *_residual_blocks(names, "encoder.block_out", "encoder.layers", first=first_down + downs),
        Rule(r"encoder\.norm_out\.norm_layer\.(.*)", r"encoder.output_norm.\1"),
        Rule(r"decoder\.conv_in\.(.*)", r"decoder.blocks.0.0.\1"),
        *_residual_blocks(names, "decoder.block_in", "decoder.blocks.0", first=1),
        *_residual_blocks(names, "decoder.block_out", f"decoder.blocks.{ups + 1}", first=0),
        Rule(r"(encoder|decoder)\.proj_out\.(.*)", r"\1.output_proj.\2"),
    ]
    for block in range(downs):
        own, layers = f"encoder.down_blocks.{block}", f"encoder.layers.{first_down + block}.layers"
        rules.append(Rule(re.escape(own) + r"\.conv_in\.conv\.(.*)", rf"{layers}.0.\1"))
        rules += _residual_blocks(names, own, layers, first=1)
    for block in range(ups):
        own, layers = f"decoder.up_blocks.{block}", f"decoder.blocks.{block + 1}"
        rules.append(Rule(re.escape(own) + r"\.proj\.(.*)", rf"{layers}.proj.\1"))
        rules += _residual_blocks(names, own, f"{layers}.blocks", first=0)
    return {"Genmo's": rename_layout(build_layout(names, rules), _RESIDUAL)}


def _count(names: Iterable[str], path: str) -> int:
    """Count the modules of a list."""
    return len({hit[1] for name in names if (hit := re.match(re.escape(path) + r"\.(\d+)\.", name))})


def _residual_blocks(names: list[str], path: str, to: str, *, first: int) -> list[Rule]:
    """Return rules of a block's residual blocks and their attentions, numbered from `first` on in the list `to`."""
    rules = []
    for number in range(_count(names, f"{path}.resnets")):
        own, layer = re.escape(path) + rf"\.{{}}\.{number}\.", f"{to}.{first + number}"
        rules += [
            Rule(own.format("resnets") + r"(.*)", rf"{layer}.\1"),
            Rule(own.format("norms") + r"norm_layer\.(.*)", rf"{layer}.attn_block.norm.\1"),
            *_joined(own.format("attentions") + r"to_{}\.(.*)", rf"{layer}.attn_block.attn.qkv.\1"),
            Rule(own.format("attentions") + r"to_out\.0\.(.*)", rf"{layer}.attn_block.attn.out.\1"),
        ]
    return rules
