"""What the caches of a service's replicas hold: a table of block hashes for each replica.

An engine forgets the blocks that were least recently used, and the ends of prompts before their
beginnings, when its cache is full. The table does the same with the prompts that the gateway has
sent, so it needs no messages from the engine. One set of replicas, as a number with a bit for each
replica, is stored for each block; one walk along a prompt's blocks therefore finds the longest held
beginning for all replicas. Trees of prompts, such as those of SGLang's router, answer the same
question; a chain of hashes needs no tree, as vLLM's and Dynamo's block hashes show.
"""

from collections import OrderedDict

from cavvy.gateway.prompts import Prompt

ENTRIES_MAX = 1 << 16  # blocks of a replica, which bounds the memory of short prompts


class PrefixCaches:
    """The caches of replicas, which are named by small numbers."""

    def __init__(self, tokens: int) -> None:
        self._tokens_max = tokens  # that the cache of a replica holds
        self._holders: dict[int, int] = {}  # by block, the replicas as bits
        self._ages: dict[int, OrderedDict[int, int]] = {}  # blocks and their tokens, oldest first
        self._tokens: dict[int, int] = {}

    def add(self, replica: int) -> None:
        self._ages[replica], self._tokens[replica] = OrderedDict(), 0

    def remove(self, replica: int) -> None:
        for block in self._ages.pop(replica):
            self._release(block, replica)
        del self._tokens[replica]

    def find(self, prompt: Prompt) -> dict[int, int]:
        """Return how many of the prompt's first tokens each replica holds; 0 is left out."""
        found: dict[int, int] = {}
        holders, held, end = -1, self._holders, 0
        for at, block in enumerate(prompt.blocks):
            here = held.get(block, 0) & holders
            if here != holders:
                if at:
                    _set_bits(found, holders & ~here, end)
                holders = here
                if not here:
                    return found
            end = prompt.ends[at]
        if end:
            _set_bits(found, holders, end)
        return found

    def hold(self, replica: int, prompt: Prompt) -> None:
        """Record that the replica computes the prompt."""
        ages, holders, bit = self._ages[replica], self._holders, 1 << replica
        blocks, ends = prompt.blocks, prompt.ends
        added = 0
        for at in range(len(blocks) - 1, -1, -1):
            block = blocks[at]
            if block in ages:
                ages.move_to_end(block)
                continue
            ages[block] = size = ends[at] - (ends[at - 1] if at else 0)
            holders[block] = holders.get(block, 0) | bit
            added += size
        self._tokens[replica] += added
        while self._tokens[replica] > self._tokens_max or len(ages) > ENTRIES_MAX:
            block, size = ages.popitem(last=False)
            self._tokens[replica] -= size
            self._release(block, replica)

    def _release(self, block: int, replica: int) -> None:
        left = self._holders[block] & ~(1 << replica)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _set_bits(found: dict[int, int], bits: int, value: int) -> None:
    while bits > 0:
        low = bits & -bits
        found[low.bit_length() - 1] = value
        bits ^= low
