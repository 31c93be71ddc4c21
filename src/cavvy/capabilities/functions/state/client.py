"""Asks for dicts and queues as any client of the server."""

import threading
from typing import Any

from msgspec.json import decode, encode

from cavvy.capabilities.functions.state import wire
from cavvy.capabilities.functions.state.asking import Fields
from cavvy.client.paths import project_path, segment
from cavvy.sdk.connections import Connections

_lock = threading.Lock()
_shared: list[Connections] = []


class ClientAsker:
    """Asks the server that commands use. All dicts and queues of a program share connections."""

    def __init__(self, project: str | None) -> None:
        self._project = project

    def ask(self, kind: str, name: str, fields: Fields) -> dict[str, Any]:
        connections = _share_connections()
        path = self._find_path(connections, kind, name)
        with connections.use() as client:
            answer = client.call("POST", path, encode(fields), wait_s=fields.get("wait_s", 0.0))
        found: dict[str, Any] = decode(answer.body)
        return found

    def delete(self, kind: str, name: str) -> None:
        connections = _share_connections()
        project = self._project or connections.default_project()
        with connections.use() as client:
            wire.delete_object(client, project, "dict" if kind == "dict" else "queue", name)

    def _find_path(self, connections: Connections, kind: str, name: str) -> str:
        project = self._project or connections.default_project()
        return f"{project_path(project)}/{kind}s/{segment(kind, name)}"


def _share_connections() -> Connections:
    with _lock:
        if not _shared:
            _shared.append(Connections(None, None, None))
        return _shared[0]
