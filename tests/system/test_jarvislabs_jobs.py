"""Jobs on JarvisLabs, by the real command and server: instances of the stand-in run an OpenSSH server
that accepts the key of the account. The server starts the agent by SSH and listens at no address.
"""

from collections.abc import Iterator

import pytest
from tests.contract.test_provider_jarvislabs import PROOF
from tests.system.trust import User
from tests.system.vm_jobs import run_digits
from tests.system.vm_places import BootedPlace, JarvislabsPlace, places_at, user_of

from cavvy.domain.units import HourlyRate

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedPlace]:
    with places_at(tmp_path_factory.mktemp("jarvislabs"), JarvislabsPlace) as (place,):
        yield place


@pytest.fixture(scope="module")
def user(place: BootedPlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with user_of(tmp_path_factory.mktemp("home") / "user", [place]) as user:
        yield user


@pytest.mark.proves(PROOF, "spot")
def test_the_digits_survive_a_preemption(place: BootedPlace, user: User) -> None:
    rate = HourlyRate(290_000)
    run_digits(place, user, "{gpu: L4, spot: only}", rate, dated=False)
    outcomes = [attempt.outcome for attempt in user.job("digits").attempts]
    assert outcomes == ["preempted", "succeeded"]
