"""Conversion of LoRA files of other programs: their names and scales from and to those of PEFT, used in training.

A file holds two factors for each layer, and something that gives its scale. ComfyUI and the trainers of kohya-ss name
layers as the network's authors do, who join some: their one layer for query, key and value gets one pair of factors,
block by block in the second. So a written file computes the trained LoRA, and reading it splits the blocks again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from finetrainers.utils.failures import InputError, error_kind
from finetrainers.utils.headers import check_adapter_settings, load_tensors, read_header
from finetrainers.utils.reading import read_json_object
from finetrainers.utils.text import plural

from .files import summarize
from .layouts import Layout, Rows, build_layout, rename_layout
from .lora_names import PREFIXES, kind_of
from .original import COMFYUI, ORIGINALS, known_layouts, original_layout
from .single_file import check_buffers, computed_buffers, save_single_file

#: Formats with separate names.
Foreign = Literal["comfyui", "kohya"]
#: ComfyUI has other names for these embeddings than Tencent, and reads only its own.
_HUNYUAN_EMBEDDERS = (
    (r"^(time_in|guidance_in|txt_in\.t_embedder)\.mlp\.0\.", r"\1.in_layer."),
    (r"^(time_in|guidance_in|txt_in\.t_embedder)\.mlp\.2\.", r"\1.out_layer."),
    (r"^txt_in\.c_embedder\.linear_1\.", "txt_in.c_embedder.in_layer."),
    (r"^txt_in\.c_embedder\.linear_2\.", "txt_in.c_embedder.out_layer."),
)
_HUNYUAN, _HUNYUAN_15 = "HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel"
_COG = "CogVideoXTransformer3DModel"
#: Layer names in LoRA files that are not those of the authors, by class of network and format, from the names of the
#: network's tensors.
_LAYOUTS: Mapping[tuple[str, Foreign], Callable[[list[str]], Layout]] = {
    (_HUNYUAN, "comfyui"): lambda names: rename_layout(original_layout(_HUNYUAN, names)[0], _HUNYUAN_EMBEDDERS),
    (_HUNYUAN_15, "comfyui"): lambda names: rename_layout(original_layout(_HUNYUAN_15, names)[0], _HUNYUAN_EMBEDDERS),
    # musubi-tuner's network has query, key and value apart, as Tencent's.
    (_HUNYUAN_15, "kohya"): lambda names: original_layout(_HUNYUAN_15, names, "Tencent's")[0],
    (_COG, "comfyui"): lambda names: original_layout(_COG, names, COMFYUI)[0],
    # VideoX-Fun's prefix ends with two underscores.
    (_COG, "kohya"): lambda names: rename_layout(build_layout(names, ()), [("^", ".")]),
}
_FACTOR = re.compile(
    r"(?P<layer>.+)\.(?:lora_?(?P<factor>A|B|down|up)(?:\.\w+)??\.weight|(?P<alpha>alpha)|"
    r"lora_(?P<magnitude>magnitude_vector)(?:\.\w+)??(?:\.weight)?)"
)


@dataclass(frozen=True)
class Factors:
    """A LoRA's addition to one layer: `scale * up @ down`.

    Attributes:
        down: `[rank, inputs, ...]`, PEFT's A.
        up: `[outputs, rank, ...]`, PEFT's B.
        scale: factor of their product.
        magnitude: magnitude of DoRA, `[outputs]`.
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
        layers: factors by the names of the network's modules.
        settings: PEFT's settings, as far as they are in the file or follow from its scales.
        kind: the format that it was read from.
    """

    layers: Mapping[str, Factors]
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "diffusers"

    @property
    def is_dora(self) -> bool:
        """True if layers have magnitudes."""
        return any(factors.magnitude is not None for factors in self.layers.values())

    def state(self) -> dict[str, Tensor]:
        """Return the tensors by PEFT's names."""
        tensors: dict[str, Tensor] = {}
        for name, factors in self.layers.items():
            tensors |= {f"{name}.lora_A.weight": factors.down, f"{name}.lora_B.weight": factors.up}
            if factors.magnitude is not None:
                tensors[f"{name}.lora_magnitude_vector"] = factors.magnitude
        return tensors

    def complete_settings(self) -> dict[str, Any]:
        """Return PEFT's settings that give the scales of all layers, even if the file's are incomplete."""
        settings = dict(self.settings)
        if settings.get("r") is not None and settings.get("lora_alpha") is not None and settings.get("target_modules"):
            return settings
        ranks = {name: factors.rank for name, factors in self.layers.items()}
        alphas = {name: factors.scale * factors.rank for name, factors in self.layers.items()}
        rank, alpha = Counter(ranks.values()).most_common(1)[0][0], Counter(alphas.values()).most_common(1)[0][0]
        return {
            "r": rank, "lora_alpha": alpha, "use_rslora": False, "use_dora": self.is_dora,
            "target_modules": sorted(ranks),
            "rank_pattern": {f"^{name}": other for name, other in ranks.items() if other != rank},
            "alpha_pattern": {f"^{name}": other for name, other in alphas.items() if not math.isclose(other, alpha)},
        }  # fmt: skip


