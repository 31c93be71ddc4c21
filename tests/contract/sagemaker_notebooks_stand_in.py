"""A stand-in for SageMaker's notebook instances, their lifecycle configurations and their prices.

As in SageMaker, a notebook instance can only be stopped in service and deleted once it is stopped:
https://github.com/getmoto/moto/blob/master/moto/sagemaker/models.py has the texts of the errors.
"""

import base64
import shlex
from collections.abc import Mapping
from typing import Any

from tests.contract.aws_service import Answer, AwsStandIn
from tests.contract.sagemaker_stand_in import make_product

from cavvy.providers.contract.memory_cloud import MemoryCloud, Rented
from cavvy.providers.contract.rest_stand_in import finish
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

PRICES = {"ml.m5.xlarge": "0.2300000000", "ml.g4dn.xlarge": "0.7364000000", "ml.z9.large": "9.9"}
FULL = "Insufficient notebook instance capacity. Retry later or with a different instance type."
_STATES = {
    MachineState.STARTING: "Pending",
    MachineState.RUNNING: "InService",
    MachineState.STOPPED: "Stopped",
}
_PAGE = 2


class NotebooksStandIn(AwsStandIn):
    """Notebook instances: a machine that is off is a stopped one, billed only for its disk."""

    services: Mapping[str, str] = {"SageMaker": "sagemaker", "AWSPriceListService": "pricing"}

    def __init__(self, cloud: MemoryCloud) -> None:
        super().__init__(cloud)
        self.scripts: dict[tuple[str, str], dict[str, Any]] = {}  # by region and name
        self.failures: dict[str, str] = {}  # reasons of failed notebook instances, by name
        self.modified: dict[str, float] = {}  # by machine: when it was stopped

    def CreateNotebookInstanceLifecycleConfig(
        self, region: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        name = body["NotebookInstanceLifecycleConfigName"]
        if (region, name) in self.scripts:
            text = f"Unable to create Notebook Instance Lifecycle Config {name}. (Details: Notebook"
            raise Answer("ValidationException", f"{text} Instance Lifecycle Config already exists)")
        self.scripts[region, name] = {**body, "CreationTime": self.cloud.time.timestamp()}
        return {"NotebookInstanceLifecycleConfigArn": f"arn:aws:sagemaker:{region}:1:config/{name}"}

    def ListNotebookInstanceLifecycleConfigs(
        self, region: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        found = [
            {
                "NotebookInstanceLifecycleConfigName": name,
                "NotebookInstanceLifecycleConfigArn": f"arn:aws:sagemaker:{region}:1:config/{name}",
                "CreationTime": made["CreationTime"],
            }
            for (at, name), made in self.scripts.items()
            if at == region
            and body["NameContains"] in name
            and made["CreationTime"] < body["CreationTimeBefore"]
        ]
        return _cut(body, found, "NotebookInstanceLifecycleConfigs")

    def DeleteNotebookInstanceLifecycleConfig(
        self, region: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        if self.scripts.pop((region, body["NotebookInstanceLifecycleConfigName"]), None) is None:
            raise Answer("ValidationException", "No such Notebook Instance Lifecycle Config")
        return {}

    def CreateNotebookInstance(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["NotebookInstanceName"]
        if any(each.ended is None for each in self.machines(region, name)):
            text = f"Cannot create a duplicate Notebook Instance ({_arn(region, name)})"
            raise Answer("ValidationException", text)
        if (region, body["LifecycleConfigName"]) not in self.scripts:
            raise Answer("ValidationException", "No such Notebook Instance Lifecycle Config")
        if "SecurityGroupIds" in body and "SubnetId" not in body:
            raise Answer("ValidationException", "Security groups need a subnet")
        self.bodies[region, name] = body
        try:
            self.start_notebook(region, name)
        except CloudFault as fault:
            if fault.code == "quota-exceeded":
                text = "The account-level service limit 'ml.m5.xlarge for notebook instance usage'"
                raise Answer("ResourceLimitExceeded", f"{text} is 0 Instances") from fault
            if fault.code == "insufficient-capacity":
                raise Answer("ValidationException", FULL) from fault
            raise
        return {"NotebookInstanceArn": _arn(region, name)}

    def start_notebook(self, region: str, name: str) -> list[Rented]:
        """Start the machine of a notebook instance. Raises CloudFault."""
        return self.start_named(region, name, [name])

    def script_of(self, region: str, name: str) -> str:
        """The script that a notebook instance runs when it starts."""
        config = self.scripts[region, self.bodies[region, name]["LifecycleConfigName"]]
        return base64.b64decode(config["OnStart"][0]["Content"], validate=True).decode()

    def DescribeNotebookInstance(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["NotebookInstanceName"]
        machine = self._find(region, name)
        asked = self.bodies[region, name]
        reason = self.failures.get(name)
        return {
            **self._show(region, name, machine),
            "RoleArn": asked["RoleArn"],
            "VolumeSizeInGB": asked["VolumeSizeInGB"],
            **({"FailureReason": reason} if reason else {}),
        }

    def ListNotebookInstances(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        found = [
            self._show(region, each.tags["job"], each)
            for each in finish(self.cloud.list())
            if each.tags["region"] == region
            and each.state in _STATES
            and body["NameContains"] in each.tags["job"]
        ]
        return _cut(body, found, "NotebookInstances")

    def StopNotebookInstance(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        machine = self._check_state(region, body, ["InService"], "Stopping")
        self.modified[machine] = self.cloud.time.timestamp()
        self.end_scripts(machine)
        self.cloud.change(machine, off=True)
        return {}

    def DeleteNotebookInstance(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        finish(
            self.cloud.delete(self._check_state(region, body, ["Stopped", "Failed"], "Deleting"))
        )
        return {}

    def end_scripts(self, machine: str) -> None:
        """End the processes of a machine that stops."""

    def _check_state(
        self, region: str, body: dict[str, Any], needed: list[str], wanted: str
    ) -> str:
        """The machine of a notebook instance, which must be in one of the needed states."""
        name = body["NotebookInstanceName"]
        machine = self._find(region, name)
        if self.cloud.fails_deletions:
            raise CloudFault(500, "internal-error")
        status = self._show(region, name, machine)["NotebookInstanceStatus"]
        if status not in needed:
            text = f"Status ({status}) not in ([{', '.join(needed)}]). Unable to transition to"
            raise Answer("ValidationException", f"{text} ({wanted}) for Notebook Instance ({name})")
        return machine.id

    def _find(self, region: str, name: str) -> CloudMachine:
        for each in self.machines(region, name):
            if each.ended is None and (shown := finish(self.cloud.get(each.id))) is not None:
                found: CloudMachine = shown
                return found
        raise Answer("ValidationException", "RecordNotFound")

    def _show(self, region: str, name: str, machine: CloudMachine) -> dict[str, Any]:
        """The fields that lists and descriptions have in common."""
        status = "Failed" if name in self.failures else _STATES[machine.state]
        assert machine.created_at is not None
        made = machine.created_at.timestamp()
        address = {"Url": f"{name}.notebook.{region}.sagemaker.aws"}
        return {
            "NotebookInstanceName": name,
            "NotebookInstanceArn": _arn(region, name),
            "NotebookInstanceStatus": status,
            "InstanceType": self.bodies[region, name]["InstanceType"],
            "CreationTime": made,
            "LastModifiedTime": self.modified.get(machine.id, made),
            "NotebookInstanceLifecycleConfigName": name,
            **(address if status == "InService" else {}),
        }

    def products(self, region: str) -> list[dict[str, Any]]:
        return [
            make_product(region, name, use, usd if use == "Notebook" else "99.0")
            for name, usd in PRICES.items()
            for use in ("Training", "Notebook")
        ]


def read_last_command(script: str) -> list[str]:
    """The command that a notebook's script runs once the agent has ended."""
    started = next(each for each in script.splitlines() if each.startswith("setsid"))
    return shlex.split(shlex.split(started)[4].rpartition("; ")[2])


def _cut(body: dict[str, Any], found: list[Any], field: str) -> dict[str, Any]:
    """One page of a list."""
    at = int(body.get("NextToken", 0))
    more = {"NextToken": str(at + _PAGE)} if at + _PAGE < len(found) else {}
    return {field: found[at : at + _PAGE], **more}


def _arn(region: str, name: str) -> str:
    return f"arn:aws:sagemaker:{region}:123456789012:notebook-instance/{name}"
