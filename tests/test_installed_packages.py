"""Families, methods and rewards of installed packages: those of the pages, built from their code, in every command; and
packages that are broken."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_process import Python
from refusals import refused_command

from finetrainers.cli.main import main
from finetrainers.config.help import help_text
from finetrainers.config.methods import METHODS
from finetrainers.config.root import TrainConfig, fields
from finetrainers.models.family import FAMILIES
from finetrainers.rewards.registry import REWARDS
from finetrainers.utils.video import write_mp4

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
HOW_TO = ROOT / "docs" / "how-to"
SCANNED = "import importlib.metadata as m\nscan = m.entry_points\nfound = []\n"
SCANNED += "m.entry_points = lambda **g: found.append(g) or scan(**g)\n"


def blocks(page: Path) -> list[str]:
    """The code of a page."""
    return re.findall(r"^```(?:python|toml)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def install(site: Path, name: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Write the metadata of an installed package, as pip does."""
    info = site / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    tables = ((group, "\n".join(f"{n} = {v}" for n, v in points.items())) for group, points in entry_points.items())
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{lines}\n" for group, lines in tables))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of packages with the model and the method of the how-to pages, and a reward."""
    site = tmp_path_factory.mktemp("site")
    for page in ("adding-a-model", "adding-a-method"):
        files = {text.partition("\n")[0].removeprefix("# "): text for text in blocks(HOW_TO / f"{page}.md")}
        project = tomllib.loads(files["pyproject.toml"])
        modules = project["tool"]["setuptools"]["py-modules"]
        for module in [*modules, *(["test_skyreels_t2v"] if "skyreels_t2v" in modules else [])]:
            (site / f"{module}.py").write_text(files[f"{module}.py"])
        install(site, project["project"]["name"], project["project"]["entry-points"])
    page = blocks(ROOT / "docs" / "reference" / "rewards.md")
    (site / "my_module.py").write_text(next(text for text in page if text.startswith("# my_module.py")))
    [table] = [text for text in page if text.startswith('[project.entry-points."finetrainers.rewards"]')]
    install(site, "redness", tomllib.loads(table)["project"]["entry-points"])
    return site


def run_python(code: str, *paths: Path) -> str:
    """What a fresh interpreter prints."""
    setup = f"import sys\nsys.path[:0] = {[str(path) for path in (ROOT, *paths)]}\n{SCANNED}"
    done = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_and_configurations_of_own_methods_search_no_packages(site: Path) -> None:
    code = (
        "import io, contextlib\nfrom finetrainers.cli.main import main\nfrom finetrainers import load_config\n"
        "def run(*argv):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "        main(list(argv))\n    return out.getvalue()\n"
        "run('--help'), run('train', '--help'), run('train', '--help', 'dpo'), run('train', '--help', 'rank')\n"
        "load_config(pretrained_model_name_or_path='x', method='dpo', dpo={'beta': 3.0}, **{'data.max_items': 2})\n"
        "ours = lambda: [g['group'] for g in found if g.get('group', '').startswith('finetrainers')]\n"
        "print(ours(), 'anchored' in sys.modules)\n"
        "print('--anchored.strength X' in run('train', '--help', 'anchored'), ours(), 'torch' in sys.modules)\n"
    )
    assert run_python(code, site).splitlines() == ["[] False", "True ['finetrainers.methods'] False"]


