"""Saving in the layout of diffusers: LoRA files, which any pipeline of the family reads, and whole networks."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.utils import convert_unet_state_dict_to_peft
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from torch import Tensor, nn

from finetrainers.utils.failures import InputError, error_kind
from finetrainers.utils.files import write_text_atomic
from finetrainers.utils.hashed_files import Written, save_safetensors
from finetrainers.utils.headers import adapter_metadata, load_tensors, read_header
from finetrainers.utils.reading import parse_json
from finetrainers.utils.text import plural

from ..compiling import unwrap
from .files import summarize
from .lora_formats import Lora, lora_from_state, read_foreign
from .weights import non_finite

#: Bytes of one weight file of a saved network.
MAX_SHARD_SIZE = 10_000_000_000
_SHARDS = "diffusion_pytorch_model{suffix}.safetensors"
LORA_FILE = "pytorch_lora_weights.safetensors"
#: Key of a LoRA file's metadata: version of the model that it was trained on; see `Facts.version`.
VERSION_KEY = "base_model_version"
logger = logging.getLogger(__name__)


def save_lora(
    directory: Path,
    state_dict: Mapping[str, Tensor],
    metadata: dict[str, Any],
    *,
    part: str,
    name: str = LORA_FILE,
    more: Mapping[str, str] | None = None,
) -> dict[Path, Written]:
    """Write a LoRA file, with rank and alpha as metadata, like pipelines' `save_lora_weights`.

    `load_lora_weights` of the family's pipeline reads it. Where the pipeline has no such method,
    `load_lora_adapter(..., prefix=part)` of the network does.

    Args:
        directory: directory that the file is written into.
        state_dict: the weights, by PEFT's names.
        metadata: PEFT's settings.
        part: diffusers' name of the network.
        name: file name.
        more: further metadata of the file.

    Returns:
        The written file.
    """
    # PEFT's config holds sets, which have no order that is the same in every process, and enums; the file's metadata is
    # JSON.
    plain = {k: sorted(v) if isinstance(v, set | frozenset) else getattr(v, "value", v) for k, v in metadata.items()}
    text = json.dumps({f"{part}.{name}": value for name, value in plain.items()}, indent=2, sort_keys=True)
    path = directory / name
    written = save_safetensors(
        {f"{part}.{key}": value.detach().cpu() for key, value in state_dict.items()},
        path,
        metadata={"format": "pt", **(more or {}), LORA_ADAPTER_METADATA_KEY: text},
    )
    return {path: written}


def read_lora(pipeline_cls: Any, path: Path, network: Callable[[], nn.Module], *, part: str, family: str) -> Lora:
    """Read a LoRA file; `network` returns the network on the meta device, where names of other programs need it."""
    lora = read_foreign(path, network, part=part, family=family) or _read_stock(pipeline_cls, path, part, family)
    bad = non_finite(lora.state())
    if bad:
        raise ValueError(
            f"{path} holds NaN or infinity in {plural(len(bad), 'tensor')}: {summarize(bad)}; the file is damaged"
        )
    return lora


@functools.cache  # a file is read to check it, and again to load it
def warn_of_version(path: Path, version: str | None) -> None:
    """Warn once if a LoRA file states that it was trained on another version of the model."""
    stated = None if version is None else read_header(path).metadata.get(VERSION_KEY)
    if stated not in (None, version):
        logger.warning("%s was trained on %s, and this model is %s: it may not have its effect", path, stated, version)


def _read_stock(pipeline_cls: Any, path: Path, part: str, family: str) -> Lora:
    """Read a LoRA with diffusers' names, or with those that it translates."""
    metadata = adapter_metadata(path)  # of the right types, which diffusers does not check
    if hasattr(pipeline_cls, "lora_state_dict"):
        state, metadata = pipeline_cls.lora_state_dict(
            str(path.parent), weight_name=path.name, use_safetensors=True, return_lora_metadata=True
        )
    else:
        state = load_tensors(path)
    prefix = f"{part}."
    tensors = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    if tensors and not any("lora_A" in name for name in tensors):
        tensors = convert_unet_state_dict_to_peft(tensors)
    if not any("lora_A" in name for name in tensors):
        raise InputError(f"{path} holds no LoRA of a {family} {part}", "mismatch")
    settings = {k.removeprefix(prefix): v for k, v in (metadata or {}).items() if k.startswith(prefix)}
    try:
        return lora_from_state(tensors, settings)
    except ValueError as error:
        raise InputError(f"{path}: {error}", error_kind(error)) from None


def weight_files(
    tensors: Mapping[str, Tensor], *, at_most: int | None = None, one_file: bool = False
) -> StateDictSplit:
    """Return the files that a network is written to, by diffusers' names.

    Args:
        tensors: all weights by name; meta tensors suffice.
        at_most: maximum bytes of a file; never more than `MAX_SHARD_SIZE`. A larger weight has a separate file.
        one_file: whether all are in one file, however large it becomes.
    """
    max_bytes = (
        sum(t.nbytes for t in tensors.values()) + 1 if one_file else min(at_most or MAX_SHARD_SIZE, MAX_SHARD_SIZE)
    )
    return split_torch_state_dict_into_shards(dict(tensors), filename_pattern=_SHARDS, max_shard_size=max_bytes)


def remove_full(directory: Path) -> None:
    """Remove the weight files of a network that was written before, which may have had more of them."""
    for earlier in directory.glob(_SHARDS.format(suffix="*") + "*"):
        earlier.unlink()


def save_full(
    directory: Path, transformer: nn.Module, state_dict: Mapping[str, Tensor], *, files: StateDictSplit | None = None
) -> dict[Path, Written]:
    """Write a network in diffusers layout with the given weights, in their dtype.

    `ModelMixin.save_pretrained` takes no state dict: it would write the network's own weights, which under sharding are
    not whole, and are not the moving average or the dtype asked for. `huggingface_hub.save_torch_state_dict` does not
    hash what it writes.

    Args:
        directory: the network's folder.
        transformer: the network, for its config.
        state_dict: its weights, or, where processes write a network together, those of this process's files.
        files: files of the whole network, in a folder where none are (`remove_full`), or None if all weights are given.
            The process that has the first file's weights also writes the config and the index.

    Returns:
        The weight files that were written.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in state_dict.items()}
    if files is None:
        remove_full(directory)
    split = files or weight_files(tensors)
    directory.mkdir(parents=True, exist_ok=True)
    written = {}
    for number, (file, names) in enumerate(split.filename_to_tensors.items()):
        if names[0] not in tensors:
            continue
        if number == 0:
            _save_facts(directory, transformer, split)
        path = directory / file
        written[path] = save_safetensors({name: tensors[name] for name in names}, path, metadata={"format": "pt"})
    return written


def _save_facts(directory: Path, transformer: nn.Module, split: StateDictSplit) -> None:
    """Write a network's config, and the index of its weight files if there are several."""
    network = unwrap(transformer)
    # FSDP2 gives the networks that it shards a separate class.
    stock = next(cls.__name__ for cls in type(network).__mro__ if cls.__module__.startswith("diffusers."))
    config = {**parse_json(network.to_json_string()), "_class_name": stock}
    config.pop("_name_or_path", None)  # a path on this machine, which differs after a resume
    write_text_atomic(directory / network.config_name, json.dumps(config, indent=2, sort_keys=True) + "\n")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_text_atomic(directory / (_SHARDS.format(suffix="") + ".index.json"), text)
