"""The JarvisLabs provider keeps the contract, on a stand-in that checks every request against
JarvisLabs's own Python package.
"""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest
from tests.contract.jarvislabs_stand_in import JarvislabsStandIn
from tests.proofs import Proof

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers import jarvislabs
from cavvy.providers.base import GangState, Provider, Refused, TryAgain
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.jarvislabs import JarvislabsCloud, _read, _read_target
from cavvy.providers.vm.cloud import MachineState, SshTarget

PROOF = Proof("jarvislabs", False, "a strict stand-in for JarvisLabs's API")


class TestJarvislabs(RestContract):
    package, traits, stand_in = jarvislabs, JarvislabsCloud.traits, JarvislabsStandIn
    launch_faults = read_replies("""
    NoCapacity  400  error  No free L4 GPUs in IN2 right now. Try again later.
    Refused     400  error  wrong value
    Refused     403  error  Your balance is too low for an available GPU
    Refused     401  error  the key is not available
    TryAgain    429  error  over capacity
    TryAgain    503  error  unavailable
    """)

    def test_offers_have_live_prices_and_unknown_gpus_are_reported(
        self, account: RestPlace
    ) -> None:
        provider = account.provider("ours")
        spot, fixed = Purchase.SPOT, Purchase.ON_DEMAND
        assert {
            (each.region, each.instance_type, each.purchase): (
                each.rate.micros_per_hour,
                each.capacity,
            )
            for each in _offers(provider)
        } == {
            **{("india-noida-01", f"{n}x_L4", fixed): (440_000 * n, 8 // n) for n in (1, 2, 4, 8)},
            **{("india-noida-01", f"{n}x_L4", spot): (290_000 * n, 2 // n) for n in (1, 2)},
            **{
                ("india-chennai-01", f"{n}x_A100-80GB", fixed): (1_490_000 * n, 2 // n)
                for n in (1, 2)
            },
            ("europe-01", "1x_H100", fixed): (2_990_000, 8),
        }
        some = next(each for each in _offers(provider) if each.instance_type == "2x_A100-80GB")
        assert (some.accelerator, some.accelerator_memory_mib) == ("A100", 81920)
        assert (some.vcpus, some.memory_mib, some.disk_gib) == (28, 224 * 1024, 100)
        facts = dict(asyncio.run(provider.whoami()))
        assert facts["unknown accelerators"] == "Z9000"
        chosen = _offers(account.provider("ours", regions="europe-01"))
        assert {each.region for each in chosen} == {"europe-01"}

    def test_prices_in_rupees_are_refused(self, account: RestPlace) -> None:
        account.api.rupees = True
        with pytest.raises(Refused, match="Indian rupees"):
            _offers(account.provider("ours"))

    async def test_virtual_machines_are_refused_and_destroyed_at_their_own_endpoint(
        self, account: RestPlace
    ) -> None:
        """An earlier setting may have made some."""
        provider = account.provider("ours", template="vm")
        with pytest.raises(Refused, match="`vm` creates virtual machines"):
            await provider.offers()
        harness = account.harness()
        gang = await harness.running("virtual")
        with pytest.raises(Refused, match="`vm` creates virtual machines"):
            await provider.launch(replace(gang, name="another"))
        account.api.template = "vm"
        await harness.remove(gang.name)
        assert account.billed() == 0

    async def test_the_servers_key_is_added_to_the_account_once(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        for word in ("one", "two"):
            gang = await harness.running(word)
            harness.restart()
            await harness.remove(gang.name)
        (key,) = account.api.keys
        assert key["key_name"] == "cavvy"
        assert key["ssh_key"].startswith("ssh-ed25519 ")

    async def test_a_key_that_was_removed_is_added_again(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        for word in ("one", "two"):
            gang = await harness.running(word)
            (key,) = account.api.keys
            assert key["key_name"] == "cavvy"
            await harness.remove(gang.name)
            account.api.keys = []  # removed in the console

    async def test_an_instance_is_made_and_destroyed_at_its_regions_address(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        offers = await harness.ours.offers()
        for region in ("india-chennai-01", "europe-01"):
            offer = next(each for each in offers if each.region == region)
            gang = replace(await harness.spec(f"in-{region}"), offer=offer)
            await harness.start(gang)
            await harness.expect(GangState.RUNNING, gang)
            assert account.billed() == 1
            await harness.remove(gang.name)
            assert account.billed() == 0

    async def test_an_instance_of_another_process_is_destroyed_before_it_is_listed(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        offers = await harness.ours.offers()
        offer = next(each for each in offers if each.region == "europe-01")
        gang = replace(await harness.spec("unlisted"), offer=offer)
        await harness.launch(gang)
        harness.restart()
        await harness.ours.remove(gang.name)
        assert account.billed() == 0

    async def test_a_deletion_that_the_reply_refuses_is_repeated(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("stays")
        account.api.destroys = False
        with pytest.raises(TryAgain, match="cannot be destroyed"):
            await harness.ours.remove(gang.name)
        assert account.billed() == 1
        account.api.destroys = True
        await harness.remove(gang.name)
        assert account.billed() == 0

    async def test_a_paused_spot_instance_is_destroyed_and_counts_as_preempted(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("taken", purchase=Purchase.SPOT)
        (machine,) = account.cloud.billed()
        account.cloud.change(machine.id, off=True)
        await account.wait(timedelta(minutes=1))
        await harness.ours.gangs(gang.name)
        assert account.billed() == 0  # the disk of a paused instance is billed
        await account.settle()
        seen = await harness.one(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, True)


def _offers(provider: Provider) -> Sequence[Offer]:
    return asyncio.run(provider.offers())


@pytest.mark.parametrize(
    ("status", "spot", "state", "preempted"),
    [
        ("Creating", True, MachineState.STARTING, False),
        ("Resuming", False, MachineState.STARTING, False),
        ("Running", True, MachineState.RUNNING, False),
        ("Pausing", True, MachineState.STOPPED, True),
        ("Paused", True, MachineState.STOPPED, True),
        ("Paused", False, MachineState.STOPPED, False),
        ("Failed", True, MachineState.STOPPED, False),
        ("Destroying", True, MachineState.ENDED, False),
        ("Unheard of", False, MachineState.RUNNING, False),
    ],
)
def test_the_states_of_the_package_are_read(
    status: str, spot: bool, state: MachineState, preempted: bool
) -> None:
    told = {"machine_id": 42, "status": status, "is_spot": spot, "ssh_str": "ssh -p 22 root@x"}
    machine = _read(told)
    assert (machine.id, machine.state, machine.preempted) == ("42", state, preempted)
    assert (machine.ssh is not None) == (status == "Running")


@pytest.mark.parametrize(
    ("command", "target"),
    [
        (
            "ssh -o StrictHostKeyChecking=no -p 11014 root@ssh.example.org",
            SshTarget(address="ssh.example.org", port=11014, user="root"),
        ),
        ("ssh ubuntu@198.51.100.9", SshTarget(address="198.51.100.9", user="ubuntu")),
        ("ssh -p 22 198.51.100.9", SshTarget(address="198.51.100.9")),
    ],
)
def test_commands_of_ssh_are_read(command: str, target: SshTarget) -> None:
    assert _read_target(command) == target
