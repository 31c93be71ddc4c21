"""Jobs on the stand-ins of clouds whose machines boot, by the real command and server: a gang of two
nodes that talk to each other, and the digits training, which loses its machine once.
"""

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from tests.system.booting_cloud import BOOTS
from tests.system.digits import ARGUMENTS, train_undisturbed, write_digits
from tests.system.trust import User
from tests.system.vm_places import BootedPlace

from cavvy.client.wire import JobDetail
from cavvy.domain.units import HourlyRate
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.vm.cloud import BillStart

LONG_S = 240.0  # of a wait for a training, on a machine that is busy with others
# Rank 0 waits for the other rank, on the address and the port of the gang.
GANG = """
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


def wait_for(place: BootedPlace, user: User, name: str) -> JobDetail:
    """Wait until the job is done."""
    try:
        return user.wait(name, "done", LONG_S)
    except AssertionError as error:
        text = f"{error}\n{user.said(name)}\n{place.console()}"
        raise AssertionError(text) from error


def run_gang(place: BootedPlace, user: User, resources: str) -> None:
    """Two nodes boot their user data and talk to each other over the gang's network."""
    (user.work / "gang.py").write_text(GANG)
    task = user.task(
        f"name: gang\nnodes: 2\nresources: {resources}\nworkdir: .\n"
        f"run: exec {sys.executable} gang.py\n",
        "gang.yaml",
    )
    before = len(place.cloud.machines)
    user.cli("run", "-d", "--yes", task)
    wait_for(place, user, "gang")
    nodes = place.cloud.machines[before:]
    (other,) = [each for each in nodes if each.name.endswith("-1-2")]
    assert len(nodes) == 2
    assert f"called from {place.cloud.addresses[other.id]}" in user.said("gang", 0)
    assert "answered by rank 0 of 2" in user.said("gang", 1)


def start_digits(user: User, resources: str, holds: int = 1) -> None:
    """Start the digits training, of which the first runs wait to be interrupted, and wait until the
    server has a checkpoint of it.
    """
    write_digits(user.work)
    task = user.task(
        f"name: digits\nresources: {resources}\nworkdir: .\n"
        "checkpoint: {path: checkpoints, every: 1s}\n"
        f"env: {{HOLDS: '{holds}'}}\nrun: exec {sys.executable} slow.py {' '.join(ARGUMENTS)}\n"
    )
    user.cli("run", "-d", "--yes", task)
    user.wait("digits", lambda job: any(each.checkpoint_at for each in job.attempts), LONG_S)


def run_digits(
    place: BootedPlace,
    user: User,
    resources: str,
    rate: HourlyRate,
) -> None:
    """The cloud takes the training's machine back once. The training ends with the weights of an
    undisturbed training, and is billed at this rate; see `check_bill`.
    """
    before = len(place.cloud.machines)
    start_digits(user, resources)
    (machine,) = place.cloud.billed()
    place.take(machine)
    wait_for(place, user, "digits")
    job = user.wait("digits", has_ended, LONG_S)
    first, *outcomes = [attempt.outcome for attempt in job.attempts]
    assert first in ("preempted", "node"), job.attempts
    assert outcomes == ["succeeded"], job.attempts
    check_weights(user)
    free = place.cloud.traits.bill_starts is BillStart.RUNNING
    machines = place.cloud.machines[before:]
    cost = user.json("cost", job.id)
    boot = BOOTS if free else timedelta(0)
    check_bill(job, cost, machines, rate, boot=boot)


def has_ended(job: JobDetail) -> bool:
    """Whether all machines of the job are gone."""
    return all(attempt.phase == "ended" for attempt in job.attempts)


def check_weights(user: User) -> None:
    """The training was resumed once, and its weights are those of an undisturbed training."""
    log = user.log("digits")
    assert log.count("resumed at") == 1
    weights = train_undisturbed()
    assert log.split("weights ")[1].split()[0] == weights


def check_bill(
    job: JobDetail,
    cost: Mapping[str, Any],
    machines: Sequence[Rented],
    rate: HourlyRate,
    *,
    boot: timedelta,
) -> None:
    """Each machine is charged once. It is billed from its creation, or, if its cloud does not bill
    the `boot`, from the end of the boot. What the charges lack of this is stated as unsure.
    """
    charges = sorted((each for each in cost["charges"] if each["kind"] == "node"), key=_since)
    missing = 0
    for each, attempt, machine in zip(charges, job.attempts, machines, strict=True):
        since, until = _since(each), moment(each["until"])
        assert attempt.created_at <= since
        assert boot or since <= machine.at
        assert each["amount_micros"] == rate.over(until - since).micros
        assert machine.ended is not None
        own = [one for one in cost["charges"] if one["attempt"] == attempt.number]
        own = [one for one in own if one["kind"] != "traffic"]
        paid = sum(one["amount_micros"] for one in own)  # with the minimum charge
        missing += max(0, rate.over(machine.ended - machine.at - boot).micros - paid)
    assert missing <= cost["unsure_micros"], (cost, machines)


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _since(charge: Mapping[str, Any]) -> datetime:
    return moment(charge["since"])
