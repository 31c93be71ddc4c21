"""Many jobs on the stand-ins of all clouds at once, where every fifth request fails: the production
control plane on virtual time, with agents that are played.

The requests are real HTTP. The loop makes each of them itself and waits for the reply, so that no
virtual time passes meanwhile, and a run with the same seed makes the same choices.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from tests.contract.azure_stand_in import AzureStandIn
from tests.contract.digitalocean_stand_in import DigitalOceanStandIn
from tests.contract.gcp_stand_in import GcpStandIn
from tests.contract.hyperstack_stand_in import HyperstackStandIn
from tests.contract.lambda_stand_in import LambdaStandIn
from tests.contract.rest_cloud import RestPlace
from tests.contract.rest_stand_in import RestRequest, RestServer, RestStandIn
from tests.contract.runpod_stand_in import RunpodStandIn
from tests.contract.test_provider_azure import AzurePlace
from tests.contract.test_provider_gcp import GcpPlace
from tests.contract.verda_stand_in import VerdaStandIn
from tests.contract.vm_cloud import MemoryCloud, Rented
from tests.contract.vultr_stand_in import VultrStandIn

from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.job_service import JobIds
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, AttemptOutcome, JobPhase, RunOrigin
from cavvy.domain.messages import AgentMessage, ClaimGranted, ClaimWait, HostFacts, MessageKind
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import AcceleratorNeed, Resources, SpotPolicy, Task
from cavvy.providers import (
    azure,
    digitalocean,
    hyperstack,
    lambda_cloud,
    runpod,
    verda,
    vultr,
)
from cavvy.providers.azure import cloud as azure_cloud
from cavvy.providers.azure.cloud import AzureCloud
from cavvy.providers.base import AgentEndpoint
from cavvy.providers.contract import LaunchFault
from cavvy.providers.digitalocean.cloud import DigitalOceanCloud
from cavvy.providers.hyperstack.cloud import HyperstackCloud
from cavvy.providers.lambda_cloud.cloud import LambdaCloud
from cavvy.providers.runpod.cloud import RunpodCloud
from cavvy.providers.verda.cloud import VerdaCloud
from cavvy.providers.vm import rest
from cavvy.providers.vm.cloud import BillEnd, BillStart, CloudFault, CloudTraits
from cavvy.providers.vm.provider import VmProvider
from cavvy.providers.vm.records import GANG
from cavvy.providers.vultr.cloud import VultrCloud
from cavvy.store.memory import MemoryStore

START = datetime(2030, 1, 1, tzinfo=UTC)
INSTALLATION = "drill"
FAULTS = 0.2  # of all requests, and of all launches that are answered
WORK_S = 150.0
# Faults of any request, and whether it takes effect before it fails.
_REQUEST_FAULTS = {
    "429": (CloudFault(429, "too-many-requests"), False),
    "500": (CloudFault(500, "internal-error"), False),
    "503 after the effect": (CloudFault(503, "unavailable"), True),
    "no reply": (CloudFault(0, "no reply"), False),
    "no reply after the effect": (CloudFault(0, "no reply"), True),
}
# Faults of launches alone.
_LAUNCH_FAULTS = (LaunchFault.FULL, LaunchFault.FULL, LaunchFault.FULL, LaunchFault.REFUSED)


class AtOnce(ThreadPoolExecutor):
    """Makes each call in the caller's thread: virtual time has no threads."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            future.set_exception(error)
        return future


class DrillCloud(MemoryCloud):
    """A cloud on the loop's time, whose launches fail at random."""

    random = Random(0)

    def __init__(self, traits: CloudTraits) -> None:
        super().__init__(traits)
        self.faults: Counter[str] = Counter()
        self.off_at: dict[str, datetime] = {}  # by machine: when it shut itself down
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def time(self) -> datetime:
        return START + timedelta(seconds=self.loop.time() if self.loop is not None else 0)

    @time.setter
    def time(self, value: datetime) -> None:
        return  # the clock cannot be set

    def _take_fault(self, machines: int) -> LaunchFault | None:
        if self.loop is None or self.random.random() >= FAULTS:
            return None
        kind = self.random.choice(_LAUNCH_FAULTS)
        self.faults[kind.value] += 1
        return kind


class DrillPlace(RestPlace):
    make_cloud = DrillCloud


class DrillGcp(GcpPlace):
    make_cloud = DrillCloud


class DrillAzure(AzurePlace):
    make_cloud = DrillCloud


