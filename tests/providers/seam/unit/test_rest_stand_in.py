"""The stand-ins for REST APIs accept every method and text, and report what they cannot read."""

import asyncio
from collections.abc import Iterator

import pytest

from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.contract.rest_stand_in import RestRequest, RestServer, RestStandIn
from cavvy.providers.vm.cloud import CloudFault, CloudTraits
from cavvy.providers.vm.rest import RestClient


class Echo(RestStandIn):
    """Answers with what it received."""

    def answer(self, request: RestRequest) -> tuple[int, object]:
        return 200, {"method": request.method, "body": request.body}

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code}


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = RestServer()
    yield Echo(MemoryCloud(CloudTraits()), server)
    server.close()


def client(echo: Echo) -> RestClient:
    return RestClient(echo.url, lambda: echo.key, lambda told: (told["code"], ""))


def test_every_method_reaches_the_stand_in(echo: Echo) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        told = asyncio.run(client(echo).send(method, "/x", {"a": 1}))
        assert told == {"method": method, "body": {"a": 1}}


def test_text_reaches_the_stand_in_as_text(echo: Echo) -> None:
    told = asyncio.run(client(echo).send("PATCH", "/x", "#!/bin/sh\n"))
    assert told == {"method": "PATCH", "body": "#!/bin/sh\n"}


def test_a_body_that_is_not_json_is_recorded_as_a_bug(echo: Echo) -> None:
    headers = {"Content-Type": "application/json"}
    with pytest.raises(CloudFault, match="no reply"):
        asyncio.run(client(echo).send("POST", "/x", "a: 1", headers=headers))
    (bug,) = echo.bugs
    assert "the body of POST /0/x has the type application/json but is not JSON: 'a: 1'" in str(bug)
