"""How a replica's time and bill are divided among requests."""

import itertools
import random
from datetime import UTC, datetime, timedelta

import pytest

from cavvy.capabilities.serving.bills import (
    DividedBill,
    KeyWork,
    ReplicaBill,
    RequestCounts,
    share_counts,
)
from cavvy.capabilities.serving.decide.request_costs import Division, divide_bill
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts
from cavvy.capabilities.serving.gateway.work import ReplicaWork
from cavvy.domain.ledger import EntryKind, QuantityUnit, TokenUse
from cavvy.domain.units import HourlyRate

T0 = datetime(2026, 11, 1, tzinfo=UTC)
S = 1_000_000


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def bill(amount: int, until: float, divided: DividedBill | None = None) -> ReplicaBill:
    return ReplicaBill(
        attempt_id="r-1",
        job_id="r",
        since=T0,
        until=at(until),
        amounts={EntryKind.NODE: amount},
        rate=HourlyRate(),
        divided=divided,
    )


def counts(epoch: str = "g", **work_s: float) -> RequestCounts:
    work = {key: KeyWork(requests=2, work_us=round(s * S)) for key, s in work_s.items()}
    return {epoch: work}


def amounts(division: object) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for key, postings in division.postings.items():  # type: ignore[attr-defined]  # a Division
        for each in postings:
            place = (str(each.kind), key)
            found[place] = found.get(place, 0) + each.amount.micros
    return found


def test_a_bill_is_divided_by_time() -> None:
    division = divide_bill(bill(1000, 100), counts(a=30, b=10), at(20))
    assert amounts(division) == {
        ("node", ""): -1000,
        ("request", "a"): 300,
        ("request", "b"): 100,
        ("idle", ""): 400,
        ("cold start", ""): 200,
    }
    assert division is not None
    (entry,) = division.postings["a"]
    assert (entry.quantity, entry.unit) == (2, QuantityUnit.REQUESTS)
    assert divide_bill(bill(1000, 100, division.divided), counts(a=99), at(20)) is None


def test_only_what_is_new_is_divided() -> None:
    first = divide_bill(bill(1000, 100), counts(a=30), at(0))
    assert first is not None
    again = divide_bill(bill(2000, 200, first.divided), counts(a=130), at(0))
    assert amounts(again) == {("node", ""): -1000, ("request", "a"): 1000}
    other = divide_bill(bill(2000, 200, first.divided), counts("h", a=50), at(0))
    assert amounts(other) == {("node", ""): -1000, ("request", "a"): 500, ("idle", ""): 500}
    silent = divide_bill(bill(2000, 200, first.divided), {}, None)
    assert amounts(silent) == {("node", ""): -1000, ("idle", ""): 1000}


def test_a_correction_is_idle_and_a_replica_that_was_never_ready_is_cold() -> None:
    first = divide_bill(bill(1000, 100), counts(a=30), at(0))
    assert first is not None
    less = divide_bill(bill(900, 90, first.divided), counts(a=40), at(0))
    assert amounts(less) == {("node", ""): 100, ("idle", ""): -100}
    assert amounts(divide_bill(bill(1000, 100), {}, None)) == {
        ("node", ""): -1000,
        ("cold start", ""): 1000,
    }


def requests(*divisions: Division | None) -> int:
    return sum(
        each.quantity
        for division in divisions
        if division is not None
        for postings in division.postings.values()
        for each in postings
    )


def told(requests: int, work_us: int) -> RequestCounts:
    return {"g": {"": KeyWork(requests=requests, work_us=work_us)}}


def test_a_report_that_is_older_than_the_last_division_changes_nothing() -> None:
    first = divide_bill(bill(1000, 100), told(10, 100), at(0))
    assert first is not None
    stale = divide_bill(bill(2000, 200, first.divided), told(4, 40), at(0))
    assert stale is not None
    third = divide_bill(bill(3000, 300, stale.divided), told(11, 110), at(0))
    assert (requests(first), requests(stale), requests(third)) == (10, 0, 1)


def test_requests_are_counted_even_if_their_part_of_the_bill_is_nothing() -> None:
    """Their time is too short, the provider corrects the bill, or they are reported too late."""
    short = divide_bill(bill(10, 100), told(5, 3), at(0))
    assert short is not None
    less = divide_bill(bill(9, 90, short.divided), told(7, 4), at(0))
    assert less is not None
    same = bill(9, 90, less.divided)
    assert divide_bill(same, told(9, 5), at(0)) is None, "the next amount pays for them"
    late = divide_bill(same, told(9, 5), at(0), final=True)
    assert late is not None
    assert (requests(short), requests(less), requests(late)) == (5, 2, 2)
    assert amounts(late) == {("request", ""): 0}
    assert divide_bill(bill(9, 90, late.divided), told(9, 6), at(0), final=True) is None


