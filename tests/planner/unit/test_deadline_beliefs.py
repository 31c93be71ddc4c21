"""What a job knows of spot from its own launches."""

from cavvy.domain.markets import ObservationKind
from cavvy.planner.deadline.session import MarketBeliefs
from cavvy.planner.spot.spells import MarketMemory
from cavvy.planner.spot.view import UNSEEN, SpotQuote


def test_a_price_does_not_show_whether_spot_is_available() -> None:
    beliefs, memory = MarketBeliefs([0.3]), MarketMemory(1.0)
    beliefs.note(0.0, 0, ObservationKind.PRICE, 0.4)
    assert beliefs.known == [SpotQuote(False, 0.4, since_s=UNSEEN)]
    assert beliefs.assume(7200.0) == [SpotQuote(True, 0.4, since_s=UNSEEN)]
    memory.see(0.0, beliefs.known[0])
    first = memory.shown(2.0, beliefs.assume(7200.0)[0])
    assert (first.up, first.age, first.ratio) == (True, 0.5, 0.4)


def test_spot_that_may_have_returned_has_lasted_for_a_quarter_of_that_time() -> None:
    beliefs = MarketBeliefs([0.3])
    beliefs.note(0.0, 0, ObservationKind.GRANTED)
    beliefs.note(600.0, 0, ObservationKind.TAKEN)
    assert beliefs.assume(610.0) == [SpotQuote(False, 0.3, since_s=600.0)]
    assert beliefs.assume(1600.0) == [SpotQuote(True, 0.3, since_s=1350.0)]
    assert beliefs.assume(4600.0) == [SpotQuote(True, 0.3, since_s=3600.0)]


def test_a_change_between_two_observations_counts_as_halfway() -> None:
    beliefs = MarketBeliefs([0.3])
    beliefs.note(0.0, 0, ObservationKind.REFUSED)
    beliefs.note(900.0, 0, ObservationKind.REFUSED)
    beliefs.note(1500.0, 0, ObservationKind.GRANTED)
    assert beliefs.known == [SpotQuote(True, 0.3, since_s=1200.0)]


def test_an_assumption_adds_no_spell() -> None:
    memory = MarketMemory(1.0)
    memory.see(0.0, SpotQuote(True, 0.3))
    memory.see(1.0, SpotQuote(False, 0.3))
    assumed = memory.shown(5.0, SpotQuote(True, 0.3, since_s=3 * 3600.0))
    assert assumed.up
    assert assumed.age == 2.0
    assert assumed.away is memory.away


def test_a_change_of_price_alone_begins_a_new_state_now() -> None:
    memory = MarketMemory(1.0)
    memory.see(0.0, SpotQuote(True, 0.3, since_s=0.0))
    memory.see(4.0, SpotQuote(True, 1.2, since_s=0.0))
    assert not memory.up
    assert memory.age == 0.0


def rests(beliefs: MarketBeliefs, began: float, ended: float, kind: ObservationKind) -> float:
    """For how long the market rests after a launch that lasted this long."""
    beliefs.note(began, 0, ObservationKind.GRANTED)
    beliefs.note(ended, 0, kind)
    return beliefs.changes_at(ended) - ended


TAKEN, FAILED = ObservationKind.TAKEN, ObservationKind.FAILED


def test_a_market_rests_for_as_long_as_its_launches_in_a_row_have_not_worked() -> None:
    beliefs = MarketBeliefs([0.3], works_after_s=720.0)
    assert rests(beliefs, 0.0, 600.0, TAKEN) == 60.0  # the first may be a coincidence
    assert rests(beliefs, 660.0, 1260.0, TAKEN) == 1260.0
    assert rests(beliefs, 2520.0, 3120.0, FAILED) == 3120.0
    beliefs.note(3200.0, 0, ObservationKind.REFUSED)
    assert rests(beliefs, 6240.0, 6840.0, TAKEN) == 6840.0
    assert rests(beliefs, 13_680.0, 14_400.0, TAKEN) == 60.0  # this one has worked
    assert rests(beliefs, 14_460.0, 15_000.0, TAKEN) == 60.0


def test_launches_that_did_not_work_long_ago_do_not_count() -> None:
    beliefs = MarketBeliefs([0.3], works_after_s=720.0)
    for began in (0.0, 700.0):
        rests(beliefs, began, began + 600.0, TAKEN)
    assert rests(beliefs, 86_400.0, 87_000.0, TAKEN) == 60.0
    assert rests(beliefs, 87_060.0, 87_660.0, ObservationKind.ENDED) == float("inf")
    assert rests(beliefs, 87_700.0, 88_300.0, TAKEN) == 88_300.0 - 86_400.0


def test_the_lifetime_of_a_gang_counts_if_it_is_known() -> None:
    beliefs = MarketBeliefs([0.3], works_after_s=720.0)
    for at in (5000.0, 6000.0):
        beliefs.note(at - 100.0, 0, ObservationKind.GRANTED)  # a launch of another job
        beliefs.note(at, 0, TAKEN, lasted_s=4000.0)
    assert beliefs.barren == [None]
