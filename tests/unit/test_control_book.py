"""What a step of an attempt says about its market, and which markets everybody leaves alone for
a while.
"""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from cavvy.control.clock import Clock
from cavvy.control.markets.book import MarketBook, sights_of
from cavvy.domain.jobs import Attempt, AttemptPhase, Node, Outcome
from cavvy.domain.markets import Observation, Sight
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.store.base import Changes
from cavvy.store.memory import MemoryStore

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
SPOT = Offer(
    provider="p", region="r", instance_type="t", purchase=Purchase.SPOT, rate=HourlyRate(300)
)
ATTEMPT = Attempt(
    id="j-1",
    job_id="j",
    project="p",
    number=1,
    gang="g",
    offer=SPOT,
    nodes=2,
    phase=AttemptPhase.RUNNING,
    reason="because",
    created_at=NOW - 100 * SECOND,
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
    found = sights_of(before, after, nodes, NOW)
    assert len(found) <= 1
    if not found:
        return None
    assert (found[0].market, found[0].nodes, found[0].at) == (SPOT.key, 2, NOW)
    return found[0]


@pytest.mark.parametrize(
    ("outcome", "drill", "sight"),
    [
        (Outcome.PREEMPTED, None, Sight.TAKEN),
        (Outcome.PREEMPTED, NOW, Sight.ENDED),  # we took it away ourselves
        (Outcome.NODE, None, Sight.FAILED),
        (Outcome.TIMEOUT, None, Sight.FAILED),
        (Outcome.CAPACITY, None, Sight.REFUSED),
        (Outcome.SUCCEEDED, None, Sight.ENDED),
        (Outcome.EXIT, None, Sight.ENDED),
        (Outcome.STOPPED, None, Sight.ENDED),
        (Outcome.LIMIT, None, Sight.ENDED),
    ],
)
def test_each_end_of_a_life_says_something_of_its_market(
    outcome: Outcome, drill: datetime | None, sight: Sight
) -> None:
    found = seen(AttemptPhase.ENDING, outcome=outcome, drill_until=drill)
    assert found is not None
    assert (found.sight, found.seconds) == (sight, 90)


def test_a_gang_that_is_taken_was_told_or_not() -> None:
    for nodes, text in (
        (NODES, "without notice"),
        ((NODES[0], replace(NODES[1], notice_until=NOW)), "with notice"),
    ):
        found = seen(AttemptPhase.ENDING, nodes, outcome=Outcome.PREEMPTED)
        assert found is not None
        assert found.text == text


@pytest.mark.parametrize(
    ("outcome", "sight"),
    [
        (Outcome.CAPACITY, Sight.REFUSED),
        (Outcome.REFUSED, Sight.REFUSED),
        (Outcome.STOPPED, None),
        (Outcome.NODE, None),
    ],
)
def test_a_gang_that_was_never_granted_has_no_life(outcome: Outcome, sight: Sight | None) -> None:
    found = seen(AttemptPhase.ENDING, before=replace(ATTEMPT, launched_at=None), outcome=outcome)
    assert (found and found.sight) == sight
    assert found is None or (found.seconds, found.text) == (0, "because")


def test_a_boot_takes_from_the_launch_to_the_last_report() -> None:
    assert seen(AttemptPhase.BOOTING) == Observation(
        market=SPOT.key, sight=Sight.GRANTED, at=NOW, nodes=2
    )
    found = seen(AttemptPhase.RUNNING)
    assert found is not None
    assert (found.sight, found.seconds) == (Sight.BOOTED, 51)
    assert seen(AttemptPhase.RUNNING, (NODES[0], replace(NODES[1], claimed_at=None))) is None
    assert seen(AttemptPhase.RUNNING, adopted_at=NOW) is None, "it was there already"
    early = seen(AttemptPhase.RUNNING, launched_at=NOW)
    assert early is not None
    assert early.seconds == 0


def test_shared_hosts_are_no_market() -> None:
    own = replace(ATTEMPT, offer=replace(SPOT, shared=True), outcome=Outcome.NODE)
    for phase in AttemptPhase:
        assert sights_of(own, replace(own, phase=phase), NODES, NOW) == []
    for phase in (AttemptPhase.KEPT, AttemptPhase.ENDED, AttemptPhase.LAUNCHING):
        assert seen(phase, outcome=Outcome.NODE) is None


class Hours:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at


def test_a_market_that_said_no_is_left_alone_by_all_for_a_minute_and_a_yes_ends_that() -> None:
    async def story() -> None:
        store, hours = MemoryStore(make_id=lambda: "test"), Hours()

        async def rests(*sights: Sight) -> bool:
            saw = [Observation(market=SPOT.key, sight=sight, at=hours.at) for sight in sights]
            await store.commit(Changes(observations=saw))
            return SPOT.key in await MarketBook(store, cast(Clock, hours)).resting()

        assert not await rests()
        assert await rests(Sight.REFUSED)
        hours.at += 59 * SECOND
        assert await rests()
        hours.at += SECOND
        assert not await rests()
        for sight in (Sight.TAKEN, Sight.FAILED):
            hours.at += 3600 * SECOND
            assert not await rests()
            assert await rests(sight)
            hours.at += SECOND
            assert not await rests(Sight.GRANTED)

    asyncio.run(story())


def test_a_price_is_written_down_when_it_is_another_and_by_every_server_once() -> None:
    async def story() -> None:
        store, hours = MemoryStore(make_id=lambda: "test"), Hours()
        book = MarketBook(store, cast(Clock, hours))
        fixed = replace(SPOT, purchase=Purchase.ON_DEMAND)

        async def told() -> list[int]:
            found = await store.observations([SPOT.key, fixed.key], NOW - timedelta(days=1))
            return [each.rate.micros_per_hour for each in found if each.rate is not None]

        dearer = replace(SPOT, rate=HourlyRate(400))
        for offers in ([SPOT, fixed], [SPOT], [dearer], [dearer], [SPOT]):
            hours.at += SECOND
            await book.note_prices(offers)
        assert await told() == [300, 400, 300]
        await MarketBook(store, cast(Clock, hours)).note_prices([SPOT])
        assert await told() == [300, 400, 300]

    asyncio.run(story())
