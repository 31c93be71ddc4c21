"""The world of `big_day.py`, on virtual time: six places with their machines and faults, a database
that fails over, the front of the services, and the jobs of a day. Everything is drawn from a seed.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import TypeVar

from cavvy.capabilities.serving.bills import KeyWork, RequestWork
from cavvy.capabilities.serving.control.front import ProbeRecord
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.queued_calls import CallAnswer, QueuedCall
from cavvy.capabilities.serving.replicas import ServiceReplica
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.services import ReplicaCount, ServiceSpec
from cavvy.domain.tasks import (
    AcceleratorNeed,
    CheckpointPolicy,
    IndexRange,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    TaskSpec,
)
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, Manifest
from cavvy.providers.fake import MANIFEST
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import (
    CallOutcome,
    CloudScript,
    FaultScript,
    RecordScript,
    RemovalScript,
    TimeSpan,
)
from cavvy.store.base import StoreUnusable
from cavvy.store.drivers import DatabaseSession
from cavvy.store.open import MemoryStore

T = TypeVar("T")
CLOUDS = ("cloud-a", "cloud-b", "cloud-c", "cloud-d", "cloud-e")
OWN = "own"
BROKEN = CLOUDS[1]  # which answers no call for an hour of the day
CUT_OFF = 0.3  # part of its machines that fail when this hour begins
DOWN_S = 30.0  # until a killed server is started again
FAILOVER_FOR_S = 60.0
GPUS_OF_HOST = 8
# instance type, accelerator, how many, price an hour in micro-dollars, part of a cloud's nodes
TYPES = (
    ("h100x8", "H100", 8, 24_000_000, 0.3),
    ("a100x1", "A100", 1, 2_500_000, 0.3),
    ("l4x1", "L4", 1, 800_000, 0.4),
)
_SPOT_PRICE = 0.35
_LOSS_EVERY = 8.0  # hours of the day, mean time from the start of a spot machine to its loss
_FAULTY = 0.002  # part of all launches with a machine that fails


@dataclass(frozen=True)
class DayTimes:
    """When what happens, in seconds after midnight. A day of fewer hours is the same in less time:
    its jobs are shorter, and all comes sooner."""

    hours: float = 24.0

    def at(self, hour: float) -> float:
        """The seconds until this hour of a day with 24 hours."""
        return hour * 3600 * self.hours / 24

    @property
    def outage(self) -> TimeSpan:
        return TimeSpan(at_s=self.at(10), for_s=self.at(1))

    @property
    def restarts_s(self) -> tuple[float, ...]:
        return self.at(6), self.at(13), self.at(19)

    @property
    def failover_s(self) -> float:
        return self.at(15)


class DayStore(MemoryStore):
    """A database in memory. During a failover it answers nothing; of what was committed at its
    beginning, the answers are lost."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(make_id=lambda: "day")
        self._now = now
        self._fails_at: datetime | None = None
        self.refused = self.unanswered = 0

    def fail(self, until: datetime) -> None:
        """Answer nothing until then."""
        self._fails_at = until
        self.unanswered = -1  # the next write is committed, but its answer is lost

    async def _read(self, work: Callable[[DatabaseSession], T]) -> T:
        self._refuse()
        return await super()._read(work)

    async def _transact(self, work: Callable[[DatabaseSession], T]) -> T:
        if self.unanswered < 0:
            self.unanswered = 1
            await super()._transact(work)
            raise StoreUnusable("the database has closed the connection")
        self._refuse()
        return await super()._transact(work)

    def _refuse(self) -> None:
        if self._fails_at is not None and self._now() < self._fails_at:
            self.refused += 1
            raise StoreUnusable("the database cannot be reached")

    def rows(self, sql: str) -> list[tuple[object, ...]]:
        """The rows of a statement, as they are stored; also during a failover."""
        return self._session.run(sql).fetchall()


