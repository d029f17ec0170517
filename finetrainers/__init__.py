"""finetrainers: LoRA and full finetuning of video diffusion models.

The public names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

#: Where each public name is defined; classes of batches, models and states, and `sample`, need torch there.
_PUBLIC = {
    "Batch": "finetrainers.models.batch",
    "Callback": "finetrainers.training.callbacks.base",
    "ConfigError": "finetrainers.config.errors",
    "Facts": "finetrainers.config.facts",
    "Family": "finetrainers.models.registry",
    "Model": "finetrainers.methods.model",
    "NoisyClips": "finetrainers.methods.sft",
    "RawBatch": "finetrainers.data.loading.loader",
    "Reward": "finetrainers.rewards.base",
    "Rollouts": "finetrainers.methods.grpo.rollout.policy",
    "SFT": "finetrainers.methods.sft",
    "Sample": "finetrainers.training.state",
    "Section": "finetrainers.config.base",
    "TrainConfig": "finetrainers.config.root",
    "TrainResult": "finetrainers.runs.training",
    "TrainState": "finetrainers.training.state",
    "TrainingMethod": "finetrainers.config.methods",
    "batches": "finetrainers.runs.load_model",
    "check": "finetrainers.plan.check",
    "estimate": "finetrainers.plan.estimate",
    "export": "finetrainers.results.export_formats",
    "load_config": "finetrainers.config.load",
    "load_model": "finetrainers.runs.load_model",
    "model_path": "finetrainers.utils.packaged",
    "option": "finetrainers.config.option",
    "register_method": "finetrainers.methods.registry",
    "register_model": "finetrainers.models.registry",
    "register_reward": "finetrainers.rewards.registry",
    "report": "finetrainers.results.reports.write",
    "reward_function": "finetrainers.rewards.functions",
    "sample": "finetrainers.sampling.run",
    "train": "finetrainers.runs.training",
    "__version__": "finetrainers.utils.versions",
}
__all__ = [
    "SFT",
    "Batch",
    "Callback",
    "ConfigError",
    "Facts",
    "Family",
    "Model",
    "NoisyClips",
    "RawBatch",
    "Reward",
    "Rollouts",
    "Sample",
    "Section",
    "TrainConfig",
    "TrainResult",
    "TrainState",
    "TrainingMethod",
    "batches",
    "check",
    "estimate",
    "export",
    "load_config",
    "load_model",
    "model_path",
    "option",
    "register_method",
    "register_model",
    "register_reward",
    "report",
    "reward_function",
    "sample",
    "train",
]

if TYPE_CHECKING:
    from finetrainers.data.loading.loader import RawBatch
    from finetrainers.methods.grpo.rollout.policy import Rollouts
    from finetrainers.methods.model import Model
    from finetrainers.methods.sft import SFT, NoisyClips
    from finetrainers.models.batch import Batch
    from finetrainers.plan.check import check
    from finetrainers.plan.estimate import estimate
    from finetrainers.results.export_formats import export
    from finetrainers.results.reports.write import report
    from finetrainers.runs.load_model import batches, load_model
    from finetrainers.runs.training import TrainResult, train
    from finetrainers.sampling.run import sample
    from finetrainers.training.callbacks.base import Callback
    from finetrainers.training.state import Sample, TrainState

    from .config.base import Section
    from .config.errors import ConfigError
    from .config.facts import Facts
    from .config.load import load_config
    from .config.methods import TrainingMethod
    from .config.option import option
    from .config.root import TrainConfig
    from .methods.registry import register_method
    from .models.registry import Family, register_model
    from .rewards.base import Reward
    from .rewards.functions import reward_function
    from .rewards.registry import register_reward
    from .utils.packaged import model_path
    from .utils.versions import __version__ as __version__


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(_PUBLIC)
