"""Packaged models are named `demo://NAME`; other names pass through."""

from pathlib import Path

from refusals import refused

from finetrainers.utils.packaged import model_path, packaged_models


def test_packaged_models_are_directories() -> None:
    assert "demo://ltx" in packaged_models()
    for name in packaged_models():
        assert (Path(model_path(name)) / "model_index.json").is_file()


def test_other_names_pass_through() -> None:
    assert model_path("Lightricks/LTX-Video") == "Lightricks/LTX-Video"
    assert model_path("./model") == "./model"


def test_a_misspelt_name_is_told_the_nearest() -> None:
    with refused("unknown", "'demo://ltx'", "'demo://ltxx'"):
        model_path("demo://ltxx")