def lora_from_state(state: Mapping[str, Tensor], settings: Mapping[str, Any], kind: str = "diffusers") -> Lora:
    """Return a LoRA from PEFT's tensors and settings; without settings, alpha is the rank.

    Raises:
        ValueError: tensors do not belong to a LoRA, or a layer has one factor only.
    """
    layers = {}
    for name, tensors in _by_layer(state, str).items():
        layers[name] = Factors(
            tensors["down"], tensors["up"], _scale(name, tensors["down"].shape[0], settings), tensors.get("magnitude")
        )
    return Lora(layers, settings, kind)


def _scale(name: str, rank: int, settings: Mapping[str, Any]) -> float:
    patterns = settings.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(patterns, name), settings.get("lora_alpha"))
    if alpha is None:
        return 1.0
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _by_layer(tensors: Mapping[str, Tensor], layer_name: Callable[[str], str]) -> dict[str, dict[str, Tensor]]:
    """Group tensors into `down`, `up`, `alpha` and `magnitude` of each layer.

    Raises:
        ValueError: other names, and layers that lack one of their factors.
    """
    layers: dict[str, dict[str, Tensor]] = {}
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
        layers.setdefault(layer_name(match["layer"]), {})[part] = tensor
    if unknown:
        raise InputError(
            f"{plural(len(unknown), 'tensor')} with unknown names: {summarize(sorted(unknown))}", "unknown"
        )
    incomplete = sorted(name for name, factors in layers.items() if not {"down", "up"} <= factors.keys())
    if incomplete:
        raise InputError(
            f"only one of two factors of {plural(len(incomplete), 'layer')}: {summarize(incomplete)}", "not_found"
        )
    return layers


# ---- formats with other names ----------------------------------------------------------------------------------------


def stored_layers(network: nn.Module, kind: Foreign) -> dict[str, tuple[Rows, ...]]:
    """Return the layers of a network in a format, by their names without the prefix, with the modules' rows in each."""
    stock, names = _stock_class(network), [*network.state_dict()]
    other = _LAYOUTS.get((stock, kind))
    return _modules(original_layout(stock, names)[0] if other is None else other(names), kind)


def _known_layers(network: nn.Module, kind: Foreign) -> dict[str, tuple[Rows, ...]]:
    """Return `stored_layers` with all other names in use: diffusers' own, the authors' and ComfyUI's."""
    names = [*network.state_dict()]
    layers: dict[str, tuple[Rows, ...]] = {}
    for layout in known_layouts(_stock_class(network), names).values():
        layers |= _modules(layout, kind)
    return layers | stored_layers(network, kind)


def _modules(layout: Layout, kind: str) -> dict[str, tuple[Rows, ...]]:
    modules = {}
    for stored, rows in layout.items():
        if stored.endswith(".weight"):
            name = stored.removesuffix(".weight")
            module_rows = tuple(Rows(row.name.removesuffix(".weight"), row.part, row.num_parts) for row in rows)
            modules[name.replace(".", "_") if kind == "kohya" else name] = module_rows
    return modules


def _stock_class(network: nn.Module) -> str:
    return next(cls.__name__ for cls in type(network).__mro__ if cls.__module__.startswith("diffusers."))


