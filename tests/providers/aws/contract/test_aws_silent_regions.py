"""A region of EC2 that does not answer: the gangs of the other regions are still reported and removed,
and nothing is concluded about its own.
"""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from tests.ec2.cloud import Cloud
from tests.ec2.direct import Direct
from tests.ec2.server import Front
from tests.providers.aws.contract import test_aws_requests as requests
from tests.providers.aws.contract.test_aws_requests import BASE, REGION, ProviderRig

from cavvy.domain.values import replace
from cavvy.providers.aws import MANIFEST, status
from cavvy.providers.aws.account import AwsAccount, AwsFault, Json
from cavvy.providers.base import GangState, PartlyUnknown, TryAgain
from cavvy.providers.registry import check_settings

account = requests.account


@pytest.mark.usefixtures("account")  # its credentials
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_region_that_fails_hides_no_gangs_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Nothing is concluded about the gangs of a region that does not answer."""
    other = "eu-west-1"
    cloud, table = Cloud(regions=(REGION, other)), {"regions": f"{other}, {REGION}"}
    direct = Direct(check_settings(MANIFEST, {**BASE, **table}), Front(cloud))
    here, silent, call = ProviderRig(cloud, direct, tmp_path, table), set[str](), AwsAccount.call
    monkeypatch.setattr(status, "_PATIENCE_S", 0.05 if hangs else 60)

    async def fail(self: AwsAccount, region: str, operation: str, **arguments: object) -> Json:
        if region in silent and operation == "describe_instances":
            if hangs:
                await asyncio.Event().wait()
            raise AwsFault("Unavailable", "it is down")
        return await call(self, region, operation, **arguments)

    monkeypatch.setattr(AwsAccount, "call", fail)
    offers = {each.region: each for each in await here.provider.offers()}
    base = await here.gang("t3.medium")
    gangs = {at: replace(base, name=f"rm-{at}", offer=offers[at]) for at in (REGION, other)}
    for each in gangs.values():
        await here.provider.launch(each)
    await here.pass_time()
    seen = {each.name: each for each in await here.provider.gangs()}
    assert seen.keys() == {f"rm-{REGION}", f"rm-{other}"}
    await here.provider.remove(f"rm-{REGION}")
    silent.add(other)
    cloud.hours.jump(timedelta(hours=9))
    with pytest.raises(PartlyUnknown, match=other) as caught:
        await here.provider.gangs()
    assert [(each.name, each.state) for each in caught.value.seen] == [
        (f"rm-{REGION}", GangState.ENDED)
    ]
    if not hangs:
        with pytest.raises(TryAgain, match=other):
            await here.provider.gangs(f"rm-{other}")
    with pytest.raises(PartlyUnknown, match=other):  # it may be in the other region
        await here.provider.gangs("rm-unknown")
    silent.clear()
    assert [each.state for each in await here.provider.gangs(f"rm-{other}")] == [GangState.RUNNING]
    await here.provider.remove(f"rm-{other}")
    await here.pass_time()
    assert not [life for life in cloud.history if life.state != "terminated"]


@pytest.mark.usefixtures("account")  # its credentials
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_removal_without_a_record_reaches_the_regions_that_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    down = "eu-west-1"
    cloud, table = Cloud(regions=(REGION, down)), {"regions": f"{down}, {REGION}"}
    direct = Direct(check_settings(MANIFEST, {**BASE, **table}), Front(cloud))
    here, call = ProviderRig(cloud, direct, tmp_path, table), AwsAccount.call
    monkeypatch.setattr(status, "_PATIENCE_S", 0.05 if hangs else 60)

    async def fail(self: AwsAccount, region: str, operation: str, **arguments: object) -> Json:
        if region == down and operation == "describe_instances":
            if hangs:
                await asyncio.Event().wait()
            raise AwsFault("Unavailable", "it is down")
        return await call(self, region, operation, **arguments)

    gang = await here.gang("t3.medium")
    offers = [each for each in await here.provider.offers() if each.region == REGION]
    await here.provider.launch(replace(gang, offer=offers[0]))
    await here.pass_time()
    here.states.clear()  # the server lost its records
    here.provider = here.make("contract")
    monkeypatch.setattr(AwsAccount, "call", fail)
    (seen,) = await here.provider.gangs(gang.name)
    assert seen.state is not GangState.ENDED
    here.states.clear()
    here.provider = here.make("contract")
    with pytest.raises((TryAgain, TimeoutError)):
        async with asyncio.timeout(2.0):  # the control plane does not wait for ever either
            await here.provider.remove(gang.name)
    cloud.tick()
    assert cloud.history[0].state in ("shutting-down", "terminated")
