"""Training methods by name."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from refusals import refused

from finetrainers.config.methods import METHODS
from finetrainers.methods import registry
from finetrainers.methods.spec import MethodSpec


def test_sft_is_there() -> None:
    assert "sft" in METHODS.registered
    assert registry.load_method("sft").__name__ == "SFT"


def test_a_name_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "registered", dict(METHODS.registered))
    registry.register_method("other", "collections:OrderedDict")
    assert registry.load_method("other").__name__ == "OrderedDict"
    with refused("duplicate", "'other'"):
        registry.register_method("other", "collections:Counter")


def test_a_module_replaces_its_own_class_and_other_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's cell that is edited and run again makes another class."""
    monkeypatch.setattr(METHODS, "registered", dict(METHODS.registered))

    def cell() -> type:
        class Mine: ...

        return Mine

    first, second = cell(), cell()
    registry.register_method("mine", first)
    registry.register_method("mine", second)
    assert registry.load_method("mine") is second
    renamed = type("Renamed", (), {"__module__": __name__})
    registry.register_method("mine", renamed)
    assert registry.load_method("mine") is renamed
    with refused("duplicate", "'mine'", f"{__name__}:Renamed"):
        registry.register_method("mine", OrderedDict)
    for method, spec in ((42, None), ("no address", None), (MethodSpec, None), (second, 42), (second, second)):
        options: Any = {} if spec is None else {"spec": spec}
        with pytest.raises(ValueError, match="mine"):
            registry.register_method("mine", method, **options)  # type: ignore[arg-type]
