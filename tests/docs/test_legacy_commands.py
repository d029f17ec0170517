"""The two published training commands run as they stand; only paths, model ids and sizes are put in their place.

The first goes all the way by new interpreters, as from a shell; of the second, what it asks `accelerate` for is run by
a fork.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]

#: `accelerate launch ... train.py FLAGS` becomes `python train.py FLAGS EXTRA`; later flags win. Or it is written down.
STAND_IN = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
assert arguments[0] == "launch"
start = arguments.index("train.py")
arguments = [*arguments[start:], *json.loads(os.environ["EXTRA_FLAGS"])]
if "WRITE_TO" in os.environ:
    json.dump(arguments, open(os.environ["WRITE_TO"], "w"))
else:
    os.execv(sys.executable, [sys.executable, *arguments])
"""


@pytest.mark.rotating
@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", ["ltx_video", "hunyuan_video"])
def test_published_command_trains(family, tiny_repo, tmp_path, python):
    data = tmp_path / "data"
    data.mkdir()
    with av.open(str(data / "clip.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for k in range(24):
            picture = np.full((64, 96, 3), 10 * k, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    (data / "videos.txt").write_text("clip.mp4\n")
    (data / "prompts.txt").write_text("a clip that gets brighter\n")

    stand_in = tmp_path / "bin" / "accelerate"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    output = tmp_path / "run"
    extra = {
        "pretrained_model_name_or_path": str(tiny_repo(family)), "data_root": str(data), "output_dir": str(output),
        "video_resolution_buckets": "17x64x64", "train_steps": "2", "validation_inference_steps": "2",
        "validation_prompts": "a fox@@@17x64x64:::a fox@@@9x64x64", "report_to": "none",
    }  # fmt: skip
    environment = {
        **os.environ,
        "PATH": f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}",
        "EXTRA_FLAGS": json.dumps([word for name, value in extra.items() for word in (f"--{name}", value)]),
    }
    if family != "ltx_video":
        environment["WRITE_TO"] = str(tmp_path / "arguments.json")
    script = ROOT / "examples" / "legacy" / f"{family}.sh"
    result = subprocess.run(
        ["bash", str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert result.returncode == 0, result.stderr
    if "WRITE_TO" in environment:
        result = python(*json.loads((tmp_path / "arguments.json").read_text()))
        assert result.wait() == 0, result.stderr
    assert "unknown flag" not in result.stderr, result.stderr
    if "WRITE_TO" not in environment:  # FINETRAINERS_LOG_LEVEL=DEBUG is for our messages, and libraries say nothing
        levels = re.findall(r"^(?:WARNING (?!finetrainers)|W\d{4} |Unable to |Loading weights).*", result.stderr, re.M)
        assert levels == []
    assert (output / "pytorch_lora_weights.safetensors").is_file(), result.stdout + result.stderr
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    # The same prompt at two sizes gives two files.
    assert len(list((output / "samples" / "step-000002").glob("*.mp4"))) == 2
