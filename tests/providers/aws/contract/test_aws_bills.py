"""The bill of a gang on EC2 equals what EC2 would charge by the stand-in's own log: machines, disks
and public addresses.
"""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
from tests.ec2.bills import price_extras
from tests.providers.aws.contract import test_aws_networks as networks
from tests.providers.aws.contract import test_aws_requests as requests
from tests.providers.aws.contract.test_aws_networks import Own
from tests.providers.aws.contract.test_aws_requests import REGION, ProviderRig
from tests.records import make_attempt_record

from cavvy.control.decide.bills import BillVerdict, audit_bill, bill_gang
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.gangs import GangSeen
from cavvy.domain.jobs import Attempt
from cavvy.domain.tasks import NetworkNeed, Volume, VolumeKind
from cavvy.providers.base import GangSpec, GangState
from cavvy.providers.state import MemoryProviderState

account, provider_rig, own = requests.account, requests.provider_rig, networks.own
MINUTE = timedelta(minutes=1)


def attempt_of(here: ProviderRig, gang: GangSpec) -> Attempt:
    now = here.cloud.hours.now()
    return make_attempt_record(now, gang.offer, gang=gang.name, nodes=gang.nodes)


async def run_and_end(here: ProviderRig, gang: GangSpec, seconds: float) -> GangSeen:
    await here.provider.launch(gang)
    await here.pass_time()
    await here.pass_time(seconds)
    await here.provider.remove(gang.name)
    for _ in range(3):
        await here.pass_time()
    (seen,) = await here.provider.gangs()
    assert seen.state is GangState.ENDED
    return seen


def check(here: ProviderRig, gang: GangSpec, seen: GangSeen) -> list[Charge]:
    attempt, exact = attempt_of(here, gang), 0
    for life in here.cloud.history:
        assert life.shut_at is not None
        began, ended = (at.replace(microsecond=0) for at in (life.launched_at, life.shut_at))
        exact += gang.offer.rate.over(max(MINUTE, ended - began)).micros
        exact += round(price_extras(here.cloud, life, began, ended))
    charges = bill_gang(attempt, seen, here.cloud.hours.now(), final=True)
    billed = sum(charge.amount.micros for charge in charges)
    assert abs(billed - exact) <= len(charges), (billed, exact)
    assert audit_bill(attempt, seen, charges).verdict is BillVerdict.AGREES
    return charges


@pytest.mark.parametrize("seconds", [0, 3600 * 5])
async def test_disks_and_addresses_are_billed_as_ec2_would(
    provider_rig: Callable[..., ProviderRig], seconds: float
) -> None:
    here = provider_rig(disk_gib=250)
    gang = await here.gang("g4dn.xlarge", nodes=2)
    charges = check(here, gang, await run_and_end(here, gang, seconds))
    ranks = Counter((charge.rank, charge.kind) for charge in charges)
    for rank in (0, 1):
        assert ranks[rank, ChargeKind.DISK]
        assert ranks[rank, ChargeKind.ADDRESS]


async def test_named_volumes_are_billed_while_their_node_exists(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig(disk_type="gp2")
    zone = here.cloud.rules.zones[REGION][0]
    here.cloud.disks.make(
        REGION, {"AvailabilityZone": zone, "Size": "4000", "VolumeType": "sc1"}, {"Name": "data"}
    )
    here.cloud.hours.jump(timedelta(seconds=5))
    volumes = (
        Volume(kind=VolumeKind.NAMED, source="data", path="/d"),
        Volume(kind=VolumeKind.NAMED, source="new", path="/n", size_gib=700, keep=False),
    )
    gang = await here.gang("g4dn.xlarge", volumes=volumes)
    charges = check(here, gang, await run_and_end(here, gang, 7200))
    disks = [charge for charge in charges if charge.kind is ChargeKind.DISK]
    month = 4000 * 15_000 + 700 * 80_000 + 100 * 100_000
    assert month / 744 <= disks[0].rate.micros_per_hour <= month / 672 + 1


async def test_a_node_that_was_only_seen_after_its_end_pays_for_its_address(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """EC2 lists no address of an ended instance."""
    here = provider_rig()
    gang = await here.gang("g4dn.xlarge")
    await here.provider.launch(gang)
    here.cloud.hours.jump(timedelta(seconds=10))
    here.cloud.tick()
    here.cloud.shut_down_itself(here.cloud.history[0])
    await here.pass_time()
    (seen,) = await here.provider.gangs()
    charges = check(here, gang, seen)
    assert ChargeKind.ADDRESS in {charge.kind for charge in charges}


async def test_nodes_without_a_public_address_pay_for_none(own: Own) -> None:
    nat = own.backend.create_nat_gateway(
        own.subnet, own.backend.allocate_address("vpc").allocation_id
    )
    own.backend.create_route(own.table, "0.0.0.0/0", nat_gateway_id=nat.id)
    gang = await own.here.gang("t3.medium", network=NetworkNeed(subnet=own.subnet))
    charges = check(own.here, gang, await run_and_end(own.here, gang, 60))
    assert {charge.kind for charge in charges} == {ChargeKind.NODE, ChargeKind.DISK}


async def test_a_server_that_lost_its_records_bills_disks_at_their_earlier_rates(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """EC2's list of instances does not tell the sizes of disks."""
    here = provider_rig()
    gang = await here.gang("g4dn.xlarge")
    await here.provider.launch(gang)
    await here.pass_time()
    (seen,) = await here.provider.gangs()
    attempt = attempt_of(here, gang)
    stored = bill_gang(attempt, seen, here.cloud.hours.now(), final=False)
    here.states["contract"] = MemoryProviderState()
    here.provider = here.make("contract")
    await here.provider.remove(gang.name)
    for _ in range(3):
        await here.pass_time()
    (seen,) = await here.provider.gangs()
    now = here.cloud.hours.now()
    charges = bill_gang(attempt, seen, now, final=True, earlier=stored)
    kinds = {charge.kind for charge in charges}
    assert kinds >= {ChargeKind.NODE, ChargeKind.DISK, ChargeKind.ADDRESS}


async def test_prices_of_disks_and_addresses_have_a_date_and_a_source(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig(disk_gib=40)
    for spot in (False, True):
        gang = await here.gang("g4dn.xlarge", spot=spot)
        found = {(each.kind, each.name): each for each in gang.offer.extras}
        assert {key: each.price.micros for key, each in found.items()} == {
            (ChargeKind.ADDRESS, ""): 5000,
            (ChargeKind.DISK, "gp2"): 100_000,
            (ChargeKind.DISK, "gp3"): 80_000,
            (ChargeKind.DISK, "sc1"): 15_000,
        }
        assert {each.source for each in found.values()} == {"AWS Price List API"}
        assert {each.as_of for each in found.values()} == {here.cloud.hours.now().date()}
        usual = {name: each.usual for (_, name), each in found.items() if each.usual}
        assert usual == {"": 1, "gp3": 40}
    # the cached facts of a restarted server have them as well
    other = here.make("contract")
    (offer,) = [each for each in await other.offers() if each.key == gang.offer.key]
    assert offer.extras == gang.offer.extras
