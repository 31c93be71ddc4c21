"""What was seen of markets: written with the rows it follows from, read by market and summed up."""

from datetime import timedelta

import pytest
from tests.contract.store_suite import NOW, after, submit

from cavvy.domain.markets import Observation, ObservationKind
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, StaleVersion
from cavvy.store.sql import Store

REFUSED = Observation(
    market="p/r/a:0/spot", kind=ObservationKind.REFUSED, at=NOW, nodes=2, text="sold\x00out"
)
TAKEN = Observation(
    market="p/r/a:0/spot",
    kind=ObservationKind.TAKEN,
    at=after(60),
    seconds=90.5,
    nodes=2,
    text="no notice",
)
PRICE = Observation(
    market="p/r/B:0/spot", kind=ObservationKind.PRICE, at=after(5), rate=HourlyRate(123_456)
)


async def test_what_was_seen_is_read_by_market_oldest_first(store: Store) -> None:
    await store.commit(AtomicWrite(observations=[TAKEN, PRICE, REFUSED]))
    seen = await store.observations(["p/r/a:0/spot"], NOW)
    assert list(seen) == [replace(REFUSED, text="sold\ufffdout"), TAKEN]
    assert list(await store.observations(["p/r/a:0/spot"], after(1))) == [TAKEN]
    both = ["p/r/a:0/spot", "p/r/B:0/spot"]
    assert [each.kind for each in await store.observations(both, NOW)] == [
        ObservationKind.REFUSED,
        ObservationKind.PRICE,
        ObservationKind.TAKEN,
    ]
    assert [each.kind for each in await store.observations(both, NOW, limit=2)] == [
        ObservationKind.PRICE,
        ObservationKind.TAKEN,
    ]
    assert (await store.observations(both, NOW))[1].rate == HourlyRate(123_456)
    assert list(await store.observations([], NOW)) == []


async def test_sights_are_summed_up_by_market_and_kind_and_prices_are_not(store: Store) -> None:
    again = replace(TAKEN, at=after(99), seconds=9.5, nodes=1)
    await store.commit(AtomicWrite(observations=[TAKEN, PRICE, REFUSED, again]))
    refused, taken = await store.tallies(NOW)
    assert (refused.kind, refused.count, refused.first_at) == (ObservationKind.REFUSED, 1, NOW)
    assert (taken.market, taken.kind, taken.count) == ("p/r/a:0/spot", ObservationKind.TAKEN, 2)
    assert (taken.seconds, taken.node_seconds) == (100.0, 190.5)
    assert (taken.first_at, taken.last_at) == (after(60), after(99))
    assert [tally.count for tally in await store.tallies(after(61))] == [1]


async def test_a_write_that_fails_leaves_no_sight(store: Store) -> None:
    job = await submit(store, "j")
    with pytest.raises(StaleVersion):
        await store.commit(
            AtomicWrite(jobs=[replace(job, version=job.version + 7)], observations=[TAKEN])
        )
    assert list(await store.tallies(NOW)) == []


async def test_old_sights_are_forgotten(store: Store) -> None:
    await store.commit(AtomicWrite(observations=[REFUSED, TAKEN]))
    await store.forget_observations(NOW + timedelta(seconds=30))
    assert list(await store.observations([TAKEN.market], NOW)) == [TAKEN]
