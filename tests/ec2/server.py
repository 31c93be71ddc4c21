"""The stand-in's HTTP server: rules first, then moto, then what moto does not know."""

import base64
import io
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.sax.saxutils import escape

from moto.server import DomainDispatcherApplication, create_backend_app
from tests.ec2.cloud import Cloud
from tests.ec2.rules import Answer
from werkzeug.serving import WSGIRequestHandler, make_server

_NS = "http://ec2.amazonaws.com/doc/2016-11-15/"
_OURS_ONLY = frozenset({"TerminateInstances", "DeleteSecurityGroup", "DeletePlacementGroup"})
_TAG = "remuda:installation"
# Public parameters; moto has no deep-learning images, so that Amazon Linux stands for them.
_IMAGES = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
    "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64",
)
_NAMES = {"service-quotas": "servicequotas"}


class _HangUp(ConnectionError):
    """The line is cut; werkzeug then answers nothing."""


class Front:
    """A WSGI application."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self._moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        service, region = _scope(environ)
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        params = {} if target else dict(parse_qsl(body.decode(), keep_blank_values=True))
        action = target.rpartition(".")[2] or params.get("Action", "")
        cloud = self.cloud
        with cloud.lock:
            cloud.tick()
            cloud.calls.append((service, action))
            fault = cloud.rules.fault(service, action) if cloud.rules.fault else None
            try:
                if fault == "hang up":
                    _hang_up(environ)
                if fault == "throttle":
                    raise Answer("RequestLimitExceeded", "Request limit exceeded.", 503)
                if fault == "unavailable":
                    raise Answer("Unavailable", "The service is unavailable.", 503)
                self._authorize(service, action, region, params)
                content, kind = self._answer(service, action, region, params, body, environ)
            except Answer as error:
                return _fail(start, error, json_too=bool(target))
        if fault == "lose":
            _hang_up(environ)
        start("200 OK", [("Content-Type", kind), ("Content-Length", str(len(content)))])
        return [content]

    def _authorize(self, service: str, action: str, region: str, params: Mapping[str, str]) -> None:
        allowed = self.cloud.rules.allowed
        name = f"{_NAMES.get(service, service)}:{action}"
        if allowed is None:
            return
        if name not in allowed or (_makes_tags(params) and "ec2:CreateTags" not in allowed):
            raise Answer("UnauthorizedOperation", f"You are not authorized to perform {name}.", 403)
        if action in _OURS_ONLY:
            for tags in self._targets(action, region, params):
                if _TAG not in tags:
                    raise Answer("UnauthorizedOperation", f"{name}: the resource has no tag {_TAG}.", 403)

    def _targets(self, action: str, region: str, params: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        if action == "TerminateInstances":
            for each in _list(params, "InstanceId"):
                if each in self.cloud.lives:
                    yield {_TAG: self.cloud.lives[each].installation} if self.cloud.lives[each].installation else {}
        elif action == "DeletePlacementGroup":
            yield self.cloud.placements.get((region, params["GroupName"]), {_TAG: ""})
        else:
            group = self.cloud.backend(region).get_security_group_from_id(params["GroupId"])
            yield {str(t.get("Key", t.get("key"))): "" for t in group.get_tags()} if group else {_TAG: ""}

    def _answer(
        self, service: str, action: str, region: str, params: dict[str, str], body: bytes, environ: dict[str, Any]
    ) -> tuple[bytes, str]:
        own = getattr(self, f"_do_{action}", None)
        if own is not None and service == "ec2":
            return own(region, params, environ), "text/xml"
        if service in ("pricing", "servicequotas", "ssm"):
            asked = json.loads(body)
            return json.dumps(getattr(self, f"_tell_{action}")(region, asked)).encode(), "application/x-amz-json-1.1"
        return self._ask_moto(environ, body), "text/xml"

    def _ask_moto(self, environ: dict[str, Any], body: bytes) -> bytes:
        """moto's answer to a request; its errors become ours."""
        seen: list[str] = []

        def start(status: str, headers: list[tuple[str, str]], *_: object) -> Callable[[bytes], object]:
            seen.append(status)
            return lambda _: None

        inner = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        content = b"".join(self._moto(inner, start))
        if not seen[0].startswith("2"):
            text = content.decode(errors="replace")
            code = text.partition("<Code>")[2].partition("</Code>")[0] or "InternalError"
            raise Answer(code, text.partition("<Message>")[2].partition("</Message>")[0], int(seen[0][:3]))
        return content

    # EC2

    def _do_RunInstances(self, region: str, params: dict[str, str], environ: dict[str, Any]) -> bytes:
        cloud = self.cloud
        known = cloud.check_token(region, params)
        if known is not None:
            return known
        asked = dict(params)
        cloud.check_launch(region, params)
        user_data = base64.b64decode(params.get("UserData", ""))
        content = self._ask_moto(environ, urlencode(params).encode())
        cloud.launched(region, params, asked, user_data)
        content = content.replace(b"<code>16</code>", b"<code>0</code>").replace(
            b"<name>running</name>", b"<name>pending</name>"
        )
        cloud.remember(region, asked, content)
        return content

    def _do_TerminateInstances(self, region: str, params: dict[str, str], environ: dict[str, Any]) -> bytes:
        cloud, ids = self.cloud, _list(params, "InstanceId")
        now = cloud.hours.now()
        lives = [cloud.lives.get(each) for each in ids]
        missing = [each for each, life in zip(ids, lives, strict=True) if life is None or life.visible_at > now]
        if missing:
            raise Answer("InvalidInstanceID.NotFound", f"The instance ID '{missing[0]}' does not exist")
        found = [life for life in lives if life is not None]
        before = [(life, life.state) for life in found]
        for life in found:
            cloud.end(life, "Client.UserInitiatedShutdown", "User initiated shutdown")
        items = "".join(
            f"<item><instanceId>{life.id}</instanceId><currentState><code>0</code><name>{life.state}</name></currentState>"
            f"<previousState><code>0</code><name>{was}</name></previousState></item>"
            for life, was in before
        )
        return _xml(action="TerminateInstances", inner=f"<instancesSet>{items}</instancesSet>")

    def _do_DeleteSecurityGroup(self, region: str, params: dict[str, str], environ: dict[str, Any]) -> bytes:
        if self.cloud.group_in_use(params["GroupId"]):
            raise Answer("DependencyViolation", f"resource {params['GroupId']} has a dependent object")
        return self._ask_moto(environ, urlencode(params).encode())

    def _do_DescribeSpotPriceHistory(self, region: str, params: dict[str, str], environ: dict[str, Any]) -> bytes:
        types, zone = _list(params, "InstanceType"), params.get("AvailabilityZone")
        since = datetime.fromisoformat(params["StartTime"].replace("Z", "+00:00")).astimezone(UTC)
        prices = [
            each for each in self.cloud.rules.spot
            if each.type in types and each.zone in self.cloud.rules.zones[region] and zone in (None, each.zone)
            and each.at <= self.cloud.hours.now()
        ]  # fmt: skip
        begun: dict[tuple[str, str], datetime] = {}  # the price in force at `since`, by type and zone
        for each in prices:
            if each.at <= since:
                begun[each.type, each.zone] = max(each.at, begun.get((each.type, each.zone), each.at))
        shown = [each for each in prices if each.at >= begun.get((each.type, each.zone), since)]
        items = "".join(
            f"<item><instanceType>{each.type}</instanceType><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{each.usd}</spotPrice><timestamp>{_time(each.at)}</timestamp>"
            f"<availabilityZone>{each.zone}</availabilityZone></item>"
            for each in sorted(shown, key=lambda each: each.at, reverse=True)
        )
        return _xml(action="DescribeSpotPriceHistory", inner=f"<spotPriceHistorySet>{items}</spotPriceHistorySet>")

    def _do_CreatePlacementGroup(self, region: str, params: dict[str, str], environ: dict[str, Any]) -> bytes:
        name = params["GroupName"]
        if (region, name) in self.cloud.placements:
            raise Answer("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
        self.cloud.placements[region, name] = _tags_of(params)
        return _xml(action="CreatePlacementGroup", inner="<return>true</return>")

    def _do_DeletePlacementGroup(self, region: str, params: dict[str, str], environ: dict[str, Any]) -> bytes:
        name = params["GroupName"]
        if (region, name) not in self.cloud.placements:
            raise Answer("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
        if self.cloud.placement_in_use(region, name):
            raise Answer("InvalidPlacementGroup.InUse", f"The placement group {name} is in use.")
        del self.cloud.placements[region, name]
        return _xml(action="DeletePlacementGroup", inner="<return>true</return>")

    def _do_DescribePlacementGroups(self, region: str, params: dict[str, str], environ: dict[str, Any]) -> bytes:
        wanted = {
            params[f"Filter.{n}.Name"].removeprefix("tag:"): params[f"Filter.{n}.Value.1"]
            for n in range(1, 9) if f"Filter.{n}.Name" in params
        }  # fmt: skip
        items = ""
        for (where, name), tags in self.cloud.placements.items():
            if where == region and all(tags.get(key) == value for key, value in wanted.items()):
                inner = "".join(
                    f"<item><key>{escape(k)}</key><value>{escape(v)}</value></item>" for k, v in tags.items()
                )
                items += (
                    f"<item><groupName>{name}</groupName><strategy>cluster</strategy><state>available</state>"
                    f"<tagSet>{inner}</tagSet></item>"
                )
        return _xml(action="DescribePlacementGroups", inner=f"<placementGroupSet>{items}</placementGroupSet>")

    def _do_DescribeCapacityReservations(self, region: str, params: dict[str, str], environ: dict[str, Any]) -> bytes:
        items = "".join(
            f"<item><capacityReservationId>{each.id}</capacityReservationId><instanceType>{each.type}</instanceType>"
            f"<availabilityZone>{each.zone}</availabilityZone><state>active</state>"
            f"<totalInstanceCount>{each.total}</totalInstanceCount>"
            f"<availableInstanceCount>{each.total - self.cloud.reserved_used(each.id)}</availableInstanceCount>"
            f"<instanceMatchCriteria>targeted</instanceMatchCriteria>"
            f"<reservationType>{'capacity-block' if each.block else 'default'}</reservationType></item>"
            for each in self.cloud.rules.reserved
            if each.zone in self.cloud.rules.zones[region]
        )
        return _xml(
            action="DescribeCapacityReservations", inner=f"<capacityReservationSet>{items}</capacityReservationSet>"
        )

    # Other services

    def _tell_GetParameter(self, region: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        if asked["Name"] not in _IMAGES:
            raise Answer("ParameterNotFound", asked["Name"])
        image = next(iter(self.cloud.backend(region).describe_images()))
        return {"Parameter": {"Name": asked["Name"], "Type": "String", "Value": image.id}}

    def _tell_GetProducts(self, region: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = {each["Field"]: each["Value"] for each in asked["Filters"]}
        assert wanted["operatingSystem"] == "Linux"
        found = []
        for (where, kind), usd in self.cloud.rules.on_demand.items():
            if where == wanted["regionCode"] and wanted.get("instanceType") in (None, kind):
                price = {"unit": "Hrs", "pricePerUnit": {"USD": usd}}
                terms = {"OnDemand": {"X.JRTCKXETXF": {"priceDimensions": {"X.JRTCKXETXF.6YS6EN2CT7": price}}}}
                found.append(json.dumps({"product": {"attributes": {"instanceType": kind}}, "terms": terms}))
        return {"FormatVersion": "aws_v1", "PriceList": found}

    def _tell_ListServiceQuotas(self, region: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        quotas = [("Running On-Demand P instances", "P", "on-demand"), ("All P Spot Instance Requests", "P", "spot")]
        return {
            "Quotas": [
                {"ServiceCode": "ec2", "QuotaName": name, "Value": float(self.cloud.rules.quota(kind, market))}
                for name, kind, market in quotas
            ]
            + [{"ServiceCode": "ec2", "QuotaName": "Elastic IPs", "Value": 5.0}]
        }


@contextmanager
def served(front: Front, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve the account at a free port; gives its address. The socket is of the calling thread's network namespace."""

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: object) -> None:
            """Say nothing."""

    server = make_server(host, 0, front, threaded=True, request_handler=Quiet)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def _hang_up(environ: Mapping[str, Any]) -> None:
    line = environ.get("werkzeug.socket")
    if line is not None:
        line.shutdown(socket.SHUT_RDWR)
    raise _HangUp


def _scope(environ: Mapping[str, Any]) -> tuple[str, str]:
    """Service and region of a signed request."""
    scope = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition(",")[0].split("/")
    if len(scope) != 5:
        raise AssertionError("the request is not signed")
    return scope[3], scope[2]


def _list(params: Mapping[str, str], name: str) -> list[str]:
    return [params[f"{name}.{n}"] for n in range(1, 1001) if f"{name}.{n}" in params]


def _makes_tags(params: Mapping[str, str]) -> bool:
    return "TagSpecification.1.ResourceType" in params


def _tags_of(params: Mapping[str, str]) -> dict[str, str]:
    prefix = "TagSpecification.1.Tag."
    return {
        params[f"{prefix}{n}.Key"]: params[f"{prefix}{n}.Value"] for n in range(1, 51) if f"{prefix}{n}.Key" in params
    }


def _xml(*, action: str, inner: str) -> bytes:
    content = f'<{action}Response xmlns="{_NS}"><requestId>r-1</requestId>{inner}</{action}Response>'
    return f'<?xml version="1.0"?>{content}'.encode()


def _time(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def _fail(start: Callable[..., Any], error: Answer, *, json_too: bool) -> Iterable[bytes]:
    if json_too:
        content = json.dumps({"__type": error.code, "message": error.message}).encode()
        kind = "application/x-amz-json-1.1"
    else:
        inner = f"<Error><Code>{error.code}</Code><Message>{escape(error.message)}</Message></Error>"
        content = f"<Response><Errors>{inner}</Errors><RequestID>r-1</RequestID></Response>".encode()
        kind = "text/xml"
    start(f"{error.status} Refused", [("Content-Type", kind), ("Content-Length", str(len(content)))])
    return [content]
