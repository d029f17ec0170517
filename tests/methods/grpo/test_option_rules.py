"""Rules between the options of reward finetuning: every message names the setting, shows the sum, and the way out."""

import re
from dataclasses import replace

import pytest

from finetrainers.config.checks.options import check_config
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.hacking import HackingRule, hacking_rule
from finetrainers.config.load import load_config
from finetrainers.config.prompts import parse_validation_prompts
from finetrainers.config.root import fields
from finetrainers.methods.registry import is_method, method_spec
from finetrainers.utils.launch import launched_processes

MODEL = {"model_name": "m", "pretrained_model_name_or_path": "repo"}
BASE = {
    **MODEL, "method": "grpo", "prompts": "p.txt", "reward": ["brightness"], "rollout_size": "17x64x64",
    "train_steps": 100,
}  # fmt: skip
NFT = {"method": "nft"}
AWM = {"method": "awm"}
REFL = {"method": "refl", "num_generations": 1}
GEOMETRY = Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25.0)
FLOW = Facts(GEOMETRY, is_flow=True, first_frame="tokens")
VP = Facts(GEOMETRY, is_flow=False, first_frame="none")


def findings(family=FLOW, world_size=1, base=BASE, **options):
    config = load_config(**{**base, **options})
    prompts = parse_validation_prompts(config.validation)
    method = method_spec(config) if is_method(config.training.method) else None
    unread = {} if method is None else method.unread
    found = check_config(config, facts=family, prompts=prompts, world_size=world_size, unread=unread)
    if method is not None:
        found.add(
            method.option_rules(
                config, family, world_size=config.parallel.data_size(world_size or launched_processes())
            )
        )
    return found


@pytest.mark.parametrize(
    "options", [{}, NFT, AWM, REFL, {"training_type": "full-finetune"}, {"best_of_n": 4}, {"window_size": 0}]
)
@pytest.mark.parametrize("family", [FLOW, VP])
def test_a_plain_run_has_no_findings(family, options):
    found = findings(family, **options)
    assert [text for text in found.warnings if "in memory" not in text] == []
    assert found.errors == []


