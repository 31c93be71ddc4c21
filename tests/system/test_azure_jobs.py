"""Jobs on Azure, by the real command and server: machines of the stand-in really boot their user
data, and fetch the agent by HTTPS.
"""

from collections.abc import Iterator

import pytest
from tests.contract.azure_stand_in import SIZES
from tests.contract.test_provider_azure import PROOF
from tests.system.trust import User
from tests.system.vm_jobs import run_digits, run_gang
from tests.system.vm_places import AzurePlace, BootedPlace, places_at, user_of

from cavvy.domain.units import parse_rate

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedPlace]:
    with places_at(tmp_path_factory.mktemp("azure"), AzurePlace) as (place,):
        yield place


@pytest.fixture(scope="module")
def user(place: BootedPlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with user_of(tmp_path_factory.mktemp("home") / "user", [place]) as user:
        yield user


@pytest.mark.proves(PROOF, "notice")
def test_the_digits_survive_the_loss_of_their_machine(place: BootedPlace, user: User) -> None:
    run_digits(
        place, user, "{gpu: T4, spot: only}", parse_rate(str(SIZES["Standard_NC4as_T4_v3"][1]))
    )
    assert "asked to leave" in user.said("digits")


@pytest.mark.proves(PROOF, "gang")
def test_two_nodes_talk_to_each_other(place: BootedPlace, user: User) -> None:
    run_gang(place, user, "{gpu: T4, spot: never}")
