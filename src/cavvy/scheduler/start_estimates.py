"""Estimates when waiting jobs start. The module does no I/O.

The queue is played forward many times (Monte Carlo), as in "Using Run-Time Predictions to Estimate
Queue Wait Times" (Smith, Taylor and Foster, 1999): each time, every gang holds its nodes for
another time that is drawn from the past (`RunTimes`), and the jobs start in the order of the queue
by the rule of `queue`: while a job waits for a host, no later job gets this host. Jobs that arrive
later are not played. What they and other causes change is learned from earlier estimates
(`correct`).
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import ceil, exp, inf, log
from operator import add, sub
from typing import TYPE_CHECKING

from cavvy.domain.values import Struct, field

if TYPE_CHECKING:
    from random import Random

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

REPLICAS = 10
# Past gangs that count, of each group and of all, the newest first. They begin with the same moment
# whether they have ended or not, as otherwise too many long ones or too many short ones counted.
_MOST_OF_GROUP, _MOST = 100, 500
_TRUST = 1  # a group of this many ended gangs counts as much as all wider groups together


class GangKind(Struct, frozen=True):
    """The job's name without the number at its end, its user and its project."""

    project: str
    user: str
    name: str


class PastGang(Struct, frozen=True):
    """How long a gang held its nodes, or has held them if it has not `ended`."""

    kind: GangKind
    seconds: float
    ended: bool = True


class PlannedGang(Struct, frozen=True, kw_only=True):
    """A gang whose end is to be predicted. `age_s` is how long it has held its nodes; `most_s` is
    the longest time that it may hold them, by the task's time limit."""

    kind: GangKind
    age_s: float = 0.0
    most_s: float = inf


class RunTimes:
    """The distributions of how long gangs hold their nodes. `past` contains gangs that have ended
    and gangs that run, sorted by the time of submission, the newest first.

    Like the templates of Smith, Taylor and Foster (1999), past gangs of jobs with the same name
    count most, then those of the same user, then those of all. Gangs that still run count as well,
    by the estimator of Kaplan and Meier (1958): without them, short jobs would count too much, as
    they end first. Each of `REPLICAS` predictions is made from another sample of the past gangs
    (Efron's bootstrap), because a few of them say little.
    """

    def __init__(self, past: Iterable[PastGang], random: "Random") -> None:
        groups: defaultdict[tuple[str, ...], list[PastGang]] = defaultdict(list)
        for gang in past:
            for key in _keys_of(gang.kind):
                if len(groups[key]) < (_MOST_OF_GROUP if key else _MOST):
                    groups[key].append(gang)
        self._groups: Mapping[tuple[str, ...], Sequence[PastGang]] = groups
        self._random = random
        self._curves: dict[tuple[tuple[str, ...], int], _Curve] = {}
        self._of_kinds: dict[tuple[GangKind, int], list[_Curve | None]] = {}  # by `_keys_of`

    def draw(self, gang: PlannedGang, replica: int) -> float:
        """Return for how many seconds from now the gang may hold its nodes, or infinity if nothing
        is known about gangs like it."""
        draw, age_s, at = self._random.random, gang.age_s, (gang.kind, replica)
        curves = self._of_kinds.get(at)
        if curves is None:
            keys = _keys_of(gang.kind)
            curves = self._of_kinds[at] = [self._curves.get((key, replica)) for key in keys]
        for place, curve in enumerate(curves):
            if curve is None:
                curve = curves[place] = self._find_curve(_keys_of(gang.kind)[place], replica)
            if place < _WIDEST and draw() * (curve.ended + _TRUST) >= curve.ended:
                continue
            seconds = curve.draw(age_s, 1.0 - draw())
            if seconds is not None:
                return max(0.0, min(seconds, gang.most_s) - gang.age_s)
            age_s = max(age_s, curve.longest_s)
        all_gangs = self._find_curve((), replica)
        if not all_gangs.ended:
            # users ask for more than they need: any part of it is as likely
            return draw() * max(0.0, gang.most_s - gang.age_s) if gang.most_s < inf else inf
        # It runs longer than all that have ended. As in a Pareto distribution with the index 1,
        # half of such gangs run for more than twice the time.
        return max(0.0, min(age_s / (1.0 - draw()), gang.most_s) - gang.age_s)

    def _find_curve(self, key: tuple[str, ...], replica: int) -> "_Curve":
        if (key, replica) not in self._curves:
            self._curves[key, replica] = self._resample(self._groups.get(key, ()))
        return self._curves[key, replica]

    def _resample(self, group: Sequence[PastGang]) -> "_Curve":
        return _Curve(self._random.choices(group, k=len(group)) if group else ())


