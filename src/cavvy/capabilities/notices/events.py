"""The events that people can be notified of: those of the core, and those of capabilities."""

from collections.abc import Mapping

from cavvy.capabilities.notices.notice import NoticeEvent
from cavvy.domain.jobs import AttemptOutcome, JobPhase, StopCause
from cavvy.domain.values import Struct
from cavvy.frame.discover import find_capabilities


class NoticeKind(Struct, frozen=True, kw_only=True):
    """What causes a notice, and how it is told. `causes` are events of jobs by their kind and fact;
    a fact of None means each fact. `means` explains a name that does not say enough, and `severity`
    is PagerDuty's.
    """

    causes: tuple[tuple[str, str | None], ...]
    means: str = ""
    severity: str = "error"


KINDS: Mapping[NoticeEvent, NoticeKind] = {
    NoticeEvent.DONE: NoticeKind(causes=((JobPhase.DONE, None),), severity="info"),
    NoticeEvent.FAILED: NoticeKind(causes=((JobPhase.FAILED, None),)),
    NoticeEvent.PREEMPTED: NoticeKind(
        causes=((AttemptOutcome.PREEMPTED, None),), severity="warning"
    ),
    NoticeEvent.STUCK: NoticeKind(causes=(("stuck", None),), means="a job makes no progress"),
    NoticeEvent.BUDGET: NoticeKind(
        causes=(("limit", StopCause.BUDGET),),
        means="a share of a budget is spent, or its own budget stops a job",
    ),
}
_SEVERITY = {str(event): kind.severity for event, kind in KINDS.items()}


def list_events() -> dict[str, None]:
    """Return the names of the events that people can be notified of, in the order of lists."""
    own = (name for each in find_capabilities().capabilities for name in each.events)
    return dict.fromkeys((*map(str, NoticeEvent), *own))


def explain_events() -> str:
    """Return the names of the core's events as a list for people, with what they mean."""
    *first, last = (f"{e} ({kind.means})" if kind.means else str(e) for e, kind in KINDS.items())
    return f"{', '.join(first)} and {last}"


def find_severity(event: str) -> str:
    """Return how urgent PagerDuty shows an event; those of capabilities are errors."""
    return _SEVERITY.get(event, "error")
