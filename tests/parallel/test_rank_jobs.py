"""Ranks do a job when a test first looks at it, after those that it needs, and a job that ends them is the only one
that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_jobs import Jobs

_RANK = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from rank_jobs import served

def do(job):
    if job["name"] == "bad" and rank == 1:
        raise ValueError("missing layer")
    (Path(job["output_dir"]) / f"{{job['name']}}-{{rank}}").touch()
    return {{"done": job["name"], "rank": rank, "pid": os.getpid()}}

rank = int(os.environ["RANK"])
served(Path(sys.argv[1]), Path(sys.argv[2]), rank, do)
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    (tmp_path / "rank.py").write_text(_RANK)
    named = {name: {"name": name, "output_dir": str(tmp_path)} for name in ("first", "second", "third", "bad")}
    made = Jobs(tmp_path / "ranks", tmp_path / "rank.py", named, needs={"third": ["first"]})
    yield made
    made.close()


def done(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*-[01]") if path.is_file())


def test_ranks_do_what_is_looked_at_and_what_it_needs(jobs: Jobs, tmp_path: Path) -> None:
    assert not jobs.root.exists(), "nobody has asked for anything"
    found = jobs["third"]
    assert [(rank["done"], rank["rank"]) for rank in found] == [("third", 0), ("third", 1)]
    assert done(tmp_path) == ["first-0", "first-1", "third-0", "third-1"]
    (tmp_path / "third-0").unlink()
    assert jobs["third"] is found
    assert jobs.directory("first") == tmp_path
    assert [rank["pid"] for rank in jobs["first"]] == [rank["pid"] for rank in found]
    assert "third-0" not in done(tmp_path), "a job is done once"


def test_a_job_that_ends_a_rank_says_why_and_the_next_one_gets_others(jobs: Jobs) -> None:
    before = jobs["first"]
    with pytest.raises(AssertionError, match="missing layer"):
        jobs["bad"]
    after = jobs["second"]
    assert [rank["done"] for rank in after] == ["second"] * 2
    assert not {rank["pid"] for rank in before} & {rank["pid"] for rank in after}
