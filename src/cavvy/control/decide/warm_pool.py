"""Decides whether a gang is kept warm after its work, which jobs can take over the gang, and what
the takeover changes. Decides how jobs acquire and release named machines."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from cavvy.catalog import fit
from cavvy.catalog.fit import Constraint
from cavvy.catalog.needs import format_need
from cavvy.control.decide.job import MARGIN, cap_of, ends_job, is_free_only
from cavvy.control.decide.placement import make_attempt, start_job
from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.costs.metering import total
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import (
    GOING,
    NODE_SPARED,
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    JobPhase,
    JobRecord,
    Node,
    NodePhase,
    StopCause,
)
from cavvy.domain.machines import USUAL_KEEP, NamedMachine
from cavvy.domain.offers import Offer
from cavvy.domain.policies import BoundPolicy
from cavvy.domain.tasks import DEFAULT_CPUS, JobLimits, ResourceSpec, RetryPolicy, TaskSpec
from cavvy.domain.units import Money, format_duration, format_rate, format_usd
from cavvy.domain.values import Struct, replace
from cavvy.planner.objections import explain_policy

# How much longer than the keep time an agent waits, unless the server orders it to exit.
FAREWELL = timedelta(minutes=1)
_NOTHING = timedelta(0)
# The maximum time after the work's end until agents request their next work: they do so within a
# second, but a kubelet reports a start two or more seconds late.
_FRESH = timedelta(seconds=10)
_BY_ITSELF = frozenset({AttemptOutcome.SUCCEEDED, AttemptOutcome.EXIT})
_WORKED = frozenset({AttemptPhase.BOOTING, AttemptPhase.RUNNING})
_LONGEST_H = 24


def may_keep(task: TaskSpec, offer: Offer) -> bool:
    """Return True if the task asks to keep its nodes after the work and nodes of this offer can be
    kept. The nodes of a named machine can always be kept. Without a named machine, nodes on a
    shared host are not kept, because the host releases its devices immediately. Without a named
    machine, nodes with volumes or a time limit are not kept, because these nodes may not suit the
    next job.
    """
    if task.keep <= _NOTHING:
        return False
    bound = offer.shared or task.volumes or task.limits.duration is not None
    return task.machine is not None or not bound


def _endings(task: TaskSpec) -> frozenset[AttemptOutcome]:
    """Return the outcomes of a node's work after which the node can be kept."""
    return NODE_SPARED if task.on_kept_nodes else _BY_ITSELF


def waits_on(job: JobRecord, attempt: Attempt, node: Node) -> bool:
    """Return whether an agent that requests work for this rank may be waiting for the next job."""
    if attempt.phase is AttemptPhase.KEPT:
        return True
    over = node.phase is NodePhase.EXITED and node.exit_outcome in _endings(job.task)
    return (
        attempt.phase in _WORKED and over and not job.released and may_keep(job.task, attempt.offer)
    )


def keeps_until(
    job: JobRecord,
    attempt: Attempt,
    nodes: Sequence[Node],
    end: tuple[AttemptOutcome | None, int | None],
    spent: Money | None,
    now: datetime,
) -> datetime | None:
    """Return the time until which the gang is kept, or None if it is released.

    A gang is kept if the work on every node ended without an order to stop, and the job is not
    retried. A machine's gang is kept whenever the gang's work ends and all of its nodes are intact.
    """
    if attempt.phase not in _WORKED or job.released or not may_keep(job.task, attempt.offer):
        return None
    if attempt.number != job.attempt or job.standbys or not _leaves_nodes(job, end):
        return None
    if attempt.drill_until is not None or any(node.notice_until is not None for node in nodes):
        return None
    if any(
        node.phase is not NodePhase.EXITED or node.exit_outcome not in _endings(job.task)
        for node in nodes
    ):
        return None
    length = min(job.task.keep, paid_for(job, attempt, spent))
    return now + length if length > _NOTHING else None


def _leaves_nodes(job: JobRecord, end: tuple[AttemptOutcome | None, int | None]) -> bool:
    """Return whether the nodes can run another job after this job's work has ended with the outcome
    and the exit code in `end`.
    """
    if not job.task.on_kept_nodes:
        return job.stop_reason is None and ends_job(job, *end)
    timed = job.stop_cause in (StopCause.DURATION, StopCause.DEADLINE)
    return end[0] in NODE_SPARED or (end[0] is AttemptOutcome.LIMIT and timed)