@pytest.mark.parametrize(
    ("options", "where", "kind", "value"),
    [
        ({"prompts": None}, "prompts", "required", "--prompts FILE"),
        ({"reward": []}, "reward", "required", "--reward NAME[=WEIGHT]"),
        ({"rollout_size": None}, "rollout_size", "required", "FRAMESxHEIGHTxWIDTH"),
        ({"rollout_size": "16x64x64"}, "rollout_size", "invalid", "16x64x64: 16 frames "),
        ({"train_steps": None}, "train_steps", "required", "number of"),
        ({"reward": ["a=0", "b=0"]}, "reward", "invalid", "weights are 0"),
        ({"reward": ["a=1", "a=2"]}, "reward", "duplicate", "a is"),
        ({"reward": ["a,p=1,q=2", "a=2,q=2,p=1"]}, "reward", "duplicate", "a is"),
        ({"reward": ["a,every=2", "b=0"]}, "reward", "invalid", "`every`"),
        ({"num_generations": 1, "batch_size": 8}, "num_generations", "invalid", "2 or more"),
        ({"best_of_n": 10}, "best_of_n", "conflict", "10 of 8 clips"),
        ({"prompts_per_step": 1, "best_of_n": 2, "updates_per_rollout": 4}, "updates_per_rollout", "conflict",
         "1 prompt x 2 clips = 2;"),
        ({"updates_per_rollout": 3, "train_steps": 100, "checkpointing_steps": 0, "prompts_per_step": 6},
         "train_steps", "conflict", "99 or 102"),
        ({"updates_per_rollout": 2, "checkpointing_steps": 1}, "checkpointing_steps", "conflict", "use 2"),
        ({"window_size": 9}, "window_size", "conflict",
         "of 10 --sampling_steps, --window_range 0 0.5 holds 5 steps (0 to 4),"),
        ({"window_size": 9}, "window_size", "conflict", "most 5,"),
        ({"sampling_sigmas": [1, 0.5], "sampling_steps": 3}, "sampling_sigmas", "conflict", "holds 2, and"),
        ({"sampling_sigmas": [0.6, 0.5, 0.1], "sampling_steps": 3}, "sampling_sigmas", "invalid", "0.6"),
        ({"sampling_sigmas": [1, 0.5, 0.5], "sampling_steps": 3}, "sampling_sigmas", "invalid", "1 0.5 0.5"),
        ({"sampling_sigmas": [1, 0.5, 0.2], "sampling_steps": 3, "shift": 2}, "sampling_sigmas", "conflict", "--shift"),
        ({"window_size": 16, "window_range": [0, 1]}, "window_size", "conflict", "9 steps (0 to 8)"),
        ({"window_range": [0.97, 1.0]}, "window_size", "conflict", "0 steps, and"),
        ({"window_range": [0.5, 0.5]}, "window_range", "invalid", "0.5 0.5"),
        ({"window_strategy": "progressive", "window_stride": 3}, "window_stride", "conflict", "at most 2"),
        ({"timestep_fraction": 0.4}, "timestep_fraction", "invalid", "0.4 of 2 "),
        ({"sampler": "ode"}, "sampler", "unsupported", "--method nft"),
        ({"eta": 0}, "eta", "invalid", "more than 0, or --method nft"),
        ({"sampler": "cps", "eta": 1.2}, "eta", "invalid", "up to 1, got 1.2"),
        ({"method": "nft", "init_same_noise": True}, "init_same_noise", "unsupported", "--no-init_same_noise"),
        ({**NFT, "sampler": "flow"}, "sampler", "unsupported", "use ode"),
        ({"method": "awm", "init_same_noise": True}, "init_same_noise", "unsupported", "--no-init_same_noise"),
        ({**NFT, "noise_level_range": [0.5, 0.5]}, "noise_level_range", "conflict", "10 --sampling_steps"),
        ({**NFT, "old_policy_decay": [0, 0.1, 1.0]}, "old_policy_decay", "invalid", "uphold 1:"),
        ({**REFL, "draft_k": 11}, "draft_k", "conflict", "10 --sampling_steps; "),
        ({**REFL, "updates_per_rollout": 2}, "updates_per_rollout", "unsupported", "--method refl"),
        ({**REFL, "best_of_n": 2}, "best_of_n", "unsupported", "--method refl"),
        ({**REFL, "refl_kind": "refl", "refl_range": [0.9, 0.9]}, "refl_range", "conflict", "of 10 --sampling_steps"),
        ({**REFL, "draft_k": 2, "sp_size": 2}, "draft_k", "conflict", "--sp_size 1"),
        ({"draft_k": 2}, "method", "unsupported", "--draft_k; add --method refl"),
        ({"eval_reward": ["b"]}, "eval_reward", "required", "--eval_prompts FILE"),
        ({"eval_steps": 5}, "eval_steps", "required", "--eval_prompts FILE"),
        ({"data_root": "clips"}, "data_root", "unsupported", "--prompts FILE"),
        ({"dataset_file": "clips.csv"}, "dataset_file", "unsupported", "--prompts FILE"),
        ({"video_resolution_buckets": ["17x64x64"]}, "video_resolution_buckets", "unsupported", "--rollout_size FxHxW"),
        ({"image_resolution_buckets": ["64x64"]}, "image_resolution_buckets", "unsupported", "--rollout_size 1xHxW"),
        ({"scale_lr": True}, "scale_lr", "unsupported", "--prompts_per_step x --num_generations"),
        ({"validation_epochs": 1, "validation_prompts": "a"}, "validation_epochs", "unsupported",
         "--validation_steps"),
    ],
)  # fmt: skip
def test_errors(options, where, kind, value):
    [problem] = findings(**options).errors
    assert (problem.where, problem.kind) == (f"--{where}", kind)
    assert value in problem.message


@pytest.mark.parametrize(
    ("world_size", "options", "values"),
    [
        (6, {}, ("4 prompts x 8 clips = 32 ", "6 processes x batches of 1 = 6; use 6,")),
        (1, {"batch_size": 3}, ("4 prompts x 8 clips = 32 ", "1 process x batches of 3 = 3; use 6,")),
        (5, {"batch_size": 2, "num_generations": 12}, (" = 48 ", "5 processes x batches of 2 = 10; use 5,")),
    ],
)
def test_clips_must_divide(world_size, options, values):
    [problem] = findings(world_size=world_size, **options).errors
    assert (problem.where, problem.kind) == ("--prompts_per_step", "conflict")
    assert [value for value in values if value not in problem.message] == []
    # What is recommended passes.
    prompts = int(re.search(r"use (\d+),", problem.message)[1])
    assert findings(world_size=world_size, **options, prompts_per_step=prompts).errors == []


