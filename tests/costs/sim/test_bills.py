"""Bills of clouds whose records differ from what they bill: they revise, jitter, forget, and miss
ends; the server dies, and is away for long. The truth is what the fake cloud billed.
"""

from collections import defaultdict
from datetime import timedelta
from random import Random

import pytest
from tests.records import make_offer
from tests.sim.scenario_checks import check_nothing_left, stretches, tell

from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.tasks import JobLimits, RetryPolicy, TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.providers.fake.script import (
    CallOutcome,
    CloudScript,
    FaultScript,
    PriceChange,
    RecordScript,
    RemovalScript,
    TimeSpan,
)
from cavvy.sim.harness import play
from cavvy.sim.scenario import (
    CrashMoment,
    ScenarioResult,
    ServerCrash,
    SimScenario,
    SimSubmission,
)

STORIES = 34  # of each kind: 204 in all
KINDS = {
    "honest": RecordScript(),
    "revises": RecordScript(start_late_s=40.0),
    "jitters": RecordScript(jitter_s=1e-4),
    "forgets": RecordScript(remembers_s=0.0),
    "misses ends": RecordScript(ends_unseen=True),
    "all at once": RecordScript(remembers_s=20.0, start_late_s=25.0, jitter_s=1e-4),
}


def make_story(number: int, records: RecordScript) -> SimScenario:
    dice = Random(number)
    offer = make_offer(
        "fake/somewhere/paid",
        dice.randrange(500_000, 4_000_000),
        vcpus=8,
        memory_mib=32768,
        minimum_charge=timedelta(seconds=dice.choice((0, 0, 60, 600))),
        source="made up",
    )
    prices = tuple(
        PriceChange(
            offer=offer.key,
            at_s=dice.uniform(0, 2000),
            rate=HourlyRate(dice.randrange(500_000, 4_000_000)),
        )
        for _ in range(dice.randrange(3))
        if records.remembers_s > 3600  # a price that a forgetful cloud never reported is unknown
    )
    launches = tuple(
        FaultScript(
            reply=dice.choice((CallOutcome.OK, CallOutcome.OK, CallOutcome.LOST)),
            boot_s=dice.uniform(1, 60),
            preempted_after_s=dice.choice((None, dice.uniform(1, 900))),
            lost_rank=dice.choice((None, None, 0)),
            lost_after_s=dice.uniform(1, 900),
        )
        for _ in range(3)
    )
    crashes = tuple(
        ServerCrash(
            call=call,
            when=dice.choice(tuple(CrashMoment)),
            down_s=dice.choice((0.0, 30.0, 1000.0, 20_000.0)),
        )
        for call in sorted(dice.sample(range(1, 80), dice.randrange(4)))
    )
    task = TaskSpec(
        name="t",
        run="true",
        nodes=dice.choice((1, 1, 2, 3)),
        env={"FAKE_RUN_S": str(dice.randrange(20, 900))},
        retry=RetryPolicy(node=9),
        limits=JobLimits(unattended=timedelta(minutes=20)),
    )
    script = CloudScript(
        offers=(offer,),
        launches=launches,
        removals=(RemovalScript(takes_s=dice.uniform(0, 90)),),
        prices=prices,
        storms=tuple(
            TimeSpan(at_s=dice.uniform(0, 2000), for_s=60.0) for _ in range(dice.randrange(2))
        ),
        records=records,
    )
    return SimScenario(
        submissions=(SimSubmission(task=task, consented=True),), script=script, crashes=crashes
    )


def find_wrong(ending: ScenarioResult, slack_s: float) -> list[str]:
    """The gangs whose bill, or its range, does not contain what the cloud billed. An attempt that
    replaces lost nodes takes over the gang of the one before."""
    wrong = []
    [trace] = ending.traces
    by_gang: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in trace.attempts:
        assert attempt.phase is AttemptPhase.ENDED
        by_gang[attempt.bought_as].append(attempt)
    for gang, attempts in by_gang.items():
        lives = [life for life in ending.cloud.lives() if life.gang == gang]
        truth = sum(rate.over(b - a).micros for life in lives for a, b, rate, _ in stretches(life))
        ids = {attempt.id for attempt in attempts}
        mine = [charge for charge in trace.charges if charge.attempt_id in ids]
        billed = sum(charge.amount.micros for charge in mine)
        unsure = [each.unsure_bill for each in attempts if each.unsure_bill]
        more = sum(each.more.micros for each in unsure)
        slack = (
            len(attempts)
            + len(lives)
            + sum(
                max(rate for _, rate in life.rates).over(timedelta(seconds=slack_s)).micros
                for life in lives
            )
        )
        if not billed - slack <= truth <= billed + more + slack:
            wrong.append(f"{sorted(ids)}: billed {billed} to {billed + more}, cost {truth}")
        if unsure and KINDS["honest"] == ending.cloud.script.records:
            wrong.append(f"{sorted(ids)}: unsure, though the cloud reported the end")
    return wrong


def test_bills_of_replicas_grow_also_on_free_nodes() -> None:
    """The requests and tokens of replicas are counted with their bills."""
    script = CloudScript(offers=(make_offer("fake/somewhere/own", 0, vcpus=8, memory_mib=32768),))
    for tags, bills in (({}, 0), ({SERVICE_TAG: "s"}, 1)):
        task = TaskSpec(name="t", run="true", tags=tags, env={"FAKE_RUN_S": "9000"})
        submission = SimSubmission(task=task, consented=True)
        early = timedelta(minutes=10)
        ending = play(SimScenario(submissions=(submission,), script=script, longest=early))
        assert not ending.finished
        assert len(ending.traces[0].charges) == bills, "while the node runs"


@pytest.mark.parametrize("kind", KINDS)
def test_a_bill_is_what_the_cloud_billed_or_a_range_around_it(kind: str) -> None:
    records, wrong = KINDS[kind], []
    for number in range(STORIES):
        ending = play(make_story(number, records))
        assert ending.finished, number
        check_nothing_left(ending)
        slack = records.jitter_s
        wrong += [
            f"story {number}: {each}\n{tell(ending.traces[0])}"
            for each in find_wrong(ending, slack)
        ]
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:3])


@pytest.mark.parametrize("budget_s", [60, 100, 300, 3600])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_tenfold_price_does_not_outrun_a_budget(budget_s: int, share: float) -> None:
    """A budget that pays for `budget_s`, of which this share is spent when the price rises."""
    story = make_story(0, RecordScript())
    offer = replace(story.script.offers[0], rate=HourlyRate(3_600_000), minimum_charge=timedelta(0))
    rise = PriceChange(offer=offer.key, at_s=budget_s * share, rate=HourlyRate(36_000_000))
    launches = (FaultScript(boot_s=2.0),)
    script = CloudScript(
        offers=(offer,), prices=(rise,), launches=launches, removals=(RemovalScript(takes_s=1.0),)
    )
    limits = JobLimits(budget=Money(budget_s * 1000))
    task = TaskSpec(name="t", run="true", env={"FAKE_RUN_S": "90000"}, limits=limits)
    ending = play(
        SimScenario(submissions=(SimSubmission(task=task, consented=True),), script=script)
    )
    [trace] = ending.traces
    spent = sum(charge.amount.micros for charge in trace.charges)
    assert spent <= budget_s * 1000, tell(trace)
