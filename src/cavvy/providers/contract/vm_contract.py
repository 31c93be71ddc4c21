"""Runs the contract suite for `providers.vm`, the code that clouds share, on an in-memory cloud."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cavvy.domain.values import replace
from cavvy.providers.base import Feature, GangSpec, Provider, TryAgain
from cavvy.providers.contract import (
    ContractHarness,
    FaultTests,
    LaunchFault,
    ProviderContract,
    ProviderUnderTest,
)
from cavvy.providers.contract.accounts import AccountTests
from cavvy.providers.contract.harness import in_scenario
from cavvy.providers.contract.memory_cloud import MemoryPlace
from cavvy.providers.vm.cloud import CloudTraits


class VmContract(ProviderContract, FaultTests, AccountTests):
    """After a scenario, no resource that is billed may remain."""

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

    @in_scenario
    async def test_a_machine_prepares_an_engine_for_an_image(
        self, harness: ContractHarness
    ) -> None:
        """A machine installs a container engine if, and only if, its gang has an image. The scripts
        of all clouds are valid, with what the cloud's provider adds to them.
        """
        harness.needs(Feature.IMAGE)
        assert isinstance(harness.place, MemoryPlace)
        cloud = harness.place.cloud
        for word, image in (("plain", None), ("imaged", "docker.io/library/busybox:1")):
            begun = len(cloud.requests)
            gang = replace(await harness.spec(word), image=image)
            await harness.start(gang)
            await harness.remove(gang.name)
            scripts = [each for request in cloud.requests[begun:] for each in request.user_data]
            if set(scripts) == {"#!/bin/sh\n"}:  # the service has no user data for a script
                pytest.skip("the service, not a script on the machine, starts the container image")
            assert scripts
            assert all(("command -v podman" in each) == bool(image) for each in scripts)
            for each in scripts:
                assert find_mistakes(each) == ""


def find_mistakes(script: str) -> str:
    """Return what a shell finds wrong in a script that it only reads."""
    return subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True).stderr
