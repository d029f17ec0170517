"""Build the demo model: full finetuning of a randomly initialized transformer on clips of the little world.

Only the data is special to the demo: clips and captions are files, the latents are precomputed, training is
`finetrainers train` with a configuration that is written down, and an interrupted build resumes from its last
checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

import torch
from diffusers import LTXPipeline, LTXVideoTransformer3DModel
from transformers import T5EncoderModel

from finetrainers.config.root import TrainConfig
from finetrainers.draw.contact_sheet import Strip, contact_sheet
from finetrainers.plan.ready import get_ready
from finetrainers.plan.start_report import print_line
from finetrainers.rundir.find import scan_checkpoints
from finetrainers.runs.run import run
from finetrainers.utils.failures import InputError
from finetrainers.utils.files import write_json_atomic

from .base import SHIFT, build_base
from .data import FRAMES, HEIGHT, WIDTH, held_out_scenes, scene_captions, training_scenes, write_clips
from .measure import load_pipeline, measure
from .results import clips_config

_CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
tags: [finetrainers, demo]
---

# A text-to-video model for laptops

The demonstration model of finetrainers: a small LTX-Video pipeline that draws one colored
shape moving over a grey background, 9 frames of 64 x 32 pixels. It knows eight colors, six shapes and eight \
motions, and
nothing else.

The transformer was trained from random weights by `finetrainers demo build` on clips that the same command draws. The \
text
encoder is a random, frozen T5. The VAE is a linear code, fitted to such clips and to frames of *Big Buck Bunny* ((c) \
Blender
Foundation, https://peach.blender.org, [CC BY 3.0](https://creativecommons.org/licenses/by/3.0/)). Weights: Apache-2.0.
"""

CLIPS = 6000
STEPS = 23_000
MEASURED = 200


def build(directory: Path, *, steps: int = STEPS, clips: int = CLIPS, measured: int = MEASURED) -> None:
    """Make the model in `directory/weights`, with `directory/measured.json`; earlier outputs are kept.

    Args:
        directory: output directory of the clips, the untrained model, the run and the result.
        steps: optimizer steps.
        clips: size of the training set.
        measured: captions that the result is measured on.
    """
    data, base, run_dir = directory / "clips", directory / "base", directory / "run"
    if (data / "captions.jsonl").is_file():
        print_line(f"using the existing clips in {data}")
    else:
        print_line(f"writing {clips} clips to {data}")
        write_clips(data, training_scenes(clips))
    if (base / "model_index.json").is_file():
        print_line(f"using the existing untrained model in {base}")
    else:
        print_line(f"writing the untrained model to {base}")
        build_base(base)
    if (run_dir / "transformer").is_dir():
        print_line(f"using the existing trained transformer in {run_dir}")
    else:
        run(get_ready(build_config(directory, steps=steps, resume=bool(scan_checkpoints(run_dir)))))
    package(base, run_dir / "transformer", directory / "weights")
    measure_weights(directory / "weights", directory, items=measured)


def build_config(directory: Path, *, steps: int, resume: bool = False) -> TrainConfig:
    """Return the configuration that trains the transformer."""
    return clips_config(
        directory,
        bucket=(FRAMES, HEIGHT, WIDTH),
        steps=steps,
        pretrained_model_name_or_path=str(directory / "base"),
        precompute_dir=str(directory / "precomputed"),
        eval_num_items=64,
        eval_steps=1000,
        caption_dropout_p=0.1,
        caption_dropout_technique="empty",
        training_type="full-finetune",
        mixed_precision="bf16",
        batch_size=16,
        lr=2e-3,
        lr_warmup_steps=min(200, steps // 2),
        weight_decay=0.01,
        use_ema=True,
        ema_decay=0.999,
        flow_shift=SHIFT,
        checkpointing_steps=500,
        checkpointing_limit=3,
        resume_from_checkpoint="latest" if resume else None,
        validation_prompts=":::".join(scene_captions(held_out_scenes(6))),
        validation_steps=1000,
        validation_guidance_scale=3.0,
        logging_steps=50,
    )


def package(base: Path, transformer: Path, target: Path) -> None:
    """Write the finished repository: the parts that training left fixed, and the trained transformer, in bf16."""
    trained = LTXVideoTransformer3DModel.from_pretrained(transformer, torch_dtype=torch.bfloat16)
    # The text encoder is tiny, and transformers load it in the dtype of its file: in fp32, like the rest by default.
    text_encoder = T5EncoderModel.from_pretrained(base, subfolder="text_encoder", dtype=torch.float32)
    pipeline = LTXPipeline.from_pretrained(
        base,
        transformer=trained,
        text_encoder=text_encoder,
        torch_dtype={"vae": torch.bfloat16, "default": torch.float32},
    )
    pipeline.save_pretrained(str(target))
    (target / "README.md").write_text(_CARD, encoding="utf-8")


def measure_weights(
    weights: Path, directory: Path, *, lora: Path | None = None, items: int = MEASURED, look: str = "plain"
) -> dict[str, float]:
    """Measure prompt adherence on captions whose combination of color, shape and motion was never trained on.

    Args:
        weights: a model in diffusers layout.
        directory: gets `measured.json` and `measured.png`, a contact sheet.
        lora: a LoRA to load, or a directory that holds one.
        items: number of captions.
        look: look that the captions request.
    """
    pipeline = load_pipeline(weights)
    if lora is not None:
        try:
            pipeline.load_lora_weights(str(lora))
        except (ValueError, KeyError, RuntimeError) as error:
            raise InputError(f"{lora} cannot be loaded as a LoRA of {weights}: {error}", "mismatch") from error
        if not getattr(pipeline.transformer, "peft_config", None):  # diffusers only logs that no name fits
            raise InputError(f"{lora} has no weights for {weights}; use a LoRA of this model", "mismatch")
    captions = scene_captions(held_out_scenes(items, look=look))
    started = perf_counter()
    measured = measure(pipeline, captions)
    seconds = (perf_counter() - started) / len(captions)
    record = {**measured.prompt_adherence, "seconds_per_clip": seconds}
    directory.mkdir(parents=True, exist_ok=True)
    write_json_atomic(directory / "measured.json", record)
    examples = list(zip(measured.captions, measured.clips, strict=True))[:12]
    contact_sheet([(text, [Strip.of("", clip)]) for text, clip in examples]).save(directory / "measured.png")
    print_line(json.dumps({name: round(value, 3) for name, value in record.items()}))
    return record
