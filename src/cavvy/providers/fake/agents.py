"""The machines of the fake cloud, and their simulated agents, which claim, report, receive orders
and renew their lease like real agents, but run no command.

Environment variables of the task control the work: FAKE_RUN_S (duration in seconds, default 60),
FAKE_EXIT_CODE (0), FAKE_EXIT_AFTER_S (when the work fails; default: the duration), FAKE_EXIT_RANK
(only this rank fails), FAKE_SETUP_S (duration of the setup, default 0), FAKE_STUBBORN (1: the work
ends only when killed), FAKE_SIGNAL_CODE (exit code after SIGTERM, default 143) and FAKE_COMPLETE
(1: the work reports completion when it is asked to end). With FAKE_POWER, all ranks share the work,
which takes FAKE_RUN_S on one node, N^FAKE_POWER times less on N nodes, and is told as samples, one
a second on one node; on FAKE_UNTAKEN nodes, it fails at once, and on FAKE_SILENT nodes it does and
tells nothing. Work with checkpoints resumes from the last checkpoint.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from cavvy.agent.documents import WorkConfig
from cavvy.domain.jobs import NODE_SPARED, AttemptOutcome, Order
from cavvy.domain.messages import (
    AgentCalls,
    AgentMessage,
    ClaimGranted,
    ClaimLost,
    ClaimRefused,
    HostFacts,
    MessageKind,
)
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, field
from cavvy.providers.base import GangSeen, GangSpec, GangState, NodeSeen
from cavvy.providers.fake.script import FaultScript


class FakeMachine(Struct):
    """One node, and the times at which its billing starts and ends."""

    engine_id: str
    rank: int
    started_at: datetime
    round: int = 1  # the number of the job's attempt that requested it in place of a lost machine
    ended_at: datetime | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    on_end: Callable[[], None] = lambda: None

    def end(self, now: datetime) -> None:
        if self.ended_at is None:
            self.ended_at = now
            self.ended.set()
            self.on_end()


class FakeGang(Struct):
    """The gang that one launch created. The cloud keeps gangs in a list, not a dict, so that tests
    notice if one name was launched twice.
    """

    spec: GangSpec
    fault_script: FaultScript
    engine_id: str
    bought_at: datetime
    starts_at: datetime
    machines: list[FakeMachine] = field(default_factory=list)
    replaced: list[FakeMachine] = field(default_factory=list)  # and no longer in `machines`
    reason: str = ""
    preempted: bool = False
    removing: bool = False
    # the time of the removal, if the gang was still in the provider's queue
    cancelled_at: datetime | None = None

    @property
    def ended_at(self) -> datetime | None:
        """The time when the last node ended, or None while a node is running or has not started."""
        if self.cancelled_at is not None:
            return self.cancelled_at
        ends = [machine.ended_at for machine in self.machines]
        known = [end for end in ends if end is not None]
        return max(known) if ends and len(known) == len(ends) else None

    @property
    def alive(self) -> bool:
        return self.ended_at is None

    def seen(self, now: datetime, rates: Sequence[tuple[datetime, HourlyRate]]) -> GangSeen:
        late = timedelta(seconds=self.fault_script.told_late_s)
        return GangSeen(
            name=self.spec.name,
            state=self._state(now),
            engine_id=self.engine_id,
            reason=self.reason,
            preempted=self.preempted,
            eta=self.starts_at if now < self.starts_at else None,
            nodes=tuple(_see(machine, now, late) for machine in self.machines),
            replaced=tuple(_see(machine, now, late) for machine in self.replaced),
            rates=rates,
        )

    def _state(self, now: datetime) -> GangState:
        if not self.alive:
            return GangState.ENDED
        if not self.machines:
            return GangState.QUEUED
        booted = self.fault_script.boots and now >= self.starts_at + timedelta(
            seconds=self.fault_script.boot_s
        )
        return GangState.RUNNING if booted else GangState.STARTING


def _see(machine: FakeMachine, now: datetime, late: timedelta) -> NodeSeen:
    return NodeSeen(
        rank=machine.rank,
        engine_id=machine.engine_id,
        started_at=machine.started_at if now - machine.started_at >= late else None,
        ended_at=machine.ended_at,
        address=f"10.0.0.{machine.rank + 1}",
    )


T = TypeVar("T")
Call = Callable[[AgentCalls], Coroutine[Any, Any, T]]
_LONG_POLL = timedelta(minutes=5)
_GATHERS = timedelta(seconds=5)  # how long a claim waits for the agents of other ranks
_RETRY_S = 5.0  # pause between requests while the control plane does not answer
_REACTION_S = 1.0  # time from a signal to the end of cooperative work
_TELLS_S = 60.0  # time between two reports of progress
_FOR_EVER_S = 1e9
_CHECKPOINT_S = 600.0  # time between checkpoints if the task sets no interval


class LeaseExpired(Exception):
    """Raised if the control plane has been silent for longer than the lease."""


# outcomes after which agents wait for the repair of their gang, as in `agent/runner.py`
AWAITS_REPAIR = (AttemptOutcome.STOPPED, AttemptOutcome.EXIT)
_BY_ITSELF = (AttemptOutcome.SUCCEEDED, AttemptOutcome.EXIT)


class _Leave(Exception):
    """Raised to end the agent, because another agent has the claim or the attempt has ended."""


async def pause(seconds: float) -> None:
    """Let simulated time pass."""
    # this advances the simulated world; no caller waits
    await asyncio.sleep(max(0.0, seconds))  # noqa: TID251


class AgentConnection:
    """The simulated agents' connection to the control plane. The connection breaks when the control
    plane is replaced or removed; open requests then receive no answer.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._control_plane: AgentCalls | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    def connect(self, control_plane: AgentCalls | None) -> None:
        self._control_plane = control_plane
        for call in self._calls:
            call.cancel()

    async def ask(self, call: Call[T]) -> T | None:
        """Make a call. Return the answer, or None if the connection is broken or the call
        failed.
        """
        if self._control_plane is None:
            return None
        task = asyncio.get_running_loop().create_task(call(self._control_plane))
        self._calls.add(task)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._calls.discard(task)
        if task.cancelled() or task.exception() is not None:
            return None
        return task.result()


