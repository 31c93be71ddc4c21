"""How a node can learn that its provider will reclaim it: data that a provider declares and its
agents use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeTokenSource:
    """A value to fetch first and send as the header `header`; fetched again after half of its
    `life`.
    """

    url: str
    header: str
    method: str = "PUT"
    headers: Mapping[str, str] = field(default_factory=dict)
    life: timedelta = timedelta(hours=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeHold:
    """A request that the server answers when the answer changes: `query` is appended, with `{tag}`
    replaced by the last ETag.
    """

    query: str
    first_tag: str  # before any answer
    longest: timedelta  # seconds that the server holds a request


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeNode:
    """For lists of events about many nodes: `url` returns this node's name, which the event's list
    `field_name` must contain.
    """

    url: str
    field_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeReply:
    """Sent when the work has ended and its checkpoint is durable, so that the provider need not
    wait for its own limit.

    `{id}` in `body` stands for the event's field `id_field`.
    """

    url: str
    body: str
    id_field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSource:
    """One address on the node, polled over plain HTTP. 404, 410, 204 and an empty answer mean that
    there is no notice.

    The answer is a text, an object, or, with `list_field`, an object with a list of events. An
    event counts if every field in `match` has one of its values ("" stands for a whole text
    answer). Times are ISO 8601 or as in HTTP headers.
    """

    source: str  # for people, such as "AWS"
    url: str  # http://host[:port]/path, preferably with an IP address
    headers: Mapping[str, str] = field(default_factory=dict)
    token: NoticeTokenSource | None = None
    every: timedelta = timedelta(seconds=5)
    hold: NoticeHold | None = None
    list_field: str | None = None
    match: Mapping[str, Sequence[str]] = field(default_factory=dict)
    node: NoticeNode | None = None
    time_field: str | None = None  # time of the reclaim; if empty: `within` after the first sight
    within: timedelta = timedelta(seconds=30)
    advice: bool = (
        False  # the node is at risk: the task is notified, so that it can save; the work continues
    )
    reply: NoticeReply | None = None


def make_notice_fields(sources: Sequence[NoticeSource]) -> list[dict[str, object]]:
    """The value of `notices` in an agent's configuration, documented in
    docs/concepts/agent-protocol.md.
    """
    return [_without_none(_fields(each)) for each in sources]


def _fields(each: NoticeSource) -> dict[str, object]:
    token, hold, node, reply = each.token, each.hold, each.node, each.reply
    return {
        "source": each.source,
        "url": each.url,
        "headers": dict(each.headers),
        "token": token
        and {
            "url": token.url,
            "header": token.header,
            "method": token.method,
            "headers": dict(token.headers),
            "life_s": token.life.total_seconds(),
        },
        "every_s": each.every.total_seconds(),
        "hold": hold
        and {
            "query": hold.query,
            "first_tag": hold.first_tag,
            "longest_s": hold.longest.total_seconds(),
        },
        "list": each.list_field,
        "match": {name: list(values) for name, values in each.match.items()},
        "node": node and {"url": node.url, "field": node.field_name},
        "time": each.time_field,
        "within_s": each.within.total_seconds(),
        "advice": each.advice,
        "reply": reply and {"url": reply.url, "body": reply.body, "id": reply.id_field},
    }


def _without_none(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
