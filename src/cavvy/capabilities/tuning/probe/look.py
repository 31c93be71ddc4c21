"""Detailed measurements: the parts of reading a sample, the line of code that runs, and the time in
which no operation runs.
"""

import dis
import os
import re
import sys
import threading
from bisect import bisect
from collections import Counter
from contextlib import AbstractContextManager
from time import perf_counter, thread_time, time_ns
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

import cavvy

EVERY_S = 0.001
SWITCH_S = (
    0.0001  # The interpreter's switch interval. The default of 5 ms is as long as a short step.
)
SHOWN = 3
MOST_LOOKED_AT, LOOK_S = 480, 1.0  # limits for reading samples separately: samples, seconds
# An operation that is shorter than this takes less time than the Python code that calls it.
TINY_NS = 20_000
# A gap between operations that is shorter than this is the time to call the next operation. Times
# of 8 to 25 us were measured in traces.
CALL_NS = 50_000
APART = (
    "data",
    "transfer",
    "communication",
    "checkpoint",
)  # parts of a step that are not sampled, because they are reported as separate causes
INSIDE = ("compute", "optimizer")


def look_at_data(data: Any, count: int, size: int) -> dict[str, Any]:
    """Measure the seconds per sample for reading, transforming, and collating batches of `size`
    samples. Each measurement is (wall time, CPU time).

    At least `count` samples are read. Reading continues for up to a second, because a few samples
    may take much longer than others.
    """
    if data.is_in_memory:
        return {"read": [0.0, 0.0], "transform": [0.0, 0.0], "collate": [0.0, 0.0]}
    # Skip samples that were just read in advance, because they are still in memory.
    begin = data.position + len(data.source) // 2
    most = min(MOST_LOOKED_AT, len(data.source))
    places = data.indices(range(begin, begin + most)).tolist()
    began, done, size = perf_counter(), 0, min(size, count)
    took = {name: [0.0, 0.0] for name in ("read", "transform", "collate")}
    for first in range(0, most, size):
        if done >= count and perf_counter() - began > LOOK_S:
            break
        chosen = places[first : first + size]
        done += len(chosen)
        _read_part(data, chosen, begin + first, took)
    return {name: [value / done for value in pair] for name, pair in took.items()}


def _read_part(data: Any, chosen: list[int], number: int, took: dict[str, list[float]]) -> None:
    """Read, transform and collate some samples. `number` is the position of the first sample."""
    many = getattr(data.source, "__getitems__", None)
    if many is not None:
        samples = _timed(took["read"], lambda: many(chosen))
    else:
        samples = [_timed(took["read"], lambda at=at: data.source[at]) for at in chosen]
    if data.transform is not None:
        samples = [
            _timed(took["transform"], lambda s=sample, n=n: data._apply(s, n))
            for n, sample in enumerate(samples, number)
        ]
    _timed(took["collate"], lambda: default_collate(samples))


def _timed(into: list[float], work: Any) -> Any:
    begun, cpu = perf_counter(), thread_time()
    made = work()
    into[0] += perf_counter() - begun
    into[1] += thread_time() - cpu
    return made


class StackSample(NamedTuple):
    at: int  # time of the sample in nanoseconds since 1970
    # Nanoseconds since the last sample. The time is long if another thread held the interpreter,
    # because no sample can be taken then.
    took: int
    inside: bool  # whether the compute part or the optimizer part of a step was running
    line: str  # the user's line that was running, or "" if none was
    kind: str = ""  # the kind of work of this line, if the call stack shows it


class StackSampler:
    """Samples every millisecond what the main thread is executing: the part of the step, and the
    line of the user's code.

    The time stamp is taken before the line is determined. The sampling thread starts to run when an
    operation begins, and a short operation would end while the line is being determined. `loop`
    contains the code objects of the functions that run the training loop.
    """

    def __init__(self, clock: Any, loop: "frozenset[Any]" = frozenset()) -> None:
        self._clock, self._loop = clock, loop
        self._seen: list[StackSample] = []
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._began = self._ended = time_ns()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._before)

    def read(
        self, lines: "BusyLines", busy: "list[tuple[int, int]] | None", steps: int
    ) -> dict[str, Any]:
        if busy is not None:
            lines.learn(self._seen, busy, steps)
        return sum_up(self._seen, max(self._ended - self._began, 1), lines)

    def _watch(self) -> None:
        main = threading.main_thread().ident or 0
        while not self._stop.wait(EVERY_S):
            at = time_ns()
            frame = sys._current_frames().get(main)
            if not any(self._clock.part(name).begun for name in APART):
                inside = any(self._clock.part(name).begun for name in INSIDE)
                line, kind = (
                    (find_own_line(frame), "") if inside else find_between(frame, self._loop)
                )
                self._seen.append(StackSample(at, at - self._ended, inside, line, kind))
            self._ended = at


