"""Decides which waiting jobs start, and the reasons shown for jobs that wait. For a job that is
within its project's quota, decides which gangs give their nodes back, and says who has borrowed the
quota and when it comes back."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from datetime import datetime, timedelta

from cavvy.control.decide.job import AdvanceJob
from cavvy.control.decide.placement import MarketSnapshot, date_plan, is_news
from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.control.decide.standby import HANDOVER
from cavvy.control.decide.start_trials import StartTrial, share_held, share_on
from cavvy.domain.allocations import Allocation
from cavvy.domain.events import Event
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase, JobRecord, PlanState, attempt_id
from cavvy.domain.offers import Offer
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.shares import QueueRow, size_of_task
from cavvy.domain.values import Struct, replace
from cavvy.planner.candidates import Candidates, merge_candidates
from cavvy.scheduler.queue import (
    JobPlacement,
    JobScheduler,
    JobWait,
    QueueCapacity,
    WaitingJob,
)
from cavvy.scheduler.reclaim import Borrower, QuotaClaim, choose_borrowers, find_return
from cavvy.scheduler.shares import ShareBook

# how many waiting jobs, counted from the head of the queue, get their reasons updated in one pass
EXPLAINED = 4
_DEEP_EVERY = timedelta(seconds=10)
_BUSY_PAUSE = timedelta(
    milliseconds=250
)  # how long the first placement of a new job is delayed while no capacity is free
_BURST, _BURST_SPAN, _BURST_PAUSE = 20, timedelta(milliseconds=200), timedelta(seconds=1)

NameGang = Callable[[str], str]


class QueueWait(Struct, frozen=True, kw_only=True):
    """A job that stays in the queue: the reason, the deadline policy's decision, and the time by
    which the queue must check the job again.
    """

    wait: JobWait
    plan: PlanState | None = None
    again_at: datetime | None = None
    busy: bool = False  # whether the later jobs of the same machine or pool wait too
    limited: bool = False  # whether a limit of a project or user refuses all offers


def make_wait(
    job: JobRecord, reason: str, again_at: datetime, *, busy: bool = False, limited: bool = False
) -> QueueWait:
    """Return why a job waits that waits for no offers."""
    wait = JobWait(job=job, reason=reason)
    return QueueWait(wait=wait, again_at=again_at, busy=busy, limited=limited)


class Start(Struct, frozen=True, kw_only=True):
    """Start the job as `place` describes; `candidates` are the candidates of the chosen
    alternative."""

    place: JobPlacement
    candidates: Candidates


def decide_turn(
    job: JobRecord,
    found: Sequence[tuple[JobRecord, Candidates]],
    ranked: Sequence[tuple[JobRecord, tuple[Offer, ...]]],
    scheduler: JobScheduler,
    name_gang: NameGang,
    now: datetime,
    reserved: tuple[Allocation, ...] = (),
) -> Start | QueueWait | AdvanceJob:
    """Decide whether the job starts, waits, or fails because no offer can ever fit. `found`
    contains the candidates for each alternative of the task, and `ranked` contains the candidates'
    offers in the order of `rank_candidates`.
    """
    candidates = merge_candidates(found)
    if candidates.hopeless and not candidates.offers:
        return AdvanceJob(phase=JobPhase.FAILED, reason=candidates.reason)
    if not candidates.offers:
        reason, unusable = candidates.reason, candidates.unusable
        decision: JobPlacement | JobWait = JobWait(job=job, reason=reason, unusable=unusable)
    else:
        first, *others = [
            line_up(wish, offers, name_gang, now, reserved) for wish, offers in ranked
        ]
        decision = scheduler.decide(first, *others)
        if isinstance(decision, JobWait):
            decision = _add_bound(decision, candidates)
    if isinstance(decision, JobWait):
        plan, again_at = candidates.plan_state, candidates.again_at
        return QueueWait(wait=decision, plan=plan, again_at=again_at)
    chosen = next(each for wish, each in found if wish is decision.job)
    return Start(place=decision, candidates=chosen)


def _add_bound(wait: JobWait, candidates: Candidates) -> JobWait:
    """Add to the reason of a wait that only some hosts have the job's volumes."""
    return replace(wait, reason=f"{wait.reason}; {candidates.bound}") if candidates.bound else wait


class GroupTurn(Struct, frozen=True, kw_only=True):
    """A job of a group that is to be placed: the candidates and the ranked offers of its
    alternatives, see `decide_turn`."""

    job: JobRecord
    found: Sequence[tuple[JobRecord, Candidates]]
    ranked: Sequence[tuple[JobRecord, tuple[Offer, ...]]]
    reserved: tuple[Allocation, ...] = ()  # for others, see `WaitingJob`


