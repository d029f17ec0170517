"""DanceGRPO's commands: each of its flags becomes ours, or says what to use instead."""

import logging

import pytest
from published import DANCEGRPO, DANCEGRPO_FLAGS, DANCEGRPO_OTHER_FLAGS
from refusals import refused_options

from finetrainers.config.dialects import aliases
from finetrainers.config.errors import ConfigError
from finetrainers.config.flags import parse_flags
from finetrainers.config.grpo import trained_steps
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.names import INSTEAD, SAME
from finetrainers.config.rewards import RewardEntry
from finetrainers.config.root import fields
from finetrainers.utils.text import plural

BASE = {"model_name": "m", "pretrained_model_name_or_path": "repo", "method": "grpo"}
FLAGS = ["--model_name", "m", "--pretrained_model_name_or_path", "data/HunyuanVideo", "--method", "grpo"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """One process, in an empty folder, whatever started the tests."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)


def load(**options):
    return load_config(**{**BASE, **options})


def problems(**options):
    with pytest.raises(ConfigError) as error:
        load(**options)
    return error.value.problems


def test_every_flag_of_their_trainers_is_known():
    known = {*fields(), *aliases.FOREIGN, *SAME}
    assert [name for name in (*DANCEGRPO_FLAGS, *DANCEGRPO_OTHER_FLAGS) if name not in known] == []


def test_no_name_is_ours_too():
    assert [name for name in aliases.FOREIGN if name in fields()] == []
    tables = (aliases.RENAMED, aliases._ExternalOptions.model_fields, aliases.WITHOUT_EFFECT, aliases.REFUSED)
    assert len(aliases.FOREIGN) == sum(map(len, tables))
    assert all(target in {*fields(), None} for target in aliases.FOREIGN.values())


def test_the_published_script(monkeypatch, caplog):
    """As it stands there, with the two things that its trainer's name says: the method and the model's family."""
    monkeypatch.setenv("WORLD_SIZE", "32")
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config, _ = parse_flags([*FLAGS, "--training_type", "full-finetune", *DANCEGRPO])
    expected = {
        "prompts_per_step": 32, "num_generations": 24, "best_of_n": 8, "updates_per_rollout": 2, "train_steps": 404,
        "checkpointing_steps": 100, "checkpointing_limit": 3, "grpo_preset": "dancegrpo", "window_size": 0,
        "clip_range": 1e-4,
        "reward_combination": "separate", "validation_steps": None, "rollout_size": (53, 480, 480), "lr": 1e-5,
        "seed": 42, "reward_fps": 8.0,
        "init_same_noise": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 1, "vae_id": None,
        "tracker_name": "grpo", "sampler": "dance", "eta": 0.25, "shift": 5.0, "timestep_fraction": 0.6,
    }  # fmt: skip
    assert {name: config.get(name) for name in expected} == expected
    assert config.grpo.reward == [
        RewardEntry(name="videoalign.vq", weight=1.0),
        RewardEntry(name="videoalign.mq", weight=0.0),
    ]
    assert str(config.grpo.prompts) == "data/rl_embeddings/videos2caption.json"
    assert trained_steps(config.grpo) == 9
    said = "\n".join(caplog.messages)
    assert "--use_videoalign, --vq_coef, --mq_coef: " in said
    assert " --grpo_preset dancegrpo " in said
    assert "--max_train_steps 202 and --checkpointing_steps 50 " in said
    assert "of 2 optimizer steps" in said
    for flag in ("model_type", "validation_prompt_dir", "validation_sampling_steps",
                 "ema_start_step", "log_validation", "validation_steps"):  # fmt: skip
        assert f"\n  --{flag} " in said
    assert len(caplog.messages) == 4  # and the seed of the prompts


def test_the_result_survives_the_file_without_the_launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "6")
    config, _ = parse_flags([*FLAGS, *DANCEGRPO])
    monkeypatch.delenv("WORLD_SIZE")
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "config.toml").flat() == config.flat()
    assert config.grpo.prompts_per_step == 6


def test_processes_that_share_a_clip_count_once(monkeypatch):
    """The command of its guide for six GPUs in three pairs: a prompt for each pair."""
    monkeypatch.setenv("WORLD_SIZE", "6")
    given = " ".join(DANCEGRPO).replace("--sp_size 1", "--sp_size 2").split()
    config, _ = parse_flags([*FLAGS, *given])
    assert (config.parallel.sp_size, config.parallel.data_size(6), config.grpo.prompts_per_step) == (2, 3, 3)


def test_names_work_in_files_and_flags_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("h = 256\nw = 256\n[grpo]\nt = 33\nbestofn = 4\n[optimizer]\nlearning_rate = 1e-5\n")
    config, _ = parse_flags([*FLAGS, "--config", str(file), "--h", "128", "--learning_rate", "2e-5"])
    assert (config.grpo.rollout_size, config.grpo.best_of_n, config.optimizer.lr) == ((33, 128, 256), 4, 2e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"learning_rate": 1e-5, "lr": 2e-5}, "learning_rate and lr (lr)"),
        ({"bestofn": 4, "best_of_n": 4}, "bestofn and best_of_n"),
        ({"h": 64, "w": 64, "t": 9, "rollout_size": "9x64x64"}, ", w and rollout_size"),
        ({"use_videoalign": True, "reward": ["brightness"]}, "use_videoalign and reward"),
        ({"max_train_steps": 4, "train_steps": 4}, "max_train_steps and train_steps"),
        (
            {"gradient_accumulation_steps": 2, "updates_per_rollout": 2},
            "gradient_accumulation_steps and updates_per_rollout",
        ),
        ({"use_same_noise": True, "init_same_noise": True}, "use_same_noise and init_same_noise"),
        ({"fps": 8, "reward_fps": 8}, "fps and reward_fps"),
    ],
)
def test_both_names_at_once_are_refused(options, expected):
    [problem] = problems(**options)
    assert problem.where.split(", ")[0] in options
    assert problem.kind == "conflict"
    assert expected in problem.message


def test_the_place_of_both_is_named(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("\nlr = 1e-4\n")
    with refused_options(("--learning_rate", "conflict")) as error:
        parse_flags([*FLAGS, "--config", str(file), "--learning_rate", "1e-5"])
    assert f" lr ({file}:2) " in str(error.value)


def test_a_preset_yields_to_a_name_of_theirs():
    config = load(
        grpo_preset="dancegrpo", bestofn=4, learning_rate=1e-6, train_batch_size=2, gradient_accumulation_steps=4
    )
    # 2 prompts of a process, 4 kept clips of it: 2 a prompt, and one step for all four.
    assert (config.grpo.best_of_n, config.optimizer.lr, config.grpo.prompts_per_step) == (2, 1e-6, 2)
    assert config.grpo.updates_per_rollout == 1


@pytest.mark.parametrize(
    ("kept", "clips", "updates"), [(8, 4, 2), (6, 6, 1), (6, 4, 2), (24, 3, 8), (8, 8, 1), (8, 1, 8)]
)
def test_clips_per_step_become_updates_per_rollout(kept, clips, updates):
    """ceil(kept / clips)."""
    config = load(
        train_batch_size=1, num_generations=24, bestofn=kept, gradient_accumulation_steps=clips, max_train_steps=10
    )
    assert config.grpo.updates_per_rollout == updates
    assert config.training.train_steps == 10 * updates
    assert config.training.gradient_accumulation_steps == 1


def test_one_clip_per_step_is_asked_for_by_dancegrpos_names_only():
    """It is our own default, and stands in every file that a run has written."""
    assert load(gradient_accumulation_steps=1, num_generations=8).grpo.updates_per_rollout == 1
    assert load(gradient_accumulation_steps=1, updates_per_rollout=2, bestofn=4).grpo.updates_per_rollout == 2


def test_rollouts_become_steps_and_checkpoints_with_them(caplog):
    names = {"bestofn": 8, "num_generations": 8, "gradient_accumulation_steps": 4, "train_batch_size": 1}
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config = load(**names, max_train_steps=10, checkpointing_steps="5")
    assert (config.training.train_steps, config.training.checkpointing_steps) == (20, 10)
    assert "max_train_steps 10 and checkpointing_steps 5 " in caplog.text
    assert ": --train_steps 20, --checkpointing_steps 10" in caplog.text
    # Where the length is given by our name, steps are steps.
    config = load(**names, train_steps=10, checkpointing_steps=4)
    assert (config.training.train_steps, config.training.checkpointing_steps) == (10, 4)
    assert load(**names, max_train_steps=10, checkpointing_steps=0).training.checkpointing_steps == 0
    with refused_options(("checkpointing_steps", "invalid")):
        load(**names, max_train_steps=1, checkpointing_steps="x")


def test_dancegrpos_names_choose_its_preset(caplog):
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config = load(bestofn=4, num_generations=8, timestep_fraction=0.5, sampling_steps=12)
        assert "bestofn: " in caplog.text
        assert " --grpo_preset dancegrpo " in caplog.text
        assert (config.grpo.grpo_preset, config.grpo.sampler, trained_steps(config.grpo)) == ("dancegrpo", "dance", 5)
        caplog.clear()
        config = load(use_group=True, sampler="flow", window_size=2)
        assert (config.grpo.grpo_preset, config.grpo.sampler, config.grpo.window_size) == ("dancegrpo", "flow", 2)
        assert config.grpo.eta is None
        caplog.clear()
        # A preset or an algorithm that is named wins, and the contradiction is said.
        assert load(bestofn=4, use_group=True, grpo_preset="flow-grpo").grpo.sampler == "flow"
        assert "bestofn, use_group: " in caplog.text
        assert " --grpo_preset flow-grpo" in caplog.text
        caplog.clear()
        assert load(bestofn=4, method="nft").grpo.grpo_preset is None
        assert "bestofn: " in caplog.text
        assert " --method nft" in caplog.text


def test_clips_per_step_are_those_of_a_process(monkeypatch):
    options = {"prompts_per_step": 8, "num_generations": 4, "gradient_accumulation_steps": 8}
    assert load(**options).grpo.updates_per_rollout == 4
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert load(**options).grpo.updates_per_rollout == 1
    monkeypatch.setenv("WORLD_SIZE", "8")
    [problem] = problems(**options)
    assert (problem.where, problem.kind) == ("gradient_accumulation_steps", "conflict")
    assert "8 prompts x 4 clips / 8 processes = 4;" in problem.message


def test_a_step_that_never_comes_takes_as_many_prompts(monkeypatch, caplog):
    """The guide for six GPUs asks for 8 of 6 clips; its pairs of GPUs accumulate over 8 prompts each."""
    options = {"train_batch_size": 1, "num_generations": 12, "bestofn": 6, "max_train_steps": 202}
    monkeypatch.setenv("WORLD_SIZE", "6")
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config = load(**options, gradient_accumulation_steps=8, checkpointing_steps=50, sp_size=2)
    assert (config.grpo.prompts_per_step, config.grpo.best_of_n, config.grpo.updates_per_rollout) == (24, 6, 1)
    assert (config.training.train_steps, config.training.checkpointing_steps) == (202, 50)
    assert config.training.gradient_accumulation_steps == 1
    assert "gradient_accumulation_steps 8 " in caplog.text
    assert "6 clips" in caplog.text
    assert "--prompts_per_step 24, so 144 clips" in caplog.text
    assert "max_train_steps 202 and checkpointing_steps 50 " in caplog.text
    assert ": --train_steps 202, --checkpointing_steps 50" in caplog.text
    config = load(**options, gradient_accumulation_steps=6, sp_size=2)
    assert (config.grpo.prompts_per_step, config.grpo.updates_per_rollout) == (3, 1)
    [problem] = problems(**options, gradient_accumulation_steps=8, updates_per_rollout=2)
    assert (problem.where, problem.kind) == ("gradient_accumulation_steps", "conflict")
    assert "gradient_accumulation_steps and updates_per_rollout" in problem.message


@pytest.mark.parametrize(
    ("options", "where", "kind", "value"),
    [
        ({"train_sp_batch_size": 2}, "train_sp_batch_size", "unsupported", "--batch_size"),
        ({"train_sp_batch_size": "two"}, "train_sp_batch_size", "invalid", "'two'"),
        ({"cfg": 0.1}, "cfg", "unsupported", "--rollout_cfg"),
        ({"use_group": "false"}, "use_group", "unsupported", "group"),
        ({"master_weight_type": "fp16"}, "master_weight_type", "unknown", "'bf16'? Valid: fp32, bf16"),
        ({"h": 64, "t": 9}, "t", "required", "; w is"),
        ({"vq_coef": 1.0}, "vq_coef", "required", "use_videoalign"),
        ({"vq_coef": 1.0, "use_hpsv2": True}, "vq_coef", "required", "use_videoalign"),
        ({"fsdp_sharding_startegy": "ful"}, "fsdp_sharding_startegy", "unknown", "'full'?"),
        ({"use_videoalign": True, "vq_coef": "much"}, "vq_coef", "invalid", "'much'"),
        ({"train_batch_size": 3, "bestofn": 4}, "bestofn", "conflict", "train_batch_size of 3"),
        ({"train_batch_size": 0}, "train_batch_size", "invalid", "at least 1, got 0"),
        ({"max_train_steps": "all"}, "max_train_steps", "invalid", "'all'"),
        ({"h": 64, "w": 64, "t": "9.5"}, "t, h, w", "invalid", "got '9.5x64x64'"),
        ({"learning_rate": "fast"}, "learning_rate", "invalid", "lr: "),
    ],
)
def test_what_cannot_be_translated_is_one_problem(options, where, kind, value):
    [problem] = problems(**options)
    assert (problem.where, problem.kind) == (where, kind)
    assert value in problem.message


@pytest.mark.parametrize("name", aliases.REFUSED)
def test_dead_flags_say_what_to_use(name):
    with pytest.raises(ConfigError) as error:
        parse_flags([*FLAGS, f"--{name}", "1"])
    [problem] = error.value.problems
    assert (problem.where, problem.kind) == (f"--{name}", "unsupported")
    assert problem.message == aliases.REFUSED[name]
    mentioned = [word.strip(",;").removeprefix("--") for word in problem.message.split() if word.startswith("--")]
    assert [flag for flag in mentioned if flag not in {*fields(), "config_file"}] == []


@pytest.mark.parametrize("name", aliases.WITHOUT_EFFECT)
def test_flags_that_nobody_reads_are_named(name, caplog):
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config, _ = parse_flags([*FLAGS, f"--{name}", "1"])
        assert config == parse_flags(FLAGS)[0]
    [message] = caplog.messages
    assert f"\n  --{name}  {aliases.WITHOUT_EFFECT[name]}" in message
    mentioned = [word.strip(",;").removeprefix("--") for word in message.split() if word.startswith("--")]
    assert [flag for flag in mentioned if flag not in {*fields(), *aliases.FOREIGN}] == []


def test_flags_that_nobody_reads_need_no_value(caplog):
    with refused_options(("--rank", "invalid")):
        parse_flags([*FLAGS, "--log_validation", "--precondition_outputs", "--num_frames", "53", "--rank", "0"])
    assert caplog.text.count("\n  --") == 3


def test_samples_during_training_are_ours_where_there_are_prompts_for_them():
    """DanceGRPO never reads `validation_steps`, which its scripts set to 100000000."""
    assert load(bestofn=4, validation_steps=5).validation.validation_steps is None
    assert load(bestofn=4, validation_steps=5, validation_prompts="a cat").validation.validation_steps == 5
    assert load(validation_steps=5).validation.validation_steps == 5


def test_switches_take_a_word_too():
    config, _ = parse_flags([*FLAGS, "--use_same_noise", "false", "--use_cpu_offload", "false", "--use_group"])
    assert config.grpo.init_same_noise is False
    assert config.parallel.fsdp_cpu_offload is False


def test_memory_options(monkeypatch):
    config = load(use_cpu_offload=True, selective_checkpointing=1.0, master_weight_type="bf16")
    assert (config.parallel.fsdp, config.parallel.fsdp_cpu_offload) == ("full", True), "as in DanceGRPO, which clips"
    assert not config.optimizer.use_cpu_offload_optimizer
    assert (config.memory.stored, config.memory.selective_checkpointing) == ("checkpoint", 1.0)
    assert config.training.master_weights == "stochastic_rounding"
    assert load(selective_checkpointing=0.3).memory.selective_checkpointing == 0.3
    assert load(master_weight_type="fp32").training.master_weights == "fp32"
    assert load(use_cpu_offload=True, fsdp="full").parallel.fsdp_cpu_offload


@pytest.mark.parametrize(
    ("options", "environment", "expected", "said"),
    [
        ({}, {}, {"fsdp": "full", "fsdp_cpu_offload": True}, "--fsdp full --fsdp_cpu_offload"),
        ({"fsdp": "hybrid"}, {}, {"fsdp": "hybrid", "fsdp_cpu_offload": True}, "--fsdp_cpu_offload"),
        ({"deepspeed": True}, {}, {"deepspeed": True, "zero_offload": True, "fsdp": None}, "--zero_offload"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, {"fsdp": None, "fsdp_cpu_offload": True}, "--fsdp_cpu_offload"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, {"zero_offload": True, "fsdp_cpu_offload": False}, "--zero_offload"),
    ],
)
def test_the_engine_of_several_processes_offloads(options, environment, expected, said, monkeypatch, caplog):
    for name, value in {"WORLD_SIZE": "6", **environment}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config = load(use_cpu_offload=True, **options)
    assert {name: config.get(name) for name in expected} == expected
    assert not config.optimizer.use_cpu_offload_optimizer
    assert caplog.messages == [f"use_cpu_offload with 6 processes: {said}"]


@pytest.mark.parametrize(
    ("strategy", "processes", "expected", "flags"),
    [
        ("full", 6, {"fsdp": "full", "fsdp_reshard_after_forward": True}, "--fsdp full"),
        ("hybrid_full", 6, {"fsdp": "hybrid", "fsdp_reshard_after_forward": True}, "--fsdp hybrid"),
        (
            "hybrid_zero2", 6, {"fsdp": "hybrid", "fsdp_reshard_after_forward": False},
            "--fsdp hybrid --no-fsdp_reshard_after_forward",
        ),
        ("none", 6, {"fsdp": None}, ""),
        ("full", 1, {"fsdp": None}, ""),
    ],
)  # fmt: skip
def test_sharding_is_read_as_they_spell_it(strategy, processes, expected, flags, monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config = load(fsdp_sharding_startegy=strategy)
    assert {name: config.get(name) for name in expected} == expected
    [note] = caplog.messages
    place, _, choice = note.partition(": ")
    assert place == f"fsdp_sharding_startegy {strategy} with {plural(processes, 'process', 'processes')}"
    assert choice == flags if flags else "--" not in choice
    offloaded = load(fsdp_sharding_startegy=strategy, use_cpu_offload=True)
    assert offloaded.parallel.fsdp_cpu_offload
    if config.parallel.fsdp is None:
        whole = {"fsdp": "hybrid", "fsdp_group_size": 1} if processes > 1 else {"fsdp": "full", "fsdp_group_size": None}
        assert {name: offloaded.get(name) for name in whole} == whole


def test_what_their_other_trainers_say(caplog):
    options = {"use_lora": True, "lora_rank": 128, "adv_clip_max": 4.0, "cfg_infer": 5.0, "use_pickscore": True}
    config = load(use_hpsv2=True, **options)
    assert (config.training.training_type, config.training.rank) == ("lora", 128)
    assert (config.grpo.advantage_clip, config.grpo.rollout_cfg) == (4.0, 5.0)
    assert [entry.name for entry in config.grpo.reward] == ["hpsv2", "pickscore"]
    assert load(bestofn=5, num_generations=8).grpo.best_of_n == 5
    caplog.clear()
    config = load(bestofn=6, num_generations=8, train_batch_size=1, gradient_accumulation_steps=4)
    assert config.grpo.updates_per_rollout == 2
    assert "DanceGRPO would drop 2 clips" in caplog.text


def test_the_rewards_lie_where_dancegrpo_has_them(tmp_path):
    config = load(use_videoalign=True, mq_coef=0.5)
    assert [entry.options for entry in config.grpo.reward] == [{}, {}]
    assert [entry.weight for entry in config.grpo.reward] == [1.0, 0.5]
    (tmp_path / "videoalign_ckpt").mkdir()
    config = load(use_videoalign=True)
    assert [entry.options for entry in config.grpo.reward] == [{"path": "videoalign_ckpt"}] * 2
    assert [entry.weight for entry in config.grpo.reward] == [1.0, 0.0]


def test_seeds():
    assert load(sampler_seed=7).training.seed == 7
    assert load(sampler_seed=7, seed=3).training.seed == 3


def test_another_place_of_the_vae_counts():
    assert load(vae_model_path="elsewhere").model.vae_id == "elsewhere"
    assert load(vae_model_path="repo").model.vae_id is None


def test_what_is_not_quite_the_same_is_said_once(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        load(bestofn=4, sampler_seed=1, seed=2)
    text = caplog.text
    assert text.count("bestofn: these are DanceGRPO's names") == 1
    assert "sampler_seed 1" in text
    caplog.clear()
    load(bestofn=4, grpo_preset="dancegrpo")
    load(learning_rate=1e-5, h=64, w=64, t=9)
    monkeypatch.setenv("RANK", "1")
    load(bestofn=4)
    assert caplog.text == ""


def test_the_names_are_for_grpo_only(tmp_path):
    with refused_options(("bestofn", "unknown"), ("num_frames", "unknown")) as error:
        load(method="sft", bestofn=4, num_frames=3)
    assert " 'best_of_n', for --method grpo" in str(error.value)
    assert f" 'num_frames'; {INSTEAD['num_frames']}" in str(error.value)
    # Our own names mean the same as ever.
    assert load(method="sft", gradient_accumulation_steps=8).training.gradient_accumulation_steps == 8


def test_typos_still_get_the_nearest_name():
    with refused_options(("--bestof", "unknown"), ("--num_generation", "unknown")) as error:
        parse_flags([*FLAGS, "--bestof", "4", "--num_generation", "8"])
    assert [problem.message.split()[-1] for problem in error.value.problems] == ["--best_of_n?", "--num_generations?"]


def test_help_shows_our_names_alone(capsys):
    with pytest.raises(SystemExit):
        parse_flags(["--help", "all"])
    text = capsys.readouterr().out
    assert "--best_of_n" in text
    assert "--bestofn" not in text
    assert "--h " not in text


def test_what_a_refused_name_would_have_set_is_not_judged():
    """So that its absence is no further problem when the rest is checked."""
    with pytest.raises(ConfigError) as error:
        load(h=64, t=9, train_batch_size="x", max_train_steps=0)
    assert {"rollout_size", "prompts_per_step", "train_steps"} <= error.value.wrong
