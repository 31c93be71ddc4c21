"""What EC2 shows of an instance and what is made of it: when its bill begins and ends, and who
took it.
"""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from cavvy.domain.offers import Offer, Purchase, Quota
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.aws import status as module
from cavvy.providers.aws.launch_ledger import AwsGangRecord, AwsInstance
from cavvy.providers.aws.prices import read_product
from cavvy.providers.aws.quotas import limit
from cavvy.providers.aws.status import AwsStatus, make_seen, read_instance
from cavvy.providers.base import GangState, TryAgain

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
BEGAN, HOUR, VISIBILITY_DELAY = NOW - timedelta(hours=3), timedelta(hours=1), timedelta(minutes=2)


def told(state: str = "running", **more: object) -> Mapping[str, Any]:
    """One instance of DescribeInstances."""
    return {
        "InstanceId": "i-1",
        "LaunchTime": BEGAN,
        "State": {"Name": state},
        "AmiLaunchIndex": 1,
        **more,
    }


def gone(
    text: str = "", code: str = "", message: str = "", state: str = "terminated"
) -> Mapping[str, Any]:
    return told(state, StateTransitionReason=text, StateReason={"Code": code, "Message": message})


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("User initiated (2030-01-01 10:30:00 GMT)", NOW - 1.5 * HOUR),
        ("User initiated (2030-01-01 10:30:00 UTC)", NOW - 1.5 * HOUR),
        ("User initiated", NOW),
        ("", NOW),
        ("User initiated (2030-01-01 12:00:07 GMT)", NOW),  # its clock is ahead of ours
        ("User initiated (2030-01-01 08:00:00 GMT)", BEGAN),  # no life is shorter than none
    ],
)
@pytest.mark.parametrize("state", ["shutting-down", "terminated", "stopping", "stopped"])
def test_an_instance_has_ended_when_ec2_says_that_it_has(
    text: str, ended: datetime, state: str
) -> None:
    """Its bill ends then, however late the look is; without a time the end is unseen."""
    found = read_instance(gone(text, state=state), None, NOW)
    assert (found.started_at, found.ended_at, found.rank) == (BEGAN, ended, 1)
    assert found.unseen == ("(" not in text)


def test_a_time_that_ec2_reports_later_replaces_an_unseen_end() -> None:
    missed = read_instance(gone(""), None, NOW)
    found = read_instance(gone("User initiated (2030-01-01 10:30:00 GMT)"), missed, NOW + HOUR)
    assert (found.ended_at, found.unseen) == (NOW - 1.5 * HOUR, False)
    again = read_instance(gone(""), missed, NOW + HOUR)
    assert (again.ended_at, again.unseen) == (NOW, True)


@pytest.mark.parametrize("state", ["pending", "running"])
def test_an_instance_that_lives_has_no_end(state: str) -> None:
    found = read_instance(
        told(state, StateReason={"Code": "Server.SpotInstanceTermination", "Message": "x"}),
        None,
        NOW,
    )
    assert (found.ended_at, found.preempted, found.reason) == (None, False, "")


def test_what_was_told_once_is_kept() -> None:
    """EC2 forgets reasons and addresses, and tells another end with each look that has none."""
    taken = gone(
        "User initiated",
        "Server.SpotInstanceTermination",
        "Server.SpotInstanceTermination: no capacity",
    )
    first = read_instance({**taken, "PublicIpAddress": "192.0.2.1"}, None, NOW - HOUR)
    assert (first.preempted, first.ended_at, first.address) == (True, NOW - HOUR, "192.0.2.1")
    again = read_instance({**told("terminated"), "LaunchTime": NOW}, first, NOW)
    assert (again.preempted, again.started_at, again.ended_at) == (True, BEGAN, NOW - HOUR)
    assert again.address == "192.0.2.1"


@pytest.mark.parametrize(
    ("code", "taken"),
    [
        ("Server.SpotInstanceTermination", True),
        ("Server.SpotInstanceShutdown", True),
        ("Server.CapacityBlock", True),
        ("Client.UserInitiatedShutdown", False),
        ("Client.InstanceInitiatedShutdown", False),
        ("Server.InternalError", False),
    ],
)
def test_who_took_an_instance(code: str, taken: bool) -> None:
    found = read_instance(gone(code=code, message="because"), None, NOW)
    assert (found.preempted, found.reason) == (taken, "because")


