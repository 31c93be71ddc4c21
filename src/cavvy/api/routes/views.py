"""From the domain's nouns to what the API shows: one function for each, and nothing secret
passes.
"""

from collections.abc import Sequence
from datetime import datetime

from msgspec import Raw
from msgspec.json import Encoder
from msgspec.structs import asdict

from cavvy.client import wire
from cavvy.control.markets.failure_kinds import failure_of
from cavvy.costs.metering import total
from cavvy.costs.timeline import TimeUse, trace
from cavvy.domain.allocations import Allocation
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import Attempt, AttemptOutcome, AttemptPhase, Job, Node, PlanState
from cavvy.domain.markets import Observation
from cavvy.domain.units import Money
from cavvy.planner.deadline.forecast import Forecast
from cavvy.planner.markets import MarketRecord
from cavvy.store.base import JobSummary, summarize

_encode = Encoder().encode
_NO_FAILURES = (None, AttemptOutcome.SUCCEEDED, AttemptOutcome.STOPPED)


def job_row(job: JobSummary) -> wire.JobListing:
    return wire.JobListing(
        id=job.id,
        project=job.project,
        name=job.name,
        user=job.user,
        phase=job.phase,
        reason=job.reason,
        priority=job.priority,
        submitted_at=job.submitted_at,
        since=job.since,
        ended_at=job.ended_at,
        attempt=job.attempt,
        exit_code=job.exit_code,
        placement=job.place,
        spent_micros=job.spent.micros,
        held=job.held,
    )


def changed_row(job: Job, attempts: Sequence[Attempt], spent: Money) -> wire.JobListing:
    """The row of a job that was just read or written whole."""
    return job_row(summarize(job, _place(job, attempts), spent))


def job_detail(
    job: Job,
    attempts: Sequence[tuple[Attempt, Sequence[Node]]],
    spent: Money,
    queue_position: int | None,
) -> wire.JobDetail:
    return wire.JobDetail(
        **asdict(changed_row(job, [attempt for attempt, _ in attempts], spent)),
        task=Raw(_encode(job.task)),
        origin=Raw(_encode(job.origin)),
        not_before=job.held_until or job.not_before,
        stop_reason=job.stop_reason,
        stop_cause=job.stop_cause,
        consented=job.consented,
        ceiling_micros=None if job.ceiling is None else job.ceiling.micros,
        queue_position=queue_position,
        attempts=[attempt_view(attempt, nodes) for attempt, nodes in attempts],
        plan_state=None if job.plan_state is None else _plan_state(job.plan_state),
        standbys=list(job.standbys),
        avoid=dict(job.avoid),
    )


def _place(job: Job, attempts: Sequence[Attempt]) -> str | None:
    """Where the job's own gang is or was; one beside it may be the latest."""
    own = next((attempt for attempt in attempts if attempt.number == job.attempt), None)
    return own.offer.key if own is not None else None


def _plan_state(plan_state: PlanState) -> wire.PlanStateView:
    return wire.PlanStateView(
        at=plan_state.at, mode=plan_state.mode, reason=plan_state.reason, placement=plan_state.place
    )


def market_row(known: MarketRecord, recent: Sequence[Observation]) -> wire.MarketListing:
    return wire.MarketListing(
        market=known.market,
        granted=known.granted,
        refused=known.refused,
        refused_at=known.refused_at,
        lives=known.lives,
        taken=known.taken,
        failed=known.failed,
        node_hours=known.node_hours,
        boots=known.boots,
        boot_s=known.boot_s / known.boots if known.boots else 0.0,
        preemptions_per_hour=known.preemptions_per_hour,
        recent=[
            wire.ObservationView(
                kind=seen.kind,
                at=seen.at,
                seconds=seen.seconds,
                rate_micros_per_hour=None if seen.rate is None else seen.rate.micros_per_hour,
            )
            for seen in recent
        ],
    )


def forecast_view(found: Forecast) -> wire.ForecastView:
    return wire.ForecastView(
        runs=found.runs,
        mean_micros=round(found.usd_mean * 1e6),
        p10_micros=round(found.usd_p10 * 1e6),
        p90_micros=round(found.usd_p90 * 1e6),
        in_time=found.in_time,
        hours_p50=found.hours_p50,
        hours_p90=found.hours_p90,
    )


