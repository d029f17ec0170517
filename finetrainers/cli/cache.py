"""`finetrainers cache`: list, verify and prune precomputed tensors."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetrainers.config.arguments import path_argument
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.load import load_config
from finetrainers.utils.progress import Meter
from finetrainers.utils.text import duration, file_size

if TYPE_CHECKING:
    from finetrainers.data.cache.maintenance import CacheMaintenance

_DESCRIPTION = """A cache holds the prompt embeddings and latents of captions and clips, one file each, and the media
of archives and of rows from Python.
It is in <output_dir>/precomputed or in --precompute_dir. Entries never become stale: when captions, files, sizes or
models change, new entries are added, and the old ones are not read again. `prune` removes those. Every command takes
the directory of the cache, or the output directory of a run.

  finetrainers cache ls cache                                  entries and sizes, by model
  finetrainers cache verify cache --repair                     after a power cut: remove damaged entries
  finetrainers cache prune cache --keep a.toml b.toml --dry_run  entries that neither run would read
  finetrainers cache prune cache --older_than 30               entries not read for 30 days
"""


def add_cache(commands: Any) -> None:
    """Add the subcommand and its own subcommands to the parser."""
    cache = commands.add_parser(
        "cache",
        help="list, verify and prune precomputed tensors",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = cache.add_subparsers(dest="action", metavar="ACTION", required=True)

    ls = actions.add_parser("ls", help="list entries, bytes and last use, by kind and model")
    ls.add_argument("--json", action="store_true", help="print JSON (bytes, seconds since 1970)")
    ls.set_defaults(run=_ls)

    verify = actions.add_parser("verify", help="read every entry; exit code 1 if any is damaged or has NaN values")
    verify.add_argument(
        "--repair", action="store_true", help="remove damaged entries; the next run computes them again"
    )
    verify.set_defaults(run=_verify)

    prune = actions.add_parser(
        "prune",
        help="remove entries that are no longer needed",
        description="Remove entries. With both options, only those that no configuration needs and that were not "
        "read recently. Not possible while a run uses the cache.",
    )
    prune.add_argument(
        "--keep",
        type=path_argument,
        nargs="+",
        metavar="CONFIG",
        help="keep entries that training with these TOML files reads",
    )
    prune.add_argument(
        "--older_than", type=float, metavar="DAYS", help="remove only entries that were not read for this many days"
    )
    prune.add_argument("--dry_run", action="store_true", help="list what would be removed, without removing it")
    prune.set_defaults(run=_prune)
    for action in (ls, verify, prune):
        action.set_defaults(check=_check)
        action.add_argument(
            "directory", type=path_argument, metavar="DIR", help="--precompute_dir, or a run's --output_dir"
        )


def _check(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield the problems with the command's arguments."""
    if arguments.action == "prune":
        if arguments.keep is None and arguments.older_than is None:
            message = "requires --keep CONFIG ..., --older_than DAYS, or both"
            yield Problem("prune", message, "required")
        if arguments.older_than is not None and not 0 <= arguments.older_than < math.inf:
            yield Problem("--older_than", f"{arguments.older_than:g} is not a number of days")
    places = (arguments.directory, arguments.directory / "precomputed")
    if not any((place / kind).is_dir() for place in places for kind in ("tensors", "media")):
        message = f"{arguments.directory} holds no cache; use the --precompute_dir or the --output_dir of a run"
        yield Problem("DIR", message, "not_found")


def _open(arguments: argparse.Namespace) -> CacheMaintenance:
    from finetrainers.data.cache.maintenance import CacheMaintenance

    return CacheMaintenance(arguments.directory)


def _ls(arguments: argparse.Namespace) -> int:
    cache = _open(arguments)
    groups = cache.groups()
    count, size = sum(group.entries for group in groups), sum(group.size_bytes for group in groups)
    if arguments.json:
        report = {
            "directory": str(cache.directory),
            "groups": [asdict(group) for group in groups],
            "entries": count,
            "size_bytes": size,
            "known_files": cache.known_files(),
        }
        print(json.dumps(report, indent=2))
        return 0
    now = time.time()
    print(f"{'kind':<8}{'entries':>9}  {'size':>9}  {'last read':>11}  model")
    for group in groups:
        ages = dict.fromkeys(duration(round(now - used)) for used in (group.newest_use, group.oldest_use))
        model = f"{group.model} [{group.identity}]" if group.model else group.identity
        size_text, age = file_size(group.size_bytes), "-".join(ages)
        print(f"{group.kind:<8}{group.entries:>9}  {size_text:>9}  {age:>11}  {model}".rstrip())
    print(f"{'all':<8}{count:>9}  {file_size(size):>9}")
    print(f"facts of {cache.known_files()} media files are stored")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from finetrainers.data.cache.store import CacheInUse

    cache = _open(arguments)
    with Meter("read", "entries") as meter:
        count, damaged = cache.verify(progress=meter)
    for damage in damaged:
        print(f"{damage.key}{f' ({damage.of})' if damage.of else ''}: {damage.reason}")
    print(f"{_entries(count)} read, {len(damaged)} damaged")
    if arguments.repair:
        try:
            cache.repair(damaged)
        except CacheInUse as error:
            raise ConfigError([Problem("--repair", str(error), "occupied")]) from None
        if damaged:
            print(f"removed {len(damaged)}; the next run that needs them computes them again")
    return 1 if damaged else 0


