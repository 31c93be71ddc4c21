"""Gathers the reports that only tell figures, so that a report needs no row of its own: the server
keeps them in memory, and writes those of many agents in one transaction.

For example, an agent reports its telemetry each 10 s. The server checks the report against what it
knows of the rank, answers that the message was taken, and writes it up to two seconds later,
together with the messages of all other agents. The agent keeps a message until the server says that
it is stored, and sends it again if the server has ended in between. So a message is lost only if
the server and the agent's disk are lost in the same two seconds.

What is known of a rank is the state of its rows when they were last read. They are read again after
a change on this server, after a signal of another server, and each time that figures of the rank
are written, so a change whose signal was lost is noticed soon after the next report.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta

from cavvy.control.agents.pauses import PAUSE_MOST, FigurePauses
from cavvy.domain.jobs import Attempt, AttemptPhase, JobRecord, Node, NodePhase
from cavvy.domain.messages import AgentMessage, MessageKind
from cavvy.domain.values import Struct, field
from cavvy.store.base import AtomicWrite, RankReading

QUIET = frozenset(
    {MessageKind.PROGRESS, MessageKind.TELEMETRY, MessageKind.MINUTE, MessageKind.POINTS}
)
# How long what is known of a rank is used: longer than the time between two reports, since each
# report causes the rows to be read again.
_FRESH = timedelta(seconds=20)  # while several servers write
_FRESH_ALONE = PAUSE_MOST + timedelta(seconds=15)  # while no other server writes
# Few agents are written at once, so that users see new figures immediately. With 200 agents or
# more, two seconds of their reports are written together.
_WRITE_PAUSE_EACH = timedelta(milliseconds=10)
_WRITE_PAUSE_MOST = timedelta(seconds=2)
_MOST_EACH = 32  # messages of a rank that wait; an agent sends about two in a second
_MOST = 20_000  # messages that wait, of all ranks
_TOUCHED = 10_000  # changes that are remembered until the reads that were under way have ended
_FORGETS = timedelta(minutes=1)  # pause between two looks for ranks to drop
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class KnownRank(Struct, kw_only=True):
    """What is known of a rank that has an agent, and its messages that wait to be written."""

    attempt: Attempt
    job: JobRecord
    node: Node
    fresh_until: datetime = _NEVER
    taken: int = 0  # number of the last message that was taken
    waiting: list[AgentMessage] = field(default_factory=list)
    sent_at: datetime | None = None  # by the node's clock, of the last report that was taken
    heard_at: datetime = _NEVER

    @property
    def key(self) -> tuple[str, int]:
        """The attempt's ID and the rank."""
        return self.attempt.id, self.node.rank

    def is_still(self, row: RankReading) -> bool:
        """Whether the job and the attempt are as they were read."""
        known = self.attempt.version, self.job.version
        return known == (row.attempt_version, row.job_version)