def to_stored(lora: Lora, network: nn.Module, kind: Foreign) -> dict[str, Tensor]:
    """Return the tensors of a LoRA in the format of ComfyUI or of kohya-ss's trainers.

    ComfyUI and diffusers disagree over files with alphas, so ComfyUI's format has the scale in the second factor.

    Args:
        lora: the LoRA, without magnitudes.
        network: its network, on the meta device.
        kind: the format.
    """
    assert not lora.is_dora, "`format_problem` refuses it"
    tensors: dict[str, Tensor] = {}
    prefix, unnamed = PREFIXES[kind], {*lora.layers}
    for name, rows in stored_layers(network, kind).items():
        parts = {row.name: lora.layers[row.name] for row in rows if row.name in lora.layers}
        if not parts:
            continue
        unnamed -= parts.keys()
        factors = next(iter(parts.values())) if len(rows) == 1 else _join(rows, parts, network)
        if kind == "comfyui":
            scaled = factors.up if factors.scale == 1 else (factors.up.float() * factors.scale).to(factors.up.dtype)
            tensors |= {f"{prefix}{name}.lora_A.weight": factors.down, f"{prefix}{name}.lora_B.weight": scaled}
        else:
            alpha = torch.tensor(factors.scale * factors.rank, dtype=torch.float32)
            tensors |= {f"{prefix}{name}.lora_down.weight": factors.down, f"{prefix}{name}.lora_up.weight": factors.up}
            tensors[f"{prefix}{name}.alpha"] = alpha
    if unnamed:
        raise InputError(
            f"{kind} has no name for {plural(len(unnamed), 'layer')} of this LoRA: {summarize(sorted(unnamed))}",
            "unsupported",
        )
    return tensors


def _join(rows: tuple[Rows, ...], parts: Mapping[str, Factors], network: nn.Module) -> Factors:
    """Join the factors of a layer that consists of several modules' rows: the first stacked, the second in blocks."""
    scales = {part.scale for part in parts.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    first = next(iter(parts.values()))
    shared = len(parts) == len({row.name for row in rows}) and all(
        _are_equal(part.down, first.down) for part in parts.values()
    )
    down = first.down if shared else torch.cat([part.down for part in parts.values()])
    begin, columns = 0, {}
    for name, part in parts.items():
        columns[name] = slice(0, part.rank) if shared else slice(begin, begin + part.rank)
        begin += part.rank
    pieces = []
    for row in rows:
        outputs = _outputs(network, row)
        piece = first.up.new_zeros(outputs, down.shape[0], *first.up.shape[2:])
        if row.name in parts:
            part = parts[row.name]
            up = part.up if part.scale == scale else (part.up.float() * part.scale).to(part.up.dtype)
            piece[:, columns[row.name]] = row.cut(up)
        pieces.append(piece)
    return Factors(down, torch.cat(pieces), scale)


def _outputs(network: nn.Module, row: Rows) -> int:
    """Count the outputs of a layer in these rows."""
    weight = network.get_parameter(f"{row.name}.weight")
    return weight.shape[0] // row.num_parts


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and not a.is_meta and torch.equal(a, b))


