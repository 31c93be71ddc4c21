"""Measures the parts of a step on this rank, for listeners such as trackers and profiles."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

PARTS = ("data", "transfer", "compute", "communication", "optimizer", "checkpoint")


@dataclass(slots=True)
class StepRecord:
    """The record of one step of one rank. Times are measured on the host: an accelerator can still
    be computing when a part ends.
    """

    step: int
    rank: int
    samples: int  # samples of all ranks
    seconds: float = 0.0  # seconds from the start of this step to the start of the next one
    parts: dict[str, float] = field(
        default_factory=dict
    )  # seconds of each part in PARTS; the remaining time is the user's own code
    values: dict[str, object] = field(default_factory=dict)  # values passed to `run.log`
    micro_batch: int = 0


Listener = Callable[[StepRecord], None]


class StepPart:
    """One part of the current step. One object serves all steps, because creating an object for
    each step would take too long if steps are short. `begun` is 0 while the part is not running.
    """

    __slots__ = ("_clock", "_name", "begun")

    def __init__(self, clock: "StepClock", name: str) -> None:
        self._clock, self._name, self.begun = clock, name, 0.0

    def __enter__(self) -> None:
        self.begun = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._clock.parts[self._name] += perf_counter() - self.begun
        self.begun = 0.0


class StepClock:
    """Measures the parts of the current step. Listeners receive the record of a step when the next
    step begins.
    """

    def __init__(self, rank: int) -> None:
        self.listeners: list[Listener] = []
        self._rank = rank
        self._began = 0.0
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._record: StepRecord | None = None
        self._named = {name: StepPart(self, name) for name in PARTS}

    def begin(self, step: int, samples: int) -> None:
        now = perf_counter()
        self.end(now)
        self._record = StepRecord(step=step, rank=self._rank, samples=samples)
        self._began = now

    def end(self, now: float | None = None) -> None:
        """End the current step, if a step is running."""
        record, self._record = self._record, None
        if record is None:
            return
        record.seconds = (perf_counter() if now is None else now) - self._began
        record.parts = self.parts
        self.parts = dict.fromkeys(PARTS, 0.0)
        for listener in self.listeners:
            listener(record)

    def forget(self) -> None:
        """Discard the current step."""
        self._record, self.parts = None, dict.fromkeys(PARTS, 0.0)

    def part(self, name: str) -> StepPart:
        return self._named[name]

    def note(self, **values: object) -> None:
        if self._record is not None:
            self._record.values.update(values)

    def micro(self, size: int) -> None:
        if self._record is not None:
            self._record.micro_batch = size