@pytest.mark.usefixtures("separate_registries")
def test_calls_of_the_pages_family_equal_its_pipelines(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    import_module("test_skyreels_t2v").test_calls_videos_and_samples_equal_the_pipelines(tmp_path)


@pytest.fixture
def separate_registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries that are as before after the test, and modules of packages that are imported again."""
    modules = {*sys.modules}
    for registry in (FAMILIES, METHODS, REWARDS):
        for name in ("registered", "packages", "broken", "_loaded"):
            monkeypatch.setattr(registry, name, getattr(registry, name).copy())
    tables = {*TrainConfig.model_fields}
    yield
    for name in {*TrainConfig.model_fields} - tables:
        del TrainConfig.model_fields[name]
        TrainConfig.model_rebuild(force=True)
        fields.cache_clear()
    for name in {*sys.modules} - modules:
        if not name.startswith("finetrainers"):
            del sys.modules[name]


COMMANDS = """
models
tiny skyreels_t2v tiny
check --config run.toml --output_dir other
estimate --config run.toml --output_dir other --gpu 24GB
train --config run.toml --dry_run --output_dir other
train --config run.toml --output_dir whole --train_steps 2
train --config run.toml
train --config run.toml --train_steps 2 --resume_from_checkpoint latest
train --config run.toml --train_steps 3 --resume_from_checkpoint latest --anchored.strength 0.6
train --config run.toml --anchored.strength -1
train --config run.toml --method sft
sample run --prompts boat --num_inference_steps 1 --output_dir sampled
watch run --once --prompts boat --preset tiny=5x32x32,steps=1 --presets tiny
export run --format diffusers
report run
cache ls run
search-batch --config run.toml --output_dir searched --measure_on_cpu --gpu 24GB --max_batch_size 1
"""
CODES = [0] * 8 + [2] * 3 + [0] * 6
MAIN = """
import contextlib, io, json, shlex, sys
from finetrainers.cli.main import main
for line in filter(None, sys.argv[1].splitlines()):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(shlex.split(line))
        except SystemExit as error:
            code = error.code
    print(json.dumps([line, code, out.getvalue() + err.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with clips and the config file of a run."""
    work = tmp_path_factory.mktemp("work")
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 255, (5, 32, 32, 3), dtype=np.uint8)
        (work / "clips").mkdir(exist_ok=True)
        write_mp4(work / "clips" / f"{index}.mp4", pixels, fps=24)
        (work / "clips" / f"{index}.txt").write_text(f"a red ball {index}")
    (work / "run.toml").write_text(
        'pretrained_model_name_or_path = "tiny"\nmodel_name = "skyreels_t2v"\ndata_root = "clips"\n'
        'video_resolution_buckets = ["5x32x32"]\n'
        'method = "anchored"\ntrain_steps = 1\ncheckpointing_steps = 1\nrank = 4\nlora_alpha = 4\nlr = 1e-2\n'
        'output_dir = "run"\nvalidation_prompts = "a red ball"\nvalidation_inference_steps = 1\n'
        'validation_steps = 2\neval_reward = ["redness"]\neval_steps = 2\neval_num_items = 1\n'
        "dataloader_num_workers = 0\nprecompute_conditions = true\n\n[anchored]\nstrength = 0.5\n"
    )
    return work


def test_every_command_works_with_a_family_a_method_and_a_reward_of_packages(
    site: Path, work: Path, python: Python
) -> None:
    process = python("-c", MAIN, COMMANDS, cwd=work, PYTHONPATH=f"{site}:{ROOT}")
    assert process.wait(120) == 0, process.stderr
    done = {line: (code, output) for line, code, output in map(json.loads, process.stdout.splitlines())}
    assert [code for code, _ in done.values()] == CODES, "\n".join(f"{k}\n{v[1][-900:]}" for k, v in done.items())
    output = {line: text for line, (_, text) in done.items()}
    planned = output["estimate --config run.toml --output_dir other --gpu 24GB"]
    assert re.search(r"activations.*VAE.*skyreels_t2v", planned)
    assert re.findall(r"^  (model family|method|reward) +(\w+)", output["models"], re.M) == [
        ("model family", "skyreels_t2v"), ("method", "anchored"), ("method", "weighted"), ("reward", "redness"),
    ]  # fmt: skip
    changed = "train --config run.toml --train_steps 3 --resume_from_checkpoint latest --anchored.strength 0.6"
    assert "anchored.strength" in output[changed]
    assert "--anchored.strength" in output["train --config run.toml --anchored.strength -1"]
    config = tomllib.loads((work / "run" / "config.toml").read_text())
    assert (config["anchored"], config["training"]["method"]) == ({"strength": 0.5}, "anchored")
    weights = [work / run / "pytorch_lora_weights.safetensors" for run in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()  # a resumed run is exact
    records = [json.loads(line) for line in (work / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [record["distance"] > 0 for record in records if "distance" in record] == [False, True]
    assert {"eval_reward/redness", "eval_loss"} <= {name for record in records for name in record}
    assert list((work / "sampled").rglob("*.mp4"))


@pytest.mark.usefixtures("separate_registries")
def test_a_method_of_a_package_uses_the_options_of_reward_finetuning(
    site: Path, tmp_path: Path, tiny_repo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("a red ball\na cat\n")
    Path("run.toml").write_text(
        f'pretrained_model_name_or_path = "{tiny_repo("ltx_video")}"\nmethod = "weighted"\nprompts = "prompts.txt"\n'
        'reward = ["brightness"]\nrollout_size = "9x64x64"\nprompts_per_step = 2\nnum_generations = 2\n'
        "batch_size = 2\nsampling_steps = 2\nnoise_levels = 2\nadvantage_clip = 3\n"
        'eta = 0.5\nrank = 4\nlora_alpha = 4\nlr = 1e-2\ntrain_steps = 2\noutput_dir = "run"\n'
    )
    command = ["train", "--config", "run.toml"]
    assert main([*command, "--dry_run"]) == 0
    warned = capsys.readouterr().out.partition("options that differ")[0]
    assert re.search(r"warning: --eta .* --method weighted$", warned, re.MULTILINE)
    assert "advantage_clip" not in warned
    assert main(command) == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record.get("grad_norm", 0) > 0] == [1, 2]
    assert all("reward/brightness" in record for record in records if "loss" in record)
    for given, refused in (
        (["--refl_kind", "draft-lv"], ("--method", "unsupported")),
        (["--init_same_noise"], ("--init_same_noise", "unsupported")),
        (["--data_root", "."], ("--data_root", "unsupported")),
        (["--num_generations", "1"], ("--num_generations", "invalid")),
    ):
        assert refused_command([*command, *given, "--output_dir", "other"])[1] == [refused], given
    assert re.search(r"Methods: .*nft,.*\sweighted\.", help_text("train", "noise_levels"), re.DOTALL)


@pytest.mark.rotating
def test_processes_of_a_launcher_find_them(site: Path, work: Path, python: Python, tmp_path: Path) -> None:
    assert python("-c", MAIN, "tiny skyreels_t2v shared", cwd=work, PYTHONPATH=f"{site}:{ROOT}").wait() == 0
    command = (str(ROOT / "train.py"), "--config", "run.toml", "--output_dir", str(tmp_path / "run"))
    ranks = python.ranks(
        2, *command, "--pretrained_model_name_or_path", "shared", cwd=work, PYTHONPATH=f"{site}:{ROOT}"
    )
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert (tmp_path / "run" / "pytorch_lora_weights.safetensors").is_file()


BROKEN = {
    "absent": ("families", "no_such_module:FAMILY"),
    "number": ("families", "things:NUMBER"),
    "ltx_video": ("families", "things:OTHER"),
    "renamed": ("families", "things:OTHER"),
    "untyped": ("methods", "things:NUMBER"),
    "plain": ("methods", "things:PLAIN"),
    "data": ("methods", "things:DATA"),
    "exits": ("methods", "leaves:METHOD"),
    "brightness": ("rewards", "things:reward"),
    "three": ("rewards", "things:NUMBER"),
    "a.head": ("rewards", "things:reward"),
}
THINGS = """
from dataclasses import replace
from finetrainers import Section, TrainingMethod, option
from finetrainers.models.registry import get_family
NUMBER = 3
OTHER = replace(get_family("ltx_video"), name="other", spec="elsewhere:Spec")
class Options(Section):
    strength: float = option(1.0, "Strength.", resume="free")
class Data(Options):
    methods = ("data",)
    qualified = True
PLAIN = TrainingMethod("plain", "elsewhere:Plain", options=Options)
DATA = TrainingMethod("data", "elsewhere:Data", options=Data)
def reward(videos, prompts):
    return videos.mean((1, 2, 3, 4))
"""


@pytest.mark.usefixtures("separate_registries")
def test_broken_packages_are_listed_and_concern_only_who_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "things.py").write_text(THINGS)
    (tmp_path / "leaves.py").write_text("raise SystemExit('not here')")
    for name, (group, value) in BROKEN.items():
        install(tmp_path, f"package-{name}", {f"finetrainers.{group}": {name: value}})
    # Two packages offer one name: the first one by name has it.
    for package in ("first", "second"):
        install(tmp_path, package, {"finetrainers.rewards": {"grey": f"{package}:reward"}})
        (tmp_path / f"{package}.py").write_text(THINGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    listed = printed.partition("not usable:\n")[2].splitlines()
    assert len(listed) == len(BROKEN) + 1
    for name in BROKEN:
        assert any(f"package-{name} 0.1" in line and repr(name) in line for line in listed), (name, listed)
    assert [line for line in listed if line.startswith("  second 0.1") and "first 0.1" in line]
    assert re.findall(r"^  reward +grey +(\w+)", printed, re.M) == ["first"]
    assert all("uninstall" in line for line in listed)

    own = ("train", "--pretrained_model_name_or_path", "demo://ltx", "--data_root", str(tmp_path))
    for option, group in (("model_name", "families"), ("method", "methods"), ("eval_reward", "rewards")):
        _, problems = refused_command([*own, f"--{option}", "nonesuch"])
        assert (f"--{option}", "unknown") in problems
        shown = capsys.readouterr().err
        assert all(name in shown for name, (of, _) in BROKEN.items() if of == group), shown


def test_entry_points_are_read_once_for_a_search_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    scan = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda **group: calls.append(group) or scan(**group))
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(3):
        assert REWARDS.get("no_such_reward") is None
    assert len(calls) == 1