def decide_group(
    turns: Sequence[GroupTurn], scheduler: JobScheduler, name_gang: NameGang, now: datetime
) -> Sequence[Start | QueueWait] | tuple[JobRecord, AdvanceJob]:
    """Decide whether the jobs of a group all start, or all wait. If no offer can ever fit one of
    them, return this job and its failure.
    """
    for turn in turns:
        candidates = merge_candidates(turn.found)
        if candidates.hopeless and not candidates.offers:
            return turn.job, AdvanceJob(phase=JobPhase.FAILED, reason=candidates.reason)
        if not candidates.offers:
            return _wait_together(turns, turn.job, candidates)
    lines = [
        [line_up(wish, offers, name_gang, now, turn.reserved) for wish, offers in turn.ranked]
        for turn in turns
    ]
    decided = list[Start | QueueWait]()
    for turn, decision in zip(turns, scheduler.decide_all(lines), strict=True):
        if isinstance(decision, JobWait):
            wait = _add_bound(decision, merge_candidates(turn.found))
            decided.append(QueueWait(wait=wait))
        else:
            chosen = next(each for wish, each in turn.found if wish is decision.job)
            decided.append(Start(place=decision, candidates=chosen))
    return decided


def _wait_together(
    turns: Sequence[GroupTurn], job: JobRecord, candidates: Candidates
) -> Sequence[QueueWait]:
    """Let all jobs wait, because no offer can be used now for one of them."""
    waits = list[QueueWait]()
    for turn in turns:
        own = candidates.reason if turn.job is job else f"waits for {job.name} of its group"
        wait = JobWait(job=turn.job, reason=own, unusable=candidates.unusable)
        waits.append(QueueWait(wait=wait, again_at=candidates.again_at))
    return waits


def line_up(
    wish: JobRecord,
    offers: tuple[Offer, ...],
    name_gang: NameGang,
    now: datetime,
    reserved: tuple[Allocation, ...] = (),
) -> WaitingJob:
    """Return the job as a queue entry for these offers."""
    gang = name_gang(attempt_id(wish.id, wish.last_number + 1))
    avoid = frozenset(place for place, until in wish.avoid.items() if until > now)
    return WaitingJob(job=wish, gang=gang, offers=offers, avoid=avoid, reserved=reserved)


def make_borrowers(
    running: Sequence[tuple[Attempt, JobRecord]],
) -> Sequence[Borrower]:
    """Return the running jobs that may give their gangs back. Replicas, sessions and the jobs of
    machines keep theirs, as people or requests would notice."""
    return [
        Borrower(
            gang=attempt.gang,
            project=job.project,
            size=size_of_task(job.task),
            share=share_held(attempt, job),
            since=attempt.running_at,
            saves=job.task.checkpoint is not None,
        )
        for attempt, job in running
        if attempt.phase is AttemptPhase.RUNNING
        and attempt.running_at is not None
        and attempt.drill_until is None
        and attempt.number == job.attempt
        and job.task.machine is None
        and not job.task.session
        and SERVICE_TAG not in job.task.tags
    ]


def reclaim_gang(attempt: Attempt, job: JobRecord, project: str, now: datetime) -> RowChanges:
    """Let the job save a checkpoint and return to the queue, because `project` gets its quota
    back."""
    until = now + max(HANDOVER, job.task.grace)
    text = f"gives its nodes back, because project {project} gets its quota back"
    return RowChanges(
        attempts=(replace(attempt, drill_until=until, moved=True, reclaimed_for=project),),
        events=(make_event(job, now, "reclaimed", text, attempt.number),),
    )


def explain_waits(
    stays: Sequence[QueueWait], now: datetime, *on_machines: Sequence[QueueWait]
) -> tuple[Sequence[JobRecord], Sequence[Event]]:
    """Look at the first jobs of the queue, at the first jobs that wait for each machine, and at the
    jobs that fit only what cannot be used. Return those of them whose reason for waiting has
    changed. Also return events about new decisions of the deadline policy, and about hosts and
    accounts that cannot be used.
    """
    jobs, events = [], []
    looked = [
        each
        for queue in (stays, *on_machines)
        for at, each in enumerate(queue)
        if at < EXPLAINED or each.wait.unusable
    ]
    for each in looked:
        old, plan = each.wait.job, each.plan
        state = old.plan_state if plan is None else date_plan(old.plan_state, plan)
        job = replace(old, reason=each.wait.reason, plan_state=state)
        if job != old:
            jobs.append(job)
        if plan is not None and is_news(old.plan_state, plan):
            events.append(make_event(job, now, "waits", plan.reason))
        if each.wait.unusable and _without_numbers(old.reason) != _without_numbers(job.reason):
            events.append(make_event(job, now, "waits", job.reason, fact="unusable"))
    return jobs, events


def _without_numbers(reason: str) -> str:
    """Return the reason without its digits, because a new time or count is no news."""
    return "".join(char for char in reason if not char.isdigit())


