"""Prompt files of all three kinds, their problems by line, their order, and the random numbers of their clips."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_of import OneOf
from PIL import Image
from refusals import refused

from finetrainers.config.geometry import Geometry
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.data.loading.position import DataPosition
from finetrainers.data.loading.text_conditioning import TextCache
from finetrainers.data.reading.items import DataError
from finetrainers.methods.grpo.prompts.plan import PromptPlan, column_problems, plan_prompts
from finetrainers.methods.grpo.prompts.prompts import Prompt, PromptFile, PromptOrder, RolloutSample, read_prompts
from finetrainers.methods.grpo.prompts.source import PromptSource
from finetrainers.methods.registry import method_spec
from finetrainers.models.spec import ModelComponents
from finetrainers.utils.failures import Kind


def read(folder: Path, name: str, content: str | bytes) -> PromptFile:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts(path)


def assert_problems(folder: Path, name: str, content: str | bytes, *expected: Sequence[object]) -> None:
    """Expect as many problems with a file, each of which contains its texts, the first one at its beginning."""
    with refused("invalid", folder / name, error=DataError) as caught:
        read(folder, name, content)
    for problem, (place, *values) in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(str(place)), problem
        assert [value for value in values if str(value) not in problem] == [], problem


def encoded(folder: Path, *captions: str, **extra: Any) -> list[dict[str, Any]]:
    """Entries of a videos2caption.json as DanceGRPO's preprocessing writes them, their files included."""
    rows = []
    for index, caption in enumerate(captions):
        row = {"prompt_embed_path": f"{index}.pt", "prompt_attention_mask": f"{index}.pt", "caption": caption, **extra}
        for where in ("prompt_embed", "prompt_attention_mask"):
            (folder / where).mkdir(exist_ok=True)
            torch.save(torch.zeros(2), folder / where / f"{index}.pt")
        rows.append(row)
    return rows


# ---- text ----------------------------------------------------------------------------------------------------------


def test_text_files(tmp_path: Path) -> None:
    found = read(tmp_path, "p.txt", "\ufeff# animals\na cat\r\n\n  a dog, \u00e4lter \n   \n#a fish\nred\u2028blue")
    assert [prompt.text for prompt in found.prompts] == ["a cat", "a dog, \u00e4lter", "red\u2028blue"]
    assert [prompt.where for prompt in found.prompts] == ["p.txt line 2", "p.txt line 4", "p.txt line 7"]
    assert all(prompt.embedding is None and prompt.mask is None for prompt in found.prompts)
    [note] = found.notes
    assert [part for part in ("p.txt", "2 blank", "2 comment (#)") if part not in note] == []
    assert found.warnings == ()


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_end_of_the_last_line_is_no_blank_line(tmp_path: Path, end: str) -> None:
    assert read(tmp_path, "p.txt", f"a cat\na dog{end}").notes == ()


def test_repeated_prompts_are_kept_and_reported(tmp_path: Path) -> None:
    found = read(tmp_path, "p.txt", "cat\ndog\ncat \n# x\ncat\ndog\nfish\nfish")
    assert len(found.prompts) == 7
    [warning] = found.warnings
    assert warning.startswith("p.txt: 4 prompts ")
    assert re.findall(r"line \d+", warning) == [f"line {number}" for number in (3, 1, 5, 1, 6, 2)]
    assert warning.endswith(" 1 more")


def test_the_fingerprint_knows_texts_and_their_order(tmp_path: Path) -> None:
    base = read(tmp_path, "p.txt", "cat\ndog\n").fingerprint
    assert read(tmp_path, "other.txt", "# new\ncat\r\n\n dog").fingerprint == base
    assert read(tmp_path, "p.jsonl", '{"prompt": "cat"}\n{"text": "dog"}').fingerprint == base
    for content in ("dog\ncat", "cat\ndog\ndog", "cat", "cat dog", "cat\ndogs"):
        assert read(tmp_path, "p.txt", content).fingerprint != base, content


@pytest.mark.parametrize(
    ("content", "kind", "values"),
    [
        ("", "required", []),
        ("# only\n\n", "required", ["1 blank", "1 comment"]),
        (b"a cat\nb\xe4d\n", "unreadable", ["p.txt:2"]),
    ],
)
def test_text_files_that_cannot_be_used(tmp_path: Path, content: str | bytes, kind: Kind, values: list[str]) -> None:
    with refused(kind, tmp_path / "p.txt", *values, error=DataError):
        read(tmp_path, "p.txt", content)


