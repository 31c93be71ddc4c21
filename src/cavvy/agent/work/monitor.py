"""Watches the running work for progress, checkpoints, resource use and idleness.

Collects what is measured and reported on this node, and sends the figures of each minute.
"""

from __future__ import annotations

import json
import os
import stat
import time

from ..config import BadConfig
from ..disk import open_own
from .meters import CpuMeter
from .step_values import StepValueReader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..allowed_folders import AllowedFolders
    from ..config import ConfigFields
    from .checkpoint_files import CheckpointWatcher
    from .event_files import EventFileReader
    from .examples import ExampleParts
    from .meters import UsageMeter

    Say = Callable[..., None]
    from collections.abc import Callable, Mapping, Sequence


MARK = b"CAVVY_PROGRESS "
LONGEST_LINE = 65536  # maximum bytes of a progress line
LONGEST_TEXT = 1000  # maximum characters of one value
MOST_VALUES = 100
TELEMETRY_S = 10.0
FIRST_S = 3.0  # seconds after which the use is reported first; GPUs are measured every two seconds
CHECKPOINT_S = 3.0
IDLE_CPU_PERCENT = 1.0  # percent of one CPU; work that uses less counts as waiting
IDLE_GPU_PERCENT = 1.0
# GPU use below which a node reports how long its GPUs have been idle, if the task sets no limit
LOW_GPU_PERCENT = 5.0
WARN_S = 300.0  # seconds from the warning until idle work is ended; at most half of the idle limit
# Rates from which the work counts as making progress. Ranks that wait for each other, and daemons
# of the node, send less over the network.
FLOW_MIB_S, NET_FLOW_MIB_S = 0.1, 1.0
_MEANS = {"cpu_percent": "cpu_mean_percent", "gpu_percent": "gpu_mean_percent"}

MOST_REPORTED = 32  # names that the task reports; the first are kept
ENERGY = "work_energy_j"  # joules of each minute; the control plane adds them up
# Reported values that are no figures, or that the agent measures itself.
OTHERS = frozenset(
    {
        "total",
        "complete",
        "left_s",
        "cpu_percent",
        "memory_mib",
        "gpu_percent",
        "gpu_memory_mib",
        "gpu_power_w",
        "cpu_power_w",
        ENERGY,
        "disk_read_mib_s",
        "disk_write_mib_s",
        "net_in_mib_s",
        "net_out_mib_s",
    }
)
# Values from which the control plane concludes something, such as that the work is complete.
MEANT = OTHERS | {"done", "fraction", "step_ms"}
LONGEST_NAME = 64
MINUTE_S = 60


