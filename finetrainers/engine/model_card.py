"""The model card: what was trained on what, how to use it, samples, data, time and settings."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from huggingface_hub import ModelCardData, hf_hub_download, metadata_load, try_to_load_from_cache
from yaml import YAMLError

from finetrainers.config.root import TrainConfig, changed_options, fields
from finetrainers.utils.files import read_jsonl
from finetrainers.utils.packaged import SCHEME
from finetrainers.utils.text import duration, plural
from finetrainers.utils.versions import __version__

from .preflight import Preflight
from .start_report import memory_table
from .state import TrainState

_CARD = """---
{{ metadata }}
---

# {{ title }}

{{ "A LoRA for" if is_lora else "A finetune of" }} `{{ model.pretrained_model_name_or_path }}`
{%- if own_transformer and is_lora %} with the transformer of `{{ own_transformer }}`, without which it is of no use
{%- elif began_with %}, begun with the weights of `{{ began_with }}`{% endif %}, trained with finetrainers {{ version }} for {{ state.step }} steps on {{ plural(plan.count, plan.noun) }}.
{%- if data.id_token %} Put `{{ data.id_token }}` before your prompt.{% endif %}
{% if samples | selectattr("video") | list %}
<Gallery />
{% endif %}
{%- for sample in samples + evaluated if sample.picture %}
![{{ sample.text }}]({{ sample.picture }})
{% endfor %}
## Use

```bash
pip install torch "diffusers>=0.40" transformers accelerate peft sentencepiece protobuf av{% if media %} imageio imageio-ffmpeg{% endif %}
```

```python
import torch
from diffusers import {{ pipeline }}{% if own_transformer or not is_lora %}, {{ transformer }}{% endif %}
from diffusers.utils import encode_video{% if needs_image %}, load_image{% endif %}{% if media %}, load_video{% endif %}
{%- if packaged %}
from finetrainers import model_path
{%- endif %}
{% if is_lora %}
{%- if own_transformer %}
{{ part }} = {{ transformer }}.from_pretrained({{ own_transformer | tojson }}, {% if in_subfolder %}subfolder="{{ part }}", {% endif %}torch_dtype={{ dtype }})
pipe = {{ pipeline }}.from_pretrained({{ base }}, {{ part }}={{ part }}, torch_dtype={{ dtype }})
{%- else %}
pipe = {{ pipeline }}.from_pretrained({{ base }}, torch_dtype={{ dtype }})
{%- endif %}
pipe.{{ state.spec.load_call(location) }}
{% else %}
{{ part }} = {{ transformer }}.from_pretrained({{ location | tojson }}, subfolder="{{ part }}", torch_dtype={{ dtype }})
pipe = {{ pipeline }}.from_pretrained({{ base }}, {{ part }}={{ part }}, torch_dtype={{ dtype }})
{% endif %}{% if not packaged %}pipe.to("cuda")
{% endif %}video = pipe(
    prompt={{ example | tojson }},{% if needs_image %}
    image=load_image("first_frame.png"),{% endif %}
{%- for name in media %}
    {{ name }}=load_video("{{ name }}.mp4"),
{%- else %}
    num_frames={{ plan.size[0] }},
{%- endfor %}
    height={{ plan.size[1] }},
    width={{ plan.size[2] }},
).frames[0]
encode_video(video, fps={{ fps }}, output_path="video.mp4")
```

## Training

| | |
|---|---|
{%- for name, value in facts %}
| {{ name }} | {{ value }} |
{%- endfor %}

| {{ table[0] | join(" | ") }} |
|{{ "---|" * table[0] | length }}
{%- for row in table[1:] %}
| {{ row | join(" | ") }} |
{%- endfor %}

{% for row in memory %}| {{ row | join(" | ") }} |
{% if loop.first %}|{{ "---|" * row | length }}
{% endif %}{% endfor %}
{%- if results %}
| measured | step {{ results[0] }} | step {{ results[1] }} |
|---|---|---|
{%- for name, before, after in results[2] %}
| `{{ name }}` | {{ before }} | {{ after }} |
{%- endfor %}
{% endif %}
Every setting: [config.toml](config.toml). Changed from the defaults:

