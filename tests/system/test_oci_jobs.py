"""Jobs on Oracle Cloud Infrastructure, by the real command and server: instances of the stand-in
really boot their user data, and fetch the agent by HTTPS.
"""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.oci_stand_in import OciStandIn, make_key, write_profile
from tests.contract.test_provider_oci import PROOF
from tests.system.hosts import Lab
from tests.system.trust import User
from tests.system.vm_jobs import (
    LONG_S,
    check_weights,
    has_ended,
    moment,
    run_gang,
    start_digits,
    wait_for,
)
from tests.system.vm_places import BootedPlace, places_at, user_of

from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.oci.cloud import OciCloud

pytestmark = pytest.mark.system


class OciPlace(BootedPlace):
    """A tenancy, and a profile with the key of a user."""

    def __init__(self, lab: Lab, server: RestServer, root: Path) -> None:
        super().__init__(lab, OciCloud.traits)
        self.api = OciStandIn(self.cloud, server)
        write_profile(root / "config", make_key())
        self.table = f"[providers.oci]\nendpoint = '{self.api.url}'\nkey_file = '{root}/config'\n"


@pytest.fixture(scope="module")
def oci(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedPlace]:
    with places_at(tmp_path_factory.mktemp("oci"), OciPlace) as (place,):
        yield place


@pytest.fixture(scope="module")
def user(oci: BootedPlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with user_of(tmp_path_factory.mktemp("home") / "user", [oci]) as user:
        yield user


@pytest.mark.proves(PROOF, "spot")
def test_the_digits_survive_a_preemption(oci: BootedPlace, user: User) -> None:
    """OCI terminates the instance without a notice on it, and does not report the time."""
    start_digits(user, "{gpu: V100, spot: only}")
    (taken,) = oci.cloud.billed()
    oci.lose(taken)
    wait_for(oci, user, "digits")
    job = user.wait("digits", has_ended, LONG_S)
    assert [attempt.outcome for attempt in job.attempts] == ["preempted", "succeeded"]
    check_weights(user)
    charges = [each for each in user.json("cost", job.id)["charges"] if each["kind"] == "node"]
    spans = sorted((moment(each["since"]), moment(each["until"])) for each in charges)
    for (since, until), machine in zip(spans, oci.cloud.machines, strict=True):
        assert machine.at - since < timedelta(milliseconds=1)  # OCI reports milliseconds
        assert machine.ended is not None
        assert until > since


@pytest.mark.proves(PROOF, "gang")
def test_two_nodes_talk_to_each_other(oci: BootedPlace, user: User) -> None:
    run_gang(oci, user, "{gpu: A10, spot: never}")
