"""The Python client: `connect()` finds or starts the server and returns a `Client`."""

from cavvy.client.client import API, REVISION, Client, ExecChunk, LogChunk
from cavvy.client.embedded import connect
from cavvy.client.errors import ApiError, Incompatible, Lost, StartFailed, Unreachable
from cavvy.client.ids import make_key

__all__ = [
    "API",
    "REVISION",
    "ApiError",
    "Client",
    "ExecChunk",
    "Incompatible",
    "LogChunk",
    "Lost",
    "StartFailed",
    "Unreachable",
    "connect",
    "make_key",
]
