"""A strict stand-in for Azure Resource Manager and for the list of prices, over a cloud in memory.

It refuses requests that Microsoft's own description does not allow (`azure_description`). Beyond
the faults of all stand-ins, it plays capacity that is missing at the end of a creation, evictions,
machines that are off, restricted sizes, and deletions that take a while.
"""

import base64
import re
from typing import Any

from tests.contract.azure_description import check_body, find_operation

from cavvy.providers.contract.rest_stand_in import RestRequest, RestStandIn, name_states
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

SUBSCRIPTION, GROUP = "00000000-0000-0000-0000-000000000001", "cavvy"
REGIONS = ("eastus", "westeurope")
SIZES: dict[str, tuple[float, float | None, dict[str, str]]] = {
    # name: USD an hour on demand and on spot, capabilities as the API reports them
    "Standard_D2s_v5": (0.096, 0.019, {"vCPUs": "2", "MemoryGB": "8"}),
    "Standard_NC4as_T4_v3": (0.526, 0.11, {"vCPUs": "4", "MemoryGB": "28", "GPUs": "1"}),
    "Standard_ND96isr_H100_v5": (98.32, 40.1, {"vCPUs": "96", "MemoryGB": "1900", "GPUs": "8"}),
    "Standard_ND96isr_MI300X_v5": (48.0, None, {"vCPUs": "96", "MemoryGB": "1850", "GPUs": "8"}),
    "Standard_NP10s": (1.65, None, {"vCPUs": "10", "MemoryGB": "168"}),
    "Standard_NV36ads_A10_v5": (3.2, 0.64, {"vCPUs": "36", "MemoryGB": "440", "GPUs": "1"}),
    "Standard_NV6ads_A10_v5": (0.454, 0.09, {"vCPUs": "6", "MemoryGB": "55", "GPUs": "1"}),
    "Standard_NV4as_v4": (0.233, 0.05, {"vCPUs": "4", "MemoryGB": "14", "GPUs": "1"}),
    "Standard_NC40ads_Z9000_v9": (9.0, 4.0, {"vCPUs": "40", "MemoryGB": "320", "GPUs": "1"}),
    "Standard_L8s_v3": (0.624, 0.2, {"vCPUs": "8", "MemoryGB": "64"}),  # not selected
}
FAMILIES = {  # Azure's name of the quota, by the start of the size
    "Standard_D2s_v5": ("standardDSv5Family", "Standard DSv5 Family vCPUs"),
    "Standard_NC4as_T4_v3": ("standardNCASv3_T4Family", "Standard NCASv3_T4 Family vCPUs"),
    "Standard_ND96isr_H100_v5": ("standardNDSH100v5Family", "Standard NDSH100v5 Family vCPUs"),
}
NO_SPOT = {"Standard_ND96isr_MI300X_v5", "Standard_NP10s"}
RESTRICTED = {"Standard_ND96isr_H100_v5": ("westeurope",)}  # in these regions
IMAGES = (
    "Canonical:ubuntu-24_04-lts:server:latest",
    "microsoft-dsvm:ubuntu-hpc:2204:latest",
    "microsoft-dsvm:ubuntu-hpc:2204-rocm:latest",
)
_MACHINES = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.Compute"
_SUBSCRIPTION = f"/subscriptions/{SUBSCRIPTION}"

_FAULTS = {
    "insufficient-capacity": CloudFault(
        409, "SkuNotAvailable", "The requested size is currently not available in eastus."
    ),
    "quota-exceeded": CloudFault(
        409,
        "OperationNotAllowed",
        "Operation could not be completed as it results in exceeding approved Total Regional "
        "Cores quota.",
    ),
    "forbidden": CloudFault(403, "AuthorizationFailed", "The client has no authorization."),
    "not-found": CloudFault(404, "ResourceNotFound", "The resource was not found."),
}


