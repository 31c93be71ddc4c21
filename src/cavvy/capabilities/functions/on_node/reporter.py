"""Tells the control plane what a program of a job does, through the agent of the node. It imports
only the standard library and files that do.
"""

import os
import queue
import threading
from typing import Any

_LEAVE_S = 2.0
_MOST_WAITING = 100  # reports, while no server answers


class NodeReporter:
    """Sends reports to `POST /agent/v1/asks/ROOM/report`, from a thread of its own, one after the
    other."""

    def __init__(self, path: str, room: str) -> None:
        self._path, self._room = path, room
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True, name="cavvy-reports")
        self._thread.start()

    def put(self, report: dict[str, Any]) -> None:
        if self._reports.qsize() < _MOST_WAITING:
            self._reports.put(report)

    def close(self) -> None:
        """Send what is left, if the server answers soon."""
        self._reports.put(None)
        self._thread.join(_LEAVE_S)

    def _send(self) -> None:
        asker = None
        while (report := self._reports.get()) is not None:
            from cavvy.capabilities.functions.state.asking import NodeAsker  # the first time
            from cavvy.sdk.errors import CavvyError

            asker = asker or NodeAsker(self._path, self._room)
            try:
                asker.ask("report", "", report)
            except CavvyError as error:
                if error.code in ("not-found", "wrong-method"):  # a server without the page
                    return


def find_reporter(room: str) -> NodeReporter | None:
    """Return what tells the control plane, or None outside of a job."""
    path = os.environ.get("CAVVY_NOTICE")
    return NodeReporter(path, room) if path and "CAVVY_JOB" in os.environ else None