def paid_for(job: JobRecord, attempt: Attempt, spent: Money | None) -> timedelta:
    """Return how long the rest of the budget can pay for the gang, minus the time that removing the
    gang takes.
    """
    cap, rate = cap_of(job), attempt.offer.rate.times(attempt.nodes).micros_per_hour
    if cap is None or not rate:
        return timedelta.max
    left = 0 if spent is None else max(0, cap.micros - spent.micros)
    paid = timedelta(hours=min(_LONGEST_H, left / rate))
    return paid - min(MARGIN, paid / 2)


def fits(kept: Attempt, former: JobRecord, job: JobRecord) -> bool:
    """Return whether a warm gang would suit the job as well as a new gang on the same offer. The
    caller checks that the offer suits the job. The tags of a pool's nodes are those of the job that
    started them.
    """
    old, new = former.task, job.task
    if (
        former.project != job.project
        or old.machine is not None
        or old.pool != new.pool
        or kept.nodes != new.nodes
        or (kept.offer.by_user and former.user != job.user)
        or new.volumes
        or new.retry.parallel > 1
    ):
        return False
    return all(
        getattr(old, name) == getattr(new, name)
        for name in ("image", "image_build", "image_login", "grace", "tags", "topology")
        if name != "tags" or new.pool is None
    ) and all(
        getattr(old.resources, name) == getattr(new.resources, name)
        for name in ("disk_gib", "disk_type", "network", "options")
    )


def is_fresh(kept: Attempt, now: datetime) -> bool:
    """Return whether the gang was kept so recently that its agents may still be about to request
    their next work.
    """
    return now - (kept.kept_since or kept.since) < _FRESH


def is_kept(attempt: Attempt, now: datetime) -> bool:
    """Return whether the attempt's gang is kept warm and still waits for a job."""
    until = attempt.kept_until
    return attempt.phase is AttemptPhase.KEPT and until is not None and until > now


def list_kept(kept: Iterable[Attempt], project: str) -> list[Attempt]:
    """Return the project's warm gangs. The gang that has been kept longest comes first."""
    mine = [each for each in kept if each.project == project]
    return sorted(mine, key=lambda each: (each.kept_since or each.since, each.id))


def hand_over(
    old: Attempt, former: JobRecord, charges: Sequence[Charge], job: JobRecord, now: datetime
) -> RowChanges:
    """Assign a warm gang to a new attempt of the job. `charges` are the charges of `old`, the
    attempt that used the gang before.
    """
    reason = f"took over the gang of {former.name}"
    fresh, nodes = make_attempt(job, old.offer, lambda _: old.gang, now, reason)
    adopted = replace(
        fresh,
        phase=AttemptPhase.BOOTING,
        launched_at=now,
        adopted_at=now,
        rounds=old.rounds,
        open_ranks=old.open_ranks,
    )
    handed = replace(
        old,
        phase=AttemptPhase.ENDED,
        since=now,
        ended_at=now,
        gang=f"{old.gang}@{old.id}",
        kept_until=now,
    )
    reason = f"starts on {old.offer.key}, on the gang kept by job {former.name}"
    if job.task.machine is not None:
        price = format_rate(old.offer.rate.times(old.nodes))
        reason = f"starts on machine {job.task.machine}, {price}: {old.offer.key}"
    started = start_job(job, adopted, reason, now)
    cost = format_usd(total(each for each in charges if each.kind is ChargeKind.KEPT))
    text = f"job {job.name} took over the gang, whose last idle period cost {cost}"
    return RowChanges(
        job=started,
        attempts=(handed, adopted),
        nodes=tuple(nodes),
        events=(
            make_event(started, now, "placed", reason),
            make_event(former, now, "kept", text, old.number),
        ),
        charges=tuple(charges),
    )


class MachineIsFree(Struct, frozen=True, kw_only=True):
    """The machine has no gang, so the job gets a new gang."""


class MachineIsReady(Struct, frozen=True, kw_only=True):
    """The job takes over the machine's gang."""

    gang: Attempt


class MachineIsBusy(Struct, frozen=True, kw_only=True):
    """The job waits for the machine, which is busy; `reason` says why."""

    reason: str