RECORD = AwsGangRecord(
    name="g",
    region="r",
    zone="r-a",
    type="t",
    spot=True,
    nodes=2,
    intended_at=BEGAN,
    image="ami",
    root="/dev/xvda",
    disk_gib=8,
)
NODES = tuple(AwsInstance(id=f"i-{rank}", rank=rank, started_at=BEGAN) for rank in (0, 1))
OVER = replace(NODES[0], ended_at=NOW)


@pytest.mark.parametrize(
    ("instances", "states", "state"),
    [
        (NODES, {"i-0": "running", "i-1": "running"}, GangState.RUNNING),
        (NODES, {"i-0": "running", "i-1": "pending"}, GangState.STARTING),
        (NODES, {"i-0": "running"}, GangState.STARTING),  # the other does not show yet
        ((OVER, NODES[1]), {"i-0": "terminated", "i-1": "running"}, GangState.RUNNING),
        ((OVER, replace(NODES[1], ended_at=NOW)), {}, GangState.ENDED),
    ],
)
def test_a_gang_is_as_its_instances_are(
    instances: tuple[AwsInstance, ...], states: Mapping[str, str], state: GangState
) -> None:
    assert make_seen(replace(RECORD, instances=instances), states).state is state


def test_a_gang_is_told_with_its_prices_its_loss_and_each_reason_once() -> None:
    ended = tuple(
        replace(each, ended_at=NOW, reason="because", preempted=each.rank == 1) for each in NODES
    )
    seen = make_seen(replace(RECORD, instances=ended, rates=((BEGAN, 5), (NOW, 7))), {})
    assert (seen.engine_id, seen.reason, seen.preempted) == ("i-0", "because", True)
    assert seen.rates == ((BEGAN, HourlyRate(5)), (NOW, HourlyRate(7)))


class Hours:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at


def make_status(hours: Hours) -> AwsStatus:
    return AwsStatus(cast(Any, None), cast(Any, None), "mark", VISIBILITY_DELAY, hours.now)


def test_an_instance_that_is_not_shown_for_long_has_ended_when_it_was_first_missed() -> None:
    hours = Hours()
    eyes, record = make_status(hours), replace(RECORD, instances=NODES)
    shown = [{**told(), "InstanceId": "i-0", "AmiLaunchIndex": 0}]

    def ends(seconds: float, *missing: object) -> list[datetime | None]:
        hours.at = NOW + timedelta(seconds=seconds)
        return [each.ended_at for each in eyes._merge(record, [] if missing else cast(Any, shown))]

    assert ends(0) == [None, None]
    assert ends(119) == [None, None]
    assert ends(120) == [None, NOW]
    assert ends(200, "both") == [None, NOW]
    assert ends(250) == [None, NOW], "the first was shown again: it is counted anew"
    assert ends(325, "both") == [None, NOW]
    assert ends(445, "both") == [NOW + timedelta(seconds=325), NOW]


def test_an_instance_that_has_just_been_launched_is_waited_for() -> None:
    hours = Hours()
    eyes, record = (
        make_status(hours),
        replace(RECORD, instances=(replace(NODES[0], started_at=NOW + HOUR),)),
    )
    for seconds in (0, 130, 3600, 3719):
        hours.at = NOW + timedelta(seconds=seconds)
        assert [each.ended_at for each in eyes._merge(record, [])] == [None]
    hours.at = NOW + timedelta(seconds=3720)
    assert [each.ended_at for each in eyes._merge(record, [])] == [NOW + HOUR], (
        "no end is before its beginning"
    )


def rated(
    monkeypatch: pytest.MonkeyPatch,
    record: AwsGangRecord,
    *prices: tuple[datetime, int],
    fails: bool = False,
    looks: int = 1,
) -> tuple[AwsGangRecord, list[datetime]]:
    """The record after so many looks at these prices, and since when they were asked for."""
    asked: list[datetime] = []

    async def fetch(
        account: object, region: str, types: list[str], since: datetime, zone: str
    ) -> Any:
        asked.append(since)
        if fails:
            raise TryAgain("throttled")
        return [("t", zone, at, HourlyRate(micros)) for at, micros in prices]

    monkeypatch.setattr(module, "fetch_spot", fetch)
    hours = Hours()
    eyes = make_status(hours)
    for _ in range(looks):
        record = asyncio.run(eyes._rate(record))
        hours.at += timedelta(minutes=6)
    return record, asked


