"""The documentation is true where a machine can tell: commands parse, files load, links lead somewhere, lists are
complete."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from snippets import PAGES, ROOT, blocks, logical_lines, page_id

from finetrainers.cli.check import own_options
from finetrainers.cli.estimate import own_options as estimate_options
from finetrainers.cli.main import _parser
from finetrainers.cli.run import own_options as run_options
from finetrainers.cli.search_batch import own_options as search_batch_options
from finetrainers.config.dialects.aliases import FOREIGN
from finetrainers.config.document import configuration_page
from finetrainers.config.flags import flat_flag, parse_flags, read_flags
from finetrainers.config.given import RawOptions
from finetrainers.config.load import load_config
from finetrainers.config.names import DEPENDENT, SAME
from finetrainers.config.presets import budget_table, preset_tables
from finetrainers.config.root import TrainConfig, fields
from finetrainers.config.sections import AUTO, DataSection
from finetrainers.config.stages import read_stages
from finetrainers.data.buckets.windows import with_window_buckets
from finetrainers.data.inspect.item_report import ItemReport
from finetrainers.data.reading.datasets import read_datasets
from finetrainers.data.reading.items import read_dataset
from finetrainers.data.reading.status import MEANINGS
from finetrainers.models import registry
from finetrainers.models.noise_table import noise_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = ROOT / "docs"
OPTIONS_PAGE = DOCS / "reference" / "configuration.md"
MODEL = {"model_name": "ltx_video", "pretrained_model_name_or_path": "some/model"}

#: All flags of finetrainers 0.0.1, and the one that its earlier commands had.
_LEGACY = """
model_name pretrained_model_name_or_path revision variant cache_dir text_encoder_dtype text_encoder_2_dtype
text_encoder_3_dtype transformer_dtype vae_dtype layerwise_upcasting_modules layerwise_upcasting_storage_dtype
layerwise_upcasting_skip_modules_pattern
data_root dataset_file video_column caption_column id_token image_resolution_buckets video_resolution_buckets
video_reshape_mode caption_dropout_p caption_dropout_technique precompute_conditions remove_common_llm_caption_prefixes
dataloader_num_workers pin_memory
flow_resolution_shifting flow_base_seq_len flow_max_seq_len flow_base_shift flow_max_shift flow_shift
flow_weighting_scheme flow_logit_mean flow_logit_std flow_mode_scale
training_type seed batch_size train_epochs train_steps rank lora_alpha target_modules gradient_accumulation_steps
gradient_checkpointing checkpointing_steps checkpointing_limit resume_from_checkpoint enable_slicing enable_tiling
lr scale_lr lr_scheduler lr_warmup_steps lr_num_cycles lr_power optimizer use_8bit_bnb beta1 beta2 beta3 weight_decay
epsilon max_grad_norm
validation_prompts validation_images validation_videos validation_separator num_validation_videos validation_epochs
validation_steps validation_frame_rate enable_model_cpu_offload
tracker_name push_to_hub hub_token hub_model_id output_dir logging_dir allow_tf32 nccl_timeout report_to
list_models
mixed_precision
"""
LEGACY_FLAGS = _LEGACY.split()

#: Flags of other programs, and of other versions, that the pages mention.
FOREIGN_FLAGS = {
    "anchored.strength",  # of the package that a page builds
} | {"config_file", "num_processes", "num_machines", "gpu_ids", "check", "extra", "each"} | {
    "cpu",  # of accelerate
    "nodes", "gpus", "time", "signal", "requeue", "num",  # of sbatch and sky, as far as their first hyphen
    "env", "secret",  # of sky
    "build", "init", "shm", "stop", "network", "device", "ulimit",  # of docker
    "max", "nproc_per_node", "num_gpus", "input_folder", "output_folder",  # of torchrun and DeepSpeed
    "nnodes", "node_rank", "master_addr", "master_port", "rdzv", "rdzv_conf", "rdzv_timeout",  # of torchrun
    "include", "local", "repo",  # of hf download, as far as their first hyphen
    "load_fast", "reload_multifile",  # of tensorboard
    "command",  # of benchmarks/checkpoint_kills.py
    "minutes", "target",  # of tests.fuzz
    "write", "cards", "clusters", "sharing",  # of benchmarks/memory_seed_table.py and memory_estimate.py
    "layers",  # of benchmarks/quantization_error.py
    "expnums", "hostfile",  # of published guides
    "follow", "rotation", "show",  # of mypy and the tests
    "logdir", "samples_per_plugin",  # of tensorboard
}  # fmt: skip


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command line of a shell block, without environment, redirection and comments."""
    for line in logical_lines(text):
        for command in re.split(r"\s&&\s", line):
            words = shlex.split(command, comments=True)
            if ">" in words:
                words = words[: words.index(">")]
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def all_commands() -> list[tuple[str, list[str]]]:
    return [
        (block.where, words) for page in PAGES for block in blocks(page, "bash", "sh") for words in commands(block.text)
    ]


