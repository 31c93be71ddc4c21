"""Replays a trace of requests for LoRA adapters, and compares rules that choose the replica.

    python benchmarks/adapters.py TRACE.csv [--adapters 200] [--replicas 4] [--slots 8] [--fold]

It takes some seconds.

The trace is a CSV file with the time, the adapter and the seconds of each request; the options
name its columns, by default those of GenTD26's `lora_request_trace.csv`, which names no adapters:
there, each group of users stands for one. The requests of the most frequent `--adapters` are
replayed or, with `--fold`, all requests, whose adapters are then hashed to as many. `--speed`
shortens the times between requests.

A replica runs up to `--concurrency` requests, and loads one adapter after another, each in
`--load-s`; a request begins when it has a place and its adapter. What replicas hold and forget is
the gateway's own code for each rule; so is the whole rule `adapters`. `loads` are per 1,000
requests. `busiest` is the most seconds that a replica has computed, relative to the mean.
"""

import argparse
import csv
import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import count, islice
from pathlib import Path

from measure import table

from cavvy.capabilities.language_models.adapters import (
    LoadTimes,
    ReplicaAdapters,
    choose_waiting,
    count_waits,
)
from cavvy.capabilities.language_models.cache_routing import CacheRouter, Visit
from cavvy.capabilities.language_models.prompts import Prompt
from cavvy.capabilities.serving.gateway.balancing import (
    FULL,
    choose_by_key,
    choose_least,
    hash_key,
    make_ring,
)
from cavvy.capabilities.serving.gateway.config import AdapterTerms, ReplicaAddress

ADDRESS = ReplicaAddress(id="r", host="127.0.0.1", port=1)


class Request:
    def __init__(self, at: float, adapter: str, seconds: float) -> None:
        self.at, self.adapter, self.seconds = at, adapter, seconds
        self.began = math.nan
        self.passed = 0
        self.replica = -1


class Replica:
    def __init__(self, terms: AdapterTerms, times: LoadTimes, concurrency: int) -> None:
        self.adapters = ReplicaAdapters(terms, ADDRESS, times)
        self.concurrency = concurrency
        self.running = 0
        self.loads = 0
        self.worked = 0.0
        self.loads_until = 0.0
        self.loading: dict[str, float] = {}

    def begin(self, request: Request, now: float, load_s: float) -> float:
        """Take the request; return when it begins to be computed."""
        self.running += 1
        name, adapters = request.adapter, self.adapters
        adapters.begin(name, now)
        if name not in self.loading and not adapters.holds(name):
            while len(adapters.loaded) >= adapters.terms.slots and adapters.find_victim():
                del adapters.loaded[adapters.find_victim()]
            self.loads_until = max(now, self.loads_until) + load_s
            self.loading[name] = self.loads_until
            self.loads += 1
            adapters.loaded[name] = adapters.terms.sources[name]
        return max(now, self.loading.get(name, now))

    def end(self, request: Request, now: float) -> None:
        self.running -= 1
        self.adapters.end(request.adapter)
        self.loading = {name: until for name, until in self.loading.items() if until > now}

    @property
    def has_room(self) -> bool:
        return self.running < self.concurrency


Choose = Callable[[Request, Sequence[int], float], int]


