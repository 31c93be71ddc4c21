"""What the deadline policy is told of a job, and where a gang goes that is taken away or at
risk.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from tests.contract.store_suite import make_charge
from tests.records import FIXED, SPOT, make_attempt_record, make_job_record

from cavvy.control.clock import ControlClock
from cavvy.control.decide.deadline import StoredFacts, make_facts, usable_now
from cavvy.control.decide.placement import MarketSnapshot
from cavvy.control.markets import DeadlineAdvisor, MarketHistory
from cavvy.domain import tasks
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase, JobRecord, Node, NodePhase, RunOrigin
from cavvy.domain.markets import Observation, ObservationKind
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.candidates import OfferedMarket
from cavvy.planner.deadline.inputs import JobProgress
from cavvy.planner.deadline.policy import AHEAD, NOT_AHEAD
from cavvy.planner.deadline.recommendation import Recommendation
from cavvy.planner.markets import MarketKnowledge
from cavvy.planner.spot.view import RunMode
from cavvy.store.base import AtomicWrite
from cavvy.store.open import MemoryStore

NOW = datetime(2030, 1, 1, tzinfo=UTC)
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
TASK = tasks.TaskSpec(
    name="digits",
    run="train",
    resources=tasks.ResourceSpec(spot=tasks.SpotPolicy.AUTO),
    checkpoint=tasks.CheckpointPolicy(path="c", every=10 * MINUTE),
    work=tasks.Workload(samples=36_000, rates={"cpu": 1.0}),  # ten hours
)
STEERED = replace(TASK, limits=tasks.JobLimits(deadline_after=20 * HOUR, budget=Money(9_000_000)))


def spot(zone: str, micros: int) -> Offer:
    return replace(SPOT, zone=zone, rate=HourlyRate(micros))


class Here:
    """Places that offer this, and a clock that stands."""

    def __init__(self, *offers: Offer) -> None:
        self.offers = offers

    def now(self) -> datetime:
        return NOW

    async def market(self, *_: object) -> Any:
        return MarketSnapshot(market=OfferedMarket(offers=self.offers), as_of=NOW)

    def objections(self, task: tasks.TaskSpec, provider: str) -> Sequence[tasks.Objection]:
        return ()


def make_job(task: tasks.TaskSpec, **changes: object) -> JobRecord:
    made = make_job_record(
        NOW - 5 * HOUR,
        name="digits",
        task=task,
        origin=RunOrigin(),
        phase=JobPhase.RUNNING,
        consented=True,
        since=NOW,
        attempt=2,
        numbered=2,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


LOST = make_attempt_record(
    NOW - 5 * HOUR,
    spot("z", 250_000),
    gang="g1",
    phase=AttemptPhase.ENDED,
    since=NOW,
    running_at=NOW - 5 * HOUR,
    finished_at=NOW - 3 * HOUR,
    checkpoint_at=NOW - 4 * HOUR,
    checkpoint_bytes=300,
)
OWN = make_attempt_record(
    NOW - 3 * HOUR,
    SPOT,
    id="j-2",
    number=2,
    gang="g2",
    phase=AttemptPhase.RUNNING,
    since=NOW,
    running_at=NOW - 2 * HOUR,
    checkpoint_at=NOW - 30 * MINUTE,
    checkpoint_bytes=200,
)
NODE = Node(
    attempt_id="j-2",
    project="p",
    rank=0,
    phase=NodePhase.RUNNING,
    claim="n",
    claimed_at=NOW - 125 * MINUTE,
    running_at=NOW - 2 * HOUR,
)


def ask(
    here: Here,
    scenario: Callable[[DeadlineAdvisor], Awaitable[object]],
    job: JobRecord,
    *attempts: Attempt,
    node: Node = NODE,
) -> Any:
    """What a guide answers, where these rows are in the store."""

    async def main() -> object:
        store = MemoryStore(make_id=lambda: "test")
        nodes = [node] if any(each.id == node.attempt_id for each in attempts) else []
        await store.commit(AtomicWrite(jobs=[job], attempts=list(attempts), nodes=nodes))
        charges = [replace(make_charge(each, 10), amount=Money(1_500_000)) for each in attempts]
        await store.commit(AtomicWrite(charges=charges))
        clock = cast(ControlClock, here)
        return await scenario(
            DeadlineAdvisor(store, cast(Any, here), clock, MarketHistory(store, clock))
        )

    return asyncio.run(main())


def told(job: JobRecord, *attempts: Attempt, node: Node = NODE) -> JobProgress:
    here = Here(SPOT, FIXED)
    found = ask(here, lambda advisor: advisor.policy_inputs(job), job, *attempts, node=node)
    assert found is not None
    return cast(JobProgress, found[2])


def test_the_policy_is_told_where_the_job_stands() -> None:
    stands = told(make_job(STEERED), LOST, OWN)
    assert (stands.submitted_at, stands.deadline) == (NOW - 5 * HOUR, NOW + 15 * HOUR)
    assert stands.done == pytest.approx(0.1 + 0.2), (
        "until the last checkpoint of the one, until now of the other"
    )
    assert (stands.current, stands.works, stands.at_risk) == (SPOT, True, False)
    assert (stands.starting_for, stands.unsaved) == (3 * HOUR, 30 * MINUTE)
    assert (stands.saved_bytes, stands.budget_left) == (200, Money(6_000_000))
    assert (stands.home, stands.setup) == (SPOT, timedelta(0))


def test_what_the_work_says_of_itself_goes_before_its_time() -> None:
    for said, done in ((0.75, 0.75), (1.5, 0.3), (-0.1, 0.3), ("much", 0.3)):
        node = replace(NODE, progress={"fraction": said})
        assert told(make_job(STEERED), LOST, OWN, node=node).done == pytest.approx(done)


def test_a_gang_that_comes_or_goes_is_told_as_that() -> None:
    coming = told(
        make_job(STEERED), LOST, replace(OWN, phase=AttemptPhase.BOOTING, running_at=None)
    )
    assert (coming.current, coming.works, coming.unsaved) == (SPOT, False, timedelta(0))
    gone = told(make_job(STEERED), LOST, replace(OWN, phase=AttemptPhase.ENDING, finished_at=NOW))
    assert (gone.current, gone.home, gone.works) == (None, SPOT, False)
    assert gone.done == pytest.approx(0.1 + 0.15), "it does no more than it has saved"
    unsaved = told(make_job(STEERED), replace(OWN, checkpoint_at=None, checkpoint_bytes=0))
    assert (unsaved.unsaved, unsaved.saved_bytes) == (2 * HOUR, 0)


def test_risk_setup_and_an_overdrawn_budget_are_told() -> None:
    assert told(make_job(STEERED), OWN, node=replace(NODE, risk_at=NOW)).at_risk
    job = make_job(replace(STEERED, setup="make"))
    assert told(job, OWN).setup == 5 * MINUTE
    assert told(job, OWN, node=replace(NODE, running_at=None)).setup is None
    poor = make_job(replace(STEERED, limits=replace(STEERED.limits, budget=Money(1_000_000))))
    assert told(poor, OWN).budget_left == Money(0)
    free = make_job(replace(STEERED, limits=tasks.JobLimits(deadline_after=20 * HOUR)))
    assert told(free, OWN).budget_left is None


def test_what_a_job_used_counts_against_its_limits() -> None:
    def found(task: tasks.TaskSpec) -> Any:
        job = make_job(task)
        return ask(Here(), lambda advisor: advisor.situation(job, (LOST, OWN), NOW), job, LOST, OWN)

    known = found(STEERED)
    assert (known.ran, known.spent, known.submitted_at) == (
        4 * HOUR,
        Money(3_000_000),
        NOW - 5 * HOUR,
    )
    assert known.done == pytest.approx(0.3)
    assert found(replace(STEERED, checkpoint=None)).done == 0, (
        "what a lost gang has not saved is to be done again"
    )
    assert found(TASK).spent == Money(0), "nobody asks for it"


def ahead(task: tasks.TaskSpec, own: Attempt, *offers: Offer) -> Recommendation | None:
    job = make_job(task)
    return cast(
        "Recommendation | None",
        ask(
            Here(own.offer, *offers),
            lambda advisor: advisor.ahead(job, (own,), own, (NODE,)),
            job,
            own,
        ),
    )


def test_a_gang_at_risk_goes_to_other_spot_of_about_its_price() -> None:
    near, dear, cheap = spot("b", 330_000), spot("c", 331_000), spot("d", 100_000)
    recommendation = ahead(TASK, OWN, FIXED, dear, near, cheap)
    assert recommendation is not None
    assert (recommendation.offers, recommendation.stay, recommendation.reason) == (
        (cheap, near),
        False,
        AHEAD,
    )
    for others in ((), (FIXED,), (dear,), (replace(near, shared=True),)):
        recommendation = ahead(TASK, OWN, *others)
        assert recommendation is not None
        assert (recommendation.offers, recommendation.stay, recommendation.reason) == (
            (),
            True,
            NOT_AHEAD,
        )


def test_a_gang_that_would_lose_its_work_or_is_no_spot_does_not_go_ahead() -> None:
    assert ahead(replace(TASK, checkpoint=None), OWN, spot("b", 300_000)) is None
    assert ahead(TASK, replace(OWN, offer=FIXED), spot("b", 300_000)) is None


def test_who_follows_a_gang_that_is_taken_is_not_put_where_it_was() -> None:
    job = make_job(TASK, avoid={spot("b", 200_000).key: NOW + HOUR})

    def follows(*offers: Offer) -> Recommendation:
        return cast(
            Recommendation,
            ask(Here(*offers), lambda advisor: advisor.successor(job, (OWN,), OWN), job, OWN),
        )

    found = follows(
        SPOT, FIXED, spot("b", 200_000), spot("c", 400_000), replace(FIXED, region="s", shared=True)
    )
    assert (found.mode, found.offers) == (RunMode.SPOT, (spot("c", 400_000), FIXED))
    assert follows(SPOT, FIXED).mode is RunMode.ON_DEMAND
    assert follows(SPOT).offers == ()


def test_a_gang_whose_work_would_be_lost_is_not_reviewed() -> None:
    def reviewed(task: tasks.TaskSpec, own: Attempt) -> object:
        job = make_job(task)
        return ask(
            Here(SPOT, FIXED), lambda advisor: advisor.review(job, (own,), (NODE,)), job, own
        )

    bare = replace(STEERED, checkpoint=None)
    assert reviewed(STEERED, OWN) is not None
    assert reviewed(bare, OWN) is None
    assert reviewed(bare, replace(OWN, phase=AttemptPhase.BOOTING, running_at=None)) is not None
    assert reviewed(STEERED, replace(OWN, phase=AttemptPhase.ENDING)) is None
    assert reviewed(STEERED, replace(OWN, number=1, id="j-1")) is None


def test_offers_that_failed_a_moment_ago_come_when_their_time_is_over() -> None:
    other, soon = replace(FIXED, zone="b"), NOW + MINUTE
    job = make_job(STEERED, avoid={FIXED.key: soon})
    both = Recommendation(mode=RunMode.ON_DEMAND, offers=(FIXED, other), reason="late")
    assert usable_now(both, job, MarketKnowledge(), NOW).offers == (other,)
    no = Observation(
        market=other.key, kind=ObservationKind.REFUSED, at=NOW - 30 * timedelta(seconds=1)
    )
    none = usable_now(both, job, MarketKnowledge(recent={other.key: [no]}), NOW)
    assert (none.offers, none.again_at) == ((), NOW + MINUTE / 2)
    assert none.reason == "late, but all of these offers failed recently"
    spotty = Recommendation(mode=RunMode.SPOT, offers=(SPOT,), reason="cheap")
    refused = MarketKnowledge(recent={SPOT.key: [replace(no, market=SPOT.key)]})
    assert usable_now(spotty, job, refused, NOW).offers == (SPOT,), (
        "of spot the policy itself has been told"
    )
    stays = Recommendation(mode=RunMode.SPOT, stay=True, reason="lasts")
    assert usable_now(stays, job, MarketKnowledge(), NOW) is stays


def test_a_new_catalog_changes_the_prices_of_outgoing_data() -> None:
    reads: list[Mapping[str, Money]] = [{"aws": Money(90_000)}, {"aws": Money(50_000)}]

    async def read() -> Mapping[str, Money]:
        return reads.pop(0)

    class Passing(Here):
        at = NOW

        def now(self) -> datetime:
            return self.at

    async def prices() -> list[int]:
        here = Passing(SPOT, FIXED)
        store, clock = MemoryStore(make_id=lambda: "test"), cast(ControlClock, here)
        advisor = DeadlineAdvisor(store, cast(Any, here), clock, MarketHistory(store, clock), read)
        found = []
        for after in (timedelta(0), 30 * MINUTE, 2 * HOUR):
            here.at = NOW + after
            inputs = await advisor.policy_inputs(make_job(STEERED))
            assert inputs is not None
            found.append(inputs[2].egress["aws"].micros)
        return found

    assert asyncio.run(prices()) == [90_000, 90_000, 50_000]


def progress_of(
    *nodes: Node, current: Attempt | None = OWN, attempts: Sequence[Attempt] = (LOST, OWN)
) -> JobProgress:
    job = make_job(replace(STEERED, setup="pip install x"))
    stored = StoredFacts(attempts=attempts, nodes=nodes, current=current)
    facts = make_facts(job, (SPOT, FIXED), MarketKnowledge(), stored, NOW)
    assert facts is not None
    return facts[2]


def test_the_policy_gets_what_the_attempts_and_their_nodes_tell() -> None:
    found = progress_of()
    assert (found.current, found.home, found.works) == (SPOT, SPOT, True)
    assert (found.starting_for, found.unsaved) == (3 * HOUR, 30 * MINUTE)
    assert (found.saved_bytes, found.setup, found.at_risk) == (200, None, False)
    assert found.deadline == NOW + 15 * HOUR
    ready = Node(attempt_id="j-2", project="p", rank=0, claimed_at=NOW - 3 * HOUR)
    ready = replace(ready, running_at=NOW - 2 * HOUR, risk_at=NOW, progress={"fraction": 0.25})
    slower = replace(ready, rank=1, claimed_at=NOW - 4 * HOUR, progress={})
    found = progress_of(ready, slower)
    assert (found.setup, found.at_risk, found.done) == (2 * HOUR, True, 0.25)
    for wrong in (-0.1, 1.5, "most"):
        assert progress_of(replace(ready, progress={"fraction": wrong})).done == pytest.approx(0.3)


def test_the_samples_of_the_whole_work_correct_its_length() -> None:
    """The work of ten hours has run for one hour up to a lost gang's checkpoint and for two hours in
    this gang: a tenth of it is done, so the rest takes about three times as long as estimated.
    """
    told = {"done": 3600.0, "total": 36_000.0, "unit": "samples"}
    node = Node(attempt_id="j-2", project="p", rank=0, progress=told)
    found = progress_of(node)
    assert found.done == pytest.approx(0.1)
    assert found.pace == pytest.approx(3, rel=0.06)
    for changes in (
        {"total": 18_000.0},  # of one of two epochs
        {"unit": "tokens"},
        {"done": -1.0},
        {"done": 99_999.0},
        {"done": "most"},
        {"total": "all"},
    ):
        other = progress_of(replace(node, progress={**told, **changes}))
        assert (other.done, other.pace) == (pytest.approx(0.3), 1.0), changes
    assert progress_of(replace(node, progress={**told, "fraction": 0.25})).done == 0.25
    assert progress_of(replace(node, progress={**told, "done": 0.0})).pace == 1.0


def test_the_policy_is_told_of_no_gang_where_none_works() -> None:
    starts = replace(OWN, running_at=None, checkpoint_at=None, phase=AttemptPhase.BOOTING)
    assert progress_of(current=starts, attempts=(LOST, starts)).unsaved == timedelta(0)
    found = progress_of(current=None, attempts=(LOST,))
    assert (found.current, found.works, found.starting_for) == (None, False, timedelta(0))
    assert (found.saved_bytes, found.home) == (300, None)
    never = replace(OWN, checkpoint_at=None, checkpoint_bytes=0)
    assert progress_of(current=never, attempts=(never,)).unsaved == 2 * HOUR
    assert progress_of(current=never, attempts=(never,)).saved_bytes == 0
    plain = make_job(TASK)
    stored = StoredFacts(attempts=())
    assert make_facts(plain, (SPOT, FIXED), MarketKnowledge(), stored, NOW) is None
