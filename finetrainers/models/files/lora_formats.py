"""LoRA files of other programs: their names and scales from and to those of PEFT, which training has.

A file holds two factors for each layer, and something that gives its scale. ComfyUI and the trainers of kohya-ss name layers
as the network's authors do, who join some: their one layer for query, key and value gets one pair of factors, block by block
in the second. So what is written computes what was trained, and reading it takes the blocks apart again.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from torch import Tensor, nn

from finetrainers.utils.headers import read_header
from finetrainers.utils.text import plural

from .files import some
from .layouts import Layout, Rows, layout_of, renamed
from .lora_names import PREFIXES, kind_of
from .original import COMFYUI, layouts_of, original_layout
from .single_file import check_buffers, computed_buffers, save_single_file

#: Formats with names of their own.
Foreign = Literal["comfyui", "kohya"]
#: ComfyUI calls these embeddings otherwise than Tencent, and knows them by its own names only.
_HUNYUAN_EMBEDDERS = (
    (r"^(time_in|guidance_in|txt_in\.t_embedder)\.mlp\.0\.", r"\1.in_layer."),
    (r"^(time_in|guidance_in|txt_in\.t_embedder)\.mlp\.2\.", r"\1.out_layer."),
    (r"^txt_in\.c_embedder\.linear_1\.", "txt_in.c_embedder.in_layer."),
    (r"^txt_in\.c_embedder\.linear_2\.", "txt_in.c_embedder.out_layer."),
)
_LTX, _HUNYUAN, _COG = "LTXVideoTransformer3DModel", "HunyuanVideoTransformer3DModel", "CogVideoXTransformer3DModel"
#: Layer names in LoRA files, by class of network and format, from the names of the network's tensors.
_LAYOUTS: Mapping[tuple[str, Foreign], Callable[[list[str]], Layout]] = {
    (_LTX, "comfyui"): lambda names: original_layout(_LTX, names)[0],
    (_LTX, "kohya"): lambda names: original_layout(_LTX, names)[0],
    (_HUNYUAN, "comfyui"): lambda names: renamed(original_layout(_HUNYUAN, names)[0], _HUNYUAN_EMBEDDERS),
    (_HUNYUAN, "kohya"): lambda names: original_layout(_HUNYUAN, names)[0],
    (_COG, "comfyui"): lambda names: original_layout(_COG, names, COMFYUI)[0],
    # VideoX-Fun's prefix ends with two underscores.
    (_COG, "kohya"): lambda names: renamed(layout_of(names, ()), [("^", ".")]),
}
_FACTOR = re.compile(
    r"(?P<layer>.+)\.(?:lora_?(?P<factor>A|B|down|up)(?:\.\w+)??\.weight|(?P<alpha>alpha)|"
    r"lora_(?P<magnitude>magnitude_vector)(?:\.\w+)??(?:\.weight)?)"
)


@dataclass(frozen=True)
class Factors:
    """What a LoRA adds to one layer: `scale * up @ down`.

    Attributes:
        down: `[rank, inputs, ...]`, PEFT's A.
        up: `[outputs, rank, ...]`, PEFT's B.
        scale: what their product is multiplied by.
        magnitude: of DoRA, `[outputs]`.
    """

    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """The rank."""
        return self.down.shape[0]


@dataclass(frozen=True)
class Lora:
    """A LoRA of a network in diffusers layout.

    Attributes:
        layers: by the names of the network's modules.
        settings: PEFT's, as far as the file has them or its scales tell.
        kind: the format that it was read from.
    """

    layers: Mapping[str, Factors]
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "diffusers"

    @property
    def is_dora(self) -> bool:
        """Whether layers have magnitudes."""
        return any(one.magnitude is not None for one in self.layers.values())

    def state(self) -> dict[str, Tensor]:
        """The tensors by PEFT's names."""
        found: dict[str, Tensor] = {}
        for name, one in self.layers.items():
            found |= {f"{name}.lora_A.weight": one.down, f"{name}.lora_B.weight": one.up}
            if one.magnitude is not None:
                found[f"{name}.lora_magnitude_vector"] = one.magnitude
        return found

    def complete_settings(self) -> dict[str, Any]:
        """PEFT's settings by which it computes the scales of all layers, whatever the file said."""
        said = dict(self.settings)
        if said.get("r") is not None and said.get("lora_alpha") is not None and said.get("target_modules"):
            return said
        ranks = {name: one.rank for name, one in self.layers.items()}
        alphas = {name: one.scale * one.rank for name, one in self.layers.items()}
        rank, alpha = Counter(ranks.values()).most_common(1)[0][0], Counter(alphas.values()).most_common(1)[0][0]
        return {
            "r": rank, "lora_alpha": alpha, "use_rslora": False, "use_dora": self.is_dora, "target_modules": sorted(ranks),
            "rank_pattern": {f"^{name}": other for name, other in ranks.items() if other != rank},
            "alpha_pattern": {f"^{name}": other for name, other in alphas.items() if not math.isclose(other, alpha)},
        }  # fmt: skip