class Rules:
    """The rules, each of which gets the loads of the replicas that may take the request."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.turn = 0
        names = [f"replica-{number}" for number in range(len(replicas))]
        self.ring = make_ring(names)
        self.router = CacheRouter()
        self.router.set_replicas(names)
        self.visits: dict[int, Visit] = {}

    def least_load(self, request: Request, loads: Sequence[int], now: float) -> int:
        self.turn = (self.turn + 1) % len(loads)
        return choose_least(loads, self.turn)

    def round_robin(self, request: Request, loads: Sequence[int], now: float) -> int:
        self.turn += 1
        order = [(self.turn + step) % len(loads) for step in range(len(loads))]
        return next((each for each in order if loads[each] < FULL), -1)

    def by_hash(self, request: Request, loads: Sequence[int], now: float) -> int:
        total = sum(each.running for each in self.replicas)
        return choose_by_key(self.ring, hash_key(request.adapter.encode()), loads, total, 1.25)

    def by_adapters(self, request: Request, loads: Sequence[int], now: float) -> int:
        waits = count_waits([each.adapters for each in self.replicas], request.adapter, now)
        key = hash_key(request.adapter.encode())
        prompt = Prompt((), (), 1, key)
        found = self.router.choose(prompt, loads, now, waits)
        if found >= 0:
            self.visits[id(request)] = self.router.begin(found, prompt, now)
        return found

    def answer(self, request: Request, now: float) -> None:
        if (visit := self.visits.pop(id(request), None)) is not None:
            visit.answer(now)
            visit.end()


class Replay:
    """The replicas, and the requests that wait for one of them."""

    def __init__(self, adapters: set[str], name: str, options: argparse.Namespace) -> None:
        sources = dict.fromkeys(adapters, "/adapter")
        terms = AdapterTerms(api="vllm", sources=sources, slots=options.slots)
        times = LoadTimes()
        times.add(options.load_s)
        self.load_s = options.load_s
        self.replicas = [
            Replica(terms, times, options.concurrency) for _ in range(options.replicas)
        ]
        self.rules = Rules(self.replicas)
        self.choose: Choose = getattr(self.rules, name)
        self.picks = name == "by_adapters"  # which of the waiting requests a free replica gets
        self.waiting: dict[Request, None] = {}
        self.ends: list[tuple[float, int, Request]] = []
        self.numbers = count()

    def enter(self, request: Request) -> None:
        self.end_until(request.at)
        if not self._start(request, request.at):
            self.waiting[request] = None

    def end_until(self, until: float) -> None:
        while self.ends and self.ends[0][0] <= until:
            at, _, request = heapq.heappop(self.ends)
            self._end(request, at)

    def _start(self, request: Request, now: float) -> bool:
        loads = [
            each.running if each.has_room and each.adapters.takes(request.adapter) else FULL
            for each in self.replicas
        ]
        found = self.choose(request, loads, now) if min(loads) < FULL else -1
        if found < 0:
            for each in self.replicas:
                if each.has_room:
                    each.adapters.make_way()
            return False
        replica = self.replicas[found]
        request.replica = found
        request.began = replica.begin(request, now, self.load_s)
        replica.worked += request.seconds
        end = request.began + request.seconds
        heapq.heappush(self.ends, (end, next(self.numbers), request))
        return True

    def _end(self, request: Request, now: float) -> None:
        replica = self.replicas[request.replica]
        replica.end(request, now)
        self.rules.answer(request, now)
        adapters = replica.adapters
        ready = (each for each in list(islice(self.waiting, 100)) if adapters.takes(each.adapter))
        found = (
            choose_waiting(ready, adapters, lambda each: each) if self.picks else next(ready, None)
        )
        if found is not None and self._start(found, now):
            del self.waiting[found]


def replay(requests: list[Request], name: str, options: argparse.Namespace) -> list[str]:
    run = Replay({each.adapter for each in requests}, name, options)
    for each in requests:
        run.enter(each)
    run.end_until(math.inf)
    assert not run.waiting
    return describe(requests, run.replicas)


def describe(requests: list[Request], replicas: list[Replica]) -> list[str]:
    waits = sorted(each.began - each.at for each in requests)
    loads = sum(each.loads for each in replicas)
    worked = [each.worked for each in replicas]
    return [
        f"{1000 * loads / len(requests):.1f}",
        f"{sum(waits) / len(waits):.3f}",
        f"{waits[int(0.99 * len(waits))]:.2f}",
        f"{max(worked) * len(worked) / sum(worked):.3f}",
    ]


def read(options: argparse.Namespace) -> list[Request]:
    with options.trace.open() as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        name, text = row[options.adapter], row[options.time]
        try:
            at = float(text)
        except ValueError:
            at = datetime.fromisoformat(text).timestamp()
        if options.fold:
            name = str(hash_key(name.encode()) % options.adapters)
        found.append(Request(at, name, max(float(row[options.seconds] or 0), 0.1)))
    kept = {
        name for name, _ in Counter(each.adapter for each in found).most_common(options.adapters)
    }
    found = sorted((each for each in found if each.adapter in kept), key=lambda each: each.at)
    first = found[0].at
    for each in found:
        each.at = (each.at - first) / options.speed
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--slots", type=int, default=8, help="adapters in a replica")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in a replica")
    parser.add_argument("--speed", type=float, default=1.0, help="of the arrivals")
    parser.add_argument("--load-s", type=float, default=1.0)
    parser.add_argument("--fold", action="store_true")
    parser.add_argument("--time", default="gmt_create", help="a column, as all below")
    parser.add_argument("--adapter", default="groupId")
    parser.add_argument("--seconds", default="exec_time_seconds")
    options = parser.parse_args()
    rows = []
    for name in ("round_robin", "least_load", "by_hash", "by_adapters"):
        requests = read(options)
        rows.append([name.replace("_", " "), *replay(requests, name, options)])
    title = f"{options.trace.name}: {len(requests)} requests, speed {options.speed:g}"
    table(title, ["rule", "loads", "mean wait s", "P99", "busiest"], rows)


if __name__ == "__main__":
    main()
