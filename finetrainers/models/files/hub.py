"""The Hub: whether it answers, which a run asks once.

The libraries that load models ask it for every file, wait for each answer, and try again when none comes. A run knows
first, within seconds, and then does without: what is on this disk is loaded, and what is not is an error. Imports no
torch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

#: Seconds for a connection, and for all of the question: finding an address obeys no time limit.
_TIMEOUT_S, _DEADLINE_S = 4.0, 6.0
_SERVER_ERROR = 500
#: Why the Hub is not asked, where the user wants it so.
OFFLINE = "HF_HUB_OFFLINE is set"


@dataclass
class _Status:
    """Reason not to ask the Hub any more, as text, or None."""

    away: str | None = None


_status = _Status()


def away() -> str | None:
    """Return why the Hub did not answer the last `ask`, or None if it did or was not asked."""
    return _status.away


def ask(repositories: Sequence[str]) -> str | None:
    """Ask the Hub for one of these, and return why no answer comes, or None if one does or none is asked for."""
    _status.away = None
    if not repositories:
        return None
    import huggingface_hub

    if huggingface_hub.is_offline_mode():  # a setting that all libraries share
        return OFFLINE
    _status.away = _ask(repositories[0], huggingface_hub.constants.ENDPOINT)
    return _status.away


def _ask(repo: str, endpoint: str) -> str | None:
    answers: list[str | None] = []
    asking = threading.Thread(target=lambda: answers.append(_no_answer(f"{endpoint}/{repo}")), name="hub", daemon=True)
    asking.start()
    asking.join(_DEADLINE_S)
    reason = answers[0] if answers else f"no answer within {_DEADLINE_S:g} s"
    return None if reason is None else f"the Hub cannot be reached ({endpoint}: {reason})"


def _no_answer(url: str) -> str | None:
    """Return why a request gets no answer, or None if it gets one, even a refusal."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers

    try:
        response = get_session().request("HEAD", url, headers=build_hf_headers(), timeout=_TIMEOUT_S)
    except Exception as error:  # of whichever HTTP library this version of huggingface_hub uses
        return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return f"status {response.status_code}" if response.status_code >= _SERVER_ERROR else None


def download_advice(repo: str) -> str:
    """Return advice on downloading a repository where the Hub does not answer."""
    return f"download it first with a connection (`hf download {repo}`), into the same cache (HF_HOME, or --cache_dir)"