class FakeStorage:
    """Stores checkpoints, which outlive the nodes. A checkpoint is the number of completed seconds
    of work, stored by job and rank.
    """

    def __init__(self) -> None:
        self._done: dict[tuple[str, int], float] = {}
        self.work: list[tuple[str, int, datetime, datetime | None]] = []  # gang, rank, start, end
        self.begun: list[
            tuple[str, int, float, float]
        ] = []  # job, rank, seconds saved at that time, seconds resumed from

    def done(self, job_id: str, rank: int) -> float:
        return self._done.get((job_id, rank), 0.0)

    def save(self, job_id: str, rank: int, seconds: float) -> None:
        self._done[job_id, rank] = seconds


class _Outbox:
    """Numbers messages, and sends each message in order until the control plane acknowledges it."""

    def __init__(self) -> None:
        self.waiting: list[AgentMessage] = []
        self.changed = asyncio.Event()
        self.empty = asyncio.Event()
        self._seq = 0

    def put(self, at: datetime, kind: MessageKind, **fields: Any) -> None:
        self._seq += 1
        self.waiting.append(AgentMessage(seq=self._seq, at=at, kind=kind, **fields))
        self.empty.clear()
        self.changed.set()

    def acked(self, seq: int) -> None:
        self.waiting = [message for message in self.waiting if message.seq > seq]
        if not self.waiting:
            self.empty.set()


