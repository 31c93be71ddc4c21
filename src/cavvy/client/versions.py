"""Compares the version of a server with the version of this client."""

import re
from collections.abc import Callable

from msgspec import Struct
from msgspec.json import decode

from cavvy import __version__
from cavvy.client.errors import ApiError, IncompatibleVersions
from cavvy.client.transport import HttpAnswer

_SERVER = "/v1/server"
_NO_ROUTE = "not-found"
# codes of the errors with which an older server refuses what only newer versions know
_REFUSALS = (_NO_ROUTE, "invalid-task")


class _ServerVersion(Struct, frozen=True):
    version: str
    revision: int | None = None  # the oldest servers do not state it


def parse_version(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def require_revision(send: Callable[[str, str], HttpAnswer], revision: int, what: str) -> None:
    """Raise IncompatibleVersions if the server's routes are older than `revision`. Such a server
    would ignore `what` a request asks for.
    """
    server = decode(send("GET", _SERVER).body, type=_ServerVersion)
    if (server.revision or 0) < revision:
        raise IncompatibleVersions(
            "server-too-old",
            f"the server (cavvy {server.version}, revision {server.revision or 0}) is older than "
            f"this client (cavvy {__version__}) and would ignore {what}",
            f"update the server to a version with revision {revision} or later",
        )


def explain_older(
    error: ApiError, target: str, send: Callable[[str, str], HttpAnswer], revision: int
) -> ApiError:
    """Return the error that a request to `target` caused. If the server may have refused the
    request because the server is older than this client, the returned error names both versions.
    `revision` is that of the routes that this client knows.
    """
    if error.code not in _REFUSALS or target == _SERVER:
        return error
    try:
        server = decode(send("GET", _SERVER).body, type=_ServerVersion)
    except (ApiError, ValueError):
        return error
    theirs, mine = parse_version(server.version), parse_version(__version__)
    its_revision = revision if server.revision is None else server.revision
    if (theirs, its_revision) >= (mine, revision):
        return error
    its, own = f"cavvy {server.version}", f"cavvy {__version__}"
    if theirs == mine:  # builds of the same version
        its, own = f"{its}, revision {its_revision}", f"{own}, revision {revision}"
    versions = f"the server ({its}) is older than this client ({own})"
    remedy = f"update the server, or use {its} as the client"
    if error.code == _NO_ROUTE:
        message = f"{versions}: {error.message} on the server"
        return IncompatibleVersions("server-too-old", message, remedy, error.status)
    hint = f"{versions}; if the file is valid for the client, {remedy}"
    return ApiError(error.code, error.message, hint, error.status)
