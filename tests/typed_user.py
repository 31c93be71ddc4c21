"""A user's program, which `make check` checks with `mypy --strict`; no test runs it.

An ignored error that mypy does not find is an error itself, so the mistakes below must be found.
"""

from collections.abc import AsyncIterator, Generator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import assert_type

import cavvy
from cavvy import (
    AsyncClient,
    AsyncJob,
    Client,
    Input,
    Job,
    JobCost,
    JobFailed,
    JobStatus,
    Limits,
    Resources,
    Task,
)


def train(client: Client) -> Decimal:
    task = Task(
        "python train.py",
        workdir=Path("."),
        params={"lr": 0.1, "epochs": {"type": "int", "default": 3, "min": 1}},
        resources=Resources(gpu=["H100:8", {"name": "A100", "count": 8}], spot="auto"),
        limits={"duration": timedelta(hours=2), "budget": Decimal(5)},
        inputs=[Input(source="s3://bucket/data", target="data")],
    )
    assert_type(task.replace(nodes=2), Task)
    job = client.submit(task, params={"lr": 0.2}, max_cost=20)
    client.submit(task, after=job)
    client.submit(task, after=[job, "prepare:any"])
    assert_type(job, Job)
    assert_type(job.logs(follow=True), Generator[str, None, None])
    try:
        assert_type(job.wait(timeout="2h"), JobStatus)
    except JobFailed as error:
        assert_type(error.status, JobStatus)
    assert_type(job.metrics(), dict[str, float | str])
    assert_type(job.cost(), JobCost)
    return job.cost().total_usd


async def train_async(client: AsyncClient, task: Task) -> None:
    job = await client.submit(task)
    await client.submit(task, after=[job])
    assert_type(job, AsyncJob)
    assert_type(await job.wait("running"), JobStatus)
    assert_type(job.logs(), AsyncIterator[str])


def mistakes(client: Client) -> None:
    Task("true", resources={"spott": "auto"})  # type: ignore[typeddict-unknown-key]
    Task("true", resources=Resources(spot="sometimes"))  # type: ignore[typeddict-item]
    Task("true", nodez=2)  # type: ignore[call-arg]
    Limits(budget=[5])  # type: ignore[typeddict-item]
    Input(source="data")  # type: ignore[typeddict-item]
    client.submit("task.yaml")  # type: ignore[arg-type]
    cavvy.Clinet()  # type: ignore[attr-defined]