_PACKAGES: Mapping[str, tuple[Any, CloudTraits, type[RestStandIn]]] = {
    "lambda": (lambda_cloud, LambdaCloud.traits, LambdaStandIn),
    "runpod": (runpod, RunpodCloud.traits, RunpodStandIn),
    "digitalocean": (digitalocean, DigitalOceanCloud.traits, DigitalOceanStandIn),
    "hyperstack": (hyperstack, HyperstackCloud.traits, HyperstackStandIn),
    "verda": (verda, VerdaCloud.traits, VerdaStandIn),
    "vultr": (vultr, VultrCloud.traits, VultrStandIn),
}
_GPUS = {"gcp": "L4", "azure": "T4", "runpod": "A40", "lambda": "A10"}  # others: machines without
_SPOT = ("gcp", "azure")


def make_places(server: RestServer, home: Path) -> Mapping[str, RestPlace]:
    """An account at each cloud, by provider."""

    def folder(name: str) -> Path:
        (home / name).mkdir()
        return home / name

    places: dict[str, RestPlace] = {
        name: DrillPlace(package, traits, stand_in, server, folder(name))
        for name, (package, traits, stand_in) in _PACKAGES.items()
    }
    places["gcp"] = DrillGcp(server, folder("gcp"))
    places["azure"] = DrillAzure(azure, AzureCloud.traits, AzureStandIn, server, folder("azure"))
    return places


@contextmanager
def without_threads() -> Iterator[None]:
    """Calls of clouds are made in the loop, without pauses in real time."""
    before = rest.ThreadPoolExecutor, azure_cloud.ThreadPoolExecutor, rest._PAUSE_S
    rest.ThreadPoolExecutor = azure_cloud.ThreadPoolExecutor = AtOnce  # type: ignore[misc,attr-defined]
    rest._PAUSE_S = 0.0
    try:
        yield
    finally:
        rest.ThreadPoolExecutor, azure_cloud.ThreadPoolExecutor = before[:2]  # type: ignore[misc,attr-defined]
        rest._PAUSE_S = before[2]


@dataclass
class Found:
    """What a drill found at one cloud. Money is in micro-US-dollars."""

    gangs: int = 0
    granted: int = 0
    machines: int = 0
    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    left: int = 0
    doubled: int = 0  # machines that were started while another one had their rank
    billed: int = 0  # by Cavvy
    unsure: int = 0  # what Cavvy states as possible beyond that
    recounted: int = 0  # by the stand-in's records of machines
    rolled_back: int = 0  # machines of launches that failed, which are not in bills
    not_charged: int = 0  # what their cloud bills for them


