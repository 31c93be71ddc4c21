"""Decides the next step of a service while a new revision is on trial.

The serving revision keeps all the replicas that it needs until the new revision takes over. The
next step of each revision is decided as if the two revisions were separate services. A canary gets
some of the requests and replicas until `control.decide.canary` has judged the revision. A
blue-green revision gets its full number of replicas, but no requests until all of them are ready.
"""

from datetime import datetime

from cavvy.capabilities.serving.decide.replica_groups import (
    count_groups,
    count_replicas,
    decide_replicas,
    fix_count,
    fix_counts,
)
from cavvy.capabilities.serving.decide.service import (
    ServiceSnapshot,
    ServiceStep,
    dismiss,
    is_canary,
)
from cavvy.capabilities.serving.replicas import (
    CandidateRevision,
    ReplicaState,
    ServiceReplica,
    UpdateOutcome,
)
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.decide.canary import CanaryJudgement, CanaryTerms, judge, observe
from cavvy.domain.service_updates import PROMOTED, UpdateEnd
from cavvy.domain.services import ServiceUpdate, UpdateStrategy
from cavvy.domain.units import format_duration
from cavvy.domain.values import copy_fields, replace, view

MOST_FAILURES = 3  # replicas of the candidate that end in a row
_PART = frozenset({UpdateEnd.ENOUGH, UpdateEnd.TIME})
_GONE = frozenset({ReplicaState.ENDING, ReplicaState.ENDED})


def begin_update(service: StoredService, asked: CandidateRevision) -> StoredService | None:
    """Return the service with the requested task as its candidate revision. If the requested task
    is already serving, return the service with its candidate marked as withdrawn. Return None if
    the requested task can serve immediately as the newest revision, without a trial.
    """
    tried = service.candidate
    if not (service.version and service.wanted):
        return None
    if _is_same(asked, service):
        if tried is None:
            return None
        return replace(service, candidate=replace(tried, withdrawn=True))
    if _rule_of(asked).strategy is UpdateStrategy.ROLLING:
        return None
    if tried is not None and _is_same(asked, tried):
        return replace(service, candidate=replace(tried, withdrawn=False, failures=0))
    return replace(service, candidate=replace(asked, revision=service.newest + 1))


def _is_same(asked: CandidateRevision, other: StoredService | CandidateRevision) -> bool:
    return (asked.task, asked.origin.snapshot) == (other.task, other.origin.snapshot)


def as_revision(service: StoredService, revision: int) -> StoredService:
    """Return the service with the task of this revision and with the user who started the
    revision.
    """
    tried = service.candidate
    if tried is None or tried.revision != revision:
        return service
    user = ("user", "origin", "consented", "ceiling")
    state = ("revision", "failures", "failed_at", "problem")
    return copy_fields(service, tried, "task", *user, *state)


def decide_update(view: ServiceSnapshot, now: datetime) -> ServiceStep:
    """Return the next step of a service, with or without a candidate."""
    service = view.service
    if service.candidate is None:
        service = _return_to_worked(service, view.backlog, now)
    if (tried := service.candidate) is None:
        return _follow_rolling(decide_replicas(view, now), now)
    service = replace(service, stopped_by=view.stop.hard)
    wanted = count_replicas(service, view.backlog)
    old, new = _decide_both(replace(view, service=service), tried, wanted, now)
    tried = _follow(tried, new.service, view, now)
    replicas = _in_order(old.service.replicas, new.service.replicas)
    service = replace(old.service, replicas=replicas, candidate=tried)
    found = measure(tried, last=_is_over(tried, now))
    needed = count_replicas(new.service, 0)
    if (end := _find_end(service, tried, found, (wanted, needed), now)) is not None:
        return ServiceStep(
            service=_end(service, tried, found, end, now),
            start=old.start,
            stop=(*old.stop, *new.stop),
            after=new.after,
        )
    return ServiceStep(
        service=service,
        orders=old.orders,
        bound=old.bound,
        grouped=old.grouped,
        candidates=len(new.orders),
        candidate_groups=new.grouped,
        members={**old.members, **new.members},
        start=(*old.start, *new.start),
        stop=(*old.stop, *new.stop),
        finished=old.finished and new.finished,
        after=min(old.after, new.after),
    )


