"""A stand-in for SageMaker's training jobs, and for the price list of its instances."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from tests.contract.aws_service import Answer, AwsStandIn

from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.contract.rest_stand_in import finish
from cavvy.providers.vm.cloud import CloudFault, MachineState

PRICES = {"ml.m5.large": "0.1150000000", "ml.g4dn.xlarge": "0.7364000000", "ml.z9.large": "9.9"}
ROLE = "arn:aws:iam::123456789012:role/jobs"
IMAGE = "123456789012.dkr.ecr.{region}.amazonaws.com/train:1"


class SageMakerStandIn(AwsStandIn):
    """Training jobs: all instances of a job have one state. A job with KeepAlivePeriodInSeconds
    leaves a warm pool, even if it was stopped.
    """

    services: Mapping[str, str] = {"SageMaker": "sagemaker", "AWSPriceListService": "pricing"}

    def __init__(self, cloud: MemoryCloud) -> None:
        super().__init__(cloud)
        self.page = 2
        self.missing = "Requested resource not found."  # the text of the error about an unknown job
        self.changes: dict[str, dict[str, Any]] = {}  # of descriptions, by job
        self.billable: dict[str, int] = {}  # BillableTimeInSeconds of ended jobs
        # how long the instances of a job are kept, and who took them before that, by region and job
        self.keeps: dict[tuple[str, str], timedelta] = {}
        self.takers: dict[tuple[str, str], str] = {}

    def CreateTrainingJob(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = str(body["TrainingJobName"])
        if self.machines(region, name):
            text = "Training job names must be unique within an AWS account and region"
            raise Answer("ResourceInUse", text)
        if wrong := _refusal(body):
            raise Answer("ValidationException", wrong)
        self.bodies[region, name] = body
        self._take_pool(region, name)
        try:
            self.start(region, name, body["ResourceConfig"]["InstanceCount"])
        except CloudFault as fault:
            if fault.code == "quota-exceeded":
                text = "The account-level service limit 'ml.m5.large for training job usage' is 0"
                raise Answer("ResourceLimitExceeded", text) from fault
            if fault.code == "insufficient-capacity":
                raise Answer("CapacityError", "Unable to provision requested ML compute") from fault
            raise
        return {"TrainingJobArn": _arn(region, name)}

    def DescribeTrainingJob(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        made = self.machines(region, str(body["TrainingJobName"]))
        if made and made[0].id in self.undescribed:
            raise Answer("ValidationException", self.missing)
        return self._show(region, str(body["TrainingJobName"]))

    def _show(self, region: str, name: str) -> dict[str, Any]:
        made = self.machines(region, name)
        shown = finish(self.cloud.get(made[0].id)) if made else None
        if shown is None:
            raise Answer("ValidationException", self.missing)
        asked = self.bodies[region, name]
        ended, running = shown.state is MachineState.ENDED, shown.state is MachineState.RUNNING
        status, secondary = "InProgress", "Training" if running else "Starting"
        times = {"LastModifiedTime": made[0].at.timestamp()}
        if running or ended:
            times["TrainingStartTime"] = made[0].at.timestamp()
        if made[0].ended is not None:
            status = secondary = "Stopped"
            times["TrainingEndTime"] = times["LastModifiedTime"] = made[0].ended.timestamp()
        return {
            "TrainingJobName": name,
            "TrainingJobArn": _arn(region, name),
            "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/output/model.tar.gz"},
            "TrainingJobStatus": status,
            "SecondaryStatus": secondary,
            "CreationTime": made[0].at.timestamp(),
            **{
                field: asked[field]
                for field in ("AlgorithmSpecification", "ResourceConfig", "StoppingCondition")
            },
            **times,
            **self._pool(region, name),
            **self.changes.get(name, {}),
            **(self.billable if made[0].ended is not None else {}),
        }

    def ListTrainingJobs(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        found = []
        for name in self.jobs(region):
            told = self._show(region, name)
            if (
                body.get("NameContains", "") in name
                and body.get("StatusEquals", told["TrainingJobStatus"]) == told["TrainingJobStatus"]
                and body.get("LastModifiedTimeAfter", 0) <= told["LastModifiedTime"]
            ):
                fields = ("TrainingJobName", "TrainingJobArn", "CreationTime", "TrainingJobStatus")
                found.append({field: told[field] for field in fields})
        at = int(body.get("NextToken", 0))
        shown = found[at : at + self.page]
        more = {"NextToken": str(at + self.page)} if at + self.page < len(found) else {}
        return {"TrainingJobSummaries": shown, **more}

    def StopTrainingJob(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        made = self.machines(region, body["TrainingJobName"])
        if not any(each.ended is None for each in made):
            text = "The request was rejected because the training job is in status Stopped"
            raise Answer("ValidationException", text)
        for each in made:
            finish(self.cloud.delete(each.id))
        return {}

    def UpdateTrainingJob(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = str(body["TrainingJobName"])
        if self._pool(region, name).get("WarmPoolStatus", {}).get("Status") != "Available":
            raise Answer("ValidationException", "The warm pool of the job is not available")
        length = timedelta(seconds=body["ResourceConfig"]["KeepAlivePeriodInSeconds"])
        self.keeps[region, name] = max(length, self._idle(region, name))
        return {"TrainingJobArn": _arn(region, name)}

    def _pool(self, region: str, name: str) -> dict[str, Any]:
        """The field WarmPoolStatus of a job's description; {} if the job has no warm pool."""
        keep = self.keeps.get((region, name))
        if keep is None:
            return {}
        if any(each.ended is None for each in self.machines(region, name)):
            return {"WarmPoolStatus": {"Status": "InUse"}}
        idle, taker = self._idle(region, name), self.takers.get((region, name))
        told: dict[str, Any] = {"Status": "Available" if idle < keep else "Terminated"}
        if taker:
            told = {"Status": "Reused", "ReusedByJob": taker}
        seconds = int(min(idle, keep).total_seconds())
        return {"WarmPoolStatus": {**told, "ResourceRetainedBillableTimeInSeconds": seconds}}

    def _idle(self, region: str, name: str) -> timedelta:
        """How long ago the job ended."""
        ends = [each.ended for each in self.machines(region, name) if each.ended is not None]
        return self.cloud.time - max(ends)

    def _take_pool(self, region: str, name: str) -> None:
        """Let a new job take the warm pool of a job with the same instances, role and network."""
        body = self.bodies[region, name]
        for place, keep in list(self.keeps.items()):
            pool = self._pool(*place).get("WarmPoolStatus", {})
            same = place[0] == region and _shape(self.bodies[place]) == _shape(body)
            if same and pool.get("Status") == "Available" and keep:
                self.keeps[place], self.takers[place] = self._idle(*place), name
                break
        if seconds := body["ResourceConfig"].get("KeepAlivePeriodInSeconds"):
            self.keeps[region, name] = timedelta(seconds=seconds)

    def products(self, region: str) -> list[dict[str, Any]]:
        return [
            make_product(region, name, use, usd if use == "Training" else "99.0")
            for name, usd in PRICES.items()
            for use in ("Hosting", "Training")
        ]


