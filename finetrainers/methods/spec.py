"""Requirements of a method, known before it is loaded, and the seam to its data. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from finetrainers.config.checks.findings import Finding
from finetrainers.config.checks.frames import length_problems
from finetrainers.config.errors import Problem
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.hacking import HackingRule
from finetrainers.config.rewards import RewardEntry
from finetrainers.config.root import TrainConfig, fields
from finetrainers.utils.text import plural

if TYPE_CHECKING:
    from torch import nn

    from finetrainers.data.inspect.plan import DatasetPlan
    from finetrainers.data.inspect.probe_all import ProbeOptions
    from finetrainers.data.loading.precompute import Encoded
    from finetrainers.models.spec import ModelSpec


class TrainingSet(Protocol):
    """The data of a run, planned before any weights are loaded: clips, or prompts."""

    @property
    def fingerprint(self) -> str:
        """Digest that changes with any data that a checkpoint must not be continued without."""
        ...

    @property
    def fingerprint_of(self) -> str:
        """Description of the data in the fingerprint."""
        ...

    @property
    def critical_options(self) -> Mapping[str, str | None]:
        """Options that must also be as in the checkpoint, and the `--reset` that allows others, if any."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on choices made for the user."""
        ...

    @property
    def title(self) -> str:
        """Title of the table."""
        ...

    @property
    def texts(self) -> str:
        """Name of the prompts of the text encoders: `captions`, say."""
        ...

    @property
    def encodes_clips(self) -> bool:
        """Whether the VAE encodes clips; a method that samples its own only decodes them."""
        ...

    @property
    def images(self) -> Sequence[Path]:
        """Images that clips are sampled from, which the VAE encodes."""
        ...

    @property
    def cut_in_batches(self) -> bool:
        """Whether the items of a step depend on batch size, accumulation and number of processes."""
        ...

    @property
    def count(self) -> int:
        """Number of items that are trained on."""
        ...

    @property
    def noun(self) -> str:
        """Noun for an item."""
        ...

    @property
    def size(self) -> tuple[int, int, int]:
        """Largest size, frames x height x width."""
        ...

    @property
    def buckets(self) -> tuple[tuple[int, int, int], ...]:
        """All sizes, frames x height x width."""
        ...

    def heaviest(self, config: TrainConfig) -> tuple[tuple[int, int, int], int]:
        """Return the size and the number of clips of the largest micro-batch."""
        ...

    def all_captions(self) -> Sequence[str]:
        """Return all prompts that the text encoders may get."""
        ...

    @property
    def needs_empty_text(self) -> bool:
        """Whether the text encoders must have encoded the empty prompt."""
        ...

    def shown_texts(self) -> Sequence[tuple[str, Any]]:
        """Return the prompts, each with the clip or the image that it is encoded with; see `Facts.text_sees_image`."""
        ...

    def encoded_clips(self) -> Sequence[Any]:
        """Return all clips that the VAE may encode."""
        ...

    @property
    def example(self) -> str:
        """Prompt that the result can be sampled with."""
        ...

    @property
    def rates(self) -> Sequence[float]:
        """Frame rates of the clips that are trained on; empty if they have the model's own."""
        ...

    def step_of(self, config: TrainConfig) -> str:
        """Return a description of the items of an optimizer step."""
        ...

    def table(self) -> list[tuple[str, ...]]:
        """Return rows for printing: the headings, then the others."""
        ...

    def write(self, path: Path) -> None:
        """Write the facts of every item, one JSON object a line."""
        ...


class BatchSource(Protocol):
    """The data source of a method, ready to use: training needs no more of it than this."""

    @property
    def vae(self) -> nn.Module | None:
        """The VAE if it stays loaded, else None."""
        ...

    @property
    def precomputed(self) -> Mapping[str, Encoded]:
        """Results of encoding clips beforehand, on all ranks together."""
        ...

    def steps_for_epochs(self, epochs: int) -> int:
        """Return the number of optimizer steps that see every item at least `epochs` times."""
        ...


