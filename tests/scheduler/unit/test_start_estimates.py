"""When waiting jobs start, by the plays of `scheduler.start_estimates`."""

from collections import deque
from heapq import heappop, heappush
from math import inf, nan
from random import Random
from statistics import median

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.steps import limit_steps

from cavvy.domain.shares import HeldShare, QueueRow
from cavvy.domain.values import Struct, replace
from cavvy.scheduler.shares import ShareBook, give_turns
from cavvy.scheduler.start_estimates import (
    LATEST,
    EstimateOutcome,
    GangKind,
    HeldPart,
    LaneDemand,
    LinedUpJob,
    PastGang,
    PlannedGang,
    QueueState,
    RunningGang,
    RunTimes,
    StartEstimate,
    correct,
    estimate_starts,
    find_kind,
)

ANY = GangKind("p", "u", "n")
ONE = PlannedGang(kind=ANY)


def holds(left_s: float, *parts: HeldPart, **limits: float) -> RunningGang:
    return RunningGang(planned=ONE, parts=parts, limits=limits, left_s=left_s)


def waits(name: str, *demands: LaneDemand, **limits: float) -> LinedUpJob:
    return LinedUpJob(id=name, planned=ONE, demands=demands, limits=limits)


def always(seconds: float) -> RunTimes:
    """Every gang holds its nodes for this time."""
    return RunTimes([PastGang(ANY, seconds)] * 9, Random(0))


def starts(state: QueueState, run_times: RunTimes) -> dict[str, float]:
    found = estimate_starts(state, run_times, Random(0))
    assert all(each.low_s == each.median_s == each.high_s for each in found.values())
    return {name: each.median_s for name, each in found.items()}


def test_jobs_start_in_order_when_enough_hosts_are_free() -> None:
    """The job of two nodes waits for both hosts, and keeps the later job waiting."""
    state = QueueState(
        lanes=[[(1.0,), (0.0,)], [(0.0,)]],
        running=[holds(30, HeldPart(0, 1, (1.0,))), holds(10, HeldPart(1, 0, (1.0,)))],
        line=[
            waits("two", LaneDemand(0, 2, (1.0,))),
            waits("next", LaneDemand(0, 1, (1.0,))),
            waits("apart", LaneDemand(1, 1, (1.0,))),
            waits("either", LaneDemand(0, 1, (1.0,)), LaneDemand(1, 1, (1.0,))),
            waits("never", LaneDemand(1, 1, (2.0,))),
            waits("unknown"),
        ],
    )
    expected = {"two": 30.0, "next": 130.0, "apart": 10.0, "either": 110.0}
    assert starts(state, always(100)) == expected


def test_a_job_starts_on_the_first_of_its_sizes_that_fits() -> None:
    """It does not wait for the largest one, which it takes where both fit."""
    sizes = LaneDemand(0, 2, (1.0,)), LaneDemand(0, 1, (1.0,))
    busy = QueueState(
        lanes=[[(1.0,), (0.0,)]],
        running=[holds(30, HeldPart(0, 1, (1.0,)))],
        line=[waits("elastic", *sizes), waits("next", LaneDemand(0, 1, (1.0,)))],
    )
    assert starts(busy, always(100)) == {"elastic": 0.0, "next": 30.0}
    free = replace(busy, lanes=[[(1.0,), (1.0,)]], running=[])
    assert starts(free, always(100)) == {"elastic": 0.0, "next": 100.0}


def test_jobs_wait_for_limits_without_keeping_others_waiting() -> None:
    room = LaneDemand(0, 1, (1.0,))
    state = QueueState(
        lanes=[[(9.0,)]],
        running=[holds(50, HeldPart(0, 0, (1.0,)), team=2.0)],
        line=[
            waits("free", room),
            waits("a", room, team=2.0),
            waits("b", room, team=1.0),
            waits("c", room, team=1.0),
        ],
        limits={"team": 1.0},
    )
    expected = {"free": 0.0, "a": 50.0, "b": 50.0, "c": 150.0}  # a and b count toward the limit
    assert starts(state, always(100)) == expected


def test_many_hosts_count_as_one_large_host() -> None:
    state = QueueState(
        lanes=[[(1.0,)] * 100],
        running=[holds(7, *(HeldPart(0, host, (7.0,)) for host in range(100)))],
        line=[waits("a", LaneDemand(0, 50, (8.0,))), waits("b", LaneDemand(0, 60, (8.0,)))],
    )
    assert starts(state, always(100)) == {"a": 7.0, "b": 107.0}


