"""Passes what a program of the work asks on to the control plane, and the answer back.

The program writes {"ask": {"id": ID, "to": "NAME/WHAT", "body": JSON}} to the socket
`$CAVVY_NOTICE`, where JSON is a text, and reads {"answer": {"id": ID, "status": NUMBER, "body":
{...}}}. The route is `POST /agent/v1/asks/NAME/WHAT` with the agent's own token, which no program
of the work has. Asks are sent one after the other; those with another `lane`, a name that a program
chooses, do not wait for each other.
"""

from __future__ import annotations

import json
import re
from collections import deque

from .config import BadConfig
from .control_client import TIMEOUT_S, make_connection
from .wire import BackOff

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import ConfigFields
    from .control_client import ControlPlaneClient
    from .wire import RequestConnection

    Answer = Callable[[dict[str, object]], None]

MOST_WAITING = 64
TRIES = 6  # with delays from 0.5 s to 8 s, so a server that is restarted is asked again
_PLACE = re.compile(r"[a-z0-9-]{1,32}/[a-z0-9-]{1,32}")
UNREACHABLE = 503


class TaskAsks:
    """What all programs of the work ask."""

    def __init__(self, link: ControlPlaneClient) -> None:
        self._link = link
        self._lanes: dict[str, AskLane] = {}

    def add(self, ask: ConfigFields, answer: Answer) -> None:
        """Ask what a program has sent. Raises BadConfig."""
        place, name, body = (ask.read(each, "str") for each in ("to", "id", "body"))
        lane = ask.read("lane", "str", "")
        if not _PLACE.fullmatch(place) or len(name) > 64 or len(lane) > 64:
            raise BadConfig("`ask` has no `to` such as slurm/submit, or a long `id` or `lane`")
        if sum(len(each.waiting) for each in self._lanes.values()) >= MOST_WAITING:
            answer(_say(name, 429, "too many programs ask at once"))
            return
        if lane not in self._lanes:
            self._lanes[lane] = AskLane(self._link, lambda: self._lanes.pop(lane, None))
        self._lanes[lane].add(WaitingAsk(place, name, body.encode(), answer))

    def close(self) -> None:
        for each in list(self._lanes.values()):
            each.close()
        self._lanes.clear()


class WaitingAsk:
    """What a program has asked, and the function that sends it the answer."""

    __slots__ = ("answer", "body", "name", "place")

    def __init__(self, place: str, name: str, body: bytes, answer: Answer) -> None:
        self.place, self.name, self.body, self.answer = place, name, body, answer


class AskLane:
    """Asks one after the other, and calls `over` when none is left."""

    def __init__(self, link: ControlPlaneClient, over: Callable[[], object]) -> None:
        self._link, self._over = link, over
        self.waiting: deque[WaitingAsk] = deque()
        self._connection: RequestConnection | None = None

    def add(self, ask: WaitingAsk) -> None:
        self.waiting.append(ask)
        self._next()

    def close(self) -> None:
        self.waiting.clear()
        if self._connection is not None:
            self._connection.close()

    def _next(self) -> None:
        if self.waiting and self._connection is None:
            self._connection = make_connection(
                self._link.loop, self._link.address, self._link.headers
            )
            self._send(BackOff(0.5, 8.0), TRIES)
        elif not self.waiting:
            self._over()

    def _send(self, delay: BackOff, left: int) -> None:
        connection = self._connection
        if connection is None or not self.waiting:
            return
        ask = self.waiting[0]

        def replied(status: int, data: bytes) -> None:
            try:
                found = json.loads(data)
            except ValueError:
                found = {"message": f"the server answered {status}"}
            self._end(ask, {"answer": {"id": ask.name, "status": status, "body": found}})

        def failed(reason: str) -> None:
            if left > 1:
                self._link.loop.after(delay.next(), lambda: self._send(delay, left - 1))
            else:
                self._end(ask, _say(ask.name, UNREACHABLE, f"the server is not reached: {reason}"))

        path = f"/agent/v1/asks/{ask.place}{self._link.query}"
        connection.request(
            "POST", path, ask.body, timeout_s=TIMEOUT_S, replied=replied, failed=failed
        )

    def _end(self, ask: WaitingAsk, line: dict[str, object]) -> None:
        self.waiting.popleft()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        ask.answer(line)
        self._next()


def _say(name: str, status: int, message: str) -> dict[str, object]:
    return {"answer": {"id": name, "status": status, "body": {"message": message}}}
