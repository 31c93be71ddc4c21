"""The service that lets agents claim their work, report, and receive orders.

Even if a gang is launched twice by mistake, no work runs twice. Each rank of an attempt is granted
to only one agent, which is identified by its nonce. Messages are numbered, and each message is
applied once. A lost wake-up delays a response by at most one polling interval.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial

from cavvy.agent.documents import PROTOCOL
from cavvy.control.agents.checkpoint_pace import change_interval, warn_of_size
from cavvy.control.agents.checkpoints import find_objection
from cavvy.control.agents.dependencies import AgentDependencies
from cavvy.control.agents.gathered import GatheredReports, KnownRank
from cavvy.control.agents.gathered_writes import GatheredWrites
from cavvy.control.agents.leases import lease_until, paid_until
from cavvy.control.agents.memory import AgentMemory
from cavvy.control.agents.reports import (
    ReportOutcome,
    apply_messages,
    find_target,
    note_clock,
)
from cavvy.control.agents.work import read_key
from cavvy.control.agents.work_documents import CheckpointNotReady, WorkDocuments
from cavvy.control.clock import ControlClock
from cavvy.control.decide.groups import AT_WORK, is_assembled, list_variables
from cavvy.control.decide.losses import awaits_repair
from cavvy.control.decide.rows import RowChanges, make_attempt_event, make_event
from cavvy.control.decide.warm_pool import FAREWELL, waits_on
from cavvy.control.unit_of_work import GangReads, GangWrites
from cavvy.domain.events import Event
from cavvy.domain.jobs import GOING, Attempt, JobRecord, Node, NodePhase, Order, attempt_id
from cavvy.domain.messages import (
    AgentMessage,
    ClaimGranted,
    ClaimLost,
    ClaimRefused,
    ClaimWait,
    HostFacts,
    MessagesStored,
)
from cavvy.domain.values import Struct, replace
from cavvy.store.base import AtomicWrite, HashMismatch, OwnWrite, RowNotFound, StaleVersion
from cavvy.store.sql import Store

# the answer while agents of other ranks are missing: the agent repeats its claim
_INCOMPLETE = ClaimWait(after=timedelta(milliseconds=200))
# time after which an agent of a standby gang repeats its claim while another gang does the work
_STANDBY_ASKS_AGAIN = timedelta(seconds=1)
_GROUP_ASKS_AGAIN = timedelta(seconds=1)
_KEPT_ASKS_AGAIN = timedelta(seconds=1)
_WAITS = timedelta(
    seconds=30
)  # maximum age of an agent's last request for work while its warm gang counts as ready
_UNREADY_ASKS_AGAIN = timedelta(seconds=1)
_LONGEST_MISSING = 500  # maximum characters of the text that states what a node lacks for a tunnel
_TRIES = 8  # tries of a write that fails because the row was changed meanwhile


class _AskedClaim(Struct, frozen=True, kw_only=True):
    """A request for the work of a rank; see `AgentSessions.claim`."""

    gang: str
    rank: int
    nonce: str
    address: str
    host: HostFacts
    protocol: int
    sealed: bool


class AgentSessions:
    """Serves the requests of agents; see `docs/concepts/agent-protocol.md`. `hint` adds a job to
    the worklist.
    """

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        hint: Callable[[str], None],
        agent_dependencies: AgentDependencies,
    ) -> None:
        self._store = store
        self._reads, self._writes = GangReads(store), GangWrites(store)
        self._clock = clock
        self._hint = hint
        self._dependencies = agent_dependencies
        self._documents = WorkDocuments(store, clock, agent_dependencies)
        self.memory = AgentMemory()
        self.gathered = GatheredReports()
        self._gathered_writes = GatheredWrites(
            store, clock, self.gathered, self.messages, lambda gang: self.wake(gang)
        )
        # tells the other servers that the waiting order requests of a gang must be answered
        self.notify_others: Callable[[str], None] = lambda gang: None
        self._waiters: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        # the ranks of incomplete gangs whose agents have claimed them on this server
        self._gathered: defaultdict[str, set[int]] = defaultdict(set)

    async def claim(
        self,
        gang: str,
        rank: int,
        nonce: str,
        address: str,
        host: HostFacts,
        *,
        protocol: int = PROTOCOL,
        wait: timedelta = timedelta(0),
        sealed: bool = False,
    ) -> ClaimGranted | ClaimWait | ClaimRefused:
        """Grant the rank to the first nonce that requests the rank. A repeated request with the
        same nonce gets the same response as the first request. While agents of other ranks are
        missing, the response waits for at most `wait`, or until the gang's agents are woken.

        An agent with an older `protocol` is refused if it would ignore fields of the work. `sealed`
        means that the caller gives the agent a token of its own together with the work.
        """
        asked = _AskedClaim(
            gang=gang,
            rank=rank,
            nonce=nonce,
            address=address,
            host=host,
            protocol=protocol,
            sealed=sealed,
        )
        with self._listen(gang) as changed:
            answer, pause, woken = await self._try_claim(asked), _INCOMPLETE.after, False
            # agents may also claim on other servers, so the gang is looked at now and then
            while wait and answer == _INCOMPLETE and not woken:
                pause = min(2 * pause, wait)
                wait -= pause
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause.total_seconds()):
                        await changed.wait()
                woken = changed.is_set()
                answer = await self._try_claim(asked)
        return answer

    async def _try_claim(self, asked: _AskedClaim) -> ClaimGranted | ClaimWait | ClaimRefused:
        gang, rank = asked.gang, asked.rank
        for _ in range(_TRIES):
            try:
                return await self._claim(asked)
            except StaleVersion:
                continue
            except CheckpointNotReady:
                return ClaimWait(after=_UNREADY_ASKS_AGAIN)
            except RowNotFound:
                return ClaimRefused(reason=f"there is no active gang {gang} with a rank {rank}")
        raise StaleVersion(
            f"rank {rank} of gang {gang} kept changing during the request; try again"
        )

    async def messages(
        self,
        gang: str,
        rank: int,
        nonce: str,
        messages: Sequence[AgentMessage],
        *,
        sent_at: datetime | None = None,
        heard_at: datetime | None = None,
        keeps: bool = False,
    ) -> MessagesStored | ClaimLost:
        """Apply each message once and in order; messages after a gap must be sent again. Messages
        that cannot be applied or stored are refused and also acknowledged, so that agents do not
        send them again. If the agent `keeps` the messages until they are stored, those that only
        tell figures are written later, together with those of other agents.

        `sent_at` is the time of the node's clock when the messages were sent, and corrects their
        times. `heard_at` is set if the messages were read from a bucket. Messages in a bucket are
        the last messages of their rank, so missing earlier messages are skipped.
        """
        if keeps and (taken := self._take(gang, rank, nonce, messages, sent_at)) is not None:
            return taken
        messages = [*self.gathered.withdraw(gang, rank), *messages]
        for _ in range(_TRIES):
            try:
                return await self._messages(gang, rank, nonce, messages, sent_at, heard_at)
            except StaleVersion:
                continue
            except HashMismatch as error:  # the store cannot hold one of the messages
                messages = _find_unfit(messages, error)
                if len(messages) > 1:
                    send = partial(
                        self.messages, gang, rank, nonce, sent_at=sent_at, heard_at=heard_at
                    )
                    return await _send_one_by_one(messages, send)
            except RowNotFound:
                return ClaimLost(reason=f"there is no active gang {gang} with a rank {rank}")
        raise StaleVersion(
            f"rank {rank} of gang {gang} kept changing during the request; try again"
        )

    async def order(self, gang: str, rank: int, after: int) -> Order | None:
        """Return the current order for this rank if the order is newer than `after`. Raises
        RowNotFound."""
        known = self._known(gang, rank)
        if known is None:
            moment = self.gathered.moment
            attempt, job, [node] = await self._reads.read(gang, rank)
            self.gathered.learn(moment, attempt, job, node, self._clock.now())
        else:
            attempt, node = known.attempt, known.node
        self.memory.hear(attempt.id, rank, self._clock.now())
        return node.order if node.order is not None and node.order.seq > after else None

    async def wait_order(self, gang: str, rank: int, after: int, wait: timedelta) -> Order | None:
        """Return the same result as `order`, but first wait for at most `wait` if no order newer
        than `after` exists. When `notify` is called, the wait ends early, and the result may be
        None.
        """
        with self._listen(gang) as changed:
            order = await self.order(gang, rank, after)
            if order is not None:
                return order
            try:
                async with asyncio.timeout(wait.total_seconds()):
                    await changed.wait()
            except TimeoutError:
                return None
            return await self.order(gang, rank, after)

    @contextmanager
    def _listen(self, gang: str) -> Iterator[asyncio.Event]:
        """Give an event that is set whenever the requests of this gang's agents are woken."""
        changed = asyncio.Event()
        self._waiters[gang].add(changed)
        try:
            yield changed
        finally:
            self._waiters[gang].discard(changed)
            if not self._waiters[gang]:
                del self._waiters[gang]

    def notify(self, gang: str) -> None:
        """Wake all waiting requests of this gang's agents, on all servers, after a change of the
        gang's rows was written."""
        self.wake(gang)
        self.notify_others(gang)

    def wake(self, gang: str) -> None:
        """Agents of this gang may wait on this server: answer their requests now."""
        self.gathered.touch(gang)
        self._answer(gang)

    def _answer(self, gang: str) -> None:
        for waiter in self._waiters.get(gang, ()):
            waiter.set()

    def look_at(self, job_id: str, ranks: Iterable[int]) -> None:
        """A user looks at figures of these ranks of a job: for a minute, they do not wait for
        others. The agents of this server are told at once."""
        for gang in self.gathered.look_at(job_id, ranks, self._clock.now()):
            self._answer(gang)

    def is_looked_at(self, gang: str, rank: int) -> bool:
        """Return whether a user has looked at figures of the rank a moment ago."""
        return self.gathered.is_looked_at(gang, rank, self._clock.now())

    def find_attempt(self, gang: str, rank: int) -> Attempt | None:
        """Return the attempt of a rank that is known to have an agent, or None if the attempt must
        be read. It has not ended.
        """
        known = self._known(gang, rank)
        return None if known is None else known.attempt

    def _known(self, gang: str, rank: int) -> KnownRank | None:
        return self.gathered.find(gang, rank, self._clock.now())

    async def lease(self, gang: str, rank: int = 0) -> timedelta:
        """Return how long this gang's agents may continue to work without a response from the
        server. Raises RowNotFound.
        """
        if (known := self._known(gang, rank)) is not None:
            return self._lease(known.job, known.attempt)
        attempt, job, _ = await self._reads.read(gang, 0)  # every gang has this rank
        return self._lease(job, attempt)

    def heard(self, attempt_id: str, rank: int) -> datetime | None:
        """Return when a message was last received from this rank, or None if the time is not
        known."""
        return self.memory.heard_at(attempt_id, rank)

    def waits(self, attempt: Attempt) -> bool:
        """Return whether every agent of this warm gang has recently requested its next work."""
        since = self._clock.now() - _WAITS
        asked = [self.memory.asked_at(attempt.id, rank) for rank in range(attempt.nodes)]
        return all(at is not None and at >= since for at in asked)

    def afford(self, attempt_id: str, until: datetime | None) -> None:
        """Limit the leases of the attempt to the time `until`, which is when the budget is used up.
        None removes the limit.
        """
        self.memory.afford(attempt_id, until)

    def forget(self, attempt: Attempt) -> None:
        """Drop the state of an attempt that has ended, and answer its agents' waiting requests for
        orders.
        """
        self.memory.forget(attempt.id, range(attempt.nodes))
        self.gathered.forget_gang(attempt.gang)
        self._gathered.pop(attempt.gang, None)
        self._documents.forget(attempt.id)
        self.notify(attempt.gang)

    async def close(self) -> None:
        """Write the messages that were taken, and cancel the copies of checkpoints that are in
        progress."""
        await self._gathered_writes.close()
        await self._documents.close()
        await self._writes.close()

    async def _claim(self, asked: _AskedClaim) -> ClaimGranted | ClaimWait | ClaimRefused:
        now, rank, protocol = self._clock.now(), asked.rank, asked.protocol
        attempt, job, nodes = await self._reads.read(asked.gang, None)
        if attempt.phase in GOING:
            return ClaimRefused(reason=f"attempt {attempt.number} is over: {attempt.reason}")
        if not 0 <= rank < len(nodes):
            return ClaimRefused(reason=f"gang {asked.gang} has no rank {rank}")
        node = nodes[rank]
        if node.claim is not None and node.claim != asked.nonce:
            return self._claim_next(job, attempt, node, protocol)
        if node.claim is None:
            if job.stop_reason is not None:
                return ClaimRefused(reason=f"the job is being stopped: {job.stop_reason}")
            job = await self._choose_values(job, now)
            unknown = await self._documents.find_unknown(job, attempt, nodes, protocol)
            if unknown:
                return await self._turn_away(
                    attempt, rank, f"the agent's protocol {protocol} does not support {unknown}"
                )
            encrypts = read_key(asked.host) or asked.host.tunnel_missing
            if job.task.encrypt and attempt.nodes > 1 and not encrypts:
                return await self._turn_away(
                    attempt, rank, "the agent cannot encrypt the traffic between ranks"
                )
            nodes[rank] = await self._grant(job, attempt, node, asked, now)
            self._gather(asked.gang, nodes)
        self.memory.hear(attempt.id, rank, now)
        return await self._give(job, attempt, nodes)

    def _gather(self, gang: str, nodes: Sequence[Node]) -> None:
        """Wake the agents that wait for the rest of their gang if it is complete. Agents that claim
        at the same time do not see each other's claims in `nodes`."""
        gathered = self._gathered[gang]
        gathered |= {each.rank for each in nodes if each.claim is not None}
        if len(gathered) == len(nodes):
            del self._gathered[gang]
            self.wake(gang)

    async def _give(
        self, job: JobRecord, attempt: Attempt, nodes: Sequence[Node]
    ) -> ClaimGranted | ClaimWait:
        """Return the work document if every rank has an agent; otherwise the agent must wait."""
        if not all(other.claim for other in nodes):
            return _INCOMPLETE
        # A standby gang gets no work until it has taken the job over. A takeover after the job was
        # read has changed the rows of the other gang's nodes, so the grant would have failed.
        if attempt.number != job.attempt:
            return ClaimWait(after=_STANDBY_ASKS_AGAIN)
        variables = await self._group_variables(job)
        if variables is None:
            return ClaimWait(after=_GROUP_ASKS_AGAIN)
        work = await self._documents.make(job, attempt, nodes)
        work.env |= variables
        return ClaimGranted(work=work, lease=self._lease(job, attempt))

    async def _group_variables(self, job: JobRecord) -> dict[str, str] | None:
        """Return the variables with the addresses of the job's group, or None if the group has not
        started and still waits for nodes. The group has started when all its nodes have agents.
        """
        if job.task.group is None or job.array_id is None:
            return {}
        stored = await self._store.arrays.get(job.array_id)
        group = await self._store.find_jobs(await self._store.arrays.jobs(job.array_id))
        nodes = {
            each.id: await self._store.nodes(attempt_id(each.id, each.attempt))
            for each in group
            if each.phase in AT_WORK
        }
        if not stored.started:
            if not is_assembled(group, nodes):
                return None
            await self._store.arrays.start(job.array_id, self._clock.now())
        return list_variables(stored.name, group, nodes)

    def _claim_next(
        self, job: JobRecord, attempt: Attempt, node: Node, protocol: int
    ) -> ClaimWait | ClaimRefused:
        """Respond to a claim of a rank that already has an agent: only an agent on a warm node may
        claim the rank again.
        """
        if not waits_on(job, attempt, node) and not awaits_repair(job, attempt, node):
            return ClaimRefused(reason=f"rank {node.rank} is claimed by another agent")
        if protocol < PROTOCOL:
            return ClaimRefused(
                reason=f"warm nodes need an agent with protocol {PROTOCOL}; this agent has "
                f"protocol {protocol}"
            )
        self.memory.hear(attempt.id, node.rank, self._clock.now(), asks=True)
        until = attempt.kept_until
        keep = None if until is None else max(timedelta(0), until - self._clock.now()) + FAREWELL
        return ClaimWait(after=_KEPT_ASKS_AGAIN, keep=keep)

    async def _grant(
        self,
        job: JobRecord,
        attempt: Attempt,
        node: Node,
        asked: _AskedClaim,
        now: datetime,
    ) -> Node:
        host = asked.host
        granted = replace(
            node,
            sealed=asked.sealed,
            claim=asked.nonce,
            address=asked.address,
            tunnel_key=read_key(host),
            tunnel_missing=host.tunnel_missing[:_LONGEST_MISSING],
            phase=NodePhase.CLAIMED,
            claimed_at=now,
            heard_at=now,
        )
        where = f" on {host.hostname}" if host.hostname else ""
        event = Event(
            project=job.project,
            job_id=job.id,
            attempt=attempt.number,
            rank=node.rank,
            at=now,
            kind="claimed",
            text=f"the agent of rank {node.rank} reported in{where}",
        )
        await self._writes.commit(attempt.gang, AtomicWrite(nodes=[granted], events=[event]))
        self._hint(job.id)
        return replace(granted, version=node.version + 1)

    async def _turn_away(self, attempt: Attempt, rank: int, why: str) -> ClaimRefused:
        """Refuse the claim and report the reason. After the refusal, a new gang with up-to-date
        agents is launched.
        """
        text = f"the agent of rank {rank} is older than the server and was refused work: {why}"
        event = make_attempt_event(attempt, self._clock.now(), "agent", text, rank)
        await self._store.commit(AtomicWrite(events=[event]))
        return ClaimRefused(reason=why)

    async def _messages(
        self,
        gang: str,
        rank: int,
        nonce: str,
        messages: Sequence[AgentMessage],
        sent_at: datetime | None,
        heard_at: datetime | None,
    ) -> MessagesStored | ClaimLost:
        now, moment = heard_at or self._clock.now(), self.gathered.moment
        attempt, job, [node] = await self._reads.read(gang, rank)
        if objection := find_objection(attempt, node, nonce):
            return objection
        if heard_at is None:
            self.memory.hear(attempt.id, rank, now)
        node = note_clock(node, sent_at, now)
        report = apply_messages(job, attempt, node, messages, now, skips=heard_at is not None)
        if report.saved:
            best = await self._dependencies.save_interval(report.job, report.attempt)
            change_interval(report, best, self._clock.now())
            notice = self._dependencies.notice(report.attempt)
            warn_of_size(report, attempt, notice, self._clock.now())
        if report.node.sent != node.sent:
            await self._price_sent(report)
        if report.node.last_seq > node.last_seq:
            attempts = [report.attempt] if report.attempt is not attempt else []
            own: Sequence[OwnWrite] = ()
            stop, sweeps = RowChanges(), self._dependencies.sweeps()
            judged = job.task.stop_early is not None and rank == 0
            if sweeps is not None and judged and attempt.number == job.attempt:
                own, stop = await sweeps.check(job, report.node.progress, now)
            await self._writes.commit(
                gang,
                AtomicWrite(
                    jobs=[] if stop.job is None else [stop.job],
                    attempts=attempts,
                    nodes=[report.node],
                    events=[*report.events, *stop.events],
                    own=own,
                    figures=report.figures,
                    steps=report.steps,
                ),
            )
            if report.moved or stop.job is not None:
                self._hint(job.id)
            node = replace(report.node, version=node.version + 1)
        self.gathered.learn(moment, attempt, job, node, self._clock.now())
        every = report.attempt.checkpoint_every
        return MessagesStored(
            seq=report.node.last_seq,
            lease=self._lease(job, attempt),
            every=every,
            pause=self.gathered.find_pause(job, node, now),
        )

    def _take(
        self,
        gang: str,
        rank: int,
        nonce: str,
        messages: Sequence[AgentMessage],
        sent_at: datetime | None,
    ) -> MessagesStored | None:
        """Keep the messages in memory until they are written together with those of other agents.
        Return None if they must be applied now.
        """
        now, known = self._clock.now(), self._known(gang, rank)
        if known is None or known.node.claim != nonce:
            return None
        if not self.gathered.take(known, messages, sent_at, now):
            return None
        self.memory.hear(known.attempt.id, rank, now)
        self._gathered_writes.start()
        return MessagesStored(
            seq=known.node.last_seq,
            taken=known.taken,
            lease=self._lease(known.job, known.attempt),
            every=known.attempt.checkpoint_every,
            pause=self.gathered.find_pause(known.job, known.node, now),
        )

    async def _choose_values(self, job: JobRecord, now: datetime) -> JobRecord:
        """Return the job with its values, which a search chooses when it first starts. Raises
        StaleVersion, RowNotFound."""
        if job.task.search is None or job.member is None or job.point is not None:
            return job
        sweeps = self._dependencies.sweeps()
        if sweeps is not None:
            return await sweeps.settle(job, now)
        chosen = replace(job, point=job.member)  # what searches was taken out; its jobs must go on
        event = make_event(job, now, "chosen", "in order, because this server cannot search")
        await self._store.commit(AtomicWrite(jobs=[chosen], events=[event]))
        return await self._store.job(job.id)

    async def _price_sent(self, report: ReportOutcome) -> None:
        """Record the prices of the node's outgoing traffic when the node has sent the first
        bytes."""
        priced = []
        for each in report.node.sent:
            price, as_of = each.egress, each.egress_as_of
            if price is None:
                url = find_target(report.job.task, each)
                price, as_of = await self._dependencies.egress(url, report.attempt.offer)
            priced.append(replace(each, egress=price, egress_as_of=as_of))
        report.node = replace(report.node, sent=tuple(priced))

    def _lease(self, job: JobRecord, attempt: Attempt) -> timedelta:
        """Return the task's lease, or a shorter lease if the budget ends earlier."""
        until = self.memory.paid_until(attempt.id) or paid_until(job, attempt)
        return lease_until(job, until, self._clock.now())


def _find_unfit(messages: Sequence[AgentMessage], error: HashMismatch) -> Sequence[AgentMessage]:
    """Return the messages to store one by one after a failed attempt to store them together. If
    there is only one message, return it with only the fields that can always be stored. Raises
    HashMismatch if it has no other fields.
    """
    if len(messages) != 1:
        return messages
    [message] = messages
    if message.fault:
        raise error
    return [AgentMessage(seq=message.seq, at=message.at, kind=message.kind, fault=str(error)[:300])]


async def _send_one_by_one(
    messages: Sequence[AgentMessage],
    send: Callable[[Sequence[AgentMessage]], Awaitable[MessagesStored | ClaimLost]],
) -> MessagesStored | ClaimLost:
    for message in sorted(messages, key=lambda item: item.seq):
        answer = await send([message])
        if isinstance(answer, ClaimLost):
            break
    return answer
