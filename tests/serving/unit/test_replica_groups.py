"""Groups of replicas with roles: how a file states them, and what a service does with them."""

import asyncio
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from cavvy.capabilities.serving.decide.replica_groups import (
    count_replicas,
    count_room,
    find_network,
    hold_back,
    list_members,
    prepare_role,
    scale_replicas,
)
from cavvy.capabilities.serving.decide.service import (
    ReplicaSeen,
    ServiceSnapshot,
    ServiceStep,
    change_last,
    list_serving,
    order_replica,
    state_of,
)
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.decide.update import as_revision, decide_update
from cavvy.capabilities.serving.replicas import CandidateRevision, ReplicaState, ServiceReplica
from cavvy.capabilities.serving.server.router_members import RouterMembers, RouterTarget
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.jobs import JobPhase
from cavvy.domain.services import (
    ReplicaCount,
    ReplicaRole,
    RouterApi,
    ServiceUpdate,
    UpdateStrategy,
)
from cavvy.domain.tasks import TaskSpec, take_role
from cavvy.domain.values import replace
from cavvy.spec.describe import describe_task
from cavvy.spec.problems import SpecError
from cavvy.spec.support import object_to_service, refusals
from cavvy.task_files import parse_file

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUNS = ReplicaSeen(phase=JobPhase.RUNNING, answers=True)
FILE = """
name: chat
run: serve
service:
  concurrency: 4
  groups:
    router: {run: route, resources: {cpu: 2}}
    prefill: {replicas: 2, run: fill, resources: {gpu: H100}}
    decode: {replicas: {min: 1, max: 4, target: {concurrency: 4}}, concurrency: 16}
"""
ASLEEP = FILE.replace("replicas: 2", "replicas: {min: 0, max: 2}").replace("min: 1", "min: 0")
SHORT = {"r": "router", "p": "prefill", "d": "decode", "w": "worker"}


def read(text: str) -> TaskSpec:
    (task,) = parse_file(text).tasks
    return task


def make(*replicas: str, text: str = FILE, **more: Any) -> StoredService:
    """A service with replicas such as `p ready`, or `p ready 2` of revision 2."""
    found = []
    for number, each in enumerate(replicas, 1):
        short, state, *revision = each.split()
        found.append(
            ServiceReplica(
                id=f"{short}{number}",
                number=number,
                service="chat",
                revision=int(revision[0]) if revision else 1,
                group=SHORT[short],
                role=ReplicaRole(SHORT[short]),
                state=ReplicaState(state),
                port=8000 + number,
                address="10.0.0.1",
                ordered_at=NOW + timedelta(seconds=number),
                running_at=NOW,
                ready_at=None if state in ("ordered", "starting") else NOW,
            )
        )
    return StoredService(
        project="p",
        name="chat",
        id="s",
        task=read(text),
        created_at=NOW,
        replicas=tuple(found),
        ordered=len(found),
        version=1,
        **more,
    )


def decide(
    service: StoredService, *, joined: bool = True, backlog: int = 0, **seen: ReplicaSeen
) -> ServiceStep:
    found = {each.id: seen.get(each.id, RUNS) for each in service.open}
    workers = frozenset(each.id for each in service.open if each.role is not ReplicaRole.ROUTER)
    routers = [each.id for each in service.open if each.role is ReplicaRole.ROUTER]
    known = dict.fromkeys(routers, workers if joined else frozenset[str]())
    known |= {each.id: frozenset(each.members) for each in service.open if each.members}
    for revision in {service.revision, service.tried} - {0}:
        task = as_revision(service, revision).task
        found = dict(hold_back(task, revision, service.open, found, known))
    view = ServiceSnapshot(service=service, seen=found, backlog=backlog)
    return decide_update(view, NOW + timedelta(minutes=2))


def states(step: ServiceStep) -> list[str]:
    return [f"{each.id} {each.state}" for each in step.service.replicas]


# files


def test_a_group_inherits_what_it_does_not_state() -> None:
    task = read(FILE)
    assert task.service is not None
    assert task.service.replicas == ReplicaCount(least=4, most=7)
    router, prefill, decode = (take_role(task, each) for each in task.replica_groups)
    assert (router.run, prefill.run, decode.run) == ("route", "fill", "serve")
    assert router.resources.cpus_min == 2
    assert prefill.resources.accelerators
    assert router.service
    assert prefill.service
    assert decode.service
    assert router.service.probe.path == "/liveness"
    assert prefill.service.probe.path == "/"
    assert (prefill.service.concurrency, decode.service.concurrency) == (4, 16)
    assert (prefill.service.replicas.most, decode.service.replicas.most) == (2, 4)
    rows = dict(describe_task(task))
    assert "on" not in rows
    assert rows["runs"] == "serve"
    assert rows["group prefill"] == "2; on 1 node with 1 H100; runs fill"


