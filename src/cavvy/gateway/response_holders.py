"""Remembers which replica has made a response of OpenAI's Responses API, and so holds it.

Engines keep responses in the memory of one replica. A request that continues a response
(`previous_response_id`), or reads, cancels or deletes it, is therefore sent to this replica. The
gateway knows the responses that it has passed on since it started. If it does not know one, or its
replica has ended, any replica gets the request, and the engine says that it has no such response.
"""

import re
from collections import OrderedDict

_KNOWN_MAX = 20_000  # responses of a service; the oldest are forgotten
_BEGIN = 4096  # bytes of an answer in which its ID is looked for
_ID = re.compile(rb'"id"\s{0,8}:\s{0,8}"(resp_[\w.-]{1,128})"')
_ID_LONGEST = 160  # bytes of a match
# further segments after the ID are `cancel` and `input_items`
PATH = re.compile(rb"/v1/responses/(?!(?:compact|input_tokens)(?:/|\?|$))([^/?]+)(?:/\w+)?/?")


def read_response_id(target: bytes) -> str:
    """Return the ID of the response that a target names, or "" if it names none."""
    found = PATH.match(target) if b"/responses/" in target else None
    return found[1].decode("latin-1") if found else ""


class ResponseHolders:
    """The replicas that hold responses of one service, by the IDs of the responses."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def add(self, response_id: str, replica: str) -> None:
        self._replicas[response_id] = replica
        self._replicas.move_to_end(response_id)
        if len(self._replicas) > _KNOWN_MAX:
            self._replicas.popitem(last=False)

    def find(self, response_id: str) -> str | None:
        """Return the replica that has made a response, or None if this is not known."""
        return self._replicas.get(response_id)


class ResponseIdReader:
    """Finds the ID of a response in the beginning of its answer or stream."""

    __slots__ = ("_rest", "_seen")

    def __init__(self) -> None:
        self._rest, self._seen = b"", 0

    def feed(self, data: bytes) -> str | None:
        """Return the ID once it has passed, "" if none will, and None while it may follow."""
        found = _ID.search(self._rest + data)
        if found:
            return found[1].decode()
        self._seen += len(data)
        self._rest = (self._rest + data)[-_ID_LONGEST:]
        return None if self._seen < _BEGIN else ""
