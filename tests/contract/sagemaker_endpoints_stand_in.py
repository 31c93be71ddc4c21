"""A stand-in for SageMaker's models, endpoint configurations and endpoints, and for their calls.

As in SageMaker, an endpoint needs its configuration, which needs its model; an endpoint that is
being created cannot be deleted; and a call must be signed. The signature is computed again by
botocore. https://github.com/getmoto/moto/blob/master/moto/sagemaker/models.py has some of the
errors' texts.
"""

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from tests.contract.aws_service import KEY, SECRET, Answer, AwsStandIn
from tests.contract.sagemaker_stand_in import make_product

from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.contract.rest_stand_in import finish
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

PRICES = {"ml.m5.large": "0.1150000000", "ml.g4dn.xlarge": "0.7364000000", "ml.z9.large": "9.9"}
FULL = "CapacityError: Unable to provision requested ML compute capacity."
_CALL = re.compile(r"/\d+/endpoints/([^/]+)/invocations")

_PAGE = 2
# the status and the body of a container's answer to a call
Container = Callable[[bytes, Mapping[str, str]], tuple[int, bytes]]


class EndpointsStandIn(AwsStandIn):
    """An endpoint is a machine, which is `off` while it is being deleted and no longer billed."""

    services: Mapping[str, str] = {"SageMaker": "sagemaker", "AWSPriceListService": "pricing"}
    deletes = timedelta(seconds=30)  # how long a deletion takes

    def __init__(self, cloud: MemoryCloud) -> None:
        super().__init__(cloud)
        self.models: dict[tuple[str, str], dict[str, Any]] = {}  # by region and name
        self.configs: dict[tuple[str, str], dict[str, Any]] = {}
        self.failures: dict[str, str] = {}  # reasons of failed endpoints, by name
        self.modified: dict[str, float] = {}  # by machine: when its deletion began
        self.container: Container = lambda body, headers: (200, b"{}")

    # the runtime

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, object] | None:
        called = _CALL.fullmatch(target)
        if called is None:
            return super().reply(method, target, headers, content)
        try:
            region = check_signature(method, target, headers, content)
            self.calls.append("sagemaker:InvokeEndpoint")
            return 200, self.call(region, called[1], headers, content)
        except Answer as answer:
            told = {"__type": answer.code, "Message": answer.message}
            if answer.code == "ModelError":
                told |= {"OriginalStatusCode": answer.status, "OriginalMessage": answer.message}  # type: ignore[dict-item]
            return 424 if answer.code == "ModelError" else answer.status, told
        except CloudFault as fault:
            return (fault.status, {"__type": fault.code}) if fault.status else None
        except Exception as bug:  # noqa: BLE001 - the test's teardown reports it
            self.bugs.append(bug)
            return None

    def call(self, region: str, name: str, headers: Mapping[str, str], body: bytes) -> bytes:
        try:
            machine = self._find(region, name)
        except Answer as missing:
            text = f"Endpoint {name} of account 123456789012 not found."
            raise Answer("ValidationError", text) from missing
        if self._status(name, machine) != "InService":
            raise Answer("ValidationError", f"Endpoint {name} is not in service")
        status, answer = self.answer_call(name, body, headers)
        if status != 200:
            raise Answer("ModelError", answer.decode(), status)
        return answer

    def answer_call(self, name: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        return self.container(body, headers)

    # models and configurations

    def CreateModel(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["ModelName"]
        if (region, name) in self.models:
            text = f"Cannot create already existing model '{_arn(region, 'model', name)}'."
            raise Answer("ValidationException", text)
        if "ExecutionRoleArn" not in body or "Image" not in body["PrimaryContainer"]:
            raise Answer("ValidationException", "A model needs a role and an image")
        self.models[region, name] = {**body, "CreationTime": self.cloud.time.timestamp()}
        return {"ModelArn": _arn(region, "model", name)}

    def CreateEndpointConfig(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["EndpointConfigName"]
        if (region, name) in self.configs:
            text = "Cannot create already existing endpoint configuration"
            raise Answer("ValidationException", f"{text} '{_arn(region, 'config', name)}'.")
        for each in body["ProductionVariants"]:
            if (region, each["ModelName"]) not in self.models:
                raise Answer("ValidationException", f"Could not find model {each['ModelName']!r}.")
        self.configs[region, name] = {**body, "CreationTime": self.cloud.time.timestamp()}
        return {"EndpointConfigArn": _arn(region, "endpoint-config", name)}

    def ListModels(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        return _cut(body, _select(self.models, region, body, "Model"), "Models")

    def ListEndpointConfigs(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        found = _select(self.configs, region, body, "EndpointConfig")
        return _cut(body, found, "EndpointConfigs")

    def DeleteModel(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.models.pop((region, body["ModelName"]), None) is None:
            raise Answer("ValidationException", "Could not find model")
        return {}

    def DeleteEndpointConfig(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["EndpointConfigName"]
        for each in self.machines(region, name):
            assert each.ended or each.off, "the configuration of a live endpoint was deleted"
        if self.configs.pop((region, name), None) is None:
            raise Answer("ValidationException", "Could not find endpoint configuration")
        return {}

    # endpoints

    def CreateEndpoint(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["EndpointName"]
        self._sweep()
        if any(each.ended is None for each in self.machines(region, name)):
            text = f"Cannot create already existing endpoint '{_arn(region, 'endpoint', name)}'."
            raise Answer("ValidationException", text)
        if (region, body["EndpointConfigName"]) not in self.configs:
            raise Answer("ValidationException", "Could not find endpoint configuration")
        self.bodies[region, name] = body
        try:
            self.start_endpoint(region, name)
        except CloudFault as fault:
            if fault.code == "quota-exceeded":
                text = "The account-level service limit 'ml.m5.large for endpoint usage' is 0"
                raise Answer("ResourceLimitExceeded", text) from fault
            if fault.code == "insufficient-capacity":
                raise Answer("ValidationException", FULL) from fault
            raise
        return {"EndpointArn": _arn(region, "endpoint", name)}

    def start_endpoint(self, region: str, name: str) -> None:
        """Start the machine of an endpoint. Raises CloudFault."""
        self.start_named(region, name, [name])

    def DescribeEndpoint(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["EndpointName"]
        machine = self._find(region, name)
        status = self._status(name, machine)
        told = {**self._show(region, name, machine), "EndpointConfigName": name}
        reason = {"FailureReason": self.failures[name]} if status == "Failed" else {}
        return {**told, **reason}

    def ListEndpoints(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        self._sweep()
        found = [
            self._show(region, each.tags["job"], each)
            for each in finish(self.cloud.list())
            if each.tags["region"] == region
            and each.state is not MachineState.ENDED
            and body["NameContains"] in each.tags["job"]
        ]
        return _cut(body, found, "Endpoints")

    def DeleteEndpoint(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["EndpointName"]
        machine = self._find(region, name)
        if self.cloud.fails_deletions:
            raise CloudFault(500, "internal-error")
        if self._status(name, machine) in ("Creating", "Deleting"):
            text = f"Cannot update in-progress endpoint {_arn(region, 'endpoint', name)!r}."
            raise Answer("ValidationException", text)
        self.modified[machine.id] = self.cloud.time.timestamp()
        self.end_container(name)
        self.cloud.change(machine.id, off=True)
        return {}

    def end_container(self, name: str) -> None:
        """End the process of an endpoint that is deleted."""

    def _status(self, name: str, machine: CloudMachine) -> str:
        if machine.state is MachineState.STOPPED:
            return "Deleting"
        if name in self.failures:
            return "Failed"
        running = machine.state is MachineState.RUNNING and self.is_up(name)
        return "InService" if running else "Creating"

    def is_up(self, name: str) -> bool:
        """Whether the endpoint's container answers /ping."""
        return True

    def _show(self, region: str, name: str, machine: CloudMachine) -> dict[str, Any]:
        """The fields that lists and descriptions have in common."""
        assert machine.created_at is not None
        made = machine.created_at.timestamp()
        return {
            "EndpointName": name,
            "EndpointArn": _arn(region, "endpoint", name),
            "EndpointStatus": self._status(name, machine),
            "CreationTime": made,
            "LastModifiedTime": self.modified.get(machine.id, made),
        }

    def _find(self, region: str, name: str) -> CloudMachine:
        self._sweep()
        for each in self.machines(region, name):
            if each.ended is None and (shown := finish(self.cloud.get(each.id))) is not None:
                found: CloudMachine = shown
                return found
        raise Answer("ValidationException", f"Could not find endpoint {name!r}.")

    def _sweep(self) -> None:
        """Complete deletions."""
        for each in self.cloud.billed():
            begun = self.modified.get(each.id)
            if begun and self.cloud.time.timestamp() - begun >= self.deletes.total_seconds():
                finish(self.cloud.delete(each.id))

    def products(self, region: str) -> list[dict[str, Any]]:
        return [
            make_product(region, name, use, usd if use == "Hosting" else "99.0")
            for name, usd in PRICES.items()
            for use in ("Training", "Hosting")
        ]


def check_signature(method: str, target: str, headers: Mapping[str, str], content: bytes) -> str:
    """Return the region of a request that is signed with the stand-in's key. Raises Answer."""
    words = dict(re.findall(r"(\w+)=([^, ]+)", headers.get("authorization", "")))
    scope = words.get("Credential", "////").split("/")
    request = AWSRequest(
        method=method,
        url=f"http://{headers['host']}{target}",
        data=content,
        headers={name: headers[name] for name in words.get("SignedHeaders", "").split(";") if name},
    )
    request.context["timestamp"] = headers.get("x-amz-date", "")
    own = SigV4Auth(Credentials(KEY, SECRET), "sagemaker", scope[2])
    text = own.string_to_sign(request, own.canonical_request(request))
    if scope[0] != KEY or own.signature(text, request) != words.get("Signature"):
        raise Answer("InvalidSignatureException", "The request signature is wrong", 403)
    return scope[2]


def _select(
    objects: Mapping[tuple[str, str], Mapping[str, Any]],
    region: str,
    body: Mapping[str, Any],
    kind: str,
) -> list[dict[str, Any]]:
    return [
        {
            f"{kind}Name": name,
            f"{kind}Arn": _arn(region, "model" if kind == "Model" else "endpoint-config", name),
            "CreationTime": made["CreationTime"],
        }
        for (at, name), made in objects.items()
        if at == region
        and body["NameContains"] in name
        and made["CreationTime"] < body["CreationTimeBefore"]
    ]


def _cut(body: Mapping[str, Any], found: list[Any], field: str) -> dict[str, Any]:
    """One page of a list."""
    at = int(body.get("NextToken", 0))
    more = {"NextToken": str(at + _PAGE)} if at + _PAGE < len(found) else {}
    return {field: found[at : at + _PAGE], **more}


def _arn(region: str, kind: str, name: str) -> str:
    return f"arn:aws:sagemaker:{region}:123456789012:{kind}/{name}"