class BusyLines:
    """Determines, from windows with a trace, which of the user's lines spend their time in Python
    instead of in operations.
    """

    def __init__(self) -> None:
        # For each line: the nanoseconds sampled while no operation ran, and the nanoseconds in
        # total.
        self._told: dict[str, tuple[int, int]] = {}

    def learn(self, seen: list[StackSample], busy: "list[tuple[int, int]]", steps: int) -> None:
        """Add the samples of a traced window. `busy` contains the intervals in which operations
        ran, in nanoseconds since 1970; they are sorted and do not overlap. A line that calls many
        tiny operations in each of the `steps` steps is also treated as Python.
        """
        begins = [begin for begin, _ in busy]
        ran, before = [], ""
        for look in seen:
            ran.append(_what_ran(busy, bisect(begins, look.at) - 1, look, look.line == before))
            before = look.line
        tiny: Counter[str] = Counter()
        for look, what in zip(seen, ran, strict=True):
            tiny[look.line] += look.took if what == "tiny" else 0
        for look, what in zip(seen, ran, strict=True):
            is_tiny = what == "tiny" and tiny[look.line] >= steps * EVERY_S * 1e9 / 2
            free, total = self._told.get(look.line, (0, 0))
            self._told[look.line] = (
                free + (look.took if is_tiny or not what else 0),
                total + look.took,
            )

    def is_python(self, line: str) -> bool:
        """Return whether most samples of the line show that Python code ran, not an operation of
        PyTorch. A single sample is not reliable, because it can miss an operation if the sampling
        thread had to wait.
        """
        free, total = self._told.get(line, (0, 0))
        return bool(line) and 2 * free > total


def sum_up(seen: list[StackSample], lasted: int, lines: BusyLines) -> dict[str, Any]:
    """Summarize samples. `own` is a share of all time: the time in which the user's lines ran
    Python, without the time between the parts of a step. `between` maps each kind of code to the
    nanoseconds for which code of this kind ran between the parts of steps. The kinds are `python`,
    `saving`, `work` (the rest of the user's code), and `loop` (the loop itself). `lines` contains
    the most frequent lines of each kind except `loop`, with their shares of all time.
    """
    own, between = 0, dict.fromkeys(("python", "saving", "work", "loop"), 0)
    found: dict[str, Counter[str]] = {kind: Counter() for kind in between if kind != "loop"}
    for look in seen:
        kind = look.kind or (
            "python" if lines.is_python(look.line) else "work" if look.line else "loop"
        )
        if not look.inside:
            between[kind] += look.took
        elif kind == "python":
            own += look.took
        if look.line and (kind == "python" or not look.inside):
            found[kind][look.line] += look.took
    most = {
        kind: [(line, took / lasted) for line, took in each.most_common(SHOWN)]
        for kind, each in found.items()
    }
    return {"own": own / lasted, "between": between, "lines": most}


