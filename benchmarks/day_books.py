"""Checks the books of `big_day.py`: what the store says of jobs, gangs and bills is compared with
what the clouds know. The amounts are computed anew, with none of the code that computed the bills.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from day_world import DayCloud, DayStore

from cavvy.domain.events import ChargeKind
from cavvy.providers.fake.agents import FakeGang
from cavvy.providers.fake.cloud import NodeLife

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HOUR_US = 3_600_000_000
_ENDS = {False: "done", True: "failed"}
Stretch = tuple[int, int, int, str]  # from and until in us, micro-dollars an hour, kind


@dataclass
class Findings:
    """What is wrong, a line each, and the sums of the day."""

    lost: list[str] = field(default_factory=list)
    bought_twice: list[str] = field(default_factory=list)
    stray: list[str] = field(default_factory=list)
    held_twice: list[str] = field(default_factory=list)
    wrong_bills: list[str] = field(default_factory=list)
    jobs: int = 0
    gangs: int = 0
    lost_machines: int = 0
    billed_micros: int = 0
    billed_by_place: Counter[str] = field(default_factory=Counter)


def check_books(
    store: DayStore, clouds: Mapping[str, DayCloud], accepted: Mapping[str, bool]
) -> Findings:
    """Compare the store's rows with the clouds' books and the clients' notes. `accepted` has the
    ID of each job or array that a client has submitted, and whether its program ends with an
    error."""
    found = Findings()
    _check_jobs(store, accepted, found)
    attempts = _read_attempts(store)
    for name, cloud in clouds.items():
        _check_gangs(name, cloud, attempts, found)
        found.held_twice += _check_hosts(cloud)
    _check_bills(store, clouds, found)
    return found


def _check_jobs(store: DayStore, accepted: Mapping[str, bool], found: Findings) -> None:
    members = defaultdict[str, list[tuple[str, str]]](list)
    jobs = {}
    sql = "SELECT id, array_id, phase, reason, tags FROM jobs"
    for job, array, phase, reason, tags in store.rows(sql):
        jobs[str(job)] = str(phase), str(reason)
        if array is not None:
            members[str(array)].append((str(phase), str(reason)))
        elif str(job) not in accepted and "service" not in str(tags):
            found.lost.append(f"nobody submitted {job}")
    found.jobs = len(jobs)
    for each, fails in accepted.items():
        ends = members.get(each) or ([jobs[each]] if each in jobs else [])
        if not ends:
            found.lost.append(f"{each} is not stored")
        found.lost += [f"{each} is {end}: {why}" for end, why in ends if end != _ENDS[fails]]
    for (open_,) in store.rows("SELECT id FROM attempts WHERE phase <> 'ended'"):
        found.lost.append(f"attempt {open_} is open")


def _read_attempts(store: DayStore) -> set[str]:
    return {
        str(bought or gang).partition("@")[0]
        for gang, bought in store.rows("SELECT gang, bought_as FROM attempts")
    }


def _check_gangs(name: str, cloud: DayCloud, attempts: set[str], found: Findings) -> None:
    for gang, count in Counter(each.spec.name for each in cloud.gang_list).items():
        found.gangs += count
        if count > 1:
            found.bought_twice.append(f"{gang} at {name}, {count} times")
        if gang not in attempts:
            found.stray.append(f"{gang} at {name} belongs to no attempt")
    for each in cloud.gang_list:
        if each.alive:
            found.stray.append(f"{each.spec.name} at {name} still runs")
        found.lost_machines += len(each.replaced) + each.spec.nodes * each.preempted


def _check_hosts(cloud: DayCloud) -> Iterator[str]:
    """At no time may two gangs hold a device, or more CPUs and memory than their host has."""
    hosts = {host.name: host for host in cloud.script.hosts}
    edges = defaultdict[str, list[tuple[datetime, int, FakeGang]]](list)
    for gang in cloud.gang_list:
        for name in {each.host for each in gang.spec.allocations}:
            edges[name].append((gang.bought_at, 1, gang))
            edges[name].append((gang.ended_at or datetime.max.replace(tzinfo=UTC), 0, gang))
    for name, moments in edges.items():
        held, cpus, memory = Counter[str](), 0.0, 0.0
        for _, begins, gang in sorted(moments, key=lambda each: each[:2]):
            sign = 1 if begins else -1
            for each in gang.spec.allocations:
                if each.host == name:
                    held.update({device: sign for device in each.devices})
                    cpus, memory = cpus + sign * each.cpus, memory + sign * each.memory_mib
            twice = [device for device, count in held.items() if count > 1]
            if twice or cpus > hosts[name].cpus + 1e-6 or memory > hosts[name].memory_mib:
                yield f"{name}: {twice or f'{cpus:g} CPUs, {memory:g} MiB'}"
                break


def _check_bills(store: DayStore, clouds: Mapping[str, DayCloud], found: Findings) -> None:
    wanted = defaultdict[tuple[str, int], list[Stretch]](list)
    for name, cloud in clouds.items():
        for life in cloud.lives():
            if life.ended_at is not None:
                for row in _list_stretches(life):
                    wanted[life.gang, life.rank].append(row)
                    found.billed_by_place[name] += _price(row)
    charged = defaultdict[tuple[str, int], list[Stretch]](list)
    sql = (
        "SELECT a.gang, a.bought_as, c.rank, c.kind, c.since, c.until, c.rate, c.amount FROM "
        "charges c JOIN attempts a ON a.id = c.attempt_id"
    )
    for gang, bought, rank, kind, since, until, rate, amount in store.rows(sql):
        row = int(str(since)), int(str(until)), int(str(rate)), str(kind)
        key = str(bought or gang).partition("@")[0], int(str(rank))
        charged[key].append(row)
        found.billed_micros += int(str(amount))
        if int(str(amount)) != _price(row):
            found.wrong_bills.append(f"{key}: {amount} for {row}")
    for key in charged.keys() | wanted.keys():
        told, right = _join(charged.get(key, [])), _join(wanted.get(key, []))
        if told != right:
            found.wrong_bills.append(f"{key}: charged {told}, wanted {right}")
    spent = store.rows("SELECT COALESCE(SUM(spent), 0) FROM jobs")[0][0]
    if int(str(spent)) != found.billed_micros:
        found.wrong_bills.append(f"the jobs' sums are {spent}, the charges {found.billed_micros}")


def _price(row: Stretch) -> int:
    """The price of a stretch in micro-dollars, half of one rounded up."""
    since, until, rate, _ = row
    return (2 * rate * (until - since) + _HOUR_US) // (2 * _HOUR_US)


def _micros(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)


def _list_stretches(life: NodeLife) -> Iterator[Stretch]:
    """What a machine costs, from the cloud's books: its life, and the rest of the shortest time
    that is billed."""
    assert life.ended_at is not None
    [(_, rate)] = life.rates
    since, until = _micros(life.started_at), _micros(life.ended_at)
    if until > since:
        yield since, until, rate.micros_per_hour, ChargeKind.NODE
    least = since + life.offer.minimum_charge // timedelta(microseconds=1)
    if least > until:
        yield until, least, rate.micros_per_hour, ChargeKind.MINIMUM


def _join(rows: list[Stretch]) -> list[Stretch]:
    """The stretches of all attempts that had a machine, as if one had it."""
    whole: list[Stretch] = []
    for since, until, rate, kind in sorted(rows):
        kind = ChargeKind.NODE if kind == ChargeKind.KEPT else ChargeKind(kind)
        before = whole[-1] if whole else None
        if before and kind is ChargeKind.NODE and (before[1:] == (since, rate, kind)):
            whole[-1] = (before[0], until, rate, kind)
        else:
            whole.append((since, until, rate, kind))
    return whole
