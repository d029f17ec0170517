"""DanceGRPO's launch commands as they stand: nothing is added but the name of the script."""

import logging

import pytest
from published import DANCEGRPO, DANCEGRPO_6GPUS
from refusals import refused_options

from finetrainers.config.flags import parse_flags
from finetrainers.config.grpo import trained_steps
from finetrainers.config.load import dump_toml, load_config


@pytest.fixture(autouse=True)
def _six(monkeypatch, tmp_path):
    """Six processes, in an empty folder."""
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)


def parsed(*flags):
    config, _ = parse_flags(flags)
    return config


def test_the_guides_command_for_six_gpus(caplog, tmp_path, monkeypatch):
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config = parsed(*DANCEGRPO_6GPUS)
    expected = {
        "method": "grpo", "training_type": "full-finetune", "model_name": "auto", "fsdp": "full",
        "fsdp_cpu_offload": True,
        "sync_each_batch": True, "fit_gpu": True, "enable_tiling": True,
        "sp_size": 2, "selective_checkpointing": 0.3, "gradient_checkpointing": True, "prompts_per_step": 24,
        "num_generations": 12, "best_of_n": 6, "updates_per_rollout": 1, "train_steps": 202, "checkpointing_steps": 50,
        "lr": 8e-6, "lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 10, "weight_decay": 1e-4, "beta2": 0.999,
        "max_grad_norm": 1.0, "rollout_guidance": 6.018, "shift": 5.0, "eta": 0.25, "sampler": "dance",
        "clip_range": 1e-4,
        "rollout_size": (49, 384, 384), "reward_fps": 8.0, "init_same_noise": True, "master_weights": "fp32",
        "mixed_precision": "bf16", "dancegrpo_files": True, "train_log": True, "seed": 42, "allow_tf32": True,
    }  # fmt: skip
    assert {name: config.get(name) for name in expected} == expected
    assert trained_steps(config.grpo) == 5
    said = caplog.messages[0]
    assert said.startswith("--model_type hunyuan_hf: ")
    assert " --method grpo --training_type full-finetune " in said
    assert said.endswith(": lr_warmup_steps 10")
    assert "--use_cpu_offload with 6 processes: --fsdp_cpu_offload" in caplog.messages
    monkeypatch.delenv("WORLD_SIZE")
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "config.toml").flat() == config.flat()


def test_the_published_command(caplog):
    """It says the length of its warm-up, so nothing is left to the trainer's defaults."""
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config = parsed(*DANCEGRPO)
    assert (config.training.method, config.parallel.fsdp, config.parallel.fsdp_cpu_offload) == ("grpo", "full", False)
    assert (config.grpo.prompts_per_step, config.grpo.updates_per_rollout, config.training.train_steps) == (6, 2, 404)
    assert config.optimizer.lr_warmup_steps == 0
    assert "defaults" not in caplog.messages[0]


def test_what_is_left_out_has_the_trainers_defaults(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE")
    kept = ["--model_type", "hunyuan_hf", "--pretrained_model_name_or_path", "x", "--use_group", "--max_train_steps",
        "4",
            "--train_batch_size", "2"]  # fmt: skip
    config = parsed(*kept)
    expected = {
        "fsdp": None, "num_generations": 16, "prompts_per_step": 2, "best_of_n": 4, "lr": 1e-4,
        "timestep_fraction": 1.0, "shift": 1.0,
        "max_grad_norm": 2.0, "weight_decay": 0.01, "checkpointing_steps": 4000, "updates_per_rollout": 8,
    }  # fmt: skip
    assert {name: config.get(name) for name in expected} == expected
    # Our names are understood, too, and win.
    config = parsed(*kept, "--lr", "1e-6", "--best_of_n", "4", "--training_type", "lora", "--no-train_log")
    assert (config.optimizer.lr, config.grpo.best_of_n, config.training.training_type) == (1e-6, 4, "lora")
    assert not config.run.train_log


def test_a_launcher_or_an_option_that_splits_weights_is_asked_first(monkeypatch):
    assert parsed(*DANCEGRPO, "--deepspeed").parallel.fsdp is None
    assert parsed(*DANCEGRPO, "--fsdp", "hybrid").parallel.fsdp == "hybrid"
    for theirs, ours in (("full", "full"), ("none", None)):
        assert parsed(*DANCEGRPO, "--fsdp_sharding_startegy", theirs).parallel.fsdp == ours
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert parsed(*DANCEGRPO).parallel.fsdp is None


def test_a_method_or_a_preset_makes_it_a_command_of_ours():
    for named in (["--method", "grpo"], ["--grpo_preset", "dancegrpo", "--method", "grpo"]):
        config = parsed(*DANCEGRPO, *named)
        assert (config.training.training_type, config.grpo.dancegrpo_files) == ("lora", False)
    with refused_options(("--model_type", "unknown")):
        parsed("--model_type", "wan", "--pretrained_model_name_or_path", "x")


def test_what_its_trainer_does_that_flags_do_not_say(caplog, monkeypatch):
    """Schedules never decay there, prompts are dropped by default, and weights are reduced after every clip."""
    at = DANCEGRPO.index("--cfg")
    flags = [*DANCEGRPO[:at], *DANCEGRPO[at + 2 :]]
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config = parsed(*flags, "--lr_scheduler", "cosine")
    assert config.optimizer.lr_scheduler == "constant_with_warmup"
    said = [message for message in caplog.messages if "there" in message]
    assert any(message.startswith("--lr_scheduler cosine") for message in said)
    assert any("without --cfg" in message for message in said)
    caplog.clear()
    assert parsed(*DANCEGRPO, "--lr_scheduler", "constant").optimizer.lr_scheduler == "constant"
    assert not any(
        "without --cfg" in message or "--lr_scheduler constant" in message for message in caplog.messages[1:]
    )
    for strategy, syncs in (("full", True), ("none", False)):
        config = parsed(*DANCEGRPO, "--fsdp_sharding_startegy", strategy)
        assert config.parallel.sync_each_batch is syncs
    assert parsed(*DANCEGRPO, "--no-sync_each_batch").parallel.sync_each_batch is False
    assert parsed(*DANCEGRPO, "--no-enable_tiling").model.enable_tiling is False
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert parsed(*DANCEGRPO).parallel.sync_each_batch is False
