"""diffusion-pipe's training files: each key becomes one of ours, or says what to use instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from refusals import refused_options

from finetrainers.config.dialects import diffusion_pipe
from finetrainers.config.dialects.diffusion_pipe import COMPUTED, REFUSED, RENAMED, WITHOUT_EFFECT
from finetrainers.config.errors import ConfigError
from finetrainers.config.flags import parse_flags
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.root import TrainConfig, fields

EXAMPLE = Path(__file__).parents[3] / "examples" / "framepack.toml"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """What a repository in diffusers layout looks like from outside."""
    folder = tmp_path / "repo"
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        (folder / part).mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    return folder


@pytest.fixture
def load(tmp_path: Path, repo: Path) -> Callable[..., TrainConfig]:
    """`load(model={...}, adapter={...}, **top)`: a file of theirs with those keys beside the least it needs."""

    def make(*, flags: tuple[str, ...] = (), **tables: Any) -> TrainConfig:
        document: dict[str, Any] = {
            "epochs": 2,
            "model": {"type": "some-model", "diffusers_path": str(repo)},
            "adapter": {"type": "lora", "rank": 8},
        }
        for name, value in tables.items():
            document[name] = {**document.get(name, {}), **value} if isinstance(value, dict) else value
        file = tmp_path / "main.toml"
        file.write_text(tomli_w.dumps({k: v for k, v in document.items() if v is not None}))
        config, _ = parse_flags(["--config", str(file), *flags])
        assert config is not None
        return config

    return make


def test_the_published_file_is_read_as_it_was_meant(
    repo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = EXAMPLE.read_text().replace("/path/to/HunyuanVideo", str(repo))
    file = tmp_path / "framepack.toml"
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        config, _ = parse_flags(["--deepspeed", "--config", str(file), "--local_rank=0", "--train_steps", "7"])
    assert config is not None
    expected = {
        "model_name": "hunyuan_video", "pretrained_model_name_or_path": str(repo),
        "transformer_id": f"{repo}/transformer",
        "vae_id": f"{repo}/vae", "text_encoder_id": f"{repo}/text_encoder",
        "text_encoder_2_id": f"{repo}/text_encoder_2",
        "tokenizer_id": None, "transformer_dtype": "bf16", "layerwise_upcasting_modules": ["transformer"],
        "layerwise_upcasting_storage_dtype": "float8_e4m3fn", "sliding_window_size": 33, "sliding_window_stride": 1,
        "training_type": "lora", "rank": 32, "lora_alpha": 32.0, "train_epochs": 200, "train_steps": 7, "batch_size": 1,
        "gradient_accumulation_steps": 2, "precompute_conditions": True, "flow_weighting_scheme": "logit_normal",
        "deepspeed": True, "output_dir": Path("/path/to/output"),
    }  # fmt: skip
    assert {name: config.get(name) for name in expected} == expected
    notes = [record.message for record in caplog.records]
    line = text.splitlines().index("framepack = true") + 1
    [windows] = [note for note in notes if note.startswith(f"{file}:{line}: framepack ")]
    assert "--sliding_window_batching clip" in windows
    assert len(notes) == 3
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "config.toml").flat() == config.flat()


def test_single_weight_files_take_the_places_of_parts(load: Callable[..., TrainConfig], repo: Path) -> None:
    config = load(
        model={
            "transformer_path": "/m/hunyuan.safetensors",
            "vae_path": "/m/vae.safetensors",
            "llm_path": "/m/llava.safetensors",
        }
    )
    model = config.model
    assert (model.transformer_id, model.vae_id, model.text_encoder_id, model.tokenizer_id) == (
        "/m/hunyuan.safetensors", "/m/vae.safetensors", "/m/llava.safetensors", None,
    )  # fmt: skip
    with pytest.raises(ConfigError) as error:
        load(model={"single_file_path": "/m/ltx.safetensors"}, dataset_root="x", epoch=3)
    single, *others = error.value.problems
    assert single.kind == "unsupported"
    assert single.message.startswith("single_file_path: ")
    assert [(other.kind, other.message.split("'")[1]) for other in others] == [
        ("unknown", "dataset_root"),
        ("unknown", "epoch"),
    ]


def test_text_encoders_bring_their_tokenizers(load: Callable[..., TrainConfig], repo: Path) -> None:
    (repo / "text_encoder" / "tokenizer.json").write_text("{}")
    paths = {"llm_path": str(repo / "text_encoder"), "clip_path": str(repo / "text_encoder_2")}
    config = load(model=paths)
    assert (config.model.tokenizer_id, config.model.tokenizer_2_id) == (paths["llm_path"], None)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"adapter": None}, {"training_type": "full-finetune"}),
        ({"adapter": {"alpha": 4, "dropout": 0.1}}, {"lora_alpha": 4.0, "lora_dropout": 0.1}),
        ({"warmup_steps": 100}, {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 100}),
        ({"lr_scheduler": "cosine"}, {"lr_scheduler": "cosine", "lr_warmup_steps": 0}),
        ({"lr_scheduler": "linear", "warmup_steps": 5}, {"lr_scheduler": "linear", "lr_warmup_steps": 5}),
        ({"warmup_steps": 0}, {"lr_scheduler": "constant"}),
        ({"micro_batch_size_per_gpu": 3, "gradient_clipping": 0.5}, {"batch_size": 3, "max_grad_norm": 0.5}),
        ({"activation_checkpointing": "unsloth"}, {"gradient_checkpointing": True}),
        ({"video_clip_mode": "single_middle"}, {"frame_selection": "middle"}),
        ({"save_every_n_steps": 50, "max_steps": 9}, {"checkpointing_steps": 50, "train_steps": 9}),
        ({"model": {"dtype": "float32"}}, {"transformer_dtype": "fp32", "vae_dtype": "fp32",
            "text_encoder_dtype": "fp32"}),
        ({"model": {"transformer_dtype": "float8_e5m2"}}, {"layerwise_upcasting_storage_dtype": "float8_e5m2"}),
        ({"model": {"transformer_dtype": "float16"}}, {"transformer_dtype": "fp16", "layerwise_upcasting_modules": []}),
        ({"model": {"timestep_sample_method": "uniform"}}, {"flow_weighting_scheme": "none"}),
        ({"model": {"shift": 3, "sigmoid_scale": 1.3}}, {"flow_shift": 3.0, "flow_logit_std": 1.3}),
        ({"model": {"first_frame_conditioning_p": 0.2}}, {"first_frame_conditioning_p": 0.2}),
        (
            {"optimizer": {"type": "AdamW8bitKahan", "lr": 2e-5, "betas": [0.8, 0.99], "weight_decay": 0.01,
                "eps": 1e-7}},
            {"optimizer": "adamw-bnb-8bit", "lr": 2e-5, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.01,
                "epsilon": 1e-7},
        ),
        ({"optimizer": {"type": "Prodigy"}}, {"optimizer": "prodigy"}),
        (
            {"monitoring": {"enable_wandb": True, "wandb_tracker_name": "mine", "wandb_api_key": ""}},
            {"report_to": ["wandb"], "tracker_name": "mine"},
        ),
        ({"monitoring": {"enable_wandb": False, "wandb_tracker_name": "x"}},
            {"report_to": [], "tracker_name": "finetrainers"}),
        ({"precompute_conditions": False, "data": {"target_fps": 8}}, {"precompute_conditions": False,
            "target_fps": 8.0}),
        ({"blocks_to_swap": 0, "compile": False, "pipeline_stages": 1}, {"deepspeed": False, "blocks_to_swap": 0}),
        ({"blocks_to_swap": 20}, {"blocks_to_swap": 20}),
        ({"compile": True}, {"compile": "regional"}),
    ],
)  # fmt: skip
def test_keys_become_ours(load: Callable[..., TrainConfig], tables: dict, expected: dict) -> None:
    config = load(**tables)
    assert {name: config.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("tables", "where", "kind", "value"),
    [
        ({"pipeline_stages": 2}, "pipeline_stages", "unsupported", "--fsdp full"),
        ({"micro_batch_size_per_gpu": [[512, 4]]}, "micro_batch_size_per_gpu", "unsupported", "--bucket_batch_sizes"),
        ({"video_clip_mode": "multiple_overlapping"}, "video_clip_mode", "unsupported", "framepack_window_size"),
        ({"video_clip_mode": "last"}, "video_clip_mode", "unknown", "'last'"),
        ({"lr_scheduler": "rex"}, "lr_scheduler", "unknown", "'rex'"),
        ({"adapter": {"type": "lokr"}}, "type", "unsupported", "'lora'"),
        ({"adapter": {"rnk": 3}}, "rnk", "unknown", "'rank'?"),
        ({"monitoring": {"enable_wadnb": True}}, "enable_wadnb", "unknown", "'enable_wandb'?"),
        ({"model": {"dtype": "int8"}}, "dtype", "unknown", ": bfloat16"),
        ({"model": {"framepack": True}}, "framepack", "required", "framepack_window_size"),
        ({"model": {"guidance": 6.0}}, "guidance", "unsupported", "6.0:"),
        ({"optimizer": {"type": "automagic"}}, "type", "unknown", "--optimizer"),
        ({"optimizer": {"betas": 0.9}}, "betas", "invalid", "got 0.9"),
        ({"monitoring": {"wandb_api_key": "secret"}}, "wandb_api_key", "unsupported", "WANDB_API_KEY"),
    ],
)
def test_what_cannot_be_had_is_one_problem(
    load: Callable[..., TrainConfig], tmp_path: Path, tables: dict, where: str, kind: str, value: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(**tables)
    [problem] = error.value.problems
    file, line = problem.where.rsplit(":", 1)
    assert file == str(tmp_path / "main.toml")
    assert (tmp_path / "main.toml").read_text().splitlines()[int(line) - 1].startswith(where)
    assert problem.kind == kind
    assert value in problem.message
    assert "secret" not in problem.message


def test_every_key_is_classified_once_and_every_way_out_exists() -> None:
    keys = [*RENAMED, *COMPUTED, *REFUSED, *WITHOUT_EFFECT]
    assert len(keys) == len(set(keys))
    assert set(RENAMED.values()) <= set(fields())
    sentences = [*REFUSED.values(), *WITHOUT_EFFECT.values()]
    words = [word.strip(",;:().") for sentence in sentences for word in sentence.split()]
    assert [word for word in words if word.startswith("--") and word[2:] not in fields()] == []


def test_all_problems_and_notes_at_once(load: Callable[..., TrainConfig], caplog: pytest.LogCaptureFixture) -> None:
    def table(keys: dict, name: str) -> dict[str, Any]:
        return {key.rpartition(".")[2]: 3 for key in keys if key.rpartition(".")[0] == name}

    top = {**table(REFUSED, ""), **table(WITHOUT_EFFECT, "")}
    tables = {
        name: {**table(REFUSED, name), **table(WITHOUT_EFFECT, name)}
        for name in ("model", "adapter", "optimizer", "monitoring")
    }
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError) as error:
        load(**top, **tables)
    assert len(error.value.problems) == len(REFUSED)
    found = {record.message.split(": ", 1)[1].split(" has no effect")[0] for record in caplog.records}
    assert {key.rpartition(".")[2] for key in WITHOUT_EFFECT} <= found


def test_flags_win_and_our_names_are_not_theirs_twice(load: Callable[..., TrainConfig], tmp_path: Path) -> None:
    assert load(flags=("--rank", "4", "--lora_alpha", "2")).training.rank == 4
    with refused_options((f"{tmp_path}/main.toml:12", "duplicate")):
        load(training={"rank": 4})
    assert load(model={"framepack": False, "framepack_window_size": 33}).data.sliding_window_size is None
    assert not diffusion_pipe.is_diffusion_pipe({"model": {"model_name": "x"}, "data": {}, "optimizer": {"lr": 1}})
