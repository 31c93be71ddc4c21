"""The calls that wait for a process: who is next, and which of them a limit holds back.

Calls of a higher priority are first. Within a priority, callers take turns, so that a long `map`
lets the call of another program, or of another thread, pass. A call over a limit waits apart, with
the others of its key, and costs nothing until there is room. Only the standard library is imported.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

_PARTS = 60  # into which a time window is cut: a start counts up to a part longer than it must
_SWEEP_S = 1.0  # between two searches for keys to forget
MOST_KEYS = 100_000  # of a limit that are remembered at a time


class WaitingTurns:
    """Calls in the order in which they are next."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, deque[Any]]] = {}
        self.count = 0  # without those that are over

    def add(self, call: Any, *, first: bool = False) -> None:
        """Add a call, behind the others of its caller or before them."""
        level = self._levels.get(call.rank)
        if level is None:
            level = self._levels[call.rank] = OrderedDict()
        mine = level.get(call.turn)
        if mine is None:
            mine = level[call.turn] = deque()
        (mine.appendleft if first else mine.append)(call)
        if first:
            level.move_to_end(call.turn, last=False)
        call.turns = self
        self.count += 1

    def pop(self) -> Any | None:
        """Remove and return the next call, or None."""
        while self._levels:
            rank = max(self._levels) if len(self._levels) > 1 else next(iter(self._levels))
            level = self._levels[rank]
            turn, mine = next(iter(level.items()))
            call = mine.popleft()
            if mine:
                if len(level) > 1:
                    level.move_to_end(turn)
            else:
                del level[turn]
                if not level:
                    del self._levels[rank]
            if call.turns is self and not call.over:
                call.turns = None
                self.count -= 1
                return call
        return None

    def forget(self, call: Any) -> None:
        """Count a call no more that is over; it is left out when its turn comes."""
        call.turns = None
        self.count -= 1
        if not self.count:
            self._levels.clear()

    def take_all(self) -> list[Any]:
        """Remove and return all calls, in their order."""
        found = []
        while (call := self.pop()) is not None:
            found.append(call)
        return found


