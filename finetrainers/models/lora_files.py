"""Write a LoRA in the format of another program, and read it back: by our key maps, and by diffusers' own converters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from finetrainers.utils.hashed_files import data_sha256, save_safetensors
from finetrainers.utils.text import plural

from .files import saving
from .files.files import summarize
from .files.lora_formats import Factors, Lora, lora_from_state, save_original, to_stored
from .files.lora_names import BLOCKS_ALONE, PREFIXES
from .files.weights import non_finite
from .spec import ModelSpec

__all__ = [
    "Checked",
    "Lora",
    "cast",
    "check_outputs",
    "check_written",
    "lora_metadata",
    "save_original",
    "with_averages",
    "write_lora",
]

#: Relative difference of a layer's output that rounding to a dtype explains, twice.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
#: Width of the network that diffusers' converter of HunyuanVideo knows, and no other.
_HUNYUAN_WIDTH = 3072


@dataclass(frozen=True)
class Checked:
    """What reading a written LoRA has shown.

    Attributes:
        layers: how many are the same as those that were trained.
        error: the largest relative difference of a layer's output.
        by_diffusers: how many layers diffusers reads the same; None: it has no converter for this format.
        left_out: layers that a program which reads this format leaves out.
        left_out_by: that program.
    """

    layers: int
    error: float
    by_diffusers: int | None = None
    left_out: tuple[str, ...] = ()
    left_out_by: str = "diffusers"


def cast(lora: Lora, dtype: torch.dtype | None) -> Lora:
    """Return a LoRA in another dtype; None keeps each tensor's.

    Raises:
        ValueError: numbers are beyond the dtype's range.
    """
    if dtype is None:
        return lora
    layers = {
        name: replace(
            one,
            down=one.down.to(dtype),
            up=one.up.to(dtype),
            magnitude=None if one.magnitude is None else one.magnitude.to(dtype),
        )
        for name, one in lora.layers.items()
    }
    found = replace(lora, layers=layers)
    bad = non_finite(found.state())
    if bad:
        raise ValueError(f"{plural(len(bad), 'tensor')} is beyond the range of {dtype}: {summarize(bad)}; use bf16")
    return found


def write_lora(
    directory: Path,
    name: str,
    lora: Lora,
    kind: str,
    *,
    spec: ModelSpec,
    network: nn.Module,
    metadata: Mapping[str, str],
) -> Path:
    """Write a LoRA in a format; its file.

    Args:
        directory: an empty folder.
        name: of the file, where the format leaves it free.
        lora: in the dtype that is written.
        kind: `diffusers`, `peft`, `comfyui` or `kohya`.
        spec, network: what it is of; the network on the meta device.
        metadata: further metadata of the file.
    """
    if kind == "diffusers":
        more = {**metadata, **_hashes(lora.state())}
        (path,) = saving.save_lora(directory, lora.state(), lora.complete_settings(), part=spec.lora_prefix, more=more)
        return path
    if kind == "peft":
        path = directory / "adapter_model.safetensors"
        tensors = {PREFIXES[kind] + key: tensor for key, tensor in lora.state().items()}
        config = LoraConfig(**lora.complete_settings())
        config.base_model_name_or_path = spec.config.pretrained_model_name_or_path
        config.save_pretrained(str(directory))
    else:
        assert kind in ("comfyui", "kohya")
        path = directory / f"{name}.safetensors"
        tensors = to_stored(lora, network, kind)  # type: ignore[arg-type]
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_safetensors(tensors, path, metadata={"format": "pt", **metadata, **_hashes(tensors)})
    return path


def _hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the hash of a file's weights, by the two names that programs look for."""
    digest = data_sha256(tensors)
    return {"modelspec.hash_sha256": f"0x{digest}", "sshs_model_hash": digest}


def check_written(path: Path, lora: Lora, *, spec: ModelSpec, network: nn.Module, kind: str) -> Checked:
    """Read a file that `write_lora` has written, and compare what each layer of it computes.

    Raises:
        ValueError: layers are missing, or differ by more than rounding; with their names.
    """
    error = _compare(spec.lora_of(path), lora, path)
    if (spec.name, kind) in BLOCKS_ALONE:
        outside = tuple(name for name in lora.layers if not name.startswith(_blocks(spec)))
        return Checked(len(lora.layers), error, None, outside, BLOCKS_ALONE[spec.name, kind])
    if kind != "comfyui" or not _diffusers_reads(spec, network):
        return Checked(len(lora.layers), error)
    state = spec.pipeline_class.lora_state_dict(str(path.parent), weight_name=path.name, use_safetensors=True)
    prefix = f"{spec.lora_prefix}."
    theirs = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    left = [name for name in lora.layers if not _equal(_layer_of(theirs, name), lora.layers[name])]
    # What it does to layers outside of the blocks is known to be incomplete; ComfyUI reads them.
    wrong = [name for name in left if name.startswith(_blocks(spec))]
    if wrong:
        raise ValueError(
            f"diffusers' converter reads {plural(len(wrong), 'layer')} of {path} differently: {summarize(wrong)}"
        )
    return Checked(len(lora.layers), error, len(lora.layers) - len(left), tuple(left))