def attempt_view(attempt: Attempt, nodes: Sequence[Node]) -> wire.AttemptView:
    return wire.AttemptView(
        id=attempt.id,
        number=attempt.number,
        gang=attempt.gang,
        placement=attempt.offer.key,
        offer=Raw(_encode(attempt.offer)),
        rate_micros_per_hour=attempt.offer.rate.micros_per_hour,
        phase=attempt.phase,
        reason=attempt.standing,
        outcome=attempt.outcome,
        failure=None if attempt.outcome in _NO_FAILURES else failure_of(attempt),
        exit_code=attempt.exit_code,
        first_failed_rank=attempt.first_failed_rank,
        created_at=attempt.created_at,
        since=attempt.since,
        launched_at=attempt.launched_at,
        expected_at=attempt.expected_at,
        running_at=attempt.running_at,
        finished_at=attempt.finished_at,
        ended_at=attempt.ended_at,
        checkpoint_at=attempt.checkpoint_at,
        drill_until=attempt.drill_until,
        nodes=[node_view(node) for node in nodes],
    )


def node_view(node: Node) -> wire.NodeView:
    """A rank without its claim, which is its agent's secret."""
    return wire.NodeView(
        rank=node.rank,
        phase=node.phase,
        address=node.address,
        exit_code=node.exit_code,
        exit_outcome=node.exit_outcome,
        exit_reason=node.exit_reason,
        exit_failure=node.exit_failure,
        claimed_at=node.claimed_at,
        running_at=node.running_at,
        exited_at=node.exited_at,
        heard_at=node.heard_at,
        telemetry=node.telemetry,
        progress=node.progress,
    )


def node_row(
    job: Job, attempt: Attempt, node: Node, allocation: Allocation | None
) -> wire.NodeListing:
    return wire.NodeListing(
        project=attempt.project,
        job=job.name,
        job_id=job.id,
        attempt=attempt.number,
        rank=node.rank,
        gang=attempt.gang,
        placement=attempt.offer.key,
        phase=attempt.phase,
        rank_phase=node.phase,
        rate_micros_per_hour=attempt.offer.rate.micros_per_hour,
        since=attempt.launched_at or attempt.created_at,
        heard_at=node.heard_at,
        devices=[] if allocation is None else list(allocation.devices),
        kept_until=attempt.kept_until if attempt.phase is AttemptPhase.KEPT else None,
    )


def event_view(event: Event) -> wire.EventView:
    return wire.EventView(
        id=event.id,
        at=event.at,
        attempt=event.attempt,
        rank=event.rank,
        kind=event.kind,
        fact=event.fact,
        text=event.text,
    )


def charge_view(charge: Charge) -> wire.ChargeView:
    return wire.ChargeView(
        attempt=int(charge.attempt_id.rpartition("-")[2]),
        rank=charge.rank,
        kind=charge.kind,
        since=charge.since,
        until=charge.until,
        rate_micros_per_hour=charge.rate.micros_per_hour,
        amount_micros=charge.amount.micros,
    )


def cost_view(
    job: Job, attempts: Sequence[Attempt], charges: Sequence[Charge], now: datetime
) -> wire.CostView:
    timeline = trace(job, attempts, now)
    totals = timeline.totals
    return wire.CostView(
        job=job.name,
        charges=[charge_view(charge) for charge in charges],
        total_micros=total(charges).micros,
        queued_s=totals[TimeUse.QUEUED].total_seconds(),
        starting_s=totals[TimeUse.STARTING].total_seconds(),
        running_s=totals[TimeUse.RUNNING].total_seconds(),
        lost_s=totals[TimeUse.LOST].total_seconds(),
        ending_s=totals[TimeUse.STOPPING].total_seconds(),
        timeline=[
            wire.StretchView(
                spell=each.spell, since=each.since, until=each.until, attempt=each.attempt
            )
            for each in timeline.stretches
        ],
    )
