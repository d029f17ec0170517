"""The architecture as tests: which way imports point, where family names may stand, and what loads without torch."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import networkx
import pytest

import finetrainers

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "finetrainers"

#: Modules outside of packages: entry points, and what tests of other packages use.
TOP_LEVEL = ("__init__.py", "__main__.py", "testing.py")
#: Lower layers may not import higher ones; packages of one layer may, as long as there is no cycle.
LAYERS = {
    "utils": 0,
    "config": 1,
    "draw": 1,
    "diffusion": 2,
    "models": 3,
    "data": 4,
    "rewards": 4,
    "parallel": 4,
    "methods": 5,
    "memory": 5,
    "optim": 5,
    "rundir": 6,
    "plan": 7,
    "training": 8,
    "sampling": 9,
    "tools": 9,
    "results": 10,
    "runs": 11,
    "demo": 12,
    "cli": 13,
}
#: Of the package's folders, and of lines in each.
MOST_PACKAGES, MOST_LINES = 20, 6000
#: The wings of `data`, in the order in which data goes through them.
WINGS = {"reading": 0, "buckets": 1, "video": 2, "inspect": 3, "cache": 4, "loading": 5}
#: What of `models` the rest of the package may know. A family's own module is reached through the registry; the formats
#: of exported weights through `lora_names`, without torch, and `lora_files`. Weights of rewards come from the same
#: `hub`.
OPEN_MODELS = {"spec", "registry", "lora_files", "files.lora_names", "files.hub"}
#: Packages that see models through the seam alone.
SEAM_ONLY = {"data", "methods", "optim", "memory", "parallel"}

_REFERENCE = re.compile(r"finetrainers(\.\w+)+(:\w+)?")
_FAMILY = re.compile(r"hunyuan|ltx|cogvideo|(?<![a-z])wan(?![a-z])", re.IGNORECASE)
#: Names of methods; those of publications (Flow-GRPO) and words that hold them are others.
_METHOD = re.compile(r"(?<![\w-])(grpo|nft|sft|dpo|refl)(?![\w-])|\.grpo\.", re.IGNORECASE)
#: Lines of help and documentation text that show a user what to type.
_USAGE = re.compile(r"^(model_name|pretrained_model_name_or_path) = ")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def imports_of(path: Path) -> tuple[tuple[int, list[str]], ...]:
    """Line and dotted parts below `finetrainers` of every import, wherever it stands, and of every `module:Name`
    text."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    package = ["finetrainers", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from finetrainers.models import spec` names a module, `from .spec import Batch` does not.
            names = [f"{stem}.{alias.name}" if is_package(stem) else stem for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _REFERENCE.fullmatch(node.value):
            names = [node.value.partition(":")[0]]
        else:
            continue
        for name in names:
            if name.startswith("finetrainers."):
                yield node.lineno, name.split(".")[1:]


def is_module(dotted: str) -> bool:
    path = ROOT / Path(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_package(dotted: str) -> bool:
    return (ROOT / Path(*dotted.split("."))).is_dir()


def internal_imports() -> list[tuple[str, int, str, list[str]]]:
    """`(file, line, importing package, imported parts)` of the whole package, without the facade `__init__.py`."""
    found = []
    for path in modules():
        relative = path.relative_to(PACKAGE)
        if len(relative.parts) == 1:
            continue
        for line, parts in imports_of(path):
            if parts[0] in LAYERS:
                found.append((relative.as_posix(), line, relative.parts[0], parts))
    return found


def test_every_package_has_a_layer() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= set(LAYERS), "give new packages a place in LAYERS and in docs/explanation/architecture.md"
    assert not [path.name for path in PACKAGE.glob("*.py") if path.name not in TOP_LEVEL]


def test_packages_are_few_and_of_a_size_that_one_can_know() -> None:
    """A subject that outgrows the limit is two, but for those that grow with families, formats, methods and options."""
    packages = {path.parent for path in PACKAGE.glob("*/__init__.py")}
    assert len(packages) <= MOST_PACKAGES
    lines = {
        package.name: sum(path.read_text(encoding="utf-8").count("\n") for path in package.rglob("*.py"))
        for package in packages
    }
    assert {name for name, number in lines.items() if number > MOST_LINES} <= {"config", "data", "methods", "models"}
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| .+\. \|$", page, re.M)
    assert {name: int(layer) for layer, name in rows} == LAYERS


def test_the_walk_sees_imports_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: function-level, relative, aliased, type-checking and textual imports."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "data").mkdir()
    module = tmp_path / "data" / "module.py"
    module.write_text(
        "from typing import TYPE_CHECKING\n"
        "from .plan import Clip\n"
        "from ..models import spec\n"
        "import finetrainers.runs.run as run\n"
        "if TYPE_CHECKING:\n    from finetrainers.cli.main import main\n"
        "def f():\n    from finetrainers.models.registry import families\n"
        "TARGET = 'finetrainers.methods.sft:SFT'\n"
        "TEXT = 'see finetrainers.methods.sft for more'\n"
    )
    assert sorted(".".join(parts) for _, parts in imports_of(module)) == [
        "cli.main", "data.plan", "methods.sft", "models.registry", "models.spec", "runs.run",
    ]  # fmt: skip


def test_code_in_templates_imports_what_there_is() -> None:
    """Model cards, also those of earlier versions, have Python code that users paste."""
    names = {("finetrainers.models.single_file", "load_single_file")}  # in cards before the module moved
    for path in modules():
        lines = re.findall(
            r"^from (finetrainers[\w.]*) import (\w+(?:, \w+)*)$", path.read_text(encoding="utf-8"), re.M
        )
        names |= {(module, name) for module, imported in lines for name in imported.split(", ")}
    assert len(names) > 500
    missing = [
        f"{module}: {name}"
        for module, name in sorted(names)
        if not hasattr(importlib.import_module(module), name) and not is_module(f"{module}.{name}")
    ]
    assert missing == []


def test_imports_point_down() -> None:
    wrong = [
        f"finetrainers/{file}:{line}: {package} imports {'.'.join(parts)}"
        for file, line, package, parts in internal_imports()
        if LAYERS[parts[0]] > LAYERS[package]
    ]
    assert wrong == []


def test_imports_between_the_wings_of_data_point_down() -> None:
    assert {path.parent.name for path in (PACKAGE / "data").glob("*/__init__.py")} == set(WINGS)
    wrong = [
        f"finetrainers/{file}:{line}: {wing} imports {'.'.join(parts)}"
        for file, line, package, parts in internal_imports()
        if package == parts[0] == "data" and WINGS[parts[1]] > WINGS[wing := file.split("/")[1]]
    ]
    assert wrong == []


def test_packages_have_no_import_cycle() -> None:
    edges = {(package, parts[0]) for _, _, package, parts in internal_imports() if parts[0] != package}
    remaining = {name for edge in edges for name in edge}
    while remaining:
        leaves = {name for name in remaining if not any((name, other) in edges for other in remaining)}
        assert leaves, f"import cycle among {sorted(remaining)}"
        remaining -= leaves


def module_imports() -> dict[str, set[str]]:
    """What each module imports of the package, by dotted names below `finetrainers`; the package itself is `""`."""
    names = {}
    for path in modules():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        found[name] = set()
        for _, parts in imports_of(path):
            while ".".join(parts) not in names:  # a name of a module
                parts = parts[:-1]
            found[name].add(".".join(parts))
        found[name].discard(name)
    return found


def test_modules_have_no_import_cycle() -> None:
    """Imports within functions, for types alone and by `module:Name` texts count, too."""
    graph = networkx.DiGraph()
    graph.add_edges_from((name, other) for name, others in module_imports().items() for other in others)
    assert [sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1] == []


def test_rooms_of_a_package_have_no_import_cycle() -> None:
    """A room is a file of a package, or one of its folders as a whole."""
    for package in LAYERS:
        graph = networkx.DiGraph()
        for name, others in module_imports().items():
            rooms = {".".join(other.split(".")[:2]) for other in others if other.startswith(f"{package}.")}
            if name.startswith(f"{package}."):
                graph.add_edges_from((".".join(name.split(".")[:2]), room) for room in rooms)
        graph.remove_edges_from([(room, room) for room in graph])
        assert [sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1] == []


def test_no_package_hides_a_public_name() -> None:
    """Importing a package puts its module in the place of a function of its name."""
    assert not {path.parent.name for path in PACKAGE.glob("*/__init__.py")} & set(finetrainers.__all__)


def test_nothing_above_knows_which_strategy_runs() -> None:
    """A strategy says what it can do; classes of strategies are chosen in `parallel.select` alone."""
    known = ("hardware", "ranks", "select", "sharding", "slices", "strategy")
    wrong = [
        f"finetrainers/{file}:{line}: {package} imports {'.'.join(parts)}"
        for file, line, package, parts in internal_imports()
        if parts[0] == "parallel" != package and parts[1] not in known
    ]
    assert wrong == []


def test_families_are_reached_through_the_registry() -> None:
    wrong = []
    for file, line, package, parts in internal_imports():
        if parts[0] != "models" or package in ("models", "demo"):
            continue
        allowed = {"spec"} if package in SEAM_ONLY else OPEN_MODELS
        if not any(".".join([*parts, ""]).startswith(f"models.{name}.") for name in allowed):
            wrong.append(f"finetrainers/{file}:{line}: {package} imports {'.'.join(parts)}")
    assert wrong == []


def test_family_names_stay_in_their_files() -> None:
    wrong = []
    for path in modules():
        if path.relative_to(PACKAGE).parts[0] in ("models", "demo"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if _FAMILY.search(line) and not _USAGE.search(line.strip()):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert wrong == []


def test_method_names_stay_in_their_files() -> None:
    """The rest of the package asks a method's `MethodSpec`, or the method. Commands name methods in their help, and
    the facade has public classes."""
    wrong = []
    for path in modules():
        if path.relative_to(PACKAGE).parts[0] in ("methods", "config", "demo", "cli", "__init__.py"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if _METHOD.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert wrong == []


def test_source_is_ascii_and_short() -> None:
    for path in modules():
        text = path.read_text(encoding="utf-8")
        assert text.isascii(), f"{path.relative_to(ROOT)} is not ASCII"
        assert len(text.splitlines()) <= 600, f"{path.relative_to(ROOT)} is longer than 600 lines"


# ---- what runs without torch ---------------------------------------------------------------------------------------

_HEAVY = ("torch", "diffusers", "transformers", "peft", "accelerate")


def run_without_torch(code: str, *, cwd: Path, heavy: Sequence[str] = _HEAVY) -> str:
    """Run code in a fresh interpreter; what it printed. Fails if a heavy library was imported on the way."""
    program = f"import sys\n{code}\nprint('LOADED', [name for name in {heavy!r} if name in sys.modules])\n"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "LOADED []", result.stdout
    return result.stdout + result.stderr


def train(*arguments: str) -> str:
    """Code that runs the training command and prints its exit code; `--help` ends by SystemExit."""
    return (
        "from finetrainers.cli.main import main\n"
        f"try:\n    code = main(['train', *{list(arguments)!r}])\n"
        "except SystemExit as error:\n    code = error.code\n"
        "print('CODE', code)"
    )


#: Each needs what the ones before it have imported, and none of them torch.
LIGHT = {
    "config": "import finetrainers, finetrainers.config.document as d; d.configuration_page(); d.json_schema()",
    "flags": "from finetrainers.config.flags import parse_flags\n"
    "parse_flags(['--model_name', 'ltx_video', '--pretrained_model_name_or_path', 'x', '--lr', '1e-4'])",
    "registry": "from finetrainers.models.registry import families; families()",
    "commands": "from finetrainers.cli.main import main; main([]); main(['models']); main(['schema'])",
}


def test_light_code_stays_light(tmp_path: Path) -> None:
    told = [f"{code}\nprint('AFTER', {name!r}, 'torch' in sys.modules)" for name, code in LIGHT.items()]
    assert run_without_torch("\n".join(told), cwd=tmp_path).count("AFTER") == len(LIGHT)


def test_a_decoding_worker_imports_no_networks(tmp_path: Path) -> None:
    """A worker that is not forked imports the modules of what it calls: with diffusers it would take twice the
    memory."""
    code = "from finetrainers.data.loading.loader import DecodeFetch, PixelFetch"
    heavy = ("diffusers", "transformers", "torchao", "torch._dynamo")
    run_without_torch(code, cwd=tmp_path, heavy=heavy)


def test_help_needs_no_torch(tmp_path: Path) -> None:
    printed = run_without_torch(train("--help"), cwd=tmp_path)
    assert "CODE 0" in printed
    assert "--video_resolution_buckets" in printed


def test_errors_need_no_torch(tmp_path: Path, tiny_repo: Callable[..., Path]) -> None:
    """The answer to a mistake comes at once: nothing heavy is imported to find it."""
    model = ["--model_name", "ltx_video", "--pretrained_model_name_or_path", str(tiny_repo("ltx_video"))]
    (tmp_path / "empty").mkdir()
    cases = {
        "did you mean --batch_size": [*model, "--batch_sise", "2"],
        "50 frames is not 8*k+1": [*model, "--data_root", "empty", "--video_resolution_buckets", "50x64x64"],
        "no clips in": [*model, "--data_root", "empty"],
        "there is no 'missing' in": [*model, "--data_root", "missing"],
        "unknown model family": ["--model_name", "ltx_vide", "--pretrained_model_name_or_path", "x"],
    }
    printed = run_without_torch("\n".join(train(*arguments) for arguments in cases.values()), cwd=tmp_path)
    assert [line for line in printed.splitlines() if line.startswith("CODE")] == [
        f"CODE {code}" for code in (2, 2, 65, 65, 2)
    ], printed
    for message, error in zip(cases, printed.split("error: ")[1:], strict=True):
        assert message in error, printed
