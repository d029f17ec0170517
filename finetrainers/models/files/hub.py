"""The hub: whether it answers, which a run asks once, and the config files of a model that lies there.

The libraries that load models ask it for every file, wait for each answer, and try again when none comes. A run knows
first, within seconds, and then does without: what is on this disk is loaded, and what is not is an error. Imports no torch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

#: Seconds for a connection, and for all of the question: finding an address obeys no time limit.
_TIMEOUT_S, _DEADLINE_S = 4.0, 6.0
_SERVER_ERROR = 500
#: Why it is not asked where the user wants it so.
OFFLINE = "HF_HUB_OFFLINE is set"


@dataclass
class _Known:
    """Why the hub is not to be asked any more, in words; None: it is."""

    away: str | None = None


_known = _Known()


def away() -> str | None:
    """Why the hub does not answer, as found by the last `ask`; None: it does, or was not asked."""
    return _known.away


def ask(repositories: Sequence[str]) -> str | None:
    """Ask the hub for one of these, and say why no answer comes; None: one does, or there is nothing to ask for."""
    _known.away = None
    if not repositories:
        return None
    import huggingface_hub

    if huggingface_hub.is_offline_mode():  # as all libraries know
        return OFFLINE
    _known.away = _ask(repositories[0], huggingface_hub.constants.ENDPOINT)
    return _known.away


def _ask(repo: str, endpoint: str) -> str | None:
    heard: list[str | None] = []
    asking = threading.Thread(target=lambda: heard.append(_no_answer(f"{endpoint}/{repo}")), name="hub", daemon=True)
    asking.start()
    asking.join(_DEADLINE_S)
    why = heard[0] if heard else f"no answer within {_DEADLINE_S:g} s"
    return None if why is None else f"the hub cannot be reached ({endpoint}: {why})"


def _no_answer(url: str) -> str | None:
    """Why a request gets no answer; None: it gets one, if only a refusal."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers

    try:
        response = get_session().request("HEAD", url, headers=build_hf_headers(), timeout=_TIMEOUT_S)
    except Exception as error:  # of whichever HTTP library this version of huggingface_hub uses
        return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return f"status {response.status_code}" if response.status_code >= _SERVER_ERROR else None


def how_to_download(repo: str) -> str:
    """What to do where the hub does not answer."""
    return (
        f"download it first where there is a connection (`hf download {repo}`), into the same cache (HF_HOME, or "
        "--cache_dir)"
    )
