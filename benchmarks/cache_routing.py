"""Replays a trace of prompts through the timing of an engine, and compares rules of routing.

    python benchmarks/cache_routing.py TRACE.jsonl.gz [--replicas 8] [--blocks 6000] [--speed 1]

A trace has Mooncake's format: for each request the time in milliseconds, the numbers of tokens of
the prompt and of the answer, and the hashes of the prompt's blocks of 512 tokens. `Engine` has the
timing and the scheduling of the engine in Dynamo's replay (lib/mocker, 1.1.1): passes of at most
8,192 tokens with chunked prefill, polynomials for their times, and a cache of blocks whose least
recently used end is forgotten first. If `dynamo.replay` can be imported, its own rows are printed.
The rule `cache` is the gateway's own code; it learns of responses when they begin and end, and with
events of what engines store. With `--unseen 0.5`, half of the conversations go to the first half of
the replicas without the router; the rows are those of the others. Takes 10 to 30 s a trace.
"""

import argparse
import gzip
import json
import tempfile
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from measure import table

from cavvy.capabilities.language_models.cache_routing import CacheRouter, Visit
from cavvy.capabilities.language_models.prompts import Prompt
from cavvy.capabilities.serving.gateway.balancing import hash_key

BLOCK = 512  # tokens
PASS_TOKENS = 8192
SEQUENCES_MAX = 256
OVERLAP_WEIGHTS = (1.0, 5.0, 20.0)
ENDS = tuple(range(BLOCK, 1000 * BLOCK, BLOCK))


