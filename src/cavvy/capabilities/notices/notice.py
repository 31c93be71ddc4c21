"""Notices: messages to people outside of Cavvy about events of jobs and budgets."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

from cavvy.domain.jobs import AttemptOutcome, JobPhase, StopCause
from cavvy.domain.values import Struct


class NoticeEvent(StrEnum):
    """The events that people can be notified of; `KINDS` says what causes them."""

    DONE = "done"
    FAILED = "failed"
    PREEMPTED = "preempted"
    STUCK = "stuck"
    BUDGET = "budget"


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


class NoticeChannel(StrEnum):
    """The services that receive notices."""

    SLACK = "slack"
    TEAMS = "teams"
    EMAIL = "email"
    PAGERDUTY = "pagerduty"
    WEBHOOK = "webhook"


class NoticeTarget(Struct, frozen=True, kw_only=True):
    """Where to send the notices of a project's `events`; with `user`, only those about jobs and
    budgets of this user. The address is encrypted, because it contains a secret. `problem` is why
    the newest message could not be delivered, or "".
    """

    project: str
    name: str
    channel: NoticeChannel
    sealed: bytes
    events: tuple[str, ...]
    user: str = ""
    problem: str = ""
    updated_at: datetime

    @property
    def bound_name(self) -> str:
        """The name that the encryption of the address includes. No secret can have this name."""
        return f"notice address {self.name}"


class Notice(Struct, frozen=True, kw_only=True):
    """One message of the outbox. `job_id` and `job` are "" for a notice about a budget. The store
    sets `id`.
    """

    id: int = 0
    project: str
    target: str  # the name of its target
    event: str  # a NoticeEvent, or an event of a capability
    job_id: str = ""
    job: str = ""
    user: str = ""
    text: str
    at: datetime
    due_at: datetime
    tries: int = 0


def explain_events() -> str:
    """Return the names of the core's events as a list for people, with what they mean."""
    *first, last = (f"{e} ({kind.means})" if kind.means else str(e) for e, kind in KINDS.items())
    return f"{', '.join(first)} and {last}"


def find_severity(event: str) -> str:
    """Return how urgent PagerDuty shows an event; those of capabilities are errors."""
    return _SEVERITY.get(event, "error")