def interrupted(at: datetime) -> dict[str, Any]:
    """The changed fields of a description, once SageMaker has taken back the instances."""
    moves = [
        {"Status": "Training", "StartTime": at.timestamp() - 1},
        {"Status": "Interrupted", "StartTime": at.timestamp()},
    ]
    return {"SecondaryStatus": "Interrupted", "SecondaryStatusTransitions": moves}


def _shape(body: dict[str, Any]) -> list[Any]:
    """The values that must be the same for a job to take a warm pool:
    https://docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html
    """
    names = ("InstanceCount", "InstanceType", "VolumeSizeInGB")
    resources = [body["ResourceConfig"].get(each) for each in names]
    return [body["RoleArn"], body.get("VpcConfig"), *resources]


def make_product(region: str, name: str, use: str, usd: str) -> dict[str, Any]:
    """A product of the price list, with the fields of the published list that matter here."""
    price = {"unit": "Hrs", "pricePerUnit": {"USD": usd}}
    return {
        "product": {
            "productFamily": "ML Instance",
            "attributes": {
                "regionCode": region,
                "instanceName": name,
                "instanceType": f"{name}-{use}",
                "platoinstancetype": use,
            },
        },
        "serviceCode": "AmazonSageMaker",
        "terms": {"OnDemand": {"a": {"priceDimensions": {"b": price}}}},
    }


def _refusal(body: dict[str, Any]) -> str:
    """What SageMaker's documentation does not allow, beyond the model."""
    stopping = body["StoppingCondition"]
    wait, run = stopping.get("MaxWaitTimeInSeconds"), stopping["MaxRuntimeInSeconds"]
    if body.get("EnableManagedSpotTraining"):
        if wait is None or wait < run:
            return "MaxWaitTimeInSeconds must be present and at least MaxRuntimeInSeconds"
        if "KeepAlivePeriodInSeconds" in body["ResourceConfig"]:
            return "Managed spot training does not support warm pools"
    elif wait is not None:
        return "MaxWaitTimeInSeconds is for managed spot training only"
    if run > 28 * 24 * 3600:
        return "MaxRuntimeInSeconds is too long"
    return ""


def _arn(region: str, name: str) -> str:
    return f"arn:aws:sagemaker:{region}:123456789012:training-job/{name}"
