"""Decides the next step of one attempt by comparing its wanted state with its observed state."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.control.decide.attempt_snapshot import (
    HEARD_LATELY,
    MARGIN,
    AttemptSnapshot,
    GangAbsence,
    add_cause,
    find_cause,
    heard,
    is_heard_lately,
    is_surely_absent,
    lease_end,
    name_silent,
    say_ended,
    say_lost,
)
from cavvy.control.decide.failures import (
    STACKS,
    STACKS_WAIT,
    AwaitStacks,
    TakeStacks,
    find_stuck,
    next_silence,
)
from cavvy.control.decide.job import cap_of, gives_back
from cavvy.control.decide.losses import (
    LONGEST_WAIT,
    RepairGang,
    awaits_look,
    find_repair,
    keeps_rest,
)
from cavvy.control.decide.rows import taken_at
from cavvy.control.decide.warm_pool import keeps_until
from cavvy.domain import jobs
from cavvy.domain.figures import describe_stragglers, find_stragglers
from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.values import Struct, replace

POLL = timedelta(seconds=15)  # interval for polling a provider about a gang that starts or ends
STEADY_POLL = timedelta(seconds=30)  # polling interval while the agents report running work
LAUNCH_TIMEOUT = timedelta(
    minutes=10
)  # time after which a launch without a clear answer from the provider counts as failed
BOOT_TIMEOUT = timedelta(minutes=20)  # the same as dstack's timeout for its slowest backends
PRICE_RISE = 10  # the budget must not be exceeded even if the price suddenly rises by this factor
_SLOW_FOR = timedelta(minutes=1)  # how long ranks are slower than others before it is told
REMOVE_AGAIN = timedelta(seconds=30)  # how soon a removal that had no effect is requested again
END_TIMES_TIMEOUT = timedelta(minutes=10)  # how long to wait for the end times of an ended gang
_TOLD = frozenset(
    {jobs.AttemptOutcome.PREEMPTED, jobs.AttemptOutcome.STOPPED, jobs.AttemptOutcome.LIMIT}
)  # outcomes of work that was ordered to end
_NONE = timedelta(0)
_LOST_LOOK = timedelta(seconds=5)  # interval of polls for the node of a silent rank
_RENEWED = timedelta(seconds=1)  # the smallest change of a time that is stored


class LaunchGang(Struct, frozen=True, kw_only=True):
    """Request the gang from the provider. A repeated request with the same name creates no second
    gang.
    """


class RemoveGang(Struct, frozen=True, kw_only=True):
    """Request the gang's removal from the provider. `missed` means that the last poll did not find
    the gang.
    """

    missed: bool = False


class AdvanceAttempt(Struct, frozen=True, kw_only=True):
    """Move the attempt to its next phase."""

    phase: jobs.AttemptPhase
    reason: str
    outcome: jobs.AttemptOutcome | None = None
    # set if the kind of failure cannot be derived from the outcome
    failure: jobs.FailureKind | None = None
    exit_code: int | None = None
    rank: int | None = None  # the rank that failed first
    until: datetime | None = None  # for a warm gang: when it is released if no job takes it over


class OrderRanks(Struct, frozen=True, kw_only=True):
    """Send an instruction (`Order`) to the agents of these ranks."""

    ranks: tuple[int, ...]
    kind: str  # see Order.kind
    seconds: float
    reason: str


class CountMiss(Struct, frozen=True, kw_only=True):
    """Count a poll that did not find the gang."""


class ClearMisses(Struct, frozen=True, kw_only=True):
    """Reset the count of missed polls, because a poll found the gang again."""


class EndStuck(Struct, frozen=True, kw_only=True):
    """End the work because it hangs: tell these ranks to stop within the grace period."""

    work: jobs.StuckWork
    ranks: tuple[int, ...]
    grace: timedelta


class NoteSilent(Struct, frozen=True, kw_only=True):
    """Note that the work makes no progress, but is not ended, and where it is."""

    work: jobs.SilentWork


class NoteSlow(Struct, frozen=True, kw_only=True):
    """Note which ranks need longer for a step than others. The event `text` tells of those in
    `new`, if there are any."""

    slow: jobs.SlowRanks
    new: tuple[int, ...] = ()
    text: str = ""


class KeepGang(Struct, frozen=True, kw_only=True):
    """Keep the idle gang of a pool until a new time."""

    until: datetime


class RecheckAttempt(Struct, frozen=True, kw_only=True):
    """Do nothing until the time `after` has passed or an agent sends a report."""

    after: timedelta
    looks: bool = False  # whether to poll the gang then, because it may have lost a node
    # for how long this stays the decision while each poll finds the gang as it was found now, and
    # agents report nothing but figures
    holds: timedelta = timedelta(0)


Action = (
    LaunchGang
    | RemoveGang
    | AdvanceAttempt
    | OrderRanks
    | EndStuck
    | CountMiss
    | ClearMisses
    | NoteSilent
    | NoteSlow
    | KeepGang
    | RepairGang
    | RecheckAttempt
)


def decide_attempt(view: AttemptSnapshot, now: datetime) -> Action:
    """Return the next step of one attempt.

    When the job has ended, the gang is usually released. If the task has `keep`, the gang is kept
    for other jobs instead.
    """
    action = DECIDE[view.attempt.phase](view, now)
    if not isinstance(action, AdvanceAttempt) or action.phase is not jobs.AttemptPhase.ENDING:
        return action
    until = keeps_until(
        view.job,
        view.attempt,
        view.nodes,
        (action.outcome, action.exit_code),
        view.spent,
        now,
    )
    return action if until is None else replace(action, phase=jobs.AttemptPhase.KEPT, until=until)


def _launching(view: AttemptSnapshot, now: datetime) -> Action:
    attempt = view.attempt
    if not _wanted(view):
        return _ending(
            _stop_outcome(view.job), view.job.stop_reason or "the attempt is no longer needed"
        )
    if attempt.repairs:
        return _repairing(view, now)
    if isinstance(view.seen, GangSeen):
        return AdvanceAttempt(
            phase=jobs.AttemptPhase.BOOTING, reason="the provider reports the gang"
        )
    # Some providers start one node per call of `launch`, so an agent on one node does not prove
    # that the other nodes exist.
    if view.nodes and all(node.claim for node in view.nodes):
        reason = "the agents of all ranks reported in"
        return AdvanceAttempt(phase=jobs.AttemptPhase.BOOTING, reason=reason)
    if now - attempt.created_at >= LAUNCH_TIMEOUT:
        return _ending(
            jobs.AttemptOutcome.TIMEOUT,
            add_cause(
                f"the provider gave no clear answer for {_minutes(LAUNCH_TIMEOUT)}", view.trouble
            ),
        )
    if view.asked and view.seen is GangAbsence.UNKNOWN:
        return RecheckAttempt(after=_soon(attempt.created_at, now))
    return LaunchGang()


def _repairing(view: AttemptSnapshot, now: datetime) -> Action:
    """Return the next step of an attempt that replaces nodes of its gang. While there is no
    capacity, the other nodes wait, but not longer than it pays. A request is repeated until the
    provider has answered it, because repeated requests replace no node twice.
    """
    attempt, late = view.attempt, "the lost nodes could not be replaced in time"
    until = attempt.repair_until or attempt.created_at
    if isinstance(view.seen, GangSeen) and view.seen.state is GangState.ENDED:
        return _lost(view.seen, "the gang ended before its lost nodes were replaced")
    if view.sold_out and now >= until:
        return _ending(jobs.AttemptOutcome.CAPACITY, add_cause(late, view.sold_out))
    unclear = view.asked and view.seen is GangAbsence.UNKNOWN
    if unclear and now - attempt.created_at < LAUNCH_TIMEOUT:
        after = _soon(attempt.created_at, now)
        return RecheckAttempt(after=min(after, until - now) if view.sold_out else after)
    if view.asked and view.trouble and now >= until:
        return _ending(jobs.AttemptOutcome.TIMEOUT, add_cause(late, view.trouble))
    return LaunchGang()


def _booting(view: AttemptSnapshot, now: datetime) -> Action:
    action = _reported(view, now) or _unwanted(view, now) or _noticed(view, now)
    if action is None and all(node.running_at is not None for node in view.nodes):
        action = AdvanceAttempt(phase=jobs.AttemptPhase.RUNNING, reason="the work runs")
    action = action or _gone(view, now)
    if action is not None:
        return action
    if all(node.claim for node in view.nodes):
        return RecheckAttempt(after=_next_look(view, now))
    left = _boot_began(view, now) + BOOT_TIMEOUT - now
    if left <= _NONE:
        late = f"contacted the server within {_minutes(BOOT_TIMEOUT)}"
        text = f"no agent of {name_silent(view.nodes)} {late}"
        return _ending(jobs.AttemptOutcome.TIMEOUT, add_cause(text, find_cause(view)))
    return RecheckAttempt(after=min(left, _next_look(view, now)))


def _running(view: AttemptSnapshot, now: datetime) -> Action:
    return (
        _reported(view, now)
        or _unwanted(view, now)
        or _noticed(view, now)
        or _gone(view, now)
        or _stuck(view, now)
        or _slow(view, now)
        or _wait_on(view, now)
    )


def _wait_on(view: AttemptSnapshot, now: datetime) -> RecheckAttempt:
    """Let the work go on. Ranks of several nodes are compared by their figures at each poll."""
    silence = next_silence(view, now)
    holds = min(silence, *_list_events(view, now)) if len(view.nodes) == 1 else _NONE
    return RecheckAttempt(after=min(_next_look(view, now), silence), holds=holds)


def _slow(view: AttemptSnapshot, now: datetime) -> Action | None:
    """Return what to note about ranks that are slower than others. An event names each rank once,
    when it has been slow for a while, even if the set of the other slow ranks keeps changing.
    """
    nodes = [node for node in view.nodes if node.phase is jobs.NodePhase.RUNNING]
    ratios = dict(find_stragglers({node.rank: node.progress for node in nodes}))
    before = view.attempt.slow or jobs.SlowRanks(ranks=(), since=now)
    new = tuple(rank for rank in ratios if rank not in before.told)
    still = tuple(rank for rank in before.ranks if rank in new)
    if not still:
        if new == before.ranks:
            return None
        return NoteSlow(slow=replace(before, ranks=new, since=now))
    if now - before.since >= _SLOW_FOR:
        text = describe_stragglers([(rank, ratios[rank]) for rank in still])
        left = tuple(rank for rank in new if rank not in still)
        told = (*before.told, *still)
        return NoteSlow(slow=jobs.SlowRanks(ranks=left, since=now, told=told), new=still, text=text)
    return None if still == before.ranks else NoteSlow(slow=replace(before, ranks=still))


def _stuck(view: AttemptSnapshot, now: datetime) -> Action | None:
    """Return the next step of work that makes no progress, or None if it makes progress: first ask
    where its ranks are, then end it, then wait for its end."""
    grace, stuck = view.job.task.grace, view.attempt.stuck
    if stuck is not None:
        left = stuck.at + grace + MARGIN - now
        if left > _NONE:
            return RecheckAttempt(after=left)
        return _ending(
            jobs.AttemptOutcome.NODE, stuck.reason, jobs.FailureKind.STUCK, rank=stuck.node
        )
    match find_stuck(view, now):
        case TakeStacks() as found:
            return OrderRanks(
                ranks=found.ranks,
                kind=STACKS,
                seconds=STACKS_WAIT.total_seconds(),
                reason=found.reason,
            )
        case AwaitStacks() as found:
            return RecheckAttempt(after=found.after)
        case jobs.SilentWork() as found:
            return NoteSilent(work=found)
        case jobs.StuckWork() as found:
            left_ranks = [x.rank for x in view.nodes if x.phase is not jobs.NodePhase.EXITED]
            return EndStuck(work=found, ranks=tuple(left_ranks), grace=grace)
        case None:
            return None


def _ending_phase(view: AttemptSnapshot, now: datetime) -> Action:
    attempt, seen = view.attempt, view.seen
    age = now - attempt.since
    closed = AdvanceAttempt(phase=jobs.AttemptPhase.ENDED, reason=attempt.reason)
    if isinstance(seen, GangSeen) and seen.state is GangState.ENDED:
        if seen.cancelled and attempt.outcome is jobs.AttemptOutcome.PREEMPTED:
            closed = replace(_lost(seen, say_ended(view.nodes)), phase=jobs.AttemptPhase.ENDED)
        told = all(node.ended_at for node in seen.nodes if node.started_at)
        return (
            closed
            if told or age >= END_TIMES_TIMEOUT
            else RecheckAttempt(after=_soon(attempt.since, now))
        )
    if seen is GangAbsence.ABSENT and is_surely_absent(view):
        return closed
    if seen is GangAbsence.ABSENT and _counts(view, now):
        return RemoveGang(missed=True)
    if view.removed_at is None or now - view.removed_at >= REMOVE_AGAIN:
        return RemoveGang()
    return RecheckAttempt(after=_soon(attempt.since, now))


def _kept(view: AttemptSnapshot, now: datetime) -> Action:
    """Return the next step of a warm gang. The queue reconciler decides whether a job takes the
    gang over.
    """
    attempt = view.attempt
    until = attempt.kept_until or now
    action = _gone(view, now)
    if isinstance(view.seen, GangSeen) and any(node.ended_at for node in view.seen.nodes):
        action = _lost(view.seen, say_ended(view.nodes))
    if isinstance(action, AdvanceAttempt):
        return AdvanceAttempt(
            phase=jobs.AttemptPhase.ENDING, reason=f"lost while it was warm: {action.reason}"
        )
    pool = view.pool
    over = now >= until or (pool is not None and now >= pool.until)
    if view.job.released or view.unpaid or over:
        reason = "released by the user" if view.job.released else view.unpaid
        if pool is not None and now >= pool.until:
            reason = reason or pool.reason
        reason = reason or "no job used the gang in time"
        return AdvanceAttempt(phase=jobs.AttemptPhase.ENDING, reason=reason)
    if any(now - heard(view, node) >= HEARD_LATELY for node in view.nodes):
        return AdvanceAttempt(
            phase=jobs.AttemptPhase.ENDING,
            reason="an agent of the warm gang is not waiting for work",
        )
    if pool is not None and action is None:
        if cap_of(view.job) is None and _is_renewed(until, pool.until, now):
            return KeepGang(until=pool.until)
        # In time for another decision of the pool, before the gang goes.
        until = now + max((until - now) / 2, _RENEWED)
    seen = view.seen.nodes if isinstance(view.seen, GangSeen) else ()
    billed = len(seen) == attempt.nodes and all(
        node.started_at for node in seen
    )  # a job cannot take over a gang before its billing has begun
    return action or RecheckAttempt(
        after=min(until - now, _next_look(view, now) if billed else _soon(attempt.since, now))
    )


def _is_renewed(until: datetime, wanted: datetime, now: datetime) -> bool:
    """Return whether to store a new time until which a pool keeps an idle gang. A later time is
    stored only when half of the former one is over, so that few changes are stored."""
    return wanted < until or wanted - until > max(_RENEWED, (wanted - now) / 2)


def _ended(view: AttemptSnapshot, now: datetime) -> Action:
    return RecheckAttempt(after=timedelta.max)


DECIDE: dict[jobs.AttemptPhase, Callable[[AttemptSnapshot, datetime], Action]] = {
    jobs.AttemptPhase.LAUNCHING: _launching,
    jobs.AttemptPhase.BOOTING: _booting,
    jobs.AttemptPhase.RUNNING: _running,
    jobs.AttemptPhase.KEPT: _kept,
    jobs.AttemptPhase.ENDING: _ending_phase,
    jobs.AttemptPhase.ENDED: _ended,
}


def _reported(view: AttemptSnapshot, now: datetime) -> Action | None:
    """Return the step that follows from the agents' reports, lost nodes and silent agents, or None
    if the work continues. If one rank fails, the whole gang fails with that rank's exit code.
    """
    lost = _losses(view, now)
    exited = [node for node in view.nodes if node.phase is jobs.NodePhase.EXITED] + lost
    complete = is_complete(view.nodes)
    failures = [node for node in exited if not _succeeded(node, complete)]
    if not failures:
        if len(exited) < len(view.nodes):
            return None
        return _ending(jobs.AttemptOutcome.SUCCEEDED, "the work succeeded", exit_code=0)
    first = _first_cause(view, failures, lost, now)
    waiting = _let_others_save(view, first, [node.rank for node in exited], now)
    if waiting is not None:
        # While a job is being stopped, its grace period applies, not the time of a provider's
        # notice, which may be days.
        return waiting if _wanted(view) else None
    if view.attempt.stuck is not None:
        # the failures follow from the order to stop, or from lost connections to stopped ranks
        stuck = view.attempt.stuck
        return _ending(
            jobs.AttemptOutcome.NODE,
            stuck.reason,
            jobs.FailureKind.STUCK,
            exit_code=first.exit_code,
            rank=stuck.node,
        )
    if awaits_look(view, now):
        return RecheckAttempt(after=_LOST_LOOK, looks=True)
    outcome = _outcome_of(view, first, lost)
    # A limit of the job ends all nodes; the idle limit is reached if one of them is idle.
    alone = len(view.nodes) > 1 and (
        outcome in (jobs.AttemptOutcome.EXIT, jobs.AttemptOutcome.SETUP, jobs.AttemptOutcome.NODE)
        or outcome is first.exit_outcome is jobs.AttemptOutcome.LIMIT
    )
    where = f" on rank {first.rank}" if alone and first not in lost else ""
    early = "; the work ended with exit code 0, but did not report that it is complete"
    reason = f"{first.exit_reason or outcome}{where}{early if first.exit_code == 0 else ''}"
    stated = outcome in (jobs.AttemptOutcome.NODE, jobs.AttemptOutcome.EXIT)
    failure = first.exit_failure if stated and outcome is first.exit_outcome else None
    gone = [node.rank for node in lost]
    repair = find_repair(view, outcome, reason, failure, first.rank, gone)
    return repair or _ending(outcome, reason, failure, exit_code=first.exit_code, rank=first.rank)


def _outcome_of(
    view: AttemptSnapshot, first: jobs.Node, lost: Sequence[jobs.Node]
) -> jobs.AttemptOutcome:
    """Return the outcome of a gang in which the rank `first` failed first."""
    outcome = first.exit_outcome or jobs.AttemptOutcome.NODE
    if not _wanted(view) and (outcome is jobs.AttemptOutcome.STOPPED or first in lost):
        return _stop_outcome(view.job)
    return jobs.AttemptOutcome.NODE if outcome is jobs.AttemptOutcome.STOPPED else outcome


def _losses(view: AttemptSnapshot, now: datetime) -> list[jobs.Node]:
    """Return the ranks whose node no longer exists, or whose agent has been silent for longer than
    its lease. The returned rows mark these ranks as exited. If the whole gang has ended, the list
    is empty.
    """
    seen, lost = view.seen, []
    gone = seen.nodes if isinstance(seen, GangSeen) and seen.state is not GangState.ENDED else ()
    ends = {node.rank: node.ended_at for node in gone if node.ended_at}
    for node in view.nodes:
        if node.phase is jobs.NodePhase.EXITED or node.rank in view.collecting:
            continue
        if isinstance(seen, GangSeen) and node.rank in ends:
            end = _lost(seen, say_lost(node), node.rank)
            at = ends[node.rank]
        elif node.claim and now >= lease_end(view, node):
            reason = f"the agent of rank {node.rank} was silent for longer than its lease"
            end = _ending(jobs.AttemptOutcome.NODE, reason, jobs.FailureKind.NETWORK)
            at = lease_end(view, node)
        else:
            continue
        lost.append(
            replace(
                node,
                exit_outcome=end.outcome,
                exit_reason=end.reason,
                exit_failure=end.failure,
                exited_at=at,
            )
        )
    return lost


def _first_cause(
    view: AttemptSnapshot,
    failures: Sequence[jobs.Node],
    lost: Sequence[jobs.Node],
    now: datetime,
) -> jobs.Node:
    """Return the failure that caused the gang to end. Ranks that stopped because the control plane
    told them to are not considered. If the user or a limit stopped the job, failures after the stop
    are not considered either. A rank that has only lost its connection to another rank is
    considered if there is no other failure.

    A provider may report the end of a `lost` node late. Ranks whose work failed after its agent was
    last heard have lost their connection to it.
    """
    stopped = [node for node in failures if node.exit_outcome is jobs.AttemptOutcome.STOPPED]
    causes = [node for node in failures if node.exit_outcome is not jobs.AttemptOutcome.STOPPED]
    causes = [node for node in causes if not _is_cut_off(node)] or causes
    if stopped and not _wanted(view):
        causes = [node for node in causes if (node.exited_at or now) < view.job.since]
    if lost and keeps_rest(view):
        silent = min(heard(view, node) for node in lost)
        exits = [node for node in causes if node not in lost and (node.exited_at or now) < silent]
        causes = exits or [node for node in causes if node in lost] or causes
    return min(causes or stopped, key=lambda node: (node.exited_at or now, node.rank))


def _is_cut_off(node: jobs.Node) -> bool:
    """Return whether the rank's work ended because it lost its connection to another rank."""
    cut = node.exit_failure is jobs.FailureKind.NETWORK
    return cut and node.exit_outcome is jobs.AttemptOutcome.EXIT