| option | value |
|---|---|
{%- for option, value in settings %}
| `{{ option }}` | {{ value }} |
{%- endfor %}
"""

_SHOWN = 4  # held-out prompts


@dataclass(frozen=True)
class Sample:
    """A prompt with its newest sample.

    Attributes:
        text: the prompt.
        video, picture: its video, and the contact sheet over all steps, or of the last; paths in the run directory.
    """

    text: str
    video: str | None
    picture: str | None


def model_card(state: TrainState, checked: Preflight) -> str:
    """The README of the results, with metadata for the hub."""
    config, plan, spec, start = state.config, checked.plan, state.spec, checked.start
    is_lora = config.training.training_type == "lora"
    base, own = config.model.pretrained_model_name_or_path, config.model.transformer_id
    packaged = base.startswith(SCHEME)
    needs_image = spec.facts.first_frame == "channels"
    samples = _samples(state.run_dir.root, [prompt.prompt for prompt in checked.prompts])
    changed = {name: value for name, value in changed_options(config).items() if not fields()[name].local}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(_CARD).render(
        metadata=_metadata(config, samples, needs_image=needs_image).to_yaml(),
        title=_title(config),
        state=state,
        model=config.model,
        data=config.data,
        plan=plan,
        plural=plural,
        is_lora=is_lora,
        packaged=packaged,
        base=f'model_path("{base}")' if packaged else json.dumps(base),
        dtype="torch.float32" if packaged else "torch.bfloat16",
        own_transformer=own if is_lora else None,
        in_subfolder=own is not None and not (Path(own) / "config.json").is_file(),
        began_with=None if start.origin is None else start.origin["given"],
        version=__version__,
        samples=samples,
        evaluated=_evaluated(state.run_dir.root),
        pipeline=spec.pipeline_class.__name__,
        transformer=type(state.network).__name__,
        part=spec.facts.trained,
        location=config.run.hub_model_id or str(config.run.output_dir),
        example=checked.prompts[0].prompt if checked.prompts else plan.example,
        fps=round(plan.fps) or round(checked.geometry.fps),
        needs_image=needs_image,
        media=spec.facts.media,
        facts=_facts(state, checked),
        table=plan.table(),
        memory=memory_table(state.memory.all_peaks),
        results=_results(state.run_dir.root),
        settings=[(name, _shown(value)) for name, value in changed.items()],
    )


def _shown(value: Any) -> str:
    """An option's value as it is given, in a table's cell."""
    return (" ".join(map(str, value)) if isinstance(value, list) else str(value)).replace("|", "\\|")


def _title(config: TrainConfig) -> str:
    """`mystyle: a LoRA for SomeModel`."""
    name = (config.run.hub_model_id or config.run.output_dir.resolve().name).rpartition("/")[2]
    base = config.model.pretrained_model_name_or_path
    kind = "LoRA for" if config.training.training_type == "lora" else "finetune of"
    return f"{name}: a {kind} {base if base.startswith(SCHEME) else Path(base).name}"


def _metadata(config: TrainConfig, samples: Sequence[Sample], *, needs_image: bool) -> ModelCardData:
    """What the hub reads: a base model only where it is one on the hub, a license only where it is known."""
    base = config.model.pretrained_model_name_or_path
    task = "image-to-video" if needs_image else "text-to-video"
    widget: list[dict[str, Any]] = [
        {"text": sample.text, **({"output": {"url": sample.video}} if sample.video else {})} for sample in samples
    ]
    return ModelCardData(
        base_model=None if _folder(base) is not None else base,
        library_name="diffusers",
        pipeline_tag=task,
        tags=["finetrainers", task, "lora" if config.training.training_type == "lora" else "full-finetune"],
        widget=widget or None,
        instance_prompt=config.data.id_token,
        **_license(config),
    )


def _license(config: TrainConfig) -> dict[str, Any]:
    """The base model's license, as its own card states it, where that is on this disk or the result is uploaded anyway."""
    base = config.model.pretrained_model_name_or_path
    if base.startswith(SCHEME):
        return {"license": "apache-2.0"}
    folder = _folder(base)
    card: object = None if folder is None else folder / "README.md"
    if folder is None:
        revision, cache = config.model.revision, config.model.cache_dir
        card = try_to_load_from_cache(base, "README.md", revision=revision, cache_dir=cache)
        if config.run.push_to_hub and not isinstance(card, str):
            with contextlib.suppress(OSError, ValueError):  # what cannot be had is left out
                card = hf_hub_download(base, "README.md", revision=revision, cache_dir=cache)
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return {}
    try:
        found = metadata_load(card) or {}
    except (ValueError, YAMLError):  # a card that is none
        return {}
    return {name: str(found[name]) for name in ("license", "license_name", "license_link") if found.get(name)}


