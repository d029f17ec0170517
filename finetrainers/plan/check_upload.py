"""The check, before anything is loaded, that the results of a run can be uploaded when it ends. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.root import TrainConfig
from finetrainers.models.files.hub import OFFLINE, ask

_OPTION = "--push_to_hub"
_LATER = "or remove it, and upload the results later with `hf upload`"
#: Roles of members of an organization who may create and write its repositories.
_WRITERS = ("admin", "write", "contributor")


def hub_token(config: TrainConfig) -> str | None:
    """Return the access token of a run, or None if it uses that of `hf auth login`."""
    return config.run.hub_token.get_secret_value() if config.run.hub_token else None


def repository_name(config: TrainConfig) -> str:
    """Return the name of the repository that the results are uploaded to."""
    return config.run.hub_model_id or config.run.output_dir.resolve().name


def check_upload(config: TrainConfig) -> None:
    """Check that the Hub answers and that the token may write the repository, if the results are to be uploaded.

    Raises:
        ConfigError: the upload would fail.
    """
    if config.run.push_to_hub and (problems := list(_problems(config))):
        raise ConfigError(problems)


def _problems(config: TrainConfig) -> Iterator[Problem]:
    from huggingface_hub import HfApi, get_token

    name = repository_name(config)
    outage = ask([name])
    if outage is not None:
        remedy = "unset it" if outage == OFFLINE else "try again when it works"
        yield Problem(_OPTION, f"{outage}; {remedy}, {_LATER}", "unavailable")
        return
    token = hub_token(config) or get_token()
    if token is None:
        message = f"requires an access token with the role write; run `hf auth login`, {_LATER}"
        yield Problem(_OPTION, message, "required")
        return
    option = "--hub_token" if hub_token(config) else _OPTION
    try:
        user = HfApi(token=token).whoami()
    except Exception as error:  # its type depends on the HTTP library of huggingface_hub's version
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        message = f"the Hub does not accept the access token: {reason}; use a valid one, {_LATER}"
        yield Problem(option, message, "unavailable")
        return
    yield from _permission_problems(user, name, option)


def _permission_problems(user: dict[str, Any], name: str, option: str) -> Iterator[Problem]:
    """Yield the permissions that a token's owner lacks, by the Hub's description, which omits fine-grained rights."""
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        yield Problem(option, f"the access token is read-only; use one with the role write, {_LATER}")
    namespace, slash, _ = name.rpartition("/")
    if not slash or namespace == user.get("name"):
        return
    roles = {org.get("name"): org.get("roleInOrg") for org in user.get("orgs", [])}
    writable = [user.get("name"), *(org for org, role in roles.items() if role is None or role in _WRITERS)]
    if namespace not in writable:
        message = f"{user.get('name')} may not write to {namespace}; use one of {', '.join(map(str, writable))}"
        yield Problem("--hub_model_id", message, "unavailable")