def is_complete(nodes: Sequence[jobs.Node]) -> bool:
    """Return whether the work is complete: at least one rank reports progress, and every rank that
    reports progress reports complete work.

    A rank reports complete work by the value `complete` or, if `complete` is missing, by a
    `fraction` of 1. `done` and `total` are ignored, because they may refer to one epoch instead of
    the whole job.
    """
    told = [found for node in nodes if (found := _completion(node.progress)) is not None]
    return bool(told) and all(told)


def _completion(progress: Mapping[str, float | str]) -> bool | None:
    told = progress.get("complete", progress.get("fraction"))
    return None if told is None else isinstance(told, (int, float)) and told >= 1


def _succeeded(node: jobs.Node, complete: bool) -> bool:
    """Return whether the rank succeeded. A rank that was ordered to end and exited with code 0 has
    succeeded only if the work is complete.
    """
    told = node.exit_code == 0 and node.exit_outcome in _TOLD
    return node.exit_outcome is jobs.AttemptOutcome.SUCCEEDED or (told and complete)


def _let_others_save(
    view: AttemptSnapshot, first: jobs.Node, over: Sequence[int], now: datetime
) -> Action | None:
    """After the first failure of a rank, tell the other ranks to stop within their grace period.

    During the grace period, the ranks can save their state. All ranks end before the next attempt
    starts.
    """
    if not all(node.claim for node in view.nodes):
        return None  # no rank has received its work
    left = [node for node in view.nodes if node.rank not in over]
    working = _drop_collecting(view, left)
    if left and not working:
        # the results of these ranks may contain an earlier failure
        return RecheckAttempt(after=POLL)
    deadline = taken_at(view.attempt, view.nodes)
    waits_until = (first.exited_at or now) + LONGEST_WAIT
    apart = deadline is not None and keeps_rest(view) and _follows_order(first)
    apart = apart and now < waits_until  # a notice may be days, and the other nodes are billed
    taken = deadline is not None and first.exit_outcome is jobs.AttemptOutcome.PREEMPTED
    taken = taken and not keeps_rest(view)
    kinds = ("stop", "notice") if taken else ("stop",)
    # a node that is reclaimed has its time, although the others have ended first
    going = [node for node in working if not (apart and node.notice_until and node.order)]
    untold = tuple(node.rank for node in going if not _is_told(node, kinds))
    grace = view.job.task.grace
    if untold:
        seconds = max(grace, deadline - now) if taken and deadline else grace
        return OrderRanks(
            ranks=untold,
            kind=kinds[-1],
            seconds=seconds.total_seconds(),
            reason=f"rank {first.rank} " + ("is being reclaimed" if taken else "failed"),
        )
    until = max([first.exited_at or now, *_told_at(left)]) + grace + MARGIN
    if (taken or apart) and deadline:
        until = max(until, min(deadline, waits_until) if apart else deadline)
    if keeps_rest(view):  # their agents may not have reached a server that has just started
        until = max(until, view.listening_since + grace + MARGIN)
    if not left or now >= until:
        return None
    if keeps_rest(view):  # a rank that stays silent may have been on a node that was lost
        return RecheckAttempt(after=min(_LOST_LOOK, until - now), looks=True)
    return RecheckAttempt(after=until - now)