def test_processes_are_counted_by_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    [problem] = findings(world_size=None).errors
    assert "6 processes" in problem.message


def test_rewards_of_all_processes_on_the_gpu_of_one(monkeypatch):
    for device, processes, warned in (
        ("cuda:1", 4, True),
        ("cuda:4", 4, False),
        ("cuda:0", 1, False),
        ("cpu", 4, False),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        warnings = [text for text in findings(reward_device=device).warnings if text.startswith("--reward_device")]
        assert len(warnings) == warned
        assert all(text.startswith("--reward_device cuda:1: ") and " 4 processes " in text for text in warnings)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"prompts_per_step": 1}, ("1 prompt x 8 clips / 1 update = 8 clips", "fewer than 16")),
        ({"best_of_n": 4, "updates_per_rollout": 2}, ("4 prompts x 4 clips / 2 updates = 8 clips",)),
        ({"updates_per_rollout": 3, "num_generations": 16, "train_steps": 99, "checkpointing_steps": 0},
         ("4 prompts x 16 clips = 64,", "1 process x batches of 1 x 3 --updates_per_rollout = 3")),
        ({"clip_range": 1e-4}, ("--clip_range 0.0001", "--updates_per_rollout 1")),
        ({"updates_per_rollout": 2, "rollout_cfg": 4.5}, ("--rollout_cfg 4.5", "--updates_per_rollout 2")),
        ({"kl_space": "mean"}, ("--kl_space", "--kl_coef is 0")),
        ({"kl_coef": 0.1, "training_type": "full-finetune"}, ("--kl_coef 0.1", "full-finetune", "in memory")),
        ({**NFT, "nft_kl": 0.0, "training_type": "full-finetune"}, ("--method nft", "full-finetune", "in memory: ")),
        ({**AWM, "training_type": "full-finetune"}, ("--method awm", "in memory: the EMA of --old_policy_kl")),
        ({**AWM, "clip_range": 0.1}, ("--clip_range 0.1", "--updates_per_rollout 1")),
        ({**AWM, "matching_loss": "t", "matching_power": 0.5}, ("--matching_power", "--matching_loss ghuber")),
        ({**AWM, "nft_beta": 0.1}, ("--nft_beta", "--method awm")),
        ({"nft_beta": 0.1}, ("--nft_beta", "--method grpo")),
        ({**NFT, "kl_coef": 0.1}, ("--kl_coef", "--method nft")),
        ({**NFT, "window_size": 0}, ("--window_size", "--method nft")),
        ({"window_size": 0, "window_range": [0, 0.2]}, ("--window_range", "--window_size is 0")),
        ({"window_every": 5}, ("--window_every", "--window_strategy progressive")),
        ({"eta": 3.0}, ("--eta 3 ", "--sampler flow", "0.25 and 1.5")),
        ({"eval_prompts": "e.txt"}, ("--eval_prompts", "--eval_steps")),
        ({"eval_prompts": "p.txt", "eval_steps": 5}, ("--eval_prompts", "--prompts,")),
        ({"caption_dropout_p": 0.1}, ("--caption_dropout_p", "--method grpo")),
        ({"target_fps": 8}, ("--target_fps", "--method grpo; --reward_fps ")),
        ({"flow_shift": 3.0}, ("--flow_shift", "--method grpo; --shift ")),
        ({"flow_weighting_scheme": "logit_normal"}, ("--flow_weighting_scheme", "--method grpo")),
        ({"precompute_conditions": True}, ("--precompute_conditions", "--method grpo; prompts ")),
        ({"dataloader_num_workers": 2}, ("--dataloader_num_workers", "--method grpo")),
        ({"eval_num_items": 2}, ("--eval_num_items", "--method grpo")),
        ({"train_epochs": 2}, ("--train_epochs 2", "--train_steps")),
        ({"ema_decay": 0.5}, ("--ema_decay", "--use_ema")),
    ],
)  # fmt: skip
def test_settings_without_effect_and_doubtful_ones_are_warnings(options, values):
    found = findings(**options)
    assert found.errors == []
    [warning] = found.warnings
    assert [value for value in values if value not in warning] == []


