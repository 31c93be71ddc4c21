"""Request and response types of the routes for dicts and queues, and their limits."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, segment
from cavvy.client.wire import Answer, Ask

Kind = Literal["dict", "queue"]
MOST_VALUE = 1 << 20  # bytes of a value
MOST_KEY = 1024  # characters of a key of a dict, as JSON
MOST_PART = 64  # characters of the name of a partition
MOST_TOGETHER = 1000  # entries of a request and of an answer
MOST_BODY = 3 << 20  # bytes of a request, whose values are written in base64
WAIT_S = 20.0  # for which a request waits for an item

RequestId = Annotated[str, Meta(max_length=64)]
EntryKey = Annotated[str, Meta(min_length=1, max_length=MOST_KEY)]
PartName = Annotated[str, Meta(max_length=MOST_PART)]
_Count = Annotated[int, Meta(ge=1, le=MOST_TOGETHER)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class DictAsk(Ask, frozen=True, kw_only=True):
    """A request to a dict. Keys are texts of JSON; values are bytes that the server does not read.

    `get` answers the entries of `keys` that exist, without their values unless `values` is set;
    `put` sets them, with `if_new` only those that do not exist; `pop` removes and answers them;
    `list` answers those behind the number `after`; `len` counts, and `clear` removes all. A request
    that is sent again with the same `id` is answered the same. `seen` is an earlier `id` whose
    answer has arrived.
    """

    op: Literal["get", "put", "pop", "list", "len", "clear"]
    id: RequestId = ""
    seen: RequestId = ""
    keys: Annotated[Sequence[EntryKey], Meta(max_length=MOST_TOGETHER)] = ()
    data: Annotated[Sequence[bytes], Meta(max_length=MOST_TOGETHER)] = ()
    if_new: bool = False
    values: bool = True
    after: _Number = 0
    most: _Count = MOST_TOGETHER


class DictEntry(Answer, frozen=True, kw_only=True):
    """An entry of a dict."""

    key: str
    number: int
    value: bytes = b""


class DictAnswer(Answer, frozen=True, kw_only=True):
    """Entries of a dict. `count` is how many there are, were added or were removed, and `more` says
    that the answer was too long for all."""

    entries: Sequence[DictEntry] = ()
    count: int = 0
    more: bool = False


class QueueAsk(Ask, frozen=True, kw_only=True):
    """A request to a partition of a queue, whose name is `part`.

    `put` adds `data` if all of it has room, and lets the partition expire after `ttl_s`; `get`
    removes and answers at most `most` items; `list` answers those behind the number `after`; `len`
    counts, and `clear` removes, also those of `all` partitions. `put`, `get` and `list` wait for
    `wait_s` until they can. A request that is sent again with the same `id` is answered the same.
    `seen` is an earlier `id` whose answer has arrived.
    """

    op: Literal["put", "get", "list", "len", "clear"]
    id: RequestId = ""
    seen: RequestId = ""
    part: PartName = ""
    all: bool = False
    data: Annotated[Sequence[bytes], Meta(max_length=MOST_TOGETHER)] = ()
    ttl_s: Annotated[float, Meta(ge=1, le=30 * 86400)] = 86400.0
    most: _Count = 1
    after: _Number = 0
    wait_s: Annotated[float, Meta(ge=0, le=WAIT_S)] = 0.0


class QueueItem(Answer, frozen=True, kw_only=True):
    """An item of a queue."""

    number: int
    value: bytes


class QueueAnswer(Answer, frozen=True, kw_only=True):
    """Items of a queue. `count` is how many there are or were removed. `full` says that nothing was
    added, since the partition has no room."""

    items: Sequence[QueueItem] = ()
    count: int = 0
    full: bool = False


class StateView(Answer, frozen=True, kw_only=True):
    """A dict or a queue: how many entries and bytes it has."""

    name: str
    kind: Kind
    entries: int
    bytes: int
    user: str
    created_at: datetime
    changed_at: datetime


def list_objects(client: ApiClient, project: str, kind: Kind) -> list[StateView]:
    return client.ask(f"{project_path(project)}/{kind}s", list[StateView])


def delete_object(client: ApiClient, project: str, kind: Kind, name: str) -> None:
    """Raises ApiError `state-not-found`."""
    client.call("DELETE", f"{project_path(project)}/{kind}s/{segment(kind, name)}", retry=False)
