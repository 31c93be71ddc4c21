"""Decides when a job gets a standby gang. This is a second gang, which starts before the job's own
gang has ended, or because the job's own gang does not start.

A standby gang starts while the job's own gang exists. The standby gang takes over the job when the
job's own gang can do no more work. Agents of a standby gang can claim their ranks, but receive no
work before the takeover. One database transaction performs the takeover: it moves the job to the
standby gang, and rejects each claim of a rank that an agent of the old gang sends at the same time.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.control.decide.bills import budget_left
from cavvy.control.decide.failures import cooldown_after, failure_of
from cavvy.control.decide.job import TakeOver, cap_of, gives_back
from cavvy.control.decide.losses import loses_part
from cavvy.control.decide.placement import is_steered, make_attempt, record_plan
from cavvy.control.decide.rows import (
    NEVER,
    SOON,
    JobRows,
    RowChanges,
    Step,
    make_event,
    taken_at,
)
from cavvy.control.decide.transitions import count_retry, drop_past
from cavvy.domain import jobs
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import Struct, replace
from cavvy.planner.deadline.recommendation import Recommendation
from cavvy.planner.spot.view import RunMode

REVIEW = timedelta(seconds=60)  # time between two calls of the deadline advisor
# How long a gang that the job leaves has for its last checkpoint, unless the task's grace period is
# longer.
HANDOVER = timedelta(seconds=30)
# maximum time to wait for a checkpoint before the job leaves a gang
_LONGEST_WAIT = timedelta(minutes=10)
_RISKY = timedelta(minutes=30)  # how long a job avoids an offer after a warning about it
# How long a job that has moved after a warning must stay before it may move again. Doubles with
# each further move.
_CALM = timedelta(minutes=5)
_LONGEST_CALM = timedelta(hours=6)
_ADVISED = "advice"  # key in JobRecord.retries that counts moves after a warning
_START = timedelta(minutes=10)  # the budget must pay for both gangs for this long
_MOVED_ENOUGH = (
    "the provider warns that this gang may be reclaimed soon, but the job already moved after an "
    "earlier warning. The job can move again after"
)
NO_STANDBY = Step(after=NEVER)  # for jobs whose work a second gang could not take over

NameGang = Callable[[str], str]  # attempt ID -> the gang's name


class StandbyQuestion(StrEnum):
    """A query to the deadline advisor about a job's own gang."""

    SUCCESSOR = "successor"  # where to move from a gang that is being reclaimed
    AHEAD = "ahead"  # whether to leave a gang that may be reclaimed
    REVIEW = "review"  # whether the gang runs on the right offer


class AskAdvisor(Struct, frozen=True, kw_only=True):
    """Query the deadline advisor. The next step depends on the advisor's answer."""

    question: StandbyQuestion
    key: str  # job ID or attempt ID; the time of the question is stored under this key
    nodes: Sequence[jobs.Node] = ()  # the rows of the gang's nodes, for the advisor
    changes: RowChanges | None = None  # changes to write before the answer
    within: timedelta = NEVER  # after the answer, continue within this time


def decide_standby(
    rows: JobRows,
    reviews: Mapping[str, datetime],
    now: datetime,
    *,
    awaits_end: bool = False,
    replaces: bool = False,
) -> Step | AskAdvisor:
    """Return the next step that concerns standby gangs. The caller executes the standby step before
    the job's next step, which `decide_job` returns.

    `reviews` maps keys to the earliest time when the advisor is queried again. If `awaits_end` is
    set, no standby gang is started while the provider reclaims the job's own gang, because a person
    may have cancelled that gang. If `replaces` is set, the provider can replace single nodes, so a
    gang that loses only some of its nodes is repaired.
    """
    job, own = rows.job, rows.own
    if (changes := _drop_failed(rows, now)) is not None:
        return Step(changes=changes)
    active = (
        job.phase in (jobs.JobPhase.STARTING, jobs.JobPhase.RUNNING) and job.stop_reason is None
    )
    if not active or own is None:
        return NO_STANDBY
    if own.phase in jobs.GOING or own.offer.shared:
        return Step(after=NEVER)
    if rows.standbys:
        return _watch(rows, own, now)
    until = taken_at(own, rows.nodes_of(own))
    if gives_back(job) if own.drill_until is not None else awaits_end and until is not None:
        return Step(after=NEVER)
    if replaces and until is not None and loses_part(job, own, rows.nodes_of(own)):
        return Step(after=NEVER)  # the gang is repaired
    if until is not None and until > now and own.phase is jobs.AttemptPhase.RUNNING:
        return _follow(rows, own, reviews, now)
    if not _is_at_risk(rows, own):
        return _review(rows, own, reviews, rows.nodes_of(own), now)
    return _at_risk(rows, own, reviews, now)


