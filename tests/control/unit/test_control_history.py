"""What a step of an attempt says about its market, and which markets everybody leaves alone for
a while.
"""

from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from tests.records import make_attempt_record

from cavvy.control.clock import ControlClock
from cavvy.control.decide.transitions import observations_of
from cavvy.control.markets import MarketHistory
from cavvy.domain.jobs import Attempt, AttemptOutcome, AttemptPhase, Node
from cavvy.domain.markets import Observation, ObservationKind
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite
from cavvy.store.open import MemoryStore

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
SPOT = Offer(
    provider="p", region="r", instance_type="t", purchase=Purchase.SPOT, rate=HourlyRate(300)
)
ATTEMPT = make_attempt_record(
    NOW - 100 * SECOND,
    SPOT,
    nodes=2,
    phase=AttemptPhase.RUNNING,
    reason="because",
    since=NOW,
    launched_at=NOW - 90 * SECOND,
)
NODES = tuple(
    Node(attempt_id="j-1", project="p", rank=rank, claimed_at=NOW - (40 - rank) * SECOND)
    for rank in range(2)
)


def seen(
    phase: AttemptPhase,
    nodes: tuple[Node, ...] = NODES,
    before: Attempt = ATTEMPT,
    **changes: object,
) -> Observation | None:
    after = replace(before, phase=phase, **changes)  # type: ignore[arg-type]
    found = observations_of(before, after, nodes, NOW)
    assert len(found) <= 1
    if not found:
        return None
    assert (found[0].market, found[0].nodes, found[0].at) == (SPOT.key, 2, NOW)
    return found[0]


@pytest.mark.parametrize(
    ("outcome", "drill", "kind"),
    [
        (AttemptOutcome.PREEMPTED, None, ObservationKind.TAKEN),
        (AttemptOutcome.PREEMPTED, NOW, ObservationKind.ENDED),  # we took it away ourselves
        (AttemptOutcome.NODE, None, ObservationKind.FAILED),
        (AttemptOutcome.TIMEOUT, None, ObservationKind.FAILED),
        (AttemptOutcome.CAPACITY, None, ObservationKind.REFUSED),
        (AttemptOutcome.SUCCEEDED, None, ObservationKind.ENDED),
        (AttemptOutcome.EXIT, None, ObservationKind.ENDED),
        (AttemptOutcome.STOPPED, None, ObservationKind.ENDED),
        (AttemptOutcome.LIMIT, None, ObservationKind.ENDED),
    ],
)
def test_each_end_of_a_life_says_something_of_its_market(
    outcome: AttemptOutcome, drill: datetime | None, kind: ObservationKind
) -> None:
    found = seen(AttemptPhase.ENDING, outcome=outcome, drill_until=drill)
    assert found is not None
    assert (found.kind, found.seconds) == (kind, 90)


def test_a_gang_that_is_taken_was_told_or_not() -> None:
    for nodes, text in (
        (NODES, "without notice"),
        ((NODES[0], replace(NODES[1], notice_until=NOW)), "with notice"),
    ):
        found = seen(AttemptPhase.ENDING, nodes, outcome=AttemptOutcome.PREEMPTED)
        assert found is not None
        assert found.text == text


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (AttemptOutcome.CAPACITY, ObservationKind.REFUSED),
        (AttemptOutcome.REFUSED, ObservationKind.REFUSED),
        (AttemptOutcome.STOPPED, None),
        (AttemptOutcome.NODE, None),
    ],
)
def test_a_gang_that_was_never_granted_has_no_life(
    outcome: AttemptOutcome, kind: ObservationKind | None
) -> None:
    found = seen(AttemptPhase.ENDING, before=replace(ATTEMPT, launched_at=None), outcome=outcome)
    assert (found and found.kind) == kind
    assert found is None or (found.seconds, found.text) == (0, "because")


def test_a_boot_takes_from_the_launch_to_the_last_report() -> None:
    assert seen(AttemptPhase.BOOTING) == Observation(
        market=SPOT.key, kind=ObservationKind.GRANTED, at=NOW, nodes=2
    )
    found = seen(AttemptPhase.RUNNING)
    assert found is not None
    assert (found.kind, found.seconds) == (ObservationKind.BOOTED, 51)
    assert seen(AttemptPhase.RUNNING, (NODES[0], replace(NODES[1], claimed_at=None))) is None
    assert seen(AttemptPhase.RUNNING, adopted_at=NOW) is None, "it was there already"
    early = seen(AttemptPhase.RUNNING, launched_at=NOW)
    assert early is not None
    assert early.seconds == 0


