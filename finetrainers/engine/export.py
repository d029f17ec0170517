"""What a run leaves for others: the weights in diffusers layout, a model card, and optionally a hub repository."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import torch
from huggingface_hub import HfApi
from torch import Tensor

from finetrainers import __version__
from finetrainers.models.spec import DTYPES
from finetrainers.utils.faults import fault_point
from finetrainers.utils.packaged import SCHEME
from finetrainers.utils.text import plural

from .lora_layout import LORA_FILE
from .preflight import Preflight
from .trainable import save_weights

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)

_CARD = """---
{%- if not packaged %}
base_model: {{ base_model }}
{%- endif %}
library_name: diffusers
tags: [finetrainers, {{ "image-to-video" if needs_image else "text-to-video" }}, {{ "lora" if is_lora else "full-finetune" }}]
{%- if prompts %}
widget:
{%- for prompt, video in prompts %}
  - text: {{ prompt | tojson }}
{%- if video %}
    output: {url: {{ video }}}
{%- endif %}
{%- endfor %}
{%- endif %}
---

# {{ name }}

{{ "A LoRA for" if is_lora else "A finetune of" }} `{{ base_model }}`
{%- if own_transformer and is_lora %} with the transformer of `{{ own_transformer }}`, without which it is of no use
{%- elif began_with %}, begun with the weights of `{{ began_with }}`{% endif %}, trained with finetrainers {{ version }} for {{ steps }} steps on {{ items }}.
{%- if id_token %} Put `{{ id_token }}` before your prompt.{% endif %}

## Use

```bash
pip install torch "diffusers>=0.39" transformers accelerate peft sentencepiece protobuf av
```

```python
import torch
from diffusers import {{ pipeline }}{% if own_transformer or not is_lora %}, {{ transformer }}{% endif %}
from diffusers.utils import encode_video{% if needs_image %}, load_image{% endif %}
{%- if packaged %}
from finetrainers import model_path
{%- endif %}
{% if is_lora %}
{%- if own_transformer %}
transformer = {{ transformer }}.from_pretrained({{ own_transformer | tojson }}, {% if in_subfolder %}subfolder="transformer", {% endif %}torch_dtype={{ dtype }})
pipe = {{ pipeline }}.from_pretrained({{ base }}, transformer=transformer, torch_dtype={{ dtype }})
{%- else %}
pipe = {{ pipeline }}.from_pretrained({{ base }}, torch_dtype={{ dtype }})
{%- endif %}
pipe.load_lora_weights({{ location | tojson }})
{% else %}
transformer = {{ transformer }}.from_pretrained({{ location | tojson }}, subfolder="transformer", torch_dtype={{ dtype }})
pipe = {{ pipeline }}.from_pretrained({{ base }}, transformer=transformer, torch_dtype={{ dtype }})
{% endif %}{% if not packaged %}pipe.to("cuda")
{% endif %}video = pipe(
    prompt={{ example | tojson }},{% if needs_image %}
    image=load_image("first_frame.png"),{% endif %}
    num_frames={{ size[0] }},
    height={{ size[1] }},
    width={{ size[2] }},
).frames[0]
encode_video(video, fps={{ fps }}, output_path="video.mp4")
```

## Training
{% if prompts %}
Samples of the last validation:
{% for prompt, video in prompts %}
- {{ prompt }}{% if video %} ([video]({{ video }})){% endif %}
{%- endfor %}
{% endif %}
Every setting: [config.toml](config.toml). Changed from the defaults:

