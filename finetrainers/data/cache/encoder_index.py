"""The index of encoders in a cache: from the options that name a model to the fingerprints of its encoders.

An identity is a digest of weights in memory, so without this nobody could say what a configuration needs of a cache
without loading its text encoders and VAE. And by the files that text encoders were loaded from, as long as those are as
they were, so that a start that finds every caption need not load gigabytes to name them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from finetrainers.config.root import fields
from finetrainers.config.sections import ModelSection
from finetrainers.models.spec import ModelSpec
from finetrainers.utils.files import write_json_atomic
from finetrainers.utils.packaged import SCHEME, model_path

from ..inspect.file_facts import file_version
from .keys import EncoderEntry, Part, encoder_options, library_versions
from .model_fingerprint import ENCODING_VERSION
from .store import TensorCache


def remember_model(directory: Path, model: ModelSection, part: Part, known: EncoderEntry) -> None:
    """Store the fingerprint of a part of the configured model."""
    folder = _folder(directory, model, part)
    path = folder / f"{known.identity}.json"
    if not path.is_file() or known not in recall_models(directory, model, part):  # or by a version that knew less
        write_json_atomic(path, asdict(known))


def recall_models(directory: Path, model: ModelSection, part: Part) -> list[EncoderEntry]:
    """All stored entries of this part of the configured model: its files may have been replaced under the same name."""
    paths = sorted(_folder(directory, model, part).glob("*.json"))
    return [TypeAdapter(EncoderEntry).validate_json(path.read_bytes()) for path in paths]


def remember_files(directory: Path, spec: ModelSpec, identity: str) -> None:
    """Store the fingerprint of the text encoders under the present version of the model's files."""
    stamp = _stamp(spec)
    path = _folder(directory, spec.config, "text") / "files" / f"{stamp}.json"
    if stamp is not None and not path.is_file():
        write_json_atomic(path, {"identity": identity})


def recall_files(directory: Path, spec: ModelSpec) -> str | None:
    """The stored fingerprint of the text encoders; None where it is unknown or their files have changed."""
    path = _folder(directory, spec.config, "text") / "files" / f"{_stamp(spec)}.json"
    return json.loads(path.read_text(encoding="utf-8"))["identity"] if path.is_file() else None


def _stamp(spec: ModelSpec) -> str | None:
    """A name of the files of tokenizers and text encoders and of the libraries that read them; None: not on this disk.

    Of each file the path, size, and times of modification and of change count, as for media files (`file_facts`):
    reading gigabytes would take as long as loading them.
    """
    found: list[object] = []
    for part in (name for name in spec.parts if name.startswith(("tokenizer", "text_encoder", "image_processor"))):
        for path in filter(Path.is_file, spec.files_of(part)):
            found.append([part, *file_version(path, path.stat())])
    if not found:
        return None
    # How long a text may be can be written in the transformer's config.
    transformer = spec.files_of(next(part for part in spec.parts if part.startswith("transformer")))
    config = next((path.read_text(encoding="utf-8") for path in transformer if path.name == "config.json"), None)
    return TensorCache.key(files=found, transformer=config, versions=library_versions(), encoding=ENCODING_VERSION)


def _folder(directory: Path, model: ModelSection, part: Part) -> Path:
    values = encoder_options(model, part)
    for name, value in values.items():
        # One and the same folder has many names; a model that is packaged has one on every machine.
        if fields()[name].place != "model" or not isinstance(value, str) or value.startswith(SCHEME):
            continue
        if Path(model_path(value)).exists():
            values[name] = str(Path(value).resolve())
    return directory / "models" / f"{part}-{TensorCache.key(**values)[:16]}"
