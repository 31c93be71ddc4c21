"""A task without an image is refused by each managed service before its launch."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from cavvy.domain.tasks import Scalar
from cavvy.providers import aws_batch, azure_batch, azureml, ecs, sagemaker, vertex
from cavvy.providers.base import ProviderContext
from cavvy.providers.registry import check_settings, make_from
from cavvy.task_files import parse_task

SERVICES = (aws_batch, azure_batch, azureml, ecs, sagemaker, vertex)
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1"


def list_objections(
    package: ModuleType, text: str, settings: Mapping[str, Scalar]
) -> Mapping[str, str]:
    """The provider's objections to a task, by field."""
    provider = make_from(
        package,
        ProviderContext(
            installation="any",
            home=Path("/nowhere"),
            settings=check_settings(package.MANIFEST, settings),
        ),
    )
    return {each.field: each.reason for each in provider.check(parse_task(text))}


@pytest.mark.parametrize("package", SERVICES)
def test_a_task_without_an_image_is_refused(package: ModuleType) -> None:
    reason = list_objections(package, "run: x", {})["image"]
    assert f"[providers.{package.MANIFEST.name}] image" in reason


@pytest.mark.parametrize("package", SERVICES)
def test_the_task_its_options_or_the_settings_name_the_image(package: ModuleType) -> None:
    name = package.MANIFEST.name
    options = f"run: x\nresources: {{options: {{{name}: {{image: {IMAGE}}}}}}}"
    for text, settings in (
        (f"run: x\nimage: {IMAGE}", {}),
        (options, {}),
        ("run: x", {"image": IMAGE}),
    ):
        assert "image" not in list_objections(package, text, settings)
