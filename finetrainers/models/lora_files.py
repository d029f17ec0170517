"""LoRAs written in the format of another program, and read back by our key maps and by diffusers' own converters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from finetrainers.utils.failures import InputError
from finetrainers.utils.hashed_files import data_sha256, save_safetensors
from finetrainers.utils.text import plural

from .files import saving
from .files.files import summarize
from .files.lora_formats import Factors, Lora, lora_from_state, save_original, to_stored
from .files.lora_names import BLOCKS_ALONE, PREFIXES
from .files.saving import VERSION_KEY as VERSION_KEY
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
    """Result of reading a written LoRA.

    Attributes:
        layers: number of layers that equal those that were trained.
        error: the largest relative difference of a layer's output.
        by_diffusers: number of layers that diffusers reads correctly, or None if it has no converter for this format.
        left_out: layers that a program which reads this format leaves out.
        left_out_by: that program.
    """

    layers: int
    error: float
    by_diffusers: int | None = None
    left_out: tuple[str, ...] = ()
    left_out_by: str = "diffusers"


def cast(lora: Lora, dtype: torch.dtype | None) -> Lora:
    """Cast a LoRA to another dtype; None keeps each tensor's.

    Raises:
        ValueError: numbers are beyond the dtype's range.
    """
    if dtype is None:
        return lora
    layers = {
        name: replace(
            factors,
            down=factors.down.to(dtype),
            up=factors.up.to(dtype),
            magnitude=None if factors.magnitude is None else factors.magnitude.to(dtype),
        )
        for name, factors in lora.layers.items()
    }
    converted = replace(lora, layers=layers)
    bad = non_finite(converted.state())
    if bad:
        raise ValueError(f"{plural(len(bad), 'tensor')} is beyond the range of {dtype}: {summarize(bad)}; use bf16")
    return converted


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
    """Write a LoRA in a format, and return the path of its file.

    Args:
        directory: an empty folder.
        name: name of the file, where the format leaves it free; that of diffusers does for one of two experts.
        lora: the LoRA, in the dtype that is written.
        kind: `diffusers`, `peft`, `comfyui` or `kohya`.
        spec, network: its model; the network on the meta device.
        metadata: further metadata of the file.
    """
    if kind == "diffusers":
        more = {**metadata, **_hashes(lora.state())}
        file = saving.LORA_FILE if spec.facts.expert is None else f"{name}.safetensors"
        settings = lora.complete_settings()
        (path,) = saving.save_lora(directory, lora.state(), settings, part=spec.lora_prefix, name=file, more=more)
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
    """Read a file that `write_lora` has written, and compare the output of each layer.

    Raises:
        ValueError: layers are missing, or differ by more than rounding; with their names.
    """
    error = _compare(spec.lora_of(path), lora, path)
    if (spec.name, kind) in BLOCKS_ALONE:
        program, *further = BLOCKS_ALONE[spec.name, kind]
        outside = tuple(name for name in lora.layers if not name.startswith((*_blocks(spec), *further)))
        return Checked(len(lora.layers), error, None, outside, program)
    if kind != "comfyui" or not _diffusers_reads(spec, network):
        return Checked(len(lora.layers), error)
    state = spec.pipeline_class.lora_state_dict(str(path.parent), weight_name=path.name, use_safetensors=True)
    prefix = f"{spec.lora_prefix}."
    diffusers_state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    differing = [name for name in lora.layers if not _equal(_read_factors(diffusers_state, name), lora.layers[name])]
    # It is known to read layers outside of the blocks incompletely; ComfyUI reads them.
    wrong = [name for name in differing if name.startswith(_blocks(spec))]
    if wrong:
        raise InputError(
            f"diffusers' converter reads {plural(len(wrong), 'layer')} of {path} differently: {summarize(wrong)}",
            "mismatch",
        )
    return Checked(len(lora.layers), error, len(lora.layers) - len(differing), tuple(differing))


def _blocks(spec: ModelSpec) -> tuple[str, ...]:
    """Return the prefixes of the names of layers in blocks."""
    return tuple(f"{blocks}." for blocks in spec.blocks)


def _diffusers_reads(spec: ModelSpec, network: nn.Module) -> bool:
    """Return whether diffusers translates ComfyUI's names of this network."""
    width = spec.width(network)
    return spec.name == "ltx_video" or (spec.name == "hunyuan_video" and width == _HUNYUAN_WIDTH)


