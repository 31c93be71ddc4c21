"""Stand-ins that answer from a recording of `cavvy check NAME --live`.

Each recorded write starts a new part of the recording. A read receives the next reply that the
current part of the recording contains for this read; if no such reply is left, the read receives
its most recent reply again. Each write must match the next recorded write.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.contract.rest_stand_in import RestRequest, RestServer, RestStandIn
from cavvy.providers.vm.cloud import CloudFault

Recorded = Mapping[str, Any]
_NAME = re.compile(r"\bcv-[a-z0-9-]+")  # matches the name of a machine


class ReplayedCalls:
    """Plays the calls of a recording, and tracks which calls have been played."""

    def __init__(self, calls: Sequence[Recorded]) -> None:
        self._calls = calls
        self._at = 0  # the first call after the last write that was played
        self._played: set[int] = set()
        self._last: dict[str, Recorded] = {}

    def play(self, call: str) -> Recorded:
        """Return the recorded call that matches `call`, with the recorded outcome."""
        numbers = range(self._at, len(self._calls))
        write = next((n for n in numbers if self._calls[n]["writes"]), len(self._calls))
        if write < len(self._calls) and self._calls[write]["call"] == call:
            self._at = write + 1
            return self._calls[write]
        for number in range(self._at, write):
            if number not in self._played and self._calls[number]["call"] == call:
                self._played.add(number)
                self._last[call] = self._calls[number]
                break
        assert call in self._last, f"at this point, the recording has no {call}"
        return self._last[call]

    def left(self) -> list[str]:
        """Return the recorded writes that the provider has not sent."""
        return [each["call"] for each in self._calls[self._at :] if each["writes"]]


class ReplayedRest(RestStandIn):
    """A stand-in for a REST API that answers from a recording. In the recorded replies, the names
    of machines are replaced by the names in the new requests.
    """

    def __init__(self, cloud: MemoryCloud, server: RestServer, recording: Recorded) -> None:
        super().__init__(cloud, server)
        self.calls = ReplayedCalls(recording["calls"])
        self._names: dict[str, str] = {}  # recorded: now

    def authorize(self, request: RestRequest) -> None:
        return

    def describe(self, fault: CloudFault) -> object:
        return {}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        path = "/" + request.target.split("/", 2)[2]
        found = self.calls.play(f"{request.method} {path}")
        recorded, now = (_NAME.findall(json.dumps(each)) for each in (found["body"], request.body))
        self._names |= dict(zip(recorded, now, strict=True))
        text = json.dumps(found["reply"]).replace("ENDPOINT", self.url)
        for name, current in self._names.items():
            text = text.replace(name, current)
        return found["status"], json.loads(text)
