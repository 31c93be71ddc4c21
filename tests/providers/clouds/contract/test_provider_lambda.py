"""The Lambda Cloud provider keeps the contract, on a stand-in that checks every request against
Lambda's published description.
"""

import pytest
from tests.contract.lambda_stand_in import LambdaStandIn
from tests.proofs import Proof

from cavvy.domain.values import replace
from cavvy.providers import lambda_cloud
from cavvy.providers.base import Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.lambda_cloud import LambdaCloud

PROOF = Proof("lambda", False, "a strict stand-in for Lambda's API")


class TestLambda(RestContract):
    has_off = False  # "unhealthy" is not off
    package, traits, stand_in = lambda_cloud, LambdaCloud.traits, LambdaStandIn
    replays = True

    def test_an_account_without_ssh_key_gets_a_hint(self, account: RestPlace) -> None:
        account.api.keys = []
        with pytest.raises(Refused, match="the account has no SSH key; add one"):
            account.launch()

    async def test_a_key_that_was_deleted_in_the_account_is_looked_up_again(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang, provider = await harness.spec("one"), account.provider("ours")
        await provider.launch(gang)
        await provider.remove(gang.name)
        await account.settle()
        account.api.keys = ["desktop"]
        other = replace(gang, name=f"{gang.name}-2")
        with pytest.raises(Refused, match="ssh_key_names"):
            await provider.launch(other)
        await account.settle()
        await provider.launch(other)
        await provider.remove(other.name)