def remember_former(service: StoredService) -> CandidateRevision | None:
    """Return the revision to which a failed rolling update returns. If a replica of the serving
    revision is ready, the result is the serving revision. Otherwise, it is the revision that served
    before, if its replicas still run.
    """
    return service.serving if _is_ready(service) else service.former


def remember_worked(service: StoredService) -> CandidateRevision | None:
    """Return the last revision that has worked, for a service that gets a new revision."""
    return service.serving if service.steady else service.worked


def _return_to_worked(service: StoredService, backlog: int, now: datetime) -> StoredService:
    """Return the service with the last revision that has worked as its serving revision, and with
    the newest revision on trial beside it, if requests wait, no replica is ready, and the newest
    revision does not start. Otherwise, return the service unchanged.
    """
    good = service.former or service.worked
    if good is None or good.revision == service.revision or not (service.wanted and backlog):
        return service
    problem = _find_start_problem(service, now)
    if not problem or any(each.state is ReplicaState.READY for each in service.replicas):
        return service
    newest = replace(
        service.serving,
        failures=service.failures,
        failed_at=service.failed_at,
        problem=problem,
    )
    back = _go_back(service, good)
    return replace(back, candidate=newest, former=None, steady=True, worked=None)


def _find_start_problem(service: StoredService, now: datetime) -> str:
    """Return why the newest revision does not start: the reason of its last failure, or that its
    program has not answered for half of the time that a request may wait. Return "" if there is no
    problem.
    """
    if service.failures:
        return service.problem
    long = service.spec.timeouts.queue / 2
    ours = [each for each in service.replicas if each.revision == service.revision]
    for each in ours:
        runs = each.state is ReplicaState.STARTING and each.running_at is not None
        if runs and now - (each.running_at or now) >= long:
            return f"replica {each.number} has not answered within {format_duration(long)}"
    return ""


def _follow_rolling(step: ServiceStep, now: datetime) -> ServiceStep:
    """Return `step`, or a step that returns to the former revision if several replicas of the new
    revision have ended in a row without ever being ready.
    """
    service, former = step.service, step.service.former
    if former is None:
        return step
    if _is_ready(service):
        return replace(step, service=replace(service, former=None))
    if service.failures < MOST_FAILURES or not service.wanted:
        return step
    reason = "the replica's revision was rolled back"
    outcome = UpdateOutcome(
        revision=service.revision, end=UpdateEnd.FAILED, at=now, problem=service.problem
    )
    replicas = tuple(
        each
        if each.revision != service.revision or each.state in _GONE
        else dismiss(each, now, reason)
        for each in service.replicas
    )
    back = _go_back(service, former)
    back = replace(back, candidate=None, former=None, outcome=outcome, replicas=replicas)
    return ServiceStep(service=back, stop=step.stop, after=step.after)


def _go_back(service: StoredService, former: CandidateRevision) -> StoredService:
    """Return the service with an earlier revision as its serving revision. If requests need keys,
    they still need them, so that a revision that fails does not open the service."""
    back = as_revision(replace(service, candidate=former), former.revision)
    if not service.spec.keys:
        return back
    return replace(back, task=replace(back.task, service=replace(back.spec, keys=True)))


def _is_ready(service: StoredService) -> bool:
    """Return whether a replica of the serving revision is ready."""
    ours = [each for each in service.replicas if each.revision == service.revision]
    return any(each.state is ReplicaState.READY for each in ours)


def _decide_both(
    view: ServiceSnapshot, tried: CandidateRevision, wanted: int, now: datetime
) -> tuple[ServiceStep, ServiceStep]:
    """Return two steps: for the service without its candidate, and for the candidate alone."""
    service = view.service
    ours = tuple(each for each in service.replicas if each.revision == tried.revision)
    others = tuple(each for each in service.replicas if each.revision != tried.revision)
    alone = _as_candidate(service, tried, ours, wanted, view.backlog)
    return (
        decide_replicas(replace(view, service=replace(service, replicas=others)), now),
        decide_replicas(ServiceSnapshot(service=alone, seen=view.seen, stop=view.stop), now),
    )


def measure(tried: CandidateRevision, *, last: bool = False) -> CanaryJudgement:
    """Return the judgement of the candidate from its requests so far. `last` means that the
    candidate's trial has reached its time limit.
    """
    return judge(tried.trial, _terms_of(tried), last=last)


def _terms_of(tried: CandidateRevision) -> CanaryTerms:
    return CanaryTerms(requests=_rule_of(tried).requests)


