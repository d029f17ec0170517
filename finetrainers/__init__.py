"""finetrainers: LoRA and full finetuning of video diffusion models.

The public names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "TrainConfig": "finetrainers.config.root",
    "load_config": "finetrainers.config.load",
    "ConfigError": "finetrainers.config.errors",
    "train": "finetrainers.engine.run",
    "Trainer": "finetrainers.engine.trainer",
    "Family": "finetrainers.models.registry",
    "register_model": "finetrainers.models.registry",
    "model_path": "finetrainers.utils.packaged",
    "register_method": "finetrainers.methods.registry",
}
__all__ = [
    "ConfigError",
    "Family",
    "TrainConfig",
    "Trainer",
    "load_config",
    "model_path",
    "register_method",
    "register_model",
    "train",
]

if TYPE_CHECKING:
    from .config.errors import ConfigError
    from .config.load import load_config
    from .config.root import TrainConfig
    from .engine.run import train
    from .engine.trainer import Trainer
    from .methods.registry import register_method
    from .models.registry import Family, register_model
    from .utils.packaged import model_path


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
