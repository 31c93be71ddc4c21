"""Stand-ins for AWS's managed services over a cloud in memory, behind one HTTP server: real boto3
calls them, and each request and reply is checked against botocore's models.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError
from botocore.httpsession import URLLib3Session
from tests.exports.aws_model import check_reply, check_request, service_model
from urllib3 import HTTPResponse

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.http_client import CONNECTIONS
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.base import Manifest, ProviderContext
from cavvy.providers.contract.memory_cloud import (
    MemoryCloud,
    MemoryPlace,
    Rented,
    make_node_endpoint,
)
from cavvy.providers.contract.rest_stand_in import RestServer, finish
from cavvy.providers.managed.provider import make_provider
from cavvy.providers.managed.service import ManagedService
from cavvy.providers.registry import check_settings
from cavvy.providers.state import MemoryProviderState, ProviderState
from cavvy.providers.vm.cloud import CloudFault, CloudTraits, MachineRequest
from cavvy.providers.vm.provider import VmProvider

KEY = "AKIDEXAMPLE"
SECRET = "for the stand-in only"
REGIONS = ("us-east-1", "us-west-2")
# how AWS reports faults of the cloud in memory: status and code
_FAULTS = {
    "too-many-requests": (400, "ThrottlingException"),
    "internal-error": (500, "InternalFailure"),
    "unavailable": (503, "ServiceUnavailable"),
    "forbidden": (400, "AccessDeniedException"),
}
_BLANK = Offer(provider="aws", region="any", instance_type="", rate=HourlyRate(0))
MACHINES = {  # what the catalog knows of EC2's types
    "m5.large": replace(_BLANK, vcpus=2, memory_mib=8192),
    "m5.xlarge": replace(_BLANK, vcpus=4, memory_mib=16384),
    "g4dn.xlarge": replace(
        _BLANK,
        vcpus=4,
        memory_mib=16384,
        accelerator="T4",
        accelerator_count=1,
        accelerator_memory_mib=16384,
    ),
}


class Answer(Exception):
    """An error reply of an AWS API."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


