"""What AWS Batch and SageMaker tell of an ended job decides whether it was preempted or there was
no capacity. Text that a user or Cavvy wrote must not decide it.
"""

from datetime import UTC, datetime
from typing import Any

import pytest

from cavvy.providers.aws_batch import read_job as read_batch_job
from cavvy.providers.formats.services.aws_batch import (
    LOST_HOST,
    BatchJobRequest,
    BatchRetries,
    make_job_definition,
)
from cavvy.providers.sagemaker.jobs import read_job as read_training_job

LOST = "Host EC2 (instance i-0123456789abcdef0) terminated."


def tell_batch(**told: Any) -> dict[str, Any]:
    ids = {"jobId": "1", "jobName": "cavvy-1", "createdAt": 1_700_000_000_000}
    return {**ids, "status": "FAILED", "statusReason": LOST, **told}


def tell_training(**told: Any) -> dict[str, Any]:
    began = datetime(2026, 1, 1, tzinfo=UTC)
    return {
        "TrainingJobName": "cavvy-1",
        "TrainingJobStatus": "Failed",
        "SecondaryStatus": "Failed",
        "CreationTime": began,
        **told,
    }


@pytest.mark.parametrize(
    ("told", "preempted"),
    [
        ({}, True),
        ({"statusReason": "Essential container in task exited"}, False),
        ({"statusReason": f"Warning: {LOST}"}, False),
        # `terminate-job --reason`: the user's own words
        ({"isTerminated": True}, False),
        ({"isCancelled": True}, False),
        ({"status": "SUCCEEDED"}, False),
    ],
)
def test_a_batch_job_is_preempted_only_if_its_host_was_lost(
    told: dict[str, Any], preempted: bool
) -> None:
    assert read_batch_job("us-east-1", tell_batch(**told)).preempted is preempted


def test_the_retries_of_an_exported_job_match_the_same_reason() -> None:
    job = BatchJobRequest(
        name="a", queue="q", image="i", command=["true"], cpus=1, memory_mib=1024, nodes=1,
        retries=BatchRetries(attempts=3, exit_codes=(1,)),
    )  # fmt: skip
    strategy = make_job_definition(job)["retryStrategy"]
    assert strategy["evaluateOnExit"][0] == {"onStatusReason": LOST_HOST, "action": "RETRY"}


@pytest.mark.parametrize(
    ("reason", "full"),
    [
        ("CapacityError: Unable to provision requested ML compute capacity.", True),
        ("CapacityError", True),
        ("AlgorithmError: CapacityError: the queue of the work is full", False),
        ("CapacityErrors of the work, exit code: 1", False),
        ("", False),
    ],
)
def test_a_training_job_lacks_capacity_only_by_the_code_of_its_failure(
    reason: str, full: bool
) -> None:
    told = {"FailureReason": reason} if reason else {}
    assert read_training_job("us-east-1/a", tell_training(**told)).no_capacity is full


def test_a_wait_for_spot_that_took_too_long_is_a_lack_of_capacity() -> None:
    told = tell_training(TrainingJobStatus="Stopped", SecondaryStatus="MaxWaitTimeExceeded")
    assert read_training_job("us-east-1/a", told).no_capacity
