"""Random scenarios about jobs with deadlines and budgets, each made from its number, and what must
hold of them all.
"""

from datetime import timedelta
from random import Random

from tests.sim.scenario_checks import check_all, tell

from cavvy.domain import tasks
from cavvy.domain.events import ChargeKind
from cavvy.domain.jobs import AttemptOutcome, JobPhase
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, Money
from cavvy.providers.fake.script import (
    CallOutcome,
    CloudScript,
    FaultScript,
    PriceChange,
    RemovalScript,
    TimeSpan,
)
from cavvy.sim import scenario as sim
from cavvy.sim.harness import play

LEASE = timedelta(minutes=20)
# What a deadline must leave beyond the work for us to promise it: the policy's two starts on spot
# (boot, setup and the work between two checkpoints each), what it keeps spare, and the troubles of
# the scenario itself, each at its longest.
START_S = 300.0


def make_scenario(number: int) -> tuple[sim.SimScenario, float]:
    """The scenario of this number, and the seconds of its own troubles that a deadline must bear."""
    dice = Random(number)
    offers = make_offers(dice)
    crashes = tuple(
        sim.ServerCrash(
            call=call,
            when=dice.choice(tuple(sim.CrashMoment)),
            down_s=dice.choice((0.0, 5.0, 30.0, 300.0)),
        )
        for call in sorted(dice.sample(range(1, 160), dice.randrange(4)))
    )
    storms = tuple(
        TimeSpan(at_s=dice.uniform(0, 9000), for_s=dice.choice((30.0, 300.0)))
        for _ in range(dice.randrange(3))
    )
    broken = frozenset(dice.sample(range(2, 120), dice.randrange(4)))
    troubles = sum(crash.down_s + 130 for crash in crashes) + sum(
        span.for_s + 30 for span in storms
    )
    troubles += 150.0 * len(broken) + 900
    prices = [
        PriceChange(
            offer=dice.choice(offers).key,
            at_s=dice.uniform(0, 20000),
            rate=HourlyRate(dice.randrange(100_000, 3_000_000)),
        )
        for _ in range(dice.randrange(4))
    ]
    submissions = tuple(make_submission(dice, troubles) for _ in range(dice.choice((1, 1, 2, 3))))
    wishes = [
        sim.UserIntervention(
            action=sim.UserAction.DRILL,
            job=0,
            at_s=dice.uniform(0, 9000),
            notice_s=dice.choice((0.0, 30.0)),
        )
    ]
    scenario = sim.SimScenario(
        submissions=submissions,
        script=CloudScript(
            offers=offers,
            launches=tuple(make_fault_script(dice) for _ in range(dice.randrange(14))),
            removals=tuple(
                RemovalScript(
                    reply=dice.choice((CallOutcome.OK, CallOutcome.LOST, CallOutcome.TRY_AGAIN)),
                    takes_s=dice.choice((0.0, 5.0, 60.0)),
                )
                for _ in range(dice.randrange(6))
            ),
            prices=tuple(prices),
            storms=storms,
        ),
        interventions=tuple(wishes[: dice.randrange(2)]),
        crashes=crashes,
        stale=frozenset(dice.sample(range(1, 120), dice.randrange(5))),
        broken=broken,
        store_s=dice.choice((0.0, 0.0, 0.01)),
    )
    return scenario, troubles


def make_offers(dice: Random) -> tuple[Offer, ...]:
    found = []
    for zone in "abc"[: dice.choice((1, 2, 3))]:
        fixed = Offer(
            provider="fake",
            region="r",
            zone=zone,
            instance_type="m",
            vcpus=8,
            memory_mib=32768,
            rate=HourlyRate(dice.randrange(900_000, 1_100_000)),
            minimum_charge=timedelta(seconds=dice.choice((0, 60))),
        )
        spot = HourlyRate(dice.randrange(150_000, 700_000))
        found += [fixed, Offer(**{**_fields(fixed), "purchase": Purchase.SPOT, "rate": spot})]  # type: ignore[arg-type]
    return tuple(found)


def _fields(offer: Offer) -> dict[str, object]:
    return {name: getattr(offer, name) for name in Offer.__slots__}