def _prune(arguments: argparse.Namespace) -> int:
    from finetrainers.data.cache.store import CacheInUse

    cache = _open(arguments)
    keep = None if arguments.keep is None else _needed_keys(cache.directory, arguments.keep)
    try:
        going = cache.prune(keep=keep, older_than_days=arguments.older_than, dry_run=arguments.dry_run)
    except CacheInUse as error:
        raise ConfigError([Problem("prune", str(error), "occupied")]) from None
    if arguments.dry_run:
        for entry in going:
            print(entry.path)
    done = "would be removed" if arguments.dry_run else "removed"
    print(f"{_entries(len(going))}, {file_size(sum(entry.size_bytes for entry in going))}, {done}")
    return 0


def _needed_keys(directory: Path, configs: Sequence[Path]) -> set[str]:
    """Return the keys of all entries that training with any of the configurations would read, without loading a model.

    If a model's files were replaced under one name, entries of the old files also count as needed.

    Args:
        directory: the cache.
        configs: TOML files.

    Raises:
        ConfigError: a configuration cannot run, or the cache has never been used with its model.
    """
    from finetrainers.data.buckets.clip import ConditioningImage
    from finetrainers.data.cache.encoder_index import recall_models
    from finetrainers.data.cache.keys import CacheKeys, text_key
    from finetrainers.data.inspect.file_facts import FileFacts
    from finetrainers.plan.preflight import for_preparing, preflight

    keys: set[str] = set()
    digests = FileFacts(directory / "digests")
    for path in configs:
        resolved_run = preflight(for_preparing(load_config(path)), preparing=True, weights=False)
        config, plan = resolved_run.config, resolved_run.plan
        text_encoders = recall_models(directory, config.model, "text")
        clips = plan.encoded_clips()
        prompts = plan.shown_texts()
        images = {image for _, image in prompts if isinstance(image, ConditioningImage)}
        vaes = recall_models(directory, config.model, "vae") if clips or images else []
        masked = [clip for clip in clips if clip.mask is not None]
        image_paths = {path for image in images for path in (image.path, image.last) if path is not None}
        mask_paths = {clip.mask.path for clip in masked if clip.mask is not None}
        digests.learn({path for clip in clips for path in clip.files} | mask_paths | image_paths)
        files = {path for clip in clips for path in clip.files} | mask_paths | image_paths
        files |= {path for path in (config.data.dataset_file, config.data.eval_dataset_file) if path is not None}
        root = directory.resolve()
        keys |= {path.relative_to(root).as_posix() for path in map(Path.resolve, files) if path.is_relative_to(root)}
        names = replace(CacheKeys.of(directory, config), digests=digests)
        keys.update(names.mask(clip) for clip in masked)
        for vae in vaes:
            spec = resolved_run.spec
            encoded = replace(names, vae=vae, tiled=spec.tiles_by_size)
            keys.update(encoded.video(clip) for clip in clips)
            if images:
                by_frames = replace(vae, with_first_frame=spec.image_version(plan.size[0]))
                keys.update(replace(encoded, vae=by_frames).image(image) for image in images)
        if not (text_encoders and (vaes or not clips)):
            message = (
                f"{directory} has not been used with the model of {path}, so the entries it needs are unknown; "
                f"prepare it first (finetrainers prepare --config {path} --precompute_dir {directory}), or remove it"
            )
            raise ConfigError([Problem("--keep", message, "not_found")])
        texts: set[tuple[str, str | None]] = {(caption, None) for caption in {"", *plan.all_captions()}}
        if resolved_run.facts.text_sees_image:
            texts |= {(caption, names.shown(image)) for prompt, image in prompts for caption in (prompt, "")}
        keys.update(text_key(text_encoder.identity, *text) for text_encoder in text_encoders for text in texts)
    return keys


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"
