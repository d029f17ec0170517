"""Links in the run directory to its checkpoints' weights, named as other trainers name them. Imports no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)


def link_weights(weights: Path, links: Iterable[Path]) -> None:
    """Make relative links to the weights of a checkpoint; paths that exist and are not links are left alone.

    Args:
        weights: complete directory of the checkpoint's weights.
        links: to make, or to replace.
    """
    for link in links:
        if link.exists() and not link.is_symlink():
            logger.warning("%s exists and is not a link, so it does not point to %s", link, weights)
            continue
        temporary = link.with_name(f".{link.name}.tmp")
        try:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(os.path.relpath(weights, link.parent), target_is_directory=True)
            temporary.replace(link)
        except OSError as error:  # a file system without links
            logger.warning("no link %s to %s: %s", link, weights, error.strerror)


def unlink_weights(links: Iterable[Path]) -> None:
    """Remove links whose checkpoint is gone."""
    for link in links:
        if link.is_symlink() and not link.exists():
            link.unlink()
