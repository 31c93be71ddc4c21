"""Jobs on Oracle Cloud Infrastructure, by the real command and server: instances of the stand-in
really boot their user data, and fetch the agent by HTTPS.
"""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from tests.contract.oci_stand_in import OciStandIn, make_key, write_profile
from tests.contract.test_provider_oci import PROOF
from tests.system.trust import User
from tests.system.vm_jobs import (
    LONG_S,
    BootedPlace,
    booted_at,
    check_weights,
    moment,
    run_gang,
    start_digits,
    user_of,
)

from cavvy.providers.oci.cloud import OciCloud

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def oci(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedPlace]:
    with booted_at(tmp_path_factory.mktemp("oci"), OciCloud.traits, OciStandIn) as place:
        yield place


@pytest.fixture(scope="module")
def user(oci: BootedPlace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    root = tmp_path_factory.mktemp("user")
    write_profile(root / "config", make_key())
    table = f"[providers.oci]\nendpoint = '{oci.api.url}'\nkey_file = '{root}/config'\n"
    with user_of(root / "user", table, oci.cloud) as user:
        yield user


@pytest.mark.proves(PROOF, "spot")
def test_the_digits_survive_a_preemption(oci: BootedPlace, user: User) -> None:
    """OCI terminates the instance without a notice on it, and does not report the time."""
    start_digits(user, "{gpu: V100, spot: only}", pause_s=2)
    user.wait("digits", lambda job: job.attempts[-1].checkpoint_at is not None, LONG_S)
    (taken,) = oci.cloud.billed()
    oci.cloud.lose(taken.id)
    job = oci.wait(user, "digits")
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