def _follows_order(first: jobs.Node) -> bool:
    """Return whether the first rank that ended did so because of a notice, or after an order to
    stop, or because another rank had left: a program that is told in time may close its connections
    before it has saved all.
    """
    if first.exit_outcome in (jobs.AttemptOutcome.PREEMPTED, jobs.AttemptOutcome.STOPPED):
        return True
    if _is_cut_off(first):
        return True
    at = first.order.at if first.order is not None and _is_told(first, ("stop",)) else None
    return at is not None and first.exited_at is not None and first.exited_at >= at


def _drop_collecting(view: AttemptSnapshot, nodes: Sequence[jobs.Node]) -> list[jobs.Node]:
    """Leave out the nodes whose results are being read from a bucket. Results are read from a
    bucket only for ended nodes, which accept no orders and are not billed.
    """
    return [node for node in nodes if node.rank not in view.collecting]


def _is_told(node: jobs.Node, kinds: Sequence[str]) -> bool:
    return node.order is not None and node.order.kind in kinds


def _told_at(nodes: Sequence[jobs.Node]) -> list[datetime]:
    """Return, for each of these ranks, the time at which its order was sent."""
    return [node.order.at for node in nodes if node.order is not None and node.order.at is not None]


def _unwanted(view: AttemptSnapshot, now: datetime) -> Action | None:
    """Return the next step while the user or a limit stops the job: first order the agents to end,
    then remove the gang after the grace period.
    """
    job = view.job
    if _wanted(view):
        return None
    reason = job.stop_reason or "the attempt is no longer needed"
    left = [node for node in view.nodes if node.claim and node.phase is not jobs.NodePhase.EXITED]
    working = _drop_collecting(view, left)
    if not left or job.phase is not jobs.JobPhase.STOPPING:
        return _ending(_stop_outcome(job), reason)
    grace, until = job.task.grace, job.since + job.task.grace + MARGIN
    if job.stop_cause is jobs.StopCause.BUDGET and view.pays is not None:
        grace = min(grace, max(timedelta(0), view.pays - MARGIN))
        until = min(until, now + view.pays)
    if now >= until:
        late = "the work did not end within its grace period, so its nodes were removed"
        unread = "the results in the bucket could not be read within the grace period"
        return _ending(_stop_outcome(job), f"{reason}; {late if working else unread}")
    untold = tuple(node.rank for node in working if not _is_told(node, ("stop",)))
    if untold:
        return OrderRanks(ranks=untold, kind="stop", seconds=grace.total_seconds(), reason=reason)
    return RecheckAttempt(after=until - now)


