"""Models and configs that ship with the package: `demo://NAME` is accepted wherever a model's directory or hub id is.

Configs of a published repository, for families of `models/configs/`, take the place of those of the repository where all
weights come from single files.
"""

from __future__ import annotations

import json
from pathlib import Path

from finetrainers.utils.text import nearest

SCHEME = "demo://"
_ROOT = Path(__file__).parents[1] / "demo" / "weights"
_CONFIGS = Path(__file__).parents[1] / "models" / "configs"


def packaged_models() -> list[str]:
    """Names of the packaged models, scheme included."""
    return sorted(f"{SCHEME}{path.parent.name}" for path in _ROOT.glob("*/model_index.json"))


def model_path(name: str) -> str:
    """The directory of a packaged model; any other directory or hub id unchanged.

    Raises:
        ValueError: no model of this name is packaged.
    """
    if not name.startswith(SCHEME):
        return name
    if name not in packaged_models():
        raise ValueError(f"no packaged model {name!r}{nearest(name, packaged_models())}")
    return str(_ROOT / name.removeprefix(SCHEME))


def published_base(family: str) -> str | None:
    """Return the hub id of the repository of a family whose configs are packaged, or None if there is none."""
    index = _CONFIGS / family / "model_index.json"
    return str(json.loads(index.read_text(encoding="utf-8"))["_name_or_path"]) if index.is_file() else None


def packaged_configs(hub_id: str) -> Path | None:
    """Return the folder with the configs of a repository of the hub, or None if they are not packaged."""
    folders = (path.parent for path in _CONFIGS.glob("*/model_index.json"))
    return next((folder for folder in folders if published_base(folder.name) == hub_id), None)
