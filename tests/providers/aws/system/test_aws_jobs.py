"""Jobs on EC2, by the real command and server: instances really boot their user data, and fetch
the agent by HTTPS.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tests.ec2.bills import price_extras
from tests.ec2.machines import Ec2, ec2_at
from tests.ec2.rules import allow_only
from tests.providers.aws.contract.test_provider_aws import PROOF
from tests.system.digits import ARGUMENTS, train_undisturbed, write_digits
from tests.system.named_machines import play_machine
from tests.system.trust import User, user_at, wait_until
from tests.system.vm_jobs import GANG

from cavvy.domain.units import parse_rate
from cavvy.providers.aws.policy import make_policy

pytestmark = pytest.mark.system
# The example's training, a second an epoch, so that an interruption finds it at work; then a digest
# of its weights.
MINUTE = timedelta(minutes=1)
LONG_S = 150.0  # of a wait for a training, on a machine that is busy with others


@pytest.fixture
def ec2(tmp_path: Path) -> Iterator[Ec2]:
    with quick_ec2_at(tmp_path / "ec2") as ec2:
        yield ec2


@pytest.fixture
def user(ec2: Ec2, tmp_path: Path) -> Iterator[User]:
    with user_of(ec2, tmp_path / "user") as user:
        yield user


@contextmanager
def quick_ec2_at(root: Path) -> Iterator[Ec2]:
    """An EC2 whose states take a second each, under the policy that is printed."""
    with ec2_at(root) as ec2:
        ec2.cloud.rules.boot = timedelta(seconds=1)
        ec2.cloud.rules.hidden = timedelta(seconds=1)
        ec2.cloud.rules.shutting_down = timedelta(seconds=1)
        allow_only(ec2.cloud.rules, make_policy())
        yield ec2


@contextmanager
def user_of(ec2: Ec2, root: Path) -> Iterator[User]:
    """A user of that account; nothing of theirs is left."""
    with user_at(root) as user:
        user.settings(
            "[server]\ntls_listen = '10.99.0.254:7443'\n[providers.local]\nenabled = false\n"
            "[providers.aws]\nregions = 'us-east-1'\ninstances = 'g4dn.xlarge, m7i.large'\n"
            f"endpoint = '{ec2.endpoint}'\n"
        )
        user.variables = {
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "for the stand-in only",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        yield user
        user.cli("down", "--all", "--yes")
        wait_until(
            lambda: not ec2.cloud.left() or user.cli("gc", code=None) is None,
            lambda: str(ec2.cloud.left()),
            pause_s=0.5,
        )


def console(ec2: Ec2) -> str:
    """What the machines said, for a test that fails."""
    logs = [(each.name, each.log) for each in ec2.machines.values() if each.log.exists()]
    return "\n".join(f"--- {name}\n{log.read_text()[-3000:]}" for name, log in logs)


def test_a_job_runs(ec2: Ec2, user: User) -> None:
    name = user.submit(
        'name: hello\nresources: {gpu: T4}\nrun: echo "on $(hostname)"; id -u\n', "--yes"
    )
    try:
        job = user.ended(name)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{console(ec2)}") from error
    assert job.phase == "done"
    (life,) = ec2.cloud.history
    assert f"on {life.id}" in user.log(name)
    machine = ec2.machines[life.id]
    held_back = (machine.folder / "apt/99cavvy").read_text()  # upgrades, and waits for the lock
    assert 'Periodic::Enable "0"' in held_back
    assert 'Lock::Timeout "300"' in held_back
    assert "apt-daily-upgrade.timer" in (machine.folder / "systemctl").read_text()
    assert ec2.cloud.left().get("instances") is None


def test_a_live_check_rents_the_cheapest_machine_and_leaves_nothing(ec2: Ec2, user: User) -> None:
    told = user.json("check", "aws", "--live")
    assert (told["problem"], told["left"]) == ("", []), console(ec2)
    assert any("the agent of rank 0 reported in" in step["text"] for step in told["steps"])
    (life,) = ec2.cloud.history
    assert life.type == "m7i.large"
    check_bill(ec2, user, "check-aws")
    text = Path(told["recording"]).read_text()
    calls = [each["call"].split()[2] for each in json.loads(text)["calls"] if each["writes"]]
    assert calls[0] == "create_security_group"
    assert {"run_instances", "terminate_instances"} <= set(calls)
    for secret in ("AKIDEXAMPLE", "for the stand-in only", "END_OF_BOOT", "123456789012"):
        assert secret not in text
    assert ec2.cloud.left().get("instances") is None


def test_jobs_share_a_machine(ec2: Ec2, user: User) -> None:
    play_machine(user, "resources: {gpu: T4}", lambda: len(ec2.cloud.history))
    wait_until(lambda: ec2.cloud.left().get("instances") is None)


@pytest.mark.proves(PROOF, "notice")
def test_no_capacity_then_an_interruption_then_the_end(ec2: Ec2, user: User) -> None:
    """The first offer has no capacity, the second is taken back with notice, the third finishes:
    nothing is lost.

    The notice is of 20 s here; `benchmarks/ec2_notice.py` plays the same with the real two minutes.
    """
    be_interrupted(ec2, user, timedelta(seconds=20))


def be_interrupted(ec2: Ec2, user: User, notice: timedelta) -> None:
    """The story; weights and bill are checked at its end."""
    prices = [price for price in ec2.cloud.rules.spot if price.type == "g4dn.xlarge"]
    spot = sorted(prices, key=lambda price: parse_rate(price.usd))
    ec2.cloud.rules.stock["g4dn.xlarge", spot[0].zone, "spot"] = 0
    ec2.cloud.rules.notice = notice
    write_digits(user.work)
    name = "digits"
    task = user.task(
        "name: digits\nresources: {gpu: T4, spot: only}\nworkdir: .\ncheckpoint: {path: "
        "checkpoints, every: 2s}\nenv: {HOLDS: '1'}\n"
        f"run: exec {sys.executable} slow.py {' '.join(ARGUMENTS)}\n"
    )
    user.cli("run", "-d", "--yes", task)
    wait_for_log(user, name, "epoch   1/")
    (life,) = [each for each in ec2.cloud.history if each.lives]
    ec2.cloud.interrupt(life)
    try:
        user.wait(name, "done", LONG_S + notice.total_seconds())
    except AssertionError as error:
        raise AssertionError(f"{error}\n{console(ec2)}") from error
    job = user.ended(name)
    first, *outcomes = [attempt.outcome for attempt in job.attempts]
    # With a long notice a second gang is tried meanwhile, and the zone that has nothing may be
    # asked again.
    others = [outcome for outcome in outcomes if outcome != "capacity"]
    assert (first, others) == ("capacity", ["preempted", "succeeded"]), job.attempts
    check_bill(ec2, user, job.id)
    assert "traffic" in {charge["kind"] for charge in user.json("cost", job.id)["charges"]}
    log = user.log(name)
    assert log.count("asked to leave") == log.count("resumed at") == 1
    assert log.split("weights ")[1].split()[0] == train_undisturbed()


def check_bill(ec2: Ec2, user: User, job: str) -> None:
    """Every instance is charged for its life, in whole seconds as EC2 tells it, and at least for
    a minute.
    """
    wait_until(lambda: not user.api.nodes())  # a job ends before its gang, whose bill comes last
    charges = user.json("cost", job)["charges"]
    spot = {(price.type, price.zone): parse_rate(price.usd) for price in ec2.cloud.rules.spot}
    rates = {
        life.id: spot[life.type, life.zone]
        if life.market == "spot"
        else parse_rate(ec2.cloud.rules.on_demand[life.region, life.type])
        for life in ec2.cloud.history
    }
    lives = [
        (
            life.launched_at.replace(microsecond=0),
            life.shut_at.replace(microsecond=0),
            rates[life.id],
        )
        for life in ec2.cloud.history
        if life.shut_at is not None
    ]
    assert len(lives) == len(ec2.cloud.history)
    own = [charge for charge in charges if charge["kind"] == "node"]
    charged = [(moment(c["since"]), moment(c["until"])) for c in own]
    assert sorted(charged) == sorted((began, ended) for began, ended, _ in lives)
    exact = sum(rate.over(max(MINUTE, ended - began)).micros for began, ended, rate in lives)
    spans = zip(ec2.cloud.history, lives, strict=True)
    extras = [price_extras(ec2.cloud, life, began, ended) for life, (began, ended, _) in spans]
    exact += round(sum(extras))
    assert "disk" in {charge["kind"] for charge in charges}
    # what the agents uploaded is charged too; the machines do not tell it
    known = [charge["amount_micros"] for charge in charges if charge["kind"] != "traffic"]
    assert abs(sum(known) - exact) <= len(known)


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def test_a_lost_server_finds_its_work_done(ec2: Ec2, user: User) -> None:
    """The work goes on without it, and what it did is handed over when the server is there
    again.
    """
    name = user.submit("name: long\nresources: {gpu: T4}\nrun: sleep 6; echo did it\n", "--yes")
    user.wait(name, "running")
    user.kill_server()
    (machine,) = ec2.machines.values()
    exit_file = machine.folder / "var/cavvy/work/exit.json"
    wait_until(exit_file.exists, lambda: console(ec2))
    assert user.ended(name).phase == "done"
    assert "did it" in user.log(name)
    assert len(ec2.cloud.history) == 1


@pytest.mark.proves(PROOF, "self-end")
def test_a_lease_that_ends_ends_the_instance(ec2: Ec2, user: User) -> None:
    """The server is gone for good: the instance stops its work and shuts itself down, which
    terminates it.
    """
    name = user.submit(
        "name: alone\nresources: {gpu: T4}\nlimits: {unattended: 10s}\nrun: sleep 1000\ngrace: 1s\n",
        "--yes",
    )
    user.wait(name, "running")
    user.kill_server()
    (life,) = ec2.cloud.history
    wait_until(lambda: not life.lives, lambda: console(ec2))
    with ec2.cloud.lock:  # the end is a change of several fields
        code = life.instance.state_reason.code
    assert code == "Client.InstanceInitiatedShutdown"
    assert ec2.cloud.left().get("instances") is None


def wait_for_log(user: User, name: str, text: str) -> None:
    """Wait until the job's log says something."""
    user.wait(name, "running")
    wait_until(lambda: text in user.said(name), lambda: user.said(name))


