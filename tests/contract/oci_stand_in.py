"""A strict stand-in for the APIs of Oracle Cloud Infrastructure over a cloud in memory: an HTTP
server that verifies the signature of each request, refuses requests which the published
descriptions do not allow, and returns lists in pages.

The descriptions, read in November 2026: Core Services API and Identity API 20160918
(https://docs.oracle.com/en-us/iaas/api/#/en/iaas/20160918/, with the models of Oracle's Python
package oci 2.189), Limits API 20190729 (https://docs.oracle.com/en-us/iaas/api/#/en/limits/20181025/,
with the client of the same package), request signatures
(https://docs.oracle.com/en-us/iaas/Content/API/Concepts/signingrequests.htm) and errors
(https://docs.oracle.com/en-us/iaas/Content/API/References/apierrors.htm). The message of missing
capacity is the one that users of the API reported.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    WithHeaders,
    flag,
    name_states,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

HOME = "us-phoenix-1"
DOMAINS = {
    HOME: ("Uocm:PHX-AD-1", "Uocm:PHX-AD-2"),
    "eu-frankfurt-1": ("Uocm:EU-FRANKFURT-1-AD-1",),
}
SHAPES = {  # name: OCPUs, GB of memory, GPUs
    "VM.Standard.E5.Flex": (1.0, 12.0, 0),
    "VM.GPU.A10.1": (15.0, 240.0, 1),
    "VM.GPU3.1": (6.0, 90.0, 1),
    "BM.GPU.H100.8": (112.0, 2048.0, 8),
    "BM.GPU.MI300X.8": (112.0, 2048.0, 8),
    "BM.GPU4.8": (64.0, 2048.0, 4),  # the catalog knows 8
    "VM.GPU.Z9.1": (15.0, 240.0, 1),  # the catalog has no price
    "VM.Standard.A9.Flex": (1.0, 6.0, 0),  # the same, without GPUs
}
QUOTAS = {  # of shapes
    "VM.Standard.E5.Flex": ("standard-e5-core-ad-count", "standard-e5-memory-count"),
    "VM.GPU.A10.1": ("gpu-a10-count",),
    "VM.GPU3.1": ("gpu3-count", "vm-gpu3-1-count"),
    "BM.GPU.H100.8": ("gpu-h100-count", "gpu-h100-regional-count"),
    "BM.GPU.MI300X.8": ("gpu-mi300x-count",),
    "BM.GPU4.8": ("gpu4-count",),
}
LIMITS = {  # by name; a limit whose name contains "regional" is one for the whole region
    "custom-image-count": 100,
    "gpu-a10-count": 300,
    "gpu-h100-count": 160,
    "gpu-h100-regional-count": 160,
    "gpu-mi300x-count": 8,
    "gpu3-count": 0,
    "standard-a1-core-count": 4,
    "standard-e5-core-ad-count": 90_000,
    "standard-e5-memory-count": 900_000,
    "vm-gpu3-1-count": 2,
}
UNTOLD = ("vm-gpu3-1-count",)  # limits whose use OCI does not report
IMAGES = {  # name: operating system, version, whether it is for GPUs
    "Canonical-Ubuntu-24.04-Minimal-2026.10.31-0": ("Canonical Ubuntu", "24.04 Minimal", False),
    "Canonical-Ubuntu-24.04-2026.10.31-0": ("Canonical Ubuntu", "24.04", False),
    "Canonical-Ubuntu-24.04-2026.09.30-0": ("Canonical Ubuntu", "24.04", False),
    "Oracle-Linux-8.10-2026.10.31-0": ("Oracle Linux", "8", False),
    "Oracle-Linux-8.10-Gen2-GPU-2026.10.31-0": ("Oracle Linux", "8", True),
    "our-image": ("Oracle Linux", "8", False),
}
USER, TENANCY = "ocid1.user.oc1..crew", "ocid1.tenancy.oc1..home"
FINGERPRINT = "20:3b:97:13:55:1c:5b:0d:d3:37:d8:50:4e:c5:3a:34"
_BODY = ("content-length", "content-type", "x-content-sha256")
_SIGNED = ("date", "(request-target)", "host")
_SKEW = timedelta(minutes=5)
_DIGEST = "digest of the content"  # no header has a name with spaces


def _shape(fields: Mapping[str, Any], required: tuple[str, ...]) -> Any:
    return lambda value: wrong_field(value, fields, required) is None


def _number(least: float, most: float) -> Any:
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    )


def _tags(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) and len(name) <= 100 and len(text) <= 256
        for name, text in value.items()
    )


def _metadata(value: object) -> bool:
    """Strings by name, 32,000 bytes in all; the user data is in base 64."""
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        return False
    base64.b64decode(value.get("user_data", ""), validate=True)
    return sum(len(name) + len(each) for name, each in value.items()) <= 32_000


_SOURCE = {
    "sourceType": one_of(("image",)),
    "imageId": text(255, r"ocid1\.image\.oc1\..+"),
    "bootVolumeSizeInGBs": _number(50, 32_768),
    "bootVolumeVpusPerGB": one_of((10, *range(20, 130, 10))),
    "kmsKeyId": text(255),
}
_VNIC = {
    "subnetId": text(255, r"ocid1\.subnet\.oc1\..+"),
    "assignPublicIp": flag,
    "nsgIds": lambda value: isinstance(value, list),
    "hostnameLabel": text(63),
}
_SIZE = {"ocpus": _number(1, 126), "vcpus": _number(2, 252), "memoryInGBs": _number(1, 1776)}
_ACTION = {"type": one_of(("TERMINATE",)), "preserveBootVolume": flag}
_PLUGIN = {"name": text(255, r".+"), "desiredState": one_of(("ENABLED", "DISABLED"))}
_AGENT = {
    "isMonitoringDisabled": flag,
    "isManagementDisabled": flag,
    "areAllPluginsDisabled": flag,
    "pluginsConfig": lambda value: (
        isinstance(value, list)
        and all(wrong_field(each, _PLUGIN, ("name", "desiredState")) is None for each in value)
    ),
}
_CLUSTER = {
    "availabilityDomain": text(255),
    "compartmentId": one_of((TENANCY, "ocid1.compartment.oc1..crew")),
    "displayName": text(255, r".+"),
    "freeformTags": _tags,
}
_FIELDS = {
    "computeClusterId": text(255, r"ocid1\.computecluster\.oc1\..+"),
    "agentConfig": _shape(_AGENT, ()),
    "availabilityDomain": text(255),
    "compartmentId": one_of((TENANCY, "ocid1.compartment.oc1..crew")),
    "displayName": text(255, r".+"),
    "freeformTags": _tags,
    "shape": one_of(SHAPES),
    "shapeConfig": _shape(_SIZE, ()),
    "sourceDetails": _shape(_SOURCE, ("sourceType", "imageId")),
    "createVnicDetails": _shape(_VNIC, ()),
    "metadata": _metadata,
    "availabilityConfig": _shape(
        {"recoveryAction": one_of(("RESTORE_INSTANCE", "STOP_INSTANCE"))}, ()
    ),
    "preemptibleInstanceConfig": _shape(
        {"preemptionAction": _shape(_ACTION, ("type",))}, ("preemptionAction",)
    ),
}
_QUERIES = {  # the parameters of a list, required ones first
    "availabilityDomains": ("compartmentId",),
    "shapes": ("compartmentId", "availabilityDomain", "limit", "page", "imageId", "shape"),
    "subnets": ("compartmentId", "lifecycleState", "displayName", "limit", "page", "vcnId"),
    "limitValues": (
        *("compartmentId", "serviceName", "limit", "page", "name", "scopeType"),
        "availabilityDomain",
    ),
    "instances": ("compartmentId", "limit", "page", "availabilityDomain", "lifecycleState"),
    "computeClusters": ("compartmentId", "limit", "page", "availabilityDomain", "displayName"),
    "vnicAttachments": ("compartmentId", "limit", "page", "instanceId", "availabilityDomain"),
    "images": (
        *("compartmentId", "limit", "page", "displayName", "operatingSystem", "shape"),
        *("operatingSystemVersion", "sortBy", "sortOrder", "lifecycleState"),
    ),
}


class OciStandIn(RestStandIn):
    """The Core Services, Identity and Limits APIs of all regions in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                       places                                                 accelerators     CPUs  memory   disk  price  spot
    BM.GPU.H100.8                us-phoenix-1/Uocm:PHX-AD-1,us-phoenix-1/Uocm:PHX-AD-2  8xH100/80GiB     224   2048GiB  -     80     -
    BM.GPU.MI300X.8              us-phoenix-1/Uocm:PHX-AD-1,us-phoenix-1/Uocm:PHX-AD-2  8xMI300X/192GiB  224   2048GiB  -     48     -
    VM.GPU.A10.1                 us-phoenix-1/Uocm:PHX-AD-1,us-phoenix-1/Uocm:PHX-AD-2  1xA10/24GiB      30    240GiB   -     2      -
    VM.GPU3.1                    us-phoenix-1/Uocm:PHX-AD-1,us-phoenix-1/Uocm:PHX-AD-2  1xV100/16GiB     12    90GiB    -     2.95   1.475
    VM.Standard.E5.Flex$_16_64   us-phoenix-1/Uocm:PHX-AD-1,us-phoenix-1/Uocm:PHX-AD-2  -                16    64GiB    -     0.368  0.184
    VM.Standard.E5.Flex$_2_8     us-phoenix-1/Uocm:PHX-AD-1,us-phoenix-1/Uocm:PHX-AD-2  -                2     8GiB     -     0.046  0.023
    VM.Standard.E5.Flex$_32_128  us-phoenix-1/Uocm:PHX-AD-1,us-phoenix-1/Uocm:PHX-AD-2  -                32    128GiB   -     0.736  0.368
    VM.Standard.E5.Flex$_4_16    us-phoenix-1/Uocm:PHX-AD-1,us-phoenix-1/Uocm:PHX-AD-2  -                4     16GiB    -     0.092  0.046
    VM.Standard.E5.Flex$_64_256  us-phoenix-1/Uocm:PHX-AD-1,us-phoenix-1/Uocm:PHX-AD-2  -                64    256GiB   -     1.472  0.736
    VM.Standard.E5.Flex$_8_32    us-phoenix-1/Uocm:PHX-AD-1,us-phoenix-1/Uocm:PHX-AD-2  -                8     32GiB    -     0.184  0.092
    """
    minimum_charges = MappingProxyType({"BM.": timedelta(hours=1), "": timedelta(minutes=1)})

    root, key = "/{service}/{region}/20160918", "the-pass-phrase-of-the-key"
    denied = CloudFault(401, "NotAuthenticated", "The required information is incorrect")
    faults: Mapping[str, CloudFault] = {
        "not-found": CloudFault(
            404, "NotAuthorizedOrNotFound", "Authorization failed or requested resource not found."
        ),
        "forbidden": CloudFault(403, "NotAuthorized", "Not authorized"),
        "too-many-requests": CloudFault(429, "TooManyRequests", "Too many requests for the user"),
        "internal-error": CloudFault(500, "InternalError", "Internal error"),
        "unavailable": CloudFault(503, "ServiceUnavailable", "The service is unavailable"),
        "insufficient-capacity": CloudFault(500, "InternalError", "Out of host capacity."),
        "quota-exceeded": CloudFault(
            400, "LimitExceeded", "The following service limits were exceeded: gpu-a10-count."
        ),
    }
    states = name_states(
        starting="PROVISIONING", running="RUNNING", stopped="STOPPED", ended="TERMINATED"
    )

    def set_up(self) -> None:
        self.bodies: dict[str, dict[str, Any]] = {}  # of launches, by machine
        self.regions: dict[str, str] = {}  # by machine
        self.tokens: dict[str, str] = {}  # machines by their retry tokens
        self.subnets = [make_subnet("net")]
        self.faulty: dict[str, CloudFault] = {}  # regions that list no shapes
        self.settings = {"limits_endpoint": f"{self.origin}/limits/{{region}}/20190729"}
        self.limits = dict(LIMITS)
        self.limit_faults: dict[str, CloudFault] = {}  # regions that tell no limits
        self.policies: dict[str, float] = {}  # limits of the compartment's quota policy
        self.elsewhere: dict[str, int] = {}  # what other compartments use of each limit
        self.authorized = True  # whether a policy allows to list the compartment
        self.clusters: dict[str, dict[str, Any]] = {}  # compute clusters, by OCID
        self.may_cluster = True  # whether a policy allows to manage compute clusters
        self.terminates = True  # whether a policy allows to terminate instances

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code, "message": fault.message}

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, object] | None:
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        return super().reply(method, target, {**headers, _DIGEST: digest}, content)

    def authorize(self, request: RestRequest) -> None:
        """Verify the signature."""
        scheme, _, told = request.headers.get("authorization", "").partition(" ")
        fields = dict(re.findall(r'(\w+)="([^"]*)"', told))
        names = tuple(fields.get("headers", "").split())
        known = {
            **request.headers,
            "(request-target)": f"{request.method.lower()} {request.target}",
        }
        signed = "\n".join(f"{name}: {known.get(name)}" for name in names)
        needed = _SIGNED if request.body is None else (*_SIGNED, *_BODY)
        sent = parsedate_to_datetime(request.headers["date"])
        good = (
            scheme == "Signature"
            and fields["keyId"] == f"{TENANCY}/{USER}/{FINGERPRINT}"
            and (fields["version"], fields["algorithm"]) == ("1", "rsa-sha256")
            and set(needed) <= set(names)
            and known["host"] == urlsplit(self.origin).netloc
            and abs(datetime.now(UTC) - sent) < _SKEW
            and (request.body is None or known["x-content-sha256"] == known[_DIGEST])
        )
        try:
            signature = base64.b64decode(fields["signature"], validate=True)
            public = make_key().public_key()
            public.verify(signature, signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            good = False
        if not good:
            raise self.denied

    def answer(self, request: RestRequest) -> tuple[int, object]:
        _, _, service, region, version, *path = request.path.split("/")
        assert version == ("20190729" if service == "limits" else "20160918")
        if region not in DOMAINS:
            raise CloudFault(404, "NotFound", f"{region} is no region of the tenancy")
        if len(path) == 1 and request.method == "GET":
            return 200, self._list(service, region, path[0], request.query)
        if service == "limits" and region in self.limit_faults:
            raise self.limit_faults[region]
        match request.method, path:
            case "GET", ["services", "compute", "limits", name, "resourceAvailability"]:
                assert service == "limits"
                return 200, self._tell_use(region, name, request.query)
        assert service == "iaas"
        match request.method, path:
            case "POST", ["instances"]:
                return 200, self._launch(region, request)
            case "GET", ["instances", machine]:
                return 200, self._show(self._find(region, machine))
            case "POST", ["computeClusters"]:
                return 200, self._make_cluster(region, request)
            case "DELETE", ["computeClusters", cluster]:
                self._delete_cluster(region, cluster)
                return 204, None
            case "GET", ["vnics", vnic]:
                return 200, self._show_vnic(self._find(region, vnic))
            case "DELETE", ["instances", machine]:
                assert set(request.query) <= {"preserveBootVolume"}
                if not self.terminates:
                    raise self.faults["not-found"]
                self.end(self._id(region, machine))
                return 204, None
        raise CloudFault(404, "NotFound", "There is no operation at this path")

    def _list(
        self, service: str, region: str, kind: str, query: Mapping[str, str]
    ) -> WithHeaders | list[Any]:
        known = _QUERIES[kind]
        if not set(query) <= set(known) or known[0] not in query:
            raise CloudFault(400, "InvalidParameter", f"{kind}: {sorted(query)}")
        if not self.authorized:
            raise self.faults["not-found"]
        if kind == "availabilityDomains":
            assert service == "identity"
            return [{"name": each, "id": "ocid1.ad.1"} for each in DOMAINS[region]]
        assert service == ("limits" if kind == "limitValues" else "iaas")
        items = self._items(region, kind, query)
        if kind == "computeClusters":
            return WithHeaders({"items": items}, {})
        number = int(query.get("page", "page-1").removeprefix("page-"))
        size = int(query.get("limit", 100))
        paged = kind in ("instances", "limitValues")
        shown, more = self.cut(items, number, size) if paged else (items, False)
        return WithHeaders(shown, {"opc-next-page": f"page-{number + 1}"} if more else {})

    def _items(self, region: str, kind: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        match kind:
            case "shapes":
                if region in self.faulty:
                    raise self.faulty[region]
                assert query["availabilityDomain"] in DOMAINS[region]
                return [_show_shape(each) for each in SHAPES]
            case "subnets":
                return self.subnets
            case "limitValues":
                if region in self.limit_faults:
                    raise self.limit_faults[region]
                assert (query["compartmentId"], query["serviceName"]) == (TENANCY, "compute")
                return [
                    each for name in self.limits for each in _show_limit(region, name, self.limits)
                ]
            case "computeClusters":
                if not self.may_cluster:
                    raise self.faults["not-found"]
                domains = DOMAINS[region]
                return [e for e in self.clusters.values() if e["availabilityDomain"] in domains]
            case "vnicAttachments":
                up = [each for each in self.machines() if each.state is MachineState.RUNNING]
                return [self._attach(each) for each in up if self._region(each.id) == region]
            case "instances":
                ours = [each for each in self.machines() if self._region(each.id) == region]
                return [*map(self._show, ours), *(self.others if region == HOME else [])]
            case _:
                images = [_show_image(region, each) for each in IMAGES]
                gpu = SHAPES.get(query.get("shape", ""), (0, 0, None))[2]
                return [
                    each
                    for each in images
                    if all(each.get(name, value) == value for name, value in query.items())
                    and (gpu != 0 or "GPU" not in each["displayName"])
                ]

    def _tell_use(self, region: str, name: str, query: Mapping[str, str]) -> dict[str, Any]:
        """What of a limit is in use in an availability domain or, for some limits, in the region."""
        assert set(query) <= {"compartmentId", "availabilityDomain"}
        domain = query.get("availabilityDomain")
        if (domain is None) != ("regional" in name) or domain not in (None, *DOMAINS[region]):
            raise CloudFault(400, "InvalidParameter", "Invalid parameter 'availabilityDomain'")
        if name not in self.limits or name in UNTOLD:
            raise self.faults["not-found"]
        bodies = [self.bodies[each.id] for each in self.cloud.billed() if each.id in self.bodies]
        used = sum(
            _use(name, body)
            for body in bodies
            if self._domain_region(body) == region
            and domain in (None, body["availabilityDomain"])
            and name in QUOTAS.get(body["shape"], ())
        )
        limit = self.policies.get(name, self.limits[name])
        return {
            "used": used,
            "available": limit - used - self.elsewhere.get(name, 0),
            "fractionalUsage": float(used),
            "fractionalAvailability": float(limit - used - self.elsewhere.get(name, 0)),
            "effectiveQuotaValue": self.policies.get(name),
        }

    def _domain_region(self, body: Mapping[str, Any]) -> str:
        return next(each for each in DOMAINS if body["availabilityDomain"] in DOMAINS[each])

    def _attach(self, machine: CloudMachine) -> dict[str, Any]:
        """The attachment of an instance's interface."""
        return {
            "id": f"ocid1.vnicattachment.oc1.phx.{machine.id}",
            "instanceId": f"ocid1.instance.oc1.phx.{machine.id}",
            "vnicId": f"ocid1.vnic.oc1.phx.{machine.id}",
            "lifecycleState": "ATTACHED",
        }

    def _show_vnic(self, machine: CloudMachine) -> dict[str, Any]:
        shown = self.bodies[machine.id]["createVnicDetails"]["assignPublicIp"]
        return {
            "id": f"ocid1.vnic.oc1.phx.{machine.id}",
            "isPrimary": True,
            "privateIp": machine.address,
            "publicIp": "192.0.2.7" if shown else None,
            "lifecycleState": "AVAILABLE",
        }

    def _region(self, machine: str) -> str:
        return self.regions.get(machine, HOME)

    def _find(self, region: str, ocid: str) -> CloudMachine:
        return self.machine(self._id(region, ocid))

    def _id(self, region: str, ocid: str) -> str:
        """The id in the cloud in memory of an instance in the region."""
        machine = ocid.rpartition(".")[2]
        if self._region(machine) != region:
            raise self.faults["not-found"]
        return machine

    def _make_cluster(self, region: str, request: RestRequest) -> dict[str, Any]:
        body, token = request.body, request.headers["opc-retry-token"]
        if not self.may_cluster:
            raise self.faults["not-found"]
        if wrong := wrong_field(body, _CLUSTER, ("availabilityDomain", "compartmentId")):
            raise CloudFault(400, "InvalidParameter", f"{wrong}: {body.get(wrong)}")
        assert body["availabilityDomain"] in DOMAINS[region]
        ocid = f"ocid1.computecluster.oc1.{region}.{token}"
        if self.clusters.get(ocid, {}).get("lifecycleState") == "DELETED":
            raise CloudFault(409, "InvalidatedRetryToken", "The cluster was deleted")
        state = {"lifecycleState": "ACTIVE", "timeCreated": self.cloud.time.isoformat()}
        return self.clusters.setdefault(ocid, {**body, "id": ocid, **state})

    def _delete_cluster(self, region: str, ocid: str) -> None:
        """A cluster with instances cannot be deleted; a deleted one is listed for some time."""
        found = self.clusters.get(ocid)
        if found is None or found["availabilityDomain"] not in DOMAINS[region]:
            raise self.faults["not-found"]
        for each in self.cloud.machines:
            if each.ended is None and self.bodies[each.id].get("computeClusterId") == ocid:
                raise CloudFault(409, "IncorrectState", "The cluster has instances")
        found["lifecycleState"] = "DELETED"

    def _launch(self, region: str, request: RestRequest) -> dict[str, Any]:
        body, token = request.body, request.headers["opc-retry-token"]
        assert 1 <= len(token) <= 64
        self._check(region, body)
        known = self.tokens.get(token)
        if known and any(each.id == known and each.ended for each in self.cloud.machines):
            raise CloudFault(409, "InvalidatedRetryToken", "The instance was terminated")
        script = base64.b64decode(body["metadata"]["user_data"]).decode()
        new = self.start(body["displayName"], script, body["freeformTags"])
        self.tokens[token], self.bodies[new], self.regions[new] = new, body, region
        return self._show(self.cloud_machine(new))

    def cloud_machine(self, machine: str) -> CloudMachine:
        """A machine, even before the listing lag is over."""
        rented = next(each for each in self.cloud.machines if each.id == machine)
        return CloudMachine(
            id=rented.id,
            name=rented.name,
            state=MachineState.STARTING,
            tags=rented.tags,
            created_at=rented.at,
        )

    def _check(self, region: str, body: Any) -> None:
        """Raise the fault of a launch that the description does not allow."""
        if wrong := wrong_field(body, _FIELDS, ("availabilityDomain", "compartmentId", "shape")):
            raise CloudFault(400, "InvalidParameter", f"{wrong}: {body.get(wrong)}")
        subnets = [each["id"] for each in self.subnets]
        images = [_show_image(region, each)["id"] for each in IMAGES]
        preempts = "preemptibleInstanceConfig" in body
        cluster = self.clusters.get(body.get("computeClusterId", ""), {})
        if "computeClusterId" in body and (
            cluster.get("lifecycleState") != "ACTIVE"
            or cluster["availabilityDomain"] != body["availabilityDomain"]
            or not body["shape"].startswith("BM.")
        ):
            raise CloudFault(400, "InvalidParameter", "computeClusterId")
        good = (
            body["availabilityDomain"] in DOMAINS[region]
            and body["createVnicDetails"]["subnetId"] in subnets
            and body["sourceDetails"]["imageId"] in images
            and ("shapeConfig" in body) == body["shape"].endswith(".Flex")
            and not (preempts and body["shape"].startswith("BM."))
        )
        if not good:
            raise CloudFault(400, "InvalidParameter", "a value does not fit the others")

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        body, region = self.bodies.get(machine.id, {}), self._region(machine.id)
        optional = {"preemptibleInstanceConfig": body.get("preemptibleInstanceConfig")}
        return {
            "id": f"ocid1.instance.oc1.phx.{machine.id}",
            "availabilityDomain": body.get("availabilityDomain", DOMAINS[region][0]),
            "compartmentId": TENANCY,
            "displayName": machine.name,
            "freeformTags": dict(machine.tags),
            "definedTags": {},
            "lifecycleState": self.states[machine.state],
            "metadata": body.get("metadata", {}),
            "region": region,
            "shape": body.get("shape", "VM.Standard.E5.Flex"),
            "timeCreated": machine.created_at.isoformat(timespec="milliseconds"),
            **{name: value for name, value in optional.items() if value},
        }