class Request:
    def __init__(self, line: str, speed: float, unseen: float = 0.0) -> None:
        facts = json.loads(line)
        self.at = facts["timestamp"] / speed  # milliseconds, as all times here
        self.tokens: int = facts["input_length"]
        self.answer = max(facts["output_length"], 1)
        self.hashes: list[int] = facts["hash_ids"][: self.tokens // BLOCK]
        self.opening = hash_key(repr(self.hashes[:2]).encode())
        # whether its conversation goes to a replica without the router
        self.unseen = hash_key(b"%d" % self.opening) % 1000 < 1000 * unseen
        self.computed = self.emitted = self.cached = self.blocks = 0
        self.held: list[int] = []
        self.replica = -1
        self.began = self.ended = 0.0

    @property
    def is_computed(self) -> bool:
        return self.computed >= self.tokens


class Engine:
    """One replica. `events` are the times at which responses begin and end."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.used = 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_at = 0.0
        self.events: list[tuple[float, bool, Request]] = []
        self.told: list[tuple[float, int]] = []  # blocks that were stored, and when
        self._stored = 0
        self._active: dict[int, int] = {}
        self._idle: OrderedDict[object, None] = OrderedDict()

    def advance(self, until: float) -> None:
        """Run all passes that begin before `until`."""
        while self.running or self.waiting:
            at = self.free_at
            if not self.running:
                at = max(at, self.waiting[0].at)
            if at >= until:
                return
            arrives = self.waiting[0].at if self.waiting else until
            if arrives > at and all(each.is_computed for each in self.running):
                self._generate(at, min(until, arrives))
            else:
                self._run_pass(at)

    def tell(self, until: float) -> list[tuple[float, int]]:
        """Return what was stored, as key-value events would."""
        found = [each for each in self.told if each[0] <= until]
        self.told = self.told[len(found) :]
        return found

    def _generate(self, at: float, until: float) -> None:
        """Run passes that only generate tokens, as long as they take the same time."""
        step = self._decode_ms()
        count = min(each.answer - each.emitted for each in self.running)
        count = min(count, *(BLOCK - (each.computed - 1) % BLOCK for each in self.running))
        count = max(1, min(count, int((until - at) / step)))
        self._emit(at + count * step, self.running, count)

    def _run_pass(self, at: float) -> None:
        left, new = PASS_TOKENS, 0
        for each in self.running:
            if each.is_computed:
                left -= 1
            else:
                size = self._compute(each, left)
                left, new = left - size, new + size
        while self.waiting and self.waiting[0].at <= at and left > 0:
            request = self.waiting[0]
            found = self._find(request)
            need = -(-request.tokens // BLOCK) - found
            full = self.running and self.used + need > self.total
            if full or len(self.running) >= SEQUENCES_MAX:
                break
            self.waiting.popleft()
            self._take_held(request, found)
            self.running.append(request)
            size = self._compute(request, left)
            left, new = left - size, new + size
        end = at + _prefill_ms(new)
        ready = [each for each in self.running if each.is_computed]
        if ready:
            end += self._decode_ms()
        self._emit(end, ready, 1)

    def _compute(self, request: Request, left: int) -> int:
        size = min(request.tokens - request.computed, max(left, 0))
        self._grow(request, request.computed + size)
        return size

    def _emit(self, end: float, ready: Sequence[Request], count: int) -> None:
        for each in tuple(ready):
            if not each.emitted:
                each.began = end
                self.events.append((end, False, each))
            each.emitted += count
            self._grow(each, each.tokens + each.emitted - 1)
            if each.emitted >= each.answer:
                self.running.remove(each)
                self._release(each)
                each.ended = end
                self.events.append((end, True, each))
        if self._stored:
            self.told.append((end, self._stored))
            self._stored = 0
        self.free_at = end

    def _decode_ms(self) -> float:
        share = min(self.used / self.total, 1.0)
        return max(1.0, -25.74 * share * share + 54.01 * share + 5.74)

    # the cache

    def _find(self, request: Request) -> int:
        count = 0
        for block in request.hashes:
            if block not in self._active and block not in self._idle:
                break
            count += 1
        return count - (count * BLOCK >= request.tokens)

    def _take_held(self, request: Request, count: int) -> None:
        request.cached = request.computed = count * BLOCK
        request.blocks = count
        self.used += count
        for block in request.hashes[:count]:
            self._hold(request, block)

    def _hold(self, request: Request, block: int) -> None:
        self._stored += block not in self._active and block not in self._idle
        self._active[block] = self._active.get(block, 0) + 1
        self._idle.pop(block, None)
        request.held.append(block)

    def _grow(self, request: Request, computed: int) -> None:
        added = -(-computed // BLOCK) - request.blocks
        if added > 0:
            self.used += added
            request.blocks += added
            for _ in range(min(self.used + len(self._idle) - self.total, len(self._idle))):
                self._idle.popitem(last=False)
        for at in range(len(request.held), min(computed // BLOCK, len(request.hashes))):
            self._hold(request, request.hashes[at])
        request.computed = max(computed, request.computed)

    def _release(self, request: Request) -> None:
        self.used -= request.blocks
        for number in range(request.computed // BLOCK - len(request.held)):
            self._stored += 1
            self._idle[id(request), number] = None  # of the answer
        for block in reversed(request.held):
            self._active[block] -= 1
            if not self._active[block]:
                del self._active[block]
                self._idle[block] = None
                self._idle.move_to_end(block)


def _prefill_ms(tokens: int) -> float:
    return 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142 if tokens > 0 else 0.0


class Rule(Protocol):
    def choose(self, request: Request) -> int: ...
    def begin(self, request: Request, at: float) -> None: ...
    def end(self, request: Request) -> None: ...
    def hear(self, replica: int, told: list[tuple[float, int]]) -> None: ...


class RoundRobin:
    def __init__(self, count: int) -> None:
        self.count = count
        self.turn = -1
        self.loads = [0] * count

    def choose(self, request: Request) -> int:
        self.turn += 1
        return self.turn % self.count

    def begin(self, request: Request, at: float) -> None: ...

    def end(self, request: Request) -> None:
        self.loads[request.replica] -= 1

    def hear(self, replica: int, told: list[tuple[float, int]]) -> None: ...


class LeastLoad(RoundRobin):
    def choose(self, request: Request) -> int:
        self.turn += 1
        turns = [(load, (at - self.turn) % self.count) for at, load in enumerate(self.loads)]
        found = turns.index(min(turns))
        self.loads[found] += 1
        return found


class HashOfTwoBlocks(RoundRobin):
    def choose(self, request: Request) -> int:
        return request.opening % self.count


class ByCache:
    """Several gateways get the requests in turn. With `events`, engines tell what they store."""

    def __init__(self, count: int, blocks: int, gateways: int = 1, events: bool = False) -> None:
        self.events = events
        self.routers = [CacheRouter(blocks * BLOCK, gateways > 1) for _ in range(gateways)]
        for each in self.routers:
            each.set_replicas([f"replica-{number}" for number in range(count)])
        self.loads = [0] * count
        self.visits: dict[int, Visit] = {}
        self.turn = 0

    def choose(self, request: Request) -> int:
        prompt = Prompt(request.hashes, ENDS, request.tokens, request.opening)
        self.turn += 1
        router = self.routers[hash_key(b"%d" % self.turn) % len(self.routers)]
        found = router.choose(prompt, self.loads, request.at / 1000)
        self.visits[id(request)] = router.begin(found, prompt, request.at / 1000)
        return found

    def begin(self, request: Request, at: float) -> None:
        self.visits[id(request)].answer(at / 1000)

    def end(self, request: Request) -> None:
        self.visits.pop(id(request)).end()

    def hear(self, replica: int, told: list[tuple[float, int]]) -> None:
        for at, blocks in told if self.events else ():
            for each in self.routers:
                each.store(f"replica-{replica}", blocks * BLOCK, at / 1000)


def replay(requests: list[Request], rule: Rule, replicas: int, blocks: int) -> list[str]:
    engines = [Engine(blocks) for _ in range(replicas)]
    for request in requests:
        for at, ends, other in _list_events(engines, request.at):
            if not other.unseen:
                rule.end(other) if ends else rule.begin(other, at)
        for number, engine in enumerate(engines):
            rule.hear(number, engine.tell(request.at))
        if request.unseen:
            request.replica = request.opening % (replicas // 2)
        else:
            request.replica = rule.choose(request)
        engines[request.replica].waiting.append(request)
    for each in engines:
        each.advance(1e18)
    return describe([each for each in requests if not each.unseen], replicas)


def _list_events(engines: list[Engine], until: float) -> Iterator[tuple[float, bool, Request]]:
    found = []
    for each in engines:
        each.advance(until)
        found += [event for event in each.events if event[0] <= until]
        each.events = [event for event in each.events if event[0] > until]
    yield from sorted(found, key=lambda event: event[:2])


def describe(requests: list[Request], replicas: int) -> list[str]:
    waits = sorted(each.began - each.at for each in requests)
    tokens = [0] * replicas
    counts = [0] * replicas
    for each in requests:
        tokens[each.replica] += each.tokens
        counts[each.replica] += 1
    return [
        f"{sum(each.cached for each in requests) / sum(tokens):.3f}",
        f"{sum(waits) / len(waits):.1f}",
        f"{waits[int(0.9 * len(waits))]:.1f}",
        f"{waits[int(0.99 * len(waits))]:.1f}",
        f"{max(counts) * replicas / len(requests):.3f}",
        f"{max(tokens) * replicas / sum(tokens):.3f}",
    ]


def replay_in_dynamo(path: Path, replicas: int, blocks: int, speed: float) -> Iterator[list[str]]:
    try:
        from dynamo.llm import KvRouterConfig, MockEngineArgs  # type: ignore[import-not-found]
        from dynamo.replay import run_trace_replay  # type: ignore[import-not-found]
    except ImportError:
        return
    engine = MockEngineArgs.from_json(json.dumps({"num_gpu_blocks": blocks, "block_size": BLOCK}))
    for weight in (None, *OVERLAP_WEIGHTS):
        config = None
        if weight is not None:
            config = KvRouterConfig.from_json(json.dumps({"overlap_score_weight": weight}))
        found = run_trace_replay(
            path,
            extra_engine_args=engine,
            router_config=config,
            num_workers=replicas,
            router_mode="round_robin" if config is None else "kv_router",
            arrival_speedup_ratio=speed,
        )
        times = [found[f"{name}_ttft_ms"] for name in ("mean", "p90", "p99")]
        name = "round robin" if weight is None else f"overlap weight {weight:g}"
        reused = f"{found['prefix_cache_reused_ratio']:.3f}"
        yield [f"Dynamo, {name}", reused, *(f"{each:.1f}" for each in times), "", ""]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=6000, help="of 512 tokens, in a cache")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument(
        "--unseen", type=float, default=0.0, help="share that the router does not see"
    )
    parser.add_argument("--gateways", type=int, nargs="*", default=[2, 4])
    options = parser.parse_args()
    opened = gzip.open if options.trace.suffix == ".gz" else open
    with opened(options.trace, "rt") as file:
        lines = file.readlines()
    count, blocks = options.replicas, options.blocks
    rules: dict[str, Rule] = {
        "round robin": RoundRobin(count),
        "least load": LeastLoad(count),
        "hash of two blocks": HashOfTwoBlocks(count),
        "cache": ByCache(count, blocks),
        "cache, with events": ByCache(count, blocks, events=True),
    }
    for number in options.gateways:
        rules[f"cache, {number} gateways"] = ByCache(count, blocks, number)
        rules[f"cache, {number} gateways, with events"] = ByCache(count, blocks, number, True)
    rows = []
    for name, rule in rules.items():
        requests = [Request(line, options.speed, options.unseen) for line in lines]
        rows.append([name, *replay(requests, rule, count, blocks)])
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as plain:
        plain.writelines(lines)
        plain.flush()
        rows += replay_in_dynamo(Path(plain.name), count, blocks, options.speed)
    titles = ["router", "reused", "mean ms", "P90", "P99", "requests max/mean", "tokens max/mean"]
    table(f"{options.trace.name}, {count} replicas, speed {options.speed:g}", titles, rows)


if __name__ == "__main__":
    main()