def test_rules_of_models_that_are_no_flows():
    for options in ({}, NFT):
        assert [(p.where, p.kind) for p in findings(VP, shift=3.0, **options).errors] == [("--shift", "unsupported")]
    assert findings(VP, sampler="dance").warnings[0].startswith("--sampler dance ")
    assert findings(VP, sampler="ddim").warnings == []
    [problem] = findings(VP, eta=1.5).errors
    assert (problem.where, problem.kind) == ("--eta", "invalid")
    assert "ddim" in problem.message
    assert "up to 1, got 1.5" in problem.message


def test_guidance_is_for_networks_that_take_it():
    errors = findings(rollout_guidance=6.0).errors
    assert [(p.where, p.kind) for p in errors] == [("--rollout_guidance", "unsupported")]
    assert findings(replace(FLOW, guidance=6.0), rollout_guidance=6.0).errors == []


def test_the_same_reward_may_stand_twice_with_other_options():
    assert findings(reward=["color,target=red", "color,target=blue"]).errors == []


def test_caches_of_prompts_have_a_place():
    found = findings(precompute_dir="cache")
    assert (found.errors, found.warnings) == ([], [])


def test_validation_samples_are_checked_as_ever():
    [scheduled] = findings(validation_steps=5).errors
    assert (scheduled.where, scheduled.kind) == ("--validation_prompts", "required")
    [size] = findings(validation_prompts="a dog@@@50x64x64").errors
    assert (size.where, size.kind) == ("--validation_prompts", "invalid")
    assert "50 frames" in size.message


def test_options_of_grpo_need_the_method():
    base = {**MODEL, "data_root": "clips"}
    [problem] = findings(base=base, prompts="p.txt", reward=["brightness"], window_size=4).errors
    assert (problem.where, problem.kind) == ("--method", "unsupported")
    assert "--prompts, --reward, --window_size; add --method grpo " in problem.message
    assert findings(base=base).errors == []


def test_other_methods_keep_the_rules_of_clips():
    found = findings(base={**MODEL, "method": "mine"}, caption_dropout_technique="zero")
    assert [(p.where, p.kind) for p in found.errors] == [("--data_root", "required")]
    assert "--caption_dropout_p is 0" in found.warnings[0]


#: A value other than the default of every option of [data] and [diffusion].
CLIP_OPTIONS = {
    "eval_dataset_file": "e.csv",
    "data_root": "x", "dataset_file": "x", "video_column": "x", "caption_column": "x", "id_token": "x",
    "image_resolution_buckets": ["64x64"], "video_resolution_buckets": ["17x64x64"], "video_reshape_mode": "none",
    "frame_selection": "middle", "video_backend": "pyav", "sliding_window_size": 17, "sliding_window_stride": 4,
    "sliding_window_latents": "slice", "sliding_window_batching": "clip", "target_fps": 8, "caption_dropout_p": 0.5,
    "caption_dropout_technique": "zero",
    "remove_common_llm_caption_prefixes": True, "precompute_conditions": True, "precompute_batch_size": 2,
    "first_frame_conditioning_p": 0.5,
    "first_frame_noise": False, "frame_conditioning": "last=0.1", "window_context": 1,
    "max_bad_samples": 1, "max_pixels": 10**9, "probe_dir": "x", "max_bad_share": 0.5, "eval_num_items": 1,
    "flow_resolution_shifting": True, "flow_base_seq_len": 10,
    "flow_max_seq_len": 20, "flow_base_shift": 0.1, "flow_max_shift": 0.2, "flow_shift": 2.0,
    "sample_posterior": False, "repeat_id_token": True,
    "flow_weighting_scheme": "mode", "flow_logit_mean": 0.1, "flow_logit_std": 2.0, "flow_mode_scale": 1.0,
    "loss_weight_max": 2.0, "resolutions": [512], "frame_buckets": [17], "min_ar": 0.6, "max_ar": 3.0,
    "num_ar_buckets": 3,
    "bucket_keep_prob": ["17x64x64=0.5"], "bucket_fall_shorter": True, "dataset": "x", "hf_dataset": "x",
    "hf_subset": "x", "hf_split": "x",
    "hf_revision": "x", "hf_streaming": True, "max_items": 1, "allow_outside": True, "caption_columns": ["x"],
    "extra_columns": ["control_video=x"],
    "caption_lines": True, "caption_missing": "skip", "mask_column": "x", "unmasked_weight": 0.5,
}  # fmt: skip


