"""The index of encoders in a cache: from the options that name a model to the fingerprints of its encoders.

An identity is a digest of weights in memory. Without this index, the entries that a configuration needs would be known
only after loading its text encoders and VAE. The index also maps the files that text encoders were loaded from to their
fingerprint, until the files change, so that a start that finds every caption need not load gigabytes to name them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from finetrainers.config.errors import ConfigError
from finetrainers.config.root import fields
from finetrainers.config.sections import ModelSection
from finetrainers.models.spec import ModelSpec
from finetrainers.utils.files import write_json_atomic
from finetrainers.utils.packaged import SCHEME, model_path
from finetrainers.utils.reading import read_json, read_json_object, read_text

from ..inspect.file_facts import file_version
from .keys import EncoderEntry, Part, encoder_options, library_versions
from .model_fingerprint import ENCODING_VERSION
from .store import TensorCache


def remember_model(directory: Path, model: ModelSection, part: Part, entry: EncoderEntry) -> None:
    """Store the fingerprint of a part of the configured model."""
    folder = _folder(directory, model, part)
    path = folder / f"{entry.identity}.json"
    # An existing file may have been written by a version that stored less.
    if not path.is_file() or entry not in recall_models(directory, model, part):
        write_json_atomic(path, asdict(entry))


def recall_models(directory: Path, model: ModelSection, part: Part) -> list[EncoderEntry]:
    """Return the entries stored for a part of the configured model; several if its files were replaced in place."""
    paths = sorted(_folder(directory, model, part).glob("*.json"))
    return [TypeAdapter(EncoderEntry).validate_python(read_json(path)) for path in paths]


def remember_files(directory: Path, spec: ModelSpec, identity: str) -> None:
    """Store the fingerprint of the text encoders under the present version of the model's files."""
    stamp = _stamp(spec)
    path = _folder(directory, spec.config, "text") / "files" / f"{stamp}.json"
    if stamp is not None and not path.is_file():
        write_json_atomic(path, {"identity": identity})


def recall_files(directory: Path, spec: ModelSpec) -> str | None:
    """Return the stored fingerprint of the text encoders, or None if it is unknown or their files have changed."""
    path = _folder(directory, spec.config, "text") / "files" / f"{_stamp(spec)}.json"
    return read_json_object(path)["identity"] if path.is_file() else None


def _stamp(spec: ModelSpec) -> str | None:
    """Return a key of the files of tokenizers and text encoders and of the libraries that read them.

    It covers the path, size, modification time and change time of each file, as for media files (`file_facts`): reading
    gigabytes would take as long as loading them. Return None if the files are not on this disk.
    """
    files: list[object] = []
    try:
        parts = spec.facts.text_parts
    except ConfigError:  # without its configs
        return None
    for part in parts:
        for path in filter(Path.is_file, spec.files_of(part)):
            files.append([part, *file_version(path, path.stat())])
    if not files:
        return None
    # The transformer's config may limit the length of prompts.
    transformer = spec.files_of(next(part for part in spec.parts if part.startswith("transformer")))
    config = next((read_text(path) for path in transformer if path.name == "config.json"), None)
    encoding = (ENCODING_VERSION, spec.text_version) if spec.text_version else ENCODING_VERSION
    return TensorCache.key(files=files, transformer=config, versions=library_versions(), encoding=encoding)


def _folder(directory: Path, model: ModelSection, part: Part) -> Path:
    values = encoder_options(model, part)
    for name, value in values.items():
        # A directory has many names, but the demo model has the same name on every machine.
        if fields()[name].place != "model" or not isinstance(value, str) or value.startswith(SCHEME):
            continue
        if Path(model_path(value)).exists():
            values[name] = str(Path(value).resolve())
    return directory / "models" / f"{part}-{TensorCache.key(**values)[:16]}"
