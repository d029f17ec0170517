"""The estimated batch sizes, against `finetrainers estimate` of a run that has only that bucket and batch size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published_networks import NETWORKS, published_model

from finetrainers.cli.main import main
from finetrainers.config.load import load_config
from finetrainers.plan.preflight import preflight
from finetrainers.tools.batch_search.request import buckets_of, search_problems, without_clips

GIB = 2**30


@pytest.fixture(scope="module")
def ltx(tiny_repo: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configs of a published checkpoint, without weights."""
    directory = tmp_path_factory.mktemp("published") / "model"
    return str(published_model(tiny_repo("ltx_video"), directory, NETWORKS["LTX-Video"]))


@pytest.mark.parametrize(
    ("gpu", "changes"),
    [
        (40, ()),
        (70, ("--training_type", "full-finetune", "--gradient_accumulation_steps", "3", "--precompute_conditions")),
    ],
    ids=["lora", "full"],
)
def test_sizes_fit_by_the_estimate_and_one_clip_more_does_not(
    gpu: int, changes: tuple[str, ...], ltx: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without data: every size in turn is a run of its own, whose largest bucket is the only one."""
    model = ("--pretrained_model_name_or_path", ltx, *changes)
    names, output = ("49x512x768", "1x256x256"), tmp_path / "found.json"
    asked = ("--video_resolution_buckets", *names, "--gpu", str(gpu), "--margin", "10", "--output", str(output))
    assert main(["search-batch", *model, *asked, "--max_batch_size", "50"]) == 0
    printed, found = capsys.readouterr(), json.loads(output.read_text())
    assert [one["bucket"] for one in found["buckets"]] == [*names]
    assert re.search("no GPU: nothing ", printed.out)
    assert re.search(f" {0.9 * gpu:.3g} of {gpu} GiB .*: 10% ", printed.out)

    def needed(bucket: str, clips: int) -> float:
        alone = ("--video_resolution_buckets", bucket, "--batch_size", str(clips), "--json")
        assert main(["estimate", *model, *alone]) == 0
        return float(json.loads(capsys.readouterr().out)["peak"]["reserved"]) / GIB

    for one in found["buckets"]:
        size = one["estimated"]
        assert 1 <= size <= 50
        if "--precompute_conditions" not in changes:  # else one clip of the largest bucket is encoded by itself
            assert one["needed_gib"] == pytest.approx(needed(one["bucket"], size), abs=1e-3)
        assert needed(one["bucket"], size) <= 0.9 * gpu
        if size < 50:
            assert needed(one["bucket"], size + 1) > 0.9 * gpu
        else:
            assert re.search(f"^{one['bucket']}: .*--max_batch_size 50 ", printed.out, re.MULTILINE)
    assert found["buckets"][0]["estimated"] < 50
    assert found["bucket_batch_sizes"] == [f"{one['bucket']}={one['estimated']}" for one in found["buckets"]]


def test_what_fits_nowhere(tiny_repo: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--pretrained_model_name_or_path", str(tiny_repo("ltx_video")))
    buckets = ("--video_resolution_buckets", "49x512x768", "9x32x32")
    assert main(["search-batch", *model, *buckets, "--estimate_only", "--gpu", "0.1"]) == 1
    printed = capsys.readouterr()
    assert re.search("^49x512x768: 1 clip .* GiB ", printed.err, re.MULTILINE)
    assert re.search("^49x512x768: .* 1 clip .*`finetrainers estimate --gpu 0.1GiB`", printed.out, re.MULTILINE)
    assert "--bucket_batch_sizes 9x32x32=" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 120


def test_processes_that_share_weights_fit_more(ltx: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--pretrained_model_name_or_path", ltx, "--training_type", "full-finetune", "--precompute_conditions")
    found = []
    for name, more in (("alone", ()), ("shared", ("--fsdp", "full", "--num_processes", "8"))):
        output = tmp_path / f"{name}.json"
        asked = ("--video_resolution_buckets", "49x512x768", "--gpu", "80", "--output", str(output))
        assert main(["search-batch", *model, *asked, *more]) in (0, 1)
        found.append(json.loads(output.read_text())["buckets"][0]["estimated"])
    assert found[1] > found[0]


def test_buckets_are_those_that_clips_come_in(options: Callable[..., dict[str, Any]]) -> None:
    values = options(
        clips=3, video_resolution_buckets=["9x64x64", "9x32x32", "17x64x64"], bucket_keep_prob=["9x64x64=0.5"]
    )
    config = load_config(**values)
    searches = buckets_of(preflight(config).plan, most=2)
    assert [(one.bucket, one.clips, one.most) for one in searches] == [((9, 64, 64), 3, 2), ((9, 32, 32), 3, 2)]
    assert without_clips(config, searches) == [(17, 64, 64)]


def test_runs_whose_options_follow_the_batch_size_are_refused(options: Callable[..., dict[str, Any]]) -> None:
    chosen = {"blocks_to_swap": "auto", "activation_memory": "auto", "memory_budget": "24GB", "dry_run": True}
    named = [(problem.where, problem.kind) for problem in search_problems(load_config(**options(**chosen)))]
    places = ("--blocks_to_swap auto", "--activation_memory auto", "--memory_budget")
    assert named == [*((place, "conflict") for place in places), ("--dry_run", "unsupported")]
    assert search_problems(load_config(**options())) == []
    sampled = search_problems(load_config(**options(method="grpo", reward=["brightness"])))
    assert [(problem.where, problem.kind) for problem in sampled] == [("--method grpo", "unsupported")]
