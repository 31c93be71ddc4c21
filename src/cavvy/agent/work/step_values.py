"""Collects what the program reports step by step, and sends each value once: from the lines that it
prints, and from what it reports with `cavvy.log`, `cavvy.train` or a file.
"""

from __future__ import annotations

import base64
import time
from collections import defaultdict

from .plotted_words import may_count, read_report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .examples import ExampleBudget
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
LONGEST_NAME = 64
MOST_PARAMS, LONGEST_PARAM = 256, 500  # of a rank; characters
MOST_PROCESSES = 64  # of a rank, whose values are told apart
MOST_EXAMPLE_NAMES = 64  # of a rank
LARGEST = 1e100  # the control plane keeps no larger number; here, one counts as infinite
NOT_A_NUMBER, INFINITE, LEAST = 1.0, 2.0, 3.0  # how NaN and infinite values are sent


class StepValueReader:
    """The values of each step. `say` sends a message to the control plane; its rows hold the step
    or None, how many milliseconds ago the program told it, and a value for each name. NaN and
    infinite values have rows of their own (`odd`), since JSON has no such numbers.
    """

    def __init__(
        self, say: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._printed: PrintedValues | None = None  # until a line may have a value
        self._line = b""  # the begin of a line before that
        self._names: set[str] = set()
        self._reported: set[str] = set()  # names of `report`, which printed lines only repeat
        # by their names, their process on this node, and whether they are no finite numbers
        self._rows: dict[
            tuple[tuple[str, ...], int, bool], list[tuple[float | None, float, list[float]]]
        ] = defaultdict(list)
        self._params: dict[str, str] = {}
        self._new_params: dict[str, str] = {}  # which were not sent yet
        self._budget: ExampleBudget | None = None
        self._example_names: set[str] = set()
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

    def log(
        self,
        values: Mapping[str, float],
        step: float | None = None,
        *,
        process: int = 0,
        age_s: float = 0.0,
    ) -> dict[str, float]:
        """Take values that a process of the program reports one by one. Return those of the first
        process that are finite numbers.
        """
        if not self._reported.issuperset(values):  # which are most of the time the same names
            values = {name[:LONGEST_NAME]: value for name, value in values.items() if name}
            self._reported.update(values)
        known = self._add(step, values, min(max(process, 0), MOST_PROCESSES - 1), age_s)
        return {} if process else known

    def describe(self, params: Mapping[str, str]) -> None:
        """Take settings that the program reports, such as its learning rate."""
        for name, text in params.items():
            name, text = name[:LONGEST_NAME], text[:LONGEST_PARAM]
            if not name or self._params.get(name) == text:
                continue
            if name in self._params or len(self._params) < MOST_PARAMS:
                self._params[name] = self._new_params[name] = text

    def show(
        self,
        name: str,
        kind: str,
        data: bytes,
        step: float | None = None,
        *,
        process: int = 0,
        age_s: float = 0.0,
    ) -> None:
        """Send what is no number, such as a picture. Too many or too large ones are left out."""
        from .examples import KINDS, ExampleBudget
        from .examples import LARGEST as LARGEST_EXAMPLE

        name = name[:LONGEST_NAME]
        if self._budget is None:
            self._budget = ExampleBudget(self._clock)
        if not name or kind not in KINDS or not 0 < len(data) <= LARGEST_EXAMPLE:
            return
        if name not in self._example_names and len(self._example_names) >= MOST_EXAMPLE_NAMES:
            return
        if not self._budget.take(len(data)):
            return
        self._example_names.add(name)
        example: dict[str, object] = {
            "name": name,
            "kind": kind,
            "age_ms": max(0, round(age_s * 1000)),
            "data": base64.b64encode(data).decode(),
        }
        if step is not None and abs(step) <= LARGEST:
            example["step"] = step
        if process:
            example["process"] = min(max(process, 0), MOST_PROCESSES - 1)
        self._say("points", examples=[example])

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

    def _add(
        self,
        step: float | None,
        values: Mapping[str, float],
        process: int = 0,
        age_s: float = 0.0,
    ) -> dict[str, float]:
        """Add a row. Return its finite values."""
        known: dict[str, float] = {}
        odd: dict[str, float] = {}
        for name, value in values.items():
            if name not in self._names:
                if len(self._names) >= MOST_NAMES:
                    continue
                self._names.add(name)
            if abs(value) <= LARGEST:
                known[name] = float(f"{value:.7g}")
            else:
                odd[name] = NOT_A_NUMBER if value != value else INFINITE if value > 0 else LEAST
        if not known and not odd:
            return {}
        every = 1 << min(20, self._kept // THINNED_AFTER)
        self._skipped += 1
        if self._skipped >= every:
            self._skipped = 0
            self._kept += 1
            at = self._clock() - age_s
            for each, is_odd in ((known, False), (odd, True)):
                if each:
                    self._waiting += 1
                    self._rows[(tuple(each), process, is_odd)].append((step, at, [*each.values()]))
            if self._waiting >= MOST_WAITING:
                self._send(self._clock())
        return known

    def _send(self, now: float) -> None:
        self._sent_at = now
        if not self._rows and not self._new_params:
            return
        rows, self._rows, self._waiting = self._rows, defaultdict(list), 0
        series = []
        for (names, process, is_odd), own in rows.items():
            each: dict[str, object] = {
                "names": [*names],
                "rows": [[step, _age_ms(now, at), *values] for step, at, values in own],
            }
            if process:
                each["process"] = process
            if is_odd:
                each["odd"] = True
            series.append(each)
        fields: dict[str, object] = {"series": series} if series else {}
        if self._new_params:
            fields["params"], self._new_params = self._new_params, {}
        self._say("points", **fields)


def _age_ms(now: float, at: float) -> int:
    return max(0, round((now - at) * 1000))
