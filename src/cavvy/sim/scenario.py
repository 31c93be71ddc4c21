"""A scenario: what is submitted, what the cloud does, what users do and when the server dies; and
how it ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import Attempt, Job, Node
from cavvy.domain.markets import Observation
from cavvy.domain.tasks import Task
from cavvy.domain.units import Money
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import CloudScript


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSubmission:
    """A task and when it comes in, in seconds from the scenario's start."""

    task: Task
    at_s: float = 0.0
    consented: bool = True
    ceiling: Money | None = None


class UserAction(StrEnum):
    """What a user does to a job that was submitted."""

    STOP = "stop"
    DRILL = "drill"
    RETRY = "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserIntervention:
    """A user's wish for the n-th submission. One that comes too early or too late has no effect."""

    action: UserAction
    job: int
    at_s: float
    notice_s: float = 30.0  # of a drill


class CrashMoment(StrEnum):
    """Where in a call to the store or a provider the server dies."""

    BEFORE = "before"  # nothing was done
    AFTER = "after"  # it was done, and nobody heard


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCrash:
    """The server dies at its n-th call to the outside, counted from the scenario's start, and comes
    back later.
    """

    call: int
    when: CrashMoment = CrashMoment.AFTER
    down_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimScenario:
    """One play. `stale` are writes, counted from the start, before which somebody else wrote the
    row.
    """

    submissions: tuple[SimSubmission, ...]
    script: CloudScript
    interventions: tuple[UserIntervention, ...] = ()
    crashes: tuple[ServerCrash, ...] = ()
    stale: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()  # writes that fail because the store cannot write
    store_s: float = 0.0  # the longest that half a call to the store takes
    longest: timedelta = timedelta(days=14)
    egress: Mapping[str, Money] = field(
        default_factory=dict
    )  # per GB that leaves, by provider or "provider/region"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """One job at the end of the scenario."""

    job: Job
    attempts: Sequence[Attempt]
    nodes: Sequence[Sequence[Node]]  # by attempt
    events: Sequence[Event]
    charges: Sequence[Charge]
    observations: Sequence[Observation] = ()  # of the markets that it used


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """How it ended. `finished`: every job had ended and every attempt was closed before the
    longest time.
    """

    finished: bool
    at: datetime
    traces: Sequence[JobTrace]
    cloud: FakeCloud
    calls: int  # to the outside, made by the control plane