def make_fault_script(dice: Random) -> FaultScript:
    """What a launch on spot meets; one on demand may only be slow to answer, or its answer be
    lost.
    """
    taken = dice.choice((None, None, dice.uniform(10, 9000)))
    return FaultScript(
        reply=dice.choice(
            (
                CallOutcome.OK,
                CallOutcome.OK,
                CallOutcome.OK,
                CallOutcome.LOST,
                CallOutcome.TRY_AGAIN,
                CallOutcome.NO_CAPACITY,
            )
        ),
        latency_s=dice.choice((0.1, 1.0, 20.0)),
        hidden_s=dice.choice((0.0, 0.0, 20.0)),
        boot_s=dice.choice((20.0, 60.0, 200.0)),
        boots=dice.random() > 0.1,
        preempted_after_s=taken,
        notice_s=dice.choice((0.0, 30.0, 120.0)),
        mute_after_s=dice.uniform(0, 9000) if dice.random() < 0.08 else None,
        dead_after_s=dice.uniform(0, 9000) if dice.random() < 0.05 else None,
        garbled=dice.random() < 0.2,
        storage_fails=dice.random() < 0.1,
        spot_only=True,
    )


def make_submission(dice: Random, troubles: float) -> sim.SimSubmission:
    work_s = dice.choice((600.0, 3600.0, 3600.0 * 3))
    every_s = 600.0
    needs_s = work_s * 1.01 + 60 + 2 * (START_S + every_s) + troubles
    slack = dice.choice((0.5, 1.0, 1.1, 1.5, 3.0))
    budget = Money(int(dice.choice((0.2, 0.6, 1.2, 3.0)) * work_s / 3600 * 1e6) + 60_000)
    task = tasks.TaskSpec(
        name="digits",
        run="train",
        env={
            "FAKE_RUN_S": str(work_s),
            "FAKE_SETUP_S": dice.choice(("0", "60")),
            "FAKE_EXIT_CODE": "0",
        },
        resources=tasks.ResourceSpec(spot=tasks.SpotPolicy.AUTO),
        checkpoint=tasks.CheckpointPolicy(path="c", every=timedelta(seconds=every_s)),
        limits=tasks.JobLimits(
            deadline_after=timedelta(seconds=needs_s * slack) if dice.random() < 0.85 else None,
            budget=budget if dice.random() < 0.4 else None,
            unattended=LEASE,
        ),
        retry=tasks.RetryPolicy(node=None, parallel=dice.choice((1, 1, 2, 3))),
        work=tasks.Workload(samples=work_s, rates={"cpu": 1.0}),
        setup="true" if dice.random() < 0.3 else None,
    )
    return sim.SimSubmission(task=task, at_s=dice.choice((0.0, dice.uniform(0, 3000))))


def play_number(number: int) -> sim.ScenarioResult:
    """Play the scenario of this number and check all that must hold."""
    scenario, troubles = make_scenario(number)
    ending = play(scenario)
    check_all(ending)
    for trace, submission in zip(ending.traces, scenario.submissions, strict=True):
        told = f"scenario {number}: {tell(trace)}"
        check_deadline(trace, submission, troubles, told)
        check_budget(trace, told)
    check_checkpoints(ending)
    return ending


def check_deadline(
    trace: sim.JobTrace, submission: sim.SimSubmission, troubles: float, told: str
) -> None:
    """Ended in time where that was feasible: enough time for the troubles of the scenario, and a
    budget for the rest.
    """
    limits, job = trace.job.task.limits, trace.job
    if job.phase is JobPhase.DONE or limits.deadline_after is None or limits.budget is not None:
        return
    if any(
        x.outcome is AttemptOutcome.PREEMPTED and x.offer.purchase is not Purchase.SPOT
        for x in trace.attempts
    ):
        return  # a user's drill took away what no place takes
    work_s = float(job.task.env["FAKE_RUN_S"])
    needed = work_s * 1.01 + 60 + 2 * (START_S + 600) + troubles
    assert limits.deadline_after.total_seconds() < needed, told


def check_budget(trace: sim.JobTrace, told: str) -> None:
    """At most one lease of everything that billed at the end above the budget, and the minimum
    of what was bought.
    """
    budget = trace.job.task.limits.budget
    if budget is None:
        return
    rate = max((charge.rate for charge in trace.charges), default=HourlyRate(0))
    least = sum(
        charge.amount.micros for charge in trace.charges if charge.kind is ChargeKind.MINIMUM
    )
    spent = sum(charge.amount.micros for charge in trace.charges)
    assert spent <= budget.micros + rate.over(LEASE).micros + least, told


def check_checkpoints(ending: sim.ScenarioResult) -> None:
    """Every start goes on from the newest state that was saved."""
    for job, rank, saved, gone_on_from in ending.cloud.storage.begun:
        assert gone_on_from == saved, (job, rank)
