"""A scenario: submissions, actions of the cloud and users, crashes of the server, and the final
state.
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
    """A task and the time of its submission, in seconds from the scenario's start."""

    task: Task
    at_s: float = 0.0
    consented: bool = True
    ceiling: Money | None = None


class UserAction(StrEnum):
    """A user's action on a submitted job."""

    STOP = "stop"
    DRILL = "drill"
    RETRY = "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserIntervention:
    """A user's request for the n-th submission. A request that comes too early or too late has no
    effect.
    """

    action: UserAction
    job: int
    at_s: float
    notice_s: float = 30.0  # notice of a drill


class CrashMoment(StrEnum):
    """The moment within a call to the store or a provider at which the server dies."""

    BEFORE = "before"  # before the call had an effect
    AFTER = "after"  # after the effect, before the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCrash:
    """The server dies at its n-th external call, counted from the scenario's start, and restarts
    later.
    """

    call: int
    when: CrashMoment = CrashMoment.AFTER
    down_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimScenario:
    """One scenario. `stale` are writes, counted from the start, before which a concurrent write
    changed the row.
    """

    submissions: tuple[SimSubmission, ...]
    script: CloudScript
    interventions: tuple[UserIntervention, ...] = ()
    crashes: tuple[ServerCrash, ...] = ()
    stale: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()  # indexes of writes that fail because the disk is full
    store_s: float = 0.0  # the maximum for half a call to the store
    longest: timedelta = timedelta(days=14)
    egress: Mapping[str, Money] = field(
        default_factory=dict
    )  # per GB of egress, by provider or "provider/region"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """One job at the end of the scenario."""

    job: Job
    attempts: Sequence[Attempt]
    nodes: Sequence[Sequence[Node]]  # by attempt
    events: Sequence[Event]
    charges: Sequence[Charge]
    observations: Sequence[Observation] = ()  # observations of the markets that it used


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """The result. `finished`: every job had ended and every attempt was closed within the time
    limit.
    """

    finished: bool
    at: datetime
    traces: Sequence[JobTrace]
    cloud: FakeCloud
    calls: int  # external calls of the control plane
