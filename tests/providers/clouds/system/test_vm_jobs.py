"""Jobs on clouds of virtual machines, by the real command and server: Google's machines really boot
their startup script and fetch the agent by HTTPS, and the server reaches those of Vast.ai and Runpod
by SSH. What differs between clouds is checked by the contract suite.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.providers.clouds.contract.test_provider_runpod import PROOF as RUNPOD_PROOF
from tests.providers.clouds.contract.test_provider_vast import PROOF as VAST_PROOF
from tests.providers.gcp.contract.test_provider_gcp import PROOF as GCP_PROOF
from tests.providers.gcp.contract.test_provider_gcp import read_prices
from tests.system.trust import User
from tests.system.vm_jobs import run_digits, run_gang
from tests.system.vm_places import (
    BootedPlace,
    GcpPlace,
    MakePlace,
    RunpodPlace,
    VastPlace,
    places_at,
    user_of,
)

from cavvy.domain.offers import Purchase
from cavvy.domain.units import HourlyRate

pytestmark = pytest.mark.system
Account = tuple[BootedPlace, User]


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    with account_at(tmp_path_factory, GcpPlace) as account:
        yield account


@contextmanager
def account_at(factory: pytest.TempPathFactory, kind: MakePlace) -> Iterator[Account]:
    with (
        places_at(factory.mktemp("cloud"), kind) as (place,),
        user_of(factory.mktemp("home") / "user", [place]) as user,
    ):
        yield place, user


@pytest.mark.proves(GCP_PROOF, "notice")
def test_the_digits_survive_a_preemption_with_notice(google: Account) -> None:
    place, user = google
    (rate,) = [
        each.rate
        for each in read_prices("gcp")
        if (each.instance_type, each.region, each.purchase)
        == ("g2-standard-4", "us-central1", Purchase.SPOT)
    ]
    run_digits(place, user, "{gpu: L4, spot: only}", rate)
    assert "asked to leave" in user.said("digits")


@pytest.mark.proves(GCP_PROOF, "gang")
def test_two_machines_that_boot_talk_to_each_other(google: Account) -> None:
    run_gang(*google, "{gpu: L4, spot: never}")


@pytest.mark.proves(VAST_PROOF, "spot")
def test_the_digits_survive_a_pause_of_their_machine(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Vast.ai pauses the instance without a notice; the server deletes it."""
    rate = HourlyRate(122_300 + 50_000)  # 110 % of the lowest bid, and the disk
    with account_at(tmp_path_factory, VastPlace) as (place, user):
        run_digits(place, user, "{gpu: RTX4090, spot: only}", rate)
        outcomes = [attempt.outcome for attempt in user.job("digits").attempts]
        assert outcomes == ["preempted", "succeeded"]


@pytest.mark.proves(RUNPOD_PROOF, "gang")
def test_two_machines_that_the_server_reaches_by_ssh_talk_to_each_other(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with account_at(tmp_path_factory, RunpodPlace) as (place, user):
        run_gang(place, user, "{gpu: A40}")
