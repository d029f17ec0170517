"""The results of a search: one table, lines for the configuration, and JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from finetrainers.data.buckets.buckets import bucket_text
from finetrainers.utils.text import aligned, plural

from .request import Bucket, BucketSearch
from .sizes import Trial, best


@dataclass(frozen=True)
class SearchResult:
    """Finished search.

    Attributes:
        buckets: each with its results.
        noun: name of a training item: `clip` or `pair`.
        tokens: of the transformer, for a sample of each bucket.
        gpu: GiB that were planned for.
        margin: share of the memory that stays free.
        limit: GiB that may be used by the estimate, and by measured steps, or None if nothing was measured.
        device: the one that was measured.
        unmeasured: why nothing was measured, or None if it was.
        on_gpu: whether memory is that of a GPU.
        empty: configured buckets without clips.
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
        """Entries such as `49x512x768=4`, one for each bucket in which a batch fits."""
        return [f"{bucket_text(search.bucket)}={search.chosen}" for search in self.buckets if search.chosen]

    @property
    def unfit(self) -> list[BucketSearch]:
        """Buckets in which nothing fits."""
        return [search for search in self.buckets if not search.chosen]


def estimate_line(search: BucketSearch, *, noun: str) -> str:
    """Return a line about an estimated bucket."""
    name = bucket_text(search.bucket)
    if not search.estimated:
        return f"{name}: 1 {noun} does not fit by the estimate: {search.needed:.3g} GiB in the phase {search.phase}"
    capped = ", the most to try" if search.estimated == search.most else ""
    return (
        f"{name}: {plural(search.estimated, noun)} by the estimate{capped}; {search.needed:.3g} GiB in the phase "
        f"{search.phase}"
    )


def trial_line(search: BucketSearch, trial: Trial, *, noun: str) -> str:
    """Return a line about a measured size."""
    prefix = f"{bucket_text(search.bucket)} x {trial.clips}: "
    if trial.peak is None or trial.seconds is None:
        return f"{prefix}{trial.error}"
    over = "" if trial.fits else f"; {trial.error}"
    return f"{prefix}{trial.peak:.2f} GiB, {trial.seconds / trial.clips:.3g} s/{noun}{over}"


def report_lines(results: SearchResult) -> Iterator[str]:
    """Yield the table, notes about it, and the lines for the configuration."""
    yield from ("", *aligned(list(_rows(results))), *_notes(results))
    if results.batch_sizes:
        quoted = ", ".join(f'"{text}"' for text in results.batch_sizes)
        yield from ("", "as flags:", f"  --bucket_batch_sizes {' '.join(results.batch_sizes)}")
        yield from ("in the config file:", f"  bucket_batch_sizes = [{quoted}]")


def _rows(results: SearchResult) -> Iterator[list[str]]:
    noun, is_measured = results.noun, results.unmeasured is None
    headings = ["bucket", f"{noun}s", "estimated"]
    if is_measured:
        headings += ["fits", "use", "peak GiB" if results.on_gpu else "host GiB", f"s/{noun}", f"{noun}s/s", "tokens/s"]
    else:
        headings += ["GiB"]
    yield headings
    for search, tokens in zip(results.buckets, results.tokens, strict=True):
        row = [
            bucket_text(search.bucket),
            "?" if search.clips is None else str(search.clips),
            str(search.estimated or "none"),
        ]
        if is_measured:
            row += [str(search.largest or "none"), *_measured_cells(best(search.trials), tokens)]
        else:
            row += [f"{search.needed:.3g}"]
        yield row


def _measured_cells(trial: Trial | None, tokens: int) -> list[str]:
    if trial is None or trial.peak is None or trial.seconds is None:
        return ["none", "", "", "", ""]
    return [
        str(trial.clips), f"{trial.peak:.2f}", f"{trial.seconds / trial.clips:.3g}", f"{trial.rate:.3g}",
        f"{trial.rate * tokens:.3g}",
    ]  # fmt: skip


def _notes(results: SearchResult) -> Iterator[str]:
    estimate, measured = results.limit
    share = f"{100 * results.margin:g}%"
    memory = "the GPU" if results.on_gpu else "host memory"
    if results.unmeasured is not None:
        yield f"{results.unmeasured}: nothing was measured, so throughput is unknown"
    if measured is None:
        yield f"planned for {estimate:.3g} of {results.gpu:.3g} GiB of {memory}: {share} stay free"
    elif results.on_gpu:
        yield (
            f"measured on {results.device}: {measured:.2f} GiB may be reserved, so that {share} of {results.gpu:.3g} "
            "GiB stay free"
        )
    else:
        yield (
            f"measured on the CPU: host memory of this process, at most {measured:.3g} of {results.gpu:.3g} GiB; GPU "
            "memory was not measured"
        )
    for search in results.buckets:
        reached = search.largest if search.largest is not None else search.estimated
        if reached == search.clips:
            yield f"{bucket_text(search.bucket)}: all {plural(reached, results.noun)} of the bucket fit at once"
        elif reached == search.most:
            yield f"{bucket_text(search.bucket)}: batches larger than --max_batch_size {reached} may fit"
    for search in results.unfit:
        yield (
            f"{bucket_text(search.bucket)}: not even 1 {results.noun} fits; `finetrainers estimate --gpu "
            f"{results.gpu:.3g}GiB` suggests options that fit"
        )
    if results.empty:
        yield f"no {results.noun} in {', '.join(map(bucket_text, results.empty))}: not searched"


def as_json(results: SearchResult) -> dict[str, Any]:
    """Return the search for programs; memory in GiB, times in seconds."""
    return {
        "measured": results.unmeasured is None,
        "unmeasured": results.unmeasured,
        "device": results.device,
        "memory": "gpu" if results.on_gpu else "host",
        "gpu_gib": round(results.gpu, 3),
        "margin_percent": 100 * results.margin,
        "limit_gib": {"estimated": results.limit[0], "measured": results.limit[1]},
        "bucket_batch_sizes": results.batch_sizes,
        "empty_buckets": [bucket_text(bucket) for bucket in results.empty],
        "buckets": [
            {
                "bucket": bucket_text(search.bucket), f"{results.noun}s": search.clips, "tokens": tokens,
                "most": search.most, "estimated": search.estimated, "needed_gib": round(search.needed, 3),
                "phase": search.phase,
                "largest": search.largest, "use": search.chosen,
                "trials": [{**asdict(trial), "fits": trial.fits, "rate": trial.rate} for trial in search.trials],
            }
            for search, tokens in zip(results.buckets, results.tokens, strict=True)
        ],
    }  # fmt: skip
