"""Training files of diffusion-pipe: the option that each key becomes, or the reason why it is refused. No torch.

Its keys are those of `examples/main_example.toml` there (commit 0784ca8) and `framepack`, `framepack_window_size`. A
training file may also hold options of ours. Its data is described in a separate file, `dataset`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.utils.failures import Kind
from finetrainers.utils.packaged import published_base
from finetrainers.utils.text import nearest

from ..errors import Problem
from ..given import Locate, RawOptions
from ..names import invert_groups

#: Keys, `TABLE.NAME` or `NAME` at the top of the file, that mean the same as an option of ours.
RENAMED = {
    "epochs": "train_epochs",
    "compile": "compile",
    "max_steps": "train_steps",
    "gradient_clipping": "max_grad_norm",
    "save_every_n_steps": "checkpointing_steps",
    "steps_per_print": "logging_steps",
    "caching_batch_size": "precompute_batch_size",
    "model.framepack_window_size": "sliding_window_size",
    "model.first_frame_conditioning_p": "first_frame_conditioning_p",
    "model.shift": "flow_shift",
    "model.sigmoid_scale": "flow_logit_std",
    "model.diffusers_path": "pretrained_model_name_or_path",
    "adapter.rank": "rank",
    "adapter.dropout": "lora_dropout",
    "adapter.init_from_existing": "init_from",
    "optimizer.lr": "lr",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.eps": "epsilon",
    "monitoring.wandb_tracker_name": "tracker_name",
}
#: Keys that become options of ours by a choice, see `_Translation`.
COMPUTED = (
    "micro_batch_size_per_gpu", "warmup_steps", "lr_scheduler", "activation_checkpointing", "video_clip_mode",
    "pipeline_stages",
    "model.type", "model.dtype", "model.transformer_dtype", "model.transformer_path", "model.vae_path",
    "model.llm_path", "model.clip_path", "model.framepack", "model.timestep_sample_method", "model.guidance",
    "adapter.type", "adapter.dtype", "adapter.alpha", "optimizer.type", "optimizer.betas", "monitoring.enable_wandb",
)  # fmt: skip
_EVALUATION = "evaluation is every --eval_steps, on the clips of --eval_num_items"
_BATCHES = "set one number as micro_batch_size_per_gpu, and --bucket_batch_sizes for single buckets"
_STAGES = (
    "pipeline stages are not supported; use --fsdp full or --deepspeed --zero_stage 3 to share a network among GPUs"
)
#: Keys that are refused, by their replacement; false, 0 and empty values are not refused.
REFUSED = invert_groups({
    _BATCHES: "image_micro_batch_size_per_gpu",
    _STAGES: "partition_split",
    "use --lr, and --resume_from_checkpoint with --reset scheduler for a run that is continued": "force_constant_lr",
    "the loss is the squared error; remove it": "pseudo_huber_c",
    f"{_EVALUATION}; remove it": "eval_datasets",
    "use --push_to_hub and --hub_model_id": "huggingface_repo",
    "is the layout of the official scripts; set diffusers_path or --pretrained_model_name_or_path to a repository in "
    "diffusers layout": "model.ckpt_path",
    "name the file as transformer_path, and as vae_path too if it holds the VAE": "model.single_file_path",
    "all noise levels are trained; --flow_weighting_scheme and --flow_logit_mean move them": "model.min_t model.max_t",
    "FramePack's own training is not supported; framepack_window_size cuts sliding windows, see "
    "docs/reference/buckets.md": "model.latent_window_size model.f1 model.siglip_path",
    "fuse it beforehand with diffusers' fuse_lora, and set the result as --transformer_id": "adapter.fuse_adapters",
    "LoKr is not supported; use type = 'lora'": "adapter.decompose_factor",
    "use --optimizer_in_backward, which requires --max_grad_norm 0":
        "optimizer.gradient_release",
    "keys are not read from files; set WANDB_API_KEY in the environment": "monitoring.wandb_api_key",
})  # fmt: skip
#: Keys that do nothing here, by the reason.
WITHOUT_EFFECT = invert_groups({
    "is counted in optimizer steps here: --checkpointing_steps (complete state and weights); the default is 500":
        "save_every_n_epochs save_every_n_examples checkpoint_every_n_epochs checkpoint_every_n_minutes",
    _EVALUATION: "eval_every_n_steps eval_every_n_epochs eval_every_n_examples eval_before_first_step",
    "evaluation uses the batches of training":
        "eval_micro_batch_size_per_gpu image_eval_micro_batch_size_per_gpu eval_gradient_accumulation_steps",
    "evaluation swaps blocks as training does": "disable_block_swap_for_eval",
    "gradient checkpointing is never reentrant": "reentrant_activation_checkpointing",
    "pipeline stages are not supported": "partition_method",
    "use --push_to_hub, which uploads when training ends": "upload_hf_from_epoch",
    "results are written in the dtype of `transformer_dtype`, LoRAs in fp32": "save_dtype",
    "use --dataloader_num_workers": "map_num_proc",
    "metrics are over optimizer steps": "x_axis_examples",
    "runs are named by `output_dir`": "monitoring.wandb_run_name",
    "use --logging_dir": "monitoring.log_dir",
})  # fmt: skip
_TABLES = ("model", "adapter", "optimizer", "monitoring")
_KNOWN = {*RENAMED, *COMPUTED, *REFUSED, *WITHOUT_EFFECT}
#: Keys that identify a file of diffusion-pipe, as tables and names.
_TELLING = (("", "micro_batch_size_per_gpu"), ("model", "type"), ("model", "transformer_path"), ("adapter", "type"))
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_FLOAT8 = {"float8": "float8_e4m3fn", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}
_KAHAN = "Kahan summation is for bf16 weights; trained weights are kept in fp32 here"
#: Optimizers by their names, lower case.
_OPTIMIZERS = {name: name for name in ("adamw", "adam", "adafactor", "muon", "prodigy", "came", "lion")}
_OPTIMIZERS |= {"adamw_optimi": "adamw", "adamw8bit": "adamw-bnb-8bit", "adamw8bitkahan": "adamw-bnb-8bit"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.json")
#: Its defaults that differ from ours.
_DEFAULTS: dict[str, Any] = {
    "flow_weighting_scheme": "logit_normal",
    "flow_shift": 1.0,
    "flow_resolution_shifting": False,
    "precompute_conditions": True,
    "first_frame_conditioning_p": 0.0,
}


def is_diffusion_pipe(document: Mapping[str, Any]) -> bool:
    """Return whether a parsed TOML file is one of diffusion-pipe's training files."""
    return any(key in document.get(table, {}) if table else key in document for table, key in _TELLING)


