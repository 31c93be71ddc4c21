"""Which EBS volumes go with their gang: those that were made for it and are not to be kept, and
nobody else's.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from cavvy.domain.values import replace
from cavvy.providers.aws.account import AwsFault
from cavvy.providers.aws.launch_ledger import AwsDisk, AwsGangRecord
from cavvy.providers.aws.volumes import GangVolumes
from cavvy.providers.base import TryAgain

DISK = AwsDisk(
    name="data", path="/d", device="/dev/sdf", id="vol-1", made=True, ours=True, size_gib=8
)
RECORD = AwsGangRecord(
    name="g",
    region="r",
    zone="r-a",
    type="t",
    spot=False,
    nodes=1,
    intended_at=datetime(2030, 1, 1, tzinfo=UTC),
    image="ami",
    root="/dev/xvda",
    disk_gib=8,
    launched=True,
    disks=(DISK,),
)


class Account:
    """Shows these volumes, and deletes what it is told to, or says no."""

    def __init__(self, *shown: dict[str, object], fault: str = "") -> None:
        self.shown, self.fault = shown, fault
        self.deleted: list[str] = []

    async def items(self, region: str, operation: str, filters: object = None) -> Sequence[object]:
        assert operation == "describe_volumes"
        return self.shown

    async def call(self, region: str, operation: str, **arguments: str) -> dict[str, object]:
        assert operation == "delete_volume"
        if self.fault:
            raise AwsFault(self.fault, "no")
        self.deleted.append(arguments["VolumeId"])
        return {}


def removed(account: Account, *disks: AwsDisk, launched: bool = True) -> tuple[bool, list[str]]:
    volumes = GangVolumes(cast(Any, account), cast(Any, None), "mark")
    gone = asyncio.run(volumes.remove_made(replace(RECORD, disks=disks, launched=launched)))
    return gone, account.deleted


@pytest.mark.parametrize(
    ("made", "keep", "launched", "goes"),
    [
        (True, True, True, False),  # the next job goes on with it
        (True, False, True, True),
        (True, True, False, True),  # nothing was ever written to it
        (True, False, False, True),
        (False, True, True, False),
        (False, False, True, False),  # it is the user's
        (False, True, False, False),
        (False, False, False, False),
    ],
)
def test_a_volume_goes_with_its_gang_only_if_nobody_can_miss_it(
    made: bool, keep: bool, launched: bool, goes: bool
) -> None:
    disk = replace(DISK, made=made, keep=keep)
    assert removed(Account(), disk, launched=launched) == (True, ["vol-1"] if goes else [])


def shown(name: str, volume: str, state: str = "available") -> dict[str, object]:
    return {"VolumeId": volume, "State": state, "Tags": [{"Key": "Name", "Value": name}]}


def test_a_volume_whose_making_was_never_answered_is_found_by_its_tags() -> None:
    unknown = (replace(DISK, id="", keep=False), replace(DISK, id="", name="other", keep=True))
    there = (
        shown("data", "vol-2"),
        shown("data", "vol-3", "in-use"),
        shown("other", "vol-4"),
        shown("x", "vol-5"),
    )
    assert removed(Account(*there), *unknown) == (True, ["vol-2"])
    assert removed(Account(*there), *unknown, launched=False) == (True, ["vol-2", "vol-4"])


def test_a_volume_that_is_still_in_use_goes_the_next_time_and_one_that_is_gone_is_gone() -> None:
    scratch = replace(DISK, keep=False)
    assert removed(Account(fault="VolumeInUse"), scratch) == (False, [])
    assert removed(Account(fault="InvalidVolume.NotFound"), scratch) == (True, [])
    with pytest.raises(TryAgain):
        removed(Account(fault="RequestLimitExceeded"), scratch)