class ProgressScanner:
    """Finds progress values in the task's output, or in the progress file that the task may write
    instead."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen = 0
        self._line = b""

    def feed(self, data: bytes) -> dict[str, object]:
        """Return the newest value of each name that is reported in these bytes of the output, or {}
        if no value is reported."""
        if MARK not in data and not self._line:
            tail = data.rfind(b"\n") + 1
            self._line = data[tail:] if _may_begin(data[tail:]) else b""
            return {}
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest if _may_begin(rest) else b""
        found: dict[str, object] = {}
        for line in lines:
            if line.startswith(MARK):
                found.update(parse_progress(line[len(MARK) :]))
        return found

    def look(self) -> dict[str, object]:
        """Return the values in the progress file, or {} if the file has not changed since the last
        call."""
        try:
            found = os.lstat(self._path)
            changed = found.st_mtime_ns
            if changed == self._seen or not stat.S_ISREG(found.st_mode):
                return {}
            self._seen = changed
            with open(self._path, "rb", opener=open_own) as file:
                lines = file.read(LONGEST_LINE).strip().splitlines()
        except OSError:
            return {}
        return parse_progress(lines[-1]) if lines else {}


class WorkMonitor:
    """Watches the work's progress, checkpoints, resource use and idleness. The caller must call
    `tick` about once a second, and `wrote` with each piece of output.
    """

    def __init__(
        self,
        say: Say,
        usage: UsageMeter,
        *,
        progress: str,
        checkpoints: CheckpointWatcher | None,
        idle_s: float | None,
        idle_gpu_percent: float = 0,
        connected: Callable[[], bool] = bool,
        stuck_s: float | None = None,
        alone: bool = False,
        event_folders: Sequence[str] = (),
        event_allowed: AllowedFolders | None = None,
        event_host: str = "",
    ) -> None:
        self._figures = MinuteFigures(say)
        self._steps = StepValueReader(say)
        # folders with event files, where links may lead, and part of the files' names; see
        # EventFileReader
        self._event_folders, self._event_allowed = event_folders, event_allowed
        self._event_host = event_host
        self._events: EventFileReader | None = None
        self._parts: ExampleParts | None = None  # of pictures and the like
        self._declares = False  # whether the work reports values itself, not only in what it prints
        self._stuck_s = stuck_s  # the limit that the control plane applies, if there is one
        self._alone = alone  # whether no other job uses the node's network
        self._moved_at = time.monotonic()  # when the work last made progress
        self._reported: dict[str, object] = {}
        self._say = say
        self._connected = connected  # returns whether a user has a session on this node
        self._warned = False  # whether the user was warned since the work was last busy
        self._progress = ProgressScanner(progress)
        self._checkpoints, self._unsafe = checkpoints, ""
        self.usage = usage
        self.gpus: dict[str, float] = {}
        self._told_gpus = self.gpus  # as they were last reported
        self._gpu_joules = 0.0
        self._cpus = CpuMeter()
        self._cpus.read(time.monotonic(), None if alone else 0)
        # the memory limit in MiB that the agent enforces; 0 if the kernel enforces it or if there
        # is none
        self.memory_mib = 0
        self.gpu_memory_mib = 0  # the work's share of the memory of its GPU; 0 for whole GPUs
        self.gpu_excess = ""  # a sentence that says that the work uses more than its share
        self._unwatched = False  # whether the user was told that the share cannot be watched
        self._idle_s = idle_s
        self._idle_gpu_percent = idle_gpu_percent
        self._means = UsageMeans()
        # when the GPUs were last busy, or could not be measured
        self._gpu_busy_at = time.monotonic()
        self._busy_at = self._checkpoints_at = self._looked_at = time.monotonic()
        self._told_at = 0.0
        self._began_at = self._looked_at

    def wrote(self, data: bytes) -> None:
        self._busy_at = self._moved_at = time.monotonic()
        self._tell(self._progress.feed(data))
        self._tell_printed(self._steps.feed(data))

    def log(self, logged: ConfigFields) -> None:
        """Take values that the work reports with `cavvy.log`. Raises BadConfig."""
        step = logged.read("step", "float | None")
        process = int(logged.read("process", "int", 0))
        texts = logged.read("values", "dict[str, str]")
        try:
            numbers = {name: float(text) for name, text in texts.items()}
        except ValueError as error:
            raise BadConfig(f"`logged.values` has what is no number: {error}") from None
        self.take_values(numbers, step, process=process)

    def show(self, shown: ConfigFields) -> None:
        """Take a part of what the work reports with `cavvy.log` beside numbers. Raises
        BadConfig."""
        from .examples import ExampleParts

        if self._parts is None:
            self._parts = ExampleParts()
        if (data := self._parts.take(shown)) is None:
            return
        name, kind = shown.read("name", "str"), shown.read("kind", "str")
        step, process = shown.read("step", "float | None"), int(shown.read("process", "int", 0))
        self._steps.show(name, kind, data, step, process=process)
        self._busy_at = self._moved_at = time.monotonic()

    def take_values(
        self,
        values: Mapping[str, float],
        step: float | None,
        age_s: float = 0.0,
        *,
        process: int = 0,
    ) -> None:
        """Take values that a process of the work reports one by one."""
        newest = self._steps.log(values, step, process=process, age_s=age_s)
        self._busy_at = self._moved_at = time.monotonic()
        self._tell_printed(newest)

    def describe(self, params: Mapping[str, str]) -> None:
        """Take settings that the work reports."""
        self._steps.describe(params)

    def is_complete(self) -> bool:
        """Return whether the work says that it is complete, as the server judges it."""
        self._tell(self._progress.look())
        told = self._reported.get("complete", self._reported.get("fraction"))
        return isinstance(told, (int, float)) and told >= 1

    def tick(self) -> str:
        """Report what has changed. If the work has been idle for too long, return the reason to end
        it."""
        now = time.monotonic()
        self._figures.tick()
        self._look_at_file()
        self._look_at_events()
        self._steps.tick()
        if self._checkpoints and now - self._checkpoints_at >= CHECKPOINT_S:
            self._checkpoints_at = now
            self._tell_checkpoint()
        limits = (self._idle_s or TELEMETRY_S * 4, self._stuck_s or TELEMETRY_S * 4)
        often = 1.0 if self.memory_mib else min(TELEMETRY_S, *(limit / 4 for limit in limits))
        if now - self._looked_at >= (often if self._told_at else min(often, FIRST_S)):
            self._measure(now)
        return "" if self._idle_s is None else self._check_idle(now, self._idle_s)

    def _check_idle(self, now: float, limit: float) -> str:
        """Warn before the idle limit is reached. Once the idle limit is reached, return the reason
        to end the work.
        """
        if self._connected():
            self._busy_at = now
        idle, what = now - self._busy_at, "no output, no CPU use and no connection in use"
        ahead = min(WARN_S, limit / 2)
        if self._idle_gpu_percent and "gpu_percent" in self.gpus:
            idle, what = now - self._gpu_busy_at, f"GPU use below {self._idle_gpu_percent:g} %"
            ahead = limit / 2
        if idle > limit:
            return f"{what} for {limit:g} s"
        late = idle > limit - ahead
        if late and not self._warned:
            left = f"the work will be stopped in {limit - idle:.0f} s"
            self._say("event", name="idle", text=f"{what} for {idle:.0f} s: {left}")
        self._warned = late
        return ""

    @property
    def too_large(self) -> bool:
        """Whether the work uses more memory than allowed."""
        limit = self.memory_mib
        return 0 < limit < self.usage.memory_mib and limit < self.usage.measure_memory()

    def take_gpus(self, values: dict[str, float]) -> None:
        """Take a measurement of the GPUs; `joules` counts from the first."""
        joules = values.pop("joules", self._gpu_joules)
        self._figures.spend(max(0.0, joules - self._gpu_joules))
        self._gpu_joules = joules
        self.gpus = values
        self._means.gpu_peak_mib = max(self._means.gpu_peak_mib, values.get("gpu_memory_mib", 0))
        self._figures.measure({name: each for name, each in values.items() if "." not in name})

    def share_gpu(self, processes: dict[str, float] | None, values: dict[str, float]) -> None:
        """Take the GPU memory in MiB of each process on the shared GPU, or None if the driver does
        not tell it. In `values`, the GPU's memory becomes the memory that the work uses.
        """
        work = self.usage.list_work()
        if processes is None or not work:
            if self.gpu_memory_mib and not self._unwatched:
                why = "the driver does not tell" if work else "the agent cannot see"
                text = (
                    f"{why} the GPU memory of the job's processes: nothing enforces the job's "
                    f"share of {self.gpu_memory_mib} MiB"
                )
                self._say("event", name="gpu-share", text=text)
            self._unwatched = True
            return
        used = sum(processes.get(str(pid), 0) for pid in {*work, *self.usage.list_beside()})
        values["gpu_memory_mib"] = round(used, 1)
        if 0 < self.gpu_memory_mib < used:
            self.gpu_excess = (
                f"out of GPU memory: the work used {used:.0f} MiB of the GPU that it shares, but "
                f"its share is {self.gpu_memory_mib} MiB; request a larger share or a whole GPU"
            )

    def end(self) -> None:
        """Check progress and checkpoints a last time after the work has ended. Report the newest
        use of GPUs, which is all that is known of short work."""
        if self.gpus is not self._told_gpus:
            self._tell_usage(time.monotonic())
        self._look_at_file()
        self._look_at_events(last=True)
        self._tell_printed(self._steps.end())
        self._tell_checkpoint(last=True)
        self._spend_cpu(time.monotonic())
        self._figures.send()

    def _measure(self, now: float) -> None:
        self._looked_at = now
        self.usage.look()
        self._spend_cpu(now)
        self._figures.measure(self._measured)
        if (
            not self.usage.known
            or self.usage.cpu_percent >= IDLE_CPU_PERCENT
            or self.gpus.get("gpu_percent", 0) >= IDLE_GPU_PERCENT
        ):
            self._busy_at = now
        if self.gpus.get("gpu_percent", 100) >= (self._idle_gpu_percent or LOW_GPU_PERCENT):
            self._gpu_busy_at = now
        if self._flows():
            self._moved_at = now
        if now - self._told_at >= TELEMETRY_S - 0.5:
            self._tell_usage(now)

    def _spend_cpu(self, now: float) -> None:
        share = None if self._alone else self.usage.cpu_percent
        self._figures.spend(self._cpus.read(now, share))

    def _flows(self) -> bool:
        """Return whether the work moves data, as programs do that load or save much."""
        rates = self.usage.rates
        disk = rates.get("disk_read_mib_s", 0) + rates.get("disk_write_mib_s", 0)
        net = rates.get("net_in_mib_s", 0) + rates.get("net_out_mib_s", 0)
        return disk >= FLOW_MIB_S or (self._alone and net >= NET_FLOW_MIB_S)

    @property
    def _measured(self) -> dict[str, float]:
        usage = self.usage
        watts = {} if self._cpus.watts is None else {"cpu_power_w": self._cpus.watts}
        return {
            "cpu_percent": usage.cpu_percent,
            "memory_mib": usage.memory_mib,
            **watts,
            **usage.rates,
        }

    def _tell_usage(self, now: float) -> None:
        since, self._told_at = max(self._told_at, self._began_at), now
        self._told_gpus = self.gpus
        values = {**self._measured, "memory_peak_mib": self.usage.memory_peak_mib}
        values.update(self.gpus)
        values["still_s"] = round(now - self._moved_at)
        if self._gpu_busy_at < now:
            values["gpu_idle_s"] = round(now - self._gpu_busy_at)
        self._say("telemetry", values=dict(values, **self._means.add(values, now - since)))

    def _look_at_file(self) -> None:
        values = self._progress.look()
        self._steps.report(values)
        self._tell(values)

    def _look_at_events(self, *, last: bool = False) -> None:
        """Read what the work has written into event files of TensorBoard."""
        if not self._event_folders:
            return
        newest: dict[str, float] = {}

        def shown(name: str, kind: str, data: bytes, step: float, age_s: float) -> None:
            self._steps.show(name, kind, data, step, age_s=age_s)

        def found(values: Mapping[str, float], step: float, age_s: float) -> None:
            newest.update(self._steps.log(values, step, age_s=age_s))

        if self._events is None:
            from .event_files import EventFileReader

            self._events = EventFileReader(
                self._event_folders,
                self._steps.describe,
                shown=shown,
                allowed=self._event_allowed,
                host=self._event_host,
            )
        self._events.read(found, last=last)
        self._tell_printed(newest)

    def _tell_printed(self, values: Mapping[str, float]) -> None:
        """Show values that the work only prints, unless it reports its own: those of names that say
        how far the work is would be taken for such a report."""
        if values and not self._declares:
            self._show({name: value for name, value in values.items() if name not in MEANT})

    def _tell(self, values: dict[str, object]) -> None:
        self._declares = self._declares or bool(values)
        self._show(values)

    def _show(self, values: dict[str, object]) -> None:
        if values:
            self._figures.report(values)
            if {**self._reported, **values} != self._reported:
                self._reported.update(values)
                self._moved_at = time.monotonic()
            self._say("progress", values=values)

    def _tell_checkpoint(self, *, last: bool = False) -> None:
        found = self._checkpoints.look(last=last) if self._checkpoints else {}
        if found:
            self._moved_at = time.monotonic()
            unsafe = str(found.get("text", ""))
            if unsafe and unsafe != self._unsafe:
                self._say("event", name="unsafe", text=unsafe)
            self._unsafe = unsafe
            self._say("checkpoint", **found)


def parse_progress(text: bytes) -> dict[str, object]:
    """Return the values of a JSON object, keyed by name. Only numbers, strings, true and false are
    returned; true and false are returned as 1 and 0. Returns {} if the text is not a JSON
    object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    values = [
        (name, int(value) if isinstance(value, bool) else value)
        for name, value in found.items()
        if _is_value(value)
    ]
    return dict(values[:MOST_VALUES])


