"""The Python client: `connect()` finds the server and returns an `ApiClient`. Each name is loaded
when it is first used, so that a command that finds no server need not import the client.
"""

TYPE_CHECKING = False  # set without importing `typing`, because many commands import this module
if TYPE_CHECKING:
    from cavvy.client.client import API, REVISION, ApiClient, ExecChunk, LogChunk
    from cavvy.client.connection import connect
    from cavvy.client.errors import (
        ApiError,
        ConnectionLost,
        IncompatibleVersions,
        StartFailed,
        Unreachable,
    )
    from cavvy.client.paths import make_key
    from cavvy.client.transport import Patience

__all__ = [
    "API",
    "REVISION",
    "ApiClient",
    "ApiError",
    "ConnectionLost",
    "ExecChunk",
    "IncompatibleVersions",
    "LogChunk",
    "Patience",
    "StartFailed",
    "Unreachable",
    "connect",
    "make_key",
]

# The module that contains each name which is not an error.
_MODULES = {
    **dict.fromkeys(("API", "REVISION", "ApiClient", "ExecChunk", "LogChunk"), "client"),
    "Patience": "transport",
    "connect": "connection",
    "make_key": "paths",
}


if not TYPE_CHECKING:  # a type checker would accept every name of a module with `__getattr__`

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'cavvy.client' has no attribute {name!r}")
        from importlib import import_module

        found = getattr(import_module(f"cavvy.client.{_MODULES.get(name, 'errors')}"), name)
        globals()[name] = found
        return found
