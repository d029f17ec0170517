"""Shared test set-up: offline, one thread, quiet libraries, and tiny model repositories built once per session."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Read once by the libraries, so they must be set before the first import of any of them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads slow every other process of the machine down
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Files that were probed are remembered below the user's cache, which tests must neither read nor fill; the hub's stays.
os.environ["HF_HOME"] = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="finetrainers-tests-")
# Tests start many processes, and each would compile the package again; every worker would rewrite all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

import pytest
from real_process import Python, start_server
from shares import in_shares

sys.dont_write_bytecode = False
pytest_plugins = ["rotation"]
with contextlib.suppress(ImportError):  # the tests of `gpu` need none
    import hypothesis

    # The same examples in every run: a test that fails, fails again.
    hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Spell messages as in commands; import the libraries, which show no progress bars, except in the process that only
    divides tests among workers."""
    from finetrainers.utils.spelling import in_command

    stack = contextlib.ExitStack()
    stack.enter_context(in_command())
    config.add_cleanup(stack.close)
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        return
    import diffusers
    import torch
    import transformers

    torch.set_num_threads(1)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    for plugin in ("loopback_hub", "whole_runs"):
        config.pluginmanager.import_plugin(plugin)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what the tests have remembered of files."""
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several workers begin with what takes long; tests marked `gpu` skip where there is no CUDA device."""
    if hasattr(config, "workerinput"):
        items[:] = in_shares(items, config.workerinput["workercount"])
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The server of `real_process` imports beside the first tests, which takes seconds, instead of within one of
    them."""
    if any({"python", "python_of_module", "do_jobs"} & {*getattr(item, "fixturenames", ())} for item in session.items):
        start_server()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A run collects garbage between its loading phases; leave out the libraries' million objects, which never go."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Python]:
    """`python("-m", "finetrainers", ...)`: a program in a process of its own; see `real_process`."""
    started = Python(tmp_path_factory.mktemp("processes"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def python_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Python]:
    """The same for fixtures that several tests look at; processes live until the module's last test."""
    started = Python(tmp_path_factory.mktemp("processes"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def tiny_repo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_repo(family, version=None)`: path of the family's tiny random repository; do not write into it."""
    from finetrainers.models.registry import get_family

    built: dict[tuple[object, ...], Path] = {}

    def build(family: str, version: str | None = None, **options: object) -> Path:
        options = options if version is None else {**options, "version": version}
        key = (family, *sorted(options.items()))
        if key not in built:
            module, _, function = get_family(family).tiny.partition(":")
            directory = tmp_path_factory.mktemp(family) / "repo"
            getattr(import_module(module), function)(directory, **options)
            built[key] = directory
        return built[key]

    return build


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled graphs are traced, and run operator by operator; nothing of it outlives the test."""
    import torch
    from torch._dynamo import config as dynamo
    from torch._dynamo.utils import counters

    from finetrainers.models import compiling

    monkeypatch.setattr(compiling, "BACKEND", "eager")
    names = ("recompile_limit", "accumulated_recompile_limit", "optimize_ddp")
    torch._dynamo.reset()
    counters.clear()
    with dynamo.patch({name: getattr(dynamo, name) for name in names}):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def benchmark_script() -> Iterator[Callable[[str], ModuleType]]:
    """`benchmark_script(name)`: a script of `benchmarks/` as a module."""
    path, loaded = list(sys.path), []

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(
            f"benchmarks_{name}", Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        loaded.append(spec.name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in loaded:
        sys.modules.pop(name, None)
    sys.path[:] = path
