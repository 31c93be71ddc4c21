"""What is made of a deadline policy's word before it is followed: the last moment, the budget,
dearer and cheaper.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from math import inf

import pytest
from tests.records import FIXED, SPOT, make_attempt_record

from cavvy.domain import tasks
from cavvy.domain.jobs import Attempt
from cavvy.domain.markets import Observation, ObservationKind
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.deadline.inputs import (
    JobProgress,
    PolicyInputs,
    find_inputs,
    find_pace,
    is_about_as_cheap,
    run_time_on,
    share_done,
)
from cavvy.planner.deadline.policy import AHEAD, NOT_AHEAD, DeadlinePolicy
from cavvy.planner.deadline.recommendation import Recommendation, advise, recall
from cavvy.planner.markets import MarketKnowledge
from cavvy.planner.spot.view import (
    GRAIN_S,
    JobTerms,
    MarketPolicy,
    PolicyDecision,
    PolicyMaker,
    PolicyView,
    RunMode,
)

NOW = datetime(2030, 1, 1, tzinfo=UTC)
HOUR, MINUTE, SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
HOME = (SPOT, FIXED)
TASK = tasks.TaskSpec(
    name="digits",
    run="train",
    resources=tasks.ResourceSpec(spot=tasks.SpotPolicy.AUTO),
    checkpoint=tasks.CheckpointPolicy(path="c", every=timedelta(minutes=10)),
    limits=tasks.JobLimits(deadline_after=20 * HOUR),
    work=tasks.Workload(samples=36_000, rates={"cpu": 1.0}),
)  # ten hours


def elsewhere(micros: int, purchase: Purchase = Purchase.SPOT) -> Offer:
    return replace(FIXED, zone="b", purchase=purchase, rate=HourlyRate(micros))


def at(hours: float = 20, **changes: object) -> JobProgress:
    return replace(JobProgress(submitted_at=NOW, deadline=NOW + hours * HOUR), **changes)  # type: ignore[arg-type]


def inputs_of(progress: JobProgress, *more: Offer, task: tasks.TaskSpec = TASK) -> PolicyInputs:
    found = find_inputs(task, (*HOME, *more), MarketKnowledge(), progress)
    assert found is not None
    return found


class Says(MarketPolicy):
    """A policy with one opinion, until it has another."""

    def __init__(
        self, first: PolicyDecision, until_s: float = inf, then: PolicyDecision | None = None
    ) -> None:
        self._first, self._until_s, self._then = first, until_s, then or first

    def __call__(self, terms: JobTerms) -> MarketPolicy:
        return self

    def decide(self, view: PolicyView) -> PolicyDecision:
        return self._first if view.now_s < self._until_s else self._then


def under_rules(says: Says) -> PolicyMaker:
    return lambda terms: DeadlinePolicy(terms, says)


def advised(
    progress: JobProgress,
    says: PolicyDecision,
    *more: Offer,
    slack: timedelta | None = None,
    avoid: Mapping[str, datetime] | None = None,
    until_s: float = inf,
    then: PolicyDecision | None = None,
) -> Recommendation:
    """What comes of a policy's word where so much slack is left; without `slack`, at the
    submission.
    """
    inputs, terms = inputs_of(progress, *more), inputs_of(progress, *more).terms
    left_s = max(0.01, 1 - progress.done) * terms.work_s
    needed_s = left_s * (1 + terms.spare_share)
    now = NOW if slack is None else NOW + timedelta(seconds=terms.deadline_s - needed_s) - slack
    make = under_rules(Says(says, until_s, then))
    return advise(inputs, MarketKnowledge(), progress, now, avoid=avoid, make=make)


def overhead(progress: JobProgress | None = None) -> timedelta:
    return timedelta(seconds=inputs_of(progress or at()).terms.overhead_s)


IDLE = PolicyDecision(RunMode.IDLE, 0, inf, "waits")
ON_SPOT = PolicyDecision(RunMode.SPOT, 0, inf, "spot is still available")
ON_DEMAND = PolicyDecision(RunMode.ON_DEMAND, 0, inf, "no spot")


class TestLastMoment:
    def test_spot_that_does_not_come_up_is_left_while_on_demand_still_ends_in_time(self) -> None:
        progress = at(current=SPOT)
        late = advised(progress, ON_SPOT, slack=overhead() - SECOND)
        assert (late.mode, late.offers) == (RunMode.ON_DEMAND, (FIXED,))
        assert late.reason.startswith("the spot gang has not started, and on-demand must start")
        assert advised(progress, ON_SPOT, slack=overhead() + SECOND).stay

    def test_spot_that_saves_nothing_is_left_while_all_of_it_can_be_done_again(self) -> None:
        unsaved = overhead() + 1200 * SECOND
        progress = at(current=SPOT, works=True, done=0.5, unsaved=unsaved)
        late = advised(progress, ON_SPOT, slack=overhead() + unsaved - SECOND)
        assert late.mode is RunMode.ON_DEMAND
        assert late.reason.startswith("the spot gang has not saved a checkpoint for too long")
        assert advised(progress, ON_SPOT, slack=overhead() + unsaved + SECOND).stay

    def test_spot_that_saves_as_it_should_is_kept_to_the_end(self) -> None:
        again = timedelta(seconds=inputs_of(at()).terms.again_s)
        progress = at(current=SPOT, works=True, done=0.5, unsaved=again - SECOND)
        assert advised(progress, ON_SPOT, slack=SECOND).stay

    @pytest.mark.parametrize(("again_s", "last"), [(inf, True), (9e9, True), (0.0, False)])
    def test_spot_that_does_not_come_up_is_reviewed_at_the_last_moment(
        self, again_s: float, last: bool
    ) -> None:
        progress = at(current=SPOT)
        terms = inputs_of(progress).terms
        last_s = terms.deadline_s - terms.work_s * (1 + terms.spare_share) - terms.overhead_s
        found = advised(progress, ON_SPOT._replace(again_s=again_s), slack=overhead() + MINUTE)
        wanted = NOW + timedelta(seconds=last_s if last else again_s)
        assert found.again_at is not None
        assert abs(found.again_at - wanted) < timedelta(milliseconds=1)

    def test_on_demand_that_comes_up_is_never_too_late(self) -> None:
        cheaper = elsewhere(100_000, Purchase.ON_DEMAND)
        assert advised(at(current=FIXED), ON_DEMAND, cheaper, slack=SECOND).stay

    def test_the_last_resort_is_the_cheapest(self) -> None:
        near = elsewhere(900_000, Purchase.ON_DEMAND)
        late = advised(at(current=SPOT), ON_SPOT, near, slack=overhead() - SECOND)
        assert late.offers == (near, FIXED)


class TestBudget:
    """Ten hours and a start: on demand a dollar an hour, on spot 30 cents."""

    def hours(self, progress: JobProgress) -> float:
        return 10 + overhead(progress) / HOUR

    def usd(self, amount: float) -> Money:
        return Money(round(amount * 1e6))

    def test_on_demand_is_gone_to_where_the_budget_pays_it_to_the_end(self) -> None:
        enough = at(budget_left=self.usd(self.hours(at()) + 0.01))
        assert advised(enough, ON_DEMAND).offers == (FIXED,)
        less = advised(at(budget_left=self.usd(self.hours(at()) - 0.01)), ON_DEMAND)
        assert (less.mode, less.offers) == (RunMode.SPOT, (SPOT,))
        assert less.reason == (
            "the budget is too small to finish the work on on-demand capacity (no spot)"
        )

    def test_a_course_that_nothing_pays_for_is_gone_on_with(self) -> None:
        """The limit itself ends the job; until then an estimate may have been too long."""
        enough = at(budget_left=self.usd(0.3 * self.hours(at()) + 0.01))
        assert advised(enough, ON_DEMAND).mode is RunMode.SPOT
        poor = at(budget_left=self.usd(0.3 * self.hours(at()) - 0.01))
        assert advised(poor, ON_DEMAND).offers == (FIXED,)

    def test_spot_that_is_not_there_is_no_way_out(self) -> None:
        poor = at(budget_left=self.usd(5))
        assert advised(poor, ON_DEMAND, avoid={SPOT.key: NOW + HOUR}).offers == (FIXED,)

    def test_of_several_the_cheapest_spot_is_taken(self) -> None:
        cheap = elsewhere(200_000)
        assert advised(at(budget_left=self.usd(5)), ON_DEMAND, cheap).offers[0] == cheap

    def test_spot_is_never_given_up_for_the_budget(self) -> None:
        assert advised(at(budget_left=Money(1)), ON_SPOT).mode is RunMode.SPOT

    def test_on_demand_that_works_is_kept_where_the_budget_pays_for_the_rest(self) -> None:
        """It has started already, and what goes on pays for no other start."""
        works = at(current=FIXED, works=True, done=0.9, budget_left=self.usd(1.01))
        assert advised(works, ON_DEMAND, slack=SECOND).stay
        poor = replace(works, budget_left=self.usd(0.99))
        assert advised(poor, ON_DEMAND, slack=SECOND).mode is RunMode.SPOT
        coming = replace(works, works=False, starting_for=timedelta(0))
        assert advised(coming, ON_DEMAND, slack=SECOND).mode is RunMode.SPOT, (
            "its start is still to be paid"
        )
        assert advised(replace(coming, starting_for=overhead()), ON_DEMAND, slack=SECOND).stay


class TestWaiting:
    @pytest.mark.parametrize(
        ("micros", "mode"), [(999_000, RunMode.IDLE), (1_000_000, RunMode.ON_DEMAND)]
    )
    def test_spot_that_saves_nothing_is_not_waited_for(self, micros: int, mode: RunMode) -> None:
        dear = replace(SPOT, rate=HourlyRate(micros))
        inputs = find_inputs(TASK, (dear, FIXED), MarketKnowledge(), at())
        assert inputs is not None
        recommendation = advise(
            inputs,
            MarketKnowledge(),
            at(),
            NOW,
            avoid={dear.key: NOW + HOUR},
            make=under_rules(Says(IDLE)),
        )
        assert recommendation.mode is mode

    def test_a_gang_on_demand_is_given_back_only_for_a_long_wait(self) -> None:
        """Of ten starts at the least: a new one has to pay."""
        progress = at(current=FIXED, works=True, done=0.1, setup=6 * MINUTE)
        long_s = 10 * overhead(progress).total_seconds()
        assert long_s > 3600
        for until_s, mode in ((long_s - 1, RunMode.ON_DEMAND), (long_s + 1, RunMode.IDLE)):
            recommendation = advised(progress, IDLE, until_s=until_s, then=ON_DEMAND)
            assert recommendation.mode is mode
            assert recommendation.stay is (mode is RunMode.ON_DEMAND)

    def test_a_job_without_a_gang_waits_however_short_it_is(self) -> None:
        assert (
            advised(
                at(home=SPOT), IDLE, until_s=1, then=ON_DEMAND, avoid={SPOT.key: NOW + HOUR}
            ).mode
            is RunMode.IDLE
        )


class TestLeaving:
    def test_spot_at_risk_is_left_for_spot_of_about_the_price_alone(self) -> None:
        risky = at(current=SPOT, works=True, done=0.1, at_risk=True)
        near, dear = elsewhere(329_000), elsewhere(331_000)
        left = advised(risky, ON_SPOT, near)
        assert (left.mode, left.offers, left.reason) == (RunMode.SPOT, (near,), AHEAD)
        stays = advised(risky, ON_SPOT, dear)
        assert (stays.stay, stays.reason) == (True, NOT_AHEAD)
        assert advised(risky, ON_SPOT, near, avoid={near.key: NOW + HOUR}).reason == NOT_AHEAD
        assert advised(replace(risky, at_risk=False), ON_SPOT, near).stay
        assert advised(replace(risky, works=False), ON_SPOT, near).stay

    def test_on_demand_is_left_for_what_saves_a_twentieth_of_the_rest_with_its_start(self) -> None:
        works = at(current=FIXED, works=True, done=0.1)
        least = 0.95 * 9 / (9 + overhead(works) / HOUR)  # dollars an hour
        better = elsewhere(round(least * 1e6) - 100, Purchase.ON_DEMAND)
        worse = elsewhere(round(least * 1e6) + 100, Purchase.ON_DEMAND)
        left = advised(works, ON_DEMAND, better)
        assert (left.mode, left.offers, left.stay) == (RunMode.ON_DEMAND, (better,), False)
        assert advised(works, ON_DEMAND, worse).stay
        assert advised(replace(works, works=False), ON_DEMAND, better).stay
        assert advised(works, ON_DEMAND, better, slack=overhead(works) + SECOND).offers == (better,)
        assert advised(works, ON_DEMAND, better, slack=overhead(works) - SECOND).stay

    def test_after_the_chosen_spot_come_those_of_about_its_price(self) -> None:
        near, dear = elsewhere(320_000), replace(elsewhere(340_000), zone="c")
        assert advised(at(), ON_SPOT, dear, near).offers == (SPOT, near)


class TestInputs:
    def test_a_place_that_has_too_few_nodes_or_said_no_lately_has_no_spot(self) -> None:
        no = Observation(market=SPOT.key, kind=ObservationKind.REFUSED, at=NOW - SECOND)
        known = MarketKnowledge(recent={SPOT.key: [no]})
        for offer, knowledge, mode in (
            (SPOT, MarketKnowledge(), RunMode.SPOT),
            (SPOT, known, RunMode.IDLE),
            (replace(SPOT, capacity=1), MarketKnowledge(), RunMode.IDLE),
            (replace(SPOT, capacity=2), MarketKnowledge(), RunMode.SPOT),
        ):
            inputs = find_inputs(replace(TASK, nodes=2), (offer, FIXED), knowledge, at())
            assert inputs is not None
            assert advise(inputs, knowledge, at(), NOW).mode is mode

    def test_slower_machines_are_left_out_and_the_reference_is_the_cheapest_in_time(self) -> None:
        task = replace(
            TASK, work=tasks.Workload(samples=36_000, rates={"cpu:8": 1.0, "cpu:16": 2.0})
        )
        fast = replace(FIXED, instance_type="f", vcpus=16, rate=HourlyRate(2_200_000))
        for hours, run_h, places in ((20, 10, {"m:0", "f:0"}), (8, 5, {"f:0"})):
            inputs = find_inputs(
                task,
                (*HOME, fast, replace(fast, purchase=Purchase.SPOT)),
                MarketKnowledge(),
                at(hours),
            )
            assert inputs is not None
            assert inputs.run_time == run_h * HOUR
            assert {place.name.rpartition("/")[2] for place in inputs.places} == places
            assert inputs.terms.deadline_s == hours * 3600 - 60
            assert inputs.terms.spare_share == 0.01

    def test_the_fastest_machine_is_the_reference_if_none_ends_in_time(self) -> None:
        task = replace(
            TASK, work=tasks.Workload(samples=36_000, rates={"cpu:8": 1.0, "cpu:16": 2.0})
        )
        fast = replace(FIXED, instance_type="f", vcpus=16, rate=HourlyRate(9_000_000))
        offers = (*HOME, fast)
        assert find_inputs(task, offers, MarketKnowledge(), at(5)) is None
        inputs = find_inputs(task, offers, MarketKnowledge(), at(5), floor=False)
        assert inputs is not None
        assert inputs.run_time == 5 * HOUR

    def test_a_machine_that_would_need_all_the_time_does_not_end_in_time(self) -> None:
        assert find_inputs(TASK, HOME, MarketKnowledge(), at(10)) is None
        task = replace(
            TASK, work=tasks.Workload(samples=36_000, rates={"cpu:8": 1.0, "cpu:16": 2.0})
        )
        fast = replace(FIXED, instance_type="f", vcpus=16, rate=HourlyRate(9_000_000))
        inputs = find_inputs(task, (*HOME, fast), MarketKnowledge(), at(10))
        assert inputs is not None
        assert inputs.run_time == 5 * HOUR

    def test_machines_that_take_two_percent_longer_are_alike(self) -> None:
        rates = {"cpu:8": 1.02, "cpu:16": 1.0, "cpu:32": 0.9999}
        task = replace(TASK, work=tasks.Workload(samples=51_000, rates=rates))
        slower = [
            replace(FIXED, instance_type=f"{cpus}", vcpus=cpus, rate=HourlyRate(2_000_000))
            for cpus in (16, 32)
        ]
        inputs = find_inputs(task, (*HOME, *slower), MarketKnowledge(), at())
        assert inputs is not None
        assert [place.run_time_ratio for place in inputs.places] == pytest.approx([1 / 1.02, 1.0])

    def test_a_place_is_a_spot_offer_with_its_machine_on_demand_or_either_alone(self) -> None:
        far = replace(SPOT, region="s", zone="z")
        alone = replace(FIXED, instance_type="other")
        assert [(place.spot, place.fixed) for place in inputs_of(at(), far, alone).places] == [
            (SPOT, FIXED),
            (far, None),
            (None, alone),
        ]

    def test_of_many_places_the_cheapest_and_those_of_the_job_are_compared(self) -> None:
        cheap = replace(FIXED, instance_type="cheap", rate=HourlyRate(900_000))
        others = [
            replace(SPOT, region=region, zone=None, rate=HourlyRate(400_000)) for region in "xyz"
        ]
        for progress, more in (
            (at(), []),
            (at(current=others[1]), [others[1]]),
            (at(current=others[1], home=others[2]), [others[1], others[2]]),
        ):
            offers = (*HOME, cheap, *others)
            inputs = find_inputs(TASK, offers, MarketKnowledge(), progress, most=1)
            assert inputs is not None
            chosen = [place.spot or place.fixed for place in inputs.places]
            assert chosen == [SPOT, cheap, *more]

    def test_the_longest_duration_counts_if_the_task_states_no_work(self) -> None:
        limits = tasks.JobLimits(deadline_after=20 * HOUR, duration=5 * HOUR)
        assert inputs_of(at(), task=replace(TASK, work=None, limits=limits)).run_time == 5 * HOUR

    @pytest.mark.parametrize(
        ("setup", "seen", "least"),
        [("", None, 0), ("install", None, 60), ("install", MINUTE / 4, 15), ("", MINUTE, 60)],
    )
    def test_a_setup_that_was_never_seen_is_assumed(
        self, setup: str, seen: timedelta | None, least: int
    ) -> None:
        boot = inputs_of(at()).start
        found = inputs_of(at(setup=seen), task=replace(TASK, setup=setup))
        assert found.start - boot == least * SECOND

    @pytest.mark.parametrize(
        ("current", "loading_s"), [(SPOT, 0.0), (FIXED, GRAIN_S)], ids=["spot", "on-demand"]
    )
    def test_a_gang_in_a_place_that_is_not_compared_counts_as_in_the_first(
        self, current: Offer, loading_s: float
    ) -> None:
        """A gang on demand can then be left only after it has started."""
        inputs = inputs_of(at())
        unknown = at(current=replace(current, region="unknown"), works=True)
        policy = Says(ON_SPOT)
        view = recall(policy, inputs, MarketKnowledge(), unknown, NOW)
        assert (view.market, view.loading_s) == (0, loading_s)

    def test_a_move_between_places_with_one_offer_each_costs_a_copy_if_there_are_checkpoints(
        self,
    ) -> None:
        spot, fixed = replace(SPOT, provider="aws"), replace(FIXED, provider="aws", region="s")
        progress = at(saved_bytes=10 * 10**9, egress={"aws": Money(100_000)})
        for task, moves in ((TASK, ((0, 1), (1, 0))), (replace(TASK, checkpoint=None), ())):
            inputs = find_inputs(task, (spot, fixed), MarketKnowledge(), progress)
            assert inputs is not None
            assert inputs.terms.move_usd == moves

    def test_a_move_costs_the_copy_of_the_newest_checkpoint(self) -> None:
        far = tuple(
            replace(each, provider="aws", region=region)
            for each in HOME
            for region in ("us-east-1", "us-west-2")
        )
        egress = {"aws": Money(90_000), "aws/us-west-2": Money(20_000)}
        progress = at(saved_bytes=10 * 10**9, egress=egress)
        inputs = find_inputs(TASK, far, MarketKnowledge(), progress)
        assert inputs is not None
        east, west = (
            next(i for i, each in enumerate(inputs.places) if region in each.name)
            for region in ("us-east-1", "us-west-2")
        )
        moves = {(a, b): inputs.terms.move(a, b) for a in (east, west) for b in (east, west)}
        assert moves == pytest.approx(
            {(east, east): 0, (east, west): 0.9, (west, east): 0.2, (west, west): 0}
        )


def test_work_is_done_until_its_checkpoint_and_by_the_gang_that_works_until_now() -> None:
    def ran(number: int, **changes: object) -> Attempt:
        made = make_attempt_record(NOW, SPOT, id=f"j-{number}", number=number, running_at=NOW)
        return replace(made, **changes)  # type: ignore[arg-type]

    lost = ran(1, checkpoint_at=NOW + 2 * HOUR, finished_at=NOW + 3 * HOUR)
    works = ran(2, running_at=NOW + 4 * HOUR)
    now = NOW + 5 * HOUR
    assert share_done(TASK, [lost], now, 1) == pytest.approx(0.2)
    assert share_done(TASK, [lost, works], now, 2) == pytest.approx(0.3)
    assert share_done(TASK, [lost, works], now, 1) == pytest.approx(0.2), (
        "what another saved nothing of"
    )
    bare = replace(TASK, checkpoint=None)
    assert share_done(bare, [lost, works], now, 2) == pytest.approx(0.1)
    assert (
        share_done(TASK, [ran(1, running_at=None), ran(2, checkpoint_at=NOW - HOUR)], now, 9) == 0
    )
    assert share_done(TASK, [works], now + 99 * HOUR, 2) == 1
    assert share_done(replace(TASK, work=None), [works], now, 2) == 0


def test_work_that_was_slower_than_its_estimate_stays_slower() -> None:
    def pace(hours: float, done: float) -> float:
        own = make_attempt_record(NOW, SPOT, id="j-1", number=1, running_at=NOW)
        return find_pace(TASK, [own], NOW + hours * HOUR, 1, done)

    assert pace(4, 0.2) == pytest.approx(2, rel=0.05)
    assert pace(4, 0.4) == pytest.approx(1)
    assert pace(1 / 60, 0.0001) < 1.2  # the first minute is mostly the program's start
    assert pace(4, 0.9) == pytest.approx(0.67)  # it may have begun with another job's checkpoint
    assert pace(90, 0.001) == 8
    assert pace(4, 0) == 1
    assert find_pace(TASK, [], NOW, 1, 0.5) == 1
    slow, usual = inputs_of(at(40, pace=2.0)), inputs_of(at(40))
    assert slow.run_time == 2 * usual.run_time
    assert slow.terms.work_s == 2 * usual.terms.work_s


@pytest.mark.parametrize(
    ("work", "rate", "cheap"),
    [
        (None, 330_000, True),
        (None, 330_001, False),
        (TASK.work, 330_000, True),
        (
            tasks.Workload(samples=36_000, rates={"cpu:8": 1.0, "cpu:16": 2.0}),
            660_000,
            True,
        ),  # twice as fast
        (tasks.Workload(samples=36_000, rates={"cpu:8": 1.0, "cpu:16": 2.0}), 660_001, False),
    ],
)
def test_places_are_compared_by_what_the_whole_work_costs_there(
    work: tasks.Workload | None, rate: int, cheap: bool
) -> None:
    other = replace(SPOT, instance_type="f", vcpus=16, rate=HourlyRate(rate))
    assert is_about_as_cheap(replace(TASK, work=work), other, SPOT) is cheap


@pytest.mark.parametrize("known", ["H100", "A100"])
@pytest.mark.parametrize(("rate", "cheap"), [(330_000, True), (330_001, False)])
def test_places_are_compared_by_the_hour_if_the_work_is_known_on_one_of_them_only(
    known: str, rate: int, cheap: bool
) -> None:
    needs = tasks.AcceleratorNeed(name="H100"), tasks.AcceleratorNeed(name="A100")
    task = replace(
        TASK,
        resources=replace(TASK.resources, accelerators=needs),
        work=tasks.Workload(samples=36_000, rates={known: 1.0}),
    )
    h100, a100 = (
        replace(SPOT, accelerator=each.name, accelerator_count=1, accelerator_memory_mib=81_920)
        for each in needs
    )
    assert {run_time_on(task, h100), run_time_on(task, a100)} == {None, 10 * HOUR}
    assert is_about_as_cheap(task, replace(h100, rate=HourlyRate(rate)), a100) is cheap