def _at_risk(
    rows: JobRows, own: jobs.Attempt, reviews: Mapping[str, datetime], now: datetime
) -> Step | AskAdvisor:
    """Decide whether to query the advisor about moving the job from a gang at risk. A job that has
    recently moved to its gang does not move again until a waiting time has passed.
    """
    until, nodes = _calm_until(rows, own), rows.nodes_of(own)
    if until <= now:
        return _ask(StandbyQuestion.AHEAD, own.id, reviews, nodes, now)
    stays = _stay(rows, own, f"{_MOVED_ENOUGH} {until:%Y-%m-%d %H:%M:%S} UTC", until, now)
    calm = [replace(node, risk_at=None) for node in nodes]
    asked = _review(rows, own, reviews, calm, now)
    if isinstance(asked, AskAdvisor):
        return replace(asked, changes=stays, within=until - now)
    return replace(asked, changes=stays, after=min(asked.after or NEVER, until - now))


def answer_standby(
    rows: JobRows,
    asked: AskAdvisor,
    recommendation: Recommendation | None,
    name_gang: NameGang,
    now: datetime,
) -> Step:
    """Apply the advisor's answer, which is None if the deadline policy does not apply."""
    own = rows.own
    if recommendation is None or own is None:
        step = Step(after=REVIEW)
    elif asked.question is StandbyQuestion.REVIEW:
        step = _reviewed(rows, own, recommendation, name_gang, now)
    elif asked.question is StandbyQuestion.AHEAD:
        step = _leave_ahead(rows, own, recommendation, name_gang, now)
    else:
        why = "the previous gang is being reclaimed"
        step = _start_or_wait(rows, recommendation, why, name_gang, now)
    return step if step.after is None else replace(step, after=min(step.after, asked.within))


def list_started(step: Step, job: jobs.JobRecord) -> Sequence[jobs.Attempt]:
    """Return the gangs that the step starts beside those of the job."""
    made = () if step.changes is None else step.changes.attempts
    return [each for each in made if each.number > job.last_number]


def take_over(rows: JobRows, again: TakeOver, now: datetime) -> Step:
    """Assign the job to a standby gang when the job's own gang is lost and can do no more work."""
    own = rows.own
    if own is None or not _is_quiet(own, rows.nodes_of(own)):
        return Step(after=SOON)
    ready = [standby for standby in rows.standbys if _is_ready(rows, standby)]
    return Step(
        changes=_swap(rows, own, (ready or rows.standbys)[0], again.reason, now, again.kind)
    )


# Existing standby gangs


def _drop_failed(rows: JobRows, now: datetime) -> RowChanges | None:
    """Remove failed standby gangs from the job. Returns None if the job has no failed standby
    gangs.
    """
    job = rows.job
    mine = [rows.attempts[number] for number in job.standbys if number in rows.attempts]
    lost = [attempt for attempt in mine if attempt.phase in jobs.GOING]
    if not lost:
        return None
    avoid, events = drop_past(job.avoid, now), []
    for attempt in lost:
        failure, key = failure_of(attempt), attempt.offer.key
        rest = cooldown_after(failure, attempt, 0)
        if rest and attempt.outcome is not jobs.AttemptOutcome.STOPPED:
            avoid[key] = max(now + rest, avoid.get(key, now))
        text = f"attempt {attempt.number} failed to start ({failure.label}): {attempt.reason}"
        events.append(make_event(job, now, "standby", text, fact=failure))
    return RowChanges(
        job=replace(_without(job, lost), avoid=avoid),
        events=tuple(events),
    )


def _without(job: jobs.JobRecord, standbys: Sequence[jobs.Attempt]) -> jobs.JobRecord:
    gone = {standby.number for standby in standbys}
    return replace(job, standbys=tuple(number for number in job.standbys if number not in gone))