def _noticed(view: AttemptSnapshot, now: datetime) -> Action | None:
    """Return the next step after a preemption was announced: first notify every rank, then remove
    the gang at the announced time.
    """
    until = taken_at(view.attempt, view.nodes)
    if until is None:
        return None
    drill = until == view.attempt.drill_until
    reason = _ours(view) if drill else "the provider reclaims the node"
    left = [node for node in view.nodes if node.claim and node.phase is not jobs.NodePhase.EXITED]
    if left and not _drop_collecting(view, left):
        return None  # the nodes have ended already
    left = _drop_collecting(view, left)
    others = [] if drill else [node for node in left if node.notice_until is None]
    grace = view.job.task.grace
    if not drill and keeps_rest(view):
        return _leave_apart(view, left, now)
    until = max([until, *(at + grace + MARGIN for at in _told_at(others))])
    if now >= until:
        return _ending(jobs.AttemptOutcome.PREEMPTED, reason)
    untold = [node for node in left if node.order is None]
    if untold:
        rest = until - now
        return OrderRanks(
            ranks=tuple(node.rank for node in untold),
            kind="notice",
            seconds=(rest if drill else max(rest, grace)).total_seconds(),
            reason=reason,
        )
    return None


def _leave_apart(view: AttemptSnapshot, left: Sequence[jobs.Node], now: datetime) -> Action | None:
    """Tell the ranks whose nodes are reclaimed how long they have, and stop the others. These save
    their state at the same time, and then wait for the new nodes.
    """
    leaving = [node for node in left if node.notice_until is not None]
    untold = tuple(node.rank for node in leaving if node.order is None)
    names = ", ".join(str(x.rank) for x in view.nodes if x.notice_until is not None)
    reason = f"the node of rank {names} is reclaimed"
    if untold:
        until = min(node.notice_until or now for node in leaving)
        seconds = max(_NONE, until - now).total_seconds()
        return OrderRanks(ranks=untold, kind="notice", seconds=seconds, reason=reason)
    going = [node for node in left if node.notice_until is None]
    untold = tuple(node.rank for node in going if not _is_told(node, ("stop",)))
    if not untold:
        return None
    seconds = view.job.task.grace.total_seconds()
    return OrderRanks(ranks=untold, kind="stop", seconds=seconds, reason=reason)