def of_state(state: Mapping[str, Tensor], settings: Mapping[str, Any], kind: str = "diffusers") -> Lora:
    """A LoRA from PEFT's tensors and settings; without settings, alpha is the rank.

    Raises:
        ValueError: tensors that are none of a LoRA, or factors without the other one.
    """
    parts = _by_layer(state, str)
    layers = {}
    for name, one in parts.items():
        layers[name] = Factors(
            one["down"], one["up"], _scale(name, one["down"].shape[0], settings), one.get("magnitude")
        )
    return Lora(layers, settings, kind)


def _scale(name: str, rank: int, settings: Mapping[str, Any]) -> float:
    patterns = settings.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(patterns, name), settings.get("lora_alpha"))
    if alpha is None:
        return 1.0
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _by_layer(tensors: Mapping[str, Tensor], layer_of: Callable[[str], str]) -> dict[str, dict[str, Tensor]]:
    """`down`, `up`, `alpha` and `magnitude` of each layer.

    Raises:
        ValueError: names that are none of these, and layers that lack one of their factors.
    """
    found: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            unknown.append(name)
            continue
        part = (
            match["alpha"]
            or (match["magnitude"] and "magnitude")
            or {"A": "down", "B": "up"}.get(match["factor"], match["factor"])
        )
        found.setdefault(layer_of(match["layer"]), {})[part] = tensor
    if unknown:
        raise ValueError(f"{plural(len(unknown), 'tensor')} of no known meaning: {some(sorted(unknown))}")
    alone = sorted(name for name, one in found.items() if not {"down", "up"} <= one.keys())
    if alone:
        raise ValueError(f"only one of two factors of {plural(len(alone), 'layer')}: {some(alone)}")
    return found


# ---- formats with other names ---------------------------------------------------------------------------------------------


def stored_layers(network: nn.Module, kind: Foreign) -> dict[str, tuple[Rows, ...]]:
    """What a format calls the layers of a network, without the prefix, and the rows of which of its modules each consists of."""
    names = [*network.state_dict()]
    return _modules(_LAYOUTS[_stock(network), kind](names), kind)


def _known_layers(network: nn.Module, kind: Foreign) -> dict[str, tuple[Rows, ...]]:
    """The same with all other names that are in use: diffusers' own, the authors' and ComfyUI's."""
    names = [*network.state_dict()]
    found: dict[str, tuple[Rows, ...]] = {}
    for layout in layouts_of(_stock(network), names).values():
        found |= _modules(layout, kind)
    return found | stored_layers(network, kind)


def _modules(layout: Layout, kind: str) -> dict[str, tuple[Rows, ...]]:
    found = {}
    for stored, rows in layout.items():
        if stored.endswith(".weight"):
            name = stored.removesuffix(".weight")
            ours = tuple(Rows(row.name.removesuffix(".weight"), row.part, row.of) for row in rows)
            found[name.replace(".", "_") if kind == "kohya" else name] = ours
    return found


def _stock(network: nn.Module) -> str:
    return next(cls.__name__ for cls in type(network).__mro__ if cls.__module__.startswith("diffusers."))


def to_stored(lora: Lora, network: nn.Module, kind: Foreign) -> dict[str, Tensor]:
    """The tensors of a LoRA as ComfyUI, or a trainer of kohya-ss, reads them.

    ComfyUI and diffusers disagree over files with alphas, so ComfyUI's format has the scale in the second factor.

    Args:
        lora: what is written; without magnitudes.
        network: that it is of, on the meta device.
        kind: the format.
    """
    assert not lora.is_dora, "`format_problem` refuses it"
    found: dict[str, Tensor] = {}
    prefix, left = PREFIXES[kind], {*lora.layers}
    for name, rows in stored_layers(network, kind).items():
        parts = {row.name: lora.layers[row.name] for row in rows if row.name in lora.layers}
        if not parts:
            continue
        left -= parts.keys()
        one = next(iter(parts.values())) if len(rows) == 1 else _joined(rows, parts, network)
        if kind == "comfyui":
            scaled = one.up if one.scale == 1 else (one.up.float() * one.scale).to(one.up.dtype)
            found |= {f"{prefix}{name}.lora_A.weight": one.down, f"{prefix}{name}.lora_B.weight": scaled}
        else:
            alpha = torch.tensor(one.scale * one.rank, dtype=torch.float32)
            found |= {f"{prefix}{name}.lora_down.weight": one.down, f"{prefix}{name}.lora_up.weight": one.up}
            found[f"{prefix}{name}.alpha"] = alpha
    if left:
        raise ValueError(f"{kind} has no name for {plural(len(left), 'layer')} of this LoRA: {some(sorted(left))}")
    return found


