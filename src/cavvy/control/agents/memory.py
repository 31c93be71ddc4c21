"""The facts that this server has about agents: when each agent last sent a request, when the agent
last requested work, and until when the budget pays for the agent's lease. If there are several
servers, they exchange their facts about agents.
"""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta

from cavvy.domain.values import replace
from cavvy.store.channel import GANG, AgentContact

_KEPT = timedelta(days=1)
# The value of `paid_until` when nothing limits the gang any more. The value is not None, because
# other servers and the database must replace the former time.
_NO_LIMIT = datetime(9999, 1, 1, tzinfo=UTC)


class AgentMemory:
    """Stores facts about agents, keyed by attempt and rank."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], AgentContact] = {}
        self._news: set[tuple[str, int]] = set()
        self.shares = False  # whether `take_news` is called

    def hear(self, attempt_id: str, rank: int, at: datetime, *, asks: bool = False) -> None:
        """Record a request of an agent. `asks` is set if the agent requested its next work."""
        known = self._get(attempt_id, rank)
        changed = replace(known, heard_at=at, asked_at=at if asks else known.asked_at, server="")
        self._put(changed)

    def afford(self, attempt_id: str, until: datetime | None) -> None:
        """Record the time until which the budget pays; None removes the limit."""
        known = self._get(attempt_id, GANG)
        if until is None and known.paid_until is not None:
            until = _NO_LIMIT
        if known.paid_until != until:
            self._put(replace(known, paid_until=until))

    def heard_at(self, attempt_id: str, rank: int) -> datetime | None:
        return self._get(attempt_id, rank).heard_at

    def asked_at(self, attempt_id: str, rank: int) -> datetime | None:
        return self._get(attempt_id, rank).asked_at

    def paid_until(self, attempt_id: str) -> datetime | None:
        until = self._get(attempt_id, GANG).paid_until
        return None if until == _NO_LIMIT else until

    def server_of(self, attempt_id: str, rank: int) -> str:
        """Return the ID of the other server to which the agent is connected, or "" if the agent is
        connected to this server.
        """
        return self._get(attempt_id, rank).server

    def forget(self, attempt_id: str, ranks: Collection[int]) -> None:
        for rank in (GANG, *ranks):
            self._known.pop((attempt_id, rank), None)
            self._news.discard((attempt_id, rank))

    def take_news(self) -> Sequence[AgentContact]:
        """Return the facts that have changed on this server since the last call."""
        news, self._news = self._news, set()
        return [self._known[key] for key in news if key in self._known]

    def give_back(self, news: Sequence[AgentContact]) -> None:
        """Mark these facts as unsent again, because sending them failed."""
        self._news |= {(each.attempt_id, each.rank) for each in news}

    def learn(self, contacts: Sequence[AgentContact]) -> None:
        """Add the facts that other servers have sent, and drop facts that are too old."""
        for each in contacts:
            mine = self._get(each.attempt_id, each.rank)
            newer = _latest(each.heard_at, mine.heard_at) != mine.heard_at
            self._known[each.attempt_id, each.rank] = replace(
                mine,
                heard_at=_latest(each.heard_at, mine.heard_at),
                asked_at=_latest(each.asked_at, mine.asked_at),
                paid_until=mine.paid_until if each.paid_until is None else each.paid_until,
                server=each.server if newer else mine.server,
            )
        self._drop_old()

    def _drop_old(self) -> None:
        """Drop agents that other servers have dropped, because these agents' attempts have
        ended."""
        newest = max(
            (each.heard_at for each in self._known.values() if each.heard_at), default=None
        )
        if newest is None or len(self._known) < 10_000:
            return
        for key, each in list(self._known.items()):
            if each.heard_at is not None and each.heard_at < newest - _KEPT:
                del self._known[key]

    def _get(self, attempt_id: str, rank: int) -> AgentContact:
        known = self._known.get((attempt_id, rank))
        return known or AgentContact(attempt_id=attempt_id, rank=rank)

    def _put(self, contact: AgentContact) -> None:
        key = contact.attempt_id, contact.rank
        self._known[key] = contact
        if self.shares:
            self._news.add(key)


def _latest(one: datetime | None, other: datetime | None) -> datetime | None:
    if one is None or other is None:
        return one or other
    return max(one, other)
