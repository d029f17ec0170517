"""Models and batches of a configuration, for your own training loops. Imports no torch at its top."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import Source, as_config, load_config
from finetrainers.config.root import TrainConfig
from finetrainers.data.loading.position import DataPosition
from finetrainers.methods.registry import is_method, method_spec
from finetrainers.plan.preflight import ResolvedRun, attribute_to_option
from finetrainers.plan.ready import check_network, preflight_by_model
from finetrainers.plan.rows import store_data
from finetrainers.plan.sizes_plan import plan_sizes
from finetrainers.utils.device import configure_allocator
from finetrainers.utils.launch import launched_local_rank, launched_processes, launched_rank
from finetrainers.utils.logs import quiet_libraries
from finetrainers.utils.process_state import environment_restored, restored

if TYPE_CHECKING:
    import torch

    from finetrainers.data.loading.loader import RawBatch
    from finetrainers.methods.model import Model
    from finetrainers.models.spec import Batch
    from finetrainers.plan.rows import Rows


def load_model(config: Source, *, device: str | torch.device | None = None) -> Model:
    """Return the model of a configuration as a run would train it, for your own loops.

    It needs no data. The network begins with the weights of `init_from`, if that is set: use the directory of a run,
    or one of its checkpoints, for weights that were trained. Components are loaded when they are first used.

        model = load_model(load_config("run.toml", init_from="runs/mystyle"))
        latents = model.rollout(["a boat on a lake"], n=4).latents

    Args:
        config: from `load_config`, or a source that it takes.
        device: device of the components; default: the GPU of this process if there is one, else the CPU.

    Raises:
        ConfigError: the configuration is not valid, or the model is neither on this disk nor available from the Hub.
    """
    with environment_restored():
        configure_allocator()
        checked = _check_model(as_config(config))
        with restored(), quiet_libraries():
            from finetrainers.memory.quantized_encoders import load_text_encoders
            from finetrainers.methods.model import Model
            from finetrainers.plan.trainable import trainable_dtype
            from finetrainers.training.trained_weights import load_trainable_transformer, store_expert

            spec, place = checked.spec, _find_device(device)
            problems, _ = spec.examine()
            if problems:
                raise ConfigError(attribute_to_option(problems, checked.start.initial))
            check_network(checked, plan_known=False)
            spec.store_expert = partial(store_expert, config=checked.config, spec=spec, device=place)
            load_network = partial(
                load_trainable_transformer, checked, spec, trainable_dtype(checked.config), device=place
            )
            return Model(
                checked.config, spec, device=place, load_network=load_network,
                load_text_encoders=partial(load_text_encoders, spec, place),
            )  # fmt: skip


def _check_model(config: TrainConfig) -> ResolvedRun:
    """Return a run that is checked except for its data, which is not read.

    Raises:
        ConfigError: it cannot be run.
    """
    if config.training.resume_from_checkpoint is not None:
        message = "is not supported by load_model; use init_from=..., which also takes checkpoints"
        raise ConfigError([Problem("--resume_from_checkpoint", message, "unsupported")])
    missing = {part.partition("=")[0] for part in config.run.parts} & {"network", "lora"}
    if missing:
        message = f"is not supported by load_model, which has no {' and no '.join(sorted(missing))} of Python"
        raise ConfigError([Problem("--parts", message, "unsupported")])
    if is_method(config.training.method):
        config = method_spec(config).without_data(config) or config
        if method_spec(config).samples:  # steps and rewards are the caller's
            if config.training.train_steps is None:
                config = load_config(config, train_steps=config.get("updates_per_rollout"), checkpointing_steps=0)
            config = load_config(config, reward=["brightness"], eval_reward=[], eval_prompts=None, eval_steps=None)
    return preflight_by_model(config, preparing=True, planner=plan_sizes, writes=False)


def _find_device(device: str | torch.device | None = None) -> torch.device:
    """Return a device, by default the GPU of this process if torch has one, else the CPU."""
    import torch

    if device is not None:
        return torch.device(device)
    return torch.device("cuda", launched_local_rank()) if torch.cuda.is_available() else torch.device("cpu")


@overload
def batches(
    config: Source, *, data: Rows | None = None, encoded: Literal[True] = True, start: int = 0,
    device: str | torch.device | None = None,
) -> Iterator[Batch]: ...  # fmt: skip


@overload
def batches(
    config: Source, *, data: Rows | None = None, encoded: Literal[False], start: int = 0,
    device: str | torch.device | None = None,
) -> Iterator[RawBatch]: ...  # fmt: skip


def batches(
    config: Source, *, data: Rows | None = None, encoded: bool = True, start: int = 0,
    device: str | torch.device | None = None,
) -> Iterator[Any]:  # fmt: skip
    """Yield the micro-batches of a training run, in its order: `gradient_accumulation_steps` for each optimizer step.

    Each has `weight`, its share of the step. They end after `train_steps` or `train_epochs`. In a program that a
    launcher started with several processes, each gets its own share. Clips are encoded when they are due, or all
    beforehand with `precompute_conditions`, in the cache that the run would use.

        for batch in batches(config):
            print(batch.moments.shape, batch.weight)

    Args:
        config: from `load_config`, or a source that it takes; of a method that trains on clips.
        data: rows instead of files, as `train` takes them.
        encoded: whether to encode by the model's VAE and text encoders; else batches have `clips`, and their `pixels`
            `[3, T, H, W]` uint8, and no weights are loaded. `Model.encode` encodes them in the same way.
        start: first optimizer step, from 0.
        device: device of the encoders and of encoded batches; default: as for `load_model`.

    Raises:
        ConfigError: the configuration or the data are not valid.
    """
    if not isinstance(start, int) or start < 0:
        raise ConfigError([Problem("start", f"must be a whole number from 0, got {start!r}")])
    with environment_restored():
        config = load_config(config, resume_from_checkpoint=None)
        if is_method(config.training.method) and method_spec(config).samples:
            message = f"{config.training.method} samples its clips; use `load_model(config).rollout(...)`"
            raise ConfigError([Problem("--method", message, "unsupported")])
        config, _ = store_data(config, {} if data is None else {"data": data}, makes_run=False)
        checked = preflight_by_model(config, preparing=True, writes=False)  # but the cache, beside what a loop saves
        with restored(), quiet_libraries():
            from finetrainers.parallel.ranks import SingleProcess

            data_size = config.parallel.data_size(launched_processes())
            data_rank = launched_rank() * data_size // launched_processes()
            parallel = SingleProcess(_find_device(device), data_rank=data_rank, data_size=data_size)
            steps, total = (_encoded_steps if encoded else _decoded_steps)(checked, parallel, start)
    return _yield_batches(steps, total - start)


def _yield_batches(steps: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield the batches of each step, loaded under the state that a run has."""
    with contextlib.closing(steps):  # type: ignore[type-var]
        for _ in range(count):
            with restored(waits=True):
                step = next(steps)
            yield from step


