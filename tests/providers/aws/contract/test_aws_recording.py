"""The calls of `cavvy check aws --live` are recorded without secrets, and the provider does the same
on the recording alone.
"""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
from tests.contract.aws_replay import ReplayedAws
from tests.providers.aws.contract import test_aws_requests as requests
from tests.providers.aws.contract.test_aws_requests import BASE, ProviderRig

from cavvy.providers.aws import MANIFEST
from cavvy.providers.aws.provider import AwsProvider
from cavvy.providers.base import GangSpec, GangState, ProviderContext, TryAgain
from cavvy.providers.recording import FOLDER, TAG
from cavvy.providers.registry import check_settings

account, provider_rig = requests.account, requests.provider_rig


async def test_a_recorded_launch_has_no_secrets_and_can_be_replayed(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    rig = provider_rig()

    async def play(provider: AwsProvider, gang: GangSpec) -> Sequence[GangState]:
        await provider.launch(gang)
        states = [await look(provider, gang.name) for _ in range(3)]
        await provider.remove(gang.name)
        return states + [await look(provider, gang.name) for _ in range(3)]

    async def look(provider: AwsProvider, name: str) -> GangState:
        rig.cloud.hours.jump(timedelta(minutes=1))
        rig.cloud.tick()
        (seen,) = await provider.gangs(name)
        return seen.state

    gang = await rig.gang("t3.medium", labels={TAG: "1"}, longest=timedelta(minutes=5))
    first = await play(rig.provider, gang)
    assert (first[-4], first[-1]) == (GangState.RUNNING, GangState.ENDED)
    await rig.clear()
    context = ProviderContext(
        installation="contract",
        home=rig.home / "replayed",
        settings=check_settings(MANIFEST, BASE),
        node_endpoint=requests.make_node_endpoint(),
        now=rig.cloud.hours.now,
    )
    context.home.mkdir()
    (file,) = rig.home.glob(f"*/{FOLDER}/*.json")
    text = file.read_text()
    for secret in ("AKIDEXAMPLE", "claim-", "END_OF_BOOT", "123456789012"):
        assert secret not in text
    replayed = ReplayedAws(context.settings, json.loads(text))
    assert await play(AwsProvider(MANIFEST, context, replayed), gang) == first
    assert replayed.calls.left() == []


async def test_the_recording_of_a_launch_without_an_instance_ends_with_the_removal(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    rig = provider_rig()
    gang = await rig.gang("t3.medium", labels={TAG: "1"}, longest=timedelta(minutes=5))
    rig.cloud.rules.fault = lambda _, action: "throttle" if action == "RunInstances" else None
    with pytest.raises(TryAgain):
        await rig.provider.launch(gang)
    rig.cloud.rules.fault = None
    await rig.provider.remove(gang.name)
    assert len(list(rig.home.glob(f"*/{FOLDER}/*.json"))) == 1
