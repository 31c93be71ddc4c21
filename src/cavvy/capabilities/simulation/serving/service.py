"""A simulated service: a queue of requests, and replicas that start slowly, process several
requests in parallel, and end.

Requests wait in the order of their arrival until a replica has a free slot. A request that a lost
replica was processing returns to the head of the queue once; the second time, it fails. A replica
is billed from its launch until its end.

The engine of a language model computes one prompt after the other, and generates no tokens
meanwhile. Then all requests whose prompts are computed get a token in each step; a step takes
longer the more of them there are. The answers are measured with the code of the gateway.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from operator import add
from pathlib import Path
from random import Random

from cavvy.capabilities.serving.gateway.answer_times import AnswerTimes, FirstToken
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts
from cavvy.capabilities.serving.gateway.work import ReplicaWork
from cavvy.capabilities.serving.loads import PromptSums, TokenTimes
from cavvy.capabilities.simulation.serving.requests import RequestTrace, TokenSpeed
from cavvy.capabilities.simulation.traces.readers import list_traces, read_series
from cavvy.domain.values import Struct


class ServiceSetting(Struct, frozen=True, kw_only=True):
    """The properties of a simulated service's replicas, and the service's target: a request is on
    time if it waits at most `slo_wait_s`.

    A cold start lasts `cold_start_s` times a factor between 1 - `cold_spread` and 1 +
    `cold_spread`. With `speed`, a replica is an engine of a language model (`engines.py`), and the
    objectives `ttft_s` and `token_gap_s` are measured.
    """

    concurrency: int = 4
    cold_start_s: float = 60.0
    cold_spread: float = 0.2
    slo_wait_s: float = 10.0
    most_replicas: int = 1000
    on_demand_usd_hr: float = 3.0
    spot_usd_hr: float = 1.0
    seed: int = 0
    speed: TokenSpeed | None = None
    ttft_s: float = inf
    token_gap_s: float = inf


class ReplicaMarket(Struct, frozen=True, kw_only=True):
    """One market for replicas. `capacity` lists, for each step of `step_s` seconds, how many
    replicas can run in the market; None means no limit.
    """

    name: str
    region: str
    spot: bool
    usd_hr: float
    capacity: tuple[int, ...] | None = None
    step_s: float = 30.0

    def room(self, now_s: float) -> int:
        """Return how many replicas can now run in the market."""
        if self.capacity is None:
            return 1_000_000
        return self.capacity[min(len(self.capacity) - 1, int(now_s / self.step_s))]


class SimulatedReplica:
    """One replica and the requests that it is processing."""

    __slots__ = (
        "busy",
        "draining",
        "engine",
        "launched_s",
        "lost",
        "market",
        "number",
        "ready_s",
        "working",
    )

    def __init__(self, number: int, market: int, launched_s: float, ready_s: float) -> None:
        self.number, self.market = number, market
        self.launched_s, self.ready_s = launched_s, ready_s
        self.busy = 0
        self.draining = self.lost = False
        self.working: set[int] = set()
        self.engine: SimulatedEngine | None = None


class WaitRecord:
    """The results of the requests: the wait of each request until its last start, and the
    failures."""

    def __init__(self, count: int) -> None:
        self.waits_s: list[float | None] = [None] * count
        self.failed: set[int] = set()


class EngineAnswers:
    """The times of all answers of a simulated service. `first_s` and `gaps_s` contain each answer's
    time to the first token and mean time between tokens.
    """

    def __init__(self, trace: RequestTrace, ttft_s: float, token_gap_s: float) -> None:
        self.trace = trace
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self._times = AnswerTimes(ttft_s, token_gap_s)

    def add(self, request: int, first: FirstToken, now_s: float) -> None:
        prompt, answer = self.trace.tokens[request]
        self._times.add(round(prompt), round(answer), first, now_s)
        self.first_s.append(first.after_s)
        if answer > 1:
            self.gaps_s.append((now_s - first.at) / (answer - 1))

    def describe(self) -> TokenTimes:
        return self._times.describe()


class SimulatedEngine:
    """The engine of one replica. `version` is the number of the last plan for its next step."""

    def __init__(self, answers: EngineAnswers, speed: TokenSpeed) -> None:
        self.version = 0
        self._answers, self._speed = answers, speed
        self._work = ReplicaWork(KeptCounts())
        self._prompts: deque[tuple[int, float]] = deque()  # with the time at which they were sent
        self._prompt_ends_s = inf  # the end of the first prompt
        self._now_s = 0.0
        # how many tokens each request that has run since the start would have got; a request ends
        # when this number reaches its own
        self._made = 0.0
        self._running: list[tuple[float, int, FirstToken]] = []

    def add(self, request: int, now_s: float) -> None:
        self._pass(now_s)
        self._work.begin("", now_s)
        self._work.change_prompts(1, now_s)
        self._prompts.append((request, now_s))
        if len(self._prompts) == 1:
            self._begin_prompt(now_s)

    def find_next(self) -> float:
        """Return when the next prompt or answer ends."""
        if self._prompts or not self._running:
            return self._prompt_ends_s
        return self._now_s + max(0.0, self._running[0][0] - self._made) * self._step_s

    def advance(self, now_s: float) -> Iterator[int]:
        """Take the next step, which ends now; yield the requests whose answers are complete."""
        self._pass(now_s)
        if self._prompts and now_s >= self._prompt_ends_s:
            request, started_at = self._prompts.popleft()
            arrived_at = self._answers.trace.arrivals_s[request]
            self._work.change_prompts(-1, now_s)
            first = FirstToken(arrived_at, started_at, self._work, now_s)
            more = max(0.0, self._answers.trace.tokens[request][1] - 1)
            heappush(self._running, (self._made + more, request, first))
            self._prompt_ends_s = inf
            if self._prompts:
                self._begin_prompt(now_s)
        while self._running and self._running[0][0] <= self._made + 1e-6:
            _, request, first = heappop(self._running)
            self._answers.add(request, first, now_s)
            self._work.end("", now_s)
            yield request

    @property
    def _step_s(self) -> float:
        return (self._speed.answer_ms + self._speed.running_ms * len(self._running)) / 1e3

    def _begin_prompt(self, now_s: float) -> None:
        prompt = self._answers.trace.tokens[self._prompts[0][0]][0]
        taken_s = (self._speed.base_ms + self._speed.prompt_ms * prompt) / 1e3
        self._prompt_ends_s = now_s + taken_s

    def _pass(self, now_s: float) -> None:
        if self._running and not self._prompts and self._step_s:
            self._made += (now_s - self._now_s) / self._step_s
        self._now_s = now_s


class SimulatedService:
    """The state of one service. The caller advances the time, and launches or ends replicas."""

    def __init__(
        self,
        trace: RequestTrace,
        setting: ServiceSetting,
        markets: Sequence[ReplicaMarket],
        *,
        holds: bool,
    ) -> None:
        self.trace, self.setting, self.markets = trace, setting, markets
        self.holds = holds
        self.now_s = 0.0
        self.record = WaitRecord(len(trace.arrivals_s))
        self.starting: list[list[SimulatedReplica]] = [[] for _ in markets]
        self.ready: list[list[SimulatedReplica]] = [[] for _ in markets]
        self.queue: deque[int] = deque()
        self.in_flight = 0
        # the sum of the times at which the requests in flight began to be served
        self._begun_s = 0.0
        self.usd = self.replica_s = 0.0
        self.launches = self.most = 0
        self.lost = [0] * len(markets)
        self.refused = [0] * len(markets)
        self.cold_starts: list[tuple[int, float]] = []
        self.arrived = self.started = self.late = self.completed = 0
        self.completed_s = 0.0
        self._sums = [0.0] * len(PromptSums.__struct_fields__)
        self._next = 0
        self._ends: list[tuple[float, int, int, SimulatedReplica]] = []
        self._free: list[tuple[int, int, SimulatedReplica]] = []
        self._draining: set[int] = set()
        self._again: set[int] = set()
        self._random = Random(setting.seed)
        self.answers = EngineAnswers(trace, setting.ttft_s, setting.token_gap_s)
        # when the next replica becomes ready
        self._soonest_s = inf

    @property
    def done(self) -> bool:
        """Whether no work remains: all requests have arrived, and no request is waiting or being
        processed.
        """
        return self._next == len(self.trace.arrivals_s) and not self.queue and not self.in_flight

    @property
    def in_flight_s(self) -> float:
        """The total time for which the requests in flight have been processed."""
        return self.in_flight * self.now_s - self._begun_s

    @property
    def prompts(self) -> PromptSums:
        return PromptSums(**dict(zip(PromptSums.__struct_fields__, self._sums, strict=True)))

    @property
    def backlog_size(self) -> float:
        """The number of tokens in the prompts of waiting requests."""
        return sum(map(self._size_of, self.queue))

    def _size_of(self, request: int) -> float:
        """Return the tokens of a request's prompt, or 1 if the trace does not state them."""
        return self.trace.tokens[request][0] if self.trace.tokens else 1.0

    def count_held(self, market: int) -> int:
        return len(self.starting[market]) + len(self.ready[market])

    def advance(self, to_s: float) -> None:
        """Execute all events up to the time `to_s`."""
        arrivals = self.trace.arrivals_s
        self._take_capacity(to_s)
        while True:
            arrival = arrivals[self._next] if self._next < len(arrivals) else inf
            end = self._ends[0][0] if self._ends else inf
            at = min(arrival, end, self._soonest_s)
            if at > to_s:
                self.now_s = to_s
                return
            self.now_s = max(self.now_s, at)
            if at == self._soonest_s:
                self._become_ready()
            elif at == end:
                self._end()
            else:
                self._arrive()

    def order(self, wanted: Sequence[int]) -> None:
        """Launch or end replicas so that each market has the wanted number. Replicas that have not
        started are ended first. If more replicas must end, the ready replicas with the fewest
        requests are chosen. A ready replica first finishes the requests that it has, and then ends.
        """
        for market, count in enumerate(wanted):
            while self.count_held(market) > count:
                if self.starting[market]:
                    self._stop(self.starting[market].pop())
                else:
                    replica = min(self.ready[market], key=lambda each: (each.busy, -each.number))
                    self.ready[market].remove(replica)
                    self._drain(replica)
            room = self.markets[market].room(self.now_s)
            for _ in range(count - self.count_held(market)):
                if self.count_held(market) >= room:
                    self.refused[market] += 1
                else:
                    self._launch(market)
        self._find_soonest()
        held = sum(map(self.count_held, range(len(self.markets))))
        self.most = max(self.most, held)

    def start_warm(self, market: int, count: int) -> None:
        """Begin with ready replicas."""
        for _ in range(count):
            self._launch(market, warm=True)
        self.most = max(self.most, count)
        while self._soonest_s <= self.now_s:
            self._become_ready()

    def finish(self) -> None:
        """End all replicas."""
        self.order([0] * len(self.markets))

    def _launch(self, market: int, *, warm: bool = False) -> None:
        spread = self.setting.cold_spread
        factor = 0.0 if warm else self._random.uniform(1 - spread, 1 + spread)
        cold_s = self.setting.cold_start_s * factor
        replica = SimulatedReplica(self.launches, market, self.now_s, self.now_s + cold_s)
        if self.setting.speed is not None:
            replica.engine = SimulatedEngine(self.answers, self.setting.speed)
        self.launches += 1
        held = self.starting[market]
        held.append(replica)
        held.sort(key=lambda each: each.ready_s)
        self._soonest_s = min(self._soonest_s, held[0].ready_s)

    def _become_ready(self) -> None:
        held = min((s for s in self.starting if s), key=lambda each: each[0].ready_s)
        replica = held.pop(0)
        self._find_soonest()
        self.ready[replica.market].append(replica)
        if replica.ready_s > replica.launched_s:
            self.cold_starts.append((replica.market, replica.ready_s - replica.launched_s))
        heappush(self._free, (0, replica.number, replica))
        self._dispatch()

    def _arrive(self) -> None:
        self.arrived += 1
        self._sums[0] += self._size_of(self._next)
        if not self.holds and not any(self.ready):
            self.record.failed.add(self._next)
        else:
            self.queue.append(self._next)
            self._dispatch()
        self._next += 1

    def _dispatch(self) -> None:
        """Assign waiting requests to the ready replicas with the fewest requests."""
        while self.queue and self._free:
            busy, _, replica = self._free[0]
            if replica.draining or replica.busy != busy:
                heappop(self._free)
                continue
            heappop(self._free)
            self._start(self.queue.popleft(), replica)
            if replica.busy < self.setting.concurrency:
                heappush(self._free, (replica.busy, replica.number, replica))

    def _start(self, request: int, replica: SimulatedReplica) -> None:
        wait_s = self.now_s - self.trace.arrivals_s[request]
        self.record.waits_s[request] = wait_s
        self.started += 1
        self.late += wait_s > self.setting.slo_wait_s
        replica.busy += 1
        replica.working.add(request)
        self.in_flight += 1
        self._begun_s += self.now_s
        if replica.engine is not None:
            replica.engine.add(request, self.now_s)
            self._await_engine(replica, replica.engine)
            return
        end_s = self.now_s + self.trace.services_s[request]
        heappush(self._ends, (end_s, request, replica.number, replica))

    def _await_engine(self, replica: SimulatedReplica, engine: SimulatedEngine) -> None:
        """Look at the engine again at its next step; earlier plans for it are void."""
        engine.version += 1
        if (next_s := engine.find_next()) < inf:
            heappush(self._ends, (next_s, engine.version, replica.number, replica))

    def _end(self) -> None:
        _, mark, _, replica = heappop(self._ends)
        if replica.lost:
            return
        engine = replica.engine
        if engine is None:
            self._end_request(mark, replica, self.trace.services_s[mark])
        elif mark == engine.version:
            for request in engine.advance(self.now_s):
                waited_s = self.record.waits_s[request] or 0.0
                taken_s = self.now_s - self.trace.arrivals_s[request] - waited_s
                self._end_request(request, replica, taken_s)
            self._await_engine(replica, engine)

    def _end_request(self, request: int, replica: SimulatedReplica, taken_s: float) -> None:
        replica.busy -= 1
        replica.working.discard(request)
        self.in_flight -= 1
        self._begun_s -= self.now_s - taken_s
        self.completed += 1
        self.completed_s += taken_s
        size = self._size_of(request)
        ended = (1.0, size, taken_s, size * size, size * taken_s)
        self._sums[1:] = map(add, self._sums[1:], ended)
        if not replica.draining:
            heappush(self._free, (replica.busy, replica.number, replica))
            self._dispatch()
        elif not replica.busy:
            self._stop(replica)

    def _drain(self, replica: SimulatedReplica) -> None:
        replica.draining = True
        self._draining.add(replica.number)
        if not replica.busy:
            self._stop(replica)

    def _stop(self, replica: SimulatedReplica) -> None:
        """End a replica without requests, and add the replica's cost to the total."""
        replica.draining = True
        self._draining.discard(replica.number)
        length_s = self.now_s - replica.launched_s
        self.replica_s += length_s
        self.usd += length_s / 3600.0 * self.markets[replica.market].usd_hr

    def _take_capacity(self, now_s: float) -> None:
        """End the youngest replicas of markets that exceed their capacity."""
        for market, each in enumerate(self.markets):
            if each.capacity is None:
                continue
            room = each.room(now_s)
            while self.count_held(market) > room:
                held = self.starting[market] or self.ready[market]
                self.lost[market] += 1
                self._lose(held.pop())

    def _lose(self, replica: SimulatedReplica) -> None:
        replica.lost = True
        for request in sorted(replica.working, reverse=True):
            self.in_flight -= 1
            waited_s = self.record.waits_s[request] or 0.0
            self._begun_s -= self.trace.arrivals_s[request] + waited_s
            if request in self._again:
                self.record.failed.add(request)
            else:
                self._again.add(request)
                self.queue.appendleft(request)
        replica.working.clear()
        self._stop(replica)
        self._find_soonest()
        self._dispatch()

    def _find_soonest(self) -> None:
        self._soonest_s = min((s[0].ready_s for s in self.starting if s), default=inf)


def read_spot_markets(folder: Path, usd_hr: float) -> Sequence[ReplicaMarket]:
    """Return one market for each recording in the folder; all markets have the same price. Raises
    TraceError.
    """
    return [
        ReplicaMarket(
            name=series.market.name,
            region=series.market.region,
            spot=True,
            usd_hr=usd_hr,
            capacity=tuple(series.counts),
            step_s=series.gap_s,
        )
        for series in map(read_series, list_traces([folder]))
    ]
