"""Options of a new run, chosen from its answers: data, memory, samples. Nothing is loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import load_config
from finetrainers.config.root import fields
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.inspect.probe_all import ProbeOptions
from finetrainers.plan.check import examine
from finetrainers.plan.dry_run import build_without_weights, unseen_reason
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.plan.ready import preflight_by_model
from finetrainers.utils.progress import StageProgress
from finetrainers.utils.text import listed, plural

from .fit import memory_options, planning_options
from .kinds import KINDS
from .offers import OTHER_CLIPS, Answers

#: Usable items that allow holding some out for the evaluation loss, and the most that are held out.
_HOLD_OUT_FROM, _MOST_HELD_OUT = 20, 16
#: Intervals of samples and checkpoints; the longest that comes at least five times is chosen.
_INTERVALS = (10, 25, 50, 100, 250, 500)
_TIMES = 5
_NOUNS = {"video": "clip", "image": "image"}
#: Options that every new configuration sets.
_COMMON = {"caption_dropout_p": 0.05, "precompute_conditions": True}


@dataclass(frozen=True)
class Proposal:
    """Options of a new run, with reasons.

    Attributes:
        options: by flat name.
        reasons: comments on options, by flat name.
        items: items of the data, as `check` reports them.
        checked: the run.
        memory: comment on planned memory.
    """

    options: Mapping[str, Any]
    reasons: Mapping[str, str]
    items: list[dict[str, Any]]
    checked: ResolvedRun
    memory: str

    @property
    def usable(self) -> str:
        """Description of the items that can be used: `40 clips and 8 images`."""
        used = [item for item in self.items if item["use"] in ("train", "eval")]
        kinds = Counter(f"{'other ' * _is_other(item)}{_NOUNS[item['kind']]}" for item in used)
        return listed([plural(kinds[noun], noun) for noun in sorted(kinds, key=lambda noun: noun.startswith("other"))])

    @property
    def blank(self) -> int:
        """Number of usable items without a caption."""
        return sum(item["use"] in ("train", "eval") and not item["caption"] for item in self.items)

    @property
    def short(self) -> int:
        """Number of clips that train as images, since they are shorter than the model's shortest clip."""
        return sum(item["kind"] == "video" and _is_image(item) for item in self.items)

    @property
    def rejected(self) -> list[dict[str, Any]]:
        """Items that cannot be used."""
        return [item for item in self.items if item["use"] == "rejected"]


