"""`finetrainers run`: the recipe of seven stages in real processes, killed and started again; and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from real_process import Python
from refusals import refused_command
from safetensors.torch import load_file

from finetrainers.config.given import RawOptions
from finetrainers.config.stages import read_stages
from finetrainers.plan.preflight import preflight
from finetrainers.results.reports.sections import facts_of
from finetrainers.rundir.run_records import read_run
from finetrainers.utils.video import write_mp4

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "stages.toml"
STAGES = ["low", "mid", "high", "low-bump", "mid-bump", "high-bump", "high-more"]
STEPS = 2
#: A busy machine is many times slower.
LONG_S = 280.0


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for k in range(2):
        write_mp4(folder / f"{k}.mp4", np.full((49, 32, 32, 3), 60 + 90 * k, np.uint8), fps=24)
        (folder / f"{k}.txt").write_text(f"clip {k}")
    return folder


@pytest.fixture
def small(clips: Path, tmp_path: Path) -> Callable[[str], list[str]]:
    """`small(stages)`: a command that trains the text of a file with flags for small clips."""

    def build(stages: str) -> list[str]:
        path = tmp_path / "stages.toml"
        path.write_text(stages, encoding="ascii")
        changes = f"""--data_root {clips} --output_dir {tmp_path}/runs --pretrained_model_name_or_path demo://ltx
            --video_resolution_buckets 9x32x32 --bucket_keep_prob --bucket_batch_sizes --no-bucket_fall_shorter
            --checkpointing_steps 1 --lr_warmup_steps 1 --no-use_ema --dataloader_num_workers 0"""
        return ["-m", "finetrainers", "run", str(path), *changes.split()]

    return build


def recipe() -> tuple[str, str]:
    """Return the recipe, with two steps in its first stage and one in others, and the part up to its second stage."""
    text = re.sub(r"train_epochs = \d", "train_steps = 1", RECIPE.read_text(encoding="ascii"))
    start = text.index("[[stage]]")
    end = text.index("[[stage]]", start + 1)
    longer = text[:end].replace("train_steps = 1", f"train_steps = {STEPS}")
    return longer + text[end:], longer


def table(printed: str) -> dict[str, list[str]]:
    """The rows of the plan, by stage."""
    rows = [re.split(r"  +", line) for line in printed.splitlines()]
    return {row[0]: row[1:] for row in rows if row[0] in (*STAGES, "twin") and len(row) > 3}


def learning_rates(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["lr"] for record in records if "lr" in record]


@pytest.mark.rotating
@pytest.mark.timeout(600)
def test_a_killed_stage_resumes(small: Callable[[str], list[str]], tmp_path: Path, python: Python) -> None:
    """It ends bit for bit as one that was not killed."""
    _, first = recipe()
    command = small(f"{first}\n{first[first.index('[[stage]]') :].replace('low', 'twin', 1)}")
    killed = python(*command, FINETRAINERS_FAULT=f"kill@step:{STEPS}")
    killed.wait(timeout=LONG_S)
    assert killed.returncode == 128 + 9, killed.stderr
    assert re.search(r"^stage low \(1 of 2\) .* 137;", killed.stderr, re.MULTILINE)
    assert {name: row[-1] for name, row in table(killed.stdout).items()} == {"low": "to do", "twin": "to do"}

    done = python(*command)
    assert done.wait(timeout=LONG_S) == 0, done.stderr
    runs = tmp_path / "runs"
    assert [row[-1] for row in table(done.stdout).values()] == ["at step 1", "to do"]
    # Stages do not repeat the warnings of their plan.
    warnings = re.findall(r"^warning: (?:(?:all stages|stages? [^:]+): )?(.*)", done.stdout, re.MULTILINE)
    assert len(warnings) == len(set(warnings)) > 0, warnings
    assert max(map(len, done.stdout.partition("output of ")[0].splitlines())) <= 80
    assert re.search(rf"^done: 2 .* {runs}/twin$", done.stdout, re.MULTILINE)
    low, twin = (
        load_file(runs / name / "transformer" / "diffusion_pytorch_model.safetensors") for name in ("low", "twin")
    )
    assert low.keys() == twin.keys()
    assert all(low[name].equal(twin[name]) for name in low)


@pytest.mark.rotating
@pytest.mark.timeout(600)
def test_the_recipe_of_seven_stages(small: Callable[[str], list[str]], tmp_path: Path, python: Python) -> None:
    """Each later stage begins from the stage that it names."""
    done = python(*small(recipe()[0]))
    assert done.wait(timeout=LONG_S) == 0, done.stderr
    runs = tmp_path / "runs"
    assert [row[-1] for row in table(done.stdout).values()] == ["to do"] * len(STAGES)

    events = {name: list(map(json.loads, (runs / name / "events.jsonl").read_text().splitlines())) for name in STAGES}
    began = {name: [e for e in events[name] if e["event"] == "began_from"] for name in STAGES}
    assert began.pop("low") == []
    assert [(e["load"], Path(e["run"]).name, e["step"]) for (e,) in began.values()] == [
        ("full", "low", STEPS), *[("full", name, 1) for name in STAGES[1:-2]], ("state", "high-bump", 1),
    ]  # fmt: skip
    seal = json.loads((runs / "mid" / "checkpoints" / "step-1" / "manifest.json").read_text())["manifest_sha256"]
    assert began["high"][0]["checkpoint"] == seal
    facts = facts_of(read_run(runs / "high"))
    origins = [value for name, value in facts if name in ("began from", "and that from")]
    assert origins == [
        f"step 1 of {runs}/mid (all weights; checkpoint {seal[:12]})",
        f"step {STEPS} of {runs}/low (all weights; checkpoint {began['mid'][0]['checkpoint'][:12]})",
    ]
    # The bump begins at a fraction of the rate, and the last stage has the constant one.
    rates = [rate for name in ("low-bump", "high-bump", "high-more") for rate in learning_rates(runs / name)]
    assert rates == pytest.approx([1e-6, 1e-6, 5e-6])
    # It takes the moments of the stage before, of one step, and counts its own steps from 0.
    last = load_optimizer(runs / "high-more"), load_optimizer(runs / "high-bump")
    assert [{state["step"] for state in one.values()} for one in last] == [{2}, {1}]


def load_optimizer(run: Path) -> dict[int, dict[str, float]]:
    """The optimizer's state after the first step."""
    saved = torch.load(run / "checkpoints" / "step-1" / "optimizer.pt", weights_only=True)
    return {key: {"step": float(state["step"])} for key, state in saved["state"].items()}