class MachineIsUnfit(Struct, frozen=True, kw_only=True):
    """The decision that the machine cannot run the job; `reason` says why."""

    reason: str


MachineTurn = MachineIsFree | MachineIsReady | MachineIsBusy | MachineIsUnfit


def find_gang(attempts: Sequence[Attempt], holder: JobRecord | None) -> Attempt | None:
    """Return the machine's gang, which belongs to one of the attempts of its newest job. The result
    is None if the machine has no gang."""
    if holder is None:
        return None
    live = [each for each in attempts if each.phase not in GOING]
    return max(
        live,
        key=lambda each: (each.phase is AttemptPhase.KEPT, each.number == holder.attempt),
        default=None,
    )


def decide_turn_on_machine(
    job: JobRecord,
    machine: NamedMachine | None,
    holder: JobRecord | None,
    gang: Attempt | None,
    now: datetime,
    policies: Sequence[BoundPolicy] = (),
) -> MachineTurn:
    """Decide whether a waiting job gets its machine now. `holder` is the machine's newest job, and
    `gang` is the machine's gang. `policies` are checked because they may have changed since the
    machine started.
    """
    if machine is None or holder is None or gang is None:
        return MachineIsFree()
    if refusal := explain_policy(policies, job.task, gang.offer):
        return MachineIsUnfit(reason=str(refusal))
    if reason := object_to_task(job.task, machine, gang) or _object_to_price(job, machine, gang):
        return MachineIsUnfit(reason=reason)
    if is_kept(gang, now):
        return MachineIsReady(gang=gang)
    if gang.phase is AttemptPhase.KEPT:
        return MachineIsBusy(reason=f"machine {machine.name} is being released")
    reason = f"machine {machine.name} runs job {holder.name}"
    if holder.task.session:
        reason += (
            f", a session: `cavvy exec {holder.name} -- COMMAND` runs a command in it; "
            f"`cavvy stop {holder.name}` ends it"
        )
    return MachineIsBusy(reason=reason)


def complete_task(task: TaskSpec, machine: NamedMachine | None) -> TaskSpec:
    """Return the task as it runs on the machine: fields that the task does not set have the
    machine's values."""
    if machine is None:
        return replace(task, keep=task.keep or USUAL_KEEP)
    request = machine.task
    found = replace(task, keep=task.keep or request.keep, volumes=task.volumes or request.volumes)
    if not task.image and not task.image_build:
        # a login is for one registry, so it belongs to its image
        found = replace(
            found,
            image=request.image,
            image_build=request.image_build,
            image_login=task.image_login or request.image_login,
            image_signers=task.image_signers or request.image_signers,
        )
    if task.resources == ResourceSpec() and task.nodes == 1:
        found = replace(found, resources=request.resources, nodes=request.nodes)
    return found


def object_to_task(task: TaskSpec, machine: NamedMachine, gang: Attempt) -> str:
    """Return the reason why the machine's gang cannot run the task, or "" if it can."""
    has = f"machine {machine.name} has"
    if task.nodes != gang.nodes:
        return f"{has} {_count(gang.nodes)}, but the task asks for {task.nodes}"
    for name in ("image", "image_build", "volumes"):
        if getattr(task, name) != getattr(machine.task, name):
            return f"{has} a value of `{name.partition('_')[0]}` that differs from the task's"
    offer = _held_share(gang.offer, machine.task.resources)
    reasons = [_object_to_need(offer, need) for need in task.resources.choices]
    return f"machine {machine.name} {reasons[0]}" if all(reasons) else ""


def _object_to_price(job: JobRecord, machine: NamedMachine, gang: Attempt) -> str:
    """Return why the job may not use the machine's gang at its price, or "" if it may. The machine
    may have been started after the job was submitted."""
    rate = gang.offer.rate.times(gang.nodes)
    agreed = machine.consented and machine.user == job.user and not is_free_only(job)
    if not rate.micros_per_hour or job.consented or agreed:
        return ""
    return (
        f"machine {machine.name} costs {format_rate(rate)} now, to which the user of {job.name} "
        "has not agreed: submit the job again with --yes"
    )


def _object_to_need(offer: Offer, need: ResourceSpec) -> str:
    need = replace(need, options=())
    failed = [
        each
        for each in Constraint
        if each is not Constraint.PURCHASE and not fit.meets(offer, need, each)
    ]
    return fit.explain(offer, need, failed[0]) if failed else ""


