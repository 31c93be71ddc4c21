"""The contract suite for clouds on the shared layer, on a cloud in memory."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cavvy.providers.base import GangSpec, Provider, TryAgain
from cavvy.providers.contract import FaultTests, LaunchFault, ProviderContract, ProviderUnderTest
from cavvy.providers.contract.memory_cloud import MemoryPlace
from cavvy.providers.vm.cloud import CloudTraits


class VmContract(ProviderContract, FaultTests):
    """Each scenario must leave nothing that is billed."""

    traits: CloudTraits

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[ProviderUnderTest]:
        place = MemoryPlace(self.traits, tmp_path)
        yield place
        assert place.cloud.billed() == []

    async def lose_reply(
        self, place: ProviderUnderTest, provider: Provider, gang: GangSpec
    ) -> None:
        assert isinstance(place, MemoryPlace)
        place.fail(0, LaunchFault.LOST)
        with suppress(TryAgain):
            await provider.launch(gang)
        assert place.cloud.fault is None
