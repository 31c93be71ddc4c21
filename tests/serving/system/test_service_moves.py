"""One job moves from a machine of EC2 to a managed service of the same account, and remains one job:
one log, one history of checkpoints, one bill.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.sagemaker_stand_in import PRICES, ROLE
from tests.ec2.machines import Ec2
from tests.providers.aws.contract.test_provider_sagemaker import PROOF, TRAITS
from tests.providers.aws.system.test_aws_jobs import console, quick_ec2_at, user_of
from tests.providers.seam.system.test_managed_jobs import IMAGE, SageMakerContainers
from tests.system.containers import ContainerCloud
from tests.system.digits import ARGUMENTS, train_undisturbed, write_digits
from tests.system.trust import User, wait_until
from tests.system.vm_jobs import moment

from cavvy.client.wire import AttemptView, JobDetail
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.providers.contract import memory_cloud
from cavvy.providers.contract.rest_stand_in import RestServer

pytestmark = pytest.mark.system
LONG_S = 240.0  # of a wait for a training, on a machine that is busy with others
TASK = f"""
name: digits
resources: {{gpu: T4, spot: only}}
workdir: .
checkpoint: {{path: checkpoints, every: 1s}}
run: exec {sys.executable} slow.py {" ".join(ARGUMENTS)}
"""


@contextmanager
def sagemaker_at(root: Path, user: User) -> Iterator[SageMakerContainers]:
    """SageMaker, in the settings of a user of EC2 beside EC2."""
    cloud, server = ContainerCloud(TRAITS, root / "containers"), RestServer()
    api = SageMakerContainers(cloud)
    user.settings(
        f"{user.config.read_text()}[providers.sagemaker]\nregions = 'us-east-1'\n"
        f"endpoint = '{server.add(api)}'\nrole = '{ROLE}'\nbucket = 's3://bucket/cavvy'\n"  # type: ignore[arg-type]  # has `reply`
        f"image = '{IMAGE}'\ninstances = 'ml.g4dn.xlarge'\n"
    )
    try:
        yield api
        user.cli("down", "--all", "--yes")
        wait_until(
            lambda: not cloud.billed() or user.cli("gc", code=None) is None,
            lambda: str(cloud.billed()),
            pause_s=0.5,
        )
        assert api.bugs == []
    finally:
        cloud.close()
        server.close()


@pytest.mark.proves(PROOF, "spot")
@pytest.mark.timeout(600)  # two trainings, one after the other, on a busy machine
def test_a_job_moves_from_ec2_spot_to_managed_spot_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EC2 takes its spot instance back and has no other."""
    monkeypatch.setattr(memory_cloud, "BOOT", timedelta(0))
    with (
        quick_ec2_at(tmp_path / "ec2") as ec2,
        user_of(ec2, tmp_path / "user") as user,
        sagemaker_at(tmp_path, user) as sagemaker,
    ):
        ec2.cloud.rules.notice = timedelta(seconds=20)
        write_digits(user.work, pytorch=True)
        user.cli("run", "-d", "--yes", user.task(TASK))
        user.wait("digits", lambda job: any(each.checkpoint_at for each in job.attempts), LONG_S)
        (life,) = [each for each in ec2.cloud.history if each.lives]
        for price in ec2.cloud.rules.spot:
            ec2.cloud.rules.stock[price.type, price.zone, "spot"] = 0
        ec2.cloud.interrupt(life)
        try:
            user.wait("digits", "done", LONG_S)
        except AssertionError as error:
            said = f"{console(ec2)}\n{sagemaker.cloud.logs()}"
            raise AssertionError(f"{error}\n{user.said('digits')}\n{said}") from error
        job = user.ended("digits")
        check_attempts(job)
        (body,) = sagemaker.bodies.values()
        assert body["EnableManagedSpotTraining"] is True
        check_log(user)
        check_checkpoints(user)
        check_bill(ec2, sagemaker, job, user.json("cost", job.id))


def check_attempts(job: JobDetail) -> None:
    """EC2, then SageMaker; EC2 had no capacity when it was tried again."""
    worked = [each for each in job.attempts if each.outcome != "capacity"]
    assert [each.outcome for each in worked] == ["preempted", "succeeded"], job.attempts
    assert [provider_of(each) for each in worked] == ["aws", "sagemaker"]
    assert {provider_of(each) for each in job.attempts if each not in worked} <= {"aws"}


def provider_of(attempt: AttemptView) -> str:
    return str(json.loads(bytes(attempt.offer))["provider"])


def check_log(user: User) -> None:
    """One log has each epoch once and in order, and ends with the weights of a training without an
    interruption.
    """
    log = user.log("digits")
    assert log.count("resumed at") == 1
    lines = [line for line in log.splitlines() if line.startswith("epoch ")]
    epochs = [int(line.split()[1].split("/")[0]) for line in lines]
    assert epochs == list(range(1, int(ARGUMENTS[1]) + 1)), log
    assert log.split("weights ")[1].split()[0] == train_undisturbed(pytorch=True)


def check_checkpoints(user: User) -> None:
    """The second attempt restored the newest checkpoint of the first one, and continued the same
    series of numbers.
    """
    texts = user.scenario("digits")
    restored = [text for kind, text in texts if kind == "restored"]
    assert len(restored) == 1, texts
    numbers = [int(text.split()[1]) for kind, text in texts if kind == "checkpoint"]
    assert numbers == sorted(set(numbers)), texts


def check_bill(
    ec2: Ec2, sagemaker: SageMakerContainers, job: JobDetail, cost: dict[str, Any]
) -> None:
    """One bill has the machine of each provider, each at the price of its provider."""
    own = {each.number: provider_of(each) for each in job.attempts}
    nodes = {own[each["attempt"]]: each for each in cost["charges"] if each["kind"] == "node"}
    assert sorted(nodes) == ["aws", "sagemaker"]
    (life,) = ec2.cloud.history
    spot = {(each.type, each.zone): parse_rate(each.usd) for each in ec2.cloud.rules.spot}
    (machine,) = sagemaker.cloud.machines
    rates = {
        "aws": spot[life.type, life.zone],
        "sagemaker": parse_rate(PRICES["ml.g4dn.xlarge"]),
    }
    times = {"aws": (life.launched_at, life.shut_at), "sagemaker": (machine.at, machine.ended)}
    for provider, charge in nodes.items():
        rate: HourlyRate = rates[provider]
        since, until = moment(charge["since"]), moment(charge["until"])
        began, ended = times[provider]
        assert abs(since - began) < timedelta(seconds=1)
        assert ended is not None
        assert abs(until - ended) < timedelta(seconds=1)
        assert charge["rate_micros_per_hour"] == rate.micros_per_hour
        assert charge["amount_micros"] == rate.over(until - since).micros
    assert sum(each["amount_micros"] for each in cost["charges"]) == job.spent_micros
