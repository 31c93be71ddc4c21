"""Many jobs on an EC2 where every fifth call fails somehow: the production control plane on virtual
time.

boto3 is real; the clock jumps, so that calls are made in the loop itself, and handed to the
stand-in without sockets.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.ec2.bills import price_extras
from tests.ec2.cloud import Cloud, Life
from tests.ec2.direct import Direct
from tests.ec2.rules import Hours, allow_only
from tests.ec2.server import Front
from tests.sim.cloud_drill import Found

from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.job_service import JobIds
from cavvy.domain.events import Charge
from cavvy.domain.jobs import Attempt, AttemptOutcome, JobPhase, RunOrigin
from cavvy.domain.messages import AgentMessage, ClaimGranted, ClaimWait, HostFacts, MessageKind
from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, Scalar, SpotPolicy, TaskSpec
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.providers.aws import MANIFEST
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.aws.policy import make_policy
from cavvy.providers.aws.provider import AwsProvider
from cavvy.providers.base import AgentEndpoint, ProviderContext
from cavvy.providers.contract.memory_cloud import make_node_endpoint
from cavvy.providers.registry import check_settings
from cavvy.server.provider_services import StoredProviderState
from cavvy.store.open import MemoryStore

START = datetime(2030, 1, 1, tzinfo=UTC)
JOBS, FAULTS = 40, 0.2
WORK_S = 150.0
MINUTE = timedelta(minutes=1)
ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "for the stand-in only",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class World:
    """What moves by itself: the cloud's states, agents on the instances, interruptions."""

    def __init__(self, cloud: Cloud, random: Random) -> None:
        self.cloud, self.random = cloud, random
        self.control_plane: ControlPlane | None = None
        self.agents: dict[str, asyncio.Task[None]] = {}
        self.jobs: list[str] = []
        self.worked: Counter[tuple[str, int]] = Counter()

    async def move(self) -> None:
        while True:
            self.cloud.tick()
            for life in list(self.cloud.lives.values()):
                agent = self.agents.get(life.id)
                if agent is None and life.state == "running":
                    self.agents[life.id] = asyncio.create_task(self._work(life))
                elif agent is not None and not life.lives:
                    agent.cancel()
            await asyncio.sleep(5)

    async def _work(self, life: Life) -> None:
        """An agent: claims its rank, works, reports, and ends its machine."""
        assert self.control_plane is not None
        sessions, now, seq = self.control_plane.agents, self.cloud.hours.now, 0

        async def report(kind: MessageKind, **fields: Any) -> None:
            nonlocal seq
            seq += 1
            message = AgentMessage(seq=seq, at=now(), kind=kind, **fields)
            await sessions.messages(life.gang, life.index, life.id, [message])

        await asyncio.sleep(self.random.uniform(10, 40))
        while isinstance(
            answer := await sessions.claim(life.gang, life.index, life.id, "10.0.0.1", HostFacts()),
            ClaimWait,
        ):
            await asyncio.sleep(answer.after.total_seconds())
        if isinstance(answer, ClaimGranted):
            await report(MessageKind.RUNNING)
            if life.market == "spot" and self.random.random() < 0.3:
                await asyncio.sleep(self.random.uniform(1, WORK_S))
                left = self.cloud.interrupt(life) - now()
                await report(MessageKind.NOTICE, seconds=left.total_seconds(), source="EC2")
                await asyncio.sleep(20)
                await report(
                    MessageKind.EXITED, outcome=AttemptOutcome.PREEMPTED, reason="taken back"
                )
            else:
                await asyncio.sleep(WORK_S)
                self.worked[life.gang, life.index] += 1
                await report(MessageKind.EXITED, outcome=AttemptOutcome.SUCCEEDED, exit_code=0)
        self.cloud.shut_down_itself(life)


def make_task(number: int, random: Random) -> TaskSpec:
    spot = random.choice([SpotPolicy.AUTO, SpotPolicy.NEVER, SpotPolicy.ONLY])
    need = ResourceSpec(accelerators=(AcceleratorNeed(name="T4"),), spot=spot)
    return TaskSpec(
        name=f"job-{number}", run="true", nodes=random.choice([1, 1, 1, 2, 3]), resources=need
    )


async def play(
    cloud: Cloud, account: AwsAccount, settings: Mapping[str, Scalar], home: Path, random: Random
) -> tuple[MemoryStore, list[str]]:
    """All jobs from their submission to their end; the store that knows them, and their ids."""
    clock, store = VirtualClock(START), MemoryStore(make_id=lambda: "aws-gangs")
    context = ProviderContext(
        installation="aws-gangs",
        home=home,
        state=StoredProviderState(store=store, provider="aws"),
        settings=settings,
        node_endpoint=make_node_endpoint(),
        now=clock.now,
    )
    world = World(cloud, random)
    control_plane = world.control_plane = ControlPlane(
        store,
        {"aws": AwsProvider(MANIFEST, context, account)},
        clock,
        installation="aws-gangs",
        dependencies=ControlPlaneDependencies(
            agent_endpoint=lambda gang: AgentEndpoint(address="call", token=gang),
            open_secrets=no_secrets,
            storage=lambda job: "/s",
        ),
        ids=JobIds(clock, random.getrandbits),
    )
    await control_plane.start()
    moving = asyncio.create_task(world.move())
    for number in range(JOBS):
        await asyncio.sleep(random.expovariate(1 / 10))
        job = await control_plane.jobs.submit(
            make_task(number, random), RunOrigin(), "default", consented=True
        )
        world.jobs.append(job.id)
    for _ in range(48 * 60):
        await asyncio.sleep(60)
        if not await store.unfinished() and not cloud.left():
            break
    await control_plane.stop()
    moving.cancel()
    for agent in world.agents.values():
        agent.cancel()
    await asyncio.gather(moving, *world.agents.values(), return_exceptions=True)
    for agent in world.agents.values():
        if not agent.cancelled():
            agent.result()
    assert all(count == 1 for count in world.worked.values())
    return store, world.jobs


