"""Capacity reservations and capacity blocks: which are used, in which zone, and that what runs
in a block is told of its end, which is known when it starts.
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from tests.ec2.rules import Reserved
from tests.providers.aws.contract import test_aws_requests as requests
from tests.providers.aws.contract.test_aws_requests import REGION, ProviderRig
from tests.waits import wait_until

from cavvy.domain.values import replace
from cavvy.providers.base import GangState, NoCapacity
from cavvy.providers.hosts.boot import await_end

account, provider_rig = requests.account, requests.provider_rig
ID = "cr-0123456789abcdef0"
KIND = "p5.48xlarge"


def hold(here: ProviderRig, **fields: object) -> Reserved:
    made = Reserved(id=ID, type=KIND, zone=here.cloud.rules.zones[REGION][1], total=2)
    here.cloud.rules.reserved.append(replace(made, **fields))  # type: ignore[arg-type]  # fields of Reserved
    return here.cloud.rules.reserved[-1]


async def count(here: ProviderRig) -> int:
    here.cloud.hours.jump(timedelta(seconds=61))
    return len([each for each in await here.provider.offers() if "capacity " in each.source])


async def test_what_runs_in_a_block_is_told_of_its_end(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig(reservations=ID)
    end = here.cloud.hours.now().replace(microsecond=0) + timedelta(hours=2)
    held = hold(here, block=True, until=end)
    gang = await here.gang(KIND, nodes=2, zone=held.zone)
    assert f"nodes until {end - timedelta(minutes=30):%Y-%m-%d %H:%M} UTC" in gang.offer.source
    await here.provider.launch(gang)
    script = here.cloud.history[0].user_data.decode()
    boot = json.loads(script.partition("<<'END_OF_BOOT'\n")[2].partition("\n")[0])
    # EC2 begins to terminate 30 minutes before the end; the work has ten minutes to save
    # itself.
    assert boot["end"]["warn_at"] == (end - timedelta(minutes=40)).timestamp()
    taken = boot["config"]["taken"]
    assert (taken["warning"], taken["warning_s"], taken["source"]) == (
        boot["end"]["file"],
        600,
        "EC2",
    )
    assert taken["seconds"] == gang.grace.total_seconds() > 0
    await here.pass_time(60)
    here.cloud.hours.jump(timedelta(minutes=90))
    await here.pass_time(60)
    (seen,) = await here.provider.gangs()
    assert (seen.state, seen.preempted) == (GangState.ENDED, True)
    await here.clear()


async def test_others_are_told_of_no_end(provider_rig: Callable[..., ProviderRig]) -> None:
    """What runs in a reservation that ends goes on, on demand."""
    here = provider_rig(reservations=ID)
    held = hold(here, until=here.cloud.hours.now() + timedelta(hours=2))
    await here.provider.launch(await here.gang(KIND, zone=held.zone))
    assert b'"taken"' not in here.cloud.history[0].user_data
    await here.clear()


def test_a_node_s_file_of_warning_appears_when_it_is_time(tmp_path: Path) -> None:
    file = tmp_path / "ends"
    await_end({"file": str(file), "warn_at": time.time() + 0.2})
    assert not file.exists()
    wait_until(file.exists)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"state": "scheduled"}, "it is scheduled"),
        ({"state": "expired"}, "it is expired"),
        ({"platform": "Windows"}, "the reservation is for Windows"),
        ({"block": True, "until": timedelta(minutes=45)}, "the reservation ends too soon"),
        ({"until": timedelta(seconds=30)}, "the reservation ends too soon"),
        (
            {"type": "p6e-gb200.36xlarge", "block": True, "until": timedelta(hours=9)},
            "the reservation is for an UltraServer",
        ),
    ],
)
async def test_what_cannot_be_used_is_no_offer_and_check_says_why(
    provider_rig: Callable[..., ProviderRig], fields: dict[str, object], told: str
) -> None:
    here = provider_rig(reservations=ID)
    length = fields.get("until")
    hold(
        here,
        **{
            **fields,
            "until": here.cloud.hours.now() + length if isinstance(length, timedelta) else None,
        },
    )
    assert await count(here) == 0
    assert told in dict(await here.provider.whoami())[f"reservation {ID}"]


async def test_a_block_that_ends_between_offer_and_launch_is_no_capacity(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig(reservations=ID)
    held = hold(here, block=True, until=here.cloud.hours.now() + timedelta(hours=1))
    gang = await here.gang(KIND, zone=held.zone)
    here.cloud.hours.jump(timedelta(minutes=45))
    with pytest.raises(NoCapacity, match="no reservation has 1 free"):
        await here.provider.launch(gang)
    await here.clear()


async def test_a_shared_reservation_is_in_the_zone_of_its_id(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """Another account's us-east-1a is not ours; only the zone's id means the same in both."""
    here = provider_rig(reservations=ID)
    zones = here.cloud.rules.zones[REGION]
    hold(here, zone=zones[2], zone_name=zones[0])
    assert await count(here) == 1
    gang = await here.gang(KIND, zone=zones[2])
    await here.provider.launch(gang)
    assert here.launch()["Placement.AvailabilityZone"] == zones[2]
    assert {life.zone for life in here.cloud.history} == {zones[2]}
    await here.clear()
