"""The model families: one entry each. Reading this file imports no torch; a family's code loads when it is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import AUTO, ModelSection
from finetrainers.utils.addresses import resolve
from finetrainers.utils.packaged import model_path

from . import geometries
from .files import (
    cached_file,
    component_file,
    file_problems,
    folder_on_disk,
    is_hub_id,
    option_of,
    parts_of,
    read_json,
    replacement_of,
    weights_size,
)
from .hub import OFFLINE, ask, fetch_config, how_to_download

if TYPE_CHECKING:
    from .spec import ModelSpec

Json = dict[str, Any]
_MODEL_INDEX = "model_index.json"
_ENDS = 1 << 16  # bytes at both ends of a weight file that name it
#: A file of weights, with its variant, if any: `fp16` of `diffusion_pytorch_model.fp16-00001-of-00002.safetensors`.
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.(\w+?))?(?:-\d+-of-\d+)?\.(?:safetensors|bin)"
)


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
        read_unknown: why a checkpoint is of a kind that the family cannot train, from its `transformer/config.json`.
        vae: name of its VAE's class, as checkpoints' configs state it; None: any.
        pipelines: names of the pipelines that its checkpoints are made for, as `model_index.json` states them; none: any.
        published: hub ids of its checkpoints, whose files need not be on this disk to tell the family.
        least_steps: fewest denoising steps that the scheduler of its checkpoints can take.
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
    read_unknown: Callable[[Json], str | None] | None = None
    vae: str | None = None
    pipelines: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    least_steps: int = 1
    tiny: str | None = None

    def load(self, config: ModelSection) -> ModelSpec:
        """The family's spec for one checkpoint (imports torch)."""
        return resolve(self.spec)(config)

    def geometry_of(self, config: ModelSection) -> Geometry:
        """Size rules of the configured checkpoint where its configs are on disk, else of the published ones."""
        vae = _component_config(config, "vae")
        transformer = _component_config(config, "transformer")
        if vae is None or transformer is None:
            return self.geometry
        return self.read_geometry(vae, transformer)

    def problems(self, config: ModelSection, *, weights: bool = True) -> list[Problem]:
        """Everything that is wrong with the configured checkpoint, as far as the files on disk tell without being loaded.

        Args:
            config: names it.
            weights: whether weight files are examined too.
        """
        problems = file_problems(config, parts_of(self.num_text_encoders), weights=weights)
        # Files that cannot be read say nothing about the family.
        return problems or list(self._mismatches(config))

    def _mismatches(self, config: ModelSection) -> Iterator[Problem]:
        """Why the checkpoint is none that this family trains, each with the way out."""
        vae, transformer = (_component_config(config, part) or {} for part in ("vae", "transformer"))
        for part, read, expected in (("vae", vae, self.vae), ("transformer", transformer, self.transformer)):
            found = read.get("_class_name", expected)
            if expected is not None and found != expected:
                others = [name for name, family in _FAMILIES.items() if found in (family.transformer, family.vae)]
                way_out = f"use --model_name {others[0]}" if others else "which no model family here has"
                place = replacement_of(config, part) or config.pretrained_model_name_or_path
                message = f"{place} holds a {found}, and {self.name} is a {expected}; {way_out}"
                yield Problem("--model_name" if part == "transformer" else option_of(config, part), message)
        if transformer.get("_class_name", self.transformer) != self.transformer:
            return
        pipeline = self._pipeline_of(config)
        if self.pipelines and pipeline not in (None, *self.pipelines):
            yield Problem(
                "--pretrained_model_name_or_path",
                f"{config.pretrained_model_name_or_path} is made for {pipeline}, and {self.name} trains checkpoints of "
                f"{' or '.join(self.pipelines)}; if its transformer is such a one, name it with --transformer_id",
            )
        elif self.read_unknown is not None and (unknown := self.read_unknown(transformer)) is not None:
            yield Problem(option_of(config, "transformer"), unknown)
        latents, given = transformer.get("out_channels"), vae.get("latent_channels")
        if latents is not None and given is not None and latents != given:
            message = (
                f"the VAE gives {given} channels, and the transformer predicts {latents}; they do not belong together"
            )
            yield Problem(option_of(config, "vae"), message)

    def _pipeline_of(self, config: ModelSection) -> str | None:
        """The pipeline that the transformer's repository names; None where it names none."""
        if config.transformer_id:
            return None
        root = model_path(config.pretrained_model_name_or_path)
        index: Path | None = Path(root) / _MODEL_INDEX
        if is_hub_id(root):
            index = cached_file(root, _MODEL_INDEX, config, config.revision)
        if index is None or not index.is_file():
            return None
        with contextlib.suppress(ValueError):  # nothing else is read from it
            return read_json(index).get("_class_name")
        return None

    def first_frame_of(self, config: ModelSection) -> str:
        """How the configured checkpoint takes a first frame; "unknown" where that depends on a config not on disk."""
        if self.read_first_frame is None:
            return self.first_frame
        transformer = _component_config(config, "transformer")
        return "unknown" if transformer is None else self.read_first_frame(transformer)

    def takes_guidance(self, config: ModelSection) -> bool:
        """Whether the configured checkpoint's network takes guidance as an input; yes, where its config is not on disk."""
        if self.read_takes_guidance is None:
            return False
        transformer = _component_config(config, "transformer")
        return transformer is None or self.read_takes_guidance(transformer)

    def weights_on_disk(self, config: ModelSection) -> dict[str, int | None]:
        """Bytes of the weight files of each network, in the order in which they are loaded; None: not all on this disk."""
        networks = (
            part for part in parts_of(self.num_text_encoders) if not part.startswith(("scheduler", "tokenizer"))
        )
        return {part: weights_size(config, part) for part in networks}

    def fetch_configs(self, config: ModelSection) -> Fetched:
        """Bring the configs of a hub model onto this disk; the hub is first asked whether it answers at all.

        Raises:
            ConfigError: the hub has no such repository or file, or does not give it.
        """
        places = (replacement_of(config, part) for part in parts_of(self.num_text_encoders))
        roots = dict.fromkeys(model_path(place or config.pretrained_model_name_or_path) for place in places)
        repositories = tuple(root for root in roots if is_hub_id(root))
        away = ask(repositories)
        missing = self.configs_not_here(config)
        problems: dict[str, Problem] = {}  # by message: a repository that is not there lacks both
        for part, root in missing if away is None else ():
            replaced = replacement_of(config, part) is not None
            names = [f"{part}/config.json", *(["config.json"] if replaced else [])]
            revision = None if replaced else config.revision
            try:
                fetch_config(root, names, revision=revision, cache_dir=config.cache_dir)
            except ValueError as error:
                problems.setdefault(str(error), Problem(option_of(config, part), str(error)))
        if problems:
            raise ConfigError(list(problems.values()))
        if missing and away is None and config.transformer_id is None:
            with contextlib.suppress(ValueError):  # of a repository that says nothing of its pipeline
                base = model_path(config.pretrained_model_name_or_path)
                fetch_config(base, [_MODEL_INDEX], revision=config.revision, cache_dir=config.cache_dir)
        lacking = dict.fromkeys(root for _, root in missing) if away else ()
        return Fetched(repositories, new=bool(missing) and away is None, away=away, missing=tuple(lacking))

    def configs_not_here(self, config: ModelSection) -> list[tuple[str, str]]:
        """Part and repository of the configs of a hub model that are not on this disk."""
        found = []
        for part in ("vae", "transformer"):
            replacement = replacement_of(config, part)
            root = model_path(replacement or config.pretrained_model_name_or_path)
            if is_hub_id(root) and _component_config(config, part) is None:
                found.append((part, root))
        return found


