"""Tells capabilities what happens, in the transaction that stores it: so what they store about it
is neither lost nor stored without it. A listener that fails harms nothing else: what it has written
is undone, and the transaction goes on.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

from cavvy.domain.events import Announcement, Event
from cavvy.domain.figures import StepValues
from cavvy.frame.discover import load_all
from cavvy.frame.faults import note_fault
from cavvy.store.drivers import DatabaseSession

Happened = Event | Announcement | StepValues
Listener = Callable[[DatabaseSession, Sequence[Happened]], None]


def tell(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    """Call each listener in the open transaction with events of jobs, with announcements, and with
    what programs report of their steps."""
    if happened:
        for capability, listener in _list_listeners():
            error = session.contain(partial(listener, session, happened))
            if error is not None:
                place = f"{listener.__module__}:{listener.__qualname__}"
                note_fault(capability, f"cannot learn what happens ({place})", error)


@cache
def _list_listeners() -> Sequence[tuple[str, Listener]]:
    found = load_all(lambda capability: capability.listeners)
    return [(capability.name, listener) for capability, listener in found]