def _ours(view: AttemptSnapshot) -> str:
    """Return the reason shown when the control plane itself removes a gang."""
    if not view.attempt.moved:
        return "a fire drill reclaims the node"
    if project := view.attempt.reclaimed_for:
        return f"project {project} gets its quota back"
    return view.attempt.moved_because or (
        "the job waits for spot capacity"
        if gives_back(view.job)
        else "the work moves to another gang"
    )


def _gone(view: AttemptSnapshot, now: datetime) -> Action | None:
    """Return the step that follows from the provider's report about the gang, or None if the report
    requires no step. A gang that the provider does not report counts as lost after a delay.
    """
    seen, attempt = view.seen, view.attempt
    if isinstance(seen, GangSeen):
        if seen.state is GangState.ENDED:
            return None if view.collecting else _lost(seen, say_ended(view.nodes))
        return ClearMisses() if attempt.missed_looks else None
    if seen is GangAbsence.UNKNOWN:
        return None
    if is_surely_absent(view) and _claimed(view) and not is_heard_lately(view, now):
        if view.collecting:
            return None
        reason = "the provider no longer knows the gang, and its agents do not report"
        return _ending(jobs.AttemptOutcome.NODE, reason, jobs.FailureKind.NETWORK)
    return CountMiss() if _counts(view, now) else None


