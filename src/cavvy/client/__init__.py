"""The Python client: `connect()` finds the server and returns an `ApiClient`."""

from cavvy.client.chunks import ExecChunk, LogChunk
from cavvy.client.client import API, REVISION, ApiClient
from cavvy.client.connection import connect
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
