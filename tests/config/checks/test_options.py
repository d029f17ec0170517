"""Rules between options: every message names the setting, its value and the way out."""

from dataclasses import replace

import pytest
from refusals import refused_options

from finetrainers.config.checks.frames import media_problems
from finetrainers.config.checks.options import check_config, quantization_problems
from finetrainers.config.errors import Problem
from finetrainers.config.facts import Facts
from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config
from finetrainers.config.prompts import parse_validation_prompts

BASE = {"model_name": "m", "pretrained_model_name_or_path": "repo", "data_root": "clips"}
GEOMETRY = Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25.0)
FLOW = Facts(GEOMETRY, is_flow=True, first_frame="tokens", least_steps=2, heads=32)
VP = Facts(GEOMETRY, is_flow=False, first_frame="none")


def findings(family=FLOW, **options):
    config = load_config(**{**BASE, **options})
    return check_config(config, facts=family, prompts=parse_validation_prompts(config.validation))


@pytest.mark.parametrize(
    ("options", "where", "kind", "value"),
    [
        ({"video_resolution_buckets": ["48x512x768"]}, "video_resolution_buckets", "invalid", "41 or 49"),
        ({"video_resolution_buckets": ["768x512x49"]}, "video_resolution_buckets", "invalid",
         " 49x512x768?"),
        ({"validation_prompts": "a dog@@@512x768x49"}, "validation_prompts", "invalid", "prompt 1, 512x768x49: the "),
        ({"video_resolution_buckets": ["49x500x768"]}, "video_resolution_buckets", "invalid",
         "32; use 480 or 512"),
        ({"image_resolution_buckets": ["512x770"]}, "image_resolution_buckets", "invalid",
         "32; use 768 or 800"),
        ({"validation_prompts": "a dog@@@50x512x768"}, "validation_prompts", "invalid",
         "prompt 1, 50x512x768: 50 frames"),
        ({"video_resolution_buckets": ["49x512x768"], "resolutions": ["512"]}, "resolutions", "conflict",
         "--video_resolution_buckets"),
        ({"resolutions": ["512"], "min_ar": 2.0, "max_ar": 0.5}, "min_ar", "conflict", "--max_ar 0.5"),
        ({"bucket_batch_sizes": ["512x768=1", "1x512x768=2"]}, "bucket_batch_sizes", "duplicate", "1x512x768"),
        ({"text_encoder_3_dtype": "bf16"}, "text_encoder_3_dtype", "unsupported", "third"),
        ({"text_encoder_2_dtype": "fp32"}, "text_encoder_2_dtype", "unsupported", "m has"),
        ({"transformer_dtype": "float8_e4m3fn"}, "transformer_dtype", "unsupported",
         "--layerwise_upcasting_modules transformer"),
        ({"training_type": "full-finetune", "layerwise_upcasting_modules": ["transformer"]},
         "layerwise_upcasting_modules", "conflict", "--training_type lora"),
        ({"transformer_dtype": "float8_e4m3fn"}, "transformer_dtype", "unsupported", "--quantize_frozen fp8"),
        ({"lora_autocast": False, "training_type": "full-finetune"}, "lora_autocast", "conflict", "full "),
        ({"lora_autocast": False, "mixed_precision": "bf16"}, "lora_autocast", "conflict", "--mixed_precision bf16"),
        ({"lora_autocast": False, "transformer_dtype": "fp16"}, "lora_autocast", "conflict",
         "--transformer_dtype bf16"),
        ({"lora_autocast": False, "use_dora": True}, "lora_autocast", "conflict", "--use_dora"),
        ({"training_type": "full-finetune", "quantize_frozen": "int8"}, "quantize_frozen", "conflict",
         "--training_type lora"),
        ({"quantize_frozen": "int8", "layerwise_upcasting_modules": ["transformer"]}, "layerwise_upcasting_modules",
         "conflict", "--quantize_frozen"),
        ({"quantize_frozen": "fp8", "use_dora": True}, "use_dora", "conflict", "--quantize_frozen"),
        ({"flow_resolution_shifting": True, "flow_shift": 3.0}, "flow_shift", "conflict",
         "3.0 and --flow_resolution_shifting"),
        ({"flow_resolution_shifting": True, "flow_base_seq_len": 9, "flow_max_seq_len": 9}, "flow_max_seq_len",
         "conflict", "--flow_base_seq_len 9"),
        ({"data_root": None}, "data_root", "required", "--data_root"),
        ({"validation_steps": 5}, "validation_prompts", "required", "prompts; "),
        ({"validation_prompts": "a", "validation_inference_steps": 1}, "validation_inference_steps", "invalid",
         "at least 2, got 1"),
        ({"eval_steps": 5}, "eval_steps", "required", "--eval_num_items"),
        ({"activation_memory": "none", "gradient_checkpointing": True}, "activation_memory", "conflict",
         "--gradient_checkpointing"),
        ({"activation_memory": "none", "selective_checkpointing": 0.3}, "activation_memory", "conflict",
         "--selective_checkpointing"),
        ({"sp_size": 5}, "sp_size", "unsupported", "32 attention heads"),
        ({"sp_size": 5}, "sp_size", "unsupported", "2, 4, 8, 16, 32, or --sp_mode ring"),
        ({"sp_size": 2, "sp_mode": "ring", "attn_backend": "_native_math"}, "sp_mode", "conflict", "_native_math"),
        ({"fsdp": "full", "deepspeed": True}, "deepspeed", "conflict", "--fsdp"),
        ({"fsdp_group_size": 2}, "fsdp_group_size", "conflict", "--fsdp hybrid"),
    ],
)  # fmt: skip
def test_errors(options, where, kind, value):
    [problem] = findings(**options).errors
    assert (problem.where, problem.kind) == (f"--{where}", kind)
    assert value in problem.message


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"flow_shift": 2.0}, "flow_shift"),
        ({"flow_resolution_shifting": True}, "flow_resolution_shifting"),
        ({"flow_weighting_scheme": "cosmap"}, "flow_weighting_scheme"),
        ({"first_frame_conditioning_p": 0.1}, "first_frame_conditioning_p"),
        ({"validation_prompts": "a", "validation_images": "a.png"}, "validation_images"),
    ],
)
def test_errors_for_variance_preserving_models(options, where):
    assert [(p.where, p.kind) for p in findings(VP, **options).errors] == [(f"--{where}", "unsupported")]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"flow_logit_mean": 0.5}, ("--flow_logit_mean ", "--flow_weighting_scheme logit_normal")),
        ({"flow_base_shift": 0.9}, ("--flow_base_shift ", "without --flow_resolution_shifting")),
        ({"lr_num_cycles": 2}, ("--lr_num_cycles ", "without --lr_scheduler cosine_with_restarts")),
        ({"lr_scheduler": "cosine", "lr_power": 2.0}, ("--lr_power ", "without --lr_scheduler polynomial")),
        ({"spike_window": 9, "spike_sigma": 0}, ("--spike_window ", "--spike_sigma is 0")),
        ({"training_type": "full-finetune", "rank": 8}, ("--rank ", "--training_type lora")),
        ({"ema_decay": 0.5}, ("--ema_decay ", "without --use_ema")),
        ({"async_checkpointing": True, "checkpointing_steps": 0}, ("--async_checkpointing", "--checkpointing_steps 0")),
        ({"max_nonfinite_steps": 3}, ("--max_nonfinite_steps ", "--on_nonfinite skip")),
        ({"min_ar": 0.6}, ("--min_ar ", "without --resolutions")),
        ({"resolutions": [512], "num_ar_buckets": 0, "max_ar": 3.0}, ("--max_ar ", "--num_ar_buckets is 0")),
        ({"bucket_fall_shorter": True}, ("--bucket_fall_shorter ", "without --bucket_keep_prob")),
        ({"scale_lr": True, "bucket_batch_sizes": ["1x64x64=2"]}, ("--scale_lr ", "not --bucket_batch_sizes")),
        ({"sp_mode": "ring"}, ("--sp_mode ", "--sp_size is 1")),
        ({"zero_stage": 3}, ("--zero_stage ", "without --deepspeed")),
        ({"fsdp": "full", "sync_each_batch": True}, ("--sync_each_batch ", "without --gradient_accumulation_steps")),
        ({"train_epochs": 3, "train_steps": 5}, ("--train_epochs 3 ", "by --train_steps")),
        ({"precompute_conditions": True, "frame_selection": "random"}, ("--precompute_conditions", "epoch")),
        ({"caption_dropout_technique": "zero"}, ("--caption_dropout_technique ", "--caption_dropout_p is 0")),
        ({"eval_num_items": 2}, ("--eval_num_items 2 ", "--eval_steps")),
        ({"layerwise_upcasting_storage_dtype": "float8_e5m2"},
         ("--layerwise_upcasting_storage_dtype ", "without --layerwise_upcasting_modules")),
        ({"quantize_skip_modules": ["norm"]}, ("--quantize_skip_modules ", "without --quantize_frozen")),
        ({"lora_autocast": False, "transformer_dtype": "fp32"}, ("--no-lora_autocast ", "--transformer_dtype fp32")),
        ({"precompute_dir": "x"}, ("--precompute_dir ", "without --precompute_conditions")),
        ({"selective_checkpointing": 0.1}, ("--selective_checkpointing 0.1 ", "90%")),
    ],
)  # fmt: skip
def test_settings_without_effect_are_warnings(options, values):
    found = findings(**options)
    assert found.errors == []
    [warning] = found.warnings
    assert [value for value in values if value not in warning] == []