def _blocks(spec: ModelSpec) -> tuple[str, ...]:
    """What the names of layers in blocks begin with."""
    return tuple(f"{blocks}." for blocks in spec.blocks)


def _diffusers_reads(spec: ModelSpec, network: nn.Module) -> bool:
    """Return whether diffusers translates ComfyUI's names of this network."""
    width = spec.width(network)
    return spec.name == "ltx_video" or (spec.name == "hunyuan_video" and width == _HUNYUAN_WIDTH)


def _layer_of(state: Mapping[str, Tensor], name: str) -> Factors | None:
    parts = [state.get(f"{name}.lora_{factor}.weight") for factor in "AB"]
    return None if parts[0] is None or parts[1] is None else Factors(parts[0], parts[1], 1.0)


def _equal(found: Factors | None, expected: Factors) -> bool:
    fits = found is not None and found.down.shape[1:] == expected.down.shape[1:] and found.up.shape[1] == found.rank
    return fits and found is not None and _difference(found, expected) <= _TOLERANCES[expected.up.dtype]


def _compare(found: Lora, expected: Lora, path: Path) -> float:
    trained = {name for name, one in expected.layers.items() if one.up.any() or one.magnitude is not None}
    lost = sorted(trained - found.layers.keys())
    if lost:
        raise ValueError(f"{path} was read back without {plural(len(lost), 'layer')}: {summarize(lost)}")
    errors = {name: _difference(found.layers[name], expected.layers[name]) for name in trained}
    wrong = sorted(name for name, error in errors.items() if error > _TOLERANCES[expected.layers[name].up.dtype])
    if wrong:
        raise ValueError(
            f"{path} was read back with {plural(len(wrong), 'layer')} that compute something else: {summarize(wrong)}"
        )
    return max(errors.values(), default=0.0)


def _difference(found: Factors, expected: Factors) -> float:
    """Return the relative difference of two layers' outputs for the same random input."""
    generator = torch.Generator("cpu").manual_seed(0)
    inputs = torch.randn(expected.down[0].numel(), 4, generator=generator, dtype=torch.float32, device="cpu")
    outputs = [
        one.scale * (one.up.float().flatten(1) @ (one.down.float().flatten(1) @ inputs)) for one in (found, expected)
    ]
    norm = outputs[1].norm()
    error = float((outputs[0] - outputs[1]).norm() / norm) if norm else float(outputs[0].norm())
    if expected.magnitude is None and found.magnitude is None:
        return error
    if expected.magnitude is None or found.magnitude is None:
        return float("inf")
    own = expected.magnitude.float()
    return max(error, float((found.magnitude.float() - own).norm() / own.norm()))


def check_outputs(lora: Lora, network: nn.Module) -> None:
    """Compare the outputs of a LoRA's layers with the network's.

    Raises:
        ValueError: they are of another model.
    """
    for name, one in lora.layers.items():
        outputs = network.get_parameter(f"{name}.weight").shape[0]
        if one.up.shape[0] != outputs:
            raise ValueError(
                f"{name} has {one.up.shape[0]} outputs, and this model's {outputs}; is it a LoRA of this model?"
            )


def with_averages(lora: Lora, averages: Mapping[str, Tensor]) -> Lora:
    """Return a LoRA with its moving averages, which a checkpoint has by the names of the network's parameters."""
    state = lora.state()
    for name, average in averages.items():
        plain = name.replace(".default.weight", "" if "magnitude" in name else ".weight")
        assert plain in state, name
        state[plain] = average
    return lora_from_state(state, lora.settings, lora.kind)


def lora_metadata(lora: Lora, *, architecture: tuple[str, str], facts: Mapping[str, Any]) -> dict[str, str]:
    """Metadata by the names of sd-scripts (`ss_`) and of Stability's model specification (`modelspec.`).

    Args:
        lora: what is written.
        architecture: name of the network, and where its authors' code is.
        facts: `name`, `base`, and where they are known `trigger`, `license`, `steps`, `comment`.
    """
    settings, name = lora.complete_settings(), str(facts["name"])
    ranks = {one.rank for one in lora.layers.values()}
    alphas = {one.scale * one.rank for one in lora.layers.values()}
    found = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(ranks.pop()) if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": f"{alphas.pop():g}" if len(alphas) == 1 else "Dynamic",
        "ss_base_model_version": architecture[0],
        "ss_sd_model_name": str(facts["base"]),
        "ss_output_name": name,
        "ss_steps": facts.get("steps"),
        "ss_training_comment": facts.get("comment"),
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{architecture[0]}/lora",
        "modelspec.implementation": architecture[1],
        "modelspec.title": name,
        "modelspec.trigger_phrase": facts.get("trigger"),
        "modelspec.license": facts.get("license"),
        "modelspec.tags": "dora" if settings.get("use_dora") else None,
    }
    return {key: str(value) for key, value in found.items() if value not in (None, "")}
