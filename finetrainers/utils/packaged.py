"""Files that ship with the package: models, configs, recipes.

`demo://NAME` is accepted wherever a model directory or Hub id is.

Packaged configs of published repositories, for families of `models/configs/`, replace those of the repository where
all weights come from single files.
"""

from __future__ import annotations

import json
from pathlib import Path

from finetrainers.utils.failures import InputError
from finetrainers.utils.text import nearest

SCHEME = "demo://"
_PACKAGE = Path(__file__).parents[1]
_ROOT = _PACKAGE / "demo" / "weights"
_CONFIGS = _PACKAGE / "models" / "configs"
#: Directory of `examples/` and `accelerate_configs/`: the package if it was installed from a wheel, else the checkout.
SHARED = _PACKAGE if (_PACKAGE / "examples").is_dir() else _PACKAGE.parent


def packaged_models() -> list[str]:
    """Return the names of the demo models, including the scheme."""
    return sorted(f"{SCHEME}{path.parent.name}" for path in _ROOT.glob("*/model_index.json"))


def model_path(name: str) -> str:
    """Return the directory of a demo model, and any other directory or Hub id unchanged.

    Raises:
        ValueError: there is no demo model of this name.
    """
    if not name.startswith(SCHEME):
        return name
    if name not in packaged_models():
        raise InputError(f"unknown demo model {name!r}{nearest(name, packaged_models())}", "unknown")
    return str(_ROOT / name.removeprefix(SCHEME))


def published_base(family: str) -> str | None:
    """Return the Hub id of the repository of a family with packaged configs, or None if it has none."""
    index = _CONFIGS / family / "model_index.json"
    return str(json.loads(index.read_text(encoding="utf-8"))["_name_or_path"]) if index.is_file() else None


def packaged_configs(hub_id: str) -> Path | None:
    """Return the folder with the configs of a Hub repository, or None if they are not packaged."""
    folders = (path.parent for path in _CONFIGS.glob("*/model_index.json"))
    return next((folder for folder in folders if published_base(folder.name) == hub_id), None)


def recipes() -> dict[str, Path]:
    """Return the recipes by name, such as `FAMILY/lora`."""
    files = sorted((SHARED / "examples").glob("*/*.toml"))
    return {f"{path.parent.name}/{path.stem}": path for path in files}


def find_shared(path: str | Path) -> Path | None:
    """Return the path of a file of `examples/` or `accelerate_configs/`, or None if `path` does not name one.

    Paths start with either name; those of recipes may leave out `examples/` and `.toml`.
    """
    if Path(path).parts[:1] in (("examples",), ("accelerate_configs",)) and (SHARED / path).is_file():
        return SHARED / path
    return recipes().get(str(path).removeprefix("examples/").removesuffix(".toml"))
