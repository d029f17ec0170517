"""Advice on a part of a model that could not be downloaded from the Hub, from the error's own cause.

Downloading, going on after a connection that broke, waiting after 429 and falling back on what is on disk is
huggingface_hub's work and done well there; its reasons, though, get lost on the way through the libraries that load
models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from finetrainers.utils.failures import InputError

from .hub import OFFLINE, download_advice

_TOO_MANY = 429


def hub_help(error: BaseException, repo: str, *, away: str | None = None) -> InputError | None:
    """Return an error with a sentence for the user, or None if the Hub is not the cause.

    Args:
        error: exception that loading raised.
        repo: id of the requested repository.
        away: why the Hub was not asked, or None if not known.
    """
    causes = list(_causes(error))
    page = f"{constants.ENDPOINT}/{repo}"
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return InputError(
            f"The model is gated: log in at {page} and accept its conditions, then set a token of that account on "
            "this machine (`hf auth login`, or HF_TOKEN).",
            "unavailable",
        )
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        message = f"{page} does not exist or is private: check the name, or log in with `hf auth login` (or HF_TOKEN)."
        return InputError(message, "not_found")
    statuses = {cause.response.status_code for cause in causes if isinstance(cause, HfHubHTTPError)}
    if _TOO_MANY in statuses:
        message = "The Hub limits requests for now (429): wait some minutes, or log in, which raises the limit."
        return InputError(message, "unavailable")
    if any(status >= 500 for status in statuses):
        message = "The Hub itself has a problem: try again later. Downloaded files are kept."
        return InputError(message, "unavailable")
    if away is None and huggingface_hub.is_offline_mode():
        away = OFFLINE
    if away or any(isinstance(cause, (LocalEntryNotFoundError, OfflineModeIsEnabled)) for cause in causes):
        message = f"It is not on this disk, and {away or 'the Hub cannot be reached'}: {download_advice(repo)}."
        return InputError(message, "unavailable")
    return None


def fetch_config(repo: str, names: list[str], *, revision: str | None, cache_dir: Path | None) -> None:
    """Download the first of these files that the repository has.

    Raises:
        ValueError: it has none, or the Hub refuses it; with the remedy.
    """
    for name in names:
        try:
            huggingface_hub.hf_hub_download(repo, name, revision=revision, cache_dir=cache_dir)
            return
        except EntryNotFoundError:
            continue
        except RevisionNotFoundError:
            raise InputError(f"{repo} has no revision {revision!r} on the Hub", "not_found") from None
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            message = f"the Hub does not provide {name} of {repo}: {reason}"
            raise hub_help(error, repo) or InputError(message, "unavailable") from error
    raise InputError(
        f"{repo} on the Hub has no {' nor '.join(names)}; use a directory or repository in diffusers layout",
        "not_found",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, which it was raised from or while handling."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        cause = pending.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            pending += [cause.__cause__, cause.__context__]
