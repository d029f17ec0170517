"""Counts of an epoch's batches by bucket, and of the clips that are left out, for the start of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from finetrainers.config.root import TrainConfig
from finetrainers.utils.text import plural

from ..buckets.buckets import Bucket, bucket_probabilities, bucket_text, num_batches
from ..buckets.clip import Clip
from ..buckets.windows import windows_by_item

_ROUNDING = 1e-6  # numbers of clips nearer to an integer than this are integers


@dataclass(frozen=True)
class BatchCounts:
    """Batch counts that hold for every epoch.

    Attributes:
        by_bucket: batches of each bucket; with `~` where epochs differ.
        warnings, notes: messages about clips that are left out.
        any: whether there is a batch at all.
    """

    by_bucket: Mapping[Bucket, str]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    any: bool


def count_batches(clips: Iterable[Clip], config: TrainConfig) -> BatchCounts:
    """Count the batches of an epoch of these clips, or of their items if all windows of one come in one step."""
    if config.data.sliding_window_batching == "clip":
        clips = list(clips)
        clips = [clips[first] for first, *_ in windows_by_item(clips)]
    keep, sizes = dict(config.data.bucket_keep_prob), dict(config.dataloader.bucket_batch_sizes)
    epoch_end, batch_size = config.dataloader.epoch_end, config.dataloader.batch_size
    counts: dict[Bucket, float] = defaultdict(float)
    varies: dict[Bucket, bool] = defaultdict(bool)
    total = dropped = 0.0
    for (buckets, repeats), num_clips in Counter((clip.buckets, clip.repeats) for clip in clips).items():
        num_samples = num_clips * repeats
        total += num_samples
        shares = bucket_probabilities(buckets, keep)
        dropped += num_samples * (1.0 - sum(shares))
        for bucket, share in zip(buckets, shares, strict=True):
            counts[bucket] += num_samples * share
            varies[bucket] |= share < 1.0 or repeats != int(repeats)
    batches_by_bucket, unfilled, dropped_buckets = {}, 0.0, []
    for bucket, count in counts.items():
        size = sizes.get(bucket, batch_size)
        rounded = round(count) if abs(count - round(count)) < _ROUNDING else count
        batches_by_bucket[bucket] = (
            f"~{count / size:.3g}" if varies[bucket] else str(num_batches(rounded, size, epoch_end))
        )
        unfilled += rounded % size
        if rounded < size:
            dropped_buckets.append(f"{bucket_text(bucket)} ({plural(round(rounded), 'clip')} for batches of {size})")
    warnings, notes = [], []
    is_estimate = any(varies.values())
    about = "about " if is_estimate else ""
    quantity = f"{about}{unfilled:.0f} of {about}{total:.0f} clips"
    if epoch_end == "drop" and unfilled:
        warnings.append(f"--epoch_end drop leaves out {quantity} an epoch, others each time, that do not fill a batch")
        if dropped_buckets:
            warnings.append(f"--epoch_end drop leaves out whole buckets, every epoch: {', '.join(dropped_buckets)}")
    waiting = sum(sizes.get(bucket, batch_size) - 1 for bucket in counts)
    if epoch_end == "wrap" and waiting:
        notes.append(
            f"--epoch_end wrap: after the last epoch, up to {plural(waiting, 'clip')} of that epoch (less than a batch "
            "of each bucket) have waited for a batch that does not come"
        )
    if dropped > _ROUNDING:
        notes.append(
            f"--bucket_keep_prob leaves out about {dropped:.3g} of {total:.0f} clips an epoch, others each time; "
            "events.jsonl counts them (left_out)"
        )
    # If epochs differ, one of them may have a batch.
    has_batches = epoch_end != "drop" or len(dropped_buckets) < len(counts) or is_estimate
    return BatchCounts(batches_by_bucket, tuple(warnings), tuple(notes), has_batches)
