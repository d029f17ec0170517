"""Options of every training run: name, type, bounds, default, help and properties are written here and nowhere
else. Those of reward finetuning are in `grpo.py`, those of several processes in `parallel.py`.

The command line, TOML files, the Python API, the JSON schema and the configuration reference are derived from these
classes.
Names of fields are unique over all sections that are not qualified, so that each is also a flat flag (`--batch_size`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, SecretStr, field_validator

from .attention import AttnBackendName, backend_name
from .base import Section
from .frame_conditioning import FrameKinds
from .option import option
from .rewards import Reward
from .values import (
    MAX_FRAMES,
    BucketShare,
    BucketSize,
    CompileScope,
    Expression,
    GpuMemory,
    GpuName,
    HubId,
    ImageBucket,
    MediaColumn,
    NumberOrAuto,
    PartChoice,
    PipelineArgument,
    Place,
    Resolution,
    Seconds,
    StepRange,
    VideoBucket,
)

DType = Literal["fp32", "bf16", "fp16", "float8_e4m3fn", "float8_e5m2"]
OptimizerName = Literal[
    "adam", "adamw", "adafactor", "muon", "prodigy", "came", "lion",
    "adam-bnb", "adamw-bnb", "adam-bnb-8bit", "adamw-bnb-8bit", "lion-bnb-8bit",
    "adamw-bnb-paged", "adamw-bnb-8bit-paged",
    "adamw-torchao-8bit", "adamw-torchao-4bit", "adamw-torchao-fp8",
    "adamw-deepspeed-cpu",
]  # fmt: skip
#: Formats of the result in addition to that of the run itself.
ExportFormat = Literal["diffusers", "comfyui", "kohya", "peft", "merged"]
#: Treatment of the clips that do not fill a batch at the end of an epoch.
EpochEnd = Literal["keep", "drop", "pad", "wrap"]
#: Parts of the training state that a resumed run can start over.
Reset = Literal["data", "optimizer", "scheduler", "rng", "ema", "step"]

#: The value of `model_name` that leaves the family to the model's files.
AUTO = "auto"


# fmt: off
class ModelSection(Section):
    """Base checkpoint and how its components are loaded."""

    model_name: str = option(AUTO, "Model family; `finetrainers models` lists them. `auto` reads it from the model's "
        "files or from its Hub id.", resume="same", encodes="both")
    pretrained_model_name_or_path: Place = option(..., "Base model in diffusers layout: a Hub id, a local directory, "
        "or `demo://NAME`, a demo model. It provides configs, tokenizers and scheduler even if single files replace "
        "its weights.", resume="unlisted", encodes="both", place="model")
    expert: Literal["high", "low"] | None = option(None, "Network to train in a model with separate ones for high "
        "and low noise levels: `high` (its `transformer`) or `low` (its `transformer_2`).", resume="same")
    other_expert: Place | None = option(None, "Weights of the expert that is not trained: a run, a checkpoint or a "
        "LoRA file; for samples, rollouts and exports.", resume="free", local=True, place="model")
    revision: str | None = option(None, "Git revision of the Hub repository.", resume="free", encodes="both")
    variant: str | None = option(None, "Variant of the weight files, for example `fp16`.", resume="free",
        encodes="both", max_length=64)
    cache_dir: Path | None = option(None, "Directory for downloads from the Hub. The default is the Hub's own cache.",
        resume="unlisted", local=True, place="folder")
    tokenizer_id: Place | None = option(None, "Replacement for the tokenizer: Hub id or directory.", resume="free",
        encodes="text", place="model")
    tokenizer_2_id: Place | None = option(None, "Replacement for the second tokenizer.", resume="free", encodes="text",
        place="model")
    text_encoder_id: Place | None = option(None, "Replacement for the text encoder: Hub id, directory, or a single "
        "`.safetensors` file.", resume="free", encodes="text", place="model")
    text_encoder_2_id: Place | None = option(None, "Replacement for the second text encoder, likewise.", resume="free",
        encodes="text", place="model")
    transformer_id: Place | None = option(None, "Replacement for the transformer to train: Hub id, directory, or a "
        "`.safetensors` file in the layout of diffusers, the original authors or ComfyUI. Its config is the base "
        "model's.", resume="unlisted", place="model")
    vae_id: Place | None = option(None, "Replacement VAE, likewise.", resume="free", encodes="vae", place="model")
    text_encoder_dtype: DType = option("bf16", "Weight dtype of the text encoder.", resume="free", encodes="text")
    text_encoder_2_dtype: DType = option("bf16", "Weight dtype of the second text encoder.", resume="free",
        encodes="text")
    text_encoder_3_dtype: DType | None = option(None, "Weight dtype of a third text encoder. It is not supported "
        "with any current family.", resume="free", encodes="text")
    quantize_text_encoders: Literal["none", "int8", "fp8", "nf4"] = option("none", "Quantize the linear layers of "
        "the text encoders: `int8`, `fp8`, or `nf4` (bitsandbytes, CUDA only). Prompt embeddings change slightly, "
        "and are cached separately.", resume="free", encodes="text")
    transformer_dtype: DType = option("bf16", "Dtype of the frozen transformer weights and of the network's inputs. "
        "Trainable weights have that of `master_weights`.", resume="free")
    attn_backend: Annotated[AttnBackendName, BeforeValidator(backend_name)] = option("auto", "Attention backend of "
        "the transformer's blocks, by diffusers' name, for training and samples. `auto` uses PyTorch's choice; "
        "masked attention stays `native` where the backend does not support it.", resume="free")
    vae_dtype: DType = option("bf16", "Weight dtype of the VAE.", resume="free", encodes="vae")
    part: list[PartChoice] = option([], "Replacement for another frozen component, and its dtype: `NAME=PATH`, "
        "`NAME=PATH,DTYPE` or `NAME=,DTYPE`, for example `image_encoder=someone/model,fp32`.", resume="free",
        encodes="both", place="model")
    enable_slicing: bool | None = option(None, "Encode and decode one clip at a time (VAE slicing). By default, only "
        "batches above 24 GiB and rollouts estimated not to fit the GPU are sliced.", resume="free")
    enable_tiling: bool | None = option(None, "Encode and decode in spatial tiles (VAE tiling): less memory, "
        "slightly different latents. By default, only clips above 24 GiB and rollout clips that do not fit the GPU "
        "one by one are tiled.", resume="free", encodes="vae")

    _is_estimated: bool = PrivateAttr(default=False)

    @property
    def is_estimated(self) -> bool:
        """True if nothing but configs is read, so that packaged ones of published models will do."""
        return self._is_estimated

    def for_estimate(self) -> ModelSection:
        """Return a copy for an estimate; see `is_estimated`."""
        section = self.model_copy()
        section._is_estimated = True
        return section


class DataSection(Section):
    """Sources of clips and captions, and buckets that clips are cut to."""

    in_plan = True

    data_root: Path | None = option(None, "Directory of the media files. Without `dataset_file`, the directory "
        "itself is the dataset.", resume="unlisted", scope="dataset", local=True, place="input")
    dataset_file: Path | None = option(None, "Metadata (.csv, .json, .jsonl) with media paths relative to "
        "`data_root` or to this file, or .parquet or WebDataset .tar files. Several shards are "
        "`clips-{000..011}.tar` or `clips-*.tar`.", resume="unlisted", scope="dataset", local=True, place="input")
    dataset: Path | None = option(None, "TOML file of several datasets, each with its own options, instead of "
        "`data_root` and `dataset_file`. diffusion-pipe's dataset files are also read.", resume="unlisted", local=True,
        place="input")
    hf_dataset: Place | None = option(None, "Dataset to load with the library `datasets`: a Hub id, a directory, or "
        "`videofolder` or `imagefolder` with `data_root`.", resume="free", scope="dataset")
    hf_subset: str | None = option(None, "Configuration of `hf_dataset`, if it has several.", resume="free",
        scope="dataset", needs="hf_dataset")
    hf_split: str = option("train", "Split of `hf_dataset`.", resume="free", scope="dataset", needs="hf_dataset")
    hf_revision: str | None = option(None, "Git revision of `hf_dataset`.", resume="free", scope="dataset",
        needs="hf_dataset")
    hf_streaming: bool = option(False, "Stream `hf_dataset` row by row instead of downloading all of it first.",
        resume="free", scope="dataset", needs="hf_dataset")
    max_items: int | None = option(None, "Use only the first N rows.", resume="free", scope="dataset", ge=1)
    allow_outside: bool = option(False, "Allow media paths and links outside the dataset's directory.", resume="free",
        scope="dataset")
    video_column: str = option("video", "Column with the media path. In a directory, it may name a text file with "
        "one path per line.", resume="free", scope="dataset", min_length=1, max_length=200)
    extra_columns: list[MediaColumn] = option([], "Columns of the checkpoint's control inputs, as "
        "`control_video=COLUMN`; the default is the input's name. In a directory, a text file of paths, or a "
        "directory with files of the clips' names.", resume="free", scope="dataset")
    mask_column: str | None = option(None, "Column with the path of a clip's loss mask (white counts, black does "
        "not); in a directory, a text file or a directory. Default: `mask`, or `NAME.mask.png` or `.mp4` next to a "
        "clip; empty reads none.", resume="free", scope="dataset", max_length=1000)
    unmasked_weight: float = option(0.0, "Loss weight of pixels where a mask is black; gray is between that and 1.",
        resume="free", scope="dataset", ge=0, le=1)
    caption_column: str = option("text", "Column with the caption. In a directory, it may name a text file with one "
        "caption per line.", resume="free", scope="dataset", min_length=1, max_length=200)
    caption_columns: list[str] = option([], "Several caption columns, instead of `caption_column`. One caption is "
        "drawn at random for each sample.", resume="free", scope="dataset")
    caption_lines: bool = option(False, "Treat every line of a clip's .txt file as a separate caption. One is drawn "
        "at random for each sample.", resume="free", scope="dataset")
    caption_missing: Literal["error", "empty", "skip"] | None = option(None, "Item without a caption: stop with an "
        "error, train with an empty caption, or skip the item. By default, a missing caption is an error, and a "
        "blank one is empty.", resume="free", scope="dataset")
    id_token: str | None = option(None, "Trigger word of training captions: at `[trigger]`, or before those without "
        "it.", resume="free", scope="dataset")
    repeat_id_token: bool = option(False, "Put `id_token` before all captions.", resume="free", scope="dataset")
    remove_common_llm_caption_prefixes: bool = option(False, "Remove openings such as `This video shows` from "
        "captions.", resume="free", scope="dataset")
    image_resolution_buckets: list[ImageBucket] = option([], "Buckets for images, HxW in pixels. Images train as "
        "videos of one frame.", resume="free", scope="dataset")
    video_resolution_buckets: list[VideoBucket] = option([], "Buckets that clips are cut to, FxHxW: frames x height "
        "x width in pixels.", resume="free", scope="dataset")
    resolutions: list[Resolution] = option([], "Target areas for automatic buckets, instead of "
        "`video_resolution_buckets`: the side of a square in pixels (`512`) or HxW. Each is cut at `num_ar_buckets` "
        "aspect ratios.", resume="free", scope="dataset")
    frame_buckets: list[Annotated[int, Field(ge=1, le=MAX_FRAMES)]] = option([], "Lengths in frames of automatic "
        "buckets. By default they are chosen from the clips; images always have 1.", resume="free", scope="dataset")
    min_ar: float = option(0.5, "Narrowest aspect ratio (width / height) of `resolutions`.", resume="free",
        scope="dataset", needs="num_ar_buckets", gt=0, le=100)
    max_ar: float = option(2.0, "Widest aspect ratio (width / height) of `resolutions`.", resume="free",
        scope="dataset", needs="num_ar_buckets", gt=0, le=100)
    num_ar_buckets: int = option(7, "Number of aspect ratios between `min_ar` and `max_ar`, spaced by equal factors. "
        "0 uses only the shapes of `resolutions`.", resume="free", scope="dataset", needs="resolutions", ge=0, le=100)
    target_fps: float | None = option(None, "Frames per second that clips are resampled to. The default is the "
        "rate the model was trained at.", resume="data", scope="dataset", gt=0, le=1000)
    frame_selection: Literal["head", "middle", "random", "uniform", "chunk"] = option("head",
        "Frames to take from a clip longer than its bucket: the first (`head`), the middle, a random start, evenly "
        "spaced (`uniform`), or all, as consecutive segments that are separate samples (`chunk`).", resume="data",
        scope="dataset")
    video_reshape_mode: Literal["center", "random", "none"] = option("center", "Fit a clip to its bucket: resize, "
        "then crop the center or at random. `none` only resizes, which distorts.", resume="data", scope="dataset")
    bucket_keep_prob: list[BucketShare] = option([], "Probability, per clip and epoch, that a clip stays in its "
        "bucket, as `49x512x768=0.5`. Otherwise it is cut to the next lower resolution of that length, or left out "
        "of the epoch if there is none.", resume="data", former_name="bucket_keep")
    bucket_fall_shorter: bool = option(False, "With `bucket_keep_prob`, try the next shorter length before leaving a "
        "clip out.", resume="data", needs="bucket_keep_prob")
    sliding_window_size: int | None = option(None, "Cut clips into sliding windows of this many frames, each a "
        "separate sample: N - W + 1 windows of W frames from N.", resume="data", scope="dataset",
        former_name="framepack_window_size", ge=2)
    sliding_window_stride: int = option(1, "Frames between the starts of neighboring windows. A larger stride gives "
        "fewer windows.", resume="data", needs="sliding_window_size", scope="dataset",
        former_name="framepack_window_stride", ge=1)
    window_context: int = option(0, "Clean context latent frames at the start of each sliding window except a clip's "
        "first, so that the model learns to continue clips.", resume="free", needs="sliding_window_size", ge=0)
    sliding_window_latents: Literal["encode", "slice"] = option("encode", "Encode each window by itself, or slice "
        "its latents from those of the whole clip, which is cheaper with `precompute_conditions`. The first latent "
        "of a sliced window holds several frames.", resume="data", needs="sliding_window_size",
        former_name="framepack_window_latents")
    sliding_window_batching: Literal["mixed", "clip"] = option("mixed", "Fill batches with windows of any clips, or "
        "train all windows of a clip in one optimizer step, `batch_size` clips at a time. The loss is the mean over "
        "all windows of the step.", resume="data", needs="sliding_window_size")
    video_backend: Literal["auto", "pyav", "decord", "torchcodec"] = option("auto", "Video decoder; clips that "
        "another decoder would read differently are left to PyAV, with a warning. `auto` is PyAV; the others must be "
        "installed.", resume="free", scope="dataset")
    caption_dropout_p: float = option(0.0, "Probability, per sample, of dropping the caption, which trains the "
        "unconditional half of classifier-free guidance.", resume="free", ge=0, le=1)
    caption_dropout_technique: Literal["empty", "zero"] = option("empty", "Replace a dropped caption by the empty "
        "prompt, or its prompt embeddings by zeros.", resume="free", needs="caption_dropout_p")
    precompute_conditions: bool = option(False, "Encode all clips and captions once, before training, and cache them "
        "on disk.", resume="free")
    precompute_dir: Path | None = option(None, "Directory of the cache, which several runs may share. The default is "
        "`<output_dir>/precomputed`.", resume="unlisted", needs="precompute_conditions", local=True, place="folder")
    precompute_batch_size: int = option(1, "Clips of one bucket that the VAE encodes together before training. "
        "Larger values are faster and take more memory.", resume="free", needs="precompute_conditions", ge=1)
    first_frame_noise: bool = option(True, "Add slight noise to the first frame that an image-to-video checkpoint "
        "takes on extra channels, as in its pretraining.", resume="free")
    first_frame_conditioning_p: float | None = option(None, "Probability, per sample, of conditioning on the first "
        "frame (image-to-video). The default depends on the model.", resume="free", ge=0, le=1)
    frame_conditioning: FrameKinds | None = option(None, "Frame-conditioning modes and their probabilities per "
        "sample, as `first=0.1,prefix:9=0.05`. Modes: first, last, first+last, prefix[:F], suffix[:F], "
        "prefix+suffix, frame, span, interpolate, random.", resume="free")
    max_bad_samples: int = option(0, "Maximum number of unusable files before training starts. Each is named and "
        "left out; more are an error.", resume="free", ge=0)
    max_bad_share: float = option(0.01, "Maximum fraction of files that may fail to decode during training; each is "
        "replaced by another clip. One file may always fail.", resume="free", ge=0, le=1)
    max_pixels: int = option(100_000_000_000, "Maximum frames x height x width of a file by its header; larger files "
        "are not used. The default is 27 minutes of 1080p at 30 fps.", resume="free", scope="dataset", ge=1)
    probe_dir: Path | None = option(None, "Directory that stores facts about media files, so that each is opened "
        "once. The default is the user's cache.", resume="free", place="folder")
    eval_num_items: int = option(0, "Items held out of training for the evaluation loss.", resume="free", ge=0)
    eval_dataset_file: Path | None = option(None, "Metadata of clips for the evaluation loss, like `dataset_file`.",
        resume="unlisted", local=True, place="input")

    _dataset_buckets: dict[str, list[tuple[int, int, int]]] = PrivateAttr(default_factory=dict)

    @property
    def dataset_buckets(self) -> Mapping[str, list[tuple[int, int, int]]]:
        """Buckets that the resumed run has chosen, by the name of each dataset of `dataset`."""
        return self._dataset_buckets

    def with_dataset_buckets(self, buckets: Mapping[str, list[tuple[int, int, int]]]) -> DataSection:
        """Return a copy with these buckets for the datasets of `dataset` that name no sizes."""
        data = self.model_copy()
        data._dataset_buckets = dict(buckets)
        return data

    @property
    def is_named(self) -> bool:
        """True if any data is named."""
        return any(value is not None for value in (self.data_root, self.dataset_file, self.dataset, self.hf_dataset))


class DataloaderSection(Section):
    """Batches of clips, and the processes that load them."""

    batch_size: int = option(1, "Clips per device and micro-batch.", resume="unlisted", ge=1, le=100_000)
    bucket_batch_sizes: list[BucketSize] = option([], "Batch sizes of single buckets, as `49x512x768=1 1x512x768=8`. "
        "Other buckets use `batch_size`.", resume="free")
    epoch_end: EpochEnd = option("keep", "Clips that do not fill a batch at the end of an epoch: make smaller "
        "batches (`keep`), leave them out (`drop`), fill up with other clips of the bucket (`pad`), or start the "
        "next epoch (`wrap`).", resume="free")
    dataloader_num_workers: int = option(0, "Processes that decode clips; 0 decodes in the main process. A cache is "
        "read by the same number of threads, at least one.", resume="free", local=True, ge=0, le=1024)
    dataloader_timeout: Seconds = option(300, "Seconds that a step waits for decoding processes before they count as "
        "hung and are restarted. 0 waits forever.", resume="free", needs="dataloader_num_workers", ge=0)
    pin_memory: bool = option(False, "Use page-locked host memory, for faster copies to the GPU.", resume="free")


class DiffusionSection(Section):
    """Training noise levels, their weights, and latents. A checkpoint has defaults: docs/reference/models.md."""

    flow_resolution_shifting: bool = option(False, "Shift training noise levels by exp(mu), where mu grows linearly "
        "with the number of video tokens.", resume="rng")
    flow_base_seq_len: int | None = option(None, "Number of tokens at which mu is `flow_base_shift`. The default is "
        "that of the checkpoint's scheduler, else 256.", resume="rng", needs="flow_resolution_shifting", ge=1)
    flow_max_seq_len: int | None = option(None, "Number of tokens at which mu is `flow_max_shift`. The default is that "
        "of the checkpoint's scheduler, else 4096.", resume="rng", needs="flow_resolution_shifting", ge=2)
    flow_base_shift: float | None = option(None, "mu at `flow_base_seq_len` tokens. The default is that of the "
        "checkpoint's scheduler, else 0.5.", resume="rng", needs="flow_resolution_shifting", ge=-20, le=20)
    flow_max_shift: float | None = option(None, "mu at `flow_max_seq_len` tokens. The default is that of the "
        "checkpoint's scheduler, else 1.15.", resume="rng", needs="flow_resolution_shifting", ge=-20, le=20)
    flow_shift: float = option(1.0, "Static shift s of training noise levels: s*x / (1 + (s-1)*x). Above 1, noisier "
        "levels are trained more often.", resume="rng", gt=0, le=1000)
    flow_weighting_scheme: Literal["none", "uniform", "logit_normal", "shifted_logit_normal", "mode", "sigma_sqrt",
        "cosmap"] = option("none", "Distribution of training noise levels (`logit_normal`; `shifted_logit_normal`, "
        "which is stretched; `mode`), or weight of their losses (`sigma_sqrt`, `cosmap`).", resume="rng")
    flow_logit_mean: float = option(0.0, "Mean of `logit_normal`. A positive mean trains more noise (SD3 paper).",
        resume="rng", needs="flow_weighting_scheme=logit_normal", ge=-20, le=20)
    flow_logit_std: float = option(1.0, "Standard deviation of `logit_normal`.", resume="rng",
        needs="flow_weighting_scheme=logit_normal", gt=0, le=20)
    flow_mode_scale: float = option(1.29, "Scale s of `mode` (SD3 paper).", resume="rng",
        needs="flow_weighting_scheme=mode", ge=-1, le=1.75)
    loss_weight_max: float = option(10.0, "Upper bound of the loss weight of a sample.", resume="rng", gt=0)
    sample_posterior: bool = option(True, "Draw latents from the VAE's posterior, or take its mean.", resume="rng")


class TrainingSection(Section):
    """Training method, length, LoRA, checkpoints and resuming."""

    training_type: Literal["lora", "full-finetune"] = option("lora", "Train a LoRA adapter, or all weights of the "
        "transformer.", resume="same")
    method: str = option("sft", "Training method: supervised finetuning on clips (`sft`), reward finetuning by "
        "policy gradient (`grpo`), DiffusionNFT (`nft`), AWM (`awm`) or reward gradient (`refl`), or preference "
        "finetuning on pairs (`dpo`).", resume="same")
    seed: int = option(42, "Seed of all random numbers of the run.", resume="rng", ge=0, lt=2**31)
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(None, "Autocast dtype. The default is that of "
        "`accelerate launch`, else `transformer_dtype`.", resume="free")
    master_weights: Literal["fp32", "stochastic_rounding"] = option("fp32", "Keep the weights that full finetuning "
        "trains in fp32, or in bf16 with stochastic rounding (torchao), which halves their memory.", resume="optimizer")
    train_epochs: int = option(1, "Epochs to train, if `train_steps` is not set. Without either, a LoRA on clips "
        "has the recommended steps.", resume="free", ge=1)
    train_steps: int | None = option(None, "Optimizer steps to train; overrides `train_epochs`.", resume="free", ge=1)
    rank: int = option(64, "Rank of the LoRA. A LoRA on clips has the recommended rank of its model. The LoRA "
        "of `init_from` sets rank and alpha.", resume="same", needs="training_type=lora", ge=1, le=16384)
    lora_alpha: float = option(64, "LoRA alpha: the update is scaled by alpha / rank. For a LoRA on clips, the "
        "default is its rank.", resume="same", needs="training_type=lora", gt=0, le=1e6)
    target_modules: list[Expression] = option(["to_k", "to_q", "to_v", "to_out.0"], "Modules that get a LoRA: "
        "suffixes of module names, or one regular expression over full names. The default is the attention "
        "projections, or those of `init_from`.", resume="same", needs="training_type=lora", min_length=1)
    lora_dropout: float = option(0.0, "Dropout probability on the LoRA's input.", resume="free",
        needs="training_type=lora", ge=0, lt=1)
    use_rslora: bool = option(False, "Use rank-stabilized LoRA, which scales by alpha / sqrt(rank).", resume="same",
        needs="training_type=lora")
    use_dora: bool = option(False, "Use DoRA (weight-decomposed LoRA).", resume="same", needs="training_type=lora")
    gradient_accumulation_steps: int = option(1, "Micro-batches per optimizer step.", resume="unlisted", ge=1,
        le=100_000)
    checkpointing_steps: int = option(500, "Save a checkpoint, with the complete training state, every N optimizer "
        "steps. 0 saves only at the end.", resume="free", ge=0)
    checkpointing_limit: int | None = option(None, "Keep only the newest N checkpoints, and the one that "
        "`finetrainers watch` marks as the best. Older ones are deleted once a newer one is complete.", resume="free",
        ge=1)
    async_checkpointing: bool = option(False, "Write checkpoints in the background, from a copy in host memory "
        "(trained weights, optimizer state, EMA). Training waits only until that copy is complete.", resume="free")
    sharded_checkpoints: bool = option(True, "Let each process write its part of a sharded full finetuning's "
        "checkpoint (FSDP2, DeepSpeed). Without it, or on disks that not all machines share, rank 0 gathers and "
        "writes the weights.", resume="free")
    resume_from_checkpoint: Place | None = option(None, "Resume from `latest`, a step number or a checkpoint "
        "directory. `auto` resumes from the newest complete checkpoint in `output_dir`, or starts a new run, as "
        "requeued jobs need.", resume="unlisted", dumped=False, local=True)
    reset: list[Reset] = option([], "Parts of the training state that a resumed run starts over: data position, "
        "optimizer state, learning rate schedule, random numbers (`rng`), EMA, or step counter (which also resets "
        "data and schedule).", resume="unlisted", dumped=False, local=True)
    init_from: Place | None = option(None, "Start a new run from these weights: a checkpoint, a run directory, a "
        "diffusers directory, or a LoRA file or directory.", resume="unlisted")
    on_nonfinite: Literal["raise", "skip", "rollback"] = option("raise", "On a NaN or infinite loss or gradient: "
        "stop the run, skip the update, or roll back to the newest checkpoint and continue with other data.",
        resume="free")
    max_nonfinite_steps: int = option(10, "Maximum number of skipped updates or rollbacks with `--on_nonfinite skip` "
        "or `rollback`; one more is an error.", resume="free", needs="on_nonfinite=skip|rollback", ge=0)
    spike_sigma: float = option(6.0, "Report a loss or gradient norm that is this many standard deviations above its "
        "recent mean. 0 disables it.", resume="free", ge=0)
    spike_window: int = option(128, "Number of recent steps that `spike_sigma` compares with.", resume="free",
        needs="spike_sigma", ge=8, le=100_000)
    use_ema: bool = option(False, "Keep an exponential moving average (EMA) of the trained weights.", resume="ema")
    ema_decay: float = option(0.999, "Decay of the EMA per optimizer step.", resume="free", needs="use_ema", ge=0, lt=1)
    ema_update_after_step: int = option(0, "Optimizer steps before the EMA starts.", resume="free", needs="use_ema",
        ge=0)


#: Activations that a block may store for the backward pass.
ActivationMemory = Literal["none", "checkpoint", "keep_attention", "offload"]


class MemorySection(Section):
    """Options that save GPU memory, and handling of OOM. See also [optimizer], [parallel] and [model]."""

    activation_memory: ActivationMemory | Literal["auto"] | None = option(None, "Activation storage per block: "
        "`none` (all), `checkpoint`, `keep_attention`, `offload` or `auto` (see memory.md). If unset, "
        "`gradient_checkpointing` and, on a GPU, `fit_gpu` choose.", resume="free")
    gradient_checkpointing: bool = option(False, "Short for `--activation_memory checkpoint`: much less memory, more "
        "time.", resume="free", former_table="training")
    selective_checkpointing: float | None = option(None, "Share of the blocks that `activation_memory` applies to, "
        "spread evenly over the network; the others store all activations. Without `activation_memory`, that share "
        "is checkpointed.", resume="free", ge=0, le=1)
    layerwise_upcasting_modules: list[Literal["transformer"]] = option([], "Components whose frozen weights are "
        "stored in 8 bits and computed in `transformer_dtype` (LoRA only).", resume="free", former_table="model")
    layerwise_upcasting_storage_dtype: Literal["float8_e4m3fn", "float8_e5m2"] = option("float8_e4m3fn",
        "Storage dtype of layerwise upcasting.", resume="free", needs="layerwise_upcasting_modules=transformer",
        former_table="model")
    layerwise_upcasting_skip_modules_pattern: list[Expression] = option(
        ["patch_embed", "pos_embed", "x_embedder", "context_embedder", "time_embed", "^proj_in$", "^proj_out$", "norm"],
        "Regular expressions of module names that layerwise upcasting skips, since they are small and sensitive.",
        resume="free", needs="layerwise_upcasting_modules=transformer", former_table="model")
    lora_autocast: bool = option(True, "Train a LoRA under autocast, which computes norms and sums in fp32. Without "
        "it, the network computes in `transformer_dtype` (bf16), as diffusers' pipelines do: blocks store 14% to 30% "
        "less.", resume="free")
    quantize_frozen: Literal["none", "int8", "fp8", "nf4"] = option("none", "Quantize the frozen linear layers of "
        "the transformer and train the LoRA over them (QLoRA): `int8`, `fp8`, or `nf4` (bitsandbytes, CUDA only).",
        resume="free")
    quantize_skip_modules: list[Expression] = option([], "Regular expressions of module names that are not "
        "quantized. The default is the family's own list: embedders, norms and modulation.", resume="free",
        needs="quantize_frozen=int8|fp8|nf4")
    blocks_to_swap: NumberOrAuto = option(0, "Keep the frozen weights of this many transformer blocks in host memory "
        "until they compute (block swap, LoRA only); at least 3. `auto` swaps the fewest that fit, as `fit_gpu` does "
        "on a GPU.", resume="free")
    compile: CompileScope = option("none", "Compile each transformer block (torch.compile, `regional`): faster steps "
        "and fewer stored activations. Compiling takes minutes at the first step of every size.", resume="free")
    oom_retry: Literal["auto", "on", "off"] = option("auto", "On OOM, retry the step with smaller micro-batches; the "
        "accumulated gradient is unchanged. `auto` retries wherever that is possible: on one GPU and under DDP.",
        resume="free", former_table="training")
    dry_batches: Literal["auto", "on", "off"] = option("auto", "Before the first step, run one micro-batch of every "
        "size, so that an OOM shows at once. `auto` does so on CUDA.", resume="free", former_table="training")
    memory_budget: GpuMemory | None = option(None, "Memory of the GPU, such as `24GB`: enables and prints the "
        "cheapest memory options estimated to fit. Options that you set stay; a run that cannot fit is an error.",
        resume="free", local=True)
    fit_gpu: bool = option(True, "On a GPU, choose the fastest memory options that fit and keep results the same: "
        "activation storage, swapped blocks, idle components in host memory. Options that you set stay.", resume="free",
        local=True)

    @property
    def stored(self) -> ActivationMemory:
        """Activation storage of blocks, with the default resolved; `checkpoint` for `auto`, which a run replaces."""
        if self.activation_memory == "auto":
            return "checkpoint"
        recomputes = self.gradient_checkpointing or self.selective_checkpointing is not None
        return self.activation_memory or ("checkpoint" if recomputes else "none")

    @property
    def recomputes_all(self) -> bool:
        """True if backward recomputes every block."""
        is_known = self.stored != "none" and self.activation_memory != "auto"
        return is_known and self.selective_checkpointing in (None, 1.0)


class OptimizerSection(Section):
    """Optimizer and learning rate schedule."""

    optimizer: OptimizerName = option("adamw", "Optimizer; see docs/reference/optimizers.md.", resume="optimizer")
    use_8bit_bnb: bool = option(False, "Use the 8-bit variant of `adam` or `adamw` (bitsandbytes).", resume="optimizer")
    lr: float = option(1e-4, "Learning rate. A LoRA on clips has the recommended one.", resume="free", ge=0, le=100)
    scale_lr: bool = option(False, "Multiply `lr` by gradient accumulation x batch size x number of processes.",
        resume="free")
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "bump",
    ] = option("constant", "Learning rate schedule over optimizer steps. `bump` rises to a peak, falls to `lr` and "
        "stays there, for runs that continue from trained weights.", resume="free")
    lr_warmup_steps: int = option(500, "Optimizer steps of linear warmup; `constant` has none. For `bump`, a half "
        "cosine up to its peak.", resume="free", ge=0)
    lr_cooldown_steps: int | None = option(None, "Optimizer steps in which `bump` falls from its peak. The default "
        "is `lr_warmup_steps`.", resume="free", needs="lr_scheduler=bump", ge=0)
    lr_bump_start: float = option(0.1, "Learning rate of the first step of `bump`, as a multiple of `lr`.",
        resume="free", needs="lr_scheduler=bump", ge=0, le=1)
    lr_bump_peak: float = option(4.0, "Learning rate at the peak of `bump`, as a multiple of `lr`.", resume="free",
        needs="lr_scheduler=bump", ge=1, le=100)
    lr_num_cycles: int = option(1, "Cycles of `cosine_with_restarts`.", resume="free",
        needs="lr_scheduler=cosine_with_restarts", ge=1)
    lr_power: float = option(1.0, "Power of `polynomial`.", resume="free", needs="lr_scheduler=polynomial", gt=0,
        le=100)
    beta1: float = option(0.9, "Decay of the first moment.", resume="free", ge=0, lt=1)
    beta2: float = option(0.95, "Decay of the second moment.", resume="free", ge=0, lt=1)
    beta3: float | None = option(None, "Third decay of `prodigy` and `came`.", resume="free", ge=0, lt=1)
    weight_decay: float = option(1e-4, "Weight decay.", resume="free", ge=0, le=1000)
    epsilon: float = option(1e-8, "Epsilon of the Adam family.", resume="free", gt=0, le=1)
    max_grad_norm: float = option(1.0, "Clip the gradient norm to this value, once per optimizer step. 0 disables "
        "clipping.", resume="free", ge=0)
    use_cpu_offload_optimizer: bool = option(False, "Keep the optimizer state on the CPU and update there (torchao). "
        "It requires CUDA or XPU, and cannot be combined with gradient clipping.", resume="optimizer")
    offload_gradients: bool = option(False, "With `use_cpu_offload_optimizer`, free each gradient as soon as it is "
        "computed. It cannot be combined with gradient accumulation.", resume="free")
    optimizer_in_backward: bool = option(False, "Update each weight as soon as its gradient is complete, and free "
        "the gradient. It requires full finetuning in one process, without accumulation and clipping.", resume="free")


class ValidationSection(Section):
    """Validation samples, and evaluation by loss and by rewards, during training."""

    @property
    def is_scheduled(self) -> bool:
        """True if the validation prompts are sampled during training, and not only at its end."""
        return self.validation_steps is not None or self.validation_epochs is not None

    @property
    def samples_at_start(self) -> bool:
        """True if the validation prompts are sampled before the first step."""
        return self.is_scheduled if self.validation_at_start is None else self.validation_at_start

    @property
    def guidance_text(self) -> str | None:
        """Guidance scales of samples, in words, or None for the pipeline's own."""
        scale, low = self.validation_guidance_scale, self.validation_guidance_scale_2
        expert = "" if low in (None, scale) else f" (low-noise expert {low:g})"
        return None if scale is None else f"guidance {scale:g}{expert}"

    validation_prompts: str | None = option(None, "Prompts to sample, as `PROMPT@@@FxHxW:::PROMPT...`, or a .txt, "
        ".jsonl or .toml file of prompts.", resume="free", local=True, place="input")
    validation_images: str | None = option(None, "First frame of each prompt, as image paths or URLs joined by "
        "`validation_separator` (image-to-video).", resume="free")
    validation_videos: str | None = option(None, "Local video of each prompt, joined by `validation_separator`: its "
        "first frame is used, and the last if needed, or all of it as the control video.", resume="free")
    validation_last_images: str | None = option(None, "Last frame of each prompt, likewise, for models that support "
        "any conditioning frame (`--list_models`).", resume="free")
    validation_video_prefixes: str | None = option(None, "Local video that each sample continues, likewise: its last "
        "frames, up to those of the model's first latents, or those of FILE:FRAMES.", resume="free")
    validation_separator: str = option(":::", "Separator of prompts, images and videos.", resume="free", min_length=1)
    num_validation_videos: int = option(1, "Videos sampled per prompt.", resume="free", ge=1, le=1000)
    validation_epochs: int | None = option(None, "Sample every N epochs.", resume="free", ge=1)
    validation_steps: int | None = option(None, "Sample every N optimizer steps.", resume="free", ge=1)
    validation_at_start: bool | None = option(None, "Also sample before the first step, for comparison. The default is "
        "true with `validation_steps` or `validation_epochs`, else false.", resume="free")
    validation_frame_rate: float | None = option(None, "Frames per second of samples. The default is the median of "
        "the training clips, or the model's own rate if it is within 2% of it.", resume="free", gt=0, le=1000)
    validation_inference_steps: int = option(50, "Denoising steps of a sample.", resume="free", ge=1, le=10_000)
    validation_guidance_scale: float | None = option(None, "Guidance scale of samples. The default is the model's, "
        "else the pipeline's.", resume="free", ge=0, le=1000)
    validation_guidance_scale_2: float | None = option(None, "Guidance scale of the low-noise expert. The default is "
        "`validation_guidance_scale` if that is set, else the model's.", resume="free", ge=0, le=1000)
    validation_negative_prompt: str | None = option(None, "Negative prompt of samples, for classifier-free guidance. "
        "The default is the model's, else an empty one.", resume="free")
    validation_pipeline_arguments: list[PipelineArgument] = option([], "Further arguments of the pipeline's call for "
        "samples, `NAME=NUMBER`, such as `ar_step=5`, where the model has any.", resume="free")
    enable_model_cpu_offload: bool | None = option(None, "Sample with the model's components in host memory, each on "
        "the GPU only while in use (CUDA). By default, only if sampling is estimated not to fit the GPU otherwise.",
        resume="free")
    eval_steps: int | None = option(None, "Measure the evaluation loss, and score held-out prompts, every N "
        "optimizer steps.", resume="free", ge=1)
    eval_prompts: Path | None = option(None, "Held-out prompts, .txt (one per line) or .jsonl (keys `prompt`, "
        "`image`), scored before and after training and every `eval_steps`. The default is `validation_prompts`; "
        "none in reward finetuning.", resume="free", former_table="grpo", place="input")
    eval_reward: list[Reward] = option([], "Rewards that score samples of held-out prompts, as `reward` names them; "
        "they do not affect training. The default in reward finetuning is `reward`; other rewards reveal reward "
        "hacking.", resume="free", former_table="grpo")
    eval_num_timesteps: int = option(5, "Fixed noise levels of the evaluation loss.", resume="free", ge=1, le=100)


