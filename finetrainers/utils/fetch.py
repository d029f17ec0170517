"""Downloads of images that prompts name by an address: limited in time and size, once each in a process. No torch."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import closing

from .text import file_size
from .versions import __version__

#: Seconds for an answer and for a complete download, and bytes of one; resolving an address has no separate time limit.
TIMEOUT_S, DEADLINE_S, MAX_BYTES = 10.0, 30.0, 64 << 20
_SCHEMES = ("http://", "https://")
_CHUNK = 1 << 16


class FetchError(OSError):
    """Error of an address without content; the message starts with the address."""


class _Download:
    """A download in a thread: its content, or the reason for a failure."""

    def __init__(self, url: str) -> None:
        self.url, self.content, self.reason = url, b"", ""
        self.began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="fetch", daemon=True)
        self._thread.start()

    def result(self) -> bytes:
        """Wait for the content until the deadline.

        Raises:
            FetchError: the download failed or is late.
        """
        self._thread.join(max(0.0, self.began + DEADLINE_S - time.monotonic()))
        reason = f"no content within {DEADLINE_S:g} s" if self._thread.is_alive() else self.reason
        if reason:
            raise FetchError(f"{self.url} cannot be fetched: {reason}; download it, and set its path")
        return self.content

    def _run(self) -> None:
        try:
            self.content = self._read()
        except urllib.error.HTTPError as error:
            self.reason = f"status {error.code}"
        except Exception as error:  # urllib, http.client, ssl and codecs for names have their own errors
            cause = getattr(error, "reason", error)
            self.reason = str(getattr(cause, "strerror", None) or cause).strip() or type(error).__name__

    def _read(self) -> bytes:
        request = urllib.request.Request(self.url, headers={"User-Agent": f"finetrainers/{__version__}"})
        parts, size = [], 0
        with closing(urllib.request.urlopen(request, timeout=TIMEOUT_S)) as answer:
            while chunk := answer.read(_CHUNK):
                size += len(chunk)
                if size > MAX_BYTES:
                    raise ValueError(f"more than {file_size(MAX_BYTES)}")
                if time.monotonic() - self.began > DEADLINE_S:
                    raise TimeoutError(f"no content within {DEADLINE_S:g} s")
                parts.append(chunk)
        return b"".join(parts)


_downloads: dict[str, _Download] = {}


def is_url(place: str) -> bool:
    """Return whether a place is an address that `fetch` takes."""
    return place.startswith(_SCHEMES)


def start_fetching(places: Iterable[str | None]) -> None:
    """Begin to download all addresses among the places at once, so that `fetch` waits only for the slowest."""
    for place in places:
        if place is not None and is_url(place) and place not in _downloads:
            _downloads[place] = _Download(place)


def fetch(url: str) -> bytes:
    """Return the content of an address, downloaded once in this process.

    Raises:
        FetchError: the content is missing, too large, or too slow; another call tries again.
    """
    start_fetching([url])
    try:
        return _downloads[url].result()
    except FetchError:
        del _downloads[url]
        raise
