"""Model families before their code is imported: their checkpoints, configs and files. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.facts import Configs, Facts, Read
from finetrainers.config.sections import ModelSection
from finetrainers.utils.addresses import resolve
from finetrainers.utils.failures import InputError
from finetrainers.utils.headers import read_header
from finetrainers.utils.packaged import model_path
from finetrainers.utils.registry import Registry

from .files.files import (
    MODEL_INDEX,
    file_problems,
    is_hub_id,
    part_config,
    part_sources,
    read_configs,
    replacement_source,
    single_file,
    source_option,
    tokenizer_problems,
    trained_part,
    weights_size,
)
from .files.hub import OFFLINE, ask, download_advice
from .lookalikes import Lookalike, class_lookalike, file_lookalike, id_lookalike, named_expert

if TYPE_CHECKING:
    from torch import nn

    from .spec import ModelSpec

#: Learning rate of recipes that do not lower it: options of `LoRASettings`.
CONSTANT_LR = {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 100}


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: the value of `--model_name`.
        spec: `module:Class` of its `ModelSpec`.
        read: returns the facts about a checkpoint from its configs.
        transformer: name of the class of the network that is trained, as checkpoints' configs state it.
        vae: name of its VAE's class, as configs state it, or None for any.
        pipelines: names of the pipelines that its checkpoints are made for, as `model_index.json` states them, or empty
            for any.
        published: Hub ids of its checkpoints, whose family is known without their files.
        starters: those that train on clips and captions alone, with billions of parameters; `finetrainers init` offers
            them.
        tiny: `module:function` that builds a complete tiny random repository, or None.
        dtypes: dtypes of frozen components by option, which apply unless the user sets them.
        has_experts: whether some of its checkpoints have two experts, whose files are named for high or low noise.
        tiny_versions: values of that function's `version`, if it has one; the first is its default.
    """

    name: str
    spec: str
    read: Read
    transformer: str
    vae: str | None = None
    pipelines: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    starters: Mapping[str, float] = field(default_factory=dict, hash=False)
    dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    tiny: str | None = None
    has_experts: bool = False
    tiny_versions: tuple[str, ...] = ()

    def load(self, config: ModelSection, network: nn.Module | None = None) -> ModelSpec:
        """Return the family's spec for one checkpoint, or for a given network (imports torch)."""
        spec: ModelSpec = resolve(self.spec)(config, name=self.name, read=self.read)
        spec.network = network
        return spec

    @cached_property
    def facts(self) -> Facts:
        """Facts that the published checkpoints have in common."""
        return self.read({})

    def with_dtypes(self, config: ModelSection) -> ModelSection:
        """Return a section with the family's `dtypes` where the user has set none."""
        return config.model_copy(update={n: d for n, d in self.dtypes.items() if n not in config.model_fields_set})

    def facts_of(self, config: ModelSection) -> Facts:
        """Return the facts about the configured checkpoint from its configs, else those of all published checkpoints.

        Without its configs on this disk, those of a published checkpoint are the packaged ones.

        Raises:
            ValueError: the checkpoint is of a kind that is not trained, or a config cannot be read.
        """
        for section in (config, config.for_estimate()):
            configs = read_configs(section, self.facts.parts)
            if {"vae", trained_part(config)} <= configs.keys() and not self._foreign_classes(config, configs):
                return self._read_facts(configs).of_expert(config.expert)
        return self.facts

    def _read_facts(self, configs: Configs) -> Facts:
        try:
            return self.read(configs)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # values of other types
            raise InputError(f"the configs of the checkpoint are not those of a {self.name}: {error!r}") from error

    def trains(self, config: ModelSection) -> bool:
        """Return whether the family trains the configured checkpoint; families may share a class of transformer."""
        try:
            self._read_facts(read_configs(config, self.facts.parts))
        except ValueError:
            return len([family for family in families().values() if family.transformer == self.transformer]) == 1
        return True

    def problems(
        self, config: ModelSection, *, weights: bool = True, device_type: str | None = None, rewarded: bool = False
    ) -> list[Problem]:
        """Return all problems of the configured checkpoint that files on disk show without being loaded.

        Args:
            config: names the checkpoint.
            weights: whether weight files are examined too.
            device_type: where the checkpoint will be used, or None for this machine.
            rewarded: whether it is trained on clips that it samples itself, so that it may be distilled to few steps.
        """
        parts = self.facts.parts
        with contextlib.suppress(ValueError):  # which is one of the problems
            parts = self.facts_of(config).parts
        problems = file_problems(config, parts, weights=weights, device_type=device_type)
        # Files that cannot be read do not show the family.
        return problems or [*self._mismatches(config, rewarded=rewarded), *self._misplaced_experts(config)]

    def _mismatches(self, config: ModelSection, *, rewarded: bool = False) -> Iterator[Problem]:
        """Yield the reasons why this family cannot train the checkpoint, each with the remedy."""
        configs = read_configs(config, self.facts.parts)
        trained = trained_part(config)
        source = config.transformer_id or config.pretrained_model_name_or_path
        vae, transformer = (configs.get(part, {}) for part in ("vae", trained))
        similar_model = _named_lookalike(config, configs, source)
        is_distilled = similar_model is not None
        if similar_model is not None and not (rewarded and similar_model.can_be_rewarded):
            message = f"{source} is {similar_model.description}"
            yield Problem(source_option(config, trained), message, "unsupported")
            return
        foreign = self._foreign_classes(config, configs)
        for part, (actual, expected) in foreign.items():
            others = [name for name, family in families().items() if actual in (family.transformer, family.vae)]
            similar_model = None if others else class_lookalike(actual)
            remedy = f"use --model_name {others[0]}" if others else "no model family here supports it"
            if similar_model is not None:
                remedy = f"that is {similar_model.description}"
            if part != trained and trained not in foreign:
                remedy = f"use the VAE of a {self.name} checkpoint"
            source = replacement_source(config, part) or config.pretrained_model_name_or_path
            message = f"expected {expected} for {self.name}, and {source} holds {actual}; {remedy}"
            yield Problem("--model_name" if part == trained else source_option(config, part), message, "mismatch")
        if trained in foreign:
            return
        predicted = transformer.get("out_channels") or transformer.get("in_channels")
        # A transformer of another repository does not show the pipeline that it is made for.
        pipeline = None if config.transformer_id else configs.get(MODEL_INDEX, {}).get("_class_name")
        if self.pipelines and pipeline not in (None, *self.pipelines) and not is_distilled:
            similar_model = class_lookalike(pipeline)
            remedy = "if its transformer is compatible, set it as --transformer_id"
            if similar_model is not None:
                remedy = f"that is {similar_model.description}"
            yield Problem(
                "--pretrained_model_name_or_path",
                f"{config.pretrained_model_name_or_path} is made for {pipeline}, and {self.name} trains checkpoints "
                f"of {' or '.join(self.pipelines)}; {remedy}",
                "unsupported",
            )
        else:
            try:
                predicted = self._read_facts(configs).channels or predicted
            except ValueError as error:
                yield Problem.from_error(source_option(config, trained), error)
        encoded = vae.get("latent_channels") or vae.get("z_dim")
        if predicted is not None and encoded is not None and predicted != encoded:
            message = (
                f"the VAE has {encoded} channels, and the transformer predicts {predicted}; use a VAE and a "
                "transformer of the same model"
            )
            yield Problem(source_option(config, "vae"), message, "conflict")

    def _misplaced_experts(self, config: ModelSection) -> Iterator[Problem]:
        """Yield a problem for each expert that is replaced by a network with the name of the other."""
        facts = self.facts
        with contextlib.suppress(ValueError):  # which is another problem
            facts = self.facts_of(config)
        for part, own in (("transformer", "high"), ("transformer_2", "low")) if self.has_experts else ():
            source, file = replacement_source(config, part), single_file(config, part)
            metadata = None if file is None else read_header(file).metadata
            named = None if source is None else named_expert(source, metadata)
            if named is None or (named == own and not facts.has_one_network):
                continue
            remedy = f"not for `{own}`; use the other file, or train the other expert (--expert)"
            if facts.has_one_network:
                base = config.pretrained_model_name_or_path
                remedy = f"and {base} has one network for all noise levels; use a base with both experts"
            yield Problem(
                source_option(config, part), f"{source} is named for the expert `{named}`, {remedy}", "mismatch"
            )

    def _foreign_classes(self, config: ModelSection, configs: Configs) -> dict[str, tuple[Any, str | None]]:
        """Return the other families' classes among VAE and trained part, each with the family's own, by part."""
        expected = {"vae": self.vae, trained_part(config): self.transformer}
        pairs = {part: (configs.get(part, {}).get("_class_name", own), own) for part, own in expected.items()}
        return {part: (actual, own) for part, (actual, own) in pairs.items() if own is not None and actual != own}

    def weights_on_disk(self, config: ModelSection) -> dict[str, int | None]:
        """Return the bytes of each network's weight files, in loading order, or None where files are missing."""
        return {part: weights_size(config, part) for part in self.facts_of(config).networks}

    def single_files(self, config: ModelSection) -> dict[str, Path]:
        """Return the single weight files that take the place of networks' weights, by part."""
        paths = {part: single_file(config, part) for part in self.facts.networks}
        return {part: path for part, path in paths.items() if path is not None}

    def fetch_configs(self, config: ModelSection) -> Fetched:
        """Download the configs of a Hub model, after checking that the Hub answers at all.

        Raises:
            ConfigError: the Hub has no such repository or file, or refuses it.
        """
        roots = dict.fromkeys(part_sources(config, part)[0][0] for part in self.facts.parts)
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
        """Return part and repository of the configs of a Hub model that are not on this disk."""
        missing = []
        for part in ("vae", trained_part(config)):
            root = part_sources(config, part)[0][0]
            if is_hub_id(root) and part_config(config, part) is None:
                missing.append((part, root))
        return missing


