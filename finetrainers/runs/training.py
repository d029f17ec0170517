"""Training from Python: `train`, and the results of a run. Imports no torch before there is something to load."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import Source, as_config, load_config
from finetrainers.config.root import TrainConfig
from finetrainers.data.reading.sources.python_rows import StoredRows
from finetrainers.draw.notebook import in_notebook
from finetrainers.models.registry import get_family
from finetrainers.plan.initial_weights import LORA_FILE
from finetrainers.plan.parts import CustomParts
from finetrainers.plan.ready import get_ready
from finetrainers.plan.rows import store_data
from finetrainers.plan.start_report import print_line
from finetrainers.rundir.run_records import run_problem
from finetrainers.training.callbacks.base import Callback
from finetrainers.utils.device import configure_allocator
from finetrainers.utils.failures import InputError
from finetrainers.utils.logs import quiet_libraries
from finetrainers.utils.process_state import environment_restored, host_group_problem, restored
from finetrainers.utils.reading import read_jsonl

from .callbacks import check_callbacks

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from finetrainers.methods.base import Method
    from finetrainers.plan.rows import Rows
    from finetrainers.rewards.base import Reward


@dataclass(frozen=True)
class TrainResult:
    """Results of a training run, read from its directory when they are requested.

        result = TrainResult.load("runs/mystyle")
        pipe = result.pipeline()

    Attributes:
        config: the configuration of the training, with `init_from` resolved.
        step: the last optimizer step; 0 after a dry run.
        stopped_by: the cause of a stop before the last step, with a checkpoint, or None if the run is finished.
        finished_by: the reason that a callback gave for finishing before the last step, with results, or None.
    """

    config: TrainConfig
    step: int
    stopped_by: str | None = None
    finished_by: str | None = None

    @classmethod
    def load(cls, run_dir: str | Path) -> TrainResult:
        """Return the result of a run directory whose last training is finished or was stopped.

        Raises:
            ConfigError: it is not a run directory, or its config.toml cannot be read.
            ValueError: its last training is not finished, and was not stopped with a checkpoint.
        """
        root = Path(run_dir)
        if (problem := run_problem(root)) is not None:
            raise ConfigError([Problem("run_dir", f"{root} {problem}", "invalid" if root.exists() else "not_found")])
        events = read_jsonl(root / "events.jsonl")[0]
        last = max((index for index, event in enumerate(events) if event.get("event") == "start"), default=0)
        ends = [event for event in events[last:] if event.get("event") in ("finished", "stopped", "stopped_by_guard")]
        if not ends:
            raise InputError(f"the last training of {root} is neither finished nor stopped; resume it", "not_found")
        config = load_config(root / "config.toml", output_dir=root)
        finishes = [event.get("by") for event in events[last:] if event.get("event") == "finish_requested"]
        finished_by = finishes[-1] if finishes and ends[-1]["event"] == "finished" else None
        return cls(config, step=ends[-1]["step"], stopped_by=ends[-1].get("by"), finished_by=finished_by)

    def __fspath__(self) -> str:
        """Return the run directory, so that `sample`, `export` and `report` take results."""
        return str(self.run_dir)

    def push(self, repo_id: str | None = None) -> str:
        """Upload weights, model card, configuration and samples to the Hub; return the id of the repository.

        Args:
            repo_id: repository, created if it does not exist; default: `hub_model_id`, or the name of `run_dir`.

        Raises:
            ValueError: there are no trained weights.
        """
        self._require_weights()
        from finetrainers.results.export import push

        return push(self.config, repo_id)

    @property
    def run_dir(self) -> Path:
        """The run directory, `output_dir`."""
        return self.config.run.output_dir

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Records of `metrics.jsonl`, including those of steps before a resume; none after a dry run."""
        if self.config.run.dry_run:
            return []
        return read_jsonl(self.run_dir / "metrics.jsonl")[0]

    @property
    def samples(self) -> list[Path]:
        """Sampled videos, by step and prompt; none after a dry run."""
        return [] if self.config.run.dry_run else sorted((self.run_dir / "samples").glob("step-*/*.mp4"))

    @property
    def weights(self) -> Path | None:
        """LoRA file, or folder of the transformer, or None if the run was stopped, or after a dry run."""
        if self.config.run.dry_run or self.stopped_by is not None:
            return None
        model, is_lora = self.config.model, self.config.training.training_type == "lora"
        return self.run_dir / (LORA_FILE if is_lora else get_family(model.model_name).facts_of(model).trained)

    def _require_weights(self) -> Path:
        """Return the trained weights.

        Raises:
            ValueError: there are none.
        """
        if self.weights is None:
            reason = (
                "a dry run does not train" if self.config.run.dry_run else f"stopped by {self.stopped_by}; resume it"
            )
            raise InputError(f"there are no trained weights in {self.run_dir}: {reason}", "not_found")
        return self.weights

    def pipeline(self, device: str | None = None, *, image_to_video: bool = False) -> Any:
        """Return diffusers' pipeline of the model with the trained weights, in the dtypes of the configuration.

        Args:
            device: where to put it; default: on the GPU if there is one, else on the CPU.
            image_to_video: whether it takes a first frame, for models that support both.

        Raises:
            ValueError: there are no trained weights: a dry run, or a run that was stopped.
        """
        weights = self._require_weights()
        if any(part.startswith("network=") for part in self.config.run.parts):
            message = f"trained on a network that `train` was given; load {weights} into that network"
            raise InputError(message, "unsupported")
        with restored(), quiet_libraries():
            import torch

            from finetrainers.models.spec import DTYPES

            model = self.config.model
            spec = get_family(model.model_name).load(model)
            folder = None if weights.is_file() else weights
            pipeline = spec.pipeline(
                spec.load_transformer(DTYPES[model.transformer_dtype], folder=folder),
                spec.load_vae(),
                spec.load_scheduler(),
                spec.load_text_encoders(),
                image_to_video=image_to_video,
            )
            if folder is None:
                spec.load_into(pipeline, weights)
            return pipeline.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def train(  # noqa: PLR0913, what only Python can give
    config: Source,
    *,
    callbacks: Callback | Sequence[Callback] = (),
    handle_signals: bool | None = None,
    network: nn.Module | None = None,
    lora: LoraConfig | None = None,
    method: type[Method] | None = None,
    optimizer: Callable[[list[Parameter]], Optimizer] | None = None,
    lr_at: Callable[[int], float] | None = None,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    prompts: str | Sequence[str | Mapping[str, Any]] | None = None,
    eval_prompts: str | Sequence[str | Mapping[str, Any]] | None = None,
    rewards: Mapping[str, Callable[..., Any] | Reward | type[Reward] | nn.Module] | None = None,
) -> TrainResult:
    """Check a configuration and train.

    The state of the host program (see `restored`) does not affect the run, and is restored afterwards. The run's
    config.toml has a digest of each part, from `network` to `rewards`; a resumed run must have equal ones.

    Args:
        config: from `load_config`, or a source that it takes.
        callbacks: a further callback, or several, called after the run's own.
        handle_signals: whether SIGINT (Ctrl-C, a notebook's interrupt), SIGTERM and SIGUSR1 stop the run with a
            checkpoint once it trains; `stopped_by` names the signal then, and a second one goes to the host program's
            handler. None means True in the main thread, the only one where Python allows it. With False, the host's
            handlers stay; a KeyboardInterrupt or SystemExit that they raise is raised again after a checkpoint of the
            last step.
        network: transformer of the model's class or of a subclass, instead of the one of the checkpoint. The run trains
            a copy; the network stays as it is.
        lora: settings of the LoRA, such as `rank_pattern`, instead of `rank` and its other options.
        method: class that computes the loss, such as a subclass of the configured method's, whose options and data it
            has.
        optimizer: returns the optimizer over the trainable parameters that it is given.
        lr_at: learning rate of optimizer step n, from 0, for all parameter groups.
        data: rows to train on, instead of `data_root` and other sources: `{"video": ..., "caption": ...}`, or `image`,
            with a path, a `[T, H, W, 3]` uint8 array or tensor, or a `[T, 3, H, W]` float tensor from 0 to 1. Arrays
            may have `fps`, by default the training frame rate. A sequence, a dataset of `datasets` or torch, or an
            iterable, which is read once.
        eval_data: rows for the evaluation loss, instead of `eval_num_items`.
        prompts: training prompts of reward finetuning: a string, or a list of strings or mappings with the keys of a
            `.jsonl` file of prompts (`prompt`, `image`, `last_image`, and columns for rewards).
        eval_prompts: held-out prompts, likewise.
        rewards: rewards by name: functions `(videos, prompts) -> scores` as in `register_reward`, modules, and
            instances or classes of `Reward`. Options `reward` and `eval_reward` may have these names; without the
            option `reward`, all of them count equally. They exist during this call only.

    Raises:
        ConfigError: the configuration cannot run; all reasons at once.
        ValueError: `handle_signals` is True outside the main thread.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if handle_signals and not in_main_thread:
        message = "handle_signals=True requires the main thread; use None or False in other threads"
        raise InputError(message, "unsupported")
    config = as_config(config)
    with environment_restored(), ExitStack() as stack:
        configure_allocator()
        callbacks = [callbacks] if isinstance(callbacks, Callback) else callbacks
        check_callbacks(callbacks)
        if (problem := host_group_problem()) is not None:
            raise ConfigError([Problem("process group", problem, "mismatch")])
        rows = {name: value for name, value in (("data", data), ("eval_data", eval_data)) if value is not None}
        parts = CustomParts(
            network=network, lora=lora, method=method, optimizer=optimizer, lr_at=lr_at,
            prompts=prompts, eval_prompts=eval_prompts, rewards=rewards,
            **dict.fromkeys(rows, StoredRows()),
        )  # fmt: skip
        applied = parts.applied_to(config)  # refuses parts before rows are read, which may take long
        if rows:
            config, stored = store_data(config, rows)
            parts = replace(parts, data=stored.get("data"), eval_data=stored.get("eval_data"))
            applied = parts.applied_to(config)
        stack.enter_context(parts.in_use())
        checked = replace(get_ready(applied), parts=parts)
        with restored() as set_aside, quiet_libraries():
            from .run import run

            if set_aside:
                print_line(f"note: settings of this process that do not apply to the run: {', '.join(set_aside)}")
            if (note := parts.uncompared_note) is not None:
                print_line(note)
            if in_notebook():
                from .notebook import NotebookView

                callbacks = [*callbacks, NotebookView()]
            handles = in_main_thread if handle_signals is None else handle_signals
            state = run(checked, handle_signals=handles, second_exits=False, callbacks=callbacks)
            if state is None:
                return TrainResult(checked.config, step=0)
            result = TrainResult(
                state.config, step=state.step, stopped_by=state.stopped_by, finished_by=state.finished_by
            )
            if state.stopped_by is not None:
                resume = f'load_config({str(result.run_dir / "config.toml")!r}, resume_from_checkpoint="latest")'
                same = "".join(f", {name}=..." for name in dict.fromkeys(n.partition(".")[0] for n in parts.by_name))
                print_line(f"in Python:\n  train({resume}{same})")
            del state
            gc.collect()  # networks and callbacks refer to each other, and the caller may want the memory now
            return result
