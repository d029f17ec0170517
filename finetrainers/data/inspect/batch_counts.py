"""Counts the batches of an epoch by bucket, and the clips that are left out, for the start of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from finetrainers.config.root import TrainConfig
from finetrainers.utils.text import plural

from ..buckets.buckets import Bucket, bucket_probabilities, bucket_text, num_batches
from ..buckets.clip import Clip
from ..buckets.windows import windows_by_item

_WHOLE = 1e-6  # numbers of clips nearer to a whole one than this are whole


@dataclass(frozen=True)
class BatchCounts:
    """Batch counts that hold for every epoch.

    Attributes:
        shown: batches of each bucket; with `~` where epochs differ.
        warnings, notes: what is left out, and how much.
        any: whether there is a batch at all.
    """

    shown: Mapping[Bucket, str]
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
    total = fallen = 0.0
    for (buckets, repeats), alike in Counter((clip.buckets, clip.repeats) for clip in clips).items():
        total += alike * repeats
        shares = bucket_probabilities(buckets, keep)
        fallen += alike * repeats * (1.0 - sum(shares))
        for bucket, share in zip(buckets, shares, strict=True):
            counts[bucket] += alike * repeats * share
            varies[bucket] |= share < 1.0 or repeats != int(repeats)
    shown, left, never = {}, 0.0, []
    for bucket, count in counts.items():
        size = sizes.get(bucket, batch_size)
        whole = round(count) if abs(count - round(count)) < _WHOLE else count
        shown[bucket] = f"~{count / size:.3g}" if varies[bucket] else str(num_batches(whole, size, epoch_end))
        left += whole % size
        if whole < size:
            never.append(f"{bucket_text(bucket)} ({plural(round(whole), 'clip')} for batches of {size})")
    warnings, notes = [], []
    about = "about " if any(varies.values()) else ""
    of_all = f"{about}{left:.0f} of {about}{total:.0f} clips"
    if epoch_end == "drop" and left:
        warnings.append(f"--epoch_end drop leaves out {of_all} an epoch, others each time, that do not fill a batch")
        if never:
            warnings.append(f"--epoch_end drop leaves out whole buckets, every epoch: {', '.join(never)}")
    waiting = sum(sizes.get(bucket, batch_size) - 1 for bucket in counts)
    if epoch_end == "wrap" and waiting:
        notes.append(
            f"--epoch_end wrap: after the last epoch, up to {plural(waiting, 'clip')} of that epoch (less than a batch of each bucket) "
            "have waited for a batch that does not come"
        )
    if fallen > _WHOLE:
        notes.append(
            f"--bucket_keep_prob leaves out about {fallen:.3g} of {total:.0f} clips an epoch, others each time; "
            "events.jsonl counts them (left_out)"
        )
    # Where epochs differ, one of them may have it.
    found = epoch_end != "drop" or len(never) < len(counts) or any(varies.values())
    return BatchCounts(shown, tuple(warnings), tuple(notes), found)
