"""A provider with zones, several calls to create a machine and prices in euros keeps the contract
without changes to the code that providers share.
"""

import asyncio
from contextlib import suppress
from datetime import timedelta

import pytest
from tests.contract import zoned_provider
from tests.contract.zoned_provider import SteppeCloud
from tests.contract.zoned_stand_in import SteppeStandIn

from cavvy.providers.base import GangState, Refused
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.contract.rest_stand_in import RestRequest
from cavvy.providers.vm.cloud import CloudFault


class TestSteppe(RestContract):
    package, traits, stand_in = zoned_provider, SteppeCloud.traits, SteppeStandIn

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("call", ["/servers", "/user_data", "/action"])
    @pytest.mark.parametrize("status", [400, 500, 0])
    async def test_a_call_of_several_that_fails_is_made_good(
        self, account: RestPlace, call: str, status: int, late: bool
    ) -> None:
        """One call fails once, before or after it takes effect. The launch is repeated as the
        control plane does, and then one machine runs."""
        faults = [CloudFault(status, "broken", "for this test")]

        def fail(request: RestRequest) -> tuple[CloudFault, bool] | None:
            right = request.method != "GET" and call in request.path
            return (faults.pop(), late) if right and faults else None

        harness = account.harness()
        gang = await harness.spec("steps")
        account.api.fail = fail
        with suppress(Refused):
            await harness.launch(gang)
        await harness.launch(gang)
        await harness.engine_ids(gang.name)
        for _ in range(3):
            await account.wait(timedelta(minutes=1))
            seen = await harness.one(gang.name)
        assert (seen.state, len(seen.nodes)) == (GangState.RUNNING, 1)
        assert len(account.cloud.billed()) == 1
        await harness.clear()
        assert not faults

    def test_a_zone_that_does_not_answer_is_reported(self, account: RestPlace) -> None:
        broken = CloudFault(400, "broken", "no zone today")
        account.api.fail = lambda request: (broken, False) if "/west-1/" in request.path else None
        provider = account.provider("ours")
        offers = asyncio.run(provider.offers())
        assert {offer.zone for offer in offers} == {"east-1", "east-2"}
        assert provider.silent() == ["west-1: broken: no zone today"]
