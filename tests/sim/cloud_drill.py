"""Many jobs on the stand-ins of all clouds at once, where every fifth request fails: the production
control plane on virtual time, with agents that are played.

The requests are real HTTP or gRPC. The loop makes each of them itself and waits for the reply, so
that no virtual time passes meanwhile, and a run with the same seed makes the same choices.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

from tests.contract.gcp_stand_in import GcpStandIn
from tests.sim.drill_clouds import (
    FAULTS,
    GPUS,
    SPOT,
    START,
    AtOnce,
    DrillCloud,
    close_places,
    make_places,
    without_threads,
)
from tests.sim.machine_lives import (
    count_overlaps,
    names_gang,
    read_life,
    read_name,
    rounding_of,
)

from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.job_service import JobIds
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, AttemptOutcome, JobPhase, RunOrigin
from cavvy.domain.messages import AgentMessage, ClaimGranted, ClaimWait, HostFacts, MessageKind
from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, SpotPolicy, TaskSpec
from cavvy.providers.base import AgentEndpoint, Feature
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_cloud import RestPlace
from cavvy.providers.contract.rest_stand_in import RestRequest, RestServer
from cavvy.providers.vm.cloud import CloudFault, MachineState
from cavvy.providers.vm.provider import VmProvider
from cavvy.store.open import MemoryStore

INSTALLATION = "drill"
WORK_S = 150.0
# Faults of any request, and whether it takes effect before it fails.
_REQUEST_FAULTS = {
    "429": (CloudFault(429, "too-many-requests"), False),
    "500": (CloudFault(500, "internal-error"), False),
    "503 after the effect": (CloudFault(503, "unavailable"), True),
    "no reply": (CloudFault(0, "no reply"), False),
    "no reply after the effect": (CloudFault(0, "no reply"), True),
}


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
    rolled_back: int = 0  # machines that were never billed as nodes of their gang
    inside: int = 0  # gangs whose recount is within the range that Cavvy states


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

    def _make_task(self, number: int) -> TaskSpec:
        name = self.random.choice(sorted(self.places))
        spot = SpotPolicy.ONLY if name in SPOT and self.random.random() < 0.5 else SpotPolicy.NEVER
        alone = Feature.GANG in self.places[name].manifest.unsupported
        gpus = (AcceleratorNeed(name=GPUS[name]),) if name in GPUS else ()
        return TaskSpec(
            name=f"job-{number}",
            run="true",
            nodes=1 if alone else self.random.choice([1, 1, 2, 3]),
            resources=ResourceSpec(accelerators=gpus, spot=spot, providers=(name,)),
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
        halts = MachineState.STOPPED in place.api.states
        if halts and self.random.random() < 0.5:  # others wait until they are deleted
            place.cloud.change(machine.id, off=True)
            place.cloud.off_at[machine.id] = place.cloud.time  # type: ignore[attr-defined]

    async def _find_gang(self, written: str) -> str:
        """The gang whose name, or the hash of whose name, is in the name of a machine."""
        for job in self.jobs:
            for attempt in await self.store.attempts(job):
                if names_gang(written, attempt.gang):
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
        """Compare the charges of an attempt with the lives of its machines, those of failed
        launches included.
        """
        found, cloud = self.found[attempt.offer.provider], self.places[attempt.offer.provider].cloud
        assert isinstance(cloud, DrillCloud)
        machines = [e for e in cloud.machines if names_gang(read_name(e)[0], attempt.gang)]
        for rank in range(attempt.nodes):
            found.doubled += count_overlaps([e for e in machines if read_name(e)[1] == rank])
        billed = sum(charge.amount.micros for charge in charges)
        more = attempt.unsure_bill.more.micros if attempt.unsure_bill else 0
        lives = [read_life(cloud, each) for each in machines]
        recounted = sum(life.cost(attempt.offer) for life in lives)
        found.gangs += 1
        nodes = {charge.rank for charge in charges if charge.kind is ChargeKind.NODE}
        found.granted += bool(nodes)
        found.rolled_back += len(machines) - len(nodes)
        found.billed += billed
        found.unsure += more
        found.recounted += recounted
        # each charge is rounded once
        slack = rounding_of(attempt.offer, len(machines)) + len(charges) + len(machines)
        if billed - slack <= recounted <= billed + more + slack:
            found.inside += 1
            return
        shown = [f"{each.kind} {each.rank} {each.since} {each.until}" for each in charges]
        self.problems.append(
            f"{attempt.gang} costs {recounted}, and its bill is {billed} to {billed + more} "
            f"({attempt.unsure_bill}): {machines} {lives} {shown}"
        )


def run_drill(seed: int, gangs: int, home: Path) -> Drill:
    """Play a drill and check it; the bill and the faults are in `found`."""
    server = RestServer()
    with without_threads():
        drill = Drill(seed, make_places(server, home))

        async def scenario() -> None:
            await drill.play(gangs)
            await drill.check()

        try:
            run_virtual(scenario())
        finally:
            close_places(drill.places)
            server.close()
    return drill


def _make_provider(place: RestPlace) -> VmProvider:
    provider = place.provider(INSTALLATION)
    provider.relay = asyncio.Event().wait  # type: ignore[method-assign]  # agents are played
    return provider


async def _no_secrets(project: str, names: object) -> dict[str, str]:
    return {}
