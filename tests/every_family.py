"""The registered model families and the versions of their tiny models, for tests that are parametrized over all of
them."""

from __future__ import annotations

from finetrainers.models.registry import families

#: Names of all families.
FAMILIES = tuple(families())
#: Versions that differ from others in how text and image are encoded alone, and have tests of their own.
_ELSEWHERE = ("token_replace", "latent_concat")
#: Family and version of every other tiny model; None: there is one version.
CHECKPOINTS = tuple(
    (name, version)
    for name, family in families().items()
    for version in family.tiny_versions or (None,)
    if version not in _ELSEWHERE
)
