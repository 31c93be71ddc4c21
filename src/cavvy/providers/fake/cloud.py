"""A simulated cloud in memory. The fake cloud follows the provider contract and can fail like real
clouds."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from datetime import datetime, timedelta
from random import Random
from typing import Any

from cavvy.domain.allocations import Host
from cavvy.domain.messages import AgentCalls
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.providers.abilities import REPLACES_NODES, SHARES_HOSTS
from cavvy.providers.base import (
    Feature,
    GangSeen,
    GangSpec,
    Manifest,
    NoCapacity,
    NodeSeen,
    QuotaTooSmall,
    Refused,
    TryAgain,
)
from cavvy.providers.fake.agents import (
    AgentConnection,
    FakeAgent,
    FakeGang,
    FakeMachine,
    FakeStorage,
    pause,
)
from cavvy.providers.fake.script import (
    CallOutcome,
    CloudScript,
    FaultScript,
    RemovalScript,
    TimeSpan,
)


class NodeLife(Struct, frozen=True, kw_only=True):
    """The true lifetime of one node and the prices during this time. Tests compare Cavvy's bills
    with these values.
    """

    gang: str
    engine_id: str
    rank: int
    offer: Offer
    started_at: datetime
    ended_at: datetime | None
    rates: tuple[tuple[datetime, HourlyRate], ...]


class FakeCloud:
    """Implements `Provider` on a simulated cloud, which also has shared hosts. The fake cloud needs
    a running event loop.
    """

    def __init__(
        self, manifest: Manifest, script: CloudScript, now: Callable[[], datetime]
    ) -> None:
        self.manifest = replace(manifest, abilities=(*manifest.abilities, SHARES_HOSTS))
        if script.no_repair:
            kept = [each for each in self.manifest.abilities if each is not REPLACES_NODES]
            lacking = {**manifest.unsupported, Feature.REPAIR: script.no_repair}
            self.manifest = replace(self.manifest, abilities=kept, unsupported=lacking)
        self.script = script
        self.gang_list: list[FakeGang] = []
        # the gangs that may be listed: those that are alive, and those that ended not long ago
        self._listed: list[FakeGang] = []
        self.in_use: Counter[str] = Counter()  # nodes, by their offer's key
        self._by_name: defaultdict[str, list[FakeGang]] = defaultdict(list)
        self.launch_calls: list[tuple[datetime, str]] = []
        self.replace_calls: list[tuple[datetime, str]] = []
        self.storage = FakeStorage()
        self._now = now
        self._began = now()
        self._offers = {offer.key: offer for offer in script.offers}
        self._fault_scripts = list(script.launches)
        self._removals = list(script.removals)
        self._line = AgentConnection(now)
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: list[BaseException] = []
        self._changes: asyncio.Queue[str] = asyncio.Queue()
        self._engine_ids = 0
        self._dice = Random(0)
        # engine id -> the time of the first poll after the node's end
        self._ends_seen: dict[str, datetime] = {}

    # The methods of Provider

    async def offers(self) -> Sequence[Offer]:
        self._weather()
        return [self._current(offer) for offer in self._offers.values()]

    async def launch(self, gang: GangSpec) -> None:
        self.launch_calls.append((self._now(), gang.name))
        if self.find(gang.name):
            self._weather()
            return
        fault_script = self._fault_script(gang)
        # a separate task, because a request takes effect even if its caller is cancelled
        call = self._spawn_call(self._launch(gang, fault_script))
        await asyncio.shield(call)

    def _fault_script(self, gang: GangSpec) -> FaultScript:
        spot = gang.offer.purchase is Purchase.SPOT
        index = next(
            (
                i
                for i, fault_script in enumerate(self._fault_scripts)
                if spot or not fault_script.spot_only
            ),
            None,
        )
        return self.script.launch if index is None else self._fault_scripts.pop(index)

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        self.replace_calls.append((self._now(), gang.name))
        await asyncio.shield(self._spawn_call(self._replace(gang, ranks, self._fault_script(gang))))

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        self._weather()
        now = self._now()
        if name is None:
            self._listed = [gang for gang in self._listed if not self._is_forgotten(gang, now)]
        found = self.find(name) if name is not None else self._listed
        return [self._seen(gang, now) for gang in found if self._shown(gang, now)]

    async def remove(self, name: str) -> None:
        self._weather()
        removal = self._removals.pop(0) if self._removals else self.script.removal
        await asyncio.shield(self._spawn_call(self._remove(name, removal)))

    async def hosts(self) -> Sequence[Host]:
        self._weather()
        return self.script.hosts

    async def changed(self) -> str:
        return await self._changes.get()

    def connect(self, control_plane: AgentCalls | None) -> None:
        self._line.connect(control_plane)

    async def close(self) -> None:
        """Stop all simulated machines and agents. Raises the first error of the simulated tasks;
        each such error is a bug in this module.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._faults:
            raise self._faults[0]

    # The cloud's own records

    def list_alive(self) -> list[FakeGang]:
        """Return the gangs that have not ended."""
        return [gang for gang in self._listed if gang.alive]

    def lives(self) -> list[NodeLife]:
        """Return the lifetimes of all nodes that the cloud has ever started."""
        return [
            NodeLife(
                gang=gang.spec.name,
                engine_id=machine.engine_id,
                rank=machine.rank,
                offer=gang.spec.offer,
                started_at=machine.started_at,
                ended_at=machine.ended_at,
                rates=tuple(self._rates(gang.spec.offer.key)),
            )
            for gang in self.gang_list
            for machine in (*gang.machines, *gang.replaced)
        ]

    def _current(self, offer: Offer) -> Offer:
        capacity = offer.capacity
        if capacity is None and not self.script.prices:
            return offer  # a place with own hosts has thousands of these
        if capacity is not None:
            capacity = max(0, capacity - self.in_use[offer.key])
        now = self._now()
        rate = [rate for since, rate in self._rates(offer.key) if since <= now][-1]
        return replace(offer, capacity=capacity, rate=rate)

    def _rates(self, key: str) -> list[tuple[datetime, HourlyRate]]:
        changes = [
            (self._at(change.at_s), change.rate)
            for change in self.script.prices
            if change.offer == key
        ]
        first = self._offers[key].rate
        return [(self._began, first), *sorted(changes, key=lambda change: change[0])]

    def _known_rates(self, gang: FakeGang, now: datetime) -> list[tuple[datetime, HourlyRate]]:
        return [(since, rate) for since, rate in self._rates(gang.spec.offer.key) if since <= now]

    def _at(self, seconds: float) -> datetime:
        return self._began + timedelta(seconds=seconds)

    def find(self, name: str) -> Sequence[FakeGang]:
        """Return the gangs with this name. The result contains several gangs if the same name was
        launched several times.
        """
        return self._by_name.get(name, [])

    def _seen(self, gang: FakeGang, now: datetime) -> GangSeen:
        told = gang.seen(now, self._known_rates(gang, now))
        return replace(told, nodes=tuple(self._report(node, now) for node in told.nodes))

    def _report(self, node: NodeSeen, now: datetime) -> NodeSeen:
        """Return the node as the cloud reports it; the reported times may differ from the billed
        times.
        """
        records = self.script.records
        if node.ended_at is not None and records.ends_unseen:
            first_seen = self._ends_seen.setdefault(node.engine_id, now)
            node = replace(node, ended_at=first_seen, unseen=True)
        if node.started_at is None:
            return node
        late = 0.0 if node.ended_at is not None else records.start_late_s
        late += records.jitter_s * self._dice.random()
        started = min(now, node.started_at + timedelta(seconds=late))
        return replace(node, started_at=min(started, node.ended_at or started))

    def _is_forgotten(self, gang: FakeGang, now: datetime) -> bool:
        ended_at = gang.ended_at
        remembers = timedelta(seconds=self.script.records.remembers_s)
        return ended_at is not None and now - ended_at >= remembers

    def _shown(self, gang: FakeGang, now: datetime) -> bool:
        if not gang.alive:
            return not self._is_forgotten(gang, now)
        return now >= gang.bought_at + timedelta(
            seconds=gang.fault_script.hidden_s
        ) and not self._in(self.script.blackouts)

    def _in(self, spans: Sequence[TimeSpan]) -> bool:
        now = self._now()
        return any(self._at(span.at_s) <= now < self._at(span.at_s + span.for_s) for span in spans)

    def _weather(self) -> None:
        if self._in(self.script.storms):
            raise TryAgain("503: the cloud is overloaded")

    # Events

    async def _launch(self, spec: GangSpec, fault_script: FaultScript) -> None:
        await pause(fault_script.latency_s / 2)
        match fault_script.reply:
            case CallOutcome.NO_CAPACITY:
                raise NoCapacity(f"{spec.offer.instance_type} is sold out in {spec.offer.region}")
            case CallOutcome.REFUSED:
                raise QuotaTooSmall("your quota for this type is 0")
            case CallOutcome.TRY_AGAIN:
                raise TryAgain("503: nothing was started")
            case CallOutcome.OK | CallOutcome.LOST:
                self._buy(spec, fault_script)
        await pause(fault_script.latency_s / 2)
        if fault_script.reply is CallOutcome.LOST:
            raise TryAgain("the reply was lost")

    async def _replace(
        self, spec: GangSpec, ranks: Sequence[int], fault_script: FaultScript
    ) -> None:
        await pause(fault_script.latency_s / 2)
        match fault_script.reply:
            case CallOutcome.NO_CAPACITY:
                raise NoCapacity(f"{spec.offer.instance_type} is sold out in {spec.offer.region}")
            case CallOutcome.REFUSED:
                raise QuotaTooSmall("your quota for this type is 0")
            case CallOutcome.TRY_AGAIN:
                raise TryAgain("503: nothing was started")
            case CallOutcome.OK | CallOutcome.LOST:
                self._renew(spec, ranks, fault_script)
        await pause(fault_script.latency_s / 2)
        if fault_script.reply is CallOutcome.LOST:
            raise TryAgain("the reply was lost")

    def _renew(self, spec: GangSpec, ranks: Sequence[int], fault_script: FaultScript) -> None:
        [gang] = self.find(spec.name)
        if not gang.alive or gang.removing:
            return
        old = [
            machine
            for machine in gang.machines
            if machine.rank in ranks and machine.round != spec.round
        ]
        free = self._current(self._offers[spec.offer.key]).capacity
        now = self._now()
        going = sum(machine.ended_at is None for machine in old)
        if free is not None and len(old) > free + going:
            raise NoCapacity(f"{spec.offer.instance_type} is sold out in {spec.offer.region}")
        for machine in old:
            machine.end(now)
        gang.replaced += old
        gang.reason = ""
        fresh = {
            each.rank: self._make_machine(spec, each.rank, now, round_number=spec.round)
            for each in old
        }
        self.in_use[spec.offer.key] += len(fresh)
        gang.machines = [fresh.get(each.rank, each) for each in gang.machines]
        self._changes.put_nowait(spec.name)
        for machine in fresh.values():
            self._begin(gang, machine, fault_script)

    def _buy(self, spec: GangSpec, fault_script: FaultScript) -> None:
        if self.find(spec.name):
            return
        offer = self._offers.get(spec.offer.key)
        if offer is None:
            raise Refused(f"no such type: {spec.offer.key}")
        free = self._current(offer).capacity
        if free is not None and spec.nodes > free:
            raise NoCapacity(f"{offer.instance_type} is sold out in {offer.region}")
        now = self._now()
        starts_at = now + timedelta(seconds=fault_script.queue_s)
        gang = FakeGang(
            spec=spec,
            fault_script=fault_script,
            engine_id=self._engine_id(),
            bought_at=now,
            starts_at=starts_at,
        )
        self.gang_list.append(gang)
        self._listed.append(gang)
        self.in_use[spec.offer.key] += spec.nodes
        self._by_name[spec.name].append(gang)
        self._spawn(self._run(gang))

    async def _run(self, gang: FakeGang) -> None:
        """Run one gang from its launch to its end."""
        await pause(gang.fault_script.queue_s)
        if gang.cancelled_at is not None:
            return
        now = self._now()
        gang.starts_at = now
        gang.machines = [
            self._make_machine(gang.spec, rank, now) for rank in range(gang.spec.nodes)
        ]
        self._changes.put_nowait(gang.spec.name)
        for machine in gang.machines:
            self._begin(gang, machine, gang.fault_script)
        if gang.fault_script.preempted_after_s is not None:
            self._spawn(self._preempt(gang, gang.fault_script.preempted_after_s))

    def _make_machine(
        self, spec: GangSpec, rank: int, now: datetime, *, round_number: int = 1
    ) -> FakeMachine:
        """Return a new machine of a gang, which counts as in use until it ends."""

        def free() -> None:
            self.in_use[spec.offer.key] -= 1

        return FakeMachine(
            engine_id=self._engine_id(),
            rank=rank,
            started_at=now,
            round=round_number,
            on_end=free,
        )

    def _begin(self, gang: FakeGang, machine: FakeMachine, fault_script: FaultScript) -> None:
        """Start the agents of a new machine, and the loss of the machine that the script states."""
        nonces = [machine.engine_id, f"{machine.engine_id}-twin"][: 1 + fault_script.twins]
        for nonce in nonces if fault_script.boots else ():
            agent = FakeAgent(
                self._line, self.storage, gang, machine, self._now, nonce, fault_script
            )
            self._spawn(agent.live())
        if fault_script.lost_rank == machine.rank:
            self._spawn(self._lose(gang, machine, fault_script.lost_after_s))

    async def _preempt(self, gang: FakeGang, after_s: float) -> None:
        await pause(after_s)
        if gang.alive and not gang.removing:
            gang.preempted, gang.reason = True, "the provider reclaimed the spot capacity"
            self._end(gang)

    async def _lose(self, gang: FakeGang, machine: FakeMachine, after_s: float) -> None:
        await pause(after_s)
        if machine.ended_at is None:
            machine.end(self._now())
            gang.reason = gang.reason or f"{machine.engine_id} failed its hardware check"
            self._changes.put_nowait(gang.spec.name)

    async def _remove(self, name: str, removal: RemovalScript) -> None:
        await pause(removal.latency_s / 2)
        if removal.reply is CallOutcome.TRY_AGAIN:
            raise TryAgain("503: nothing was removed")
        for gang in self.find(name):
            if gang.alive and not gang.removing:
                gang.removing = True
                self._spawn(self._give_back(gang, removal.takes_s))
        await pause(removal.latency_s / 2)
        if removal.reply is CallOutcome.LOST:
            raise TryAgain("the reply was lost")

    async def _give_back(self, gang: FakeGang, takes_s: float) -> None:
        await pause(takes_s)
        gang.reason = gang.reason or "removed"
        self._end(gang)

    def _end(self, gang: FakeGang) -> None:
        now = self._now()
        if not gang.machines and gang.cancelled_at is None:
            gang.cancelled_at = now
            self.in_use[gang.spec.offer.key] -= gang.spec.nodes
        for machine in gang.machines:
            machine.end(now)
        self._changes.put_nowait(gang.spec.name)

    def _engine_id(self) -> str:
        self._engine_ids += 1
        return f"fake-{self._engine_ids:05d}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        # machines outlive the request that starts them, and the lease under which it was made
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _spawn_call(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._answered)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._faults.append(error)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark the error as retrieved, in case the caller was cancelled
