"""A strict stand-in for Vultr's API 2 over a cloud in memory: an HTTP server that refuses requests
which the published description (https://www.vultr.com/api, version 2.0, read in November 2026) does
not allow, and returns lists in pages.

The messages of errors about capacity and limits are those that users of the API reported, since the
description does not list them.
"""

import base64
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from cavvy.providers.contract import rest_stand_in as rest
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

PLANS = {  # id: type, USD an hour, vCPUs, MiB of memory, GB of disk, GPU, GB of all GPUs
    "vc2-2c-4gb": ("vc2", 0.03, 2, 4096, 80, None, 0),
    "vcg-a40-24c-120g-48vram": ("vcg", 1.71, 24, 122880, 1400, "NVIDIA_A40", 48),
    "vcg-a100-12c-120g-80vram": ("vcg", 2.397, 12, 122880, 1400, "NVIDIA_A100", 80),
    "vcg-a100-1c-6g-4vram": ("vcg", 0.12, 1, 6144, 70, "NVIDIA_A100", 4),  # a part of one
    "vcg-l40s-128c-1500g-384vram": ("vcg", 13.37, 128, 1536000, 5600, "NVIDIA_L40S", 384),
    "vcg-next": ("vcg", 9.99, 16, 184320, 480, "NVIDIA_Z9000", 999),
    "vdm-next": ("vdm", 9.99, 16, 184320, 480, None, 0),  # has GPUs, but does not say which
}
REGIONS = ("ewr", "ams", "sao")
DEAR = {"vc2-2c-4gb": {"sao": 0.045}}  # USD an hour in regions with a price of their own
SYSTEMS = {1743: "Ubuntu 22.04 LTS x64", 2284: "Ubuntu 24.04 LTS x64", 2136: "Debian 12 x64"}
# opens the console of the instance
KVM = "https://my.vultr.com/subs/vps/novnc/api.php?data=the-secret-of-the-console"
_FIELDS = {
    "region": rest.one_of(REGIONS),
    "plan": rest.one_of(PLANS),
    "os_id": rest.one_of(SYSTEMS),
    "label": rest.text(63),
    "sshkey_id": rest.list_of(rest.text(36)),
    "backups": rest.one_of(("enabled", "disabled")),
    "user_data": rest.text(100_000, r"[A-Za-z0-9+/]*={0,2}"),
    "activation_email": rest.flag,
    "hostname": rest.text(63),
    "tags": rest.list_of(rest.text(255)),
    "enable_ipv6": rest.flag,
    "enable_vpc": rest.flag,
}
_FAULTS = {
    "insufficient-capacity": CloudFault(
        400,
        "",
        "Plan is not available in the selected datacenter.  This could mean you have chosen the "
        "wrong plan, or the location you have selected does not have any more capacity.",
    ),
    "quota-exceeded": CloudFault(
        400,
        "",
        "Server add failed: You have reached the maximum number of active virtual machines for "
        "this account.",
    ),
}


