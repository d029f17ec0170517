"""Every optimizer by name: where its class lives and which options it reads. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from finetrainers.config.sections import OptimizerSection
from finetrainers.utils.failures import InputError

Arguments = dict[str, Any]


@dataclass(frozen=True)
class OptimizerSpec:
    """Specification of one optimizer.

    Attributes:
        target: `module:Class`.
        arguments: builds the class's keyword arguments other than parameters and learning rate.
        state_bytes: optimizer state per trainable fp32 weight, in bytes, for large matrices.
        reads: the options among beta1, beta2, beta3 and epsilon that `arguments` uses.
        stochastic: `module:Class` of the variant that rounds bf16 weights stochastically, or None.
        matrices_only: whether every parameter must have two dimensions.
        fused: whether the class has a fused CUDA step.
        needs_positive_lr: whether the class refuses a learning rate of zero.
        on_host: whether the weights it updates must be on the CPU.
        keeps_fp32_state: whether its state is fp32 for weights of any dtype.
        finds_step: whether it finds the size of its steps by itself, so that the learning rate is a factor, usually 1.
    """

    target: str
    arguments: Callable[[OptimizerSection], Arguments]
    state_bytes: float
    reads: frozenset[str]
    stochastic: str | None = None
    matrices_only: bool = False
    fused: bool = False
    needs_positive_lr: bool = False
    on_host: bool = False
    keeps_fp32_state: bool = False
    finds_step: bool = False

    @property
    def library(self) -> str:
        """Top-level package that must be installed."""
        return self.target.partition(":")[0].partition(".")[0]

    @property
    def is_installed(self) -> bool:
        """Whether the package can be found (it is not imported)."""
        return find_spec(self.library) is not None


def missing_library(name: str, recipe: OptimizerSpec) -> str:
    """Return the message for an optimizer whose package is not installed."""
    return (
        f"optimizer {name!r} requires the package {recipe.library!r}, which is not installed; run `pip install "
        f"{recipe.library.replace('_', '-')}`"
    )


def _adam(config: OptimizerSection) -> Arguments:
    return {"betas": (config.beta1, config.beta2), "eps": config.epsilon, "weight_decay": config.weight_decay}


def _lion(config: OptimizerSection) -> Arguments:
    return {"betas": (config.beta1, config.beta2), "weight_decay": config.weight_decay}


def _adafactor(config: OptimizerSection) -> Arguments:
    # Its two epsilons and its decay exponent are not those of Adam; the library's defaults are the paper's.
    return {"weight_decay": config.weight_decay}


def _muon(config: OptimizerSection) -> Arguments:
    # "match_rms_adamw" scales updates to AdamW's size, so that learning rates and decay carry over from AdamW.
    return {"momentum": config.beta1, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}


def _prodigy(config: OptimizerSection) -> Arguments:
    # The authors recommend these two switches for diffusion models.
    return _adam(config) | {"beta3": config.beta3, "use_bias_correction": True, "safeguard_warmup": True}


def _came(config: OptimizerSection) -> Arguments:
    beta3 = 0.9999 if config.beta3 is None else config.beta3  # the paper's default
    return {"betas": (config.beta1, config.beta2, beta3), "weight_decay": config.weight_decay}


def _deepspeed_cpu(config: OptimizerSection) -> Arguments:
    return _adam(config) | {"adamw_mode": True}


_BETAS = frozenset({"beta1", "beta2"})
_ADAM = _BETAS | {"epsilon"}

# State bytes: 4 per fp32 moment, 1 per 8-bit moment, 0.5 per 4-bit moment; block-wise formats add one fp32 scale per
# block of 256 (8-bit, fp8) or 128 (4-bit) weights. Factored second moments of an n x m matrix are n + m numbers: 0.
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adam": OptimizerSpec("torch.optim:Adam", _adam, 8, _ADAM, fused=True),
    "adamw": OptimizerSpec("torch.optim:AdamW", _adam, 8, _ADAM, fused=True, stochastic="torchao.optim:_AdamW"),
    "adafactor": OptimizerSpec("torch.optim:Adafactor", _adafactor, 0, frozenset()),
    "muon": OptimizerSpec("torch.optim:Muon", _muon, 4, frozenset({"beta1"}), matrices_only=True),
    "prodigy": OptimizerSpec(
        "prodigyopt:Prodigy", _prodigy, 16, _ADAM | {"beta3"}, needs_positive_lr=True, finds_step=True
    ),
    "came": OptimizerSpec(
        "came_pytorch:CAME", _came, 4, _BETAS | {"beta3"},
        needs_positive_lr=True, keeps_fp32_state=True,
    ),
    "lion": OptimizerSpec("bitsandbytes.optim:Lion", _lion, 4, _BETAS),
    "adam-bnb": OptimizerSpec("bitsandbytes.optim:Adam", _adam, 8, _ADAM),
    "adamw-bnb": OptimizerSpec("bitsandbytes.optim:AdamW", _adam, 8, _ADAM),
    "adam-bnb-8bit": OptimizerSpec("bitsandbytes.optim:Adam8bit", _adam, 2 + 8 / 256, _ADAM),
    "adamw-bnb-8bit": OptimizerSpec("bitsandbytes.optim:AdamW8bit", _adam, 2 + 8 / 256, _ADAM),
    "lion-bnb-8bit": OptimizerSpec("bitsandbytes.optim:Lion8bit", _lion, 1 + 4 / 256, _BETAS),
    "adamw-bnb-paged": OptimizerSpec("bitsandbytes.optim:PagedAdamW", _adam, 8, _ADAM),
    "adamw-bnb-8bit-paged": OptimizerSpec("bitsandbytes.optim:PagedAdamW8bit", _adam, 2 + 8 / 256, _ADAM),
    "adamw-torchao-8bit": OptimizerSpec(
        "torchao.optim:AdamW8bit", _adam, 2 + 8 / 256, _ADAM, stochastic="torchao.optim:AdamW8bit"
    ),
    "adamw-torchao-4bit": OptimizerSpec(
        "torchao.optim:AdamW4bit", _adam, 1 + 8 / 128, _ADAM, stochastic="torchao.optim:AdamW4bit"
    ),
    "adamw-torchao-fp8": OptimizerSpec(
        "torchao.optim:AdamWFp8", _adam, 2 + 8 / 256, _ADAM, stochastic="torchao.optim:AdamWFp8"
    ),
    "adamw-deepspeed-cpu": OptimizerSpec(
        "deepspeed.ops.adam:DeepSpeedCPUAdam", _deepspeed_cpu, 8, _ADAM,
        on_host=True, keeps_fp32_state=True,
    ),
}  # fmt: skip

#: Names of the variants that `use_8bit_bnb` selects.
BNB_8BIT = {"adam": "adam-bnb-8bit", "adamw": "adamw-bnb-8bit"}

#: Optimizers that `use_cpu_offload_optimizer` can run on the host: torch has a fused CPU step for them.
OFFLOADABLE = ("adam", "adamw")

#: Optimizers that update parts of weights (FSDP2) exactly as whole ones, and whose state can be put together and taken
#: apart again. The others fail on them, look at whole matrices (muon), or cannot read their quantised state back.
SHARDABLE = ("adam", "adamw")


def resolve_name(config: OptimizerSection) -> str:
    """Return the optimizer's name after `use_8bit_bnb`.

    Raises:
        ValueError: `use_8bit_bnb` with an optimizer that has no such variant.
    """
    if not config.use_8bit_bnb:
        return config.optimizer
    if config.optimizer not in BNB_8BIT:
        raise InputError(
            f"use_8bit_bnb requires optimizer {' or '.join(BNB_8BIT)}, got {config.optimizer!r}; remove use_8bit_bnb "
            "or use one of those",
            "unsupported",
        )
    return BNB_8BIT[config.optimizer]