def translate_document(document: Mapping[str, Any], options: RawOptions, locate: Locate) -> dict[str, Any]:
    """Translate a file for which `is_diffusion_pipe` holds; return its entries under keys that diffusion-pipe lacks.

    Args:
        document: the parsed file.
        options: gets our options; diffusion-pipe's defaults have the first line as their place.
        locate: says where a key stands.
    """
    external: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in document.items():
        if name in _TABLES and isinstance(value, dict):
            external |= {f"{name}.{key}": inner for key, inner in value.items() if f"{name}.{key}" in _KNOWN}
            unknown_keys = {key: inner for key, inner in value.items() if f"{name}.{key}" not in _KNOWN}
            if name in ("model", "optimizer"):
                rest[name] = unknown_keys
                continue
            names = [key.removeprefix(f"{name}.") for key in _KNOWN if key.startswith(f"{name}.")]
            for key in unknown_keys:
                options.problems.append(
                    Problem(locate(name, key), f"{key}: unknown option {key!r}{nearest(key, names)}", "unknown")
                )
        elif name in _KNOWN:
            external[name] = value
        else:
            rest[name] = value
    own = {*rest, *(key for table in rest.values() if isinstance(table, dict) for key in table)}
    _Translation(external, options, locate, own).run()
    for option, value in _DEFAULTS.items():
        if option not in own and option not in options.values:
            options.values[option], options.where[option] = value, locate(None, option)
    return rest