class DayCloud(FakeCloud):
    """A place of the day, whose launches fail and whose machines are lost at random."""

    def __init__(
        self,
        manifest: Manifest,
        script: CloudScript,
        now: Callable[[], datetime],
        seed: int,
        times: DayTimes,
    ) -> None:
        super().__init__(manifest, script, now)
        self._random, self._loss_s = Random(seed), times.at(_LOSS_EVERY)
        self.lost = 0  # machines that the outage has taken

    def _fault_script(self, gang: GangSpec) -> FaultScript:
        random, drawn = self._random, self._random.random()
        if drawn < 0.02:
            return FaultScript(reply=CallOutcome.NO_CAPACITY)
        reply = CallOutcome.LOST if drawn < 0.03 else CallOutcome.OK
        if drawn > 0.99:
            return FaultScript(reply=CallOutcome.TRY_AGAIN)
        spot = gang.offer.purchase is Purchase.SPOT
        fails = random.random() < _FAULTY
        return FaultScript(
            reply=reply,
            boot_s=random.uniform(5, 15) if gang.offer.shared else random.uniform(30, 150),
            preempted_after_s=random.expovariate(1 / self._loss_s) if spot else None,
            notice_s=random.choice((0, 30, 120)) if spot else 0.0,
            lost_rank=random.randrange(gang.nodes) if fails else None,
            lost_after_s=random.uniform(60, 3600),
        )

    def cut(self, part: float) -> None:
        """Let this part of all machines fail."""
        for gang in self._listed:
            for machine in gang.machines:
                if machine.ended_at is None and self._random.random() < part:
                    machine.end(self._now())
                    gang.reason = gang.reason or "the zone has lost its power"
                    self.lost += 1
                    self._changes.put_nowait(gang.spec.name)


def make_clouds(
    nodes: int, now: Callable[[], datetime], seed: int, times: DayTimes
) -> dict[str, DayCloud]:
    """Five clouds and a hall with own hosts, which have this many nodes together."""
    each = nodes // 6
    clouds = {}
    for number, name in enumerate((*CLOUDS, OWN)):
        manifest = replace(MANIFEST, name=name, title=name)
        if name == OWN:
            script = _own_script(nodes - 5 * each)
        else:
            storms = (times.outage,) if name == BROKEN else ()
            script = replace(_cloud_script(name, each, number), storms=storms)
        clouds[name] = DayCloud(manifest, script, now, seed * 10 + number, times)
    return clouds


def _cloud_script(name: str, nodes: int, number: int) -> CloudScript:
    offers = [
        Offer(
            provider=name,
            region=f"{name}-1",
            instance_type=instance,
            accelerator=accelerator,
            accelerator_count=count,
            accelerator_memory_mib=81_920,
            vcpus=count * 16,
            memory_mib=count * 131_072,
            purchase=purchase,
            rate=HourlyRate(round(price * (1 + number / 50) * ratio)),
            minimum_charge=timedelta(seconds=60),
            capacity=_count_capacity(nodes, part),
        )
        for instance, accelerator, count, price, part in TYPES
        for purchase, ratio in ((Purchase.ON_DEMAND, 1.0), (Purchase.SPOT, _SPOT_PRICE))
    ]
    return CloudScript(
        offers=tuple(offers),
        removal=RemovalScript(takes_s=20),
        records=RecordScript(remembers_s=3600),
    )


def _count_capacity(nodes: int, part: float) -> int:
    """How many nodes a cloud has of a type at one price, if it has so many nodes in all."""
    return max(4, round(nodes * part / 2))


