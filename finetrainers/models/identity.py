"""Names for the exact weights behind a part of a model, so that cached encodings of other weights are never used."""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from finetrainers.config.sections import ModelSection


def text_identity(config: ModelSection) -> str:
    """Identity of the tokenizers and text encoders, with their dtypes."""
    parts = [
        _part(config, "tokenizer", config.tokenizer_id),
        _part(config, "tokenizer_2", config.tokenizer_2_id),
        _part(config, "text_encoder", config.text_encoder_id),
        _part(config, "text_encoder_2", config.text_encoder_2_id),
    ]
    return "|".join([config.model_name, *parts, config.text_encoder_dtype, config.text_encoder_2_dtype])


def vae_identity(config: ModelSection) -> str:
    """Identity of the VAE, with its dtype and tiling, which both change latents."""
    part = _part(config, "vae", config.vae_id)
    return "|".join([config.model_name, part, config.vae_dtype, f"tiling={config.enable_tiling}"])


def _part(config: ModelSection, part: str, replacement: str | None) -> str:
    root = replacement or config.pretrained_model_name_or_path
    if Path(root).is_dir():
        folder = Path(root) / part
        return f"{part}:{_folder_digest(folder if folder.is_dir() else Path(root))}"
    revision = None if replacement else config.revision
    # The cached file's folder is named after the commit, which a branch name does not tell.
    name = "tokenizer_config.json" if part.startswith("tokenizer") else "config.json"
    cached = try_to_load_from_cache(root, f"{part}/{name}", cache_dir=config.cache_dir, revision=revision)
    commit = Path(cached).parent.parent.name if isinstance(cached, str) else revision or "main"
    return f"{part}:{root}@{commit}:{config.variant if not replacement else None}"


def _folder_digest(folder: Path) -> str:
    """Digest over names, sizes and times of the weights, and the content of small files."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_file():
            stat = path.stat()
            content = path.read_bytes() if stat.st_size < 2**20 else f"{stat.st_size} {stat.st_mtime_ns}".encode()
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:32]
