"""Calls AWS's managed services, with the account and the regions from the settings. Errors of the
calls are raised as `CloudFault`s. Also holds what AWS Batch and ECS have in common: the definitions
of jobs, and EC2's prices from the catalog.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.providers.aws.account import LATER, AwsAccount, AwsFault, Json, camel, translate
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.rest import RECORDER

_NO_REPLY = "Unreachable"
_DENIED = frozenset({"AccessDeniedException", "AccessDenied", "UnrecognizedClientException"})
_MOST_PAGES = 500
# time after which the prices are read again, since the catalog may be newer
_AGE = timedelta(minutes=10)
# Maximum definitions that one poll removes, because each takes a separate call and polls must be
# quick. ECS deletes at most as many in one call:
# https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_DeleteTaskDefinitions.html
_MOST_REMOVED = 10


class AwsService:
    """One of AWS's services. `gone` are the codes of faults that mean "no such object"."""

    def __init__(
        self,
        service: str,
        settings: Mapping[str, Scalar],
        account: AwsAccount | None,
        *,
        gone: frozenset[str],
        provider: str,
    ) -> None:
        """If `account` is None, the settings of the provider select the account."""
        self._service, self._settings, self._gone = service, settings, gone
        self._provider = provider
        self._account = account or AwsAccount(settings, provider=provider)

    async def regions(self) -> Sequence[str]:
        """Return the regions in the settings, or the region of the AWS configuration. Raises
        Refused."""
        return list_setting(self._settings, "regions") or await self._account.regions()

    async def only_region(self, holds: str) -> str:
        """Return the one region, in which the objects named by `holds` are, such as "queues".
        Raises Refused.
        """
        found = await self.regions()
        if len(found) != 1:
            table = f"[providers.{self._provider}]"
            raise Refused(f"{table} regions: name only the region of the {holds}")
        return found[0]

    async def check_region(self, region: str) -> None:
        """Raise Refused if the region is not one of `regions`, because Cavvy would never list
        objects that it creates in such a region.
        """
        if region not in await self.regions():
            raise Refused(f"the region {region} is not among the `regions` of the settings")

    async def call(
        self, region: str, operation: str, *, service: str = "", **arguments: Any
    ) -> Json:
        """Call an operation, such as "create_training_job". Raises CloudFault, or Refused if no
        credentials exist.
        """
        name = service or self._service
        self._account.recorder = RECORDER.get()
        try:
            return await self._account.call(region, operation, service=name, **arguments)
        except AwsFault as fault:
            if fault.status == 0 and fault.code != _NO_REPLY:
                raise translate(fault, f"{camel(operation)} in {region}") from fault
            raise CloudFault(self._status(fault), fault.code, fault.message) from fault

    async def pages(
        self, region: str, operation: str, field: str, token: str = "NextToken", **arguments: Any
    ) -> Sequence[Any]:
        """Return the items of all pages of a list; `token` is the name of the page token in
        replies."""
        found: list[Any] = []
        asked = token if token[0].isupper() else "nextToken"
        for _ in range(_MOST_PAGES):
            told = await self.call(region, operation, **arguments)
            found += told.get(field, [])
            if not told.get(token):
                return found
            arguments[asked] = told[token]
        raise CloudFault(400, "too many pages", f"{camel(operation)} in {region}")

    def _status(self, fault: AwsFault) -> int:
        """Return the HTTP status by which the package `vm` identifies the kind of a fault. AWS
        itself uses the status 400 for most errors.
        """
        if fault.code == _NO_REPLY:
            return 0
        if fault.status >= 500:
            return fault.status
        if fault.code in LATER:
            return 429
        if fault.code in self._gone:
            return 404
        return 403 if fault.code in _DENIED else fault.status


class Ec2Prices:
    """The catalog's offers of EC2. The caller must call `refresh` before it calls `find`."""

    def __init__(self, context: ProviderContext) -> None:
        self._list_prices, self._now = context.list_prices, context.now
        self._prices: Sequence[Offer] = ()
        self._read_at: datetime | None = None

    async def refresh(self) -> None:
        """Read the catalog's prices, unless the prices read last are newer than `_AGE`."""
        now = self._now()
        if self._read_at is None or now - self._read_at >= _AGE or not self._prices:
            self._prices = await asyncio.to_thread(self._list_prices, "aws")
            self._read_at = now

    def find(self, region: str, name: str, purchase: Purchase) -> Offer | str:
        """Return the offer of an instance type, or the reason why no offer exists. If prices differ
        between zones, the highest price is used.
        """
        known = [
            each
            for each in self._prices
            if (each.region, each.instance_type, each.purchase) == (region, name, purchase)
        ]
        if not known:
            return f"the catalog has no {purchase} price of {name} in {region}"
        return max(known, key=lambda each: each.rate)


class JobDefinitions:
    """The definitions of one service. `kind` is "job" or "task". If `deletes` is set, the service
    keeps deregistered definitions until they are deleted.
    """

    def __init__(self, aws: AwsService, kind: str, *, deletes: bool = False) -> None:
        self._aws, self._kind, self._deletes = aws, kind, deletes
        # the names of unused definitions, in the order of the ends of their jobs
        self._unused: dict[str, None] = {}

    def retire(self, newest: str) -> None:
        """Remove the definition of an ended job, and its earlier revisions, in later polls."""
        self._unused |= dict.fromkeys(list_revisions(newest))

    async def tidy(self, region: str) -> None:
        """Remove some of the unused definitions."""
        some = list(islice(self._unused, _MOST_REMOVED))
        for each in some:
            del self._unused[each]
        await self.remove(region, some)

    async def remove(self, region: str, definitions: Sequence[str]) -> None:
        """Remove the given definitions, of jobs that have ended or were not started."""
        inactive = []
        for each in definitions:
            named: Mapping[str, Any] = {f"{self._kind}Definition": each}
            with suppress(CloudFault):
                await self._aws.call(region, f"deregister_{self._kind}_definition", **named)
                inactive.append(each)
        if inactive and self._deletes:
            gone: Mapping[str, Any] = {f"{self._kind}Definitions": inactive}
            with suppress(CloudFault):
                await self._aws.call(region, f"delete_{self._kind}_definitions", **gone)


def list_revisions(newest: str) -> Sequence[str]:
    """Return a definition and its earlier revisions, which repeated requests created."""
    name, _, number = newest.rpartition(":")
    return [f"{name}:{revision}" for revision in range(1, int(number) + 1)]
