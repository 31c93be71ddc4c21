"""States of EC2 that only a real account shows otherwise: instances that end between two calls,
images whose terms nobody has accepted, and upgrades that start with the machine.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.providers.aws.contract import test_aws_requests as requests
from tests.providers.aws.contract.test_aws_requests import ProviderRig

from cavvy.domain.tasks import Volume, VolumeKind
from cavvy.domain.values import replace
from cavvy.providers.base import GangState, Refused

account, provider_rig = requests.account, requests.provider_rig


async def test_an_instance_that_ends_between_two_calls_leaves_no_scratch_volume(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    """EC2 attaches the volume, and refuses to delete it with the instance: IncorrectInstanceState.
    Then nothing but the next poll deletes the volume.
    """
    here = provider_rig()
    scratch = Volume(kind=VolumeKind.NAMED, source="s", path="/s", size_gib=8, keep=False)
    refused: list[str] = []

    def fault(service: str, action: str) -> str | None:
        if action == "ModifyInstanceAttribute":
            (life,) = here.cloud.history
            here.cloud.end(life, "Server.SpotInstanceTermination", "Spot instance termination")
            refused.append(action)
        return None

    gang = await here.gang("g4dn.xlarge", spot=True, volumes=(scratch,))
    await here.provider.launch(gang)
    here.cloud.rules.fault = fault
    await here.pass_time()
    (disk,) = here.cloud.disks.ever
    assert refused
    assert not disk.goes
    here.cloud.rules.fault = None
    for _ in range(3):
        await here.pass_time()
    (seen,) = await here.provider.gangs()
    assert (seen.state, seen.preempted) == (GangState.ENDED, True)
    assert here.cloud.left() == {}


async def test_an_image_whose_terms_were_not_accepted_is_refused_with_what_to_do(
    provider_rig: Callable[..., ProviderRig],
) -> None:
    here = provider_rig()
    gang = await here.gang("t3.medium")
    image = sorted(here.cloud.images(gang.offer.region))[-1]
    here.cloud.rules.unsubscribed = frozenset({image})
    named = replace(gang, options={"image": image})
    with pytest.raises(Refused, match=r"OptInRequired: .*has not accepted the terms"):
        await here.provider.launch(named)
    await here.pass_time()
    assert here.cloud.left() == {}
    assert here.cloud.history == []


async def test_upgrades_are_held_back_before_anything_is_installed(
    provider_rig: Callable[..., ProviderRig], tmp_path: Path
) -> None:
    """The user data's own lines, run by sh, with a stand-in for systemctl; apt reads the result."""
    here = provider_rig()

    async def scenario() -> str:
        await here.provider.launch(await here.gang("t3.medium"))
        script = here.cloud.history[0].user_data.decode()
        await here.clear()
        return script

    scripts: list[str] = []
    scripts.append(await scenario())
    before, begin, rest = scripts[0].partition("if [ -d /etc/apt/apt.conf.d ]")
    block, end, after = rest.partition("\nfi ")
    assert begin
    assert end
    assert "apt-get" not in before
    assert "cavvy_start && cavvy_fetch" in after  # the agent comes later
    parts = tmp_path / "apt.conf.d"
    parts.mkdir()
    (tmp_path / "bin").mkdir()
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    systemctl.chmod(0o755)
    text = (begin + block + end).replace("/etc/apt/apt.conf.d", str(parts))
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    subprocess.run(["/bin/sh", "-eu", "-c", text], check=True, env={"PATH": path})
    assert (tmp_path / "calls").read_text() == "stop apt-daily.timer apt-daily-upgrade.timer\n"
    (written,) = parts.iterdir()
    assert 'APT::Periodic::Enable "0";' in written.read_text()
    config = shutil.which("apt-config")
    if config is not None:
        dump = [config, "dump", "--format=%f=%v%n", "-c", str(written)]
        told = subprocess.run(dump, check=True, capture_output=True, text=True).stdout
        assert "APT::Periodic::Enable=0" in told.splitlines()
        assert "DPkg::Lock::Timeout=300" in told.splitlines()
