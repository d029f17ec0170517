"""The model card: model, usage, samples, data, time and settings of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCardData
from markupsafe import Markup

from finetrainers.config.facts import Facts
from finetrainers.config.root import TrainConfig, changed_options, fields
from finetrainers.config.sections import ModelSection
from finetrainers.config.values import split_part
from finetrainers.models.files.lora_names import READERS, format_problem
from finetrainers.models.spec import ModelSpec
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.training.state import TrainState
from finetrainers.utils.packaged import SCHEME
from finetrainers.utils.text import plural
from finetrainers.utils.versions import __version__

from .card_facts import (
    GRID,
    Sample,
    at_a_glance,
    evaluated_samples,
    facts,
    figures,
    local_model_folder,
    memory_by_phase,
    newest_samples,
    read_license,
    sampling_arguments,
)
from .export_formats import FOLDER, result_source
from .markdown import code, escape, row, url

_CARD = """---
{{ metadata | safe }}
---

# {{ title }}

{{ "A LoRA for" if is_lora else "A finetune of" }} {{ model.pretrained_model_name_or_path | code }}
{%- if own_transformer and is_lora %} with the transformer of {{
    own_transformer | code }}, without which it is of no use
{%- elif began_with %}, begun with the weights of {{ began_with | code }}{% endif %}, trained with finetrainers {{
    version }} for {{ state.step }} steps on {{ plural(plan.count, plan.noun) }}.
{%- if data.id_token %} Put {{ data.id_token | code }} into your prompt.{% endif %}
{%- if expert %} It is for {{ expert }} noise levels, the expert {{ part | code }}. Samples have {{
    other_expert | code if other_expert else "the model's own weights" }} in the other expert.{% endif %}
{% if grid %}
![Samples after step {{ state.step }}]({{ grid }})
{% endif %}
{% for cells in glance %}{{ cells | row }}
{% if loop.first %}|---|---|
{% endif %}{% endfor %}{% if samples | selectattr("video") | list %}
<Gallery />
{% endif %}
## Use in diffusers

```bash
pip install torch "diffusers>=0.40" "transformers>=5.10.1" accelerate peft sentencepiece protobuf av{%
    if media %} imageio imageio-ffmpeg{% endif %}
```

```python
import torch
from diffusers import {{ pipeline }}{% if own_transformer or not is_lora %}, {{ transformer }}{% endif %}
from diffusers.utils import encode_video{% if needs_image %}, load_image{% endif %}{% if media %}, load_video{% endif %}
{%- if packaged %}
from finetrainers import model_path
{%- endif %}
{%- if from_file %}
from pathlib import Path
from finetrainers.models.files.single_file import load_single_file
{%- endif %}
{% if is_lora %}
{%- if from_file %}
settings = {{ transformer }}.load_config({{ base }}, subfolder="{{ part }}")
{{ part }}, _ = load_single_file({{ transformer }}, settings, Path({{ own_transformer | tojson }}), {{ dtype }})
pipe = {{ pipeline }}.from_pretrained({{ base }}, {{ part }}={{ part }}, torch_dtype={{ dtypes }})
{%- elif own_transformer %}
{{ part }} = {{ transformer }}.from_pretrained({{ own_transformer | tojson }}, {%
    if in_subfolder %}subfolder="{{ part }}", {% endif %}torch_dtype={{ dtype }})
pipe = {{ pipeline }}.from_pretrained({{ base }}, {{ part }}={{ part }}, torch_dtype={{ dtypes }})
{%- else %}
pipe = {{ pipeline }}.from_pretrained({{ base }}, torch_dtype={{ dtypes }})
{%- endif %}
{%- for call in load_calls %}
pipe.{{ call | safe }}
{%- endfor %}
{%- if has_strength %}
pipe.{{ strength_call | safe }}  # the strength
{%- endif %}
{% else %}
{{ part }} = {{ transformer }}.from_pretrained({{ location | tojson }}, subfolder="{{ part }}", torch_dtype={{ dtype }})
pipe = {{ pipeline }}.from_pretrained({{ base }}, {{ part }}={{ part }}, torch_dtype={{ dtypes }})
{% endif %}{% if not packaged %}pipe.to("cuda")
{% endif %}{% if guider_scale %}pipe.guider = pipe.guider.new(guidance_scale={{ guider_scale }})
{% endif %}video = pipe(
    prompt={{ example | tojson }},{% if needs_image %}
    image=load_image("first_frame.png"),{% endif %}
{%- for name in media %}
    {{ name | safe }}=load_video("{{ name | safe }}.mp4"),
{%- else %}
    num_frames={{ size[0] }},
{%- endfor %}
{%- if takes_size %}
    height={{ size[1] }},
    width={{ size[2] }},
{%- endif %}
{%- if takes_rate %}
    frame_rate={{ "%g" % frame_rate }},
{%- endif %}
{%- for name, value in as_sampled %}
    {{ name | safe }}={{ value | safe }},
{%- endfor %}
).frames[0]
encode_video(video, fps={{ frame_rate | round | int }}, output_path="video.mp4")
```
{% if comfyui %}
## Use in ComfyUI

