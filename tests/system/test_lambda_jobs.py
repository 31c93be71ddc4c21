"""Jobs on Lambda Cloud, by the real command and server: machines of the stand-in really boot their user
data, and fetch the agent by HTTPS.
"""

from collections.abc import Iterator

import pytest
from tests.contract.lambda_stand_in import TYPES
from tests.contract.test_provider_lambda import PROOF
from tests.system.trust import User
from tests.system.vm_jobs import run_digits, run_gang
from tests.system.vm_places import BootedPlace, LambdaPlace, places_at, user_of

from cavvy.domain.units import HourlyRate

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedPlace]:
    with places_at(tmp_path_factory.mktemp("lambda"), LambdaPlace) as (place,):
        yield place


@pytest.fixture(scope="module")
def user(place: BootedPlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with user_of(tmp_path_factory.mktemp("home") / "user", [place]) as user:
        yield user


def test_the_digits_survive_the_loss_of_their_machine(place: BootedPlace, user: User) -> None:
    run_digits(place, user, "{gpu: A10}", HourlyRate(TYPES["gpu_1x_a10"][1] * 10_000))


@pytest.mark.proves(PROOF, "gang")
def test_two_nodes_talk_to_each_other(place: BootedPlace, user: User) -> None:
    run_gang(place, user, "{gpu: A10}")