def is_blocked(snapshot: MarketSnapshot, blocked: Collection[str]) -> bool:
    """Return whether each existing offer already has a job that waits for it."""
    return snapshot.places <= (blocked if isinstance(blocked, Set) else frozenset(blocked))


def looks_deep(
    snapshot: MarketSnapshot | None,
    behind: Collection[str],
    last: datetime | None,
    now: datetime,
) -> bool:
    """Return whether to read more jobs of the queue although the first jobs are blocked. A job
    further back in the queue may fit on an offer for which none of the blocked jobs waits. `behind`
    lists the offers for which the jobs that were already read wait.
    """
    if snapshot is None or (last is not None and now - last < _DEEP_EVERY):
        return False
    return not is_blocked(snapshot, behind)


class Arrivals(Struct, frozen=True, kw_only=True):
    """The arrival times of the latest jobs, and the start of the current burst of arrivals."""

    times: tuple[datetime, ...] = ()
    burst_since: datetime | None = None


def note_arrival(arrivals: Arrivals, now: datetime, *, blocked: bool) -> tuple[Arrivals, timedelta]:
    """Record the arrival of a job, and return how long its first placement may wait.

    If no capacity is free, the placement waits briefly, because no job can start before capacity
    becomes free. During a burst of submissions, the placement waits for up to a second, so that the
    requests are answered first.
    """
    recent = tuple(at for at in arrivals.times[-_BURST:] if now - at < _BURST_SPAN)
    times = (*recent, now)
    if blocked:
        return replace(arrivals, times=times), _BUSY_PAUSE
    if len(times) < _BURST:
        return Arrivals(times=times), timedelta(0)
    since = arrivals.burst_since or now
    pause = max(timedelta(0), min(_BURST_SPAN, since + _BURST_PAUSE - now))
    return Arrivals(times=times, burst_since=since), pause


_MINUTE = timedelta(minutes=1)
Gangs = Sequence[tuple[Attempt, JobRecord]]


def decide_return(
    row: QueueRow,
    lines: Sequence[WaitingJob],
    running: Gangs,
    capacity: QueueCapacity,
    scheduler: JobScheduler,
    book: ShareBook,
    now: datetime,
    min_run: timedelta,
) -> tuple[Collection[str], str]:
    """Return the gangs that give their nodes back now, so that the job can start on an offer of
    `lines`, and what to tell about its quota. All these offers are within the quota. The nodes and
    what the limits of projects above count may both have to become free. `scheduler` is only used
    to try: it need not know `capacity` yet.
    """
    gangs = {attempt.gang: (attempt, job) for attempt, job in running}
    leaving = {attempt.gang for attempt, _ in running if attempt.reclaimed_for}
    trial = StartTrial(running, capacity, scheduler, book)

    def suffices(freed: Collection[str]) -> bool:
        return trial.can_start(row, lines, leaving.union(freed))

    share = share_on(lines[0].job, lines[0].offers[0])
    claim = QuotaClaim(
        row=row, running=make_borrowers(running), book=book, suffices=suffices, share=share
    )
    latest = now - min_run
    chosen = {each.gang for each in choose_borrowers(claim, latest)}
    ends = [now + max(HANDOVER, gangs[each][1].task.grace) for each in chosen]
    if not chosen:
        chosen_before = [each for each in running if each[0].reclaimed_for == row.project]
        ends = [each.drill_until for each, _ in chosen_before if each.drill_until is not None]
        if ends:
            return (), _say_borrowed(chosen_before, max(ends))
        later = find_return(claim, latest)
        if later is None:
            return (), ""
        found = [gangs[each.gang] for each in later.borrowers]
        grace = max(HANDOVER, *(job.task.grace for _, job in found))
        return (), _say_borrowed(found, later.since + min_run + grace)
    return chosen, _say_borrowed([gangs[each] for each in sorted(chosen)], max(ends))


def tell_reasons(waits: Sequence[QueueWait], added: Mapping[str, str]) -> Sequence[QueueWait]:
    """Return the waits with what is added to the reasons of some jobs, by their IDs."""
    return [
        replace(each, wait=replace(each.wait, reason=f"{each.wait.reason}; {more}"))
        if (more := added.get(each.wait.job.id))
        else each
        for each in waits
    ]


def _say_borrowed(gangs: Gangs, until: datetime) -> str:
    """Return who has borrowed what the job needs of its quota, and when it comes back."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for attempt, job in gangs:
        share = share_held(attempt, job)
        sums[job.project, share.accelerator] += share.gpus or size_of_task(job.task)
    borrowed = " and ".join(
        f"project {project} has borrowed {gpus:g} {accelerator or 'GPUs'}"
        for (project, accelerator), gpus in sums.items()
    )
    return f"{borrowed} of its quota, back by {until + _MINUTE:%Y-%m-%d %H:%M} UTC at the latest"
