"""A model family as it is known before any of its code is imported: its checkpoints, their configs and files. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Configs, Facts, Read
from finetrainers.config.sections import ModelSection
from finetrainers.utils.addresses import resolve, same_name
from finetrainers.utils.packaged import model_path

from .files.files import (
    MODEL_INDEX,
    file_problems,
    is_hub_id,
    option_of,
    part_config,
    places_of,
    read_configs,
    replacement_of,
    single_file,
    tokenizer_problems,
    trained_part,
    weights_size,
)
from .files.hub import OFFLINE, ask, how_to_download

if TYPE_CHECKING:
    from .spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: the value of `--model_name`.
        spec: `module:Class` of its `ModelSpec`.
        read: what a checkpoint's configs tell about it.
        transformer: name of the class of the network that is trained, as checkpoints' configs state it.
        vae: name of its VAE's class, likewise; None: any.
        pipelines: names of the pipelines that its checkpoints are made for, as `model_index.json` states them; none: any.
        published: hub ids of its checkpoints, whose files need not be on this disk to tell the family.
        tiny: `module:function` that builds a complete tiny random repository, or None.
        tiny_versions: values of that function's `version`, if it has one; the first is its default.
    """

    name: str
    spec: str
    read: Read
    transformer: str
    vae: str | None = None
    pipelines: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    tiny: str | None = None
    tiny_versions: tuple[str, ...] = ()

    def load(self, config: ModelSection) -> ModelSpec:
        """The family's spec for one checkpoint (imports torch)."""
        return resolve(self.spec)(config, name=self.name, read=self.read)

    @cached_property
    def facts(self) -> Facts:
        """What the published checkpoints have in common."""
        return self.read({})

    def facts_of(self, config: ModelSection) -> Facts:
        """What the configured checkpoint's configs tell where they are on this disk, else what all published ones share.

        Raises:
            ValueError: the checkpoint is of a kind that is not trained, or a config cannot be read.
        """
        configs = read_configs(config, self.facts.parts)
        known = {"vae", trained_part(config)} <= configs.keys() and not self._classes_of_others(config, configs)
        facts = self.read(configs) if known else self.facts
        return facts.of_expert(config.expert)

    def trains(self, config: ModelSection) -> bool:
        """Whether the configured checkpoint is of a kind that the family trains; families may share a class of transformer."""
        try:
            self.read(read_configs(config, self.facts.parts))
        except ValueError:
            return len([family for family in _FAMILIES.values() if family.transformer == self.transformer]) == 1
        return True

    def problems(self, config: ModelSection, *, weights: bool = True, device_type: str | None = None) -> list[Problem]:
        """Everything that is wrong with the configured checkpoint, as far as the files on disk tell without being loaded.

        Args:
            config: names it.
            weights: whether weight files are examined too.
            device_type: where the checkpoint will be used, or None for this machine.
        """
        parts = self.facts.parts
        with contextlib.suppress(ValueError):  # which is one of the problems
            parts = self.facts_of(config).parts
        problems = file_problems(config, parts, weights=weights, device_type=device_type)
        # Files that cannot be read say nothing about the family.
        return problems or list(self._mismatches(config))

    def _mismatches(self, config: ModelSection) -> Iterator[Problem]:
        """Why the checkpoint is none that this family trains, each with the way out."""
        configs = read_configs(config, self.facts.parts)
        trained = trained_part(config)
        vae, transformer = (configs.get(part, {}) for part in ("vae", trained))
        foreign = self._classes_of_others(config, configs)
        for part, (found, expected) in foreign.items():
            others = [name for name, family in _FAMILIES.items() if found in (family.transformer, family.vae)]
            way_out = f"use --model_name {others[0]}" if others else "which no model family here has"
            place = replacement_of(config, part) or config.pretrained_model_name_or_path
            message = f"{place} holds a {found}, and {self.name} is a {expected}; {way_out}"
            yield Problem("--model_name" if part == trained else option_of(config, part), message)
        if trained in foreign:
            return
        # A transformer of another repository says nothing of the pipeline that it is made for.
        pipeline = None if config.transformer_id else configs.get(MODEL_INDEX, {}).get("_class_name")
        if self.pipelines and pipeline not in (None, *self.pipelines):
            yield Problem(
                "--pretrained_model_name_or_path",
                f"{config.pretrained_model_name_or_path} is made for {pipeline}, and {self.name} trains checkpoints of "
                f"{' or '.join(self.pipelines)}; if its transformer is such a one, name it with --transformer_id",
            )
        else:
            try:
                self.read(configs)
            except ValueError as error:
                yield Problem(option_of(config, trained), str(error))
        latents, given = transformer.get("out_channels"), vae.get("latent_channels")
        if latents is not None and given is not None and latents != given:
            message = (
                f"the VAE gives {given} channels, and the transformer predicts {latents}; they do not belong together"
            )
            yield Problem(option_of(config, "vae"), message)

    def _classes_of_others(self, config: ModelSection, configs: Configs) -> dict[str, tuple[Any, str | None]]:
        """The classes of the VAE and of the part that is trained that are not the family's, and those that are, by part."""
        expected = {"vae": self.vae, trained_part(config): self.transformer}
        pairs = {part: (configs.get(part, {}).get("_class_name", own), own) for part, own in expected.items()}
        return {part: (found, own) for part, (found, own) in pairs.items() if own is not None and found != own}

    def weights_on_disk(self, config: ModelSection) -> dict[str, int | None]:
        """Bytes of the weight files of each network, in the order in which they are loaded; None: not all on this disk."""
        return {part: weights_size(config, part) for part in self.facts_of(config).networks}

    def single_files(self, config: ModelSection) -> dict[str, Path]:
        """The single weight files that take the place of networks' weights, by part."""
        found = {part: single_file(config, part) for part in self.facts.networks}
        return {part: path for part, path in found.items() if path is not None}

    def fetch_configs(self, config: ModelSection) -> Fetched:
        """Bring the configs of a hub model onto this disk; the hub is first asked whether it answers at all.

        Raises:
            ConfigError: the hub has no such repository or file, or does not give it.
        """
        roots = dict.fromkeys(places_of(config, part)[0][0] for part in self.facts.parts)
        repositories = tuple(root for root in roots if is_hub_id(root))
        away = ask(repositories)
        missing = self.configs_not_here(config)
        if missing and away is None:
            _fetch(config, missing)
        if away and not missing and (problems := tokenizer_problems(config, self.facts_of(config).parts)):
            raise ConfigError(problems)
        lacking = dict.fromkeys(root for _, root in missing) if away else ()
        return Fetched(repositories, new=bool(missing) and away is None, away=away, missing=tuple(lacking))

    def configs_not_here(self, config: ModelSection) -> list[tuple[str, str]]:
        """Part and repository of the configs of a hub model that are not on this disk."""
        found = []
        for part in ("vae", trained_part(config)):
            root = places_of(config, part)[0][0]
            if is_hub_id(root) and part_config(config, part) is None:
                found.append((part, root))
        return found


