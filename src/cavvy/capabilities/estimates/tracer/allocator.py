"""Simulates PyTorch's caching allocator on a traced step, to find how much memory it reserves.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: requests of at most 1 MiB share segments
of 2 MiB, requests of less than 10 MiB share segments of 20 MiB, and larger requests get a segment
of their own. A free block is split if the rest is large enough, and neighbours that are free merge.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Protocol

_MIB = 1 << 20
_SMALL, _MIDDLE = _MIB, 10 * _MIB  # the largest requests for shared segments
_SMALL_SEGMENT, _MIDDLE_SEGMENT, _ROUND = 2 * _MIB, 20 * _MIB, 2 * _MIB
_STEPS = 3  # The first steps leave gaps that the next ones fill.


class Storage(Protocol):
    """An allocation of the traced step, as `trace.TracedStorage` describes it."""

    born: int
    died: int | None
    kept: str


def simulate(
    storages: Sequence[Storage], sizes: Sequence[int], workspaces: Mapping[int, int]
) -> tuple[int, int]:
    """Return the bytes that the allocator reserves for some steps with AdamW, and the bytes in use
    at their peak. `sizes` are those of the storages; those of size 0 have no memory. `workspaces`
    are the bytes that only one event uses, by its index.
    """
    memory = CachingAllocator()
    changes: dict[int, tuple[list[int], list[int]]] = {}
    for number, each in enumerate(storages):
        if not sizes[number]:
            continue
        if each.kept in ("parameter", "buffer"):
            memory.request(sizes[number])
            continue
        changes.setdefault(each.born, ([], []))[1].append(number)
        if each.died is not None and each.kept != "gradient":
            changes.setdefault(each.died, ([], []))[0].append(number)
    gradients = [number for number, each in enumerate(storages) if each.kept == "gradient"]
    indices = sorted({*changes, *workspaces})
    results: list[int] = []  # tensors that the script still refers to in its next step
    for step in range(_STEPS):
        alive: dict[int, int] = {}
        for index in indices:
            _change(memory, alive, changes.get(index, ([], [])), sizes)
            if index in workspaces:
                memory.release(memory.request(workspaces[index]))
        grads = [alive.pop(number) for number in gradients if number in alive]
        for block in results:
            memory.release(block)
        results = list(alive.values())
        if not step:  # AdamW makes its state in the first step.
            for number in (*gradients, *gradients):
                memory.request(sizes[number])
        for block in [*(memory.request(sizes[number]) for number in gradients), *grads]:
            memory.release(block)
    return memory.reserved, memory.most_allocated


def _change(
    memory: "CachingAllocator",
    alive: dict[int, int],
    change: tuple[list[int], list[int]],
    sizes: Sequence[int],
) -> None:
    """Release the storages that die at an event, and request those that it makes. `alive` maps the
    numbers of storages to blocks.
    """
    gone, made = change
    for number in gone:
        if number in alive:
            memory.release(alive.pop(number))
    for number in made:
        alive[number] = memory.request(sizes[number])


class _Block:
    """A part of a segment. `before` and `after` are its neighbours in the segment."""

    __slots__ = ("after", "before", "number", "size", "small", "used")

    def __init__(self, size: int, small: bool, number: int) -> None:
        self.size, self.small, self.number, self.used = size, small, number, False
        self.before: _Block | None = None
        self.after: _Block | None = None


class CachingAllocator:
    """The memory that the allocator reserves, in bytes, and the largest sum of requests."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self.most_allocated = 0
        # free blocks of the small and the large pool, ordered by size
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, _Block] = {}
        self._made = 0

    def request(self, size: int) -> int:
        """Reserve a block, and return its number."""
        size = max(512, -(-size // 512) * 512)
        small = size <= _SMALL
        free = self._free[small]
        at = bisect_left(free, (size, 0))
        block = self._blocks[free.pop(at)[1]] if at < len(free) else self._grow(size, small)
        if block.size - size >= (512 if small else _SMALL + 1):
            self._split(block, size)
        block.used = True
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block.number

    def release(self, number: int) -> None:
        """Give back a block."""
        block = self._blocks[number]
        block.used = False
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and not other.used:
                self._merge(block, other)
        insort(self._free[block.small], (block.size, block.number))

    def _grow(self, size: int, small: bool) -> _Block:
        if small:
            size = _SMALL_SEGMENT
        else:
            size = _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _ROUND) * _ROUND
        self.reserved += size
        return self._make(size, small)

    def _make(self, size: int, small: bool) -> _Block:
        self._made += 1
        self._blocks[self._made] = block = _Block(size, small, self._made)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = self._make(block.size - size, block.small)
        rest.before, rest.after, block.size = block, block.after, size
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        insort(self._free[rest.small], (rest.size, rest.number))

    def _merge(self, block: _Block, other: _Block) -> None:
        free = self._free[other.small]
        free.pop(bisect_left(free, (other.size, other.number)))
        del self._blocks[other.number]
        block.size += other.size
        if other is block.before:
            block.before = other.before
            if other.before is not None:
                other.before.after = block
        else:
            block.after = other.after
            if other.after is not None:
                other.after.before = block