def _encoded_steps(checked: ResolvedRun, parallel: Any, start: int) -> tuple[Iterator[Any], int]:
    """Return encoded micro-batches by optimizer step, and the number of steps of the run."""
    from finetrainers.data.loading.text_conditioning import cache_directory
    from finetrainers.training.load_inputs import load_batch_source, load_text_conditioning
    from finetrainers.training.watchdog import Watchdog

    spec, config = checked.spec, checked.config
    problems, _ = spec.examine()
    if problems:
        raise ConfigError(problems)
    watchdog = Watchdog.of_run(config.run, rank=0, directory=cache_directory(config))
    texts, _ = load_text_conditioning(checked, spec, parallel, watchdog)
    source: Any = load_batch_source(checked, spec, parallel, watchdog, texts)[0]
    return source.steps(start), config.training.train_steps or source.steps_for_epochs(config.training.train_epochs)


def _decoded_steps(checked: ResolvedRun, parallel: Any, start: int) -> tuple[Iterator[Any], int]:
    """Return decoded micro-batches by optimizer step, and the number of steps of the run."""
    from finetrainers.data.loading.training_data import decoded_steps

    config, plan = checked.config, cast(Any, checked.plan)
    position = DataPosition.begin(config, data_size=parallel.data_size)
    steps, sampler = decoded_steps(plan, config, position, parallel, start)
    return steps, config.training.train_steps or sampler.steps_for_epochs(config.training.train_epochs)