def _lost(seen: GangSeen, what: str, rank: int | None = None) -> AdvanceAttempt:
    """Return the end of a gang, or of one of its ranks, that the provider reports as ended. `what`
    says what happened if the provider reports no special cause.
    """
    if seen.cancelled:
        return _ending(jobs.AttemptOutcome.STOPPED, seen.reason or "a person cancelled the gang")
    if seen.no_capacity:
        return _ending(
            jobs.AttemptOutcome.CAPACITY,
            seen.reason or "the provider found no capacity after the launch",
            rank=rank,
        )
    if seen.preempted:
        return _ending(
            jobs.AttemptOutcome.PREEMPTED,
            seen.reason or "the provider reclaimed the gang",
            rank=rank,
        )
    return _ending(jobs.AttemptOutcome.NODE, add_cause(what, seen.reason), rank=rank)


def end_lost(repair: RepairGang) -> AdvanceAttempt:
    """Return the end of a gang that has lost a node and is not repaired."""
    return _ending(repair.outcome, repair.reason, repair.failure, rank=repair.rank)


def _ending(
    outcome: jobs.AttemptOutcome,
    reason: str,
    failure: jobs.FailureKind | None = None,
    *,
    exit_code: int | None = None,
    rank: int | None = None,
) -> AdvanceAttempt:
    return AdvanceAttempt(
        phase=jobs.AttemptPhase.ENDING,
        reason=reason,
        outcome=outcome,
        failure=failure,
        exit_code=exit_code,
        rank=rank,
    )