def _joined(rows: tuple[Rows, ...], parts: Mapping[str, Factors], network: nn.Module) -> Factors:
    """One pair of factors for a layer that consists of several modules' rows: the first ones stacked, the second in blocks."""
    scales = {one.scale for one in parts.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    first = next(iter(parts.values()))
    shared = len(parts) == len({row.name for row in rows}) and all(
        _same(one.down, first.down) for one in parts.values()
    )
    down = first.down if shared else torch.cat([one.down for one in parts.values()])
    begin, columns = 0, {}
    for name, one in parts.items():
        columns[name] = slice(0, one.rank) if shared else slice(begin, begin + one.rank)
        begin += one.rank
    pieces = []
    for row in rows:
        outputs = _outputs(network, row)
        piece = first.up.new_zeros(outputs, down.shape[0], *first.up.shape[2:])
        if row.name in parts:
            one = parts[row.name]
            up = one.up if one.scale == scale else (one.up.float() * one.scale).to(one.up.dtype)
            piece[:, columns[row.name]] = row.cut(up)
        pieces.append(piece)
    return Factors(down, torch.cat(pieces), scale)


def _outputs(network: nn.Module, row: Rows) -> int:
    """How many outputs of a layer these rows are."""
    weight = network.get_parameter(f"{row.name}.weight")
    return weight.shape[0] // row.of


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and not a.is_meta and torch.equal(a, b))


def from_stored(tensors: Mapping[str, Tensor], network: nn.Module, kind: Foreign) -> Lora:
    """A LoRA of other names as one of the network; what `to_stored` has joined comes apart as it was.

    Raises:
        ValueError: names that the network has no layer for, sizes that do not fit it, or DoRA.
    """
    dora = sorted(name for name in tensors if name.endswith(".dora_scale"))
    if dora:
        raise ValueError(
            f"holds DoRA magnitudes ({some(dora)}), which ComfyUI and PEFT apply differently; they are not read"
        )
    known = _known_layers(network, kind)
    layers: dict[str, Factors] = {}
    stored = _by_layer(tensors, lambda name: re.sub(r"^(diffusion_model\.|transformer\.|lora_unet_)", "", name))
    unknown = sorted(name for name in stored if name not in known)
    if unknown:
        raise ValueError(f"{plural(len(unknown), 'layer')} that the network does not have: {some(unknown)}")
    has_alpha = False
    for name, one in stored.items():
        rank = one["down"].shape[0]
        has_alpha |= "alpha" in one
        scale = float(one["alpha"]) / rank if "alpha" in one else 1.0
        layers |= _apart(name, known[name], Factors(one["down"], one["up"], scale), network)
    lora = Lora(layers, {}, kind)
    return Lora(layers, lora.complete_settings(), kind) if has_alpha else lora


def _apart(name: str, rows: tuple[Rows, ...], whole: Factors, network: nn.Module) -> dict[str, Factors]:
    """The factors of each module that a stored layer consists of. A module without any output of the LoRA has none."""
    outputs = [_outputs(network, row) for row in rows]
    if whole.up.shape[0] != sum(outputs):
        raise ValueError(f"{name} has {whole.up.shape[0]} outputs, and the network's layer {sum(outputs)}")
    if len(rows) == 1:
        return {rows[0].name: whole}
    pieces: dict[str, dict[int, Tensor]] = {}
    for row, piece in zip(rows, whole.up.split(outputs), strict=True):
        pieces.setdefault(row.name, {})[row.part] = piece
    ups = {module: torch.cat([parts[number] for number in sorted(parts)]) for module, parts in pieces.items()}
    used = {module: up.flatten(2).any(2).any(0) if up.ndim > 2 else up.any(0) for module, up in ups.items()}
    if not any(columns.any() for columns in used.values()):  # not trained yet
        return {module: Factors(whole.down, up, whole.scale) for module, up in ups.items()}
    return {
        module: Factors(whole.down[used[module]], up[:, used[module]], whole.scale)
        for module, up in ups.items()
        if used[module].any()
    }


# ---- files ----------------------------------------------------------------------------------------------------------------


def read_foreign(path: Path, network: Callable[[], nn.Module], *, part: str, family: str) -> Lora | None:
    """A LoRA from a file of ComfyUI, kohya-ss or PEFT; None: its names are of none of these.

    Args:
        path: the file; PEFT's settings are next to it.
        network: gives the network that it is for, on the meta device.
        part: what diffusers calls the network.
        family: of the network, for messages.

    Raises:
        ValueError: the file does not fit the network.
    """
    header = read_header(path)
    kind = kind_of(header.shapes)
    if kind is None:
        return None
    tensors = load_file(path)
    try:
        if kind == "peft":
            prefix, settings = PREFIXES[kind], path.with_name("adapter_config.json")
            bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
            return of_state(bare, json.loads(settings.read_text()) if settings.is_file() else {}, kind)
        return from_stored(tensors, network(), "kohya" if kind == "kohya" else "comfyui")
    except ValueError as error:
        raise ValueError(f"{path} holds no LoRA of a {family} {part}, in {kind} format: {error}") from None


def save_original(path: Path, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write all weights of a network to one file as ComfyUI reads it, in the layout of its authors where that is one; and read it back.

    Raises:
        ValueError: the layout is not known, or the file is not what was to be written.
    """
    name = _stock(network)
    # The layout of CogVideoX's authors is that of another program's checkpoints.
    kind = COMFYUI if name == _COG else None
    save_single_file(path, name, {**computed_buffers(network), **tensors}, kind=kind)
    check_buffers(path, network, name, complete=True)