def test_files_that_are_none(tmp_path: Path) -> None:
    with refused("not_found", tmp_path / "p.txt", error=DataError):
        read_prompts(tmp_path / "p.txt")
    (tmp_path / "d.txt").mkdir()
    with refused("unreadable", tmp_path / "d.txt", "directory", error=DataError):
        read_prompts(tmp_path / "d.txt")
    with refused("unsupported", tmp_path / "p.tsv", ".txt", ".jsonl", ".csv", ".json", error=DataError):
        read(tmp_path, "p.tsv", "a cat")


# ---- images --------------------------------------------------------------------------------------------------------


def test_prompts_bring_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a path from the file's folder, or from the current one; the same text with another image is another prompt."""
    (tmp_path / "here").mkdir()
    for place in (tmp_path / "a.png", tmp_path / "here" / "b.png"):
        Image.new("RGB", (8, 6)).save(place)
    monkeypatch.chdir(tmp_path / "here")
    table = 'prompt,image,id\n"a cat, asleep",a.png,1\na cat,a.png,2\na cat,b.png,3\na cat,,4\n'
    found = read(tmp_path, "p.csv", table)
    wanted = [
        ("a cat, asleep", tmp_path / "a.png"),
        ("a cat", tmp_path / "a.png"),
        ("a cat", Path("b.png")),
        ("a cat", None),
    ]
    assert [(prompt.text, prompt.image) for prompt in found.prompts] == wanted
    assert [prompt.where for prompt in found.prompts] == [f"p.csv line {line}" for line in range(2, 6)]
    assert [prompt.columns for prompt in found.prompts] == [{"id": str(number)} for number in range(1, 5)]
    assert (found.notes, found.warnings) == ((), ())
    rows = [
        {"text": "a cat, asleep", "image": "a.png"},
        *({"prompt": "a cat", "image": i} for i in ("a.png", "b.png", None)),
    ]
    lines = read(tmp_path, "p.jsonl", "\n".join(map(json.dumps, rows)))
    assert lines.prompts == tuple(
        replace(prompt, where=f"p.jsonl line {n}") for n, prompt in enumerate(found.prompts, 1)
    )
    assert (
        lines.fingerprint
        == found.fingerprint
        != read(tmp_path, "q.txt", "a cat, asleep\na cat\na cat\na cat").fingerprint
    )
    encoded_rows = encoded(tmp_path, "a cat", image="a.png")
    (prompt,) = read(tmp_path, "videos2caption.json", json.dumps(encoded_rows)).prompts
    assert (prompt.image, prompt.embedding) == (tmp_path / "a.png", tmp_path / "prompt_embed" / "0.pt")


def test_images_that_cannot_be_used_are_named_all_at_once(tmp_path: Path) -> None:
    Image.effect_noise((64, 64), 50).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:-600])
    values = ["no.png", "cut.png", "https://a.b/c.png", "", 3, "x" * 300]
    lines = "\n".join(json.dumps({"prompt": str(value), "image": value}) for value in values) + "\n[]"
    assert_problems(
        tmp_path, "p.jsonl", lines,
        ("p.jsonl line 3:", "https://a.b/c.png"), ("p.jsonl line 4:", "'prompt'", "empty"),
        ("p.jsonl line 4:", "'image'", "empty"), ("p.jsonl line 5:", "'image'", "number"), ("p.jsonl line 7 ", "list"),
        ("p.jsonl line 1:", "no.png"), ("p.jsonl line 2:", "cut.png"), ("p.jsonl line 6:", "xxx"),
    )  # fmt: skip
    assert_problems(tmp_path, "p.csv", "prompt,image\na cat, asleep,a.png\n", ("p.csv line 2 ", "commas"))
    assert_problems(tmp_path, "p.csv", 'prompt\n"a" cat\n', ("p.csv line ", "table"))


# ---- JSON lines ----------------------------------------------------------------------------------------------------


def test_json_lines(tmp_path: Path) -> None:
    rows = [
        '{"prompt": " a cat "}',
        "",
        '{"caption": "a dog", "id": 3, "file": "x"}',
        '{"text": "# a fish\\nin water"}',
    ]
    found = read(tmp_path, "p.jsonl", "\n".join(rows) + "\n")
    assert [prompt.text for prompt in found.prompts] == ["a cat", "a dog", "# a fish\nin water"]
    assert [prompt.where for prompt in found.prompts] == ["p.jsonl line 1", "p.jsonl line 3", "p.jsonl line 4"]
    without = {"id": None, "file": None}
    assert [prompt.columns for prompt in found.prompts] == [without, {"id": 3, "file": "x"}, without]
    assert found.notes == ()


