"""Jobs that are to end in time at the least cost: the reconcilers ask the deadline policy, on
virtual time.
"""

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

from tests.sim.story_checks import check_all, tell

from cavvy.domain.jobs import JobPhase, Outcome
from cavvy.domain.markets import Sight
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Checkpoint, Limits, Resources, Retry, SpotPolicy, Task, Work
from cavvy.domain.units import HourlyRate, Money
from cavvy.providers.fake.script import Fate, PriceChange, Reply, Script
from cavvy.sim.stage import START, play
from cavvy.sim.story import Ending, Story, Submission, Tale

FIXED = Offer(
    provider="fake",
    region="r",
    zone="a",
    instance_type="m",
    vcpus=8,
    memory_mib=32768,
    rate=HourlyRate(1_000_000),
)
SPOT = replace(FIXED, purchase=Purchase.SPOT, rate=HourlyRate(300_000))
SPOT_B = replace(SPOT, zone="b", rate=HourlyRate(310_000))
FIXED_B = replace(FIXED, zone="b")
HOUR = timedelta(hours=1)


def task(hours: float = 4, deadline: timedelta = 8 * HOUR, **changes: object) -> Task:
    made = Task(
        name="digits",
        run="train",
        env={"FAKE_RUN_S": str(hours * 3600)},
        resources=Resources(spot=SpotPolicy.AUTO),
        checkpoint=Checkpoint(path="c", every=timedelta(minutes=10)),
        limits=Limits(deadline_after=deadline),
        work=Work(samples=hours * 3600, rates={"cpu": 1.0}),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def tell_story(
    job: Task, *launches: Fate, offers: tuple[Offer, ...] = (SPOT, FIXED), **more: object
) -> Tale:
    return only(play_story(job, *launches, offers=offers, **more))


def play_story(
    job: Task, *launches: Fate, offers: tuple[Offer, ...] = (SPOT, FIXED), **more: object
) -> Ending:
    script = Script(offers=offers, launches=launches, **more)  # type: ignore[arg-type]
    ending = play(Story(submissions=(Submission(task=job),), script=script))
    check_all(ending)
    return ending


def only(ending: Ending) -> Tale:
    [tale] = ending.tales
    return tale


def bought(tale: Tale) -> list[tuple[str | None, str, Outcome | None]]:
    return [
        (attempt.offer.zone, str(attempt.offer.purchase), attempt.outcome)
        for attempt in tale.attempts
    ]


def in_time(tale: Tale) -> bool:
    limit = START + (tale.job.task.limits.deadline_after or timedelta.max)
    return (
        tale.job.phase is JobPhase.DONE
        and tale.job.ended_at is not None
        and tale.job.ended_at <= limit
    )


def test_with_slack_a_job_runs_on_spot_and_says_why() -> None:
    tale = tell_story(task())
    assert bought(tale) == [("a", "spot", Outcome.SUCCEEDED)]
    assert tale.job.course is not None
    assert tale.job.course.mode == "spot"
    placed = next(event for event in tale.events if event.kind == "placed")
    assert "spot" in placed.text.partition(": ")[2]


def test_without_slack_a_job_runs_on_demand_at_once() -> None:
    tale = tell_story(task(hours=4, deadline=timedelta(hours=4.2)))
    assert bought(tale) == [("a", "on-demand", Outcome.SUCCEEDED)], tell(tale)
    assert in_time(tale)


def test_spot_that_is_sold_out_is_waited_for_only_while_there_is_time() -> None:
    refusals = [Fate(reply=Reply.NO_CAPACITY)] * 60
    tale = tell_story(
        task(hours=2, deadline=timedelta(hours=4)),
        *refusals,
        offers=(replace(SPOT, capacity=0), FIXED),
    )
    assert tale.attempts[-1].offer.purchase is Purchase.ON_DEMAND or not in_time(tale)


def test_a_job_that_loses_spot_again_and_again_ends_on_demand_in_time() -> None:
    fates = [Fate(preempted_after_s=1500, notice_s=120)] * 30
    tale = tell_story(task(hours=4, deadline=5.5 * HOUR), *fates[:8])
    assert in_time(tale), tell(tale)


def test_a_notice_starts_the_next_gang_while_the_first_shuts_down() -> None:
    tale = tell_story(
        task(), Fate(preempted_after_s=4000, notice_s=120), offers=(SPOT, FIXED, SPOT_B, FIXED_B)
    )
    first, second = tale.attempts[:2]
    assert first.outcome is Outcome.PREEMPTED
    assert first.ended_at is not None
    assert second.created_at < first.ended_at, tell(tale)
    assert "takeover" in [event.kind for event in tale.events]
    assert in_time(tale)


def test_a_gang_on_spot_that_does_not_boot_is_left_for_on_demand_in_time() -> None:
    tale = tell_story(task(hours=4, deadline=timedelta(hours=4.75)), Fate(boots=False))
    assert in_time(tale), tell(tale)
    assert tale.attempts[-1].offer.purchase is Purchase.ON_DEMAND


def test_an_agent_on_spot_that_falls_silent_is_left_while_on_demand_still_ends_in_time() -> None:
    """Its lease is longer than the deadline: nobody may wait for its end."""
    limits = Limits(deadline_after=6 * HOUR, unattended=12 * HOUR)
    tale = tell_story(task(hours=4, limits=limits), Fate(mute_after_s=2 * 3600))
    assert in_time(tale), tell(tale)
    assert bought(tale)[0][:2] == ("a", "spot")
    assert bought(tale)[-1] == ("a", "on-demand", Outcome.SUCCEEDED)


def test_refusals_are_tried_elsewhere_at_once() -> None:
    offers = (SPOT, FIXED, SPOT_B, FIXED_B)
    tale = tell_story(task(), Fate(reply=Reply.NO_CAPACITY), offers=offers)
    assert bought(tale)[:2] == [
        ("a", "spot", Outcome.CAPACITY),
        ("b", "spot", Outcome.SUCCEEDED),
    ], tell(tale)
    assert tale.attempts[1].created_at - tale.attempts[0].created_at < timedelta(seconds=5)


def test_what_was_seen_of_markets_is_written_down() -> None:
    tale = tell_story(task(), Fate(reply=Reply.NO_CAPACITY), Fate(preempted_after_s=3000))
    kinds = [(seen.market, seen.sight) for seen in tale.sights]
    assert (SPOT.key, Sight.REFUSED) in kinds
    assert (SPOT.key, Sight.PRICE) in kinds
    assert {Sight.GRANTED, Sight.BOOTED, Sight.TAKEN, Sight.ENDED} <= {sight for _, sight in kinds}
    [taken] = [seen for seen in tale.sights if seen.sight is Sight.TAKEN]
    assert 2900 < taken.seconds < 3100


def test_spot_that_became_dear_is_left_for_another_zone_at_a_checkpoint_without_a_stop() -> None:
    change = PriceChange(offer=SPOT.key, at_s=3000, rate=HourlyRate(950_000))
    ending = play_story(
        task(hours=6, deadline=12 * HOUR), offers=(SPOT, FIXED, SPOT_B, FIXED_B), prices=(change,)
    )
    tale = only(ending)
    assert bought(tale) == [("a", "spot", Outcome.PREEMPTED), ("b", "spot", Outcome.SUCCEEDED)], (
        tell(tale)
    )
    kinds = [event.kind for event in tale.events]
    assert [kind for kind in kinds if kind in ("relief", "handover", "takeover")] == [
        "relief",
        "handover",
        "takeover",
    ]
    first, second = [(since, until) for _, _, since, until in ending.cloud.storage.work]
    assert first[1] is not None
    assert timedelta(0) <= second[0] - first[1] < timedelta(seconds=15), (
        "the other gang was there already"
    )
    assert Sight.TAKEN not in {seen.sight for seen in tale.sights}, (
        "a move is not the market's fault"
    )
    assert not tale.job.retries.get("node")


def test_a_move_to_another_region_is_made_only_if_it_pays_for_the_checkpoint_that_leaves() -> None:
    """The newest checkpoint's size counts, 1 MiB here, and not what its author expected."""
    change = PriceChange(offer=SPOT.key, at_s=3000, rate=HourlyRate(950_000))
    offers = (SPOT, FIXED, replace(SPOT_B, region="far"), replace(FIXED_B, region="far"))
    job = task(
        hours=6,
        deadline=12 * HOUR,
        checkpoint=Checkpoint(path="c", every=HOUR / 6, size_mib=40_000),
    )
    for price, zones in ((0, ["a", "b"]), (1_000_000, ["a", "b"]), (20_000_000_000, ["a"])):
        script = Script(offers=offers, prices=(change,))
        ending = play(
            Story(
                submissions=(Submission(task=job),), script=script, egress={"fake/r": Money(price)}
            )
        )
        check_all(ending)
        tale = only(ending)
        assert [attempt.offer.zone for attempt in tale.attempts] == zones, tell(tale)


def test_a_second_gang_that_is_refused_costs_the_first_nothing() -> None:
    change = PriceChange(offer=SPOT.key, at_s=3000, rate=HourlyRate(950_000))
    fates = (Fate(), *[Fate(reply=Reply.NO_CAPACITY)] * 9)
    job = task(hours=3, deadline=12 * HOUR)
    tale = tell_story(job, *fates, offers=(SPOT, FIXED, SPOT_B, FIXED_B), prices=(change,))
    assert tale.job.phase is JobPhase.DONE
    assert (tale.attempts[0].outcome, tale.job.attempt) == (Outcome.SUCCEEDED, 1), tell(tale)
    assert {attempt.outcome for attempt in tale.attempts[1:]} <= {Outcome.CAPACITY, Outcome.STOPPED}
    assert len(tale.attempts) > 1


def test_places_tried_at_the_same_time_give_the_work_to_the_first_that_is_ready() -> None:
    offers = (SPOT, FIXED, SPOT_B, FIXED_B)
    slow, quick = Fate(boot_s=900), Fate(boot_s=30)
    ending = play_story(task(retry=Retry(parallel=2)), slow, quick, offers=offers)
    tale = only(ending)
    assert bought(tale) == [("a", "spot", Outcome.STOPPED), ("b", "spot", Outcome.SUCCEEDED)], tell(
        tale
    )
    assert tale.attempts[0].created_at == tale.attempts[1].created_at
    assert tale.attempts[0].ended_at is not None
    assert tale.attempts[0].ended_at - START < timedelta(minutes=3), (
        "the slow one is given back at once"
    )
    assert [gang[-2:] for gang, _, _, _ in ending.cloud.storage.work] == ["-2"]


def test_of_places_tried_at_the_same_time_those_that_refuse_cost_no_time() -> None:
    offers = (SPOT, FIXED, SPOT_B, FIXED_B)
    tale = tell_story(
        task(retry=Retry(parallel=2)), Fate(reply=Reply.NO_CAPACITY), Fate(), offers=offers
    )
    assert tale.job.phase is JobPhase.DONE
    assert (tale.job.attempt, tale.attempts[0].outcome) == (2, Outcome.CAPACITY), tell(tale)
    assert tale.attempts[1].created_at == tale.attempts[0].created_at
    assert "avoided" not in [event.kind for event in tale.events] or SPOT.key in tale.job.avoid
    assert in_time(tale)


def test_without_a_deadline_several_places_are_tried_too() -> None:
    job = task(limits=Limits(), retry=Retry(parallel=3))
    ending = play_story(
        job, Fate(boot_s=900), Fate(boot_s=300), Fate(boot_s=30), offers=(SPOT, FIXED, SPOT_B)
    )
    tale = only(ending)
    assert tale.job.phase is JobPhase.DONE
    assert tale.job.attempt == 3, tell(tale)
    assert len({gang for gang, _, _, _ in ending.cloud.storage.work}) == 1


def test_any_job_that_gets_a_notice_has_its_next_gang_started_at_once() -> None:
    job = task(limits=Limits(), work=None, resources=Resources(spot=SpotPolicy.ONLY))
    tale = tell_story(job, Fate(preempted_after_s=4000, notice_s=120), offers=(SPOT, SPOT_B))
    first, second = tale.attempts
    assert (first.outcome, second.outcome) == (Outcome.PREEMPTED, Outcome.SUCCEEDED)
    assert first.ended_at is not None
    assert second.created_at < first.ended_at
    assert second.offer.zone != first.offer.zone
    assert tale.job.retries == {"preemption": 1}


def test_no_gang_is_started_for_a_job_that_may_not_be_preempted_again() -> None:
    job = task(limits=Limits(), retry=Retry(preemption=0))
    tale = tell_story(job, Fate(preempted_after_s=4000, notice_s=120), offers=(SPOT, SPOT_B, FIXED))
    assert tale.job.phase is JobPhase.FAILED
    assert len(tale.attempts) == 1


def test_a_move_counts_against_no_limit_of_preemptions() -> None:
    job = task(
        limits=Limits(),
        work=None,
        resources=Resources(spot=SpotPolicy.ONLY),
        retry=Retry(preemption=1),
    )
    fates = (
        Fate(advised_after_s=3000, preempted_after_s=9000, notice_s=0),
        Fate(preempted_after_s=3000, notice_s=0),
    )
    tale = tell_story(job, *fates, offers=(SPOT, SPOT_B))
    assert tale.job.phase is JobPhase.DONE, tell(tale)
    assert tale.job.retries == {"advice": 1, "move": 1, "preemption": 1}


def test_a_job_that_was_interrupted_has_only_the_rest_to_do_before_its_deadline() -> None:
    job = task(hours=4, deadline=6.5 * HOUR, resources=Resources(spot=SpotPolicy.NEVER))
    tale = tell_story(job, Fate(preempted_after_s=3 * 3600, notice_s=0), offers=(FIXED,))
    assert len(tale.attempts) == 2, tell(tale)
    assert in_time(tale)


def test_what_an_attempt_before_has_spent_counts_against_the_budget() -> None:
    limits = Limits(budget=Money(600_000))
    tale = tell_story(task(limits=limits, work=None), Fate(preempted_after_s=5400), offers=(SPOT,))
    assert (tale.job.phase, len(tale.attempts)) == (JobPhase.FAILED, 2), tell(tale)
    spent = [
        sum(c.amount.micros for c in tale.charges if c.attempt_id == each.id)
        for each in tale.attempts
    ]
    assert spent[0] > 400_000
    assert 590_000 < sum(spent) <= 600_000, tell(tale)


def test_a_gang_that_is_said_to_be_at_risk_saves_and_leaves_for_spot_of_about_the_price() -> None:
    fate = Fate(advised_after_s=3000, preempted_after_s=6000, notice_s=0)
    offers = (SPOT, FIXED, SPOT_B, FIXED_B)
    for job in (
        task(),
        task(limits=Limits(), work=None, resources=Resources(spot=SpotPolicy.ONLY)),
    ):
        ending = play_story(job, fate, offers=offers)
        tale = only(ending)
        assert bought(tale) == [
            ("a", "spot", Outcome.PREEMPTED),
            ("b", "spot", Outcome.SUCCEEDED),
        ], tell(tale)
        kinds = [event.kind for event in tale.events if event.attempt in (1, 2)]
        assert [kind for kind in kinds if kind in ("advice", "relief", "handover", "takeover")] == [
            "advice",
            "relief",
            "handover",
            "takeover",
        ]
        at = {event.kind: event.at for event in tale.events}
        saved = [
            event.at
            for event in tale.events
            if event.kind == "checkpoint" and event.at >= at["advice"]
        ]
        assert saved[0] - at["advice"] < timedelta(seconds=5), "it saves at once"
        [relief] = [event for event in tale.events if event.kind == "relief"]
        assert "at risk" in relief.text
        assert at["takeover"] - START < timedelta(seconds=6000), "before the place took it"
        first, second = [(since, until) for _, _, since, until in ending.cloud.storage.work]
        assert first[1] is not None
        assert second[0] - first[1] < timedelta(seconds=15)
        assert Sight.TAKEN not in {seen.sight for seen in tale.sights}


def test_places_that_say_again_and_again_that_they_are_at_risk_do_not_keep_a_job_moving() -> None:
    zones = [replace(SPOT_B, zone=zone, rate=SPOT.rate) for zone in "bcdefgh"]
    advised = tuple(Fate(advised_after_s=400) for _ in range(60))
    job = task(hours=8, limits=Limits(), work=None, resources=Resources(spot=SpotPolicy.ONLY))
    tale = tell_story(job, *advised, offers=(SPOT, *zones))
    assert tale.job.phase is JobPhase.DONE
    moves = [event.at for event in tale.events if event.kind == "takeover"]
    assert 2 < len(moves) < 9, tell(tale)
    stays = [later - earlier for earlier, later in pairwise(moves)]
    assert stays[-1] > 2 * stays[1]


def test_a_gang_at_risk_stays_where_no_other_spot_is_there_for_about_its_price_and_says_so_once() -> (
    None
):
    dear = (replace(SPOT_B, rate=HourlyRate(600_000)), FIXED_B)
    for job in (
        task(),
        task(limits=Limits(), work=None, resources=Resources(spot=SpotPolicy.ONLY)),
    ):
        tale = tell_story(job, Fate(advised_after_s=3000), offers=(SPOT, FIXED, *dear))
        assert bought(tale) == [("a", "spot", Outcome.SUCCEEDED)], tell(tale)
        [stays] = [event for event in tale.events if event.kind == "stays"]
        assert "at risk" in stays.text


def test_work_that_saves_nothing_is_not_moved_when_it_is_at_risk() -> None:
    job = task(hours=1, deadline=12 * HOUR, checkpoint=None)
    tale = tell_story(job, Fate(advised_after_s=1000), offers=(SPOT, FIXED, SPOT_B, FIXED_B))
    assert bought(tale) == [("a", "spot", Outcome.SUCCEEDED)], tell(tale)


def test_on_demand_is_left_for_on_demand_that_became_cheaper_elsewhere() -> None:
    """Its spot is sold out everywhere, and so much slack is not left that waiting for it would
    do.
    """
    change = PriceChange(offer=FIXED_B.key, at_s=3600, rate=HourlyRate(400_000))
    offers = (FIXED, replace(FIXED_B, rate=HourlyRate(1_100_000)), replace(SPOT, capacity=0))
    tale = tell_story(task(hours=3, deadline=timedelta(hours=3.6)), offers=offers, prices=(change,))
    assert bought(tale) == [
        ("a", "on-demand", Outcome.PREEMPTED),
        ("b", "on-demand", Outcome.SUCCEEDED),
    ], tell(tale)
    [relief] = [event for event in tale.events if event.kind == "relief"]
    assert "on-demand is cheaper elsewhere" in relief.text
    assert in_time(tale)


def test_a_gang_on_demand_is_given_back_once_waiting_for_spot_is_cheaper_and_the_slack_is_long() -> (
    None
):
    """On demand costs less than spot at first, so nothing is waited for; then its price rises
    fivefold.
    """
    change = PriceChange(offer=FIXED.key, at_s=900, rate=HourlyRate(1_000_000))
    offers = (replace(FIXED, rate=HourlyRate(200_000)), replace(SPOT, capacity=0))
    tale = tell_story(task(hours=1.5, deadline=16 * HOUR), offers=offers, prices=(change,))
    assert bought(tale) == [
        ("a", "on-demand", Outcome.PREEMPTED),
        ("a", "on-demand", Outcome.SUCCEEDED),
    ], tell(tale)
    first, second = tale.attempts
    assert first.created_at == START, "on-demand costs no more than spot"
    assert first.ended_at is not None
    assert second.created_at - first.ended_at > HOUR, "it is not given back for a short wait"
    [given] = [event for event in tale.events if event.text.startswith("gives ")]
    assert "enough to wait for spot" in given.text
    assert in_time(tale)
