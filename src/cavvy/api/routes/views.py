"""Converts domain objects to answers of the API. Answers contain no secrets."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec import Raw
from msgspec.json import Encoder
from msgspec.structs import asdict, replace

from cavvy.api.wire import view
from cavvy.client import wire
from cavvy.client.ledger_wire import TokensView
from cavvy.control.decide.bills import AuditedBill
from cavvy.control.decide.failures import failure_of
from cavvy.control.decide.warm_pool import describe_hardware
from cavvy.costs.energy import weigh_energy
from cavvy.costs.metering import total
from cavvy.costs.timeline import TimeUse, trace
from cavvy.domain.allocations import Allocation
from cavvy.domain.arrays import StoredArray, describe_counts, find_phase
from cavvy.domain.events import Charge
from cavvy.domain.jobs import (
    FAR,
    JOB_ENDS,
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    JobRecord,
    Node,
    PlanState,
    SentData,
    SentKind,
)
from cavvy.domain.ledger import EnergyUse, TokenUse
from cavvy.domain.machines import MachineStatus
from cavvy.domain.markets import Observation
from cavvy.domain.units import Money
from cavvy.planner.deadline.forecast import Forecast
from cavvy.planner.markets import MarketRecord
from cavvy.planner.placements import Placement
from cavvy.store.base import JobSummary, summarize
from cavvy.store.job_search import MatchedService

_encode = Encoder().encode
_NO_FAILURES = (None, AttemptOutcome.SUCCEEDED, AttemptOutcome.STOPPED)


def job_row(job: JobSummary) -> wire.JobListing:
    return view(wire.JobListing, job, placement=job.place, spent_micros=job.spent.micros)


def placement_view(placement: Placement) -> wire.PlacementView:
    offer, loss = placement.offer, placement.spot_loss
    return wire.PlacementView(
        placement=offer.key,
        accelerator=offer.accelerator,
        accelerators=float(offer.accelerator_count * offer.accelerator_part),
        nodes=placement.nodes,
        rate_micros_per_hour=placement.rate.micros_per_hour,
        run_time_s=_seconds(placement.run_time),
        wall_time_s=_seconds(placement.wall_time),
        cost_micros=None if placement.cost is None else placement.cost.micros,
        preemptions=None if loss is None else loss.preemptions,
        available=placement.available,
        notes=list(placement.notes),
    )


def _seconds(length: timedelta | None) -> float | None:
    return None if length is None else length.total_seconds()


def array_row(array: StoredArray) -> wire.JobListing:
    """Return the list entry of an array: its phase is that of its jobs together."""
    phase = find_phase(array.counts)
    return wire.JobListing(
        id=array.id,
        project=array.project,
        name=array.name,
        user=array.user,
        phase=phase,
        reason=describe_counts(array.counts),
        priority=array.priority,
        submitted_at=array.submitted_at,
        since=array.since,
        ended_at=array.since if phase in JOB_ENDS else None,
        attempt=0,
        exit_code=None,
        placement=None,
        spent_micros=array.spent_micros,
        tags=array.tags,
        members=array.counts,
    )


def service_row(replica: wire.JobListing, service: MatchedService) -> wire.JobListing:
    """Return the list entry of a service, for which its newest replica stands."""
    phase = find_phase(service.counts)
    return replace(
        replica,
        name=service.name,
        service=service.name,
        phase=phase,
        reason=describe_counts(service.counts),
        submitted_at=service.submitted_at,
        since=service.since,
        ended_at=service.since if phase in JOB_ENDS else None,
        spent_micros=service.spent_micros,
        members=service.counts,
    )


def changed_row(job: JobRecord, attempts: Sequence[Attempt], spent: Money) -> wire.JobListing:
    """Return the list entry of a job that was just read or written."""
    # Use the offer of the job's own gang, because the latest attempt may be a standby gang.
    own = (attempt.offer.key for attempt in attempts if attempt.number == job.attempt)
    return job_row(summarize(job, next(own, None), spent))


def energy_view(uses: Iterable[EnergyUse]) -> wire.EnergyView | None:
    """Return the sum of energy with its emissions, or None if none was measured."""
    found = weigh_energy(uses)
    return None if found is None else view(wire.EnergyView, found)


def view_tokens(uses: Mapping[str, TokenUse]) -> list[TokensView]:
    return [TokensView(model=model, **asdict(uses[model])) for model in sorted(uses)]


def job_detail(
    job: JobRecord,
    attempts: Sequence[tuple[Attempt, Sequence[Node]]],
    spent: Money,
    queue: Mapping[str, Any],
    energy: wire.EnergyView | None = None,
) -> wire.JobDetail:
    row = asdict(changed_row(job, [attempt for attempt, _ in attempts], spent)) | dict(queue)
    return view(
        wire.JobDetail,
        job,
        **row,
        task=Raw(_encode(job.task)),
        origin=Raw(_encode(job.origin)),
        not_before=None
        if job.task.edge
        else job.held_until or (None if job.not_before == FAR else job.not_before),
        ceiling_micros=None if job.ceiling is None else job.ceiling.micros,
        attempts=[attempt_view(attempt, nodes) for attempt, nodes in attempts],
        plan_state=job.plan_state and _plan_state(job.plan_state),
        hold=job.hold and view(wire.HoldView, job.hold, text=job.hold.explain()),
        standbys=list(job.standbys),
        energy=energy,
    )


def _plan_state(plan_state: PlanState) -> wire.PlanStateView:
    return view(wire.PlanStateView, plan_state, placement=plan_state.place)


def market_row(known: MarketRecord, recent: Sequence[Observation]) -> wire.MarketListing:
    return view(
        wire.MarketListing,
        known,
        boot_s=known.boot_s / known.boots if known.boots else 0.0,
        recent=[
            view(
                wire.ObservationView,
                seen,
                rate_micros_per_hour=None if seen.rate is None else seen.rate.micros_per_hour,
            )
            for seen in recent
        ],
    )


def forecast_view(found: Forecast) -> wire.ForecastView:
    return view(
        wire.ForecastView,
        found,
        mean_micros=round(found.usd_mean * 1e6),
        p10_micros=round(found.usd_p10 * 1e6),
        p90_micros=round(found.usd_p90 * 1e6),
    )


def attempt_view(attempt: Attempt, nodes: Sequence[Node]) -> wire.AttemptView:
    return view(
        wire.AttemptView,
        attempt,
        placement=attempt.offer.key,
        offer=Raw(_encode(attempt.offer)),
        rate_micros_per_hour=attempt.offer.rate.micros_per_hour,
        reason=attempt.standing,
        failure=None if attempt.outcome in _NO_FAILURES else failure_of(attempt),
        repairs=list(attempt.repairs),
        stuck_ranks=list(attempt.stuck.ranks) if attempt.stuck else [],
        silent=view(wire.SilentView, attempt.silent) if attempt.silent else None,
        unsafe=view(wire.UnsafeView, attempt.unsafe) if attempt.unsafe else None,
        nodes=[view(wire.NodeView, node) for node in nodes],
    )


def node_row(
    job: JobRecord, attempt: Attempt, node: Node, allocation: Allocation | None
) -> wire.NodeListing:
    return view(
        wire.NodeListing,
        attempt,
        job=job.name,
        attempt=attempt.number,
        rank=node.rank,
        placement=attempt.offer.key,
        rank_phase=node.phase,
        rate_micros_per_hour=attempt.offer.rate.micros_per_hour,
        since=attempt.launched_at or attempt.created_at,
        heard_at=node.heard_at,
        devices=[] if allocation is None else list(allocation.devices),
        kept_until=attempt.kept_until if attempt.phase is AttemptPhase.KEPT else None,
        user=job.user,
        accelerator=attempt.offer.accelerator,
        accelerator_count=attempt.offer.accelerator_count * attempt.offer.accelerator_part,
        running_at=node.running_at,
        telemetry=node.telemetry,
        progress=node.progress,
    )


def machine_view(found: MachineStatus) -> wire.MachineView:
    machine, gang, holder = found.machine, found.gang, found.holder
    nodes = gang.nodes if gang else machine.task.nodes
    hardware = describe_hardware(machine, gang)
    rate = gang and gang.offer.rate.times(gang.nodes).micros_per_hour
    return view(
        wire.MachineView,
        machine,
        state=found.state,
        job=holder and holder.name,
        waiting=found.waiting,
        placement=gang and gang.offer.key,
        has=hardware if nodes == 1 else f"{nodes} nodes with {hardware}",
        nodes=nodes,
        since=machine.bought_at if gang else None,
        kept_until=gang.kept_until if gang and gang.phase is AttemptPhase.KEPT else None,
        keep_s=machine.task.keep.total_seconds(),
        rate_micros_per_hour=rate,
        spent_micros=found.spent.micros if gang else None,
    )


def charge_view(charge: Charge) -> wire.ChargeView:
    return view(
        wire.ChargeView,
        charge,
        attempt=int(charge.attempt_id.rpartition("-")[2]),
        rate_micros_per_hour=charge.rate.micros_per_hour,
        amount_micros=charge.amount.micros,
    )


def audit_row(job: str, bill: AuditedBill) -> wire.AuditRow:
    attempt, reported = bill.attempt, bill.reported
    return wire.AuditRow(
        job=job,
        attempt=attempt.number,
        gang=attempt.bought_as,
        placement=attempt.offer.key,
        billed_micros=bill.billed.micros,
        unsure_micros=attempt.unsure_bill.more.micros if attempt.unsure_bill else 0,
        reported_micros=None if reported is None else reported.micros,
        verdict=bill.verdict,
    )


def traffic_view(node: Node, sent: SentData) -> wire.TrafficView:
    return wire.TrafficView(
        attempt=int(node.attempt_id.rpartition("-")[2]),
        rank=node.rank,
        kind=sent.kind,
        output=sent.output if sent.kind is SentKind.OUTPUT else None,
        bytes=sent.bytes,
        micros_per_gb=None if sent.egress is None else sent.egress.micros,
        price_as_of=sent.egress_as_of,
    )


def cost_view(
    job: JobRecord,
    attempts: Sequence[Attempt],
    nodes: Sequence[Node],
    charges: Sequence[Charge],
    now: datetime,
    energy: wire.EnergyView | None = None,
) -> wire.CostView:
    timeline = trace(job, attempts, now)
    seconds = {use: length.total_seconds() for use, length in timeline.totals.items()}
    return wire.CostView(
        job=job.name,
        charges=[charge_view(charge) for charge in charges],
        total_micros=total(charges).micros,
        unsure_micros=sum(each.unsure_bill.more.micros for each in attempts if each.unsure_bill),
        queued_s=seconds[TimeUse.QUEUED],
        starting_s=seconds[TimeUse.STARTING],
        running_s=seconds[TimeUse.RUNNING],
        lost_s=seconds[TimeUse.LOST],
        ending_s=seconds[TimeUse.STOPPING],
        ended_s=seconds[TimeUse.ENDED],
        timeline=[view(wire.StretchView, each) for each in timeline.stretches],
        traffic=[traffic_view(node, each) for node in nodes for each in node.sent],
        energy=energy,
    )
