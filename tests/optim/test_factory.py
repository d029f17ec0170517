"""Every optimizer steps, learns, and resumes bit for bit; state sizes are what the table says."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from refusals import refused
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from finetrainers.config.sections import OptimizerName, OptimizerSection
from finetrainers.optim import factory, table
from finetrainers.optim.factory import create_optimizer
from finetrainers.optim.schedules import Schedule, lr_schedule
from finetrainers.optim.table import OPTIMIZERS

COMPILED = ("adamw-torchao-8bit", "adamw-torchao-4bit", "adamw-torchao-fp8", "adamw-deepspeed-cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++")
LR = {"prodigy": 1.0, "adafactor": 3e-2, "muon": 1e-2}


def names(*, quick: tuple[str, ...] = ()) -> list[object]:
    """All names; those that compile C++ (torchao for each kind of state, DeepSpeed once) are slow unless `quick`."""
    slow = [needs_compiler, pytest.mark.slow]
    return [
        name if name not in COMPILED else pytest.param(name, marks=needs_compiler if name in quick else slow)
        for name in OPTIMIZERS
    ]


#: What torchao does in C++ in these tests; elsewhere the same steps run without its compiler, operator by operator.
REALLY_COMPILED = (
    "test_learns_and_resumes_exactly_in_fp32[adamw-torchao-8bit]",
    "test_learning_rate_reaches_the_step",
    "stochastic",
)


@pytest.fixture(autouse=True)
def _no_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating and compiling a step takes longer than all steps of this file."""
    if not any(name in request.node.name for name in REALLY_COMPILED):
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture(autouse=True)
def _quick_build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DeepSpeed compiles its Adam: its own sources, as one file and hardly optimized; kept for the next session.

    Nearly all of the two minutes that it takes otherwise goes into PyTorch's headers, once per file, and into -O3 -g.
    Of the headers, these sources need tensors and what passes them from Python.
    """
    if "adamw-deepspeed-cpu" not in request.node.name:
        return
    from deepspeed.ops.op_builder import CPUAdamBuilder

    directory = request.config.cache.mkdir("finetrainers-cpu-adam")
    builder, cxx_args = CPUAdamBuilder(), CPUAdamBuilder.cxx_args
    sources = [Path(builder.deepspeed_src_path(source)).absolute() for source in builder.sources()]
    together = directory / "together.cpp"
    headers = directory / "headers" / "torch" / "extension.h"
    headers.parent.mkdir(parents=True, exist_ok=True)
    texts = {
        together: "".join(f'#include "{source}"\n' for source in sources),
        headers: "#include <torch/types.h>\n#include <torch/csrc/utils/pybind.h>\n",
    }
    for path, text in texts.items():
        if not path.is_file() or path.read_text() != text:  # else ninja would compile it again
            path.write_text(text)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(directory))
    monkeypatch.setattr(
        CPUAdamBuilder, "cxx_args", lambda self: [*cxx_args(self), "-O1", "-g0", f"-I{headers.parents[1]}"]
    )
    monkeypatch.setattr(CPUAdamBuilder, "sources", lambda self: [str(together)])


class LowRank(nn.Module):
    """Two matrices of a LoRA's shape, alike so that torchao compiles once; 8-bit state starts at 4096 weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter((torch.randn(256, 32, generator=generator) / 16).to(dtype))
        self.b = nn.Parameter((torch.randn(256, 32, generator=generator) / 6).to(dtype))

    def loss(self) -> torch.Tensor:
        """How far b a^T is from a fixed matrix of rank 32; a quadratic in each factor."""
        generator = torch.Generator().manual_seed(1)
        target = torch.randn(256, 32, generator=generator) @ torch.randn(32, 256, generator=generator) / 32
        return (self.b.float() @ self.a.float().T - target).square().mean()


def build(model: nn.Module, name: str, *, sr: bool = False, **options: object) -> torch.optim.Optimizer:
    config = OptimizerSection(optimizer=name, lr=LR.get(name, 3e-3), **options)
    return create_optimizer(model.parameters(), config=config, lr=config.lr, device_type="cpu", stochastic_rounding=sr)


