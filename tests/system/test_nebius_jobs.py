"""Jobs on Nebius AI Cloud, by the real command and server: machines of the stand-in really boot
their user data, and fetch the agent by HTTPS. The server calls the stand-in by gRPC, with Nebius's
own package.
"""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.test_provider_nebius import PROOF
from tests.system.hosts import Lab
from tests.system.nebius_apart import NebiusApart
from tests.system.trust import User
from tests.system.vm_jobs import run_digits, run_gang
from tests.system.vm_places import BootedPlace, places_at, user_of

from cavvy.domain.units import HourlyRate
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.nebius.cloud import NebiusCloud

pytestmark = pytest.mark.system

RATE = HourlyRate(1_250_000)  # the catalog's, of a preemptible machine with one H100


class NebiusPlace(BootedPlace):
    """A project, and an IAM token of a user."""

    api: NebiusApart

    def __init__(self, lab: Lab, server: RestServer, root: Path) -> None:
        super().__init__(lab, NebiusCloud.traits)
        self.api = NebiusApart(self.cloud, server)
        self.variables = {"NEBIUS_IAM_TOKEN": self.api.key}
        lines = [f"endpoint = '{self.api.url}'"]
        lines += [f"{name} = '{value}'" for name, value in self.api.settings.items()]
        self.table = "\n".join(["[providers.nebius]", *lines, ""])

    def take(self, machine: Rented) -> None:
        """Nebius stops the machine, and does not report why."""
        self.cloud.change(machine.id, off=True)
        self.machines.stop(machine.id)


@pytest.fixture(scope="module")
def nebius(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NebiusPlace]:
    with places_at(tmp_path_factory.mktemp("nebius"), NebiusPlace) as (place,):
        assert isinstance(place, NebiusPlace)
        yield place
        place.api.close()


@pytest.fixture(scope="module")
def user(nebius: NebiusPlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with user_of(tmp_path_factory.mktemp("home") / "user", [nebius]) as user:
        yield user


@pytest.mark.proves(PROOF, "spot")
def test_the_digits_survive_a_preemption(nebius: NebiusPlace, user: User) -> None:
    """Nebius stops the machine, which the server deletes. It reports times in whole seconds."""
    run_digits(nebius, user, "{gpu: H100, spot: only}", RATE, precision=timedelta(seconds=1))
    job = user.wait("digits", "done")
    assert [attempt.outcome for attempt in job.attempts] == ["preempted", "succeeded"]


@pytest.mark.proves(PROOF, "gang")
def test_two_nodes_talk_to_each_other(nebius: NebiusPlace, user: User) -> None:
    run_gang(nebius, user, "{gpu: H100, spot: never}")
