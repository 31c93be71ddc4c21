"""One job on three clouds, by the real command and server: Azure evicts its spot machine, Lambda
loses the next one, and the job ends at Google. It has one log, one history of checkpoints and one
bill.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.contract.azure_stand_in import SIZES
from tests.contract.lambda_stand_in import TYPES
from tests.providers.azure.contract.test_provider_azure import PROOF
from tests.providers.gcp.contract.test_provider_gcp import read_prices
from tests.system.booting_cloud import BOOTS
from tests.system.digits import train_undisturbed
from tests.system.trust import User
from tests.system.vm_jobs import LONG_S, check_bill, has_ended, start_digits, wait_for
from tests.system.vm_places import (
    AzurePlace,
    BootedPlace,
    GcpPlace,
    LambdaPlace,
    places_at,
    user_of,
)

from cavvy.client.wire import AttemptView, JobDetail
from cavvy.domain.offers import Purchase
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.vm.cloud import BillStart
from cavvy.server.open_state import read_egress

pytestmark = pytest.mark.system
PROVIDERS = ["azure", "lambda", "gcp"]
RESOURCES = (
    "{ordered: [{gpu: T4, spot: only, providers: [azure]}, {gpu: A10, providers: [lambda]}, "
    "{gpu: L4, spot: only, providers: [gcp]}]}"
)
GB = 10**9


@pytest.fixture
def places(tmp_path: Any) -> Iterator[list[BootedPlace]]:
    (tmp_path / "clouds").mkdir()
    with places_at(tmp_path / "clouds", AzurePlace, LambdaPlace, GcpPlace) as places:
        yield places


@pytest.fixture
def user(places: list[BootedPlace], tmp_path: Any) -> Iterator[User]:
    with user_of(tmp_path / "user", places) as user:
        yield user


@pytest.mark.proves(PROOF, "notice")
def test_a_job_that_two_clouds_lose_ends_at_the_third(
    places: list[BootedPlace], user: User
) -> None:
    azure, at_lambda, gcp = places
    start_digits(user, RESOURCES, holds=2)
    (machine,) = azure.cloud.billed()
    azure.cloud.left = 0  # after an eviction, a cloud often has no capacity
    azure.take(machine)
    user.wait("digits", lambda job: is_saved(job, "lambda"), LONG_S)
    (machine,) = at_lambda.cloud.billed()
    at_lambda.cloud.left = 0
    at_lambda.take(machine)
    wait_for(gcp, user, "digits")
    job = user.wait("digits", has_ended, LONG_S)

    # without the attempts whose cloud had no capacity
    job = msgspec.structs.replace(job, attempts=[each for each in job.attempts if each.running_at])
    assert [provider_of(each) for each in job.attempts] == PROVIDERS
    outcomes = [each.outcome for each in job.attempts]
    assert outcomes[0] == "preempted", job.attempts
    assert outcomes[1] in ("preempted", "node"), job.attempts
    assert outcomes[2] == "succeeded", job.attempts
    check_log(user)
    sent = check_checkpoints(user, job)
    check_costs(places, user.json("cost", job.id), job, sent)


def provider_of(attempt: AttemptView) -> str:
    return attempt.placement.partition("/")[0]


def is_saved(job: JobDetail, provider: str) -> bool:
    """Whether the job's attempt at the provider has uploaded a checkpoint."""
    return any(provider_of(each) == provider and each.checkpoint_at for each in job.attempts)


def check_log(user: User) -> None:
    """One log has all attempts, of which two were resumed, and the weights are those of a training
    that nothing interrupted.
    """
    log = user.log("digits")
    assert "asked to leave" in log  # by Azure, before the machine is gone
    assert log.count("resumed at") == 2
    weights = train_undisturbed()
    assert log.split("weights ")[1].split()[0] == weights


def check_checkpoints(user: User, job: JobDetail) -> dict[int, int]:
    """The numbers of the checkpoints go on from cloud to cloud. Returns the bytes that each attempt
    sent.
    """
    told = [text for kind, text in user.scenario("digits") if kind == "checkpoint"]
    numbers = [int(text.split()[1]) for text in told if text.startswith("checkpoint ")]
    assert len(numbers) >= 3
    assert all(one + 1 == other for one, other in pairwise(numbers)), numbers
    query = (
        "SELECT attempts.number, json_extract(nodes.document, '$.sent[0].bytes') "
        "FROM nodes JOIN attempts ON attempts.id = nodes.attempt_id"
    )
    path = f"file:{user.home}/cavvy.db?mode=ro"
    with closing(sqlite3.connect(path, uri=True)) as database:
        return dict(database.execute(query).fetchall())


def check_costs(
    places: list[BootedPlace], cost: Mapping[str, Any], job: JobDetail, sent: Mapping[int, int]
) -> None:
    """One bill has the machines of all clouds at their rates, and the traffic out of Azure and
    Google at their prices. The price of Lambda's traffic is unknown.
    """
    rates = [
        parse_rate(str(SIZES["Standard_NC4as_T4_v3"][1])),
        HourlyRate(TYPES["gpu_1x_a10"][1] * 10_000),
        find_gcp_rate(),
    ]
    prices = read_egress()
    for place, attempt, rate in zip(places, job.attempts, rates, strict=True):
        own = [each for each in cost["charges"] if each["attempt"] == attempt.number]
        alone = job_of(job, attempt)
        free = place.cloud.traits.bill_starts is BillStart.RUNNING
        boot = BOOTS if free else timedelta(0)
        machines: list[Rented] = list(place.cloud.machines)
        check_bill(alone, {**cost, "charges": own}, machines, rate, boot=boot)
        price = prices.get(provider_of(attempt))
        traffic = sum(each["amount_micros"] for each in own if each["kind"] == "traffic")
        assert sent[attempt.number] > 0
        expected = 0 if price is None else round(price.micros * sent[attempt.number] / GB)
        assert traffic == expected
        assert price is None or traffic > 0
    assert cost["total_micros"] == sum(each["amount_micros"] for each in cost["charges"])


def job_of(job: JobDetail, attempt: AttemptView) -> JobDetail:
    """The job as if it had only this attempt."""
    return msgspec.structs.replace(job, attempts=[attempt])


def find_gcp_rate() -> HourlyRate:
    (rate,) = [
        each.rate
        for each in read_prices("gcp")
        if (each.instance_type, each.region, each.purchase)
        == ("g2-standard-4", "us-central1", Purchase.SPOT)
    ]
    return rate
