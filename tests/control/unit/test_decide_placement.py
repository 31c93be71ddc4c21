"""Whether a task can be placed, whose turn it is, and the rows that start a job."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from tests.records import make_attempt_record

from cavvy.control.decide.job import AdvanceJob
from cavvy.control.decide.placement import (
    MarketSnapshot,
    find_allowed,
    find_placement,
    find_placements,
    is_limited,
    is_steered,
    list_usable,
    make_situation,
    place_job,
    record_plan,
    take_advice,
)
from cavvy.control.decide.queue import (
    Arrivals,
    QueueWait,
    Start,
    decide_turn,
    explain_waits,
    line_up,
    looks_deep,
    note_arrival,
)
from cavvy.domain.accounts import Project
from cavvy.domain.allocations import Host, VolumeLocation
from cavvy.domain.credentials import CredentialBook
from cavvy.domain.jobs import JobPhase, JobRecord, PlanState
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.policies import BoundPolicy, PolicyBook, ProjectPolicy
from cavvy.domain.tasks import (
    CheckpointPolicy,
    JobLimits,
    Objection,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    TaskSpec,
    Volume,
    VolumeKind,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.candidates import Candidates, OfferedMarket, rank_candidates
from cavvy.planner.deadline.recommendation import Recommendation
from cavvy.planner.placements import PlanningContext
from cavvy.planner.spot.view import RunMode
from cavvy.scheduler.queue import JobPlacement, JobScheduler, JobWait, QueueCapacity

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
NEAR = Offer(
    provider="p", region="r", instance_type="t", vcpus=4, memory_mib=8192, rate=HourlyRate(10)
)
FAR_OFF = replace(NEAR, region="s", rate=HourlyRate(20))
DEAR = replace(NEAR, region="d", rate=HourlyRate(30))
TASK = TaskSpec(name="n", run="x")
JOB = JobRecord(
    id="j", project="p", name="n", task=TASK, submitted_at=NOW, since=NOW, consented=True
)


def snapshot(*offers: Offer) -> MarketSnapshot:
    return MarketSnapshot(market=OfferedMarket(offers=offers), as_of=NOW)


def no_objections(task: TaskSpec, provider: str) -> Sequence[str]:
    return ()


def ask(job: JobRecord, *offers: Offer) -> Candidates:
    return find_placement(job, snapshot(*offers), no_objections, PlanningContext(), NOW)


def turn(
    job: JobRecord, *offers: Offer, scheduler: JobScheduler | None = None
) -> Start | QueueWait | AdvanceJob:
    found = [*find_placements(job, snapshot(*offers), no_objections, PlanningContext(), NOW)]
    taken = scheduler or JobScheduler(QueueCapacity())
    return decide_turn(job, found, rank_candidates(found), taken, str, NOW)


# Can this task be placed?


def test_the_offers_of_a_task_are_those_that_fit_cheapest_first() -> None:
    assert ask(JOB, DEAR, NEAR).offers == (NEAR, DEAR)


def test_an_offer_in_doubt_is_used_only_if_the_task_names_its_machine_type() -> None:
    """Also if it is the cheapest, since a price that was read wrongly may look cheap."""
    market = OfferedMarket(offers=(NEAR, DEAR), doubts={NEAR.key: "p/r/t: the price is far off"})
    doubtful = MarketSnapshot(market=market, as_of=NOW)

    def find(job: JobRecord, market: MarketSnapshot = doubtful) -> Candidates:
        return find_placement(job, market, no_objections, PlanningContext(), NOW)

    assert find(JOB).offers == (DEAR,)
    named = replace(JOB, task=replace(TASK, resources=ResourceSpec(instance="t")))
    assert find(named).offers == (NEAR, DEAR)
    typed = replace(JOB, task=replace(TASK, resources=ResourceSpec(instance="T")))
    assert find(typed).offers == (NEAR, DEAR)
    alone = replace(market, offers=(NEAR,))
    none = find(JOB, MarketSnapshot(market=alone, as_of=NOW))
    assert (none.offers, none.hopeless) == ((), True)
    assert none.reason.startswith("p/r/t: the price is far off")
    zones = [replace(NEAR, zone=zone) for zone in "abc"]
    many = OfferedMarket(offers=zones, doubts={each.key: f"{each.key}: odd" for each in zones})
    none = find(JOB, MarketSnapshot(market=many, as_of=NOW))
    assert none.reason.count(": odd") == 1
    assert "2 more offers are in doubt; `cavvy check PROVIDER` shows examples" in none.reason
    assert ask(replace(JOB, avoid={NEAR.key: NOW + SECOND}), DEAR, NEAR).offers == (DEAR,)
    assert ask(replace(JOB, consented=False), NEAR).hopeless


def test_each_wish_is_asked_for_by_itself() -> None:
    wishes = tuple(ResourceSpec(providers=(name,)) for name in ("p", "q"))
    job = replace(JOB, task=replace(TASK, resources=replace(wishes[0], any_of=wishes)))
    other = replace(NEAR, provider="q")
    found = [*find_placements(job, snapshot(NEAR, other), no_objections, PlanningContext(), NOW)]
    assert [candidates.offers for _, candidates in found] == [(NEAR,), (other,)]


def test_matches_are_found_once_for_equal_resources() -> None:
    market = snapshot(NEAR)
    assert market.match(JOB) is market.match(replace(JOB, id="k"))
    bigger = replace(JOB, task=replace(TASK, resources=ResourceSpec(cpus_min=8)))
    assert market.match(bigger) is not market.match(JOB)


def test_jobs_that_need_the_same_have_the_same_candidates() -> None:
    """The queue finds them once for each need, and not for each of thousands of jobs."""
    market = snapshot(NEAR, FAR_OFF)

    def object_to(task: TaskSpec, provider: str) -> Sequence[Objection]:
        return [Objection("run", "no")] if task.run == "bad" else []

    def find(job: JobRecord, *resting: str) -> Candidates:
        return find_placement(job, market, object_to, PlanningContext(avoid=resting), NOW)

    first = find(JOB)
    other = replace(TASK, name="m", run="y", env={"A": "b"}, tags={"t": "u"}, project="q")
    same = [
        replace(JOB, id="k"),
        replace(JOB, project="q", task=other),
        replace(JOB, avoid={NEAR.key: NOW}),
    ]
    assert all(find(each) is first for each in same)
    assert find(replace(JOB, task=replace(TASK, run="bad"))).hopeless
    assert find(replace(JOB, consented=False)).hopeless
    assert find(replace(JOB, avoid={NEAR.key: NOW + SECOND})).offers == (FAR_OFF,)
    late = replace(JOB, avoid={NEAR.key: NOW + SECOND, FAR_OFF.key: NOW + MINUTE})
    assert find(late).again_at == NOW + SECOND
    assert find(JOB, NEAR.key).offers == (FAR_OFF, NEAR)
    assert find(replace(JOB, task=replace(TASK, nodes=2))) is not first
    capped = replace(JOB, task=replace(TASK, limits=JobLimits(duration=HOUR)))
    assert find(capped) is not find(capped)
    assert find(JOB) is first


def test_policies_that_allow_the_same_share_candidates() -> None:
    rules = {
        "p": ProjectPolicy(share=2, quota_gpus=8),
        "q": ProjectPolicy(max_gpus=4, user_jobs=3),
        "r": ProjectPolicy(regions=("s",)),
    }
    book = PolicyBook([BoundPolicy(name, each) for name, each in rules.items()], [])
    market = MarketSnapshot(market=OfferedMarket(offers=(NEAR, FAR_OFF), policies=book), as_of=NOW)

    def find(project: str) -> Candidates:
        job = replace(JOB, project=project, task=replace(TASK, project=project))
        return find_placement(job, market, no_objections, PlanningContext(), NOW)

    assert find("p") is find("q")
    assert find("r").offers == (FAR_OFF,)


def test_a_job_is_not_placed_with_the_credential_of_another_project() -> None:
    projects = [Project(name="p"), Project(name="q")]
    own, others = replace(DEAR, credential="p"), replace(NEAR, credential="q")
    market = OfferedMarket(
        offers=(own, others), credentials=CredentialBook([("p", "p"), ("q", "p")], projects)
    )
    found = MarketSnapshot(market=market, as_of=NOW)
    for project, offer in (("p", own), ("q", others)):
        job = replace(JOB, project=project)
        asked = find_placement(job, found, no_objections, PlanningContext(), NOW)
        assert asked.offers == (offer,)
        assert tuple(list_usable(job, found, no_objections)) == (offer,)


def test_an_offer_without_free_capacity_is_allowed_all_the_same() -> None:
    full = replace(NEAR, capacity=0)
    allows = find_allowed(JOB, snapshot(full), no_objections, PlanningContext(), NOW)
    assert allows(full)
    small = replace(JOB, task=replace(TASK, resources=ResourceSpec(cpus_min=64)))
    assert not find_allowed(small, snapshot(full), no_objections, PlanningContext(), NOW)(full)


def test_a_deadline_with_automatic_spot_is_steered_and_any_limit_is_a_limit() -> None:
    auto = replace(TASK, resources=ResourceSpec(spot=SpotPolicy.AUTO))
    due = JobLimits(deadline_after=HOUR)
    assert is_steered(replace(JOB, task=replace(auto, limits=due)))
    assert not is_steered(replace(JOB, task=auto))
    assert not is_steered(replace(JOB, task=replace(auto, limits=due, machine="m")))
    assert not is_steered(replace(JOB, task=replace(TASK, limits=due)))
    for limits in (due, JobLimits(budget=Money(1)), JobLimits(duration=HOUR)):
        assert is_limited(replace(JOB, task=replace(TASK, limits=limits)))
    assert not is_limited(JOB)


def test_only_a_checkpoint_makes_work_of_the_current_attempt_count() -> None:
    ran = make_attempt_record(NOW, NEAR, running_at=NOW - HOUR)
    task = replace(TASK, limits=JobLimits(duration=4 * HOUR))
    job = replace(JOB, attempt=1, task=task)
    context = make_situation(job, [ran], Money(5), {"x"}, NOW)
    assert (context.ran, context.spent, context.avoid, context.done) == (HOUR, Money(5), {"x"}, 0)
    saves = replace(job, task=replace(task, checkpoint=CheckpointPolicy(path="c")))
    context = make_situation(saves, [ran], Money(5), (), NOW)
    assert (context.submitted_at, context.done) == (NOW, 0.25)


def test_the_highest_number_of_an_attempt_is_known_only_for_jobs_with_standby_gangs() -> None:
    for numbered, then in ((0, 0), (4, 5)):
        job = replace(JOB, attempt=3, numbered=numbered)
        changes = place_job(
            JobPlacement(job=job, offer=NEAR), Candidates(offers=(NEAR,)), snapshot(NEAR), str, NOW
        )
        assert changes.job is not None
        assert changes.job.numbered == then
        assert [each.number for each in changes.attempts] == [max(3, numbered) + 1]


# Plans


IDLE = Recommendation(mode=RunMode.IDLE, reason="spot comes back", again_at=NOW + MINUTE)
THERE = Recommendation(mode=RunMode.SPOT, offers=(NEAR,), reason="spot is there")


def test_the_policys_answer_says_that_it_waits_only_without_offers() -> None:
    waits, goes = take_advice(IDLE, NOW), take_advice(THERE, NOW)
    assert (waits.reason, waits.again_at) == ("waits: spot comes back", NOW + MINUTE)
    assert (goes.reason, goes.offers) == ("spot is there", (NEAR,))


def test_a_plan_is_dated_by_its_last_change_of_mode_or_offer() -> None:
    first = record_plan(JOB, IDLE, None, NOW)
    again = record_plan(first, replace(IDLE, reason="other words"), None, NOW + MINUTE)
    assert again.plan_state is not None
    assert (again.plan_state.at, again.plan_state.reason) == (NOW, "other words")
    for recommendation, offer in ((THERE, None), (IDLE, NEAR)):
        moved = record_plan(first, recommendation, offer, NOW + MINUTE)
        assert moved.plan_state is not None
        assert moved.plan_state.at == NOW + MINUTE


# Whose turn it is


def test_a_job_starts_waits_or_fails() -> None:
    start = turn(JOB, NEAR)
    assert isinstance(start, Start)
    assert (start.place.offer, start.candidates.offers) == (NEAR, (NEAR,))
    full = turn(JOB, replace(NEAR, capacity=0))
    assert isinstance(full, QueueWait)
    assert full.wait.behind == (NEAR.key,)
    cools = turn(replace(JOB, avoid={NEAR.key: NOW + MINUTE}), NEAR)
    assert isinstance(cools, QueueWait)
    assert (cools.again_at, cools.wait.behind) == (NOW + MINUTE, ())
    never = turn(replace(JOB, consented=False), NEAR)
    assert isinstance(never, AdvanceJob)
    assert never.phase is JobPhase.FAILED


def test_a_job_is_lined_up_without_the_hosts_that_failed_it() -> None:
    job = replace(JOB, attempt=2, avoid={"farm/a": NOW + SECOND, "farm/b": NOW})
    waiting = line_up(job, (NEAR,), lambda name: f"gang-{name}", NOW)
    assert (waiting.gang, waiting.avoid) == ("gang-j-3", frozenset({"farm/a"}))


def placed(
    task: TaskSpec, chosen: Offer, *offers: Offer, plan: PlanState | None = None
) -> list[str]:
    job = replace(JOB, task=task, plan_state=plan)
    candidates = Candidates(offers=offers, plan_state=plan)
    market = MarketSnapshot(
        market=OfferedMarket(offers=offers), as_of=NOW, used={NEAR.key: Fraction(1)}
    )
    changes = place_job(JobPlacement(job=job, offer=chosen), candidates, market, str, NOW)
    assert changes.job is not None
    assert changes.job.phase is JobPhase.STARTING
    assert changes.job.standbys == tuple(range(2, len(changes.attempts) + 1))
    assert len(changes.nodes) == task.nodes * len(changes.attempts)
    if plan is not None:
        assert changes.job.plan_state == replace(plan, at=NOW, place=chosen.key)
    return [attempt.offer.region for attempt in changes.attempts]


def test_a_job_that_races_starts_on_others_that_have_room() -> None:
    two = replace(TASK, retry=RetryPolicy(parallel=2))
    three = replace(TASK, retry=RetryPolicy(parallel=3))
    shared = replace(FAR_OFF, region="h", shared=True)
    full = replace(FAR_OFF, region="f", capacity=0)
    assert placed(TASK, NEAR, NEAR, FAR_OFF) == ["r"]
    assert placed(two, NEAR, NEAR, shared, full, FAR_OFF, DEAR) == ["r", "s"]
    assert placed(three, NEAR, NEAR, FAR_OFF, DEAR) == ["r", "s", "d"]
    assert placed(two, replace(NEAR, shared=True), FAR_OFF) == ["r"]
    assert placed(two, NEAR, replace(FAR_OFF, capacity=1)) == ["r", "s"]
    plan = PlanState(at=NOW - HOUR, mode="spot", reason="spot is there")
    assert placed(TASK, NEAR, NEAR, plan=plan) == ["r"]


def wait(job: JobRecord, reason: str, plan: PlanState | None = None) -> QueueWait:
    return QueueWait(wait=JobWait(job=job, reason=reason, behind=()), plan=plan)


def test_jobs_that_stay_are_told_why_where_their_rows_do_not_say_it() -> None:
    says = replace(JOB, reason="full")
    jobs, events = explain_waits([wait(says, "full"), wait(JOB, "full")], NOW)
    assert ([job.reason for job in jobs], list(events)) == (["full"], [])
    many, _ = explain_waits([wait(JOB, "full")] * 9, NOW)
    assert len(many) == 4


def test_a_decision_is_an_event_when_it_changes_and_not_when_its_words_do() -> None:
    plan = PlanState(at=NOW, mode="idle", reason="x")
    job = replace(JOB, reason="x", plan_state=plan)
    for new, events in (
        (replace(plan, at=NOW + MINUTE), 0),
        (replace(plan, reason="y"), 0),
        (replace(plan, mode="spot"), 1),
        (replace(plan, place="p/r/t"), 1),
    ):
        jobs, told = explain_waits([wait(job, "x", new)], NOW)
        assert len(told) == events
        assert all(each.plan_state is not None for each in jobs)
    assert explain_waits([wait(job, "x")], NOW) == ([], [])
    assert len(explain_waits([wait(JOB, "x", plan)], NOW)[1]) == 1


def test_a_host_that_cannot_be_used_is_an_event_and_is_told_behind_many_jobs() -> None:
    def unusable(job: JobRecord, reason: str) -> QueueWait:
        wait = JobWait(job=job, reason=reason, behind=(), unusable=True)
        return QueueWait(wait=wait)

    stays = [wait(JOB, "full")] * 9 + [unusable(JOB, "no answer for 3 s")]
    jobs, events = explain_waits(stays, NOW)
    assert jobs[-1].reason == "no answer for 3 s"
    found = [(event.kind, event.fact, event.text) for event in events]
    assert found == [("waits", "unusable", "no answer for 3 s")]
    _, again = explain_waits([unusable(jobs[-1], "no answer for 4 s")], NOW)
    assert again == []


@pytest.mark.parametrize(
    ("behind", "last", "looks"),
    [
        (set(), None, True),
        ({NEAR.key}, None, False),
        ({FAR_OFF.key}, None, True),
        (set(), NOW - 9 * SECOND, False),
        (set(), NOW - 10 * SECOND, True),
    ],
)
def test_a_blocked_head_is_looked_behind_now_and_then(
    behind: set[str], last: datetime | None, looks: bool
) -> None:
    assert looks_deep(snapshot(NEAR), behind, last, NOW) is looks
    assert not looks_deep(None, behind, last, NOW)


def test_arrivals_wait_while_nothing_is_free_and_in_a_burst_for_a_second() -> None:
    arrivals, pauses = Arrivals(), []
    for number in range(140):
        at = NOW + number * timedelta(milliseconds=9)
        arrivals, pause = note_arrival(arrivals, at, blocked=False)
        pauses.append(pause)
    assert pauses[18] == timedelta(0)
    assert pauses[19] == timedelta(milliseconds=200)
    assert arrivals.burst_since == NOW + 19 * timedelta(milliseconds=9)
    assert pauses[-1] == timedelta(0), "the answers went first for long enough"
    calm, pause = note_arrival(arrivals, NOW + MINUTE, blocked=False)
    assert (calm.burst_since, pause) == (None, timedelta(0))
    assert note_arrival(Arrivals(), NOW, blocked=True)[1] == timedelta(milliseconds=250)


def test_spot_that_the_job_may_use_is_an_offer_like_others() -> None:
    spot = replace(NEAR, purchase=Purchase.SPOT, rate=HourlyRate(3))
    asked = replace(JOB, task=replace(TASK, resources=ResourceSpec(spot=SpotPolicy.AUTO)))
    assert spot in ask(asked, NEAR, spot).offers


def test_jobs_of_two_projects_with_one_task_find_their_own_volumes() -> None:
    near, far = replace(NEAR, zone="h1", shared=True), replace(NEAR, zone="h2", shared=True)
    volume = Volume(kind=VolumeKind.NAMED, source="models", path="/cache")
    jobs = [
        replace(JOB, project=name, task=replace(TASK, project=name, volumes=(volume,)))
        for name in ("a", "b")
    ]
    places = [
        VolumeLocation(provider="p", names=("models",), region="r", zone=zone, project=project)
        for project, zone in (("a", "h1"), ("b", "h2"))
    ]
    hosts = [Host(name=f"p/{zone}", cpus=4, memory_mib=8192, group="p/r") for zone in ("h1", "h2")]
    market = MarketSnapshot(
        market=OfferedMarket(offers=[near, far], hosts=hosts, volumes=places, makers={"p"}),
        as_of=NOW,
    )
    found = [find_placement(each, market, no_objections, PlanningContext(), NOW) for each in jobs]
    assert [each.offers for each in found] == [(near,), (far,)]
    assert found[1].bound == "only h2 has the volume models"
    full = QueueCapacity(hosts=[replace(each, ready=False, problem="cut") for each in hosts])
    turn = [(jobs[1], found[1])]
    waits = decide_turn(
        jobs[1], turn, rank_candidates(turn), JobScheduler(full), lambda *_: "g", NOW
    )
    assert isinstance(waits, QueueWait)
    assert waits.wait.reason.endswith("; only h2 has the volume models")
