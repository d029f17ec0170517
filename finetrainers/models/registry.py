"""Registered model families: by name, by checkpoint, and the digests of their weights. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from finetrainers.config.facts import Facts, is_network
from finetrainers.config.sections import AUTO, ModelSection
from finetrainers.utils.addresses import resolve
from finetrainers.utils.files import open_regular
from finetrainers.utils.reading import read_json_object

from .families import FAMILIES as OWN_FAMILIES
from .family import FAMILIES, Family, families, register_model
from .files.files import (
    MODEL_INDEX,
    folder_on_disk,
    is_hub_id,
    part_config,
    read_configs,
    replacement_source,
    single_file,
    trained_part,
)
from .lookalikes import class_lookalike, id_lookalike, name_lookalike, named_expert, plain_name

__all__ = [
    "FAMILIES",
    "Family",
    "build_tiny",
    "families",
    "get_family",
    "named_expert",
    "noise_process_name",
    "other_parts_digest",
    "register_model",
    "text_encoders_digest",
    "transformer_digest",
    "vae_digest",
    "with_family",
]

#: Text encoders and tokenizers that `text_encoders_digest` covers; more would change digests that runs have recorded.
_TEXT_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
_ENDS = 1 << 16  # bytes at both ends of a weight file that name it
#: A file of weights, with its variant, if any: `fp16` of `diffusion_pytorch_model.fp16-00001-of-00002.safetensors`.
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.(\w+?))?(?:-\d+-of-\d+)?\.(?:safetensors|bin)"
)

for _family in OWN_FAMILIES:
    register_model(_family)


def get_family(name: str) -> Family:
    """Return the family with this name.

    Raises:
        KeyError: there is none; the message names the nearest, or all.
    """
    family = FAMILIES.get(name)
    if family is not None:
        return family
    registered = families()
    broken = "".join(f"; {reason}" for reason in FAMILIES.broken)
    supported = f"supported: {', '.join(sorted(registered))}{broken}"
    plain = plain_name(name)
    similar_model = name_lookalike(name)
    if similar_model and not any(plain_name(other).startswith(similar_model[1]) for other in registered):
        advice = f": {similar_model[0].use}" if similar_model[0].use else ""
        raise KeyError(f"model family {name!r} is not supported{advice}; {supported}")
    completions = [other for other in registered if len(plain) > 2 and plain_name(other).startswith(plain)]
    exact = [other for other in completions if plain_name(other) == plain]
    same = [other for other in registered if _without_video(other) == _without_video(plain)]
    prefixes = [other for other in registered if plain.startswith(plain_name(other))]
    similar = exact or completions or same or sorted(prefixes, key=len)[-1:]
    if similar:
        names = " or ".join(repr(other) for other in similar)
        raise KeyError(f"unknown model family {name!r}; did you mean {names}?{broken}")
    close = get_close_matches(plain, [plain_name(other) for other in registered], n=1, cutoff=0.8)
    suggestion = next((other for other in registered if plain_name(other) in close), None)
    raise KeyError(
        f"unknown model family {name!r}; {f'did you mean {suggestion!r}?{broken}' if suggestion else supported}"
    )


def _without_video(name: str) -> str:
    """Return a normalized name without the "video" or "v" that precedes a version or ends it: "ltxv2" is "ltx2"."""
    return re.sub(r"v(ideo)?(?=\d|$)", "", plain_name(name))


def with_family(model: ModelSection) -> ModelSection:
    """Return the section with the family found from the transformer's config or the Hub id, where it is `auto`.

    Dtypes that the family declares apply where the user has set none.

    Raises:
        KeyError: neither shows a family.
    """
    if model.model_name != AUTO:
        family = FAMILIES.get(model.model_name)
        return model if family is None else family.with_dtypes(model)
    single = single_file(model, trained_part(model)) is not None  # whose config is the base model's
    source = (None if single else model.transformer_id) or model.pretrained_model_name_or_path
    kind = pipeline = None
    with contextlib.suppress(ValueError):  # a damaged file is reported later, for any family
        configs = read_configs(model, ())
        kind, pipeline = (configs.get(name, {}).get("_class_name") for name in (trained_part(model), MODEL_INDEX))
    for searched in (lambda: dict(FAMILIES.registered), families):  # installed packages only if need be
        for name, family in searched().items():
            is_published = plain_name(source) in map(plain_name, family.published) and is_hub_id(source)
            if (kind == family.transformer and family.trains(model)) or (kind is None and is_published):
                return family.with_dtypes(model.model_copy(update={"model_name": name}))
    similar_model = class_lookalike(kind, pipeline) or (id_lookalike(source) if kind is None else None)
    reason = (
        f"{source} holds a {kind}, which no supported family trains"
        if kind
        else f"it cannot be detected from a config of {source} on this disk"
    )
    if similar_model is not None:
        reason += f", and that is {similar_model.description}"
    raise KeyError(
        "; ".join([f"is required: {reason}", f"supported: {', '.join(sorted(families()))}", *FAMILIES.broken])
    )


def tiny_builder(name: str, version: str | None = None) -> str:
    """Return the address of the function that writes a tiny model of a family and version.

    Raises:
        KeyError: unknown family or version, or a family that brings no tiny model.
    """
    family = get_family(name)
    if family.tiny is None:
        raise KeyError(f"model family {name!r} has no tiny model")
    if version is not None and version not in family.tiny_versions:
        versions = f"valid: {', '.join(family.tiny_versions)}" if family.tiny_versions else "it has one; leave it out"
        raise KeyError(f"unknown version {version!r} of {name}; {versions}")
    return family.tiny


def build_tiny(name: str, directory: Path, *, seed: int = 0, version: str | None = None) -> None:
    """Write a complete tiny random repository of a family, in diffusers layout; default: of its first version.

    Raises:
        KeyError: as `tiny_builder`.
    """
    build = resolve(tiny_builder(name, version))
    build(directory, seed=seed, **({} if version is None else {"version": version}))


# ---- names of weights ------------------------------------------------------------------------------------------------


def noise_process_name(config: ModelSection) -> str | None:
    """Return scheduler class and prediction type of the configured checkpoint, or None if they are not on disk."""
    scheduler = part_config(config, "scheduler")
    if scheduler is None:
        return None
    return " ".join(str(scheduler[key]) for key in ("_class_name", "prediction_type") if key in scheduler)


def transformer_digest(config: ModelSection) -> str | None:
    """Return a digest of the configured transformer's weights, or None if they are not all on disk."""
    return _weights_digest(config, trained_part(config))


