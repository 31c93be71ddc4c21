"""Selects the events of a job that `cavvy run` and `cavvy logs -f NAME` show between log lines.

`cavvy events` lists every event. This module skips events whose content another line already shows.
"""

from typing import TYPE_CHECKING

from cavvy.cli.view.failure import escape_controls

if TYPE_CHECKING:
    from cavvy.client.wire import EventView

_KIND_WIDTH = len("checkpoint")
# These events repeat other lines: `running` or `setup` follows a `claim`, `notice` follows a
# `drill`, and the bill is printed below the log.
_LEFT_OUT = frozenset({"claimed", "drill", "billed"})
_LAST = frozenset(
    {"exit", "done", "failed", "stopped"}
)  # The summary shows these events, so they are printed only if more events follow.
# Completed checkpoints are shown after one of these events.
_LEAVING = frozenset({"notice", "stop"})


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
    return _line("queued", None, reason)


def _line(kind: str, rank: int | None, text: str) -> str:
    text = escape_controls(text)  # The text may contain output of a node.
    return f"{kind.ljust(_KIND_WIDTH)}  {text if rank is None else f'rank {rank}: {text}'}"