def test_each_role_keeps_the_objectives_that_it_can() -> None:
    text = FILE.replace(
        "  groups:", "  models: m\n  slo: {ttft: {p95: 1s}, token_gap: {p95: 60ms}}\n  groups:"
    )
    task = read(text)
    found = [take_role(task, each).service for each in task.replica_groups]
    assert dict(describe_task(task))["promises"] == (
        "95% of first tokens within 1000 ms and 95% of gaps between tokens within 60 ms"
    )
    kept = [(each.slo.ttft is not None, each.slo.token_gap is not None) for each in found if each]
    assert kept == [(False, False), (True, False), (False, True)]


def test_groups_stay_in_the_regions_of_their_task() -> None:
    task = read(FILE + "resources: {gpu: L4, regions: [eu]}\n")
    for group, regions in zip(task.replica_groups, (("eu",),) * 3, strict=True):
        for each in take_role(task, group).resources.choices:
            assert each.regions == regions, group.name
    text = FILE.replace("cpu: 2", "cpu: 2, regions: [us]")
    router = read(text + "resources: {gpu: L4, regions: [eu]}\n").replica_groups[0]
    assert take_role(task, router).resources.regions == ("us",)


def test_a_task_needs_no_command_if_each_group_has_one() -> None:
    text = FILE.replace("run: serve\n", "").replace("decode: {", "decode: {run: d, ")
    assert [each.run for each in read(text).replica_groups] == ["route", "fill", "d"]
    with pytest.raises(SpecError, match="run"):
        read(text.replace("run: d, ", ""))


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ("{prefill: {}, decode: {}}", "prefill and decode need a router"),
        ("{router: {}, prefill: {}}", "prefill needs one with the role decode"),
        ("{router: {}, decode: {}}", "decode needs one with the role prefill"),
        ("{router: {}}", "the router has no workers"),
        ("{router: {}, r2: {role: router}, worker: {}}", "two groups have the role router"),
        ("{router: {}, prefill: {}, decode: {}, worker: {}}", "cannot be combined"),
        ("{router: {}, nurse: {}}", "the role of the group nurse is unknown"),
        ("{a: {role: nurse}}", "'nurse' is not one of the choices"),
        ("{worker: {replicas: 0}}", "a group without replicas does nothing"),
        ("{router: {replicas: {min: 1, max: 2}}, worker: {}}", "routers is not scaled"),
        ("{worker: {router: none}}", "has the key `router`, but is no router"),
        ("{worker: {}, worker: {}}", "the key 'worker' appears twice"),
        ("{worker: {count: 2}}", "unknown key 'count'"),
        ("{Worker_1: {role: worker}}", "is not a name"),
        ("{}", "no group is named"),
        ("{worker: {}}\n  replicas: 2", "each group has its own number of replicas"),
    ],
)
def test_wrong_groups_are_refused_with_a_reason(groups: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        parse_file(f"run: x\nservice:\n  groups: {groups}\n")


@pytest.mark.parametrize("more", ["batch: 4", "engine: sglang, model: m, adapters: {a: hf://x/y}"])
def test_what_a_router_decides_itself_is_refused(more: str) -> None:
    command = "" if "engine" in more else "run: x\n"
    with pytest.raises(SpecError, match="has no effect behind a router"):
        parse_file(f"{command}service: {{{more}, groups: {{router: {{run: r}}, worker: {{}}}}}}\n")


def test_providers_without_a_network_are_refused_for_routers_only() -> None:
    missing = {"gang": "nodes share no network"}
    [found] = refusals(read(FILE), missing)
    assert str(found) == "service.groups: nodes share no network"
    assert not refusals(read("run: x\nservice: {groups: {worker: {replicas: 2}}}"), missing)


def test_a_group_is_checked_like_a_service() -> None:
    use = "replicas: {max: 3, target: {gpu_utilisation: 0.5}}"
    task = read(f"run: x\nservice: {{groups: {{worker: {{{use}}}}}}}")
    assert "(group worker): the use of GPUs" in str(object_to_service(task))
    with_gpu = f"run: x\nservice: {{groups: {{worker: {{{use}, resources: {{gpu: 1}}}}}}}}"
    assert object_to_service(read(with_gpu)) is None


# replicas


def test_all_groups_start_together() -> None:
    step = decide(make())
    assert step.grouped == ("router", "prefill", "prefill", "decode")
    assert not step.orders


def test_a_service_without_requests_sleeps_as_a_whole() -> None:
    assert not decide(make(text=ASLEEP)).grouped
    step = decide(make(text=ASLEEP), backlog=1)
    assert step.grouped == ("router", "prefill", "decode")
    awake = make("r ready", "p ready", "d ready", text=ASLEEP)
    assert states(decide(awake)) == ["r1 draining", "p2 draining", "d3 draining"]


def test_the_first_replicas_become_ready_together() -> None:
    waiting = make("r starting", "p starting", "p starting", "d starting")
    late = ReplicaSeen(phase=JobPhase.RUNNING)
    step = decide(waiting, d4=late)
    assert {each.state for each in step.service.replicas} == {ReplicaState.STARTING}
    assert step.service.replicas[0].reason == (
        "answers, and waits for a replica with the role decode"
    )
    assert state_of(step.service) == "starting"
    step = decide(waiting, joined=False)
    assert "waits for a replica" in step.service.replicas[1].reason
    hours = tuple(replace(each, running_at=NOW - timedelta(hours=9)) for each in waiting.replicas)
    step = decide(replace(waiting, replicas=hours), joined=False)
    assert states(step)[-1] == "d4 starting", "programs that answer do not start too slowly"
    step = decide(waiting)
    assert {each.state for each in step.service.replicas} == {ReplicaState.READY}
    assert [each.id for each in list_serving(step.service)] == ["r1"]


def test_a_router_with_a_list_is_replaced_when_its_workers_change() -> None:
    text = FILE.replace("{run: route", "{router: list, run: route")
    step = decide(
        make("p starting", "d starting", text=text), d2=ReplicaSeen(phase=JobPhase.RUNNING)
    )
    assert step.grouped == ("prefill",), "no router starts without a worker of each role"
    step = decide(make("p starting", "p starting", "d starting", text=text))
    assert step.grouped == ("router",)
    assert step.members == {1: ("d3", "p1", "p2")}
    service = make("r ready", "p ready", "d ready", "p starting", text=text)
    router, *workers = service.replicas
    listed = replace(router, members=("d3", "p2"))
    service = replace(service, replicas=(listed, *workers))
    step = decide(service, joined=False)
    assert step.grouped == ("router",)
    assert step.members == {1: ("d3", "p2", "p4")}
    assert states(step) == ["r1 ready", "p2 ready", "d3 ready", "p4 starting"]
    assert [each.id for each in list_serving(step.service)] == ["r1"]
    starts = replace(router, state=ReplicaState.STARTING, ready_at=None)
    lost = replace(service, replicas=(replace(router, members=("d0", "p2")), *workers))
    assert not list_serving(lost), "its only decode is lost, and another one is unknown to it"
    both = replace(starts, id="r5", number=5, members=step.members[1])
    step = decide(replace(service, replicas=(*service.replicas, both)), joined=False)
    assert states(step) == ["r1 ready", "p2 ready", "d3 ready", "p4 ready", "r5 ready"]
    step = decide(step.service, joined=False)
    assert states(step)[0] == "r1 draining"
    assert not step.grouped
    task = prepare_role(service.task, both, service.open, "::1")
    assert task is not None
    assert task.env["CAVVY_PREFILL_URLS"] == "http://10.0.0.1:8002,http://10.0.0.1:8004"


def test_a_replica_waits_for_a_node_in_the_network_of_the_others() -> None:
    service = make("r starting", "p starting", "p starting", "d starting")
    *others, last = service.replicas
    last = replace(last, bound_to=("eu",), ordered_at=NOW - timedelta(hours=1), running_at=None)
    step = decide(
        replace(service, replicas=(*others, last)),
        d4=ReplicaSeen(phase=JobPhase.QUEUED, reason="waits for free capacity"),
    )
    assert states(step)[-1] == "d4 starting"
    assert not step.grouped, "nothing is ordered again and again"


def test_a_router_without_an_api_needs_no_joined_workers() -> None:
    text = FILE.replace("{run: route", "{router: none, run: route")
    waiting = make("r starting", "p starting", "p starting", "d starting", text=text)
    step = decide(waiting, joined=False)
    assert {each.state for each in step.service.replicas} == {ReplicaState.READY}


def test_only_routers_with_workers_get_requests() -> None:
    whole = make("r ready", "p ready", "p ready", "d ready")
    assert [each.id for each in list_serving(whole)] == ["r1"]
    assert state_of(whole) == "ready"
    assert not list_serving(make("r ready", "p ready", "d unhealthy"))
    assert not list_serving(make("p ready", "d ready"))
    assert state_of(make("r ready", "p ready", "p ready")) == "starting"
    alone = make("w ready", "w ready", text="run: x\nservice: {groups: {worker: {replicas: 2}}}")
    assert len(list_serving(alone)) == 2


def test_a_lost_worker_is_replaced_by_its_group() -> None:
    service = make("r ready", "p ready", "p ready", "d ready")
    step = decide(service, d4=ReplicaSeen(phase=JobPhase.FAILED, reason="killed"))
    assert step.grouped == ("decode",)
    assert states(step)[-3:] == ["r1 ready", "p2 ready", "p3 ready"]
    assert not list_serving(step.service)  # requests wait in the gateway
    back = make("r ready", "p ready", "p ready", "d starting")
    assert states(decide(back, joined=False))[-1] == "d4 starting"
    assert list_serving(decide(back).service)


def test_an_update_keeps_a_whole_set_until_the_new_one_is_whole() -> None:
    olds = ("r ready 1", "p ready 1", "p ready 1", "d ready 1")
    news = ("r starting 2", "p starting 2", "p starting 2", "d starting 2")
    service = make(*olds, *news, revision=2)
    step = decide(service, d8=ReplicaSeen(phase=JobPhase.RUNNING))
    assert [each.state for each in step.service.replicas[:4]] == [ReplicaState.READY] * 4
    assert [each.id for each in list_serving(step.service)] == ["r1"]
    step = decide(service)
    assert [each.id for each in list_serving(step.service)] == ["r1", "r5"]
    step = decide(step.service)
    assert [each.state for each in step.service.replicas[:4]] == [ReplicaState.DRAINING] * 4
    assert [each.id for each in list_serving(step.service)] == ["r5"]


@pytest.mark.parametrize(
    "text",
    ["run: x\nservice: {port: 1, replicas: 1}", FILE.replace("decode:", "d2: {role: decode} #")],
)
def test_groups_that_a_new_revision_lacks_serve_until_it_can(text: str) -> None:
    olds = ("r ready 1", "p ready 1", "p ready 1", "d ready 1")
    service = replace(make(*olds, revision=2), task=read(text))
    step = decide(service)
    assert [each.state for each in step.service.replicas] == [ReplicaState.READY] * 4
    assert step.orders or step.grouped
    assert [each.id for each in list_serving(step.service)] == ["r1"]


@pytest.mark.parametrize(
    ("strategy", "counts"),
    [
        (UpdateStrategy.CANARY, ("router", "prefill", "decode")),
        (UpdateStrategy.BLUE_GREEN, ("router", "prefill", "prefill", "decode")),
    ],
)
def test_a_candidate_has_a_part_of_each_group(
    strategy: UpdateStrategy, counts: tuple[str, ...]
) -> None:
    service = make("r ready", "p ready", "p ready", "d ready")
    spec = replace(service.spec, update=ServiceUpdate(strategy=strategy))
    tried = CandidateRevision(
        revision=2, task=replace(service.task, service=spec), user="", created_at=NOW
    )
    step = decide(replace(service, candidate=tried))
    assert step.candidate_groups == counts
    assert not step.grouped


def test_a_router_has_only_workers_of_its_revision() -> None:
    service = make("r ready", "p ready", "d starting", "d draining", "p ready 2")
    router, prefill, decode = service.replicas[:3]
    assert list_members(router, service.open) == (prefill, decode)
    assert not list_members(router, [replace(prefill, address="")])


def test_routers_get_as_many_requests_as_their_workers_can_process() -> None:
    service = make("r ready", "p ready", "p ready", "d ready", "d starting")
    assert count_room(service, service.replicas[0]) == 8  # 2 x 4 of prefill, 16 of decode
    two = make("r ready", "r ready", "p ready", "p ready", "d ready")
    assert count_room(two, two.replicas[0]) == 4
    assert count_room(service, service.replicas[3]) == 16


def test_each_group_is_scaled_by_its_own_target() -> None:
    service = make("r ready", "p ready", "p ready", "d ready")
    traffic = ServiceTraffic(at_s=100, arrivals=600, started=600, in_flight=64, in_flight_s=6400)
    before = ServiceTraffic(at_s=90, in_flight_s=5760)
    scaled = scale_replicas(service, before, traffic, NOW, {})
    targets = {each.name: each.target for each in scaled.groups}
    assert targets["decode"] == 4
    assert targets["prefill"] == 2
    assert decide(scaled).grouped == ("decode",) * 3


def test_programs_learn_their_role_and_addresses() -> None:
    service = make("r ready", "p ready", "d ready", "p starting 2")
    replica = replace(service.replicas[1], second_port=9000)
    task = prepare_role(service.task, replica, service.open, "::1")
    assert task is not None
    assert task.tags["role"] == "prefill"
    assert task.run == "fill"
    assert task.env["CAVVY_ROLE"] == "prefill"
    assert task.env["CAVVY_BOOTSTRAP_PORT"] == "9000"
    assert task.env["CAVVY_ROUTER_URLS"] == "http://10.0.0.1:8001"
    assert task.env["CAVVY_PREFILL_URLS"] == "http://10.0.0.1:8002"


def test_an_engine_has_a_command_for_each_role() -> None:
    task = read("""
service:
  engine: sglang
  model: m
  groups:
    router: {}
    prefill: {resources: {gpu: 2}}
    d: {role: decode}
""")
    router, prefill, decode = (each.run or "" for each in task.replica_groups)
    assert router.startswith("exec smg launch")
    assert router.endswith("--pd-disaggregation")
    assert '--tp-size "$NPROC_PER_NODE"' in prefill
    assert prefill.endswith('prefill --disaggregation-bootstrap-port "$CAVVY_BOOTSTRAP_PORT"')
    assert decode.endswith("--disaggregation-mode decode")
    assert "--tp-size" not in decode
    plain = read("service: {engine: sglang, model: m, groups: {router: {}, worker: {}}}")
    assert "pd-disaggregation" not in (plain.replica_groups[0].run or "pd-disaggregation")
    assert plain.replica_groups[1].run == plain.run
    with pytest.raises(SpecError, match="engine for the role prefill"):
        read(
            "service: {engine: vllm, model: m, groups: {router: {run: x}, prefill: {}, decode: {}}}"
        )


def test_workers_wait_for_the_address_of_a_router_that_they_must_find() -> None:
    text = FILE.replace("{run: route", "{router: none, run: route")
    service = make("r starting", "p ordered", text=text)
    assert service.task.replica_groups[0].router is RouterApi.NONE
    router, prefill = service.replicas
    assert prepare_role(service.task, prefill, service.open, "::1") is not None
    unknown = (replace(router, address=""), prefill)
    assert prepare_role(service.task, prefill, unknown, "::1") is None
    assert prepare_role(service.task, router, unknown, "::1") is not None


def test_the_first_replica_decides_the_network() -> None:
    service = make("r ordered", "p starting")
    assert find_network(service, 1) is None
    router, prefill = service.replicas
    placed = replace(prefill, account="aws@p", places=("eu", "eu-west-1"))
    service = replace(service, replicas=(router, placed))
    assert find_network(service, 1) == ("aws", ("eu", "eu-west-1"))
    assert find_network(service, 2) is None


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_each_group_keeps_its_bounds(seed: int) -> None:
    """Replicas start, answer, fail and are lost at random, and revisions come with other groups."""
    random, now = Random(seed), NOW
    texts = [
        FILE,
        ASLEEP,
        FILE.replace("{run: route", "{router: list, run: route"),
        "run: x\nservice: {port: 1, replicas: {min: 1, max: 2}}",
    ]
    texts.append("run: x\nservice: {groups: {worker: {replicas: 2}, big: {role: worker}}}")
    service, jobs = make(text=FILE), dict[str, ReplicaSeen]()
    for _ in range(150):
        now += timedelta(seconds=random.choice((1, 5, 70)))
        if random.random() < 0.05:
            strategy = random.choice(tuple(UpdateStrategy))
            task = read(random.choice(texts))
            assert task.service is not None
            spec = replace(task.service, update=ServiceUpdate(strategy=strategy))
            tried = CandidateRevision(
                revision=service.newest + 1, task=replace(task, service=spec), created_at=now
            )
            rolls = strategy is UpdateStrategy.ROLLING
            service = replace(service, candidate=None if rolls else tried)
            if rolls:
                service = replace(service, task=tried.task, revision=tried.revision)
        for each in service.open:
            states = [ReplicaSeen(phase=phase) for phase in (JobPhase.STARTING, JobPhase.RUNNING)]
            lost = ReplicaSeen(phase=JobPhase.FAILED, reason="lost")
            jobs[each.id] = random.choice([*states, RUNS, RUNS, RUNS, RUNS, RUNS, lost])
            if each.state is ReplicaState.ENDING:
                jobs[each.id] = ReplicaSeen(phase=JobPhase.STOPPED)
        seen = {each.id: jobs[each.id] for each in service.open}
        known = {
            each.id: frozenset(seen) if random.random() < 0.8 else frozenset[str]()
            for each in service.open
        }
        for revision in {service.revision, service.tried} - {0}:
            task = as_revision(service, revision).task
            seen = dict(hold_back(task, revision, service.open, seen, known))
        backlog = random.choice((0, 0, 3))
        whole = list_serving(service) and all(
            jobs[each.id].phase is JobPhase.RUNNING
            for each in service.open
            if each.state is ReplicaState.READY
        )
        step = decide_update(ServiceSnapshot(service=service, seen=seen, backlog=backlog), now)
        service = step.service
        if whole and count_replicas(service, backlog):
            assert list_serving(service), "no update ends a set before another one is whole"
        orders = [(service.revision, name) for name in step.grouped]
        orders += [(service.revision, "") for _ in step.orders]
        orders += [(service.tried, name) for name in step.candidate_groups]
        orders += [(service.tried, "") for _ in range(step.candidates)]
        for revision, name in orders:
            task = as_revision(service, revision).task
            group = next((each for each in task.replica_groups if each.name == name), None)
            made = order_replica(service, f"x{service.ordered}", 80, now, "", revision)
            role = None if group is None else group.role
            listed = step.members.get(revision, ()) if role is ReplicaRole.ROUTER else ()
            changes = {"group": name, "role": role, "members": listed}
            service = change_last(made, address="10.0.0.1", **changes)
        counted = Counter(
            (each.revision, each.group) for each in service.open if each.state in _COUNTED
        )
        for (revision, name), count in counted.items():
            task = as_revision(service, revision).task
            bounds = {  # a router with a list overlaps with its successors
                each.name: each.replicas.most * (4 if each.router is RouterApi.LIST else 1)
                for each in task.replica_groups
            }
            if revision in (service.revision, service.tried) and name in bounds:
                assert count <= bounds[name]
        for each in list_serving(service):
            assert each.role in (None, ReplicaRole.ROUTER, ReplicaRole.WORKER)


_COUNTED = (ReplicaState.ORDERED, ReplicaState.STARTING, ReplicaState.READY, ReplicaState.UNHEALTHY)


async def test_routers_with_odd_answers_get_their_workers_later() -> None:
    """A router lists nonsense first, refuses one of two workers, and finds the other healthy
    later."""
    lists = [b"[" * 200_000, b'{"workers": [{"url": 5}]}', b'{"workers": ["a"]}', b"\xff"]
    known: list[dict[str, Any]] = [{"id": "a/../b", "url": "http://gone:1"}]
    asked, listed = [], list[bool | None]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path = head.split(" ")[:2]
        status, body = b"200 OK", b""
        if method == "GET":
            body = lists.pop() if lists else json.dumps({"workers": known}).encode()
            listed[:] = [each.get("is_healthy") for each in known]
            known[:] = [{**each, "is_healthy": True} for each in known]
        elif method == "DELETE":
            asked.append(path)
            known[:] = [each for each in known if each["id"] != "a/../b"]
        else:
            url = json.loads(await reader.readexactly(int(head.split("Length: ")[1].split()[0])))
            if url["url"].endswith(":8002"):
                status = b"400 Bad Request"
            else:
                known.append({"id": "w", "url": url["url"], "is_healthy": False})
        writer.write(b"HTTP/1.0 %b\r\n\r\n%b" % (status, body))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    router, *workers = make("r ready", "w starting", "w starting").replicas
    members = list_members(router, workers)
    routers, joined = RouterMembers(), asyncio.Event()

    def look() -> None:
        if routers.joined("r"):
            assert listed[-1], "requests would go to a worker that is not healthy"
            joined.set()

    routers.keep("s", {"r": RouterTarget(lambda: port, members, lambda one: True)}, look)
    try:
        await asyncio.wait_for(joined.wait(), 30)
        assert routers.joined("r") == {"w3"}
    finally:
        routers.close()
        server.close()
    assert asked == ["/workers/a%2F..%2Fb"]