@dataclass(frozen=True)
class Fetched:
    """What came of the configs of a model.

    Attributes:
        repositories: those on the hub that the model's parts come from.
        new: whether any config is new on this disk.
        away: why the hub does not answer; None: it does, or need not.
        missing: repositories whose configs are not on this disk, therefore.
    """

    repositories: tuple[str, ...]
    new: bool
    away: str | None
    missing: tuple[str, ...]

    @property
    def way_out(self) -> str:
        """What to do about what is missing."""
        return how_to_download(self.missing[0])

    @property
    def is_offline_by_choice(self) -> bool:
        """Whether the user wants the hub not to be asked."""
        return self.away == OFFLINE


def _component_config(config: ModelSection, part: str) -> Json | None:
    """The part's config.json if it is on disk, hub cache included."""
    path = component_file(config, part, "config.json")
    return None if path is None else read_json(path)


def noise_process_of(config: ModelSection) -> str | None:
    """Scheduler class and prediction type of the configured checkpoint; None where they are not on disk."""
    path = component_file(config, "scheduler", "scheduler_config.json")
    if path is None:
        return None
    scheduler = read_json(path)
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
        folder = folder_on_disk(config, part)
        if folder is not None:
            found += [_settings_digest(config, part), _weights_digest(config, part)]
    for part in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        folder = folder_on_disk(config, part)
        if folder is not None:
            found.append(_files_digest([path for path in sorted(folder.iterdir()) if path.is_file()]))
    return _digest_of(found)


def _weights_digest(config: ModelSection, part: str) -> str | None:
    """Of a part's weight files; None where they are not all on disk."""
    folder = folder_on_disk(config, part)
    if folder is None:
        return None
    variant = None if replacement_of(config, part) else config.variant
    files = [
        path for path in sorted(folder.iterdir()) if (match := _WEIGHTS.fullmatch(path.name)) and match[1] == variant
    ]
    for index in folder.glob("*.index.json"):
        listed = set(read_json(index)["weight_map"].values())
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
    settings = _component_config(config, part)
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


