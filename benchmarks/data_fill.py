"""How long filling the cache takes, compared with the plain loop that encodes one clip after the other.

    OMP_NUM_THREADS=1 python benchmarks/data_fill.py
    OMP_NUM_THREADS=1 python benchmarks/data_fill.py --clips 8 --repeats 1

Makes real clips of two sizes, and an LTX-Video repository with random weights: a small VAE of the published geometry,
and a small T5. `finetrainers prepare` then fills an empty cache with each set of options, and so does the plain loop,
in turns within one process. Reading headers, hashing files, loading models and writing entries are part of it; imports
are not.

The plain loop is the precomputation of the original finetrainers, operation by operation: decord decodes every frame of
a clip, all are converted to floats, the bucket's frames are chosen and resized, captions and then clips are encoded one
at a time, and `torch.save` writes a file for each. Both take evenly spaced frames. The exit code is 1 if default
options take more than a third of the plain loop's time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

import av  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from diffusers import AutoencoderKLLTXVideo  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoTokenizer, T5EncoderModel  # noqa: E402

from finetrainers import load_config  # noqa: E402
from finetrainers.data.video.backends import backend_problem  # noqa: E402
from finetrainers.demo.clips import video_folder  # noqa: E402
from finetrainers.demo.data import write_dataset  # noqa: E402
from finetrainers.models.tiny import build_ltx_video, seeded, t5_encoder  # noqa: E402
from finetrainers.plan.preflight import for_preparing  # noqa: E402
from finetrainers.plan.ready import get_ready  # noqa: E402
from finetrainers.runs.prepare import prepare  # noqa: E402
from finetrainers.utils.logs import quiet_progress_bars  # noqa: E402

#: Filling should take at most this share of the plain loop's time.
TARGET = 1 / 3
#: Of each kind of clip: shipped video, its height and width, and the bucket.
_KINDS = (
    ("bigbuckbunny.mp4", (720, 1280), (25, 256, 448)),
    ("bikes.mp4", (272, 640), (17, 128, 320)),
)
_FRAMES, _FPS = 75, 25.0
_TOKENS = 128
#: Sets of options that are measured.
_WAYS: dict[str, dict[str, Any]] = {
    "default options": {},
    "--precompute_batch_size 4": {"precompute_batch_size": 4},
    "and --dataloader_num_workers 1": {"precompute_batch_size": 4, "dataloader_num_workers": 1},
}


# ---- what is encoded -------------------------------------------------------------------------------------------


def write_real_clips(directory: Path, count: int) -> Path:
    """So many mp4 files, half of them of each kind, at any places of the shipped videos; the metadata file."""
    return write_dataset(directory, _real_clips(count), fps=_FPS)


def _real_clips(count: int) -> Iterator[tuple[str, NDArray[np.uint8], str]]:
    for kind, (file, (height, width), _) in enumerate(_KINDS):
        options = {"width": width, "height": height, "format": "rgb24"}
        with av.open(str(video_folder() / file)) as container:
            places = container.streams.video[0].frames - _FRAMES
            starts = {k: 7 * k % places for k in range(kind, count, len(_KINDS))}
            needed = islice(container.decode(video=0), max(starts.values()) + _FRAMES)
            frames = np.stack([frame.reformat(**options).to_ndarray() for frame in needed])
        for k, start in starts.items():
            yield f"{k:03d}", frames[start : start + _FRAMES], f"clip {k} of {file}, with a caption of its own"


def write_model(directory: Path) -> Path:
    """An LTX-Video repository whose VAE and text encoder take as long as reading a clip."""
    build_ltx_video(directory)
    with seeded(0):
        vae = AutoencoderKLLTXVideo(
            latent_channels=128,
            block_out_channels=(16, 32, 64, 64),
            decoder_block_out_channels=(8, 16, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        )
        encoder = t5_encoder(AutoTokenizer.from_pretrained(directory / "tokenizer"), width=256)
    vae.save_pretrained(directory / "vae")
    encoder.save_pretrained(directory / "text_encoder")
    return directory


# ---- two ways of filling ---------------------------------------------------------------------------------------


def fill_plainly(model: Path, captions: Path, directory: Path) -> int:
    """The plain loop; how many files it wrote."""
    import decord

    decord.bridge.set_bridge("torch")
    tokenizer = AutoTokenizer.from_pretrained(model / "tokenizer")
    encoder = T5EncoderModel.from_pretrained(model / "text_encoder").eval()
    videos = []
    with torch.no_grad():
        for k, item in enumerate(map(json.loads, captions.read_text(encoding="utf-8").splitlines())):
            reader = decord.VideoReader(str(captions.parent / item["video"]))
            videos.append(_to_bucket(reader.get_batch(list(range(len(reader))))))
            padding = {"padding": "max_length", "max_length": _TOKENS, "truncation": True}
            tokens = tokenizer(item["text"], **padding, return_tensors="pt")
            condition = {"embeds": encoder(tokens.input_ids)[0], "mask": tokens.attention_mask.bool()}
            torch.save(condition, directory / f"condition-{k}.pt")
        del encoder
        vae = AutoencoderKLLTXVideo.from_pretrained(model / "vae").eval()
        for k, video in enumerate(videos):
            latents = vae.encode(video[None].permute(0, 2, 1, 3, 4).contiguous()).latent_dist.sample()
            saved = {"latents": latents, "mean": vae.latents_mean, "std": vae.latents_std}
            torch.save(saved, directory / f"latent-{k}.pt")
    return sum(1 for _ in directory.glob("*.pt"))


def _to_bucket(frames_THWC: Tensor) -> Tensor:
    """All frames as floats, of which the bucket's are resized: `[T, 3, H, W]`."""
    video = frames_THWC.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1.0
    length, *size = next(bucket for _, shape, bucket in _KINDS if shape == tuple(video.shape[2:]))
    video = video[torch.linspace(0, len(video) - 1, length).long()]
    return F.interpolate(video, size=tuple(size), mode="bicubic", align_corners=False)