def _is_value(value: object) -> bool:
    if isinstance(value, float):
        return value - value == 0  # JSON has neither infinity nor NaN
    if isinstance(value, str):
        return len(value) <= LONGEST_TEXT
    return isinstance(value, int) and abs(value) < 1 << 63


def _may_begin(line: bytes) -> bool:
    """Return whether an incomplete line can become a progress line."""
    return (
        bool(line) and len(line) < LONGEST_LINE and (line.startswith(MARK) or MARK.startswith(line))
    )


class UsageMeans:
    """Adds measurements up. Each measurement represents the time since the previous one.
    `measured_s` is the total time of all measurements, and `gpu_peak_mib` the most GPU memory.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._lengths: dict[str, float] = {}
        self._seconds = 0.0
        self.gpu_peak_mib = 0.0

    def add(self, values: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Add a measurement; return the means and totals, keyed by name."""
        self._seconds += seconds
        for name in _MEANS:
            if name in values:
                self._sums[name] = self._sums.get(name, 0) + values[name] * seconds
                self._lengths[name] = self._lengths.get(name, 0) + seconds
        found = {
            _MEANS[name]: round(self._sums[name] / max(self._lengths[name], 0.001), 1)
            for name in self._sums
        }
        found["measured_s"] = round(self._seconds)
        if self.gpu_peak_mib:
            found["gpu_memory_peak_mib"] = self.gpu_peak_mib
        return found


