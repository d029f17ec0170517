"""Rules between options: every message names the setting, its value and the way out."""

import pytest

from finetrainers.config.checks.options import check_config, quantization_problems
from finetrainers.config.errors import ConfigError
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
    ("options", "expected"),
    [
        ({"video_resolution_buckets": ["48x512x768"]}, "48 frames is not 8*k+1; use 41 or 49"),
        (
            {"video_resolution_buckets": ["768x512x49"]},
            "768x512x49: the order is FRAMESxHEIGHTxWIDTH; did you mean 49x512x768?",
        ),
        (
            {"validation_prompts": "a dog@@@512x768x49"},
            "prompt 1, 512x768x49: the order is FRAMESxHEIGHTxWIDTH; did you",
        ),
        ({"video_resolution_buckets": ["49x500x768"]}, "height 500 is not a multiple of 32; use 480 or 512"),
        ({"image_resolution_buckets": ["512x770"]}, "width 770 is not a multiple of 32; use 768 or 800"),
        ({"validation_prompts": "a dog@@@50x512x768"}, "prompt 1, 50x512x768: 50 frames"),
        ({"video_resolution_buckets": ["49x512x768"], "resolutions": ["512"]}, "names every size and length already"),
        ({"resolutions": ["512"], "min_ar": 2.0, "max_ar": 0.5}, "--min_ar: 2 is above --max_ar 0.5"),
        ({"bucket_batch_sizes": ["512x768=1", "1x512x768=2"]}, "1x512x768 is named twice"),
        ({"text_encoder_3_dtype": "bf16"}, "no supported model family has a third text encoder"),
        ({"text_encoder_2_dtype": "fp32"}, "m has one text encoder"),
        ({"transformer_dtype": "float8_e4m3fn"}, "--layerwise_upcasting_modules transformer"),
        ({"training_type": "full-finetune", "layerwise_upcasting_modules": ["transformer"]}, "--training_type lora"),
        ({"transformer_dtype": "float8_e4m3fn"}, "--quantize_frozen fp8"),
        ({"lora_autocast": False, "training_type": "full-finetune"}, "--lora_autocast: full finetuning computes"),
        ({"lora_autocast": False, "mixed_precision": "bf16"}, "--mixed_precision bf16 is the dtype of autocast"),
        ({"lora_autocast": False, "transformer_dtype": "fp16"}, "use --transformer_dtype bf16"),
        ({"lora_autocast": False, "use_dora": True}, "drop --use_dora or --no-lora_autocast"),
        ({"training_type": "full-finetune", "quantize_frozen": "int8"}, "needs --training_type lora"),
        (
            {"quantize_frozen": "int8", "layerwise_upcasting_modules": ["transformer"]},
            "quantized already by --quantize_frozen",
        ),
        ({"quantize_frozen": "fp8", "use_dora": True}, "--use_dora: DoRA needs the norms of the frozen weights"),
        ({"flow_resolution_shifting": True, "flow_shift": 3.0}, "choose one"),
        (
            {"flow_resolution_shifting": True, "flow_base_seq_len": 9, "flow_max_seq_len": 9},
            "must be above --flow_base_seq_len 9",
        ),
        ({"data_root": None}, "give --data_root"),
        ({"validation_steps": 5}, "there are no prompts"),
        (
            {"validation_prompts": "a", "validation_inference_steps": 1},
            "the scheduler of m needs at least 2, got 1",
        ),
        ({"eval_steps": 5}, "set --eval_num_items"),
        (
            {"activation_memory": "none", "gradient_checkpointing": True},
            "none stores all activations, and --gradient_ch",
        ),
        (
            {"activation_memory": "none", "selective_checkpointing": 0.3},
            "and --selective_checkpointing recomputes them",
        ),
        ({"sp_size": 5}, "32 attention heads do not divide by 5 processes; use one of 2, 4, 8, 16, 32"),
        ({"sp_size": 5}, "or --sp_mode ring"),
        (
            {"sp_size": 2, "sp_mode": "ring", "attn_backend": "_native_math"},
            "not by _native_math; leave --attn_backend out",
        ),
        ({"fsdp": "full", "deepspeed": True}, "both split the network"),
        ({"fsdp_group_size": 2}, "groups are for --fsdp hybrid"),
    ],
)
def test_errors(options, expected):
    errors = [str(problem) for problem in findings(**options).errors]
    assert any(expected in message for message in errors), errors
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"flow_shift": 2.0}, "not a flow-matching model"),
        ({"flow_resolution_shifting": True}, "not a flow-matching model"),
        ({"flow_weighting_scheme": "cosmap"}, "predicts v"),
        ({"first_frame_conditioning_p": 0.1}, "takes no first frame"),
        ({"validation_prompts": "a", "validation_images": "a.png"}, "takes no first frame"),
    ],
)
def test_errors_for_variance_preserving_models(options, expected):
    errors = [str(problem) for problem in findings(VP, **options).errors]
    assert any(expected in message for message in errors), errors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"flow_logit_mean": 0.5}, "--flow_logit_mean has no effect"),
        ({"flow_base_shift": 0.9}, "without --flow_resolution_shifting"),
        ({"lr_num_cycles": 2}, "--lr_num_cycles has no effect without --lr_scheduler cosine_with_restarts"),
        ({"lr_scheduler": "cosine", "lr_power": 2.0}, "--lr_power has no effect without --lr_scheduler polynomial"),
        ({"spike_window": 9, "spike_sigma": 0}, "--spike_window has no effect while --spike_sigma is 0"),
        ({"training_type": "full-finetune", "rank": 8}, "--rank has no effect"),
        ({"ema_decay": 0.5}, "without --use_ema"),
        ({"async_checkpointing": True, "checkpointing_steps": 0}, "the run waits for its last checkpoint"),
        ({"max_nonfinite_steps": 3}, "without --on_nonfinite skip or rollback"),
        ({"min_ar": 0.6}, "--min_ar has no effect without --resolutions"),
        (
            {"resolutions": [512], "num_ar_buckets": 0, "max_ar": 3.0},
            "--max_ar has no effect while --num_ar_buckets is 0",
        ),
        ({"bucket_fall_shorter": True}, "without --bucket_keep_prob"),
        ({"scale_lr": True, "bucket_batch_sizes": ["1x64x64=2"]}, "--scale_lr follows --batch_size alone"),
        ({"sp_mode": "ring"}, "--sp_mode has no effect while --sp_size is 1"),
        ({"zero_stage": 3}, "--zero_stage has no effect without --deepspeed"),
        ({"fsdp": "full", "sync_each_batch": True}, "without --gradient_accumulation_steps"),
        ({"train_epochs": 3, "train_steps": 5}, "overridden by --train_steps"),
        ({"precompute_conditions": True, "frame_selection": "random"}, "drawn once per clip"),
        ({"caption_dropout_technique": "zero"}, "while --caption_dropout_p is 0"),
        ({"eval_num_items": 2}, "set --eval_steps"),
        ({"layerwise_upcasting_storage_dtype": "float8_e5m2"}, "without --layerwise_upcasting_modules"),
        ({"quantize_skip_modules": ["norm"]}, "without --quantize_frozen"),
        ({"lora_autocast": False, "transformer_dtype": "fp32"}, "saves nothing with --transformer_dtype fp32"),
        ({"precompute_dir": "x"}, "without --precompute_conditions"),
    ],
)
def test_settings_without_effect_are_warnings(options, expected):
    found = findings(**options)
    assert found.errors == []
    assert len(found.warnings) == 1
    assert expected in found.warnings[0]


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
    with pytest.raises(ConfigError, match="1 entries for 2 prompts"):
        prompts(validation_prompts="a:::b", validation_videos="v.mp4")
    with pytest.raises(ConfigError, match="one prompt per entry"):
        prompts(validation_images="x.png")