@pytest.mark.proves(PROOF, "volumes")
def test_volumes_keep_what_jobs_write_and_scratch_goes(
    ec2: Ec2, user: User, tmp_path: Path
) -> None:
    """A volume is made by the first job and found by the second, in its zone; what is not to be
    kept goes by EC2.
    """
    data, spare_path = tmp_path / "mnt/data", tmp_path / "mnt/spare"
    runs = {
        "first": f"test ! -e {data}/note && echo once > {data}/note && touch {spare_path}/x",
        "second": f"cat {data}/note && test ! -e {spare_path}/x",
    }
    for name, run in runs.items():
        user.submit(
            f"name: {name}\nresources: {{gpu: T4}}\nvolumes:\n- {{name: data, path: {data}, size: "
            f"5GB}}\n"
            f"- {{name: spare, path: {spare_path}, size: 5GB, keep: false}}\nrun: {run}\n",
            "--yes",
        )
        try:
            job = user.ended(name)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{console(ec2)}") from error
        assert job.phase == "done", (user.log(name), console(ec2))
    assert "once" in user.log("second")
    assert len({life.zone for life in ec2.cloud.history}) == 1
    kept, *spare = ec2.cloud.disks.ever
    assert [kept.tags["Name"], *(each.tags["Name"] for each in spare)] == ["data", "spare", "spare"]
    wait_until(
        lambda: list(ec2.cloud.disks.known) == [kept.id] and kept.host is None,
        lambda: str(ec2.cloud.disks),
    )
    ec2.cloud.disks.delete(kept.id)


@pytest.mark.proves(PROOF, "gang")
def test_two_nodes_talk_to_each_other(ec2: Ec2, user: User) -> None:
    """Over the gang's own network."""
    (user.work / "gang.py").write_text(GANG)
    name = user.submit(
        "name: gang\nnodes: 2\nresources: {gpu: T4, spot: never}\nworkdir: .\n"
        f"run: exec {sys.executable} gang.py\n",
        "--yes",
    )
    try:
        job = user.wait(name, "done", LONG_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{user.log(name)}\n{console(ec2)}") from error
    assert "called from" in user.said(name, 0)
    assert "answered by rank 0 of 2" in user.said(name, 1)
    assert sorted(life.index for life in ec2.cloud.history) == [0, 1]
    check_bill(ec2, user, job.id)