def _own_script(count: int) -> CloudScript:
    hosts = [
        Host(
            name=f"{OWN}/h{number}",
            group=f"{OWN}/hall",
            cpus=128,
            memory_mib=1_000_000,
            devices=tuple(f"h{number}-{gpu}" for gpu in range(GPUS_OF_HOST)),
        )
        for number in range(count)
    ]
    # for single nodes, each host has its own offers; gangs get whole hosts of the group
    offers = [_own_offer(f"h{number}", gpus) for number in range(count) for gpus in (1, 2)]
    return CloudScript(
        offers=(*offers, _own_offer(None, GPUS_OF_HOST)),
        hosts=tuple(hosts),
        removal=RemovalScript(takes_s=1),
        records=RecordScript(remembers_s=3600),
    )


def _own_offer(host: str | None, gpus: int) -> Offer:
    return Offer(
        provider=OWN,
        region="hall",
        zone=host,
        instance_type="h100",
        accelerator="H100",
        accelerator_count=gpus,
        accelerator_memory_mib=81_920,
        vcpus=gpus * 12,
        memory_mib=gpus * 100_000,
        rate=HourlyRate(1_000_000 * gpus),
        shared=True,
        owned=True,
    )


@dataclass
class DayFront:
    """What the services have in place of a gateway: replicas that answer as soon as they run, and
    requests whose number follows the time of day."""

    now: Callable[[], datetime]
    start: datetime
    day_s: float
    running: dict[str, Sequence[str]] = field(default_factory=dict)

    def find_port(self) -> int:
        return 8000

    def locate(self, service: StoredService) -> str:
        return f"http://gateway.example.com/{service.name}/"

    def find_problem(self) -> str:
        return ""

    def permits(self, host: str) -> bool:
        return True

    def watch(
        self, service: StoredService, replicas: Sequence[ServiceReplica], *, owns: bool = True
    ) -> None:
        self.running[service.id] = [each.id for each in replicas]

    def probe(self, replica_id: str) -> ProbeRecord:
        return ProbeRecord(answers=any(replica_id in each for each in self.running.values()))

    def list_joined(self, router_id: str) -> frozenset[str]:
        return frozenset()

    async def publish(self, service: StoredService, replicas: Sequence[ServiceReplica]) -> None:
        return

    async def await_published(self, service: StoredService, timeout_s: float) -> None:
        return

    async def withdraw(self, service: StoredService) -> None:
        self.running.pop(service.id, None)

    async def read_traffic(self, service: StoredService) -> ServiceTraffic | None:
        """Requests of half a second, between 0.4 and 4 at the same time."""
        at_s = (self.now() - self.start).total_seconds()
        count = self._count(at_s)
        per_s = 0.8 + 3.6 * (1 - math.cos(2 * math.pi * at_s / self.day_s))
        replicas = self.running.get(service.id, ())
        return ServiceTraffic(
            at_s=at_s,
            arrivals=int(count),
            started=int(count),
            answered=int(count),
            service_s=0.5 * count,
            in_flight=round(per_s * 0.5),
            in_flight_s=0.5 * count,
            per_s=per_s,
            replicas=dict.fromkeys(replicas, 1),
            process="day",
        )

    def _count(self, at_s: float) -> float:
        """All requests of a service until now: the integral of their rate."""
        turn = 2 * math.pi / self.day_s
        return 4.4 * at_s - 3.6 / turn * math.sin(turn * at_s)

    async def read_work(self, service: StoredService) -> RequestWork | None:
        """The requests of each replica, as if all had run since midnight."""
        at_s = (self.now() - self.start).total_seconds()
        requests = int(self._count(at_s))
        work = KeyWork(requests=requests, work_us=requests * 500_000)
        return {"day": {each: {"": work} for each in self.running.get(service.id, ())}}

    async def call(
        self, service: StoredService, call: QueuedCall, body: bytes, timeout: timedelta
    ) -> CallAnswer:
        raise NotImplementedError("no calls are queued in this world")

    async def run(
        self, published: Sequence[StoredService], wake: Callable[[StoredService], None]
    ) -> None:
        await asyncio.Event().wait()


@dataclass(frozen=True)
class Arrival:
    """A task that is submitted `at_s` seconds after midnight, and what must come of it."""

    at_s: float
    task: TaskSpec
    jobs: int = 1
    fails: bool = False  # whether the task's program ends with an error


