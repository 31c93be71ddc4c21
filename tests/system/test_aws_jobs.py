"""Jobs on EC2, by the real command and server: instances really boot their user data, and fetch the agent by HTTPS."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tests.ec2.machines import Ec2, ec2_at
from tests.ec2.rules import allow_only
from tests.system.trust import PATIENCE_S, User, user_at, wait_until

from remuda.domain.units import parse_rate
from remuda.providers.aws.policy import make_policy

pytestmark = pytest.mark.system
# The example's training, a second an epoch, so that an interruption finds it at work; then a digest of its weights.
SLOW = """
import hashlib, os, sys, time
import torch
torch.set_num_threads(1)
sys.path.insert(0, ".")
import train
tell = train.Training.tell
def slowly(self, loss):
    tell(self, loss)
    time.sleep(float(os.environ.get("PAUSE_S", "1")))
train.Training.tell = slowly
code = train.main()
if code == 0:
    model = torch.load(os.environ["REMUDA_CHECKPOINT_DIR"] + "/state.pt", weights_only=True)["model"]
    digest = hashlib.sha256(b"".join(model[name].numpy().tobytes() for name in sorted(model)))
    print("weights", digest.hexdigest(), flush=True)
sys.exit(code)
"""
MINUTE = timedelta(minutes=1)
LONG_S = 150.0  # of a wait for a training, on a machine that is busy with others
DIGITS = Path(__file__).parents[2] / "examples/digits"


@pytest.fixture
def ec2(tmp_path: Path) -> Iterator[Ec2]:
    with ec2_at(tmp_path / "ec2") as ec2:
        ec2.cloud.rules.boot = timedelta(seconds=1)
        ec2.cloud.rules.hidden = timedelta(seconds=1)
        ec2.cloud.rules.shutting_down = timedelta(seconds=1)
        allow_only(ec2.cloud.rules, make_policy())
        yield ec2


@pytest.fixture
def user(ec2: Ec2, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
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
        wait_until(lambda: not ec2.cloud.left() or user.cli("gc", code=None) is None, lambda: str(ec2.cloud.left()), 30)


def console(ec2: Ec2) -> str:
    """What the machines said, for a test that fails."""
    logs = [(each.life.id, each.log) for each in ec2.machines.values() if each.log.exists()]
    return "\n".join(f"--- {name}\n{log.read_text()[-3000:]}" for name, log in logs)


def test_a_job_runs(ec2: Ec2, user: User) -> None:
    name = user.submit('name: hello\nresources: {gpu: T4}\nrun: echo "on $(hostname)"; id -u\n', "--yes")
    try:
        job = user.ended(name)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{console(ec2)}") from error
    assert job.phase == "done"
    (life,) = ec2.cloud.history
    assert f"on {life.id}" in user.log(name)
    assert ec2.cloud.left().get("instances") is None


def test_no_capacity_then_an_interruption_then_the_end(ec2: Ec2, user: User, tmp_path: Path) -> None:
    """The first offer has no capacity, the second is taken back with notice, the third finishes: nothing is lost."""
    prices = [price for price in ec2.cloud.rules.spot if price.type == "g4dn.xlarge"]
    spot = sorted(prices, key=lambda price: parse_rate(price.usd))
    ec2.cloud.rules.stock["g4dn.xlarge", spot[0].zone, "spot"] = 0
    ec2.cloud.rules.notice = timedelta(seconds=20)
    (user.work / "train.py").write_bytes((DIGITS / "train.py").read_bytes())
    (user.work / "slow.py").write_text(SLOW)
    arguments = ["train.py", "--epochs", "6", "--width", "8"]
    name = "digits"
    task = user.task(
        "name: digits\nresources: {gpu: T4, spot: only}\nworkdir: .\ncheckpoint: {path: checkpoints, every: 2s}\n"
        f"run: exec {sys.executable} slow.py {' '.join(arguments[1:])}\n"
    )
    user.cli("run", "-d", "--yes", task)
    wait_for_log(user, name, "epoch   1/")
    (life,) = [each for each in ec2.cloud.history if each.lives]
    ec2.cloud.interrupt(life)
    try:
        user.wait(name, "done", LONG_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{console(ec2)}") from error
    job = user.ended(name)
    assert [attempt.outcome for attempt in job.attempts] == ["capacity", "preempted", "succeeded"], job.attempts
    check_bill(ec2, user, job.id)
    log = user.log(name)
    assert log.count("asked to leave") == log.count("resumed at") == 1
    assert log.split("weights ")[1].split()[0] == train_undisturbed(user.work, tmp_path / "alone", arguments)


def train_undisturbed(work: Path, checkpoints: Path, arguments: list[str]) -> str:
    """The digest of the weights of the same training, run here in one piece."""
    environ = {**os.environ, "REMUDA_CHECKPOINT_DIR": str(checkpoints), "PAUSE_S": "0"}
    command = [sys.executable, "slow.py", *arguments[1:]]
    done = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("weights ")[1].split()[0]


def check_bill(ec2: Ec2, user: User, job: str) -> None:
    """Every instance is charged for its life, in whole seconds as EC2 tells it, and at least for a minute."""
    charges = user.json("cost", job)["charges"]
    rates = {(price.type, price.zone): parse_rate(price.usd) for price in ec2.cloud.rules.spot}
    lives = [
        (life.launched_at.replace(microsecond=0), life.shut_at.replace(microsecond=0), rates[life.type, life.zone])
        for life in ec2.cloud.history
        if life.shut_at is not None
    ]
    assert len(lives) == len(ec2.cloud.history)
    own = [charge for charge in charges if charge["kind"] == "node"]
    assert [(moment(c["since"]), moment(c["until"])) for c in own] == [(began, ended) for began, ended, _ in lives]
    exact = sum(rate.over(max(MINUTE, ended - began)).micros for began, ended, rate in lives)
    assert abs(sum(charge["amount_micros"] for charge in charges) - exact) <= len(charges)


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def test_a_lost_server_finds_its_work_done(ec2: Ec2, user: User) -> None:
    """The work goes on without it, and what it did is handed over when the server is there again."""
    name = user.submit("name: long\nresources: {gpu: T4}\nrun: sleep 6; echo did it\n", "--yes")
    user.wait(name, "running")
    user.kill_server()
    (machine,) = ec2.machines.values()
    exit_file = machine.folder / "var/remuda/work/exit.json"
    wait_until(exit_file.exists, lambda: console(ec2))
    assert user.ended(name).phase == "done"
    assert "did it" in user.log(name)
    assert len(ec2.cloud.history) == 1


def test_a_lease_that_ends_ends_the_instance(ec2: Ec2, user: User) -> None:
    """The server is gone for good: the instance stops its work and shuts itself down, which terminates it."""
    name = user.submit(
        "name: alone\nresources: {gpu: T4}\nlimits: {unattended: 10s}\nrun: sleep 1000\ngrace: 1s\n", "--yes"
    )
    user.wait(name, "running")
    user.kill_server()
    (life,) = ec2.cloud.history
    wait_until(lambda: not life.lives, lambda: console(ec2), 90)
    assert life.instance.state_reason.code == "Client.InstanceInitiatedShutdown"
    assert ec2.cloud.left().get("instances") is None


def wait_for_log(user: User, name: str, text: str) -> None:
    """Wait until the job's log says something; looked at rarely, since a command takes a while."""
    user.wait(name, "running")
    deadline = time.monotonic() + PATIENCE_S
    while text not in (log := user.cli("logs", name, code=None)):
        assert time.monotonic() < deadline, log
        time.sleep(1)