def _named_lookalike(config: ModelSection, configs: Configs, source: str) -> Lookalike | None:
    """Return the kind that names of the trained network show, its pipeline and scheduler, or its file, or None."""
    part = trained_part(config)
    owners = () if config.transformer_id else (MODEL_INDEX, "scheduler")  # not those of another repository
    others = [configs.get(owner, {}).get(key) for owner in owners for key in ("_name_or_path", "_class_name")]
    origins = [configs.get(part, {}).get("_name_or_path"), *others]
    similar_model, file = id_lookalike(source, *origins), single_file(config, part)
    if similar_model is None and file is not None:
        with contextlib.suppress(OSError, ValueError):  # a damaged file is another problem
            similar_model = file_lookalike(read_header(file).metadata)
    return similar_model


def _fetch(config: ModelSection, missing: list[tuple[str, str]]) -> None:
    """Download the configs of these parts, and the pipeline's where the repository has one."""
    from .files.hub_help import fetch_config

    problems: dict[str, Problem] = {}  # by message: a missing repository lacks all of them
    for part, root in missing:
        replaced = replacement_source(config, part) is not None and single_file(config, part) is None
        names = [f"{part}/config.json", *(["config.json"] if replaced else [])]
        revision = None if replaced else config.revision
        try:
            fetch_config(root, names, revision=revision, cache_dir=config.cache_dir)
        except ValueError as error:
            problems.setdefault(str(error), Problem.from_error(source_option(config, part), error))
    if problems:
        raise ConfigError(list(problems.values()))
    if is_hub_id(model_path(config.pretrained_model_name_or_path)):
        with contextlib.suppress(ValueError):  # a repository may have no pipeline's config
            base = model_path(config.pretrained_model_name_or_path)
            fetch_config(base, [f"{MODEL_INDEX}.json"], revision=config.revision, cache_dir=config.cache_dir)