def _folder(base: str) -> Path | None:
    """Where a model lies that is not on the hub."""
    return Path(base) if base.startswith(SCHEME) or Path(base).is_dir() else None


def _facts(state: TrainState, checked: Preflight) -> list[tuple[str, str]]:
    """When, where, how long, on how much, and how the samples were drawn."""
    config, parallel = state.config, state.parallel
    records, _ = read_jsonl(state.run_dir.root / "metrics.jsonl")
    seconds = sum(record["step_s"] * record.get("steps", 1) for record in records if "step_s" in record)
    is_cuda = parallel.device.type == "cuda"
    device = torch.cuda.get_device_name(parallel.device) if is_cuda else parallel.device.type.upper()
    count = f"{parallel.world_size} x " if parallel.world_size > 1 else ""
    facts = [
        ("finished", time.strftime("%Y-%m-%d")),
        ("training steps took", f"{duration(seconds)} on {count}{device}"),
        ("a step", checked.plan.step_of(config)),
    ]
    if checked.prompts:
        sampling, guidance = config.validation, config.validation.validation_guidance_scale
        rate = sampling.validation_frame_rate or checked.geometry.fps
        shown = "the pipeline's own guidance" if guidance is None else f"guidance {guidance:g}"
        steps = f"{sampling.validation_inference_steps} denoising steps"
        facts.append(("samples", f"{steps}, {shown}, seed {config.training.seed}, {rate:g} fps"))
    return facts


def _results(root: Path) -> tuple[int, int, list[tuple[str, str, str]]] | None:
    """What was measured on held-out items first and last: the steps, and each number's name and values."""
    records = [r for r in read_jsonl(root / "metrics.jsonl")[0] if any(name.startswith("eval_") for name in r)]
    if len(records) < 2:
        return None
    first, last = records[0], records[-1]
    names = [n for n in last if n == "eval_loss" or (n.startswith("eval_reward/") and n in first)]
    return int(first["step"]), int(last["step"]), [(n, f"{first[n]:.4g}", f"{last[n]:.4g}") for n in names]


def _samples(root: Path, prompts: Sequence[str]) -> list[Sample]:
    """Each validation prompt with its newest sample."""
    folders = sorted((root / "samples").glob("step-*"))
    found = []
    for index, prompt in enumerate(prompts):
        video = next(iter(sorted(folders[-1].glob(f"{index:02d}-*.mp4"))), None) if folders else None
        if video is None:
            found.append(Sample(prompt, None, None))
            continue
        pictures = (root / "samples" / f"{video.stem}.png", video.with_suffix(".png"))
        shown = next((path.relative_to(root).as_posix() for path in pictures if path.is_file()), None)
        found.append(Sample(prompt, video.relative_to(root).as_posix(), shown))
    return found


def _evaluated(root: Path) -> list[Sample]:
    """Held-out prompts over the steps, as rewards judged them; the first few."""
    pictures = sorted((root / "samples").glob("eval-*.png"))[:_SHOWN]
    return [Sample("samples of a held-out prompt", None, path.relative_to(root).as_posix()) for path in pictures]