def fill(model: Path, captions: Path, directory: Path, **options: Any) -> int:
    """`finetrainers prepare` with the options; how many entries it wrote."""
    config = load_config(
        model_name="ltx_video",
        pretrained_model_name_or_path=str(model),
        dataset_file=str(captions),
        video_resolution_buckets=["x".join(map(str, bucket)) for _, _, bucket in _KINDS],
        frame_selection="uniform",
        text_encoder_dtype="fp32",
        transformer_dtype="fp32",
        vae_dtype="fp32",
        output_dir=str(directory / "run"),
        precompute_dir=str(directory / "cache"),
        probe_dir=str(directory / "probes"),
        **options,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        counts = prepare(get_ready(for_preparing(config), preparing=True))
    return sum(one.encoded for one in counts.values())


# ---- command ---------------------------------------------------------------------------------------------------


def table(directory: Path, *, clips: int, repeats: int) -> tuple[list[str], float]:
    """A row for each way of filling, and the share of the plain loop's wall time that the first set of options
    takes."""
    model, warm_up = write_model(directory / "model"), write_real_clips(directory / "warm-up", 2)
    captions = write_real_clips(directory / "clips", clips)
    ways: dict[str, Callable[[Path, Path], int]] = {"plain loop": partial(fill_plainly, model)}
    ways |= {f"finetrainers prepare, {name}": partial(fill, model, **options) for name, options in _WAYS.items()}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            target = Path(tempfile.mkdtemp(dir=directory))
            begun, used = time.perf_counter(), sum(os.times()[:4])
            found = way(captions if turn else warm_up, target)
            if turn:
                wall[name].append(time.perf_counter() - begun)
                cpu[name].append(sum(os.times()[:4]) - used)
                print(f"{name}: {wall[name][-1]:.2f} s, {cpu[name][-1]:.2f} s of CPU", file=sys.stderr, flush=True)
            if found < 2 * (clips if turn else 2):
                sys.exit(f"{name} has written {found} entries, and there are {clips} clips with captions")
            shutil.rmtree(target)
    rows = [f"| {clips} clips | wall s | CPU s | wall, share | CPU, share |", "|---|---|---|---|---|"]
    shares = {name: _shares(wall, cpu, name) for name in ways}
    for name, (of_wall, of_cpu) in shares.items():
        seconds, busy = statistics.median(wall[name]), statistics.median(cpu[name])
        rows.append(f"| {name} | {seconds:.2f} | {busy:.2f} | {of_wall:.2f} | {of_cpu:.2f} |")
    return rows, list(shares.values())[1][0]


def _shares(wall: dict[str, list[float]], cpu: dict[str, list[float]], name: str) -> tuple[float, float]:
    """Medians of the shares of the plain loop's time, turn by turn."""
    pairs = ((wall[name], wall["plain loop"]), (cpu[name], cpu["plain loop"]))
    of_wall, of_cpu = (statistics.median(a / b for a, b in zip(*pair, strict=True)) for pair in pairs)
    return of_wall, of_cpu


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if the aim is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each way [3]")
    arguments = parser.parse_args(argv)
    if (problem := backend_problem("decord")) is not None:
        sys.exit(f"the plain loop needs it: {problem}")
    quiet_progress_bars()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch "
        f"threads\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        rows, share = table(Path(directory), clips=arguments.clips, repeats=arguments.repeats)
    print(*rows, sep="\n")
    print(f"\ndefault options take {share:.2f} of the plain loop's time (aim: at most {TARGET:.2f})")
    return int(share > TARGET)


if __name__ == "__main__":
    sys.exit(main())