@dataclass(frozen=True)
class Fetched:
    """Result of fetching the configs of a model.

    Attributes:
        repositories: Hub repositories that the model's parts come from.
        new: whether any config is new on this disk.
        away: why the Hub does not answer, or None if it does or need not.
        missing: repositories whose configs are therefore not on this disk.
    """

    repositories: tuple[str, ...]
    new: bool
    away: str | None
    missing: tuple[str, ...]

    @property
    def way_out(self) -> str:
        """Advice on how to download the missing configs."""
        return download_advice(self.missing[0])

    @property
    def is_offline_by_choice(self) -> bool:
        """True if the user wants the Hub not to be asked."""
        return self.away == OFFLINE


def _problem(name: str, value: Any) -> str | None:
    """Return why an object cannot be the family of a name, or None if it can."""
    if not isinstance(value, Family):
        return f"must be a Family, got {type(value).__name__}"
    return None if value.name == name else f"must have the name of its family, {value.name!r}"


FAMILIES: Registry[Family] = Registry(
    "model family",
    "families",
    problem=_problem,
    origins=lambda family: (family.spec, family.read),
)


def register_model(family: Family) -> None:
    """Make a family available to `--model_name`; one with the same spec, read by the same module,
    replaces that of its name, as notebook cells are edited and run again.

    Raises:
        ValueError: the name is taken.
    """
    FAMILIES.add(family.name, family)


def families() -> dict[str, Family]:
    """Return all families by name, including those of installed packages."""
    return FAMILIES.all()