class FakeAgent:
    """The agent of one node. The node ends if the agent's lease expires."""

    def __init__(
        self,
        line: AgentConnection,
        storage: FakeStorage,
        gang: FakeGang,
        machine: FakeMachine,
        now: Callable[[], datetime],
        nonce: str,
        fault_script: FaultScript,
    ) -> None:
        self._fault_script = fault_script
        self._line = line
        self._storage = storage
        self._gang = gang
        self._machine, self._rank = machine, machine.rank
        self._nonce = self._first_nonce = nonce
        # the number of assignments that this node has completed
        self._generation = 0
        # the time until which the agent waits for more work; None if there is no limit
        self._until: datetime | None = None
        self._outcome: AttemptOutcome | None = None
        self._now = now
        self._born = machine.started_at
        self._lease_until = now() + gang.spec.lease
        self._outbox = _Outbox()

    async def live(self) -> None:
        """Simulate the agent from the start of its node to the node's end."""
        work = asyncio.get_running_loop().create_task(self._run())
        end = asyncio.get_running_loop().create_task(self._machine.ended.wait())
        dead = self._fault_script.dead_after_s
        try:
            await asyncio.wait({work, end}, timeout=dead, return_when=asyncio.FIRST_COMPLETED)
        finally:
            end.cancel()
            work.cancel()
            await asyncio.gather(work, end, return_exceptions=True)
        if not work.cancelled() and isinstance(work.exception(), LeaseExpired):
            self._machine.end(self._now())

    async def _run(self) -> None:
        await pause(self._fault_script.boot_s)
        self._lease_until = self._now() + self._gang.spec.lease
        while True:
            work = await self._claim()
            if work is None:
                return
            await self._do(work)
            spared = NODE_SPARED if work.machine else _BY_ITSELF
            keep_s = work.keep_s if self._outcome in spared else 0
            if self._outcome in AWAITS_REPAIR:
                keep_s = max(keep_s, work.repair_s)
            if not keep_s:
                return
            self._generation += 1
            self._nonce = f"{self._first_nonce}-{self._generation}"
            self._outbox = _Outbox()
            self._until = self._now() + timedelta(seconds=keep_s)

    async def _do(self, work: WorkConfig) -> None:
        over = False
        try:
            async with asyncio.TaskGroup() as group:
                sender = group.create_task(self._send_all())
                listener = group.create_task(self._listen())
                await self._work(work, listener)
                listener.cancel()
                await self._outbox.empty.wait()
                sender.cancel()
        except* _Leave:
            pass  # the work's tasks have ended; the node runs until it is removed
        except* LeaseExpired:
            over = True
        if over:
            raise LeaseExpired

    async def _claim(self) -> WorkConfig | None:
        name, address = self._gang.spec.name, f"10.0.0.{self._rank + 1}"
        host = HostFacts(hostname=self._nonce, python="3", platform="made up")
        while self._until is None or self._now() < self._until:
            answer = await self._ask(
                lambda control_plane: control_plane.claim(
                    name, self._rank, self._nonce, address, host, wait=_GATHERS
                )
            )
            match answer:
                case ClaimRefused():
                    return None
                case ClaimGranted():
                    self._renew(answer.lease)
                    return answer.work
                case _:
                    self._renew(self._gang.spec.lease)
                    if answer.keep is not None:
                        self._until = self._now() + answer.keep
                    await pause(answer.after.total_seconds() * 10)
        return None

    async def _work(self, work: WorkConfig, listener: asyncio.Task[Order]) -> None:
        play = _Play(work, self._rank, self._storage)
        if play.setup_s:
            self._outbox.put(self._now(), MessageKind.SETUP)
            await asyncio.wait({listener}, timeout=play.setup_s)
        began = self._now()
        self._storage.begun.append(
            (work.job_id, self._rank, self._storage.done(work.job_id, play.rank), play.done)
        )
        self._outbox.put(began, MessageKind.RUNNING)
        self._storage.work.append((self._gang.spec.name, self._rank, began, None))
        index = len(self._storage.work) - 1
        try:
            outcome, code, reason = await self._play(play, began, listener)
        finally:
            self._storage.work[index] = (self._gang.spec.name, self._rank, began, self._now())
        self._outcome = outcome
        self._outbox.put(
            self._now(), MessageKind.EXITED, outcome=outcome, exit_code=code, reason=reason
        )

    async def _play(
        self, play: "_Play", began: datetime, listener: asyncio.Task[Order]
    ) -> tuple[AttemptOutcome, int, str]:
        """Wait until the work ends, is asked to end, or gets notice that its node will be
        reclaimed.
        """
        notice_at, advice_at = (
            self._notice_at(),
            self._after_birth(self._fault_script.advised_after_s),
        )
        saved = told = 0.0
        while True:
            ran = (self._now() - began).total_seconds()
            if ran >= play.ends_s:
                return play.end
            next_s = min(play.ends_s, saved + play.checkpoint_s, told + play.tells_s)
            for known in (notice_at, advice_at):
                next_s = next_s if known is None else min(next_s, (known - began).total_seconds())
            await asyncio.wait({listener}, timeout=max(0.0, next_s - ran) + 1e-6)
            ran = (self._now() - began).total_seconds()
            if listener.done():
                return await self._obey(play, listener.result(), ran)
            if notice_at is not None and self._now() >= notice_at:
                return await self._noticed(play, ran)
            if advice_at is not None and self._now() >= advice_at:
                advice_at, saved = None, ran
                self._outbox.put(
                    self._now(), MessageKind.EVENT, name="advice", text="this node is at risk"
                )
                self._checkpoint(play, ran)
            if ran >= told + play.tells_s:
                told = ran
                self._outbox.put(self._now(), MessageKind.PROGRESS, values=play.tell(ran))
            if ran >= saved + play.checkpoint_s:
                saved = ran
                self._checkpoint(play, ran)

    async def _obey(
        self, play: "_Play", order: Order, ran: float
    ) -> tuple[AttemptOutcome, int, str]:
        code = await self._end(play, order.seconds)
        if order.kind == "notice":
            self._checkpoint(play, ran)
            return AttemptOutcome.PREEMPTED, code, "ended after a notice"
        return AttemptOutcome.STOPPED, code, f"stopped: {order.reason}"

    async def _noticed(self, play: "_Play", ran: float) -> tuple[AttemptOutcome, int, str]:
        seconds = self._fault_script.notice_s
        self._outbox.put(self._now(), MessageKind.NOTICE, seconds=seconds, source="made up")
        self._checkpoint(play, ran)
        return (
            AttemptOutcome.PREEMPTED,
            await self._end(play, seconds),
            "ended after the provider's notice",
        )

    async def _end(self, play: "_Play", seconds: float) -> int:
        """Stop the work within `seconds` seconds, and return the work's exit code."""
        await pause(seconds if play.stubborn else min(_REACTION_S, seconds))
        if play.complete:
            self._outbox.put(self._now(), MessageKind.PROGRESS, values={"complete": 1})
        return 137 if play.stubborn else play.signal_code

    def _checkpoint(self, play: "_Play", ran: float) -> None:
        if play.checkpoints and not self._fault_script.storage_fails:
            self._storage.save(play.job_id, play.rank, play.done + ran * play.speed)
            self._outbox.put(self._now(), MessageKind.CHECKPOINT, bytes=1 << 20, files=1)

    def _notice_at(self) -> datetime | None:
        fault_script = self._fault_script
        if fault_script.preempted_after_s is None or not fault_script.notice_s:
            return None
        return self._after_birth(max(0.0, fault_script.preempted_after_s - fault_script.notice_s))

    def _after_birth(self, seconds: float | None) -> datetime | None:
        return None if seconds is None else self._born + timedelta(seconds=seconds)

    async def _send_all(self) -> None:
        while True:
            await self._outbox.changed.wait()
            self._outbox.changed.clear()
            while self._outbox.waiting:
                for batch in self._batches(list(self._outbox.waiting)):
                    await self._send(batch)

    def _batches(self, messages: list[AgentMessage]) -> Sequence[Sequence[AgentMessage]]:
        if not self._fault_script.garbled:
            return [messages]
        return [messages[-1:], list(reversed(messages)), messages]

    async def _send(self, batch: Sequence[AgentMessage]) -> None:
        name = self._gang.spec.name
        answer = await self._ask(
            lambda control_plane: control_plane.messages(name, self._rank, self._nonce, batch)
        )
        if isinstance(answer, ClaimLost):
            raise _Leave
        self._renew(answer.lease)
        self._outbox.acked(answer.seq)

    async def _listen(self) -> Order:
        """Wait for the first order for this rank."""
        name = self._gang.spec.name
        while True:
            order, lease = await self._ask(
                lambda control_plane: _order(control_plane, name, self._rank)
            )
            self._renew(lease)
            if order is not None:
                return order

    async def _ask(self, call: Call[T]) -> T:
        """Repeat a call until the control plane answers, and return the answer. Raises
        LeaseExpired.
        """
        while True:
            left = (self._lease_until - self._now()).total_seconds()
            if left <= 0:
                raise LeaseExpired
            mute = self._fault_script.mute_after_s
            if mute is not None and self._now() >= self._born + timedelta(seconds=mute):
                await pause(left)
                continue
            answer = await self._line.ask(call)
            if answer is not None:
                return answer
            await pause(min(_RETRY_S, left))

    def _renew(self, lease: timedelta) -> None:
        self._lease_until = self._now() + lease