def _held_share(offer: Offer, request: ResourceSpec) -> Offer:
    """Return the part of the offer that the gang occupies: the requested size on a shared host,
    otherwise the whole offer.
    """
    if not offer.shared:
        return offer
    request = request.stated()
    cpus = request.cpus_min or DEFAULT_CPUS
    memory = request.least_memory_mib(cpus)
    return replace(offer, vcpus=cpus, memory_mib=memory or offer.memory_mib, shared=False)


def describe_hardware(machine: NamedMachine, gang: Attempt | None) -> str:
    """Describe the hardware of one node: the hardware of the machine's gang or, if the machine has
    no gang, the hardware that its task requests.
    """
    need = machine.task.resources
    if gang is None:
        asked = [format_need(each) for each in need.accelerators[:1]]
        asked += [_say_cpus(need.cpus_min)] if need.cpus_min else []
        return ", ".join(asked) or need.instance or "any CPUs"
    offer = _held_share(gang.offer, need)
    devices = f"{offer.accelerators_text} x {offer.accelerator}, " if offer.accelerator else ""
    return devices + _say_cpus(offer.vcpus)


def _say_cpus(count: float) -> str:
    return f"{count:g} CPU{'' if count == 1 else 's'}"


def _count(nodes: int) -> str:
    return f"{nodes} node{'' if nodes == 1 else 's'}"


def record_holder(
    machine: NamedMachine | None, job: JobRecord, *, bought_at: datetime | None
) -> NamedMachine:
    """Return the machine's row after the job has become the machine's newest job. If the job gets a
    new gang, `bought_at` is set, and the job's task defines the machine.
    """
    assert job.task.machine is not None
    row = machine or NamedMachine(project=job.project, name=job.task.machine, task=job.task)
    if bought_at is not None:
        keep = row.task.keep
        row = replace(row, task=replace(job.task, keep=keep), bought_at=bought_at)
    user = row.user or job.user
    consented = row.consented or (job.consented and job.user == user)
    return replace(row, job_id=job.id, user=user, consented=consented)


def extend_machine(
    job: JobRecord, gang: Attempt, keep: timedelta, spent: Money, now: datetime
) -> RowChanges:
    """Keep the gang for the time `keep` after its work ends or, if the gang is idle, from now. The
    time may be shorter than `keep`, because the job's remaining budget limits it.
    """
    paid = paid_for(job, gang, spent)
    kept = gang.phase is AttemptPhase.KEPT
    longer = replace(gang, kept_until=now + min(keep, paid))
    text = f"the machine is kept for {format_duration(keep)} without work"
    if kept and paid < keep:
        text = f"the machine is kept until {longer.kept_until:%Y-%m-%d %H:%M:%S} UTC, because "
        text += f"the job's budget does not suffice for the whole {format_duration(keep)}"
    return RowChanges(
        job=replace(job, task=replace(job.task, keep=keep)),
        attempts=(longer,) if kept else (),
        events=(make_event(job, now, "kept", text),),
    )


def make_start(machine: NamedMachine) -> TaskSpec:
    """Return the task that starts a stopped machine: it runs the machine's setup, and no work."""
    return replace(
        machine.task,
        name=f"{machine.name}-start",
        run="true",
        project=machine.project,
        machine=machine.name,
        # what belongs to the work instead of the machine
        priority=0,
        after=(),
        encrypt=False,
        inputs=(),
        outputs=(),
        checkpoint=None,
        limits=JobLimits(),
        retry=RetryPolicy(),
        schedule=None,
        window=None,
        work=None,
        webhooks=(),
        session=False,
        service=None,
    )


def is_leaving(attempts: Sequence[Attempt]) -> bool:
    """Return whether nodes of one of these gangs are still being released and may still be
    billed."""
    return any(each.phase is AttemptPhase.ENDING for each in attempts)


def state_of(gang: Attempt | None, holder: JobRecord | None, *, leaving: bool) -> str:
    """Return the machine's state, as users see it: stopped, stopping, starting, busy or idle.
    `leaving` states whether a former gang's nodes are still being released.
    """
    if gang is None or holder is None:
        return "stopping" if leaving else "stopped"
    if gang.phase is AttemptPhase.KEPT:
        return "idle"
    return "starting" if holder.phase is JobPhase.STARTING else "busy"
