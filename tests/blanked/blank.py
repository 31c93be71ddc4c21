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
    from cavvy.control.decide import attempt, job
    from cavvy.domain import events, gangs, messages
    from cavvy.domain import jobs as rows
    from cavvy.planner import candidates
    from cavvy.planner.deadline import recommendation
    from cavvy.providers import base
    from cavvy.scheduler import queue

    for kind, *names in (
        (rows.JobRecord, "reason", "stop_reason"),
        (rows.Attempt, "reason"),
        (rows.Node, "exit_reason"),
        (rows.Order, "reason"),
        (rows.PlanState, "reason"),
        (events.Event, "text"),
        (messages.AgentMessage, "reason", "text"),
        (messages.ClaimRefused, "reason"),
        (messages.ClaimLost, "reason"),
        (attempt.AdvanceAttempt, "reason"),
        (attempt.OrderRanks, "reason"),
        (job.AdvanceJob, "reason"),
        (job.RequeueJob, "reason"),
        (job.StopAtLimit, "reason"),
        (gangs.GangSeen, "reason"),
        (candidates.Candidates, "reason"),
        (recommendation.Recommendation, "reason"),
        (queue.JobWait, "reason"),
    ):
        blank(kind, *names)

    def fail(self: BaseException, *said: object) -> None:
        self.args = (X,) if said else ()

    base.ProviderError.__init__ = fail  # type: ignore[assignment]
