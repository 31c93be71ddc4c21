"""Options of a task that name a provider are that provider's to honour."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.cli.task.unknown import misspelt_options
from cavvy.domain.tasks import (
    Objection,
    ProviderOptions,
    ResourceSpec,
    TaskSpec,
    TopologyNeed,
)
from cavvy.domain.values import replace
from cavvy.providers.abilities import CHECKS_TASKS, HOLDS_VOLUMES
from cavvy.providers.base import Feature, Manifest
from cavvy.providers.ecs import MANIFEST as ECS
from cavvy.providers.objections import list_makers, list_objections, list_unlisted
from cavvy.spec import SpecError
from cavvy.spec.support import read_options
from cavvy.task_files import parse_task


def option(provider: str, **values: object) -> ProviderOptions:
    return ProviderOptions(provider=provider, values=json.dumps(values))


def test_an_unknown_option_is_an_objection_of_its_provider_only() -> None:
    manifest = Manifest(name="aws", title="AWS", docs="x", options={"image": "an AMI"})
    provider: Any = SimpleNamespace(manifest=manifest)
    options = (option("aws", image="ami-1", colour="red"), option("gcp", size=1))
    task = TaskSpec(name="a", run="x", resources=ResourceSpec(options=options))
    (found,) = list_objections(task, provider)
    assert str(found) == (
        "resources.options.aws.colour: aws has no such option; the options are `image`"
    )
    assert read_options(task.resources, "aws") == {"image": "ami-1", "colour": "red"}
    assert read_options(task.resources, "local") == {}


def test_who_has_volumes_without_listing_them_and_who_makes_them() -> None:
    plain = Manifest(name="k8s", title="Clusters", docs="x")
    providers: Any = {
        "here": SimpleNamespace(manifest=replace(plain, makes_volumes=True)),
        "k8s": SimpleNamespace(manifest=plain),
        "k8s@team": SimpleNamespace(manifest=plain),
        "none": SimpleNamespace(manifest=replace(plain, unsupported={Feature.VOLUMES: "none"})),
        "lists": SimpleNamespace(manifest=replace(plain, abilities=(HOLDS_VOLUMES,)), volumes=None),
    }
    assert list_unlisted(providers) == {"k8s", "k8s@team"}
    assert list_makers(providers) == {"here"}


def test_a_required_topology_is_refused_where_nodes_cannot_be_told_apart() -> None:
    manifest = Manifest(name="aws", title="AWS", docs="x")
    provider: Any = SimpleNamespace(manifest=manifest)
    task = TaskSpec(name="a", run="x", nodes=2, topology=TopologyNeed(same="rack"))
    assert [str(each) for each in list_objections(task, provider)] == [
        "topology.same: AWS cannot tell which nodes are in one rack; write `prefer` instead of "
        "`same`, or name another provider"
    ]
    wished = replace(task, topology=TopologyNeed(prefer="rack"))
    assert list_objections(wished, provider) == []
    provider.manifest = replace(manifest, keeps_topology=True)
    assert list_objections(task, provider) == []


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"channels": "…", "image": "…"}, "did you mean `channels`?"),
        ({"image": "…", "warm_s": "…"}, "the options are `image` and `warm_s`"),
        ({}, "the provider has no options"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(
    options: dict[str, str], hint: str
) -> None:
    manifest = Manifest(name="sagemaker", title="SageMaker", docs="x", options=options)
    provider: Any = SimpleNamespace(manifest=manifest)
    need = ResourceSpec(options=(option("sagemaker", chanels={"train": "s3://b/c"}),))
    (found,) = list_objections(TaskSpec(name="a", run="x", resources=need), provider)
    assert found.field == "resources.options.sagemaker.chanels"
    assert found.reason == f"sagemaker has no such option; {hint}"


def test_a_reason_of_the_provider_replaces_the_general_one() -> None:
    field, reason = "resources.options.sagemaker.tuning", "submit the runs as jobs"
    manifest = Manifest(name="sagemaker", title="SageMaker", docs="x", abilities=(CHECKS_TASKS,))
    provider: Any = SimpleNamespace(
        manifest=manifest, check=lambda task: [Objection(field, reason)]
    )
    need = ResourceSpec(options=(option("sagemaker", tuning={"jobs": 20}),))
    found = list_objections(TaskSpec(name="a", run="x", resources=need), provider)
    assert found == [Objection(field, reason)]


def test_an_option_that_only_the_export_reads_is_known_to_the_provider() -> None:
    """The same task can be exported for ECS and run by the provider."""
    need = ResourceSpec(options=(option("ecs", launch_type="EC2"),))
    provider: Any = SimpleNamespace(manifest=replace(ECS, abilities=()))
    task = TaskSpec(name="a", run="x", resources=need)
    assert list_objections(task, provider) == []


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("sagemaker", {"chanels": 1}, "sagemaker.chanels: sagemaker has no such option; did you"),
        ("aws-batch", {"shares": 1}, "did you mean share?"),
        ("sagemakr", {"channels": 1}, "there is no provider 'sagemakr'; did you mean sagemaker?"),
    ],
)
def test_misspelt_names_are_found_before_a_task_is_submitted(
    name: str, values: dict[str, int], message: str
) -> None:
    (line,) = misspelt_options([option(name, **values)])
    assert line.startswith(f"resources.options.{name}")
    assert message in line


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ecs", {"launch_type": "EC2"}),
        ("kubernetes", {"pod": {}}),
        ("sagemaker", {"tuning": {}}),  # the provider itself states what to write instead
        ("my-own-cloud", {"colour": 1}),
    ],
)
def test_other_names_are_left_to_the_provider(name: str, values: dict[str, object]) -> None:
    assert misspelt_options([option(name, **values)]) == []


def test_options_of_a_file() -> None:
    task = parse_task("run: x\nresources: {options: {kubernetes: {pod: {spec: {a: [1, b]}}}}}")
    assert task.resources.options == (option("kubernetes", pod={"spec": {"a": [1, "b"]}}),)
    assert read_options(task.resources, "kubernetes") == {"pod": {"spec": {"a": [1, "b"]}}}


@pytest.mark.parametrize("written", ["image", "[a]", "{}", "{aws: image}", "{aws: [a]}"])
def test_options_are_a_table_for_each_provider(written: str) -> None:
    with pytest.raises(SpecError):
        parse_task(f"run: x\nresources: {{options: {written}}}")
