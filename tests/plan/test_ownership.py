"""A run writes into a new directory, an empty one, or that of a run; whatever else a directory holds stays as it is."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from finetrainers.cli.main import main
from finetrainers.config.errors import ConfigError
from finetrainers.config.load import dump_toml, load_config
from finetrainers.plan.ownership import EXPORTED
from finetrainers.plan.ready import get_ready
from finetrainers.results.export_formats import find_source, rename_foreign_exports
from finetrainers.rundir.identity import IDENTITY, read_identity, take_identity
from finetrainers.utils.reading import find_json_object


def content(root: Path) -> Mapping[str, str]:
    """Every file of a directory, by its SHA-256."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def problems(values: Mapping[str, Any], **changes: Any) -> list[str]:
    """What is said of the output directory; nothing is written."""
    preparing = changes.pop("preparing", False)
    changes = {name: str(value) if isinstance(value, Path) else value for name, value in changes.items()}
    config = load_config(**{**values, "dry_run": True, **changes})
    before = content(config.run.output_dir)
    try:
        get_ready(config, preparing=preparing)
    except ConfigError as error:
        found = [problem for problem in error.problems if problem.where == "--output_dir"]
        assert {problem.kind for problem in found} <= {"occupied"}
        return [problem.message for problem in found]
    finally:
        assert content(config.run.output_dir) == before
    return []


