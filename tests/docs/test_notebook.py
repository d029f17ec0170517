"""The notebook of examples/ runs in a kernel from top to bottom, and again, with fewer steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
#: What makes it small.
INSTEAD = {
    "train_steps=60": "train_steps=3", "batch_size=4": "batch_size=1", "--items 16": "--items 2",
    "validation_steps=20": "validation_steps=2, validation_inference_steps=2",
    'compare="base"': 'compare="base", num_inference_steps=2',
}  # fmt: skip


def test_it_has_no_outputs() -> None:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert NOTEBOOK.stat().st_size < 10_000
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * len(cells)
    source = "".join("".join(cell["source"]) for cell in cells)
    assert all(source.count(text) == 1 for text in INSTEAD)


@pytest.mark.rotating
def test_it_runs_twice_in_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the test extra of this environment is older")
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        for text, small in INSTEAD.items():
            cell.source = cell.source.replace(text, small)
    notebook.cells += [nbformat.from_dict({**cell, "id": f"{cell.id}-again"}) for cell in notebook.cells]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    first, again = code[: len(code) // 2], code[len(code) // 2 :]

    texts = _texts(first[1])
    assert any(text.startswith("step 3/3  took") for text in texts)
    assert any(text.startswith("samples") and "step-000003" in text for text in texts)
    assert any(text.startswith("curves: Training loss") for text in texts)
    assert not any("step 2/3" in text for text in texts)  # one line of progress
    assert "step 3, loss" in "".join(_texts(first[2]))
    assert any("image/png" in output.get("data", {}) for output in first[3].outputs)
    assert "comfyui" in "".join(_texts(first[4]))
    assert "step 3/3" in "".join(_texts(again[1]))
    assert _texts(again[2]) == _texts(first[2])


def _texts(cell: Any) -> list[str]:
    """Return the text of each output of a cell."""
    return [output.get("text") or output["data"].get("text/plain", "") for output in cell.outputs]
