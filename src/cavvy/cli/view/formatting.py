"""Formats values of the API as readable text, for commands that list or follow jobs.

Selects the events of a job that `cavvy run` and `cavvy logs -f NAME` show between log lines.

`cavvy events` lists every event. This module skips events whose content another line already shows.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from cavvy.cli.view.failure import escape_controls
from cavvy.domain.local_time import to_local
from cavvy.domain.units import Money, count_decimals, format_duration, format_number, format_usd

if TYPE_CHECKING:
    from cavvy.client.wire import EstimatedStart, EventView, JobDetail, JobListing


COLORS = {
    "queued": "yellow",
    "starting": "cyan",
    "running": "green",
    "stopping": "yellow",
    "done": "green",
    "failed": "red",
    "stopped": "magenta",
}
ENDED = frozenset({"done", "failed", "stopped"})
_EXACT_S = 600  # shorter estimated times are shown with their seconds
_LONGEST_S = 3.2e10  # seconds in a thousand years; a longer remaining time is not shown
_BAR = 20  # characters of a bar of progress
UNFINISHED = tuple(phase for phase in COLORS if phase not in ENDED)

_KIND_WIDTH = len("checkpoint")
# These events repeat other lines: `running` or `setup` follows a `claim`, `notice` follows a
# `drill`, and the bill is printed below the log.
_LEFT_OUT = frozenset({"claimed", "drill", "billed"})
_LAST = frozenset(
    {"exit", "done", "failed", "stopped"}
)  # The summary shows these events, so they are printed only if more events follow.
# Completed checkpoints are shown after one of these events.
_LEAVING = frozenset({"notice", "stop"})


def show_money(micros: int, decimals: int = 2) -> str:
    return format_usd(Money(micros), decimals)


def show_dollars(usd: float) -> str:
    return show_money(round(usd * 1e6))


def make_money_format(amounts: Iterable[int]) -> Callable[[int], str]:
    """Return a function that formats these amounts of micro-dollars and their sum. The function
    uses enough decimals that the printed amounts add up to the printed sum.
    """
    return partial(show_money, decimals=count_decimals([Money(each) for each in amounts]))


def show_ago(then: datetime) -> str:
    """Return the time since `then`, such as "3m05s ago"."""
    return f"{_since(then)} ago"


def show_for(then: datetime) -> str:
    """Return the time since `then`, such as "for 3m05s"."""
    return f"for {_since(then)}"


def _since(then: datetime) -> str:
    return format_duration(max(datetime.now(UTC) - then, timedelta(0)))


def show_time(moment: datetime, form: str = "%Y-%m-%d %H:%M:%S", *, zone: bool = True) -> str:
    """Return the moment in local time, by default with its zone, such as "2026-01-31 09:00:00
    CET".
    """
    return f"{to_local(moment):{form}}{f' {zone_name(moment)}' if zone else ''}"


def show_clock(moment: datetime) -> str:
    """Return the time of day, such as "09:00:00 CET"."""
    return show_time(moment, "%H:%M:%S")


def show_minute(moment: datetime) -> str:
    """Return the local date and time without seconds and time zone."""
    return show_time(moment, "%m-%d %H:%M", zone=False)


def zone_name(moment: datetime) -> str:
    """Return the name of the local time zone at this moment."""
    return to_local(moment).tzname() or "UTC"


def show_place(job: "JobListing") -> str:
    """Return a waiting job's position, and the projects whose jobs are before it."""
    ahead = [
        f"{count} of {project or 'other projects'}"
        for project, count in sorted(job.queue_ahead.items(), key=lambda each: -each[1])
    ]
    behind = f", behind {', '.join(ahead)}" if ahead and [*job.queue_ahead] != [job.project] else ""
    return f"{job.queue_position}{behind}"


def show_start(start: "EstimatedStart") -> str:
    """Return when a job probably starts, such as "in 25m (8m to 2h10m)"."""
    now = datetime.now(UTC)
    moments = start.likely, start.earliest, start.latest
    likely, low, high = (format_duration(_round(max(each - now, timedelta(0)))) for each in moments)
    return f"in {likely} ({low} to {high})"