def _watch(rows: JobRows, own: jobs.Attempt, now: datetime) -> Step:
    """Let the standby gang take over the job when the standby gang is ready. If the job's own gang
    is still working, first order it to save a last checkpoint.
    """
    leaves = taken_at(own, rows.nodes_of(own)) is not None
    if not leaves and (late := _late_standbys(rows, own)):
        return Step(changes=_end_race(rows, own, late, now))
    ready = next((standby for standby in rows.standbys if _is_ready(rows, standby)), None)
    if ready is None:
        return Step(after=NEVER)
    if not _has_work(rows, own):
        why = f"the standby gang was ready before attempt {own.number}"
        return Step(changes=_swap(rows, own, ready, why, now))
    if leaves:
        return Step(after=NEVER)
    wait = _until_boundary(rows, own, ready, now)
    if wait > timedelta(0):
        return Step(after=wait)
    text = f"is replaced by attempt {ready.number} on {ready.offer.key}, which is ready"
    return Step(changes=_give_back(rows, own, "handover", text, now))


def _give_back(rows: JobRows, own: jobs.Attempt, kind: str, text: str, now: datetime) -> RowChanges:
    """Reclaim the job's own gang. The gang's agents get a notice that leaves enough time for a last
    checkpoint."""
    notice = max(HANDOVER, rows.job.task.grace)
    return RowChanges(
        attempts=(replace(own, drill_until=now + notice, moved=True),),
        events=(make_event(rows.job, now, kind, text, own.number),),
    )


def _late_standbys(rows: JobRows, own: jobs.Attempt) -> list[jobs.Attempt]:
    """Return the standby gangs that were started before the job's own gang began its work, and so
    are no longer needed.
    """
    began = own.running_at
    return [] if began is None else [each for each in rows.standbys if each.created_at < began]


def _end_race(
    rows: JobRows, own: jobs.Attempt, late: Sequence[jobs.Attempt], now: datetime
) -> RowChanges:
    texts = [
        f"attempt {standby.number} is released: attempt {own.number} was ready first"
        for standby in late
    ]
    return RowChanges(
        job=_without(rows.job, late),
        events=tuple(make_event(rows.job, now, "standby", text) for text in texts),
    )


def _swap(
    rows: JobRows,
    own: jobs.Attempt,
    standby: jobs.Attempt,
    why: str,
    now: datetime,
    kind: str | None = None,
) -> RowChanges:
    """Make the standby gang the job's own gang.

    If the old gang is still open, the rows of all its ranks are written, so that a concurrent claim
    fails.
    """
    job = rows.job
    text = f"attempt {standby.number} on {standby.offer.key} takes over: {why}"
    changed = replace(
        job,
        attempt=standby.number,
        standbys=tuple(number for number in job.standbys if number > standby.number),
        retries=count_retry(job, kind) if kind else job.retries,
        reason=text,
    )
    if job.phase is jobs.JobPhase.RUNNING:
        changed = replace(changed, phase=jobs.JobPhase.STARTING, since=now)
    return RowChanges(
        job=changed,
        nodes=() if own.phase in jobs.GOING else tuple(rows.nodes_of(own)),
        events=(make_event(changed, now, "takeover", text),),
    )


# Starting a standby gang


def _ask(
    question: StandbyQuestion,
    key: str,
    reviews: Mapping[str, datetime],
    nodes: Sequence[jobs.Node],
    now: datetime,
) -> Step | AskAdvisor:
    """Return the query to the advisor or, after a recent query, a step that waits."""
    at = reviews.get(key, now)
    if at > now:
        return Step(after=max(SOON, at - now))
    return AskAdvisor(question=question, key=key, nodes=nodes)


def _follow(
    rows: JobRows, own: jobs.Attempt, reviews: Mapping[str, datetime], now: datetime
) -> Step | AskAdvisor:
    """Request a successor gang if the provider will reclaim the job's gang soon. The successor gang
    starts while the job's gang shuts down.
    """
    if not _may_be_preempted(rows.job):
        return Step(after=NEVER)
    asked = _ask(StandbyQuestion.SUCCESSOR, own.id, reviews, (), now)
    return asked if isinstance(asked, AskAdvisor) else Step(after=REVIEW)


def _review(
    rows: JobRows,
    own: jobs.Attempt,
    reviews: Mapping[str, datetime],
    nodes: Sequence[jobs.Node],
    now: datetime,
) -> Step | AskAdvisor:
    """If the deadline policy applies to the job, query the advisor about whether the gang runs on
    the right offer.
    """
    if not is_steered(rows.job) or own.phase is jobs.AttemptPhase.LAUNCHING:
        return Step(after=NEVER)
    return _ask(StandbyQuestion.REVIEW, rows.job.id, reviews, nodes, now)


