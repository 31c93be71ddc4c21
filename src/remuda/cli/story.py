"""A job's story as its followers read it: what changes something for them, each step once; used by follow and events.

`remuda events` lists every step; here those are left out that say what another line says.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remuda.client.wire import EventView

_KIND_WIDTH = len("checkpoint")
# Said by another line: `running` or `setup` follows a claim, `notice` a drill, and the bill stands below the log.
_LEFT_OUT = frozenset({"claimed", "drill", "billed"})
_LAST = frozenset({"done", "failed", "stopped"})  # the summary says it, unless more comes
_LEAVING = frozenset({"notice", "stop"})  # after these it matters that a checkpoint is complete


class Story:
    """Picks and words the steps of one job, in their order. `several` says that its gang has more than one rank."""

    def __init__(self, several: bool) -> None:
        self._several = several
        self._leaving = False
        self._said = ""
        self._held: EventView | None = None

    def tell(self, event: "EventView") -> "list[EventView]":
        """The steps to show now that this one is known."""
        held = [self._held] if self._held is not None and event.kind not in _LEFT_OUT else []
        if held:
            self._held = None
        if event.kind in _LAST:
            self._held = event
            return held
        return [*held, event] if self._matters(event) else held

    def _matters(self, event: "EventView") -> bool:
        if event.kind in _LEAVING:
            self._leaving = True
        elif event.kind == "placed":
            self._leaving = False
        if event.kind in _LEFT_OUT or (event.kind == "queued" and event.text == "submitted"):
            return False
        if event.kind == "checkpoint":
            return self._leaving
        # Where there is one rank, its exit is the attempt's, which the next step tells.
        return event.kind != "exited" or (self._several and event.text != "exit code 0")

    def text(self, event: "EventView") -> str:
        """The step as one line, without what the line before it said already."""
        text = event.text.removeprefix(f"{self._said}; ")
        self._said = event.text
        return story_line(event, text)


def story_line(event: "EventView", text: str | None = None) -> str:
    """One step without its time: "placed      starts on local/here/cpu:0/on-demand"."""
    rank = f"rank {event.rank}: " if event.rank else ""
    return f"{event.kind.ljust(_KIND_WIDTH)}  {rank}{event.text if text is None else text}"
