"""The way from a sandbox to the dicts and queues that its maker has named, and to nothing else.

The first process of a sandbox listens at the socket PATH in the sandbox, and hands it to the host.
A program of the sandbox asks there as the programs of jobs ask the agent of their node
(`functions/state/asking.py`). The host checks each question, and asks the agent itself, so the
sandbox has no token, no address and no other socket. Values that a sandbox writes are JSON: a
pickle would run code of the sandbox in who reads it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from base64 import b64decode
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence
    from typing import Any

PATH = "/tmp/.cavvy-state"  # in the sandbox, which has a folder of its own there
KINDS = ("dict", "queue")
_MOST_LINE = 8 << 20  # bytes; a request has at most 3 MiB, with quotes written twice
_MOST_OPEN = 4  # connections of a sandbox at the same time, each with one question
_MOST_NAME = 64  # letters of the ID of a question
_REFUSED, _WRONG, _UNREACHABLE = 403, 422, 503
_HINT = (
    'the program that makes the sandbox names them: Sandbox.create(dicts=["..."], queues=["..."])'
)


class WrongQuestion(Exception):
    """Raised for a question that is not passed on: its ID, the status, and a sentence."""

    def __init__(self, name: str, status: int, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.name, self.status, self.hint = name, status, hint


class StateGate:
    """The way of one sandbox. `names` are those that it may use, of each kind."""

    def __init__(self, agent: str, names: Mapping[str, Sequence[str]]) -> None:
        self._agent, self._names = agent, names
        self._open: set[asyncio.Task[object]] = set()

    async def start(self, listener: socket.socket) -> asyncio.Server:
        """Accept connections of a listening socket."""
        return await asyncio.start_unix_server(self._serve, sock=listener, limit=_MOST_LINE)

    def close(self) -> None:
        for task in list(self._open):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        there: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            if len(self._open) > _MOST_OPEN:
                return
            while line := await reader.readline():
                name = ""
                try:
                    name, asked = read_question(line, self._names)
                    if there is None:
                        there = await asyncio.open_unix_connection(self._agent, limit=_MOST_LINE)
                    answer = await _ask(*there, asked)
                except WrongQuestion as error:
                    name, said = error.name, {"message": str(error), "hint": error.hint}
                    answer = {"status": error.status, "body": said}
                except OSError as error:
                    there = None
                    text = f"the agent of the node: {error}"
                    answer = {"status": _UNREACHABLE, "body": {"message": text}}
                writer.write(json.dumps({"answer": {**answer, "id": name}}).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):  # a line that is too long, or the program is gone
            return
        finally:
            self._open.discard(task)
            writer.close()
            if there is not None:
                there[1].close()


def read_question(line: bytes, names: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, Any]]:
    """Return the ID of a question of a sandbox, and what is asked of the agent. Raises
    WrongQuestion."""
    try:
        ask = json.loads(line)["ask"]
        name, place, body = ask["id"], ask["to"], json.loads(ask["body"])
        if not isinstance(name, str) or len(name) > _MOST_NAME or not isinstance(body, dict):
            raise ValueError(name)
    except (ValueError, LookupError, TypeError, RecursionError):
        raise WrongQuestion("", _WRONG, "this is no question to a dict or a queue") from None
    room, _, kind = place.partition("/") if isinstance(place, str) else ("", "", "")
    if room != "state" or kind not in KINDS:
        raise WrongQuestion(name, _REFUSED, "a sandbox reaches dicts and queues only", _HINT)
    wanted = body.get("name")
    if not isinstance(wanted, str) or wanted not in names.get(kind, ()):
        text = f"this sandbox may not use the {kind} {str(wanted)[:_MOST_NAME]}"
        raise WrongQuestion(name, _REFUSED, text, _HINT)
    data = body.get("data", [])
    if not isinstance(data, list) or not all(map(_is_json, data)):
        raise WrongQuestion(
            name,
            _WRONG,
            "what a sandbox writes into a dict or a queue must be JSON",
            f'use cavvy.{kind.capitalize()}("{wanted}", trust=False), here and where it is read',
        )
    return name, {"to": f"state/{kind}", "body": json.dumps(body)}


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[str, Any]
) -> dict[str, Any]:
    """Return the answer of the agent. Raises OSError."""
    name = secrets.token_hex(6)
    line = json.dumps({"ask": {**asked, "id": name, "lane": name}})
    writer.write(line.encode() + b"\n")
    await writer.drain()
    while found := await reader.readline():
        if not found.startswith(b'{"answer"'):
            continue
        answer: dict[str, Any] = json.loads(found)["answer"]
        if answer["id"] == name:
            return {"status": answer["status"], "body": answer["body"]}
    raise ConnectionResetError("it has closed the connection")


def _is_json(text: object) -> bool:
    with suppress(ValueError, RecursionError, TypeError):
        json.loads(b64decode(text, validate=True).decode())  # type: ignore[arg-type]  # others raise
        return True
    return False


def make_state_variables(client: str) -> dict[str, str]:
    """Return the variables by which `cavvy.Dict` and `cavvy.Queue` find the socket, and Python the
    module in the folder `client`."""
    return {"CAVVY_NOTICE": PATH, "CAVVY_JOB": "sandbox", "PYTHONPATH": client}


def find_agent() -> str:
    """Return the socket of the node's agent, or "" outside of a job."""
    return os.environ.get("CAVVY_NOTICE", "") if "CAVVY_JOB" in os.environ else ""