def test_every_option_of_clips_is_answered():
    """It is refused, or said to do nothing."""
    sections = ("data", "diffusion")
    assert {name for name, option in fields().items() if option.section in sections} == {
        *CLIP_OPTIONS,
        "precompute_dir",
    }
    for name, value in CLIP_OPTIONS.items():
        found = findings(**{name: value})
        told = [*map(str, found.errors), *found.warnings]
        assert len(told) == 1, (name, told)
        assert told[0].startswith(f"--{name}"), told


HELD_OUT = {"eval_prompts": "e.txt", "eval_steps": 10}


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, ["--eval_prompts", "--eval_steps", "--eval_reward", "--kl_coef"]),
        (HELD_OUT, ["--eval_reward", "--kl_coef"]),
        ({**HELD_OUT, "eval_reward": ["brightness"]}, ["--eval_reward", "--kl_coef"]),
        ({"eval_prompts": "e.txt", "eval_reward": ["contrast"]}, ["--eval_steps", "--kl_coef"]),
        ({**NFT, "nft_kl": 0.0}, ["--eval_prompts", "--eval_steps", "--eval_reward", "--nft_kl"]),
    ],
)
def test_a_guard_against_hacking_needs_something_to_judge_by(options, flags):
    """Where all witnesses are trained, there are none."""
    options = {**options, "reward": ["brightness", "motion", "sharpness", "saturation"]}
    (error,) = [error for error in findings(**options, hacking_guard="stop").errors if error.where == "--hacking_guard"]
    assert error.kind == "required"
    assert error.message.startswith("stop ")
    assert re.findall(r"--\w+", error.message) == flags
    assert "--hacking_guard" not in str(findings(**options))
    assert hacking_rule(load_config(**{**BASE, **options})) is None


@pytest.mark.parametrize(
    ("options", "held_out", "every"),
    [
        ({**HELD_OUT, "eval_reward": ["contrast", "brightness"]}, ("contrast",), 10),
        ({**HELD_OUT, "reward": ["brightness", "contrast=0"]}, ("contrast",), 10),
        ({"kl_coef": 0.1, "updates_per_rollout": 2}, (), 20),
        ({**HELD_OUT, "kl_coef": 0.1, "eval_reward": ["brightness"]}, (), 10),
        ({"eval_prompts": "e.txt", "kl_coef": 0.1, "eval_reward": ["contrast"]}, (), 10),
        (NFT, (), 10),
    ],
)
def test_what_hacking_is_judged_by(options, held_out, every):
    given = {**BASE, **options}
    watching = ("motion", "sharpness", "saturation")
    updates = options.get("updates_per_rollout", 1)
    assert hacking_rule(load_config(**given)) == HackingRule("warn", held_out, 2, every, watching, 4, updates)
    assert hacking_rule(load_config(**given, hacking_guard="stop")).action == "stop"
    assert hacking_rule(load_config(**given, hacking_guard="off")) is None
    assert [error for error in findings(**options, hacking_guard="warn").errors if "hacking" in str(error)] == []


def test_options_that_compare_clips_have_no_effect_on_reward_gradients():
    found = findings(**REFL, window_size=3, advantage_clip=2.0, eta=0.5, grpo_preset="flow-grpo", init_same_noise=False)
    for name in ("window_size", "advantage_clip", "eta", "grpo_preset", "init_same_noise"):
        assert [text.endswith("--method refl") for text in found.warnings if text.split()[0] == f"--{name}"] == [True]
    found = findings(**REFL, refl_kind="refl", draft_k=3, kl_coef=0.1, training_type="full-finetune")
    (draft,) = (text for text in found.warnings if text.startswith("--draft_k "))
    assert draft.endswith("--refl_kind draft")
    assert any(text.startswith("--kl_coef 0.1 with full-finetune ") for text in found.warnings)
    assert found.errors == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [9]), ({"draft_k": 3}, [7, 8, 9]), ({"draft_k": 10}, range(10)), ({"refl_kind": "draft-lv"}, [9]),
        ({"refl_kind": "refl"}, [8, 9]), ({"refl_kind": "refl", "refl_range": [0.2, 0.5]}, [2, 3, 4]),
    ],
)  # fmt: skip
def test_steps_that_a_reward_is_backpropagated_through(options, expected):
    section = load_config(**{**BASE, **REFL, **options}).refl
    assert list(section.gradient_steps(10)) == list(expected)
