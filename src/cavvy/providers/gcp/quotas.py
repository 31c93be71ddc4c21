"""Reads the project's Compute Engine quotas and their use, and limits offers to the unused quota.

https://cloud.google.com/compute/resource-usage
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.quotas import NEW_LIMIT, Quota, limit_offer
from cavvy.providers.base import Refused
from cavvy.providers.gcp.api import GcpApi
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json

_AGE = timedelta(minutes=1)
# the metrics for vCPUs and GPUs, without those for commitments and virtual workstations, which
# limit no offer
_METRIC = re.compile(r"(?!COMMITTED_)(\w+_)?(CPUS|(?<!VWS_)GPUS)(_ALL_REGIONS)?")
# Spot machines use the quotas with this prefix. In a project without such a quota, they use the
# quota for on-demand machines.
_PREEMPTIBLE = "PREEMPTIBLE_"
# machine series that use the quota CPUS; every other series has its own quota
_GENERAL = frozenset({"e2", "f1", "g1", "n1"})

_Quotas = Mapping[tuple[str, str], Quota]  # (region or "" for all regions, metric) -> quota


class GcpQuotas:
    """The quotas of one project, at most a minute old."""

    def __init__(self, api: GcpApi, regions: Collection[str], now: Callable[[], datetime]) -> None:
        """`regions` are the regions to read; () means all regions."""
        self._api, self._regions, self._now = api, regions, now
        self._known: tuple[datetime, _Quotas] | None = None
        self._fault: Exception | None = None  # why the last read failed

    @property
    def problem(self) -> str:
        """The reason why the quotas could not be read, or "" if they were read."""
        return f"cannot be read: {self._fault}" if self._fault is not None else ""

    def forget(self) -> None:
        """Discard the cached quotas, because machines were created or deleted."""
        if self._fault is None:
            self._known = None

    async def read(self) -> Sequence[Quota]:
        """Return the quotas of vCPUs and GPUs, sorted by region and name. Raises CloudFault or
        Refused if the quotas cannot be read, or if the last attempt failed less than a minute ago.
        """
        known = await self._read()
        if self._fault is not None:
            raise self._fault
        return [known[key] for key in sorted(known)]

    async def limit(self, offers: Sequence[Offer], gpus: Mapping[str, str]) -> Sequence[Offer]:
        """Return the offers, with their capacity reduced to the unused quota. `gpus` maps machine
        types to Google's names of their GPUs. If the quotas cannot be read, the last known quotas
        are used.
        """
        try:
            known = await self._read()
        except (CloudFault, Refused) as fault:
            self._fault = fault
            known = self._known[1] if self._known is not None else {}
            self._known = (self._now(), known)
        return [limit_offer(each, _list_needs(each, gpus, known)) for each in offers]

    async def _read(self) -> _Quotas:
        now = self._now()
        if self._known is not None and now - self._known[0] < _AGE:
            return self._known[1]
        project = await self._api.project()
        whole = await self._api.get("")
        regions = await self._api.list("regions")
        scopes = [("", whole), *((str(each["name"]), each) for each in regions)]
        found = {
            (region, quota.name): quota
            for region, told in scopes
            if not region or not self._regions or region in self._regions
            for quota in _read_scope(told.get("quotas") or (), region, project)
        }
        self._known, self._fault = (now, found), None
        return found


def _read_scope(told: Sequence[Json], region: str, project: str) -> Iterator[Quota]:
    limits = {str(each["metric"]): float(each["limit"]) for each in told}
    for each in told:
        name = str(each["metric"])
        if not _METRIC.fullmatch(name):
            continue
        spot = name.startswith(_PREEMPTIBLE)
        shared = not spot and not limits.get(_PREEMPTIBLE + name)
        only = None if shared else Purchase.ON_DEMAND
        place = "per-project-region" if region else "per-project"
        yield Quota(
            provider="gcp",
            name=name,
            family=name.removeprefix(_PREEMPTIBLE).replace("_", " "),
            unit="GPUs" if "GPUS" in name else "vCPUs",
            region=region,
            purchase=Purchase.SPOT if spot else only,
            limit=limits[name],
            used=float(each.get("usage", 0)),
            request="gcloud quotas preferences create --service=compute.googleapis.com "
            f"--project={project} --quota-id={name.replace('_', '-')}-{place} "
            f"--preferred-value={NEW_LIMIT}" + (f" --dimensions=region={region}" if region else ""),
        )


def _list_needs(
    offer: Offer, gpus: Mapping[str, str], known: _Quotas
) -> Iterator[tuple[Quota, float]]:
    """Yield the quotas of the offer's machines, each with the amount for one machine.
    Quotas that Google does not report are omitted.
    """
    spot = offer.purchase is Purchase.SPOT
    series = offer.instance_type.partition("-")[0]
    cpus = "CPUS" if series in _GENERAL else f"{series.upper()}_CPUS"
    amounts = [(offer.region, cpus, offer.vcpus)]
    if offer.instance_type in gpus:
        # Google's names of GPUs: nvidia-l4, nvidia-tesla-a100, nvidia-a100-80gb, nvidia-h100-80gb
        gpu = gpus[offer.instance_type].replace("-tesla", "").replace("-", "_").upper()
        whole = f"{gpu}_GPUS"
        metric = whole if (offer.region, whole) in known else f"{gpu.rpartition('_')[0]}_GPUS"
        amounts.append((offer.region, metric, float(offer.accelerator_count)))
        amounts.append(("", "" if spot else "GPUS_ALL_REGIONS", float(offer.accelerator_count)))
    amounts.append(("", "" if spot else "CPUS_ALL_REGIONS", offer.vcpus))
    for region, metric, amount in amounts:
        own = known.get((region, f"{_PREEMPTIBLE}{metric.removeprefix(f'{series.upper()}_')}"))
        quota = own if spot and own is not None and own.limit else known.get((region, metric))
        if quota is not None:
            yield quota, amount
