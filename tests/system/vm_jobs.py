"""Jobs on the stand-ins of clouds whose machines boot, by the real command and server: a gang of two
nodes that talk to each other, and the digits training, which loses its machine once.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.contract.rest_stand_in import RestServer, RestStandIn
from tests.contract.vm_cloud import Rented
from tests.system.booting_cloud import BootingCloud, Namespaces
from tests.system.digits import ARGUMENTS, train_undisturbed, write_digits
from tests.system.hosts import lab_at
from tests.system.trust import User, user_at, wait_until

from cavvy.client.wire import JobDetail
from cavvy.domain.units import HourlyRate
from cavvy.providers.vm.cloud import CloudTraits

LONG_S = 150.0  # of a wait for a training, on a machine that is busy with others
# Rank 0 waits for the other rank, on the address and the port of the gang.
_GANG = """
import os, socket, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["NODE_RANK"] == "0":
    with socket.create_server(("", place[1])) as server:
        line, other = server.accept()
        line.sendall(b"rank 0 of " + os.environ["NNODES"].encode())
        print("called from", other[0], flush=True)
else:
    while True:
        try:
            line = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.1)
    print("answered by", line.recv(100).decode(), flush=True)
"""


class BootedPlace:
    """An account of a cloud whose machines boot."""

    def __init__(self, cloud: BootingCloud, machines: Namespaces, api: RestStandIn) -> None:
        self.cloud, self.machines, self.api = cloud, machines, api

    def wait(self, user: User, name: str) -> JobDetail:
        """Wait until the job is done."""
        try:
            return user.wait(name, "done", LONG_S)
        except AssertionError as error:
            text = f"{error}\n{user.said(name)}\n{self.machines.console()}"
            raise AssertionError(text) from error


@contextmanager
def booted_at(
    root: Path, traits: CloudTraits, stand_in: type[RestStandIn]
) -> Iterator[BootedPlace]:
    """A cloud of which nothing is left afterwards; this thread is on its wire meanwhile."""
    with lab_at(root) as lab, lab.entered():
        machines, server = Namespaces(lab), RestServer()
        cloud = BootingCloud(traits, machines)
        api = stand_in(cloud, server)
        try:
            yield BootedPlace(cloud, machines, api)
        finally:
            cloud.close()
            server.close()
        assert api.bugs == []
        assert cloud.billed() == []


@contextmanager
def user_of(root: Path, tables: str, *clouds: BootingCloud) -> Iterator[User]:
    """A user of these clouds; nothing of theirs is left. `tables` are settings of providers."""
    with user_at(root) as user:
        user.settings(
            "[server]\ntls_listen = '10.99.0.254:7443'\n[providers.local]\nenabled = false\n"
            f"{tables}"
        )
        yield user
        user.cli("down", "--all", "--yes")
        left = [each.billed for each in clouds]
        wait_until(lambda: not any(billed() for billed in left), lambda: str([b() for b in left]))


def run_gang(place: BootedPlace, user: User, resources: str) -> None:
    """Two nodes boot their user data and talk to each other over the gang's network."""
    (user.work / "gang.py").write_text(_GANG)
    task = user.task(
        f"name: gang\nnodes: 2\nresources: {resources}\nworkdir: .\n"
        f"run: exec {sys.executable} gang.py\n",
        "gang.yaml",
    )
    before = len(place.cloud.machines)
    user.cli("run", "-d", "--yes", task)
    place.wait(user, "gang")
    nodes = place.cloud.machines[before:]
    (other,) = [each for each in nodes if each.name.endswith("-1-2")]
    assert len(nodes) == 2
    assert f"called from {place.cloud.addresses[other.id]}" in user.said("gang", 0)
    assert "answered by rank 0 of 2" in user.said("gang", 1)


def start_digits(user: User, resources: str, pause_s: float = 0.7) -> None:
    """Start the digits training, which pauses after each epoch, and wait until it is at work."""
    write_digits(user.work)
    task = user.task(
        f"name: digits\nresources: {resources}\nworkdir: .\n"
        "checkpoint: {path: checkpoints, every: 1s}\n"
        f"env: {{PAUSE_S: '{pause_s}'}}\nrun: exec {sys.executable} slow.py {' '.join(ARGUMENTS)}\n"
    )
    user.cli("run", "-d", "--yes", task)
    wait_for_log(user, "digits", "epoch   1/")


def run_digits(
    place: BootedPlace,
    user: User,
    resources: str,
    take: Callable[[Rented], object],
    rate: HourlyRate,
) -> None:
    """The training loses its machine once, by `take`, ends with the weights of an undisturbed
    training, and is billed at this rate.
    """
    before = len(place.cloud.machines)
    start_digits(user, resources)
    (machine,) = place.cloud.billed()
    take(machine)
    job = place.wait(user, "digits")
    first, *outcomes = [attempt.outcome for attempt in job.attempts]
    assert first in ("preempted", "lost"), job.attempts
    assert outcomes == ["succeeded"], job.attempts
    check_weights(user)
    nodes = [charge for charge in user.json("cost", job.id)["charges"] if charge["kind"] == "node"]
    check_bill(nodes, place.cloud.machines[before:], rate)


def check_weights(user: User) -> None:
    """The training was resumed once, and its weights are those of an undisturbed training."""
    log = user.log("digits")
    assert log.count("resumed at") == 1
    weights = train_undisturbed(user.work, user.root / "undisturbed")
    assert log.split("weights ")[1].split()[0] == weights


def check_bill(
    charges: Sequence[Mapping[str, Any]], machines: Sequence[Rented], rate: HourlyRate
) -> None:
    """The charges of nodes are the machines' lives, as the cloud knows them."""
    spans = sorted((moment(each["since"]), moment(each["until"])) for each in charges)
    assert spans == sorted((each.at, each.ended) for each in machines)
    for each, (since, until) in zip(sorted(charges, key=_since), spans, strict=True):
        assert each["amount_micros"] == rate.over(until - since).micros


def wait_for_log(user: User, name: str, text: str) -> None:
    """Wait until the job's log says something."""
    user.wait(name, "running")
    wait_until(lambda: text in user.said(name), lambda: user.said(name))


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _since(charge: Mapping[str, Any]) -> datetime:
    return moment(charge["since"])