def vae_digest(config: ModelSection) -> str | None:
    """Return a digest of the VAE's weights and configuration, or None if they are not all on disk."""
    return _join_digests([_settings_digest(config, "vae"), _weights_digest(config, "vae")])


def text_encoders_digest(config: ModelSection) -> str | None:
    """Return a digest of all text encoders with their tokenizers, or None if they are not all on disk."""
    present = [part for part in _TEXT_PARTS if folder_on_disk(config, part) is not None]
    return _join_digests([digest for part in present for digest in _part_digests(config, part)])


def other_parts_digest(config: ModelSection, facts: Facts) -> str | None:
    """Return a digest of the frozen parts that have none yet, such as an image encoder or the other of two experts.

    It is empty if the checkpoint has no such parts, and None if they are not all on disk.
    """
    others = [part for part in facts.parts if part not in ("scheduler", "vae", facts.trained, *_TEXT_PARTS)]
    digests = [digest for part in others for digest in _part_digests(config, part)]
    return _join_digests(digests) if digests else ""


def _part_digests(config: ModelSection, part: str) -> list[str | None]:
    """Return the digests of a network's settings and weights, or that of another part's files."""
    if is_network(part):
        return [_settings_digest(config, part), _weights_digest(config, part)]
    folder = folder_on_disk(config, part)
    return [files_digest([path for path in sorted(folder.iterdir()) if path.is_file()]) if folder else None]


def _weights_digest(config: ModelSection, part: str) -> str | None:
    """Return a digest of a part's weight files, or None if they are not all on disk."""
    single = single_file(config, part)
    if single is not None:
        return files_digest([single]) if single.is_file() else None
    folder = folder_on_disk(config, part)
    if folder is None:
        return None
    variant = None if replacement_source(config, part) else config.variant
    files = [
        path for path in sorted(folder.iterdir()) if (match := _WEIGHTS.fullmatch(path.name)) and match[1] == variant
    ]
    for index in folder.glob("*.index.json"):
        listed = set(read_json_object(index)["weight_map"].values())
        if not all((folder / name).is_file() for name in listed):
            return None
    return files_digest(files) if files else None


def files_digest(files: Sequence[Path]) -> str:
    """Return a digest of files' names, sizes, and first and last bytes, which training or conversion changes."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with open_regular(path) as file:
            digest.update(f"{path.name} {size} ".encode() + file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()[:12]


def _settings_digest(config: ModelSection, part: str) -> str | None:
    """Return a digest of a part's config.json, ignoring provenance and version keys, or None if it is not on disk."""
    settings = part_config(config, part)
    if settings is None:
        return None
    digested = {name: value for name, value in settings.items() if name[:1] != "_" and name != "transformers_version"}
    return hashlib.sha256(json.dumps(digested, sort_keys=True).encode()).hexdigest()[:12]


def _join_digests(digests: Sequence[str | None]) -> str | None:
    """Join digests into one, or return None if any is None or there are none."""
    present = [digest for digest in digests if digest is not None]
    if len(present) < len(digests) or not present:
        return None
    return hashlib.sha256(" ".join(present).encode()).hexdigest()[:12]
