"""The quotas of Oracle Cloud Infrastructure limit its offers, on the stand-in of its APIs."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.oci_stand_in import DOMAINS, HOME, TENANCY
from tests.providers.clouds.contract.test_provider_oci import A10, H100, V100, OciPlace, pick

from cavvy.domain.offers import Purchase
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderError, Refused
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.oci.api import OciApi
from cavvy.providers.vm.cloud import CloudFault


@pytest.fixture
def account(rest_server: RestServer, tmp_path: Path) -> Iterator[OciPlace]:
    with closing(OciPlace(rest_server, tmp_path)) as account:
        yield account


async def test_quotas_limit_offers_by_availability_domain(account: OciPlace) -> None:
    one, two = DOMAINS[HOME]
    account.api.elsewhere["gpu-a10-count"] = 298
    account.api.policies["gpu-h100-count"] = 16
    harness, provider = account.harness(), account.provider("ours")
    offer = await pick(provider, H100, Purchase.ON_DEMAND)
    gang = replace(await harness.spec("one"), offer=offer)
    await provider.launch(gang)
    found = {(each.instance_type, each.zone): each for each in await provider.offers()}
    assert offer.zone == one
    # the quota policy of the compartment allows 16 GPUs, of which the gang uses 8
    assert (found[H100, one].capacity, found[H100, one].quota_nodes) == (1, 2)
    assert found[H100, one].limited_by == (
        f"the quota gpu-h100-count in {one} (8 of 16 GPUs used, 8 left)"
    )
    assert (found[H100, two].capacity, found[H100, two].quota_nodes) == (2, 2)
    assert found[H100, one].pool != found[H100, two].pool
    # other compartments use the limit, too
    assert (found[A10, one].capacity, found[A10, one].quota_nodes) == (2, 300)
    # a limit of 0 forbids the shape; the use of its other limit is unknown
    assert found[V100, one].quota_nodes == 0
    assert found["BM.GPU.MI300X.8", two].quota_nodes == 1
    # 8 vCPUs are 4 OCPUs, and 900,000 GB are enough for more
    assert found["VM.Standard.E5.Flex$_8_32", one].quota_nodes == 22_500
    await provider.remove(gang.name)
    told = {(each.name, each.zone): each for each in await provider.quotas()}
    assert {name for name, _ in told} == {
        *("gpu-a10-count", "gpu-h100-count", "gpu-h100-regional-count", "gpu3-count"),
        *("gpu-mi300x-count", "standard-e5-core-ad-count", "standard-e5-memory-count"),
        "vm-gpu3-1-count",
    }
    assert told["gpu-h100-regional-count", ""].limit == 160
    assert (told["vm-gpu3-1-count", one].used, told["gpu3-count", one].used) == (None, 0)
    quota = told["gpu-a10-count", two]
    assert (quota.limit, quota.used, quota.unit) == (300, 298, "GPUs")
    assert (quota.family, quota.region, quota.purchase) == (A10, HOME, None)
    assert quota.request == (
        "oci limits-increase limits-increase-request create "
        f"--compartment-id {TENANCY} --display-name cavvy-gpu-a10-count "
        '--justification \'GPU jobs\' --items \'[{"serviceName": "compute", '
        f'"limitName": "gpu-a10-count", "region": "{HOME}", "scope": "{two}", '
        '"value": NEW_LIMIT}]\''
    )


async def test_quotas_that_are_not_told_limit_nothing(account: OciPlace) -> None:
    other = "eu-frankfurt-1"
    provider = account.provider("ours", regions=f"{HOME}, {other}")
    account.api.limit_faults[other] = CloudFault(403, "NotAuthorized", "no right")
    limits = {
        (each.region, each.quota_nodes)
        for each in await provider.offers()
        if each.instance_type == A10
    }
    assert limits == {(HOME, 300), (other, None)}
    assert "no right" in dict(await provider.whoami())["quotas"]
    assert {quota.region for quota in await provider.quotas()} == {HOME}
    assert [each.partition(":")[0] for each in provider.untold_quotas()] == [other]
    account.api.limit_faults.clear()
    await account.wait(timedelta(minutes=1))
    assert {quota.region for quota in await provider.quotas()} == {HOME, other}
    assert not provider.untold_quotas()
    account.api.limit_faults = dict.fromkeys(DOMAINS, CloudFault(404, "NotAuthorized", ""))
    await account.wait(timedelta(minutes=1))
    # the last quotas that were read
    assert {each.quota_nodes for each in await provider.offers()} >= {0, 300}
    with pytest.raises(Refused, match="does not list limitValues"):
        await provider.quotas()


@pytest.mark.parametrize("value", [None, "many", "inf", {}])
def test_quotas_that_cannot_be_read_hide_no_offer(
    account: OciPlace, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    """The quotas are reported as unread, and limit nothing."""
    told = OciApi.list

    async def spoilt(self: OciApi, region: str, path: str, *rest: str, **query: str) -> Any:
        entries = await told(self, region, path, *rest, **query)
        if path == "/limitValues":
            next(each for each in entries if each["name"] == "gpu-a10-count")["value"] = value
        return entries

    async def scenario() -> None:
        before = {each.key for each in await account.provider("ours").offers()}
        monkeypatch.setattr(OciApi, "list", spoilt)
        provider = account.provider("ours")
        offers = await provider.offers()
        assert {each.key for each in offers} == before
        with pytest.raises(ProviderError, match="unreadable reply"):
            await provider.quotas()

    asyncio.run(scenario())
