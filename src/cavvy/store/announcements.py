"""Tells capabilities what happens, in the transaction that stores it: so what they store about it
is neither lost nor stored without it.
"""

from collections.abc import Callable, Sequence
from functools import cache

from cavvy.domain.events import Announcement, Event
from cavvy.domain.figures import StepValues
from cavvy.frame.discover import load_all
from cavvy.store.drivers import DatabaseSession

Happened = Event | Announcement | StepValues
Listener = Callable[[DatabaseSession, Sequence[Happened]], None]


def tell(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    """Call each listener in the open transaction with events of jobs, with announcements, and with
    what programs report of their steps."""
    if happened:
        for listener in _list_listeners():
            listener(session, happened)


@cache
def _list_listeners() -> Sequence[Listener]:
    return [listener for _, listener in load_all(lambda capability: capability.listeners)]
