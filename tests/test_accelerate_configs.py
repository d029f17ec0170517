"""Every launcher file is read by accelerate as it is meant, down to the plugin that it configures."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DeepSpeedPlugin, DistributedType

from finetrainers.config.parallel import ParallelSection
from finetrainers.parallel.sharding import with_launcher

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
# File -> strategy and number of processes.
EXPECTED = {
    "single": ("NO", 1), "ddp": ("MULTI_GPU", 8), "fsdp2": ("FSDP", 8),
    "uncompiled_1": ("NO", 1), "uncompiled_2": ("MULTI_GPU", 2), "uncompiled_4": ("MULTI_GPU", 4),
    "uncompiled_8": ("MULTI_GPU", 8), "compiled_1": ("NO", 1), "deepspeed": ("DEEPSPEED", 2),
    "deepspeed_zero1": ("DEEPSPEED", 8),
    "deepspeed_zero2": ("DEEPSPEED", 8), "deepspeed_zero2_offload": ("DEEPSPEED", 8),
    "deepspeed_zero3": ("DEEPSPEED", 8), "deepspeed_zero3_offload": ("DEEPSPEED", 8),
}  # fmt: skip
# File -> ZeRO stage, device of the optimizer, device of the parameters.
ZERO = {
    "deepspeed": (2, "cpu", "cpu"), "deepspeed_zero1": (1, "none", "none"), "deepspeed_zero2": (2, "none", "none"),
    "deepspeed_zero2_offload": (2, "cpu", "none"), "deepspeed_zero3": (3, "none", "none"),
    "deepspeed_zero3_offload": (3, "cpu", "cpu"),
}  # fmt: skip


def load(name: str) -> ClusterConfig:
    return load_config_from_file(str(CONFIGS / f"{name}.yaml"))


def test_all_files_are_here() -> None:
    assert {path.stem for path in FILES} == set(EXPECTED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_it(path: Path) -> None:
    config = load(path.stem)
    assert (config.distributed_type, config.num_processes) == (
        DistributedType(EXPECTED[path.stem][0]), EXPECTED[path.stem][1],
    )  # fmt: skip
    assert config.mixed_precision == "bf16"
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_nested_key_is_an_option_of_the_launcher(path: Path) -> None:
    """Accelerate checks the top level only; a misspelt key below it would be dropped in silence."""
    known = {action.dest for action in launch_command_parser()._actions}
    for name, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if isinstance(value, dict):
            assert name in ("fsdp_config", "deepspeed_config", "dynamo_config")
            assert set(value) <= known


@pytest.mark.parametrize("name", ZERO)
def test_deepspeed_plugin(name: str) -> None:
    pytest.importorskip("deepspeed")
    config = load(name).deepspeed_config
    plugin = DeepSpeedPlugin(**config)
    stage, optimizer, parameters = ZERO[name]
    zero = plugin.deepspeed_config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == (
        stage, optimizer, parameters,
    )  # fmt: skip
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == "auto"
    assert plugin.deepspeed_config["gradient_clipping"] == "auto"
    assert zero["stage3_gather_16bit_weights_on_model_save"] == (stage == 3)


def test_fsdp_is_asked_for_as_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is split are the blocks of the model, which the file need not name."""
    for key, value in load("fsdp2").fsdp_config.items():  # the launcher hands them over like this
        monkeypatch.setenv(key.upper(), str(value).lower() if isinstance(value, bool) else str(value))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")  # set by the call; put back when the test ends
    assert with_launcher(ParallelSection()) == ParallelSection(fsdp="full")


def test_compiled_uses_inductor() -> None:
    assert load("compiled_1").dynamo_config["dynamo_backend"] == "INDUCTOR"
