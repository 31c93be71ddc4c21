"""Reads the account's vCPU quota for each instance family from Service Quotas, and counts the vCPUs
of the account's instances. Launches in a family without a known quota are not limited.
"""

import re
from collections.abc import Mapping, Sequence

from cavvy.domain.offers import NEW_LIMIT, Offer, Purchase, Quota, limit_offer
from cavvy.domain.values import replace
from cavvy.providers.aws.account import AwsAccount, Json

# Patterns for the quota names that AWS documents:
# https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
_ON_DEMAND = re.compile(r"Running On-Demand (.+) instances")
_SPOT = re.compile(r"All (.+) Spot Instance Requests")
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-on-demand-instances.html: stopped
# instances do not count
_COUNTED = ("pending", "running")
Quotas = Mapping[tuple[str, bool], Quota]  # (family such as "p" or "p5", whether spot) -> quota


async def fetch_quotas(account: AwsAccount, region: str) -> Sequence[Json]:
    """Return the account's vCPU quotas for instances, as reported by AWS. Raises TryAgain,
    Refused.
    """
    told = await account.pages(
        region, "list_service_quotas", "Quotas", service="service-quotas", ServiceCode="ec2"
    )
    return [each for each in told if _match(str(each["QuotaName"]))]


async def fetch_instances(account: AwsAccount, region: str) -> Sequence[Json]:
    """Return all instances that use the account's quotas, including instances that Cavvy did not
    start. Raises TryAgain, Refused.
    """
    states = [{"Name": "instance-state-name", "Values": list(_COUNTED)}]
    told = await account.items(region, "describe_instances", field="Reservations", Filters=states)
    return [instance for each in told for instance in each.get("Instances", ())]


def read_quotas(told: Sequence[Json], region: str, instances: Sequence[Json] | None) -> Quotas:
    """Parse AWS's list of quotas. `instances` are the instances that use the quotas; if None, the
    quotas' use is unknown.
    """
    found: dict[tuple[str, bool], Quota] = {}
    for each in told:
        match = _match(str(each["QuotaName"]))
        if match is None:
            continue
        quota = _make(each, region, match[1], spot=match.re is _SPOT)
        for family in re.findall(r"[A-Za-z]+\d*", match[1]):
            if family not in ("Standard", "and"):
                found[family.lower(), match.re is _SPOT] = quota
    if instances is None:
        return found
    used: dict[str, float] = {}
    for instance in instances:
        spot = instance.get("InstanceLifecycle") == "spot"
        counted = find_quota(found, str(instance["InstanceType"]), spot=spot)
        cpu = instance.get("CpuOptions") or {}
        if counted is not None:
            vcpus = int(cpu.get("CoreCount", 0)) * int(cpu.get("ThreadsPerCore", 1))
            used[counted.name] = used.get(counted.name, 0) + vcpus
    return {key: replace(quota, used=used.get(quota.name, 0)) for key, quota in found.items()}


def find_quota(quotas: Quotas, kind: str, *, spot: bool) -> Quota | None:
    """Return the quota that instances of this type use, or None if the quota is unknown. The quota
    of a generation (p5) overrides the quota of its family (p).
    """
    match = re.match(r"([a-z]+)(\d*)", kind)
    if match is None:
        return None
    return quotas.get((match[0], spot), quotas.get((match[1], spot)))


def limit(offer: Offer, quotas: Quotas) -> Offer:
    """Return the offer, with its capacity reduced to the unused quota."""
    spot = offer.purchase is Purchase.SPOT
    quota = find_quota(quotas, offer.instance_type, spot=spot)
    return offer if quota is None else limit_offer(offer, [(quota, offer.vcpus)])


def _make(told: Json, region: str, family: str, *, spot: bool) -> Quota:
    code = str(told.get("QuotaCode", ""))
    return Quota(
        provider="aws",
        name=str(told["QuotaName"]),
        family=family,
        unit="vCPUs",
        region=region,
        purchase=Purchase.SPOT if spot else Purchase.ON_DEMAND,
        limit=float(told["Value"]),
        request="aws service-quotas request-service-quota-increase --service-code ec2 "
        f"--quota-code {code} --desired-value {NEW_LIMIT} --region {region}",
    )


def _match(name: str) -> re.Match[str] | None:
    return _ON_DEMAND.fullmatch(name) or _SPOT.fullmatch(name)