def _leave_ahead(
    rows: JobRows,
    own: jobs.Attempt,
    recommendation: Recommendation,
    name_gang: NameGang,
    now: datetime,
) -> Step:
    """Move the job from a gang at risk before the gang is reclaimed, if the move costs little."""
    job, key = rows.job, own.offer.key
    if recommendation.stay or not recommendation.offers:
        changes = _stay(rows, own, recommendation.reason, None, now)
        noted = record_plan(job, recommendation, own.offer, now) if is_steered(job) else job
        return Step(changes=replace(changes, job=noted), after=REVIEW)
    start = start_standby(rows, recommendation, recommendation.reason, name_gang, now)
    if start is None or start.job is None:
        return Step(after=REVIEW)
    avoid = {**job.avoid, key: max(now + _RISKY, job.avoid.get(key, now))}
    moved = replace(start.job, avoid=avoid, retries=count_retry(job, _ADVISED))
    return Step(changes=replace(start, job=moved))


def _stay(
    rows: JobRows, own: jobs.Attempt, why: str, until: datetime | None, now: datetime
) -> RowChanges:
    """Record the reason why a job stays on a gang at risk, and until when the job stays. Also
    record an event unless the attempt already records the same wait.
    """
    wait = jobs.AttemptWait(kind=jobs.WaitKind.AT_RISK, until=until)
    changed = replace(own, reason=why, wait=wait)
    text = f"stays on {own.offer.key}: {why}"
    return RowChanges(
        attempts=(changed,) if changed != own else (),
        events=(make_event(rows.job, now, "stays", text, own.number),) if wait != own.wait else (),
    )


def _reviewed(
    rows: JobRows,
    own: jobs.Attempt,
    recommendation: Recommendation,
    name_gang: NameGang,
    now: datetime,
) -> Step:
    if recommendation.mode is RunMode.IDLE and _leaves_to_wait(rows, own, now):
        text = f"gives {own.offer.key} back: {recommendation.reason}"
        changes = _give_back(rows, own, "waits", text, now)
        return Step(changes=replace(changes, job=record_plan(rows.job, recommendation, None, now)))
    if recommendation.offers and not recommendation.stay:
        return _start_or_wait(rows, recommendation, recommendation.reason, name_gang, now)
    again = recommendation.again_at or now + REVIEW
    after = min(REVIEW, max(SOON, again - now))
    noted = RowChanges(job=record_plan(rows.job, recommendation, own.offer, now))
    return Step(changes=noted, after=after, review_at=now + after)


def _leaves_to_wait(rows: JobRows, own: jobs.Attempt, now: datetime) -> bool:
    """Return whether the job can release its on-demand gang and wait for spot capacity. This
    requires that the job may move, and that the gang saved a checkpoint in the last REVIEW period.
    """
    saved, job = own.checkpoint_at, rows.job
    if own.phase is not jobs.AttemptPhase.RUNNING or own.offer.purchase is Purchase.SPOT:
        return False
    if not _may_move(job) or not _may_be_preempted(job):
        return False
    return saved is not None and now - saved <= REVIEW


def _start_or_wait(
    rows: JobRows, recommendation: Recommendation, why: str, name_gang: NameGang, now: datetime
) -> Step:
    changes = start_standby(rows, recommendation, why, name_gang, now)
    return Step(after=REVIEW) if changes is None else Step(changes=changes)


def start_standby(
    rows: JobRows, recommendation: Recommendation, why: str, name_gang: NameGang, now: datetime
) -> RowChanges | None:
    """Start a second gang on the best recommended offer that the job may use. Returns None if no
    offer is suitable.
    """
    job, own = rows.job, rows.own
    works = own is not None and own.phase is jobs.AttemptPhase.RUNNING
    offers = [each for each in recommendation.offers if _has_capacity(each, job)]
    fixed = works and own is not None and own.offer.purchase is not Purchase.SPOT
    if fixed and not _may_be_preempted(job):  # a preemption of the new gang could end the job
        offers = [each for each in offers if each.purchase is not Purchase.SPOT]
    if not offers or not _pays_two(rows, offers[0]) or (works and not _may_move(job)):
        return None
    offer = offers[0]
    attempt, nodes = make_attempt(
        job, offer, name_gang, now, "started in addition to the job's gang"
    )
    planned = record_plan(job, recommendation, offer, now) if is_steered(job) else job
    text = f"a second gang starts on {offer.key}: {why}"
    return RowChanges(
        job=replace(planned, standbys=(*job.standbys, attempt.number), numbered=attempt.number),
        attempts=(attempt,),
        nodes=tuple(nodes),
        events=(make_event(job, now, "standby", text, attempt.number),),
        stale_market=True,
    )