_FAMILIES: dict[str, Family] = {}
#: Families that people ask for, in plain letters, some of whose names are like those of supported ones.
_ELSEWHERE = re.compile(
    r"wan|ltx(video|v)?2|hunyuan(video)?15|hunyuanimage|hunyuandit|mochi|skyreels|cosmos|framepack|opensora|allegro|kandinsky"
    r"|flux|sdxl|sd3|sd15|stable|qwen|zimage|pixart|sana|lumina|chroma|stepvideo|magi|easyanimate|animatediff|svd|krea"
)


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
        KeyError: there is none; the message names the nearest, or all.
    """
    if name in _FAMILIES:
        return _FAMILIES[name]
    supported = f"supported: {', '.join(sorted(_FAMILIES))}"
    plain = _plain(name)
    if _ELSEWHERE.match(plain):
        raise KeyError(f"model family {name!r} is not supported; {supported}")
    alike = [
        one for one in _FAMILIES if (len(plain) > 2 and _plain(one).startswith(plain)) or plain.startswith(_plain(one))
    ]
    if len(alike) == 1:
        raise KeyError(f"unknown model family {name!r}; did you mean {alike[0]!r}?")
    close = get_close_matches(plain, [_plain(one) for one in _FAMILIES], n=1, cutoff=0.8)
    meant = next((one for one in _FAMILIES if _plain(one) in close), None)
    raise KeyError(f"unknown model family {name!r}; {f'did you mean {meant!r}?' if meant else supported}")


def _plain(name: str) -> str:
    """A name without what people write in different ways."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def with_family(model: ModelSection) -> ModelSection:
    """The section with the family that the transformer's config or the hub id tells, where it is left to them.

    Raises:
        KeyError: they tell none.
    """
    if model.model_name != AUTO:
        return model
    place = model.transformer_id or model.pretrained_model_name_or_path
    kind = None
    with contextlib.suppress(ValueError):  # a damaged file tells nothing, and is reported for any family
        kind = (_component_config(model, "transformer") or {}).get("_class_name")
    for name, family in _FAMILIES.items():
        known = _plain(place) in map(_plain, family.published) and is_hub_id(place)
        if kind == family.transformer or (kind is None and known):
            return model.model_copy(update={"model_name": name})
    what = f"{place} holds a {kind}, of no supported family" if kind else f"no config of {place} on this disk tells it"
    raise KeyError(f"is not given, and {what}; supported: {', '.join(sorted(_FAMILIES))}")


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
    transformer="LTXVideoTransformer3DModel", vae="AutoencoderKLLTXVideo",
    pipelines=("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"),
    read_geometry=geometries.ltx_video, is_flow=True, num_text_encoders=1, first_frame="tokens",
    published=("Lightricks/LTX-Video",),
    least_steps=2,  # its schedule is stretched to end at a level of its own, which one step leaves undefined
    tiny="finetrainers.models.tiny:build_ltx_video",
))  # fmt: skip
register_model(Family(
    name="hunyuan_video", spec="finetrainers.models.hunyuan_video:HunyuanVideoSpec",
    geometry=Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=24.0, pixels=16),
    transformer="HunyuanVideoTransformer3DModel", vae="AutoencoderKLHunyuanVideo",
    pipelines=("HunyuanVideoPipeline",),
    read_geometry=geometries.hunyuan_video, is_flow=True, num_text_encoders=2,
    read_takes_guidance=geometries.hunyuan_video_takes_guidance, read_unknown=geometries.hunyuan_video_unknown,
    published=("hunyuanvideo-community/HunyuanVideo", "tencent/HunyuanVideo"),
    tiny="finetrainers.models.tiny:build_hunyuan_video",
))  # fmt: skip
register_model(Family(
    name="cogvideox", spec="finetrainers.models.cogvideox:CogVideoXSpec",
    geometry=Geometry(temporal=4, spatial=8, patch=2, patch_t=1, fps=8.0),
    transformer="CogVideoXTransformer3DModel", vae="AutoencoderKLCogVideoX",
    pipelines=("CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "CogVideoXVideoToVideoPipeline"),
    read_geometry=geometries.cogvideox, is_flow=False, num_text_encoders=1, first_frame="channels",
    read_first_frame=geometries.cogvideox_first_frame, read_unknown=geometries.cogvideox_unknown,
    published=tuple(
        f"{owner}/{name}"
        for owner in ("THUDM", "zai-org")
        for name in ("CogVideoX-2b", "CogVideoX-5b", "CogVideoX-5b-I2V", "CogVideoX1.5-5B", "CogVideoX1.5-5B-I2V")
    ),
    tiny="finetrainers.models.tiny:build_cogvideox",
))  # fmt: skip
