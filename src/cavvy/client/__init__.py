"""The Python client: `connect()` finds or starts the server and returns a `Client`."""

from cavvy.client.client import API, REVISION, Client, ExecChunk, LogChunk
from cavvy.client.embedded import connect
from cavvy.client.errors import (
    ApiError,
    ConnectionLost,
    IncompatibleVersions,
    StartFailed,
    Unreachable,
)
from cavvy.client.ids import make_key
from cavvy.client.patience import Patience

__all__ = [
    "API",
    "REVISION",
    "ApiError",
    "Client",
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
