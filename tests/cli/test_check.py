"""`finetrainers check`: what it says, writes and exits with, and that training goes on from there."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import MARKUP, OPTIONS, make_faulty
from markupsafe import escape
from PIL import Image
from refusals import refused_command

from finetrainers.cli import check
from finetrainers.cli.main import main
from finetrainers.config.load import load_config
from finetrainers.data.inspect import html_report, probe_all
from finetrainers.data.inspect.probe import probe
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.data.reading.status import MARKS, STATUSES
from finetrainers.models.registry import get_family
from finetrainers.utils import exit_codes
from finetrainers.utils.video import write_mp4

MODEL = {"model_name": "ltx_video", "pretrained_model_name_or_path": "some/model"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    root = tmp_path_factory.mktemp("check") / "clips"
    return root, len(make_faulty(root))


def write_config(folder: Path, root: Path, **options: Any) -> Path:
    buckets = [text.replace("48", "64") for text in OPTIONS["video_resolution_buckets"]]  # type: ignore[attr-defined]
    values = {**MODEL, **OPTIONS, "data_root": str(root), "video_resolution_buckets": buckets, **options}
    path = folder / "run.toml"
    path.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items()))
    return path


def test_the_report_tells_all_and_training_probes_nothing_again(
    data: tuple[Path, int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, count = data
    config = write_config(tmp_path, root)
    json_file, page_file = tmp_path / "out" / "check.json", tmp_path / "out" / "check.html"
    arguments = ["check", str(config), "--json", str(json_file), "--html", str(page_file), "--jobs", "1"]
    assert main(arguments) == exit_codes.UNUSABLE_DATA
    out = capfd.readouterr().out
    assert re.search(r"^  - pipe\.mp4: .*pipe", out, re.MULTILINE)
    assert "\x1b[31m" not in out  # of a file's name
    assert r"\x1b[31m.mp4" in out

    report = json.loads(json_file.read_text(encoding="utf-8"))
    counts = report["counts"]
    assert report["usable"] is False
    assert counts["items"] == len(report["items"]) == count == counts["train"] + counts["rejected"]
    assert sum(counts["statuses"].values()) == count
    assert set(counts["statuses"]) <= set(STATUSES)
    assert set(counts["marks"]) <= set(MARKS)
    assert sum(row["clips"] for row in report["buckets"]) == counts["train"]
    assert {row["kind"]: row["count"] for row in report["reasons"] if row["rejected"]} == {
        status: number for status, number in counts["statuses"].items() if status != "used"
    }
    check_page(page_file.read_text(encoding="utf-8"), report)

    # More may be left out: fine, and with the same facts training starts, opening no file.
    assert main([*arguments[:2], "--max_bad_samples", "100"]) == exit_codes.DONE
    monkeypatch.setattr(probe_all, "probe", lambda *_, **__: pytest.fail("a file was opened again"))
    run = load_config(config, max_bad_samples=100)
    plan = survey_dataset(run, get_family("ltx_video").facts.geometry).checked()
    plan.write(tmp_path / "manifest.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    same = ("name", "status", "bucket", "use", "reason", "crop")
    assert [[line[key] for key in same] for line in lines] == [[i[key] for key in same] for i in report["items"]]


def test_what_a_check_allows_training_takes(
    data: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clips").mkdir()
    for name, caption in (("a", "a caption"), ("b", "another"), ("none", None)):
        shutil.copy(data[0] / "a good clip.mp4", tmp_path / "clips" / f"{name}.mp4")
        if caption is not None:
            (tmp_path / "clips" / f"{name}.txt").write_text(caption)
    (tmp_path / "clips" / "photo.heic").write_bytes(b"x")
    config = write_config(tmp_path, tmp_path / "clips", caption_missing="skip", video_reshape_mode="none")
    arguments = ["check", str(config), "--json", str(tmp_path / "check.json"), "--html", str(tmp_path / "check.html")]
    assert main(arguments) == exit_codes.DONE
    out = capsys.readouterr().out
    assert re.search(r"^warning: 1 .*: photo\.heic$", out, re.MULTILINE)
    assert re.search(r"^3 items: 2 .*, 0 .*, 1 .*, 0 ", out, re.MULTILINE)
    report = json.loads((tmp_path / "check.json").read_text())
    assert {item["name"]: item["use"] for item in report["items"]} == {
        "a.mp4": "train",
        "b.mp4": "train",
        "none.mp4": "skipped",
    }
    assert [row["rejected"] for row in report["reasons"] if row["kind"] == "skipped"] == [False]
    page = (tmp_path / "check.html").read_text()
    assert "photo.heic" in page
    assert "dimmed" not in page  # nothing is cut off

    # Two clips make no batch of four, so there would be no step.
    sizes = ["--epoch_end", "drop", "--batch_size", "4"]
    assert main([*arguments[:4], *sizes]) == exit_codes.UNUSABLE_DATA
    assert json.loads((tmp_path / "check.json").read_text())["usable"] is False
    assert main([*arguments[:4], "--epoch_end", "drop", "--bucket_batch_sizes", "17x32x64=2"]) == exit_codes.DONE


def test_clips_of_which_least_is_used_come_first(
    data: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    for name in range(7):
        shutil.copy(data[0] / "a good clip.mp4", clips / f"{name}.mp4")
        (clips / f"{name}.txt").write_text("good")
    write_mp4(clips / "worst.mp4", np.zeros((9, 64, 16, 3), dtype=np.uint8), fps=8)
    (clips / "worst.txt").write_text("worst")
    sizes = {"video_resolution_buckets": ["9x32x32"]}
    json_file = tmp_path / "check.json"
    assert main(["check", str(write_config(tmp_path, clips, **sizes)), "--json", str(json_file)]) == exit_codes.DONE
    out = capsys.readouterr().out
    lines = out[out.index("least used (") :].splitlines()
    items = {item["name"]: item for item in json.loads(json_file.read_text())["items"]}
    assert (items["worst.mp4"]["crop"], items["worst.mp4"]["scale"]) == (0.75, 2)
    assert (items["0.mp4"]["used_frames"], items["0.mp4"]["usable_frames"]) == (9, 20)
    shown = [(line.split(":")[0].strip(), re.findall(r"\d+", line.partition(":")[2])) for line in lines[1:6]]
    assert shown[:2] == [("worst.mp4", ["25", "9", "9", "2"]), ("0.mp4", ["67", "9", "20"])]
    assert re.search(r"\b3 more\b", lines[6])
    assert re.search(r"^warning: .*worst\.mp4 \(75%\)", out, re.MULTILINE)


def test_reports_that_cannot_be_written_are_refused_before_anything_is_looked_at(
    data: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, data[0])
    monkeypatch.setattr(check, "_check", lambda *_: pytest.fail("the data was looked at"))
    for option, place in (
        ("--json", tmp_path),
        ("--html", config / "x.html"),
        ("--json", Path("/proc/nowhere/x.json")),
    ):
        assert refused_command(["check", config, option, place]) == (2, [(option, "invalid")])
    file = tmp_path / "mine.json"
    file.write_text("mine")
    for option in ("--json", "--html"):
        assert refused_command(["check", config, option, file]) == (2, [(option, "occupied")])
    assert file.read_text() == "mine"


def test_masks_are_counted_and_shown_below_their_clips(
    data: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    for name in ("film", "plain", "still"):
        shutil.copy(data[0] / "a good clip.mp4", clips / f"{name}.mp4")
        (clips / f"{name}.txt").write_text(name)
    shutil.copy(data[0] / "a good clip.mp4", clips / "film.mask.mp4")
    header = probe(clips / "film.mp4")
    mask = Image.new("L", (header.width, header.height))
    mask.paste(255, (0, 0, header.width // 4, header.height))
    mask.save(clips / "still.mask.png")
    config = write_config(tmp_path, clips)
    arguments = ["check", str(config), "--json", str(tmp_path / "check.json"), "--html", str(tmp_path / "check.html")]
    main([*arguments, "--max_bad_samples", "1"])
    out = capsys.readouterr().out
    assert re.search(r"^  - film\.mp4: .*film\.mask\.mp4: .*colors", out, re.MULTILINE)
    assert re.search(r"^note: 1 of 2 clips .* 25% ", out, re.MULTILINE)
    text = (tmp_path / "check.html").read_text()
    items = {item["name"]: item for item in json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])}
    assert set(items) == {"film.mp4", "plain.mp4", "still.mp4"}
    assert items["still.mp4"]["mask_white"] == 0.25
    picture = items["still.mp4"]["mask"]
    assert (picture["number"], picture["height"]) == (1, items["still.mp4"]["thumbnails"]["height"])
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["content"]))).convert("L"))
    assert shown[:, : shown.shape[1] // 5].mean() > 240
    assert shown[:, shown.shape[1] // 3 :].mean() < 15
    assert items["plain.mp4"]["mask"] is items["plain.mp4"]["mask_white"] is None


def check_page(text: str, report: dict[str, Any]) -> None:
    """The page is whole, asks nothing of any network, and shows names and captions as text."""
    assert "default-src 'none'" in text
    assert not re.search(r"(?:src|href|action)\s*=\s*[\"']?\s*(?:https?:|//|file:)|@import|url\((?!data:)", text)
    assert text.count("<script") == text.count("</script>") == 3  # data, meanings, and the page's own
    assert MARKUP not in text
    assert "<img src=x" not in text
    items = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])
    # What cannot be used comes first, and else the order stays.
    in_order = sorted(report["items"], key=lambda item: item["use"] != "rejected")
    assert [item["name"] for item in items] == [item["name"] for item in in_order]
    assert items[0]["use"] == "rejected" != items[-1]["use"]
    assert MARKUP in {item["caption"] for item in items}
    shown = {item["name"] for item in items if item["thumbnails"]}
    assert {"a good clip.mp4", "rotated.mp4", "picture.png", "one frame.mp4", "no text.mp4"} <= shown
    assert shown.isdisjoint({"bomb.mp4", "canvas.gif", "pipe.mp4"})
    for row in report["buckets"]:
        assert f"<td>{row['bucket']}</td>" in text
    for row in report["reasons"]:
        assert str(escape(row["meaning"])).replace("`max_pixels`", "<code>max_pixels</code>") in text
    assert "dimmed" in text
    # The bar has a part for each status, and each can be shown alone.
    shares = re.findall(r'<i class="\w+" style="flex: (\d+)"', text)
    assert sum(map(int, shares)) == report["counts"]["items"]
    assert {"train", *report["counts"]["statuses"]} - {"used"} <= set(re.findall(r'data-show="(\w+)"', text))
    pictures = {item["name"]: item["thumbnails"] for item in items if item["thumbnails"]}
    assert pictures["a good clip.mp4"]["number"] == 3
    assert (pictures["picture.png"]["number"], pictures["one frame.mp4"]["number"]) == (1, 3)
    for item in items:  # as displayed: turned, and with square pixels
        if item["thumbnails"] and item["width"]:
            assert item["thumbnails"]["width"] == round(item["width"] * item["thumbnails"]["height"] / item["height"])


def test_what_the_page_shows_of_captions_and_code() -> None:
    assert html_report._lengths([]) is None
    made = html_report._lengths([0, 3, 5, 59])
    assert made is not None
    assert [(bar["low"], bar["high"], bar["count"]) for bar in made["bars"]][:2] == [(0, 4, 2), (5, 9, 1)]
    assert (len(made["bars"]), made["bars"][-1]["count"], made["median"]) == (12, 1, 4)
    for longest in (60, 999, 1000, 123_456):
        made = html_report._lengths([7, longest])
        assert made is not None
        bars = made["bars"]
        assert len(bars) <= 12
        assert bars[-1]["low"] <= longest <= bars[-1]["high"]
        assert all(bar["long"] == (bar["high"] >= 1000) for bar in bars)
    assert html_report.with_code("`a` <b> `c`, d") == "<code>a</code> &lt;b&gt; <code>c</code>, d"
    assert html_report.with_code("it`s <i>") == "it`s &lt;i&gt;"
    assert html_report.with_code("`a` it`s") == "<code>a</code> it`s"


def test_wrong_configurations_are_told_apart(
    data: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, data[0], lr=-1.0)
    assert main(["check", str(config), "--decod", "full"]) == exit_codes.CONFIGURATION
    output = capsys.readouterr()
    assert "--decod" in output.err
    assert "lr" in output.err
    assert "  - pipe.mp4: " in output.out  # beside what becomes of the data
    code, refusals = refused_command(["check", config, "--data_root", tmp_path / "nowhere"])
    assert (code, sorted(kind for _, kind in refusals)) == (exit_codes.CONFIGURATION, ["invalid", "not_found"])
    wrong = write_config(tmp_path, data[0], video_resolution_buckets=["16x32x64"])
    code, [(place, _)] = refused_command(["check", "--config", wrong])
    assert (code, place) == (2, "--video_resolution_buckets")
    assert "8*k+1" in capsys.readouterr().err
    # A model that is not there is said beside what becomes of the data.
    missing = write_config(tmp_path, data[0], pretrained_model_name_or_path="./nowhere")
    assert main(["check", str(missing)]) == exit_codes.CONFIGURATION
    output = capsys.readouterr()
    assert "--pretrained_model_name_or_path" in output.err
    assert "./nowhere" in output.err
    assert "bucket" in output.out
    code, found = refused_command(["check", "--decode", "half", "--jobs", "0", "--decod", "full"])
    places = ["--decod", "--decode", "--jobs", "--pretrained_model_name_or_path"]
    assert (code, sorted(place for place, _ in found)) == (exit_codes.CONFIGURATION, places)
