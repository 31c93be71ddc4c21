"""Derives market observations from the phase changes of an attempt."""

from collections.abc import Sequence
from datetime import datetime

from cavvy.domain.jobs import Attempt, AttemptOutcome, AttemptPhase, Node
from cavvy.domain.markets import Observation, ObservationKind
from cavvy.domain.values import replace


def observations_of(
    before: Attempt, after: Attempt, nodes: Sequence[Node], now: datetime
) -> list[Observation]:
    """Return the market observations that follow from a change of an attempt's phase. Shared hosts
    belong to no market.
    """
    if after.offer.shared:
        return []
    seen = Observation(
        market=after.offer.key, kind=ObservationKind.GRANTED, at=now, nodes=after.nodes
    )
    match after.phase:
        case AttemptPhase.BOOTING:
            return [seen]
        case AttemptPhase.RUNNING:
            claimed = [node.claimed_at for node in nodes if node.claimed_at is not None]
            if (
                after.launched_at is None
                or len(claimed) < after.nodes
                or after.adopted_at is not None
            ):
                return []
            booted = (max(claimed) - after.launched_at).total_seconds()
            return [replace(seen, kind=ObservationKind.BOOTED, seconds=max(0.0, booted))]
        case AttemptPhase.ENDING if before.launched_at is None:
            if after.outcome in (AttemptOutcome.CAPACITY, AttemptOutcome.REFUSED):
                return [replace(seen, kind=ObservationKind.REFUSED, text=after.reason)]
            return []
        case AttemptPhase.ENDING if after.launched_at is not None:
            return [
                _life(
                    replace(seen, seconds=(now - after.launched_at).total_seconds()), after, nodes
                )
            ]
        case _:
            return []


def _life(seen: Observation, attempt: Attempt, nodes: Sequence[Node]) -> Observation:
    """Return the market observation that the end of a gang causes. A drill or a move does not count
    as a preemption.
    """
    if attempt.outcome is AttemptOutcome.PREEMPTED and attempt.drill_until is None:
        told = any(node.notice_until is not None for node in nodes)
        return replace(
            seen, kind=ObservationKind.TAKEN, text="with notice" if told else "without notice"
        )
    if attempt.outcome is AttemptOutcome.CAPACITY:
        return replace(seen, kind=ObservationKind.REFUSED, text=attempt.reason)
    failed = attempt.outcome in (AttemptOutcome.NODE, AttemptOutcome.TIMEOUT)
    return replace(
        seen,
        kind=ObservationKind.FAILED if failed else ObservationKind.ENDED,
        text=attempt.reason if failed else "",
    )