{% if not exported %}{{ ("pytorch_lora_weights.safetensors" if is_lora
    else part + "/") | code }} has the names of diffusers. In its folder, this writes a file with those of ComfyUI:

```bash
finetrainers export . --format comfyui
```

{% endif %}{% if is_pair -%}
Put the two files from `export/comfyui/` into `ComfyUI/models/loras`, with a node *LoraLoaderModelOnly* after each of
the two *Load Diffusion Model* nodes: `_high_noise` for the first sampler, `_low_noise` for the second.
{%- elif is_lora -%}
Put the file from `export/comfyui/` into `ComfyUI/models/loras`, and choose it in the node *LoraLoaderModelOnly*, whose
strength is the one above.
{%- else -%}
Put the file from `export/comfyui/` into `ComfyUI/models/diffusion_models`, and choose it in the node *Load Diffusion
Model*.
{%- endif %}
{% endif %}
{%- if results %}
## Results

| measured on held-out {{ held_out }} | step {{ results[0] }} | step {{ results[1] }} | best |
|---|---|---|---|
{%- for figure in results[2] %}
{{ [figure.name | code, figure.first, figure.last, figure.best] | row }}
{%- endfor %}
{% endif %}
{%- for sample in samples + evaluated if sample.picture %}
{%- if loop.first %}
<details>
<summary>Samples over the steps</summary>
{% endif %}
![{{ sample.text }}]({{ sample.picture | url }})
{% if loop.last %}
</details>
{% endif %}
{%- endfor %}
## Training

{% for cells in facts %}{{ cells | row }}
{% if loop.first %}|---|---|
{% endif %}{% endfor %}
{{ table[0] | row }}
|{{ ("---|" * table[0] | length) | safe }}
{%- for cells in table[1:] %}
{{ cells | row }}
{%- endfor %}

This, in the same folder, repeats it on the same data:

```bash
finetrainers train --config config.toml --output_dir repeated
```

<details>
<summary>Settings that differ from the defaults (all are in <a href="config.toml">config.toml</a>)</summary>

| option | value |
|---|---|
{%- for option, value in settings %}
{{ [option | code, value] | row }}
{%- endfor %}

</details>
{% if memory %}
<details>
<summary>Peak memory of each phase of training, GiB</summary>

{% for cells in memory %}{{ cells | row }}
{% if loop.first %}|{{ ("---|" * cells | length) | safe }}
{% endif %}{% endfor %}
</details>
{% endif -%}
"""


@cache
def _template() -> jinja2.Template:
    # All values are escaped, except for code and what these filters return.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=escape)
    environment.filters |= {"code": code, "row": row, "url": url}
    return environment.from_string(_CARD)


def model_card(state: TrainState, checked: ResolvedRun) -> str:
    """Return the README of the results, with metadata for the Hub."""
    config, plan, spec, start = state.config, checked.plan, state.spec, checked.start
    is_lora = config.training.training_type == "lora"
    base, own = config.model.pretrained_model_name_or_path, config.model.transformer_id
    packaged, needs_image = base.startswith(SCHEME), spec.facts.needs_image
    root = state.run_dir.root
    samples = newest_samples(root, [prompt.prompt for prompt in checked.prompts])
    location = config.run.hub_model_id or str(config.run.output_dir)
    return _template().render(
        metadata=_metadata(config, samples, needs_image=needs_image).to_yaml(),
        title=_title(config),
        state=state,
        model=config.model,
        data=config.data,
        plan=plan,
        plural=plural,
        is_lora=is_lora,
        packaged=packaged,
        base=Markup(f"model_path({json.dumps(base)})" if packaged else json.dumps(base)),
        **_dtypes(config.model, spec),
        own_transformer=own if is_lora else None,
        from_file=is_lora and own is not None and Path(own).is_file(),
        in_subfolder=own is not None and not (Path(own) / "config.json").is_file(),
        began_with=None if start.origin is None else start.origin["given"],
        version=__version__,
        samples=samples,
        evaluated=evaluated_samples(root),
        grid=GRID if (root / GRID).is_file() else None,
        glance=at_a_glance(config, plan),
        pipeline=Markup(spec.pipeline_class.__name__),
        transformer=Markup(type(state.network).__name__),
        part=Markup(spec.facts.trained),
        location=location,
        load_calls=_load_calls(config, spec, location) if is_lora else [],
        expert=spec.facts.expert,
        other_expert=_other_expert(config, spec.facts),
        is_pair=is_lora and config.model.other_expert is not None,
        exported="comfyui" in config.run.export_formats,
        comfyui=not packaged and comfyui_reads(config, spec.facts),
        strength_call=spec.strength_call,
        has_strength=spec.facts.trained == "transformer" and config.model.other_expert is None,
        **_call(checked, spec),
        needs_image=needs_image,
        media=spec.facts.media,
        facts=facts(state, checked),
        table=plan.table(),
        memory=memory_by_phase(state.memory.all_peaks),
        results=figures(root),
        held_out=f"{plan.noun}s",
        settings=[(n, _format_value(value)) for n, value in changed_options(config).items() if not fields()[n].local],
    )


def _load_calls(config: TrainConfig, spec: ModelSpec, location: str) -> list[str]:
    """Return the calls that load the LoRA, or a pair of two experts' LoRAs from their export if there is one."""
    if config.model.other_expert is None:
        return [spec.load_call(location)]
    pair = [
        (source, source.family.load(source.config.model))
        for source in result_source(config, config.run.output_dir).experts
    ]
    exported = next((name for name in ("diffusers", "comfyui") if name in config.run.export_formats), None)
    if exported is not None:
        names = [(other, f"{FOLDER}/{exported}/{source.stem}.safetensors") for source, other in pair]
        return [other.load_call(location, name) for other, name in names]
    other = Path(config.model.other_expert)
    return [
        spec.load_call(location)
        if half.facts.trained == spec.facts.trained
        else half.load_call(str(other.parent), other.name)
        for _, half in pair
    ]


