"""Files of encoded prompts in the layout of DanceGRPO's preprocessing, which other trainers and `prompts` read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.data.loading.text_conditioning import TextConditioning
from finetrainers.models.spec import ModelSpec, PromptEmbeds
from finetrainers.utils.files import sweep_unfinished, unfinished_path, write_json_atomic

from .plan import PromptPlan
from .prompts import EMPTY_FILE, ENCODED_KEYS, ENCODED_LIST, Prompt

_OPTION = "--prompt_embeddings_dir"


def check_embeddings(plan: PromptPlan, *, writes: bool, spec: ModelSpec) -> None:
    """Check that the family reads prompts that were encoded elsewhere, and writes them if it has to.

    Raises:
        ConfigError: it has no such format, or the prompts to be written are encoded already.
    """
    encoded = any(prompt.embedding is not None for prompt in (*plan.prompts, *plan.eval_prompts))
    if encoded and type(spec).given_text is ModelSpec.given_text:
        message = f"{spec.name} cannot read prompts that were encoded elsewhere; use .txt or .jsonl"
        raise ConfigError([Problem("--prompts", message, "unsupported")])
    if not writes:
        return
    if encoded:
        message = "the prompts are already encoded; set --prompts to a .txt or .jsonl file"
        raise ConfigError([Problem(_OPTION, message, "conflict")])
    try:
        spec.to_given_text(PromptEmbeds({n: torch.zeros(1, *shape) for n, shape in spec.text_shapes().items()}))
    except ValueError as error:
        raise ConfigError([Problem(_OPTION, f"{error}; remove it", "unsupported")]) from None


def embeddings_writer(
    folder: Path, plan: PromptPlan, *, spec: ModelSpec, parallel: Any
) -> Callable[[TextConditioning], None]:
    """Return a function that writes encoded training prompts into a directory; all ranks call it to share the work."""

    def write(texts: TextConditioning) -> None:
        with parallel.raise_on_all_ranks(f"writing {_OPTION}"):
            for name in ENCODED_KEYS.values():
                sweep_unfinished(folder / name)
            for number in range(parallel.rank, len(plan.prompts), parallel.world_size):
                prompt = plan.prompts[number]
                image = plan.picture(prompt) if texts.keys.texts_see_images else None
                _write(folder, f"{number}.pt", prompt, texts, texts.keys.text(prompt.text, image), spec)
            if parallel.rank == 0:
                _write(folder, EMPTY_FILE, Prompt("", ""), texts, texts.keys.text(""), spec)
        if parallel.rank == 0:  # the others have written theirs; if one failed, all ranks have raised
            rows = [
                {**dict.fromkeys(ENCODED_KEYS, f"{number}.pt"), "caption": prompt.text, **_images(prompt)}
                for number, prompt in enumerate(plan.prompts)
            ]
            write_json_atomic(folder / ENCODED_LIST, rows)

    return write


def _images(prompt: Prompt) -> dict[str, str]:
    """Return the prompt's images under names that do not depend on the directory of the list."""
    return {key: str(path.resolve()) for key, path in prompt.images.items()}


def _write(folder: Path, file: str, prompt: Prompt, texts: TextConditioning, key: str, spec: ModelSpec) -> None:
    """Write a prompt's two files from its cache entry."""
    cache = texts.keys.cache
    entry = cache.get(key)
    if entry is None:
        raise FileNotFoundError(f"{prompt.text!r} has disappeared from {cache.directory}; run the same command again")
    for name, tensor in zip(ENCODED_KEYS.values(), spec.to_given_text(PromptEmbeds(entry)), strict=True):
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = unfinished_path(path)
        torch.save(tensor, unfinished)
        unfinished.replace(path)