async def _order(control_plane: AgentCalls, gang: str, rank: int) -> tuple[Order | None, timedelta]:
    return await control_plane.wait_order(gang, rank, 0, _LONG_POLL), await control_plane.lease(
        gang
    )


class _Play:
    """The simulated work of one rank."""

    def __init__(self, work: WorkConfig, rank: int, storage: FakeStorage) -> None:
        env = work.env
        self.job_id = work.job_id
        self.checkpoints = work.checkpoint is not None
        every = work.checkpoint.every_s if work.checkpoint else None
        self.checkpoint_s = every or _CHECKPOINT_S
        self.setup_s = float(env.get("FAKE_SETUP_S", "0"))
        self.stubborn = env.get("FAKE_STUBBORN", "0") == "1"
        self.signal_code = int(env.get("FAKE_SIGNAL_CODE", "143"))
        self.complete = env.get("FAKE_COMPLETE", "0") == "1"
        power = env.get("FAKE_POWER")
        self.rank = rank if power is None else 0  # whose checkpoint it is
        self.speed = 1.0 if power is None else work.nodes ** float(power)
        silent = env.get("FAKE_SILENT") == str(work.nodes)
        self.tells_s = _TELLS_S if power is not None and rank == 0 and not silent else float("inf")
        self.done = storage.done(work.job_id, self.rank) if self.checkpoints else 0.0
        self.whole = whole = float(env.get("FAKE_RUN_S", "60"))
        if silent:
            self.checkpoints, self.speed = False, whole / _FOR_EVER_S
        code = int(env.get("FAKE_EXIT_CODE", "0"))
        if env.get("FAKE_UNTAKEN") == str(work.nodes):
            code, env = 1, {**env, "FAKE_EXIT_AFTER_S": str(self.done)}
        fails = code != 0 and env.get("FAKE_EXIT_RANK", str(rank)) == str(rank)
        ends = float(env.get("FAKE_EXIT_AFTER_S", str(whole))) if fails else whole
        self.ends_s = max(0.0, ends - self.done) / self.speed
        outcome = AttemptOutcome.EXIT if fails else AttemptOutcome.SUCCEEDED
        self.end = (outcome, code if fails else 0, f"exit code {code if fails else 0}")

    def tell(self, ran: float) -> dict[str, float | str]:
        """Return what the program tells of its progress, as `cavvy.train` does."""
        done = min(self.done + ran * self.speed, self.whole)
        told: dict[str, float | str] = {"done": done, "total": self.whole, "unit": "samples"}
        return {**told, "samples_per_s": self.speed}
