"""Describes how a node detects that its provider will reclaim the node. Providers declare these
descriptions, and agents follow the descriptions to detect a reclaim.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from cavvy.domain.values import Struct, field


class NoticeTokenSource(Struct, frozen=True, kw_only=True):
    """A token that agents fetch before they poll, and send in the header `header` of each poll.
    Agents fetch a new token after half of the token's `life`.
    """

    url: str
    header: str
    method: str = "PUT"
    headers: Mapping[str, str] = field(default_factory=dict)
    life: timedelta = timedelta(hours=6)


class NoticeHold(Struct, frozen=True, kw_only=True):
    """A long poll: the server delays its answer until the answer differs from the previous answer.
    `query` is appended to the URL, with `{tag}` replaced by the last ETag.
    """

    query: str
    first_tag: str  # the tag to send in the first request
    longest: timedelta  # how long the server may hold a request before it answers


class NoticeNode(Struct, frozen=True, kw_only=True):
    """Selects this node's events from a list of events for many nodes. A request to `url` returns
    the node's name. An event applies to this node if the list in the event's field `field_name`
    contains the node's name.
    """

    url: str
    field_name: str


class NoticeReply(Struct, frozen=True, kw_only=True):
    """A request that the agent sends once the work has ended and the checkpoint is stored durably.
    The request allows the provider to reclaim the node before the announced time.

    In `body`, `{id}` is replaced by the event's field `id_field`.
    """

    url: str
    body: str
    id_field: str


class NoticeSource(Struct, frozen=True, kw_only=True):
    """One URL that the node polls over plain HTTP. An empty response, or the status 404, 410 or
    204, means that there is no notice.

    The answer is a string, an object, or, if `list_field` is set, an object with a list of events.
    An event is a notice if every field in `match` has one of the values listed for this field. An
    answer that is only a string is a notice if `match[""]` contains the string. Times are in ISO
    8601 or in the form of HTTP headers.
    """

    source: str  # shown to users, such as "AWS"
    url: str  # http://host[:port]/path, preferably with an IP address
    headers: Mapping[str, str] = field(default_factory=dict)
    token: NoticeTokenSource | None = None
    every: timedelta = timedelta(seconds=5)
    hold: NoticeHold | None = None
    list_field: str | None = None
    match: Mapping[str, Sequence[str]] = field(default_factory=dict)
    node: NoticeNode | None = None
    # field with the time of the reclaim; if None, the time is `within` after the event was first
    # seen
    time_field: str | None = None
    within: timedelta = timedelta(seconds=30)
    advice: bool = (
        False  # True: only warns that a reclaim is likely: the task is told to save, and continues
    )
    reply: NoticeReply | None = None


def make_notice_fields(sources: Sequence[NoticeSource]) -> list[dict[str, object]]:
    """Return the value of `notices` in an agent's configuration. The value is documented in
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