def train_flags(words: list[str]) -> list[str] | None:
    """The flags of a training command, or None if it is none."""
    if words[:2] in (["finetrainers", "train"], ["finetrainers", "prepare"]):
        return words[2:]
    if words[:2] == ["finetrainers", "check"]:
        rest = own_options().parse_known_args(words[2:])[1]
        return rest if rest[0].startswith("-") else ["--config", *rest]
    if words[:2] in (["finetrainers", "estimate"], ["finetrainers", "search-batch"]):
        own = estimate_options() if words[1] == "estimate" else search_batch_options()
        rest = own.parse_known_args(words[2:])[1]
        return rest if rest[0].startswith("-") else ["--config", *rest]
    if words[:2] == ["python", "train.py"]:
        return words[2:]
    if words[:1] == ["torchrun"] and "train.py" in words:
        return words[words.index("train.py") + 1 :]
    if words[:2] == ["accelerate", "launch"] and "train.py" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        return words[words.index("train.py") + 1 :]
    return None


def test_the_pages_have_commands() -> None:
    """A test of the walk below: it must not pass because it finds nothing."""
    found = all_commands()
    assert len([words for _, words in found if train_flags(words) is not None]) >= 8
    assert len([words for _, words in found if words[0] == "finetrainers"]) >= 6


@pytest.mark.parametrize(
    ("where", "words"), [pytest.param(w, c, id=f"{w}-{i}") for i, (w, c) in enumerate(all_commands())]
)
def test_commands_parse(where: str, words: list[str], tmp_path: Path) -> None:
    flags = train_flags(words)
    if flags is not None:
        if "--config" in flags:
            place = flags.index("--config") + 1
            shown = ROOT / flags[place]
            example = tmp_path / "run.toml"
            example.write_text("\n".join(f'{name} = "{value}"' for name, value in MODEL.items()))
            assert shown.is_file() or not flags[place].startswith(("examples/", "docs/")), flags[place]
            flags[place] = str(shown if shown.is_file() else example)
        config, _ = parse_flags(flags)
        assert config is not None
        check_sizes(config)
    elif words[:2] == ["finetrainers", "run"]:
        path, given = read_flags(run_options().parse_known_args(words[2:])[1], prog="run")
        assert path is not None
        assert given is not None
        assert given.problems == []
    elif words[0] == "finetrainers":
        _parser().parse_args(words[1:])
    elif words[0] == "bash":
        assert (ROOT / words[1]).is_file(), words[1]


def check_sizes(config: TrainConfig) -> None:
    family = config.model.model_name
    if family == AUTO or family not in registry.families():  # the files show it, and they are elsewhere; or a package
        return
    geometry = registry.get_family(family).facts.geometry
    for bucket in with_window_buckets(config.data).video_resolution_buckets:
        assert geometry.problems(*bucket) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_configuration_files_load(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "toml"):
        document = tomllib.loads(block.text)
        if "project" in document:  # of a package, which tests/test_installed_packages.py builds
            continue
        file = tmp_path / "run.toml"
        file.write_text(block.text)
        if {"dataset", "directory"} & set(document):
            assert read_datasets(DataSection(dataset=file))
            continue
        if "stage" in document:
            stages = read_stages(file, RawOptions())
            assert [problem for stage in stages for problem in stage.problems] == []
            continue
        check_sizes(load_config(file, **({} if "model" in document or "model_name" in document else MODEL)))


def test_metadata_files_are_read(tmp_path: Path) -> None:
    shown = list(blocks(DOCS / "reference" / "data-sources.md", "csv", "json", "jsonl"))
    assert len(shown) == 3
    for name in ("beach.mp4", "market.mp4"):
        (tmp_path / name).touch()
    for block in shown:
        metadata = tmp_path / f"m.{block.language}"
        metadata.write_text(block.text)
        items = read_dataset(DataSection(dataset_file=metadata)).items
        assert [(item.path.name, item.caption[:7]) for item in items] == [
            ("beach.mp4", "a woman"),
            ("market.mp4", "a crowd"),
        ]


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = page if not file else (page.parent / file).resolve()
        assert linked.exists(), f"{page_id(page)} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page_id(page)} links to {target}"


