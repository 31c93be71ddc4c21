"""Collects what the program reports step by step, and sends each value once: from the lines that it
prints, and from what it reports with `cavvy.train` or a file.
"""

from __future__ import annotations

import time

from .plotted_words import may_count, read_report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .printed_values import PrintedValues

SEND_S = 1.0  # how often values are sent
# What is read of the output of a second; the rest of it is left out, so that a program that prints
# gigabytes costs the agent no more than one that prints thousands of lines.
LINES_PER_S, BYTES_PER_S = 1000, 256 << 10
LONGEST_BEGIN = 4096  # bytes
MOST_NAMES = 128  # of a rank, in the order in which they appear
MOST_WAITING = 4000  # rows; a message of more is sent at once
# After each so many rows, half as many of those that follow are kept, so that the curves of a year
# fit into the same space as those of a day.
THINNED_AFTER = 1_000_000


class StepValueReader:
    """The values of each step. `say` sends a message to the control plane; its rows hold the step
    or None, how many milliseconds ago the program told it, and a value for each name.
    """

    def __init__(
        self, say: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._printed: PrintedValues | None = None  # until a line may have a value
        self._line = b""  # the begin of a line before that
        self._names: set[str] = set()
        self._reported: set[str] = set()  # names of `report`, which printed lines only repeat
        self._rows: dict[tuple[str, ...], list[tuple[float | None, float, list[float]]]] = {}
        self._waiting = self._kept = self._skipped = self._read = 0
        self._sent_at = self._second_at = clock()

    def feed(self, data: bytes) -> dict[str, float]:
        """Take output of the program. Return the newest value of each name in it."""
        newest: dict[str, float] = {}
        self._read += len(data)
        if self._read > BYTES_PER_S:
            self._line = b""
            if self._printed is not None:
                self._printed.skip()
            return newest
        if self._printed is None:
            data = self._line + data
            low = data.lower()
            if not may_count(low):
                self._line = data[max(low.rfind(b"\n"), low.rfind(b"\r")) + 1 :][-LONGEST_BEGIN:]
                return newest
            from .printed_values import PrintedValues

            self._printed = PrintedValues()
        for step, values in self._printed.feed(data):
            newest.update(self._add_printed(step, values))
        return newest

    def report(self, values: Mapping[str, object]) -> None:
        """Take values that the program reports in another way than in its output."""
        step, results = read_report(values)
        self._reported.update(results)
        if results:
            self._add(step, results)

    def tick(self) -> None:
        """Send what has come. To be called about once a second."""
        now = self._clock()
        if now - self._second_at >= 1.0:
            self._second_at, self._read = now, 0
            if self._printed is not None:
                self._printed.budget = LINES_PER_S
        if now - self._sent_at >= SEND_S or self._waiting >= MOST_WAITING:
            self._send(now)

    def end(self) -> dict[str, float]:
        """Send the rest, and return the values of a last line that no end of line follows."""
        newest: dict[str, float] = {}
        for step, values in self._printed.end() if self._printed is not None else ():
            newest.update(self._add_printed(step, values))
        self._send(self._clock())
        return newest

    def _add_printed(self, step: float | None, values: Mapping[str, float]) -> Mapping[str, float]:
        fresh = {name: value for name, value in values.items() if name not in self._reported}
        return self._add(step, fresh)

    def _add(self, step: float | None, values: Mapping[str, float]) -> Mapping[str, float]:
        known = {}
        for name, value in values.items():
            if name not in self._names:
                if len(self._names) >= MOST_NAMES:
                    continue
                self._names.add(name)
            known[name] = float(f"{value:.7g}")
        if not known:
            return known
        every = 1 << min(20, self._kept // THINNED_AFTER)
        self._skipped += 1
        if self._skipped >= every:
            self._skipped = 0
            self._kept += 1
            self._waiting += 1
            row = (step, self._clock(), [*known.values()])
            self._rows.setdefault(tuple(known), []).append(row)
            if self._waiting >= MOST_WAITING:
                self._send(self._clock())
        return known

    def _send(self, now: float) -> None:
        self._sent_at = now
        if not self._rows:
            return
        rows, self._rows, self._waiting = self._rows, {}, 0
        series = [
            {
                "names": [*names],
                "rows": [[step, _age_ms(now, at), *values] for step, at, values in own],
            }
            for names, own in rows.items()
        ]
        self._say("points", series=series)


def _age_ms(now: float, at: float) -> int:
    return max(0, round((now - at) * 1000))
