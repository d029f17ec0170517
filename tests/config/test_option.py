"""Properties of options: the sets derived from them, tables and flags of sections, names of earlier versions."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from pydantic import Field
from refusals import refused_options

from finetrainers.config.base import Section
from finetrainers.config.document import configuration_page, json_schema
from finetrainers.config.flags import is_secret, parse_flags
from finetrainers.config.help import help_text
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.methods import METHODS
from finetrainers.config.option import Option, option, read_option
from finetrainers.config.root import TrainConfig, by_current_names, critical_options, fields, sections
from finetrainers.config.shape import choices
from finetrainers.data.inspect.plan import FINGERPRINTED
from finetrainers.methods.registry import register_method

BASE = {"pretrained_model_name_or_path": "repo", "data_root": "clips"}
FLAGS = [part for name, value in BASE.items() for part in (f"--{name}", value)]

LORA = ("rank", "lora_alpha", "target_modules", "use_rslora", "use_dora")
DIFFUSION = (
    "flow_resolution_shifting", "flow_base_seq_len", "flow_max_seq_len", "flow_base_shift", "flow_max_shift",
    "flow_shift",
    "flow_weighting_scheme", "flow_logit_mean", "flow_logit_std", "flow_mode_scale", "loss_weight_max",
    "sample_posterior",
)  # fmt: skip
MODEL_PARTS = ("tokenizer_id", "tokenizer_2_id", "text_encoder_id", "text_encoder_2_id", "vae_id", "transformer_id")


def those(**properties: object) -> set[str]:
    """Options with these properties."""
    return {name for name, o in fields().items() if all(getattr(o, key) == v for key, v in properties.items())}


def test_what_a_resumed_run_must_keep_is_what_it_always_was():
    """Written out, since an option that is lost here resumes silently as another run."""
    assert critical_options() == {
        **dict.fromkeys(("model_name", "expert", "training_type", "method", "parts", *LORA)),
        **dict.fromkeys(("optimizer", "use_8bit_bnb", "use_cpu_offload_optimizer", "master_weights"), "optimizer"),
        **dict.fromkeys(("seed", *DIFFUSION), "rng"),
        "use_ema": "ema",
    }
    # Names and order of these are part of the fingerprint of several datasets: a longer list would refuse earlier runs.
    assert FINGERPRINTED == (
        "target_fps", "frame_selection", "video_reshape_mode", "bucket_keep_prob", "bucket_fall_shorter",
        "sliding_window_size", "sliding_window_stride", "sliding_window_latents",
    )  # fmt: skip
    assert critical_options("data") == dict.fromkeys((*FINGERPRINTED, "sliding_window_batching"), "data")
    assert critical_options("grpo") == {
        **dict.fromkeys((
            "reward", "rollout_size", "num_generations", "best_of_n", "updates_per_rollout", "sampling_steps",
            "sampling_sigmas",
            "sampler", "eta", "shift", "rollout_guidance", "rollout_cfg", "init_same_noise", "window_size",
            "window_range",
            "window_strategy", "window_per_prompt", "window_every", "window_stride", "timestep_fraction",
        )),
        "prompts_per_step": "data",
    }  # fmt: skip


def test_other_derived_sets_are_what_they_were():
    invocation = {"hub_token", "resume_from_checkpoint", "reset", "dry_run", "gpu", "verbose"}
    assert those(dumped=False) == invocation
    places = {"output_dir", "logging_dir", "data_root", "dataset_file", "dataset", "eval_dataset_file", "cache_dir",
              "precompute_dir", "prompt_embeddings_dir"}  # fmt: skip
    assert those(resume="unlisted") == invocation | places | {
        "init_from", "pretrained_model_name_or_path", "transformer_id", "hub_model_id", "report_to", "tracker_name",
        "profile_steps",
        "batch_size",
        "gradient_accumulation_steps",
    }  # fmt: skip
    assert those(local=True) == invocation | places | {
        "validation_prompts",
        "dataloader_num_workers",
        "memory_budget",
        "fit_gpu",
        "other_expert",
    }
    assert those(section="data", scope="run") == {
        "dataset", "bucket_keep_prob", "bucket_fall_shorter", "sliding_window_latents", "sliding_window_batching",
        "probe_dir", "caption_dropout_p",
        "caption_dropout_technique", "precompute_conditions", "precompute_dir", "precompute_batch_size",
        "first_frame_conditioning_p", "frame_conditioning", "window_context", "first_frame_noise", "max_bad_samples",
        "max_bad_share", "eval_num_items", "eval_dataset_file",
    }  # fmt: skip
    assert those(scope="dataset") <= those(section="data")
    assert those(place="model") == {"pretrained_model_name_or_path", "part", "other_expert", *MODEL_PARTS}
    assert those(place="folder") == {
        "output_dir", "precompute_dir", "prompt_embeddings_dir", "probe_dir", "cache_dir",
    }  # fmt: skip
    assert those(encodes="both") == {"model_name", "pretrained_model_name_or_path", "revision", "variant", "part"}
    assert those(encodes="vae") == {"vae_id", "vae_dtype", "enable_tiling"}
    assert those(encodes="text") == {
        "tokenizer_id", "tokenizer_2_id", "text_encoder_id", "text_encoder_2_id", "text_encoder_dtype",
        "text_encoder_2_dtype", "text_encoder_3_dtype", "quantize_text_encoders",
    }  # fmt: skip


def test_an_option_must_say_what_a_resumed_run_does_with_it():
    class Forgetful(Section):
        size: int = Field(1, description="Size.")

    with pytest.raises(AssertionError, match=r"option size .* option\(\)"):
        read_option("size", "forgetful", "size", Forgetful.model_fields["size"])
    with pytest.raises(TypeError, match="resume"):
        option(1, "Size.")  # type: ignore[call-arg]
    assert all(isinstance(found, Option) for found in fields().values())


def test_an_option_needs_another_one_and_values_of_it():
    needs = {name: o.needs.partition("=")[::2] for name, o in fields().items() if o.needs}
    assert {needed for needed, _ in needs.values()} <= set(fields())
    for name, (needed, values) in needs.items():
        assert set(values.split("|")) <= {"", *choices(fields()[needed].field.annotation)}, name
    assert needs["max_nonfinite_steps"] == ("on_nonfinite", "skip|rollback")


@pytest.mark.parametrize(
    ("flag", "option", "expected"),
    [
        (["--grpo.sampling_steps", "7"], "sampling_steps", 7),
        (["--grpo.sampling-steps=7"], "sampling_steps", 7),
        (["--no-grpo.init_same_noise"], "init_same_noise", False),
        (["--grpo.no-init_same_noise"], "init_same_noise", False),
        (["--memory.gradient_checkpointing"], "gradient_checkpointing", True),
        (["--training.gradient_checkpointing"], "gradient_checkpointing", True),
        (["--optimizer.optimizer", "lion"], "optimizer", "lion"),
        (["--training.lora_rank", "8"], "rank", 8),
        (["--data.framepack_window_size", "9"], "sliding_window_size", 9),
    ],
)
def test_a_flag_may_name_its_table(flag, option, expected):
    assert parse_flags([*FLAGS, *flag])[0].get(option) == expected


def test_a_flag_of_another_table_is_refused():
    for flag, suggestion in (("--grpo.rank", "--rank"), ("--grpo.samplin_steps", "--sampling_steps")):
        with refused_options((flag, "unknown")) as error:
            parse_flags([*FLAGS, flag, "8"])
        assert str(error.value).endswith(f" {suggestion}?")
    with refused_options(("grpo.rank", "invalid")) as error:
        load_config(**BASE, grpo={"rank": 8})
    assert "'rank' belongs in [training], " in str(error.value)
    assert is_secret("--run.hub_token=x")
    assert load_config(**BASE, grpo={"eta": 0.5}, **{"training.rank": 8}) == load_config(**BASE, eta=0.5, rank=8)


def test_options_are_read_from_the_tables_of_earlier_versions(tmp_path, caplog):
    file = tmp_path / "config.toml"
    file.write_text(
        '[model]\npretrained_model_name_or_path = "repo"\nlayerwise_upcasting_modules = ["transformer"]\n'
        "[training]\ngradient_checkpointing = true\noom_retry = 'off'\ndry_batches = 'on'\n"
    )
    memory = load_config(file).memory
    assert (memory.gradient_checkpointing, memory.oom_retry, memory.dry_batches) == (True, "off", "on")
    assert memory.layerwise_upcasting_modules == ["transformer"]
    assert caplog.records == []  # each run directory has such a file
    assert load_config(**BASE, memory={"oom_retry": "on"}) == load_config(**BASE, training={"oom_retry": "on"})
    assert "[memory]\ngradient_checkpointing = true" in dump_toml(load_config(file))


def test_former_names_are_read_and_said_once(tmp_path, caplog):
    file = tmp_path / "config.toml"
    file.write_text('[data]\nframepack_window_size = 9\nbucket_keep = ["9x64x64=0.5"]\n')
    with caplog.at_level(logging.WARNING, logger="finetrainers"):
        config, _ = parse_flags([*FLAGS, "--config", str(file), "--framepack_window_stride", "3"])
    assert (config.data.sliding_window_size, config.data.sliding_window_stride) == (9, 3)
    assert config.data.bucket_keep_prob == [((9, 64, 64), 0.5)]
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"framepack_window_size ({file}:2) as sliding_window_size, bucket_keep ({file}:3) as bucket_keep_prob",
        "--framepack_window_stride as --sliding_window_stride",
    ]
    assert all("earlier versions" in record.getMessage() for record in caplog.records)
    assert by_current_names({"bucket_keep": 1, "rank": 2}) == {"bucket_keep_prob": 1, "rank": 2}
    assert "--frame_conditioning KIND=P,..." in help_text("train", "frame_conditioning")  # not a SIZE
    assert "Also accepted: --framepack_window_size" in " ".join(help_text("train", "sliding_window_size").split())


class Trial(Section):
    """A method's table whose option names others have, too."""

    methods = ("trial",)
    in_plan = True
    qualified = True

    rank: float = option(0.1, "Another rank.", resume="same", ge=0)
    fast: bool = option(False, "Faster.", resume="free")


