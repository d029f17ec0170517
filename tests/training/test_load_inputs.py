"""Agreement of all ranks before anything is loaded; parts that load at once, and that they are gone afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from one_of import OneOf
from torch import nn

from finetrainers.models import common
from finetrainers.sampling import sampler
from finetrainers.training import load_inputs
from finetrainers.training.load_inputs import load_text_conditioning
from finetrainers.training.trainer import Trainer


def test_ranks_that_have_found_other_data_do_not_begin() -> None:
    """As when one machine remembers of a file that it is damaged, and another does not."""

    class Differing(OneOf):
        def gather_objects(self, items: list) -> list:
            return [*items, *items, "another"]

    plan = SimpleNamespace(fingerprint="one", fingerprint_of="files")
    checked: object = SimpleNamespace(config=None, plan=plan)
    with pytest.raises(RuntimeError, match=r"rank 2 .* rank 0 .* files, .*--probe_dir"):
        load_text_conditioning(checked, None, Differing(0, 3), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("encodes", "images"), [(True, []), (False, ["a.png"]), (False, [])])
def test_parts_load_on_all_processes_at_once_where_each_of_them_is_mapped(
    encodes: bool, images: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other parts would be in host memory once for each process; the image encoder only where clips are encoded."""

    class Asked(Exception):
        pass

    class Asking(OneOf):
        def one_at_a_time(self, what: str, load: Any, *, together: Any = False) -> Any:
            raise Asked(what, together)

    monkeypatch.setattr(load_inputs, "are_mapped", lambda model, parts: (model, *parts))
    monkeypatch.setattr(load_inputs, "method_spec", lambda _: SimpleNamespace(caches_texts=lambda _: False))
    plan = SimpleNamespace(encodes_clips=encodes, images=images)
    checked: Any = SimpleNamespace(config=SimpleNamespace(model="m"), plan=plan, sampled=[])
    facts = SimpleNamespace(text_parts=("tokenizer", "text_encoder"), clip_parts=("vae", "image_encoder"))
    spec, watchdog = SimpleNamespace(facts=facts), SimpleNamespace(enter=lambda _: None)
    with pytest.raises(Asked) as asked:
        load_inputs.load_batch_source(checked, spec, Asking(), watchdog, None)  # type: ignore[arg-type]
    parts = ("vae", "image_encoder") if encodes or images else ("vae",)
    assert asked.value.args[1] == ("m", *parts)
    with pytest.raises(Asked) as asked:
        load_inputs._load_or_encode(checked, spec, Asking(), watchdog, texts=None, sampling_dtype=None)  # type: ignore[arg-type]
    assert asked.value.args[1] == ("m", "tokenizer", "text_encoder")
    monkeypatch.setattr(sampler, "are_mapped", load_inputs.are_mapped)
    sampling: Any = SimpleNamespace(config=checked.config, spec=spec, parallel=Asking())
    with pytest.raises(Asked) as again:
        sampler.Sampler.encode(sampling, [])
    assert again.value.args == asked.value.args


def test_encoders_are_gone_while_encoded_clips_are_trained(
    options: Callable[..., dict[str, Any]], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []
    load, step = common.load_frozen, Trainer.train_step

    def loading(*args: Any) -> Any:
        found = load(*args)
        loaded.extend(weakref.ref(part) for part in found.modules.values() if isinstance(part, nn.Module))
        return found

    def training(self: Trainer, work: Any) -> Any:
        alive.append(sum(one() is not None for one in loaded))
        return step(self, work)

    monkeypatch.setattr(common, "load_frozen", loading)
    monkeypatch.setattr(Trainer, "train_step", training)
    run(**options(train_steps=1, precompute_conditions=True))
    assert len(loaded) >= 2
    assert alive == [0]
