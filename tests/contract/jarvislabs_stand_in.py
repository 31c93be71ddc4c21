"""A strict stand-in for JarvisLabs's API over a cloud in memory: an HTTP server that refuses
requests which JarvisLabs's own Python package does not send (https://docs.jarvislabs.ai/sdk,
version 0.2.19, read in November 2026: `instances.py`, `server_meta.py`, `ssh_keys.py`). JarvisLabs
publishes no description of its REST API.

Each region has an address of its own; here, the first part of the path is the region's letters. The
package's messages stand in for those of the API, which are unknown.
"""

from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.contract.rest_stand_in import (
    Check,
    RestRequest,
    RestStandIn,
    finish,
    flag,
    id_of,
    make_start_script,
    name_states,
    number_of,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import (
    CloudFault,
    CloudMachine,
    MachineRequest,
    MachineState,
    SshTarget,
)

REGIONS = {"n": "india-noida-01", "c": "india-chennai-01", "eu": "europe-01"}
GPUS = (  # the fields of `ServerMetaGPU` in the package's models.py
    {"gpu_type": "L4", "region": "india-noida-01", "vram": "24", "price_per_hour": 0.44}
    | {"spot_price": 0.29, "num_free_devices": 4, "effective_num_free_devices": 8}
    | {"spot_num_free_devices": 2, "cpus_per_gpu": 6, "ram_per_gpu": 32},
    {"gpu_type": "A100-80GB", "region": "india-chennai-01", "vram": "80", "price_per_hour": 1.49}
    | {"num_free_devices": 2, "cpus_per_gpu": 14, "ram_per_gpu": 112},
    {"gpu_type": "H100", "region": "europe-01", "vram": "80GB", "price_per_hour": 2.99}
    | {"num_free_devices": 8, "cpus_per_gpu": 16, "ram_per_gpu": 200},
    {"gpu_type": "H200", "region": "europe-01", "vram": "141", "price_per_hour": 3.8}
    | {"num_free_devices": 0, "cpus_per_gpu": 16, "ram_per_gpu": 200},
    {"gpu_type": "Z9000", "region": "india-noida-01", "vram": "999", "price_per_hour": 9.9}
    | {"num_free_devices": 8, "cpus_per_gpu": 16, "ram_per_gpu": 200},
    {"gpu_type": "A100", "region": "india-noida-01", "vram": "40", "price_per_hour": 1.0}
    | {"num_free_devices": 8, "workload_type": "vm"},
    {"gpu_type": "A6000", "region": "india-01", "vram": "48", "price_per_hour": 0.8}
    | {"num_free_devices": 8},
)
_OFFER = Offer(provider="any", region="here", instance_type="small", rate=HourlyRate(0))
_SSH = SshTarget(address="198.51.100.9", port=11014)  # of instances without a server of their own


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_FIELDS: dict[str, Check] = {
    "gpu_type": text(50, r".+"),
    "num_gpus": _count,
    "hdd": _count,
    "region": one_of(REGIONS.values()),
    "name": text(40, r"[a-zA-Z0-9 _-]*[a-zA-Z0-9_-][a-zA-Z0-9 _-]*"),
    "is_spot": flag,
    "duration": one_of(("hour",)),
    "disk_type": text(20, r".+"),
    "http_ports": text(200),
    "script_id": one_of((None,)),
    "script_args": text(200),
    "fs_id": one_of((None,)),
    "arguments": text(200),
}
_FAULTS = {
    "insufficient-capacity": CloudFault(
        400, "", "No free L4 GPUs in IN2 right now. Try again later."
    ),
    "not-found": CloudFault(404, "", "Instance not found"),
}


class JarvislabsStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type        places            accelerators  CPUs  memory  disk    price  spot
    1x_H100       europe-01         1xH100/80GiB  16    200GiB  100GiB  2.99   -
    1x_A100-80GB  india-chennai-01  1xA100/80GiB  14    112GiB  100GiB  1.49   -
    2x_A100-80GB  india-chennai-01  2xA100/80GiB  28    224GiB  100GiB  2.98   -
    1x_L4         india-noida-01    1xL4/24GiB    6     32GiB   100GiB  0.44   0.29
    2x_L4         india-noida-01    2xL4/24GiB    12    64GiB   100GiB  0.88   0.58
    4x_L4         india-noida-01    4xL4/24GiB    24    128GiB  100GiB  1.76   -
    8x_L4         india-noida-01    8xL4/24GiB    48    256GiB  100GiB  3.52   -
    """

    key = "jl-test-token"
    key_file = '[auth]\ntoken = "{key}"\n'
    denied = CloudFault(401, "", "Invalid token")
    faults = _FAULTS
    states = name_states(
        starting="Creating", running="Running", stopped="Paused", ended="Destroying"
    )

    def set_up(self) -> None:
        self.settings = {"endpoint": f"{self.url}/{{region}}"}
        self.bodies: dict[str, dict[str, Any]] = {}  # of requests, by machine
        self.keys: list[dict[str, str]] = []
        self.rupees = False
        self.template = "pytorch"  # of the instances
        self.destroys = True  # whether instances can be destroyed now

    def describe(self, fault: CloudFault) -> object:
        return {"message": fault.message or fault.code}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        _, letters, *path = request.path.split("/")
        region = REGIONS.get(letters)
        match request.method, path:
            case "GET", ["misc", ""] if letters == "n":
                return 200, {"success": self.rupees}
            case "GET", ["misc", "server_meta"] if letters == "n":
                return 200, {"server_meta": [self._row(each) for each in GPUS], "cpu_meta": {}}
            case "GET", ["ssh", ""] if letters == "n":
                return 200, self.keys
            case "POST", ["ssh", ""] if letters == "n":
                return 200, self._add_key(request.body)
            case "GET", ["users", "fetch"] if letters == "n":
                shown = [self._show(each) for each in self.machines()]
                return 200, {"success": True, "instances": shown + self.others}
            case "GET", ["users", "fetch", machine] if letters == "n":
                return 200, self._find(machine)
            case "POST", ["templates", "pytorch", "create"] if region:
                return 200, {"machine_id": self._create(region, request.body)}
            case "POST", ["misc", "destroy"] if region and self.template != "vm":
                return 200, self._destroy(region, request.query["machine_id"])
            case "POST", ["templates", "vm", "destroy"] if region and self.template == "vm":
                return 200, self._destroy(region, request.query["machine_id"])
        raise CloudFault(404, "", "Not Found")

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        """The GPUs of one kind that are free now."""
        used: dict[bool, int] = {True: 0, False: 0}
        for machine in self.cloud.billed():
            body = self.bodies.get(machine.id, {})
            if (body.get("gpu_type"), body.get("region")) == (row["gpu_type"], row["region"]):
                used[body["is_spot"]] += body["num_gpus"]
        taken = used[True] + used[False]
        left = {
            name: max(0, int(row[name]) - taken)
            for name in row
            if name.endswith("num_free_devices")
        }
        return row | left

    def _add_key(self, body: Any) -> dict[str, Any]:
        fields = {"ssh_key": text(1000, r"ssh-ed25519 \S+ \S+"), "key_name": text(50, r".+")}
        if wrong := wrong_field(body, fields, tuple(fields)):
            return {"success": False, "message": f"wrong {wrong}"}
        self.keys.append({**body, "key_id": str(len(self.keys) + 1), "user_id": "u-1"})
        return {"success": True}

    def _create(self, region: str, body: Any) -> int:
        """Start an instance. Raises the fault of a request that the package does not send."""
        if wrong := wrong_field(body, _FIELDS, tuple(_FIELDS)):
            raise CloudFault(422, "", f"{wrong} failed validation")
        if body["region"] != region or (region == "europe-01" and body["num_gpus"] != 1):
            raise CloudFault(400, "", "wrong region or number of GPUs")
        if not self.keys:
            raise CloudFault(400, "", "SSH does not work without a key")
        key = self.keys[-1]["ssh_key"]
        request = MachineRequest(
            gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
            offer=_OFFER,
            names=[body["name"]],
            user_data=[make_start_script(key)],
            public_key=key,
        )
        before = len(self.cloud.machines)
        try:
            (new,) = finish(self.cloud.create(request))
        finally:
            if len(self.cloud.machines) > before:
                self.bodies[self.cloud.machines[-1].id] = body
        return number_of(new)

    def _find(self, machine: str) -> dict[str, Any]:
        try:
            return {"success": True, "instance": self._show(self.machine(id_of(machine)))}
        except CloudFault:
            return {"success": False, "message": "Instance not found"}

    def _destroy(self, region: str, machine: str) -> dict[str, Any]:
        """As in the package, a refusal may have the status 200."""
        if not self.destroys or self._region(id_of(machine)) != region:
            return {"success": "False", "message": "the instance cannot be destroyed"}
        self.end(id_of(machine))
        return {"success": "True"}

    def _region(self, machine: str) -> str:
        return str(self.bodies.get(machine, {}).get("region", "india-noida-01"))

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        running = machine.state is MachineState.RUNNING
        ssh = machine.ssh or _SSH
        command = f"ssh -o StrictHostKeyChecking=no -p {ssh.port} {ssh.user}@{ssh.address}"
        return {
            "machine_id": number_of(machine.id),
            "instance_name": machine.name,
            "status": self.states[machine.state],
            "framework": self.template,
            "gpu_type": "L4",
            "num_gpus": 1,
            "hdd": 100,
            "region": self._region(machine.id),
            "is_spot": self.bodies.get(machine.id, {}).get("is_spot", False),
            "ssh_str": command if running else None,
        }