def test_a_precision_of_the_environment_is_said_where_it_decides(monkeypatch):
    def warnings(**options):
        return findings(video_resolution_buckets=["49x512x768"], train_steps=5, **options).warnings

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    [warning] = warnings()
    assert "ACCELERATE_MIXED_PRECISION" in warning
    assert warnings(mixed_precision="bf16") == warnings(transformer_dtype="fp16") == []


def test_a_plain_configuration_has_no_findings():
    found = findings(video_resolution_buckets=["49x512x768"], train_steps=5)
    assert (found.errors, found.warnings) == ([], [])


def test_geometry_counts_latents_and_tokens():
    assert GEOMETRY.latent_shape(49, 512, 768) == (7, 16, 24)
    assert GEOMETRY.num_tokens(49, 512, 768) == 2688
    assert Geometry(4, 8, 2, 2, 16).num_tokens(49, 480, 720) == 7 * 30 * 45


def prompts(**options):
    return parse_validation_prompts(load_config(**BASE, **options).validation)


def test_prompt_syntax():
    found = prompts(validation_prompts="a cat@@@49x512x768:::no size:::mail me @@@ home@@@ 17x64x64 :::empty@@@")
    assert [(p.prompt, p.size) for p in found] == [
        ("a cat", (49, 512, 768)),
        ("no size", None),
        ("mail me @@@ home", (17, 64, 64)),
        ("empty", None),
    ]


