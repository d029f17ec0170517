"""What a search has found: one table, lines for the configuration, and JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from finetrainers.data.buckets.buckets import bucket_text
from finetrainers.utils.text import aligned, plural

from .request import Bucket, BucketSearch
from .sizes import Trial, best


@dataclass(frozen=True)
class Searched:
    """A finished search.

    Attributes:
        buckets: each with what was found.
        noun: what is trained on: `clip` or `pair`.
        tokens: of the transformer, for a sample of each bucket.
        gpu: GiB that were planned for.
        margin: share of it that stays free.
        limit: GiB that may be taken: of the estimate, and of what was measured; None: nothing was.
        device: on which it was measured.
        unmeasured: why nothing was measured; None: it was.
        on_gpu: whether memory is that of a GPU.
        empty: configured buckets in which no clip comes.
    """

    buckets: Sequence[BucketSearch]
    noun: str
    tokens: Sequence[int]
    gpu: float
    margin: float
    limit: tuple[float, float | None]
    device: str | None = None
    unmeasured: str | None = None
    on_gpu: bool = True
    empty: Sequence[Bucket] = ()

    @property
    def batch_sizes(self) -> list[str]:
        """`49x512x768=4` for each bucket in which a batch fits."""
        return [f"{bucket_text(one.bucket)}={one.chosen}" for one in self.buckets if one.chosen]

    @property
    def unfit(self) -> list[BucketSearch]:
        """Buckets in which nothing fits."""
        return [one for one in self.buckets if not one.chosen]


def estimate_line(one: BucketSearch, *, noun: str) -> str:
    """One bucket, when it is estimated."""
    name = bucket_text(one.bucket)
    if not one.estimated:
        return f"{name}: 1 {noun} does not fit by the estimate: {one.needed:.3g} GiB in the phase {one.phase}"
    capped = ", the most that is tried" if one.estimated == one.most else ""
    return (
        f"{name}: {plural(one.estimated, noun)} by the estimate{capped}; {one.needed:.3g} GiB in the phase {one.phase}"
    )


def trial_line(one: BucketSearch, trial: Trial, *, noun: str) -> str:
    """One size, when it is measured."""
    found = f"{bucket_text(one.bucket)} x {trial.clips}: "
    if trial.peak is None or trial.seconds is None:
        return f"{found}{trial.error}"
    over = "" if trial.fits else f"; {trial.error}"
    return f"{found}{trial.peak:.2f} GiB, {trial.seconds / trial.clips:.3g} s/{noun}{over}"


def report_lines(found: Searched) -> list[str]:
    """The table, what to know about it, and the lines for the configuration."""
    lines = ["", *aligned(list(_rows(found)))]
    lines += _notes(found)
    if found.batch_sizes:
        quoted = ", ".join(f'"{text}"' for text in found.batch_sizes)
        lines += ["", "as flags:", f"  --bucket_batch_sizes {' '.join(found.batch_sizes)}"]
        lines += ["in the config file:", f"  bucket_batch_sizes = [{quoted}]"]
    return lines


def _rows(found: Searched) -> Iterator[list[str]]:
    noun, is_measured = found.noun, found.unmeasured is None
    headings = ["bucket", f"{noun}s", "estimated"]
    if is_measured:
        headings += ["fits", "use", "peak GiB" if found.on_gpu else "host GiB", f"s/{noun}", f"{noun}s/s", "tokens/s"]
    else:
        headings += ["GiB"]
    yield headings
    for one, tokens in zip(found.buckets, found.tokens, strict=True):
        row = [bucket_text(one.bucket), "?" if one.clips is None else str(one.clips), str(one.estimated or "none")]
        if is_measured:
            row += [str(one.largest or "none"), *_measured_cells(best(one.trials), tokens)]
        else:
            row += [f"{one.needed:.3g}"]
        yield row


def _measured_cells(trial: Trial | None, tokens: int) -> list[str]:
    if trial is None or trial.peak is None or trial.seconds is None:
        return ["none", "", "", "", ""]
    return [
        str(trial.clips), f"{trial.peak:.2f}", f"{trial.seconds / trial.clips:.3g}", f"{trial.rate:.3g}",
        f"{trial.rate * tokens:.3g}",
    ]  # fmt: skip


def _notes(found: Searched) -> Iterator[str]:
    estimate, measured = found.limit
    share = f"{100 * found.margin:g} %"
    where = "the GPU" if found.on_gpu else "host memory"
    if found.unmeasured is not None:
        yield f"{found.unmeasured}: nothing was measured, and nothing is known of the throughput"
    if measured is None:
        yield f"planned for {estimate:.3g} of {found.gpu:.3g} GiB of {where}: {share} stay free"
    elif found.on_gpu:
        yield f"measured on {found.device}: {measured:.2f} GiB may be reserved, so that {share} of {found.gpu:.3g} GiB stay free"
    else:
        yield f"measured on the CPU: host memory of this process, at most {measured:.3g} of {found.gpu:.3g} GiB; GPU memory was not measured"
    for one in found.buckets:
        reached = one.largest if one.largest is not None else one.estimated
        if reached == one.clips:
            yield f"{bucket_text(one.bucket)}: all {plural(reached, found.noun)} of the bucket fit at once"
        elif reached == one.most:
            yield f"{bucket_text(one.bucket)}: larger batches than --max_batch_size {reached} may fit"
    for one in found.unfit:
        yield (
            f"{bucket_text(one.bucket)}: not even 1 {found.noun} fits; `finetrainers estimate --gpu {found.gpu:.3g}GiB` says what "
            "makes it fit"
        )
    if found.empty:
        yield f"no {found.noun} comes in {', '.join(map(bucket_text, found.empty))}: not searched"


def as_json(found: Searched) -> dict[str, Any]:
    """The search for programs; memory in GiB, times in seconds."""
    return {
        "measured": found.unmeasured is None,
        "unmeasured": found.unmeasured,
        "device": found.device,
        "memory": "gpu" if found.on_gpu else "host",
        "gpu_gib": round(found.gpu, 3),
        "margin_percent": 100 * found.margin,
        "limit_gib": {"estimated": found.limit[0], "measured": found.limit[1]},
        "bucket_batch_sizes": found.batch_sizes,
        "empty_buckets": [bucket_text(bucket) for bucket in found.empty],
        "buckets": [
            {
                "bucket": bucket_text(one.bucket), f"{found.noun}s": one.clips, "tokens": tokens, "most": one.most,
                "estimated": one.estimated, "needed_gib": round(one.needed, 3), "phase": one.phase,
                "largest": one.largest, "use": one.chosen,
                "trials": [{**asdict(trial), "fits": trial.fits, "rate": trial.rate} for trial in one.trials],
            }
            for one, tokens in zip(found.buckets, found.tokens, strict=True)
        ],
    }  # fmt: skip