def steps(model: LowRank, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tensors_of(value: torch.Tensor) -> list[torch.Tensor]:
    if not is_traceable_wrapper_subclass(value):
        return [value]
    return [tensor for name in value.__tensor_flatten__()[0] for tensor in tensors_of(getattr(value, name))]


def check_learns_and_resumes(name: str, dtype: torch.dtype, *, sr: bool = False) -> None:
    model = LowRank(dtype)
    optimizer = build(model, name, sr=sr)
    torch.manual_seed(0)
    losses = steps(model, optimizer, 6)
    # Prodigy's first steps are tiny while it estimates the distance to go.
    assert model.loss().item() < losses[0] * (1.0 if name == "prodigy" else 0.98)

    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    random_state = torch.get_rng_state()
    steps(model, optimizer, 2)

    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    resumed = LowRank(dtype)
    resumed.load_state_dict(state["model"])
    again = build(resumed, name, sr=sr)
    again.load_state_dict(state["optimizer"])
    torch.set_rng_state(random_state)
    steps(resumed, again, 2)
    for (key, value), other in zip(model.named_parameters(), resumed.parameters(), strict=True):
        if name == "adamw-deepspeed-cpu":  # its C++ side multiplies beta^t up step by step, and starts from a power
            torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-7, msg=key)
        else:
            assert torch.equal(value, other), key
        assert torch.isfinite(value).all()


def test_table_has_every_name() -> None:
    assert set(OPTIMIZERS) == set(get_args(OptimizerName))


@pytest.mark.rotating
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", names(quick=("adamw-torchao-8bit",)))
def test_learns_and_resumes_exactly_in_fp32(name: str) -> None:
    check_learns_and_resumes(name, torch.float32)


@pytest.mark.rotating
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", [n for n in names() if n not in ("adafactor", "prodigy")])
def test_learns_and_resumes_exactly_in_bf16(name: str) -> None:
    """Adafactor and Prodigy make first steps that bf16 rounds away; fp32 weights are what they need."""
    check_learns_and_resumes(name, torch.bfloat16)


@pytest.mark.rotating
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", names())
def test_state_size_is_what_the_table_says(name: str) -> None:
    weight = nn.Parameter(torch.ones(1024, 512))
    optimizer = build(nn.ParameterList([weight]), name)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = [v for k, v in optimizer.state[weight].items() if isinstance(v, torch.Tensor) and "qmap" not in k]
    size = sum(t.numel() * t.element_size() for value in state for t in tensors_of(value))
    assert size / weight.numel() == pytest.approx(OPTIMIZERS[name].state_bytes, abs=0.05)


@pytest.mark.rotating
@needs_compiler
def test_stochastic_rounding_resumes_exactly() -> None:
    check_learns_and_resumes("adamw", torch.bfloat16, sr=True)


@needs_compiler
def test_stochastic_rounding_keeps_small_updates_on_average() -> None:
    """Updates of 1/64 of a bf16 step vanish in plain bf16; rounded stochastically they add up."""

    def train(*, sr: bool) -> float:
        weight = nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
        config = OptimizerSection(optimizer="adamw", weight_decay=0.0)
        lr = 2.0**-14  # Adam's first steps have size lr; below 1, bf16 steps by 2^-8
        optimizer = create_optimizer([weight], config=config, lr=lr, device_type="cpu", stochastic_rounding=sr)
        torch.manual_seed(0)
        for _ in range(8):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.float().mean().item()

    assert train(sr=False) == 1.0
    assert train(sr=True) == pytest.approx(1 - 8 * 2.0**-14, abs=5e-5)


def test_first_step_matches_the_formulas() -> None:
    """The options reach the libraries: one step from w = 1 with gradient 0.5, against each paper's formula."""
    options = {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.1, "epsilon": 0.25}

    def step(name: str) -> float:
        weight = nn.Parameter(torch.ones(8, 8))
        config = OptimizerSection(optimizer=name, **options)
        create = create_optimizer([weight], config=config, lr=0.01, device_type="cpu")
        weight.grad = torch.full_like(weight, 0.5)
        create.step()
        return weight[0, 0].item()

    adamw = 1 - 0.01 * 0.1 - 0.01 * 0.5 / (0.5 + 0.25)  # bias correction makes both moments exact at once
    coupled = 0.5 + 0.1 * 1.0
    assert step("adamw") == pytest.approx(adamw, abs=1e-6)
    assert step("adamw-bnb") == pytest.approx(adamw, abs=1e-6)
    assert step("adam") == pytest.approx(1 - 0.01 * coupled / (coupled + 0.25), abs=1e-6)
    assert step("lion") == pytest.approx(1 - 0.01 * 0.1 - 0.01, abs=1e-6)
    # Muon's iteration is approximate (a third off for this matrix), so its reference is the library's own class.
    weight = nn.Parameter(torch.ones(8, 8))
    reference = torch.optim.Muon([weight], lr=0.01, momentum=0.8, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    weight.grad = torch.full_like(weight, 0.5)
    reference.step()
    assert step("muon") == weight[0, 0].item()


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_use_8bit_bnb_maps(name: str) -> None:
    from bitsandbytes.optim import Adam8bit, AdamW8bit

    optimizer = build(LowRank(torch.float32), name, use_8bit_bnb=True)
    assert type(optimizer) is {"adam": Adam8bit, "adamw": AdamW8bit}[name]


def test_use_8bit_bnb_refuses_others() -> None:
    with refused("unsupported", "use_8bit_bnb", "adam or adamw,", "'lion'"):
        build(LowRank(torch.float32), "lion", use_8bit_bnb=True)


def test_muon_counts_what_it_cannot_train() -> None:
    with refused("unsupported", "'muon'", " 2 of 3 "):
        build(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, bias=False)), "muon")