class GatheredReports:
    """The ranks whose agents talk to this server."""

    def __init__(self) -> None:
        self._ranks: dict[str, dict[int, KnownRank]] = {}  # by gang
        self._gangs: dict[str, set[str]] = {}  # by job
        self._due: dict[tuple[str, int], KnownRank] = {}
        self._waiting = self.agents = 0
        # When a gang or a job was last changed, or the version of a node, by its key; the oldest
        # are dropped, and count as changed at `_floor`.
        self._touched: dict[object, int] = {}
        self._count = self._floor = 0
        self._pauses = FigurePauses()
        self._forgot_at = _NEVER
        # the write of gathered messages that is under way, whose changes are known
        self.writing: AtomicWrite | None = None
        self.is_alone: Callable[[], bool] = lambda: True  # whether no other server writes

    @property
    def pause(self) -> timedelta:
        """How long messages wait for those of other agents."""
        return min(_WRITE_PAUSE_MOST, self.agents * _WRITE_PAUSE_EACH)

    def find_pause(self, job: JobRecord, node: Node, now: datetime) -> timedelta | None:
        """Return how long the next figures of the node may wait until they are reported."""
        return self._pauses.find(job, node, self.agents, now, alone=self.is_alone())

    def look_at(self, job_id: str, ranks: Iterable[int], now: datetime) -> Sequence[str]:
        """Let figures of these ranks of a job not wait for a minute. Return the gangs of the job if
        its agents do not know this yet."""
        gangs = self._gangs.get(job_id, ())
        return sorted(gangs) if gangs and self._pauses.look_at(job_id, ranks, now) else ()

    def is_looked_at(self, gang: str, rank: int, now: datetime) -> bool:
        """Return whether a user has looked at figures of the rank a moment ago."""
        known = self._ranks.get(gang, {}).get(rank)
        return known is not None and self._pauses.is_looked_at(known.job.id, rank, now)

    @property
    def moment(self) -> int:
        """A number to pass to `learn`, taken before the rows are read."""
        return self._count

    def find(self, gang: str, rank: int, now: datetime) -> KnownRank | None:
        """Return what is known of the rank, or None if its rows must be read."""
        known = self._ranks.get(gang, {}).get(rank)
        return known if known is not None and now < known.fresh_until else None

    def learn(
        self, moment: int, attempt: Attempt, job: JobRecord, node: Node, now: datetime
    ) -> None:
        """Remember rows that were read after `moment`."""
        if node.claim is None or attempt.phase is AttemptPhase.ENDED:
            return
        known = self._ranks.get(attempt.gang, {}).get(node.rank)
        if known is not None and (known.attempt.id, known.node.claim) != (attempt.id, node.claim):
            self.forget(known)  # other work has taken the gang over
            known = None
        if known is None:
            known = KnownRank(attempt=attempt, job=job, node=node)
            self._ranks.setdefault(attempt.gang, {})[node.rank] = known
            self.agents += 1
            self._gangs.setdefault(job.id, set()).add(attempt.gang)
        known.attempt, known.job = attempt, job
        self.stored(known, node)
        touched = [self._touched.get(each, self._floor) for each in (attempt.gang, job.id)]
        version = self._touched.get((attempt.id, node.rank), 0)
        if max(touched) <= moment and version <= node.version:
            known.fresh_until = now + (_FRESH_ALONE if self.is_alone() else _FRESH)

    def take(
        self,
        known: KnownRank,
        messages: Sequence[AgentMessage],
        sent_at: datetime | None,
        now: datetime,
    ) -> bool:
        """Keep the messages until they are written. Return False if they must be applied now."""
        judged = known.job.task.stop_early is not None and known.node.rank == 0
        if judged or known.node.phase is NodePhase.EXITED or not messages:
            return False
        if len(known.waiting) + len(messages) > _MOST_EACH or self._waiting > _MOST:
            return False
        for place, message in enumerate(messages, known.taken + 1):
            if message.seq != place or message.fault or message.kind not in QUIET:
                return False
        known.waiting += messages
        known.taken += len(messages)
        known.sent_at, known.heard_at = sent_at, now
        self._waiting += len(messages)
        self._due[known.key] = known
        return True

    def withdraw(self, gang: str, rank: int) -> Sequence[AgentMessage]:
        """Return the messages of the rank that wait, and remove them: the caller writes them, or
        else the agent sends them again, since its next messages do not follow what is stored.
        """
        known = self._ranks.get(gang, {}).get(rank)
        if known is None:
            return ()
        waiting, known.fresh_until = known.waiting, _NEVER
        self._drop_waiting(known)
        return waiting

    def list_due(self) -> Sequence[KnownRank]:
        """Return the ranks with messages that wait."""
        return [*self._due.values()]

    def stored(self, known: KnownRank, node: Node) -> None:
        """Remember the row of the node, in which some or all messages are stored."""
        before = len(known.waiting)
        known.node = node
        known.waiting = [each for each in known.waiting if each.seq > node.last_seq]
        known.taken = known.waiting[-1].seq if known.waiting else node.last_seq
        self._waiting += len(known.waiting) - before
        if not known.waiting:
            self._due.pop(known.key, None)

    def refresh(self, known: KnownRank, row: RankReading, moment: int, now: datetime) -> None:
        """Note that the row was read again after `moment`."""
        known.fresh_until = _NEVER
        if known.is_still(row):
            self.learn(moment, known.attempt, known.job, known.node, now)

    def forget(self, known: KnownRank) -> None:
        """Drop a rank that has no row any more, or another agent."""
        self._drop_waiting(known)
        gang = known.attempt.gang
        ranks = self._ranks.get(gang, {})
        if ranks.get(known.node.rank) is known:
            del ranks[known.node.rank]
            self.agents -= 1
        if not ranks:
            self._ranks.pop(gang, None)
            gangs = self._gangs.get(known.job.id, set())
            gangs.discard(gang)
            if not gangs:
                self._gangs.pop(known.job.id, None)

    def forget_gang(self, gang: str) -> None:
        """Drop the ranks of a gang whose attempt has ended, after their messages are written."""
        self.touch(gang)
        for known in [*self._ranks.get(gang, {}).values()]:
            if not known.waiting:
                self.forget(known)

    def forget_old(self, now: datetime) -> None:
        """Drop the ranks whose agents do not report here any more, once a minute."""
        if now - self._forgot_at < _FORGETS:
            return
        self._forgot_at, old = now, now - 2 * _FRESH_ALONE
        for ranks in [*self._ranks.values()]:
            for known in [*ranks.values()]:
                if known.fresh_until < old and not known.waiting:
                    self.forget(known)

    def touch(self, gang: str) -> None:
        """Read the rows of this gang again, because something has changed."""
        self._note(gang)
        for known in self._ranks.get(gang, {}).values():
            known.fresh_until = _NEVER

    def note(self, changes: AtomicWrite) -> None:
        """Note what was written, so that no older row is used any more."""
        if changes is self.writing:
            return
        jobs = {each.id for each in changes.jobs} | {each.job_id for each in changes.attempts}
        for job_id in jobs:
            self._note(job_id)
            self._make_stale(self._gangs.get(job_id, ()), None)
        for node in changes.nodes:
            self._put((node.attempt_id, node.rank), node.version + 1)
            job_id = node.attempt_id.rpartition("-")[0]
            self._make_stale(self._gangs.get(job_id, ()), node)

    def _make_stale(self, gangs: Iterable[str], node: Node | None) -> None:
        for gang in gangs:
            ranks = self._ranks.get(gang, {})
            chosen = ranks.values() if node is None else [ranks.get(node.rank)]
            for known in chosen:
                if known is not None and (node is None or known.attempt.id == node.attempt_id):
                    known.fresh_until = _NEVER

    def _note(self, key: str) -> None:
        self._count += 1
        self._put(key, self._count)

    def _put(self, key: object, value: int) -> None:
        self._touched.pop(key, None)
        self._touched[key] = value
        if len(self._touched) > _TOUCHED:
            oldest = next(iter(self._touched))
            dropped = self._touched.pop(oldest)
            if isinstance(oldest, str):
                self._floor = max(self._floor, dropped)

    def _drop_waiting(self, known: KnownRank) -> None:
        self._waiting -= len(known.waiting)
        known.waiting = []
        self._due.pop(known.key, None)