def test_requests_of_a_replica_without_a_price_are_counted_while_it_runs() -> None:
    first = divide_bill(bill(0, 45), counts(a=3), at(0))
    assert first is not None
    (entry,) = first.postings["a"]
    assert (entry.amount.micros, entry.quantity) == (0, 2)
    more = {"g": {"a": KeyWork(requests=5, work_us=9 * S)}}
    assert divide_bill(bill(0, 45, first.divided), more, at(0)) is None
    again = divide_bill(bill(0, 90, first.divided), more, at(0))
    assert again is not None
    assert [(key, each.quantity) for key, (each,) in again.postings.items()] == [("a", 3)]


def test_the_work_of_several_gateways_is_added_up() -> None:
    """Each has its own counters; one that was not told for a while is not counted again."""
    first = divide_bill(bill(1000, 100), counts(a=10) | counts("h", a=20, b=30), at(0))
    assert amounts(first)["request", "a"] == 300
    assert amounts(first)["request", "b"] == 300
    assert first is not None
    second = divide_bill(bill(2000, 200, first.divided), counts(a=20), at(0))
    assert amounts(second)["request", "a"] == 100
    assert second is not None
    more = counts(a=20) | counts("h", a=30, b=30)
    third = divide_bill(bill(3000, 300, second.divided), more, at(0))
    assert amounts(third) == {("node", ""): -1000, ("request", "a"): 100, ("idle", ""): 900}


@pytest.mark.parametrize("seed", range(20))
def test_entries_add_up_to_nothing_and_parts_to_the_bill(seed: int) -> None:
    dice = random.Random(seed)
    divided, total, moved, until = None, 0, 0, 0.0
    work: dict[str, float] = {}
    for _ in range(30):
        until += dice.random() * 10**6
        total = max(0, total + dice.randrange(-50, 10**6))
        for key in dice.sample(["", "a", "b"], 2):
            work[key] = work.get(key, 0.0) + dice.random() * 100
        epoch = dice.choice("gggh")
        told = {epoch: {key: KeyWork(requests=1, work_us=int(s * S)) for key, s in work.items()}}
        division = divide_bill(bill(total, until, divided), told, at(dice.choice([0, 50])))
        if division is None:
            continue
        found = amounts(division)
        assert sum(found.values()) == 0
        moved += sum(each for (kind, _), each in found.items() if kind != "node")
        divided = division.divided
    assert moved == total


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_those_of_a_replica_that_is_shared_equally(seed: int) -> None:
    dice, work = random.Random(seed), ReplicaWork(KeptCounts())
    requests = []
    for _ in range(40):
        start = dice.randrange(0, 200)
        requests.append((start, start + dice.randrange(1, 60), dice.choice("ab")))
    moments = sorted({moment for start, end, _ in requests for moment in (start, end)})
    truth = {"a": 0.0, "b": 0.0}
    for since, until in itertools.pairwise(moments):
        here = [key for start, end, key in requests if start <= since and until <= end]
        for key in here:
            truth[key] += (until - since) / len(here)
    marks: dict[int, float] = {}
    shares = 0.0
    for moment in moments:
        for number, (start, end, key) in enumerate(requests):
            if end == moment:
                shares += work.share_s(marks[number], moment)
                work.end(key, moment)
            elif start == moment:
                marks[number] = work.begin(key, moment)
                work.count(key)
    told = work.describe(moments[-1] + 1000.0)
    for key in "ab":
        assert told[key].work_us == pytest.approx(truth[key] * S, abs=2)
        assert told[key].requests == sum(1 for each in requests if each[2] == key)
    assert shares == pytest.approx(sum(truth.values()))


def test_tokens_of_a_replica_that_costs_nothing_are_recorded_once() -> None:
    def count(prompt: int) -> RequestCounts:
        tokens = {"m": TokenUse(prompt=prompt, completion=1)}
        return {"g": {"a": KeyWork(requests=1, work_us=1, tokens=tokens)}}

    first = divide_bill(bill(0, 10), count(5), at(0))
    assert first is not None
    assert first.tokens == {"a": {"m": TokenUse(prompt=5, completion=1)}}
    divided = first.divided
    assert divide_bill(bill(0, 20, divided), count(5), at(0)) is None
    more = divide_bill(bill(0, 20, divided), count(8), at(0))
    assert more is not None
    assert more.tokens == {"a": {"m": TokenUse(prompt=3)}}


def test_a_worker_has_the_time_of_its_routers_and_none_of_their_requests() -> None:
    used = TokenUse(prompt=9)
    work = {
        "g": {
            "r1": {"k": KeyWork(requests=3, work_us=30, tokens={"m": used})},
            "r2": {"": KeyWork(requests=1, work_us=5)},
            "other": {"k": KeyWork(requests=1, work_us=1)},
        },
        "h": {"r1": {"k": KeyWork(requests=2, work_us=20)}},
    }
    assert share_counts(work, ["r1", "r2"]) == {
        "g/r1": {"k": KeyWork(requests=0, work_us=30)},
        "h/r1": {"k": KeyWork(requests=0, work_us=20)},
        "g/r2": {"": KeyWork(requests=0, work_us=5)},
    }