def test_shared_hosts_are_no_market() -> None:
    own = replace(ATTEMPT, offer=replace(SPOT, shared=True), outcome=AttemptOutcome.NODE)
    for phase in AttemptPhase:
        assert observations_of(own, replace(own, phase=phase), NODES, NOW) == []
    for phase in (AttemptPhase.KEPT, AttemptPhase.ENDED, AttemptPhase.LAUNCHING):
        assert seen(phase, outcome=AttemptOutcome.NODE) is None


class Hours:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at


async def test_a_market_that_said_no_is_left_alone_by_all_for_a_minute_and_a_yes_ends_that() -> (
    None
):
    store, hours = MemoryStore(make_id=lambda: "test"), Hours()

    async def cooldowns(*observations: ObservationKind) -> bool:
        saw = [Observation(market=SPOT.key, kind=kind, at=hours.at) for kind in observations]
        await store.commit(AtomicWrite(observations=saw))
        return SPOT.key in await MarketHistory(store, cast(ControlClock, hours)).cooling_down()

    assert not await cooldowns()
    assert await cooldowns(ObservationKind.REFUSED)
    hours.at += 59 * SECOND
    assert await cooldowns()
    hours.at += SECOND
    assert not await cooldowns()
    for kind in (ObservationKind.TAKEN, ObservationKind.FAILED):
        hours.at += 3600 * SECOND
        assert not await cooldowns()
        assert await cooldowns(kind)
        hours.at += SECOND
        assert not await cooldowns(ObservationKind.GRANTED)


async def test_a_market_that_takes_nodes_back_before_they_boot_is_left_alone_for_as_long() -> None:
    store, hours = MemoryStore(make_id=lambda: "test"), Hours()

    async def cools_down() -> bool:
        return SPOT.key in await MarketHistory(store, cast(ControlClock, hours)).cooling_down()

    async def see(kind: ObservationKind, seconds: float = 0.0) -> None:
        saw = Observation(market=SPOT.key, kind=kind, at=hours.at, seconds=seconds)
        await store.commit(AtomicWrite(observations=[saw]))

    for wait_s in (60, 1500):
        await see(ObservationKind.GRANTED)
        assert not await cools_down()
        hours.at += 20 * SECOND
        await see(ObservationKind.TAKEN, 20.0)
        assert await cools_down()
        hours.at += wait_s * SECOND
    # The bad period had lasted for 100 s when the second launch ended.
    assert not await cools_down()
    await see(ObservationKind.GRANTED)
    hours.at += 20 * SECOND
    await see(ObservationKind.TAKEN, 20.0)
    hours.at += 100 * SECOND
    assert not await cools_down()  # The market was not tried for so long that this is the first
    for _ in range(5):
        await see(ObservationKind.GRANTED)
        hours.at += 20 * SECOND
        await see(ObservationKind.TAKEN, 20.0)
        hours.at += 300 * SECOND
    hours.at += 700 * SECOND
    assert await cools_down()
    await see(ObservationKind.GRANTED)
    hours.at += 3600 * SECOND
    await see(ObservationKind.TAKEN, 3600.0)
    hours.at += 60 * SECOND
    assert not await cools_down()


async def test_a_price_is_written_down_when_it_is_another_and_by_every_server_once() -> None:
    store, hours = MemoryStore(make_id=lambda: "test"), Hours()
    history = MarketHistory(store, cast(ControlClock, hours))
    fixed = replace(SPOT, purchase=Purchase.ON_DEMAND)

    async def told() -> list[int]:
        found = await store.observations([SPOT.key, fixed.key], NOW - timedelta(days=1))
        return [each.rate.micros_per_hour for each in found if each.rate is not None]

    dearer = replace(SPOT, rate=HourlyRate(400))
    for offers in ([SPOT, fixed], [SPOT], [dearer], [dearer], [SPOT]):
        hours.at += SECOND
        await history.note_prices(offers)
    assert await told() == [300, 400, 300]
    await MarketHistory(store, cast(ControlClock, hours)).note_prices([SPOT])
    assert await told() == [300, 400, 300]