def _fetch(config: ModelSection, missing: list[tuple[str, str]]) -> None:
    """Download the configs of these parts, and the pipeline's where the repository has one."""
    from .files.hub_help import fetch_config

    problems: dict[str, Problem] = {}  # by message: a repository that is not there lacks all of them
    for part, root in missing:
        replaced = replacement_of(config, part) is not None and single_file(config, part) is None
        names = [f"{part}/config.json", *(["config.json"] if replaced else [])]
        revision = None if replaced else config.revision
        try:
            fetch_config(root, names, revision=revision, cache_dir=config.cache_dir)
        except ValueError as error:
            problems.setdefault(str(error), Problem(option_of(config, part), str(error)))
    if problems:
        raise ConfigError(list(problems.values()))
    if is_hub_id(model_path(config.pretrained_model_name_or_path)):
        with contextlib.suppress(ValueError):  # of a repository that says nothing of its pipeline
            base = model_path(config.pretrained_model_name_or_path)
            fetch_config(base, [f"{MODEL_INDEX}.json"], revision=config.revision, cache_dir=config.cache_dir)


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


_FAMILIES: dict[str, Family] = {}


def register_model(family: Family) -> None:
    """Make a family available to `--model_name`; the same one may be registered again, as notebook cells do.

    Raises:
        ValueError: the name is taken.
    """
    earlier = _FAMILIES.get(family.name)
    if earlier is not None and not (earlier.spec == family.spec and same_name(earlier.read, family.read)):
        raise ValueError(f"model family {family.name!r} is registered already")
    _FAMILIES[family.name] = family


def families() -> dict[str, Family]:
    """All registered families by name."""
    return dict(_FAMILIES)