def make_subnet(name: str, domain: str | None = None, *, private: bool = False) -> dict[str, Any]:
    return {
        "id": f"ocid1.subnet.oc1.phx.{name}",
        "displayName": name,
        "availabilityDomain": domain,
        "cidrBlock": "10.0.0.0/24",
        "lifecycleState": "AVAILABLE",
        "prohibitPublicIpOnVnic": private,
    }


def _show_limit(region: str, name: str, limits: Mapping[str, int]) -> list[dict[str, Any]]:
    """The values of a limit: one for each availability domain, or one for the region."""
    if "regional" in name:
        return [{"name": name, "scopeType": "REGION", "value": limits[name]}]
    return [
        {"name": name, "scopeType": "AD", "availabilityDomain": domain, "value": limits[name]}
        for domain in DOMAINS[region]
    ]


def _use(name: str, body: Mapping[str, Any]) -> int:
    """How much of a limit an instance uses, by the body of its launch."""
    ocpus, memory, gpus = SHAPES[body["shape"]]
    size = body.get("shapeConfig", {"vcpus": 2 * ocpus, "memoryInGBs": memory})
    if name.startswith("gpu"):
        return gpus
    return int(size["memoryInGBs"] if "memory" in name else size["vcpus"] / 2)


def _show_shape(name: str) -> dict[str, Any]:
    ocpus, memory, gpus = SHAPES[name]
    return {
        "shape": name,
        "ocpus": ocpus,
        "memoryInGBs": memory,
        "gpus": gpus,
        "gpuDescription": "a GPU" if gpus else None,
        "isFlexible": name.endswith(".Flex"),
        "quotaNames": list(QUOTAS.get(name, ())),
    }