def _wanted(view: AttemptSnapshot) -> bool:
    job = view.job
    mine = view.attempt.number == job.attempt or view.attempt.number in job.standbys
    return job.stop_reason is None and job.phase not in jobs.JOB_ENDS and mine


def _stop_outcome(job: jobs.JobRecord) -> jobs.AttemptOutcome:
    return job.stop_outcome or jobs.AttemptOutcome.STOPPED


def _claimed(view: AttemptSnapshot) -> bool:
    return any(node.claim for node in view.nodes)


def _counts(view: AttemptSnapshot, now: datetime) -> bool:
    """Return whether to count a poll that did not find the gang. The first missed poll always
    counts, and the second missed poll counts only after the visibility delay.
    """
    since = view.attempt.missed_since
    return since is None or (view.attempt.missed_looks < 2 and now - since >= view.visibility_delay)


def _boot_began(view: AttemptSnapshot, now: datetime) -> datetime:
    """Return when the gang began to boot. The result is `now` if the gang is still in the
    provider's queue."""
    began = view.attempt.launched_at or view.attempt.created_at
    if isinstance(view.seen, GangSeen):
        if view.seen.state is GangState.QUEUED:
            return now
        return max([began, *(node.started_at for node in view.seen.nodes if node.started_at)])
    return began


