"""The local provider keeps the contract, with real processes."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.contract.stand_in import STAND_IN
from tests.proofs import Proof
from tests.waits import patience

from cavvy.providers.base import GangState, Provider, ProviderContext
from cavvy.providers.contract import ProviderContract, ProviderUnderTest
from cavvy.providers.contract.harness import ContractHarness, in_scenario
from cavvy.providers.hosts.machine import this_machine
from cavvy.providers.local import MANIFEST
from cavvy.providers.local.provider import LocalProvider

PROOF = Proof("local", True, "processes of this machine")


class LocalPlace:
    """This machine with a stand-in for the agent; `later` shifts the providers' clock."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.later = timedelta(0)
        self.providers: list[Provider] = []

    def provider(self, installation: str) -> LocalProvider:
        context = ProviderContext(
            installation=installation,
            home=self.home,
            settings={"price_usd_hr": 3.6},
            agent_command=(sys.executable, "-I", "-S", str(STAND_IN)),
            now=lambda: datetime.now(UTC) + self.later,
        )
        provider = LocalProvider(MANIFEST, context, this_machine(self.home))
        self.providers.append(provider)
        return provider

    async def settle(self) -> None:
        async with patience():
            while not await self._settled():
                await asyncio.sleep(0.01)

    async def _settled(self) -> bool:
        for provider in self.providers:
            for gang in await provider.gangs():
                up = [
                    (self.home / "agents" / gang.name / str(node.rank) / "lock").exists()
                    for node in gang.nodes
                ]
                if gang.state is not GangState.ENDED and (gang.reason or not all(up)):
                    return False
        return True

    async def end(self, gang: str) -> None:
        for rank in (self.home / "agents" / gang).iterdir():
            if rank.is_dir():
                (rank / "finish").touch()
        async with patience():
            for provider in self.providers:
                while any(seen.state is not GangState.ENDED for seen in await provider.gangs(gang)):
                    await asyncio.sleep(0.01)

    async def wait(self, length: timedelta) -> None:
        self.later += length


class TestLocal(ProviderContract):
    crowd = 40  # processes of this machine

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[ProviderUnderTest]:
        yield LocalPlace(tmp_path)
        for entry in os.scandir("/proc"):
            with suppress(OSError):
                left = str(tmp_path).encode() in Path(entry.path, "cmdline").read_bytes()
                assert not left, f"process {entry.name} was left behind"

    @in_scenario
    async def test_an_unfinished_launch_leaves_no_folder(
        self, harness: ContractHarness, tmp_path: Path
    ) -> None:
        """A server that is killed during a launch leaves one, with a token in it."""
        (tmp_path / "agents" / ".new-earlier" / "0").mkdir(parents=True)
        gang = await harness.spec("unfinished")
        await harness.launch(gang)
        assert [each.name for each in (tmp_path / "agents").iterdir()] == [gang.name]