def propose(answers: Answers, *, progress: StageProgress, dataset: Path | None = None) -> Proposal:
    """Return options of a new run that passes the checks of a dry run.

    Args:
        answers: to all questions.
        progress: of reading the data.
        dataset: file of the clips and the other clips, if there are any.

    Raises:
        ConfigError: the run would be refused, or no item of the data can be used.
    """
    kind, trigger_word, planned = KINDS[answers["kind"]], answers["trigger_word"], planning_options(answers["card"])
    options: dict[str, Any] = {
        "output_dir": str(answers["output_dir"]), "pretrained_model_name_or_path": answers["model"],
        **({"data_root": str(answers["data_root"])} if dataset is None else {"dataset": str(dataset)}), **_COMMON,
    }  # fmt: skip
    items, reading_options = _read_items({**options, **planned}, answers, progress)
    usable = [item for item in items if item["use"] == "train"]
    own = [item for item in usable if not _is_other(item)]
    if kind.needs_motion and all(map(_is_image, own)):
        message = f"{answers['kind']} needs clips of several frames, and {answers['data_root']} has none; add clips"
        raise ConfigError([Problem("--kind", message, "conflict")], of="this command")
    options |= reading_options
    in_captions = bool(trigger_word) and any(_has_word(item["caption"], trigger_word) for item in own)
    if trigger_word and not in_captions:
        options["id_token"] = trigger_word
    held_out = min(len(usable) // 10, _MOST_HELD_OUT) if len(usable) >= _HOLD_OUT_FROM else 0
    checked = preflight_by_model(load_config(**options, **planned, eval_num_items=held_out))
    while held_out and _lacks_size(checked):
        held_out -= 1
        checked = preflight_by_model(load_config(**options, **planned, eval_num_items=held_out), earlier=checked)
    options |= {"eval_num_items": held_out} if held_out else {}
    options |= _recipe(checked) | _sampling_options(checked, own, trigger_word, in_captions=in_captions)
    checked = preflight_by_model(load_config(**options, **planned), earlier=checked)
    added, reasons, memory = memory_options(checked, answers)
    if added:
        options |= added
        checked = preflight_by_model(load_config(**options, **planned), earlier=checked)
    return Proposal(options, {**_data_reasons(items), **reasons}, items, build_without_weights(checked)[0], memory)


def _lacks_size(checked: ResolvedRun) -> bool:
    """Return whether all clips of some size are held out, so that it is not trained on."""
    plan = checked.plan
    assert isinstance(plan, DatasetPlan)
    return not {clip.bucket for clip in plan.eval_clips} <= {clip.bucket for clip in plan.clips}


def _recipe(checked: ResolvedRun) -> dict[str, Any]:
    """Return the options of the family's recipe; without the model's configs, those that all its checkpoints share."""
    is_seen, lora = unseen_reason(checked) is None, checked.facts.lora
    options = {} if lora is None else lora.options
    return {name: value for name, value in options.items() if is_seen or fields()[name].section != "model"}


def _read_items(
    options: Mapping[str, Any], answers: Answers, progress: StageProgress
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a report on each item of the data, and options that train on it although some cannot be used.

    Raises:
        ConfigError: no item of a directory can be used, or other options are wrong.
    """
    reading_options: dict[str, Any] = {}
    while True:
        report, problems = examine(load_config(**options, **reading_options), ProbeOptions(progress=progress))
        if report is None or problems:
            raise ConfigError(problems, of="this command")
        statuses = report["counts"]["statuses"]
        if "caption_missing" not in statuses or reading_options:
            break
        reading_options = {"caption_missing": "empty"}
    for is_other, name in ((False, "data_root"), (True, "other_clips")):
        items = [item for item in report["items"] if _is_other(item) == is_other]
        if answers[name] and not any(item["use"] == "train" for item in items):
            message = "".join(f"\n    {item['name']}: {item['reason']}" for item in items[:5])
            raise ConfigError([Problem("data", f"no file of {answers[name]} can be used{message}", "not_found")])
    if rejected := report["counts"]["rejected"]:
        reading_options["max_bad_samples"] = rejected
    return report["items"], reading_options


def _data_reasons(items: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return comments on options of the data."""
    blank = sum(1 for item in items if item["use"] != "rejected" and not item["caption"])
    return {
        "dataset": "the clips, and other clips without the trigger word",
        "id_token": "trigger word, put before every caption that lacks it; put it into your prompts yourself",
        "max_bad_samples": "unusable files that are left out; more are an error",
        "caption_missing": f"{plural(blank, 'file')} without a caption; skip leaves them out",
        "caption_dropout_p": "share of samples without a caption, for classifier-free guidance",
        "precompute_conditions": "encode clips and captions once, before training",
        "eval_num_items": "held out of training, to measure the evaluation loss",
    }


def _sampling_options(
    checked: ResolvedRun, items: list[dict[str, Any]], trigger_word: str, *, in_captions: bool
) -> dict[str, Any]:
    """Return the options of samples, checkpoints and evaluation."""
    steps = checked.config.training.train_steps or _TIMES * _INTERVALS[-2]
    interval = max((length for length in _INTERVALS if length * _TIMES <= steps), default=1)
    prompts = choose_prompts(items, trigger_word, checked.facts.scene, in_captions=in_captions)
    options: dict[str, Any] = {
        "checkpointing_steps": interval, "validation_prompts": ":::".join(prompts), "validation_steps": interval,
    }  # fmt: skip
    if checked.config.data.eval_num_items:
        options["eval_steps"] = interval
    if checked.facts.needs_image:
        example = items[0]
        option = "validation_images" if example["kind"] == "image" else "validation_videos"
        options[option] = ":::".join([example["path"]] * len(prompts))
        if checked.facts.last_frame and example["kind"] == "image":
            options["validation_last_images"] = options[option]
    return options


def choose_prompts(
    items: Iterable[Mapping[str, Any]], trigger_word: str, scene: str, *, in_captions: bool
) -> list[str]:
    """Return prompts to sample: one like a caption, one of something else, and one that should stay as it was.

    Args:
        items: of the data.
        trigger_word: or an empty text.
        scene: the prompt for something else.
        in_captions: whether captions contain the trigger word, so that it is not put before them.
    """
    captions = [item["caption"] for item in sorted(items, key=lambda item: item["kind"] == "image")]
    usable = [text for text in captions if text.isprintable() and text and ":::" not in text and "@@@" not in text]
    if in_captions:
        usable.sort(key=lambda text: not _has_word(text, trigger_word))
    before = f"{trigger_word} " if trigger_word else ""
    if not usable:
        return list(dict.fromkeys([f"{before}{scene}", scene]))
    like = usable[0] if in_captions else f"{before}{usable[0]}"
    elsewhere = f"{before}{scene}" if trigger_word else usable[len(usable) // 2]
    return list(dict.fromkeys([like, elsewhere, scene]))


def _is_other(item: Mapping[str, Any]) -> bool:
    return item.get("dataset") == OTHER_CLIPS


def _is_image(item: Mapping[str, Any]) -> bool:
    return str(item["bucket"]).startswith("1x")


def _has_word(caption: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", caption, re.IGNORECASE) is not None