_WIDEST = 2  # the place of the key of all gangs in `_keys_of`


def _keys_of(kind: GangKind) -> Sequence[tuple[str, ...]]:
    return ((kind.project, kind.name), (kind.project, kind.user, ""), ())


class _Curve:
    """The part of gangs that hold their nodes for longer than each time."""

    __slots__ = ("_gone", "_times", "ended", "longest_s")

    def __init__(self, gangs: Sequence[PastGang]) -> None:
        self._times: list[float] = []
        self._gone: list[float] = []  # the part of gangs that have ended by each of the times
        left, among = 1.0, len(gangs)
        for gang in sorted(gangs, key=lambda each: (each.seconds, not each.ended)):
            if gang.ended:
                left *= 1 - 1 / among
                self._times.append(gang.seconds)
                self._gone.append(1 - left)
            among -= 1
        self.ended = len(self._times)
        self.longest_s = self._times[-1] if self._times else 0.0

    def draw(self, age_s: float, part: float) -> float | None:
        """Return after how many seconds the gang ends if `part` of the gangs that reach its age
        hold their nodes for longer. Return None if it runs longer than all that have ended."""
        place = bisect_right(self._times, age_s)
        if place == len(self._times):
            return None
        alive = 1 - (self._gone[place - 1] if place else 0.0)
        target = 1 - alive * part
        at = bisect_left(self._gone, target - 1e-9, place)
        return self._times[at] if at < len(self._times) else None


def find_kind(project: str, user: str, name: str) -> GangKind:
    """Return the kind of a job. Jobs whose names differ only in the number at the end, such as
    train-2 and train-3, are of the same kind."""
    return GangKind(project, user, name.rstrip("0123456789").rstrip("-") or name)


DEEPEST = 1000  # jobs of the queue whose starts are estimated
_NEAR = 100  # jobs of the queue that are played `_PLAYS` times; the others are played `_FEW` times
# With n plays, the range between the k-th first and the k-th last of the n starts contains the next
# start with the chance (n + 1 - 2k) / (n + 1): 90 % for both of these numbers.
_PLAYS, _FEW = 39, 19
_ONE_BY_ONE = 64  # hosts of a lane; the hosts of a larger lane count as one large host
_SLACK = 1e-6  # sums of fractions are not exact in floating point
LATEST = 300  # earlier estimates that count for corrections
_NEAREST = 100  # of them that count for one estimate
_FEWEST = 20  # estimates from which on a range is corrected
_MISSED = 0.05  # the part of starts that may lie before, and of those that may lie after the range
_SHORT_S = 30.0  # differences of waits that are much shorter than this do not matter

Amounts = tuple[float, ...]  # of each resource of a host, such as GPUs, CPUs and memory


class HeldPart(Struct, frozen=True):
    """What a gang holds of one host of a lane."""

    lane: int
    host: int
    amounts: Amounts


class RunningGang(Struct, frozen=True, kw_only=True):
    """A gang that holds parts of hosts, and counts toward limits. If `left_s` is given, the gang
    ends after this time."""

    planned: PlannedGang
    parts: Sequence[HeldPart]
    limits: Mapping[str, float] = field(default_factory=dict)
    left_s: float | None = None


class LaneDemand(Struct, frozen=True):
    """What a job needs in a lane, on each of `nodes` different hosts."""

    lane: int
    nodes: int
    amounts: Amounts


