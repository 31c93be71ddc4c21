"""Determines the instance types of job queues, and looks up their prices in the catalog."""

from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.managed.aws import AwsService
from cavvy.providers.managed.ec2_prices import Ec2Prices
from cavvy.providers.vm.keys import list_setting

_PURCHASES = {"EC2": Purchase.ON_DEMAND, "SPOT": Purchase.SPOT}


class BatchQueues:
    """The queues that the settings name. An offer's zone is the name of its queue."""

    def __init__(self, aws: AwsService, context: ProviderContext) -> None:
        self._aws, self._settings = aws, context.settings
        self._prices = Ec2Prices(context)
        self.left_out: Mapping[str, str] = {}  # the reason by queue
        self.fair_share: frozenset[str] = frozenset()  # the queues with a fair-share policy

    def names(self) -> Sequence[str]:
        """Return the names of the queues in the settings. Raises Refused if the settings name no
        queue."""
        named = list_setting(self._settings, "queues")
        if not named:
            raise Refused("[providers.aws-batch] queues: not set; name the job queues to use")
        return named

    async def offers(self) -> Sequence[Offer]:
        """Return one offer for each queue whose instance type and price are known. Raises
        CloudFault, Refused.
        """
        region = await self._aws.only_region("queues")
        told = await self._aws.pages(
            region, "describe_job_queues", "jobQueues", "nextToken", jobQueues=list(self.names())
        )
        await self._prices.refresh()
        self.fair_share = frozenset(
            str(each["jobQueueName"]) for each in told if each.get("schedulingPolicyArn")
        )
        found, left_out = [], {}
        for queue in told:
            name = str(queue["jobQueueName"])
            offer = await self._read(region, queue)
            if isinstance(offer, str):
                left_out[name] = offer
            else:
                found.append(offer)
        missing = set(self.names()) - {str(each["jobQueueName"]) for each in told}
        self.left_out = left_out | dict.fromkeys(sorted(missing), "the queue does not exist")
        return found

    async def _read(self, region: str, queue: Mapping[str, Any]) -> Offer | str:
        """Return the offer of a queue, or the reason why the queue has no offer."""
        order = queue["computeEnvironmentOrder"]
        if (queue["state"], queue["status"]) != ("ENABLED", "VALID"):
            return "the queue is disabled or invalid"
        if len(order) != 1:
            return f"the queue has {len(order)} compute environments; exactly one is required"
        told = await self._aws.call(
            region,
            "describe_compute_environments",
            computeEnvironments=[order[0]["computeEnvironment"]],
        )
        for each in told["computeEnvironments"]:
            resources = each.get("computeResources", {})
            types, kind = resources.get("instanceTypes", []), str(resources.get("type"))
            if kind not in _PURCHASES:
                return f"the queue's compute environment has the type {kind}; EC2 or SPOT is needed"
            if len(types) != 1 or "." not in types[0]:
                return (
                    "the queue's compute environment must have one instance type, such as g5.xlarge"
                )
            return self._price(region, str(queue["jobQueueName"]), types[0], _PURCHASES[kind])
        return "the queue's compute environment does not exist"

    def _price(self, region: str, queue: str, name: str, purchase: Purchase) -> Offer | str:
        """Return the offer at the catalog's price, or the reason why no offer exists."""
        found = self._prices.find(region, name, purchase)
        if isinstance(found, str):
            return found
        return replace(found, provider="aws-batch", zone=queue, capacity=None)
