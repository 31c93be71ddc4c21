"""Named machines: jobs run one after another on one gang, and the gang goes when it is idle."""

from datetime import timedelta

import pytest
from tests.control.sim.test_warm_scenarios import bought, spans
from tests.sim.sim.test_sim_scenarios import CHEAP, FREE, SPOT, run_scenario, task

from cavvy.domain.events import ChargeKind
from cavvy.domain.jobs import AttemptOutcome, JobPhase
from cavvy.domain.tasks import ResourceSpec, RetryPolicy, SpotPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.fake.script import FaultScript
from cavvy.sim import scenario
from cavvy.store.base import PER_MACHINE

KEEP = timedelta(minutes=10)


def on_machine(run_s: float = 120, **changes: object) -> TaskSpec:
    return replace(task(run_s, **{"keep": KEEP, **changes}), machine="dev")


def play(*tasks: tuple[TaskSpec, float], **more: object) -> scenario.ScenarioResult:
    submissions = tuple(scenario.SimSubmission(task=each, at_s=at_s) for each, at_s in tasks)
    return run_scenario(submissions=submissions, **more)


def phases(ending: scenario.ScenarioResult) -> list[JobPhase]:
    return [trace.job.phase for trace in ending.traces]


def test_jobs_of_one_machine_run_in_order_on_one_gang() -> None:
    ending = play(*((on_machine(name=f"job-{number}"), 0) for number in range(4)))
    assert phases(ending) == [JobPhase.DONE] * 4
    assert bought(ending) == 1
    starts = [trace.attempts[0].running_at for trace in ending.traces]
    assert starts == sorted(starts)  # type: ignore[type-var]


def test_a_job_for_a_machine_never_takes_another_machines_gang() -> None:
    other = replace(on_machine(name="other"), machine="other")
    ending = play((on_machine(), 0), (other, 400), (task(name="loose"), 400))
    assert bought(ending) == 3


def test_two_projects_have_machines_of_the_same_name() -> None:
    assert bought(play((on_machine(), 0), (on_machine(project="other"), 400))) == 2


def test_an_idle_machine_is_charged_and_then_released() -> None:
    ending = play((on_machine(), 0))
    [trace] = ending.traces
    assert KEEP <= spans(trace.charges, ChargeKind.KEPT) < KEEP + timedelta(minutes=1)


def test_a_machine_outlives_failed_work() -> None:
    ending = play((on_machine(env={"FAKE_EXIT_CODE": "3"}), 0), (on_machine(name="next"), 400))
    assert phases(ending) == [JobPhase.FAILED, JobPhase.DONE]
    assert bought(ending) == 1


@pytest.mark.parametrize("at_s", [100, 800])
def test_stopping_a_job_leaves_its_machine(at_s: float) -> None:
    """The job runs until 630 s: it is stopped while it runs, or after its end."""
    stop = scenario.UserIntervention(action=scenario.UserAction.STOP, job=0, at_s=at_s)
    ending = play(
        (on_machine(600), 0), (on_machine(name="next"), at_s + 100), interventions=(stop,)
    )
    phase = JobPhase.STOPPED if at_s < 600 else JobPhase.DONE
    assert phases(ending) == [phase, JobPhase.DONE]
    assert bought(ending) == 1


def test_work_that_is_retried_stays_on_its_machine() -> None:
    failing = on_machine(env={"FAKE_EXIT_CODE": "3"}, retry=RetryPolicy(exit=2))
    ending = play((failing, 0))
    assert [each.outcome for each in ending.traces[0].attempts] == [AttemptOutcome.EXIT] * 3
    assert bought(ending) == 1


def test_a_machine_that_is_stopped_between_two_tries_is_released_at_once() -> None:
    retry = RetryPolicy(exit=2, delay=timedelta(minutes=5))
    failing = on_machine(env={"FAKE_EXIT_CODE": "3"}, retry=retry)
    stop = scenario.UserIntervention(action=scenario.UserAction.STOP_MACHINE, job=0, at_s=300)
    ending = play((failing, 0), interventions=(stop,))
    [trace] = ending.traces
    assert trace.job.phase is JobPhase.STOPPED
    [attempt] = trace.attempts
    assert attempt.ended_at is not None
    assert attempt.ended_at - trace.job.submitted_at < timedelta(minutes=7)


def test_after_a_preemption_the_name_moves_with_the_job() -> None:
    reclaimed = FaultScript(preempted_after_s=200)
    spot = ResourceSpec(spot=SpotPolicy.ONLY)
    ending = play(
        (on_machine(600, resources=spot), 0),
        (on_machine(name="next", resources=spot), 100),
        offers=(SPOT,),
        launches=(reclaimed,),
    )
    assert phases(ending) == [JobPhase.DONE, JobPhase.DONE]
    assert bought(ending) == 2
    first, second = ending.traces
    assert first.attempts[0].outcome is AttemptOutcome.PREEMPTED
    assert second.attempts[0].adopted_at is not None


def test_a_job_that_the_machine_cannot_run_fails_with_what_the_machine_has() -> None:
    large = on_machine(name="large", resources=ResourceSpec(cpus_min=500))
    ending = play((on_machine(), 0), (large, 100))
    assert phases(ending) == [JobPhase.DONE, JobPhase.FAILED]
    assert "you asked for at least 500" in ending.traces[1].job.reason
    assert "machine dev has" in ending.traces[1].job.reason


def test_a_machine_is_bought_once_if_the_server_dies_at_any_step() -> None:
    tasks = ((on_machine(30), 0), (on_machine(60, name="next"), 0))
    calm = play(*tasks)
    moments = list(scenario.CrashMoment)
    for call in range(1, calm.calls + 1, 7):
        when = moments[call % len(moments)]
        ending = play(*tasks, crashes=(scenario.ServerCrash(call=call, when=when),))
        assert phases(ending) == [JobPhase.DONE, JobPhase.DONE], (call, when)
        assert bought(ending) == 1, (call, when)


def test_a_machine_is_bought_once_if_writes_meet_newer_versions() -> None:
    for stale in range(1, 40, 5):
        ending = play(
            (on_machine(30), 0), (on_machine(60, name="next"), 0), stale=frozenset({stale})
        )
        assert bought(ending) == 1, stale


def test_a_job_that_fits_now_does_not_wait_behind_many_that_wait_for_an_offer() -> None:
    cpu = ResourceSpec(instance="cpu", cpus_min=2)
    full = task(1_000, name="full", resources=cpu)
    wanting = [
        (on_machine(name=f"wanting-{number}", resources=cpu), 10) for number in range(PER_MACHINE)
    ]
    fits = on_machine(name="fits", resources=ResourceSpec(instance="cheap"))
    ending = play((full, 0), *wanting, (fits, 20), offers=(FREE, CHEAP))
    first, *_, last = ending.traces
    assert last.job.phase is JobPhase.DONE
    assert last.job.ended_at < first.job.ended_at  # type: ignore[operator]


def test_jobs_that_wait_for_a_busy_machine_delay_no_other_job() -> None:
    waiting = [(on_machine(1, name=f"waiting-{number}"), 10) for number in range(20)]
    ending = play((on_machine(600), 0), *waiting, (task(name="loose"), 100))
    loose = ending.traces[-1]
    delay = loose.attempts[0].launched_at - loose.job.submitted_at  # type: ignore[operator]
    assert delay < timedelta(seconds=1)
