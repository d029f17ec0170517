"""Commented TOML file of a new run."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import tomli_w

from finetrainers.config.root import fields, sections
from finetrainers.data.reading.sources.rows import MEDIA_SUFFIXES
from finetrainers.utils.text import plural

from .choose import Proposal
from .kinds import KINDS
from .offers import OTHER_CLIPS, Answers

_WIDTH = 100
_LEAKAGE = "docs/how-to/good-results.md#leakage"
#: Most samples of other clips for each one of the new concept: the quickstart's, which was measured.
_OTHER_SHARE = 2
#: Headings of options that are written as comments, since a run chooses them again.
_SIZES = "Sizes, chosen from the clips when training starts; to fix them:"
_RECOMMENDED = "Chosen for this model and number of clips; to fix them:"


def write_file(path: Path, proposal: Proposal, answers: Answers) -> str:
    """Return the text of the file `path`."""
    lines = [
        *_comment(
            f"LoRA of {answers['model']} ({answers['kind']}: {KINDS[answers['kind']].about}) on {proposal.usable}. "
            "Comments name further options; finetrainers train --help all describes each."
        ),
        *(f"#   {command}" for command in next_commands(path)),
        "",
        _option("output_dir", proposal.options["output_dir"]),
    ]
    by_section: dict[str, list[str]] = {}
    for name in proposal.options:
        if name != "output_dir":
            by_section.setdefault(fields()[name].section, []).append(name)
    comments = _section_comments(proposal, answers)
    for section in sections():
        if section in by_section or section in comments:
            lines += ["", f"[{section}]"]
            lines += [_commented(proposal, name) for name in by_section.get(section, [])]
            lines += comments.get(section, [])
    return "\n".join(lines) + "\n"


def write_dataset(path: Path, answers: Answers) -> str:
    """Return the text of the file `path` of two datasets: the clips, and the other clips without the trigger word."""
    roots = {"concept": answers["data_root"], OTHER_CLIPS: answers["other_clips"]}
    numbers = [sum(file.suffix.lower() in MEDIA_SUFFIXES for file in root.rglob("*")) for root in roots.values()]
    is_weighted = numbers[1] > _OTHER_SHARE * numbers[0]
    lines = _comment(
        f"Clips of the new concept, and others, which have no trigger word ({_LEAKAGE}). "
        + (
            f"There are many other clips, so a weight limits them to {_OTHER_SHARE} of {_OTHER_SHARE + 1} samples."
            if is_weighted
            else "Every clip is used once an epoch; num_repeats or weight change that."
        )
    )
    for name, root in roots.items():
        located = os.path.relpath(root.resolve(), path.parent.resolve())
        lines += ["", "[[dataset]]", _option("name", name), _option("data_root", located)]
        lines += [_option("id_token", "")] if name == OTHER_CLIPS else []
        lines += [_option("weight", _OTHER_SHARE if name == OTHER_CLIPS else 1)] if is_weighted else []
    return "\n".join(lines) + "\n"


def next_commands(path: Path) -> list[str]:
    """Return the commands that follow."""
    return [f"finetrainers check {path} --html check.html", f"finetrainers train --config {path}"]


def _commented(proposal: Proposal, name: str) -> str:
    """Return an option with the reason for it, behind it or above it."""
    line, reason = _option(name, proposal.options[name]), proposal.reasons.get(name)
    if reason is None:
        return line
    behind = f"{line}  # {reason}"
    return behind if len(behind) <= _WIDTH and "\n" not in line else "\n".join([*_comment(reason), line])


def _section_comments(proposal: Proposal, answers: Answers) -> dict[str, list[str]]:
    """Return comments of each section: options that are chosen by default, and advice."""
    config, kind = proposal.checked.config, KINDS[answers["kind"]]
    plain = config.plain()
    comments: dict[str, list[str]] = {}
    noise = f"Chosen as in {proposal.checked.facts.noise_source}; to change them:"
    for name in config.chosen:
        section = fields()[name].section
        heading = {"data": _SIZES, "training": _RECOMMENDED, "diffusion": noise}.get(section)
        comments.setdefault(section, _comment(heading or "")).append(f"# {_option(name, plain[name])}")
    facts = proposal.checked.facts
    if 0 < facts.first_frame_p < 1:
        comments.setdefault("data", []).extend([
            *_comment("Share of samples that are given their first frame, for image-to-video; 0 for text alone:"),
            f"# {_option('first_frame_conditioning_p', facts.first_frame_p)}",
        ])  # fmt: skip
    data = [*_comment(f"Captions: {kind.captions}"), *_comment(kind.advice)]
    if proposal.rejected:
        data += _comment(f"Cannot be used: {', '.join(item['name'] for item in proposal.rejected[:3])}.")
    comments["data"] = [*comments.get("data", []), *data]
    if answers["trigger_word"]:
        other = "" if answers["other_clips"] else f"add other clips (--other_clips of init; see {_LEAKAGE}), or "
        lines = _comment(
            f"If samples without the trigger word change too, {other}keep other prompts as they were (a step takes "
            "about twice as long):"
        )
        prior = [f"# {_option('prior_preservation_weight', 1.0)}"]
        if "id_token" not in proposal.options:
            prior.append(f"# {_option('class_prompt', '')}")
        comments[fields()["prior_preservation_weight"].section] = [*lines, *prior]
    if proposal.memory:
        text = proposal.memory.replace("\n", "; ").replace("  ", "")
        comments["memory"] = _comment(f"{text[0].upper()}{text[1:]}.")
    steps = proposal.options["validation_steps"]
    comments["validation"] = _comment(
        f"Sampled every {plural(steps, 'step')}: one prompt like a clip, one of something else, and one without the "
        "trigger word, which should stay as it was."
    )
    return comments


def _option(name: str, value: Any) -> str:
    """Return an option as a line of TOML; prompts are a line each."""
    if name.startswith("validation_") and isinstance(value, str) and ":::" in value:
        entries = [tomli_w.dumps({"x": entry}).strip()[5:-1] for entry in value.split(":::")]
        return "\n".join([f'{name} = """\\', ":::\\\n".join(f"  {entry}" for entry in entries) + "\\", '  """'])
    if isinstance(value, list):
        return f"{name} = [{', '.join(tomli_w.dumps({'x': entry}).strip()[4:] for entry in value)}]"
    return tomli_w.dumps({name: value}).strip()


def _comment(text: str) -> list[str]:
    """Return a text as comment lines."""
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH - 2, break_on_hyphens=False)]