def test_every_wrong_line_is_named(tmp_path: Path) -> None:
    rows = ['{"prompt": "a"', '["a"]', '"a"', '{"name": "a"}', '{"prompt": "a", "text": "b"}', '{"text": " "}',
            '{"text": 3}', '{"prompt": "fine"}', "{}", '{"prompt": null}']  # fmt: skip
    keys = "prompt, caption, text"
    assert_problems(
        tmp_path, "p.jsonl", "\n".join(rows),
        ("p.jsonl line 1 ", "JSON", " 15"), ("p.jsonl line 2 ", "list", '{"prompt":'),
        ("p.jsonl line 3 ", "text", '{"prompt":'), ("p.jsonl line 4 ", "'name'", keys),
        ("p.jsonl line 5 ", "'prompt'", "'text'", keys), ("p.jsonl line 6: 'text'", "empty"),
        ("p.jsonl line 7: 'text'", "number"), ("p.jsonl line 9 ", "no keys", keys),
        ("p.jsonl line 10: 'prompt'", "null"),
    )  # fmt: skip


# ---- DanceGRPO's layout --------------------------------------------------------------------------------------------


def test_encoded_prompts(tmp_path: Path) -> None:
    found = read(tmp_path, "videos2caption.json", json.dumps(encoded(tmp_path, "a cat", "a dog", length=1)))
    assert [prompt.text for prompt in found.prompts] == ["a cat", "a dog"]
    assert found.prompts[1].embedding == tmp_path / "prompt_embed" / "1.pt"
    assert found.prompts[1].mask == tmp_path / "prompt_attention_mask" / "1.pt"
    assert found.prompts[1].where == "videos2caption.json entry 2"
    assert [list(prompt.columns) for prompt in found.prompts] == [["length"]] * 2
    torch.save(torch.zeros(999), tmp_path / "prompt_embed" / "1.pt")
    assert read_prompts(tmp_path / "videos2caption.json").fingerprint != found.fingerprint
    assert read(tmp_path, "p.txt", "a cat\na dog").fingerprint != found.fingerprint


def test_wrong_entries_are_named(tmp_path: Path) -> None:
    rows: list[Any] = encoded(tmp_path, "a", "b", "c", " ")
    (tmp_path / "prompt_embed" / "1.pt").unlink()
    del rows[2]["prompt_attention_mask"]
    rows.append("a text")
    assert_problems(
        tmp_path, "v.json", json.dumps(rows),
        ("v.json entry 2:", tmp_path / "prompt_embed" / "1.pt"),
        ("v.json entry 3 ", "'prompt_attention_mask';", ".txt", ".jsonl"),
        ("v.json entry 4: 'caption'", "empty"), ("v.json entry 5 ", "'caption', "),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "kind", "value"),
    [("[\n{},\n}", "unreadable", "v.json line 3 "), ("{}", "invalid", "caption"), ("[]", "required", "v.json")],
)
def test_files_of_another_form(tmp_path: Path, content: str, kind: Kind, value: str) -> None:
    with refused(kind, value, error=DataError):
        read(tmp_path, "v.json", content)


# ---- order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "per_step"), [(12, 4), (10, 4), (7, 7), (3, 8), (1, 1), (1, 5), (5, 1)])
def test_every_prompt_comes_once_an_epoch(prompts: int, per_step: int) -> None:
    order = PromptOrder(prompts, prompts_per_step=per_step, seed=3)
    walk = [index for rollout in range(20) for index in order.prompt_indices(rollout)]
    assert len(walk) == 20 * per_step
    for start in range(0, len(walk) - prompts + 1, prompts):
        assert sorted(walk[start : start + prompts]) == list(range(prompts))


def test_the_order_needs_no_history() -> None:
    order = PromptOrder(10, prompts_per_step=4, seed=3)
    wanted = {rollout: order.prompt_indices(rollout) for rollout in range(30)}
    backwards = PromptOrder(10, prompts_per_step=4, seed=3)
    assert {rollout: backwards.prompt_indices(rollout) for rollout in reversed(range(30))} == wanted
    assert PromptOrder(10, prompts_per_step=4, seed=3).prompt_indices(29) == wanted[29]
    # A permutation a seed and epoch, whatever the size of a rollout.
    single = PromptOrder(10, prompts_per_step=1, seed=3)
    assert [single.prompt_indices(i)[0] for i in range(120)] == [index for r in range(30) for index in wanted[r]]