def _next_look(view: AttemptSnapshot, now: datetime) -> timedelta:
    """Return the time until the next poll, or until the next known event if that event is
    earlier."""
    poll = STEADY_POLL if view.attempt.phase is jobs.AttemptPhase.RUNNING else POLL
    return min(poll, *_list_events(view, now))


def _list_events(view: AttemptSnapshot, now: datetime) -> list[timedelta]:
    """Return the times until something is expected that no poll and no report tells."""
    times = [timedelta.max]
    deadline = taken_at(view.attempt, view.nodes)
    if deadline is not None and deadline > now:
        times.append(deadline - now)
    if view.seen is GangAbsence.ABSENT:
        times.append(max(view.visibility_delay / 8, timedelta(milliseconds=100)))
    if view.pays is not None:
        times.append(watch_price(view.pays))
    return times


def watch_price(pays: timedelta) -> timedelta:
    """Return the interval at which to poll the price. `pays` is how long the remaining budget lasts
    at the current price. One polling interval costs at most half of the remaining budget, even if
    the price rises by the factor PRICE_RISE.
    """
    return max(timedelta(seconds=1), pays / (2 * PRICE_RISE))


def _soon(since: datetime, now: datetime) -> timedelta:
    """Return a polling interval that grows with the waiting time: a quarter of the time since
    `since`, but at least 0.1 s and at most POLL.
    """
    return min(POLL, max(timedelta(milliseconds=100), (now - since) / 4))


def _minutes(length: timedelta) -> str:
    return f"{length // timedelta(minutes=1)} minutes"
