"""The made-up cloud keeps the contract, on virtual time."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.proofs import Proof

from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, GangState, Provider
from cavvy.providers.contract import ProviderContract, ProviderUnderTest
from cavvy.providers.fake import MANIFEST, FakeAccount
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import DEFAULT, CloudScript, FaultScript, RecordScript

PROOF = Proof("fake", False, "the simulated cloud of the tests, on virtual time")


class FakePlace:
    """One cloud for all installations; every gang is taken back after an hour, which is its end
    by itself.
    """

    def __init__(self, fault_script: FaultScript, records: RecordScript | None = None) -> None:
        self._clock = VirtualClock(datetime(2030, 1, 1, tzinfo=UTC))
        offers = tuple(replace(offer, capacity=250) for offer in DEFAULT.offers)
        self._script = CloudScript(
            offers=offers, launches=(fault_script,) * 20, records=records or RecordScript()
        )
        self._cloud: FakeCloud | None = None

    def provider(self, installation: str) -> FakeAccount:
        if self._cloud is None:  # a cloud is made inside the loop whose time it keeps
            self._cloud = FakeCloud(MANIFEST, self._script, self._clock.now)
        return FakeAccount(self._cloud, installation)

    async def settle(self) -> None:
        await self.wait(timedelta(minutes=2))

    async def end(self, gang: str) -> None:
        assert self._cloud is not None
        while any(seen.state is not GangState.ENDED for seen in await self._cloud.gangs(gang)):
            await self.wait(timedelta(minutes=1))

    async def wait(self, length: timedelta) -> None:
        await asyncio.sleep(length.total_seconds())


class FakeContract(ProviderContract):
    def run_scenario(self, scenario: Coroutine[Any, Any, None]) -> None:
        run_virtual(scenario)

    async def lose_reply(
        self, place: ProviderUnderTest, provider: Provider, gang: GangSpec
    ) -> None:
        """The caller goes away while its call is on the wire."""
        call = asyncio.create_task(provider.launch(gang))
        await asyncio.sleep(0.01)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call


class TestFake(FakeContract):
    @pytest.fixture
    def place(self) -> ProviderUnderTest:
        return FakePlace(FaultScript(preempted_after_s=3600))


class TestFakeThatQueuesAndHides(FakeContract):
    """The same where launches wait in the place's own queue and are not listed at first."""

    @pytest.fixture
    def place(self) -> ProviderUnderTest:
        return FakePlace(FaultScript(preempted_after_s=3600, queue_s=20, hidden_s=60))


class TestFakeThatRevises(FakeContract):
    revises = True

    @pytest.fixture
    def place(self) -> ProviderUnderTest:
        return FakePlace(FaultScript(preempted_after_s=3600), RecordScript(start_late_s=40.0))


class TestFakeThatForgets(FakeContract):
    forgets = True

    @pytest.fixture
    def place(self) -> ProviderUnderTest:
        return FakePlace(FaultScript(preempted_after_s=3600), RecordScript(remembers_s=0.0))


class TestFakeThatJitters(FakeContract):
    revises = True

    @pytest.fixture
    def place(self) -> ProviderUnderTest:
        return FakePlace(FaultScript(preempted_after_s=3600), RecordScript(jitter_s=0.5))