TrackerName = Literal["tensorboard", "wandb", "trackio"]


class RunSection(Section):
    """Output, logging, uploads and timeouts of the run."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _several(cls, trackers: Any) -> Any:
        """Return the trackers of a list or of names joined by commas; `none` is an empty list."""
        if not isinstance(trackers, str | list):
            return trackers
        names = [trackers] if isinstance(trackers, str) else trackers
        parts = [part.strip() for name in names for part in str(name).split(",")]
        return [] if parts == ["none"] else [part for part in dict.fromkeys(parts) if part]

    output_dir: Path = option(Path("finetrainers-training"), "Run directory, which holds everything that the run "
        "writes.", resume="unlisted", local=True, place="folder")
    logging_dir: str = option("logs", "Tracker's directory in `output_dir`.", resume="unlisted", local=True)
    report_to: list[TrackerName] = option([], "Experiment trackers, one or several, or `none`. Metrics are always "
        "written to metrics.jsonl in `output_dir`.", resume="unlisted")
    tracker_name: str = option("finetrainers", "Project name at the tracker.", resume="unlisted")
    train_log: bool = option(False, "Also write console output, with timestamps, to `train.log` in `output_dir`. A "
        "resumed run appends to the file.", resume="free")
    profile_steps: StepRange | None = option(None, "Profile these optimizer steps, FIRST:LAST, and write a trace, a "
        "table of times and, on CUDA, a memory snapshot to `profile/` in `output_dir`.", resume="unlisted")
    logging_steps: int = option(1, "Log metrics every N optimizer steps, averaged over them.", resume="free", ge=1)
    export_formats: list[ExportFormat] = option([], "Additional formats of the result, written to `export/` in "
        "`output_dir`. `finetrainers export` writes them later.", resume="free")
    push_to_hub: bool = option(False, "Upload the result to the Hub when training ends.", resume="free")
    hub_token: SecretStr | None = option(None, "Access token of the Hub. The default is that of `hf auth login`.",
        resume="unlisted", dumped=False, local=True)
    hub_model_id: HubId | None = option(None, "Hub repository of the result. The default is the name of `output_dir`.",
        resume="unlisted", needs="push_to_hub")
    allow_tf32: bool = option(False, "Use TF32 for matrix products on CUDA.", resume="free")
    nccl_timeout: Seconds = option(600, "Seconds after which a stuck collective, or the wait for a lost machine, "
        "ends the run.", resume="free", ge=1)
    idle_timeout: Seconds = option(86400, "Seconds that a process waits for processes that load, encode, sample, "
        "score or save, before the run ends. Their machines must answer within `nccl_timeout`.", resume="free", ge=1)
    loading_timeout: Seconds | None = option(None, "Seconds that loading one component, with its download, or "
        "uploading the result may take before it counts as hung. 0, the default, sets no limit.", resume="free", ge=0)
    step_timeout: Seconds | None = option(None, "Seconds that a step, with its data or rollout, or encoding a batch "
        "may take; 0 sets no limit. The default is 20 times the median of earlier ones, at least 10 minutes.",
        resume="free", ge=0)
    checkpoint_timeout: Seconds | None = option(None, "Seconds that saving a checkpoint or the results may take "
        "without progress; 0 sets no limit. Default: 20 times the median, at least 10 minutes.", resume="free", ge=0)
    sampling_timeout: Seconds | None = option(None, "Seconds that validation samples and evaluation may take without "
        "progress; 0 sets no limit. The default is 20 times the median of earlier ones, at least 10 minutes.",
        resume="free", ge=0)
    parts: list[str] = option([], "Python objects that `train` was called with, and their digests.", resume="same")
    dry_run: bool = option(False, "Check everything, print the plan, and stop before training.", resume="unlisted",
        dumped=False, local=True)
    gpu: GpuName | None = option(None, "GPU to plan a dry run or an estimate for: a card such as `h100` or `4090`, "
        "or a size such as `24GB`. The default is this machine's.", resume="unlisted", dumped=False, local=True,
        needs="dry_run")
    verbose: bool = option(False, "Print the traceback of every error, including expected ones; with `dry_run`, also "
        "print all options.", resume="unlisted", dumped=False, local=True)