def test_prompt_media_must_match_in_number():
    assert [
        p.image for p in prompts(validation_prompts="a|b", validation_separator="|", validation_images="x.png| ")
    ] == [
        "x.png",
        None,
    ]
    with refused_options(("--validation_videos", "conflict")) as caught:
        prompts(validation_prompts="a:::b", validation_videos="v.mp4")
    assert "1 entry for 2 prompts" in str(caught.value)
    with refused_options(("--validation_images", "required")):
        prompts(validation_images="x.png")
    config = load_config(**BASE, validation_prompts="a:::b", validation_images="x:::y:::z", validation_steps=1)
    with refused_options(("--validation_images", "conflict")):
        parse_validation_prompts(config.validation)
    assert not check_config(config, facts=FLOW, prompts=[]).errors  # the prompts are not missing


def test_control_videos_have_the_names_of_the_checkpoint(tmp_path):
    plain, named = prompts(validation_prompts="a:::b", validation_videos="v.mp4:::depth=d.mp4,pose=p,q.mp4")
    assert (plain.videos, named.videos) == ({"": "v.mp4"}, {"depth": "d.mp4", "pose": "p,q.mp4"})
    for media, wrong in {("depth", "pose"): [plain], ("depth",): [named], (): [named]}.items():
        found = [list(media_problems([p], replace(FLOW, media=media), model="x")) for p in (plain, named)]
        assert [[(medium, kind) for medium, _, kind in problems] for problems in found] == [
            [("video", "required" if media else "unsupported")] if p in wrong else [] for p in (plain, named)
        ]
    (tmp_path / "a=b.mp4").touch()
    assert prompts(validation_prompts="a", validation_videos=str(tmp_path / "a=b.mp4"))[0].videos.keys() == {""}