@dataclass(frozen=True)
class MethodMemory:
    """Memory that a method takes on the device of one process beyond that of every training.

    Attributes:
        copies: bytes of further copies of the network's weights.
        trajectories: bytes of sampled latents.
        batch_size: clips that the network sees in one call.
    """

    copies: float
    trajectories: float
    batch_size: int


class MethodSpec:
    """A method before torch is imported. The defaults are those of training on clips.

    Attributes:
        size_options: options that set the sizes of clips; data are not planned while sizes are wrong.
        state_name: description of the state that `Method.state_dict` returns.
        unread: options that every method accepts and this one does not read, such as those of noise levels or of
            conditioning frames, each with what to use instead, or ''. A run warns of them where they are set, and
            announces none.
        learns_clips: whether it imitates clips, so that recommended settings of a LoRA apply where steps are open.
        media_columns: columns of clips that it reads instead of `video_column`.
        takes_media: whether it trains checkpoints that take further media with each clip.
        samples: whether it samples the clips that it trains on, so that a run has rollouts and rewards. Options name
            this trait and those below as their readers; see `Option.readers`.
        compares: whether it compares the clips of a prompt, so that scores become advantages.
        trains_steps: whether it trains denoising steps of rollouts, which must be stochastic.
        trains_noised: whether it adds new noise to sampled clips, and compares predictions with an older policy's.
        contrasts: whether it contrasts policies that are implied by its prediction and the older one.
        matches: whether the loss of pretraining is its log-likelihood of a clip.
        clips_ratio: whether its loss clips the ratio of policies.
        differentiates: whether it backpropagates rewards through the VAE and the last denoising steps.
        kl_option: option that weighs the distance to the reference model, or None if the loss has none.
        reference: the reference model of a run that begins with a LoRA: the network with it (`start`), or without it
            (`base`).
        source: address of the class of the `BatchSource`, which is made when clips can be encoded; all take the
            arguments of `TrainingData`.
    """

    size_options: tuple[str, ...] = ("video_resolution_buckets", "image_resolution_buckets", "sliding_window_size")
    state_name = "state of the method"
    unread: Mapping[str, str] = {}
    learns_clips = False
    media_columns: tuple[str, ...] = ()
    takes_media = False
    samples = False
    compares = False
    trains_steps = False
    trains_noised = False
    contrasts = False
    matches = False
    clips_ratio = False
    differentiates = False
    kl_option: str | None = None
    reference: Literal["start", "base"] = "start"
    source = "finetrainers.data.loading.training_data:TrainingData"

    def plan(self, config: TrainConfig, geometry: Geometry, *, sizes_are_wrong: bool) -> TrainingSet | None:
        """Return the plan of a run's data, or None if the configuration names no data, or sizes are wrong.

        Raises:
            DataError: the named data cannot be read or used.
        """
        if not config.data.is_named:
            return None
        if sizes_are_wrong:
            self.read(config)  # missing data can still be reported
            return None
        return self.survey(config, geometry).checked()

    def read(self, config: TrainConfig) -> None:
        """Read the configured data as far as that needs no sizes.

        Raises:
            DataError: it cannot be read.
        """
        from finetrainers.data.reading.datasets import media_dir, read_all, read_datasets

        config = self.as_read(config)
        read_all(read_datasets(config.data), media_dir(config))

    def survey(self, config: TrainConfig, geometry: Geometry, options: ProbeOptions | None = None) -> DatasetPlan:
        """Return a plan with every file of the configured data, usable or not; see `survey_dataset`."""
        from finetrainers.data.inspect.survey import survey_dataset

        return survey_dataset(self.as_read(config), geometry, options=options)

    def as_read(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration without options of data that are not read; without `mask_column`, no masks are.

        Raises:
            DataError: a table of `dataset` sets such an option.
        """
        from finetrainers.data.reading.datasets import read_datasets
        from finetrainers.data.reading.items import DataError

        options = [option for name, option in fields().items() if name in self.unread and option.section == "data"]
        changes = {option.key: "" if option.key == "mask_column" else option.default for option in options}
        data = config.data.model_copy(update=changes)
        problems = [
            f"{dataset.prefix}{key}: is not supported with --method {config.training.method}; remove it"
            for dataset in (read_datasets(data) if changes and data.dataset else ())
            for key in changes
            if getattr(dataset.data, key) != getattr(data, key)
        ]
        if problems:
            raise DataError(f"{data.dataset}: {plural(len(problems), 'problem')}", problems, "unsupported")
        return config.model_copy(update={"data": data}) if changes else config

    def problems(self, config: TrainConfig) -> list[Problem]:
        """Return problems with options that a registry has to check: by default, with rewards."""
        # Prompts of methods that sample clips have the columns that rewards require; see `column_problems`.
        return [
            Problem("--eval_reward", f"{registry().single_clip_problem(entry)}", "unsupported")
            for entry in config.validation.eval_reward
            if (registry().compares_clips if self.samples else registry().single_clip_problem)(entry)
        ] + [
            Problem.from_error(f"--{option}", error)
            for option in ("reward", "eval_reward")
            for entry in config.get(option)
            for error in registry().reward_problems(entry, config.run.parts)
        ]

    def option_rules(self, config: TrainConfig, facts: Facts, *, world_size: int) -> Iterator[Finding]:
        """Yield errors and warnings about the options of this method, on processes that train on separate clips."""
        yield from ()

    def plan_problems(self, plan: Any, config: TrainConfig, facts: Facts) -> Iterator[Problem]:
        """Yield requirements of the plan that a checkpoint cannot meet; the configs of the checkpoint must be known."""
        yield from rewards_without_images(self.rewards(config))
        if plan.encodes_clips:
            from finetrainers.data.buckets.windows import is_window  # imports PyAV, which help does without

            windows = {clip.bucket for clip in getattr(plan, "clips", ()) if is_window(clip)}
            yield from length_problems(config.data, facts, plan.buckets, windows)

    def rewards(self, config: TrainConfig) -> list[RewardEntry]:
        """Return all rewards that a run loads."""
        return list(config.validation.eval_reward)

    def check(self, plan: Any, config: TrainConfig, *, spec: ModelSpec) -> None:
        """Compare the options with the checkpoint's small files, before any weights are loaded (imports torch).

        Raises:
            ConfigError: the options do not fit the checkpoint.
        """

    def strategy_problems(self, config: TrainConfig, parallel: Any) -> Iterator[Problem]:
        """Yield requirements of this method that the strategy of the processes cannot meet."""
        yield from ()

    def text_writer(
        self, plan: Any, config: TrainConfig, *, spec: ModelSpec, parallel: Any
    ) -> Callable[[Any], None] | None:
        """Return a function that writes prompt embeddings to files outside the cache, or None if none are requested.

        It takes a `TextConditioning`, and imports torch.

        Raises:
            ConfigError: they cannot be written.
        """
        return None

    def needs_text(self, config: TrainConfig) -> bool:
        """Return whether training needs text encoders, as far as options show; validation samples also need them."""
        return True

    def scratch_cache(self, config: TrainConfig) -> Path | None:
        """Return a cache used only while preparing and removed afterwards, or None if the cache is the result."""
        return None

    def for_preparing(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration for preparing a run, with placeholders for options that only training needs."""
        return config

    def caches_texts(self, config: TrainConfig) -> bool:
        """Return whether prompts are encoded once and cached; else the text encoders stay loaded."""
        return config.data.precompute_conditions

    def accumulates(self, config: TrainConfig) -> bool:
        """Return whether an optimizer step has several micro-batches."""
        return config.training.gradient_accumulation_steps > 1

    def scores_while_sampling(self, config: TrainConfig) -> bool:
        """Return whether rewards score clips while further clips are sampled and decoded."""
        return False

    def weight_links(self, config: TrainConfig, step: int) -> list[str]:
        """Return names in the run directory that lead to the weights of a step's checkpoint, for other programs."""
        return []

    def uses_reference(self, config: TrainConfig) -> bool:
        """Return whether the loss compares the network with the one before training, the reference model."""
        return False

    def hacking_rule(self, config: TrainConfig) -> HackingRule | None:
        """Return the rule that the run detects reward hacking by, or None if it does not."""
        return None

    def sizes(self, config: TrainConfig) -> list[tuple[int, int, int]]:
        """Return the sizes of clips that the configuration names, frames x height x width."""
        return [*config.data.video_resolution_buckets, *((1, *size) for size in config.data.image_resolution_buckets)]

    def without_data(self, config: TrainConfig) -> TrainConfig | None:
        """Return a configuration that passes checks without its data, or None if the data is on this machine."""
        data = config.data
        places = [place for place in (data.data_root, data.dataset_file, data.dataset) if place is not None]
        if data.hf_dataset is not None or (places and all(place.exists() for place in places)):
            return None
        current = Path()
        file = None if data.dataset_file is None else current
        data = data.model_copy(update={"data_root": current, "dataset_file": file, "dataset": None})
        return config.model_copy(update={"data": data})

    def resume_warnings(self, config: TrainConfig, saved: Mapping[str, Any]) -> Iterator[str]:
        """Yield warnings about continuing a run; `saved` are the values of the method's state in the checkpoint."""
        yield from ()

    def branches(self, config: TrainConfig) -> int:
        """Return the clips of a forward pass for each clip that is sampled: 2 with classifier-free guidance."""
        return 1

    def reward_bytes(self, config: TrainConfig) -> float | None:
        """Return the bytes of reward networks on a process's device, each once, as published, or None if not known."""
        entries = {(entry.reward, *sorted(entry.options.items())): entry for entry in self.rewards(config)}
        sizes = [registry().reward_bytes(entry) for entry in entries.values()]
        return None if None in sizes else sum((size for size in sizes if size is not None), 0.0)

    def scoring_bytes(self, config: TrainConfig, size: tuple[int, int, int], *, fps: float) -> float | None:
        """Return the bytes that rewards take to score clips of a size, without their networks, or None if not known.

        They are bytes on a process's device, of the reward that takes most, since rewards score one after another.
        """
        sizes = [registry().working_bytes(entry, size, fps=fps) for entry in self.rewards(config)]
        return None if None in sizes else max((size for size in sizes if size is not None), default=0.0)

    def decode_gradient(
        self, config: TrainConfig, size: tuple[int, int, int], geometry: Geometry
    ) -> tuple[tuple[int, int, int], bool] | None:
        """Return the size of clips whose decoding has a backward pass, and whether all activations are stored.

        The result is None if there are no such clips.

        Args:
            config: the run.
            size: frames, height and width of sampled clips.
            geometry: size rules of the checkpoint.
        """
        return None

    def memory(
        self, config: TrainConfig, latent: Sequence[int], *, batch_size: int, trained: float, reference: float
    ) -> MethodMemory:
        """Return the memory of the method.

        Args:
            config: the run.
            latent: shape of the largest clip's latent, `C T H W`.
            batch_size: clips of a micro-batch.
            trained: bytes of the trained weights.
            reference: bytes that a process keeps of a frozen copy of the network, where full finetuning needs one.
        """
        return MethodMemory(copies=0.0, trajectories=0.0, batch_size=batch_size)


def rewards_without_images(entries: Sequence[RewardEntry]) -> Iterator[Problem]:
    """Yield a problem for each reward that needs the image that a clip starts from, where clips start from text."""
    for entry in entries:
        if registry().image_use(entry) == "required":
            message = (
                f"{entry.name} requires the image that clips start from, and these start from text; add an image to "
                "each prompt of reward finetuning"
            )
            yield Problem("--reward", message, "required")


def registry() -> Any:
    """Return the registry of rewards, which a run without them does not import."""
    from finetrainers.rewards import registry

    return registry