def _has_capacity(offer: Offer, job: jobs.JobRecord) -> bool:
    return not offer.shared and (offer.capacity is None or offer.capacity >= job.task.nodes)


def _pays_two(rows: JobRows, offer: Offer) -> bool:
    """Return whether the budget can pay for two gangs while the second gang starts."""
    if cap_of(rows.job) is None:
        return True
    both = offer.rate.times(rows.job.task.nodes).over(_START + offer.minimum_charge)
    left = None if rows.spent is None else budget_left(rows.job, rows.spent)
    return left is not None and left.micros > 2 * both.micros


def _may_be_preempted(job: jobs.JobRecord) -> bool:
    """Return whether the task allows the job one more preemption."""
    allowed = job.task.retry.preemption
    return allowed is None or job.retries.get("preemption", 0) < allowed


def _may_move(job: jobs.JobRecord) -> bool:
    """Return whether the job may leave a gang that is working. A move does not count as a
    preemption, but a job whose task allows no preemptions is never moved.
    """
    return job.task.retry.preemption != 0


def _is_at_risk(rows: JobRows, own: jobs.Attempt) -> bool:
    """Return whether the provider has warned that it may soon reclaim this spot gang."""
    works = own.phase is jobs.AttemptPhase.RUNNING and own.offer.purchase is Purchase.SPOT
    return works and any(node.risk_at for node in rows.nodes_of(own))


def _calm_until(rows: JobRows, own: jobs.Attempt) -> datetime:
    """Return the earliest time at which a warning may move the job to another gang again. The
    waiting time between moves doubles with each move. The waiting time begins at the start of the
    gang's work or at the launch of the newest standby gang, whichever is later.
    """
    job = rows.job
    last = rows.attempts.get(job.last_number, own)
    since = max(own.running_at or own.created_at, last.created_at)
    moves = job.retries.get(_ADVISED, 0)
    calm = min(_LONGEST_CALM, _CALM * (1 << min(moves - 1, 16))) if moves else timedelta(0)
    return since + calm


def _is_ready(rows: JobRows, attempt: jobs.Attempt) -> bool:
    nodes = rows.nodes_of(attempt)
    claimed = len(nodes) > 0 and all(node.claim for node in nodes)
    return claimed and attempt.phase is jobs.AttemptPhase.BOOTING


def _has_work(rows: JobRows, own: jobs.Attempt) -> bool:
    """Return whether every rank is claimed; if so, the gang's agents may have received the work."""
    return all(node.claim for node in rows.nodes_of(own))


def _is_quiet(own: jobs.Attempt, nodes: Sequence[jobs.Node]) -> bool:
    """Return whether no rank of this gang can do any more work."""
    if own.phase is jobs.AttemptPhase.ENDED:
        return True
    claimed = [node for node in nodes if node.claim]
    return all(node.phase is jobs.NodePhase.EXITED for node in claimed) or len(claimed) < len(nodes)


def _until_boundary(
    rows: JobRows, own: jobs.Attempt, ready: jobs.Attempt, now: datetime
) -> timedelta:
    """Return how long the ready standby gang waits for the next checkpoint of the working gang
    `own`. The result is 0 if `own` has saved a checkpoint since the standby gang became ready, or
    if `own` saves no checkpoints.
    """
    checkpoint = rows.job.task.checkpoint
    if checkpoint is None or own.phase in jobs.COMING:
        return timedelta(0)
    every = checkpoint.every or _LONGEST_WAIT
    saved = own.checkpoint_at or own.running_at
    if saved is not None and now - saved > 1.5 * every:
        return timedelta(0)  # the next checkpoint is overdue: do not wait
    since = max(node.claimed_at or now for node in rows.nodes_of(ready))
    if own.checkpoint_at is not None and own.checkpoint_at >= since:
        return timedelta(0)
    return since + min(_LONGEST_WAIT, every) - now
