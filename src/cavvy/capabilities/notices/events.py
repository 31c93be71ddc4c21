"""The events that people can be notified of: those of the core, and those of capabilities."""

from cavvy.capabilities.notices.notice import NoticeEvent
from cavvy.frame.discover import find_capabilities


def list_events() -> dict[str, None]:
    """Return the names of the events that people can be notified of, in the order of lists."""
    own = (name for each in find_capabilities().capabilities for name in each.events)
    return dict.fromkeys((*map(str, NoticeEvent), *own))