def test_prompt_files(tmp_path):
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a", "size": "17x64x64", "image": "i.png"}\n\n"b"\n')
    assert [(p.prompt, p.size, p.image) for p in prompts(validation_prompts=str(lines))] == [
        ("a", (17, 64, 64), "i.png"),
        ("b", None, None),
    ]
    table = tmp_path / "p.toml"
    table.write_text('[[prompts]]\nprompt = "a"\nsise = "17x64x64"\n')
    with pytest.raises(ConfigError, match="unknown key 'sise'"):
        prompts(validation_prompts=str(table))
    with pytest.raises(ConfigError, match="no such file"):
        prompts(validation_prompts="none.jsonl")
    with pytest.raises(ConfigError, match="is not FRAMESxHEIGHTxWIDTH"):
        prompts(validation_prompts="a@@@17x64")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", '{"prompt": 5}', "entry 1: prompt: not text, got 5"),
        ("p.jsonl", '{"prompt": "a", "size": 5}', "entry 1: size: input should be a valid tuple, got 5"),
        ("p.jsonl", '{"prompt": "a", "size": [9, 64]}', "size: "),
        ("p.jsonl", '{"prompt": "a", "image": ["x"]}', "image: not text"),
        ("p.toml", '[prompts]\nprompt = "a"', "TOML files need [[prompts]] tables"),
        ("p.toml", 'prompts = "a"', "TOML files need [[prompts]] tables"),
        ("p.toml", "caf\u00e9 = 1".encode("latin-1"), "p.toml:1: the file is not UTF-8"),
        ("p.jsonl", "{", "cannot be read"),
    ],
)
def test_prompt_files_of_another_form_are_refused(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        prompts(validation_prompts=str(tmp_path / name))
    assert said in str(error.value)


def test_paths_of_prompts_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "video": "~/v.mp4"}')
    [prompt] = prompts(validation_prompts="~/p.jsonl", validation_images="~/i.png")
    assert (prompt.image, prompt.video) == (f"{tmp_path}/i.png", f"{tmp_path}/v.mp4")
    [prompt] = prompts(validation_prompts="a", validation_images="https://host/~i.png?key=" + "x" * 300)
    assert prompt.image == "https://host/~i.png?key=" + "x" * 300


def test_an_image_to_video_checkpoint_wants_an_image_per_prompt():
    facts = Facts(GEOMETRY, is_flow=False, first_frame="channels")
    errors = [
        str(problem) for problem in findings(facts, validation_prompts="a:::b", validation_images="x.png::: ").errors
    ]
    assert len(errors) == 1
    assert "give one for each validation prompt" in errors[0]
    unknown = Facts(GEOMETRY, is_flow=False, first_frame="unknown")
    assert findings(unknown, validation_prompts="a").errors == []


def test_nf4_needs_cuda_and_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(device_type: str, kind: str = "nf4") -> list[str]:
        config = load_config(**BASE, quantize_frozen=kind)
        return [str(problem) for problem in quantization_problems(config, device_type=device_type)]

    assert problems("cuda") == problems("cpu", "int8") == []
    assert problems("cpu") == [
        "--quantize_frozen nf4: needs a CUDA device, and this run is on cpu; use int8, which works everywhere"
    ]
    monkeypatch.setattr("finetrainers.config.checks.options.find_spec", lambda _: None)
    (missing,) = problems("cuda")
    assert "pip install bitsandbytes" in missing
