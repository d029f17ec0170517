"""The code passes the tools that pyproject.toml configures; the same ones run before a commit. No file or function is
long."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_TEST_NAME = 600, 50, 80
#: Functions over the limit, until they are split.
LONG = {
    "advantage.py compute_advantages",
    "sampler.py rollout",
}


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["codespell_lib"]],
    ids=["ruff", "format", "codespell"],
)
def test_tool_is_content(command: list[str]) -> None:
    """mypy, which takes half a minute in a fresh checkout, is a step of `.ci/run`."""
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_files_and_functions_are_short() -> None:
    """Lines of a file; of a function, those after its docstring."""
    long = set()
    for path in (ROOT / "finetrainers").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > LONGEST_FILE:
            long.add(path.name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                documented = ast.get_docstring(node) is not None
                first = (node.body[0].end_lineno or 0) + 1 if documented else node.lineno
                if (node.end_lineno or 0) - first >= LONGEST_FUNCTION:
                    long.add(f"{path.name} {node.name}")
    assert long <= LONG


def test_names_of_tests_fit_on_a_command_line() -> None:
    names = [
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 2000
    assert [name for name in names if len(name) > LONGEST_TEST_NAME] == []


#: What a random draw must be given, since the default is the host program's.
DRAWS = {
    "rand": {"dtype", "device"},
    "randn": {"dtype", "device"},
    "normal": {"dtype", "device"},
    "randint": {"device"},
    "randperm": {"device"},
}


def test_random_draws_have_a_dtype_and_a_device() -> None:
    """A draw in another dtype has other values. A call may also be that of `partial`."""
    incomplete = set()
    for path in (ROOT / "finetrainers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            is_partial = isinstance(node.func, ast.Name) and node.func.id == "partial" and node.args
            drawn = ast.unparse(node.args[0] if is_partial else node.func)
            needed = DRAWS.get(drawn.removeprefix("torch.")) if drawn.startswith("torch.") else None
            if needed is not None and not needed <= {keyword.arg for keyword in node.keywords}:
                incomplete.add(f"{path.name}:{node.lineno} {drawn}")
    assert incomplete == set()


#: Modules that read text from outside for all others; text that this program has written; files of the kernel.
READERS = {"utils/reading.py", "utils/files.py", "utils/headers.py"}
OWN_TEXT = {"utils/json_objects.py"}
OF_THE_KERNEL = {"utils/host_memory.py", "utils/network.py", "rundir/health.py", "data/inspect/decode_worker.py"}
PLAIN = {
    "json.load", "json.loads", "json.JSONDecoder", "tomllib.load", "tomllib.loads", "yaml.load", "yaml.safe_load",
    "safe_open", "safetensors.safe_open", "load_file", "safetensors.torch.load_file", "os.open", "np.load", "io.open",
}  # fmt: skip
#: Calls that open something else than a file to be read.
OTHER_OPENS = {
    "os.open": {"rundir/lock.py", "training/watchdog.py", "cli/main.py", "data/cache/store.py", "utils/backstop.py"},
}


def plain_reads(source: str) -> list[tuple[int, str]]:
    """Line and name of every call that reads a file or foreign text, but not through `utils.reading`."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        modes = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        writes = any(isinstance(mode, str) and set(mode) & set("wax") and len(mode) <= 3 for mode in modes)
        is_path_method = method in ("read_text", "read_bytes") and not name.startswith("reading.")
        opens = name == "open" or (method == "open" and not node.args) or (method == "open" and "rb" in modes)
        if name in PLAIN or is_path_method or (opens and not writes and "fsspec" not in name):
            calls.append((node.lineno, name))
    return calls


def test_everything_from_outside_is_read_by_one_module() -> None:
    """It refuses pipes, devices, huge files, and values too deep or long; see `utils.reading`."""
    assert [name for _, name in plain_reads("open(p)\nopen(p, 'w')\np.open('rb')\nx.read_text()\njson.loads(s)")] == [
        "open", "p.open", "x.read_text", "json.loads",
    ]  # fmt: skip
    allowed = READERS | OWN_TEXT | OF_THE_KERNEL
    found = []
    for path in (ROOT / "finetrainers").rglob("*.py"):
        file = path.relative_to(ROOT / "finetrainers").as_posix()
        calls = plain_reads(path.read_text(encoding="utf-8")) if file not in allowed else []
        found += [f"{file}:{line} {name}" for line, name in calls if file not in OTHER_OPENS.get(name, ())]
    assert found == [], "use finetrainers.utils.reading"
