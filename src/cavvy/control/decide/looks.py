"""Decides when to poll a gang again, and which events users see after a poll."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.control.decide.attempt import POLL, STEADY_POLL, watch_price
from cavvy.control.decide.attempt_snapshot import GangAbsence, Seen, name_silent, shorten
from cavvy.control.decide.rows import JobRows, RowChanges, make_event
from cavvy.domain import jobs
from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.values import Struct, field, replace

_SHORTEST = timedelta(milliseconds=100)
# Delay of the first poll after a launch was accepted. Short work has ended by then and needs no
# poll.
FIRST_LOOK = timedelta(seconds=3)
# A removal that fails this many times in a row needs a person; requests are some seconds apart.
_MOST_FAILED_REMOVALS = 10
# Users are told of a provider that does not answer, or of nodes or agents that do not start, after
# this time. Many recover or start sooner.
_PATIENCE = timedelta(minutes=1)


class GangLook(Struct, frozen=True, kw_only=True):
    """The facts about one gang that exist only in this process, not in the store. After a restart,
    one poll of the gang is enough to obtain the facts again.
    """

    seen: Seen = GangAbsence.UNKNOWN
    trouble: str = ""  # the error of the last launch or poll; "" if the provider answered
    looked_at: datetime | None = None
    requested: bool = False  # whether this server or an earlier one may have requested the launch
    doubt: bool = False  # whether an earlier server may have requested the launch
    unsure: bool = False  # whether a launch request was never answered
    sold_out: str = ""  # why the last request to replace nodes met no capacity
    denied: bool = False  # whether the last launch request was refused
    fresh: bool = False  # whether the last poll was made after the last request
    told: GangSeen | None = None  # the result of the last poll that found the gang
    told_at: datetime | None = None
    # rank -> when its node was last seen alive
    alive_at: Mapping[int, datetime] = field(default_factory=dict)
    removed_at: datetime | None = None  # when the gang's removal was last requested
    failed_removals: int = 0  # since the last request for the removal that succeeded
    pays: timedelta | None = None  # how long the rest of the budget lasts at the current price
    accrued_at: datetime | None = None  # the time until which charges are complete
    charged_at: datetime | None = None  # the last poll whose charges were computed


def first_look(attempt: jobs.Attempt, started_at: datetime) -> GangLook:
    """Return the GangLook that is used before the gang's first poll. `doubt` is set if an earlier
    server may have requested the launch."""
    doubt = attempt.created_at < started_at
    return GangLook(requested=doubt, doubt=doubt, unsure=doubt)


def after_look(look: GangLook, seen: Seen, at: datetime, trouble: str = "") -> GangLook:
    """Return the GangLook after a poll that was started at the time `at`. `trouble` is the error if
    the provider did not answer. The error of a launch remains until a poll finds the gang.
    """
    trouble = shorten(trouble) or (look.trouble if seen is GangAbsence.ABSENT else "")
    look = replace(look, seen=seen, looked_at=at, fresh=True, trouble=trouble)
    if not isinstance(seen, GangSeen):
        return look
    alive = dict(look.alive_at)
    for node in seen.nodes:
        if node.started_at and not node.ended_at and seen.state is not GangState.ENDED:
            seen_at = node.seen_at or at
            alive[node.rank] = max(alive.get(node.rank, seen_at), seen_at)
    return replace(look, told=seen, told_at=at, alive_at=alive)


def after_move(look: GangLook, phase: jobs.AttemptPhase) -> GangLook:
    """Return `look` as it must be when the gang's attempt has just entered the phase `phase`. If
    `phase` is ENDING, the GangLook no longer contains earlier requests to remove the gang, so that
    the server requests the removal again.
    """
    if phase is jobs.AttemptPhase.KEPT:
        return replace(look, removed_at=None, looked_at=None, accrued_at=None, charged_at=None)
    return replace(look, removed_at=None) if phase is jobs.AttemptPhase.ENDING else look


def is_look_due(
    attempt: jobs.Attempt, look: GangLook, visibility_delay: timedelta, now: datetime
) -> bool:
    """Return whether to poll the gang before the next decision."""
    if attempt.phase is jobs.AttemptPhase.LAUNCHING and not look.doubt:
        return False
    if attempt.phase is jobs.AttemptPhase.ENDING:
        if look.removed_at is None:
            return False
        if not look.fresh:
            return True
    age = None if look.looked_at is None else now - look.looked_at
    return age is None or age >= look_interval(attempt, look, visibility_delay, now)


def look_interval(
    attempt: jobs.Attempt, look: GangLook, visibility_delay: timedelta, now: datetime
) -> timedelta:
    """Return the interval between two polls of the gang."""
    unbilled = attempt.phase is jobs.AttemptPhase.KEPT and look.accrued_at is None
    if attempt.phase in (jobs.AttemptPhase.ENDING, jobs.AttemptPhase.LAUNCHING) or unbilled:
        return min(POLL, max(_SHORTEST, (now - attempt.since) / 4))
    if look.seen is GangAbsence.ABSENT:
        return max(_SHORTEST, visibility_delay / 8)
    interval = STEADY_POLL if attempt.phase is jobs.AttemptPhase.RUNNING else POLL
    return interval if look.pays is None else min(interval, watch_price(look.pays))


def find_wait(
    attempt: jobs.Attempt, nodes: Sequence[jobs.Node], look: GangLook, now: datetime
) -> jobs.AttemptWait | None:
    """Return the reason why the gang of a starting attempt has not started yet, or None if nothing
    delays the gang.
    """
    seen = look.seen
    if attempt.phase is jobs.AttemptPhase.LAUNCHING:
        return _starting(look.trouble)
    if not isinstance(seen, GangSeen):
        since = look.told_at or attempt.launched_at or attempt.created_at
        unknown = seen is GangAbsence.UNKNOWN and look.trouble
        if not unknown or now - since < _PATIENCE:
            return attempt.wait
        kind = attempt.wait.kind if attempt.wait is not None else jobs.WaitKind.STARTING
        said = f"the gang's state is unknown: {look.trouble}"
        return jobs.AttemptWait(kind=kind, said=said, unknown=True)
    if seen.state is GangState.ENDED:  # the attempt's end gives the reason
        return attempt.wait
    if seen.state is GangState.QUEUED:
        return jobs.AttemptWait(kind=jobs.WaitKind.QUEUED, said=seen.reason)
    late = seen.reason or _say_late(attempt, nodes, seen, now)
    return _starting(late) or _starting(_say_prepares(nodes, now), prepares=True)


def _starting(said: str, *, prepares: bool = False) -> jobs.AttemptWait | None:
    return (
        jobs.AttemptWait(kind=jobs.WaitKind.STARTING, said=said, prepares=prepares)
        if said
        else None
    )


def _say_late(
    attempt: jobs.Attempt, nodes: Sequence[jobs.Node], seen: GangSeen, now: datetime
) -> str:
    """Return which agents are missing, or "" if no agent is missing or the gang is still young."""
    silent = name_silent(nodes)
    known = [attempt.launched_at, *(node.started_at for node in seen.nodes)]
    since = max((at for at in known if at is not None), default=attempt.created_at)
    if not silent or now - since < _PATIENCE:
        return ""
    if seen.state is GangState.STARTING:
        return "the provider has not started all nodes yet, and states no reason"
    return f"the nodes run, but no agent of {silent} has contacted the server yet"


def _say_prepares(nodes: Sequence[jobs.Node], now: datetime) -> str:
    """Return which ranks have been preparing their work for a while, or ""."""
    late = [
        node
        for node in nodes
        if node.phase in (jobs.NodePhase.CLAIMED, jobs.NodePhase.SETUP)
        and node.claimed_at is not None
        and now - node.claimed_at >= _PATIENCE
    ]
    if not late:
        return ""
    ranks = ", ".join(str(node.rank) for node in late)
    if any(node.phase is jobs.NodePhase.SETUP for node in late):
        return f"the setup has not ended yet on rank {ranks}"
    return f"the work is being prepared (its files, inputs or image) on rank {ranks}"


def note_wait(rows: JobRows, attempt: jobs.Attempt, look: GangLook, now: datetime) -> RowChanges:
    """Record why a gang waits, or that nothing delays it any more. A new reason is also recorded as
    an event, but a new expected start, another error of a provider that does not answer, and steps
    of the preparation, which have their own events, are not recorded as events.
    """
    if attempt.phase not in (jobs.AttemptPhase.LAUNCHING, jobs.AttemptPhase.BOOTING):
        return RowChanges()
    wait = find_wait(attempt, rows.nodes_of(attempt), look, now)
    eta = look.seen.eta if isinstance(look.seen, GangSeen) else attempt.expected_at
    expected = eta if wait is not None and eta is not None and eta > now else None
    if (wait, expected) == (attempt.wait, attempt.expected_at):
        return RowChanges()
    changed = replace(attempt, wait=wait, expected_at=expected, reason=_say(attempt, wait))
    text = changed.standing
    news = wait is not None and _is_news(attempt.wait, wait)
    return RowChanges(
        job=replace(rows.job, reason=text) if is_starting(rows.job, attempt) else None,
        attempts=(changed,),
        events=(make_event(rows.job, now, "waits", text, attempt.number),) if news else (),
    )


def _is_news(before: jobs.AttemptWait | None, wait: jobs.AttemptWait) -> bool:
    if wait == before or wait.prepares:
        return False
    return not (wait.unknown and before is not None and before.unknown)


def note_failed_removal(
    rows: JobRows, attempt: jobs.Attempt, look: GangLook, problem: str, now: datetime
) -> RowChanges:
    """Notify the user if the provider cannot remove a gang, which may still be billed. The
    attempt's row records the notification, so that the user is notified only once, even if the
    server restarts.
    """
    attempt = rows.attempts[attempt.number]
    if attempt.unremoved_at is not None or look.failed_removals < _MOST_FAILED_REMOVALS:
        return RowChanges()
    text = (
        f"{attempt.offer.provider} has not removed the gang {attempt.gang} after "
        f"{look.failed_removals} requests, so the gang may still be billed; the server keeps "
        f"trying: {problem}"
    )
    return RowChanges(
        attempts=(replace(attempt, unremoved_at=now),),
        events=(make_event(rows.job, now, "unremoved", text, attempt.number),),
    )


def is_starting(job: jobs.JobRecord, attempt: jobs.Attempt) -> bool:
    """Return whether the reason of the job is the reason of this attempt, which is starting."""
    return attempt.number == job.attempt and job.phase is jobs.JobPhase.STARTING


def _say(attempt: jobs.Attempt, wait: jobs.AttemptWait | None) -> str:
    if wait is None:
        return f"starts on {attempt.offer.key}"
    if wait.kind is jobs.WaitKind.QUEUED:
        return f"waits at {attempt.offer.provider}: {wait.said or 'in its queue'}"
    return f"starts at {attempt.offer.provider}: {wait.said}"
