"""Table of the noise levels, given frames and latents that plain runs train with, for docs/reference/models.md."""

from __future__ import annotations

from finetrainers.config.facts import Facts
from finetrainers.config.sections import DiffusionSection, ModelSection
from finetrainers.diffusion.timesteps import NoiseLevels

from .family import Family
from .files.files import read_configs
from .registry import families

#: Sizes of the shifts in the table, which every family's geometry allows.
SIZES = ((49, 512, 768), (97, 704, 1280))
_HEAD = (
    "checkpoints", "as in", "noise levels", *(f"shift, {'x'.join(map(str, size))}" for size in SIZES), "given frames",
    "images", "latents",
)  # fmt: skip
_BY_CONFIG = "by its config"
_SCHEMES = {"none": "uniform", "logit_normal": "logit-normal", "shifted_logit_normal": "stretched logit-normal"}


def noise_table() -> str:
    """Return a Markdown table of the published checkpoints, those of a family with the same values in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in families().values():
        for name in family.published:
            short = name.rpartition("/")[2].replace("-Diffusers", "").removesuffix("-diffusers")
            names = rows.setdefault((family.name, *_describe(family, name)), [])
            names += [] if short in names else [short]
    lines = [(f"`{name}`: {', '.join(names)}", *cells) for (name, *cells), names in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in (_HEAD, ("---",) * len(_HEAD), *lines))


def plain_noise(family: Family, checkpoint: str) -> tuple[Facts, DiffusionSection, NoiseLevels]:
    """Return facts, options and noise levels of a plain run of a published checkpoint, by its packaged configs."""
    model = ModelSection(model_name=family.name, pretrained_model_name_or_path=checkpoint)
    facts = family.facts_of(model)
    defaults = {name: value for name, value in facts.defaults.items() if name in DiffusionSection.model_fields}
    config, scheduler = DiffusionSection(**defaults), read_configs(model.for_estimate(), ("scheduler",))
    levels = NoiseLevels(
        config, is_flow=facts.is_flow, scheduler_config=scheduler.get("scheduler", {}), within=facts.noise_range
    )
    return facts, config, levels


def _describe(family: Family, checkpoint: str) -> tuple[str, ...]:
    """Return the cells of a checkpoint after its name."""
    facts, config, levels = plain_noise(family, checkpoint)
    scheme = _SCHEMES[config.flow_weighting_scheme] + ("" if facts.is_flow else " timesteps")
    if facts.boundary is not None:
        scheme += f"; experts part at {facts.boundary:g}"
    shifts = [f"{levels.shift(facts.geometry.num_tokens(*size)):.3g}" if facts.is_flow else "-" for size in SIZES]
    latents = "drawn" if config.sample_posterior else "mean"
    images = _BY_CONFIG if facts.first_frame == "unknown" else facts.images
    return (facts.noise_source, scheme, *shifts, _given_frames(facts), images, latents)


def _given_frames(facts: Facts) -> str:
    """Return which frames of how many clips are given by default."""
    if facts.first_frame == "unknown" or not facts.first_frame_p:
        return _BY_CONFIG if facts.first_frame == "unknown" else "-"
    frames = "first and last" if facts.last_frame else "first"
    return frames if facts.first_frame_p == 1 else f"{frames}, {facts.first_frame_p:.0%} of clips"
