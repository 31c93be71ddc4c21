"""Manages SageMaker's objects of one kind, such as endpoints, as jobs of a managed service.

An object needs other objects with its name, its parts, such as a model. Only the object itself is
billed. The parts are deleted with the object, or later if the server stopped before the deletion.

The names of kinds are those of SageMaker's API, such as "EndpointConfig". SageMaker reports missing
objects, taken names and wrong states with one code, `INVALID`.

Offers come from AWS's Price List API. Each row of the price list is the price of an instance type
for one purpose. The field `platoinstancetype` names the purpose: "Training" for training jobs,
"Notebook" for notebook instances, "Hosting" for endpoints.
"""

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.aws.account import AwsAccount, Json
from cavvy.providers.aws.prices import read_hourly
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.managed.aws import AwsService
from cavvy.providers.managed.notebooks import NotebookEnds
from cavvy.providers.managed.service import ServiceJob
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.leftovers import MOST_DELETED, UNUSED, LeftoverSearch
from cavvy.providers.vm.records import make_mark

# patterns of instance types with chips that SageMaker's default images have no driver for
_OTHER_CHIPS = ("ml.trn*", "ml.inf*")
_HOME = "us-east-1"  # one of the regions that serve the Price List API
_AGE = timedelta(hours=12)
_Rates = Mapping[str, HourlyRate]


INVALID = "ValidationException"
QUOTA = "ResourceLimitExceeded"
_TAKEN = re.compile(r"duplicate|already exist", re.IGNORECASE)
_IMAGE = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/\S+")


