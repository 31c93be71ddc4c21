"""Every loop of the pure rooms ends for endless, huge, negative and undefined values.

An error is an end: what is tested is that no thread of a server runs for ever. The lines that run
are counted, see `tests.steps`.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from math import inf, nan
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.records import make_offer
from tests.steps import EndlessLoop, limit_steps

from cavvy.capabilities.serving.autoscaler.decide import ScalingState, decide
from cavvy.capabilities.serving.autoscaler.load import ServiceLoad, count_for_wait
from cavvy.capabilities.serving.autoscaler.objectives import estimate_goals
from cavvy.capabilities.serving.autoscaler.placement import (
    ServiceTerms,
    ServiceView,
    SpotHedge,
    SteadyPlacement,
)
from cavvy.capabilities.serving.autoscaler.terms import (
    MarketObservation,
    ScalingTerms,
    ServiceObservation,
)
from cavvy.capabilities.serving.decide.traffic import _spread
from cavvy.capabilities.serving.loads import TokenTimes
from cavvy.catalog.tables import find_name
from cavvy.control.decide.canary import NullDistribution, add, draw_normal, find_bound
from cavvy.costs.reconcile import _days
from cavvy.domain.allocations import Host
from cavvy.domain.services import LatencyGoal
from cavvy.domain.shares import HeldShare, QueueRow
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.calendar import TimeInterval, choose_start
from cavvy.planner.reservations import ReservableType, UsedMachine, _commit, advise_reservations
from cavvy.planner.spot.cycle import find_price, plan_cycle
from cavvy.planner.spot.spells import SpellLengths
from cavvy.scheduler.packing import AllocationOwner, allocate_across
from cavvy.scheduler.reclaim import list_loans
from cavvy.scheduler.shares import ShareBook, ShareRule, give_turns, list_exceeded, list_standings
from cavvy.scheduler.topology import choose_joined, spread_slices, take_domains

MOST = 500_000  # lines: seconds of a CPU
NOW = datetime(2026, 1, 1, tzinfo=UTC)
FIRST, LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
_NUMBERS = [0.0, -1.0, 1.0, 2.5, 1e-300, 1e12, 1e300, -1e300, inf, -inf, nan]
_COUNTS = [0, -1, 1, 3, 1000, 10**9, 10**18]
NUMBERS, COUNTS = st.sampled_from(_NUMBERS), st.sampled_from(_COUNTS)
TIMES = st.sampled_from([FIRST, NOW, NOW + timedelta(days=1), LAST])
ANY = COUNTS | NUMBERS
OFTEN = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def ends(call: Callable[[], object]) -> None:
    """Fail if the call runs too many lines. Bad values may be refused."""
    with limit_steps(MOST), suppress(ArithmeticError, ValueError, IndexError):
        found = call()
        if hasattr(found, "__next__"):
            for _ in found:
                pass


def test_a_loop_without_an_end_is_found() -> None:
    def spin() -> None:
        while True:
            pass

    with pytest.raises(EndlessLoop):
        ends(spin)


def rules() -> st.SearchStrategy[ShareRule]:
    amounts = st.dictionaries(st.sampled_from(["H100", "dollars"]), NUMBERS, max_size=2)
    return st.builds(
        ShareRule, weight=NUMBERS, quota=NUMBERS, limit=NUMBERS, user_limit=NUMBERS, quotas=amounts
    )


@OFTEN
@given(
    rules=st.dictionaries(st.sampled_from("abc"), rules(), max_size=3),
    held=st.lists(st.builds(HeldShare, st.sampled_from("abc"), st.just("u"), NUMBERS, COUNTS)),
    used=st.dictionaries(st.sampled_from("abc"), NUMBERS),
    parents=st.dictionaries(st.sampled_from("abc"), st.sampled_from("abc")),  # cycles, too
    sizes=st.lists(NUMBERS, max_size=5),
)
def test_shares(
    rules: dict[str, ShareRule],
    held: list[HeldShare],
    used: dict[str, float],
    parents: dict[str, str | None],
    sizes: list[float],
) -> None:
    book = ShareBook(rules=rules, held=held, used_h=used, parents=parents)
    rows = [QueueRow(str(at), "abc"[at % 3], "u", size) for at, size in enumerate(sizes)]
    ends(lambda: give_turns(rows, book))
    ends(lambda: give_turns(rows, book, brief=True))
    ends(lambda: list_standings(rows, book))
    ends(lambda: list_loans(book))
    for project, rule in rules.items():
        ends(lambda project=project, rule=rule: list_exceeded(project, rule, book))


@OFTEN
@given(cpus=ANY, memory=COUNTS, wanted=ANY, asked=COUNTS, nodes=st.sampled_from([0, 1, 2, 50]))
def test_packing(cpus: float, memory: int, wanted: float, asked: int, nodes: int) -> None:
    hosts = [Host(name=f"p/{each}", cpus=cpus, memory_mib=memory) for each in "xyz"]
    resources = ResourceSpec(cpus_min=wanted, memory_min_mib=asked)
    task = TaskSpec(name="t", run="x", nodes=nodes, resources=resources)
    offer = replace(make_offer("p/x/cpu", 0), shared=True)
    owner = AllocationOwner(gang="g", project="p")
    ends(lambda: allocate_across(task, offer, hosts, (), owner))


@OFTEN
@given(sizes=st.lists(st.integers(0, 5), max_size=5), count=COUNTS, size=COUNTS)
def test_domains(sizes: list[int], count: int, size: int) -> None:
    domains = [[f"{at}/{each}" for each in range(many)] for at, many in enumerate(sizes)]
    free = [each for domain in domains for each in domain]
    ends(lambda: take_domains(domains, count))
    ends(lambda: choose_joined(free, count, domains))
    ends(lambda: spread_slices(sizes, size, count))


@OFTEN
@given(
    replicas=COUNTS,
    availability=NUMBERS,
    cold=NUMBERS,
    tick=NUMBERS,
    now=NUMBERS,
    ages=st.lists(st.lists(NUMBERS, max_size=3), min_size=2, max_size=2),
    ready=COUNTS,
    policy=st.sampled_from([SpotHedge, SteadyPlacement]),
)
def test_spot_replicas(
    replicas: int,
    availability: float,
    cold: float,
    tick: float,
    now: float,
    ages: list[list[float]],
    ready: int,
    policy: Any,
) -> None:
    terms = ServiceTerms(
        replicas=replicas, zones=2, cold_start_s=cold, tick_s=tick, availability=availability
    )
    view = ServiceView(now, (tuple(ages[0]), tuple(ages[1])), (1, 0), (0, 1), ready, 0)
    made = policy(terms)
    ends(lambda: [made.place(view) for _ in range(2)])


@OFTEN
@given(
    stays=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5),
    away=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5),
    saving=NUMBERS,
    overhead=NUMBERS,
    price=NUMBERS,
)
def test_spot_cycles(
    stays: list[tuple[float, float]],
    away: list[tuple[float, float]],
    saving: float,
    overhead: float,
    price: float,
) -> None:
    ends(lambda: plan_cycle(SpellLengths(stays), SpellLengths(away), saving, overhead, price))
    ends(lambda: find_price(lambda at: saving - at * overhead, price, price))


def numbers_of(kind: type) -> st.SearchStrategy[Any]:
    """A value of a type whose numbers are usually sound, and now and then any number."""
    chosen = {}
    for each in msgspec.structs.fields(kind):
        values = {float: _NUMBERS, int: _COUNTS}.get(each.type)
        if values is not None:
            sound = 1.0 if each.default is msgspec.NODEFAULT else each.default
            chosen[each.name] = st.sampled_from([each.type(sound)] * 40 + values)
    return st.builds(kind, **chosen)


@OFTEN
@given(
    seen=numbers_of(ServiceObservation),
    again=numbers_of(ServiceObservation),
    terms=numbers_of(ScalingTerms),
    arrivals=st.lists(COUNTS, max_size=3),
    ready=st.lists(NUMBERS, max_size=3),
    tokens=numbers_of(TokenTimes),
    goal=st.sampled_from([timedelta(0), timedelta(seconds=1), timedelta.max]),
)
def test_the_autoscaler(
    seen: ServiceObservation,
    again: ServiceObservation,
    terms: ScalingTerms,
    arrivals: list[int],
    ready: list[float],
    tokens: TokenTimes,
    goal: timedelta,
) -> None:
    market = MarketObservation(name="a", ready_s=tuple(ready), starting_s=tuple(ready))
    terms = replace(terms, ttft=LatencyGoal(limit=goal))

    def follow() -> None:
        state = ScalingState()
        for each in (seen, again):
            each = replace(each, arrivals=tuple(arrivals), markets=(market,), tokens=tokens)
            _, state = decide(terms, state, each)

    ends(follow)


@OFTEN
@given(
    load=numbers_of(ServiceLoad),
    terms=numbers_of(ScalingTerms),
    late=NUMBERS,
    tokens=numbers_of(TokenTimes),
    factor=NUMBERS,
)
def test_loads(
    load: ServiceLoad, terms: ScalingTerms, late: float, tokens: TokenTimes, factor: float
) -> None:
    ends(lambda: count_for_wait(load, terms, late))
    goals = replace(terms, ttft=LatencyGoal(limit=timedelta(seconds=1)))
    ends(lambda: estimate_goals(tokens, load, goals, factor))


@OFTEN
@given(levels=st.lists(NUMBERS, min_size=1, max_size=4), rate=NUMBERS, price=COUNTS)
def test_reservations(levels: list[float], rate: float, price: int) -> None:
    offer = replace(make_offer("p/r/t", price), term_months=12)
    ends(lambda: _commit(offer, levels, rate))


@OFTEN
@given(TIMES, TIMES, TIMES, COUNTS)
def test_times(start: datetime, end: datetime, now: datetime, price: int) -> None:
    prices = [(NOW - timedelta(days=each), HourlyRate(price + each)) for each in (20, 9, 1)]
    ends(lambda: choose_start(TimeInterval(start, end), now, prices))
    ends(lambda: _days(start, end))


def test_the_use_of_many_machines() -> None:
    kind = ReservableType("p", "r", "t")
    used = [UsedMachine(kind=kind, since=NOW, until=LAST, rate=HourlyRate(5))] * 50
    offer = replace(make_offer("p/r/t", 0), provider="p", region="r", instance_type="t")
    offers = [replace(offer, term_months=12)]
    ends(lambda: advise_reservations(used, offers, NOW, NOW + timedelta(days=30)))


@OFTEN
@given(COUNTS, COUNTS)
def test_traffic(count: int, seconds: int) -> None:
    ends(lambda: _spread(count, seconds))


@OFTEN
@given(
    masses=st.lists(NUMBERS, min_size=1, max_size=4),
    variance=st.sampled_from([0.0, -1.0, 0.3, 100.0, 1e4, inf, -inf, nan]),
    allowed=NUMBERS,
)
def test_canaries(masses: list[float], variance: float, allowed: float) -> None:
    known = NullDistribution(first=0, masses=tuple(masses))
    ends(lambda: add(known, draw_normal(variance)))
    ends(lambda: find_bound(known, allowed))


@pytest.mark.parametrize("name", ["fp8" * 100_000, "a" * 1_000_000, "-4bit" * 50_000, ""])
def test_names_of_models(name: str) -> None:
    ends(lambda: find_name(name))