def _what_ran(busy: "list[tuple[int, int]]", place: int, look: StackSample, is_same: bool) -> str:
    """Return the length, "tiny" or "long", of the operation that was running or about to be called,
    or "" if there was no operation. `place` is the index of the last interval that began before the
    sample.

    The sampling itself may delay a tiny operation, so that it appears long. If the previous sample
    shows the same line (`is_same`), the function therefore uses the median length of all operations
    between the two samples.
    """
    if place < 0:
        return ""
    begin, end = busy[place]
    if look.at > end and (place + 1 == len(busy) or busy[place + 1][0] - end > CALL_NS):
        return ""
    first = bisect(busy, (look.at - look.took, 0))
    others = sorted(end - begin for begin, end in busy[first:place]) if is_same else []
    return "tiny" if (others[len(others) // 2] if others else end - begin) < TINY_NS else "long"


def find_own_line(frame: Any) -> str:
    """Return the line of the user's code that is running or has called the running function.
    Returns "" if the running code belongs to PyTorch or cavvy.train, or sums gradients over the
    ranks.
    """
    found = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _REDUCER:
            return ""
        if not found and name.startswith(_TRAINING):
            return ""
        if not found and _is_own(name):
            found = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return found


def calling_line() -> str:
    """Return the innermost line of the user's code on the current call stack, or "" if there is
    none.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def find_between(frame: Any, loop: "frozenset[Any]") -> tuple[str, str]:
    """Return the innermost line of the user's code on the call stack, and the kind of work that it
    does. PyTorch or another library may be running, called by this line. The kind is `saving`,
    `work` (PyTorch operations, or an evaluation) or "". The kind is derived from the file or the
    name of the functions on the call stack, up to the loop. A function whose name indicates an
    evaluation counts as `work`. This rule also applies if the evaluation is called from a function
    that saves a checkpoint.
    """
    line = kind = ""
    is_evaluation = False
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        is_own, is_loop = _is_own(name), frame.f_code in loop
        if is_own:
            line = line or f"{name}:{frame.f_lineno}"
        elif not line and name.startswith(_ROOMS):
            return "", ""
        if is_loop:
            break
        if name.startswith(_SAVING) or (is_own and _SAVES.search(function)):
            kind = kind if is_evaluation else "saving"
        elif is_own and _EVALUATES.search(function):
            kind = kind or "work"
            is_evaluation = kind == "work"
        elif name.startswith(_TORCH) and not name.startswith(_PLAIN):
            kind = kind or "work"
        frame = frame.f_back
    return line, kind if line else ""


def code_at_work() -> "frozenset[Any]":
    """Return the code objects of all functions on the call stack."""
    frame: Any = sys._getframe(1)
    found = []
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return frozenset(found)


class UserLoop(NamedTuple):
    """A loop in the user's code: its frame, and the bytecode offset at which the loop jumps
    back.
    """

    frame: Any
    end: int

    def guard(self, done: type[BaseException]) -> None:
        """Raise `done` when the frame leaves the loop, so that the code after the loop does not
        run.
        """

        def look(frame: Any, event: str, _: Any) -> Any:
            if event == "return" or frame.f_lasti > self.end:
                raise done
            return look

        self.frame.f_trace = look
        # This enables tracing, but not for new frames.
        sys.settrace(lambda frame, event, given: None)


def find_loop(frame: Any) -> UserLoop | None:
    """Find the innermost loop of the user's code that contains the running code. A loop is
    recognized by a backward jump past the current instruction.
    """
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            jumps = [
                each for each in dis.get_instructions(frame.f_code) if "BACKWARD" in each.opname
            ]
            around = [
                (each.argval, each.offset)
                for each in jumps
                if each.argval <= frame.f_lasti < each.offset
            ]
            if around:
                inner, _ = max(around)
                return UserLoop(frame, max(end for begin, end in around if begin == inner))
        frame = frame.f_back
    return None


def _is_own(name: str) -> bool:
    return not (name.startswith((*_TRAINING, "<")) or any(part in name for part in _LIBRARIES))


_CAVVY = os.path.dirname(cavvy.__file__)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PLAIN = tuple(
    os.path.join(_TORCH, "utils", *path) for path in (("_contextlib.py",), ("tensorboard", ""))
)  # PyTorch files that run plain Python
_ROOMS = tuple(
    os.path.join(_CAVVY, room, "") for room in ("train", os.path.join("capabilities", "tuning"))
)
_TRAINING = (_TORCH, *_ROOMS)
_REDUCER = os.path.join(_CAVVY, "train", "parallel", "reduce.py")
_SAVING = tuple(
    os.path.join(_TORCH, *path)
    for path in (("serialization.py",), ("distributed", "checkpoint", ""))
)
_SAVES, _EVALUATES = (
    re.compile("(^|_)save|checkpoint", re.IGNORECASE),
    re.compile("(^|_)(eval|valid)", re.IGNORECASE),
)
_LIBRARIES = (
    "site-packages",
    "/lib/python",
    "torchinductor_",
)  # Parts of paths that are not the user's code. The last part is for compiled models.


class traced(AbstractContextManager["traced"]):
    """Records a trace for Perfetto or TensorBoard. Also measures the seconds in which this process
    ran no PyTorch operation.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.idle = 0.0
        # intervals in which operations ran, in nanoseconds since 1970
        self.busy: list[tuple[int, int]] = []
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)

    def __enter__(self) -> "traced":
        self._profile.start()
        self._began = perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        seconds = perf_counter() - self._began
        self._profile.stop()
        events: Any = self._profile.events()  # type: ignore[no-untyped-call]  # torch's
        results: Any = self._profile.profiler
        # The times of events are microseconds since this time.
        begun = results.kineto_results.trace_start_ns()
        for event in sorted((e for e in events if _is_work(e)), key=lambda e: e.time_range.start):
            start, end = (
                begun + int(at * 1000) for at in (event.time_range.start, event.time_range.end)
            )
            if self.busy and start <= self.busy[-1][1]:
                self.busy[-1] = (self.busy[-1][0], max(self.busy[-1][1], end))
            else:
                self.busy.append((start, end))
        self.idle = max(seconds - sum(end - start for start, end in self.busy) * 1e-9, 0.0)
        if self._path != "-":
            self._profile.export_chrome_trace(self._path)


def _is_work(event: Any) -> bool:
    """Return whether the event is an operation on the host or work on a device. Any other event is
    only an annotation.
    """
    if event.device_type.name != "CPU":
        return not event.is_user_annotation
    name = str(event.name)
    return name.startswith(("aten::", "gloo:", "nccl:", "autograd::")) and "wait" not in name
