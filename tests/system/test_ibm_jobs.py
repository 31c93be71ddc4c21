"""Jobs on IBM Cloud, by the real command and server: instances of the stand-in really boot their
user data, and fetch the agent by HTTPS.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.ibm_stand_in import IbmStandIn
from tests.contract.test_provider_ibm import PROOF
from tests.system.hosts import Lab
from tests.system.trust import User
from tests.system.vm_jobs import LONG_S, check_weights, has_ended, run_gang, start_digits, wait_for
from tests.system.vm_places import BootedPlace, places_at, user_of

from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.ibm.cloud import IbmCloud

pytestmark = pytest.mark.system


class IbmPlace(BootedPlace):
    """An account with the API key of a user, and an image with a GPU's driver."""

    api: IbmStandIn

    def __init__(self, lab: Lab, server: RestServer, root: Path) -> None:
        super().__init__(lab, IbmCloud.traits)
        self.api = IbmStandIn(self.cloud, server)
        self.variables = {"IBMCLOUD_API_KEY": self.api.key}
        lines = [f"endpoint = '{self.api.url}'", "image = 'our-image'"]
        lines += [f"{name} = '{value}'" for name, value in self.api.settings.items()]
        self.table = "\n".join(["[providers.ibm]", *lines, ""])

    def take(self, machine: Rented) -> None:
        """IBM stops the instance, and reports why."""
        self.api.reasons[machine.id] = "stopped_by_preemption"
        self.cloud.change(machine.id, off=True)
        self.machines.stop(machine.id)


@pytest.fixture(scope="module")
def ibm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedPlace]:
    with places_at(tmp_path_factory.mktemp("ibm"), IbmPlace) as (place,):
        yield place


@pytest.fixture(scope="module")
def user(ibm: BootedPlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with user_of(tmp_path_factory.mktemp("home") / "user", [ibm]) as user:
        yield user


@pytest.mark.proves(PROOF, "spot")
def test_the_digits_survive_a_preemption(ibm: BootedPlace, user: User) -> None:
    """IBM stops the instance without a notice; the server deletes it."""
    start_digits(user, "{gpu: L4, spot: only}")
    (taken,) = ibm.cloud.billed()
    ibm.take(taken)
    wait_for(ibm, user, "digits")
    job = user.wait("digits", has_ended, LONG_S)
    assert [attempt.outcome for attempt in job.attempts] == ["preempted", "succeeded"]
    check_weights(user)
    charges = [each for each in user.json("cost", job.id)["charges"] if each["kind"] == "node"]
    assert len(charges) == 2
    assert all(machine.ended is not None for machine in ibm.cloud.machines)


@pytest.mark.proves(PROOF, "gang")
def test_two_nodes_talk_to_each_other(ibm: BootedPlace, user: User) -> None:
    run_gang(ibm, user, "{gpu: L4, spot: never}")