def test_a_job_starts_after_its_nodes_have_booted() -> None:
    job = LinedUpJob(id="a", planned=ONE, demands=[LaneDemand(0, 1, (1.0,))], boots_s=[60.0, 90.0])
    state = QueueState(lanes=[[(inf,)]], running=[], line=[job])
    found = estimate_starts(state, RunTimes([], Random(0)), Random(0))["a"]
    assert (found.low_s, found.high_s) == (60.0, 90.0)


def test_a_job_that_rests_after_a_failure_lets_those_behind_it_start() -> None:
    room, other = LaneDemand(0, 1, (1.0,)), LaneDemand(1, 1, (1.0,))

    def rest(name: str, seconds: float) -> LinedUpJob:
        return replace(waits(name, room), rests_s=seconds)

    state = QueueState(
        lanes=[[(1.0,)], [(1.0,)]],
        running=[],
        line=[
            rest("short", 30),
            waits("now", room),
            rest("long", 150),
            waits("next", room),
            waits("apart", other),
            rest("last", 900),
        ],
    )
    expected = {"now": 0.0, "short": 100.0, "long": 200.0, "next": 300.0}
    assert starts(state, always(100)) == {**expected, "apart": 0.0, "last": 900.0}


def test_nothing_is_said_if_nothing_is_known() -> None:
    state = QueueState(
        lanes=[[(0.0,)]],
        running=[RunningGang(planned=ONE, parts=[HeldPart(0, 0, (1.0,))])],
        line=[waits("a", LaneDemand(0, 1, (1.0,)))],
    )
    still_running = RunTimes([PastGang(ANY, 50.0, ended=False)], Random(0))
    assert not estimate_starts(state, still_running, Random(0))
    limited = RunningGang(
        planned=PlannedGang(kind=ANY, age_s=60.0, most_s=100.0), parts=[HeldPart(0, 0, (1.0,))]
    )
    state = QueueState(lanes=state.lanes, running=[limited], line=state.line)
    found = estimate_starts(state, still_running, Random(0))["a"]
    assert 0 <= found.low_s < 10 < found.median_s < 30 < found.high_s <= 40


def test_run_times_come_from_jobs_of_the_same_name_then_of_the_same_user() -> None:
    past = [PastGang(find_kind("p", "u", f"train-{n}"), 10.0) for n in range(50)]
    past += [PastGang(find_kind("p", "u", "other"), 1000.0)] * 50
    past += [PastGang(find_kind("q", "v", "else"), 9e6)] * 100
    times = RunTimes(past, Random(0))

    def middle(kind: GangKind, **known: float) -> float:
        return median(times.draw(PlannedGang(kind=kind, **known), n % 10) for n in range(99))

    assert middle(find_kind("p", "u", "train-77")) == 10
    assert middle(find_kind("p", "u", "train-77"), age_s=11) == 989
    assert middle(find_kind("q", "v", "new")) == 9e6
    assert middle(find_kind("q", "v", "new"), most_s=60) == 60
    assert 9e6 * 0.1 < middle(find_kind("q", "v", "new"), age_s=9e6) < 9e6


def test_gangs_that_still_run_count() -> None:
    """Without them, only the short half of the gangs would be known."""
    past = [PastGang(ANY, 10.0)] * 50 + [PastGang(ANY, 500.0, ended=False)] * 50
    times = RunTimes([*past, PastGang(ANY, 600.0)], Random(0))
    drawn = [times.draw(ONE, n % 10) for n in range(200)]
    assert 0.3 < sum(each > 500 for each in drawn) / 200 < 0.7


AMOUNTS = st.integers(1, 4).map(lambda amount: (float(amount),))
LINES = st.lists(st.tuples(AMOUNTS, st.sampled_from([(0,), (1,), (0, 1)])), max_size=8)


