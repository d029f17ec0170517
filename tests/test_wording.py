"""Counts of phrases that readers stumble over do not rise; `tests/wording.py` says where they stand."""

from __future__ import annotations

from pathlib import Path

import wording

#: How often each rule of `wording` is broken. Lower a number when it has fallen; raise none.
LIMITS = {
    "opening": 0, "none": 0, "so many": 0, "is no": 0, "of its own": 6, "of": 1, "also": 1, "says": 7,
    "idiom": 9, "what is": 8, "which": 11, "weights": 4, "number": 114, "term": 14, "name": 100,
    "sentence": 170,
}  # fmt: skip
CODE = '''"""What is drawn.

Of which nobody knows.
"""


def fate_of(found):
    """None: it is no longer. What was kept, also in words."""
    told = "5 % of the pictures"  # so many of its own, which is said to be of 3 M weights
    return told
'''


TEST = """
@pytest.mark.parametrize("message", ["no such file here", "lr"])
def test(message: str) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        call("a red ball moves")
    assert "is not a number" in call(message)
"""


def test_counts_do_not_rise() -> None:
    risen = {name: number for name, number in wording.count().items() if number > LIMITS[name]}
    assert not risen, "python tests/wording.py --show RULE prints the places"


def test_every_kind_of_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "finetrainers").mkdir()
    (tmp_path / "finetrainers" / "module.py").write_text(CODE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_module.py").write_text(TEST)
    for page in ("README.md", "CONTRIBUTING.md"):
        (tmp_path / page).write_text("# A page\n\nThe way by which `what is kept` is told,\nalso when it is no use.\n")
    assert wording.count(tmp_path) == {
        "opening": 1, "none": 1, "so many": 1, "is no": 2, "of its own": 1, "of": 1, "also": 3, "says": 3, "idiom": 2,
        "what is": 2, "which": 2, "weights": 1, "number": 1, "term": 1, "name": 3,
        "sentence": 3,
    }  # fmt: skip