def _show_image(region: str, name: str) -> dict[str, Any]:
    system, version, _ = IMAGES[name]
    return {
        "id": f"ocid1.image.oc1.{region}.{name.lower()}",
        "displayName": name,
        "operatingSystem": system,
        "operatingSystemVersion": version,
        "lifecycleState": "AVAILABLE",
    }


@cache
def make_key() -> rsa.RSAPrivateKey:
    """The API key of the user; short, since a test run signs thousands of requests."""
    return rsa.generate_private_key(public_exponent=65537, key_size=1024)


def encode_key(key: rsa.RSAPrivateKey, phrase: str) -> bytes:
    """The key as PEM, encrypted if there is a pass phrase."""
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if phrase:
        encryption = serialization.BestAvailableEncryption(phrase.encode())
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def write_profile(file: Path, key: rsa.RSAPrivateKey, phrase: str = "") -> None:
    """Write a configuration file with two profiles, and the key beside it."""
    pem = file.with_name("api_key.pem")
    pem.write_bytes(encode_key(key, phrase))
    told = {
        "user": USER,
        "fingerprint": FINGERPRINT,
        "tenancy": TENANCY,
        "region": HOME,
        "key_file": str(pem),
        **({"pass_phrase": phrase} if phrase else {}),
    }
    lines = [f"{name}={value}" for name, value in told.items()]
    file.write_text("\n".join(["[DEFAULT]", *lines, "[LAB]", "region=eu-frankfurt-1", ""]))
