"""Jobs on Google Compute Engine, by the real command and server: machines of the stand-in really boot their user
data, and fetch the agent by HTTPS.
"""

from collections.abc import Iterator

import pytest
from tests.contract.test_provider_gcp import PROOF, read_prices
from tests.system.trust import User
from tests.system.vm_jobs import run_digits, run_gang
from tests.system.vm_places import BootedPlace, GcpPlace, places_at, user_of

from cavvy.domain.offers import Purchase

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedPlace]:
    with places_at(tmp_path_factory.mktemp("gcp"), GcpPlace) as (place,):
        yield place


@pytest.fixture(scope="module")
def user(place: BootedPlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with user_of(tmp_path_factory.mktemp("home") / "user", [place]) as user:
        yield user


@pytest.mark.proves(PROOF, "notice")
def test_the_digits_survive_the_loss_of_their_machine(place: BootedPlace, user: User) -> None:
    (rate,) = [
        each.rate
        for each in read_prices("gcp")
        if (each.instance_type, each.region, each.purchase)
        == ("g2-standard-4", "us-central1", Purchase.SPOT)
    ]
    run_digits(place, user, "{gpu: L4, spot: only}", rate)
    assert "asked to leave" in user.said("digits")


@pytest.mark.proves(PROOF, "gang")
def test_two_nodes_talk_to_each_other(place: BootedPlace, user: User) -> None:
    run_gang(place, user, "{gpu: L4, spot: never}")