def _read_factors(state: Mapping[str, Tensor], name: str) -> Factors | None:
    parts = [state.get(f"{name}.lora_{factor}.weight") for factor in "AB"]
    return None if parts[0] is None or parts[1] is None else Factors(parts[0], parts[1], 1.0)


def _equal(actual: Factors | None, expected: Factors) -> bool:
    fits = actual is not None and actual.down.shape[1:] == expected.down.shape[1:] and actual.up.shape[1] == actual.rank
    return fits and actual is not None and _difference(actual, expected) <= _TOLERANCES[expected.up.dtype]


def _compare(actual: Lora, expected: Lora, path: Path) -> float:
    trained = {name for name, factors in expected.layers.items() if factors.up.any() or factors.magnitude is not None}
    lost = sorted(trained - actual.layers.keys())
    if lost:
        raise InputError(f"{path} was read back without {plural(len(lost), 'layer')}: {summarize(lost)}", "mismatch")
    errors = {name: _difference(actual.layers[name], expected.layers[name]) for name in trained}
    wrong = sorted(name for name, error in errors.items() if error > _TOLERANCES[expected.layers[name].up.dtype])
    if wrong:
        raise InputError(
            f"{path} was read back with {plural(len(wrong), 'layer')} that compute something else: {summarize(wrong)}",
            "mismatch",
        )
    return max(errors.values(), default=0.0)


def _difference(actual: Factors, expected: Factors) -> float:
    """Return the relative difference of two layers' outputs for the same random input."""
    generator = torch.Generator("cpu").manual_seed(0)
    inputs = torch.randn(expected.down[0].numel(), 4, generator=generator, dtype=torch.float32, device="cpu")
    outputs = [
        factors.scale * (factors.up.float().flatten(1) @ (factors.down.float().flatten(1) @ inputs))
        for factors in (actual, expected)
    ]
    norm = outputs[1].norm()
    error = float((outputs[0] - outputs[1]).norm() / norm) if norm else float(outputs[0].norm())
    if expected.magnitude is None and actual.magnitude is None:
        return error
    if expected.magnitude is None or actual.magnitude is None:
        return float("inf")
    own = expected.magnitude.float()
    return max(error, float((actual.magnitude.float() - own).norm() / own.norm()))


def check_outputs(lora: Lora, network: nn.Module) -> None:
    """Compare the output sizes of a LoRA's layers with the network's.

    Raises:
        ValueError: they belong to another model.
    """
    for name, factors in lora.layers.items():
        outputs = network.get_parameter(f"{name}.weight").shape[0]
        if factors.up.shape[0] != outputs:
            raise InputError(
                f"{name} has {factors.up.shape[0]} outputs, and this model's {outputs}; is it a LoRA of this model?",
                "mismatch",
            )


def with_averages(lora: Lora, averages: Mapping[str, Tensor]) -> Lora:
    """Return a LoRA with its EMA, which a checkpoint stores by the names of the network's parameters."""
    state = lora.state()
    for name, average in averages.items():
        plain = name.replace(".default.weight", "" if "magnitude" in name else ".weight")
        assert plain in state, name
        state[plain] = average
    return lora_from_state(state, lora.settings, lora.kind)


def lora_metadata(lora: Lora, *, architecture: tuple[str, str], facts: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata by the names of sd-scripts (`ss_`) and of Stability's model specification (`modelspec.`).

    Args:
        lora: the LoRA.
        architecture: name of the network, and the address of its authors' code.
        facts: `name`, `base`, and if known `trigger`, `license`, `steps`, `comment`.
    """
    settings, name = lora.complete_settings(), str(facts["name"])
    ranks = {factors.rank for factors in lora.layers.values()}
    alphas = {factors.scale * factors.rank for factors in lora.layers.values()}
    metadata = {
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
    return {key: str(value) for key, value in metadata.items() if value not in (None, "")}