@pytest.fixture
def with_trial(monkeypatch) -> Iterator[None]:
    """Register a method with a table of options."""
    monkeypatch.setattr(METHODS, "registered", dict(METHODS.registered))
    register_method("trial", "finetrainers.methods.sft:SFT", options=Trial)
    yield
    del TrainConfig.model_fields["trial"]
    TrainConfig.model_rebuild(force=True)
    fields.cache_clear()


@pytest.mark.usefixtures("with_trial")
def test_a_table_may_be_part_of_its_options_names(tmp_path):
    assert list(sections())[-1] == "trial"
    assert critical_options("trial") == {"trial.rank": None}
    config, _ = parse_flags([*FLAGS, "--method=trial", "--trial.rank", "0.5", "--trial.fast", "--rank", "8"])
    assert (config.get("trial.rank"), config.get("trial.fast"), config.training.rank) == (0.5, True, 8)
    assert not parse_flags([*FLAGS, "--trial.fast", "--no-trial.fast"])[0].get("trial.fast")
    assert eval(repr(config), {"load_config": load_config}) == config
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    assert load_config(file) == config
    file.write_text('pretrained_model_name_or_path = "x"\ntrial.rank = -1')
    with refused_options((f"{file}:2", "invalid")) as error:
        load_config(file)
    assert str(error.value).endswith("0, got -1")
    with refused_options(("--trial.rnk", "unknown")):
        parse_flags([*FLAGS, "--trial.rnk", "8"])
    assert "--trial.rank X" in help_text("train", "trial")
    assert "Another rank" in help_text("train", "trial.rank")
    assert "| `trial.rank` |" in configuration_page()
    assert "trial" in json_schema()["properties"]
    assert "fast" not in json_schema()["properties"]
    assert config.plain()["trial.rank"] == 0.5
