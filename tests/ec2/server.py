"""The stand-in's HTTP server: rules first, then moto, then what moto does not know."""

import base64
import io
import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.sax.saxutils import escape

from moto.server import DomainDispatcherApplication, create_backend_app
from tests.ec2.cloud import Cloud, Life
from tests.ec2.grants import TAG, Target, permits, permits_role, permits_tags
from tests.ec2.launches import list_tagged
from tests.ec2.pages import cut_json, cut_xml
from tests.ec2.rules import TYPES, Answer, list_extras
from werkzeug.serving import WSGIRequestHandler, make_server

_NS = "http://ec2.amazonaws.com/doc/2016-11-15/"
# Public parameters; moto has no deep-learning images, so that Amazon Linux stands for them.
_IMAGES = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
    "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64",
    "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id",
)
_OWN = re.compile(
    r"TagSpecification|(NetworkInterface\.\d+\.)?SecurityGroupId|Placement\.GroupName|UserData|IamInstanceProfile"
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
            if service == "ec2":
                cloud.requests.append((action, dict(params)))
            fault = cloud.rules.fault(service, action) if cloud.rules.fault else None
            try:
                if fault == "hang up":
                    _hang_up(environ)
                if fault == "throttle":
                    raise Answer("RequestLimitExceeded", "Request limit exceeded.", 503)
                if fault == "unavailable":
                    raise Answer("Unavailable", "The service is unavailable.", 503)
                if fault and ": " in fault:
                    raise Answer(*fault.split(": ", 1))
                if region in cloud.rules.disabled:
                    text = "AWS was not able to validate the provided access credentials"
                    raise Answer(
                        cloud.rules.disabled_code
                        if service == "ec2"
                        else "UnrecognizedClientException",
                        text,
                    )
                self._authorize(service, action, region, params)
                if params.pop("DryRun", "") == "true":
                    text = "Request would have succeeded, but DryRun flag is set."
                    raise Answer("DryRunOperation", text, 412)
                content, kind = self._answer(service, action, region, params, body, environ)
            except Answer as error:
                return _fail(start, error, json_too=bool(target))
        if fault == "lose":
            _hang_up(environ)
        start("200 OK", [("Content-Type", kind), ("Content-Length", str(len(content)))])
        return [content]

    def _authorize(self, service: str, action: str, region: str, params: Mapping[str, str]) -> None:
        name, grants = f"{_NAMES.get(service, service)}:{action}", self.cloud.rules.grants
        if grants is None:
            return
        if not permits(grants, name, list(self._targets(action, region, params))):
            raise Answer("UnauthorizedOperation", f"You are not authorized to perform {name}.", 403)
        self.cloud.used.add(name)
        if profile := next((params[n] for n in params if n.startswith("IamInstanceProfile.")), ""):
            if not permits_role(grants, profile):
                raise Answer(
                    "UnauthorizedOperation", "You are not authorized to perform iam:PassRole.", 403
                )
            self.cloud.used.add("iam:PassRole")
        if _makes_tags(params):
            if not permits_tags(grants, action):
                raise Answer(
                    "UnauthorizedOperation",
                    f"You are not authorized to give tags with {name}.",
                    403,
                )
            self.cloud.used.add("ec2:CreateTags")

    def _targets(self, action: str, region: str, params: Mapping[str, str]) -> Iterator[Target]:
        """What is there already and would be changed. Of what does not exist the action itself
        tells that.
        """
        cloud, nobody = self.cloud, {TAG: ""}
        if action in ("TerminateInstances", "AttachVolume", "ModifyInstanceAttribute"):
            for each in _list(params, "InstanceId") or [params["InstanceId"]]:
                yield Target(
                    kind="instance", tags=cloud.lives[each].tags if each in cloud.lives else nobody
                )
        if action in ("AttachVolume", "DeleteVolume"):
            disk = cloud.disks.known.get(params["VolumeId"])
            yield Target(kind="volume", tags=disk.tags if disk else nobody)
        if action == "DeletePlacementGroup":
            yield Target(
                kind="placement-group",
                tags=cloud.placements.get((region, params["GroupName"]), nobody),
            )
        if action in (
            "DeleteSecurityGroup",
            "AuthorizeSecurityGroupIngress",
            "AuthorizeSecurityGroupEgress",
        ):
            group = cloud.groups.known.get(params["GroupId"])
            yield Target(kind="security-group", tags=group.tags if group else nobody)

    def _answer(
        self,
        service: str,
        action: str,
        region: str,
        params: dict[str, str],
        body: bytes,
        environ: dict[str, Any],
    ) -> tuple[bytes, str]:
        most = self.cloud.rules.page
        if service in ("pricing", "servicequotas", "ssm"):
            asked = json.loads(body)
            told = getattr(self, f"_tell_{action}")(region, asked)
            return cut_json(told, most, asked.get("NextToken", "")), "application/x-amz-json-1.1"
        token = params.pop("NextToken", "")
        own = getattr(self, f"_do_{action}", None) if service == "ec2" else None
        content = (
            own(region, params, environ)
            if own
            else self._ask_moto(environ, urlencode(params).encode())
        )
        return cut_xml(content, most, token), "text/xml"

    def _ask_moto(self, environ: dict[str, Any], body: bytes) -> bytes:
        """moto's answer to a request; its errors become ours."""
        seen: list[str] = []

        def start(
            status: str, headers: list[tuple[str, str]], *_: object
        ) -> Callable[[bytes], object]:
            seen.append(status)
            return lambda _: None

        inner = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        content = b"".join(self._moto(inner, start))
        if not seen[0].startswith("2"):
            text = content.decode(errors="replace")
            code = text.partition("<Code>")[2].partition("</Code>")[0] or "InternalError"
            raise Answer(
                code, text.partition("<Message>")[2].partition("</Message>")[0], int(seen[0][:3])
            )
        return content

    # EC2

    def _do_RunInstances(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        cloud = self.cloud
        known = cloud.check_token(region, params)
        if known is not None:
            return known
        asked = dict(params)
        cloud.check_launch(region, params)
        user_data = base64.b64decode(params.get("UserData", ""))
        plain = {
            name: each for name, each in params.items() if not _OWN.match(name)
        }  # what is kept here
        content = self._ask_moto(environ, urlencode(plain).encode())
        cloud.launched(region, params, asked, user_data)
        content = content.replace(b"<code>16</code>", b"<code>0</code>").replace(
            b"<name>running</name>", b"<name>pending</name>"
        )
        cloud.remember(region, asked, content)
        return content

    def _do_TerminateInstances(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        cloud, ids = self.cloud, _list(params, "InstanceId")
        now = cloud.hours.now()
        lives = [cloud.lives.get(each) for each in ids]
        missing = [
            each
            for each, life in zip(ids, lives, strict=True)
            if life is None or life.visible_at > now
        ]
        if missing:
            raise Answer(
                "InvalidInstanceID.NotFound", f"The instance ID '{missing[0]}' does not exist"
            )
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

    def _do_DescribeInstances(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        reservations: dict[str, str] = {}
        for life in self.cloud.shown(region, _filters(params)):
            reservations[life.reservation] = reservations.get(
                life.reservation, ""
            ) + _show_instance(life, self.cloud.vcpus(life.type))
        items = "".join(
            f"<item><reservationId>{each}</reservationId><groupSet/><instancesSet>{inner}</instancesSet></item>"
            for each, inner in reservations.items()
        )
        return _xml(action="DescribeInstances", inner=f"<reservationSet>{items}</reservationSet>")

    def _do_CreateSecurityGroup(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        group = self.cloud.groups.make(region, params, _tags_of(params))
        return _xml(
            action="CreateSecurityGroup",
            inner=f"<return>true</return><groupId>{group.id}</groupId>",
        )

    def _do_DescribeSecurityGroups(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        items = self.cloud.groups.show(region, _filters(params))
        return _xml(
            action="DescribeSecurityGroups", inner=f"<securityGroupInfo>{items}</securityGroupInfo>"
        )

    def _do_AuthorizeSecurityGroupIngress(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        self.cloud.groups.allow("in", params)
        return _xml(action="AuthorizeSecurityGroupIngress", inner="<return>true</return>")

    def _do_AuthorizeSecurityGroupEgress(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        self.cloud.groups.allow("out", params)
        return _xml(action="AuthorizeSecurityGroupEgress", inner="<return>true</return>")

    def _do_DeleteSecurityGroup(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        self.cloud.groups.delete(params["GroupId"])
        return _xml(action="DeleteSecurityGroup", inner="<return>true</return>")

    def _do_DescribeSpotPriceHistory(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        types, zone = _list(params, "InstanceType"), params.get("AvailabilityZone")
        since = datetime.fromisoformat(params["StartTime"].replace("Z", "+00:00")).astimezone(UTC)
        prices = [
            each
            for each in self.cloud.rules.spot
            if each.type in types
            and each.zone in self.cloud.rules.zones[region]
            and zone in (None, each.zone)
            and each.at <= self.cloud.hours.now()
        ]
        begun: dict[
            tuple[str, str], datetime
        ] = {}  # the price in force at `since`, by type and zone
        for each in prices:
            if each.at <= since:
                begun[each.type, each.zone] = max(
                    each.at, begun.get((each.type, each.zone), each.at)
                )
        shown = [each for each in prices if each.at >= begun.get((each.type, each.zone), since)]
        items = "".join(
            f"<item><instanceType>{each.type}</instanceType><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{each.usd}</spotPrice><timestamp>{_time(each.at)}</timestamp>"
            f"<availabilityZone>{each.zone}</availabilityZone></item>"
            for each in sorted(shown, key=lambda each: each.at, reverse=True)
        )
        return _xml(
            action="DescribeSpotPriceHistory",
            inner=f"<spotPriceHistorySet>{items}</spotPriceHistorySet>",
        )

    def _do_DescribeInstanceTypeOfferings(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        assert params["LocationType"] == "availability-zone"
        patterns, rules = _filters(params).get("instance-type", ["*"]), self.cloud.rules
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><locationType>availability-zone</locationType>"
            f"<location>{zone}</location></item>"
            for kind in TYPES
            for zone in rules.zones[region]
            if (kind, zone) not in rules.missing
            and any(fnmatchcase(kind, each) for each in patterns)
        )
        return _xml(
            action="DescribeInstanceTypeOfferings",
            inner=f"<instanceTypeOfferingSet>{items}</instanceTypeOfferingSet>",
        )

    def _do_DescribeRegions(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        disabled = self.cloud.rules.disabled
        named = _list(params, "RegionName")
        items = "".join(
            f"<item><regionName>{each}</regionName><optInStatus>"
            f"{'not-opted-in' if each in disabled else 'opted-in'}</optInStatus></item>"
            for each in self.cloud.regions
            if (params.get("AllRegions") == "true" or each not in disabled)
            and (not named or each in named)
        )
        return _xml(action="DescribeRegions", inner=f"<regionInfo>{items}</regionInfo>")

    def _do_CreatePlacementGroup(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        name = params["GroupName"]
        if (region, name) in self.cloud.placements:
            raise Answer(
                "InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists."
            )
        self.cloud.placements[region, name] = _tags_of(params)
        return _xml(action="CreatePlacementGroup", inner="<return>true</return>")

    def _do_DeletePlacementGroup(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        name = params["GroupName"]
        if (region, name) not in self.cloud.placements:
            raise Answer(
                "InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown."
            )
        if self.cloud.placement_in_use(region, name):
            raise Answer("InvalidPlacementGroup.InUse", f"The placement group {name} is in use.")
        del self.cloud.placements[region, name]
        return _xml(action="DeletePlacementGroup", inner="<return>true</return>")

    def _do_DescribePlacementGroups(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        wanted = {name.removeprefix("tag:"): values for name, values in _filters(params).items()}
        items = ""
        for (where, name), tags in self.cloud.placements.items():
            if where == region and all(tags.get(key) in values for key, values in wanted.items()):
                inner = "".join(
                    f"<item><key>{escape(k)}</key><value>{escape(v)}</value></item>"
                    for k, v in tags.items()
                )
                items += (
                    f"<item><groupName>{name}</groupName><strategy>cluster</strategy><state>available</state>"
                    f"<tagSet>{inner}</tagSet></item>"
                )
        return _xml(
            action="DescribePlacementGroups",
            inner=f"<placementGroupSet>{items}</placementGroupSet>",
        )

    def _do_DescribeCapacityReservations(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        items = "".join(
            f"<item><capacityReservationId>{each.id}</capacityReservationId><instanceType>{each.type}</instanceType>"
            f"<availabilityZone>{each.zone_name or each.zone}</availabilityZone><state>{each.state}</state>"
            f"<availabilityZoneId>{self.cloud.zone_ids[each.zone]}</availabilityZoneId>"
            f"<instancePlatform>{each.platform}</instancePlatform><tenancy>default</tenancy>"
            f"<endDateType>{'limited' if each.until else 'unlimited'}</endDateType>"
            f"{f'<endDate>{_time(each.until)}</endDate>' if each.until else ''}"
            f"<totalInstanceCount>{each.total}</totalInstanceCount>"
            f"<availableInstanceCount>{each.total - self.cloud.reserved_used(each.id)}</availableInstanceCount>"
            f"<instanceMatchCriteria>targeted</instanceMatchCriteria>"
            f"<reservationType>{'capacity-block' if each.block else 'default'}</reservationType></item>"
            for each in self.cloud.rules.reserved
            if each.zone in self.cloud.rules.zones[region]
        )
        return _xml(
            action="DescribeCapacityReservations",
            inner=f"<capacityReservationSet>{items}</capacityReservationSet>",
        )

    # Volumes

    def _do_CreateVolume(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        disk = self.cloud.disks.make(region, params, _tags_of(params))
        inner = (
            f"<volumeId>{disk.id}</volumeId><size>{disk.size_gib}</size><status>creating</status>"
        )
        return _xml(
            action="CreateVolume", inner=f"{inner}<availabilityZone>{disk.zone}</availabilityZone>"
        )

    def _do_DescribeVolumes(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        items = self.cloud.disks.show(region, _filters(params))
        return _xml(action="DescribeVolumes", inner=f"<volumeSet>{items}</volumeSet>")

    def _do_AttachVolume(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        life = self.cloud.lives.get(params["InstanceId"])
        disk = self.cloud.disks.attach(params["VolumeId"], life, params["Device"])
        inner = f"<volumeId>{disk.id}</volumeId><instanceId>{params['InstanceId']}</instanceId>"
        return _xml(action="AttachVolume", inner=f"{inner}<status>attaching</status>")

    def _do_DeleteVolume(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        self.cloud.disks.delete(params["VolumeId"])
        return _xml(action="DeleteVolume", inner="<return>true</return>")

    def _do_ModifyInstanceAttribute(
        self, region: str, params: dict[str, str], environ: dict[str, Any]
    ) -> bytes:
        life = self.cloud.lives.get(params["InstanceId"])
        if life is None:
            raise Answer(
                "InvalidInstanceID.NotFound",
                f"The instance ID '{params['InstanceId']}' does not exist",
            )
        if not life.lives:
            raise Answer("IncorrectInstanceState", f"Instance '{life.id}' is '{life.state}'.")
        device = params["BlockDeviceMapping.1.DeviceName"]
        disk = next((each for each in self.cloud.disks.of(life) if each.device == device), None)
        if disk is None:
            raise Answer(
                "InvalidInstanceAttributeValue", f"No device is currently mapped at {device}"
            )
        disk.goes = params["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
        return _xml(action="ModifyInstanceAttribute", inner="<return>true</return>")

    # Other services

    def _tell_GetParameter(self, region: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        name = asked["Name"]
        own = self.cloud.rules.parameters.get(name)
        if own is None and name not in _IMAGES:
            raise Answer("ParameterNotFound", name)
        value = own or next(iter(self.cloud.backend(region).describe_images())).id
        return {"Parameter": {"Name": name, "Type": "String", "Value": value}}

    def _tell_GetProducts(self, region: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = {each["Field"]: each["Value"] for each in asked["Filters"]}
        if asked["ServiceCode"] == "AmazonVPC" or wanted.get("productFamily") == "Storage":
            listed = list_extras(self.cloud.rules, asked["ServiceCode"])
            return {"FormatVersion": "aws_v1", "PriceList": listed}
        assert wanted["operatingSystem"] == "Linux"
        found = []
        for (where, kind), usd in self.cloud.rules.on_demand.items():
            if where == wanted["regionCode"] and wanted.get("instanceType") in (None, kind):
                price = {"unit": "Hrs", "pricePerUnit": {"USD": usd}}
                terms: dict[str, Any] = {
                    "OnDemand": {
                        "X.JRTCKXETXF": {"priceDimensions": {"X.JRTCKXETXF.6YS6EN2CT7": price}}
                    }
                }
                terms["Reserved"] = self._reservations(where, kind)
                found.append(
                    json.dumps({"product": {"attributes": {"instanceType": kind}}, "terms": terms})
                )
        return {"FormatVersion": "aws_v1", "PriceList": found}

    def _reservations(self, region: str, kind: str) -> dict[str, Any]:
        """The reserved terms of a product: those of the rules, and an upfront payment for each."""
        return {
            f"{length}.{option}": {
                "termAttributes": {
                    "LeaseContractLength": length,
                    "OfferingClass": "standard",
                    "PurchaseOption": option,
                },
                "priceDimensions": {option: {"unit": unit, "pricePerUnit": {"USD": usd}}},
            }
            for length, price in self.cloud.rules.commitments.get((region, kind), {}).items()
            for option, unit, usd in (
                ("All Upfront", "Quantity", "9999"),
                ("Partial Upfront", "Hrs", "0.001"),
                ("No Upfront", "Hrs", price),
            )
        }

    def _tell_ListServiceQuotas(self, region: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        quotas = [
            ("Running On-Demand P instances", "L-417A185B", "P", "on-demand"),
            ("All P5 Spot Instance Requests", "L-C4BD4855", "P", "spot"),
            ("Running On-Demand G and VT instances", "L-DB2E81BA", "G", "on-demand"),
            ("All G and VT Spot Instance Requests", "L-3819A6DF", "G", "spot"),
        ]
        return {
            "Quotas": [
                {
                    "ServiceCode": "ec2",
                    "QuotaName": name,
                    "QuotaCode": code,
                    "Value": float(self.cloud.rules.quota(kind, market)),
                }
                for name, code, kind, market in quotas
            ]
            + [{"ServiceCode": "ec2", "QuotaName": "Elastic IPs", "Value": 5.0}]
        }


@contextmanager
def served(front: Front, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve the account at a free port; gives its address. The socket is of the calling thread's
    network namespace.
    """

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: object) -> None:
            """Say nothing."""

    server = make_server(host, 0, front, threaded=True, request_handler=Quiet)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
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
    scope = (
        environ.get("HTTP_AUTHORIZATION", "")
        .partition("Credential=")[2]
        .partition(",")[0]
        .split("/")
    )
    if len(scope) != 5:
        raise AssertionError("the request is not signed")
    return scope[3], scope[2]


def _list(params: Mapping[str, str], name: str) -> list[str]:
    return [params[f"{name}.{n}"] for n in range(1, 1001) if f"{name}.{n}" in params]


def _filters(params: Mapping[str, str]) -> dict[str, list[str]]:
    return {
        params[f"Filter.{n}.Name"]: _list(params, f"Filter.{n}.Value")
        for n in range(1, 9)
        if f"Filter.{n}.Name" in params
    }


def _show_instance(life: Life, vcpus: int = 0) -> str:
    """One item of DescribeInstances; `vcpus` are those of the instance's type."""
    told, reason = life.instance, life.instance.state_reason
    fields = {
        "instanceId": life.id,
        "imageId": told.image_id,
        "instanceType": life.type,
        "amiLaunchIndex": life.index,
        "launchTime": _time(life.launched_at),
        "privateIpAddress": told.private_ip,
        "ipAddress": told.public_ip if life.public and life.lives else "",
        "rootDeviceName": "/dev/xvda",
        "reason": getattr(told, "_reason", ""),
        "instanceLifecycle": "spot" if life.market == "spot" else "",
    }
    inner = "".join(
        f"<{name}>{escape(str(value))}</{name}>"
        for name, value in fields.items()
        if value not in ("", None)
    )
    inner += (
        f"<instanceState><code>{told._state.code}</code><name>{life.state}</name></instanceState>"
    )
    inner += f"<placement><availabilityZone>{life.zone}</availabilityZone></placement>"
    if vcpus:
        cores = f"<coreCount>{vcpus // 2}</coreCount><threadsPerCore>2</threadsPerCore>"
        inner += f"<cpuOptions>{cores}</cpuOptions>"
    if reason is not None and reason.code:
        inner += f"<stateReason><code>{reason.code}</code><message>{escape(reason.message)}</message></stateReason>"
    tags = "".join(
        f"<item><key>{escape(k)}</key><value>{escape(v)}</value></item>"
        for k, v in life.tags.items()
    )
    return f"<item>{inner}<tagSet>{tags}</tagSet></item>"


def _makes_tags(params: Mapping[str, str]) -> bool:
    return "TagSpecification.1.ResourceType" in params


def _tags_of(params: Mapping[str, str]) -> dict[str, str]:
    return next((tags for _, tags in list_tagged(params)), {})


def _xml(*, action: str, inner: str) -> bytes:
    content = (
        f'<{action}Response xmlns="{_NS}"><requestId>r-1</requestId>{inner}</{action}Response>'
    )
    return f'<?xml version="1.0"?>{content}'.encode()


def _time(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def _fail(start: Callable[..., Any], error: Answer, *, json_too: bool) -> Iterable[bytes]:
    if json_too:
        content = json.dumps({"__type": error.code, "message": error.message}).encode()
        kind = "application/x-amz-json-1.1"
    else:
        inner = (
            f"<Error><Code>{error.code}</Code><Message>{escape(error.message)}</Message></Error>"
        )
        content = (
            f"<Response><Errors>{inner}</Errors><RequestID>r-1</RequestID></Response>".encode()
        )
        kind = "text/xml"
    start(
        f"{error.status} Refused", [("Content-Type", kind), ("Content-Length", str(len(content)))]
    )
    return [content]
