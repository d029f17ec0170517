"""Prompts with their text conditioning: what is read of them at the start, and what is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from one_of import OneOf
from refusals import refused
from torch import Tensor

from finetrainers.config.load import load_config
from finetrainers.data.cache.keys import CacheKeys
from finetrainers.data.cache.store import CacheError, TensorCache
from finetrainers.data.loading.position import DataPosition
from finetrainers.data.loading.text_conditioning import TextCache
from finetrainers.data.reading.items import DataError
from finetrainers.methods.grpo.prompts.plan import PromptPlan
from finetrainers.methods.grpo.prompts.prompts import Prompt
from finetrainers.methods.grpo.prompts.source import PromptSource
from finetrainers.models.spec import ModelComponents, PromptEmbeds


class _Spec:
    """Reads what DanceGRPO's preprocessing writes."""

    def given_text(self, embedding: Tensor, mask: Tensor) -> PromptEmbeds:
        return PromptEmbeds({"prompt_embeds": embedding[None, 1:], "prompt_attention_mask": mask[None, 1:].bool()})


def _opened(
    tmp_path: Path, prompts: Sequence[Prompt], *, rank: int = 0, world_size: int = 1, said: Sequence[int] = ()
) -> tuple[CacheKeys, Callable[[], PromptSource]]:
    """Where the prompts' entries go, and what opens the source of them."""
    config = load_config(model_name="m", pretrained_model_name_or_path="r", method="grpo", output_dir=str(tmp_path))
    parallel: Any = OneOf(rank, world_size)
    parallel.gather_objects = lambda items: [*items, *said]
    plan = PromptPlan(tuple(prompts), (), (9, 64, 64), 8, 8.0, "f")
    spec: Any = _Spec()
    cache = TextCache(plan.all_captions(), plan.texts, config, spec=spec, parallel=parallel)
    texts = cache.encode_on_demand(None)  # type: ignore[arg-type]
    vae = ModelComponents({"vae": torch.nn.Identity()})
    begin = DataPosition.begin(config, data_size=world_size)
    return texts.keys, lambda: PromptSource(
        plan, config, spec=spec, parallel=parallel, texts=texts, clip_encoders=vae, data_position=begin
    )


def _row(tokens: int) -> dict[str, Tensor]:
    mask = torch.zeros(1, 64, dtype=torch.bool)
    mask[:, :tokens] = True
    return {"prompt_embeds": torch.randn(1, 64, 8), "prompt_attention_mask": mask}


@pytest.mark.parametrize(("rank", "said", "length"), [(0, [], 48), (1, [], 32), (1, [48], 48)])
def test_how_long_the_longest_prompt_is_takes_no_embeddings(
    rank: int, said: list[int], length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks share the prompts, of which each reads masks alone; the embeddings may be hundreds of gigabytes."""
    prompts = [Prompt(str(tokens), "") for tokens in (40, 20, 5)]
    keys, opened = _opened(tmp_path, prompts, rank=rank, world_size=2, said=said)
    for text in ("40", "20", "5", ""):
        keys.cache.put(keys.text(text), _row(int(text or 1)))
    read, peeked, get, peek = [], [], TensorCache.get, TensorCache.peek
    monkeypatch.setattr(TensorCache, "get", lambda self, key: read.append(key) or get(self, key))
    monkeypatch.setattr(
        TensorCache, "peek", lambda self, key, name: peeked.append((key, name)) or peek(self, key, name)
    )
    source = opened()
    assert set(read) == {keys.text("")}
    mine = ["40", "5"] if rank == 0 else ["20", ""]
    assert peeked == [(keys.text(text), "prompt_attention_mask") for text in mine]
    assert source.conditions([prompts[0], prompts[2]])["prompt_embeds"].shape == (2, length, 8)


def test_embeddings_of_another_tool_are_mapped_for_their_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []
    for number, tokens in enumerate((20, 40)):
        files = [tmp_path / f"{number}.{kind}.pt" for kind in ("embedding", "mask")]
        torch.save(torch.randn(65, 8), files[0], _use_new_zipfile_serialization=number == 0)  # one cannot be mapped
        torch.save((torch.arange(65) <= tokens).long(), files[1])
        prompts.append(Prompt(str(number), "", *files))
    keys, opened = _opened(tmp_path, prompts)
    keys.cache.put(keys.text(""), _row(1))
    mapped, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **options: mapped.append(options["mmap"]) or load(path, **options))
    source = opened()
    assert mapped == [True, True, False, True]
    mapped.clear()
    assert source.conditions(prompts)["prompt_embeds"].shape == (2, 48, 8)
    assert mapped == [False] * 4


def test_damaged_embeddings_are_named_before_anything_is_sampled(tmp_path: Path) -> None:
    prompts = []
    for number in range(4):
        files = [tmp_path / f"{number}.{kind}.pt" for kind in ("embedding", "mask")]
        torch.save(torch.randn(65, 8), files[0])
        torch.save((torch.arange(65) <= 20).long(), files[1])
        prompts.append(Prompt(str(number), f"videos2caption.json entry {number + 1}", *files))
    content = (tmp_path / "0.embedding.pt").read_bytes()
    (tmp_path / "0.embedding.pt").write_bytes(content[: len(content) // 2])
    (tmp_path / "1.mask.pt").write_bytes(b"")
    (tmp_path / "2.embedding.pt").write_text("hello")
    keys, opened = _opened(tmp_path, prompts)
    keys.cache.put(keys.text(""), _row(1))
    with refused("unreadable", "3 encoded", error=DataError) as caught:
        opened()
    cut, empty, text = caught.value.problems
    assert cut.startswith(f"videos2caption.json entry 1: {tmp_path / '0.embedding.pt'} ")
    assert empty.startswith(f"videos2caption.json entry 2: {tmp_path / '1.mask.pt'} is empty;")
    assert text.startswith(f"videos2caption.json entry 3: {tmp_path / '2.embedding.pt'} ")


def test_an_entry_that_has_gone_is_said(tmp_path: Path) -> None:
    keys, opened = _opened(tmp_path, [Prompt("a cat", "")])
    keys.cache.put(keys.text(""), _row(1))
    with pytest.raises(CacheError, match=f"'a cat' .* {re.escape(str(keys.cache.directory))}"):
        opened()
