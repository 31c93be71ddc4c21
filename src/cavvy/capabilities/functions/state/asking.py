"""How programs ask the server for dicts and queues: users' programs as any client, the programs of
jobs through the agent of their node, which has a token for that.

This file also runs on nodes, so it imports only the standard library and files that do.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from secrets import token_hex
from typing import Any, Protocol

from cavvy.sdk.errors import CavvyError, InvalidArgument

Fields = Mapping[str, Any]
WAIT_S = 20.0  # for which a request waits for an item, as in `wire.py`
_PATIENCE_S = 120.0  # for which a request is repeated while no server answers
_PAUSE_S = 0.2
_RECEIVE = 1 << 16
_BUSY, _UNREACHABLE = 429, 503


class StateAsker(Protocol):
    """Sends requests to dicts and queues."""

    def ask(self, kind: str, name: str, fields: Fields) -> dict[str, Any]:
        """Return the answer. Raises CavvyError."""
        ...

    def delete(self, kind: str, name: str) -> None:
        """Delete a dict or a queue. Raises CavvyError."""
        ...


def find_asker(project: str | None) -> StateAsker:
    """Return what asks in this program. Raises InvalidArgument."""
    path, own = os.environ.get("CAVVY_NOTICE"), os.environ.get("CAVVY_PROJECT")
    if path and "CAVVY_JOB" in os.environ:
        if project not in (None, own):
            raise InvalidArgument(
                f"a job of project {own} reaches no dict or queue of project {project}",
                "leave `project` out, and deploy the app into the other project",
            )
        return NodeAsker(path)
    from cavvy.frame.discover import load

    made: StateAsker = load("cavvy.capabilities.functions.state.client:ClientAsker")(project)
    return made


class NodeAsker:
    """Asks through the socket of the node's agent. Each thread has a connection of its own. `room`
    is the first part of the path of what is asked for.
    """

    def __init__(self, path: str, room: str = "state") -> None:
        self._path, self._room = path, room
        self._local = threading.local()

    def ask(self, kind: str, name: str, fields: Fields) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                status, body = self._send(kind, {**fields, "name": name})
            except OSError as error:
                self.close()
                status, body = _UNREACHABLE, {"message": f"the agent of the node: {error}"}
            if status == 200:
                return body
            if status not in (_BUSY, _UNREACHABLE) or time.monotonic() > until:
                raise CavvyError(
                    str(body.get("message") or f"the server answered {status}"),
                    str(body.get("hint") or ""),
                    str(body.get("code") or ""),
                )
            time.sleep(_PAUSE_S)

    def delete(self, kind: str, name: str) -> None:
        raise InvalidArgument(
            f"a function cannot delete the {kind} {name}",
            "call `clear()`, or delete it in the program that calls the function",
        )

    def _send(self, kind: str, fields: Fields) -> tuple[int, dict[str, Any]]:
        """Raises OSError."""
        made: socket.socket | None = getattr(self._local, "socket", None)
        if made is None or self._local.process != os.getpid():
            made = self._local.socket = socket.socket(socket.AF_UNIX)
            self._local.process, self._local.lane = os.getpid(), token_hex(8)
            self._local.read = bytearray()
            made.connect(self._path)
        number = token_hex(6)
        ask = {"id": number, "to": f"{self._room}/{kind}", "lane": self._local.lane}
        made.sendall(json.dumps({"ask": {**ask, "body": json.dumps(fields)}}).encode() + b"\n")
        while True:
            line = self._read_line(made)
            answer = json.loads(line).get("answer") if line.startswith(b'{"answer"') else None
            if answer is not None and answer["id"] == number:
                return int(answer["status"]), answer["body"]

    def _read_line(self, made: socket.socket) -> bytes:
        read: bytearray = self._local.read
        searched = 0
        while (at := read.find(b"\n", searched)) < 0:
            searched = len(read)
            if not (data := made.recv(_RECEIVE)):
                raise ConnectionResetError("it has closed the connection")
            read += data
        line = bytes(read[:at])
        del read[: at + 1]
        return line

    def close(self) -> None:
        """Close the connection of this thread."""
        if (made := getattr(self._local, "socket", None)) is not None:
            made.close()
            self._local.socket = None