def from_stored(tensors: Mapping[str, Tensor], network: nn.Module, kind: Foreign) -> Lora:
    """Return a LoRA of the network from tensors in a format; layers that `to_stored` has joined are split again.

    Raises:
        ValueError: names that the network has no layer for, sizes that do not fit it, or DoRA.
    """
    dora = sorted(name for name in tensors if name.endswith(".dora_scale"))
    if dora:
        raise InputError(
            f"holds DoRA magnitudes ({summarize(dora)}), which ComfyUI and PEFT apply differently; they are not "
            "supported",
            "unsupported",
        )
    changed = sorted(name for name in tensors if name.endswith((".diff", ".diff_b")))
    if changed:
        raise InputError(
            f"holds {plural(len(changed), 'change')} of whole weights or biases ({summarize(changed)}), which a LoRA "
            "cannot represent; add the file to the model in ComfyUI, save the model, and use it as --transformer_id",
            "unsupported",
        )
    stored_rows = _known_layers(network, kind)
    layers: dict[str, Factors] = {}
    stored = _by_layer(tensors, lambda name: re.sub(r"^(diffusion_model\.|transformer\.|lora_unet_)", "", name))
    # VideoX-Fun's prefix ends with two underscores.
    stored = {name if name in stored_rows else name.removeprefix("_"): layer for name, layer in stored.items()}
    unknown = sorted(name for name in stored if name not in stored_rows)
    if unknown:
        raise InputError(
            f"{plural(len(unknown), 'layer')} that the network does not have: {summarize(unknown)}", "mismatch"
        )
    has_alpha = False
    for name, layer in stored.items():
        rank = layer["down"].shape[0]
        has_alpha |= "alpha" in layer
        scale = float(layer["alpha"]) / rank if "alpha" in layer else 1.0
        factors = Factors(layer["down"], layer["up"], scale)
        layers |= _split(name, stored_rows[name], factors, network)
    lora = Lora(layers, {}, kind)
    return Lora(layers, lora.complete_settings(), kind) if has_alpha else lora


def _split(name: str, rows: tuple[Rows, ...], joined: Factors, network: nn.Module) -> dict[str, Factors]:
    """Split a stored layer's factors into those of its modules, without those that the LoRA does not change."""
    outputs = [_outputs(network, row) for row in rows]
    if joined.up.shape[0] != sum(outputs):
        raise InputError(f"{name} has {joined.up.shape[0]} outputs, and the network's layer {sum(outputs)}", "mismatch")
    if len(rows) == 1:
        return {rows[0].name: joined}
    pieces: dict[str, dict[int, Tensor]] = {}
    for row, piece in zip(rows, joined.up.split(outputs), strict=True):
        pieces.setdefault(row.name, {})[row.part] = piece
    ups = {module: torch.cat([parts[number] for number in sorted(parts)]) for module, parts in pieces.items()}
    used = {module: up.flatten(2).any(2).any(0) if up.ndim > 2 else up.any(0) for module, up in ups.items()}
    if not any(columns.any() for columns in used.values()):  # not trained yet
        return {module: Factors(joined.down, up, joined.scale) for module, up in ups.items()}
    return {
        module: Factors(joined.down[used[module]], up[:, used[module]], joined.scale)
        for module, up in ups.items()
        if used[module].any()
    }


# ---- files -----------------------------------------------------------------------------------------------------------


def read_foreign(path: Path, network: Callable[[], nn.Module], *, part: str, family: str) -> Lora | None:
    """Read a LoRA from a file of ComfyUI, kohya-ss or PEFT, or return None if its names are of none of these.

    Args:
        path: the file; PEFT's settings are next to it.
        network: returns the network that it is for, on the meta device.
        part: diffusers' name of the network.
        family: family of the network, for messages.

    Raises:
        ValueError: the file does not fit the network.
    """
    header = read_header(path)
    kind = kind_of(header.shapes)
    if kind is None:
        return None
    tensors = load_tensors(path)
    try:
        if kind == "peft":
            prefix, config = PREFIXES[kind], path.with_name("adapter_config.json")
            settings = check_adapter_settings(read_json_object(config), config.name) if config.is_file() else {}
            bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
            return lora_from_state(bare, settings, kind)
        return from_stored(tensors, network(), "kohya" if kind == "kohya" else "comfyui")
    except ValueError as error:
        message = f"{path} holds no LoRA of a {family} {part}, in {kind} format: {error}"
        raise InputError(message, error_kind(error)) from None


def save_original(path: Path, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write all weights of a network to one file for ComfyUI, if possible in its authors' layout, and read it back.

    Raises:
        ValueError: the layout is not known, or the file read back differs.
    """
    name = _stock_class(network)
    # The layout of CogVideoX's authors is that of another program's checkpoints.
    kind = COMFYUI if name == _COG else None
    has_buffers = name in ORIGINALS and ORIGINALS[name].has_buffers
    save_single_file(path, name, {**(computed_buffers(network) if has_buffers else {}), **tensors}, kind=kind)
    check_buffers(path, network, name, complete=has_buffers)
