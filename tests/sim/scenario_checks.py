"""What must hold at the end of every scenario, checked against the made-up cloud's own books."""

from collections import Counter
from datetime import datetime
from itertools import pairwise

from cavvy.domain.events import ChargeKind
from cavvy.domain.jobs import JOB_ENDS, AttemptOutcome, AttemptPhase, JobPhase, StopCause
from cavvy.domain.units import HourlyRate
from cavvy.providers.fake.cloud import NodeLife
from cavvy.sim.scenario import JobTrace, ScenarioResult

Stretch = tuple[datetime, datetime, HourlyRate, ChargeKind]


def check_all(ending: ScenarioResult) -> None:
    told = "\n".join(tell(trace) for trace in ending.traces)
    assert ending.finished, f"not over at {ending.at}\n{told}"
    check_nothing_left(ending)
    check_nothing_bought_twice(ending)
    check_nothing_held_twice(ending)
    check_bills(ending)
    check_no_two_tries_at_once(ending)
    check_no_rank_works_twice(ending)
    for trace in ending.traces:
        check_end(trace)


def check_nothing_left(ending: ScenarioResult) -> None:
    assert [gang.spec.name for gang in ending.cloud.gang_list if gang.alive] == []
    assert [life.engine_id for life in ending.cloud.lives() if life.ended_at is None] == []


def check_nothing_bought_twice(ending: ScenarioResult) -> None:
    known = {attempt.gang: attempt for trace in ending.traces for attempt in trace.attempts}
    bought = Counter(gang.spec.name for gang in ending.cloud.gang_list)
    assert [name for name, count in bought.items() if count > 1] == []
    assert set(bought) <= set(known)
    for gang in ending.cloud.gang_list:
        assert len(gang.machines) in (0, known[gang.spec.name].nodes)
        asked = Counter(
            rank
            for trace in ending.traces
            for attempt in trace.attempts
            if attempt.gang.partition("@")[0] == gang.spec.name
            for rank in attempt.repairs
        )
        new = Counter(machine.rank for machine in gang.replaced)
        assert new <= asked, "a lost node is replaced at most once by each attempt that asks for it"


def check_nothing_held_twice(ending: ScenarioResult) -> None:
    """At no time do two living gangs hold one device, or more CPUs and memory than their host
    has.
    """
    hosts = {host.name: host for host in ending.cloud.script.hosts}
    gangs = [gang for gang in ending.cloud.gang_list if gang.spec.offer.shared]
    for gang in gangs:
        assert [allocation.rank for allocation in gang.spec.allocations] == list(
            range(gang.spec.nodes)
        )
        assert all(
            len(allocation.devices) == gang.spec.offer.accelerator_count
            for allocation in gang.spec.allocations
        )
        ends = gang.ended_at or ending.at
        living = [
            g
            for g in gangs
            if g.bought_at <= gang.bought_at < (g.ended_at or ending.at) or g is gang
        ]
        assert ends >= gang.bought_at
        allocations = [allocation for g in living for allocation in g.spec.allocations]
        for name, host in hosts.items():
            here = [allocation for allocation in allocations if allocation.host == name]
            devices = Counter(device for allocation in here for device in allocation.devices)
            assert [device for device, count in devices.items() if count > 1] == []
            assert sum(allocation.cpus for allocation in here) <= host.cpus
            assert sum(allocation.memory_mib for allocation in here) <= host.memory_mib


def check_bills(ending: ScenarioResult) -> None:
    """Every microsecond of every life is charged once, at the price that held, and nothing else
    is.
    """
    known = {attempt.gang: attempt for trace in ending.traces for attempt in trace.attempts}
    assert {life.gang for life in ending.cloud.lives()} <= set(known)
    lives: dict[tuple[str, int], list[Stretch]] = {}
    for life in ending.cloud.lives():
        lives.setdefault((life.gang, life.rank), []).extend(stretches(life))
    wanted = {key: sorted(rows) for key, rows in lives.items() if rows}
    charged: dict[tuple[str, int], list[Stretch]] = {}
    for trace in ending.traces:
        for charge in trace.charges:
            assert charge.amount == charge.rate.over(charge.until - charge.since)
            row = (charge.since, charge.until, charge.rate, charge.kind)
            charged.setdefault((bought_as(trace, charge.attempt_id), charge.rank), []).append(row)
    kept = {
        attempt.gang.partition("@")[0]
        for t in ending.traces
        for attempt in t.attempts
        if attempt.kept_since or attempt.repairs
    }
    told = {key: joined(rows) if key[0] in kept else sorted(rows) for key, rows in charged.items()}
    wanted = {key: joined(rows) if key[0] in kept else rows for key, rows in wanted.items()}
    wrong = {
        key: (told.get(key), wanted.get(key))
        for key in told | wanted
        if told.get(key) != wanted.get(key)
    }
    assert not wrong, f"charged, wanted: {wrong}"


def bought_as(trace: JobTrace, attempt_id: str) -> str:
    """The name under which the place knows the gang of an attempt, also of one that handed it
    on.
    """
    [attempt] = [each for each in trace.attempts if each.id == attempt_id]
    return attempt.gang.partition("@")[0]


