"""What botocore is told without a socket is what it is told through one."""

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from tests.contract.aws_batch_stand_in import BatchStandIn
from tests.contract.aws_service import aws_front
from tests.providers.aws.contract.test_provider_aws_batch import TABLE

from cavvy.providers.aws.account import AwsFault
from cavvy.providers.aws_batch import MANIFEST
from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.vm.cloud import CloudFault, CloudTraits


class Odd(BatchStandIn):
    """Answers the name of a queue with what the name says."""

    def __init__(self) -> None:
        super().__init__(MemoryCloud(CloudTraits()))
        self.heard: list[Any] = []

    def answer(self, service: str, operation: str, headers: Any, body: Any) -> tuple[int, object]:
        kept = ("content-type", "content-length", "host", "accept-encoding")
        self.heard.append((service, operation, {name: headers.get(name) for name in kept}, body))
        match body.get("jobs", ["none"])[0]:
            case "closed":
                raise CloudFault(0, "", "")
            case "throttled":
                raise CloudFault(429, "too-many-requests", "slower")
        return super().answer(service, operation, headers, body)


@pytest.mark.parametrize("first", ["a", "closed", "throttled"])
def test_botocore_hears_the_same_with_and_without_a_socket(
    rest_server: RestServer, first: str
) -> None:
    seen = []
    with aws_front(rest_server, MANIFEST, TABLE) as (front, account, _):
        account.read_attempts = 1
        for way in (rest_server.networked(), nullcontext()):
            front.current = odd = Odd()
            with way:
                call = account.call(
                    "us-east-1", "describe_jobs", service="batch", jobs=[first, "\u00e9"]
                )
                try:
                    told: Any = asyncio.run(call)
                except AwsFault as fault:
                    told = type(fault), fault.code, str(fault)
                else:
                    told["ResponseMetadata"]["HTTPHeaders"].pop("server", None)
                    told["ResponseMetadata"]["HTTPHeaders"].pop("date", None)
            assert odd.heard
            seen.append((told, odd.heard, odd.bugs))
    assert seen[0] == seen[1]