| option | value |
|---|---|
{%- for option, value in settings %}
| `{{ option }}` | {{ value }} |
{%- endfor %}
"""

#: Options that say where a run was, not what it was.
_LOCAL = ("output_dir", "data_root", "dataset_file", "dataset", "cache_dir", "hub_token", "precompute_dir", "validation_prompts",
          "resume_from_checkpoint", "logging_dir", "dataloader_num_workers")  # fmt: skip


def export(trainer: Trainer, checked: Preflight) -> None:
    """Write weights and model card into the run directory, and upload them if asked; every rank must call it."""
    parallel = trainer.parallel
    use_ema = trainer.ema.applied() if trainer.ema is not None else contextlib.nullcontext()
    with use_ema:
        state = parallel.full_state(trainer.transformer)
        # Within the block: the state refers to the network's weights, which change back at its end.
        with parallel.together("writing the results"):
            if parallel.is_main:
                _write(trainer, checked, state)


def _write(trainer: Trainer, checked: Preflight, state: dict[str, Tensor]) -> None:
    fault_point("export")
    config = trainer.config
    is_lora = config.training.training_type == "lora"
    save_weights(
        trainer.run_dir.root,
        spec=trainer.spec,
        transformer=trainer.parallel.unwrap(trainer.transformer),
        state_dict=state,
        training=config.training,
        dtype=torch.float32 if is_lora else DTYPES[config.model.transformer_dtype],
    )
    (trainer.run_dir.root / "README.md").write_text(model_card(trainer, checked), encoding="utf-8")
    if config.run.push_to_hub:
        trainer.watchdog.enter("uploading")
        push(trainer)
        trainer.watchdog.enter("exporting")


def model_card(trainer: Trainer, checked: Preflight) -> str:
    """The README of the results: base model, how to use it, prompts with their samples, settings."""
    config = trainer.config
    is_lora = config.training.training_type == "lora"
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    token = config.data.id_token
    base = config.model.pretrained_model_name_or_path
    packaged = base.startswith(SCHEME)
    settings = [
        (name, str(value).replace("|", "\\|"))
        for name, value in config.flat().items()
        if config.changed(name) and name not in _LOCAL
    ]
    own = config.model.transformer_id
    origin = checked.start.origin
    return environment.from_string(_CARD).render(
        own_transformer=own if is_lora else None,
        in_subfolder=own is not None and not (Path(own) / "config.json").is_file(),
        began_with=None if origin is None else origin["given"],
        base_model=base,
        packaged=packaged,
        dtype="torch.float32" if packaged else "torch.bfloat16",
        base=f'model_path("{base}")' if packaged else json.dumps(base),
        is_lora=is_lora,
        name=config.run.hub_model_id or config.run.output_dir.resolve().name,
        version=__version__,
        steps=trainer.step,
        items=plural(checked.plan.count, checked.plan.noun),
        id_token=token,
        pipeline=trainer.spec.pipeline_class,
        transformer=type(trainer.parallel.unwrap(trainer.transformer)).__name__,
        location=config.run.hub_model_id or str(config.run.output_dir),
        example=checked.prompts[0].prompt if checked.prompts else checked.plan.example,
        size=checked.plan.size,
        fps=round(checked.plan.fps) or round(checked.geometry.fps),
        needs_image=trainer.spec.first_frame == "channels",
        prompts=_samples(trainer.run_dir.root, [p.prompt for p in checked.prompts]),
        settings=settings,
    )


def _samples(root: Path, prompts: list[str]) -> list[tuple[str, str | None]]:
    """Each validation prompt with its newest sample, as a path relative to the run directory."""
    steps = sorted((root / "samples").glob("step-*"))
    found = []
    for index, prompt in enumerate(prompts):
        videos = sorted(steps[-1].glob(f"{index:02d}-*.mp4")) if steps else []
        found.append((prompt, videos[0].relative_to(root).as_posix() if videos else None))
    return found


def push(trainer: Trainer) -> None:
    """Upload weights, card, configuration and samples to the hub (not checkpoints, caches or logs)."""
    config = trainer.config
    token = config.run.hub_token.get_secret_value() if config.run.hub_token else None
    api = HfApi(token=token)
    repository = api.create_repo(config.run.hub_model_id or config.run.output_dir.resolve().name, exist_ok=True)
    api.upload_folder(
        repo_id=repository.repo_id,
        folder_path=trainer.run_dir.root,
        allow_patterns=[LORA_FILE, "transformer/*", "README.md", "config.toml", "samples/**"],
        commit_message=f"Trained with finetrainers {__version__}",
    )