def make_services(count: int) -> Iterator[TaskSpec]:
    for number in range(count):
        yield TaskSpec(
            name=f"assistant-{number}",
            project=f"team-{number % 20}",
            run="serve",
            env={"FAKE_RUN_S": "1e9"},
            resources=_need("L4", 1, SpotPolicy.NEVER),
            service=ServiceSpec(replicas=ReplicaCount(least=1, most=6)),
        )


def make_arrivals(jobs: int, nodes: int, seed: int, times: DayTimes) -> list[Arrival]:
    """The jobs of a day: single jobs, arrays, gangs, and long jobs on spot machines. Most come in
    the working hours."""
    random, left, found = Random(seed), jobs, []
    most = _count_capacity(nodes // 6, TYPES[0][4])
    while left > 0:
        at_s = times.at(_draw_hour(random))
        drawn, number = random.random(), len(found)
        if drawn < 0.008:
            size = min(left, max(2, jobs // 5), random.choice((20, 100, 400)))
            arrival = Arrival(at_s, _make_array(random, number, size, times), size)
        else:
            arrival = Arrival(at_s, *_make_single(random, number, most, times))
        left -= arrival.jobs
        found.append(arrival)
    return sorted(found, key=lambda each: each.at_s)


def _draw_hour(random: Random) -> float:
    while True:
        hour = random.uniform(0, 24)
        if random.random() < 0.35 + 0.65 * math.sin(math.pi * hour / 24) ** 2:
            return hour


def _need(name: str, count: int, spot: SpotPolicy) -> ResourceSpec:
    return ResourceSpec(accelerators=(AcceleratorNeed(name=name, count_min=count),), spot=spot)


def _make_array(random: Random, number: int, size: int, times: DayTimes) -> TaskSpec:
    return TaskSpec(
        name=f"sweep-{number}",
        project=f"team-{random.randrange(20)}",
        run="sweep",
        array=(IndexRange(0, size - 1),),
        env={"FAKE_RUN_S": f"{times.at(random.uniform(1 / 6, 2 / 3)):.0f}"},
        resources=_need(*random.choice((("L4", 1), ("A100", 1))), SpotPolicy.AUTO),
        retry=RetryPolicy(node=None),
    )


def _make_single(
    random: Random, number: int, most: int, times: DayTimes
) -> tuple[TaskSpec, int, bool]:
    """A single job, or a gang of at most so many nodes. Returns how many jobs that is, and whether
    its program ends with an error."""
    drawn = random.random()
    fails = random.random() < 0.01
    saves = CheckpointPolicy(path="saved", every=timedelta(seconds=times.at(0.25)))
    changes: Mapping[str, object] = {}
    if drawn < 0.84:  # small
        kind = random.choice((("L4", 1), ("A100", 1), ("H100", 1), ("H100", 2)))
        hours, needs = random.lognormvariate(-1.4, 0.8), _need(*kind, SpotPolicy.NEVER)
    elif drawn < 0.95:  # long, on spot machines
        hours, needs = random.uniform(2, 6), _need("A100", 1, SpotPolicy.AUTO)
        changes = {"checkpoint": saves}
    else:  # a gang
        hours, needs = random.uniform(1, 3), _need("H100", 8, SpotPolicy.AUTO)
        changes = {"nodes": min(most, random.choice((2, 4, 4, 8))), "checkpoint": saves}
    env = {"FAKE_RUN_S": f"{times.at(hours):.0f}"} | ({"FAKE_EXIT_CODE": "1"} if fails else {})
    task = TaskSpec(
        name=f"train-{number}",
        project=f"team-{random.randrange(20)}",
        run="train",
        env=env,
        resources=needs,
        retry=RetryPolicy(node=None),
    )
    return replace(task, **changes), 1, fails  # type: ignore[arg-type]
