"""The Python client: `connect()` finds or starts the server and returns a `Client`."""

from remuda.client.client import API, REVISION, Client, ExecChunk, LogChunk
from remuda.client.embedded import connect
from remuda.client.errors import ApiError, Incompatible, Lost, StartFailed, Unreachable
from remuda.client.ids import make_key

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
