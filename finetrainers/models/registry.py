"""The model families: one entry each. Reading this file imports no torch; a family's code loads when it is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import ModelSection
from finetrainers.utils.addresses import resolve
from finetrainers.utils.packaged import model_path
from finetrainers.utils.text import nearest

from . import geometries

if TYPE_CHECKING:
    from .spec import ModelSpec

Json = dict[str, Any]
_ENDS = 1 << 16  # bytes at both ends of a weight file that name it
#: A file of weights, with its variant, if any: `fp16` of `diffusion_pytorch_model.fp16-00001-of-00002.safetensors`.
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.(\w+?))?(?:-\d+-of-\d+)?\.(?:safetensors|bin)"
)
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Family:
    """What is known about a family before any of its code is imported.

    Attributes:
        name: the value of `--model_name`.
        spec: `module:Class` of its `ModelSpec`.
        geometry: size rules of the published checkpoints.
        transformer: name of its transformer's class, as checkpoints' configs state it.
        read_geometry: size rules from a checkpoint's `vae/config.json` and `transformer/config.json`.
        is_flow: whether the flow options mean something.
        num_text_encoders: how many text encoders it has.
        first_frame: see `ModelSpec.first_frame`.
        read_first_frame: the same from a checkpoint's `transformer/config.json`, where checkpoints differ.
        read_takes_guidance: whether the network takes guidance as an input, from a checkpoint's
            `transformer/config.json`; None: none of the family's does.
        tiny: `module:function` that builds a complete tiny random repository, or None.
    """

    name: str
    spec: str
    geometry: Geometry
    transformer: str
    read_geometry: Callable[[Json, Json], Geometry]
    is_flow: bool
    num_text_encoders: int
    first_frame: str = "none"
    read_first_frame: Callable[[Json], str] | None = None
    read_takes_guidance: Callable[[Json], bool] | None = None
    tiny: str | None = None

    def load(self, config: ModelSection) -> ModelSpec:
        """The family's spec for one checkpoint (imports torch)."""
        return resolve(self.spec)(config)

    def geometry_of(self, config: ModelSection) -> Geometry:
        """Size rules of the configured checkpoint where its configs are on disk, else of the published ones."""
        vae = _component_config(config, "vae", config.vae_id)
        transformer = _component_config(config, "transformer", config.transformer_id)
        if vae is None or transformer is None:
            return self.geometry
        return self.read_geometry(vae, transformer)

    def mismatch(self, config: ModelSection) -> str | None:
        """Why the configured checkpoint is none of this family, with the way out, where its config is on disk."""
        transformer = _component_config(config, "transformer", config.transformer_id) or {}
        found = transformer.get("_class_name", self.transformer)
        if found == self.transformer:
            return None
        others = [name for name, family in _FAMILIES.items() if family.transformer == found]
        way_out = f"use --model_name {others[0]}" if others else "which no model family here has"
        place = config.transformer_id or config.pretrained_model_name_or_path
        return f"{place} holds a {found}, and {self.name} is a {self.transformer}; {way_out}"

    def first_frame_of(self, config: ModelSection) -> str:
        """How the configured checkpoint takes a first frame; "unknown" where that depends on a config not on disk."""
        if self.read_first_frame is None:
            return self.first_frame
        transformer = _component_config(config, "transformer", config.transformer_id)
        return "unknown" if transformer is None else self.read_first_frame(transformer)

    def takes_guidance(self, config: ModelSection) -> bool:
        """Whether the configured checkpoint's network takes guidance as an input; yes, where its config is not on disk."""
        if self.read_takes_guidance is None:
            return False
        transformer = _component_config(config, "transformer", config.transformer_id)
        return transformer is None or self.read_takes_guidance(transformer)

    def fetch_configs(self, config: ModelSection) -> bool:
        """Bring a hub model's configs onto this disk, and say whether any is new; loading will say why one is not."""
        from huggingface_hub import hf_hub_download

        fetched = False
        for part, replacement in (("vae", config.vae_id), ("transformer", config.transformer_id)):
            if _component_config(config, part, replacement) is None:
                root = model_path(replacement or config.pretrained_model_name_or_path)
                revision = None if replacement else config.revision
                with contextlib.suppress(OSError, ValueError):
                    hf_hub_download(root, f"{part}/config.json", revision=revision, cache_dir=config.cache_dir)
                    fetched = True
        return fetched


def _component_config(config: ModelSection, part: str, replacement: str | None) -> Json | None:
    """The part's config.json if it is on disk, hub cache included; a replacement may be the part's folder itself."""
    path = _component_file(config, part, replacement, "config.json")
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))


def _component_file(config: ModelSection, part: str, replacement: str | None, name: str) -> Path | None:
    """A file of a part if it is on disk; see `_component_config`."""
    root = model_path(replacement or config.pretrained_model_name_or_path)
    candidates = [Path(root) / part / name]
    if replacement:
        candidates.append(Path(root) / name)
    if _HUB_ID.fullmatch(str(root)) and not Path(root).is_dir():
        from huggingface_hub import try_to_load_from_cache

        revision = None if replacement else config.revision
        cached = try_to_load_from_cache(root, f"{part}/{name}", cache_dir=config.cache_dir, revision=revision)
        if isinstance(cached, str):
            candidates.append(Path(cached))
    return next((path for path in candidates if path.is_file()), None)


def part_folder(config: ModelSection, part: str) -> Path | None:
    """Where the files of a part lie that loading it would read, a hub model's newest ones included; None: not on this disk."""
    replacement = getattr(config, f"{part}_id", None)
    root = model_path(replacement or config.pretrained_model_name_or_path)
    for name in ("config.json", "tokenizer_config.json"):
        if _HUB_ID.fullmatch(str(root)) and not Path(root).is_dir():
            from huggingface_hub import hf_hub_download

            revision = None if replacement else config.revision
            with contextlib.suppress(OSError, ValueError):  # asks the hub what is newest, unless it is offline
                hf_hub_download(root, f"{part}/{name}", revision=revision, cache_dir=config.cache_dir)
        path = _component_file(config, part, replacement, name)
        if path is not None:
            return path.parent
    return None