# prices in addition to machines: meter, unit, USD
EXTRAS = (
    ("E10 LRS Disk", "1/Month", 9.6),
    ("E10 LRS Disk Mount", "1/Month", 0.9),
    ("E10 LRS Disk Operations", "10K", 0.002),
    ("E15 LRS Disk", "1/Month", 19.2),
    ("E20 LRS Disk", "1/Month", 38.4),
    ("P15 LRS Disk", "1/Month", 34.56),
    ("Standard IPv4 Static Public IP", "1 Hour", 0.005),
)


class AzureStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                      places  accelerators     CPUs  memory   disk  price  spot
    Standard_D2s_v5             eastus  -                2     8GiB     -     0.096  0.019
    Standard_NC4as_T4_v3        eastus  1xT4/16GiB       4     28GiB    -     0.526  0.11
    Standard_ND96isr_H100_v5    eastus  8xH100/80GiB     96    1900GiB  -     98.32  40.1
    Standard_ND96isr_MI300X_v5  eastus  8xMI300X/192GiB  96    1850GiB  -     48     -
    Standard_NP10s              eastus  1xU250/64GiB     10    168GiB   -     1.65   -
    Standard_NV36ads_A10_v5     eastus  1xA10/24GiB      36    440GiB   -     3.2    0.64
    Standard_NV6ads_A10_v5      eastus  1/6xA10/4GiB     6     55GiB    -     0.454  0.09
    """
    extras = (
        "disk StandardSSD_LRS<=128 9.6",
        "disk StandardSSD_LRS<=256 19.2",
        "disk StandardSSD_LRS<=512 38.4",
        "disk Premium_LRS<=256 34.56",
        "address 0.005",
    )

    key = "eyJ0.test.token"
    denied = CloudFault(401, "InvalidAuthenticationToken", "The access token is invalid.")
    faults = _FAULTS
    states = name_states(
        starting="Creating", running="Succeeded", stopped="Succeeded", ended="Deleting"
    )

    def set_up(self) -> None:
        self.bodies: dict[str, dict[str, Any]] = {}  # of machines, by id in the cloud in memory
        self.networks: dict[tuple[str, str], Any] = {}
        # interfaces and addresses without a machine, by kind
        self.leftovers: dict[str, list[dict[str, Any]]] = {"interfaces": [], "addresses": []}
        self.sets: dict[str, dict[str, Any]] = {}  # availability sets
        self.may_set = True  # the role allows them
        self.late: str | None = None  # the code with which started machines fail after a while
        self.failed: dict[str, str] = {}  # the codes of failed machines, by id
        self.slow_networks = False  # a new network is not ready at once
        self.price_fault: CloudFault | None = None  # of the list of prices
        self.extras_fault = False  # of the list's part about disks and addresses
        self.boots = False  # machines whose creation is not complete are on
        self.power_fault: CloudFault | None = None  # of the subscription's list of machines
        self.quota_fault: CloudFault | None = None  # of the list of quotas
        self.faulty: dict[str, CloudFault] = {}  # regions that do not list sizes and quotas
        self.limits: dict[tuple[str, str], int] = {}  # vCPUs, by region and quota
        self.group = True  # the resource group exists
        self.registered = True
        self.subscriptions = [SUBSCRIPTION]

    def authorize(self, request: RestRequest) -> None:
        if not request.path.startswith("/api/retail/"):  # the list of prices is public
            super().authorize(request)

    def describe(self, fault: CloudFault) -> object:
        return {"error": {"code": fault.code, "message": fault.message}}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        match request.method, request.path:
            case "GET", "/api/retail/prices":
                return 200, self._prices(request)
            case "GET", "/subscriptions":
                ids = self.subscriptions
                return 200, {"value": [{"subscriptionId": i, "state": "Enabled"} for i in ids]}
            case "GET", path if path == f"{_SUBSCRIPTION}/resourceGroups/{GROUP}" and self.group:
                return 200, {"name": GROUP, "location": "eastus"}
        if not self.group and "/resourceGroups/" in request.path:
            message = f"Resource group '{GROUP}' could not be found."
            raise CloudFault(404, "ResourceGroupNotFound", message)
        try:
            operation, name = find_operation(
                request.method,
                request.path,
                request.query,
                subscription=SUBSCRIPTION,
                group=GROUP,
            )
            if request.method == "PUT":
                check_body(request.body, operation)
        except ValueError as error:
            raise CloudFault(400, "InvalidRequestContent", str(error)) from error
        return self._do(operation, name, request)

    def _do(self, operation: str, name: str, request: RestRequest) -> tuple[int, object]:
        match operation:
            case "sizes":
                region = re.fullmatch(r"location eq '(\w+)'", request.query["$filter"])
                assert region is not None
                if region[1] in self.faulty:
                    raise self.faulty[region[1]]
                return 200, {"value": [_size(each, region[1]) for each in SIZES]}
            case "usages":
                if name in self.faulty:
                    raise self.faulty[name]
                return 200, self._page(self._usages(name), request)
            case "list":
                shown = [self._show(each) for each in self.machines()]
                return 200, self._page([*shown, *self.others], request)
            case "power":
                return 200, self._list_power(request)
            case "get":
                machine = self._find(name)
                view = self._power(machine)["properties"] if "$expand" in request.query else {}
                shown_one = self._show(machine)
                shown_one["properties"] |= view
                return 200, shown_one
            case "put":
                return self._put(name, request.body)
            case "delete":
                return self._delete(name), None
        return self._do_network(operation, name, request)

    def _delete(self, name: str) -> int:
        billed = [each for each in self.cloud.billed() if each.name == name]
        if not billed:
            return 204
        self.end(billed[0].id)
        return 202

    def _do_network(self, operation: str, name: str, request: RestRequest) -> tuple[int, object]:
        verb, kind = operation.split()
        if kind == "sets":
            return self._do_set(verb, name, request)
        if verb == "list":
            return 200, self._page(self.leftovers[kind], request)
        if verb == "delete":
            left = [each for each in self.leftovers[kind] if each["name"] != name]
            self.leftovers[kind] = left
            return 202, None
        if request.method == "PUT":
            state = "Updating" if self.slow_networks else "Succeeded"
            made = {**request.body["properties"], "provisioningState": state}
            self.networks[kind, name] = {**request.body, "properties": made}
        elif (kind, name) not in self.networks:
            raise CloudFault(404, "not-found")
        return 200, self.networks[kind, name]

    def _do_set(self, verb: str, name: str, request: RestRequest) -> tuple[int, object]:
        if not self.may_set:
            raise self.faults["forbidden"]
        if verb == "list":
            return 200, self._page([self._show_set(each) for each in self.sets], request)
        if verb == "delete":
            if self._show_set(name)["properties"]["virtualMachines"]:
                raise CloudFault(409, "OperationNotAllowed", "The set has machines.")
            return 200 if self.sets.pop(name, None) else 204, None
        counts = request.body["properties"]
        assert 1 <= counts["platformFaultDomainCount"] <= 3
        assert request.body["sku"] == {"name": "Aligned"}
        if self.sets.setdefault(name, request.body) != request.body:
            raise CloudFault(409, "PropertyChangeNotAllowed", "The set cannot change.")
        return 200, self._show_set(name)

    def _show_set(self, name: str) -> dict[str, Any]:
        path = f"{_MACHINES}/availabilitySets/{name}"
        inside = [
            {"id": f"{_MACHINES}/virtualMachines/{each.name}".upper()}
            for each in self.cloud.billed()
            if self.bodies[each.id]["properties"].get("availabilitySet") == {"id": path}
        ]
        body = self.sets[name]
        return {
            **body,
            "name": name,
            "properties": {**body["properties"], "virtualMachines": inside},
        }

    def _usages(self, region: str) -> list[dict[str, Any]]:
        """The entries of a region: quotas of vCPUs, and a limit of another kind."""
        if self.quota_fault is not None:
            raise self.quota_fault
        used: dict[str, int] = {}
        for each in self.cloud.billed():
            body = self.bodies.get(each.id) or {"location": "eastus", "properties": {}}
            size = body["properties"].get("hardwareProfile", {}).get("vmSize", "Standard_D2s_v5")
            spot = body["properties"].get("priority") == "Spot"
            family = FAMILIES.get(size, ("standardOtherFamily", ""))[0]
            if body["location"] == region:
                for name in ["lowPriorityCores"] if spot else ["cores", family]:
                    used[name] = used.get(name, 0) + int(SIZES[size][2]["vCPUs"])
        names = [
            ("availabilitySets", "Availability Sets"),
            ("cores", "Total Regional vCPUs"),
            ("lowPriorityCores", "Total Regional Low-priority vCPUs"),
            *FAMILIES.values(),
        ]
        return [
            {
                "unit": "Count",
                "currentValue": used.get(value, 0),
                "limit": self.limits.get((region, value), 100_000),
                "name": {"value": value, "localizedValue": text},
            }
            for value, text in names
        ]

    def _list_power(self, request: RestRequest) -> dict[str, Any]:
        if self.power_fault is not None:
            raise self.power_fault
        return self._page([self._power(each) for each in self.machines()], request)

    def _page(self, items: list[dict[str, Any]], request: RestRequest) -> dict[str, Any]:
        number = int(request.query.get("$skipToken", 1))
        shown, more = self.cut(items, number, 50)
        found: dict[str, Any] = {"value": shown}
        if more:
            start = re.sub(r"&\$skipToken=\d+", "", request.target)
            origin = self.url.removesuffix("/" + request.target.split("/")[1])
            found["nextLink"] = f"{origin}{start}&$skipToken={number + 1}"
        return found

    def _find(self, name: str) -> CloudMachine:
        ids = [each.id for each in self.cloud.machines if each.name == name]
        return self.machine(ids[-1] if ids else "none")

    def _put(self, name: str, body: dict[str, Any]) -> tuple[int, object]:
        if not self.registered:
            raise CloudFault(409, "MissingSubscriptionRegistration", "The subscription is not ...")
        properties = body["properties"]
        self._check(name, body, properties)
        same = [each.id for each in self.cloud.billed() if each.name == name]
        if same:  # a name is unique in the resource group
            if self.bodies[same[0]] == body:
                return 200, body
            message = "Changing property 'osProfile.customData' is not allowed."
            raise CloudFault(409, "PropertyChangeNotAllowed", message)
        data = base64.b64decode(properties["osProfile"]["customData"], validate=True).decode()
        before = len(self.cloud.machines)
        try:
            self.start(name, data, body["tags"])
        finally:
            for each in self.cloud.machines[before:]:  # even if the reply is lost
                self.bodies[each.id] = body
                if self.late:
                    self.failed[each.id] = self.late
        return 201, {**body, "name": name, "properties": {"provisioningState": "Creating"}}

    def _check(self, name: str, body: dict[str, Any], properties: dict[str, Any]) -> None:
        """Raise the fault of values that the API's documentation does not allow."""
        image = ":".join(properties["storageProfile"]["imageReference"].values())
        interface = properties["networkProfile"]["networkInterfaceConfigurations"][0]
        address = interface["properties"]["ipConfigurations"][0]["properties"]
        subnet = address["subnet"]["id"]
        made = re.fullmatch(
            rf"{_SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.Network/virtualNetworks/"
            r"([\w-]+)/subnets/nodes",
            subnet,
        )
        spot = properties.get("priority") == "Spot"
        good = {
            "location": body["location"] in REGIONS,
            "size": properties["hardwareProfile"]["vmSize"] in SIZES,
            "image": image in IMAGES or image.startswith("/subscriptions/"),
            "computerName": re.fullmatch(
                r"[a-z0-9][a-z0-9-]{0,62}", properties["osProfile"]["computerName"]
            ),
            "name": re.fullmatch(r"[\w.-]{1,64}", name) and not name.endswith(("-", ".")),
            "customData": len(properties["osProfile"]["customData"]) <= 87380,
            "tags": len(body["tags"]) <= 50 and all(len(v) <= 256 for v in body["tags"].values()),
            "subnet": made is None or ("network", made[1]) in self.networks,
            "key": re.match(
                "ssh-rsa |ssh-ed25519 ",
                properties["osProfile"]["linuxConfiguration"]["ssh"]["publicKeys"][0]["keyData"],
            ),
            "availabilitySet": "availabilitySet" not in properties
            or (not spot and properties["availabilitySet"]["id"].rpartition("/")[2] in self.sets),
            "evictionPolicy": spot or "evictionPolicy" not in properties,
            "disk": properties["storageProfile"]["osDisk"]["diskSizeGB"] >= 64,
        }
        for field, fine in good.items():
            if not fine:
                raise CloudFault(400, "InvalidParameter", f"the value of {field} is invalid")

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        body = self.bodies.get(machine.id) or {"location": "eastus", "properties": {}}
        state = self.states[machine.state]
        failed = machine.id in self.failed and machine.state is MachineState.RUNNING
        shown = {key: body["properties"].get(key) for key in ("hardwareProfile", "priority")}
        return {
            "id": f"{_MACHINES}/virtualMachines/{machine.name}",
            "name": machine.name,
            "location": body["location"],
            "tags": dict(machine.tags),
            "properties": {
                **{key: value for key, value in shown.items() if value is not None},
                "provisioningState": "Failed" if failed else state,
                "timeCreated": machine.created_at.isoformat(),
            },
        }

    def _power(self, machine: CloudMachine) -> dict[str, Any]:
        codes = ["ProvisioningState/succeeded", "PowerState/running"]
        if machine.id in self.failed:
            codes[0] = f"ProvisioningState/failed/{self.failed[machine.id]}"
            codes = codes[: 1 if "Allocation" in codes[0] else 2]
        elif machine.state is MachineState.STOPPED:
            codes[1] = "PowerState/stopped"
        elif machine.state is MachineState.STARTING:
            codes = ["ProvisioningState/creating"]
            codes += ["PowerState/starting"] if self.boots else []
        return {
            "id": f"{_MACHINES}/virtualMachines/{machine.name}".upper(),
            "properties": {"instanceView": {"statuses": [{"code": each} for each in codes]}},
        }

    def _prices(self, request: RestRequest) -> dict[str, Any]:
        if self.price_fault is not None:
            raise self.price_fault
        text = request.query["$filter"]
        region = re.search(r"armRegionName eq '(\w+)'", text)
        assert region is not None
        if "contains(meterName, 'LRS Disk')" in text:
            if self.extras_fault:
                raise CloudFault(503, "ServiceUnavailable", "later")
            return {"Items": [_extra(region[1], *each) for each in EXTRAS], "NextPageLink": None}
        items = []
        for size in re.findall(r"armSkuName eq '(\w+)'", text):
            on_demand, spot, _ = SIZES[size]
            items.append(_price(size, region[1], on_demand, ""))
            if spot is not None:
                items.append(_price(size, region[1], spot, " Spot"))
        return {"Items": items, "NextPageLink": None}


def _size(name: str, region: str) -> dict[str, Any]:
    capabilities = SIZES[name][2] | {
        "CpuArchitectureType": "x64",
        "LowPriorityCapable": str(name not in NO_SPOT),
    }
    limits = [{"type": "Location", "values": [region], "reasonCode": "NotAvailableForSubscription"}]
    return {
        "resourceType": "virtualMachines",
        "name": name,
        "family": FAMILIES.get(name, ("standardOtherFamily", ""))[0],
        "locations": [region],
        "capabilities": [{"name": key, "value": value} for key, value in capabilities.items()],
        "restrictions": limits if region in RESTRICTED.get(name, ()) else [],
    }


def _extra(region: str, meter: str, unit: str, usd: float) -> dict[str, Any]:
    return {
        "currencyCode": "USD",
        "unitOfMeasure": unit,
        "type": "Consumption",
        "meterName": meter,
        "armRegionName": region,
        "retailPrice": usd,
    }


def _price(size: str, region: str, usd: float, kind: str) -> dict[str, Any]:
    return {
        "currencyCode": "USD",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "productName": "Virtual Machines Series",
        "skuName": f"{size}{kind}",
        "armSkuName": size,
        "armRegionName": region,
        "retailPrice": usd,
    }