def _other_expert(config: TrainConfig, facts: Facts) -> str | None:
    """Return the name of the weights in the expert that is not trained, or None if they are the model's own."""
    if config.model.other_expert is not None:
        source = result_source(config, config.run.output_dir)
        return next(other.stem for other in source.experts if other.facts.expert != facts.expert)
    replaced = (split_part(text) for text in config.model.part)
    return next((source for part, source, _ in replaced if part in facts.experts), None)


def _dtypes(model: ModelSection, spec: ModelSpec) -> dict[str, Markup]:
    """Return the dtype of the transformer and those of the pipeline's components, as code."""
    if model.pretrained_model_name_or_path.startswith(SCHEME):
        return dict.fromkeys(("dtype", "dtypes"), Markup("torch.float32"))
    mixed, dtype = Markup('{"vae": torch.float32, "default": torch.bfloat16}'), Markup("torch.bfloat16")
    return {"dtype": dtype, "dtypes": mixed if model.vae_dtype == "fp32" and spec.casts_latents else dtype}


def _call(checked: ResolvedRun, spec: ModelSpec) -> dict[str, Any]:
    """Return the pipeline's arguments, as for the first validation sample if there is one."""
    first = checked.prompts[0] if checked.prompts else None
    sampled = {} if first is None else dict(sampling_arguments(checked.config, first.prompt))
    parameters = signature(spec.pipeline_class.__call__).parameters
    frames, *sides = (None if first is None else first.size) or checked.plan.size
    return {
        "example": checked.plan.example if first is None else first.prompt,
        "size": (max(frames, spec.facts.least_frames), *sides),
        "frame_rate": checked.frame_rate,
        "takes_rate": "frame_rate" in parameters,
        "takes_size": "height" in parameters,  # else it is that of the image
        "as_sampled": [(name, value) for name, value in sampled.items() if name in parameters],
        "guider_scale": None if "guidance_scale" in parameters else sampled.get("guidance_scale"),
    }


def comfyui_reads(config: TrainConfig, facts: Facts) -> bool:
    """Return whether the result can be exported for ComfyUI."""
    family, training = config.model.model_name, config.training
    is_lora = training.training_type == "lora"
    problem = format_problem(family, "comfyui", is_lora=is_lora, is_dora=training.use_dora, misread=facts.misread)
    return family in READERS and problem is None


def _format_value(value: Any) -> str:
    """Return an option's value as it is set."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _title(config: TrainConfig) -> str:
    """Return `mystyle: a LoRA for SomeModel`."""
    name = (config.run.hub_model_id or config.run.output_dir.resolve().name).rpartition("/")[2]
    base = config.model.pretrained_model_name_or_path
    kind = "LoRA for" if config.training.training_type == "lora" else "finetune of"
    return f"{name}: a {kind} {base if base.startswith(SCHEME) else Path(base).name}"


def _metadata(config: TrainConfig, samples: Sequence[Sample], *, needs_image: bool) -> ModelCardData:
    """Return metadata for the Hub; base model and license only where the Hub knows them."""
    base = config.model.pretrained_model_name_or_path
    task = "image-to-video" if needs_image else "text-to-video"
    widget: list[dict[str, Any]] = [
        {"text": sample.text, **({"output": {"url": sample.video}} if sample.video else {})} for sample in samples
    ]
    return ModelCardData(
        base_model=None if local_model_folder(base) is not None else base,
        library_name="diffusers",
        pipeline_tag=task,
        tags=["finetrainers", task, "lora" if config.training.training_type == "lora" else "full-finetune"],
        widget=widget or None,
        instance_prompt=config.data.id_token,
        **read_license(config),
    )
