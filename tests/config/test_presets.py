"""Presets: published numbers, filled in where the user said nothing."""

import logging
from typing import get_args

import pytest
from refusals import refused_options

from finetrainers.config.checks.options import check_config
from finetrainers.config.facts import Facts
from finetrainers.config.flags import parse_flags
from finetrainers.config.geometry import Geometry
from finetrainers.config.grpo import PresetName, step_range, trained_steps
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.presets import PRESETS, preset_options, preset_tables
from finetrainers.config.root import fields
from finetrainers.methods.registry import method_spec

BASE = {"model_name": "m", "pretrained_model_name_or_path": "repo", "method": "grpo"}
RUN = {
    "prompts": "p.txt",
    "reward": ["brightness"],
    "rollout_size": "17x64x64",
    "train_steps": 400,
    "checkpointing_steps": 0,
}
GEOMETRY = Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25.0)


def load(**options):
    return load_config(**{**BASE, **options})


def test_the_names_are_those_that_the_option_takes():
    assert set(PRESETS) == set(get_args(PresetName))


@pytest.mark.parametrize("name", PRESETS)
def test_every_setting_is_an_option_and_has_a_source(name):
    preset = PRESETS[name]
    for settings in (preset.settings, preset.lora, preset.full):
        for option, (_, source) in settings.items():
            assert option in fields()
            assert source
    assert preset.reference
    assert preset.omitted_settings
    assert {"sampling_steps", "num_generations", "prompts_per_step", "updates_per_rollout"} <= set(preset.settings)


@pytest.mark.parametrize("training_type", ["lora", "full-finetune"])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("is_flow", [True, False])
def test_a_preset_by_itself_runs_and_gives_nothing_in_vain(name, training_type, is_flow):
    config = load(grpo_preset=name, training_type=training_type, **RUN)
    family = Facts(GEOMETRY, is_flow=is_flow, first_frame="none")
    found = check_config(config, facts=family, prompts=[], world_size=8)
    found.add(method_spec(config).option_rules(config, family, world_size=8))
    assert found.errors == []
    assert [text for text in found.warnings if "in memory" not in text and "is published for" not in text] == []


#: As their launch scripts and configurations have them, read there and not in our table.
@pytest.mark.parametrize(
    ("name", "training_type", "expected"),
    [
        ("dancegrpo", "full-finetune",
         {"sampler": "dance", "eta": 0.25, "sampling_steps": 16, "num_generations": 24, "best_of_n": 8, "lr": 1e-5,
          "updates_per_rollout": 2, "clip_range": 1e-4, "timestep_fraction": 0.6, "window_size": 0, "rank": 64}),
        ("dancegrpo", "lora", {"rank": 128, "lora_alpha": 256, "lr": 3e-4}),
        ("flow-grpo", "lora",
         {"sampler": "flow", "eta": 0.7, "sampling_steps": 10, "num_generations": 24, "prompts_per_step": 48,
             "lr": 3e-4,
          "rank": 32, "lora_alpha": 64, "kl_coef": 0.04, "advantage": "global_std", "init_same_noise": False}),
        ("flow-grpo-fast", "lora",
         {"sampler": "cps", "eta": 0.8, "window_size": 3, "window_strategy": "random", "clip_range": 1e-5,
             "kl_coef": 0.0}),
        ("mixgrpo", "full-finetune",
         {"sampler": "flow", "eta": 0.7, "sampling_steps": 25, "window_size": 4, "window_strategy": "progressive",
          "window_every": 25, "window_stride": 1, "num_generations": 12, "updates_per_rollout": 4, "lr": 1e-5}),
        ("nft", "lora",
         {"method": "nft", "nft_beta": 1.0, "nft_kl": 1e-4, "old_policy_decay": [0.0, 0.001, 0.5], "sampling_steps": 10,
          "init_same_noise": False, "lr": 3e-4, "ema_decay": 0.9}),
        ("flash", "lora",
         {"step_weight": "flash", "window_size": 1, "sampling_steps": 20, "clip_range": 1e-3, "lr": 1e-4, "rank": 16}),
    ],
)  # fmt: skip
def test_published_numbers(name, training_type, expected):
    config = load(grpo_preset=name, training_type=training_type)
    assert {option: config.get(option) for option in expected} == expected


