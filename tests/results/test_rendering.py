"""What users wrote is text in model cards and pages, as a CommonMark renderer and a browser's parser read them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree.ElementTree import Element

import html5lib
import numpy as np
import yaml
from markdown_it import MarkdownIt

from finetrainers.cli.main import main
from finetrainers.config.prompts import ValidationPrompt
from finetrainers.results.card_facts import Figure
from finetrainers.results.markdown import code, escape, link, row
from finetrainers.results.model_card import model_card
from finetrainers.results.reports.media import VideoLimits
from finetrainers.results.reports.page import make_report
from finetrainers.rundir.run_records import read_run
from finetrainers.sampling.grid import Cell, Grid, Group, Row, page
from finetrainers.utils.video import write_mp4
from tests.results.test_export import finished, samples

SEEDS = Path(__file__).parents[1] / "fuzz" / "seeds"
RUNS = Path(__file__).parents[1] / "upgrades" / "ac471eb6" / "runs"
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
PLAIN = "some plain text"
HOSTILE = (
    "![x](javascript:alert(1))", "[x](javascript:alert(1))", "](x) ![y](z", "[x]: javascript:alert(1)",
    "</script><script>alert(1)</script>", "</details><img src=x onerror=alert(1)>", "<!-- x", "]]>", "<a@b.example>",
    "`a` ``b``", "`", "```", "``` python\nx\n```", "a | b | c", "a\\|b | c", "a\\\\| b", "\\",
    "*a* __b__ _c_ **d** ~~e~~ ~f~ a__b", "a\n---\nlicense: x\n# H1", "x\n===", "# x #", "- x", "1. x", "> x", "\tx",
    "&lt;b&gt; &#60;i&#62;", "$x^2$ $$y$$", "{{ 7 * 7 }} {% raw %}", "'\" onload=\"alert(1)", "x\n\n<div>\n\ny",
    "<https://evil.example>", "https://evil.example www.evil.example",
    "</textarea></title><b>",
)  # fmt: skip


def shape(tree: Element) -> Iterator[tuple[Any, ...]]:
    """Yield the elements of a page with the names of their attributes, and where links lead: all but the texts."""
    for element in tree.iter():
        leads = [
            element.get(name, "").partition(":")[0] for name in ("href", "src") if element.get(name, "")[:1] != "#"
        ]
        yield (
            element.tag,
            tuple(sorted(element.attrib)),
            tuple(lead[:11] for lead in leads if ":" in lead or lead == "data"),
        )
    yield (len(list(tree.iter())),)


def parse(text: str) -> Element:
    """The page as a browser has it."""
    return html5lib.parse(text, namespaceHTMLElements=False)  # type: ignore[no-any-return]


def flat(text: str) -> str:
    return " ".join(text.split())


def card(root: Path, text: str) -> tuple[str, Element]:
    """A card with this text in every place that a user or a base model writes, and the page that it becomes."""
    root.mkdir()
    samples(root)
    state, checked = finished(root, id_token=PLAIN, pretrained=str(root / "base"))
    (root / "base").mkdir()
    license_facts = {"license": "other", "license_name": text, "license_link": "https://x.y/" + text}
    (root / "base" / "README.md").write_text(f"---\n{yaml.safe_dump(license_facts)}---\n")
    config = state.config
    data = config.data.model_copy(update={"id_token": text})
    model = config.model.model_copy(update={"transformer_id": text})
    run = config.run.model_copy(update={"hub_model_id": f"me/{text}", "tracker_name": text})
    state.config = config.model_copy(update={"data": data, "model": model, "run": run})
    state.spec.load_call = lambda place: f"load_lora_weights({json.dumps(place)})"
    checked.prompts = [ValidationPrompt(prompt=text), ValidationPrompt(prompt="a dog")]
    checked.plan.example = text
    checked.plan.table = lambda: [("dataset", text), (text, "3")]
    checked.start = SimpleNamespace(origin={"given": text})
    content = model_card(state, checked)
    _, _, body = content.removeprefix("---\n").partition("\n---\n")
    return content, parse(MARKDOWN.render(body))


def test_texts_stay_texts_in_cards(tmp_path: Path) -> None:
    expected = list(shape(card(tmp_path / "plain", PLAIN)[1]))
    for index, text in enumerate(HOSTILE):
        content, tree = card(tmp_path / str(index), text)
        assert list(shape(tree)) == expected, text
        # The front matter ends where its reader ends it, and has the text.
        header, _, _ = content.removeprefix("---\n").partition("\n---\n")
        values = yaml.safe_load(header)
        assert (values["instance_prompt"], values["widget"][0]["text"]) == (text, text)
        [picture] = [image for image in tree.iter("img") if image.get("src", "").endswith("at-night-0.png")]
        assert picture.get("alt") == flat(text)
        texts = [
            flat("".join(element.itertext())) for element in tree.iter() if element.tag in ("code", "td", "th", "h1")
        ]
        assert texts.count(flat(text)) >= 3 or "|" in text, text  # a pipe in code may lose a backslash before it
        assert any(title.startswith(flat(text).rpartition("/")[2]) for title in texts), text


def test_parts_of_cards() -> None:
    """Each part alone: the text comes back as it was, and addresses lead nowhere else."""
    for text in HOSTILE:
        for part, tag in ((escape(text), "p"), (code(text), "code"), (link(text, "https://x.y/" + text), "a")):
            [element] = parse(MARKDOWN.render(f"a {part} b")).iter(tag)
            shown = flat("".join(element.itertext()))
            assert shown in (flat(text), f"a {flat(text)} b"), part
        [table] = parse(MARKDOWN.render(f"| a | b |\n|---|---|\n{row([text, code(text)])}\n")).iter("tbody")
        assert len(list(table.iter("td"))) == 2, text
    assert escape("a_b 1.5 (x), y-z!") == "a_b 1.5 (x), y-z!"  # what needs no escape has none
    assert escape("https://x.y www.x.y") == "https\\://x.y www\\.x.y"
    assert code("") == ""


def replaced(value: Any, text: str) -> Any:
    """A record with this text for what users wrote."""
    if isinstance(value, dict):
        return {key.replace("brightness", text): replaced(child, text) for key, child in value.items()}
    if isinstance(value, list):
        return [replaced(child, text) for child in value]
    names = ("a red ball", "a blue box moving up", "a red ball moving left")
    return text if value in names or (isinstance(value, str) and value.startswith("a cyan")) else value


def report(root: Path, text: str) -> Element:
    """The page of two runs whose prompts, captions, rewards, commands and tracebacks have this text."""
    for name in ("sft", "grpo"):
        shutil.copytree(SEEDS / name, root / name)
        for file in ("config.toml", "env.json", "manifest.jsonl"):
            shutil.copy(RUNS / name / file, root / name / file)
        for path in (root / name).rglob("*.json*"):
            records = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            path.write_text("".join(json.dumps(replaced(json.loads(line), text)) + "\n" for line in records))
        environment = json.loads((root / name / "env.json").read_text())
        (root / name / "env.json").write_text(json.dumps({**environment, "command": ["x/finetrainers", "train", text]}))
        (root / name / "traceback.txt").write_text(f"ValueError: {flat(text)}\n")
        with open(root / name / "events.jsonl", "a") as events:
            events.write(
                json.dumps({"time": 1.8e9, "event": "bad_sample", "step": 3, "file": text, "reason": text}) + "\n"
            )
    for path in (root / "sft").rglob("*.mp4"):
        write_mp4(path, np.zeros((2, 16, 16, 3), np.uint8), fps=8, comment=f"{flat(text)}\nseed 1")
    runs = [read_run(root / name, name=f"{name} {text}") for name in ("sft", "grpo")]
    return parse(make_report(runs, VideoLimits(20)))


def test_texts_stay_texts_in_pages(tmp_path: Path) -> None:
    # Text in backticks is set as code in reasons and meanings, by design: without elements of its own.
    text = " ".join(HOSTILE).replace("`", "'")
    tree = report(tmp_path / "hostile", text)
    assert list(shape(tree)) == list(shape(report(tmp_path / "plain", PLAIN)))
    assert flat("".join(tree.itertext())).count(flat(text)) >= 10

    clip = tmp_path / "a.mp4"
    write_mp4(clip, np.zeros((2, 16, 16, 3), np.uint8), fps=8)

    def grid(words: str) -> Element:
        cells = [Cell(clip, {words: words}, caption=words), Cell(None, problem=words)]
        groups = [Group(words, [Row(words, cells)], note=words)]
        return parse(
            page(
                Grid([words, words], groups),
                title=words,
                facts=[(words, words)],
                problems=[words],
                table=[[words], [words]],
            )
        )

    tree = grid(text)
    assert list(shape(tree)) == list(shape(grid(PLAIN)))
    [video] = tree.iter("video")
    assert json.loads(video.get("data-facts", "")) == {text: text}
    assert flat(video.get("aria-label", "")).count(flat(text)) == 3


def test_names_and_captions_stay_texts_in_checks(tmp_path: Path) -> None:
    def check(name: str, caption: str) -> Element:
        folder = tmp_path / f"data-{len(name)}"
        folder.mkdir()
        for stem in (name, f"{name} 2"):
            (folder / f"{stem}.mp4").write_bytes(b"no video")
            (folder / f"{stem}.txt").write_text(caption)
        arguments = [
            "check",
            "--data_root",
            folder,
            "--html",
            tmp_path / "check.html",
            "--jobs",
            "1",
            "--precompute_dir",
            tmp_path,
        ]
        model = ["--model_name", "ltx_video", "--pretrained_model_name_or_path", "demo://ltx"]
        assert main([*map(str, arguments), *model]) == 65
        return parse((tmp_path / "check.html").read_text())

    name = "<img src=x onerror=alert(1)>&lt;'\" ]]><script>"
    caption = " ".join(HOSTILE)
    tree = check(name, caption)
    assert list(shape(tree)) == list(shape(check("plain", PLAIN)))
    [data] = [script for script in tree.iter("script") if script.get("id") == "data"]
    assert {item["name"] for item in json.loads(data.text or "")} == {f"{name}.mp4", f"{name} 2.mp4"}


def test_figures_of_edited_records(tmp_path: Path) -> None:
    from finetrainers.results.card_facts import figures

    records = [
        {"step": {}, "eval_loss": 9}, {"step": "x", "eval_loss": 9},
        {"step": 0, "eval_loss": 0.5, "eval_reward/a": "x"},
        {"step": 2, "eval_loss": "y"}, {"step": 4, "eval_loss": 0.25, "eval_reward/a": 1},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert figures(tmp_path) == (0, 4, [Figure("eval_loss", "0.5", "0.25", "0.25 (step 4)")])