def test_epochs_and_seeds_have_their_own_order() -> None:
    order = PromptOrder(40, prompts_per_step=40, seed=0)
    assert len({tuple(order.prompt_indices(epoch)) for epoch in range(20)}) == 20
    assert PromptOrder(40, prompts_per_step=40, seed=1).prompt_indices(0) != order.prompt_indices(0)
    firsts = Counter(PromptOrder(4, prompts_per_step=4, seed=seed).prompt_indices(2)[0] for seed in range(2000))
    assert all(400 < count < 600 for count in firsts.values())


@pytest.mark.parametrize(("prompts", "per_step"), [(0, 4), (4, 0)])
def test_nothing_to_order(prompts: int, per_step: int) -> None:
    with refused("invalid", f"{per_step} prompts", f" {prompts}:"):
        PromptOrder(prompts, prompts_per_step=per_step, seed=0)


# ---- random numbers ------------------------------------------------------------------------------------------------


def test_every_clip_and_purpose_has_its_own_numbers() -> None:
    def drawn(stream: str = "start", seed: int = 1, per_group: bool = False, **changes: Any) -> list[float]:
        job = replace(RolloutSample(rollout=2, slot=3, prompt=Prompt("a", ""), generation=4), **changes)
        return torch.randn(4, generator=job.generator(seed, stream, per_group=per_group)).tolist()

    assert drawn(per_group=True) == drawn(per_group=True, generation=7) == drawn(generation=0)
    assert drawn() == drawn()
    others = [drawn(**{key: 7}) for key in ("seed", "rollout", "slot", "generation")]
    others += [drawn(stream="step 0"), drawn(rollout=3, slot=2), drawn(slot=4, generation=3)]
    assert len({tuple(numbers) for numbers in [drawn(), *others]}) == 8


def test_a_source_counts_prompts_from_where_they_were_begun(tmp_path):
    """After `--reset data` at step 6, with two steps a rollout, rollout 3 is the first of the order."""
    config = load_config(
        model_name="m", pretrained_model_name_or_path="r", method="grpo", output_dir=str(tmp_path), prompts_per_step=2,
        updates_per_rollout=2, seed=5, batch_size=1,
    )  # fmt: skip
    plan = PromptPlan(tuple(Prompt(str(i), "") for i in range(5)), (), (9, 64, 64), 8, 8.0, "f")
    parallel, spec = OneOf(), SimpleNamespace()
    texts = TextCache(plan.all_captions(), plan.texts, config, spec=spec, parallel=parallel).encode_on_demand(None)
    for text in ("", *plan.all_captions()):
        texts.keys.cache.put(texts.keys.text(text), {"prompt_embeds": torch.zeros(1, 2, 8)})
    begun, later = (
        PromptSource(
            plan, config, spec=spec, parallel=parallel, texts=texts,
            clip_encoders=ModelComponents({"vae": torch.nn.Identity()}),
            data_position=DataPosition.begin(config, data_size=1, step=step),
        )
        for step in (0, 6)
    )  # fmt: skip
    assert [later.rollout_prompts(rollout) for rollout in (3, 4, 5)] == [
        begun.rollout_prompts(rollout) for rollout in (0, 1, 2)
    ]
    assert (begun.steps_for_epochs(1), later.steps_for_epochs(1)) == (6, 12)


# ---- columns for rewards ---------------------------------------------------------------------------------------------


def answered(videos: torch.Tensor, prompts: list[str], *, answer: list[str], hint: list[str] | None = None) -> None: ...


def anything(videos: torch.Tensor, prompts: list[str], **columns: list[str]) -> None: ...


def compared(videos: torch.Tensor, prompts: list[str]) -> None: ...


compared.scope = "group"  # type: ignore[attr-defined]


def columns_config(folder: Path, table: str, **options: Any) -> TrainConfig:
    (folder / "p.csv").write_text(table)
    (folder / "held_out.jsonl").write_text('{"prompt": "a fish", "answers": 3}\n')
    base = {
        "model_name": "m", "pretrained_model_name_or_path": "repo", "method": "grpo", "prompts": folder / "p.csv",
        "reward": [f"{__name__}:answered"], "rollout_size": "9x64x64", "train_steps": 1,
    }  # fmt: skip
    return load_config(**{**base, **options})