def test_frozen_parameters_are_left_out_and_none_is_an_error() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    assert build(model, "adamw").param_groups[0]["params"] == [model.weight]
    with refused("invalid", "target_modules"):
        build(model.requires_grad_(False), "adamw")


def test_cpu_offload_passes_the_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a GPU: only what torchao's class is called with is seen."""
    seen: dict[str, object] = {}

    def record(params: list[nn.Parameter], optimizer_class: type, **options: object) -> torch.optim.Optimizer:
        seen.update(options, optimizer_class=optimizer_class)
        options.pop("offload_gradients")
        return optimizer_class(params, **options)

    monkeypatch.setattr("torchao.optim.CPUOffloadOptimizer", record)
    config = OptimizerSection(optimizer="adamw", use_cpu_offload_optimizer=True, offload_gradients=True)
    create_optimizer(LowRank(torch.float32).parameters(), config=config, lr=1e-3, device_type="cuda")
    assert seen == {
        "optimizer_class": torch.optim.AdamW, "offload_gradients": True, "fused": True, "lr": 1e-3,
        "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-4,
    }  # fmt: skip


def test_fused_on_cuda_only() -> None:
    weights = list(LowRank(torch.float32).parameters())
    config = OptimizerSection(optimizer="adamw")
    on_cuda = create_optimizer(weights, config=config, lr=1e-3, device_type="cuda")
    on_cpu = create_optimizer(weights, config=config, lr=1e-3, device_type="cpu")
    assert on_cuda.defaults["fused"] is True
    assert not on_cpu.defaults["fused"]


@pytest.mark.parametrize(("then", "now"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_state_of_another_device_leaves_the_implementation_as_it_is(then: str, now: str) -> None:
    """The saved groups say whether the step was fused, and with it, where its counters were."""
    config = OptimizerSection(optimizer="adamw", lr=3e-3)

    def make(model: LowRank, device_type: str) -> torch.optim.Optimizer:
        return create_optimizer(model.parameters(), config=config, lr=config.lr, device_type=device_type)

    model = LowRank(torch.float32)
    before = make(model, then)
    steps(model, before, 2)
    resumed = LowRank(torch.float32)
    resumed.load_state_dict(model.state_dict())
    after = make(resumed, now)
    after.load_state_dict(before.state_dict())
    assert [group["fused"] for group in after.param_groups] == [True if now == "cuda" else None]
    assert [state["step"].item() for state in after.state.values()] == [2.0, 2.0]
    for _ in range(2):
        assert steps(model, before, 1) == pytest.approx(steps(resumed, after, 1), rel=1e-3)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(factory, "import_module", missing)
    with pytest.raises(ImportError, match=r"'prodigy' .*'prodigyopt'.*`pip install prodigyopt`"):
        build(LowRank(torch.float32), "prodigy")


def test_old_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.optim.Muon")
    with pytest.raises(ImportError, match=r"'muon' .* newer torch: .*torch\.optim\.Muon"):
        build(LowRank(torch.float32), "muon")


def test_a_package_that_lacks_something_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: str) -> None:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(factory, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="other"):
        build(LowRank(torch.float32), "prodigy")


@needs_compiler
@pytest.mark.parametrize("name", ["adamw", "adamw-torchao-8bit"])
def test_learning_rate_reaches_the_step(name: str) -> None:
    """Torchao compiles its step around a learning rate tensor: neither way of setting it may replace that."""
    model = LowRank(torch.float32)
    optimizer = build(model, name)
    linear = LambdaLR(
        optimizer, lr_schedule(OptimizerSection(lr_scheduler="linear", lr_warmup_steps=0), lr=1.0, total_steps=4)
    )
    for expected in (1.0, 0.75, 0.5, 0.25, 0.0):
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(3e-3 * expected)
        before = model.a.detach().clone()
        steps(model, optimizer, 1)
        assert torch.equal(model.a, before) == (expected == 0)
        linear.step()
    Schedule(lambda _: 1e-2).apply(optimizer, 0)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2)
    steps(model, optimizer, 1)


def test_table_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, finetrainers.optim.rules, finetrainers.memory.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert table.OPTIMIZERS["came"].library == "came_pytorch"