def noise_process_of(config: ModelSection) -> str | None:
    """Scheduler class and prediction type of the configured checkpoint; None where they are not on disk."""
    path = _component_file(config, "scheduler", None, "scheduler_config.json")
    if path is None:
        return None
    scheduler = json.loads(path.read_text(encoding="utf-8"))
    return " ".join(str(scheduler[key]) for key in ("_class_name", "prediction_type") if key in scheduler)


def transformer_digest(config: ModelSection) -> str | None:
    """A short name of the configured transformer's weights, wherever they lie; None where they are not all on disk."""
    return _weights_digest(config, "transformer")


def vae_digest(config: ModelSection) -> str | None:
    """The same of the VAE, and of its configuration."""
    return _digest_of([_settings_digest(config, "vae"), _weights_digest(config, "vae")])


def text_encoders_digest(config: ModelSection) -> str | None:
    """The same of all text encoders, with their tokenizers."""
    found: list[str | None] = []
    for part in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        folder = _part_folder(config, part)
        if folder is not None:
            found += [_settings_digest(config, part), _weights_digest(config, part)]
    for part in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        folder = _part_folder(config, part)
        if folder is not None:
            found.append(_files_digest([path for path in sorted(folder.iterdir()) if path.is_file()]))
    return _digest_of(found)


def _weights_digest(config: ModelSection, part: str) -> str | None:
    """Of a part's weight files; None where they are not all on disk."""
    folder = _part_folder(config, part)
    if folder is None:
        return None
    variant = None if getattr(config, f"{part}_id", None) else config.variant
    files = [
        path for path in sorted(folder.iterdir()) if (match := _WEIGHTS.fullmatch(path.name)) and match[1] == variant
    ]
    for index in folder.glob("*.index.json"):
        listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not all((folder / name).is_file() for name in listed):
            return None
    return _files_digest(files) if files else None


def _files_digest(files: Sequence[Path]) -> str:
    """Of the files' names and sizes and of their first and last bytes: training or converting weights changes those."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size} ".encode() + file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()[:12]


def _settings_digest(config: ModelSection, part: str) -> str | None:
    """Of what a part's config.json says, but for where it came from and which version wrote it."""
    settings = _component_config(config, part, getattr(config, f"{part}_id", None))
    if settings is None:
        return None
    kept = {name: value for name, value in settings.items() if name[:1] != "_" and name != "transformers_version"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def _digest_of(parts: Sequence[str | None]) -> str | None:
    """One name for several; None where one is not known, or there are none."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known:
        return None
    return hashlib.sha256(" ".join(known).encode()).hexdigest()[:12]


def _part_folder(config: ModelSection, part: str) -> Path | None:
    """Where a part lies on this disk; asks no hub."""
    for name in ("config.json", "tokenizer_config.json"):
        path = _component_file(config, part, getattr(config, f"{part}_id", None), name)
        if path is not None:
            return path.parent
    return None


_FAMILIES: dict[str, Family] = {}


def register_model(family: Family) -> None:
    """Make a family available to `--model_name`.

    Raises:
        ValueError: the name is taken.
    """
    if family.name in _FAMILIES:
        raise ValueError(f"model family {family.name!r} is registered already")
    _FAMILIES[family.name] = family


def families() -> dict[str, Family]:
    """All registered families by name."""
    return dict(_FAMILIES)


def get_family(name: str) -> Family:
    """The family with this name.

    Raises:
        KeyError: there is none; the message names the nearest.
    """
    if name not in _FAMILIES:
        raise KeyError(f"unknown model family {name!r}{nearest(name, _FAMILIES)}")
    return _FAMILIES[name]


def build_tiny(name: str, directory: Path, *, seed: int = 0) -> None:
    """Write a complete tiny random repository of a family, in diffusers layout.

    Raises:
        KeyError: unknown family, or one that brings no tiny model.
    """
    family = get_family(name)
    if family.tiny is None:
        raise KeyError(f"model family {name!r} brings no tiny model")
    resolve(family.tiny)(directory, seed=seed)


register_model(Family(
    name="ltx_video", spec="finetrainers.models.ltx_video:LTXVideoSpec",
    geometry=Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25.0, pixels=32),
    transformer="LTXVideoTransformer3DModel",
    read_geometry=geometries.ltx_video, is_flow=True, num_text_encoders=1, first_frame="tokens",
    tiny="finetrainers.models.tiny:build_ltx_video",
))  # fmt: skip
register_model(Family(
    name="hunyuan_video", spec="finetrainers.models.hunyuan_video:HunyuanVideoSpec",
    geometry=Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=24.0, pixels=16),
    transformer="HunyuanVideoTransformer3DModel",
    read_geometry=geometries.hunyuan_video, is_flow=True, num_text_encoders=2,
    read_takes_guidance=geometries.hunyuan_video_takes_guidance,
    tiny="finetrainers.models.tiny:build_hunyuan_video",
))  # fmt: skip
register_model(Family(
    name="cogvideox", spec="finetrainers.models.cogvideox:CogVideoXSpec",
    geometry=Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=8.0),
    transformer="CogVideoXTransformer3DModel",
    read_geometry=geometries.cogvideox, is_flow=False, num_text_encoders=1, first_frame="channels",
    read_first_frame=geometries.cogvideox_first_frame,
    tiny="finetrainers.models.tiny:build_cogvideox",
))  # fmt: skip
