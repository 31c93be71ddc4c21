"""Options of a task that name a provider are that provider's to honour."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.domain.tasks import ProviderOptions, ResourceSpec, TaskSpec
from cavvy.importers import parse_task
from cavvy.providers.base import Manifest
from cavvy.providers.objections import list_objections
from cavvy.spec import SpecError
from cavvy.spec.support import read_options


def option(provider: str, **values: object) -> ProviderOptions:
    return ProviderOptions(provider=provider, values=json.dumps(values))


def test_an_unknown_option_is_an_objection_of_its_provider_only() -> None:
    manifest = Manifest(name="aws", title="AWS", docs="x", options={"image": "an AMI"})
    provider: Any = SimpleNamespace(manifest=manifest)
    options = (option("aws", image="ami-1", colour="red"), option("gcp", size=1))
    task = TaskSpec(name="a", run="x", resources=ResourceSpec(options=options))
    (found,) = list_objections(task, provider)
    assert str(found) == "resources.options.aws.colour: aws has no such option"
    assert read_options(task.resources, "aws") == {"image": "ami-1", "colour": "red"}
    assert read_options(task.resources, "local") == {}


def test_options_of_a_file() -> None:
    task = parse_task("run: x\nresources: {options: {kubernetes: {pod: {spec: {a: [1, b]}}}}}")
    assert task.resources.options == (option("kubernetes", pod={"spec": {"a": [1, "b"]}}),)
    assert read_options(task.resources, "kubernetes") == {"pod": {"spec": {"a": [1, "b"]}}}


@pytest.mark.parametrize("written", ["image", "[a]", "{}", "{aws: image}", "{aws: [a]}"])
def test_options_are_a_table_for_each_provider(written: str) -> None:
    with pytest.raises(SpecError):
        parse_task(f"run: x\nresources: {{options: {written}}}")
