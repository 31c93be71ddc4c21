"""Which fallbacks a service must not have."""

from collections.abc import Mapping

import pytest

from cavvy.capabilities.serving.control.requests import object_to_fallbacks
from cavvy.domain.policies import BoundPolicy, ProjectPolicy
from cavvy.domain.services import FallbackApi, FallbackRule, ReplicaRole, ServiceSpec
from cavvy.domain.tasks import ReplicaGroup, ResourceSpec, TaskSpec
from cavvy.domain.values import replace


def make(name: str, *fallbacks: str, residency: str | None = None) -> TaskSpec:
    rules = tuple(FallbackRule(service=each) for each in fallbacks)
    return TaskSpec(name=name, run="s", service=ServiceSpec(fallbacks=rules, residency=residency))


def by_name(*tasks: TaskSpec) -> Mapping[str, TaskSpec]:
    return {each.name: each for each in tasks}


@pytest.mark.parametrize(
    ("task", "others", "said"),
    [
        (make("a", "a"), by_name(), "cannot be its own fallback"),
        (make("a", "b"), by_name(), "no service b"),
        (make("a", "b"), by_name(make("b", "a")), "a -> b -> a"),
        (make("a", "d", "b"), by_name(make("b", "c"), make("c", "d", "a"), make("d")), "c -> a"),
        (make("a", "b", residency="eu"), by_name(make("b")), "outside of the places of a"),
        (make("a", "b", residency="eu"), by_name(make("b", residency="us")), "outside"),
    ],
)
def test_what_would_loop_or_leave_its_places_is_refused(
    task: TaskSpec, others: Mapping[str, TaskSpec], said: str
) -> None:
    assert said in object_to_fallbacks(task, others)


def test_an_api_is_refused_if_resources_or_policies_name_places() -> None:
    rule = FallbackRule(api=FallbackApi(model="m"))
    task = TaskSpec(name="a", run="s", service=ServiceSpec(fallbacks=(rule,)))
    assert object_to_fallbacks(task, {}) == ""
    policy = BoundPolicy(project="p", policy=ProjectPolicy(regions=("eu",)))
    assert "a policy of the project names places" in object_to_fallbacks(task, {}, [policy])
    assert object_to_fallbacks(task, {}, [replace(policy, policy=ProjectPolicy())]) == ""
    bound = replace(task, resources=ResourceSpec(regions=("eu",)))
    assert "may answer in any place" in object_to_fallbacks(bound, {})


@pytest.mark.parametrize(
    ("own", "other", "stays"),
    [
        ("us-east-1", "us", False),  # anywhere in the country
        ("eu-central-1", "de", False),
        ("de", "eu", False),
        ("us", "us-east-1", True),
        ("eu", "eu-west-1", True),
        ("EU", "de", True),
        ("on-prem", "on-prem", True),
        ("on-prem", "us", False),
        ("", "us-east-1", True),
        ("", "on-prem", True),
        ("us-east-1", "", False),
    ],
)
def test_a_fallback_runs_only_where_the_service_may(own: str, other: str, stays: bool) -> None:
    def place(name: str, region: str, *fallbacks: str) -> TaskSpec:
        resources = ResourceSpec(regions=(region,) if region else ())
        return replace(make(name, *fallbacks), resources=resources)

    def find(fallback: TaskSpec) -> bool:
        said = object_to_fallbacks(place("a", own, "b"), by_name(fallback))
        return "may run outside of the places" not in said

    fallback, group = place("b", other), ReplicaGroup(name="g", role=ReplicaRole.WORKER)
    assert find(fallback) == stays
    elsewhere = replace(group, resources=ResourceSpec(regions=("fr",)))
    assert find(replace(fallback, replica_groups=(group,))) == stays
    anywhere = replace(fallback, replica_groups=(group, elsewhere))
    assert find(anywhere) == (stays and own.lower() in ("", "eu")), "each group must stay"


@pytest.mark.parametrize(
    ("task", "others"),
    [
        (make("a", "b", "c"), by_name(make("b", "c"), make("c", "none"), make("d", "a"))),
        (make("a", "b"), by_name(make("b", "c"), make("c", "b"))),  # not over this service
        (make("a", "b", residency="eu"), by_name(make("b", residency="eu"))),
        (make("a", "b"), by_name(make("b", residency="eu"))),
    ],
)
def test_other_fallbacks_are_permitted(task: TaskSpec, others: Mapping[str, TaskSpec]) -> None:
    assert object_to_fallbacks(task, others) == ""


@pytest.mark.parametrize(
    ("asked", "rule", "known", "said"),
    [
        ("big", "", "small", "write `{service: b, model: small}`"),
        ("big", "other", "small", "would name the model other, but it has small"),
        ("big", "small", "small", ""),
        ("big", "", "big", ""),
        ("big", "", "", ""),  # its program may know any model
        ("", "", "small", ""),
    ],
)
def test_a_fallback_must_know_the_model_of_requests(
    asked: str, rule: str, known: str, said: str
) -> None:
    rules = (FallbackRule(service="b", model=rule),)
    spec = ServiceSpec(models=tuple(filter(None, [asked])), fallbacks=rules)
    other = ServiceSpec(models=tuple(filter(None, [known])))
    others = by_name(TaskSpec(name="b", run="s", service=other))
    found = object_to_fallbacks(TaskSpec(name="a", run="s", service=spec), others)
    assert said in found
    assert bool(said) == bool(found)
