"""The queue and the capacity as estimates of starts need them (`control.decide.queue_state`)."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cavvy.control.decide.placement import MarketSnapshot
from cavvy.control.decide.queue_state import GangRow, WaitingRow, make_queue_state
from cavvy.control.fair_queue import OrderedQueue
from cavvy.control.start_estimator import DatedEstimate, StartEstimator
from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.elastic import NodeRange
from cavvy.domain.jobs import Attempt, AttemptPhase, JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.shares import EndedGang, HeldShare, QueueRow
from cavvy.domain.tasks import (
    AcceleratorNeed,
    JobLimits,
    ResourceSpec,
    TaskSpec,
    TopologyNeed,
    Volume,
    VolumeKind,
)
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.candidates import OfferedMarket
from cavvy.scheduler.shares import ShareBook, ShareLimits, ShareRule
from cavvy.scheduler.start_estimates import HeldPart, LaneDemand

NOW = datetime(2030, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def offer(zone: str | None, provider: str = "own", **fields: object) -> Offer:
    return Offer(
        **{  # type: ignore[arg-type]  # the fields of an offer
            "provider": provider,
            "region": "hall",
            "zone": zone,
            "instance_type": "A100",
            "accelerator_count": 4,
            "rate": HourlyRate(0),
            "as_of": NOW,
            "shared": True,
            **fields,
        }
    )


def job(name: str, nodes: int = 1) -> JobRecord:
    gpus = ResourceSpec(accelerators=(AcceleratorNeed(name="A100", count_min=4),))
    limits = JobLimits(duration=30 * MINUTE)
    task = TaskSpec(name=name, run="true", nodes=nodes, resources=gpus, limits=limits)
    return JobRecord(id=name, project="p", name=name, task=task, submitted_at=NOW, since=NOW)


def waits(job: JobRecord, *offers: Offer) -> WaitingRow:
    row = QueueRow(job.id, job.project, job.user, 4.0)
    return WaitingRow(row=row, job=job, suited=[(job.task, offers)])


def runs(job: JobRecord, offer: Offer, **fields: object) -> GangRow:
    attempt = Attempt(
        **{  # type: ignore[arg-type]  # the fields of an attempt
            "id": f"{job.id}-1",
            "job_id": job.id,
            "project": "p",
            "number": 1,
            "gang": job.id,
            "offer": offer,
            "nodes": job.task.nodes,
            "phase": AttemptPhase.RUNNING,
            "created_at": NOW - 5 * MINUTE,
            "since": NOW,
            **fields,
        }
    )
    return GangRow(attempt=attempt, job=job)


def test_hosts_that_suit_the_same_jobs_are_one_lane() -> None:
    hosts = [
        Host(name=f"own/{name}", cpus=8, memory_mib=99, devices=tuple("abcdefgh"), group="own/hall")
        for name in ("h1", "h2", "h3")
    ]
    held = Allocation(
        host="own/h1", gang="r", rank=0, project="p", cpus=2, memory_mib=9, devices=tuple("abcd")
    )
    waiting = [
        waits(job("any"), offer("h1"), offer("h2"), offer("h3")),
        waits(job("third"), offer("h3")),
        waits(job("both", 2), offer(None)),
    ]
    snapshot = MarketSnapshot(market=OfferedMarket(offers=[], hosts=hosts), as_of=NOW)
    book = ShareBook(rules={"p": ShareRule(limit=8)}, held=[HeldShare("p", "", 4, 1)])
    state = make_queue_state(
        waiting, [runs(job("r"), offer("h1"))], snapshot, [held], ShareLimits(book), {}, NOW
    )
    assert state.lanes == [[(4.0, 6.0, 90.0), (8.0, 8.0, 99.0)], [(8.0, 8.0, 99.0)]]
    need = (4.0, 1.0, 0.0)
    assert [{*each.demands} for each in state.line] == [
        {LaneDemand(0, 1, need), LaneDemand(1, 1, need)},
        {LaneDemand(1, 1, need)},
        {LaneDemand(0, 2, need), LaneDemand(1, 2, need)},
    ]
    (gang,) = state.running
    assert gang.parts == [HeldPart(0, 0, (4.0, 2.0, 9.0))]
    assert (gang.planned.age_s, gang.planned.most_s) == (300, 1800)
    assert [*state.limits.values()] == [*gang.limits.values()] == [4.0]
    assert [*state.line[0].limits.values()] == [4.0]


@pytest.mark.parametrize(("capacity", "free"), [(3, 12.0), (0, 0.0), (None, float("inf"))])
def test_nodes_of_clouds_are_counted_in_pools(capacity: int | None, free: float) -> None:
    sold = offer("z", "cloud", shared=False, capacity=capacity)
    rows = [waits(job("a", 2), sold), waits(job("new"), offer("z", "other", shared=False))]
    snapshot = MarketSnapshot(market=OfferedMarket(offers=[sold]), as_of=NOW)
    kept = {"phase": AttemptPhase.KEPT, "kept_until": NOW + MINUTE}
    gangs = [runs(job("r"), sold), runs(job("k"), sold, **kept)]
    limits, boots = ShareLimits(ShareBook()), {"cloud": [60.0]}
    state = make_queue_state(rows, gangs, snapshot, [], limits, boots, NOW)
    assert state.lanes == [[(free, 0.0, 0.0)]]
    known, unknown = state.line
    assert known.demands == (LaneDemand(0, 1, (8.0, 0.0, 0.0)),)
    assert known.boots_s == [60.0]
    assert (unknown.demands, unknown.boots_s) == ((), ())  # nobody knows how long its nodes boot
    assert [gang.parts for gang in state.running] == [[HeldPart(0, 0, (4.0, 0.0, 0.0))]] * 2
    assert [gang.left_s for gang in state.running] == [None, 60]


def test_a_job_avoids_where_it_failed_until_the_cooldown_ends() -> None:
    hosts = [
        Host(name=f"own/{name}", cpus=8, memory_mib=99, devices=tuple("abcdefgh"), group="own/hall")
        for name in ("h1", "h2")
    ]
    first, sold = offer("h1"), offer("z", "cloud", shared=False)
    avoid = {first.key: NOW + MINUTE, sold.key: NOW + 2 * MINUTE, "own/h2": NOW + 3 * MINUTE}
    past = {first.key: NOW}
    waiting = [
        waits(replace(job("free"), avoid=past), first),
        waits(replace(job("only"), avoid=avoid), first),
        waits(replace(job("both"), avoid=avoid), first, sold),
        waits(replace(job("other"), avoid={first.key: NOW + MINUTE}), first, offer("h2")),
        waits(replace(job("host"), avoid={"own/h2": NOW + MINUTE}), offer("h2")),
    ]
    snapshot = MarketSnapshot(market=OfferedMarket(offers=[sold], hosts=hosts), as_of=NOW)
    limits, boots = ShareLimits(ShareBook()), {"cloud": [60.0]}
    line = make_queue_state(waiting, [], snapshot, [], limits, boots, NOW).line
    assert [each.rests_s for each in line] == [0, 60, 60, 0, 60]
    assert [len(each.demands) for each in line] == [1, 1, 2, 1, 1]
    assert line[3].demands == line[4].demands != line[0].demands == line[1].demands


def test_the_end_of_a_running_gang_is_that_of_gangs_like_it() -> None:
    async def ended_gangs(limit: int) -> list[EndedGang]:
        return [
            EndedGang(
                attempt_id=f"old-{number}",
                project="p",
                user="",
                name=f"train-{number}",
                provider="own",
                held=20 * MINUTE,
                boot=MINUTE,
            )
            for number in range(9)
        ]

    store = SimpleNamespace(queue=SimpleNamespace(ended_gangs=ended_gangs))
    estimator = StartEstimator(cast(Any, store), cast(Any, None), cast(Any, None))
    began = {"running_at": NOW - 4 * MINUTE}
    replica = job("replica")
    replica = replace(replica, task=replace(replica.task, tags={SERVICE_TAG: "s"}))
    gangs = [
        runs(job("train-10"), offer("h1"), **began),
        runs(job("boots"), offer("h1")),
        runs(replica, offer("h1"), **began),
    ]
    ends = asyncio.run(estimator.estimate_ends(gangs, NOW))
    assert ends == {"train-10-1": NOW + 15 * MINUTE}


async def _give(value: object) -> object:
    return value


class Queue:
    """An estimator for these waiting jobs and so many free hosts, and how often it has computed."""

    def __init__(self, hosts: int, *jobs: JobRecord) -> None:
        names = [f"h{number}" for number in range(hosts)]
        free = [
            Host(name=f"own/{name}", cpus=4, memory_mib=99, devices=tuple("abcd"), group="own/hall")
            for name in names
        ]
        gpus = {"accelerator": "A100", "accelerator_memory_mib": 40960, "vcpus": 4}
        offers = [offer(None, **gpus), *(offer(name, **gpus, memory_mib=99) for name in names)]
        market = OfferedMarket(offers=offers, hosts=free, blind=("own",))
        self.snapshot = MarketSnapshot(market=market, as_of=NOW)
        self.jobs, self.computed, self.written = jobs, 0, 0
        self.meanwhile = 0  # what is written after the next read of the line
        store = SimpleNamespace(
            open_attempts=lambda: _give([]),
            live_versions=lambda: _give({}),
            find_jobs=lambda ids: _give(jobs),
            allocations=lambda: _give([]),
            queue=SimpleNamespace(
                ended_gangs=self._read_ended, mark=lambda now: _give(self.written)
            ),
            maintenance=SimpleNamespace(reservations=lambda: _give([])),
        )
        pool = SimpleNamespace(market=lambda age: _give(self.snapshot), objections=lambda *_: ())
        self.estimator = StartEstimator(cast(Any, store), cast(Any, pool), cast(Any, self))

    async def _read_ended(self, limit: int) -> list[EndedGang]:
        self.computed += 1
        return []

    async def line_up(self, job_ids: Sequence[str], now: datetime) -> OrderedQueue:
        rows = [QueueRow(each.id, each.project, each.user, 4.0) for each in self.jobs]
        line = OrderedQueue(rows, ShareBook(), NOW, self.written)
        self.written, self.meanwhile = self.written + self.meanwhile, 0
        return line

    def ask(self, *job_ids: str, after: timedelta = timedelta(0)) -> Mapping[str, DatedEstimate]:
        return asyncio.run(self.estimator.estimate(job_ids, NOW + after))


def start_at_once(hosts: int, *jobs: JobRecord) -> str:
    """Return which of these waiting jobs are expected to start now, if so many hosts are free."""
    found = Queue(hosts, *jobs).ask(*(each.id for each in jobs))
    return " ".join(name for name, each in found.items() if each.likely == NOW)


def test_all_requests_read_the_same_estimates_until_something_changes() -> None:
    jobs = [job(f"j{number}") for number in range(200)]
    queue, later = Queue(200, *jobs), 4 * timedelta(seconds=1)
    assert {*queue.ask("j0"), *queue.ask("j1", "gone"), *queue.ask("j63", after=later)} == {
        "j0",
        "j1",
        "j63",
    }
    assert queue.computed == 1
    assert "j199" not in queue.ask("j199")  # a moment later, so many are not estimated again
    assert "j199" in queue.ask("j199", after=later)
    assert queue.computed == 2
    queue.written = 1
    assert queue.ask("j0", after=later + MINUTE / 60)
    assert queue.computed == 2
    assert queue.ask("j0", after=2 * later)
    assert queue.computed == 3
    queue.ask("j0", after=2 * later + MINUTE / 2)  # gangs have become older
    assert queue.computed == 4


def test_estimates_do_not_hide_what_was_written_after_their_line_was_read() -> None:
    queue = Queue(1, job("a"))
    queue.meanwhile = 1  # such as another limit of the project
    queue.ask("a")
    queue.ask("a", after=MINUTE / 60)
    assert queue.computed == 2
    queue.ask("a", after=MINUTE / 30)
    assert queue.computed == 2


def stretch(job: JobRecord, most: int, resized: int | None = None) -> JobRecord:
    """Let the job have up to this many nodes."""
    sizes = NodeRange(least=job.task.nodes, most=most)
    return replace(job, task=replace(job.task, elastic=sizes), most_nodes=resized)


def test_the_sizes_of_an_elastic_job_are_its_own() -> None:
    """A job that takes two of the hosts leaves none for the last one."""
    plain, last = job("plain"), job("last")
    elastic, resized = stretch(job("elastic"), 2), stretch(job("resized"), 2, 1)
    assert start_at_once(2, plain, last) == "plain last"
    assert start_at_once(2, elastic, last) == "elastic"
    assert start_at_once(3, plain, elastic, last) == "plain elastic"
    assert start_at_once(3, resized, elastic, last) == "resized elastic"
    assert start_at_once(3, elastic, plain, last) == "elastic plain"
    assert start_at_once(2, plain, elastic) == "plain elastic"


def test_jobs_of_the_same_size_may_need_other_hosts() -> None:
    """The hosts have no label `rack`, and nobody knows where the volume is."""
    plain, near, bound = job("plain", 2), job("near", 2), job("bound", 2)
    near = replace(near, task=replace(near.task, topology=TopologyNeed(same="rack")))
    data = Volume(path="/data", source="data", kind=VolumeKind.NAMED, keep=True)
    bound = replace(bound, task=replace(bound.task, volumes=(data,)))
    assert start_at_once(6, plain, near, bound) == "plain"