class LinedUpJob(Struct, frozen=True, kw_only=True):
    """A waiting job. It needs one of `demands`, and its amounts of all limits, and does not start
    in the next `rests_s` seconds. `boots_s` are the times that its nodes may need until the work
    runs."""

    id: str
    planned: PlannedGang
    demands: Sequence[LaneDemand]
    limits: Mapping[str, float] = field(default_factory=dict)
    boots_s: Sequence[float] = ()
    rests_s: float = 0.0


class QueueState(Struct, frozen=True, kw_only=True):
    """The queue and the hosts at one time. `lanes` contains what is free on each host of each
    lane: the hosts of a lane can be used by the same waiting jobs. `limits` is what is left of
    each limit."""

    lanes: Sequence[Sequence[Amounts]]
    running: Sequence[RunningGang]
    line: Sequence[LinedUpJob]
    limits: Mapping[str, float] = field(default_factory=dict)


class StartEstimate(Struct, frozen=True):
    """In how many seconds a job's work starts: the median, and the range that contains the start in
    90 of 100 cases."""

    low_s: float
    median_s: float
    high_s: float


def estimate_starts(
    state: QueueState, run_times: RunTimes, random: "Random"
) -> Mapping[str, StartEstimate]:
    """Return the estimates of the first jobs in the line. A job is missing if too little is
    known."""
    state = _merge_hosts(state)
    line = state.line[:DEEPEST]
    starts: list[list[float]] = [[] for _ in line]
    for number in range(_PLAYS):
        played = _play(state, line if number < _FEW else line[:_NEAR], run_times, number, random)
        for times, start in zip(starts, played, strict=False):
            times.append(start)
    found = {job.id: _summarize(times) for job, times in zip(line, starts, strict=True)}
    return {job_id: estimate for job_id, estimate in found.items() if estimate is not None}