def _is_over(tried: CandidateRevision, now: datetime) -> bool:
    """Return whether the candidate's trial period is over. The trial period begins when the
    candidate's first replica is ready.
    """
    return tried.ready_at is not None and now - tried.ready_at >= _rule_of(tried).within


def _as_candidate(
    service: StoredService,
    tried: CandidateRevision,
    replicas: tuple[ServiceReplica, ...],
    wanted: int,
    backlog: int,
) -> StoredService:
    """Return the service with the candidate as its only revision, and with the candidate's wanted
    number of replicas.
    """
    before, service = service, as_revision(service, tried.revision)
    if service.task.replica_groups:
        counts = count_groups(before, backlog) or {"": wanted}
        percent = service.spec.update.weight if is_canary(service) else 100
        return replace(fix_counts(service, counts, percent), replicas=replicas)
    if is_canary(service):
        wanted = -(-wanted * service.spec.update.weight // 100)
    return fix_count(replace(service, replicas=replicas, markets=(), placement={}), wanted)


def _follow(
    tried: CandidateRevision, alone: StoredService, view: ServiceSnapshot, now: datetime
) -> CandidateRevision:
    """Return the candidate, updated from the states of its replicas and the counts of its
    requests.
    """
    trial, seen = tried.trial, view.tried
    if seen is not None and seen.revision == tried.revision:
        trial = observe(trial, seen.old, seen.new, _terms_of(tried))
    ready_at = tried.ready_at
    if view.stop.hard:
        # without a ready replica, the trial is suspended; its time begins again with the next one
        ready_at = None
    elif ready_at is None and any(each.state is ReplicaState.READY for each in alone.replicas):
        ready_at = now
    return replace(
        tried,
        trial=trial,
        ready_at=ready_at,
        failures=alone.failures,
        failed_at=alone.failed_at,
        problem=alone.problem,
    )


def _rule_of(tried: CandidateRevision) -> ServiceUpdate:
    assert tried.task.service is not None
    return tried.task.service.update


def _find_end(
    service: StoredService,
    tried: CandidateRevision,
    found: CanaryJudgement,
    counts: tuple[int, int],
    now: datetime,
) -> UpdateEnd | None:
    """Return why the trial ends now, or None if the trial continues. `counts` are the wanted
    numbers of replicas of the service and of the candidate.
    """
    if not service.wanted:
        return None
    if tried.withdrawn:
        return UpdateEnd.WITHDRAWN
    if tried.failures >= MOST_FAILURES:
        return UpdateEnd.FAILED
    if service.stopped_by:  # the candidate has no replicas, so nothing is known about its quality
        return None
    if not is_canary(service):
        if not counts[0] and tried.problem:  # the problem matters again when requests arrive
            return None
        ready = [
            each
            for each in service.replicas
            if each.revision == tried.revision and each.state is ReplicaState.READY
        ]
        return UpdateEnd.READY if len(ready) >= counts[1] else None
    return found.end or (UpdateEnd.TIME if _is_over(tried, now) else None)


def _end(
    service: StoredService,
    tried: CandidateRevision,
    found: CanaryJudgement,
    end: UpdateEnd,
    now: datetime,
) -> StoredService:
    """Return the service after the trial: the candidate's revision takes over, or its replicas are
    removed."""
    outcome = view(
        UpdateOutcome, found, revision=tried.revision, end=end, at=now, problem=tried.problem
    )
    goes_on, reason = service.revision, "the replica's revision was rolled back"
    if end in PROMOTED:
        goes_on, reason = tried.revision, "a newer revision has taken over"
        worked = remember_worked(service)
        service = replace(as_revision(service, goes_on), steady=False, worked=worked)
    replicas = service.replicas
    if end not in _PART:  # the revision that continues has all its replicas
        replicas = tuple(
            each if each.revision == goes_on or each.state in _GONE else dismiss(each, now, reason)
            for each in replicas
        )
    return replace(service, candidate=None, outcome=outcome, replicas=replicas)


def _in_order(
    old: tuple[ServiceReplica, ...], new: tuple[ServiceReplica, ...]
) -> tuple[ServiceReplica, ...]:
    """Return the replicas of both revisions: first the replicas that have ended, then the replicas
    that have not ended, both sorted by age.
    """
    return tuple(
        sorted((*old, *new), key=lambda each: (each.state is not ReplicaState.ENDED, each.number))
    )
