"""Observed spot markets, and cost forecasts for tasks with a deadline."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from cavvy.client.wire import MarketListing
    from cavvy.domain.offers import Offer
    from cavvy.domain.tasks import TaskSpec
    from cavvy.domain.units import Money
    from cavvy.planner.deadline.forecast import Forecast
    from cavvy.planner.markets import MarketKnowledge

_TIMEOUT_S = (
    5.0  # maximum seconds for one answer; if there is no answer, the plan uses no observations
)
# number of markets in a forecast, the cheapest first; more would take seconds and change the result
# little
_MARKETS = 3


def seen_here() -> "dict[str, MarketListing]":
    """Return the observations of the offers that this installation used, by offer key. The result
    is empty if no server runs.
    """
    from cavvy.client.contexts import may_have_server
    from cavvy.client.errors import ApiError
    from cavvy.client.state import default_home

    try:
        if not may_have_server(default_home()):
            return {}
        from cavvy.cli.reach.session import make_patience
        from cavvy.client import connect

        with connect(start=False, timeout_s=_TIMEOUT_S, patience=make_patience(0)) as client:
            return {row.market: row for row in client.markets()}
    except (ApiError, OSError):
        return {}


def describe_seen(seen: "Sequence[MarketListing]") -> str | None:
    """Return a summary such as "granted 9 of 12 launches, reclaimed 3 times in 41.0 h, boots
    in 95 s", or None.
    """
    if not seen:
        return None
    granted, refused = sum(row.granted for row in seen), sum(row.refused for row in seen)
    parts = [f"granted {granted} of {granted + refused} launches"]
    if any(row.lives for row in seen):
        hours = sum(row.node_hours for row in seen)
        parts.append(f"reclaimed {sum(row.taken for row in seen)} times in {hours:.1f} h")
    if boots := sum(row.boots for row in seen):
        parts.append(f"boots in {sum(row.boots * row.boot_s for row in seen) / boots:.0f} s")
    return ", ".join(parts)


def tell_forecast(
    task: "TaskSpec", offers: "Sequence[Offer]", now: "datetime", egress: "Mapping[str, Money]"
) -> "Sequence[Forecast]":
    """Return one forecast for each value of `resources.spot`. The result is empty if the task has
    no deadline or the deadline policy cannot be used.
    """
    from cavvy.planner.deadline.forecast import KINDS, foresee
    from cavvy.planner.deadline.inputs import JobProgress, find_inputs
    from cavvy.planner.placements import deadline_of

    deadline = deadline_of(task, now)
    if deadline is None:
        return ()
    knowledge = _knowledge(seen_here())
    progress = JobProgress(submitted_at=now, deadline=deadline, egress=egress)
    inputs = find_inputs(task, offers, knowledge, progress, most=_MARKETS)
    if inputs is None:
        return ()
    return [foresee(inputs, knowledge, progress, 0.0, kind) for kind in KINDS]


def _knowledge(rows: "dict[str, MarketListing]") -> "MarketKnowledge":
    from cavvy.domain.markets import Observation, ObservationKind
    from cavvy.domain.units import HourlyRate
    from cavvy.planner.markets import MarketKnowledge, MarketRecord

    standings = {
        key: MarketRecord(
            market=key,
            granted=row.granted,
            refused=row.refused,
            refused_at=row.refused_at,
            boots=row.boots,
            boot_s=row.boot_s * row.boots,
            lives=row.lives,
            taken=row.taken,
            failed=row.failed,
            node_hours=row.node_hours,
        )
        for key, row in rows.items()
    }
    recent = {
        key: [
            Observation(
                market=key,
                kind=ObservationKind(seen.kind),
                at=seen.at,
                seconds=seen.seconds,
                rate=None
                if seen.rate_micros_per_hour is None
                else HourlyRate(seen.rate_micros_per_hour),
            )
            for seen in row.recent
        ]
        for key, row in rows.items()
    }
    return MarketKnowledge(standings=standings, recent=recent)