def _summarize(starts: Sequence[float]) -> StartEstimate | None:
    ordered = sorted(starts)
    edge = (len(ordered) + 1) // 20 - 1
    low, median, high = ordered[edge], ordered[len(ordered) // 2], ordered[-1 - edge]
    return None if high == inf else StartEstimate(low, median, high)


def _play(
    state: QueueState,
    line: Sequence[LinedUpJob],
    run_times: RunTimes,
    number: int,
    random: "Random",
) -> Sequence[float]:
    """Return when each job starts in one play, in seconds from now."""
    lanes = [_Lane(hosts) for hosts in state.lanes]
    limits = {name: _Limit(left) for name, left in state.limits.items()}
    replica = number % REPLICAS
    for gang in state.running:
        end = run_times.draw(gang.planned, replica) if gang.left_s is None else gang.left_s
        for part in gang.parts:
            lanes[part.lane].ends.append((end, part.host, part.amounts))
        for name, amount in gang.limits.items():
            limits[name].ends.append((end, amount))
    for lane in lanes:
        heapify(lane.ends)
    for limit in limits.values():
        heapify(limit.ends)
    starts = [inf] * len(line)
    for place, start, hosts, demand in _start_in_order(line, lanes, limits):
        job = line[place]
        boot = job.boots_s[int(random.random() * len(job.boots_s))] if job.boots_s else 0.0
        starts[place] = start + boot
        if demand is None:
            continue
        end = start + run_times.draw(job.planned, replica)
        for host in hosts:
            lanes[demand.lane].take(host, demand.amounts, end)
        for name, amount in job.limits.items():
            limits[name].left -= amount
            heappush(limits[name].ends, (end, amount))
    return starts


def _start_in_order(
    line: Sequence[LinedUpJob], lanes: Sequence["_Lane"], limits: Mapping[str, "_Limit"]
) -> Iterator[tuple[int, float, Sequence[int], LaneDemand | None]]:
    """Yield the place in the line of each job, and its start. The caller takes the hosts before it
    asks for the next one. A job that rests keeps no job waiting that can start before it.
    """

    def is_resting(place: int) -> bool:
        job = line[place]
        return job.rests_s > 0 and any(lanes[each.lane].now < job.rests_s for each in job.demands)

    resting: list[int] = []
    for place, job in enumerate(line):
        if job.rests_s and is_resting(place):
            resting.append(place)
            continue
        start = _start(job, lanes, limits)
        while (
            resting
            and (woken := next((at for at in resting if not is_resting(at)), None)) is not None
        ):
            resting.remove(woken)
            yield woken, *_start(line[woken], lanes, limits)
            start = _start(job, lanes, limits)
        yield place, *start
    for place in sorted(resting, key=lambda each: line[each].rests_s):
        yield place, *_start(line[place], lanes, limits)


def _start(
    job: LinedUpJob, lanes: Sequence["_Lane"], limits: Mapping[str, "_Limit"]
) -> tuple[float, Sequence[int], LaneDemand | None]:
    """Return when the job starts, and on which hosts of which lane. Advance its lanes to this time,
    as no later job starts there earlier."""
    earliest = job.rests_s
    for name, amount in job.limits.items():
        earliest = max(earliest, limits[name].find(amount))
    if earliest == inf:
        return inf, (), None
    if len(job.demands) == 1:
        demand = job.demands[0]
        hosts = lanes[demand.lane].wait_for(demand, earliest)
        return (lanes[demand.lane].now, hosts, demand) if hosts else (inf, (), None)
    for demand in job.demands:
        lanes[demand.lane].advance(earliest)
    open_demands = list(job.demands)
    while open_demands:
        number = min((each.lane for each in open_demands), key=lambda each: lanes[each].now)
        lane = lanes[number]
        for demand in open_demands:
            if demand.lane != number:
                continue
            if hosts := lane.find(demand):
                for other in job.demands:
                    lanes[other.lane].advance(lane.now)
                return lane.now, hosts, demand
        if lane.end_next() is None:
            open_demands = [each for each in open_demands if each.lane != number]
    for demand in job.demands:
        lanes[demand.lane].now = inf
    return inf, (), None


class _Lane:
    """The hosts of a lane in one play: what is free at the time `now`, and which parts end
    later."""

    __slots__ = ("_looked", "_wanted", "ends", "free", "now")

    def __init__(self, free: Sequence[Amounts]) -> None:
        self.free = list(free)
        self.ends: list[tuple[float, int, Amounts]] = []
        self.now = 0.0
        # heap of hosts: all others have less free than `_wanted`
        self._wanted: Amounts = ()
        self._looked: list[int] = []

    def advance(self, until: float) -> None:
        while self.ends and inf > self.ends[0][0] <= until:
            self.end_next()
        self.now = max(self.now, until)

    def end_next(self) -> int | None:
        """Advance to the next end, and return its host, or None if no part ends any more."""
        if not self.ends or self.ends[0][0] == inf:
            return None
        at, host, amounts = heappop(self.ends)
        self.now = max(self.now, at)
        self.free[host] = tuple(map(add, self.free[host], amounts))
        heappush(self._looked, host)
        return host

    def wait_for(self, demand: LaneDemand, earliest: float) -> Sequence[int]:
        """Advance to when there is enough free for the only demand of a job, and return the hosts,
        or advance to the end of time and return nothing."""
        self.advance(earliest)
        hosts = self.find(demand)
        while not hosts:
            freed = self.end_next()
            if freed is None:
                self.now = inf
                return ()
            if _fits(demand.amounts, self.free[freed]):  # else no more hosts suffice than before
                hosts = (freed,) if demand.nodes == 1 else self.find(demand)
        self.advance(self.now)
        return hosts

    def find(self, demand: LaneDemand) -> Sequence[int]:
        """Return hosts that have enough free, or nothing if they are too few."""
        wanted, free = demand.amounts, self.free
        if demand.nodes > 1:
            hosts = [host for host, left in enumerate(free) if _fits(wanted, left)]
            return hosts[: demand.nodes] if len(hosts) >= demand.nodes else ()
        if wanted != self._wanted:
            self._wanted, self._looked = wanted, [*range(len(free))]
        while self._looked and not _fits(wanted, free[self._looked[0]]):
            heappop(self._looked)
        return self._looked[:1]

    def take(self, host: int, amounts: Amounts, until: float) -> None:
        self.free[host] = tuple(map(sub, self.free[host], amounts))
        heappush(self.ends, (until, host, amounts))


class _Limit:
    """What is left of a limit in one play."""

    __slots__ = ("ends", "left", "now")

    def __init__(self, left: float) -> None:
        self.left = left
        self.ends: list[tuple[float, float]] = []
        self.now = 0.0

    def find(self, amount: float) -> float:
        """Return from when this amount is left. Later jobs do not start earlier."""
        while self.left < amount - _SLACK:
            if not self.ends or self.ends[0][0] == inf:
                return inf
            at, freed = heappop(self.ends)
            self.now = max(self.now, at)
            self.left += freed
        return self.now


def _fits(wanted: Amounts, free: Amounts) -> bool:
    for amount, left in zip(wanted, free, strict=True):  # noqa: SIM110 - runs most often
        if amount > left + _SLACK:
            return False
    return True


def _merge_hosts(state: QueueState) -> QueueState:
    """Let the hosts of each large lane count as one host."""
    large = {number for number, hosts in enumerate(state.lanes) if len(hosts) > _ONE_BY_ONE}
    if not large:
        return state

    def merge(part: HeldPart) -> HeldPart:
        return HeldPart(part.lane, 0, part.amounts) if part.lane in large else part

    def enlarge(demand: LaneDemand) -> LaneDemand:
        if demand.lane not in large:
            return demand
        amounts = tuple(amount * demand.nodes for amount in demand.amounts)
        return LaneDemand(demand.lane, 1, amounts)

    return QueueState(
        lanes=[
            [tuple(map(sum, zip(*hosts, strict=True)))] if number in large else hosts
            for number, hosts in enumerate(state.lanes)
        ],
        running=[
            RunningGang(
                planned=gang.planned,
                parts=[merge(part) for part in gang.parts],
                limits=gang.limits,
                left_s=gang.left_s,
            )
            for gang in state.running
        ],
        line=[
            LinedUpJob(
                id=job.id,
                planned=job.planned,
                demands=[enlarge(demand) for demand in job.demands],
                limits=job.limits,
                boots_s=job.boots_s,
                rests_s=job.rests_s,
            )
            for job in state.line[:DEEPEST]
        ],
        limits=state.limits,
    )


class EstimateOutcome(Struct, frozen=True):
    """An estimate without corrections, and after how many seconds the work started. If it has not
    `started` yet, it will wait for longer than `wait_s`."""

    estimate: StartEstimate
    wait_s: float
    started: bool = True


def correct(estimate: StartEstimate, outcomes: Sequence[EstimateOutcome]) -> StartEstimate:
    """Return the estimate with the range that contains the start in 90 of 100 cases, by the
    outcomes of earlier estimates."""
    known = [each for each in outcomes if each.started or each.wait_s > each.estimate.high_s]
    if len(known) < _FEWEST:
        return estimate
    median_s = _scale(estimate.median_s)
    known.sort(key=lambda each: abs(_scale(each.estimate.median_s) - median_s))
    known = known[:_NEAREST]
    late = _find_edge([_scale(each.wait_s) - _scale(each.estimate.high_s) for each in known])
    early = _find_edge([_scale(each.estimate.low_s) - _scale(each.wait_s) for each in known])
    shifts = sorted(_scale(each.wait_s) - _scale(each.estimate.median_s) for each in known)
    low = _unscale(_scale(estimate.low_s) - early)
    high = _unscale(_scale(estimate.high_s) + late)
    median = _unscale(_scale(estimate.median_s) + shifts[len(shifts) // 2])
    return StartEstimate(min(low, median), median, max(high, median))


def _find_edge(errors: Sequence[float]) -> float:
    place = ceil((len(errors) + 1) * (1 - _MISSED)) - 1
    return sorted(errors)[min(place, len(errors) - 1)]


def _scale(seconds: float) -> float:
    return log(max(0.0, seconds) + _SHORT_S)


def _unscale(value: float) -> float:
    return max(0.0, exp(value) - _SHORT_S)