class SageMakerObjects(ABC):
    """Implements the calls of `ManagedService` that are the same for all kinds. A job's id is
    `REGION/NAME`.
    """

    provider: ClassVar[str]
    kind: ClassVar[str]
    title: ClassVar[str]  # for messages to users, such as "endpoint"
    use: ClassVar[str]  # the purpose in the price list; see `InstanceOffers`
    parts: ClassVar[Sequence[str]]
    failed: ClassVar[frozenset[str]]  # statuses whose reason only a description contains

    def __init__(self, context: ProviderContext, account: AwsAccount | None = None) -> None:
        self._settings, self._now = context.settings, context.now
        self._prefix = f"{NAME_PREFIX}{make_mark(context.installation)}-"
        self._aws = AwsService(
            "sagemaker", self._settings, account, gone=frozenset(), provider=self.provider
        )
        self._offers = InstanceOffers(self._aws, context, self.provider, self.use)
        self._leftovers = LeftoverSearch()
        self._ends = NotebookEnds(self._now)

    @staticmethod
    @abstractmethod
    def read(job: str, told: Json) -> ServiceJob:
        """Parse an object in a reply."""

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`, which calls `offers` first."""
        return [("role", self._role()), *self._offers.facts()]

    async def offers(self) -> Sequence[Offer]:
        self._role()
        return await self._offers.list(Purchase.ON_DEMAND)

    async def list(self) -> Sequence[ServiceJob]:
        return [job for job, _ in (await self._list()).values()]

    async def get(self, job: str) -> ServiceJob | None:
        told = await self._describe(job)
        return self._ends.find(job) if told is None else self._ends.note(self.read(job, told))

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return ()

    async def _create(self, region: str, kind: str, **body: Any) -> None:
        """Create an object. If the object already exists, an earlier request created it."""
        try:
            await self._aws.call(region, f"create_{_words(kind)}", **body)
        except CloudFault as fault:
            if fault.code != INVALID or not _TAKEN.search(fault.message):
                raise

    async def _list(self) -> Mapping[str, tuple[ServiceJob, Json]]:
        """Return the jobs with the replies about them, by id. Deletes parts whose object was
        deleted or never created.
        """
        found: dict[str, tuple[ServiceJob, Json]] = {}
        for region in await self._aws.regions():
            told = await self._named(region, self.kind)
            for name, each in told.items():
                job = f"{region}/{name}"
                failed = each[f"{self.kind}Status"] in self.failed and job not in self._ends
                read = await self.get(job) if failed else None
                found[job] = read or self._ends.note(self.read(job, each)), each
            await self._tidy(region, told)
        self._ends.forget(found)
        return found

    async def _describe(self, job: str) -> Json | None:
        """Return SageMaker's description of an object, or None if the object does not exist."""
        try:
            return await self._act(job, "describe")
        except CloudFault as fault:
            # the one argument is a name that SageMaker accepted before, so the error means that the
            # name is unknown
            if fault.code == INVALID:
                return None
            raise

    async def _act(self, job: str, verb: str, kind: str = "") -> Json:
        """Call an operation, such as "delete", of an object, or of one of its parts. Both have the
        same name.
        """
        region, _, name = job.partition("/")
        kind = kind or self.kind
        argument: Mapping[str, Any] = {f"{kind}Name": name}
        return await self._aws.call(region, f"{verb}_{_words(kind)}", **argument)

    async def _change(self, job: str, verb: str) -> None:
        """Call an operation that SageMaker refuses in some states. The fault then has the status
        409, because the state has changed since it was read.
        """
        try:
            await self._act(job, verb)
        except CloudFault as fault:
            if fault.code == INVALID:
                raise CloudFault(409, fault.code, fault.message) from fault
            raise

    async def _delete_parts(self, job: str) -> None:
        """Delete the parts of an object. Parts that cannot be deleted now are deleted later."""
        for kind in self.parts:
            with suppress(CloudFault):
                await self._act(job, "delete", kind)

    async def _tidy(self, region: str, objects: Mapping[str, Json]) -> None:
        now = self._now()
        if not self._leftovers.is_due(region, now):
            return
        with suppress(CloudFault):
            parts: set[str] = set()
            for kind in self.parts:
                parts |= (await self._named(region, kind, CreationTimeBefore=now - UNUSED)).keys()
            for name in sorted(parts - objects.keys())[:MOST_DELETED]:
                await self._delete_parts(f"{region}/{name}")

    async def _named(self, region: str, kind: str, **wanted: Any) -> Mapping[str, Json]:
        """Return, by name, this installation's objects of a kind."""
        operation, prefix = f"list_{_words(kind)}s", self._prefix
        told = await self._aws.pages(
            region, operation, f"{kind}s", NameContains=prefix, MaxResults=100, **wanted
        )
        names = {str(each[f"{kind}Name"]): each for each in told}
        return {name: each for name, each in names.items() if name.startswith(prefix)}

    def _role(self) -> str:
        """Return the role that the settings name. Raises Refused."""
        role = str(self._settings.get("role") or "")
        if not role:
            table = f"[providers.{self.provider}]"
            raise Refused(f"{table} role: not set; each {self.title} needs a role")
        return role


def object_to_image(image: str) -> list[Objection]:
    """Return the objection to an image that SageMaker cannot pull."""
    if _IMAGE.fullmatch(image.replace("{region}", "any")):
        return []
    reason = (
        "SageMaker starts containers only from images in Amazon ECR, such as "
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/name:tag"
    )
    return [Objection("image", reason)]


def _words(kind: str) -> str:
    """Return a kind as it is part of the names of operations: `endpoint_config`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()


class InstanceOffers:
    """The offers of a provider that rents SageMaker's instances for one purpose, such as
    "Training". The settings `instances` and `disk_gib` select the offers; prices are read again
    after 12 hours.
    """

    def __init__(self, aws: AwsService, context: ProviderContext, provider: str, use: str) -> None:
        self._aws, self._context, self._provider, self._use = aws, context, provider, use
        self._rates: dict[str, tuple[datetime, _Rates]] = {}  # by region: when they were read
        # types with a price that the catalog does not know, by the last call of `list`
        self._unknown: Sequence[str] = ()

    def facts(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`, which calls `list` first."""
        names = ", ".join(self._unknown)
        return [("instance types that are not in the catalog", names)] if names else []

    async def list(self, *purchases: Purchase) -> Sequence[Offer]:
        """Return one offer for each instance type, region and purchase option. Raises CloudFault,
        Refused."""
        found, unknown, now = [], set(), self._context.now()
        settings = self._context.settings
        patterns = list_setting(settings, "instances")
        for region in await self._aws.regions():
            rates = await self._read(region, now)
            names = [each for each in sorted(rates) if _chosen(each, patterns)]
            machines = await asyncio.to_thread(self._find_machines, names)
            for name, machine in machines.items():
                if machine is None:
                    unknown.add(name)
                    continue
                found += [
                    replace(
                        machine,
                        provider=self._provider,
                        region=region,
                        zone=None,
                        instance_type=name,
                        disk_gib=int(settings["disk_gib"]),
                        purchase=purchase,
                        rate=rates[name],
                        term_months=0,
                        capacity=None,
                        source=f"AWS Price List API, SageMaker {self._use.lower()}",
                        as_of=now.date(),
                    )
                    for purchase in purchases
                ]
        self._unknown = sorted(unknown)
        return found

    def _find_machines(self, names: Sequence[str]) -> Mapping[str, Offer | None]:
        """Return the catalog's offers of EC2 for instance types of SageMaker. The function reads
        files."""
        find = self._context.find_instance
        return {each: find("aws", each.removeprefix("ml.")) for each in names}

    async def _read(self, region: str, now: datetime) -> _Rates:
        """Return the hourly prices in USD by instance type, such as ml.g5.xlarge. Raises
        CloudFault."""
        at, rates = self._rates.get(region, (None, {}))
        if at is None or now - at >= _AGE:
            told = await self._aws.pages(
                _HOME,
                "get_products",
                "PriceList",
                service="pricing",
                ServiceCode="AmazonSageMaker",
                Filters=[
                    {"Type": "TERM_MATCH", "Field": name, "Value": value}
                    for name, value in (
                        ("regionCode", region),
                        ("productFamily", "ML Instance"),
                        ("platoinstancetype", self._use),
                    )
                ],
            )
            rates = read_rates([json.loads(str(each)) for each in told], self._use)
            self._rates[region] = (now, rates)
        return rates


def read_rates(products: Sequence[Any], use: str) -> _Rates:
    """Return the hourly prices of instances for one purpose, such as "Training"."""
    found: dict[str, HourlyRate] = {}
    for each in products:
        attributes = each.get("product", {}).get("attributes", {})
        # in some rows, the use follows the type in `instanceType`: ml.m5.large-Training
        name = attributes.get("instanceName") or attributes.get("instanceType") or ""
        name = str(name).partition(f"-{use}")[0]
        terms = each.get("terms", {}).get("OnDemand", {}).values()
        rate = next((rate for term in terms if (rate := read_hourly(term)) is not None), None)
        fits = attributes.get("platoinstancetype") == use
        if fits and name.startswith("ml.") and rate is not None:
            found[name] = rate
    return found


def _chosen(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns in the settings selects this instance type."""
    if patterns:
        return any(fnmatchcase(name, each) for each in patterns)
    return not any(fnmatchcase(name, each) for each in _OTHER_CHIPS)