def joined(rows: list[Stretch]) -> list[Stretch]:
    """The stretches of all who had a gang, one after the other, as if one had it."""
    whole: list[Stretch] = []
    for since, until, rate, kind in sorted(rows, key=lambda row: (row[0], row[1])):
        before = whole[-1] if whole else None
        if kind is ChargeKind.MINIMUM or before is None or (before[1], before[2]) != (since, rate):
            whole.append((since, until, rate, ChargeKind.NODE if kind is ChargeKind.KEPT else kind))
        else:
            whole[-1] = (before[0], until, rate, before[3])
    return sorted(row for row in whole if row[0] < row[1])


def stretches(life: NodeLife) -> list[Stretch]:
    """What a life costs, from the cloud's own books: made anew, with nothing of the code under
    test.
    """
    assert life.ended_at is not None
    end, edges = life.ended_at, [life.started_at]
    edges += [since for since, _ in life.rates if life.started_at < since < end]
    rows: list[Stretch] = []
    for since, until in zip(edges, [*edges[1:], end], strict=True):
        rate = [rate for at, rate in life.rates if at <= since][-1]
        if rows and rows[-1][2] == rate:
            rows[-1] = (rows[-1][0], until, rate, ChargeKind.NODE)
        elif until > since:
            rows.append((since, until, rate, ChargeKind.NODE))
    floor = life.started_at + life.offer.minimum_charge
    if floor > end:
        rate = (
            rows[-1][2] if rows else [rate for at, rate in life.rates if at <= life.started_at][-1]
        )
        rows.append((end, floor, rate, ChargeKind.MINIMUM))
    return sorted(rows)


def check_no_two_tries_at_once(ending: ScenarioResult) -> None:
    """The work of one try is over before that of the next begins; a mute agent's is beyond
    anybody's reach.
    """
    mute = {
        gang.spec.name
        for gang in ending.cloud.gang_list
        if gang.fault_script.mute_after_s is not None
    }
    for trace in ending.traces:
        number = {
            attempt.gang: attempt.number for attempt in trace.attempts if attempt.adopted_at is None
        }
        spans = [
            (number[gang], since, until or ending.at)
            for gang, _, since, until in ending.cloud.storage.work
            if gang in number and gang not in mute
        ]
        for this, since, until in spans:
            for other, begun, _ in spans:
                if other > this:
                    assert begun >= until, (
                        f"{trace.job.name}: try {other} began at {begun}, {this} ran "
                        f"{since}..{until}"
                    )


def check_no_rank_works_twice(ending: ScenarioResult) -> None:
    """Of two agents that start on one node, one works."""
    worked = Counter((gang, rank) for gang, rank, _, _ in ending.cloud.storage.work)
    owners = Counter(
        attempt.gang.partition("@")[0] for trace in ending.traces for attempt in trace.attempts
    )
    assert [key for key, count in worked.items() if count > max(1, owners[key[0]])] == []
    spans = sorted(
        (gang, rank, since, until or ending.at)
        for gang, rank, since, until in ending.cloud.storage.work
    )
    for before, after in pairwise(spans):
        assert before[:2] != after[:2] or after[2] >= before[3], (
            "one work began on a node before the last was over"
        )


def check_end(trace: JobTrace) -> None:
    job = trace.job
    assert job.phase in JOB_ENDS
    assert job.ended_at is not None
    assert all(
        attempt.phase is AttemptPhase.ENDED and attempt.outcome for attempt in trace.attempts
    )
    assert [attempt.number for attempt in trace.attempts] == list(range(1, job.last_number + 1))
    own = [
        attempt
        for attempt in trace.attempts
        if attempt.number <= job.attempt and attempt.running_at
    ]
    assert AttemptOutcome.SUCCEEDED not in [attempt.outcome for attempt in own[:-1]]
    outcomes = [attempt.outcome for attempt in trace.attempts if attempt.number <= job.attempt]
    reported = Counter(
        (event.attempt, event.rank, event.kind, event.at)
        for event in trace.events
        if event.rank is not None
    )
    assert [key for key, count in reported.items() if count > 1] == []
    if not {"stopping", "stopped", "standby", "takeover"} & {event.kind for event in trace.events}:
        assert AttemptOutcome.STOPPED not in outcomes, "nobody wanted a stop"
    if job.phase is JobPhase.DONE and job.stop_cause not in (
        StopCause.HELPED,
        StopCause.EARLY,
    ):
        assert outcomes[-1] is AttemptOutcome.SUCCEEDED
        assert job.exit_code == 0
    if job.phase is JobPhase.STOPPED:
        assert job.stop_reason is not None


def tell(trace: JobTrace) -> str:
    lines = [f"{trace.job.name}: {trace.job.phase} ({trace.job.reason})"]
    lines += [
        f"  {attempt.id} {attempt.phase} {attempt.outcome} {attempt.reason}"
        for attempt in trace.attempts
    ]
    lines += [
        f"    {event.at:%d %H:%M:%S} {event.attempt} {event.kind}: {event.text}"
        for event in trace.events
    ]
    return "\n".join(lines)