class Drill:
    """One run with a number of gangs."""

    def __init__(self, seed: int, places: Mapping[str, RestPlace]) -> None:
        self.random, self.places = Random(seed), places
        self.found = {name: Found() for name in places}
        self.store = MemoryStore(make_id=lambda: INSTALLATION)
        self.control_plane: ControlPlane | None = None
        self.agents: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.worked: Counter[tuple[str, int]] = Counter()
        self.problems: list[str] = []
        self.jobs: list[str] = []
        self.phases: Counter[JobPhase] = Counter()
        self.reasons: list[str] = []  # of jobs that failed
        for name, place in places.items():
            place.api.page = 50
            place.api.fail = lambda request, name=name: self._fail(name, request)  # type: ignore[misc]

    def _fail(self, name: str, request: RestRequest) -> tuple[CloudFault, bool] | None:
        found = self.found[name]
        found.requests += 1
        if self.random.random() >= FAULTS:
            return None
        kind = self.random.choice(list(_REQUEST_FAULTS))
        found.faults[kind] += 1
        return _REQUEST_FAULTS[kind]

    async def play(self, gangs: int) -> None:
        """Submit jobs until this many gangs were requested, and wait for the end of all."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(AtOnce(1))
        clock, store = VirtualClock(START), self.store
        for place in self.places.values():
            place.cloud.loop, place.cloud.random = loop, self.random  # type: ignore[attr-defined]
        control_plane = self.control_plane = ControlPlane(
            store,
            {name: _make_provider(place) for name, place in self.places.items()},
            clock,
            installation=INSTALLATION,
            dependencies=ControlPlaneDependencies(
                agent_endpoint=lambda gang: AgentEndpoint(address="call", token=gang),
                open_secrets=_no_secrets,
                storage=lambda job: "/s",
            ),
            ids=JobIds(clock, self.random.getrandbits),
        )
        await control_plane.start()
        moving = asyncio.create_task(self._move())
        number = 0
        while sum([len(await store.attempts(job)) for job in self.jobs]) < gangs:
            await asyncio.sleep(self.random.expovariate(1 / 30))
            made = await control_plane.jobs.submit(
                self._make_task(number), RunOrigin(), "default", consented=True
            )
            self.jobs.append(made.id)
            number += 1
        await self._await_end(timedelta(hours=1))
        for job in [await store.job(each) for each in self.jobs]:  # such as those of refused offers
            await control_plane.jobs.stop("default", job.name)
        await self._await_end(timedelta(hours=4))
        await control_plane.stop()
        moving.cancel()
        for agent in self.agents.values():
            agent.cancel()
        ended = await asyncio.gather(moving, *self.agents.values(), return_exceptions=True)
        for each in ended:
            if isinstance(each, Exception):
                raise each

    async def _await_end(self, longest: timedelta) -> None:
        """Wait until all jobs have ended and no machine is left."""
        for _ in range(int(longest / timedelta(minutes=1))):
            await asyncio.sleep(60)
            busy = any(place.cloud.billed() for place in self.places.values())
            if not busy and not await self.store.unfinished():
                return

    def _make_task(self, number: int) -> Task:
        name = self.random.choice(sorted(self.places))
        spot = SpotPolicy.ONLY if name in _SPOT and self.random.random() < 0.5 else SpotPolicy.NEVER
        gpus = (AcceleratorNeed(name=_GPUS[name]),) if name in _GPUS else ()
        return Task(
            name=f"job-{number}",
            run="true",
            nodes=self.random.choice([1, 1, 2, 3]),
            resources=Resources(accelerators=gpus, spot=spot, providers=(name,)),
        )

    async def _move(self) -> None:
        """Start an agent on each machine that has booted; it ends with its machine."""
        while True:
            for name, place in self.places.items():
                cloud = place.cloud
                for each in cloud.machines:
                    agent, key = self.agents.get((name, each.id)), (name, each.id)
                    up = each.ended is None and not each.off
                    if agent is None and up and cloud.time - each.at >= cloud.boot_time:
                        self.agents[key] = asyncio.create_task(self._work(place, each))
                    elif agent is not None and not up:
                        agent.cancel()
            await asyncio.sleep(5)

    async def _work(self, place: RestPlace, machine: Rented) -> None:
        """An agent: claims its rank, works, and reports. Some machines are lost meanwhile."""
        assert self.control_plane is not None
        sessions, seq = self.control_plane.agents, 0
        written, rank = read_name(machine)
        gang = await self._find_gang(written)

        async def report(kind: MessageKind, **fields: Any) -> None:
            nonlocal seq
            seq += 1
            message = AgentMessage(seq=seq, at=place.cloud.time, kind=kind, **fields)
            await sessions.messages(gang, rank, machine.id, [message])

        await asyncio.sleep(self.random.uniform(10, 40))
        while isinstance(
            answer := await sessions.claim(gang, rank, machine.id, "10.0.0.1", HostFacts()),
            ClaimWait,
        ):
            await asyncio.sleep(max(5.0, answer.after.total_seconds()))
        if isinstance(answer, ClaimGranted):
            await report(MessageKind.RUNNING)
            if self.random.random() < 0.1:
                await asyncio.sleep(self.random.uniform(1, WORK_S))
                if isinstance(place.api, GcpStandIn):
                    place.api.preempted.add(machine.id)
                place.cloud.change(machine.id, ended=place.cloud.time)
                return
            await asyncio.sleep(WORK_S)
            self.worked[gang, rank] += 1
            await report(MessageKind.EXITED, outcome=AttemptOutcome.SUCCEEDED, exit_code=0)
        if self.random.random() < 0.5:  # others wait until they are deleted
            place.cloud.change(machine.id, off=True)
            place.cloud.off_at[machine.id] = place.cloud.time  # type: ignore[attr-defined]

    async def _find_gang(self, written: str) -> str:
        """The gang whose name, or the hash of whose name, is in the name of a machine."""
        for job in self.jobs:
            for attempt in await self.store.attempts(job):
                if written in (attempt.gang, hash_name(attempt.gang)):
                    return attempt.gang
        raise AssertionError(f"no job has the gang {written}")

    async def check(self) -> None:
        """Compare the bills with the stand-ins' records of machines."""
        for name, place in self.places.items():
            self.found[name].left = len(place.cloud.billed())
            self.found[name].machines = len(place.cloud.machines)
            self.found[name].faults += place.cloud.faults  # type: ignore[attr-defined]
            assert place.api.bugs == [], (name, place.api.bugs)
        for job in [await self.store.job(each) for each in self.jobs]:
            self.phases[job.phase] += 1
            if job.phase is JobPhase.FAILED:
                self.reasons.append(f"{job.name}: {job.phase}: {job.reason}")
            charges = await self.store.charges(job.id)
            for attempt in await self.store.attempts(job.id):
                own = [each for each in charges if each.attempt_id == attempt.id]
                self._compare(attempt, own)

    def _compare(self, attempt: Attempt, charges: Sequence[Charge]) -> None:
        """Compare the charges of an attempt with the lives of its machines."""
        found, cloud = self.found[attempt.offer.provider], self.places[attempt.offer.provider].cloud
        assert isinstance(cloud, DrillCloud)
        names = (attempt.gang, hash_name(attempt.gang))
        machines = [each for each in cloud.machines if read_name(each)[0] in names]
        charged = [each for each in charges if each.kind is ChargeKind.NODE]
        found.gangs += 1
        found.granted += bool(charged)
        found.billed += sum(charge.amount.micros for charge in charges)
        more = attempt.unseen_end.more.micros if attempt.unseen_end else 0
        found.unsure += more
        missing = 0
        for rank in range(attempt.nodes):
            own = [each for each in machines if read_name(each)[1] == rank]
            found.doubled += count_overlaps(own)
            for each in own:
                life = read_life(cloud, each)
                kept = [charge for charge in charged if charge.rank == rank and life.has(charge)]
                if not kept:
                    found.rolled_back += 1
                    found.not_charged += life.cost(attempt.offer)
                    continue
                found.recounted += life.cost(attempt.offer)
                if kept[0].since < life.first:
                    self.problems.append(f"wrong start of a charge: {each} {kept}")
                paid = sum(charge.amount.micros for charge in charges if charge.rank == rank)
                missing += max(0, life.cost(attempt.offer) - paid)
        if missing > more + len(charges):  # each charge is rounded once
            text = f"{missing} micro-dollars are missing: {attempt.gang} {machines} {charged}"
            self.problems.append(text)


