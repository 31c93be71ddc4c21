"""The DigitalOcean provider keeps the contract, on a stand-in that checks every request against
DigitalOcean's published description.
"""

import json
from datetime import timedelta

import pytest
from tests.contract.digitalocean_stand_in import DigitalOceanStandIn
from tests.proofs import Proof

from cavvy.domain.values import replace
from cavvy.providers import digitalocean
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.digitalocean import MANIFEST, SCOPES, DigitalOceanCloud
from cavvy.providers.recording import FOLDER, TAG

# https://docs.digitalocean.com/reference/api/reference names the scope of each endpoint, and
# https://docs.digitalocean.com/reference/api/scopes/droplet/create those that it requires.
ENDPOINTS = {
    "GET /sizes": "sizes:read",
    "GET /droplets": "droplet:read",
    "POST /droplets": "droplet:create",
    "DELETE /droplets": "droplet:delete",
}
REQUIRED = {"droplet:read", "regions:read", "sizes:read", "actions:read", "image:read"}
PROOF = Proof("digitalocean", False, "a strict stand-in for DigitalOcean's API")


class TestDigitalOcean(RestContract):
    package, traits, stand_in = digitalocean, DigitalOceanCloud.traits, DigitalOceanStandIn
    launch_faults = read_replies("""
    NoCapacity     422  unprocessable_entity  Size is not available in this region.
    NoCapacity     422  unprocessable_entity  Region is not available
    NoCapacity     422  unprocessable_entity  size is unavailable
    NoCapacity     422  unprocessable_entity  This size is currently restricted
    QuotaTooSmall  422  unprocessable_entity  creating this/these droplet(s) will exceed your droplet limit
    Refused        422  unprocessable_entity  The image you specified is not available in the selected region
    Refused        422  unprocessable_entity  1 is an invalid SSH key identifier for Droplet creation.
    """)
    replays = True

    @pytest.mark.parametrize(
        ("size", "image"),
        [
            ("s-4vcpu-8gb", "ubuntu-24-04-x64"),
            ("gpu-h100x1-80gb", "gpu-h100x1-base"),
            ("gpu-h100x8-640gb", "gpu-h100x8-base"),
            ("gpu-mi300x1-192gb", "gpu-amd-base"),
        ],
    )
    async def test_gangs_of_every_size_are_found_and_boot_the_image_of_their_gpu(
        self, account: RestPlace, harness: ContractHarness, size: str, image: str
    ) -> None:
        gang, provider = await harness.spec("sized", nodes=3), harness.ours
        offers = [each for each in await provider.offers() if each.instance_type == size]
        await harness.launch(replace(gang, offer=offers[0]))
        account.lose_records()  # only the list shows the gang
        await account.settle()
        harness.restart()
        assert len((await harness.one(gang.name)).nodes) == 3
        await harness.remove(gang.name)
        assert account.api.images == [image] * 3

    async def test_droplets_get_no_tags_and_their_nodes_use_the_private_address(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.launched("tagless", nodes=2)
        for request in account.cloud.requests:
            assert request.tags == {}
            told = json.loads(request.user_data[0].split("END_OF_BOOT'\n")[1].split("\n")[0])
            address = "http://169.254.169.254/metadata/v1/interfaces/private/0/ipv4/address"
            assert told["metadata"]["address"] == address
        await harness.remove(gang.name)

    async def test_the_scopes_are_those_of_the_calls(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = replace(
            await harness.spec("scoped"), labels={TAG: "1"}, longest=timedelta(minutes=5)
        )
        await harness.start(gang)
        await harness.remove(gang.name)
        await harness.one(gang.name)
        (file,) = (account.home / FOLDER).iterdir()
        calls = [each["call"].split("?")[0] for each in json.loads(file.read_text())["calls"]]
        called = {ENDPOINTS["/".join(each.split("/")[:2])] for each in calls}
        assert called | REQUIRED == set(SCOPES)
        assert all(each in MANIFEST.rights for each in SCOPES)