@dataclass
class _Translation:
    """Translation of the keys, group by group.

    Attributes:
        external: diffusion-pipe's keys and values.
        options: gets our options.
        locate: says where a key stands.
        own: our names that the file gives as well.
    """

    external: dict[str, Any]
    options: RawOptions
    locate: Locate
    own: set[str]

    def run(self) -> None:
        for key, message in REFUSED.items():
            if self.external.get(key):
                self.refuse(key, message)
        for key, message in WITHOUT_EFFECT.items():
            if self.external.get(key):
                self.note(key, f"has no effect: {message}")
        for key, option in RENAMED.items():
            if self.external.get(key) not in (None, ""):
                self.put(key, option, self.external[key])
        self._batches()
        self._schedule()
        self._model()
        self._places()
        self._windows()
        self._adapter()
        self._optimizer()

    def locate_key(self, key: str) -> tuple[str, str]:
        """Return file and line of a key, and its name there."""
        table, _, name = key.rpartition(".")
        return self.locate(table, name), name

    def refuse(self, key: str, message: str, kind: Kind = "unsupported") -> None:
        where, name = self.locate_key(key)
        self.options.problems.append(Problem(where, f"{name}: {message}", kind))

    def note(self, key: str, message: str) -> None:
        where, name = self.locate_key(key)
        self.options.notes.append(f"{where}: {name} {message}")

    def put(self, key: str, option: str, value: Any) -> None:
        self.options.values[option], self.options.where[option] = value, self.locate_key(key)[0]

    def choose(self, key: str, choices: Mapping[str, Any], *options: str) -> None:
        """Set options to our value for a key's; it is a problem if there is none."""
        value = self.external.get(key)
        if value is not None and str(value) not in choices:
            self.refuse(key, f"unknown value {value!r}; use one of: {', '.join(choices)}", "unknown")
        elif value is not None:
            for option in options:
                self.put(key, option, choices[str(value)])

    def _batches(self) -> None:
        size = self.external.get("micro_batch_size_per_gpu")
        if isinstance(size, list):
            self.refuse("micro_batch_size_per_gpu", _BATCHES)
        elif size is not None:
            self.put("micro_batch_size_per_gpu", "batch_size", size)
        if (stages := self.external.get("pipeline_stages", 1)) != 1:
            self.refuse("pipeline_stages", f"{stages}: {_STAGES}")
        checkpointing = self.external.get("activation_checkpointing")
        if checkpointing is not None:
            self.put("activation_checkpointing", "gradient_checkpointing", bool(checkpointing))
        if checkpointing == "unsloth":
            self.note("activation_checkpointing", "activations are recomputed, not moved to the CPU")
        if self.external.get("video_clip_mode") == "multiple_overlapping":
            self.refuse("video_clip_mode", "use framepack_window_size and --sliding_window_stride")
        else:
            self.choose("video_clip_mode", {"single_beginning": "head", "single_middle": "middle"}, "frame_selection")

    def _schedule(self) -> None:
        """Translate schedule and warmup; constant with warmup is a separate schedule here."""
        warmup, schedule = self.external.get("warmup_steps") or 0, self.external.get("lr_scheduler") or "constant"
        constant = "constant_with_warmup" if warmup else "constant"
        if "lr_scheduler" in self.external:
            choices = {"constant": constant, "linear": "linear", "cosine": "cosine"}
            self.choose("lr_scheduler", choices, "lr_scheduler")
        elif warmup:
            self.put("warmup_steps", "lr_scheduler", constant)
        if warmup or schedule != "constant":
            self.put("warmup_steps" if warmup else "lr_scheduler", "lr_warmup_steps", warmup)

    def _model(self) -> None:
        if (kind := self.external.get("model.type")) is not None:
            self.put("model.type", "model_name", str(kind).replace("-", "_"))
        self.choose("model.dtype", _DTYPES, "transformer_dtype", "vae_dtype", "text_encoder_dtype")
        if "model.clip_path" in self.external and "text_encoder_dtype" in self.options.values:
            self.put("model.dtype", "text_encoder_2_dtype", self.options.values["text_encoder_dtype"])
        key = "model.transformer_dtype"
        if self.external.get(key) in _FLOAT8:
            self.put(key, "layerwise_upcasting_modules", ["transformer"])
            self.put(key, "layerwise_upcasting_storage_dtype", _FLOAT8[self.external[key]])
        else:
            self.choose(key, {**_DTYPES, **_FLOAT8}, "transformer_dtype")
        schemes = {"logit_normal": "logit_normal", "uniform": "none"}
        self.choose("model.timestep_sample_method", schemes, "flow_weighting_scheme")
        if (guidance := self.external.get("model.guidance", 1)) != 1:
            self.refuse("model.guidance", f"{guidance}: networks that take guidance are trained at 1; remove it")

    def _places(self) -> None:
        """Translate the parts of the model, files or folders.

        A repository that contains a part's folder provides the parts without a key.
        """
        base: Path | None = None
        for key, option, tokenizer in (
            ("model.transformer_path", "transformer_id", None),
            ("model.vae_path", "vae_id", None),
            ("model.llm_path", "text_encoder_id", "tokenizer_id"),
            ("model.clip_path", "text_encoder_2_id", "tokenizer_2_id"),
        ):
            if key not in self.external:
                continue
            path = Path(str(self.external[key]))
            self.put(key, option, str(path))
            if tokenizer is not None and any((path / file).is_file() for file in _TOKENIZER_FILES):
                self.put(key, tokenizer, str(path))
            if base is None:
                base = next((f for f in (path.parent, path) if (f / "model_index.json").is_file()), None)
        if "pretrained_model_name_or_path" in {*self.options.values, *self.own}:
            return
        published = published_base(str(self.options.values.get("model_name")))
        if base is not None:
            self.put("model.transformer_path", "pretrained_model_name_or_path", str(base))
        elif published is not None:
            self.put("model.transformer_path", "pretrained_model_name_or_path", published)
            message = (
                f"configs are those of {published}, which are part of this package; tokenizers are read from there"
            )
            self.note("model.transformer_path", f"{message} unless llm_path and clip_path have them")
        elif "model.transformer_path" in self.external:
            message = (
                "is not in a repository in diffusers layout; add diffusers_path = 'DIRECTORY or Hub id' to [model]"
            )
            self.note("model.transformer_path", f"{message}, which has the configs, the tokenizers and the scheduler")

    def _windows(self) -> None:
        if self.external.get("model.framepack"):
            self.put("model.framepack", "framepack", True)
        elif "model.framepack_window_size" in self.external:
            self.options.values.pop("sliding_window_size", None)
            self.note("model.framepack_window_size", "has no effect without framepack = true")

    def _adapter(self) -> None:
        if not any(key.startswith("adapter.") for key in self.external):
            self.put("epochs", "training_type", "full-finetune")
            return
        kind = self.external.get("adapter.type")
        if kind != "lora":
            self.refuse("adapter.type", f"unknown adapter {kind!r}; use 'lora' (and --use_dora)")
            return
        self.put("adapter.type", "training_type", "lora")
        alpha = "adapter.alpha" if "adapter.alpha" in self.external else "adapter.rank"
        if alpha in self.external:
            self.put(alpha, "lora_alpha", self.external[alpha])
        self.note(
            "adapter.type",
            "adapts the attention's projections; diffusion-pipe adapts every linear layer of the blocks, see "
            "--target_modules",
        )
        if self.external.get("adapter.dtype", "float32") != "float32":
            self.note("adapter.dtype", "has no effect: LoRA weights are trained in fp32")

    def _optimizer(self) -> None:
        kind = str(self.external.get("optimizer.type", "")).lower()
        if kind in _OPTIMIZERS:
            self.put("optimizer.type", "optimizer", _OPTIMIZERS[kind])
        elif kind:
            self.refuse(
                "optimizer.type",
                f"unknown optimizer {kind!r}; use one of: {', '.join(_OPTIMIZERS)}; others are named by --optimizer",
                "unknown",
            )
        if kind in ("adamw_optimi", "adamw8bitkahan"):
            self.note("optimizer.type", _KAHAN)
        betas = self.external.get("optimizer.betas", [])
        if isinstance(betas, list):
            for number, beta in enumerate(betas[:3], start=1):
                self.put("optimizer.betas", f"beta{number}", beta)
        else:
            self.refuse("optimizer.betas", f"expected a list of numbers, got {betas!r}", "invalid")
        if self.external.get("monitoring.enable_wandb"):
            self.put("monitoring.enable_wandb", "report_to", "wandb")
        else:
            self.options.values.pop("tracker_name", None)