def command_flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Flags of a command and of all its subcommands."""
    for action in parser._actions:
        yield from (option.removeprefix("--") for option in action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from command_flags(command)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_mentioned_flags_exist(page: Path) -> None:
    """Every `--flag` in a page is accepted; only the list of other versions' flags is left out."""
    text = page.read_text(encoding="utf-8").partition("## Flags of later releases")[0]
    ours = {"config", "list_models", *command_flags(_parser()), *fields(), *SAME, *DEPENDENT}
    if page.name == "published-commands.md":  # first columns are other programs' commands
        text = re.sub(r"^\| .*? \| ", "| ", text, flags=re.MULTILINE)
    if page.name == "dancegrpo.md":  # it is about another program's flags, which are accepted
        ours |= FOREIGN.keys()
    flags = re.findall(r"(?<![\w-])--[a-z][a-z0-9_.]*", text)  # perhaps with the table in front: --grpo.eta
    names = {flat_flag(flag.rstrip(".")).removeprefix("--") for flag in flags}
    mentioned = {name if name in ours else re.sub("^no[_-]", "", name) for name in names}
    assert mentioned - ours - FOREIGN_FLAGS - {"no"} == set()


def test_option_page_is_up_to_date() -> None:
    shown = OPTIONS_PAGE.read_text(encoding="utf-8")
    assert shown == configuration_page(), "run: finetrainers docs > docs/reference/configuration.md"


def test_statuses_and_marks_are_those_of_the_code() -> None:
    page = (DOCS / "how-to" / "data.md").read_text(encoding="utf-8").partition("## Status and marks")[2]
    meanings, _, report = page.partition("## Odd files")[0].partition("## JSON report")
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", meanings, re.MULTILINE)) == MEANINGS
    named = report.partition("An item is")[2]
    assert {field.name for field in dataclasses.fields(ItemReport)} <= set(re.findall(r"`(\w+)`", named))


def test_the_table_of_noise_levels_is_up_to_date() -> None:
    page = (DOCS / "reference" / "models.md").read_text(encoding="utf-8")
    assert page.partition("noise_table -->")[2].partition("<!--")[0].strip() == noise_table()


def test_preset_tables_are_up_to_date() -> None:
    page = (DOCS / "reference" / "grpo-presets.md").read_text(encoding="utf-8")
    shown = page.partition("preset_tables -->")[2].partition("<!-- end of presets -->")[0]
    assert shown.strip() == preset_tables().strip()
    how_to = (DOCS / "how-to" / "grpo.md").read_text(encoding="utf-8")
    assert how_to.partition("budget_table -->")[2].partition("<!-- end of budgets -->")[0].strip() == budget_table()


