"""What the caches of a service's replicas hold: a table of block hashes for each replica.

An engine forgets the blocks that were least recently used, and the ends of prompts before their
beginnings, when its cache is full. The table does the same with the prompts that the gateway has
sent, so it needs no message about each block. One set of replicas, as a number with a bit for each
replica, is stored for each block; one walk along a prompt's blocks therefore finds the longest held
beginning for all replicas. Trees of prompts, such as those of SGLang's router, answer the same
question; a chain of hashes needs no tree, as vLLM's and Dynamo's block hashes show.
"""

from collections import deque
from collections.abc import Iterable

from cavvy.gateway.prompts import Prompt

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