class AwsStandIn:
    """One service. Subclasses have a method for each operation, named as in the API."""

    # the service by the start of the header X-Amz-Target; "" for requests without the header
    services: Mapping[str, str]

    def __init__(self, cloud: MemoryCloud) -> None:
        self.cloud = cloud
        self.quota = 1000
        self.calls: list[str] = []
        self.bodies: dict[tuple[str, str], dict[str, Any]] = {}  # requests by region and job
        self.undescribed: set[str] = set()  # machines whose jobs are listed, but not described
        self.bugs: list[Exception] = []
        self.started: Callable[[Rented], None] = lambda machine: None

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, object] | None:
        """The status and the body of a reply; None if the connection is to be closed."""
        try:
            prefix, _, operation = headers.get("x-amz-target", "").rpartition(".")
            service = self.services[prefix]
            operation = operation or operation_at(service, "/" + target.split("/", 2)[2])
            return self.answer(service, operation, headers, json.loads(content))
        except Answer as answer:
            return answer.status, {"__type": answer.code, "message": answer.message}
        except CloudFault as fault:
            status, code = _FAULTS.get(fault.code, (fault.status, fault.code))
            return (status, {"__type": code, "message": fault.message}) if status else None
        except Exception as bug:  # noqa: BLE001 - the test's teardown reports it
            self.bugs.append(bug)
            return None

    def answer(
        self, service: str, operation: str, headers: Mapping[str, str], body: dict[str, Any]
    ) -> tuple[int, object]:
        name, _, region = headers["authorization"].partition("Credential=")[2].split("/")[:3]
        self.calls.append(f"{service}:{operation}")
        if name != KEY:
            raise Answer("UnrecognizedClientException", "The security token is invalid.")
        try:
            check_request(service, operation, body)
        except AssertionError as wrong:
            raise Answer("ValidationException", str(wrong)) from wrong
        told = getattr(self, operation)(region, body)
        check_reply(service, operation, told)
        return 200, told

    def start(self, region: str, job: str, nodes: int) -> list[Rented]:
        """Start the machines of a job. Raises CloudFault."""
        stem, count = job.rsplit("-", 2)[0], job.rpartition("-")[2]
        return self.start_named(region, job, [f"{stem}-{rank}-{count}" for rank in range(nodes)])

    def start_named(self, region: str, job: str, names: list[str]) -> list[Rented]:
        """Start machines with these names. Raises CloudFault."""
        nodes = len(names)
        if len(self.cloud.billed()) + nodes > self.quota:
            raise CloudFault(400, "quota-exceeded", "the limit is reached")
        request = MachineRequest(
            gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
            offer=replace(_BLANK, region="here", instance_type="small"),
            names=names,
            user_data=["#!/bin/sh\n"] * nodes,
            tags={"job": job, "region": region},
            token=f"{region}/{job}",
        )
        finish(self.cloud.create(request))
        return self.machines(region, job)

    def machines(self, region: str, job: str) -> list[Rented]:
        """The machines of a job, whether they are listed or not."""
        return [
            each
            for each in self.cloud.machines
            if (each.tags["region"], each.tags["job"]) == (region, job)
        ]

    def jobs(self, region: str) -> list[str]:
        """The jobs that the service lists now."""
        found = finish(self.cloud.list())
        return list(dict.fromkeys(m.tags["job"] for m in found if m.tags["region"] == region))

    def GetProducts(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        """The price list, one product a page."""
        wanted = {each["Field"]: each["Value"] for each in body["Filters"]}
        found = [
            each
            for each in self.products(wanted["regionCode"])
            if wanted.items() <= {**each["product"], **each["product"]["attributes"]}.items()
        ]
        at = int(body.get("NextToken", 0))
        more = {"NextToken": str(at + 1)} if at + 1 < len(found) else {}
        return {"FormatVersion": "aws_v1", "PriceList": [json.dumps(found[at])], **more}

    def products(self, region: str) -> list[dict[str, Any]]:
        """The products of the price list."""
        return []


def operation_at(service: str, path: str) -> str:
    """The operation of a service whose operations have paths."""
    model = service_model(service)
    return next(
        name
        for name in model.operation_names
        if model.operation_model(name).http["requestUri"] == path
    )


class AwsFront:
    """The endpoint of all stand-ins of a test module, which come one after the other."""

    current: AwsStandIn

    def reply(self, *request: Any) -> tuple[int, object] | None:
        with _LOCK:
            return self.current.reply(*request)


def send_directly(usual: Callable[..., Any], session: Any, request: Any) -> Any:
    """Send botocore's request to a stand-in of this process without a socket, whose server would
    take as long as botocore does; other requests as usual.
    """
    parts = urlsplit(request.url)
    if parts.netloc not in CONNECTIONS:
        return usual(session, request)
    connection = CONNECTIONS[parts.netloc](parts.netloc)
    target = parts._replace(scheme="", netloc="").geturl()
    connection.request(request.method, target, request.body, dict(request.headers.items()))
    try:
        reply = connection.getresponse()
    except RemoteDisconnected as error:
        raise ConnectionClosedError(
            error=error, request=request, endpoint_url=request.url
        ) from error
    raw = HTTPResponse(
        reply, reply.headers, reply.status, preload_content=False, decode_content=False
    )
    answer = AWSResponse(request.url, reply.status, raw.headers, raw)
    if not request.stream_output:
        answer.content  # noqa: B018 - botocore reads it here, too
    return answer


_LOCK = threading.Lock()
Front = tuple[AwsFront, AwsAccount, Mapping[str, Scalar]]


@contextmanager
def aws_front(
    server: RestServer, manifest: Manifest, table: Mapping[str, Scalar]
) -> Iterator[Front]:
    """A front, an account and its settings; making clients is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        usual = URLLib3Session.send
        patch.setattr(URLLib3Session, "send", lambda *given: send_directly(usual, *given))
        front = AwsFront()
        places: dict[str, Scalar] = {"regions": ", ".join(REGIONS), "endpoint": server.add(front)}  # type: ignore[arg-type]  # has `reply`
        settings = check_settings(manifest, {**places, **table})
        yield front, AwsAccount(settings), settings


class ManagedPlace(MemoryPlace):
    """One account of a managed service."""

    def __init__(
        self,
        traits: CloudTraits,
        home: Path,
        stand_in: type[AwsStandIn],
        make: Callable[[ProviderContext, AwsAccount], ManagedService],
        manifest: Manifest,
        front: Front,
        prices: Sequence[Offer] = (),
    ) -> None:
        lag = timedelta(seconds=20)
        super().__init__(replace(traits, tags=True, list_lag=lag), home)
        self.api = stand_in(self.cloud)
        self.states: dict[str, ProviderState] = defaultdict(MemoryProviderState)
        server, self.aws, self._settings = front
        server.current = self.api
        self._make, self._manifest, self.prices = make, manifest, list(prices)

    def provider(self, installation: str, **table: Scalar) -> VmProvider:
        context = ProviderContext(
            installation=installation,
            home=self.home,
            settings={**self._settings, **table},
            state=self.states[installation],
            node_endpoint=make_node_endpoint(),
            find_instance=lambda provider, name: MACHINES.get(name),
            list_prices=lambda provider: tuple(self.prices),
            now=self.cloud.now,
        )
        return make_provider(self._manifest, context, lambda context: self._make(context, self.aws))

    async def end(self, gang: str) -> None:
        for each in self.cloud.billed():
            self.cloud.change(each.id, ended=self.cloud.time)

    def double(self) -> None:
        """Names are unique in a region: the second job is in another one."""
        newest = self.cloud.billed()[-1]
        job = newest.tags["job"]
        other = next(each for each in REGIONS if each != newest.tags["region"])
        self.api.bodies[other, job] = self.api.bodies[newest.tags["region"], job]
        self.cloud.add(newest.name, {**newest.tags, "region": other})