def make_plan(config: TrainConfig) -> PromptPlan:
    plan = plan_prompts(config, Geometry(temporal=8, spatial=32, patch=1, patch_t=1, fps=25.0))
    assert plan is not None
    return plan


def test_rewards_get_the_columns_that_they_take(tmp_path: Path) -> None:
    table = "prompt,answer,hint,id\na cat,two,,1\na dog,three,?,2\n"
    config = columns_config(tmp_path, table)
    plan = make_plan(config)
    columns = [{"answer": "two", "hint": None}, {"answer": "three", "hint": "?"}]
    assert [prompt.columns for prompt in plan.prompts] == columns
    assert [note.endswith(" id") for note in plan.notes if note.startswith("p.csv")] == [True]
    assert not list(column_problems(plan, config))
    assert make_plan(columns_config(tmp_path, table.replace("1\n", "7\n"))).fingerprint == plan.fingerprint
    assert make_plan(columns_config(tmp_path, table.replace("two", "2"))).fingerprint != plan.fingerprint
    everything = make_plan(columns_config(tmp_path, table, reward=[f"{__name__}:anything"]))
    assert list(everything.prompts[0].columns) == ["answer", "hint", "id"]
    unused = make_plan(columns_config(tmp_path, table, reward=["brightness"]))
    assert unused.prompts[0].columns == {}
    assert unused.fingerprint == read_prompts(tmp_path / "p.csv").fingerprint, "as of runs of before"


@pytest.mark.parametrize(
    ("table", "options", "expected"),
    [
        ("prompt,answr\na cat,two\n", {}, [("--reward", "'answer'", "'answr'", "p.csv line 2")]),
        ("prompt,answer\na cat,\na dog,x\n", {}, [("--reward", "'answer'", "p.csv line 2")]),
        ("prompt,answer\na cat,x\n", {"eval_prompts": "held_out.jsonl"}, [("--reward", "'answers'", "jsonl line 1")]),
        ("prompt,answer\na cat,x\n", {"eval_prompts": "held_out.jsonl", "eval_reward": ["contrast"]}, []),
        ("prompt\na cat\n", {"reward": [f"{__name__}:anything"]}, []),
    ],
)  # fmt: skip
def test_columns_that_prompts_lack_are_named(
    table: str, options: dict[str, Any], expected: list[tuple[str, ...]], tmp_path: Path
) -> None:
    if "eval_prompts" in options:
        options = {**options, "eval_prompts": tmp_path / options["eval_prompts"]}
    config = columns_config(tmp_path, table, **options)
    problems = list(column_problems(make_plan(config), config))
    assert [problem.kind for problem in problems] == ["required"] * len(expected)
    for problem, (place, *values) in zip(problems, expected, strict=True):
        assert problem.where == place
        assert [value for value in values if value not in problem.message] == []


def test_rewards_that_compare_clips_need_all_of_a_prompt(tmp_path: Path) -> None:
    group = {"reward": [f"{__name__}:compared"]}
    single = {"eval_reward": group["reward"], "reward": ["contrast"]}
    sft: dict[str, Any] = {"method": "sft", "reward": [], "prompts": None, "rollout_size": None}
    held_out = {"eval_prompts": tmp_path / "held_out.jsonl"}
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({**group, "batch_size": 2}, []),
        ({**group, **held_out}, ["--eval_prompts"]),
        ({**group, **held_out, "eval_reward": ["contrast"]}, []),
        ({**single, **held_out}, ["--eval_reward"]),
        ({**group, "num_generations": 1}, ["--reward"]),
        ({**group, "method": "refl"}, ["--reward", "--reward"]),
        ({**sft, "eval_reward": group["reward"]}, ["--eval_reward"]),
        ({**sft, "eval_reward": [f"{__name__}:answered"]}, ["--eval_reward"]),
    ]
    for options, places in cases:
        config = columns_config(tmp_path, "prompt\na cat\n", **options)
        assert [problem.where for problem in method_spec(config).problems(config)] == places, options
    config = columns_config(tmp_path, "prompt\na cat\n", **group, batch_size=4, prompts_per_step=6)
    spec = method_spec(config)
    for processes, sharing, places in ((2, 1, []), (4, 1, ["--prompts_per_step"]), (4, 2, ["--batch_size"])):
        ranks = OneOf(0, processes, sharing=sharing)
        assert [problem.where for problem in spec.strategy_problems(config, ranks)] == places
