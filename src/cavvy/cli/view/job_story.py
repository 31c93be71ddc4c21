"""A job's story as its followers read it: what changes something for them, each step once; used by
follow and events.

`cavvy events` lists every step; here those are left out that say what another line says.
"""

from typing import TYPE_CHECKING

from cavvy.cli.view.failure import escape_controls

if TYPE_CHECKING:
    from cavvy.client.wire import EventView

_KIND_WIDTH = len("checkpoint")
# Said by another line: `running` or `setup` follows a claim, `notice` a drill, and the bill stands
# below the log.
_LEFT_OUT = frozenset({"claimed", "drill", "billed"})
_LAST = frozenset({"exit", "done", "failed", "stopped"})  # the summary says it, unless more comes
_LEAVING = frozenset({"notice", "stop"})  # after these it matters that a checkpoint is complete


class JobStory:
    """Picks and words the steps of one job, in their order. `several` says that its gang has
    more than one rank.
    """

    def __init__(self, several: bool) -> None:
        self._several = several
        self._leaving = False
        self._said = ""
        self._held: EventView | None = None

    def tell(self, event: "EventView") -> "list[EventView]":
        """The steps to show now that this one is known."""
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
            case (
                "exited"
            ):  # of one rank, or after a stop, it is what the next step or the last one tells
                return self._several and not self._leaving and event.fact != "succeeded"
            case "queued":
                return event.fact != "submitted"
            case kind:
                return kind not in _LAST

    def text(self, event: "EventView") -> str:
        """The step as one line, without what the line before it said already."""
        text = event.text.removeprefix(f"{self._said}; ")
        self._said = event.text
        return _line(event.kind, event.rank if self._several else None, text)


def _repeats(held: "EventView", event: "EventView") -> bool:
    """Whether a job that failed tells how its last attempt ended."""
    return held.kind == "exit" and event.kind == "failed" and event.fact is None


def story_line(event: "EventView") -> str:
    """One step without its time: "placed      starts on local/here/cpu:0/on-demand"."""
    return _line(event.kind, event.rank, event.text)


def _line(kind: str, rank: int | None, text: str) -> str:
    text = escape_controls(text)  # a reason may be the node's words
    return f"{kind.ljust(_KIND_WIDTH)}  {text if rank is None else f'rank {rank}: {text}'}"