@pytest.mark.parametrize("family", ["ltx_video", "hunyuan_video"])
def test_the_recipe_goes_with_families(
    family: str, clips: Path, tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """Its sizes are those of both; only frames are not given to each. What it sets has an effect."""
    flags = {"data_root": str(clips), "output_dir": str(tmp_path), "model_name": family, "dataloader_num_workers": "0"}
    flags["pretrained_model_name_or_path"] = str(tiny_repo(family))
    if family != "ltx_video":
        flags["frame_conditioning"] = ""
    stages = read_stages(RECIPE, RawOptions(dict(flags), {name: f"--{name}" for name in flags}))
    assert [stage.name for stage in stages] == STAGES
    for stage in stages:
        assert stage.config is not None
        checked = preflight(stage.config)
        assert (stage.problems, checked.warnings) == ([], [*checked.plan.warnings])
        assert checked.plan.count == 2


def test_mistakes_of_all_stages_are_found_before_the_first(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of those that begin from weights which are not there yet; a stage with one mistake is checked for others."""
    monkeypatch.chdir(tmp_path)
    Path("stages.toml").write_text(
        f"""
        pretrained_model_name_or_path = "demo://ltx"
        video_resolution_buckets = ["9x32x32"]
        train_steps = 1
        lr_bump_peak = 2
        [[stage]]
        name = "low"
        ranks = 4
        data_root = "nowhere"
        [[stage]]
        name = "mid"
        data_root = "{clips}"
        init = {{ stage = "low" }}
        rank = 8
        push_to_hub = true
        [[stage]]
        name = "high"
        data_root = "{clips}"
        init = {{ stage = "mid" }}
        rank = 16
        target_modules = ["nothing"]
        """
    )
    code, found = refused_command(["run", "stages.toml", "--plan"])
    places = ["stage low, stages.toml:8", "stage low, data", "stage mid, --push_to_hub", "stage high, --target_modules"]
    assert (code, [place for place, _ in found]) == (2, places)  # no hub answers in tests
    printed = capsys.readouterr().err
    assert [value for value in ("'ranks'", "'rank'", "'nowhere'") if value not in printed] == []
    text = Path("stages.toml").read_text().replace("ranks = 4", "").replace("nowhere", str(clips))
    Path("stages.toml").write_text(text.replace('target_modules = ["nothing"]', "").replace("push_to_hub = true", ""))
    code, found = refused_command(["run", "stages.toml", "--plan"])
    assert (code, [place for place, _ in found]) == (2, ["stage mid, init", "stage high, init"])
    _, mid, high = capsys.readouterr().err.splitlines()
    assert re.search("stage mid, init: .* stage low .*rank: 16 .* 8 ", mid)
    assert re.search("stage high, init: .* stage mid .*rank: 8 .* 16 ", high)
    assert not Path("finetrainers-training").exists()


def test_a_launcher_is_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    several = ["--launcher", "torchrun --nnodes 2 --nproc_per_node 4 train.py", "--from", "mid"]
    assert refused_command(["run", RECIPE, *several]) == (2, [("--from", "conflict")])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused_command(["run", RECIPE, "--plan"]) == (2, [("WORLD_SIZE", "conflict")])


def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused_command(["run"]) == (2, [("FILE", "required")])
    assert refused_command(["run", RECIPE, "--from", "hihg"]) == (2, [("--from", "unknown")])
    assert "'high'" in capsys.readouterr().err
    code, [(place, _)] = refused_command(["run", RECIPE, "--plann"])
    assert (code, place) == (2, "--plann")
    assert "--plan?" in capsys.readouterr().err