@dataclass(frozen=True, kw_only=True)
class Life:
    """A machine's life by its cloud's records. It is billed from `begins` to `ends`; `first` is the
    second of its creation, which some APIs report.
    """

    first: datetime
    begins: datetime
    ends: datetime

    def has(self, charge: Charge) -> bool:
        """Whether a charge is for this machine."""
        return charge.since <= self.ends and self.first <= charge.until

    def cost(self, offer: Offer) -> int:
        """What the cloud bills for the machine, in micro-US-dollars."""
        if self.begins == self.ends:
            return 0
        return offer.rate.over(max(self.ends - self.begins, offer.minimum_charge)).micros


def read_life(cloud: DrillCloud, machine: Rented) -> Life:
    """A machine that has ended."""
    assert machine.ended is not None
    free = cloud.traits.bill_starts is BillStart.RUNNING
    begins = machine.at + (cloud.boot_time if free else timedelta(0))
    ends = machine.ended
    if cloud.traits.bill_ends is BillEnd.SHUTDOWN:
        ends = min(ends, cloud.off_at.get(machine.id, ends))
    first = machine.at.replace(microsecond=0)
    return Life(first=first, begins=min(begins, ends), ends=ends)


def read_name(machine: Rented) -> tuple[str, int]:
    """The gang and the rank of a machine, from its name and its tags."""
    head, _, rank, _ = machine.name.rsplit("-", 3)
    return machine.tags.get(GANG) or head.split("-", 2)[2], int(rank)


def hash_name(gang: str) -> str:
    """How a gang is called in the names of machines whose names must be short."""
    return hashlib.sha256(gang.encode()).hexdigest()[:20]


def run_drill(seed: int, gangs: int, home: Path) -> Drill:
    """Play a drill and check it; the bill and the faults are in `found`."""
    server = RestServer()
    with without_threads():
        drill = Drill(seed, make_places(server, home))

        async def scenario() -> None:
            await drill.play(gangs)
            await drill.check()

        run_virtual(scenario())
    server.close()
    return drill


def _make_provider(place: RestPlace) -> VmProvider:
    provider = place.provider(INSTALLATION)
    provider.relay = asyncio.Event().wait  # type: ignore[method-assign]  # agents are played
    return provider


def count_overlaps(machines: Sequence[Rented]) -> int:
    """How many of these machines were started while an earlier one lived."""
    ordered = sorted(machines, key=lambda each: each.at)
    return sum(
        any(other.ended is None or other.ended > each.at for other in ordered[:number])
        for number, each in enumerate(ordered)
    )


async def _no_secrets(project: str, names: object) -> dict[str, str]:
    return {}