class MinuteFigures:
    """The lowest, mean and highest value of each figure in the current minute of the node's clock.
    `say` sends a message to the control plane.
    """

    def __init__(self, say: Callable[..., None], clock: Callable[[], float] = time.time) -> None:
        self._say, self._clock = say, clock
        self._minute = int(clock()) // MINUTE_S
        self._reported: set[str] = set()
        self._joules = 0.0
        # lowest, sum, count, highest
        self._found: dict[str, tuple[float, float, int, float]] = {}

    def measure(self, values: Mapping[str, float]) -> None:
        """Add measurements of the agent."""
        for name, value in values.items():
            low, total, count, high = self._found.get(name, (value, 0.0, 0, value))
            self._found[name] = min(low, value), total + value, count + 1, max(high, value)

    def spend(self, joules: float) -> None:
        """Add energy that the work has used."""
        self._joules += joules

    def report(self, values: Mapping[str, object]) -> None:
        """Add the numbers that the task reports."""
        for name, value in values.items():
            if isinstance(value, str) or name in OTHERS or len(name) > LONGEST_NAME:
                continue
            if name not in self._reported:
                if len(self._reported) >= MOST_REPORTED:
                    continue
                self._reported.add(name)
            # the scanner gives numbers
            self.measure({name: float(value)})  # type: ignore[arg-type]

    def tick(self) -> None:
        """Send the figures of the minute that is over. To be called about once a second."""
        if int(self._clock()) // MINUTE_S != self._minute:
            self.send()

    def send(self) -> None:
        """Send the figures of the minute so far."""
        now = self._clock()
        found, self._found = self._found, {}
        if self._joules:
            found[ENERGY] = (self._joules, self._joules, 1, self._joules)
            self._joules = 0.0
        if found:
            figures = {
                name: [_short(low), _short(total / count), _short(high)]
                for name, (low, total, count, high) in found.items()
            }
            self._say(
                "minute", seconds=round(max(0.0, now - self._minute * MINUTE_S), 3), figures=figures
            )
        self._minute = int(now) // MINUTE_S


def _short(value: float) -> float:
    return float(f"{value:.5g}")
