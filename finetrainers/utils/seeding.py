"""Stateless random seeds, derived from a purpose: without generator state to save, and equal at any world size."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from a tuple of integers and names, stable over processes and versions."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(device: torch.device | str, *parts: int | str) -> torch.Generator:
    """Return a new generator on `device`, seeded by `derive_seed(*parts)`."""
    import torch

    return torch.Generator(device=device).manual_seed(derive_seed(*parts))