async def no_secrets(project: str, names: object) -> dict[str, str]:
    return {}


def check_lives(cloud: Cloud, gangs: Mapping[str, int]) -> None:
    """No gang was bought twice, or in part."""
    bought = Counter(life.gang for life in cloud.history)
    assert {gang: count for gang, count in bought.items() if count != gangs[gang]} == {}
    for gang in bought:
        assert sorted(life.index for life in cloud.of(gang)) == list(range(gangs[gang]))


def rates_of(cloud: Cloud) -> Mapping[tuple[str, str], HourlyRate]:
    return {(price.type, price.zone): parse_rate(price.usd) for price in cloud.rules.spot}


@pytest.mark.parametrize("seed", [1])
def test_a_hundred_gangs_with_faults(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ACCOUNT.items():
        monkeypatch.setenv(name, value)
    found = run_drill(seed, tmp_path)
    print(found)
    assert found.gangs >= 100
    assert sum(found.faults.values()) > found.gangs
    assert (found.left, found.doubled, found.inside) == (0, 0, found.gangs)


def run_drill(seed: int, home: Path) -> Found:
    """Play a drill and check it. The environment must have the variables of ACCOUNT."""
    random, faults = Random(seed), Counter[str]()

    def fault(service: str, action: str) -> str | None:
        if random.random() >= FAULTS:
            return None
        kind = random.choice(["throttle", "unavailable", "lose", "lose", "hang up"])
        faults[kind] += 1
        return kind

    async def scenario() -> tuple[Cloud, Mapping[str, int], Found]:
        loop = asyncio.get_running_loop()
        cloud = Cloud(Hours(lambda: START + timedelta(seconds=loop.time())))
        allow_only(cloud.rules, make_policy())
        zones = sorted({price.zone for price in cloud.rules.spot if price.type == "g4dn.xlarge"})
        cloud.rules.stock |= {("g4dn.xlarge", zone, "spot"): 3 for zone in zones}
        cloud.rules.stock |= {
            ("g4dn.xlarge", zone, "on-demand"): 5 for zone in cloud.rules.zones["us-east-1"]
        }
        cloud.rules.hidden = timedelta(seconds=8)
        table: dict[str, Scalar] = {
            "regions": "us-east-1",
            "endpoint": "http://127.0.0.1:1",
            "instances": "g4dn.xlarge",
        }
        cloud.rules.fault = fault
        account = Direct(check_settings(MANIFEST, table), Front(cloud))
        store, ids = await play(cloud, account, check_settings(MANIFEST, table), home, random)
        return cloud, *await check_jobs(cloud, store, ids)

    cloud, gangs, found = run_virtual(scenario())
    check_lives(cloud, gangs)
    bought = Counter(life.gang for life in cloud.history)
    found.granted, found.machines, found.requests = len(bought), bought.total(), len(cloud.calls)
    found.faults, found.left = faults, len(cloud.left())
    found.doubled = sum(max(0, count - gangs[gang]) for gang, count in bought.items())
    return found


async def check_jobs(
    cloud: Cloud, store: MemoryStore, ids: list[str]
) -> tuple[Mapping[str, int], Found]:
    """Every job is done, and charged for what its instances lived; how many nodes each gang was
    to have, and the bills.
    """
    gangs: dict[str, int] = {}
    found = Found()
    jobs = [await store.job(each) for each in ids]
    assert Counter(job.phase for job in jobs) == {JobPhase.DONE: JOBS}
    spot = rates_of(cloud)
    for job in jobs:
        whole, charges = 0, await store.charges(job.id)
        for attempt in await store.attempts(job.id):
            gangs[attempt.gang], exact = attempt.nodes, 0
            for life in cloud.of(attempt.gang):
                assert life.shut_at is not None
                rate = spot[life.type, life.zone] if life.market == "spot" else attempt.offer.rate
                began, ended = (
                    at.replace(microsecond=0) for at in (life.launched_at, life.shut_at)
                )
                exact += rate.over(max(MINUTE, ended - began)).micros
                exact += round(price_extras(cloud, life, began, ended))
            own = [charge for charge in charges if charge.attempt_id == attempt.id]
            note_bill(found, attempt, own, exact)
            whole += exact
        billed = sum(charge.amount.micros for charge in charges)
        assert abs(billed - whole) <= len(charges), (job.name, billed, whole)
    return gangs, found


def note_bill(found: Found, attempt: Attempt, charges: Sequence[Charge], exact: int) -> None:
    """Compare the bill of one attempt with the cost of its instances."""
    billed = sum(charge.amount.micros for charge in charges)
    more = attempt.unsure_bill.more.micros if attempt.unsure_bill else 0
    slack = len(charges)  # each charge is rounded once
    found.gangs += 1
    found.billed += billed
    found.unsure += more
    found.recounted += exact
    found.inside += billed - slack <= exact <= billed + more + slack
