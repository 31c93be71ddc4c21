"""Chooses the replica for a prompt: what it still has to compute, weighed against what waits there.

The cost of a replica is a number of prompt tokens:

    tokens of the prompt that the replica does not hold
    + tokens that it holds less of than the best replica, because a second copy takes the place of
      another prompt
    + tokens of other prompts that wait there and are not computed yet
    + a charge for each running request, whose tokens are generated in the same passes; also for
      those that other gateways have sent, as far as the engine tells
    + the tokens of the time in which the replica loads the adapter of the request; see `adapters`
    + a small charge for more work than others recently had, which decides between equal replicas

The least cost wins. With several gateways, which do not know what the others have sent, the
replica with the highest hash for the conversation costs less, so they agree (rendezvous hashing).
Dynamo's router adds the first, third and fourth term, with other weights; llm-d's scorers rank
replicas by similar terms and add the ranks; Preble also counts what a copy evicts; SGLang's
router uses the cache only while loads are nearly equal. The weights were chosen with
`benchmarks/cache_routing.py`, which replays traces through an engine's timing.

`PrefixCaches` tells what the caches hold, by a table of block hashes. An engine forgets the blocks
that were least recently used, and the ends of prompts before their beginnings, when its cache is
full. The table does the same with the prompts that the gateway has sent, so it needs no message
about each block. One set of replicas, as a number with a bit for each replica, is stored for each
block; one walk along a prompt's blocks therefore finds the longest held beginning for all replicas.
Trees of prompts, such as those of SGLang's router, answer the same question; a chain of hashes
needs no tree, as vLLM's and Dynamo's block hashes show.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from zlib import crc32

from cavvy.capabilities.language_models.prompts import Prompt
from cavvy.capabilities.serving.gateway.balancing import FARTHER, FULL, hash_key

CACHE_TOKENS = 1_000_000  # of a replica, if the service's file does not state them
_COPY = 0.5  # of each token that another replica holds already
_RUNNING = 200.0  # tokens for each running request
_BUSY = 0.03  # of each uncached token, if the replica also generates tokens for other requests
_WORK = 0.02  # of each token of work above the least worked replica
_REQUEST = 1.0  # how much work a request is besides its prompt, in mean prompts
# of each token that no replica is known to hold, and of the load of an adapter, at the replica that
# all gateways prefer
_HOME = 0.5
_PREFILL_PER_S = 10_000.0  # at least so many tokens are a second in which an adapter is loaded
_DUE_S = 1.0  # after the beginning of its response, the tokens of a prompt are told within this
_DUE_MAX = 1000  # prompts of a replica whose tokens are expected
_NEWEST = 0.01  # the share of the newest prompt in the mean
_MEMORY = 0.9  # of the measured speed remains when a further prompt is measured


class Visit:
    """A prompt at a replica, until its response has ended."""

    __slots__ = ("_due", "_replica", "_sent_at", "_speed", "_tokens", "_waits")

    def __init__(self, replica: "_Replica", speed: "_Speed", tokens: int, now: float) -> None:
        self._replica, self._speed = replica, speed
        self._tokens = tokens  # that the replica computes
        self._sent_at = now
        self._waits = True  # for the first bytes of its response
        self._due = _Due(tokens)
        replica.due.append(self._due)
        if len(replica.due) > _DUE_MAX:
            replica.due.popleft()
        replica.running += 1
        replica.unanswered += tokens
        replica.backlog = replica.waits(now, speed.per_s) + tokens

    def restart(self, now: float) -> None:
        """Record that the replica gets the prompt only now, because it had to load an adapter."""
        self._sent_at = now

    def answer(self, now: float) -> None:
        """Record that the response has begun, so the prompt is computed."""
        if self._waits:
            since, self._replica.since = self._replica.since, now
            self._speed.add(self._tokens, now - max(self._sent_at, since))
            self._due.until = now + _DUE_S
            self._forget_prompt()

    def end(self) -> None:
        """Record that the exchange has ended, with or without a response."""
        self._replica.running -= 1
        if self._waits:
            self._due.until = 0.0
            self._forget_prompt()

    def _forget_prompt(self) -> None:
        self._waits = False
        self._replica.unanswered -= self._tokens
        self._replica.backlog = min(self._replica.backlog, self._replica.unanswered)


class _Due:
    """Tokens of a prompt which the engine has not told yet that it has stored them. They are
    expected `until` a time, in seconds."""

    __slots__ = ("tokens", "until")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.until = math.inf


class _Speed:
    """The measured number of computed tokens a second; 0: not measured yet."""

    def __init__(self) -> None:
        self.per_s = self._tokens = self._s = 0.0

    def add(self, tokens: int, taken_s: float) -> None:
        self._tokens = _MEMORY * self._tokens + tokens
        self._s = _MEMORY * self._s + max(taken_s, 1e-4)
        self.per_s = self._tokens / self._s


class _Replica:
    __slots__ = (
        *("at", "backlog", "due", "is_sized", "others", "place", "running", "seed", "since"),
        *("unanswered", "work"),
    )

    def __init__(self, name: str, place: int) -> None:
        self.seed = hash_key(name.encode())
        self.place = place
        self.running = 0
        self.others = 0  # running requests that others have sent
        self.unanswered = 0  # tokens of prompts whose responses have not begun
        self.backlog = 0.0  # the part of them that was not computed yet at the time `at`
        self.at = self.since = 0.0  # `since`: the last response that began
        self.work = 0.0
        self.is_sized = False  # the engine has told how much its cache holds
        self.due: deque[_Due] = deque()

    def take_due(self, tokens: int, now: float) -> int:
        """Return how many of the stored tokens belong to no prompt that was sent to the replica."""
        while tokens and self.due:
            first = self.due[0]
            if first.until >= now:
                taken = min(tokens, first.tokens)
                tokens, first.tokens = tokens - taken, first.tokens - taken
                if first.tokens:
                    break
            self.due.popleft()
        return tokens

    def waits(self, now: float, speed: float) -> float:
        """Return the tokens that are not computed yet, at this many computed tokens a second."""
        self.backlog = max(0.0, self.backlog - speed * (now - self.at))
        self.at = now
        return self.backlog


class RoutedPrompts:
    """Counts the prompts that were sent to replicas, by whether the replica was taken to hold the
    beginning of the prompt, and their tokens, by whether the replica was taken to hold them.
    """

    __slots__ = ("held_tokens", "hits", "misses", "other_tokens")

    def __init__(self) -> None:
        self.hits = self.misses = self.held_tokens = self.other_tokens = 0

    def add(self, held: int, other: int) -> None:
        if held:
            self.hits += 1
        else:
            self.misses += 1
        self.held_tokens += held
        self.other_tokens += other


class CacheRouter:
    """The replicas of one service. Times are in seconds."""

    def __init__(self, cache_tokens: int = CACHE_TOKENS, shared: bool = False) -> None:
        self._shared = shared  # other gateways send prompts to the same replicas
        self.routed = RoutedPrompts()
        self._caches = PrefixCaches(cache_tokens)
        self._cache_tokens = cache_tokens
        self._known: dict[str, _Replica] = {}
        self._replicas: list[_Replica] = []
        self._speed = _Speed()
        self._mean_tokens = 0.0  # of recent prompts
        self._found: tuple[Prompt | None, dict[int, int]] = (None, {})  # by the last choice

    def set_replicas(self, names: Sequence[str]) -> None:
        """Replace the replicas; the ones that stay keep what they hold."""
        gone = self._known.keys() - set(names)
        for name in gone:
            self._caches.remove(self._known.pop(name).place)
        used = {each.place for each in self._known.values()}
        free = iter(sorted(set(range(len(names))) - used))
        for name in names:
            if name not in self._known:
                self._known[name] = _Replica(name, next(free))
                self._caches.add(self._known[name].place)
        self._replicas = [self._known[name] for name in names]

    def tell(self, name: str, requests: int, cache_tokens: int | None) -> None:
        """Record what the engine of a replica has told: how many requests it has, and what its
        cache holds. Requests that are on their way are not among them yet.
        """
        replica = self._known.get(name)
        if replica is not None:
            replica.others = max(0, requests - replica.running)
            if cache_tokens is not None:
                replica.is_sized = True
                self._caches.resize(replica.place, cache_tokens)

    def measure(self, name: str, tokens: int) -> None:
        """Record how much a replica was seen to hold when its cache was full. It counts if the
        engine does not tell the size of its cache, as `tell` has it."""
        replica = self._known.get(name)
        if replica is not None and not replica.is_sized:
            self._caches.resize(replica.place, tokens)

    def store(self, name: str, tokens: int, now: float) -> None:
        """Record that the engine of a replica has stored so many tokens. Those of no prompt that
        was sent to it are answers, or prompts of others: they take the place of prompts that it
        holds, and are work.
        """
        replica = self._known.get(name)
        if replica is not None and (unknown := replica.take_due(tokens, now)):
            self._caches.age(replica.place, unknown)
            self._add_work(replica, unknown)

    def clear(self, name: str) -> None:
        """Record that the engine of a replica has forgotten all prompts."""
        if (replica := self._known.get(name)) is not None:
            self._caches.clear(replica.place)

    def choose(
        self, prompt: Prompt, loads: Sequence[int], now: float, waits_s: Sequence[float] = ()
    ) -> int:
        """Return the position of the replica with the least cost among the nearest with room, or -1
        if none has room. `loads` are those of `balancing`, and `waits_s` are what the adapter of
        the request costs at each replica."""
        nearest = min(loads, default=FULL) // FARTHER
        if nearest >= FULL // FARTHER:
            return -1
        held = self._caches.find(prompt)
        self._found = prompt, held
        most = max(held.values(), default=0)
        least_work = min([each.work for each in self._replicas])
        speed = self._speed.per_s
        home = adapter_home = None
        if self._shared:
            home = self._find_home(prompt.opening)
            adapter_home = self._find_home(crc32(prompt.model.encode())) if waits_s else None
        best, found = 0.0, -1
        for position, replica in enumerate(self._replicas):
            if loads[position] // FARTHER != nearest:
                continue
            here = held.get(replica.place, 0)
            cost = prompt.tokens - here + _COPY * (most - here)
            if replica.backlog:
                cost += replica.waits(now, speed)
            cost += _WORK * (replica.work - least_work)
            if running := replica.running + replica.others:
                cost += _RUNNING * running + _BUSY * (prompt.tokens - here)
            if replica is home:
                cost -= _HOME * (prompt.tokens - most)
            if waits_s:
                wait = waits_s[position] * max(speed, _PREFILL_PER_S)
                cost += wait * (1 - _HOME) if replica is adapter_home else wait
            if (
                found < 0
                or cost < best
                or (cost == best and self._precedes(prompt, replica, self._replicas[found]))
            ):
                best, found = cost, position
        return found

    @staticmethod
    def _precedes(prompt: Prompt, one: _Replica, other: _Replica) -> bool:
        return _mix(prompt.opening, one.seed) < _mix(prompt.opening, other.seed)

    def _find_home(self, key: int) -> _Replica:
        """Return the replica that all gateways prefer for a conversation or an adapter."""
        return max(self._replicas, key=lambda each: _mix(key, each.seed))

    def begin(self, position: int, prompt: Prompt, now: float) -> Visit:
        """Record that the prompt is sent to the replica."""
        replica = self._replicas[position]
        found, held_by = self._found
        if found is not prompt:  # the choice was made earlier, or by load
            held_by = self._caches.find(prompt)
        held = held_by.get(replica.place, 0)
        self.routed.add(held, max(0, prompt.tokens - held))
        visit = Visit(replica, self._speed, max(1, prompt.tokens - held), now)
        self._caches.hold(replica.place, prompt)
        self._found = None, {}
        self._mean_tokens += (prompt.tokens - self._mean_tokens) * _NEWEST
        self._add_work(replica, prompt.tokens + _REQUEST * self._mean_tokens)
        return visit

    def _add_work(self, replica: _Replica, tokens: float) -> None:
        replica.work += tokens
        if replica.work > 2 * self._cache_tokens:  # recent work: as much as the caches remember
            for each in self._replicas:
                each.work /= 2


def _mix(key: int, seed: int) -> int:
    """Return the rank of a replica for a key (rendezvous hashing)."""
    mixed = (key ^ seed) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF


ENTRIES_MAX = 1 << 16  # blocks of a replica, which bounds the memory of short prompts
_UNKNOWN = 1 << 64  # numbers from here on are no hashes
_UNKNOWN_PARTS = 1000  # at most so many entries of a full cache stand for unknown prompts
_STALE = 4  # prompts in the history for each block of a cache, before unused ones are dropped


class _PrefixCache:
    """One replica's cache: the number of the prompt that has last used each block, and the prompts
    in the order of their use."""

    __slots__ = ("history", "tokens", "tokens_max", "used")

    def __init__(self, tokens_max: int) -> None:
        self.tokens_max = tokens_max
        self.used: dict[int, int] = {}
        self.history: deque[tuple[int, Prompt]] = deque()
        self.tokens = 0


class PrefixCaches:
    """The caches of replicas, which are named by small numbers."""

    def __init__(self, tokens: int) -> None:
        self._tokens_max = tokens  # that the cache of a replica holds, if it is not resized
        self._holders: dict[int, int] = {}  # by block, the replicas as bits
        self._caches: dict[int, _PrefixCache] = {}
        self._number = 0  # of prompts
        self._unknown: dict[int, int] = {}  # tokens of unknown prompts that have no entry yet

    def add(self, replica: int) -> None:
        self._caches[replica] = _PrefixCache(self._tokens_max)

    def remove(self, replica: int) -> None:
        self._release(self._caches.pop(replica).used, replica)
        self._unknown.pop(replica, None)

    def resize(self, replica: int, tokens: int) -> None:
        """Set how many tokens the cache of a replica holds."""
        cache = self._caches[replica]
        cache.tokens_max = tokens
        while cache.tokens > tokens:
            self._forget_oldest(replica, cache)

    def find(self, prompt: Prompt) -> dict[int, int]:
        """Return how many of the prompt's first tokens each replica holds; 0 is left out."""
        found: dict[int, int] = {}
        holders, get, at = -1, self._holders.get, 0
        for block in prompt.blocks:
            here = get(block, 0) & holders
            if here != holders:
                if at:
                    _set_bits(found, holders & ~here, prompt.ends[at - 1])
                holders = here
                if not here:
                    return found
            at += 1
        if at:
            _set_bits(found, holders, prompt.ends[at - 1])
        return found

    def hold(self, replica: int, prompt: Prompt) -> None:
        """Record that the replica computes the prompt."""
        cache, bit, holders = self._caches[replica], 1 << replica, self._holders
        used, blocks = cache.used, prompt.blocks
        if fresh := [block for block in blocks if block not in used]:
            for block in fresh:
                holders[block] = holders.get(block, 0) | bit
            known, ends = len(blocks) - len(fresh), prompt.ends
            cache.tokens += ends[len(blocks) - 1] - (ends[known - 1] if known else 0)
        self._number += 1
        used.update(dict.fromkeys(blocks, self._number))
        cache.history.append((self._number, prompt))
        while cache.tokens > cache.tokens_max or len(used) > ENTRIES_MAX:
            self._forget_oldest(replica, cache)
        if len(cache.history) > _STALE * (len(used) + 1):
            last = set(used.values())
            cache.history = deque(each for each in cache.history if each[0] in last)

    def age(self, replica: int, tokens: int) -> None:
        """Record that the replica has stored so many tokens of prompts that are not known here."""
        cache = self._caches[replica]
        self._unknown[replica] = self._unknown.get(replica, 0) + tokens
        if self._unknown[replica] * _UNKNOWN_PARTS < cache.tokens_max:
            return  # few entries stand for many small prompts
        tokens = min(self._unknown.pop(replica), cache.tokens_max)
        self.hold(replica, Prompt((_UNKNOWN + self._number,), (tokens,), tokens))

    def clear(self, replica: int) -> None:
        """Record that the replica has forgotten all prompts."""
        tokens = self._caches[replica].tokens_max
        self.remove(replica)
        self._caches[replica] = _PrefixCache(tokens)

    def _forget_oldest(self, replica: int, cache: _PrefixCache) -> None:
        """Forget blocks that only the oldest prompt has used, from its end, until the rest fits."""
        number, prompt = cache.history.popleft()
        used, blocks, ends, left = cache.used, prompt.blocks, prompt.ends, len(prompt.blocks)
        # Who uses a block also uses those before it, so later prompts have used a beginning.
        while left and used.get(blocks[left - 1]) == number:
            if cache.tokens <= cache.tokens_max and len(used) <= ENTRIES_MAX:
                cache.history.appendleft((number, Prompt(blocks[:left], ends, prompt.tokens)))
                break
            left -= 1
            del used[blocks[left]]
            cache.tokens -= ends[left] - (ends[left - 1] if left else 0)
        self._release(blocks[left:], replica)

    def _release(self, blocks: Iterable[int], replica: int) -> None:
        holders, others = self._holders, ~(1 << replica)
        for block in blocks:
            if left := holders[block] & others:
                holders[block] = left
            else:
                del holders[block]


def _set_bits(found: dict[int, int], bits: int, value: int) -> None:
    while bits > 0:
        low = bits & -bits
        found[low.bit_length() - 1] = value
        bits ^= low
