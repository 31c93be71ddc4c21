"""What must hold at the end of every story, checked against the made-up cloud's own books."""

from collections import Counter
from datetime import datetime

from remuda.domain.events import ChargeKind
from remuda.domain.jobs import JOB_ENDS, AttemptPhase, JobPhase, Outcome
from remuda.domain.units import HourlyRate
from remuda.providers.fake.cloud import Life
from remuda.sim.story import Ending, Tale

Stretch = tuple[datetime, datetime, HourlyRate, ChargeKind]


def check_all(ending: Ending) -> None:
    told = "\n".join(tell(tale) for tale in ending.tales)
    assert ending.finished, f"not over at {ending.at}\n{told}"
    check_nothing_left(ending)
    check_nothing_bought_twice(ending)
    check_nothing_held_twice(ending)
    check_bills(ending)
    check_no_two_tries_at_once(ending)
    check_no_rank_works_twice(ending)
    for tale in ending.tales:
        check_end(tale)


def check_nothing_left(ending: Ending) -> None:
    assert [gang.spec.name for gang in ending.cloud.gang_list if gang.alive] == []
    assert [life.engine_id for life in ending.cloud.lives() if life.ended_at is None] == []


def check_nothing_bought_twice(ending: Ending) -> None:
    known = {attempt.gang: attempt for tale in ending.tales for attempt in tale.attempts}
    bought = Counter(gang.spec.name for gang in ending.cloud.gang_list)
    assert [name for name, count in bought.items() if count > 1] == []
    assert set(bought) <= set(known)
    for gang in ending.cloud.gang_list:
        assert len(gang.machines) in (0, known[gang.spec.name].nodes)


def check_nothing_held_twice(ending: Ending) -> None:
    """At no time do two living gangs hold one device, or more CPUs and memory than their host has."""
    hosts = {host.name: host for host in ending.cloud.script.hosts}
    gangs = [gang for gang in ending.cloud.gang_list if gang.spec.offer.shared]
    for gang in gangs:
        assert [hold.rank for hold in gang.spec.holds] == list(range(gang.spec.nodes))
        assert all(len(hold.devices) == gang.spec.offer.accelerator_count for hold in gang.spec.holds)
        ends = gang.ended_at or ending.at
        living = [g for g in gangs if g.bought_at <= gang.bought_at < (g.ended_at or ending.at) or g is gang]
        assert ends >= gang.bought_at
        holds = [hold for g in living for hold in g.spec.holds]
        for name, host in hosts.items():
            here = [hold for hold in holds if hold.host == name]
            devices = Counter(device for hold in here for device in hold.devices)
            assert [device for device, count in devices.items() if count > 1] == []
            assert sum(hold.cpus for hold in here) <= host.cpus
            assert sum(hold.memory_mib for hold in here) <= host.memory_mib


def check_bills(ending: Ending) -> None:
    """Every microsecond of every life is charged once, at the price that held, and nothing else is."""
    known = {attempt.gang: attempt for tale in ending.tales for attempt in tale.attempts}
    lives = {(known[life.gang].id, life.rank): stretches(life) for life in ending.cloud.lives()}
    wanted = {key: rows for key, rows in lives.items() if rows}
    charged: dict[tuple[str, int], list[Stretch]] = {}
    for tale in ending.tales:
        for charge in tale.charges:
            assert charge.amount == charge.rate.over(charge.until - charge.since)
            row = (charge.since, charge.until, charge.rate, charge.kind)
            charged.setdefault((charge.attempt_id, charge.rank), []).append(row)
    told = {key: sorted(rows) for key, rows in charged.items()}
    wrong = {key: (told.get(key), wanted.get(key)) for key in told | wanted if told.get(key) != wanted.get(key)}
    assert not wrong, f"charged, wanted: {wrong}"


def stretches(life: Life) -> list[Stretch]:
    """What a life costs, from the cloud's own books: made anew, with nothing of the code under test."""
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
        rate = rows[-1][2] if rows else [rate for at, rate in life.rates if at <= life.started_at][-1]
        rows.append((end, floor, rate, ChargeKind.MINIMUM))
    return sorted(rows)


def check_no_two_tries_at_once(ending: Ending) -> None:
    """The work of one try is over before that of the next begins; a mute agent's is beyond anybody's reach."""
    mute = {gang.spec.name for gang in ending.cloud.gang_list if gang.fate.mute_after_s is not None}
    for tale in ending.tales:
        number = {attempt.gang: attempt.number for attempt in tale.attempts}
        spans = [
            (number[gang], since, until or ending.at)
            for gang, _, since, until in ending.cloud.storage.work
            if gang in number and gang not in mute
        ]
        for this, since, until in spans:
            for other, begun, _ in spans:
                if other > this:
                    assert begun >= until, f"{tale.job.name}: try {other} began at {begun}, {this} ran {since}..{until}"


def check_no_rank_works_twice(ending: Ending) -> None:
    """Of two agents that start on one node, one works."""
    worked = Counter((gang, rank) for gang, rank, _, _ in ending.cloud.storage.work)
    assert [key for key, count in worked.items() if count > 1] == []


def check_end(tale: Tale) -> None:
    job = tale.job
    assert job.phase in JOB_ENDS
    assert job.ended_at is not None
    assert all(attempt.phase is AttemptPhase.ENDED and attempt.outcome for attempt in tale.attempts)
    assert [attempt.number for attempt in tale.attempts] == list(range(1, job.last_number + 1))
    own = [attempt for attempt in tale.attempts if attempt.number <= job.attempt and attempt.running_at]
    assert Outcome.SUCCEEDED not in [attempt.outcome for attempt in own[:-1]]
    outcomes = [attempt.outcome for attempt in tale.attempts if attempt.number <= job.attempt]
    reported = Counter(
        (event.attempt, event.rank, event.kind, event.at) for event in tale.events if event.rank is not None
    )
    assert [key for key, count in reported.items() if count > 1] == []
    if not {"stopping", "stopped", "relief", "takeover"} & {event.kind for event in tale.events}:
        assert Outcome.STOPPED not in outcomes, "nobody wanted a stop"
    if job.phase is JobPhase.DONE:
        assert outcomes[-1] is Outcome.SUCCEEDED
        assert job.exit_code == 0
    if job.phase is JobPhase.STOPPED:
        assert job.stop_reason is not None


def tell(tale: Tale) -> str:
    lines = [f"{tale.job.name}: {tale.job.phase} ({tale.job.reason})"]
    lines += [f"  {attempt.id} {attempt.phase} {attempt.outcome} {attempt.reason}" for attempt in tale.attempts]
    lines += [f"    {event.at:%d %H:%M:%S} {event.attempt} {event.kind}: {event.text}" for event in tale.events]
    return "\n".join(lines)