def test_a_spot_gang_is_billed_at_the_prices_of_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first was in force when it began; what came after its end is nobody's."""
    record = replace(RECORD, instances=NODES, ended_at=NOW - HOUR)
    prices = (
        (BEGAN - HOUR, 3),
        (BEGAN + HOUR, 3),
        (BEGAN + 1.5 * HOUR, 4),
        (NOW - HOUR, 5),
        (NOW, 9),
    )
    found, asked = rated(monkeypatch, record, *prices)
    assert found.rates == ((BEGAN, 3), (BEGAN + 1.5 * HOUR, 4), (NOW - HOUR, 5))
    assert asked == [BEGAN]


def test_prices_are_asked_for_now_and_then_and_once_more_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lives = replace(RECORD, instances=NODES)
    assert len(rated(monkeypatch, lives, (BEGAN, 3), looks=4)[1]) == 2
    assert len(rated(monkeypatch, replace(lives, ended_at=NOW - HOUR), (BEGAN, 3), looks=4)[1]) == 1
    for other in (replace(lives, spot=False), replace(lives, zone=None), replace(lives, tidy=True)):
        assert rated(monkeypatch, other, (BEGAN, 3)) == (other, [])


def test_prices_that_cannot_be_read_leave_those_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = replace(RECORD, instances=NODES, rates=((BEGAN, 3),))
    found, asked = rated(monkeypatch, known, fails=True, looks=3)
    assert (found, len(asked)) == (known, 3)
    assert rated(monkeypatch, known)[0] == known, "and so do none"


def test_the_price_of_a_type_is_in_dollars_an_hour_and_not_free() -> None:
    """A product has other prices too, such as what a reservation costs at once."""

    def priced(*prices: tuple[str, str, str]) -> Mapping[str, Any]:
        sizes = {
            str(at): {"unit": unit, "pricePerUnit": {money: usd}}
            for at, (unit, money, usd) in enumerate(prices)
        }
        return {
            "product": {"attributes": {"instanceType": "t"}},
            "terms": {"OnDemand": {"x": {"priceDimensions": sizes}}},
        }

    hourly = ("Hrs", "USD", "1.2340000000")
    for others in (
        (),
        (("Quantity", "USD", "999"),),
        (("Hrs", "USD", "0.0"),),
        (("Hrs", "CNY", "5"),),
    ):
        assert read_product(priced(*others, hourly)) == ("t", HourlyRate(1_234_000))
        assert read_product(priced(*others)) == ("t", None)


@pytest.mark.parametrize(
    ("kind", "vcpus", "spot", "nodes"),
    [
        ("p5.48xlarge", 192, False, 1),  # the quota of a generation overrides that of its family
        ("p4d.24xlarge", 96, False, 0),
        ("p5.48xlarge", 192, True, 0),
        ("g6.xlarge", 4, False, None),  # its quota is unknown
        ("m7i.large", 2, False, 1),
        ("m7i.xlarge", 4, False, 0),
    ],
)
def test_a_quota_limits_the_nodes_of_an_offer(
    kind: str, vcpus: int, spot: bool, nodes: int | None
) -> None:
    limits = {("p", False): 0.0, ("p5", False): 192.0, ("p", True): 0.0, ("m", False): 2.0}
    quotas = {
        key: Quota(provider="aws", name=str(key), family=key[0], unit="vCPUs", limit=most)
        for key, most in limits.items()
    }
    offer = Offer(
        provider="aws",
        region="us-east-1",
        instance_type=kind,
        vcpus=vcpus,
        memory_mib=1024,
        purchase=Purchase.SPOT if spot else Purchase.ON_DEMAND,
        rate=HourlyRate(1),
    )
    assert limit(offer, quotas).quota_nodes == nodes