def test_what_the_presets_train_is_what_is_published():
    """DanceGRPO trains int(15 * 0.6) steps; Flow-GRPO-Fast's windows are in steps 0 to T // 2, Flash's in 0 to 9."""
    assert trained_steps(load(grpo_preset="dancegrpo").grpo) == 9
    assert trained_steps(load(grpo_preset="flow-grpo").grpo) == 9
    assert list(step_range(load(grpo_preset="flow-grpo-fast").grpo)) == list(range(5))
    assert list(step_range(load(grpo_preset="flash").grpo)) == list(range(10))
    assert list(step_range(load(grpo_preset="mixgrpo").grpo)) == list(range(24))


def test_explicit_options_win_from_wherever_they_come(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('grpo_preset = "dancegrpo"\n[grpo]\nnum_generations = 12\n[optimizer]\nlr = 2e-5\n')
    flags = ["--model_name", "m", "--pretrained_model_name_or_path", "repo", "--method", "grpo"]
    config, _ = parse_flags([*flags, "--config", str(file), "--best_of_n", "6"])
    assert (config.grpo.num_generations, config.grpo.best_of_n, config.optimizer.lr) == (12, 6, 2e-5)
    assert config.grpo.sampler == "dance"
    # Also where the given value is the default of the option.
    assert load(grpo_preset="dancegrpo", num_generations=8).grpo.num_generations == 8


def test_an_amount_of_noise_goes_with_its_sampler():
    assert load(grpo_preset="dancegrpo", sampler="flow").grpo.eta is None
    assert load(grpo_preset="dancegrpo", sampler="dance").grpo.eta == 0.25
    assert load(grpo_preset="dancegrpo", sampler="flow", eta=0.5).grpo.eta == 0.5


def test_a_preset_counts_for_grpo_only():
    assert load(grpo_preset="dancegrpo", method="sft").grpo.num_generations == 8
    assert preset_options({"grpo_preset": "dancegrpo"}) == {}


@pytest.mark.parametrize("name", ["flow-grpo", "flow-grpo-fast", "flash"])
@pytest.mark.parametrize(
    ("options", "environment", "strategy"),
    [
        ({"fsdp": "full"}, {}, "FSDP2"),
        ({"deepspeed": True, "zero_stage": 3}, {}, "ZeRO-3"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "FSDP2"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "ZeRO-3"),
        ({"deepspeed": True}, {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, None),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, None),
    ],
)
def test_an_average_yields_to_a_strategy_that_splits_weights(name, options, environment, strategy, monkeypatch, caplog):
    """Which refuses it; but who asks for one is told that it cannot be."""
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config = load(grpo_preset=name, **options)
    assert config.training.use_ema == (strategy is None)
    assert (f"--grpo_preset {name} without its --use_ema" in caplog.text) == (strategy is not None)
    assert str(strategy) in caplog.text or strategy is None
    assert config.changed("ema_decay") == (strategy is None)
    assert load(grpo_preset=name, use_ema=True, **options).training.use_ema


def test_an_unknown_preset_gets_the_nearest_name():
    with refused_options(("grpo_preset", "unknown")) as error:
        load(grpo_preset="flow_grpo")
    assert " 'flow-grpo'?" in str(error.value)


@pytest.mark.parametrize("options", [{}, {"sampler": "flow"}, {"best_of_n": None}, {"training_type": "full-finetune"}])
@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_preset_survives_the_file(name, options, tmp_path):
    config = load(grpo_preset=name, **options)
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "config.toml").flat() == config.flat()


def test_tables_show_every_setting():
    text = preset_tables()
    assert text.count("\n### `") + text.startswith("### `") == len(PRESETS)
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| option")]
    assert len(rows) == sum(len(p.settings) + len(p.lora) + len(p.full) for p in PRESETS.values())
    assert all(row.count("|") == 4 for row in rows)
    assert "| LoRA: `rank` | `128` | image LoRA script |" in rows
