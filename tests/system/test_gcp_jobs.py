"""Jobs on Google Compute Engine, by the real command and server: machines of the stand-in really
boot their user data, and fetch the agent by HTTPS.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.contract.gcp_stand_in import GcpStandIn
from tests.contract.test_provider_gcp import PROOF, read_prices
from tests.contract.vm_cloud import Rented
from tests.system.trust import User
from tests.system.vm_jobs import BootedPlace, booted_at, run_digits, run_gang, user_of

from cavvy.domain.offers import Purchase
from cavvy.providers.gcp.cloud import GcpCloud

pytestmark = pytest.mark.system
NOTICE_S = 6.0  # Google's is 30 s


@pytest.fixture(scope="module")
def gcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedPlace]:
    # the stand-in knows the tokens, not the cloud behind it
    traits = replace(GcpCloud.traits, tokens=False)
    with booted_at(tmp_path_factory.mktemp("gcp"), traits, GcpStandIn) as place:
        assert isinstance(place.api, GcpStandIn)
        place.api.operation_time = timedelta(0)
        yield place


@pytest.fixture(scope="module")
def user(gcp: BootedPlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    root = tmp_path_factory.mktemp("user")
    assert isinstance(gcp.api, GcpStandIn)
    key = root / "key.json"
    key.write_text(gcp.api.make_key_file())
    table = (
        f"[providers.gcp]\nendpoint = '{gcp.api.url}'\nkey_file = '{key}'\n"
        "zones = 'us-central1-a'\nmachines = 'g2-standard-4'\n"
    )
    with user_of(root / "user", table, gcp.cloud) as user:
        yield user


@pytest.mark.proves(PROOF, "notice")
def test_the_digits_survive_a_preemption(gcp: BootedPlace, user: User) -> None:
    def preempt(machine: Rented) -> None:
        """Google announces the preemption on the machine, then stops and deletes the machine."""
        gcp.machines.machines[machine.id].metadata.set(preempted="TRUE")

        def take() -> None:
            if machine.id in [each.id for each in gcp.cloud.billed()]:
                gcp.api.preempted.add(machine.id)  # type: ignore[attr-defined]
                gcp.cloud.lose(machine.id)

        threading.Timer(NOTICE_S, take).start()

    (rate,) = [
        each.rate
        for each in read_prices("gcp")
        if (each.instance_type, each.region, each.purchase)
        == ("g2-standard-4", "us-central1", Purchase.SPOT)
    ]
    run_digits(gcp, user, "{gpu: L4, spot: only}", preempt, rate)
    assert "asked to leave" in user.said("digits")


@pytest.mark.proves(PROOF, "gang")
def test_two_nodes_talk_to_each_other(gcp: BootedPlace, user: User) -> None:
    run_gang(gcp, user, "{gpu: L4, spot: never}")
