"""Files that ship with the package: models, configs, recipes.

`demo://NAME` is accepted wherever a model directory or Hub id is.

Packaged configs of published repositories, in `models/configs/`, replace those of the repository in an estimate. Those
with a `_name_or_path` do so in training too, where all weights come from single files. `_rest` names the folder of the
configs that a folder leaves out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetrainers.utils.failures import InputError
from finetrainers.utils.text import nearest

from .reading import read_json_object

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
    """Return the Hub id of a family's repository whose packaged configs are for training, or None if it has none."""
    index = _CONFIGS / family / "model_index.json"
    return _read_index(index).get("_name_or_path") if index.is_file() else None


def packaged_configs(hub_id: str, part: str, *, estimated: bool = False) -> Path | None:
    """Return the folder that has the packaged config of a part of a Hub repository, or None if there is none.

    Args:
        hub_id: of the repository.
        part: subfolder of the folder, or `""` for the folder of the repository's own `model_index.json`.
        estimated: whether it is for an estimate, which takes configs of more repositories than training does.
    """
    for path in sorted(_CONFIGS.glob("*/model_index.json")):
        folder, index = path.parent, _read_index(path)
        if hub_id in (index["_published"] if estimated else [index.get("_name_or_path")]):
            while not (folder / part).is_dir() and "_rest" in index:
                folder = _CONFIGS / index["_rest"]
                index = _read_index(folder / path.name)
            return folder
    return None


def _read_index(path: Path) -> dict[str, Any]:
    return read_json_object(path)


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
