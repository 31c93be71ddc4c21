"""The account's vCPU limits per instance family, from Service Quotas. Launches in a family without
a known quota are not limited.
"""

import re
from collections.abc import Mapping, Sequence

from cavvy.providers.aws.account import AwsAccount, Json

# Patterns for the quota names that AWS documents:
# https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
_ON_DEMAND = re.compile(r"Running On-Demand (.+) instances")
_SPOT = re.compile(r"All (.+) Spot Instance Requests")
Quotas = Mapping[tuple[str, bool], float]  # (family such as "p" or "p5", spot) -> vCPUs


async def fetch_quotas(account: AwsAccount, region: str) -> Sequence[Json]:
    """Return the account's vCPU quotas for instances, as reported by AWS. Raises TryAgain,
    Refused.
    """
    told = await account.pages(
        region, "list_service_quotas", "Quotas", service="service-quotas", ServiceCode="ec2"
    )
    return [each for each in told if _match(str(each["QuotaName"]))]


def read_quotas(told: Sequence[Json]) -> Quotas:
    found: dict[tuple[str, bool], float] = {}
    for each in told:
        match = _match(str(each["QuotaName"]))
        if match is not None:
            for family in re.findall(r"[A-Za-z]+\d*", match[1]):
                if family not in ("Standard", "and"):
                    found[family.lower(), match.re is _SPOT] = float(each["Value"])
    return found


def allows(quotas: Quotas, kind: str, vcpus: int, *, spot: bool) -> bool:
    """True if the quotas allow one instance of this type. The quota of a generation (p5) overrides
    the quota of its family (p).
    """
    match = re.match(r"([a-z]+)(\d*)", kind)
    if match is None:
        return True
    limit = quotas.get((match[0], spot), quotas.get((match[1], spot)))
    return limit is None or limit >= vcpus


def _match(name: str) -> re.Match[str] | None:
    return _ON_DEMAND.fullmatch(name) or _SPOT.fullmatch(name)
