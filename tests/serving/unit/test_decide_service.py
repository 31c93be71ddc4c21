"""What a service does next: replicas that start, serve, drain and end."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms
from cavvy.capabilities.serving.decide.service import (
    ReplicaSeen,
    ServiceSnapshot,
    ServiceStep,
    average_readings,
    decide_service,
    list_serving,
    make_replica_task,
    move,
    order_replica,
    state_of,
)
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic, make_terms, observe, scale
from cavvy.capabilities.serving.loads import BatchFit
from cavvy.capabilities.serving.replicas import ReplicaState, ServiceReplica
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.decide.budgets import ServiceStop
from cavvy.domain.jobs import JobPhase
from cavvy.domain.services import (
    DEFAULT_AVAILABILITY,
    ReadinessProbe,
    ReplicaCount,
    ReplicaTarget,
    ServiceLevel,
    ServiceSpec,
    TargetKind,
)
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = ServiceSpec(
    port=80,
    replicas=ReplicaCount(least=0, most=4, target=ReplicaTarget(value=1.0)),
    probe=ReadinessProbe(start=timedelta(minutes=1), failures=2),
    drain=timedelta(seconds=30),
)
TASK = TaskSpec(name="chat", run="serve", service=SPEC)
RUNS = ReplicaSeen(phase=JobPhase.RUNNING, answers=True)


def make(*states: str, revision: int = 1, **more: Any) -> StoredService:
    """A service whose replicas have these states; `draining:1` is one of revision 1."""
    replicas = []
    for number, text in enumerate(states, 1):
        state, _, of = text.partition(":")
        replicas.append(
            ServiceReplica(
                id=f"r{number}",
                number=number,
                service="chat",
                revision=int(of or revision),
                state=ReplicaState(state),
                ordered_at=NOW + timedelta(seconds=number),
                running_at=NOW,
                ready_at=None if state in ("ordered", "starting") else NOW,
                draining_at=NOW if state == "draining" else None,
            )
        )
    return StoredService(
        project="p",
        name="chat",
        id="s",
        task=TASK,
        created_at=NOW,
        replicas=tuple(replicas),
        ordered=len(replicas),
        revision=revision,
        **more,
    )


def decide(
    service: StoredService, seen: ReplicaSeen = RUNS, *, after_s: float = 10, backlog: int = 0
) -> ServiceStep:
    found = {each.id: seen for each in service.open}
    view = ServiceSnapshot(service=service, seen=found, backlog=backlog)
    return decide_service(view, NOW + timedelta(seconds=after_s))


def states(step: ServiceStep) -> list[str]:
    return sorted(str(each.state) for each in step.service.replicas)


@pytest.mark.parametrize(
    ("state", "seen", "after_s", "then"),
    [
        ("ordered", ReplicaSeen(), 10, "ordered"),
        ("ordered", ReplicaSeen(phase=JobPhase.QUEUED), 10, "starting"),
        ("starting", ReplicaSeen(phase=JobPhase.STARTING), 1000, "starting"),
        ("starting", ReplicaSeen(phase=JobPhase.RUNNING), 59, "starting"),
        ("starting", ReplicaSeen(phase=JobPhase.RUNNING), 60, "ending"),
        ("starting", RUNS, 10, "ready"),
        ("starting", ReplicaSeen(phase=JobPhase.FAILED), 10, "ended"),
        ("starting", ReplicaSeen(), 10, "ended"),
        ("ready", ReplicaSeen(phase=JobPhase.RUNNING, failures=1), 10, "ready"),
        ("ready", ReplicaSeen(phase=JobPhase.RUNNING, failures=2), 10, "unhealthy"),
        ("ready", ReplicaSeen(phase=JobPhase.STOPPING), 10, "ending"),
        ("ready", ReplicaSeen(phase=JobPhase.FAILED), 10, "ended"),
        ("unhealthy", RUNS, 10, "ready"),
        ("unhealthy", ReplicaSeen(phase=JobPhase.RUNNING, failures=3), 10, "unhealthy"),
        ("unhealthy", ReplicaSeen(phase=JobPhase.RUNNING, failures=4), 10, "ending"),
        ("ending", ReplicaSeen(phase=JobPhase.STOPPING), 10, "ending"),
        ("ending", ReplicaSeen(phase=JobPhase.STOPPED), 10, "ended"),
    ],
)
def test_a_replica_follows_its_job_and_its_probe(
    state: str, seen: ReplicaSeen, after_s: float, then: str
) -> None:
    step = decide(make(state, target=1), seen, after_s=after_s)
    assert states(step) == [then]


@pytest.mark.parametrize(
    ("state", "seen", "after_s", "reason"),
    [
        ("starting", {}, 10, "/ was answered with status 401"),
        ("starting", {}, 60, "no probe succeeded within 60 s: / was answered with status 401"),
        (
            "ready",
            {"failures": 2},
            10,
            "the replica does not answer its probe: / was answered with status 401",
        ),
        (
            "unhealthy",
            {"failures": 4},
            10,
            "the replica did not recover: / was answered with status 401",
        ),
        (
            "ready",
            {"phase": JobPhase.DONE, "reason": "the work succeeded"},
            10,
            "the program ended with exit code 0; the program of a service must keep running",
        ),
    ],
)
def test_the_reason_of_a_replica_says_why_its_probe_failed(
    state: str, seen: dict[str, Any], after_s: float, reason: str
) -> None:
    seen = {"phase": JobPhase.RUNNING, "problem": "/ was answered with status 401", **seen}
    [replica] = decide(
        make(state, target=1), ReplicaSeen(**seen), after_s=after_s
    ).service.replicas[:1]
    assert replica.reason == reason


def test_the_end_of_a_replica_is_the_time_at_which_it_ended() -> None:
    going = decide(make("ready", target=1), ReplicaSeen(phase=JobPhase.STOPPING)).service
    assert (str(going.replicas[0].state), going.replicas[0].ended_at) == ("ending", None)
    gone = decide(going, ReplicaSeen(phase=JobPhase.STOPPED), after_s=20).service.replicas[0]
    assert (gone.ended_at, gone.reason) == (NOW + timedelta(seconds=20), going.replicas[0].reason)


def test_a_replica_that_has_ended_never_serves_again() -> None:
    [replica] = make("ended").replicas
    with pytest.raises(ValueError, match="a replica that is ended cannot become ready"):
        move(replica, ReplicaState.READY, "", NOW)


def test_a_service_is_watched_closely_while_it_has_replicas_or_needs_some() -> None:
    soon, later = timedelta(seconds=1), timedelta(seconds=10)
    assert decide(make(target=0)).after == later, "it is idle"
    assert decide(make(target=1)).after == soon, "a replica was ordered"
    assert decide(make("ready", target=1)).after == soon
    assert decide(make(wanted=False), backlog=1).after == soon, "a request waits"


def test_a_service_is_ready_as_soon_as_one_of_its_replicas_is() -> None:
    texts = {
        "idle": make(),
        "starting": make("starting"),
        "ready": make("starting", "ready", failures=1),
        "failing": make("starting", failures=1),
        "ending": make("ready", wanted=False),
    }
    assert {text: state_of(service) for text, service in texts.items()} == {
        text: text for text in texts
    }


def test_a_replica_says_what_its_job_waits_for() -> None:
    waits = ReplicaSeen(phase=JobPhase.QUEUED, reason="no free CPUs")
    step = decide(make("starting", target=1), waits)
    assert step.service.replicas[0].reason == "no free CPUs"
    starts = ReplicaSeen(phase=JobPhase.STARTING, reason="starts on p/r/t")
    pulls = replace(starts, waits="starts at p: the image cannot be pulled")
    step = decide(step.service, pulls)
    assert step.service.replicas[0].reason == "starts at p: the image cannot be pulled"
    assert decide(step.service, starts).service.replicas[0].reason == ""
    assert decide(step.service, RUNS).service.replicas[0].reason == ""


def test_replicas_are_ordered_up_to_the_target_and_its_bounds() -> None:
    assert len(decide(make(target=3)).orders) == 3
    assert len(decide(make(target=9)).orders) == 4, "the service allows no more"
    assert len(decide(make("ready", "starting", target=3)).orders) == 1
    assert decide(make(target=0)).orders == ()
    assert decide(make(target=0), backlog=1).orders == ("",), "a request waits"
    assert decide(make("ready", target=0), backlog=5).orders == ()
    kept = replace(TASK, service=replace(SPEC, replicas=ReplicaCount(least=2, most=4)))
    assert len(decide(replace(make(target=0), task=kept)).orders) == 2


def test_those_that_do_not_serve_yet_go_first_and_the_oldest_stay() -> None:
    step = decide(make("ready", "ready", "starting", target=1), ReplicaSeen(phase=JobPhase.RUNNING))
    assert [str(each.state) for each in step.service.replicas] == ["ready", "draining", "ending"]
    assert [each.id for each in step.stop] == ["r3"]
    assert [each.id for each in list_serving(step.service)] == ["r1"]


def test_a_draining_replica_ends_with_its_requests_or_its_time_or_is_needed_again() -> None:
    busy = replace(RUNS, in_flight=1)
    assert states(decide(make("draining"), busy)) == ["draining"]
    assert states(decide(make("draining"), busy, after_s=30)) == ["ending"]
    assert states(decide(make("draining"), replace(RUNS, in_flight=None))) == ["draining"]
    assert states(decide(make("draining"), after_s=0)) == ["draining"], "the gateway knows it not"
    assert states(decide(make("draining"))) == ["ending"]
    again = decide(make("draining", target=1), busy)
    assert (states(again), again.orders) == (["ready"], ())


def test_a_new_revision_replaces_an_old_one_as_it_becomes_ready() -> None:
    step = decide(make("ready:1", "ready:1", revision=2, target=2))
    assert (states(step), len(step.orders)) == (["ready", "ready"], 2)
    started = make("ready:1", "ready:1", "starting", "starting", revision=2, target=2)
    waiting = decide(started, ReplicaSeen(phase=JobPhase.RUNNING))
    assert states(waiting) == ["ready", "ready", "starting", "starting"]
    half = decide(make("ready:1", "ready:1", "ready", "starting", revision=2, target=2), RUNS)
    assert states(half).count("draining") == 2, "both of the newest are ready now"
    early = make("starting:1", revision=2, target=1)
    assert states(decide(early, ReplicaSeen(phase=JobPhase.QUEUED))) == ["ending"]


def test_starts_that_fail_are_tried_again_after_growing_pauses() -> None:
    failed = ReplicaSeen(phase=JobPhase.FAILED, reason="exit code 1")
    step = decide(make("starting", target=1), failed)
    assert (step.orders, step.service.failures, step.service.problem) == ((), 1, "exit code 1")
    assert (state_of(step.service), step.after) == ("failing", timedelta(seconds=1))
    assert decide(step.service, after_s=10.5).orders == ()
    assert decide(step.service, after_s=11).orders == ("",)
    worse = replace(step.service, failures=4)
    assert decide(worse, after_s=17).orders == ()
    assert decide(worse, after_s=18).orders == ("",)
    steady = replace(make("ready", target=1), failures=4)
    assert decide(steady, after_s=59).service.failures == 4
    assert decide(steady, after_s=60).service.failures == 0
    early = decide(make("ready", target=1), failed, after_s=59)
    assert (early.orders, early.service.failures) == ((), 1), "it ended soon after its start"
    assert decide(make("ready", target=1), failed, after_s=60).orders == ("",), "it had served"


def test_a_replica_that_was_ready_until_it_was_not_needed_ends_a_row_of_failures() -> None:
    idle = decide(replace(make("ready"), failures=2, problem="exit code 1"), RUNS, after_s=20)
    assert (states(idle), idle.service.failures) == (["draining"], 2)
    ended = decide(idle.service, ReplicaSeen(phase=JobPhase.RUNNING), after_s=21)
    assert (states(ended), ended.service.failures, ended.service.problem) == (["ending"], 0, "")
    gone = decide(ended.service, ReplicaSeen(phase=JobPhase.STOPPED), after_s=22)
    assert state_of(gone.service) == "idle"


def test_a_service_that_was_ended_drains_and_is_finished_without_replicas() -> None:
    ended = decide(make("ready", "starting", wanted=False, target=2), backlog=3)
    assert (states(ended), ended.orders, ended.finished) == (["draining"] * 2, (), False)
    last = decide(make("ending", wanted=False), ReplicaSeen(phase=JobPhase.STOPPED))
    assert last.finished
    assert not decide(make(target=0)).finished


def test_an_ordered_replica_has_a_job_of_its_own() -> None:
    service = order_replica(make("ready"), "r2", 4242, NOW)
    assert (service.ordered, service.replicas[-1].number) == (2, 2)
    view = ServiceSnapshot(service=replace(service, target=2), seen={"r1": RUNS})
    assert [each.id for each in decide_service(view, NOW).start] == ["r2"], "the other one runs"
    task = make_replica_task(TASK, "chat-2", 4242)
    assert (task.service, task.name, task.env["PORT"]) == (SPEC, "chat-2", "4242")
    assert (task.tags, task.retry.node) == ({"service": "chat"}, 0)


# The autoscaler's view


def traffic(at_s: float, **more: Any) -> ServiceTraffic:
    return ServiceTraffic(at_s=at_s, **more)


def test_the_autoscaler_sees_what_happened_since_its_last_decision() -> None:
    before = traffic(10, arrivals=5, answered=4, started=5, late=1, service_s=2.0)
    after = traffic(13, arrivals=12, answered=9, started=10, late=3, service_s=5.0, backlog=2)
    seen = observe(make("ready", "starting"), before, after, NOW + timedelta(seconds=60))
    assert (seen.arrivals, seen.completed, seen.completed_s) == ((2, 2, 3), 5, 3.0)
    assert (seen.started, seen.late, seen.backlog) == (5, 2, 2)
    assert (seen.ready, seen.held) == (1, 2)
    [market] = seen.markets
    assert market.cold_starts_s == (-1.0,)  # the fixture's replicas are ready before their order
    again = traffic(2, arrivals=3)
    assert sum(observe(make(), after, again, NOW).arrivals) == 3, "the gateway was started again"


def test_the_autoscaler_sees_how_long_batches_take() -> None:
    fit = BatchFit(slope_s=0.1, base_s=1.0, most=8)
    seen = observe(make("ready"), traffic(1), traffic(2, arrivals=3, batch=fit), NOW)
    assert seen.batch == fit


def test_a_burst_to_a_cold_service_orders_replicas_and_one_request_orders_one() -> None:
    service = scale(make(), None, traffic(0.2, arrivals=50, backlog=50), NOW)
    assert service.target > 1
    assert len(decide(service, backlog=50).orders) == service.target
    single = scale(make(), None, traffic(0.2, arrivals=1, backlog=1), NOW)
    assert decide(single, backlog=1).orders == ("",)


def test_fast_requests_need_no_replicas_for_a_time_that_was_only_assumed() -> None:
    service, before = make("ready"), None
    for second in range(1, 400):
        count = 150 * second  # requests of 5 ms: three quarters of a replica
        now = traffic(second, arrivals=count, answered=count, started=count, service_s=count / 200)
        service = scale(service, before, now, NOW + timedelta(seconds=second))
        before = now
    assert service.target <= 2


def test_a_decision_goes_on_from_the_stored_state() -> None:
    service = scale(make("ready"), None, traffic(1, arrivals=5), NOW)
    assert service.replicas[0].measured
    later = NOW + timedelta(seconds=1)
    again = scale(service, traffic(1, arrivals=5), traffic(2, arrivals=9), later)
    assert again.scaling != service.scaling
    assert observe(service, None, traffic(2), later).markets[0].cold_starts_s == ()


def test_a_soft_stop_orders_no_more_replicas_and_keeps_those_that_run() -> None:
    service = make("ready", "starting", target=4)
    seen = {each.id: RUNS for each in service.replicas}
    step = decide_service(
        ServiceSnapshot(service=service, seen=seen, stop=ServiceStop(soft="b")), NOW
    )
    assert (step.orders, step.stop, step.service.stopped_by) == ((), (), "")
    assert {each.state for each in step.service.replicas} == {ReplicaState.READY}


def test_a_hard_stop_drains_to_zero_and_orders_nothing_for_those_that_wait() -> None:
    service = make("ready", "starting", target=4)
    stop = ServiceStop(soft="b", hard="b")
    seen = {each.id: replace(RUNS, in_flight=1) for each in service.replicas}
    step = decide_service(ServiceSnapshot(service=service, seen=seen, backlog=9, stop=stop), NOW)
    assert (step.orders, step.service.stopped_by) == ((), "b")
    assert ReplicaState.DRAINING in {each.state for each in step.service.replicas}
    assert not {ReplicaState.READY} & {each.state for each in step.service.replicas}
    again = decide_service(ServiceSnapshot(service=make(target=1), backlog=9, stop=stop), NOW)
    assert again.orders == ()
    assert decide_service(ServiceSnapshot(service=again.service), NOW).orders != ()


def test_a_reading_is_the_mean_of_the_replicas_that_get_requests() -> None:
    def mean(kind: TargetKind, **seen: ReplicaSeen) -> float | None:
        target = ReplicaTarget(kind=kind, value=0.5)
        spec = replace(SPEC, replicas=replace(SPEC.replicas, target=target))
        service = make("ready", "ready", "starting")
        return average_readings(replace(service, task=replace(TASK, service=spec)), seen)

    seen = {
        "r1": ReplicaSeen(gpu_use=0.9, reading=10),
        "r2": ReplicaSeen(gpu_use=0.5),
        "r3": ReplicaSeen(gpu_use=0.0, reading=0),
    }
    assert mean(TargetKind.GPU_UTILISATION, **seen) == 0.7
    assert mean(TargetKind.METRIC, **seen) == 10
    assert mean(TargetKind.METRIC, r2=ReplicaSeen()) is None


def test_a_metric_twice_its_target_doubles_the_replicas() -> None:
    target = ReplicaTarget(kind=TargetKind.METRIC, value=5, metric="waiting")
    spec = replace(SPEC, replicas=ReplicaCount(least=0, most=8, target=target))
    service = replace(make("ready", "ready"), task=replace(TASK, service=spec))
    busy = ServiceTraffic(at_s=10, arrivals=10, in_flight=2)
    assert scale(service, None, busy, NOW, 10.0).target == 4
    assert scale(service, None, busy, NOW, None).target == 2, "without a reading, it stays"


def test_a_target_of_waiting_is_the_time_that_the_autoscaler_plans_for() -> None:
    def terms(kind: TargetKind) -> ScalingTerms:
        target = ReplicaTarget(kind=kind, value=0.25)
        return make_terms(replace(SPEC, replicas=replace(SPEC.replicas, target=target)))

    assert terms(TargetKind.QUEUE_WAIT).wait_s == 0.25
    assert terms(TargetKind.GPU_UTILISATION).wait_s == ScalingTerms().wait_s


def test_the_autoscaler_aims_at_the_availability_that_the_service_states() -> None:
    assert make_terms(SPEC).availability == DEFAULT_AVAILABILITY == 0.995
    stated = replace(SPEC, slo=ServiceLevel(availability=0.9999))
    assert make_terms(stated).availability == 0.9999