class VultrStandIn(rest.RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                       places       accelerators  CPUs  memory   disk     price  spot
    vc2-2c-4gb                   ams,ewr      -             2     4GiB     80GiB    0.03   -
    vcg-a100-12c-120g-80vram     ams,ewr,sao  1xA100/80GiB  12    120GiB   1400GiB  2.397  -
    vcg-a40-24c-120g-48vram      ams,ewr,sao  1xA40/48GiB   24    120GiB   1400GiB  1.71   -
    vcg-l40s-128c-1500g-384vram  ams,ewr,sao  8xL40S/48GiB  128   1500GiB  5600GiB  13.37  -
    vc2-2c-4gb                   sao          -             2     4GiB     80GiB    0.045  -
    """
    unknown = "NVIDIA_Z9000"
    minimum_charges = MappingProxyType({"": timedelta(hours=1)})

    root, key = "/v2", "VULTR-TEST-KEY"
    key_file = "api-key: {key}\n"
    denied = CloudFault(401, "", "Invalid API token.")
    faults = _FAULTS
    states = rest.name_states(starting="pending", running="active", stopped="active")

    def set_up(self) -> None:
        self.systems: list[int] = []  # that were requested

    def describe(self, fault: CloudFault) -> object:
        return {"error": fault.message or fault.code, "status": fault.status}

    def answer(self, request: rest.RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["plans"] if request.query.get("type") == "all":
                return 200, self._page("plans", [_plan(each) for each in PLANS], request)
            case "GET", ["os"]:
                systems = [
                    {"id": number, "name": name, "arch": "x64", "family": name.split()[0].lower()}
                    for number, name in SYSTEMS.items()
                ]
                return 200, self._page("os", systems, request)
            case "GET", ["instances"]:
                shown = [self._show(each) for each in self.machines()]
                return 200, self._page("instances", shown + self.others, request)
            case "POST", ["instances"]:
                return 202, {"instance": self._create(request.body)}
            case "GET", ["instances", machine]:
                return 200, {"instance": self._show(self.machine(machine))}
            case "DELETE", ["instances", machine]:
                self.end(machine)
                return 204, None
        raise CloudFault(404, "", "Not found.")

    def _page(
        self, field: str, items: list[dict[str, Any]], request: rest.RestRequest
    ) -> dict[str, Any]:
        """A page; the cursor of the next page is its number in base 64."""
        cursor = request.query.get("cursor", base64.b64encode(b"1").decode())
        number, size = int(base64.b64decode(cursor)), int(request.query.get("per_page", 100))
        if size > 500:
            raise CloudFault(400, "", "Invalid per_page.")
        shown, more = self.cut(items, number, size)
        following = base64.b64encode(str(number + 1).encode()).decode() if more else ""
        return {
            field: shown,
            "meta": {"total": len(items), "links": {"next": following, "prev": ""}},
        }

    def _create(self, body: Any) -> dict[str, Any]:
        """Start an instance. Raises the fault of a request that the description does not allow."""
        if wrong := rest.wrong_field(body, _FIELDS, ("region", "plan", "os_id")):
            raise CloudFault(400, "", f"Invalid {wrong}.")
        script = base64.b64decode(body.get("user_data", ""), validate=True).decode()
        new = self.start(body.get("label", ""), script)
        self.systems.append(body["os_id"])
        return {
            "id": new,
            "label": body.get("label", ""),
            "status": "pending",
            "main_ip": "0.0.0.0",
            "default_password": "v5{Fkvb#2ycPGwHs",
            "kvm": KVM,
        }

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        off = machine.state is MachineState.STOPPED
        starting = machine.state is MachineState.STARTING
        return {
            "id": machine.id,
            "os": "Ubuntu 24.04 x64",
            "main_ip": machine.address or "0.0.0.0",
            "vcpu_count": 2,
            "region": REGIONS[0],
            "plan": "vc2-2c-4gb",
            "date_created": machine.created_at.isoformat(timespec="seconds"),
            "status": self.states[machine.state],
            "power_status": "stopped" if off or starting else "running",
            "server_status": "installingbooting" if starting else "ok",
            "internal_ip": "",
            "kvm": KVM,
            "label": machine.name,
            "tags": [],
        }


def _plan(plan: str) -> dict[str, Any]:
    kind, usd, vcpus, memory, disk, gpu, vram = PLANS[plan]
    told: dict[str, Any] = {
        "id": plan,
        "vcpu_count": vcpus,
        "ram": memory,
        "disk": disk,
        "disk_count": 1,
        "bandwidth": 3072,
        "monthly_cost": round(usd * 672, 2),
        "hourly_cost": usd,
        "type": kind,
        "locations": [*REGIONS, ""],  # Vultr sometimes lists an empty name
    }
    if plan in DEAR:
        told["location_cost"] = {
            region: {"hourly_cost": usd, "monthly_cost": round(usd * 672, 2)}
            for region, usd in DEAR[plan].items()
        }
    if gpu:
        told |= {"gpu_type": gpu, "gpu_vram_gb": vram}
    return told