class Limit:
    """A limit of the app, and the room that each of its keys has."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.id = str(head["id"])
        self.slots: dict[str, LimitSlot] = {}
        self.changed: set[str] = set()  # keys whose windows were not stored yet
        self._swept_at = 0.0
        self.describe(head)

    def describe(self, head: dict[str, Any]) -> None:
        """Take what a new version of the code says of the limit."""
        self.count, self.per_s = int(head["count"]), head["per_s"]
        self.key_name = str(head["key"])

    def find(self, key: str) -> "LimitSlot | None":
        """Return the room of a key; None if too many keys are remembered already."""
        found = self.slots.get(key)
        if found is None:
            if len(self.slots) >= MOST_KEYS:
                self._sweep(time.monotonic())
                if len(self.slots) >= MOST_KEYS:
                    return None
            found = self.slots[key] = LimitSlot(self, key)
        return found

    def _sweep(self, now: float) -> None:
        """Forget keys of which nothing is known any more."""
        if now - self._swept_at >= _SWEEP_S:
            self._swept_at = now
            for key in [key for key, each in self.slots.items() if each.is_idle(now)]:
                del self.slots[key]

    def say(self, key: str) -> str:
        """Return what holds a call back."""
        calls = "call" if self.count == 1 else "calls"
        often = "at a time" if self.per_s is None else f"in {self.per_s:g} s"
        of = f" with {self.key_name} {key}" if self.key_name else ""
        return f"the limit of {self.count} {calls} {often}{of}"


class LimitSlot:
    """The room that one key of a limit has."""

    __slots__ = ("key", "limit", "next_at", "parked", "ready", "running", "starts", "users")

    def __init__(self, limit: Limit, key: str) -> None:
        self.limit, self.key = limit, key
        self.users = self.running = 0  # calls that have no result yet, and those that run
        self.ready: dict[int, int] = {}  # calls that may be next, by their priority
        self.starts: deque[tuple[float, float, int]] = deque()  # first, last, and how many
        self.parked = WaitingTurns()
        self.next_at = 0.0  # when it is looked at again, or 0

    def is_idle(self, now: float) -> bool:
        self.expire(now)
        return not (self.users or self.starts)

    def expire(self, now: float) -> None:
        """Forget starts that lie outside of the window."""
        per_s = self.limit.per_s
        if per_s is None:
            self.starts.clear()
        while self.starts and self.starts[0][1] + per_s <= now:
            self.starts.popleft()

    def count_room(self, now: float) -> int:
        """Return how many more calls may start."""
        if self.limit.per_s is None:
            return self.limit.count - self.running
        self.expire(now)
        return self.limit.count - sum(n for _, _, n in self.starts)

    def find_next(self, now: float) -> float:
        """Return when time brings room; 0 if it does not."""
        per_s = self.limit.per_s
        return self.starts[0][1] + per_s if self.starts and per_s is not None else 0.0

    def begin(self, now: float) -> None:
        """Count the start of a call."""
        self.running += 1
        if self.limit.per_s is None:
            return
        self.limit.changed.add(self.key)
        if self.starts and now - self.starts[-1][0] < self.limit.per_s / _PARTS:
            first, _, count = self.starts.pop()
            self.starts.append((first, now, count + 1))
        else:
            self.starts.append((now, now, 1))


class WaitingCalls:
    """The calls of a function that wait. `call_at` calls something at a time of the loop, and
    `tell` learns which call a limit holds back.
    """

    def __init__(
        self,
        call_at: Callable[[float, Callable[[], None]], object],
        tell: Callable[[Any, LimitSlot], None],
    ) -> None:
        self._call_at, self._tell = call_at, tell
        self._ready = WaitingTurns()
        self._slots: set[LimitSlot] = set()  # with calls that they hold back

    @property
    def count(self) -> int:
        """How many calls could run if there were processes."""
        return self._ready.count

    def add(self, call: Any, *, first: bool = False) -> None:
        """Let a call wait for a process, or for its limits."""
        if call.slots:
            now = time.monotonic()
            for slot in call.slots:
                before = sum(n for rank, n in slot.ready.items() if rank >= call.rank)
                if slot.count_room(now) <= before:
                    self._park(call, slot, now, first=first)
                    return
            for slot in call.slots:
                slot.ready[call.rank] = slot.ready.get(call.rank, 0) + 1
        self._ready.add(call, first=first)

    def take(self) -> Any | None:
        """Remove and return the next call that may run, and count it as running; None if there is
        none."""
        while (call := self._ready.pop()) is not None:
            if not call.slots:
                return call
            now = time.monotonic()
            _leave_ready(call)
            full = next((each for each in call.slots if each.count_room(now) <= 0), None)
            if full is not None:
                self._park(call, full, now, first=True)
                continue
            for slot in call.slots:
                slot.begin(now)
                if slot.parked.count:
                    self._wake_later(slot, slot.find_next(now))
            return call
        return None

    def stop(self, call: Any) -> None:
        """Count a call as running no more, which may run again."""
        if not call.slots:
            return
        for slot in call.slots:
            slot.running -= 1
        self._free(call.slots)

    def leave(self, call: Any) -> None:
        """Forget a call that does not run: it has a result, or was cancelled while it waited."""
        slots, turns = call.slots, call.turns
        if not slots and turns is None:
            return
        if turns is not None:
            turns.forget(call)
            if turns is self._ready:
                _leave_ready(call)
        call.slots = ()
        for slot in slots:
            slot.users -= 1
        self._free(slots)

    def take_all(self) -> list[Any]:
        """Remove and return all calls."""
        found = self._ready.take_all()
        for call in found:
            _leave_ready(call)
        for slot in [*self._slots]:
            for call in slot.parked.take_all():
                if call.function.waiting is self:
                    found.append(call)
                else:  # another function has the same limit
                    slot.parked.add(call)
        self._slots.clear()
        return found

    def _park(self, call: Any, slot: LimitSlot, now: float, *, first: bool) -> None:
        slot.parked.add(call, first=first)
        self._slots.add(slot)
        self._wake_later(slot, slot.find_next(now))
        self._tell(call, slot)

    def _wake_later(self, slot: LimitSlot, at: float) -> None:
        if at and not slot.next_at:
            slot.next_at = at
            self._call_at(at, lambda: self._wake(slot))

    def _wake(self, slot: LimitSlot) -> None:
        slot.next_at = 0.0
        self._free((slot,))
        if slot.parked.count:
            self._wake_later(slot, slot.find_next(time.monotonic()))

    def _free(self, slots: Sequence[LimitSlot]) -> None:
        """Let calls go on for which there is room now."""
        now = time.monotonic() if slots else 0.0
        for slot in slots:
            while slot.parked.count and slot.count_room(now) > sum(slot.ready.values()):
                if (call := slot.parked.pop()) is not None:
                    call.function.add(call)
            if not slot.parked.count:
                self._slots.discard(slot)
                if not slot.users and slot.is_idle(now) and not slot.next_at:
                    slot.limit.slots.pop(slot.key, None)


def _leave_ready(call: Any) -> None:
    for slot in call.slots:
        left = slot.ready[call.rank] - 1
        if left:
            slot.ready[call.rank] = left
        else:
            del slot.ready[call.rank]
