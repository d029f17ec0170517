"""Training from random weights on real clips, with few steps: it must run through and leave what it says."""

import json

import av
import pytest
from PIL import Image
from refusals import refused_options

from finetrainers.demo.clips import EXCERPTS, cut_excerpts
from finetrainers.demo.scratch import from_scratch


@pytest.mark.rotating
@pytest.mark.timeout(180)
def test_training_from_scratch_leaves_its_results(tmp_path, capsys):
    scores = from_scratch(tmp_path, steps=20)
    assert set(scores) == {excerpt.caption for excerpt in EXCERPTS}
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < 0.98 * losses[0]  # so few steps only find the mean; the families' tests show learning
    assert Image.open(tmp_path / "result.png").width > 500
    assert (tmp_path / "loss.png").stat().st_size > 5000
    assert (tmp_path / "run" / "transformer" / "diffusion_pytorch_model.safetensors").is_file()
    assert len(list((tmp_path / "run" / "samples" / "step-000020").glob("*.mp4"))) == len(EXCERPTS)
    with av.open(str(next(tmp_path.glob("after-*.mp4")))) as container:
        assert sum(1 for _ in container.decode(video=0)) == 9
    assert str(tmp_path / "result.png") in capsys.readouterr().out


def test_scenes_are_cut_as_asked(tmp_path):
    metadata = cut_excerpts(tmp_path, frames=5, size=48, fps=25.0, copies=2)
    paths = sorted(tmp_path.glob("*.mp4"))
    assert len(paths) == 2 * len(EXCERPTS)
    with av.open(str(paths[0])) as container:
        stream = container.streams.video[0]
        assert (stream.frames, stream.width, stream.height) == (5, 48, 48)
    lines = [json.loads(line) for line in metadata.read_text().splitlines()]
    assert [line["video"] for line in lines] == [path.name for path in paths]


def test_no_folder_is_touched_that_no_demonstration_made(tmp_path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "mine.mp4").write_bytes(b"precious")
    with refused_options(("directory", "occupied")):
        from_scratch(tmp_path, steps=1)
    assert (tmp_path / "clips" / "mine.mp4").read_bytes() == b"precious"
