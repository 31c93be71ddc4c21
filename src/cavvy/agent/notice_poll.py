"""Polls the provider's addresses on the node for notices that the node will be reclaimed. The
agent's configuration lists the addresses."""

from __future__ import annotations

import json
import time

from .control_client import complain
from .wire import BackOff, LoopConnection, ServerAddress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from .documents import NoticeAddress
    from .loop import EventLoop

    Event = dict[str, object]
    Answered = Callable[[int, bytes], None]

    class NoticeListener(Protocol):
        """Callbacks that report the results of the polls to the agent."""

        def noticed(self, seconds: float, source: str, reason: str) -> None: ...
        def advised(self, source: str, reason: str) -> None: ...


TIMEOUT_S = 5.0
SHORT_HOLD_S = 1.0  # pause between long-poll requests that were answered at once
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0
NOTHING = (204, 404, 410)


class NoticePoll:
    """Polls one source of notices. The first requests fetch a token and the node's name, if the
    source requires them.
    """

    def __init__(self, loop: EventLoop, notice: NoticeAddress, listener: NoticeListener) -> None:
        self._loop = loop
        self._notice = notice
        self._listener = listener
        self._token = ""
        self._token_until = 0.0
        self._node: str | None = None
        self._tag = notice.hold.first_tag if notice.hold else ""
        self._seen: dict[str, float] = {}  # content of an event -> time of its first report
        self._ids: list[str] = []
        self._asked_at = 0.0
        self._delay = BackOff(FIRST_BACKOFF_S, LAST_BACKOFF_S)
        self._timer = loop.after(0, self._next)
        self._asker = NoticeRequest(loop)
        self._replier = NoticeRequest(loop)
        self.replying = False

    def close(self) -> None:
        self._loop.cancel(self._timer)
        self._asker.close()
        self._replier.close()

    def reply(self, done: Callable[[], None]) -> None:
        """POST an acknowledgement of the reported events, then call `done`."""
        reply = self._notice.reply
        if reply is None or not self._ids or self.replying:
            return
        self.replying = True

        def ended(status: int, data: bytes) -> None:
            self.replying = False
            if status not in (200, 202, 204):
                complain(
                    f"{self._notice.source} rejected the acknowledgement of its notice (status "
                    f"{status})"
                )
            done()

        body = reply.body.replace("{id}", self._ids[-1]).encode()
        headers = dict(self._headers(), **{"Content-Type": "application/json"})
        self._replier.ask("POST", reply.url, headers, ended, body)

    def _next(self) -> None:
        notice, now = self._notice, time.monotonic()
        token = notice.token
        if token is not None and now >= self._token_until:
            self._asker.ask(token.method, token.url, token.headers, self._got_token)
            return
        if notice.node is not None and self._node is None:
            self._asker.ask("GET", notice.node.url, self._headers(), self._got_node)
            return
        url, patience = notice.url, TIMEOUT_S
        if notice.hold is not None:
            url += ("&" if "?" in url else "?") + notice.hold.query.replace("{tag}", self._tag)
            patience += notice.hold.longest_s
        self._asked_at = now
        self._asker.ask("GET", url, self._headers(), self._answered, timeout_s=patience)

    def _headers(self) -> dict[str, str]:
        token = self._notice.token
        return dict(self._notice.headers, **({token.header: self._token} if token else {}))

    def _got_token(self, status: int, data: bytes) -> None:
        token = self._notice.token
        if status != 200 or token is None:
            self._failed(f"no token was returned (status {status})")
            return
        self._token = data.decode("latin-1").strip()
        self._token_until = time.monotonic() + token.life_s / 2
        self._next()

    def _got_node(self, status: int, data: bytes) -> None:
        if status != 200:
            self._failed(f"the name of this node was not returned (status {status})")
            return
        self._node = data.decode("utf-8", "replace").strip()
        self._next()

    def _answered(self, status: int, data: bytes) -> None:
        if status == 401 and self._notice.token is not None and self._token:
            self._token, self._token_until = "", 0.0
            self._failed("the token is no longer valid")
            return
        if status != 200 and status not in NOTHING:
            self._failed(f"status {status}")
            return
        self._tag = self._asker.tag or self._tag
        try:
            events = find_events(self._notice, data, self._node) if status == 200 else []
        except ValueError as error:
            self._failed(f"the answer cannot be read: {error}")
            return
        self._delay.reset()
        for event in events:
            self._tell(event)
        if self._notice.hold is None:
            again = self._notice.every_s
        else:
            again = 0.0 if time.monotonic() - self._asked_at >= SHORT_HOLD_S else SHORT_HOLD_S
        self._timer = self._loop.after(again, self._next)

    def _tell(self, event: Event) -> None:
        notice, said = self._notice, json.dumps(event, sort_keys=True)
        if said in self._seen:
            return
        self._seen[said] = time.monotonic()
        if notice.reply is not None:
            self._ids.append(str(event.get(notice.reply.id, "")))
        if notice.advice:
            self._listener.advised(
                notice.source, f"{notice.source} reports that this node is at risk"
            )
            return
        seconds = seconds_left(notice, event, self._asker.date)
        self._listener.noticed(seconds, notice.source, f"{notice.source} is reclaiming the node")

    def _failed(self, reason: str) -> None:
        if self._delay.fresh:
            complain(f"{self._notice.url}: {reason}; trying again")
        self._timer = self._loop.after(self._delay.next(), self._next)


