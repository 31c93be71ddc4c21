"""One policy decides in production, in forecasts and in the simulator, rules included."""

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records import FIXED
from tests.simulation.spot_worlds import HOUR, market, random_world, terms, world

import cavvy
from cavvy.capabilities.simulation.traces.driver import Knows, TraceRun, run_job
from cavvy.capabilities.simulation.traces.readers import TraceWorld
from cavvy.domain.markets import Observation, ObservationKind
from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import (
    CheckpointPolicy,
    JobLimits,
    ResourceSpec,
    SpotPolicy,
    TaskSpec,
    Workload,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.deadline import policy as deadline_policy
from cavvy.planner.deadline.forecast import KINDS, foresee
from cavvy.planner.deadline.inputs import JobProgress, PolicyInputs, find_inputs
from cavvy.planner.deadline.policy import RULES, DeadlinePolicy, PolicyMargins, Rule
from cavvy.planner.deadline.recommendation import advise
from cavvy.planner.deadline.session import PolicySession
from cavvy.planner.markets import MarketKnowledge
from cavvy.planner.spot.classic import OnDemandPolicy, find_policy
from cavvy.planner.spot.view import (
    JobTerms,
    MarketPolicy,
    PolicyDecision,
    PolicyMaker,
    PolicyMarket,
    PolicyView,
    RunMode,
    SpotQuote,
)

SOURCE = Path(cavvy.__file__).parent
NOW = datetime(2030, 1, 1, tzinfo=UTC)
ZONES = ("a", "b", "c")
OFFERS = [
    replace(FIXED, zone=zone, purchase=purchase, rate=HourlyRate(micros))
    for zone, spot, fixed in (("a", 300_000, 10**6), ("b", 320_000, 980_000), ("c", 700_000, 10**6))
    for purchase, micros in ((Purchase.SPOT, spot), (Purchase.ON_DEMAND, fixed))
]
TASK = TaskSpec(
    name="digits",
    run="train",
    resources=ResourceSpec(spot=SpotPolicy.AUTO),
    checkpoint=CheckpointPolicy(path="c", every=timedelta(minutes=10)),
    limits=JobLimits(deadline_after=timedelta(hours=20)),
    work=Workload(samples=36_000, rates={"cpu": 1.0}),
)


class TestOnePolicy:
    def test_production_forecast_and_simulator_make_the_same_one(self) -> None:
        made_by_production = inspect.signature(advise).parameters["make"].default
        assert find_policy("auto") is KINDS["auto"] is made_by_production is DeadlinePolicy

    def test_nothing_else_makes_decisions(self) -> None:
        """Neither a decision nor a core is made outside the policies."""
        texts = {path: path.read_text("utf-8") for path in SOURCE.rglob("*.py")}
        makers = {
            path.relative_to(SOURCE).as_posix()
            for path, text in texts.items()
            if "Decision(" in text
            for call in ast.walk(ast.parse(text))
            if isinstance(call, ast.Call)
            and ast.unparse(call.func).rpartition(".")[2] == "PolicyDecision"
        }
        assert makers == {
            "planner/spot/auto.py",
            "planner/spot/classic.py",
            "planner/deadline/policy.py",
        }

    def test_every_rule_is_in_the_policy(self) -> None:
        written = [
            each
            for each in vars(deadline_policy).values()
            if inspect.isfunction(each) and each.__module__ == deadline_policy.__name__
        ]
        assert written == list(RULES)

    def test_a_forecast_is_of_the_rules_too(self) -> None:
        """A budget that does not pay for on-demand sends the job to spot, in forecasts as well."""
        tight = JobProgress(submitted_at=NOW, deadline=NOW + timedelta(hours=10.3))
        inputs = inputs_of(tight)
        rich, poor = (
            foresee(inputs, MarketKnowledge(), each, 0.0, "auto", runs=5)
            for each in (tight, replace(tight, budget_left=Money(5_000_000)))
        )
        assert poor.usd_mean < rich.usd_mean
        assert rich.in_time == 1.0


def inputs_of(progress: JobProgress) -> PolicyInputs:
    found = find_inputs(TASK, OFFERS, MarketKnowledge(), progress)
    assert found is not None
    return found


observations = st.lists(
    st.tuples(
        st.floats(0.01, 3),
        st.integers(0, 2),
        st.sampled_from(
            [
                ObservationKind.GRANTED,
                ObservationKind.REFUSED,
                ObservationKind.ENDED,
                ObservationKind.TAKEN,
            ]
        ),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(
    seen=observations,
    after=st.floats(0.001, 2),
    mode=st.sampled_from(RunMode),
    own=st.integers(0, 2),
    done=st.floats(0, 0.9),
    loading=st.floats(0, 0.05),
    budget=st.sampled_from([None, 3.0, 8.0]),
    hours=st.sampled_from([10.5, 14.0, 30.0]),
)
def test_production_decides_as_a_simulated_job_that_saw_the_same(
    seen: list[tuple[float, int, ObservationKind]],
    after: float,
    mode: RunMode,
    own: int,
    done: float,
    loading: float,
    budget: float | None,
    hours: float,
) -> None:
    progress = JobProgress(submitted_at=NOW, deadline=NOW + timedelta(hours=hours))
    inputs = inputs_of(progress)
    prices = [place.spot_usd(1) for place in inputs.places]
    session = PolicySession(DeadlinePolicy(inputs.terms), prices, inputs.terms.overhead_s)
    spots = [place.spot for place in inputs.places]
    told = [
        Observation(market=spot.key, kind=ObservationKind.PRICE, at=NOW, rate=spot.rate)
        for spot in spots
        if spot is not None
    ]
    now_s = 0.0
    for passed, index, kind in seen:
        now_s += round(passed * 3600)
        session.observe(now_s, index, kind)
        told.append(
            Observation(
                market=inputs.places[index].name + "/spot",
                kind=kind,
                at=NOW + timedelta(seconds=now_s),
            )
        )
    now_s += max(1, round(after * 3600))
    recent: dict[str, list[Observation]] = {}
    for each in told:
        recent.setdefault(each.market, []).append(each)
    assert set(recent) <= {spot.key for spot in spots if spot is not None}

    place = inputs.places[own]
    current = {RunMode.IDLE: None, RunMode.SPOT: place.spot, RunMode.ON_DEMAND: place.fixed}[mode]
    loading_s = 0.0 if mode is RunMode.IDLE else round(loading * 3600)
    progress = replace(
        progress,
        done=done,
        current=current,
        home=place.fixed,
        works=loading_s == 0,
        starting_for=timedelta(seconds=inputs.terms.overhead_s - loading_s),
        budget_left=None if budget is None else Money(round(budget * 1e6)),
    )
    decision = session.decide(
        PolicyView(
            now_s,
            (1 - done) * inputs.terms.work_s,
            mode,
            own,
            loading_s,
            budget_usd=inf if budget is None else budget,
        )
    )
    now = NOW + timedelta(seconds=now_s)
    recommendation = advise(inputs, MarketKnowledge(recent=recent), progress, now)
    there = inputs.places[decision.market]
    wanted = {RunMode.IDLE: None, RunMode.SPOT: there.spot, RunMode.ON_DEMAND: there.fixed}[
        decision.mode
    ]
    assert (recommendation.mode, recommendation.reason) == (decision.mode, decision.reason)
    stays = decision.mode is mode and decision.market == own and mode is not RunMode.IDLE
    assert recommendation.stay is stays
    assert (recommendation.offers[0] if recommendation.offers else None) == (
        None if stays else wanted
    )


@dataclass(frozen=True, kw_only=True)
class Answers(MarketPolicy):
    """A core that stays at home: on spot while it is there, else in one mode for ever."""

    otherwise: RunMode = RunMode.IDLE
    wavers: bool = False  # gives up on-demand at once, and wants it back a minute later

    def __call__(self, terms: JobTerms) -> MarketPolicy:
        return self

    def decide(self, view: PolicyView) -> PolicyDecision:
        again_s = view.now_s + 600
        if self.wavers:
            soon = view.mode is RunMode.ON_DEMAND and view.now_s < 3600
            return PolicyDecision(RunMode.IDLE if soon else RunMode.ON_DEMAND, 0, again_s, "wavers")
        home = max(view.market, 0)
        if view.mode is RunMode.ON_DEMAND:
            return PolicyDecision(RunMode.ON_DEMAND, home, again_s, "at home")
        if view.quotes[home].up and self.otherwise is RunMode.IDLE:
            return PolicyDecision(RunMode.SPOT, home, again_s, "at home")
        return PolicyDecision(self.otherwise, home, again_s, "at home")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Markets in which one rule matters."""

    world: TraceWorld
    core: PolicyMaker
    work: float = 5.0
    deadline: float = 15.0
    overhead: float = 0.5
    budget_usd: float = inf

    def play(self, rules: Sequence[Rule]) -> TraceRun:
        job = terms(self.world, self.work, self.deadline, self.overhead)
        return run_job(
            self.world,
            0.0,
            job,
            lambda told: DeadlinePolicy(told, self.core, rules),
            budget_usd=self.budget_usd,
            keep_segments=True,
        )


def at_risk() -> TraceWorld:
    """Two markets; the first says after an hour that it may take its nodes, and does an hour
    later.
    """
    calm, risk, gone = SpotQuote(True, 0.3), SpotQuote(True, 0.3, True), SpotQuote(False, 0.3)
    return TraceWorld(
        markets=(PolicyMarket(name="a"), PolicyMarket(name="b")),
        times_s=(0.0, HOUR, 2 * HOUR),
        quotes=((calm, calm), (risk, calm), (gone, calm)),
        end_s=30 * HOUR,
    )


def gone() -> TraceWorld:
    """Two markets at one price; the first is gone after an hour, for good."""
    here, away = SpotQuote(True, 0.3), SpotQuote(False, 0.3)
    return TraceWorld(
        markets=(PolicyMarket(name="a"), PolicyMarket(name="b")),
        times_s=(0.0, HOUR),
        quotes=((here, here), (away, here)),
        end_s=30 * HOUR,
    )


def two_prices() -> TraceWorld:
    markets = (PolicyMarket(name="a"), PolicyMarket(name="b", on_demand_usd_hr=0.5))
    away = SpotQuote(False, 0.3)
    return TraceWorld(markets=markets, times_s=(0.0,), quotes=((away, away),), end_s=30 * HOUR)


SCENES = {
    "only_long_waits": Scene(world=world(market("." * 30)), core=Answers(wavers=True)),
    "last_moment": Scene(
        world=world(market("#" + "." * 60, gap_s=0.4 * HOUR)), core=Answers(), deadline=5.75
    ),
    "not_dearer": Scene(world=world(market("....####" + "." * 20, rate=1.2)), core=Answers()),
    "free_moves_now": Scene(world=gone(), core=Answers()),
    "ahead": Scene(world=at_risk(), core=Answers()),
    "cheaper": Scene(world=two_prices(), core=Answers(otherwise=RunMode.ON_DEMAND)),
    "within_budget": Scene(world=world(market("#" * 30)), core=OnDemandPolicy, budget_usd=2.0),
}


def test_spot_is_awaited_at_home_where_the_move_would_cost() -> None:
    uow = SCENES["free_moves_now"]
    job = terms(uow.world, uow.work, uow.deadline, uow.overhead)

    def play(move_usd: float) -> TraceRun:
        costs = ((0.0, move_usd), (move_usd, 0.0))
        paid = replace(job, move_usd=costs)
        return run_job(
            uow.world,
            0.0,
            paid,
            lambda told: DeadlinePolicy(told, uow.core),
            keep_segments=True,
        )

    assert {segment.market for segment in play(0.0).segments or ()} == {0, 1}
    assert {segment.market for segment in play(0.01).segments or ()} == {0}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_left_out_changes_what_the_simulator_finds(rule: Rule) -> None:
    uow = SCENES[rule.__name__]
    whole = uow.play(RULES)
    without = uow.play([each for each in RULES if each is not rule])
    assert not whole.missed
    assert whole.segments != without.segments
    assert without.missed or whole.usd <= without.usd + 1e-9


def test_the_last_moment_keeps_a_deadline_that_is_missed_without_it() -> None:
    uow = SCENES["last_moment"]
    assert uow.play([]).missed
    assert not uow.play(RULES).missed


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    markets=st.integers(1, 3),
    work=st.integers(1, 20),
    slack=st.floats(0.05, 1.5),
    overhead=st.sampled_from([0.0, 1 / 6, 0.5]),
    spare_s=st.sampled_from([0.0, 60.0]),
    again_s=st.sampled_from([0.0, 60.0, 600.0, 3600.0]),
)
def test_no_deadline_is_missed_by_a_job_that_knows_its_launches_alone(
    seed: int,
    markets: int,
    work: int,
    slack: float,
    overhead: float,
    spare_s: float,
    again_s: float,
) -> None:
    made = random_world(seed, markets)
    job = replace(
        terms(made, work, work * (1 + slack) + overhead + 0.02, overhead), again_s=again_s
    )
    margins = PolicyMargins(spare_s=spare_s, spare_share=0.0, again_s=again_s)
    run = run_job(
        made,
        0.0,
        job,
        find_policy("auto"),
        knows=Knows.LAUNCHES,
        margins=margins,
        keep_segments=True,
    )
    assert not run.missed
    assert sum(one.work_s for one in run.segments) == pytest.approx(job.work_s)


def test_a_job_that_knows_its_launches_alone_learns_of_spot_by_asking() -> None:
    """Told everything, it starts on the market that has spot; else it tries the cheaper one first,
    and pays nothing for the refusal.
    """
    made = world(market("." * 40, rate=0.2), market("#" * 40, rate=0.3, name="b", region="b"))
    job = terms(made, 5, 30, 0.1)
    for knows in Knows:
        run = run_job(made, 0.0, job, find_policy("auto"), knows=knows)
        assert run.usd == pytest.approx(0.3 * 5.1)
        assert run.launches == 1


def test_a_job_that_knows_its_launches_alone_returns_to_spot_that_lasts() -> None:
    """Spot flaps at first, and the job leaves for on-demand; ten hours later spot is there to
    stay.
    """
    made = world(market("#.#.#.#......." + "#" * 60))
    job = terms(made, 30, 36, 0.8)
    run = run_job(made, 0.0, job, find_policy("auto"), knows=Knows.LAUNCHES, keep_segments=True)
    assert run.segments[-1].mode is RunMode.SPOT
    assert any(segment.mode is RunMode.ON_DEMAND for segment in run.segments)
