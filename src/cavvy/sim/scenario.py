"""The inputs and the result of a scenario: submissions, actions of the cloud and of users, crashes
of the server, and the final state.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.accounts import Project
from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import Attempt, JobRecord, Node
from cavvy.domain.markets import Observation
from cavvy.domain.node_pools import NodePool
from cavvy.domain.policies import BoundPolicy
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, field
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import CloudScript


class SimSubmission(Struct, frozen=True, kw_only=True):
    """A task, and the time of its submission in seconds from the start of the scenario. `others`
    are submitted together with the task, and belong to its group. A task in a group without others
    joins the group."""

    task: TaskSpec
    others: tuple[TaskSpec, ...] = ()
    at_s: float = 0.0
    consented: bool = True
    ceiling: Money | None = None


class UserAction(StrEnum):
    """A user's action on a submitted job."""

    STOP = "stop"
    DRILL = "drill"
    RETRY = "retry"
    RESIZE = "resize"  # let an elastic job have at most `nodes` nodes
    LOSE_NODE = "lose_node"  # a drill that reclaims the node of rank `rank`
    STOP_MACHINE = "stop_machine"  # stop the job and release the nodes of its machine
    DRAIN = "drain"  # drain a host within `notice_s`
    UNCORDON = "uncordon"
    CLOSE_GPU = "close_gpu"  # place no work on the first GPU of a host
    RESERVE = (
        "reserve"  # for `project` and an hour that begins in `notice_s`; work in the way leaves
    )


class UserIntervention(Struct, frozen=True, kw_only=True):
    """A user's action on the job of one submission, or on the host `node`. The action has no effect
    if it happens before the job exists or after the job has ended.
    """

    action: UserAction
    job: int = 0  # index of the submission, starting at 0
    at_s: float
    notice_s: float = 30.0  # the length of the notice, if the action is a drill
    node: str = ""
    project: str = ""
    nodes: int = 1
    rank: int = 0


class CrashMoment(StrEnum):
    """The moment at which the server crashes during a call to the store or a provider."""

    BEFORE = "before"  # the server dies before the call has an effect
    # the server dies after the call has had its effect, but before the server receives the answer
    AFTER = "after"


class ServerCrash(Struct, frozen=True, kw_only=True):
    """A crash of the server at the external call with this number; the server starts again `down_s`
    seconds later. Calls are counted from 1 since the start of the scenario.
    """

    call: int
    when: CrashMoment = CrashMoment.AFTER
    down_s: float = 30.0


class SimScenario(Struct, frozen=True, kw_only=True):
    """One scenario. Writes to the store are numbered from 1. `stale` and `broken` contain the
    numbers of writes that fail. A write in `stale` fails because of a concurrent write, and a write
    in `broken` fails because the disk is full.
    """

    submissions: tuple[SimSubmission, ...]
    script: CloudScript
    interventions: tuple[UserIntervention, ...] = ()
    crashes: tuple[ServerCrash, ...] = ()
    stale: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    projects: tuple[Project, ...] = ()  # each after its parent
    policies: tuple[BoundPolicy, ...] = ()
    budgets: tuple[SpendingBudget, ...] = ()
    pools: tuple[NodePool, ...] = ()
    budgets_end_s: float | None = None  # when the budgets are removed; None: never
    store_s: float = 0.0  # the maximum delay before and after each call to the store
    longest: timedelta = timedelta(days=14)
    # The egress price per GB; the keys are "provider/region" or the provider
    egress: Mapping[str, Money] = field(default_factory=dict)


class JobTrace(Struct, frozen=True, kw_only=True):
    """The recorded data about one job at the end of the scenario."""

    job: JobRecord
    attempts: Sequence[Attempt]
    nodes: Sequence[Sequence[Node]]  # the nodes of each attempt
    events: Sequence[Event]
    charges: Sequence[Charge]
    observations: Sequence[Observation] = ()  # observations of the markets that the job used


class ScenarioResult(Struct, frozen=True, kw_only=True):
    """The result of a scenario. `finished` is true if every job and every attempt ended within the
    time limit.
    """

    finished: bool
    at: datetime
    traces: Sequence[JobTrace]
    cloud: FakeCloud
    calls: int  # the number of external calls that the control plane made