@given(LINES, LINES, st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_the_same_state_gives_the_same_estimates(
    running: list[tuple[tuple[float], tuple[int, ...]]],
    line: list[tuple[tuple[float], tuple[int, ...]]],
    seed: int,
) -> None:
    """Also: the ends of a range are in order, and no job waits for less than no time."""
    past = [PastGang(ANY, float(each)) for each in range(1, 30)]
    state = QueueState(
        lanes=[[(4.0,), (4.0,)], [(4.0,)]],
        running=[holds(5, HeldPart(lanes[0], 0, amounts)) for amounts, lanes in running],
        line=[
            waits(str(n), *(LaneDemand(lane, 1, amounts) for lane in lanes))
            for n, (amounts, lanes) in enumerate(line)
        ],
    )
    once, again = (
        estimate_starts(state, RunTimes(past, Random(seed)), Random(seed)) for _ in range(2)
    )
    assert once == again
    assert len(once) == len(line)
    assert all(0 <= each.low_s <= each.median_s <= each.high_s < inf for each in once.values())


def test_ranges_become_wider_or_narrower_by_earlier_errors() -> None:
    estimate = StartEstimate(1000, 2000, 4000)
    late = [EstimateOutcome(estimate, 2000 + 100 * n) for n in range(60)]
    wide = correct(estimate, late)
    assert 7000 < wide.high_s < 8000
    assert wide.low_s > 1000
    assert correct(estimate, late[:10]) == estimate
    right = [EstimateOutcome(estimate, 2000 + n) for n in range(60)]
    narrow = correct(estimate, right)
    assert 1990 < narrow.low_s <= narrow.median_s <= narrow.high_s < 2070
    waiting = [EstimateOutcome(estimate, 9000, started=False)] * 10
    assert correct(estimate, [*right, *waiting]).high_s > 8900
    early = [EstimateOutcome(estimate, 1, started=False)] * 60  # says nothing yet
    assert correct(estimate, early) == estimate


class Work(Struct, frozen=True):
    """A job of a simulated day."""

    id: int
    kind: GangKind
    nodes: int
    gpus: int
    arrives: float
    seconds: float


def make_day(random: Random, jobs: int, load: float, hosts: int) -> list[Work]:
    kinds = [
        (GangKind(f"p{n % 3}", f"u{n % 6}", f"n{n}"), random.choice([1, 1, 2, 4, 8, 16]))
        for n in range(18)
    ]
    usual = {kind: random.lognormvariate(7, 1) for kind, _ in kinds}
    busy = sum(usual[kind] * gpus for kind, gpus in kinds) / len(kinds) * 1.4
    at, found = 0.0, []
    for number in range(jobs):
        at += random.expovariate(load * hosts * 8 / busy)
        kind, gpus = random.choice(kinds)
        seconds = usual[kind] * random.lognormvariate(0, 0.8)
        found.append(Work(number, kind, max(1, gpus // 8), min(8, gpus), at, seconds))
    return found


class Cluster:
    """Runs jobs in the order of the fair queue, and asks for an estimate when every `every`-th job
    arrives. `found` contains the corrected estimates with the real waits."""

    def __init__(self, hosts: int, every: int) -> None:
        self.free = [8.0] * hosts
        self.every = every
        self.now = 0.0
        self.waiting: list[Work] = []
        self.running: dict[int, tuple[Work, float, list[int]]] = {}
        self.past: dict[int, PastGang] = {}
        self.asked: dict[int, tuple[float, StartEstimate, StartEstimate]] = {}
        self.outcomes: deque[EstimateOutcome] = deque(maxlen=LATEST)
        self.found: list[tuple[StartEstimate, float]] = []

    def run(self, works: list[Work]) -> None:
        ends: list[tuple[float, int]] = []
        arrivals = deque(works)
        while arrivals or ends:
            arrives = not ends or (arrivals and arrivals[0].arrives <= ends[0][0])
            if arrives:
                self.waiting.append(arrivals.popleft())
                self.now = self.waiting[-1].arrives
            else:
                self.now, number = heappop(ends)
                self.end(number)
            line = self.order()
            for work in self.start(line):
                heappush(ends, (self.now + work.seconds, work.id))
            newest = self.waiting[-1] if arrives and self.waiting else None
            if newest is not None and newest.id % self.every == 0:
                self.ask(newest, [work for work in line if work.id not in self.running])

    def order(self) -> list[Work]:
        held = [
            HeldShare(work.kind.project, "", work.gpus * work.nodes, 1)
            for work, _, _ in self.running.values()
        ]
        rows = [QueueRow(str(w.id), w.kind.project, "", w.gpus * w.nodes) for w in self.waiting]
        by_id = {str(work.id): work for work in self.waiting}
        return [by_id[turn.row.id] for turn in give_turns(rows, ShareBook(held=held))]

    def start(self, line: list[Work]) -> list[Work]:
        started = []
        for work in line:
            hosts = [host for host, free in enumerate(self.free) if free >= work.gpus]
            if len(hosts) < work.nodes:
                break
            for host in hosts[: work.nodes]:
                self.free[host] -= work.gpus
            self.running[work.id] = work, self.now, hosts[: work.nodes]
            self.waiting.remove(work)
            started.append(work)
            if work.id in self.asked:
                at, raw, shown = self.asked.pop(work.id)
                self.outcomes.append(EstimateOutcome(raw, self.now - at))
                self.found.append((shown, self.now - at))
        return started

    def end(self, number: int) -> None:
        work, _, hosts = self.running.pop(number)
        for host in hosts:
            self.free[host] += work.gpus
        self.past[number] = PastGang(work.kind, work.seconds)

    def ask(self, newest: Work, line: list[Work]) -> None:
        state = QueueState(
            lanes=[[(free,) for free in self.free]],
            running=[
                RunningGang(
                    planned=PlannedGang(kind=work.kind, age_s=self.now - since),
                    parts=[HeldPart(0, host, (float(work.gpus),)) for host in hosts],
                )
                for work, since, hosts in self.running.values()
            ],
            line=[
                LinedUpJob(
                    id=str(work.id),
                    planned=PlannedGang(kind=work.kind),
                    demands=[LaneDemand(0, work.nodes, (float(work.gpus),))],
                )
                for work in line[: line.index(newest) + 1]
            ],
        )
        running = {
            work.id: PastGang(work.kind, self.now - since, ended=False)
            for work, since, _ in self.running.values()
        }
        past = sorted((self.past | running).items(), reverse=True)[:800]
        times = RunTimes([gang for _, gang in past], Random(0))
        raw = estimate_starts(state, times, Random(0)).get(str(newest.id))
        if raw is not None:
            late = [
                EstimateOutcome(each, self.now - at, started=False)
                for at, each, _ in self.asked.values()
            ]
            self.asked[newest.id] = self.now, raw, correct(raw, [*self.outcomes, *late])


def part_within(found: list[tuple[StartEstimate, float]]) -> float:
    return sum(each.low_s <= wait <= each.high_s for each, wait in found) / len(found)


def test_nine_of_ten_jobs_start_within_the_range() -> None:
    found: list[tuple[StartEstimate, float]] = []
    for seed in range(2):
        cluster = Cluster(hosts=4, every=3)
        cluster.run(make_day(Random(seed), 500, 0.95, 4))
        found += cluster.found[30:]
    assert len(found) > 100
    assert 0.85 <= part_within(found) <= 0.95
    assert median(each.high_s - each.low_s for each, _ in found) < 10 * median(w for _, w in found)


def test_a_job_behind_one_that_never_fits_gets_an_estimate() -> None:
    """Its lane's time is infinite then, and so is the end of what runs without an end."""
    state = QueueState(
        lanes=[[(4.0,)]],
        running=[holds(inf, HeldPart(0, 0, (1.0,)))],
        line=[
            waits("never", LaneDemand(0, 1, (9.0,))),
            waits("behind", LaneDemand(0, 1, (1.0,))),
        ],
    )
    assert "never" not in starts(state, always(60))


AMOUNTS = st.sampled_from([0.0, -1.0, 1.0, 4.0, 9.0, 1e300, inf, -inf, nan])
SECONDS = st.sampled_from([0.0, -1.0, 1.0, 60.0, 1e300, inf, -inf, nan])


@settings(max_examples=200)
@given(
    held=st.lists(st.tuples(SECONDS, AMOUNTS), max_size=3),
    wanted=st.lists(st.tuples(st.integers(0, 3), AMOUNTS, SECONDS, AMOUNTS), max_size=5),
    last=SECONDS,
)
def test_every_estimate_ends_for_endless_and_huge_values(
    held: list[tuple[float, float]],
    wanted: list[tuple[int, float, float, float]],
    last: float,
) -> None:
    state = QueueState(
        lanes=[[(4.0,), (4.0,)]],
        running=[holds(seconds, HeldPart(0, 0, (amount,)), gpus=1.0) for seconds, amount in held],
        line=[
            LinedUpJob(
                id=str(place),
                planned=ONE,
                demands=[LaneDemand(0, nodes, (amount,))],
                limits={"gpus": limit},
                rests_s=rests,
            )
            for place, (nodes, amount, rests, limit) in enumerate(wanted)
        ],
        limits={"gpus": 2.0},
    )
    with limit_steps(2_000_000):
        estimate_starts(state, always(last), Random(0))