class NoticeRequest:
    """Sends one request at a time to any address. `tag` and `date` are the ETag and Date headers of
    the last answer. The status passed to the callback is 0 if there was no answer.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._base = ""
        self._connection: LoopConnection | None = None
        self.tag = ""
        self.date = ""

    def ask(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        answered: Answered,
        body: bytes = b"",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        scheme, _, rest = url.partition("://")
        host, slash, path = rest.partition("/")
        base = f"{scheme}://{host}"
        if self._connection is None or base != self._base:
            self.close()
            self._base, self._connection = base, LoopConnection(self._loop, ServerAddress(base), "")
        connection = self._connection

        def replied(status: int, data: bytes) -> None:
            self.tag, self.date = connection.said.get("etag", ""), connection.said.get("date", "")
            answered(status, data)

        text = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.request(
            method,
            slash + path,
            body,
            timeout_s=timeout_s,
            replied=replied,
            failed=lambda reason: answered(0, reason.encode()),
            headers=text,
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def find_events(notice: NoticeAddress, data: bytes, node: str | None) -> list[Event]:
    """Return those events in a provider's answer that concern this node. Raises ValueError."""
    text = data.decode("utf-8", "replace").strip()
    if not text:
        return []
    if set(notice.match) == {""}:
        return [{"": text}] if text in notice.match[""] else []
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise ValueError(f"expected an object, found {text[:60]!r}")
    events = [answer] if notice.list is None else answer.get(notice.list)
    if not isinstance(events, list):
        raise ValueError(f"no list {notice.list!r}")
    return [event for event in events if isinstance(event, dict) and concerns(notice, event, node)]


def concerns(notice: NoticeAddress, event: Event, node: str | None) -> bool:
    if any(str(event.get(name)) not in values for name, values in notice.match.items()):
        return False
    if node is None or notice.node is None:
        return True
    nodes = event.get(notice.node.field)
    return isinstance(nodes, list) and node in nodes


def seconds_left(notice: NoticeAddress, event: Event, date: str) -> float:
    """Return the number of seconds until the node is reclaimed. If possible, the current time is
    taken from the response's `date`, because the node's clock may be wrong.
    """
    due = parse_time(str(event.get(notice.time) or "")) if notice.time is not None else None
    if due is None:
        return notice.within_s
    now = parse_time(date)
    return max(0.0, due - (time.time() if now is None else now))


def parse_time(text: str) -> float | None:
    """Convert "2017-09-18T08:22:00Z" or "Mon, 19 Sep 2016 18:29:47 GMT" to seconds since the epoch;
    return None for any other text.
    """
    import calendar
    from email.utils import parsedate_tz

    try:
        if text[4:5] == "-":
            return calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))
        found = parsedate_tz(text)
        return None if found is None else calendar.timegm((*found[:6], 0, 0, 0)) - (found[9] or 0)
    except (ValueError, TypeError, IndexError):
        return None