def fill(root: Path, *names: str) -> Path:
    """A directory with files, and with folders that hold one, where a name ends in a slash."""
    for name in names:
        path = root / (f"{name}file" if name.endswith("/") else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    return root


@pytest.mark.parametrize(
    ("names", "lost"),
    [
        (["README.md", "config.toml", "env.json"], ["README.md", "config.toml", "env.json"]),
        (["README.md", "src/"], ["README.md", "src"]),
        (["clip.mp4", "clip.txt"], ["clip.mp4", "clip.txt"]),
        (["transformer/"], ["transformer"]),
        (["pytorch_lora_weights.safetensors", "train.log"], ["pytorch_lora_weights.safetensors"]),
        (["checkpoints/step-5/"], ["checkpoints"]),
        (["events.jsonl", "metrics.jsonl"], ["events.jsonl", "metrics.jsonl"]),
    ],
)
def test_a_directory_of_other_files_is_refused_with_their_names(
    names: list[str], lost: list[str], options: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    fill(tmp_path / "run", *names)
    for name in set(names) & {"env.json", "events.jsonl"}:  # those of another program
        (tmp_path / "run" / name).write_text(
            '{"time": 1, "event": "click", "python": "3.11", "packages": {"torch": "2"}}'
        )
    (message,) = problems(options(), resume_from_checkpoint=None if "checkpoints/step-5/" not in names else "auto")[:1]
    assert all(name in message for name in lost)
    assert "train.log" not in message


@pytest.mark.parametrize(
    "names",
    [
        [],
        [".gitkeep", ".cache/", "lost+found/"],
        ["train.log", "traceback.txt", "hangs/", "failures/", "control/", "precomputed/", "stage.toml", ".lock"],
        ["run.toml", "slurm-17.out", "job.err", "console.log"],
    ],
)
def test_what_is_there_before_a_run_begins_is_in_nobodys_way(
    names: list[str], options: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    fill(tmp_path / "run", *names)
    assert problems(options()) == []


def test_what_the_options_name_may_be_inside_but_for_what_a_run_writes(
    options: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    root, values = tmp_path / "run", options()
    shutil.copytree(values["data_root"], root / "clips")
    shutil.copytree(values["pretrained_model_name_or_path"], root / "base")
    (root / "prompts.txt").write_text("a cat\n")
    inside = {"data_root": root / "clips", "precompute_dir": root / "cache", "precompute_conditions": True}
    inside |= {"pretrained_model_name_or_path": root / "base", "validation_prompts": str(root / "prompts.txt")}
    assert problems(values, **inside) == []
    (message,) = problems(values)
    assert all(name in message for name in ("base", "clips", "prompts.txt"))
    (root / "clips").rename(root / "samples")
    (message,) = problems(values, **{**inside, "data_root": root / "samples"})
    assert "samples" in message
    assert "base" not in message


def test_weights_that_a_run_begins_with_are_not_replaced(
    options: Callable[..., dict[str, Any]], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = options(train_steps=1)
    base = shutil.copytree(values["pretrained_model_name_or_path"], tmp_path / "base")
    full = {"training_type": "full-finetune", "rank": None, "lora_alpha": None}
    full = {name: value for name, value in {**values, **full}.items() if value is not None}
    for output_dir in (base, base / "transformer"):
        for kind in (values, full):
            (message,) = problems(kind, pretrained_model_name_or_path=base, output_dir=output_dir)
            assert "config.json" in message or "model_index.json" in message
            problems(kind, pretrained_model_name_or_path=base, output_dir=output_dir, preparing=True)
    # Nor by a run in its own directory: its result is what it was begun with.
    run(**values)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    lora = tmp_path / "run" / "pytorch_lora_weights.safetensors"
    for given, count in ((None, 1), (lora, 2), (lora.parent, 2)):
        messages = problems(values, init_from=given)
        assert ["pytorch_lora_weights.safetensors" in message for message in messages] == [True] * count
    assert problems(values, init_from=lora, output_dir=tmp_path / "next") == []
    # A directory inside what the run writes is not a place for another one.
    for name in ("checkpoints/b", "samples/b", "export/comfyui/b"):
        (message,) = problems(values, output_dir=tmp_path / "run" / name)
        assert name.split("/")[0] in message
    assert problems(values, output_dir=tmp_path / "run" / "b") == []
    (tmp_path / "run" / "samples").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run" / "samples", target_is_directory=True)
    (message,) = problems(values, output_dir=tmp_path / "link" / "b")
    assert "samples" in message


def test_runs_of_before_are_continued_and_started_again(
    options: Callable[..., dict[str, Any]], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = options(train_steps=2, checkpointing_steps=1)
    run(**values)
    root = tmp_path / "run"
    (root / "run.json").unlink(missing_ok=True)
    (root / "notes.txt").write_text("mine")
    checkpoints = {"resume_from_checkpoint": "latest", "train_steps": 3}
    assert problems(values, **checkpoints) == []
    for path in [one for one in root.iterdir() if one.name.startswith(".")]:
        path.unlink()  # copied without hidden files
    assert problems(values, **checkpoints) == []
    assert problems(values) != []  # it holds checkpoints, as ever
    for kept in (["checkpoints"], ["env.json"], ["events.jsonl"]):
        copy = tmp_path / kept[0]
        copy.mkdir()
        for name in [*kept, "README.md", "metrics.jsonl"]:
            (shutil.copytree if (root / name).is_dir() else shutil.copy)(root / name, copy / name)
        more = checkpoints if kept == ["checkpoints"] else {}
        assert problems(values, output_dir=copy, **more) == []
    # People copy config.toml to start another run; one that somebody wrote by hand would be lost.
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(root / "config.toml", other)
    assert problems(values, output_dir=other) == []
    (other / "config.toml").write_text("# tried on Monday\nlr = 1e-4\n")
    (message,) = problems(values, output_dir=other)
    assert "config.toml" in message
    # A run that is no directory of runs may lie below another one.
    shutil.copytree(root, tmp_path / "runs" / "a")
    assert problems(values, output_dir=tmp_path / "runs") == []
    assert json.loads((root / "env.json").read_text())["packages"]["finetrainers"]
    assert dump_toml(load_config(root / "config.toml"))


def test_preparing_in_a_foreign_directory_needs_a_cache_elsewhere(
    options: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    fill(tmp_path / "run", "README.md")
    values = {**options(), "precompute_conditions": True}
    assert len(problems(values, preparing=True)) == 1
    assert problems(values, preparing=True, precompute_dir=tmp_path / "cache") == []


def test_other_commands_write_over_their_own_files_alone(
    options: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = options(validation_prompts="a cat", validation_inference_steps=2)
    root, others = str(tmp_path / "run"), fill(tmp_path / "others", "index.html", "sheet.png", "report.json", "x/")
    shutil.copytree(others, root + "/watch/run")
    (tmp_path / "run" / "config.toml").write_text(dump_toml(load_config(**values)))
    model = [
        values["pretrained_model_name_or_path"],
        "--prompts",
        "a cat",
        "--size",
        "9x64x64",
        "--num_inference_steps",
        "2",
    ]
    flags = [
        part
        for name, value in values.items()
        for part in (f"--{name}", *(value if isinstance(value, list) else [str(value)]))
    ]
    search = [
        "search-batch",
        "--estimate_only",
        "--gpu",
        "24GB",
        *flags,
        "--output_dir",
        str(tmp_path / "s"),
        "--output",
    ]
    commands = {
        "directory": ["tiny", "ltx_video", str(others)],
        "--output_dir": ["sample", *model, "--output_dir", str(others)],
        "--output": ["report", root, "--output", str(others / "index.html")],
        "--html": ["check", *flags, "--html", str(others / "index.html")],
        "--json": ["check", *flags, "--json", str(others / "report.json")],
        "--output ": [*search, str(others / "report.json")],
    }
    before, theirs = content(others), content(Path(root))
    for option, command in commands.items():
        assert main(command) == 2, command
        said = capsys.readouterr().err
        assert f"{option.strip()}: " in said, said
        assert str(others) in said
    assert main(["watch", root, "--once"]) == 2
    said = capsys.readouterr().err
    assert "index.html" in said
    assert "sheet.png" in said
    assert content(others) == before
    assert content(Path(root)) == theirs
    # What a command has written itself, it writes again.
    own = tmp_path / "own"
    again = [
        ["sample", *model, "--output_dir", str(own)], ["report", root, "--output", str(own / "r.html")],
        ["check", *flags, "--html", str(own / "c.html"), "--json", str(own / "c.json")], [*search, str(own / "s.json")],
    ]  # fmt: skip
    for command in again:
        assert [main(command), main(command)] == [0, 0], capsys.readouterr().err


def test_an_export_replaces_the_files_of_an_export_of_the_same_run_alone(
    options: Callable[..., dict[str, Any]], run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = options(train_steps=1, export_formats=["comfyui"])
    root = run(**values).root
    folder = root / "export" / "comfyui"
    again = ["export", str(root), "--format", "comfyui", "--overwrite"]
    shutil.copytree(root, tmp_path / "before")
    fill(folder, "mine.txt")
    theirs = content(folder)
    assert main(again) == 2
    assert "mine.txt" in capsys.readouterr().err
    assert content(folder) == theirs
    resumed = {"resume_from_checkpoint": "latest", "train_steps": 2}
    (message,) = problems(values, **resumed)
    assert "mine.txt" in message
    (folder / "mine.txt").unlink()
    assert main(again) == 0, capsys.readouterr().err
    identity = read_identity(root)
    assert identity is not None
    exported = find_json_object(folder / EXPORTED)
    assert (exported["run"], exported["files"]) == (identity.run, ["run.safetensors"])
    # Another run, which has its place.
    (root / IDENTITY).unlink()
    shutil.rmtree(root / "checkpoints")
    take_identity(root)
    assert main(again) == 2
    assert "another run" in capsys.readouterr().err
    # An export of an earlier version; files that came while a run trained are set aside.
    earlier = tmp_path / "before" / "export" / "comfyui"
    (earlier / EXPORTED).unlink()
    assert main([*again[:1], str(tmp_path / "before"), *again[2:]]) == 0, capsys.readouterr().err
    (earlier / EXPORTED).unlink()
    for name in ("other.safetensors", "second.safetensors"):
        fill(earlier, name)
    source = find_source(str(tmp_path / "before"), options={})
    (aside,) = rename_foreign_exports(source, ["comfyui", "peft"])
    assert (aside / "other.safetensors").read_text() == "mine"
