"""Jobs on Runpod, by the real command and server: pods of the stand-in run an OpenSSH server that
accepts the key of their request. The server starts the agents by SSH and listens at no address.
"""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from tests.contract.runpod_stand_in import GPUS
from tests.contract.test_provider_runpod import PROOF
from tests.system.trust import User
from tests.system.vm_jobs import run_digits, run_gang
from tests.system.vm_places import BootedPlace, RunpodPlace, places_at, user_of

from cavvy.domain.units import HourlyRate

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedPlace]:
    with places_at(tmp_path_factory.mktemp("runpod"), RunpodPlace) as (place,):
        yield place


@pytest.fixture(scope="module")
def user(place: BootedPlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with user_of(tmp_path_factory.mktemp("home") / "user", [place]) as user:
        yield user


def test_the_digits_survive_the_loss_of_their_pod(place: BootedPlace, user: User) -> None:
    rate = HourlyRate(round(GPUS["NVIDIA A40"][1] * 1_000_000))
    run_digits(place, user, "{gpu: A40}", rate, precision=timedelta(seconds=1))


@pytest.mark.proves(PROOF, "gang")
def test_two_nodes_talk_to_each_other(place: BootedPlace, user: User) -> None:
    run_gang(place, user, "{gpu: A40}")
