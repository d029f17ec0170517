"""Training within a host program: its PyTorch and accelerate state changes no result, and is afterwards as before."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetrainers import Callback, ConfigError, TrainState, batches, check, load_config, train
from finetrainers.utils.failures import error_kind
from finetrainers.utils.process_state import host_group_problem, only_thread


def global_state() -> dict[str, Any]:
    """Return what a run must leave as it was."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda", "mps")],
        "nesting": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "precision": [p.fp32_precision for p in (torch.backends, cuda.matmul, cudnn, cudnn.conv, mkldnn,
                                                 mkldnn.matmul)],
        "reduction": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "sdp": [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
                cuda.cudnn_sdp_enabled()],
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "attention": _AttentionBackendRegistry.get_active_backend()[0],
        "generator": torch.get_rng_state().tolist(),
        "accelerate": [dict(kind._shared_state) for kind in (PartialState, AcceleratorState, GradientState)],
        "group": dist.is_initialized(),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _no_accelerate_state() -> None:
    """Other tests start runs without `train`, which leaves accelerate's state of them in this process."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    yield
    torch.set_default_device(None)


@contextlib.contextmanager
def flags() -> Iterator[None]:
    """Everything else that chooses kernels or their precision, and what is left to the host."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    torch.set_float32_matmul_precision("medium")
    cuda.matmul.allow_bf16_reduced_precision_reduction = False
    cudnn.benchmark = True
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    with sdpa_kernel(SDPBackend.MATH), attention_backend("_native_math"), torch.autograd.detect_anomaly():
        yield
    torch.use_deterministic_algorithms(False)
    cudnn.benchmark = False
    cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def accelerator() -> Iterator[None]:
    """An Accelerator of the host's own, which a run must neither obey nor change."""
    host = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16", cpu=True)
    yield
    assert (host.gradient_accumulation_steps, host.mixed_precision, host.num_processes) == (4, "bf16", 1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextlib.contextmanager
def group(place: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=place.as_uri(), rank=0, world_size=1)
    default = dist.group.WORLD
    yield
    assert dist.group.WORLD is default
    dist.all_reduce(torch.ones(1))  # it still works
    dist.destroy_process_group()


#: By name, so that a failure says which state has leaked; several at once, where they are independent.
STATES: dict[str, Callable[[], list[AbstractContextManager[Any]]]] = {
    "float64 and meta": lambda: [default_dtype(torch.float64), default_device("meta")],
    "bfloat16 and autocast": lambda: [default_dtype(torch.bfloat16), torch.autocast("cpu", torch.float16)],
    "no_grad within a device": lambda: [torch.device("meta"), torch.no_grad()],
    "inference_mode and accelerate": lambda: [torch.inference_mode(), accelerator()],
    "flags": lambda: [flags()],
}


class LeavesItsDtype(Callback):
    """Changes the default dtype within the run, as a library may."""

    def on_start(self, state: TrainState) -> None:
        torch.set_default_dtype(torch.bfloat16)


def losses(values: dict[str, Any], place: Path, *callbacks: Callback) -> list[float]:
    result = train(load_config(**values, output_dir=str(place)), callbacks=callbacks)
    return [record["loss"] for record in result.metrics if "loss" in record]


def test_no_autocast_of_the_host_keeps_cast_weights(options: Callable[..., dict], tmp_path: Path) -> None:
    """Torch frees weights that it has cast when the outermost autocast ends."""
    values = options(train_steps=3, mixed_precision="bf16", lr=0.1)
    del values["output_dir"]
    expected = losses(values, tmp_path / "plain")
    autocasts: dict[str, list[AbstractContextManager[Any]]] = {
        "same": [torch.autocast("cpu", torch.bfloat16)],
        "disabled": [torch.autocast("cpu", enabled=False)],
        "others": [
            torch.autocast("cpu", torch.float16, cache_enabled=False), torch.autocast("mps", torch.bfloat16),
            torch.autocast("cuda", enabled=False),
        ],
    }  # fmt: skip
    different = {}
    for name, contexts in autocasts.items():
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            before = global_state()
            different[name] = losses(values, tmp_path / name)
            assert global_state() == before
    assert different == dict.fromkeys(autocasts, expected)


def test_no_state_of_the_host_changes_a_run_or_is_changed_by_it(
    options: Callable[..., dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = options(train_steps=2, lora_dropout=0.3, caption_dropout_p=0.5)
    del values["output_dir"]
    expected = losses(values, tmp_path / "plain")
    assert "this program" not in capsys.readouterr().out
    assert Accelerator(mixed_precision="bf16", cpu=True).mixed_precision == "bf16", "a run leaves no state behind"
    AcceleratorState._reset_state(reset_partial_state=True)
    different: dict[str, list[float]] = {}
    changed: dict[str, list[str]] = {}
    states = STATES | {"process group": lambda: [group(tmp_path / "group")], "callback": list}
    for number, (name, make) in enumerate(states.items()):
        with contextlib.ExitStack() as host:
            for state in make():
                host.enter_context(state)
            before = global_state()
            watching = [LeavesItsDtype()] if name == "callback" else []
            different[name] = losses(values, tmp_path / str(number), *watching)
            after = global_state()
            changed[name] = [key for key in before if before[key] != after[key]]
    assert different == dict.fromkeys(different, expected)
    assert not any(changed.values()), changed
    said = capsys.readouterr().out
    for setting in ("default dtype float64", "default device meta", "autocast on cpu", "no_grad", "inference_mode"):
        assert setting in said


def test_checks_and_results_work_under_any_state_of_the_host(options: Callable[..., dict]) -> None:
    config = load_config(**options(train_steps=1))
    with default_dtype(torch.float64), default_device("meta"), torch.no_grad():
        before = global_state()
        assert check(config, decode=True)["counts"]["train"] == 1
        pipeline = train(config).pipeline("cpu")
        assert before == global_state()
    parts = (pipeline.transformer, pipeline.vae, pipeline.text_encoder)
    weights = [
        tensor for part in parts for tensor in (*part.parameters(), *part.buffers()) if tensor.is_floating_point()
    ]
    assert {(weight.dtype, weight.device.type) for weight in weights} == {(torch.float32, "cpu")}


def test_a_group_of_other_processes_is_refused_before_anything_is_read(
    options: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = options(train_steps=1)
    with group(tmp_path / "group"):
        for name, value in {"WORLD_SIZE": "2", "RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        for dry_run in (False, True):
            with pytest.raises(ConfigError) as refusal:
                train(load_config(**values, dry_run=dry_run))
            assert [problem.where for problem in refusal.value.problems] == ["process group"]
        assert not Path(values["output_dir"]).exists()


class ChecksInAThread(Callback):
    """Calls functions in another thread during the run, and keeps what they raise."""

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        self.calls, self.kinds = calls, list[Any]()

    def on_start(self, state: TrainState) -> None:
        thread = threading.Thread(target=self._call)
        thread.start()
        thread.join()

    def _call(self) -> None:
        for call in self.calls:
            try:
                call()
            except ValueError as error:
                self.kinds.append(error_kind(error))


def test_one_thread_of_a_process_runs_at_a_time(options: Callable[..., dict], tmp_path: Path) -> None:
    values = options(train_steps=1)
    other = load_config(**{**values, "output_dir": str(tmp_path / "other")})
    checks = ChecksInAThread([lambda: train(other), lambda: check(other), lambda: next(batches(other))])
    train(load_config(**values), callbacks=[checks])
    assert checks.kinds == ["occupied"] * 3
    assert not (tmp_path / "other").exists()
    again = ChecksInAThread([lambda: train(other)])
    again.on_start(None)  # type: ignore[arg-type]
    assert again.kinds == []
    # A forked process does not have the thread that runs.
    with only_thread():
        assert multiprocessing.get_context("fork").Pool(1).apply(_runs_in_a_thread)


def _runs_in_a_thread() -> bool:
    checks = ChecksInAThread([lambda: only_thread().__enter__()])
    checks.on_start(None)  # type: ignore[arg-type]
    return not checks.kinds


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_without_rank_in_the_environment_is_refused_on_all_ranks(rank: int, monkeypatch) -> None:
    """The group that accelerate's `debug_launcher` makes; rank 0 of a refused one would wait for the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        problem = host_group_problem()
    finally:
        dist.destroy_process_group()
    assert problem is not None
    assert "debug_launcher" in problem