def test_prompt_files(tmp_path):
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a", "size": "17x64x64", "image": "i.png"}\n\n"b"\n')
    assert [(p.prompt, p.size, p.image) for p in prompts(validation_prompts=str(lines))] == [
        ("a", (17, 64, 64), "i.png"),
        ("b", None, None),
    ]
    table = tmp_path / "p.toml"
    table.write_text('[[prompts]]\nprompt = "a"\nsise = "17x64x64"\n')
    with refused_options((f"{table} entry 1", "unknown")) as caught:
        prompts(validation_prompts=str(table))
    assert "'sise'" in str(caught.value)
    with refused_options(("--validation_prompts", "not_found")) as caught:
        prompts(validation_prompts="none.jsonl")
    assert "none.jsonl" in str(caught.value)
    with refused_options(("--validation_prompts", "invalid")) as caught:
        prompts(validation_prompts="a@@@17x64")
    assert "got '17x64'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "place", "kind", "value"),
    [
        ("p.jsonl", '{"prompt": 5}', " entry 1", "invalid", "prompt: "),
        ("p.jsonl", '{"prompt": "a", "size": 5}', " entry 1", "invalid", "size: "),
        ("p.jsonl", '{"prompt": "a", "size": [9, 64]}', " entry 1", "required", "size: "),
        ("p.jsonl", '{"prompt": "a", "image": ["x"]}', " entry 1", "invalid", "image: must be"),
        ("p.toml", '[prompts]\nprompt = "a"', "", "required", "[[prompts]]"),
        ("p.toml", 'prompts = "a"', "", "required", "[[prompts]]"),
        ("p.toml", "caf\u00e9 = 1".encode("latin-1"), None, "unreadable", "p.toml:1: "),
        ("p.jsonl", "{", "", "unreadable", "column 2"),
    ],
)
def test_prompt_files_of_another_form_are_refused(name, content, place, kind, value, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    where = "--validation_prompts" if place is None else f"{tmp_path / name}{place}"
    with refused_options((where, kind)) as error:
        prompts(validation_prompts=str(tmp_path / name))
    assert value in str(error.value)


def test_paths_of_prompts_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "video": "~/v.mp4"}')
    [prompt] = prompts(validation_prompts="~/p.jsonl", validation_images="~/i.png")
    assert (prompt.image, prompt.video) == (f"{tmp_path}/i.png", f"{tmp_path}/v.mp4")
    [prompt] = prompts(validation_prompts="a", validation_images="https://host/~i.png?key=" + "x" * 300)
    assert prompt.image == "https://host/~i.png?key=" + "x" * 300


def test_an_image_to_video_checkpoint_wants_an_image_per_prompt():
    facts = Facts(GEOMETRY, is_flow=False, first_frame="channels")
    [problem] = findings(facts, validation_prompts="a:::b", validation_images="x.png::: ").errors
    assert (problem.where, problem.kind) == ("--validation_images", "required")
    unknown = Facts(GEOMETRY, is_flow=False, first_frame="unknown")
    assert findings(unknown, validation_prompts="a").errors == []


def test_nf4_needs_cuda_and_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(device_type: str, kind: str = "nf4") -> list[Problem]:
        config = load_config(**BASE, quantize_frozen=kind)
        return [*quantization_problems(config, device_type=device_type)]

    assert problems("cuda") == problems("cpu", "int8") == []
    (device,) = problems("cpu")
    assert (device.where, device.kind) == ("--quantize_frozen nf4", "unsupported")
    assert "int8" in device.message
    monkeypatch.setattr("finetrainers.config.checks.options.find_spec", lambda _: None)
    (missing,) = problems("cuda")
    assert (missing.where, missing.kind) == ("--quantize_frozen nf4", "not_installed")
    assert "pip install bitsandbytes" in missing.message


def test_zero_needs_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetrainers.config.checks.options.find_spec", lambda _: None)
    assert findings().errors == []
    (missing,) = findings(deepspeed=True).errors
    assert (missing.where, missing.kind) == ("--deepspeed", "not_installed")
