"""An error about the settings of a managed service of AWS names that service's settings."""

import asyncio
from pathlib import Path
from types import ModuleType

import pytest

from cavvy.providers import aws_batch, ecs, sagemaker
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.registry import check_settings, make_from

pytest.importorskip("boto3")
NEEDED = {
    "aws-batch": {"queues": "gpu"},
    "ecs": {"capacity": "FARGATE"},
    "sagemaker": {"role": "arn:aws:iam::123456789012:role/x", "bucket": "s3://bucket/cavvy"},
}


@pytest.mark.parametrize("package", [aws_batch, ecs, sagemaker])
def test_a_missing_region_is_named(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    name = package.MANIFEST.name
    settings = check_settings(package.MANIFEST, NEEDED[name])
    context = ProviderContext(installation="any", home=Path("/nowhere"), settings=settings)
    with pytest.raises(Refused, match=rf"\[providers\.{name}\] regions: no region is set"):
        asyncio.run(make_from(package, context).offers())
