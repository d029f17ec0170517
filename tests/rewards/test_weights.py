"""Tokenizers and settings of rewards: nothing of a repository is run, and nobody is asked whether it should be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from refusals import refused

from finetrainers.rewards.videoalign_model import base_config
from finetrainers.rewards.weights import load_pretrained, load_settings, load_tokenizer


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model folder whose configuration and tokenizer are classes that it brings itself."""

    asked: list[Any] = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(_) or "y")
    code = {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None], "AutoModel": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": code}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    yield tmp_path
    assert asked == []
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    "load", [load_tokenizer, lambda path: load_settings(transformers.AutoConfig, path), base_config]
)
def test_code_of_a_repository_is_neither_run_nor_asked_about(load: Callable[[Path], Any], repository: Path) -> None:
    with refused("unreadable", repository) as caught:
        load(repository)
    assert re.search("(?i)custom code|unrecognized|trust_remote_code", str(caught.value))


def test_models_do_not_ask_either(repository: Path) -> None:
    import torch

    with pytest.raises(ValueError, match=r"(?i)custom code|unrecognized|trust_remote_code"):
        load_pretrained(transformers.AutoModel, str(repository), dtype=torch.float32)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with refused("unreadable", tmp_path):
        load_tokenizer(tmp_path)
