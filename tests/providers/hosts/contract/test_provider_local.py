"""The local provider keeps the contract, with real processes."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.contract.stand_in import STAND_IN, StandInPlace
from tests.proofs import Proof

from cavvy.providers.base import GangState, Provider, ProviderContext
from cavvy.providers.contract import ProviderContract, ProviderUnderTest
from cavvy.providers.contract.harness import ContractHarness, in_scenario
from cavvy.providers.hosts.machine import this_machine
from cavvy.providers.local import MANIFEST
from cavvy.providers.local.provider import LocalProvider

PROOF = Proof("local", True, "processes of this machine")


class LocalPlace(StandInPlace):
    """This machine with a stand-in for the agent; `later` shifts the providers' clock."""

    pause_s = 0.01

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
        await self.until_ended(gang, self.providers)


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
        gang = await harness.launched("unfinished")
        assert [each.name for each in (tmp_path / "agents").iterdir()] == [gang.name]
