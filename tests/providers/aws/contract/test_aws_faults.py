"""What EC2 answers on bad days: each fault under its own name, lists of many pages, what does
not show yet, and quotas that cannot be read.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
from tests.ec2.cloud import Cloud
from tests.ec2.direct import Direct
from tests.ec2.rules import Reserved, allow_only
from tests.ec2.server import Front, served
from tests.providers.aws.contract import test_aws_requests as requests
from tests.providers.aws.contract.test_aws_requests import BASE, REGION, ProviderRig, play
from tests.waits import PATIENCE_S

from cavvy.agent.config import ConfigFields, read_record
from cavvy.agent.documents import NoticeAddress
from cavvy.agent.notice_poll import find_events, seconds_left
from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import NetworkNeed, Volume, VolumeKind
from cavvy.domain.values import replace
from cavvy.providers.aws import MANIFEST, NOTICES, market
from cavvy.providers.aws.account import AwsAccount, Json, in_thread
from cavvy.providers.aws.launch import make_token
from cavvy.providers.aws.policy import make_policy
from cavvy.providers.base import GangState, NoCapacity, ProviderError, Refused, TryAgain
from cavvy.providers.notices import make_notice_fields
from cavvy.providers.registry import check_settings

account, provider_rig = requests.account, requests.provider_rig
DATA = Volume(kind=VolumeKind.NAMED, source="data", path="/d", size_gib=8)


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        ("InsufficientVolumeCapacity: none is free", NoCapacity, "none is free"),
        ("VolumeTypeNotAvailableInZone: no gp3", NoCapacity, "no gp3"),
        ("InvalidZone.NotFound: no such zone", NoCapacity, "no such zone"),
        ("VolumeLimitExceeded: too much", Refused, "Service Quotas"),
        ("UnauthorizedOperation: no", Refused, "check aws --policy"),
        ("IdempotentParameterMismatch: another size", Refused, "another size"),
        ("throttle", TryAgain, "RequestLimitExceeded: [^;]*$"),
    ],
)
async def test_a_volume_that_cannot_be_made_is_told_as_that(
    provider_rig: Callable[..., ProviderRig], fault: str, error: type[ProviderError], told: str
) -> None:
    here = provider_rig()
    here.cloud.rules.fault = lambda service, action: fault if action == "CreateVolume" else None
    gang = await here.gang("g4dn.xlarge", volumes=(DATA,))
    with pytest.raises(
        error, match=rf"^CreateVolume of data, 8 GiB of gp3 in us-east-1\w: .*{told}"
    ):
        await here.provider.launch(gang)
    assert here.cloud.history == []
    here.cloud.rules.fault = None
    await here.clear()


async def test_the_rights_that_are_missing_are_named(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """By dry runs, which leave nothing behind."""
    here = provider_rig()
    policy = make_policy()
    for action in ("ec2:DescribeRouteTables", "ec2:CreateVolume", "ec2:RunInstances"):
        policy = policy.replace(f'"{action}"', '"ec2:Nothing"')
    label = f"rights in {REGION}"
    facts = dict(await here.provider.whoami())
    assert facts[label] == "EC2 allows all calls that a dry run can check"
    allow_only(here.cloud.rules, policy)
    facts = dict(await here.provider.whoami())
    refused = "refused: ec2:DescribeRouteTables, ec2:RunInstances, ec2:CreateVolume; "
    assert facts[label].startswith(refused)
    allow_only(here.cloud.rules, policy.replace("ec2:DescribeInstanceTypes", "ec2:Nothing"))
    with pytest.raises(Refused, match=r"refused: ec2:DescribeInstanceTypes, ec2:DescribeRoute"):
        await here.make("other").whoami()
    assert here.cloud.left() == {}


async def test_who_has_no_credentials_is_told_where_they_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(Refused, match="Unable to locate credentials; set AWS_PROFILE"):
        await AwsAccount({"endpoint": "http://127.0.0.1:9"}).ask(
            REGION, "get_caller_identity", service="sts"
        )


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("RunInstances", "InvalidGroup.NotFound"),
        ("RunInstances", "InvalidPlacementGroup.Unknown"),
        ("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound"),
        ("AuthorizeSecurityGroupEgress", "InvalidGroup.NotFound"),
    ],
)
async def test_what_was_just_made_and_does_not_show_yet_is_waited_for(
    provider_rig: Callable[..., ProviderRig], action: str, code: str
) -> None:
    here, left = provider_rig(), [1]

    def fault(service: str, asked: str) -> str | None:
        if asked == action and left[0]:
            left[0] -= 1
            return f"{code}: The thing 'x' does not exist"
        return None

    gang = await here.gang("p4d.24xlarge", nodes=2)
    here.cloud.rules.fault = fault
    with pytest.raises(TryAgain, match=r"not listed yet|has just created"):
        await here.provider.launch(gang)
    await here.provider.launch(gang)
    assert len(here.cloud.history) == 2
    assert here.cloud.groups.made == 1
    await here.clear()


async def test_a_group_that_the_user_names_and_is_not_there_is_refused(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig(security_groups="sg-00000000000000000")
    with pytest.raises(Refused, match="sg-00000000000000000"):
        await here.provider.launch(await here.gang("t3.medium"))
    await here.clear()


async def test_quotas_that_cannot_be_read_again_stay_as_they_were(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    rules = here.cloud.rules
    rules.vcpu_quota["P", "on-demand"] = 0

    async def offered() -> set[str]:
        return {
            each.instance_type
            for each in await here.provider.offers()
            if each.purchase is Purchase.ON_DEMAND and each.capacity != 0
        }

    assert "p4d.24xlarge" not in await offered()
    assert here.provider.silent() == []
    rules.fault = lambda service, action: "throttle" if action == "ListServiceQuotas" else None
    here.cloud.hours.jump(timedelta(minutes=25))
    assert "p4d.24xlarge" not in await offered()
    (stale,) = here.provider.silent()
    assert (
        f"{REGION}: the quotas are 25 minutes old and cannot be read again: ListServiceQuotas"
        in stale
    )
    facts = dict(await here.provider.whoami())
    assert facts[f"Running On-Demand P instances in {REGION}"] == "0 vCPUs"
    assert "cannot be read" in facts[f"quotas in {REGION}"]
    assert await here.provider.quotas()
    assert here.provider.untold_quotas() == [stale]
    rules.fault, rules.vcpu_quota["P", "on-demand"] = None, 96
    here.cloud.hours.jump(timedelta(minutes=2))  # it asks again sooner than it would
    assert "p4d.24xlarge" in await offered()
    assert here.provider.silent() == []


@pytest.mark.parametrize("code", ["AuthFailure", "OptInRequired"])
@pytest.mark.usefixtures("account")  # its credentials
async def test_a_region_that_the_account_has_not_enabled_is_reported_as_such(
    tmp_path: Path, code: str
) -> None:
    other = "eu-west-2"
    cloud, table = Cloud(regions=(REGION, other)), {"regions": f"{other}, {REGION}"}
    direct = Direct(check_settings(MANIFEST, {**BASE, **table}), Front(cloud))
    here = ProviderRig(cloud, direct, tmp_path, table)
    cloud.rules.disabled, cloud.rules.disabled_code = frozenset({other}), code
    assert {offer.region for offer in await here.provider.offers()} == {REGION}
    (problem,) = here.provider.silent()
    assert "has not enabled the region eu-west-2" in problem
    assert "enable-region --region-name eu-west-2" in problem
    assert {quota.region for quota in await here.provider.quotas()} == {REGION}
    (untold,) = here.provider.untold_quotas()
    assert untold.startswith("eu-west-2: ")
    cloud.rules.disabled = frozenset()
    offers = await here.provider.offers()
    assert here.provider.silent() == []
    assert {offer.region for offer in offers} == {REGION, other}
    assert {quota.region for quota in await here.provider.quotas()} == {REGION, other}
    assert here.provider.untold_quotas() == []


async def test_a_region_that_hangs_hides_no_other(
    provider_rig: Callable[..., ProviderRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is asked no second time while the first question is open."""
    here = provider_rig()
    monkeypatch.setattr(market, "_PATIENCE_S", 0.05)
    call, hung = AwsAccount.call, list[str]()

    async def regions(_: AwsAccount) -> tuple[str, ...]:
        return REGION, "eu-west-1"

    async def hang(self: AwsAccount, region: str, operation: str, **arguments: object) -> Json:
        if region == "eu-west-1":
            hung.append(operation)
            await asyncio.Event().wait()
        return await call(self, region, operation, **arguments)

    monkeypatch.setattr(AwsAccount, "call", hang)
    monkeypatch.setattr(AwsAccount, "regions", regions)
    async with asyncio.timeout(60):
        facts = await here.provider.whoami()
    assert ("silent", "eu-west-1: no answer from eu-west-1 within 0 s") in facts
    assert {offer.region for offer in await here.provider.offers()} == {REGION}
    assert len(hung) == 1
    await here.provider.close()


