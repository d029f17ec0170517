"""The fingerprint of a loaded component, so that cached results are found again only for the same weights.

The name comes from the weights themselves, not from where they were loaded: moving a model keeps its cache, and
replacing its files under the same name does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

#: Raise when encoders are called in another way (with another prompt template, say), so that old entries are no longer
#: found.
ENCODING_VERSION = 1

_SAMPLED = 256  # elements read of each tensor; training or converting a model changes them all


def model_fingerprint(parts: Mapping[str, Any], **options: object) -> str:
    """Return the hex digest of modules, tokenizers and further options.

    Args:
        parts: components by name: torch modules, tokenizers, and processors of images.
        options: anything else that changes the result; JSON values.
    """
    if find_spec("ftfy") is not None and any(hasattr(part, "get_vocab") for part in parts.values()):
        options["ftfy"] = True  # pipelines that clean prompts do so only where it is installed
    digest = hashlib.sha256(json.dumps({**options, "version": ENCODING_VERSION}, sort_keys=True).encode())
    for name, part in sorted(parts.items()):
        digest.update(f"\n{name} {type(part).__name__} ".encode())
        if isinstance(part, nn.Module):
            _update_from_module(digest, part)
        elif hasattr(part, "get_vocab"):
            described = [sorted(part.get_vocab().items()), part.padding_side]
            digest.update(json.dumps(described).encode())
        elif hasattr(part, "to_dict"):
            digest.update(json.dumps(part.to_dict(), sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _update_from_module(digest: Any, module: nn.Module) -> None:
    config: Any = getattr(module, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config or {})
    # Names starting with an underscore hold the origin of the component and the library version that wrote it.
    hashed = {key: value for key, value in values.items() if not key.startswith("_") and key != "transformers_version"}
    digest.update(json.dumps(hashed, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            flat = tensor.detach().flatten()
            sample = flat[:: max(flat.numel() // _SAMPLED, 1)].cpu().contiguous()  # evenly spaced elements
            digest.update(sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b"")