def _round(length: timedelta) -> timedelta:
    """Return the length without seconds that mean nothing in an estimate."""
    seconds = round(length.total_seconds())
    return timedelta(seconds=seconds if seconds < _EXACT_S else seconds // 60 * 60)


def show_seconds(seconds: float) -> str:
    return format_duration(timedelta(seconds=seconds))


def show_size(size: float) -> str:
    """Return a number of bytes in a readable unit, such as "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def show_progress(progress: Mapping[str, float | str]) -> str:
    """Return a task's progress in one line: "41/100 epochs loss 0.12 accuracy 0.98 12s left"."""
    from cavvy.client.metrics import figures

    parts = []
    if "done" in progress and "total" in progress:
        unit = progress.get("unit", "")
        done, total = format_number(progress["done"]), format_number(progress["total"])
        parts.append(f"{done}/{total} {unit}".strip())
    parts += [f"{name} {format_number(value)}" for name, value in figures(progress).items()]
    if isinstance(left := progress.get("left_s"), int | float) and 0 <= left < _LONGEST_S:
        parts.append(f"{show_seconds(round(left))} left")
    return "  ".join(parts)


def show_bar(share: float) -> str:
    """Return a bar for the share of the work that is done."""
    full = int(share * _BAR)
    return f"[{'=' * full}{'-' * (_BAR - full)}] {int(share * 100)}%"


def tags_of(job: "JobDetail") -> dict[str, str]:
    """Return the tags of the job's task."""
    from msgspec.json import decode

    tags = decode(job.task).get("tags", {})
    return {str(name): str(text) for name, text in tags.items()}


def range_of(job: "JobDetail") -> str:
    """Return on how many nodes an elastic job runs, and may run, or "" for another job."""
    from msgspec.json import decode

    sizes = decode(job.task).get("elastic")
    if not sizes:
        return ""
    text = f"{sizes['least']}..{sizes['most']}"
    own = next((each for each in job.attempts if each.number == job.attempt), None)
    return f"{len(own.nodes)} of {text}" if own and job.phase not in ENDED else text


def hold_of(job: "JobDetail") -> str:
    """Return why an elastic job that runs does not get more nodes, or ""."""
    if job.hold is None or job.phase != "running" or job.hold.attempt != job.attempt:
        return ""
    return f"not now, because {job.hold.text}"


def window_of(job: "JobDetail") -> str:
    """Return the job's start window as written in the task file, or "" if it has none."""
    from msgspec.json import decode

    window = decode(job.task).get("window") or {}
    text, zone = window.get("text", ""), window.get("time_zone", "UTC")
    return text if not text or zone in text else f"{text} ({zone})"


def show_tags(tags: Mapping[str, str]) -> str:
    return "  ".join(f"{name}={text}" for name, text in tags.items())


class JobStory:
    """Selects and formats the events of one job, in order. `several` is true if the job's gang has
    more than one rank.
    """

    def __init__(self, several: bool) -> None:
        self._several = several
        self._leaving = False
        self._said = ""
        self._held: EventView | None = None

    def tell(self, event: "EventView") -> "list[EventView]":
        """Add an event. Returns the events to show now."""
        if event.kind in _LEFT_OUT:
            return []
        held = [] if self._held is None or _repeats(self._held, event) else [self._held]
        self._held = event if event.kind in _LAST else None
        return [*held, event] if self._matters(event) else held

    def _matters(self, event: "EventView") -> bool:
        if event.kind in _LEAVING:
            self._leaving = True
        elif event.kind == "placed":
            self._leaving = False
        match event.kind:
            case "checkpoint":
                return self._leaving
            case "exited":  # With one rank, or after a stop, a later event reports the same exit.
                return self._several and not self._leaving and event.fact != "succeeded"
            case "queued":
                return event.fact != "submitted"
            case kind:
                return kind not in _LAST

    def text(self, event: "EventView") -> str:
        """Return the event as one line. If the text starts like the previous event, the common
        start is left out.
        """
        text = event.text.removeprefix(f"{self._said}; ")
        self._said = event.text
        return _line(event.kind, event.rank if self._several else None, text)


def _repeats(held: "EventView", event: "EventView") -> bool:
    """Return whether the job's failure event only repeats the exit of its last attempt."""
    return held.kind == "exit" and event.kind == "failed" and event.fact is None


def story_line(event: "EventView") -> str:
    """Return one event without its time: "placed starts on local/here/cpu:0/on-demand"."""
    return _line(event.kind, event.rank, event.text)


def wait_line(reason: str) -> str:
    """Return why a job waits in the queue: "queued waits for free capacity at local/here"."""
    return step_line("queued", reason)


def step_line(kind: str, text: str) -> str:
    """Return a line that looks like that of an event."""
    return _line(kind, None, text)


def _line(kind: str, rank: int | None, text: str) -> str:
    text = escape_controls(text)  # The text may contain output of a node.
    return f"{kind.ljust(_KIND_WIDTH)}  {text if rank is None else f'rank {rank}: {text}'}"
