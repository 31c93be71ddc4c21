"""Replicas whose programs listen on the port in their file."""

from datetime import UTC, datetime
from typing import Any

from cavvy.capabilities.serving.decide.replica_markets import find_holder, keep_at
from cavvy.capabilities.serving.decide.service import order_replica
from cavvy.capabilities.serving.replicas import ReplicaState
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.decide.task_places import list_elsewhere
from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.values import replace

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def make(name: str, port: int = 8000, **more: Any) -> StoredService:
    spec = ServiceSpec(port=port, fixed_port=True)
    task = TaskSpec(name=name, run="serve", service=spec)
    return StoredService(project="p", name=name, id=name, task=task, created_at=NOW, **more)


def with_replica(service: StoredService, **more: Any) -> StoredService:
    ordered = order_replica(service, f"{service.id}-1", service.spec.port, NOW)
    return replace(ordered, replicas=(replace(ordered.replicas[-1], **more),))


def test_a_port_of_the_servers_machine_has_one_replica_of_all_services() -> None:
    new, here = make("new"), {"place": "local/this-machine/on-demand"}
    assert find_holder(new, [new]) == ""
    assert find_holder(new, [with_replica(make("old"))]) == "old", "it may come here"
    assert find_holder(new, [with_replica(make("old"), **here)]) == "old"
    assert find_holder(new, [with_replica(make("old", 8001), **here)]) == ""
    assert find_holder(with_replica(new, **here), [new]) == "new", "the second of one service"


def test_replicas_that_are_elsewhere_or_leave_hold_no_port() -> None:
    new = make("new")
    for more in (
        {"gang": "g", "place": "fake/eu/spot"},
        {"providers": ("fake",)},
        {"state": ReplicaState.ENDED},
    ):
        assert find_holder(new, [with_replica(make("old"), **more)]) == ""
    replaced = replace(with_replica(new), revision=2)
    assert find_holder(replaced, [replaced]) == "", "the new revision takes its place"


def test_the_replica_is_ordered_elsewhere_if_its_task_permits_it() -> None:
    def permit(*wanted: tuple[str, ...]) -> TaskSpec:
        needs = tuple(ResourceSpec(providers=each) for each in wanted)
        first = replace(needs[0], any_of=needs if len(needs) > 1 else ())
        return replace(make("new").task, resources=first)

    names = {"local", "fake", "aws"}
    assert list_elsewhere(permit(()), names) == ("aws", "fake")
    assert list_elsewhere(permit(("local",)), names) == ()
    assert list_elsewhere(permit(("local", "gcp")), names) == ()
    either = permit(("local",), ("aws", "gcp"))
    assert list_elsewhere(either, names) == ("aws",)
    assert keep_at(permit(()), ("aws", "fake")).resources.providers == ("aws", "fake")
    kept = keep_at(either, ("aws",)).resources
    assert (kept.providers, kept.any_of) == (("aws",), ())
    three = keep_at(permit((), ("local",), ("fake",)), ("aws", "fake")).resources
    assert [each.providers for each in three.choices] == [("aws", "fake"), ("fake",)]