def test_option_page_is_complete() -> None:
    rows = set(re.findall(r"^\| `([\w.]+)` \|", OPTIONS_PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == set(fields())


def test_legacy_flags_are_accepted_and_explained() -> None:
    assert len(set(LEGACY_FLAGS)) == 86
    assert set(LEGACY_FLAGS) - {"list_models"} <= set(fields())
    assert parse_flags(["--list_models"]) == (None, True)
    page = (
        (DOCS / "reference" / "compatibility.md").read_text(encoding="utf-8").partition("## Flags of later releases")[0]
    )
    rows = re.findall(r"^\| `--(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(LEGACY_FLAGS)


def test_sizes_page_matches_the_registry() -> None:
    page = (DOCS / "reference" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+)k\+1 \| multiples of (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert {row[0] for row in rows} == set(registry.families())
    for name, temporal, multiple, tokens in rows:
        geometry = registry.get_family(name).facts.geometry
        assert geometry.temporal == int(temporal)
        assert geometry.size_multiple == int(multiple)
        assert geometry.num_tokens(49, 512, 768) == int(tokens)


def test_no_install_line_names_a_package_of_this_name() -> None:
    """The package index has another program under the name finetrainers; messages and pages name what is missing, or
    the checkout."""
    texts = [*PAGES, *ROOT.glob("finetrainers/**/*.py"), *ROOT.glob("examples/**/*.*")]
    lines = [line for path in texts if path.is_file() for line in path.read_text(encoding="utf-8").splitlines()]
    installs = [line.partition("pip install")[2] for line in lines if "pip install" in line]
    assert len(installs) >= 10
    assert [line for line in installs if re.match(r"\s+(-\S+\s+)*['\"`]*finetrainers\b", line)] == []


def test_messages_of_the_troubleshooting_page_are_the_programs() -> None:
    """A quoted message is one that the code has; `...` stands for values."""
    section = (DOCS / "how-to" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Messages")[2]
    messages = re.findall(r"^\| `(.+?)` \|", section.partition("\n## ")[0], re.MULTILINE)
    code = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("finetrainers/**/*.py")))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    assert len(messages) >= 10
    assert [part for message in messages for part in message.split(" ... ") if part not in code] == []


def recommendations() -> dict[str, tuple[int | None, float | None, float, str, int, int, int]]:
    """By recipe, what the table of docs/reference/models.md says: rank, alpha, learning rate, schedule, warm-up, steps,
    clips a step."""
    pattern = (
        r"^\| \[`(\S+)`\]\(\S+\) \| (-|\d+, \d+) \| (\S+) \| `(\w+)`, (\d+) \| (\d+)(?:, of (\d+) clips)? \| "
        r"(?:published|untested)\b"
    )
    text = (DOCS / "reference" / "models.md").read_text(encoding="utf-8")
    found = {}
    for recipe, sizes, lr, schedule, warmup, steps, clips in re.findall(pattern, text, re.MULTILINE):
        rank, alpha = (None, None) if sizes == "-" else map(int, sizes.split(", "))
        found[recipe] = (rank, alpha, float(lr), schedule, int(warmup), int(steps), int(clips or 1))
    return found


def settings(config: TrainConfig) -> tuple[int | None, float | None, float, str, int, int | None, int]:
    is_lora = config.training.training_type == "lora"
    return (
        config.training.rank if is_lora else None,
        config.training.lora_alpha if is_lora else None,
        config.optimizer.lr,
        config.optimizer.lr_scheduler,
        config.optimizer.lr_warmup_steps,
        config.training.train_steps,
        config.dataloader.batch_size * config.training.gradient_accumulation_steps,
    )


def test_recipes_are_what_the_table_recommends() -> None:
    tomls = sorted((ROOT / "examples").glob("*/*.toml"))
    recipes = {f"{path.parent.name}/{path.stem}": load_config(path) for path in tomls}
    on_clips = {name: config for name, config in recipes.items() if config.training.method == "sft"}
    said = {name: settings(config) for name, config in on_clips.items() if config.is_given("train_steps")}
    assert recommendations() == said
    # The others take what the table recommends, for their number of clips.
    chosen = ("rank", "lora_alpha", "lr", "train_epochs")
    assert [name for name in on_clips if name not in said and any(map(on_clips[name].is_given, chosen))] == []


def test_pages_recommend_what_the_table_does() -> None:
    """Every command or file of a page that trains a LoRA of LTX-Video, and says how, says the same."""
    named = ("rank", "lora_alpha", "lr", "lr_scheduler", "lr_warmup_steps", "train_steps")
    expected = dict(zip(named, recommendations()["ltx_video/lora"], strict=False))
    count = 0
    for page in PAGES:
        shown = [(b.where, tomllib.loads(b.text)) for b in blocks(page, "toml") if "Lightricks/LTX-Video" in b.text]
        given = [
            (
                where,
                {
                    key: value
                    for section in document.values()
                    if isinstance(section, dict)
                    for key, value in section.items()
                },
            )
            for where, document in shown
        ]
        for block in blocks(page, "bash"):
            for words in commands(block.text):
                flags = train_flags(words)
                if "Lightricks/LTX-Video" in words and flags is not None:
                    config, _ = parse_flags(flags)
                    assert config is not None
                    given.append((block.where, {k: v for k, v in config.flat().items() if f"--{k}" in words}))
        for where, options in given:
            said = {name: options[name] for name in named if name in options}
            assert said == {name: expected[name] for name in said}, where
            count += bool(said)
    assert count >= 1


def test_runs_choose_what_the_table_recommends() -> None:
    read = {name: family.read for name, family in registry.families().items()}
    chosen = {
        "ltx_video/lora": read["ltx_video"]({}).lora,
        "hunyuan_video/lora": read["hunyuan_video"]({}).lora,
        "cogvideox/lora_2b": read["cogvideox"]({}).lora,
        "cogvideox/lora_5b": read["cogvideox"]({"transformer": {"num_attention_heads": 48}}).lora,
    }
    for name, lora in chosen.items():
        assert lora is not None
        recipe = load_config(ROOT / "examples" / f"{name}.toml")
        assert {option: recipe.get(option) for option in lora.options} == dict(lora.options), name
    table = {name: row for name, row in recommendations().items() if row[0] is not None}
    assert {name: (row[0], row[1], row[2], row[5]) for name, row in table.items()} == {
        name: (lora.rank, lora.rank, lora.lr, lora.steps) for name, lora in chosen.items() if lora is not None
    }
