"""finetrainers: LoRA and full finetuning of video diffusion models.

The public names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

#: Where each public name is defined; `Reward`, `Sample`, `TrainState` and `sample` need torch there.
_PUBLIC = {
    "Callback": "finetrainers.training.callbacks.base",
    "ConfigError": "finetrainers.config.errors",
    "Facts": "finetrainers.config.facts",
    "Family": "finetrainers.models.registry",
    "Reward": "finetrainers.rewards.base",
    "Sample": "finetrainers.training.state",
    "Section": "finetrainers.config.base",
    "TrainConfig": "finetrainers.config.root",
    "TrainResult": "finetrainers.runs.training",
    "TrainState": "finetrainers.training.state",
    "TrainingMethod": "finetrainers.config.methods",
    "check": "finetrainers.plan.check",
    "estimate": "finetrainers.plan.estimate",
    "export": "finetrainers.results.export_formats",
    "load_config": "finetrainers.config.load",
    "model_path": "finetrainers.utils.packaged",
    "option": "finetrainers.config.option",
    "register_method": "finetrainers.methods.registry",
    "register_model": "finetrainers.models.registry",
    "register_reward": "finetrainers.rewards.registry",
    "report": "finetrainers.results.reports.write",
    "sample": "finetrainers.sampling.run",
    "train": "finetrainers.runs.training",
    "__version__": "finetrainers.utils.versions",
}
__all__ = [
    "Callback",
    "ConfigError",
    "Facts",
    "Family",
    "Reward",
    "Sample",
    "Section",
    "TrainConfig",
    "TrainResult",
    "TrainState",
    "TrainingMethod",
    "check",
    "estimate",
    "export",
    "load_config",
    "model_path",
    "option",
    "register_method",
    "register_model",
    "register_reward",
    "report",
    "sample",
    "train",
]

if TYPE_CHECKING:
    from finetrainers.plan.check import check
    from finetrainers.plan.estimate import estimate
    from finetrainers.results.export_formats import export
    from finetrainers.results.reports.write import report
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
    from .rewards.registry import register_reward
    from .utils.packaged import model_path
    from .utils.versions import __version__ as __version__


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(_PUBLIC)
