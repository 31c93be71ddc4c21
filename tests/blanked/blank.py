"""Has every object that carries a sentence for people say `x`."""

from typing import Any

X = "x"


def blank(kind: Any, *names: str) -> None:
    """Have every new object of this kind say `x` where it said something."""
    make = kind.__init__

    def make_blank(self: Any, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        for name in names:
            if getattr(self, name):
                object.__setattr__(self, name, X)

    kind.__init__ = make_blank


def blank_all() -> None:
    from cavvy.control import attempts, jobs
    from cavvy.domain import events, messages
    from cavvy.domain import jobs as rows
    from cavvy.planner import courses, prospects
    from cavvy.providers import base
    from cavvy.scheduler import turns

    for kind, *names in (
        (rows.Job, "reason", "stop_reason"),
        (rows.Attempt, "reason"),
        (rows.Node, "exit_reason"),
        (rows.Order, "reason"),
        (rows.Course, "reason"),
        (events.Event, "text"),
        (messages.Message, "reason", "text"),
        (messages.Refused, "reason"),
        (messages.NotYours, "reason"),
        (attempts.Advance, "reason"),
        (attempts.Tell, "reason"),
        (jobs.Turn, "reason"),
        (jobs.Requeue, "reason"),
        (jobs.Limit, "reason"),
        (base.GangSeen, "reason"),
        (prospects.Prospects, "reason"),
        (courses.Advice, "reason"),
        (turns.Stay, "reason"),
    ):
        blank(kind, *names)

    def fail(self: BaseException, *said: object) -> None:
        self.args = (X,) if said else ()

    base.ProviderError.__init__ = fail  # type: ignore[assignment]
