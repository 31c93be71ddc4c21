"""Notices: messages to people outside of Cavvy about events of jobs and budgets."""

from datetime import datetime
from enum import StrEnum

from cavvy.domain.values import Struct


class NoticeEvent(StrEnum):
    """The events that people can be notified of; `events.KINDS` says what causes them."""

    DONE = "done"
    FAILED = "failed"
    PREEMPTED = "preempted"
    STUCK = "stuck"
    BUDGET = "budget"


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