async def test_spot_prices_that_cannot_be_read_leave_nothing_undone(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """Reservations are read after them, and what is known of types is enough for a launch."""
    here = provider_rig(reservations="cr-0123456789abcdef0")
    held = Reserved(
        id="cr-0123456789abcdef0",
        type="p5.48xlarge",
        zone=here.cloud.rules.zones[REGION][1],
        total=2,
    )
    here.cloud.rules.reserved.append(held)
    here.cloud.rules.fault = lambda service, action: (
        "throttle" if action == "DescribeSpotPriceHistory" else None
    )
    assert [each.capacity for each in await here.provider.offers() if held.id in each.source] == [2]
    (silent,) = here.provider.silent()
    assert "DescribeSpotPriceHistory" in silent
    await here.provider.launch(await here.gang("t3.medium"))
    assert dict(await here.provider.whoami())[f"Running On-Demand P instances in {REGION}"]
    await here.clear()


async def test_lists_of_many_pages_are_read_to_their_end(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    whole, paged = provider_rig(), provider_rig()

    async def told(here: ProviderRig) -> tuple[set[str], set[str]]:
        await here.provider.launch(await here.gang("p4d.24xlarge", nodes=2))
        for name in ("rm-b-1", "rm-c-1"):
            await here.provider.launch(
                await here.gang("g4dn.xlarge", name=name, volumes=(DATA,) if "b" in name else ())
            )
        await here.pass_time()
        seen = {
            each.name for each in await here.provider.gangs() if each.state is GangState.RUNNING
        }
        places = {
            name for each in await here.provider.volumes() for name in each.names if name == "data"
        }
        facts = await here.provider.whoami()
        await here.clear_but_volumes()
        return {each.key for each in await here.provider.offers()}, seen | places | {
            name for name, _ in facts
        }

    account_of = paged._account.front
    paged.cloud.rules.page = 1
    account_of.cloud = whole.cloud
    expected = await told(whole)
    account_of.cloud = paged.cloud
    assert await told(paged) == expected
    asked = [action for action, params in paged.cloud.requests if "NextToken" in params]
    assert {"DescribeInstances", "DescribeInstanceTypes", "DescribeSpotPriceHistory"} <= set(asked)
    assert "DescribeInstanceTypeOfferings" in asked


async def test_a_list_that_does_not_end_is_refused(
    provider_rig: Callable[..., ProviderRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = provider_rig()
    monkeypatch.setattr("cavvy.providers.aws.account._MOST_PAGES", 3)
    here.cloud.rules.page = 1
    with pytest.raises(Refused, match="too many pages"):
        await here.provider.offers()


async def test_calls_that_hang_do_not_hold_the_loop() -> None:
    """boto3 blocks; its calls have threads of their own, so that many that hang leave the rest
    of the server its.
    """
    gate = threading.Event()
    hung = [asyncio.create_task(in_thread(gate.wait)) for _ in range(64)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.to_thread(lambda: "others go on") == "others go on"
    finally:
        gate.set()
        await asyncio.gather(*hung)


def test_a_node_is_never_asked_for_where_its_type_is_not(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """On-demand offers are of the whole region: volumes and subnets bind them to zones, and the
    type to its own.
    """
    here = provider_rig()
    zones, backend = here.cloud.rules.zones[REGION], here.cloud.backend(REGION)
    here.cloud.rules.missing |= {("g4dn.xlarge", zone) for zone in zones if zone != zones[2]}
    here.cloud.disks.make(REGION, {"AvailabilityZone": zones[0], "Size": "8"}, {"Name": "far"})
    here.cloud.hours.jump(timedelta(seconds=5))
    vpc = backend.create_vpc("10.78.0.0/16")
    wide = backend.create_subnet(vpc.id, "10.78.0.0/20", availability_zone=zones[0])
    narrow = backend.create_subnet(vpc.id, "10.78.64.0/26", availability_zone=zones[2])

    async def scenario() -> None:
        far = replace(DATA, source="far", size_gib=None)
        with pytest.raises(
            NoCapacity,
            match=f"EC2 does not offer g4dn.xlarge in {zones[0]}; it is offered in {zones[2]}",
        ):
            await here.provider.launch(
                await here.gang("g4dn.xlarge", name="rm-b-1", volumes=(far,))
            )
        with pytest.raises(NoCapacity, match=f"the subnet {wide.id} is not in {zones[2]}"):
            await here.provider.launch(
                await here.gang("g4dn.xlarge", name="rm-c-1", network=NetworkNeed(subnet=wide.id))
            )
        await here.provider.launch(
            await here.gang("g4dn.xlarge", name="rm-d-1", network=NetworkNeed(vpc=vpc.id))
        )
        assert here.launch()["SubnetId"] == narrow.id
        await here.provider.launch(await here.gang("g4dn.xlarge", name="rm-e-1", volumes=(DATA,)))
        assert here.launch()["Placement.AvailabilityZone"] == zones[2]
        assert here.cloud.disks.ever[-1].zone == zones[2]
        assert [action for action, _ in here.cloud.requests].count("RunInstances") == 2
        await here.clear_but_volumes()

    try:
        play(scenario)
    finally:
        backend.delete_subnet(wide.id)
        backend.delete_subnet(narrow.id)
        backend.delete_vpc(vpc.id)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_launch_that_fails_late_is_no_capacity_and_costs_nothing(
    provider_rig: Callable[..., ProviderRig], lost: bool
) -> None:
    """EC2 accepts the request and ends the pending instances. If the reply was lost as well, the
    repeated request is refused with IdempotentInstanceTerminated.
    """
    here = provider_rig()
    gang = await here.gang("g4dn.xlarge", spot=True, nodes=2)
    zone = gang.offer.zone or ""
    here.cloud.rules.fails_late = {zone: "Server.InsufficientInstanceCapacity"}
    if lost:
        here.cloud.rules.fault = lambda service, action: (
            "lose" if action == "RunInstances" else None
        )
        with pytest.raises(TryAgain):
            await here.provider.launch(gang)
        here.cloud.rules.fault = None
        for _ in range(2):
            here.cloud.hours.jump(timedelta(minutes=1))
            here.cloud.tick()
    await here.provider.launch(gang)
    for seen in await here.provider.gangs():  # pending, if its reply was not lost
        assert [node.started_at for node in seen.nodes] == [None, None]
    await here.pass_time()
    await here.pass_time()
    (seen,) = await here.provider.gangs()
    assert (seen.state, seen.no_capacity, seen.preempted) == (GangState.ENDED, True, False)
    assert [node.started_at for node in seen.nodes] == [None, None]
    assert seen.reason == "Server.InsufficientInstanceCapacity: The launch failed"
    assert len(here.cloud.history) == 2
    await here.clear()


async def test_an_instance_is_billed_from_its_launch_once_it_runs(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """EC2 charges nothing for an instance that is pending."""
    here = provider_rig()
    await here.provider.launch(await here.gang("g4dn.xlarge"))
    (seen,) = await here.provider.gangs()
    assert (seen.state, seen.nodes[0].started_at) == (GangState.STARTING, None)
    await here.pass_time()
    (seen,) = await here.provider.gangs()
    launched_at = here.cloud.history[0].launched_at.replace(microsecond=0)  # as EC2 writes it
    assert (seen.state, seen.nodes[0].started_at) == (GangState.RUNNING, launched_at)
    await here.clear()
    (seen,) = await here.provider.gangs()
    assert seen.nodes[0].started_at == launched_at


async def test_an_instance_that_ec2_could_not_start_for_its_disk_is_not_billed(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    gang = await here.gang("g4dn.xlarge", spot=True)
    here.cloud.rules.fails_late = {gang.offer.zone or "": "Client.VolumeLimitExceeded"}
    await here.provider.launch(gang)
    await here.pass_time()
    (seen,) = await here.provider.gangs()
    assert (seen.state, seen.no_capacity) == (GangState.ENDED, False)
    assert [node.started_at for node in seen.nodes] == [None]
    await here.clear()


def test_a_request_is_named_after_its_gang_and_installation() -> None:
    """EC2 grants what bears one name once, to whoever asks: 64 characters at most."""
    names = {make_token(mark, gang) for mark in ("ours", "theirs") for gang in ("rm-a-1", "rm-a-2")}
    assert len(names) == 4
    assert make_token("ours", "rm-a-1") in names
    assert all(len(name) <= 64 for name in names)


def test_reads_that_are_throttled_are_asked_again_beside_the_loop(
    provider_rig: Callable[..., ProviderRig], account: requests.Direct
) -> None:
    """By the SDK, with pauses in its thread; what changes something is asked once: the control
    plane looks first.
    """
    here, asked = provider_rig(), Counter[str]()

    def fault(service: str, action: str) -> str | None:
        asked[action] += 1
        return "throttle" if asked[action] <= 2 else None

    async def scenario(endpoint: str) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        real = AwsAccount({**BASE, "endpoint": endpoint})
        beside = asyncio.create_task(tick())
        await asyncio.sleep(0)
        assert await real.items(REGION, "describe_volumes") == []
        assert (asked["DescribeVolumes"], ticks > 10) == (3, True)
        beside.cancel()
        with pytest.raises(TryAgain, match="RequestLimitExceeded"):
            await real.ask(REGION, "delete_volume", VolumeId="vol-1")
        assert asked["DeleteVolume"] == 1

    here.cloud.rules.fault = fault
    with served(account.front) as endpoint:
        asyncio.run(scenario(endpoint))


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ({"action": "terminate", "time": "2030-01-01T00:01:40Z"}, 100),
        ({"action": "stop", "time": "2030-01-01T00:01:40Z"}, 100),
        ({"action": "hibernate", "time": "2030-01-01T00:00:00Z"}, 0),
        ({"action": "terminate"}, 120),
        ({"action": "something new", "time": "2030-01-01T00:01:40Z"}, None),
    ],
)
def test_what_the_metadata_service_announces(
    told: Mapping[str, str], seconds: float | None
) -> None:
    """Also what Cavvy never asks for: another's setting of the account may stop or hibernate
    instead.
    """
    fields = ConfigFields(make_notice_fields(NOTICES)[0], "notices[0]")
    notice = read_record(NoticeAddress, fields)
    events = find_events(notice, json.dumps(told).encode(), None)
    assert len(events) == (seconds is not None)
    for event in events:
        assert seconds_left(notice, event, "Tue, 01 Jan 2030 00:00:00 GMT") == seconds
